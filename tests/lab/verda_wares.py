"""What the lab's Verda sells: instance types of the snapshot as its API tells of them, images, what a machine has."""

from __future__ import annotations

import csv
import functools
import uuid
from typing import Any

from tests.lab import aws_images
from tests.lab.aws_images import Card
from tests.lab.machines import Machine
from tests.lab.prices import FOLDER

LOCATIONS = [
    {"code": "FIN-01", "name": "Finland 1", "country_code": "FI"},
    {"code": "FIN-02", "name": "Finland 2", "country_code": "FI"},
    {"code": "FIN-03", "name": "Finland 3", "country_code": "FI"},
    {"code": "ICE-01", "name": "Iceland 1", "country_code": "IS"},
]
CPU = {"instance_type": "CPU.4V.16G", "vcpus": "4", "memory_gib": "16", "region": "FIN-01", "accelerator": "",
       "on_demand_usd_per_hour": "0.0279", "spot_usd_per_hour": "0.0070"}  # fmt: skip
"""It is in no snapshot: those have what has accelerators."""
NVME = 0.2
"""USD a GB and month, as `GET /volume-types` has it."""
OPEN, CLOSED, PLAIN = "ubuntu-24.04-cuda-12.8-open-docker", "ubuntu-22.04-cuda-12.4-docker", "ubuntu-24.04"
IMAGES = {
    PLAIN: "Ubuntu 24.04",
    "ubuntu-22.04": "Ubuntu 22.04",
    CLOSED: "Ubuntu 22.04 + CUDA 12.4 + Docker",
    "ubuntu-22.04-cuda-12.0": "Ubuntu 22.04 + CUDA 12.0",
    "ubuntu-24.04-cuda-12.8-open": "Ubuntu 24.04 + CUDA 12.8 Open",
    OPEN: "Ubuntu 24.04 + CUDA 12.8 Open + Docker",
    "fedora-42": "Fedora 42",
}
"""Names by image types. Open kernel modules do not drive a V100, and Blackwell has no others."""
MODELS = {
    "GB300": ("GB300 SXM6", 288, Card("NVIDIA GB300", 284208, "0x31C2")),
    "B200": ("B200 SXM6", 180, Card("NVIDIA B200", 183359, "0x2901")),
    "H200": ("H200 SXM5", 141, Card("NVIDIA H200", 143771, "0x2335")),
    "H100-80GB": ("H100 SXM5", 80, Card("NVIDIA H100 80GB HBM3", 81559, "0x2330")),
    "A100-80GB": ("A100 SXM4", 80, Card("NVIDIA A100-SXM4-80GB", 81920, "0x20B2")),
    "A100-40GB": ("A100 SXM4", 40, Card("NVIDIA A100-SXM4-40GB", 40960, "0x20B0")),
    "V100-16GB": ("Tesla V100", 16, Card("Tesla V100-SXM2-16GB", 16384, "0x1DB1")),
    "RTX_PRO_6000": ("RTX PRO 6000", 96, Card("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "0x2BB5")),
    "L40S": ("L40S", 48, Card("NVIDIA L40S", 46068, "0x26B9")),
    "RTX_6000_Ada": ("RTX6000 Ada", 48, Card("NVIDIA RTX 6000 Ada Generation", 49140, "0x26B1")),
    "RTX_A6000": ("RTX A6000", 48, Card("NVIDIA RTX A6000", 49140, "0x2230")),
}


@functools.cache
def rows() -> tuple[dict[str, str], ...]:
    """Of the snapshot, and the one without accelerators."""
    return CPU, *csv.DictReader((FOLDER / "verda.csv").read_text().splitlines()[1:])


def gpus(row: dict[str, str]) -> tuple[str, int, list[Card]]:
    """The model as it is called there, GB of each, and each as nvidia-smi sees it."""
    if not row["accelerator"]:
        return "", 0, []
    name, _, count = row["accelerator"].partition(":")
    model, gb, card = MODELS[name]
    return model, gb, [card] * int(count or 1)


@functools.cache
def types() -> dict[str, dict[str, Any]]:
    """What `GET /instance-types` lists, by type. Prices are strings, and of the whole instance."""
    return {row["instance_type"]: _type(row) for row in rows()}


def _type(row: dict[str, str]) -> dict[str, Any]:
    model, gb, cards = gpus(row)
    count, name, total = len(cards), row["instance_type"], gb * len(cards)
    oses = [PLAIN, "ubuntu-22.04", "fedora-42"]
    if count:
        closed = [CLOSED, "ubuntu-22.04-cuda-12.0"] if not model.startswith(("B", "GB", "RTX PRO")) else []
        oses = [*closed, "ubuntu-24.04-cuda-12.8-open", OPEN, *oses]
    return {
        "id": _id(name),
        "instance_type": name,
        "price_per_hour": f"{float(row['on_demand_usd_per_hour']):.4f}",
        "spot_price": f"{float(row['spot_usd_per_hour']):.4f}",
        "dynamic_price": f"{float(row['on_demand_usd_per_hour']):.4f}",
        "description": f"Dedicated {model} instance" if count else "Dedicated CPU instance",
        "cpu": {"description": f"{row['vcpus']} CPU", "number_of_cores": int(row["vcpus"])},
        "gpu": {"description": f"{count}x {model} {gb}GB" if count else "", "number_of_gpus": count},
        "gpu_memory": {"description": f"{total}GB GPU RAM" if count else "", "size_in_gigabytes": total},
        "memory": {"description": f"{row['memory_gib']}GB RAM", "size_in_gigabytes": int(row["memory_gib"])},
        "storage": {"description": "dynamic"},
        "best_for": [],
        "model": model or "CPU Node",
        "name": model or "CPU Node",
        "display_name": model or "CPU Node",
        "p2p": "",
        "currency": "usd",
        "manufacturer": "NVIDIA" if count else "AMD",
        "supported_os": oses,
    }


def images(kind: str = "", *, cluster: bool = False) -> list[dict[str, Any]]:
    """What `GET /images` lists, for one instance type or all; or those of clusters."""
    told = types()[kind]["supported_os"] if kind in types() else [] if kind else [*IMAGES]
    return [
        {
            "id": _id(each), "image_type": each, "name": IMAGES[each], "is_default": each == OPEN,
            "is_cluster": cluster, "details": [], "category": each.partition("-")[0],
        }
        for each in ([OPEN] if cluster else told)
    ]  # fmt: skip


def image_type(said: str) -> str:
    """The image that is meant by its type or its id."""
    return next((each for each in IMAGES if _id(each) == said), said)


def _id(name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, name))


@functools.cache
def cluster_types() -> list[dict[str, Any]]:
    """What `GET /cluster-types` lists: two names are those of the Go SDK's own tests, the prices are 8 GPUs' each."""
    made: list[dict[str, Any]] = []
    for count in (16, 32):
        about = types()["8H200.141S.176V"]
        times = count // about["gpu"]["number_of_gpus"]
        made.append({
            "id": _id(f"{count}H200"), "model": about["model"], "name": f"{count}x H200 cluster",
            "cluster_type": f"{count}H200", "price_per_hour": f"{float(about['price_per_hour']) * times:.4f}",
            "currency": "usd", "manufacturer": "NVIDIA", "node_details": [], "supported_os": [OPEN],
            "cpu": about["cpu"], "memory": about["memory"], "gpu_memory": about["gpu_memory"],
            "gpu": {"description": f"{count}x H200 SXM5 141GB", "number_of_gpus": count},
        })  # fmt: skip
    return made


@functools.cache
def container_types() -> list[dict[str, Any]]:
    """What `GET /container-types` lists."""
    fields = ("id", "model", "name", "instance_type", "cpu", "gpu", "gpu_memory", "memory", "currency", "manufacturer")
    return [
        {**{name: each[name] for name in fields}, "serverless_price": each["price_per_hour"],
         "serverless_spot_price": each["spot_price"]}
        for each in types().values() if each["gpu"]["number_of_gpus"]
    ]  # fmt: skip


PERIODS = [
    {"code": "1_MONTH", "name": "1 month", "is_enabled": True, "unit_name": "month", "unit_value": 1,
     "discount_percentage": 4.0}
]  # fmt: skip
"""Made up: no source shows what this list has."""


def dress(machine: Machine, kind: str, image: str) -> None:
    """Put on its disk, before its first boot, what the image brings."""
    *_, cards = gpus(next(row for row in rows() if row["instance_type"] == kind))
    aws_images.ubuntu(machine, "22.04" if "22.04" in image else "24.04", cards)
    if "cuda" in image:
        aws_images.nvidia(machine, len(cards))


def plug(machine: Machine, kind: str) -> None:
    """Its GPUs on its PCI bus."""
    aws_images.insert(machine, gpus(next(row for row in rows() if row["instance_type"] == kind))[2])
