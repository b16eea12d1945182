"""`ask_machines`: what is known of a run that belongs to its machine, when a command has asked the machine."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from skypool.errors import ProviderError
from skypool.head import messages, rows
from skypool.head.states import Claim, Entry, Outcome
from skypool.head.states import Ledger as State
from skypool.model import Access, Instance
from skypool.rental import gc
from skypool.rental.ledger import Ledger
from skypool.rental.records import RunRecord
from skypool.rental.run_state import state_of
from skypool.runs import asking, stored
from skypool.runs.asking import ask_machines
from skypool.runs.machine_look import look
from skypool.runs.stored import KeptFolder, RunStatus
from skypool.testing import FakeCloud
from skypool.wire.transport import Subprocess
from tests.handed_runs import HEIR, cloud_at, handed, passed, record_of, rented, write_row
from tests.test_ledger import change
from tests.test_run_ledger import swept

CLAIM = Claim("train")


class Reached(FakeCloud):
    """A cloud whose machines are mere records, but are reached: commands run on this computer."""

    def access(self, instance: Instance) -> Access:
        if not any(each.id == instance.id for each in self.instances(pool=instance.pool)):
            raise ProviderError(f"the machine {instance.id} has ended", provider=self.name, text="")
        return here(agent_of(Path(str(self.state))))


class Slow(Reached):
    """A cloud that says only after some seconds where its machines are."""

    def access(self, instance: Instance) -> Access:
        time.sleep(5.0)
        return super().access(instance)


def here(agent: Path) -> Access:
    return Access(Subprocess(), python=None, folder=str(agent), spool=str(agent))


def agent_of(cloud: Path) -> Path:
    return cloud.with_name("agent")


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def cloud(tmp_path: Path) -> FakeCloud:
    return Reached(cloud_at(tmp_path / "cloud").state, machines=False, patience=0.3)


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """The folder of the agent, which runs."""
    folder = agent_of(tmp_path / "cloud")
    folder.mkdir()
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The folder of the run on its machine."""
    return Path(messages.folder_of(str(tmp_path / "state" / "skypool"), CLAIM))


def run() -> RunRecord:
    found = record_of().run
    assert found is not None
    return found


def asked() -> str:
    """Ask the machine of the run, and return what is to be told."""
    told = ask_machines(Ledger.here(), Ledger.here().open_pools())
    return told.get(record_of().session, "")


def ended(outcome: Outcome = Outcome.ENDED, ago: float = 60.0) -> RunStatus:
    return RunStatus(CLAIM, outcome, 0, 1, time.time() - ago)


@pytest.mark.parametrize("how_far", [State.DETACHING, State.DETACHED])
def test_a_run_that_goes_on_is_seen_and_its_end_is_recorded(
    cloud: FakeCloud, agent: Path, place: Path, how_far: State
) -> None:
    handed(cloud, state=how_far)
    passed(cloud, 900.0)
    write_row(place, CLAIM)
    assert asked() == ""
    assert run().entry == Entry(State.DETACHED)
    assert run().seen == pytest.approx(time.time(), abs=5)
    status = ended()
    stored.store(place, status)
    assert asked() == ""
    assert run().entry == Entry(State.DETACHED, Outcome.ENDED)
    assert run().at == pytest.approx(status.ended)
    cloud.control.kill(cloud.instances(pool="train")[0])
    assert swept(cloud, Ledger.here()) == ["train"]
    assert run().entry == Entry(State.ENDED, Outcome.ENDED), "and not lost"


def test_what_a_run_has_saved_nowhere_is_recorded_and_shown_also_when_its_machine_has_ended(
    cloud: FakeCloud, agent: Path, place: Path
) -> None:
    handed(cloud)
    passed(cloud, 900.0)
    write_row(place, CLAIM)
    lost = KeptFolder("out", "s3://models/x", 3, 12, 1, ("a",), "the store refuses")
    stored.store(place, replace(ended(), folders=(lost,)))
    assert asked() == ""
    end = run().end
    assert end is not None
    assert end.unsaved == "1 file of out (a): the store refuses"
    cloud.control.kill(cloud.instances(pool="train")[0])
    assert swept(cloud, Ledger.here()) == ["train"]
    state = state_of(record_of(), time.time())
    assert state is not None
    assert (state.word, "; saved nowhere: 1 file of out (a): the store refuses" in state.why) == ("ended", True)


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_run_without_an_agent_was_interrupted_unless_it_has_stored_its_end(
    cloud: FakeCloud, place: Path, has_ended: bool
) -> None:
    handed(cloud)
    write_row(place, CLAIM)
    if has_ended:
        stored.store(place, ended(Outcome.FAILED))
    assert asked() == ""
    assert run().entry == Entry(State.DETACHED, Outcome.FAILED if has_ended else Outcome.INTERRUPTED)


