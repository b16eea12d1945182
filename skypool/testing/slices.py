"""The part of `DriverContract` for drivers that sell slices: several hosts that come and end together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from skypool.drivers.contract import Driver
from skypool.errors import CapacityError, OfferGone
from skypool.model import Instance, Need
from skypool.testing.trial import Trial


class SliceContract:
    """A part of `DriverContract`; skipped where `slice_need` is None."""

    patience: ClassVar[float]
    real: ClassVar[bool]

    @pytest.fixture
    def slice_need(self) -> Need | None:
        """What is asked of a slice of several hosts, of which two can be alive at once; None where none is sold."""
        return None

    @pytest.fixture
    def slices(self, driver: Driver, control: object, slice_need: Need | None) -> Iterator[Trial]:
        """A trial of which each offer is a slice."""
        if slice_need is None:
            pytest.skip("it sells no slices of several hosts, or its slice_need does not say how to ask for one")
        trial = Trial(driver, control, slice_need, self.patience)
        yield trial
        trial.close()

    def test_a_slice_comes_with_all_its_hosts_in_order(self, slices: Trial) -> None:
        hosts = slices.offer.hosts
        assert hosts > 1, "its slice_need is served by offers of one host"
        order = slices.order(*range(3 * hosts, 5 * hosts))
        first = slices.launch(order)
        second = slices.launch(order)
        assert [each.node for each in first] == [*order.nodes]
        assert [(each.id, each.slice) for each in first] == [(each.id, each.slice) for each in second], "not idempotent"
        assert len({each.id for each in first}) == 2 * hosts
        for each in first:
            assert (each.offer, each.token) == (slices.offer, order.token)
        _whole(first, hosts)
        _whole(slices.instances(), hosts)
        assert {each.node: (each.id, each.slice) for each in slices.instances()} == {
            each.node: (each.id, each.slice) for each in first
        }, "what is found by its tags is not what was launched"
        assert slices.count() == 2 * hosts

    def test_launch_with_little_stock_gives_whole_slices(self, slices: Trial) -> None:
        hosts = slices.offer.hosts
        slices.pull("stock_out", slices.offer, 1)
        try:
            launched = slices.launch(slices.order(*range(2 * hosts)))
        except (CapacityError, OfferGone):
            launched = []
        assert [each.node for each in launched] in ([*range(hosts)], []), "whole slices come, or nothing"
        assert slices.count() == len(launched)

    def test_a_slice_ends_as_a_whole_whichever_host_is_named(self, slices: Trial) -> None:
        hosts = slices.offer.hosts
        launched = slices.launch(slices.order(*range(2 * hosts)))
        slices.driver.terminate(launched[hosts - 1 : hosts])
        left = [each.id for each in launched[hosts:]]
        assert [each.id for each in slices.instances()] == left, "one slice was to be ended, and the other was not"
        assert slices.count() == hosts
        slices.driver.terminate(launched)
        assert slices.instances() == []
        assert slices.count() == 0

    def test_a_pool_has_a_node_for_each_host_of_its_slices(self, slices: Trial) -> None:
        if not self.real:
            pytest.skip("no command can run on its machines")
        from skypool.pool.pool import ComputePool

        need = slices.need
        hosts = slices.offer.hosts
        accelerators = list(need.accelerators)
        with ComputePool(slices.driver, accelerator=accelerators, name=slices.pool, console="off") as pool:
            assert pool.nodes == dict.fromkeys(range(hosts), "ready")
            assert pool.submit(divmod, 7, 2).result() == (3, 1)
        assert slices.instances() == []
        assert slices.count() == 0


def _whole(instances: Sequence[Instance], hosts: int) -> None:
    """These are slices, the nodes of each in order."""
    ranked = sorted(instances, key=lambda each: each.node)
    names = [each.slice for each in ranked]
    slices = [set(names[first : first + hosts]) for first in range(0, len(names), hosts)]
    assert all(len(each) == 1 for each in slices), f"hosts of one slice say the same slice, and not {names}"
    assert len(set(names)) == len(slices), f"each slice has a name of its own, and not {names}"
    assert "" not in names, "a host says which slice it is of"
