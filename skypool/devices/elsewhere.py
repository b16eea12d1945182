"""Detects the accelerators of another machine: a shell script to run there, and a parser for its output."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files

from skypool.devices import cuda, hpu, neuron, rocm, tpu
from skypool.devices.device import Device

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skypool.accelerators import Accelerator


def question() -> str:
    """Return a POSIX shell script that prints the accelerators of the machine on which it runs. Nothing is run here.

    The function `accelerators` reads the output. The script runs each vendor's tool that is installed there. It prints
    a line "@of NAME" before the output of each tool, and before the PCI ids of TPU chips.
    """
    return (files("skypool.devices") / "ask.sh").read_text("utf-8")


def accelerators(answer: Iterable[str]) -> tuple[Accelerator, ...]:
    """Return the accelerators in the output of the script that `question` returns, each with the number of devices.

    `answer` has the lines of the output. Devices that skypool's catalogue does not know are left out.
    """
    from skypool.devices.catalogue_entry import summary

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
