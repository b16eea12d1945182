"""Programs of others run as they are by `skypool run`: examples, scripts and modules that packages on PyPI carry.

    python -m tests.soak.programs

They are fetched from the package index, and none of them knows skypool. Each runs on this machine and, where the lab
can be used, on a machine of the lab over SSH. Its output must be what is expected.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import skypool as sky
from tests.distributions import Source
from tests.lab.machines import Lab, unavailable


@dataclass(frozen=True)
class Program:
    """A program of a source distribution.

    Attributes:
        source: the source distribution.
        words: the program and its arguments, as for `skypool run`.
        said: a part of its output; or, if it begins with "@", the file that has all of it.
        folder: the folder in which it starts.
    """

    source: Source
    words: tuple[str, ...]
    said: str
    folder: str = ""

    def __str__(self) -> str:
        return f"{self.source.name}: {' '.join(self.words)}"

    def run_here(self, source: Path) -> str:
        """Run the program below the unpacked source by `skypool run`, and return what was wrong, "" if nothing was."""
        argv = [sys.executable, "-m", "skypool", "run", *self.words]
        folder, nothing = source / self.folder, subprocess.DEVNULL
        done = subprocess.run(argv, cwd=folder, stdin=nothing, capture_output=True, text=True, timeout=600)
        return self._wrong(source, done.returncode, done.stdout, done.stderr)

    def run_on(self, provider: sky.SSH, source: Path) -> str:
        """Run the program by `sky.run` on a machine of the provider, and return what was wrong."""
        with contextlib.chdir(source / self.folder):
            ran = sky.run(list(self.words), provider)
        return self._wrong(source, ran.returncode, ran.output, "")

    def _wrong(self, source: Path, status: int, out: str, more: str) -> str:
        file = source / self.folder / self.said[1:]
        is_right = out == file.read_text() if self.said.startswith("@") else self.said in out
        return "" if is_right and status == 0 else f"status {status}, output {out[-600:]!r}\n{more[-2000:]}"


SIMPY = Source(
    "4a/38/fb393d1a5c2f35b65609e8d3c39d1508ada6a767c7e624ffa16ed3e84ffd/simpy-4.1.2.tar.gz",
    "76ef36b71e0436ba94e55febc001c78879e493a323f045bbcfbb0b216e9b1fbc",
)
"""Its package lies in `src`, setuptools-scm asks for its version, and docs/requirements.txt is for its pages."""
RICH = Source(
    "c0/8f/0722ca900cc807c13a6a0c696dacf35430f72e0ec571c4275d2371fca3e9/rich-15.0.0.tar.gz",
    "edd07a4824c6b40189fb7ac9bc4c52536e9780fbbfbddf6f1e2502c31b068c36",
)
TABULATE = Source(
    "46/58/8c37dea7bbf769b20d58e7ace7e5edfe65b849442b00ffcdd56be88697c6/tabulate-0.10.0.tar.gz",
    "e2cfde8f79420f6deeffdeda9aaec3b6bc5abce947655d17ac662b126e48a60d",
)
LARK = Source(
    "da/34/28fff3ab31ccff1fd4f6c7c7b0ceb2b6968d8ea4950663eadcb5720591a0/lark-1.3.1.tar.gz",
    "b426a7a6d6d53189d318f2b6236ab5d6429eaf09259f1ca33eb716eed10d2905",
)
DOCUTILS = Source(
    "39/a4/5180d9afc57e8fca05601dd652bdff19604c218814037fe90ffc7625a50a/docutils-0.23.tar.gz",
    "746f5060322511280a1e50eb76846ed6bf2342984b2ac04dc42caa1a8d78799e",
)
PYGMENTS = Source(
    "49/2e/ced460408999b33da6b31b0021b0f37d329e202d4169aeb164493778f25b/pygments-2.21.0.tar.gz",
    "610ca751c9bc2492b38eb9a38a7fbc93edbbb2d7182edaf34e66ae493dee5c8c",
)
PLY = Source(
    "e5/69/882ee5c9d017149285cab114ebeab373308ef0f874fcdac9beb90e0ac4da/ply-3.11.tar.gz",
    "00c7c1aaa88358b9c765b6d3000c6eec0ba42abca5351b095321aef446081da3",
)
PROMPT = Source(
    "7d/ea/39b988c938f75cb75d7045b5c69f8bfed47ee2152c8837fb403de29d6fb8/prompt_toolkit-3.0.53.tar.gz",
    "9ec8a0ad96d5c56148b3f914aa79c1564c3fde5d2e6b876e7bc327e353cf8fa6",
)
ATTRS = Source(
    "9a/8e/82a0fe20a541c03148528be8cac2408564a6c9a0cc7e9171802bc1d26985/attrs-26.1.0.tar.gz",
    "d03ceb89cb322a8fd706d4fb91940737b6642aa36998fe130a9bc96c985eff32",
)
"""It has a uv.lock, and hatch-vcs asks for its version."""
HTTPIE = Source(
    "3e/bb/aefb0abbdbadeb9e8e7f04fb0f1942bc084f4215bf8dc729236153d09e1e/httpie-3.2.4.tar.gz",
    "302ad436c3dc14fd0d1b19d4572ef8d62b146bcd94b505f3c2521f701e2e7a2a",
)
"""It has a setup.py and no pyproject.toml."""
SIMULATIONS = ("bank_renege", "carwash", "gas_station_refuel", "latency", "machine_shop", "movie_renege")
CODE = "docs/examples/code"
PROGRAMS = (
    *(Program(SIMPY, (f"{CODE}/{name}.py",), f"@{CODE}/{name}.out") for name in SIMULATIONS),
    Program(RICH, ("-m", "rich"), "Rich features"),
    Program(TABULATE, ("tabulate", "--header", "README"), "README.md"),
    Program(LARK, ("fruitflies.py",), "comparative", "examples"),
    Program(LARK, ("indented_tree.py",), "tree", "examples"),
    Program(LARK, ("lark_grammar.py",), "All grammars parsed successfully\n", "examples"),
    Program(LARK, ("examples/advanced/custom_lexer.py",), "alice"),
    Program(LARK, ("examples/advanced/create_ast.py",), ""),
    Program(LARK, ("examples/advanced/error_reporting_lalr.py",), "Missing"),
    Program(LARK, ("main.py",), "", "examples/composition"),
    Program(DOCUTILS, ("-m", "docutils", "--writer=pseudoxml", "README.rst"), "<document"),
    Program(PYGMENTS, ("-m", "pygments", "-f", "html", "pygments/__main__.py"), '<div class="highlight">'),
    Program(PLY, ("basic.py", "hello.bas"), "HELLO WORLD", "example/BASIC"),
    Program(PROMPT, ("examples/print-text/html.py",), "Named colors"),
    Program(PROMPT, ("examples/print-text/print-frame.py",), "Stage"),
    Program(ATTRS, ("python", "-c", "import attrs; print(attrs.__version__)"), "26.1.0\n"),
    Program(HTTPIE, ("http", "--version"), "3.2.4\n"),
)
"""The programs. Those of `simpy` carry their output."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run each program on this machine and on one of the lab; 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.programs", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="has no meaning here")
    parser.add_argument("--only", default="", help="those whose words have this text")
    asked = parser.parse_args(argv)
    chosen = [each for each in PROGRAMS if asked.only in str(each)]
    wrong = 0
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ.update(XDG_STATE_HOME=str(home / "state"), XDG_CACHE_HOME=str(home / "cache"))
        ssh = None
        if reason := unavailable():
            print(f"not over SSH: {reason}")
        else:
            lab = stack.enter_context(Lab())
            machine = lab.machine(keys=[lab.public_key])
            stack.callback(machine.destroy)
            machine.wait_for_ssh()
            host = sky.Host(machine.address, host_key=machine.host_key)
            ssh = sky.SSH(hosts=[host], user="root", identity=str(lab.client_key))
        for each in chosen:
            source = each.source.unpacked(home)
            for where, trouble in (
                ("here", each.run_here(source)),
                *([("over SSH", each.run_on(ssh, source))] if ssh else []),
            ):
                wrong += bool(trouble)
                print(f"{each}, {where}: {trouble or 'right'}", flush=True)
    print(f"{wrong} of {len(chosen) * (2 if ssh else 1)} runs were wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
