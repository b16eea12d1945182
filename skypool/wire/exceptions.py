"""Serializes exceptions with their causes, notes and traceback, so that they keep their types."""

from __future__ import annotations

import itertools
import os
import pickle
import traceback
from collections.abc import Sequence
from typing import Any

from skypool.errors import PickleError, RemoteError, SkypoolError
from skypool.wire import codec, exception_pickles
from skypool.wire.error_text import text_of
from skypool.wire.frames import Buffer
from skypool.wire.pickling import PROTOCOL, Pickler, pickled
from skypool.wire.unpicklable import failure_of, name_of, short

STOPPED_IN = "it was stopped in:\n"
"""The beginning of the note that says what a call was doing when it was stopped."""
_LONGEST_CHAIN = 20
"""The most exceptions of a chain of causes that are sent, the first one included."""


class RemoteTraceback(Exception):
    """Traceback of an exception as text, as it was on the node.

    When a call raises an exception on the client, the last cause in its chain is a RemoteTraceback.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n\n{self.text.rstrip()}"


ErrorLink = tuple[bytes | None, str, str, str, list[str]]
"""One exception of a chain: (pickle or None, name of the type, text, reason, notes).

The reason says why there is no pickle, or why the pickle is not exact; otherwise it is "".
"""


def dump_error(error: BaseException, home: bool = False) -> list[Buffer]:
    """Serialize an exception with its causes, its notes and the text of its traceback. `load_error` reads the result.

    At most 20 exceptions of the chain of `__cause__` are serialized; the others are dropped. Exceptions linked only as
    `__context__` are part of the traceback's text only. Of an exception that cannot be pickled, only the name and text
    are kept. The text leaves out the frames of skypool, unless they may show a bug of it.

    Args:
        home: True if a node sends the exception to its client. Then `codec.result_writer`, if it is set, encodes the
            exception as plain data, because this client accepts no pickles. False if the receiver accepts pickles.
    """
    shown = traceback.TracebackException.from_exception(error, compact=True)
    _leave_out_own_frames(shown)
    text = "".join(shown.format())
    chain: list[ErrorLink] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(chain) < _LONGEST_CHAIN:
        seen.add(id(link))
        chain.append(dump_one(link, home))
        link = link.__cause__
    if home and codec.result_writer is not None:
        return codec.result_writer.value((chain, text), "the exception")
    return [pickle.dumps((chain, text), PROTOCOL)]


def _leave_out_own_frames(shown: traceback.TracebackException) -> None:
    """Remove skypool's frames from a traceback and those of its causes and contexts, unless no other frame is left."""
    todo: list[traceback.TracebackException | None] = [shown]
    while todo:
        each = todo.pop()
        if each is not None:
            users = [frame for frame in each.stack if not frame.filename.startswith(_OWN)]
            # `exc_type` warns from Python 3.13 on, and is a property there; a call may have made warnings errors
            kind: type | None = vars(each).get("exc_type", vars(each).get("_exc_type"))
            if users or (kind is not None and issubclass(kind, SkypoolError)):
                each.stack[:] = users
            todo += [each.__cause__, each.__context__, *(each.exceptions or ())]


_OWN = os.path.dirname(os.path.dirname(_leave_out_own_frames.__code__.co_filename)) + os.sep
"""The beginning of the file names of skypool's frames. On a node, these names are not paths."""


def dump_one(error: BaseException, home: bool = True) -> ErrorLink:
    """Serialize one exception without its causes. Return (pickle or None, name of the type, text, reason, notes).

    The reason says why there is no pickle, or only an inexact one; otherwise it is "". `home` is True if a node sends
    the exception to its client. Then `codec.result_writer`, if it is set, encodes the exception as plain data.

    Three ways to pickle the exception are tried. The first pickle that gives back the same type with the same text is
    taken, or else the first one that gives back the same type. An exception that would end a process, such as
    SystemExit, gets no pickle.
    """
    kind = name_of(type(error))
    text = text_of(error)
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    if not isinstance(error, Exception):
        return None, kind, text, "raising it would end this process, not only the call", notes
    data = None
    why = "unpickling it gives another type"
    if home and codec.result_writer is not None:
        data, why = codec.result_writer.error(error)
        return data, kind, text, why, notes
    for candidate in (error, _Rebuilt(error), _Rebuilt(error, in_part=True)):
        if candidate is error and isinstance(error, ExceptionGroup):
            continue  # if one member could not be unpickled there, the whole group would lose its type
        try:
            candidate_data = pickled(candidate)
            back = pickle.loads(candidate_data)
        except Exception as e:  # noqa: BLE001 - the next candidate is tried, and at last only the text is sent
            why = f"{type(e).__name__}: {text_of(e)}"
            continue
        if type(back) is type(error):
            data = data or candidate_data
            # it differs if `__init__` builds the text from its arguments: then the next candidate is better
            if text_of(back) == text:
                return candidate_data, kind, text, "", notes
    return data, kind, text, why, notes


