# The files of the image, from its payload.

ready_to_unpack() {
    [ -e "$P" ] || fail "the files of this image have not arrived at $P"
    : > "$B/unpacked"
    mkdir -p "$SKYPOOL_WORK"
}

# unpack ROOT FOLDER: what stands under ROOT in the payload, into FOLDER
unpack() {
    echo "unpack files into $2" > "$B/command"
    TAR_OPTIONS=--quoting-style=literal tar -tzf "$P" "$1" | sed "s|^$1/*|${2%/}/|" >> "$B/unpacked"
    tar -xzof "$P" -C "$2" --strip-components=1 "$1" && return
    [ "${SKYPOOL_CHANGES:-yes}" != no ] || fail "not all files can be written in $2"
    as_root tar -xzof "$P" -C "$2" --strip-components=1 "$1"
}

# unpacked: what the payload left where, for the check; commands that saw other files are to run again
unpacked() {
    { echo "$P $SKYPOOL_WORK"; cat "$B/unpacked"; } > "$U"
    rm -f "$SKYPOOL_HOME"/stamps/run-*
}

# all_there: whether each file on stdin's lines but the first exists
all_there() {
    read -r _
    while IFS= read -r each; do
        [ -e "$each" ] || [ -h "$each" ] || fail "$each is gone"
    done
}
