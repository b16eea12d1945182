"""The written end of a machine: the guard's own text in real shells, and the keeper where there is no guard."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest

import skypool as sky
from skypool.agent import keeper, own_notices
from skypool.agent.guard import Guard
from skypool.agent.lease import Lease
from skypool.agent.shared_page import SharedPage
from skypool.drivers import userdata
from tests.lab.kernel import wait_until
from tests.soak import _clocks

HEIR, OTHER = (hashlib.sha256(word).hexdigest() for word in (b"heir", b"other"))
SHELLS = [["dash"], pytest.param(["busybox", "sh"], marks=pytest.mark.needs("busybox"))]
LATE = 4.0
"""Seconds that an end may be late: the guard looks each second, on a machine that may be busy."""

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/uptime"), reason="the guard runs on Linux")


class Site:
    """A guard that runs as a process of this machine, in folders of its own. In place of a machine, a file is ended.

    Attributes:
        run: the folder in memory, which a reboot empties. disk: the other one.
        ended: the file that the guard makes instead of switching off.
    """

    def __init__(self, folder: Path, shell: list[str]) -> None:
        self._shell, self._folder = shell, folder
        self.run, self.disk, self.ended = folder / "run", folder / "disk", folder / "ended"
        self.disk.mkdir()
        self.env = {"PATH": os.environ["PATH"]}
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self, lease: int = 60, lifetime: int = 0, who: str = "", token: str = "abc-1-0") -> None:
        """Start the guard. The first half of a boot is over then: its files are there."""
        stop = self._folder / "poweroff"
        stop.write_text(f"#!/bin/sh\n: > {self.ended}\n")
        stop.chmod(0o755)
        settings = {"TOKEN": token, "LEASE": lease, "LIFETIME": lifetime, "POLL": 1, "WHO": who or str(os.getuid())}
        text = userdata._settings({**settings, "END": str(stop), "OFF": "no", "MACHINE": machine()})
        text += userdata._script("guard")
        for name, ours in {"/run/skypool": self.run, "/var/lib/skypool": self.disk, "/dev/kmsg": self.ended}.items():
            assert name in text
            text = text.replace(name, str(ours))
        argv = [*self._shell, "-c", text]
        with open(self._folder / "stderr", "ab") as errors:
            self._guard = subprocess.Popen(argv, env=self.env, stderr=errors, start_new_session=True)
        wait_until(lambda: self.door.is_file() or self.ended.exists(), 20, "the files of the guard")

    def kill(self) -> None:
        if self._guard is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()

    def reboot(self, lease: int) -> None:
        """Kill the guard at once, empty the memory, and start the guard with another id of the boot."""
        self.kill()
        for file in self.run.iterdir():
            file.unlink()
        lived = self.disk / "lived"
        if lived.exists() and len(words := lived.read_text().split()) == 5:
            lived.write_text(" ".join([*words[:3], "another-boot", words[4]]) + "\n")
        self.start(lease)

    @property
    def lease(self) -> Path:
        return self.run / "lease"

    @property
    def door(self) -> Path:
        return self.run / "end"

    def guard(self, patience: float = 20.0) -> Guard:
        return Guard(str(self.lease), SharedPage(1), patience)

    def kept_end(self) -> list[str]:
        file = self.disk / "end"
        return file.read_text().split() if file.exists() else []

    def held(self) -> str:
        """Return the guard's last answer."""
        file = self.run / "held"
        return file.read_text() if file.exists() else ""

    def lived(self) -> int:
        """Return the seconds that the guard has counted. It makes the file first, and writes into it then."""
        file = self.disk / "lived"
        wait_until(lambda: file.exists() and file.read_text().strip(), 20, "what the guard keeps")
        return int(file.read_text().split()[0])

    def seconds_until_end(self, within: float = 30.0) -> float:
        began = time.monotonic()
        wait_until(self.ended.exists, within, "the end")
        return time.monotonic() - began


def machine() -> str:
    try:
        return Path("/sys/class/dmi/id/product_uuid").read_text().strip()
    except OSError:
        return "none"


@pytest.fixture(params=SHELLS, ids=lambda shell: shell[0])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, request.param)
    yield site
    site.kill()


@pytest.fixture
def dash(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, ["sh"])
    yield site
    site.kill()


@contextmanager
def made(folder: Path) -> Iterator[Site]:
    folder.mkdir()
    site = Site(folder, ["sh"])
    try:
        yield site
    finally:
        site.kill()


