# What every step may use.
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

have() { command -v "$1" > /dev/null 2>&1; }

# advise WORDS: what a person should do if this step fails
advise() { echo "$*" >> "$B/advice"; }

# fail WORDS: end this step
fail() { echo "$*"; exit 1; }

# run COMMAND...: run it, known by its words if it fails
run() {
    echo "$*" > "$B/command"
    "$@"
}

# keep NAME VALUE: a variable for the steps after this one, also when this one is skipped
keep() { printf "export %s='%s'\n" "$1" "$(printf %s "$2" | sed "s/'/'\\\\''/g")" >> "$B/vars"; }

# from_here NUMBER: what commands left from this one on counts no more, be it of this image or of another one
from_here() {
    for each in "$SKYPOOL_HOME"/stamps/run-*; do
        number=${each##*/run-}
        [ ! -e "$each" ] || [ "${number%%-*}" -lt "$1" ] || rm -f "$each"
    done
}

# as_root COMMAND...: run it with root's rights
as_root() {
    if [ "$(id -u)" = 0 ]; then
        run "$@"
    elif have sudo && sudo -n true 2> /dev/null; then
        run sudo -n -E "$@"
    else
        echo "$*" > "$B/command"
        advise "it needs root: give this user passwordless sudo (echo '$(id -un) ALL=(ALL) NOPASSWD:ALL' in /etc/sudoers.d/skypool), log in as root, or run it there by hand: $*"
        fail "no root and no passwordless sudo for $(id -un)"
    fi
}

# installed PACKAGE...: whether Debian packages are there; NAME=VERSION asks for that version
installed() {
    for each in "$@"; do
        state=$(dpkg-query -W -f '${db:Status-Status} ${Version}' "${each%%=*}" 2> /dev/null) || return 1
        case $each in
            *=*) [ "$state" = "installed ${each#*=}" ] || return 1 ;;
            *) [ "${state%% *}" = installed ] || return 1 ;;
        esac
    done
}

# at_best COMMAND...: as root if that can be had; nothing is lost if it fails
at_best() {
    [ "${SKYPOOL_CHANGES:-yes}" != no ] || return 0
    (as_root "$@") || echo "it goes on without"
    : > "$B/advice"
}

# mend: finish what an interrupted dpkg left behind, unless another one is at work
mend() {
    if [ -n "$(dpkg --audit 2> /dev/null)" ] || ls /var/lib/dpkg/updates/[0-9]* > /dev/null 2>&1; then
        at_best dpkg --configure -a
        cut=$(dpkg-query -W -f '${db:Status-Eflag} ${Package}\n' | sed -n 's/^reinstreq //p')
        # shellcheck disable=SC2086
        [ -z "$cut" ] || at_best apt-get $APT -y -q install --reinstall $cut # which apt calls installed otherwise
    fi
}

# at_hand PACKAGE...: whether they are installed, or provided by what is: apt takes libglib2.0-0t64 for libglib2.0-0
at_hand() {
    for each in "$@"; do
        installed "$each" || provided "${each%%[:=]*}" "${each#"${each%%=*}"}" || fail "$each is not installed"
    done
}

# provided NAME [=VERSION]: whether an installed package stands for one of this name
provided() {
    dpkg-query -W -f '${db:Status-Status}, ${Provides}\n' 2> /dev/null | sed -n 's/^installed, //p' |
        sed 's/, /\n/g' | if [ -n "$2" ]; then grep -qxF "$1 (= ${2#=})"; else sed 's/ .*//' | grep -qxF "$1"; fi
}

# apt_install PACKAGE...: install what is missing; the lists are read again when they do not know a package
apt_install() {
    installed "$@" && return
    if [ "${SKYPOOL_CHANGES:-yes}" = no ]; then
        ! (at_hand "$@") > /dev/null || return 0
        echo "apt-get install $*" > "$B/command"
        advise "this machine is yours and is left as it is; install it yourself: sudo apt-get install $*"
        fail "not installed: $*"
    fi
    have apt-get || { advise "use a Debian or Ubuntu base, or install $* there by hand"; fail "there is no apt-get on this machine"; }
    mend
    case "$*" in
        *=*) set -- --allow-downgrades "$@" ;; # of a version that was asked for by its number
    esac
    # shellcheck disable=SC2086
    as_root apt-get $APT -y -q install "$@" && return
    # shellcheck disable=SC2086
    as_root apt-get $APT -q update
    # shellcheck disable=SC2086
    as_root apt-get $APT -y -q install "$@"
}
APT='-o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -o Dpkg::Use-Pty=0 --no-install-recommends'
