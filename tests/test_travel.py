"""What a script defines travels to nodes and back, and exists once in each process."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skypool as sky
from skypool.agent.modules import FoundPackage, UserModules
from skypool.calls import futures
from skypool.wire import codec, exceptions
from tests.conftest import ROOT

pytestmark = pytest.mark.timeout(180)
LAMBDA = [False, False, True]
"""It comes back as another function, which is never equal."""
OURS: dict[str, Any] = {
    # multiprocessing sends the bytes of a big-endian array, and numpy turns them round
    "numpy >i8": ["('>i8', [0, 0, 0])", [False, True, True]],
    # a union is made anew, and equal; from Python 3.12 on, it is the same
    "hint 3": ["'typing.Optional[int]'", [sys.version_info >= (3, 12), True, True]],
    # annotations as text name globals that no code uses: these do not travel
    "function hints": ["failed: NameError: name 'Plain' is not defined", [True, True, True]],
    # multiprocessing cannot send these at all, or loses what they say
    "hint 18": ["\"ForwardRef('Plain')\"", [False, True, True]],
    "type of a function": ["\"<class 'function'>\"", [True, True, True]],
    "module": ["'[1]'", [True, True, True]],
    "module below a package": ["'Sized'", [True, True, True]],
    "exception Failure of the script": [
        "(\"Failure('code 3 at there')\", 'code 3 at there', ('code 3 at there',), ['code', 'where'])",
        [False, False, True],
    ],
    "exception Fault of the script": [
        "(\"Fault(2, 'bad')\", \"[Errno 2] bad: 'file'\", (2, 'bad'), ['extra'])",
        [False, False, True],
    ],
    "exception FrozenFailure of the script": [
        "(\"FrozenFailure(code=1, text='t')\", '1', (1,), ['code', 'text'])",
        [False, True, True],
    ],
    "exception TwoArguments of the script": ["('TwoArguments(1)', '1', (1,), ['b'])", [False, False, True]],
    "exception of bytes of the script": [
        "(\"'utf-8' codec can't decode byte 0x61 in position 0: why\", b'ab', 0, 'why')",
        [False, False, True],
    ],
    "mark as a default": ["(True, False)", LAMBDA],
    "member of a function": ["(3, True, 10)", [True, True, True]],
    "lambda": ["2", LAMBDA],
    "lambda that names a global": ["8", LAMBDA],
    "closure": ["(4, 7)", LAMBDA],
    "closure over a class": ["6", LAMBDA],
    "partial of a lambda": ["3", LAMBDA],
    "local class": ["'local 4 Plain'", [True, True, True]],
    "local object": ["(4, 'local 4 Plain', True)", [False, True, True]],
    "type in a local list": ["True", [False, True, True]],
    "context variable": ["5", [True, True, True]],
    "weak dictionary": ["0", [False, True, True]],
    "cached lambda": ["(True, 5)", LAMBDA],
    "dispatcher in a function": ["'any'", LAMBDA],
    "iterator of itertools": ["[3, 3]", [False, False, False]],  # its items travel one by one
}
"""What differs from multiprocessing, and why."""


def corpus(*arguments: str, every: int = 1, path: str = "") -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.travel_corpus", *arguments],
        cwd=ROOT,
        env={**os.environ, "EVERY": str(every), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def differences(ours: dict[str, Any], peers: dict[str, Any]) -> dict[str, Any]:
    expected = {**peers, **{name: OURS[name] for name in OURS if name in peers}}
    return {
        name: (value, expected[name])
        for name, value in ours.items()
        if value != expected[name] and name != "member Nested.FUNCTION"
    }


def test_a_tenth_of_what_scripts_define_travels_as_multiprocessing_sends_what_it_can_import() -> None:
    ours = corpus(every=10)
    assert len(ours) >= 30
    assert differences(ours, corpus("peer", every=10)) == {}


@pytest.mark.slow
def test_everything_that_scripts_define_travels_as_multiprocessing_sends_what_it_can_import() -> None:
    ours = corpus()
    assert len(ours) >= 300
    assert differences(ours, corpus("peer")) == {}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.0.0", "3.1.3"])
def test_everything_travels_with_the_oldest_and_the_newest_cloudpickle(version: str, tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*install, f"cloudpickle=={version}"], check=True, capture_output=True, timeout=120)
    assert differences(corpus(path=str(tmp_path)), corpus("peer")) == {}


# --- what a worker keeps -----------------------------------------------------------------------------------------

SCRIPT = """
import functools, json, sys
import skypool as sky

