"""Container: a Docker daemon of this run's own, and an image of the lab's root file system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import accelerators
from skypool.errors import AccessError, CapacityError, LaunchError, ProviderError, UsageError
from skypool.model import Instance, Need, Offer, Order
from skypool.testing import DriverContract
from skypool_container import Container
from tests.conftest import eventually, served
from tests.lab import docker as lab_docker
from tests.lab.docker import Docker
from tests.lab.image_registry import ImageRegistry
from tests.lab.work import serve_a_page
from tests.needs import lacking, skip_or_fail
from tests.providers.on_nodes import fail, where
from tests.test_cli_shell import typed
from tests.test_forward import answers

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    if reason := lacking("docker"):
        skip_or_fail(reason)
    with Docker() as daemon:
        daemon.import_root()
        yield daemon


@pytest.fixture
def there(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Docker]:
    """The daemon that the docker program talks to; afterwards it has no container."""
    for name, value in docker.environment.items():
        monkeypatch.setenv(name, value)
    yield docker
    assert docker.docker("ps", "-aq").stdout == ""


def container(**more: Any) -> Container:
    return Container(**{"image": lab_docker.IMAGE, "network": "none", **more})


def pool(driver: Container, **more: Any) -> sky.ComputePool:
    more.setdefault("console", "off")
    return sky.ComputePool(driver, **more)


def ordered(driver: Container, nodes: tuple[int, ...] = (0,), **more: Any) -> tuple[Offer, Order]:
    return next(iter(driver.offers(Need()))), Order("p", more.pop("token", "t"), nodes, Need(), **more)


pytestmark = pytest.mark.container


# --- the whole life ------------------------------------------------------------------------------------------


def test_a_pool_lives_and_ends_in_two_containers(there: Docker, capfd: pytest.CaptureFixture[str]) -> None:
    driver = container()
    with pool(driver, nodes=2, name="life", console="plain") as p:
        assert where("hi") @ p == ["/root", "/root"]
        names = p.submit(os.uname).result().nodename, os.uname().nodename
        assert names[0] != names[1]
        with pytest.raises(KeyError, match="my own"):
            fail() >> p
        assert list(p.map(abs, range(-50, 0))) == list(range(50, 0, -1))
        assert sorted((i.node, i.state) for i in driver.instances(pool="life")) == [(0, "running"), (1, "running")]
        assert driver.instances(pool="another") == []
        assert len(driver.instances()) == 2
    assert driver.instances() == []
    assert "said hi" in capfd.readouterr().out


def test_files_go_to_a_container_and_come_back(there: Docker, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "file").write_bytes(bytes(range(256)) * 10_000)
    with pool(container()) as p:
        assert p.push(source, "there").files == 1
        assert p.submit(os.path.getsize, "there/sub/file").result() == 2_560_000
        p.pull("there", tmp_path / "back")
    assert (tmp_path / "back" / "sub" / "file").read_bytes() == (source / "sub" / "file").read_bytes()


def test_a_terminal_in_a_container(there: Docker) -> None:
    with pool(container(), name="inside"):
        shown = typed("echo $(pwd) at $(tty)\nexit\n", "inside")
    assert "skypool/work at /dev/pts/" in shown


@pytest.mark.slow
def test_its_limits_are_seen_inside(there: Docker) -> None:
    data = Path(tempfile.mkdtemp(dir="/tmp"))  # tmp_path is below a folder that is private to us
    data.chmod(0o777)
    (data / "note").write_text("from outside")
    driver = container(memory="512m", shm="32m", volumes={str(data): "/data:ro"}, user="1000:1000", cpus=0.5)
    with pool(driver) as p:
        assert p.submit(os.getuid).result() == 1000
        assert p.submit(os.getcwd).result() == "/tmp/skypool/work"
        shm = p.submit(os.statvfs, "/dev/shm").result()
        assert shm.f_blocks * shm.f_frsize == 32 << 20
        assert p.submit(Path("/data/note").read_text).result() == "from outside"
        with pytest.raises(OSError, match="Read-only"):
            p.submit(Path("/data/new").write_text, "x").result()
        [node] = driver.instances()
        limits = there.docker("inspect", "--format={{.HostConfig.Memory}} {{.HostConfig.NanoCpus}}", node.id).stdout
        assert limits.split() == [str(512 << 20), "500000000"]
        with pytest.raises(sky.WorkerDied):
            p.submit(bytearray, 1 << 30).result()
    shutil.rmtree(data)


# --- the end -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_no_container_when_its_lease_is_over(there: Docker) -> None:
    code = f"""
        import skypool as sky, time
        driver = sky.Container(image={lab_docker.IMAGE!r}, network="none")
        pool = sky.ComputePool(driver, name="orphan", lease=5, liveness=5, console="off").start()
        print("ready", flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, cwd=ROOT) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"ready\n"
        client.kill()
    assert [each.pool for each in container().instances()] == ["orphan"]
    eventually(lambda: container().instances() == [], 30, "the end of the container")


