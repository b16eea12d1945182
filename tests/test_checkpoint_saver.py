"""`CheckpointSaver` alone, in a folder in place of a bucket."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from obstore.store import LocalStore, ObjectStore

from skypool.data import objects
from skypool.data.checkpoint_saver import PLACE, RANK, CheckpointSaver, Step, place_of

# --- nodes of one attempt -----------------------------------------------------------------------------------


class Node:
    """The checkpoints of one node, and a program on it that saves files of its ranks."""

    def __init__(self, root: Path, bucket: Path, name: str) -> None:
        self.folder = root / name
        self.saver = CheckpointSaver(LocalStore(bucket, mkdir=True), str(self.folder), ThreadPoolExecutor(2), "origin")

    def write(self, attempt: int, step: int, rank: int, world: int = 2, keep: int = 3) -> None:
        said = {"attempt": attempt, "step": step, "rank": rank, "world": world, "keep": keep}
        there = self.folder / PLACE / place_of(said)
        there.mkdir(parents=True)
        (there / "model").write_text(f"{attempt} {step} {rank}")
        (there / RANK).write_text(json.dumps(said))

    def here(self) -> list[int]:
        return sorted(
            int(each.name.rpartition("-")[2]) for each in (self.folder / PLACE).glob("step-*") if [*each.iterdir()]
        )


@pytest.fixture
def node(tmp_path: Path) -> Callable[[str], Node]:
    """Makes nodes that have one bucket."""
    return lambda name: Node(tmp_path, tmp_path / "bucket", name)


def test_a_node_that_is_always_first_hears_of_what_the_other_made_whole(node: Callable[[str], Node]) -> None:
    first, second = node("first"), node("second")
    assert first.saver.attempt("a") == second.saver.attempt("a") == (1, None)
    for step in range(1, 9):
        first.write(1, step, 0)
        first.saver.turn()
        second.write(1, step, 1)
        second.saver.turn()
        first.saver.turn()
        assert first.saver.safe("a") == second.saver.safe("a") == (Step(1, step), False)
    assert first.here() == second.here() == [6, 7, 8]


def test_a_former_attempt_that_asks_late_or_again_keeps_its_number(node: Callable[[str], Node]) -> None:
    first, late = node("first"), node("late")
    assert first.saver.attempt("a") == (1, None)
    first.write(1, 5, 0, world=1)
    first.saver.turn()
    assert node("next").saver.attempt("b") == (2, Step(1, 5))
    assert node("first").saver.attempt("a") == (1, None)  # its mover was started again
    assert late.saver.attempt("a") == (1, None)
    assert node("third").saver.attempt("c") == (3, Step(1, 5))


def test_the_checkpoint_of_the_beginning_stays_when_the_mover_is_started_again(node: Callable[[str], Node]) -> None:
    first = node("first")
    first.saver.attempt("a")
    first.write(1, 1, 0, world=1)
    first.saver.turn()
    assert first.saver.attempt("b") == (2, Step(1, 1))
    again = node("first")  # nobody asks this mover
    for step in range(2, 8):
        again.write(2, step, 0, world=1)
        again.saver.turn()
    assert Path(again.saver.fetch(Step(1, 1), 0, 1), "model").read_text() == "1 1 0"


def test_an_answer_of_the_store_that_is_lost_is_no_fault_of_it(
    node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = node("first").saver
    create = objects.create

    def twice(store: ObjectStore, name: str, data: bytes) -> bool:
        create(store, name, data)
        return create(store, name, data)

    monkeypatch.setattr(objects, "create", twice)
    assert saver.attempt("a") == (1, None)


def test_a_mover_that_begins_again_tells_no_older_checkpoint_as_safe(
    node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = node("first")
    assert before.saver.attempt("a") == (1, None)
    for step in (1, 2, 3):
        before.write(1, step, 0, world=1)
        before.saver.turn()
    assert before.saver.safe("a") == (Step(1, 3), False)
    again = node("first").saver
    save = again._save_rank

    def only_the_first(step: Step, rank: int, path: Path) -> None:
        if step.step > 1:
            raise OSError("the store does not answer")
        save(step, rank, path)

    monkeypatch.setattr(again, "_save_rank", only_the_first)
    with pytest.raises(OSError, match="the store does not answer"):
        again.turn()
    assert again.safe("a") == (Step(1, 3), False)


def test_what_was_brought_for_former_attempts_is_removed_an_hour_later_and_not_before(
    node: Callable[[str], Node],
) -> None:
    made = node("made")
    made.saver.attempt("a")
    made.write(1, 1, 0, world=1)
    made.saver.turn()
    here = node("here")
    root = here.folder / PLACE
    assert here.saver.attempt("b") == (2, Step(1, 1))
    first = Path(here.saver.fetch(Step(1, 1), 0, 1))
    read = (first / "model").open()  # a program reads while others ask again
    assert Path(here.saver.fetch(Step(1, 1), 0, 1)) == first
    assert os.fstat(read.fileno()).st_nlink == 2  # its file and the one of the view
    read.close()
    made.saver.attempt("b")
    made.write(2, 2, 0, world=1)
    made.saver.turn()
    assert here.saver.attempt("c") == (3, Step(2, 2))
    second = Path(here.saver.fetch(Step(2, 2), 0, 1))
    assert first.exists()
    for each in root.rglob("*"):
        if each.is_dir():
            os.utime(each, (1, 1))
    assert Path(here.saver.fetch(Step(2, 2), 0, 1)) == second
    assert [*(root / "views").iterdir()] == [second]
    assert sorted(str(each.relative_to(root)) for each in root.rglob("model")) == [
        "step-2/attempt-000002/rank-0/model", str(second.relative_to(root) / "model")
    ]  # fmt: skip
    assert (second / "model").read_text() == "2 2 0"


def test_checkpoints_that_were_made_here_stay_when_others_are_removed(node: Callable[[str], Node]) -> None:
    made = node("made")
    made.saver.attempt("a")
    for step in (1, 2):
        made.write(1, step, 0, world=1)
        made.saver.turn()
    made.saver.attempt("b")
    for each in (made.folder / PLACE).rglob("*"):
        if each.is_dir():
            os.utime(each, (1, 1))
    made.saver.fetch(Step(1, 2), 0, 1)
    assert made.here() == [1, 2]
