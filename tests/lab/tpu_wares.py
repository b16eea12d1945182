"""What the lab's Cloud TPU sells, zone by zone, and what a host of a slice has, by the catalogue of slices."""

from __future__ import annotations

import functools
import subprocess

from skypool.accelerators import tables
from skypool.accelerators.facts import Slice
from tests.lab import aws_images
from tests.lab.kernel import wait_until
from tests.lab.machines import Machine

ZONES = {
    "v2": "us-central1-a us-central1-b us-central1-c europe-west4-a asia-east1-c",
    "v3": "us-central1-a us-central1-b europe-west4-a us-east1-d",
    "v4": "us-central2-b",
    "v5e": "us-central1-a us-south1-a us-west1-c us-west4-a us-east5-a europe-west4-b",
    "v5p": "us-central1-a us-east5-a europe-west4-b",
    "v6e": "us-central1-b us-east1-d us-east5-a us-east5-b europe-west4-a",
}
"""Of each generation: as Google's page of TPU regions and zones, as far as it could be read (2026-11-21), and its price
pages have them. TPU7x is not sold by this API."""
RUNTIMES = {
    "v2": "tpu-ubuntu2204-base", "v3": "tpu-ubuntu2204-base", "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e",
}  # fmt: skip
CHIPS = {
    "v2": "0x0027",
    "v3": "0x0027",
    "v4": "0x005e",
    "v5e": "0x0063",
    "v5p": "0x0062",
    "v6e": "0x006f",
    "tpu7x": "0x0076",
}
"""PCI device ids."""


def zones() -> list[str]:
    """All where there are TPUs, and one that has none."""
    return sorted({zone for line in ZONES.values() for zone in line.split()} | {"us-north9-x"})


@functools.cache
def types(zone: str) -> tuple[Slice, ...]:
    """The slices that a zone has."""
    here = {each for each, line in ZONES.items() if zone in line.split()}
    return tuple(each for each in tables.slices().values() if each.generation in here)


def runtimes(zone: str) -> list[str]:
    """The runtime versions that it has."""
    return sorted({RUNTIMES[each.generation] for each in types(zone)})


def dress(machine: Machine) -> None:
    """Put on its disk, before its first boot, what every runtime version brings."""
    aws_images.ubuntu(machine, "22.04", [])


def plug(machine: Machine, kind: str) -> None:
    """Its chips, on its PCI bus and as files that a program opens; and the name of the metadata service."""
    each = tables.slices()[kind]
    lines = ["echo 169.254.169.254 metadata.google.internal >> /etc/hosts"]
    lines.append("mount -t tmpfs none /sys/bus/pci/devices")
    for number in range(each.chips_per_vm):
        place = f"/sys/bus/pci/devices/0000:{number + 4:02x}:00.0"
        device = CHIPS[each.generation]
        lines.append(f"mkdir {place}; echo 0x1ae0 >{place}/vendor; echo {device} >{place}/device")
        lines.append(f"touch /dev/accel{number}; chmod 666 /dev/accel{number}")
    try:
        machine.run("\n".join(lines))
    except (RuntimeError, subprocess.CalledProcessError):
        wait_until(lambda: not machine.is_running, 5.0, "a machine that was furnished has switched itself off")
