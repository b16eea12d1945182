"""Checked arguments of a pool: name, nodes, lease, budget, trust, and what each node must have."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, get_args

from skypool.checks import one_of
from skypool.drivers.contract import Driver, ends_itself
from skypool.errors import UsageError
from skypool.model import Need, Offer, Trust
from skypool.offers.need import hosts_alike
from skypool.offers.ordering import OrderBy
from skypool.rental.budget import Budget

_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\.([^\W\d]\w*|\*)")
"""A class by its module, or all classes of a package."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
"""A pool's name. It becomes part of tags, labels, host names and file names."""


class Tell(Protocol):
    """Tells the user what happens to a pool, once for each text, whatever the detail."""

    def __call__(self, text: str, detail: str = "") -> None: ...


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
    order_by: OrderBy = "cheapest"
    budget: Budget | None = None
    trust: Trust | None = None
    allow_results: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        hosts_alike(self.need.accelerators, self.maximum)

    def ends_itself(self, offer: Offer) -> bool:
        """Return True if a machine rented on this offer ends itself, and its cost, when its lease is over."""
        return all(ends_itself(each, offer) for each in self.drivers if each.name == offer.provider)


def pool_name(name: str | None) -> str:
    if name is None:
        return f"pool-{secrets.token_hex(4)}"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"a pool's name has 1 to 40 of a-z, 0-9 and '-', and begins and ends with neither '-': not {name!r}"
        )
    return name


def budget_asked(budget: Any) -> Budget | None:
    """A Budget; a number is its US dollars."""
    if budget is None or isinstance(budget, Budget):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise UsageError(f"budget is Budget(max_usd=20), or a number of US dollars, not {budget!r}")
    return Budget(float(budget))


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
