"""Values that cannot be written as data, and why: what a user reads of them."""

from __future__ import annotations

import types

from skypool.wire.blame import name_of


class WriteError(Exception):
    """A value that a client does not read.

    Attributes:
        path: where in the value it is, such as "[2].model"; kind: the name of its class.
        allowable: whether the user may allow that class.
    """

    def __init__(self, why: str, kind: str = "", allowable: bool = False) -> None:
        self.why = why
        self.kind = kind
        self.path = ""
        self.allowable = allowable
        super().__init__(why)


def refusal(value: object) -> WriteError:
    """Why a value cannot be written."""
    kind = type(value)
    name = name_of(kind)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)):
        own = getattr(value, "__qualname__", getattr(value, "__name__", ""))
        of = f"{getattr(value, '__module__', '')}.{own}".removeprefix("builtins.")
        return WriteError(f"it holds {of} itself, and a class or a function is no data", of)
    reduce = _maker_of(value)
    if reduce:
        return WriteError(f"it names {reduce}, which only running code could rebuild", reduce)
    if "<locals>" in kind.__qualname__:
        return WriteError(f"the class {name} stands inside a function: define it at the top of a module", name)
    return WriteError(f"it names {name}, which only running code could rebuild", name, allowable=True)


def _maker_of(value: object) -> str:
    """The name of the function that pickle would call for a value whose class takes itself apart, "" if it does not."""
    kind = type(value)
    if kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        return ""
    try:
        make = value.__reduce_ex__(4)[0]
    except Exception:  # noqa: BLE001 - then its class is all there is to say
        return ""
    name = getattr(make, "__qualname__", "")
    return "" if isinstance(make, type) or "__newobj" in name else f"{getattr(make, '__module__', '')}.{name}"


def short_form(value: object) -> str:
    """Return how a path in a message shows a key: without running code of its class."""
    return (
        f"{value!r:.40}" if type(value) in (str, bytes, int, float, bool, type(None)) else f"<{name_of(type(value))}>"
    )
