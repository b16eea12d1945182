"""Bootstrap: a real shell on this machine runs the steps, and the client hears how far it is."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.errors import BootstrapError, ConnectionLost, HostBusy, UsageError
from skypool.model import Access
from skypool.provision import bootstrap as bootstrap_module
from skypool.provision.bootstrap import SetupBundle, bootstrap, reach
from skypool.shipping import package_zip
from skypool.wire.agent_config import AgentConfig
from skypool.wire.transport import SSH, CommandStream, Subprocess
from skypool_images import Image, Step, assemble
from skypool_images.file_archive import Packed
from tests.conftest import descendants, eventually, nodes, processes_of

ROOT = Path(__file__).parent.parent

PYTHON = Step("python", "keep SKYPOOL_PYTHON /usr/bin/python3")


def setup(home: Path, *steps: Step, payload: bytes = b"", guest: str = "") -> SetupBundle:
    return SetupBundle(
        assemble([PYTHON, *steps], "a test"), Packed.of(payload) if payload else None, str(home), guest=guest
    )


def access(booting: float = 0.0) -> Access:
    return Access(Subprocess(), None, "/nowhere", "/nowhere", booting=booting)


def made_ready(setup: SetupBundle, silence: float = 20.0) -> tuple[str, list[events.Event]]:
    """The interpreter that the bootstrap found, and what it told."""
    told: list[events.Event] = []

    async def work() -> str:
        stream = await reach(access(), setup, 7)
        try:
            return await bootstrap(stream, setup, "p", 7, silence, told.append)
        finally:
            stream.close()

    return asyncio.run(work()), told


def states(told: list[events.Event]) -> list[str]:
    return [f"{e.step} {e.state}" for e in told if isinstance(e, events.BootstrapStep)]


def test_steps_are_told_as_they_run_and_skipped_the_second_time(tmp_path: Path) -> None:
    work = setup(tmp_path, Step("one", "echo hello; echo oh >&2"), Step("two", "touch $SKYPOOL_HOME/two"))
    python, told = made_ready(work)
    assert python == "/usr/bin/python3"
    assert states(told) == [f"{step} {state}" for step in ("python", "one", "two") for state in ("started", "done")]
    assert [e.text for e in told if isinstance(e, events.BootstrapOutput)] == ["hello", "oh"]
    _, told = made_ready(work)
    assert states(told)[1::2] == ["python skipped", "one skipped", "two skipped"]


def test_a_failed_step_says_command_status_tail_and_advice(tmp_path: Path) -> None:
    step = Step("fetch", "echo looking\nadvise plug it in\nrun sh -c 'echo no cable; exit 9'")
    with pytest.raises(BootstrapError) as caught:
        made_ready(setup(tmp_path, step))
    error = caught.value
    assert (error.step, error.status, error.advice) == ("fetch", 9, "plug it in")
    assert error.command == "sh -c echo no cable; exit 9"
    assert error.tail.splitlines() == ["looking", "no cable"]
    assert str(error).startswith("node 7: step fetch failed with exit status 9")
    assert str(error).endswith("what to do: plug it in")


def test_files_travel_once_and_whole(tmp_path: Path) -> None:
    payload = bytes(range(256)) * 1000 + b"\n\n"  # newlines at its end are its own
    step = Step("look", f"cmp $SKYPOOL_HOME/payload/*.tar.gz {tmp_path / 'same'}")
    (tmp_path / "same").write_bytes(payload)
    _, told = made_ready(setup(tmp_path, step, payload=payload))
    kept = next((tmp_path / "payload").iterdir())
    assert [(e.done, e.total) for e in told if isinstance(e, events.FilesProgress)] == [(len(payload),) * 2]
    before = kept.stat().st_ino
    made_ready(setup(tmp_path, step, payload=payload))
    assert kept.stat().st_ino == before


def test_a_machine_for_one_pool_at_a_time_names_the_other_one(tmp_path: Path) -> None:
    async def work() -> None:
        first = await reach(access(), setup(tmp_path, guest="'one' of me@here"), 0)
        try:
            with pytest.raises(HostBusy, match="serves another pool: 'one' of me@here"):
                await reach(access(), setup(tmp_path, guest="'two' of me@here"), 1)
        finally:
            first.close()
        again = await reach(access(), setup(tmp_path, guest="'two' of me@here"), 1)
        again.close()

    asyncio.run(work())


def test_two_nodes_with_one_home_take_turns(tmp_path: Path) -> None:
    step = Step("alone", 'mkdir "$SKYPOOL_HOME/taken"; sleep 0.3; rmdir "$SKYPOOL_HOME/taken"; echo done')

    async def one(n: int) -> str:
        mine = setup(tmp_path, Step(f"mine-{n}", step.script))
        stream = await reach(access(), mine, n)
        python = await bootstrap(stream, mine, "p", n, 20, lambda _: None)
        await asyncio.to_thread(stream.close)
        return python

    async def both() -> list[str]:
        return list(await asyncio.gather(one(0), one(1)))

    assert asyncio.run(both()) == ["/usr/bin/python3"] * 2


def test_a_node_gets_the_interpreter_of_its_own_image_whoever_comes_next(tmp_path: Path) -> None:
    slow = tmp_path / "slow/cat"
    slow.parent.mkdir()
    slow.write_text('#!/bin/sh\n[ "$1" != boot/python ] || sleep 3\nexec /bin/cat "$@"\n')
    slow.chmod(0o755)
    first = replace(setup(tmp_path), settings={"PATH": f"{slow.parent}:{os.environ['PATH']}"})
    other = SetupBundle(
        assemble([Step("python", f"keep SKYPOOL_PYTHON {sys.executable}")], "a test"), home=str(tmp_path)
    )

    async def both() -> str:
        one, two = await reach(access(), first, 0), await reach(access(), other, 1)
        try:
            await bootstrap(one, first, "p", 0, 20, lambda _: None)
            await bootstrap(two, other, "q", 1, 20, lambda _: None)
            process = Path(f"/proc/{one.process.pid}")
            await asyncio.to_thread(eventually, lambda: b"take(8)" in (process / "cmdline").read_bytes())
            return (process / "cmdline").read_bytes().split(b"\0")[0].decode()
        finally:
            one.close()
            two.close()

    assert asyncio.run(both()) == "/usr/bin/python3"


def test_a_machine_that_falls_silent_in_a_step_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skypool.provision.bootstrap._ALIVE", 1)
    work = setup(tmp_path, Step("stuck", "sleep 60"))
    frozen: list[int] = []

    async def stuck() -> None:
        stream = await reach(access(), work, 7)
        freezing = asyncio.create_task(_freeze(stream, frozen))
        try:
            await bootstrap(stream, work, "p", 7, 1.0, lambda _: None)
        finally:
            await freezing

    try:
        with pytest.raises(ConnectionLost, match=r"node 7 sent nothing for 3 s during its bootstrap, step stuck"):
            asyncio.run(stuck())
    finally:
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_step_that_nobody_waits_for_ends_and_the_machine_is_free_at_once(tmp_path: Path) -> None:
    nap = f"sleep 1{os.getpid()}"
    work = setup(tmp_path, Step("long", nap), guest="'one' of me@here")

    async def leave() -> None:
        stream = await reach(access(), work, 7)
        course = asyncio.create_task(bootstrap(stream, work, "p", 7, 20, lambda _: None))
        while not await asyncio.to_thread(processes_of, nap.replace(" ", "\0")):
            await asyncio.sleep(0.05)
        course.cancel()
        await asyncio.to_thread(stream.close)

    asyncio.run(leave())
    began = time.monotonic()
    made_ready(setup(tmp_path, guest="'two' of me@here"))  # it waits for the other's step to end
    assert not processes_of(nap.replace(" ", "\0"))
    assert time.monotonic() - began < 30


CLIENT = """
import skypool as sky
sky.ComputePool(image=sky.Image(run=["sleep 2{}"]), console="off").start()
"""


@pytest.mark.slow
def test_a_step_ends_soon_after_its_client_was_killed() -> None:
    nap = f"sleep\0002{os.getpid()}"
    client = subprocess.Popen([sys.executable, "-c", CLIENT.format(os.getpid())], cwd=ROOT, stderr=subprocess.DEVNULL)
    eventually(lambda: processes_of(nap), 30, "the step")
    client.kill()
    client.wait()
    eventually(lambda: not processes_of(nap), 30, "the end of the step")
    for node in nodes():  # of a client that cannot end it any more
        if json.loads((node / "node.json").read_text())["client"] == client.pid:
            shutil.rmtree(node)


async def _freeze(stream: CommandStream, frozen: list[int]) -> None:
    """Stop every process of the stream's command, as a frozen machine would."""
    await asyncio.sleep(0.5)
    frozen += [stream.process.pid, *descendants(stream.process.pid)]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)


