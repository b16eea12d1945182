"""Files that a run leaves on its own machine, and in particular the one that says how it has ended.

They are in `messages.folder_of`, outside of the folder of the agent, which is removed when the agent ends.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skypool.errors import SkypoolError
from skypool.head import messages
from skypool.head.states import Claim, Outcome
from skypool.model import Access
from skypool.rental.records import RunEnd
from skypool.runs.output_files import END, END_FILE
from skypool.safety import durable, private, user_folders
from skypool.text import one_line
from skypool.wire.frames import WIRE_VERSION
from skypool.wire.save_orders import FolderState
from skypool.wire.transport import Subprocess

STATUS = "status.json"
"""The file that says how a run has ended."""
ABOUT = "about.json"
"""The file that says what runs there."""
POSTED = "posted.json"
"""The file that says if the end of a run was posted to the address that its user has given."""
RESERVE = "reserve"
"""A file that keeps room on the disk for the status."""
_ROOM = 64 << 10
"""The bytes of that room. A status has a few thousand, and file systems need some for its name."""
OUTPUT = "output"
"""The folder with the output files of each attempt, by its number, and there of each process, by its rank."""
_ENDS = (Outcome.ENDED, Outcome.FAILED, Outcome.CANCELLED, Outcome.INTERRUPTED)
"""The outcomes that a runner stores."""
_VERSION = 1
MOST = 1 << 20
"""The most bytes of a status."""
_DIGITS = 16
"""The digits of a digest that tell runs of one name apart."""
_LATEST = 7e9
"""A later end, of a machine with a wrong clock, counts as this: in seconds since 1970."""
_MOST_STATUS = 255
_MOST_ATTEMPTS = 1 << 31
_MOST_FOLDERS = 64
_MOST_NAMES = 5
_LONGEST_NAME = 100
_LONGEST_TEXT = 300
_LONGEST_URL = 1024


@dataclass(frozen=True, slots=True)
class KeptFolder:
    """A folder of a run that is kept in a bucket, at the end of the run.

    Attributes:
        id: the name of the folder as the user wrote it.
        url: the place where it is kept; "" if its machine has not said it.
        files: the number of files that were saved, and `bytes` their bytes.
        unsaved: the number of files that are saved nowhere as they were last.
        names: some of these.
        why: why something is or may be saved nowhere; "" if all is saved.
    """

    id: str
    url: str = ""
    files: int = 0
    bytes: int = 0
    unsaved: int = 0
    names: tuple[str, ...] = ()
    why: str = ""

    @classmethod
    def of(cls, id_: str, state: FolderState | None) -> KeptFolder:
        """Return what is known of a folder when it was saved for the last time; `state` is None for nothing."""
        if state is None:
            return cls(id_, why="its machine has not told what is saved of it")
        has_ended = state.phase == "ended"
        is_saved = has_ended and (state.whole or not state.unsaved)
        why = "" if is_saved else state.trouble or "there was no time for it"
        names = tuple(one_line(each, _LONGEST_NAME) for each in state.names) if why else ()
        unsaved = state.unsaved if why else 0
        return cls(
            one_line(id_, _LONGEST_TEXT), one_line(state.url, _LONGEST_URL), state.files, state.bytes, unsaved, names,
            one_line(why, _LONGEST_TEXT),
        )  # fmt: skip

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> KeptFolder:
        """Return the folder that a JSON object is. Raises KeyError, TypeError or ValueError for anything else."""
        files, bytes_, unsaved = (int(said[name]) for name in ("files", "bytes", "unsaved"))
        if min(files, bytes_, unsaved) < 0:
            raise ValueError("less than no file")
        return cls(
            one_line(str(said["id"]), _LONGEST_TEXT), one_line(str(said["url"]), _LONGEST_URL), files, bytes_, unsaved,
            tuple(one_line(str(each), _LONGEST_NAME) for each in [*said["names"]][:_MOST_NAMES]),
            one_line(str(said["why"]), _LONGEST_TEXT),
        )  # fmt: skip

    @property
    def lost(self) -> str:
        """The files that are or may be saved nowhere, and why; "" if all are saved."""
        if not self.why:
            return ""
        if not self.unsaved:
            return f"files of the last seconds of {self.id} perhaps: {self.why}"
        named = f" ({', '.join(self.names)})" if self.names else ""
        return f"{self.unsaved} file{'s' * (self.unsaved != 1)} of {self.id}{named}: {self.why}"


@dataclass(frozen=True, slots=True)
class KeptResult:
    """The file with the result of a call, by which it is known again.

    Attributes:
        bytes: its size.
        sha256: its SHA-256, 64 hexadecimal digits.
    """

    bytes: int
    sha256: str

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> KeptResult:
        """Return what a JSON object is. Raises KeyError, TypeError or ValueError for anything else."""
        found = cls(int(said["bytes"]), str(said["sha256"]))
        if found.bytes < 0 or len(found.sha256) != 64 or set(found.sha256) - set("0123456789abcdef"):
            raise ValueError("no result is known so")
        return found


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The end of a run, as its runner has stored it.

    Attributes:
        outcome: how it has ended.
        returncode: the exit status of the program: 128 + n if signal n ended it; None if nobody knows.
        attempts: the number of times that the program was started.
        ended: when its runner has stored this, in seconds since 1970, by the clock of the client
            that has handed the run over.
        usd: what the run has cost so far, at the last known prices; None if that is not known.
        limit: what the program was stopped for: "budget" or "lifetime"; "" if it was not.
        why: why the program has failed, if that is known; "" if not.
        saved: the folder that was to be fetched, on the machine; "" for none.
        folders: the folders that are kept in buckets.
        result: what the call has returned or raised; None for a program, or if there is nothing.
    """

    claim: Claim
    outcome: Outcome
    returncode: int | None
    attempts: int
    ended: float
    usd: float | None = None
    limit: str = ""
    why: str = ""
    saved: str = ""
    folders: tuple[KeptFolder, ...] = ()
    result: KeptResult | None = None

    @property
    def unsaved(self) -> str:
        """The files of its folders that are or may be saved nowhere, and why; "" if all are saved."""
        return "; ".join(filter(None, (each.lost for each in self.folders)))

    @property
    def end(self) -> RunEnd:
        """The end of the run as the ledger keeps it."""
        return RunEnd(
            self.outcome, self.returncode, self.attempts, min(self.ended, _LATEST), self.usd, self.limit, self.why,
            self.unsaved,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {"version": _VERSION, **asdict(self), "outcome": self.outcome.value}

    @classmethod
    def from_json(cls, said: object) -> RunStatus:
        """Return the status that is in a file. Raises SkypoolError if it is none."""
        try:
            if not isinstance(said, dict):
                raise TypeError("it is no object")
            if Outcome(said["outcome"]) not in _ENDS or not 0.0 <= float(said["ended"]) < math.inf:
                raise ValueError("no runner stores this")
            usd = None if said["usd"] is None else float(said["usd"])
            returncode = None if said["returncode"] is None else int(said["returncode"])
            if not 0 <= (returncode or 0) <= _MOST_STATUS or not 0.0 <= (usd or 0.0) < math.inf:
                raise ValueError("no program ends so")
            if not 0 <= (attempts := int(said["attempts"])) <= _MOST_ATTEMPTS:
                raise ValueError("no program is started so often")
            return cls(
                claim=messages.claim(said["claim"]),
                outcome=Outcome(said["outcome"]),
                returncode=returncode,
                attempts=attempts,
                ended=float(said["ended"]),
                usd=usd,
                limit=one_line(str(said["limit"]), 100),
                why=one_line(str(said["why"]), 1000),
                saved=str(said["saved"]),
                folders=tuple(map(KeptFolder.from_json, [*said.get("folders", ())][:_MOST_FOLDERS])),
                result=None if said.get("result") is None else KeptResult.from_json(said["result"]),
            )
        except (KeyError, OverflowError, TypeError, ValueError) as e:
            raise SkypoolError(
                f"the status of a run is not valid: {type(e).__name__}: {e}; its file was damaged"
            ) from e


@dataclass(frozen=True, slots=True)
class About:
    """The facts of a program that whoever looks in at its run must know. It has no secret.

    Attributes:
        procs: the number of processes; None for one that is not called a rank.
        folder: the folder on the machine in which the program starts.
        programs: the folder of the programs of its environment; "" for none.
        posts: True if the runner posts the end of the run.
    """

    procs: int | None
    folder: str
    programs: str
    posts: bool = False

    @classmethod
    def parsed(cls, text: str) -> About | None:
        """Return what is in the file; None if it is not there, or not valid."""
        try:
            said = json.loads(text)
            procs = said["procs"]
            return cls(None if procs is None else int(procs), str(said["folder"]), str(said["programs"]))
        except (KeyError, RecursionError, TypeError, ValueError):
            return None


def describe(folder: Path, about: About) -> None:
    """Write what runs there, unless a former runner has done that. Raises OSError if it cannot be written."""
    said = {"version": _VERSION, "wire": WIRE_VERSION, **asdict(about)}  # whoever talks to the agent needs the latter
    with contextlib.suppress(FileExistsError):
        durable.write_new(private.folder(folder) / ABOUT, json.dumps(said).encode())


def note_post(folder: Path, why: str) -> None:
    """Write that the end of a run was posted, or why not. Raises OSError if it cannot be written."""
    durable.write_new(folder / POSTED, json.dumps({"version": _VERSION, "why": why}).encode())


def unposted(text: str) -> str:
    """Return why the end of a run was not posted, from the text of the file; "" if it was, or nobody knows that."""
    try:
        return one_line(str(json.loads(text)["why"]), _LONGEST_TEXT) if text else ""
    except (KeyError, RecursionError, TypeError, ValueError):
        return ""


def place_of(access: Access, claim: Claim) -> str:
    """Return the folder of a run on its machine, by how the machine is reached. It may begin with "~"."""
    is_here = isinstance(access.transport, Subprocess)
    return messages.folder_of(str(user_folders.state()) if is_here else access.home, claim)


def reserve(folder: Path) -> None:
    """Keep room on the disk for the status of a run, which is stored even if the run fills the disk.

    Raises OSError if there is no room.
    """
    (private.folder(folder) / RESERVE).write_bytes(os.urandom(_ROOM))  # no file system stores it in less


def store(folder: Path, status: RunStatus) -> RunStatus:
    """Write the status of a run, unless there is one. Return the one that is there then, also after a loss of power.

    What `reserve` has kept is free then.

    Raises:
        OSError: it cannot be written.
        SkypoolError: what is there is not valid.
    """
    private.folder(folder)
    (folder / RESERVE).unlink(missing_ok=True)
    with contextlib.suppress(FileExistsError):  # a former runner has stored one
        durable.write_new(folder / STATUS, _packed(status))
    durable.sync(folder)
    found = stored(folder)
    assert found is not None
    return found


def _packed(status: RunStatus) -> bytes:
    return json.dumps(status.to_json()).encode()


def note_name(claim: Claim, heir: str) -> str:
    """Return the name of the end of a run in a bucket. `heir` is the digest by which its hand-over is known."""
    return f"{claim.run}-{claim.generation}-{heir[:_DIGITS]}.json"


def result_name(claim: Claim, heir: str) -> str:
    """Return the name of the result of a call in a bucket, beside the end of its run."""
    return f"{claim.run}-{claim.generation}-{heir[:_DIGITS]}.result"


def note_of(status: RunStatus, heir: str, key: str) -> str:
    """Return the end of a run as it is kept in a bucket.

    Args:
        heir: the digest by which its hand-over is known.
        key: the key with which it is signed, as from `messages.seal_key`.
    """
    said = {**status.to_json(), "heir": heir}
    return json.dumps({**said, "seal": _seal(said, key)})


def from_note(data: bytes, claim: Claim, heir: str, key: str = "") -> RunStatus | None:
    """Return the end of a run in a bucket; None if it is that of another hand-over.

    `key` is the key with which it must be signed; "" if that is not known.

    Raises SkypoolError or ValueError if it is not valid.
    """
    said = json.loads(data)
    found = RunStatus.from_json(said)
    if (found.claim, said.get("heir")) != (claim, heir):
        return None
    seal = str(said.pop("seal", ""))
    if key and not hmac.compare_digest(seal.encode(), _seal(said, key).encode()):
        raise SkypoolError("it was not written by the run, as its signature is wrong")
    return found


def _seal(said: Mapping[str, Any], key: str) -> str:
    return hmac.new(key.encode(), json.dumps(said, sort_keys=True).encode(), "sha256").hexdigest()


def stored(folder: Path) -> RunStatus | None:
    """Return the status of a run in its folder; None if none is stored.

    Raises:
        OSError: it cannot be read.
        SkypoolError: it is not valid.
    """
    try:
        data = (folder / STATUS).read_bytes()
    except FileNotFoundError:
        return None
    try:
        said = json.loads(data) if len(data) <= MOST else None
    except ValueError:
        said = None
    return RunStatus.from_json(said)


def statuses(folder: Path, ranks: Sequence[int]) -> list[int | None]:
    """Return the exit status of each process of an attempt, below 0 for a signal; None for one that did not end.

    `folder` has the output files of the attempt.
    """
    found: list[int | None] = []
    for rank in ranks:
        try:
            data = (folder / str(rank) / END_FILE).read_bytes()
        except FileNotFoundError:
            data = b""
        has_ended, status, _ = END.unpack(data) if len(data) == END.size else (False, 0, 0)
        found.append(status if has_ended else None)
    return found
