"""Detection of the accelerators of another machine: a shell script to run there, and a parser of its answer."""

from __future__ import annotations

from collections.abc import Iterable

from skypool.devices import cuda, hpu, neuron, rocm, tpu
from skypool.devices.device import Device

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skypool.accelerators import Accelerator

QUESTION = """\
PATH=$PATH:/usr/sbin:/sbin:/opt/aws/neuron/bin:/opt/rocm/bin
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
"""
"""POSIX shell script for the other machine. It prints "@of NAME" and then the output of each tool that is installed."""


def accelerators(answer: Iterable[str]) -> tuple[Accelerator, ...]:
    """Return the accelerators in the output of `QUESTION`, each with its count.

    Devices that the catalogue does not know are left out.

    Args:
        answer: the lines that the script printed.
    """
    from skypool.devices.identity import summary

    told: dict[str, str] = {}
    name = ""
    for line in answer:
        if line.startswith("@of "):
            name = line[4:]
        else:
            told[name] = f"{told.get(name, '')}{line}\n"
    chips = [tpu.CHIPS.get(each, "") for each in told.get("tpu", "").split()]
    found: tuple[Device, ...] = cuda.read_smi(told.get("nvidia", ""), told.get("memory"))
    found += rocm.read_amd_static(told.get("amd")) + neuron.read_neuron_ls(told.get("neuron"))
    found += hpu.read_hl_smi(told.get("gaudi"))
    found += tuple(Device("tpu", index, model, pin=str(index)) for index, model in enumerate(chips) if model)
    return summary(found)
