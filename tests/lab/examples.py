"""The examples as they are, on another provider than their own: nothing in them is changed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Fork

ROOT = Path(__file__).parent.parent.parent
NAMES = sorted(path.stem for path in (ROOT / "examples").glob("0[1-6]_*.py"))
"""The examples that name no provider and no accelerator, so that they run anywhere."""
AMONG_OTHERS = ("01_hello", "03_stream")
"""Two short ones, for what each kind of machine is tried with."""
SOME_LATER = [each if each in AMONG_OTHERS else pytest.param(each, marks=pytest.mark.slow) for each in NAMES]
"""All of them for parametrize; those two are no slow tests."""
PROGRAM = """
import os, runpy, sys
import skypool as sky

os.chdir(sys.argv.pop(1))
path, provider, terms, image = sys.argv[1], *map(eval, sys.argv[2:])
if "grid" in path:
    image = image.pip("scikit-learn")
made = sky.ComputePool.__init__

def init(self, *args, **kwargs):
    kwargs.setdefault("provider", provider)
    kwargs.setdefault("image", image)
    made(self, *args, **{**terms, **kwargs})

sky.ComputePool.__init__ = init
sys.argv = [path]
runpy.run_path(path, run_name="__main__")
"""


def runs(
    terms: Mapping[str, Any], kinds: Iterable[Mapping[str, Any]] = (), *, installing: bool = True
) -> list[tuple[str, dict[str, Any]]]:
    """Every example with these terms, and two of them with those of each kind of machine.

    Args:
        installing: whether the one is among them that installs scikit-learn, which takes long on any machine.
    """
    usual = [(name, dict(terms)) for name in NAMES if installing or "grid" not in name]
    return usual + [(name, dict(kind)) for name in AMONG_OTHERS for kind in kinds]


def run(name: str, driver: str, terms: Mapping[str, Any], image: str = "sky.Image()") -> None:
    """One of them, with what its own pools leave open.

    Args:
        name: of its file, without the ending.
        driver: an expression, as a program that has imported `skypool as sky` writes it; image: the same.
        terms: of its pools.
    """
    words = [str(ROOT), f"examples/{name}.py", driver, repr(dict(terms)), image]
    if "tests.darwin" in sys.modules:  # children inherit its disguise, which the server of forks does not bear
        argv = [sys.executable, "-c", PROGRAM, *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    else:
        done = Fork(PROGRAM, *words, environment={}).end()
    assert done.returncode == 0, done.stdout + done.stderr
