"""Makes hashes of values, to see whether a value has changed since it was sent."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import ChainMap
from types import CodeType, FunctionType
from typing import Any, ClassVar, cast

from cloudpickle import cloudpickle

from skypool.wire import definition_ids, named

_MOST = 1 << 20
"""The most bytes of a value that are read. A larger value counts as changed each time."""


class _TooLarge(Exception):
    """The value has more than `_MOST` bytes, so its hash is not computed."""


class _Hash:
    """File for a pickler that keeps nothing but a hash of what is written."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self._written = 0

    def write(self, data: Any) -> None:
        self._written += len(data)
        if self._written > _MOST:
            raise _TooLarge
        self.hash.update(data)

    def add(self, buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:
            return True  # memory that is not contiguous becomes a part of the pickle
        self.write(raw)
        return False


class _Fingerprinter(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickler whose output is hashed. It writes the ids of classes in place of classes, and the parts of functions."""

    dispatch_table: ClassVar[Any] = ChainMap(
        cast(Any, {CodeType: lambda code: (_part, (hash(code),))}),
        cast(Any, named.REDUCERS),
        cast(Any, cloudpickle.Pickler.dispatch_table),
    )

    def reducer_override(self, obj: Any) -> Any:
        is_class = issubclass(type(obj), type)
        if is_class or type(obj) is FunctionType:
            if not definition_ids.is_by_value(obj):
                return NotImplemented if obj not in definition_ids.UNNAMED else super().reducer_override(obj)
            if is_class:
                return _part, (definition_ids.id_of(obj),)
            if named.is_dispatcher(obj):
                return _part, (obj.__qualname__,), dict(cast(Any, obj).registry)
            parts = (obj.__defaults__, obj.__kwdefaults__, obj.__closure__, obj.__dict__)
            return _part, (hash(obj.__code__),), parts
        return NotImplemented


def _part(*_: object) -> object:
    """Mark a part of a value in the pickle that is hashed. Nobody unpickles it, so this is never called."""
    return object()


def fingerprint(value: object) -> str:
    """Return a hash of a value and of all its parts. It changes when one of them changes.

    Changes inside classes, and of globals that functions use, are not noticed. Hashes of two processes cannot be
    compared. A value of more than 1 MiB gets a new random hash each time. Raises any exception of pickling the value.
    """
    file = _Hash()
    try:
        _Fingerprinter(file, 5, buffer_callback=file.add).dump(value)
    except _TooLarge:
        return os.urandom(16).hex()
    return file.hash.hexdigest()
