"""DriverContract finds each fault that a driver can have: no test of it that cannot fail."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from skypool.accelerators import H100, TPU
from skypool.errors import CredentialsError, QuotaError, SkypoolError
from skypool.model import Need
from skypool.testing import DriverContract, FakeCloud
from skypool.testing.cloud_state import USUAL, Stock
from skypool.testing.trial import ABILITIES, Trial
from tests import broken_drivers as broken
from tests.conftest import eventually, processes_of

ROOT = Path(__file__).parent.parent


class Contract(DriverContract):
    quick: ClassVar[float] = 1.0


REFUSED = "a_refusal_has_its_kind_code_text_and_advice_and_rents_nothing"
BROKEN: list[tuple[type[FakeCloud], str, dict[str, Any]]] = [
    (broken.Misnamed, "it_is_a_frozen_dataclass_with_every_verb_and_a_name", {}),
    (broken.ReadsFile, "making_one_is_free", {}),
    (broken.AsksTheNetwork, "making_one_is_free", {}),
    (broken.StartsThread, "making_one_is_free", {}),
    (broken.ImportsSdk, "making_one_is_free", {}),
    (broken.ShowsItsKey, "its_repr_shows_no_secret", {}),
    (broken.ShowsItsToken, "its_repr_shows_no_secret", {}),
    (broken.SlowOffers, "offers_come_quickly_and_say_what_they_cost", {}),
    (broken.Unpriced, "offers_come_quickly_and_say_what_they_cost", {}),
    (broken.SellsForAnother, "offers_come_quickly_and_say_what_they_cost", {}),
    (broken.DeniesSpot, "offers_of_the_spot_market_come_from_who_says_that_there_is_one", {}),
    (broken.CountsRanksFromZero, "launch_rents_a_machine_for_each_rank", {}),
    (broken.LaunchesOne, "launch_rents_a_machine_for_each_rank", {}),
    (broken.ForgetsTheOffer, "launch_rents_a_machine_for_each_rank", {}),
    (broken.ForgetsItsToken, "launch_with_the_same_token_is_the_same_machines", {}),
    (broken.OneTokenForAll, "launch_with_another_token_is_other_machines", {}),
    (broken.TriesAgainAnew, "launch_after_a_lost_reply_is_the_same_machines", {}),
    (broken.ForgetsItsToken, "launch_after_a_lost_reply_is_the_same_machines", {}),
    (broken.CallsALostReplyARefusal, "what_a_lost_reply_left_is_found_by_its_tag", {}),
    (broken.AllErrorsAreOne, "what_a_lost_reply_left_is_found_by_its_tag", {}),
    (broken.TagsAfterwards, "what_a_lost_reply_left_is_found_by_its_tag", {}),
    (broken.WaitsForTheBoot, "launch_is_back_before_the_machine_has_booted", {}),
    (broken.SaysItRuns, "launch_is_back_before_the_machine_has_booted", {}),
    (broken.RentsTheNextBest, "launch_without_stock_is_a_capacity_error_and_rents_nothing", {}),
    (broken.AllErrorsAreOne, "launch_without_stock_is_a_capacity_error_and_rents_nothing", {}),
    (broken.LeavesOneBehind, "launch_without_stock_is_a_capacity_error_and_rents_nothing", {}),
    (broken.GivesTheLastRanks, "launch_with_little_stock_gives_the_first_ranks_or_nothing", {}),
    (broken.KeepsAPart, "launch_of_machines_that_must_reach_each_other_is_all_or_none", {}),
    (broken.AllErrorsAreOne, REFUSED, {"kind": QuotaError}),
    (broken.SwallowsRefusals, REFUSED, {"kind": CredentialsError}),
    (broken.LeavesOneBehind, REFUSED, {"kind": QuotaError}),
    *[(broken.SaysLess, REFUSED, {"without": each}) for each in ("code", "text", "provider", "advice")],
    (broken.LaunchesHalfASlice, "a_slice_comes_with_all_its_hosts_in_order", {}),
    (broken.NamesNoSlice, "a_slice_comes_with_all_its_hosts_in_order", {}),
    (broken.NamesAllSlicesAlike, "a_slice_comes_with_all_its_hosts_in_order", {}),
    (broken.FindsHostsInAnyOrder, "a_slice_comes_with_all_its_hosts_in_order", {}),
    (broken.ForgetsItsToken, "a_slice_comes_with_all_its_hosts_in_order", {}),
    (broken.ForgetsTheOffer, "a_slice_comes_with_all_its_hosts_in_order", {}),
    (broken.SellsHostsOneByOne, "launch_with_little_stock_gives_whole_slices", {}),
    (broken.KeepsTheOtherHosts, "a_slice_ends_as_a_whole_whichever_host_is_named", {}),
    (broken.EndsThePool, "a_slice_ends_as_a_whole_whichever_host_is_named", {}),
    (broken.OnlySaysItEnds, "a_slice_ends_as_a_whole_whichever_host_is_named", {}),
    (broken.HasOneHostToReach, "a_pool_has_a_node_for_each_host_of_its_slices", {"machines": True}),
    (broken.SeesAllPools, "instances_are_found_by_the_tag_of_their_pool", {}),
    (broken.SeesLikeNames, "instances_are_found_by_the_tag_of_their_pool", {}),
    (broken.ForgetsRanks, "instances_are_found_by_the_tag_of_their_pool", {}),
    (broken.ReadsOnePage, "instances_are_read_from_every_page_of_a_list", {}),
    (broken.ReadsOnePage, "an_end_is_proved_by_every_page_of_a_list", {}),
    (broken.ReadsOnePage, "a_list_that_breaks_off_proves_no_end", {}),
    (broken.TakesWhatItGets, "a_list_that_breaks_off_proves_no_end", {}),
    (broken.ForgetsUntil, "instances_say_until_when_they_are_needed", {}),
    (broken.SaysNoTimeZone, "instances_say_until_when_they_are_needed", {}),
    (broken.RemembersInMemory, "a_new_process_finds_and_ends_what_is_there_without_a_ledger", {}),
    (broken.SharesItsOrder, "verbs_may_be_called_from_several_threads_at_once", {}),
    (broken.PassesWordsThroughAShell, "access_reaches_the_machine_and_passes_words_as_they_are", {"machines": True}),
    (broken.HasAnotherPython, "a_pool_lives_and_ends_there", {"machines": True}),
    (broken.TellsOfNoInterruption, "an_interruption_is_told_on_the_machine", {"machines": True}),
    (broken.CountsDown, "an_interruption_is_told_on_the_machine", {"machines": True}),
    (broken.CriesWolf, "an_interruption_is_told_on_the_machine", {"machines": True}),
    (broken.ArmsNoEnd, "a_machine_ends_itself_when_its_lease_is_over", {}),
    (broken.HoldsNoEnd, "a_machine_ends_at_its_written_end_whoever_asks_for_more", {"machines": True}),
    (broken.HearsNobody, "a_machine_that_hears_of_its_client_lives_on", {"machines": True}),
    (broken.OnlySaysItEnds, "terminate_comes_back_when_the_end_is_proved", {}),
    (broken.EndsThePool, "terminate_comes_back_when_the_end_is_proved", {}),
    (broken.IsLoudForTheGone, "terminate_is_quiet_for_what_is_gone", {}),
    (broken.DoesNotLook, "terminate_is_loud_for_what_does_not_end_and_ends_the_rest", {}),
    (broken.BlamesAll, "terminate_is_loud_for_what_does_not_end_and_ends_the_rest", {}),
    (broken.StopsAtTheFirst, "terminate_is_loud_for_what_does_not_end_and_ends_the_rest", {}),
    (broken.KeepsKeyPairs, "nothing_else_is_left_of_a_pool_that_was_tidied", {}),
    (broken.TidiesNothing, "nothing_else_is_left_of_a_pool_that_was_tidied", {}),
    (broken.TidiesLoudly, "nothing_else_is_left_of_a_pool_that_was_tidied", {}),
    (broken.SeesOthersLeftovers, "nothing_else_is_left_of_a_pool_that_was_tidied", {}),
    (broken.RenewsNothing, "renew_moves_what_the_tags_of_this_pool_say", {}),
    (broken.RenewsAll, "renew_moves_what_the_tags_of_this_pool_say", {}),
    (broken.RenewsInLocalTime, "renew_moves_what_the_tags_of_this_pool_say", {}),
    (broken.RentsToCheck, "check_costs_nothing_and_says_what_to_do", {}),
    (broken.ChecksWithoutAdvice, "check_costs_nothing_and_says_what_to_do", {}),
    (broken.ChecksNothing, "check_costs_nothing_and_says_what_to_do", {}),
    (broken.RentsToProve, "creates_that_must_be_refused_rent_nothing", {}),
    (broken.ProvesWhatIsMade, "creates_that_must_be_refused_rent_nothing", {}),
    (broken.ProvesNothing, "creates_that_must_be_refused_rent_nothing", {}),
    (broken.TakesEveryRefusal, "a_create_that_is_refused_for_another_reason_is_told_with_advice", {}),
    (broken.BillsWithoutWords, "the_bill_is_a_sum_or_says_where_to_look", {}),
    (broken.BillsBelowZero, "the_bill_is_a_sum_or_says_where_to_look", {}),
]


SOUND: set[str] = set()
"""The tests that a driver without a fault has passed in this run."""


def run(driver: FakeCloud, test: str, **more: Any) -> None:
    """One test of the contract, as pytest would run it."""
    method = getattr(Contract(), f"test_{test}")
    trial = Trial(driver, driver.control, Need(), patience=1.0)
    slices = Trial(driver, driver.control, Need(accelerators=(TPU("v5p-16"),)), patience=1.0)
    have = {"driver": driver, "trial": trial, "slices": slices, "secrets": ["sesame"], "kind": QuotaError, **more}
    method(**{name: have[name] for name in inspect.signature(method).parameters})


@pytest.mark.parametrize(("kind", "test", "more"), BROKEN, ids=lambda each: getattr(each, "__name__", "-"))
def test_a_broken_driver_is_found_out_and_a_sound_one_is_not(
    tmp_path: Path, kind: type[FakeCloud], test: str, more: dict[str, Any]
) -> None:
    stock = (*USUAL, Stock("v5p-16", 8.0, "v5p-16"))
    settings: dict[str, Any] = {"key": "sesame", "machines": more.get("machines", False), "patience": 0.2}
    settings |= {"stock": stock}
    if test not in SOUND:
        with FakeCloud(tmp_path / "sound", **settings) as sound:
            run(sound, test, **more)
        SOUND.add(test)
    if "without" in more:
        settings["without"] = more["without"]
    with kind(tmp_path / "broken", **settings) as driver:
        with pytest.raises((AssertionError, SkypoolError, pytest.fail.Exception)) as found:
            run(driver, test, **more)
    assert not isinstance(found.value, CredentialsError)
    eventually(lambda: not processes_of(str(tmp_path)), 30, "the end of the cloud's processes")


def test_every_test_of_the_contract_has_found_a_fault() -> None:
    tests = {name.removeprefix("test_") for name in dir(DriverContract) if name.startswith("test_")}
    assert {test for _, test, _ in BROKEN} == tests


def test_the_fake_clouds_control_can_do_all_that_the_contract_asks(tmp_path: Path) -> None:
    control = FakeCloud(tmp_path / "cloud").control
    assert [name for name in ABILITIES if not callable(getattr(control, name, None))] == []


# --- as its reader runs it -----------------------------------------------------------------------------------

AUTHOR = """
import pytest
from skypool.testing import DriverContract, FakeCloud

