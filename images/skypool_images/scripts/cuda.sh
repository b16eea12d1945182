# NVIDIA's own repository, and the CUDA toolkit from it. TOOLKIT: the package; PLACE: where it goes.

# cuda_repository: through NVIDIA's cuda-keyring package, which brings both list and key
cuda_repository() {
    case $(dpkg --print-architecture) in arm64) arch=sbsa ;; *) arch=x86_64 ;; esac
    official=https://developer.download.nvidia.com/compute/cuda/repos
    at=${SKYPOOL_CUDA_APT:-$official}
    folder=$ID$(echo "$VERSION_ID" | tr -d .)/$arch
    if ! installed cuda-keyring || ! grep -rqsF "$folder" /etc/apt/sources.list.d; then
        fetch "$at/$folder/cuda-keyring_1.1-1_all.deb" "$SKYPOOL_HOME/cuda-keyring.deb" || unreachable SKYPOOL_CUDA_APT "$at/$folder"
        as_root dpkg --force-confmiss --force-confold -i "$SKYPOOL_HOME/cuda-keyring.deb"
    fi
    list=$(grep -lF "/$folder" /etc/apt/sources.list.d/* | head -n 1)
    [ -n "$list" ] || fail "cuda-keyring has brought no list for $folder"
    if [ "$at" != "$official" ]; then as_root sed -i "s,$official,$at,g" "$list"; fi
    one_list "$list" || unreachable SKYPOOL_CUDA_APT "$at/$folder"
}

cuda() {
    distribution
    keep CUDA_HOME "$PLACE"
    keep PATH "$PLACE/bin:$PATH"
    mend
    if [ -x "$PLACE/bin/nvcc" ] || installed "$TOOLKIT"; then return; fi
    if [ "${SKYPOOL_CHANGES:-yes}" != no ]; then
        cuda_repository
        known "${TOOLKIT%%=*}" || {
            echo "apt-get install $TOOLKIT" > "$B/command"
            advise "NVIDIA has no ${TOOLKIT%%=*} for $ID $VERSION_ID; it has: $(apt-cache pkgnames cuda-toolkit- | grep -E '^cuda-toolkit-[0-9]+-[0-9]+$' | sort -V | xargs)"
            fail "no package ${TOOLKIT%%=*}"
        }
    fi
    apt_install "$TOOLKIT"
}

cuda_check() {
    run "$PLACE/bin/nvcc" --version
}
