"""`@compute`, `Call`, `gather`, and the operators `>>`, `@`, `>` and `&` that send calls to a pool."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeVar,
    TypeVarTuple,
    Unpack,
    overload,
)

from skypool.calls.arguments import arity, payload_of, signature
from skypool.calls.futures import CallFuture
from skypool.calls.options import NodesAsked, NodesChanges, OneNodeChanges, OptionChanges, Options, OutputMode
from skypool.calls.pending import Code
from skypool.checks import Duration
from skypool.errors import UsageError
from skypool.runtime import Attended, Interruption
from skypool.shipping import user_modules
from skypool.wire import blame, codec, pickling
from skypool.wire.frames import Buffer

if TYPE_CHECKING:
    from collections.abc import Generator

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
V = TypeVar("V")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Ts = TypeVarTuple("Ts")


class Runner(Protocol):
    """What a call can be sent to: a pool."""

    def run(self, call: Call[T]) -> T: ...
    def run_all(self, call: Call[T]) -> list[T]: ...
    def send(self, call: Call[T]) -> CallFuture[T]: ...
    def run_group(self, group: Group[R]) -> R: ...


class ComputeFunction(Generic[P, T]):
    """A function that can run on a pool. Calling it gives a `Call`, which runs nowhere until it is sent.

    Made by `@compute`. Attributes of a running call, all settable by `@compute(…)` and `call.with_options(…)`:
        timeout: seconds, or "5m", it may run on the node; then it is stopped and raises CallTimeout.
        retries: how often it may run again when its node or worker is lost. It is never run again unasked, but when
            a spot market takes its node back.
        retry_on: exceptions of its own after which it runs again, too.
        node: the node it must run on, by its number. "all", or a list of numbers such as [0, 2]: a call on each of
            these nodes, and a list of their values, as `@` gives; in `map`, the nodes that may run it.
        output: "show" what it prints, only the "head" node's, "silent", or "capture": the value comes back as
            `Captured(value, output)`.
        grace: seconds between SIGTERM and SIGKILL when it is stopped.
        window: for a generator, bytes under way before it waits for its consumer.
        on_interruption: called on the node, in a thread beside the call, when its provider says that it takes the
            machine back: with an `Interruption`, once for each call that runs.
        fresh: run it in a process that has run no call before, and that ends after it. Otherwise a worker process runs
            one call after the other, whether they fail or not, and modules keep their state, as a process group of
            `torch.distributed` that is still initialised. It costs the start of a process, and its imports, each time.
        devices: 0 for a call that needs no device of its node. It runs on one of the CPU slots, of which a node with
            devices has one for each CPU, and sees no device.

    `is_generator` says whether its calls give streams.

    Above the function of a class it makes a method: `box.grow(3)` sends a copy of `box` with the other arguments.
    """

    def __init__(self, function: Callable[..., T], options: Options, given: tuple[object, ...] = ()) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.options = options
        self.given = given
        self._method: ComputeFunction[..., T] | None = None
        self._code: tuple[tuple[object, ...], Code] | None = None
        self._bare: object = None
        self._fewest, self._most = (each - len(given) for each in arity(function))
        self.is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        self.name = getattr(function, "__qualname__", repr(function)).replace("<locals>.", "")

    def _not_called(self, operator: str) -> NoReturn:
        raise UsageError(
            f"{self.name} is a function, and {operator} takes a call of it: call it, {self.name}(…) {operator} …"
        )

    def __rshift__(self, pool: object) -> NoReturn:
        self._not_called(">>")

    def __matmul__(self, pool: object) -> NoReturn:
        self._not_called("@")

    def __gt__(self, pool: object) -> NoReturn:
        self._not_called(">")

    def __and__(self, other: object) -> NoReturn:
        self._not_called("&")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        if kwargs or not self._fewest <= len(args) <= self._most:
            signature(self.function).bind(*self.given, *args, **kwargs)  # says what is wrong, on the line that wrote it
        return Call(self, args, kwargs, self.options)

    def local(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run it here and now."""
        return self.function(*self.given, *args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> ComputeFunction[P, T]: ...
    @overload
    def __get__(
        self: ComputeFunction[Concatenate[Any, Q], T], instance: object, owner: type | None = None
    ) -> ComputeFunction[Q, T]: ...
    def __get__(self, instance: object, owner: type | None = None) -> ComputeFunction[..., T]:
        if instance is None:
            return self
        bound: ComputeFunction[..., T] = ComputeFunction(self.function, self.options, (instance,))
        bound._method = self
        return bound

    def with_options(self, **changes: Unpack[NodesChanges]) -> ComputeFunction[P, T]:
        """Return the same function with other options."""
        return ComputeFunction(self.function, _changed(self.options, changes), self.given)

    def code(self) -> Code:
        """The function as it travels; pickled anew only if something it captures may have changed.

        Raises:
            PickleError: naming what it captures that cannot travel.
        """
        if self._method is not None:
            return self._method.code()
        if self._code is not None and self._bare is self.function.__code__:
            return self._code[1]
        state = _captured(self.function)
        notified = self.options.on_interruption
        if notified is not None:
            more = _captured(notified)
            state = None if state is None or more is None else (*state, *more)
        if self._code is not None and state is not None and _same(self._code[0], state):
            return self._code[1]
        target: Any = _Undecorated(self) if _is_importable(self) else self.function
        target = target if notified is None else Attended(target, notified)
        buffers = codec.dumps(target, self.name)
        manifest = json.dumps(user_modules.manifest(), sort_keys=True).encode()
        digest = hashlib.sha256(manifest)
        for buffer in buffers:
            digest.update(buffer)
        code = Code(digest.hexdigest()[:16], self.name, (*buffers, manifest))
        if state is not None:
            self._code = (state, code)
            self._bare = self.function.__code__ if len(state) == 1 and not _names_globals(self.function) else None
        return code

    def __reduce__(self) -> tuple[Any, ...] | str:
        if _is_importable(self):
            return self.function.__qualname__
        return _rebuild_function, (self.function, *self.given)

    def __repr__(self) -> str:
        return f"<compute function {self.name}>"


def _rebuild_function(function: Callable[..., Any], *given: Any) -> ComputeFunction[..., Any]:
    return ComputeFunction(function, Options(), given)


class _Undecorated:
    """Pickles as the plain function inside a decorated one that a node can import."""

    def __init__(self, function: ComputeFunction[..., Any]) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Any, ...]:
        return _undecorate, (self.function,)


