"""Gives the functions of a script one dict of globals on a worker, as a module has.

The function of a call, its helpers and the methods of classes then see the same globals. What they assign there stays
on that worker. When a global changes on the client, it gets the new value here, too.

Each function that is called has a view: the values that it must find in the globals which arrived with it.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

from skypool.wire import definition_ids
from skypool.wire.named import NAMED

CONSTANTS = (int, float, complex, str, bytes, bool, type(None), BuiltinFunctionType)
"""Types whose values cannot change."""
_DEFINITIONS = (type, FunctionType, ModuleType, *NAMED)
Key = tuple[str, str]
"""(name of a process, name of a module): identifies the dict of globals of that module in that process."""


class Token(str):
    """Hash of a value that can change in place. Equal tokens of one sender mean that the value has not changed."""

    __slots__ = ()


class _Absent:
    """Marker in place of the value of a global that is missing here, or of the token of one that the sender lacks."""


class Space:
    """Stand-in for the dict of globals of a function in a pickle. It is unpickled as the dict that `receive` returns.

    Attributes:
        key: (process, module) of the dict; None if it is not that of a module.
        base: the names that each module has, such as `__name__` and `__file__`.
    """

    __slots__ = ("base", "key")

    def __init__(self, found: dict[str, Any]) -> None:
        shared = _by_dict.get(id(found))
        module = found.get("__name__")
        self.key: Key | None = None
        if shared is not None:
            self.key = shared.key
        elif isinstance(module, str) and getattr(sys.modules.get(module), "__dict__", None) is found:
            self.key = (definition_ids.here(), module)
        # what relative imports and tracebacks need, as cloudpickle sends it
        self.base = {name: found[name] for name in ("__package__", "__name__", "__path__", "__file__") if name in found}

    def __reduce__(self) -> tuple[Any, ...]:
        return receive, (self.key, self.base)


class _Shared:
    """Dict of globals in this process, shared by all functions that come from one module of another process."""

    __slots__ = ("key", "tokens", "values")

    def __init__(self, key: Key, values: dict[str, Any]) -> None:
        self.key = key
        self.values = values
        self.tokens: dict[str, Any] = {}  # of each global when it arrived; for a constant, its value


_shared: dict[Key, _Shared] = {}
_by_dict: dict[int, _Shared] = {}
_main: dict[str, Any] | None = None


def own_main(values: dict[str, Any]) -> None:
    """Let the first script whose functions arrive here use `values`, the dict of this process's `__main__`, as globals.

    So pickle and typing, which look names up in `__main__`, find the names of the script.
    """
    global _main
    _main = values


def receive(key: Key | None, base: dict[str, Any]) -> dict[str, Any]:
    """Return the dict of globals for functions that arrive. Unpickling a `Space` calls this.

    All functions of one module of another process share a dict. Functions of no module get a new dict, and so do those
    that come back to the process of their module, whose globals nobody may change from outside.

    `key` is (process, module), or None for no module. A new dict gets the names and values in `base`.
    """
    if key is None or key[0] == definition_ids.here():
        return {**base, "__builtins__": builtins.__dict__}
    if key not in _shared:
        _shared[key] = made = _Shared(key, _new_globals(key, base))
        _by_dict[id(made.values)] = made
    return _shared[key].values


def _new_globals(key: Key, base: dict[str, Any]) -> dict[str, Any]:
    global _main
    if key[1] == "__main__" and _main is not None:
        values, _main = _main, None
        values.update(base)
        return values
    return {**base, "__builtins__": builtins.__dict__}


class View:
    """The values that the function of a call must find in the globals which it shares with other functions.

    Two versions of a function may be called in turn: one that was sent before the client assigned a global, and one
    that was sent after that. Each finds the values that arrived with it, or what it has assigned since. Functions with
    which the client sent the same value of a global share that value.
    """

    def __init__(self) -> None:
        self._kept: list[_Entry] = []
        self._before: dict[tuple[Key, str], _Entry] = {}
        self._classes: list[tuple[Any, str]] = []
        self.changes = 0

    def forget_classes(self) -> None:
        """Forget the versions of classes that `define` has noted, because the function is unpickled again."""
        self._classes = []

    def define(self, kind: Any, version: str) -> None:
        """Note the version of a class that the function uses."""
        self._classes.append((kind, version))

    def is_outdated(self) -> bool:
        """Return True if a class that the function uses has changed here: the function must be unpickled again."""
        if self.changes == definition_ids.changes:
            return False
        self.changes = definition_ids.changes
        return any(definition_ids.version_of(kind) not in (None, version) for kind, version in self._classes)

    def leave(self) -> None:
        """Save the values that the globals of this view have now, for the next `enter`."""
        self._kept = [_entry(entry.shared, entry.name) for entry in self._kept]

    def enter(self) -> None:
        """Give the globals the values that `leave` has saved.

        A global whose token is the same as at that time keeps its present value.
        """
        for entry in self._kept:
            if _differ(entry.shared.tokens.get(entry.name, _Absent), entry.token):
                _assign(*entry)

    def arrive(self, shared: _Shared, name: str, value: Any, token: Any) -> None:
        """Give a global the value that has just arrived with the function of this view."""
        key = shared.key, name
        if key not in self._before:
            self._before[key] = _entry(shared, name)
        _assign(shared, name, value, token)

    def settle(self) -> None:
        """Undo `arrive` for globals that have not changed on the client, so that they keep what calls here assigned.

        Values that can change in place may have parts in common. So either all such values that arrived together are
        replaced by the old ones, or none is.
        """
        known = {key for key, entry in self._before.items() if not self._is_new(entry)}
        mutable = {key for key, entry in self._before.items() if type(entry.shared.tokens.get(entry.name)) is Token}
        for key, entry in self._before.items():
            if key in known and (key not in mutable or mutable <= known):
                _assign(*entry)
            elif key in known:  # other functions keep the one that they have
                entry.shared.tokens[entry.name] = Token(f"{entry.token} {id(self)}")
        self._kept = [_entry(entry.shared, entry.name) for entry in self._before.values()]
        self._before = {}
        self.changes = definition_ids.changes

    def _is_new(self, before: _Entry) -> bool:
        return _differ(before.token, before.shared.tokens.get(before.name, _Absent))


class _Entry(NamedTuple):
    """Value and token of one global of a shared dict, as they are at some time."""

    shared: _Shared
    name: str
    value: Any
    token: Any


def _entry(shared: _Shared, name: str) -> _Entry:
    return _Entry(shared, name, shared.values.get(name, _Absent), shared.tokens.get(name, _Absent))


_current: View | None = None
_loading: View | None = None


def is_entered(view: View) -> bool:
    """Return True if the globals have the values of `view`, and no definition has changed since it was last checked.

    Then the function of the view can run at once.
    """
    return view is _current and view.changes == definition_ids.changes


def enter(view: View) -> None:
    """Give the globals the values of this view. The values that they had are saved in the view that was current."""
    global _current
    if view is not _current:
        if _current is not None:
            _current.leave()
        view.enter()
        _current = view


@contextlib.contextmanager
def loading(view: View) -> Iterator[None]:
    """Enter a view while its function is unpickled. All globals that arrive inside the `with` block belong to it."""
    global _loading
    enter(view)
    view.forget_classes()
    _loading = view
    try:
        yield
    finally:
        _loading = None
        view.settle()


def define(kind: Any, version: str) -> None:
    """Note the version of a class that has arrived, in the view of the function that is being unpickled, if any."""
    if _loading is not None:
        _loading.define(kind, version)


def bind(
    values: dict[str, Any], sender: str, arrived: Mapping[str, Any], tokens: Mapping[str, Token], absent: Sequence[str]
) -> None:
    """Give a dict of globals the values that arrived with a function.

    In a shared dict, a global that has not changed on the sender's side keeps the value that it has here.

    Args:
        values: the dict of globals.
        sender: the name of the process that has sent the function.
        arrived: the globals that arrived, by name.
        tokens: the tokens of those that can change in place.
        absent: names of globals that the function uses, and that the sender lacks.
    """
    shared = _by_dict.get(id(values))
    if shared is None:
        values.update(arrived)
        return
    if sender != shared.key[0]:  # such as a child process of a call: it may add, but not change
        for name, value in arrived.items():
            values.setdefault(name, value)
        return
    entries = [_Entry(shared, name, value, tokens.get(name, value)) for name, value in arrived.items()]
    entries += [_Entry(shared, name, _Absent, _Absent) for name in absent]
    if _loading is not None:
        for entry in entries:
            _loading.arrive(*entry)
        return
    changed = {entry.name for entry in entries if _differ(shared.tokens.get(entry.name, _Absent), entry.token)}
    if not tokens.keys().isdisjoint(changed):  # they may have parts in common, which would be parted
        changed |= tokens.keys()
    for entry in entries:
        if entry.name in changed:
            _assign(*entry)


def _differ(before: Any, token: Any) -> bool:
    """Return True if the earlier and the present token of a global show that it has changed on the sender's side."""
    if before is token:
        return False
    if type(before) is not type(token):
        return True
    if isinstance(token, (float, complex)):
        return repr(before) != repr(token)  # because 0.0 == -0.0
    return not (type(token) in (*CONSTANTS, Token) and bool(before == token))


