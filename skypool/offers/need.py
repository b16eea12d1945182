"""Validates the requirements for each node (accelerator, market, region, size) and builds the `Need`.

Each function checks one argument of `ComputePool` or `sky.plan` and returns its plain form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypedDict, cast, get_args

from skypool import accelerators
from skypool.accelerators import Accelerator
from skypool.checks import gibibytes, not_an_argument, number, one_of, switch, whole
from skypool.drivers import registry
from skypool.drivers.contract import Driver
from skypool.errors import UsageError
from skypool.model import Arch, Need, SlotsAsked, Wanted
from skypool.offers.sort_keys import ORDERS, OrderBy

if TYPE_CHECKING:
    from skypool.accelerators.spelling import Spelling
    from skypool_images import Image

    AcceleratorAsked: TypeAlias = Spelling | Sequence[Spelling] | None
    """A spelling of an accelerator, or several of which any will do."""

_ARCHS: dict[str, Arch] = {"x86_64": "x86_64", "amd64": "x86_64", "arm64": "arm64", "aarch64": "arm64"}


class NodeTerms(TypedDict, total=False):
    """Keyword arguments of `ComputePool` and `plan` for the requirements of each node, except the accelerator."""

    market: Wanted
    max_usd_per_hour: float | None
    region: str | Sequence[str] | None
    vcpus: float | None
    memory: float | str | None
    disk: float | str | None
    arch: str | None
    private_network: bool


def nodes_asked(nodes: int | tuple[int, int]) -> tuple[int, int]:
    """Return the `nodes` argument, a number or a pair, as the smallest and the largest number of nodes of a pool.

    Raises:
        UsageError: `nodes` is neither an integer nor a pair, a number is below 1, or the smallest number is above the
            largest.
    """
    if isinstance(nodes, (tuple, list)):
        if len(nodes) != 2:
            raise UsageError(
                f"nodes must be a number such as 4, or a pair (fewest, most) such as (2, 8), not {nodes!r}"
            )
        for each in nodes:
            whole("nodes", each, "how many nodes", least=1)
        if nodes[0] > nodes[1]:
            raise UsageError(
                f"nodes={nodes!r} is (fewest, most) in the wrong order; did you mean {(nodes[1], nodes[0])}?"
            )
        return nodes[0], nodes[1]
    whole("nodes", nodes, "how many nodes", least=1)
    return nodes, nodes


NOBODY = cast(Driver, object())
"""The `provider` of a pool that can rent nothing, as another process has handed it over."""


def drivers_asked(provider: Driver | str | Sequence[Driver | str] | None) -> tuple[Driver, ...]:
    """Return the drivers that a `provider` argument means, in the same order. None means "local", this machine.

    Raises:
        UsageError: the list is empty, a name is unknown, or a value is not a driver, such as a driver's class.
        ImportError: the package of a named driver cannot be imported.
    """
    if provider is NOBODY:
        return ()
    if provider is None:
        provider = "local"
    several = cast(Sequence[Driver | str], provider if isinstance(provider, (list, tuple)) else [provider])
    if not several:
        raise UsageError("provider is an empty list; leave provider= out to use this computer")
    drivers = tuple(registry.driver(each) if isinstance(each, str) else each for each in several)
    for driver in drivers:
        if isinstance(driver, type) or not isinstance(driver, Driver):
            called = f"; did you forget the parentheses: {driver.__name__}()?" if isinstance(driver, type) else ""
            raise UsageError(f"provider takes a driver such as Local(), or its name, not {driver!r}{called}")
    return drivers


def accelerators_asked(accelerator: AcceleratorAsked) -> tuple[Accelerator, ...]:
    """Return an `accelerator` argument as a tuple of alternatives, in the same order; an empty tuple for None.

    Raises UsageError if the list is empty, or a value is not a valid accelerator.
    """
    if accelerator is None:
        return ()
    several = cast("Sequence[Spelling]", accelerator if isinstance(accelerator, (list, tuple)) else [accelerator])
    if not several:
        raise UsageError("accelerator is an empty list; leave accelerator= out if none is needed")
    return tuple(accelerators.parse(each) for each in several)


def hosts_alike(accelerators: Sequence[Accelerator], nodes: int) -> None:
    """Raise UsageError if more than one node (or slice) is wanted, and accelerators differ in their number of hosts."""
    hosts = {each.hosts: each for each in accelerators}
    if nodes > 1 and len(hosts) > 1:
        told = " and ".join(f"{each} has {n} machine{'' if n == 1 else 's'}" for n, each in sorted(hosts.items()))
        raise UsageError(
            f"with nodes={nodes}, the size of the pool would depend on which accelerator is rented ({told}): "
            "ask for accelerators with the same number of machines each, or for nodes=1"
        )


def need_asked(
    function: Callable[..., object],
    accelerator: AcceleratorAsked,
    slots: SlotsAsked,
    bases: Mapping[str, str],
    node: NodeTerms,
) -> Need:
    """Build the `Need` of one node from a caller's arguments.

    A missing keyword sets no requirement, except that `market` is then "on-demand".

    Args:
        function: the function that the user called. For a keyword that does not exist, the error message names the
            arguments of this function.
        bases: the base images (the systems from which machines start), by provider.
        node: the keyword arguments with the requirements.

    Raises:
        UsageError: a keyword does not exist, or a value is invalid. A number that sets a limit must be finite.
    """
    for name in node:
        if name not in NodeTerms.__annotations__:
            what = function.__qualname__.removesuffix(".__init__")
            raise UsageError(not_an_argument(what, function, name, *NodeTerms.__annotations__))
    cap = node.get("max_usd_per_hour")
    vcpus = node.get("vcpus")
    arch = node.get("arch")
    number("max_usd_per_hour", cap, "what one node or slice may cost", optional=True, least=0)
    number("vcpus", vcpus, "how many vCPUs a node has at least", optional=True, above=0)
    for name, value in (("max_usd_per_hour", cap), ("vcpus", vcpus)):
        if value == math.inf:
            raise UsageError(f"{name} must be finite, not {value}; leave {name} out to set no limit")
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
    """Return the `slots` argument, checked: an integer from 1, "per-device", or None. Otherwise raise UsageError."""
    if slots is None:
        return None
    if isinstance(slots, str):
        if slots != "per-device":
            raise UsageError(
                "slots (how many calls a node runs at once) must be a number, 'per-device' for one call per "
                f"device, or left out for one call with all devices, not {slots!r}"
            )
        return "per-device"
    whole("slots", slots, "calls a node runs at once", least=1)
    return int(slots)


def order_asked(order_by: OrderBy) -> OrderBy:
    """Return the `order_by` argument, checked: the order in which offers are ranked. Otherwise raise UsageError."""
    return one_of("order_by", order_by, ORDERS)


def regions_asked(region: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the `region` argument as a tuple of region names and patterns; empty for None, which means any region.

    Whether a provider has such a region is not checked. Raises UsageError for anything but non-empty strings.
    """
    if region is None:
        return ()
    several = cast(tuple[str, ...], tuple(region) if isinstance(region, (list, tuple)) else (region,))
    if not several:
        raise UsageError("region is an empty list; leave region= out to allow every region")
    for each in several:
        if not isinstance(each, str) or not each.strip():
            raise UsageError(
                f"region must be a provider's region such as 'eu-west-1', or a pattern such as 'eu-*', not {each!r}"
            )
    return several


def image_asked(image: Image | None) -> Image:
    """Return the image that was given, or an empty `Image` for None. Raise UsageError for anything else."""
    from skypool_images import Image

    if image is not None and not isinstance(image, Image):
        raise UsageError(f"image takes an Image, such as Image(pip=['numpy']), not {image!r}")
    return Image() if image is None else image


def bases_asked(image: Image, drivers: tuple[Driver, ...]) -> dict[str, str]:
    """Return the base images (the systems from which machines start) that an image sets, by provider."""
    found = {driver.name: image.base_for(driver.name) for driver in drivers}
    return {name: base for name, base in found.items() if base}
