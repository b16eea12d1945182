"""The lab itself: its machines are really booted, isolated and broken, and nothing of them is left behind."""

from __future__ import annotations

import base64
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from textwrap import dedent

import pytest

from tests.conftest import processes_of
from tests.lab import kernel, network, runs, userdata
from tests.lab.kernel import wait_until
from tests.lab.machines import SETUP, Lab, Machine, make_key
from tests.lab.userhost import UserHost
from tests.needs import SHELLCHECK
from tests.test_image_script import wheel


def ssh(machine: Machine, command: str, user: str = "root", within: float = 60) -> subprocess.CompletedProcess[str]:
    """What a user's ssh says; the host key is checked."""
    argv = [*machine.ssh_argv(user), command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=within, check=False)


# --- boot ----------------------------------------------------------------------------------------------------


def test_a_cloud_config_decides_the_host_key_the_files_and_the_commands(lab: Lab, tmp_path: Path) -> None:
    key = make_key(tmp_path / "host")
    packed = base64.b64encode(b"\x00\xff").decode()
    private = "".join(f"    {line}\n" for line in key.read_text().splitlines())
    user_data = dedent(
        """\
        #cloud-config
        ssh_authorized_keys: ["{authorized}"]
        write_files:
        - {{path: /opt/deep/plain, content: "text\\n", permissions: "0750", owner: "ubuntu:ubuntu"}}
        - {{path: /opt/deep/packed, content: {packed}, encoding: b64}}
        runcmd:
        - echo "first $(cat /opt/deep/plain)" >> /root/order
        - [sh, -c, 'echo "second $HOME" >> "$0"', /root/order]
        - "false"
        - until [ -e /root/go-on ]; do sleep 0.05; done
        - echo third >> /root/order
        ssh_keys:
          ed25519_public: "{public}"
          ed25519_private: |
        """
    ).format(
        authorized=lab.public_key, packed=packed, public=key.with_suffix(".pub").read_text().strip()
    )  # fmt: skip
    machine = lab.machine(user_data=user_data + private)
    expected = " ".join(key.with_suffix(".pub").read_text().split()[:2])
    assert machine.host_key == expected
    assert ssh(machine, "echo in").stdout == "in\n"  # while its commands still run
    machine.path("/root/go-on").touch()
    assert machine.wait_booted() == 0
    assert machine.path("/root/order").read_text() == "first text\nsecond \nthird\n"
    assert machine.path("/opt/deep/packed").read_bytes() == b"\x00\xff"
    assert machine.run("stat -c '%a %U' /opt/deep/plain").stdout == "750 ubuntu\n"
    assert [path.name for path in machine.path("/etc/ssh").glob("ssh_host_*_key")] == ["ssh_host_ed25519_key"]
    machine.destroy()


def test_a_script_runs_as_root_and_its_end_is_told(lab: Lab) -> None:
    machine = lab.machine(user_data="#!/bin/bash\nid -un\necho $WORD\nexit 3\n", env={"WORD": "hello"})
    assert machine.wait_booted() == 3
    assert "root\nhello\n" in machine.console()
    machine.destroy()


def test_user_data_that_the_lab_does_not_know_is_refused(lab: Lab) -> None:
    with pytest.raises(ValueError, match="does not know packages"):
        lab.machine(user_data="#cloud-config\npackages: [jq]\n")
    with pytest.raises(ValueError, match="neither"):
        lab.machine(user_data="echo hello")
    assert userdata.plan("", hostname="a", user="root", keys=[], start="", env={})["script"] == ""


def test_a_container_runs_its_start_command_alone_and_ends_with_it(lab: Lab) -> None:
    start = "mkdir -p /run/sshd; /usr/sbin/sshd; echo $WORD > /root/word; until [ -e /root/end ]; do sleep 0.05; done"
    machine = lab.machine(start=start, env={"WORD": "hello"}, keys=[lab.public_key])
    assert ssh(machine, "cat /root/word").stdout == "hello\n"
    machine.path("/root/end").touch()
    assert machine.wait_off() == "start command ended with 0"
    machine.destroy()


