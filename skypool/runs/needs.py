"""`Needs`: all that a runner needs to own a run. The client makes it, and the agent gives it to each runner's stdin."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from skypool.errors import ProtocolError, UsageError
from skypool.head.states import Claim
from skypool.rental.handover import Handover
from skypool.runs import stored
from skypool.runs.program_run import ProgramCall
from skypool.shipping import pure_packages
from skypool.wire.transport import Subprocess

_MOST = 15 << 20
"""The most bytes of packed needs, which travel in one frame."""
_MOST_PROGRAM = 12 << 20
"""The most bytes of a program's command line and variables, which leave room for the rest."""


@dataclass(frozen=True, slots=True)
class Needs:
    """All that a runner needs. On the machine it is only ever in memory, as it may have secrets.

    Attributes:
        claim: the run, and which of its machines this is.
        handover: the pool with its only node, as its own machine reaches it.
        call: the program. Its project and environment are on the machine already.
        retries: how often the program may be started again after it was lost.
        folder: the run's folder on the machine; it may begin with "~".
        saved: the folder on the machine that was to be fetched when the program has ended; "" for none.
        packages: the libraries of the runner, as from `pure_packages.packed`.
        ends: the written end of the run in seconds since 1970, by the clock of the client, which the runner goes by. It
            knows from the agent how many seconds are left until then.
        limit: what ends the run then: "budget" or "lifetime".
        keep: the seconds before that for which the machine stays after its program.
        folders: the names of the folders that the machine saves to buckets. It has the keys itself, in memory.
        on_end: the address to which the runner posts how the run has ended; "" for none.
    """

    claim: Claim
    handover: Handover = field(repr=False)
    call: ProgramCall
    retries: int
    folder: str
    saved: str
    packages: bytes = field(repr=False)
    ends: float = 0.0
    limit: str = "lifetime"
    keep: float = 0.0
    folders: tuple[str, ...] = ()
    on_end: str = field(default="", repr=False)

    @classmethod
    def of(
        cls,
        claim: Claim,
        handover: Handover,
        call: ProgramCall,
        retries: int,
        saved: str,
        folders: Sequence[str] = (),
        on_end: str = "",
    ) -> Needs:
        """Return the needs of a runner on the only machine of a pool."""
        [node] = handover.nodes
        folder = stored.place_of(node.access, claim)
        here = replace(node, access=replace(node.access, transport=Subprocess(), env={}))
        # without settings of drivers, of which there are none, and limits by the clock of this computer
        record = replace(handover.record, notes=(), budget=None, lifetime=None)
        given = replace(handover, record=record, nodes=(here,))
        packages, kept = pure_packages.packed(), tuple(folders)
        return cls(claim, given, call, retries, folder, saved, packages, folders=kept, on_end=on_end)

    def packed(self) -> bytes:
        """Return the needs as bytes, for a process with the same version of skypool.

        Raises UsageError if they are too large for a message.
        """
        data = pickle.dumps(self)
        if len(data) > _MOST:
            raise UsageError(f"what the runner needs has {len(data):,} bytes, and its machine takes {_MOST:,}")
        return data

    @classmethod
    def unpacked(cls, data: bytes) -> Needs:
        """Return needs that the owner of this machine has packed. Raises ProtocolError for anything else."""
        try:
            found = pickle.loads(data)
        except Exception as e:
            raise ProtocolError(f"what the runner needs cannot be read: {type(e).__name__}: {e}") from e
        if not isinstance(found, cls):
            raise ProtocolError(f"the runner got {type(found).__name__} in place of what it needs")
        return found


def check_size(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise UsageError if a program's command line and variables are too large for needs."""
    size = len(pickle.dumps((tuple(words), dict(env))))
    if size > _MOST_PROGRAM:
        raise UsageError(
            f"the program's command line and variables have {size:,} bytes, and a run that is given to its machine may "
            f"have {_MOST_PROGRAM:,}; write what is large into a file of the project"
        )
