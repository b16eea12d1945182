# mypy: ignore-errors
# Scripts are seldom typed, and much of this is what type checkers refuse.
"""Things of every kind that a script may send: values, classes and functions, each with what to ask of it elsewhere.

`python -m tests.travel_corpus` does it with skypool, where all of this is a script's and travels by value.
`python -m tests.travel_corpus peer` does it with multiprocessing, which imports this module in the other process.
"""

from __future__ import annotations

import abc
import array
import asyncio
import collections
import contextlib
import contextvars
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import itertools
import json
import operator
import os
import pathlib
import pickle
import re
import sys
import threading
import types
import typing
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, Generic, NamedTuple, NewType, ParamSpec, Protocol, TypedDict, TypeVar, TypeVarTuple

import attrs
import numpy as np
import pydantic

Ask = Callable[[Any], object]
CORPUS: dict[str, tuple[Any, Ask]] = {}
REGISTRY: list[str] = []
CALLS = 0


def add(name: str, thing: Any, ask: Ask = repr) -> None:
    assert name not in CORPUS, name
    CORPUS[name] = thing, ask


# --- plain values ------------------------------------------------------------------------------------------------

for number, value in enumerate(
    [
        0,
        -1,
        2**80,
        1.5,
        -0.0,
        float("inf"),
        3j,
        True,
        None,
        "",
        "ä\U0001f600",
        "\udce9",
        b"",
        b"\0\xff",
        ...,
        NotImplemented,
    ]
):
    add(f"constant {number}", value)
for number, value in enumerate(
    [
        [],
        [1, [2, [3]]],
        (),
        (1,),
        {},
        {1: {2: 3}},
        {"b": 1, "a": 2},
        set(),
        {1},
        frozenset({2}),
        bytearray(b"ab"),
        range(1, 9, 2),
        slice(1, None, 2),
        [None] * 100,
        {n: n for n in range(100)},
    ]
):
    add(f"collection {number}", value)
add("array", array.array("d", [1.5, 2]))
add("deque", collections.deque([1, 2], maxlen=3))
add("ordered", collections.OrderedDict(b=1, a=2))
add("counter", collections.Counter("abca"))
add("chain map", collections.ChainMap({1: 2}, {3: 4}))
add("default dict of list", collections.defaultdict(list, {1: [2]}), lambda d: (d[9], d[1]))
add("user dict", collections.UserDict({1: 2}))
add("decimal", decimal.Decimal("1.10"))
add("fraction", fractions.Fraction(2, 6))
add("date", datetime.date(2024, 2, 29))
add("datetime", datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=datetime.UTC))
add("timedelta", datetime.timedelta(days=1, seconds=2))
add("path", pathlib.PurePosixPath("/a/b"))
add("uuid", uuid.UUID(int=5))
add("pattern", re.compile("a(b)", re.IGNORECASE), lambda p: p.match("AB").group(1))
add("namespace", types.SimpleNamespace(a=1, b=[2]))
add("mapping proxy", dict(types.MappingProxyType({"a": 1})))
add("json decoder", json.JSONDecoder().decode("[1]"))
SHARED = [1]
add("shared parts", [SHARED, SHARED], lambda v: v[0] is v[1])
LOOP: list[Any] = [1]
LOOP.append(LOOP)
add("a list in itself", LOOP, lambda v: v[1] is v)

# --- numpy -------------------------------------------------------------------------------------------------------

for dtype in ("i1", "u2", "<i4", ">i8", "f2", "f4", "f8", "c16", "bool", "U3", "S3", "M8[s]", "m8[ms]"):
    add(f"numpy {dtype}", np.zeros(3, dtype=dtype), lambda a: (str(a.dtype), a.tolist()))
add("numpy record", np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), lambda a: (a["b"].tolist(), a.dtype.names))
add("numpy fortran", np.asfortranarray(np.ones((2, 3))), lambda a: (a.flags.f_contiguous, a.sum()))
add("numpy objects", np.array([None, "a"], dtype=object), lambda a: a.tolist())
add("numpy scalar", np.float32(1.5), lambda a: (type(a).__name__, float(a)))
add("numpy dtype", np.dtype("f4"))
add("numpy function", np.sin, lambda f: float(f(0.0)))
add("numpy large", np.arange(100_000), lambda a: int(a.sum()))
add("numpy masked", np.ma.array([1, 2], mask=[True, False]), lambda a: a.tolist())
add("numpy generator", np.random.default_rng(3), lambda g: int(g.integers(1000)))


# --- functions ---------------------------------------------------------------------------------------------------


def plain(x: int = 2) -> int:
    """Double it."""
    return 2 * x


def recursive(n: int = 5) -> int:
    return 1 if n < 2 else n * recursive(n - 1)


def even(n: int = 4) -> bool:
    return n == 0 or odd(n - 1)


def odd(n: int = 4) -> bool:
    return n != 0 and even(n - 1)


def keywords(a: int, /, b: int = 2, *rest: int, c: int = 3, **more: int) -> tuple[object, ...]:
    return a, b, rest, c, more


def generator(n: int = 3) -> Iterator[int]:
    yield from range(n)


async def coroutine() -> int:
    await asyncio.sleep(0)
    return 4


