"""What a machine is told at its boot, followed by real ones: they end themselves, and not before."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from skypool.drivers import userdata
from skypool.drivers.userdata import GUARD
from skypool.model import Need, Order
from skypool.wire import host_keys, transport
from skypool.wire.keys import Keys
from tests.lab.kernel import wait_until
from tests.lab.machines import Lab, Machine
from tests.needs import SHELLCHECK

LEASE = 6.0
LATE = 8.0
"""Seconds that an end may be late: the guard of so short a lease looks each second, on a host that may be busy."""
ASKS = f"""n=0; while echo asked; do n=$((n + 1)); printf '%-31s\\n' "$n {LEASE:.0f}" 1<> {GUARD}; sleep 0.3; done"""


@pytest.fixture(scope="module", autouse=True)
def keys() -> Iterator[Keys]:
    keys = Keys.of("train")
    yield keys
    keys.forget()


def order(lease: float = LEASE, lifetime: float | None = None, token: str = "abc-1-0") -> Order:
    return Order("train", token, (0,), Need(), lease=lease, lifetime=lifetime)


class Ward:
    """Machines that have just been booted with what they are told."""

    def __init__(self, lab: Lab, keys: Keys) -> None:
        self.lab, self.keys = lab, keys
        self.machines: list[Machine] = []

    def boot(self, *, user: str = "ubuntu", end: str = userdata.OFF, start: bool = False, **asked: Any) -> Machine:
        told = order(**asked)
        if start:
            machine = self.lab.machine(start=userdata.start_script(told, end=end))
        else:
            machine = self.lab.machine(user_data=userdata.cloud_config(told, user=user, end=end), user=user)
        self.machines.append(machine)
        return machine

    def ssh(self, machine: Machine, command: str, user: str = "ubuntu") -> list[str]:
        """The local command that runs one there: with the pool's own key, believing its host key and no other."""
        bare = transport.SSH(machine.address, user=user, identity=self.keys.identity, config="none")
        return host_keys.declared(bare, "lab", self.keys.host("abc-1-0")[1]).argv(["sh", "-c", command])

    def asking(self, machine: Machine, user: str = "ubuntu") -> subprocess.Popen[str]:
        """A client that is there, until it is killed."""
        asks = subprocess.Popen(
            self.ssh(machine, ASKS, user), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert asks.stdout is not None
        assert asks.stdout.readline() == "asked\n", asks.communicate()
        return asks


@pytest.fixture
def ward(lab: Lab, keys: Keys) -> Iterator[Ward]:
    ward = Ward(lab, keys)
    yield ward
    for machine in ward.machines:
        machine.destroy()


def seconds_until_off(machine: Machine, within: float = 60.0) -> float:
    began = time.monotonic()
    machine.wait_off(within)
    return time.monotonic() - began


def all_at_once(jobs: dict[str, Callable[[], float]]) -> dict[str, float]:
    with ThreadPoolExecutor(len(jobs)) as threads:
        return dict(zip(jobs, threads.map(lambda job: job(), jobs.values()), strict=True))


# --- what is said --------------------------------------------------------------------------------------------


@pytest.mark.needs("openssh")
def test_user_data_is_cloud_config_that_arms_the_guard_before_anything_else(keys: Keys) -> None:
    text = userdata.cloud_config(order(lease=600, lifetime=3600.5), user="ubuntu")
    assert text.startswith("#cloud-config\n")
    config = yaml.safe_load(text)
    assert next(iter(config)) == "bootcmd"  # cloud-init runs these first, and at every boot
    shell, option, arm = config["bootcmd"][0]
    assert (shell, option) == ("sh", "-c")
    for setting in ("TOKEN=abc-1-0", "LEASE=600", "LIFETIME=3600", "POLL=5", "WHO=ubuntu", "OFF=yes"):
        assert f"\n{setting}\n" in arm.replace("guard='", "\n")
    private, public = keys.host("abc-1-0")
    assert config["ssh_keys"] == {"ed25519_private": private, "ed25519_public": public}
    assert config["ssh_deletekeys"] is True
    assert config["ssh_authorized_keys"] == [keys.public]
    assert config["disable_root"] is True
    assert yaml.safe_load(userdata.cloud_config(order(), user="root"))["disable_root"] is False
    assert set(config) == {"bootcmd", "ssh_keys", "ssh_deletekeys", "ssh_authorized_keys", "disable_root"}


@pytest.mark.needs("openssh")
def test_user_data_leaves_half_of_its_room() -> None:
    longest = order(token="a" * 64)
    assert len(userdata.cloud_config(longest, user="ubuntu").encode()) < 10_000  # of 16,384
    assert len(userdata.start_script(longest, end="shutdown -P now").encode()) < 10_000


@pytest.mark.needs("openssh")
def test_the_only_secret_is_the_machines_own_host_key(keys: Keys) -> None:
    for text in (
        userdata.cloud_config(order(), user="ubuntu").replace("\\n", "\n"),
        userdata.start_script(order(), end="kill 1"),
    ):
        found = re.findall(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", text, re.DOTALL)
        assert found == [keys.host("abc-1-0")[0].strip()]
        assert Path(keys.identity).read_text().splitlines()[3] not in text


@pytest.mark.needs("openssh")
def test_another_label_is_another_host_key(keys: Keys) -> None:
    text = userdata.cloud_config(order(), user="root", label="abc-1-0.7")
    assert yaml.safe_load(text)["ssh_keys"]["ed25519_public"] == keys.host("abc-1-0.7")[1] != keys.host("abc-1-0")[1]


@pytest.mark.needs("openssh")
def test_a_packed_script_runs_as_it_is_and_those_it_starts_do_not_see_it() -> None:
    script = userdata.start_script(order(), end="kill 1")
    assert len(userdata.packed(script)) < 0.7 * len(script)
    assert userdata.packed(script) == userdata.packed(script)
    text = "said='a  \"b\" é \\n $HOME'\nprintf '%s\\n' \"$said\"\nenv | grep START\necho after"
    told = {"PATH": os.environ["PATH"], "SKYPOOL_START": userdata.packed(text)}
    done = subprocess.run(["sh", "-c", userdata.UNPACK], env=told, capture_output=True, text=True)
    assert done.stdout.splitlines() == ['a  "b" é \\n $HOME', "after"], done


@pytest.mark.needs("openssh")
@pytest.mark.parametrize(
    ("lease", "lifetime", "told"),
    [
        (1.5, None, "LEASE=2 LIFETIME=0 POLL=1"),
        (60, 30, "LEASE=60 LIFETIME=30 POLL=3"),
        (600, 0.2, "LEASE=600 LIFETIME=1 POLL=5"),
    ],
)
def test_times_are_whole_seconds_and_short_leases_are_looked_at_often(
    lease: float, lifetime: float | None, told: str
) -> None:
    text = userdata.cloud_config(order(lease, lifetime), user="root")
    assert told in text.replace("\\n", " ")


def before_arming(script: str) -> str:
    """Return what sets $guard, without what starts it: that would end the machine on which the tests run."""
    text, arming, _ = script.partition("umask 077\nmachine=none")
    assert arming
    return text


@pytest.mark.needs("openssh")
def test_shellcheck_finds_nothing_in_what_runs(tmp_path: Path) -> None:
    config = yaml.safe_load(userdata.cloud_config(order(), user="ubuntu", end="echo 'it is over'; poweroff"))
    texts = [*(words[2] for words in config["bootcmd"]), userdata.start_script(order(), end="kill 1")]
    texts.append(userdata.boot_script(order()))
    guard = subprocess.run(
        ["sh", "-c", before_arming(config["bootcmd"][0][2]) + 'printf "%s" "$guard"'],
        capture_output=True,
        text=True,
        check=True,
    )
    for number, text in enumerate([*texts, guard.stdout]):
        (tmp_path / f"{number}.sh").write_text(text)
    allowed = "--exclude=SC2016,SC2034,SC2089,SC2090,SC2154"  # settings in one script are used in another
    command = [str(SHELLCHECK), "-s", "sh", allowed, *map(str, sorted(tmp_path.glob("*.sh")))]
    assert subprocess.run(command, capture_output=True, text=True).stdout == ""


# --- the machine's own end -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_machine_whose_client_never_comes_ends_itself(ward: Ward) -> None:
    took = all_at_once(
        {
            "a machine": lambda: seconds_until_off(ward.boot()),
            "root's": lambda: seconds_until_off(ward.boot(user="root")),
            "a container": lambda: seconds_until_off(ward.boot(start=True)),
        }
    )
    assert all(LEASE - 2 < seconds < LEASE + LATE for seconds in took.values()), took
    assert {machine.poweroff_reason for machine in ward.machines} == {"shutdown -P now"}


@pytest.mark.parametrize("start", [False, True])
def test_the_pools_key_opens_it_and_it_has_the_host_key_it_was_given(ward: Ward, start: bool) -> None:
    machine, user = ward.boot(start=start, lease=60), "root" if start else "ubuntu"
    done = subprocess.run(ward.ssh(machine, "whoami", user), capture_output=True, text=True)
    assert done.stdout == f"{user}\n", done.stderr
    told = machine.run("/usr/sbin/sshd -T | grep -i clientalive; ps -ef | grep '[s]shd.*listener'").stdout
    assert "clientaliveinterval 15" in told or "ClientAliveInterval=15" in told
    assert machine.host_key == " ".join(ward.keys.host("abc-1-0")[1].split()[:2])


def test_a_machine_whose_sshd_is_up_before_its_script_gets_its_host_key_and_its_end(ward: Ward, lab: Lab) -> None:
    machine = lab.machine(user_data=userdata.boot_script(order()), user="root")
    ward.machines.append(machine)
    assert machine.wait_booted() == 0
    argv = ward.ssh(machine, f"whoami; cat {GUARD}", "root")
    said = ""

    def answers() -> bool:  # sshd starts itself anew
        nonlocal said
        said = subprocess.run(argv, capture_output=True, text=True).stdout
        return said.startswith("root\nnobody has asked")

    wait_until(answers, LEASE, "an answer of the machine with its own host key")
    assert machine.wait_off(LEASE + LATE) == "shutdown -P now"


F = GUARD
CHANGES_NOTHING = {
    "garbage": f"head -c 100000 /dev/urandom > {F}",
    "words": f"echo live for ever > {F}",
    "huge": f"head -c 50000000 /dev/zero | tr '\\0' 1 > {F}",
    "one number": f"echo 99 > {F}",
    "three numbers": f"echo 1 2 3 > {F}",
    "too large a number": f"echo 1 99999999999999999999 > {F}",
    "another base": f"echo 1 0x7fff > {F}; sleep 1.5; echo 2 0777 > {F}",
    "less than nothing": f"echo 1 -5 > {F}",
    "code": f"echo '1 a[$(touch /tmp/ran)]' > {F}; sleep 1.5; echo '1 $(touch${{IFS}}/tmp/ran)' > {F}",
    "nothing": f"rm {F}",
    "a folder": f"until rm -rf {F} && mkdir -p {F}/full/of; do :; done",  # the guard makes the file again meanwhile
    "a link": f"ln -s /dev/zero {F}.new; mv -f {F}.new {F}",
    "a pipe": f"mkfifo {F}.new; mv -f {F}.new {F}",
    "another's": f"chown plain {F}; chmod 600 {F}",
    "no room": "mount -t tmpfs -o ro none /run/skypool",
    "no room to keep": "mount -t tmpfs -o ro none /var/lib/skypool",
}


@pytest.mark.slow
def test_whatever_lies_in_the_file_neither_prolongs_nor_shortens_a_machines_life(ward: Ward) -> None:
    def life(spoil: str) -> float:
        machine = ward.boot()
        began = time.monotonic()
        wait_until(machine.path(F).exists, LEASE, "the guard's file")
        machine.run(spoil)
        machine.wait_off()
        took = time.monotonic() - began
        assert not machine.path("/tmp/ran").exists()
        if "/var/lib" not in spoil:
            assert kept(machine)[1] == f"{LEASE + 1:.0f}", "something was granted"
        return took

    took = all_at_once({what: lambda spoil=spoil: life(spoil) for what, spoil in CHANGES_NOTHING.items()})  # type: ignore[misc]
    assert {what: s for what, s in took.items() if not LEASE - 2 < s < LEASE + LATE} == {}


def test_no_word_grants_more_than_a_lease_and_the_last_one_counts(ward: Ward) -> None:
    def life(word: str, lease: float) -> float:
        machine = ward.boot(lease=lease)
        began = time.monotonic()
        subprocess.run(ward.ssh(machine, f"echo {word} > {F}"), check=True)
        machine.wait_off()
        return time.monotonic() - began

    took = all_at_once(
        {
            "too much": lambda: life("1 999999999", LEASE),
            "a second": lambda: life("1 1", 60),
            "none": lambda: life("1 0", 60),
        }
    )
    assert LEASE - 1 < took["too much"] < LEASE + 1 + LATE
    assert max(took["a second"], took["none"]) < 1 + LATE


@pytest.mark.slow
def test_a_machine_whose_client_asks_on_lives_on_whatever_happens_to_the_file_and_the_disk(ward: Ward) -> None:
    def life(machine: Machine, user: str) -> float:
        asking = ward.asking(machine, user)
        machine.fill_disk()
        for spoil in (
            "true",
            f"rm {F}",
            f"head -c 100000 /dev/urandom > {F}; chown plain {F}",
            f"mkfifo {F}.new; mv -f {F}.new {F}",
        ):
            machine.run(spoil)  # the client writes the file at the same time: nothing here may need that it is away
            time.sleep(LEASE * 0.6)  # not for luck: all in all more than two leases
        assert machine.is_running
        assert asking.poll() is None
        asking.kill()
        asking.communicate()
        return seconds_until_off(machine)

    took = all_at_once(
        {
            "a machine": lambda: life(ward.boot(), "ubuntu"),
            "a container": lambda: life(ward.boot(start=True), "root"),
        }
    )
    assert all(seconds < LEASE + LATE for seconds in took.values()), took


def test_nothing_asked_for_goes_beyond_the_lifetime(ward: Ward) -> None:
    machine = ward.boot(lifetime=7)
    asking = ward.asking(machine)
    assert 4 < seconds_until_off(machine) < 7 + LATE
    asking.kill()
    asking.communicate()


def kept(machine: Machine) -> list[str]:
    """Return the words of the state that the guard keeps. It makes the file first, and writes into it then."""
    file = machine.path("/var/lib/skypool/lived")
    wait_until(lambda: file.exists() and file.read_text().strip(), 10, "what the guard keeps")
    return file.read_text().split()


def test_a_machine_that_is_booted_again_goes_on_with_the_life_it_had(ward: Ward) -> None:
    machine = ward.boot(lease=20, lifetime=7)
    time.sleep(3)  # not for luck: it lives
    machine.kill()
    machine.boot()
    assert seconds_until_off(machine) < 4 + LATE
    # the guard does not wait for the disk, so the end may come before the last second is written
    assert int(kept(machine)[0]) >= 7 - 1


def test_where_the_count_of_seconds_begins_anew_a_boot_counts_for_a_minute_at_most(ward: Ward) -> None:
    machine = ward.boot(lease=200, lifetime=100)
    kept(machine)
    machine.kill()
    lived, until, now, _, token = kept(machine)
    assert (int(lived) < 10, until, token) == (True, "100", "abc-1-0")
    machine.path("/var/lib/skypool/lived").write_text(f"36 100 {now} another-boot {token}\n")
    machine.boot()
    assert 2 < seconds_until_off(machine) < 4 + LATE  # 100 - 36 - 60


@pytest.mark.slow
def test_a_written_end_holds_across_a_reboot_whoever_asks_for_more(ward: Ward) -> None:
    machine = ward.boot(lease=100)
    end, held = machine.path("/run/skypool/end"), machine.path("/run/skypool/held")
    wait_until(end.exists, LEASE, "the file for a request")
    heir = "ab" * 32
    for serial, seconds in ((1, 75), (2, 9000)):
        write = f"printf '%-127s\\n' '{serial} {seconds} {heir} {serial}' 1<> /run/skypool/end"
        subprocess.run(ward.ssh(machine, write), check=True)
        wait_until(lambda word=f"{serial} ": held.exists() and held.read_text().startswith(word), 30, "an answer")  # type: ignore[misc]
    assert subprocess.run(ward.ssh(machine, "rm -f /var/lib/skypool/end /run/skypool/end 2> /dev/null")).returncode
    machine.kill()
    kept_end, kept_heir, _ = machine.path("/var/lib/skypool/end").read_text().split()
    assert (int(kept_end) <= 75 + LATE, kept_heir) == (True, heir)
    lived, until, now, _, token = kept(machine)
    machine.path("/var/lib/skypool/lived").write_text(f"{lived} {until} {now} another-boot {token}\n")
    machine.boot()
    machine.wait_for_ssh()
    asking = ward.asking(machine)
    assert 1 < seconds_until_off(machine) < 15 + LATE  # a boot counts for a minute
    asking.kill()
    asking.communicate()


@pytest.mark.slow
def test_who_lost_count_has_one_lease_more_and_a_copied_disk_begins_anew(ward: Ward) -> None:
    def life(state: str) -> float:
        machine = ward.boot(lease=8, lifetime=24)  # a client must be there before the lease is over
        kept(machine)
        machine.kill()
        machine.path("/var/lib/skypool/lived").write_text(state)
        machine.boot()
        machine.wait_for_ssh()
        asking = ward.asking(machine)
        took = seconds_until_off(machine)
        asking.kill()
        asking.communicate()
        return took

    states = {"garbage": "\0\0\0\0", "nothing": "", "another's": "9 9 9 here xyz-9-9\n"}
    took = all_at_once({what: lambda state=state: life(state) for what, state in states.items()})  # type: ignore[misc]
    assert max(took["garbage"], took["nothing"]) < 8 + LATE
    assert 18 < took["another's"] < 24 + LATE


def test_neither_kill_nor_a_broken_service_manager_disarms_the_guard(ward: Ward) -> None:
    def killed() -> float:
        machine = ward.boot()
        # a process that was killed is there until it has run once more; what the guard has forked has its name, too
        guards = "pgrep -P \"$(pgrep -o -f 'skypool-guard agai[n]$')\" -f 'skypool-guar[d]$'"
        wait_until(lambda: machine.run(guards, check=False).stdout, 30, "the guard")
        first = machine.run(guards).stdout
        machine.run("pkill -9 -u ubuntu; pkill -9 -f 'skypool-guar[d]$'", check=False)
        wait_until(lambda: machine.run(guards, check=False).stdout not in ("", first), 30, "another one")
        machine.run("pkill -9 -f 'skypool-guard agai[n]$'")
        return seconds_until_off(machine)

    def broken() -> float:
        machine = ward.lab.machine()
        ward.machines.append(machine)
        stub = '#!/bin/sh\necho "$@" >> /root/systemctl\n[ $1 != restart ]\n'
        machine.path("/usr/bin/systemctl").write_text(stub)
        machine.run("chmod +x /usr/bin/systemctl; mkdir -p /run/systemd/system")
        arm = yaml.safe_load(userdata.cloud_config(order(), user="root"))["bootcmd"][0]
        machine.run(arm)
        assert machine.path("/root/systemctl").read_text() == "daemon-reload\nrestart skypool-guard.service\n"
        unit = machine.path("/etc/systemd/system/skypool-guard.service").read_text()
        assert "\nRestart=always\n" in unit
        assert "\nDefaultDependencies=no\n" in unit  # else it would wait for the boot that waits for it
        return seconds_until_off(machine)

    took = all_at_once({"killed": killed, "broken": broken})
    assert all(seconds < LEASE + LATE for seconds in took.values()), took


@pytest.mark.slow
def test_an_end_that_fails_is_tried_again_and_harder_where_it_is_to_switch_off(ward: Ward) -> None:
    def harder() -> float:
        machine = ward.boot(end="shutdown --in-vain", lease=2)
        took = seconds_until_off(machine)
        assert machine.poweroff_reason == "poweroff -f"
        return took

    def again() -> float:
        end = "echo tried >> /root/tried; test $(grep -c . /root/tried) -lt 7 || halt"
        machine = ward.boot(end=end, lease=2)
        took = seconds_until_off(machine)
        assert machine.poweroff_reason == "halt"  # not switched off before: what ends its cost could not be tried again
        return took

    took = all_at_once({"harder": harder, "again": again})
    assert all(4 < seconds < 8 + 2 * LATE for seconds in took.values()), took


def test_on_a_copy_of_another_machines_disk_its_guard_waits_for_its_own_arming(machine: Machine) -> None:
    arm = yaml.safe_load(userdata.cloud_config(order(lease=1), user="root"))["bootcmd"][0][2]
    text = before_arming(arm) + 'guard="MACHINE=another\n$guard"\ntimeout 3 sh -c "$guard"'
    assert machine.run(text, check=False).returncode == 124
    assert machine.is_running
    assert not machine.path(GUARD).exists()
