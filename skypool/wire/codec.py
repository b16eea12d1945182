"""Serializes values and exceptions with cloudpickle, protocol 5 and out-of-band buffers, and reads them again.

A value is a list of buffers: the pickle first, then every large buffer of it (an array's memory) as it is, uncopied.
"""

from __future__ import annotations

import io
import itertools
import pickle
import sys
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, cast

import cloudpickle

from skypool.errors import PickleError, RemoteError
from skypool.wire.frames import Buffer

T = TypeVar("T")
PROTOCOL = 5
SCRIPT = frozenset({"__main__", "__mp_main__"})
"""Names of the user's script: its own, and the one it has in a process that multiprocessing spawned.

No node can import it, so its functions and classes travel by value.
"""
_PLAIN = frozenset({int, float, bool, str, bytes, type(None), complex})
if "__mp_main__" in sys.modules:  # only then can functions have it; of its own accord cloudpickle knows `__main__` only
    cloudpickle.register_pickle_by_value(ModuleType("__mp_main__"))


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
        path, reason = blame(value, what, e)
        raise PickleError(f"{path} cannot be sent to another process: {reason}", path) from e
    return buffers


def dumps_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
    """The pickle of arguments that are numbers, strings and the like, as most are; None if they are not."""
    return pickle.dumps((args, kwargs), PROTOCOL) if _PLAIN.issuperset(map(type, args)) else None


def _no_file(file: io.TextIOWrapper) -> Any:
    raise TypeError(f"cannot pickle the open file {file.name!r}; send its path, or what it holds")


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, which would send an open file as a copy of what is left in it."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {io.TextIOWrapper: _no_file}, cast(Any, cloudpickle.Pickler.dispatch_table)
    )


class Outbound(Protocol):
    """Writes what a worker sends home where that must be data."""

    def value(self, value: object, what: str) -> list[Buffer]:
        """Return the buffers of a value, which messages call `what`."""
        ...

    def error(self, error: BaseException) -> tuple[bytes | None, str]:
        """Return one exception without its causes, or None and why it cannot be brought back."""
        ...


outbound: Outbound | None = None
"""Writes what goes home from a node whose client reads data only; None where it is pickled."""


def dump_result(value: object, what: str) -> list[Buffer]:
    """Return the buffers of a value on its way home from a node. See `dumps`."""
    return dumps(value, what) if outbound is None else outbound.value(value, what)


def dump_items(items: list[Any]) -> bytes:
    """Return a batch of the items of a stream, on its way home: numbers, texts, and items in a tuple of their bytes."""
    return pickle.dumps(items, PROTOCOL) if outbound is None else bytes(outbound.value(items, "items")[0])


def _is_plain(value: object, depth: int = 4) -> bool:
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
    if len(items) >= 64:  # type: ignore[arg-type]
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
        if raw.nbytes < 1024:
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


# --- what cannot travel, and where it is ---------------------------------------------------------------------


def blame(value: object, path: str, error: BaseException) -> tuple[str, str]:
    """The path to the innermost part of `value` that cannot be pickled, and the reason in words."""
    seen: set[int] = set()
    for _ in range(50):
        if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
            return path, f"{_name_of(type(value))} is nested too deeply to pickle"
        if _refuses(value):
            break
        seen.add(id(value))
        for name, part in _parts(value):
            if id(part) in seen or id(_attribute(part, "__wrapped__")) in seen:
                continue  # a decorated function that calls itself
            failure = _failure(part)
            if failure is not None:
                value, path, error = part, path + name, failure
                break
        else:
            break
    return path, f"{_name_of(type(value))} has no pickle ({type(error).__name__}: {text_of(error)})"


def _refuses(value: object) -> bool:
    """Whether it says itself that it cannot travel: then its parts do not matter."""
    if type(value).__reduce__ is object.__reduce__:
        return False
    try:
        value.__reduce__()
    except Exception:  # noqa: BLE001 - the answer to the question asked
        return True
    return False


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _failure(part: object) -> BaseException | None:
    try:
        Pickler(io.BytesIO(), PROTOCOL, buffer_callback=_leave_out).dump(part)
    except Exception as e:  # noqa: BLE001 - the answer to the question asked
        return e
    return None


