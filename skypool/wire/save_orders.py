"""The orders of a client to save folders of a node or to fill them, and the states of folders that the node tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SOCKET = "mover.sock"
"""The socket in a node's folder at which its programs reach the mover."""
LOOKED = "mover.looked"
"""The file in a node's folder that the mover makes when the agent has ended, and it knows which files are written."""
TO_LOOK = 2.0
"""Seconds in which the mover has looked which files are being written, before processes are stopped or killed."""
NOTES = ".skypool/runs"
"""Objects below this name say how runs have ended that belonged to their machines."""
SOCKET_VARIABLE = "SKYPOOL_MOVER"
"""The environment variable with the path of this socket."""
PHASES = ("restoring", "saving", "ending", "ended", "fetching", "there")
DRAIN = 120.0
"""The usual `Order.drain`."""
MOST_DRAIN = 86400.0
"""The most seconds that an order may have for what is left."""
LEAST = 30.0
"""The least seconds that a node has for what is left at its end, unless `Order.drain` is less."""


_USUAL_RATE = 10e6
"""The bytes a second that are expected where nothing is known yet."""


def seconds_needed(drain: float, phase: str, unsaved_bytes: int, rate: float) -> float:
    """Return the seconds that are kept for what is left of a folder at the end: half a minute and what it should take.

    Args:
        drain: the most seconds.
        phase: the state of the folder. Before it is back, nothing is to be saved.
        unsaved_bytes: what is left, and `rate` the bytes that were saved in a second so far; 0 if that is not known.
    """
    if phase not in ("saving", "ending"):
        return 0.0
    return min(drain, LEAST + unsaved_bytes / (rate or _USUAL_RATE))


@dataclass(frozen=True, slots=True)
class Order:
    """The order to save a folder of a node, or to fill it with data.

    Attributes:
        id: the name of the folder as the user wrote it.
        folder: its path on the node.
        url, endpoint, region: the place, as of `Bucket`.
        values: the access key, its secret, and a session token if there is one.
        login: how the node logs in, as of `Bucket.login`.
        credentials: the number of the values. The client sends new ones with a higher number, as `new_values` says.
        node: the number of the node, and `nodes` how many nodes save to the same place.
        patterns: what is written last into a checkpoint, as `wholeness.checkpoints` takes it.
        drain: the most seconds for what is left at the end.
        journal: the name of the file in which it is noted what was saved.
        parts: the folder of the node with the libraries of the mover.
        serial: tells orders for one folder apart.
        session: names the client and its pool, the same on all nodes.
        restores: False if the folder is not brought back before it is saved; for data, if it is there already.
        joins: True if a node has saved to the same place alone before.
        is_data: True if the folder is only filled with what the place has, and not saved.
    """

    id: str
    folder: str
    url: str
    endpoint: str = ""
    region: str = ""
    values: tuple[str, ...] = field(default=(), repr=False)
    login: str = "keys"
    credentials: int = 0
    node: int = 0
    nodes: int = 1
    patterns: tuple[str, ...] = ()
    drain: float = DRAIN
    journal: str = ""
    parts: str = ""
    serial: str = ""
    session: str = ""
    restores: bool = True
    joins: bool = False
    is_data: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the order as the mover reads it. The keys are part of it."""
        return {"do": "fill" if self.is_data else "save", **asdict(self)}

    def note(self, name: str, text: str, file: str = "") -> dict[str, Any]:
        """Return the order to keep a small text beside the folder's files in the bucket, below the name `NOTES`.

        If `file` is the path of a file on the node, its content is kept in place of the text.
        """
        return {"do": "note", "id": self.id, "serial": self.serial, "name": name, "text": text, "file": file}

    def new_values(self, values: Sequence[str], credentials: int) -> dict[str, Any]:
        """Return the order to use other values from now on. `credentials` is their number."""
        return {"do": "values", "id": self.id, "serial": self.serial, "values": values, "credentials": credentials}


@dataclass(frozen=True, slots=True)
class FolderState:
    """The state of a folder that is saved, or filled with data.

    Attributes:
        id, url, serial, drain: as in the order.
        place: the number of the node among those that save to one place; a replacement has that of the node before.
        nodes: for how many nodes the folder gives its files owners; 1 if the node saves alone.
        credentials: the number of the values that the node uses.
        is_data: True if the folder is only filled with what the place has.
        phase: "restoring" until it is as the bucket has it, "saving", "ending" while what is left is saved, and
            "ended". With data, "fetching" and "there"; "ended" if the node cannot have it, as `trouble` says.
        whole: True if all was saved when it ended.
        trouble: why the last attempt to save or to restore it has failed; "" if it has not.
        files: the number of files that were saved, and `bytes` their bytes.
        unsaved: the number of files that are not saved as they are now, and `unsaved_bytes` their bytes.
        oldest: for how many seconds the first of these has been waiting.
        rate: the bytes that were saved in a second, while something was sent.
        names: some of the files that are not saved.
        refused: why a file cannot be saved, by its path. Only some are named.
        kept: the number of files in the bucket that were deleted here.
        restored: the number of files that were brought back or fetched, and `restored_bytes` their bytes.
        received: the bytes that came from the bucket so far, also of files that have not come to their end.
        not_restored: why an object of the bucket cannot be a file, by its name. Only some are named.
        wanted: the number of files to be fetched as data, and `wanted_bytes` their bytes.
        checked: the number of files whose content was compared with a checksum of the store.
        aside: the folder of the node to which files were moved that the bucket does not have; "" for none.
        moved: the number of these files.
        unfinished: checkpoints that are not whole in the bucket, and were left there.
        noted: the names of the notes that are in the bucket, of the orders of `Order.note`.
    """

    id: str
    phase: str
    whole: bool = False
    trouble: str = ""
    files: int = 0
    bytes: int = 0
    unsaved: int = 0
    unsaved_bytes: int = 0
    oldest: float = 0.0
    rate: float = 0.0
    names: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    kept: int = 0
    restored: int = 0
    restored_bytes: int = 0
    received: int = 0
    not_restored: tuple[tuple[str, str], ...] = ()
    wanted: int = 0
    wanted_bytes: int = 0
    checked: int = 0
    aside: str = ""
    moved: int = 0
    unfinished: tuple[str, ...] = ()
    noted: tuple[str, ...] = ()
    url: str = ""
    serial: str = ""
    drain: float = 0.0
    place: int = 0
    nodes: int = 1
    credentials: int = 0
    is_data: bool = False

    @property
    def is_back(self) -> bool:
        """True if the folder is as the bucket has it, or is given up."""
        return self.phase not in ("restoring", "fetching")

    @property
    def is_open(self) -> bool:
        """True while the folder is saved, or what is left of it."""
        return self.phase in ("saving", "ending")

    @property
    def seconds_needed(self) -> float:
        """The seconds that are kept for what is left at the end."""
        return seconds_needed(self.drain, self.phase, self.unsaved_bytes, self.rate)
