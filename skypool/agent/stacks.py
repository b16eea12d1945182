"""Reads the Python stacks of a node's workers, and of the processes that they started: what they are doing now.

A worker writes its own stack in a signal handler, which runs also while native code does not return. This needs no
rights and no further program. The stack goes to a file in memory, which the user's other processes can read.

This file is also a program for `skypool stack`, which runs it on a node without skypool: it imports only the standard
library. Its arguments are the pid of the keeper, the node's folder, and "native" or "python".
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import itertools
import json
import os
import re
import signal
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

SIGNAL = signal.SIGRTMIN + 9
"""The signal on which a worker writes its stack. Programs of users hardly use it."""
_NAME = "skypool-stack-"
"""The name of the file in memory, before the id of the process's main thread."""
_MOST = 1 << 20
"""The size in bytes from which the file is emptied before the next stack is written to it."""
_FRAME = re.compile(r'^  File "(.*)", line (\S+) in (.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*:$", re.MULTILINE)
_SPIED = re.compile(r"^    (\S.*?) \((.*):(\d+)\)$")
_WORKER = "/skypool/agent/worker.py"
"""The end of the path of the module that runs calls in a worker."""
_PROGRAMS = "/skypool/calls/program.py", "/skypool/runs/node_program.py"
"""The ends of the paths of the modules with which a call runs a program, as `sky.cmd` and `skypool run` do."""
_RUNNER = "skypool.runs.runner"
"""A part of the command of the process that owns a run on its machine."""
_WAITING = "_next_call"
"""The function of the module `worker` that waits for the next call."""
_WRITING = 1.0
"""Seconds in which a process must have written its stack. Native code that may not be interrupted takes longer."""
_FIRST = 64
"""The number of files of a process among which the file with its stack is looked for."""
_COMMAND = 200
"""The most characters of a program's command in an error."""
_STILL = 0.02
"""Seconds without further text after which a stack counts as complete."""
WAITS_FOR_PROGRAM = "waits for its program"
"""The state of a worker, or a process of a gang, that has started a program, as for `sky.cmd`."""
_RANK = "skypool-rank-"
"""The name of a process of a gang, before its rank."""
_NATIVE = 30.0
"""Seconds that py-spy may take for one process."""
_INSTALLING = 120.0
"""Seconds that the installation of py-spy may take."""


class Mark:
    """Place in the file into which a worker writes its stacks. The stack that it writes next begins there.

    A file of more than 1 MiB is emptied first.

    Args:
        fd: the file descriptor of the file. This object closes it.
        main: the id of the worker's main thread.

    Attributes:
        file: the file's inode number. A worker and the processes that it forks write into one file.
        start: the position of the place in the file, in bytes.
    """

    def __init__(self, fd: int, main: int) -> None:
        self.fd = fd
        self.main = main
        if os.fstat(fd).st_size > _MOST:
            os.ftruncate(fd, 0)
        found = os.fstat(fd)
        self.file = found.st_ino
        self.start = self._seen = found.st_size

    def is_written(self) -> bool:
        """Return True if a stack was written, and the file has not grown since the last call of this method."""
        size = os.fstat(self.fd).st_size
        is_same = size == self._seen
        self._seen = size
        return is_same and size > self.start

    def text(self) -> str:
        """Return what was written since this object was made, at most 1 MiB, in the format of `faulthandler`."""
        return os.pread(self.fd, _MOST, self.start).decode("utf-8", "replace")

    def close(self) -> None:
        """Close the file. May be called more than once."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    __del__ = close


class ProgramMark:
    """Record of what a program that a call has started, such as "python train.py", is doing now.

    Making this object asks the program's process to write its stack, and does not wait. `asked` has the inode numbers
    of files into which other processes are writing now: a process with such a file is not asked. The number of this
    process's file is added to `asked`.

    Attributes:
        command: the command line of the process, at most 200 characters.
        state: what the kernel says about the process, such as "sleeps in do_wait".
        mark: the place where it writes its stack; None if it writes none.
    """

    def __init__(self, pid: int, asked: set[int]) -> None:
        self.command = command(pid)[:_COMMAND]
        self.state = kernel_state(pid)
        self.mark = ask(pid, asked)
        if self.mark is not None:
            asked.add(self.mark.file)

    def text(self) -> str:
        """Return the program's command, and the innermost lines of its main thread's stack; "" if it wrote no stack."""
        lines = short(self.mark) if self.mark is not None else ""
        return f"{self.command}:\n{lines}" if lines else ""

    def close(self) -> None:
        """Close the file into which the program writes."""
        if self.mark is not None:
            self.mark.close()


def register() -> None:
    """Let this process write the stacks of its threads on `SIGNAL`. Call this in the main thread of a worker."""
    fd = os.memfd_create(f"{_NAME}{threading.get_ident():x}", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # so that anybody may empty it
    faulthandler.register(SIGNAL, file=fd, all_threads=True)


def ask(pid: int, asked: Collection[int] = ()) -> Mark | None:
    """Ask a worker, or a process that a call has started, to write its stack. Does not wait.

    Returns the place in the file where the stack will be. Returns None, and sends no signal, if the process has no
    handler for the signal, has closed the file, or writes into a file of `asked`. These are the inode numbers of files
    into which other processes are writing now.
    """
    found = _file_of(pid)
    if found is None or not _catches(pid):
        return None
    path, main = found
    mark = None
    try:
        mark = Mark(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK), main)
        if mark.file not in asked:
            os.kill(pid, SIGNAL)
            return mark
    except OSError:  # it has ended, has closed or sealed the file, or is another user's now
        pass
    if mark is not None:
        mark.close()
    return None


def _file_of(pid: int) -> tuple[str, int] | None:
    """Return the path of the file in which a process writes its stack, and the id of its main thread."""
    # only the first `_FIRST` files, as a process may have a million
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in itertools.islice((entry.name for entry in os.scandir(folder)), _FIRST):
            with contextlib.suppress(OSError, ValueError):  # a file of the user's may have a name like ours
                link = os.readlink(f"{folder}/{name}")
                if link.startswith(f"/memfd:{_NAME}"):
                    return f"{folder}/{name}", int(link.split()[0].rpartition("-")[2], 16)
    return None


def _catches(pid: int) -> bool:
    """Return True if a process has a handler for `SIGNAL`. Without one, the signal would kill it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def threads_of(text: str, main: int) -> list[list[str]]:
    """Return the stacks in a text of `faulthandler`, that of the main thread first.

    Each stack is a list of lines such as 'File "train.py", line 12 in step', the innermost first. Lines of skypool that
    run the call are left out, and so are threads that have no other lines. So the result is [] for a worker that waits
    for a call. `main` is the id of the main thread. If the text has several stacks of a thread, because an earlier
    request was answered late, the last one counts.
    """
    starts = list(_THREAD.finditer(text))
    found: dict[str, tuple[bool, list[str]]] = {}
    for each, end in zip(starts, [*(following.start() for following in starts[1:]), len(text)], strict=False):
        part = text[each.end() : end]
        frames = [frame.groups() for frame in _FRAME.finditer(part)]
        own = next((n for n, (file, _, _) in enumerate(frames) if file.endswith(_WORKER)), len(frames))
        frames = frames[: max(own, int(own == 0 and bool(frames) and frames[0][2] != _WAITING))]
        is_main = int(each[1], 16) == main
        while not is_main and frames and frames[-1][0].endswith("/threading.py"):
            frames.pop()
        found.pop(each[1], None)
        if frames:
            found[each[1]] = not is_main, [f'File "{file}", line {line} in {name}' for file, line, name in frames]
    return [lines for _, lines in sorted(found.values(), key=lambda each: each[0])]


def runs_program(threads: list[list[str]]) -> bool:
    """Return True if these stacks are those of a worker that waits for a program which its call has started."""
    return bool(threads) and any(each in threads[0][-1] for each in _PROGRAMS)


def short(mark: Mark, most: int = 6) -> str:
    """Return the `most` innermost lines of the main thread's stack that a process has written.

    Returns "" if the process has written none, or if it is a worker that waits for a program.
    """
    found = threads_of(mark.text(), mark.main)
    return "\n".join(found[0][:most]) if found and not runs_program(found) else ""


def kernel_state(pid: int) -> str:
    """Return what a process is doing according to the kernel, in words such as "sleeps in do_wait"."""
    state = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1]
    words = {"R": "runs", "S": "sleeps", "D": "waits for a device", "T": "is stopped", "t": "is traced"}
    where = _read(f"/proc/{pid}/wchan").strip()
    said = words.get(state[0] if state else "", "has ended")
    return f"{said} in {where}" if where not in ("", "0") else said


