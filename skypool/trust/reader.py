"""Reads results and exceptions from a node that may not run code in this process."""

from __future__ import annotations

import enum
import itertools
import json
import sys
from collections.abc import Sequence
from json.scanner import make_scanner
from typing import Any

from skypool.errors import RemoteError, UntrustedResult
from skypool.text import printable
from skypool.trust import arrays, classes, values
from skypool.trust.bounded_reader import FAULTY, NotData
from skypool.trust.classes import Allowed
from skypool.trust.decoding import ClassShape, Maker, Reading
from skypool.trust.encoding import JSON, MOST_JSON
from skypool.trust.format import ALLOWED
from skypool.wire.exception_pickles import assign
from skypool.wire.exceptions import RemoteTraceback
from skypool.wire.frames import Buffer

_LONGEST_CHAIN = 50
"""The greatest number of exceptions in a chain of causes that is accepted."""
_SETTING = 'trust="data" (set in ComputePool or the default for machines of strangers)'
_INSTEAD = "Return plain values instead (numbers, texts, lists, arrays)"
_PICKLED = (
    'If you started this pool with trust="full", attach to it with trust="full". Otherwise end the pool and rent '
    "another machine"
)
"""The advice for a value that is a pickle."""
_MOST_JSON = len(JSON) + MOST_JSON
"""The greatest length in bytes of a value that is written as JSON, including the prefix `writing.JSON`."""
_scan = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]  # it takes a decoder, as json.decoder does


class DataReader:
    """A reader of the results and exceptions that one node sends in skypool's data format.

    Unlike a pickle, this format cannot run code that the sender chose. `node` is the number of the node, for messages.
    `allowed` are names of classes that the user allows in results: "mypkg.Point", or "mypkg.*" for all classes in a
    package and its subpackages.
    """

    def __init__(self, node: int, allowed: frozenset[str] = frozenset()) -> None:
        self._node, self._allowed = node, Allowed(allowed)
        self._makers: dict[str, Maker] = {**values.MAKERS, **arrays.MAKERS, "one": self._member}

    def value(self, buffers: Sequence[Buffer], what: str) -> Any:
        """Return the value that is encoded in these buffers. Its arrays use the memory of the buffers.

        `what` is the value's name in error messages. Raises UntrustedResult if the buffers are not in skypool's data
        format, or name a class that is not allowed.
        """
        try:
            return self._read(buffers)
        except NotData as e:
            raise UntrustedResult(
                f"{what} was rejected: {self._explained(e, _INSTEAD)}",
                refused=e.name,
                what=what,
                node=self._node,
            ) from None

    def error(self, buffers: Sequence[Buffer], call: str) -> BaseException:
        """Return (do not raise) the exception that a call of the function `call` raised on the node.

        The last cause in the exception's chain is a RemoteTraceback, which has the traceback on the node as text. An
        exception whose class must not be built on the client is returned as a RemoteError with the class's name and the
        exception's text. If the buffers cannot be read, or do not contain an exception, an UntrustedResult is returned.
        """
        try:
            got = self.value(buffers, f"the exception of {call}")
            if not _is_chain(got):
                raise UntrustedResult(
                    f"the exception of {call} was rejected: node {self._node} sent a value in its place that is not an "
                    f"exception. {FAULTY}",
                    node=self._node,
                )
        except UntrustedResult as e:
            return e
        chain, text = got
        errors = [self._one(link, printable(text)) for link in chain]
        for error, cause in itertools.pairwise(errors):
            assign(error, "__cause__", cause)
        assign(errors[-1], "__cause__", RemoteTraceback(printable(text)))
        return errors[0]

    def _read(self, buffers: Sequence[Buffer], parent: Reading | None = None) -> Any:
        """Return the value that is encoded in these buffers. With `parent`, both share a budget. Raises NotData."""
        try:
            data = buffers[0]
            if len(data) <= _MOST_JSON and data[:5] == JSON:
                text = str(data[5:], "ascii")
                value, used = _scan(text, 0)
                if used == len(text) and len(buffers) == 1:
                    return value
                raise NotData("there are extra bytes or buffers after its end", advice=FAULTY)
            if data[:1] == b"\x80":
                raise NotData('it is a pickle, which may be read only with trust="full"', advice=_PICKLED)
            keys = arrays.keys() if sys.modules.get("numpy") else values.KEYS
            return Reading(buffers, self._resolve, self._makers, keys, parent).read()
        except NotData:
            raise
        except Exception as e:  # noqa: BLE001 - a stranger's bytes may cause any error
            raise NotData(
                f"reading it on your machine failed ({type(e).__name__}: {printable(str(e))[:200]})",
                advice="Use the same package versions on your machine and on the node, or return simpler data",
            ) from None

    def _resolve(self, r: Reading, tag: int, shape: ClassShape) -> None:
        """Find the class that a node named for a value with this tag, and set `kind` and `make` of `shape`."""
        # instances of an enumeration or of an allowed class may be dictionary keys then
        if not classes.resolve(tag, shape, self._allowed):
            name = printable(str(shape))[:200]
            if classes.locate(shape.module, shape.name) is None:
                raise NotData(
                    f"it contains an instance of {name}, and no module imported on your machine defines this class",
                    str(shape),
                    True,
                    "Return plain values, or define the class at the top of a module that your own program imports",
                )
            raise NotData(
                f"it contains an instance of {name}, which cannot be rebuilt without running code", str(shape), True
            )
        kind = shape.kind
        if kind is not None and (tag == ALLOWED or issubclass(kind, enum.Enum)):
            r.keys = r.keys | {kind}

    def _one(self, link: Any, traceback: str = "", parent: Reading | None = None) -> BaseException:
        """Return (do not raise) one exception of a chain or group; a RemoteError if its class must not be built here.

        Args:
            link: the exception as a tuple: encoded data or None, name of the type, text, reason why there are no data
                or "", notes.
            traceback: the text of the traceback, for a RemoteError.
            parent: the decoder of the enclosing exception group, with which the budget is shared; None if there is
                none.
        """
        data, kind, text, why, notes = link
        error: object = None
        if data is not None:
            try:
                error = self._read([data], parent)
                why = why or f"node {self._node} sent a value of another kind in place of the exception"
            except NotData as e:
                why = self._explained(e, "Raise a built-in exception with texts and numbers as arguments instead")
        if not isinstance(error, Exception):
            error = RemoteError(printable(kind), printable(text), traceback, printable(why))
        if notes and not getattr(error, "__notes__", None):
            assign(error, "__notes__", list(map(printable, notes)))
        return error

    def _member(self, r: Reading, link: Any) -> BaseException:
        """Return one exception of an exception group, or a RemoteError in its place. Raises NotData for other data."""
        if not _is_link(link):
            raise NotData("it contains an exception group with a member that is not an exception", advice=FAULTY)
        return self._one(link, parent=r)

    def _explained(self, refused: NotData, instead: str) -> str:
        """Return why a value was refused, by which setting, and advice: `instead`, unless `refused` has its own."""
        setting = f"Node {self._node} has {_SETTING}"
        if refused.advice:
            return f"{refused.why}. {setting}, which refuses this. {refused.advice}"
        module, _, name = refused.name.rpartition(".")
        full = f'permit any code of node {self._node} with ComputePool(trust="full")'
        start = f"{refused.why}. {setting}, so it may not run code on your machine. {instead}"
        if not refused.allowable or classes.locate(module, name) is None:
            return f"{start}, or {full}"
        return (
            f"{start}. If this class is safe to build from any data, use "
            f"ComputePool(allow_results=[{refused.name!r}]). Or {full}"
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
