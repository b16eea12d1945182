"""What a pool rents, from the first look at the prices to the proof of the end, on a cloud that does as it is told."""

from __future__ import annotations

import os
import pty
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import ClassVar

import pytest

import skypool as sky
from skypool import events
from skypool.errors import BudgetExceeded, CapacityError, ErrorGroup, LaunchError, NoAnswer, StillRunning, UsageError
from skypool.model import Instance, Need
from skypool.rental import launch, reaper
from skypool.rental.ledger import Ledger
from skypool.testing import FakeCloud, Stock
from skypool.wire.keys import Keys
from tests.conftest import eventually

DEAR = Stock("dear", usd_per_hour=3600.0, capacity=4)
CHEAP = Stock("cheap", usd_per_hour=36.0, capacity=4)


def double(n: int) -> int:
    return 2 * n


def pid() -> int:
    return os.getpid()


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(reaper, "SETTLING", 0.5)  # this cloud knows of a machine at once
    monkeypatch.setattr(launch, "_ATTEMPTS", 3)
    with FakeCloud(tmp_path / "cloud", [CHEAP, DEAR]) as cloud:
        assert len(list(cloud.offers(Need()))) == 2  # for the processes of tests, too
        yield cloud
        assert cloud.count() == 0, cloud.control.alive()


def test_a_pool_ends_with_a_receipt_and_nothing_else(cloud: FakeCloud) -> None:
    pool = sky.ComputePool(cloud, nodes=2, console="off")
    with pool:
        assert pool.submit(double, 21).result() == 42
        assert cloud.count("machine") == 2
        assert [record.state(time.time()) for record in Ledger.here().pools(pool.name)] == ["live"]
    receipt = pool.receipt
    assert [(line.provider, line.type, line.node, line.ended) for line in receipt.lines] == [
        ("fake", "cheap", 0, True),
        ("fake", "cheap", 1, True),
    ]
    assert receipt.usd == pytest.approx(cloud.control.usd(pool.name), rel=0.5)
    assert [record.state(time.time()) for record in Ledger.here().pools(pool.name)] == ["ended"]
    assert not Keys.of(pool.name).folder.exists()


class Learning(FakeCloud):
    """Hears which of its machines failed; the first word of it is more than it can bear."""

    heard: ClassVar[list[tuple[str, str]]] = []

    def rejected(self, instance: Instance, why: Exception) -> None:
        self.heard.append((instance.id, type(why).__name__))
        if len(self.heard) == 1:
            raise OSError("no room to note that")


def test_a_driver_hears_which_machines_were_given_up_before_they_were_ready(tmp_path: Path) -> None:
    Learning.heard.clear()
    seen: list[events.Event] = []
    with Learning(tmp_path / "gpus", [Stock("gpu", usd_per_hour=36.0, accelerator="H100", capacity=4)]) as driver:
        driver.control.next_machines(1, has="A100-80GB")
        pool = sky.ComputePool(driver, console="off", accelerator="H100")
        pool.events.listen(seen.append)
        with pool:
            assert pool.submit(double, 21).result() == 42
        assert driver.count() == 0
    [(_, kind)] = Learning.heard
    assert kind == "BootstrapError"
    assert [each.text for each in seen if isinstance(each, events.Notice) and "no room to note that" in each.text]


def test_a_create_is_in_the_ledger_before_the_cloud_hears_of_it(cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.control.refuse(ConnectionResetError("nothing came through"), times=None)
    pool = sky.ComputePool(cloud, console="off")
    with pytest.raises(sky.SkypoolError):
        pool.start()
    (record,) = Ledger.here().pools(pool.name)
    assert record.state(time.time()) == "ended"
    assert cloud.control.calls("create")


def test_a_ledger_that_cannot_be_written_keeps_anything_from_being_rented(cloud: FakeCloud) -> None:
    Ledger.here().file.mkdir(parents=True)
    with pytest.raises(sky.LedgerError, match="nothing is rented"):
        sky.ComputePool(cloud, console="off").start()
    assert not cloud.control.calls("create")


def test_a_pool_goes_on_while_its_ledger_is_damaged_again_and_again(cloud: FakeCloud) -> None:
    file = Ledger.here().file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"this is no database" * 100)
    with sky.ComputePool(cloud, nodes=2, budget=sky.Budget(500), console="off") as pool:
        file.write_bytes(b"nor is this" * 100)
        assert pool.submit(double, 1).result() == 2
        assert [each.ended for each in pool.receipt.lines] == [False, False]
        file.write_bytes(b"")
    assert [each.ended for each in pool.receipt.lines] == [True, True]
    assert len(list(file.parent.glob("ledger.damaged-*.sqlite3"))) == 3