def command(pid: int) -> str:
    """Return the command line of a process; "" if it has none."""
    return _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()


# --- the program for `skypool stack` -------------------------------------------------------------------------


def main(keeper: int, folder: str, native: bool) -> None:
    """Print one line of JSON with what each process of a node is doing: a list of objects, waiting workers last.

    `keeper` is the keeper's pid, and `folder` the node's folder. With `native`, the objects also have the frames of
    native code, which py-spy reads. If py-spy is missing, it is installed in the node's folder.
    """
    there = _below(keeper)
    stacks = _all_stacks(list(there))
    spy, why = _spy(folder, native)
    found = []
    for pid, (_, name) in there.items():
        told = {"pid": pid, "name": name, "command": command(pid), "rank": _rank(there, pid), "stacks": []}
        threads = stacks.get(pid)
        if threads is not None and not threads:
            told |= {"state": "idle"}
        elif threads is not None and runs_program(threads):
            told |= {"state": WAITS_FOR_PROGRAM}
        elif threads is not None:
            told |= {"state": "running", "stacks": threads}
        else:
            told |= {"state": kernel_state(pid)}
            if spy and not native and _is_python(pid) and (threads := _spied(_dump(spy, pid, native=False)[0])):
                told |= {"state": "running", "stacks": threads}
        if native and told["state"] not in ("idle", WAITS_FOR_PROGRAM):
            text, problem = _dump(spy, pid, native=True) if spy else ("", why)
            told |= {"native": text, "problem": problem}
        found.append(told)
    found.sort(key=lambda each: each["state"] in ("idle", WAITS_FOR_PROGRAM))
    print(json.dumps(found))


