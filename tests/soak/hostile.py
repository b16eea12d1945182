"""Nodes that mean harm in random ways: each may cost its client little memory, disk and time, and hides no other.

    python -m tests.soak.hostile --runs 200 --seed 1

Each run is a client in a process of its own, with a pool of one node that is no more than a script (`_harm`), and a
pool of an honest one. The client has what a user may have: an observer that does not read, metrics, a live view, and a
report. The bound of its processor time is in proportion to what the node has sent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import skypool as sky
from skypool import events
from skypool.console.board import Board
from skypool.console.layout import draw
from skypool.console.plain import Plain
from skypool.console.printer import Printer
from skypool.model import Trust
from skypool.observers import client
from skypool.observers.observed import Observed
from skypool.provision.bootstrap import SetupBundle, bootstrap
from skypool.wire.transport import CommandStream
from tests.conftest import memory
from tests.facts import measured
from tests.false_node import false_node
from tests.soak import _harm

ROOT = Path(__file__).parent.parent.parent
MEMORY = 50 << 20
"""Bytes by which the memory of a client may grow."""
DISK = 64 << 20
"""Bytes that a client may write to its state."""
LOOP = 0.1
"""Seconds of processor time that `_pace` takes on the machine whose times the following are. A slower one has more."""
CPU = 1.0
"""Seconds of processor time for each 10 MB received."""
CPU_EACH = 30e-6
"""Seconds of processor time for each message, however small."""
CPU_AT_REST = 2.0
"""Seconds of processor time that a client of such a pool takes by itself, with its report."""
_MOST = 40 << 20
"""Bytes that a node sends."""
_SECONDS = 3.0
"""Seconds in which it sends them."""
_ALONE = 90.0
"""Seconds that a run may take."""
SURFACES = (
    *_harm.PLAIN,
    *_harm.PATIENT,
    *_harm.WITH_CALLS,
    "greetings",
    "reconnections",
    "stacks",
    "forwards",
    "complaints",
    "setup",
)


@sky.compute
def asks(n: int = 0) -> int:
    return n


@sky.compute
def yields() -> Iterator[int]:
    yield 1


@dataclass(frozen=True)
class Mode:
    """What a node does in one run."""

    number: int
    seed: str
    surface: str
    trust: Trust

    @property
    def dice(self) -> random.Random:
        return random.Random(self.seed)


def mode(number: int, seed: int) -> Mode:
    """The mode of a run. Surfaces take turns; all else is by chance."""
    dice = random.Random(f"{seed}-{number}")
    surface = SURFACES[number % len(SURFACES)]
    trusts: tuple[Trust, ...] = ("data", "data", "full")
    trust = dice.choice(trusts)
    if surface in ("greetings", "reconnections"):
        trust = "data"  # of trusted nodes, the first message may be long
    return Mode(number, f"{seed}-{number}", surface, trust)


# --- the node ------------------------------------------------------------------------------------------------

_BEFORE = """
sys.path.insert(0, {root!r})
"""
_ATTACK = """
from tests.soak import _harm
ids = {ids}
_harm.attack({surface!r}, {seed!r}, {most}, {seconds}, write, frame, hear, ids, {tell!r})
while True:
    hear(19)
    write(frame(20, {{"busy": 0, "cpu_busy": 0, "waiting": 0, "done": 0, "running": []}}))
"""
_IDS = """[]
while len(ids) < {calls}:
    said = hear(6, 23)
    ids += said["ids"] if "ids" in said else [said["id"]]
