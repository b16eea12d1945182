"""What the live view, `skypool top` and `skypool logs` show on real terminals, made by tmux.

`make screens` writes docs/screens.md anew. There, times, amounts, process ids and whatever else differs from run to run
have other values. The test compares a run with that page.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT, eventually
from tests.needs import lacking, skip_or_fail
from tests.screen_work import prepare

PAGE = ROOT / "docs" / "screens.md"
SMALL, LARGE = (80, 24), (200, 50)
BUSY, IDLE, ONE = "GPU ▄▄▅▅▆▇▇█ 66%", "GPU ▁▁▁▁▁▁▁▁ 0%", "GPU ░░░░░░░░ 0%"
"""What is shown of the two nodes of eight cards, and of the node with one card."""

HEAD = """\
# Screens

Two pools run here. `train` has two nodes with eight GPUs each, and no call runs on the second node. `embed` has one
GPU, and its 40 calls have ended. [Watch a pool](guides/watching.md) explains the screens, and when to use which.

`make screens` writes this page. It runs the programs in real terminals (tmux) on `fake`, the cloud for rehearsals. A
script sets the values of its GPUs. Blank lines are left out. All times of day are replaced by 14:07:52, and durations
and amounts by fixed values, so that the page changes only if skypool does.
"""
PARTS = {
    "live-80": (
        "The live view",
        "The terminal of the program, with the output of calls above the view, 80 columns wide:",
    ),
    "live-200": ("The live view, wide", "The same in 200 columns:"),
    "top-80": ("skypool top", "All pools of this user, with the nodes and the calls of the chosen one:"),
    "top-200": ("skypool top, wide", "In 200 columns, there is room for more facts about pools and machines:"),
    "one-80": ("skypool top, one pool", "The chosen pool alone, after Enter:"),
    "logs-80": ("skypool logs", "`skypool logs train --follow`, at the end of the pool:"),
    "logs-200": ("skypool logs, wide", "The same in 200 columns:"),
}
"""The screens of the page, each with its title and a sentence."""
USE = r"\d+ s +\d+ MiB"
"""What a call has used, as a pattern. It is known after two samples."""
SPENT = {"47.84": "0.8211", "2.99": "0.0507", "50.83": "0.8718"}
"""What stands on the page as cost, by the rate beside it: those of the pools, and their sum."""
SAVED = {"47.84": "0.4223", "2.99": "0.0507"}
"""The same for idle cost."""


# --- terminals -----------------------------------------------------------------------------------------------


class Terminals:
    """Terminals of a tmux server of our own. The programs in them have a state folder of their own, too.

    Args:
        folder: a folder for sockets and state. Its path must be short.
    """

    def __init__(self, folder: str) -> None:
        own = {"TMUX_TMPDIR": folder, "XDG_RUNTIME_DIR": folder, "XDG_STATE_HOME": f"{folder}/state"}
        self._env = {**os.environ, **own, "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)}
        for name in ("TMUX", "CI", "COLUMNS", "LINES"):  # in CI there would be no live view
            self._env.pop(name, None)

    def tmux(self, *args: str) -> str:
        argv = ["tmux", "-L", "screens", "-f", "/dev/null", "-u", *args]
        return subprocess.run(argv, env=self._env, capture_output=True, text=True, timeout=60, check=True).stdout

    def open(self, name: str, size: tuple[int, int], *argv: str) -> None:
        """Run a Python module in a new terminal. The terminal stays when the program has ended."""
        command = f"{shlex.join([sys.executable, '-m', *argv])}; echo exit status $?; exec sleep 600"
        self.tmux("new-session", "-d", "-s", name, "-x", str(size[0]), "-y", str(size[1]), "-c", str(ROOT), command)

    def screen(self, name: str) -> str:
        return self.tmux("capture-pane", "-p", "-t", name).rstrip()

    def until(self, name: str, *parts: str, pattern: str = "") -> str:
        """Return the screen of a terminal as soon as it shows all of these texts, and what the pattern matches."""
        seen = ""

        def shows() -> bool:
            nonlocal seen
            seen = self.screen(name)
            return all(part in seen for part in parts) and re.search(pattern, seen) is not None

        try:
            eventually(shows, 60, f"{parts} in terminal {name!r}")
        except AssertionError as e:
            raise AssertionError(f"{e}:\n{seen}") from e
        return seen


@contextmanager
def terminals() -> Iterator[tuple[Terminals, Path]]:
    """Make terminals, and a folder for the program. Both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="sp-") as folder:
        made = Terminals(folder)
        work = Path(folder) / "work"
        work.mkdir()
        try:
            yield made, work
        finally:
            subprocess.run(["tmux", "-L", "screens", "kill-server"], env=made._env, capture_output=True, check=False)


