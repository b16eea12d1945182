# Google TPU: the image of the machine brings everything; what can be missing is the right to open the chips.

# doors: the device file of each chip
doors() { ls -d /dev/accel[0-9]* /dev/vfio/[0-9]* 2> /dev/null || true; }

tpu() { keep PJRT_DEVICE TPU; }

tpu_check() {
    echo "ls /dev/accel* /dev/vfio/*" > "$B/command"
    number=$(doors | grep -c . || true)
    [ "$number" != 0 ] || {
        advise "there is no TPU on this machine: it must be a TPU VM, or a container that was given /dev/accel* or /dev/vfio"
        fail "no TPU device files"
    }
    doors
    doors | while read -r each; do
        if [ ! -r "$each" ] || [ ! -w "$each" ]; then
            advise "$(id -un) may not open $each: chmod a+rw $each as root, or log in as root"
            fail "no access to $each"
        fi
    done
    enough "$number" "ls /dev/accel* /dev/vfio/*"
}
