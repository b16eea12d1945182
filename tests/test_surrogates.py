"""Lone surrogates: Python makes them of file names and variables that are not UTF-8. No file or socket takes them."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import skypool as sky
from skypool import events
from skypool.errors import CommandFailed, ProviderError
from skypool.observers import client
from skypool.rental.ledger import Ledger
from skypool.samples import session_file
from skypool.testing import FakeCloud, Stock
from skypool.text import encodable, printable
from tests.conftest import eventually
from tests.watched import Watched

WORD = os.fsdecode(b"caf\xe9")
SHOWN = r"caf\udce9"
BOUND = 30.0


@sky.compute
def fail(word: str) -> None:
    print("reads", word)
    raise ValueError("cannot read " + word)


@sky.compute
def same(value: str) -> str:
    return value


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud(tmp_path / "cloud", [Stock()]) as made:
        yield made


def test_texts_are_made_encodable() -> None:
    assert encodable(WORD) == SHOWN
    assert encodable("café ☕ 🜁") == "café ☕ 🜁"
    assert encodable("\ud83d\ude00") == r"\ud83d\ude00"
    assert printable(WORD) == SHOWN
    assert printable(WORD, colours=True) == SHOWN


def test_an_event_has_no_lone_surrogates() -> None:
    failed = events.CallFailed(pool="p", node=0, call=WORD, error=WORD, time=0.0)
    assert failed == events.CallFailed(pool="p", node=0, call=SHOWN, error=SHOWN, time=0.0)
    assert events.HealthChanged(pool="p", node=0, state="ok", reasons=(WORD, "b")).reasons == (SHOWN, "b")


def test_an_error_at_the_end_leaves_nothing_and_is_kept_and_shown(
    cloud: FakeCloud, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics = sky.Prometheus(port=0)
    with Watched(cloud, name="p", console="plain", metrics=metrics) as pool:
        with pytest.raises(ValueError, match="cannot read caf") as raised:
            fail(WORD) >> pool
        assert str(raised.value) == "cannot read " + WORD, "the program gets what it raised"
        assert same(WORD) >> pool == WORD
        with urllib.request.urlopen(metrics.url, timeout=BOUND) as answer:
            assert answer.status == 200
        assert client.info("p")["pool"] == "p"
        session = pool._begun.rental.session if pool._begun is not None else ""
    assert cloud.count() == 0
    assert [each.error for each in pool.heard(events.CallFailed)] == [f"ValueError: cannot read {SHOWN}"]
    said = capfd.readouterr()
    assert f"cannot read {SHOWN}" in said.err
    assert f"reads {SHOWN}" in said.out
    with closing(sqlite3.connect(session_file.path_of(session))) as book:
        [(error,)] = book.execute("select error from call where outcome = 'failed'")
    assert error == f"ValueError: cannot read {SHOWN}"
    assert not [each.text for each in pool.heard(events.Notice)]
    assert SHOWN in pool.report().html


@pytest.mark.parametrize("command", ["logs p", "cost", "ps", "report p -o {}/r.html"])
def test_commands_show_what_was_kept(cloud: FakeCloud, tmp_path: Path, command: str) -> None:
    with Watched(cloud, name="p") as pool, pytest.raises(ValueError, match="cannot"):
        fail(WORD) >> pool
    argv = [sys.executable, "-m", "skypool", *command.format(tmp_path).split()]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    if command.startswith("logs"):
        assert SHOWN in done.stdout
        assert f"cannot read {SHOWN}" in done.stderr


def test_names_of_functions_and_arguments_of_programs(cloud: FakeCloud) -> None:
    def named() -> int:
        return 7

    named.__name__ = named.__qualname__ = WORD
    with Watched(cloud, name="p") as pool:
        assert pool.submit(named).result(BOUND) == 7
        assert sky.cmd("sh", "-c", 'test "$(printf "caf\\351")" = "$0"', WORD) >> pool == 0
        with pytest.raises(CommandFailed, match="exited with status 3") as raised:
            sky.cmd("sh", "-c", "exit 3", WORD) >> pool
        assert raised.value.returncode == 3
        with pytest.raises(CommandFailed, match="could not be started"):
            sky.cmd(WORD) >> pool
        with pytest.raises(ValueError, match="cannot"):
            fail.with_options(retries=1, retry_on=ValueError)(WORD) >> pool
        pool.map(lambda x: x, [1])
        pool.service(sky.cmd("sh", "-c", "sleep 60", WORD), name=WORD)
    assert cloud.count() == 0
    assert not [each.text for each in pool.heard(events.Notice) if "cannot" in each.text]
    assert [each.call for each in pool.heard(events.CallFailed)][:1] == ["sh"]


def test_values_of_a_stranger_are_what_they_were(cloud: FakeCloud) -> None:
    with Watched(cloud, name="p", trust="data") as pool:
        assert same(WORD) >> pool == WORD
        with pytest.raises(ValueError, match="cannot read"):
            fail(WORD) >> pool
    assert cloud.count() == 0


def test_an_error_of_a_provider_that_ends_the_pool_is_kept(cloud: FakeCloud) -> None:
    cloud.control.refuse(ProviderError(f"no such disk: {WORD}", provider="fake", text=WORD), times=None)
    with pytest.raises(sky.SkypoolError, match="no such disk"):
        sky.ComputePool(cloud, name="p", console="off").start()
    cloud.control.relent()
    [record] = Ledger.here().pools("p")
    assert SHOWN in record.error
    assert record.ended is not None


def test_a_program_in_a_folder_whose_name_is_not_utf8(tmp_path: Path, cloud: FakeCloud) -> None:
    folder = os.path.join(os.fsencode(tmp_path), b"caf\xe9")
    os.mkdir(folder)
    with open(os.path.join(folder, b"helper.py"), "w") as file:
        file.write("def twice(x):\n    return 2 * x\n")
    with open(os.path.join(folder, b"data.txt"), "w") as file:
        file.write("data")
    program = """
        import os, sys
        import skypool as sky
        from skypool.testing import FakeCloud
        @sky.compute
        def f(x):
            import helper
            if x < 0:
                raise ValueError(__file__)
            return helper.twice(x)
        image = sky.Image(env={"WORD": os.fsdecode(b"caf\\xe9")})
        with sky.ComputePool(FakeCloud(sys.argv[1]), name="p", image=image) as pool:
            assert f(2) >> pool == 4
            assert sky.cmd("sh", "-c", 'test "$WORD" = "$0"', os.fsdecode(b"caf\\xe9")) >> pool == 0
            try:
                f(-1) >> pool
            except ValueError as e:
                print("raised")
    """
    with open(os.path.join(folder, b"main.py"), "w") as file:
        file.write(textwrap.dedent(program))
    argv = [os.fsencode(sys.executable), os.path.join(folder, b"main.py"), os.fsencode(str(cloud.state))]
    done = subprocess.run(argv, capture_output=True, cwd=folder)
    assert (done.returncode, done.stdout) == (0, b"raised\n"), done.stderr.decode(errors="replace")
    assert cloud.count() == 0


def test_a_secret_that_is_not_utf8(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", WORD + "-long-enough")
    with Watched(cloud, name="p", image=sky.Image(secrets=["TOKEN"])) as pool:
        assert sky.cmd("sh", "-c", 'test "$TOKEN" = "$0"', WORD + "-long-enough") >> pool == 0
        with pytest.raises(ValueError, match="cannot"):
            fail(WORD + "-long-enough") >> pool
    assert cloud.count() == 0
    eventually(lambda: Ledger.here().pools("p")[0].ended is not None, BOUND)
