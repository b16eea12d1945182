"""`DriverContract`: tests that every driver must pass; the driver's author runs them.

class TestAcme(DriverContract):
    @pytest.fixture
    def driver(self): return Acme(region="test-1")

    @pytest.fixture
    def control(self): return acme_test_cloud       # whatever it can do of `trial.ABILITIES`; None for nothing
"""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pytest

from skypool.accelerators import Accelerator
from skypool.drivers.contract import Abilities, Checks, Driver, Renews, Tidies, abilities, ends_itself
from skypool.errors import (
    AccessError,
    CapacityError,
    CredentialsError,
    FundsError,
    NoAnswer,
    OfferGone,
    ProviderError,
    QuotaError,
    RateLimitError,
    StillRunning,
)
from skypool.model import Finding, Instance, Leftover, Need, Offer
from skypool.testing.slices import SliceContract
from skypool.testing.trial import Trial

_SECRET = re.compile(r"(^|_)(token|secret|password|passphrase|api_?key|access_key|private_key)$|^key$")


def elsewhere(argv: Sequence[str], what: object) -> str:
    """What a new process that knows nothing prints, given this as a pickle."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))}
    done = subprocess.run([sys.executable, *argv], input=pickle.dumps(what), capture_output=True, env=env)
    assert done.returncode == 0, f"in another process: {done.stderr.decode()}"
    return done.stdout.decode()


class DriverContract(SliceContract):
    """Subclass it as `TestSomething`, with a fixture `driver`, and whatever else is to be otherwise.

    Attributes:
        patience: seconds in which a machine boots or ends there.
        quick: seconds in which offers are there, and a launch is back.
        real: whether commands and pools can run on its machines.
        several: whether one offer may be several machines; where it is one, the tests take several offers.
    """

    patience: ClassVar[float] = 60.0
    quick: ClassVar[float] = 60.0
    real: ClassVar[bool] = True
    several: ClassVar[bool] = True

    # --- what a subclass gives -------------------------------------------------------------------------------

    @pytest.fixture
    def driver(self) -> Driver:
        """The driver, ready to rent. Three machines of it are alive at once at most."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `driver`")

    @pytest.fixture
    def control(self) -> object:
        """What moves its cloud: an object with any of the methods in `trial.ABILITIES`."""
        return None

    @pytest.fixture
    def need(self) -> Need:
        """What is asked of a machine."""
        return Need()

    @pytest.fixture
    def secrets(self) -> Sequence[str]:
        """Words of the driver's settings that nobody may read."""
        return ()

    @pytest.fixture
    def trial(self, driver: Driver, control: object, need: Need) -> Iterator[Trial]:
        """All of that in one hand. What the test began is ended after it."""
        trial = Trial(driver, control, need, self.patience, self.several)
        yield trial
        trial.close()

    # --- the driver itself -----------------------------------------------------------------------------------

    def test_it_is_a_frozen_dataclass_with_every_verb_and_a_name(self, driver: Driver) -> None:
        assert isinstance(driver, Driver), "it lacks a verb of skypool.drivers.contract.Driver"
        assert dataclasses.is_dataclass(driver), "a driver is a dataclass: it is compared, shown and sent by its fields"
        assert getattr(type(driver), "__dataclass_params__").frozen, "a driver is frozen: several threads share it"  # noqa: B009
        assert re.fullmatch(r"[a-z][a-z0-9-]*", driver.name), driver.name
        assert isinstance(abilities(driver), Abilities)

    def test_making_one_is_free(self, driver: Driver) -> None:
        """No file, no process, no connection, no thread; no SDK."""
        assert dataclasses.is_dataclass(driver)
        made = type(driver)
        settings = {each.name: getattr(driver, each.name) for each in dataclasses.fields(driver) if each.init}
        done = elsewhere(["-m", "skypool.testing.free"], (made.__module__, made.__qualname__, pickle.dumps(settings)))
        assert done.split() == [], f"making a {made.__name__} is to be free, and it does this:\n{done.strip()}"

    def test_its_repr_shows_no_secret(self, driver: Driver, secrets: Sequence[str]) -> None:
        assert dataclasses.is_dataclass(driver)
        shown = [each.name for each in dataclasses.fields(driver) if each.repr and _SECRET.search(each.name)]
        assert shown == [], f"these fields look like secrets, and need field(repr=False): {shown}"
        for secret in secrets:
            assert secret not in f"{driver!r}{driver}", "its repr shows a secret"

    # --- offers ----------------------------------------------------------------------------------------------

    def test_offers_come_quickly_and_say_what_they_cost(self, trial: Trial) -> None:
        began = time.monotonic()
        offers = list(trial.driver.offers(trial.need))
        assert time.monotonic() - began < self.quick, f"offers took {time.monotonic() - began:.1f} s"
        assert offers, "it sells nothing"
        for each in offers:
            assert isinstance(each, Offer)
            assert each.provider == trial.driver.name
            assert each.instance_type, each
            assert math.isfinite(each.usd_per_hour), each
            assert each.usd_per_hour >= 0, each
            assert each.accelerator is None or isinstance(each.accelerator, Accelerator), each
            assert each.hosts >= 1, each

    def test_offers_of_the_spot_market_come_from_who_says_that_there_is_one(self, trial: Trial) -> None:
        need = dataclasses.replace(trial.need, market="cheapest")
        markets = {each.market for each in trial.driver.offers(need)}
        assert ("spot" in markets) == abilities(trial.driver).spot, (
            f"abilities.spot does not fit what is sold: {markets}"
        )

    # --- launch ----------------------------------------------------------------------------------------------

    def test_launch_rents_a_machine_for_each_rank(self, trial: Trial) -> None:
        order = trial.order(1, 3)
        launched = trial.launch(order)
        assert [each.node for each in launched] == [1, 3]
        assert len({each.id for each in launched}) == 2
        for each in launched:
            assert isinstance(each, Instance)
            assert (each.provider, each.pool, each.token) == (trial.driver.name, trial.pool, order.token)
            assert each.offer in self._rentable(trial), "a launched instance says what it was rented on"
            assert each.state in ("starting", "running")
        regions = {each.id: each.region for each in trial.instances()}
        for each in launched:  # a list may lack the newest
            assert regions.get(each.id, each.region) == each.region, "launched and listed it is in the same region"
        assert trial.count() == 2

    def test_launch_with_the_same_token_is_the_same_machines(self, trial: Trial) -> None:
        order = trial.order(0, 1)
        first = trial.launch(order)
        second = trial.launch(order)
        assert [each.id for each in first] == [each.id for each in second]
        assert all(each.offer in self._rentable(trial) for each in second)
        assert trial.count() == 2

    def test_launch_with_another_token_is_other_machines(self, trial: Trial) -> None:
        [first], [second] = trial.launch(trial.order(0)), trial.launch(trial.order(1))
        assert first.id != second.id
        assert trial.count() == 2

    def test_launch_after_a_lost_reply_is_the_same_machines(self, trial: Trial) -> None:
        order = trial.order(0, 1)
        trial.pull("lose_reply")
        try:
            launched = trial.launch(order)
        except (ProviderError, OSError):
            launched = trial.launch(order)
        assert sorted(each.node for each in launched) == [0, 1]
        assert trial.count() == 2, "a lost reply was paid for twice"

    def test_what_a_lost_reply_left_is_found_by_its_tag(self, trial: Trial) -> None:
        order = trial.order(0)
        trial.pull("lose_reply")
        try:
            trial.launch(order)
        except (ProviderError, OSError) as e:
            assert isinstance(e, NoAnswer), f"a lost reply is NoAnswer, so that it is asked for again, and not {e!r}"
        found = trial.instances()
        assert [(each.node, each.token) for each in found] == [(0, order.token)]
        assert trial.count() == 1

    def test_launch_is_back_before_the_machine_has_booted(self, trial: Trial) -> None:
        trial.pull("never_boot")
        began = time.monotonic()
        [launched] = trial.launch(trial.order(0))
        assert time.monotonic() - began < self.quick
        assert launched.state == "starting"
        assert [each.state for each in trial.instances()] == ["starting"]

    def test_launch_without_stock_is_a_capacity_error_and_rents_nothing(self, trial: Trial) -> None:
        trial.pull("stock_out", trial.offer, 0)
        with pytest.raises((CapacityError, OfferGone)) as refused:
            trial.driver.launch(trial.offer, trial.order(0))
        _in_words(refused.value, trial.driver)
        assert trial.count() == 0

    def test_launch_with_little_stock_gives_the_first_ranks_or_nothing(self, trial: Trial) -> None:
        trial.pull("stock_out", trial.offer, 1)
        try:
            launched = trial.driver.launch(trial.offer, trial.order(2, 5))
        except (CapacityError, OfferGone):
            launched = []
        assert [each.node for each in launched] in ([2], [])
        assert trial.count() == len(launched)

    def test_launch_of_machines_that_must_reach_each_other_is_all_or_none(self, trial: Trial) -> None:
        if not abilities(trial.driver).private_network:
            pytest.skip("its machines do not reach each other")
        need = dataclasses.replace(trial.need, private_network=True)
        launched = trial.launch(trial.order(0, 1, need=need))
        assert [each.node for each in launched] == [0, 1]
        trial.driver.terminate(launched)
        trial.pull("stock_out", trial.offer, 1)
        with pytest.raises((CapacityError, OfferGone)):
            trial.launch(trial.order(0, 1, need=need))
        assert trial.count() == 0, "a part of what was to be all or none is left"

    @pytest.mark.parametrize(
        "kind",
        [CredentialsError, AccessError, CapacityError, QuotaError, RateLimitError, FundsError, OfferGone],
        ids=lambda kind: kind.__name__,
    )
    def test_a_refusal_has_its_kind_code_text_and_advice_and_rents_nothing(
        self, trial: Trial, kind: type[ProviderError]
    ) -> None:
        if trial.pull("refuse", kind) is False:
            pytest.skip(f"this cloud has no {kind.__name__}")
        try:
            launched = trial.driver.launch(trial.offer, trial.order(0))
        except ProviderError as e:
            assert type(e) is kind, f"the cloud said {kind.__name__}, and it came as {e!r}"
            _in_words(e, trial.driver)
            assert e.code, f"it does not carry the provider's own code: {e!r}"
            assert trial.count() == 0, "it was refused, and something is left"
        else:
            assert kind is RateLimitError, f"the cloud said {kind.__name__}, and nothing was raised"
            assert [each.node for each in launched] == [0]
            assert trial.count() == 1

    # --- instances -------------------------------------------------------------------------------------------

    def test_instances_are_found_by_the_tag_of_their_pool(self, trial: Trial) -> None:
        mine = trial.order(1)
        other = trial.order(0, pool=trial.another_pool())
        [first], [second] = trial.launch(mine), trial.launch(other)
        assert [each.id for each in trial.driver.instances(pool=mine.pool)] == [first.id]
        assert [each.id for each in trial.driver.instances(pool=other.pool)] == [second.id]
        everything = {each.id: each for each in trial.driver.instances()}
        assert {first.id, second.id} <= set(everything)
        found = everything[first.id]
        assert (found.pool, found.node, found.token) == (mine.pool, 1, mine.token)
        assert trial.driver.instances(pool=f"{mine.pool[:-1]}") == [], "a part of a pool's name is no pool's name"

    def test_instances_say_until_when_they_are_needed(self, trial: Trial) -> None:
        if not isinstance(trial.driver, Renews):
            pytest.skip("its tags do not tell until when")
        order = trial.order(0)
        trial.launch(order)
        [found] = trial.instances()
        _near(found.until, order.until)

    def test_a_new_process_finds_and_ends_what_is_there_without_a_ledger(self, trial: Trial) -> None:
        launched = trial.launch(trial.order(0, 1))
        ids = " ".join(sorted(each.id for each in launched))
        assert elsewhere(["-m", "skypool.testing.find_and_end"], (trial.driver, trial.pool)).strip() == ids
        assert trial.count() == 0

    def test_verbs_may_be_called_from_several_threads_at_once(self, trial: Trial) -> None:
        orders = [trial.order(node) for node in range(3)]
        trial.offers  # noqa: B018 - they are asked for once
        launched = [each for got in trial.at_once(*[lambda o=o: trial.launch(o) for o in orders]) for each in got]
        assert {each.token for each in launched} == {each.token for each in orders}
        for found in trial.at_once(*[trial.instances] * 3):
            assert {each.id for each in found} == {each.id for each in launched}
        trial.at_once(*[lambda i=i: trial.driver.terminate([i]) for i in launched])
        assert trial.instances() == []
        assert trial.count() == 0

    # --- on the machine --------------------------------------------------------------------------------------

    def test_access_reaches_the_machine_and_passes_words_as_they_are(self, trial: Trial) -> None:
        self._needs_machines()
        access = trial.reach(trial.launch(trial.order(0))[0])
        words = ["two words", "it's", '"$HOME"', "*", ""]
        done = trial.run(access, ["sh", "-c", 'printf "<%s>" "$@"', "sh", *words])
        assert done.stdout == "".join(f"<{word}>" for word in words), done
        assert trial.run(access, ["sh", "-c", "exit 3"]).returncode == 3

    def test_a_pool_lives_and_ends_there(self, trial: Trial) -> None:
        self._needs_machines()
        from skypool.pool.pool import ComputePool

        more: dict[str, Any] = {"accelerator": list(trial.need.accelerators) or None}
        with ComputePool(trial.driver, nodes=2, name=trial.pool, console="off", **more) as pool:
            assert pool.submit(divmod, 7, 2).result() == (3, 1)
            with pytest.raises(ZeroDivisionError):
                pool.submit(divmod, 7, 0).result()
            if trial.need.accelerators:
                asked = min(each.slice.chips_per_vm if each.slice else each.count for each in trial.need.accelerators)
                slots, devices = pool.submit(_slots_and_devices()).result()
                assert slots == 1, "a node with accelerators has one slot, unless its user asks for more"
                assert devices >= asked, f"a call has all devices of its machine, {asked}, and not {devices}"
            assert sorted(each.node for each in trial.driver.instances(pool=trial.pool)) == [0, 1]
        assert trial.instances() == []
        assert trial.count() == 0

    def test_an_interruption_is_told_on_the_machine(self, trial: Trial) -> None:
        self._needs_machines()
        trial.can("interrupt")
        [instance] = trial.launch(trial.order(0))
        access = trial.reach(instance)
        assert access.watch or not abilities(trial.driver).spot, "it sells spot machines, and Access.watch is empty"
        source = f'print("begun", flush=True)\n{access.watch}'
        argv = access.transport.argv([access.python or "python3", "-uc", source])
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, bufsize=1) as watch:
            try:
                out = watch.stdout
                assert out is not None
                assert out.readline() == "begun\n"
                assert not select.select([out], [], [], 0.5)[0], "it says something before there is a notice"
                trial.pull("interrupt", instance)
                trial.eventually(lambda: select.select([out], [], [], 0)[0], "a notice on the machine")
                told = out.readline()
            finally:
                watch.kill()
        when = re.fullmatch(r"\d+(\.\d+)?\n", told)
        assert when, f"a notice is a line with the seconds since 1970, not {told!r}"
        assert abs(float(told) - time.time()) < 3600, (
            f"it is taken back at {told.strip()}, and now is {time.time():.0f}"
        )

    def test_a_machine_ends_itself_when_its_lease_is_over(self, trial: Trial) -> None:
        if not ends_itself(trial.driver, trial.offer):
            pytest.skip("its machines do not end themselves, as its abilities, or its offer, say")
        trial.can("advance", "count")
        trial.launch(trial.order(0, lease=300.0))
        trial.launch(trial.order(1, lease=900.0, lifetime=300.0))
        trial.pull("advance", 200)
        assert trial.count() == 2
        trial.pull("advance", 101)
        trial.eventually(lambda: trial.count() == 0, "the end of machines whose lease and lifetime are over")

    def test_a_machine_that_hears_of_its_client_lives_on(self, trial: Trial) -> None:
        self._needs_machines()
        trial.can("advance", "count")
        access = trial.reach(trial.launch(trial.order(0, lease=300.0))[0])
        if not access.guard:
            pytest.skip("its machines have no guard that puts their end off")
        trial.pull("advance", 200)
        assert trial.run(access, ["sh", "-c", 'printf "%-31s\\n" "1 300" 1<> "$0"', access.guard]).returncode == 0
        trial.pull("advance", 200)
        assert trial.count() == 1, "its guard was told of a client, and it ended all the same"
        trial.pull("advance", 200)
        trial.eventually(lambda: trial.count() == 0, "the end of a machine of whose client nothing was heard any more")

    # --- the end ---------------------------------------------------------------------------------------------

    def test_terminate_comes_back_when_the_end_is_proved(self, trial: Trial) -> None:
        first, second = trial.launch(trial.order(0, 1))
        trial.driver.terminate([first])
        assert [each.id for each in trial.instances()] == [second.id], "one was to be ended, and the other was not"
        assert trial.count() == 1
        trial.driver.terminate([second])
        assert trial.instances() == []
        assert trial.count() == 0

    def test_terminate_is_quiet_for_what_is_gone(self, trial: Trial) -> None:
        trial.driver.terminate([])
        first, second = trial.launch(trial.order(0, 1))
        trial.driver.terminate([first])
        trial.driver.terminate([first])
        if hasattr(trial.control, "kill"):
            trial.pull("kill", second)
        trial.driver.terminate([first, second])
        assert trial.count() == 0

    def test_terminate_is_loud_for_what_does_not_end_and_ends_the_rest(self, trial: Trial) -> None:
        trial.can("undying")
        first, second = trial.launch(trial.order(0, 1))
        trial.stubborn.append(first)
        trial.pull("undying", first, None)
        with pytest.raises(StillRunning) as left:
            trial.driver.terminate([first, second])
        assert [getattr(each, "id", None) for each in left.value.instances] == [first.id]
        assert first.id in str(left.value), "it names what may still cost money"
        assert [each.id for each in trial.instances()] == [first.id]
        trial.pull("undying", first, 1)
        trial.eventually(lambda: _ended(trial.driver, first), f"the end of {first.id}, which is asked for again")
        assert trial.count() == 0

    # --- what else there is ----------------------------------------------------------------------------------

    def test_nothing_else_is_left_of_a_pool_that_was_tidied(self, trial: Trial) -> None:
        before = trial.pull_count("leftovers") if hasattr(trial.control, "leftovers") else 0
        trial.launch(trial.order(0))
        trial.launch(trial.order(0, pool=trial.another_pool()))
        trial.driver.terminate(trial.driver.instances(pool=trial.pool))
        if isinstance(trial.driver, Tidies):
            left = trial.driver.leftovers(pool=trial.pool)
            for each in left:
                assert isinstance(each, Leftover)
                assert (each.provider, each.pool) == (trial.driver.name, trial.pool), each
                assert each.kind, each
            trial.driver.tidy(left)
            trial.driver.tidy(left)  # quiet for what is gone
            assert trial.driver.leftovers(pool=trial.pool) == []
            trial.driver.terminate(trial.instances())
            trial.driver.tidy(trial.leftovers())
        if hasattr(trial.control, "leftovers"):
            assert trial.pull_count("leftovers") <= before, "the cloud has more than before, and no tag tells of it"

    def test_renew_moves_what_the_tags_of_this_pool_say(self, trial: Trial) -> None:
        if not isinstance(trial.driver, Renews):
            pytest.skip("it has no tags to renew")
        mine = trial.order(0)
        other = trial.order(0, pool=trial.another_pool())
        trial.launch(mine)
        trial.launch(other)
        later = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=5)
        trial.driver.renew(mine.pool, later)
        for each in trial.driver.instances(pool=mine.pool):
            _near(each.until, later)
        for left in trial.leftovers():
            _near(left.until, later if left.pool == mine.pool else other.until)
        for each in trial.driver.instances(pool=other.pool):
            _near(each.until, other.until)

    def test_check_costs_nothing_and_says_what_to_do(self, trial: Trial) -> None:
        if not isinstance(trial.driver, Checks):
            pytest.skip("it has no checks")
        findings = list(trial.driver.check())
        assert findings, "it found nothing to say"
        for each in findings:
            assert isinstance(each, Finding)
            assert each.what, each
            assert each.good or each.advice, f"what is wrong has no advice: {each}"
        assert trial.count() == 0

    def _rentable(self, trial: Trial) -> Sequence[Offer]:
        """What a launch of this trial may have been rented on."""
        return trial.offers[: 1 if self.several else None]

    def _needs_machines(self) -> None:
        if not self.real:
            pytest.skip("no command can run on its machines")


def _slots_and_devices() -> Callable[[], tuple[int, int]]:
    """Return a function that travels by value, as a machine lacks this module."""

    def count() -> tuple[int, int]:
        from skypool.runtime import instance_info

        info = instance_info()
        return info.slots, len(info.accelerators)

    return count


def _in_words(error: ProviderError, driver: Driver) -> None:
    """It says who refused, in whose words, and what to do."""
    assert error.provider == driver.name, f"it does not say who refused: {error!r}"
    assert error.text, f"it does not carry the provider's own words: {error!r}"
    own = str(error).replace(error.text, "").replace(error.code or "\0", "")
    assert len(own.split()) >= 4, f"it repeats the provider's words, and does not say what to do: {error}"


def _near(said: datetime | None, asked: datetime | None) -> None:
    assert said is not None, "no tag says until when it is needed"
    assert asked is not None
    assert said.tzinfo is not None, f"{said} has no time zone"
    assert abs((said - asked).total_seconds()) <= 1, f"it was to be {asked}, and the tag says {said}"


def _ended(driver: Driver, instance: Instance) -> bool:
    try:
        driver.terminate([instance])
    except StillRunning:
        return False
    return True
