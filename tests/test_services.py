"""Programs as calls (`sky.cmd`), and services: long-lived calls that take no slot and end with their pool."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import errors, events
from skypool.console.printer import Printer
from skypool.testing import FakeCloud, Stock
from tests.conftest import eventually, nodes, processes_of
from tests.test_link import cut, link_of
from tests.watched import Watched
from tests.work import add

STUBBORN = "trap '' TERM; touch $1; while :; do sleep 0.1; done"
"""A shell script that ignores SIGTERM. It makes the file $1 when it does."""
POLITE = "trap 'echo told > $1; exit 0' TERM; echo up; while :; do sleep 0.05; done"
"""A shell script that writes the file $1 when it gets SIGTERM, and ends."""


@sky.compute
def pid_of_worker(pause: float = 0.0) -> int:
    time.sleep(pause)
    return os.getpid()


@sky.compute
def wait_for_file(path: str) -> str:
    while not os.path.exists(path):
        time.sleep(0.01)
    return path


@sky.compute
def forks(path: str) -> None:
    """Leave processes in the same group, in another group, and in another session with another parent."""
    subprocess.Popen(["sleep", "98765"])
    subprocess.Popen(["sleep", "98765"], process_group=0)
    subprocess.run(["sh", "-c", "setsid sleep 98765 & echo $! > $1", "sh", path], check=True)
    print("forked", flush=True)
    signal.pause()


@pytest.fixture(scope="module")
def shared() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=2, slots=2, console="off") as made:
        yield made


@pytest.fixture
def pool(shared: sky.ComputePool) -> Iterator[sky.ComputePool]:
    yield shared
    assert shared.services == []


@pytest.fixture
def told(pool: sky.ComputePool) -> Iterator[list[events.Event]]:
    heard: list[events.Event] = []
    unlisten = pool.events.listen(heard.append)
    yield heard
    unlisten()


def ends(told: list[events.Event]) -> list[events.ServiceEnded]:
    return [event for event in list(told) if isinstance(event, events.ServiceEnded)]


def sleeping() -> list[int]:
    return processes_of("sleep\x0098765")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


# --- programs as calls ------------------------------------------------------------------------------------------


def test_a_program_runs_as_a_call_with_every_operator(pool: sky.ComputePool, told: list[events.Event]) -> None:
    assert sky.cmd("echo", "one") >> pool == 0
    assert sky.cmd("echo", "two") @ pool == [0, 0]
    assert (sky.cmd("echo", "three") > pool).result(30) == 0
    assert (sky.cmd("echo", "four") & add(1, 2)) >> pool == (0, 3)
    printed = "".join(event.text for event in told if isinstance(event, events.Output))
    assert sorted(printed.split()) == ["four", "one", "three", "two", "two"]


def test_the_output_of_a_program_comes_while_it_runs(
    pool: sky.ComputePool, told: list[events.Event], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    future = sky.cmd("sh", "-c", "echo first; while [ ! -e $1 ]; do sleep 0.01; done", "sh", go) > pool
    eventually(lambda: any(isinstance(each, events.Output) and "first" in each.text for each in told), 30)
    assert not future.done()
    go.touch()
    assert future.result(30) == 0


def test_a_program_that_fails_raises_its_status_and_its_last_output(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.CommandFailed, match=r"`sh -c .*` on node 0 exited with status 3\n(.|\n)*  not today") as e:
        sky.cmd("sh", "-c", "echo not today >&2; exit 3").with_options(node=0) >> pool
    assert (e.value.returncode, e.value.signal, e.value.node, e.value.tail) == (3, None, 0, "not today\n")
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
    with pytest.raises(sky.CommandFailed, match="was killed by SIGKILL") as killed:
        sky.cmd("sh", "-c", "kill -9 $$") >> pool
    assert (killed.value.returncode, killed.value.signal) == (-9, 9)
    assert sky.cmd("sh", "-c", "exit 3", check=False) >> pool == 3
    assert sky.cmd("sh", "-c", "kill -9 $$", check=False) >> pool == -9


def test_a_program_that_cannot_start_says_why(pool: sky.ComputePool, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("text")
    (tmp_path / "odd").write_text("#!/no/such/interpreter\n")
    (tmp_path / "odd").chmod(0o755)
    for call, why in {
        sky.cmd("no-such-program", "-x"): r"`no-such-program -x` could not be started on node \d: there is no program",
        sky.cmd("true", cwd=tmp_path / "none"): "there is no folder '.*none', which cwd= names",
        sky.cmd(tmp_path / "plain"): "Permission denied",
        sky.cmd(tmp_path / "odd"): "the program that its first line names",
    }.items():
        with pytest.raises(sky.CommandFailed, match=why) as e:
            call >> pool
        assert e.value.returncode is None


def test_a_program_gets_its_arguments_folder_and_variables(pool: sky.ComputePool, tmp_path: Path) -> None:
    script = 'echo "$1|$A|$HOME|$PWD"; cat'
    call = sky.cmd("sh", "-c", script, "sh", "a  b;$c", env={"A": "é"}, cwd=tmp_path).with_options(output="capture")
    value: Any = call >> pool
    assert value == (0, f"a  b;$c|é|{os.environ['HOME']}|{tmp_path}\n")  # and an empty stdin
    found: Any = sky.cmd("python", "-c", "import sys; print(sys.prefix)").with_options(output="capture") >> pool
    assert found.output == f"{sys.prefix}\n"  # a program of the environment that skypool runs in


def test_a_program_whose_child_keeps_its_stdout_is_not_waited_for(pool: sky.ComputePool) -> None:
    began = time.monotonic()
    value: Any = sky.cmd("sh", "-c", "sleep 300 & echo $!").with_options(output="capture") >> pool
    assert time.monotonic() - began < 60
    eventually(lambda: not Path(f"/proc/{int(value.output)}").exists(), 30, "the end of the child")


def test_a_cancelled_program_gets_sigterm_and_then_its_group_is_killed(pool: sky.ComputePool, tmp_path: Path) -> None:
    told_file = tmp_path / "told"
    future = sky.cmd("sh", "-c", POLITE, "sh", told_file).with_options(output="silent") > pool
    ready = tmp_path / "ready"
    hard = sky.cmd("sh", "-c", f"sh -c '{STUBBORN}' sh $1 & {STUBBORN}", "sh", ready).with_options(grace=0.3) > pool
    eventually(ready.exists, 30)
    eventually(lambda: len(processes_of(str(ready))) >= 2, 30)
    time.sleep(0.1)  # for the shell of `future` to set its trap
    future.cancel()
    hard.cancel()
    assert future.wait_stopped(30)
    assert told_file.read_text() == "told\n"
    assert hard.wait_stopped(30)
    eventually(lambda: processes_of(str(ready)) == [], 30)


def test_a_program_that_runs_too_long_is_ended(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.CallTimeout):
        sky.cmd("sleep", "98765").with_options(timeout=0.3) >> pool
    eventually(lambda: sleeping() == [], 30)


@pytest.mark.parametrize(
    ("words", "options", "why"),
    [
        ((5,), {}, r"the program of cmd\(\) must be text or a path, not 5; write str\(5\)"),
        (("echo", ["a"]), {}, r"write \*words"),
        (("",), {}, "takes the name of a program"),
        (("echo", "a\0b"), {}, "null character"),
        (("echo", "x" * 131_001), {}, "an argument of .* more than 131,000 bytes, which Linux refuses"),
        (("echo",), {"env": {"A": "x" * 131_001}}, "the value of A in env .* more than 131,000 bytes"),
        (("echo",), {"env": ["A"]}, "env must be a dict"),
        (("echo",), {"env": {"A=": "b"}}, "not the name of a variable"),
        (("echo",), {"env": {"A": 1}}, "the value of A in env"),
        (("echo",), {"cwd": 1}, r"cwd of cmd\(\) must be text"),
        (("echo",), {"check": "no"}, "check must be True or False"),
    ],
)
def test_an_argument_of_cmd_that_is_not_valid_is_refused(words: Any, options: Any, why: str) -> None:
    with pytest.raises(sky.UsageError, match=why):
        sky.cmd(*words, **options)


def test_a_program_can_run_without_a_pool() -> None:
    call = sky.cmd("sh", "-c", "exit 4", check=False)
    call.sent = True
    assert call.function.local(*call.args, **call.kwargs) == 4


def test_variables_of_the_node_are_put_into_a_command(pool: sky.ComputePool, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    told: Any = (
        sky.cmd("echo", "rank $RANK of ${WORLD_SIZE}: $$5", "$MINE", env={"MINE": "a $RANK"}, expand=True).with_options(
            procs=1, output="capture"
        )
        @ pool
    )
    assert [each.output for each in told] == [f"rank {rank} of 2: $5 a $RANK\n" for rank in range(2)]
    told = sky.cmd("pwd", env={"PLACE": str(tmp_path)}, cwd="$PLACE/here", expand=True).with_options(output="capture")
    assert (told >> pool).output == f"{tmp_path}/here\n"
    told = sky.cmd("echo", "$RANK", "a $ sign").with_options(output="capture") >> pool
    assert told.output == "$RANK a $ sign\n"
    with pytest.raises(sky.CommandFailed, match=r"the variable \$NOBODY_HAS_IT is not set there"):
        sky.cmd("echo", "$NOBODY_HAS_IT", expand=True) >> pool
    for words in (["echo", "5 $"], ["echo", "$(pwd)"], ["$1"]):
        with pytest.raises(sky.UsageError, match="dollar sign"):
            sky.cmd(*words, expand=True)


def test_a_program_runs_as_each_process_of_a_gang(pool: sky.ComputePool) -> None:
    ranks = sky.cmd("sh", "-c", "exit $RANK", check=False).with_options(procs=2) @ pool
    assert ranks == [0, 1, 2, 3]
    with pytest.raises(sky.CommandFailed, match="status 3"):
        sky.cmd("sh", "-c", "[ $RANK = 1 ] && exit 3; exec sleep 98765").with_options(procs=2, grace=1) @ pool
    eventually(lambda: sleeping() == [], 30)


# --- services ---------------------------------------------------------------------------------------------------


def test_a_service_takes_no_slot_and_does_not_hold_the_end_of_the_pool(tmp_path: Path) -> None:
    told: list[events.Event] = []
    said = tmp_path / "told"
    with sky.ComputePool(slots=1, console="off") as pool:
        pool.events.listen(told.append)
        services = [pool.service(sky.cmd("sh", "-c", POLITE, "sh", said)) for _ in range(3)]
        assert (pid_of_worker() >> pool) == (pid_of_worker() >> pool)
        eventually(lambda: all("up" in each.output for each in services), 30)
        busy = wait_for_file(str(tmp_path / "go")) > pool
        eventually(lambda: any(isinstance(each, events.NodeStatus) and each.busy for each in told), 30)
        (tmp_path / "go").touch()
        busy.result(30)
        statuses = [each for each in told if isinstance(each, events.NodeStatus)]
        assert {(each.busy, each.waiting) for each in statuses} <= {(0, 0), (1, 0)}
        assert all(each.is_running for each in services)
        assert {each.service for each in told if isinstance(each, events.Output)} == {"sh"}
        assert pool.services == services
    assert said.read_text() == "told\n"  # SIGTERM came before the end
    for service in services:
        assert service.wait(0)
        with pytest.raises(CancelledError):
            service.result()
    assert ends(told) == []
    with pytest.raises(sky.PoolClosed):
        pool.service(sky.cmd("true"))


def test_a_closed_service_leaves_no_process(pool: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with pool.service(forks(str(path)), node=1) as service:
        assert (service.node, service.name) == (1, "forks")
        eventually(lambda: "forked" in service.output, 30)
        eventually(lambda: len(sleeping()) == 3, 30)  # a shell prints before its child has become another program
    assert sleeping() == []
    assert service.wait(0)
    assert not service.is_running
    service.close()  # does nothing


def test_a_service_that_is_killed_leaves_no_process_and_is_told_once(
    pool: sky.ComputePool, told: list[events.Event], tmp_path: Path
) -> None:
    service = pool.service(forks(str(tmp_path / "pid")), name="forker")
    eventually(lambda: "forked" in service.output, 30)
    parent = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3]) for pid in sleeping()}
    for pid in parent & set(processes_of("skypool")):
        with contextlib.suppress(FileNotFoundError):  # one of the others has just ended
            if Path(f"/proc/{pid}/comm").read_text() == "skypool-worker\n":
                os.kill(pid, signal.SIGKILL)
    assert isinstance(service.exception(30), sky.WorkerDied)
    assert sleeping() == []
    with pytest.raises(sky.WorkerDied, match="the worker running forks on node 0 was killed by SIGKILL"):
        service.result()
    assert [(each.node, each.service, each.restarts, each.delay) for each in ends(told)] == [(0, "forker", False, None)]
    assert not [each for each in told if isinstance(each, events.CallFailed)]


def test_a_program_that_dies_ends_its_service(pool: sky.ComputePool, told: list[events.Event]) -> None:
    service = pool.service(sky.cmd("sh", "-c", "setsid sleep 98765 & echo gone wrong; exit 7"))
    error = service.exception(30)
    assert isinstance(error, sky.CommandFailed)
    assert error.returncode == 7
    assert error.tail == "gone wrong\n"
    assert sleeping() == []
    assert service.output == "gone wrong\n"
    assert [each.error.splitlines()[0] for each in ends(told)] == [f"CommandFailed: {str(error).splitlines()[0]}"]
    returned = pool.service(add(1, 2))
    assert returned.result(30) == 3
    assert ends(told)[-1].error == ""


def test_a_service_starts_again_as_often_as_it_may(
    pool: sky.ComputePool, told: list[events.Event], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    service = pool.service(sky.cmd("sh", "-c", "echo run >> $1; exit 1", "sh", log), restart=2)
    assert isinstance(service.exception(30), sky.CommandFailed)
    assert log.read_text() == "run\n" * 3
    assert service.restarts == 2
    assert [(each.restarts, each.delay) for each in ends(told)] == [(True, 0.5), (True, 1.0), (False, None)]


def test_a_service_that_waits_to_start_again_can_be_closed(pool: sky.ComputePool, told: list[events.Event]) -> None:
    service = pool.service(sky.cmd("false"), restart=True)
    eventually(lambda: ends(told), 30)
    service.close()
    with pytest.raises(CancelledError):
        service.result()
    time.sleep(0.6)  # the pause that was under way
    assert service.restarts == 0
    assert not service.is_running


def test_a_service_is_waited_for_until_its_port_answers(pool: sky.ComputePool, tmp_path: Path) -> None:
    port = free_port()
    serve = f"sleep 0.3; exec python -m http.server --bind 127.0.0.1 {port}"
    with pool.service(sky.cmd("sh", "-c", serve, cwd=tmp_path)) as service:
        assert service.wait_ready(port, "30s") is service
        with socket.create_connection(("127.0.0.1", port), timeout=30):
            pass
        with pytest.raises(sky.CallTimeout, match=r"service 'sh' on node 0 did not accept connections at port \d+"):
            service.wait_ready(free_port(), 0.3)
    early = pool.service(sky.cmd("sh", "-c", "sleep 0.2; exit 5"))
    with pytest.raises(sky.SkypoolError, match=r"service 'sh' ended before port \d+ of node 0 answered: .* status 5"):
        early.wait_ready(port)
    for wrong in (0, 70000, "80"):
        with pytest.raises(sky.UsageError):
            early.wait_ready(wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_service_on_every_node_knows_the_others(pool: sky.ComputePool) -> None:
    services = pool.service(world(), node="all")
    assert [each.node for each in services] == [0, 1]
    assert [each.result(30) for each in services] == [(0, 2, 2), (1, 2, 2)]
    chosen = pool.service(world().with_options(node=1))
    assert chosen.node == 1
    assert chosen.result(30) == (1, 2, 0)


@sky.compute
def world() -> tuple[int, int, int]:
    info = sky.instance_info()
    return info.node, info.nodes, len(info.addresses)


def test_what_cannot_be_a_service_is_refused(pool: sky.ComputePool) -> None:
    def items() -> Iterator[int]:
        yield 1

    with pytest.raises(sky.UsageError, match="generator function"):
        pool.service(sky.compute(items)())
    with pytest.raises(sky.UsageError, match="restart="):
        pool.service(add(1, 2).with_options(retries=1))
    with pytest.raises(sky.UsageError, match="capture"):
        pool.service(add(1, 2).with_options(output="capture"))
    with pytest.raises(sky.UsageError, match="no procs="):
        pool.service(add(1, 2).with_options(procs=2))
    with pytest.raises(sky.UsageError, match="pass sum a list"):
        pool.service(sky.compute(sum)(iter([1])))  # type: ignore[arg-type]
    with pytest.raises(sky.UsageError, match="has no node 9"):
        pool.service(add(1, 2), node=9)
    with pytest.raises(sky.UsageError, match="restart must be"):
        pool.service(add(1, 2), restart=-1)
    with pytest.raises(sky.UsageError, match="name must be"):
        pool.service(add(1, 2), name="")
    with pytest.raises(sky.UsageError, match="a pool runs calls"):
        pool.service(add)  # type: ignore[call-overload]


def test_services_are_refused_on_nodes_that_are_not_trusted() -> None:
    with sky.ComputePool(trust="data", console="off", slots=1) as pool:
        with pytest.raises(sky.UsageError, match="services run on trusted nodes only"):
            pool.service(sky.cmd("true"))
        with pytest.raises(sky.CommandFailed, match="status 3") as e:  # as a call it may run there
            sky.cmd("sh", "-c", "printf 'a\\033[2Jb'; exit 3") >> pool
        assert "\x1b" not in str(e.value)


@pytest.mark.slow
def test_a_service_prints_without_end_and_its_last_output_is_kept(pool: sky.ComputePool) -> None:
    script = "import sys\nfor n in range(200000):\n  print(f'{n:099d}', flush=n % 50 == 0)\nprint('the end')"
    service = pool.service(sky.cmd("python", "-c", script).with_options(output="show"))
    assert service.result(60) == 0
    assert service.output.endswith("the end\n")
    assert len(service.output) <= 64 << 10


def test_the_lines_of_a_service_have_its_name(
    pool: sky.ComputePool, told: list[events.Event], capfd: pytest.CaptureFixture[str]
) -> None:
    service = pool.service(sky.cmd("sh", "-c", "echo hello; sleep 98765"), name="web", node=1)
    eventually(lambda: "hello" in service.output, 30)
    service.close()
    printer = Printer()
    for event in told:
        printer.hear(event)
    printer.close()
    assert "[1 web] hello\n" in capfd.readouterr().out


def test_a_service_goes_on_while_the_connection_is_down(tmp_path: Path) -> None:
    told: list[events.Event] = []
    with sky.ComputePool(slots=1, console="off") as pool:
        pool.events.listen(told.append)
        before = pool.service(sky.cmd("sh", "-c", POLITE, "sh", tmp_path / "told"))
        eventually(lambda: "up" in before.output, 30)
        cut(link_of(pool))
        eventually(lambda: any(isinstance(each, events.LinkDown) for each in told), 30)
        during = pool.service(sky.cmd("sh", "-c", POLITE, "sh", tmp_path / "told"))
        eventually(lambda: "up" in during.output, 60)
        assert before.is_running
        assert before.restarts == 0
        before.close()
        assert (tmp_path / "told").read_text() == "told\n"


def test_a_service_of_a_retired_node_is_told_and_ends_before_its_machine(cloud: FakeCloud, tmp_path: Path) -> None:
    with Watched(cloud, nodes=2) as pool:
        service = pool.service(sky.cmd("sh", "-c", POLITE, "sh", tmp_path / "told"), node=1, restart=True)
        eventually(lambda: "up" in service.output, 30)
        pool.retire(1)
        assert isinstance(service.exception(60), errors.NodeRetired)
        assert (tmp_path / "told").read_text() == "told\n"
        eventually(lambda: pool.nodes[1] == "ended", 30)
        with pytest.raises((sky.UsageError, errors.NodeRetired)):
            pool.service(sky.cmd("true"), node=1)
        assert [each.restarts for each in pool.heard(events.ServiceEnded)] == [False]


# --- lost nodes and lost clients --------------------------------------------------------------------------------


@pytest.fixture
def cloud(tmp_path: Path) -> FakeCloud:
    return FakeCloud(tmp_path / "cloud", [Stock("small", usd_per_hour=1.0)])


@pytest.mark.slow
def test_a_service_whose_node_is_lost_ends_or_starts_on_the_next_node(cloud: FakeCloud, tmp_path: Path) -> None:
    with Watched(cloud, nodes=2, liveness=6.0) as pool:
        fixed = pool.service(sky.cmd("sh", "-c", POLITE, "sh", tmp_path / "told"), node=1, name="fixed")
        moving = pool.service(sky.cmd("sh", "-c", POLITE, "sh", tmp_path / "told"), node=1, name="moving", restart=True)
        eventually(lambda: "up" in fixed.output and "up" in moving.output, 30)
        pool.take(1)
        assert isinstance(fixed.exception(60), sky.ConnectionLost)
        eventually(lambda: moving.is_running and moving.node == 2 and moving.output.count("up") == 2, 60)
        assert moving.restarts == 1
        told = {each.service: (each.node, each.restarts, each.delay) for each in pool.heard(events.ServiceEnded)}
        assert told == {"fixed": (1, False, None), "moving": (1, True, None)}
        moving.close()


@pytest.mark.slow
def test_a_service_moves_with_a_node_that_its_provider_takes_back(cloud: FakeCloud, tmp_path: Path) -> None:
    with Watched(cloud, nodes=1) as pool:
        service = pool.service(sky.cmd("sh", "-c", POLITE, "sh", tmp_path / "told"), restart=True)
        eventually(lambda: "up" in service.output, 30)
        pool.notify(0, 60.0)
        eventually(lambda: service.node == 1 and service.output.count("up") == 2, 60)  # node 0 had no call to wait for
        assert service.restarts == 1
        assert (tmp_path / "told").read_text() == "told\n"


CLIENT = """
import os, sys, time
import skypool as sky

