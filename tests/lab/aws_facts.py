"""What EC2 sells, as the lab's AWS knows it: types and zones from moto's data, prices of aws_prices.csv, AMIs, quotas.

Nothing here changes while a test runs. Types and offerings are a snapshot of the real API, its oddities included:
trn2 says 524288 MiB a device, trn2u has no NeuronInfo, g6f counts no GPU, inf1 and inf2 are told of in two fields.
"""

from __future__ import annotations

import csv
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES

PRICES = Path(__file__).parent / "aws_prices.csv"
ENABLED = frozenset((
    "us-east-1", "us-east-2", "us-west-1", "us-west-2", "ap-south-1", "ap-northeast-1", "ap-northeast-2",
    "ap-northeast-3", "ap-southeast-1", "ap-southeast-2", "ca-central-1", "eu-central-1", "eu-west-1", "eu-west-2",
    "eu-west-3", "eu-north-1", "sa-east-1",
))  # fmt: skip
"""Regions that a new account may use; the others ask to be opted in to first."""
PRICING_REGIONS = ("us-east-1", "eu-central-1", "ap-south-1")
Market = Literal["on-demand", "spot", "capacity-block"]


# --- types and where they are --------------------------------------------------------------------------------


def instance_type(name: str) -> dict[str, Any] | None:
    """One record of DescribeInstanceTypes."""
    found: dict[str, Any] | None = INSTANCE_TYPES.get(name)
    return found


@functools.cache
def types_in(region: str) -> frozenset[str]:
    """Every type that a region offers."""
    return frozenset(row["InstanceType"] for row in INSTANCE_TYPE_OFFERINGS["region"].get(region, ()))


@functools.cache
def zones_of(region: str, kind: str) -> tuple[str, ...]:
    """Names of the zones that offer a type."""
    rows = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, ())
    return tuple(sorted(row["Location"] for row in rows if row["InstanceType"] == kind))


@functools.cache
def zone_ids(region: str) -> dict[str, str]:
    """use1-az6 for us-east-1a: which is which differs between accounts."""
    return {zone.name: zone.zone_id for zone in RegionsAndZonesBackend.zones.get(region, ())}


def regions() -> list[str]:
    """All commercial ones."""
    names = (region.name for region in RegionsAndZonesBackend.regions)
    return sorted(name for name in names if not name.startswith(("us-gov", "cn-")))


def offerings(location: str, region: str) -> list[dict[str, str]]:
    """Rows of DescribeInstanceTypeOfferings."""
    rows: list[dict[str, str]] = INSTANCE_TYPE_OFFERINGS[location].get(region, [])
    return rows


def vcpus(kind: str) -> int:
    return int(INSTANCE_TYPES[kind]["VCpuInfo"]["DefaultVCpus"])


def architecture(kind: str) -> str:
    """x86_64 or arm64."""
    supported: list[str] = INSTANCE_TYPES[kind]["ProcessorInfo"]["SupportedArchitectures"]
    return next(each for each in supported if each in ("x86_64", "arm64"))


# --- prices --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Price:
    """One row of the snapshot. A zone id of "" stands for every zone of the region that offers the type."""

    type: str
    region: str
    zone_id: str
    on_demand: float | None
    spot: float | None


@functools.cache
def prices() -> tuple[Price, ...]:
    lines = PRICES.read_text().splitlines()[1:]
    return tuple(_price(row) for row in csv.DictReader(lines))


def _price(row: dict[str, str]) -> Price:
    on_demand, spot = (
        float(row[column]) if row[column] else None for column in ("on_demand_usd_per_hour", "spot_usd_per_hour")
    )
    return Price(row["instance_type"], row["region"], row["zone_id"], on_demand, spot)


@functools.cache
def on_demand_price(region: str, kind: str) -> float | None:
    """USD an hour."""
    found = [row.on_demand for row in prices() if (row.region, row.type) == (region, kind) and row.on_demand]
    return found[0] if found else None


@functools.cache
def spot_prices(region: str) -> dict[tuple[str, str], float]:
    """USD an hour by (type, zone name), where that zone offers the type."""
    found: dict[tuple[str, str], float] = {}
    ids = zone_ids(region)
    for row in prices():
        if row.region == region and row.spot:
            for zone in zones_of(region, row.type):
                if row.zone_id in ("", ids[zone]):
                    found[row.type, zone] = row.spot
    return found


# --- AMIs ----------------------------------------------------------------------------------------------------

Look = Literal["ubuntu", "nvidia", "neuron"]
CANONICAL, AMAZON = "099720109477", "898082745236"


@dataclass(frozen=True)
class Image:
    """An AMI of every region, found by the public SSM parameter `parameter`.

    Attributes:
        size: GB of its snapshot; a root volume may not be smaller.
        look: what a machine made of it has: see tests/lab/aws_images.py.
        release: of Ubuntu.
        venvs: on a Neuron image, those below /opt.
    """

    parameter: str
    name: str
    owner: str
    architecture: str
    size: int
    look: Look
    release: str
    venvs: tuple[str, ...] = ()

    def id(self, region: str) -> str:
        return "ami-0" + hashlib.sha256(f"{region}{self.parameter}".encode()).hexdigest()[:16]

    @property
    def snapshot(self) -> str:
        return "snap-0" + hashlib.sha256(self.parameter.encode()).hexdigest()[:16]


