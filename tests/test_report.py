"""Reports of pools: what they say by what is kept, in which words, and when nothing is known."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.calls.tally import BOUNDS, EndedCall
from skypool.cli import report as report_command
from skypool.devices.sample import DeviceSample, NodeSample
from skypool.errors import UsageError
from skypool.head.states import Claim, Entry
from skypool.head.states import Ledger as HandedOver
from skypool.processes import Process
from skypool.rental.budget import Budget
from skypool.rental.ledger import Ledger
from skypool.rental.receipt import Line
from skypool.rental.records import Record, RunRecord
from skypool.report import words
from skypool.report.elements import element
from skypool.report.facts import collect
from skypool.report.page import page
from skypool.report.report import report_of
from skypool.report.timeline import fewer
from skypool.report.widget import Now, picture
from skypool.samples.journal import Journal, JournalEvent, WorkSpan, read
from skypool.samples.session_file import path_of
from skypool.samples.store import points
from tests.conftest import ROOT, eventually
from tests.facts import Kept

PROGRAM = [sys.executable, "-c", "import sys; from skypool.cli import main; sys.exit(main())"]
BEGAN = 1_700_000_000.0
GONE = replace(Process.this(), birth="another")
EVIL = "<script>alert(1)</script>\x1b[31m\u202e&"


class Reader(HTMLParser):
    """The tags, the texts and the attributes of a page. Raises AssertionError if a tag is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def line(node: int, **values: Any) -> Line:
    made = Line(
        provider="aws", id=f"i-{node}", type="p5.48xlarge", place="us-east-1a", market="spot", node=node,
        usd_per_hour=36.0, least_billed=0.0, launched=BEGAN, until=BEGAN + 3600, billed_from=BEGAN, ended=True,
        idle_at=BEGAN + 3600, idle_usd_then=9.0, idle_seconds_then=900.0, is_idle=False,
    )  # fmt: skip
    return replace(made, **values)


def record(**values: Any) -> Record:
    made = Record(
        pool="train", session="0123", client=GONE, started=BEGAN, beat=BEGAN + 3600, lease=600.0, budget=Budget(100),
        ending=BEGAN + 3590, ended=BEGAN + 3600, error="", lines=(line(0),), intents=(), notes=(),
    )  # fmt: skip
    return replace(made, **values)


def said(file: Path, **values: Any) -> str:
    return page(collect(record(**values), file, BEGAN + 7200))


def rows(html: str, heading: str) -> list[str]:
    """Return the cells of all columns with a heading."""
    found = re.findall(rf'<t[dh][^>]* data-heading="{re.escape(heading)}"[^>]*>(.*?)</t[dh]>', html)
    return [re.sub("<[^>]*>", "", each) for each in found]


def phase(at: float, name: str, node: int = 0, **more: object) -> JournalEvent:
    return JournalEvent(BEGAN + at, "NodePhase", node, {"phase": name, "detail": "", **more})


def step(at: float, state: str, number: int = 1) -> JournalEvent:
    return JournalEvent(
        BEGAN + at, "BootstrapStep", 0, {"step": f"pip {number}", "state": state, "number": number, "steps": 2}
    )


def history(file: Path) -> Journal:
    """Write the history of a pool of two nodes, of which one is taken back by its provider."""
    made = Journal(lambda: file)
    counts = {"ok": 3, "failed": 1, "cancelled": 0, "retried": 1, "classes": [0] * (len(BOUNDS) + 1), "seconds": 61.5}
    counts["classes"] = [4 if each == 0.5 else 0 for each in (*BOUNDS, None)]
    made.write(
        [
            phase(0, "launching"), phase(10, "booting"), phase(60, "bootstrapping"), step(61, "started"),
            step(70, "retried"), step(90, "done"), step(90, "skipped", 2), phase(100, "ready"),
            phase(3590, "draining"), phase(3600, "ended"),
            phase(0, "launching", 1), phase(200, "ready", 1),
            JournalEvent(BEGAN + 300, "NodeInterruption", 1, {"at": BEGAN + 420}),
            phase(420, "ended", 1, detail=f"taken back {EVIL}"),
            JournalEvent(BEGAN + 500, "Notice", -1, {"text": "the pool cannot grow"}),
        ],
        [
            EndedCall("train", 0, BEGAN + 200, 60.0, "ok", ""),
            EndedCall(f"lambda {EVIL}", 1, BEGAN + 210, 0.5, "failed", f"ValueError: {EVIL}"),
        ],
        [WorkSpan(0, BEGAN + 100, BEGAN + 3590, 1745.0)],
        {
            "calls 1": counts, "done 0 1": 2, "done 0 2": 1,
            "node 0": {"hardware": "8 H100", "claimed": False}, "plan": f"plan {EVIL}",
            "prices": [
                {"provider": "aws", "type": "p5.48xlarge", "place": "us-east-1a", "market": "spot",
                 "usd_per_hour": 36.0, "source": "table", "as_of": "2026-03-02"},
                {"provider": "aws", "type": "p5.4xlarge", "place": "", "market": "spot",
                 "usd_per_hour": 6.0, "source": "table", "as_of": ""},
            ],
        },
    )  # fmt: skip
    return made


