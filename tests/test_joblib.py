"""joblib's tasks, and scikit-learn's, on the nodes of a pool."""

from __future__ import annotations

import _thread
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from joblib import delayed

import skypool as sky

Parallel: Any = joblib.Parallel  # what is known of its types without stubs is wrong
LARGE = 200_000
"""Numbers of an array that is large for joblib: 1.6 MB."""


class Counting(sky.ComputePool):
    """A pool that notes what was put to its nodes and freed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[str] = []
        self.freed: list[str] = []

    def put(self, value: Any) -> sky.Ref[Any]:
        ref = super().put(value)
        self.sent.append(ref.key)
        return ref

    def drop(self, ref: sky.Ref[Any]) -> None:
        self.freed.append(ref.key)
        super().drop(ref)


@pytest.fixture(scope="module")
def pool() -> Iterator[Counting]:
    counting = Counting(slots=2, console="off")
    with counting:
        yield counting


@pytest.fixture
def backend(pool: Counting) -> Iterator[Any]:
    with sky.joblib.backend(pool) as backend:
        yield backend


def test_a_grid_search_has_the_scores_of_a_plain_one(pool: Counting) -> None:
    # imported here because it takes seconds, and every process collects this file
    from sklearn.datasets import load_digits
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    data, target = load_digits(return_X_y=True)
    search = GridSearchCV(SVC(), {"C": [0.1, 1, 10], "gamma": [1e-3, 1e-4]}, cv=3, n_jobs=-1)
    with sky.joblib.backend(pool):
        there = search.fit(data[:400], target[:400]).cv_results_
    here = search.set_params(n_jobs=1).fit(data[:400], target[:400]).cv_results_
    for name in ("mean_test_score", "std_test_score", "rank_test_score"):
        assert list(there[name]) == list(here[name])
    assert there["params"] == here["params"]


def test_all_tasks_run_on_nodes_also_without_n_jobs(backend: Any) -> None:
    assert os.getpid() not in Parallel()(delayed(os.getpid)() for _ in range(4))


def test_results_have_the_order_of_the_tasks_and_quick_tasks_share_batches(backend: Any) -> None:
    parallel = Parallel(n_jobs=-1)
    assert parallel(delayed(abs)(-n) for n in range(3000)) == list(range(3000))
    assert parallel.n_dispatched_batches < 300


class Failed(Exception):
    """An exception of a task."""


def test_no_task_gives_no_result(backend: Any) -> None:
    assert Parallel(n_jobs=2)(delayed(abs)(n) for n in range(0)) == []


def test_an_exception_comes_as_itself_with_its_traceback_and_stops_the_other_tasks(backend: Any) -> None:
    def task(n: int) -> int:
        if n == 0:
            raise Failed("no luck")
        time.sleep(100)
        return n

    began = time.monotonic()
    with pytest.raises(Failed, match="no luck") as caught:
        Parallel(n_jobs=2)(delayed(task)(n) for n in range(10))
    assert "in task\n" in str(caught.value.__cause__)
    assert Parallel(n_jobs=2)(delayed(abs)(n) for n in range(4)) == [0, 1, 2, 3]  # their slots are free again
    assert time.monotonic() - began < 60


def test_an_argument_that_cannot_be_pickled_is_named(backend: Any) -> None:
    with pytest.raises(sky.PickleError, match=r"type\(0=…\) cannot be sent to another process: TypeError"):
        Parallel(n_jobs=2)(delayed(type)(each) for each in [1, threading.Lock()])


def seen(array: Any) -> tuple[int, int, bool, float]:
    return os.getpid(), id(array), array.flags.writeable, float(array.sum())


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_large_array_of_several_tasks_is_sent_once_and_freed(pool: Counting, backend: Any, wrapped: bool) -> None:
    def task(there: Any) -> tuple[int, int, bool, float]:
        return seen(there["deep"][0] if wrapped else there)

    sent = len(pool.sent)
    array = np.ones(LARGE)
    got = Parallel(n_jobs=2, batch_size=1)(delayed(task)({"deep": [array]} if wrapped else array) for _ in range(8))
    assert len(pool.sent) == sent + 1
    assert pool.freed == pool.sent
    assert {(writeable, total) for _, _, writeable, total in got} == {(False, LARGE)}
    assert len({(process, where) for process, where, _, _ in got}) == len({process for process, *_ in got})


def test_arrays_of_single_tasks_and_small_ones_go_with_their_calls(pool: Counting, backend: Any) -> None:
    sent = len(pool.sent)
    small = np.ones(10)
    tasks = (delayed(seen)(np.full(LARGE, n) if n % 2 else small) for n in range(8))
    got = Parallel(n_jobs=2, batch_size=1)(tasks)
    assert [total for *_, total in got] == [n * LARGE if n % 2 else 10 for n in range(8)]
    assert len(pool.sent) == sent


def test_a_value_that_the_program_has_put_itself_outlives_a_parallel_call(pool: Counting, backend: Any) -> None:
    array = np.ones(LARGE)
    ref = pool.put(array)
    Parallel(n_jobs=2, batch_size=1)(delayed(seen)(array) for _ in range(4))
    assert pool.submit(seen, ref).result()[-1] == LARGE
    pool.drop(ref)


def test_a_parallel_call_in_a_task_runs_in_the_process_of_the_task(backend: Any) -> None:
    def task() -> tuple[int, set[int]]:
        return os.getpid(), set(Parallel(n_jobs=2)(delayed(os.getpid)() for _ in range(4)))

    for process, inner in Parallel(n_jobs=2)(delayed(task)() for _ in range(2)):
        assert inner == {process}


def test_libraries_get_the_share_of_a_slot_of_the_cpus(pool: Counting) -> None:
    def threads() -> set[int]:
        import threadpoolctl

        np.ones((8, 8)) @ np.ones((8, 8))
        return {each["num_threads"] for each in threadpoolctl.threadpool_info()}

    share = max(1, len(os.sched_getaffinity(0)) // 2)
    with sky.joblib.backend(pool) as made:
        Parallel(n_jobs=2, batch_size=1)(delayed(threads)() for _ in range(8))  # loads numpy
        assert all(
            most <= share for found in Parallel(n_jobs=2)(delayed(threads)() for _ in range(4)) for most in found
        )
        with joblib.parallel_config(backend=made, inner_max_num_threads=1):
            assert Parallel(n_jobs=2)(delayed(threads)() for _ in range(2)) == [{1}, {1}]


def test_n_jobs_is_the_most_that_run_at_once() -> None:
    def task() -> tuple[float, float]:
        began = time.monotonic()
        time.sleep(0.1)
        return began, time.monotonic()

    with sky.ComputePool(slots=4, console="off") as pool, sky.joblib.backend(pool) as backend:
        assert [backend.effective_n_jobs(n) for n in (-1, None, -2, 2, 9)] == [4, 4, 3, 2, 9]
        assert joblib.effective_n_jobs(-1) == 4
        for most in (2, 4):
            spans = Parallel(n_jobs=most, batch_size=1)(delayed(task)() for _ in range(12))
            changes = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
            assert max(itertools.accumulate(change for _, change in changes)) <= most


def test_results_come_one_by_one_from_two_parallel_calls_at_once(backend: Any) -> None:
    one = Parallel(n_jobs=2, return_as="generator")(delayed(abs)(-n) for n in range(50))
    two = Parallel(n_jobs=2, return_as="generator_unordered")(delayed(abs)(-n) for n in range(50))
    pairs = list(zip(one, two, strict=True))
    assert [first for first, _ in pairs] == sorted(second for _, second in pairs) == list(range(50))


def test_a_timeout_and_an_interruption_end_the_tasks(backend: Any) -> None:
    with pytest.raises(multiprocessing.TimeoutError):
        Parallel(n_jobs=2, timeout=0.3)(delayed(time.sleep)(100) for _ in range(4))
    timer = threading.Timer(0.5, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        Parallel(n_jobs=2)(delayed(time.sleep)(100) for _ in range(4))
    timer.join()
    assert Parallel(n_jobs=2)(delayed(abs)(n) for n in range(4)) == [0, 1, 2, 3]


def test_a_parallel_object_can_be_used_again_after_an_error(backend: Any) -> None:
    with Parallel(n_jobs=2) as parallel:
        with pytest.raises(ZeroDivisionError):
            parallel(delayed(divmod)(1, n) for n in range(3))
        assert parallel(delayed(divmod)(1, n) for n in (1, 2)) == [(1, 0), (0, 1)]


def test_no_thread_is_left(backend: Any) -> None:
    Parallel(n_jobs=2)(delayed(abs)(n) for n in range(4))
    until = time.monotonic() + 30
    while any(each.name == "skypool-joblib" for each in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_batch_whose_process_is_lost_runs_again_as_often_as_retries_says(pool: Counting, tmp_path: Path) -> None:
    def task(n: int) -> int:
        mark = tmp_path / str(n)
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    with sky.joblib.backend(pool, retries=1):
        assert Parallel(n_jobs=2, batch_size=1)(delayed(task)(n) for n in range(2)) == [0, 1]
    with sky.joblib.backend(pool), pytest.raises(sky.WorkerDied):
        Parallel(n_jobs=2, batch_size=1)(delayed(task)(n) for n in range(2, 4))


def test_progress_is_printed_as_joblib_does(backend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Parallel(n_jobs=2, verbose=1)(delayed(abs)(n) for n in range(4))
    told = capsys.readouterr().err
    assert "Using backend SkypoolBackend with 2 concurrent workers" in told
    assert "4 out of   4" in told


def test_outside_of_the_block_joblib_is_as_before(pool: Counting) -> None:
    before = joblib.parallel.get_active_backend()[0].__class__
    with sky.joblib.backend(pool), sky.joblib.backend(pool):
        pass
    assert joblib.parallel.get_active_backend()[0].__class__ is before


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", ["joblib==1.0.1", "Scikit_Learn [extra] == 0.9 ; python_version > '3'", "cloudpickle===3.0"]
)
@pytest.mark.parametrize("field", ["pip", "requirements"])
def test_an_image_with_another_version_is_refused_before_anything_is_rented(
    line: str, field: str, tmp_path: Path
) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(f"numpy\n{line}  # a comment\n")
    image = sky.Image(pip=[line]) if field == "pip" else sky.Image(requirements=file)
    pool = sky.ComputePool(image=image, console="off")
    with pytest.raises(sky.UsageError, match=r"the image of the pool has .* but this process has"):
        with sky.joblib.backend(pool):
            pass
    assert pool.phase == "planned"


def test_an_image_with_the_same_version_or_none_is_taken() -> None:
    image = sky.Image(pip=[f"joblib=={joblib.__version__}", "scikit-learn>=1.0", "scikit-learn-extra==0.1"])
    from skypool.engines import _versions

    _versions.check_image(image, ["joblib", "scikit-learn"])


@pytest.mark.parametrize(
    ("there", "told"), [("1.0.1", r"joblib 1\.0\.1, but this process has"), (None, "has no joblib")]
)
def test_a_node_with_another_version_is_refused_and_the_pool_that_was_started_for_it_ended(
    there: str | None, told: str, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    if there is not None:
        about = next(tmp_path.glob("lib/python*/site-packages")) / f"joblib-{there}.dist-info" / "METADATA"
        about.parent.mkdir()
        about.write_text(f"Metadata-Version: 2.1\nName: joblib\nVersion: {there}\n")
    pool = sky.ComputePool(sky.Local(python=str(tmp_path / "bin" / "python")), console="off")
    with pytest.raises(sky.UsageError, match=rf"node 0 of pool .* {told}.*pip=\[\"joblib=={joblib.__version__}\"\]"):
        with sky.joblib.backend(pool):
            pass
    assert pool.phase == "ended"


def test_machines_of_strangers_are_refused() -> None:
    pool = sky.ComputePool(trust="data", console="off")
    with pytest.raises(sky.UsageError, match="plain data only"):
        with sky.joblib.backend(pool):
            pass
    assert pool.phase == "planned"


def test_without_joblib_the_error_names_the_extra(pool: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "joblib", None)
    with pytest.raises(sky.UsageError, match=r'pip install "skypool\[joblib\]"'):
        with sky.joblib.backend(pool):
            pass