N = 0
REGISTRY = []
LOADS = []
RATE = 1
SETTINGS = {"rate": 1}
MODEL = [0]
OPTIMIZER = {"of": MODEL}

class C:
    count = 0
    def bump(self):
        global N
        N += 1
        C.count += 1
        return N, C.count
    def rate(self):
        return RATE, SETTINGS["rate"]

class Base:
    def __init_subclass__(cls, table, **more):
        if table in REGISTRY:
            raise ValueError("registered twice")
        REGISTRY.append(table)
        cls.table = table

class Row(Base, table="rows"):
    pass

class Single:
    held = None

@functools.cache
def model():
    LOADS.append(1)
    return object()

def helper():
    return "first"

@sky.compute
def bump(c):
    return c.bump()

@sky.compute
def bump_made_there():
    return C().bump()

@sky.compute
def read():
    return N, C.count

@sky.compute
def registered(*_):
    return REGISTRY, Row.table

@sky.compute
def loads_one(*_):
    return id(model()), len(LOADS)

@sky.compute
def loads_two(*_):
    return id(model()), len(LOADS)

@sky.compute
def rates(c=None):
    return (RATE, SETTINGS["rate"]) if c is None else c.rate()

@sky.compute
def same(x):
    return x

@sky.compute
def helped():
    return helper()

@sky.compute
def trains():
    MODEL[0] += 1
    return MODEL[0]

@sky.compute
def optimizes():
    OPTIMIZER["of"][0] += 10
    return MODEL[0]

@sky.compute
def holds(c):
    Single.held, before = c, Single.held
    return type(before) is type(c)

@sky.compute
def is_main():
    import pickle, typing
    return pickle.loads(pickle.dumps(C())).rate(), typing.get_type_hints(Typed)["a"].__name__

class Typed:
    a: "C"

def double(x):
    return 2 * x

@sky.compute
def spawned(method):
    import multiprocessing, os
    assert os.path.basename(__file__) == "script_of_mine.py"
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(double, [1, 2]), __name__, __package__

results = {}
with sky.ComputePool(slots=1, console="off") as pool:
    c = C()
    results["state of a class"] = [bump(c) >> pool for _ in range(3)]
    results["state here"] = (N, C.count)
    results["another function sees it"] = read() >> pool
    results["made there"] = bump_made_there() >> pool
    back = same(c) >> pool
    results["here after it came back"] = back.bump()
    results["changed here"] = read() >> pool
    results["registered"] = [registered(Row, Row()) >> pool for _ in range(3)]
    results["registered here"] = REGISTRY
    cached = [loads_one() >> pool, loads_one(c) >> pool, loads_two(Row()) >> pool]
    results["loads"] = [len({id for id, _ in cached}), [n for _, n in cached]]
    results["rates before"] = [rates() >> pool, rates(c) >> pool]
    RATE = 2
    SETTINGS["rate"] = 2
    results["rates after"] = [rates() >> pool, rates(c) >> pool]
    values = []
    for RATE in (1, 2, 1, 2):
        values.append(rates() > pool)
    results["rates in turn"] = [value.result()[0] for value in values]
    results["helped"] = [helped() >> pool]
    def helper():
        return "second"
    results["helped"].append(helped() >> pool)
    results["trained"] = [call() >> pool for call in (trains, trains, optimizes, trains, optimizes)]
    results["held"] = [holds(C()) >> pool, holds(C()) >> pool]
    results["main"] = is_main() >> pool
    results["spawned"] = [spawned(method) >> pool for method in ("spawn", "forkserver")]
    old = C
    class C:
        count = 7
    results["new class"] = [holds(C()) >> pool, (same(C()) >> pool).count, type(same(old()) >> pool) is old]
