# Runs a command on a fake machine, if the machine accepts commands. $0 is the machine's folder. $1 is the name of the
# file there that exists while the machine accepts commands. $2 is the text for stderr if it does not. The other
# arguments are the command.
# shellcheck shell=sh
[ -e "$0/$1" ] || {
    echo "$2" >&2
    exit 255
}
shift 2
cd "$0/home" && exec "$@"
