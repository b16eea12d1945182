"""Functions that damage the process that runs them, in ways drawn by a seed, for tests that the node survives them."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import hashlib
import mmap
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import skypool as sky
from skypool.agent.stacks import SIGNAL

LIBC = ctypes.CDLL(None, use_errno=True)
_ATTACH = 16
_TRACE_ME = 0
_SEIZE = 0x4206
_SET_DUMPABLE = 4
_SET_NAME = 15
_SET_SECCOMP = 22
_SET_SUBREAPER = 36
_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)
_NEWNS = 0x20000
_PRIVATE = 1 << 18 | 1 << 14
NAMES = [b"a) Z (", b"\n\n", b"\xff\xfe", b"skypool-agent", b"skypool-keeper", b"", b") R 1 1 1 1", b"skypool-rank-9"]

Dice = random.Random


@sky.compute
def healthy(n: int, seconds: float) -> str:
    """Work for some seconds, print, allocate and return what only an undisturbed call returns."""
    digest = hashlib.sha256(str(n).encode())
    until = time.monotonic() + seconds
    for step in range(max(1, int(seconds * 20))):
        digest.update(bytes(1000) + str(step).encode())
        time.sleep(max(0.0, min(0.05, until - time.monotonic())))
    return digest.hexdigest()


def expected(n: int, seconds: float) -> str:
    """What `healthy` returns, without its pauses."""
    digest = hashlib.sha256(str(n).encode())
    for step in range(max(1, int(seconds * 20))):
        digest.update(bytes(1000) + str(step).encode())
    return digest.hexdigest()


# --- signals -------------------------------------------------------------------------------------------------


def mask_signals(dice: Dice) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def mask_some_signals(dice: Dice) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, dice.sample(sorted(signal.valid_signals()), 20))


def ignore_signals(dice: Dice) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            signal.signal(number, dice.choice([signal.SIG_IGN, signal.SIG_DFL]))


def stop_itself(dice: Dice) -> None:
    os.kill(os.getpid(), dice.choice([signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN]))


def stop_its_group(dice: Dice) -> None:
    os.killpg(0, signal.SIGSTOP)


def be_stopped_by_a_child(dice: Dice) -> None:
    """A child in a session of its own stops this process again and again."""
    parent = os.getpid()
    if os.fork() == 0:
        os.setsid()
        for _ in range(100):
            with contextlib.suppress(ProcessLookupError):
                os.kill(parent, signal.SIGSTOP)
            time.sleep(0.02)
        os._exit(0)
    time.sleep(dice.random() / 5)


def end_by_a_signal(dice: Dice) -> None:
    names = ["SEGV", "ABRT", "BUS", "FPE", "ILL", "TRAP", "SYS", "XCPU", "KILL", "HUP", "USR1", "PIPE", "QUIT", "TERM"]
    os.kill(os.getpid(), getattr(signal, f"SIG{dice.choice(names)}"))


def set_an_alarm(dice: Dice) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.01 + dice.random() / 3)


def raise_in_every_handler(dice: Dice) -> None:
    def handle(*_: object) -> None:
        raise ValueError("a handler")

    for number in (signal.SIGTERM, signal.SIGURG, signal.SIGINT):
        signal.signal(number, handle)


# --- tracing -------------------------------------------------------------------------------------------------


def be_traced(dice: Dice) -> None:
    """A child in a session of its own attaches to this process and keeps it."""
    parent = os.getpid()
    LIBC.prctl(_SET_PTRACER, _ANY, 0, 0, 0)
    how = dice.choice([_ATTACH, _SEIZE])
    if os.fork() == 0:
        os.setsid()
        LIBC.ptrace(how, parent, 0, 0)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.1)


def ask_its_parent_to_trace(dice: Dice) -> None:
    LIBC.ptrace(_TRACE_ME, 0, 0, 0)
    if dice.random() < 0.5:
        os.kill(os.getpid(), signal.SIGUSR2)


# --- file descriptors ----------------------------------------------------------------------------------------


def close_files(dice: Dice) -> None:
    os.closerange(dice.choice([0, 1, 3, 3, 3]), 1024)


def close_one_file(dice: Dice) -> None:
    with contextlib.suppress(OSError):
        os.close(dice.randint(0, 14))


def cover_files(dice: Dice) -> None:
    """Put another file in the place of each of this process's files."""
    new = os.open(dice.choice(["/dev/null", "/dev/zero", "/dev/full"]), os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (new,):
            with contextlib.suppress(OSError):
                os.dup2(new, int(name))


def write_to_all_files(dice: Dice) -> None:
    """Write bytes that mean nothing to each of this process's files."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.set_blocking(int(name), False)
            for _ in range(dice.randint(1, 50)):
                os.write(int(name), dice.randbytes(dice.choice([1, 3, 8, 12, 100, 5000])))


def make_files_not_wait(dice: Dice) -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.set_blocking(int(name), False)


def make_a_file_like_ours(dice: Dice) -> None:
    """Make files in memory with the name of the one in which a worker writes its stack."""
    for file in range(3, 40):  # before the real one
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{file}").startswith("/memfd:skypool-stack-"):
                os.close(file)
    for text in ("zz", "", "7f", "-", "1" * 100):
        fd = os.memfd_create(f"skypool-stack-{text}", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, dice.choice([0, 10, 1 << 21, 1 << 40]))
        faulthandler.register(SIGNAL, file=fd)


def shut_sockets(dice: Dice) -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as shared:
            shared.shutdown(socket.SHUT_RDWR)


def leave_no_room_for_files(dice: Dice) -> None:
    with contextlib.suppress(OSError):
        while True:
            os.open("/dev/null", os.O_RDONLY)


def flood(dice: Dice) -> None:
    """Print much more than is kept, also past Python."""
    for _ in range(dice.randint(1, 40)):
        print("x" * dice.choice([10, 1 << 16]))
        os.write(dice.choice([1, 2]), dice.randbytes(1 << 16))


def fill_its_pipes(dice: Dice) -> None:
    """Have children in sessions of their own write to this call's output for ever."""
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            with contextlib.suppress(OSError):
                while True:
                    os.write(1, bytes(1 << 16))
            os._exit(0)


# --- what others can read of it ------------------------------------------------------------------------------


def be_unreadable(dice: Dice) -> None:
    LIBC.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def be_nobody(dice: Dice) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)


