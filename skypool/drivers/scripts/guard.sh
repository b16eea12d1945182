# The guard: ends this machine unless the user WHO keeps asking for more time. It runs as root, first of all at boot.
#
# The lines above this text set the variables:
# TOKEN: token of the order that this machine belongs to.
# LEASE: seconds that are granted at boot, and the most that one request can get.
# LIFETIME: seconds that the machine may live in all; 0 for no limit.
# POLL: seconds after which the files $ask and $door are read again.
# WHO: user who may ask for more time, and for an earlier end.
# END: shell command that ends the machine and its cost.
# OFF: "yes" if END switches the machine off; stronger commands then follow if END does not help.
# MACHINE: id of the machine for which this guard was made.
#
# WHO asks by overwriting $ask with "SERIAL SECONDS". When the content changes, SECONDS are granted from that moment.
# Any other content is ignored. Time is measured by /proc/uptime and kept across reboots, as other clocks can be set.
#
# WHO brings the end nearer by overwriting $door with "SERIAL SECONDS HEIR SERIAL": this machine ends in SECONDS at the
# latest, whatever is asked for later. The earliest end counts, and the first HEIR, a digest; "-" is none. Once both are
# on the disk, $told has the answer "SERIAL SECONDS HEIR", with what is left and the heir that counts. The two serials
# are equal unless the file is just being written.
#
# What may hang (a disk, the command END) runs in the background or with a time limit, so that the loop goes on.
# shellcheck shell=sh disable=SC2016,SC2154
set -uf
umask 022
cd / || exit
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ask=/run/skypool/lease
door=/run/skypool/end
told=/run/skypool/held
kept=/var/lib/skypool/lived
kept_end=/var/lib/skypool/end

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

# grant SECONDS: live on for SECONDS, not beyond LIFETIME and $end. One second is added, as $lived is rounded down
grant() {
    until=$((lived + $1 + 1))
    [ "$LIFETIME" = 0 ] || [ "$until" -le "$LIFETIME" ] || until=$LIFETIME
    [ "$end" = none ] || [ "$until" -le "$end" ] || until=$end
}

# near TIME: end this machine at TIME of $lived at the latest
near() {
    [ "$end" != none ] && [ "$end" -le "$1" ] || end=$1
    [ "$until" -le "$end" ] || until=$end
}

# recall: load the state that keep and hold saved before a reboot, or before this guard was killed
recall() {
    lived=0 known=no was_boot=""
    grant "$LEASE"
    [ ! -e "$kept" ] || recall_life
    [ ! -e "$kept_end" ] || recall_end
}

# recall_life: load what keep saved. Another token means that the disk was copied from another machine
recall_life() {
    was_lived="" was_until="" was_now="" was_token=""
    read -r was_lived was_until was_now was_boot was_token < "$kept"
    if ! whole "$was_lived" || ! whole "$was_until" || ! whole "$was_now" || [ -z "$was_token" ]; then
        [ "$LIFETIME" -le "$LEASE" ] || lived=$((LIFETIME - LEASE)) # the state is lost: allow at most one more lease
        grant "$LEASE"
    elif [ "$was_token" = "$TOKEN" ]; then
        known=yes
        lived=$was_lived
        until=$was_until
        if [ "$was_boot" = "$boot" ] && [ "$now" -ge "$was_now" ]; then
            lived=$((lived + now - was_now))
        else
            lived=$((lived + (now < 60 ? now : 60)))
        fi
    fi
}

# recall_end: load what hold saved. Seconds that were not saved before a reboot must not be gained: POLL of them count
recall_end() {
    was_end="" was_heir="" was_token=""
    read -r was_end was_heir was_token < "$kept_end"
    if ! whole "$was_end" || [ -z "$was_token" ]; then
        near $((lived + LEASE)) # the end is lost: allow at most one more lease
        save &
        holder=$!
    elif [ "$was_token" = "$TOKEN" ]; then
        heir=$was_heir
        if [ "$known" = yes ]; then
            [ "$was_boot" = "$boot" ] || lived=$((lived + POLL))
        elif [ "$was_end" -gt $((lived + LEASE)) ]; then
            lived=$((was_end - LEASE))
            grant "$LEASE"
        fi
        known=yes
        near "$was_end"
    fi
}

