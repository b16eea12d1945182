"""What a call leaves in its worker process does not spoil the calls that follow."""

from __future__ import annotations

import asyncio
import atexit
import importlib
import io
import os
import pwd
import resource
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from tests.conftest import eventually

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(name="leaving", slots=1, console="off", grace=3) as made:
        yield made


@sky.compute
def touch_at_exit(file: str) -> str:
    """Have the interpreter make a file when it exits, as it then also destroys what C++ libraries have made."""
    atexit.register(Path(file).touch)
    return "done"


@pytest.mark.slow
def test_processes_of_calls_end_without_the_exit_of_an_interpreter(tmp_path: Path) -> None:
    calls = {name: touch_at_exit(str(tmp_path / name)) for name in ("call", "fresh", "gang", "service")}
    with sky.ComputePool(slots=1, console="off") as mine:
        assert calls["call"] >> mine == "done"
        assert calls["fresh"].with_options(fresh=True) >> mine == "done"
        assert calls["gang"].with_options(procs=2) @ mine == ["done", "done"]
        assert mine.service(calls["service"]).result(30) == "done"
    assert not list(tmp_path.iterdir())


def seen() -> dict[str, Any]:
    """What a call can see of the state of its process."""
    old = os.umask(0)
    os.umask(old)
    return {
        "umask": old,
        "folder": os.getcwd(),
        "arguments": [*sys.argv],
        "streams": [type(each).__name__ for each in (sys.stdin, sys.stdout, sys.stderr)],
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "timer": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "handlers": [str(signal.getsignal(each)).split(" at ")[0] for each in (signal.SIGTERM, signal.SIGINT)],
        "patience": socket.getdefaulttimeout(),
        "depth": sys.getrecursionlimit(),
        "cpus": len(os.sched_getaffinity(0)),
        "json": importlib.import_module("json").__name__,
    }


