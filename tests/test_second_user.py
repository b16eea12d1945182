"""Another unprivileged user of this computer tries to run code as us, to write through us, or to end our processes.

Each test is one attempt. docs/trust.md lists the folders, files, sockets and ports that these are about.
"""

from __future__ import annotations

import contextlib
import io
import json
import marshal
import os
import pickle
import shlex
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

import skypool as sky
from skypool.agent.processes import started
from skypool.drivers import blocklist, recording
from skypool.errors import LedgerError
from skypool.logs import files as logs
from skypool.model import Instance, Need, Order
from skypool.observers import pool_sockets
from skypool.offers import price_cache
from skypool.provision.bootstrap import SetupBundle
from skypool.rental import reaper_process
from skypool.rental.ledger import Ledger
from skypool.samples import session_file
from skypool.shipping import package_zip
from skypool.testing import FakeCloud
from skypool.testing import state_store as fake_state
from skypool.wire import host_keys
from skypool.wire.agent_config import AgentConfig
from skypool.wire.keys import Keys
from skypool.wire.transport import SSH
from skypool_local import Local
from skypool_ssh import _hosts
from tests.conftest import eventually
from tests.second_user import EMPTY, OTHER, argv, needs_root, open_place, other

pytestmark = needs_root


@pytest.fixture
def tmp() -> Iterator[Path]:
    """A folder like /tmp."""
    with open_place() as found:
        yield found


@pytest.fixture
def state(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder for state, whose parts an attempt may have left open to others."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp / "state"))
    (tmp / "state" / "skypool").mkdir(parents=True)
    return tmp / "state" / "skypool"


@pytest.fixture
def cache(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder for caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp / "cache"))
    (tmp / "cache" / "skypool").mkdir(parents=True)
    package_zip._bundle.cache_clear()
    return tmp / "cache" / "skypool"


