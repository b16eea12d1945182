"""joblib's tasks on a pool of this machine, beside joblib's own processes (loky), with as many workers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import joblib
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC

import skypool as sky

TASKS = 10_000
WORKERS = 2
ROUNDS = 15
"""Rounds in which both run in turn; their medians are compared."""


def _double(x: int) -> int:
    return x * 2


def _tasks() -> None:
    parallel: Any = joblib.Parallel(n_jobs=WORKERS)
    parallel(joblib.delayed(_double)(n) for n in range(TASKS))


def _search() -> None:
    data, target = load_digits(return_X_y=True)
    GridSearchCV(SVC(), {"C": [1, 10], "gamma": [1e-3, 1e-4]}, cv=3, n_jobs=WORKERS).fit(data, target)


def _beside(run: Callable[[], None], backend: Any, rounds: int) -> tuple[float, float]:
    """Return the median seconds of a function, on the pool and with loky. The first round of both is not counted."""
    seconds: dict[str, list[float]] = {"pool": [], "loky": []}
    for _ in range(rounds + 1):
        for name, each in (("pool", backend), ("loky", "loky")):
            with joblib.parallel_config(backend=each):
                began = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - began)
    return statistics.median(seconds["pool"][1:]), statistics.median(seconds["loky"][1:])


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for quick tasks and a row for a grid search."""
    with sky.ComputePool(slots=WORKERS, console="off") as pool, sky.joblib.backend(pool) as backend:
        here, loky = _beside(_tasks, backend, ROUNDS)
        yield (
            f"joblib: {TASKS:,} quick tasks, {WORKERS} slots",
            f"{TASKS / here:,.0f} tasks/s",
            f"{TASKS / loky:,.0f} loky",
            f"{loky / here:.2f} (≥ 1)",
        )
        here, loky = _beside(_search, backend, 5)
        yield (
            f"GridSearchCV of 12 fits, {WORKERS} slots",
            f"{here * 1e3:,.0f} ms",
            f"{loky * 1e3:,.0f} ms loky",
            f"{here / loky:.2f} (≤ 1)",
        )


if __name__ == "__main__":
    for row in rows():
        print("  ".join(row), flush=True)
