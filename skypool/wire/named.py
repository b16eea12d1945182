"""Pickles objects of scripts that have names, but are not classes or functions: type variables, caches and others.

pickle sends these objects by name, which fails for those of a script. Here the receiver makes them again from their
parts, once in a process.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import typing
import weakref
from collections.abc import Callable
from enum import Enum
from threading import RLock
from types import CodeType, FunctionType
from typing import Any, cast

from cloudpickle import cloudpickle

from skypool.wire import definition_ids

_Cache = functools._lru_cache_wrapper
_VARIABLES: tuple[type, ...] = (typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple)
NAMED: tuple[type, ...] = (*_VARIABLES, typing.NewType, _Cache, contextvars.ContextVar)
"""The types whose objects are definitions: each exists once in a process."""
_OPTIONS = ("covariant", "contravariant", "infer_variance")
_DISPATCHER: CodeType = cast(Any, functools.singledispatch(lambda _: None)).__code__


def _travels_by_name(thing: Any) -> bool:
    """Return True if the receiver can import the object by its module and name."""
    name = getattr(thing, "__qualname__", None) or thing.__name__
    return cloudpickle._lookup_module_and_qualname(thing, name=name) is not None and not (
        cloudpickle._is_registered_pickle_by_value(sys.modules[thing.__module__])
    )


def _kept(made: Any, id_: str) -> Any:
    """Return the object that has this id here. If there is none, give the id to `made`, and return that."""
    found = definition_ids.known(id_)
    if found is not None:
        return found
    if type(made).__weakrefoffset__:
        return definition_ids.receive(id_, "", made)
    definition_ids.remember(id_, made)
    return made


# --- typing ------------------------------------------------------------------------------------------------------
# https://github.com/cloudpipe/cloudpickle/issues/520 is about NewType; cloudpickle knows no ParamSpec and TypeVarTuple.


def _reduce_variable(variable: Any) -> Any:
    if _travels_by_name(variable):
        return variable.__name__
    options = {name: getattr(variable, f"__{name}__", False) for name in _OPTIONS}
    options = {name: True for name, value in options.items() if value}
    bound = getattr(variable, "__bound__", None)
    if bound is not None:
        options["bound"] = bound
    if getattr(variable, "has_default", bool)():
        options["default"] = variable.__default__
    return _variable, (
        definition_ids.id_of(variable),
        type(variable),
        variable.__name__,
        getattr(variable, "__constraints__", ()),
        options,
        variable.__module__,
    )


def _variable(id_: str, kind: Any, name: str, constraints: Any, options: dict[str, Any], module: str) -> Any:
    made = kind(name, *constraints, **options)
    made.__module__ = module
    return _kept(made, id_)


def _reduce_new_type(kind: Any) -> Any:
    if _travels_by_name(kind):
        return kind.__qualname__
    return _new_type, (definition_ids.id_of(kind), kind.__qualname__, kind.__supertype__, kind.__module__)


def _new_type(id_: str, name: str, supertype: Any, module: str) -> Any:
    made: Any = cast(Any, typing.NewType)(name, supertype)
    made.__module__ = module
    return _kept(made, id_)


# --- functools ---------------------------------------------------------------------------------------------------


def _reduce_cache(cache: Any) -> Any:
    """Return how to pickle a function with a cache, without the values in the cache."""
    # cloudpickle cannot do so: https://github.com/cloudpipe/cloudpickle/issues/178
    if _travels_by_name(cache):
        return cache.__qualname__
    id_ = definition_ids.id_of(cache) if definition_ids.is_named(cache) else None
    return _cache, (id_, cache.__wrapped__, cache.cache_parameters()), dict(cache.__dict__)


def _cache(id_: str | None, function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    found = None if id_ is None else definition_ids.known(id_)
    if found is not None:
        return found
    made = functools.lru_cache(**parameters)(function)
    return made if id_ is None else _kept(made, id_)


def _reduce_cached_property(prop: functools.cached_property[Any]) -> Any:
    """Return how to pickle a `cached_property` without its lock, which it still has in Python 3.11."""
    state = {name: value for name, value in vars(prop).items() if name != "lock"}
    return _cached_property, (type(prop),), state


def _cached_property(kind: type[functools.cached_property[Any]]) -> functools.cached_property[Any]:
    made: Any = kind.__new__(kind)
    if sys.version_info < (3, 12):
        made.lock = RLock()
    return cast("functools.cached_property[Any]", made)


def is_dispatcher(function: FunctionType) -> bool:
    """Return True if a function was made by `functools.singledispatch`."""
    return function.__code__ is _DISPATCHER


def reduce_dispatcher(function: Any) -> Any:
    """Return how to pickle a function of `functools.singledispatch`: by its implementations, without its cache."""
    id_ = definition_ids.id_of(function) if definition_ids.is_named(function) else None
    name = {key: getattr(function, key) for key in functools.WRAPPER_ASSIGNMENTS if key != "__annotations__"}
    more = {key: value for key, value in vars(function).items() if key not in _DISPATCH_METHODS}
    return _dispatcher, (id_,), (dict(function.registry), name, more), None, None, _fill_dispatcher


_DISPATCH_METHODS = ("register", "dispatch", "registry", "_clear_cache")


def _dispatcher(id_: str | None) -> Any:
    found = None if id_ is None else definition_ids.known(id_)
    if found is not None:
        return found

    def nothing(_: object) -> None: ...

    made: Any = functools.singledispatch(nothing)
    made.__wrapped__ = None  # its implementations have not arrived yet
    return made if id_ is None else _kept(made, id_)


def _fill_dispatcher(made: Any, state: tuple[dict[type, Any], dict[str, Any], dict[str, Any]]) -> None:
    registry, names, more = state
    is_new = made.__wrapped__ is None
    for kind, function in registry.items():
        if is_new or kind not in made.registry:
            made.register(kind, function)
    if is_new:
        for name, value in (names | more).items():
            setattr(made, name, value)


# --- others ------------------------------------------------------------------------------------------------------


def reduce_member(member: Any) -> Any:
    """Return how to pickle a member of an enum of a script: by its name; NotImplemented if that is not possible.

    It is not pickled by its value, because a value may be unequal to its own copy.
    """
    kind = type(member)
    by_name = kind.__reduce_ex__ is cast(Any, Enum).__reduce_ex__ and kind._member_map_.get(member._name_) is member
    return (getattr, (kind, member._name_)) if by_name and definition_ids.is_by_value(kind) else NotImplemented


def reduce_global(thing: Any, name: str) -> Any:
    """Return how to pickle an object of a script that exists once in a process, such as a marker for "missing".

    Its `__reduce__` has returned the text `name`: pickle would store only that it is the global of this name. If it is
    not, `name` is returned, for which pickle raises its error.
    """
    if not definition_ids.has_strong_id(thing):
        found: Any = sys.modules.get(type(thing).__module__)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not thing:
            return name  # for which pickle raises its error
    return _global, (definition_ids.strong_id_of(thing), type(thing)), thing.__getstate__(), None, None, _fill_global


def _global(id_: str, kind: type) -> Any:
    found = definition_ids.known(id_)
    if found is None:
        found = object.__new__(kind)
        definition_ids.remember(id_, found)
        _empty.add(id_)
    return found


_empty: set[str] = set()
"""The ids of objects from `reduce_global` that were made here, but whose attributes have not arrived yet."""


def _fill_global(thing: Any, state: Any) -> None:
    id_ = definition_ids.strong_id_of(thing)
    if id_ not in _empty:
        return
    _empty.discard(id_)
    values, slots = state if isinstance(state, tuple) else (state, None)
    for name, value in {**(values or {}), **(slots or {})}.items():
        object.__setattr__(thing, name, value)


def _reduce_context_variable(variable: contextvars.ContextVar[Any]) -> Any:
    """Return how to pickle a ContextVar: by its name and default. Its values belong to the contexts of a process."""
    default: tuple[Any, ...] = ()
    with contextlib.suppress(LookupError):  # it has none
        default = (contextvars.Context().run(variable.get),)  # the default can be read in no other way
    return _context_variable, (definition_ids.id_of(variable), variable.name, default)


def _context_variable(id_: str, name: str, default: tuple[Any, ...]) -> Any:
    found = definition_ids.known(id_)
    if found is not None:
        return found
    return _kept(contextvars.ContextVar(name, default=default[0]) if default else contextvars.ContextVar(name), id_)


def _reduce_weak_dictionary(mapping: Any) -> Any:
    return type(mapping), (dict(mapping),)


_TRITON = "triton.runtime.jit"
_KERNEL_OPTIONS = (
    "version",
    "do_not_specialize",
    "do_not_specialize_on_alignment",
    "debug",
    "noinline",
    "launch_metadata",
)


def _reduce_kernel(kernel: Any) -> Any:
    """Return how to pickle a kernel of `triton.jit`: by its function, without its lock and compiled code."""
    if _travels_by_name(kernel):
        return kernel.__qualname__
    options = {name: value for name in _KERNEL_OPTIONS if (value := getattr(kernel, name, None)) is not None}
    id_ = definition_ids.id_of(kernel) if definition_ids.is_named(kernel) else None
    return _kernel, (id_, type(kernel), kernel.fn, options)


def _kernel(id_: str | None, kind: Any, function: FunctionType, options: dict[str, Any]) -> Any:
    found = None if id_ is None else definition_ids.known(id_)
    if found is not None and (found.fn is function or definition_ids.is_own(found)):
        return found
    made = kind(function, **options)
    return made if id_ is None else definition_ids.replace(id_, "", made)


def learn_libraries() -> None:
    """Add types of optional libraries, such as Triton, to `REDUCERS` if these libraries were imported."""
    if _TRITON in sys.modules:
        kind = getattr(sys.modules[_TRITON], "JITFunction", None)
        if kind is not None:
            REDUCERS.setdefault(kind, _reduce_kernel)


REDUCERS: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys(_VARIABLES, _reduce_variable),
    typing.NewType: _reduce_new_type,
    _Cache: _reduce_cache,
    functools.cached_property: _reduce_cached_property,
    contextvars.ContextVar: _reduce_context_variable,
    weakref.WeakKeyDictionary: _reduce_weak_dictionary,
    weakref.WeakValueDictionary: _reduce_weak_dictionary,
}
"""A dict from a type to the function that returns how to pickle an object of this type, as `__reduce__` does."""
