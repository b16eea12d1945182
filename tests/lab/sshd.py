"""Hosts without root: an sshd of the user's own for each, on its own loopback address, with a home of its own.

What they do not have is isolation: they share processes, files and the user's account.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

_CONFIG = """\
ListenAddress {address}
Port {port}
HostKey {folder}/host_key
PidFile {folder}/pid
AuthorizedKeysFile {folder}/authorized_keys
SetEnv HOME={home} PATH={tools}:/usr/local/bin:/usr/bin:/bin
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
AllowTcpForwarding yes
MaxStartups 100
LogLevel VERBOSE
"""


def unavailable() -> str:
    """Why there can be no sshd here; empty if there can."""
    if not shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", "")):
        return "there is no sshd here: apt-get install openssh-server"
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # where sshd locks itself into before a login
    return ""


class Sshd:
    """One host.

    Args:
        folder: where it has its files; number: makes its address.
        public_key: who may log in.
    """

    def __init__(self, folder: Path, number: int, public_key: str) -> None:
        self.folder, self.address = folder, f"127.0.77.{number}"
        self.home, self.tools = folder / "home", folder / "tools"
        for each in (self.home, self.tools):
            each.mkdir(parents=True)
        self.user = getpass.getuser()
        self.new_key()
        (folder / "authorized_keys").write_text(public_key)
        with socket.socket() as free:
            free.bind((self.address, 0))
            self.port = free.getsockname()[1]
        settings = _CONFIG.format(address=self.address, port=self.port, folder=folder, home=self.home, tools=self.tools)
        (folder / "sshd_config").write_text(settings)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def new_key(self) -> None:
        """Give it another host key; seen after a restart."""
        (self.folder / "host_key").unlink(missing_ok=True)
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(self.folder / "host_key")]
        subprocess.run(argv, check=True)

    @property
    def host_key(self) -> str:
        """Its public host key: kind and key."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def start(self) -> None:
        sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))
        assert sshd is not None
        with open(self.folder / "log", "ab") as log:
            argv = [sshd, "-D", "-e", "-f", str(self.folder / "sshd_config")]
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), timeout=1) as answer:
                if answer.recv(4) == b"SSH-":
                    return
            if time.monotonic() > until or self._process.poll() is not None:
                raise RuntimeError(f"sshd does not start:\n{self.log}")
            time.sleep(0.02)

    def stop(self) -> None:
        """End it, and every connection to it."""
        if self._process is None:
            return
        from skypool.agent.start import descendants

        # what a session started in a session of its own, such as an agent, is no longer below it
        for pid in [*descendants(self._process.pid), self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(10)
        self._process = None

    def nodes(self) -> list[str]:
        """The nodes of pools that are there now."""
        pools = self.home / ".skypool/pools"
        return sorted(each.name for each in pools.iterdir() if each.is_dir()) if pools.exists() else []
