"""Starts the agent on a node, and the keeper, which kills everything when the agent ends.

The keeper is the parent of the agent and thus of all its workers. When the agent or its lease ends, the keeper kills
all remaining processes and removes the node's folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from skypool.agent import agent_socket
from skypool.agent.processes import adopt_orphans, call_it, is_live, kill_descendants, started, usable_cpus
from skypool.clock import RunningClock
from skypool.safety import removal
from skypool.wire.agent_config import AgentConfig
from skypool.wire.save_orders import LOOKED, SOCKET, SOCKET_VARIABLE

if TYPE_CHECKING:
    from skypool.agent.shared_page import SharedPage
    from skypool.agent.slot_plan import NodePlan

_UMASK = "SKYPOOL_UMASK"
"""The environment variable with the umask of the login, in octal digits."""
_MOST_WORDS = 3000
"""If an agent ends with an error, its client gets at most this many bytes of the error's text."""
_LOOK = 0.5
"""Seconds between two checks of the deadline by the keeper."""
_TO_OBEY = 1.0
"""Seconds that the agent has to end by itself when a signal tells the keeper to end."""
_TO_LOOK = 4.0
"""Seconds in which the mover has looked which files are being written, also if it is only starting."""
_TO_RENEW = 5.0
"""Seconds that the agent has after the deadline to end by itself or to move the deadline.

After a pause of the whole node, the agent first reads the frames that its client sent meanwhile.
"""


class _Log(io.TextIOBase):
    """The `sys.stdout` and `sys.stderr` of keeper and agent. Text for which the disk has no room is dropped."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            os.write(2, text.encode("utf-8", "backslashreplace"))
        return len(text)


def start(given: Mapping[str, Any], words: int) -> None:
    """Start keeper and agent. The agent's last error goes to the file `words`.

    `given` is an `AgentConfig` as JSON from the client. Raises ProtocolError if it is not valid.
    """
    config = AgentConfig.from_json(given)
    umask = os.umask(0o077)
    home = os.path.expanduser("~")
    os.environ.setdefault("HOME", home if os.path.isabs(home) else "/")  # programs of calls need one
    with contextlib.suppress(KeyError, ValueError):  # set where a script has set its own before
        umask = int(os.environ.pop(_UMASK), 8)
    listener = agent_socket.listen()
    if os.fork() == 0:
        try:
            _keep(config, listener, words, umask)
        except BaseException:  # noqa: BLE001 - a forked child must never return; the holder reports the error
            _say_why(words)
        os._exit(70)
    listener.close()


def _say_why(words: int) -> None:
    """Write the current exception to the agent's log, and its end to the file `words`, which the holder reads."""
    import traceback

    text = traceback.format_exc()
    sys.stderr.write(text)
    sys.stderr.flush()
    os.pwrite(
        words,
        f"the agent ended with an error:\n{text[-_MOST_WORDS // 2 :]}".encode("utf-8", "backslashreplace")[
            :_MOST_WORDS
        ],
        0,
    )


