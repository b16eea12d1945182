"""All benchmarks as one table: `python -m tests.benchmarks`. Timing fails nothing; it is to be read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from tests.benchmarks import (
    accelerators,
    core,
    dask_start,
    files,
    gangs,
    joblib_tasks,
    launch,
    nodes,
    plan,
    ray_start,
    remote,
    run_again,
    samples,
    save,
    trust,
)


def main() -> None:
    """Print each row as it is measured, then the table."""
    table = Table(
        "what", "figure", "baseline", "ratio (aim)", title=f"{os.cpu_count()} cores, Python {sys.version.split()[0]}"
    )
    rooms = (
        core,
        nodes,
        gangs,
        trust,
        accelerators,
        plan,
        launch,
        remote,
        files,
        run_again,
        save,
        samples,
        joblib_tasks,
        dask_start,
        ray_start,
    )
    parts: list[Iterable[tuple[str, str, str, str]]] = [room.rows() for room in rooms]
    for part in parts:
        for row in part:
            print("  ".join(row), file=sys.stderr, flush=True)
            table.add_row(*row)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
