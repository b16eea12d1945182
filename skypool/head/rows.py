"""The row of a run on its machine: the file that says that the run belongs to the machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field

from skypool.errors import SkypoolError
from skypool.head import messages
from skypool.head.states import Claim
from skypool.safety import durable

FILE = "row.json"
"""The name of the row in the folder of its run."""
_VERSION = 1
_MOST = 64 << 10


def boot_id() -> str:
    """Return what identifies the present boot of this machine; "" if its kernel has no `boot_id`."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class WrittenRow:
    """A row on the disk. It has no secret.

    Attributes:
        end: when the machine ends at the latest, in seconds since 1970, by the clock of the machine.
        heir: the digest of the word by which the runner is known, as from `messages.heir_digest`.
        written: when the row was written, by the same clock.
        boot: the boot of the machine in which it was written: as from `boot_id`.
    """

    claim: Claim
    end: float
    heir: str
    written: float
    boot: str = field(default_factory=boot_id)


def write(folder: str, row: WrittenRow) -> None:
    """Write the row of a run into its folder, which exists. It stays there through a loss of power.

    The row is written under another name first, so it is whole or absent. A row that is there is not replaced.

    Raises:
        FileExistsError: there is one.
        OSError: the row could not be written, and is not there.
    """
    path = os.path.join(folder, FILE)
    durable.write_new(path, json.dumps({"version": _VERSION, **asdict(row)}).encode())
    try:
        durable.sync(folder)
        durable.sync(os.path.dirname(os.path.realpath(folder)))  # the folder may be new
    except OSError:
        os.unlink(path)
        raise


def read(folder: str) -> WrittenRow | None:
    """Return the row in the folder of a run; None if there is none.

    Raises:
        OSError: it cannot be read.
        SkypoolError: it is not valid.
    """
    try:
        with open(os.path.join(folder, FILE), "rb") as file:
            return parsed(file.read(_MOST), folder)
    except FileNotFoundError:
        return None


def parsed(data: bytes | str, folder: str) -> WrittenRow:
    """Return the row that is in a file in the folder of a run. Raises SkypoolError if it is not valid."""
    try:
        said = json.loads(data)
        if not isinstance(said, dict):
            raise TypeError("it is no object")
        claim = messages.claim(said["claim"])
        times = float(said["end"]), float(said["written"])
        return WrittenRow(claim, times[0], str(said["heir"]), times[1], str(said.get("boot", "")))
    except (KeyError, OverflowError, RecursionError, TypeError, ValueError) as e:
        raise SkypoolError(
            f"the file {FILE} in {folder} is not valid: {type(e).__name__}: {e}; it was damaged, so nobody knows "
            "whether this machine belongs to a run"
        ) from e
