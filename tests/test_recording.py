"""Recordings: every border writes, nothing private is written, and a killed process leaves a file that can be read."""

from __future__ import annotations

import base64
import getpass
import importlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import skypool as sky
from skypool.accelerators import parse
from skypool.drivers import recording, settings, tags
from skypool.drivers.refusals import Refusals
from skypool.drivers.rest import OAuth, Rest
from skypool.errors import ProviderError, UsageError
from skypool.model import Need, Order
from tests import planting
from tests.lab.billing import Billing
from tests.planting import Planting, Secret, decoded, found, planted, secrets, texts

CLOUDS = ("aws", "gce", "tpu", "runpod", "vastai", "verda")
NEED: Mapping[str, str] = {"aws": "T4", "gce": "L4", "tpu": "v5litepod-8", "verda": "V100:1"}
REFUSALS = Refusals("skypool_verda", "verda", "Verda")


@pytest.fixture
def cloud(request: pytest.FixtureRequest, own_state: None) -> Iterator[Any]:
    """The lab of one cloud, by its name, and a catalogue of prices where it needs one."""
    world = request.getfixturevalue(f"{request.param}_api")
    with pytest.MonkeyPatch.context() as patch, Billing() as prices:
        if request.param in ("gce", "tpu"):
            patch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBILLING", f"{prices.url}/")
        world.called = request.param
        yield world


def driver(cloud: str) -> Any:
    kinds = {"aws": "AWS", "gce": "GCP", "tpu": "GCP", "runpod": "RunPod", "vastai": "VastAI", "verda": "Verda"}
    return getattr(sky, kinds[cloud])()


def need(cloud: str) -> Need:
    return Need(accelerators=(parse(NEED.get(cloud, "A40")),))


# --- borders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cloud", CLOUDS, indirect=True)
def test_every_request_of_a_driver_is_recorded_with_its_reply(cloud: Any, tmp_path: Path) -> None:
    asked = driver(cloud.called)
    before = len(cloud.journal)
    with recording.to(tmp_path / "r", about={"provider": cloud.called}):
        offers = list(asked.offers(need(cloud.called)))
        list(asked.check())
    told = recording.read(tmp_path / "r")
    assert offers
    assert told.manifest["provider"] == cloud.called
    there = [each for each in told.exchanges if each.service != "cloudbilling" and each.operation != "a token"]
    assert len(there) == len(cloud.journal) - before
    assert [each.number for each in told.exchanges] == list(range(1, len(told.exchanges) + 1))
    for each in told.exchanges:
        assert each.provider
        assert each.operation
        assert each.time
        assert each.confidential or (each.method and each.url.startswith("/") and each.status >= 200)
    assert any(each.reply for each in told.exchanges)