def test_a_long_step_is_no_silence(tmp_path: Path) -> None:
    python, _ = made_ready(setup(tmp_path, Step("long", "sleep 7")), silence=6.0)
    assert python


@pytest.mark.slow
def test_a_client_that_is_held_up_reads_what_a_machine_has_sent_before_it_judges_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap_module, "_ALIVE", 0.5)  # 2 s of silence are too long

    def hold_up() -> None:
        eventually((tmp_path / "talks").exists)
        time.sleep(1)
        ctypes.PyDLL(None).usleep(3_000_000)  # no other thread of this process runs meanwhile

    threading.Thread(target=hold_up).start()
    talks = Step("talks", f"touch {tmp_path}/talks; for i in $(seq 30); do echo $i; sleep 0.2; done")
    _, told = made_ready(setup(tmp_path, talks), silence=2.0)
    assert [e.text for e in told if isinstance(e, events.BootstrapOutput)] == [*map(str, range(1, 31))]


@pytest.mark.needs("openssh")
def test_a_machine_that_is_not_there_is_waited_for_as_long_as_it_may_boot(tmp_path: Path) -> None:
    nobody = SSH("127.0.0.1", port=1, known_hosts=(str(tmp_path / "none"),))
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match="Connection refused"):
        asyncio.run(reach(Access(nobody, None, "", "", booting=1.0), setup(tmp_path), 0))
    assert 1.0 <= time.monotonic() - began < 30


