"""`skypool run`: programs that know nothing of skypool run on nodes with their project, and nothing is left of them."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from skypool.errors import ProtocolError, UsageError
from skypool.rental.run_account import ENDING
from skypool.runs import environment, node_folders, secret_values
from skypool.runs.output_files import END, END_FILE, HEAD, KEPT, OutputFiles
from skypool.runs.output_spool import OutputSpool
from skypool.runs.program_run import status_in
from skypool.runs.target import Target
from skypool.testing import FakeCloud
from tests.bill import bill
from tests.caches import with_zip
from tests.conftest import eventually, nodes
from tests.forks import Fork

FORKED = "import os, sys; os.chdir(sys.argv.pop(1)); from skypool.cli import main; sys.exit(main())"
PROGRAM = [sys.executable, "-c", "import sys; from skypool.cli import main; sys.exit(main())", "run"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "my project"
    root.mkdir()
    monkeypatch.chdir(root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(with_zip(tmp_path / "cache")))
    return root


def started(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*PROGRAM, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(*words: str, input: bytes | None = None) -> tuple[int, bytes, str]:
    """Exit status, stdout and stderr of `skypool run`."""
    if input is not None:
        done = subprocess.run([*PROGRAM, *words], input=input, capture_output=True, timeout=120)
        return done.returncode, done.stdout, done.stderr.decode()
    ended = Fork(FORKED, os.getcwd(), *PROGRAM[3:], *words, environment={}).end()
    return ended.returncode, ended.stdout.encode(errors="surrogateescape"), ended.stderr


# --- what is run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["1", None, 1.0, True, [0], 256, -65])
def test_a_status_that_a_node_cannot_mean_is_refused(said: object) -> None:
    with pytest.raises(ProtocolError, match="makes no sense"):
        status_in(said)
    assert [status_in(each) for each in (0, 255, -9)] == [0, 255, -9]


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
    for module in ("package", "json.tool", "package.train"):
        assert Target.of(["-m", module]).words[:3] == ("python", "-m", module)
    assert run("-m", "package.train", "-x")[:2] == (0, b"__main__ ['-x']\n")
    assert run("sh", "-c", "echo $0 $1; pwd | tail -c 5", "a b", "c")[1].startswith(b"a b c\n")


def test_the_name_of_a_script_may_begin_like_an_option(project: Path) -> None:
    (project / "-x.py").write_text("print('it')\n")
    assert run("./-x.py")[:2] == (0, b"it\n")


def test_a_pyproject_that_is_not_utf8_is_refused_before_anything_is_rented(project: Path) -> None:
    (project / "pyproject.toml").write_bytes("[project]\nname = 'a'\nversion = '1'  # Jürgen\n".encode("latin-1"))
    status, _, err = run("true")
    assert (status, "pyproject.toml is not UTF-8, as TOML must be: " in err) == (125, True)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["trian.py"], "there is no script trian.py in .*; did you mean train.py[?]"),
        (["-m"], "-m takes the name of a module"),
        (["-m", "train.py"], "did you mean -m train, or the script train.py[?]"),
        (["-m", "src/my/train.py"], "did you mean -m my.train, or the script src/my/train.py[?]"),
        (["train"], "there is no command train here; did you mean train.py[?]"),
        (["-m", "package.trian"], "there is no module package.trian in .*; did you mean package.train[?]"),
        (["-m", "package.deep.train"], "there is no module package.deep.train in"),
        (["-m", "inner.trian"], "there is no module inner.trian in .*src; did you mean inner.train[?]"),
        (["start.sh"], "there is no script start.sh in"),
        ([""], "name what to run"),
        (["--gpus", "H100"], "there is no option --gpus"),
    ],
)
def test_a_wrong_target_is_refused(words: list[str], why: str, project: Path) -> None:
    for name in ("train.py", "package/__init__.py", "package/train.py", "src/inner/__init__.py", "src/inner/train.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).touch()
    with pytest.raises(UsageError, match=why):
        Target.of(words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--save", ".", "train.py"], "--save takes a folder below the current one"),
        (["--save", "../out", "train.py"], "--save takes a folder below the current one"),
        (["--save", "~/out", "train.py"], "--save takes a folder below the current one"),
        (["--save", "/out", "train.py"], "--save takes a folder below the current one"),
        (["--env", "A", "train.py"], "--env takes NAME=VALUE, not 'A'"),
        (["--save", "a", "--save", "b", "train.py"], "--save names 2 folders without a bucket: a, b; name one folder"),
        (["--secret", "A=b-secret", "train.py"], "--secret takes the name of a variable without its value"),
        (["--secret", "HF_TOKEN", "train.py"], "has a value of this name; `hf auth login` makes one"),
        (["--budget", "-3", "train.py"], "--budget must be above 0 USD, not -3"),
        (["--max-lifetime", "soon", "train.py"], "--max-lifetime must be a duration"),
        (["--gpu", "H100:8", "train.py"], "say where to rent with --provider"),
        (["ignored.py"], "ignored.py is not sent, because it is ignored"),
        (["--include", "nothing", "train.py"], "there is no 'nothing' in the project"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_rented(words: list[str], why: str, project: Path) -> None:
    (project / ".gitignore").write_text("ignored.py\n")
    (project / "ignored.py").touch()
    (project / "train.py").touch()
    status, out, err = run(*words)
    assert (status, out) == (125, b"")
    assert why in err
    assert "end  " not in err


@pytest.mark.parametrize("asked", [">=3.99", "<3.0", ">=3.12,<3.11"])
def test_a_project_that_no_python_fits_is_refused_before_anything_is_rented(asked: str, project: Path) -> None:
    (project / "pyproject.toml").write_text(f"[project]\nname = 'a'\nversion = '1'\nrequires-python = '{asked}'\n")
    (project / "train.py").touch()
    status, _, err = run("--dry-run", "train.py")
    assert (status, f"no version of Python fits '{asked}', which the project in" in err) == (125, True), err


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


INTERRUPTED = """
import runpy, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
runpy.run_module("skypool", run_name="__main__")
"""


def test_ctrl_c_while_the_command_is_imported_shows_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, "run", "train.py"], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


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


def test_a_closed_terminal_is_a_signal_though_nobody_reads_on(project: Path) -> None:
    (project / "train.py").write_text(
        "import time\nprint('at work', flush=True)\ntry:\n    time.sleep(300)\n"
        "except KeyboardInterrupt:\n    print('tidies up', flush=True)\n"
    )
    ours, theirs = pty.openpty()
    words = ["setsid", "--ctty", *PROGRAM, "train.py"]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        while b"at work" not in seen:
            seen += os.read(ours, 65536)
        os.close(ours)
        assert process.wait(60) == 129
    assert nodes() == []


def test_a_signal_that_was_ignored_before_is_ignored(project: Path) -> None:
    (project / "train.py").write_text("import time; print('at work', flush=True); time.sleep(1); print('done')")
    words = [*PROGRAM, "train.py"]
    with subprocess.Popen(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"at work\n"
        process.send_signal(signal.SIGHUP)
        assert process.communicate(timeout=60)[0] == b"done\n"
    assert process.returncode == 0


def test_its_machines_do_not_wait_for_who_reads_its_output(project: Path) -> None:
    (project / "train.py").write_text("for n in range(200_000): print(n)\n")
    with started("train.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0\n"
        eventually(lambda: nodes() == [], 60, "the end of the node")
        assert process.poll() is None
        assert process.stdout.read() == b"".join(b"%d\n" % n for n in range(1, 200_000))
        assert process.wait(60) == 0


def test_ranks_that_ignore_a_signal_end_together(project: Path) -> None:
    (project / "train.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print('at work', flush=True)\ntime.sleep(300)\n"
    )
    with started("--procs", "3", "train.py") as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline().endswith(b"] at work\n")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 143
    assert b"missing" not in err
    assert time.monotonic() - began < 20  # and not 8 s for each


def test_who_reads_its_errors_no_more_does_not_end_it(project: Path) -> None:
    (project / "train.py").write_text("import sys, time; time.sleep(1); print('err', file=sys.stderr); print('done')")
    with started("train.py") as process:
        assert process.stderr is not None
        process.stderr.close()
        assert process.stdout is not None
        assert process.stdout.read() == b"done\n"
        assert process.wait(60) == 0


def test_who_does_not_read_on_ends_it(project: Path) -> None:
    (project / "train.py").write_text("for n in range(10**9): print(n)\n")
    with started("train.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
        assert process.wait(60) == 1
    assert b"skypool/cli" not in err  # its own traceback would have it
    assert b"end      status 1 after" in err
    assert nodes() == []


def test_who_does_not_read_on_ends_it_before_it_prints(project: Path) -> None:
    with started("sh", "-c", "touch begun; sleep 100") as process:
        assert process.stderr is not None
        while b"start    " not in (line := process.stderr.readline()):
            assert line
        assert process.stdout is not None
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(60) == 1
    assert b"Traceback" not in err
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
    names = sorted(int(each.name) for each in (tmp_path / "out").iterdir() if each.name.isdigit())
    assert names == [*range(names[-1] - KEPT + 1, names[-1] + 1)]
    assert END.unpack((tmp_path / "out" / END_FILE).read_bytes()) == (True, -9, 0)


FULL = """
import resource, signal, sys
sys.path.insert(0, sys.argv[1])
from skypool.runs.output_files import OutputFiles
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
files = OutputFiles("out")
limit(50_000)
for n in range(1000):
    files.write(1, b"%099d\\n" % n)