@pytest.mark.parametrize(("boot", "word"), [("an earlier one", Outcome.INTERRUPTED), ("", None)])
def test_a_run_was_interrupted_if_its_machine_was_rebooted_since(
    cloud: FakeCloud, agent: Path, place: Path, boot: str, word: Outcome | None
) -> None:
    """The folder of the agent is still there."""
    handed(cloud)
    write_row(place, CLAIM, boot=boot)
    assert asked() == ""
    assert run().entry == Entry(State.DETACHED, word)


@pytest.mark.parametrize("heir", [None, messages.heir_digest("of another run")])
def test_a_row_of_another_hand_over_and_its_end_are_not_believed(
    cloud: FakeCloud, place: Path, heir: str | None
) -> None:
    handed(cloud)
    if heir is not None:
        write_row(place, CLAIM, heir)
    stored.store(place, ended())
    assert asked() == "its machine answers, and has nothing of this run any more"
    assert (run().entry, run().seen) == (Entry(State.DETACHED), None)


@pytest.mark.parametrize("has_agent", [True, False])
def test_a_machine_that_has_not_taken_the_run_over_says_so(cloud: FakeCloud, tmp_path: Path, has_agent: bool) -> None:
    handed(cloud, state=State.DETACHING)
    if has_agent:
        agent_of(tmp_path / "cloud").mkdir()
    assert ("has not taken it over" if has_agent else "so its program was never started") in asked()
    assert run().entry == Entry(State.DETACHING)


@pytest.mark.parametrize(
    "said",
    [
        "{",
        "[]",
        "[" * 100_000,
        json.dumps({**ended().to_json(), "ended": 1e999}),
        json.dumps({**ended().to_json(), "ended": float("nan")}),
        json.dumps({**ended().to_json(), "returncode": 1e999}),
        json.dumps({**ended().to_json(), "outcome": "lost"}),
        json.dumps({**ended().to_json(), "claim": {"run": "other", "generation": 1}}),
        "\x1b[31m" * 1000,
        "x" * (5 << 20),
    ],
    ids=lambda said: said[:12],
)
def test_whatever_a_machine_says_in_place_of_an_end_changes_nothing(
    cloud: FakeCloud, agent: Path, place: Path, said: str
) -> None:
    handed(cloud)
    write_row(place, CLAIM)
    assert asked() == ""
    (place / stored.STATUS).write_text(said)
    told = asked()
    assert told.startswith("its machine could not be asked: ")
    assert "\x1b" not in told
    assert run().entry == Entry(State.DETACHED)


@pytest.mark.parametrize(("ago", "at"), [(1e9, "the hand-over"), (-1e9, "now")])
def test_the_clock_of_a_machine_moves_no_end_out_of_the_time_of_its_run(
    cloud: FakeCloud, agent: Path, place: Path, ago: float, at: str
) -> None:
    handed(cloud)
    passed(cloud, 900.0)
    began = run().at
    write_row(place, CLAIM)
    stored.store(place, ended(ago=ago))
    assert asked() == ""
    assert run().at == pytest.approx(began if at == "the hand-over" else time.time(), abs=5)


