"""Detects the accelerators of another machine: with a shell script to run there, and a parser for its output."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files

from skypool.devices import cuda, hpu, neuron, rocm, tpu
from skypool.devices.device import Device

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skypool.accelerators import Accelerator


def question() -> str:
    """Return a POSIX shell script for the other machine, whose output `accelerators` reads.

    The script prints "@of NAME" and then the output of each tool that is installed.
    """
    return (files("skypool.devices") / "ask.sh").read_text("utf-8")


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
