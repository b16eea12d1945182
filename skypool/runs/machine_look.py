"""`look`: logs in to the machine of a run that was handed over, and returns what is there of the run."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.resources import files

from skypool.errors import SkypoolError
from skypool.head import messages, rows
from skypool.head.states import Claim, Stage
from skypool.model import Access
from skypool.rental.records import RunEnd
from skypool.runs import stored
from skypool.runs.stored import RunStatus
from skypool.shipping import package_zip
from skypool.text import one_line
from skypool.wire.transport import Errand

_AGENT = {"agent": True, "no agent": False}
"""The first line that `scripts/look_for_row.sh` prints, and whether an agent runs."""


@dataclass(frozen=True, slots=True)
class Found:
    """The answer of a machine that was asked for a hand-over.

    Attributes:
        has_agent: True if an agent may run there: its folder is there, and the machine was not rebooted since it wrote
            the row. The rest was looked for after that.
        has_row: True if the row of this hand-over is on its disk, so the run belongs to the machine.
        status: how the run has ended; None if it has not stored that.
        over: how the run has ended, as its agent says, which has heard that it could not be stored; else None.
        unposted: why its end was not posted; "" if it was, or was not to be, or that is not known.
    """

    has_agent: bool
    has_row: bool
    status: RunStatus | None
    over: RunEnd | None = None
    unposted: str = ""

    @property
    def end(self) -> RunEnd | None:
        """The end of the run, as it is stored or as its agent says; None if nothing of that is there."""
        end = self.over if self.status is None else self.status.end
        if end is None or not self.unposted:
            return end
        return replace(end, why="; ".join(filter(None, [end.why, f"its end was not posted: {self.unposted}"])))


def look(access: Access, claim: Claim, heir: str, until: float, patience: int = 0) -> Found:
    """Return what a machine has of a hand-over. Blocks.

    A row of another hand-over does not count, and neither does a stored end beside it.

    Args:
        access: how the machine is reached, with the folder of its agent.
        heir: the digest of the heir of this hand-over.
        until: the time of `time.monotonic()` until which the machine must have answered.
        patience: seconds to wait there until no agent runs any more.

    Raises:
        OSError: it could not be reached, or has not answered in time.
        SkypoolError: what it said is not valid.
    """
    folder = stored.place_of(access, claim)
    places = [
        package_zip.shell_path(each) for each in (access.folder, f"{folder}/{rows.FILE}", f"{folder}/{stored.STATUS}")
    ]
    program = (files("skypool.runs") / "scripts" / "look_for_row.sh").read_text("utf-8")
    script = f"set -- {' '.join(places)} {patience}\n{program}"
    status, said, complaint = Errand(access.transport.argv(["sh", "-c", script]), b"").result(until)
    if status != 0:
        raise SkypoolError(one_line(complaint, 300) or f"the login there has ended with the status {status}")
    first, boot, row, end = (*said.split("\n", 3), "", "", "")[:4]
    if first not in _AGENT:
        raise SkypoolError(f"it said {one_line(first, 100)!r}, which is not what was asked")
    return found(folder, claim, heir, has_agent=_AGENT[first], boot=boot, row=row, end=end)


def found(
    folder: str,
    claim: Claim,
    heir: str,
    *,
    has_agent: bool,
    boot: str,
    row: str,
    end: str,
    over: object = None,
    posted: str = "",
) -> Found:
    """Return what a machine has of a hand-over, by what it says.

    Args:
        folder: the folder of the run.
        heir: the digest of the heir of this hand-over.
        has_agent: True if the folder of the agent is there.
        boot: the present boot of the machine.
        row, end: the text of the row and of the stored end; "" if there is none.
        over: what the agent says of the end of the run, as JSON; None if it says nothing.
        posted: the text that says if the end was posted; "" if there is none.

    Raises SkypoolError if one of them is not valid.
    """
    there = rows.parsed(row, folder) if row else None
    has_row = there is not None and (there.claim, there.heir) == (claim, heir)
    is_of_earlier_boot = there is not None and has_row and "" not in (boot, there.boot) and boot != there.boot
    stored_end = _status(end, claim) if has_row and end.strip() else None
    said = _over(over, claim) if has_row and over is not None else None
    return Found(has_agent and not is_of_earlier_boot, has_row, stored_end, said, stored.unposted(posted))


def _over(said: object, claim: Claim) -> RunEnd | None:
    """Return how a run has ended, as its agent says; None if it says nothing of that."""
    status = messages.status(said)
    if (status.claim, status.stage) != (claim, Stage.OVER) or status.outcome is None:
        return None
    return RunEnd(status.outcome, why=one_line(status.why, 1000))


def _status(said: str, claim: Claim) -> RunStatus:
    try:
        found = RunStatus.from_json(json.loads(said))
    except (RecursionError, ValueError) as e:
        raise SkypoolError(f"the status of the run there is not valid: {e}; its file was damaged") from e
    if found.claim != claim:
        raise SkypoolError(f"the status there is that of generation {found.claim.generation} of run {found.claim.run}")
    return found