async def async_generator() -> AsyncIterator[int]:
    for n in range(3):
        yield n


def counts() -> int:
    global CALLS
    CALLS += 1
    return CALLS


def counting() -> int:
    counting.calls += 1
    return counting.calls


counting.calls = 0  # type: ignore[attr-defined]


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return "traced", function(*args)

    return wrapper


def memoized(function: Callable[..., Any]) -> Callable[..., Any]:
    cache: dict[Any, Any] = {}

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        if args not in cache:
            cache[args] = function(*args)
        return cache[args]

    return wrapper


@traced
def decorated(x: int = 1) -> int:
    return x + 1


@traced
@memoized
def decorated_twice(x: int = 1) -> int:
    return x + 1


@functools.cache
def cached(x: int = 1) -> list[int]:
    return [x]


@functools.lru_cache(maxsize=2, typed=True)
def bounded(x: float = 1) -> float:
    return x


@functools.cache
def fibonacci(n: int = 30) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.singledispatch
def show(value: object) -> str:
    return "object"


@show.register
def _(value: int) -> str:
    return "int"


@show.register(list)
def show_list(value: list[Any]) -> str:
    return f"list of {show(value[0])}"


@contextlib.contextmanager
def managed() -> Iterator[int]:
    yield 3


def annotated(a: Plain, b: list[Point] | None = None) -> Optional:
    return a


def entered() -> int:
    with managed() as n:
        return n


for function in (plain, recursive, even, odd, decorated, decorated_twice, cached, bounded, fibonacci, entered, counts):
    add(f"function {function.__name__}", function, lambda f: f())
add("function keywords", keywords, lambda f: f(1, 2, 3, 4, c=5, d=6))
add("function doc", plain, lambda f: (f.__doc__, f.__name__, f.__qualname__, f.__defaults__, f.__annotations__))
add("function generator", generator, lambda f: list(f(4)))
add("function coroutine", coroutine, lambda f: asyncio.run(f()))
add("function async generator", async_generator, lambda f: asyncio.run(_all(f())))
add("function with an attribute", counting, lambda f: f())
add("function of a cache", cached, lambda f: (f.cache_parameters(), f() is f(), f.__name__, f.__wrapped__(5)))
add("function dispatched", show, lambda f: (f(1), f("a"), f([1]), f.__name__, len(f.registry)))
add("function hints", annotated, lambda f: sorted(typing.get_type_hints(f)))
add("function in a list", [plain, plain], lambda v: v[0] is v[1])
add("builtin", len, lambda f: f([1]))
add("builtin method", "a-b".split, lambda f: f("-"))
add("partial", functools.partial(plain, 4), lambda f: f())
add("partial of keywords", functools.partial(keywords, 1, c=9), lambda f: f(2, d=1))
add("partial of a partial", functools.partial(functools.partial(keywords, 1), 2), lambda f: f(3))
add("item getter", operator.itemgetter(1), lambda f: f("abc"))
add("attribute getter", operator.attrgetter("real"), lambda f: f(3))
add("method caller", operator.methodcaller("upper"), lambda f: f("a"))
add("counter of itertools", operator.add, lambda f: f(1, 2))
add("cmp to key", functools.cmp_to_key, lambda f: sorted([2, 1], key=f(lambda a, b: a - b)))
add("reduce", functools.partial(functools.reduce, operator.mul), lambda f: f([1, 2, 3]))


async def _all(items: AsyncIterator[int]) -> list[int]:
    return [item async for item in items]


# --- typing ------------------------------------------------------------------------------------------------------

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Bound = TypeVar("Bound", bound="Plain")
Chosen = TypeVar("Chosen", int, str)
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")
UserId = NewType("UserId", int)
UserList = NewType("UserList", list[int])
Optional = int | None
Alias = dict[str, list[int]]

for variable in (T, T_co, Chosen, P, Ts, Bound):
    add(f"variable {variable.__name__}", variable, lambda v: (repr(v), v.__module__ == plain.__module__))
add("variable bound", Bound, lambda v: v.__bound__)
add("variable constraints", Chosen, lambda v: v.__constraints__)
add("new type", UserId, lambda v: (v(3), v.__name__, v.__supertype__))
add("new type of a list", UserList, lambda v: (v.__name__, v.__supertype__))
for number, hint in enumerate(
    [
        Optional,
        Alias,
        list[T],  # type: ignore[valid-type]
        typing.Optional[int],
        typing.Union[int, str],
        typing.Callable[[int], str],
        typing.Callable[P, T],  # type: ignore[valid-type]
        Callable[..., int],
        typing.Literal["a", 1],
        typing.Annotated[int, "meters"],
        typing.Any,
        typing.NoReturn,
        ClassVar[int],
        typing.Final[int],
        tuple[int, ...],
        tuple[typing.Unpack[Ts]],  # type: ignore[valid-type]
        typing.Concatenate[int, P],
        type[int],
        typing.ForwardRef("Plain"),
        typing.List[int],  # noqa: UP006
        typing.TypeGuard[int],
        int | str | UserId,
    ]
):
    add(f"hint {number}", hint)


