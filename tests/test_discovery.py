"""The check of requests and replies against Google's discovery documents, by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.discovery import Document

INSTANCES = "/compute/v1/projects/my-project/zones/us-central1-a/instances"
GOOD: dict[str, Any] = {
    "name": "one",
    "labels": {"team": "blue"},
    "disks": [{"boot": True, "initializeParams": {"diskSizeGb": "120"}}],
    "networkInterfaces": [{"nicType": "MRDMA"}],
    "scheduling": {"maxRunDuration": {"seconds": "3600", "nanos": 0}},
    "metadata": {"items": [{"key": "user-data", "value": ""}]},
}


@pytest.fixture
def document() -> Document:
    return Document(Path(__file__).parent / "lab" / "compute_v1.json")


def wrong(document: Document, body: Any, path: str = INSTANCES, **query: str) -> list[tuple[str, str]]:
    return [(each.place, each.kind) for each in document.wrong_request("POST", path, query, body)]


def test_a_right_request_has_nothing_wrong_and_its_values_are_counted(document: Document) -> None:
    assert wrong(document, GOOD, requestId="74b81f3e-5d4f-43a5-a0b5-9cbc4f4f6d3b", alt="json") == []
    assert (document.requests, document.fields) == (1, 9 + 2 + 2)
    assert document.methods == {"compute.instances.insert": 1}


@pytest.mark.parametrize(
    ("change", "place", "kind"),
    [
        ({"flavor": "large"}, "flavor", "unknown"),
        ({"networkInterfaces": [{"nic": "GVNIC"}]}, "networkInterfaces[0].nic", "unknown"),
        ({"networkInterfaces": [{"nicType": "gvnic"}]}, "networkInterfaces[0].nicType", "enum"),
        ({"networkInterfaces": {}}, "networkInterfaces", "type"),
        ({"disks": [{"initializeParams": {"diskSizeGb": 12.5}}]}, "disks[0].initializeParams.diskSizeGb", "type"),
        ({"disks": [{"initializeParams": {"diskSizeGb": "1e2"}}]}, "disks[0].initializeParams.diskSizeGb", "type"),
        ({"disks": [{"boot": "true"}]}, "disks[0].boot", "type"),
        ({"scheduling": {"maxRunDuration": {"nanos": 2**31}}}, "scheduling.maxRunDuration.nanos", "type"),
        ({"scheduling": {"maxRunDuration": "3600s"}}, "scheduling.maxRunDuration", "type"),
        ({"labels": {"team": 1}}, "labels.team", "type"),
        ({"labelFingerprint": "§"}, "labelFingerprint", "type"),
        ({"name": "One"}, "name", "pattern"),
        ({"name": "o" * 64}, "name", "pattern"),
        ({"metadata": {"items": [{"key": "user-data"}]}}, "metadata.items[0].value", "missing"),
    ],
)
def test_each_kind_of_mistake_is_found_at_its_place(
    document: Document, change: dict[str, Any], place: str, kind: str
) -> None:
    assert wrong(document, {**GOOD, **change}) == [(place, kind)]


def test_null_in_a_request_is_as_good_as_nothing(document: Document) -> None:
    assert wrong(document, {**GOOD, "disks": None, "scheduling": {"maxRunDuration": None}}) == []
    assert wrong(document, {**GOOD, "name": None}) == [("name", "missing")]
    reply = {"kind": "compute#instance", "id": None}
    assert document.wrong_reply("GET", f"{INSTANCES}/one", reply)[0].place == "id"


def test_integers_of_requests_may_be_numbers_or_strings(document: Document) -> None:
    disks = [{"initializeParams": {"diskSizeGb": 120}}]
    assert (
        wrong(document, {**GOOD, "disks": disks, "scheduling": {"maxRunDuration": {"seconds": 60, "nanos": "0"}}}) == []
    )


def test_a_required_field_a_body_and_parameters_are_asked_for(document: Document) -> None:
    assert wrong(document, {each: GOOD[each] for each in GOOD if each != "name"}) == [("name", "missing")]
    assert wrong(document, None) == [("", "missing")]
    assert wrong(document, GOOD, request_id="1") == [("request_id", "unknown")]
    assert wrong(document, GOOD, prettyPrint="maybe") == [("prettyPrint", "type")]
    assert wrong(document, GOOD, INSTANCES.replace("us-central1-a", "US")) == [("zone", "pattern")]
    assert document.wrong_request("DELETE", f"{INSTANCES}/one", {}, {"ignored": True}) == []


def test_a_path_that_is_no_method_of_the_document_is_not_judged(document: Document) -> None:
    assert document.method("PATCH", INSTANCES) is None
    assert document.method("GET", f"{INSTANCES}/one").id == "compute.instances.get"  # type: ignore[union-attr]  # it is there
    family = "/compute/v1/projects/p/global/images/family/ubuntu-2404-lts-amd64"
    assert document.method("GET", family).id == "compute.images.getFromFamily"  # type: ignore[union-attr]  # it is there


def test_a_reply_is_checked_by_the_schema_of_its_method(document: Document) -> None:
    reply = {"kind": "compute#instance", "id": "1", "status": "RUNNING"}
    assert document.wrong_reply("GET", f"{INSTANCES}/one", reply) == []
    (bad,) = document.wrong_reply("GET", f"{INSTANCES}/one", {**reply, "status": "ON"})
    assert str(bad).startswith("status: enum ('ON', not one of DEPROVISIONING, PENDING,")
    (bad,) = document.wrong_reply("GET", f"{INSTANCES}/one", {**reply, "id": 1})
    assert str(bad) == "id: type (1, not uint64 as a JSON string)"
    assert document.replies == 3


def test_enums_may_be_numbers_only_where_clients_ask_for_that(document: Document) -> None:
    numbered = Document(Path(__file__).parent / "lab" / "compute_v1.json", numbers=True)
    body = {"name": "one", "networkInterfaces": [{"nicType": 3}]}
    assert wrong(document, body) == [("networkInterfaces[0].nicType", "enum")]
    assert wrong(numbered, body) == []
