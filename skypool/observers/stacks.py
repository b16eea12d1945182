"""Asks the nodes of a pool what their processes are doing, by the program `skypool.agent.stacks` there."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from skypool.errors import ConnectionLost, ProtocolError, SkypoolError
from skypool.text import one_line, printable
from skypool.wire.frames import check_json

_PATIENCE = 60.0
"""Seconds in which a node must answer."""
_NATIVE = 300.0
"""Seconds in which a node must answer if py-spy may have to be installed there first."""
_AT_ONCE = 16
"""The most nodes that are asked at the same time."""
_LONGEST = 4 << 20
"""The most bytes of a node's answer that are read. A node may be a stranger's."""
_LONGEST_COMPLAINT = 1 << 20
"""The most bytes of a node's error output that are read."""
_COMMAND = 120
"""The most characters that are shown of the command of a program."""
_LINE = 1000
"""The most characters that are shown of any other line of a node's answer."""
_SHOWN_LAST = ("idle", "waits for its program")
"""The states of processes that only wait. Such processes are shown after all others."""
_LARGEST_PID = 1 << 31
"""The limit that the id of a process must stay below."""


@dataclass(frozen=True, slots=True)
class ProcessStack:
    """The stacks of one process on a node, which say what it was doing. `str()` gives the text of `skypool stack`.

    Attributes:
        name: what the process is, such as "worker 0" or "rank 3". For a program that a call has started, its command.
        state: "running"; "idle" for a worker without a call; "waits for its program" if its call has started one. For a
            process that cannot write its stack, what the kernel says, such as "sleeps in do_wait".
        stacks: the calls of each Python thread, the innermost first. The main thread comes first.
        native: the stacks with native calls, as py-spy writes them; "" without `native=True`.
        problem: why there are no native calls; "" if there are some or none were asked for.
        rank: in a call of several processes, the rank of this process or of the one that started it; otherwise None.
    """

    node: int
    pid: int
    name: str
    state: str
    stacks: tuple[tuple[str, ...], ...] = ()
    native: str = ""
    problem: str = ""
    rank: int | None = None

    def __str__(self) -> str:
        """Return the lines that `skypool stack` prints about the process, without a last newline."""
        return "\n".join([self.heading, *self.lines])

    @property
    def heading(self) -> str:
        """The line that says which process it is, and its state if that is not "running"."""
        end = "" if self.state == "running" else f": {self.state}"
        whose = "" if self.rank is None or self.name == f"rank {self.rank}" else f"rank {self.rank}, "
        return f"node {self.node}, {whose}{self.name}, process {self.pid}{end}"

    @property
    def lines(self) -> list[str]:
        """The lines below the heading: the stacks of its threads, and what py-spy says."""
        lines: list[str] = []
        for number, frames in enumerate(self.stacks):
            if number:
                lines.append("  in another thread:")
            lines += [f"  {frame}" for frame in frames]
        if self.native:
            lines += ["  with native code, as py-spy says:", *(f"  {each}" for each in self.native.splitlines())]
        if self.problem:
            lines.append(f"  {self.problem}")
        return lines


@dataclass(frozen=True, slots=True)
class Stacks:
    """The stacks of the processes on a pool's nodes. `print` shows them as `skypool stack` does.

    Attributes:
        nodes: the processes of each node that answered, by the node's number.
        errors: why a node did not answer, by the node's number.
    """

    nodes: Mapping[int, tuple[ProcessStack, ...]]
    errors: Mapping[int, SkypoolError] = field(default_factory=dict[int, SkypoolError])

    def __str__(self) -> str:
        """Return the text of all processes, and a line for each node that did not answer.

        Processes of a gang with the same stacks come together. Processes that only wait (`_SHOWN_LAST`) come last.
        """
        alike: dict[tuple[object, ...], list[ProcessStack]] = {}
        for process in (each for processes in self.nodes.values() for each in processes):
            is_gang = process.rank is not None and bool(process.stacks)
            key = (*process.lines, process.state) if is_gang else (process.node, process.pid)
            alike.setdefault(key, []).append(process)
        for group in alike.values():
            group.sort(key=lambda each: each.rank or 0)
        groups = sorted(alike.values(), key=lambda group: group[0].state in _SHOWN_LAST)
        lines = [line for group in groups for line in (*(each.heading for each in group), *group[0].lines)]
        return "\n".join([*lines, *(str(error) for error in self.errors.values())])


def ask(pool: str, nodes: Sequence[int], native: bool, command: Callable[[int, str], list[str]]) -> Stacks:
    """Return what the processes of nodes are doing. Blocks until each node has answered or its time is over.

    A node must answer within 60 seconds, or within 300 seconds with `native`.

    Args:
        native: True also asks py-spy for native calls. The node may have to install it first.
        command: returns the local command that runs a shell script on a node, called as (node, script).
    """

    def one(node: int) -> tuple[ProcessStack, ...] | SkypoolError:
        try:
            return _asked(pool, node, native, command)
        except SkypoolError as e:
            return e
        except Exception as e:  # noqa: BLE001 - whatever fails for one node must not hide the others
            return ConnectionLost(f"node {node} of pool {pool!r} cannot be asked what it does: {type(e).__name__}: {e}")

    if not nodes:
        return Stacks({})
    with ThreadPoolExecutor(min(_AT_ONCE, len(nodes))) as threads:
        answers = dict(zip(nodes, threads.map(one, nodes), strict=True))
    return Stacks(
        {node: each for node, each in answers.items() if not isinstance(each, SkypoolError)},
        {node: each for node, each in answers.items() if isinstance(each, SkypoolError)},
    )


