"""Google TPUs: the family `Tpu`. The chips are found among the machine's PCI devices, because no tool lists them."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

from skypool.devices.device import Device, Family
from skypool.devices.tools import shown

GOOGLE = "0x1ae0"
CHIPS = {"0x0027": "", "0x005e": "TPUv4", "0x0062": "TPUv5p", "0x0063": "TPUv5e", "0x006f": "TPUv6", "0x0076": "TPU7x"}
"""A dict from the PCI device id of a TPU chip to its model, from hardware_utils.py of JAX (read 2026-11-22).

The model is "" for the id that TPU v2 and v3 have in common.
"""
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/accelerator-type"
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


class Tpu(Family):
    """Google TPU chips of this virtual machine: detection, and variables that make chosen chips visible to processes.

    `detect` leaves out chips that the environment variable `TPU_VISIBLE_CHIPS` hides. No tool reports the state of
    chips.

    Args:
        root: the folder that contains sys/ and dev/; "/" except in tests.
    """

    kind = "tpu"

    def __init__(self, root: str = "/") -> None:
        self.root = root

    def detect(self) -> tuple[Device, ...]:
        ids = chips(self.root)
        if not ids:
            return ()
        type = accelerator_type() if any(not CHIPS.get(each) for each in ids) else ""
        found = [
            Device("tpu", index, CHIPS.get(each) or model_of(type), pin=str(index), pci_id=each)
            for index, each in enumerate(ids)
        ]
        return shown("TPU_VISIBLE_CHIPS", found, lambda device: (device.pin,), ordered=False)

    def visible_env(self, pins: Sequence[str]) -> dict[str, str]:
        # libtpu (Google's TPU library) must also know the arrangement of the visible chips (numbers along x, y, z);
        # otherwise it waits for the hidden chips
        shape = _BOUNDS.get(len(pins))
        extra = {"TPU_CHIPS_PER_PROCESS_BOUNDS": shape, "TPU_PROCESS_BOUNDS": "1,1,1"} if shape else {}
        return {"TPU_VISIBLE_CHIPS": ",".join(pins), **extra}


def chips(root: str = "/") -> list[str]:
    """Return the PCI device ids of the TPU chips that a program can open, sorted by PCI address.

    There are at most as many ids as device files /dev/accel* and /dev/vfio/*. Ids that `CHIPS` lacks are left out.
    """
    found = []
    for vendor in sorted(glob.glob(os.path.join(root, "sys/bus/pci/devices/*/vendor"))):
        if _line(vendor) == GOOGLE and (each := _line(os.path.join(os.path.dirname(vendor), "device"))) in CHIPS:
            found.append(each)
    doors = glob.glob(os.path.join(root, "dev/accel[0-9]*")) + glob.glob(os.path.join(root, "dev/vfio/[0-9]*"))
    return found[: len(doors)]


def _line(path: str) -> str:
    """Return the first line of a file in lower case, without surrounding spaces; "" if it cannot be read."""
    try:
        with open(path) as file:
            return file.readline().strip().lower()
    except OSError:
        return ""


def accelerator_type() -> str:
    """Return the type of the TPU slice that this machine is part of, such as "v5p-8"; "" if the type is unknown.

    A TPU slice is a group of connected TPU chips, on one or several machines. The type is read from the environment
    variable `TPU_ACCELERATOR_TYPE`, or else from Google's metadata server, which has 2 s to answer.
    """
    if named := os.environ.get("TPU_ACCELERATOR_TYPE"):
        return named
    from urllib.request import ProxyHandler, Request, build_opener

    try:
        opener = build_opener(ProxyHandler({}))
        with opener.open(Request(_METADATA, headers={"Metadata-Flavor": "Google"}), timeout=2) as reply:
            return str(reply.read(64).decode())
    except OSError:
        return ""


def model_of(type: str) -> str:
    """Return the model of a TPU slice's chips by the slice's type: "TPUv3" for "v3-8"; "TPU" for an unknown type."""
    from skypool.accelerators import tables

    generation = type.partition("-")[0]
    return tables.tpu_names().get({"v5litepod": "v5e"}.get(generation, generation), "TPU")
