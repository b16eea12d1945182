"""A Docker daemon of a test run's own: no bridge, no iptables rule, and nothing left of it afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from skypool.agent.processes import descendants
from tests.lab import kernel
from tests.lab.machines import base_root

IMAGE = "skypool-test:base"


def unavailable() -> str:
    """Why there can be no daemon here; empty if there can."""
    if os.geteuid() != 0:
        return "a Docker daemon of one's own needs root"
    missing = [name for name in ("docker", "dockerd", "containerd", "runc") if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install docker.io"
    return "" if base_root().is_dir() else f"{base_root()} is not there: run tests/lab/setup"


class Docker:
    """The daemon. Use it in a with block; `environment` leads the docker program to it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="skypool-docker-"))
        self.host = f"unix://{self.folder}/sock"
        self.environment = {"DOCKER_HOST": self.host, "DOCKER_CONFIG": str(self.folder / "config")}
        (self.folder / "config").mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Docker:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        argv = ["dockerd", f"--data-root={self.folder}/data", f"--exec-root={self.folder}/exec", f"--host={self.host}"]
        argv += [f"--pidfile={self.folder}/pid", "--bridge=none", "--iptables=false", "--ip6tables=false"]
        argv += [f"--cgroup-parent=/{self.folder.name}", "--ip-forward=false", "--ip-masq=false", "--log-level=warn"]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + 30
        while self.docker("version", check=False).returncode != 0:
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"dockerd does not start:\n{(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.1)

    def docker(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **self.environment}
        done = subprocess.run(["docker", *words], env=environment, capture_output=True, text=True)
        if check and done.returncode:
            raise RuntimeError(f"docker {' '.join(words)}: {done.stderr}")
        return done

    def import_root(self) -> None:
        """Make `IMAGE` of the lab's root file system, without what no container needs."""
        left_out = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/lib/apt", "var/cache", "usr/share/perl")
        argv = ["tar", "-C", str(base_root()), *[f"--exclude=./{each}" for each in left_out], "-c", "."]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as pack:
            environment = {**os.environ, **self.environment}
            words = ["docker", "import", "-", IMAGE]
            subprocess.run(words, stdin=pack.stdout, env=environment, check=True, capture_output=True)
        if pack.returncode:
            raise RuntimeError(f"tar of {base_root()} failed")

    def close(self) -> None:
        """End every container and the daemon, and remove what it had on the disk."""
        if self._process is not None:
            if ids := self.docker("ps", "-aq", check=False).stdout.split():
                self.docker("rm", "-f", *ids, check=False)
            below = descendants(self._process.pid)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
            for pid in [*below, self._process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait(10)
        kernel.unmount_below(self.folder)
        for group in [*Path("/sys/fs/cgroup").glob(f"*/{self.folder.name}"), Path("/sys/fs/cgroup", self.folder.name)]:
            with contextlib.suppress(OSError):
                group.rmdir()
        if left := kernel.mounts_below(self.folder):  # never delete through a mount
            raise OSError(f"still mounted: {left}")
        shutil.rmtree(self.folder)
