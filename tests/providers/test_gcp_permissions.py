"""What a user of Google Cloud may do who has the role that `skypool doctor --policy gcp` prints, and no more."""

from __future__ import annotations

import contextlib
import csv
import re
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

import skypool as sky
from skypool.accelerators import parse
from skypool.errors import AccessError
from skypool.model import Finding, Need, Offer, Order
from skypool.offers import price_cache
from skypool_gcp import GCP, list_prices
from skypool_gcp.compute import Compute
from skypool_gcp.tpu import Tpu, _api
from tests.lab import gcp_iam, work
from tests.lab.billing import Billing
from tests.lab.gce import GCE, PROJECT
from tests.lab.gcp_iam import ACT_AS, Role
from tests.lab.tpu import TPU
from tests.lab.tpu_grpc import grpc_of

pytestmark = pytest.mark.needs("openssh")

L4, TPU7X, V5P = (Need(accelerators=(parse(each),)) for each in ("L4", "tpu7x-16", "v5p-16"))
ROBOT = "robot@lab-project.iam.gserviceaccount.com"
DEFAULT = f"{gcp_iam.NUMBER}-compute@developer.gserviceaccount.com"
ROLE: list[str] = yaml.safe_load(GCP().policy())["includedPermissions"]
NEXT = "skypool doctor --policy gcp"


@dataclass
class Project:
    """A project with all three APIs at one caller's disposal. `read` has the lines of its findings."""

    gce: GCE
    tpu: TPU
    billing: Billing
    read: list[str] = field(default_factory=list[str])

    def caller(self, without: str = "", acts_as: tuple[str, ...] = (ROBOT, DEFAULT)) -> Role:
        """From now on, whoever asks has the role, but for one permission of it."""
        role = Role([each for each in ROLE if each != without], acts_as)
        self.gce.caller = self.tpu.caller = self.billing.caller = role
        return role

    def owner(self) -> None:
        """From now on, whoever asks may do everything."""
        self.gce.caller = self.tpu.caller = self.billing.caller = None


