"""`skypool setup gcp`: a service account for one prefix of a bucket, and machines that have it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.buckets.bucket import Bucket
from skypool.cli.setup import setup as command
from skypool.data.mover import Folder
from skypool.data.save_asked import SaveFolder
from skypool.errors import CredentialsError, ProviderError, UsageError
from skypool.pool.saving import check_identity
from skypool.wire.save_orders import Order
from skypool_gcp import _bucket_identity
from skypool_gcp._bucket_identity import name_of
from tests.conftest import eventually
from tests.lab import gcs, stores
from tests.test_gcs import allowed_inside, refused_everywhere, weed

__all__ = ["weed"]  # a fixture
PLACE = Bucket("gs://models/runs")
EMAIL = f"{name_of(PLACE)}@{gcs.PROJECT}.iam.gserviceaccount.com"


@pytest.fixture
def account(
    weed: stores.Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[gcs.CloudStorage]:
    """A project of Google Cloud with buckets."""
    with gcs.cloud_storage(weed) as made:
        made.log_in(monkeypatch, tmp_path)
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", gcs.PROJECT)
        monkeypatch.setattr(_bucket_identity, "_PAUSE", 0.1)
        yield made


def setup(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "skypool", "setup", "gcp", "--bucket", PLACE.url, *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def test_nothing_is_made_without_a_yes_and_all_of_it_once_with_one(account: gcs.CloudStorage) -> None:
    asked = setup()
    assert (asked.returncode, "pass --yes" in asked.stderr) == (2, True)
    assert f"service account {EMAIL}, for gs://models/runs alone" in asked.stdout
    assert 'resource.name.startsWith("projects/_/buckets/models/objects/runs/")' in asked.stdout
    assert (account.accounts, account.policies) == ({}, {})
    theirs = {"role": "roles/storage.objectViewer", "members": ["user:a@example.com"]}
    account.policies["models"] = {"version": 1, "bindings": [theirs], "etag": "1"}
    for _ in range(2):
        done = setup("--yes")
        assert done.returncode == 0, done.stderr
    assert [*account.accounts] == [EMAIL]
    kept, ours = account.policies["models"]["bindings"]
    assert (kept, ours["role"], ours["members"]) == (theirs, "roles/storage.objectUser", [f"serviceAccount:{EMAIL}"])
    for words in (f"GCP(service_account={EMAIL!r})", "identity=True", f"service-accounts delete {EMAIL}", " --all"):
        assert words in done.stdout
    assert sky.GCP(service_account=EMAIL).gives_identity  # the setting takes it


def made_by_hand(account: gcs.CloudStorage, **more: Any) -> None:
    account.accounts[EMAIL] = {
        "email": EMAIL,
        "description": f"Machines that skypool rents save files to {PLACE}.",
        **more,
    }


@pytest.mark.parametrize("more", [{"description": "of somebody else"}, {"disabled": True}])
def test_an_account_of_somebody_else_gets_nothing(more: dict[str, Any], account: gcs.CloudStorage) -> None:
    made_by_hand(account, **more)
    with pytest.raises(UsageError, match=f"{EMAIL} exists and was not made for {PLACE}, or is disabled; remove it"):
        sky.GCP().bucket_identity(PLACE).make()
    assert not account.policies


def test_an_account_that_may_do_more_in_the_bucket_is_refused(account: gcs.CloudStorage) -> None:
    made_by_hand(account)
    more = {"role": "roles/storage.objectViewer", "members": [f"serviceAccount:{EMAIL}"]}
    account.policies["models"] = {"version": 1, "bindings": [more], "etag": "1"}
    with pytest.raises(
        UsageError, match=r"may do more in gs://models than skypool lets it: roles/storage.objectViewer;"
    ):
        sky.GCP().bucket_identity(PLACE).make()
    assert account.policies["models"]["bindings"] == [more]


def test_a_policy_that_others_change_and_an_account_that_is_not_known_yet_are_tried_again(
    account: gcs.CloudStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = _bucket_identity._ask, []

    def ask(api: str, method: str, path: str, what: str, **more: Any) -> dict[str, Any]:
        if method == "PUT":
            asked.append(path)
            if len(asked) == 1:
                account.policies["models"]["etag"] = "another"  # as if somebody else had written it
            if len(asked) == 2:
                hidden = account.accounts.pop(EMAIL)
                try:
                    return real(api, method, path, what, **more)
                finally:
                    account.accounts[EMAIL] = hidden
        return real(api, method, path, what, **more)

    monkeypatch.setattr(_bucket_identity, "_ask", ask)
    sky.GCP().bucket_identity(PLACE).make()
    assert len(asked) == 3
    assert len(account.policies["models"]["bindings"]) == 1


def test_a_policy_that_is_refused_for_another_reason_is_not_tried_again(account: gcs.CloudStorage) -> None:
    account.unwilling = "Role roles/storage.objectUser is not supported for this resource."
    began = time.monotonic()
    with pytest.raises(ProviderError, match="is not supported for this resource"):
        sky.GCP().bucket_identity(PLACE).make()
    assert time.monotonic() - began < 30


def test_a_description_is_short_enough_in_every_script(account: gcs.CloudStorage) -> None:
    place = Bucket(f"gs://models/{'ä' * 200}")
    for _ in range(2):
        sky.GCP().bucket_identity(place).make()
    [made] = account.accounts.values()
    assert 250 < len(made["description"].encode()) <= 256


def test_what_prevents_it_is_told(account: gcs.CloudStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="gs://nothing/x: there is no such bucket"):
        sky.GCP().bucket_identity(Bucket("gs://nothing/x"))
    account.uniform = False
    with pytest.raises(UsageError, match="gcloud storage buckets update gs://models --uniform-bucket-level-access"):
        sky.GCP().bucket_identity(PLACE)
    for name in ("GOOGLE_CLOUD_PROJECT", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name)
    with pytest.raises(CredentialsError, match="gcloud auth application-default login"):
        sky.GCP().bucket_identity(PLACE)


@pytest.mark.parametrize(
    ("provider", "bucket", "region", "why"),
    [
        ("aws", PLACE.url, "", "an identity of aws reaches s3:// alone"),
        ("gcp", "s3://models/runs", "", "an identity of gcp reaches gs:// alone"),
        ("vastai", PLACE.url, "", "machines of vastai get no identity"),
        ("gcp", "file:///mnt/x", "", "file:///mnt/x is a folder; it needs none"),
        ("gcp", PLACE.url, "us-east1", "--region is for buckets with s3://"),
    ],
)
def test_a_bucket_that_no_identity_of_the_provider_reaches_is_refused(
    provider: str, bucket: str, region: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAST_API_KEY", "key")
    with pytest.raises(UsageError, match=why):
        command(provider, bucket, region)


def test_names_of_accounts_differ_and_are_short_enough() -> None:
    places = ["gs://models/runs", "gs://models/run", "gs://a.b_c/x", f"gs://models/{'x' * 900}", "gs://abc/-"]
    names = [name_of(Bucket(each)) for each in places]
    assert len({*names}) == len(names)
    for each in names:
        sky.GCP(service_account=f"{each}@my-project.iam.gserviceaccount.com")
        assert 6 <= len(each) <= 30


# --- machines that have it -----------------------------------------------------------------------------------


def folder_of(account: gcs.CloudStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A folder that the mover of a machine of Google's saves with the identity of the machine."""
    gcs.log_out(monkeypatch, tmp_path)
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, account.endpoint.removeprefix("http://"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_text("1")
    order = Order(
        "out", str(tmp_path / "out"), f"{PLACE}/machine", account.endpoint, login="identity", serial="1", session="1",
        restores=False,
    )  # fmt: skip
    return Folder(order.to_json(), str(tmp_path / "journal"))


def test_a_machine_with_the_account_saves_and_reaches_nothing_else(
    account: gcs.CloudStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sky.GCP().bucket_identity(PLACE).make()
    account.machine = EMAIL
    folder = folder_of(account, tmp_path, monkeypatch)
    eventually(lambda: folder.phase == "saving", 30, "the folder")
    folder.end(30)
    folder.join()
    assert (folder.whole, folder.told()["trouble"]) == (True, "")
    assert account.owner.get_object(Bucket="models", Key="runs/machine/a")["Body"].read() == b"1"
    token = account.token(EMAIL)
    refused_everywhere(account, token)
    allowed_inside(account, token)


def test_a_machine_without_an_account_says_so(
    account: gcs.CloudStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(account, tmp_path, monkeypatch)
    words = "this machine has no identity for the store; name one in the settings of its provider"
    eventually(lambda: folder.told()["trouble"] == words, 30, "the trouble")
    folder.end(0)
    folder.join()


def test_machines_without_the_identity_that_a_bucket_needs_are_refused_before_they_are_rented() -> None:
    needing = [SaveFolder("out", Bucket("gs://models/runs/x", identity=True))]
    check_identity(needing, {"gcp"}, [sky.GCP(service_account=EMAIL)])
    with pytest.raises(UsageError, match=r"gcp is asked for machines without one; .* log in with keys= instead"):
        check_identity(needing, {"gcp"}, [sky.GCP()])
    with pytest.raises(UsageError, match="and those of aws reach s3:// alone; leave identity=True out"):
        check_identity(needing, {"aws"}, [sky.AWS(instance_profile="runs")])
