"""`skypool setup aws`: a role and an instance profile for one prefix, against moto's IAM, S3 and STS."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

import skypool as sky
from skypool.buckets import store
from skypool.buckets.bucket import Bucket
from skypool.data.mover import Folder
from skypool.data.save_asked import SaveFolder
from skypool.errors import UsageError
from skypool.model import Need
from skypool.pool.saving import check_identity
from skypool.rental.ledger import Ledger
from skypool.runs.save_places import Place, common
from skypool.testing import FakeCloud
from skypool.wire.save_orders import Order
from skypool_aws import _api, _bucket_identity
from skypool_aws._bucket_identity import name_of
from tests.conftest import eventually
from tests.lab import sts
from tests.lab.iam_evaluator import decide
from tests.lab.sts import log_in
from tests.test_bucket_policies import inside, outside
from tests.test_data import run
from tests.test_save import pool
from tests.test_temporary_credentials import USER

PLACE = Bucket("s3://models/runs/x")


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The endpoint of an AWS with an empty bucket."""
    with sts.short_lived(3600) as made:
        log_in(monkeypatch, USER)
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made.endpoint


def setup(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "skypool", "setup", "aws", "--bucket", PLACE.url, *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def test_nothing_is_made_without_a_yes_and_all_of_it_once_with_one(account: str) -> None:
    import boto3

    iam, name = boto3.client("iam"), name_of(PLACE)
    asked = setup()
    assert (asked.returncode, "pass --yes" in asked.stderr) == (2, True)
    assert f"role and instance profile {name} in account 123456789012, for s3://models/runs/x alone" in asked.stdout
    assert not iam.list_roles()["Roles"]
    for _ in range(2):
        done = setup("--yes")
        assert done.returncode == 0, done.stderr
    role = iam.get_role(RoleName=name)["Role"]
    assert role["MaxSessionDuration"] == 43200
    said = iam.get_role_policy(RoleName=name, PolicyName="skypool-bucket")["PolicyDocument"]
    said = json.loads(unquote(said)) if isinstance(said, str) else said
    assert all(decide(each, identity=[said]) == "allow" for each in inside("models", "runs/x"))
    assert not [each for each in outside("models", "runs/x") if decide(each, identity=[said]) == "allow"]
    profile = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]
    assert [each["RoleName"] for each in profile["Roles"]] == [name]
    for words in (f"AWS(instance_profile={name!r})", f"role={role['Arn']!r}", f"delete-role --role-name {name}"):
        assert words in done.stdout
    sky.AWS(instance_profile=name)  # the setting takes it
    _remove(name)


def _remove(name: str) -> None:
    """Remove it as the command says."""
    import boto3

    iam = boto3.client("iam")
    iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=name)
    iam.delete_instance_profile(InstanceProfileName=name)
    iam.delete_role_policy(RoleName=name, PolicyName="skypool-bucket")
    iam.delete_role(RoleName=name)


def test_a_role_of_somebody_else_is_not_changed(account: str) -> None:
    import boto3

    iam, name = boto3.client("iam"), name_of(PLACE)
    iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}")
    done = setup("--yes")
    assert done.returncode == 2
    assert "exists and was not made for s3://models/runs/x" in done.stderr
    assert not iam.list_role_policies(RoleName=name)["PolicyNames"]
    iam.delete_role(RoleName=name)


def test_a_role_that_somebody_has_prepared_is_set_right_or_refused(account: str) -> None:
    import boto3

    iam, name = boto3.client("iam"), name_of(PLACE)
    everyone = {"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "sts:AssumeRole"}
    iam.create_role(
        RoleName=name,
        AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [everyone]}),
        Tags=[{"Key": "skypool-bucket", "Value": PLACE.url}, {"Key": "team", "Value": "vision"}],
    )
    any_ = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    text = json.dumps({"Version": "2012-10-17", "Statement": [any_]})
    iam.put_role_policy(RoleName=name, PolicyName="more", PolicyDocument=text)
    attached = iam.create_policy(PolicyName="most", PolicyDocument=text)["Policy"]["Arn"]
    iam.attach_role_policy(RoleName=name, PolicyArn=attached)
    made = sky.AWS().bucket_identity(Bucket(f"{PLACE.url}/")).make  # a slash at the end means the same
    with pytest.raises(UsageError, match=rf"the role {name} has other policies than that of skypool: most, more;"):
        made()
    iam.detach_role_policy(RoleName=name, PolicyArn=attached)
    with pytest.raises(UsageError, match="other policies than that of skypool: more;"):
        made()
    iam.delete_role_policy(RoleName=name, PolicyName="more")
    made()
    role = iam.get_role(RoleName=name)["Role"]
    trusted = [each["Principal"] for each in role["AssumeRolePolicyDocument"]["Statement"]]
    assert trusted == [{"Service": "ec2.amazonaws.com"}, {"AWS": "arn:aws:iam::123456789012:root"}]
    assert role["MaxSessionDuration"] == 43200
    _remove(name)


def test_a_role_in_china_trusts_ec2_as_it_is_called_there_and_is_made_there(monkeypatch: pytest.MonkeyPatch) -> None:
    trusted = json.loads(_bucket_identity._trust("aws-cn", "123456789012"))["Statement"]
    assert trusted[0]["Principal"] == {"Service": "ec2.amazonaws.com.cn"}
    assert trusted[1]["Principal"] == {"AWS": "arn:aws-cn:iam::123456789012:root"}
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert _api.iam(None, "cn-north-1").meta.endpoint_url == "https://iam.cn-north-1.amazonaws.com.cn"
    assert _api.iam(None, "us-gov-west-1").meta.endpoint_url == "https://iam.us-gov.amazonaws.com"