def _ubuntus() -> Iterator[Image]:
    for release, codename, disk in (("22.04", "jammy", "ebs-gp2"), ("24.04", "noble", "ebs-gp3")):
        for cpu, architecture in (("amd64", "x86_64"), ("arm64", "arm64")):
            place = f"/aws/service/canonical/ubuntu/server/{release}/stable/current/{cpu}/hvm/{disk}/ami-id"
            ssd = "hvm-ssd" if disk == "ebs-gp2" else "hvm-ssd-gp3"
            name = f"ubuntu/images/{ssd}/ubuntu-{codename}-{release}-{cpu}-server-20261105"
            yield Image(place, name, CANONICAL, architecture, 8, "ubuntu", release)


def _nvidias() -> Iterator[Image]:
    for release in ("22.04", "24.04"):
        for architecture, title in (("x86_64", ""), ("arm64", "ARM64 ")):
            place = f"/aws/service/deeplearning/ami/{architecture}/base-oss-nvidia-driver-gpu-ubuntu-{release}/latest/"
            name = f"Deep Learning {title}Base OSS Nvidia Driver GPU AMI (Ubuntu {release}) 20261113"
            yield Image(f"{place}ami-id", name, AMAZON, architecture, 100, "nvidia", release)


_NEURON = (
    ("multi-framework", "Deep Learning AMI Neuron (Ubuntu 24.04) 20261030", 105,
     ("jax_0_10", "pytorch_inference_vllm_0_24_0_1_1_0")),
    ("base", "Deep Learning Base Neuron AMI (Ubuntu 24.04) 20261030", 50, ()),
    ("jax-0.10", "Deep Learning AMI Neuron JAX 0.10 (Ubuntu 24.04) 20261030", 65, ("jax_0_10",)),
    ("pytorch-2.9", "Deep Learning AMI Neuron PyTorch 2.9 (Ubuntu 24.04) 20260612", 75,
     ("pytorch_2_9", "pytorch_2_9_nxd_training")),
    ("torch-neuronx-2.14.0", "Deep Learning AMI Neuron torch-neuronx 2.14.0 (Ubuntu 24.04) 20261030", 75,
     ("torch_neuronx_2_14_0",)),  # this parameter's name is formed like the others', and was not read anywhere
)  # fmt: skip


def _neurons() -> Iterator[Image]:
    for part, name, size, venvs in _NEURON:
        place = f"/aws/service/neuron/dlami/{part}/ubuntu-24.04/latest/image_id"
        yield Image(place, name, AMAZON, "x86_64", size, "neuron", "24.04", tuple(venvs))


IMAGES: dict[str, Image] = {each.parameter: each for each in (*_ubuntus(), *_nvidias(), *_neurons())}


def image(region: str, ami: str) -> Image | None:
    """The AMI with that id there."""
    return next((each for each in IMAGES.values() if each.id(region) == ami), None)


# --- quotas --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quota:
    """vCPUs of one family and market that an account may run in a region."""

    code: str
    name: str
    family: str
    market: str


def _quotas() -> Iterator[Quota]:
    rows = {
        "P": ("L-417A185B", "L-7212CCBC"), "G": ("L-DB2E81BA", "L-3819A6DF"), "Inf": ("L-1945791B", "L-B5D1601B"),
        "Trn": ("L-2C3B7624", "L-6B0D517C"), "DL": ("L-6E869C2A", "L-85EED4F7"), "F": ("L-74FC7D96", "L-88CF9481"),
        "Standard": ("L-1216C47A", "L-34B43A08"), "X": ("L-7295265B", "L-E3A00192"), "HPC": ("L-F7808C92", ""),
        "High": ("L-43DA4232", ""),
    }  # fmt: skip
    titles = {"G": "G and VT", "Standard": "Standard (A, C, D, H, I, M, R, T, Z)", "High": "High Memory"}
    for family, (on_demand, spot) in rows.items():
        title = titles.get(family, family)
        yield Quota(on_demand, f"Running On-Demand {title} instances", family, "on-demand")
        if spot:
            title = "P4, P3 and P2" if family == "P" else title
            yield Quota(spot, f"All {title} Spot Instance Requests", family, "spot")
    yield Quota("L-C4BD4855", "All P5 Spot Instance Requests", "P5", "spot")


QUOTAS: dict[str, Quota] = {each.code: each for each in _quotas()}


def family(kind: str) -> str:
    """Which quota a type counts against: P, G (with VT), Inf, Trn, DL, F, HPC, X, High, Standard."""
    for start, found in (
        ("hpc", "HPC"), ("inf", "Inf"), ("trn", "Trn"), ("dl", "DL"), ("vt", "G"), ("gr", "G"), ("u", "High"),
        ("p", "P"), ("g", "G"), ("f", "F"), ("x", "X"),
    ):  # fmt: skip
        if kind.startswith(start):
            return found
    return "Standard"


def bucket(kind: str, market: str) -> str:
    """The same for a market: P5 has a spot quota of its own, and so has P6 here, of which AWS's pages say nothing.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-spot-limits.html (read 2026-11-26 in a stored copy).
    """
    return "P5" if market == "spot" and kind.startswith(("p5", "p6")) else family(kind)
