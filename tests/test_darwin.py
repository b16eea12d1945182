"""The client as on macOS. Each test runs a program of its own, disguised as `tests.darwin` says."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import ROOT

DISGUISE = str(ROOT / "tests" / "as_darwin")


def run(program: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a client as if on macOS."""
    argv = [sys.executable, "-c", textwrap.dedent(program), *words]
    env = {**os.environ, "PYTHONPATH": DISGUISE, **environment}
    return subprocess.run(argv, capture_output=True, text=True, timeout=200, cwd=ROOT, env=env)


def out_of(program: str, *words: str, **environment: str) -> str:
    done = run(program, *words, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_disguise_takes_away_what_macos_lacks_and_nodes_do_not_wear_it() -> None:
    told = out_of(
        """
        import os, platform, select, selectors, signal, socket, sys
        import skypool as sky

        lacking = [
            (os, "eventfd"), (os, "memfd_create"), (os, "pidfd_open"), (os, "pipe2"), (os, "sched_getaffinity"),
            (select, "epoll"), (signal, "sigtimedwait"), (socket, "SO_PEERCRED"), (socket, "MSG_CMSG_CLOEXEC"),
        ]
        assert not [name for module, name in lacking if hasattr(module, name)]
        assert (sys.platform, platform.system(), os.path.exists("/proc")) == ("darwin", "Darwin", False)
        for attempt in (
            lambda: open("/proc/self/stat"),
            lambda: socket.socketpair(type=socket.SOCK_SEQPACKET),
            lambda: socket.socket(socket.AF_UNIX).bind("\\0abstract"),
            lambda: socket.socket(socket.AF_UNIX).bind("/tmp/" + 100 * "x"),
        ):
            try:
                attempt()
            except OSError:
                continue
            raise AssertionError("macOS would have refused")

        @sky.compute
        def there():
            has = hasattr(os, "pidfd_open") and hasattr(select, "epoll") and os.path.exists("/proc/self/stat")
            return sys.platform, platform.system(), has

        with sky.ComputePool(console="off", slots=1) as pool:
            print(there() >> pool)
            print(type(pool._engine.connections.links[0]._inbox.current.turns).__name__)
        """
    )
    assert told.splitlines() == ["('linux', 'Linux', True)", "PollTurns"]


@pytest.mark.needs("ps")
def test_pools_of_this_computer_are_refused_before_anything_begins(tmp_path: Path) -> None:
    program = """
    import sys
    import skypool as sky
    from skypool.testing import FakeCloud

    def refused(what):
        try:
            what()
        except sky.UsageError as e:
            assert "Linux" in str(e) and "\\n" not in str(e), e
            return str(e)
        raise AssertionError("it was not refused")

    print(refused(sky.ComputePool))
    print(refused(sky.Local))
    cloud = FakeCloud(sys.argv[1])
    print(refused(sky.ComputePool(cloud, console="off").start))
    assert (cloud.count(), cloud.control.calls("create")) == (0, [])
    """
    told = out_of(program, str(tmp_path / "cloud"), SKYPOOL_STRICTLY_DARWIN="1").splitlines()
    assert "SSH() or Container()" in told[0]
    assert told[1] == told[0]
    assert "FakeCloud(machines=False)" in told[2]


def test_renting_can_be_rehearsed_where_no_node_can_run(tmp_path: Path) -> None:
    program = """
    import sys
    from skypool.model import Need, Order
    from skypool.testing import FakeCloud

    cloud = FakeCloud(sys.argv[1], machines=False)
    offer = next(iter(cloud.offers(Need())))
    made = cloud.launch(offer, Order("p", "s-0", (0, 1), Need()))
    cloud.terminate(made)
    print(len(made), cloud.count("machine"))
    """
    assert out_of(program, str(tmp_path / "cloud"), SKYPOOL_STRICTLY_DARWIN="1") == "2 0\n"


@pytest.mark.needs("ps")
def test_who_a_process_is_does_not_depend_on_language_and_time_zone() -> None:
    program = """
    import os, subprocess, sys
    from skypool.processes import Process

    print(Process.this().birth == Process.of(os.getpid()).birth, Process.this().lives())
    print(Process.of(os.getppid()).birth)
    child = subprocess.Popen(["sleep", "60"])
    it = Process.of(child.pid)
    assert it.lives() and it.birth
    child.kill()
    assert it.lives() is False  # a zombie yet
    child.wait()
    assert it.lives() is False
    """
    one = out_of(program, TZ="Asia/Tokyo", LC_ALL="C.UTF-8").splitlines()
    other = out_of(program, TZ="America/New_York").splitlines()
    assert one == other
    assert one[0] == "True True"


@pytest.mark.needs("ps")
def test_a_mac_keeps_the_name_that_its_machines_are_tagged_with(tmp_path: Path) -> None:
    scutil = tmp_path / "scutil"
    scutil.write_text('#!/bin/sh\n[ "$*" = "--get LocalHostName" ] && echo Annas-Mac\n')
    scutil.chmod(0o755)
    program = """
    import socket
    from skypool.drivers import tags
    from skypool.processes import Process

    first = tags.owner(), Process.this().host
    socket.gethostname = lambda: "dhcp-10-0-0-7.example.org"
    assert (tags.owner(), Process.this().host) == first
    print(first[1], first[0].partition("@")[2])
    """
    assert out_of(program, PATH=f"{tmp_path}:{os.environ['PATH']}") == "Annas-Mac Annas-Mac\n"
    nameless = out_of(program.replace("print", "0 and print"), PATH=os.environ["PATH"])  # there is no scutil
    assert nameless == ""


@pytest.mark.slow
def test_calls_of_many_threads_and_of_the_engine_all_come_back() -> None:
    """Who waits reads the connection, or the engine does; no hand-over between them may lose an answer."""
    program = """
    import threading
    import skypool as sky

    @sky.compute
    def twice(n):
        return 2 * n

    wrong = []

    def ask(pool, first):
        for n in range(first, first + 150):
            if n % 3 == 0:
                found = pool.submit(abs, -2 * n).result(60)
            else:
                found = twice(n) >> pool
            if found != 2 * n:
                wrong.append((n, found))

    with sky.ComputePool(console="off", slots=2) as pool:
        threads = [threading.Thread(target=ask, args=(pool, 1000 * k)) for k in range(6)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(150)
        assert not any(each.is_alive() for each in threads)
    assert not wrong, wrong
    """
    assert out_of(program) == ""


@pytest.mark.needs("ps")
def test_large_values_pass_through_small_buffers() -> None:
    program = """
    import numpy as np
    import skypool as sky

    there = np.arange(5_000_000)
    with sky.ComputePool(console="off", slots=1) as pool:
        assert (pool.submit(np.add, there, 1).result(100) == there + 1).all()
    """
    assert out_of(program) == ""


@pytest.mark.needs("openssh")
def test_state_in_a_folder_with_a_space_in_its_path_is_good_for_ssh(tmp_path: Path) -> None:
    """As ~/Library/Application Support has one."""
    program = """
    from skypool.wire import host_keys as hostkeys
    from skypool.wire.keys import Keys
    from skypool.wire.transport import SSH

    assert "/Library/Application Support/skypool/" in Keys.of("p").identity
    known = hostkeys.declared(SSH("gpu1"), "p-0", Keys.of("p").public)
    assert hostkeys.fingerprint(known.alias, known.known_hosts[0])
    ssh = SSH("gpu1", identity=Keys.of("p").identity, known_hosts=known.known_hosts)
    import subprocess
    said = subprocess.run(["ssh", "-G", *ssh.argv([])[1:-1]], capture_output=True, text=True, check=True).stdout
    assert f"userknownhostsfile {known.known_hosts[0]}" in said.replace('"', ""), said
    """
    environment = {"HOME": str(tmp_path), "XDG_STATE_HOME": "", "XDG_CACHE_HOME": ""}
    assert out_of(program, **environment) == ""


@pytest.mark.parametrize("name", ["tests/darwin.py", "tests/as_darwin/sitecustomize.py"])
def test_the_disguise_imports_nothing_of_skypool(name: str) -> None:
    assert "skypool " not in "\n".join(
        line for line in (ROOT / name).read_text().splitlines() if line.startswith(("import", "from"))
    )
