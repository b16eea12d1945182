"""Formats the times, numbers and amounts of a report. A value that is not known is "unknown", never 0."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

UNKNOWN = "unknown"
_MINUTE = 60.0
_HOUR = 60 * _MINUTE
_DAY = 24 * _HOUR


def known(value: float | None, form: Callable[[float], str]) -> str:
    """Return a value as text, formatted by `form`; "unknown" for None."""
    return UNKNOWN if value is None else form(value)


def moment(time: float) -> str:
    """Return a time in seconds since 1970 as text, such as "2026-03-02 14:05:09 UTC"."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clock(time: float) -> str:
    """Return the time of day in UTC of a time in seconds since 1970, such as "14:05:09"."""
    return datetime.fromtimestamp(time, UTC).strftime("%H:%M:%S")


def duration(seconds: float) -> str:
    """Return a duration as text: "850 ms", "12.3 s", "4 min 05 s", "3 h 07 min" or "2 d 04 h"."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    if seconds < _HOUR:
        return f"{seconds // _MINUTE:.0f} min {seconds % _MINUTE // 1:02.0f} s"
    if seconds < _DAY:
        return f"{seconds // _HOUR:.0f} h {seconds % _HOUR // _MINUTE:02.0f} min"
    return f"{seconds // _DAY:.0f} d {seconds % _DAY // _HOUR:02.0f} h"


def usd(value: float) -> str:
    """Return an amount in US dollars, with four decimals as in receipts."""
    return f"{value:,.4f}"


def percent(value: float) -> str:
    """Return a percentage as text, such as "83 %" or "0.3 %"."""
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.2g} %"


def share(part: float | None, whole: float | None) -> str:
    """Return a part as a percentage of the whole; "unknown" if one of them is unknown or the whole is 0."""
    return UNKNOWN if part is None or not whole else percent(100 * part / whole)


def gib(mib: float) -> str:
    """Return an amount of memory as text in GiB, such as "79.6 GiB". The argument is in MiB."""
    return f"{mib / 1024:.1f} GiB"


def count(number: float) -> str:
    """Return a number rounded to a whole one, with separators, such as "12,345"."""
    return f"{number:,.0f}"


def several(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun, such as "1 node" or "8 nodes". Without `many`, the plural is made with "s"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