class Named(NamedTuple):
    a: int
    b: str = "x"

    @property
    def both(self) -> str:
        return f"{self.a}{self.b}"


class Keys(TypedDict, total=False):
    a: int
    b: list[str]


class MoreKeys(Keys, total=True):
    c: int


class Speaks(Protocol):
    def speak(self) -> str: ...


@typing.runtime_checkable
class Checked(Protocol):
    size: int

    def speak(self) -> str: ...


class Dog:
    size = 3

    def speak(self) -> str:
        return "woof"


class Cat(Speaks):
    def speak(self) -> str:
        return "meow"


class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value


class IntBox(Box[int]):
    pass


class Pair(Generic[T, T_co]):
    pass


class Decorates(Generic[P, T]):
    pass


class Shape(Generic[typing.Unpack[Ts]]):
    pass


class Node(Generic[T]):
    children: list[Node[T]]

    def __init__(self, *children: Node[T]) -> None:
        self.children = list(children)


Old = collections.namedtuple("Old", ["x", "y"], defaults=[2])
add("named tuple", Named(1), lambda v: (v, v.both, v._replace(b="y"), Named._field_defaults))
add("named tuple class", Named, lambda v: (v(2), v._fields, v.__annotations__.keys()))
add("collections.namedtuple", Old(1), lambda v: (v, v._asdict(), type(v)(5)))
add("typed dict", Keys, lambda v: (v(a=1), sorted(v.__optional_keys__), typing.is_typeddict(v)))
add("typed dict below another", MoreKeys, lambda v: (sorted(v.__required_keys__), v(c=1)))
add("protocol", Speaks, lambda v: v._is_protocol)
add("protocol checked", Checked, lambda v: (isinstance(Dog(), v), isinstance(3, v)))
add("protocol implemented", Cat, lambda v: (v().speak(), Speaks in v.__mro__))
add("generic", Box, lambda v: (v(1).value, v.__parameters__, v[int]))
add("generic object", Box([1]), lambda v: (v.value, type(v).__name__))
add("generic alias", Box[int], lambda v: (v.__args__, v(3).value))
add("generic alias in a hint", list[Box[str]])
add("generic subclass", IntBox, lambda v: (v(3).value, v.__orig_bases__, v.__parameters__))
add("generic of two", Pair[int, str], lambda v: (v.__args__, Pair.__parameters__))
add("generic of a ParamSpec", Decorates, lambda v: (v.__parameters__, v[[int], str]))
add("generic of a TypeVarTuple", Shape, lambda v: (v.__parameters__, v[int, str]))
add("generic of itself", Node(Node(), Node()), lambda v: [len(v.children), type(v.children[0]).__name__])


# --- classes -----------------------------------------------------------------------------------------------------


class Plain:
    """A class."""

    shared: ClassVar[list[int]] = [1]
    count = 0

    def __init__(self, value: int = 1) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def grow(self) -> int:
        self.value += 1
        return self.value

    @classmethod
    def make(cls, value: int) -> Plain:
        return cls(value)

    @staticmethod
    def twice(value: int) -> int:
        return 2 * value

    @property
    def half(self) -> float:
        return self.value / 2

    @half.setter
    def half(self, value: float) -> None:
        self.value = int(2 * value)

    @functools.cached_property
    def slow(self) -> int:
        return self.value * 10

    @functools.cache  # noqa: B019
    def remembered(self) -> int:
        return self.value * 100

    @functools.singledispatchmethod
    def kind(self, _: object) -> str:
        return "object"

    @kind.register
    def _(self, _value: int) -> str:
        return "int"

    added = functools.partialmethod(grow)

    class Inner:
        depth = 2


class Child(Plain):
    def grow(self) -> int:
        return super().grow() + 100

    def __repr__(self) -> str:
        return f"{__class__.__name__}({self.value})"  # type: ignore[name-defined]


class Left(Plain):
    side = "left"


class Right(Plain):
    side = "right"


class Both(Left, Right):
    pass


class Slots:
    __slots__ = ("__weakref__", "_b", "a")

    def __init__(self, a: int = 1) -> None:
        self.a = a
        self._b = 2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots) and self.a == other.a

    __hash__ = None  # type: ignore[assignment]


class MoreSlots(Slots):
    __slots__ = ("c",)


class SlotsAndDict(Slots):
    pass


class Private:
    __slots__ = ("__hidden",)

    def __init__(self) -> None:
        self.__hidden = 7

    def shown(self) -> int:
        return self.__hidden


class OneSlot:
    __slots__ = "only"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 2
    tags: list[str] = dataclasses.field(default_factory=list)
    kind: ClassVar[str] = "point"

    def __post_init__(self) -> None:
        self.sum = self.x + self.y


@dataclasses.dataclass(frozen=True, order=True)
class Frozen:
    x: int
    y: float = dataclasses.field(default=0.5, compare=False)


@dataclasses.dataclass(slots=True)
class Slotted:
    x: int
    next: Slotted | None = None


@dataclasses.dataclass(slots=True, frozen=True)
class FrozenSlotted:
    x: int


@dataclasses.dataclass(slots=True, weakref_slot=True)
class WeakSlotted:
    x: int


