"""Tests of `DriverContract` for drivers that sell slices: several hosts that are rented, start and end together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from skypool.drivers.contract import Driver
from skypool.errors import CapacityError, OfferGone
from skypool.model import Instance, Need
from skypool.testing.trial import Trial


class SliceContract:
    """Tests of slices. This class is a part of `DriverContract`.

    The tests are skipped if the fixture `slice_need` returns None.

    Attributes:
        patience: seconds within which a machine must boot or end. If it takes longer, the test fails.
        real: True if commands can run on the machines. False skips the test that needs this.
    """

    patience: ClassVar[float]
    real: ClassVar[bool]

    @pytest.fixture
    def slice_need(self) -> Need | None:
        """Return the requirements of a slice of several hosts; None (the default) if the driver sells no slices.

        Override this fixture for a driver that sells slices. The tests rent up to two of these slices at the same time.
        """
        return None

    @pytest.fixture
    def slices(self, driver: Driver, control: object, slice_need: Need | None) -> Iterator[Trial]:
        """Yield a `Trial` whose offers are slices that meet `slice_need`. Skip the test if that is None."""
        if slice_need is None:
            pytest.skip("slice_need returns None: override this fixture if the driver sells slices of several hosts")
        trial = Trial(driver, control, slice_need, self.patience)
        yield trial
        trial.close()

    def test_a_slice_comes_with_all_its_hosts_in_order(self, slices: Trial) -> None:
        hosts = slices.offer.hosts
        assert hosts > 1, f"the best offer for slice_need must be a slice of several hosts: {slices.offer}"
        order = slices.order(*range(3 * hosts, 5 * hosts))
        first = slices.launch(order)
        second = slices.launch(order)
        assert [each.node for each in first] == [*order.nodes], (
            "launch must return one machine for each node, in the order of the nodes"
        )
        assert [(each.id, each.slice) for each in first] == [(each.id, each.slice) for each in second], (
            "a repeated launch with the same order must return the same machines"
        )
        assert len({each.id for each in first}) == 2 * hosts, "each host must have an id of its own"
        for each in first:
            assert (each.offer, each.token) == (slices.offer, order.token), (
                "an Instance must have the offer that was rented, and the token of its order"
            )
        _whole(first, hosts)
        _whole(slices.instances(), hosts)
        assert {each.node: (each.id, each.slice) for each in slices.instances()} == {
            each.node: (each.id, each.slice) for each in first
        }, "the instances found by tag differ from those that launch returned"
        assert slices.count() == 2 * hosts, "launch must make all hosts of both slices, and no further machines"

    def test_launch_with_little_stock_gives_whole_slices(self, slices: Trial) -> None:
        hosts = slices.offer.hosts
        slices.pull("stock_out", slices.offer, 1)
        try:
            launched = slices.launch(slices.order(*range(2 * hosts)))
        except (CapacityError, OfferGone):
            launched = []
        assert [each.node for each in launched] in ([*range(hosts)], []), "launch must return whole slices, or raise"
        assert slices.count() == len(launched), "launch must return every machine that it made, and end the others"

    def test_a_slice_ends_as_a_whole_whichever_host_is_named(self, slices: Trial) -> None:
        hosts = slices.offer.hosts
        launched = slices.launch(slices.order(*range(2 * hosts)))
        slices.driver.terminate(launched[hosts - 1 : hosts])
        left = [each.id for each in launched[hosts:]]
        assert [each.id for each in slices.instances()] == left, "terminate must end the one slice and leave the other"
        assert slices.count() == hosts, "terminate must end all hosts of the slice, and no other machine"
        slices.driver.terminate(launched)
        assert slices.instances() == [], "instances must not return machines that terminate has ended"
        assert slices.count() == 0, "terminate must end all hosts of the given slices"

    def test_a_pool_has_a_node_for_each_host_of_its_slices(self, slices: Trial) -> None:
        if not self.real:
            pytest.skip("`real` is False: no command can run on the machines")
        from skypool.compute_pool.compute_pool import ComputePool

        need = slices.need
        hosts = slices.offer.hosts
        accelerators = list(need.accelerators)
        with ComputePool(slices.driver, accelerator=accelerators, name=slices.pool, console="off") as pool:
            assert pool.nodes == dict.fromkeys(range(hosts), "ready")
            assert pool.submit(divmod, 7, 2).result() == (3, 1), "the pool must return the result of the call"
        assert slices.instances() == [], "the pool must end all its machines"
        assert slices.count() == 0, "the pool must end all its machines"


def _whole(instances: Sequence[Instance], hosts: int) -> None:
    """Raise AssertionError unless the instances form whole slices of `hosts` machines, with different slice names."""
    ranked = sorted(instances, key=lambda each: each.node)
    names = [each.slice for each in ranked]
    slices = [set(names[first : first + hosts]) for first in range(0, len(names), hosts)]
    assert all(len(each) == 1 for each in slices), f"hosts of one slice must have the same Instance.slice: {names}"
    assert len(set(names)) == len(slices), f"Instance.slice must differ from slice to slice: {names}"
    assert "" not in names, "Instance.slice must not be empty for a host of a slice"
