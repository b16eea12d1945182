"""The pickler for everything that skypool sends: cloudpickle with protocol 5.

Functions and classes of the user's script are pickled by value, because nodes cannot import the script. The modules
`definitions` and `named` replace what cloudpickle does wrong with them.
"""

from __future__ import annotations

import io
import sys
from collections import ChainMap
from enum import EnumMeta
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, cast

import cloudpickle

from skypool.wire import class_pickles, definition_ids, definitions, exception_pickles, named
from skypool.wire.namespaces import Space

PROTOCOL = 5
SCRIPT = frozenset({"__main__", "__mp_main__"})
"""The module names of the user's script: `__main__`, and its name in a process that multiprocessing spawned.

Nodes cannot import the script, so its functions and classes are pickled by value.
"""
# cloudpickle itself treats only `__main__` this way. Functions can have the other name only if the module exists.
if "__mp_main__" in sys.modules:
    cloudpickle.register_pickle_by_value(ModuleType("__mp_main__"))


def _no_file(file: io.TextIOWrapper) -> Any:
    """Refuse to pickle an open text file: always raises TypeError."""
    name = getattr(file, "name", "")  # a text layer over bytes in memory has none
    raise TypeError(f"cannot pickle the open file {name!r}; send the path or the content of the file instead")


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Cloudpickle pickler by which each definition of a script exists once in a process that receives it.

    It refuses open text files with a TypeError. cloudpickle itself would send the whole content of the file.

    Attributes:
        codes: the code of the functions that were pickled by value.
        keeps: True if the pickles of classes that `class_pickles` keeps may be used. False for the function of a call,
            because the globals of all methods must be pickled with it.
    """

    def __init__(self, *args: Any, keeps: bool = True, **kwargs: Any) -> None:
        named.learn_libraries()
        super().__init__(*args, **kwargs)
        self.keeps = keeps
        self.codes: list[CodeType] = []

    dispatch_table: ClassVar[Any] = ChainMap(
        cast(Any, {io.TextIOWrapper: _no_file, CodeType: definitions.reduce_code}),
        cast(Any, named.REDUCERS),
        cast(Any, cloudpickle.Pickler.dispatch_table),
    )

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle an object: a definition of a script by value, everything else as cloudpickle does."""
        kind = type(obj)
        if kind is FunctionType:
            if not definition_ids.is_by_value(obj):
                return NotImplemented
            self.codes.append(obj.__code__)
            if named.is_dispatcher(obj):
                return named.reduce_dispatcher(obj)
            # the attribute of cloudpickle's pickler for the same purpose
            space = self.globals_ref.setdefault(id(obj.__globals__), None) or Space(obj.__globals__)
            self.globals_ref[id(obj.__globals__)] = space
            return definitions.reduce_function(obj, space)
        if issubclass(kind, type):
            if definition_ids.is_by_value(obj):
                kept = class_pickles.reduce_kept(obj, _whole) if self.keeps else None
                return kept or definitions.reduce_class(obj)
            if obj in definition_ids.UNNAMED:
                return super().reducer_override(obj)
        if issubclass(kind, BaseException):
            return exception_pickles.reduce(obj)
        if isinstance(kind, EnumMeta):
            return named.reduce_member(obj)
        if (
            kind.__reduce__ is not object.__reduce__
            and cast(Any, kind).__flags__ & exception_pickles.HEAP
            and definition_ids.is_by_value(kind)
        ):
            reduced = obj.__reduce_ex__(PROTOCOL)
            return named.reduce_global(obj, reduced) if isinstance(reduced, str) else reduced
        return NotImplemented


def _whole(kind: type) -> bytes:
    """Return the pickle of a class with everything that it uses."""
    with io.BytesIO() as file:
        Pickler(file, PROTOCOL, keeps=False).dump(kind)
        return file.getvalue()


def pickled(value: object) -> bytes:
    """Return the pickle of a value as one byte string. Large buffers, such as an array's memory, are part of it."""
    with io.BytesIO() as file:
        Pickler(file, PROTOCOL).dump(value)
        return file.getvalue()
