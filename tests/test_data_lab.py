"""Data of machines that ssh reaches, from a bucket of SeaweedFS: each machine has it, also after kills."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.errors import UsageError
from tests.conftest import eventually
from tests.lab import stores
from tests.lab.machines import Lab, Machine
from tests.lab.work import files_and_modes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
FILES = {f"{number % 10}/shard-{number:03}": 10_000 * number for number in range(100)}


@pytest.fixture
def store(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[stores.Store]:
    """A store that the machines reach, with data and keys that only read."""
    with stores.in_lab(lab, tmp_path, monkeypatch, "reader") as made:
        owner = stores.client(made.endpoint)
        for name, size in FILES.items():
            owner.put_object(Bucket="models", Key=f"runs/data/{name}", Body=random.Random(name).randbytes(size))
        yield made


def pool(lab: Lab, machines: list[Machine], store: stores.Store, folder: str, user: str = "root") -> sky.ComputePool:
    hosts = [sky.Host(each.address, host_key=each.host_key) for each in machines]
    bucket = sky.Bucket("s3://models/runs/data", store.endpoint, keys=stores.KEYS)
    provider = sky.SSH(hosts=hosts, user=user, identity=str(lab.client_key))
    return sky.ComputePool(provider, nodes=len(machines), slots=1, console="off", data={folder: bucket})


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def test_each_machine_has_data_where_it_was_asked_for(lab: Lab, two: list[Machine], store: stores.Store) -> None:
    wanted = {name: (size, 0o444) for name, size in FILES.items()}
    for folder in ("/srv/data", "data", "~/other/data"):
        with pool(lab, two, store, folder) as made:
            everywhere: Any = files_and_modes.with_options(node="all")
            assert [*(everywhere(folder) @ made)] == [wanted] * 2


def test_a_mover_that_is_killed_goes_on_and_a_folder_of_others_is_left_alone(
    lab: Lab, two: list[Machine], store: stores.Store
) -> None:
    def kill() -> bool:
        found = [pid for pid in two[0].processes() if b"skypool.data.mover" in command_of(pid)]
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return bool(found)

    killing = threading.Thread(target=eventually, args=(kill, 60, "a mover to kill"))
    killing.start()
    with pool(lab, two[:1], store, "/srv/data") as made:
        killing.join()
        assert len(files_and_modes("/srv/data") >> made) == len(FILES)
    two[0].run("mkdir /srv/mine && echo 1 > /srv/mine/file")
    with pytest.raises(UsageError, match=r"on node 0: /srv/mine there has files that skypool has not fetched"):
        pool(lab, two[:1], store, "/srv/mine").start()
    assert two[0].run("cat /srv/mine/file").stdout.strip() == "1"


def test_a_user_without_rights_is_told_which_path_works(lab: Lab, store: stores.Store) -> None:
    machine = lab.machine(user="plain", keys=[lab.public_key])
    with pytest.raises(
        UsageError, match=r"/srv/data cannot be made by the user plain there: .*, such as 'data' or '~/data'"
    ):
        pool(lab, [machine], store, "/srv/data", "plain").start()
    with pool(lab, [machine], store, "~/data", "plain") as made:
        assert len(files_and_modes("~/data") >> made) == len(FILES)
    assert machine.run("touch ~/data/1/new", user="plain", check=False).returncode == 1
    machine.run("mkdir -m 755 /srv/data")
    with pytest.raises(UsageError, match="the user plain may not write to /srv/data there"):
        pool(lab, [machine], store, "/srv/data", "plain").start()


def test_a_user_who_may_become_root_has_data_where_only_root_can_make_a_folder(lab: Lab, store: stores.Store) -> None:
    machine = lab.machine(user="ubuntu", keys=[lab.public_key])
    with pool(lab, [machine], store, "/srv/deep/data", "ubuntu") as made:
        assert len(files_and_modes("/srv/deep/data") >> made) == len(FILES)
    assert machine.run("stat -c %U /srv/deep/data").stdout.strip() == "ubuntu"
