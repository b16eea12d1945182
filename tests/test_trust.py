"""What a stranger's machine sends is data: it runs nothing here, and the call alone fails.

The attacks are written opcode by opcode. Those that are said to run code are first shown to do so under pickle, or they
would prove nothing. Torch's part is tested where torch is installed; everything else needs no more than `.[dev]`.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import gc
import importlib
import importlib.util
import ipaddress
import itertools
import os
import pathlib
import pickle
import re
import struct
import subprocess
import sys
import time
import tracemalloc
import types
import uuid
import zoneinfo
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import skypool as sky
from skypool import events
from skypool.calls import futures
from skypool.errors import ProtocolError, RemoteError, UntrustedResult, WorkerDied
from skypool.link.agent_messages import Outcome, Piece
from skypool.link.chunks import MEMORY, Pieces
from skypool.model import Instance, Need, Offer, Order
from skypool.pool.trust_levels import TrustLevels
from skypool.text import printable
from skypool.trust import sending
from skypool.trust.reader import DataReader
from skypool.wire import codec, exceptions
from skypool_local import Local
from tests import hostile
from tests.conftest import eventually

HERE = __name__
READER = DataReader(3)
FIRED: list[object] = []
"""What an attack leaves behind that ran code here."""


def fire(*args: object) -> str:
    """What attacks want to call."""
    FIRED.append(args)
    return "fired"


@pytest.fixture(autouse=True)
def _nothing_fired() -> Iterator[None]:
    FIRED.clear()
    yield
    FIRED.clear()


# --- the client's own classes --------------------------------------------------------------------------------


@dataclass
class Point:
    x: float
    y: float = 0.0
    tags: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        fire("post_init")

    def norm(self) -> float:
        return 1.0

    @property
    def secret(self) -> int:
        return 1

    @secret.setter
    def secret(self, value: object) -> None:
        fire(value)


@dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: str = "b"


@dataclass(slots=True)
class Slotted:
    a: int
    next: Slotted | None = None


class Pair(NamedTuple):
    left: Any
    right: Any


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"
    BOTH = (1, 2)

    @classmethod
    def _missing_(cls, value: object) -> None:
        fire(value)


class Perm(enum.Flag):
    R = 1
    W = 2


class Level(enum.IntEnum):
    LOW = 1


class BadInput(Exception):
    """Takes other arguments than it gives its base."""

    def __init__(self, code: int, why: str) -> None:
        fire("init")
        super().__init__(f"{why} ({code})")
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, "why")


class BadArgument(Exception):
    """One of the user's own that is like any other."""


class NoData:
    """A class like any other: only its own code knows how to make one."""

    def __init__(self, value: object = None) -> None:
        fire("init")
        self.value = value

    def __setstate__(self, state: object) -> None:
        fire("setstate")
        self.__dict__.update(state)  # type: ignore[call-overload]  # a dictionary

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoData) and self.value == other.value

    def __hash__(self) -> int:
        fire("hash")
        return 1


@dataclass
class Cleans:
    """Whoever makes one has its `__del__` run."""

    path: str

    def __del__(self) -> None:
        fire(self.path)


@dataclass
class Restores:
    path: str

    def __setstate__(self, state: object) -> None:
        fire(state)


@dataclass(frozen=True)
class Key:
    part: object

    def __hash__(self) -> int:
        fire("hash")
        return 1


class Outer:
    @dataclass
    class Inner:
        x: int


@dataclass
class Evil:
    """Pickles as a call of whatever it is given."""

    function: Any
    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


