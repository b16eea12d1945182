"""Long, seeded tests of what happens by chance: `make soak SEED=1 MINUTES=10`.

Each module beside this one that has a `main(argv)` is run in a process of its own; whatever options it has beside
`--seed` and `--minutes` keep their defaults. Name modules to run these alone: `python -m tests.soak pools`.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def modules() -> list[str]:
    """The names of the modules that can be run."""
    names = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))
    return [name for name in names if hasattr(importlib.import_module(f"tests.soak.{name}"), "main")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run them one after the other; 1 if one of them has found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("modules", nargs="*", help="all of them if none is named")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0, help="of those that run for a time")
    asked = parser.parse_args(argv)
    failed = []
    for name in asked.modules or modules():
        command = [sys.executable, "-m", f"tests.soak.{name}", "--seed", str(asked.seed)]
        usage = subprocess.run([*command[:3], "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        if "--minutes" in usage:
            command += ["--minutes", str(asked.minutes)]
        print(f"--- {name}, seed {asked.seed}", flush=True)
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "nothing was found")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
