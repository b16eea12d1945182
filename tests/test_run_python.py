"""`skypool.run`: programs and calls on machines of their own, from Python."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.errors import (
    BootstrapError,
    CommandFailed,
    ConnectionLost,
    ErrorGroup,
    LaunchError,
    LedgerError,
    LifetimeExceeded,
    NoOffers,
    PickleError,
    StillRunning,
    TransferError,
    UsageError,
    WorkerDied,
)
from skypool.rental.ledger import Ledger
from skypool.runs.program_run import ProgramRun
from skypool.testing import FakeCloud, Stock

pytestmark = pytest.mark.usefixtures("own_state")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    monkeypatch.chdir(root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


@sky.compute
def halved(x: int) -> float:
    print("halving", x)
    return 84 / x


@sky.compute
def counted(n: int) -> Iterator[int]:
    yield from range(n)


@sky.compute
def exits() -> None:
    os._exit(3)


@sky.compute
def locked() -> object:
    print("it is locked")
    return threading.Lock()


@sky.compute
def told(name: str) -> None:
    print("it is", os.environ[name])


def test_a_script_runs_with_its_project_and_what_it_prints_is_shown_and_kept(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "word.py").write_text("WORD = 'gr\u00fcn'\n")
    (project / "train.py").write_text(
        "import os, sys, word\n"
        "print(word.WORD, os.environ['DEPTH'])\n"
        "print('to stderr', file=sys.stderr)\n"
        "os.makedirs('out'); open('out/model', 'w').write('weights')\n"
    )
    done = sky.run("train.py", env={"DEPTH": "3"}, save="out", name="my-run")
    assert (done.state, done.returncode, done.wait(), done.name, done.usd) == ("succeeded", 0, 0, "my-run", 0)
    assert sorted(done.output.splitlines()) == ["gr\u00fcn 3", "to stderr"]
    assert done.result() is None
    assert (project / "out" / "model").read_text() == "weights"
    out, err = capsys.readouterr()
    assert out == "gr\u00fcn 3\n"
    assert "to stderr\n" in err
    assert "saved    1 file to out\n" in err


def test_words_are_read_as_on_a_command_line_and_a_failure_is_raised_if_asked(project: Path) -> None:
    (project / "tool.py").write_text("import sys\nprint('about to fail', sys.argv[1:])\nsys.exit(7)\n")
    done = sky.run(["-m", "tool", "--epochs", "3"])
    assert (done.state, done.returncode) == ("failed", 7)
    with pytest.raises(CommandFailed, match=r"exited with status 7\n.*\n  about to fail \['--epochs', '3'\]") as failed:
        sky.run([Path("tool.py"), "--epochs", "3"], check=True)
    assert failed.value.returncode == 7
    assert sky.run(["sh", "-c", "kill -9 $$"]).returncode == 137
    with pytest.raises(CommandFailed, match="killed by SIGKILL"):
        sky.run(["sh", "-c", "kill -9 $$"], check=True)
    with pytest.raises(CommandFailed, match="could not be started"):
        sky.run(["no-such-command"])


def test_machines_that_stay_are_asked_for_with_the_key_that_was_given(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "train.py").write_text("print('it')\n")
    monkeypatch.delenv("SKYPOOL_FAKE_KEY", raising=False)
    cloud = FakeCloud(tmp_path / "cloud", key="sesame")
    names = [sky.run("train.py", cloud, budget=10, linger="10m").name for _ in range(2)]
    assert names[0] == names[1]
    monkeypatch.setenv("SKYPOOL_FAKE_KEY", "sesame")
    sky.ComputePool.attach(names[0]).stop()


def test_what_is_saved_comes_to_the_folder_of_the_call_though_the_program_moves_on(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "train.py").write_text("import os\nos.mkdir('out')\nopen('out/model', 'w').write('weights')\n")
    prepare = ProgramRun.prepare

    def moves_on(run: ProgramRun) -> dict[int, str]:
        os.chdir(tmp_path)
        return prepare(run)

    monkeypatch.setattr(ProgramRun, "prepare", moves_on)
    assert sky.run("train.py", save="out").returncode == 0
    assert (project / "out" / "model").read_text() == "weights"


def test_a_program_in_several_processes(project: Path) -> None:
    (project / "train.py").write_text("import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    assert sorted(sky.run("train.py", procs=3).output.splitlines()) == [f"[rank {n}] {n} 3" for n in range(3)]
    found = sky.run("train.py", nodes=2, node=1, procs=2).output
    assert sorted(found.splitlines()) == ["[rank 0] 0 2", "[rank 1] 1 2"]


def test_the_value_of_a_call_and_its_exception(capfd: pytest.CaptureFixture[str]) -> None:
    done = sky.run(halved(2))
    assert (done.result(), done.state, done.output) == (42.0, "succeeded", "halving 2\n")
    assert "halving 2" in capfd.readouterr().out
    broken = sky.run(halved(0))
    assert (broken.state, broken.returncode, broken.output) == ("failed", 1, "halving 0\n")
    with pytest.raises(ZeroDivisionError):
        broken.result()
    with pytest.raises(ZeroDivisionError):
        sky.run(halved(0), check=True)


def test_a_call_on_rented_machines_is_billed_and_nothing_is_left() -> None:
    done = sky.run(halved(2), "fake", accelerator="H100:8", budget=100)
    assert done.result() == 42.0
    assert done.usd is not None
    assert done.usd > 0
    (record,) = Ledger.here().pools(done.name)
    assert record.ended is not None
    assert all(line.ended for line in record.lines)


def test_secrets_are_neither_shown_nor_kept(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_TOKEN", "very-secret-value")
    done = sky.run(["sh", "-c", "echo $MY_TOKEN; printf very-sec; printf ret-value; printf very"], secrets=["MY_TOKEN"])
    assert done.output == "[secret MY_TOKEN]\n[secret MY_TOKEN]very"
    assert capsys.readouterr().out == done.output


def test_long_output_is_shown_whole_and_its_end_is_kept(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = sky.run(["sh", "-c", "seq 300000"])
    assert len(done.output) == 1_000_000
    assert done.output.endswith("\n300000\n")
    assert capsys.readouterr().out.startswith("1\n2\n3\n")


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("no.py", {}, "there is no script no.py"),
        (
            "train.py",
            {"save": "../out"},
            "save= takes a folder below the current one, such as save='out', not '../out'",
        ),
        ("train.py", {"budget": 0}, "budget (the US dollars that the run may cost) must be more than 0, not 0"),
        ("train.py", {"packages": "numpy"}, "packages must be a list, such as packages=['numpy'], not 'numpy'"),
        ("train.py", {"budget": "12 USD"}, "budget (the US dollars that the run may cost) must be a number"),
        ("train.py", {"nodes": (1, 2)}, "nodes (the number of nodes) must be a whole number, not (1, 2)"),
        ("train.py", {"procs": 0}, "procs (the number of processes on each node) must be at least 1, not 0"),
        ("train.py", {"node": 1}, "there is no node 1 with nodes=1; nodes are counted from 0"),
        ("train.py", {"node": "all"}, "node (the number of a node) must be a whole number, not 'all'"),
        ("train.py", {"procs": 129}, "procs must be at most 128, not 129"),
        ("train.py", {"secrets": ["NO_SUCH"]}, "secrets NO_SUCH: neither the environment nor"),
        ("train.py", {"env": {"DEPTH": 3}}, "the value of 'DEPTH' in env must be a string, not int"),
        ("train.py", {"env": ["DEPTH=3"]}, "env must be a dict from the name of a variable to its value"),
        ("train.py", {"env": {"A=B": "c"}}, "env has 'A=B', which cannot be a variable"),
        ("train.py", {"include": ["../x"]}, "a path that is included must lie below"),
        ("train.py", {"include": ["no"]}, "there is no 'no' in the project"),
        ("train.py", {"packages": [3]}, "packages must be a list of strings, but it has 3"),
        ("train.py", {"image": sky.Image()}, "image= is for calls"),
        ("python train.py", {}, "pass the words of a command line as a list: ['python', 'train.py']"),
        (halved, {}, "halved is a function, not a call; write run(halved(…))"),
        (42, {}, "the target must be a script, a list of words, or a call of a @compute function, not 42"),
        (["train.py", 3], {}, "the target must be a script, a list of words"),
        (["--epochs", "3"], {}, "the first word of the target is a program or -m, not '--epochs'"),
        ([], {}, "name what to run"),
        (
            "train.py",
            {"provider": "fake", "accelerator": "H100:8"},
            "until the program ends; set a limit, as by budget=",
        ),
        (
            halved(1),
            {"provider": "fake", "accelerator": "H100:8"},
            "until the program ends; set a limit, as by budget=",
        ),
        (halved(1), {"save": "out"}, "save= is for programs"),
        ("train.py", {"secrets": {"MY_TOKEN": "x"}}, "secrets must be a list of strings, not dict; the values come"),
        ("train.py", {"save": 3}, "save must be the path of a folder, or a dict from paths to places, not 3"),
        ("python 'train.py", {}, "pass the words of a command line as a list"),
        (halved(1), {"nodes": 2}, "2 nodes would be rented, and halved would run on one of them; leave nodes= out"),
        (halved.with_options(node=[0])(1), {"nodes": 2}, "halved would run on 1 of them"),
        (halved.with_options(procs=2, node="all", min_nodes=3)(1), {"nodes": 2}, "halved needs 3 nodes"),
        (halved(1) & halved(2), {}, "run takes one call"),
        (halved.with_options(node=3)(1), {}, "halved asks for node 3, and 1 node would be rented"),
        (halved(1), {"env": {"A": "b"}}, "env= is for programs"),
        (halved(1), {"procs": 0}, "procs= is for programs"),
        (halved(1), {"yes": True}, "yes= is for programs"),
        (counted(3), {}, "counted is a generator function"),
        (".env.py", {}, "is not sent, because"),
    ],
)
def test_a_mistake_is_told_in_words_of_python_before_anything_is_rented(
    project: Path, target: Any, options: dict[str, Any], said: str
) -> None:
    (project / "train.py").touch()
    (project / ".env.py").touch()
    with pytest.raises(UsageError) as refused:
        sky.run(target, **options)
    assert said in str(refused.value)
    assert Ledger.here().pools() == []


def test_nothing_to_rent_says_where_to_rent(project: Path) -> None:
    (project / "train.py").touch()
    with pytest.raises(NoOffers) as none:
        sky.run("train.py", accelerator="H100:8")
    assert "say where to rent with provider=; `provider='fake'` rehearses it" in none.value.__notes__[0]


@pytest.mark.slow
def test_a_run_that_reaches_its_limit_raises_and_what_it_saved_is_here(project: Path) -> None:
    (project / "train.py").write_text(
        "import os, time\nos.makedirs('out')\n"
        "try:\n    time.sleep(300)\nexcept KeyboardInterrupt:\n    open('out/last', 'w').write('step 9')\n"
    )
    with pytest.raises(LifetimeExceeded, match=r"python train\.py was interrupted, as the lifetime of train-"):
        sky.run("train.py", save="out", max_lifetime=45)
    assert (project / "out" / "last").read_text() == "step 9"


def test_what_cannot_be_fetched_is_no_success(project: Path) -> None:
    (project / "out").write_text("a file is in the way")
    (project / "train.py").write_text(
        "import os\nif os.path.isfile('out'): os.remove('out')\n"
        "os.makedirs('out', exist_ok=True)\nopen('out/a', 'w').write('b')\n"
    )
    assert sky.run("train.py", save="out").returncode == 125
    with pytest.raises(TransferError, match="saved was not fetched"):
        sky.run("train.py", save="out", check=True)


def test_a_name_that_is_no_argument_is_refused_by_its_name(project: Path) -> None:
    (project / "train.py").touch()
    with pytest.raises(TypeError, match="unexpected keyword argument 'acelerator'; did you mean accelerator"):
        sky.run("train.py", acelerator="H100")  # type: ignore[call-overload]


def test_a_status_above_128_is_no_signal(project: Path) -> None:
    with pytest.raises(CommandFailed, match="exited with status 200") as failed:
        sky.run(["sh", "-c", "exit 200"], check=True)
    assert (failed.value.returncode, failed.value.signal) == (200, None)
    assert sky.run(["sh", "-c", "exit 200"]).returncode == 200


def test_a_call_whose_process_ends_has_failed_by_itself() -> None:
    done = sky.run(exits())
    assert (done.state, done.returncode) == ("failed", 1)
    with pytest.raises(WorkerDied, match="exited with code 3"):
        done.result()


def test_a_machine_that_cannot_be_set_up_for_a_call_raises_though_its_failures_are_returned() -> None:
    with pytest.raises(BootstrapError):
        sky.run(halved(2), image=sky.Image(run=["false"]))


def test_secrets_of_an_image_are_not_kept(capfd: pytest.CaptureFixture[str]) -> None:
    done = sky.run(told("MY_TOKEN"), image=sky.Image(secrets={"MY_TOKEN": "very-secret-value"}))
    assert done.output == "it is [secret MY_TOKEN]\n"


def test_errors_show_no_secrets(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "very-secret-value")
    with pytest.raises(CommandFailed) as failed:
        sky.run(["no-such-very-secret-value"], secrets=["MY_TOKEN"])
    shown = f"{failed.value} {failed.value.args} {vars(failed.value)}"
    chain = [line for line in traceback.format_exception(failed.value) if 'sky.run(["no-such' not in line]
    assert "very-secret-value" not in shown + "".join(chain)
    assert "no-such-[secret MY_TOKEN]" in shown
    with pytest.raises(CommandFailed) as failed:
        sky.run(["sh", "-c", "false # very-secret-value"], secrets=["MY_TOKEN"], check=True)
    assert "very-secret-value" not in f"{failed.value} {failed.value.args} {vars(failed.value)}"


def test_who_reads_slowly_or_not_at_all_holds_up_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow:
        def write(self, text: str) -> None:
            time.sleep(1)
            raise ValueError("it is closed")

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stdout", Slow())
    (project / "train.py").write_text("for n in range(200): print(n, flush=True)\n")
    done = sky.run("train.py")
    assert done.output.splitlines() == [str(n) for n in range(200)]
    assert done.returncode == 0
    err = capsys.readouterr().err
    assert err.count("sys.stdout cannot be written any more (ValueError: it is closed); Run.output has the end") == 1
    assert "end      status 0 after" in err


def test_a_ledger_that_cannot_be_read_costs_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(_: object) -> None:
        raise LedgerError("the disk is gone")

    monkeypatch.setattr(sky.ComputePool, "receipt", property(unreadable))
    done = sky.run(halved(2))
    assert (done.result(), done.usd) == (42.0, None)


def test_what_has_been_spent_is_told_also_of_a_run_that_fails(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CommandFailed):
        sky.run(["no-such-command"])
    assert "end      status 125 after " in capsys.readouterr().err


def test_the_ceiling_of_all_pools_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPOOL_MAX_USD", "500")
    assert sky.run(halved(2), "fake", accelerator="H100:8").result() == 42.0


def test_a_budget_for_machines_that_cannot_end_themselves_says_so(project: Path, tmp_path: Path) -> None:
    cloud = FakeCloud(tmp_path / "cloud", [Stock("small", usd_per_hour=1.0)], ends_itself=False)
    with pytest.raises(UsageError, match=r"cannot end itself.*Budget\(5, best_effort=True\), or --best-effort$"):
        sky.run(["true"], cloud, budget=5)
    assert sky.run(["true"], cloud, budget=sky.Budget(5, best_effort=True)).returncode == 0
    assert sky.run(halved(2), cloud, budget=sky.Budget(5, best_effort=True)).result() == 42.0


def test_a_value_is_not_lost_if_the_end_of_the_machines_is_not_proved(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = sky.ComputePool.stop

    def unproved(pool: sky.ComputePool, *args: Any, **more: Any) -> None:
        end(pool, *args, **more)
        raise StillRunning("one machine may still run")

    monkeypatch.setattr(sky.ComputePool, "stop", unproved)
    with pytest.raises(StillRunning) as failed:
        sky.run(halved(2))
    assert vars(failed.value)["run"].result() == 42.0
    (project / "train.py").write_text("print('it is done')\n")
    with pytest.raises(StillRunning) as failed:
        sky.run("train.py")
    done = vars(failed.value)["run"]
    assert (done.returncode, done.output) == (0, "it is done\n")


def test_an_argument_that_cannot_be_sent_is_told_before_anything_is_rented() -> None:
    with pytest.raises(PickleError):
        sky.run(halved(threading.Lock()), "fake", accelerator="H100:8", budget=100)  # type: ignore[arg-type]
    assert Ledger.here().pools() == []


def test_a_result_that_cannot_be_sent_is_a_failure_of_the_call() -> None:
    done = sky.run(locked())
    assert (done.state, done.output) == ("failed", "it is locked\n")
    with pytest.raises(PickleError):
        done.result()


def test_a_call_runs_on_all_nodes_if_it_says_so() -> None:
    call = halved(2).with_options(node="all")
    assert sky.run(call, nodes=2).result() == [42.0, 42.0]


def test_output_that_cannot_be_kept_until_it_is_shown_is_told(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    done = sky.run(["echo", "hello"])
    assert done.output == "hello\n"
    assert "6 bytes of output are not shown, as they could not be kept here: No space left" in capsys.readouterr().err


def test_a_machine_that_cannot_be_replaced_is_no_failure_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (LaunchError("none is left"), ErrorGroup("two", [ConnectionLost("it is gone"), ValueError("x")])):

        def lost(_: object, __: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(sky.ComputePool, "run", lost)
        with pytest.raises(type(error)) as failed:
            sky.run(halved(2))
        assert vars(failed.value)["run"].state == "failed"


def test_a_value_is_not_lost_if_the_end_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    end = sky.ComputePool.stop

    def interrupted(pool: sky.ComputePool, *args: Any, **more: Any) -> None:
        end(pool, *args, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(sky.ComputePool, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt) as stopped:
        sky.run(halved(2))
    assert vars(stopped.value)["run"].result() == 42.0


def test_a_program_that_failed_is_told_before_a_folder_that_was_not_fetched(project: Path) -> None:
    (project / "out").write_text("a file is in the way")
    (project / "train.py").write_text(
        "import os, sys\nos.remove('out')\nos.makedirs('out')\nopen('out/a', 'w').write('b')\nsys.exit(7)\n"
    )
    with pytest.raises(CommandFailed, match="exited with status 7") as failed:
        sky.run("train.py", save="out", check=True)
    assert "what it saved was not fetched: " in failed.value.__notes__[0]


def test_secrets_of_files_that_are_sent_are_not_in_an_error(project: Path) -> None:
    (project / ".env").write_text("KEY=env-secret-value\n")
    with pytest.raises(CommandFailed) as failed:
        sky.run(["sh", "-c", "exit 3 # env-secret-value"], include=[".env"], check=True)
    assert "env-secret-value" not in f"{failed.value} {vars(failed.value)}"


def test_all_of_the_output_comes_through_a_pipe_that_does_not_block(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, into = os.pipe()
    os.set_blocking(into, False)
    got: list[bytes] = []

    def read() -> None:
        while data := os.read(out, 10_000):
            got.append(data)
            time.sleep(0.002)

    reader = threading.Thread(target=read)
    reader.start()
    with open(into, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        done = sky.run(["seq", "100000"])
        monkeypatch.undo()
    reader.join()
    os.close(out)
    assert b"".join(got).decode() == "".join(f"{n}\n" for n in range(1, 100_001)) == done.output


def test_of_a_slice_with_several_hosts_a_call_uses_all_or_is_refused(tmp_path: Path) -> None:
    with FakeCloud(tmp_path / "cloud", (Stock("v5p-16", 3600.0, "v5p-16"),)) as cloud:
        with pytest.raises(UsageError, match="2 nodes would be rented, and halved would run on one of them"):
            sky.run(halved(2), cloud, accelerator="v5p-16", budget=10_000)
        assert cloud.count() == 0