class TestMine(DriverContract):
    real = False
    quick = 5.0

    @pytest.fixture
    def driver(self, tmp_path):
        return FakeCloud(tmp_path / "cloud", machines=False)

class TestLiar(TestMine):
    @pytest.fixture
    def driver(self, tmp_path):
        class Liar(FakeCloud):
            def launch(self, offer, order):
                return super().launch(offer, order)[:-1]
        return Liar(tmp_path / "cloud", machines=False)

class TestNone(DriverContract):
    pass
"""


LEAST = """
from dataclasses import replace
from skypool.drivers.contract import Abilities
from skypool.testing import FakeCloud, Stock

class Least(FakeCloud):
    @property
    def abilities(self):
        return Abilities(ends_itself=False)

    def access(self, instance):
        return replace(super().access(instance), watch="", guard="")

STOCK = [Stock("one", 0.5, region=region, zone="") for region in ("north", "south")]
"""
LEAST_TESTS = """
import pytest
from least import STOCK, Least
from skypool.testing import DriverContract

class TestLeast(DriverContract):
    quick = 5.0

    @pytest.fixture
    def driver(self, tmp_path):
        with Least(tmp_path / "cloud", stock=STOCK, ends_itself=False) as cloud:
            yield cloud

    @pytest.fixture
    def control(self, driver):
        return driver.control
