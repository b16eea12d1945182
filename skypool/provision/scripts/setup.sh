# Makes a machine a node: takes the image's script and files from stdin, runs the steps, and becomes the agent's loader.
#
# It is told, in the lines above: SKYPOOL_HOME; guest, who takes this machine for itself, or nothing; guard, the file by
# which the machine's end is put off, or nothing, and lease, for how many seconds; settings, shell for the environment of
# the steps; blocks and size, of the script; hidden, the blocks of the secrets behind it; payload, payload_blocks and
# payload_size, of the archive of files, or nothing; kept and kept_bytes, how many archives may stay, and kept_days, for
# how long without use; block, the bytes of a block, and chunk, how many are taken at once;
# watch, the program that says that this machine lives, and every, the seconds between two times; loader, Python.
# shellcheck shell=sh disable=SC2154
SKYPOOL_UMASK=$(umask) # that of the login, which calls get
umask 077
export SKYPOOL_HOME SKYPOOL_UMASK
mkdir -p "$SKYPOOL_HOME" && cd "$SKYPOOL_HOME" || exit
why=$(closed "$SKYPOOL_HOME")
if [ -n "$why" ]; then # what is run below is in this folder
    echo @hello
    echo "@advice take the others' right to change it away (chmod go-w), or remove it: $why"
    echo "@fail folder 1 use $SKYPOOL_HOME"
    cat > /dev/null
    exit 1
fi
mkdir -p boot payload || exit

# ask: ask the machine's guard for a lease from now; done whenever something came from the client
ask() {
    [ -n "$guard" ] || return 0
    read -r up _ < /proc/uptime
    printf '%-31s\n' "${up%.*}${up#*.} $lease" 1<> "$guard"
}

# take BLOCKS: print so many blocks of stdin
take() {
    left=$1
    while [ "$left" -gt 0 ]; do
        some=$((left < chunk ? left : chunk))
        dd bs="$block" count="$some" iflag=fullblock 2> /dev/null
        left=$((left - some))
        ask
    done
}

# room SIZE: remove the archives that were used longest ago, so that there is room for one more of this size
room() {
    count=1 bytes=$1
    # shellcheck disable=SC2012 # their names are hashes
    ls -t payload | while read -r each; do
        case $each in *.tar.gz) ;; *.part) rm -f "payload/$each"; continue ;; *) continue ;; esac
        count=$((count + 1)) bytes=$((bytes + $(wc -c < "payload/$each")))
        { [ "$count" -le "$kept" ] && [ "$bytes" -le "$kept_bytes" ]; } || rm -f "payload/$each"
    done
}

# whole FILE SIZE: end with an advice unless the file has this size
whole() {
    [ "$(wc -c < "$1")" -ne "$2" ] || return 0
    free=$(df -Pk . | awk 'END {print $4}')
    echo "@advice the disk is full: ask for a larger one, or send less ($free KiB are free)"
    echo "@fail arrival 1 write $PWD/$1"
    kill "$alive"
    cat > /dev/null
    exit 1
}

if [ -n "$guest" ]; then
    lock=host.$(uname -n).lock
    exec 9>> "$lock"
    flock -w 3 9 || { echo "@busy $(cat "$lock")"; exit 1; }
    echo "$guest" > "$lock"
fi
echo @hello
exec 8>> boot.lock
$(command -v setsid) sh -c "$watch" watch "$every" < /dev/null 2> /dev/null 9>&- &
alive=$!
flock 8
rm -f boot/pid
eval "$settings"
take "$blocks" > boot/script.sh
whole boot/script.sh "$size"
secrets=$(take "$hidden")
find payload -name '*.tar.gz' ! -name "$payload" -mtime +"$kept_days" -exec rm -f {} + 2> /dev/null
if [ -z "$payload" ]; then
    :
elif [ -s "payload/$payload" ]; then
    echo @have
    touch "payload/$payload"
else
    room "$payload_size"
    echo @want
    take "$payload_blocks" | head -c "$payload_size" > "payload/$payload.part"
    whole "payload/$payload.part" "$payload_size"
    mv "payload/$payload.part" "payload/$payload"
fi
exec 3<&0
(trap exit TERM; while read -r _; do ask; done) <&3 > /dev/null 3<&- 8>&- 9>&- &
ears=$!
exec 3<&-
(eval "$secrets" && exec sh boot/script.sh) < /dev/null 8>&- 9>&- && status=0 || status=$?
kill "$alive" "$ears" 2> /dev/null
wait "$alive" "$ears"
[ "$status" = 0 ] || exit "$status"
python=$(cat boot/python)
exec 8>&-
echo @go
exec "$python" -c "$loader" 3>&1 1>&2
