"""`skypool top`: all pools of a user, those that run, those that do not answer and those left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.cli import top
from skypool.cli.top_lines import ORDERS, details, ordered, pool_lines, summary
from skypool.cli.top_survey import Answer, PoolView, Survey, view_of
from skypool.devices.health import DeviceHealth, NodeHealth
from skypool.devices.sample import CallSample, DeviceSample, NodeSample, to_json
from skypool.observers import pool_sockets
from skypool.observers.observed import _health as health_told
from skypool.processes import Process
from skypool.rental.budget import Budget
from skypool.rental.receipt import Line
from skypool.rental.records import Record
from tests.conftest import eventually

PROGRAM = [sys.executable, "-c", "import sys; from skypool.cli import main; sys.exit(main())"]
NOW = 10_000.0


@pytest.fixture(scope="module", autouse=True)
def _own_state() -> Iterator[None]:
    """The pools of other tests are not seen here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", f"{os.environ['XDG_RUNTIME_DIR']}/top")
        yield


# --- what is shown of a pool ---------------------------------------------------------------------------------


def line(node: int, **values: Any) -> Line:
    made = Line(
        provider="aws", id=f"i-{node}", type="p5.48xlarge", place="us-east-1a", market="spot", node=node,
        usd_per_hour=23.92, least_billed=60.0, launched=NOW - 3600, until=NOW, billed_from=NOW - 3600,
    )  # fmt: skip
    return replace(made, **values)


def record(name: str = "train", client: Process | None = None, nodes: int = 2, **values: Any) -> Record:
    made = Record(
        pool=name, session=f"{name}-1", client=client or Process.this(), started=NOW - 3725, beat=NOW - 25,
        lease=600.0, budget=Budget(500), ending=None, ended=None, error="", lines=tuple(map(line, range(nodes))),
        intents=(), notes=(),
    )  # fmt: skip
    return replace(made, **values)


GONE = replace(Process.this(), birth="another")
CALL = CallSample(7, "job.train", 3, 312.0, 1250.0, 8192.0, 8192.0, 512.0)
SAMPLE = NodeSample(
    devices=tuple(
        DeviceSample(
            "cuda", n, utilization_percent=12.5 * (n + 1), memory_used_mib=40960.0, memory_total_mib=81920.0,
            power_watts=350.0, power_limit_watts=700.0,
        )
        for n in range(8)
    ),
    calls=(CALL,),
)  # fmt: skip


def node(number: int, **values: object) -> dict[str, object]:
    made: dict[str, object] = {
        "node": number, "state": "ready", "provider": "aws", "type": "p5.48xlarge", "place": "us-east-1a",
        "hardware": "8 NVIDIA H100 80GB HBM3", "address": "10.0.0.1", "slots": 8, "cpu_slots": 0, "busy": 6,
        "cpu_busy": 0, "waiting": 1, "done": 600, "running": ["train"] * 6, "health": None,
        "sample": to_json(replace(SAMPLE, node=number)), "usd_per_hour": 23.92, "idle_usd": 0.25,
    }  # fmt: skip
    return made | values


def answer(*nodes: dict[str, object], **values: object) -> Answer:
    said: dict[str, object] = {
        "phase": "ready", "usd": 47.84, "usd_per_hour": 47.84, "idle_usd": 0.5, "waiting": 42, "done": 1800,
        "failed": 0, "running": 6 * sum(each["state"] != "ended" for each in nodes), "nodes": list(nodes),
    }  # fmt: skip
    return Answer(said | values, NOW - 0.5)


def shown(view: PoolView, width: int = 80) -> list[str]:
    headings, lines = pool_lines([view], NOW, width)
    return [each.plain for each in (headings, *lines, *details(view, NOW, width))]