def test_a_machine_that_is_gone_or_does_not_answer_leaves_what_was_seen_last(
    cloud: FakeCloud, agent: Path, place: Path
) -> None:
    handed(cloud)
    write_row(place, CLAIM)
    asked()
    passed(cloud, 900.0)
    seen = run().seen
    assert seen == pytest.approx(time.time() - 900, abs=10)
    cloud.control.refuse(ProviderError, "describe")
    assert "could not be asked: fake refused" in asked()
    state = state_of(record_of(), time.time())
    assert state is not None
    assert (state.word, "it was seen at 20" in state.why) == ("running", True)
    cloud.control.kill(cloud.instances(pool="train")[0])
    listed = gc.survey([cloud], Ledger.here()).found
    told = ask_machines(Ledger.here(), Ledger.here().open_pools(), listed)
    assert "fake does not list it any more" in told[record_of().session]
    assert (run().entry, run().seen) == (Entry(State.DETACHED), seen), "who has listed it may have asked another one"
    assert asked() == ""
    assert (run().entry, run().seen) == (Entry(State.ENDED, Outcome.LOST), seen)
    state = state_of(record_of(), time.time())
    assert state is not None
    assert (state.word, "it was seen at 20" in state.why) == ("lost", True)


def test_a_machine_that_was_rented_just_now_may_be_missing_from_a_list(cloud: FakeCloud, agent: Path) -> None:
    handed(cloud)
    cloud.control.kill(cloud.instances(pool="train")[0])
    assert "fake does not list it any more" in asked()
    assert run().entry == Entry(State.DETACHED)


def test_a_machine_of_the_users_own_is_asked_also_after_its_node_has_ended(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Host(Reached):
        def access(self, instance: Instance) -> Access:
            assert (instance.id, instance.node) == ("i-0001", 0)
            return here(agent_of(tmp_path / "cloud"))

    cloud = Reached(cloud_at(tmp_path / "cloud").state, machines=False)
    handed(cloud)
    write_row(place, CLAIM)
    stored.store(place, ended())
    cloud.control.kill(cloud.instances(pool="train")[0])
    monkeypatch.setattr("skypool.drivers.registry.made", lambda note: Host(cloud.state, machines=False))
    assert "fake does not list it any more" in asked(), "what costs something has ended"
    change(Ledger.here().file, "UPDATE instances SET usd_per_hour = 0")
    assert asked() == ""
    assert run().entry == Entry(State.DETACHED, Outcome.ENDED)


def test_nothing_waits_for_long(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PATIENCE", 0.3)
    cloud = Slow(cloud_at(tmp_path / "cloud").state, machines=False)
    handed(cloud)
    write_row(place, CLAIM)
    began = time.monotonic()
    assert asked() == "its machine could not be asked: there was no answer within 0.3 s"
    assert time.monotonic() - began < 3.0


def test_only_an_open_run_is_asked_for(tmp_path: Path) -> None:
    cloud = Slow(cloud_at(tmp_path / "cloud").state, machines=False)
    rented(cloud, "pool")
    handed(cloud)
    Ledger.here().mark(record_of().session, Entry(State.DETACHED, Outcome.ENDED))
    began = time.monotonic()
    assert ask_machines(Ledger.here(), Ledger.here().pools()) == {}
    assert time.monotonic() - began < 3.0


# --- the client of a hand-over that looks -----------------------------------------------------------------------


@pytest.mark.parametrize("row", [None, "this", "another"])
def test_a_look_counts_only_the_row_of_its_own_hand_over(tmp_path: Path, place: Path, row: str | None) -> None:
    access = here(tmp_path / "agent")
    if row is not None:
        write_row(place, CLAIM, HEIR if row == "this" else messages.heir_digest(row))
    stored.store(place, ended())
    found = look(access, CLAIM, HEIR, time.monotonic() + 10)
    assert (found.has_agent, found.has_row, found.status is not None) == (False, row == "this", row == "this")
    (tmp_path / "agent").mkdir()
    assert look(access, CLAIM, HEIR, time.monotonic() + 10).has_agent


def test_a_look_waits_for_an_agent_that_is_ending(tmp_path: Path, place: Path) -> None:
    access = here(tmp_path / "agent")
    (tmp_path / "agent").mkdir()
    began = time.monotonic()
    assert look(access, CLAIM, HEIR, time.monotonic() + 10, patience=1).has_agent
    assert time.monotonic() - began >= 1.0


def test_a_damaged_row_is_an_error(tmp_path: Path, place: Path) -> None:
    place.mkdir(parents=True)
    (place / rows.FILE).write_text("{")
    access = here(tmp_path / "agent")
    with pytest.raises(Exception, match=r"row\.json in .* is not valid"):
        look(access, CLAIM, HEIR, time.monotonic() + 10)
