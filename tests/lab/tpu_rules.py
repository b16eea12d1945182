"""What the lab's Cloud TPU refuses beyond the schema: ids, slices and runtime versions, and limits."""

from __future__ import annotations

import re
from typing import Any

from tests.lab import tpu_wares as wares
from tests.lab.gcp_iam import PROJECT
from tests.lab.tpu_wire import refused

_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


def check_queued(zone: str, id: str, told: dict[str, Any]) -> None:
    specs = told.get("tpu", {}).get("nodeSpec", [])
    if not _ID.fullmatch(id) or len(specs) != 1 or specs[0].get("parent") != f"projects/{PROJECT}/locations/{zone}":
        raise refused("INVALID_ARGUMENT", f"Invalid queued resource {id!r}: one node in its own location is needed")
    if "guaranteed" in told and "spot" in told:
        raise refused("INVALID_ARGUMENT", "A queued resource is guaranteed or spot")
    check_node(zone, specs[0].get("nodeId", ""), specs[0].get("node", {}))


def check_node(zone: str, id: str, node: dict[str, Any]) -> None:
    """Refuse what is no node. Limits are those of the reference of `Node` in the discovery document."""
    if not _ID.fullmatch(id):
        raise refused("INVALID_ARGUMENT", "Invalid node id")
    if "acceleratorType" in node and "acceleratorConfig" in node:
        raise refused("INVALID_ARGUMENT", "A node has an accelerator type or an accelerator config")
    kind = next((each for each in wares.types(zone) if each.type == node.get("acceleratorType")), None)
    if kind is None:
        raise refused(
            "INVALID_ARGUMENT", f"The accelerator {node.get('acceleratorType')} was not found in zone {zone}."
        )
    if node.get("runtimeVersion") != wares.RUNTIMES[kind.generation]:
        raise refused("INVALID_ARGUMENT", f"Runtime version {node.get('runtimeVersion')} is not for {kind.type}.")
    if "networkConfig" in node and "networkConfigs" in node:
        raise refused("INVALID_ARGUMENT", "A node has a network config or several network configs")
    if len(node.get("description", "")) > 512:
        raise refused("INVALID_ARGUMENT", "A description has at most 512 characters")
    labels = node.get("labels", {})
    if len(labels) > 64 or any(not _LABEL.fullmatch(k) or not _VALUE.fullmatch(v) for k, v in labels.items()):
        raise refused("INVALID_ARGUMENT", f"Invalid labels {labels}")
    if sum(map(len, node.get("metadata", {}).values())) > 512 * 1024:
        raise refused("INVALID_ARGUMENT", "Metadata is larger than 512 KiB")