limit(resource.RLIM_INFINITY)
files.write(1, b"after\\n")
files.end(0)
"""


def test_a_full_disk_loses_output_and_says_how_much(project: Path) -> None:
    subprocess.run([sys.executable, "-c", FULL, str(Path(__file__).parent.parent)], check=True)
    data = (project / "out" / "0").read_bytes()
    records = []
    while data:
        kind, length = HEAD.unpack_from(data)
        records.append((kind, data[HEAD.size : HEAD.size + length]))
        data = data[HEAD.size + length :]
    kept = [piece for kind, piece in records if kind == 1]
    assert kept == [*(b"%099d\n" % n for n in range(len(kept) - 1)), b"after\n"]
    missing = 100 * (1000 - len(kept) + 1)
    assert records[-2] == (2, f"\nskypool: {missing} bytes of output are missing here: File too large\n".encode())
    assert records[-1] == (1, b"after\n")
    assert END.unpack((project / "out" / END_FILE).read_bytes()) == (True, 0, 0)


def test_a_spool_keeps_what_is_not_read_yet_and_its_order() -> None:
    shown: list[tuple[int, int, bytes]] = []
    failures: list[OSError] = []
    gate = threading.Event()

    def show(rank: int, stream: int, data: bytes) -> None:
        gate.wait(60)
        shown.append((rank, stream, data))

    spool = OutputSpool(show, failures.append)
    pieces = [(n % 3, 1 + n % 2, bytes([n % 256]) * 100_000) for n in range(500)]
    for each in pieces:
        spool.put(*each)
    gate.set()
    eventually(lambda: len(shown) == 500, 60, "all pieces")
    spool.put(0, 1, b"last")
    spool.drain()
    assert shown == [*pieces, (0, 1, b"last")]
    assert failures == []


def test_a_spool_that_cannot_show_takes_no_more() -> None:
    failures: list[OSError] = []

    def show(rank: int, stream: int, data: bytes) -> None:
        raise BrokenPipeError

    spool = OutputSpool(show, failures.append)
    spool.put(0, 1, b"x")
    eventually(lambda: failures, 30, "the failure")
    for _ in range(100):
        spool.put(0, 1, b"x" * 10**6, wait=True)
    spool.drain()
    assert isinstance(spool.failure, BrokenPipeError)


def test_a_spool_on_a_full_disk_keeps_what_must_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skypool.runs.output_spool._SEGMENT", 1 << 20)
    shown: list[bytes] = []
    gate = threading.Event()

    def show(rank: int, stream: int, data: bytes) -> None:
        gate.wait(60)
        shown.append(data)

    spool = OutputSpool(show, lambda _: None)
    spool.put(0, 1, b"output")
    spool.put(0, 1, b"x" * (1 << 20))
    with monkeypatch.context() as full:
        full.setattr("tempfile.tempdir", str(tmp_path / "no such folder"))
        assert not spool.put(0, 1, b"lost")
        assert spool.put(0, 3, b"note", always=True)
        assert spool.put(0, 4, b"error", always=True)
        assert not spool.put(0, 3, b"y" * (1 << 20), always=True)
    assert spool.put(0, 1, b"more output")
    gate.set()
    spool.drain()
    assert [*map(len, shown)] == [6, 1 << 20, 4, 5, 11]
    assert shown[2:] == [b"note", b"error", b"more output"]
    assert spool.lost == 4 + (1 << 20)


def test_what_a_run_waits_for_is_told_if_it_takes_long(project: Path, fake: Path) -> None:
    (project / "train.py").write_text("print('hello')")
    FakeCloud(fake).control.next_machines(boots=4.5)
    words = ["--provider", "fake", "--max-lifetime", "10m"]
    status, out, err = run(*words, "train.py")
    assert (status, out) == (0, b"hello\n"), err
    assert re.search(r"(?m)^rents .*\nwaits    for node 0, which boots\n(waits .*\n)*start ", err), err
    FakeCloud(fake).control.next_machines(boots=4.5)
    told = [json.loads(line) for line in run("--json", *words, "train.py")[1].splitlines()]
    assert [each["event"] for each in told[:3]] == ["project", "plan", "waits"]
    assert told[2]["text"] == "node 0, which boots"


STRANGER = """
from skypool.cli.run_messages import Lines
lines = Lines()
lines.is_stranger = {stranger}
for piece in (b"\\x1b]0;title\\x07a\\x1b[2Jb \\xc3", b"\\xa9\\r\\n"):
    lines.wrote(0, 1, piece)