@dataclasses.dataclass(slots=True)
class MoreSlotted(Slotted):
    z: int = 3


@dataclasses.dataclass(kw_only=True)
class Keyword:
    a: int
    start: dataclasses.InitVar[int] = 5

    def __post_init__(self, start: int) -> None:
        self.begun = start


@dataclasses.dataclass
class Tree(Generic[T]):
    value: T
    children: list[Tree[T]] = dataclasses.field(default_factory=list)


Made = dataclasses.make_dataclass("Made", [("a", int)], namespace={"double": lambda self: self.a * 2})
Made.__module__ = __name__


class Descriptor:
    def __set_name__(self, owner: type, name: str) -> None:
        REGISTRY.append(name)
        self.name = f"_{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else getattr(instance, self.name, "unset")

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance, self.name, value)


class Described:
    field = Descriptor()


class Plugin:
    plugins: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, name: str, **more: Any) -> None:
        super().__init_subclass__(**more)
        if name in Plugin.plugins:
            raise ValueError("registered twice")
        Plugin.plugins[name] = cls
        REGISTRY.append(name)
        cls.name = name  # type: ignore[attr-defined]


class First(Plugin, name="first"):
    pass


class Second(Plugin, name="second"):
    pass


class Third(Second, name="third"):
    pass


class Meta(type):
    made: ClassVar[list[str]] = []

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **more: Any) -> Meta:
        mcs.made.append(name)
        return super().__new__(mcs, name, bases, {**body, "by": "meta", **more})

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **more: Any) -> None:
        super().__init__(name, bases, body)

    def __call__(cls, *args: Any) -> Any:
        made = super().__call__(*args)
        made.called = True
        return made

    def __len__(cls) -> int:
        return 5

    @property
    def label(cls) -> str:
        return cls.__name__.lower()


class WithMeta(metaclass=Meta, extra=3):
    pass


class BelowMeta(WithMeta):
    pass


class Once(type):
    found: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any) -> Any:
        if cls not in Once.found:
            Once.found[cls] = super().__call__(*args)
        return Once.found[cls]


class Single(metaclass=Once):
    def __reduce__(self) -> Any:
        return Single, ()


class Abstract(abc.ABC):
    @abc.abstractmethod
    def run(self) -> int: ...

    @property
    @abc.abstractmethod
    def name(self) -> str: ...


class Concrete(Abstract):
    def run(self) -> int:
        return 1

    @property
    def name(self) -> str:
        return "concrete"


class Adopted:
    pass


Abstract.register(Adopted)


class Sized(abc.ABC):
    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        return hasattr(other, "__len__") or NotImplemented


class Own(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return len(key)


class OwnList(list[int]):
    name = "own"


class OwnInt(int):
    def __new__(cls, value: int, unit: str = "m") -> OwnInt:
        made = super().__new__(cls, value)
        made.unit = unit  # type: ignore[attr-defined]
        return made


class OwnStr(str):
    __slots__ = ()


class Reduced:
    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return _reduced, (self.value,)


def _reduced(value: int) -> Reduced:
    return Reduced(value + 1)


class Stateful:
    def __init__(self) -> None:
        self.kept, self.lock = 1, threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.Lock()


class NewArguments:
    def __new__(cls, a: int, b: int) -> NewArguments:
        made = super().__new__(cls)
        made.sum = a + b  # type: ignore[attr-defined]
        return made

    def __getnewargs__(self) -> tuple[int, int]:
        return 1, self.sum - 1  # type: ignore[attr-defined]


class Calls:
    def __call__(self, x: int) -> int:
        return x + 1


class Enters:
    def __enter__(self) -> int:
        return 1

    def __exit__(self, *_: object) -> None: ...


class Iterates:
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 2


class Compares:
    def __init__(self, n: int) -> None:
        self.n = n

    def __lt__(self, other: Compares) -> bool:
        return self.n < other.n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compares) and other.n == self.n

    __hash__ = None  # type: ignore[assignment]


Compares = functools.total_ordering(Compares)  # type: ignore[misc]


class Dynamic:
    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Counted:
    made = 0

    def __init__(self) -> None:
        Counted.made += 1
        global CALLS
        CALLS += 1


def _class_of(base: type) -> type:
    class Local(base):  # type: ignore[misc, valid-type]
        def who(self) -> str:
            return f"local {super().twice(2)} {base.__name__}"  # type: ignore[misc]

    return Local


class Recursive:
    def other(self) -> Mutual:
        return Mutual()


class Mutual:
    def other(self) -> Recursive:
        return Recursive()


Recursive.best = Mutual  # type: ignore[attr-defined]
Mutual.best = Recursive  # type: ignore[attr-defined]

