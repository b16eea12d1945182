# Lets a command in to a fake machine that is up. $0 is the machine's folder, $1 the file there that says so, $2 what
# ssh would say otherwise; the command follows.
# shellcheck shell=sh
[ -e "$0/$1" ] || {
    echo "$2" >&2
    exit 255
}
shift 2
cd "$0/home" && exec "$@"
