# closed FOLDER: print nothing if only this user can change a folder, and only root and this user what is on the way to
# it, links included. Otherwise print who else can.
# shellcheck shell=sh
closed() {
    me=$(id -u) made=0 seen=''
    read -r _ _ all < /proc/self/uid_map && [ "$all" = 4294967295 ] || made=65534 # who made this container
    for each in "$(cd "$1" && pwd -P)" "$1"; do
        [ "$each" != "$seen" ] || return 0 # there was no link
        seen=$each
        set -- "$each"
        while [ "${each:-/}" != / ]; do
            each=${each%/*}
            set -- "$@" "${each:-/}"
        done
        last=yes
        stat -c '%u %g %f %n' "$@" | while read -r owner group mode name; do
            mode=$((0x$mode))
            case $owner in "$me") ;; 0 | "$made") [ "$last" = no ] ;; *) false ;; esac ||
                echo "$name belongs to user $owner, not to user $me"
            if [ $((mode & 61440)) != 40960 ] && [ $((mode & 18)) != 0 ] &&
                { [ $last = yes ] || [ $((mode & 512)) = 0 ]; } &&
                { [ $((mode & 2)) != 0 ] || ! own "$group"; }; then
                echo "other users can change $name (owner $owner, mode $(printf %04o $((mode & 4095))))"
            fi
            last=no
        done
    done
}

# own GROUP: whether a group is root's, or this user's alone
own() {
    [ "$1" = 0 ] || { [ "$1" = "$(id -g)" ] && [ "$(id -un 2> /dev/null)" = "$(id -gn 2> /dev/null)" ]; }
}
