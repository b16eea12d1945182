"""Notebooks: a real Jupyter kernel, driven as JupyterLab drives it."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel")
from jupyter_client.manager import KernelManager

from tests.conftest import eventually, nodes

ROOT = Path(__file__).parent.parent
BOUND = 60.0


class Cell:
    """A cell that has run: its text on stdout, on stderr, its traceback, and the last HTML that it shows."""

    def __init__(self) -> None:
        self.out = self.err = self.trace = self.html = ""


class Notebook:
    """A kernel and the cells that it ran."""

    def __init__(self, kernel: Any, manager: KernelManager) -> None:
        self._kernel = kernel
        self._manager = manager
        self._cells: dict[str, Cell] = {}
        self._displays: dict[str, Cell] = {}

    def kill(self) -> None:
        """End the kernel by SIGKILL."""
        self._manager.signal_kernel(signal.SIGKILL)
        eventually(lambda: not self._manager.is_alive(), BOUND, "the end of the kernel")

    def run(self, code: str) -> Cell:
        """Run a cell until the kernel is idle again."""
        asked = self._kernel.execute(textwrap.dedent(code))
        cell = self._cells[asked] = Cell()
        while not self._hear(asked):
            pass
        return cell

    def wait(self, cell: Cell, text: str) -> None:
        """Wait until a cell that has run has got a text on stdout."""
        while text not in cell.out:
            self._hear("")

    def wait_shown(self, cell: Cell, text: str) -> None:
        """Wait until the HTML that a cell shows has a text."""
        until = time.monotonic() + BOUND
        while text not in cell.html:
            assert time.monotonic() < until, cell.html
            self._hear("")

    def _hear(self, asked: str) -> bool:
        """Take in one message; True when it says that this cell is over."""
        said = self._kernel.get_iopub_msg(timeout=BOUND)
        about, content = said["parent_header"].get("msg_id", ""), said["content"]
        cell = self._cells.setdefault(about, Cell())
        match said["msg_type"]:
            case "stream" if content["name"] == "stdout":
                cell.out += content["text"]
            case "stream":
                cell.err += content["text"]
            case "error":
                cell.trace += "\n".join(content["traceback"])
            case "display_data" | "execute_result":
                cell.html = content["data"].get("text/html", "")
                self._displays[content.get("transient", {}).get("display_id", "")] = cell
            case "update_display_data":
                self._displays[content["transient"]["display_id"]].html = content["data"]["text/html"]
            case "status":
                return bool(about == asked and content["execution_state"] == "idle")
            case _:
                pass
        return False


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    manager = KernelManager(kernel_name="python3")
    path = os.pathsep.join(map(str, (ROOT, ROOT / "providers", ROOT / "images")))
    manager.start_kernel(cwd=str(tmp_path), env={**os.environ, "PYTHONPATH": path, "IPYTHONDIR": str(tmp_path)})
    kernel = manager.client()
    try:
        kernel.start_channels()
        kernel.wait_for_ready(timeout=BOUND)
        yield Notebook(kernel, manager)
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel()


START = """
import skypool as sky

@sky.compute
def talk(word):
    print(word)

@sky.compute
def count(words):
    for word in words.split():
        print(word)
        yield word

