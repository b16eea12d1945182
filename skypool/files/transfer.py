"""Sends files from this computer to nodes (`push`), and fetches files from a node (`pull`)."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from skypool.errors import ConnectionLost, SkypoolError, TransferError, UsageError
from skypool.files.entries import Entry, entry_of, walk
from skypool.files.frames import Broken, Channel, Refused
from skypool.files.ignored import Ignored
from skypool.files.progress import Progress, Stopped
from skypool.files.receiving import Receiver
from skypool.files.sending import Sender
from skypool.link.reach import local_command, script_on
from skypool.link.spares import Spares
from skypool.model import Access
from skypool.shipping.package_zip import NOT_FROM_HERE
from skypool.text import plain
from skypool.wire.transport import CommandStream, Transport, refusal

_MODULES = ("frames", "entries", "safe_writing", "open_files", "receiving", "sending", "node_end")
"""The modules of a node's end of a transfer."""
_LONGEST_PAUSE = 8.0
"""The longest pause in seconds between two connections."""
_FRUITLESS = 10
"""The number of attempts in a row in which nothing moves, after which there is no other."""


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """The way of a transfer to a node.

    Attributes:
        node: the number of the node.
        transport: tells what the messages of a local command mean.
        command: returns the local command that runs a shell script on the node, with the variables of
            `reach.local_command`.
        spare: starts a shell script on the node through a connection that is open already; None if there is none.
        folder: the folder of the node in which relative paths begin; "" for that in which calls run.
    """

    node: int
    transport: Transport
    command: Callable[[str], Sequence[str]]
    spare: Callable[[str], CommandStream | None] = lambda script: None
    folder: str = ""

    def stream(self, script: str) -> CommandStream:
        """Start a shell script on the node, and return the connection to it. Raises OSError if that fails here."""
        return self.spare(script) or CommandStream(self.command(script))

    @contextlib.contextmanager
    def opened(self, role: str, path: str, **options: int) -> Iterator[CommandStream]:
        """Start the node's end, which works at `path`, and yield the connection to it."""
        if self.folder:
            path = os.path.normpath(os.path.join(self.folder, path))
        loader, program = node_program(*(f"files.{each}" for each in _MODULES))
        words = shlex.join([str(len(program)), role, path, json.dumps(options)])
        script = f'cd "$cwd" && exec "$python" -c {shlex.quote(loader)} {words} 3>&1 1>&2'
        try:
            stream = self.stream(script)
        except OSError as e:
            raise ConnectionLost(f"node {self.node} cannot be reached: {e.filename}: {e.strerror}", self.node) from e
        try:
            with contextlib.suppress(OSError):  # the transfer will find out, and tell why
                stream.socket.sendall(program)
            yield stream
        finally:
            stream.shut()
            stream.close()


@cache
def node_program(*modules: str) -> tuple[str, bytes]:
    """Return a program for a node's Python, and what it reads from stdin first: modules, too long for a command.

    Args:
        modules: the names of these modules of skypool, such as "files.frames", each after those that it imports. The
            last one has a function `main`, which is called with the arguments of the program but the first. The first
            argument is the number of bytes to read.
    """
    texts = {}
    for each in modules:
        package, _, name = each.rpartition(".")
        texts[f"skypool.{each}"] = (files("skypool") / package / f"{name}.py").read_text("utf-8")
    loader = (files("skypool") / "files" / "node_loader.py").read_text("utf-8")
    return NOT_FROM_HERE + loader, zlib.compress(json.dumps(texts).encode())


def end_of(node: int, access: Access, python: str, spares: Spares | None = None) -> NodeEnd:
    """Return the end of a node that is reached in this way, or through one of the connections `spares`."""

    def spare(script: str) -> CommandStream | None:
        return None if spares is None else spares.take(node, script_on(access, python, script))

    return NodeEnd(node, access.transport, lambda script: local_command(access, python, script), spare)