# keep: save the state for recall. The file is overwritten in place, which works on a full disk, too
keep() {
    [ -z "$keeper" ] || ! kill -0 "$keeper" 2> /dev/null || return 0
    { printf "%-127s\n" "$lived $until $now $boot $TOKEN" 1<> "$kept" && { [ "$end" = none ] || sync "$kept"; }; } &
    keeper=$!
}

# save: write the end to the disk, and wait until it is there
save() {
    printf "%-159s\n" "$end $heir $TOKEN" 1<> "$kept_end" &&
        sync "$kept_end" "$kept" && { sync "${kept%/*}" || sync; } # not every file system can sync a folder
}

# hold: save the end, and answer the last request then
hold() {
    answered=""
    [ ! -f "$told" ] || read -r answered _ < "$told"
    [ "$answered" != "$serial" ] && [ -n "$serial" ] || return 0
    [ -z "$holder" ] || ! kill -0 "$holder" 2> /dev/null || return 0
    {
        save && printf "%s\n" "$serial $((end - lived)) $heir" > "$told.new" &&
            { [ -f "$told" ] || rm -rf "$told"; } && mv -f "$told.new" "$told"
    } &
    holder=$!
}

# look FILE SIZE: set $asked to the first SIZE bytes of FILE, which may contain anything
look() {
    asked=$(timeout 2 head -c "$2" "$1" 2> /dev/null)
}

# heed: grant the seconds in $ask if its content is new and valid
heed() {
    look "$ask" 31
    [ "$asked" != "$seen" ] || return 0
    # shellcheck disable=SC2086
    set -- $asked
    [ $# = 2 ] && whole "$2" || return 0
    case $1 in *[!0-9]*) return 0 ;; esac
    seen=$asked
    grant $(($2 < LEASE ? $2 : LEASE))
}

# heed_end: bring the end nearer as $door says if its content is new and valid
heed_end() {
    look "$door" 127
    [ "$asked" != "$seen_end" ] || return 0
    # shellcheck disable=SC2086
    set -- $asked
    [ $# = 4 ] && [ "$1" = "$4" ] && whole "$2" && [ ${#2} -lt 9 ] || return 0
    case $1 in *[!0-9]*) return 0 ;; esac
    case $3 in -) ;; *[!0-9a-f]*) return 0 ;; esac
    seen_end=$asked
    serial=$1
    near $((lived + $2))
    [ "$heir" != - ] || heir=$3
}

# open_door FILE SIZE: let only WHO write FILE. It has the size of a request, so that a request needs no free disk space
open_door() {
    if [ -L "$1" ] || [ ! -f "$1" ]; then
        rm -rf "$1"
        mkdir -p "${1%/*}"
        printf "%-$2s\n" "nobody has asked" > "$1"
    fi
    chown -h "$WHO" "$1" # at the first boot WHO may not exist yet
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
        echo "skypool: the $until s for which this machine was to live are over: $END" > /dev/kmsg &
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

here=none boot=none now=0 end=none heir=- serial="" keeper="" holder="" over=no said=no real=no
read -r here < /sys/class/dmi/id/product_uuid
[ "$here" = "$MACHINE" ] || exec sleep 1000000000 # the disk is a copy: do nothing, as this machine has its own guard
read -r boot < /proc/sys/kernel/random/boot_id
[ "$(readlink /proc/self/ns/pid)" != "pid:[4026531836]" ] || real=yes # not in a container, where sysrq ends the host
clock
recall
look "$ask" 31
seen=$asked
look "$door" 127
seen_end=$asked
[ "$known" = no ] || seen_end="" # else it is a request to another machine, whose disk was copied
[ "$lived" -lt "$until" ] || over=yes
while :; do
    if [ "$over" = no ]; then
        open_door "$ask" 31
        heed
        open_door "$door" 127
        heed_end
        [ "$lived" -lt "$until" ] || over=yes
    fi
    keep
    hold
    [ "$over" = no ] || finish
    nap=$POLL
    [ "$end" = none ] || [ "$over" = yes ] || [ "$end" -ge $((lived + POLL)) ] || nap=$((end - lived))
    sleep "$nap"
    clock
    lived=$((lived + (now > before ? now - before : 0)))
done
