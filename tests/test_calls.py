"""`@compute` and `Call`: what is written, what is sent, and what is refused on the line that wrote it."""

from __future__ import annotations

import functools
import gc
import importlib
import io
import operator
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, assert_type, cast

import pytest

from skypool.calls.call import Call, ComputeFunction, Group, compute, gather
from skypool.calls.futures import CallFuture
from skypool.calls.options import Options
from skypool.errors import PickleError, UsageError
from skypool.runtime import Upstream
from skypool.wire import codec


@compute
def add(a: int, b: int = 10) -> int:
    """Add two numbers."""
    return a + b


class NodeQueue:
    """Takes calls as a pool does, and runs them here."""

    def __init__(self) -> None:
        self.took: list[tuple[str, Any]] = []

    def value(self, call: Call[Any]) -> Any:
        payload, _ = call.payload()
        args, kwargs = codec.loads(payload)
        return call.function.function(*args, **kwargs)

    def run(self, call: Call[Any]) -> Any:
        self.took.append(("run", call))
        return self.value(call)

    def run_all(self, call: Call[Any]) -> list[Any]:
        self.took.append(("run_all", call))
        return [self.value(call)] * 2

    def send(self, call: Call[Any]) -> CallFuture[Any]:
        self.took.append(("send", call))
        future: CallFuture[Any] = CallFuture()
        future.set_result(self.value(call))
        return future

    def run_group(self, group: Group[Any]) -> Any:
        self.took.append(("run_group", group))
        return tuple(self.value(call) for call in group.calls)

    def send_group(self, group: Group[Any]) -> CallFuture[Any]:
        self.took.append(("send_group", group))
        future: CallFuture[Any] = CallFuture()
        future.set_result(tuple(self.value(call) for call in group.calls))
        return future


@pytest.fixture
def node_queue() -> NodeQueue:
    return NodeQueue()


