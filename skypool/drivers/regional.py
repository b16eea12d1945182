"""`Regional`: base class for drivers of clouds with regions.

It asks all regions in parallel and joins their answers. The functions `everywhere`, `chosen` and `each_done` do parts
of this for other drivers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from functools import partial
from typing import ClassVar, TypeVar

from skypool.checks import warn_renamed
from skypool.drivers.contract import Answers, lacks
from skypool.drivers.retry import at_once, soon
from skypool.errors import AccessError, CredentialsError, NoAnswer, RateLimitError, UsageError, not_ended, together
from skypool.model import Instance, Leftover

T = TypeVar("T")
V = TypeVar("V")


class Regional:
    """A base class for drivers of clouds with regions.

    Its public methods call the private methods once for each region, in parallel. A driver implements `_regions`,
    `_found`, `_terminate`, `_left`, `_remove` and `_tag`. Those that it does not implement raise NotImplementedError.
    It must set the `region` of its instances and leftovers.

    Attributes:
        ending: seconds for which `terminate` waits until the instances of a region have ended.
    """

    ending: ClassVar[float] = 90.0

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Return the instances of every region, in the order of the regions; with `pool`, only those of that pool.

        A region that the account may not use counts as empty, unless no other region answers.

        Raises:
            ProviderError, ErrorGroup: a region could not be asked, so instances could be missing.
        """
        return everywhere(lambda region: self._found(region, pool), self._regions())

    def terminate(self, instances: Sequence[Instance]) -> None:
        """Terminate instances, and return when every region says that they have ended.

        Blocks for up to `ending` seconds (90 by default). Requests that get no answer, or that come too often, are
        repeated in that time. Does nothing if `instances` is empty.

        Raises:
            StillRunning: names the instances that have not ended within `ending` seconds, and why. An error of one
                region does not stop the others.
        """
        _terminate_all(self._terminate, self._terminating, instances, self.ending)

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return the leftovers of every region: resources other than instances, such as disks and key pairs.

        A region that the account may not use counts as empty, unless no other region answers.

        Args:
            pool: return only the leftovers of the pool of this name; None for all pools.

        Raises:
            ProviderError, ErrorGroup: a region could not be asked.
        """
        return everywhere(lambda region: self._left(region, pool), self._regions())

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove all of these leftovers in parallel, and return when all are removed or have failed.

        One failure does not stop the others. Does nothing if `leftovers` is empty.

        Raises:
            ProviderError, ErrorGroup: what could not be removed, and why.
        """
        each_done(self._remove, leftovers, "some leftovers of pools could not be removed")

    def renew(self, pool: str, until: datetime) -> None:
        """Write the expiry time `until` into the tags of a pool's instances, and of its leftovers in the same regions.

        Leftovers (such as keys and security groups) in regions without instances of the pool keep their time.

        Raises:
            ProviderError, ErrorGroup: a region could not be asked, or its tags could not be written.
        """
        ids: dict[str, list[str]] = {}
        for instance in self.instances(pool=pool):
            ids.setdefault(instance.region, []).append(instance.id)
        for each in everywhere(lambda region: self._left(region, pool), ids):
            ids[each.region].append(each.tagged_as or each.id)
        each_done(lambda region: self._tag(region, ids[region], until), ids, "not all tags could be renewed")

    # --- requests to one region, which a driver implements ---------------------------------------------------

    def _regions(self) -> Sequence[str]:
        """Return the names of the regions that the driver's settings allow. A driver must implement this.

        If it returns none, the driver finds no instances and no leftovers.
        """
        raise NotImplementedError

    def _found(self, region: str, pool: str | None) -> Iterable[Instance]:
        """Return the instances that one region has of a pool; if `pool` is None, of all pools of this user.

        A driver must implement this. An error means that instances could be missing; `instances` raises it.
        """
        raise NotImplementedError

    def _terminate(self, region: str, instances: Mapping[str, Instance]) -> Collection[str]:
        """Ask one region to terminate these instances, and return the ids of those that have not ended yet.

        The returned collection may be a mapping from the ids to the reasons; an empty one means that all have ended. A
        driver must implement this. If a driver still has the former method `_end` instead, that method is called, with
        a DeprecationWarning.

        Args:
            region: the region.
            instances: the instances by their ids.

        Raises:
            NotImplementedError: the driver has neither `_terminate` nor `_end`.
        """
        former: _Ask | None = getattr(self, "_end", None)
        if former is None:
            raise NotImplementedError
        warn_renamed("Regional._end", "Regional._terminate")
        return former(region, instances)

    def _terminating(self, region: str, instances: Mapping[str, Instance]) -> Collection[str]:
        """Return the ids of the given instances that have not ended yet. By default, `_terminate` is called again.

        A driver may override this. It is called repeatedly after `_terminate`, and may return a mapping from the ids to
        the reasons, too. If a driver still has the former method `_ending`, that method is called, with a
        DeprecationWarning.
        """
        former: _Ask | None = getattr(self, "_ending", None)
        if former is None:
            return self._terminate(region, instances)
        warn_renamed("Regional._ending", "Regional._terminating")
        return former(region, instances)

    def _left(self, region: str, pool: str | None) -> Iterable[Leftover]:
        """Return the leftovers (resources other than instances) that one region has of a pool; with None, of all pools.

        A driver must implement this. Set `tagged_as` of a leftover if the provider tags it under another name than its
        id.
        """
        raise NotImplementedError

    def _remove(self, leftover: Leftover) -> None:
        """Remove one leftover. A driver must implement this. Do not raise for a leftover that no longer exists."""
        raise NotImplementedError

    def _tag(self, region: str, ids: Sequence[str], until: datetime) -> None:
        """Write the expiry time `until` into the tags of these resources of one region. A driver must implement this.

        Args:
            region: the region.
            ids: ids of instances. For leftovers, their `tagged_as`, or their ids where that is "".
            until: time until which the resources count as needed.
        """
        raise NotImplementedError