lines.close()
"""


@pytest.mark.parametrize(
    ("stranger", "shown"), [(True, b"ab \xc3\xa9\r\r\n"), (False, b"\x1b]0;title\x07a\x1b[2Jb \xc3\xa9\r\r\n")]
)
def test_the_output_of_strangers_does_not_change_a_terminal(stranger: bool, shown: bytes) -> None:
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", STRANGER.format(stranger=stranger)], stdout=theirs, check=True)
    assert os.read(ours, 1000) == shown
    os.close(theirs)
    os.close(ours)


# --- its project ---------------------------------------------------------------------------------------------


def test_secrets_stay_here_unless_they_are_named(project: Path) -> None:
    (project / ".env").write_text("TOKEN=x")
    (project / "key.pem").write_text("x")
    status, out, err = run("sh", "-c", "ls -A")
    assert (status, out) == (0, b""), err
    assert "not sent: .env, key.pem" in err
    assert run("--include", ".env", "sh", "-c", "ls -A")[1] == b".env\n"


def test_the_value_of_a_secret_is_given_and_not_shown(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "a-long-value")
    monkeypatch.setenv("HF_HOME", str(project / "hf"))
    (project / "hf").mkdir()
    (project / "hf" / "token").write_text("hf_a-token\n")
    (project / ".env").write_text("# ours\nexport FROM_FILE='another value'\nOTHER=x\n")
    words = [each for name in ("FROM_HERE", "FROM_FILE", "HF_TOKEN") for each in ("--secret", name)]
    code = (
        "import os; [print(os.environ[name], len(os.environ[name])) for name in ('FROM_HERE', 'FROM_FILE', 'HF_TOKEN')]"
    )
    status, out, err = run(*words, "python", "-c", code)
    assert (status, out) == (0, b"[secret FROM_HERE] 12\n[secret FROM_FILE] 13\n[secret HF_TOKEN] 10\n"), err
    status, _, err = run("--secret", "NO_SUCH", "true")
    assert status == 125
    assert "--secret NO_SUCH: neither the environment nor " in err
    status, out, _ = run("--include", ".env", "cat", ".env")
    assert (status, out) == (0, b"# ours\nexport FROM_FILE='[secret FROM_FILE]'\nOTHER=x\n")


def test_the_variables_of_all_files_that_are_sent_are_not_shown(project: Path) -> None:
    for folder, value in (("one", "value-of-one"), ("two", "value-of-two")):
        (project / folder).mkdir()
        (project / folder / ".env").write_text(f"TOKEN={value}\n")
    words = ["--include", "one/.env", "--include", "two"]
    status, out, err = run(*words, "--include", "two/.env", "cat", "one/.env", "two/.env")
    assert (status, out) == (0, b"TOKEN=[secret TOKEN]\nTOKEN=[secret TOKEN of two/.env]\n"), err


def test_a_secret_with_quotes_leaves_json_whole(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUOTED", value := 'event"project')
    words = ["--json", "--secret", "QUOTED", "echo", value, "event"]
    status, out, err = run(*words)
    assert (status, err) == (0, "")
    told = [json.loads(line) for line in out.splitlines()]
    assert told[0]["words"] == ["echo", "[secret QUOTED]", "event"]
    assert "".join(each["text"] for each in told if each["event"] == "output") == "[secret QUOTED] event\n"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("T=abc#def\nP=a\\b1234 # note\n", {"T": "abc#def", "P": "a\\b1234"}),
        ('J={"k":"v"}\n# C=1\n  export D = x y \nE=\n', {"J": '{"k":"v"}', "D": "x y", "E": ""}),
        ('K="line 1\nline 2\\n\\"q\\""\nL=\'it is $1 #\' # note\n', {"K": 'line 1\nline 2\n"q"', "L": "it is $1 #"}),
    ],
)
def test_a_file_of_variables_is_read_as_its_users_read_it(text: str, values: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(text)
    assert secret_values.in_file(tmp_path / ".env") == values


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


@pytest.mark.parametrize("in_git", [False, True])
def test_what_a_program_linked_is_not_removed_there(in_git: bool, project: Path, tmp_path: Path) -> None:
    if in_git:
        subprocess.run(["git", "init", "-q"], check=True)
    (project / "data").mkdir()
    (project / "data" / "a").touch()
    other = tmp_path / "other"
    other.mkdir()
    (other / "a").touch()
    assert run("sh", "-c", f"rm -r data; ln -s '{other}' data")[0] == 0
    (project / "data" / "a").unlink()
    (project / "data").rmdir()
    assert run("sh", "-c", "ls")[:2] == (0, b"data\n")
    assert (other / "a").exists()


def test_old_projects_are_removed_unless_they_are_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    used, unused, new = (Path(node_folders.claimed(each)) for each in ("used", "unused", "new"))
    data = unused / "data"
    data.mkdir()
    (data / "shard").touch()
    data.chmod(0o500)  # as data that a run has fetched
    with node_folders.held(str(used)):
        for each in (used, unused):
            os.utime(each, (0, 0))
        node_folders.claimed("another")
        assert (used.exists(), unused.exists(), new.exists()) == (True, False, True)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[project]\nname='p'\ndependencies=['six']\n", ["six"]),
        ("[build-system]\nrequires=['hatchling']\n[project]\nname='p'\n", ["-e", "."]),
    ],
)
def test_a_project_that_says_how_it_is_built_is_installed(text: str, wanted: list[str], tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert environment._named(str(tmp_path), "pyproject.toml") == wanted


def test_another_environment_is_made_when_its_packages_change(tmp_path: Path) -> None:
    said = tmp_path / "pyproject.toml"
    texts = ["[project]\nname='p'\ndependencies=['six']\n[tool.ruff]\nline-length=120\n"]
    texts += [texts[0].replace("120", "100"), texts[0].replace("six", "idna")]
    contents = [said.write_text(each) and environment._content(str(tmp_path), "pyproject.toml") for each in texts]
    assert contents[0] == contents[1] != contents[2]
    contents = []
    for file, text in (("base.txt", "six"), ("requirements.txt", "-rbase.txt"), ("base.txt", "idna"), ("other", "x")):
        (tmp_path / file).write_text(text)
        contents.append(environment._content(str(tmp_path), "requirements.txt"))
    assert len({*contents}) == 3, contents
    assert contents[2] == contents[3]


@pytest.mark.slow
def test_what_git_ignores_is_sent_if_the_environment_is_made_from_it(project: Path) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    (project / ".gitignore").write_text("requirements.txt\n")
    (project / "requirements.txt").write_text("six\n")
    status, out, err = run("python", "-c", "import six; print(six.__name__)")
    assert (status, out) == (0, b"six\n"), err


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


@pytest.mark.slow
def test_a_package_in_a_folder_of_the_project_is_as_it_is_now(project: Path) -> None:
    lib = project / "libs" / "lib"
    lib.mkdir(parents=True)
    (lib / "pyproject.toml").write_text("[project]\nname = 'lib'\nversion = '1'\n")
    (lib / "setup.cfg").write_text("[options]\npy_modules = lib\n")
    (lib / "lib.py").write_text("WORD = 'first'\n")
    (project / "pyproject.toml").write_text(
        "[project]\nname = 'mine'\nversion = '1'\ndependencies = ['lib']\n"
        "[tool.uv.sources]\nlib = { path = 'libs/lib' }\n"
    )
    (project / "train.py").write_text("import lib; print(lib.WORD)\n")
    status, out, err = run("train.py")
    assert (status, out) == (0, b"first\n"), err
    (lib / "lib.py").write_text("WORD = 'second'\n")
    assert run("train.py")[:2] == (0, b"second\n")


@pytest.mark.slow
def test_what_a_setup_reads_its_requirements_from_makes_another_environment(project: Path) -> None:
    (project / "setup.py").write_text(
        "from setuptools import setup\nneeded = open('requirements.txt').read().split()\n"
        "setup(name='mine', version='1', py_modules=['mine'], install_requires=needed)\n"
    )
    (project / "mine.py").write_text("import six\n")
    (project / "requirements.txt").write_text("six\n")
    (project / "train.py").write_text("import mine, sys; print(mine.six.__name__)\nimport idna\n")
    status, out, err = run("train.py")
    assert (status, out) == (1, b"six\n"), err
    (project / "requirements.txt").write_text("six\nidna\n")
    assert run("train.py")[:2] == (0, b"six\n")


# --- several nodes -------------------------------------------------------------------------------------------


def test_a_program_asks_the_client_for_no_modules(project: Path) -> None:
    assert run("sh", "-c", 'echo "$SKYPOOL_MODULES-$SKYPOOL_FIRST-"')[1] == b"--\n"


def test_several_nodes_are_a_gang(project: Path) -> None:
    (project / "train.py").write_text(
        "import os\nprint(*[os.environ[each] for each in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'NODE_RANK')])\n"
        "print(*[os.environ[f'PET_{each}'] for each in ('NNODES', 'NODE_RANK', 'NPROC_PER_NODE')])\n"
        "assert os.environ['PET_MASTER_PORT'] == os.environ['MASTER_PORT']\n"
        "raise SystemExit(5 if os.environ['RANK'] == '3' else 0)\n"
    )
    status, out, err = run("--nodes", "2", "--procs", "2", "train.py")
    assert status == 5, err
    assert sorted(out.splitlines()) == [
        b"[rank 0] 0 4 0 0", b"[rank 0] 2 0 1", b"[rank 1] 1 4 1 0", b"[rank 1] 2 0 1",
        b"[rank 2] 2 1 1", b"[rank 2] 2 4 0 1", b"[rank 3] 2 1 1", b"[rank 3] 3 4 1 1",
    ]  # fmt: skip


def test_one_node_of_several_may_run_the_program(project: Path) -> None:
    (project / "train.py").write_text("import os; print(os.environ.get('RANK'), os.environ.get('WORLD_SIZE'))\n")
    assert run("--nodes", "2", "--node", "1", "train.py")[:2] == (0, b"None None\n")
    said = sorted(run("--nodes", "2", "--node", "1", "--procs", "2", "train.py")[1].splitlines())
    assert said == [b"[rank 0] 0 2", b"[rank 1] 1 2"]
    status, _, err = run("--nodes", "2", "--node", "2", "train.py")
    assert (status, "there is no node 2 with --nodes 2; nodes are counted from 0" in err) == (125, True)


def test_lines_of_several_processes_are_told_apart_and_whole(project: Path) -> None:
    (project / "train.py").write_text(
        "import sys, time\n"
        "for n in range(3):\n"
        "    print('left', n, end=' ', flush=True); time.sleep(0.2); print('right', n, flush=True)\n"
        "print('\\r10%\\r50%\\r100%', end='', file=sys.stderr, flush=True)\n"
    )
    status, out, err = run("--nodes", "2", "train.py")
    assert status == 0, err
    assert sorted(out.decode().splitlines()) == [f"[node {r}] left {n} right {n}" for r in "01" for n in range(3)]
    assert [each for each in sorted(err.splitlines()) if "%" in each] == ["[node 0] 100%", "[node 1] 100%"]
    said = [json.loads(line) for line in run("--json", "--procs", "2", "train.py")[1].splitlines()]
    shown = [each for each in said if each["event"] == "output" and each["stream"] == "stdout"]
    assert {each["rank"] for each in shown} == {0, 1}
    assert "".join(each["text"] for each in shown if each["rank"] == 1) == "".join(
        f"left {n} right {n}\n" for n in range(3)
    )


def test_what_a_program_prints_is_in_the_logs_of_its_pool(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "sesame-street")
    (project / "train.py").write_text(
        "import os, sys\nprint('out', os.environ['KEY'])\nprint('err', file=sys.stderr)\n"
    )
    assert run("--name", "one", "--secret", "KEY", "train.py")[0] == 0
    (project / "other.py").write_text("raise KeyError('epoch')\n")
    assert run("--name", "two", "--procs", "2", "other.py")[0] == 1
    logs = [PROGRAM[0], "-c", PROGRAM[2], "logs"]
    done = subprocess.run([*logs, "one"], capture_output=True, text=True, timeout=60)
    assert "[0] out [secret KEY]\n" in done.stdout, done.stderr
    assert "[0] err\n" in done.stderr
    of_two = subprocess.run([*logs, "two", "--call", "other"], capture_output=True, text=True, timeout=60)
    assert re.search(r"^\[0 rank [01]\] KeyError: 'epoch'$", of_two.stderr, re.MULTILINE), of_two


def test_best_effort_is_refused_without_a_budget(project: Path) -> None:
    status, _, err = run("--best-effort", "true")
    assert (status, err) == (125, "error: --best-effort is about a budget; add --budget 20\n")


def test_files_go_to_the_folder_of_a_program_that_runs_and_come_from_there(project: Path) -> None:
    (project / ".git").mkdir()
    (project / "src").mkdir()
    (project / "src" / "train.py").write_text(
        "# /// script\n# requires-python = '>=3.9'\n# ///\n"
        "import os, time\n"
        "os.mkdir('out')\n"
        "open('out/model', 'w').write('7')\n"
        "while not os.path.exists('stop'): time.sleep(0.1)\n"
        "print(open('stop').read())\n"
    )
    (project / "src" / "stop").write_text("enough")
    (project / ".gitignore").write_text("stop\n")
    os.chdir("src")
    skypool = [PROGRAM[0], "-c", PROGRAM[2]]
    running = started("--name", "one", "train.py")

    def fetched() -> bool:
        return not subprocess.run([*skypool, "pull", "one", "out/model"], capture_output=True, timeout=60).returncode

    eventually(fetched, 60, "the program's file")
    assert Path("model").read_text() == "7"
    shell = [*skypool, "shell", "one", "--", "ls"]
    assert subprocess.run(shell, capture_output=True, text=True, timeout=60).stdout.split() == ["out", "train.py"]
    python = [*shell[:-1], "python", "-c", "import sys; print(sys.prefix)"]
    assert "/environments/" in subprocess.run(python, capture_output=True, text=True, timeout=60).stdout, "its packages"
    sent = subprocess.run([*skypool, "push", "one", "stop"], capture_output=True, text=True, timeout=60)
    assert sent.returncode == 0, sent.stderr
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (0, b"enough\n"), err


def test_paths_on_the_command_line_begin_in_the_current_folder(project: Path) -> None:
    (project / ".git").mkdir()
    (project / ".gitignore").write_text("out\n")
    for folder in ("out", "exp/out"):
        (project / folder).mkdir(parents=True)
        (project / folder / "step").write_text(folder)
    (project / "exp" / "train.py").write_text(
        "import os\n"
        "print(os.path.exists('out/step') and open('out/step').read(), os.path.exists('../out'))\n"
        "os.makedirs('out', exist_ok=True)\nopen('out/step', 'w').write('new')\n"
    )
    os.chdir("exp")
    status, out, err = run("--save", "out", "--include", "out", "train.py")
    assert (status, out) == (0, b"exp/out False\n"), err
    assert "is not sent" not in err
    assert Path("out/step").read_text() == "new"
    assert run("--include", str(project / "out"), "--dry-run", "train.py")[0] == 0
    status, _, err = run("--save", "out", "--dry-run", "train.py")
    assert (
        "out is not sent, because it is ignored: the program does not see these files, and its own replace those of "
        "the same name here; --include out sends it\n"
    ) in err


def test_a_rank_that_fails_ends_the_others(project: Path) -> None:
    began = time.monotonic()
    (project / "train.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise SystemExit(9)\ntime.sleep(300)\n"
    )
    status, _, err = run("--procs", "3", "train.py")
    assert status == 9
    assert "\nrank 1: `python3 train.py` on node 0 exited with status 9; the other processes were ended" in err
    assert time.monotonic() - began < 60


# --- what comes back -----------------------------------------------------------------------------------------


def test_what_it_saves_comes_back_also_after_an_error(project: Path) -> None:
    (project / "train.py").write_text(
        "import os\nos.makedirs('out/deep')\nopen('out/deep/model', 'w').write('weights')\n1/0\n"
    )
    status, _, err = run("--save", "out", "train.py")
    assert status == 1
    assert (project / "out" / "deep" / "model").read_text() == "weights"
    assert "saved    1 file to out" in err


def test_what_it_saves_comes_while_it_runs(project: Path) -> None:
    (project / "train.py").write_text(
        "import os, time\nos.makedirs('out')\nopen('out/a', 'w').write('weights')\ntime.sleep(300)\n"
    )
    often = "import skypool.cli.run as r; r._EVERY = 0.3; "
    words = [PROGRAM[0], "-c", often + PROGRAM[2], "run", "--save", "out/", "train.py"]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as process:
        eventually(lambda: (project / "out" / "a").exists(), 60, "the first file")
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert b"saved    1 file to out" in err


def test_only_what_the_program_changes_comes_back(project: Path) -> None:
    (project / "out").mkdir()
    for name in ("edited", "rewritten"):
        (project / "out" / name).write_text("old")
    (project / "train.py").write_text(
        "import time\nopen('out/rewritten', 'w').write('new')\nopen('out/new', 'w').write('new')\n"
        "print('at work', flush=True)\ntime.sleep(2)\n"
    )
    with started("--save", "out", "train.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"at work\n"
        (project / "out" / "edited").write_text("edited")
        assert b"saved    2 files to out" in process.communicate(timeout=60)[1]
    found = {each.name: each.read_text() for each in (project / "out").iterdir()}
    assert found == {"edited": "edited", "rewritten": "new", "new": "new"}
    (project / "out" / "new").unlink()
    (project / ".skypoolignore").write_text("out\n")
    err = run("--save", "out", "true")[2]
    assert "saved    nothing: the program wrote no file into out" in err
    assert "the machine has 2 files of an earlier run in out, which the program finds; to remove them there, run" in err
    assert not (project / "out" / "new").exists()
    run("--save", "out", "rm", "-r", "out")
    assert "of an earlier run" not in run("--save", "out", "true")[2]


def test_what_a_program_writes_as_it_is_here_is_saved(project: Path) -> None:
    (project / "train.py").write_text(
        "import os\nos.makedirs('out', exist_ok=True)\nfor each in 'ab': open(f'out/{each}', 'w').write('same')\n"
    )
    for _ in range(2):
        assert "saved    2 files to out" in run("--save", "out", "train.py")[2]


def test_what_is_moved_into_the_saved_folder_comes_and_what_is_of_no_use_here_stays(project: Path) -> None:
    (project / "template").mkdir()
    (project / "template" / "weights").write_text("sent before")
    (project / "train.py").write_text(
        "import os, socket, subprocess\n"
        "os.mkdir('out'); os.rename('template', 'out/model'); os.makedirs('out/step-2')\n"
        "os.symlink(os.path.abspath('out/step-2'), 'out/latest'); os.symlink('/etc', 'out/etc')\n"
        "os.mkfifo('out/pipe')\n"
        "socket.socket(socket.AF_UNIX).bind('out/socket')\n"
        "subprocess.run(['git', 'init', '-q', '--bare', 'out/cache'], check=True)\n"
        "subprocess.run(['git', 'init', '-q', 'out/checkout'], check=True)\n"
        "open('out/step-2/a', 'w').write('a')\n"
    )
    status, _, err = run("--save", "out", "train.py")
    assert status == 0, err
    assert "saved    2 files to out" in err
    found = sorted(str(each.relative_to(project / "out")) for each in (project / "out").rglob("*"))
    assert found == ["checkout", "latest", "model", "model/weights", "step-2", "step-2/a"]
    assert os.readlink(project / "out" / "latest") == "step-2"
    assert (project / "out" / "latest" / "a").read_text() == "a"


def test_what_a_program_wrote_in_place_of_a_file_that_is_gone_here_stays(project: Path) -> None:
    (project / "model").write_text("old")
    (project / "other").write_text("old")
    assert run("sh", "-c", "echo new > model")[0] == 0
    (project / "model").unlink()
    (project / "other").unlink()
    assert run("sh", "-c", "ls; cat model")[1] == b"model\nnew\n"


def test_a_secret_that_was_included_once_is_gone_there_in_the_next_run(project: Path) -> None:
    (project / ".env").write_text("TOKEN=a-long-value\n")
    assert run("--include", ".env", "cat", ".env")[1] == b"TOKEN=[secret TOKEN]\n"
    assert run("sh", "-c", "cat .env || ls -a")[1] == b".\n..\n"


def test_two_nodes_with_one_folder_are_fetched_once(project: Path) -> None:
    (project / "train.py").write_text(
        "import os\nos.makedirs('out', exist_ok=True)\nopen('out/' + os.environ['RANK'], 'w')\n"
    )
    assert run("--nodes", "2", "--save", "out", "train.py")[0] == 0
    assert sorted(each.name for each in (project / "out").iterdir()) == ["0", "1"]


def test_nodes_with_home_folders_of_their_own_run_a_program(project: Path, fake: Path) -> None:
    (project / "data").write_text("sent")
    (project / "train.py").write_text(
        "import os\nfrom pathlib import Path\nhome = Path.home()\nassert Path.cwd().is_relative_to(home)\n"
        "print(open('data').read(), len(os.listdir()), flush=True)\n"
        "os.mkdir('out')\nopen('out/' + os.environ['RANK'], 'w').write(str(home))\n"
    )
    words = ["--provider", "fake", "--nodes", "2", "--budget", "20", "--save", "out", "train.py"]
    status, out, err = run(*words)
    assert status == 0, err
    assert sorted(out.splitlines()) == [b"[node 0] sent 2", b"[node 1] sent 2"]
    homes = [(project / "out" / each).read_text() for each in ("0", "node-1/1")]
    assert homes[0] != homes[1]


def test_what_is_large_and_not_saved_is_told(project: Path) -> None:
    (project / "data.bin").write_bytes(bytes(11 << 20))
    code = (
        "import os\nfor each in ('out', 'models'): os.makedirs(each)\n"
        "for each in ('out/kept', 'models/final.pt', 'small'): open(each, 'wb').write(b'x' * (1 << 24))\n"
        "os.truncate('small', 100)\n"
    )
    (project / "train.py").write_text(code)
    status, _, err = run("--save", "out", "train.py")
    assert status == 0
    assert "not saved: models/final.pt (16.8 MB), small (100 bytes); --save FOLDER fetches what a program writes" in err
    assert "not saved" not in run("true")[2]


@pytest.mark.slow
def test_what_the_environment_has_written_is_not_of_the_program(project: Path) -> None:
    (project / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "1"\ndependencies = ["six"]\n')
    status, _, err = run("python", "-c", "import six")
    assert (status, "not saved" in err) == (0, False), err


def test_what_cannot_be_fetched_is_told_and_no_success(project: Path) -> None:
    (project / ".skypoolignore").write_text("out\n")
    (project / "out").touch()
    (project / "train.py").write_text("import os; os.makedirs('out'); open('out/a', 'w').write('weights')")
    status, _, err = run("--save", "out", "train.py")
    assert status == 125
    assert "what the program wrote into out was not fetched: " in err


def test_a_program_without_the_folder_is_told(project: Path) -> None:
    status, _, err = run("--save", "out", "true")
    assert status == 0
    assert "saved    nothing: " in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--provider", "ssh"], "--provider ssh does not say which machines; name them with --host, such as"),
        (["--host", "gpu1", "--local"], "--host and --local exclude each other"),
        (["--host", "gpu1", "--provider", "fake"], "--provider and --host exclude each other"),
        (["--host", "a:b:c"], "a host must be 'name', 'user@name:port'"),
    ],
)
def test_hosts_are_named_one_way(words: list[str], said: str, project: Path) -> None:
    (project / "train.py").touch()
    status, _, err = run(*words, "--dry-run", "train.py")
    assert (status, said in err) == (125, True), err


def test_a_run_names_the_hosts_that_it_may_use(project: Path) -> None:
    (project / "train.py").touch()
    for words in (["--host", "gpu1.invalid"], ["--provider", "ssh", "--host", "gpu1.invalid"]):
        status, _, err = run(*words, "--dry-run", "train.py")
        assert (status, "rents    ssh gpu1.invalid, 0 USD/h; free" in err) == (0, True), err


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
    assert (status, "no limit" in err) == (125, True)


def test_a_rehearsal_says_what_the_run_itself_would(project: Path, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--dry-run", "--provider", "fake", "--gpu", "H100:8"]
    status, _, err = run(*words, "true")
    assert status == 125
    assert "without a terminal, this is refused: this costs " in err
    assert run(*words, "--budget", "10", "true")[0] == 0
    status, _, err = run(*words, "--budget", "1", "true")
    assert status == 125
    assert re.search(
        r"error: the first 20:00 min cost \d+\.\d\d USD, and the budget is 1 USD; pass --budget [\d.]+, or ", err
    )
    assert "rents" not in err
    monkeypatch.setenv("SKYPOOL_MAX_USD", "2")
    status, _, err = run(*words, "--budget", "100", "true")
    assert status == 125
    assert "USD, and SKYPOOL_MAX_USD allows 2 USD; raise it, or --max-lifetime " in err


def test_machines_that_stay_are_used_by_the_next_run_of_the_project(
    project: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = project / "over"
    (project / "train.py").write_text(
        "import os, time\nprint('first')\nopen('kept', 'w')\n"
        f"while not os.path.exists({str(over)!r}): time.sleep(0.1)\n"
    )
    words = ["--provider", "fake", "--budget", "10", "--linger", "10m"]
    with started(*words, "train.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        status, _, err = run(*words, "train.py")
        assert status == 125
        assert re.search(r"pool train-\w+-\w+ are in use by another run, .* or rent others with --new", err)
        over.touch()
        err = process.communicate(timeout=60)[1].decode()
    [pool] = re.findall(r"^stays    pool (train-\w+-\w+), for [^,]+, 0.1 USD/h: the next such run", err, re.MULTILINE)
    (project / "train.py").write_text("import os, sys; print('second', os.path.exists('kept')); sys.exit(3)\n")
    said = [json.loads(line) for line in run("--json", *words, "train.py")[1].splitlines()]
    assert [*dict.fromkeys(each["event"] for each in said)] == ["project", "uses", "start", "output", "stays", "end"]
    assert [each["pool"] for each in said if each["event"] in ("uses", "start", "stays")] == [pool] * 3
    printed = "".join(each["text"] for each in said if each["event"] == "output")
    assert (printed, said[-1]["status"]) == ("second True\n", 3)
    assert said[-1]["usd"] < 0.01
    for other in (["--new"], ["--nodes", "2"], ["--secret", "HOME"]):
        assert "rents    " in run(*words, *other, "--dry-run", "train.py")[2]
    for same in (["--procs", "2"], ["--node", "0"]):
        assert f"uses     pool {pool} of" in run(*words, *same, "--dry-run", "train.py")[2]
    assert "--new is for runs whose machines stay; add --linger 30m" in run("--new", "train.py")[2]
    assert "--linger finds machines by names of its own; leave --name out" in run(*words, "--name", "x", "train.py")[2]
    words = words[:2] + words[4:]
    for limit, has in {
        ("--budget", "5"): "has a budget of 10 USD, and this run asks for 5 USD",
        ("--max-lifetime", "1h"): "has no lifetime, and this run asks for 1:00:00 h",
    }.items():
        status, _, err = run(*words, *limit, "train.py")
        assert (status, f"pool {pool}, which stays, {has}; end it with `skypool down {pool}`, or" in err) == (125, True)
    for weaker in ([], ["--budget", "20"]):
        assert (
            f"uses     pool {pool} of an earlier run, 0.1 USD/h; its limits end it in"
            in (run(*words, *weaker, "--dry-run", "train.py")[2])
        )
    err = run(*words[:-2], "--budget", "5", "--dry-run", "train.py")[2]
    assert re.search(
        rf"pool {pool} of an earlier run stays for [^ ]+ \w+ at 0.1 USD/h; with --linger 30m this run", err
    )
    assert "rents    " in err
    monkeypatch.setenv("SKYPOOL_MAX_USD", "6")
    assert "SKYPOOL_MAX_USD allows 6 USD, and the pools that have not ended may cost 10 USD" in run(*words, "true")[2]
    cloud = FakeCloud(fake)
    assert cloud.count("machine") == 1
    skypool = [*PROGRAM[:3], "down", "--yes", pool]
    subprocess.run(skypool, check=True, capture_output=True, timeout=60)
    assert cloud.count() == 0


def test_a_run_that_is_refused_when_it_has_taken_machines_over_leaves_them_to_the_next(
    project: Path, fake: Path
) -> None:
    words = ["--provider", "fake", "--budget", "10", "--linger", "10m", "--yes"]
    (project / "many").mkdir()
    for number in range(8000):  # so that the machines are taken over before all of it is looked at
        (project / "many" / str(number)).touch()
    (project / "train.py").write_text("print('at work')\n")
    (project / ".gitignore").write_text("hidden.py\n")
    (project / "hidden.py").write_text("print('at work')\n")
    pools = []
    for script, status in {"train.py": 0, "hidden.py": 125, "./train.py": 0}.items():
        found, out, err = run(*words, script)
        assert (found, out) == (status, b"" if status else b"at work\n"), err
        assert ("hidden.py is not sent, because it is ignored" in err) == bool(status)
        pools += re.findall(r"^stays    pool (\S+), for 9:5\d", err, re.MULTILINE)
    assert len(pools) == 3
    assert len({*pools}) == 1
    assert FakeCloud(fake).count("machine") == 1
    subprocess.run([*PROGRAM[:3], "down", "--yes", pools[0]], check=True, capture_output=True, timeout=60)


@pytest.mark.slow
def test_machines_that_an_earlier_run_has_left_in_another_way_are_told(project: Path, fake: Path) -> None:
    (project / "train.py").write_text("print('on')\nimport time; time.sleep(300)\n")
    words = ["--provider", "fake", "--budget", "10", "--linger", "10m"]
    with started(*words, "train.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        process.kill()
    err = run(*words, "--dry-run", "train.py")[2]
    assert re.search(r"pool train-\S+ of an earlier run still costs money; `skypool down train-\S+` ends it\n", err)
    assert "rents    fake" in err
    status, _, err = run(*words, "no-such-command")
    assert status == 125
    assert "could not be started" in err
    [pool] = re.findall(r"^stays    pool (\S+), for", err, re.MULTILINE)
    cloud = FakeCloud(fake)
    [machine] = cloud.instances(pool=pool)
    cloud.control.kill(machine)
    status, _, err = run(*words, "no-such-command")
    assert (status, "rents    " in err) == (125, False)
    assert f"pool {pool} of an earlier run may still cost money; `skypool down {pool}` ends it, and --new rents" in err
    cloud.terminate(cloud.instances())


@pytest.mark.slow
def test_a_pool_that_has_lost_a_machine_since_is_not_used_with_the_others(project: Path, fake: Path) -> None:
    (project / "train.py").write_text("import os; print(os.environ['WORLD_SIZE'])\n")
    words = ["--provider", "fake", "--nodes", "2", "--budget", "10", "--linger", "10m"]
    status, _, err = run(*words, "train.py")
    assert status == 0, err
    [pool] = re.findall(r"^stays    pool (\S+), for", err, re.MULTILINE)
    cloud = FakeCloud(fake)
    cloud.control.kill(cloud.instances(pool=pool)[1])
    status, out, err = run(*words, "train.py")
    assert (status, out) == (125, b""), err
    assert f"pool {pool} has lost a machine since the run before; `skypool down {pool}` ends what is left of it" in err
    assert f"pool {pool} has lost a machine: no run uses the others, which stay for" in err
    assert "the next such run uses it" not in err
    cloud.terminate(cloud.instances())


def test_machines_that_stay_get_the_values_that_secrets_have_now(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "train.py").write_text("import os; print(os.environ['KEY'][-3:])\n")
    words = ["--local", "--linger", "10m", "--secret", "KEY", "train.py"]
    for value in ("sesame-one", "sesame-two"):
        monkeypatch.setenv("KEY", value)
        status, out, err = run(*words)
        assert (status, out) == (0, value[-3:].encode() + b"\n"), err
    assert "uses     pool train-" in err
    [pool] = re.findall(r"^stays    pool ([\w-]+)", err, re.MULTILINE)
    subprocess.run([*PROGRAM[:3], "down", "--yes", pool], check=True, capture_output=True, timeout=60)


@pytest.mark.slow
def test_before_a_planned_end_the_program_is_interrupted_and_what_it_saves_is_fetched(
    project: Path, fake: Path
) -> None:
    (project / "train.py").write_text(
        "import os, time\nos.mkdir('out')\ntry:\n    time.sleep(300)\nfinally:\n    open('out/last', 'w').write('x')\n"
    )
    words = ["--provider", "fake", "--gpu", "H100:8", "--budget", "100", "--max-lifetime", "45s", "--save", "out"]
    status, _, err = run(*words, "train.py")
    assert status == 125
    assert "as the budget or the lifetime is over: the program is interrupted" in err
    assert (project / "out" / "last").read_text() == "x"


@pytest.mark.slow
def test_a_rehearsal_with_a_budget_runs_and_is_billed(project: Path, fake: Path) -> None:
    (project / "train.py").write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])\n")
    status, out, err = run("--provider", "fake", "--gpu", "H100:8", "--budget", "100", "train.py")
    assert (status, out) == (0, b"0,1,2,3,4,5,6,7\n"), err
    assert "at most 100.00 USD, ends by " in err


@pytest.mark.parametrize(("answer", "status"), [(b"n\n", 125), (b"y\n", 0)])
def test_a_terminal_is_asked_whether_to_rent_without_a_limit(
    answer: bytes, status: int, project: Path, fake: Path
) -> None:
    (project / "train.py").touch()
    ours, theirs = pty.openpty()
    os.write(ours, answer)
    done = subprocess.run(
        [*PROGRAM, "--provider", "fake", "--gpu", "H100:8", "train.py"], stdin=theirs, capture_output=True, timeout=120
    )
    os.close(ours)
    os.close(theirs)
    assert (done.returncode, done.stdout) == (status, b""), done.stderr
    assert b"USD an hour" in done.stderr
    assert len(bill(fake / "events", time.time())) == (status == 0)


def test_a_program_reads_what_happens_as_json(project: Path) -> None:
    (project / "train.py").write_text("print('hello')")
    status, out, err = run("--json", "train.py")
    assert (status, err) == (0, "")
    told = [json.loads(line) for line in out.splitlines()]
    assert [*dict.fromkeys(each["event"] for each in told)] == ["project", "plan", "start", "output", "end"]
    printed = [each for each in told if each["event"] == "output"]  # in as many pieces as the program wrote
    assert {(each["rank"], each["stream"]) for each in printed} == {(0, "stdout")}
    assert "".join(each["text"] for each in printed) == "hello\n"
    assert (told[-1]["status"], told[-1]["program"], told[-1]["limit"]) == (0, 0, None)
    assert (told[1]["pool"], told[1]["most_usd"], told[1]["ends_by"]) == (told[2]["pool"], 0, None)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--budget", "lots", "train.py"], "--budget"),
        (["--nodes", "0", "train.py"], "--nodes"),
        ([], "TARGET"),
        (["--save"], "--save"),
        (["--name", "Bad!", "train.py"], "a pool's name must have"),
    ],
)
def test_a_wrong_option_is_told_as_all_else_that_is_refused(words: list[str], why: str, project: Path) -> None:
    (project / "train.py").touch()
    status, out, err = run(*words)
    assert (status, out) == (125, b"")
    assert err.startswith("error: ")
    assert why in err
    status, out, err = run("--json", *words)
    (said,) = map(json.loads, out.splitlines())
    assert (status, said["event"], err) == (125, "error", "")
    assert why in said["text"]


def test_what_a_program_is_interrupted_for_is_told_to_programs(project: Path, fake: Path) -> None:
    (project / "train.py").write_text("import time; print('at work', flush=True); time.sleep(300)")
    words = ["--json", "--provider", "fake", "--gpu", "H100:8", "--max-lifetime", "15s", "--save", "out", "train.py"]
    told = [json.loads(line) for line in run(*words)[1].splitlines()]
    plan = next(each for each in told if each["event"] == "plan")
    assert (plan["accelerator"], plan["market"]) == ("H100-80GB:8", "on-demand")
    (end,) = [each for each in told if each["event"] == "end"]
    assert (end["status"], end["program"], end["limit"]) == (125, None, "lifetime")
    assert end["seconds"] < 20


@pytest.mark.parametrize(("more", "ending"), [(["--attached"], 0), ([], ENDING)])
def test_the_latest_end_is_told_to_programs_with_its_date_and_zone(
    more: list[str], ending: float, project: Path
) -> None:
    """A run that belongs to its machine may end a little later, as nobody proves that the machine has ended in time."""
    (project / "train.py").write_text("")
    words = ["--json", "--dry-run", "--provider", "fake", "--gpu", "H100:8", "--max-lifetime", "30h", *more]
    status, out, _ = run(*words, "train.py")
    assert status == 0
    (plan,) = [told for told in map(json.loads, out.splitlines()) if told["event"] == "plan"]
    until = datetime.fromisoformat(plan["ends_by"]) - datetime.now(UTC)
    assert timedelta(hours=29.9) < until - timedelta(seconds=ending) <= timedelta(hours=30)
    assert plan["attached"] == ("--attached says so" if more else None)


def test_words_that_are_secret_change_no_names_of_json(project: Path) -> None:
    (project / "my.ENV").write_text("A=error\nB=the-long-value\nC=short\n")
    status, out, _ = run("--json", "--include", "my.ENV", "sh", "-c", "cat my.ENV; exit 3")
    told = [json.loads(line) for line in out.splitlines()]
    assert (status, told[-1]["event"], told[-1]["status"]) == (3, "end", 3)
    text = "".join(each["text"] for each in told if each["event"] == "output")
    assert text == "A=error\nB=[secret B]\nC=short\n"


def test_a_closed_stdout_is_as_one_that_leads_nowhere(project: Path) -> None:
    line = " ".join(["exec", shlex.join([*PROGRAM, "echo", "hello"]), ">&-"])
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr


def test_two_runs_of_one_project_at_once(project: Path) -> None:
    (project / "train.py").write_text("import sys, time; time.sleep(1); print(sys.argv[1])\n")
    with started("train.py", "a") as one, started("train.py", "b") as other:
        assert one.communicate(timeout=60)[0] == b"a\n"
        assert other.communicate(timeout=60)[0] == b"b\n"
    eventually(lambda: nodes() == [], 30, "the end of both")