def captured() -> dict[str, str]:
    """Run the program, and return the screens of `PARTS` as they are, and that of its terminal after its end."""
    found = {}
    with terminals() as (made, folder):
        prepare(folder)
        try:
            made.open("live", SMALL, "tests.screen_work", str(folder))
            eventually((folder / "ready").exists, 120, "the pools")
            measured = BUSY, IDLE, ONE, "1/1  0 done  train  step 1200", "40 done"
            found["live-80"] = made.until("live", *measured)
            made.tmux("resize-window", "-t", "live", "-x", str(LARGE[0]), "-y", str(LARGE[1]))
            for name, size in (("80", SMALL), ("200", LARGE)):
                made.open(f"top-{name}", size, "skypool", "top")
                made.open(f"logs-{name}", size, "skypool", "logs", "train", "--follow")
            for name in ("top-80", "top-200"):
                found[name] = made.until(name, BUSY, IDLE, "480.0 GiB", "40   2.99", "Only this pool", pattern=USE)
            made.tmux("send-keys", "-t", "top-80", "Enter")
            found["one-80"] = made.until("top-80", BUSY, IDLE, "480.0 GiB", "All pools", pattern=USE)
            for name in ("logs-80", "logs-200"):
                made.until(name, "[0] step 1200 loss 2.30")
            found["live-200"] = made.until("live", *measured)
        finally:
            (folder / "end").touch()
        for name in ("logs-80", "logs-200", "live"):
            found[name] = made.until(name, "ended after", "exit status 0")
        made.tmux("send-keys", "-t", "top-80", "q")
        made.until("top-80", "exit status 0")
    return found


# --- what is the same in each run ----------------------------------------------------------------------------


def repeatable(screen: str) -> str:
    """Return a screen without blank lines, and with the same values in place of those that differ from run to run."""
    said = "\n".join(line for line in screen.splitlines() if line.strip() and not line.startswith("exit status"))
    said = re.sub(r"\b\d\d:\d\d:\d\d\b", "14:07:52", said)
    said = re.sub(r"(?<![\d:])\d+:\d\d(?![\d:])", "1:02", said)
    said = re.sub(
        r"(ready|ended) after .*?(s|min)\b",
        lambda m: f"{m[1]} after {'4.2 s' if m[1] == 'ready' else '1:02 min'}",
        said,
    )
    for pool, rate in ("train", "47.84"), ("embed", "2.99"):
        costs = rf"\g<1>; spent {SPENT[rate]} USD, idle {SAVED[rate]} USD"
        said = re.sub(rf"({pool}  ended after \S+ \S+); spent [\d.]+ USD, idle [\d.]+ USD", costs, said)
    said = re.sub(r"\d+ CPU slots?\)", "8 CPU slots)", said)
    said = re.sub(r"\d+ CPU slots?$", "16 CPU slots", said, flags=re.MULTILINE)
    said = re.sub(r"spent [\d.]+ USD  rate (\S+) USD/h", lambda m: f"spent {SPENT[m[1]]} USD  rate {m[1]} USD/h", said)
    said = re.sub(r"rate (\S+) USD/h  spent [\d.]+ USD", lambda m: f"rate {m[1]} USD/h  spent {SPENT[m[1]]} USD", said)
    said = re.sub(r"rate (\S+) USD/h  idle [\d.]+ USD", lambda m: f"rate {m[1]} USD/h  idle {SAVED[m[1]]} USD", said)
    said = re.sub(r"^(. \S+ +ready .* (\S+))  [\d.]+  [\d.]+ ( *\d+)  ", _row, said, flags=re.MULTILINE)
    said = re.sub(r"(\S+ +)fake$", lambda m: f"{'desk':<{len(m[1])}}fake", said, flags=re.MULTILINE)
    said = re.sub(r"\d+ s( +)\d+ MiB( +480)", r"0 s\g<1>20 MiB\2", said)
    return re.sub(
        r"(?:^.*train  node \d ready.*\n)+", lambda m: "".join(sorted(m[0].splitlines(True))), said, flags=re.MULTILINE
    )