def sent(value: object, allowed: Sequence[str] = ()) -> list[Any]:
    """As a worker sends it whose client reads data only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "result_writer", sending.DataWriter(3, allowed))
        return [*exceptions.dump_result(value, "the result of f")]


def sent_error(error: BaseException, allowed: Sequence[str] = ()) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "result_writer", sending.DataWriter(3, allowed))
        return [*exceptions.dump_error(error, home=True)]


def read(*buffers: Any, reader: DataReader = READER) -> Any:
    return reader.value(buffers, "the result of f")


# --- what works ----------------------------------------------------------------------------------------------

TZ = zoneinfo.ZoneInfo("UTC")
DATA: list[Any] = [
    *(0, -5, 255, 2**31, -(2**40), 2**200, -(2**63), 1.5, float("inf"), True, None, complex(1, -2)),
    *("", "é", "\ud800", "x" * 300, "y" * 100_000, b"", b"a" * 3000, bytearray(b"abc"), ()),
    *((1, (2, (3, ()))), [[1], [[2]]], {"a": {(1, "b"): [3]}}, {1, "2"}, frozenset({(1, 2)}), {None: 1, 2.5: 2}),
    *(range(3), slice(1, None, 2), [1.0] * 1000 + ["x", (1,), {}], [None, True] * 100, {i: -i for i in range(2000)}),
    *(datetime.date(2020, 1, 2), datetime.time(1, 2, 3, 4, fold=1), datetime.timedelta(-1, 2, 3)),
    *(datetime.datetime(2020, 2, 3, 4, 5, 6, 7, TZ), datetime.timezone(datetime.timedelta(hours=1), "x"), TZ),
    *(decimal.Decimal("1.50"), fractions.Fraction(-1, 3), uuid.UUID(int=7), ipaddress.ip_address("::1")),
    *(ipaddress.ip_network("10.0.0.0/8"), pathlib.Path("/a/b"), pathlib.PurePosixPath("c"), Perm.R, Perm.R | Perm.W),
    *(pathlib.PureWindowsPath("c:/x"), collections.OrderedDict(b=1, a=2), collections.deque([1, 2], 3)),
    *(collections.Counter("hello"), collections.defaultdict(list, {1: [2]}), types.SimpleNamespace(a=1)),
    *(array.array("d", [1.0, 2.0]), array.array("i", range(5)), {uuid.UUID(int=1): 1, datetime.date(2020, 1, 1): 2}),
    *({np.int64(3): 1, np.str_("x"): 2}, Color.RED, Color.BLUE, Color.BOTH, Level.LOW, {Color.RED: 1}),
    *(Frozen(1), Slotted(1, Slotted(2)), Pair(1, [Pair(2, 3)]), {Pair(1, 2): 3}, Outer.Inner(4)),
    codec.Captured(1, "printed"),
]


@pytest.mark.parametrize("value", DATA, ids=lambda v: type(v).__name__)
def test_data_comes_back_as_it_was(value: Any) -> None:
    got = read(*sent(value))
    assert type(got) is type(value)
    assert got == value
    assert repr(got) == repr(value)
    assert FIRED == []


ARRAYS: list[Any] = [
    *(np.arange(24, dtype=kind).reshape(2, 3, 4) for kind in "bBhHiIlLqQefdgFDG"),
    *(np.arange(5, dtype=">i4"), np.asfortranarray(np.ones((30, 40))), np.ones((4, 6))[::2, ::3], np.array(3.5)),
    *(np.zeros((0, 3)), np.array(["a", "bcd\U0010ffff"]), np.array([b"a"]), np.array([True, False] * 1000)),
    *(np.array(["2020-01-01", "NaT"], "M8[D]"), np.array([1, 2], "m8[25ns]"), np.array([1], "m8")),
    *(np.zeros(3, [("a", "i4"), ("b", "f8", (2,)), ("c", "U3"), ("d", [("e", "?")])]), np.zeros(2000, "V5")),
    *(np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)), np.array([1, "a", None, [2]], object)),
    *(np.transpose(np.arange(4000.0).reshape(2, 20, 100), (1, 0, 2)), np.array("", dtype="U"), np.arange(10**6)),
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda a: f"{a.dtype}-{a.shape}")
def test_an_array_comes_back_with_its_type_and_shape(value: Any) -> None:
    got = read(*sent(value))
    assert (type(got), got.dtype, got.shape) == (np.ndarray, value.dtype, value.shape)
    assert got.tobytes() == value.tobytes() if not value.dtype.hasobject else got.tolist() == value.tolist()
    assert got.flags.f_contiguous == value.flags.f_contiguous or got.size < 2 or not value.flags.c_contiguous
    assert got.flags.writeable or len(sent(value)) == 1
    (again,) = read(*sent([value]))
    assert again.tobytes() == got.tobytes() or value.dtype.hasobject


@pytest.mark.parametrize(
    "value", [np.float64(2), np.bool_(True), np.str_("x"), np.datetime64("2020-01-01"), np.int8(3)]
)
def test_a_number_of_numpy_stays_one(value: Any) -> None:
    assert type(read(*sent(value))) is type(value)
    assert read(*sent(value)) == value
    assert read(*sent(value.dtype)) == value.dtype


def test_a_large_array_uses_the_memory_that_it_came_in() -> None:
    buffers = sent(np.arange(1 << 20))
    memory = bytearray(buffers[1])
    got = read(buffers[0], memory)
    got[0] = 77
    assert struct.unpack_from("=q", memory) == (77,)


def test_a_data_class_is_made_without_its_own_code() -> None:
    point = Point(1.0, 2.0, ["a"])
    FIRED.clear()
    got = read(*sent([point, point]))
    assert got == [point, point]
    assert got[0] is got[1]
    assert FIRED == []


def test_a_data_class_may_hold_itself() -> None:
    one = Slotted(1)
    one.next = one
    got = read(*sent(one))
    assert got.next is got


def test_an_exception_keeps_its_type_text_and_attributes_without_its_init() -> None:
    error = BadInput(7, "too long")
    error.add_note("a note")
    FIRED.clear()
    got = READER.error(sent_error(error), "f")
    assert (type(got), str(got), got.__notes__) == (BadInput, "too long (7)", ["a note"])
    assert got.code == 7  # type: ignore[attr-defined]  # as it was set
    assert FIRED == []
    assert "too long" in str(got.__cause__)


ERRORS = [
    *(ValueError("x"), KeyError(1), OSError(2, "no", "f"), UnicodeDecodeError("utf8", b"x", 0, 1, "r")),
    *(ExceptionGroup("g", [ValueError(1), ExceptionGroup("h", [BadInput(1, "why")])]), ZeroDivisionError()),
    *(subprocess.CalledProcessError(3, "cmd", b"out"), ModuleNotFoundError("no x", name="x"), StopIteration(5)),
    *(WorkerDied("f", signal=9, tail="a tail", node=1), UntrustedResult("no"), sky.errors.RemoteError("a.B", "c")),
    *(sky.errors.UnknownAccelerator("H1000", ["H100"]), sky.errors.ConnectionLost("gone", 3)),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_exception_keeps_its_type(error: BaseException) -> None:
    got = READER.error(sent_error(error), "f")
    assert (type(got), str(got), repr(got.args)) == (type(error), str(error), repr(error.args))
    for name, value in vars(error).items():
        assert getattr(got, name) == value


@pytest.mark.parametrize(
    "error",
    [UnicodeDecodeError("utf8", b"x", -5, 0, "r"), SyntaxError("no", ("f", 1, 1, "x", 1, 5000))],
    ids=lambda e: type(e).__name__,
)
def test_an_exception_that_python_cannot_print_is_not_made(error: Exception) -> None:
    got = READER.error(sent_error(error), "f")
    assert isinstance(got, RemoteError | UntrustedResult)
    assert type(error).__name__ in str(got)


@pytest.mark.parametrize("name", ["start", "end", "object"])
def test_an_attribute_that_python_keeps_in_c_is_not_set(name: str) -> None:
    error = UnicodeDecodeError("utf8", b"x", 0, 1, "r")
    vars(error)[name] = 7
    got = READER.error(sent_error(error), "f")
    assert isinstance(got, RemoteError | UntrustedResult)
    assert name in str(got)


class BadText(UnicodeDecodeError):
    """An exception with the arguments of its base class, which a user allows."""


@pytest.mark.parametrize("start", [0, -5])
def test_an_allowed_exception_is_made_if_python_can_print_it(start: int) -> None:
    allowed = [f"{HERE}.BadText"]
    buffers = sent(BadText("utf8", b"x", start, 1, "r"), allowed)
    reader = DataReader(0, frozenset(allowed))
    if start < 0:
        with pytest.raises(UntrustedResult, match="BadText that cannot be printed"):
            read(*buffers, reader=reader)
    else:
        got = read(*buffers, reader=reader)
        assert (type(got), got.start) == (BadText, start)


def test_causes_come_along() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as e:
            raise ValueError("outer") from e
    except ValueError as e:
        got = READER.error(sent_error(e), "f")
    assert isinstance(got.__cause__, KeyError)
    assert isinstance(got.__cause__.__cause__, exceptions.RemoteTraceback)


def test_the_exception_of_a_library_keeps_its_name_and_text() -> None:
    got = READER.error(sent_error(np.linalg.LinAlgError("singular")), "f")
    assert isinstance(got, RemoteError)
    assert (got.type_name, got.text) == ("numpy.linalg.LinAlgError", "singular")
    assert "allow_results=['numpy.linalg.LinAlgError']" in str(got)
    allowed = DataReader(0, frozenset({"numpy.linalg.LinAlgError"}))
    assert (
        type(allowed.error(sent_error(np.linalg.LinAlgError("singular"), ["numpy.linalg.LinAlgError"]), "f"))
        is np.linalg.LinAlgError
    )


@pytest.mark.parametrize("word", [f"{HERE}.NoData", f"{HERE}.*", f"{HERE.partition('.')[0]}.*"])
def test_a_class_that_is_allowed_is_made_as_pickle_does_it(word: str) -> None:
    made = NoData([1])
    FIRED.clear()
    assert read(*sent(made, [word]), reader=DataReader(0, frozenset({word}))) == made
    assert FIRED == [("setstate",)]


def test_what_is_allowed_is_classes_and_no_functions() -> None:
    with pytest.raises(UntrustedResult):
        read(
            *sent(Evil(fire, (1,)), [f"{HERE}.*", f"{HERE}.fire"]),
            reader=DataReader(0, frozenset({f"{HERE}.*", f"{HERE}.fire"})),
        )
    assert FIRED == []


def test_a_refusal_says_what_where_why_and_what_to_do() -> None:
    with pytest.raises(UntrustedResult) as caught:
        read(*sent([NoData(1)]))
    e = caught.value
    assert (e.refused, e.what, e.node) == (f"{HERE}.NoData", "the result of f", 3)
    assert f"ComputePool(allow_results=['{HERE}.NoData'])" in str(e)
    assert 'trust="full"' in str(e)


@pytest.mark.parametrize(
    ("encoded", "advice"),
    [
        (
            hostile.made(b"X", "nowhere", "Lost"),
            "define the class at the top of a module that your own program imports",
        ),
        (hostile.made(b"e", HERE, "Color", hostile.text("GREEN")), f"the same version of the module {HERE}"),
        (b"\xff", "end the pool and rent another machine"),
    ],
)
def test_the_advice_of_a_refusal_fits_its_reason(encoded: bytes, advice: str) -> None:
    with pytest.raises(UntrustedResult, match=advice) as caught:
        read(hostile.whole(encoded, zeros=2000))
    assert 'Node 3 has trust="data"' in str(caught.value)


def test_what_is_no_data_says_so() -> None:
    for value in (lambda: 1, print, int, type(None), re.compile("a"), sys, Point, NotImplemented, object()):
        with pytest.raises(UntrustedResult):
            read(*sent(value) if value is not sys else [pickle.dumps(fire)])


TORCH = importlib.util.find_spec("torch")
with_torch = pytest.mark.skipif(TORCH is None, reason="torch is not installed; it is no part of .[dev], being 3 GB")


def _tensors() -> dict[str, Any]:
    if TORCH is None:
        return {}
    torch = importlib.import_module("torch")

    kinds = (torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32, torch.uint8, torch.bool)
    return {
        **{str(kind): torch.ones(2, 3).to(kind) for kind in kinds},
        "turned": torch.randn(3, 4).T,
        "empty": torch.empty(0, 3),
        "a number": torch.tensor(3.5),
        "large": torch.randn(300, 300),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "a parameter": torch.nn.Parameter(torch.randn(3)),
        "with a gradient": torch.randn(3, requires_grad=True),
        "of eight bits": torch.ones(3).to(torch.float8_e4m3fn),
    }


@with_torch
def test_tensors_come_back_as_they_were() -> None:
    torch = importlib.import_module("torch")

    for what, value in _tensors().items():
        got = read(*sent(value))
        assert (type(got), got.dtype, got.shape) == (type(value), value.dtype, value.shape), what
        assert got.requires_grad == value.requires_grad, what
        assert torch.equal(got.to(torch.complex128), value.to(torch.complex128)), what


@with_torch
def test_the_state_of_a_model_comes_back_and_a_model_does_not() -> None:
    torch = importlib.import_module("torch")

    model = torch.nn.Linear(3, 4)
    got = read(*sent(model.state_dict()))
    assert got._metadata == model.state_dict()._metadata
    model.load_state_dict(got)
    assert read(*sent(torch.Size([1, 2]))) == torch.Size([1, 2])
    for value in (model, torch.randn(3).to_sparse(), torch.float32):
        with pytest.raises(UntrustedResult):
            read(*sent(value))


@pytest.mark.parametrize(
    "args",
    [
        *((b"12345678", "float32", (3,), "tensor", False), (b"12345678", "float32", (-2,), "tensor", False)),
        *((b"12345678", "float32", (2**62, 2**62), "tensor", False), (b"\2", "bool", (1,), "tensor", False)),
        *((b"12345678", "load", (2,), "tensor", False), (b"12345678", "float32", (2,), "load", False)),
        *(("12345678", "float32", (2,), "tensor", False), (b"12345678", "float32", (2,), "tensor", 1), ()),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(args: tuple[Any, ...]) -> None:
    """Or torch's absence is told: here, too, nothing else than that may come of it."""
    with pytest.raises(
        UntrustedResult, match="" if TORCH else "torch, which is not installed on your machine|on your machine failed"
    ):
        read(hostile.whole(hostile.other("tensor", *map(hostile.value, args)), zeros=2000))


