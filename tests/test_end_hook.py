"""Posting how a run has ended to a web server: from here, and from its machine."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.errors import UsageError
from skypool.head.states import Outcome
from skypool.rental.records import RunEnd
from skypool.runs import end_hook
from skypool.runs.end_hook import Posted, checked, post
from skypool.safety import user_folders
from tests.conftest import eventually
from tests.test_detached_run import WAITS, Project, project, skypool

__all__ = ["project"]  # a fixture


@dataclass
class Hook:
    """A web server to which ends are posted.

    Attributes:
        url: its address, with a secret.
        answers: the statuses of the next answers; then 200.
        posts: what was posted.
        drips: True to answer a byte at a time, without end.
    """

    url: str = ""
    secret: str = field(default_factory=lambda: secrets.token_hex(12))
    answers: list[int] = field(default_factory=list[int])
    posts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tries: int = 0
    drips: bool = False


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            made.tries += 1
            said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == f"/services/{made.secret}"
            while made.drips and not is_over.wait(0.05):
                self.wfile.write(b"H")
            status = made.answers.pop(0) if made.answers else 200
            if status == 200:
                made.posts.append(said)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", f"/services/{made.secret}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, args=(0.05,))
    serving.start()
    made.url = f"http://127.0.0.1:{server.server_port}/services/{made.secret}"
    yield made
    is_over.set()
    server.shutdown()
    serving.join()
    server.server_close()


POSTED = Posted("train", RunEnd(Outcome.ENDED, 3, 1), 1.234, 3725.0)


def test_an_end_is_posted_as_slack_and_discord_show_it(hook: Hook) -> None:
    assert post(hook.url, POSTED) == ""
    [said] = hook.posts
    assert said["text"] == said["content"] == "run train ended with status 3; 1:02 h, 1.23 USD"
    assert {each: said[each] for each in ("name", "state", "returncode", "usd", "seconds")} == {
        "name": "train", "state": "ended", "returncode": 3, "usd": 1.234, "seconds": 3725.0
    }  # fmt: skip
    assert said["why"] == "its program has ended with status 3"
    end = RunEnd(Outcome.FAILED, why="<!channel> @everyone " + "x" * 5000)
    assert post(hook.url, Posted("train", end, None, 1.0)) == ""
    said = hook.posts[-1]
    assert said["text"].startswith("run train failed: &lt;!channel&gt; @everyone")
    assert len(said["content"]) < 2000
    assert said["allowed_mentions"] == {"parse": []}


@pytest.mark.parametrize(
    ("answers", "tries", "why"),
    [
        ([500, 503], 3, ""),
        ([429], 2, ""),
        ([500, 500, 500], 3, "127.0.0.1 answered with status 500"),
        ([404], 1, "127.0.0.1 answered with status 404"),
        ([302], 1, "127.0.0.1 answered with status 302"),
    ],
)
def test_an_end_is_posted_in_several_tries_if_another_one_may_help(
    hook: Hook, answers: list[int], tries: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_hook, "_PAUSES", (0.0, 0.01, 0.01))
    hook.answers = answers
    assert post(hook.url, POSTED) == why
    assert (hook.tries, len(hook.posts)) == (tries, not why)


def test_a_server_that_hangs_answers_slowly_or_is_not_there_holds_up_nobody(hook: Hook) -> None:
    hook.drips = True
    began = time.monotonic()
    assert post(hook.url, POSTED, 1.0).startswith("127.0.0.1 ")
    assert post("http://127.0.0.1:9/x", POSTED, 0.5) == "127.0.0.1 could not be reached: Connection refused"
    assert post(hook.url, POSTED, 0.0) == "there was no time for it"
    assert time.monotonic() - began < 10
    assert hook.posts == []


@pytest.mark.parametrize(
    "url",
    ["http://hooks.slack.com/secret", "https://", "https:///secret", "ftp://localhost/secret", "hooks.slack.com/secret",
     "https://me:secret@host/", "https://host/se cret", "https://host/secret\n", "https://host:secret/",
     "https://[secret/", "http://localhost.example.com/secret", "file:///secret", "secret é"],
)  # fmt: skip
def test_an_address_that_is_not_safe_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UsageError, match="--on-end takes") as error:
        checked(url, "--on-end")
    assert "secret" not in str(error.value).removesuffix("as it is a secret; http:// is for localhost only")


@pytest.mark.parametrize("url", ["https://hooks.slack.com/services/T/B/x", "http://localhost:80/x", "http://[::1]:1/"])
def test_an_address_that_is_safe_is_taken(url: str) -> None:
    assert checked(url, "--on-end") == url


def run(project: Project, hook: Hook, program: str, *words: str, status: int) -> str:
    """Run a program with `skypool run`, which posts its end, and return all that the command prints."""
    (project.folder / "train.py").write_text(program)
    argv = skypool("run", "--local", "--name", project.name, "--on-end", "MY_HOOK", *words, "train.py")
    done = subprocess.run(
        argv, cwd=project.folder, env={**os.environ, "MY_HOOK": hook.url}, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == status, done.stderr
    assert hook.secret not in done.stdout + done.stderr
    return done.stdout + done.stderr


def shows_no(secret: str) -> None:
    """No file of skypool's state has a secret."""
    for each in user_folders.state().rglob("*"):
        if each.is_file():
            assert secret.encode() not in each.read_bytes(), each


