"""Whole pools on the lab's Vast.ai: real machines, started with the command that the driver sent, reached by ssh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.drivers import blocklist
from skypool.errors import HostKeyMismatch, LaunchError, ProviderError
from skypool_vastai import _api
from tests.conftest import eventually
from tests.lab import examples, work
from tests.lab.launches import Client, Matrix
from tests.lab.taken import where_two_calls_ended
from tests.lab.vastai import KEY
from tests.lab.vastai import VastAI as World

ROOT = Path(__file__).parent.parent
CREATE, DESTROY = "PUT /api/v0/asks/{id}/", "DELETE /api/v0/instances/{id}/"


pytestmark = pytest.mark.usefixtures("own_state")
CLIENT = Client(
    "vastai",
    "sky.VastAI()",
    create=CREATE,
    terms={"vcpus": 2},
    first="from skypool_vastai import _api; _api.PACE.clear()",
)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_api, "PACE", {})


def pool(**terms: Any) -> tuple[sky.ComputePool, list[events.Event]]:
    """A pool of one-slot nodes and what will be heard of it."""
    seen: list[events.Event] = []
    made = sky.ComputePool(sky.VastAI(), console="off", slots=1, **terms)
    made.events.listen(seen.append)
    return made, seen


def cheapest(accelerator: str | None = None, **terms: Any) -> list[int]:
    """The machines that a pool would take, best first."""
    return [each.detail["machine"] for each in sky.plan(sky.VastAI(), accelerator=accelerator, **terms).offers]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "accelerator", ["RTX_4090", *(pytest.param(each, marks=pytest.mark.slow) for each in ("RTX_3090:4", "H100"))]
)
def test_the_accelerator_that_was_bought_is_there_and_only_its_price_is_paid(vastai: World, accelerator: str) -> None:
    (offer, *_) = sky.plan(sky.VastAI(), accelerator=accelerator).offers
    made, seen = pool(accelerator=accelerator, image=sky.Image(pip=["numpy"]))
    with made:
        info = work.about() >> made
        [contract] = vastai.rentals.values()
        assert contract.machine is not None
        told = contract.machine.run("cat /proc/[0-9]*/environ", check=False).stdout  # a process may end meanwhile
        assert contract.key in told
        assert KEY not in told, "the account's key is on a stranger's machine"
    assert vastai.left() == {}
    done = [each.step for each in seen if isinstance(each, events.BootstrapStep) and each.state in ("done", "skipped")]
    assert "nvidia" in done
    assert info["numpy"]
    assert "CUDA_VISIBLE_DEVICES" in info["env"]
    (line,) = made.receipt.lines
    assert line.ended
    assert line.usd_per_hour == pytest.approx(offer.usd_per_hour) == pytest.approx(contract.ask["dph_total"])


def portless(world: World) -> None:
    """No machine has a port of its own."""
    for ask in world.asks.values():
        ask["direct_port_count"] = 0


@pytest.mark.timeout(120)
def test_machines_without_a_port_of_their_own_serve_by_the_proxy_with_the_host_key_they_were_given(
    vastai: World,
) -> None:
    assert vastai.lab is not None
    vastai.key = vastai.lab.public_key
    portless(vastai)
    made, seen = pool(vcpus=1)
    with made:
        assert made.submit(abs, -3).result() == 3
        [contract] = [each for each in vastai.rentals.values() if each.living]
        assert contract.machine is not None
        assert (contract.ports, contract.body["runtype"]) == ({}, "ssh_proxy")
        assert "skypool-guard" in contract.machine.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
    assert not [each for each in seen if isinstance(each, events.Notice) and "first one seen" in each.text]
    assert vastai.left() == {}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nothing_is_sent_by_the_proxy_to_a_machine_that_never_shows_the_key_it_was_given(
    vastai: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skypool_vastai._KEYING", 4.0)
    portless(vastai)
    vastai.flaws = dict.fromkeys(cheapest(vcpus=1), "unscripted")
    made, _ = pool(vcpus=1)
    with pytest.raises(HostKeyMismatch, match="nothing was sent"):
        made.start()
    assert vastai.left() == {}


# --- machines that fail ------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_machines_that_fail_are_replaced_and_left_out_from_then_on(
    vastai: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sky.VastAI, "loading", 4.0)
    oci, other, offline, stuck, driver, good = cheapest("RTX_4090")[:6]
    vastai.flaws = {oci: "oci", other: "oci", offline: "offline", stuck: "stuck", driver: "driver"}
    made, _ = pool(accelerator="RTX_4090", nodes=2)
    with made:
        assert made.submit(abs, -1).result() == 1
        used = {each.ask["machine_id"] for each in vastai.rentals.values() if each.living}
        assert good in used
        assert not used & {*vastai.flaws}
    assert vastai.left() == {}
    said = blocklist.known("vastai")
    assert set(said) == {*vastai.flaws}
    for machine, words in ((oci, "OCI runtime"), (offline, "offline"), (stuck, "too slow"), (driver, "driver")):
        assert words in said[machine]
    assert not set(cheapest("RTX_4090", refresh=True)) & {*vastai.flaws}


@pytest.mark.timeout(120)
def test_an_image_that_nobody_has_ends_the_pool_and_says_so(vastai: World) -> None:
    image = sky.Image(base={"vastai": "no-such-image:1"})
    made, seen = pool(vcpus=1, image=image)
    with pytest.raises(ProviderError, match=r"manifest unknown.*check the image's name"):
        made.start()
    assert len(vastai.rentals) == 2, [each.detail for each in seen if isinstance(each, events.NodePhase)]
    assert vastai.left() == {}
    assert blocklist.known("vastai") == {}


@pytest.mark.needs("openssh")
def test_where_all_offers_are_stale_it_is_told_of_each(vastai_api: World) -> None:
    words = "error 404/3603: no_such_ask Instance type by id 1 is not available."
    vastai_api.fail(CREATE, 404, {"success": False, "error": "no_such_ask", "msg": words}, times=None)
    made, _ = pool(accelerator="H100")
    offers = len(cheapest("H100"))
    with pytest.raises(LaunchError, match=f"none of {offers} offers") as none_left:
        made.start()
    assert str(none_left.value).count("no_such_ask") >= 1
    assert vastai_api.left() == {}


# --- bids ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_node_that_is_outbid_is_replaced_and_its_call_runs_again_and_nothing_is_billed_on(
    vastai: World, tmp_path: Path
) -> None:
    made, seen = pool(nodes=2, vcpus=1, market="spot", liveness="6s")
    with made:
        first = min(id for id, each in vastai.rentals.items() if each.living)
        assert len(where_two_calls_ended(made, seen, tmp_path, lambda: vastai.outbid(first))) == 2
        assert not vastai.rentals[first].living, "a stopped instance is billed on"
        assert sum(each.living for each in vastai.rentals.values()) == 2
    assert any(isinstance(each, events.NodeInterruption) for each in seen)
    assert [each.attempt for each in seen if isinstance(each, events.CallRetried)] == [2]
    assert vastai.left() == {}


# --- nobody is left to end it -----------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("terms", "proxied"),
    [("{'lease': '15s'}", False), ("{'lease': '15s'}", True), ("{'lease': '20m', 'max_lifetime': '25s'}", False)],
)
@pytest.mark.slow
def test_a_machine_whose_client_was_killed_destroys_itself_with_a_key_of_its_own(
    vastai: World, terms: str, proxied: bool
) -> None:
    if proxied:
        portless(vastai)
    CLIENT.killed(terms)
    last = list(vastai.rentals)[-1]  # before it there may be some whose lease was over before they were reached
    eventually(lambda: not vastai.count()["instances"], 90)
    ends = [each for each in vastai.calls(DESTROY) if (each.by["id"], each.status) == (last, 200)]
    assert ends
    assert all(each.headers["authorization"].startswith("Bearer container-") for each in ends)
    CLIENT.gc()
    assert vastai.left() == {}


@pytest.mark.timeout(120)
def test_its_end_goes_without_curl_too(vastai: World) -> None:
    script = (ROOT / "providers/skypool_vastai/end.sh").read_text()
    driver = sky.VastAI()
    made, _ = pool(vcpus=1)
    with made:
        [contract] = [each for each in vastai.rentals.values() if each.living]
        assert contract.machine is not None
        told = {
            "base": vastai.url,
            "PATH": "/root/tools",
            "CONTAINER_ID": contract.id,
            "CONTAINER_API_KEY": contract.key,
        }
        text = "".join(f"export {name}={value}\n" for name, value in told.items()) + script
        contract.machine.run('mkdir /root/tools; ln -s "$(command -v python3)" /root/tools/')
        contract.machine.run(f"cat > /root/end <<'END'\n{text}\nEND\n(sleep 0.5; sh /root/end) > /dev/null 2>&1 &")
        eventually(lambda: driver.instances() == [], 20)
        assert vastai.calls(DESTROY)[-1].headers["authorization"] == f"Bearer {contract.key}"


# --- the examples ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("example", "terms"), examples.runs({"vcpus": 2}, [{"accelerator": "RTX_4090"}], installing=False)
)
def test_the_examples_run_unchanged(example: str, terms: dict[str, Any], vastai: World) -> None:
    examples.run(example, CLIENT.driver, terms)
    assert vastai.left() == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ledger", "lose_reply", "market"),
    [(True, False, "on-demand"), (False, True, "spot")],
    ids=["ledger", "no ledger, replies lost, bids"],
)
def test_a_client_killed_at_any_call_leaves_nothing(
    vastai: World, tmp_path: Path, ledger: bool, lose_reply: bool, market: str
) -> None:
    matrix = Matrix(CLIENT, vastai, tmp_path, {"market": market})
    matrix.leaves_nothing(ledger=ledger, lose_reply=lose_reply)