def _asked(pool: str, node: int, native: bool, command: Callable[[int, str], list[str]]) -> tuple[ProcessStack, ...]:
    """Return what a node's processes do. Raise SkypoolError if there is no such node, or it does not answer."""
    where = (files("skypool.observers") / "where_calls_run.sh").read_text("utf-8")
    program = (files("skypool") / "agent" / "stacks.py").read_bytes()
    argv = command(node, f'{where}exec "$python" -P - "$keeper" "$folder" {"native" if native else "python"}')
    patience = _NATIVE if native else _PATIENCE
    try:
        answer, complaint = _run(argv, program, patience)
    except TimeoutError as e:
        raise ConnectionLost(
            f"node {node} of pool {pool!r} did not say within {patience:g} s what it does: see `skypool ps`"
        ) from e
    except OSError as e:
        raise ConnectionLost(f"node {node} of pool {pool!r} cannot be asked what it does: {e}") from e
    if len(answer) > _LONGEST:
        raise ConnectionLost(
            f"node {node} of pool {pool!r} said more than {_LONGEST >> 20} MiB about what it does, which is not read; "
            f"`skypool shell {pool} --node {node}` and py-spy there show single processes"
        )
    try:
        return _processes(node, answer)
    except (ValueError, RecursionError, ProtocolError) as e:
        words = complaint[-2000:].decode("utf-8", "replace").strip().splitlines() or ["it gave no valid answer"]
        why = one_line(words[-1], _LINE)
        raise ConnectionLost(f"node {node} of pool {pool!r} cannot be asked what it does: {why}") from e


def _run(argv: Sequence[str], program: bytes, patience: float) -> tuple[bytes, bytes]:
    """Run a command with `program` as its input, at most `patience` seconds. Return its output and error output."""
    until = time.monotonic() + patience
    with tempfile.TemporaryFile() as given, selectors.DefaultSelector() as selector:
        given.write(program)
        given.seek(0)
        with subprocess.Popen(argv, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            out, err = process.stdout.fileno(), process.stderr.fileno()
            said = {out: bytearray(), err: bytearray()}
            for fd in said:
                selector.register(fd, selectors.EVENT_READ)
            try:
                while selector.get_map() and len(said[out]) <= _LONGEST and len(said[err]) <= _LONGEST_COMPLAINT:
                    ready = selector.select(max(0.0, until - time.monotonic()))
                    if not ready and time.monotonic() >= until:
                        raise TimeoutError
                    for key, _ in ready:
                        data = os.read(key.fd, 1 << 16)
                        said[key.fd] += data
                        if not data:
                            selector.unregister(key.fd)
            finally:
                process.kill()  # it has ended, is too late, or says too much
            return bytes(said[out]), bytes(said[err])


def _processes(node: int, answer: bytes) -> tuple[ProcessStack, ...]:
    """Return the processes in a node's answer, which is checked first: the node may be a stranger's."""
    check_json(answer)
    said = json.loads(answer)
    if type(said) is not list:
        raise ValueError(f"a node must answer with a list of processes, not {type(said).__name__}")
    return tuple(_process(node, each) for each in said)


def _process(node: int, said: object) -> ProcessStack:
    if type(said) is not dict:
        raise ValueError(f"a process must be a JSON object, not {type(said).__name__}")
    pid = said.get("pid")
    if type(pid) is not int or not 0 <= pid < _LARGEST_PID:
        raise ValueError("the id of a process is missing, or is no such id")
    rank = said.get("rank")
    if rank is not None and (type(rank) is not int or not 0 <= rank < _LARGEST_PID):
        raise ValueError("the rank of a process is no such number")
    stacks = said.get("stacks", [])
    if type(stacks) is not list or not all(type(frames) is list for frames in stacks):
        raise ValueError("the stacks of a process must be lists of lines")
    name = _text(said, "name")
    is_own = name.startswith("skypool-")
    what = name.removeprefix("skypool-").replace("rank-", "rank ") if is_own else _text(said, "command") or name
    return ProcessStack(
        node=node,
        pid=pid,
        name=one_line(what, _COMMAND),
        state=one_line(_text(said, "state"), _LINE),
        stacks=tuple(tuple(one_line(_checked(frame), _LINE) for frame in frames) for frames in stacks),
        native=printable(_text(said, "native")),
        problem=one_line(_text(said, "problem"), _LINE),
        rank=rank,
    )


def _text(said: Mapping[str, Any], name: str) -> str:
    return _checked(said.get(name, ""))


def _checked(value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"a text of a process is of the type {type(value).__name__}")
    return value