@pytest.fixture
def local(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for Local's nodes of a user without a runtime folder, as in cron, in a container or after `su`."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nonexistent")
    monkeypatch.setenv("TMPDIR", str(tmp))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp / f"skypool-{os.getuid()}"


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours that is none of skypool's."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def shared(folder: Path) -> Path:
    """Make a folder of ours that every user can change."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)
    return folder


def proof(tmp: Path) -> Path:
    """The file that code of the other user writes if we run it."""
    return tmp / "proof"


def planted_zip(tmp: Path) -> bytes:
    """An archive as the agent's loader imports it, whose code writes the proof."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for each in ("__init__", "agent/__init__"):
            archive.writestr(f"skypool/{each}.py", "")
        archive.writestr(
            "skypool/agent/holder.py",
            f"import os, sys\ndef connect(config, start):\n open({str(proof(tmp))!r}, 'w')\n sys.exit('owned')\n",
        )
    return data.getvalue()


class Runs:
    """A value whose pickle writes the proof when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.file), "w")


def offer() -> sky.Offer:
    return next(iter(Local().offers(Need())))


def connected(folder: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """Begin a connection to the node in a folder, as the client does: run the agent's loader there."""
    config = AgentConfig(folder=str(folder), spool=str(folder), cwd="/")
    text = package_zip.prelude(config, start=True) + package_zip.bundle().read()
    argv = ["sh", "-c", package_zip.agent_starter(sys.executable, "")]
    done = subprocess.run(argv, input=text, capture_output=True, timeout=60, cwd=cwd)
    end(folder)
    return done


def end(folder: Path) -> None:
    """End the agent that may have been started in a folder."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        os.kill(json.loads((folder / "keeper.json").read_bytes())["pid"], signal.SIGTERM)
        eventually(lambda: not (folder / "agent.sock").exists(), 30, "the agent's end")


def claimed(process: subprocess.Popen[bytes]) -> str:
    """What a keeper.json says that names a process."""
    return json.dumps({"pid": process.pid, "started": started(process.pid)})


def seen(folder: Path) -> Instance:
    return Instance("local", folder.name, "p", 0, detail={"folder": str(folder), "devices": [], "slots": None})


# --- Local's nodes -------------------------------------------------------------------------------------------


def test_plant_the_folder_of_local_nodes(local: Path) -> None:
    other("os.mkdir(sys.argv[1], 0o777)", local)
    with pytest.raises(sky.SkypoolError, match=rf"{local} \(owner {OTHER}, mode 0777\).*set XDG_RUNTIME_DIR or TMPDIR"):
        Local().launch(offer(), Order("p", "tok", (0,), Need()))
    assert list(local.iterdir()) == []
    assert Local().instances() == []


def test_a_pool_tells_that_the_folder_of_local_nodes_is_planted(local: Path) -> None:
    other("os.mkdir(sys.argv[1], 0o777)", local)
    with pytest.raises(sky.SkypoolError, match="set XDG_RUNTIME_DIR or TMPDIR"), sky.ComputePool(Local()):
        pass
    assert list(local.iterdir()) == []


def test_plant_a_link_to_a_folder_of_his_as_the_folder_of_local_nodes(local: Path, tmp: Path) -> None:
    other("os.mkdir(sys.argv[1], 0o777); os.symlink(sys.argv[1], sys.argv[2])", tmp / "his", local)
    with pytest.raises(sky.SkypoolError, match="symbolic link"):
        Local().launch(offer(), Order("p", "tok", (0,), Need()))
    assert list((tmp / "his").iterdir()) == []


def test_plant_a_link_to_a_folder_of_ours_as_the_folder_of_local_nodes(local: Path, tmp: Path) -> None:
    (tmp / "ours").mkdir(mode=0o700)
    other("os.symlink(*sys.argv[1:])", tmp / "ours", local)
    with pytest.raises(sky.SkypoolError, match="symbolic link"):
        Local().launch(offer(), Order("p", "tok", (0,), Need()))
    assert list((tmp / "ours").iterdir()) == []


def test_use_an_old_folder_of_local_nodes_that_he_can_change(local: Path) -> None:
    shared(local)
    with pytest.raises(sky.SkypoolError, match=r"mode 0777.*chmod go-rwx"):
        Local().launch(offer(), Order("p", "tok", (0,), Need()))
    assert list(local.iterdir()) == []


def test_an_old_folder_of_local_nodes_that_he_can_only_read_is_refused_too(local: Path) -> None:
    local.mkdir()
    local.chmod(0o755)
    with pytest.raises(sky.SkypoolError, match=r"mode 0755.*chmod go-rwx"):
        Local().launch(offer(), Order("p", "tok", (0,), Need()))


def test_replace_the_folder_of_local_nodes_where_tmp_is_not_sticky(local: Path, tmp: Path) -> None:
    tmp.chmod(0o777)
    with pytest.raises(sky.SkypoolError, match="could replace"):
        Local().launch(offer(), Order("p", "tok", (0,), Need()))


def test_lend_his_runtime_folder_as_su_does(local: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other("os.mkdir(sys.argv[1], 0o700)", tmp / "run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp / "run"))
    made = Local().launch(offer(), Order("p", "tok", (0,), Need()))
    try:
        assert list((tmp / "run").iterdir()) == []
        assert Path(made[0].detail["folder"]).parent == local
    finally:
        Local().terminate(made)


def test_plant_a_node_whose_keeper_is_another_process_of_ours(local: Path, bystander: subprocess.Popen[bytes]) -> None:
    program = """
        os.mkdir(sys.argv[1], 0o777)
        os.mkdir(sys.argv[1] + "/p.0.abc", 0o777)
        open(sys.argv[1] + "/p.0.abc/node.json", "w").write('{"pool": "p", "node": 0, "token": "t"}')
        open(sys.argv[1] + "/p.0.abc/keeper.json", "w").write(sys.argv[2])
    """
    other(program, local, claimed(bystander))
    Local().terminate(Local().instances())
    with contextlib.suppress(sky.StillRunning):
        Local().terminate([seen(local / "p.0.abc")])
    assert bystander.poll() is None


def test_plant_such_a_node_in_a_folder_of_ours(local: Path, bystander: subprocess.Popen[bytes]) -> None:
    shared(local)
    program = """
        os.mkdir(sys.argv[1] + "/p.0.abc", 0o777)
        open(sys.argv[1] + "/p.0.abc/node.json", "w").write('{"pool": "p", "node": 0, "token": "t"}')
        open(sys.argv[1] + "/p.0.abc/keeper.json", "w").write(sys.argv[2])
    """
    other(program, local, claimed(bystander))
    local.chmod(0o700)  # as the error says, but without a look at what is in it
    Local().terminate(Local().instances())
    with contextlib.suppress(sky.StillRunning):
        Local().terminate([seen(local / "p.0.abc")])
    assert bystander.poll() is None


def test_plant_a_keeper_in_a_node_of_ours(local: Path, bystander: subprocess.Popen[bytes]) -> None:
    (made,) = Local().launch(offer(), Order("p", "tok", (0,), Need()))
    folder = Path(made.detail["folder"])
    for each in (local, folder):
        each.chmod(0o777)
    other("open(sys.argv[1], 'w').write(sys.argv[2])", folder / "keeper.json", claimed(bystander))
    for each in (local, folder):
        each.chmod(0o700)
    Local().terminate([made])
    assert bystander.poll() is None
    assert not folder.exists()


def test_a_keeper_file_of_ours_that_names_another_process_ends_nothing(
    local: Path, bystander: subprocess.Popen[bytes]
) -> None:
    (made,) = Local().launch(offer(), Order("p", "tok", (0,), Need()))
    Path(made.detail["folder"], "keeper.json").write_text(claimed(bystander))
    Local().terminate([made])
    assert bystander.poll() is None


# --- what the loader imports -------------------------------------------------------------------------------------


def test_plant_the_archive_that_the_loader_imports_in_a_folder_of_his(tmp: Path) -> None:
    folder = tmp / "node"
    (tmp / "zip").write_bytes(planted_zip(tmp))
    (tmp / "zip").chmod(0o644)
    program = "os.mkdir(sys.argv[1], 0o777); shutil.copy(sys.argv[2], sys.argv[1] + '/' + sys.argv[3])"
    other(program, folder, tmp / "zip", f"skypool-{package_zip.bundle().hash}.zip")
    done = connected(folder)
    assert not proof(tmp).exists()
    assert b"other users of this machine can change it" in done.stderr


@pytest.mark.parametrize("how", ["shutil.copy", "os.symlink"])
def test_plant_the_archive_in_a_folder_of_ours(tmp: Path, how: str) -> None:
    folder = shared(tmp / "node")
    (tmp / "zip").write_bytes(planted_zip(tmp))
    (tmp / "zip").chmod(0o644)
    other(f"{how}(sys.argv[1], sys.argv[2])", tmp / "zip", folder / f"skypool-{package_zip.bundle().hash}.zip")
    folder.chmod(0o700)
    done = connected(folder)
    assert not proof(tmp).exists(), done.stderr


def test_plant_a_module_in_the_folder_from_which_our_script_runs(tmp: Path) -> None:
    other("open(sys.argv[1], 'w').write(f'open({sys.argv[2]!r}, \"w\")')", tmp / "json.py", proof(tmp))
    done = connected(tmp / "node", cwd=tmp)
    assert done.returncode == 0, done.stderr
    assert not proof(tmp).exists()


def test_plant_a_module_in_the_folder_from_which_a_forward_runs(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other("open(sys.argv[1], 'w').write(f'open({sys.argv[2]!r}, \"w\")')", tmp / "threading.py", proof(tmp))
    monkeypatch.chdir(tmp)
    with sky.ComputePool(Local(), console="off") as pool, pool.forward(9) as forward:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", forward.port)) as one:
            one.recv(1)
    assert not proof(tmp).exists()


def test_connect_to_the_agent(local: Path) -> None:
    connect = """
        os.chdir(sys.argv[1])
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(10)
        made.connect("agent.sock")
        with contextlib.suppress(ConnectionError):
            socket.send_fds(made, [b"skypool"], [0, 1])
            sys.exit("it says something" if made.recv(1) else 0)
    """
    with sky.ComputePool(Local(), console="off", name="agented") as pool:
        pool.submit(abs, -1).result(60)
        (folder,) = local.glob("agented.*")
        assert "PermissionError" in subprocess.run(argv(connect, folder), capture_output=True, text=True).stderr
        for each in (local, folder):
            each.chmod(0o711)
        (folder / "agent.sock").chmod(0o666)
        other(connect, folder)  # it is closed at once
        assert pool.submit(abs, -1).result(60) == 1
        for each in (local, folder):
            each.chmod(0o700)


# --- the client's state ------------------------------------------------------------------------------------------


def test_plant_the_folder_of_the_ledger(state: Path) -> None:
    shared(state)
    other("os.mkdir(sys.argv[1], 0o777)", state / "ledger")
    state.chmod(0o700)
    with pytest.raises(LedgerError, match=rf"ledger \(owner {OTHER}, mode 0777\).*set XDG_STATE_HOME"):
        Ledger.here().pools()
    assert list((state / "ledger").iterdir()) == []


def test_fill_a_ledger_folder_of_ours_that_he_can_change(state: Path) -> None:
    shared(state / "ledger")
    other("open(sys.argv[1], 'w')", state / "ledger" / "ledger.sqlite3.new")
    with pytest.raises(LedgerError, match="mode 0777"):
        Ledger.here().pools()


def test_plant_a_ledger_that_names_machines_of_his_choice(state: Path) -> None:
    Ledger.here().pools()
    data = (state / "ledger" / "ledger.sqlite3").read_bytes()
    (state / "ledger" / "ledger.sqlite3").unlink()
    (state / "ledger").chmod(0o777)
    (state.parent / "copy").write_bytes(data)
    other("shutil.copy(*sys.argv[1:])", state.parent / "copy", state / "ledger" / "ledger.sqlite3")
    (state / "ledger").chmod(0o700)
    with pytest.raises(LedgerError, match=f"owner {OTHER}"):
        Ledger.here().pools()


def test_plant_a_link_as_the_lock_of_the_ledger(state: Path, tmp: Path) -> None:
    shared(state / "ledger")
    other("os.symlink(*sys.argv[1:])", tmp / "made", state / "ledger" / "ledger.sqlite3.lock")
    (state / "ledger").chmod(0o700)
    with pytest.raises(LedgerError, match="no regular file"):
        Ledger.here().pools()
    assert not (tmp / "made").exists()


def test_replace_the_folder_of_all_state(state: Path) -> None:
    state.parent.chmod(0o777)
    with pytest.raises(LedgerError, match="could replace"):
        Ledger.here().pools()


def test_hold_the_lock_of_the_ledger(state: Path) -> None:
    Ledger.here().pools()
    for each in (state, state / "ledger"):
        each.chmod(0o755)  # as a backup may have left it
    Ledger.here().pools()
    program = "fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX)"
    done = subprocess.run(argv(program, state / "ledger" / "ledger.sqlite3.lock"), capture_output=True, text=True)
    assert "PermissionError" in done.stderr


def test_plant_a_link_as_the_folder_of_the_observers_sockets(state: Path, tmp: Path) -> None:
    (tmp / "ours").mkdir()
    (tmp / "ours").chmod(0o755)
    shared(state)
    other("os.symlink(*sys.argv[1:])", tmp / "ours", state / "observers")
    state.chmod(0o700)
    with pytest.raises(OSError, match="symbolic link"):
        pool_sockets.listen("p")
    assert stat.S_IMODE((tmp / "ours").stat().st_mode) == 0o755
    assert list((tmp / "ours").iterdir()) == []
    assert pool_sockets.pools() == []


def test_a_link_of_our_own_as_the_folder_of_the_observers_sockets_is_not_followed_either(
    state: Path, tmp: Path
) -> None:
    (tmp / "ours").mkdir()
    (tmp / "ours").chmod(0o755)
    (state / "observers").symlink_to(tmp / "ours")
    with pytest.raises(OSError, match="symbolic link"):
        pool_sockets.listen("p")
    assert stat.S_IMODE((tmp / "ours").stat().st_mode) == 0o755


def test_plant_a_socket_that_answers_observers(state: Path) -> None:
    shared(state / "observers")
    program = """
        made = socket.socket(socket.AF_UNIX)
        made.bind(sys.argv[1])
        made.listen()
        print("ready", flush=True)
        print(made.accept()[0].recv(100), flush=True)
    """
    with subprocess.Popen(argv(program, state / "observers" / "p"), stdout=subprocess.PIPE, env=EMPTY) as his:
        assert his.stdout is not None
        assert his.stdout.readline() == b"ready\n"
        assert pool_sockets.pools() == []
        with pytest.raises(OSError, match="mode 0777"):
            pool_sockets.connect("p", 5)
        his.kill()
        assert his.stdout.read() == b""


def test_take_the_name_of_a_socket_in_tmp_that_was_removed(
    state: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = state / "long" / ("x" * 90)
    monkeypatch.setattr(pool_sockets, "folder", lambda: long / "observers")
    listener, put = pool_sockets.listen("p")
    assert put.elsewhere is not None
    listener.close()
    (put.elsewhere / "socket").unlink()
    put.elsewhere.rmdir()  # as a service that cleans /tmp does
    program = """
        os.mkdir(sys.argv[1], 0o777)
        made = socket.socket(socket.AF_UNIX)
        made.bind(sys.argv[1] + "/socket")
        made.listen()
        print("ready", flush=True)
        print(made.accept(), flush=True)
    """
    with subprocess.Popen(argv(program, put.elsewhere), stdout=subprocess.PIPE, env=EMPTY) as his:
        assert his.stdout is not None
        assert his.stdout.readline() == b"ready\n"
        with pytest.raises(ConnectionRefusedError):
            pool_sockets.connect("p", 5)
        his.kill()
        assert his.stdout.read() == b""  # we have not even connected
    assert pool_sockets.pools() == []
    other("shutil.rmtree(sys.argv[1])", put.elsewhere)


def test_plant_a_pickle_among_the_cached_prices(cache: Path, tmp: Path) -> None:
    shared(cache / "offers")
    price_file = cache / "offers" / "offers.sqlite"
    with contextlib.closing(sqlite3.connect(tmp / "prices")) as book, book:
        book.execute("CREATE TABLE answers (key TEXT PRIMARY KEY, at REAL NOT NULL, offers BLOB NOT NULL)")
        blob = zlib.compress(pickle.dumps(Runs(proof(tmp))))
        book.execute("INSERT INTO answers VALUES ('key', ?, ?)", (time.time(), blob))
    (tmp / "prices").chmod(0o644)
    other("shutil.copy(*sys.argv[1:]); os.chmod(sys.argv[2], 0o666)", tmp / "prices", price_file)
    assert price_cache.recall("key", tuple) is None
    (cache / "offers").chmod(0o700)
    assert price_cache.recall("key", tuple) is None
    assert not proof(tmp).exists()


def contents(bundle: package_zip.Bundle) -> dict[str, object]:
    """What is in a zip for nodes, by path. The bytes of equal code may differ: marshal notes who else refers to it."""
    with zipfile.ZipFile(io.BytesIO(bundle.read())) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    return {name: marshal.loads(data[16:]) if name.endswith(".pyc") else data for name, data in found.items()}


def test_plant_the_archive_for_nodes_in_the_cache(cache: Path) -> None:
    good = package_zip.bundle()
    (record,) = cache.rglob("bundle-of-*.json")
    shared(record.parent)
    program = """
        for each in sys.argv[1:]:
            data = open(each, "rb").read()
            os.rename(each, each + ".old")
            open(each, "wb").write(data if each.endswith("json") else b"PK his")
    """
    for each in record.parent.iterdir():
        each.chmod(0o644)
    other(program, record, record.with_name(f"bundle-{good.hash}.zip"))
    for mode in (0o777, 0o700):
        record.parent.chmod(mode)
        package_zip._bundle.cache_clear()
        made = package_zip.bundle()
        assert (made.hash, contents(made)) == (good.hash, contents(good))


def test_put_another_file_of_ours_in_place_of_the_archive(cache: Path) -> None:
    good = package_zip.bundle()
    (record,) = cache.rglob("bundle-of-*.json")
    folder, older = record.parent, record.with_name("older")
    older.write_bytes(b"PK of an older version")
    older.chmod(0o600)
    shared(folder)
    folder.chmod(0o777)
    other("os.unlink(sys.argv[3]); os.rename(*sys.argv[1:3])", older, folder / f"bundle-{good.hash}.zip", record)
    package_zip._bundle.cache_clear()
    assert contents(package_zip.bundle()) == contents(good)


def test_plant_the_host_key_of_a_machine(state: Path) -> None:
    shared(state / "ssh")
    other("open(sys.argv[1], 'w').write('gpu1 ssh-ed25519 AAAA')", state / "ssh" / "known_hosts")
    with pytest.raises(sky.SkypoolError, match="mode 0777"):
        host_keys.folder()
    (state / "ssh").chmod(0o700)
    with pytest.raises(sky.SkypoolError, match=f"owner {OTHER}"):
        host_keys.believed(SSH("gpu1.invalid"), "gpu1", False)


def test_plant_the_key_with_which_we_log_in(state: Path) -> None:
    keys = Keys(shared(state / "pools" / "p" / "keys"))
    other("open(sys.argv[1], 'w').write('his'); open(sys.argv[1] + '.pub', 'w')", keys.folder / "client")
    with pytest.raises(sky.SkypoolError, match="mode 0777"):
        _ = keys.public
    keys.folder.chmod(0o700)
    with pytest.raises(sky.SkypoolError, match=f"owner {OTHER}"):
        _ = keys.public


def test_plant_a_link_as_the_folder_of_a_pools_output(state: Path, tmp: Path) -> None:
    other("os.mkdir(sys.argv[1], 0o777)", tmp / "his")
    shared(state / "logs")
    other("os.symlink(*sys.argv[1:])", tmp / "his", state / "logs" / "p")
    (state / "logs").chmod(0o700)
    with pytest.raises(OSError, match="symbolic link"):
        logs.make_run("p", "abc")
    assert list((tmp / "his").iterdir()) == []


def test_plant_output_of_a_pool(state: Path) -> None:
    shared(state / "logs")
    other("os.makedirs(sys.argv[1])", state / "logs" / "p" / "20260101T000000-abc")
    with pytest.raises(OSError, match="mode 0777"):
        logs.runs("p")


def test_plant_a_link_as_the_file_of_samples(state: Path, tmp: Path) -> None:
    (tmp / "ours").write_text("")
    shared(state / "samples")
    other("os.symlink(*sys.argv[1:])", tmp / "ours", state / "samples" / "s.sqlite3")
    (state / "samples").chmod(0o700)
    with pytest.raises(OSError, match="no regular file"), session_file.writing(session_file.path_of("s")):
        pass
    assert (tmp / "ours").read_text() == ""


def test_plant_a_link_as_the_log_of_the_process_that_ends_a_pool(state: Path, tmp: Path) -> None:
    (tmp / "ours").write_text("ours")
    log = reaper_process.log_of("p", "s")
    shared(log.parent)
    other("os.symlink(*sys.argv[1:])", tmp / "ours", log)
    log.parent.chmod(0o700)
    fd = reaper_process._opened_log(log)
    os.write(fd, b"his")
    os.close(fd)
    assert (tmp / "ours").read_text() == "ours"


def test_plant_a_blocklist_that_keeps_us_from_all_machines(state: Path) -> None:
    shared(blocklist.place("vastai"))
    other("open(sys.argv[1], 'w')", blocklist.place("vastai") / "7")
    with pytest.raises(sky.SkypoolError, match="mode 0777"):
        blocklist.known("vastai")


def test_plant_the_state_of_a_fake_cloud(tmp: Path) -> None:
    record = pickle.dumps((pickle.dumps(Runs(proof(tmp))), []))
    (tmp / "world").write_bytes(fake_state._SIZE.pack(len(record)) + record)
    (tmp / "world").chmod(0o644)
    program = "os.mkdir(sys.argv[1], 0o777); shutil.copy(sys.argv[2], sys.argv[1] + '/world.0')"
    other(program, tmp / "cloud", tmp / "world")
    with pytest.raises(sky.SkypoolError, match=f"owner {OTHER}"):
        FakeCloud(tmp / "cloud").instances()
    assert not proof(tmp).exists()


def test_offer_a_folder_for_a_recording(tmp: Path) -> None:
    other("os.mkdir(sys.argv[1], 0o777)", tmp / "recording")
    with pytest.raises(sky.SkypoolError, match=f"owner {OTHER}"), recording.to(tmp / "recording"):
        pass
    assert list((tmp / "recording").iterdir()) == []


# --- hosts of ours that are reached by ssh, and containers --------------------------------------------------------


def on_host(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run one of the functions that the driver SSH runs on a host."""
    script = f"{_hosts._script()}\n{shlex.join(words)}"
    return subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, timeout=60, env={**EMPTY, "HOME": str(home)}
    )


