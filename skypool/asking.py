"""How a cloud is asked: many questions at once, again with patience, and what its refusals mean."""

from __future__ import annotations

import csv
import ipaddress
import re
import shutil
import subprocess
import time
import urllib.request
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, TypeVar

from skypool import errors
from skypool.errors import AccessError, CredentialsError, ProviderError, StillRunning, UsageError, nearest
from skypool.model import Finding, Instance

T = TypeVar("T")
V = TypeVar("V")
_THREADS = 16
_SKEW = 240.0
_ADDRESS = "https://checkip.amazonaws.com"


# --- settings ------------------------------------------------------------------------------------------------


def chosen(known: Iterable[str], settings: Collection[str], patterns: Sequence[str]) -> list[str]:
    """The regions that the settings name, or else those the account may use, as far as they match a pattern.

    Raises:
        UsageError: the settings name one that the account may not use.
    """
    may_use = sorted(known)
    for each in settings:
        if each not in may_use:
            raise UsageError(f"{each} is no region that the account may use; it may use {', '.join(may_use)}")
    asked = [each.casefold() for each in patterns or ("*",)]
    return [each for each in settings or may_use if any(fnmatchcase(each.casefold(), one) for one in asked)]


def filled(shape: Any, values: Mapping[str, Any]) -> Any:
    """A question's shape with "$name" replaced by that value, and left out where that is None."""
    if isinstance(shape, dict):
        made = {key: filled(each, values) for key, each in shape.items()}
        return {key: each for key, each in made.items() if each is not None}
    if isinstance(shape, list):
        return [filled(each, values) for each in shape]
    return values[shape[1:]] if isinstance(shape, str) and shape.startswith("$") else shape


def words(name: str, value: object, shape: str, like: str, known: Iterable[str] = ()) -> tuple[str, ...] | None:
    """A setting that is a word or several of them, each of this shape (a regular expression); None stays None.

    Args:
        like: what one looks like; known: those there are, as far as they are known, for the nearest spelling.

    Raises:
        UsageError: it is something else.
    """
    if value is None:
        return None
    several = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not several:
        raise UsageError(f"{name} is an empty list; leave it out, or name {like}")
    for each in several:
        if not isinstance(each, str) or not re.fullmatch(shape, each):
            close = nearest(each, known, 1) if isinstance(each, str) else []
            hint = f"did you mean {close[0]!r}?" if close else f"it is like {like}"
            raise UsageError(f"{each!r} is no {name}: {hint}")
    return several


# --- questions -----------------------------------------------------------------------------------------------


def at_once(do: Callable[[T], V], items: Iterable[T]) -> list[V | Exception]:
    """The outcomes, in order. One after the other in an interpreter that exits, as that starts no threads."""

    def outcome(item: T) -> V | Exception:
        try:
            return do(item)
        except Exception as e:  # noqa: BLE001 - it is an outcome, too
            return e

    several = list(items)
    if len(several) > 1:
        try:
            with ThreadPoolExecutor(min(_THREADS, len(several))) as threads:
                return list(threads.map(outcome, several))
        except RuntimeError:
            pass  # no thread can be started any more
    return list(map(outcome, several))


def everywhere(do: Callable[[T], Iterable[V]], places: Iterable[T], missing: str = "") -> list[V]:
    """What all places answer. One that is closed to the account answers nothing, as long as others are open.

    Args:
        missing: what is not complete without the place that failed, which is a warning then; without it an error.

    Raises:
        ProviderError, ExceptionGroup: what failed.
    """
    outcomes = at_once(lambda place: list(do(place)), places)
    failed = [each for each in outcomes if isinstance(each, Exception)]
    open_ = [each for each in failed if not isinstance(each, (AccessError, CredentialsError))]
    nobody = failed and len(failed) == len(outcomes)
    if nobody or (open_ and not missing):
        told = open_ or failed[:1]  # one region is as closed as all
        raise told[0] if len(told) == 1 else ExceptionGroup(f"{len(told)} places could not be asked", told)
    for each in open_:
        warnings.warn(f"{missing} may be missing: {each}", RuntimeWarning, stacklevel=2)
    return [each for some in outcomes if not isinstance(some, Exception) for each in some]


def patiently(do: Callable[[], V], seconds: float, again: Callable[[ProviderError], bool]) -> V:
    """The answer, asked for again with jitter as long as what it is refused with passes.

    Raises:
        ProviderError: the last one, after so many seconds, or one that does not pass.
    """
    from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

    passes = retry_if_exception(lambda e: isinstance(e, ProviderError) and again(e))
    wait = wait_random_exponential(0.5, max=10)
    return Retrying(retry=passes, stop=stop_after_delay(seconds), wait=wait, reraise=True)(do)


def each_done(do: Callable[[T], object], items: Iterable[T], failure: str) -> None:
    """Do it for all of them, at once.

    Raises:
        Exception: what failed; an ExceptionGroup of several, that says `failure`.
    """
    failed = [each for each in at_once(do, items) if isinstance(each, Exception)]
    if failed:
        raise failed[0] if len(failed) == 1 else ExceptionGroup(failure, failed)