@pytest.fixture(autouse=True)
def _every_call_is_sent(frozen: None) -> Iterator[None]:
    """A call that a test forgot would warn in another test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def lazily(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call[Any]:
    """A call that nobody minds if it is not sent."""
    call: Call[Any] = ComputeFunction(function, Options())(*args, **kwargs)
    call.sent = True
    return call


# --- operators -----------------------------------------------------------------------------------------------


def test_the_operators_send_a_call_to_one_node_to_all_and_into_the_future(node_queue: NodeQueue) -> None:
    assert add(1, 2) >> node_queue == 3
    assert add(1) @ node_queue == [11, 11]
    assert (add(1, b=1) > node_queue).result(timeout=0) == 2
    assert [how for how, _ in node_queue.took] == ["run", "run_all", "send"]


def test_calls_joined_with_and_are_sent_together_in_order(node_queue: NodeQueue) -> None:
    assert (add(1) & add(2) & add(3)) >> node_queue == (11, 12, 13)
    assert (add(1) & (add(2) & add(3))) >> node_queue == (11, 12, 13)
    assert (gather(add(1), add(2)) & gather(add(3))) >> node_queue == (11, 12, 13)
    assert gather() >> node_queue == ()
    assert {how for how, _ in node_queue.took} == {"run_group"}
    assert ((add(1) & add(2)) > node_queue).result(timeout=0) == (11, 12)
    assert node_queue.took[-1][0] == "send_group"
    assert_type((add(1) & add(2)) > node_queue, CallFuture[tuple[int, int]])


def test_a_group_is_no_condition_and_runs_on_one_node_for_each_call(node_queue: NodeQueue) -> None:
    group = lazily(max) & lazily(min)
    with pytest.raises(UsageError, match="no truth value"):
        bool(group)
    with pytest.raises(UsageError, match="send each call of the group by itself"):
        group @ node_queue


def test_a_function_may_return_not_implemented_although_no_operator_can(node_queue: NodeQueue) -> None:
    @compute
    def compare() -> Any:
        return NotImplemented

    with pytest.raises(UsageError, match=r"compare returned NotImplemented, .* use pool\.run\(.*compare\(…\)\)"):
        compare() >> node_queue
    assert node_queue.run(compare()) is NotImplemented
    assert compare() @ node_queue == [NotImplemented] * 2
    assert (compare() > node_queue).result(timeout=0) is NotImplemented


def test_type_checkers_know_the_values_of_calls_that_are_sent_together(node_queue: NodeQueue) -> None:
    @compute
    def name(n: int) -> str:
        return f"n{n}"

    assert_type(gather(add(1), name(2)) >> node_queue, tuple[int, str])
    assert_type((add(1) & name(2) & add(3)) >> node_queue, tuple[int, str, int])
    assert_type((add(1) & (name(2) & add(3))) >> node_queue, tuple[int, str, int])
    assert_type(gather(*[add(n) for n in range(9)]) >> node_queue, tuple[int, ...])
    assert_type(gather(add(1), add(2), stream=True) >> node_queue, Iterator[int])
    assert_type(name(1).with_options(node="all") >> node_queue, list[str])
    assert_type(name(1).with_options(node=1, retries=2) >> node_queue, str)


def test_gather_says_how_the_values_are_wanted() -> None:
    group = gather(lazily(len, "a"), stream=True, ordered=False)
    assert (group.stream, group.ordered) == (True, False)
    joined = group & lazily(len, "b")
    assert (joined.stream, joined.ordered, len(joined.calls)) == (True, False, 2)
    assert repr(joined) == "<2 calls>"


def test_gather_takes_only_calls() -> None:
    with pytest.raises(
        UsageError, match=r"gather\(\) and & take calls, such as train\(3\), not <compute function add>"
    ):
        gather(add)  # type: ignore[call-overload]  # that is what is tested


@pytest.mark.parametrize("send", [operator.rshift, operator.matmul, operator.gt], ids=[">>", "@", ">"])
@pytest.mark.parametrize("to", [3, None, "pool", add], ids=["number", "none", "text", "function"])
def test_a_call_is_sent_only_to_a_pool(send: Callable[[Any, Any], Any], to: object) -> None:
    with pytest.raises(UsageError, match=r"sends a call to a pool, and .* is not a pool"):
        send(lazily(len, "a"), to)


def test_calls_joined_with_what_is_no_call_are_refused() -> None:
    with pytest.raises(UsageError, match="take calls, such as train"):
        lazily(len, "a") & 3  # type: ignore[operator]  # that is what is tested


def test_a_call_has_no_truth_value() -> None:
    with pytest.raises(UsageError, match="has no truth value"):
        bool(lazily(len, "a"))
    with pytest.raises(UsageError, match="`a > b > c`, that means"):
        _ = lazily(len, "a") and 3


def test_awaiting_a_call_outside_of_a_pool_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="needs an `async with ComputePool"):
        lazily(len, "a").__await__()


# --- a call that is never sent -------------------------------------------------------------------------------


def test_a_call_that_is_dropped_without_being_sent_warns() -> None:
    with pytest.warns(RuntimeWarning, match=r"<call add\(1, b=2\)> was never sent to a pool"):
        add(1, b=2)


def test_calls_that_were_sent_do_not_warn(node_queue: NodeQueue) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add(1) >> node_queue
        (add(1) & add(2)) >> node_queue
        add(1).with_options(timeout=3) >> node_queue
        gc.collect()


def test_a_call_given_other_options_warns_once_if_neither_is_sent() -> None:
    with pytest.warns(RuntimeWarning) as caught:
        add(1).with_options(timeout=3)
    assert len(caught) == 1


def test_a_call_with_wrong_arguments_does_not_warn_as_well() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError):
            add()  # type: ignore[call-arg]  # that is what is tested
        gc.collect()


# --- arguments -----------------------------------------------------------------------------------------------


def shaped(a: int, /, b: int, *, c: int = 1) -> None: ...
def only_keywords(*, c: int) -> None: ...
def anything(*args: int, **kwargs: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "says"),
    [
        (add.function, (), {}, "missing a required argument: 'a'"),
        (add.function, (1, 2, 3), {}, "too many positional arguments"),
        (add.function, (1,), {"c": 3}, "unexpected keyword argument 'c'"),
        (add.function, (1,), {"a": 3}, "multiple values for argument 'a'"),
        (shaped, (1,), {}, "missing a required argument: 'b'"),
        (shaped, (), {"a": 1, "b": 2}, "'a'"),
        (shaped, (1, 2, 3), {}, "too many positional"),
        (only_keywords, (), {}, "missing a required"),
        (only_keywords, (1,), {"c": 1}, "too many positional"),
    ],
)
def test_wrong_arguments_are_refused_where_the_call_is_written(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], says: str
) -> None:
    remote = compute(function)
    with pytest.raises(TypeError, match=says) as caught:
        remote(*args, **kwargs)
    assert caught.traceback[0].path == Path(__file__)


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (shaped, (1, 2), {}),
        (shaped, (1,), {"b": 2, "c": 3}),
        (only_keywords, (), {"c": 1}),
        (anything, (), {}),
        (anything, tuple(range(50)), {"x": 1}),
        (max, (1, 2), {}),
        (functools.partial(shaped, 1), (2,), {}),
        (len, ([],), {}),
    ],
)
def test_right_arguments_make_a_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    call = lazily(function, *args, **kwargs)
    payload, feeds = call.payload()
    assert codec.loads(payload) == (args, kwargs)
    assert not feeds


def test_a_call_says_what_it_is_in_one_line() -> None:
    assert repr(lazily(add.function, 1, b=2)) == "<call add(1, b=2)>"
    assert len(repr(lazily(add.function, "x" * 1000))) < 100


# --- options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("timout", "timeout"), ("retry", "retries"), ("retry_one", "retry_on"), ("nodes", "node"), ("ouput", "output")],
)
def test_a_mistyped_option_is_refused_with_the_nearest_spelling(wrong: str, right: str) -> None:
    with pytest.raises(UsageError, match=rf"has no option '{wrong}'; did you mean .*\b{right}\b.*\?; its options are"):
        add.with_options(**{wrong: 1})  # type: ignore[arg-type]  # that is what is tested
    with pytest.raises(UsageError, match=right):
        lazily(len, "a").with_options(**{wrong: 1})  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=right):
        compute(**{wrong: 1})  # type: ignore[call-overload]  # that is what is tested


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": "3"},
        {"timeout": True},
        {"timeout": float("nan")},
        {"grace": -1},
        {"retries": -1},
        {"retries": 1.5},
        {"retries": True},
        {"window": 0},
        {"node": -1},
        {"node": "head"},
        {"node": True},
        {"node": 1.0},
        {"node": {0, 1}},
        {"node": []},
        {"node": [0, "1"]},
        {"node": [0, -1]},
        {"node": [2, 0, 2]},
        {"output": "loud"},
        {"output": None},
        {"retry_on": 3},
        {"retry_on": (KeyError, "ValueError")},
        {"retry_on": KeyError},
    ],
    ids=str,
)
def test_an_option_that_cannot_be_meant_is_refused_by_its_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UsageError, match=name):
        add.with_options(**options)


def test_options_of_a_call_do_not_change_those_of_its_function() -> None:
    other = add.with_options(timeout=5, retries=1, retry_on=KeyError)
    assert (other.options.timeout, other.options.retry_on) == (5, (KeyError,))
    assert add.options.timeout is None
    call = other(1).with_options(retries=2)
    call.sent = True
    assert (call.options.timeout, call.options.retries) == (5, 2)
    assert other.options.retries == 1


def test_retry_on_without_retries_is_refused_as_it_would_do_nothing() -> None:
    with pytest.raises(UsageError, match=r"retry_on= has no effect without retries="):
        add.with_options(retry_on=KeyError)
    with pytest.raises(UsageError, match=r"retry_on= has no effect"):
        compute(retry_on=(KeyError, OSError))
    once = add.with_options(retry_on=KeyError, retries=1)
    assert once.with_options(retries=0).options.retry_on == (KeyError,)  # who says so means it


def test_a_function_and_its_options_may_be_given_at_once() -> None:
    def three(a: int) -> int:
        return a

    assert compute(three, timeout="5m", retries=2).options.timeout == 300
    assert compute(compute(three, timeout=5), retries=2).options.timeout == 5
    again = compute(timeout=7)(compute(three, timeout=5, retries=1))
    assert (again.options.timeout, again.options.retries) == (7, 1)
    with pytest.raises(UsageError, match="timeouts"):
        compute(three, timeouts=3)  # type: ignore[call-overload]


def test_options_that_the_node_must_know_travel_with_the_call() -> None:
    assert Options().header == ""
    assert Options(timeout=2.5, output="capture").header == '"timeout":2.5,"output":"capture"'
    assert Options(timeout=2.5, grace="1s").header == '"timeout":2.5,"grace":1.0'
    assert Options(grace=1).header == ""
    assert Options(output="head").header == ""


# --- the decorator -------------------------------------------------------------------------------------------


def test_a_decorated_function_keeps_its_name_its_text_and_runs_here_when_asked() -> None:
    assert getattr(add, "__name__", None) == "add"
    assert add.__doc__ == "Add two numbers."
    assert add.local(1, b=2) == 3
    assert repr(add) == "<compute function add>"
    assert not add.is_generator


def test_options_can_be_given_to_the_decorator() -> None:
    @compute(timeout=3, retries=1)
    def slow() -> None: ...

    assert (slow.options.timeout, slow.options.retries) == (3, 1)


def test_functions_that_yield_are_generators() -> None:
    @compute
    def count() -> Iterator[int]:
        yield 1

    @compute
    async def count_slowly() -> Any:
        yield 1

    assert count.is_generator
    assert count_slowly.is_generator


@pytest.mark.parametrize("options", [{"output": "capture"}, {"procs": 2}])
def test_what_a_generator_function_cannot_do_is_refused_where_it_is_written(options: Any) -> None:
    def count() -> Iterator[int]:
        yield 1

    for write in (lambda: compute(**options)(count), lambda: compute(count)().with_options(**options)):
        with pytest.raises(UsageError, match=r"count is a generator function.*leave"):
            write()


def test_decorating_twice_is_decorating_once() -> None:
    again: Any = compute(add)
    assert again.function is add.function


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3, "3 is not a function"),
        (int, "<class 'int'> is not a function"),
        (staticmethod(len), "put @staticmethod or @classmethod above @compute"),
        (classmethod(lambda cls: cls), "put @staticmethod or @classmethod above @compute"),
    ],
)
def test_what_is_no_function_is_refused(value: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        compute(value)


def test_a_function_that_can_be_imported_travels_by_name() -> None:
    assert pickle.loads(pickle.dumps(add)) is add
    (pickled, _manifest) = add.code().buffers
    function: object = codec.loads([pickled])
    assert function is add.function


# --- the pickled function ------------------------------------------------------------------------------------


def in_main(source: str, **names: Any) -> tuple[ComputeFunction[..., Any], dict[str, Any]]:
    """A function `f` as if it was written in a script, and the script's globals."""
    space = {"__name__": "__main__", **names}
    exec(source, space)
    return ComputeFunction(space["f"], Options()), space