# --- elements ------------------------------------------------------------------------------------------------


def test_texts_and_attributes_are_escaped() -> None:
    made = element("p", EVIL, element("b", "x"), None, title='"><script>', data_busy=0.5, hidden=False, open=True)
    assert str(made) == (
        '<p title="&quot;&gt;&lt;script&gt;" data-busy="0.5" open>'
        "&lt;script&gt;alert(1)&lt;/script&gt;�[31m�&amp;<b>x</b></p>"
    )
    with pytest.raises(ValueError, match="not the name"):
        element("p onclick=alert(1)")


# --- what is said --------------------------------------------------------------------------------------------


def test_a_report_tells_what_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "s.sqlite3"
    history(file)
    html = said(file)
    told = Reader(html)
    assert ("html", {"lang": "en"}) in told.tags
    assert "<script" not in html
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert [tag for tag, _ in told.tags if tag in ("h1", "h2")] == ["h1", *["h2"] * 6]
    assert rows(html, "ready after") == ["1 min 40 s", "3 min 20 s"]
    assert rows(html, "worked") == ["50 %", "unknown"]
    assert rows(html, "calls")[:2] == ["3", "unknown"], "what a node did is unknown until it tells"
    assert rows(html, "interruptions") == ["0", "1"]
    assert rows(html, "idle USD") == ["9.0000", "9.0000"]
    assert rows(html, "idle") == ["25 %", "25 %"]
    assert rows(html, "price as of") == ["2026-03-02", "unknown"]
    assert "4 calls ended: 3 well, 1 with an error" in told.text
    assert "the provider takes the machine back at" in told.text
    assert "36 % of the budget of 100.0000" in told.text
    assert rows(html, "retries") == ["1", "0"]
    assert rows(html, "skipped") == ["0", "1"]
    titles = re.findall(r"<title>(.*?)</title>", html)
    assert any(each.startswith("worked 50 % of") for each in titles)
    assert any(each.startswith("boot: 50.0 s") for each in titles)
    assert any("lambda" in each and "failed" in each for each in titles)


def folder(at: float, node: int, phase: str, **more: object) -> JournalEvent:
    told = asdict(events.FolderSaved(pool="train", node=node, folder="out", url="s3://models/x", phase=phase))
    return JournalEvent(BEGAN + at, "FolderSaved", node, {**told, **more})


def test_folders_are_told_with_what_was_not_saved_and_what_an_interruption_cost(tmp_path: Path) -> None:
    file = tmp_path / "0123.sqlite3"
    Journal(lambda: file).write([
        phase(0, "launching"), folder(60, 0, "restoring"), folder(65, 0, "saving"), phase(66, "ready"),
        folder(100, 0, "saving", files=2, bytes=2_000), folder(130, 0, "saving", files=2, bytes=2_000, trouble="<no>"),
        JournalEvent(BEGAN + 200, "LinkDown", 0, {"reason": "silent"}),
        phase(230, "draining"), phase(231, "ended"), phase(231, "launching", 1), folder(300, 1, "restoring"),
        folder(320, 1, "saving", restored=2, restored_bytes=2_000), phase(321, "ready", 1),
        folder(400, 1, "saving", files=1, bytes=7, restored=2, restored_bytes=2_000),
        folder(
            500, 1, "ended", files=1, bytes=7, restored=2, restored_bytes=2_000, unsaved=1, unsaved_bytes=9_000_000,
            names=["model.pt"], refused=[["pipe", "it is no file"]],
        ),
    ])  # fmt: skip
    html = said(file)
    assert rows(html, "folder") == ["out", "out"]
    assert rows(html, "last saved") == [words.clock(BEGAN + each) for each in (100, 400)]
    assert rows(html, "brought back") == ["nothing", "2 files, 2.0 kB"]
    assert rows(html, "back after") == ["", "2 min 00 s"]
    assert rows(html, "not saved") == ["unknown", "1 file, 9.0 MB: model.pt; pipe: it is no file"]
    assert rows(html, "trouble") == ["&lt;no&gt;", "none"]
    assert "1 interruption took 2 min 00 s in all." in html


