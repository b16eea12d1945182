"""What client and agent tell each other when they meet, and how nonsense is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skypool.errors import ProtocolError
from skypool.wire.agent_config import AgentConfig, SlicePlace, SlotPlan

CONFIG = AgentConfig(
    folder="/a",
    spool="/b",
    cwd="/c",
    pool="p",
    node=3,
    nodes=4,
    slice=SlicePlace(host=1, hosts=2, chips=4, slice_chips=8),
    slots=(SlotPlan({"CUDA_VISIBLE_DEVICES": "0"}, ("cuda 0",)), SlotPlan()),
    lifetime=3600,
    trust="data",
    allow=("numpy.ndarray",),
    env={"TOKEN": "secret"},
    keep=(9,),
)


def test_a_configuration_travels_as_json() -> None:
    assert AgentConfig.from_json(json.loads(json.dumps(CONFIG.to_json()))) == CONFIG


def test_a_configuration_shows_no_secrets() -> None:
    assert "secret" not in repr(CONFIG)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"lease": "long"}, "the configuration of a node has an invalid field 'lease': 'long'"),
        ({"node": -1}, "the configuration of a node has an invalid field 'node': -1"),
        ({"node": True}, "the configuration of a node has an invalid field 'node': True"),
        ({"slots": 0}, "the configuration of a node has an invalid field 'slots': 0"),
        ({"speed": 1}, "the configuration of a node has an unknown field 'speed'"),
        ({"trust": "none"}, "the configuration of a node has an invalid field 'trust': 'none'"),
        ({"keep": ["9"]}, "has an invalid field 'keep'"),
        ({"slots": [{"env": {}, "gpu": 1}]}, "a slot of a node has an unknown field 'gpu'"),
        ({"slice": {"host": "first"}}, "the place of a node in its slice has an invalid field 'host': 'first'"),
        ({"env": {"TOKEN": 7}}, "the configuration of a node has an invalid field 'env': dict"),
    ],
)
def test_a_field_that_means_nothing_is_refused_by_its_name(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        AgentConfig.from_json({**json.loads(json.dumps(CONFIG.to_json())), **changed})


def test_a_configuration_needs_its_folders() -> None:
    with pytest.raises(ProtocolError, match="the configuration of a node has no field 'cwd'"):
        AgentConfig.from_json({"folder": "/a", "spool": "/b"})
    with pytest.raises(ProtocolError, match="the configuration of a node must be a JSON object, not list"):
        AgentConfig.from_json([])
