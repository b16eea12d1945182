"""What the catalogue costs: to import, to look a name up, to refuse one. Timing never fails a test.

python tests/benchmarks/accelerators.py
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from skypool.accelerators import parse, tables
from skypool.errors import UnknownAccelerator

ROOT = Path(__file__).parents[2]


def rows() -> list[tuple[str, str, str, str]]:
    """(what, figure, baseline, ratio); the baseline of an import is the bare interpreter, else the target."""
    bare = _start("pass")
    known = [row["alias"] for row in tables.rows("aliases.csv")] + list(tables.slices())
    wrong = _wrong(known)
    _each(known, parse)
    return [
        _import("import skypool.accelerators", bare, 15e-3),
        _against("import skypool.accelerators as a; a.H100()", "import json", 2.0),
        _import("import skypool.accelerators as a; a.parse('H100:8')", bare, 15e-3),
        _import("import skypool.accelerators as a; a.parse('nvidia-tesla-a100')", bare, None),
        _import("import dataclasses", bare, None),
        _lookup("parse, a spelling seen before (median)", _median(_each(known, parse)), 20e-6),
        _lookup("parse, a new spelling of a known card (median)", _median(_each(_respelled(known), parse)), 20e-6),
        _lookup("parse, an unknown name (median)", _median(_each(wrong, _refused)), 2e-3),
        _lookup("parse, an unknown name (slowest of 1000)", max(_each(_wrong(known, 2), _refused)), 2e-3),
    ]


def _start(code: str, times: int = 15) -> float:
    """Seconds for an interpreter to start and run this; the best of several."""
    argv = [sys.executable, "-c", code]
    return min(_seconds(lambda: subprocess.run(argv, cwd=ROOT, check=True)) for _ in range(times))


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _import(code: str, bare: float, target: float | None) -> tuple[str, str, str, str]:
    over = _start(code) - bare
    ratio = f"{over / target:.2f} of {target * 1e3:g} ms" if target else ""
    return code, f"{over * 1e3:.1f} ms over", f"{bare * 1e3:.1f} ms bare", ratio


def _against(code: str, other: str, most: float, times: int = 40) -> tuple[str, str, str, str]:
    """What one import takes over the bare interpreter against what another does, each in turn; medians."""
    seconds: dict[str, list[float]] = {"pass": [], other: [], code: []}
    for each in [*seconds] * times:
        argv = [sys.executable, "-c", each]
        seconds[each].append(_seconds(lambda argv=argv: subprocess.run(argv, cwd=ROOT, check=True)))  # type: ignore[misc] # bound now
    bare, base, mine = (_median(each) for each in seconds.values())
    ratio = (mine - bare) / (base - bare)
    return (
        code,
        f"{(mine - bare) * 1e3:.1f} ms over",
        f"{(base - bare) * 1e3:.1f} ms {other}",
        f"{ratio:.2f} ({most:g})",
    )


def _lookup(what: str, figure: float, target: float) -> tuple[str, str, str, str]:
    return what, f"{figure * 1e6:.1f} µs", f"{target * 1e6:g} µs", f"{figure / target:.2f}"


def _each(words: Sequence[str], read: Callable[[str], object]) -> list[float]:
    return [_seconds(lambda word=word: read(word)) for word in words]  # type: ignore[misc] # bound now


def _median(seconds: Sequence[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]


def _refused(word: str) -> None:
    try:
        parse(word)
    except UnknownAccelerator:
        return
    raise AssertionError(f"{word!r} is known")


def _respelled(words: Sequence[str]) -> list[str]:
    return [f" {word.swapcase()} " for word in words]


def _wrong(words: Sequence[str], seed: int = 1) -> list[str]:
    rnd = random.Random(seed)
    return [f"{word[: rnd.randrange(len(word) + 1)]}q{rnd.randrange(10**6)}z" for word in rnd.choices(words, k=1000)]


if __name__ == "__main__":
    for row in rows():
        print("{:<64} {:>16} {:>16}  {}".format(*row))
