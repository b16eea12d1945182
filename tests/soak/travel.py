"""Random scripts: globals, functions and classes change between calls, and each call must see those of its moment.

    python -m tests.soak.travel --worlds 200 --seed 1

A world is a process of its own, whose `__main__` is this module. It changes what it defines at random, sends calls that
only read, and compares each result with what the same call gives here when it is sent. Calls are sent one by one, many
at once, and by `map`, so that workers see old and new definitions in turn. Others count on the worker: they must never
go back while the script does not change what they count with.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import skypool as sky

ROOT = Path(__file__).parent.parent.parent
STEPS = 60
"""Changes in a world, each followed by a few calls."""

NUMBER = 1
REAL = 0.0
TEXT = "a"
ITEMS = [1]
TABLE = {"a": 1}
PAIR = (ITEMS, TABLE)
COUNTED = 0


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        return "wrapped", function(*args)

    wrapper.__qualname__ = wrapper.__name__ = function.__name__
    return wrapper


def first(x: int = 0) -> Any:
    return NUMBER + x, ITEMS[-1]


def second(x: int = 2) -> Any:
    try:
        return first(x), TEXT
    except NameError:
        return first(x), "no text"


@wrapped
def third() -> Any:
    return second(), REAL


class Base:
    scale = 1

    def scaled(self) -> Any:
        return NUMBER * self.scale

    @property
    def seen(self) -> Any:
        return len(TABLE), first()


@dataclasses.dataclass
class Point(Base):
    x: int
    factor = 1

    def far(self) -> Any:
        return self.x * self.factor, self.scaled(), second(self.x)


class Slotted(Base):
    __slots__ = ("y",)

    def __init__(self, y: int) -> None:
        self.y = y

    @classmethod
    def both(cls, y: int) -> Any:
        return cls(y).y, cls.scale, PAIR


class Color(enum.Enum):
    RED = 1
    BLUE = 2

    def told(self) -> Any:
        return self.name, REAL, ITEMS[0]


HELD = Point(7)


class Counter:
    count = 0

    def up(self) -> tuple[int, int]:
        global COUNTED
        COUNTED += 1
        Counter.count += 1
        return COUNTED, Counter.count


def told(it: Any) -> Any:
    """What a thing says, by all of its ways."""
    if isinstance(it, Point):
        return it.far(), it.seen
    if isinstance(it, Slotted):
        return it.both(it.y), it.scaled()
    if isinstance(it, Color):
        return it.told(), it is Color[it.name]
    if isinstance(it, type):
        return it.__name__, getattr(it, "scale", None), getattr(it, "factor", None)
    if callable(it):
        return it()
    if isinstance(it, list):
        return [told(each) for each in it]
    return it


@sky.compute
def read_all(it: Any) -> Any:
    return told(it), NUMBER, REAL, ITEMS, TABLE, PAIR, HELD.far()


@sky.compute
def read_some(it: Any) -> Any:
    return told(it), third()


@sky.compute
def read_nothing(it: Any) -> Any:
    if isinstance(it, Point):
        return it.far()
    return (
        it.told() if isinstance(it, Color) else it() if callable(it) and not isinstance(it, type) else type(it).__name__
    )


@sky.compute
def read_classes(it: Any) -> Any:
    return told(it), Point(3).far(), Slotted(4).both(5), Color.RED.told(), Color.BLUE.value


@sky.compute
def counts(it: Counter) -> tuple[int, int]:
    return it.up()


@sky.compute
def counts_too() -> tuple[int, int]:
    return Counter().up()


CHANGES = (
    "NUMBER = {n}",
    "REAL = {n} / 4",
    "REAL = -0.0",
    "TEXT = 'text {n}'",
    "globals().pop('TEXT', None)",
    "ITEMS.append({n})",
    "ITEMS = [{n}]; PAIR = (ITEMS, TABLE)",
    "ITEMS[0] = {n}",
    "TABLE['{n}'] = {n}",
    "TABLE.clear()",
    "HELD.x = {n}",
    "Point.factor = {n}",
    "Base.scale = {n}",
    "Slotted.scale = {n}",
    "Slotted.__dict__.get('scale') is not None and delattr(Slotted, 'scale')",
    "def first(x=0): return NUMBER + x + {n}, ITEMS[-1]",
    "def second(x={n}): return first(x), 'new'",
    "first.__defaults__ = ({n},)",
    "third = wrapped(lambda: ({n}, second()))",
    "Point.far = lambda self: (self.x, {n}, ITEMS)",
    "Point.far.__code__ = (lambda self: (self.x, {n}, NUMBER)).__code__",
    "Color.told = lambda self: (self.value, {n})",
    "@dataclasses.dataclass\nclass Point(Base):\n    x: int\n    factor = {n}\n"
    "    def far(self): return self.x, {n}, second()\n"
    "HELD = Point(8)",
    "class Color(enum.Enum):\n    RED = {n}\n    BLUE = 'b'\n    def told(self): return self.value, TABLE",
)
"""What happens to the script. Some add a name that was not there, or take one away."""


def arguments(dice: random.Random) -> Any:
    n = dice.randrange(100)
    kinds: list[Callable[[], Any]] = [
        lambda: None,
        lambda: n,
        lambda: Point(n),
        lambda: Slotted(n),
        lambda: dice.choice(list(Color)),
        lambda: HELD,
        lambda: first,
        lambda: third,
        lambda: lambda: (n, NUMBER, first()),
        lambda: [Point(1), Color.RED, first, Slotted],
        lambda: Point,
        lambda: Point(n).far,
        lambda: ITEMS,
    ]
    return dice.choice(kinds)()


def world(seed: int) -> int:
    """Live one world; the number of calls that were compared. Raise AssertionError for a wrong result."""
    dice = random.Random(seed)
    functions = read_all, read_some, read_nothing, read_classes
    compared = 0
    with sky.ComputePool(slots=dice.choice([1, 2]), console="off") as pool:
        history: list[str] = []
        for _ in range(STEPS):
            change = dice.choice(CHANGES).format(n=dice.randrange(1000))
            history.append(change)
            exec(change, globals())
            waiting: list[tuple[str, str, Any]] = []
            for _ in range(dice.randrange(1, 6)):
                function, argument = dice.choice(functions), arguments(dice)
                expected = repr(function.local(argument))
                waiting.append((function.name, expected, function(argument) > pool))
                if dice.random() < 0.4:
                    change = dice.choice(CHANGES).format(n=dice.randrange(1000))
                    history.append(change)
                    exec(change, globals())
                while waiting and dice.random() < 0.2:
                    check(waiting.pop(0), seed, history)
                compared += 1
            for each in waiting:
                check(each, seed, history)
            if dice.random() < 0.2:
                many = [arguments(dice) for _ in range(5)]
                expected = repr([read_some.local(each) for each in many])
                found = repr(list(pool.map(read_some, many)))
                assert found == expected, f"seed {seed}: map gave {found}, not {expected}, after {history[-6:]}"
                compared += 5
    with sky.ComputePool(slots=1, console="off") as pool:
        before = (COUNTED, Counter.count)
        for _ in range(20):
            now = counts(Counter()) >> pool if dice.random() < 0.5 else counts_too() >> pool
            assert now == (before[0] + 1, before[1] + 1), f"seed {seed}: the counter went from {before} to {now}"
            before = now
            compared += 1
        assert (COUNTED, Counter.count) == (0, 0), f"seed {seed}: a result changed the script"
    return compared


def check(waiting: tuple[str, str, Any], seed: int, history: list[str]) -> None:
    name, expected, future = waiting
    found = repr(future.result(60))
    assert found == expected, f"seed {seed}: {name} gave {found}, not {expected}, after {history[-8:]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Live many worlds, two at a time; 1 if one of them has found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.travel", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worlds", type=int, default=200)
    parser.add_argument("--world", type=int, help="live this one here")
    asked = parser.parse_args(argv)
    if asked.world is not None:
        print(world(asked.world))
        return 0

    def live(seed: int) -> tuple[int, int, str]:
        command = [sys.executable, "-m", "tests.soak.travel", "--world", str(seed)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
        return seed, done.returncode, (done.stderr if done.returncode else done.stdout).strip()

    with ThreadPoolExecutor(2) as threads:
        lived = list(threads.map(live, range(asked.seed * 1000, asked.seed * 1000 + asked.worlds)))
    wrong = [(seed, said) for seed, status, said in lived if status]
    for seed, said in wrong:
        print(f"world {seed}: {said[-3000:]}")
    calls = sum(int(said) for _, status, said in lived if not status)
    print(f"{len(lived)} worlds, {calls} calls compared, {len(wrong)} worlds wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
