"""`skypool run`: programs that know nothing of skypool run on nodes with their project, and nothing is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skypool.errors import UsageError
from skypool.runs.output_files import HEAD, KEPT, STATUS, OutputFiles
from skypool.runs.target import Target
from tests.conftest import eventually, nodes

PROGRAM = [sys.executable, "-c", "import sys; from skypool.cli import main; sys.exit(main())", "run"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "my project"
    root.mkdir()
    monkeypatch.chdir(root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield root
    assert not list(tmp_path.glob("cache/skypool/runs/output/*")), "the output of a run stays on its node"


def started(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*PROGRAM, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(*words: str, input: bytes | None = None) -> tuple[int, bytes, str]:
    """Exit status, stdout and stderr of `skypool run`."""
    done = subprocess.run([*PROGRAM, *words], input=input, capture_output=True, timeout=120)
    return done.returncode, done.stdout, done.stderr.decode()


# --- what is run ---------------------------------------------------------------------------------------------


def test_a_script_runs_where_it_lies_with_its_arguments(project: Path) -> None:
    (project / ".git").mkdir()
    (project / "src").mkdir()
    (project / "src" / "helper.py").write_text("WORD = 'helped'\n")
    (project / "src" / "train.py").write_text(
        "import os, sys, helper\n"
        "print(helper.WORD, sys.argv[1:], os.path.basename(os.getcwd()), sorted(os.listdir('..')))\n"
    )
    (project / "data").write_text("x")
    os.chdir("src")
    status, out, err = run("train.py", "--epochs", "10", "--node", "0")
    assert (status, out.decode()) == (0, "helped ['--epochs', '10', '--node', '0'] src ['data', 'src']\n"), err
    assert "project  3 files, " in err
    assert "rents    local this-machine" in err
    assert "end      status 0 after" in err
    assert nodes() == []


def test_a_module_and_a_command_run_in_the_current_folder(project: Path) -> None:
    (project / "package").mkdir()
    (project / "package" / "__init__.py").touch()
    (project / "package" / "train.py").write_text("import sys; print(__name__, sys.argv[1:])\n")
    assert run("-m", "package.train", "-x")[:2] == (0, b"__main__ ['-x']\n")
    assert run("sh", "-c", "echo $0 $1; pwd | tail -c 5", "a b", "c")[1].startswith(b"a b c\n")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["trian.py"], "there is no script trian.py in .*; did you mean train.py[?]"),
        (["-m"], "-m takes the name of a module"),
        ([""], "name what to run"),
    ],
)
def test_a_wrong_target_is_refused(words: list[str], why: str, project: Path) -> None:
    (project / "train.py").touch()
    with pytest.raises(UsageError, match=why):
        Target.of(words)


def test_a_wrong_target_rents_nothing(project: Path) -> None:
    status, out, err = run("nothing.py")
    assert (status, out) == (125, b"")
    assert "there is no script nothing.py" in err
    status, _, err = run("no-such-program")
    assert status == 125
    assert "`no-such-program` could not be started on node 0" in err


# --- how it ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 11)", 139),
        ("import os; os.kill(os.getpid(), 15)", 143),
        ("1/0", 1),
    ],
)
def test_the_status_is_that_of_the_program(code: str, status: int, project: Path) -> None:
    (project / "train.py").write_text(code)
    done = run("train.py")
    assert done[0] == status
    assert f"end      status {status} after" in done[2]


@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_the_program_and_ends_everything(ends: signal.Signals, project: Path) -> None:
    (project / "train.py").write_text(
        "import time\nprint('at work', flush=True)\ntry:\n    time.sleep(300)\n"
        "except KeyboardInterrupt:\n    print('tidies up', flush=True)\n    raise SystemExit(7)\n"
    )
    with started("train.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"at work\n"
        process.send_signal(ends)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + ends, b"tidies up\n"), err
    assert nodes() == []


def test_who_does_not_read_on_ends_it(project: Path) -> None:
    (project / "train.py").write_text("for n in range(10**9): print(n)\n")
    with started("train.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.wait(60) == 1
    assert nodes() == []


def test_a_child_of_the_program_that_stays_does_not_hold_the_run_up(project: Path) -> None:
    began = time.monotonic()
    assert run("sh", "-c", "sleep 100 & echo done")[:2] == (0, b"done\n")
    assert time.monotonic() - began < 60


# --- what it prints ------------------------------------------------------------------------------------------


def test_output_comes_as_it_is(project: Path) -> None:
    data = bytes(range(256)) * 40_000
    (project / "data").write_bytes(data)
    (project / "train.py").write_text(
        "import shutil, sys\nshutil.copyfileobj(open('data', 'rb'), sys.stdout.buffer)\n"
        "sys.stderr.write('10%\\r20%\\rno newline')\n"
    )
    status, out, err = run("train.py")
    assert status == 0
    assert out == data
    assert "10%\r20%\rno newline" in err


@pytest.mark.slow
def test_much_output_loses_nothing(project: Path) -> None:
    (project / "train.py").write_text("for n in range(200_000): print(f'{n:0999}')\n")
    status, out, _ = run("train.py")
    assert status == 0
    assert out == b"".join(b"%0999d\n" % n for n in range(200_000))


def test_output_files_are_records_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skypool.runs.output_files.SIZE", 100)
    files = OutputFiles(str(tmp_path / "out"))
    for n in range(3 * KEPT):
        files.write(1, b"%080d" % n)
    files.end(-9)
    names = sorted(int(each.name) for each in (tmp_path / "out").iterdir())
    assert names == [*range(names[-1] - KEPT + 1, names[-1] + 1)]
    last = (tmp_path / "out" / str(names[-1])).read_bytes()
    assert last.endswith(HEAD.pack(0, 4) + STATUS.pack(-9))


# --- its project ---------------------------------------------------------------------------------------------


def test_secrets_stay_here_unless_they_are_named(project: Path) -> None:
    (project / ".env").write_text("TOKEN=x")
    (project / "key.pem").write_text("x")
    status, out, err = run("sh", "-c", "ls -A")
    assert (status, out) == (0, b""), err
    assert "not sent: .env, key.pem" in err
    assert run("--include", ".env", "sh", "-c", "ls -A")[1] == b".env\n"
    status, _, err = run("--include", "nothing", "true")
    assert status == 125
    assert "there is no 'nothing' in the project" in err


def test_what_is_gone_here_is_gone_there_and_what_a_program_wrote_stays(project: Path) -> None:
    (project / "old").mkdir()
    (project / "old" / "b.py").touch()
    (project / "a.py").touch()
    assert run("sh", "-c", "ls; mkdir out; touch out/model")[1] == b"a.py\nold\n"
    (project / "old" / "b.py").unlink()
    (project / "old").rmdir()
    (project / "c.py").touch()
    assert run("sh", "-c", "ls; ls out")[1] == b"a.py\nc.py\nout\nmodel\n"


def test_variables_are_given_to_the_program(project: Path) -> None:
    assert run("--env", "A=b c", "--env", "E=", "sh", "-c", 'echo "$A-$E-"')[1] == b"b c--\n"
    status, _, err = run("--env", "A", "true")
    assert status == 125
    assert "--env takes NAME=VALUE, not 'A'" in err


@pytest.mark.slow
def test_the_environment_of_a_project_is_made_once(project: Path) -> None:
    (project / "requirements.txt").write_text("six\n")
    (project / "train.py").write_text("import six, sys; print(six.__name__, sys.prefix)\n")
    status, out, err = run("train.py")
    assert status == 0, err
    assert out.startswith(b"six ")
    assert b"/environments/" in out
    assert run("train.py")[:2] == (0, out)
    (project / "requirements.txt").write_text("no-such-package-of-skypool\n")
    status, out, err = run("train.py")
    assert (status, out) == (125, b"")
    assert "no-such-package-of-skypool" in err


# --- several nodes -------------------------------------------------------------------------------------------


def test_several_nodes_are_a_gang(project: Path) -> None:
    (project / "train.py").write_text(
        "import os\nprint(*[os.environ[each] for each in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'NODE_RANK')])\n"
        "print(*[os.environ[f'PET_{each}'] for each in ('NNODES', 'NODE_RANK', 'NPROC_PER_NODE')])\n"
        "assert os.environ['PET_MASTER_PORT'] == os.environ['MASTER_PORT']\n"
        "raise SystemExit(5 if os.environ['RANK'] == '3' else 0)\n"
    )
    status, out, err = run("--nodes", "2", "--procs", "2", "train.py")
    assert status == 5, err
    assert sorted(out.splitlines()) == sorted(
        [b"0 4 0 0", b"1 4 1 0", b"2 4 0 1", b"3 4 1 1", b"2 0 1", b"2 0 1", b"2 1 1", b"2 1 1"]
    )


# --- what comes back -----------------------------------------------------------------------------------------


def test_what_it_saves_comes_back_also_after_an_error(project: Path) -> None:
    (project / "train.py").write_text(
        "import os\nos.makedirs('out/deep')\nopen('out/deep/model', 'w').write('weights')\n1/0\n"
    )
    status, _, err = run("--save", "out", "train.py")
    assert status == 1
    assert (project / "out" / "deep" / "model").read_text() == "weights"
    assert "saved    1 files to out" in err


# --- money ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYPOOL_FAKE_CLOUD", str(tmp_path / "cloud"))
    return tmp_path / "cloud"


def test_without_a_limit_and_a_terminal_nothing_is_rented(project: Path, fake: Path) -> None:
    (project / "train.py").touch()
    status, _, err = run("--provider", "fake", "--gpu", "H100:8", "train.py", input=b"y\n")
    assert status == 125
    assert "until the program ends; set a limit, as by --budget" in err
    assert "rents    fake " in err
    status, _, err = run("--provider", "fake", "--gpu", "H100:8", "--dry-run", "train.py")
    assert (status, "no limit" in err) == (0, True)


@pytest.mark.slow
def test_a_rehearsal_with_a_budget_runs_and_is_billed(project: Path, fake: Path) -> None:
    (project / "train.py").write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])\n")
    status, out, err = run("--provider", "fake", "--gpu", "H100:8", "--budget", "100", "train.py")
    assert (status, out) == (0, b"0,1,2,3,4,5,6,7\n"), err
    assert "at most 100 USD" in err


def test_a_program_reads_what_happens_as_json(project: Path) -> None:
    (project / "train.py").write_text("print('hello')")
    status, out, err = run("--json", "train.py")
    assert (status, err) == (0, "")
    told = [json.loads(line) for line in out.splitlines()]
    assert [*dict.fromkeys(each["event"] for each in told)] == ["project", "plan", "start", "output", "end"]
    printed = [each for each in told if each["event"] == "output"]  # in as many pieces as the program wrote
    assert {(each["rank"], each["stream"]) for each in printed} == {(0, "stdout")}
    assert "".join(each["text"] for each in printed) == "hello\n"
    assert told[-1]["status"] == 0


def test_two_runs_of_one_project_at_once(project: Path) -> None:
    (project / "train.py").write_text("import sys, time; time.sleep(1); print(sys.argv[1])\n")
    with started("train.py", "a") as one, started("train.py", "b") as other:
        assert one.communicate(timeout=60)[0] == b"a\n"
        assert other.communicate(timeout=60)[0] == b"b\n"
    eventually(lambda: nodes() == [], 30, "the end of both")
