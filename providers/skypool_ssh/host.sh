# What the driver asks of a host: plain POSIX shell, as no Python need be there. Answers are lines that begin with @.
umask 077
lock=host.$(uname -n).lock

# ours CLAIM: whether it is on this host: others may have the same home, by NFS
ours() {
    [ ! -s "${1%/claim}/host" ] || [ "$(cat "${1%/claim}/host")" = "$(uname -n)" ]
}

# living FILE: the pid of the keeper that a keeper.json tells of, if that process still lives
living() {
    [ -f "$1" ] || return 1
    # shellcheck disable=SC2046
    set -- $(tr -cs 0-9 ' ' < "$1")
    [ $# = 2 ] || return 1
    # shellcheck disable=SC2046
    set -- "$@" $(sed 's/.*) //' "/proc/$1/stat" 2> /dev/null)
    [ "${22:-}" = "$2" ] && [ "$3" != Z ] && echo "$1"
}

# state FOLDER: of the node there: running, starting or ended; who starts has 15 minutes, or for as long as steps run
state() {
    if living "$1/keeper.json" > /dev/null; then
        echo running
    elif [ -e "$1/keeper.json" ]; then
        echo ended
    elif [ -n "$(find "$1/claim" -mmin -15 2> /dev/null)" ] || ! flock -n "$lock" true; then
        echo starting
    else
        echo ended
    fi
}

# look: every node of a pool here
look() {
    cd "$HOME/.skypool" 2> /dev/null || return 0
    for claim in pools/*/claim; do
        [ ! -s "$claim" ] || ! ours "$claim" || echo "@node $(state "${claim%/claim}") $(cat "$claim")"
    done
}

# take POOL RANK TOKEN OWNER: claim this host for a node, unless it serves another one
take() {
    mkdir -p "$HOME/.skypool/pools" && cd "$HOME/.skypool" || exit
    command -v flock > /dev/null || { echo "flock is missing: install util-linux" >&2; exit 1; }
    exec 7>> pools/lock
    flock 7
    for claim in pools/*/claim; do
        { [ -s "$claim" ] && ours "$claim"; } || continue
        [ "$(cat "$claim")" != "$*" ] || { echo @taken; return; }
        [ "$(state "${claim%/claim}")" = ended ] || { echo "@busy $(cat "$claim")"; return; }
        rm -rf "${claim%/claim}"
    done
    # the last pool's connection may be just closing
    flock -w 3 "$lock" true 7>&- || { echo "@busy $(tr -d "'" < "$lock" | sed 's/ of / ? ? /')"; return; }
    folder=pools/$1.$2
    # whole or not there: half a claim would speak of a pool that nobody has
    mkdir -p "$folder" && uname -n > "$folder/host" && echo "$*" > "$folder/claim.part" &&
        mv "$folder/claim.part" "$folder/claim" && { echo @taken; return; }
    rm -rf "$folder"
    echo "nothing can be written to $PWD: is its disk full? ($(df -Pk . | awk 'END {print $4}') KiB are free)" >&2
    exit 1
}

# below PID...: every process under these, themselves not
below() {
    todo="$*"
    all=$(sed -n 's/^\([0-9]*\) (.*) [^ZX] \([0-9]*\) .*/\1 \2/p' /proc/[0-9]*/stat 2> /dev/null)
    while [ -n "$todo" ]; do
        todo=$(echo "$all" | while read -r pid parent; do
            case " $todo " in *" $parent "*) printf '%s ' "$pid" ;; esac
        done)
        printf '%s' "$todo"
    done
}

# holders: who holds the lock that a pool has on this host
holders() {
    # shellcheck disable=SC2012
    ls -l /proc/[0-9]*/fd/9 2> /dev/null | sed -n "s|.* /proc/\([0-9]*\)/fd/9 -> $(pwd -P)/$lock\$|\1|p"
}

# within TENTHS COMMAND...: wait until the command fails; whether it did in that time
within() {
    tenths=$1
    shift
    while "$@" > /dev/null; do
        [ "$tenths" -gt 0 ] || return 1
        tenths=$((tenths - 1))
        sleep 0.1
    done
}

# left PID...: which of these live
left() {
    # shellcheck disable=SC2048
    for each in $*; do
        case $(sed 's/.*) //' "/proc/$each/stat" 2> /dev/null) in '' | Z* | X*) ;; *) printf '%s ' "$each" ;; esac
    done | grep .
}

# end POOL RANK: end the keeper of a node and all that is under it, and see that it is gone
end() {
    cd "$HOME/.skypool" 2> /dev/null || { echo @gone; return; }
    folder=pools/$1.$2
    [ ! -d "$folder" ] || flock -w 4 "$folder/lock" true 2> /dev/null # who starts an agent there holds it
    keeper=$(living "$folder/keeper.json")
    # shellcheck disable=SC2086
    victims=$(below $keeper)
    if [ -n "$keeper" ] && ! within 15 living "$folder/keeper.json"; then
        kill -TERM "$keeper" 2> /dev/null
        within 25 living "$folder/keeper.json" || victims="$keeper $victims $(below "$keeper")"
    fi
    # shellcheck disable=SC2046
    case $(cat "$lock" 2> /dev/null) in
        "'$1' of "* | "$1 of "*) victims="$victims $(holders) $(below $(holders))" ;; # a bootstrap nobody waits for
    esac
    # shellcheck disable=SC2086
    victims=$(left $victims)
    # shellcheck disable=SC2086
    [ -z "$victims" ] || kill -KILL $victims 2> /dev/null
    rest=
    within 15 left "$victims" || rest=$(left "$victims")
    [ -n "$rest" ] || rm -rf "$folder"
    if [ -n "$rest" ] || [ -e "$folder" ]; then echo "@left $rest"; else echo @gone; fi
}
