"""`@compute`, `Call`, `gather`, and the operators that combine calls (`&`) and send them to a pool (`>>`, `@`, `>`)."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
import types
import typing
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

from skypool import tracebacks
from skypool.calls import entered
from skypool.calls.arguments import arity, payload_of, signature
from skypool.calls.futures import CallFuture
from skypool.calls.options import NodesAsked, NodesChanges, OneNodeChanges, OptionChanges, Options, OutputMode, Procs
from skypool.calls.pending_calls import Code, Packed
from skypool.checks import Duration
from skypool.errors import UsageError
from skypool.runtime import Attended, Interruption
from skypool.shipping import sources, user_modules
from skypool.text import encodable
from skypool.wire import codec, definition_ids, pickling, unpicklable
from skypool.wire.frames import Buffer

if TYPE_CHECKING:
    from collections.abc import Generator

P = ParamSpec("P")
Q = ParamSpec("Q")
_LONGEST_NAME = 200
"""The most characters of a function's name in messages. Each message to a node about a call has it."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
V = TypeVar("V")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Ts = TypeVarTuple("Ts")


class Runner(Protocol):
    """A protocol for objects that run calls, such as a `ComputePool`. Operators such as `>>` use only these methods."""

    def run(self, call: Call[T]) -> T:
        """Run a call on one node, wait for it, and return its value. `call >> pool` does this."""
        ...

    def run_all(self, call: Call[T]) -> list[T]:
        """Run a call on every node, wait for all, and return the values by node number. `call @ pool` does this."""
        ...

    def send(self, call: Call[T]) -> CallFuture[T]:
        """Send a call without waiting for it, and return its future. `call > pool` does this."""
        ...

    def run_group(self, group: Group[R]) -> R:
        """Run all calls of a group at once and return their values. `group >> pool` does this.

        Return a tuple after waiting for all. For `gather(…, stream=True)`, return an iterator of the values at once.
        """
        ...

    def send_group(self, group: Group[R]) -> CallFuture[R]:
        """Send all calls of a group, and return one future of the tuple of their values. `group > pool` does this."""
        ...


