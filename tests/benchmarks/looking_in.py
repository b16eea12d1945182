"""Each command that looks in at a run on a machine that is reached by ssh, beside `ssh true` and `skypool --version`.

python -m tests.benchmarks.looking_in
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks.core import Row
from tests.lab.homehost import HomeHost
from tests.lab.machines import make_key

_TIMES = 7
_MORE = 0.3
"""The seconds that a command may take beyond the two others."""
_NAME = "looked-at"
_PROGRAM = """import time
print("first line", flush=True)
open("here.txt", "w").write("some text")
time.sleep(600)
"""
_RUN = """
import sys
import skypool as sky
from skypool.runs.run import _Printer
from skypool.runs.target import Target
from skypool.runs.whole_run import Asked, WholeRun
host = sky.Host({address!r}, port={port!r}, host_key={host_key!r})
ssh = sky.SSH(hosts=[host], user={user!r}, identity={identity!r})
asked = Asked({{"provider": ssh}}, name={name!r}, max_lifetime=900.0, detach=True, yes=True)
whole = WholeRun(Target.of(["train.py"]), asked, _Printer())
whole.check()
sys.exit(whole.run())
"""
_COMMANDS: dict[str, tuple[str, ...]] = {
    "logs": ("logs", _NAME),
    "logs -f, its first line": ("logs", "-f", _NAME),
    "wait --timeout 1ms": ("wait", _NAME, "--timeout", "1ms"),
    "health": ("health", _NAME),
    "stack": ("stack", _NAME),
    "top --once": ("top", _NAME, "--once"),
    "report": ("report", _NAME, "-o", "-"),
    "shell -- true": ("shell", _NAME, "--", "true"),
    "pull": ("pull", _NAME, "here.txt", "fetched.txt"),
    "push": ("push", _NAME, "sent.txt"),
    "forward, its first line": ("forward", _NAME, "22", "--here", "0"),
    "ps": ("ps",),
}


def rows() -> Iterator[Row]:
    """(what, figure, baseline, ratio)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        identity = make_key(folder / "identity")
        host = HomeHost([identity.with_suffix(".pub").read_text()])
        env = os.environ | {"XDG_STATE_HOME": f"{folder}/state", "XDG_CACHE_HOME": f"{folder}/cache"}
        skypool = [sys.executable, "-m", "skypool"]
        try:
            (folder / "train.py").write_text(_PROGRAM)
            (folder / "sent.txt").write_text("other text")
            told = {"address": host.address, "port": host.port, "host_key": host.host_key, "user": host.user}
            (folder / "run.py").write_text(_RUN.format(**told, identity=str(identity), name=_NAME))
            subprocess.run([sys.executable, "run.py"], cwd=folder, env=env, check=True)
            time.sleep(3)
            options = ["-i", str(identity), "-p", str(host.port), "-o", "StrictHostKeyChecking=no"]
            ssh = ["ssh", *options, "-o", f"UserKnownHostsFile={folder}/known", f"{host.user}@{host.address}", "true"]
            base = _median(ssh, folder, env) + _median([*skypool, "--version"], folder, env)
            for what, words in _COMMANDS.items():
                ours = _median([*skypool, *words], folder, env, lines=1 if what.endswith("first line") else None)
                figures = f"{ours:.2f} s", f"{base:.2f} s ssh true + skypool --version"
                yield what, *figures, f"{ours - base:+.2f} s (≤ {_MORE}), {ours / base:.2f}"
        finally:
            subprocess.run([*skypool, "down", _NAME, "--yes"], cwd=folder, env=env, check=False, capture_output=True)
            host.close()


def _median(argv: Sequence[str], folder: Path, env: dict[str, str], lines: int | None = None) -> float:
    """Return the median time of a command in seconds, or of its first `lines` lines."""
    times = []
    for number in range(_TIMES + 1):
        began = time.perf_counter()
        with subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            if lines is None:
                process.stdout.read()
            else:
                assert process.stdout.readline()
                times.append(time.perf_counter() - began)
                process.send_signal(signal.SIGINT)
                process.stdout.read()
        if lines is None:
            times.append(time.perf_counter() - began)
            assert process.returncode in (0, 124), (argv, process.returncode)
        if not number:
            times.clear()  # the first makes everything ready
    return statistics.median(times)


if __name__ == "__main__":
    for row in rows():
        print(*row, sep="  |  ", flush=True)