def run_there(function: ComputeFunction[..., Any], *args: Any) -> Any:
    """What the function gives as it travels now."""
    return codec.loads(function.code().buffers[:-1])(*args)


@pytest.mark.parametrize(
    "source",
    [
        "def f(x): return x + 1",
        "a = 3\ndef f(x): return x + a",
        "a = 'text'\ndef g(): return a\ndef f(x): return x, g()",
        "import json\ndef f(x): return json.dumps(x)",
        "def f(n): return 1 if n < 2 else n * f(n - 1)",
        "def f(x, y=3, *, z=None): return x",
        "def f(x): return missing",
        "def make(a):\n    def f(): return a\n    return f\nf = make(3)",
    ],
)
def test_a_function_is_pickled_once_while_nothing_it_captures_can_change(source: str) -> None:
    function, _ = in_main(source)
    assert function.code() is function.code()


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("a = 1\ndef f(): return a", "a = 2"),
        ("a = 1\ndef f(): return a", "a = True"),
        ("a = 1\ndef f(): return a", "a = 1.0"),
        ("a = 0.0\ndef f(): return str(a)", "a = -0.0"),
        ("a = [1]\ndef f(): return a", "a.append(2)"),
        ("a = {}\ndef f(): return a", "a['k'] = 1"),
        ("a = (1, [2])\ndef f(): return a", "a[1].append(3)"),
        ("def g(): return 1\ndef f(): return g()", "def g(): return 2"),
        ("b = 1\ndef g(): return b\ndef f(): return g()", "b = 2"),
        ("b = [1]\ndef g(): return b\ndef f(): return g()", "b.append(2)"),
        ("def f():\n    try: return a\n    except NameError: return 0", "a = 1"),
        ("a = 1\ndef f():\n    def g(): return a\n    return g()", "a = 2"),
        ("a = [1]\ndef make():\n    b = a\n    def f(): return b\n    return f\nf = make()", "a.append(2)"),
        ("a = [1]\ndef f(x=a): return x", "a.append(2)"),
        ("a = [1]\ndef f(*, x=a): return x", "a.append(2)"),
        ("class C: x = 1\ndef f(): return C.x", "C.x = 2"),
        ("class C: pass\nc = C()\nc.x = 1\ndef f(): return c.x", "c.x = 2"),
        ("import types\na = types.SimpleNamespace(x=1)\ndef f(): return a.x", "a.x = 2"),
        ("a = 1\ndef f():\n    try: return 'a', a\n    except NameError: return 'b', b", "del a; b = 1"),
        ("def f(): return 1", "f.__code__ = (lambda: 2).__code__"),
        ("def f(x=1): return x", "f.__defaults__ = (2,)"),
        ("def f(*, x=1): return x", "f.__kwdefaults__ = {'x': 2}"),
        ("def f(*, x=1): return x", "f.__kwdefaults__['x'] = 2"),
    ],
)
def test_a_change_in_what_a_function_captures_reaches_the_nodes(source: str, change: str) -> None:
    function, space = in_main(source)
    before = function.code()
    assert repr(run_there(function)) == repr(function.local())
    exec(change, space)
    assert repr(run_there(function)) == repr(function.local())
    assert function.code().key != before.key


