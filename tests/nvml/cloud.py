"""A fake cloud whose machines have the GPUs of the fake NVML library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skypool.agent.node_facts import SWITCH
from skypool.drivers import Transport
from skypool.model import Access, Instance
from skypool.testing import FakeCloud
from skypool.wire.transport import Trouble


@dataclass(frozen=True)
class _Door:
    """A transport to a machine whose programs get their environment from env(1) with these arguments."""

    door: Transport
    env: tuple[str, ...]

    def argv(self, command: Sequence[str], *, terminal: bool = False) -> list[str]:
        return self.door.argv(["env", *self.env, *command], terminal=terminal)

    def trouble(self, said: str) -> Trouble:
        return self.door.trouble(said)


class CloudWithCards(FakeCloud):
    """A fake cloud whose machines measure the GPUs of the fake NVML library that is built beside the cloud's folder."""

    @property
    def beside(self) -> Path:
        """The folder in which the cloud's folder is."""
        return Path(str(self.state)).parent

    def env(self, instance: Instance) -> tuple[str, ...]:
        """Return arguments of env(1) that change the environment of a machine's programs."""
        return (f"LD_LIBRARY_PATH={self.beside}", f"NVML_SCRIPT={self.beside}/script", f"{SWITCH}=on")

    def access(self, instance: Instance) -> Access:
        found = super().access(instance)
        return replace(found, transport=_Door(found.transport, self.env(instance)))
