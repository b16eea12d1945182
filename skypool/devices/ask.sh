# Lists the accelerators of a machine: prints a line "@of NAME" and then the output, for each tool that is installed.
# shellcheck shell=sh
PATH=$PATH:/usr/sbin:/sbin:/opt/aws/neuron/bin:/opt/rocm/bin

# tell NAME COMMAND...: print "@of NAME" and the output of a tool; print nothing if the tool is not installed
tell() {
    name=$1
    shift
    command -v "$1" > /dev/null || return 0
    echo "@of $name"
    timeout 20 "$@" < /dev/null 2> /dev/null
    echo
}

tell nvidia nvidia-smi -L
tell memory nvidia-smi --query-gpu=index,memory.total,pci.device_id --format=csv,noheader,nounits
tell amd amd-smi static --asic --vram --json
tell neuron neuron-ls --json-output
tell gaudi hl-smi -Q index,name,uuid,module_id,memory.total -f csv,noheader,nounits
echo "@of tpu"
for vendor in /sys/bus/pci/devices/*/vendor; do
    [ "$(cat "$vendor" 2> /dev/null)" != 0x1ae0 ] || cat "${vendor%vendor}device"
done
echo "@of end"
