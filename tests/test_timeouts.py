"""What counts towards the timeout of a call, and what comes of a call that exceeds it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

import skypool as sky


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(name="timely", slots=1, console="off", grace=3) as made:
        yield made


# --- values that come too late -------------------------------------------------------------------------------


def native() -> int:
    ctypes.CDLL(None).sleep(600)  # a signal ends it early
    return 1


def defiant() -> int:
    """Go on in spite of the stop, and return within the grace."""
    with contextlib.suppress(BaseException):
        time.sleep(600)
    return 2


def between_looks() -> int:
    time.sleep(0.53)  # the agent looks each 0.1 s
    return 3


async def awaited() -> int:
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        await asyncio.sleep(0.6)
    return 4


def failing() -> None:
    try:
        time.sleep(600)
    finally:
        raise ValueError("the clean-up failed")


@pytest.mark.parametrize("procs", [None, 1], ids=["call", "gang"])
@pytest.mark.parametrize("function", [native, defiant, between_looks, awaited, failing])
def test_what_comes_after_the_timeout_is_discarded(pool: sky.ComputePool, function: object, procs: int | None) -> None:
    call = sky.compute(function, timeout=0.5, procs=procs)()  # type: ignore[call-overload]
    with pytest.raises(sky.CallTimeout) as caught:
        call >> pool
    noted = "when its time was over, it raised ValueError: the clean-up failed"
    assert (noted in getattr(caught.value, "__notes__", [])) is (function is failing)
    assert sky.compute(abs)(5) >> pool == 5


def test_calls_that_travel_together_are_each_held_to_their_timeout(pool: sky.ComputePool) -> None:
    def slow(n: int) -> int:
        time.sleep(0.25 if n == 20 else 0)
        return n

    quick = sky.compute(slow, timeout=0.2)
    list(pool.map(quick, range(10)))
    errors = [each.exception(60) for each in [pool.submit(quick, n) for n in range(40)]]
    assert [n for n, each in enumerate(errors) if isinstance(each, sky.CallTimeout)] == [20]
    assert not any(errors[:20] + errors[21:])


def test_a_value_in_time_is_kept_though_its_processes_take_long_to_end(pool: sky.ComputePool) -> None:
    def leave() -> int:
        if os.fork() == 0:
            import signal

            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        time.sleep(0.1)
        return 7

    assert sky.compute(leave, timeout=0.5)() >> pool == 7


def stuck() -> None:
    ctypes.PyDLL(None).sleep(600)  # no handler of a signal runs


@pytest.mark.parametrize("procs", [None, 1], ids=["call", "gang"])
def test_the_grace_of_a_call_counts_after_its_timeout_too(pool: sky.ComputePool, procs: int | None) -> None:
    began = time.monotonic()
    with pytest.raises(sky.CallTimeout):
        sky.compute(stuck, timeout=0.5, grace=0.2, procs=procs)() >> pool
    assert time.monotonic() - began < 3  # the grace of the pool


# --- what is printed -----------------------------------------------------------------------------------------


def chatter(end: str) -> None:
    print("before the end")
    os.write(1, b"past Python\n")
    if end == "die":
        os._exit(3)
    if end == "native":
        ctypes.PyDLL(None).sleep(600)
    if end == "defy":
        with contextlib.suppress(BaseException):
            time.sleep(600)
        return
    time.sleep(600)


@pytest.mark.parametrize("end", ["stop", "native", "defy"])
def test_what_was_captured_is_told_when_a_call_takes_too_long(pool: sky.ComputePool, end: str) -> None:
    with pytest.raises(sky.CallTimeout) as caught:
        sky.compute(chatter, timeout=0.5, output="capture", grace=0.5)(end) >> pool
    assert "what the call printed:\nbefore the end\npast Python\n" in caught.value.__notes__


def test_what_was_captured_is_told_when_the_worker_dies(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.WorkerDied, match=r"(?s)before the end.*past Python"):
        sky.compute(chatter, output="capture")("die") >> pool
    captured = sky.compute(print, output="capture")("only this") >> pool
    assert captured.output == "only this\n"  # type: ignore[attr-defined]


def unsendable() -> object:
    print("it has worked")
    return threading.Lock()


@pytest.mark.parametrize("procs", [None, 1], ids=["call", "gang"])
def test_what_was_captured_is_told_when_the_value_cannot_be_sent(pool: sky.ComputePool, procs: int | None) -> None:
    with pytest.raises(sky.PickleError) as caught:
        sky.compute(unsendable, output="capture", procs=procs)() >> pool
    assert "what the call printed:\nit has worked\n" in caught.value.__notes__


def test_what_another_call_has_printed_is_not_told(pool: sky.ComputePool) -> None:
    assert sky.compute(print, output="capture")("of another call") >> pool == sky.Captured(None, "of another call\n")
    with pytest.raises(sky.CallTimeout) as caught:
        sky.compute(chatter, timeout=0.3, output="silent", grace=0.5)("defy") >> pool
    assert not [note for note in caught.value.__notes__ if "printed" in note]


# --- imports -------------------------------------------------------------------------------------------------


def module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)


@sky.compute(timeout=1)
def imports(folder: str, names: list[str], then: float = 0.0, in_thread: bool = False) -> float:
    """Import modules inside the function, and go on for some seconds; how long it took in all."""
    began = time.monotonic()
    sys.path.insert(0, folder)
    for name in names:
        if in_thread:
            thread = threading.Thread(target=importlib.import_module, args=(name,))
            thread.start()
            thread.join()
        else:
            importlib.import_module(name)
    time.sleep(then)
    return time.monotonic() - began


def test_imports_inside_the_function_do_not_count(pool: sky.ComputePool, tmp_path: Path) -> None:
    module(tmp_path, "outer_slow", "import time\ntime.sleep(0.7)\nimport inner_slow\n")
    module(tmp_path, "inner_slow", "import time\ntime.sleep(0.7)\n")
    assert imports(str(tmp_path), ["outer_slow"], 0.5) >> pool > 1.8
    with pytest.raises(sky.CallTimeout, match="imports do not count"):
        imports(str(tmp_path), ["outer_slow"], 600) >> pool
    with pytest.raises(sky.CallTimeout):  # another thread's imports are its own work
        imports(str(tmp_path), ["outer_slow"], in_thread=True) >> pool
    began = time.monotonic()
    with pytest.raises(sky.CallTimeout):
        imports.with_options(procs=1)(str(tmp_path), ["outer_slow"], 600) >> pool
    assert time.monotonic() - began > 2.4


def test_an_import_that_fails_looks_as_in_python(pool: sky.ComputePool, tmp_path: Path) -> None:
    module(tmp_path, "broken_inside", "def f():\n    raise ValueError('inside')\n\nf()\n")
    module(tmp_path, "imports_broken", "import broken_inside\n")

    @sky.compute
    def text(name: str) -> list[str]:
        sys.path.insert(0, str(tmp_path))
        try:
            __import__(name)
        except Exception as e:  # noqa: BLE001 - its traceback is looked at
            return [frame.name for frame in traceback.extract_tb(e.__traceback__)]
        return []

    assert text("imports_broken") >> pool == ["text", "<module>", "<module>", "f"]
    assert text("there_is_none") >> pool == ["text"]


def test_a_child_of_a_call_does_not_move_its_time(pool: sky.ComputePool, tmp_path: Path) -> None:
    module(tmp_path, "slow_in_child", "import time\ntime.sleep(1)\n")

    @sky.compute(timeout=1)
    def fork() -> None:
        sys.path.insert(0, str(tmp_path))
        if os.fork() == 0:
            import slow_in_child  # type: ignore[import-not-found]  # noqa: F401

            os._exit(0)
        time.sleep(1.5)

    with pytest.raises(sky.CallTimeout):
        fork() >> pool