CLASSES: tuple[Any, ...] = (
    Plain, Child, Left, Both, Slots, MoreSlots, SlotsAndDict, Private, OneSlot, Point, Frozen, Slotted, FrozenSlotted,
    WeakSlotted, MoreSlotted, Keyword, Tree, Made, Described, Plugin, First, Second, Third, WithMeta, BelowMeta, Single,
    Abstract, Concrete, Sized, Own, OwnList, OwnInt, OwnStr, Reduced, Stateful, NewArguments, Calls, Enters, Iterates,
    Compares, Dynamic, Counted, Recursive, Mutual, Meta, Once, Adopted, Descriptor, Plain.Inner, Dog,
)  # fmt: skip
for kind in CLASSES:
    add(
        f"class {kind.__qualname__}",
        kind,
        lambda v: (
            v.__name__,
            v.__qualname__,
            v.__doc__,
            [b.__name__ for b in v.__mro__],
            type(v).__name__,
            # before Python 3.11.3, dataclass(slots=True) leaves the one of the class that it replaces
            sorted(vars(v).keys() - {"__slotnames__"} - (set() if v.__weakrefoffset__ else {"__weakref__"})),
        ),
    )
add(
    "object",
    Plain(3),
    lambda v: (v.grow(), v.half, v.slow, v.remembered(), v.kind(1), v.kind(""), v.added(), v.twice(4)),
)
add("object of a subclass", Child(3), lambda v: (v.grow(), repr(v), isinstance(v, Plain)))
add("object of two", Both(3), lambda v: (v.side, [b.__name__ for b in type(v).__mro__], v.grow()))
add("object made there", Plain, lambda v: v.make(3).value)
add("object with its class", (Plain(1), Plain), lambda v: type(v[0]) is v[1])
add("bound method", Plain(3).grow, lambda f: f())
add("bound class method", Plain.make, lambda f: f(2).value)
add("static method", Plain.twice, lambda f: f(2))
add("unbound method", Plain.grow, lambda f: f(Plain(3)))
add("property", Plain, lambda v: (v.half.fget(v(3)), v.half.fset is not None))
add("nested class", Plain.Inner, lambda v: (v.depth, v.__qualname__, Plain.Inner is v))
add("nested object", Plain.Inner(), lambda v: v.depth)
add("attribute of a class", Plain, lambda v: (v.shared, v.count))
add("slots", Slots(4), lambda v: (v.a, v._b, hasattr(v, "__dict__"), weakref.ref(v)() is v))
add("slots below slots", MoreSlots(4), lambda v: (v.a, hasattr(v, "c"), hasattr(v, "__dict__")))
add("slots and a dict", SlotsAndDict(4), lambda v: (v.a, v.__dict__))
add("slots that are private", Private(), lambda v: (v.shown(), hasattr(v, "__dict__")))
add("slots refuse", OneSlot(), lambda v: _refusal(lambda: setattr(v, "other", 1)))
add("dataclass", Point(1, tags=["a"]), lambda v: (v, v.sum, dataclasses.asdict(v), dataclasses.replace(v, x=5).sum))
add("dataclass fields", Point, lambda v: [(f.name, f.type) for f in dataclasses.fields(v)])
add("dataclass hints", Slotted, lambda v: sorted(typing.get_type_hints(v)))
add("dataclass factory", Point(1), lambda v: (type(v)(3).tags is type(v)(3).tags, type(v).kind))
add(
    "dataclass frozen",
    Frozen(1),
    lambda v: (v, hash(v) == hash(Frozen(1)), v < Frozen(2), _refusal(lambda: setattr(v, "x", 1))),
)
add(
    "dataclass slots",
    Slotted(1, Slotted(2)),
    lambda v: (v, v.next.x, hasattr(v, "__dict__"), v == Slotted(1, Slotted(2))),
)
add("dataclass slots list", [Slotted(n) for n in range(3)], lambda v: [each.x for each in v])
add("dataclass frozen slots", FrozenSlotted(1), lambda v: (v, hash(v) == hash(FrozenSlotted(1))))
add("dataclass weak slots", WeakSlotted(1), lambda v: (v, weakref.ref(v)() is v))
add("dataclass more slots", MoreSlotted(1), lambda v: (v, v.z, hasattr(v, "__dict__")))
add("dataclass keywords", Keyword(a=1), lambda v: (v, v.begun))
add("dataclass generic", Tree(1, [Tree(2)]), lambda v: (v, Tree[int]))
add("dataclass made", Made(4), lambda v: v.a)
add("descriptor", Described, lambda v: (v.field.name, v().field))
add("descriptor object", Described(), lambda v: (setattr(v, "field", 3), v.field, v.__dict__))
add("subclass hook", First, lambda v: (v.name, sorted(Plugin.plugins), Plugin.plugins["first"] is v))
add("subclass hook below", Third(), lambda v: (v.name, type(v).__mro__[1].__name__))
add("subclass hook once", Plugin, lambda v: len(v.plugins))
add("registry", REGISTRY, len)
add("metaclass", WithMeta, lambda v: (v.by, v.extra, len(v), v.label, v().called))
add("metaclass below", BelowMeta, lambda v: (v.by, len(v), v.label))
add("metaclass ran once", Meta, lambda v: v.made)
add("metaclass object", WithMeta(), lambda v: v.called)
add("singleton", Single(), lambda v: v is Single())
add("abstract", Abstract, lambda v: (sorted(v.__abstractmethods__), _refusal(v)))
add("abstract done", Concrete(), lambda v: (v.run(), v.name, isinstance(v, Abstract)))
add("abstract registered", Adopted(), lambda v: isinstance(v, Abstract))
add("abstract hook", Sized, lambda v: (isinstance([], v), isinstance(3, v)))
add("own dict", Own(a=1), lambda v: (v["abc"], dict(v), v == {"a": 1}))
add("own list", OwnList([1]), lambda v: (v, v.name))
add("own int", OwnInt(3), lambda v: (v + 1, type(v).__name__, v.unit))
add("own str", OwnStr("a"), lambda v: (v + "b", type(v).__name__))
add("reduced", Reduced(3), lambda v: v.value)
add("stateful", Stateful(), lambda v: (v.kept, v.lock.locked()))
add("new arguments", NewArguments(1, 2), lambda v: v.sum)
add("callable", Calls(), lambda v: v(1))
add("context", Enters(), lambda v: v.__enter__())
add("iterable", Iterates(), lambda v: (list(v), v[3], len(v)))
add("total ordering", Compares(1), lambda v: (v < Compares(2), v >= Compares(2), v == Compares(1)))
add("dynamic attributes", Dynamic(), lambda v: v.anything)
add("mutual classes", Recursive, lambda v: type(v().other().other()) is v and v.best.best is v)
add("type", int)
add("type of None", type(None))
add("type of a function", types.FunctionType)
add("module", json, lambda v: v.dumps([1]))
add("module below a package", collections.abc, lambda v: v.Sized.__name__)


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (AttributeError, TypeError) as e:
        return type(e).__name__
    return "none"


