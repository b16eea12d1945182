"""How a cloud is asked: settings, questions at once and again, refusals, checks."""

from __future__ import annotations

import contextlib
import errno
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skypool.drivers import Refusals, Rest, contract, pages, preflight, retry, settings
from skypool.errors import CapacityError, NoAnswer, ProviderError, RateLimitError, StillRunning, UsageError
from tests.conftest import served

# --- settings ------------------------------------------------------------------------------------------------


def test_a_word_is_one_of_several() -> None:
    assert settings.words("zone", "a", "[a-z]", "'a'") == ("a",)
    assert settings.words("zone", ["a", "b"], "[a-z]", "'a'") == ("a", "b")
    assert settings.words("zone", None, "[a-z]", "'a'") is None


@pytest.mark.parametrize("value", ["", "A", 1, [], ["a", 2], [["a"]]])
def test_what_has_another_shape_is_refused_with_what_it_is_like(value: object) -> None:
    with pytest.raises(UsageError, match="'a'"):
        settings.words("zone", value, "[a-z]", "'a'")


def test_a_mistyped_word_is_told_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'fra-1'"):
        settings.words("region", "far1", r"[a-z]+-\d", "'x-1'", ["fra-1", "lon-1"])


# --- questions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("errors", "calls"), [([errno.EMFILE, errno.ENFILE], 3), ([errno.EMFILE, errno.EACCES], 2)])
def test_machines_end_though_no_descriptor_is_left_for_a_while(errors: list[int], calls: int) -> None:
    asked: list[int] = []

    def terminate(instances: object) -> None:
        asked.append(1)
        if errors:
            raise OSError(errors.pop(0), "no")

    driver: Any = SimpleNamespace(name="cloud", terminate=terminate)
    if calls == 3:
        contract.terminate(driver, [])
    else:
        with pytest.raises(StillRunning):
            contract.terminate(driver, [])
    assert len(asked) == calls


def test_outcomes_are_in_order_and_errors_are_among_them() -> None:
    def invert(number: int) -> float:
        return 1 / number

    one, error, half = retry.at_once(invert, [1, 0, 2])
    assert (one, half) == (1, 0.5)
    assert isinstance(error, ZeroDivisionError)


def test_questions_are_asked_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=10)
    assert sorted(map(str, retry.at_once(lambda _: barrier.wait(), range(3)))) == ["0", "1", "2"]


def test_an_interpreter_that_exits_asks_one_after_the_other() -> None:
    code = """
import atexit
from skypool.drivers import retry
atexit.register(lambda: print(retry.at_once(str, [1, 2, 3])))
retry.at_once(str, [1, 2])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("['1', '2', '3']\n", "")


@pytest.mark.parametrize("first", [RateLimitError("slow"), NoAnswer("lost"), ProviderError("held", code="InUse")])
def test_what_passes_is_asked_for_again(first: ProviderError) -> None:
    refusals = [first]

    def ask() -> str:
        if refusals:
            raise refusals.pop()
        return "yes"

    assert retry.patiently(ask, 10, "InUse") == "yes"


def test_who_asks_for_no_pause_gets_one_all_the_same() -> None:
    asked = []

    def ask() -> None:
        asked.append(1)
        raise RateLimitError("slow", retry_after=0.0)

    with pytest.raises(RateLimitError):
        retry.patiently(ask, 1.0)
    assert len(asked) < 50


def test_what_does_not_pass_is_raised_at_once() -> None:
    asked = []

    def ask() -> None:
        asked.append(1)
        raise CapacityError("none left", code="Sold")

    with pytest.raises(CapacityError):
        retry.patiently(ask, 10, "InUse")
    assert asked == [1]


def test_a_refusal_with_one_of_the_codes_is_quiet_and_any_other_is_not() -> None:
    def ask() -> str:
        raise CapacityError("none left", code="Sold")

    assert retry.quietly(lambda: "yes") == "yes"
    assert retry.quietly(ask, "Gone", "Sold") is None
    for codes in ((), ("Gone",)):
        with pytest.raises(CapacityError):
            retry.quietly(ask, *codes)


# --- the caller's own address --------------------------------------------------------------------------------


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """What the service that tells addresses answers."""
    answers: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers[0])

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        monkeypatch.setattr(settings, "_ADDRESS", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield answers


def test_this_machines_public_address_is_found(says: list[bytes]) -> None:
    says.append(b"203.0.113.9\n")
    assert settings.networks(None) == ["203.0.113.9/32"]
    assert settings.networks(["10.0.0.0/8"]) == ["10.0.0.0/8"]


@pytest.mark.parametrize("answer", [b"<html>log in to this wifi</html>", b""])
def test_an_address_that_cannot_be_found_is_told_and_how_to_say_it(says: list[bytes], answer: bytes) -> None:
    says.append(answer)
    with pytest.raises(ProviderError, match="ssh_from="):
        settings.networks(None)


@pytest.mark.parametrize(("off", "good"), [(0, True), (-100, True), (-900, False), (900, False)])
def test_a_clock_that_is_wrong_is_told_of(off: int, good: bool) -> None:
    date = (datetime.now(UTC) + timedelta(seconds=off)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    if good:
        assert preflight.clock(date).endswith("s off")
    else:
        with pytest.raises(UsageError, match="s off, but"):
            preflight.clock(date)


IMPORTS = """
import sys, threading, time
from skypool.drivers.sdk import imported