def test_a_connection_that_breaks_while_something_is_sent_is_lost(tmp_path: Path) -> None:
    """Drivers of marketplaces remember machines for it, as they do when it breaks while something is read."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.close()
    stream: Any = SimpleNamespace(socket=ours)
    course = bootstrap_module._Course("pool", 3, lambda event: None)

    async def sent() -> None:
        await bootstrap_module._send(stream, package_zip.ALIVE, course, 3)

    with ours, pytest.raises(ConnectionLost, match=r"the connection to node 3 ended during its .*Broken pipe"):
        asyncio.run(sent())


def test_what_an_image_lacks_here_is_told_before_anything_starts() -> None:
    pool = sky.ComputePool(image=Image(files={"data.csv": "no/such/file.csv"}), console="off")
    with pytest.raises(sky.UsageError, match=r"no/such/file\.csv"):
        pool.start()
    pool = sky.ComputePool(image=Image(secrets=["NO_SUCH_TOKEN"]), console="off")
    with pytest.raises(sky.UsageError, match="NO_SUCH_TOKEN"):
        pool.start()


# --- the machine's own end -----------------------------------------------------------------------------------


def test_archives_of_other_images_stay_only_so_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def there(*payloads: bytes) -> bool:
        names = {Packed.of(each).name for each in payloads}
        return names == {each.name for each in (tmp_path / "payload").iterdir()}

    now = time.time()
    small = [bytes([number]) * 1000 for number in range(5)]
    for number, each in enumerate(small[:3]):
        made_ready(setup(tmp_path, payload=each))
        os.utime(tmp_path / "payload" / Packed.of(each).name, (now - 100 + number, now - 100 + number))
    (tmp_path / "payload/cut.tar.gz.part").touch()
    made_ready(setup(tmp_path, payload=small[0]))  # used again
    assert (tmp_path / "payload/cut.tar.gz.part").exists()
    made_ready(setup(tmp_path, payload=small[3]))
    assert there(small[0], small[2], small[3])
    monkeypatch.setattr("skypool.provision.bootstrap._KEPT_BYTES", 2500)
    made_ready(setup(tmp_path, payload=small[4]))
    assert there(small[3], small[4])
    made_ready(setup(tmp_path, payload=bytes(3000)))
    assert there(bytes(3000)), "it stays, as it is in use"
    os.utime(tmp_path / "payload" / Packed.of(bytes(3000)).name, (now - 9 * 86400, now - 9 * 86400))
    made_ready(setup(tmp_path, payload=bytes(3000)))
    made_ready(setup(tmp_path))
    assert there(bytes(3000)), "it was used just now"
    os.utime(tmp_path / "payload" / Packed.of(bytes(3000)).name, (now - 9 * 86400, now - 9 * 86400))
    made_ready(setup(tmp_path))
    assert there(), "nobody has used it for a week"


def guarded(home: Path, *steps: Step, payload: bytes = b"") -> tuple[SetupBundle, Path]:
    """A setup whose machine ends itself unless this file says otherwise."""
    file = home / "lease"
    file.write_text(f"{'nobody has asked':<31}\n")
    return replace(setup(home, *steps, payload=payload), guard=str(file), lease=3.0), file


def test_a_machine_is_asked_to_live_on_while_files_arrive_and_while_the_client_answers(tmp_path: Path) -> None:
    look = "for _ in 1 2 3 4 5 6; do cat $SKYPOOL_HOME/lease; sleep 0.5; done\ncat $SKYPOOL_HOME/payload/* | wc -c"
    work, _ = guarded(tmp_path, Step("look", look), payload=os.urandom(3_000_000))
    _, told = made_ready(work)
    *asked, size = (e.text.strip() for e in told if isinstance(e, events.BootstrapOutput))
    assert size == "3000000"
    assert asked[0].split()[1:] == ["3"], "the files have come, and nobody has asked"
    assert len(set(asked)) >= 3
    assert {line.split()[1] for line in asked} == {"3"}
    assert all(line.split()[0].isdigit() for line in asked)


def test_a_client_that_does_not_answer_is_no_reason_to_live_on(tmp_path: Path) -> None:
    work, file = guarded(tmp_path, Step("long", "sleep 60"))

    async def listen() -> tuple[str, str, bytes]:
        stream = await reach(access(), work, 0)
        try:
            await asyncio.get_running_loop().sock_sendall(stream.socket, package_zip.padded(work.script.encode(), 4096))
            await asyncio.sleep(1)  # not for luck: the machine has what it needs
            before = file.read_text()
            await asyncio.sleep(2.5)  # not for luck: it asks each second
            return before, file.read_text(), await asyncio.get_running_loop().sock_recv(stream.socket, 65536)
        finally:
            stream.close()

    before, after, said = asyncio.run(listen())
    assert said.count(b"@alive\n") >= 2
    assert before == after
    assert before.split()[1] == "3"


def test_shell_text_that_a_node_would_read_in_part_is_refused() -> None:
    assert package_zip.staged("x" * 12288) == b"x" * 12288
    with pytest.raises(UsageError, match="has 12289 bytes, and the limit is 12288: shorten the settings"):
        package_zip.staged("x" * 12289)


def test_a_setup_with_everything_leaves_room_for_settings() -> None:
    settings = {f"UV_INDEX_{n}_USERNAME": "x" * 100 for n in range(24)}
    stage = SetupBundle("", settings=settings, guest="ann@laptop", guard="/run/skypool/lease", lease=900).stage()
    assert len(stage) == 12288


def test_the_loader_overhears_what_was_said_to_the_bootstrap(tmp_path: Path) -> None:
    config = AgentConfig(folder=str(tmp_path), spool=str(tmp_path), cwd=str(tmp_path))
    text = 2 * package_zip.ALIVE + package_zip.prelude(config, start=False)
    got = subprocess.run(["sh", "-c", package_zip.agent_starter(sys.executable, "")], input=text, capture_output=True)
    assert json.loads(got.stdout)["gone"] is True, got.stderr
