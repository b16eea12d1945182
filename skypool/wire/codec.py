"""Serializes values with cloudpickle, protocol 5 and out-of-band buffers, and reads them again.

A value is a list of buffers: the pickle first, then every large buffer of it (an array's memory) as it is, uncopied.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from skypool.errors import PickleError
from skypool.wire.blame import find_blame
from skypool.wire.frames import Buffer
from skypool.wire.pickling import PROTOCOL, Pickler

T = TypeVar("T")
_PLAIN = frozenset({int, float, bool, str, bytes, type(None), complex})
_DEPTH = 4
"""How deep plain pickle is looked for: a value may be inside itself."""
_MANY = 64
"""Items from which a collection is not looked through: pickling it as any other costs less."""
_SMALL_BUFFER = 1024
"""Bytes of an array up to which it stays in the pickle."""


def dumps(value: object, what: str = "value") -> list[Buffer]:
    """The buffers of `value`.

    Args:
        value: anything cloudpickle can pickle.
        what: how a message calls it, such as `train(cfg=…)`; the path in a PickleError starts with it.

    Raises:
        PickleError: naming the part that cannot travel.
    """
    if _is_plain(value):
        return [pickle.dumps(value, PROTOCOL)]
    buffers: list[Buffer] = [b""]
    try:
        with io.BytesIO() as file:
            Pickler(file, PROTOCOL, buffer_callback=_collector(buffers)).dump(value)
            buffers[0] = file.getvalue()
    except Exception as e:
        path, reason = find_blame(value, what, e)
        raise PickleError(f"{path} cannot be sent to another process: {reason}", path) from e
    return buffers


def dumps_plain(args: tuple[object, ...], kwargs: Mapping[str, object]) -> bytes | None:
    """The pickle of arguments that are numbers, strings and the like, as most are; None if they are not."""
    return pickle.dumps((args, kwargs), PROTOCOL) if _PLAIN.issuperset(map(type, args)) else None


class ResultWriter(Protocol):
    """Writes what a worker sends home where that must be data."""

    def value(self, value: object, what: str) -> list[Buffer]:
        """Return the buffers of a value, which messages call `what`."""
        ...

    def error(self, error: BaseException) -> tuple[bytes | None, str]:
        """Return one exception without its causes, or None and why it cannot be brought back."""
        ...


result_writer: ResultWriter | None = None
"""Writes what goes home from a node whose client reads data only; None where it is pickled."""


def dump_result(value: object, what: str) -> list[Buffer]:
    """Return the buffers of a value on its way home from a node. See `dumps`."""
    return dumps(value, what) if result_writer is None else result_writer.value(value, what)


def dump_items(items: Sequence[object]) -> bytes:
    """Return a batch of the items of a stream, on its way home: numbers, texts, and items in a tuple of their bytes."""
    return pickle.dumps(items, PROTOCOL) if result_writer is None else bytes(result_writer.value(items, "items")[0])


def _is_plain(value: object, depth: int = _DEPTH) -> bool:
    """Whether plain pickle is known to do: it is four times as fast, and most arguments are small.

    `depth` and the lengths bound what looking costs, for a value inside itself too.
    """
    kind = type(value)
    if kind in _PLAIN:
        return True
    if depth == 0:
        return False
    if kind is tuple or kind is list:
        items = value
    elif kind is dict:
        items = [*value, *value.values()]  # type: ignore[misc, attr-defined]  # a dict
    else:
        return False
    if len(items) >= _MANY:  # type: ignore[arg-type]
        return False
    for item in items:  # type: ignore[attr-defined]  # noqa: SIM110 - all() is half as fast
        if type(item) not in _PLAIN and not _is_plain(item, depth - 1):
            return False
    return True


def _collector(buffers: list[Buffer]) -> Callable[[pickle.PickleBuffer], bool]:
    def collect(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:
            return True  # not contiguous: it stays in the pickle
        if raw.nbytes < _SMALL_BUFFER:
            return True
        buffers.append(raw)
        return False

    return collect


def loads(buffers: Sequence[Buffer]) -> Any:
    """The value of `buffers`. Arrays use the memory of the buffers: they are writable when that is."""
    return pickle.loads(buffers[0], buffers=buffers[1:]) if len(buffers) > 1 else pickle.loads(buffers[0])


class Captured(NamedTuple):
    """What a call gives whose output is captured: its value, and all it printed."""

    value: Any
    output: str


class Reference(Generic[T]):
    """Stands for a value that the nodes have under `key`; unpickled there, it is that value."""

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: str) -> None:
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return object_of, (self.key,)

    def __repr__(self) -> str:
        return f"<reference {self.key}>"


resolve_object: Callable[[str], Any] | None = None
"""Set by the worker: the value of `pool.put` under that key."""


def object_of(key: str) -> Any:
    """What a reference to a value of `pool.put` becomes on a node."""
    if resolve_object is None:
        raise RuntimeError("a value of pool.put() can only be read on the pool's nodes")
    return resolve_object(key)