class Slow:
    # Whoever looks for the package takes so long that another thread asks for a part of it meanwhile.
    def find_spec(self, name, path=None, target=None):
        if name == "requests":
            looking.set()
            time.sleep(0.5)
        return None

looking, failed = threading.Event(), []
sys.meta_path.insert(0, Slow())

def take(module):
    try:
        imported(module)
    except Exception as e:
        failed.append(e)

first = threading.Thread(target=take, args=("requests",))
first.start()
looking.wait()
take("requests.exceptions")
first.join()
print(failed)
"""


def test_threads_that_import_parts_of_one_sdk_do_not_wait_for_each_other_for_ever() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


def test_a_driver_without_requests_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, extra in (("acme", "Provides-Extra: acme\n"), ("bare", "")):
        info = tmp_path / f"sky_{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sky-{name}\nVersion: 1\n{extra}")
        (info / "entry_points.txt").write_text(f"[skypool.providers]\n{name} = sky_{name}:Driver\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "requests", None)
    commands = {
        "verda": "pip install 'skypool[verda]'",
        "acme": "pip install 'sky-acme[acme]'",
        "bare": "pip install requests",
        "of-no-package": "pip install requests",
    }
    for provider, command in commands.items():
        api = Rest("http://localhost:9", Refusals("skypool_verda", provider, "It"), dict)
        with pytest.raises(UsageError, match="needs the package requests, which is not installed") as refused:
            api.once("GET", "/machines", what="a list")
        assert str(refused.value) == f"a list needs the package requests, which is not installed; run: {command}"


# --- lists ---------------------------------------------------------------------------------------------------


class Paged:
    """An API that answers each request for a list with the next of some pages: (body, headers)."""

    def __init__(self, pages: Sequence[tuple[object, dict[str, str]]]) -> None:
        self.asked = asked = list[str]()
        left = list(pages)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                body, headers = left.pop(0)
                told = json.dumps(body).encode()
                self.send_response(200)
                for name, value in {"Content-Length": str(len(told)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(told)

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.rest = Rest(f"http://127.0.0.1:{self.server.server_port}", Refusals("skypool_verda", "acme", "Acme"), dict)


@contextlib.contextmanager
def paged(*told: tuple[object, dict[str, str]]) -> Iterator[Paged]:
    api = Paged(told)
    with served(api.server):
        yield api


def test_a_list_is_read_to_its_end_and_a_page_may_be_empty() -> None:
    first = {"vms": [1, 2], "pagination": {"nextCursor": "a", "hasNextPage": True}}
    empty = {"vms": [], "pagination": {"nextCursor": "b", "hasNextPage": True}}
    last = {"vms": [3], "pagination": {"nextCursor": None, "hasNextPage": False}}
    with paged((first, {}), (empty, {}), (last, {})) as api:
        found = api.rest.ask_all("/vms", "vms", params={"of": "me"}, next="pagination.nextCursor", token="cursor")
    assert (found, found.pages) == ([1, 2, 3], 3)
    assert api.asked == ["/vms?of=me", "/vms?of=me&cursor=a", "/vms?of=me&cursor=b"]


def test_a_page_that_says_that_none_follows_is_the_last_whatever_token_it_has() -> None:
    with paged(({"vms": [1], "pagination": {"nextCursor": "a", "hasNextPage": False}}, {})) as api:
        assert api.rest.ask_all("/vms", "vms", next="pagination.nextCursor", token="cursor") == [1]


WHOLE: list[tuple[str, object, dict[str, str]]] = [
    ("", [1], {}),
    ("", [1], {"X-Total-Count": "1", "Link": '</vms?page=1>; rel="prev"'}),
    ("vms", {"vms": [1], "next": None, "previous": "x", "has_more": False, "total": 1}, {}),
    (
        "vms",
        {"vms": [1], "truncated": False, "pagination": {"totalPages": 1, "count": 1}},
        {"Content-Range": "vms 0-0/1"},
    ),
    ("pages", {"pages": [1]}, {"X-Next-Page": "", "X-Total": "1", "X-Total-Pages": "1"}),
    ("vms", {"vms": [1], "labels": {"next": 3}, "meta": {"total": 1, "links": {"next": ""}}}, {}),
]
BROKEN_OFF: list[tuple[str, object, dict[str, str]]] = [
    ("", [1], {"Link": '</vms?page=2>; rel="next"'}),
    ("", [1], {"X-Total-Count": "2"}),
    ("vms", {"vms": [1], "next": "x"}, {}),
    ("vms", {"vms": [1], "has_more": True}, {}),
    ("vms", {"vms": [1], "total": 2}, {}),
    ("vms", {"vms": [1], "next_page_token": "x"}, {}),
    ("vms", {"vms": [1], "meta": {"nextCursor": "x"}}, {}),
    ("vms", {"vms": [1], "pagination": {"hasNextPage": True, "nextCursor": None}}, {}),
    ("vms", {"vms": [1], "_links": {"next": {"href": "/vms?page=2"}}}, {}),
    ("vms", {"vms": [1], "metadata": {"continue": "x"}}, {}),
    ("vms", {"vms": [1], "meta": {"links": {"next": "x"}}}, {}),
    ("vms", {"vms": [1], "IsTruncated": True}, {}),
    ("vms", {"vms": [1], "count": 2}, {}),
    ("vms", {"vms": [1], "totalItems": "2"}, {}),
    ("vms", {"vms": [1], "meta": {"total_entries": 2}}, {}),
    ("vms", {"vms": [1], "pagination": {"currentPage": 1, "totalPages": 2}}, {}),
    ("vms", {"vms": [1], "page": 1, "pages": 2}, {}),
    ("vms", {"vms": [1], "meta": {"last_page": 2}}, {}),
    ("vms", {"vms": [1], "metadata": {"remainingItemCount": 1}}, {}),
    ("", [1], {"X-Total": "2"}),
    ("", [1], {"X-Total-Pages": "2"}),
    ("", [1], {"X-Next-Page": "2"}),
    ("", [1], {"Content-Range": "vms 0-0/2"}),
]


@pytest.mark.parametrize(("field", "body", "headers"), WHOLE)
def test_an_answer_that_says_nothing_of_more_is_a_whole_list(field: str, body: object, headers: dict[str, str]) -> None:
    with paged((body, headers)) as api:
        assert api.rest.ask_all("/vms", field) == [1]


@pytest.mark.parametrize(("field", "body", "headers"), BROKEN_OFF)
def test_an_answer_that_says_in_any_way_that_there_is_more_is_no_list(
    field: str, body: object, headers: dict[str, str]
) -> None:
    with paged((body, headers)) as api, pytest.raises(ProviderError, match="may be incomplete") as error:
        api.rest.ask_all("/vms", field, what="the list of machines")
    assert (error.value.code, error.value.provider) == ("incomplete", "acme")
    assert "the list of machines" in str(error.value)
    assert "do not count as ended" in str(error.value)


def test_pages_that_lead_nowhere_are_no_list() -> None:
    again = {"vms": [1], "next": "a"}
    with paged((again, {}), (again, {})) as api, pytest.raises(ProviderError, match="page that was read already"):
        api.rest.ask_all("/vms", "vms", next="next", token="after")
    with paged(({"other": 1}, {})) as api, pytest.raises(NoAnswer, match="no list 'vms'"):
        api.rest.ask_all("/vms", "vms")


def test_a_list_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MOST_PAGES", 5)
    with pytest.raises(LookupError, match="more than 5 pages"):
        pages.whole_list(lambda token: ([token], f"{token}x"), LookupError)
