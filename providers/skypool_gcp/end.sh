# Deletes the machine on which it runs, and so ends all its cost, with the rights of its own service account; where that
# has not the right to, the machine is switched off. $url is the machine's, for the API.
# shellcheck shell=sh disable=SC2154
here=http://metadata.google.internal/computeMetadata/v1/instance
told=$(curl -fsS -m 10 -H "Metadata-Flavor: Google" "$here/service-accounts/default/token")
token=$(printf "%s" "$told" | sed 's/.*"access_token" *: *"\([^"]*\)".*/\1/')
printf "Authorization: Bearer %s" "$token" | curl -fsS -m 30 -X DELETE -H @- "$url" || shutdown -P now
