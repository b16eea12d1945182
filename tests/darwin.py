"""Run the client as on macOS, on Linux: `pytest -p tests.darwin`, as `make test-darwin` does.

What macOS lacks is taken away from skypool's client code: epoll, eventfd, pidfds, memfds, /proc, sched_getaffinity,
Linux's socket options and flags, abstract sockets and others. `sys.platform` is "darwin", socket pairs begin with
macOS's small buffers, `send` blocks in spite of MSG_DONTWAIT, poll() does not know terminals, and paths of Unix sockets
are short.

Who asks decides: the nearest frame of this repository. Code of nodes, and of the tests with their labs, sees Linux.
Processes that the client starts to reach a node do not inherit the disguise, all other child processes do, by
`as_darwin/sitecustomize.py`. `Local()` and `FakeCloud()` count as nodes here, which stand for remote ones, unless
$SKYPOOL_STRICTLY_DARWIN is set.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import socket
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable
from typing import Any

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), os.pardir))
_HERE = os.path.join(ROOT, "tests", "as_darwin")
_STRICT = "SKYPOOL_STRICTLY_DARWIN"
_LINUX = ("skypool/agent/", "tests/")
_STAND_INS = ("providers/skypool_local/", "skypool/testing/machine.py")
_REACHES_NODES = ("skypool/wire/transport.py", "skypool/testing/machine.py", "tests/lab/")

_LACKS: dict[str, str] = {
    "os": "eventfd|eventfd_read|eventfd_write|EFD_.*|memfd_create|MFD_.*|pidfd_open|P_PIDFD|pipe2|sched_getaffinity"
    "|sched_setaffinity|sched_[gs]etscheduler|sched_[gs]etparam|posix_fadvise|POSIX_FADV_.*|posix_fallocate"
    "|copy_file_range|splice|SPLICE_.*|O_TMPFILE|O_DIRECT|O_PATH|O_NOATIME|O_RSYNC|getrandom|GRND_.*|waitid"
    "|[gs]etres[ug]id|[gsl]?(et|ist|remove)xattr|listxattr|removexattr|XATTR_.*|timerfd_.*|TFD_.*|unshare|setns"
    "|CLONE_.*|fdatasync|process_cpu_count",
    "select": "epoll|EPOLL.*",
    "signal": "sigtimedwait|sigwaitinfo|pidfd_send_signal|SIGRTMIN|SIGRTMAX|SIGPWR|SIGSTKFLT|SIGPOLL|SIGCLD",
    "socket": "SO_PEERCRED|SO_PASSCRED|SO_PEERSEC|SO_PASSSEC|SO_BINDTODEVICE|SO_DOMAIN|SO_PROTOCOL|SO_MARK|SO_PRIORITY"
    "|SO_INCOMING_CPU|SCM_CREDENTIALS|SOCK_CLOEXEC|SOCK_NONBLOCK|MSG_CMSG_CLOEXEC|MSG_NOSIGNAL|MSG_MORE|MSG_CONFIRM"
    "|MSG_ERRQUEUE|MSG_FASTOPEN|TCP_KEEPIDLE|TCP_USER_TIMEOUT|TCP_QUICKACK|TCP_CORK|TCP_DEFER_ACCEPT|TCP_INFO"
    "|TCP_LINGER2|TCP_SYNCNT|TCP_WINDOW_CLAMP|TCP_CONGESTION|AF_NETLINK|AF_PACKET|AF_VSOCK|AF_ALG|AF_CAN|AF_TIPC",
    "fcntl": "F_[GS]ETPIPE_SZ|F_ADD_SEALS|F_GET_SEALS|F_SEAL_.*|F_OFD_.*|F_[GS]ETLEASE|F_NOTIFY|F_[GS]ETSIG|DN_.*",
    "mmap": "MAP_POPULATE|MAP_STACK|MAP_DENYWRITE|MAP_EXECUTABLE"
    "|MADV_(HUGEPAGE|NOHUGEPAGE|DONTFORK|DOFORK|REMOVE|MERGEABLE|UNMERGEABLE|DONTDUMP|DODUMP|HWPOISON|WIPEONFORK"
    "|KEEPONFORK|COLD|PAGEOUT)",
    "time": "CLOCK_BOOTTIME|CLOCK_TAI|pthread_getcpuclockid",
    "resource": "prlimit|RLIMIT_(MSGQUEUE|NICE|RTPRIO|RTTIME|SIGPENDING)",
}
"""What CPython on macOS does not have, by module, as patterns."""

_LARGEST_BUFFER = 1 << 20  # a Mac with little memory allows no more
_FIRST_BUFFER = 4096  # Linux doubles it: macOS begins with 8 KiB
_LONGEST_PATH = 103  # bytes of sun_path, without the NUL


def install() -> None:
    """Put the disguise on this process, and on its children."""
    if getattr(sys, "_skypool_as_darwin", False):
        return
    sys._skypool_as_darwin = True  # type: ignore[attr-defined]  # one for the process, whoever imports this
    path = [_HERE, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    sysconfig.get_config_vars()  # on macOS this looks for Apple's compilers
    _prepare_the_standard_library()
    for name, patterns in _LACKS.items():
        _take_away(__import__(name), re.compile(patterns))
    _hide_proc()
    _change_sockets()
    _change_poll()
    _start_nodes_without_it()
    sys.platform = _Darwin("darwin")


# --- who asks --------------------------------------------------------------------------------------------------


def _asker() -> str:
    """The nearest file of this repository on the stack, relative to its root; "" if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and file != __file__ and not file.startswith(os.path.join(ROOT, ".venv")):
            return file[len(ROOT) + 1 :]
        frame = frame.f_back
    return ""