def _leave_out(_: pickle.PickleBuffer) -> bool:
    """An array's memory is not what cannot travel: it need not be copied to find that out."""
    return False


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """The named parts that pickling `value` would pickle."""
    if isinstance(value, FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, dict):
        yield from ((f"[{_short(key)}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f"{{{_short(item)}}}", item) for item in value)
    elif isinstance(value, type):
        yield from ((f".{key}", item) for key, item in vars(value).items() if not key.startswith("__"))
    elif not isinstance(value, ModuleType):
        if (bound := _attribute(value, "__self__")) is not None and not isinstance(bound, ModuleType):
            yield ".__self__", bound
        yield from ((f".{key}", item) for key, item in (_attribute(value, "__dict__") or {}).items())
        yield from ((f".{slot}", _attribute(value, slot)) for slot in _slots(type(value)))


def _attribute(value: object, name: str) -> Any:
    """An attribute of a stranger's object, None where there is none or its `__getattr__` raises whatever it likes."""
    try:
        return getattr(value, name, None)
    except Exception:  # noqa: BLE001 - this object is being blamed already, for what it really did
        return None


def _short(value: object) -> str:
    try:
        return f"{value!r:.40}"
    except Exception:  # noqa: BLE001 - a broken __repr__ must not hide what cannot travel
        return f"<{_name_of(type(value))}>"


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (s for s in ((slots,) if isinstance(slots, str) else slots) if not s.startswith("__"))


def _function_parts(function: FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f".<closure>.{name}", cell.cell_contents
        except ValueError:
            continue  # an empty cell pickles
    for name, part in captured_globals(function):
        yield f".<globals>.{name}", part
    for index, default in enumerate(function.__defaults__ or ()):
        yield f".<defaults>[{index}]", default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield f".<defaults>.{name}", default


def captured_globals(function: FunctionType) -> Iterator[tuple[str, object]]:
    """The globals that `function` and the functions inside it name, as far as they exist now."""
    codes = [function.__code__]
    seen: set[str] = set()
    while codes:
        code = codes.pop()
        codes.extend(const for const in code.co_consts if hasattr(const, "co_names"))
        for name in code.co_names:
            if name in function.__globals__ and name not in seen:
                seen.add(name)
                yield name, function.__globals__[name]


# --- exceptions ----------------------------------------------------------------------------------------------


class RemoteTraceback(Exception):
    """The traceback of an exception as it was on the node; the cause of what a call raises here."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n\n{self.text.rstrip()}"


Link = tuple[bytes | None, str, str, str, list[str]]
"""One exception: its pickle or None, its type's name, its text, why there is no pickle, and its notes."""


def dump_error(error: BaseException, skip: int = 0, home: bool = False) -> list[Buffer]:
    """The buffers of an exception with its causes, notes and traceback text.

    Args:
        error: what was raised.
        skip: frames at the top of its traceback that are skypool's own.
        home: it goes from a node to its client; see `outbound`.
    """
    tb = error.__traceback__
    for _ in range(skip):
        tb = tb.tb_next if tb is not None else None
    text = "".join(traceback.format_exception(type(error), error, tb))
    chain: list[Link] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(chain) < 20:
        seen.add(id(link))
        chain.append(dump_one(link, home))
        link = link.__cause__
    if home and outbound is not None:
        return outbound.value((chain, text), "the exception")
    return [pickle.dumps((chain, text), PROTOCOL)]


def dump_one(error: BaseException, home: bool = True) -> Link:
    """Return one exception without its causes, for whoever reads exceptions there."""
    kind, text = _name_of(type(error)), text_of(error)
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    if not isinstance(error, Exception):
        return None, kind, text, "it would end this process, not only the call", notes
    data, why = None, "it pickles as something else"
    if home and outbound is not None:
        data, why = outbound.error(error)
        return data, kind, text, why, notes
    for candidate in (error, _Rebuilt(error), _Rebuilt(error, in_part=True)):
        if candidate is error and isinstance(error, ExceptionGroup):
            continue  # one exception in it that cannot be rebuilt there would cost all of them their type
        try:
            pickled = _pickled(candidate)
            back = pickle.loads(pickled)
        except Exception as e:  # noqa: BLE001 - the next candidate, or the text, stands for it
            why = f"{type(e).__name__}: {text_of(e)}"
            continue
        if type(back) is type(error):
            data = data or pickled
            if text_of(back) == text:  # an `__init__` that makes the text would make it twice
                return pickled, kind, text, "", notes
    return data, kind, text, why, notes


def _pickled(value: object) -> bytes:
    with io.BytesIO() as file:
        Pickler(file, PROTOCOL).dump(value)
        return file.getvalue()


def text_of(error: BaseException) -> str:
    """Return `str(error)`, whatever the `__str__` of a user's exception does."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # noqa: BLE001 - a broken __str__ must not hide the error, nor end a thread of ours
        return f"<its text cannot be shown: {type(e).__name__}>"


class _Rebuilt:
    """Pickles as the exception it holds without calling that class's own `__init__`.

    Args:
        in_part: replace arguments that have no pickle by their text, and leave such attributes behind, with a note.
    """

    def __init__(self, error: BaseException, in_part: bool = False) -> None:
        self.error, self.in_part = error, in_part

    def __reduce__(self) -> tuple[Any, ...]:
        error, args, state = self.error, self.error.args, self.error.__dict__
        if isinstance(error, BaseExceptionGroup):
            args = (error.message, [_Member(each) for each in error.exceptions])
        elif self.in_part:
            args = tuple(arg if _failure(arg) is None else _short(arg) for arg in args)
        if self.in_part:
            left = [name for name, part in state.items() if _failure(part) is not None]
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