@pytest.fixture
def host(tmp: Path) -> Path:
    """The home folder of our account on a host."""
    (tmp / "home").mkdir(mode=0o755)
    return tmp / "home"


def test_plant_the_folder_on_a_host(host: Path) -> None:
    host.chmod(0o777)
    other("os.mkdir(sys.argv[1], 0o777)", host / ".skypool")
    host.chmod(0o755)
    done = on_host(host, "take", "p", "0", "tok", "me@here")
    assert "@taken" not in done.stdout
    assert f"{host}/.skypool belongs to user {OTHER}" in done.stderr


def test_plant_a_link_as_the_folder_on_a_host(host: Path, tmp: Path) -> None:
    (tmp / "ours").mkdir(mode=0o700)
    host.chmod(0o777)
    other("os.symlink(*sys.argv[1:])", tmp / "ours", host / ".skypool")
    host.chmod(0o755)
    done = on_host(host, "take", "p", "0", "tok", "me@here")
    assert "@taken" not in done.stdout
    assert f"{host}/.skypool belongs to user {OTHER}" in done.stderr
    assert list((tmp / "ours").iterdir()) == []


def test_replace_the_folder_on_a_host(host: Path) -> None:
    host.chmod(0o777)
    done = on_host(host, "take", "p", "0", "tok", "me@here")
    assert "@taken" not in done.stdout
    assert f"other users can change {host} (owner 0, mode 0777)" in done.stderr