class ComputeFunction(Generic[P, T]):
    """A function that can run on the nodes of a pool. `@compute` makes it.

    `train(10)` does not run the function `train`, but returns a `Call`. The call runs when it is sent to a pool:
    `train(10) >> pool`. When `@compute` decorates a method, `box.grow(3)` returns a call too, which sends a copy of
    `box` with the other arguments.

    `@compute(…)` and `with_options(…)` accept these options as keywords:

    Options:
        timeout: the time that a call may run on its node, in seconds or as a duration such as "5m". Default None: no
            limit. A call that runs longer is stopped, and raises CallTimeout; a value that comes later is discarded.
            Importing modules does not count, up to 60 s, also where the function itself imports them.
        retries: the number of times that a call may run again after its node or worker process was lost. Default 0. If
            the provider takes a spot machine back, calls there also run again, without using up a retry. A call does
            not run again if it has yielded items or has an iterator argument. Neither does a call that names only
            nodes that are gone.
        retry_on: an exception class, or a tuple of them. A call that raises one of them runs again too, and uses up one
            of its `retries`, which must be at least 1. Default (): no exception of the function causes a retry.
        node: the nodes that run the call. Default None: any node with room. A number means that node. A list of numbers
            such as [0, 2] means each of these nodes, and "all" means every node: the result is then a list of values,
            ordered by node number. In `pool.map`, each call runs on only one of the nodes that `node` names.
        output: the handling of what the call prints. "show" (the default) prints it here. "head" does so too, but of a
            call that is sent to several nodes it prints only that of the first node. "rank0" prints only the output of
            rank 0 of a gang (see `procs`). "silent" drops it. "capture" returns it with the value, as `Captured(value,
            output)`.
        grace: the time between SIGTERM and SIGKILL when a call is cancelled or exceeds its `timeout`, in seconds or as
            a duration. Default None: 5 s for a cancelled call, and the `grace` of the pool after a `timeout`.
        window: for a generator, the bytes of items that may be sent before the consumer has taken them. At this limit,
            the generator waits. Default 1 MiB.
        on_interruption: a function that is called with an `Interruption` when the machine is about to end: when the
            provider announces that it takes it back, and in pools that save folders also before another end that is
            known ahead. It is called once for each running call, on the node, in another thread. Default None.
        fresh: True runs each call in a new process that ends after the call. Starting that process and importing
            modules there then takes time for each call. Default False: a worker process runs many calls one after the
            other, so modules keep their state between them.
        devices: 0 for a call that needs no accelerator. On a node with accelerators, the call then runs on a CPU slot
            and sees no accelerator. Default None: a call gets the accelerators of the slot that runs it. (A slot is the
            part of a node that runs one call at a time.)
        independent: for a call that runs on several nodes. Default False: when it fails for good on one node, it is
            stopped on the others. True lets the others go on; the error is raised when all have ended.
        procs: makes the call a gang: it runs in several new processes on each of its nodes, for torch.distributed, JAX
            and others. "per-device" means one process for each accelerator (one on a node without any). A number means
            that many. The processes learn their rank from `instance_info()` and from environment variables such as RANK
            and MASTER_ADDR. `call @ pool` returns the list of values by rank. `call >> pool` runs the gang on one node
            and returns the value of its rank 0. When a process fails, the others are stopped and its error is raised;
            `retries` and `retry_on` then count for the whole gang. Default None: no gang.
        min_nodes: for a gang: the fewest nodes with which it may run, or run again. It first waits for missing nodes,
            at most for the time of the pool's `wait`. Default None: it needs as many nodes as the pool is to have, and
            runs again with as many as before.

    Attributes:
        function: the plain function.
        options: the checked options.
        given: the arguments that come before those of each call: `(self,)` for a bound method, otherwise ().
        name: the function's qualified name, for messages.
        is_generator: True if the function is a generator function, so that its calls return a `Stream` of items.
    """

    def __init__(self, function: Callable[..., T], options: Options, given: tuple[object, ...] = ()) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.options = options
        self.given = given
        self._method: ComputeFunction[..., T] | None = None
        self._code: tuple[tuple[object, ...], Code] | None = None
        self._bare: object = None
        self._defaults: object = None
        self._generation = -1
        self._fewest, self._most = (each - len(given) for each in arity(function))
        self.is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        self.name = _name_of(function)
        if self.is_generator:
            _check_stream(self.name, options)

    def _not_called(self, operator: str) -> NoReturn:
        """Raise a UsageError, always: the function was used where a call, such as `f(3)`, is needed."""
        raise UsageError(
            f"{operator} takes a call, but {self.name} is a function: call it, {self.name}(…) {operator} …"
        )

    def __rshift__(self, pool: object) -> NoReturn:
        """Raise a UsageError, always: `f >> pool` lacks the arguments of `f(…) >> pool`."""
        self._not_called(">>")

    def __matmul__(self, pool: object) -> NoReturn:
        """Raise a UsageError, always: `f @ pool` lacks the arguments of `f(…) @ pool`."""
        self._not_called("@")

    def __gt__(self, pool: object) -> NoReturn:
        """Raise a UsageError, always: `f > pool` lacks the arguments of `f(…) > pool`."""
        self._not_called(">")

    def __and__(self, other: object) -> NoReturn:
        """Raise a UsageError, always: `f & …` lacks the arguments of `f(…) & …`."""
        self._not_called("&")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        """Return a `Call` with these arguments, which can be sent to a pool. The function does not run yet.

        Raises:
            TypeError: the number or the names of the arguments do not fit the function's signature. Types and values
                are not checked.
        """
        if kwargs or not self._fewest <= len(args) <= self._most:
            signature(self.function).bind(*self.given, *args, **kwargs)  # raises TypeError here, on the caller's line
        return Call(self, args, kwargs, self.options)

    def local(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the function in this process, without a pool, and return its value.

        Options such as `timeout` and `retries` have no effect. Exceptions of the function are raised unchanged.
        """
        return self.function(*self.given, *args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> ComputeFunction[P, T]: ...
    @overload
    def __get__(
        self: ComputeFunction[Concatenate[Any, Q], T], instance: object, owner: type | None = None
    ) -> ComputeFunction[Q, T]: ...
    def __get__(self, instance: object, owner: type | None = None) -> ComputeFunction[..., T]:
        """Return the method bound to `instance`, as Python does for `box.grow`. `Box.grow` on the class is this object.

        Calls of the method send a copy of `instance` as `self`.
        """
        if instance is None:
            return self
        bound: ComputeFunction[..., T] = ComputeFunction(self.function, self.options, (instance,))
        bound._method = self
        return bound

    def with_options(self, **changes: Unpack[NodesChanges]) -> ComputeFunction[P, T]:
        """Return a copy of this function with some options changed. The original keeps its options.

        Args:
            changes: new values of options, by the option's name, such as `timeout="5m"`. Other options keep their
                values.

        Raises:
            UsageError: an option does not exist, or a value is not valid.
        """
        return ComputeFunction(self.function, _changed(self.options, changes), self.given)

    def code(self) -> Code:
        """Return the pickled function, ready to be sent to nodes.

        The function is pickled again only if something that it captures (globals, closure variables, defaults) may have
        changed. For a bound method, the plain function is pickled, not the bound object.

        Raises:
            PickleError: the function captures a value that cannot be pickled. The message names that value.
        """
        if self._method is not None:
            return self._method.code()
        function = self.function
        if self._code is not None and self._bare is function.__code__ and self._defaults is function.__defaults__:
            return self._code[1]
        generation = user_modules.generation()
        state = _captured(self.function)
        notified = self.options.on_interruption
        if notified is not None:
            more = _captured(notified)
            state = None if state is None or more is None else (*state, *more)
        is_same = self._code is not None and self._generation == generation and state is not None
        if self._code is not None and is_same and _same(self._code[0], state or ()):
            return self._code[1]
        target: Any = _Undecorated(self) if _is_importable(self) else self.function
        target = target if notified is None else Attended(target, notified)
        codes: list[types.CodeType] = []
        buffers = codec.dumps(target, self.name, codes)
        texts = sources.sources_of(codes)
        about = {
            "modules": user_modules.manifest(),
            "first": user_modules.first_names(),
            "numpy": getattr(sys.modules.get("numpy"), "__version__", ""),
            "sources": {each.file: each.key for each in texts},
        }
        manifest = json.dumps(about, sort_keys=True).encode()
        digest = hashlib.sha256(manifest)
        for buffer in buffers:
            digest.update(buffer)
        code = Code(digest.hexdigest()[:16], self.name, (*buffers, manifest), tuple(texts))
        self._generation = generation
        if state is not None:
            self._code = (state, code)
            self._bare = function.__code__ if notified is None and _is_bare(function) else None
            self._defaults = function.__defaults__
        return code

    def __reduce__(self) -> tuple[Any, ...] | str:
        if _is_importable(self):
            return self.function.__qualname__
        id_ = definition_ids.id_of(self) if not self.given and definition_ids.is_named(self) else None
        return _rebuild_function, (id_, self.function, *self.given)

    def __repr__(self) -> str:
        return f"<compute function {self.name}>"


def _rebuild_function(id_: str | None, function: Callable[..., Any], *given: Any) -> ComputeFunction[..., Any]:
    """Unpickle a `ComputeFunction`. Return the existing one with this id, or a new one with default options."""
    # `id_` is None unless a script defines the function at its top level; `given` is the bound object of a method
    found = None if id_ is None else definition_ids.known(id_)
    if found is not None and (found.function is function or definition_ids.is_own(found)):
        return typing.cast("ComputeFunction[..., Any]", found)
    made: ComputeFunction[..., Any] = ComputeFunction(function, Options(), given)
    return made if id_ is None else typing.cast("ComputeFunction[..., Any]", definition_ids.replace(id_, "", made))


class _Undecorated:
    """A stand-in for a decorated function that a node can import. Unpickling it gives the plain function."""

    def __init__(self, function: ComputeFunction[..., Any]) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Any, ...]:
        return _undecorate, (self.function,)


def _undecorate(function: ComputeFunction[..., Any]) -> Callable[..., Any]:
    """Return the plain function of a decorated one. Unpickling calls this on a node."""
    return function.function


def _is_importable(function: ComputeFunction[..., Any]) -> bool:
    """Return True if a node finds this function by its module and name. False for copies that `with_options` made."""
    return _travels_by_name(function.function, function)


def _name_of(function: Callable[..., object]) -> str:
    """Return a function's name for messages, at most 200 characters without surrogates; its repr if it has no name."""
    name = encodable(str(getattr(function, "__qualname__", None) or repr(function))).replace("<locals>.", "")
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def _travels_by_name(named: Any, thing: object = None) -> bool:
    """Return True if only the module and name of `named` are sent, and a node finds `thing` there by importing it."""
    module = getattr(named, "__module__", None)
    name = getattr(named, "__qualname__", "<locals>")
    # a node cannot import what is defined in a script, a notebook or a function
    if module is None or module in pickling.SCRIPT or "<locals>" in name:
        return False
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is (named if thing is None else thing)


def _names_globals(function: Any) -> bool:
    """Return True if the code of a function, or of functions inside it, uses any global or attribute by name."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        if code.co_names:
            return True
        codes.extend(const for const in code.co_consts if isinstance(const, types.CodeType))
    return False


_CONSTANT = (int, float, complex, str, bytes, bool, type(None), types.BuiltinFunctionType)
"""Types whose values cannot change. A function that captures only such values need not be pickled again."""


def _is_bare(function: Callable[..., Any]) -> bool:
    """Return True for a plain Python function that captures no values, except defaults that cannot change."""
    if not isinstance(function, types.FunctionType) or function.__closure__ or function.__kwdefaults__:
        return False
    return all(type(each) in _CONSTANT for each in function.__defaults__ or ()) and not _names_globals(function)


def _captured(function: Callable[..., Any], depth: int = 0) -> tuple[object, ...] | None:
    """Return the code and captured values of a function, or None if a value could change without being noticed."""
    if isinstance(function, ComputeFunction):
        function = function.function
    if not isinstance(function, types.FunctionType) or depth > 4:  # functions that functions capture, and so on
        return None
    state: list[object] = [function.__code__]
    for name, value in _captures(function):
        state.append(name)
        if isinstance(value, ComputeFunction) and value.given:
            return None  # the object that the method is bound to may change
        if isinstance(value, (types.FunctionType, ComputeFunction)):
            inner = value.function if isinstance(value, ComputeFunction) else value
            if inner is function:
                continue
            below = _captured(inner, depth + 1)
            if below is None:
                return None
            state += below
        elif (
            isinstance(value, types.ModuleType)
            or type(value) in _CONSTANT
            or (isinstance(value, type) and _travels_by_name(value))
        ):
            state.append(value)
        else:
            return None
    return tuple(state)


def _captures(function: types.FunctionType) -> Iterator[tuple[object, object]]:
    """Yield (name or index, value) of a function's closure variables, globals, and defaults of its arguments."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the variable is not set yet
            yield name, cell
    yield from unpicklable.captured_globals(function)
    yield from enumerate(function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()


def _same(before: tuple[object, ...], now: tuple[object, ...]) -> bool:
    """Return True if two results of `_captured` have the same length, and items of the same types and values."""
    return len(before) == len(now) and all(a is b or _equal(a, b) for a, b in zip(before, now, strict=True))


def _equal(a: object, b: object) -> bool:
    """Return True if two values have the same type and are equal. 0.0 and -0.0 differ here, and NaN equals NaN."""
    if type(a) is float or type(a) is complex:
        return repr(a) == repr(b)  # because 0.0 == -0.0
    return type(a) is type(b) and a == b


@overload
def compute(
    function: Callable[P, T],
    /,
    *,
    timeout: Duration | None = None,
    retries: int = 0,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    node: NodesAsked = None,
    output: OutputMode = "show",
    grace: Duration | None = None,
    window: int = 1 << 20,
    on_interruption: Callable[[Interruption], object] | None = None,
    fresh: bool = False,
    devices: Literal[0] | None = None,
    independent: bool = False,
    procs: Procs | None = None,
    min_nodes: int | None = None,
) -> ComputeFunction[P, T]: ...
@overload
def compute(
    *,
    timeout: Duration | None = None,
    retries: int = 0,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    node: NodesAsked = None,
    output: OutputMode = "show",
    grace: Duration | None = None,
    window: int = 1 << 20,
    on_interruption: Callable[[Interruption], object] | None = None,
    fresh: bool = False,
    devices: Literal[0] | None = None,
    independent: bool = False,
    procs: Procs | None = None,
    min_nodes: int | None = None,
) -> Callable[[Callable[P, T]], ComputeFunction[P, T]]: ...
def compute(
    function: Callable[P, T] | None = None, /, **options: Unpack[NodesChanges]
) -> ComputeFunction[P, T] | Callable[[Callable[P, T]], ComputeFunction[P, T]]:
    """Decorate a function so that its calls can run on a pool.

    `train(10)` then returns a `Call` instead of running the function. `train(10) >> pool` runs the call on a node (one
    machine) of the pool and returns its value. Write `@compute`, or with options `@compute(timeout="5m", retries=2)`.
    `ComputeFunction` describes each option in full.

    Args:
        function: the function to decorate. Leave it out to decorate with options: `@compute(retries=2)`.
        timeout: the time that a call may run, in seconds or as a duration such as "5m". Default None: no limit.
        retries: the number of times that a call may run again after its node or worker process was lost. Default 0.
        retry_on: exception classes. A call that raises one of them also runs again, and uses up one of its `retries`.
            Default: none.
        node: the nodes that run a call: a number, a list of numbers, or "all". Default None: any node with room.
        output: the handling of what a call prints: "show" (the default), "head", "rank0", "silent" or "capture".
        grace: the time between SIGTERM and SIGKILL when a call is cancelled or exceeds its `timeout`, in seconds or as
            a duration. Default None: 5 s for a cancelled call, and the `grace` of the pool after a `timeout`.
        window: for a generator, the bytes of items that may be sent before the consumer has taken them. Default 1 MiB.
        on_interruption: a function that the node calls, with an `Interruption`, when its machine is about to end.
            Default None.
        fresh: True runs each call in a new process. Default False.
        devices: 0 for a call that needs no accelerator. Default None: the accelerators of the slot that runs the call.
        independent: True lets a call for several nodes go on when it has failed on one of them. Default False.
        procs: runs the call as a gang: in this many new processes on each of its nodes, or "per-device". Default None.
        min_nodes: for a gang: the fewest nodes with which it may run. Default None: as many as the pool is to have.

    Returns:
        a `ComputeFunction`; without `function`, a decorator that returns one. A function that is decorated already is
        copied, and keeps its options that are not given here.

    Raises:
        UsageError: the decorated object is not a function, or an option is not valid. Options are checked at once,
            before the decorator is used.
    """
    checked = _changed(Options(), options)
    return (lambda f: _decorate(f, checked, options)) if function is None else _decorate(function, checked, options)


def _changed(options: Options, changes: Mapping[str, object]) -> Options:
    """Return a copy of options with some changed. A decorated `on_interruption` becomes its plain function."""
    listener = changes.get("on_interruption")
    if isinstance(listener, ComputeFunction):
        changes = {**changes, "on_interruption": listener.function}
    return options.but(changes)


def _check_stream(name: str, options: Options) -> None:
    """Raise a UsageError if options do not fit a generator function. `name` is the function's name."""
    if options.procs is not None:
        raise UsageError(f"{name} is a generator function, which cannot run as a gang: leave procs= out")
    if options.output == "capture":
        raise UsageError(
            f"{name} is a generator function, whose items come without what it prints: leave output='capture' out"
        )


def _decorate(function: Callable[P, T], options: Options, changes: NodesChanges) -> ComputeFunction[P, T]:
    """Return a `ComputeFunction` of a function, or a changed copy of one. Raises UsageError for other objects."""
    if isinstance(function, (staticmethod, classmethod)):
        raise UsageError("put @staticmethod or @classmethod above @compute, not below it")
    if isinstance(function, ComputeFunction):
        return function.with_options(**changes)
    if not callable(function) or isinstance(function, type):
        raise UsageError(
            f"@compute takes a function, but {function!r} is not a function; put @compute directly above a def"
        )
    return ComputeFunction(function, options)


class Call(Generic[T_co]):
    """A function with its arguments, ready to be sent to a pool. Calling a `@compute` function returns one.

    A call runs only when it is sent. A call that is never sent gives a RuntimeWarning when it is garbage collected.

    - `call >> pool` runs it on one node (machine), waits, and returns its value. For a generator it returns a `Stream`.
    - `call @ pool` runs it on every node, waits, and returns the list of values, ordered by node number.
    - `call > pool` sends it and returns a `CallFuture` at once.
    - `a & b` is a `Group` of calls, which `group >> pool` runs at the same time.
    - `await call` runs it on the innermost pool that this task or thread has entered with `with` or `async with`.

    If the call's option `node` is "all" or a list such as [0, 2], `>>` and `>` send the call to each of these nodes.
    The value is then a list.

    The operators that wait raise the exception that the function raised, or a SkypoolError if the call could not run.

    Attributes:
        function, args, kwargs: the function, its positional arguments and its keyword arguments.
        options: how the call runs: its timeout, its retries and the other options of `@compute`.
        sent: True once the call was sent or otherwise used. The call then gives no warning.
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
        """Return a copy of this call with some options changed, such as `train(3).with_options(timeout="5m")`.

        Use the copy in place of this call. This call keeps its options and gives no warning if it is never sent.

        Args:
            node: the nodes that run the call: a number, a list of numbers, "all", or None for any node with room. With
                a list or "all", the result is a list of values, ordered by node number.
            changes: other options of `@compute`, by name: timeout, retries, retry_on, output, grace, window,
                on_interruption, fresh, devices, independent, procs and min_nodes. `ComputeFunction` describes each.

        Raises:
            UsageError: an option does not exist, or a value is not valid.
        """
        self.sent = True
        function = self.function.with_options(**changes) if "on_interruption" in changes else self.function
        options = _changed(self.options, changes)
        if self.function.is_generator:
            _check_stream(self.function.name, options)
        return Call(function, self.args, self.kwargs, options)

    def payload(self) -> tuple[Sequence[Buffer], Sequence[Iterator[object]]]:
        """Pickle the arguments of this call, and mark the call as sent.

        Returns:
            (buffers, iterators): the pickled arguments, and the iterators among the arguments. Iterators are not
                pickled; their items are sent one by one when the function asks for them.

        Raises:
            PickleError: an argument cannot be pickled. The message names it.
        """
        self.sent = True
        return payload_of(self.function, self.args, self.kwargs)

    def __rshift__(self, pool: Runner) -> T_co:
        """Run the call on one node of the pool, wait, and return its value. For a generator, return a `Stream` at once.

        If the call's option `node` is "all" or a list, run it on each of these nodes and return a list of values. If
        the wait is interrupted, as by Ctrl-C, the call is stopped. `ComputePool.run` lists the errors that the pool
        raises.

        Raises:
            UsageError: the right operand is not a pool.
            Exception: the exception that the function raised.
        """
        value = _runner(pool, ">>", self).run(self)
        if value is NotImplemented:
            raise UsageError(
                f"{self.function.name} returned NotImplemented, which no operator can return; use "
                f"pool.run({self.function.name}(…)) to get it"
            )
        return value

    def __matmul__(self, pool: Runner) -> list[T_co]:
        """Run the call on every node of the pool, wait, and return the list of values, ordered by node number.

        If the call's option `node` is a number or a list, only these nodes run it. For a generator function, return a
        list of `Stream` objects at once. When the call fails on one node, it is stopped on the others, and the
        exception is raised. `ComputePool.run_all` lists the errors that the pool raises.

        Raises:
            UsageError: the right operand is not a pool.
        """
        return _runner(pool, "@", self).run_all(self)

    def __gt__(self, pool: Runner) -> CallFuture[T_co]:
        """Send the call to one node of the pool, and return its future at once.

        If the call's option `node` is "all" or a list, send it to each of these nodes; the future's value is a list.
        `ComputePool.send` lists the errors that the pool raises.

        Raises:
            UsageError: the right operand is not a pool, or the function is a generator function.
        """
        return _runner(pool, ">", self).send(self)

    @overload
    def __and__(self, other: Call[U]) -> Group[tuple[T_co, U]]: ...
    @overload
    def __and__(self, other: Group[tuple[*Ts]]) -> Group[tuple[T_co, *Ts]]: ...
    def __and__(self, other: Call[object] | Group[Any]) -> Group[Any]:
        """Combine this call with another call or a group into a new `Group`, whose calls run at the same time.

        This call comes first in the group. The new group waits for all its calls, even if `other` was made with
        `stream=True`.

        Raises:
            UsageError: `other` is neither a call nor a group.
        """
        return gather(self) & other

    def __rand__(self, other: object) -> NoReturn:
        """Raise a UsageError, always: the left operand of `&` is not a call."""
        self.sent = True
        raise no_call(other, "&")

    def __await__(self) -> Generator[Any, None, T_co]:
        """Send the call to the innermost pool that was entered, and wait for its value: `await train(10)`.

        The event loop is not blocked while the call runs. Each task has its own pools: those that it has entered, and
        those that were entered where it was started. A thread that has entered none uses the pool of a `with` block
        elsewhere, if there is exactly one.

        Raises:
            UsageError: no pool was entered with `with` or `async with`, or the function is a generator function.
            Exception: the exception that the function raised.
        """
        self.sent = True  # also if it is refused here: the error is enough, without a warning
        return _innermost().send(self).__await__()

    def __bool__(self) -> bool:
        """Raise a UsageError, always, because a call has no truth value.

        Python asks for a truth value in `if call:`, and in `a > b > c`, which means `a > b and b > c`.
        """
        raise UsageError(
            f"{self!r} has not run, so it has no truth value; send the call with `>> pool`. If you wrote `a > b > c`, "
            "that means `a > b and b > c`: add parentheses"
        )

    def __repr__(self) -> str:
        args = [f"{a!r:.40}" for a in self.args] + [f"{k}={v!r:.40}" for k, v in self.kwargs.items()]
        return f"<call {self.function.name}({', '.join(args)})>"

    def __del__(self) -> None:
        """Give a RuntimeWarning if the call was never sent to a pool. Give none while the interpreter shuts down."""
        if not getattr(self, "sent", True) and not sys.is_finalizing():
            tracebacks.warn(f"{self!r} was never sent to a pool; send it with `>> pool`", source=self)


def call_asked(call: Call[T]) -> Call[T]:
    """Return `call` itself. Raises UsageError if it is not a `Call`, such as a function without its arguments."""
    if not isinstance(call, Call):
        hint = f": call it, {call.name}(…)" if isinstance(call, ComputeFunction) else ""
        raise UsageError(f"a pool runs calls such as train(3), not {call!r:.80}{hint}")
    return call


def packed(call: Call[T]) -> Packed[T]:
    """Pickle a call, and mark it as sent.

    Raises:
        UsageError: the argument is no `Call`.
        PickleError: the function or an argument cannot be pickled. The message names it.
    """
    call_asked(call)
    payload, feeds = call.payload()
    return Packed(call.function.code(), payload, call.options, feeds, call.function.is_generator)


def no_call(value: object, operator: str) -> UsageError:
    """Return (do not raise) a UsageError: `value`, which is not a call, was used with a call operator.

    The message says what to write instead. If `value` is a group, list or tuple, its calls are marked as sent.
    """
    if isinstance(value, (Call, Group)):
        _mark_sent(value)
        return UsageError(f"a call comes before its pool: write `call {operator} pool`")
    hint = _hint(value) or "add @sky.compute above the function, so that train(3) gives a call, not its value"
    return UsageError(f"{operator} takes a call, such as train(3), and {value!r:.80} is not a call: {hint}")


def _hint(value: object) -> str:
    """Return advice on what to write instead of a value that is not a call, or "". Mark the calls in it as sent."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, Call) for each in value):
        _mark_sent(*value)
        return "send several calls with sky.gather(*calls) >> pool"
    if isinstance(value, Iterator):
        return "unpack calls with a star, sky.gather(*calls) >> pool"
    if isinstance(value, ComputeFunction):
        return f"call it, {value.name}(…)"
    if callable(value):
        return f"add @sky.compute above {getattr(value, '__name__', 'it')}, and call it"
    return ""


def _mark_sent(*calls: Call[Any] | Group[Any]) -> None:
    """Mark calls as sent, so that they give no warning in addition to the error that is raised next."""
    for each in calls:
        for call in each.calls if isinstance(each, Group) else (each,):
            call.sent = True


def _runner(pool: Any, operator: str, calls: Call[Any] | Group[Any]) -> Runner:
    """Return the right operand of a call operator. Raises UsageError if it is not a pool. Mark the calls as sent."""
    # even if this is not a pool: the error below is enough, without a warning
    if isinstance(calls, Call):
        calls.sent = True
    else:
        _mark_sent(calls)
    if isinstance(pool, type) or not hasattr(pool, "run_group"):
        raise UsageError(
            f"{operator} sends a call to a pool, and {pool!r:.80} is not a pool; make one with ComputePool(…)"
        )
    return pool  # type: ignore[no-any-return]  # it has what a Runner has


def _innermost() -> Runner:
    """Return the pool that `await` uses here. Raises UsageError if there is none."""
    return typing.cast(Runner, entered.innermost())


class Group(Generic[R_co]):
    """Several calls that run at the same time. `gather` and `&` make a group, and `group >> pool` runs it.

    The type parameter is the type of the value of `group >> pool`: a tuple of values, or an iterator of them.

    Attributes:
        calls: the calls, in the order in which they were given.
        stream: True if `group >> pool` returns an iterator of values at once, False if it waits and returns a tuple.
        ordered: True if the iterator yields the values in the order of the calls, False if in the order in which the
            calls end. No effect without `stream`.
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
        """Return a new group: the calls of this group, followed by `other` (a call) or its calls (a group).

        The new group has the attributes `stream` and `ordered` of this group, whatever `other` has.

        Raises:
            UsageError: `other` is neither a call nor a group.
        """
        if not isinstance(other, Group | Call):
            _mark_sent(self)
        more = other if isinstance(other, Group) else gather(other)
        return Group((*self.calls, *more.calls), self.stream, self.ordered)

    def __rshift__(self, pool: Runner) -> R_co:
        """Run all calls of the group at the same time, and return their values.

        Returns:
            a tuple of values in the order of the calls, after waiting for all. For a group made with `stream=True`, an
            iterator of the values, at once.

        Raises:
            UsageError: the right operand is not a pool.
            ExceptionGroup: several calls of the group raised. If only one did, its exception is raised.
        """
        return _runner(pool, ">>", self).run_group(self)

    def __gt__(self, pool: Runner) -> CallFuture[R_co]:
        """Send all calls of the group, and return one future at once. Its result is the tuple of their values.

        If a call raises, the future raises that exception when all have ended; if several raise, an ExceptionGroup.

        Raises:
            UsageError: the right operand is not a pool, or the group was made with `stream=True`.
        """
        return _runner(pool, ">", self).send_group(self)

    def __await__(self) -> Generator[Any, None, R_co]:
        """Send all calls of the group to the innermost pool that was entered, and wait for the tuple of their values.

        The event loop is not blocked meanwhile. Each task has its own pools: those that it has entered, and those that
        were entered where it was started. A thread that has entered none uses the pool of a `with` block elsewhere, if
        there is exactly one.

        Raises:
            UsageError: no pool was entered, or the group was made with `stream=True`.
            ExceptionGroup: several calls of the group raised. If only one did, its exception is raised.
        """
        for call in self.calls:
            call.sent = True
        return _innermost().send_group(self).__await__()

    def __matmul__(self, pool: Runner) -> NoReturn:
        """Raise a UsageError, always: `@` runs one call on every node, but each call of a group runs on one node."""
        _mark_sent(self)
        raise UsageError(f"{self!r} @ pool is not possible: send each call of the group by itself, `call @ pool`")

    def __bool__(self) -> bool:
        """Raise a UsageError, always, because a group has no truth value, which `if group:` would ask for."""
        raise UsageError(
            f"{self!r} have not run, so they have no truth value; send them with `>> pool`. If you wrote `a > b > c`, "
            "that means `a > b and b > c`: add parentheses"
        )

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
    """Combine calls into a group that runs them at the same time: `a, b = gather(f(1), g(2)) >> pool`.

    Nothing runs before the group is sent. `group >> pool` waits for all calls and returns a tuple of their values, in
    the order given. If a call raises, its exception is raised when all calls have ended. If several raise, an
    ExceptionGroup is raised.

    Args:
        calls: the calls, also of different functions. A group without calls gives an empty tuple.
        stream: True makes `group >> pool` return an iterator of values at once. Default False.
        ordered: with `stream=True`, True (the default) yields the values in the order given, False in the order in
            which the calls end.

    Raises:
        UsageError: an argument is not a call.
    """
    for call in calls:
        if not isinstance(call, Call):
            _mark_sent(*(each for each in calls if isinstance(each, (Call, Group))))
            hint = _hint(call)
            raise UsageError(f"gather() and & take calls, such as train(3), not {call!r:.80}{hint and f': {hint}'}")
    return Group(calls, stream, ordered)