def test_another_user_has_the_key_and_root_says_who(lab: Lab) -> None:
    machine = lab.machine(user="ubuntu", keys=[lab.public_key])
    assert ssh(machine, "sudo id -un", user="ubuntu").stdout == "root\n"
    assert ssh(machine, "true", user="plain").returncode == 255
    with subprocess.Popen([*machine.ssh_argv(), "true"], stdout=subprocess.PIPE, text=True) as asked:
        assert asked.stdout is not None
        assert 'rather than the user "root"' in asked.stdout.readline()
        asked.kill()
    assert machine.run(["sudo", "-n", "true"], user="plain", check=False).returncode == 1
    machine.destroy()


def test_a_machine_is_alone_with_itself(lab: Lab, machine: Machine) -> None:
    assert machine.run("ls -d /proc/[0-9]* | wc -l").stdout.strip().isdigit()
    assert int(machine.run("ls -d /proc/[0-9]* | wc -l").stdout) < 10
    assert machine.run("hostname").stdout == f"{machine.name}\n"
    assert not machine.path("/work").exists()
    assert str(lab.run.folder) not in machine.run("cut -d' ' -f2 /proc/mounts").stdout
    machine.run("mkdir /mnt/inside && mount -t tmpfs inside /mnt/inside")
    assert "inside" not in Path("/proc/mounts").read_text()
    other = lab.machine()
    assert machine.host_key != other.host_key
    assert machine.run(["bash", "-c", f"head -c 4 < /dev/tcp/{other.address}/22"]).stdout == "SSH-"
    other.destroy()