def _all_stacks(pids: list[int]) -> dict[int, list[list[str]]]:
    """Return the stacks of the processes that have written them, by pid; [] for a worker that waits for a call."""
    found: dict[int, list[list[str]]] = {}
    left = pids
    # processes that were forked from each other write into the same file, so they are asked one after the other
    while left:
        marks: dict[int, Mark] = {}
        for pid in left:
            if mark := ask(pid, {each.file for each in marks.values()}):
                marks[pid] = mark
        for pid, mark in marks.items():
            threads = _written(mark)
            if threads or mark.text():
                found[pid] = threads
            mark.close()
        left = [pid for pid in left if pid not in marks] if marks else []
    return found


def _rank(there: dict[int, tuple[int, str]], pid: int) -> int | None:
    """Return the rank of a gang's process, or of the one that has started it; else None. `there` is from `_below`."""
    while pid in there:
        pid, name = there[pid]
        if name.startswith(_RANK) and name[len(_RANK) :].isdecimal():
            return int(name[len(_RANK) :])
    return None


def _below(root: int) -> dict[int, tuple[int, str]]:
    """Return (pid of the parent, name) of each descendant of a process but the agent and the runner, by its pid."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            stat = _read(f"/proc/{entry}/stat")
            name, rest = stat.partition("(")[2].rpartition(")")[0], stat.rpartition(")")[2].split()
            if len(rest) > 1 and rest[0] != "Z":
                parents[int(entry)] = (int(rest[1]), name)
    found: dict[int, tuple[int, str]] = {}
    todo = [root]
    while todo:
        parent = todo.pop()
        for pid, (above, name) in sorted(parents.items()):
            if above == parent and pid not in (os.getpid(), os.getppid()):
                if _RUNNER in command(pid):
                    continue
                todo.append(pid)
                if name != "skypool-agent":
                    found[pid] = (above, name)
    return found


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _written(mark: Mark) -> list[list[str]]:
    """Wait until a process has written its stack, and return the stacks of its threads; [] if it writes none."""
    until = time.monotonic() + _WRITING
    size, since = -1, time.monotonic()
    while time.monotonic() < until:
        now = len(mark.text())
        if now != size:
            size, since = now, time.monotonic()
        elif size and time.monotonic() - since > _STILL:
            break
        time.sleep(0.005)
    return threads_of(mark.text(), mark.main)


def _spy(folder: str, may_install: bool) -> tuple[list[str], str]:
    """Return the command py-spy, or [] and why there is none. With `may_install`, install it in the node's folder."""
    import shutil  # imported here, as it would delay the start of every node

    own = os.path.join(folder, "py-spy")
    path = os.pathsep.join([os.environ.get("PATH", ""), os.path.dirname(sys.executable), os.path.join(own, "bin")])
    there = shutil.which("py-spy", path=path)
    if there is None and may_install:
        uv = shutil.which("uv", path=path)
        pip = [uv, "pip"] if uv else [sys.executable, "-m", "pip"]
        done = _run([*pip, "install", "-q", "--target", own, "py-spy"], _INSTALLING)
        there = shutil.which("py-spy", path=path)
        if there is None:
            last = done.strip().splitlines()[-1:] or ["no reason was given"]
            why = f"native frames need py-spy, which could not be installed on the node ({last[0]}); "
            return [], why + 'put it in the image: Image(pip=["py-spy"])'
    return [there] if there else [], ""