SEES = """import pathlib
for each in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        text = each.read_bytes()
    except OSError:
        continue
    if b"/services/" + b"{}"[:8] in text:
        print("SEEN", text)
"""


@pytest.mark.slow
def test_a_command_posts_the_end_of_its_run_and_shows_the_address_nowhere(project: Project, hook: Hook) -> None:
    said = run(project, hook, f"{SEES.format(hook.secret)}raise SystemExit(3)", status=3)
    assert "SEEN" not in said
    assert "posted   the end of the run to 127.0.0.1" in said
    [posted] = hook.posts
    assert (posted["name"], posted["state"], posted["returncode"]) == (project.name, "ended", 3)
    assert 0 < posted["seconds"] < 120
    shows_no(hook.secret)


def test_a_post_that_fails_is_told_and_the_run_keeps_its_status(project: Project, hook: Hook) -> None:
    hook.answers = [404]
    said = run(project, hook, f"print({hook.url!r}); raise SystemExit(3)", status=3)
    assert "[secret on_end]" in said
    assert "the end of the run was not posted: 127.0.0.1 answered with status 404" in said


@pytest.mark.slow
@pytest.mark.parametrize("answer", [200, 404])
def test_a_machine_posts_the_end_of_its_run_after_it_is_stored(project: Project, hook: Hook, answer: int) -> None:
    hook.answers = [answer]
    program = f"{SEES.format(hook.secret)}{WAITS}raise SystemExit(3)"
    run(project, hook, program, "--detach", "--max-lifetime", "10m", status=0)
    eventually((project.copy / "began").exists, 60, "the start of the program")
    (project.copy / "go").touch()
    done = subprocess.run(skypool("wait", project.name, "--json"), capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    told = json.loads(done.stdout)
    assert ("its end was not posted: 127.0.0.1 answered with status 404" in told["why"]) == (answer == 404)
    assert (hook.tries, len(hook.posts)) == (1, answer == 200)
    for posted in hook.posts:
        assert (posted["name"], posted["state"], posted["returncode"]) == (project.name, "ended", 3)
        assert 0 < posted["seconds"] < 120
    project.ends()
    assert b"SEEN" not in project.output()
    shows_no(hook.secret)


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_posts_its_end(hook: Hook, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    @sky.compute
    def work() -> int:
        if fails:
            raise ValueError("no luck")
        return 7

    monkeypatch.setenv("MY_HOOK", hook.url)
    done = sky.run(work(), on_end="MY_HOOK")
    [posted] = hook.posts
    assert (posted["name"], posted["returncode"]) == (done.name, int(fails))
    assert ("no luck" in posted["why"]) == fails
    assert ("no luck" in posted["text"]) == fails


def test_an_address_is_refused_before_anything_is_rented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    for said, why in (
        ("http://example.com/x", "on_end= takes an https:// address"),
        ("NO_HOOK", "a value of this name"),
    ):
        with pytest.raises(UsageError, match=why):
            sky.run("train.py", on_end=said)
