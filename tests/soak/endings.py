"""The ways in which `skypool run` ends, many times each: nothing may be lost, and nothing left.

    python -m tests.soak.endings --times 20
    python -m tests.soak.endings --times 20 --ssh

The machines are those of the fake cloud, or with `--ssh` one of the lab. After each run, no machine of the fake cloud
and no process of the run may be there, and what the program printed and saved must be here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from skypool.testing import FakeCloud, Stock
from tests.caches import with_zip
from tests.lab.machines import Lab, Machine

_MARK = "SKYPOOL_SOAK_OF_ENDINGS"
"""A variable that all processes of one run have."""
_SOON = 20.0
"""Seconds after which nothing of a run may be left."""
_LARGE = 200_000_000
_CATCHES = """
import os, time
os.makedirs("out", exist_ok=True)
print("at work", flush=True)
try:
    time.sleep(300)
except KeyboardInterrupt:
    open("out/last", "w").write("saved")
    print("tidies up", flush=True)
    raise SystemExit(7)
"""
_IGNORES = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("at work", flush=True)
time.sleep(300)
"""
_BARS = """
import sys, time
for n in range(101):
    print(f"\\r{n:3}% {'#' * (n // 2)}", end="", flush=True)
    time.sleep(0.005)
print("\\ndone")
"""


