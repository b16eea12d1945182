"""What the lab's Compute Engine sells: machine types of the snapshot, zone by zone, images, and what a machine has."""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.lab import aws_images
from tests.lab.aws_images import Card
from tests.lab.gce_things import refused
from tests.lab.machines import Machine
from tests.lab.prices import FOLDER

PLAIN = {"us-central1": "a b c f", "us-east1": "b c d", "africa-south1": "a"}
"""Zones of the regions that have machines without GPUs here."""
MODELS = {
    "H100-80GB": ("nvidia-h100-80gb", Card("NVIDIA H100 80GB HBM3", 81559, "0x2330")),
    "A100-80GB": ("nvidia-a100-80gb", Card("NVIDIA A100-SXM4-80GB", 81920, "0x20B2")),
    "A100-40GB": ("nvidia-tesla-a100", Card("NVIDIA A100-SXM4-40GB", 40960, "0x20B0")),
    "L4": ("nvidia-l4", Card("NVIDIA L4", 23034, "0x27B8")),
    "RTX_PRO_6000": (
        "nvidia-rtx-pro-6000",
        Card("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "0x2BB5"),
    ),
}
ATTACHED = {
    "nvidia-tesla-t4": (Card("Tesla T4", 15360, "0x1EB8"), {1: 48, 2: 48, 4: 96}, ("us-central1-a", "europe-west4-a")),
    "nvidia-tesla-v100": (
        Card("Tesla V100-SXM2-16GB", 16384, "0x1DB1"),
        {1: 12, 2: 24, 4: 48, 8: 96},
        ("us-central1-a",),
    ),
    "nvidia-tesla-p100": (Card("Tesla P100-PCIE-16GB", 16384, "0x15F8"), {1: 16, 2: 32, 4: 64}, ("us-central1-f",)),
    "nvidia-tesla-p4": (Card("Tesla P4", 8192, "0x1BB3"), {1: 24, 2: 48, 4: 96}, ("us-central1-a",)),
}
"""What may be attached to N1: the most vCPUs by their number, and the zones that have some.
https://cloud.google.com/compute/docs/gpus (read 2026-11-22)"""
DRIVEN = "common-cu129-ubuntu-2404-nvidia-580"
OLDER = "common-cu128-ubuntu-2204-nvidia-570"
FAMILIES = {
    ("deeplearning-platform-release", DRIVEN): (f"{DRIVEN}-v20260626", "X86_64", 50),
    ("deeplearning-platform-release", OLDER): (f"{OLDER}-v20261101", "X86_64", 50),
    ("ubuntu-os-cloud", "ubuntu-2404-lts-amd64"): ("ubuntu-2404-noble-amd64-v20261118", "X86_64", 10),
    ("ubuntu-os-cloud", "ubuntu-2204-lts"): ("ubuntu-2204-jammy-v20261118", "X86_64", 10),
    ("ubuntu-os-cloud", "ubuntu-2404-lts-arm64"): ("ubuntu-2404-noble-arm64-v20261118", "ARM64", 10),
    ("ubuntu-os-accelerator-images", "ubuntu-accel-2404-amd64-tpu-tpu7x"): (
        "ubuntu-accel-2404-amd64-tpu-tpu7x-v20260716",
        "X86_64",
        20,
    ),
    ("lab-project", "large"): ("large-v1", "X86_64", 500),
}
"""Images by project and family: name, architecture, GB."""


@dataclass(frozen=True)
class Kind:
    """A machine type.

    Attributes:
        model: what its accelerators are called there, "" without any; slice: that of TPUs alone.
        arch: the processor, as the API calls it.
    """

    name: str
    vcpus: int
    memory_gib: float
    model: str = ""
    cards: tuple[Card, ...] = ()
    slice: str = ""
    arch: str = "X86_64"


_TPU7X = Kind("tpu7x-standard-1t", 56, 240, slice="tpu7x-2"), Kind("tpu7x-standard-4t", 224, 960, slice="tpu7x-8")
TPUS = {"us-central1-c": _TPU7X, "us-central1-ai1a": _TPU7X}
"""Zones with TPU7x: github.com/AI-Hypercomputer/xpk."""


@functools.cache
def sold() -> dict[str, dict[str, Kind]]:
    """Machine types by zone."""
    found: dict[str, dict[str, Kind]] = {}
    for row in csv.DictReader((FOLDER / "gcp.csv").read_text().splitlines()[1:]):
        kind = _kind(row)
        for letter in PLAIN.get(row["region"], "a b").split()[:2]:
            found.setdefault(f"{row['region']}-{letter}", {})[kind.name] = kind
    for zone in {zone for _, _, zones in ATTACHED.values() for zone in zones}:
        found.setdefault(zone, {}).update({kind.name: kind for kind in _n1()})
    found["us-central1-b"].update({kind.name: kind for kind in _newest()})
    for region, letters in PLAIN.items():
        for kind in _plain():
            for letter in letters.split():
                found.setdefault(f"{region}-{letter}", {})[kind.name] = kind
    for zone in TPUS:
        found.setdefault(zone, {}).update({each.name: each for each in TPUS[zone]})
    return found


def _kind(row: dict[str, str]) -> Kind:
    name, _, rest = row["accelerator"].partition(":")
    name, share = name.partition("/")[0], row["accelerator"].partition("/")[2]
    count = 1 if share else int(rest.partition("/")[0] or 1)
    model, card = next((MODELS[each] for each in MODELS if name.startswith(each)), (f"nvidia-{name.lower()}", None))
    model = "nvidia-h100-mega-80gb" if row["instance_type"].startswith("a3-megagpu") else model
    cards = (card or Card(f"NVIDIA {name}", 81559, "0x2330"),) * count
    return Kind(row["instance_type"], int(float(row["vcpus"])), float(row["memory_gib"]), model, cards)


def _n1() -> list[Kind]:
    sizes, gib = (1, 2, 4, 8, 16, 32, 64, 96), {"standard": 3.75, "highmem": 6.5}
    return [
        Kind(f"n1-{use}-{n}", n, n * each) for use, each in gib.items() for n in sizes if (use, n) != ("highmem", 1)
    ]


def _newest() -> list[Kind]:
    h200, b200 = Card("NVIDIA H200", 143771, "0x2335"), Card("NVIDIA B200", 183359, "0x2901")
    return [
        Kind("a3-ultragpu-8g", 224, 2952, "nvidia-h200-141gb", (h200,) * 8),
        Kind("a4-highgpu-8g", 224, 3968, "nvidia-b200", (b200,) * 8),
    ]


@dataclass(frozen=True)
class Nics:
    """The most network interfaces of a machine: of Ethernet, which are GVNIC or VirtIO, and of MRDMA."""

    ethernet: int
    rdma: int = 0

    @property
    def all(self) -> int:
        return self.ethernet + self.rdma


def nics(kind: Kind) -> Nics:
    """The most network interfaces of a machine type.

    A4, A3 Ultra and A4X: https://docs.cloud.google.com/compute/docs/gpus/gpu-network-bandwidth. A3 Mega and A3 High
    have one for each of 8 or 4 further networks: https://docs.cloud.google.com/compute/docs/gpus/gpudirect. Others
    have one for each vCPU, two at least and eight at most:
    https://docs.cloud.google.com/vpc/docs/create-use-multiple-interfaces (all read 2026-11-24 in stored copies)
    """
    fixed = {
        "a3-ultragpu-8g": Nics(2, 8), "a4-highgpu-8g": Nics(2, 8), "a4x-highgpu-4g": Nics(2, 4),
        "a3-megagpu-8g": Nics(9), "a3-highgpu-8g": Nics(5), "a3-edgegpu-8g": Nics(5),
    }  # fmt: skip
    return fixed.get(kind.name) or Nics(max(2, min(8, kind.vcpus)))


QUOTAS = tuple(
    f"{market}NVIDIA_{model}_GPUS"
    for market in ("", "PREEMPTIBLE_")
    for model in ("A100", "A100_80GB", "L4", "T4", "V100", "P100", "P4")
)
"""Metrics of the quotas of a region that Compute Engine's API tells: Quota.metric of the discovery document compute:v1.
Newer GPUs have quotas, too, which only the Cloud Quotas API tells."""
DISKS = ("pd-standard", "pd-balanced", "pd-ssd", "hyperdisk-balanced", "local-ssd")
"""Disk types, which every zone has here."""


def equipped(kind: Kind, zone: str, told: Sequence[Mapping[str, Any]]) -> Kind:
    """The machine type with the GPUs that are to be attached to it; refuses what the API does."""
    for number, each in enumerate(told):
        model, count = each["acceleratorType"].rpartition("/")[2], int(each["acceleratorCount"])
        card, most, zones = ATTACHED.get(model, (None, {}, ()))
        where = f"resource.guestAccelerators[{number}].acceleratorCount"
        if card is None or zone not in zones:
            text = f"The resource 'projects/lab-project/zones/{zone}/acceleratorTypes/{model}' was not found"
            raise refused(404, "notFound", text)
        if not kind.name.startswith("n1-"):
            text = f"[{kind.name}, {model}] features are not compatible for creating instance."
            raise refused(400, "badRequest", text)
        if count not in most:
            raise refused(400, "invalid", f"Invalid value for field '{where}': '{count}'.")
        if kind.vcpus > most[count] or kind.memory_gib > 6.5 * most[count]:
            text = f"At most {most[count]} vCPUs can be used along with {count} accelerator cards in an instance."
            raise refused(400, "invalid", f"Invalid value for field '{where}': '{count}'. {text}")
        kind = replace(kind, model=model, cards=(card,) * count)
    return kind


def _plain() -> list[Kind]:
    gib = {"highcpu": 1, "standard": 4, "highmem": 8}
    e2 = [Kind(f"e2-{use}-{n}", n, n * each) for use, each in gib.items() for n in (2, 4, 8, 16, 32) if n * each < 256]
    return [*e2, Kind("n2-standard-128", 128, 512), Kind("t2d-standard-2", 2, 8)]


def dress(machine: Machine, kind: Kind, image: str) -> None:
    """Put on its disk, before its first boot, what the image brings."""
    machine.names = "169.254.169.254 metadata.google.internal metadata\n"
    aws_images.ubuntu(machine, "22.04" if "2204" in image else "24.04", list(kind.cards))
    if "nvidia" in image:
        aws_images.nvidia(machine, len(kind.cards))
