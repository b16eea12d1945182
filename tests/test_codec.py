"""Values and exceptions to buffers and back; what cannot travel is named by the path to it."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skypool.calls.call import compute
from skypool.errors import CapacityError, PickleError, RateLimitError, RemoteError, WorkerDied
from skypool.wire import codec, exception_pickles, exceptions, pickling, unpicklable

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
keys = st.text() | st.integers() | st.none() | st.binary()
nests = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5) | st.lists(inner, max_size=5).map(tuple) | st.dictionaries(keys, inner, max_size=5)
    ),
    max_leaves=25,
)


def there_and_back(value: Any) -> Any:
    return codec.loads(codec.dumps(value))


def home(error: BaseException) -> BaseException:
    """The exception as it comes home after it was raised."""
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001 - that is what is tested
        return exceptions.load_error(exceptions.dump_error(raised))


# --- values --------------------------------------------------------------------------------------------------


@given(nests)
def test_plain_values_come_back_equal_by_the_fast_path_and_by_cloudpickle(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(cloudpickle.loads(cloudpickle.dumps(value)))


@given(nests)
def test_what_takes_the_fast_path_is_one_buffer_of_plain_pickle(value: Any) -> None:
    if codec._is_plain(value):
        assert codec.dumps(value) == [pickle.dumps(value, pickling.PROTOCOL)]


class Number(int):
    """A subclass, which plain pickle would send by name."""


@pytest.mark.parametrize("value", [Number(3), [Number(3)], {"a": (Number(3),)}, {Number(3): 1}, lambda: 1, object()])
def test_nothing_but_exact_builtin_types_takes_the_fast_path(value: object) -> None:
    assert not codec._is_plain(value)


@pytest.mark.parametrize("file", [io.TextIOWrapper(io.BytesIO()), sys.__stderr__], ids=["without a name", "stderr"])
def test_an_open_text_file_is_refused_with_what_to_send_instead(file: object) -> None:
    with pytest.raises(TypeError, match="send the path or the content of the file instead"):
        pickling.pickled([file])


def test_a_list_inside_itself_comes_back_inside_itself() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    back = there_and_back(loop)
    assert back[0] == 1
    assert back[1] is back


def test_what_is_shared_within_a_value_is_still_shared_when_it_comes_back() -> None:
    inner = [1]
    back = there_and_back([inner, inner])
    assert back[0] is back[1]


def test_a_value_that_shares_its_parts_many_times_costs_no_more_than_its_parts() -> None:
    value: list[Any] = [0]
    for _ in range(12):
        value = [value] * 31  # 31**12 leaves when each is visited
    assert len(codec.dumps(value)[0]) < 10_000


def test_a_function_made_here_runs_when_it_comes_back() -> None:
    offset = 5

    def add(x: int) -> int:
        return x + offset

    assert there_and_back(add)(2) == 7


def test_an_array_travels_beside_the_pickle_and_not_in_it() -> None:
    array = np.arange(100_000, dtype=np.float64)
    pickled, raw = codec.dumps({"weights": array, "name": "w"})
    assert len(pickled) < 1_000
    assert isinstance(raw, memoryview)
    assert np.shares_memory(np.frombuffer(raw, dtype=np.float64), array)
    back = codec.loads([pickled, raw])
    assert np.array_equal(back["weights"], array)


def test_an_array_comes_back_writable_when_its_memory_is() -> None:
    pickled, raw = codec.dumps(np.zeros(1_000))
    back = codec.loads([pickled, bytearray(raw)])
    back[0] = 7
    assert back[0] == 7
    assert not codec.loads([pickled, bytes(raw)]).flags.writeable


def test_several_arrays_travel_as_one_buffer_each() -> None:
    arrays = [np.full(5_000, n) for n in range(4)]
    buffers = codec.dumps(arrays)
    assert len(buffers) == 5
    assert all(np.array_equal(a, b) for a, b in zip(codec.loads(buffers), arrays, strict=True))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(10),
        np.arange(10_000)[::3],
        np.asfortranarray(np.arange(10_000).reshape(100, 100)),
        np.arange(10_000).reshape(100, 100)[:, 3:50],
        np.zeros((0, 5)),
        np.array(["a", None], dtype=object),
        np.arange(4_000, dtype=">i4"),
    ],
    ids=["small", "strided", "fortran", "slice", "empty", "objects", "big-endian"],
)
def test_arrays_of_every_layout_come_back_equal(array: Any) -> None:
    back = there_and_back(array)
    assert np.array_equal(back, array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape


# --- what cannot travel --------------------------------------------------------------------------------------

LOCK = threading.Lock()


class Config:
    def __init__(self, **parts: object) -> None:
        self.__dict__.update(parts)


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


def told(value: object, what: str) -> PickleError:
    with pytest.raises(PickleError) as caught:
        codec.dumps(value, what)
    assert isinstance(caught.value, TypeError)
    assert caught.value.path in str(caught.value)
    assert caught.value.__cause__ is not None
    return caught.value


def with_closure() -> Callable[[], object]:
    cfg = Config(epochs=3, lock=threading.Lock())

    def train() -> object:
        return cfg

    return train


def with_global() -> Callable[[], object]:
    space: dict[str, Any] = {"held": threading.Lock(), "__name__": "__main__"}
    exec("def train():\n    def inner():\n        return held\n    return inner", space)
    train: Callable[[], object] = space["train"]
    return train


def with_default() -> Callable[..., object]:
    def train(a: int = 1, held: object = LOCK) -> object:
        return held

    return train


def with_keyword_default() -> Callable[..., object]:
    def train(*, held: object = LOCK) -> object:
        return held

    return train


def with_inner_function() -> Callable[[], object]:
    inner = with_closure()

    def outer() -> object:
        return inner()

    return outer


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (with_closure(), "train.<closure>.cfg.lock"),
        (with_global(), "train.<globals>.held"),
        (with_default(), "train.<defaults>[1]"),
        (with_keyword_default(), "train.<defaults>.held"),
        (with_inner_function(), "train.<closure>.inner.<closure>.cfg.lock"),
        (Config(a=1, lock=LOCK), "train.lock"),
        (Config(deep=Config(deeper=Config(lock=LOCK))), "train.deep.deeper.lock"),
        ({"a": 1, "b": [1, (2, LOCK)]}, "train['b'][1][1]"),
        ({3: LOCK}, "train[3]"),
        ([1, 2, LOCK], "train[2]"),
        ((1, LOCK), "train[1]"),
        (Slotted(LOCK), "train.held"),
        (Config(lock=LOCK).__init__, "train.__self__.lock"),  # type: ignore[misc]  # a bound method
        (LOCK, "train"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_path_leads_to_what_cannot_travel(value: object, path: str) -> None:
    error = told(value, "train")
    assert error.path == path
    assert "lock" in str(error)
    assert "cannot be sent to another process" in str(error)


class Unwilling:
    """Says itself that it stays where it is."""

    def __init__(self) -> None:
        self.lock = LOCK

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


def test_the_path_ends_at_what_says_itself_that_it_cannot_travel() -> None:
    error = told([Unwilling()], "train")
    assert error.path == "train[0]"
    assert "it stays here" in str(error)


def test_the_path_leads_past_a_decorated_function_that_calls_itself() -> None:
    held = LOCK

    @compute
    def again(n: int) -> Any:
        return again.local(n - 1) if n else held

    assert told(again.function, "again").path == "again.<closure>.held"


def test_a_class_attribute_that_cannot_travel_is_named() -> None:
    kind = type("Model", (), {"lock": LOCK, "__module__": "__main__"})
    assert told(kind, "train").path == "train.lock"


def test_an_open_file_is_named_with_its_kind(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as file:
        error = told(Config(out=file), "train(cfg=…)")
    assert error.path == "train(cfg=…).out"
    assert "_io.TextIOWrapper" in str(error)


def test_a_set_member_that_cannot_travel_is_named() -> None:
    assert told({LOCK}, "train").path.startswith("train{<unlocked")


def test_the_reason_of_the_innermost_part_is_given_and_the_first_error_is_the_cause() -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            raise ValueError("not today")

    error = told([Stubborn()], "train")
    assert "ValueError: not today" in str(error)
    assert isinstance(error.__cause__, ValueError)


def test_a_value_nested_too_deeply_is_told_so() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    error = told(deep, "train")
    assert "nested too deeply" in str(error)
    del error
    while deep:  # an even end: freeing 100,000 levels at once is Python's own recursion
        deep = deep[0]


def test_parts_that_refer_to_each_other_are_walked_once() -> None:
    a, b = Config(), Config(lock=LOCK)
    a.__dict__.update(b=b)
    b.__dict__.update(a=a)
    assert told(a, "train").path in ("train.b.lock", "train.b.a.b.lock")


class BrokenEverywhere:
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __reduce__(self) -> Any:
        raise ValueError("no pickle")


WRAPPED: dict[str, Callable[[object], object]] = {
    "itself": lambda it: it,
    "in a list": lambda it: [it],
    "in a set": lambda it: {it},
    "as a key": lambda it: {it: 1},
}


@pytest.mark.parametrize("where", WRAPPED)
def test_an_object_whose_every_method_raises_is_still_a_pickle_error(where: str) -> None:
    assert "cannot be pickled" in str(told(WRAPPED[where](BrokenEverywhere()), "train"))


def test_captured_globals_are_those_of_inner_functions_too() -> None:
    space: dict[str, Any] = {"a": 1, "b": 2, "c": 3}
    exec("def f():\n    def g():\n        return a + missing\n    return g() + b", space)
    assert dict(unpicklable.captured_globals(space["f"])) == {"a": 1, "b": 2}


# --- exceptions ----------------------------------------------------------------------------------------------


def test_an_exception_comes_home_in_its_own_type_with_the_remote_traceback_as_its_cause() -> None:
    back = home(ValueError("bad", 3))
    assert type(back) is ValueError
    assert back.args == ("bad", 3)
    assert isinstance(back.__cause__, exceptions.RemoteTraceback)
    assert "raise error" in str(back.__cause__)
    assert "ValueError: ('bad', 3)" in str(back.__cause__)


def test_frames_that_are_skypools_own_are_left_out_of_the_traceback() -> None:
    class Theirs:
        def __reduce__(self) -> NoReturn:
            raise ValueError("theirs")

    def told(function: Callable[..., object], *args: object) -> str:
        try:
            function(*args)
        except Exception as e:  # noqa: BLE001 - that is what is tested
            last = exceptions.load_error(exceptions.dump_error(e))
            while last.__cause__ is not None:
                last = last.__cause__
            return str(last)
        raise AssertionError("it did not fail")

    text = told(codec.dumps, [Theirs()], "an argument")
    assert "in __reduce__" in text
    assert "skypool/wire" not in text
    assert "test_codec.py" in text


def test_causes_come_home_in_their_own_types() -> None:
    def fail() -> None:
        try:
            try:
                raise KeyError("inner")
            except KeyError as e:
                raise OSError(2, "middle") from e
        except OSError as e:
            raise ValueError("outer") from e

    with pytest.raises(ValueError, match="outer") as caught:
        fail()
    outer = exceptions.load_error(exceptions.dump_error(caught.value))
    middle = outer.__cause__
    assert isinstance(middle, OSError)
    assert middle.errno == 2
    assert type(outer) is ValueError
    assert type(middle.__cause__) is KeyError
    assert isinstance(middle.__cause__.__cause__, exceptions.RemoteTraceback)


def test_causes_that_form_a_ring_end() -> None:
    a, b = ValueError("a"), KeyError("b")
    a.__cause__, b.__cause__ = b, a
    back = exceptions.load_error(exceptions.dump_error(a))
    assert type(back) is ValueError
    assert type(back.__cause__) is KeyError


def test_notes_and_attributes_come_home() -> None:
    error = ValueError("bad")
    error.add_note("look at row 7")
    error.row = 7  # type: ignore[attr-defined]  # attributes of one's own are allowed
    back = home(error)
    assert back.__notes__ == ["look at row 7"]
    assert back.row == 7  # type: ignore[attr-defined]


class OtherSignature(Exception):
    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} at {where}")
        self.code, self.where = code, where


class Dressed(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is no {name}")


class Renamed(Exception):
    def __reduce__(self) -> Any:
        return str, ("not me",)


class WithState(Exception):
    def __init__(self, message: str, extra: object = None) -> None:
        super().__init__(message)
        self.extra = extra


def test_an_exception_whose_init_takes_other_arguments_comes_home() -> None:
    back = home(OtherSignature(3, where="here"))
    assert type(back) is OtherSignature
    assert (str(back), back.code, back.where) == ("code 3 at here", 3, "here")


def test_an_exception_that_dresses_its_message_is_not_dressed_twice() -> None:
    back = home(Dressed("bread"))
    assert type(back) is Dressed
    assert str(back) == "there is no bread"


def test_an_exception_that_pickles_as_something_else_comes_home_as_itself() -> None:
    back = home(Renamed("me"))
    assert type(back) is Renamed
    assert back.args == ("me",)


def test_an_attribute_that_cannot_travel_does_not_cost_the_exception_its_type() -> None:
    back = home(WithState("bad", extra=threading.Lock()))
    assert type(back) is WithState
    assert str(back) == "bad"
    assert any("extra" in note for note in back.__notes__)


def test_an_argument_that_cannot_travel_does_not_cost_the_exception_its_type() -> None:
    back = home(ValueError("bad", threading.Lock()))
    assert type(back) is ValueError
    assert back.args[0] == "bad"
    assert "lock" in back.args[1]


def test_notes_come_home_with_an_exception_that_pickles_itself() -> None:
    error = WorkerDied("train", signal=9, tail="…")
    error.add_note("what it printed")
    back = home(error)
    assert type(back) is WorkerDied
    assert back.signal == 9
    assert back.__notes__ == ["what it printed"]


@pytest.mark.parametrize(
    "error",
    [
        CapacityError("none left", provider="acme", code="E1", text="sold out"),
        RateLimitError("slow", provider="acme", retry_after=3.0),
        PickleError("no", "train.cfg"),
        FileNotFoundError(2, "No such file", "/nowhere"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        StopIteration(5),
    ],
)
def test_exceptions_with_parts_keep_them(error: Exception) -> None:
    back = home(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert {**vars(back)} == {**vars(error)}


def test_an_exception_class_that_exists_only_there_comes_home_as_text(tmp_path: Path) -> None:
    (tmp_path / "only_there.py").write_text("class Odd(Exception):\n    pass\n")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from only_there import Odd\n"
        "from skypool.wire import exceptions\n"
        "try:\n    raise Odd('strange')\n"
        "except Odd as e:\n    (data,) = exceptions.dump_error(e)\n"
        "sys.stdout.buffer.write(data)\n"
    )
    data = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout
    back = exceptions.load_error([data])
    assert isinstance(back, RemoteError)
    assert (back.type_name, back.text) == ("only_there.Odd", "strange")
    assert "No module named 'only_there'" in back.why
    assert "only_there.Odd: strange" in back.traceback
    assert "only_there.Odd: strange" in str(back.__cause__)


def test_an_exception_class_made_in_a_script_there_comes_home_as_an_exception() -> None:
    script = (
        "import sys\nfrom skypool.wire import exceptions\n"
        "class Local(ValueError):\n    pass\n"
        "try:\n    raise Local('x')\n"
        "except Local as e:\n    (data,) = exceptions.dump_error(e)\n"
        "sys.stdout.buffer.write(data)\n"
    )
    data = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout
    back = exceptions.load_error([data])
    assert isinstance(back, ValueError)
    assert type(back).__name__ == "Local"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_with_a_broken_str_comes_home() -> None:
    back = home(Unspeakable(1))
    assert type(back) is Unspeakable
    assert back.args == (1,)
    assert "Unspeakable" in str(back.__cause__)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_would_end_this_process_comes_home_as_a_remote_error(error: BaseException) -> None:
    back = home(error)
    assert type(back) is RemoteError
    assert back.type_name == type(error).__name__
    assert "would end this process" in str(back)


def test_an_exception_group_comes_home_with_its_own_exceptions() -> None:
    back = home(ExceptionGroup("both", [ValueError("a"), ExceptionGroup("in", [KeyError("b")])]))
    assert isinstance(back, ExceptionGroup)
    matched, rest = back.split(KeyError)
    assert matched is not None
    assert rest is not None
    assert [type(e) for e in rest.exceptions] == [ValueError]


def test_an_exception_group_keeps_exceptions_with_other_signatures() -> None:
    back = home(ExceptionGroup("both", [OtherSignature(1, where="x"), Dressed("bread")]))
    assert isinstance(back, ExceptionGroup)
    assert [type(e) for e in back.exceptions] == [OtherSignature, Dressed]
    assert [str(e) for e in back.exceptions] == ["code 1 at x", "there is no bread"]


def test_an_exception_group_with_an_interrupt_in_it_is_a_remote_error() -> None:
    assert type(home(BaseExceptionGroup("both", [ValueError(), KeyboardInterrupt()]))) is RemoteError


def test_a_remote_error_survives_another_trip() -> None:
    first = home(SystemExit(3))
    again = home(first)
    assert type(again) is RemoteError
    assert str(again) == str(first)


def test_an_exception_unpickled_in_a_process_without_its_class_module_never_runs_its_init() -> None:
    made = exception_pickles.rebuild(OtherSignature, ("text",), ("text",), {"code": 1})
    assert isinstance(made, OtherSignature)
    assert made.args == ("text",)
    assert not hasattr(made, "where")


# --- references ----------------------------------------------------------------------------------------------


def test_a_reference_is_its_value_where_it_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = codec.dumps([codec.Reference[int]("k1")])
    with pytest.raises(RuntimeError, match="only on the pool's nodes"):
        codec.loads(buffers)
    monkeypatch.setattr(codec, "resolve_object", {"k1": 42}.__getitem__)
    assert codec.loads(buffers) == [42]


def test_an_exception_is_sent_although_warnings_are_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(exceptions.load_error(exceptions.dump_error(ValueError("x"))), ValueError)
