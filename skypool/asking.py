"""How a cloud is asked: many questions at once, again with patience, and what its refusals mean."""

from __future__ import annotations

import csv
import functools
import inspect
import ipaddress
import json
import math
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from skypool import errors, tracebacks
from skypool.errors import NoAnswer, ProviderError, RateLimitError, UsageError, nearest
from skypool.model import Finding

tracebacks.install()
T = TypeVar("T")
V = TypeVar("V")
_THREADS = 16
_SKEW = 240.0
_ADDRESS = "https://checkip.amazonaws.com"


_importing = threading.RLock()


def imported(module: str) -> Any:
    """Import a module of an SDK, one thread at a time.

    Drivers are asked in parallel, and their SDKs share packages. Two threads that import `requests` and
    `requests.exceptions` at the same time may wait for each other; Python then raises an error in one of them.

    Raises:
        ImportError: the module is not installed.
    """
    with _importing:
        return import_module(module)


def settings_named(kind: type[T]) -> type[T]:
    """Decorate a driver's dataclass so that settings which it does not have are a `UsageError` with the nearest."""
    init: Any = kind.__init__
    signature = inspect.signature(init)
    known = [name for name in signature.parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **settings: Any) -> None:
        for name in settings:
            if name not in known:
                close = nearest(name, known, 1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise UsageError(f"{kind.__name__} has no setting {name!r}{hint} (it has {', '.join(known)})")
        try:
            signature.bind(self, *args, **settings)
        except TypeError as e:
            raise UsageError(f"{kind.__name__}: {e} (its settings are {', '.join(known)})") from None
        init(self, *args, **settings)

    kind.__init__ = checked  # type: ignore[method-assign,assignment]  # what a dataclass has is made in the same way
    return kind


def words(name: str, value: object, shape: str, like: str, known: Iterable[str] = ()) -> tuple[str, ...] | None:
    """A setting that is a word or several of them, each of this shape (a regular expression); None stays None.

    Args:
        like: what one looks like; known: those there are, as far as they are known, for the nearest spelling.

    Raises:
        UsageError: it is something else.
    """
    if value is None:
        return None
    several: list[object] = [*value] if isinstance(value, (list, tuple)) else [value]
    if not several:
        raise UsageError(f"{name} is an empty list; leave it out, or name {like}")
    for each in several:
        if not isinstance(each, str) or not re.fullmatch(shape, each):
            close = nearest(each, known, 2) if isinstance(each, str) else []
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"it is like {like}"
            raise UsageError(f"{each!r} is no {name}: {hint}")
    return tuple(map(str, several))


def settle(driver: Any, shapes: Mapping[str, Sequence[Any]], known: Mapping[str, Iterable[str]]) -> None:
    """Check a driver's settings, and make tuples of those that may be several.

    Args:
        shapes: name -> (shape, like, whether it may be several), as `words` has them; known: as there, by name.

    Raises:
        UsageError: one of them cannot mean anything.
    """
    for name, (shape, like, several) in shapes.items():
        value = getattr(driver, name)
        checked = words(name, value, shape, like, known.get(name, ()))
        if several:
            object.__setattr__(driver, name, checked)
        elif isinstance(value, (list, tuple)):
            raise UsageError(f"{name} is one word like {like}, not {value!r}")


_PLAIN: Mapping[Any, tuple[str, Any]] = {
    bool: ("True or False", bool),
    int: ("a whole number", int),
    float: ("a number", (int, float)),
    str: ("a text", str),
    Path: ("a path", (str, os.PathLike)),
}


def plain(driver: Any, **kinds: Any) -> None:
    """Check settings that are no more than `strict=bool`, `bid=float` or `config=Path`; paths become text.

    Raises:
        UsageError: one is something else, or empty; None will do where it is the default.
    """
    for name, kind in kinds.items():
        value, about = getattr(driver, name), driver.__dataclass_fields__[name]
        said, right = _PLAIN[kind]
        if value is None and about.default is None:
            continue
        endless = isinstance(value, float) and not math.isfinite(value)
        if not isinstance(value, right) or (isinstance(value, bool) and kind is not bool) or value == "" or endless:
            raise UsageError(f"{name} is {said}, not {repr(value) if about.repr else f'of {type(value)}'}")
        if isinstance(value, os.PathLike):
            object.__setattr__(driver, name, os.fspath(value))


def table(package: str, file: str) -> Any:
    """What a JSON file of a driver's package says."""
    return json.loads((files(package) / file).read_text("utf-8"))


def surroundings(start: str | tuple[str, ...], files: Mapping[str, str]) -> Hashable:
    """What a client is made from, which is made anew when it changes: of the environment what begins so, and files.

    Args:
        files: the path of each, by the variable that may name another one. Renewed credentials are written there.
    """
    paths = [Path(os.environ.get(name) or usual).expanduser() for name, usual in files.items()]
    written = [each.stat().st_mtime_ns for each in paths if each.is_file()]
    return frozenset(each for each in os.environ.items() if each[0].startswith(start)), *written


def filled(shape: Any, values: Mapping[str, Any]) -> Any:
    """A question's shape with "$name" and "$name.part" replaced by that value, and left out where that is None."""
    if isinstance(shape, dict):
        made = {key: filled(each, values) for key, each in shape.items()}
        return {key: each for key, each in made.items() if each is not None}
    if isinstance(shape, list):
        return [filled(each, values) for each in shape]
    if not isinstance(shape, str) or not shape.startswith("$"):
        return shape
    name, *parts = shape[1:].split(".")
    value = values[name]
    for part in parts:
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    return value


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


def in_turn(do: Callable[[T], V], items: Iterable[T]) -> list[V | Exception]:
    """The outcomes, in order, up to the first failure: of what is scarce, the first items get what there is."""
    outcomes: list[V | Exception] = []
    for item in items:
        try:
            outcomes.append(do(item))
        except Exception as e:  # noqa: BLE001 - it is an outcome, too
            return [*outcomes, e]
    return outcomes


def patiently(do: Callable[[], V], seconds: float, *codes: str) -> V:
    """The answer, asked for again with jitter where there was none, where that was too often, or for these codes.

    Raises:
        ProviderError: the last one, after so many seconds, or one that does not pass.
    """
    from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

    passes = retry_if_exception(
        lambda e: isinstance(e, (RateLimitError, NoAnswer)) or (isinstance(e, ProviderError) and e.code in codes)
    )
    jitter = wait_random_exponential(0.5, max=10)

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked = error.retry_after if isinstance(error, RateLimitError) else None
        return min(asked, seconds) if asked else jitter(state)  # who says 0 is not to be asked without a pause

    return Retrying(retry=passes, stop=stop_after_delay(seconds), wait=wait, reraise=True)(do)


def quietly(do: Callable[[], V], *codes: str) -> V | None:
    """The answer; None where it is refused with one of these codes."""
    try:
        return do()
    except ProviderError as e:
        if e.code not in codes:
            raise
    return None


def soon(look: Callable[[], V], seconds: float, first: float = 0.1, most: float = 2.0) -> V | None:
    """What is seen, looked for again until it is true; None where it is not within so many seconds.

    Args:
        first, most: seconds from one look to the next, which double.
    """
    from tenacity import Retrying, retry_if_result, stop_after_delay, wait_exponential

    wait, again = wait_exponential(first, max=most), retry_if_result(lambda seen: not seen)
    over = stop_after_delay(seconds)
    return Retrying(retry=again, stop=over, wait=wait, retry_error_callback=lambda _: None)(look)


def networks(given: Sequence[str] | None) -> list[str]:
    """From where machines may be logged in to: those given, or this machine's own public address alone."""
    return [each if "/" in each else f"{each}/32" for each in given or [public_network()]]


def public_network() -> str:
    """This machine's own address as the world sees it, as a network: "203.0.113.7/32".

    Raises:
        ProviderError: it cannot be found.
    """
    import urllib.request  # slow to import, and only launches need it

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
    """What error codes of a provider mean: patterns of them, an error of ours, what to do.

    Attributes:
        text: a regular expression that is found in what the provider said, where its codes do not tell; "" for any.
    """

    codes: tuple[str, ...]
    kind: type[ProviderError]
    advice: str
    text: str = ""

    def fits(self, code: str, text: str) -> bool:
        """Upper and lower case of the text are the same."""
        said = not self.text or re.search(self.text, text, re.IGNORECASE)
        return bool(said) and any(fnmatchcase(code, one) for one in self.codes)


class Refusals:
    """The error codes of a provider, from the table `errors.csv` of its driver's package; the first row that fits.

    Args:
        provider: the driver's name; called: the provider's own.
    """

    def __init__(self, package: str, provider: str, called: str) -> None:
        self.provider, self._called = provider, called
        rows = csv.DictReader((files(package) / "errors.csv").read_text("utf-8").splitlines())
        self.meanings = [
            Meaning(tuple(row["codes"].split()), getattr(errors, row["kind"]), row["advice"], row.get("text", ""))
            for row in rows
        ]

    def error(self, what: str, code: str, text: str, **names: str) -> ProviderError:
        """An error that says what was refused, why, and what to do; `names` are what the advice may speak of."""
        meaning = self._meaning(code, text)
        kind, advice = (meaning.kind, meaning.advice.format(**names)) if meaning else (ProviderError, "")
        said = f"{self._called} refused {what}: {text.strip() or 'no reason given'} ({code or 'no code'})"
        return kind(f"{said}; {advice}" if advice else said, provider=self.provider, code=code, text=text)

    def known(self, codes: Sequence[str]) -> str:
        """The first of these codes that the table has; the first of all where it has none."""
        return next((code for code in codes if self._meaning(code)), codes[0])

    def _meaning(self, code: str, text: str = "") -> Meaning | None:
        return next((each for each in self.meanings if each.fits(code, text)), None)


# --- checks --------------------------------------------------------------------------------------------------


def findings(questions: Mapping[str, Callable[[], object]]) -> Iterator[Finding]:
    """What came of each question, by its title: its answer, or why there is none and what to do."""
    outcomes = at_once(lambda question: str(question() or "yes"), questions.values())
    for what, outcome in zip(questions, outcomes, strict=True):
        if isinstance(outcome, Exception):
            text, _, advice = str(outcome).rpartition("; ")
            yield Finding(what, False, text or advice, advice if text else "")
        else:
            yield Finding(what, True, outcome)


def basics(
    identity: Callable[[], object], date: Callable[[], str], given: Sequence[str] | None
) -> dict[str, Callable[[], object]]:
    """Questions for every cloud of machines with ssh: who the provider says we are, and the Date of an answer."""
    return {
        "ssh on this machine": openssh,
        "networks that may log in": lambda: ", ".join(networks(given)),
        "credentials": identity,
        "clock": lambda: clock(date()),
    }


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