def end_all(
    end: Callable[[str, Mapping[str, Instance]], Collection[str]], instances: Sequence[Instance], seconds: float
) -> None:
    """Let every region end its instances, and ask until all of them have ended.

    Args:
        end: asks a region, `instance.detail["region"]`, to end these, by their ids; says which have not ended yet.
        seconds: to ask for.

    Raises:
        StillRunning: which have not, and why.
    """
    from tenacity import Retrying, retry_if_result, stop_after_delay, wait_exponential

    left: dict[str, dict[str, Instance]] = {}
    for instance in instances:
        left.setdefault(instance.detail["region"], {})[instance.id] = instance

    def ask(region: str) -> int:
        ids = end(region, left[region])
        left[region] = {id: left[region][id] for id in ids}
        return len(ids)

    def over(region: str) -> None:
        stop, wait = stop_after_delay(seconds), wait_exponential(0.25, max=5)
        Retrying(retry=retry_if_result(bool), stop=stop, wait=wait, retry_error_callback=lambda _: None)(ask, region)

    why: list[str] = []
    for region, outcome in zip(left, at_once(over, left), strict=True):
        why += [f"{id} in {region}: {outcome or f'it still ends, after {seconds:g} s'}" for id in left[region]]
    if why:
        still = [instance for some in left.values() for instance in some.values()]
        raise StillRunning("it is not proved that these have ended:\n  " + "\n  ".join(why), still)


def public_network() -> str:
    """This machine's own address as the world sees it, as a network: "203.0.113.7/32".

    Raises:
        ProviderError: it cannot be found.
    """
    try:
        with urllib.request.urlopen(_ADDRESS, timeout=10) as answer:
            return str(ipaddress.IPv4Network(answer.read(64).decode().strip()))
    except (OSError, ValueError) as e:
        raise ProviderError(
            f"port 22 of the machines is opened to this machine's public address alone, and {_ADDRESS} does not say "
            f"what that is ({e}); say it yourself: ssh_from='203.0.113.7'"
        ) from e


# --- answers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Meaning:
    """What error codes of a provider mean: patterns of them, an error of ours, what to do, whether it passes."""

    codes: tuple[str, ...]
    kind: type[ProviderError]
    advice: str
    passes: bool


class Refusals:
    """The error codes of a provider, from the table `errors.csv` of its driver's package; the first row that fits.

    Args:
        provider: the driver's name; called: the provider's own.
    """

    def __init__(self, package: str, provider: str, called: str) -> None:
        self._provider, self._called = provider, called
        rows = csv.DictReader((files(package) / "errors.csv").read_text().splitlines())
        self.meanings = [
            Meaning(tuple(row["codes"].split()), getattr(errors, row["kind"]), row["advice"], bool(row["passes"]))
            for row in rows
        ]

    def error(self, what: str, code: str, text: str, **names: str) -> ProviderError:
        """An error that says what was refused, why, and what to do; `names` are what the advice may speak of."""
        meaning = self._meaning(code)
        kind, advice = (meaning.kind, meaning.advice.format(**names)) if meaning else (ProviderError, "")
        said = f"{self._called} refused {what}: {text.strip() or 'no reason given'} ({code or 'no code'})"
        return kind(f"{said}; {advice}" if advice else said, provider=self._provider, code=code, text=text)

    def passes(self, error: ProviderError) -> bool:
        """Whether it is worth while to ask the same again."""
        meaning = self._meaning(error.code)
        return meaning is not None and meaning.passes

    def known(self, codes: Sequence[str]) -> str:
        """The first of these codes that the table has; the first of all where it has none."""
        return next((code for code in codes if self._meaning(code)), codes[0])

    def _meaning(self, code: str) -> Meaning | None:
        return next((each for each in self.meanings if any(fnmatchcase(code, one) for one in each.codes)), None)


# --- checks --------------------------------------------------------------------------------------------------


def findings(questions: Mapping[str, Callable[[], object]]) -> Iterator[Finding]:
    """What came of each question, by its title: its answer, or why there is none and what to do."""
    outcomes = at_once(lambda question: str(question()), questions.values())
    for what, outcome in zip(questions, outcomes, strict=True):
        if isinstance(outcome, Exception):
            text, _, advice = str(outcome).rpartition("; ")
            yield Finding(what, False, text or advice, advice if text else "")
        else:
            yield Finding(what, True, outcome)


def openssh() -> str:
    """The version of the programs that every rented machine needs on this one."""
    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            raise UsageError(f"there is no {program} program here; install openssh-client")
    return subprocess.run(["ssh", "-V"], capture_output=True, text=True).stderr.strip()


def clock(date: str) -> str:
    """How far this machine's clock is from a provider's, as the Date of its answer has it."""
    ahead = time.time() - parsedate_to_datetime(date).timestamp()
    if abs(ahead) > _SKEW:
        raise UsageError(f"the clock of this machine is {ahead:+.0f} s off, and signatures hold 300 s; set it")
    return f"{ahead:+.0f} s off"
