"""Warnings are events of a pool in its work, and elsewhere they name the user's line. Each comes once."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

import skypool as sky
from skypool import events, tracebacks
from skypool.drivers import Answers, lacks, retry
from skypool.errors import ProviderError
from skypool.model import Instance, Need, Offer
from skypool.testing import FakeCloud

LOSSY = """
import skypool as sky
from skypool.drivers import Answers, lacks
from skypool.errors import ProviderError
from skypool.testing import FakeCloud


class Lossy(FakeCloud):
    def offers(self, need):
        return Answers(super().offers(need), [lacks("prices", ProviderError("no answer came"))])
"""


class Lossy(FakeCloud):
    """A cloud of which some is always missing, also in requests that are made in several threads or again and again."""

    def offers(self, need: Need) -> Answers[Offer]:
        return Answers(super().offers(need), [lacks("prices", ProviderError("no answer came"))])

    def terminate(self, instances: Sequence[Instance]) -> None:
        retry.at_once(lambda _: tracebacks.warn("an address stays"), [1, 2])
        retry.patiently(lambda: tracebacks.warn("a volume stays"), 1.0)
        super().terminate(instances)


def run(tmp_path: Path, program: str, *words: str) -> str:
    """Run a program, and return what it writes to stderr."""
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, str(file), *words], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_warning_in_the_work_of_a_pool_is_one_event_of_it(tmp_path: Path) -> None:
    seen: list[str] = []
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        pool = sky.ComputePool(Lossy(tmp_path), nodes=2, name="lossy", console="off")
        pool.events.listen(lambda event: seen.append(event.text) if isinstance(event, events.Notice) else None)
        with pool:
            pool.resize(1)
    assert [str(each.message) for each in given] == []
    assert sorted(seen) == ["a volume stays", "an address stays", "prices may be missing: no answer came"]


def test_a_warning_of_a_plan_names_the_users_line_once(tmp_path: Path) -> None:
    text = run(tmp_path, f"{LOSSY}\nfor _ in range(3):\n    sky.plan(Lossy('{tmp_path}/cloud'))\n")
    assert text.splitlines() == [
        f"{tmp_path}/script.py:13: RuntimeWarning: prices may be missing: no answer came",
        f"  sky.plan(Lossy('{tmp_path}/cloud'))",
    ]


def test_a_warning_of_a_driver_that_the_user_calls_names_the_users_line(tmp_path: Path) -> None:
    text = run(tmp_path, f"{LOSSY}\nfrom skypool.model import Need\nlist(Lossy('{tmp_path}/cloud').offers(Need()))\n")
    assert text.startswith(f"{tmp_path}/script.py:10: RuntimeWarning: prices may be missing")  # their own driver's line


def test_a_call_that_is_never_sent_is_told_at_the_users_line(tmp_path: Path) -> None:
    text = run(tmp_path, "import skypool as sky\n@sky.compute\ndef f(): ...\nf()\n")
    assert text.splitlines()[:2] == [
        f"{tmp_path}/script.py:4: RuntimeWarning: <call f()> was never sent to a pool; send it with `>> pool`",
        "  f()",
    ]


def test_a_warning_without_a_line_of_the_user_is_given_all_the_same() -> None:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        thread = threading.Thread(target=tracebacks.warn, args=("a disk stays",))
        thread.start()
        thread.join()
    assert [str(each.message) for each in given] == ["a disk stays"]


def test_commands_print_a_warning_as_one_line_and_once(tmp_path: Path) -> None:
    program = """
    import sys
    from skypool import cli, tracebacks
    from skypool.cli import ps as command

    def ps() -> None:
        for _ in range(2):
            tracebacks.warn("the list may be incomplete")

    command.ps = ps
    sys.argv = ["skypool", "ps"]
    cli.main()
    """
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60)
    assert done.stderr == "warning: the list may be incomplete\n"


@pytest.mark.parametrize("folder", ["skypool", "providers", "images"])
def test_no_other_place_warns(folder: str) -> None:
    root = Path(__file__).parents[1]
    calls = [
        f"{file.relative_to(root)}:{number}"
        for file in sorted((root / folder).rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if "warnings.warn" in line and file != root / "skypool/tracebacks.py"
    ]
    assert calls == [f"skypool/events.py:{each.rpartition(':')[2]}" for each in calls], "use tracebacks.warn"