def test_a_closure_whose_variable_is_set_anew_reaches_the_nodes() -> None:
    count = 0

    def count_up() -> int:
        return count

    remote = compute(count_up)
    assert run_there(remote) == 0
    count = 5
    assert run_there(remote) == 5


def test_a_class_made_in_a_function_whose_attribute_changes_reaches_the_nodes() -> None:
    class Settings:
        rate = 1

    def rate() -> int:
        return Settings.rate

    remote = compute(rate)
    before = remote.code().key
    Settings.rate = 2
    assert remote.code().key != before


def test_a_list_that_did_not_change_travels_under_the_same_key() -> None:
    function, _ = in_main("a = [1]\ndef f(): return a")
    assert function.code().key == function.code().key


def test_functions_with_different_captures_have_different_keys() -> None:
    assert in_main("a = 1\ndef f(): return a")[0].code().key != in_main("a = 2\ndef f(): return a")[0].code().key


def test_a_module_of_the_users_own_that_was_edited_reaches_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "settings_of_mine.py"
    path.write_text("rate = 1\n")
    importlib.invalidate_caches()
    function, space = in_main("import settings_of_mine\ndef f(): return settings_of_mine.rate")
    try:
        before = function.code()
        assert function.code() is before
        path.write_text("rate = 22\n")
        importlib.reload(space["settings_of_mine"])
        assert function.code().key != before.key
    finally:
        del sys.modules["settings_of_mine"]