def test_a_running_pool_is_shown_as_its_owner_says() -> None:
    view = view_of(record(), answer(node(0), node(1), node(2, state="ended", sample=None)), NOW)
    headings, row, *rest = shown(view)
    assert headings.split() == [
        "pool",
        "state",
        "nodes",
        "busy",
        "wait",
        "done",
        "USD/h",
        "spent",
        "idle",
        "pid",
        "age",
    ]
    assert row.split() == [
        "train",
        "ready",
        "2",
        "12",
        "42",
        "1,800",
        "47.84",
        "47.84",
        "0.5000",
        str(os.getpid()),
        "1:02:05",
    ]
    assert rest == [
        "train  ready  2 nodes  12/16 busy  1,800 done  1:02:05",
        "  spent 47.84 USD  rate 47.84 USD/h  idle 0.5000 USD",
        "  node 0  ready  ██████░░ 6/8  600 done  train ×6  23.92 USD/h  p5.48xlarge",
        "          GPU ▂▃▄▅▆▇██ 56%  mem ▅▅▅▅▅▅▅▅ 320/640 GiB  power ▅▅▅▅▅▅▅▅ 2.8 kW",
        "  node 1  ready  ██████░░ 6/8  600 done  train ×6  23.92 USD/h  p5.48xlarge",
        "          GPU ▂▃▄▅▆▇██ 56%  mem ▅▅▅▅▅▅▅▅ 320/640 GiB  power ▅▅▅▅▅▅▅▅ 2.8 kW",
        "  call   node  slot  time     CPU   memory  GPU memory",
        "  train     0     3  5:12  1250 s  8.0 GiB     512 MiB",
        "  train     1     3  5:12  1250 s  8.0 GiB     512 MiB",
    ]


def test_folders_that_are_kept_in_buckets_are_shown_with_what_waits_and_the_trouble() -> None:
    told = {
        "id": "out", "url": "s3://models/x", "phase": "saving", "whole": False, "files": 12, "bytes": 4_100_000_000,
        "unsaved": 0, "unsaved_bytes": 0, "oldest": 0, "rate": 35_000_000, "trouble": "",
    }  # fmt: skip
    late = {**told, "files": 3, "unsaved": 2, "unsaved_bytes": 2_500_000, "oldest": 75, "rate": 0}
    late["trouble"] = "the store cannot be reached\x1b[2J"
    view = view_of(record(), answer(node(0, folders=[told]), node(1, folders=[late])), NOW)
    lines = shown(view)
    at = next(n for n, each in enumerate(lines) if each.startswith("  folder"))
    assert [each.split() for each in lines[at : at + 3]] == [
        ["folder", "node", "state", "saved", "bytes", "rate", "unsaved", "bytes", "waits"],
        ["out", "0", "saving", "12", "4.1", "GB", "35.0", "MB/s", "0", "0", "bytes"],
        ["out", "1", "saving", "3", "4.1", "GB", "2", "2.5", "MB", "1:15"],
    ]
    assert lines[at + 3] == "  ! out on node 1: the store cannot be reached"
    assert all(len(each) <= 80 for each in lines[at : at + 4])


def test_a_pool_left_behind_is_shown_from_the_ledger_with_the_command_that_ends_it() -> None:
    view = view_of(record(client=GONE), Answer(), NOW)
    headings, row, *rest = shown(view)
    assert row.split()[:10] == ["train", "left", "9:35", "2", "?", "?", "?", "47.84", "47.84", "?"]
    text = " ".join(" ".join(rest).split())
    assert "ComputePool.attach('train') takes the machines over; `skypool down train` ends them" in text
    assert "idle unknown" in text
    assert rest[-2:] == [
        "  node 0  23.92 USD/h  p5.48xlarge us-east-1a aws i-0",
        "  node 1  23.92 USD/h  p5.48xlarge us-east-1a aws i-1",
    ]
    assert max(map(len, [headings, row, *rest])) <= 80


def test_a_pool_whose_owner_does_not_answer_is_not_shown_as_idle() -> None:
    never = view_of(record(), Answer(trouble="the owner did not answer within 5 s"), NOW)
    assert shown(never)[1].split()[:7] == ["train", "no", "answer", "2", "?", "?", "?"]
    old = view_of(record(), replace(answer(node(0)), at=NOW - 42, trouble="it is stopped"), NOW)
    assert (old.state, old.busy) == ("no answer", 6)
    assert "are 42 s old: it is stopped" in "\n".join(shown(old))
    assert old.usd == record().receipt(NOW).usd


def test_a_sick_node_says_why_and_an_older_owner_is_understood() -> None:
    sick = {"state": "unhealthy", "reasons": ["cuda 3: XID 79: GPU has fallen off the bus"], "claimed": False}
    older = node(0, health=sick)
    del older["cpu_busy"], older["usd_per_hour"], older["idle_usd"]
    said = answer(older, node(1, state="unreachable since 12:30:01"))
    assert isinstance(said.said, dict)
    for each in ("running", "waiting", "done", "failed", "idle_usd"):
        del said.said[each]
    text = "\n".join(shown(view_of(record(), said, NOW), 200))
    assert "unhealthy" in text
    assert "XID 79" in text
    assert "unreachable since 12:30:01" in text
    assert "idle unknown" in text


