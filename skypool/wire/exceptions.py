"""Serializes exceptions with their causes, notes and traceback, and reads them again in their own types."""

from __future__ import annotations

import itertools
import pickle
import traceback
from collections.abc import Sequence
from typing import Any

from skypool.errors import RemoteError
from skypool.wire import codec
from skypool.wire.blame import failure_of, name_of, short, text_of
from skypool.wire.frames import Buffer
from skypool.wire.pickling import PROTOCOL, pickled

_LONGEST_CHAIN = 20
"""How many causes are followed."""


class RemoteTraceback(Exception):
    """The traceback of an exception as it was on the node; the cause of what a call raises here."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n\n{self.text.rstrip()}"


ErrorLink = tuple[bytes | None, str, str, str, list[str]]
"""One exception: its pickle or None, its type's name, its text, why there is no pickle, and its notes."""


def dump_error(error: BaseException, skip: int = 0, home: bool = False) -> list[Buffer]:
    """The buffers of an exception with its causes, notes and traceback text.

    Args:
        error: what was raised.
        skip: frames at the top of its traceback that are skypool's own.
        home: it goes from a node to its client; see `codec.result_writer`.
    """
    tb = error.__traceback__
    for _ in range(skip):
        tb = tb.tb_next if tb is not None else None
    text = "".join(traceback.format_exception(type(error), error, tb))
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


def dump_one(error: BaseException, home: bool = True) -> ErrorLink:
    """Return one exception without its causes, for whoever reads exceptions there."""
    kind = name_of(type(error))
    text = text_of(error)
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    if not isinstance(error, Exception):
        return None, kind, text, "it would end this process, not only the call", notes
    data = None
    why = "it pickles as something else"
    if home and codec.result_writer is not None:
        data, why = codec.result_writer.error(error)
        return data, kind, text, why, notes
    for candidate in (error, _Rebuilt(error), _Rebuilt(error, in_part=True)):
        if candidate is error and isinstance(error, ExceptionGroup):
            continue  # one exception in it that cannot be rebuilt there would cost all of them their type
        try:
            candidate_data = pickled(candidate)
            back = pickle.loads(candidate_data)
        except Exception as e:  # noqa: BLE001 - the next candidate, or the text, stands for it
            why = f"{type(e).__name__}: {text_of(e)}"
            continue
        if type(back) is type(error):
            data = data or candidate_data
            if text_of(back) == text:  # an `__init__` that makes the text would make it twice
                return candidate_data, kind, text, "", notes
    return data, kind, text, why, notes


class _Rebuilt:
    """Pickles as the exception it holds without calling that class's own `__init__`.

    Args:
        in_part: replace arguments that have no pickle by their text, and leave such attributes behind, with a note.
    """

    def __init__(self, error: BaseException, in_part: bool = False) -> None:
        self.error = error
        self.in_part = in_part

    def __reduce__(self) -> tuple[Any, ...]:
        error = self.error
        args = self.error.args
        state = self.error.__dict__
        if isinstance(error, BaseExceptionGroup):
            args = (error.message, [_Member(each) for each in error.exceptions])
        elif self.in_part:
            args = tuple(arg if failure_of(arg) is None else short(arg) for arg in args)
        if self.in_part:
            left = [name for name, part in state.items() if failure_of(part) is not None]
            note = f"left behind, having no pickle: {', '.join(left)}"
            notes = [*state.get("__notes__", ()), *([note] if left else [])]
            state = {name: part for name, part in state.items() if name not in left} | {"__notes__": notes}
        return rebuild, (type(error), args, state)


class _Member:
    """Pickles as one exception of a group: in its own type, or as the RemoteError that stands for it."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_one, dump_one(self.error, home=False)


def rebuild(kind: type[BaseException], args: tuple[object, ...], state: dict[str, object]) -> BaseException:
    """An exception of `kind` made without its `__init__`, which often takes other arguments than `args`."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def load_error(buffers: Sequence[Buffer]) -> BaseException:
    """The exception of `dump_error`, in its own type where that exists here, its remote traceback as its cause."""
    chain, text = pickle.loads(buffers[0])
    errors = [_load_one(*link, traceback_text=text) for link in chain]
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    errors[-1].__cause__ = RemoteTraceback(text)
    return errors[0]


def _load_one(
    data: bytes | None, kind: str, text: str, why: str, notes: list[str], *, traceback_text: str = ""
) -> BaseException:
    error: BaseException | None = None
    if data is not None:
        try:
            error = pickle.loads(data)
        except Exception as e:  # noqa: BLE001 - its name and text stand for it, with the reason
            why = f"{type(e).__name__}: {text_of(e)}"
    if not isinstance(error, Exception):
        error = RemoteError(kind, text, traceback_text, why)
    if notes and not getattr(error, "__notes__", None):  # a class that pickles itself forgets them
        error.__notes__ = notes
    return error
