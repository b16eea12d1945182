# Waits until no agent runs any more, whose keeper then removes its folder, $1. Then says whether the row of a run is
# there, in the file $2, and what is in the file $3, the stored end of the run.
# shellcheck shell=sh
left=20
while [ -e "$1" ]; do
    [ $left -gt 0 ] || exit 3
    left=$((left - 1))
    sleep 1
done
if [ -e "$2" ]; then
    echo row
    cat "$3" 2>/dev/null
else
    echo no row
fi
true
