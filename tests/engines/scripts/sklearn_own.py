"""Run programs of scikit-learn, as they are, with a pool as joblib's backend, and print how many batches it ran.

python sklearn_own.py FILE...

The last line is JSON: the number of batches of joblib's tasks that ran in the pool, for each file.
"""

from __future__ import annotations

import json
import runpy
import sys
from typing import Any

import matplotlib

import skypool as sky


class Counting(sky.ComputePool):
    """A pool that counts the calls that were sent to it."""

    sent = 0

    def send(self, *args: Any, **options: Any) -> Any:
        self.sent += 1
        return super().send(*args, **options)


def main(files: list[str]) -> None:
    matplotlib.use("Agg")
    counts = {}
    with Counting(nodes=2, slots=1, name="sklearn-own", console="off") as pool:
        for file in files:
            before = pool.sent
            with sky.joblib.backend(pool):
                runpy.run_path(file, run_name="__main__")
            counts[file] = pool.sent - before
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
