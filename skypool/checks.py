"""Checks arguments that users pass: numbers, durations, sizes and choices.

A failed check raises a UsageError that says which values are valid. `name` is always the name of the argument, and
`what` its meaning, such as "a size in GiB". The module also makes the messages for renamed and unknown arguments.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from skypool.errors import UsageError, nearest

T = TypeVar("T")
Duration = float | str | timedelta
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 100 * 365.25 * 86400
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def number(
    name: str,
    value: object,
    what: str,
    *,
    optional: bool = False,
    above: float | None = None,
    least: float | None = None,
) -> None:
    """Raise UsageError unless `value` is a number within the bounds. Infinity counts as a number.

    Args:
        name: the name of the argument, for the message.
        value: the value to check. Booleans and NaN are rejected.
        what: what the argument means, such as "a size in GiB", for the message.
        optional: True accepts None.
        above: the value must be greater than this. None: no such bound.
        least: the value must not be less than this. None: no such bound.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise UsageError(f"{name} ({what}) must be a number, not {value!r}")
    if above is not None and not value > above:
        raise UsageError(f"{name} ({what}) must be more than {above:g}, not {value!r}")
    if least is not None and value < least:
        raise UsageError(f"{name} ({what}) must be at least {least:g}, not {value!r}")


def whole(name: str, value: object, what: str, *, least: int) -> None:
    """Raise UsageError unless `value` is an integer of at least `least`. Booleans and 3.0 are not valid.

    For the message, `name` is the name of the argument, and `what` its meaning, such as "the number of nodes".
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} ({what}) must be a whole number, not {value!r}")
    if value < least:
        raise UsageError(f"{name} ({what}) must be at least {least}, not {value}")


def seconds(name: str, value: Duration) -> float:
    """Return a duration in seconds.

    `value` is a number of seconds, a timedelta, or text such as "90s", "10m" or "1h30m". Units are ms, s, m, h and d.
    Each number in a text needs a unit; spaces are ignored. `name` is the name of the argument, for the message.

    Raises:
        UsageError: the value is not a duration, not positive, or longer than 100 years.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, str):
        parts = _DURATION.findall(value.replace(" ", ""))
        if not parts or "".join(n + u for n, u in parts) != value.replace(" ", ""):
            raise UsageError(f"{name} must be a duration such as 90, '90s', '10m' or '1h30m', not {value!r}")
        value = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    number(name, value, "a duration in seconds", above=0)
    if value > _LONGEST:
        raise UsageError(
            f"{name} must be a duration of at most a hundred years, not {value!r} seconds; leave {name} out for the "
            "default"
        )
    return float(value)


def duration_words(seconds: float) -> str:
    """Return a duration in seconds as words: "7.5 s", "30:00 min" or "1:30:00 h"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    text = str(timedelta(seconds=round(seconds)))
    return f"{text} h" if seconds >= 3600 else f"{text.removeprefix('0:')} min"


def switch(name: str, value: Any) -> bool:
    """Return `value` if it is True or False. Raise UsageError for any other value, also for 0, 1 and None.

    `name` is the name of the argument, for the message.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, not {value!r}")
    return value


def one_of(name: str, value: Any, choices: Collection[T]) -> T:
    """Return the first element of `choices` that equals `value`.

    Raises UsageError if there is none. The message names the argument `name`, lists the choices and, if `value` is
    text, suggests a similar one.
    """
    for choice in choices:
        if choice == value:
            return choice
    close = nearest(value, map(str, choices), 1) if isinstance(value, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise UsageError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}{hint}")


def texts(name: str, value: Sequence[str | os.PathLike[str]] | None) -> list[str]:
    """Return an argument that is a list of texts or paths; [] for None. Raises UsageError if it is another."""
    if value is None:
        return []
    if isinstance(value, (str, os.PathLike)):
        raise UsageError(f"{name} must be a list, such as {name}=[{os.fspath(value)!r}], not {value!r}")
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        values = "; the values come from the environment or .env" if name == "secrets" else ""
        raise UsageError(f"{name} must be a list of strings, not {type(value).__name__}{values}")
    for each in value:
        if not isinstance(each, (str, os.PathLike)):
            raise UsageError(f"{name} must be a list of strings, but it has {each!r:.200}")
    return [os.fspath(each) for each in value]


def gibibytes(name: str, size: float | str | None) -> float:
    """Return a size in GiB (2**30 bytes), or 0.0 for None.

    `size` is a number of GiB, or text such as "64GiB", "64g" (also GiB), "64GB" (10**9 bytes) or "1.5TiB". Text without
    a unit is in GiB. Case is ignored. `name` is the name of the argument, for the message.

    Raises:
        UsageError: the value is not a size, not positive, or infinite.
    """
    if isinstance(size, str):
        parts = _SIZE.fullmatch(size)
        if parts is None:
            raise UsageError(f"{name} must be a size such as 64, '64GiB' or '1.5TB', not {size!r}")
        amount, unit, rest = float(parts[1]), parts[2].lower(), parts[3].lower()
        if not unit and rest:
            raise UsageError(f"{name} must be a size in GiB such as 64, '64GiB' or '1.5TB', not {size!r}")
        step = 1000 if rest == "b" else 1024
        size = amount * step ** _POWERS[unit] / 2**30 if unit else amount
    number(name, size, "a size in GiB", optional=True, above=0)
    if size == math.inf:
        raise UsageError(f"{name} must be finite, not infinite; leave {name} out to set no limit")
    return float(size or 0)


def not_an_argument(what: str, function: Callable[..., Any], name: str, *more: str) -> str:
    """Return (not raise) the message for `name`, a keyword argument that the function called `what` does not have.

    The message lists the arguments of `function` and those named in `more`, and suggests a similar one. For a name such
    as "gpus", it suggests `accelerator`.
    """
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    known = [k for k, p in inspect.signature(function).parameters.items() if p.kind not in kinds and k != "self"]
    known += more
    close = nearest(name, known, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    if name in ("gpu", "gpus", "num_gpus", "accelerators", "devices"):
        hint = "; did you mean accelerator='H100:8'?"
    return f"{what} has no argument {name!r}{hint} (it has {', '.join(known)})"