def test_a_degraded_node_is_shown_with_its_device_and_the_reason_as_its_owner_tells_it() -> None:
    devices = (DeviceHealth("cuda", 2, "ok"), DeviceHealth("cuda", 3, "degraded", ("PCIe has 8 lanes of 16",)))
    told = json.loads(json.dumps(health_told(NodeHealth(0, "degraded", devices))))
    text = "\n".join(shown(view_of(record(), answer(node(0, health=told), node(1)), NOW), 120))
    assert "degraded" in text
    assert "cuda 3: PCIe has 8 lanes of 16" in text


def test_a_sample_that_cannot_be_read_is_unknown() -> None:
    text = "\n".join(shown(view_of(record(), answer(node(0, sample={"devices": 7})), NOW)))
    assert "mem unknown  power unknown" in text


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_table_fits_and_leaves_out_what_matters_least(width: int) -> None:
    long = replace(
        record("a-very-long-name-of-a-pool-that-somebody-chose"), client=Process("desk.example.com", 4194303, "x")
    )
    views = [view_of(record(), answer(node(0)), NOW), view_of(long, Answer(), NOW)]
    headings, lines = pool_lines(views, NOW, width)
    assert max(len(each.plain) for each in (headings, *lines)) <= max(width, 63)
    assert ("providers" in headings.plain) == (width == 200)
    assert "idle" in headings.plain


def test_pools_are_ordered_in_each_way_and_summed_up() -> None:
    cheap = view_of(record("a", started=NOW - 10), answer(node(0), usd=1.0, usd_per_hour=1.0, idle_usd=None), NOW)
    dear = view_of(record("b", started=NOW - 20), answer(node(0), usd=5.0, usd_per_hour=9.0), NOW)
    firsts = {order: ordered([cheap, dear], order)[0].name for order in ORDERS}
    assert firsts == {"start": "b", "name": "a", "rate": "b", "spent": "b", "idle": "b"}
    assert summary([cheap, dear]).plain == "skypool top  2 pools  2 nodes  rate 10.00 USD/h  spent 6.00 USD"
    assert "spent at least 5.00 USD" in summary([replace(cheap, usd=None), dear]).plain
    assert "the ledger is locked" in summary([], "the ledger is locked").plain


# --- running pools -------------------------------------------------------------------------------------------


def cli(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *args], capture_output=True, text=True, timeout=60, **more)


@pytest.fixture(scope="module")
def pools() -> Iterator[list[sky.ComputePool]]:
    """Two pools of this process."""
    with sky.ComputePool(name="first", nodes=2, slots=2, console="off") as first:
        with sky.ComputePool(name="second", slots=1, console="off") as second:
            eventually(lambda: {"first", "second"} <= set(pool_sockets.pools()), 30, "the sockets")
            yield [first, second]


@pytest.mark.slow
def test_without_a_terminal_the_pools_are_printed_once(pools: list[sky.ComputePool]) -> None:
    done = cli("top")
    assert done.returncode == 0, done.stderr
    headings, first, second, *rest = done.stdout.splitlines()
    assert headings.split()[:5] == ["pool", "state", "nodes", "busy", "wait"]
    assert first.split()[:5] == ["first", "ready", "2", "0", "0"]
    assert second.split()[:3] == ["second", "ready", "1"]
    assert sum("  mem " in each and "  power unknown" in each for each in rest) == 3
    only = cli("top", "second", "--once").stdout
    assert "first" not in only
    assert "second  ready  1 node" in only


def test_a_pool_that_does_not_exist_is_an_error(pools: list[sky.ComputePool]) -> None:
    done = cli("top", "frist")
    assert done.returncode == 2
    assert "pool 'frist' does not exist; `skypool ps` lists the running pools; did you mean first?" in done.stderr