def test_a_lost_reply_costs_nothing(cloud: FakeCloud) -> None:
    cloud.control.lose_reply()
    with sky.ComputePool(cloud, nodes=2, console="off") as pool:
        assert cloud.count("machine") == 2
        assert pool.submit(double, 1).result() == 2


def test_where_nobody_knows_whether_a_create_took_effect_its_machines_are_found_and_ended(cloud: FakeCloud) -> None:
    cloud.control.lose_reply(times=None)
    with pytest.raises(sky.SkypoolError):
        sky.ComputePool(cloud, console="off").start()
    assert len({each.about["token"] for each in cloud.control.calls("create")}) == 1


def test_what_was_tried_before_is_explained(cloud: FakeCloud) -> None:
    cloud.control.refuse(CapacityError, instance_type="cheap", times=None)
    with sky.ComputePool(cloud, console="off") as pool:
        assert "tried fake cheap" in pool.explain()
        assert [line.type for line in pool.receipt.lines] == ["dear"]


@pytest.mark.slow
def test_nodes_come_from_several_offers_where_one_has_too_few(cloud: FakeCloud) -> None:
    with sky.ComputePool(cloud, nodes=6, slots=1, console="off") as pool:
        assert sorted(line.type for line in pool.receipt.lines) == ["cheap"] * 4 + ["dear"] * 2
        assert len(pool.nodes) == 6


def test_nodes_with_a_private_network_come_from_one_offer_or_not_at_all(cloud: FakeCloud) -> None:
    with pytest.raises(LaunchError):
        sky.ComputePool(cloud, nodes=6, private_network=True, console="off").start()
    assert cloud.count() == 0


def test_when_too_few_are_to_be_had_those_that_were_are_ended(cloud: FakeCloud) -> None:
    with pytest.raises(LaunchError, match="for all nodes"):
        sky.ComputePool(cloud, nodes=9, console="off").start()
    assert cloud.count() == 0


# --- budget --------------------------------------------------------------------------------------------------


def test_a_budget_below_the_start_is_refused_before_anything_is_rented(cloud: FakeCloud) -> None:
    with pytest.raises(BudgetExceeded, match=r"first 20:00 min of 2 nodes"):
        sky.ComputePool(cloud, nodes=2, budget=23, console="off").start()
    assert not cloud.control.calls("create")


def test_a_short_life_needs_no_budget_for_twenty_minutes(cloud: FakeCloud) -> None:
    with sky.ComputePool(cloud, budget=sky.Budget(max_usd=10), max_lifetime="10m", console="off") as pool:
        assert pool.submit(double, 1).result() == 2


def test_when_the_budget_is_spent_every_machine_ends_and_the_calls_say_why(
    cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sky.Budget, "check_start", lambda *asked: None)  # otherwise it lasts for 20 minutes at least
    cloud.control.stock_out(next(iter(cloud.offers(Need()))))
    told: list[str] = []
    pool = sky.ComputePool(cloud, budget=sky.Budget(2.5, warn=0.4), lease="3s", console="off")
    pool.events.listen(lambda event: told.append(getattr(event, "text", "")))
    with pytest.raises(BudgetExceeded, match="of its budget of"), pool:
        pool.submit(time.sleep, 60).result()
    assert any("40% of the budget" in text for text in told)
    assert cloud.count() == 0
    assert pool.receipt.usd < 2.5 + 4.0


