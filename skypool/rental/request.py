"""The checked arguments of a pool, `Terms`, and the functions that check them: name, budget, trust and image."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict, cast, get_args

from skypool.checks import one_of
from skypool.drivers.contract import Driver, ends_itself
from skypool.errors import UsageError
from skypool.model import Need, Offer, Trust
from skypool.offers.need import hosts_alike
from skypool.offers.ordering import OrderBy
from skypool.rental.budget import Budget

Check = Literal["network", "nccl"]
"""What a pool checks among its nodes: "network" for TCP connections; "nccl" for these and an all-reduce of GPUs."""
_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\.([^\W\d]\w*|\*)")
"""Matches the full name of a class, such as "mypkg.Point", or all classes of a package, such as "mypkg.*"."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
"""Matches a pool's name, which becomes part of tags, labels, host names and file names."""


class Tell(Protocol):
    """A function that shows the user a notice about a pool: `text`, and a `detail` that may change.

    The same text is shown only once, even if the detail differs.
    """

    def __call__(self, text: str, detail: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class Terms:
    """The checked arguments with which a pool was made.

    Attributes:
        name: name of the pool.
        drivers: providers that may be used.
        need: requirements of each node.
        minimum: number of nodes with which the pool is ready. If the accelerator is a slice (several machines that are
            rented together at one price), the number of slices.
        maximum: largest number of nodes, or of slices.
        lease: seconds for which a node lives on without hearing from this client.
        lifetime: seconds after the beginning of its costs at which the pool ends in any case; None for no such limit.
        liveness: seconds of silence after which a node is given up.
        grace: seconds that a call has to stop after it was asked to.
        image: software and files of the nodes.
        wait: seconds for which offers that are out of stock are tried again.
        attach: True if the pool exists already and is taken over.
        replaces: True if lost nodes are replaced.
        order_by: criterion by which offers are ranked.
        budget: limit of the pool's cost; None for none.
        trust: "full" if results of nodes may be unpickled, "data" if they are read as plain data only. None: the offer
            of each machine decides.
        allow_results: names of the classes that results may contain besides plain data, if they are read as data.
        check: what is checked among the nodes: "network" for connections, "nccl" for these and an all-reduce,
            or None for nothing.
        linger: seconds for which the pool lives without work while it is open; None for no limit.
        stay: seconds for which machines stay after a `with` block; 0 if they end with it.

    Raises:
        UsageError: `maximum` is above 1, and the accelerators have different numbers of machines.
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
    check: Check | None = "network"
    linger: float | None = None
    stay: float = 0.0

    def __post_init__(self) -> None:
        hosts_alike(self.need.accelerators, self.maximum)

    def ends_itself(self, offer: Offer) -> bool:
        """Return True if a machine of this offer ends itself, and is no longer billed, when its lease is over.

        Also return True if the pool has no driver for the offer's provider.
        """
        return all(ends_itself(each, offer) for each in self.drivers if each.name == offer.provider)


def pool_name(name: str | None) -> str:
    """Return a name in the form that a pool has it, see `spelt`. For None, return a random one such as "pool-1f0a9c3e".

    Raises:
        UsageError: the name does not consist of 1 to 40 letters, digits, "-", "_" and ".", or does not begin and end
            with a letter or digit.
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
    """Return the name of a pool as all clouds take it: `Llama3.1_a` and `llama3-1-a` are the same pool."""
    return name.lower().replace("_", "-").replace(".", "-")


def budget_asked(budget: Any) -> Budget | None:
    """Return the `budget` argument of a pool as a `Budget`. A number becomes a budget of that many US dollars.

    None (no budget) and a `Budget` are returned unchanged.

    Raises:
        UsageError: `budget` is of another type, or is a number that is not positive and finite.
    """
    if budget is None or isinstance(budget, Budget):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise UsageError(
            f"budget must be a Budget such as Budget(max_usd=20), or a number of US dollars, not {budget!r}"
        )
    return Budget(float(budget))


def check_asked(check: object) -> Check | None:
    """Return the `check` argument of a pool if it is valid.

    Raises:
        UsageError: it is something else than "network", "nccl" or None.
    """
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

    A class in `allow_results` becomes its full name. Names are not looked up, so the classes need not exist here.

    Args:
        trust: "full", "data", or None if the offer of each machine decides.
        allow_results: classes that results may contain besides plain data: a class, a name such as "mypkg.Point", or
            "mypkg.*" for all classes of a package. Several of these are given as a list, tuple or set.

    Raises:
        UsageError: `trust` has another value, or `allow_results` has something that names no class.
    """
    said = None if trust is None else one_of("trust", trust, get_args(Trust))
    several = allow_results if isinstance(allow_results, (list, tuple, set, frozenset)) else [allow_results]
    named = [f"{each.__module__}.{each.__qualname__}" if isinstance(each, type) else each for each in several]
    for each in named:
        if not isinstance(each, str) or not _CLASS.fullmatch(each):
            raise UsageError(f"allow_results must name classes, such as 'mypkg.Point' or 'mypkg.*', not {each!r}")
    return {"trust": said, "allow_results": frozenset(named)}


def packed(image: Any, progress: Any = None) -> tuple[Any, dict[str, str]]:
    """Return an archive of the image's files, and the image's secrets as a dict from names to values.

    The archive is None if the image has no files. Files and environment variables are read now, before anything is
    rented. The function blocks until all are read.

    Args:
        image: the image.
        progress: function that is called as (bytes read so far, bytes in all). Default None: nothing is called.

    Raises:
        UsageError: a local file or an environment variable is missing, or has an invalid value.
    """
    from skypool_images import ImageError

    try:
        files = image.pack(progress)
        image.steps(packed=files)
        return files, image.secret_values()
    except (ImageError, OSError) as e:
        raise UsageError(str(e)) from e
