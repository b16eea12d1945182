"""`DriverContract`: tests that every driver of a cloud provider must pass. The driver's author runs them with pytest.

Subclass the class in a test module:

    class TestAcme(DriverContract):
        @pytest.fixture
        def driver(self): return Acme(region="test-1")

        @pytest.fixture
        def control(self): return acme_test_cloud       # an object with any of the methods in `trial.ABILITIES`
"""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import posixpath
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar

import pytest

from skypool.accelerators import Accelerator
from skypool.drivers.contract import (
    Abilities,
    Bills,
    Checks,
    Driver,
    Proves,
    Renews,
    Tidies,
    abilities,
    ends_itself,
)
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
from skypool.model import Bill, Finding, Instance, Leftover, Need, Offer
from skypool.testing.contract_lists import ListContract
from skypool.testing.contract_slices import SliceContract
from skypool.testing.trial import Trial

_SECRET = re.compile(r"(^|_)(token|secret|password|passphrase|api_?key|access_key|private_key)$|^key$")


def elsewhere(argv: Sequence[str], what: object) -> str:
    """Run a new Python process, send it `what`, pickled, on stdin, and return its stdout. Waits without limit.

    The process has the import path and environment of this one. `argv` are arguments of Python, such as ["-m",
    "module"]. AssertionError with the process's stderr is raised if its exit status is not 0.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))}
    done = subprocess.run([sys.executable, *argv], input=pickle.dumps(what), capture_output=True, env=env)
    assert done.returncode == 0, (
        f"`python {' '.join(argv)}` failed with exit status {done.returncode}:\n{done.stderr.decode()}"
    )
    return done.stdout.decode()


class DriverContract(ListContract, SliceContract):
    """A pytest class with the tests that every driver must pass.

    Write a subclass, such as `TestAcme`, with a fixture `driver` that returns the driver. Override other fixtures and
    the attributes if their defaults do not fit the driver.

    Attributes:
        patience: seconds within which a machine must boot or end. If it takes longer, the test fails.
        quick: seconds within which the driver's methods `offers` and `launch` must return. If they take longer, the
            test fails.
        real: True if commands and pools can run on the machines. False skips the tests that need this.
        several: True if several machines can be rented on one offer. False: each offer is a single machine, and the
            tests use several offers.
    """

    patience: ClassVar[float] = 60.0
    quick: ClassVar[float] = 60.0
    real: ClassVar[bool] = True
    several: ClassVar[bool] = True

    # --- fixtures that a subclass overrides ------------------------------------------------------------------

    @pytest.fixture
    def driver(self) -> Driver:
        """Return the driver under test, ready to rent. A subclass must override this fixture.

        The tests have at most three machines of the driver alive at once, or two slices of the kind that the fixture
        `slice_need` describes.

        Raises:
            NotImplementedError: the subclass does not override this fixture.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `driver` that returns the driver to test")

    @pytest.fixture
    def control(self) -> object:
        """Return an object with which the tests change the driver's cloud, or None (the default) for none.

        The object may have any of the methods in `trial.ABILITIES`, such as `stock_out`, which makes the cloud run out
        of stock. A test that needs a missing method is skipped.
        """
        return None

    @pytest.fixture
    def need(self) -> Need:
        """Return the requirements of the machines that the tests rent. The default requires nothing special."""
        return Need()

    @pytest.fixture
    def secrets(self) -> Sequence[str]:
        """Return the secret texts in the driver's settings, such as an API key, which `repr(driver)` must not show."""
        return ()

    @pytest.fixture
    def trial(self, driver: Driver, control: object, need: Need) -> Iterator[Trial]:
        """Yield the `Trial` with which a test rents machines. Afterwards, end everything that the test rented."""
        trial = Trial(driver, control, need, self.patience, self.several)
        yield trial
        trial.close()

    # --- the driver itself -----------------------------------------------------------------------------------

    def test_it_is_a_frozen_dataclass_with_every_verb_and_a_name(self, driver: Driver) -> None:
        assert isinstance(driver, Driver), "a driver must have all methods of skypool.drivers.contract.Driver"
        assert dataclasses.is_dataclass(driver), "a driver must be a dataclass, so that it can be compared and pickled"
        assert getattr(type(driver), "__dataclass_params__").frozen, "a driver must be frozen: several threads share it"  # noqa: B009
        assert re.fullmatch(r"[a-z][a-z0-9-]*", driver.name), (
            f"the driver's name must be small letters, digits and hyphens, and begin with a letter, not {driver.name!r}"
        )
        assert isinstance(abilities(driver), Abilities), (
            "`abilities` of a driver must be an object of the class Abilities"
        )

    def test_making_one_is_free(self, driver: Driver) -> None:
        """Test that constructing the driver opens no file or connection, starts no thread, and imports no SDK."""
        assert dataclasses.is_dataclass(driver)
        made = type(driver)
        settings = {each.name: getattr(driver, each.name) for each in dataclasses.fields(driver) if each.init}
        done = elsewhere(
            ["-m", "skypool.testing.side_effects"], (made.__module__, made.__qualname__, pickle.dumps(settings))
        )
        assert done.split() == [], (
            f"constructing {made.__name__}(…) must have no side effects, but had these:\n{done.strip()}"
        )

    def test_its_repr_shows_no_secret(self, driver: Driver, secrets: Sequence[str]) -> None:
        assert dataclasses.is_dataclass(driver)
        shown = [each.name for each in dataclasses.fields(driver) if each.repr and _SECRET.search(each.name)]
        assert shown == [], f"the names of these fields suggest secrets, so they need field(repr=False): {shown}"
        for secret in secrets:
            assert secret not in f"{driver!r}{driver}", "the driver's repr must not show its secrets"

    # --- offers ----------------------------------------------------------------------------------------------

    def test_offers_come_quickly_and_say_what_they_cost(self, trial: Trial) -> None:
        began = time.monotonic()
        offers = list(trial.driver.offers(trial.need))
        assert time.monotonic() - began < self.quick, f"offers() must take less than {self.quick:g} s"
        assert offers, "offers() must return an offer for the fixture need, but returned none"
        for each in offers:
            assert isinstance(each, Offer), f"offers() must return objects of the class Offer, not {each!r}"
            assert each.provider == trial.driver.name, f"Offer.provider must be the driver's name: {each}"
            assert each.instance_type, f"Offer.instance_type must not be empty: {each}"
            assert math.isfinite(each.usd_per_hour), f"Offer.usd_per_hour must be finite: {each}"
            assert each.usd_per_hour >= 0, f"Offer.usd_per_hour must be at least 0: {each}"
            assert each.accelerator is None or isinstance(each.accelerator, Accelerator), (
                f"Offer.accelerator must be an Accelerator or None: {each}"
            )
            assert each.hosts >= 1, f"Offer.hosts must be at least 1: {each}"

    def test_offers_of_the_spot_market_come_from_who_says_that_there_is_one(self, trial: Trial) -> None:
        need = dataclasses.replace(trial.need, market="cheapest")
        markets = {each.market for each in trial.driver.offers(need)}
        assert ("spot" in markets) == abilities(trial.driver).spot, (
            f"abilities.spot must be True exactly if there are spot offers; the markets of all offers are {markets}"
        )

    # --- launch ----------------------------------------------------------------------------------------------

    def test_launch_rents_a_machine_for_each_rank(self, trial: Trial) -> None:
        order = trial.order(1, 3)
        launched = trial.launch(order)
        assert [each.node for each in launched] == [1, 3], (
            "launch must return one machine for each node, in the order of the nodes"
        )
        assert len({each.id for each in launched}) == 2, "each machine must have an id of its own"
        for each in launched:
            assert isinstance(each, Instance), f"launch must return objects of the class Instance, not {each!r}"
            assert (each.provider, each.pool, each.token) == (trial.driver.name, trial.pool, order.token), (
                "an Instance must have the driver's name, and the pool and token of its order"
            )
            assert each.offer in self._rentable(trial), "Instance.offer must be the offer that was rented"
            assert each.state in ("starting", "running")
        regions = {each.id: each.region for each in trial.instances()}
        for each in launched:  # `instances` may lack the newest machines
            assert regions.get(each.id, each.region) == each.region, "launch and instances must return the same region"
        assert trial.count() == 2, "launch must make one machine for each node"

    def test_launch_with_the_same_token_is_the_same_machines(self, trial: Trial) -> None:
        order = trial.order(0, 1)
        first = trial.launch(order)
        second = trial.launch(order)
        assert [each.id for each in first] == [each.id for each in second], (
            "a repeated launch must return the same machines"
        )
        assert all(each.offer in self._rentable(trial) for each in second), (
            "Instance.offer must be the offer that was rented"
        )
        assert trial.count() == 2, "a repeated launch with the same token must make no further machines"

    def test_launch_with_another_token_is_other_machines(self, trial: Trial) -> None:
        [first], [second] = trial.launch(trial.order(0)), trial.launch(trial.order(1))
        assert first.id != second.id, "a launch with another token must return another machine"
        assert trial.count() == 2, "a launch with another token must make another machine"

    def test_launch_after_a_lost_reply_is_the_same_machines(self, trial: Trial) -> None:
        order = trial.order(0, 1)
        trial.pull("lose_reply")
        try:
            launched = trial.launch(order)
        except (ProviderError, OSError):
            launched = trial.launch(order)
        assert sorted(each.node for each in launched) == [0, 1], (
            "a launch after a lost reply must return a machine for each node"
        )
        assert trial.count() == 2, "a repeated launch with the same token must make no further machines"

    def test_what_a_lost_reply_left_is_found_by_its_tag(self, trial: Trial) -> None:
        order = trial.order(0)
        trial.pull("lose_reply")
        try:
            trial.launch(order)
        except (ProviderError, OSError) as e:
            assert isinstance(e, NoAnswer), f"a lost reply must raise NoAnswer, not {e!r}"
        found = trial.instances()
        assert [(each.node, each.token) for each in found] == [(0, order.token)], (
            "instances must find the machine that was made before the reply was lost"
        )
        assert trial.count() == 1, "a launch must make one machine for each node, also if the reply is lost"

    def test_launch_is_back_before_the_machine_has_booted(self, trial: Trial) -> None:
        trial.pull("never_boot")
        began = time.monotonic()
        [launched] = trial.launch(trial.order(0))
        assert time.monotonic() - began < self.quick, f"launch must return in less than {self.quick:g} s"
        assert launched.state == "starting"
        assert [each.state for each in trial.instances()] == ["starting"]

    def test_launch_without_stock_is_a_capacity_error_and_rents_nothing(self, trial: Trial) -> None:
        trial.pull("stock_out", trial.offer, 0)
        with pytest.raises((CapacityError, OfferGone)) as refused:
            trial.driver.launch(trial.offer, trial.order(0))
        _in_words(refused.value, trial.driver)
        assert trial.count() == 0, "a launch that raises CapacityError must leave no machine"

    def test_launch_with_little_stock_gives_the_first_ranks_or_nothing(self, trial: Trial) -> None:
        trial.pull("stock_out", trial.offer, 1)
        try:
            launched = trial.driver.launch(trial.offer, trial.order(2, 5))
        except (CapacityError, OfferGone):
            launched = []
        assert [each.node for each in launched] in ([2], []), (
            "launch must return the machines of the first nodes, or raise"
        )
        assert trial.count() == len(launched), "launch must return every machine that it made, and end the others"

    def test_launch_of_machines_that_must_reach_each_other_is_all_or_none(self, trial: Trial) -> None:
        if not abilities(trial.driver).private_network:
            pytest.skip("abilities.private_network is False: the machines cannot reach each other")
        need = dataclasses.replace(trial.need, private_network=True)
        launched = trial.launch(trial.order(0, 1, need=need))
        assert [each.node for each in launched] == [0, 1], "launch must return a machine for each node"
        trial.driver.terminate(launched)
        trial.pull("stock_out", trial.offer, 1)
        with pytest.raises((CapacityError, OfferGone)):
            trial.launch(trial.order(0, 1, need=need))
        assert trial.count() == 0, "if the order needs a private network, a launch that fails must leave no machine"

    @pytest.mark.parametrize(
        "kind",
        [CredentialsError, AccessError, CapacityError, QuotaError, RateLimitError, FundsError, OfferGone],
        ids=lambda kind: kind.__name__,
    )
    def test_a_refusal_has_its_kind_code_text_and_advice_and_rents_nothing(
        self, trial: Trial, kind: type[ProviderError]
    ) -> None:
        if trial.pull("refuse", kind) is False:
            pytest.skip(f"the cloud never raises {kind.__name__}: the control's refuse() returned False")
        try:
            launched = trial.driver.launch(trial.offer, trial.order(0))
        except ProviderError as e:
            assert type(e) is kind, f"launch must raise {kind.__name__} for this refusal, not {e!r}"
            _in_words(e, trial.driver)
            assert e.code, f"the error must have the provider's own code in `code`: {e!r}"
            assert trial.count() == 0, "a launch that was refused must leave no machine"
        else:
            assert kind is RateLimitError, f"the cloud refused the request, so launch must raise {kind.__name__}"
            assert [each.node for each in launched] == [0], (
                "a launch that waits and repeats the request must return the machine"
            )
            assert trial.count() == 1, "a launch that waits and repeats the request must make one machine"

    # --- instances -------------------------------------------------------------------------------------------

    def test_instances_say_until_when_they_are_needed(self, trial: Trial) -> None:
        if not isinstance(trial.driver, Renews):
            pytest.skip("the driver has no method renew, so its tags need not hold a time")
        order = trial.order(0)
        trial.launch(order)
        [found] = trial.instances()
        _near(found.until, order.until)

    def test_a_new_process_finds_and_ends_what_is_there_without_a_ledger(self, trial: Trial) -> None:
        launched = trial.launch(trial.order(0, 1))
        ids = " ".join(sorted(each.id for each in launched))
        assert elsewhere(["-m", "skypool.testing.find_and_end"], (trial.driver, trial.pool)).strip() == ids
        assert trial.count() == 0, "terminate in another process must end the machines"

    def test_verbs_may_be_called_from_several_threads_at_once(self, trial: Trial) -> None:
        orders = [trial.order(node) for node in range(3)]
        trial.offers  # noqa: B018 - the driver is asked once, before the threads start
        launched = [each for got in trial.at_once(*[lambda o=o: trial.launch(o) for o in orders]) for each in got]
        assert {each.token for each in launched} == {each.token for each in orders}, (
            "launches in several threads must return the machines of all orders"
        )
        for found in trial.at_once(*[trial.instances] * 3):
            assert {each.id for each in found} == {each.id for each in launched}, (
                "instances must return the same machines in several threads"
            )
        trial.at_once(*[lambda i=i: trial.driver.terminate([i]) for i in launched])
        assert trial.instances() == [], "instances must not return machines that terminate has ended"
        assert trial.count() == 0, "terminate in several threads must end all machines"

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
        from skypool.compute_pool.compute_pool import ComputePool

        more: dict[str, Any] = {"accelerator": list(trial.need.accelerators) or None}
        with ComputePool(trial.driver, nodes=2, name=trial.pool, console="off", **more) as pool:
            assert pool.submit(divmod, 7, 2).result() == (3, 1), "the pool must return the result of the call"
            with pytest.raises(ZeroDivisionError):
                pool.submit(divmod, 7, 0).result()
            if trial.need.accelerators:
                asked = min(each.slice.chips_per_vm if each.slice else each.count for each in trial.need.accelerators)
                slots, devices = pool.submit(_slots_and_devices()).result()
                assert slots == 1, f"a node with accelerators must run one call at once by default, not {slots}"
                assert devices >= asked, f"a call must see all {asked} accelerators of its machine, not {devices}"
            assert sorted(each.node for each in trial.driver.instances(pool=trial.pool)) == [0, 1], (
                "instances must return the machine of each node of a live pool"
            )
        assert trial.instances() == [], "the pool must end all its machines"
        assert trial.count() == 0, "the pool must end all its machines"

    def test_an_interruption_is_told_on_the_machine(self, trial: Trial) -> None:
        self._needs_machines()
        trial.can("interrupt")
        [instance] = trial.launch(trial.order(0))
        access = trial.reach(instance)
        assert access.watch or not abilities(trial.driver).spot, (
            "a driver that sells spot machines must return an Access whose `watch` is not empty"
        )
        if not access.watch:
            pytest.skip("Access.watch is empty: the driver sells no spot machines, and nothing tells of an end")
        source = f'print("begun", flush=True)\n{access.watch}'
        argv = access.transport.argv([access.python or "python3", "-uc", source])
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, bufsize=1) as watch:
            try:
                out = watch.stdout
                assert out is not None
                assert out.readline() == "begun\n"
                assert not select.select([out], [], [], 0.5)[0], "Access.watch must print nothing before a notice"
                trial.pull("interrupt", instance)
                trial.eventually(lambda: select.select([out], [], [], 0)[0], "a notice on the machine")
                told = out.readline()
            finally:
                watch.kill()
        when = re.fullmatch(r"\d+(\.\d+)?\n", told)
        assert when, f"Access.watch must print a line with seconds since 1970, not {told!r}"
        assert abs(float(told) - time.time()) < 3600, (
            f"Access.watch printed {told.strip()}, which is more than an hour from now ({time.time():.0f})"
        )

    def test_a_machine_ends_itself_when_its_lease_is_over(self, trial: Trial) -> None:
        if not ends_itself(trial.driver, trial.offer):
            pytest.skip("the machines do not end themselves: `ends_itself` of the abilities or the offer is False")
        trial.can("advance", "count")
        trial.launch(trial.order(0, lease=300.0))
        trial.launch(trial.order(1, lease=900.0, lifetime=300.0))
        trial.pull("advance", 200)
        assert trial.count() == 2, "machines must not end before their lease and lifetime are over"
        trial.pull("advance", 101)
        trial.eventually(lambda: trial.count() == 0, "the end of machines whose lease and lifetime are over")

    def test_a_machine_that_hears_of_its_client_lives_on(self, trial: Trial) -> None:
        self._needs_machines()
        trial.can("advance", "count")
        access = trial.reach(trial.launch(trial.order(0, lease=300.0))[0])
        if not access.guard:
            pytest.skip("Access.guard is empty: the machines have no lease file")
        trial.pull("advance", 200)
        assert trial.run(access, ["sh", "-c", 'printf "%-31s\\n" "1 300" 1<> "$0"', access.guard]).returncode == 0
        trial.pull("advance", 200)
        assert trial.count() == 1, "a machine must live on if its lease file was rewritten"
        trial.pull("advance", 200)
        trial.eventually(lambda: trial.count() == 0, "the end of a machine whose client no longer renews the lease")

    def test_a_machine_ends_at_its_written_end_whoever_asks_for_more(self, trial: Trial) -> None:
        self._needs_machines()
        trial.can("advance", "count")
        access = trial.reach(trial.launch(trial.order(0, lease=300.0))[0])
        end, held = (posixpath.join(posixpath.dirname(access.guard), name) for name in ("end", "held"))
        if not access.guard or trial.run(access, ["test", "-f", end]).returncode:
            pytest.skip(f"Access.guard has no file {end!r} beside it: the machines hold no written end")

        def ask(text: str, file: str) -> None:
            assert trial.run(access, ["sh", "-c", 'printf "%-127s\\n" "$0" 1<> "$1"', text, file]).returncode == 0

        def answers(serial: str) -> bool:
            return trial.run(access, ["cat", held]).stdout.startswith(f"{serial} ")

        for serial, seconds in (("1", 250), ("2", 9000)):
            ask(f"{serial} {seconds} {'ab' * 32} {serial}", end)
            trial.eventually(partial(answers, serial), f"the answer to request {serial} of a written end in {held}")
        trial.pull("advance", 200)
        assert trial.run(access, ["sh", "-c", 'printf "%-31s\\n" "1 300" 1<> "$0"', access.guard]).returncode == 0
        assert trial.count() == 1, "a machine must not end before its written end"
        trial.pull("advance", 60)
        trial.eventually(lambda: trial.count() == 0, "the end of a machine at the earliest end that was written there")

    # --- the end ---------------------------------------------------------------------------------------------

    def test_terminate_comes_back_when_the_end_is_proved(self, trial: Trial) -> None:
        first, second = trial.launch(trial.order(0, 1))
        trial.driver.terminate([first])
        assert [each.id for each in trial.instances()] == [second.id], (
            f"terminate must end {first.id} and leave {second.id}"
        )
        assert trial.count() == 1, "terminate must end the given machine alone"
        trial.driver.terminate([second])
        assert trial.instances() == [], "instances must not return machines that terminate has ended"
        assert trial.count() == 0, "terminate must end all given machines before it returns"

    def test_terminate_is_quiet_for_what_is_gone(self, trial: Trial) -> None:
        trial.driver.terminate([])
        first, second = trial.launch(trial.order(0, 1))
        trial.driver.terminate([first])
        trial.driver.terminate([first])
        if hasattr(trial.control, "kill"):
            trial.pull("kill", second)
        trial.driver.terminate([first, second])
        assert trial.count() == 0, "terminate must end the machines that are left"

    def test_terminate_is_loud_for_what_does_not_end_and_ends_the_rest(self, trial: Trial) -> None:
        trial.can("undying")
        first, second = trial.launch(trial.order(0, 1))
        trial.stubborn.append(first)
        trial.pull("undying", first, None)
        with pytest.raises(StillRunning) as left:
            trial.driver.terminate([first, second])
        assert [getattr(each, "id", None) for each in left.value.instances] == [first.id]
        assert first.id in str(left.value), f"StillRunning must name the machine {first.id}, which is still alive"
        assert [each.id for each in trial.instances()] == [first.id], (
            "instances must return the machine that has not ended, and no other"
        )
        trial.pull("undying", first, 1)
        trial.eventually(lambda: _ended(trial.driver, first), f"the end of {first.id} after repeated requests")
        assert trial.count() == 0, "both machines must have ended"

    # --- what else there is ----------------------------------------------------------------------------------

    def test_nothing_else_is_left_of_a_pool_that_was_tidied(self, trial: Trial) -> None:
        before = trial.pull_count("leftovers") if hasattr(trial.control, "leftovers") else 0
        trial.launch(trial.order(0))
        trial.launch(trial.order(0, pool=trial.another_pool()))
        trial.driver.terminate(trial.driver.instances(pool=trial.pool))
        if isinstance(trial.driver, Tidies):
            left = trial.driver.leftovers(pool=trial.pool)
            for each in left:
                assert isinstance(each, Leftover), (
                    f"leftovers() must return objects of the class Leftover, not {each!r}"
                )
                assert (each.provider, each.pool) == (trial.driver.name, trial.pool), (
                    f"a Leftover must have the driver's name, and the name of the pool: {each}"
                )
                assert each.kind, f"Leftover.kind must not be empty: {each}"
            trial.driver.tidy(left)
            trial.driver.tidy(left)  # must not raise for leftovers that are gone
            assert trial.driver.leftovers(pool=trial.pool) == [], "leftovers() must not return what tidy() has removed"
            trial.driver.terminate(trial.instances())
            trial.driver.tidy(trial.leftovers())
        if hasattr(trial.control, "leftovers"):
            assert trial.pull_count("leftovers") <= before, (
                "resources of the pool are left that the driver's leftovers() did not return"
            )

    def test_renew_moves_what_the_tags_of_this_pool_say(self, trial: Trial) -> None:
        if not isinstance(trial.driver, Renews):
            pytest.skip("the driver has no method renew")
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
            pytest.skip("the driver has no method check")
        findings = list(trial.driver.check())
        assert findings, "check() must return at least one finding"
        for each in findings:
            assert isinstance(each, Finding), f"check() must return objects of the class Finding, not {each!r}"
            assert each.what, f"Finding.what must not be empty: {each}"
            assert each.good or each.advice, f"a finding with good=False must have advice: {each}"
        assert trial.count() == 0, "check() must rent no machine"

    def test_creates_that_must_be_refused_rent_nothing(self, trial: Trial) -> None:
        if not isinstance(trial.driver, Proves):
            pytest.skip("the driver has no method prove_creates")
        findings = list(trial.driver.prove_creates())
        assert findings, "prove_creates() must return at least one finding"
        for each in findings:
            assert isinstance(each, Finding), f"prove_creates() must return objects of the class Finding, not {each!r}"
            assert each.good, f"prove_creates() must send only requests that the provider refuses: {each}"
            assert each.what, f"Finding.what must not be empty: {each}"
            assert each.text, f"Finding.text must have the reason of the refusal: {each}"
        assert trial.count() == 0, "prove_creates() must leave no machine"

    def test_a_create_that_is_refused_for_another_reason_is_told_with_advice(self, trial: Trial) -> None:
        if not isinstance(trial.driver, Proves):
            pytest.skip("the driver has no method prove_creates")
        if trial.pull("refuse", AccessError) is False:
            pytest.skip("the cloud never raises AccessError: the control's refuse() returned False")
        findings = list(trial.driver.prove_creates())
        bad = [each for each in findings if not each.good]
        assert bad, "prove_creates() must return a bad finding if the account lacks the permission"
        assert all(each.advice for each in bad), f"a finding with good=False must have advice: {bad}"
        assert trial.count() == 0, "prove_creates() must leave no machine"

    def test_the_bill_is_a_sum_or_says_where_to_look(self, trial: Trial) -> None:
        if not isinstance(trial.driver, Bills):
            pytest.skip("the driver has no method billed")
        since = datetime.now(UTC) - timedelta(hours=1)
        launched = trial.launch(trial.order(0))
        trial.driver.terminate(launched)
        bill = trial.driver.billed([each.id for each in launched], since, datetime.now(UTC))
        assert isinstance(bill, Bill), f"billed() must return an object of the class Bill, not {bill!r}"
        assert bill.usd is None or bill.usd >= 0, f"Bill.usd must be at least 0, or None: {bill}"
        assert bill.text, "Bill.text must say where the sum is from, or where to look"

    def _rentable(self, trial: Trial) -> Sequence[Offer]:
        """Return the offers on which the trial may rent: only the first, or all if `several` is False."""
        return trial.offers[: 1 if self.several else None]

    def _needs_machines(self) -> None:
        """Skip the running test if `real` is False: no command can run on the machines."""
        if not self.real:
            pytest.skip("`real` is False: no command can run on the machines")