def test_the_region_of_a_bucket_is_asked_with_the_profile_of_the_driver(
    account: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    key, secret = USER.values()
    config.write_text(f"[profile other]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    for name in USER:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    assert "in account 123456789012" in sky.AWS(profile="other").bucket_identity(PLACE).plan


@pytest.mark.parametrize(
    ("provider", "url", "why"),
    [
        ("local", "s3://models/runs/x", "machines of local get no identity from skypool"),
        ("aws", "s3://models", "an identity is for a prefix"),
        ("aws", "file:///runs", "file:///runs is a folder; it needs none"),
    ],
)
def test_what_gets_no_identity_is_refused(provider: str, url: str, why: str) -> None:
    argv = [sys.executable, "-m", "skypool", "setup", provider, "--bucket", url]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert why in done.stderr


def test_names_of_prefixes_that_look_alike_differ() -> None:
    urls = (
        "s3://models/a/b",
        "s3://models/a-b",
        "s3://models-a/b",
        f"s3://models/{'x' * 80}1",
        f"s3://models/{'x' * 80}2",
    )
    names = {name_of(Bucket(each)) for each in urls}
    assert len(names) == len(urls)
    assert all(len(each) <= 64 for each in names)


def test_a_machine_with_an_identity_asks_its_metadata_service(account: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore

    for name in USER:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", account)
    opened = store.opened(Bucket("s3://models/runs/x", region="us-east-1", identity=True))
    obstore.put(opened, "a", b"1")
    assert bytes(obstore.get(opened, "a").bytes()) == b"1"
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Exception, match=r"127\.0\.0\.1:9"):
        obstore.put(store.opened(Bucket("s3://models/runs/x", region="us-east-1", identity=True)), "a", b"1")


def test_the_mover_saves_with_the_identity_of_its_machine(
    account: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import boto3

    for name in USER:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", account)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a").write_text("1")
    order = Order(
        "out", str(tmp_path / "out"), PLACE.url, region="us-east-1", login="identity", serial="1", session="1"
    )
    folder = Folder(order.to_json(), str(tmp_path / "journal"))
    eventually(lambda: folder.phase == "saving", 30, "the folder")
    folder.end(30)
    folder.join()
    assert (folder.whole, folder.told()["trouble"]) == (True, "")
    owner = boto3.Session("owner", "its secret").client("s3")
    assert owner.get_object(Bucket="models", Key="runs/x/a")["Body"].read() == b"1"


def test_an_instance_profile_has_a_name_and_no_path() -> None:
    with pytest.raises(UsageError, match="instance_profile"):
        sky.AWS(instance_profile="arn:aws:iam::123456789012:instance-profile/runs")


def test_machines_without_the_identity_that_a_bucket_needs_are_refused_before_they_are_rented(
    tmp_path: Path,
) -> None:
    cloud = FakeCloud()
    with pytest.raises(UsageError, match=r"reached by an identity of the machine, and fake is asked for .* keys="):
        pool(tmp_path, provider=cloud, save={"out": Bucket(PLACE.url, region="us-east-1", identity=True)}).start()
    assert not cloud.instances()
    offers = FakeCloud().offers(Need())
    assert {each.usd_per_hour > 0 for each in offers} == {True}
    needing = [SaveFolder("out", Bucket(PLACE.url, identity=True))]
    check_identity(needing, {"aws"}, [sky.AWS(instance_profile="runs")])
    check_identity(needing, set(), [sky.AWS(), sky.Local()])
    with pytest.raises(UsageError, match="aws is asked for machines without one"):
        check_identity(needing, {"aws"}, [sky.AWS()])


def test_a_run_is_refused_before_machines_are_rented_that_cannot_log_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "train.py").touch()
    asked = {"out": Bucket(PLACE.url, region="us-east-1", identity=True)}
    with pytest.raises(UsageError, match=r"fake is asked for machines without one; .* with keys= or role= instead"):
        sky.run("train.py", FakeCloud(), budget=20, save=asked)
    words = ["--provider", "fake", "--budget", "20", "--bucket-identity", "--bucket-region", "us-east-1"]
    done = run(*words, "--save", f"out={PLACE}", "train.py")
    assert done.returncode == 125
    assert "fake is asked for machines without one; " in done.stderr, done.stderr
    assert "with --bucket-keys or --bucket-role instead" in done.stderr
    with sts.short_lived(600) as made:
        log_in(monkeypatch, USER)
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        with pytest.raises(UsageError, match=r"the lease of machines, 600 s, is longer than the 300 s .* files; name"):
            sky.run("train.py", FakeCloud(), budget=20, save={"out": PLACE})
    assert Ledger.here().pools() == []


def test_a_project_says_how_machines_log_in_to_its_bucket(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    for login, found in (
        ("identity = true", Bucket("s3://models/runs", identity=True)),
        (f'role = "{sts.ROLE}"', Bucket("s3://models/runs", role=sts.ROLE)),
        ('keys = ["ID", "SECRET"]', Bucket("s3://models/runs", keys=("ID", "SECRET"))),
    ):
        file.write_text(f'[tool.skypool]\nbucket = {{ url = "s3://models/runs", {login} }}\n')
        assert common(tmp_path, Place(), {}) == found
    assert Place(role=sts.ROLE).bucket("s3://models/x") == Bucket("s3://models/x", role=sts.ROLE)
    assert Place(role=sts.ROLE).bucket("file:///x") == Bucket("file:///x")
    for wrong in ('identity = "yes"', 'keys = "ID"', "role = 7"):
        file.write_text(f'[tool.skypool]\nbucket = {{ url = "s3://models/runs", {wrong} }}\n')
        with pytest.raises(UsageError, match="bucket must be a URL, or a table"):
            common(tmp_path, Place(), {})