_epoch = 0


def epoch() -> int:
    """Return a number that grows when a global in this process takes over another value from its sender."""
    return _epoch


def _assign(shared: _Shared, name: str, value: Any, token: Any) -> None:
    global _epoch
    if _differ(shared.tokens.get(name, _Absent), token):
        _epoch += 1
    for place, each in ((shared.values, value), (shared.tokens, token)):
        if each is _Absent:
            place.pop(name, None)
        else:
            place[name] = each


def offer(thing: Any, name: str, values: dict[str, Any] | None) -> None:
    """Put a definition into the script's globals `values` under its name, also if no function uses that name.

    Does nothing if `values` is None or not shared, or for the name of a nested class, which has a dot.
    """
    shared = None if values is None else _by_dict.get(id(values))
    if shared is not None and "." not in name:
        shared.values[name] = thing


def main_of(sender: str) -> dict[str, Any] | None:
    """Return the shared globals of another process's script; None if nothing of it has arrived."""
    shared = _shared.get((sender, "__main__"))
    return None if shared is None else shared.values


def tokens_of(values: Mapping[str, Any], fingerprint: Callable[[Any], str]) -> dict[str, Token]:
    """Return the tokens, by name, of the globals that can change in place: all but constants and definitions."""
    return {
        name: Token(fingerprint(value))
        for name, value in values.items()
        if type(value) not in CONSTANTS and not isinstance(value, _DEFINITIONS)
    }
