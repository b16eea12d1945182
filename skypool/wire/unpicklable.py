"""Finds the part of a value that cannot be pickled, so that an error can name it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from skypool.wire.error_text import text_of
from skypool.wire.pickling import PROTOCOL, Pickler

_DEEPEST = 50
"""The most levels of parts inside parts that are searched for one that cannot be pickled."""


def find_blame(value: object, path: str, error: BaseException) -> tuple[str, str]:
    """Return the path to the innermost part of `value` that cannot be pickled, and the reason in words.

    If no part is the cause, the path is that of the value itself. Parts are searched at most 50 levels deep.

    Args:
        path: the value's own name, with which the returned path starts, such as "train(cfg=…)".
        error: the exception that pickling the value raised.

    Returns:
        (path, reason), for example ("train(cfg=…).lock", "_thread.lock cannot be pickled (TypeError: …)").
    """
    seen: set[int] = set()
    for _ in range(_DEEPEST):
        if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
            return path, f"{name_of(type(value))} is nested too deeply to be pickled; use a flatter structure"
        if _refuses(value):
            break
        seen.add(id(value))
        for name, part in _parts(value):
            if id(part) in seen or id(_attribute(part, "__wrapped__")) in seen:
                continue  # looked at before, as in a decorated function that calls itself
            failure = failure_of(part)
            if failure is not None:
                value = part
                path = path + name
                error = failure
                break
        else:
            break
    why = f"{name_of(type(value))} cannot be pickled ({type(error).__name__}: {text_of(error)})"
    return path, f"{why}; use plain data, or create the object where it is used"


def _refuses(value: object) -> bool:
    """Return True if an object itself refuses to be pickled, whatever its parts are: its own `__reduce__` raises."""
    if type(value).__reduce__ is object.__reduce__:
        return False
    try:
        value.__reduce__()
    except Exception:  # noqa: BLE001 - any failure is the answer
        return True
    return False


def name_of(kind: type) -> str:
    """Return the name of a class with its module, such as "collections.deque"; "int" alone for a builtin."""
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def failure_of(part: object) -> BaseException | None:
    """Return (do not raise) the exception that pickling `part` raises, or None if it can be pickled.

    KeyboardInterrupt and SystemExit are raised.
    """
    try:
        Pickler(io.BytesIO(), PROTOCOL, buffer_callback=_leave_out).dump(part)
    except Exception as e:  # noqa: BLE001 - any failure is the answer
        return e
    return None


def _leave_out(_: pickle.PickleBuffer) -> bool:
    """Return False, which tells pickle to leave a buffer's memory out, so that it is not copied."""
    return False


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield the parts of `value` that are pickled with it, as (path, part), such as (".name", …). Keys do not count."""
    if isinstance(value, FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, dict):
        yield from ((f"[{short(key)}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f"{{{short(item)}}}", item) for item in value)
    elif isinstance(value, type):
        yield from ((f".{key}", item) for key, item in vars(value).items() if not key.startswith("__"))
    elif not isinstance(value, ModuleType):
        if (bound := _attribute(value, "__self__")) is not None and not isinstance(bound, ModuleType):
            yield ".__self__", bound
        yield from ((f".{key}", item) for key, item in (_attribute(value, "__dict__") or {}).items())
        yield from ((f".{slot}", _attribute(value, slot)) for slot in _slots(type(value)))


def _attribute(value: object, name: str) -> Any:
    """Return an attribute of any object; None if there is none, or if reading it raises an Exception."""
    try:
        return getattr(value, name, None)
    except Exception:  # noqa: BLE001 - the object is reported already, for its first error
        return None


def short(value: object) -> str:
    """Return the first 40 characters of a value's repr, or the name of its class in angle brackets if that raises."""
    try:
        return f"{value!r:.40}"
    except Exception:  # noqa: BLE001 - a broken __repr__ must not hide the real error
        return f"<{name_of(type(value))}>"


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (s for s in ((slots,) if isinstance(slots, str) else slots) if not s.startswith("__"))


def _function_parts(function: FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f".<closure>.{name}", cell.cell_contents
        except ValueError:
            continue  # an empty cell can be pickled
    for name, part in captured_globals(function):
        yield f".<globals>.{name}", part
    for index, default in enumerate(function.__defaults__ or ()):
        yield f".<defaults>[{index}]", default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield f".<defaults>.{name}", default


def captured_globals(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the globals whose names occur in `function` and the functions inside it, each once, as (name, value).

    Builtins, names that are not defined yet, and globals that only called functions use are left out. If the code uses
    an attribute with the name of a global, that global is yielded.
    """
    codes = [function.__code__]
    seen: set[str] = set()
    while codes:
        code = codes.pop()
        codes.extend(const for const in code.co_consts if hasattr(const, "co_names"))
        for name in code.co_names:
            if name in function.__globals__ and name not in seen:
                seen.add(name)
                yield name, function.__globals__[name]
