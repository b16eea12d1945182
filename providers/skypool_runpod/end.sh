# Ends the pod in which it runs, and its cost: RunPod gives each pod a key that may do so, and its id. $url is the address
# of RunPod's API. The API REST v2 is asked first, and the GraphQL API if that fails. Python is asked if curl cannot do
# it. The User-Agent is "skypool", because RunPod refuses Python's own.
# shellcheck shell=sh disable=SC2154
key="Authorization: Bearer $RUNPOD_API_KEY"
id="{\"id\":\"$RUNPOD_POD_ID\"}"
asked="{\"query\":\"mutation(\$id:String!){podTerminate(input:{podId:\$id})}\",\"variables\":$id}"
ended=
if command -v curl > /dev/null; then
    said=$(echo "$key" | curl -sS -m 30 -A skypool -H @- -o /dev/null -w '%{http_code}' -X DELETE \
        "$url/v2/pods/$RUNPOD_POD_ID")
    case $said in
        2*) ended=yes ;;
        *)
            echo "$key" | curl -fsS -m 30 -A skypool -H @- -H "Content-Type: application/json" -d "$asked" \
                "$url/graphql" && ended=yes
            ;;
    esac
fi
if [ -z "$ended" ] && command -v python3 > /dev/null; then
    url=$url key=$key asked=$asked python3 -c '
import os, sys, urllib.request as web
url = os.environ["url"]
name, value = os.environ["key"].split(": ", 1)
said = {name: value, "Content-Type": "application/json", "User-Agent": "skypool"}
pod = url + "/v2/pods/" + os.environ["RUNPOD_POD_ID"]
try:
    web.urlopen(web.Request(pod, None, said, method="DELETE"), timeout=30)
except Exception as e:
    print(e, file=sys.stderr)
    web.urlopen(web.Request(url + "/graphql", os.environ["asked"].encode(), said), timeout=30)'
fi
