# Ends this machine unless somebody goes on asking for time. It runs as root, armed before anything else at boot.
#
# It is told, in the lines above: TOKEN, the order that this machine came of; LEASE, the seconds that it has at first, and
# that may be asked for at once; LIFETIME, the seconds that it may live in all, 0 for no such limit; POLL, the seconds
# between two looks; WHO may ask; END, the shell that ends the machine and its cost; OFF, "yes" where that is to switch it
# off, so that harder ways to do so may follow; MACHINE, the one on which it was armed.
#
# WHO asks by writing "SERIAL SECONDS" over what is in $ask: when that changes, the machine has so many seconds from then.
# Anything else in there changes nothing. Time is what the machine has lived by /proc/uptime, kept across reboots, and no
# clock that can be set. What may hang (a disk, what ends the machine) is waited for by others, not by this loop.
# shellcheck shell=sh disable=SC2016,SC2154
set -uf
umask 022
cd / || exit
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ask=/run/skypool/lease
kept=/var/lib/skypool/lived

# whole WORD: whether it is a number to count with
whole() {
    case $1 in
        0) ;;
        "" | 0* | *[!0-9]* | ??????????*) return 1 ;;
    esac
}

# clock: the seconds since boot, in $now
clock() {
    before=$now
    read -r now _ < /proc/uptime
    now=${now%%.*}
    whole "$now" || now=$((before + POLL))
}

# grant SECONDS: live on for so long from now, of which up to one is over already, and never beyond the lifetime
grant() {
    until=$((lived + $1 + 1))
    [ "$LIFETIME" = 0 ] || [ "$until" -le "$LIFETIME" ] || until=$LIFETIME
}

# recall: go on where this machine was before a reboot, or before somebody killed this guard
recall() {
    lived=0
    grant "$LEASE"
    [ -e "$kept" ] || return 0
    was_lived="" was_until="" was_now="" was_boot="" was_token=""
    read -r was_lived was_until was_now was_boot was_token < "$kept"
    if ! whole "$was_lived" || ! whole "$was_until" || ! whole "$was_now" || [ -z "$was_token" ]; then
        [ "$LIFETIME" -le "$LEASE" ] || lived=$((LIFETIME - LEASE)) # nobody knows: one lease more, at most
        grant "$LEASE"
    elif [ "$was_token" = "$TOKEN" ]; then # otherwise it is another machine's: a disk can be copied
        lived=$was_lived
        until=$was_until
        if [ "$was_boot" = "$boot" ] && [ "$now" -ge "$was_now" ]; then
            lived=$((lived + now - was_now))
        else
            lived=$((lived + (now < 60 ? now : 60)))
        fi
    fi
}

# keep: what recall needs, written in place, so that a full disk has room for it
keep() {
    [ -z "$keeper" ] || ! kill -0 "$keeper" 2> /dev/null || return 0
    printf "%-127s\n" "$lived $until $now $boot $TOKEN" 1<> "$kept" &
    keeper=$!
}

# look: what is asked for, in $asked; the first of a file that may be anything
look() {
    asked=$(timeout 2 head -c 31 "$ask" 2> /dev/null)
}

# heed: grant what is asked for, if it is new and makes sense
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

# open_door: let WHO write there, and nobody else. It is as long as what is asked, so that to ask needs no room on a disk
open_door() {
    if [ -L "$ask" ] || [ ! -f "$ask" ]; then
        rm -rf "$ask"
        mkdir -p "${ask%/*}"
        printf "%-31s\n" "nobody has asked" > "$ask"
    fi
    chown -h "$WHO" "$ask" # at the first boot WHO may not be there yet
}

# finish: end this machine, harder each time
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

echo -1000 > /proc/self/oom_score_adj # what runs out of memory is not this

# again: where nobody else does so, start this guard whenever it was killed, or when no process could be made
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
[ "$here" = "$MACHINE" ] || exec sleep 1000000000 # a copy of that one's disk: this one is armed by its own boot
read -r boot < /proc/sys/kernel/random/boot_id
[ "$(readlink /proc/self/ns/pid)" != "pid:[4026531836]" ] || real=yes # no container, whose host that would end
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
