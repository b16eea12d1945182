# AWS Neuron: driver, collectives, runtime and tools. PACKAGES: each with the start of its version, NAME=2.27.34., if one
# was asked for. FRAMEWORK: torch or jax, the one whose environment on a Neuron image is taken, and MINOR: the Python that it
# must have, or nothing. INDEX: where pip finds more.
PATH=/opt/aws/neuron/bin:$PATH
export PATH

# there: whether every package is, in the version asked for
there() {
    for each in $PACKAGES; do
        state=$(dpkg-query -W -f '${db:Status-Status} ${Version}' "${each%%=*}" 2> /dev/null) || return 1
        case $each in
            *=*) case $state in "installed ${each#*=}"*) ;; *) return 1 ;; esac ;;
            *) [ "${state%% *}" = installed ] || return 1 ;;
        esac
    done
}

# shown: how many devices neuron-ls sees; what it said is in $B/neuron
shown() {
    timeout 60 neuron-ls --json-output > "$B/neuron" 2>&1 || true
    grep -c '"neuron_device"' "$B/neuron" || true
}

neuron() {
    distribution
    keep PATH "$PATH"
    mend
    if ! there && { [ "$(shown)" = 0 ] || [ "$PACKAGES" != "${PACKAGES#*=}" ]; }; then install_neuron; fi
    if [ "$(shown)" = 0 ] && ! in_container; then module neuron || true; fi
    environment
}

install_neuron() {
    may_change "install AWS Neuron's packages"
    with_apt "install AWS Neuron's packages"
    at=${SKYPOOL_NEURON_APT:-https://apt.repos.neuron.amazonaws.com}
    repository neuron SKYPOOL_NEURON_APT "$at/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB" "$at" "$VERSION_CODENAME" main
    headers
    wanted=
    for each in $PACKAGES; do
        case $each in *=*) each=$(exactly "${each%%=*}" "${each#*=}") ;; esac
        wanted="$wanted $each"
    done
    APT="$APT --allow-downgrades"
    # shellcheck disable=SC2086
    apt_install $wanted
}

# exactly NAME START: NAME=VERSION for the newest version that starts so
exactly() {
    newest=$(apt-cache madison "$1" | awk -F ' *[|] *' -v start="$2" 'index($2, start) == 1 { print $2; exit }')
    [ -n "$newest" ] || {
        echo "apt-cache madison $1" > "$B/command"
        advise "the repository has no $1 $2*: it has $(apt-cache madison "$1" | awk -F ' *[|] *' '{ print $2 }' | xargs); ask for another Neuron, or for none to get the newest"
        fail "no $1 $2*" >&2
    }
    echo "$1=$newest"
}

# usable PYTHON: whether it starts, and is of the right version
usable() {
    if [ -n "$MINOR" ]; then fits "$MINOR" "$1" > /dev/null; else "$1" -c '' 2> /dev/null; fi
}

# environment: of a Neuron image, the newest one for the framework and of the right Python, with nothing built on top
environment() {
    case $FRAMEWORK in
        jax) names='jax' ;;
        *) names='pytorch|torch_neuronx' ;;
    esac
    found=
    for each in $(find /opt -maxdepth 1 -name 'aws_neuronx_venv_*' | grep -E "_venv_($names)_[0-9_]+\$" | sed -E 's/.*[a-z]_([0-9_]+)$/\1 &/' | sort -rV | cut -d ' ' -f 2); do
        if usable "$each/bin/python"; then
            found=$each
            break
        fi
        echo "$each is not taken: its Python does not start${MINOR:+, or is no $MINOR}"
    done
    [ -n "$found" ] || return 0
    echo "this image brings $found"
    keep SKYPOOL_VENV "$found"
    if ! grep -qsF "$INDEX" "$found/pip.conf" /etc/pip.conf; then
        printf '[global]\nextra-index-url = %s\n' "$INDEX" > "$B/pip.conf"
        at_best install -m 644 "$B/pip.conf" "$found/pip.conf"
    fi
}

neuron_check() {
    echo "neuron-ls --json-output" > "$B/command"
    number=$(shown)
    [ "$number" != 0 ] || {
        cat "$B/neuron"
        advise "neuron-ls sees no device: this must be an inf2, trn1 or later instance, with the module loaded (modprobe neuron; dmesg | grep -i neuron); a program of another user that holds every device is shown by neuron-ls -a"
        fail "neuron-ls shows no device"
    }
    enough "$number" "neuron-ls --json-output"
}
