"""Folders of machines that ssh reaches, in a bucket of SeaweedFS: machines are lost, links cut, movers killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from tests.conftest import eventually
from tests.lab import stores
from tests.lab.machines import Lab, Machine
from tests.lab.work import saved_content, write_saved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def store(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[stores.Store]:
    """A store that the machines reach, with the keys of its owner in the environment."""
    with stores.in_lab(lab, tmp_path, monkeypatch, "run") as made:
        yield made


def pool(lab: Lab, machines: list[Machine], store: stores.Store, prefix: str, **options: Any) -> sky.ComputePool:
    hosts = [sky.Host(each.address, host_key=each.host_key) for each in machines]
    bucket = sky.Bucket(f"s3://models/runs/{prefix}", store.endpoint, keys=stores.KEYS)
    provider = sky.SSH(hosts=hosts, user="root", identity=str(lab.client_key))
    asked: dict[str, Any] = {
        "nodes": len(machines),
        "slots": 1,
        "console": "off",
        "save": {"out": bucket},
        "liveness": 10,
    }
    return sky.ComputePool(provider, **{**asked, **options})


def kept(store: stores.Store, prefix: str) -> dict[str, int]:
    """The sizes of the objects below a prefix by their names, without those of skypool's own."""
    pages = stores.client(store.endpoint).get_paginator("list_objects_v2")
    found = [
        each for page in pages.paginate(Bucket="models", Prefix=f"runs/{prefix}/") for each in page.get("Contents", ())
    ]
    names = {each["Key"].removeprefix(f"runs/{prefix}/"): each["Size"] for each in found}
    return {name: size for name, size in names.items() if not name.startswith(".skypool/")}


def test_no_node_overwrites_a_file_of_another_and_each_gets_its_own_back(
    lab: Lab, two: list[Machine], store: stores.Store
) -> None:
    with pool(lab, two, store, "names") as first:
        write_saved("log", 1000) @ first
        mine = [*(saved_content("log") @ first)]
        write_saved("large", 30 << 20) >> first[0]
    there = kept(store, "names")
    assert {name.removeprefix("node-0/").removeprefix("node-1/") for name in there} == {"log", "large"}
    assert sorted(there.values()) == [1000, 1000, 30 << 20]
    for each in two:
        each.run("rm -rf /root/out /root/.skypool/work/out")
    with pool(lab, two, store, "names") as second:
        assert [*(saved_content("log") @ second)] == mine


def test_what_was_saved_outlives_a_machine_that_is_lost(lab: Lab, two: list[Machine], store: stores.Store) -> None:
    with pool(lab, two[:1], store, "lost", lease=30) as first:
        write_saved("step-1/model", 1 << 20) >> first
        eventually(lambda: kept(store, "lost"), 60, "the first checkpoint")
        time.sleep(2)  # the client hears of it
        two[0].kill()
        with pytest.raises(sky.ConnectionLost):
            write_saved("step-2/model", 10) >> first
    with pool(lab, two[1:], store, "lost") as second:
        assert write_saved("step-3/model", 10) >> second == ["step-1/model", "step-3/model"]
    assert kept(store, "lost") == {"step-1/model": 1 << 20, "step-3/model": 10}


def test_files_are_saved_while_the_client_cannot_reach_the_machine(
    lab: Lab, two: list[Machine], store: stores.Store
) -> None:
    with pool(lab, two[:1], store, "cut", liveness=90) as made:
        write_saved("a", 10) >> made
        two[0].kill_sshd()
        eventually(lambda: kept(store, "cut") == {"a": 10}, 60, "the file")
        for pid in two[0].processes():
            if b"skypool.data.mover" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        two[0].start_sshd()
        assert write_saved("b", 20) >> made == ["a", "b"]
    assert kept(store, "cut") == {"a": 10, "b": 20}