def hide_the_files(dice: Dice) -> None:
    """Lay an empty file system over /proc, in a namespace of this process."""
    if os.geteuid() == 0 and LIBC.unshare(_NEWNS) == 0:
        LIBC.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None)
        LIBC.mount(b"none", b"/proc", b"tmpfs", ctypes.c_ulong(0), None)


def rename(dice: Dice) -> None:
    LIBC.prctl(_SET_NAME, dice.choice(NAMES), 0, 0, 0)
    for _ in range(2):
        threading.Thread(target=_sleep_as, args=(dice.choice(NAMES),), daemon=True).start()


def _sleep_as(name: bytes) -> None:
    LIBC.prctl(_SET_NAME, name, 0, 0, 0)
    time.sleep(60)


def become_another_program(dice: Dice) -> None:
    os.execvp("sh", ["sh", "-c", dice.choice(["exit 3", "sleep 30", "kill -STOP $$", "exec cat /dev/zero"])])


# --- limits --------------------------------------------------------------------------------------------------


def limit_memory(dice: Dice) -> None:
    kind = dice.choice([resource.RLIMIT_AS, resource.RLIMIT_DATA])
    resource.setrlimit(kind, (dice.choice([0, 1 << 20, 1 << 28]), resource.RLIM_INFINITY))
    if dice.random() < 0.5:
        bytearray(1 << 30)


def limit_the_rest(dice: Dice) -> None:
    kind = dice.choice(["CPU", "NOFILE", "FSIZE", "STACK", "NPROC", "CORE", "MEMLOCK"])
    limit = getattr(resource, f"RLIMIT_{kind}")
    resource.setrlimit(limit, (dice.choice([0, 1, 3]), resource.getrlimit(limit)[1]))


def map_much(dice: Dice) -> None:
    held = [mmap.mmap(-1, 1 << 30) for _ in range(20)]
    time.sleep(dice.random() / 10)
    del held


def allow_no_system_calls(dice: Dice) -> None:
    LIBC.prctl(_SET_SECCOMP, 1, 0, 0, 0)


# --- threads and processes -----------------------------------------------------------------------------------


def keep_threads(dice: Dice) -> None:
    """Leave threads that wait for ever, and that stop only together with the process."""
    lock = threading.Lock()
    lock.acquire()
    for _ in range(dice.randint(1, 30)):
        threading.Thread(target=lock.acquire, daemon=False).start()


def keep_the_interpreter(dice: Dice) -> None:
    """Let a thread hold the interpreter's lock in native code."""
    threading.Thread(target=ctypes.PyDLL(None).sleep, args=(60,), daemon=True).start()
    time.sleep(0.05)


