"""What several places answer, and what is raised where several of them fail."""

from __future__ import annotations

import pickle

import pytest

from skypool.drivers.contract import Answers
from skypool.drivers.regional import each_done, everywhere
from skypool.errors import AccessError, ErrorGroup, NoAnswer, ProviderError, SkypoolError

ANSWERS: dict[str, list[str] | Exception] = {
    "a": ["one", "two"],
    "b": ["three"],
    "closed": AccessError("the account may not use it"),
    "dark": NoAnswer("no answer from dark; try again"),
    "gone": ProviderError("gone has no such service"),
}


def told(place: str) -> list[str]:
    answer = ANSWERS[place]
    if isinstance(answer, Exception):
        raise answer
    return answer


def test_all_answers_come_together_and_a_closed_place_has_none() -> None:
    assert everywhere(told, ["a", "closed", "b"]) == ["one", "two", "three"]


def test_where_all_places_are_closed_that_is_the_error() -> None:
    with pytest.raises(AccessError):
        everywhere(told, ["closed", "closed"])


def test_one_place_that_fails_is_its_own_error() -> None:
    with pytest.raises(NoAnswer, match="no answer from dark"):
        everywhere(told, ["a", "dark", "closed"])


def test_several_places_that_fail_are_one_error_of_skypools_that_tells_of_each() -> None:
    with pytest.raises(SkypoolError) as failed:
        everywhere(told, ["a", "dark", "gone", "dark"])
    assert isinstance(failed.value, ErrorGroup)
    assert str(failed.value).splitlines() == [
        "3 regions or zones of the provider could not be queried; correct these causes and try again:",
        "  no answer from dark; try again",
        "  gone has no such service",
    ]
    silent, rest = failed.value.split(NoAnswer)
    assert isinstance(silent, ErrorGroup)
    assert isinstance(rest, ErrorGroup)
    assert str(pickle.loads(pickle.dumps(failed.value))) == str(failed.value)


def test_places_that_fail_in_the_same_words_are_one_error() -> None:
    with pytest.raises(NoAnswer):
        each_done(told, ["dark", "a", "dark"], "not all")


def test_what_is_not_complete_without_a_place_is_a_warning_where_it_is_named() -> None:
    with pytest.warns(RuntimeWarning, match="offers may be missing: no answer from dark"):
        found = everywhere(told, ["b", "dark"], "offers")
    assert found == ["three"]
    assert found.lacks == ("offers",)
    with pytest.raises(ErrorGroup):
        everywhere(told, ["gone", "dark"], "offers")


def test_answers_made_of_others_lack_what_those_lack() -> None:
    found = Answers(["one"], ["offers"])
    assert Answers(found).lacks == ("offers",)
    assert Answers(found, ["prices"]).lacks == ("offers", "prices")
    assert Answers(["one"]).lacks == everywhere(told, ["a"], "offers").lacks == ()


def test_what_is_to_be_done_everywhere_is_tried_everywhere() -> None:
    done: list[str] = []

    def do(place: str) -> None:
        done.append(place)
        told(place)

    with pytest.raises(ErrorGroup, match="not all could be told") as failed:
        each_done(do, ["dark", "gone", "a"], "not all could be told")
    assert sorted(done) == ["a", "dark", "gone"]
    assert len(failed.value.exceptions) == 2