pool = sky.ComputePool(name=sys.argv[3], slots=1, lease=sys.argv[2], console="off")
pool.start()
ends = "trap '' TERM; echo up; while :; do sleep 0.1; done"
services = [pool.service(sky.cmd("sh", "-c", ends, "sh", sys.argv[1])) for _ in range(2)]
services.append(pool.service(sky.cmd("setsid", "sh", "-c", ends, "sh", sys.argv[1]), restart=True))
while not all(each.output for each in services):
    time.sleep(0.01)
print("all are up", flush=True)
time.sleep(3600)
"""


@contextlib.contextmanager
def client(mark: str, lease: str, name: str) -> Iterator[subprocess.Popen[str]]:
    """A program with a pool and three services whose command lines contain `mark`. It is killed at the end."""
    argv = [sys.executable, "-W", "ignore", "-c", CLIENT, mark, lease, name]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            lines = iter(program.stdout.readline, "")
            assert any("all are up" in line for line in lines)
            yield program
        finally:
            program.kill()


def test_services_of_a_client_that_is_killed_end_with_the_lease(tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    with client(mark, "2s", "killed") as program:
        assert len(processes_of(mark)) >= 3
        program.kill()
        program.wait(30)
        eventually(lambda: processes_of(mark) == [], 30, "the end of the services")
        eventually(lambda: nodes("killed") == [], 30, "the end of the node")


def test_services_end_with_the_program_that_started_them(tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    with client(mark, "60s", "ended") as program:
        program.terminate()
        program.wait(60)
    eventually(lambda: processes_of(mark) == [], 30, "the end of the services")


@pytest.mark.slow
def test_services_of_a_former_program_go_on_and_can_be_closed(tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    with client(mark, "60s", "former") as program:
        program.kill()
        program.wait(30)
    with sky.ComputePool.attach("former", console="off") as pool:
        assert pool.inherited == []
        assert sorted(each.name for each in pool.services) == ["setsid", "sh", "sh"]
        first, *_ = pool.services
        first.close(grace=0.1)
        assert len(pool.services) == 2
        assert add(1, 2) >> pool == 3
    eventually(lambda: processes_of(mark) == [], 30, "the end of the services")


def test_closing_from_several_threads_waits_in_each(pool: sky.ComputePool, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    service = pool.service(sky.cmd("sh", "-c", STUBBORN, "sh", ready))
    eventually(ready.exists, 30)
    threads = [threading.Thread(target=service.close, kwargs={"grace": 0.3}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert processes_of(str(ready)) == []
    assert service.wait(0)