def each_on_its_own(names: Iterable[str], folder: Path, check: Callable[[Site, str], None]) -> None:
    """Check each case with a guard of its own, all at the same time, as each one waits most of its time."""

    def run(number: int, name: str) -> str:
        with made(folder / str(number)) as site:
            try:
                check(site, name)
            except Exception as e:  # noqa: BLE001 - told below, with its case
                return f"{name}: {e!r}"
        return ""

    cases = list(names)
    with ThreadPoolExecutor(len(cases)) as threads:
        assert [each for each in threads.map(run, range(len(cases)), cases) if each] == []


@pytest.fixture
def public() -> Iterator[Site]:
    """The same in folders that every user may enter, such as /run and /var/lib."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        site = Site(Path(folder), ["sh"])
        yield site
        site.kill()


class Asking:
    """A client that asks for these seconds, or for a whole lease, every 0.2 s."""

    def __init__(self, site: Site, seconds: int = 60) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(site.lease, seconds))

    def _ask(self, file: Path, seconds: int) -> None:
        serial = 0
        while not self._over.wait(0.2):
            serial += 1
            with suppress(OSError), open(file, "r+b", buffering=0) as lease:
                lease.write(f"{f'{serial} {seconds}':<31}\n".encode())

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


# --- the end only comes nearer -------------------------------------------------------------------------------


def test_without_a_request_the_guard_keeps_and_answers_nothing(site: Site) -> None:
    site.start(lease=2)
    assert 1 < site.seconds_until_end() < 3 + LATE
    assert sorted(each.name for each in site.disk.iterdir()) == ["lived"]
    assert len((site.disk / "lived").read_text().split()) == 5
    assert sorted(each.name for each in site.run.iterdir()) == ["end", "lease"]


def test_the_machine_ends_at_its_written_end_whoever_asks_for_more(site: Site) -> None:
    site.start()
    began = time.monotonic()
    with Asking(site):
        assert site.guard().give_end(5, HEIR)
        assert site.guard().give_end(1000, HEIR)
        end, heir, token = site.kept_end()
        assert (heir, token) == (HEIR, "abc-1-0")
        assert site.lived() < int(end) <= 6
        assert not site.ended.exists()
        site.seconds_until_end()
    assert 3 < time.monotonic() - began < 5 + LATE


def test_a_later_request_brings_the_end_nearer_and_the_first_heir_stays(dash: Site) -> None:
    dash.start()
    assert dash.guard().give_end(1000, HEIR)
    before = int(dash.kept_end()[0])
    assert not dash.guard().give_end(500, OTHER)
    assert dash.guard().give_end(100, HEIR)
    end, heir, _ = dash.kept_end()
    assert (before > 900, int(end) <= 100 + dash.lived() + 1, heir) == (True, True, HEIR)


@pytest.mark.slow
def test_an_end_is_not_later_than_the_lifetime_and_leaves_the_lease_as_it_is(dash: Site) -> None:
    dash.start(lease=3, lifetime=100)
    assert dash.guard().give_end(1000, HEIR)
    assert dash.seconds_until_end() < 3 + LATE


@pytest.mark.parametrize(("keep", "least", "most"), [(0, 0, 1), (3, 1.5, 3)])
def test_a_machine_stops_at_once_or_after_the_time_for_which_it_is_kept(
    dash: Site, keep: float, least: float, most: float
) -> None:
    dash.start()
    began = time.monotonic()
    with Asking(dash):
        assert dash.guard().stop_now(keep)
        dash.seconds_until_end()
    assert least < time.monotonic() - began < most + LATE


def test_a_machine_is_not_kept_beyond_its_end(dash: Site) -> None:
    dash.start()
    began = time.monotonic()
    with Asking(dash):
        assert dash.guard().give_end(3, HEIR)
        assert dash.guard().stop_now(1000)
        dash.seconds_until_end()
    assert time.monotonic() - began < 3 + LATE
    assert dash.kept_end()[1] == HEIR


# --- reboots -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reboot_gives_no_more_time(site: Site) -> None:
    """The seconds of the boot count, too: 60 at most, and this computer has run for longer."""
    site.start(lease=100)
    with Asking(site, 100):
        assert site.guard().give_end(69, HEIR)
        time.sleep(2)  # not for luck: these seconds count
        site.reboot(lease=100)
        assert 1 < site.seconds_until_end() < 7 + LATE
    assert site.kept_end()[1] == HEIR


def test_who_lost_its_count_or_its_end_has_one_lease_more(tmp_path: Path) -> None:
    def check(site: Site, lost: str) -> None:
        site.start(lease=5)
        with Asking(site):
            assert site.guard().give_end(1000, HEIR)
            site.kill()
            file = site.disk / lost.partition(" ")[0]
            if lost == "lived":
                file.unlink()
            else:
                file.write_text("\0\0" if "garbage" in lost else "")
            site.start(lease=5)
            assert 1 < site.seconds_until_end() < 5 + LATE
        end = int(site.kept_end()[0])
        assert (990 < end < 1010) if file.name == "lived" else (5 <= end < 30)

    each_on_its_own(["lived", "lived is garbage", "end is garbage", "end is empty"], tmp_path, check)


def test_a_killed_guard_comes_back_with_its_end_and_hears_what_was_asked_meanwhile(dash: Site) -> None:
    dash.start()
    assert dash.guard().give_end(1000, HEIR)
    dash.kill()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(dash.guard().give_end, 200, HEIR)
        time.sleep(0.2)  # not for luck: the request is there when the guard starts
        dash.start()
        assert answer.result(20)
    end, heir, _ = dash.kept_end()
    assert (int(end) <= 201 + dash.lived(), heir) == (True, HEIR)


@pytest.mark.slow
def test_a_machine_made_from_the_disk_of_another_one_has_no_end(dash: Site) -> None:
    dash.start()
    assert dash.guard().give_end(3, HEIR)
    dash.kill()
    dash.start(token="xyz-9-9")
    time.sleep(4)  # not for luck: longer than the end of the other machine
    assert not dash.ended.exists()
    assert dash.guard().give_end(1000, OTHER)
    assert dash.kept_end()[1:] == [OTHER, "xyz-9-9"]


@pytest.mark.slow
@pytest.mark.skipif(bool(_clocks.missing()), reason=_clocks.missing())
@pytest.mark.parametrize("jump", ["+86400", "-86400"])
def test_a_jump_of_the_wall_clock_changes_no_end(dash: Site, tmp_path: Path, jump: str) -> None:
    clock = tmp_path / "clock"
    clock.write_text("+0\n")
    dash.env |= {
        "LD_PRELOAD": str(_clocks._library()),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    dash.start()
    began = time.monotonic()
    with Asking(dash):
        assert dash.guard().give_end(5, HEIR)
        (tmp_path / "clock.new").write_text(f"{jump}\n")
        (tmp_path / "clock.new").replace(clock)
        told = subprocess.run(["date", "+%s"], env=dash.env, capture_output=True, text=True, check=True)
        assert abs(int(told.stdout) - time.time() - int(jump)) < 60, "the clock of the guard has jumped"
        dash.seconds_until_end()
    assert 3 < time.monotonic() - began < 5 + LATE


# --- what is in the files ------------------------------------------------------------------------------------


def replaced(file: Path, make: Callable[[Path], None]) -> None:
    """Put something else in the place of a file, whatever the guard does meanwhile."""
    new = file.with_name("new")
    make(new)
    if new.is_dir() and not new.is_symlink():
        file.unlink()
        new.rename(file)
    else:
        new.replace(file)


def of_request(seconds: str, heir: str = HEIR, serials: tuple[str, str] = ("7", "7")) -> bytes:
    return f"{f'{serials[0]} {seconds} {heir} {serials[1]}':<127}\n".encode()


WRONG: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "text": lambda file: file.write_text("end it at once\n"),
    "random": lambda file: file.write_bytes(os.urandom(100_000)),
    "huge": lambda file: file.write_bytes(b"1" * 20_000_000),
    "negative": lambda file: file.write_bytes(of_request("-5")),
    "too large": lambda file: file.write_bytes(of_request("123456789")),
    "octal": lambda file: file.write_bytes(of_request("01")),
    "a fraction": lambda file: file.write_bytes(of_request("0.5")),
    "an expression": lambda file: file.write_bytes(of_request("a[$(touch${IFS}ran)]")),
    "half of two requests": lambda file: file.write_bytes(of_request("0", serials=("7", "8"))),
    "no heir": lambda file: file.write_bytes(of_request("0", heir="")),
    "words as heir": lambda file: file.write_bytes(of_request("0", heir="$HOME")),
    "a serial of words": lambda file: file.write_bytes(of_request("0", serials=("x", "x"))),
    "one word more": lambda file: file.write_bytes(of_request("0 0")),
    "a directory": lambda file: replaced(file, lambda new: (new / "full").mkdir(parents=True)),
    "a symlink": lambda file: replaced(file, lambda new: new.symlink_to("/dev/zero")),
    "a pipe": lambda file: replaced(file, os.mkfifo),
    "gone": lambda file: file.unlink(),
}


def test_what_is_no_request_changes_nothing_and_the_next_one_is_taken(tmp_path: Path) -> None:
    def check(site: Site, wrong: str) -> None:
        site.start()
        looked = site.lived()
        WRONG[wrong](site.door)
        wait_until(lambda: site.lived() > looked + 2, 30, "two more looks of the guard")
        assert not site.ended.exists()
        assert site.held() == ""
        assert site.kept_end() == []
        assert site.guard(patience=60).give_end(1000, HEIR)
        assert site.kept_end()[1] == HEIR

    each_on_its_own(WRONG, tmp_path, check)


@pytest.mark.slow
def test_two_writers_at_once_both_get_an_answer_and_the_earlier_end_counts(site: Site) -> None:
    site.start()
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(site.guard().give_end, seconds, HEIR) for seconds in (900, 300, 600, 700)]
        assert all(each.result(60) for each in answers)
    assert 290 < int(site.kept_end()[0]) <= 301 + site.lived()


@pytest.mark.slow
def test_only_one_of_two_heirs_is_held(dash: Site) -> None:
    dash.start()
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(dash.guard().give_end, 900, heir) for heir in (HEIR, OTHER)]
        taken = {heir: each.result(60) for heir, each in zip((HEIR, OTHER), answers, strict=True)}
    assert sorted(taken.values()) == [False, True]
    assert taken[dash.kept_end()[1]]


@pytest.mark.needs("root")
def test_a_user_can_only_bring_the_end_nearer_and_root_keeps_it(public: Site) -> None:
    public.start(who="65534")

    def as_user(command: str) -> int:
        return subprocess.run(["sh", "-c", command], user=65534, group=65534, extra_groups=[]).returncode

    for serial, seconds in enumerate((900, 5000, 400, 800)):
        text = of_request(str(seconds), serials=(str(serial), str(serial))).decode().rstrip("\n")
        assert as_user(f"printf '%s\\n' '{text}' 1<> {public.door}") == 0
        wait_until(lambda word=f"{serial} ": public.held().startswith(word), 20, "the answer")  # type: ignore[misc]
    end = int(public.kept_end()[0])
    assert 380 < end <= 401 + public.lived()
    for spoil in (
        f"rm -f {public.disk}/end",
        f": > {public.disk}/end",
        f": > {public.run}/held",
        f"rm -f {public.door}",
    ):
        assert as_user(f"{spoil} 2> /dev/null") != 0
    assert int(public.kept_end()[0]) == end


# --- without a guard that works ------------------------------------------------------------------------------


def test_without_a_guard_no_end_is_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert not Guard(str(tmp_path / "none" / "lease"), SharedPage(1)).give_end(9, HEIR)
    assert "cannot be asked" in capfd.readouterr().err
    (tmp_path / "end").write_text("nobody has asked")
    began = time.monotonic()
    assert not Guard(str(tmp_path / "lease"), SharedPage(1), patience=0.5).give_end(9, HEIR)
    assert time.monotonic() - began < 5
    assert "has not taken its end within 0.5 s" in capfd.readouterr().err


@pytest.mark.slow
def test_an_end_that_is_not_on_the_disk_gets_no_answer_but_a_stop_is_obeyed(dash: Site) -> None:
    dash.disk.rmdir()
    dash.disk.symlink_to("/dev/null")  # nothing can be written below it
    dash.start()
    assert not dash.guard(patience=3).give_end(1000, HEIR)
    assert not dash.ended.exists()
    assert not dash.guard(patience=3).stop_now()
    assert dash.seconds_until_end() < LATE


def test_what_is_no_time_or_digest_is_not_asked_for(dash: Site) -> None:
    dash.start()
    before = dash.door.read_text()
    assert not dash.guard().give_end(math.nan, HEIR)
    assert not dash.guard().give_end(10, "heir")
    assert not dash.guard().stop_now(math.nan)
    assert dash.door.read_text() == before


def test_a_loop_can_ask_without_waiting(dash: Site) -> None:
    dash.start()
    began = time.monotonic()
    asking = dash.guard().ask_end(1000, HEIR)
    assert asking.look() is None
    assert time.monotonic() - began < 0.5
    wait_until(lambda: asking.look() is not None, 20, "the answer")
    assert asking.look() is True
    assert dash.guard().ask_end(10, "heir").look() is False


@pytest.mark.slow
def test_an_end_that_was_given_outlives_a_guard_that_is_killed_at_any_moment(site: Site) -> None:
    site.start(lease=600)
    random, earliest, given = Random(7), 10**9, 0
    for seconds in range(9000, 8920, -10):
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(site.guard().give_end, seconds, HEIR)
            time.sleep(random.uniform(0.0, 2.5))  # not for luck: any moment will do
            site.kill()
            site.start(lease=600)
            assert answer.result(60)
        given += 1
        end, heir, _ = site.kept_end()
        assert (int(end) <= min(earliest, seconds + site.lived() + 1), heir) == (True, HEIR)
        earliest = int(end)
    assert given == 8
    assert not site.ended.exists()


def test_an_end_in_the_far_future_is_three_years_away(dash: Site) -> None:
    dash.start()
    assert dash.guard().give_end(math.inf, HEIR)
    assert 99_999_000 < int(dash.kept_end()[0]) <= 100_000_100


# --- the keeper ----------------------------------------------------------------------------------------------


class Node:
    """A keeper and its agent: forked processes, of which the agent runs a function and then ignores SIGTERM."""

    def __init__(self, work: Callable[[Guard, SharedPage], object]) -> None:
        self.page = SharedPage(1)
        self.page.deadline = self.page.end = math.inf
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._keep(work)
            finally:
                os._exit(1)

    def _keep(self, work: Callable[[Guard, SharedPage], object]) -> None:
        agent = os.fork()
        if agent == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            work(Guard("", self.page, patience=20.0), self.page)
            while True:
                self.page.end_asked = math.inf  # whatever the agent says later
                time.sleep(0.1)
        status = keeper._watch(agent, self.page)
        os._exit(0 if status == f"wait status {int(signal.SIGKILL)}" else 2)

    def lasts(self) -> float:
        """Return the seconds until the keeper has killed the agent."""
        began = time.monotonic()
        assert os.waitpid(self.pid, 0)[1] == 0
        return time.monotonic() - began


def gives(*ends: tuple[float, str]) -> Callable[[Guard, SharedPage], object]:
    def work(guard: Guard, page: SharedPage) -> None:
        for seconds, heir in ends:
            if not guard.give_end(seconds, heir):
                os._exit(3)

    return work


def test_where_no_guard_is_the_keeper_ends_the_node_at_its_earliest_end() -> None:
    node = Node(gives((1000, HEIR), (3, HEIR), (500, HEIR)))
    assert 2 < node.lasts() < 3 + 1 + LATE
    assert node.page.end < time.monotonic() + 1, "the mover may not save beyond the end"


def test_the_keeper_stops_a_node_at_once() -> None:
    assert Node(lambda guard, page: guard.stop_now()).lasts() < 1 + LATE


def test_a_node_without_an_end_lives_on_and_refuses_another_heir() -> None:
    page = SharedPage(1)
    guard = Guard("", page, patience=0.3)
    assert not guard.give_end(100, HEIR), "no keeper has answered"
    page.end_held = page.end_asked
    assert guard.give_end(100, HEIR)
    assert not guard.give_end(100, OTHER)
    assert page.end_asked == pytest.approx(time.monotonic() + 100, abs=2)


def test_the_nodes_deadline_only_comes_nearer() -> None:
    lease, now = Lease(600.0, None, ""), time.monotonic()
    for seconds, left in ((300, 300), (500, 300), (20, 20), (900, 20)):
        lease.end_by(seconds)
        assert lease.renew(now) == pytest.approx(now + left, abs=1)
    lease.stay(1000)
    lease.allow(1000)
    assert lease.renew(now) == pytest.approx(now + 20, abs=1)


@sky.compute
def asks_the_keeper(seconds: float) -> tuple[bool, int, str]:
    """Ask the keeper of the node on which this runs for an end, as the node's agent does."""
    slots, _, _, place = os.environ[own_notices.VARIABLE].split(maxsplit=3)
    page = SharedPage(int(slots), os.open(place, os.O_RDWR | os.O_CLOEXEC))
    taken = Guard("", page).give_end(seconds, HEIR)
    agent = os.getppid()
    return taken, agent, os.readlink(f"/proc/{agent}/cwd")


@pytest.mark.slow
def test_a_local_node_ends_at_its_written_end_with_all_that_it_has() -> None:
    with sky.ComputePool("local", slots=1, console="off") as pool:
        taken, agent, folder = asks_the_keeper(2) >> pool
        assert taken
        assert Path(folder, "keeper.json").exists()
        wait_until(lambda: not Path(f"/proc/{agent}").exists(), 2 + 1 + LATE, "the end of the agent")
        wait_until(lambda: not Path(folder).exists(), 30, "the end of the node's folder")