# --- attacks -------------------------------------------------------------------------------------------------

WRONG, MONSTERS = hostile.wrong(HERE), hostile.monsters()
_SPARE_SECONDS, _SECONDS_A_MEGABYTE = 0.1, 0.1
_SPARE_BYTES, _BYTES_A_BYTE = 128 << 10, 4


def costs(*buffers: Any) -> tuple[float, float]:
    """How much of the time and of the memory that a value may take reading it takes; it may be refused."""
    size = sum(map(len, buffers))
    gc.collect()
    began = time.thread_time()
    with contextlib.suppress(UntrustedResult):
        read(*buffers)
    took = time.thread_time() - began
    tracemalloc.start()
    try:
        with contextlib.suppress(UntrustedResult):
            read(*buffers)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return took / (_SPARE_SECONDS + _SECONDS_A_MEGABYTE * size / 1e6), (most + size) / (
        _SPARE_BYTES + _BYTES_A_BYTE * size
    )


@pytest.mark.parametrize("attack", WRONG.values(), ids=WRONG)
def test_what_is_no_data_is_refused_and_runs_nothing(attack: bytes, frozen: None) -> None:
    with pytest.raises(UntrustedResult) as caught:
        read(attack)
    assert "\x1b" not in str(caught.value)
    gc.collect()
    assert FIRED == []
    assert "antigravity" not in sys.modules
    assert max(costs(attack)) < 1