json.dump(results, sys.stdout)
"""


def run_script(folder: Path, source: str, *arguments: str) -> Any:
    path = folder / "script_of_mine.py"
    path.write_text(textwrap.dedent(source))
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = run_script(tmp_path_factory.mktemp("state"), SCRIPT)
    return found


def test_a_worker_keeps_the_state_of_a_class_and_of_globals_while_the_script_does_not_change_them(
    state: dict[str, Any],
) -> None:
    assert state["state of a class"] == [[1, 1], [2, 2], [3, 3]]
    assert state["another function sees it"] == [3, 3]
    assert state["made there"] == [4, 4]


def test_a_result_changes_nothing_of_the_classes_and_globals_of_the_script(state: dict[str, Any]) -> None:
    assert state["state here"] == [0, 0]
    assert state["here after it came back"] == [1, 1]


def test_what_the_script_changes_comes_anew(state: dict[str, Any]) -> None:
    assert state["changed here"] == [1, 1]
    assert state["rates before"] == [[1, 1], [1, 1]]
    assert state["rates after"] == [[2, 2], [2, 2]]
    assert state["helped"] == ["first", "second"]


def test_each_call_finds_the_globals_that_it_was_sent_with(state: dict[str, Any]) -> None:
    assert state["rates in turn"] == [1, 2, 1, 2]


def test_a_class_is_defined_once_with_the_arguments_of_its_definition(state: dict[str, Any]) -> None:
    assert state["registered"] == [[["rows"], "rows"]] * 3
    assert state["registered here"] == ["rows"]


def test_a_cached_function_keeps_its_values_between_calls_and_functions(state: dict[str, Any]) -> None:
    assert state["loads"] == [1, [1, 1, 1]]


def test_globals_that_share_parts_still_do_where_another_function_brings_one_of_them(state: dict[str, Any]) -> None:
    assert state["trained"] == [1, 2, 10, 3, 20]


def test_a_class_that_is_defined_again_is_another_class(state: dict[str, Any]) -> None:
    assert state["held"] == [False, True]
    assert state["new class"] == [False, 7, True]


def test_pickle_and_typing_find_the_classes_of_the_script_on_a_node(state: dict[str, Any]) -> None:
    assert state["main"] == [[2, 2], "C"]


def test_a_function_that_reads_its_file_does_not_make_children_run_the_script(state: dict[str, Any]) -> None:
    assert state["spawned"] == [[[2, 4], "__main__", None]] * 2


@pytest.mark.slow
def test_a_kernel_of_triton_travels(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed; it is no part of .[dev], being 1 GB")
    script = """
        import json, sys
        import skypool as sky, triton, triton.language as tl

        @triton.jit
        def add(x, n, B: tl.constexpr):
            tl.store(x, tl.load(x) + n)

        @sky.compute
        def text():
            return add.src

        with sky.ComputePool(slots=1, console="off") as pool:
            json.dump(text() >> pool, sys.stdout)
    """
    assert run_script(tmp_path, script).startswith("def add(x, n, B: tl.constexpr):")


# --- the text of scripts -----------------------------------------------------------------------------------------

TEXTS = """
import inspect, json, linecache, os, sys
import skypool as sky

def divide(x):
    return 1 / x  # by zero

class Kernel:
    def run(self):
        return inspect.getsource(Kernel.run)

@sky.compute
def text():
    class Local:
        size = 3
    classes = inspect.getsource(Kernel) + inspect.getsource(Local)
    return inspect.getsource(divide), Kernel().run(), inspect.getsourcefile(divide), classes

@sky.compute
def fail():
    return divide(0)

CELL = "def in_a_cell(x):\\n    # what a cell says\\n    return x\\n"
linecache.cache["/tmp/ipykernel_1/2.py"] = (len(CELL), None, CELL.splitlines(keepends=True), "/tmp/ipykernel_1/2.py")
exec(compile(CELL, "/tmp/ipykernel_1/2.py", "exec"))

@sky.compute
def text_of_cell():
    return inspect.getsource(in_a_cell)

@sky.compute
def asleep():
    import time
    time.sleep(60)

