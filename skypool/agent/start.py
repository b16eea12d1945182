"""Start of the agent on a node: starts the keeper, and kills all when the agent ends.

The holder is the process that the transport started. It starts the agent if there is none, hands its own stdin and
stdout to it and waits: bytes pass between link and agent without another process in the middle. The keeper outlives
everything else on the node: when its agent ends, however that happens, or the lease does, it kills whatever is left and
removes the node's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from skypool.agent.processes import call_it, kill_descendants, started, usable_cpus
from skypool.clock import RunningClock

if TYPE_CHECKING:
    from skypool.agent.plan import NodePlan
    from skypool.agent.shared_page import SharedPage
    from skypool.wire.handshake import AgentConfig

SOCKET = "agent.sock"
"""Where an agent is found, in its folder."""
_MOST_WORDS = 3000
"""Bytes of an agent's last words that reach its client."""
_PR_SET_CHILD_SUBREAPER = 36
"""The option of prctl(2) that makes a process the parent of orphans below it."""
_LOOK = 0.5
"""Seconds between two looks of the keeper at the deadline in the page."""
_TO_OBEY = 1.0
"""Seconds that the agent has to end by itself when the keeper is told to end."""
_TO_RENEW = 5.0
"""Seconds that the agent has, once the deadline is over, to end by itself or to put the deadline off. After a pause of
the whole node it first reads what its client sent meanwhile."""


def connect(config: Mapping[str, Any], start: bool) -> NoReturn:
    """Hand stdin and stdout to the agent of `config["folder"]` and wait until it lets go.

    Args:
        config: an `AgentConfig` as the client sent it. It is read whole only where an agent starts.
        start: whether to start an agent where there is none. A client that comes back says no: an agent that is gone
            has taken its calls with it, and a new one must not pretend otherwise.
    """
    os.chdir(config["folder"])
    with open("lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        agent = _find()
        words = -1
        if agent is None and start:
            words = os.open("last-words", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            from skypool.wire.handshake import AgentConfig

            agent = _start(AgentConfig.from_json(config), words)
    if agent is None:
        os.write(1, b"gone\n")
        os._exit(3)
    os.write(1, b"ready\n")
    socket.send_fds(agent, [b"skypool"], [0, 1])
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    with contextlib.suppress(ConnectionError):
        agent.recv(1)
    if words >= 0 and (said := os.pread(words, _MOST_WORDS, 0)):
        os.write(2, said)
        os._exit(70)
    os._exit(0)


def _find() -> socket.socket | None:
    agent = socket.socket(socket.AF_UNIX)
    try:
        agent.connect(SOCKET)
    except (FileNotFoundError, ConnectionRefusedError):
        agent.close()
        return None
    return agent


def _start(config: AgentConfig, words: int) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET)
    listener = socket.socket(socket.AF_UNIX)
    os.umask(0o077)
    listener.bind(SOCKET)
    os.chmod(SOCKET, 0o600)
    listener.listen(8)
    if os.fork() == 0:
        try:
            _keep(config, listener, words)
        except BaseException:  # noqa: BLE001 - a forked child must never return; whoever started it reads the words
            _say_why(words)
        os._exit(70)
    listener.close()
    agent = _find()
    if agent is None:
        raise RuntimeError("the agent's socket is gone as soon as it was made")
    return agent


def _say_why(words: int) -> None:
    """Leave the error that ends this process where the holder that started it reads it, and in the log."""
    import traceback

    text = traceback.format_exc()
    sys.stderr.write(text)
    sys.stderr.flush()
    os.pwrite(words, f"its agent ended with an error:\n{text[-_MOST_WORDS // 2 :]}".encode()[:_MOST_WORDS], 0)


def _keep(config: AgentConfig, listener: socket.socket, words: int) -> NoReturn:
    """The keeper. It says who it is before it lets go of the lock: whoever has that knows all who live here."""
    os.setsid()
    call_it("keeper")
    with open("keeper.json", "w") as file:
        json.dump({"pid": os.getpid(), "started": started(os.getpid())}, file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open("agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    kept = {0, 1, 2, words, listener.fileno(), *config.keep}
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with contextlib.suppress(OSError):
            os.close(fd)
    from skypool.agent.shared_page import SharedPage

    plan = _plan(config)
    page = SharedPage(len(plan.slots) + plan.cpu_slots)
    page.deadline = time.monotonic() + config.lease
    agent = os.fork()
    if agent == 0:
        _become_agent(plan, listener, page, words)
    listener.close()
    _adopt_orphans()
    status = _watch(agent, page)
    print(f"agent ended ({status}); ending what is left", flush=True)
    kill_descendants()
    os.chdir("/")
    shutil.rmtree(config.folder, ignore_errors=True)
    os._exit(0)


def _plan(config: AgentConfig) -> NodePlan:
    """Look what this machine is, and split its devices among slots."""
    from skypool import devices
    from skypool.agent import health, own_name
    from skypool.agent.plan import NodePlan, plan_slots

    found = devices.detect()
    described = health.describe(found)
    return NodePlan(
        config,
        described,
        slots=plan_slots(config.slots, found, config.slice.hosts),
        cpu_slots=usable_cpus() if found else 0,
        env={**own_name.prepare(described.address, config.rented, config.env), **config.env},
    )


def _become_agent(plan: NodePlan, listener: socket.socket, page: SharedPage, words: int) -> NoReturn:
    try:
        os.environ.update(plan.env)
        if sys.prefix != sys.base_prefix:  # commands of the image's environment are found by their names
            os.environ["PATH"] = f"{os.path.join(sys.prefix, 'bin')}:{os.environ.get('PATH', os.defpath)}"
        from skypool.agent.node import Agent

        call_it("agent")
        Agent(plan, listener, page).run()
    except BaseException:  # noqa: BLE001 - a forked child must never return; the log has it
        _say_why(words)
        os._exit(1)
    os._exit(0)


def _adopt_orphans() -> None:
    """Become the parent of everything on this node whose own parent dies, so that nothing can slip away."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        print("cannot adopt orphans; a daemon started by a call may outlive the pool", flush=True)


def _watch(agent: int, page: SharedPage) -> str:
    """Wait until the agent ends, or end it; return how it ended.

    The keeper itself may be stopped and continued at any time. `signal.sigtimedwait` must not be used here: CPython
    3.11 returns an uninitialised signal number when a stop interrupts it and its timeout has passed.
    """
    wanted = {signal.SIGCHLD, signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    signal.setitimer(signal.ITIMER_REAL, _LOOK, _LOOK)
    clock = RunningClock()
    kill_at = kill_late_at = math.inf
    while True:
        ordered_to_end = signal.sigwaitinfo(wanted).si_signo not in (signal.SIGCHLD, signal.SIGALRM)
        now = clock()
        if ordered_to_end:
            os.kill(agent, signal.SIGTERM)
            kill_at = min(kill_at, now + _TO_OBEY)
        if time.monotonic() <= page.deadline:
            kill_late_at = math.inf
        elif kill_late_at == math.inf:
            kill_late_at = now + _TO_RENEW
        if now > min(kill_at, kill_late_at):
            os.kill(agent, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == agent:
                    return f"wait status {reaped[1]}"