def test_what_a_function_captures_that_cannot_travel_is_named() -> None:
    cfg = {"lock": threading.Lock()}

    def train() -> object:
        return cfg

    with pytest.raises(PickleError) as caught:
        compute(train).code()
    assert caught.value.path.endswith("train.<closure>.cfg['lock']")


# --- arguments on their way ----------------------------------------------------------------------------------


def numbers() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    "stream", [numbers(), iter([1]), map(str, [1]), zip([1], [2], strict=True)], ids=lambda s: type(s).__name__
)
def test_an_iterator_argument_becomes_a_stream(stream: Iterator[Any]) -> None:
    payload, feeds = lazily(anything, 0, stream, 2).payload()
    (args, _kwargs) = codec.loads(payload)
    assert isinstance(args[1], Upstream)
    assert (args[0], args[1].number, args[2]) == (0, 0, 2)
    assert feeds == [stream]


def test_several_iterators_are_numbered_by_position_and_then_by_keyword() -> None:
    first, second, third = numbers(), numbers(), numbers()
    payload, feeds = lazily(anything, first, 5, second, k=third).payload()
    args, kwargs = codec.loads(payload)
    assert (args[0].number, args[2].number, kwargs["k"].number) == (0, 1, 2)
    assert feeds == [first, second, third]


@pytest.mark.parametrize("value", [[1, 2], (1,), "text", {1: 2}, range(3), {1}], ids=lambda v: type(v).__name__)
def test_what_can_be_iterated_more_than_once_travels_as_it_is(value: Any) -> None:
    payload, feeds = lazily(anything, value).payload()
    assert codec.loads(payload) == ((value,), {})
    assert not feeds


