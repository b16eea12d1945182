"""Pickles joblib's tasks without their large arrays. Sends an array that several batches use to each node once."""

from __future__ import annotations

import io
import sys
import threading
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

import skypool as sky
from skypool.engines._joblib_node import array

Task = tuple[Any, Sequence[Any], dict[str, Any]]
"""A task of joblib: a function, its arguments and its keyword arguments."""


@dataclass(slots=True, eq=False)
class LargeArray:
    """A large numpy array among the arguments of tasks.

    Attributes:
        alive: a weak reference to the array.
        batches: the number of batches that have the array.
        ref: the reference to the pair (token, array) that was sent to all nodes; None if nothing was sent.
    """

    alive: weakref.ref[Any]
    batches: int = 0
    ref: sky.Ref[tuple[str, Any]] | None = None


@dataclass(slots=True)
class PickledTasks:
    """The tasks of a batch, pickled.

    Attributes:
        data: the pickle. In place of each large array, it has the array's index in `arrays`.
        arrays: the large arrays. They are kept here until the batch is sent.
        known: the `LargeArray` of each of these arrays, in the same order.
    """

    data: bytes
    arrays: list[Any] = field(default_factory=list)
    known: list[LargeArray] = field(default_factory=list)

    @property
    def has_new_array(self) -> bool:
        """True if at least one of the arrays is in no other batch so far."""
        return any(each.batches == 1 for each in self.known)


class SharedArrays:
    """The large arrays among the tasks of one parallel call. Any thread may call the methods.

    An array is large if it has at least `least` bytes. If `least` is None, no array is large. As in joblib, two
    arguments are the same array if they are the same object. So a program must not change an array while tasks need it.
    """

    def __init__(self, pool: sky.ComputePool, least: int | None) -> None:
        self._pool = pool
        self._least = least
        self._lock = threading.Lock()
        self._known: dict[int, LargeArray] = {}

    def pickled(self, tasks: Sequence[Task]) -> PickledTasks:
        """Pickle the tasks of a batch. Raise a PickleError that names a function or argument that cannot be pickled."""
        arrays: list[Any] = []
        try:
            data = self._pickle(tasks, arrays)
        except Exception as e:
            raise self._blame(tasks, e) from e
        with self._lock:
            known = [self._find(each) for each in arrays]
            for each in known:
                each.batches += 1
        return PickledTasks(data, arrays, known)

    def _pickle(self, value: object, arrays: list[Any]) -> bytes:
        with io.BytesIO() as file:
            _Pickler(file, self._least, arrays).dump(value)
            return file.getvalue()

    def _blame(self, tasks: Sequence[Task], error: Exception) -> sky.PickleError:
        """Return an error that names the first function or argument that cannot be pickled. Each is tried by itself."""
        for function, args, kwargs in tasks:
            name = getattr(function, "__qualname__", type(function).__qualname__)
            for path, value in [
                (name, function),
                *((f"{name}({k}=…)", v) for k, v in [*enumerate(args), *kwargs.items()]),
            ]:
                try:
                    self._pickle(value, [])
                except Exception as e:  # noqa: BLE001 - pickling runs code of the objects
                    return sky.PickleError(f"{path} cannot be sent to another process: {type(e).__name__}: {e}", path)
        return sky.PickleError(f"the tasks of joblib cannot be sent to another process: {error}")

    def _find(self, value: Any) -> LargeArray:
        found = self._known.get(id(value))
        if found is None or found.alive() is not value:
            found = self._known[id(value)] = LargeArray(weakref.ref(value))
        return found

    def arguments(self, tasks: PickledTasks) -> list[Any]:
        """Return the large arrays of a batch as arguments of its call.

        An array that another batch uses, too, is first sent to all nodes, once, and a reference takes its place. Other
        arrays are returned unchanged, and so are sent with the call.
        """
        with self._lock:
            return [self._argument(value, known) for value, known in zip(tasks.arrays, tasks.known, strict=True)]

    def _argument(self, value: Any, known: LargeArray) -> Any:
        if known.ref is None and known.batches > 1:
            # The key of a value of `put` is a hash of its contents. The token makes it a value of its own, so that
            # freeing it frees no value that the program itself has put.
            known.ref = self._pool.put((uuid.uuid4().hex, value))
        return value if known.ref is None else known.ref

    def free(self) -> None:
        """Free the arrays on all nodes."""
        with self._lock:
            for each in self._known.values():
                if each.ref is not None:
                    self._pool.drop(each.ref)
            self._known.clear()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A pickler that writes only the index of each large array, and collects these arrays in `arrays`.

    An array is large if it has at least `least` bytes. None: no array is.
    """

    def __init__(self, file: io.BytesIO, least: int | None, arrays: list[Any]) -> None:
        super().__init__(file, protocol=5)
        numpy = sys.modules.get("numpy")  # if it is not imported, there are no arrays
        self._kinds = (numpy.ndarray, numpy.memmap) if numpy is not None and least is not None else ()
        self._least = least or 0
        self._arrays = arrays

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle an object: a large array by its index, everything else as cloudpickle does."""
        if type(obj) in self._kinds and obj.nbytes >= self._least and not obj.dtype.hasobject:
            self._arrays.append(obj)
            return array, (len(self._arrays) - 1,)
        return super().reducer_override(obj)
