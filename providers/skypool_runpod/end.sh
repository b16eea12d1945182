# Ends the pod in which it runs, and its cost: RunPod gives each pod a key that may do so, and its id. $url is the address
# of RunPod's API. It is asked in three ways, one after the other: REST v2 to delete the pod, REST v2 to perform the
# action "terminate", and GraphQL. Python asks if curl cannot. Each request has 9 s, so that all six fit into the minute
# after which the guard stops this script. The User-Agent is "skypool", because RunPod refuses Python's own.
# shellcheck shell=sh disable=SC2154
key="Authorization: Bearer $RUNPOD_API_KEY"
pod="$url/v2/pods/$RUNPOD_POD_ID"
action='{"action":"terminate"}'
id="{\"id\":\"$RUNPOD_POD_ID\"}"
asked="{\"query\":\"mutation(\$id:String!){podTerminate(input:{podId:\$id})}\",\"variables\":$id}"
ask() { # arguments of curl
    said=$(echo "$key" | curl -sS -m 9 -A skypool -H @- -H "Content-Type: application/json" -o /dev/null \
        -w '%{http_code}' "$@")
    case $said in 2*) ;; *) return 1 ;; esac
}
ended=
if command -v curl > /dev/null; then
    if ask -X DELETE "$pod" || ask -d "$action" "$pod/action" || ask -d "$asked" "$url/graphql"; then ended=yes; fi
fi
if [ -z "$ended" ] && command -v python3 > /dev/null; then
    url=$url pod=$pod key=$key action=$action asked=$asked python3 -c '
import os, sys, urllib.request as web
name, value = os.environ["key"].split(": ", 1)
said = {name: value, "Content-Type": "application/json", "User-Agent": "skypool"}
action, asked = os.environ["action"].encode(), os.environ["asked"].encode()
pod = os.environ["pod"]
for address, body, method in (
    (pod, None, "DELETE"),
    (pod + "/action", action, "POST"),
    (os.environ["url"] + "/graphql", asked, "POST"),
):
    try:
        web.urlopen(web.Request(address, body, said, method=method), timeout=9)
        break
    except Exception as e:
        print(e, file=sys.stderr)
else:
    sys.exit(1)'
fi
