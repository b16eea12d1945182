"""A Docker daemon of a test run's own: no bridge, no iptables rule, and nothing left of it afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from skypool.agent.start import descendants

IMAGE = "skypool-test:base"


def unavailable() -> str:
    """Why there can be no daemon here; empty if there can."""
    if os.geteuid() != 0:
        return "a Docker daemon of one's own needs root"
    missing = [name for name in ("docker", "dockerd", "containerd", "runc") if not shutil.which(name)]
    return f"{', '.join(missing)} missing: apt-get install docker.io" if missing else ""


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
        argv += ["--ip-forward=false", "--ip-masq=false", "--log-level=warn"]
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

    def import_root(self, root: Path, changes: Sequence[str] = ()) -> str:
        """Make an image of a root file system; its name."""
        argv = ["docker", "import", *[f"--change={each}" for each in changes], "-", IMAGE]
        # of what the lab has in it, a container needs neither documentation nor package lists
        left_out = [
            f"--exclude=./{each}"
            for each in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/lib/apt/lists")
        ]
        pack = subprocess.Popen(["tar", "-C", str(root), *left_out, "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(argv, stdin=pack.stdout, env={**os.environ, **self.environment}, check=True, capture_output=True)
        if pack.wait():
            raise RuntimeError(f"tar of {root} failed")
        return IMAGE

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
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            if (place := line.split()[4]).startswith(f"{self.folder}/"):
                subprocess.run(["umount", "--lazy", place], check=False, capture_output=True)
        shutil.rmtree(self.folder)