"""
_GREETS = """
import random
from tests.soak import _harm
_harm.greet(random.Random({seed!r} + repr(time.time() if {again} else 0)), welcome)
"""
_STACKS = """
import subprocess
evil = {folder!r} + "/evil"
child = subprocess.Popen([evil], executable="/bin/cat", stdin=subprocess.PIPE)
with open(p["config"]["folder"] + "/keeper.json", "w") as file: file.write(json.dumps({{"pid": child.pid}}))
hear(99)
"""


def node_of(mode: Mode, folder: Path, tell: Path) -> sky.Local:
    """The node that does what a mode says. It writes the number of bytes that it has sent to `tell`."""
    common = {"seed": mode.seed, "most": _MOST, "seconds": _SECONDS, "tell": str(tell)}
    before = _BEFORE.format(root=str(ROOT))
    match mode.surface:
        case "greetings":
            before += _GREETS.format(seed=mode.seed, again=False)
            after = _ATTACK.format(surface="tiny", ids="[]", **{**common, "most": 0})
        case "reconnections":
            before += _GREETS.format(seed=mode.seed, again=True)
            after = f"open({str(tell)!r}, 'a').write('100000\\n'); sys.exit()"
        case "stacks":
            after = _STACKS.format(folder=str(folder))
            (folder / "answer").write_bytes(_answer(mode.dice))
            (folder / "evil").write_text(f"#!/bin/sh\nexec cat {folder}/answer\n")
            (folder / "evil").chmod(0o755)
        case "complaints":
            after = f"open({str(tell)!r}, 'a').write('1000000\\n')\nimport threading\n"
            after += "def complain():\n    while True: os.write(2, b'x' * 4096)\n"
            after += (
                "threading.Thread(target=complain, daemon=True).start()\ntime.sleep(1)\nos.close(1); time.sleep(60)"
            )
        case "forwards":
            after = _ATTACK.format(surface="tiny", ids="[]", **{**common, "most": 0})
        case "setup":
            after = "wait()"
        case surface:
            calls = 300 if surface == "errors" else 1
            before += f"welcome['slots'] = {calls}\n"
            ids = _IDS.format(calls=calls) if surface in _harm.WITH_CALLS else "[]"
            after = _ATTACK.format(surface=surface, ids=ids, **common)
    return false_node(folder, after, before)


def _answer(dice: random.Random) -> bytes:
    """What a node says about its processes."""
    frames = [_harm.text(dice, 1000) for _ in range(dice.choice((1, 30)))]
    process = {"pid": _harm.number(dice), "name": "skypool-x", "state": _harm.text(dice, 1000), "stacks": [frames] * 3}
    many = dice.choice((1, 100, 3000))
    return dice.choice(
        (
            json.dumps([process] * many).encode(),
            b"[{}" + b",{}" * (5 << 20),
            b"[" * (4 << 20),
            b'[{"pid":1,"native":"' + b"\\ud83d\\ude00" * (300 << 10) + b'"}]',
            b'[{"pid":1,"stacks":[[' + b'"",' * (1 << 20) + b'""]]}]',
            b"\0" * (20 << 20),
        )
    )


# --- the client ----------------------------------------------------------------------------------------------


def run(mode: Mode, folder: Path) -> dict[str, Any]:
    """Be the client of one run, and return what it has cost."""
    from skypool.report.report import report_of  # noqa: F401 - so that it costs nothing later

    tell = folder / "sent"
    state = Path(os.environ["XDG_STATE_HOME"])
    said: dict[str, Any] = {"surface": mode.surface}
    with sky.ComputePool(slots=1, console="off", name="honest") as honest:
        assert asks(7) >> honest == 7
        honest.report()
        pool = sky.ComputePool(
            node_of(mode, folder, tell), slots=1, console="off", liveness=5, trust=mode.trust, name="hostile", wait=1
        )
        printer, board = Printer(), Board()
        for hear in (board.hear, Plain(printer=printer).hear):
            pool.events.listen(hear, inline=True)  # as a console does
        notices: list[str] = []
        pool.events.listen(lambda e: notices.append(e.text) if isinstance(e, events.Notice) else None)
        said["pace"] = min(_pace() for _ in range(3))
        before, disk, cpu = memory(), used(state), _cpu()
        most = disk
        try:
            if mode.surface == "setup":
                set_up(mode, folder, tell, pool.events.emit)
            pool.start()
            said["started"] = True
            engine = pool._engine
            slow = None
            with contextlib.suppress(sky.SkypoolError):
                slow = client.events("hostile")
            futures: list[Any] = [asks() > pool for _ in range(400 if mode.surface == "errors" else 1)]
            if mode.surface == "items":
                futures.append(yields() >> pool)
            if mode.surface == "forwards":
                forward(pool, tell)
            if mode.surface == "stacks":
                with contextlib.suppress(sky.PoolClosed):
                    said["stack"] = str(pool.stack())[:300]
                tell.write_text(f"{(folder / 'answer').stat().st_size}\n")
            until = time.monotonic() + _SECONDS + 20
            rested, looked = 0.0, 0.0
            while time.monotonic() < until and rested < 2.0:
                time.sleep(0.1)
                rested += 0.1 if tell.exists() and mode.surface != "reconnections" else 0.03
                if time.monotonic() - looked >= 1:  # as often as metrics are ever read
                    looked = time.monotonic()
                    most = max(most, used(state))
                    if engine is not None:
                        measured(engine)
                draw([board.picture()], time.time(), 50)
                str(pool.samples.health()) and pool.samples.latest()
            if engine is not None:
                said["info"] = len(json.dumps(Observed(engine.facts).info()))
                said["series"] = len(measured(engine))
            if slow is not None:
                slow.close()
            said["futures"] = len(futures)
        except sky.SkypoolError as e:
            said["error"] = str(e)[:300]
        at = time.monotonic()
        with contextlib.suppress(sky.SkypoolError, ExceptionGroup):
            pool.stop()
        said["stop"] = time.monotonic() - at
        most = max(most, used(state))
        flood_cpu = _cpu() - cpu
        cpu = _cpu()
        with contextlib.suppress(sky.UsageError):
            said["report"] = len(pool.report().html)
        report_cpu = _cpu() - cpu
        said["honest"] = asks(7) >> honest
        said["pace"] = max(said["pace"], min(_pace() for _ in range(3)))  # others may have begun to use the machine
        return said | {
            "memory": memory() - before,
            "disk": most - disk,
            "cpu": flood_cpu,
            "report_cpu": report_cpu,
            **_sent(tell),
            "notices": [each[:200] for each in notices[:5]],
        }


def forward(pool: sky.ComputePool, tell: Path) -> None:
    """Read 40 MB from a port of the node."""
    import socket

    got = 0
    with pool.forward(80) as made, socket.create_connection(("127.0.0.1", made.port)) as there:
        while got < _MOST and (data := there.recv(1 << 20)):
            got += len(data)
    tell.write_text(f"{got}\n")


def set_up(mode: Mode, folder: Path, tell: Path, emit: Callable[[events.Event], None]) -> None:
    """Follow the setup of a machine that prints 40 MB."""
    (folder / "lines").write_bytes(_harm.lines(mode.dice))
    program = f"import os\ndata = open({str(folder / 'lines')!r}, 'rb').read()\n"
    program += f"for _ in range({_MOST} // len(data)): os.write(1, data)"

    async def work() -> None:
        stream = CommandStream([sys.executable, "-c", program])
        stream.socket.setblocking(False)
        await bootstrap(stream, SetupBundle("true"), "hostile", 0, 30.0, emit)

    with contextlib.suppress(sky.SkypoolError):
        asyncio.run(work())
    tell.write_text(f"{_MOST}\n")


def _sent(tell: Path) -> dict[str, int]:
    """The bytes and the messages that a node has sent."""
    found = [line.split() for line in tell.read_text().splitlines()] if tell.exists() else []
    return {"sent": sum(int(each[0]) for each in found), "messages": sum(int(each[1]) for each in found if each[1:])}


def used(folder: Path) -> int:
    """Bytes of all files in a folder."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def _cpu() -> float:
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime


