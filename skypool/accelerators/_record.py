"""Light replacements for `dataclasses` and `functools.cache`, so that the catalogue imports quickly.

`dataclasses` loads `inspect`, which takes twice as long as everything that `H100()` needs. A class made here is still a
dataclass: `dataclasses.fields`, `replace` and `asdict` work on it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MISSING: Any = object()


class _Field:
    """Description of one field of a class: its default value or factory, and whether comparisons use the field."""

    __slots__ = ("compare", "default", "default_factory")

    def __init__(self, default: Any, default_factory: Callable[[], Any] | None, compare: bool) -> None:
        self.default, self.default_factory, self.compare = default, default_factory, compare


def field(*, default: Any = _MISSING, default_factory: Callable[[], Any] | None = None, compare: bool = True) -> Any:
    """Return the description of a field, to be assigned to the field in a class body, as `dataclasses.field` does.

    Args:
        default: default value of the field.
        default_factory: function without arguments that makes the default value.
        compare: True if `==` and `hash` use the field.
    """
    return _Field(default, default_factory, compare)


def dataclass(*, frozen: bool, slots: bool, repr: bool = True) -> Callable[[type], type]:
    """Return a class decorator that works as `dataclasses.dataclass(frozen=True, slots=True)` does.

    Only the features that the catalogue needs are supported, so `frozen` and `slots` must be True. The decorator
    returns a new class; the decorated class is not changed. `repr` = False keeps the class's own `__repr__`.
    """
    assert frozen
    assert slots

    def decorate(cls: type) -> type:
        given = {name: cls.__dict__.get(name, _MISSING) for name in cls.__annotations__}
        fields = {
            name: value if isinstance(value, _Field) else _Field(value, None, True) for name, value in given.items()
        }
        dropped = {*fields, "__dict__", "__weakref__"}
        space = {name: value for name, value in cls.__dict__.items() if name not in dropped}
        space |= {"__slots__": tuple(fields), "__match_args__": tuple(fields), "__init__": _init(fields)}
        space |= {"__setattr__": _refuse, "__delattr__": _refuse, "__replace__": _replace}
        space |= {"__dataclass_fields__": _Late(fields), "__dataclass_params__": _Late(fields)}
        compared = tuple(name for name, each in fields.items() if each.compare)
        space |= {"__eq__": _equal(compared), "__hash__": _hash(compared)}
        space.setdefault("__reduce__", _reduce)
        if repr:
            space["__repr__"] = _repr
        return type(cls.__name__, cls.__bases__, space)

    return decorate


def _init(fields: dict[str, _Field]) -> Any:
    """Return an `__init__` for a class with these fields. At its end it calls `__post_init__` if the class has one."""
    scope: dict[str, Any] = {"_set": object.__setattr__, "_missing": _MISSING}
    arguments, lines = [], []
    for name, each in fields.items():
        value = name
        if each.default_factory is not None:
            scope[f"_make_{name}"] = each.default_factory
            arguments.append(f"{name}=_missing")
            value = f"_make_{name}() if {name} is _missing else {name}"
        elif each.default is _MISSING:
            arguments.append(name)
        else:
            scope[f"_default_{name}"] = each.default
            arguments.append(f"{name}=_default_{name}")
        lines.append(f" _set(self, {name!r}, {value})")
    checked = " getattr(self, '__post_init__', int)()"
    exec(f"def __init__(self, {', '.join(arguments)}):\n" + "\n".join([*lines, checked]), scope)
    return scope["__init__"]


def _equal(names: tuple[str, ...]) -> Any:
    def __eq__(self: Any, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in names)

    return __eq__


def _hash(names: tuple[str, ...]) -> Any:
    def __hash__(self: Any) -> int:
        return hash(tuple([getattr(self, name) for name in names]))

    return __hash__


def _repr(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
    return f"{type(self).__qualname__}({shown})"


def _reduce(self: Any) -> tuple[Any, ...]:
    return type(self), tuple(getattr(self, name) for name in self.__slots__)


def _replace(self: Any, /, **changes: Any) -> Any:
    return type(self)(**{name: getattr(self, name) for name in self.__slots__} | changes)


def _refuse(self: Any, name: str, *_value: object) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(
        f"cannot assign to field {name!r} of this {type(self).__name__}, which is immutable; make a changed "
        "copy with dataclasses.replace() instead"
    )


class _Late:
    """Descriptor for `__dataclass_fields__` and `__dataclass_params__`, which makes both when one is first read."""

    def __init__(self, fields: dict[str, _Field]) -> None:
        self.fields = fields

    def __set_name__(self, _owner: type, name: str) -> None:
        self.name = name

    def __get__(self, _instance: object, owner: type) -> Any:
        import dataclasses

        made = dataclasses.make_dataclass(
            owner.__name__, [self._described(owner, name) for name in self.fields], frozen=True
        )
        for name in ("__dataclass_fields__", "__dataclass_params__"):
            setattr(owner, name, getattr(made, name))
        return getattr(made, self.name)

    def _described(self, owner: type, name: str) -> tuple[str, Any, Any]:
        import dataclasses

        each, kind = self.fields[name], owner.__annotations__[name]
        if each.default_factory is not None:
            return name, kind, dataclasses.field(default_factory=each.default_factory, compare=each.compare)
        default = dataclasses.MISSING if each.default is _MISSING else each.default
        return name, kind, dataclasses.field(default=default, compare=each.compare)


def memo(function: Any) -> Any:
    """Return a function that caches the results of `function`, as `functools.cache` does.

    Its arguments must be positional and hashable.
    """
    kept: dict[tuple[Any, ...], Any] = {}

    def look(*arguments: Any) -> Any:
        try:
            return kept[arguments]
        except KeyError:
            kept[arguments] = found = function(*arguments)
            return found

    look.__name__, look.__doc__ = function.__name__, function.__doc__
    return look
