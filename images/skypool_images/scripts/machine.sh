# What the recipes share: which machine this is, its PCI devices, its apt, its kernel modules.

NET='-o DPkg::Lock::Timeout=300 -o Acquire::Retries=3'

# distribution: ID, VERSION_ID and VERSION_CODENAME of /etc/os-release, KERNEL, and FAMILY: ubuntu, debian or other
# shellcheck disable=SC2034 # not every recipe uses each of them
distribution() {
    ID=linux ID_LIKE='' VERSION_ID='' VERSION_CODENAME='' FAMILY=other
    # shellcheck disable=SC1091
    [ ! -r /etc/os-release ] || . /etc/os-release
    KERNEL=$(uname -r)
    case " $ID $ID_LIKE " in
        *' ubuntu '*) FAMILY=ubuntu VERSION_CODENAME=${UBUNTU_CODENAME:-$VERSION_CODENAME} ;;
        *' debian '*) FAMILY=debian ;;
    esac
}

# at_least VERSION FLOOR: whether it is that or newer; an empty floor is always reached
at_least() { [ -z "$2" ] || [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]; }

# pci VENDOR: device ids of that vendor's displays and accelerators on the PCI bus, one on a line
pci() {
    for each in /sys/bus/pci/devices/*; do
        [ "$(cat "$each/vendor" 2> /dev/null)" = "$1" ] || continue
        case $(cat "$each/class" 2> /dev/null) in
            0x03* | 0x12*) cat "$each/device" ;;
        esac
    done
}

# expect_pci VENDOR NAME: end here if this machine has a PCI bus without such a device
expect_pci() {
    [ -d /sys/bus/pci/devices ] || return 0
    [ -z "$(pci "$1")" ] || return 0
    echo "look for PCI vendor $1 in /sys/bus/pci/devices" > "$B/command"
    advise "this machine has no $2 device: nothing installed here could make one appear; rent a machine that has it, or ask for another accelerator"
    fail "no $2 device on the PCI bus"
}

# in_container: whether the kernel belongs to somebody else
in_container() {
    [ -e /.dockerenv ] || [ -e /run/.containerenv ] || [ -n "${container:-}${KUBERNETES_SERVICE_HOST:-}" ]
}

# may_change WORDS: end here if this machine must stay as it is, or its kernel cannot be changed from here
may_change() {
    echo "$1" > "$B/command"
    if [ "${SKYPOOL_CHANGES:-yes}" = no ]; then
        advise "this machine is yours and is left as it is; do it yourself: $1"
        fail "not allowed here: $1"
    fi
    if in_container; then
        advise "this is a container and drivers belong to its host: $1 there, and start the container with its devices (docker run --gpus all, --device …)"
        fail "not possible in a container: $1"
    fi
}

# with_apt WORDS: end here if this machine has other packages than Debian's
with_apt() {
    have apt-get || {
        echo "$1" > "$B/command"
        advise "only Debian and Ubuntu are known here: $1 by hand, or take an image that has it"
        fail "there is no apt-get on this machine"
    }
}

# known PACKAGE: whether apt could install it
known() { apt-cache show --no-all-versions "$1" > /dev/null 2>&1; }

# lists: read every package list again; UNREAD=yes if some could not be read, which apt calls no failure
UNREAD=no
lists() {
    # shellcheck disable=SC2086
    as_root apt-get $NET -q update > "$B/update" 2>&1 || UNREAD=yes
    cat "$B/update"
    ! grep -q 'Some index files failed' "$B/update" || UNREAD=yes
}

# if_read: end here if there was nothing to be found because some lists could not be read
if_read() {
    [ "$UNREAD" = yes ] || return 0
    advise "apt cannot read its package lists (see above): see that this machine reaches what its /etc/apt/sources.list names, or name a mirror there"
    fail "package lists could not be read"
}

# fetch URL FILE: download as root; through apt, which is on every machine that has packages to install
fetch() {
    case $1 in
        https:*) [ -e /etc/ssl/certs/ca-certificates.crt ] || apt_install ca-certificates ;;
    esac
    # shellcheck disable=SC2086
    as_root /usr/lib/apt/apt-helper $NET -o APT::Sandbox::User=root download-file "$1" "$2"
}

# repository NAME VARIABLE KEY-URL URI SUITE...: apt sources that may be signed with this key alone. One that this machine
# has already, under whatever key, is left alone: apt stops altogether when two lists name two keys for one source.
repository() {
    name=$1 variable=$2 key=$3
    shift 3
    list=/etc/apt/sources.list.d/skypool-$name.list ring=/etc/apt/keyrings/skypool-$name
    if [ ! -e "$list" ] && grep -rqsF "${1%/}" /etc/apt/sources.list /etc/apt/sources.list.d; then
        lists
        return
    fi
    as_root mkdir -p /etc/apt/keyrings
    [ -e "$ring.asc" ] || [ -e "$ring.gpg" ] || key "$ring" "$key" || unreachable "$variable" "$key"
    if [ -e "$ring.asc" ]; then ring=$ring.asc; else ring=$ring.gpg; fi
    printf 'deb [signed-by=%s] %s\n' "$ring" "$*" > "$B/sources"
    if [ "$name" = rocm ]; then rocm_sources "$ring" "$1" "$2" > "$B/sources"; fi
    cmp -s "$B/sources" "$list" || as_root install -m 644 "$B/sources" "$list"
    if ! one_list "$list"; then
        if grep -qE 'EXPKEYSIG|NO_PUBKEY|BADSIG' "$B/update"; then
            echo "the key has changed, it is fetched again"
            as_root rm -f "$ring"
            if key "${ring%.*}" "$key" && [ -e "$ring" ] && one_list "$list"; then return; fi
        fi
        said=$(cat "$B/command")
        as_root rm -f "$list" # with it, every other use of apt would fail, too
        echo "$said" > "$B/command"
        unreachable "$variable" "$1"
    fi
}

# key FILE URL: into FILE.asc or FILE.gpg, whichever it is
key() {
    as_root rm -f "$1.new"
    fetch "$2" "$1.new" || return 1
    if grep -q 'BEGIN PGP PUBLIC KEY' "$1.new"; then
        as_root mv "$1.new" "$1.asc"
    else
        as_root mv "$1.new" "$1.gpg"
    fi
    as_root chmod 644 "$1".[ag][sp][cg]
}

# one_list FILE: read the lists that this file names, and those only
one_list() {
    status=0
    # shellcheck disable=SC2086
    as_root apt-get $NET -q -o APT::Update::Error-Mode=any -o APT::Get::List-Cleanup=0 \
        -o Dir::Etc::sourcelist="$1" -o Dir::Etc::sourceparts=- update > "$B/update" 2>&1 || status=$?
    cat "$B/update"
    return "$status"
}

# unreachable VARIABLE URL
unreachable() {
    advise "packages come from $2 and it does not answer, or not as it should (see above; it may not have this release, ${VERSION_CODENAME:-unknown}): try it with curl from there, or set $1 to a mirror in the machine's environment"
    fail "no packages from $2"
}

# module NAME: load it; says why it cannot be loaded
module() {
    have modprobe || apt_install kmod
    if as_root modprobe "$1" > "$B/modprobe" 2>&1; then return; fi
    cat "$B/modprobe"
    if grep -qiE 'key was rejected|key not available|operation not permitted|lockdown' "$B/modprobe"; then
        advise "Secure Boot refuses the module $1, for it is not signed: switch Secure Boot off for this machine, or take an image whose driver is signed for its kernel"
    elif grep -qiE 'exec format error|invalid module format|unknown symbol' "$B/modprobe"; then
        advise "the module $1 was built for another kernel than the running $KERNEL: reboot into the kernel it was built for, or install linux-headers-$KERNEL and run: dkms autoinstall"
    elif grep -qi 'not found' "$B/modprobe"; then
        advise "there is no module $1 for the running kernel $KERNEL: see the build's log in /var/lib/dkms/*/*/build/make.log; after an upgrade of the kernel, reboot"
    elif grep -qi 'no such device' "$B/modprobe"; then
        advise "the driver is there, but it supports no device of this machine: it may be too old or too new for it"
    fi
    return 1
}

# headers: what is needed to build modules for the running kernel
headers() {
    installed "linux-headers-$KERNEL" || known "linux-headers-$KERNEL" || lists
    known "linux-headers-$KERNEL" || {
        if_read
        echo "apt-get install linux-headers-$KERNEL" > "$B/command"
        advise "no headers for the running kernel $KERNEL in apt, so no driver can be built for it: apt-get dist-upgrade and reboot, or take an image that has the driver"
        fail "no package linux-headers-$KERNEL"
    }
    apt_install "linux-headers-$KERNEL"
}

# enough HAVE COMMAND: whether that many devices are as many as were asked for
enough() {
    [ "$1" -lt "$COUNT" ] || return 0
    echo "$2" > "$B/command"
    advise "$1 of $COUNT devices are to be seen: look for errors of the others in dmesg; a device that is missing after a reboot is broken, so give this machine back"
    fail "$2 shows $1 devices of $COUNT"
}
