"""Connects to a booted machine by ssh, sends script, files and secrets, and follows the steps until a node is ready.

One connection does it all: the shell that runs the steps becomes the agent's loader. What the script says is described
in `skypool_images.steps.assemble`.
"""

from __future__ import annotations

import asyncio
import math
import shlex
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files

from skypool import events
from skypool.errors import BootstrapError, ConnectionLost, HostBusy, HostKeyMismatch, LoginRefused, ProtocolError
from skypool.model import Access
from skypool.shipping import bundle
from skypool.trust import printable
from skypool.wire.transport import CommandStream, Transport, refusal
from skypool_images.payload import Packed

_BLOCK = 4096
"""Bytes: what is sent comes in whole blocks, so that `dd` reads these and nothing behind them."""
_CHUNK = 256
"""Blocks that are read at once; after each chunk the machine's guard is asked for time."""
_TAIL = 30
"""Lines of a step's output that an error shows."""
_LONGEST = 1 << 20
"""Bytes of one line that are kept while its end has not come."""
_KNOCK_TIMEOUT = 30.0
"""Seconds in which a machine that accepts our connection has to run its first command."""
_ALIVE = 5
"""Seconds between two signs of life of a machine."""
_SAY_EVERY = 1.0
"""Seconds between two events about the files that are sent."""

Tell = Callable[[events.Event], None]


@dataclass(frozen=True, slots=True)
class SetupBundle:
    """The script, files, settings and secrets that make one machine a node.

    Attributes:
        script: of `skypool_images`; payload: the archive of the files that go with it, None for none.
        settings: environment of the script; secrets: more of it, which goes from the stream into that alone.
        guest: who takes the machine for itself, "" where several may share it.
        guard: the file by which the machine's own end is put off, "" for none; lease: for how many seconds.
    """

    script: str
    payload: Packed | None = None
    home: str = "~/.skypool"
    settings: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    guest: str = ""
    guard: str = ""
    lease: float = 0.0

    def stage(self) -> bytes:
        """Return the shell text that is sent first: `scripts/setup.sh`, and what it is told."""
        blocks = _blocks(self.script.encode())
        told = {
            "guest": self.guest,
            "guard": self.guard,
            "lease": math.ceil(self.lease),
            "settings": _exports(self.settings),
            "blocks": blocks,
            "size": blocks * _BLOCK,
            "hidden": _blocks(self._hidden),
            "payload": "",
            "block": _BLOCK,
            "chunk": _CHUNK,
            "watch": _script("watch"),
            "every": self.alive,
            "loader": bundle.LOADER,
        }
        if self.payload is not None:
            told["payload"] = self.payload.name
            told["payload_blocks"] = -(-self.payload.size // _BLOCK)
            told["payload_size"] = self.payload.size
        home = f"SKYPOOL_HOME={bundle.shell_path(self.home)}\n"
        return bundle.staged(home + bundle.assigned(told) + _script("setup"))

    @property
    def words(self) -> bytes:
        """What the stage reads first: the script, and the secrets behind it."""
        return bundle.padded(self.script.encode(), _BLOCK) + bundle.padded(self._hidden, _BLOCK)

    @property
    def _hidden(self) -> bytes:
        return _exports(self.secrets).encode()

    @property
    def alive(self) -> int:
        """Seconds between two signs of life."""
        return min(_ALIVE, max(1, int(self.lease / 3))) if self.guard else _ALIVE


def _script(name: str) -> str:
    """Return the text of a file in `scripts`."""
    return (files("skypool.provision") / "scripts" / f"{name}.sh").read_text("utf-8")


def _exports(env: Mapping[str, str]) -> str:
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in env.items())


