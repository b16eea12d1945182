# AMD ROCm. RELEASE: of ROCm; DRIVER: the release of amdgpu that goes with it; WHOLE: yes if the whole of ROCm was asked
# for, and not only what shows the devices.
PATH=$PATH:/opt/rocm/bin
export PATH

# shown: how many cards the tools see; they are asked as the agent asks them
shown() {
    : > "$B/rocm"
    if have amd-smi; then timeout 60 amd-smi static --asic --vram --json > "$B/rocm" 2>&1 || true; fi
    if ! grep -q '"gpu":' "$B/rocm" && have rocm-smi; then
        timeout 60 rocm-smi --showproductname --showmeminfo vram --showuniqueid --json > "$B/rocm" 2>&1 || true
    fi
    grep -oE '"(gpu|card[0-9]+)": *[0-9{]' "$B/rocm" | grep -c . || true
}

rocm() {
    distribution
    keep PATH "$PATH"
    mend
    if [ "$WHOLE" = yes ] && ! have hipcc && ! installed rocm; then
        install_rocm
    elif [ "$(shown)" = 0 ]; then
        expect_pci 0x1002 AMD
        install_rocm
    fi
    if [ "$(id -u)" != 0 ] && [ -e /dev/kfd ] && [ ! -w /dev/kfd ]; then
        at_best usermod -aG render,video "$(id -un)"
    fi
}

# rocm_sources RING URI SUITE: the lists
rocm_sources() {
    set -- "$1" "$3" "$2" "$at/amdgpu/$DRIVER/ubuntu"
    case $RELEASE in [0-6].*) ;; *) set -- "$@" "$at/graphics/$RELEASE/ubuntu" ;; esac # a part of its own since 7.0
    ring=$1 suite=$2
    shift 2
    for uri in "$@"; do echo "deb [arch=amd64 signed-by=$ring] $uri $suite main"; done
}

install_rocm() {
    with_apt "install ROCm $RELEASE"
    if [ -e /dev/kfd ]; then
        if installed amd-smi-lib rocm-smi-lib && [ "$WHOLE" != yes ]; then return; fi
    else
        may_change "install the amdgpu driver"
    fi
    if [ "${SKYPOOL_CHANGES:-yes}" != no ]; then
        at=${SKYPOOL_ROCM_APT:-https://repo.radeon.com}
        case $VERSION_CODENAME in bookworm) suite=jammy ;; trixie) suite=noble ;; *) suite=$VERSION_CODENAME ;; esac
        printf 'Package: *\nPin: release o=repo.radeon.com\nPin-Priority: 600\n' > "$B/pin"
        as_root install -m 644 "$B/pin" /etc/apt/preferences.d/skypool-rocm
        repository rocm SKYPOOL_ROCM_APT "$at/rocm/rocm.gpg.key" "$at/rocm/apt/$RELEASE" "$suite" main
    fi
    [ -e /dev/kfd ] || kernel_driver
    apt_install rocminfo rocm-smi-lib amd-smi-lib
    if [ "$WHOLE" = yes ]; then apt_install rocm; fi
}

# kernel_driver: the kernel's own will do; if it has none, AMD's
kernel_driver() {
    if module amdgpu && [ -e /dev/kfd ]; then return; fi
    : > "$B/advice"
    headers
    if known "linux-modules-extra-$KERNEL"; then apt_install "linux-modules-extra-$KERNEL"; fi
    apt_install amdgpu-dkms
    module amdgpu
}

rocm_check() {
    echo "rocm-smi --showproductname --json" > "$B/command"
    number=$(shown)
    [ "$number" != 0 ] || {
        cat "$B/rocm"
        if [ -e /dev/kfd ] && [ ! -w /dev/kfd ]; then
            advise "$(id -un) may not open /dev/kfd: usermod -aG render,video $(id -un), and log in again"
        else
            advise "the tools see no card: is the module loaded (modprobe amdgpu, dmesg | grep amdgpu), and is there /dev/kfd? after a new kernel or driver, reboot"
        fi
        fail "neither amd-smi nor rocm-smi shows a card"
    }
    enough "$number" "rocm-smi --showproductname --json"
}
