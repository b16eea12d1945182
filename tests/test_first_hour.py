"""What somebody meets in the first hour: mistakes in a script and on the command line are told with what to do."""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skypool as sky
from skypool.drivers.registry import driver
from skypool.errors import UsageError
from skypool.model import Instance, Offer
from skypool.rental.ledger import Ledger
from skypool.testing import FakeCloud
from tests.test_ledger import change

ROOT = Path(__file__).parent.parent
SKYPOOL = str(Path(sys.executable).with_name("skypool"))


@sky.compute
def work(n: int) -> int:
    return n


def plain(n: int) -> int:
    return n


@pytest.fixture(scope="module")
def pool() -> sky.ComputePool:
    return sky.ComputePool(console="off")  # it is never started


OPERATORS = [operator.rshift, operator.matmul, operator.gt, operator.and_]


# --- what is no call -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", OPERATORS)
def test_a_function_that_was_not_called_says_how_to_call_it(pool: sky.ComputePool, sent: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"call it, work\(…\)"):
        sent(work, pool)


@pytest.mark.parametrize("sent", OPERATORS)
@pytest.mark.parametrize("value", [plain(2), None, "x", np.ones(3)], ids=repr)
def test_the_value_of_a_plain_function_says_to_decorate_it(
    pool: sky.ComputePool, sent: Callable[..., Any], value: object
) -> None:
    with pytest.raises(UsageError, match=r"add @sky\.compute above the function"):
        sent(value, pool)


@pytest.mark.parametrize("sent", OPERATORS)
def test_a_list_of_calls_says_to_gather_them(pool: sky.ComputePool, sent: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"sky\.gather\(\*calls\) >> pool"):
        sent([work(1), work(2)], pool)


@pytest.mark.filterwarnings("error")  # no warning of a call that was never sent, beside the error
def test_a_pool_before_its_call_or_calls_that_are_not_unpacked_say_what_to_write(pool: sky.ComputePool) -> None:
    for calls in (work(1), work(1) & work(2)):
        with pytest.raises(UsageError, match=r"a call comes before its pool: write `call > pool`"):
            operator.lt(pool, calls)
    with pytest.raises(UsageError, match=r"sky\.gather\(\*calls\)"):
        sky.gather(work(n) for n in range(3))  # type: ignore[call-overload]  # that is what is tested
    with pytest.raises(UsageError, match=r"is not a pool"):
        operator.gt(work(1) & work(2), 3)


def test_a_plain_function_says_to_decorate_and_call_it(pool: sky.ComputePool) -> None:
    with pytest.raises(UsageError, match=r"add @sky\.compute above plain, and call it"):
        operator.rshift(plain, pool)


def test_calls_are_joined_with_calls_only() -> None:
    with pytest.raises(UsageError, match=r"call it, work\(…\)"):
        operator.and_(work(1), work)
    with pytest.raises(UsageError, match="& takes a call"):
        operator.and_(3, work(1))


# --- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("timeout", "seconds"), [("5m", 300.0), (timedelta(minutes=2), 120.0), (7, 7)])
def test_a_timeout_is_a_duration_as_elsewhere(timeout: Any, seconds: float) -> None:
    made = work.with_options(timeout=timeout, grace="10s")
    assert (made.options.timeout, made.options.grace) == (seconds, 10.0)
    assert '"timeout":' in made.options.header
    with pytest.raises(UsageError, match="timeout must be a duration such as 90"):
        work.with_options(timeout="soon")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: sky.AWS(regions=["eu-west-1"]), r"AWS has no setting 'regions'; did you mean region\?"),  # type: ignore[call-arg]
        (lambda: sky.Local(1, 2, 3, 4, 5, 6, 7, 8, 9), r"Local\(…\) are wrong: too many positional arguments"),  # type: ignore[call-arg,arg-type]
        (lambda: FakeCloud(machine=False), r"FakeCloud has no setting 'machine'; did you mean machines\?"),  # type: ignore[call-arg]
        (lambda: sky.ComputePool(acelerator="H100"), r"no argument 'acelerator'; did you mean accelerator\?"),  # type: ignore[call-arg]
    ],
)
def test_a_setting_that_does_not_exist_is_told_with_the_nearest(made: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        made()


def test_drivers_are_made_by_their_names_as_before() -> None:
    assert driver("local") == sky.Local()


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("torch, numpy", "['torch', 'numpy']"),
        ("torch,numpy", "['torch', 'numpy']"),
        ("torch>=2,<3 numpy", "['torch>=2,<3', 'numpy']"),
        ("torch numpy", "['torch', 'numpy']"),
    ],
)
def test_several_packages_in_one_text_are_told_apart(text: str, meant: str) -> None:
    with pytest.raises(ValueError, match="did you mean") as caught:
        sky.Image(pip=text)
    assert f"did you mean {meant}?" in str(caught.value)