def test_a_pool_of_which_only_the_costs_are_known_says_unknown(tmp_path: Path) -> None:
    html = said(tmp_path / "none.sqlite3", lines=(line(0, idle_at=None),))
    told = Reader(html)
    assert "The history of this run is not kept" in told.text
    assert rows(html, "USD") == ["36.0000", "36.0000"]
    assert rows(html, "idle USD") == ["unknown", "unknown"]
    assert rows(html, "idle") == ["unknown", "unknown"]
    assert "The number of calls is unknown" in told.text
    assert re.search(r"Calls</dt><dd><strong class=\"unknown\">unknown", html)
    assert rows(html, "devices") == ["unknown"]


def test_a_pool_that_was_killed_is_drawn_until_its_last_sign_of_life(tmp_path: Path) -> None:
    file = tmp_path / "s.sqlite3"
    made = Journal(lambda: file)
    made.write([phase(0, "launching"), phase(100, "ready")], work=[WorkSpan(0, BEGAN + 100, BEGAN + 400, 0.0)])
    open_line = line(0, ended=False, until=BEGAN + 7200, is_idle=True)
    killed = record(ended=None, ending=None, beat=BEGAN + 401, lines=(open_line,))
    facts = collect(killed, file, BEGAN + 7200)
    assert (facts.state, facts.start, facts.end) == ("left", BEGAN, BEGAN + 401)
    [node] = facts.nodes
    assert (node.ended, node.phases[-1].until, node.phases[-1].is_over) == (None, BEGAN + 401, False)
    text = Reader(page(facts)).text
    assert "left behind" in text
    assert "The end of 1 machine is not proved, so its cost is counted until now" in text


def test_the_report_of_a_run_that_belongs_to_its_machine_tells_how_the_run_stands(tmp_path: Path) -> None:
    ends = BEGAN + 36_000
    given = RunRecord(Claim("train"), Entry(HandedOver.DETACHED), BEGAN + 60, ends, ends + 120, 100.0, "digest")
    there = line(0, ended=False, until=BEGAN + 7200)
    html = said(tmp_path / "none.sqlite3", run=given, ended=None, ending=None, lines=(there,))
    text = Reader(html).text
    assert "State: its machine belongs to its run." in text
    assert re.search(r"Run: running since .*: its machine ends at .* at the latest\.", text)


def test_claims_of_strangers_are_marked(tmp_path: Path) -> None:
    file = tmp_path / "s.sqlite3"
    now = time.time()
    device = DeviceSample("cuda", 0, utilization_percent=50.0, unknown="")
    Kept(file).write([NodeSample(node=node, time=now, claimed=node == 1, devices=(device,)) for node in range(2)])
    html = page(collect(record(started=now - 60, ended=now + 1), file, now + 2))
    assert rows(html, "source") == ["measured", "claimed"]
    assert html.count("claimed by the machine's owner") == 1
    assert rows(html, "memory, highest") == ["unknown", "unknown"], "a value that was not reported is no 0"
    assert rows(html, "utilisation")[:2] == ["50 %", "50 %"]
    assert 'data-series="memory"' not in html


def test_points_are_means_of_all_samples(tmp_path: Path) -> None:
    file = tmp_path / "s.sqlite3"
    kept = Kept(file)
    now = time.time() - 1000
    for second in range(1000):
        device = DeviceSample("cuda", 0, utilization_percent=float(second % 2), memory_used_mib=float(second))
        kept.new.add([NodeSample(time=now + second, cpu_percent=10.0, devices=(device,) if second else ())])
    kept.write()
    found = [each for each in points(file, 100, 30_000) if each.kind]
    assert 95 <= len(found) <= 105
    assert sum(each.samples for each in found) == 999
    mean = sum((each.use_percent or 0) * each.samples for each in found) / 999
    assert mean == pytest.approx(500 / 999)
    assert {each.most_used_percent for each in found} == {1.0}
    assert max(each.most_memory_mib or 0 for each in found) == 999.0
    assert {each.power_watts for each in found} == {None}
    assert points(tmp_path / "none.sqlite3", 100, 30_000) == []


def test_joined_spans_have_the_same_sum() -> None:
    spans = [WorkSpan(0, float(n), n + 1.0, n / 1000) for n in range(1000)]
    joined = fewer(spans, 90)
    assert len(joined) <= 90
    assert (joined[0].since, joined[-1].until) == (0.0, 1000.0)
    assert sum(each.busy for each in joined) == pytest.approx(sum(each.busy for each in spans))
    assert fewer(spans, 1000) == spans