def test_requests_to_cloud_tpu_over_grpc_are_recorded_as_json(
    tpu_api: Any, own_state: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.lab.tpu_grpc import grpc_of

    with grpc_of(tpu_api) as address, Billing() as prices:
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", address)
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBILLING", f"{prices.url}/")
        with recording.to(tmp_path / "r"):
            list(sky.GCP().offers(need("tpu")))
            tpu_api.fail(
                "GET queuedResources", 403, {"error": {"code": 403, "status": "PERMISSION_DENIED", "message": "no"}}
            )
            with pytest.raises(ProviderError):
                sky.GCP().instances()
    told = [each for each in recording.read(tmp_path / "r").exchanges if each.method == "gRPC"]
    zones = next(each for each in told if each.operation == "ListLocations")
    assert zones.url == "/google.cloud.location.Locations/ListLocations"
    assert json.loads(zones.request) == {"name": "projects/project-1", "pageSize": 500}
    assert json.loads(zones.reply)["locations"]
    assert any(each.status == 7 and each.error == "no" for each in told)


def test_clients_of_googles_own_addresses_ask_through_a_channel_that_records() -> None:
    import grpc
    from google.auth.credentials import AnonymousCredentials

    from skypool_gcp import list_prices
    from skypool_gcp.tpu import _api as tpu

    anonymous = AnonymousCredentials()  # type: ignore[no-untyped-call,unused-ignore]
    plain = type(grpc.insecure_channel("127.0.0.1:1"))
    for client, host in (
        (tpu._client, "tpu.googleapis.com:443"),
        (list_prices._client, "cloudbilling.googleapis.com:443"),
    ):
        transport: Any = client("", anonymous).transport
        assert (transport.kind, transport.host) == ("grpc", host)
        assert not isinstance(transport.grpc_channel, plain)


def test_a_message_of_grpc_with_a_part_of_unknown_type_is_recorded_as_text() -> None:
    from google.longrunning import operations_pb2
    from google.protobuf import any_pb2

    from skypool_gcp import _channel

    part = any_pb2.Any(type_url="type.googleapis.com/nobody.Knows", value=b"x")
    told = json.loads(_channel._text(operations_pb2.Operation(name="operations/1", metadata=part)))
    assert "operations/1" in told["text"]


def test_a_client_that_was_made_before_is_recorded_in_all_threads_while_a_recording_is_on(
    verda_api: Any, tmp_path: Path
) -> None:
    asked = sky.Verda()
    list(asked.offers(need("verda")))
    threads = [threading.Thread(target=lambda: list(asked.offers(need("verda")))) for _ in range(4)]
    with recording.to(tmp_path / "r"):
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    list(asked.offers(need("verda")))
    told = recording.read(tmp_path / "r").exchanges
    assert len([each for each in told if "/instance-availability" in each.url]) == 4
    assert recording.current() is None


def test_of_a_request_for_a_token_only_the_fact_is_recorded(verda_api: Any, tmp_path: Path) -> None:
    verda_api.expire(refreshable=False)
    with recording.to(tmp_path / "r"):
        tokens = OAuth(
            f"{verda_api.url}/v1", "/oauth2/token", REFUSALS, client_id="lab-id", client_secret="a-wrong-secret"
        )
        with pytest.raises(ProviderError):
            tokens()
    (told,) = recording.read(tmp_path / "r").exchanges
    assert told.confidential
    assert told.status == 401
    assert told.operation == "POST /v1/oauth2/token"
    assert not told.request
    assert not told.reply
    assert not told.request_headers
    assert not told.reply_headers


def test_requests_of_boto3_for_credentials_are_recorded_without_their_content(aws_api: Any, tmp_path: Path) -> None:
    from skypool_aws import _api

    client = _api.sts(None, "us-east-1")
    role = "arn:aws:iam::123456789012:role/a-role-of-ours"
    with recording.to(tmp_path / "r"):
        given = client.assume_role(RoleArn=role, RoleSessionName="a-session-of-ours")["Credentials"]
        client.get_caller_identity()
    token, identity = recording.read(tmp_path / "r").exchanges
    assert (token.operation, token.confidential, token.request, token.reply) == ("AssumeRole", True, "", "")
    assert "<GetCallerIdentityResult>" in str(identity.reply)
    written = (tmp_path / "r" / "exchanges.jsonl").read_text()
    for each in (
        given["SecretAccessKey"],
        given["SessionToken"],
        "a-role-of-ours",
        "a-session-of-ours",
        "123456789012",
    ):
        assert each not in written


def test_each_attempt_of_boto3_is_recorded_also_one_without_a_reply(
    aws_api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skypool_aws import _api

    aws_api.fail("DescribeRegions", "RequestLimitExceeded")
    with recording.to(tmp_path / "r"):
        _api.ec2(None, "us-east-1").describe_regions()
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        with pytest.raises(ProviderError):
            _api.ec2(None, "eu-west-1", attempts=1).describe_regions()
    told = recording.read(tmp_path / "r").exchanges
    assert [(each.status, each.region, each.error[:23]) for each in told] == [
        (503, "us-east-1", ""),
        (200, "us-east-1", ""),
        (-1, "eu-west-1", "EndpointConnectionError"),
    ]


def test_a_new_token_of_google_is_recorded_as_a_fact_and_not_found_in_later_texts(tmp_path: Path) -> None:
    from google.auth.credentials import Credentials

    from skypool_gcp import _api

    class Renewed(Credentials):  # type: ignore[misc,unused-ignore]
        """Credentials that get a new token when they are asked."""

        def refresh(self, request: object) -> None:
            self.token = "an-opaque-token-of-nobody"

    found = _api.followed(Renewed())  # type: ignore[no-untyped-call,unused-ignore]
    with recording.to(tmp_path / "r") as recorder:
        for _ in range(2):
            _api.call("a test", lambda: found.refresh(None))
        recorder.add(partial(exchange, reply="it is an-opaque-token-of-nobody"))
    told = recording.read(tmp_path / "r").exchanges
    assert [each.operation for each in told] == ["a token", "GET /x"]
    assert "an-opaque" not in str(told[1].reply)


def test_a_request_that_gets_no_reply_is_recorded_with_the_reason(verda_api: Any, tmp_path: Path) -> None:
    api = Rest("http://127.0.0.1:1", REFUSALS, dict)
    with recording.to(tmp_path / "r"), pytest.raises(ProviderError):
        api.once("GET", "/instances")
    (told,) = recording.read(tmp_path / "r").exchanges
    assert told.status == -1
    assert "refused" in told.error


# --- files ---------------------------------------------------------------------------------------------------


def exchange(**fields: Any) -> recording.Exchange:
    return recording.Exchange(provider="acme", operation="GET /x", method="GET", url="/x", **{"status": 200, **fields})


def test_both_files_can_be_read_by_their_owner_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with recording.to(tmp_path / "r") as recorder:
            recorder.add(partial(exchange, reply="hello"))
    finally:
        os.umask(old)
    for file in (tmp_path / "r").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o700


def test_a_folder_with_a_recording_is_not_overwritten_and_two_recordings_at_once_are_refused(tmp_path: Path) -> None:
    with recording.to(tmp_path / "r") as recorder:
        recorder.add(partial(exchange, reply="hello"))
        with pytest.raises(UsageError, match="only one"), recording.to(tmp_path / "s"):
            pass
    with pytest.raises(UsageError, match="already has a recording"), recording.to(tmp_path / "r"):
        pass
    assert not (tmp_path / "s").exists()
    assert recording.current() is None
    assert recording.read(tmp_path / "r").exchanges[0].reply == "hello"


def test_bytes_that_are_no_text_come_back_as_they_were(tmp_path: Path) -> None:
    with recording.to(tmp_path / "r") as recorder:
        recorder.add(partial(exchange, reply=b"\xff\x00\xfe", request=b"caf\xc3\xa9"))
        recorder.add(partial(exchange, reply=b"\xff\x00 ask alice@example.org"))
    first, second = recording.read(tmp_path / "r").exchanges
    assert first.reply == b"\xff\x00\xfe"
    assert first.request == "café"
    assert "alice" not in str(second.reply)


def test_a_process_that_is_killed_leaves_a_recording_that_can_be_read(tmp_path: Path) -> None:
    program = (
        "import itertools, sys\n"
        "from skypool.drivers import recording\n"
        "with recording.to(sys.argv[1]) as recorder:\n"
        "    for number in itertools.count():\n"
        "        told = recording.Exchange(provider='acme', url=f'/{number}', status=200, reply='x' * 100_000)\n"
        "        recorder.add(lambda: told)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "r")]) as process:
        file, deadline = tmp_path / "r" / "exchanges.jsonl", time.monotonic() + 60
        while not file.exists() or file.stat().st_size < 2_000_000:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    told = recording.read(tmp_path / "r").exchanges
    assert [each.url for each in told] == [f"/{number}" for number in range(len(told))]
    with file.open("a") as more:  # as if it had been killed in the middle of a line
        more.write('{"provider": "acme", "repl')
    assert len(recording.read(tmp_path / "r").exchanges) == len(told)


def test_a_recording_that_cannot_be_written_does_not_disturb_the_driver_and_fails_at_its_end(
    verda_api: Any, tmp_path: Path
) -> None:
    asked = sky.Verda()
    with pytest.raises(OSError, match="No space left") as caught, recording.to(tmp_path / "r") as recorder:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, recorder._file)  # type: ignore[arg-type]
        os.close(full)
        assert list(asked.offers(need("verda")))
    assert "lacks the requests" in caught.value.__notes__[0]
    assert recording.current() is None


def test_a_folder_without_a_recording_or_with_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no recording"):
        recording.read(tmp_path)
    with recording.to(tmp_path / "r"):
        pass
    manifest = tmp_path / "r" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(UsageError, match="has format 99"):
        recording.read(tmp_path / "r")


# --- what is private -----------------------------------------------------------------------------------------


def kinds(cloud: str) -> Mapping[str, planting.Make]:
    own = {"aws": planting.AWS, "gce": planting.GOOGLE, "tpu": planting.GOOGLE, "runpod": planting.RUNPOD}
    return {**planting.EVERYWHERE, **own.get(cloud, {})}


def ask_with_secrets(cloud: str, told: list[Secret]) -> None:
    """Send requests that have the secrets, through the driver's own clients. The lab refuses most of them."""
    if cloud == "aws":
        _ask_aws(told)
    elif cloud in ("gce", "tpu"):
        _ask_google(told)
    else:
        api = _rest(cloud)
        sends: list[Callable[[], object]] = [
            lambda: api.once("POST", "/v2/pods", json=planted(told)),
            lambda: api.once("PUT", "/v2/pods", json=[each.text for each in told]),
            lambda: api.once("GET", "/v2/pods", params={each.field: each.value for each in told if each.field}),
        ]
        for each in told[::50]:
            headers = {"X-Key": each.value}
            sends.append(partial(api.once, "GET", "/v2/pods", params={"q": each.text}, headers=headers))
        for send in sends:
            with pytest.raises(ProviderError):
                send()


def _rest(cloud: str) -> Any:
    module = importlib.import_module(f"skypool_{cloud}._api")
    if cloud == "runpod":
        return module.api(module.key(None), module.base())._rest
    return module.account(None) if cloud == "vastai" else module.account(None, None)


def _ask_aws(told: list[Secret]) -> None:
    from skypool_aws import _api

    client = _api.ec2(None, "us-east-1")
    for text in (each.text for each in told[::60] if each.text):
        with pytest.raises(ProviderError):
            client.run_instances(ImageId="ami-1", MinCount=1, MaxCount=1, UserData=f"#!/bin/sh\n{text}\n")
    client.describe_instances(Filters=[{"Name": "tag:note", "Values": list(texts(told))[:1000]}])
    with pytest.raises(ProviderError):
        client.import_key_pair(KeyName="k", PublicKeyMaterial="\n".join(each.text for each in told).encode())


def _ask_google(told: list[Secret]) -> None:
    from google.cloud import compute_v1, tpu_v2

    from skypool_gcp import _api
    from skypool_gcp.compute import _client
    from skypool_gcp.tpu import _api as tpu

    items = [compute_v1.Items(key=f"item-{number}", value=text) for number, text in enumerate(texts(told))]
    items += [compute_v1.Items(key=each.field, value=each.value) for each in told if each.field]
    kind = "zones/us-central1-a/machineTypes/none-8"
    machine = compute_v1.Instance(name="x", machine_type=kind, metadata=compute_v1.Metadata(items=items))
    with pytest.raises(ProviderError):
        client = _client._client_of(compute_v1.InstancesClient)
        _api.call(
            "a test", lambda: client.insert(project="lab-project", zone="us-central1-a", instance_resource=machine)
        )
    node = tpu_v2.Node(name="projects/lab-project/locations/us-central1-a/nodes/x", metadata={
        str(number): text for number, text in enumerate(texts(told))})  # fmt: skip
    with pytest.raises(ProviderError):
        _api.call("a test", lambda: tpu._current_client().update_node(request={"node": node}))


def recorded(tmp_path: Path, *texts: str, scrub: tuple[str, ...] = ()) -> list[str]:
    """The texts as they are recorded, as the replies of one recording."""
    with recording.to(tmp_path / "r", scrub=scrub) as recorder:
        for text in texts:
            recorder.add(partial(exchange, reply=text))
    return [str(each.reply) for each in recording.read(tmp_path / "r").exchanges]


def test_the_same_value_becomes_the_same_placeholder_and_replies_can_still_be_read(tmp_path: Path) -> None:
    user = {"id": 4711, "email": "alice@example.org", "balance": 12.5, "ssh_key": KEY}
    first, second, third = recorded(
        tmp_path,
        json.dumps({"user": user, "ip": "8.8.4.4"}),
        json.dumps({"owner": "alice@example.org", "note": "for alice@example.org at 8.8.4.4 and 1.1.1.1"}),
        "<user><email>alice@example.org</email><password>a &amp; b</password></user>",
    )
    told = json.loads(first)
    email = told["user"]["email"]
    assert re.fullmatch(r"user-\d@example\.com", email)
    assert isinstance(told["user"]["id"], int)
    assert told["user"]["balance"] == 1001.0
    kind, blob, owner = told["user"]["ssh_key"].split()
    assert (kind, len(blob), blob == KEY.split()[1]) == ("ssh-ed25519", len(KEY.split()[1]), False)
    assert re.fullmatch(r"user-\d@host-\d", owner)
    assert told["ip"] == "198.18.0.1"
    assert json.loads(second) == {"owner": email, "note": f"for {email} at 198.18.0.1 and 198.18.0.2"}
    assert third.startswith(f"<user><email>{email}</email><password>x")


def test_what_is_public_stays_as_it_is(tmp_path: Path) -> None:
    texts = [
        json.dumps(
            {"nextToken": "abcdefghijklmnop1234567890", "ip": "10.0.0.7", "loopback": "::1", "time": "12:30:45"}
        ),
        json.dumps({"image": "docker.io/a/b@sha256:" + "0" * 64, "driver": "570.172.08", "price": 0.25, "free": 0}),
        json.dumps({"owner": "root", "mac": "0a:1b:2c:3d:4e:5f", "id": "i-0123456789abcdef0"}),
        json.dumps({"clientBalance": 0}),
        "<a><instanceType>p5.48xlarge</instanceType><n>123456789012345</n></a>",
        "plain text, nothing else",
    ]
    assert recorded(tmp_path, *texts) == texts


def test_values_that_the_caller_names_are_found_in_all_encodings(tmp_path: Path) -> None:
    value = "our/secret+name=="
    coded = base64.b64encode(f"--{value}--".encode()).decode()
    told = recorded(
        tmp_path,
        f"a {value} b {coded}",
        json.dumps({"x": value, "y": quote(value, safe=""), "z": [json.dumps({"deep": value})]}),
        f"pool=x owner=root@* and {getpass.getuser()}@* and {tags.owner()}",
        scrub=(value,),
    )
    for each in told:
        assert "secret" not in each
        assert coded[4:20] not in each
    assert f"{getpass.getuser()}@" not in told[2]


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ8vbK0uYQ2yq3k1wq6Q8p0w3J3vZxkq0m0m5b1h2g3f alice@laptop"


@pytest.mark.needs("openssh")
@pytest.mark.filterwarnings("ignore:not all firewall rules for TPU hosts could be created:RuntimeWarning")
@pytest.mark.parametrize("cloud", CLOUDS, indirect=True)
def test_a_recorded_launch_has_no_key_of_the_machine_and_not_the_name_of_its_owner(
    cloud: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "public_network", lambda: "8.8.4.4/32")
    asked = driver(cloud.called)
    wanted = replace(need(cloud.called), market="on-demand")
    placed = Order("train", "0123456789abcdef-1", (0,), wanted, until=datetime(2030, 1, 2, tzinfo=UTC))
    offer = min(asked.offers(wanted), key=lambda each: each.usd_per_hour)
    with recording.to(tmp_path / "r"):
        placed = replace(placed, nodes=tuple(range(offer.hosts)))
        launched = asked.launch(offer, placed)
    assert launched
    private, public = placed.keys.host(str(launched[0].detail.get("key") or placed.token))
    hidden = [Secret("private key", line) for line in private.splitlines()[1:-1] if len(line) > 20]
    hidden += [Secret("public key", each.split()[1]) for each in (public, placed.keys.public)]
    hidden += [Secret("owner", tags.owner())]
    unsent = [Secret("address", "8.8.4.4"), Secret("label", tags.owner().replace("@", "_40"))]  # not everywhere
    told = [each.body for each in cloud.journal if each.body]
    sent = {piece for body in told for piece in decoded(body.decode() if isinstance(body, bytes) else json.dumps(body))}
    assert [each for each in hidden if not any(each.value in piece for piece in sent)] == []
    assert found(tmp_path / "r", [*hidden, *unsent]) == []


@pytest.mark.parametrize("encode", range(len(planting.ENCODINGS)))
def test_the_search_would_find_each_secret_in_each_encoding(encode: int, tmp_path: Path) -> None:
    told = secrets({**planting.EVERYWHERE, **planting.AWS, **planting.GOOGLE, **planting.RUNPOD}, seed=7)
    texts = [planting.ENCODINGS[encode](each.text) for each in told if each.text]
    fields = {str(number): {each.field: each.told} for number, each in enumerate(told) if each.field}
    reply = planting.escaped({"texts": texts, "fields": fields})
    (tmp_path / "exchanges.jsonl").write_text(json.dumps({"reply": reply}) + "\n")
    assert found(tmp_path, told) == told


@pytest.mark.slow
@pytest.mark.parametrize("cloud", CLOUDS, indirect=True)
def test_of_a_hundred_secrets_of_each_kind_in_requests_and_replies_none_is_recorded(
    cloud: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = secrets(kinds(cloud.called), seed=7)
    with Planting(cloud, told) as between:
        for name, value in between.environment.items():
            monkeypatch.setenv(name, value)
        asked = driver(cloud.called)
        with recording.to(tmp_path / "r"):
            between.times = 2 if cloud.called != "verda" else 3  # the first reply of Verda is a token
            assert list(asked.offers(need(cloud.called)))
            between.times = 1
            list(asked.check())
            ask_with_secrets(cloud.called, told)
        assert not between.times, "not all secrets were sent"
    assert [f"{each.kind}: {each.value}" for each in found(tmp_path / "r", told)] == []
    exchanges = recording.read(tmp_path / "r").exchanges
    assert any("planted" in str(each.reply) for each in exchanges), "what stood beside the secrets is gone"