def test_plant_a_claim_that_keeps_us_from_a_host(host: Path) -> None:
    shared(host / ".skypool" / "pools")
    (host / ".skypool").chmod(0o777)
    program = "os.mkdir(sys.argv[1]); open(sys.argv[1] + '/claim', 'w').write('p 0 tok his')"
    other(program, host / ".skypool" / "pools" / "p.0")
    assert on_host(host, "look").stdout == ""
    assert on_host(host, "take", "q", "0", "tok", "me@here").stdout == ""


def test_plant_a_keeper_on_a_host(host: Path, bystander: subprocess.Popen[bytes]) -> None:
    assert on_host(host, "take", "p", "0", "tok", "me@here").stdout == "@taken\n"
    folder = host / ".skypool" / "pools" / "p.0"
    for each in (folder, folder.parent, folder.parent.parent):
        each.chmod(0o777)
    other("open(sys.argv[1], 'w').write(sys.argv[2])", folder / "keeper.json", claimed(bystander))
    for each in (folder, folder.parent, folder.parent.parent):
        each.chmod(0o700)
    assert on_host(host, "end", "p", "0").stdout == "@gone\n"
    assert bystander.poll() is None


def test_have_a_broken_setup_end_another_process_of_ours(host: Path, bystander: subprocess.Popen[bytes]) -> None:
    boot = shared(host / ".skypool" / "boot")
    other("open(sys.argv[1], 'w').write(sys.argv[2])", boot / "pid", bystander.pid)
    watch = (files("skypool.provision") / "scripts" / "watch.sh").read_text()
    reading, writing = os.pipe()
    os.close(reading)  # nobody listens
    command = ["sh", "-c", 'exec 8>> boot.lock; exec sh -c "$1" watch 0.1', "sh", watch]
    place = host / ".skypool"
    subprocess.run(command, stdout=writing, cwd=place, env={**EMPTY, "SKYPOOL_HOME": str(place)}, timeout=60)
    os.close(writing)
    assert bystander.poll() is None


