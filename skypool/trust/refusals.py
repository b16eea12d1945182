"""Makes the errors for values that cannot be written in skypool's data format, with a reason for the user."""

from __future__ import annotations

import types

from skypool.wire.blame import name_of


class WriteError(Exception):
    """An error for a value that cannot be written in skypool's data format.

    Attributes:
        why: the reason, as a part of an error message. The word "it" in this text means the whole value.
        kind: the name of the refused value's class, or of the function that would rebuild the refused value. "" for
            other reasons.
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
    """Return (not raise) the error for a value that cannot be written as data, with the reason.

    The error's `allowable` is True if the user may allow the value's class. It is False if the value is itself
    a class, function or module, or if its class is defined inside a function. It is also False if pickle would rebuild
    the value by calling a function.
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
    """Return the name of the function that pickle would call to rebuild a value, such as "posix.system".

    Runs the value's `__reduce_ex__`. Returns "" if the class does not define how its instances are pickled, if pickle
    would call a class and no function, or if `__reduce_ex__` raises an Exception. The result ends with "." if the
    function has no name, or if pickle stores only the value's own name, as for NotImplemented.
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
    """Return a short text for a dictionary key or set member, for paths in error messages.

    The text is the first 40 characters of the repr if the value is a str, bytes, int, float, bool or None. For any
    other value it is the name of the class in angle brackets. No code of the class runs.
    """
    return (
        f"{value!r:.40}" if type(value) in (str, bytes, int, float, bool, type(None)) else f"<{name_of(type(value))}>"
    )