"""


def pytest_of(folder: Path, *words: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", *words]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True).stdout


def test_an_author_without_control_is_told_what_was_left_out_and_of_faults_with_their_values(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(AUTHOR)
    said = pytest_of(tmp_path, "-k", "(TestMine and launch) or (TestLiar and each_rank) or (TestNone and verb)")
    assert "control has no method lose_reply(): the next machine is made, and the connection drops" in said
    assert "assert [1] == [1, 3]" in said
    assert "TestNone needs a fixture `driver`" in said
    assert "1 failed" in said
    assert "2 errors" in said
    assert re.search(r"\b[3-9] passed", said)


@pytest.mark.slow
def test_a_driver_with_no_more_than_a_driver_must_have_passes(tmp_path: Path) -> None:
    (tmp_path / "least.py").write_text(LEAST)
    (tmp_path / "test_least.py").write_text(LEAST_TESTS)
    said = pytest_of(tmp_path)
    assert re.search(r"^3[0-9] passed, 9 skipped", said, re.MULTILINE), said
    assert "Access.watch is empty: the driver sells no spot machines" in said
    assert "the machines hold no written end" in said


def test_the_fake_cloud_needs_no_pytest_and_skypool_neither() -> None:
    code = "import sys, skypool.testing, skypool; skypool.testing.FakeCloud; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_need_of_accelerators_is_served_as_well(tmp_path: Path) -> None:
    with FakeCloud(tmp_path / "cloud", machines=False) as cloud:
        trial = Trial(cloud, cloud.control, Need(accelerators=(H100(count=8),)), 1.0)
        assert trial.offer.instance_type == "gpu-8"
        trial.launch(trial.order())
        trial.close()
        assert cloud.count() == 0