@pytest.fixture
def project(gce_api: GCE, tpu_api: TPU, own_state: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Compute Engine, Cloud TPU and the catalogue of prices, each at its own address."""
    _api._client.cache_clear()
    monkeypatch.setattr(Compute, "ending", 3.0)
    monkeypatch.setattr(Tpu, "ending", 3.0)
    monkeypatch.setattr(list_prices, "_AGAIN", 0.0)
    compute = "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"
    with Billing() as prices:
        prices.page = 5000
        monkeypatch.setenv(compute, gce_api.environment[compute])
        for name, value in prices.environment.items():
            monkeypatch.setenv(name, value)
        yield Project(gce_api, tpu_api, prices)


# --- what a pool does ----------------------------------------------------------------------------------------


def gcp(**settings: Any) -> GCP:
    return GCP(**{"ssh_from": "203.0.113.7", "queue": 0.0, **settings})


def sold(driver: GCP, need: Need) -> Offer:
    return min(driver.offers(need), key=lambda offer: (offer.usd_per_hour, offer.zone))


def live(project: Project, driver: GCP, need: Need, nodes: int = 1, pool: str = "train") -> None:
    """All that a pool asks for in its life: offers, machines, addresses, a later end, the end, and what is left."""
    offer = sold(driver, need)
    until = datetime.now(UTC) + timedelta(hours=1)
    token = f"{secrets.token_hex(8)}-1"
    order = Order(pool, token, tuple(range(nodes * offer.hosts)), need, until=until, lifetime=3600)
    launched = driver.launch(offer, order)
    for each in launched:
        driver.access(each)
    driver.renew(pool, until + timedelta(hours=1))
    assert {each.id for each in driver.instances(pool=pool)} == {each.id for each in launched}
    driver.terminate(launched)
    driver.tidy(driver.leftovers(pool=pool))
    assert (project.gce.left(), project.tpu.left()) == ({}, {})


def reserved(project: Project) -> None:
    """A machine of a reservation that is there."""
    project.gce.reservations["mine"] = {
        "name": "mine",
        "zone": f"x/zones/{sold(gcp(), L4).zone}",
        "specificReservation": {"count": "4", "instanceProperties": {"machineType": sold(gcp(), L4).instance_type}},
    }
    live(project, gcp(reservation="mine"), L4)


def collected(project: Project) -> None:
    """What `skypool gc` removes: a disk and rules that a killed client has left."""
    driver = gcp()
    offer = sold(driver, L4)
    order = Order("train", f"{secrets.token_hex(8)}-1", (0,), L4, until=datetime.now(UTC))
    driver.launch(offer, order)
    (disk,) = project.gce.disks.values()
    project.gce.vanish(next(iter(project.gce.rentals)))
    project.gce.wait(lambda: not project.gce.rentals)
    project.gce.disks["lost"] = {**disk, "name": "lost", "users": []}
    driver.tidy(driver.leftovers())
    assert project.gce.left() == {}


def good(project: Project, findings: Iterable[Finding]) -> None:
    """What `skypool doctor` and `skypool prove --level write` show. Everything must be good."""
    found = [*findings]
    project.read += [f"{each.what}: {each.text}; {each.advice}" for each in found]
    assert [each.what for each in found if not each.good] == []


OWN = f"projects/{PROJECT}/global/images/large-v1"
JOBS: dict[str, Callable[[Project], None]] = {
    "doctor": lambda project: good(project, gcp().check()),
    "on demand": lambda project: live(project, gcp(), L4),
    "spot": lambda project: live(project, gcp(), replace(L4, market="spot")),
    "private network": lambda project: live(project, gcp(), replace(L4, private_network=True), 2),
    "reservation": reserved,
    "own image": lambda project: live(project, gcp(image=OWN, network="lab-net", subnetwork="inner"), L4),
    "own family": lambda project: live(project, gcp(image=f"{PROJECT}/global/images/family/large"), L4),
    "account": lambda project: live(project, gcp(service_account=ROBOT), L4),
    "attached": lambda project: live(project, gcp(), Need(accelerators=(parse("T4"),))),
    "group": lambda project: live(project, gcp(service_account=ROBOT), TPU7X),
    "slice": lambda project: live(project, gcp(), V5P),
    "spot slice": lambda project: live(project, gcp(service_account=ROBOT), replace(V5P, market="spot")),
    "gc": collected,
    "prove": lambda project: good(project, gcp().prove_creates()),
}
"""All that a pool and the commands do, each with a project in which nothing is left before and after."""


@pytest.mark.slow
def test_a_user_with_the_role_can_do_all_that_a_pool_does_and_needs_every_permission_of_it(project: Project) -> None:
    """Permissions used are permissions listed, both ways."""
    role = project.caller()
    for job in JOBS.values():
        job(project)
    assert (role.used - {ACT_AS} - set(ROLE), set(ROLE) - role.used) == (set(), set())


def test_the_role_has_no_permission_that_google_does_not_know() -> None:
    """Google refuses a whole role for one permission that does not exist.

    Queued resources have none of their own: see roles/tpu.admin, which has all of Cloud TPU.
    https://docs.cloud.google.com/iam/docs/roles-permissions/tpu (read 2026-11-24)
    """
    known = {permission for method in gcp_iam._table() for permission, _ in gcp_iam.needed(method)}
    assert set(ROLE) <= known
    assert not [each for each in known if "queuedResources" in each]
    assert ACT_AS not in ROLE


# --- what a missing permission does --------------------------------------------------------------------------


def said(job: Callable[[Project], None], project: Project) -> list[str]:
    """Each line that a user reads of a job that goes wrong: of errors, findings and warnings."""
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        lines: list[str] = []
        try:
            job(project)
        except Exception as e:  # noqa: BLE001 - its words are what the test is about
            lines += _words(e)
    return [*lines, *project.read, *(line for each in issued for line in str(each.message).splitlines())]


def _words(error: BaseException) -> list[str]:
    parts = [line for each in getattr(error, "exceptions", ()) for line in _words(each)]
    return [*parts, *str(error).splitlines()]


@pytest.fixture(scope="module")
def first_user() -> dict[str, str]:
    """Of each permission: the first of the jobs that uses it. Filled by the first test that asks."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("permission", ROLE)
def test_a_permission_that_is_missing_is_named_in_one_line_with_the_next_step(
    project: Project, first_user: dict[str, str], permission: str
) -> None:
    if not first_user:
        for name, job in JOBS.items():
            role = project.caller()
            job(project)
            for each in role.used:
                first_user.setdefault(each, name)
        project.read.clear()
    job = JOBS[first_user[permission]]
    project.caller(without=permission)
    price_cache.path().unlink(missing_ok=True)
    lines = said(job, project)
    assert [line for line in lines if re.search(rf"{re.escape(permission)}\b", line) and NEXT in line], lines
    assert not [line for line in lines if "the lab itself failed" in line]


def test_a_denial_of_compute_engine_is_google_s_and_says_what_to_ask_for(project: Project) -> None:
    project.caller(without="compute.disks.create")
    driver = gcp()
    need = Need(vcpus=2)
    with pytest.raises(AccessError) as denied:
        driver.launch(sold(driver, need), Order("train", f"{secrets.token_hex(8)}-1", (0,), need))
    assert denied.value.code == "forbidden"
    assert re.search(r"Required 'compute.disks.create' permission for 'projects/lab-project/zones/", str(denied.value))
    assert NEXT in str(denied.value)


@pytest.mark.parametrize("transport", ["rest", "grpc"])
def test_a_denial_of_cloud_tpu_is_google_s_and_says_what_to_ask_for(
    project: Project, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    with contextlib.ExitStack() as stack:
        if transport == "grpc":
            address = stack.enter_context(grpc_of(project.tpu))
            monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", address)
        project.caller(without="tpu.nodes.create")
        driver = gcp(zones="us-east5-a")
        with pytest.raises(AccessError) as denied:
            driver.launch(sold(driver, V5P), Order("train", f"{secrets.token_hex(8)}-1", (0, 1), V5P))
    assert denied.value.code == "IAM_PERMISSION_DENIED"
    text = "Permission 'tpu.nodes.create' denied on 'projects/lab-project/locations/us-east5-a/queuedResources'"
    assert text in str(denied.value)
    assert NEXT in str(denied.value)


# --- service accounts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("need", "settings"),
    [
        pytest.param(L4, {"service_account": ROBOT}, id="machine"),
        pytest.param(TPU7X, {"service_account": ROBOT}, id="group", marks=pytest.mark.slow),
        pytest.param(V5P, {"service_account": ROBOT}, id="slice", marks=pytest.mark.slow),
        pytest.param(V5P, {}, id="slice with the project's own account"),
    ],
)
def test_a_machine_gets_only_an_account_on_which_the_user_has_a_role(
    project: Project, need: Need, settings: dict[str, Any]
) -> None:
    """The role of the project has no right to act as accounts: that is given on each account."""
    account = settings.get("service_account", DEFAULT)
    project.caller(acts_as=(account,))
    live(project, gcp(**settings), need)
    project.caller(acts_as=("another@lab-project.iam.gserviceaccount.com",))
    driver = gcp(**settings)
    offer = sold(driver, need)
    order = Order("train", f"{secrets.token_hex(8)}-1", tuple(range(offer.hosts)), need)
    with pytest.raises(AccessError) as denied:
        driver.launch(offer, order)
    assert account in str(denied.value)
    assert "add-iam-policy-binding ACCOUNT --member user:YOU --role roles/iam.serviceAccountUser" in str(denied.value)
    assert "\n" not in str(denied.value)
    driver.tidy(driver.leftovers())
    assert (project.gce.left(), project.tpu.left()) == ({}, {})


def test_a_machine_without_an_account_needs_no_role_on_one(project: Project) -> None:
    project.caller(acts_as=())
    live(project, gcp(), L4)


# --- with machines -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "terms", [{"private_network": True, "nodes": 2}, {"market": "spot", "max_lifetime": "1h"}], ids=["network", "spot"]
)
def test_a_pool_of_machines_lives_by_the_role(gce: GCE, own_state: None, terms: dict[str, Any]) -> None:
    gce.caller = Role(ROLE)
    with sky.ComputePool(gcp(), vcpus=2, lease="20s", console="off", **terms) as pool:
        told = work.about() @ pool
    assert len(told) == terms.get("nodes", 1)
    assert gce.left() == {}
    assert gce.caller.used <= set(ROLE)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:not all firewall rules for TPU hosts")  # no Compute Engine there
