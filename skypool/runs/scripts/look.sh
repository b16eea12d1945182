# Waits until the folder $agent is gone, which its keeper removes when no agent runs there. Prints "row" or "no row", as
# the file $row is there or not, and then the file $status: how the run has ended, if that was stored.
# shellcheck shell=sh disable=SC2154
left=20
while [ -e "$agent" ]; do
    [ $left -gt 0 ] || exit 3
    left=$((left - 1))
    sleep 1
done
if [ -e "$row" ]; then
    echo row
    cat "$status" 2>/dev/null
else
    echo "no row"
fi
true
