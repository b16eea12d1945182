"""Mutated frames against the decoder and the border, and against live connections whose client must survive them.

python -m tests.soak.frames --frames 1000000 --links 10000 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import random
import socket
import struct
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from skypool.calls.call_events import CallEvents
from skypool.calls.dispatch import Dispatch
from skypool.calls.futures import CallFuture
from skypool.calls.options import Options
from skypool.calls.pending_calls import Code, PendingCall
from skypool.errors import ConnectionLost, ProtocolError, UntrustedResult
from skypool.link.agent_messages import ModuleAsked, Pong, Printed, Welcome, message_of
from skypool.link.chunks import Pieces
from skypool.link.inbox import Arrival
from skypool.link.link import Link
from skypool.link.reports import NodeReports
from skypool.shipping.user_modules import Lender
from skypool.trust.classes import Allowed
from skypool.trust.encoding import write
from skypool.trust.reader import DataReader
from skypool.wire import codec
from skypool.wire.agent_config import AgentConfig
from skypool.wire.frames import Decoder, Kind, encode, end_of, frame, scan
from skypool.wire.transport import CommandStream, Transport

SECONDS, SECONDS_A_MEGABYTE = 0.1, 0.1
BYTES, BYTES_A_BYTE = 128 << 10, 4
_SAMPLED = 200
"""Every so many frames the memory is measured, which makes them slow."""
_VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 7, 2**31, 2**63, 2**64, 10**400, 1.5, float("nan"), float("inf"), "", "x", "7:1"),
    *("\x1b]0;x\x07", "../../etc", [], [1], [[1]], ["x"], {}, {"a": 1}, [0] * 500, "9" * 5000),
]
_HEALTH = {"devices": [{"kind": "cuda", "index": 0, "name": "H100"}], "driver": "550", "disk_free": 1 << 40, "time": 1}
_KEYS: dict[str, Any] = {"streams": [], "functions": ["a"], "objects": []}
_WELCOME = {
    "slots": 2,
    "cpu_slots": 4,
    "devices": 2,
    "calls": [7],
    "cpu_calls": [],
    "names": {"f": [7]},
    **_KEYS,
    "health": _HEALTH,
}
READER = DataReader(0)


@dataclass
class Report:
    """What a run came to; ratios are of what a frame may cost."""

    frames: int = 0
    refused: int = 0
    taken: int = 0
    time_ratio: float = 0.0
    memory_ratio: float = 0.0
    links: int = 0
    given_up: int = 0

    def __str__(self) -> str:
        return (
            f"{self.frames} frames: {self.refused} refused, {self.taken} taken, no other exception; worst time "
            f"{self.time_ratio:.2f} and memory {self.memory_ratio:.2f} of what is allowed; {self.links} connections, "
            f"{self.given_up} given up, no call without an end"
        )


def honest() -> list[bytes]:
    """One frame of each kind that an agent sends, and some values in them."""
    value = codec.dumps({"a": [1, 2.5, "x"]})[0]
    data = write([{"a": n, "b": str(n)} for n in range(9)], Allowed())[0]
    told = {"busy": 1, "waiting": 0, "done": 3, "running": ["f"], "interruption": None}
    outcome = {"id": 7, "ok": True, "seconds": 0.5}
    frames = [
        frame(Kind.OUTCOME, {**outcome, "lens": [len(value)]}, [value]),
        frame(Kind.OUTCOME, {**outcome, "lens": [len(data)]}, [data]),
        frame(Kind.OUTCOME, {**outcome, "ok": False, "lens": [3]}, [b"abc"]),
        frame(Kind.OUTCOME, {**outcome, "lens": [70000], "blob": 70000}),
        frame(Kind.OUTCOMES, {}, [end_of(7, True, 0.5, value) + end_of(8, True, 0.5, data)]),
        frame(Kind.YIELD, {"id": 7, "seq": 1, "single": 1, "lens": [len(value)]}, [value]),
        frame(Kind.CREDIT, {"id": 7, "arg": 0, "n": 1}),
        frame(Kind.BLOB, {"key": 7, "at": 0, "size": 70000}, [bytes(70000)]),
        frame(Kind.RECALLED, {"calls": [7, 8]}),
        frame(Kind.OUTPUT, {"id": 7, "slot": 0, "fd": 1, "seq": 1}, [b"\x1b[31mhello"]),
        frame(Kind.OUTPUT, {"id": 7, "slot": 9, "fd": 2, "seq": 2, "rank": 3, "label": "gpu1"}, [b"loss"]),
        frame(Kind.MODULE, {"name": "os.path", "version": "", "file": ""}),
        frame(Kind.PONG, told),
        frame(Kind.BYE, {}),
        frame(Kind.TAKEN, {"silent": 3.5}),
        frame(Kind.WELCOME, {}, [json.dumps(_WELCOME).encode()]),
    ]
    return [b"".join(bytes(part) for part in each) for each in frames]


def mutated(chance: random.Random, source: Sequence[bytes]) -> bytes:
    """Return a frame with something wrong in it: a field, a length, some bytes, its end, or another one's body."""
    data = bytearray(chance.choice(source))
    way = chance.randrange(6)
    if way < 3:  # its header, as JSON that makes sense
        (f,), _ = scan(memoryview(bytes(data)))
        header = dict(f.header)
        for _ in range(chance.randrange(1, 3)):
            name = chance.choice([*header, "id", "lens", "seq", "extra"])
            if chance.random() < 0.2:
                header.pop(name, None)
            else:
                header[name] = chance.choice(_VALUES)
        body = bytes(f.body) if chance.random() < 0.8 else chance.randbytes(chance.randrange(200))
        kind = f.kind if chance.random() < 0.9 else chance.choice(list(Kind))
        return encode(kind, header, len(body)) + body
    if way == 3:
        for _ in range(chance.randrange(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
    elif way == 4:
        del data[chance.randrange(len(data)) :]
        data += chance.randbytes(chance.randrange(40))
    else:
        at = chance.choice([4, 8])
        data[at : at + 4] = struct.pack("!I", chance.choice([0, 1, 2**16, 2**20 - 1, 2**20, 2**31]))
    return bytes(data)


def take_in(data: bytes, decoder: Decoder | None = None) -> bool:
    """Take in some bytes as a link does; whether they made sense.

    Raises:
        Exception: anything but ProtocolError and UntrustedResult is a defect.
    """
    try:
        decoder = decoder or Decoder()
        view = decoder.space()
        while len(view) < len(data):
            raise ProtocolError("more than one read")
        view[: len(data)] = data
        frames = decoder.advance(len(data))
        pieces = Pieces()
        for f in frames:
            said: Any = message_of(f)
            name = type(said).__name__
            if name == "Piece":
                pieces.take(said, f.body, lambda: (7,))
            elif name in ("Outcome", "Yielded"):
                buffers = pieces.buffers(said, f.body, lambda: (7,))
                if buffers:
                    READER.value(buffers, "it") if name == "Yielded" or said.ok else READER.error(buffers, "f")
            elif name == "Outcomes":
                for _, ok, _, body in said.ends:
                    READER.value((body,), "it") if ok else READER.error((body,), "f")
    except (ProtocolError, UntrustedResult):
        return False
    return True


def fuzz_border(count: int, seed: int, report: Report) -> None:
    """Send so many mutated frames through the decoder, the border and the reader of values."""
    chance, source = random.Random(seed), honest()
    for data in source:
        take_in(data)
    gc.collect()
    for number in range(count):
        data = mutated(chance, source)
        decoder = Decoder()  # its megabyte is there once for each connection
        sampled = number % _SAMPLED == 0
        if sampled:
            tracemalloc.start()
        began = time.thread_time()
        made_sense = take_in(data, decoder)
        took = time.thread_time() - began
        if sampled:
            most = tracemalloc.get_traced_memory()[1] + len(data)
            tracemalloc.stop()
            report.memory_ratio = max(report.memory_ratio, most / (BYTES + BYTES_A_BYTE * len(data)))
        else:
            report.time_ratio = max(report.time_ratio, took / (SECONDS + SECONDS_A_MEGABYTE * len(data) / 1e6))
        report.frames += 1
        report.taken += made_sense
        report.refused += not made_sense


def _nothing(*_: object) -> None:
    """Do nothing with what the dispatch reports."""


class _Client:
    """What a pool does with what one link brings, without a pool: the same dispatch, reports and lender of modules."""

    def __init__(self) -> None:
        self.dispatch = Dispatch("p", CallEvents("p", _nothing), _nothing, _nothing)
        self.reports = NodeReports("p", lambda _: None, self.dispatch.roster.acknowledge, lambda _: False)
        self.lender = Lender()
        self.link: Link
        self.lost: list[ConnectionLost] = []

    def on_arrivals(self, arrivals: list[Arrival], connection: int) -> None:
        for arrival in arrivals:
            said = arrival.said
            if isinstance(said, Printed):
                self.reports.printed(0, said, arrival.buffers)
            elif isinstance(said, Pong):
                self.reports.reported(0, said)
            elif isinstance(said, ModuleAsked):
                header, module = self.lender.find(said.name, said.version, said.has)
                self.link.reply(frame(Kind.MODULE, header, [module]))
            else:
                self.dispatch.arrived(0, [arrival])

    def on_welcome(self, welcome: Welcome) -> None:
        self.dispatch.add(0, welcome, self.link)

    def on_down(self, reason: str) -> None:
        self.dispatch.pause(0)

    def on_up(self, welcome: Welcome) -> None:
        self.dispatch.resume(0, welcome)

    def on_lost(self, error: ConnectionLost) -> None:
        self.lost.append(error)
        self.dispatch.lose(0, error)


class _Pair:
    """A stream whose other end is here; it ends instead of starting a process."""

    def __init__(self) -> None:
        self.socket, self.theirs = socket.socketpair()
        self.argv = ["a", "test"]

    def complaint(self) -> str:
        return ""

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def reap(self) -> None:
        """There is no process."""

    def end(self) -> str:
        self.socket.close()
        return ""


class _NoTransport:
    """Nothing can be reached a second time."""

    def argv(self, _: Sequence[str]) -> list[str]:
        return ["false"]


async def _one_link(chance: random.Random, source: Sequence[bytes], report: Report) -> None:
    client, pair = _Client(), _Pair()
    config = AgentConfig(folder="/", spool="/", cwd="/")
    client.link = link = Link(
        cast(Transport, _NoTransport()),
        config,
        client,
        session="s",
        command=["x"],
        liveness=30.0,
        awaited=partial(client.dispatch.roster.awaited, 0),
        reader=READER if chance.random() < 0.5 else None,
    )
    loop = asyncio.get_running_loop()
    pair.theirs.setblocking(False)
    greeting = json.dumps({"python": list(sys.version_info[:3]), "have": True, "gone": False}).encode()
    await loop.sock_sendall(pair.theirs, greeting + b"\nready\n" + source[-1])
    await link.open(cast(CommandStream, pair))
    pending = PendingCall(Code("c", "f", (b"x", b"{}")), codec.dumps(((), {})), CallFuture[Any]("f"), Options(), node=0)
    client.dispatch.submit(pending)
    future = cast(CallFuture[Any], pending.outlet)
    live = [each.replace(b'"id":7', b'"id":%d' % pending.id) for each in source[:-1]]
    frames = [mutated(chance, [each for each in live if _is_whole(each)]) for _ in range(10)]
    with contextlib.suppress(OSError):  # it may be given up in the middle
        await loop.sock_sendall(pair.theirs, b"".join(frames))
    pair.theirs.close()
    async with asyncio.timeout(30):
        while not client.lost and not link._closed:
            await asyncio.sleep(0)
            if not link.is_up and not link._tasks:
                break
    client.dispatch.close(ConnectionLost("over"))
    if not future.done():
        raise AssertionError("a call has no end")
    report.links += 1
    report.given_up += bool(client.lost)
    await link.close(bye=False)


def _is_whole(data: bytes) -> bool:
    try:
        frames, used = scan(memoryview(data))
    except ProtocolError:
        return False
    return len(frames) == 1 and used == len(data)


def fuzz_links(count: int, seed: int, report: Report) -> None:
    """Send so many mutated frames, ten to a connection, to a client with a call under way; each call must end."""

    async def all_of_them() -> None:
        chance, source = random.Random(seed), honest()
        for _ in range(count // 10):
            await _one_link(chance, source, report)

    asyncio.run(all_of_them())


def main(argv: Sequence[str] | None = None) -> int:
    """Run it, and print what it came to; 0 if all is well."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.frames", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, help="through the decoder and the border")
    parser.add_argument("--live", type=int, default=10_000, help="through live connections")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    report = Report()
    fuzz_border(args.frames, args.seed, report)
    fuzz_links(args.live, args.seed, report)
    print(report)
    return 0 if report.time_ratio < 1 and report.memory_ratio < 1 else 1


if __name__ == "__main__":
    sys.exit(main())