@pytest.mark.parametrize("attack", MONSTERS.values(), ids=MONSTERS)
def test_what_costs_far_more_than_its_length_is_refused_soon(attack: bytes, frozen: None) -> None:
    with pytest.raises(UntrustedResult):
        read(attack)
    assert max(costs(attack)) < 1


@pytest.mark.parametrize("attack", [*WRONG.values()][:60], ids=[*WRONG][:60])
def test_an_attack_in_an_exception_leaves_its_name_and_text(attack: bytes) -> None:
    got = READER.error(chained([(attack, "a.B", "text", "", [])]), "f")
    assert isinstance(got, RemoteError)
    assert (got.type_name, got.text) == ("a.B", "text")


def chained(chain: Any, text: Any = "trace") -> list[Any]:
    """An exception as a worker sends it."""
    return [hostile.whole(hostile.value((chain, text)))]


def test_exceptions_in_exceptions_come_to_an_end() -> None:
    for depth in (3, 40, 200):
        error: Exception = ValueError("x")
        data, *_ = inner = codec_link(error)
        for _ in range(depth):
            args = hostile.value(("g", [inner])), hostile.value({})
            data = hostile.whole(hostile.made(b"X", "builtins", "ExceptionGroup", *args), zeros=40_000)
            inner = (data, "a", "b", "c", [])
        got = READER.error(chained([inner]), "f")
        assert type(got) in (ExceptionGroup, RemoteError)


def codec_link(error: Exception) -> Any:
    return (None, type(error).__name__, str(error), "", [])


def test_a_pickle_is_refused_and_says_why() -> None:
    with pytest.raises(UntrustedResult, match='it is a pickle, which may be read only with trust="full"'):
        read(pickle.dumps({"a": 1}))


