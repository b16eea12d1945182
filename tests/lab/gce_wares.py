"""What the lab's Compute Engine sells: machine types of the snapshot, zone by zone, images, and what a machine has."""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass

from tests.lab import aws_images
from tests.lab.aws_images import Card
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
DRIVEN = "common-cu128-ubuntu-2204-nvidia-570"
FAMILIES = {
    ("deeplearning-platform-release", DRIVEN): ("common-cu128-ubuntu-2204-nvidia-570-v20261101", "X86_64", 50),
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
    """A machine type. `model` is what its accelerators are called there, "" without any; `slice` that of TPUs alone."""

    name: str
    vcpus: int
    memory_gib: float
    model: str = ""
    cards: tuple[Card, ...] = ()
    slice: str = ""


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
    cards = (card or Card(f"NVIDIA {name}", 81559, "0x2330"),) * count
    return Kind(row["instance_type"], int(float(row["vcpus"])), float(row["memory_gib"]), model, cards)


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