def test_a_volume_is_the_folder_of_this_machine_however_it_is_written(
    there: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("data", "more"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    driver = container(volumes={"data": "/here", "~/more": "/there:ro"})
    [instance] = driver.launch(*ordered(driver))
    assert there.docker("exec", instance.id, "ls", "/here", "/there").stdout.split() == [
        "/here:", "data", "/there:", "more"
    ]  # fmt: skip
    driver.terminate([instance])
    assert there.docker("volume", "ls", "-q").stdout == ""


def test_a_container_ends_itself_at_the_deadline(there: Docker) -> None:
    driver = container()
    driver.launch(*ordered(driver, lifetime=3.0))
    assert len(driver.instances(pool="p")) == 1
    eventually(lambda: driver.instances() == [], 30, "the end of the container")


def test_a_launch_that_is_repeated_starts_nothing_more_and_an_end_is_quiet_for_the_gone(there: Docker) -> None:
    driver = container()
    first = driver.launch(*ordered(driver, (0, 1)))
    again = driver.launch(*ordered(driver, (0, 1)))
    assert [each.id for each in again] == [each.id for each in first]
    driver.terminate(first[:1])
    driver.terminate(first)
    assert driver.instances() == []


def test_a_pool_of_the_same_name_of_another_user_is_neither_seen_nor_ended(
    there: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = container()
    [mine] = driver.launch(*ordered(driver))
    with monkeypatch.context() as another:
        another.setenv("LOGNAME", "somebody")
        [theirs] = driver.launch(*ordered(driver, token="u"))
        assert [each.id for each in driver.instances(pool="p")] == [theirs.id]
    assert [each.id for each in driver.instances(pool="p")] == [mine.id]
    driver.terminate([mine, theirs])


def test_orphans_in_a_container_are_reaped(there: Docker) -> None:
    driver = container()
    [node] = driver.launch(*ordered(driver))
    there.docker("exec", node.id, "sh", "-c", "(sleep 0.1 &)")
    dead = ["exec", node.id, "sh", "-c", "grep -l '^State:.Z' /proc/[0-9]*/status"]
    left = ["exec", node.id, "sh", "-c", "cat /proc/[0-9]*/comm | grep -c sleep"]
    eventually(lambda: there.docker(*left).stdout.strip() == "1", 30, "the end of the orphan")  # the other is our own
    eventually(lambda: there.docker(*dead, check=False).stdout == "", 30, "its burial")
    driver.terminate([node])


def test_all_containers_are_started_or_none(there: Docker) -> None:
    class Second(Container):
        def _gpus(self, program: tuple[str, ...], asked: Any) -> list[str]:
            if self._found(program, "skypool.pool"):
                raise CapacityError("no more", provider="container")
            return []

    driver = Second(image=lab_docker.IMAGE, network="none")
    with pytest.raises(CapacityError, match="no more"):
        driver.launch(*ordered(driver, (0, 1)))
    assert driver.instances() == []


# --- what can be wrong ---------------------------------------------------------------------------------------


def test_no_such_image_says_so(there: Docker) -> None:
    with pytest.raises((LaunchError, AccessError), match=r"no container of localhost:9/nosuch:1 can be started"):
        pool(container(image="localhost:9/nosuch:1")).start()


@pytest.mark.slow
def test_an_image_that_is_not_there_is_downloaded(there: Docker, tmp_path: Path) -> None:
    there.docker("save", "--output", str(tmp_path / "image.tar"), lab_docker.IMAGE)
    with tarfile.open(tmp_path / "image.tar") as file:
        file.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 has it
        file.extractall(tmp_path / "image")
    with served(ImageRegistry(tmp_path / "image")) as registry:
        name = f"127.0.0.1:{registry.server_address[1]}/base:1"
        try:
            with pool(container(image=name)) as p:
                assert p.submit(os.getpid).result() > 0
            before = len(registry.asked)
            assert any("/manifests/" in path for path in registry.asked)  # its layers are there
            with pool(container(image=name)) as p:  # it is there now
                assert p.submit(os.getpid).result() > 0
            assert len(registry.asked) == before
        finally:
            there.docker("rmi", "--force", name, check=False)


def test_a_daemon_that_hangs_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, _ = program(tmp_path, run="exec sleep 60")
    monkeypatch.setattr("skypool_container._START", 0.2)
    driver = Container(image="x", runtime=runtime)
    with pytest.raises(ProviderError, match=r"docker run` did not end within 0.2 s; check that the service of "):
        driver.launch(*ordered(driver))


def test_an_images_own_base_comes_first(there: Docker) -> None:
    asked = sky.Image(base={"container": "localhost:9/base:1"})
    with pytest.raises((LaunchError, AccessError), match=r"no container of localhost:9/base:1 can be started"):
        pool(container(), image=asked).start()


@pytest.mark.needs("docker")
def test_a_daemon_that_does_not_run_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/sock")
    with pytest.raises(UsageError, match="the daemon is not running: `sudo systemctl start docker`"):
        pool(container(runtime="docker")).start()


@pytest.mark.slow
def test_gc_goes_on_without_a_daemon_that_does_not_run(tmp_path: Path) -> None:
    words = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
    program(tmp_path, ps=f'echo "{words}" >&2; exit 1')
    env = {"PATH": f"{tmp_path}:{os.defpath}", "HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
    argv = [sys.executable, "-m", "skypool", "gc"]
    done = subprocess.run(argv, cwd=ROOT, env={**env, "NO_GCE_CHECK": "true"}, capture_output=True, text=True)
    assert "not asked: container: docker does not answer: the daemon is not running" in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([*argv, "--provider", "container"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1, "it was asked for"


SAYS = """#!/bin/sh
echo "$*" >> {log}
case $1 in
    ps) {ps} ;;
    run) {run}; echo "{said}" >&2; exit 125 ;;
esac
"""


def program(folder: Path, said: str = "", ps: str = "true", run: str = "true") -> tuple[str, Path]:
    """A container program that refuses."""
    file, log = folder / "docker", folder / "log"
    file.write_text(SAYS.format(log=log, said=said, ps=ps, run=run))
    file.chmod(0o755)
    return str(file), log


@pytest.mark.parametrize(
    ("said", "kind", "advice"),
    [
        ("manifest for python:9 not found: manifest unknown", LaunchError, "there is no such image"),
        ("pull access denied for x, repository does not exist", AccessError, "login` first"),
        ("could not select device driver with capabilities: [[gpu]]", LaunchError, "NVIDIA Container Toolkit"),
        ("write /x: no space left on device", CapacityError, "system prune"),
        ("dial tcp: lookup registry: no such host", LaunchError, "registry cannot be reached"),
        ("something else", LaunchError, "something else"),
    ],
)
def test_what_the_program_says_is_translated(tmp_path: Path, said: str, kind: type[Exception], advice: str) -> None:
    driver = Container(image="x", runtime=program(tmp_path, said)[0])
    with pytest.raises(kind, match=advice):
        driver.launch(*ordered(driver))


def test_a_socket_that_may_not_be_used_is_an_access_error(tmp_path: Path) -> None:
    words = "permission denied while trying to connect to the Docker daemon socket"
    runtime, _ = program(tmp_path, ps=f'echo "{words}" >&2; exit 1')
    with pytest.raises(AccessError, match="usermod -aG docker"):
        Container(runtime=runtime).offers(Need())


def test_no_program_at_all_is_told_of() -> None:
    with pytest.raises(UsageError, match="the program no-such-docker is not installed here: install Docker or podman"):
        Container(runtime="no-such-docker").offers(Need())


def test_each_container_has_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from skypool import devices

    h100 = [devices.Device("cuda", i, "NVIDIA H100 80GB HBM3", 81559, pin=str(i)) for i in range(4)]
    monkeypatch.setattr(devices, "detect", lambda: tuple(h100))
    monkeypatch.setattr(devices, "accelerators", lambda: (accelerators.parse("H100-80GB-SXM:4"),))

    class Recorded(Container):
        def _found(self, program: tuple[str, ...], *labels: str) -> list[Instance]:
            used = [{"program": program, "gpus": ["0", "2"]}] if labels == ("skypool.gpus",) else []
            return [Instance("container", "i", "other", 0, detail=each) for each in used]

    runtime, log = program(tmp_path, "stop here")
    driver = Recorded(image="x", gpus=2, runtime=runtime)
    [offer] = driver.offers(Need())
    assert str(offer.accelerator) == str(accelerators.parse("H100-80GB-SXM:2"))
    with pytest.raises(LaunchError):
        driver.launch(offer, Order("p", "t", (0,), Need()))
    assert '--gpus="device=1,3"' in log.read_text()
    with pytest.raises(CapacityError, match="needs 3 GPUs, but only 2 of this machine's 4 GPUs are free"):
        Recorded(image="x", gpus=3, runtime=runtime).launch(offer, Order("p", "t", (0,), Need()))


untyped: Any = Container


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Container(gpus=0), "gpus must be 'all', a number of at least 1"),
        (lambda: Container(memory="four"), "memory must be a size such as '4g'"),
        (
            lambda: Container(options="--rm -x"),
            r"a list of words, not one text; write options=\['--rm', '-x'\]",
        ),
        (lambda: Container(volumes={"/data": "data"}), "must be an absolute path in the container"),
        (lambda: Container(image="-v"), "image must be a word"),
        (lambda: Container(cpus=0), "cpus must be a number above 0"),
        (lambda: untyped(cpus=[2]), r"cpus must be a number, not \[2\]"),
        (lambda: untyped(runtime=7), "runtime must be a program such as .*, not 7"),
        (lambda: untyped(options=[7]), "options must be a list of words"),
        (lambda: untyped(volumes=["/data"]), "volumes must map folders of this machine"),
        (lambda: untyped(volumes={"/data": 7}), "must be an absolute path in the container"),
    ],
)
def test_what_cannot_be_meant_is_refused_where_it_is_written(made: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        made()


def test_a_port_of_a_container_without_a_network_is_reached_from_here(there: Docker) -> None:
    with pool(container()) as made:
        running = serve_a_page(8265) > made
        with made.forward(8265) as forward:
            eventually(lambda: answers(forward.url), 60, "the page")
        running.cancel()


# --- the contract --------------------------------------------------------------------------------------------


class Daemon:
    """What runs there, whatever the driver says."""

    def __init__(self, docker: Docker) -> None:
        self._docker = docker

    def count(self) -> int:
        return len(self._docker.docker("ps", "-aq").stdout.split())

    def kill(self, instance: Instance) -> None:
        self._docker.docker("rm", "-f", instance.id)


class TestContainer(DriverContract):
    @pytest.fixture
    def driver(self, there: Docker) -> Container:
        return container()

    @pytest.fixture
    def control(self, there: Docker) -> Daemon:
        return Daemon(there)
