"""Runs a program with its project on the nodes of a pool."""

from __future__ import annotations

import codecs
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from skypool import events
from skypool.calls.call import Call, compute
from skypool.calls.futures import CallFuture
from skypool.compute_pool.compute_pool import ComputePool
from skypool.data.data_asked import DataFolder, on_node
from skypool.data.save_asked import SaveFolder
from skypool.errors import (
    CommandFailed,
    ConnectionLost,
    ProtocolError,
    SkypoolError,
    TransferError,
    UsageError,
    together,
)
from skypool.files import transfer
from skypool.files.entries import Entry, walk
from skypool.files.progress import Progress
from skypool.files.project import unsent_of
from skypool.files.transfer import NodeEnd
from skypool.pool.saving import Saving
from skypool.pool.states import Phase
from skypool.pool.watch import Watches
from skypool.runs import environment, node_folders, node_program, unsaved_files
from skypool.runs.follow import Follower, stop
from skypool.runs.own_thread import in_thread
from skypool.runs.target import Target
from skypool.text import one_line, printable
from skypool.wire.save_orders import DRAIN, FolderState

_AFTER = 30.0
"""Seconds after which output is given up that does not come any more after a program's end."""
_AFTER_AN_ERROR = 8.0
"""Seconds in which all output must have come if the call was stopped or has failed: its grace and a little more."""
_TO_LOOK = 5.0
"""The most seconds in which nodes look for files that are not fetched."""
_MOST_COUNTED = 100_000
"""The most files that are counted, as a hostile node could name files without end."""
_WAKES = 1.0
"""Seconds after which the main thread wakes. A signal that comes just before Python waits does not wake it."""
_LONGEST = 600.0
"""Seconds in which all output must have come after a program's end."""


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """A program that is prepared on its nodes, as a call that can be sent.

    Attributes:
        words: the program and its arguments.
        places: the project's folder and that of the programs of its environment, by node, as `node_program.run` takes
            them. The program runs on these nodes.
        folder: the folder below the project's in which the program starts.
        env: variables of its environment.
        output: the folder of its output files, below that of the node. Each process has a folder below it.
        procs: the number of processes on each node of a gang; None for one process on the only node.
        on_notice: the name of the signal at a notice.
        secrets: the values that are masked in the output files, by their names.
        is_call: True for a call of a `@compute` function, which `words` name.
    """

    words: tuple[str, ...]
    places: Mapping[int, tuple[str, str]]
    folder: str
    env: Mapping[str, str] = field(repr=False)
    output: str
    procs: int | None
    on_notice: str
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    is_call: bool = False

    def sent(self, pool: ComputePool, attempt: int = 0) -> CallFuture[Any]:
        """Send the call to its nodes in a pool, and return its future: of the exit status, or a list of those of ranks.

        Args:
            attempt: the number of this start of the program, if the run belongs to its own machine; 0 if it does not.
        """
        call = compute(node_program.run, output="silent")(
            self.words, self.places, self.folder, self.env, self.output, self.procs is not None, self.on_notice,
            dict(self.secrets), self.is_call,
        )  # fmt: skip
        if self.procs is not None:
            call = call.with_options(procs=self.procs)
        call.options = call.options.of_attempt(attempt) if attempt else call.options
        nodes = [*self.places]
        return pool.send(call, node=nodes if self.procs is not None else nodes[0])


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """The project on a node, before its program starts.

    Attributes:
        copy: the folder of the project there.
        since: when the program began, in nanoseconds by the clock of the node's file system.
        known: the file of the node with what was there then.
        saved: the folders below the project that are fetched or saved, or hold data.
    """

    copy: str
    since: int
    known: str
    saved: tuple[str, ...]


