# What follows runs step after step; a step that was done before, and whose check still holds, is skipped.
# What it says begins with @, what a step prints with |: a person can read it, and so can a program.
set -u
umask 022
[ -n "${HOME:-}" ] || HOME=$(eval echo "~$(id -un)") # not set by whoever started this
case $HOME in /*) ;; *) HOME=/ ;; esac
export HOME
: "${SKYPOOL_HOME:=$HOME/.skypool}"
: "${SKYPOOL_WORK:=$SKYPOOL_HOME/work}"
: "${SKYPOOL_PRESET=${SKYPOOL_PYTHON:-}}"
B=$SKYPOOL_HOME/boot
export SKYPOOL_HOME SKYPOOL_WORK SKYPOOL_PRESET B
mkdir -p "$B" "$SKYPOOL_HOME/stamps" "$SKYPOOL_WORK"

# one at a time in this folder
if command -v flock > /dev/null 2>&1; then
    exec 9> "$B/lock"
    flock -n 9 || { echo "| waiting for another start on this machine"; flock 9; }
fi
n=0
FULL='the disk is full: ask for a larger disk, or install less'

# full STEP COMMAND: end here, for half a script does half of what it should
full() {
    echo "@advice $FULL"
    echo "@fail $1 1 $2"
    exit 1
}
cat > "$B/prelude.sh" || full prelude "write $B/prelude.sh"

# task NAME, check NAME: what a step does and what proves it, from stdin
task() { rm -f "$B/$1.check"; put "$1" "$B/$1.task"; }
check() { put "$1" "$B/$1.check"; }
put() { { cat "$B/prelude.sh" && echo 'set -eu' && cat; } > "$2" || full "$1" "write $2"; }

# holds NAME: whether the check of a step passes
holds() {
    [ ! -e "$B/$1.check" ] || timeout 120 sh "$B/$1.check" < /dev/null 9>&-
}

# shown COMMAND...: run it with its output marked and kept; its status is in $B/status, and while it runs its pid in
# $B/pid, for whoever must end it. The last line ends it, as what the command left running may hold the pipe for ever.
shown() {
    {
        "$@" 2>&1 < /dev/null 9>&- &
        echo $! > "$B/pid"
        wait $! && echo 0 > "$B/status" || echo $? > "$B/status"
        rm -f "$B/pid"
        echo '@@the end'
    } |
        sed -u -n -e '/@@the end$/{s///;/./{w '"$B/log"'
s/^/| /p;};q;}' -e 'w '"$B/log" -e 's/^/| /p'
}

# passing: whether the last failure is one that another attempt may not meet
passing() {
    told
    ! grep -qiE 'no solution found when resolving dependencies|no space left' "$B/told" &&
        grep -qiE '(error|status|code|http/[0-9.]+):? ?\(?(408|429|50[0234])([^0-9.]|$)|(^|[^0-9.])(408|429|50[0234]) +(request time|too many|internal server|bad gateway|service|gateway time|(server|client) error|error response)|temporary failure|could not resolve|failed to lookup|timed? ?out|unable to connect|connection (was )?(reset|refused|failed|closed|broken)|network is unreachable|hash sum mismatch|could not get lock|error sending request|error decoding response|unexpected eof|incomplete ?read' "$B/told"
}

# shellcheck disable=SC1090,SC1091
# perform NAME HASH LIMIT RETRIES: the step, with a limit in seconds for each attempt
perform() {
    n=$((n + 1))
    stamp=$SKYPOOL_HOME/stamps/$1-$2
    echo "@step $n $STEPS $1"
    if [ -e "$stamp" ] && (. "$stamp"; holds "$1") > /dev/null 2>&1; then
        . "$stamp"
        echo "@skip $1"
        return
    fi
    rm -f "$stamp"
    attempt=0
    while :; do
        : > "$B/vars"
        : > "$B/advice"
        : > "$B/command"
        shown timeout -k 10 "$3" sh "$B/$1.task"
        status=$(cat "$B/status")
        [ -n "$status" ] || full "$1" "write $B/status"
        if [ "$status" = 0 ]; then
            . "$B/vars"
            [ ! -e "$B/$1.check" ] || : > "$B/command"
            if [ -e "$B/$1.check" ]; then
                shown timeout 120 sh "$B/$1.check"
                status=$(cat "$B/status")
                [ -n "$status" ] || full "$1" "write $B/status"
            fi
            if [ "$status" = 0 ]; then
                mv "$B/vars" "$stamp"
                echo "@done $1"
                return
            fi
            echo "its check: $(grep . "$B/command" || echo "$1")" > "$B/command"
            break
        fi
        attempt=$((attempt + 1))
        if [ "$attempt" -gt "$4" ] || ! passing; then break; fi
        pause=$((attempt * attempt * 2))
        echo "@retry $1 $attempt $pause"
        sleep "$pause"
    done
    {
        cat "$B/advice"
        case $status in
            124) echo "it ran longer than its limit of $3 s" ;;
            137) echo "it was killed: out of memory, or still there after its limit of $3 s" ;;
        esac
        # what told of it may be lost for the same reason
        if [ "$(df -Pk "$B" | awk 'END { print $4 }')" -lt 64 ]; then echo "$FULL"; else explain; fi
    } | sed 's/^/@advice /'
    echo "@fail $1 $status $(tr '\n' ' ' < "$B/command" | sed 's/ *$//')"
    exit 1
}

echo "@boot 1"
