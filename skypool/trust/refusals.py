"""Makes the errors for values that cannot be written in skypool's data format, with a reason for the user."""

from __future__ import annotations

import types

from skypool.wire.unpicklable import name_of


class WriteError(Exception):
    """An error for a value that cannot be written in skypool's data format.

    Attributes:
        why: the reason, as a part of an error message. The word "it" in this text means the whole value.
        kind: the name of the refused value's class, or of the function that would rebuild it; "" for other reasons.
        path: the place of the refused part inside the whole value, such as "[2].model"; "" until the encoder sets it.
        allowable: True if the user may allow the class `kind` with the pool's argument `allow_results`.
        advice: the next step for the user, as whole sentences; "" for the advice to return plain values instead.
    """

    def __init__(self, why: str, kind: str = "", allowable: bool = False, advice: str = "") -> None:
        self.why = why
        self.kind = kind
        self.path = ""
        self.allowable = allowable
        self.advice = advice
        super().__init__(why)


def refusal(value: object) -> WriteError:
    """Return (do not raise) the error for a value that cannot be written as data, with the reason.

    The error is not `allowable` if the value is itself a class, function or module, or if its class is defined inside
    a function. The same holds if pickle would rebuild the value by calling a function.
    """
    kind = type(value)
    name = name_of(kind)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)):
        own = getattr(value, "__qualname__", getattr(value, "__name__", ""))
        of = f"{getattr(value, '__module__', '')}.{own}".removeprefix("builtins.")
        return WriteError(f"it contains {of} itself: classes, functions and modules cannot be sent as data", of)
    reduce = _maker_of(value)
    if reduce:
        how = "running code" if reduce.endswith(".") else f"calling {reduce}"
        return WriteError(f"it contains an instance of {name}, which could be rebuilt only by {how}", reduce)
    if "<locals>" in kind.__qualname__:
        return WriteError(
            f"it contains an instance of {name}, a class that is defined inside a function",
            name,
            advice="Define the class at the top of a module",
        )
    return WriteError(
        f"it contains an instance of {name}, which cannot be rebuilt without running code", name, allowable=True
    )


def _maker_of(value: object) -> str:
    """Return the name of the function that pickle calls to rebuild a value, such as "posix.system"; "" for none."""
    # the name ends with "." if the function has none, or if pickle stores the value's own name only
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
    """Return a short text for a key or set member, for paths in messages, without running code of its class."""
    return (
        f"{value!r:.40}" if type(value) in (str, bytes, int, float, bool, type(None)) else f"<{name_of(type(value))}>"
    )