pool = sky.ComputePool(name="notebook", slots=1).start()
"""


def test_what_functions_print_is_shown_in_the_cell_that_waits_for_them(notebook: Notebook) -> None:
    start = notebook.run(START)
    assert "ready" in start.err, start.trace
    ways = {
        "here": "talk('here') >> pool",
        "result": "(talk('result') > pool).result()",
        "awaited": "await (talk('awaited') > pool)",
        "everywhere": "talk('everywhere') @ pool",
        "yielded": "list(count('yielded') >> pool)",
        "mapped": "list(pool.map(talk, ['mapped']))",
        "gathered": "sky.gather(talk('gathered'), talk('gathered')) >> pool",
    }
    cells = {word: notebook.run(f"{code}\nprint('over')") for word, code in ways.items()}
    for word, cell in cells.items():
        assert not cell.trace, cell.trace
        notebook.wait(cell, f"[0] {word}\n")
    assert start.out == ""
    end = notebook.run("pool.stop()")
    assert "ended after" in end.err
    assert [cell.out.count("[0] ") for cell in cells.values()] == [1, 1, 1, 1, 1, 1, 2]


def test_a_call_of_an_earlier_cell_prints_in_the_one_that_waits(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(START)
    sent = notebook.run(
        f"""
        @sky.compute
        def later():
            import os, time
            while not os.path.exists({str(tmp_path / "go")!r}):
                time.sleep(0.01)
            print("later")
        future = later() > pool
        """
    )
    assert not sent.trace, sent.trace
    waits = notebook.run(f"open({str(tmp_path / 'go')!r}, 'w').close(); future.result()")
    notebook.wait(waits, "[0] later\n")
    assert sent.out == ""
    notebook.run("pool.stop()")


@pytest.mark.parametrize(
    "code", ["2 >> sky.ComputePool()", "import asyncio\nawait asyncio.sleep(0)\n2 >> sky.ComputePool()"]
)
def test_an_error_of_skypool_shows_the_lines_of_the_cell_alone(notebook: Notebook, code: str) -> None:
    cell = notebook.run(f"import skypool as sky\ndef mine():\n    sky.ComputePool(acelerator='H100')\n\n{code}")
    frames = [line for line in cell.trace.splitlines() if line.startswith("  File ")]
    assert len(frames) == 1, cell.trace
    assert "2 >> sky.ComputePool()" in cell.trace
    assert "skypool.errors." in cell.trace
    assert "SKYPOOL_DEBUG=1" in cell.trace
    deeper = notebook.run("mine()").trace
    named = [line.rpartition(" in ")[2] for line in deeper.splitlines() if line.startswith("  File ")]
    assert named == ["<module>", "mine"]


@pytest.mark.timeout(120)
def test_an_error_of_a_function_on_a_node_is_what_a_notebook_shows(notebook: Notebook) -> None:
    notebook.run(
        """
        import skypool as sky
        pool = sky.ComputePool(console="off").start()
        @sky.compute
        def fails(_=None):
            raise ValueError("here it is")
        @sky.compute
        def hangs():
            import time
            time.sleep(600)
        """
    )
    ways = ["fails() >> pool", "fails() @ pool", "list(pool.map(fails, [1]))", "(fails() > pool).result()"]
    for code in [*ways, "await (fails() > pool)"]:
        trace = plain(notebook.run(code).trace)
        assert 'raise ValueError("here it is")' in trace, (code, trace)
        assert f"----> 1 {code}" in trace
        assert trace.rstrip().endswith("ValueError: here it is")
        assert len(trace.splitlines()) <= 16, trace
    shown = notebook.run("try:\n    fails() >> pool\nexcept ValueError as e:\n    raise KeyError('mine') from e").trace
    assert "/skypool/" not in shown, shown
    cell = "import _thread, threading\nthreading.Timer(1, _thread.interrupt_main).start()\nhangs() >> pool"
    interrupted = plain(notebook.run(cell).trace)
    assert "----> 3 hangs() >> pool" in interrupted
    assert "/skypool/" not in interrupted, interrupted
    both = notebook.run("sky.gather(fails(), fails()) >> pool").err  # as Python shows groups
    assert both.count('raise ValueError("here it is")') == 2
    assert "/skypool/" not in both, both
    everything = notebook.run("import os\nos.environ['SKYPOOL_DEBUG'] = '1'\nfails() >> pool")
    assert "/skypool/" in everything.trace
    notebook.run("pool.stop()")


def plain(text: str) -> str:
    """Return a text without the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_other_errors_look_as_ever_in_a_notebook(notebook: Notebook) -> None:
    notebook.run(START)
    cell = notebook.run("1 / 0")
    assert "ZeroDivisionError" in cell.trace
    assert "SKYPOOL_DEBUG" not in cell.trace
    more = notebook.run("import os; os.environ['SKYPOOL_DEBUG'] = '1'\n2 >> pool")
    assert "UsageError" in more.trace
    assert "SKYPOOL_DEBUG=1" not in more.trace
    notebook.run("pool.stop()")


@pytest.mark.slow
def test_a_pool_that_a_cell_shows_changes_there_until_it_has_ended(notebook: Notebook) -> None:
    notebook.run("import skypool as sky\npool = sky.ComputePool(name='shown', slots=1)")
    shown = notebook.run("pool")
    assert "not started" in shown.html, shown.trace
    started = notebook.run("pool.start()")
    assert "0 calls done" in started.html, started.trace
    again = notebook.run("pool")
    notebook.run("assert list(pool.map(abs, range(7))) == list(range(7))")
    notebook.wait_shown(again, "7 calls done, 0 failed, 0 waiting")
    assert "7 calls done" not in started.html, "only the last one goes on"
    report = notebook.run("pool.report()")
    assert report.html.startswith("<iframe "), report.trace
    assert "7 calls ended: 7 well" in report.html
    notebook.run("pool.stop()")
    notebook.wait_shown(again, "ended ·")
    left = notebook.run("import threading; print([each.name for each in threading.enumerate()])")
    assert "widget" not in left.out


LINGERS = START.replace('name="notebook"', 'name="{name}", linger=3')


@pytest.mark.slow
def test_a_notebook_left_alone_ends_its_pool_in_time(notebook: Notebook) -> None:
    notebook.run(LINGERS.format(name="left-alone"))
    cell = notebook.run("talk('here') >> pool")
    assert not cell.trace, cell.trace
    took = eventually(lambda: not nodes("left-alone"), BOUND, "the end of the node")
    assert took > 1.0
    later = notebook.run("talk('there') >> pool")
    assert "PoolClosed" in later.trace
    assert "as it has had no work for 3" in later.trace


@pytest.mark.slow
def test_the_node_of_a_notebook_whose_kernel_was_killed_ends_itself_in_time(notebook: Notebook) -> None:
    """The lease is ten minutes."""
    start = notebook.run(LINGERS.format(name="left-dead"))
    assert "an hour without a call" not in start.err
    assert not notebook.run("talk('here') >> pool").trace
    notebook.kill()
    assert len(nodes("left-dead")) == 1
    eventually(lambda: not nodes("left-dead"), BOUND, "the end of the node")


def test_the_pool_of_a_notebook_has_an_hour_without_work_and_says_so(notebook: Notebook) -> None:
    start = notebook.run(START)
    assert "this is a notebook, so the pool ends itself after an hour without a call" in start.err
    assert notebook.run("print(pool._terms.linger)").out == "3600.0\n"
    assert "an hour" not in notebook.run("pool.stop(); sky.ComputePool(name='other', linger='2h').start().stop()").err