results = {}
with sky.ComputePool(slots=1, console="off") as pool:
    text.code(), fail.code()
    os.unlink(__file__)  # so that nobody can read it there
    results["texts"] = text() >> pool
    results["cell"] = text_of_cell() >> pool
    try:
        fail() >> pool
    except ZeroDivisionError as e:
        results["traceback"] = str(e.__cause__)
    future = asleep.with_options(timeout=1)() > pool
    try:
        future.result()
    except sky.CallTimeout as e:
        results["note"] = "".join(e.__notes__)
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = run_script(tmp_path_factory.mktemp("texts"), TEXTS)
    return found


def test_inspect_finds_the_text_of_functions_and_classes_of_a_script_and_of_a_cell_on_a_node(
    texts: dict[str, Any],
) -> None:
    divide, run, file, classes = texts["texts"]
    assert divide == "def divide(x):\n    return 1 / x  # by zero\n"
    assert run.startswith("    def run(self):\n")
    assert file.endswith("script_of_mine.py")
    assert classes.startswith("class Kernel:\n    def run(self):\n")
    assert classes.endswith("    class Local:\n        size = 3\n")
    assert texts["cell"] == "def in_a_cell(x):\n    # what a cell says\n    return x\n"


def test_a_traceback_and_a_stack_name_the_file_and_the_line_of_the_script(texts: dict[str, Any]) -> None:
    assert 'script_of_mine.py", line 6, in divide\n    return 1 / x  # by zero\n' in texts["traceback"]
    assert "script_of_mine.py" in texts["note"]
    assert "<dynamic-code>" not in texts["traceback"] + texts["note"]


# --- values of put, errors, versions -----------------------------------------------------------------------------


def test_no_call_sees_what_another_one_has_changed_in_a_value_of_put() -> None:
    def change(small: Any, array: Any, large: Any) -> Any:
        small.append(4)
        array += 1
        try:
            large += 1
        except ValueError as e:
            return small, float(array[0]), str(e)
        return small, float(array[0]), "changed"

    with sky.ComputePool(slots=1, console="off") as pool:
        refs = pool.put([1, 2, 3]), pool.put(np.zeros(500)), pool.put(np.zeros(100_000))
        said = [pool.submit(change, *refs).result(60) for _ in range(2)]
    assert said == [([1, 2, 3, 4], 1.0, "output array is read-only")] * 2


@dataclasses.dataclass(frozen=True)
class FrozenFailure(Exception):
    code: int


class Fault(OSError):
    def __init__(self, code: int, path: str) -> None:
        super().__init__(code, "is bad", path)
        self.extra = [code]


class TwoArguments(Exception):
    def __new__(cls, a: int, b: int) -> TwoArguments:
        return super().__new__(cls, a, b)

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class Slotted(Exception):
    __slots__ = ("__hidden", "code")

    def __init__(self, code: int) -> None:
        self.code = self.__hidden = code

    def both(self) -> tuple[int, int]:
        return self.code, self.__hidden


class Named(OSError):
    def __init__(self, path: str) -> None:
        self.filename, self.errno = path, 7


def is_whole(error: BaseException) -> bool:
    if isinstance(error, Slotted):
        return error.both() == (4, 4)
    if isinstance(error, Named):
        return (error.filename, error.errno, error.strerror) == ("a path", 7, None)
    if isinstance(error, FrozenFailure):
        return error.code == 3
    if isinstance(error, Fault):
        return (error.errno, error.strerror, error.filename, error.extra) == (5, "is bad", "a file", [5])
    return type(error) is TwoArguments and str(error) == "1 and 2"


@pytest.mark.parametrize(
    "error",
    [FrozenFailure(3), Fault(5, "a file"), TwoArguments(1, 2), Slotted(4), Named("a path")],
    ids=lambda e: type(e).__name__,
)
def test_an_exception_comes_home_whole_raised_or_returned_alone_or_in_a_group(error: Exception) -> None:
    assert is_whole(codec.loads(codec.dumps(error)))
    for raised in (error, ExceptionGroup("both", [error, ValueError("other")])):
        try:
            raise raised from KeyError("cause")
        except type(raised) as e:
            back = exceptions.load_error(exceptions.dump_error(e))
        assert type(back.__cause__) is KeyError
        assert is_whole(back.exceptions[0] if isinstance(back, ExceptionGroup) else back)


