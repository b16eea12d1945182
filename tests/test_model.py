"""What the nouns say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from skypool.model import Need


@pytest.mark.parametrize(
    ("wanted", "markets"),
    [
        ("on-demand", ("on-demand",)),
        ("spot", ("spot",)),
        ("spot-if-available", ("on-demand", "spot")),
        ("cheapest", ("on-demand", "spot")),
    ],
)
def test_a_need_says_on_which_markets_it_may_be_served(wanted: Any, markets: tuple[str, ...]) -> None:
    assert Need(market=wanted).markets == markets