def _refused(error: Exception) -> bool:
    """Return True if an error says that the account may not use a region: an AccessError or a CredentialsError.

    Returns False for every other error, such as a region that does not answer.
    """
    return isinstance(error, (AccessError, CredentialsError))


def everywhere(
    do: Callable[[T], Iterable[V]],
    places: Iterable[T],
    missing: str = "",
    closed: Callable[[Exception], bool] = _refused,
) -> Answers[V]:
    """Call `do` for all places in parallel, and return all answers in one list, in the order of the places.

    A place that is closed to the account counts as empty, as long as another place answers. Blocks until all calls have
    returned. No places give an empty list.

    Args:
        do: asks one place.
        places: usually regions.
        missing: what may be missing if a place fails, such as "offers". A failure is then a RuntimeWarning, and
            `Answers.lacks` has this text once for each failure. If it is "", a failure is raised.
        closed: returns True for an error that says that the place is closed to the account.

    Raises:
        ProviderError, ErrorGroup: the failures: a single error as it is, several as a group. Raised with any `missing`
            if every place failed.
    """
    outcomes = at_once(lambda place: list(do(place)), places)
    failed = [each for each in outcomes if isinstance(each, Exception)]
    open_ = [each for each in failed if not closed(each)]
    nobody = failed and len(failed) == len(outcomes)
    if nobody or (open_ and not missing):
        told = open_ or failed[:1]  # all are closed to the account, so one error is enough
        raise together(
            f"{len(told)} regions or zones of the provider could not be queried; correct these causes and try again",
            told,
        )
    found = [each for some in outcomes if not isinstance(some, Exception) for each in some]
    return Answers(found, [lacks(missing, each) for each in open_])


def chosen(known: Iterable[str], settings: Collection[str], patterns: Sequence[str]) -> list[str]:
    """Return the regions to ask: those of the settings, or all that the account may use, if they match a pattern.

    Regions of the settings keep their order; otherwise they are sorted. The result is empty if no region matches.

    Args:
        known: regions that the account may use.
        settings: regions that the user chose; empty for all.
        patterns: patterns of accepted regions, such as "eu-*", upper and lower case alike; empty for all.

    Raises:
        UsageError: the settings name a region that the account may not use.
    """
    may_use = sorted(known)
    for each in settings:
        if each not in may_use:
            raise UsageError(f"{each} is not a region that the account may use; choose from {', '.join(may_use)}")
    regions = settings or may_use
    asked = [each.casefold() for each in patterns or ("*",)]
    return [each for each in regions if any(fnmatchcase(each.casefold(), pattern) for pattern in asked)]


def each_done(do: Callable[[T], object], items: Iterable[T], failure: str) -> None:
    """Call `do` for all items in parallel, and return when all calls have ended. Results of the calls are ignored.

    One failure does not stop the other calls.

    Raises:
        Exception: the only failure, or an ErrorGroup of several with the message `failure`. Failures with the same text
            count as one.
    """
    failed = [each for each in at_once(do, items) if isinstance(each, Exception)]
    if failed:
        raise together(failure, failed)


_Ask = Callable[[str, Mapping[str, Instance]], Collection[str]]
"""A function that asks one region about instances by their ids. It returns the ids of those that have not ended."""

_FIRST_LOOK = 0.25
"""Seconds from the first look at ending instances to the second. Later pauses double."""

_LONGEST_PAUSE = 5.0
"""Longest pause in seconds between two looks at ending instances."""


def _terminate_all(end: _Ask, ending: _Ask, instances: Sequence[Instance], seconds: float) -> None:
    """Terminate instances in all their regions in parallel, and poll until all have ended.

    Pauses between two looks grow from 0.25 s to 5 s. A request is repeated if it gets no answer, or is refused because
    requests come too often. Any other error ends the polling of its region only.

    Args:
        end: called first for each region, to request the end of its instances. Like `ending`, it returns the ids of
            those that have not ended. It may return a mapping from the ids to the reasons.
        ending: called for a region after `end`, until no instance is left.
        instances: the instances of all regions; none is no error.
        seconds: time limit for each region.

    Raises:
        StillRunning: names the instances that have not ended, and why.
    """
    left: dict[str, dict[str, Instance]] = {}
    for instance in instances:
        left.setdefault(instance.region, {})[instance.id] = instance

    said: dict[str, str] = {}
    questions = {region: itertools.chain([end], itertools.repeat(ending)) for region in left}

    def over(region: str) -> bool:
        try:
            ids = next(questions[region])(region, left[region])
        except (NoAnswer, RateLimitError) as e:
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
                outcome or said.get(id) or f"the instance is still shutting down after {seconds:g} s"
            )
    if why:
        raise not_ended(why, [instance for some in left.values() for instance in some.values()])