@pytest.mark.parametrize("how", ["folder", "link", "above"])
def test_plant_the_folder_in_which_a_machine_is_set_up(tmp: Path, how: str) -> None:
    """As in a container, where it is in /tmp."""
    home = tmp / "skypool" if how != "above" else tmp / "open" / "skypool"
    run = tmp / "run"
    run.write_text(f"#!/bin/sh\n: > {proof(tmp)}\n")
    run.chmod(0o755)
    if how == "above":
        shared(tmp / "open")
        home.mkdir()
    elif how == "link":
        other("os.mkdir(sys.argv[1], 0o777); os.symlink(*sys.argv[1:])", tmp / "his", home)
    else:
        other("os.mkdir(sys.argv[1], 0o777)", home)
    there = tmp / "his" if how == "link" else home
    if how == "above":
        there.chmod(0o777)
    other("os.mkdir(sys.argv[1], 0o777); open(sys.argv[1] + '/python', 'w').write(sys.argv[2])", there / "boot", run)
    setup = SetupBundle("echo @boot 1", home=str(home))
    done = subprocess.run(package_zip.STAGE, input=setup.stage() + setup.words, capture_output=True, timeout=60)
    assert not proof(tmp).exists()
    assert b"@fail folder 1 use" in done.stdout
    assert b"@boot 1" not in done.stdout


def test_the_folder_of_a_machine_that_is_ours_is_used(tmp: Path) -> None:
    setup = SetupBundle("echo @boot 1; exit 3", home=str(tmp / "skypool"))
    done = subprocess.run(package_zip.STAGE, input=setup.stage() + setup.words, capture_output=True, timeout=60)
    assert b"@boot 1" in done.stdout, done


def test_keep_a_container_alive_that_nobody_uses(tmp: Path) -> None:
    """Its first process waits for the node's folder, which another user of the container may make."""
    sleeper = (files("skypool_container") / "sleep.sh").read_text().replace("patience=900", "patience=2")
    home = tmp / "skypool"
    other("os.makedirs(sys.argv[1])", home / "pools" / "p.0")
    done = subprocess.run(["sh", "-c", sleeper, "skypool", home, home / "pools" / "p.0", "0"], timeout=60)
    assert done.returncode == 0
