"""The end of rented machines: each is asked for once, and seen."""

from __future__ import annotations

import time

import pytest

from skypool.drivers import ssh_machine
from skypool.errors import CredentialsError, NoAnswer, StillRunning
from skypool.model import Instance


def machines(*ids: str) -> list[Instance]:
    return [Instance("acme", id, "train", node) for node, id in enumerate(ids)]


def test_each_is_asked_for_once_and_seen_gone() -> None:
    asked: list[str] = []
    left = iter([{"a", "b", "other"}, {"b", "other"}, {"other"}])
    ssh_machine.terminate_and_wait(machines("a", "b"), asked.append, lambda: next(left), 10.0)
    assert sorted(asked) == ["a", "b"]
    ssh_machine.terminate_and_wait([], asked.append, lambda: next(left), 10.0)
    assert next(left, None) is None


def test_what_is_there_after_all_patience_and_what_was_refused_are_told_apart() -> None:
    def destroy(id: str) -> None:
        if id == "b":
            raise CredentialsError("who are you?")

    with pytest.raises(
        StillRunning, match=r"a: the provider still lists the instance after 0.1 s\n  b: who are you\?"
    ) as still:
        ssh_machine.terminate_and_wait(machines("a", "b", "c"), destroy, lambda: {"a", "b"}, 0.1)
    assert [each.id for each in still.value.instances if isinstance(each, Instance)] == ["a", "b"]
    assert isinstance(still.value.__cause__, CredentialsError)


def test_where_nobody_says_what_is_there_nothing_is_proved() -> None:
    def there() -> set[str]:
        raise NoAnswer("nothing comes through")

    with pytest.raises(StillRunning, match="a: nothing comes through\n  b: nothing comes through") as still:
        ssh_machine.terminate_and_wait(machines("a", "b"), lambda id: None, there, 30.0)
    assert [each.id for each in still.value.instances if isinstance(each, Instance)] == ["a", "b"]
    assert isinstance(still.value.__cause__, NoAnswer)


def test_who_was_refused_is_not_waited_for_and_may_be_gone_all_the_same() -> None:
    def destroy(id: str) -> None:
        raise CredentialsError("who are you?")

    began = time.monotonic()
    with pytest.raises(StillRunning):
        ssh_machine.terminate_and_wait(machines("a"), destroy, lambda: {"a"}, 30.0)
    assert time.monotonic() - began < 10
    ssh_machine.terminate_and_wait(machines("a"), destroy, lambda: set(), 30.0)


def test_that_a_list_lacks_a_young_one_proves_its_end_only_where_that_was_taken() -> None:
    def destroy(id: str) -> None:
        if id == "a":
            raise CredentialsError("who are you?")

    with pytest.raises(StillRunning, match=r"a: who are you\?") as still:
        ssh_machine.terminate_and_wait(machines("a", "b", "c"), destroy, lambda: set(), 30.0, {"a", "b"})
    assert [each.id for each in still.value.instances if isinstance(each, Instance)] == ["a"]
