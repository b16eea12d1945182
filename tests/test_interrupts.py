"""The tests can be started where SIGINT is ignored, and a test that takes too long ends with what it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.conftest import ROOT, eventually, processes_of, served, spinning_servers

IGNORED = 'trap "" INT HUP; exec "$@"'

INTERRUPTED = """
import os, signal, subprocess, sys, time

def wait(number):
    argv = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        child.send_signal(number)
        return child.wait(20)

def test_interrupt():
    assert wait(signal.SIGINT) in (-signal.SIGINT, 130)

def test_hang_up():
    assert wait(signal.SIGHUP) == -signal.SIGHUP

def test_here():
    os.kill(os.getpid(), signal.SIGHUP)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)
    except KeyboardInterrupt:
        return
    raise AssertionError("SIGINT is ignored")
"""

TOO_LONG = """
import subprocess

def test_too_long():
    with subprocess.Popen(["sleep", "{seconds}"]), subprocess.Popen(["setsid", "sh", "-c", "sleep {seconds}; true"]):
        pass
"""


def run(tmp_path: Path, tests: str, *prefix: str) -> subprocess.CompletedProcess[str]:
    """Run these tests with the hooks of this tree."""
    (tmp_path / "conftest.py").write_text("from tests.interrupts import *\nhear_signals()\n")
    (tmp_path / "test_it.py").write_text(tests)
    argv = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    argv += ["--rootdir", str(tmp_path), "--timeout", "3", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)


def test_tests_that_interrupt_pass_where_signals_are_ignored(tmp_path: Path) -> None:
    done = run(tmp_path, INTERRUPTED, "sh", "-c", IGNORED, "sh")
    assert done.returncode == 0, done.stdout


def test_a_timeout_kills_what_the_test_has_started(tmp_path: Path) -> None:
    seconds = f"{10_000 + os.getpid() / 1e7:.7f}"
    done = run(tmp_path, TOO_LONG.format(seconds=seconds))
    assert "Timeout (>3.0s)" in done.stdout, done.stdout
    assert "1 failed" in done.stdout
    eventually(lambda: not processes_of(seconds), what="the end of what it started")


def test_a_server_that_is_closed_under_its_thread_is_told() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    server.server_close()
    eventually(spinning_servers, what="a thread that serves a closed socket")
    assert spinning_servers() == [thread.name]
    server.shutdown()
    with served(ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)):
        assert spinning_servers() == []
    thread.join(30)
    assert spinning_servers() == []


def test_these_tests_hear_interrupts() -> None:
    assert signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.SIG_DFL)
