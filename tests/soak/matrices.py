"""Clients of each cloud of the lab, killed before and after every call that they make: nothing may be left.

    python -m tests.soak.matrices

A third of it runs as slow tests. Needs root and the lab.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run those tests with the whole of each matrix; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.matrices", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, help="every call has its turn, whatever it is")
    parser.parse_args(argv)
    command = [sys.executable, "-m", "pytest", "tests", "-m", "slow and lab", "-k", "killed_at_any_call", "-n", "2"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "WHOLE_MATRICES": "1"})
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
