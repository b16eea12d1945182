"""Builds the bodies of the two large requests to Vast.ai: a search for offers, and the creation of an instance.

This module sends no requests. Fields: https://docs.vast.ai/api-reference/search/search-offers and
https://docs.vast.ai/api-reference/instances/create-instance (read 2026-11-21).
"""

from __future__ import annotations

import shlex
from importlib.resources import files
from typing import Any, Literal, NotRequired, TypedDict

from skypool.accelerators.spelling import meanings
from skypool.drivers import userdata
from skypool.model import Market, Need, Offer, Order
from skypool_vastai import _instances

MIB_PER_GIB = 1024
"""MiB in one GiB. Vast.ai counts memory in MiB, skypool in GiB."""

MOST_OFFERS = 512
"""Maximum number of offers that one search returns."""

_NO_TMUX = "touch ~/.no_auto_tmux"
"""Shell command after which a login to an instance does not start tmux, as Vast.ai's setup does by default."""

_RENTAL_TYPES: dict[Market, Literal["on-demand", "bid"]] = {"on-demand": "on-demand", "spot": "bid"}
"""A dict from market to Vast.ai's name of the market."""

Condition = dict[str, Any]
"""One condition of a search, as a dict from operator to operand: {"gte": 0.98} means "at least 0.98"."""


class Search(TypedDict):
    """Body of `POST /api/v0/bundles/`, which searches offers.

    A condition such as {"gte": 0.98} means "at least 0.98". Disk sizes are in GB, `cpu_ram` is in MiB. An optional
    field that is left out does not restrict the search.
    """

    rentable: Condition
    rented: Condition
    external: Condition
    reliability: Condition
    disk_space: Condition
    verified: NotRequired[Condition]
    direct_port_count: NotRequired[Condition]
    cpu_cores: NotRequired[Condition]
    cpu_ram: NotRequired[Condition]
    gpu_name: NotRequired[Condition]
    num_gpus: NotRequired[Condition]
    type: Literal["on-demand", "bid"]
    order: list[list[str]]
    limit: int
    allocated_storage: int


class Create(TypedDict):
    """Body of `PUT /api/v0/asks/{id}/`, which rents a machine and creates an instance on it.

    `disk` is in GB. `price` is the bid in US dollars per hour, for spot machines only.
    """

    client_id: str
    image: str
    disk: int
    label: str
    price: NotRequired[float]
    target_state: Literal["running"]
    cancel_unavail: bool
    runtype: Literal["args", "ssh_proxy"]
    onstart: str
    args: NotRequired[list[str]]
    env: dict[str, str]


def search(
    need: Need, market: Market, *, disk_gb: int, min_reliability: float, verified: bool, direct: bool
) -> Search | None:
    """Return the body of the search for offers that could serve as a node.

    Vast.ai will return at most 512 results, the lowest price first. A result may be a share of a machine. The share may
    have too few vCPUs or too little memory, because Vast.ai compares the whole machine.

    Returns None if the need has accelerators and Vast.ai has none of them.

    Args:
        need: the requirements of a node.
        market: the market to search, "on-demand" or "spot".
        disk_gb: disk size in GB that the machine must have and that the price includes.
        min_reliability: minimum reliability of the machine, from 0 to 1.
        verified: True for only machines that Vast.ai has tested.
        direct: True for only machines that have a port of their own.
    """
    asked: Search = {
        "rentable": {"eq": True},
        "rented": {"eq": False},
        "external": {"eq": False},
        "reliability": {"gte": min_reliability},
        "disk_space": {"gte": disk_gb},
        "type": _RENTAL_TYPES[market],
        "order": [["dph_total", "asc"]],
        "limit": MOST_OFFERS,
        "allocated_storage": disk_gb,
    }
    if verified:
        asked["verified"] = {"eq": True}
    if direct:
        asked["direct_port_count"] = {"gte": 1}
    if need.vcpus:
        asked["cpu_cores"] = {"gte": need.vcpus}
    if need.memory_gib:
        asked["cpu_ram"] = {"gte": need.memory_gib * MIB_PER_GIB}
    if need.accelerators and all(each.kind != "cpu" for each in need.accelerators):
        names = _gpu_names(need)
        if not names:
            return None
        asked["gpu_name"] = {"in": names}
        asked["num_gpus"] = {"in": sorted({each.count for each in need.accelerators})}
    return asked


def _gpu_names(need: Need) -> list[str]:
    """Return all names that Vast.ai has for the accelerators of a need, sorted."""
    wanted = {each.name for each in need.accelerators}
    return sorted(alias for alias, has in meanings("vastai").items() if has.name in wanted)


def create(offer: Offer, order: Order, *, image: str, base: str) -> Create:
    """Return the body of the request for an instance that runs the pool's start script.

    The body depends on how the offer's machine is reached:

    - At a port of its own: the container runs only this script (`runtype` "args"). The script starts the guard, which
      destroys the instance at the end of the lease, and then an SSH server.
    - Through Vast.ai's ssh proxy: the proxy leads only to an SSH server that Vast.ai itself starts (`runtype`
      "ssh_proxy"). The script configures this SSH server.

    The script is compressed into an environment variable, from which the container's command unpacks the script. On the
    spot market, the body contains the offer's bid.

    Args:
        image: Docker image of the container.
        base: address of the API, where the container requests its own end.
    """
    end = f"base={shlex.quote(base)}\n{(files('skypool_vastai') / 'end.sh').read_text('utf-8')}"
    asked: Create = {
        "client_id": "me",
        "image": image,
        "disk": offer.detail["disk"],
        "label": _instances.label(order),
        "target_state": "running",
        "cancel_unavail": True,
        "runtype": "args",
        "onstart": "sh",
        "env": {},
    }
    if offer.detail["proxy"]:
        script = userdata.boot_script(order, end=end)
        asked["runtype"] = "ssh_proxy"
        asked["onstart"] = f"{_NO_TMUX}; {userdata.UNPACK}"
    else:
        script = userdata.start_script(order, end=end)
        asked["args"] = ["-c", userdata.UNPACK]
        asked["env"]["-p 22:22"] = "1"  # opens the port
    asked["env"]["SKYPOOL_START"] = userdata.packed(script)
    if offer.market == "spot":
        asked["price"] = offer.detail["price"]
    return asked
