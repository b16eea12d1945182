"""Proofs of an account whose client is killed before and after each call that it makes: `gc` must leave nothing.

    python -m tests.soak.proofs --seed 1

A tenth of it runs as a slow test in tests/test_prove.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.test_prove import killed


def main(argv: Sequence[str] | None = None) -> int:
    """Kill a proof at every moment; 1 if something was left."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.proofs", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=int, default=1, help="kill at every so many moments only")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        left = killed(Path(folder) / "proofs", asked.seed, asked.share)
    print(f"left behind: {left}" if left else "nothing was left")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