@dataclass(frozen=True, slots=True)
class Transferred:
    """The account of a transfer.

    Attributes:
        files: the number of files that were sent or fetched, in sum over the nodes. Files that were there already, or
            had come before the last connection was lost, do not count.
        bytes: the bytes in them that went over the connection.
        deleted: the number of files, folders and links that were deleted.
        seconds: how long it took.
    """

    files: int
    bytes: int
    deleted: int
    seconds: float


def push(
    ends: Sequence[NodeEnd],
    local: str,
    remote: str,
    *,
    patience: float,
    delete: bool = False,
    checksum: bool = False,
    progress: Progress | None = None,
    entries: Callable[[], Iterator[Entry]] | None = None,
) -> Transferred:
    """Send a file or a folder to nodes, side by side.

    Args:
        ends: the nodes.
        local: the file or folder.
        remote: the folder on the nodes, or the path of the file.
        patience: seconds without progress after which a node is given up.
        delete: delete what the folder on a node has and the local one lacks.
        checksum: compare the contents of all files of equal size.
        progress: is kept up to date.
        entries: yields what is sent of a folder, as `walk` does. Default None: what `.gitignore` and `.skypoolignore`
            do not leave out.

    Raises:
        UsageError: there is no such file or folder here.
        ConnectionLost: a node cannot be reached.
        TransferError: some files could not be read here, or written there.
    """
    began = time.monotonic()
    local = os.path.abspath(os.path.expanduser(local))
    if not os.path.exists(local):
        raise UsageError(f"{local} does not exist; name a file or folder of this computer")
    name = "" if os.path.isdir(local) else os.path.basename(local)
    local = os.path.realpath(local)
    ignored = Ignored(local)
    shown = Progress() if progress is None else progress
    done: dict[int, dict[str, Any]] = {}
    refused: dict[int, Refused] = {}
    tries = _Tries(patience, shown)
    while left := [each for each in ends if each.node not in done and each.node not in refused]:
        with contextlib.ExitStack() as open_streams:
            streams = [
                open_streams.enter_context(
                    each.opened("receive", remote, delete=delete, checksum=checksum, again=tries.again)
                )
                for each in left
            ]
            channels = [Channel(each.socket.fileno(), each.socket.fileno()) for each in streams]
            sender = Sender(
                channels,
                local,
                name,
                [entry_of(name, local)] if name else walk(local, ignored) if entries is None else entries(),
                leaves_out=ignored,
                delete=delete,
                on_want=shown.want,
                on_file=shown.begin,
                on_bytes=shown.move,
            )
            try:
                sender.run()
            except SkypoolError:  # of `entries`; some are an OSError, too
                raise
            except OSError as e:
                raise UsageError(f"{e.filename or local} cannot be read: {e.strerror}") from e
            except Stopped as e:
                raise _cause(e) from None
            finally:
                for each in streams:
                    each.shut()
                sender.stop()
            again: list[int] = []
            for index, end in enumerate(left):
                error = sender.lost.get(index)
                if index in sender.ends:
                    done[end.node] = sender.ends[index]
                elif isinstance(error, Refused):
                    refused[end.node] = error
                else:
                    again.append(index)
            if again:
                first = again[0]
                tries.pause(left[first], streams[first], channels[first], sender.lost[first])
    for node, error in refused.items():
        raise TransferError(f"node {node}: {plain(str(error))}", node) from error
    for node, said in done.items():
        _check(node, said)
    return Transferred(
        sum(each["files"] for each in done.values()),
        sum(each["bytes"] for each in done.values()),
        sum(each["deleted"] for each in done.values()),
        time.monotonic() - began,
    )


