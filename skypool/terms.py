"""What a user may ask of a pool, checked where it is written."""

from __future__ import annotations

import inspect
import math
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypedDict, TypeVar, get_args

from skypool import accelerators, registry
from skypool.accelerators import Accelerator
from skypool.budget import Budget
from skypool.driver import Driver
from skypool.errors import UsageError, nearest
from skypool.model import Arch, Need, SlotsAsked, Trust, Wanted
from skypool.ranking import RANKS, Rank

T = TypeVar("T")
Duration = float | str | timedelta
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 100 * 365.25 * 86400
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_ARCHS: dict[str, Arch] = {"x86_64": "x86_64", "amd64": "x86_64", "arm64": "arm64", "aarch64": "arm64"}
_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\.([^\W\d]\w*|\*)")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Terms:
    """What a pool is asked to be.

    Attributes:
        minimum, maximum: how many nodes; of accelerators that are slices of several hosts, how many slices.
        lease: seconds a node lives on without a word from this client.
        lifetime: seconds after which every node ends itself, whatever happens; None for no such limit.
        liveness: seconds of silence after which a node is given up.
        wait: seconds for which what is out of stock is asked for again.
        attach: whether the pool is there already, and is taken over; replaces: whether what it loses is replaced.
        trust: how far what nodes send is believed; None leaves that to their offers.
        allow_results: classes that may be made of what a node sends that is trusted with data only.
    """

    name: str
    drivers: tuple[Driver, ...]
    need: Need
    minimum: int
    maximum: int
    lease: float
    lifetime: float | None
    liveness: float
    grace: float
    image: Any = None
    wait: float = 0.0
    attach: bool = False
    replaces: bool = True
    rank: Rank = "cheapest"
    budget: Budget | None = None
    trust: Trust | None = None
    allow_results: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        hosts_alike(self.need.accelerators, self.maximum)


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


def number(
    name: str,
    value: object,
    what: str,
    *,
    optional: bool = False,
    above: float | None = None,
    least: float | None = None,
) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise UsageError(f"{name} is {what}: a number, not {value!r}")
    if above is not None and not value > above:
        raise UsageError(f"{name} is {what}: more than {above:g}, not {value!r}")
    if least is not None and value < least:
        raise UsageError(f"{name} is {what}: at least {least:g}, not {value!r}")


def whole(name: str, value: object, what: str, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} is {what}: a whole number, not {value!r}")
    if value < least:
        raise UsageError(f"{name} is {what}: at least {least}, not {value}")


