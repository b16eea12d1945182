"""`Regional`: base class for clouds with regions. It asks all regions at once and joins their answers."""

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
    """What a driver of such a cloud inherits; `instance.region` and `leftover.region` say where they are.

    Attributes:
        ending: seconds for which a region is asked whether instances have ended.
    """

    ending: ClassVar[float] = 90.0

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Return the instances of every region."""
        return everywhere(lambda region: self._found(region, pool), self._regions())

    def terminate(self, instances: Sequence[Instance]) -> None:
        """Ask until every region says that they have ended.

        Raises:
            StillRunning: which have not, and why.
        """
        _terminate_all(self._terminate, self._terminating, instances, self.ending)

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return the leftovers of every region."""
        return everywhere(lambda region: self._left(region, pool), self._regions())

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove them all, at once.

        Raises:
            ProviderError, ErrorGroup: what could not be removed, and why.
        """
        each_done(self._remove, leftovers, "not all that pools left behind could be removed")

    def renew(self, pool: str, until: datetime) -> None:
        """Tag all that the pool has, where it has instances."""
        ids: dict[str, list[str]] = {}
        for instance in self.instances(pool=pool):
            ids.setdefault(instance.region, []).append(instance.id)
        for each in everywhere(lambda region: self._left(region, pool), ids):
            ids[each.region].append(each.tagged_as or each.id)
        each_done(lambda region: self._tag(region, ids[region], until), ids, "not all tags could be renewed")

    # --- what one region is asked; a driver says how ---------------------------------------------------------

    def _regions(self) -> Sequence[str]:
        """Return the regions that the settings mean."""
        raise NotImplementedError

    def _found(self, region: str, pool: str | None) -> Iterable[Instance]:
        """Return the instances of one pool, or of all pools of this user."""
        raise NotImplementedError

    def _terminate(self, region: str, instances: Mapping[str, Instance]) -> Collection[str]:
        """Ask that these instances end. Return the ids of those that have not ended yet, or a mapping to the reasons.

        Args:
            instances: by their ids.
        """
        former: _Ask | None = getattr(self, "_end", None)
        if former is None:
            raise NotImplementedError
        warn_renamed("Regional._end", "Regional._terminate")
        return former(region, instances)

    def _terminating(self, region: str, instances: Mapping[str, Instance]) -> Collection[str]:
        """Return those of these instances that have not ended yet. By default they are asked to end again."""
        former: _Ask | None = getattr(self, "_ending", None)
        if former is None:
            return self._terminate(region, instances)
        warn_renamed("Regional._ending", "Regional._terminating")
        return former(region, instances)

    def _left(self, region: str, pool: str | None) -> Iterable[Leftover]:
        """Return what else there is of one pool, or of all.

        `tagged_as` of each is what is tagged, if that is not its id.
        """
        raise NotImplementedError

    def _remove(self, leftover: Leftover) -> None:
        raise NotImplementedError

    def _tag(self, region: str, ids: Sequence[str], until: datetime) -> None:
        """Write until when these are needed into their tags."""
        raise NotImplementedError


def _refused(error: Exception) -> bool:
    return isinstance(error, (AccessError, CredentialsError))


def everywhere(
    do: Callable[[T], Iterable[V]],
    places: Iterable[T],
    missing: str = "",
    closed: Callable[[Exception], bool] = _refused,
) -> Answers[V]:
    """Return what all places answer. One that is closed to the account answers nothing, as long as others are open.

    Args:
        missing: what is not complete without a place that failed. The failure is a warning then, and the answer lacks
            this. Without it a failure is an error.
        closed: whether an error says that a place is closed.

    Raises:
        ProviderError, ErrorGroup: what failed.
    """
    outcomes = at_once(lambda place: list(do(place)), places)
    failed = [each for each in outcomes if isinstance(each, Exception)]
    open_ = [each for each in failed if not closed(each)]
    nobody = failed and len(failed) == len(outcomes)
    if nobody or (open_ and not missing):
        told = open_ or failed[:1]  # one region is as closed as all
        raise together(f"{len(told)} places could not be asked", told)
    found = [each for some in outcomes if not isinstance(some, Exception) for each in some]
    return Answers(found, [lacks(missing, each) for each in open_])


def chosen(known: Iterable[str], settings: Collection[str], patterns: Sequence[str]) -> list[str]:
    """Return the regions that the settings name, or else all that the account may use, if they match a pattern.

    Raises:
        UsageError: the settings name one that the account may not use.
    """
    may_use = sorted(known)
    for each in settings:
        if each not in may_use:
            raise UsageError(f"{each} is no region that the account may use; it may use {', '.join(may_use)}")
    regions = settings or may_use
    asked = [each.casefold() for each in patterns or ("*",)]
    return [each for each in regions if any(fnmatchcase(each.casefold(), pattern) for pattern in asked)]


def each_done(do: Callable[[T], object], items: Iterable[T], failure: str) -> None:
    """Call `do` for all items, at the same time.

    Raises:
        Exception: the one failure, or an ErrorGroup of several with the message `failure`.
    """
    failed = [each for each in at_once(do, items) if isinstance(each, Exception)]
    if failed:
        raise together(failure, failed)


_Ask = Callable[[str, Mapping[str, Instance]], Collection[str]]
"""Asks one region, and returns the ids of the instances that have not ended."""

_FIRST_LOOK = 0.25
"""Seconds from the first look at the ends to the second; later pauses double."""

_LONGEST_PAUSE = 5.0
"""Most seconds from one look at the ends to the next."""


def _terminate_all(end: _Ask, ending: _Ask, instances: Sequence[Instance], seconds: float) -> None:
    """Let every region end its instances, and look until all have ended. A region without an answer is asked again.

    Args:
        end: asks a region the first time; ending: each time after that.
        seconds: time in which to look.

    Raises:
        StillRunning: naming those that have not ended, and why.
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
            why[f"{id} in {region}"] = outcome or said.get(id) or f"it still ends, after {seconds:g} s"
    if why:
        raise not_ended(why, [instance for some in left.values() for instance in some.values()])
