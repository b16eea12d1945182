# Intel Gaudi: driver, firmware, runtime and hl-smi.

# shown: how many cards hl-smi sees
shown() {
    timeout 60 hl-smi -Q index,name -f csv,noheader > "$B/gaudi" 2>&1 || true
    grep -cE '^ *[0-9]+ *, *HL-' "$B/gaudi" || true
}

gaudi() {
    distribution
    mend
    [ "$(shown)" = 0 ] || return 0
    set -- habanalabs-firmware habanalabs-dkms habanalabs-thunk habanalabs-rdma-core habanalabs-graph habanalabs-firmware-tools
    if ! installed "$@"; then
        expect_pci 0x1da3 Gaudi
        may_change "install Intel Gaudi's packages"
        with_apt "install Intel Gaudi's packages"
        at=${SKYPOOL_GAUDI_APT:-https://vault.habana.ai/artifactory}
        repository gaudi SKYPOOL_GAUDI_APT "$at/api/gpg/key/public" "$at/debian" "$VERSION_CODENAME" main
        headers
        apt_install "$@"
    fi
    if [ "$(shown)" = 0 ] && ! in_container; then module habanalabs; fi
}

gaudi_check() {
    echo "hl-smi -Q index,name" > "$B/command"
    number=$(shown)
    [ "$number" != 0 ] || {
        cat "$B/gaudi"
        advise "hl-smi sees no card: is the module loaded (modprobe habanalabs, dmesg | grep habanalabs)? firmware and driver must be of one release"
        fail "hl-smi shows no card"
    }
    enough "$number" "hl-smi -Q index,name"
}
