"""A `UserHost` whose logins have a home and tools of their own, so that several make several hosts."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from skypool.agent.processes import descendants
from tests.lab.machines import make_key
from tests.lab.userhost import UserHost


class HomeHost(UserHost):
    """One of several hosts. They share processes and the user's account."""

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def tools(self) -> Path:
        """Comes first where the host looks for programs."""
        return self.folder / "tools"

    def _config(self, key: Path) -> str:
        for each in (self.home, self.tools):
            each.mkdir()
        path = f"{self.tools}:/usr/local/bin:/usr/bin:/bin"
        return f"{super()._config(key)}SetEnv HOME={self.home} PATH={path}\nMaxStartups 100\nLogLevel VERBOSE\n"

    def change_key(self) -> None:
        """Another host key, as after a new installation."""
        self.stop()
        for file in self.folder.glob("host_key*"):
            file.unlink()
        self.host_key = " ".join(make_key(self.folder / "host_key").with_suffix(".pub").read_text().split()[:2])
        self.start_sshd()

    def stop(self) -> None:
        """End sshd, and every connection to it; agents live on."""
        below = descendants(self._process.pid) if self._process is not None else []
        self.kill_sshd()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def nodes(self) -> list[str]:
        """The nodes of pools that are there now."""
        pools = self.home / ".skypool/pools"
        return sorted(each.name for each in pools.iterdir() if each.is_dir()) if pools.exists() else []