def test_a_pool_of_a_slice_lives_by_the_role(tpu: TPU, own_state: None) -> None:
    tpu.caller = Role(ROLE, [ROBOT])
    with sky.ComputePool(gcp(service_account=ROBOT), accelerator="v5p-16", lease="20s", console="off") as pool:
        told = work.about() @ pool
    assert [each["env"]["TPU_WORKER_ID"] for each in told] == ["0", "1"]
    assert tpu.left() == {}
    assert tpu.caller.used <= {*ROLE, ACT_AS}


# --- the table -----------------------------------------------------------------------------------------------


def test_each_method_of_the_table_is_google_s_and_has_a_source() -> None:
    folder = gcp_iam.TABLE.parent
    known = {
        method
        for name in ("compute_v1.json", "tpu_v2.json", "cloudbilling_v1.json")
        for method in re.findall(r'"id": "([\w.]+\.[\w.]+)"', (folder / name).read_text())
    }
    lines = [line for line in gcp_iam.TABLE.read_text().splitlines() if not line.startswith("#")]
    rows = [*csv.DictReader(lines)]
    assert {each["method"] for each in rows} <= known
    assert all(re.fullmatch(r"[a-z]+(\.[a-zA-Z]+){2}", each["permission"]) for each in rows)
    assert all(each["source"] for each in rows)
    assert len(rows) > 70
