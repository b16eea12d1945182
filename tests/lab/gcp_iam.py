"""What callers of the lab's Google Cloud may do: a role, and the permissions that each method of an API asks for.

    gce.caller = tpu.caller = billing.caller = Role(permissions, acts_as=["runner@lab-project.iam.gserviceaccount.com"])

The table gcp_permissions.csv says which permissions a method needs, and where that was read. A method that is not in
the table fails the test: whoever adds a request adds its row.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab import tpu_wire
from tests.lab.cloud import Request
from tests.lab.discovery import Document
from tests.lab.gce_things import Failed, refused

TABLE = Path(__file__).parent / "gcp_permissions.csv"
COMPUTE = Document(Path(__file__).parent / "compute_v1.json")
ACT_AS = "iam.serviceAccounts.actAs"
PROJECT, NUMBER = "lab-project", "1234567890"
DEFAULT = f"{NUMBER}-compute@developer.gserviceaccount.com"
"""The service account that Cloud TPU gives to slices that name none."""


@dataclass
class Role:
    """A role that a caller has in the project, and the service accounts that the caller may act as besides.

    Attributes:
        permissions: those of the role.
        acts_as: the email addresses of the accounts on which the caller has roles/iam.serviceAccountUser.
        used: the permissions that calls have asked for so far.
    """

    permissions: Iterable[str]
    acts_as: Iterable[str] = ()
    used: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.permissions, self.acts_as = frozenset(self.permissions), frozenset(self.acts_as)

    def lacks(self, method: str, facts: Collection[str] = (), account: str = "") -> str:
        """The first permission that a call of a method needs and that is missing; "" for none.

        Google names one at a time, as a public log of the denials of instances.insert shows (read 2026-11-24).

        Args:
            method: The id of the method in Google's discovery document.
            facts: What the call does beyond the method's name: words of the table's column `when`.
            account: The service account that a machine gets.
        """
        for permission, when in needed(method):
            if when and when not in facts:
                continue
            self.used.add(permission)
            if permission == ACT_AS:
                if account not in self.acts_as:
                    return permission
            elif permission not in self.permissions:
                return permission
        return ""


def needed(method: str) -> list[tuple[str, str]]:
    """The permissions of a method, in the order in which they are looked at, each with its condition or ""."""
    found = _table().get(method)
    if found is None:
        raise KeyError(f"{TABLE.name} has no permissions of {method}")
    return found


@functools.cache
def _table() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for row in csv.DictReader(line for line in TABLE.read_text().splitlines() if not line.startswith("#")):
        rows = found.setdefault(row["method"], [])
        if row["permission"]:
            rows.append((row["permission"], row["when"]))
    return found


# --- Compute Engine ------------------------------------------------------------------------------------------


def permit(role: Role, request: Request) -> None:
    """Refuse a request to Compute Engine that a role does not permit.

    The words are those of https://github.com/GoogleCloudPlatform/java-docs-samples/pull/6552 (read 2026-11-24).
    """
    method = COMPUTE.method(request.method, request.path)
    if method is None:
        return
    told = request.body if isinstance(request.body, dict) else {}
    missing = role.lacks(method.id, _facts(told, request), _account(told))
    if missing == ACT_AS:
        raise refused(400, DENIED, _no_access(_account(told)))
    if missing:
        path = request.path.removeprefix("/compute/v1/")
        named = f"{path}/{told['name']}" if request.method == "POST" and "name" in told else path
        raise refused(403, "forbidden", f"Required '{missing}' permission for '{named}'")


def acting(role: Role | None, told: Mapping[str, Any]) -> Failed | None:
    """The failure of an insert that was accepted, but whose machine gets an account that the caller may not use.

    Compute Engine looks at that only in the operation. Its words are those of a public log (read 2026-11-24).
    """
    account = _account(told)
    if role is None or not account:
        return None
    missing = role.lacks("compute.instances.insert", {"acting"}, account)
    return Failed(400, DENIED, _no_access(account)) if missing == ACT_AS else None


DENIED = "SERVICE_ACCOUNT_ACCESS_DENIED"


def _no_access(account: str) -> str:
    return (
        f"The user does not have access to service account '{account}'.  User: 'you@example.com'.  Ask a project owner "
        "to grant you the iam.serviceAccountUser role on the service account"
    )


def _account(told: Mapping[str, Any]) -> str:
    """The account of the machines of an insert, or of a template; "" for none."""
    accounts = told.get("properties", told).get("serviceAccounts", [])
    return str(accounts[0]["email"]) if accounts else ""


def _facts(told: Mapping[str, Any], request: Request) -> set[str]:
    """What a request to Compute Engine does, in the words of the table."""
    disks = [each["initializeParams"] for each in told.get("disks", []) if "initializeParams" in each]
    images = [str(each.get("sourceImage", "")) for each in disks]
    cards = [each for nic in told.get("networkInterfaces", []) for each in nic.get("accessConfigs", [])]
    facts = {
        "own image": (request.by.get("project") == PROJECT and "/images/" in request.path)
        or any(f"projects/{PROJECT}/" in each for each in images),
        "new disk": bool(disks),
        "disk labels": any(each.get("labels") for each in disks),
        "public address": bool(cards),
        "metadata": bool(told.get("metadata", {}).get("items")),
        "tags": bool(told.get("tags", {}).get("items")),
        "labels": bool(told.get("labels")),
        "policies": bool(told.get("resourcePolicies")),
        "service account": bool(_account(told)),
    }  # fmt: skip
    return {fact for fact, is_so in facts.items() if is_so}


# --- Cloud TPU -----------------------------------------------------------------------------------------------


def permit_tpu(role: Role, method: str, request: Request) -> None:
    """Refuse a request to Cloud TPU that a role does not permit.

    The words are those of https://github.com/tensorflow/tpu/issues/296, the detail is that of another API of
    Google: https://github.com/GoogleCloudPlatform/t5x-on-vertex-ai/issues/5. What Cloud TPU says of an account
    that may not be used is not known: these words are Cloud Run's,
    https://github.com/dora-team/fourkeys/issues/459 (all read 2026-11-24).
    """
    told = request.body if isinstance(request.body, dict) else {}
    specs = told.get("tpu", {}).get("nodeSpec", [{}])
    node = specs[0].get("node", {}) if "tpu" in told else told
    account = node.get("serviceAccount", {}).get("email") or DEFAULT
    resource = request.path.removeprefix("/v2/")
    missing = role.lacks(method, {"service account"}, account)
    if missing == ACT_AS:
        resource = f"projects/-/serviceAccounts/{account}"
        text = f"Permission '{missing}' denied on service account {account} (or it may not exist)."
    else:
        text = f"Permission '{missing}' denied on '{resource}'"
    if missing:
        detail = tpu_wire.info("IAM_PERMISSION_DENIED", "tpu.googleapis.com", permission=missing, resource=resource)
        raise tpu_wire.refused("PERMISSION_DENIED", text, detail)
