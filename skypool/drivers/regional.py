"""`Regional`: base class for drivers of clouds with regions.

`Regional` asks all regions in parallel and joins their answers. For drivers that do not use the base class,
`everywhere` asks all regions, `chosen` selects the regions to ask, and `each_done` calls a function for several items.

Leftovers are resources other than instances that pools made at a provider, such as disks or key pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from functools import partial
from typing import ClassVar, TypeVar

from skypool.drivers.contract import Answers, lacks
from skypool.drivers.retry import at_once, soon
from skypool.errors import AccessError, CredentialsError, NoAnswer, RateLimitError, UsageError, not_ended, together
from skypool.model import Instance, Leftover

T = TypeVar("T")
V = TypeVar("V")


class Regional:
    """A base class for drivers of clouds that are asked region by region.

    The public methods call the private methods once for each region, in parallel. A driver implements `_regions`,
    `_found`, `_terminate`, `_left`, `_remove` and `_tag`; each of these raises NotImplementedError by default. The
    driver must set the attribute `region` of its instances and leftovers. If the provider tags a leftover under another
    name than the leftover's id, the driver must set `tagged_as` to this name.

    `terminate` calls `_terminate` first, and then `_terminating` until no instance is left or the time is over. By
    default, `_terminating` calls `_terminate` again.

    A region that the account may not use counts as empty, unless no region answers. If several regions or resources
    fail for different reasons, an ErrorGroup is raised.

    Attributes:
        ending: seconds for which `terminate` waits until the instances of a region have ended. Default 90.
    """

    ending: ClassVar[float] = 90.0

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Return the instances of every region, in the order of the regions.

        Args:
            pool: return only the instances of the pool with this name; None for all pools of this user.

        Raises:
            ProviderError, ErrorGroup: regions could not be asked, so instances could be missing.
        """
        return everywhere(lambda region: self._found(region, pool), self._regions())

    def terminate(self, instances: Sequence[Instance]) -> None:
        """Terminate instances, and return when every region says that its instances have ended.

        Waits for up to `ending` seconds (90 by default). In that time, a request is repeated if it gets no answer, or
        if the provider refuses it because requests come too often. An error of one region does not stop the other
        regions.

        Raises:
            StillRunning: names the instances whose end was not reported within `ending` seconds, or whose region could
                not be asked, and why.
        """
        _terminate_all(self._terminate, self._terminating, instances, self.ending)

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return the leftovers of every region, in the order of the regions.

        Args:
            pool: return only the leftovers of the pool with this name; None for all pools of this user.

        Raises:
            ProviderError, ErrorGroup: regions could not be asked, so leftovers could be missing.
        """
        return everywhere(lambda region: self._left(region, pool), self._regions())

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove these leftovers in parallel, and return when each is removed or could not be removed.

        Raises:
            ProviderError, ErrorGroup: leftovers could not be removed. The others are removed all the same.
        """
        each_done(self._remove, leftovers, "some resources that pools left at the provider could not be removed")

    def renew(self, pool: str, until: datetime) -> None:
        """Write the expiry time `until` into the tags of a pool's instances, and of its leftovers in the same regions.

        After the expiry time, the resources count as no longer needed. Leftovers in regions where the pool has no
        instances keep their old expiry time.

        Raises:
            ProviderError, ErrorGroup: regions could not be asked, or their tags could not be written.
        """
        ids: dict[str, list[str]] = {}
        for instance in self.instances(pool=pool):
            ids.setdefault(instance.region, []).append(instance.id)
        for each in everywhere(lambda region: self._left(region, pool), ids):
            ids[each.region].append(each.tagged_as or each.id)
        failure = f"the new expiry time of pool {pool!r} could not be written into the tags of all its resources"
        each_done(lambda region: self._tag(region, ids[region], until), ids, failure)

    # --- requests to one region, which a driver implements ---------------------------------------------------

    def _regions(self) -> Sequence[str]:
        """Return the names of the regions that the driver's settings allow; may be empty."""
        raise NotImplementedError

    def _found(self, region: str, pool: str | None) -> Iterable[Instance]:
        """Return the instances of a pool in one region; if `pool` is None, of all pools of this user."""
        raise NotImplementedError

    def _terminate(self, region: str, instances: Mapping[str, Instance]) -> Collection[str]:
        """Ask a region to terminate instances. Return the ids of those not ended yet, or a dict from id to reason."""
        raise NotImplementedError

    def _terminating(self, region: str, instances: Mapping[str, Instance]) -> Collection[str]:
        """Return the ids of those given instances that have not ended yet, or a dict from id to the reason."""
        return self._terminate(region, instances)

    def _left(self, region: str, pool: str | None) -> Iterable[Leftover]:
        """Return the leftovers of a pool in one region; if `pool` is None, of all pools of this user."""
        raise NotImplementedError

    def _remove(self, leftover: Leftover) -> None:
        """Remove one leftover. Must not raise for a leftover that no longer exists."""
        raise NotImplementedError

    def _tag(self, region: str, ids: Sequence[str], until: datetime) -> None:
        """Write an expiry time into the tags of instances and leftovers. `ids`: names under which each is tagged."""
        raise NotImplementedError