# --- enums -------------------------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1
    GREEN = 2
    CRIMSON = 1

    def lower(self) -> str:
        return self.name.lower()

    @classmethod
    def first(cls) -> Color:
        return cls.RED


class Auto(enum.Enum):
    A = enum.auto()
    B = enum.auto()


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


class Text(enum.StrEnum):
    HELLO = "hello"


class Mixed(str, enum.Enum):
    A = "a"


class Mode(enum.Flag):
    READ = 1
    WRITE = 2
    BOTH = 3


class Bits(enum.IntFlag):
    A = enum.auto()
    B = enum.auto()


class Planet(enum.Enum):
    EARTH = (5.9, 6.3)
    MARS = (0.6, 3.3)

    def __init__(self, mass: float, radius: float) -> None:
        self.mass = mass
        self.radius = radius

    @property
    def ratio(self) -> float:
        return self.mass / self.radius


class Coordinate(bytes, enum.Enum):
    def __new__(cls, value: int, label: str) -> Coordinate:
        made = bytes.__new__(cls, [value])
        made._value_ = value
        made.label = label  # type: ignore[attr-defined]
        return made

    X = (0, "x axis")
    Y = (1, "y axis")


class Day(datetime.date, enum.Enum):
    NEW_YEAR = 2024, 1, 1


class Missing(enum.Enum):
    KNOWN = "known"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> Missing:
        return cls.UNKNOWN


class Operation(enum.Enum):
    ADD = "+"

    def __call__(self, a: int, b: int) -> int:
        return a + b


class Labelled(enum.Enum):
    def __str__(self) -> str:
        return f"<{self.name}>"


class Sub(Labelled):
    ONE = 1


class Nested(enum.Enum):
    LIST = [1]  # noqa: RUF012
    FUNCTION = functools.partial(plain, 3)


Functional = enum.Enum("Functional", "A B", module=__name__)
ENUMS: tuple[Any, ...] = (
    Color, Auto, Number, Text, Mixed, Mode, Bits, Planet, Coordinate, Day, Missing, Operation, Labelled, Sub, Nested,
    Functional,
)  # fmt: skip
for kind in ENUMS:
    add(f"enum {kind.__name__}", kind, lambda v: ([m.name for m in v], list(v.__members__), v.__qualname__))
    for member in kind:
        add(
            f"member {kind.__name__}.{member.name}",
            member,
            lambda m: (m.name, str(m), m is type(m)[m.name], {k: v for k, v in vars(m).items() if k[0] != "_"}),
        )
add("enum alias", Color.CRIMSON, lambda m: (m is Color.RED, m.lower(), Color(2), Color.first()))
add("enum flags", Mode.READ | Mode.WRITE, lambda m: (m is Mode.BOTH, Mode.READ in m, ~Mode.READ))
add("enum int flags", Bits.A | Bits.B, lambda m: (m, int(m), list(m)))
add("enum int", Number.TWO, lambda m: (m + 1, m == 2, f"{m}"))
add("enum text", Text.HELLO, lambda m: (m.upper(), m == "hello", f"{m}"))
add("enum with init", Planet.MARS, lambda m: (m.mass, m.ratio, m.value))
add("enum with new", Coordinate.Y, lambda m: (m.label, bytes(m), m.value, Coordinate(1) is m))
add("enum of a date", Day.NEW_YEAR, lambda m: (m.year, m.isoformat()))
add("enum with missing", Missing, lambda v: v("other"))
add("enum callable", Operation.ADD, lambda m: m(1, 2))
add("enum with str", Sub.ONE, str)
add("enum of values", Nested.LIST, lambda m: m.value)
add("enum as a key", {Color.RED: 1}, lambda v: v[Color.RED])


# --- attrs and pydantic ------------------------------------------------------------------------------------------


@attrs.define
class Defined:
    a: int
    b: list[int] = attrs.Factory(list)


