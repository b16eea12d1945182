# Ends this container, and its cost, with the container's own key, which reaches nothing else. It is told $base before.
# The key is in no argument of a program, where all users of the machine could read it. Each program has 15 s, so that
# all three fit into the minute after which the guard stops this script.
# shellcheck shell=sh disable=SC2154
said="Authorization: Bearer $CONTAINER_API_KEY"
here="$base/api/v0/instances/$CONTAINER_ID/"
ask='import os, sys, urllib.request as web
head = {"Authorization": "Bearer " + os.environ["CONTAINER_API_KEY"]}
web.urlopen(web.Request(sys.argv[1], headers=head, method="DELETE"), timeout=15)'
have() { command -v "$1" > /dev/null; }
by_wget() { # wget takes a header from a file only
    asked=$(umask 077 && mktemp) || return 1
    echo "header = $said" > "$asked"
    wget -q -t 1 -T 15 -O /dev/null --config="$asked" --method=DELETE "$here"
    set -- $?
    rm -f "$asked"
    return "$1"
}
if have curl && echo "$said" | curl -fsS -m 15 -X DELETE -H @- "$here"; then :
elif have python3 && python3 -c "$ask" "$here"; then :
elif have wget && by_wget; then :
elif have apt-get; then apt-get -q update; DEBIAN_FRONTEND=noninteractive apt-get -q -y install curl ca-certificates
elif have apk; then apk add curl
fi
