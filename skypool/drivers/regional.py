"""`Regional`: base class for clouds with regions. It asks all regions in parallel and joins their answers."""

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
    """A base class for drivers of clouds with regions. It implements whole-cloud methods by per-region methods.

    A driver implements `_regions`, `_found`, `_terminate`, `_left`, `_remove` and `_tag`. It must set the `region` of
    its instances and leftovers.

    Attributes:
        ending: seconds for which `terminate` waits until the instances of a region have ended.
    """

    ending: ClassVar[float] = 90.0

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Return the instances of every region; with `pool`, only those of the pool of this name.

        Raises:
            ProviderError, ErrorGroup: a region could not be asked.
        """
        return everywhere(lambda region: self._found(region, pool), self._regions())

    def terminate(self, instances: Sequence[Instance]) -> None:
        """Terminate instances, and return when every region says that they have ended.

        Raises:
            StillRunning: names the instances that have not ended within `ending` seconds, and why.
        """
        _terminate_all(self._terminate, self._terminating, instances, self.ending)

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return the leftovers of every region: resources other than instances, such as disks and key pairs.

        Args:
            pool: return only the leftovers of the pool of this name; None for all pools.

        Raises:
            ProviderError, ErrorGroup: a region could not be asked.
        """
        return everywhere(lambda region: self._left(region, pool), self._regions())

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove all of these leftovers, in parallel.

        Raises:
            ProviderError, ErrorGroup: what could not be removed, and why.
        """
        each_done(self._remove, leftovers, "some leftovers of pools could not be removed")

    def renew(self, pool: str, until: datetime) -> None:
        """Write the time `until` into the tags of all resources of the pool, in the regions where it has instances.

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
        """Return the names of the regions that the driver's settings allow. A driver must implement it."""
        raise NotImplementedError

    def _found(self, region: str, pool: str | None) -> Iterable[Instance]:
        """Return the instances that a region has of one pool; if `pool` is None, of all pools of this user.

        A driver must implement it.
        """
        raise NotImplementedError

    def _terminate(self, region: str, instances: Mapping[str, Instance]) -> Collection[str]:
        """Ask a region to terminate these instances. Return the ids of those that have not ended yet.

        The returned collection may be a mapping from the ids to the reasons.

        Args:
            region: the region.
            instances: the instances by their ids.
        """
        former: _Ask | None = getattr(self, "_end", None)
        if former is None:
            raise NotImplementedError
        warn_renamed("Regional._end", "Regional._terminate")
        return former(region, instances)

    def _terminating(self, region: str, instances: Mapping[str, Instance]) -> Collection[str]:
        """Return the ids of the given instances that have not ended yet. By default, their end is requested again.

        It is called repeatedly after `_terminate`, and may return a mapping as `_terminate` does.
        """
        former: _Ask | None = getattr(self, "_ending", None)
        if former is None:
            return self._terminate(region, instances)
        warn_renamed("Regional._ending", "Regional._terminating")
        return former(region, instances)

    def _left(self, region: str, pool: str | None) -> Iterable[Leftover]:
        """Return the leftovers that a region has of one pool; if `pool` is None, of all pools of this user.

        Set `tagged_as` of a leftover if the thing that is tagged is not its id.
        """
        raise NotImplementedError

    def _remove(self, leftover: Leftover) -> None:
        """Remove one leftover. A driver must implement it, and must not raise for one that no longer exists."""
        raise NotImplementedError

    def _tag(self, region: str, ids: Sequence[str], until: datetime) -> None:
        """Write the time `until` into the tags of these things, so that they count as needed until then.

        `ids` are the ids of instances, and of leftovers their `tagged_as` or else their ids.
        """
        raise NotImplementedError


def _refused(error: Exception) -> bool:
    """Return True if an error says that the account may not use a place: AccessError or CredentialsError."""
    return isinstance(error, (AccessError, CredentialsError))


def everywhere(
    do: Callable[[T], Iterable[V]],
    places: Iterable[T],
    missing: str = "",
    closed: Callable[[Exception], bool] = _refused,
) -> Answers[V]:
    """Call `do` for all places in parallel, and return all answers in one list.

    A place that is closed to the account counts as empty, as long as another place answers.

    Args:
        do: asks one place.
        places: usually regions.
        missing: what may be missing if a place fails, such as "offers". The failure is then a warning, and
            `Answers.lacks` has this text. If it is "", a failure is raised.
        closed: returns True for an error that says that the place is closed to the account.

    Raises:
        ProviderError, ErrorGroup: the failures. It is raised in any case if every place failed.
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
    """Return the regions to ask: those of the settings, or else all that the account may use, if they match a pattern.

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
    """Call `do` for all items in parallel, and wait for all calls.

    Raises:
        Exception: the only failure, or an ErrorGroup of several with the message `failure`.
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

    A request is repeated if it gets no answer, or is refused because requests come too often.

    Args:
        end: called once for each region, to request the end of its instances. Like `ending`, it returns the ids of
            those that have not ended.
        ending: called for a region after `end`, until no instance is left.
        instances: the instances of all regions.
        seconds: time limit.

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
