"""Sets up a machine over SSH: connects, sends the script, the files and the secrets, and follows the steps to the end.

All of this uses one connection. At the end, the shell that ran the steps becomes the loader. Lines of the script that
begin with "@" tell skypool about its progress; all others are output of its steps. `skypool_images.script.assemble`
describes these lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import shlex
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files

from skypool import events
from skypool.errors import BootstrapError, ConnectionLost, HostBusy, HostKeyMismatch, LoginRefused, ProtocolError
from skypool.model import Access
from skypool.safety import private
from skypool.shipping import package_zip
from skypool.text import printable
from skypool.wire.transport import CommandStream, Transport, refusal
from skypool_images.file_archive import Packed

_BLOCK = 4096
"""Bytes that `dd` on the machine reads at a time. Everything that is sent is padded to a multiple of this number."""
_CHUNK = 256
"""Number of blocks (1 MiB in all) after which the machine asks its guard for more time.

The guard is the process that ends the machine when its lease is over. On a slow line, 1 MiB takes seconds.
"""
_TAIL = 30
"""Number of output lines of a step that an error shows."""
_LONGEST = 1 << 16
"""The greatest number of bytes of an unfinished line that are kept. After that, they are passed on as a line."""
_SHOWN = 4000
"""The most characters of a line that are kept and shown. The rest is cut off."""
_MOST_ADVICE = 20
"""The most pieces of advice that an error shows."""
_LONGEST_STEP = 200
"""The most characters of the name of a step."""
_MOST_WORDS = 20_000
"""The most lines that begin with "@" in one setup. A sign of life each second makes as many in five hours."""
_MANY = 50
"""If at least this many lines come at once, lines of output are joined and passed on together."""
_WORD = re.compile(rb"^(@.*)$", re.MULTILINE)
_MARK = re.compile(r"^\| ?", re.MULTILINE)
"""The beginning of a line of output."""
_KNOCK_TIMEOUT = 30.0
"""Seconds that a shell on the machine has to answer one attempt to connect."""
_KEPT_PAYLOADS = 3
"""The largest number of archives of files that stay on a machine, for images that come again."""
_KEPT_DAYS = 7
"""Days without use after which the next setup removes an archive."""
_KEPT_BYTES = 512 << 20
"""The largest size of these archives together. The one in use stays also if it is larger."""
_ALIVE = 5
"""Seconds between two signs of life that a machine prints during its setup."""
_SAY_EVERY = 1.0
"""Shortest time in seconds between two progress events about the files that are sent."""

Tell = Callable[[events.Event], None]


@dataclass(frozen=True, slots=True)
class SetupBundle:
    """The script, files, settings and secrets that turn one machine into a node.

    Attributes:
        payload: archive of the files that the script needs; None if it needs none.
        home: folder on the machine where the image's software is installed.
        settings: environment variables of the script.
        secrets: more environment variables of the script. They are sent over the connection, and are never in a file or
            a command line.
        guest: text with name and owner of the pool, if the pool takes the machine for itself. Other pools that try to
            use the machine get this text as an answer. "" if several pools may share the machine.
        guard: path of a file on a machine that ends itself. Each write to the file postpones that end. "" if the
            machine does not end itself in this way.
        lease: seconds from each such write until the machine ends itself.
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
        """Return the shell program that is sent to the machine first. It reads everything that follows from its stdin.

        It contains the settings, but no secrets and no files, and is padded with newlines to a fixed length. UsageError
        is raised if it is longer than that, for example because of long settings.
        """
        blocks = _blocks(_encoded(self.script))
        told = {
            "guest": self.guest,
            "guard": self.guard,
            "lease": math.ceil(self.lease),
            "settings": _exports(self.settings),
            "blocks": blocks,
            "size": blocks * _BLOCK,
            "hidden": _blocks(self._hidden),
            "payload": "",
            "kept_days": _KEPT_DAYS,
            "block": _BLOCK,
            "chunk": _CHUNK,
            "watch": _script("watch"),
            "every": self.alive,
            "loader": package_zip.LOADER,
        }
        if self.payload is not None:
            told["payload"] = self.payload.name
            told["payload_blocks"] = -(-self.payload.size // _BLOCK)
            told["payload_size"] = self.payload.size
            told["kept"], told["kept_bytes"] = _KEPT_PAYLOADS, _KEPT_BYTES
        home = f"SKYPOOL_HOME={package_zip.shell_path(self.home)}\n"
        return package_zip.staged(home + package_zip.assigned(told) + private.CLOSED + _script("setup"))

    @property
    def words(self) -> bytes:
        """The bytes that the first shell program reads from stdin: the script, then the secrets as shell code.

        Each of the two is padded with newlines to whole blocks of 4096 bytes.
        """
        return package_zip.padded(_encoded(self.script), _BLOCK) + package_zip.padded(self._hidden, _BLOCK)

    @property
    def _hidden(self) -> bytes:
        return _encoded(_exports(self.secrets))

    @property
    def alive(self) -> int:
        """Whole seconds between two signs of life that the machine prints.

        The value is 5. For a machine with a guard, it is at most a third of `lease`, but at least 1.
        """
        return min(_ALIVE, max(1, int(self.lease / 3))) if self.guard else _ALIVE


def _script(name: str) -> str:
    """Return a shell program of this package without comments, because the first message has a limited size."""
    lines = (files("skypool.provision") / "scripts" / f"{name}.sh").read_text("utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("#"))


def _exports(env: Mapping[str, str]) -> str:
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in env.items())


def _encoded(text: str) -> bytes:
    """Return a text as UTF-8 for a shell. Surrogates, in which Python keeps other bytes, become these bytes again."""
    return text.encode("utf-8", "surrogateescape")


def _blocks(data: bytes) -> int:
    return -(-len(data) // _BLOCK)


# --- reaching ------------------------------------------------------------------------------------------------


async def reach(access: Access, setup: SetupBundle | None, node: int) -> CommandStream:
    """Connect to a machine that may still be booting, and return the stream when a shell on the machine answers.

    Failed attempts are repeated with random pauses of up to 3 s, within the limits below. The limits count from the
    first attempt. If `setup` is None, nothing is to be set up, and the loader runs at the other end of the stream.

    Raises:
        LoginRefused: the login was still refused after `access.settling` seconds.
        ProtocolError: the machine still printed an unexpected first line after `access.settling` seconds.
        HostKeyMismatch: the host key was still wrong after `access.keying` seconds.
        HostBusy: the machine serves another pool. This is raised without further attempts.
        UsageError: the first shell program is too long. This is raised before the first attempt.
        ConnectionLost: nobody answered within `access.booting` seconds.
    """
    from tenacity import AsyncRetrying, RetryCallState, wait_random_exponential

    if setup is None:
        stage = package_zip.staged(f"echo @hello\n{package_zip.agent_starter(access.python or '', access.home)}")
    else:
        stage = setup.stage()
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
    stream: CommandStream = await attempts(_knock, access.transport, stage, node)
    return stream


async def _knock(transport: Transport, stage: bytes, node: int) -> CommandStream:
    stream = await asyncio.to_thread(CommandStream, transport.argv(package_zip.STAGE))
    stream.socket.setblocking(False)
    try:
        async with asyncio.timeout(_KNOCK_TIMEOUT):
            await asyncio.get_running_loop().sock_sendall(stream.socket, stage)
            line = await _line(stream)
    except BaseException as e:
        said = await asyncio.to_thread(stream.end)
        if isinstance(e, (OSError, EOFError)):
            raise refusal(transport, node, printable(said) or str(e) or "the machine did not answer in time") from e
        raise
    if line.startswith("@busy"):
        await asyncio.to_thread(stream.close)
        raise HostBusy(
            f"the machine of node {node} serves another pool: {line[6:]}; wait until that pool has ended, or use "
            "another machine. If the other pool's client is gone, the machine is free when that pool's lease= is over"
        )
    if line != "@hello":
        await asyncio.to_thread(stream.close)
        raise ProtocolError(
            f"the machine of node {node} answered {line[:200]!r}: its shell prints before a command begins; remove "
            f"what prints from the start files of the shell there (~/.bashrc, ~/.profile)",
            node,
        )
    return stream


async def _line(stream: CommandStream) -> str:
    """Read one line, and no byte beyond it. Cut a line that is too long. Raise EOFError if the stream ends early."""
    loop = asyncio.get_running_loop()
    got = bytearray()
    while not got.endswith(b"\n"):
        part = await loop.sock_recv(stream.socket, 1)
        if not part:
            raise EOFError(bytes(got).decode("utf-8", "replace"))
        got += part
        if len(got) > _SHOWN:
            break  # it is not the line that is expected
    return got.decode("utf-8", "replace").rstrip("\n")


# --- the steps -----------------------------------------------------------------------------------------------


async def bootstrap(stream: CommandStream, setup: SetupBundle, pool: str, node: int, silence: float, tell: Tell) -> str:
    """Run the setup script on a machine that `reach` connected, and return the path of the Python for the agent.

    Afterwards the loader runs at the other end of the stream. If the setup fails or is cancelled, the stream is closed.
    After `silence` seconds without output, at least 15, the machine is given up. `tell` gets an event for each step and
    each line of output, and during the sending of files.

    Raises:
        BootstrapError: a step failed.
        ConnectionLost: the connection broke or ended, or the machine was silent for too long.
    """
    course = _Course(pool, node, tell)
    try:
        async for line in _lines(stream, setup, course, max(silence, 3 * _ALIVE), node):
            word = course.hear(line)
            if word == "@want" and setup.payload is not None:
                await _send_files(stream, setup.payload, course, pool, node, tell)
            elif word == "@alive" and course.began:  # before that, it reads what is something else
                await _send(stream, package_zip.ALIVE, course, node)
            if course.python is not None:
                return course.python
        said = await asyncio.to_thread(stream.end)
        raise ConnectionLost(
            f"the connection to node {node} ended during its {course.where}; check that the machine still "
            f"runs. Last output: {printable(said) or course.last or 'none'}",
            node,
        )
    except BaseException:
        await asyncio.to_thread(stream.close)
        raise


async def _send(stream: CommandStream, data: bytes, course: _Course, node: int) -> None:
    """Send `data` to the machine. Return when the connection has accepted all bytes."""
    try:
        await asyncio.get_running_loop().sock_sendall(stream.socket, data)
    except OSError as e:
        raise ConnectionLost(
            f"the connection to node {node} ended during its {course.where}: {e}; check that the machine still runs",
            node,
        ) from e


async def _send_files(stream: CommandStream, files: Packed, course: _Course, pool: str, node: int, tell: Tell) -> None:
    """Send the archive of the image's files. Call `tell` with an event each second, and with one at the end."""
    sent = 0
    said = time.monotonic()
    while part := await asyncio.to_thread(files.read, sent):
        sent += len(part)
        await _send(stream, package_zip.padded(part, _BLOCK), course, node)
        if sent == files.size or time.monotonic() - said >= _SAY_EVERY:
            said = time.monotonic()
            tell(events.FilesProgress(pool=pool, node=node, done=sent, total=files.size))


async def _lines(
    stream: CommandStream, setup: SetupBundle, course: _Course, silence: float, node: int
) -> AsyncIterator[str]:
    """Send script and secrets, then yield the machine's lines. Raise ConnectionLost if none comes in `silence` s."""
    loop = asyncio.get_running_loop()
    got = bytearray()
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # what it said before its end is read below
            await loop.sock_sendall(stream.socket, setup.words)
        while True:
            part = b""
            with contextlib.suppress(ConnectionResetError):
                part = await _received(stream, silence)
            if not part:
                return
            got += part  # in place, as a copy for each of many small parts would take long
            end = got.rfind(b"\n", len(got) - len(part)) + 1
            if len(got) - end > _LONGEST:  # a long line is yielded in parts
                end = len(got)
            whole = bytes(got[:end])
            del got[:end]
            for line in _apart(whole):
                yield line.decode("utf-8", "replace")
    except TimeoutError as e:
        raise ConnectionLost(
            f"node {node} sent nothing for {silence:g} s during its {course.where}; check that the machine runs "
            "and can be reached",
            node,
        ) from e
    except OSError as e:
        raise ConnectionLost(
            f"the connection to node {node} ended during its {course.where}: {e}; check that the machine still runs",
            node,
        ) from e


async def _received(stream: CommandStream, silence: float) -> bytes:
    """Return what a machine has sent; b"" at the end. Raise TimeoutError if nothing comes in `silence` seconds.

    What came while this process was held up, as by SIGSTOP, counts although it is read later.
    """
    reading = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(stream.socket, 65536))
    try:
        await asyncio.wait([reading], timeout=silence)  # unlike `asyncio.timeout`, it drops nothing that has come
        if not reading.done():
            raise TimeoutError
        return reading.result()
    finally:
        reading.cancel()


def _apart(whole: bytes) -> Iterator[bytes]:
    """Yield the lines of a text, without newlines. If there are 50 or more, lines between "@" lines come together."""
    if whole.count(b"\n") < _MANY:
        yield from whole.removesuffix(b"\n").split(b"\n") if whole else ()
    else:
        yield from (each for part in _WORD.split(whole) if (each := part.strip(b"\n")))


class _Course:
    """The progress of one setup, read from the lines that the script prints. Each step is reported as an event."""

    def __init__(self, pool: str, node: int, tell: Tell) -> None:
        self._pool = pool
        self._node = node
        self._tell = tell
        self._step = ""
        self._number = 0
        self._steps = 0
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._advice: deque[str] = deque(maxlen=_MOST_ADVICE)
        self._words = 0
        self._path: str | None = None
        self.began = False
        self.python: str | None = None  # path of the interpreter for the agent, once all steps are done

    @property
    def where(self) -> str:
        return f"bootstrap, step {self._step}" if self._step else "bootstrap"

    @property
    def last(self) -> str:
        """The last lines that the current step printed, at most 30, joined by newlines."""
        return "\n".join(self._tail)

    def hear(self, line: str) -> str:
        """Process one line that the setup script printed, and return its first word, such as "@done".

        A line that does not begin with "@" is output of a step; "|" is returned for it.

        Raises BootstrapError if a step failed, and ProtocolError for lines that the script never prints.
        """
        if not line.startswith("@"):
            self._print(_MARK.sub("", printable(line)))
            return "|"
        self._words += 1
        try:
            if self._words > _MOST_WORDS:
                raise ValueError(f"its line number {self._words:,}")
            return self._obey(printable(line[:_SHOWN]))
        except ValueError as e:
            raise ProtocolError(f"the setup of node {self._node} printed {e}, which it never does", self._node) from e

    def _obey(self, said: str) -> str:
        word, _, rest = said.partition(" ")
        match word:
            case "@step":
                number, steps, step = rest.split(" ", 2)
                self._number, self._steps = _number(number), _number(steps)
                self._step = step[:_LONGEST_STEP]
                self._tail.clear()
                self._say("started")
            case "@skip":
                self._say("skipped")
            case "@done":
                self._say("done")
            case "@retry":
                _, attempt, pause = (each[:_LONGEST_STEP] for each in rest.split(" "))
                self._tail.clear()
                self._say("retried", f"attempt {attempt} failed; the next one begins in {pause} s")
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
                self._print(said)
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
        self._tail.extend(line[:_SHOWN] for line in (text.splitlines() or [""])[-_TAIL:])
        self._tell(events.BootstrapOutput(pool=self._pool, node=self._node, step=self._step, text=text))

    def _failure(self, rest: str) -> BootstrapError:
        step, status, command = [*rest.split(" ", 2), ""][:3]
        advice = "; ".join(self._advice)
        message = f"node {self._node}: step {step} failed with exit status {status}: {command.strip()}"
        message += "".join(f"\n  {line}" for line in self._tail)
        message += f"\nwhat to do: {advice}" if advice else ""
        return BootstrapError(
            message, step=step, command=command.strip(), status=_number(status), tail=self.last, advice=advice
        )


def _number(text: str) -> int:
    """Return a number that the setup script prints. Raises ValueError if it is none."""
    if not (text.isdecimal() and len(text) < 6):
        raise ValueError(f"{text[:80]!r} instead of a number")
    return int(text)
