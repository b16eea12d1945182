"""Serializes values with cloudpickle, protocol 5 and out-of-band buffers.

A serialized value is a list of buffers. The first buffer is the pickle. The other buffers are the memory of large
arrays in the value, which is not copied. If a value cannot be pickled, the error names the part that is the cause.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from skypool.errors import PickleError
from skypool.wire.frames import Buffer
from skypool.wire.pickling import PROTOCOL, Pickler
from skypool.wire.unpicklable import find_blame

T = TypeVar("T")
PLAIN = frozenset({int, float, bool, str, bytes, type(None), complex})
"""The types for which plain pickle is enough. It is four times as fast as cloudpickle."""
_DEPTH = 4
"""The depth of nesting up to which `_is_plain` examines a value."""
_MANY = 64
"""The number of items from which `_is_plain` does not examine a collection, as using cloudpickle at once is faster."""
_SMALL_BUFFER = 1024
"""The size in bytes from which an array's memory becomes a buffer of its own. Smaller memory stays in the pickle."""


def dumps(
    value: object, what: str = "value", codes: list[CodeType] | None = None, kind: type[Pickler] = Pickler
) -> list[Buffer]:
    """Serialize a value: return its pickle, and then the memory of its large arrays, which is not copied.

    Args:
        value: anything that cloudpickle can pickle.
        what: the name of the value in messages, such as `train(cfg=…)`. The path in a PickleError starts with it.
        codes: a list that gets the code objects of the functions that were pickled by value.
        kind: the class of the pickler.

    Raises:
        PickleError: the value cannot be pickled. The message names the part of the value that is the cause.
    """
    if type(value) in PLAIN or _is_plain(value):
        return [pickle.dumps(value, PROTOCOL)]
    buffers: list[Buffer] = [b""]
    try:
        with io.BytesIO() as file:
            pickler = kind(file, PROTOCOL, buffer_callback=_collector(buffers), keeps=codes is None)
            pickler.dump(value)
            buffers[0] = file.getvalue()
            if codes is not None:
                codes += pickler.codes
    except Exception as e:
        path, reason = find_blame(value, what, e)
        raise PickleError(f"{path} cannot be sent to another process: {reason}", path) from e
    return buffers


class ResultWriter(Protocol):
    """Writer of results and exceptions for a client that accepts data only, and no pickles.

    Reading a pickle can run code, so a client takes none from machines that it does not trust.
    """

    def value(self, value: object, what: str) -> list[Buffer]:
        """Return the buffers of a value in a format that is not pickle. `what` names the value in messages.

        Raises UntrustedResult if it contains something that the client would not accept.
        """
        ...

    def error(self, error: BaseException) -> tuple[bytes | None, str]:
        """Encode one exception, without its causes, in a format that is not pickle, and return (data, "").

        If the exception cannot be encoded, return (None, the reason in words).
        """
        ...


result_writer: ResultWriter | None = None
"""The writer of results for a client that accepts data only. None if results are pickled."""


def dump_items(items: Sequence[object]) -> bytes:
    """Return several items of a stream as one byte string that a node sends to its client.

    It is a pickle, or plain data if `result_writer` is set because the client does not trust this node. `items` has
    numbers, texts, bools, bytes and None as they are. For another item, it has a tuple with the serialized item.
    """
    return pickle.dumps(items, PROTOCOL) if result_writer is None else bytes(result_writer.value(items, "items")[0])


def _is_plain(value: object, depth: int = _DEPTH) -> bool:
    """Return True if plain pickle is known to be enough for a value."""
    kind = type(value)
    if kind in PLAIN:
        return True
    if depth == 0:
        return False
    if kind is tuple or kind is list:
        items = value
    elif kind is dict:
        items = [*value, *value.values()]  # type: ignore[misc, attr-defined]  # a dict here
    else:
        return False
    if len(items) >= _MANY:  # type: ignore[arg-type]
        return False
    for item in items:  # type: ignore[attr-defined]  # noqa: SIM110 - all() is half as fast
        if type(item) not in PLAIN and not _is_plain(item, depth - 1):
            return False
    return True


def _collector(buffers: list[Buffer]) -> Callable[[pickle.PickleBuffer], bool]:
    def collect(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:
            return True  # memory that is not contiguous stays in the pickle
        if raw.nbytes < _SMALL_BUFFER:
            return True
        buffers.append(raw)
        return False

    return collect


def loads(buffers: Sequence[Buffer]) -> Any:
    """Return the value that `dumps` serialized. Exceptions of unpickling are raised unchanged.

    Arrays in the value use the memory of `buffers` without a copy. They are writable if this memory is.
    """
    return pickle.loads(buffers[0], buffers=buffers[1:]) if len(buffers) > 1 else pickle.loads(buffers[0])


# --- what cannot be serialized -------------------------------------------------------------------------------


# --- what has a meaning of its own -----------------------------------------------------------------------------


class Captured(NamedTuple):
    """Result of a call whose output is captured.

    Attributes:
        value: the value that the function returned.
        output: everything that the call printed, as one text.
    """

    value: Any
    output: str


class Reference(Generic[T]):
    """Reference to a value of `pool.put()`, which the nodes of the pool store under `key`.

    The pickle of a reference contains only the key. Unpickling it on a node gives the value. Unpickling it on the
    client raises a RuntimeError.
    """

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: str) -> None:
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return object_of, (self.key,)

    def __repr__(self) -> str:
        return f"<reference {self.key}>"


resolve_object: Callable[[str], Any] | None = None
"""A function that returns the value of `pool.put()` with a given key, in a worker.

It is None in every other process.
"""


def object_of(key: str) -> Any:
    """Return the value of `pool.put()` with this key. Unpickling a `Reference` on a node calls this.

    Raises RuntimeError in a process that is not a worker, and so does not have the value.
    """
    if resolve_object is None:
        raise RuntimeError(
            "a reference from pool.put() becomes its value only on the pool's nodes; pass the reference to a call as "
            "an argument"
        )
    return resolve_object(key)
