"""`skypool shell`: on a node of this machine, on a lab machine by ssh, with a terminal and without."""

from __future__ import annotations

import os
import pty
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import skypool as sky
from tests.conftest import eventually
from tests.lab.machines import Lab

PROGRAM = [sys.executable, "-c", "import sys; from skypool.cli import main; sys.exit(main())", "shell"]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def shell(*args: str, said: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *args], input=said, capture_output=True, text=True, timeout=60)


def typed(lines: str, *args: str) -> str:
    """What a terminal shows when these lines are typed into it."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*PROGRAM, *args])
    os.write(terminal, lines.encode())
    shown, until = b"", time.monotonic() + 60
    while time.monotonic() < until:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
    os.close(terminal)
    os.waitpid(pid, 0)
    return shown.decode("utf-8", "replace")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def answers(port: int, name: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/hostname", timeout=10) as answer:
            return bool(answer.read().decode().strip() == name)
    except OSError:
        return False


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sky.ComputePool]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # no pool of another test is there to be meant
    with sky.ComputePool(name="here", nodes=2, slots=1, console="off") as pool:
        yield pool


def test_a_command_runs_where_calls_run_and_its_end_is_ours(here: sky.ComputePool) -> None:
    done = shell("here", "--node", "1", "--", sys.executable, "-c", "import os; print(os.getcwd())", "-x")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{os.getcwd()}\n", "")
    done = shell("here", "echo $((20 + 1)) | tr 1 2; exit 7")
    assert (done.returncode, done.stdout) == (7, "22\n")
    assert shell("here", "--", "printf", "%s|", "a b", "$HOME").stdout == "a b|$HOME|"
    assert Path(shell("here", "command -v python").stdout.strip()).parent == Path(sys.executable).parent


def test_without_a_command_it_is_a_shell(here: sky.ComputePool) -> None:
    done = shell("here", said="echo $((6 * 7))\nexit 3\n")
    assert (done.returncode, done.stdout) == (3, "42\n")


@pytest.mark.slow
def test_what_is_not_there_is_said(here: sky.ComputePool) -> None:
    done = shell("here", "-n", "5")
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "error: pool 'here' has no node 5; its nodes are [0, 1]",
    )
    assert "did you mean here?" in shell("her").stderr
    assert "each from 1 to 65535, not 'http'" in shell("here", "-L", "80:http").stderr
    assert "--forward needs a node that is reached over ssh" in shell("here", "-L", "8888").stderr
    here.stop()
    assert "pool 'here' has no running machine; `skypool ps` lists the running pools" in shell("here").stderr


@pytest.mark.slow
def test_a_terminal_on_a_machine_reached_by_ssh(lab: Lab, tmp_path: Path) -> None:
    machine = lab.machine(keys=[lab.public_key])
    hosts = [sky.Host(machine.address, host_key=machine.host_key)]
    provider = sky.SSH(hosts=hosts, user="root", identity=str(lab.client_key))
    with sky.ComputePool(provider, name="there", image=sky.Image(pip=["six"]), console="off"):
        assert shell("there", "--", "python", "-c", "import six; print(six.__name__)").stdout == "six\n"
        assert shell("there", "hostname; pwd; tty").stdout.split("\n")[:3] == [
            machine.name,
            "/root/.skypool/work",
            "not a tty",
        ]
        shown = typed("echo at $(hostname), $(tty)\nexit\n", "there")
        assert re.search(rf"at {machine.name}, /dev/pts/\d+", shown), shown
        here, there = free_port(), 8765
        serving = f"cd /etc && exec python3 -m http.server --bind 127.0.0.1 {there}"
        with subprocess.Popen(
            [*PROGRAM, "there", "--forward", f"{here}:{there}", serving], stdin=subprocess.DEVNULL
        ) as server:
            eventually(lambda: answers(here, machine.name), 30, "the forwarded port")
            server.terminate()
    machine.destroy()