def seconds(name: str, value: Duration) -> float:
    """A duration in seconds: a number, "90s", "10m", "1h30m", or a timedelta.

    Raises:
        UsageError: it is none, or not positive.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, str):
        parts = _DURATION.findall(value.replace(" ", ""))
        if not parts or "".join(n + u for n, u in parts) != value.replace(" ", ""):
            raise UsageError(f"{name} is a duration such as 90, '90s', '10m' or '1h30m', not {value!r}")
        value = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    number(name, value, "a duration in seconds", above=0)
    if value > _LONGEST:
        raise UsageError(f"{name} is a duration of a hundred years at most, not {value!r} seconds")
    return float(value)


def nodes_asked(nodes: Any) -> tuple[int, int]:
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


def pool_name(name: str | None) -> str:
    if name is None:
        return f"pool-{secrets.token_hex(4)}"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"a pool's name has 1 to 40 of a-z, 0-9 and '-', and begins and ends with neither '-': not {name!r}"
        )
    return name


def drivers_asked(provider: Any) -> tuple[Driver, ...]:
    if provider is None:
        provider = "local"
    several = provider if isinstance(provider, (list, tuple)) else [provider]
    if not several:
        raise UsageError("provider is an empty list; leave it out for this machine")
    drivers = tuple(registry.driver(each) if isinstance(each, str) else each for each in several)
    for driver in drivers:
        if isinstance(driver, type) or not isinstance(driver, Driver):
            called = f"; did you forget the parentheses: {driver.__name__}()?" if isinstance(driver, type) else ""
            raise UsageError(f"provider takes a driver such as Local(), or its name, not {driver!r}{called}")
    return drivers


def accelerators_asked(accelerator: Any) -> tuple[Accelerator, ...]:
    if accelerator is None:
        return ()
    several = accelerator if isinstance(accelerator, (list, tuple)) else [accelerator]
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
    function: Callable[..., Any],
    accelerator: Any,
    slots: SlotsAsked,
    bases: Mapping[str, str],
    node: Mapping[str, Any],
) -> Need:
    """Everything asked of one node.

    Args:
        function: what was called, for the names it has; node: the rest of its keywords, those of `NodeTerms`.

    Raises:
        UsageError: a keyword that does not exist, or a value that cannot be meant.
    """
    for name in node:
        if name not in NodeTerms.__annotations__:
            what = function.__qualname__.removesuffix(".__init__")
            raise UsageError(not_an_argument(what, function, name, *NodeTerms.__annotations__))
    cap, vcpus = node.get("max_usd_per_hour"), node.get("vcpus")
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
        arch=None if node.get("arch") is None else _ARCHS[one_of("arch", node["arch"], _ARCHS)],
        regions=regions_asked(node.get("region")),
        market=one_of("market", node.get("market", "on-demand"), get_args(Wanted)),
        max_usd_per_hour=None if cap is None else float(cap),
        private_network=switch("private_network", node.get("private_network", False)),
    )


def slots_asked(slots: Any) -> SlotsAsked:
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


def switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is True or False, not {value!r}")
    return value


def budget_asked(budget: Any) -> Budget | None:
    """A Budget; a number is its US dollars."""
    if budget is None or isinstance(budget, Budget):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise UsageError(f"budget is Budget(max_usd=20), or a number of US dollars, not {budget!r}")
    return Budget(float(budget))


def rank_asked(rank: Any) -> Rank:
    return one_of("rank", rank, RANKS)


class TrustTerms(TypedDict):
    """How far what nodes send is believed."""

    trust: Trust | None
    allow_results: frozenset[str]


def trust_asked(trust: Any, allow_results: Any) -> TrustTerms:
    """How far nodes are believed, and the classes beyond: given as such, as "mypkg.Point", or "mypkg.*" for a package.

    Raises:
        UsageError: a word that is none, or something that names no class.
    """
    said = None if trust is None else one_of("trust", trust, get_args(Trust))
    several = allow_results if isinstance(allow_results, (list, tuple, set, frozenset)) else [allow_results]
    named = [f"{each.__module__}.{each.__qualname__}" if isinstance(each, type) else each for each in several]
    for each in named:
        if not isinstance(each, str) or not _CLASS.fullmatch(each):
            raise UsageError(f"allow_results names classes, such as 'mypkg.Point' or 'mypkg.*', not {each!r}")
    return {"trust": said, "allow_results": frozenset(named)}


def one_of(name: str, value: Any, choices: Collection[T]) -> T:
    """The value, which is one of these words.

    Raises:
        UsageError: it is none, with the nearest.
    """
    for choice in choices:
        if choice == value:
            return choice
    close = nearest(value, map(str, choices), 1) if isinstance(value, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise UsageError(f"{name} is one of {', '.join(map(repr, choices))}, not {value!r}{hint}")


def gibibytes(name: str, size: float | str | None) -> float:
    """A size in GiB: a number of them, "64GiB", "64g" (GiB), "64GB" (10^9 bytes each) or "1.5TiB"; 0 for None.

    Raises:
        UsageError: it is none, or not positive.
    """
    if isinstance(size, str):
        parts = _SIZE.fullmatch(size)
        if parts is None:
            raise UsageError(f"{name} is a size such as 64, '64GiB' or '1.5TB', not {size!r}")
        amount, unit, rest = float(parts[1]), parts[2].lower(), parts[3].lower()
        if not unit and rest:
            raise UsageError(f"{name} is a size in GiB such as 64, '64GiB' or '1.5TB', not {size!r}")
        step = 1000 if rest == "b" else 1024
        size = amount * step ** _POWERS[unit] / 2**30 if unit else amount
    number(name, size, "a size in GiB", optional=True, above=0)
    if size == math.inf:
        raise UsageError(f"{name} is endless; leave it out for no limit")
    return float(size or 0)


def regions_asked(region: Any) -> tuple[str, ...]:
    if region is None:
        return ()
    several = tuple(region) if isinstance(region, (list, tuple)) else (region,)
    if not several:
        raise UsageError("region is an empty list; leave it out for any")
    for each in several:
        if not isinstance(each, str) or not each.strip():
            raise UsageError(f"region is a provider's name of a place such as 'eu-west-1', or 'eu-*', not {each!r}")
    return several


def image_asked(image: Any) -> Any:
    """The image as it was given, an empty one for None."""
    from skypool_images import Image

    if image is not None and not isinstance(image, Image):
        raise UsageError(f"image takes an Image, such as Image(pip=['numpy']), not {image!r}")
    return Image() if image is None else image


def packed(image: Any, progress: Any = None) -> tuple[Any, dict[str, str]]:
    """Return the archive of the image's files and the values of its secrets, read now: before anything is rented.

    Args:
        progress: see `skypool_images.payload.pack`.

    Raises:
        UsageError: a local file or a variable that it names is not there, or makes no sense.
    """
    from skypool_images import ImageError

    try:
        files = image.pack(progress)
        image.steps(packed=files)
        return files, image.secret_values()
    except (ImageError, OSError) as e:
        raise UsageError(str(e)) from e


def bases_asked(image: Any, drivers: tuple[Driver, ...]) -> dict[str, str]:
    """The base image for each provider for which the image asks for one."""
    found = {driver.name: image.base_for(driver.name) for driver in drivers}
    return {name: base for name, base in found.items() if base}


def not_an_argument(what: str, function: Callable[..., Any], name: str, *more: str) -> str:
    """What to say of a keyword that does not exist; `more` are the names that the signature does not show."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    known = [k for k, p in inspect.signature(function).parameters.items() if p.kind not in kinds and k != "self"]
    known += more
    close = nearest(name, known, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    if name in ("gpu", "gpus", "num_gpus", "accelerators", "devices"):
        hint = "; did you mean accelerator='H100:8'?"
    return f"{what} has no argument {name!r}{hint} (it has {', '.join(known)})"
