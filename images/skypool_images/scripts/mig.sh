# MIG: every card cut in the same way. LAYOUT: the profiles of one card, sorted, with a blank between.

# layout CARD: what there is now, in the same form
layout() {
    nvidia-smi -L | awk -v card="GPU $1:" '
        /^GPU / { here = index($0, card) == 1 }
        here && $1 == "MIG" { print $2 }' | sort | xargs
}

# mode CARD: its MIG mode now, and after a reset: "Enabled, Enabled"; "[N/A], [N/A]" if it has none
mode() { nvidia-smi -i "$1" --query-gpu=mig.mode.current,mig.mode.pending --format=csv,noheader; }

mig() {
    for card in $(nvidia-smi --query-gpu=index --format=csv,noheader); do
        if [ "$(layout "$card")" != "$LAYOUT" ]; then carve "$card"; fi
    done
}

# carve CARD: enable MIG if need be, and replace what is there
carve() {
    name=$(nvidia-smi -i "$1" --query-gpu=name --format=csv,noheader)
    case $(mode "$1") in
        Enabled,*) ;;
        Disabled,*) switch_on "$1" ;;
        *)
            echo "nvidia-smi -i $1 -mig 1" > "$B/command"
            advise "MIG is for data centre cards from A30 and A100 on, and needs a machine that passes it through: ask for a whole $name, or for a card that can be cut"
            fail "$name cannot be cut into partitions here"
            ;;
    esac
    [ "${SKYPOOL_CHANGES:-yes}" != no ] || {
        echo "nvidia-smi mig -i $1 -cgi" > "$B/command"
        advise "this machine is yours and is left as it is; cut it yourself: nvidia-smi mig -i $1 -cgi $(echo "$LAYOUT" | tr ' ' ,) -C"
        fail "card $1 is cut into: $(layout "$1")"
    }
    if nvidia-smi mig -i "$1" -lgi > /dev/null 2>&1; then
        as_root nvidia-smi mig -i "$1" -dci || true # there may be none
        as_root nvidia-smi mig -i "$1" -dgi || {
            advise "programs use the partitions of card $1 (see nvidia-smi): stop them"
            fail "card $1 is in use"
        }
    fi
    as_root nvidia-smi mig -i "$1" -cgi "$(echo "$LAYOUT" | tr ' ' ,)" -C || {
        advise "$name does not hold $LAYOUT; it has: $(nvidia-smi mig -i "$1" -lgip | sed -n 's/.*MIG \([0-9]g[^ ]*\).*/\1/p' | xargs)"
        fail "card $1 could not be cut"
    }
}

# switch_on CARD: cards before Hopper need a reset for it, which a virtual machine may not be able to give them
switch_on() {
    [ "${SKYPOOL_CHANGES:-yes}" != no ] || {
        echo "nvidia-smi -i $1 -mig 1" > "$B/command"
        advise "this machine is yours and is left as it is; enable MIG yourself: sudo nvidia-smi -i $1 -mig 1"
        fail "MIG is off on card $1"
    }
    as_root nvidia-smi -i "$1" -mig 1 || true # what counts is the mode
    case $(mode "$1") in Enabled,*) return ;; esac
    as_root nvidia-smi -i "$1" --gpu-reset || true
    case $(mode "$1") in Enabled,*) return ;; esac
    advise "MIG is on from the next reset of card $1, and it cannot be reset now: stop whatever uses it (see nvidia-smi), or reboot this machine"
    fail "MIG is pending on card $1"
}

mig_check() {
    echo "nvidia-smi -L" > "$B/command"
    for card in $(nvidia-smi --query-gpu=index --format=csv,noheader); do
        [ "$(layout "$card")" = "$LAYOUT" ] || fail "card $card is cut into: $(layout "$card")"
    done
    nvidia-smi -L
}
