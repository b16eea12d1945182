"""SSH keys of a pool: makes the client's key and the host keys that its machines get at boot.

They are made here and known before the first connection, so that no host key is ever believed unseen. They live in a
folder of the pool, readable by this user alone, until the pool has ended.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from skypool.errors import UsageError


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one pool, in `folder`; made when they are first asked for. Any process of this user may ask."""

    folder: Path

    @classmethod
    def of(cls, pool: str) -> Keys:
        """Those of the pool of this name."""
        import platformdirs  # not on a node, where the nouns that speak of keys may be imported too

        return cls(Path(platformdirs.user_state_dir("skypool")) / "pools" / pool / "keys")

    @property
    def identity(self) -> str:
        """The file of the private key by which the client logs in."""
        return str(self._made("client"))

    @property
    def public(self) -> str:
        """The public key that machines let in, "ssh-ed25519 AAAA…"."""
        return self._made("client").with_suffix(".pub").read_text().strip()

    def host(self, label: str) -> tuple[str, str]:
        """The host key of the machines of this label (a token, say): its private part and its public line."""
        file = self._made(f"host-{re.sub(r'[^A-Za-z0-9-]', '-', label)}")
        return file.read_text(), file.with_suffix(".pub").read_text().strip()

    def forget(self) -> None:
        """Remove them all, once no machine is left that they open."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _made(self, name: str) -> Path:
        file = self.folder / name
        if not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(self.folder / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another process may want the same one
                if not file.exists():
                    self._make(file)
        return file

    def _make(self, file: Path) -> None:
        """The private part comes to its place last: where it is, all is there."""
        new = file.with_name(f"new-{file.name}")
        new.unlink(missing_ok=True)  # of a process that was killed
        _keygen(new, f"skypool-{self.folder.parent.name}")
        new.with_suffix(".pub").replace(file.with_suffix(".pub"))
        new.replace(file)


def _keygen(file: Path, comment: str) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(file)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as e:
        raise UsageError("there is no ssh-keygen program here: install openssh-client") from e
    except subprocess.CalledProcessError as e:
        raise UsageError(f"ssh-keygen could not make a key in {file.parent}: {e.stderr.strip()}") from e
