"""Makes the errors for values that cannot be written in skypool's data format, with a reason for the user."""

from __future__ import annotations

import types

from skypool.wire.blame import name_of


class WriteError(Exception):
    """An error for a value that cannot be written in skypool's data format, so that a client could not read it.

    Attributes:
        why: the reason, for a message.
        kind: the name of the value's class, or of the function that would rebuild it; "" if it does not matter.
        path: the place inside the whole value, such as "[2].model"; "" at first, filled in by the writer.
        allowable: True if the user may allow this class with `allow_results`.
    """

    def __init__(self, why: str, kind: str = "", allowable: bool = False) -> None:
        self.why = why
        self.kind = kind
        self.path = ""
        self.allowable = allowable
        super().__init__(why)


def refusal(value: object) -> WriteError:
    """Return the error for a value that cannot be written as data, with the reason. It is not raised.

    Its `allowable` is True if the user may allow the value's class. It is False for classes, functions and modules
    themselves, for classes defined inside a function, and for values that pickle rebuilds with a function.
    """
    kind = type(value)
    name = name_of(kind)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)):
        own = getattr(value, "__qualname__", getattr(value, "__name__", ""))
        of = f"{getattr(value, '__module__', '')}.{own}".removeprefix("builtins.")
        return WriteError(f"the value holds {of} itself: classes, functions and modules cannot be sent as data", of)
    reduce = _maker_of(value)
    if reduce:
        return WriteError(f"the value refers to {reduce}, which cannot be rebuilt without running code", reduce)
    if "<locals>" in kind.__qualname__:
        return WriteError(f"the class {name} is defined inside a function: define it at the top of a module", name)
    return WriteError(f"the value refers to {name}, which cannot be rebuilt without running code", name, allowable=True)


def _maker_of(value: object) -> str:
    """Return the name of the function that pickle would call to rebuild this value.

    Returns "" if the class does not define how it is pickled, if pickle would call a class, or if asking the value
    raises an Exception. Asking runs the value's `__reduce_ex__`.
    """
    kind = type(value)
    if kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        return ""
    try:
        make = value.__reduce_ex__(4)[0]
    except Exception:  # noqa: BLE001 - the message then names the class only
        return ""
    name = getattr(make, "__qualname__", "")
    return "" if isinstance(make, type) or "__newobj" in name else f"{getattr(make, '__module__', '')}.{name}"


def short_form(value: object) -> str:
    """Return a dictionary key in the short form that paths in error messages have. No code of the key's class runs.

    This is the first 40 characters of the repr of a text, bytes, number, boolean or None. For others it is the class's
    name in angle brackets.
    """
    return (
        f"{value!r:.40}" if type(value) in (str, bytes, int, float, bool, type(None)) else f"<{name_of(type(value))}>"
    )