class _LenientPickler(Pickler):
    """Pickler that, in place of an exception that cannot be pickled, sends what can be, or a RemoteError."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException) and failure_of(obj) is not None:
            return _load_one, dump_one(obj, home=False)
        return super().reducer_override(obj)


def dump_result(value: object, what: str) -> list[Buffer]:
    """Return the buffers of a value that a node sends to its client: a pickle, or data if the client does not trust it.

    If `codec.result_writer` is set, the value is written as plain data, which cannot run code. `what` names the value
    in messages. Exceptions inside the value need not be picklable: they arrive as if the call had raised them.

    Raises:
        PickleError: something else in the value cannot be pickled.
        UntrustedResult: the client takes plain data only, and the value is not plain data.
    """
    if codec.result_writer is not None:
        return codec.result_writer.value(value, what)
    try:
        return codec.dumps(value, what)
    except PickleError as e:
        try:
            return codec.dumps(value, what, kind=_LenientPickler)
        except PickleError:
            raise e from e.__cause__


class _Rebuilt:
    """Wrapper of an exception. Unpickling it gives the exception, without calling the `__init__` of its class."""

    def __init__(self, error: BaseException, in_part: bool = False) -> None:
        self.error = error
        self.in_part = in_part  # shorten arguments, and leave out attributes, that cannot be pickled

    def __reduce__(self) -> tuple[Any, ...]:
        error = self.error
        kind, given, args, state = exception_pickles.parts_of(error)
        if isinstance(error, BaseExceptionGroup):
            given = args = (error.message, [_Member(each) for each in error.exceptions])
        elif self.in_part:
            given, args = (
                tuple(arg if failure_of(arg) is None else short(arg) for arg in each) for each in (given, args)
            )
        if self.in_part:
            left = [name for name, part in state.items() if failure_of(part) is not None]
            note = f"attributes left out because they cannot be pickled: {', '.join(left)}"
            notes = [*state.get("__notes__", ()), *([note] if left else [])]
            state = {name: part for name, part in state.items() if name not in left} | {"__notes__": notes}
        return exception_pickles.rebuild, (kind, given, args, state)


class _Member:
    """Wrapper of one member of an exception group. Unpickling it gives the member, or a RemoteError in its place."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_one, dump_one(self.error, home=False)


def load_error(buffers: Sequence[Buffer]) -> BaseException:
    """Return (do not raise) the exception that `dump_error` serialized.

    It has the original type if that can be unpickled here. Otherwise it is a RemoteError with the original's name and
    text. The last cause in its chain is a RemoteTraceback. If `buffers` are not from `dump_error`, any exception may be
    raised.
    """
    chain, text = pickle.loads(buffers[0])
    errors = [_load_one(*link, traceback_text=text) for link in chain]
    for error, cause in itertools.pairwise(errors):
        exception_pickles.assign(error, "__cause__", cause)
    exception_pickles.assign(errors[-1], "__cause__", RemoteTraceback(text))
    return errors[0]


def _load_one(
    data: bytes | None, kind: str, text: str, why: str, notes: list[str], *, traceback_text: str = ""
) -> BaseException:
    error: BaseException | None = None
    if data is not None:
        try:
            error = pickle.loads(data)
        except Exception as e:  # noqa: BLE001 - a RemoteError with its name and text takes its place
            why = f"{type(e).__name__}: {text_of(e)}"
    if not isinstance(error, Exception):
        error = RemoteError(kind, text, traceback_text, why)
    if notes and not getattr(error, "__notes__", None):  # a class with a `__reduce__` of its own may lose them
        exception_pickles.assign(error, "__notes__", notes)
    return error
