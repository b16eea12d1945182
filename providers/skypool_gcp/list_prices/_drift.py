"""Compares the tables of prices in this package with Google's price catalogue. No I/O.

A price of a table is compared only if the catalogue has it, too. Spot prices may change daily, and most do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from skypool.model import Market

Place = tuple[str, Market]
"""A region and a market."""

Prices = Mapping[str, Mapping[Place, float]]
"""Prices in USD per hour, by a name and then by (region, market)."""

_TOLERANCE = 0.01
"""The share by which two equal prices may differ, because the catalogue has more digits than Google's pages."""


class Difference(NamedTuple):
    """A price of a table, beside the catalogue's price for the same thing.

    Attributes:
        name: The machine type, or the part that is charged, such as "v5e" for a TPU chip.
        ours: The price in the table, in USD per hour.
        theirs: The price in the catalogue, in USD per hour.
    """

    name: str
    region: str
    market: Market
    ours: float
    theirs: float

    @property
    def share(self) -> float:
        """The size of the difference as a share of the table's price, such as 0.1 for 10 %."""
        return abs(self.theirs - self.ours) / self.ours


class Comparison(NamedTuple):
    """The result of comparing the tables with the catalogue.

    Attributes:
        compared: The number of prices that both the tables and the catalogue have.
        differences: The prices that differ by more than 1 %, the largest difference first.
    """

    compared: int
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        """Return the result in words, with what to do about differences."""
        if not self.differences:
            return f"all {self.compared:,} prices of the tables that the catalogue has agree with it"
        most = self.differences[0]
        where = f"{most.name} {'on demand' if most.market == 'on-demand' else 'as spot'} in {most.region}"
        return (
            f"{len(self.differences):,} of {self.compared:,} prices of the tables differ from the catalogue by more "
            f"than 1 %, most that of {where} ({most.ours:.4f} USD/h in the table, {most.theirs:.4f} in the catalogue, "
            "which counts): for newer tables, update skypool with `pip install --upgrade 'skypool[gcp]'`"
        )


def compare(tables: Prices, in_catalogue: Callable[[str, Place], float | None]) -> Comparison:
    """Compare the prices of tables with the catalogue.

    Args:
        tables: The prices of the tables in USD per hour: a dict from name to a dict from (region, market) to price.
        in_catalogue: Returns the catalogue's price for a name and a (region, market); None if the catalogue has none.
    """
    found = [*_pairs(tables, in_catalogue)]
    differences = [each for each in found if each.share > _TOLERANCE]
    return Comparison(len(found), tuple(sorted(differences, key=lambda each: -each.share)))


def _pairs(tables: Prices, in_catalogue: Callable[[str, Place], float | None]) -> Iterator[Difference]:
    """Yield each price of the tables that the catalogue has, too, with the catalogue's price."""
    for name, places in tables.items():
        for (region, market), ours in places.items():
            theirs = in_catalogue(name, (region, market))
            if theirs is not None:
                yield Difference(name, region, market, ours, theirs)