def _is_python(pid: int) -> bool:
    """Return True if a process runs a Python interpreter."""
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    return False


def _dump(spy: list[str], pid: int, native: bool) -> tuple[str, str]:
    """Return (the stacks of a process as py-spy prints them, ""), or ("", why py-spy could not read them)."""
    import shutil  # imported here, as it would delay the start of every node

    argv = [*spy, "dump", *(["--native"] if native else []), "--pid", str(pid)]
    said = _run(argv, _NATIVE)
    if "Thread" not in said and os.geteuid() and (sudo := shutil.which("sudo")):
        said = _run([sudo, "-n", *argv], _NATIVE)
    if "Thread" in said:
        return _without_own(said), ""
    if "ermission" in said or "not permitted" in said:
        return "", (
            f"py-spy may not read process {pid}: a container needs the right SYS_PTRACE (docker run --cap-add "
            "SYS_PTRACE), and other machines need root or kernel.yama.ptrace_scope=0"
        )
    return "", f"py-spy could not read process {pid}: {' '.join(said.split())[:300]}"


def _spied(said: str) -> list[list[str]]:
    """Return the stacks in a text of py-spy, each as a list of lines such as 'File "train.py", line 12 in step'."""
    found: list[tuple[bool, list[str]]] = []
    for line in said.splitlines():
        if line.startswith("Thread "):
            found.append(('"MainThread"' not in line, []))
        elif found and (frame := _SPIED.match(line)):
            found[-1][1].append(f'File "{frame[2]}", line {frame[3]} in {frame[1]}')
    return [lines for _, lines in sorted(found, key=lambda each: each[0]) if lines]


def _without_own(said: str) -> str:
    """Return the threads in a text of py-spy, without its heading and the frames of skypool that run the call."""
    kept = []
    is_own = True
    for line in said.splitlines():
        if line.startswith("Thread "):
            is_own = False
        elif "(worker.py:" in line and " Worker._" in line:
            is_own = True
        if not is_own:
            kept.append(line)
    return "\n".join(kept)


def _run(argv: list[str], timeout: float) -> str:
    import subprocess  # imported here, as it would delay the start of every node

    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return str(e)
    return (done.stdout + done.stderr).decode("utf-8", "replace")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "native")
