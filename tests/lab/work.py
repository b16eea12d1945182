"""Functions that tests run on machines: in a module of their own, as a machine has no pytest."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import skypool as sky


@sky.compute
def note(n: int) -> int:
    """Leaves a line for each time it runs."""
    time.sleep(0.02)
    with open("/root/ran", "a") as file:
        file.write(f"{n}\n")
    return n * n


@sky.compute
def count_up(n: int) -> Iterator[int]:
    for i in range(n):
        time.sleep(0.005)
        yield i


@sky.compute
def long(seconds: float) -> str:
    time.sleep(seconds)
    return socket.gethostname()


@sky.compute
def until_told() -> str:
    """Where it ran, once the file "told" is in the folder of calls."""
    while not Path("told").exists():
        time.sleep(0.05)
    return socket.gethostname()


@sky.compute
def hostname() -> str:
    return socket.gethostname()


told: list[float] = []


def save(interruption: sky.Interruption) -> None:
    told.append(interruption.at)


@sky.compute(on_interruption=save)
def train_until_told() -> tuple[str, float]:
    """Where it ran, and when its machine is taken back."""
    while not told:
        time.sleep(0.01)
    return socket.gethostname(), told[0]


@sky.compute
def interpreter() -> str:
    return sys.executable


@sky.compute
def same(x: Any) -> Any:
    return x


@sky.compute
def size_of(x: Any) -> int:
    return len(x)


@sky.compute
def made_once(size: int) -> Any:
    """An array of so many bytes, made by the first call in each worker: what the others take is the way home alone."""
    return _made(size)


@cache
def _made(size: int) -> Any:
    import numpy as np  # only machines whose image has it

    return np.ones(size, dtype=np.uint8)


@sky.compute
def about() -> dict[str, Any]:
    """What there is where it runs."""
    import importlib.util
    import os

    devices = ("CUDA_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES", "TPU_")
    return {
        "numpy": importlib.util.find_spec("numpy") is not None,
        "env": {name: each for name, each in os.environ.items() if name.startswith(devices)},
        "host": socket.gethostname(),
    }


@sky.compute
def seen() -> tuple[str, int, int, str | None]:
    """The kind of its slot, how many of them there are, how many devices it sees, and by which variable."""
    import os

    info = sky.instance_info()
    return info.slot_kind, info.slots, len(info.accelerators), os.environ.get("CUDA_VISIBLE_DEVICES")


@sky.compute
def own_name() -> tuple[list[str], str, str, list[str]]:
    """What its own name leads to, its address, its hosts file, and the interfaces that libraries are told."""
    found = {str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)}
    named = [os.environ.get(f"{each}_SOCKET_IFNAME", "") for each in ("GLOO", "NCCL", "TP")]
    return sorted(found), sky.instance_info().address, Path("/etc/hosts").read_text(), named


@sky.compute
def meet_by_name() -> list[int]:
    """The nodes that everybody reaches, where each listens at the address of its own name."""
    import time
    from multiprocessing.connection import Client, Listener

    info = sky.instance_info()
    own = str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    with Listener((own, 29501), backlog=8) as mine:
        if info.is_head:
            with Listener((info.address, 29500), backlog=8) as meeting:
                peers = [meeting.accept() for _ in range(info.nodes - 1)]
                told = {0: own} | dict(peer.recv() for peer in peers)
                for peer in peers:
                    peer.send(told)
        else:
            until = time.monotonic() + 30
            while True:
                try:
                    head = Client((info.head_address, 29500))
                    break
                except OSError:  # the head is not there yet
                    assert time.monotonic() < until
                    time.sleep(0.1)
            head.send((info.node, own))
            told = head.recv()
        calls = [Client((told[node], 29501)) for node in sorted(told)]
        for call in calls:
            call.send(info.node)
        return sorted(mine.accept().recv() for _ in calls)


@sky.compute
def place() -> tuple[int, int]:
    """How many hosts its slice has, and how many chips."""
    info = sky.instance_info()
    return info.hosts, info.slice_chips


@sky.compute(retries=2)
def turn(path: str, seconds: float) -> int:
    """Say in a file that it runs here, and take so long."""
    import os
    import time

    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(seconds)
    return os.getpid()


@sky.compute
def sum_of_all(x: float) -> tuple[float, str]:
    """The sum of every node's `x`, which they tell each other; and this node's address."""
    import time
    from multiprocessing.connection import Client, Listener

    info = sky.instance_info()
    if info.is_head:
        with Listener((info.address, 29500)) as listener:
            others = [listener.accept() for _ in range(info.nodes - 1)]
            total = x + sum(other.recv() for other in others)
            for other in others:
                other.send(total)
        return total, info.address
    for _ in range(100):
        try:
            with Client((info.head_address, 29500)) as head:
                head.send(x)
                return head.recv(), info.address
        except ConnectionRefusedError:  # the head is not there yet
            time.sleep(0.1)
    raise TimeoutError(f"nobody answers at {info.head_address}")


@sky.compute
def serve_a_page(port: int) -> None:
    """Answer every web request to a port of 127.0.0.1 with "there", until the call is cancelled."""
    import http.server

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"there")

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Page) as server:
        server.serve_forever()


@sky.compute(procs=1)
def names() -> tuple[str, list[str], str]:
    """The name of this machine, the addresses of the names in its hosts file, and what torchrun announces."""
    lines = [line.split() for line in Path("/etc/hosts").read_text().splitlines() if "another node" in line]
    found = [f"{name} {socket.gethostbyname(name)}" for _, name, *_ in lines]
    return socket.gethostname(), found, os.environ.get("PET_LOCAL_ADDR", "")


@sky.compute
def words_of(path: str) -> int:
    return len(Path(path).read_text().split())


@sky.compute
def files_here() -> list[str]:
    return sorted(str(each) for each in Path().rglob("*") if each.is_file())


@sky.compute
def link_here(path: str) -> str:
    return os.readlink(path)


@sky.compute
def imported(*names: str) -> list[Any]:
    """The WORD of each module, or its name."""
    return [getattr(importlib.import_module(each), "WORD", each) for each in names]


@sky.compute
def write_saved(name: str, size: int) -> list[str]:
    """Write a file into the folder "out", and return all that are there."""
    path = Path("out", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    return sorted(str(each.relative_to("out")) for each in Path("out").rglob("*") if each.is_file())


@sky.compute
def files_and_modes(folder: str) -> dict[str, tuple[int, int]]:
    """Return the size and the permissions of each file below a folder, by its path there."""
    root = Path(folder).expanduser()
    found = {str(each.relative_to(root)): each.stat() for each in root.rglob("*") if each.is_file()}
    return {path: (each.st_size, each.st_mode & 0o7777) for path, each in found.items()}


@sky.compute
def saved_content(name: str) -> bytes:
    return Path("out", name).read_bytes()


@sky.compute(output="silent")
def keep_writing(log: str, name: str, sizes: Sequence[int], rate: float, burst: int, seconds: float, on: bool) -> None:
    """Write files into the folder "out", and note each in a log: before it is there, and when it is.

    Args:
        name: what the names of the files begin with.
        sizes: the bytes of each file, from the first on again after the last.
        rate: the bytes in a second.
        burst: the bytes that are written at once when `seconds` are over.
        on: True to go on writing then, and False to return.
    """
    import hashlib
    import json

    Path("out").mkdir(exist_ok=True)
    began = time.monotonic()
    written = number = 0

    def note(**said: Any) -> None:
        with open(log, "ab", buffering=0) as file:
            file.write(json.dumps({**said, "at": time.monotonic()}).encode() + b"\n")

    def write() -> int:
        nonlocal number
        data = os.urandom(sizes[number % len(sizes)])
        path = Path("out", f"{name}-{number:05}")
        number += 1
        note(does="write", name=path.name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        path.with_suffix(".part").write_bytes(data)
        path.with_suffix(".part").rename(path)
        note(does="wrote", name=path.name, size=len(data))
        return len(data)

    while on or burst > 0:
        if time.monotonic() - began >= seconds and burst > 0:
            while burst > 0:
                burst -= write()
            note(does="burst")
        else:
            written += write()
            time.sleep(max(0.0, written / rate - (time.monotonic() - began)))


def tell_end(interruption: sky.Interruption) -> None:
    Path("out/told").write_text(f"{interruption.reason} {interruption.left:.1f}")


@sky.compute(on_interruption=tell_end)
def wait_for_end() -> None:
    """Write into the folder "out" what is told of the end of the machine."""
    Path("out").mkdir(exist_ok=True)
    Path("out/begun").touch()
    time.sleep(600)


@sky.compute(procs=2, output="silent")
def keep_checkpoints(log: str, pause: float, ahead: int) -> int:
    """Write checkpoints into the folder "ckpt" until the file "stop" is in a folder, and note there what is found.

    No rank is more steps ahead of what is safe than allowed. At a notice that a machine is taken back, all save a
    checkpoint of one step, and do no more. Returns the last step.
    """
    import json

    from tests.lab.checkpoint_contents import files_of, trouble_of

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start = (
        f"{os.environ['TORCHELASTIC_RUN_ID']} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ['MASTER_PORT']}"
    )
    Path(log).mkdir(parents=True, exist_ok=True)
    store = sky.Checkpoints("ckpt", keep=3)

    def said(what: str, began: float, **more: Any) -> None:
        line = {"what": what, "start": start, "rank": rank, "world": world, "t0": began, "t1": time.monotonic(), **more}
        with open(f"{log}/rank-{rank}", "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def asked(what: str) -> Any:
        until = time.monotonic() + 150
        while True:
            began = time.monotonic()
            try:
                found = getattr(store, what)()
            except sky.SkypoolError as e:
                said("error", began, of=what, why=str(e))
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
            else:
                return began, found

    def latest() -> int:
        began, found = asked("latest")
        if found is None:
            said("latest", began, step=None, by=None, wrong="")
            return 0
        files = {
            str(each.relative_to(found.path)): each.read_bytes() for each in found.path.rglob("*") if each.is_file()
        }
        by, wrong = trouble_of(files, found.step, rank, world)
        said("latest", began, step=found.step, by=by, wrong=wrong)
        return int(found.step)

    def save(step: int, wait: bool = False) -> bool:
        began = time.monotonic()
        try:
            with store.save(step, wait) as folder:
                for name, data in files_of(start, step, rank, world).items():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(data)
        except OSError as e:  # the disk is full
            said("error", began, of="save", why=f"{type(e).__name__}: {e}")
            return False
        return True

    first = step = latest()
    safe: int | None = None
    while not Path(log, "stop").exists():
        time.sleep(pause)
        began, safe = asked("safe")
        said("safe", began, step=safe, first=first)
        if step - max(first, safe or 0) >= ahead:
            continue
        notice = sky.interruption(step + 1)
        if notice is not None and notice.reason == "provider":
            while not save(step + 1, wait=True):
                time.sleep(pause)
            said("noticed", began, step=step + 1)
            time.sleep(600)
        if save(step + 1):
            step += 1
            if step % 10 == 3 + rank:  # the answer stays the same
                latest()
    last = int(Path(log, "stop").read_text())
    while not save(last, wait=True):
        time.sleep(pause)
    said("end", time.monotonic(), step=last)
    return last