def _keep(config: AgentConfig, listener: socket.socket, words: int, umask: int) -> NoReturn:
    """Run the keeper: start the agent, wait for its end, kill all that is left, and remove the node's folder."""
    os.setsid()
    call_it("keeper")
    # written while the folder is still locked, so that a later process can find the node's processes
    with open("keeper.json", "w") as file:
        json.dump({"pid": os.getpid(), "started": started(os.getpid())}, file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open("agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = _Log()
    kept = {0, 1, 2, words, listener.fileno(), *config.keep}
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with contextlib.suppress(OSError):
            os.close(fd)
    from skypool.agent.shared_page import SharedPage

    plan = replace(_plan(config), umask=umask)
    page = SharedPage(plan.rows)
    page.deadline = page.end = time.monotonic() + config.lease
    if not adopt_orphans():
        print("orphaned processes cannot be adopted; a daemon started by a call may outlive the pool", flush=True)
    agent = os.fork()
    if agent == 0:
        _become_agent(plan, listener, page, words)
    listener.close()
    status = _watch(agent, page)
    print(f"the agent ended ({status}); ending the processes that it left", flush=True)
    if page.mover:
        _await_look(page)
        kill_descendants(spared=page.mover)
        with contextlib.suppress(ProcessLookupError):
            os.kill(page.mover, signal.SIGTERM)  # nobody writes any more
        _await_mover(page)
    kill_descendants()
    os.chdir("/")
    removal.remove(config.folder)
    os._exit(0)


def _await_look(page: SharedPage) -> None:
    """Wait until the mover knows which files the processes are writing that are killed next, if it saves any."""
    until = min(page.end, time.monotonic() + _TO_LOOK) if page.drain else 0.0
    while time.monotonic() < until and not os.path.exists(LOOKED) and is_live(page.mover):
        time.sleep(_LOOK / 50)


def _await_mover(page: SharedPage) -> None:
    """Let the mover, a child by now, save what is left. It knows how long it may take."""
    print("the mover saves what is left", flush=True)
    until = min(page.end, time.monotonic() + page.drain + _TO_RENEW)
    with contextlib.suppress(ChildProcessError):  # it has ended before
        while time.monotonic() < until and not os.waitpid(page.mover, os.WNOHANG)[0]:
            time.sleep(_LOOK / 10)


def _plan(config: AgentConfig) -> NodePlan:
    """Detect this machine's devices and state, and return the node's plan. May change a rented machine's hosts file."""
    from skypool import devices
    from skypool.agent import node_facts, own_name
    from skypool.agent.slot_plan import NodePlan, plan_slots

    found = devices.detect()
    described = node_facts.describe(found)
    return NodePlan(
        config,
        described,
        slots=plan_slots(config.slots, found, config.slice.hosts),
        cpu_slots=usable_cpus() if found else 0,
        env={**own_name.prepare(described.address, config.rented, config.env), **config.env},
    )


def _become_agent(plan: NodePlan, listener: socket.socket, page: SharedPage, words: int) -> NoReturn:
    """Run the agent in this forked process, then end the process with status 0, or 1 after an exception."""
    try:
        os.environ.update(plan.env)
        os.environ[SOCKET_VARIABLE] = os.path.join(os.getcwd(), SOCKET)
        if sys.prefix != sys.base_prefix:  # so that calls can run commands of the image's environment by name
            os.environ["PATH"] = f"{os.path.join(sys.prefix, 'bin')}:{os.environ.get('PATH', os.defpath)}"
        from skypool.agent.agent import Agent

        call_it("agent")
        adopt_orphans()
        Agent(plan, listener, page).run()
    except BaseException:  # noqa: BLE001 - a forked child must never return; the error is in the log
        _say_why(words)
        os._exit(1)
    os._exit(0)


def _watch(agent: int, page: SharedPage) -> str:
    """Wait until the agent, a child process, ends; kill it after the deadline. Return "wait status N" for messages.

    The written end (`skypool.agent.guard`) is kept here: whatever the page says later, it only comes nearer.
    """
    wanted = {signal.SIGCHLD, signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    signal.setitimer(signal.ITIMER_REAL, _LOOK, _LOOK)
    clock = RunningClock()
    kill_at = kill_late_at = end = math.inf
    while True:
        # not sigtimedwait: CPython 3.11 can return an uninitialised number if SIGSTOP and SIGCONT come meanwhile
        ordered_to_end = signal.sigwaitinfo(wanted).si_signo not in (signal.SIGCHLD, signal.SIGALRM)
        now = clock()
        if 0.0 < page.end_asked < end:
            page.end_held = end = page.end_asked
        if ordered_to_end or time.monotonic() >= end:
            os.kill(agent, signal.SIGTERM)
            kill_at = min(kill_at, now + _TO_OBEY)
        # the agent may still move the deadline
        if time.monotonic() <= page.deadline:
            kill_late_at = math.inf
        elif kill_late_at == math.inf:
            kill_late_at = now + _TO_RENEW
        if now > min(kill_at, kill_late_at):
            os.kill(agent, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == agent:
                    page.end = min(page.end, end)
                    return f"wait status {reaped[1]}"