@dataclass
class Place:
    """A folder with a project, and a cloud or a machine that ssh reaches, for one run."""

    folder: Path
    machine: Machine | None = None

    def __post_init__(self) -> None:
        self.project.mkdir(parents=True)
        FakeCloud(self.folder / "cloud", [Stock()]).instances()
        self._before = {} if self.machine is None else self.machine.processes()

    @property
    def project(self) -> Path:
        return self.folder / "project"

    @cached_property
    def env(self) -> dict[str, str]:
        state = {"XDG_STATE_HOME": str(self.folder / "state"), "SKYPOOL_FAKE_CLOUD": str(self.folder / "cloud")}
        return {**os.environ, **state, _MARK: str(self.folder)}

    def argv(self, text: str, *options: str) -> list[str]:
        """Return the command that runs a program with this text."""
        (self.project / "train.py").write_text(text)
        fake = ["--provider", "fake", "--budget", "5"]
        where = fake if self.machine is None else ["--host", f"root@{self.machine.address}"]
        return [sys.executable, "-m", "skypool", "run", *where, *options, "train.py"]

    def started(self, text: str, *options: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.argv(text, *options), cwd=self.project, env=self.env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def left(self) -> list[str]:
        """Return what is left of the run: machines and processes."""
        machines = FakeCloud(self.folder / "cloud").instances()
        there = [] if self.machine is None else self._left_there(self.machine)
        return [f"machine {each.id}" for each in machines] + [f"process {each}" for each in self._processes()] + there

    def _left_there(self, machine: Machine) -> list[str]:
        """Return the processes on a machine that began with the run, and the output that is still stored there."""
        began = {pid: name for pid, name in machine.processes().items() if pid not in self._before}
        stored = machine.path("/root/.skypool").rglob("output/*")
        return [f"process {name} there" for name in began.values()] + [f"{each} there" for each in stored]

    def _processes(self) -> Iterator[str]:
        told = f"{_MARK}={self.folder}".encode()
        for each in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if told in Path("/proc", each, "environ").read_bytes().split(b"\0"):
                    yield Path("/proc", each, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _expect(said: object, wanted: object, what: str) -> None:
    if said != wanted:
        raise AssertionError(f"{what}: {said!r:.300}, not {wanted!r:.300}")


def _ends(place: Place, text: str, status: int, out: bytes) -> None:
    with place.started(text) as process:
        said, err = process.communicate(timeout=120)
    _expect(process.returncode, status, f"status, with {err[-500:]!r}")
    _expect(said, out, "output")


def _status(text: str, status: int) -> Callable[[Place], None]:
    return lambda place: _ends(place, f"print('hello', flush=True)\n{text}", status, b"hello\n")


def _binary(place: Place) -> None:
    data = random.Random(str(place.folder)).randbytes(1 << 20)
    (place.project / "data").write_bytes(data)
    text = f"import sys\nfor _ in range({_LARGE >> 20}): sys.stdout.buffer.write(open('data', 'rb').read())"
    _ends(place, text, 0, data * (_LARGE >> 20))


def _bars(place: Place) -> None:
    out = b"".join(b"\r%3d%% %s" % (n, b"#" * (n // 2)) for n in range(101)) + b"\ndone\n"
    _ends(place, _BARS, 0, out)


def _closed_pipe(place: Place) -> None:
    with place.started("for n in range(10**9): print(n)") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        _expect(process.stdout.readline(), b"0\n", "the first line")
        process.stdout.close()
        process.stderr.read()
        _expect(process.wait(60), 1, "status")


def _signal(number: signal.Signals) -> Callable[[Place], None]:
    def ends(place: Place) -> None:
        with place.started(_CATCHES, "--save", "out") as process:
            assert process.stdout is not None
            _expect(process.stdout.readline(), b"at work\n", "the first line")
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        _expect(process.returncode, 128 + number, f"status, with {err[-500:]!r}")
        _expect(out, b"tidies up\n", "output")
        _expect((place.project / "out" / "last").read_text(), "saved", "the saved file")

    return ends


def _twice(place: Place) -> None:
    with place.started(_IGNORES) as process:
        assert process.stdout is not None
        _expect(process.stdout.readline(), b"at work\n", "the first line")
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    _expect(process.returncode, 130, "status")
    _expect(time.monotonic() - began < 5, True, "it ended within 5 s of the second signal")


def _closed_terminal(place: Place) -> None:
    argv = place.argv(_CATCHES, "--save", "out")
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(place.project)
        os.execvpe(argv[0], argv, place.env)
    seen = b""
    while b"at work" not in seen:
        seen += os.read(terminal, 65536)
    os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _expect(status, 129, "status")
    _expect((place.project / "out" / "last").read_text(), "saved", "the saved file")


def _detached(place: Place) -> None:
    """Under tmux, whose terminal nobody looks at, it goes on; when its session is killed, it ends as above."""
    argv = ["tmux", "-L", place.folder.name, "-f", "/dev/null"]
    script = place.folder / "script.sh"
    script.write_text('cd "$1" && shift && "$@"; echo $? > ../status\n')
    is_killed = random.random() < 0.5
    words = place.argv(_CATCHES if is_killed else "import time; time.sleep(1); print('done')", "--save", "out")
    session = ["new-session", "-d", "-s", "s", "sh", str(script), str(place.project), *words]
    subprocess.run([*argv, *session], env=place.env, check=True)
    try:
        if is_killed:
            _until(lambda: b"at work" in _screen(argv), "the first line")
            subprocess.run([*argv, "kill-session", "-t", "s"], check=True)
            _until((place.project / "out" / "last").exists, "the saved file")
        else:
            _until((place.folder / "status").exists, "the end")
            _expect((place.folder / "status").read_text(), "0\n", "status")
    finally:
        subprocess.run([*argv, "kill-server"], capture_output=True, check=False)


def _screen(argv: list[str]) -> bytes:
    return subprocess.run([*argv, "capture-pane", "-p", "-t", "s"], capture_output=True, check=False).stdout


def _until(check: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 60
    while not check():
        if time.monotonic() > until:
            raise AssertionError(f"{what} did not come within 60 s")
        time.sleep(0.05)


WAYS: dict[str, Callable[[Place], None]] = {
    "status 0": _status("pass", 0),
    "status 3": _status("raise SystemExit(3)", 3),
    "SIGSEGV, 139": _status("import os; os.kill(os.getpid(), 11)", 139),
    "SIGTERM, 143": _status("import os; os.kill(os.getpid(), 15)", 143),
    "200 MB of binary output": _binary,
    "a progress bar": _bars,
    "a closed pipe": _closed_pipe,
    "Ctrl-C": _signal(signal.SIGINT),
    "SIGTERM to skypool": _signal(signal.SIGTERM),
    "Ctrl-C twice": _twice,
    "a closed terminal": _closed_terminal,
    "tmux": _detached,
}


def once(way: Callable[[Place], None], folder: Path, machine: Machine | None = None) -> str:
    """Let a run end in one way. Return what was wrong, "" if nothing was."""
    place = Place(folder, machine)
    try:
        way(place)
        until = time.monotonic() + _SOON
        while left := place.left():
            if time.monotonic() > until:
                return f"left after {_SOON:g} s: {'; '.join(left)}"
            time.sleep(0.05)
    except (AssertionError, OSError, subprocess.SubprocessError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


@contextlib.contextmanager
def reached_by_ssh() -> Iterator[Machine]:
    """Yield a machine of the lab into which ssh gets with the key of an ssh-agent."""
    with Lab() as lab:
        machine = lab.machine(keys=[lab.public_key])
        with agent_with(lab.client_key):
            yield machine


@contextlib.contextmanager
def agent_with(key: Path) -> Iterator[None]:
    """Run an ssh-agent that has a key, and name it in the environment of this process."""
    socket = key.with_name("agent")
    with subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL) as agent:
        try:
            _until(socket.exists, "the ssh-agent")
            os.environ["SSH_AUTH_SOCK"] = str(socket)
            subprocess.run(["ssh-add", "-q", key], check=True)
            yield
        finally:
            del os.environ["SSH_AUTH_SOCK"]
            agent.terminate()


def main(argv: list[str] | None = None) -> int:
    """Let runs end in all ways. Return 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--ssh", action="store_true")
    asked = parser.parse_args(argv)
    random.seed(asked.seed)
    wrong = 0
    with tempfile.TemporaryDirectory() as top, contextlib.ExitStack() as stack:
        machine = stack.enter_context(reached_by_ssh()) if asked.ssh else None
        os.environ["XDG_CACHE_HOME"] = str(with_zip(Path(top, "cache")))
        for number, (name, way) in enumerate(WAYS.items()):
            if way is _detached and shutil.which("tmux") is None:
                print(f"{name}: not tried, as there is no tmux")
                continue
            began = time.monotonic()
            found = [once(way, Path(top, f"{number}-{turn}"), machine) for turn in range(asked.times)]
            bad = [each for each in found if each]
            wrong += len(bad)
            print(f"{name}: {len(found) - len(bad)} of {len(found)} ({time.monotonic() - began:.0f} s)", flush=True)
            for each in bad:
                print(f"    {each}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
