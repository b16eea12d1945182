"""Checks what a user asks of each node (accelerator, market, region, size) and builds the `Need`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypedDict, cast, get_args

from skypool import accelerators
from skypool.accelerators import Accelerator
from skypool.checks import gibibytes, not_an_argument, number, one_of, switch, warn_renamed, whole
from skypool.drivers import registry
from skypool.drivers.contract import Driver
from skypool.errors import UsageError
from skypool.model import Arch, Need, SlotsAsked, Wanted
from skypool.offers.ordering import ORDERS, OrderBy

if TYPE_CHECKING:
    from skypool.accelerators.spelling import Spelling
    from skypool_images import Image

    AcceleratorAsked: TypeAlias = Spelling | Sequence[Spelling] | None
    """A spelling of an accelerator, or several of which any will do."""

_ARCHS: dict[str, Arch] = {"x86_64": "x86_64", "amd64": "x86_64", "arm64": "arm64", "aarch64": "arm64"}


class NodeTerms(TypedDict, total=False):
    """What may be asked of each node beside its accelerator."""

    market: Wanted
    max_usd_per_hour: float | None
    region: str | Sequence[str] | None
    vcpus: float | None
    memory: float | str | None
    disk: float | str | None
    arch: str | None
    private_network: bool


def nodes_asked(nodes: int | tuple[int, int]) -> tuple[int, int]:
    if isinstance(nodes, (tuple, list)):
        if len(nodes) != 2:
            raise UsageError(f"nodes is a number, or (fewest, most), not {nodes!r}")
        for each in nodes:
            whole("nodes", each, "how many nodes", least=1)
        if nodes[0] > nodes[1]:
            raise UsageError(f"nodes={nodes!r} has its fewest above its most; did you mean {(nodes[1], nodes[0])}?")
        return nodes[0], nodes[1]
    whole("nodes", nodes, "how many nodes", least=1)
    return nodes, nodes


def drivers_asked(provider: Driver | str | Sequence[Driver | str] | None) -> tuple[Driver, ...]:
    if provider is None:
        provider = "local"
    several = cast(Sequence[Driver | str], provider if isinstance(provider, (list, tuple)) else [provider])
    if not several:
        raise UsageError("provider is an empty list; leave it out for this machine")
    drivers = tuple(registry.driver(each) if isinstance(each, str) else each for each in several)
    for driver in drivers:
        if isinstance(driver, type) or not isinstance(driver, Driver):
            called = f"; did you forget the parentheses: {driver.__name__}()?" if isinstance(driver, type) else ""
            raise UsageError(f"provider takes a driver such as Local(), or its name, not {driver!r}{called}")
    return drivers


def accelerators_asked(accelerator: AcceleratorAsked) -> tuple[Accelerator, ...]:
    if accelerator is None:
        return ()
    several = cast("Sequence[Spelling]", accelerator if isinstance(accelerator, (list, tuple)) else [accelerator])
    if not several:
        raise UsageError("accelerator is an empty list; leave it out if none is needed")
    return tuple(accelerators.parse(each) for each in several)


def hosts_alike(accelerators: Sequence[Accelerator], nodes: int) -> None:
    """Refuse accelerators of which different numbers of nodes come, where that would decide how many there are.

    Raises:
        UsageError: they are asked for more than once.
    """
    hosts = {each.hosts: each for each in accelerators}
    if nodes > 1 and len(hosts) > 1:
        told = " and ".join(f"{each} of {n} host{'' if n == 1 else 's'}" for n, each in sorted(hosts.items()))
        raise UsageError(
            f"nodes={nodes} of either {told} would be pools of different sizes: "
            "ask for accelerators of as many hosts each, or for nodes=1"
        )


def need_asked(
    function: Callable[..., object],
    accelerator: AcceleratorAsked,
    slots: SlotsAsked,
    bases: Mapping[str, str],
    node: NodeTerms,
) -> Need:
    """Everything asked of one node.

    Args:
        function: what was called, for the names it has; node: the rest of its keywords, those of `NodeTerms`.

    Raises:
        UsageError: a keyword that does not exist, or a value that cannot be meant.
    """
    for name in node:
        if name not in NodeTerms.__annotations__ and name != "rank":  # see `order_asked`
            what = function.__qualname__.removesuffix(".__init__")
            raise UsageError(not_an_argument(what, function, name, *NodeTerms.__annotations__))
    cap = node.get("max_usd_per_hour")
    vcpus = node.get("vcpus")
    arch = node.get("arch")
    number("max_usd_per_hour", cap, "what one node or slice may cost", optional=True, least=0)
    number("vcpus", vcpus, "how many vCPUs a node has at least", optional=True, above=0)
    for name, value in (("max_usd_per_hour", cap), ("vcpus", vcpus)):
        if value == math.inf:
            raise UsageError(f"{name} is endless; leave it out for no limit")
    return Need(
        accelerators_asked(accelerator),
        slots_asked(slots),
        bases,
        vcpus=float(vcpus or 0),
        memory_gib=gibibytes("memory", node.get("memory")),
        disk_gib=gibibytes("disk", node.get("disk")),
        arch=None if arch is None else _ARCHS[one_of("arch", arch, _ARCHS)],
        regions=regions_asked(node.get("region")),
        market=one_of("market", node.get("market", "on-demand"), get_args(Wanted)),
        max_usd_per_hour=None if cap is None else float(cap),
        private_network=switch("private_network", node.get("private_network", False)),
    )


def slots_asked(slots: SlotsAsked) -> SlotsAsked:
    """Return how a node's devices are split, as it was asked for.

    Raises:
        UsageError: it is no number from 1, "per-device" or None.
    """
    if slots is None:
        return None
    if isinstance(slots, str):
        if slots != "per-device":
            raise UsageError(
                f"slots is a number, 'per-device' for one for each device, or left out for one with all devices, not "
                f"{slots!r}"
            )
        return "per-device"
    whole("slots", slots, "calls a node runs at once", least=1)
    return int(slots)


def order_asked(order_by: OrderBy, node: Mapping[str, object]) -> OrderBy:
    """Return the order of offers. `rank`, its former name, is accepted with a warning.

    Args:
        node: the other keywords of the caller, with `rank` where that was given.

    Raises:
        UsageError: it is no order, or both names are given.
    """
    if "rank" in node:
        warn_renamed("rank=", "order_by=")
        if order_by != "cheapest":
            raise UsageError("rank= is the former name of order_by=: give order_by= only")
        return one_of("order_by", node["rank"], ORDERS)
    return one_of("order_by", order_by, ORDERS)


def regions_asked(region: str | Sequence[str] | None) -> tuple[str, ...]:
    if region is None:
        return ()
    several = cast(tuple[str, ...], tuple(region) if isinstance(region, (list, tuple)) else (region,))
    if not several:
        raise UsageError("region is an empty list; leave it out for any")
    for each in several:
        if not isinstance(each, str) or not each.strip():
            raise UsageError(f"region is a provider's name of a place such as 'eu-west-1', or 'eu-*', not {each!r}")
    return several


def image_asked(image: Image | None) -> Image:
    """Return the image as it was given, an empty one for None."""
    from skypool_images import Image

    if image is not None and not isinstance(image, Image):
        raise UsageError(f"image takes an Image, such as Image(pip=['numpy']), not {image!r}")
    return Image() if image is None else image


def bases_asked(image: Image, drivers: tuple[Driver, ...]) -> dict[str, str]:
    """The base image for each provider for which the image asks for one."""
    found = {driver.name: image.base_for(driver.name) for driver in drivers}
    return {name: base for name, base in found.items() if base}
