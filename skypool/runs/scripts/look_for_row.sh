# Says what a machine has of a run, in four lines. Waits for up to $4 seconds until no agent runs any more, whose keeper
# then removes its folder, $1. The lines are "agent" or "no agent", then the boot, then the row in the file $2, then the
# stored end of the run in the file $3. What is not there is an empty line.
# shellcheck shell=sh
left=$4
while [ -e "$1" ] && [ "$left" -gt 0 ]; do
    left=$((left - 1))
    sleep 1
done
if [ -e "$1" ]; then echo agent; else echo no agent; fi
for file in /proc/sys/kernel/random/boot_id "$2" "$3"; do
    if [ -e "$file" ]; then
        text=$(cat "$file") || exit
        printf '%s\n' "$text"
    else
        echo
    fi
done