def spin(dice: Dice) -> None:
    threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()


def end_its_main_thread(dice: Dice) -> None:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    LIBC.syscall(60, 0)  # exit, of this thread only


def leave_processes(dice: Dice) -> None:
    """Leave processes that have left the session, some of them stopped, some without a parent."""
    for _ in range(dice.randint(1, 5)):
        if os.fork() == 0:
            if dice.random() < 0.7:
                os.setsid()
            if os.fork() == 0:
                if dice.random() < 0.3:
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(60)
            os._exit(0)


def leave_the_dead(dice: Dice) -> None:
    for _ in range(100):
        if os.fork() == 0:
            os._exit(0)


def return_twice(dice: Dice) -> None:
    """Fork a child that goes on as if it were the worker."""
    os.fork()


def reap_no_orphans(dice: Dice) -> None:
    LIBC.prctl(_SET_SUBREAPER, 0, 0, 0, 0)
    leave_processes(dice)


# --- Python --------------------------------------------------------------------------------------------------


def break_modules(dice: Dice) -> None:
    modules: dict[str, Any] = sys.modules
    for name in dice.sample(sorted(modules), 30):
        modules[name] = dice.choice([None, sys])


def break_streams(dice: Dice) -> None:
    sys.stdout = sys.stderr = dice.choice([None, sys.stdin, object()])


def break_hooks(dice: Dice) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a hook")

    sys.unraisablehook = sys.excepthook = threading.excepthook = fail
    sys.settrace(fail)


def clear_the_environment(dice: Dice) -> None:
    os.environ.clear()


def go_deep(dice: Dice) -> None:
    sys.setrecursionlimit(dice.choice([50, 10**7]))

    def deeper() -> None:
        deeper()

    deeper()


def stop_reporting(dice: Dice) -> None:
    faulthandler.unregister(SIGNAL)
    if dice.random() < 0.5:
        signal.signal(SIGNAL, signal.SIG_DFL)


class _Broken(Exception):
    def __str__(self) -> str:
        raise ValueError("a text")

    __repr__ = __str__

    def __reduce__(self) -> str:
        raise KeyboardInterrupt


def raise_what_breaks(dice: Dice) -> None:
    raise dice.choice([_Broken(), KeyboardInterrupt(), GeneratorExit(), OSError(b"\xff"),
                       BaseExceptionGroup("g", [_Broken()]), ValueError("x" * (1 << 22))])  # fmt: skip


DAMAGES: tuple[Callable[[Dice], None], ...] = (
    mask_signals, mask_some_signals, ignore_signals, stop_itself, stop_its_group, be_stopped_by_a_child,
    end_by_a_signal, set_an_alarm, raise_in_every_handler, be_traced, ask_its_parent_to_trace, close_files,
    close_one_file, cover_files, write_to_all_files, make_files_not_wait, shut_sockets, make_a_file_like_ours,
    leave_no_room_for_files, flood, fill_its_pipes, be_unreadable, be_nobody, hide_the_files, rename,
    become_another_program, limit_memory, limit_the_rest, map_much, allow_no_system_calls, keep_threads,
    keep_the_interpreter, spin, end_its_main_thread, leave_processes, leave_the_dead, return_twice, reap_no_orphans,
    break_modules, break_streams, break_hooks, clear_the_environment, go_deep, stop_reporting, raise_what_breaks,
)  # fmt: skip
"""The ways in which a function damages its process."""


def chosen(seed: str) -> list[str]:
    """The damages that `damaged` does for this seed, and how it ends, by name."""
    dice = random.Random(seed)
    return [*(each.__name__ for each in dice.sample(DAMAGES, dice.choice([1, 1, 2, 3]))), dice.choice(ENDS)]


ENDS = ("return", "raise", "sleep", "native", "locked", "large")


@sky.compute
def damaged(seed: str) -> object:
    """Damage this process in the ways of a seed; then return, fail, or hang."""
    *names, end = chosen(seed)
    dice = random.Random(f"{seed}-itself")
    ways = {each.__name__: each for each in DAMAGES}
    for name in names:
        ways[name](dice)
    if end == "raise":
        raise ValueError(seed)
    if end == "sleep":
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(60)
    if end == "native":
        LIBC.sleep(60)
    if end == "locked":
        ctypes.PyDLL(None).sleep(60)
    return bytes(1 << 20) if end == "large" else seed
