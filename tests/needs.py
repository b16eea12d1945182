"""What tests need of this machine: `@pytest.mark.needs("openssh")`. Without it they are skipped, and in CI they fail.

What was skipped is counted in one line at the end of the run, with the reasons. `--skipped-to FILE` lists it, and
`--only-skipped FILE` runs what such a list has, on the same machine with more on it, or as root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

from tests.lab import docker, machines

PROGRAMS = {
    "busybox": ("busybox", ("busybox",)),
    "compiler": ("gcc", ("gcc",)),
    "openssh": ("openssh-client", ("ssh", "ssh-keygen")),
    "ps": ("procps", ("ps",)),
    "sshd": ("openssh-server", ("ssh", "ssh-keygen", "sshd")),
    "tmux": ("tmux", ("tmux",)),
}
"""A need, the package of Debian that brings it, and its programs."""

SHELLCHECK = Path(sys.executable).parent / "shellcheck"
"""A program of the development dependencies."""


@cache
def lacking(need: str) -> str:
    """Return why this machine does not have what a test needs; "" if it has it."""
    if need == "root":
        return "" if os.geteuid() == 0 else "needs root"
    if need == "lab":
        return machines.unavailable()
    if need == "docker":
        return docker.unavailable()
    if need == "mounts":  # in a plain chroot there is no mount to make private
        done = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
        return "no mount namespace can be made" if done.returncode else ""
    package, programs = PROGRAMS[need]
    places = f"{os.environ['PATH']}:/usr/sbin"
    there = all(shutil.which(program, path=places) for program in programs)
    return "" if there else f"{package} is not installed"


def skip_or_fail(reason: str, *, whole_module: bool = False) -> NoReturn:
    """Skip the test, as something is missing on this machine. In CI it fails instead."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, and CI must not skip what needs it")
    pytest.skip(reason, allow_module_level=whole_module)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs what is not here, before its fixtures are made."""
    needs = [need for mark in item.iter_markers("needs") for need in mark.args]
    for need in [*needs, *(["lab"] if item.get_closest_marker("lab") else [])]:
        if reason := lacking(need):
            skip_or_fail(reason)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("skypool")
    group.addoption("--skipped-to", metavar="FILE", help="append the ids of skipped tests to FILE")
    group.addoption("--only-skipped", metavar="FILE", help="run only the tests that --skipped-to has put into FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a list for `--only-skipped` that is missing or empty: a run of nothing would look like a good one."""
    file = config.getoption("--only-skipped")
    if file is not None and not (os.path.exists(file) and os.path.getsize(file)):
        raise pytest.UsageError(f"{file} lists no test: run `make test` first, which writes it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--only-skipped`, leave the tests of its list, and those of the modules in it."""
    if (file := config.getoption("--only-skipped")) is None:
        return
    listed = set(Path(file).read_text().splitlines())
    chosen = [item for item in items if not listed.isdisjoint((item.nodeid, item.nodeid.partition("::")[0]))]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say in one line what was skipped and why, and append the tests to the list that was asked for."""
    if hasattr(config, "workerinput"):
        return  # the process that started this one does it
    reports = terminalreporter.getreports("skipped")
    if reports:
        reasons = Counter(_reason(report) for report in reports)
        told = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped: {told}")
    if name := config.getoption("--skipped-to"):
        file = Path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a") as to:
            to.writelines(f"{report.nodeid}\n" for report in reports)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason of a skipped test, without its details: what stands behind a colon."""
    assert isinstance(report.longrepr, tuple)
    where, _, text = report.longrepr
    if report.when == "call" and "/skypool/testing/" in where:
        return "what a driver or its control does not have"
    return text.removeprefix("Skipped: ").partition(": ")[0]
