"""What servers and programs say reaches neither the terminal nor the logs with control characters in it."""

from __future__ import annotations

import http.server
import json
import os
import pickle
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

import skypool as sky
from skypool import events
from skypool.cli import output
from skypool.drivers.refusals import Refusals
from skypool.drivers.rest import Rest
from skypool.errors import (
    CommandFailed,
    ConnectionLost,
    ErrorGroup,
    ProviderError,
    RemoteError,
    SkypoolError,
    SpoolFull,
    UsageError,
)
from skypool.text import plain, quotable
from skypool.wire.transport import CommandStream, Errand
from tests.conftest import ROOT, served

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31mred\x1b[0m\u202e\b\x00\r over"
HARMLESS = "red\n over"


def is_harmless(text: str) -> bool:
    return all(each.isprintable() or each in "\n\t" for each in text)


class Evil(http.server.BaseHTTPRequestHandler):
    """Answers with control characters in the status line and in the body, which is JSON, text or nonsense."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.do_GET()

    def do_GET(self) -> None:
        if self.path == "/broken":
            self.wfile.write(f"HTTP/1.1 {EVIL}\r\n\r\n".encode())
            self.close_connection = True
            return
        said = {"code": EVIL, "message": EVIL, "gpus": [{EVIL: EVIL}]}
        body = json.dumps(said) if self.path != "/text" else EVIL
        status = 200 if self.path == "/fine" else 400
        line = f"HTTP/1.1 {status} {EVIL}".replace("\r", "").encode("latin-1", "replace")
        self.wfile.write(line + f"\r\nContent-Length: {len(body.encode())}\r\n\r\n{body}".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil)) as made:
        yield f"http://127.0.0.1:{made.server_port}"


@pytest.fixture
def rest(server: str) -> Rest:
    return Rest(server, Refusals("skypool_verda", "verda", "Verda"), dict)


@pytest.mark.parametrize("path", ["/json", "/text", "/broken"])
def test_an_error_of_a_cloud_is_harmless(rest: Rest, path: str) -> None:
    with pytest.raises(ProviderError) as raised:
        rest.once("GET", path)
    error = raised.value
    assert all(map(is_harmless, (str(error), error.code, error.text, *map(str, error.args))))
    assert path == "/broken" or "red" in str(error)
    cause: BaseException | None = error
    while cause is not None:
        assert is_harmless(str(cause))
        cause = cause.__cause__ or cause.__context__


def test_what_a_cloud_says_of_its_machines_is_harmless(rest: Rest) -> None:
    said = rest.once("GET", "/fine")
    assert said["gpus"] == [{HARMLESS: HARMLESS}]
    assert said["message"] == HARMLESS


@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.parametrize("path", ["/json", "/broken"])
def test_the_traceback_of_an_error_of_a_cloud_is_harmless(server: str, path: str, debug: str) -> None:
    program = f"""
        from skypool import tracebacks
        from skypool.drivers.refusals import Refusals
        from skypool.drivers.rest import Rest

        tracebacks.install()
        Rest({server!r}, Refusals("skypool_verda", "verda", "Verda"), dict).once("GET", {path!r})
    """
    argv = [sys.executable, "-c", textwrap.dedent(program)]
    env = {**os.environ, "SKYPOOL_DEBUG": debug}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=ROOT, env=env)
    assert done.returncode == 1
    assert "Verda refused GET" in done.stderr
    assert is_harmless(done.stderr), done.stderr


def test_an_endpoint_of_otlp_cannot_write_to_the_terminal_or_the_logs(
    server: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("opentelemetry.proto")
    told: list[events.Event] = []
    metrics = sky.OTLP(f"{server}/json", protocol="http", every="200ms")
    pool = sky.ComputePool(slots=1, console="plain", name="noted", metrics=metrics)
    pool.events.listen(told.append)
    with pool:
        assert pool.submit(abs, -1).result(60) == 1
    (text,) = [each.text for each in told if isinstance(each, events.Notice) and "metrics cannot be sent" in each.text]
    assert "HTTP status 400" in text
    assert is_harmless(text)
    said = capfd.readouterr()
    assert "HTTP status 400" in said.err + said.out
    assert is_harmless(said.err + said.out)
    done = subprocess.run(
        [sys.executable, "-c", "from skypool.cli import main; main()", "logs", "noted"], capture_output=True, timeout=60
    )
    assert b"HTTP status 400" in done.stdout + done.stderr
    assert b"\x1b" not in done.stdout + done.stderr


def test_what_ssh_and_other_programs_complain_of_is_harmless() -> None:
    argv = [sys.executable, "-c", f"import sys; sys.stderr.write({EVIL!r})"]
    assert CommandStream(argv).end(30) == HARMLESS
    assert Errand(argv, b"").result(time.monotonic() + 60)[2] == HARMLESS


def test_no_error_of_skypool_carries_control_characters() -> None:
    for error in (
        SkypoolError(EVIL),
        UsageError(EVIL),
        ConnectionLost(EVIL, 3),
        ProviderError(EVIL, code=EVIL, text=EVIL),
        SpoolFull(28, EVIL, "/tmp"),
        ErrorGroup("several", [SkypoolError(EVIL)]),
    ):
        assert is_harmless(str(error))
        assert is_harmless(str(pickle.loads(pickle.dumps(error))))
    assert SpoolFull(28, EVIL, "/tmp").errno == 28
    assert SpoolFull(28, EVIL, "/tmp").filename == "/tmp"


def test_colours_of_a_calls_own_output_stay_in_errors() -> None:
    said = "\x1b[31mred\x1b[0m\x1b[2J"
    for error in (CommandFailed("train", 1, said), RemoteError("E", said)):
        assert "\x1b[31mred\x1b[0m" in str(error)
        assert "\x1b[2J" not in str(error)


def test_a_cause_whose_text_cannot_be_cleaned_is_left_out() -> None:
    class Quotes(Exception):
        def __str__(self) -> str:
            return EVIL

    error = ValueError(EVIL)
    error.__cause__ = Quotes()
    kept = quotable(error)
    assert kept is error
    assert is_harmless(str(kept).replace("\r", ""))
    assert error.__cause__ is error.__context__ is None
    assert quotable(Quotes()) is None


def test_events_have_no_control_characters() -> None:
    assert events.Notice(pool="p", text=EVIL).text == HARMLESS
    assert "\x1b[2J" not in events.PoolPhase(pool="p", phase="ended", detail=EVIL).detail


def test_commands_print_no_control_characters(capfd: pytest.CaptureFixture[str]) -> None:
    for say in (output.complain, output.warn, output.say, output.note):
        say(EVIL)
    output.table(["a"], [[EVIL]])
    said = capfd.readouterr()
    assert is_harmless(said.out + said.err)
    assert (said.out + said.err).count("red") == 5


def test_plain_text_stays_as_it_is() -> None:
    for text in ("", "a\tb\nc", "ä – 漢字 🙂", "100 %"):
        assert plain(text) is text or plain(text) == text