def _refused(error: Exception) -> bool:
    """Return True for an AccessError or a CredentialsError, which say that the account may not use a region."""
    return isinstance(error, (AccessError, CredentialsError))


def everywhere(
    do: Callable[[T], Iterable[V]],
    places: Iterable[T],
    missing: str = "",
    closed: Callable[[Exception], bool] = _refused,
) -> Answers[V]:
    """Call `do` for all places in parallel, and return all answers in one list, in the order of the places.

    Blocks until all calls have returned. A place that the account may not use counts as empty, if any other place
    answers.

    Args:
        do: asks one place, and returns its answers.
        places: the places to ask, usually names of regions or zones. May be empty.
        missing: name of what may be missing if a place fails, such as "offers". Each failure then issues a
            RuntimeWarning, and `lacks` of the result has this name once for each failure. If `missing` is "", a failure
            is raised instead.
        closed: returns True for an error of `do` that says that the account may not use the place. By default, such an
            error is an AccessError or a CredentialsError.

    Raises:
        Exception: the error of a place, or an ErrorGroup if several places failed with different texts. It is raised if
            `missing` is "", or if every place failed.
    """
    outcomes = at_once(lambda place: list(do(place)), places)
    failed = [each for each in outcomes if isinstance(each, Exception)]
    open_ = [each for each in failed if not closed(each)]
    nobody = failed and len(failed) == len(outcomes)
    if nobody or (open_ and not missing):
        told = open_ or failed[:1]  # if all places are closed to the account, one error is enough
        raise together(
            f"{len(told)} regions or zones of the provider could not be queried; correct these causes and try again",
            told,
        )
    found = [each for some in outcomes if not isinstance(some, Exception) for each in some]
    return Answers(found, [lacks(missing, each) for each in open_])


def chosen(known: Iterable[str], settings: Collection[str], patterns: Sequence[str]) -> list[str]:
    """Return the regions to ask: the regions in the settings, or without settings all regions that the account may use.

    Regions that match none of the patterns are left out, so the result may be empty. Regions of the settings keep their
    order. Otherwise the regions are sorted.

    Args:
        known: regions that the account may use.
        settings: regions that the user chose in the driver's settings; empty for all regions.
        patterns: shell-style patterns of accepted regions, such as "eu-*", usually `Need.regions`. Case does not
            matter. Empty accepts all regions.

    Raises:
        UsageError: the settings name a region that the account may not use.
    """
    may_use = sorted(known)
    for each in settings:
        if each not in may_use:
            raise UsageError(
                f"{each} is not a region that the account may use; name one of these in the provider's settings: "
                f"{', '.join(may_use)}"
            )
    regions = settings or may_use
    asked = [each.casefold() for each in patterns or ("*",)]
    return [each for each in regions if any(fnmatchcase(each.casefold(), pattern) for pattern in asked)]


def each_done(do: Callable[[T], object], items: Iterable[T], failure: str) -> None:
    """Call `do` for all items in parallel, and return when all calls have ended.

    A failure does not stop the other calls.

    Args:
        do: called with each item. Its result is ignored.
        items: the items. May be empty.
        failure: message of the ErrorGroup if several calls fail.

    Raises:
        Exception: the error of a call, or an ErrorGroup if several calls failed. Errors with the same text count as
            one.
    """
    failed = [each for each in at_once(do, items) if isinstance(each, Exception)]
    if failed:
        raise together(failure, failed)


_Ask = Callable[[str, Mapping[str, Instance]], Collection[str]]
"""A function that asks one region about instances. It returns the ids of the instances that have not ended.

Its arguments are the name of the region, and a mapping from ids to instances.
"""

_FIRST_LOOK = 0.25
"""First pause in seconds between two requests about instances that are ending. Each pause doubles the one before."""

_LONGEST_PAUSE = 5.0
"""Longest pause in seconds between two requests about instances that are ending."""


def _terminate_all(end: _Ask, ending: _Ask, instances: Sequence[Instance], seconds: float) -> None:
    """Call `end` for each region, then `ending` for up to `seconds`. Raise StillRunning if instances are left then."""
    left: dict[str, dict[str, Instance]] = {}
    for instance in instances:
        left.setdefault(instance.region, {})[instance.id] = instance

    said: dict[str, str] = {}
    questions = {region: itertools.chain([end], itertools.repeat(ending)) for region in left}

    def over(region: str) -> bool:
        try:
            ids = next(questions[region])(region, left[region])
        except (NoAnswer, RateLimitError) as e:  # ask again; any other error ends the polling of this region only
            said.update(dict.fromkeys(left[region], str(e)))
            return False
        said.update(ids if isinstance(ids, Mapping) else dict.fromkeys(ids, ""))
        left[region] = {id: left[region][id] for id in ids}
        return not ids

    outcomes = at_once(lambda region: soon(partial(over, region), seconds, _FIRST_LOOK, _LONGEST_PAUSE), left)
    why: dict[str, object] = {}
    for region, outcome in zip(left, outcomes, strict=True):
        for id in left[region]:
            why[f"{id} in {region}"] = (
                outcome
                or said.get(id)
                or f"the provider did not report within {seconds:g} s that the instance has ended"
            )
    if why:
        raise not_ended(why, [instance for some in left.values() for instance in some.values()])
