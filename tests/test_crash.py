"""The crash matrix: the client of a pool is killed at every call that it makes, and `skypool gc --yes` leaves nothing.

A life of a pool makes N calls to its provider. For each of them a client is killed by SIGKILL just before it takes
effect, and another one just after. Then its lease runs out, and what it left is collected by another process.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from skypool.model import Need
from skypool.testing import FakeCloud, Stock
from skypool.testing.cloud_state import When
from tests.forks import Fork
from tests.lab.launches import LATER, LEASE_OVER

LIFE = """
import sys
import skypool as sky
from skypool.testing import FakeCloud

terms = {"accelerator": "v5p-16"} if sys.argv[2:] else {"nodes": 2}
with sky.ComputePool(FakeCloud(sys.argv[1]), name="train", lease="60s", console="off", **terms) as pool:
    assert len(pool.nodes) == 2
    assert [call.result() for call in [pool.submit(abs, -1), pool.submit(abs, -2)]] == [1, 2]
"""


@dataclass(frozen=True)
class Cell:
    """One life: where it was killed, and what there was of it after that, after its lease, and after gc."""

    call: str
    when: When
    left: int
    lasted: int
    collected: int

    def __str__(self) -> str:
        return f"{self.call:>18}  {self.when:6}  {self.left:>5}  {self.lasted:>11}  {self.collected:>8}"


@dataclass(frozen=True)
class Client:
    """The machine of somebody who uses a fake cloud."""

    home: Path

    def cloud(self) -> FakeCloud:
        stock = [Stock("small", usd_per_hour=1.0, capacity=1), Stock("other", usd_per_hour=2.0, capacity=1)]
        cloud = FakeCloud(self.home / "cloud", [*stock, Stock("slice", usd_per_hour=3.0, accelerator="v5p-16")])
        assert len(list(cloud.offers(Need()))) == 3
        return cloud

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "SKYPOOL_FAKE_CLOUD": str(self.home / "cloud"),
        }
        return Fork(program, *words, environment=environment).end()

    def forget(self) -> None:
        """Its ledger is lost, with all else that it had written down."""
        shutil.rmtree(self.home / "state", ignore_errors=True)


def died(home: Path, number: int, when: When, *, ledger: bool, lost_replies: bool, terms: tuple[str, ...]) -> Cell:
    """One cell of the matrix."""
    client = Client(home)
    with client.cloud() as cloud:
        if lost_replies:
            cloud.control.lose_reply("create", times=1)
        begun = len(cloud.control.calls())
        cloud.control.kill_client(begun + number, when)
        ended = client.run(LIFE, str(cloud.state), *terms)
        if len(cloud.control.calls()) - begun < number:  # a quicker life renews less often
            assert ended.returncode == 0, ended
            return Cell(f"{number} not made", when, cloud.count(), cloud.count("machine"), cloud.count())
        assert ended.returncode == -9, ended
        call = cloud.control.calls()[begun + number - 1]
        left = cloud.count()
        if not ledger:
            client.forget()
        cloud.clock.advance(LEASE_OVER)
        lasted = cloud.count("machine")
        gc = client.run(LATER, str(LEASE_OVER), "gc", "--yes", "--provider", "fake")
        assert gc.returncode == 0, gc
        cell = Cell(f"{number} {call.call}", when, left, lasted, cloud.count())
        if ledger:
            told = client.run(LATER, str(LEASE_OVER), "ps", "--json")
            assert '"train"' not in told.stdout, told
        return cell


def calls_of_a_life(home: Path, terms: tuple[str, ...]) -> int:
    client = Client(home)
    with client.cloud() as cloud:
        begun = len(cloud.control.calls())
        ended = client.run(LIFE, str(cloud.state), *terms)
        assert ended.returncode == 0, ended.stderr
        assert cloud.count() == 0
        return len(cloud.control.calls()) - begun


def matrix(
    home: Path,
    *,
    ledger: bool = True,
    lost_replies: bool = False,
    terms: tuple[str, ...] = (),
) -> list[Cell]:
    many = calls_of_a_life(home / "whole", terms)
    moments: tuple[When, When] = ("before", "after")
    cells = [(number, when) for number in range(1, many + 1) for when in moments]
    with ThreadPoolExecutor(3) as several:  # each of them waits more than it works
        return list(
            several.map(
                lambda cell: died(
                    home / f"{cell[0]}-{cell[1]}", *cell, ledger=ledger, lost_replies=lost_replies, terms=terms
                ),
                cells,
            )
        )


def show(title: str, cells: list[Cell]) -> None:
    print(f"\n{title}\n{'killed at call':>18}  {'':6}  left  machines after lease  after gc")
    for cell in cells:
        print(cell)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not [each for each in tmp_path.glob("*/cloud") if FakeCloud(each).count()]


@pytest.mark.slow
@pytest.mark.parametrize(("ledger", "lost_replies"), [(True, False), (False, False), (False, True)])
def test_the_whole_matrix(home: Path, ledger: bool, lost_replies: bool) -> None:
    cells = matrix(home, ledger=ledger, lost_replies=lost_replies)
    show(f"{'with' if ledger else 'without'} its ledger{', a reply is lost' if lost_replies else ''}", cells)
    assert len(cells) >= 16
    assert any(cell.left for cell in cells)  # it was killed while there was something
    assert [cell for cell in cells if cell.lasted or cell.collected] == []


@pytest.mark.slow
def test_a_client_of_a_slice_killed_at_any_call_leaves_nothing(home: Path) -> None:
    cells = matrix(home, ledger=False, lost_replies=True, terms=("slice",))
    show("a slice of two hosts", cells)
    assert [cell for cell in cells if cell.lasted or cell.collected] == []
