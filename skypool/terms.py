"""What a user may ask of a pool, checked where it is written."""

from __future__ import annotations

import inspect
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from skypool import accelerators, registry
from skypool.accelerators import Accelerator
from skypool.driver import Driver
from skypool.errors import UsageError, nearest
from skypool.model import Need

Duration = float | str | timedelta
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Terms:
    """What a pool is asked to be.

    Attributes:
        lease: seconds a node lives on without a word from this client.
        lifetime: seconds after which every node ends itself, whatever happens; None for no such limit.
        liveness: seconds of silence after which a node is given up.
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
    env: dict[str, str] = field(default_factory=dict)
    attach: bool = False


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


def environment_of(image: Any) -> dict[str, str]:
    if image is None:
        return {}
    from skypool_images import Image

    if not isinstance(image, Image):
        raise UsageError(f"image takes an Image, such as Image(env={{'SEED': '1'}}), not {image!r}")
    return dict(image.spec.env)


def not_an_argument(what: str, function: Callable[..., Any], name: str, *more: str) -> str:
    """What to say of a keyword that does not exist."""
    known = [
        k for k, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD and k != "self"
    ]
    close = nearest(name, known, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{what} has no argument {name!r}{hint} (it has {', '.join(known)})"
