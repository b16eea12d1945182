"""Gangs that hang in random ways until their timeout: the error must say where each of their processes hung.

    python -m tests.soak.stacks --runs 10 --seed 1

Processes wait for others at a barrier, sleep, spin, or hang in native code that keeps the interpreter's lock.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence

import skypool as sky
from tests.stack_work import WHERE, hang


def main(argv: Sequence[str] | None = None) -> int:
    """Let gangs hang; 1 if an error does not say where each process hung."""
    parser = argparse.ArgumentParser(prog="tests.soak.stacks", description="Gangs that hang until their timeout.")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--how", choices=list(WHERE), action="append", help="only gangs that hang in this way")
    asked = parser.parse_args(argv)
    began = time.monotonic()
    failures = soak(asked.runs, asked.seed, asked.how or list(WHERE))
    print("\n".join(failures))
    print(f"stacks: {asked.runs} gangs (seed {asked.seed}), {len(failures)} failed, {time.monotonic() - began:.0f} s")
    return 1 if failures else 0


def soak(runs: int, seed: int, ways: Sequence[str] = tuple(WHERE)) -> list[str]:
    """Let so many gangs hang in some of these ways, and return what was wrong with their errors."""
    failures = []
    with sky.ComputePool(name="stacks", nodes=2, slots=1, console="off", grace=1) as pool:
        for number in range(runs):
            dice = random.Random(f"{seed}-{number}")
            how, procs, nodes = dice.choice(ways), dice.randint(1, 3), dice.randint(1, 2)
            call = hang(how, dice.random() / 4).with_options(procs=procs, timeout=10.0, grace=1)
            try:
                call @ pool[0:nodes]
                failures.append(f"run {number}: the gang did not time out")
            except sky.CallTimeout as e:
                expected = set(range(procs * nodes))
                told = {rank for rank, stack in e.stacks.items() if any(each in stack for each in WHERE[how])}
                if told != expected:
                    failures.append(f"run {number}, {how}: {sorted(expected - told)} are missing in {e.stacks}")
    return failures


if __name__ == "__main__":
    sys.exit(main())