@pytest.mark.parametrize("hours", [-1, 1], ids=["back", "forward"])
def test_a_clock_that_is_set_makes_nothing_cheaper_or_dearer(
    cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    real, began = time.time, time.monotonic()
    with sky.ComputePool(cloud, budget=sky.Budget(40), console="off") as pool:
        assert pool._begun is not None
        rental = pool._begun.rental
        time.sleep(0.5)
        before, left = pool.receipt.usd, rental.limits.left()
        monkeypatch.setattr(time, "time", lambda: real() + hours * 3600.0)
        assert pool.submit(double, 1).result() == 2
        assert before < pool.receipt.usd
        assert left - (time.monotonic() - began) < rental.limits.left() < left
    (line,) = pool.receipt.lines
    assert line.ended
    assert before < line.usd <= (time.monotonic() - began) * 0.01


def test_a_budget_is_a_number_or_a_budget() -> None:
    with pytest.raises(UsageError, match="budget must be"):
        sky.ComputePool(budget="much")  # type: ignore[arg-type]
    assert sky.ComputePool(budget=20)._terms.budget == sky.Budget(20.0)


# --- the end -------------------------------------------------------------------------------------------------


def test_an_end_that_cannot_be_proved_is_raised_and_stays_in_the_ledger(cloud: FakeCloud) -> None:
    pool = sky.ComputePool(cloud, nodes=2, console="off")
    pool.start()
    cloud.control.undying(cloud.instances(pool=pool.name)[0])
    with pytest.raises(StillRunning) as caught:
        pool.stop()
    assert len(caught.value.instances) == 1
    (record,) = Ledger.here().pools(pool.name)
    assert len(record.running) == 1
    cloud.close()
    reaper.terminate_all([cloud], pool.name, Ledger.here())
    assert Ledger.here().pools(pool.name)[0].state(time.time()) == "ended"


class Unasked(FakeCloud):
    """Only machines, no more; when they are to end, nothing comes through."""

    leftovers = None  # type: ignore[assignment]

    def terminate(self, instances: Sequence[Instance]) -> None:
        raise NoAnswer("nothing comes through", provider=self.name)


def test_an_end_that_could_not_even_be_asked_for_is_raised(cloud: FakeCloud) -> None:
    pool = sky.ComputePool(Unasked(cloud.state), console="off")
    pool.start()
    with pytest.raises(StillRunning, match="nothing comes through") as left:
        pool.stop()
    assert [getattr(each, "node", None) for each in left.value.instances] == [0]
    assert cloud.count("machine") == 1
    assert [len(record.running) for record in Ledger.here().pools(pool.name)] == [1]
    reaper.terminate_all([cloud], pool.name, Ledger.here())
    assert Ledger.here().pools(pool.name)[0].state(time.time()) == "ended"


@pytest.mark.slow
def test_many_machines_are_ended_together(cloud: FakeCloud) -> None:
    with sky.ComputePool(cloud, nodes=8, slots=1, console="off"):
        pass
    assert len(cloud.control.calls("delete")) <= 3


def test_a_name_is_taken_while_its_pool_lives(cloud: FakeCloud) -> None:
    with sky.ComputePool(cloud, name="train", console="off"):
        with pytest.raises(UsageError, match="a pool called 'train' already exists"):
            sky.ComputePool(cloud, name="train", console="off").start()
        assert cloud.count("machine") == 1


def test_tags_are_renewed_while_the_pool_lives(cloud: FakeCloud) -> None:
    with sky.ComputePool(cloud, lease="6s", console="off") as pool:
        first = cloud.instances(pool=pool.name)[0].until
        assert first is not None
        eventually(lambda: (cloud.instances(pool=pool.name)[0].until or first) > first)


class Flaky(FakeCloud):
    """Two of its machines cannot be tagged anew at first."""

    asked: ClassVar[list[str]] = []

    def renew(self, pool: str, until: datetime) -> None:
        self.asked.append(pool)
        if len(self.asked) == 1:
            raise ErrorGroup("not all tags could be renewed", [NoAnswer("of one"), NoAnswer("of another")])
        super().renew(pool, until)


def test_tags_that_several_machines_did_not_get_are_renewed_the_next_time(cloud: FakeCloud) -> None:
    Flaky.asked.clear()
    seen: list[events.Event] = []
    pool = sky.ComputePool(Flaky(cloud.state), lease="6s", console="off")
    pool.events.listen(seen.append)
    with pool:
        first = cloud.instances(pool=pool.name)[0].until
        assert first is not None
        eventually(lambda: (cloud.instances(pool=pool.name)[0].until or first) > first)
    told = [each.text for each in seen if isinstance(each, events.Notice)]
    why = "not all tags could be renewed:\n  of one\n  of another"
    assert (
        f"the lease in the tags of the machines of fake could not be renewed; this is tried again soon: {why}" in told
    )


# --- a client that is interrupted ------------------------------------------------------------------------------

CLIENT = """
import sys
import skypool as sky
from skypool.testing import FakeCloud
from tests.work import stay

with sky.ComputePool(FakeCloud(sys.argv[1]), nodes=2, name="train", lease="10m", console="plain") as pool:
    pool.submit(int).result()
    print("at work", flush=True)
    stay()
"""


def client(cloud: FakeCloud, program: str = CLIENT) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", textwrap.dedent(program), str(cloud.state)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def at_work(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if "at work" in line:
            return
    raise AssertionError(process.communicate())


def test_one_interrupt_ends_everything_here_and_now(cloud: FakeCloud) -> None:
    process = client(cloud)
    at_work(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in err
    assert cloud.count() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_hands_the_rest_to_a_process_that_finishes(cloud: FakeCloud, number: signal.Signals) -> None:
    process = client(cloud)
    at_work(process)
    cloud.control.delay(3.0, "delete", times=1)
    process.send_signal(signal.SIGINT)
    eventually(lambda: cloud.control.calls("delete"))
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert "goes on ending the machines of pool 'train'" in out + err
    eventually(lambda: cloud.count() == 0, 30)
    eventually(lambda: Ledger.here().pools("train")[0].state(time.time()) == "ended", 30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_while_machines_are_launched_leaves_none(cloud: FakeCloud, number: signal.Signals) -> None:
    cloud.control.delay(1.0, "create", times=None)
    process = client(cloud)
    eventually(lambda: cloud.control.calls("create"), 30)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert cloud.count() == 0, err
    assert [each.state(time.time()) for each in Ledger.here().pools("train")] == ["ended"]


def in_a_terminal(cloud: FakeCloud, *words: str) -> tuple[int, int]:
    """A client with a terminal of its own, at work, with the live view; its pid, and our end of the terminal."""
    program = textwrap.dedent(CLIENT).replace('console="plain"', 'console="live"')
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("env", ["env", *words, sys.executable, "-c", program, str(cloud.state)])
    said = b""
    while b"at work" not in said:
        said += os.read(terminal, 65536)
    return pid, terminal


def ended(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] == pid


def test_a_closed_terminal_ends_everything_here_and_now(cloud: FakeCloud) -> None:
    pid, terminal = in_a_terminal(cloud)
    os.close(terminal)  # the kernel sends SIGHUP, and a shell would send it once more
    os.kill(pid, signal.SIGHUP)
    eventually(lambda: ended(pid), 60, "the end of the client")
    assert cloud.count() == 0
    assert [each.state(time.time()) for each in Ledger.here().pools("train")] == ["ended"]


def test_a_client_under_nohup_outlives_its_terminal(cloud: FakeCloud) -> None:
    pid, terminal = in_a_terminal(cloud, "sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    os.close(terminal)
    os.kill(pid, signal.SIGHUP)
    status = Path(f"/proc/{pid}/status").read_text().split()
    assert int(status[status.index("SigIgn:") + 1], 16) & 1 << (signal.SIGHUP - 1)
    assert not ended(pid)
    assert cloud.count("machine") == 2
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: ended(pid), 60, "the end of the client")
    assert cloud.count() == 0


def test_a_pool_that_another_thread_started_first_does_not_keep_a_later_one_from_hearing_signals() -> None:
    program = """
    import signal, threading
    from skypool.pool import interpreter_exit

    class Pool:
        def end_now(self): pass

    other = threading.Thread(target=interpreter_exit.watch, args=(Pool(),))
    other.start()
    other.join()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    interpreter_exit.watch(Pool())
    assert signal.getsignal(signal.SIGHUP) == signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)


def test_a_client_that_only_returns_ends_its_pool_too(cloud: FakeCloud) -> None:
    program = """
    import sys
    import skypool as sky
    from skypool.testing import FakeCloud

    pool = sky.ComputePool(FakeCloud(sys.argv[1]), name="train", console="off")
    print(pool.submit(abs, -3).result(), "at work")
    """
    process = client(cloud, program)
    out, err = process.communicate(timeout=60)
    assert (out.split()[0], err) == ("3", "")
    assert cloud.count() == 0
    assert Ledger.here().pools("train")[0].state(time.time()) == "ended"


LATE = """
import sys, threading, time
import skypool as sky
from skypool.event_loop import Loop
from skypool.testing import FakeCloud

class Plain(FakeCloud):
    leftovers = None

cloud = Plain(sys.argv[1])
pool = sky.ComputePool(cloud, name="train", console="off")
threading.Thread(target=pool.start, daemon=True).start()
while not cloud.control.calls("create"):
    time.sleep(0.01)
Loop.shared().loop.call_soon_threadsafe(time.sleep, 5)
"""


def test_a_machine_that_came_just_when_its_client_returned_is_ended(cloud: FakeCloud) -> None:
    """The engine's thread is busy, and has not heard of it yet."""
    cloud.control.delay(1.0, "create", times=None)
    process = client(cloud, LATE)
    _, err = process.communicate(timeout=60)
    assert cloud.count("machine") == 0, err
    (record,) = Ledger.here().pools("train")
    assert [each.ended for each in record.lines] == [True]
    reaper.terminate_all([cloud], "train")  # its keys and groups


def test_another_process_may_end_it_and_its_calls_say_so(cloud: FakeCloud) -> None:
    pool = sky.ComputePool(cloud, name="train", lease="3s", console="off")
    with pytest.raises(sky.PoolClosed, match="skypool down"), pool:
        Ledger.here().ending("train")
        pool.submit(time.sleep, 60).result()


@pytest.mark.slow
def test_a_pool_whose_client_was_killed_is_taken_over_by_its_name_alone(cloud: FakeCloud) -> None:
    process = client(cloud)
    at_work(process)
    process.kill()
    process.communicate()
    with sky.ComputePool.attach("train", console="off") as pool:
        assert sorted(pool.nodes) == [0, 1]
        assert pool.submit(double, 4).result() == 8
        assert [line.type for line in pool.receipt.lines] == ["cheap", "cheap"]
    assert cloud.count() == 0
    assert Ledger.here().pools("train")[0].state(time.time()) == "ended"


ATTACHING = """
import sys
import skypool as sky

sky.ComputePool.attach("train", console="off")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_a_pool_is_taken_over_ends_nothing(cloud: FakeCloud, number: signal.Signals) -> None:
    process = client(cloud)
    at_work(process)
    process.kill()
    process.communicate()
    asked = len(cloud.control.calls("describe"))
    cloud.control.delay(2.0, "describe", times=None)
    process = client(cloud, ATTACHING)
    eventually(lambda: len(cloud.control.calls("describe")) >= asked + 2, 30)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert cloud.count("machine") == 2, err
    cloud.control.relent()
    with sky.ComputePool.attach("train", console="off") as pool:
        assert pool.submit(double, 4).result() == 8


LEFT = """
import sys
import skypool as sky
from skypool.testing import FakeCloud
from tests.work import stay

budget = sky.Budget(float(sys.argv[2])) if sys.argv[2:] else None
with sky.ComputePool(FakeCloud(sys.argv[1]), name="train", lease="30s", budget=budget, console="plain") as pool:
    pool.submit(int).result()
    print("at work", flush=True)
    stay()
"""


def left(cloud: FakeCloud, *args: str) -> None:
    """A pool whose client was killed."""
    argv = [sys.executable, "-c", LEFT, str(cloud.state), *args]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    at_work(process)
    process.kill()
    process.communicate()


def test_a_pool_that_was_taken_over_says_that_it_lives(cloud: FakeCloud) -> None:
    left(cloud)
    first = cloud.instances(pool="train")[0].until
    assert first is not None
    with sky.ComputePool.attach("train", lease="6s", console="off"):
        eventually(lambda: cloud.instances(pool="train")[0].until != first, 30)
        Ledger.here().ending("train")
        eventually(lambda: cloud.count("machine") == 0, 30)


@pytest.mark.slow
def test_a_pool_that_was_taken_over_keeps_its_budget(cloud: FakeCloud) -> None:
    left(cloud, "36.2")
    with sqlite3.connect(Ledger.here().file) as book:  # an hour later, of 36 USD
        book.execute("UPDATE instances SET launched = launched - 3600, billed_from = billed_from - 3600")
    with sky.ComputePool.attach("train", console="off") as pool:
        eventually(lambda: cloud.count("machine") == 0, 60)
        with pytest.raises(BudgetExceeded):
            pool.submit(double, 4)


def two_left(cloud: FakeCloud) -> None:
    """A pool of two nodes whose client was killed."""
    program = LEFT.replace('name="train"', 'name="train", nodes=2')
    argv = [sys.executable, "-c", program, str(cloud.state)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        at_work(process)
        process.kill()


@pytest.mark.slow
def test_a_node_that_is_lost_after_a_pool_was_taken_over_is_replaced_by_what_is_asked_for(cloud: FakeCloud) -> None:
    two_left(cloud)
    with sky.ComputePool.attach("train", image=sky.Image(), liveness="5s", console="off") as pool:
        cloud.control.kill(next(each for each in cloud.instances(pool="train") if each.node == 1))
        eventually(lambda: pool.nodes.get(2) == "ready", 60)
        assert pool.submit(double, 4).result() == 8
    tokens = [each.about["token"] for each in cloud.control.calls("create")]
    assert len({token.partition("/")[0] for token in tokens}) == 2


@pytest.mark.slow
def test_it_is_not_replaced_where_nobody_says_by_what(cloud: FakeCloud) -> None:
    two_left(cloud)
    with sky.ComputePool.attach("train", liveness="5s", console="off") as pool:
        cloud.control.kill(next(each for each in cloud.instances(pool="train") if each.node == 1))
        eventually(lambda: pool.nodes.get(1) == "ended", 60)
        assert pool.submit(double, 4).result() == 8
        assert len(cloud.control.calls("create")) == 2
        cloud.control.kill(cloud.instances(pool="train")[0])
        with pytest.raises(sky.SkypoolError):
            pool.submit(time.sleep, 60).result(60)
    assert len(cloud.control.calls("create")) == 2
