"""SSH keys of a pool: the client's key, and the host keys that the pool's machines get at boot.

All keys are made on the client and known before the first connection, so no unknown host key is ever trusted. The keys
are kept in a folder of the pool until the pool has ended. Only the user who runs the client can read that folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from skypool.errors import UsageError
from skypool.safety import private, user_folders


@dataclass(frozen=True, slots=True)
class Keys:
    """SSH keys of one pool, in a folder. The folder, and each key, is made when it is first needed.

    Several processes of this user may use the same folder at once. If a key must be made, and ssh-keygen is not
    installed or fails, a UsageError is raised.
    """

    folder: Path

    @classmethod
    def of(cls, pool: str) -> Keys:
        """Return the keys of the pool with this name, in the user's state folder. No key or folder is made yet."""
        return cls(user_folders.state() / "pools" / pool / "keys")

    @property
    def identity(self) -> str:
        """The path of the private key with which the client logs in."""
        return str(self._made("client"))

    @property
    def public(self) -> str:
        """The client's public key, which the pool's machines accept: one line "ssh-ed25519 AAAA… comment"."""
        return self._made("client").with_suffix(".pub").read_text().strip()

    def host(self, label: str) -> tuple[str, str]:
        """Return the host key of the machines with this label as two texts: the private key and the public key.

        With a host key, a machine proves to the client which machine it is. Later calls with the same label return the
        same key. Characters of the label other than letters, digits and "-" become "-".
        """
        file = self._made(f"host-{re.sub(r'[^A-Za-z0-9-]', '-', label)}")
        return file.read_text(), file.with_suffix(".pub").read_text().strip()

    def forget(self) -> None:
        """Remove all keys of the pool, with their folder. Errors are ignored.

        Call this only when the pool has no machine left, because the client can then no longer log in.
        """
        shutil.rmtree(self.folder, ignore_errors=True)

    def _made(self, name: str) -> Path:
        """Return the file of a private key, and make the key first if needed. Raises UsageError or NotPrivate."""
        file = private.folder(self.folder, private.STATE) / name
        private.check_file(file)
        if not file.exists():
            with open(private.opened(self.folder / "lock", os.O_CREAT | os.O_RDWR), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making the same key
                if not file.exists():
                    self._make(file)
        return file

    def _make(self, file: Path) -> None:
        """Make a key pair, or replace one. The public key is put in place first, so a private key never lacks one."""
        new = file.with_name(f"new-{file.name}")
        new.unlink(missing_ok=True)  # left by a process that was killed
        _keygen(new, f"skypool-{self.folder.parent.name}")
        new.with_suffix(".pub").replace(file.with_suffix(".pub"))
        new.replace(file)


def _keygen(file: Path, comment: str) -> None:
    """Run ssh-keygen to make an ed25519 key pair without a passphrase, and wait for it. Raises UsageError."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(file)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as e:
        raise UsageError("the program ssh-keygen is not installed on this computer: install openssh-client") from e
    except subprocess.CalledProcessError as e:
        raise UsageError(
            f"ssh-keygen could not create a key in {file.parent}: {e.stderr.strip()}; check that this folder is "
            "writable and its disk has free space"
        ) from e
