"""`skypool health`, `stack`, `top`, `report` and `forward` of a run that belongs to its machine."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from skypool.cli import top_survey
from skypool.errors import ProtocolError, SkypoolError, UsageError
from skypool.observers.protocol import ANY, VERSION, Info, line_of, request_of
from skypool.runs import observing
from skypool.samples import journal, session_file
from tests.conftest import eventually
from tests.handed_runs import record_of
from tests.test_detached_run import Project, project, skypool
from tests.test_looking import Machine, invoke, machine

__all__ = ["machine", "project"]  # fixtures
SERVES = """import http.server, os, threading
class Here(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"from the program")
server = http.server.HTTPServer(("127.0.0.1", 0), Here)
open("port.part", "w").write(str(server.server_port))
os.rename("port.part", "port")
server.serve_forever()
"""


def test_observers_of_every_version_may_ask_for_the_state_and_for_nothing_else() -> None:
    assert request_of(line_of({"skypool": ANY, "ask": "info"})) == Info()
    for wrong in ({"skypool": ANY, "ask": "logs"}, {"skypool": VERSION + 1, "ask": "info"}, {"ask": "info"}):
        with pytest.raises(UsageError, match="version"):
            request_of(line_of(wrong))


def test_a_run_that_is_over_or_has_no_runner_is_told_as_such(machine: Machine) -> None:
    with pytest.raises(SkypoolError, match="run 'train': the runner of the run there does not answer"):
        observing.info(record_of())
    machine.ends()
    said = invoke("health", "train")
    assert isinstance(said.exception, observing.IsOver)
    assert "`skypool wait train` says how it has ended" in str(said.exception)
    said = invoke("top", "train", "--once")
    assert "! run 'train' is over" in said.stdout
    assert isinstance(invoke("stack", "train").exception, observing.IsOver)


def rows(*lines: bytes, cut: int = 0) -> Iterator[bytes]:
    data = zlib.compress(b"".join(lines))
    yield data[: len(data) - cut]
    while True:
        yield b""


@pytest.mark.parametrize(
    "line", [b"{}", b"[1, 2]", b'["pool", {}]', b'["event", []]', b'["fact", {"name": [1]}]', b"\xff", b"x" * (5 << 20)]
)
def test_a_history_that_makes_no_sense_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(observing._rows(rows(line + b"\nnull\n").__next__))


def test_a_history_of_which_the_end_is_missing_is_not_taken_for_a_whole_one() -> None:
    with pytest.raises(EOFError):
        list(observing._rows(rows(b'["fact", {"name": "plan", "data": "1"}]\n').__next__))
    with pytest.raises(ProtocolError):
        list(observing._rows(iter([b"no zip"]).__next__))


def test_a_report_has_what_both_sides_know_also_when_the_machine_is_gone(machine: Machine, tmp_path: Path) -> None:
    record = record_of()
    there = machine.place / "state" / "skypool" / "samples" / f"{record.session}.sqlite3"
    there.parent.mkdir(mode=0o700, parents=True)
    with session_file.writing(there) as book, book:
        book.execute(
            "insert into event values (1, ?, 'NodeFailed', 0, ?)", [time.time(), json.dumps({"error": "THERE"})]
        )
    with session_file.writing(session_file.path_of(record.session)) as book, book:
        book.execute(
            "insert into event values (1, ?, 'NodeFailed', 0, ?)", [time.time() - 9, json.dumps({"error": "HERE"})]
        )
    said = invoke("report", "train", "-o", "-")
    assert said.stderr.startswith("from the machine of run train, fake ")
    assert "<html" in said.stdout
    machine.cloud.control.kill(machine.cloud.instances(pool="train")[0])
    shutil.rmtree(machine.place)
    said = invoke("report", "train", "-o", "-")
    assert said.stderr.startswith("from what was fetched at ")
    with observing.whole_history(record, tmp_path / "made") as file:
        assert [each.data["error"] for each in journal.read(file).events] == ["HERE", "THERE"]
    observing.history_file(record).unlink()
    assert (
        "the report has nothing that only the machine of run train knew" in invoke("report", "train", "-o", "-").stderr
    )
    assert not [*session_file.folder().glob(f"*{session_file.FETCHING}*")]


def out(*words: str) -> str:
    done = subprocess.run(skypool(*words), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    if words[-1] != "--once":
        assert "from the machine of run" in done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_is_observed_from_other_terminals(project: Project, tmp_path: Path) -> None:
    project.run(SERVES, "--max-lifetime", "10m")
    name = project.name
    eventually(lambda: (project.copy / "port").exists(), 60, "the start of the program")
    eventually(lambda: json.loads(out("health", name, "--json"))[0]["sample"], 30, "a measurement")
    stack = out("stack", name)
    assert "serve_forever" in stack
    assert "train.py" in stack
    assert "skypool.runs.runner" not in stack
    assert "worker" in stack.splitlines()[-1]
    [program] = [each for each in map(json.loads, out("stack", name, "--json").splitlines()) if each["stacks"]]
    assert "train.py" in program["name"]
    top = out("top", name, "--once")
    assert "from the machine of run" in top
    assert "1/1" in top
    out("report", name, "-o", str(tmp_path / "report.html"))
    assert "run" in (tmp_path / "report.html").read_text()

    port = (project.copy / "port").read_text()
    with subprocess.Popen(skypool("forward", name, port, "--here", "0"), stdout=subprocess.PIPE, text=True) as forward:
        assert forward.stdout is not None
        address = forward.stdout.readline().split("http://")[1].split()[0]
        connection = http.client.HTTPConnection(address, timeout=30)
        connection.request("GET", "/")
        assert connection.getresponse().read() == b"from the program"
        connection.close()
        forward.send_signal(signal.SIGINT)
        assert forward.wait(30) == 0


@pytest.mark.slow
def test_a_view_that_goes_on_hears_of_a_run_over_one_connection(project: Project) -> None:
    project.run(SERVES, "--max-lifetime", "10m")
    survey = top_survey.Survey(project.name)
    survey.start()
    times: set[float] = set()
    try:

        def seen() -> bool:
            times.update(each.at for each in survey._answers.values())
            return len(times) >= 3

        eventually(seen, 60, "three answers")
        [view] = survey.views()
        assert (view.state, view.busy) == ("running", 1)
    finally:
        survey.stop()