def _undecorate(function: ComputeFunction[..., Any]) -> Callable[..., Any]:
    return function.function


def _is_importable(function: ComputeFunction[..., Any]) -> bool:
    """Whether importing its module on a node gives this very object."""
    return _travels_by_name(function.function, function)


def _travels_by_name(named: Any, thing: object = None) -> bool:
    """Whether a node that imports what is called as `named` gets `thing`, or `named` itself."""
    module = getattr(named, "__module__", None)
    name = getattr(named, "__qualname__", "<locals>")
    if module is None or module in pickling.SCRIPT or "<locals>" in name:
        return False
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is (named if thing is None else thing)


def _names_globals(function: Any) -> bool:
    """Whether it names globals, also such as do not exist yet."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        if code.co_names:
            return True
        codes.extend(const for const in code.co_consts if isinstance(const, types.CodeType))
    return False


_CONSTANT = (int, float, complex, str, bytes, bool, type(None), types.BuiltinFunctionType)
"""Types whose values cannot change: a function that captures nothing else need not be pickled anew."""


def _captured(function: Callable[..., Any], depth: int = 0) -> tuple[object, ...] | None:
    """Everything a function captures, if it is all constant; None if something may change unseen."""
    if isinstance(function, ComputeFunction):
        function = function.function
    if not isinstance(function, types.FunctionType) or depth > 4:
        return None
    state: list[object] = [function.__code__]
    for name, value in _captures(function):
        state.append(name)
        if isinstance(value, ComputeFunction) and value.given:
            return None  # what its method is of may change
        if isinstance(value, (types.FunctionType, ComputeFunction)):
            inner = value.function if isinstance(value, ComputeFunction) else value
            if inner is function:
                continue
            below = _captured(inner, depth + 1)
            if below is None:
                return None
            state += below
        elif isinstance(value, types.ModuleType):
            state += (value, user_modules.stamp(value))
        elif type(value) in _CONSTANT or (isinstance(value, type) and _travels_by_name(value)):
            state.append(value)
        else:
            return None
    return tuple(state)


def _captures(function: types.FunctionType) -> Iterator[tuple[object, object]]:
    """What a function captures, by name or place; an empty cell stands for itself."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            yield name, cell
    yield from blame.captured_globals(function)
    yield from enumerate(function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()


def _same(before: tuple[object, ...], now: tuple[object, ...]) -> bool:
    return len(before) == len(now) and all(a is b or _equal(a, b) for a, b in zip(before, now, strict=True))


def _equal(a: object, b: object) -> bool:
    if type(a) is float or type(a) is complex:
        return repr(a) == repr(b)  # 0.0 == -0.0
    return type(a) is type(b) and a == b


@overload
def compute(function: Callable[P, T], /) -> ComputeFunction[P, T]: ...
@overload
def compute(
    *,
    timeout: Duration | None = None,
    retries: int = 0,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    node: NodesAsked = None,
    output: OutputMode = "show",
    grace: Duration = 5.0,
    window: int = 1 << 20,
    on_interruption: Callable[[Interruption], object] | None = None,
    fresh: bool = False,
    devices: Literal[0] | None = None,
) -> Callable[[Callable[P, T]], ComputeFunction[P, T]]: ...
def compute(
    function: Callable[P, T] | None = None, /, **options: Unpack[NodesChanges]
) -> ComputeFunction[P, T] | Callable[[Callable[P, T]], ComputeFunction[P, T]]:
    """Make a function remote: `train(10)` is then a `Call`, and `train(10) >> pool` its value.

    Raises:
        UsageError: it is no function, or an option makes no sense.
    """
    if function is None:
        checked = _changed(Options(), options)
        return lambda f: _decorate(f, checked)
    return _decorate(function, Options())


def _changed(options: Options, changes: Mapping[str, object]) -> Options:
    """Return options with some changed. Of a decorated `on_interruption` they take the plain function."""
    listener = changes.get("on_interruption")
    if isinstance(listener, ComputeFunction):
        changes = {**changes, "on_interruption": listener.function}
    return options.but(changes)


def _decorate(function: Callable[P, T], options: Options) -> ComputeFunction[P, T]:
    if isinstance(function, (staticmethod, classmethod)):
        raise UsageError("put @staticmethod or @classmethod above @compute, not below it")
    if isinstance(function, ComputeFunction):
        return function.with_options()
    if not callable(function) or isinstance(function, type):
        raise UsageError(f"@compute makes a function remote, and {function!r} is none")
    return ComputeFunction(function, options)


class Call(Generic[T_co]):
    """A function with its arguments, on its way nowhere yet.

    `call >> pool` runs it on one node and gives its value; `call @ pool` runs it on every node and gives a list by
    node; `call > pool` gives a future; `a & b` is both at once. With `node=[0, 2]` or `node="all"` among its options,
    `>>` and `>` send it to each of these nodes and give a list, too.
    """

    __slots__ = ("args", "function", "kwargs", "options", "sent")

    def __init__(
        self,
        function: ComputeFunction[..., T_co],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        options: Options,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.options = options
        self.sent = False

    @overload
    def with_options(
        self, *, node: Literal["all"] | Sequence[int], **changes: Unpack[OptionChanges]
    ) -> Call[list[T_co]]: ...
    @overload
    def with_options(self, **changes: Unpack[OneNodeChanges]) -> Call[T_co]: ...
    def with_options(self, **changes: Unpack[NodesChanges]) -> Call[T_co] | Call[list[T_co]]:
        """Return the same call with other options, those of `@compute`."""
        self.sent = True
        function = self.function.with_options(**changes) if "on_interruption" in changes else self.function
        return Call(function, self.args, self.kwargs, _changed(self.options, changes))

    def payload(self) -> tuple[Sequence[Buffer], Sequence[Iterator[object]]]:
        """Its pickled arguments, and the iterators among them, which stream up instead.

        Raises:
            PickleError: naming the argument that cannot travel.
        """
        self.sent = True
        return payload_of(self.function, self.args, self.kwargs)

    def __rshift__(self, pool: Runner) -> T_co:
        return _runner(pool, ">>", self).run(self)

    def __matmul__(self, pool: Runner) -> list[T_co]:
        return _runner(pool, "@", self).run_all(self)

    def __gt__(self, pool: Runner) -> CallFuture[T_co]:
        return _runner(pool, ">", self).send(self)

    @overload
    def __and__(self, other: Call[U]) -> Group[tuple[T_co, U]]: ...
    @overload
    def __and__(self, other: Group[tuple[*Ts]]) -> Group[tuple[T_co, *Ts]]: ...
    def __and__(self, other: Call[object] | Group[Any]) -> Group[Any]:
        return gather(self) & other

    def __rand__(self, other: object) -> NoReturn:
        self.sent = True
        raise no_call(other, "&")

    def __await__(self) -> Generator[Any, None, T_co]:
        if not current:
            raise UsageError("`await call` needs an `async with ComputePool(…)` around it; or: `await (call > pool)`")
        return current[-1].send(self).__await__()

    def __bool__(self) -> bool:
        raise UsageError(
            f"{self!r} has no truth value: it has not run. Send it with `>>`; and mind that `a > b > c` means "
            f"`a > b and b > c`"
        )

    def __repr__(self) -> str:
        args = [f"{a!r:.40}" for a in self.args] + [f"{k}={v!r:.40}" for k, v in self.kwargs.items()]
        return f"<call {self.function.name}({', '.join(args)})>"

    def __del__(self) -> None:
        if not getattr(self, "sent", True) and not sys.is_finalizing():
            warnings.warn(f"{self!r} was never sent to a pool", RuntimeWarning, stacklevel=2, source=self)


def call_asked(call: Call[T]) -> Call[T]:
    """What a pool was told to run, which is a call.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(call, Call):
        hint = f": call it, {call.name}(…)" if isinstance(call, ComputeFunction) else ", such as train(3)"
        raise UsageError(f"a pool runs calls, not {call!r:.80}{hint}")
    return call


def no_call(value: object, operator: str) -> UsageError:
    """What to raise where something that is no call was sent somewhere."""
    hint = _hint(value) or "add @sky.compute above the function, so that train(3) gives a call, not its value"
    return UsageError(f"{operator} takes a call, such as train(3), and {value!r:.80} is none: {hint}")


def _hint(value: object) -> str:
    """What to do with what was taken for a call, "" where that is not clear."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, Call) for each in value):
        for each in value:
            each.sent = True
        return "send several calls with sky.gather(*calls) >> pool"
    if isinstance(value, ComputeFunction):
        return f"call it, {value.name}(…)"
    if callable(value):
        return f"add @sky.compute above {getattr(value, '__name__', 'it')}, and call it"
    return ""


def _runner(pool: Any, operator: str, call: Call[Any] | None = None) -> Runner:
    if call is not None:
        call.sent = True  # if only to what is no pool, which is told
    if isinstance(pool, type) or not hasattr(pool, "run_group"):
        raise UsageError(f"a call is sent to a pool with {operator}, not to {pool!r:.80}")
    return pool  # type: ignore[no-any-return]  # it has what a Runner has


current: list[Runner] = []
"""Pools entered and not left, the innermost last: where `await call` sends it."""


class Group(Generic[R_co]):
    """Several calls that are sent together with `>>`: their values in order, or with `stream` as they come.

    `R_co` is what `group >> pool` gives: a tuple of values, or an iterator of them.
    """

    def __init__(self, calls: tuple[Call[object], ...], stream: bool, ordered: bool) -> None:
        self.calls = calls
        self.stream = stream
        self.ordered = ordered

    @overload
    def __and__(self: Group[tuple[*Ts]], other: Call[U]) -> Group[tuple[*Ts, U]]: ...
    @overload
    def __and__(self: Group[tuple[T, ...]], other: Group[tuple[T, ...]]) -> Group[tuple[T, ...]]: ...
    @overload
    def __and__(self: Group[Iterator[T]], other: Call[T] | Group[tuple[T, ...]]) -> Group[Iterator[T]]: ...
    def __and__(self, other: Call[Any] | Group[Any]) -> Group[Any]:
        more = other if isinstance(other, Group) else gather(other)
        return Group((*self.calls, *more.calls), self.stream, self.ordered)

    def __rshift__(self, pool: Runner) -> R_co:
        return _runner(pool, ">>").run_group(self)

    def __repr__(self) -> str:
        return f"<{len(self.calls)} calls>"


@overload
def gather(first: Call[T], /) -> Group[tuple[T]]: ...
@overload
def gather(first: Call[T], second: Call[U], /) -> Group[tuple[T, U]]: ...
@overload
def gather(first: Call[T], second: Call[U], third: Call[V], /) -> Group[tuple[T, U, V]]: ...
@overload
def gather(*calls: Call[T], stream: Literal[False] = False, ordered: bool = True) -> Group[tuple[T, ...]]: ...
@overload
def gather(*calls: Call[T], stream: Literal[True], ordered: bool = True) -> Group[Iterator[T]]: ...
def gather(*calls: Call[object], stream: bool = False, ordered: bool = True) -> Group[Any]:
    """Several calls at once: `gather(f(1), f(2)) >> pool`.

    Args:
        stream: give an iterator of values instead of a tuple of them.
        ordered: with `stream`: in the order given; otherwise in the order they end.

    Raises:
        UsageError: something that is no call.
    """
    for call in calls:
        if not isinstance(call, Call):
            for each in calls:
                if isinstance(each, Call):
                    each.sent = True  # to nobody, which is told
            hint = _hint(call)
            raise UsageError(f"gather() and & take calls, such as train(3), not {call!r:.80}{hint and f': {hint}'}")
    return Group(calls, stream, ordered)
