"""Reads results and exceptions from a node (a rented machine) that may not run code in this process."""

from __future__ import annotations

import enum
import itertools
import json
import sys
from collections.abc import Sequence
from json.scanner import make_scanner
from typing import Any

from skypool.errors import RemoteError, UntrustedResult
from skypool.trust import arrays, classes, values
from skypool.trust.classes import Allowed
from skypool.trust.cursor import NotData
from skypool.trust.format import ALLOWED
from skypool.trust.reading import ClassShape, Maker, Reading
from skypool.trust.text import printable
from skypool.trust.writing import JSON, MOST_JSON
from skypool.wire.exceptions import RemoteTraceback
from skypool.wire.frames import Buffer

_LONGEST_CHAIN = 50
"""The greatest number of exceptions in a chain of causes that is accepted."""
_PICKLED = "the value is a pickle: its node was started by a pool that trusts it in full, or the node is hostile"
_MOST_JSON = len(JSON) + MOST_JSON
"""The greatest length in bytes of a value that is written as JSON, with its prefix."""
_scan = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]  # it takes a decoder, as json.decoder does


class DataReader:
    """A reader of the results and exceptions that one node (a rented machine) sends in skypool's data format.

    Unlike a pickle, this format cannot run code that the sender chose.

    Args:
        node: the node's number, for messages.
        allowed: names of additional classes of which instances may be made. Default: none.
    """

    def __init__(self, node: int, allowed: frozenset[str] = frozenset()) -> None:
        self._node, self._allowed = node, Allowed(allowed)
        self._makers: dict[str, Maker] = {**values.MAKERS, **arrays.MAKERS, "one": self._member}

    def value(self, buffers: Sequence[Buffer], what: str) -> Any:
        """Return the value that a worker process on the node wrote. Its arrays use the memory of the buffers.

        Args:
            buffers: the buffers as the node sent them.
            what: the value's name in error messages, such as "the result of train".

        Raises:
            UntrustedResult: the buffers are not in skypool's data format, or name a class that is not allowed.
        """
        try:
            return self._read(buffers)
        except NotData as e:
            raise UntrustedResult(
                f"{what} was rejected: {e.why}. Node {self._node} is trusted with data only; {self._advice(e)}",
                refused=e.name,
                what=what,
                node=self._node,
            ) from None

    def error(self, buffers: Sequence[Buffer], call: str) -> BaseException:
        """Return the exception that a call raised on the node, without raising it.

        The last cause in the exception's chain is a RemoteTraceback. An exception whose class must not be built here is
        returned as a RemoteError with its name and text. If the buffers cannot be read, or are not an exception, an
        UntrustedResult is returned.

        Args:
            buffers: the buffers as the node sent them.
            call: the call's name in error messages.
        """
        try:
            got = self.value(buffers, f"the exception of {call}")
            if not _is_chain(got):
                raise UntrustedResult(
                    f"node {self._node} sent something that is not an exception as the exception of {call}; a "
                    "correct node never sends this, so stop using that machine",
                    node=self._node,
                )
        except UntrustedResult as e:
            return e
        chain, text = got
        errors = [self._one(link, printable(text)) for link in chain]
        for error, cause in itertools.pairwise(errors):
            error.__cause__ = cause
        errors[-1].__cause__ = RemoteTraceback(printable(text))
        return errors[0]

    def _read(self, buffers: Sequence[Buffer], parent: Reading | None = None) -> Any:
        """Return the value that is encoded in these buffers, as small JSON or in skypool's data format.

        Args:
            buffers: the buffers as the node sent them.
            parent: the decoder of the enclosing value, if this value is a part of one. Both share one memory budget.
                Default None.

        Raises:
            NotData: the buffers are not a value in the data format, such as a pickle, or name what is not allowed. Any
                other Exception while reading becomes a NotData, too.
        """
        try:
            data = buffers[0]
            if len(data) <= _MOST_JSON and data[:5] == JSON:
                text = str(data[5:], "ascii")
                value, used = _scan(text, 0)
                if used == len(text) and len(buffers) == 1:
                    return value
                raise NotData(
                    "the node sent extra bytes or buffers after the end of a value; a correct node never sends "
                    "this, so stop using that machine"
                )
            if data[:1] == b"\x80":
                raise NotData(_PICKLED)
            keys = arrays.keys() if sys.modules.get("numpy") else values.KEYS
            return Reading(buffers, self._resolve, self._makers, keys, parent).read()
        except NotData:
            raise
        except Exception as e:  # noqa: BLE001 - a stranger's bytes may cause any error
            raise NotData(
                f"the node sent a value that cannot be read here ({type(e).__name__}: "
                f"{printable(str(e))[:200]}); use the same package versions on both sides"
            ) from None

    def _resolve(self, r: Reading, tag: int, shape: ClassShape) -> None:
        """Find the class that a node named, and set how its instances are made, in `shape`.

        Enumerations and classes that the user allows may then be dictionary keys in the value that `r` reads.

        Args:
            r: the decoder of the value.
            tag: the kind of value that the class is for.
            shape: the class as the node named it. It is changed.

        Raises:
            NotData: there is no such class here, or it must not be made from data.
        """
        if not classes.resolve(tag, shape, self._allowed):
            raise NotData(
                f"the value refers to {printable(str(shape))[:200]}, which cannot be rebuilt without running code",
                str(shape),
                True,
            )
        kind = shape.kind
        if kind is not None and (tag == ALLOWED or issubclass(kind, enum.Enum)):
            r.keys = r.keys | {kind}

    def _one(self, link: Any, traceback: str = "", parent: Reading | None = None) -> BaseException:
        """Return one exception of a chain or group. It is not raised.

        If its class must not be built here, return a RemoteError with its name and text instead, which tells why. Its
        notes are kept.

        Args:
            link: the exception as `exceptions.ErrorLink`: its data or None, the name of its type, its text, the reason
                why there are no data, and its notes.
            traceback: the text of the traceback, for a RemoteError. Default "".
            parent: the decoder of the enclosing exception group; None for no group. Both share one memory budget.
        """
        data, kind, text, why, notes = link
        error: object = None
        if data is not None:
            try:
                error = self._read([data], parent)
                why = why or "its data does not contain an exception of this kind"
            except NotData as e:
                why = f"{e.why}; {self._advice(e)}"
        if not isinstance(error, Exception):
            error = RemoteError(printable(kind), printable(text), traceback, printable(why))
        if notes and not getattr(error, "__notes__", None):
            error.__notes__ = list(map(printable, notes))
        return error

    def _member(self, r: Reading, link: Any) -> BaseException:
        """Return one exception of an exception group. It is a RemoteError if its class must not be built here.

        Args:
            r: the decoder of the group.
            link: the exception as the node sent it.

        Raises:
            NotData: `link` is not an exception as nodes send them.
        """
        if not _is_link(link):
            raise NotData(
                "the node sent an exception group with a member that is not an exception; a correct node never "
                "sends this, so stop using that machine"
            )
        return self._one(link, parent=r)

    def _advice(self, refused: NotData) -> str:
        full = 'trust="full" would let the node run code here'
        module, _, name = refused.name.rpartition(".")
        if not refused.allowable or classes.locate(module, name) is None:
            return f"return plain data instead; {full}"
        return (
            f"return plain data, or, if instances of this class may safely be built from any data: "
            f"ComputePool(allow_results=[{refused.name!r}]); {full}"
        )


def _is_chain(got: Any) -> bool:
    match got:
        case (list(chain), str()) if 0 < len(chain) <= _LONGEST_CHAIN:
            return all(map(_is_link, chain))
    return False


def _is_link(got: Any) -> bool:
    match got:
        case (bytes() | None, str(), str(), str(), list(notes)):
            return type(got) is tuple and all(type(note) is str for note in notes)
    return False