# --- the command line ----------------------------------------------------------------------------------------


def skypool(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SKYPOOL, *args], text=True, timeout=60, stdin=subprocess.DEVNULL, cwd=ROOT, **more)


def heard(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return skypool(*args, capture_output=True, env={**os.environ, **env})


@pytest.mark.slow
def test_the_program_tells_its_version_and_helps() -> None:
    assert heard("--version").stdout == "skypool 0.1.0\n"
    for args in (["-h"], ["ps", "-h"]):
        done = heard(*args)
        assert (done.returncode, done.stderr) == (0, "")
        assert "Usage: skypool" in done.stdout
    assert "--install-completion" in heard("--help").stdout
    assert (
        "_SKYPOOL_COMPLETE" in heard("--show-completion", "bash").stdout + heard(_SKYPOOL_COMPLETE="source_bash").stdout
    )


def test_python_runs_it_as_a_module() -> None:
    run = [sys.executable, "-m", "skypool", "--version"]
    assert subprocess.run(run, capture_output=True, text=True, cwd=ROOT, timeout=60).stdout == "skypool 0.1.0\n"


@pytest.mark.parametrize("args", [["accelerators"], ["ps"], ["ps", "--json"], ["--help"], ["doctor", "-p", "local"]])
def test_a_full_disk_behind_standard_output_is_one_line(args: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = skypool(*args, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert (
        done.stderr
        == "error: standard output cannot be written: No space left on device; the rest of the output is lost\n"
    )


@pytest.mark.needs("openssh")
@pytest.mark.parametrize("args", [["accelerators"], ["doctor"], ["ps"], ["plan", "-p", "local"], ["--help"]])
def test_a_terminal_that_knows_ascii_only_gets_all_of_it(args: list[str]) -> None:
    done = heard(*args, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", TERM="dumb")
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


@pytest.mark.needs("openssh")
def test_the_doctor_says_one_fact_once() -> None:
    nothing = {"AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}
    told = heard("doctor", "-p", "aws", AWS_EC2_METADATA_DISABLED="true", **nothing).stdout
    assert told.count("`aws configure`") == 1, told
    assert told.count("BAD") == 1, told


def test_ps_forgets_a_pool_that_cost_nothing_once_its_lease_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ledger = Ledger.here()
    for pool, price in (("here", 0.0), ("there", 3.6)):
        offer = Offer("local", "local", usd_per_hour=price)
        ledger.begin(pool, pool, lease=600)
        ledger.intend(pool, f"{pool}-0", offer, (0,))
        ledger.rented(pool, f"{pool}-0", [Instance("local", pool, pool, 0, offer=offer)])
    change(ledger.file, "UPDATE pools SET birth = 'another', beat = beat - 300")
    assert {line.split()[0] for line in heard("ps").stdout.splitlines()[1:3]} == {"here", "there"}
    change(ledger.file, "UPDATE pools SET beat = beat - 700")
    assert [each["pool"] for each in json.loads(heard("ps", "--json").stdout)] == ["there"]


def test_money_is_counted_since_some_time_ago() -> None:
    assert heard("cost", "--since", "7d ago").returncode == 0