def pull(
    end: NodeEnd,
    remote: str,
    local: str,
    *,
    patience: float,
    delete: bool = False,
    checksum: bool = False,
    progress: Progress | None = None,
    since: int | None = None,
    known: str = "",
    settled: bool = False,
    no_git: bool = False,
) -> Transferred:
    """Fetch a file or a folder from a node. The arguments and errors are as of `push`.

    Nothing that the node says leads out of `local`: such paths and links are refused. With `delete`, what `.gitignore`
    and `.skypoolignore` leave out stays.

    Args:
        since: fetch only what is new since this time, in nanoseconds by the clock of the node's file system, and leave
            out what cannot be used here, such as git checkouts.
        known: the file of the node with what was there then, as `node_folders.begun` makes it. What was moved there is
            new, too.
        settled: with `since`, leave a file that is being written for a later time if the one here is larger.
        no_git: refuse git checkouts, whose settings may name programs that git would start here.
    """
    began = time.monotonic()
    local = os.path.expanduser(local)
    shown = Progress() if progress is None else progress
    tries = _Tries(patience, shown)
    while True:
        options: dict[str, Any] = {} if since is None else {"since": since, "known": known, "settled": settled}
        with end.opened("send", remote, **options) as stream:
            channel = Channel(stream.socket.fileno(), stream.socket.fileno())
            receiver = Receiver(
                channel,
                local,
                name=os.path.basename(remote.rstrip("/")),
                delete=delete,
                keeps=Ignored(os.path.abspath(local)) if delete else None,
                checksum=checksum,
                inside=True,
                again=tries.again,
                no_git=no_git,
                settled=settled,
                on_want=shown.want,
                on_file=shown.begin,
                on_same=shown.same,
                on_bytes=shown.move,
            )
            try:
                said = receiver.run()
                break
            except Stopped as e:
                raise _cause(e) from None
            except Refused as e:
                raise TransferError(f"node {end.node}: {plain(str(e))}", end.node) from e
            except Broken as e:
                lost = e
            finally:
                stream.shut()
                channel.join()
            tries.pause(end, stream, channel, lost)
    _check(end.node, said)
    return Transferred(said["files"], said["bytes"], said["deleted"], time.monotonic() - began)


def name_of(path: str) -> str:
    """Return the last name of a path. Raises UsageError if it has none, as `..`."""
    name = os.path.basename(os.path.normpath(path))
    if name in ("", ".", "..", "~"):
        raise UsageError(f"{path!r} does not end with a name; say where its contents are to go")
    return name


def _cause(stopped: Stopped) -> BaseException:
    """Return the error of the user's function."""
    return stopped.__cause__ or stopped


def _check(node: int, said: dict[str, Any]) -> None:
    """Raise TransferError if some files are missing."""
    count = said["failed"]
    if count:
        failures = [plain(each) for each in said["errors"]]
        more = f"; and {count - 3} more" if count > 3 else ""
        raise TransferError(
            f"{count} of the files are not there (node {node}): {'; '.join(failures[:3])}{more}. All others are",
            node,
            failures,
        )


class _Tries:
    """The attempts of one transfer. Another one follows until nothing has moved for `patience` seconds.

    Attributes:
        again: True for every attempt but the first.
    """

    def __init__(self, patience: float, progress: Progress) -> None:
        self._patience = patience
        self._progress = progress
        self.again = False
        self._moved = 0
        self._since = time.monotonic()
        self._pause = 0.25
        self._silent = False
        self._fruitless = 0

    def pause(self, end: NodeEnd, stream: CommandStream, channel: Channel, why: Exception) -> None:
        """Wait before the next attempt. Raises ConnectionLost if there is none."""
        said = stream.end() or str(why)
        error = ConnectionLost(f"the connection to node {end.node} was lost: {said}", end.node)
        if channel.came is not None:
            self._since = max(self._since, channel.came)
        else:
            error = refusal(end.transport, end.node, said)
            if type(error) is not ConnectionLost:
                raise error from why  # another login or host key will not come
        if self._progress.bytes > self._moved:
            self._moved, self._since, self._pause = self._progress.bytes, time.monotonic(), 0.25
            self._fruitless = 0
        self._fruitless += 1
        late = time.monotonic() + self._pause - self._since > self._patience
        if self._fruitless > _FRUITLESS or (late and (channel.came is None or self._silent)):
            raise error from why
        self._silent = late
        self.again = True
        time.sleep(self._pause)
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