@dataclass
class ProgramRun:
    """A run of a program on a pool that has started.

    Args:
        pool: the pool, whose nodes have one slot.
        target: the program.
        nodes: the number of nodes, or slices. On more than one machine, the program runs as a gang.
        write: called with each piece of output: the rank, the number of the stream, and the bytes. May block.
        tell: called with what the user must know about output that is missing.
        on_end: called when the program has ended, before its last output is awaited.
        packages: packages besides those of the project.
        env: variables of the program's environment.
        include: paths of the project that are sent in any case.
        procs: the number of processes on each node; None for one program on the only node.
        saved: the folder that `fetch` will be asked for, below that in which the program starts; "" for none.
        buckets: the folders that are kept in buckets. Paths begin where the program starts.
        complete: what is written last into a checkpoint, as `ComputePool` takes it.
        note: called with what is good to know.
        data: the folders that are filled from buckets. Relative paths begin where the program starts.
        on_notice: the signal for the program when its machine ends soon, as `node_program.run` takes it.
        only: the place, counted from 0, of the only node that gets the project and the program; None for all.

    Attributes:
        is_interrupted: True if a signal has come.
        is_hurried: True if a second one has come, so that nothing more is fetched.
        returncode: the exit status of the program, or the negative number of the signal that ended it; None before it.
        limit: what the program was interrupted for: "budget" or "lifetime"; "" if it was not.
    """

    pool: ComputePool
    target: Target
    nodes: int
    write: Callable[[int, int, bytes], None]
    tell: Callable[[str], None]
    on_end: Callable[[], object]
    packages: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    include: Sequence[str] = ()
    procs: int | None = None
    saved: str = ""
    buckets: Sequence[SaveFolder] = ()
    complete: Sequence[str] = ()
    note: Callable[[str], object] = lambda text: None
    only: int | None = None
    data: Sequence[DataFolder] = ()
    on_notice: str = ""
    is_interrupted: bool = field(default=False, init=False)
    is_hurried: bool = field(default=False, init=False)
    returncode: int | None = field(default=None, init=False)
    limit: str = field(default="", init=False)
    _watches: Watches = field(init=False)
    _saving: Saving = field(init=False)
    _colours: bool = True
    _running: CallFuture[Any] | None = None
    _output: str = field(default_factory=lambda: f"output/{secrets.token_hex(4)}", init=False)
    _followers: Sequence[Follower] = ()
    _ends: list[NodeEnd] = field(default_factory=list["NodeEnd"])
    _since: dict[int, int] = field(default_factory=dict[int, int])
    _places: dict[str, list[int]] = field(default_factory=dict[str, "list[int]"])
    _known: dict[int, str] = field(default_factory=dict[int, str])
    _names: set[str] = field(default_factory=set[str])
    _stack: ExitStack = field(default_factory=ExitStack)
    _decoders: dict[tuple[int, int], codecs.IncrementalDecoder] = field(
        default_factory=dict[tuple[int, int], codecs.IncrementalDecoder]
    )

    def __enter__(self) -> ProgramRun:
        """Keep the ways to the nodes, so that files come also from a node that is about to end."""
        self._watches = self.pool._sender.working().watches
        self._colours = not self.is_stranger
        self._saving = self.pool._sender.working().saving
        ends = self._stack.enter_context(self.pool._sender.transfer("the files of a program", None))
        if self.only is not None and self.only >= len(ends):
            self._stack.close()
            raise UsageError(f"there is no node {self.only} among {len(ends)}; nodes are counted from 0")
        self._ends = ends if self.only is None else [ends[self.only]]
        procs = self.procs or 1
        self._followers = [
            Follower(
                replace(end, spare=_nothing) if each else end,  # the other connection that is open is for the files
                f"{self._output}/{each}",
                partial(self.write, number * procs + each),
                self.is_gang,
            )
            for number, end in enumerate(self._ends)
            for each in range(procs)
        ]
        self.pool._sender.working().node_count.resize(0, self.nodes)  # lost nodes are not replaced
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            stop(self._followers)

    def send(self, entries: Sequence[Entry] | None = None) -> None:
        """Send the project to the nodes, while those who read the output connect to them.

        Args:
            entries: what is sent, if the project was looked at just now. Default None: look at it.

        Raises:
            TransferError: files could not be read here or written there.
            ConnectionLost: a node is lost, or what it answered makes no sense (ProtocolError).
        """
        for each in self._followers:
            each.start()
        nodes = [end.node for end in self._ends]
        if self._saving.has(nodes):  # for an earlier run that was given up
            self._beside(partial(self._saving.end, nodes))
        project = self.target.project
        claim = compute(node_folders.claimed, output="silent")(f"{project.root.name or 'project'}-{project.key}")
        copies = self._values([claim] * len(self._ends))
        if not all(isinstance(each, str) for each in copies):
            raise _nonsense(copies)
        self._ends = [replace(end, folder=copy) for end, copy in zip(self._ends, copies, strict=True)]
        self._let_in([""] * len(self._ends))
        noted: list[Entry] = []

        def listed() -> Iterator[Entry]:
            if not noted:
                found = entries or [*walk(str(project.root), unsent_of(project, self.include))]
                sent = {each.path: each.mtime for each in found if each.kind != "d"}
                # before they come, so that none is forgotten; what is not sent any more, such as a file with secrets
                # that was included once, must not stay there
                self._on_all(node_folders.note_sent, sent, not self.is_stranger)
                noted.extend(found)
            yield from noted

        try:
            transfer.push(self._ends, str(project.root), "", patience=self._patience, entries=listed)
        except TransferError as e:
            if not e.failures:
                raise
            self.tell(f"{e}; the program starts without")  # such as a log that another program writes

    def _on_all(self, function: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call a function on each node, with the project's folder there as first argument. Return the values."""
        called = compute(function, output="silent")
        return self._values([called(end.folder, *arguments) for end in self._ends])

    def _values(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Return the values of one call for each of `_ends`. What a node itself raises is told as a SkypoolError."""
        futures = [self.pool.send(call, node=end.node) for call, end in zip(calls, self._ends, strict=True)]
        values = []
        for end, future in zip(self._ends, futures, strict=True):
            try:
                values.append(future.result())
            except (SkypoolError, CancelledError):
                raise
            except Exception as e:
                raise TransferError(f"node {end.node}: {type(e).__name__}: {e}", end.node) from e
        return values

    @property
    def _patience(self) -> float:
        return self.pool._sender.patience

    def prepare(self) -> dict[int, str]:
        """Make the project's environment on each node, and note that the program begins.

        Return the folder of the environment's programs by node; "" for none.

        Raises:
            SkypoolError: the environment cannot be made. The message has the end of what the installer printed.
        """
        project = self.target.project
        packages = [*project.packages, *self.packages]
        try:
            made = self._on_all(environment.prepared, project.source, project.python, packages, dict(project.versions))
        except CommandFailed as e:
            source = project.source or ("the packages that are asked for" if packages else "its version of Python")
            raise SkypoolError(f"the environment of the program cannot be made from {source}: {e}") from e
        if not all(isinstance(each, str) for each in made):
            raise _nonsense(made)
        self._let_in(made)
        self._begin()
        self._bring_back()
        return {end.node: folder for end, folder in zip(self._ends, made, strict=True)}

    def _let_in(self, programs: Sequence[str]) -> None:
        """Let `skypool push`, `pull` and `shell` begin where the program does, with the programs of its environment."""
        connections = self.pool._sender.working().connections
        for end, folder in zip(self._ends, programs, strict=True):
            connections.work_in(end.node, os.path.join(end.folder, self.target.folder), folder)

    def _begin(self) -> None:
        """Note on each node what is there: what the program writes from now on is new."""
        mark = secrets.token_hex(4)
        saved = os.path.join(self.target.folder, self.saved) if self.saved else ""
        self._on_all(node_folders.mark, mark)
        left = 0
        for end, said in zip(self._ends, self._on_all(node_folders.begun, mark, saved), strict=True):
            match said:
                case (int() as since, str() as place, str() as known, int() as files):
                    self._since[end.node], self._known[end.node] = since, known
                    self._places.setdefault(place, []).append(end.node)
                    left = max(left, files)
                case _:
                    raise _nonsense(said)
        if left:
            self.note(
                f"the machine has {left} file{'s' * (left != 1)} of an earlier run in {self.saved}, which the program "
                f"finds; to remove them there, run `rm -r {self.saved}` in place of the program"
            )

    def _bring_back(self) -> None:
        """Bring the folders that are kept in buckets back, and have them saved from now on."""
        if not self.buckets:
            return
        savers = [next(end for end in self._ends if end.node == nodes[0]) for nodes in self._places.values()]

        def begin(number: int) -> None:
            end = savers[number]
            folders = {
                os.path.normpath(os.path.join(end.folder, self.target.folder, each.path)): each for each in self.buckets
            }
            self._saving.begin(end.node, folders, number, len(savers), self.complete, DRAIN)

        self._beside(*(partial(begin, number) for number in range(len(savers))))

    def fill(self) -> None:
        """Have all nodes fill the folders of data. Return when all is there. Raises as `Saving.fill` does."""

        def fill(end: NodeEnd) -> None:
            base = os.path.join(end.folder, self.target.folder)
            self._saving.fill(end.node, {on_node(base, each.path): each for each in self.data})

        self._beside(*(partial(fill, end) for end in self._ends))

    @staticmethod
    def _beside(*works: Callable[[], object]) -> None:
        """Run functions in threads that end with this process, and wait for them. A signal interrupts that."""
        for done in [in_thread(each, "skypool-save") for each in works]:
            await_end(done)
            done.result()

    def save_rest(self) -> list[FolderState]:
        """Have what is left of the folders saved that are kept in buckets. Return the state of each."""
        if not self.buckets:
            return []
        if self.is_hurried:
            self._saving.give_up()
        nodes = [end.node for end in self._ends]
        try:
            self._beside(partial(self._saving.end, nodes, calm=self.returncode == 0))
        except BaseException:
            self._saving.give_up()
            raise
        mine = {each.path for each in self.buckets}
        return [each for (_, id_), each in sorted(self._saving.states().items()) if id_ in mine]

    def logins_last(self) -> float:
        """Return the seconds for which nodes reach their buckets if nobody renews their logins; infinite for ever."""
        states = self._saving.states().values()
        issuers = {each.path: each.issuer for each in self.buckets if each.issuer is not None}
        left = (issuers[each.id].lasts(each.credentials) for each in states if each.id in issuers)
        return min(left, default=math.inf)

    @property
    def is_stranger(self) -> bool:
        """True if a node belongs to a stranger, whose output must not change the terminal."""
        engine = self.pool._sender.working()
        return any(engine.trust_levels.is_known_stranger(each) for each in self.pool.nodes)

    @property
    def is_gang(self) -> bool:
        """True if the program runs in several processes."""
        return len(self._ends) > 1 or self.procs is not None

    def run(self, programs: Mapping[int, str]) -> int:
        """Run the program, and return its exit status as a shell tells it: 128 + n after signal n.

        Nodes that are lost from now on are not replaced, as the program would not go on there.

        Args:
            programs: the folder of the programs of the project's environment by node, as from `prepare`.

        Raises:
            CommandFailed: the program cannot be started.
            SkypoolError: the run has failed for another reason, such as a lost node or a spent budget.
        """
        try:
            status = self._followed(self.call(programs))
        except CommandFailed as e:
            if e.returncode is None:
                raise
            status = status_in(e.returncode)
        self.returncode = status
        return exit_status(status)

    def call(self, programs: Mapping[int, str]) -> ProgramCall:
        """Return the program as a call. `programs` is from `prepare`."""
        words = list(self.target.words)
        if words[0] == "python" and not any(programs.values()):
            words[0] = "python3"
        places = {end.node: (end.folder, programs[end.node]) for end in self._ends}
        procs = (self.procs or 1) if self.is_gang else None
        return ProgramCall(
            tuple(words), places, self.target.folder, dict(self.env), self._output, procs, self.on_notice
        )

    def log(self, rank: int, stream: int, data: bytes) -> None:
        """Keep output, which has no secrets any more, in the logs of the pool. Each process has a thread of its own."""
        self._watches.hear(self.printed(rank, stream, data), is_hidden=True)  # it is shown in another way

    def printed(self, rank: int, stream: int, data: bytes) -> events.Output:
        """Return output as it is kept in logs."""
        decoder = self._decoders.setdefault((rank, stream), codecs.getincrementaldecoder("utf-8")("replace"))
        number, slot = divmod(rank, self.procs or 1)
        return events.Output(
            pool=self.pool.name, node=self._ends[number].node, slot=slot, call=0, stream=stream,
            function=self.target.name, text=printable(decoder.decode(data), colours=self._colours),
            rank=rank if self.procs else None,
        )  # fmt: skip

    def interrupt(self) -> None:
        """Interrupt the program. `run` then raises CancelledError. Any thread may call this."""
        if self._running is not None:
            self._running.cancel()

    def fetch(self, local: Path, settled: bool) -> int:
        """Fetch what the program has written into `saved`, and return how many files it has written since it began.

        With `settled`, a file that is being written does not replace a larger one here.

        The folder of the first node goes to `local`, those of others to `node-1` and so on below it. Nodes without the
        folder are left out.

        Raises:
            SkypoolError: files could not be fetched from some nodes; those of the others were.
        """
        there = os.path.normpath(os.path.join(self.target.folder, self.saved))
        state = self.pool._sender.working().life.state
        errors: list[SkypoolError] = []

        def pull(end: NodeEnd, target: Path) -> None:
            since, known = self._since[end.node], self._known[end.node]
            try:
                fetch_from(end, there, target, self._names, since, known, settled, self._patience)
            except SkypoolError as e:
                errors.append(e)

        pulls = []
        for nodes in self._places.values():  # nodes with one folder have the same files
            living = [each for each in nodes if state.nodes[each].phase is not Phase.ENDED]
            if not living:
                errors.append(ConnectionLost(f"node {nodes[0]} has ended", nodes[0]))
                continue
            place = next(number for number, end in enumerate(self._ends) if end.node == nodes[0])
            end = next(each for each in self._ends if each.node == living[0])
            target = local / f"node-{place}" if place else local
            pulls.append(threading.Thread(target=pull, args=(end, target), name="skypool-pull", daemon=True))
        for each in pulls:  # side by side, as one that is lost must not hold up the others
            each.start()
        for each in pulls:
            each.join()
        if errors:
            raise errors[0] if len(errors) == 1 else together("files could not be fetched from some nodes", errors)
        return len(self._names)

    def left_behind(self) -> LeftBehind:
        """Return what is needed to fetch from the only node when the pool is not ours any more."""
        [end] = self._ends
        return LeftBehind(end.folder, self._since[end.node], self._known[end.node], tuple(self._left(end)))

    def _left(self, end: NodeEnd) -> list[str]:
        """Return the folders below the project on a node that are fetched or saved, or hold data."""
        folders = (
            [each.path for each in self.buckets] + [each.path for each in self.data] + [self.saved] * bool(self.saved)
        )
        states = self._saving.states().items()
        asides = [each.aside for (node, _), each in states if each.aside and node == end.node]
        return [os.path.normpath(os.path.join(self.target.folder, each)) for each in folders] + [
            os.path.relpath(each, end.folder) for each in asides
        ]

    def unsaved(self) -> list[tuple[str, int]]:
        """Return large files that the program wrote into the project outside of `saved`, as (path, bytes).

        Waits 5 s at most. A node that does not answer has no such files.
        """
        found: list[tuple[str, int]] = []
        until = time.monotonic() + _TO_LOOK
        asked = []
        for nodes in self._places.values():
            place, end = next((place, end) for place, end in enumerate(self._ends) if end.node == nodes[0])
            look = compute(unsaved_files.unsaved, output="silent")(end.folder, self._since[end.node], self._left(end))
            with suppress(SkypoolError):  # it is lost
                asked.append((place, self.pool.send(look, node=end.node)))
        for place, future in asked:
            try:
                said = future.result(max(0.0, until - time.monotonic()))
            except (SkypoolError, TimeoutError):  # it is lost, or takes too long
                continue
            except Exception as e:  # noqa: BLE001 - whatever a hostile node answers is no failure of the run
                self.tell(f"node {place} does not say which large files are not saved: {type(e).__name__}")
                continue
            where = f" of node {place}" if len(self._ends) > 1 else ""
            for each in said if type(said) is list else ():
                match each:
                    case (str() as path, int() as size) if 0 <= size < 1 << 60:
                        found.append((f"{one_line(path, 200)}{where}", size))
        return found

    def end_by_limit(self) -> None:
        """Interrupt the program, as the budget or lifetime ends the machines soon."""
        self.limit = self.pool._sender.working().rental.limits.nearer
        self.interrupt()

    def end_earlier(self, seconds: float) -> None:
        """Have the program end so many seconds before nodes save what is left, because of budget or lifetime."""
        self.pool._sender.working().limits.for_programs = seconds

    def until_end(self) -> float:
        """Return the seconds until the program is interrupted because of budget or lifetime; infinite for no limit."""
        return self.pool._sender.working().limits.until_stop()

    def seconds_left(self) -> float:
        """Return the seconds until the budget or lifetime ends the machines; infinite for no limit."""
        limits = self.pool._sender.working().rental.limits
        return min(limits.left(), limits.lifetime_left)

    def _followed(self, call: ProgramCall) -> int:
        """Run a call of the program, pass on its output until its end, and return its status."""
        patience = _AFTER_AN_ERROR
        try:
            there = self.pool._sender.working().dispatch.roster.nodes()
            if missing := [end.node for end in self._ends if end.node not in there]:
                raise ConnectionLost(f"node {missing[0]} was lost before the program began", missing[0])
            self._running = call.sent(self.pool)
            await_end(self._running)
            value = self._running.result()
            patience = _AFTER
        except CommandFailed as e:  # the program itself has
            patience = _AFTER
            rank = getattr(e, "rank", None)  # of a gang, the process that has failed first
            if rank is not None and len(self._ends) * (self.procs or 1) > 1 and e.returncode is not None:
                first, _, _ = str(e).partition("\n")
                self.note(f"rank {rank}: {first}; the other processes were ended")
            raise
        except BaseException as e:
            self.is_interrupted = isinstance(e, (KeyboardInterrupt, SystemExit))
            self.interrupt()  # after Ctrl-C the program ends by itself, and its last output is awaited
            raise
        finally:
            self.on_end()
            try:
                if self._running is not None:
                    self._finish(patience)
            except BaseException:
                self.is_hurried, self.is_interrupted = self.is_interrupted, True
                raise
        statuses: list[Any] = value if self.is_gang else [value]
        return next(filter(None, map(status_in, statuses)), 0)

    def _finish(self, patience: float) -> None:
        """Wait for the end of all output, and tell what is missing."""
        began = time.monotonic()
        until = began + (_LONGEST if patience == _AFTER else patience)
        for rank, each in enumerate(self._followers):
            is_whole = each.finish(began, patience, until)
            if each.missing:
                self.tell(f"some output of rank {rank} is missing: {each.missing}")
            elif not is_whole:
                self.tell(f"the end of the output of rank {rank} did not come: its last lines may be missing")


def fetch_from(
    end: NodeEnd, there: str, target: Path, names: set[str], since: int, known: str, settled: bool, patience: float
) -> None:
    """Fetch the new files of a folder of a node, and add their names to `names`. No such folder has none.

    Args:
        since, known: as `transfer.pull` takes them.
        settled: True to leave a file that is being written for a later time if the one here is larger.
        patience: seconds without progress after which the node is given up.

    Raises SkypoolError if files could not be fetched.
    """
    progress = _Names(names, target)
    try:
        transfer.pull(
            end,
            there,
            str(target),
            patience=patience,
            progress=progress,
            since=since,
            known=known,
            settled=settled,
            no_git=True,
        )
    except SkypoolError as e:
        if not str(e).endswith(f"{there}: No such file or directory"):
            raise
    except OSError as e:
        raise TransferError(f"{target}: {e}", end.node) from e


def exit_status(status: int) -> int:
    """Return the status of a process as shells tell it: 128 + n if signal n ended the process, which is -n here."""
    return status if status >= 0 else 128 - status


def await_end(future: Future[Any]) -> None:
    """Wait until a future is done. A signal interrupts this."""
    while not wait([future], _WAKES).done:
        pass


def _nothing(script: str) -> None:
    """Return no connection that is open already."""


def status_in(said: object) -> int:
    """Return the exit status that a node has told, below 0 for a signal. Raises ProtocolError if it is none."""
    if type(said) is not int or not -64 <= said <= 255:
        raise _nonsense(said)
    return said


def _nonsense(said: object) -> ProtocolError:
    return ProtocolError(f"a node has answered {said!r:.100}, which makes no sense")


class _Names(Progress):
    """Collects the names of the files that have come, or were here already."""

    def __init__(self, names: set[str], folder: Path) -> None:
        super().__init__()
        self._into, self._folder = names, folder

    def begin(self, path: str) -> None:
        super().begin(path)
        self.same(path)

    def same(self, path: str) -> None:
        if len(self._into) < _MOST_COUNTED:
            self._into.add(str(self._folder / path))