def test_without_textual_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "skypool.cli.top_app", raising=False)
    for name in [each for each in sys.modules if each.partition(".")[0] == "textual"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual", None)
    with pytest.raises(sky.UsageError, match=r"pip install 'skypool\[top\]'"):
        top._watch(Survey(), False)


def test_the_program_does_not_load_textual() -> None:
    program = "import sys; from skypool.cli import build; build(); print('textual' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


# --- the full-screen view ------------------------------------------------------------------------------------

Step = Callable[[Any, Any], Awaitable[None]]


def driven(step: Step, survey: Survey, alone: bool = False, size: tuple[int, int] = (80, 24)) -> None:
    """Run the view without a terminal, and the step with it."""
    pytest.importorskip("textual", reason="textual is not installed")
    from skypool.cli.top_app import Top

    async def run() -> None:
        app = Top(survey, alone)
        async with app.run_test(size=size) as pilot:
            await step(app, pilot)

    asyncio.run(run())


def text_of(app: Any, name: str) -> str:
    return str(app.query_one(name).content)


async def until(pilot: Any, true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, f"not in 60 s: {what}"
        await pilot.pause(0.05)


def rows(app: Any) -> list[str]:
    return [str(each.prompt) for each in app.query_one("#pools").options]


def keys(app: Any) -> set[str]:
    """What the last line of the view says that the keys for one pool and all pools do."""
    shown = {each.binding.description for each in app.screen.active_bindings.values()}
    return shown & {"Only this pool", "All pools"}


def test_keys_choose_open_close_and_sort_pools_and_show_the_help(pools: list[sky.ComputePool]) -> None:
    async def step(app: Any, pilot: Any) -> None:
        await until(pilot, lambda: len(rows(app)) == 2 and " ready " in rows(app)[1], "both pools")
        assert rows(app)[0].startswith("> first ")
        assert rows(app)[1].startswith("  second")
        assert "2 pools  3 nodes" in text_of(app, "#summary")
        assert "first  ready  2 nodes" in text_of(app, "#nodes")
        await pilot.press("down")
        await until(pilot, lambda: "second  ready  1 node" in text_of(app, "#nodes"), "the nodes of the second pool")
        assert [each[0] for each in rows(app)] == [" ", ">"]
        assert keys(app) == {"Only this pool"}
        await pilot.press("enter")
        await until(pilot, lambda: not app.query_one("#pools").display, "only the second pool")
        assert "second  ready" in text_of(app, "#nodes")
        await until(pilot, lambda: keys(app) == {"All pools"}, "other keys")
        await pilot.press("escape")
        await until(pilot, lambda: app.query_one("#pools").display, "all pools")
        await pilot.press("s")
        await until(pilot, lambda: "by name" in text_of(app, "#summary"), "another order")
        assert rows(app)[1].startswith("> second"), "the chosen pool stays chosen"
        await pilot.press("question_mark")
        await until(pilot, lambda: len(app.screen_stack) == 2, "the help")
        await pilot.press("escape")
        await until(pilot, lambda: len(app.screen_stack) == 1, "no help")
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running, "the end")

    driven(step, Survey())


def test_the_view_of_one_pool_begins_with_its_nodes(pools: list[sky.ComputePool]) -> None:
    async def step(app: Any, pilot: Any) -> None:
        await until(pilot, lambda: "second  ready  1 node" in text_of(app, "#nodes"), "the nodes")
        assert not app.query_one("#pools").display

    driven(step, Survey("second"), alone=True, size=(200, 50))


@pytest.mark.slow
def test_a_stopped_owner_delays_nobody_and_a_killed_one_has_left_its_pool(
    pools: list[sky.ComputePool], tmp_path: Path
) -> None:
    program = (
        "import sys, time, skypool as sky\n"
        "with sky.ComputePool(name='third', slots=1, console='off'):\n"
        "    print('ready', flush=True); time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=tmp_path)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        eventually(lambda: "third  ready  1 node" in cli("top").stdout, 30, "the third pool")
        owner.send_signal(signal.SIGSTOP)

        async def while_it_is_stopped(app: Any, pilot: Any) -> None:
            await until(pilot, lambda: len(rows(app)) == 3 and " no answer " in rows(app)[2], "no answer")
            assert " ready " in rows(app)[0]
            assert " ready " in rows(app)[1]

        driven(while_it_is_stopped, Survey(patience=2.0))
        once = cli("top").stdout
        assert "third" in once
        assert "did not answer within 2 s; it may be stopped (Ctrl-Z)" in once
        assert "first  ready  2 nodes" in once
        owner.send_signal(signal.SIGKILL)
        owner.wait(30)

        async def after_its_end(app: Any, pilot: Any) -> None:
            await until(pilot, lambda: len(rows(app)) == 3 and " left " in rows(app)[2], "that it is left")
            await pilot.press("end")
            await until(
                pilot, lambda: "`skypool down third`" in text_of(app, "#nodes").replace("\n    ", " "), "the command"
            )

        driven(after_its_end, Survey())
        assert "`skypool down third` ends them" in cli("top", "third").stdout
    finally:
        owner.kill()
        owner.wait(30)
        owner.stdout.close() if owner.stdout else None
        assert cli("down", "third", "--yes").returncode == 0
    eventually(lambda: "third" not in cli("top").stdout, 30, "its end")
