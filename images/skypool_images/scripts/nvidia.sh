# The NVIDIA driver. FLOOR: the oldest version that will do, or nothing. COUNT: how many GPUs there should be.

# answers: whether the driver does; what nvidia-smi says is in $B/smi
answers() {
    if ! have nvidia-smi; then
        echo "there is no nvidia-smi" > "$B/smi"
        return 1
    fi
    timeout 60 nvidia-smi -L > "$B/smi" 2>&1 && grep -q '^GPU ' "$B/smi"
}

# version: of the driver that is loaded
version() { nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1; }

nvidia() {
    distribution
    mend
    if ! answers; then
        expect_pci 0x10de NVIDIA
        revive || install_driver
    elif ! at_least "$(version)" "$FLOOR"; then
        echo "driver $(version) is older than $FLOOR"
        install_driver
    fi
    persistence
}

# revive: a driver that is installed and does not answer
revive() {
    have nvidia-smi || return 1
    cat "$B/smi"
    if grep -qi 'version mismatch' "$B/smi"; then
        reload
        answers && return
        advise "the driver was upgraded under the running one, and the old module is in use: reboot this machine"
        fail "driver and library have different versions"
    fi
    ! in_container || return 1
    grep -qi "couldn't communicate" "$B/smi" || return 1
    if module nvidia && answers; then return; fi
    : > "$B/advice"
    return 1
}

# reload: the module that is installed, instead of the one that runs
reload() {
    may_change "rmmod nvidia; modprobe nvidia"
    if have systemctl; then as_root systemctl stop nvidia-persistenced nvidia-fabricmanager || true; fi
    for each in nvidia_uvm nvidia_drm nvidia_modeset nvidia_peermem nvidia; do
        [ ! -e "/sys/module/$each" ] || as_root rmmod "$each" || return 0
    done
    module nvidia || return 0
}

# flavour: OPEN=-open for cards of Turing and later, whose PCI ids start at 0x1e00, and CEILING, the last branch for
# those before it, which the open modules do not support
flavour() {
    OPEN=-open CEILING=999
    for each in $(pci 0x10de); do
        [ $((each)) -ge $((0x1e00)) ] || OPEN='' CEILING=580
    done
}

# branch: the newest server branch that apt knows and that will do
branch() {
    for each in $(apt-cache pkgnames nvidia-headless- | sed -n "s/^nvidia-headless-\([0-9]*\)-server$OPEN\$/\1/p" | sort -rn); do
        if [ "$each" -gt "$CEILING" ] || ! at_least "$each" "${FLOOR%%.*}"; then continue; fi
        known "nvidia-headless-$each-server$OPEN" || continue
        echo "$each"
        return
    done
    return 1
}

install_driver() {
    may_change "install an NVIDIA driver${FLOOR:+, $FLOOR or newer}"
    with_apt "install NVIDIA's driver${FLOOR:+, $FLOOR or newer,}"
    flavour
    loaded=no
    [ ! -e /sys/module/nvidia ] || loaded=yes
    case $FAMILY in
        ubuntu) from_ubuntu ;;
        debian) from_debian ;;
        *) from_nvidia ;;
    esac
    if [ -e /sys/module/nouveau ]; then
        as_root modprobe -r nouveau || advise "the nouveau driver holds the GPU: reboot this machine"
    fi
    if [ "$loaded" = yes ]; then reload; else module nvidia; fi
    module nvidia-uvm || true
}

# from_ubuntu: modules that Canonical built and signed for this kernel if there are any, otherwise built here
from_ubuntu() {
    found=$(branch) || {
        lists
        found=$(branch) || {
            if_read
            from_nvidia
            return
        }
    }
    if known "linux-modules-nvidia-$found-server$OPEN-$KERNEL"; then
        apt_install "linux-modules-nvidia-$found-server$OPEN-$KERNEL" "nvidia-headless-no-dkms-$found-server$OPEN" "nvidia-utils-$found-server"
    else
        headers
        apt_install "nvidia-headless-$found-server$OPEN" "nvidia-utils-$found-server"
    fi
    fabric "nvidia-fabricmanager-$found"
}

# from_debian: its own driver, from non-free, if that is new enough
from_debian() {
    known nvidia-driver || non_free
    candidate=$(apt-cache policy nvidia-driver | sed -n 's/^  Candidate: \([0-9.]*\).*/\1/p')
    if [ -n "$candidate" ] && at_least "$candidate" "$FLOOR" && [ "${candidate%%.*}" -le "$CEILING" ]; then
        headers
        apt_install nvidia-driver nvidia-smi
    else
        echo "Debian has ${candidate:-no driver}, so NVIDIA's own is taken"
        from_nvidia
    fi
}

# non_free: the parts of Debian's archive that hold the driver; added where this machine's sources name the archive, for a
# list of our own would have to repeat their keys, and apt stops when two lists name two keys for one source
non_free() {
    lists
    ! known nvidia-driver || return 0
    # shellcheck disable=SC2016
    apt-get indextargets --format '$(SOURCESENTRY)' 'Created-By: Packages' 'Origin: Debian' 'Component: main' | sort -u |
        while IFS=: read -r file line; do
            case $file in
                *.sources) as_root sed -i 's/^Components:.*main.*/Components: main contrib non-free non-free-firmware/' "$file" ;;
                *) as_root sed -i "${line}s/ main\\b.*/ main contrib non-free non-free-firmware/" "$file" ;;
            esac
        done
    lists
}

# from_nvidia: the newest driver of NVIDIA's own repository
from_nvidia() {
    cuda_repository
    headers
    if [ -n "$OPEN" ]; then apt_install nvidia-open; else apt_install "cuda-drivers-$CEILING"; fi
    fabric nvidia-fabricmanager
}

# fabric PACKAGE: GPUs behind NVSwitches compute nothing until their fabric is set up
fabric() {
    grep -ls 0x10de /sys/bus/pci/devices/*/vendor | while read -r each; do cat "${each%vendor}class"; done | grep -q 0x0680 || return 0
    known "$1" || return 0
    apt_install "$1"
    if have systemctl; then as_root systemctl enable --now nvidia-fabricmanager; fi
}

# persistence: the driver stays loaded between programs, which then start a second or more earlier
persistence() {
    answers || return 0 # the check says it better
    if nvidia-smi --query-gpu=persistence_mode --format=csv,noheader | grep -q Disabled; then
        at_best nvidia-smi -pm 1
    fi
}

nvidia_check() {
    distribution
    echo "nvidia-smi -L" > "$B/command"
    if ! answers; then
        cat "$B/smi"
        if grep -qi 'no devices' "$B/smi"; then
            advise "the driver runs and finds no GPU: look in dmesg for NVRM; a driver too old for the card, or a GPU that has fallen off the bus, gives this; reboot, then give this machine back"
        elif grep -qi 'version mismatch' "$B/smi"; then
            advise "the driver was upgraded under the running one: reboot this machine"
        else
            advise "the driver does not answer: see dmesg, and run nvidia-smi there"
        fi
        fail "nvidia-smi shows no GPU"
    fi
    cat "$B/smi"
    enough "$(grep -c '^GPU ' "$B/smi")" "nvidia-smi -L"
    at_least "$(version)" "$FLOOR" || {
        echo "nvidia-smi --query-gpu=driver_version" > "$B/command"
        advise "the driver that runs is $(version), and this CUDA needs $FLOOR: reboot if a newer one was just installed, otherwise take an image with a newer driver or ask for an older CUDA"
        fail "driver $(version) is older than $FLOOR"
    }
}