HONEST: dict[str, Any] = {
    "numbers": list(range(100_000)),
    "large numbers": [n << 70 for n in range(20_000)],
    "numbers with a fraction": [n / 7 for n in range(100_000)],
    "texts": [str(n) for n in range(50_000)],
    "texts of other letters": ["\U0001f600" * (n % 9) for n in range(20_000)],
    "one long text": "a\u00e9" * 300_000 + "\U0001f600",
    "dictionaries": [{"id": n, "name": str(n)} for n in range(20_000)],
    "a dictionary of tuples": {(n, str(n)): n for n in range(20_000)},
    "a dictionary of numbers": {n * 7919: -n for n in range(50_000)},
    "a set": {n * 3 for n in range(50_000)},
    "sets": [{n, n + 1} for n in range(5_000)],
    "frozen sets as keys": {frozenset({n, str(n)}): n for n in range(5_000)},
    "data classes": [Frozen(n, str(n)) for n in range(10_000)],
    "data classes with slots": [Slotted(n) for n in range(10_000)],
    "named tuples": [Pair(n, n) for n in range(5_000)],
    "members": [Color.RED, Color.BLUE] * 3_000,
    "dates": [datetime.datetime(2020, 1, 1, tzinfo=TZ) + datetime.timedelta(n) for n in range(5_000)],
    "decimals": [decimal.Decimal(n) / 7 for n in range(5_000)],
    "fractions": [fractions.Fraction(n, n + 1) for n in range(5_000)],
    "paths": [pathlib.PurePosixPath(f"/a/{n}") for n in range(3_000)],
    "identifiers": [uuid.UUID(int=n) for n in range(5_000)],
    "deques": [collections.deque([n]) for n in range(3_000)],
    "counters": [collections.Counter(str(n)) for n in range(3_000)],
    "small arrays": [np.arange(5.0) for _ in range(3_000)],
    "numbers of numpy": [np.float32(n) for n in range(3_000)],
    "texts of numpy": np.array([str(n) for n in range(50_000)]),
    "booleans of numpy": np.zeros(1_000_000, bool),
    "an array of objects": np.array([{"a": n} for n in range(5_000)], object),
    "rows in rows": [[(n, [m, str(m)]) for m in range(5)] for n in range(2_000)],
    "things of all kinds": [[n, str(n), None, 1.5, (n,), {"n": n}, {n}, b"x" * (n % 50)] for n in range(3_000)],
}


@pytest.mark.parametrize("value", HONEST.values(), ids=HONEST)
def test_a_large_honest_value_comes_back_and_costs_no_more_than_it_may(value: Any, frozen: None) -> None:
    buffers = sent(value)
    got = read(*buffers)
    assert (
        (got == value).all()
        if isinstance(value, np.ndarray)
        else all(map(np.array_equal, got, value))
        if (type(value) is list and isinstance(value[0], np.ndarray))
        else got == value
    )
    time_used, memory_used = costs(*buffers)
    assert memory_used < 1
    assert time_used < 1


_ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=60), st.binary(max_size=60),
    st.dates(), st.decimals(allow_nan=False), st.fractions(), st.uuids(), st.sampled_from([Color.RED, Perm.R | Perm.W]),
)  # fmt: skip
_KEYS = st.one_of(_ATOMS, st.tuples(_ATOMS, _ATOMS), st.frozensets(_ATOMS, max_size=3))
_VALUES = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=9),
        st.lists(st.tuples(inner, inner), max_size=9),
        st.lists(st.fixed_dictionaries({"a": inner, "b": inner}), max_size=9),
        st.dictionaries(_KEYS, inner, max_size=9),
        st.sets(_KEYS, max_size=9),
        st.builds(Pair, inner, inner),
        st.lists(st.builds(Frozen, st.integers(), inner), max_size=9),
        inner.map(lambda each: [each, each]),
    ),
    max_leaves=40,
)


@pytest.mark.slow
@given(_VALUES)
@settings(max_examples=300, deadline=5000)
def test_any_honest_value_comes_back_as_it_was(value: Any) -> None:
    got = read(*sent(value))
    assert got == value
    assert type(got) is type(value)


def test_what_is_in_a_value_twice_is_twice_the_same() -> None:
    one = [1]
    got = read(*sent({"a": one, "b": (one, [one] * 9), "rows": [{"x": one, "y": n} for n in range(9)]}))
    assert got["a"] is got["b"][0] is got["b"][1][8] is got["rows"][3]["x"]
    loop: list[Any] = [1]
    loop.append({"itself": loop})
    got = read(*sent(loop))
    assert got[1]["itself"] is got
    rows = [Slotted(n) for n in range(9)]
    for before, after in itertools.pairwise(rows):
        before.next = after
    got = read(*sent(rows))
    assert got[0].next is got[1]


def test_a_refusal_says_where_in_the_value_it_is() -> None:
    for value, where in (
        ([1, {"model": NoData(1)}], "[1]['model']"),
        ([Frozen(1), Frozen(2, NoData(1))] * 1, "[1].b"),  # type: ignore[arg-type]  # as users do
        ([{"a": 1, "b": NoData(n)} for n in range(9)], "[0]['b']"),
        (Pair(1, (2, NoData(3))), ".right[1]"),
    ):
        with pytest.raises(UntrustedResult) as caught:
            sent(value)
        assert f"(at {where})" in str(caught.value)


@pytest.mark.parametrize("buffers", [1, 3])
def test_buffers_that_are_missing_or_too_many_are_refused(buffers: int) -> None:
    pickled, memory = sent(np.arange(1000))
    with pytest.raises(UntrustedResult):
        read(pickled, *[memory] * (buffers - 1))


@pytest.mark.parametrize("size", [0, 7999, 8001, 16000])
def test_a_buffer_of_another_size_is_refused(size: int) -> None:
    pickled, _ = sent(np.arange(1000))
    with pytest.raises(UntrustedResult):
        read(pickled, bytes(size))


def test_a_library_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = sent(np.arange(3))
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(UntrustedResult, match="numpy, which is not installed on your machine"):
        read(*buffers)