def _pace() -> float:
    """Seconds of processor time for a loop of 1,000,000 turns, now, in this process."""
    began, total = time.thread_time(), 0
    for i in range(1_000_000):
        total += i * i
    return time.thread_time() - began


# --- all runs ------------------------------------------------------------------------------------------------


def wrong(said: dict[str, Any]) -> list[str]:
    """What a run has cost too much of."""
    allowed = CPU_AT_REST + CPU * said["sent"] / 10e6 + CPU_EACH * said["messages"]
    allowed *= min(4.0, max(1.0, said["pace"] / LOOP))
    bounds = {
        f"{said['memory'] >> 20} MiB of memory": said["memory"] <= MEMORY,
        f"{said['disk'] >> 20} MiB of disk": said["disk"] <= DISK,
        f"{said['cpu'] + said['report_cpu']:.1f} s of CPU for {said['sent'] / 1e6:.1f} MB (limit {allowed:.1f} s)": (
            said["cpu"] + said["report_cpu"] <= allowed
        ),
        f"{said['stop']:.0f} s until the pool had ended": said["stop"] < 20,
        "the honest pool answered wrongly": said["honest"] == 7,
    }
    return [text for text, is_good in bounds.items() if not is_good]


def alone(each: Mode) -> dict[str, Any]:
    """Run a mode in a process of its own, and return what it says."""
    place = Path(tempfile.mkdtemp(prefix="sh-"))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(place), "XDG_STATE_HOME": f"{place}/state"}
    seed = each.seed.partition("-")[0]
    argv = [sys.executable, "-m", "tests.soak.hostile", "--only", str(each.number), "--seed", seed, "--in", str(place)]
    try:
        done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_ALONE)
        return dict(json.loads(done.stdout.rpartition("\n@")[2]))
    except subprocess.TimeoutExpired:
        return {"surface": each.surface, "wrong": [f"no end within {_ALONE:g} s"]}
    except ValueError:
        return {"surface": each.surface, "wrong": [f"no answer: {done.stderr[-2000:]}"]}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def soak(numbers: Sequence[int], seed: int, at_once: int = 2, show: bool = False) -> list[str]:
    """Run modes, and return what was wrong, a line each."""
    failures = []
    with ThreadPoolExecutor(at_once) as threads:
        modes = [mode(number, seed) for number in numbers]
        for each, said in zip(modes, threads.map(alone, modes), strict=True):
            if said["wrong"]:
                failures.append(f"run {each.number}, {each.surface}, trust={each.trust}: {'; '.join(said['wrong'])}")
            if show:
                print(each.number, each.surface, each.trust, json.dumps(said), flush=True)
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """Run modes; 1 if one of them has cost too much."""
    parser = argparse.ArgumentParser(prog="tests.soak.hostile", description="Nodes that mean harm in random ways.")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, action="append", help="only these runs, in this process if --in is given")
    parser.add_argument("--show", action="store_true", help="print what each run has cost")
    parser.add_argument("--in", dest="place", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.place is not None:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            said = run(mode(asked.only[0], asked.seed), asked.place)
        print(f"\n@{json.dumps({**said, 'wrong': wrong(said)})}", end="")
        return 0
    began = time.monotonic()
    numbers = asked.only or range(asked.runs)
    failures = soak(numbers, asked.seed, show=asked.show)
    print("\n".join(failures))
    print(f"hostile: {len(numbers)} runs (seed {asked.seed}), {len(failures)} failed, {time.monotonic() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
