"""Functions that damage their own process, beside healthy calls on other slots of the same node.

    python -m tests.soak.damage --runs 500 --seed 1

A function masks or ignores signals, is stopped or traced, closes or fills its files, cannot be read in /proc, keeps
threads, limits its memory, takes another name, leaves processes, and the like. It returns, raises or hangs. Each
healthy call must return its value, each damaged one must end in time, and the agent of the node must live.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import skypool as sky
from skypool.agent.processes import descendants
from tests.damage_work import chosen, damaged, expected, healthy

SLOTS = 6
HEALTHY = 2
TIMEOUT = 1.0
GRACE = 0.3
LATEST = 40.0
"""Seconds within which a damaged call must have ended, on a machine that has other work, too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run damaged functions; 1 if one of them harmed another call or the node."""
    parser = argparse.ArgumentParser(prog="tests.soak.damage", description="Functions that damage their process.")
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="only functions with this damage, by its name")
    asked = parser.parse_args(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sp-", ignore_cleanup_errors=True) as home:
        os.environ |= {"XDG_RUNTIME_DIR": home, "XDG_STATE_HOME": f"{home}/state"}
        failures, ends, healthy_calls = soak(asked.runs, asked.seed, asked.only)
    print("\n".join(failures))
    print(f"ends of the damaged calls: {', '.join(f'{count} {name}' for name, count in ends.most_common())}")
    print(
        f"damage: {asked.runs} functions beside {healthy_calls} healthy calls (seed {asked.seed}), "
        f"{len(failures)} failures, {time.monotonic() - began:.0f} s"
    )
    return 1 if failures else 0


def soak(runs: int, seed: int, only: str | None = None) -> tuple[list[str], Counter[str], int]:
    """Run so many damaged functions. Return what went wrong, how they ended, and the number of healthy calls."""
    drawn = (f"{seed}-{number}" for number in itertools.count())
    seeds = list(itertools.islice((each for each in drawn if only is None or only in chosen(each)), runs))
    failures: list[str] = []
    ends: Counter[str] = Counter()
    done = threading.Event()
    with sky.ComputePool(name="damage", slots=SLOTS, console="off", grace=GRACE, liveness=5) as pool:
        agent = _agent(pool)
        counts = [0] * HEALTHY

        def keep_healthy(place: int) -> None:
            dice = random.Random(f"{seed}-healthy-{place}")
            while not done.is_set():
                n, seconds = dice.randrange(10**6), dice.choice([0.1, 0.5, 2.0])
                try:
                    got = pool.send(healthy(n, seconds).with_options(fresh=True)).result(LATEST + seconds)
                    if got != expected(n, seconds):
                        failures.append(f"a healthy call returned {got!r}")
                except Exception as e:  # noqa: BLE001 - each is a failure
                    failures.append(f"a healthy call raised {type(e).__name__}: {e}")
                    if agent != _agent(pool):
                        return
                counts[place] += 1

        watchers = [threading.Thread(target=keep_healthy, args=(place,)) for place in range(HEALTHY)]
        for watcher in watchers:
            watcher.start()
        waiting = iter(seeds)
        running: dict[str, tuple[sky.CallFuture[object], float]] = {}
        try:
            while True:
                for each in itertools.islice(waiting, SLOTS - HEALTHY - len(running)):
                    call = damaged(each).with_options(timeout=TIMEOUT, output="silent")
                    running[each] = pool.send(call), time.monotonic()
                if not running:
                    break
                for each, (future, since) in list(running.items()):
                    if future.done():
                        error = future.exception()
                        ends[type(error).__name__ if error else "a value"] += 1
                        del running[each]
                    elif time.monotonic() - since > LATEST:
                        failures.append(f"{each}: {' + '.join(chosen(each))} did not end")
                        future.cancel()
                        del running[each]
                if _agent(pool) != agent:
                    failures.append(f"the agent ended, with {[chosen(each) for each in running]}")
                    break
                if len(ends) and sum(ends.values()) % 50 == 0:
                    pool.stack()
                time.sleep(0.02)
        finally:
            done.set()
            for watcher in watchers:
                watcher.join()
    return failures, ends, sum(counts)


def _agent(pool: sky.ComputePool) -> int | None:
    """The pid of the agent of the pool's only node; None if it has ended."""
    from tests.conftest import nodes

    keepers: list[int] = []
    for folder in nodes(pool.name):
        with suppress(FileNotFoundError):  # the folder of a node that comes or goes
            keepers.append(json.loads((folder / "keeper.json").read_text())["pid"])
    for pid in [pid for keeper in keepers for pid in descendants(keeper)]:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) in keepers and _name(pid) == "skypool-agent":
                    return pid
        except OSError:
            continue
    return None


def _name(pid: int) -> str:
    with open(f"/proc/{pid}/comm", errors="replace") as file:
        return file.read().strip()


if __name__ == "__main__":
    sys.exit(main())