def change(n: int) -> dict[str, Any]:
    """Look at the state, and then change all of it."""
    found = seen()
    os.umask(0o111)
    os.chdir("/")
    sys.argv[:] = ["another", "program"]
    sys.stdout = sys.stderr = sys.stdin = None
    resource.setrlimit(resource.RLIMIT_NOFILE, (77, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    signal.setitimer(signal.ITIMER_REAL, 3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda *_: None)
    socket.setdefaulttimeout(0.001)
    sys.setrecursionlimit(77_777)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return found


def test_a_call_finds_what_the_first_one_found(pool: sky.ComputePool) -> None:
    first = sky.compute(seen)() >> pool
    pid = sky.compute(os.getpid)() >> pool
    for n in range(5):
        assert sky.compute(change)(n) >> pool == first
    assert sky.compute(seen)() >> pool == first
    assert sky.compute(os.getpid)() >> pool == pid  # all of this can be put back
    assert first["umask"] == os.umask(first["umask"])


def wander(n: int) -> tuple[str, int, bool]:
    """Leave another folder, umask and stdout than the call has found."""
    umask = os.umask(0o111)
    found = os.getcwd(), umask, sys.stdout is None
    os.chdir("/")
    sys.stdout = None
    return found


def test_quick_calls_that_travel_together_find_it_too(pool: sky.ComputePool) -> None:
    list(pool.map(abs, range(100)))
    assert len(set(pool.map(wander, range(500)))) == 1


def sometimes(n: int, left: str) -> dict[str, Any]:
    """Leave another state than the call has found, once in 50 calls."""
    found = {
        "folder": os.getcwd(),
        "stdout": type(getattr(sys, "stdout", None)).__name__,
        "depth": sys.getrecursionlimit(),
    }
    found |= {"umask": os.umask(0o22), "wave": importlib.import_module("wave").__name__, "stdin": sys.stdin.closed}
    found |= {
        "nice": os.nice(0),
        "limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "1": stat.S_ISFIFO(os.fstat(1).st_mode),
    }
    if n % 50 == 49:
        exec(left)
    return found


@pytest.mark.parametrize(
    "left",
    [
        "import os; os.chdir('/'); os.umask(0o111)",
        "import os; os.fchdir(os.open('/', os.O_RDONLY))",
        "import sys; del sys.stdout",
        "import sys; sys.setrecursionlimit(77)",
    ],
)
def test_quick_calls_find_it_too_though_the_others_of_their_function_change_nothing(
    pool: sky.ComputePool, left: str
) -> None:
    assert len({str(each) for each in pool.map(sometimes, range(300), [left] * 300)}) == 1


@pytest.mark.parametrize(
    "left",
    [
        "import sys; sys.modules['wave'] = None",
        "import sys; sys.stdin.close()",
        "import os; os.nice(5)",
        "import os; os.dup2(0, 1)",
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (99, r.getrlimit(r.RLIMIT_NOFILE)[1]))",
    ],
)
def test_a_call_after_a_pause_finds_it_too(pool: sky.ComputePool, left: str) -> None:
    call = sky.compute(sometimes)
    seen = [call(1, left) >> pool, call(49, left) >> pool]
    time.sleep(0.01)
    seen.append(call(2, left) >> pool)
    assert seen[0] == seen[2]


def configures() -> tuple[bool, str, int]:
    """Do with the streams of a process what scripts do at their beginning."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)  # type: ignore[union-attr] # they can
    wrapped = io.TextIOWrapper(sys.stdout.detach(), "utf-8", write_through=True)  # type: ignore[union-attr] # as above
    said = wrapped.write("wrapped\n")
    sys.stdout.close()
    return sys.stdout.closed, sys.stdout.encoding, said


def test_the_streams_of_a_call_can_do_what_those_of_python_can(
    pool: sky.ComputePool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sky.compute(configures)() >> pool == (False, "utf-8", 8)
    sky.compute(print)("still open") >> pool
    heard = ""

    def has_come() -> bool:
        nonlocal heard
        heard += capfd.readouterr().out
        return "wrapped" in heard and "still open" in heard

    eventually(has_come)


def unload(n: int) -> str:
    """Use a module that was there from the start, and one that was not, and then block both."""
    import json
    import wave

    said = json.dumps(n) if wave.WAVE_FORMAT_PCM else ""
    block(n)
    return said


def block(n: int) -> None:
    modules: dict[str, Any] = sys.modules
    modules["json"] = modules["wave"] = None


def load(n: int) -> str:
    import json

    return json.dumps(n)


def test_a_module_that_a_call_removed_is_there_for_the_next_one(pool: sky.ComputePool) -> None:
    for n in range(20):
        assert sky.compute(unload)(n) >> pool == str(n)
    assert list(pool.map(unload, range(100))) == [str(n) for n in range(100)]


def test_a_module_that_calls_removed_together_is_there_for_another_function(pool: sky.ComputePool) -> None:
    list(pool.map(block, range(100)))
    assert list(pool.map(load, range(3))) == ["0", "1", "2"]


def redirect(file: str) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)


def test_output_of_the_next_call_is_shown_though_a_call_redirected_its_own(
    pool: sky.ComputePool, tmp_path: Path
) -> None:
    sky.compute(redirect)(str(tmp_path / "log")) >> pool
    echoed = sky.cmd("echo", "hello").with_options(output="capture") >> pool
    assert echoed.output == "hello\n"  # type: ignore[attr-defined]
    assert (tmp_path / "log").read_text() == ""


def test_a_call_can_be_stopped_though_the_one_before_ignored_signals(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute(timeout=0.5)
    def cleans_up() -> None:
        try:
            time.sleep(600)
        finally:
            (tmp_path / "clean").touch()

    sky.compute(change)(0) >> pool
    with pytest.raises(sky.CallTimeout):
        cleans_up() >> pool
    assert (tmp_path / "clean").exists()


async def pause() -> int:
    await asyncio.sleep(0)
    return 1


async def numbers() -> Any:
    for n in range(3):
        await asyncio.sleep(0)
        yield n


def runs_a_loop() -> None:
    asyncio.run(asyncio.sleep(0))


def uses_the_loop() -> int:
    loop = asyncio.get_event_loop()
    try:
        return loop.run_until_complete(pause())
    finally:
        loop.close()
        asyncio.set_event_loop(None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="get_event_loop() makes no loop since Python 3.14")
def test_a_call_after_an_async_one_can_get_an_event_loop(pool: sky.ComputePool) -> None:
    for before in (pause, runs_a_loop, uses_the_loop):
        sky.compute(before)() >> pool
        assert sky.compute(uses_the_loop)() >> pool == 1
    items: Any = sky.compute(numbers)() >> pool
    assert list(items) == [0, 1, 2]
    assert sky.compute(uses_the_loop)() >> pool == 1


# --- devices -------------------------------------------------------------------------------------------------


def stand_in(kind: str) -> None:
    """Put a module in the place of a library for devices, and raise what it raises when its context is broken."""
    torch = sys.modules.setdefault("torch", types.ModuleType("torch"))
    broken: type[Exception] = type("AcceleratorError", (RuntimeError,), {"__module__": "torch"})
    torch.AcceleratorError = broken  # type: ignore[attr-defined]
    match kind:
        case "torch":
            raise broken("device-side assert triggered")
        case "torch before 2.8":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be …")
        case "JAX":
            raise type("XlaRuntimeError", (RuntimeError,), {})("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal …")
        case "CuPy":
            raise type("CUDARuntimeError", (RuntimeError,), {})("cudaErrorIllegalAddress: an illegal memory access")
        case "as a cause":
            try:
                raise broken("device-side assert triggered")
            except broken as e:
                raise ValueError("the step failed") from e
        case "in a group":
            raise ExceptionGroup("both", [ValueError("one"), broken("device-side assert triggered")])
        case "another":
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


@pytest.mark.parametrize("kind", ["torch", "torch before 2.8", "JAX", "CuPy", "as a cause", "in a group"])
def test_a_worker_is_replaced_after_an_error_of_a_device(pool: sky.ComputePool, kind: str) -> None:
    pid = sky.compute(os.getpid)() >> pool
    with pytest.raises(Exception):  # noqa: B017, PT011 - each kind has its own class
        sky.compute(stand_in)(kind) >> pool
    assert sky.compute(os.getpid)() >> pool != pid


def test_a_worker_is_kept_after_other_errors_of_a_library_for_devices(pool: sky.ComputePool) -> None:
    pid = sky.compute(os.getpid)() >> pool
    with pytest.raises(RuntimeError, match="mat1"):
        sky.compute(stand_in)("another") >> pool
    assert sky.compute(os.getpid)() >> pool == pid


def break_context(how: str) -> int:
    """Let a kernel fail an assertion on a real GPU. Returns the pid if the error is not raised."""
    import torch  # pyright: ignore[reportMissingImports]  # it is no part of .[dev]

    values = torch.zeros(4, device="cuda")
    got = values[torch.tensor([9], device="cuda")]
    if how == "raises":
        torch.cuda.synchronize()
    if how == "is swallowed":
        try:
            print(got.item())
        except RuntimeError as e:
            print(type(e).__name__)
    return os.getpid()  # or the kernel fails after the call


def use_context() -> float:
    import torch  # pyright: ignore[reportMissingImports]  # it is no part of .[dev]

    loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4, pin_memory=True)
    return sum(float(each.cuda().sum()) for each in loader)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["raises", "is swallowed", "comes later"])
def test_a_broken_context_of_a_real_gpu_does_not_fail_the_next_call(how: str) -> None:
    pytest.importorskip("torch")
    with sky.ComputePool(name="gpus", slots=1, console="off") as mine:
        assert sky.compute(use_context)() >> mine == 16.0
        pid = sky.compute(os.getpid)() >> mine
        if how == "raises":
            with pytest.raises(RuntimeError, match="assert"):
                sky.compute(break_context)(how) >> mine
        else:
            assert sky.compute(break_context)(how) >> mine == pid
        assert sky.compute(use_context)() >> mine == 16.0
        fresh = sky.compute(os.getpid)() >> mine
        assert fresh != pid
        for _ in range(3):  # a context that works is kept
            assert sky.compute(use_context)() >> mine == 16.0
        assert sky.compute(os.getpid)() >> mine == fresh


def test_calls_and_commands_have_a_home_though_the_client_has_none(tmp_path: Path) -> None:
    script = """
        import os, subprocess, sys
        import skypool as sky

        image = sky.Image(run=[f"cd ~ && pwd > {sys.argv[1]}"])
        with sky.ComputePool(slots=1, console="off", image=image) as pool:
            print(sky.compute(lambda: [os.environ["HOME"], subprocess.getoutput("cd ~ && pwd")])() >> pool)
    """
    env = {name: value for name, value in os.environ.items() if name != "HOME"} | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "said")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert done.stdout == f"{[home, home]}\n", done.stderr
    assert (tmp_path / "said").read_text() == f"{home}\n"


def test_the_functions_for_the_working_folder_travel_as_what_they_are(pool: sky.ComputePool) -> None:
    @sky.compute
    def given(fn: Callable[..., Any]) -> Any:
        return fn, fn is os.chdir, os.chdir in os.supports_fd

    assert given(os.chdir) >> pool == (os.chdir, True, True)