@attrs.frozen
class AttrsFrozen:
    a: int = attrs.field(converter=int, validator=attrs.validators.ge(0))


@attrs.define(slots=False)
class AttrsDict:
    a: int = 3


@attrs.define
class AttrsChild(Defined):
    c: int = 4

    @functools.cached_property
    def slow(self) -> int:
        return self.a * 2


class Model(pydantic.BaseModel):
    a: int
    b: list[str] = []
    c: Color = Color.RED

    @pydantic.field_validator("a")
    @classmethod
    def positive(cls, value: int) -> int:
        if value < 0:
            raise ValueError("negative")
        return value


class ModelChild(Model):
    inner: Model | None = None
    _private: int = pydantic.PrivateAttr(default=7)


class ModelOf(pydantic.BaseModel, Generic[T]):
    value: T


class Settings(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    rate: float = pydantic.Field(default=0.1, gt=0)


add("attrs", Defined(1, [2]), lambda v: (v, attrs.asdict(v), hasattr(v, "__dict__"), v == Defined(1, [2])))
add(
    "attrs frozen",
    AttrsFrozen("3"),
    lambda v: (v, hash(v) == hash(AttrsFrozen(3)), _refusal(lambda: setattr(v, "a", 1))),
)
add("attrs dict", AttrsDict(), lambda v: (v, v.__dict__))
add("attrs child", AttrsChild(1), lambda v: (v, v.slow))
add("attrs class", Defined, lambda v: ([a.name for a in attrs.fields(v)], v(3)))
add("pydantic", Model(a=1), lambda v: (v.model_dump(), v == Model(a=1), v.model_copy(update={"a": 2}).a))
add("pydantic class", Model, lambda v: (v(a="5").a, sorted(v.model_fields), v.model_json_schema()["title"]))
add("pydantic validator", Model, lambda v: _invalid(v, a=-1))
add("pydantic child", ModelChild(a=1, inner=Model(a=2)), lambda v: (v.model_dump(), v._private, isinstance(v, Model)))
add("pydantic generic", ModelOf[int](value=3), lambda v: (v.value, type(v).__name__))
add("pydantic settings", Settings(), lambda v: (v.rate, _invalid(type(v), other=1)))


def _invalid(kind: Any, **values: Any) -> int:
    try:
        kind(**values)
    except pydantic.ValidationError as e:
        return e.error_count()
    return 0


# --- exceptions as values ----------------------------------------------------------------------------------------


class Failure(Exception):
    def __init__(self, code: int, *, where: str = "here") -> None:
        super().__init__(f"code {code} at {where}")
        self.code, self.where = code, where


class Fault(OSError):
    def __init__(self, code: int, path: str) -> None:
        super().__init__(code, "bad", path)
        self.extra = 1


@dataclasses.dataclass(frozen=True)
class FrozenFailure(Exception):
    code: int
    text: str = "t"


@dataclasses.dataclass
class DataFailure(Exception):
    code: int


class TwoArguments(Exception):
    def __new__(cls, a: int, b: int) -> TwoArguments:
        return super().__new__(cls, a, b)

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a)
        self.b = b


SIMPLE = (ValueError("bad", 3), KeyError("k"), OSError(5, "no", "f"), FileNotFoundError(2, "no", "f"), StopIteration(3))
for error in (*SIMPLE, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), SystemExit(3), KeyboardInterrupt()):
    add(f"exception {type(error).__name__}", error, lambda e: (repr(e), e.args, getattr(e, "filename", None)))
add(
    "exception group",
    ExceptionGroup("g", [ValueError(1), KeyError(2)]),
    lambda e: [repr(each) for each in e.exceptions],
)
add("exception class", Failure, lambda v: str(v(3)))
add("exception of json", json.JSONDecodeError("bad", "doc", 1), lambda e: (str(e), e.pos))
OWN_ERRORS = (Failure(3, where="there"), Fault(2, "file"), FrozenFailure(1), DataFailure(2), TwoArguments(1, 2))
for error in OWN_ERRORS:
    add(f"exception {type(error).__name__} of the script", error, lambda e: (repr(e), str(e), e.args, sorted(vars(e))))


class Group(ExceptionGroup):
    def __new__(cls, message: str, errors: list[Exception], tag: str) -> Group:
        made = super().__new__(cls, message, errors)
        made.tag = tag
        return made

    def derive(self, errors: list[Exception]) -> Group:
        return Group(self.message, errors, self.tag)


class Decoding(UnicodeDecodeError):
    def __init__(self, why: str) -> None:
        super().__init__("utf-8", b"ab", 0, 1, why)


add(
    "exception group of the script",
    Group("g", [KeyError("x"), Group("in", [ValueError(2)], "inner")], "outer"),
    lambda e: (e.tag, [str(each) for each in e.exceptions], e.subgroup(ValueError).tag, e.exceptions[1].tag),
)
add("exception of bytes of the script", Decoding("why"), lambda e: (str(e), e.object, e.start, e.reason))


class Mark:
    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> str:
        return self.name

    __hash__ = None


