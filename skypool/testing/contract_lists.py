"""Tests of `DriverContract` for the lists of machines by which drivers find what is there and prove what has ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from skypool.errors import ErrorGroup, ProviderError, StillRunning
from skypool.testing.trial import Trial


class ListContract:
    """Tests of what `instances` returns. This class is a part of `DriverContract`."""

    def test_instances_are_found_by_the_tag_of_their_pool(self, trial: Trial) -> None:
        mine = trial.order(1)
        other = trial.order(0, pool=trial.another_pool())
        [first], [second] = trial.launch(mine), trial.launch(other)
        assert [each.id for each in trial.driver.instances(pool=mine.pool)] == [first.id], (
            "instances(pool=…) must return this pool's machine alone"
        )
        assert [each.id for each in trial.driver.instances(pool=other.pool)] == [second.id], (
            "instances(pool=…) must return this pool's machine alone"
        )
        everything = {each.id: each for each in trial.driver.instances()}
        assert {first.id, second.id} <= set(everything), "instances() must return the machines of all pools"
        found = everything[first.id]
        assert (found.pool, found.node, found.token) == (mine.pool, 1, mine.token), (
            "pool, node and token must be read from the tags"
        )
        assert trial.driver.instances(pool=f"{mine.pool[:-1]}") == [], "a part of a pool's name must not match the pool"

    def test_instances_are_read_from_every_page_of_a_list(self, trial: Trial) -> None:
        trial.can("paged")
        order = trial.order(0, 1)
        launched = trial.launch(order)
        [other] = trial.launch(trial.order(0, pool=trial.another_pool()))
        trial.pull("paged", 1)
        assert {each.id for each in trial.driver.instances(pool=order.pool)} == {each.id for each in launched}, (
            "instances(pool=…) must read all pages of the provider's list"
        )
        assert {each.id for each in launched} | {other.id} <= {each.id for each in trial.driver.instances()}, (
            "instances() must read all pages of the provider's list"
        )
        assert {each.id for each in trial.launch(order)} == {each.id for each in launched}, (
            "a repeated launch must find its machines on all pages of the provider's list"
        )
        trial.driver.terminate(launched)
        assert trial.count() == 1, "terminate must end machines on all pages of the provider's list"

    def test_an_end_is_proved_by_every_page_of_a_list(self, trial: Trial) -> None:
        trial.can("paged", "undying")
        launched = trial.launch(trial.order(0, 1))
        trial.pull("paged", 1)
        for each in launched:
            trial.stubborn.append(each)
            trial.pull("undying", each, None)
        with pytest.raises(StillRunning) as left:
            trial.driver.terminate(launched)
        assert {getattr(each, "id", None) for each in left.value.instances} == {each.id for each in launched}, (
            "terminate must look for a machine on all pages of the provider's list before it counts as ended"
        )

    def test_a_list_that_breaks_off_proves_no_end(self, trial: Trial) -> None:
        trial.can("cut_short", "undying")
        [launched] = trial.launch(trial.order(0))
        trial.stubborn.append(launched)
        trial.pull("undying", launched, None)
        trial.cut = True
        trial.pull("cut_short", True)
        for pool in (trial.pool, None):
            assert _fails(partial(trial.driver.instances, pool=pool)), (
                "instances() must raise ProviderError if its list may be incomplete"
            )
        assert _fails(partial(trial.driver.terminate, [launched])), (
            "terminate must raise StillRunning if the list that would prove the end may be incomplete"
        )
        assert trial.count() == 1


def _fails(do: Callable[[], object]) -> bool:
    """Call a function. Return True if it raises an error of a driver, and False if it returns."""
    try:
        do()
    except (ProviderError, StillRunning, ErrorGroup):
        return True
    return False