@pytest.mark.parametrize(
    "said",
    [
        *(3, ([], ""), ([(None, "a", "b", "c", [])] * 99, ""), ([(1, 2, 3, 4, 5)], "")),
        *(([(None, "a", "b", "c", [1])], ""), ([[None, "a", "b", "c", []]], "")),
    ],
)
def test_an_exception_that_is_none_is_refused(said: Any) -> None:
    assert type(READER.error([hostile.whole(hostile.value(said))], "f")) is UntrustedResult
    assert type(READER.error([b""], "f")) is UntrustedResult


def test_texts_of_exceptions_do_nothing_to_a_terminal() -> None:
    bad = "\x1b]0;title\x07\x1b[2Jgo\x9b\u202eod\b"
    error = ValueError(bad)
    error.add_note(bad)
    error.extra = bad  # type: ignore[attr-defined]
    got = READER.error(sent_error(error), "f")
    shown = [str(got), got.__notes__[0], vars(got)["extra"], str(READER.error(sent_error(KeyboardInterrupt(bad)), "f"))]
    assert all("good" in each and each.replace("\n", "").isprintable() for each in shown)
    assert str(got.__cause__).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("text", "left"),
    [
        *(("plain\ttext\r\n", "plain\ttext\r\n"), ("\x1b[31mred\x1b[0m", "red"), ("a\x1b]8;;http://x\x1b\\b", "ab")),
        *(("a\x1b", "a"), ("\x1bPq#0\x1b\\x", "x"), ("\x07\x08\x0c", ""), ("é\u202ex", "éx"), ("\x9b31m", "")),
    ],
)
def test_what_would_change_a_terminal_is_taken_out(text: str, left: str) -> None:
    assert printable(text) == left


# --- chance --------------------------------------------------------------------------------------------------

_NAMES = st.sampled_from([hostile.shape(*pair) for pair in [*hostile.names(HERE), (HERE, "Point"), (HERE, "Slotted")]])
_PARTS = st.one_of(
    _NAMES,
    st.sampled_from([*(bytes([tag]) for tag in b"NTFiIfsbrmltdwSZqgouRDCeEnOXAx"), b"\x00", b"\xff"]),
    st.integers(0, 5).map(hostile.u64),
    st.integers(0, 2**64 - 1).map(hostile.u64),
    st.sampled_from([1, "a", None, [1, 2], (1,), {"a": 1}, 1.5, b"x"]).map(hostile.value),
    st.sampled_from(["date", "deque", "ndarray", "scalar", "dtype", "ordered", "one", "path", "zone"]).map(
        lambda name: b"x" + bytes([len(name)]) + name.encode()
    ),
    st.binary(max_size=20),
)


@given(st.lists(_PARTS, max_size=40), st.lists(st.binary(max_size=20), max_size=2))
@settings(max_examples=500, deadline=5000)
def test_parts_at_random_are_data_or_refused(parts: list[bytes], more: list[bytes]) -> None:
    with contextlib.suppress(UntrustedResult):
        repr(read(hostile.whole(*parts), *more))
    assert FIRED == []
    assert isinstance(READER.error([hostile.whole(*parts), *more], "f"), Exception)
    assert FIRED == []


_HONEST = [sent(each) for each in [*DATA, *ARRAYS[:-1], [Slotted(1, Slotted(2))] * 3]]


@given(st.sampled_from(_HONEST), st.data())
@settings(max_examples=500, deadline=5000)
def test_an_honest_value_with_a_flipped_bit_is_data_or_refused(buffers: list[Any], draw: st.DataObject) -> None:
    data = bytearray(buffers[0])
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(data) - 1))
        data[at] ^= 1 << draw.draw(st.integers(0, 7))
    with contextlib.suppress(UntrustedResult):
        read(bytes(data), *buffers[1:])
    assert FIRED == []


# --- end to end ----------------------------------------------------------------------------------------------


def good(n: int) -> dict[str, Any]:
    print("\x1b]0;hacked\x07\x1b[2Jcalled\x1b[31m")
    return {"points": [Frozen(n), Pair(n, Color.RED)], "array": np.arange(n)}


def touch(where: str) -> None:
    """Leave a file, if this is the client's process: a worker reads what it sends, too."""
    pid, _, file = where.partition(":")
    if int(pid) == os.getpid():
        pathlib.Path(file).touch()


def evil(n: int, where: str) -> Any:
    return Evil(touch, (where,)) if n == 1 else n


def raises_evil(where: str, kind: type[Exception]) -> None:
    raise kind(Evil(touch, (where,)))


def yields_evil(where: str) -> Iterator[Any]:
    yield 1
    yield [Evil(touch, (where,))]
    yield np.zeros(100_000)
    yield from range(1000)


def yields_refused_end() -> Any:
    yield 1
    return print


def raises_bad_input() -> None:
    raise BadInput(5, "no good")


def nap(seconds: float) -> list[int]:
    time.sleep(seconds)
    return [1]


@dataclass(frozen=True)
class Market(Local):
    """Local, sold as a stranger's machine."""

    name: ClassVar[str] = "market"

    def offers(self, need: Need) -> list[Offer]:
        return [dataclasses.replace(each, provider=self.name, trust="data") for each in super().offers(need)]

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        return [dataclasses.replace(each, provider=self.name) for each in super().launch(offer, order)]

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        return [dataclasses.replace(each, provider=self.name) for each in super().instances(pool=pool)]


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(sky.Local(), nodes=2, slots=1, trust="data", console="off") as pool:
        yield pool


@pytest.fixture
def canary(tmp_path: pathlib.Path) -> Iterator[str]:
    """Where attacks leave a file; after the test there is none."""
    file = tmp_path / "fired"
    yield f"{os.getpid()}:{file}"
    assert not file.exists()