MISSING = Mark("MISSING")
add("mark", MISSING, lambda v: (v.name, v is MISSING))
add("mark as a default", lambda v=MISSING: v is MISSING, lambda f: (f(), f(None)))


class Operations(enum.Enum):
    ADD = enum.member(lambda a, b: a + b)
    TWICE = enum.member(functools.partial(plain, 5))

    def __call__(self, *args: int) -> int:
        return self.value(*args)


add("member of a function", Operations.ADD, lambda m: (m(1, 2), m is Operations.ADD, Operations["TWICE"]()))

# --- the rest ----------------------------------------------------------------------------------------------------

VARIABLE = contextvars.ContextVar("VARIABLE", default=5)
EMPTY = contextvars.ContextVar[int]("EMPTY")
LOCAL = _class_of(Plain)


def add_n(n: int) -> Callable[[int], int]:
    total = [0]

    def inner(x: int) -> int:
        total[0] += n
        return x + total[0]

    return inner


def reads_variable() -> int:
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get()


def reads_empty() -> int:
    return EMPTY.get(9)


def writes_globals() -> tuple[int, int]:
    return CALLS, counts()


add("context variable in a function", reads_variable, lambda f: contextvars.Context().run(f))
add("context variable without a default", reads_empty, lambda f: contextvars.Context().run(f))
add("globals of functions", writes_globals, lambda f: (lambda a, b: b - a)(*f()))
add("lambda", lambda x: x + 1, lambda f: f(1))
add("lambda that names a global", lambda: plain(4), lambda f: f())
add("closure", add_n(3), lambda f: (f(1), f(1)))
add("closure over a class", functools.partial(lambda kind: kind.twice(3), Plain), lambda f: f())
add("partial of a lambda", functools.partial(lambda a, b: a - b, 5), lambda f: f(2))
add("local class", LOCAL, lambda v: v(3).who())
add("local object", LOCAL(4), lambda v: (v.value, v.who(), isinstance(v, Plain)))
add("context variable", VARIABLE, lambda v: contextvars.Context().run(v.get))
add("weak dictionary", weakref.WeakValueDictionary(), len)
add(
    "cached lambda",
    functools.lru_cache(maxsize=5)(lambda x: [x]),
    lambda f: (f(1) is f(1), f.cache_parameters()["maxsize"]),
)
add("dispatcher in a function", functools.singledispatch(lambda value: "any"), lambda f: f(3))
add("type in a local list", [LOCAL, LOCAL], lambda v: v[0] is v[1])
add("iterator of itertools", itertools.repeat(3, 2), list) if sys.version_info < (3, 14) else None

# --- the journey -------------------------------------------------------------------------------------------------

ADDRESS = re.compile(r" at 0x[0-9a-f]+|__mp_main__|__main__|tests\.travel_corpus")
Seen = tuple[str, Any]


def text(value: object) -> str:
    """Text to compare, without addresses and without the name of this module."""
    return ADDRESS.sub("@", repr(value))


def look(name: str, thing: Any, ask: Ask) -> Seen:
    """What the thing says there, and the thing. This runs in the other process."""
    try:
        return text(ask(thing)), thing
    except Exception as e:  # noqa: BLE001 - that is the result
        return f"failed: {type(e).__name__}: {e}", thing


def look_by_name(name: str, data: bytes) -> bytes:
    """The same for something that is pickled, as a pool of multiprocessing hangs on what it cannot unpickle."""
    return bytes(ForkingPickler.dumps(look(name, pickle.loads(data), CORPUS[name][1])))


def compared(thing: Any, back: Any) -> list[object]:
    """Whether it is the same object, equal, of the same class, and says the same here as before."""
    with contextlib.suppress(Exception):
        return [back is thing, bool(np.all(back == thing)), type(back) is type(thing)]
    return [back is thing, "no equality", type(back) is type(thing)]


def journey(travel: Callable[[str, Any, Ask], Seen]) -> dict[str, Any]:
    """Send everything there and back."""
    results: dict[str, Any] = {}
    for name, (thing, ask) in itertools.islice(CORPUS.items(), 0, None, int(os.environ.get("EVERY", "1"))):
        try:
            said, back = travel(name, thing, ask)
        except Exception as e:  # noqa: BLE001 - that is the result
            results[name] = f"{type(e).__name__}: {e}"
        else:
            results[name] = [said, compared(thing, back)]
    return results


def peer() -> dict[str, Any]:
    """The same with multiprocessing, by name."""
    import multiprocessing

    from tests import travel_corpus

    with multiprocessing.get_context("spawn").Pool(1) as pool:

        def travel(name: str, thing: Any, ask: Ask) -> Seen:
            data = bytes(ForkingPickler.dumps(thing))
            return pickle.loads(pool.apply_async(travel_corpus.look_by_name, (name, data)).get(30))  # type: ignore[no-any-return]

        return travel_corpus.journey(travel)


def ours() -> dict[str, Any]:
    """The same with a pool. This module is the script."""
    import skypool as sky

    there = sky.compute(look)
    with sky.ComputePool(slots=1, console="off") as pool:
        return journey(lambda name, thing, ask: there(name, thing, ask) >> pool)


if __name__ == "__main__":
    json.dump(peer() if "peer" in sys.argv else ours(), sys.stdout)
