# Goes to where the calls of a node run: $cwd, with the commands of its environment. $folder is the node's. What is in
# $programs comes before.
# shellcheck shell=sh disable=SC2154
keeper=$(sed -n 's/.*"pid": *\([0-9]*\).*/\1/p' "$folder/keeper.json" 2> /dev/null)
python=$(tr '\0' '\n' 2> /dev/null < "/proc/$keeper/cmdline" | sed -n 1p)
case $python in /*) PATH=${python%/*}:$PATH ;; esac
PATH=${programs:+$programs:}$PATH
cd "$cwd" || exit
