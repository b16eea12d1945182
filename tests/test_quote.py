"""`sky.plan`, `skypool offers` and `skypool plan`: what would be rented, at what price; nothing is."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.model import Need, Offer
from tests.lab.prices import Dated, Kept, Snapshot, installed, snapshot

ROOT = Path(__file__).parents[1]
RUN = "import sys; from skypool.cli import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# --- sky.plan ------------------------------------------------------------------------------------------------


def test_a_plan_says_what_would_be_rented_and_what_that_costs() -> None:
    made = sky.plan(Snapshot("aws"), accelerator="H100:8", nodes=2)
    best = min(
        each.usd_per_hour
        for each in snapshot("aws")
        if each.market == "on-demand" and each.accelerator == sky.accelerators.parse("H100:8")
    )
    assert isinstance(made, sky.Plan)
    assert made.best is not None
    assert made.best.usd_per_hour == best
    assert made.usd_per_hour == 2 * best
    assert made.explain().startswith(f"2 nodes: {2 * best:.4f} USD/h\n1. snapshot p5.48xlarge")


def test_this_machine_costs_nothing() -> None:
    made = sky.plan(vcpus=1, memory="1GiB", max_usd_per_hour=0)
    assert made.usd_per_hour == 0
    assert [each.provider for each in made.offers] == ["local"]
    with pytest.raises(sky.NoOffers, match="it is in no region, and eu-west-1 is asked for"):
        sky.plan(region="eu-west-1")


def test_the_name_plan_is_the_function_whatever_was_imported() -> None:
    code = (
        "import skypool.offers.plan, skypool.offers.ranking, skypool.cli.offers, skypool; print(callable(skypool.plan))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "True\n"


def test_a_plan_can_be_made_where_an_event_loop_runs() -> None:
    async def inside() -> Any:
        return sky.plan()

    assert asyncio.run(inside()).best is not None


def test_where_nothing_serves_the_error_carries_the_plan_and_what_would_help() -> None:
    with pytest.raises(sky.NoOffers, match=r"without max_usd_per_hour=, \d+ would do; the best: snapshot") as caught:
        sky.plan(Snapshot("aws"), accelerator="H100:8", max_usd_per_hour=1)
    assert isinstance(caught.value.plan, sky.Plan)
    assert caught.value.plan.rejected


def test_where_no_offer_has_the_accelerator_the_providers_and_the_next_step_are_named() -> None:
    class Nothing(Snapshot):
        def offers(self, need: Need) -> Iterable[Offer]:
            return []

    said = "no provider sells what the pool needs:\n-  snapshot: no offer has MI300X; `skypool offers MI300X` asks all"
    with pytest.raises(sky.NoOffers, match=re.escape(said)):
        sky.plan(Nothing(), accelerator="MI300X")


def test_a_pool_plans_by_the_same_terms() -> None:
    terms: dict[str, Any] = {"accelerator": "A100-80GB:8", "market": "cheapest", "region": "us-*", "order_by": "per-gb"}
    made = sky.plan(Snapshot(), **terms)
    pool = sky.ComputePool(Snapshot(), **terms, console="off")
    with pytest.raises(sky.SkypoolError, match="a snapshot rents nothing"):
        pool.start()
    with pytest.raises(sky.NoOffers, match=r"is above max_usd_per_hour=0\.0100"):
        sky.ComputePool(Snapshot(), **terms, max_usd_per_hour=0.01, console="off").start()
    assert made.offers


# --- the commands --------------------------------------------------------------------------------------------


@pytest.fixture
def skypool(tmp_path: Path) -> Any:
    """Runs the program where the drivers of the snapshots are installed."""
    path = f"{installed(tmp_path / 'site')}:{ROOT}"
    clean = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS")}

    def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", RUN, *args]
        more = {**clean, "PYTHONPATH": path, **env}
        return subprocess.run(argv, cwd=tmp_path, env=more, capture_output=True, text=True)

    return run


def test_offers_are_a_table_with_the_best_first(skypool: Any) -> None:
    done = skypool("offers", "A100-80GB:8", "--provider", "snapshot", "--limit", "3")
    assert done.returncode == 0, done.stderr
    heading, *lines, more = done.stdout.splitlines()
    assert heading.split("  ")[0] == "provider"
    assert len(lines) == 3
    assert all("A100-80GB:8" in line for line in lines)
    prices = [float(line.split()[-1]) for line in lines]
    assert prices == sorted(prices)
    assert more.endswith("more offers; --limit 0 shows all")


def test_offers_are_filtered_and_sorted_as_asked(skypool: Any) -> None:
    told = json.loads(
        skypool(
            "offers", "H100", "L4", "--provider", "snapshot", "--spot", "--max-price", "3", "--memory", "16GiB",
            "--region", "us-*", "--region", "europe-*", "--vcpus", "4", "--order-by", "per-tflop", "--json",
            FORCE_COLOR="1",
        ).stdout
    )  # fmt: skip
    assert told["offers"]
    for each in told["offers"]:
        assert each["market"] == "spot"
        assert each["usd_per_hour"] <= 3
        assert each["memory_gib"] >= 16
        assert each["region"].startswith(("us-", "europe-"))
        assert each["accelerator"].startswith(("H100", "L4"))
    assert told["rejected"] + len(told["offers"]) == len(snapshot())


def test_a_plan_says_its_price_for_all_nodes_and_why_not_the_rest(skypool: Any) -> None:
    done = skypool("plan", "H100:8", "--provider", "snapshot", "--nodes", "2-4", "--max-price", "60")
    assert done.returncode == 0, done.stderr
    assert "2 nodes: " in done.stdout
    assert "4 nodes: " in done.stdout
    assert "have other accelerators, or none; snapshot " in done.stdout
    assert "are on the other market" in done.stdout


@pytest.mark.slow
def test_todays_providers_are_listed_at_no_price_and_those_not_asked_with_the_reason(skypool: Any) -> None:
    done = skypool("offers", SNAPSHOT_DOWN=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert any(line.split()[:2] == ["local", "this-machine"] and "0.0000" in line for line in done.stdout.splitlines())
    assert "not asked: ssh: SSH needs machines" in done.stdout
    assert "not asked: snapshot: no route to api.snapshot.example" in done.stdout
    told = json.loads(skypool("plan", "--json", "--provider", "local").stdout)
    assert told["usd_per_hour"] == 0


@pytest.mark.slow
def test_the_commands_use_what_was_kept_and_refresh_asks_again(skypool: Any, tmp_path: Path) -> None:
    log, down = tmp_path / "log", tmp_path / "down"

    def run(*args: str) -> str:
        done = skypool("plan", "L4", "--provider", "kept", *args, SNAPSHOT_LOG=str(log), SNAPSHOT_DOWN=str(down))
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    first = run()
    assert run() == first
    assert len(log.read_text().splitlines()) == 1
    assert run("--refresh") == first
    assert len(log.read_text().splitlines()) == 2
    down.touch()
    old = run("--refresh")
    assert old.startswith(first.rstrip())
    assert "kept cannot be reached (no route to api.snapshot.example); its cached offers are used, " in old


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["offers", "H1OO"], "did you mean H100"),
        (["offers", "--provider", "snapshto"], "did you mean snapshot"),
        (["offers", "--order-by", "cheap"], "did you mean 'cheapest'"),
        (["offers", "--spot", "--market", "on-demand"], "contradict each other; give only one of them"),
        (["offers", "--memory", "lots"], "memory must be a size such as"),
        (["plan", "--nodes", "some"], "--nodes must be a number such as 4, or a range such as 2-8"),
        (["plan", "--nodes", "4-2"], "did you mean (2, 4)"),
        (["plan", "--market", "spt"], "did you mean 'spot'"),
        (["plan", "--max-price", "-1"], "at least 0"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(skypool: Any, args: list[str], says: str) -> None:
    done = skypool(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_where_nothing_serves_the_command_says_what_would_help(skypool: Any) -> None:
    done = skypool("plan", "H100:8", "--provider", "snapshot", "--max-price", "1")
    assert done.returncode == 2
    assert "without max_usd_per_hour=" in done.stderr
    assert "Traceback" not in done.stderr


def test_offers_say_the_day_of_a_price_from_a_table(skypool: Any) -> None:
    done = skypool("offers", "H100", "--provider", "dated", "--limit", "5")
    assert done.returncode == 0, done.stderr
    heading, *lines = done.stdout.splitlines()
    assert heading.rstrip().endswith("price as of")
    assert all(re.search(r"  20\d\d-\d\d-\d\d \(table\)$", line) for line in lines[:5]), lines
    assert any(line.startswith("note: dated: ") and "come from a table of 20" in line for line in lines)
    plain = skypool("offers", "H100", "--provider", "snapshot", "--limit", "5").stdout
    assert "table" not in plain, "a price that the provider told has no such remark"


def test_a_plan_says_the_day_of_a_price_from_a_table_and_warns_that_the_provider_did_not_tell_it(skypool: Any) -> None:
    done = skypool("plan", "H100:8", "--provider", "dated", "--nodes", "2", "--market", "cheapest")
    assert done.returncode == 0, done.stderr
    heading, first, *rest = done.stdout.splitlines()
    assert re.match(r"2 nodes: [\d.]+ USD/h, price as of 20\d\d-\d\d-\d\d \(table\)$", heading)
    assert re.match(r"1\. dated .* USD/h, price as of 20\d\d-\d\d-\d\d \(table\)", first)
    warned = [line for line in rest if line.startswith("!  dated: ")]
    assert any("come from a table of 2026-0" in line and "a snapshot has no API to ask" in line for line in warned)
    assert any("spot prices from tables are older than 30 days" in line for line in warned)


def test_json_has_source_and_day_of_each_price(skypool: Any) -> None:
    told = json.loads(skypool("plan", "H100:8", "--provider", "dated", "--market", "cheapest", "--json").stdout)
    assert told["offers"]
    for each in told["offers"]:
        assert each["price_source"]["kind"] == "table"
        assert each["price_source"]["as_of"] < "2026-11-01"
        assert each["price_source"]["origin"]
        assert (each["on_demand_usd_per_hour"] is None) or each["market"] == "spot"
    assert any("come from a table of" in note for note in told["notes"])
    live = json.loads(skypool("offers", "H100:8", "--provider", "snapshot", "--json").stdout)
    assert {json.dumps(each["price_source"]) for each in live["offers"]} == {
        '{"kind": "provider", "as_of": null, "origin": ""}'
    }
    assert live["notes"] == []


def test_a_pool_warns_in_its_plan_of_prices_from_a_table() -> None:
    made = sky.plan(Dated("aws"), accelerator="H100:8")
    assert made.best is not None
    assert made.best.price_source.kind == "table"
    assert "(table)" in made.explain()


def test_help_names_the_commands(skypool: Any) -> None:
    assert {"offers", "plan"} <= set(skypool("--help").stdout.split())
    assert Kept.offers_keep > 0