def test_exceptions_that_cannot_be_pickled_come_back_returned_as_they_come_raised() -> None:
    def fail(how: str) -> Any:
        import threading

        error = ValueError("held")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        if how == "raised":
            raise error
        return {"errors": [error, KeyError("k")]} if how == "returned" else [error, threading.Lock()]

    with sky.ComputePool(slots=1, console="off") as pool:
        back = pool.submit(fail, "returned").result(60)["errors"]
        with pytest.raises(ValueError, match="held") as raised:
            pool.submit(fail, "raised").result(60)
        with pytest.raises(sky.PickleError, match=r"lock"):
            pool.submit(fail, "a lock, too").result(60)
    assert [repr(each) for each in back] == ["ValueError('held')", "KeyError('k')"]
    assert back[0].__notes__ == ["attributes left out because they cannot be pickled: lock"]
    assert raised.value.__notes__[0] == back[0].__notes__[0]


def test_two_versions_of_numpy_are_named_where_they_meet() -> None:
    modules = UserModules(lambda *_: FoundPackage(None, "", (), ""), "/nowhere")
    modules._numpy = "1.26.4"
    (advice,) = {
        modules.advice(ModuleNotFoundError("no", name=name)) for name in ("numpy._core", "numpy._core.numeric")
    }
    assert f"numpy 1.26.4 and the node numpy {np.__version__}" in advice
    assert modules.advice(ValueError("<class 'numpy.random._pcg64.PCG64'> is not known")) == advice
    assert modules.advice(ValueError("a value of the user's")) == ""
    modules._numpy = f"{np.__version__.partition('.')[0]}.0.0"  # these read each other's pickles
    assert modules.advice(ValueError("<class 'numpy.random._pcg64.PCG64'> is not known")) == ""
    assert futures._remedy(ModuleNotFoundError("no", name="numpy._core")).startswith(
        f"this computer has numpy {np.__version__} and the node numpy 2 or later"
    )


# --- pickles that are kept ---------------------------------------------------------------------------------------

CHANGES = """
import dataclasses, enum, json, sys
import skypool as sky

RATE = 1
TABLE = [1]

class Base:
    def scale(self):
        return RATE

@dataclasses.dataclass
class Point(Base):
    x: int
    y: int = 2
    factor = 1

    def far(self):
        return self.x * self.factor * self.scale() + helper()

class Listed(Base):
    def far(self):
        return TABLE[-1]

class Color(enum.Enum):
    RED = 1
    def text(self):
        return f"{self.name} {RATE}"

def helper():
    return 0

@sky.compute
def far(it):
    return it.far()

@sky.compute
def text(it):
    return it.text()

def now():
    return [far(Point(1)) >> pool, far(Listed()) >> pool, text(Color.RED) >> pool]

seen = []
with sky.ComputePool(slots=1, console="off") as pool:
    seen += [now(), now()]
    RATE = 2
    seen.append(now())
    Point.factor = 10
    seen.append(now())
    TABLE.append(5)
    seen.append(now())
    def helper():
        return 100
    seen.append(now())
    kept, Point.far = Point.far, lambda self: "replaced"
    seen.append(now())
    Base.scale.__code__ = (lambda self: 7).__code__
    Point.far = lambda self: self.scale()
    seen.append(now())
    Color.text = lambda self: "new"
    seen.append(now())
    @dataclasses.dataclass
    class Point:
        x: int
        def far(self):
            return "another class"
    seen.append(now())
json.dump(seen, sys.stdout)
"""


def test_every_change_of_a_class_and_of_what_its_methods_use_reaches_the_node_with_an_argument(tmp_path: Path) -> None:
    assert run_script(tmp_path, CHANGES) == [
        [1, 1, "RED 1"],
        [1, 1, "RED 1"],
        [2, 1, "RED 2"],
        [20, 1, "RED 2"],
        [20, 5, "RED 2"],
        [120, 5, "RED 2"],
        ["replaced", 5, "RED 2"],
        [7, 5, "RED 2"],
        [7, 5, "new"],
        ["another class", 5, "new"],
    ]