def _slots_and_devices() -> Callable[[], tuple[int, int]]:
    """Return a function that returns how many calls its node runs at once, and how many accelerators it sees there."""

    # nested, so that it is pickled by value: a machine need not have this module
    def count() -> tuple[int, int]:
        from skypool.runtime import instance_info

        info = instance_info()
        return info.slots, len(info.accelerators)

    return count


def _in_words(error: ProviderError, driver: Driver) -> None:
    """Raise AssertionError unless an error has the driver's name, the provider's text, and some words of advice."""
    assert error.provider == driver.name, f"the error must have {driver.name!r} in `provider`: {error!r}"
    assert error.text, f"the error must have the provider's own text in `text`: {error!r}"
    own = str(error).replace(error.text, "").replace(error.code or "\0", "")
    assert len(own.split()) >= 4, f"the message must add advice to the provider's own text: {error}"


def _near(said: datetime | None, asked: datetime | None) -> None:
    """Raise AssertionError unless `said`, read from a tag, has a time zone and is at most a second from `asked`."""
    assert said is not None, f"`until` must be the time in the resource's tag, {asked}, not None"
    assert asked is not None
    assert said.tzinfo is not None, f"`until` must have a time zone: {said}"
    assert abs((said - asked).total_seconds()) <= 1, f"`until` must be the time in the resource's tag, {asked}: {said}"


def _ended(driver: Driver, instance: Instance) -> bool:
    """Ask the driver to end a machine. Return True if it has ended, False if the driver raises StillRunning."""
    try:
        driver.terminate([instance])
    except StillRunning:
        return False
    return True
