"""A trainer on one core: matrix products, and each second a checkpoint of 20 MB, written beside and renamed.

python -m tests.benchmarks.pinned_trainer FOLDER CORE
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_STEPS = 1500
_EACH = 1.0
"""Seconds from one checkpoint to the next."""


def main(folder: str, core: str) -> None:
    """Print the seconds of the training."""
    os.sched_setaffinity(0, {int(core)})
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import numpy as np

    weights = np.random.default_rng(1).standard_normal((1000, 1000), dtype=np.float32)
    content = os.urandom(20 << 20)
    began = saved = time.monotonic()
    for step in range(_STEPS):
        weights = weights @ weights
        weights /= np.abs(weights).max()
        if time.monotonic() - saved > _EACH:
            saved = time.monotonic()
            beside = Path(folder, f"{step}.tmp")
            beside.write_bytes(content)
            beside.rename(Path(folder, f"{step}.pt"))
    print(time.monotonic() - began)


if __name__ == "__main__":
    main(*sys.argv[1:])
