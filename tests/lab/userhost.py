"""A host to reach by ssh without root: the user's own sshd on an address of 127.0.0.0/8. No isolation, no boot."""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.lab.kernel import wait_until
from tests.lab.machines import make_key


class UserHost:
    """An sshd of this user. Attributes are called as those of a `Machine`.

    Args:
        keys: Public keys that may log in.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="userhost-"))
        self.user = getpass.getuser()
        self.address, self.port = free_place()
        key = make_key(self.folder / "host_key")
        self.host_key = " ".join(key.with_suffix(".pub").read_text().split()[:2])
        (self.folder / "authorized_keys").write_text("".join(f"{line}\n" for line in keys))
        (self.folder / "sshd_config").write_text(self._config(key))
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)  # where root's sshd locks up its unprivileged half
        self._process: subprocess.Popen[bytes] | None = None
        self.start_sshd()

    def _config(self, key: Path) -> str:
        return "\n".join(
            [
                f"ListenAddress {self.address}",
                f"Port {self.port}",
                f"HostKey {key}",
                f"AuthorizedKeysFile {self.folder}/authorized_keys",
                "PidFile none",
                "UsePAM no",
                "StrictModes no",  # its folder is below one that anybody may write to
                "PasswordAuthentication no",
                "Subsystem sftp internal-sftp",
                "",
            ]
        )

    def start_sshd(self) -> None:
        """Start it, again if it was ended."""
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        with open(self.folder / "log", "ab") as log:
            argv = [sshd, "-D", "-e", "-f", str(self.folder / "sshd_config")]
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=log, start_new_session=True)
        wait_until(lambda: self._answers() or not self.is_running, 30, "sshd")
        if not self.is_running:
            raise RuntimeError(f"sshd ended: {self.console()}")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def console(self) -> str:
        """What sshd said."""
        return (self.folder / "log").read_text()

    def known_hosts(self) -> Path:
        """A file for ssh's UserKnownHostsFile that knows this host and nobody else."""
        file = self.folder / "known_hosts"
        file.write_text(f"[{self.address}]:{self.port} {self.host_key}\n")
        return file

    def kill_sshd(self) -> None:
        """End the listener; sessions go on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End it and remove its folder."""
        self.kill_sshd()
        shutil.rmtree(self.folder)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), timeout=1) as connection:
            return connection.recv(4) == b"SSH-"
        return False

    def __enter__(self) -> UserHost:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def free_place() -> tuple[str, int]:
    """An address and a port of loopback that nobody listens on."""
    address = f"127.0.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
    with socket.create_server((address, 0)) as probe:
        return address, int(probe.getsockname()[1])
