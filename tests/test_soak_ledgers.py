"""A sample of what `python -m tests.soak.ledgers` does at length."""

from __future__ import annotations

import pytest

from tests.soak.ledgers import soak


@pytest.mark.slow
def test_every_command_works_after_random_damage_to_the_state_folder() -> None:
    done = soak(60, seed=2026, real=0, starts=30)
    assert done.failures == []
    assert done.runs == 60
    assert done.set_aside > 5, "some of it was beyond use"