def _is_linux() -> bool:
    """Whether who asks sees Linux."""
    file = _asker()
    return file.startswith(_LINUX) or (_STRICT not in os.environ and file.startswith(_STAND_INS))


class _Darwin(str):
    """`sys.platform`: another one to those who see Linux."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return ("linux" if _is_linux() else "darwin") == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def startswith(self, *args: Any) -> bool:
        return ("linux" if _is_linux() else "darwin").startswith(*args)


_Darwin.__name__ = "str"  # pytest-xdist sends it to its first process, by a serializer that goes by the name of a type


# --- what is missing -------------------------------------------------------------------------------------------


def _prepare_the_standard_library() -> None:
    """Let it decide as it would have decided on macOS when it was imported."""
    import platform
    import selectors
    import shutil
    import subprocess
    import tempfile

    scproxy: Any = types.ModuleType("_scproxy")
    scproxy._get_proxies = dict
    scproxy._get_proxy_settings = dict
    sys.modules["_scproxy"] = scproxy
    selectors.DefaultSelector = selectors.PollSelector  # type: ignore[misc, assignment]  # kqueue is not here
    system = platform.system
    platform.system = lambda: system() if _is_linux() else "Darwin"
    libraries: tuple[Any, ...] = (shutil, tempfile, subprocess)
    for library, name, value in zip(
        libraries,
        ("_copyxattr", "_O_TMPFILE_WORKS", "_USE_POSIX_SPAWN"),
        (lambda *args, **more: None, False, True),
        strict=True,
    ):
        if hasattr(library, name):
            setattr(library, name, value)


def _take_away(module: types.ModuleType, patterns: re.Pattern[str]) -> None:
    """Remove names from a module for everybody who does not see Linux."""
    kept = {name: value for name, value in vars(module).items() if patterns.fullmatch(name)}
    for name in kept:
        delattr(module, name)

    def missing(name: str) -> Any:
        if name in kept and _is_linux():
            return kept[name]
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}", name=name, obj=module)

    module.__getattr__ = missing  # type: ignore[method-assign]


def _hide_proc() -> None:
    """There is no /proc and no /sys."""

    def hidden(path: Any) -> bool:
        try:
            text = os.fsdecode(path)
        except TypeError:  # a descriptor
            return False
        return re.match(r"/(proc|sys)(/|$)", text) is not None and not _is_linux()

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(path: Any = ".", *args: Any, **more: Any) -> Any:
            if hidden(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return function(path, *args, **more)

        return guarded

    for name in ("open", "listdir", "stat", "lstat", "scandir", "readlink"):
        _replace(os, name, wrap)
    access = os.access
    os.access = lambda path, *args, **more: not hidden(path) and access(path, *args, **more)
    _replace(builtins, "open", wrap)
    io.open = builtins.open


def _replace(module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    original = getattr(module, name)
    replacement = wrap(original)
    setattr(module, name, replacement)
    for kind in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
        if original in kind:
            kind.add(replacement)


# --- what is different -----------------------------------------------------------------------------------------


def _change_sockets() -> None:
    made: Any = socket.socket
    plain_pair = socket.socketpair

    def address_of(sock: socket.socket, address: Any) -> Any:
        if sock.family == socket.AF_UNIX and not _is_linux():
            path = os.fsencode(address)
            if path.startswith(b"\0"):
                raise FileNotFoundError(errno.ENOENT, "macOS has no abstract sockets", address)
            if len(path) > _LONGEST_PATH:
                raise OSError("AF_UNIX path too long")
        return address

    def with_address(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, address: function(self, address_of(self, address))

    for name in ("bind", "connect", "connect_ex"):
        setattr(made, name, with_address(getattr(made, name)))

    plain_sendmsg, plain_send, plain_setsockopt = made.sendmsg, made.send, made.setsockopt

    def may_block(flags: int) -> int:
        return flags if _is_linux() else flags & ~socket.MSG_DONTWAIT

    def sendmsg(self: Any, buffers: Iterable[Any], ancillary: Any = (), flags: int = 0, *more: Any) -> int:
        sent: int = plain_sendmsg(self, buffers, ancillary, may_block(flags), *more)
        return sent

    def send(self: Any, data: Any, flags: int = 0) -> int:
        sent: int = plain_send(self, data, may_block(flags))
        return sent

    def setsockopt(self: Any, level: int, option: int, *value: Any) -> None:
        buffers = option in (socket.SO_SNDBUF, socket.SO_RCVBUF) and level == socket.SOL_SOCKET
        if buffers and isinstance(value[0], int) and value[0] > _LARGEST_BUFFER and not _is_linux():
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        plain_setsockopt(self, level, option, *value)

    made.sendmsg, made.send, made.setsockopt = sendmsg, send, setsockopt

    def socketpair(family: Any = None, type: Any = socket.SOCK_STREAM, proto: int = 0) -> Any:
        if _is_linux():
            return plain_pair(family, type, proto)
        if type == socket.SOCK_SEQPACKET:
            raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))
        ends = plain_pair(family, type, proto)
        for end in ends:
            plain_setsockopt(end, socket.SOL_SOCKET, socket.SO_SNDBUF, _FIRST_BUFFER)
        return ends

    socket.socketpair = socketpair


def _change_poll() -> None:
    """macOS's poll() answers POLLNVAL for terminals and other devices."""
    import select

    plain_poll = select.poll

    class Poll:
        def __init__(self) -> None:
            self._poll = plain_poll()
            self._devices: set[int] = set()

        def register(self, fd: Any, *mask: int) -> None:
            number = fd if isinstance(fd, int) else fd.fileno()
            if os.isatty(number) and not _is_linux():
                self._devices.add(number)
            else:
                self._poll.register(fd, *mask)

        def modify(self, fd: Any, mask: int) -> None:
            self._poll.modify(fd, mask)

        def unregister(self, fd: Any) -> None:
            self._poll.unregister(fd)

        def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
            invalid = [(fd, select.POLLNVAL) for fd in self._devices]
            return invalid + self._poll.poll(0 if invalid else timeout)

    select.poll = Poll  # type: ignore[misc, assignment]


def _start_nodes_without_it() -> None:
    """Processes that reach a node, and those of the tests' labs, are not disguised."""
    import subprocess

    popen: Any = subprocess.Popen
    plain = popen.__init__

    def started(self: Any, *args: Any, env: Any = None, **more: Any) -> None:
        if _asker().startswith(_REACHES_NODES):
            env = dict(os.environ if env is None else env)
            path = [each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each and each != _HERE]
            env.pop("PYTHONPATH", None)
            if path:
                env["PYTHONPATH"] = os.pathsep.join(path)
        plain(self, *args, env=env, **more)

    popen.__init__ = started


if __name__ == "tests.darwin":  # a plugin of pytest: as early as it can be
    install()