def test_under_full_trust_a_result_can_run_code_here(tmp_path: pathlib.Path) -> None:
    """Or the tests below would prove nothing."""
    file = tmp_path / "fired"
    with sky.ComputePool(sky.Local(), slots=1, console="off") as full:
        assert full.submit(evil, 1, f"{os.getpid()}:{file}").result() is None
    assert file.exists()


def test_data_of_a_stranger_comes_back(pool: sky.ComputePool) -> None:
    said: list[str] = []
    off = pool.events.listen(lambda e: said.append(e.text) if isinstance(e, events.Output) else None)
    got = pool.submit(good, 3).result()
    assert got["points"] == [Frozen(3), Pair(3, Color.RED)]
    assert got["array"].tolist() == [0, 1, 2]
    assert eventually(lambda: "".join(said) == "called\n"), said
    off()


def test_a_result_that_would_run_code_fails_its_call_alone(pool: sky.ComputePool, canary: str) -> None:
    future = pool.submit(evil, 1, canary)
    assert isinstance(future.exception(), UntrustedResult)
    with pytest.raises(
        UntrustedResult,
        match=r"the result of evil was rejected: it contains an instance of .*Evil, .* calling .*\.touch",
    ) as caught:
        future.result()
    assert (caught.value.refused, caught.value.node in (0, 1)) == (f"{HERE}.touch", True)
    assert pool.submit(evil, 2, canary).result() == 2


def test_one_of_many_fails_alone(pool: sky.ComputePool, canary: str) -> None:
    got = pool.map(evil, [0, 2, 3] * 50, [canary] * 150)
    assert list(got) == [0, 2, 3] * 50
    bad = pool.map(evil, [0, 1, 2], [canary] * 3, chunksize=3)
    assert next(bad) == 0
    with pytest.raises(UntrustedResult):
        next(bad)


def test_an_exception_that_would_run_code_comes_as_text(pool: sky.ComputePool, canary: str) -> None:
    for kind in (ValueError, BadArgument):
        with pytest.raises(RemoteError, match="Evil") as caught:
            pool.submit(raises_evil, canary, kind).result()
        assert caught.value.type_name.endswith(kind.__name__)
    with pytest.raises(BadInput, match=r"no good \(5\)"):
        pool.submit(raises_bad_input).result()


def test_an_item_that_would_run_code_is_refused(pool: sky.ComputePool, canary: str) -> None:
    stream = sky.compute(yields_evil)(canary) >> pool
    assert next(stream) == 1
    with pytest.raises(UntrustedResult, match="item 1 of yields_evil"):
        next(stream)
    assert list(stream) == []
    ending = sky.compute(yields_refused_end)() >> pool
    assert next(ending) == 1
    with pytest.raises(UntrustedResult, match="the result of yields_refused_end"):
        next(ending)


def test_a_broadcast_and_a_group_refuse_it_too(pool: sky.ComputePool, canary: str) -> None:
    call = sky.compute(evil)
    with pytest.raises(BaseExceptionGroup) as caught:
        call.with_options(independent=True)(1, canary) @ pool
    assert [type(e) for e in caught.value.exceptions] == [UntrustedResult] * 2
    assert {e.node for e in caught.value.exceptions if isinstance(e, UntrustedResult)} == {0, 1}
    with pytest.raises(UntrustedResult):
        (call(1, canary) & call(2, canary)) >> pool


def test_a_worker_that_dies_says_so(pool: sky.ComputePool) -> None:
    with pytest.raises(WorkerDied) as caught:
        pool.submit(os._exit, 3).result()
    assert caught.value.exitcode == 3


