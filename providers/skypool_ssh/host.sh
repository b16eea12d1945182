# Functions that the driver runs on a host, in POSIX shell because there may be no Python.
# Lines that begin with @ are their answers.
umask 077
lock=host.$(uname -n).lock

# ours CLAIM: succeed if a claim is for this host. Several hosts may share a home folder by NFS.
ours() {
    [ ! -s "${1%/claim}/host" ] || [ "$(cat "${1%/claim}/host")" = "$(uname -n)" ]
}

# living FILE: print the pid of the keeper that a keeper.json names, or fail if that process has ended. It must be a
# keeper of this user, so that no other process gets a signal.
living() {
    [ -f "$1" ] || return 1
    # shellcheck disable=SC2046
    set -- $(tr -cs 0-9 ' ' < "$1")
    [ $# = 2 ] && [ "$(stat -c %u "/proc/$1" 2> /dev/null)" = "$(id -u)" ] || return 1
    grep -qsx skypool-keeper "/proc/$1/comm" || return 1
    # shellcheck disable=SC2046
    set -- "$@" $(sed 's/.*) //' "/proc/$1/stat" 2> /dev/null)
    [ "${22:-}" = "$2" ] && [ "$3" != Z ] && echo "$1"
}

# enter: go to skypool's folder, or fail if there is none; end here if another user can change what is in it
enter() {
    cd "$HOME/.skypool" 2> /dev/null || return
    why=$(closed "$HOME/.skypool")
    [ -n "$why" ] || return 0
    echo "its folder $HOME/.skypool is not used: $why; take the others' right to change it away (chmod go-w), or remove it" >&2
    exit 1
}

# state FOLDER: print the state of the node there: running, starting or ended.
# A node counts as starting for 15 minutes, and for as long as its setup holds the host's lock.
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

# away FOLDER: remove the folder of a node, but nothing that calls have mounted in it: that is unmounted first
away() {
    at=$(cd "$1" 2> /dev/null && pwd -P | sed 's/ /\\040/g') || return 0
    while read -r _ _ _ _ place _; do
        case $place in
        "$at"/*)
            place=$(printf %b "$place") # a space is \040 there
            umount -l "$place" || fusermount3 -uz "$place" || fusermount -uz "$place"
            ;;
        esac
    done < /proc/self/mountinfo 2> /dev/null
    if grep -qF " $at/" /proc/self/mountinfo; then
        rm -f "$1/claim" "$1/keeper.json" "$1/host" # no node any more; the rest stays, with the mount
    else
        rm -rf "$1"
    fi
}

# look: print a line for each node on this host: its state and its claim
look() {
    enter || return 0
    for claim in pools/*/claim; do
        [ ! -s "$claim" ] || ! ours "$claim" || echo "@node $(state "${claim%/claim}") $(cat "$claim")"
    done
}

# take POOL RANK TOKEN OWNER: claim this host for a node: @taken, or @busy if it serves another node
take() {
    mkdir -p "$HOME/.skypool" && enter && mkdir -p pools || exit
    command -v flock > /dev/null || { echo "flock is missing: install util-linux" >&2; exit 1; }
    exec 7>> pools/lock
    flock 7
    for claim in pools/*/claim; do
        { [ -s "$claim" ] && ours "$claim"; } || continue
        [ "$(cat "$claim")" != "$*" ] || { echo @taken; return; }
        [ "$(state "${claim%/claim}")" = ended ] || { echo "@busy $(cat "$claim")"; return; }
        away "${claim%/claim}"
    done
    # the connection of the last pool may be closing just now
    flock -w 3 "$lock" true 7>&- || { echo "@busy $(tr -d "'" < "$lock" | sed 's/ of / ? ? /')"; return; }
    folder=pools/$1.$2
    # renamed in one step, because half a claim would name a pool that does not exist
    mkdir -p "$folder" && uname -n > "$folder/host" && echo "$*" > "$folder/claim.part" &&
        mv "$folder/claim.part" "$folder/claim" && { echo @taken; return; }
    away "$folder"
    echo "nothing can be written to $PWD: is its disk full? ($(df -Pk . | awk 'END {print $4}') KiB are free)" >&2
    exit 1
}

# below PID...: print all descendants of these processes
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

# holders: print the processes that hold this host's lock
holders() {
    # shellcheck disable=SC2012
    ls -l /proc/[0-9]*/fd/9 2> /dev/null | sed -n "s|.* /proc/\([0-9]*\)/fd/9 -> $(pwd -P)/$lock\$|\1|p"
}

# elsewhere FOLDER: succeed if this host was claimed for another node than that of the folder
elsewhere() {
    for claim in pools/*/claim; do
        [ "${claim%/claim}" = "$1" ] || [ ! -s "$claim" ] || ! ours "$claim" || return 0
    done
    return 1
}

# within TENTHS COMMAND...: repeat a command until it fails; fail if it still succeeds after so many tenths of a second
within() {
    tenths=$1
    shift
    while "$@" > /dev/null; do
        [ "$tenths" -gt 0 ] || return 1
        tenths=$((tenths - 1))
        sleep 0.1
    done
}

# left PID...: print those that still live, or fail if there are none
left() {
    # shellcheck disable=SC2048
    for each in $*; do
        case $(sed 's/.*) //' "/proc/$each/stat" 2> /dev/null) in '' | Z* | X*) ;; *) printf '%s ' "$each" ;; esac
    done | grep .
}

# end POOL RANK: end a node's keeper and all processes below it: @gone, or @left with those that survive
end() {
    enter || { echo @gone; return; }
    folder=pools/$1.$2
    [ ! -d "$folder" ] || flock -w 4 "$folder/lock" true 2> /dev/null # a process that starts an agent holds this lock
    keeper=$(living "$folder/keeper.json")
    # shellcheck disable=SC2086
    victims=$(below $keeper)
    if [ -n "$keeper" ] && ! within 15 living "$folder/keeper.json"; then
        kill -TERM "$keeper" 2> /dev/null
        within 25 living "$folder/keeper.json" || victims="$keeper $victims $(below "$keeper")"
    fi
    exec 7>> pools/lock
    flock -w 4 7 # so that nobody claims this host for another node now
    # shellcheck disable=SC2046
    case $(cat "$lock" 2> /dev/null) in
        "'$1' of "* | "$1 of "*) # a setup that nobody waits for, or a later node of this pool on this host
            elsewhere "$folder" || victims="$victims $(holders) $(below $(holders))"
            ;;
    esac
    # shellcheck disable=SC2086
    victims=$(left $victims)
    # shellcheck disable=SC2086
    [ -z "$victims" ] || kill -KILL $victims 2> /dev/null
    exec 7>&-
    rest=
    within 15 left "$victims" || rest=$(left "$victims")
    [ -n "$rest" ] || away "$folder"
    if [ -n "$rest" ] || [ -e "$folder/claim" ]; then echo "@left $rest"; else echo @gone; fi
}
