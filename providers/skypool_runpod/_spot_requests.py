"""Queries and inputs for RunPod's GraphQL API, for what RunPod's API REST v2 cannot do. This module sends no requests.

RunPod retires the GraphQL API in early 2027: https://docs.runpod.io/release-notes (read 2026-11-23). It alone has spot
pods, machines of the community cloud with a public address, and lower limits of vCPUs and memory. The API:
https://docs.runpod.io/sdks/graphql/manage-pods, https://graphql-spec.runpod.io (read 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal, TypedDict

from skypool.drivers import tags
from skypool.model import Offer
from skypool_runpod._catalog import Size
from skypool_runpod._requests import PORT, Start

ACCOUNT = "query Account { myself { id clientBalance currentSpendPerHr spendLimit } }"
"""Query for the account's id, balance, spending and spending limit."""

COUNTRIES = "query Countries { countryCodes }"
"""Query for the countries of the community cloud."""

STOCK = (
    "query Stock($gpus: GpuTypeFilter, $this: GpuLowestPriceInput) { sold: gpuTypes(input: $gpus) { id secureCloud "
    "securePrice secureSpotPrice communityCloud communityPrice communitySpotPrice now: lowestPrice(input: $this) { "
    "stockStatus vcpus: minVcpu memory: minMemory on_demand: uninterruptablePrice spot: minimumBidPrice } } }"
)
"""Query for prices and stock of GPU types."""

RENT = (
    "mutation Rent($input: PodFindAndDeployOnDemandInput!) { pod: podFindAndDeployOnDemand(input: $input) { id name "
    "costPerHr } }"
)
"""Mutation that creates an on-demand pod."""

BID = (
    "mutation Bid($input: PodRentInterruptableInput!) { pod: podRentInterruptable(input: $input) { id name costPerHr } "
    "}"
)
"""Mutation that creates a spot pod."""


class Machines(TypedDict, total=False):
    """The fields by which `LowestPrice` and `Deploy` choose machines: the place, the number of GPUs, and lower limits.

    `dataCenterId` is for the secure cloud, and `countryCode` for the community cloud. Without them, any place will do.
    """

    dataCenterId: str
    countryCode: str
    gpuCount: int
    supportPublicIp: bool
    minCudaVersion: str
    minVcpuCount: int
    minMemoryInGb: int


class LowestPrice(Machines, total=False):
    """The input of the field `lowestPrice` in the query `STOCK`: the machines whose price and stock are asked for."""

    secureCloud: bool


class Variable(TypedDict):
    """An environment variable of a container."""

    key: str
    value: str


class Deploy(Machines, total=False):
    """The input of the mutations that create a pod. `bidPerGpu` is for spot pods, in USD per hour."""

    name: str
    imageName: str
    ports: str
    startSsh: bool
    dockerArgs: str
    env: list[Variable]
    containerDiskInGb: int
    volumeInGb: int
    networkVolumeId: str
    volumeMountPath: str
    cloudType: Literal["SECURE", "COMMUNITY"]
    gpuTypeId: str
    bidPerGpu: float
    terminateAfter: str


def lowest_price(size: Size, cloud: str, place: str, cuda: str | None) -> LowestPrice:
    """Return the input of the field `lowestPrice` in the query `STOCK`, for pods of one size in one place.

    Args:
        cloud: "secure" or "community".
        place: a data centre or country; "" for any.
        cuda: CUDA version that the machine's driver must support; None for any.
    """
    asked: LowestPrice = {"secureCloud": cloud == "secure"}
    _choose(asked, size, cloud, place, cuda)
    return asked


def deploy(
    offer: Offer,
    size: Size,
    start: Start,
    *,
    cuda: str | None,
    volume: str | None,
    last: datetime | None,
) -> Deploy:
    """Return the input of the mutation that creates one pod with GPUs.

    Args:
        offer: the offer, which has the kind and number of GPUs, the place, and the bid for a spot pod.
        size: the minimum of vCPUs and memory.
        start: name, image and boot script of the container.
        cuda: CUDA version that the machine's driver must support; None for any.
        volume: id of a network volume to mount; None for none.
        last: when RunPod ends the pod, whatever happens in the pod; None for never.
    """
    asked: Deploy = {
        "name": start.name,
        "imageName": start.image,
        "ports": PORT,
        "startSsh": False,
        "dockerArgs": start.args,
        "env": [{"key": key, "value": value} for key, value in start.env.items()],
        "containerDiskInGb": offer.detail["disk"],
        "volumeInGb": 0,
        "cloudType": "SECURE" if offer.zone == "secure" else "COMMUNITY",
        "gpuTypeId": offer.detail["gpu"],
    }
    _choose(asked, replace(size, count=offer.detail["count"]), offer.zone, offer.region, cuda)
    if offer.market == "spot":
        asked["bidPerGpu"] = offer.detail["price"]
    if volume:
        asked["networkVolumeId"] = volume
        asked["volumeMountPath"] = start.mount
    if last is not None:
        asked["terminateAfter"] = tags.stamp(last)
    return asked


def record(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the GraphQL API's record of a new pod to the form that records of the API REST v2 have."""
    return {"id": pod["id"], "name": pod["name"], "status": "PROVISIONING", "cost": pod.get("costPerHr")}


def _choose(asked: Machines, size: Size, cloud: str, place: str, cuda: str | None) -> None:
    """Set the fields of `asked`, an input of the GraphQL API, by which machines are chosen."""
    asked["gpuCount"] = size.count
    asked["supportPublicIp"] = True
    if place and cloud == "secure":
        asked["dataCenterId"] = place
    elif place:
        asked["countryCode"] = place
    if cuda:
        asked["minCudaVersion"] = cuda
    if size.vcpus:
        asked["minVcpuCount"] = size.vcpus
    if size.memory:
        asked["minMemoryInGb"] = int(size.memory)