def test_classes_of_a_script_come_back_as_its_own(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[Point(x=1), Pair(a=2), <Color.RED: 1>]\nBad: 3 7\nrefused a class by its code\n"


SCRIPT = """
import enum
from dataclasses import dataclass
from typing import NamedTuple
import skypool as sky

@dataclass
class Point:
    x: int

class Pair(NamedTuple):
    a: int

class Color(enum.Enum):
    RED = 1

class Bad(Exception):
    def __init__(self, code):
        super().__init__(code)
        self.extra = 7

@sky.compute
def give():
    return [Point(1), Pair(2), Color.RED]

@sky.compute
def fail():
    raise Bad(3)

@sky.compute
def inside():
    @dataclass
    class Local:
        x: int
    return Local(1)

with sky.ComputePool(trust="data", console="off") as pool:
    got = give() >> pool
    print(got)
    assert [type(each) for each in got] == [Point, Pair, Color]
    try:
        fail() >> pool
    except Bad as e:
        print("Bad:", e, e.extra)
    try:
        inside() >> pool
    except sky.errors.UntrustedResult as e:
        assert "at the top of a module" in str(e), e
        print("refused a class by its code")
"""


def test_the_offer_decides_unless_the_pool_says(canary: str) -> None:
    told: list[str] = []
    mixed = sky.ComputePool(Market(), slots=1, nodes=2, console="off")
    mixed.events.listen(lambda e: told.append(e.text) if isinstance(e, events.Notice) else None)
    with mixed:
        with pytest.raises(UntrustedResult):
            mixed.submit(evil, 1, canary).result()
    assert [each for each in told if "data only" in each] == [
        "results of 2 nodes of market may contain plain data only, because the provider rents out machines of "
        "strangers; allow_results= permits further classes"
    ]


@pytest.mark.parametrize(
    ("asked", "offered", "trust"),
    [(None, "full", "full"), (None, "data", "data"), ("full", "data", "full"), ("data", "full", "data")],
)
def test_whose_word_counts(asked: Any, offered: Any, trust: str) -> None:
    verdicts = TrustLevels(asked, frozenset(), lambda _: None)
    instance = Instance("local", "1", "p", 0, offer=Offer("local", "x", trust=offered))
    assert verdicts.judge(instance, sky.Local()) == trust
    assert (verdicts.reader(0) is None) == (trust == "full")


def test_without_an_offer_the_driver_is_asked_and_silence_is_no_trust() -> None:
    instance = Instance("local", "1", "p", 0)
    verdicts = TrustLevels(None, frozenset(), lambda _: None)
    assert verdicts.judge(instance, sky.Local()) == "full"
    assert verdicts.judge(instance, sky.AWS()) == "full"
    assert verdicts.judge(instance, Market()) == "data"
    assert verdicts.judge(instance, Silent()) == "data"
    assert verdicts.judge(instance, Sold()) == "data"


@dataclass(frozen=True)
class Silent(Market):
    def offers(self, need: Need) -> list[Offer]:
        raise sky.errors.RateLimitError("not now")


@dataclass(frozen=True)
class Sold(Market):
    def offers(self, need: Need) -> list[Offer]:
        return []


@pytest.mark.slow
def test_a_pool_that_is_attached_to_is_trusted_no_further(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEFT_BEHIND.format(here=HERE, path=str(pathlib.Path(__file__).parents[1])))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    pool = sky.ComputePool.attach("left-behind", Market(), console="off")
    try:
        (future,) = pool.inherited
        with pytest.raises(UntrustedResult):
            future.result(30)
        with pytest.raises(UntrustedResult):
            pool.submit(lambda: print).result(30)
    finally:
        pool.stop()


LEFT_BEHIND = """
import os, sys
sys.path.insert(0, {path!r})
import skypool as sky
from tests.test_trust import Market
import time

def give():
    time.sleep(1)
    return print

pool = sky.ComputePool(Market(), name="left-behind", slots=1, console="off").start()
pool.submit(give)
time.sleep(0.5)
os._exit(0)
"""


def test_the_page_shows_what_a_refusal_says() -> None:
    page = (pathlib.Path(__file__).parents[1] / "docs" / "trust.md").read_text()
    with pytest.raises(UntrustedResult) as caught:
        DataReader(0).value(sent(uuid.SafeUUID), "the result of train")
    assert "contains uuid.SafeUUID itself" in str(caught.value)
    Job = type("Job", (Evil,), {"__module__": "mypkg"})
    with pytest.raises(UntrustedResult) as caught:
        DataReader(0).value(sent(Job(os.system, ("touch /tmp/canary",))), "the result of train")
    assert str(caught.value) in " ".join(page.split())


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([Piece(7, 0, 0, 1 << 45)], "does not fit into"),
        ([Piece(7, 0, 0, 1 << 20), Piece(9, 1, 0, MEMORY)], "does not fit into"),
        ([Piece(7, 0, 0, 100_000), Piece(7, 0, 50, 100_000)], "item 0, byte 50 of 100000 instead of item 0, byte 10"),
        ([Piece(7, 0, 50, 100_000)], "at byte 50 instead of 0"),
        ([Piece(7, 1, 0, 100_000), Piece(7, 2, 10, 100_000)], "item 2, byte 10 of 100000 instead of item 1, byte 10"),
    ],
)
def test_values_that_have_holes_or_no_room_are_refused(pieces: list[Piece], why: str) -> None:
    taken = Pieces()
    with pytest.raises(ProtocolError, match=why):
        for each in pieces:
            taken.take(each, memoryview(b"x" * 10), lambda: [7, 9])


def test_pieces_of_a_value_that_nobody_waits_for_take_no_memory() -> None:
    taken = Pieces()
    for at in (0, 10):
        taken.take(Piece(8, 0, at, 1 << 40), memoryview(b"x" * 10), lambda: [7])
    assert taken.rooms == {}
    assert taken.buffers(Outcome(8, True, 0.0, [1 << 40], large=True), memoryview(b""), lambda: [7]) == ()


def test_a_stream_that_runs_far_ahead_is_refused() -> None:
    items: futures.Items[Any] = futures.Items("count")
    with pytest.raises(ProtocolError, match="that were not read here yet, and the limit is 1056576"):
        for seq in range(1, 10):
            items.feed(seq, True, [b"x" * 300_000], READER, window=1000)


def test_a_stream_of_nothing_that_runs_far_ahead_is_refused() -> None:
    items: futures.Items[Any] = futures.Items("count")
    with pytest.raises(ProtocolError, match="that were not read here yet"):
        for seq in range(1, 100_000):
            items.feed(seq, True, [b"N"], READER)
    assert seq < 30_000


@pytest.mark.parametrize("bad", ["strict", True, 1])
def test_a_trust_that_is_none_is_refused(bad: Any) -> None:
    with pytest.raises(sky.errors.UsageError, match="trust must be one of 'full', 'data'"):
        sky.ComputePool(trust=bad)


@pytest.mark.parametrize("bad", ["Point", "*", "a..b", 3, ["a.b", "c d.e"], "a.*.b"])
def test_an_allowance_that_names_no_class_is_refused(bad: Any) -> None:
    with pytest.raises(sky.errors.UsageError, match="allow_results must name classes"):
        sky.ComputePool(trust="data", allow_results=bad)


def test_a_class_may_be_allowed_as_itself() -> None:
    with sky.ComputePool(trust="data", allow_results=[NoData], slots=1, console="off") as pool:
        assert pool.submit(NoData, 3).result() == NoData(3)
