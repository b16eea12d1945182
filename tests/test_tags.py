"""What a rented thing says of itself, written and read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from skypool.drivers import tags
from skypool.model import Need, Order

WHEN = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def order(token: str = "abcd-2", until: datetime | None = WHEN) -> Order:
    return Order("train", token, (4, 5, 6), Need(), until=until)


def test_a_machine_is_read_as_it_was_ordered() -> None:
    pairs = tags.pairs(tags.tags(order()))
    made = tags.instance("acme", "m-1", tags.read(pairs), 1, "running", {}, region="fra")
    assert (made.pool, made.token, made.node, made.until) == ("train", "abcd-2", 5, WHEN)
    assert (made.region, made.detail) == ("fra", {})


def test_the_orders_of_one_run_have_a_session_in_common() -> None:
    assert {tags.session(order(f"abcd-{n}")) for n in range(3)} == {"abcd"}
    assert tags.session(order("token")) == "token"


def test_without_a_time_no_tag_tells_one() -> None:
    assert tags.UNTIL not in tags.tags(order(until=None))
    assert tags.stamp(None) == ""


def test_a_user_without_a_name_owns_machines_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 12_345_678)  # as `docker run --user 12345678`
    assert tags.owner().partition("@")[0] == "12345678"


def test_a_time_is_told_in_utc() -> None:
    there = WHEN.astimezone(timezone(timedelta(hours=9)))
    assert tags.stamp(there) == "2030-01-02T03:04:05Z"
    assert tags.when(tags.stamp(there)) == WHEN


def test_of_a_pool_only_what_this_very_host_rented_is_meant() -> None:
    user, _, host = tags.owner().partition("@")
    assert tags.owners("train") == f"{user}@{host}"
    assert tags.owners(None) == f"{user}@*"


@pytest.mark.parametrize(
    ("of", "pool", "ours"),
    [
        ("{user}@{host}", None, True),
        ("{user}@{host}", "train", True),
        ("{user}@{host}", "trai", False),
        ("{user}@elsewhere", None, True),
        ("{user}@elsewhere", "train", False),
        ("x{user}@{host}", None, False),
        ("", None, False),
    ],
)
def test_ours_is_what_this_user_rented_and_a_pools_from_this_very_host(of: str, pool: str | None, ours: bool) -> None:
    user, _, host = tags.owner().partition("@")
    said = {tags.POOL: "train", tags.OWNER: of.format(user=user, host=host)}
    assert tags.ours(said, pool) is ours
    assert not tags.ours(said | {tags.POOL: ""}, None), "it is of no pool"


def test_an_owner_who_is_cut_off_is_known_all_the_same() -> None:
    said = {tags.POOL: "train", tags.OWNER: tags.owner()[:3]}
    assert (tags.ours(said, "train", 3), tags.ours(said, "train")) == (True, False)


@pytest.mark.parametrize("nodes", [(), (0,), (0, 1, 2), (5, 7), (3, 2, 1), tuple(range(1000)), (0, 1, 5, 6, 9)])
def test_ranks_in_a_tag_are_read_as_they_were_written(nodes: tuple[int, ...]) -> None:
    assert tags.unpacked(tags.packed(nodes)) == list(nodes)
    assert len(tags.packed(nodes)) <= 256


@pytest.mark.parametrize("text", ["x", "1-", "-1", "1,2", " 1", "1  2"])
def test_what_somebody_else_wrote_in_a_tag_is_no_rank(text: str) -> None:
    assert tags.unpacked(text) == []
    assert tags.when(text) is None