def test_the_picture_of_a_pool_escapes_what_nodes_say_and_tells_what_is_unknown() -> None:
    device = {"utilization_percent": 40.0, "memory_used_mib": 25.0, "memory_total_mib": 100.0}
    node = {
        "state": "ready", "type": "p5.48xlarge", "place": "us-east-1a", "hardware": EVIL, "busy": 1, "slots": 8,
        "done": 5, "running": [EVIL],
    }  # fmt: skip
    nodes = [
        {**node, "node": 0, "sample": {"devices": [device, {}, {**device, "utilization_percent": 80.0}]}},
        {**node, "node": 1, "sample": None},
        {**node, "node": 2, "sample": {"cpu_percent": 7.0}},
        {**node, "node": 3, "state": "ended", "sample": None},
    ]
    info = {
        "phase": "ready", "usd": 1.5, "usd_per_hour": 3.0, "idle_usd": None, "waiting": 2, "done": 5, "failed": 1,
        "nodes": [*nodes, *({**nodes[1], "node": 4 + more} for more in range(40))],
    }  # fmt: skip
    html = picture("train", Now(info))
    assert "<script" not in html
    assert "ready · 1.5000 USD · 3.0000 USD/h · idle unknown USD · 5 calls done, 1 failed, 2 waiting" in html
    rows = [re.sub("<[^>]*>", "|", each) for each in html.split("<tr>")[2:]]
    assert re.findall(r"\|(\d+ %)\|", rows[0]) == ["60 %", "25 %"]
    assert rows[1].count("unknown") == 2
    assert (re.findall(r"\|(\d+ %)\|", rows[2]), rows[2].count("unknown")) == (["7 %"], 1)
    assert len(rows) == 32
    assert "and 11 more nodes" in html
    assert "not started" in picture("train", Now())
    assert sky.ComputePool(name="shown")._repr_html_() == picture("shown", Now())


# --- pools ---------------------------------------------------------------------------------------------------


def test_a_pool_reports_while_it_runs_and_after_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = sky.ComputePool(console="off", slots=1, name="reported")
    with pytest.raises(UsageError, match="not been started"):
        pool.report()
    with pool:
        assert pool.submit(os.getpid).result()
        during = pool.report()
        assert "State: running" in during.html
        assert "1 call ended: 1 well" in during.html
        frame = during._repr_html_()
        assert frame.startswith("<iframe ")
        assert 'sandbox=""' in frame
        assert "<h1>" not in frame, "the page is the value of an attribute"
    after = pool.report()
    assert "State: ended" in after.html
    assert after.save(tmp_path / "report.html").read_text() == after.html
    shown = subprocess.run([*PROGRAM, "report", "reported"], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (shown.returncode, shown.stdout.strip()) == (0, "reported-report.html"), shown
    written = (tmp_path / "reported-report.html").read_text()
    assert written.partition("<main>")[2] == after.html.partition("<main>")[2]
    monkeypatch.chdir(tmp_path)
    for name, file, run, text in (
        ("reportet", "", "", "did you mean reported"),
        ("reported", "", "12", "has no run '12'"),
        ("reported", str(tmp_path), "", "cannot be written"),
    ):
        with pytest.raises(UsageError, match=re.escape(text)):
            report_command.report(name, file, run)


KILLED = """
import sys
import skypool as sky

@sky.compute
def work(x):
    import time
    time.sleep(0.05)
    return 1 / x

if __name__ == "__main__":
    pool = sky.ComputePool(name="killed-report", console="off", slots=1, lease="10s").start()
    [(work(x) > pool).exception() for x in range(20)]
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_report_is_made_after_the_client_was_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(KILLED))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "providers", ROOT / "images")))}
    with subprocess.Popen(
        [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        [running] = Ledger.here().pools("killed-report")
        file = path_of(running.session)
        eventually(
            lambda: sum(v for k, v in read(file).facts.items() if k.startswith("done 0 ")) == 20, 30, "the calls"
        )
        assert "State: running" in report_of(running).html
        client.send_signal(signal.SIGKILL)
    found = read(file)
    assert [each.data["phase"] for each in found.events if each.kind == "NodePhase"][-1] == "ready"
    assert 0.9 < sum(each.busy for each in found.work) < 30
    argv = [*PROGRAM, "report", "killed-report", "-o", "-"]
    html = subprocess.run(argv, capture_output=True, text=True, check=True, env=env, timeout=60).stdout
    assert "State: left behind" in html
    assert "20 calls ended: 19 well, 1 with an error" in html
    assert "ZeroDivisionError" in html
    subprocess.run([*PROGRAM, "down", "killed-report", "--yes"], env=env, capture_output=True, timeout=60)
    [ended] = Ledger.here().pools("killed-report")
    assert "State: ended" in report_of(ended).html
    assert all(each.ended for each in ended.lines)