def test_a_server_of_the_test_is_reached_at_the_gateway(lab: Lab, machine: Machine) -> None:
    with socket.create_server((lab.gateway, 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        asked = pool.submit(machine.run, ["bash", "-c", f"cat < /dev/tcp/{lab.gateway}/{port}"])
        connection, (peer, _) = server.accept()
        with connection:
            connection.sendall(b"hello")
        assert peer == machine.address
        assert asked.result().stdout == "hello"


@pytest.mark.slow
def test_packages_install_as_on_the_host(machine: Machine) -> None:
    machine.run("DEBIAN_FRONTEND=noninteractive apt-get install -qq -y jq")
    assert machine.run("echo '{\"a\": 1}' | jq .a").stdout == "1\n"
    machine.run("python3 -m venv /opt/v && /opt/v/bin/pip install -q cloudpickle", user="root")
    assert machine.run(["/opt/v/bin/python", "-c", "import cloudpickle, sys; print(sys.version_info[:2])"]).stdout


@pytest.fixture
def visible() -> Iterator[Path]:
    """A folder that machines see, too. `tmp_path` may lie in /dev/shm, and each machine has a /dev of its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.lab
def test_pip_reads_on_a_machine_what_its_settings_on_the_host_name(
    visible: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("1", "2", "3"):
        wheel(visible / "wheels", "skypool_odd", version)
    (visible / "settings").mkdir()
    (visible / "settings/constraints.txt").write_text("-c more.txt\nskypool-odd<3\n")
    (visible / "settings/more.txt").write_text("skypool-odd!=2\n")
    (visible / "pip.conf").write_text(f"[global]\nno-index = true\n[download]\nfind-links = {visible}/wheels\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(visible / "pip.conf"))
    monkeypatch.setenv("PIP_CONSTRAINT", str(visible / "settings/constraints.txt"))
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    with Lab() as lab:
        machine = lab.machine(env={})
        machine.run(["python3", "-m", "pip", "download", "-q", "--no-deps", "-d", "/tmp/got", "skypool-odd"])
        assert machine.run(["ls", "/tmp/got"]).stdout == "skypool_odd-1-py3-none-any.whl\n"


# --- the end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["poweroff", "shutdown -h now", "halt", "reboot", "sudo shutdown -P now"])
def test_a_command_from_inside_ends_it(lab: Lab, command: str) -> None:
    machine = lab.machine(user="ubuntu", keys=[lab.public_key], env={})
    assert machine.run("/sbin/poweroff", user="plain", check=False).returncode == 1
    ssh(machine, command if command.startswith("sudo") else f"sudo {command}", user="ubuntu")
    assert machine.wait_off() == command.removeprefix("sudo ")
    assert not kernel.processes_in_netns(network.NETNS / f"{lab.run.tag}-{machine.number}")
    assert machine.path("/etc/hostname").read_text() == f"{machine.name}\n"  # its disk can still be read
    machine.boot()
    machine.wait_for_ssh()
    machine.destroy()


def test_a_later_shutdown_can_be_cancelled_and_outlives_its_session(lab: Lab) -> None:
    machine = lab.machine(keys=[lab.public_key], minute=1.0)
    machine.run("shutdown -h +10")
    machine.run("shutdown -c")
    assert not machine.path("/run/systemd/shutdown/scheduled").exists()
    began = time.monotonic()
    assert ssh(machine, "shutdown -h +3").returncode == 0
    assert machine.is_running
    assert machine.wait_off() == "shutdown -h +3"
    assert time.monotonic() - began > 2.8
    machine.destroy()


def test_a_power_cut_ends_everything_at_once(machine: Machine) -> None:
    machine.run("setsid sleep 1000 > /dev/null 2>&1 &")
    wait_until(lambda: "sleep" in machine.processes().values(), 30, "the child")
    machine.freeze()
    machine.kill()
    assert not machine.is_running
    assert machine.poweroff_reason == "killed by the lab"
    wait_until(lambda: not machine.processes(), 30, "the end of its processes")


# --- broken --------------------------------------------------------------------------------------------------


def test_a_cut_line_is_silent_and_can_be_mended(machine: Machine) -> None:
    with socket.create_connection((machine.address, 22), timeout=30) as connection:
        connection.recv(100)
        connection.settimeout(1)
        machine.cut()
        connection.sendall(b"SSH-2.0-test\r\n")
        with pytest.raises(TimeoutError):
            connection.recv(1)
        with pytest.raises(TimeoutError):
            socket.create_connection((machine.address, 22), timeout=1.5)
        assert machine.run("sleep 0.1; echo alive").stdout == "alive\n"
        machine.mend()
        connection.settimeout(30)
        assert connection.recv(1)  # what was lost is sent again
    assert ssh(machine, "echo back").stdout == "back\n"


def test_frozen_processes_stand_still(machine: Machine) -> None:
    machine.run("setsid sh -c 'while true; do date +%N > /root/now; sleep 0.01; done' > /dev/null 2>&1 &")
    now = machine.path("/root/now")
    wait_until(now.exists, 30, "the first beat")
    with machine.frozen():
        before = now.read_text()
        time.sleep(0.2)  # twenty beats' time
        assert now.read_text() == before
        with pytest.raises(TimeoutError), socket.create_connection((machine.address, 22), timeout=0.5) as connection:
            connection.recv(4)
        assert machine.is_running
    wait_until(lambda: now.read_text() not in ("", before), 30, "the next beat")


def test_sshd_dies_with_its_sessions_and_comes_back(machine: Machine) -> None:
    with subprocess.Popen([*machine.ssh_argv(), "echo on; sleep 100"], stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        assert session.stdout.readline() == "on\n"
        machine.kill_sshd()
        assert session.wait(30) == 255
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((machine.address, 22), timeout=30)
    machine.start_sshd()
    assert ssh(machine, "echo back").stdout == "back\n"


def test_a_full_disk_is_full(machine: Machine) -> None:
    machine.fill_disk(leave=2**20)
    assert "No space left" in machine.run("head -c 2M /dev/zero > /var/tmp/two", check=False).stderr
    machine.free_disk()
    machine.run("head -c 2M /dev/zero > /var/tmp/two")


def test_memory_has_an_end(lab: Lab) -> None:
    machine = lab.machine(memory=200 * 2**20)
    hog = machine.run(["python3", "-c", "len(bytearray(400 * 2**20))"], check=False)
    assert hog.returncode in (137, -9)
    assert machine.is_running
    machine.destroy()


# --- metadata ------------------------------------------------------------------------------------------------


def test_metadata_is_there_at_boot_and_knows_who_asks(lab: Lab) -> None:
    def service(machine: Machine) -> type[BaseHTTPRequestHandler]:
        class Service(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = f"{machine.name} {self.path}".encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        return Service

    ask = "#!/bin/sh\ncurl -sf http://169.254.169.254/latest/id > /root/answer\n"
    machines = [lab.machine(user_data=ask, metadata=service, wait=False) for _ in range(2)]
    for machine in machines:
        assert machine.wait_booted() == 0
        assert machine.path("/root/answer").read_text() == f"{machine.name} /latest/id"
    machines[0].stop_metadata()
    assert machines[0].run("curl -sf -m 2 http://169.254.169.254/", check=False).returncode == 7
    for machine in machines:
        machine.destroy()


# --- many, and nothing left ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_fifty_machines_at_once(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        machines = list(pool.map(lambda _: lab.machine(keys=[lab.public_key]), range(50)))
        booted = time.monotonic() - began
        names = list(pool.map(lambda machine: ssh(machine, "hostname").stdout.strip(), machines))
        reached = time.monotonic() - began
        list(pool.map(Machine.destroy, machines))
    assert names == [machine.name for machine in machines]
    assert len({machine.address for machine in machines}) == 50
    with capsys.disabled():
        ended = time.monotonic() - began
        print(f"\n50 machines: sshd up after {booted:.1f} s, all reached {reached:.1f} s, destroyed {ended:.1f} s")
    assert reached < 60


def traces(tag: str) -> list[str]:
    """What is on the host that belongs to a run."""
    found = [f"netns {path.name}" for path in network.NETNS.glob(f"{tag}-*")]
    found += [f"device {path.name}" for path in Path("/sys/class/net").glob(f"{tag}*")]
    found += [f"device {path.name}" for path in Path("/sys/class/net").glob(f"{tag.replace('lab-', 'lv')}-*")]
    found += [f"mount {path}" for path in kernel.mounts_below(runs.place() / "runs" / tag.removeprefix("lab-"))]
    found += [f"rule {line}" for line in network.rules() if tag in line]
    found += [f"group {group.name}" for group in kernel.groups(f"{tag}-")]
    return found + [f"process {pid}" for pid in processes_of(f"/runs/{tag.removeprefix('lab-')}")]


OWNER = """
import sys, time
from tests.lab.machines import Lab
lab = Lab()
made = [lab.machine(), lab.machine()]
made[0].cut()
print(lab.run.tag, flush=True)
time.sleep(100)
"""


def test_a_run_that_is_killed_leaves_nothing_once_another_lab_begins(lab: Lab) -> None:
    argv = [sys.executable, "-c", OWNER]
    owner = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    assert owner.stdout is not None
    tag = owner.stdout.readline().strip()
    kinds = {line.split()[0] for line in traces(tag)}
    assert kinds == {"netns", "device", "mount", "rule", "group", "process"}
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not any(line.startswith("process") for line in traces(tag)), 30, "the end of its machines")
    with Lab() as another:
        assert traces(tag) == []
        assert not (runs.place() / "runs" / tag.removeprefix("lab-")).exists()
        assert lab.run.folder.exists()
        assert another.gateway != lab.gateway
    assert traces(another.run.tag) == []


def test_setting_up_again_is_quick_also_at_the_same_time(lab: Lab) -> None:
    racers = [subprocess.Popen([SETUP]) for _ in range(2)]
    assert [racer.wait(30) for racer in racers] == [0, 0]  # a root alone takes a minute
    scripts = [SETUP, *(SETUP.parent / "inside" / name for name in ("launch", "power"))]
    subprocess.run([SHELLCHECK, *scripts], check=True)


# --- without root --------------------------------------------------------------------------------------------


@pytest.mark.needs("sshd")
def test_a_user_host_is_reached_by_ssh(tmp_path: Path) -> None:
    key = make_key(tmp_path / "client")
    with UserHost(keys=[key.with_suffix(".pub").read_text().strip()]) as host:
        trust = ["-o", f"UserKnownHostsFile={host.known_hosts()}", "-o", "StrictHostKeyChecking=yes"]
        argv = ["ssh", "-F", "none", "-o", "BatchMode=yes", *trust, "-o", "IdentitiesOnly=yes", "-i", str(key)]
        target = ["-p", str(host.port), f"{host.user}@{host.address}"]
        done = subprocess.run([*argv, *target, "echo in"], capture_output=True, text=True, check=False)
        assert done.stdout == "in\n", host.console()
        host.kill_sshd()
        assert not host.is_running
    assert not host.folder.exists()
