# The process 1 of a container: it ends the container when its node has ended, when nobody came, or when its time is over.
# As process 1 it needs no --init: a shell's `wait` reaps orphans too, and podman may come without an init program.
# $1: skypool's folder; $2: the node's folder; $3: when the container ends, in seconds since 1970, 0 for never.
# shellcheck shell=sh
home=$1
folder=$2
deadline=$3
patience=900 # seconds in which a client has to come

nap() {
    sleep 1 &
    wait $!
    [ "$deadline" = 0 ] || [ "$(date +%s)" -lt "$deadline" ] || exit 0
}

# there: whether the node's folder exists. One that another user of the container has made does not count.
there() { [ "$(stat -c %u "$folder" 2> /dev/null)" = "$(id -u)" ]; }

umask 077
cd "$home" 2> /dev/null || { mkdir -p "$home" && cd "$home"; } || exit
trap 'exit 0' TERM INT
alone=0
while ! there; do
    nap
    alone=$((alone + 1))
    # every minute: a bootstrap that runs is company
    [ $((alone % 60)) != 0 ] || ! [ -e boot.lock ] || flock -n boot.lock true || alone=0
    [ $alone -lt $patience ] || exit 0
done
while there; do nap; done
