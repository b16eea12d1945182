"""The checked arguments of a pool, `Terms`, and the functions that check them: name, budget, trust and image."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, cast, get_args

from skypool.checks import one_of
from skypool.errors import UsageError
from skypool.model import Need, Trust
from skypool.offers.need import hosts_alike
from skypool.offers.sort_keys import OrderBy
from skypool.rental.budget import Budget
from skypool.wire.save_orders import DRAIN

if TYPE_CHECKING:
    from skypool.data.data_asked import DataFolder
    from skypool.data.save_asked import SaveFolder
    from skypool.link.spares import Spares

Check = Literal["network", "nccl"]
"""What a pool checks among its nodes: "network" for TCP connections; "nccl" for these and an all-reduce of GPUs."""
_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\.([^\W\d]\w*|\*)")
"""Matches the full name of a class, such as "mypkg.Point", or all classes of a package, such as "mypkg.*"."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
"""Matches a pool's name, which becomes part of tags, labels, host names and file names."""


class Tell(Protocol):
    """A function that shows the user a notice about a pool: a `text`, followed by a `detail` in parentheses.

    The same text is shown only once, even if the detail differs.
    """

    def __call__(self, text: str, detail: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class Terms:
    """The checked arguments with which a pool was made. Durations are in seconds.

    Those that are not described here are the arguments of `ComputePool` of the same name.

    Attributes:
        minimum: number of nodes (or slices) with which the pool is ready.
        maximum: largest number of nodes (or slices).
        lifetime: time from the beginning of the pool's costs to its end, also while calls run; None for no such limit.
        attach: True if the pool exists already and is taken over.
        replaces: True if lost nodes are replaced.
        trust: None if the offer of each machine decides.
        allow_results: names of the classes that results may contain besides plain data, if they are read as data.
        linger: time for which the pool lives without work while it is open; None for no limit.
        stay: time for which machines stay after a `with` block; 0 if they end with it.
        lends: True if nodes that ask get modules of the user which the program has not loaded.
        save: the folders that each node saves to buckets.
        data: the folders of each node that are filled from buckets.
        drain: the most seconds for what is left of saved folders at the end.
        complete: what is written last into a checkpoint.
        spares: opens further connections to each node while it is taken over. None opens none.

    Raises:
        UsageError: `maximum` is above 1, and the alternatives of the accelerator have different numbers of hosts.
    """

    name: str
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
    check: Check | None = "network"
    linger: float | None = None
    stay: float = 0.0
    lends: bool = True
    save: tuple[SaveFolder, ...] = ()
    data: tuple[DataFolder, ...] = ()
    drain: float = DRAIN
    complete: tuple[str, ...] = ()
    spares: Spares | None = None

    def __post_init__(self) -> None:
        hosts_alike(self.need.accelerators, self.maximum)


def pool_name(name: str | None) -> str:
    """Return a pool's name in the form that clouds accept: lower case, with "-" in place of "_" and ".".

    For None, return a random name such as "pool-1f0a9c3e".

    Raises UsageError unless the name has 1 to 40 letters, digits, "-", "_" and ".", and begins and ends with a letter
    or digit.
    """
    if name is None:
        return f"pool-{secrets.token_hex(4)}"
    found = spelt(name) if isinstance(name, str) and name.isascii() else ""
    if not _NAME.fullmatch(found):
        raise UsageError(
            "a pool's name must have 1 to 40 letters, digits, '-', '_' and '.', with a letter or digit at either end, "
            f"not {name!r}"
        )
    return found


def spelt(name: str) -> str:
    """Return a pool's name in the form that all clouds accept: `Llama3.1_a` becomes `llama3-1-a`, the same pool."""
    return name.lower().replace("_", "-").replace(".", "-")


def budget_asked(budget: Any) -> Budget | None:
    """Return the `budget` argument of a pool as a `Budget`. A number becomes a budget of that many US dollars.

    Raises UsageError for another type, and for a number that is not positive and finite.
    """
    if budget is None or isinstance(budget, Budget):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise UsageError(
            f"budget must be a Budget such as Budget(max_usd=20), or a number of US dollars, not {budget!r}"
        )
    return Budget(float(budget))


def check_asked(check: object) -> Check | None:
    """Return the `check` argument of a pool if it is valid. Otherwise raise UsageError."""
    if check is None or check in get_args(Check):
        return cast("Check | None", check)
    raise UsageError(
        "check must be 'network' to check that nodes reach each other, 'nccl' to also measure an all-reduce of their "
        f"GPUs, or None for no check, not {check!r}"
    )


class TrustTerms(TypedDict):
    """The fields `trust` and `allow_results` of `Terms`, which say how far data from nodes is trusted."""

    trust: Trust | None
    allow_results: frozenset[str]


def trust_asked(trust: Any, allow_results: Any) -> TrustTerms:
    """Check the trust arguments of a pool, and return them as the fields `trust` and `allow_results` of `Terms`.

    `trust` must be "full", "data" or None. `allow_results` must have classes, and names such as "mypkg.Point" and
    "mypkg.*". A class becomes its full name. Names are not looked up, so the classes need not exist here. Raises
    UsageError for other values.
    """
    said = None if trust is None else one_of("trust", trust, get_args(Trust))
    several = allow_results if isinstance(allow_results, (list, tuple, set, frozenset)) else [allow_results]
    named = [f"{each.__module__}.{each.__qualname__}" if isinstance(each, type) else each for each in several]
    for each in named:
        if not isinstance(each, str) or not _CLASS.fullmatch(each):
            raise UsageError(f"allow_results must name classes, such as 'mypkg.Point' or 'mypkg.*', not {each!r}")
    return {"trust": said, "allow_results": frozenset(named)}
