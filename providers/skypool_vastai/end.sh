# Ends this container, and its cost, with the container's own key, which reaches nothing else. It is told $base before.
# shellcheck shell=sh disable=SC2154
said="Authorization: Bearer $CONTAINER_API_KEY"
here="$base/api/v0/instances/$CONTAINER_ID/"
ask='import os, sys, urllib.request as web
head = {"Authorization": "Bearer " + os.environ["CONTAINER_API_KEY"]}
web.urlopen(web.Request(sys.argv[1], headers=head, method="DELETE"), timeout=30)'
have() { command -v "$1" > /dev/null; }
if have curl && curl -fsS -m 30 -X DELETE -H "$said" "$here"; then :
elif have python3 && python3 -c "$ask" "$here"; then :
elif have wget && wget -q -T 30 -O /dev/null --method=DELETE --header="$said" "$here"; then :
elif have apt-get; then apt-get -q update; DEBIAN_FRONTEND=noninteractive apt-get -q -y install curl ca-certificates
elif have apk; then apk add curl
fi