def _row(found: re.Match[str]) -> str:
    """Return the beginning of a row of the table of pools with other amounts, and with another process id."""
    return f"{found[1]}  {SPENT[found[2]]}  {SAVED[found[2]]} {'4711':>{len(found[3])}}  "


def page(screens: dict[str, str]) -> str:
    """Return the text of docs/screens.md."""
    parts = [
        f"## {title}\n\n{sentence}\n\n```text\n{repeatable(screens[name])}\n```\n"
        for name, (title, sentence) in PARTS.items()
    ]
    return "\n".join([HEAD, *parts])


def words(text: str) -> list[list[str]]:
    """Return the words of each line. The number of blanks between columns depends on the length of process ids."""
    return [line.split() for line in text.splitlines()]


# --- tests ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def screens() -> dict[str, str]:
    pytest.importorskip("textual", reason="textual is not installed")
    if reason := lacking("tmux"):
        skip_or_fail(reason)
    return captured()


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_a_screen_fits_its_terminal_and_nothing_is_cut(screens: dict[str, str], name: str) -> None:
    width, height = SMALL if name.endswith("-80") else LARGE
    lines = screens[name].splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "…" not in screens[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["live-80", "live-200", "top-80", "top-200", "one-80"])
def test_bars_rate_and_idle_cost_are_on_the_screen(screens: dict[str, str], name: str) -> None:
    for part in (BUSY, IDLE, "mem ▇▇▇▇▇███ 539/637 GiB", "power ▅▆▆▆▇▇▇█ 4.1 kW", "rate 47.84 USD/h"):
        assert part in screens[name]
    [(spent, idle)] = re.findall(r"spent ([\d.]+) USD  rate 47.84 USD/h  idle ([\d.]+) USD", screens[name])
    assert 0 < float(idle) <= float(spent)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["top-80", "top-200"])
def test_the_columns_of_the_table_of_pools_stand_below_each_other(screens: dict[str, str], name: str) -> None:
    headings, *rows = screens[name].splitlines()[1:4]
    for heading in ("nodes", "busy", "wait", "done", "USD/h", "spent", "idle", "pid", "age"):
        end = headings.index(f" {heading}") + len(heading) + 1
        for row in rows:
            assert row[end - 1] != " "
            assert row[end : end + 1] in ("", " ")
    assert ("providers" in headings) == ("8 NVIDIA H100 80GB HBM3" in screens[name]) == (name == "top-200")


@pytest.mark.slow
def test_the_terminal_has_only_the_output_after_the_end_of_the_pools(screens: dict[str, str]) -> None:
    shown = repeatable(screens["live"])
    assert "[train 0] step 1200 loss 2.30" in shown
    assert sorted(shown.splitlines()[-2:]) == [
        "14:07:52 embed  ended after 1:02 min; spent 0.0507 USD, idle 0.0507 USD",
        "14:07:52 train  ended after 1:02 min; spent 0.8211 USD, idle 0.4223 USD",
    ]
    assert "GPU" not in shown


@pytest.mark.slow
def test_the_page_has_these_screens(screens: dict[str, str]) -> None:
    assert words(page(screens)) == words(PAGE.read_text()), "run: make screens"


if __name__ == "__main__":
    PAGE.write_text(page(captured()))
    print(f"{PAGE.relative_to(ROOT)}: {len(PARTS)} screens")
