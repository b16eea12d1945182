# The guard: ends this machine unless the user WHO keeps asking for more time. It runs as root, first of all at boot.
#
# The lines above this text set the variables:
# TOKEN: token of the order that this machine belongs to.
# LEASE: seconds that are granted at boot, and the most that one request can get.
# LIFETIME: seconds that the machine may live in all; 0 for no limit.
# POLL: seconds after which the file $ask is read again.
# WHO: user who may ask for more time.
# END: shell command that ends the machine and its cost.
# OFF: "yes" if END switches the machine off; stronger commands then follow if END does not help.
# MACHINE: id of the machine for which this guard was made.
#
# WHO asks by overwriting $ask with "SERIAL SECONDS". When the content changes, SECONDS are granted from that moment.
# Any other content is ignored. Time is measured by /proc/uptime and kept across reboots, as other clocks can be set.
# What may hang (a disk, the command END) runs in the background or with a time limit, so that the loop goes on.
# shellcheck shell=sh disable=SC2016,SC2154
set -uf
umask 022
cd / || exit
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ask=/run/skypool/lease
kept=/var/lib/skypool/lived

# whole WORD: succeeds if WORD is a whole number of at most 9 digits
whole() {
    case $1 in
        0) ;;
        "" | 0* | *[!0-9]* | ??????????*) return 1 ;;
    esac
}

# clock: set $now to the seconds since boot
clock() {
    before=$now
    read -r now _ < /proc/uptime
    now=${now%%.*}
    whole "$now" || now=$((before + POLL))
}

# grant SECONDS: live on for SECONDS, but not beyond LIFETIME. One second is added, as $lived is rounded down
grant() {
    until=$((lived + $1 + 1))
    [ "$LIFETIME" = 0 ] || [ "$until" -le "$LIFETIME" ] || until=$LIFETIME
}

# recall: load the state that keep saved before a reboot, or before this guard was killed
recall() {
    lived=0
    grant "$LEASE"
    [ -e "$kept" ] || return 0
    was_lived="" was_until="" was_now="" was_boot="" was_token=""
    read -r was_lived was_until was_now was_boot was_token < "$kept"
    if ! whole "$was_lived" || ! whole "$was_until" || ! whole "$was_now" || [ -z "$was_token" ]; then
        [ "$LIFETIME" -le "$LEASE" ] || lived=$((LIFETIME - LEASE)) # the state is lost: allow at most one more lease
        grant "$LEASE"
    elif [ "$was_token" = "$TOKEN" ]; then # another token means that the disk was copied from another machine
        lived=$was_lived
        until=$was_until
        if [ "$was_boot" = "$boot" ] && [ "$now" -ge "$was_now" ]; then
            lived=$((lived + now - was_now))
        else
            lived=$((lived + (now < 60 ? now : 60)))
        fi
    fi
}

# keep: save the state for recall. The file is overwritten in place, which works on a full disk, too
keep() {
    [ -z "$keeper" ] || ! kill -0 "$keeper" 2> /dev/null || return 0
    printf "%-127s\n" "$lived $until $now $boot $TOKEN" 1<> "$kept" &
    keeper=$!
}

# look: set $asked to the first 31 bytes of $ask, which may contain anything
look() {
    asked=$(timeout 2 head -c 31 "$ask" 2> /dev/null)
}

# heed: grant the seconds in $ask if its content is new and valid
heed() {
    look
    [ "$asked" != "$seen" ] || return 0
    # shellcheck disable=SC2086
    set -- $asked
    [ $# = 2 ] && whole "$2" || return 0
    case $1 in *[!0-9]*) return 0 ;; esac
    seen=$asked
    grant $(($2 < LEASE ? $2 : LEASE))
}

# open_door: let only WHO write $ask. The file has the length of a request, so that a request needs no free disk space
open_door() {
    if [ -L "$ask" ] || [ ! -f "$ask" ]; then
        rm -rf "$ask"
        mkdir -p "${ask%/*}"
        printf "%-31s\n" "nobody has asked" > "$ask"
    fi
    chown -h "$WHO" "$ask" # at the first boot WHO may not exist yet
}

# finish: end this machine, by stronger commands the longer it takes
finish() {
    late=$((lived - until))
    if [ "$OFF" = yes ] && [ "$late" -ge $((8 * POLL)) ] && [ "$real" = yes ]; then
        echo o > /proc/sysrq-trigger
    fi
    timeout 60 sh -c "$END" &
    if [ "$OFF" = yes ] && [ "$late" -ge $((4 * POLL)) ]; then
        timeout 60 poweroff -f &
    fi
    if [ "$said" = no ] && [ -c /dev/kmsg ]; then
        echo "skypool: nobody has asked for more time than the $until s that are over: $END" > /dev/kmsg &
    fi
    said=yes
}

echo -1000 > /proc/self/oom_score_adj # the kernel must not kill this when memory runs out

# again: without systemd, start this guard again when it was killed, or when no process could be started
again() { exec sh -c 'eval "$guard"' skypool-guard again; }
if [ "${1-}" = again ]; then
    trap "" HUP INT TERM
    trap again EXIT
    while :; do
        sh -c 'eval "$guard"' skypool-guard
        sleep 1
    done
fi

here=none boot=none now=0 keeper="" over=no said=no real=no
read -r here < /sys/class/dmi/id/product_uuid
[ "$here" = "$MACHINE" ] || exec sleep 1000000000 # the disk is a copy: do nothing, as this machine has its own guard
read -r boot < /proc/sys/kernel/random/boot_id
[ "$(readlink /proc/self/ns/pid)" != "pid:[4026531836]" ] || real=yes # not in a container, where sysrq ends the host
clock
recall
look
seen=$asked
[ "$lived" -lt "$until" ] || over=yes
while :; do
    if [ "$over" = no ]; then
        open_door
        heed
        [ "$lived" -lt "$until" ] || over=yes
    fi
    keep
    [ "$over" = no ] || finish
    sleep "$POLL"
    clock
    lived=$((lived + (now > before ? now - before : 0)))
done