def _blocks(data: bytes) -> int:
    return -(-len(data) // _BLOCK)


# --- reaching ------------------------------------------------------------------------------------------------


async def reach(access: Access, setup: SetupBundle, node: int) -> CommandStream:
    """Connect to a machine that may still boot; comes back when a shell there answers.

    Raises:
        HostKeyMismatch, LoginRefused, ProtocolError: when its boot had its time for that; the last one means that
            something prints before a command there begins. HostBusy: it serves another pool.
        ConnectionLost: nobody answered within `access.booting`.
    """
    from tenacity import AsyncRetrying, RetryCallState, wait_random_exponential

    began = time.monotonic()

    def over(state: RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome else None
        limits: dict[type | None, float] = {
            LoginRefused: access.settling, ProtocolError: access.settling, HostKeyMismatch: access.keying,
        }  # fmt: skip
        return time.monotonic() - began >= limits.get(type(error), access.booting)

    def passing(state: RetryCallState) -> bool:
        return isinstance(state.outcome.exception() if state.outcome else None, ConnectionLost)

    attempts = AsyncRetrying(stop=over, wait=wait_random_exponential(0.1, 3.0), retry=passing, reraise=True)
    stream: CommandStream = await attempts(_knock, access.transport, setup.stage(), node)
    return stream


async def _knock(transport: Transport, stage: bytes, node: int) -> CommandStream:
    stream = await asyncio.to_thread(CommandStream, transport.argv(bundle.STAGE))
    stream.socket.setblocking(False)
    try:
        async with asyncio.timeout(_KNOCK_TIMEOUT):
            await asyncio.get_running_loop().sock_sendall(stream.socket, stage)
            line = await _line(stream)
    except BaseException as e:
        said = await asyncio.to_thread(stream.end)
        if isinstance(e, (OSError, EOFError)):
            raise refusal(transport, node, printable(said) or str(e) or "it did not answer in time") from e
        raise
    if line.startswith("@busy"):
        await asyncio.to_thread(stream.close)
        raise HostBusy(
            f"the machine of node {node} serves another pool: {line[6:]}; it is free when that pool ends, or its lease "
            f"does; leave it out until then"
        )
    if line != "@hello":
        await asyncio.to_thread(stream.close)
        raise ProtocolError(
            f"the machine of node {node} answered {line[:200]!r}: something prints before a command there begins; see "
            f"its shell's start files (~/.bashrc, ~/.profile)",
            node,
        )
    return stream


async def _line(stream: CommandStream) -> str:
    """One line, and no byte after it."""
    loop = asyncio.get_running_loop()
    got = bytearray()
    while not got.endswith(b"\n"):
        part = await loop.sock_recv(stream.socket, 1)
        if not part:
            raise EOFError(bytes(got).decode("utf-8", "replace"))
        got += part
    return got.decode("utf-8", "replace").rstrip("\n")


# --- the steps -----------------------------------------------------------------------------------------------


async def bootstrap(stream: CommandStream, setup: SetupBundle, pool: str, node: int, silence: float, tell: Tell) -> str:
    """Run the script on a machine that `reach` connected; its stream then is that of the agent's loader.

    Args:
        stream: closed if this fails.
        silence: seconds without a word after which the machine is given up, but some of its signs of life at least.
        tell: hears every step and what it prints.

    Returns:
        the interpreter that runs the agent.

    Raises:
        BootstrapError: a step failed. ConnectionLost: the machine went away.
    """
    course = _Course(pool, node, tell)
    send = asyncio.get_running_loop().sock_sendall
    try:
        async for line in _lines(stream, setup, course, max(silence, 3 * _ALIVE), node):
            word = course.hear(line)
            if word == "@want" and setup.payload is not None:
                await _send_files(stream, setup.payload, pool, node, tell)
            elif word == "@alive" and course.began:  # before that, it reads what is something else
                await send(stream.socket, bundle.ALIVE)
            if course.python is not None:
                return course.python
        said = await asyncio.to_thread(stream.end)
        raise ConnectionLost(
            f"node {node} went away in its {course.where}: {printable(said) or course.last or 'it ended'}", node
        )
    except BaseException:
        await asyncio.to_thread(stream.close)
        raise


async def _send_files(stream: CommandStream, files: Packed, pool: str, node: int, tell: Tell) -> None:
    """Send the archive of the image's files piece by piece, and say about once a second how far that is."""
    sent = 0
    said = time.monotonic()
    while part := await asyncio.to_thread(files.read, sent):
        sent += len(part)
        await asyncio.get_running_loop().sock_sendall(stream.socket, bundle.padded(part, _BLOCK))
        if sent == files.size or time.monotonic() - said >= _SAY_EVERY:
            said = time.monotonic()
            tell(events.FilesProgress(pool=pool, node=node, done=sent, total=files.size))


async def _lines(
    stream: CommandStream, setup: SetupBundle, course: _Course, silence: float, node: int
) -> AsyncIterator[str]:
    """Send the script; what is said then, until the other end closes."""
    loop = asyncio.get_running_loop()
    got = b""
    try:
        await loop.sock_sendall(stream.socket, setup.words)
        while True:
            async with asyncio.timeout(silence):
                part = await loop.sock_recv(stream.socket, 65536)
            if not part:
                return
            *lines, got = (got + part).split(b"\n")
            if len(got) > _LONGEST:
                lines = [*lines, got]
                got = b""
            for line in lines:
                yield line.decode("utf-8", "replace")
    except TimeoutError as e:
        raise ConnectionLost(f"node {node} fell silent in its {course.where} (for {silence:g} s)", node) from e
    except OSError as e:
        raise ConnectionLost(f"node {node} went away in its {course.where}: {e}", node) from e


class _Course:
    """Where a bootstrap is, by the lines it says."""

    def __init__(self, pool: str, node: int, tell: Tell) -> None:
        self._pool = pool
        self._node = node
        self._tell = tell
        self._step = ""
        self._number = 0
        self._steps = 0
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._advice: list[str] = []
        self._path: str | None = None
        self.began = False
        self.python: str | None = None

    @property
    def where(self) -> str:
        return f"bootstrap, step {self._step}" if self._step else "bootstrap"

    @property
    def last(self) -> str:
        """The last lines that were printed."""
        return "\n".join(self._tail)

    def hear(self, line: str) -> str:
        """Take in a line; what it was: its first word.

        Raises:
            BootstrapError: it says that a step failed.
        """
        said = printable(line)
        word, _, rest = said.partition(" ")
        match word:
            case "@step":
                number, steps, self._step = rest.split(" ", 2)
                self._number = int(number)
                self._steps = int(steps)
                self._tail.clear()
                self._say("started")
            case "@skip":
                self._say("skipped")
            case "@done":
                self._say("done")
            case "@retry":
                _, attempt, pause = rest.split(" ")
                self._tail.clear()
                self._say("retried", f"attempt {attempt} failed; the next one in {pause} s")
            case "@advice":
                self._advice.append(rest)
            case "@fail":
                raise self._failure(rest)
            case "@python":
                self._path = rest
            case "@go":
                self.python = self._path
            case "@boot":
                self.began = True
            case "@ready" | "@alive" | "@have" | "@want" | "@hello":
                pass
            case _:
                self._print(rest if word == "|" else said)
        return word

    def _say(self, state: str, detail: str = "") -> None:
        step = events.BootstrapStep(
            pool=self._pool,
            node=self._node,
            step=self._step,
            state=state,
            number=self._number,
            steps=self._steps,
            detail=detail,
        )
        self._tell(step)

    def _print(self, text: str) -> None:
        self._tail.append(text)
        self._tell(events.BootstrapOutput(pool=self._pool, node=self._node, step=self._step, text=text))

    def _failure(self, rest: str) -> BootstrapError:
        step, status, command = [*rest.split(" ", 2), ""][:3]
        advice = "; ".join(self._advice)
        message = f"node {self._node}: step {step} failed with exit status {status}: {command.strip()}"
        message += "".join(f"\n  {line}" for line in self._tail)
        message += f"\nwhat to do: {advice}" if advice else ""
        return BootstrapError(
            message, step=step, command=command.strip(), status=int(status), tail=self.last, advice=advice
        )
