# Says that the machine lives, every $1 seconds, while it may be busy without a word. It outlives the shell that runs the
# steps: when nobody listens any more it ends the one that runs, and holds the lock of the others until that is gone.
# shellcheck shell=sh
trap 'kill $pause; exit' TERM
trap '' PIPE
while :; do
    sleep "$1" 8>&- &
    pause=$!
    wait "$pause"
    echo @alive || break
done
flock -n 8 || exit
step=$(cat boot/pid) && tr '\0' '\n' < "/proc/$step/environ" | grep -qxF "SKYPOOL_HOME=$SKYPOOL_HOME" && kill "$step" || exit
for _ in 1 2 3 4 5 6 7 8 9 10 11 12; do
    kill -0 "$step" || exit
    sleep 1
done
