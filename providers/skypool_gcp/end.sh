# Deletes the machine on which this script runs, which ends all its cost, with the rights of the machine's own service
# account. If the deletion fails, the script switches the machine off. $url is the address of the machine, or of its TPU
# slice, in Google's API.
# shellcheck shell=sh disable=SC2154
here=http://metadata.google.internal/computeMetadata/v1/instance
told=$(curl -fsS -m 10 -H "Metadata-Flavor: Google" "$here/service-accounts/default/token")
token=$(printf "%s" "$told" | sed 's/.*"access_token" *: *"\([^"]*\)".*/\1/')
printf "Authorization: Bearer %s" "$token" | curl -fsS -m 30 -X DELETE -H @- "$url" || shutdown -P now