def test_a_file_is_no_stream() -> None:
    file = io.StringIO("text")
    payload, feeds = lazily(anything, file).payload()
    assert not feeds
    assert codec.loads(payload)[0][0].read() == "text"


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        ((1, threading.Lock()), {}, "shaped(b=…)"),
        ((threading.Lock(), 2), {}, "shaped(a=…)"),
        ((1, 2), {"c": [threading.Lock()]}, "shaped(c=…)[0]"),
        ((1, {"deep": {"lock": threading.Lock()}}), {}, "shaped(b=…)['deep']['lock']"),
    ],
)
def test_an_argument_that_cannot_travel_is_named_by_its_parameter(
    args: tuple[Any, ...], kwargs: dict[str, Any], path: str
) -> None:
    with pytest.raises(PickleError) as caught:
        lazily(shaped, *args, **kwargs).payload()
    assert caught.value.path == path
    assert str(caught.value).startswith(path)
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_argument_without_a_name_is_named_by_its_place() -> None:
    with pytest.raises(PickleError) as caught:
        lazily(anything, 1, 2, threading.Lock()).payload()
    assert caught.value.path == "anything(argument 2=…)"


# --- methods -------------------------------------------------------------------------------------------------


class Box:
    def __init__(self, size: int) -> None:
        self.size = size

    @compute
    def grow(self, by: int, *, times: int = 1) -> int:
        self.size += by * times
        return self.size

    @compute(timeout=5)
    def parts(self, many: int) -> Iterator[int]:
        yield from range(self.size, self.size + many)

    @classmethod
    @compute
    def made(cls, size: int) -> int:
        return cls(size).size

    @staticmethod
    @compute
    def double(size: int) -> int:
        return 2 * size


def test_a_method_sends_a_copy_of_its_object_with_the_other_arguments(node_queue: NodeQueue) -> None:
    box = Box(1)
    assert box.grow(2) >> node_queue == box.grow(2) >> node_queue == 3
    assert box.size == 1
    box.size = 10
    assert box.grow(2, times=3) >> node_queue == 16
    kind, thing = cast(Any, Box), cast(Any, box)  # checkers know of classmethods and staticmethods of plain functions
    assert (kind.made(4) >> node_queue, thing.double(3) >> node_queue, kind.double(3) >> node_queue) == (4, 6, 6)
    assert Box.grow(box, 1) >> node_queue == 11
    assert box.grow.with_options(timeout=3)(1) >> node_queue == 11
    assert box.grow.local(1) == box.size == 11


def test_a_method_keeps_its_options_and_whether_it_streams() -> None:
    assert Box(1).parts.is_generator
    assert Box(1).parts.options.timeout == Box(1).parts.with_options(node=0).options.timeout == 5


def test_a_methods_function_is_pickled_once_for_all_objects() -> None:
    assert Box(1).grow.code() is Box(2).grow.code() is Box.grow.code()


def test_wrong_arguments_of_a_method_are_refused_on_the_line_that_wrote_them() -> None:
    grow: Any = Box(1).grow
    for wrong in (grow, lambda: grow(1, 2), lambda: grow(1, tims=2)):
        with pytest.raises(TypeError, match=r"missing a required argument: 'by'|too many|'tims'"):
            wrong()


def test_a_method_among_the_arguments_brings_its_object(node_queue: NodeQueue) -> None:
    @compute
    def call(method: Any) -> Any:
        return method.local(4)

    assert call(Box(3).grow) >> node_queue == 7


def test_what_cannot_travel_of_a_methods_object_is_named() -> None:
    box = Box(1)
    box.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(PickleError) as refused:
        box.grow(1).payload()
    assert refused.value.path == "Box.grow(self=…).lock"


def test_a_function_that_names_a_method_sees_its_object_as_it_is_now(node_queue: NodeQueue) -> None:
    grow = (box := Box(1)).grow

    @compute
    def call() -> int:
        return grow.local(1)

    before = call.code().key
    box.size = 5
    assert call.code().key != before


def test_a_function_is_pickled_again_when_what_its_on_interruption_captures_has_changed() -> None:
    word = "before"

    def notice(_: object) -> str:
        return word

    @compute(on_interruption=notice)
    def bare(n: int = 1) -> int:
        return n

    first = bare.code().key
    assert bare.code().key == first
    word = "after"
    assert bare.code().key != first
