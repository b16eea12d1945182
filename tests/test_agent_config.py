"""What the client starts an agent with, and how it travels."""

from __future__ import annotations

import json

from skypool.provision.agent_config import AgentConfig, SlicePlace


def config(place: SlicePlace) -> AgentConfig:
    return AgentConfig(
        folder="~/.skypool/pools/p.0",
        pool="p",
        rank=0,
        nodes=2,
        place=place,
        slots=None,
        lease=600.0,
        lifetime=None,
        guard="",
        rented=False,
        liveness=60.0,
        grace=10.0,
        spool="/tmp",
        watch="",
        cwd="~/.skypool/work",
        spool_memory=None,
        allow=["mypkg.Point"],
        trust="full",
        env={"HF_TOKEN": "hidden-away"},
        keep=[9],
    )


def test_the_settings_travel_as_json_under_the_names_that_the_agent_reads() -> None:
    wire = json.loads(json.dumps(config(SlicePlace(host=1, hosts=4)).wire()))
    assert wire["slice"] == {"host": 1, "hosts": 4}, "what is not known is left out"
    assert (wire["allow"], wire["keep"], wire["env"]) == (["mypkg.Point"], [9], {"HF_TOKEN": "hidden-away"})
    assert (wire["slots"], wire["lifetime"], wire["spool_memory"]) == (None, None, None)
    assert set(wire) == {
        *("folder", "pool", "rank", "nodes", "slice", "slots", "lease", "lifetime", "guard", "rented", "liveness"),
        *("grace", "spool", "watch", "cwd", "spool_memory", "allow", "trust", "env", "keep"),
    }
    assert config(SlicePlace()).wire()["slice"] == {}


def test_the_settings_do_not_show_secrets() -> None:
    assert "hidden-away" not in repr(config(SlicePlace()))
