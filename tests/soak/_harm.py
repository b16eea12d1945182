"""What false nodes send to a client that must cost it little: endless frames, by surface and by chance.

The standard library only, as a node that is nothing but a script runs it.
"""

from __future__ import annotations

import json
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Fields = Mapping[str, Callable[[random.Random], Any]]
"""What a part of a measurement has: a maker of each field."""
Frame = Callable[..., bytes]
"""Makes a frame of its kind, its header and its body. The header may be given as bytes of JSON instead, as `head`."""
STYLES = (
    "abc def",
    "\U0001f600" * 4,
    "a\nnode 1, worker 0, process 9\r",
    "\x1b[2J\x1b]0;x\x07\x9b1m",
    "\u2028\u202e\xa0",
    "\x00",
    "\ud800",
    '"\\/',
    "é",
)


def text(dice: random.Random, most: int) -> str:
    """A text of any style, mostly short."""
    size = dice.choice((0, 1, 10, 100, most))
    style = dice.choice(STYLES)
    return (style * (1 + size // len(style)))[:size]


def number(dice: random.Random) -> Any:
    """A number of any size that is valid."""
    return dice.choice((0, 1, 50.5, 99, 1000))


def nonsense(dice: random.Random) -> Any:
    """What is no number, or too large a number."""
    return dice.choice((-1, 1e308, float("inf"), float("nan"), 2**63, 10**300, True, None, "7", [], {}))


def count(dice: random.Random) -> int:
    """How many entries a list has: mostly few, as lists are made in lists."""
    return dice.choice((0, 1, 2, 8, 64)) if dice.random() < 0.2 else dice.choice((0, 1, 2))


# --- measurements --------------------------------------------------------------------------------------------

_DEVICE: Fields = {
    **dict.fromkeys(("utilization_percent", "memory_used_mib", "memory_total_mib", "power_watts"), number),
    **dict.fromkeys(("temperature_celsius", "sm_clock_mhz", "sm_activity_percent"), number),
    **dict.fromkeys(("pcie_width", "pcie_width_max", "nvlinks", "nvlinks_all"), lambda dice: 16),
    **dict.fromkeys(("ecc_corrected", "ecc_uncorrected"), lambda dice: 7),
    "xids_watched": lambda dice: True,
    "uuid": lambda dice: text(dice, 300),
    "unknown": lambda dice: text(dice, 300),
    "throttled": lambda dice: [text(dice, 300) for _ in range(count(dice))],
    "xids": lambda dice: [dice.choice((31, 43, dice.randrange(1 << 62))) for _ in range(count(dice))],
    "memory_of": lambda dice: {str(dice.randrange(1 << 40)): number(dice) for _ in range(count(dice))},
    "nonsense": lambda dice: [[]] * count(dice),
}
_CALL: Fields = {
    "id": lambda dice: dice.randrange(1 << 63),
    "name": lambda dice: text(dice, 300),
    "slot": lambda dice: dice.randrange(1 << 20),
    **dict.fromkeys(("wall_seconds", "cpu_seconds", "rss_mib", "peak_rss_mib", "device_memory_mib"), number),
}
_NODE: Fields = dict.fromkeys(("cpu_percent", "memory_used_mib", "disk_used_mib", "disk_read_mib", "sent_mib"), number)


def _some(dice: random.Random, fields: Fields, share: float) -> dict[str, Any]:
    return {name: made(dice) for name, made in fields.items() if dice.random() < share}


def sample(dice: random.Random, n: int, wild: bool, wrong: float) -> dict[str, Any]:
    """A measurement without its time.

    Args:
        dice: decides all else.
        n: the number of the measurement.
        wild: True for devices that no other measurement has.
        wrong: the share of the fields that hold nonsense.
    """
    share = dice.choice((0.0, 0.2, 1.0))
    base = n * 64 if wild else 0
    said = {
        **_some(dice, _NODE, share),
        "devices": [
            {"kind": dice.choice(("cuda", f"k{base}")), "index": base + i, **_some(dice, _DEVICE, share)}
            for i in range(dice.choice((0, 1, 8, 64)))
        ],
        "calls": [{**_some(dice, _CALL, 1.0), "slot": i, "wall_seconds": 1} for i in range(dice.choice((0, 1, 8, 64)))],
    }
    for each in (said, *said["devices"], *said["calls"]):
        for name in [name for name in each if dice.random() < wrong]:
            each[name] = nonsense(dice)
    return said


def patient(dice: random.Random, frame: Frame, hear: Callable[..., object]) -> Iterator[bytes]:
    """As much as may be sent for each request, and no more."""
    n = 0
    while True:
        hear(19)
        said = []
        for _ in range(16):
            n += 1
            fields = {
                "kind": "cuda",
                "utilization_percent": n % 100,
                "unknown": f"{n}{'u' * 200}",
                "xids_watched": True,
            }
            cards = [{**fields, "index": i, "uuid": f"{i}"} for i in range(dice.choice((8, 60)))]
            said.append({"time": time.time() + n / 1000, "devices": cards})
        yield _pong(frame, samples=said)


def _pong(frame: Frame, **more: Any) -> bytes:
    return frame(20, {"busy": 0, "cpu_busy": 0, "waiting": 0, "done": 0, "running": [], **more})


def samples(dice: random.Random, frame: Frame) -> Iterator[bytes]:
    """Measurements of any kind without end. Their times are the next ones, all the same, or far away."""
    wrong = dice.choice((0.0,) * 9 + (0.01,))
    each, wild = dice.choice((1, 4, 16)), dice.random() < 0.3
    longest = dice.choice((500, 5000, 50_000, 900_000)) // each
    made = [b'"devices":[]}']
    for n in range(50):
        one = json.dumps(sample(dice, n, wild, wrong)).encode()[1:]
        made += [one] if len(one) < longest else []
    step, begin = dice.choice((0.001, 0.0, 1.0, -1.0)), dice.choice((time.time(), 0.0, 9e11))
    head = b'{"busy":0,"cpu_busy":0,"waiting":0,"done":0,"running":[],"samples":['
    n = 0
    while True:
        times = [b'{"time":%.3f,' % max(0.0, begin + step * (n + i)) for i in range(each)]
        yield frame(20, None, b"", head + b",".join(t + dice.choice(made) for t in times) + b"]}")
        n += each


def devices(dice: random.Random, frame: Frame) -> Iterator[bytes]:
    """Devices that are always others, and whose health changes with each measurement."""
    many, per = dice.choice((1, 16, 64)), dice.choice((1, 8, 16))
    long = dice.choice((1, 60, 256))
    n = 0
    while True:
        made = []
        for _ in range(per):
            n += 1
            made.append(
                {
                    "time": time.time() + n / 1000,
                    "devices": [
                        {"kind": f"k{n % 7}", "index": i, "uuid": f"{n}-{i}", "unknown": f"{n}{'u' * long}"}
                        for i in range(many)
                    ],
                }
            )
        yield _pong(frame, samples=made)


def xids(dice: random.Random, frame: Frame) -> Iterator[bytes]:
    """Errors of drivers that mark each measurement as one that is kept."""
    n = 0
    while True:
        n += 1
        device = {"kind": "cuda", "xids": [n * 64 + i for i in range(64)], "xids_watched": True}
        said = [{"time": time.time() + n, "devices": [{**device, "index": i} for i in range(8)]}]
        yield _pong(frame, samples=said)


def tiny(dice: random.Random, frame: Frame) -> Iterator[bytes]:
    """Measurements of nothing, as many as a report takes."""
    many = dice.choice((1, 16, 64))
    n = 0
    while True:
        yield _pong(frame, samples=[{"time": time.time() + n / 1000 + i / 1e6} for i in range(many)])
        n += 1


def statuses(dice: random.Random, frame: Frame) -> Iterator[bytes]:
    """Names of running functions, long ones and many."""
    names = [text(dice, 4096) for _ in range(dice.choice((1, 8, 64)))]
    n = 0
    while True:
        n += 1
        yield _pong(frame, running=names, done=n, busy=n % 5, waiting=dice.choice((0, 2**62)))


def notices(dice: random.Random, frame: Frame) -> Iterator[bytes]:
    """The provider takes the machine back, at another time each time."""
    at = dice.choice((time.time() + 1000, 0.0, 2e11, 9e11))
    n = 0
    while True:
        n += 1
        yield _pong(frame, interruption=at + n)


def stalled(dice: random.Random, frame: Frame) -> Iterator[bytes]:
    """Ids of generators that wait, as many as a header takes."""
    first, many = dice.choice((1, 10**13)), dice.choice((1, 1000, 60_000))
    while True:
        yield _pong(frame, stalled=list(range(first, first + many)))


def repeated(dice: random.Random, frame: Frame) -> Iterator[bytes]:
    """Messages that belong to the beginning or to the end of a connection, in its middle."""
    ids = list(range(10**13, 10**13 + dice.choice((1, 1000, 30_000))))
    health = {
        "devices": [{"kind": "cuda", "index": 0}] * dice.choice((1, 1000)),
        "driver": "",
        "disk_free": 1,
        "time": 1,
    }
    header = {"slots": 1, "cpu_slots": 0, "devices": 0, "cpu_calls": [], "calls": ids, "names": {"f": ids}}
    header |= {"streams": [], "functions": [], "objects": [], "health": health}
    said = [frame(2, {}, json.dumps(header).encode()), frame(21, {}), frame(22, {"silent": 1, "former": True})]
    said += [frame(14, {"calls": [], "cpu": False})]
    some = dice.sample(said, dice.choice((1, 1, 4)))
    while True:
        yield from some


# --- output --------------------------------------------------------------------------------------------------


def output(dice: random.Random, frame: Frame) -> Iterator[bytes]:
    """Text of any kind, in pieces of one size, of few or of many sources."""
    size = dice.choice((1, 100, 4096, 64 << 10, 1 << 20))
    style = dice.choice((*STYLES, "\n", "\r", "x\ry", "%d\n")).encode("utf-8", "surrogatepass")
    body = (style * (1 + size // len(style)))[:size]
    slots, calls = dice.choice((1, 100, 16000)), dice.choice((1, 1 << 40))
    gang = dice.random() < 0.3
    n = 0
    while True:
        n += 1
        header = {"id": 1 + n % calls, "slot": n % slots, "fd": 1 + n % 2, "seq": n}
        yield frame(16, header | ({"rank": n % 1000, "label": f"gpu{n % 9}"} if gang else {}), body)


def begun(dice: random.Random, frame: Frame) -> Iterator[bytes]:
    """The beginning of a line or of a character, from each slot of a thousand, and never its end."""
    part = dice.choice((b"x" * 1000, b"\xf0\x9f\x98", b"\x1b[38;5;", b"a\r"))
    n = 0
    while True:
        n += 1
        yield frame(16, {"id": n, "slot": n % 16000, "fd": 1 + n % 2, "seq": n}, part)


# --- calls ---------------------------------------------------------------------------------------------------


def _error(dice: random.Random, size: int) -> bytes:
    """An exception of any text, as a stranger's node writes it."""
    from skypool.trust.sending import DataWriter

    said = "x" * size if dice.random() < 0.5 else text(dice, size)
    chain = [(None, "a.B", said, "", [said[:1000]])] * dice.choice((1, 20))
    return bytes(DataWriter(0).value((chain, said[:1000]), "x")[0])


def errors(dice: random.Random, frame: Frame, ids: list[int]) -> Iterator[bytes]:
    """An error for each call, and then for calls that are not there."""
    size = dice.choice((10, 3000, 60_000))
    for id_ in [*ids, *range(1, 9000)]:
        body = _error(dice, size)
        yield frame(7, {"id": id_, "ok": False, "seconds": 0.1, "lens": [len(body)]}, body)
    while True:
        yield _pong(frame)


def strays(dice: random.Random, frame: Frame, ids: list[int]) -> Iterator[bytes]:
    """Ends of calls that are not there."""
    size = dice.choice((1, 1000, 1 << 20, 16 << 20))
    n = 0
    while True:
        n += 1
        yield frame(7, {"id": n, "ok": True, "seconds": 0.1, "lens": [size]}, b"N" * size)


def items(dice: random.Random, frame: Frame, ids: list[int]) -> Iterator[bytes]:
    """Items of a generator that nobody has asked for yet."""
    size = dice.choice((1, 1000, 1 << 20))
    body = b"\x93sky{[" + b"1," * (size // 2) + b"1]"
    n = 0
    while True:
        n += 1
        yield frame(8, {"id": ids[0], "seq": n, "lens": [len(body)]}, body)


def modules(dice: random.Random, frame: Frame) -> Iterator[bytes]:
    """Wishes for modules, each another one."""
    long = dice.choice((1, 400, 5000))
    n = 0
    while True:
        n += 1
        yield frame(18, {"name": f"nothing_{n}{'x' * long}", "version": "", "file": ""})


def ends(dice: random.Random, frame: Frame, ids: list[int]) -> Iterator[bytes]:
    """Ends of many small calls in each message. No such call is there."""
    size = dice.choice((0, 1, 1000))
    many = dice.choice((1, 100, 1000 << 10)) // (21 + size) or 1
    n = 10**13
    while True:
        made = [struct.pack("!QI?d", n + i, size, True, 0.1) + b"N" * size for i in range(many)]
        n += many
        yield frame(24, {}, b"".join(made))


def pieces(dice: random.Random, frame: Frame, ids: list[int]) -> Iterator[bytes]:
    """Large values that begin and never end. Each takes the memory of what has come of it."""
    size = dice.choice((65537, 1 << 20, 300 << 20, 4 << 30))
    body = bytes(min(size, 1 << 20))
    n = 0
    while True:
        n += 1
        key = ids[0] if n % 2 else f"{ids[0]}:{n}"
        yield frame(11, {"key": key, "at": 0, "size": size}, body)


def packages(dice: random.Random, frame: Frame, ids: list[int]) -> Iterator[bytes]:
    """Wishes for packages that there are, again and again. What comes is read and thrown away."""
    threading.Thread(target=_drain, daemon=True).start()
    names = dice.sample(("tests", "docs", "examples", "providers", "images"), dice.choice((1, 5)))
    while True:
        for name in names:
            yield frame(18, {"name": name, "version": "", "file": ""})
            if len(names) == 1:
                time.sleep(0.0005)


def _drain() -> None:
    while os.read(0, 1 << 20):
        pass


def recalled(dice: random.Random, frame: Frame, ids: list[int]) -> Iterator[bytes]:
    """Calls that are given back, with as many ids as a header takes."""
    many = dice.choice((1, 1000, 20_000))
    while True:
        yield frame(14, {"calls": list(range(10**13, 10**13 + many)), "cpu": False})


def headers(dice: random.Random, frame: Frame) -> Iterator[bytes]:
    """Headers with fields that nobody reads, as large as they may be."""
    size = dice.choice((100, 4000, 900_000))
    more: dict[str, Any] = dice.choice(
        (
            {"x": "y" * size},
            {"x": ["z" * 100] * (size // 104)},
            {f"k{i}": "v" * 200 for i in range(size // 210)},
            {"x": [[]] * (size // 4)},
            {"x": [{"y": 0.5}] * (size // 12)},
        )
    )
    while True:
        yield _pong(frame, **more)


def mixed(dice: random.Random, frame: Frame) -> Iterator[bytes]:
    """Several of these by turns."""
    made = [each(dice, frame) for each in dice.sample([samples, devices, xids, statuses, output, headers], 3)]
    while True:
        for each in made:
            yield next(each)


PLAIN = {
    each.__name__: each
    for each in (
        samples,
        devices,
        xids,
        tiny,
        statuses,
        notices,
        output,
        begun,
        modules,
        headers,
        mixed,
        stalled,
        repeated,
    )
}
PATIENT = {each.__name__: each for each in (patient,)}
WITH_CALLS = {each.__name__: each for each in (errors, strays, items, recalled, ends, pieces, packages)}


# --- greetings -----------------------------------------------------------------------------------------------


def greet(dice: random.Random, welcome: dict[str, Any]) -> None:
    """Fill a WELCOME with as much as there is room for."""
    many = dice.choice((10, 10_000, 400_000))
    ids = list(range(10**15, 10**15 + many))
    what = dice.choice(("calls", "names", "functions", "objects", "streams", "devices", "driver", "slots"))
    if what in ("calls", "streams"):
        welcome[what] = ids
    elif what == "names":
        welcome |= {"calls": ids, "names": {text(dice, 100) or "f": ids}}
    elif what in ("functions", "objects"):
        welcome[what] = [f"{id_}{'k' * dice.choice((0, 50))}" for id_ in ids]
    elif what == "devices":
        device = {"kind": "cuda", "index": 0, "name": "n" * dice.choice((10, 4000)), "uuid": "u" * 100}
        welcome["health"]["devices"] = [device] * min(many, 10_000)
    elif what == "driver":
        welcome["health"]["driver"] = "d" * 4000
    else:
        welcome |= {"slots": 16000, "cpu_slots": 16000, "devices": 16000}


# --- the setup of a machine ----------------------------------------------------------------------------------


def lines(dice: random.Random) -> bytes:
    """What the setup of a machine prints: lines of one kind, or of several."""
    words = ("@step 1 2 x", "@advice y", "@alive", "@retry a 1 2", "@skip", "@done", "@boot", "@have", "|", "", "| ")
    long = dice.choice((0, 1, 100, 70_000))
    some = dice.sample(words, dice.choice((1, 1, 3)))
    text = "\n".join(f"{word}{(dice.choice(STYLES) * long)[:long]}" for word in some)
    return f"{text}{dice.choice(chr(10) * 5 + 'x')}".encode("utf-8", "backslashreplace") * (
        1 + (64 << 10) // (1 + len(text))
    )


# --- the attack ----------------------------------------------------------------------------------------------


def attack(
    surface: str,
    seed: str,
    most: int,
    seconds: float,
    write: Callable[[bytes], None],
    frame: Frame,
    hear: Callable[..., object],
    ids: list[int],
    tell: str,
) -> None:
    """Send frames until so many bytes or seconds are over, and add the number of bytes to a file."""
    dice = random.Random(seed)
    if surface in PLAIN:
        made = PLAIN[surface](dice, frame)
    else:
        made = PATIENT[surface](dice, frame, hear) if surface in PATIENT else WITH_CALLS[surface](dice, frame, ids)
    until = time.monotonic() + seconds
    sent = messages = 0
    try:
        while sent < most and time.monotonic() < until:
            data = next(made)
            write(data)
            sent += len(data)
            messages += 1
    finally:
        with open(tell, "a") as file:
            file.write(f"{sent} {messages}\n")
