"""Images on machines of the lab: Debian packages, and disks that are full."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

import skypool as sky
from skypool.errors import BootstrapError, CapacityError, ConnectionLost
from skypool_images import Image
from tests.conftest import eventually, served
from tests.lab import repository
from tests.lab.machines import Lab, Machine
from tests.lab.repository import Package
from tests.test_image_script import Quiet, wheel

# --- a disk that is full -------------------------------------------------------------------------------------


@pytest.fixture
def small(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    """A machine with as small a disk as the health gate passes."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    machine = lab.machine(keys=[lab.public_key], disk=(1 << 30) + (256 << 20))
    yield machine
    machine.destroy()


def pool(machine: Machine, image: Image | None = None) -> sky.ComputePool:
    host = sky.Host(machine.address, host_key=machine.host_key)
    ssh = sky.SSH([host], user="root", identity=str(machine.lab.client_key))
    return sky.ComputePool(ssh, image=image, console="off")


def test_a_disk_that_is_full_when_a_host_is_taken_leaves_nothing_that_stands_in_the_way(small: Machine) -> None:
    small.run("mkdir -p /root/.skypool/pools")
    small.fill_disk()
    with pytest.raises((ConnectionLost, CapacityError), match=r"(?i)no space left|is its disk full\?"):
        pool(small).start()
    small.free_disk()
    with pool(small):
        pass


def test_a_claim_that_lost_its_words_stands_in_nobodys_way(small: Machine) -> None:
    small.run("mkdir -p /root/.skypool/pools/old.0; : > /root/.skypool/pools/old.0/claim")
    with pool(small):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("leave", [20_000, 80_000])
def test_what_does_not_fit_on_its_disk_is_told_and_arrives_whole_the_next_time(small: Machine, leave: int) -> None:
    image = Image(files={"data": os.urandom(60_000)}, run=["cat data | wc -c > ~/size #" + "x" * 9000])
    small.fill_disk(leave=leave)
    with pytest.raises(BootstrapError, match=r"the disk is full") as caught:
        pool(small, image).start()
    assert caught.value.step == "arrival"
    small.free_disk()
    with pool(small, image):
        assert small.path("/root/size").read_text() == "60000\n"


@pytest.mark.parametrize("end", ["exit 3", "true"])
@pytest.mark.slow
def test_a_step_that_fills_the_disk_is_told(small: Machine, end: str) -> None:
    image = Image(run=[f"head -c 2000000000 /dev/zero > /big; echo over; {end}", "touch /never"])
    said = made(small, image)
    assert "@advice the disk is full: ask for a larger disk, or install less\n" in said
    assert re.search(r"@fail run-[12] [1-9]", said)
    assert not small.path("/never").exists()


@pytest.mark.slow
def test_no_half_of_a_step_is_run(small: Machine) -> None:
    image = Image(run=["head -c 2000000000 /dev/zero > /big & wait; sleep 1", "touch /never\n#" + "x" * 20_000])
    said = made(small, image)
    assert "@done run-1\n" in said
    assert "@fail run-2 1 write /root/.skypool/boot/run-2.task\n" in said
    assert "@advice the disk is full" in said
    assert not small.path("/never").exists()


def made(machine: Machine, image: Image, **env: str) -> str:
    """What the image's script says on a machine."""
    exports = "".join(f"export {name}={value}\n" for name, value in env.items())
    script = f"export SKYPOOL_PYTHON=/usr/bin/python3\n{exports}{image.script()}"
    return machine.run("sh 2>&1", check=False, input=script, timeout=100).stdout


# --- an index that asks who is there -------------------------------------------------------------------------


class Private(Quiet):
    """Serves who gives the user and the password, as the server knows them."""

    def do_GET(self) -> None:
        if self.headers["Authorization"] == self.server.knows:  # type: ignore[attr-defined]  # set where it is made
            return super().do_GET()
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="ours"')
        self.end_headers()
        return None


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [True, False], ids=["index", "requirement"])
def test_a_private_index_gets_its_password_from_the_secrets(small: Machine, tmp_path: Path, by_name: bool) -> None:
    secret = f"it's $ecret-{os.urandom(8).hex()}" if by_name else os.urandom(8).hex()
    wheel(tmp_path / "index/skypool-odd", "skypool_odd", "1")
    with served(
        ThreadingHTTPServer((small.lab.gateway, 0), partial(Private, directory=str(tmp_path / "index")))
    ) as server:
        server.knows = "Basic " + b64encode(f"me:{secret}".encode()).decode()  # type: ignore[attr-defined]
        place = f"{small.lab.gateway}:{server.server_port}"
        if by_name:
            name = re.sub(r"\W", "_", place)
            secrets = {f"UV_INDEX_{name}_USERNAME": "me", f"UV_INDEX_{name}_PASSWORD": secret}
            image = Image(pip_indexes={f"http://{place}": ["skypool-odd"]}, secrets=secrets)
        else:
            url = f"http://me:${{TOKEN}}@{place}/skypool-odd/skypool_odd-1-py3-none-any.whl"
            image = Image(pip=f"skypool-odd @ {url}", secrets={"TOKEN": secret})
        with pool(small, image.run("sleep 1; python -c 'import skypool_odd'")):
            found = small.run(f"grep -rIlF {secret[-16:]} /root /home /tmp /var /etc /run 2> /dev/null", check=False)
            assert found.stdout == ""
            assert secret[-16:] not in small.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", check=False).stdout
        server.shutdown()


# --- Debian packages -----------------------------------------------------------------------------------------


PACKAGES = [
    Package("libodd0t64", "2.0", fields="Provides: libodd0 (= 2.0), libodd-any\n"),
    Package("tool", "1.0"),
    Package("tool", "2.0"),
    Package("slow", configure="touch /begun\n[ -e /quick ] || sleep 1000"),
]


@pytest.fixture
def shop(lab: Lab) -> Iterator[Machine]:
    """A machine whose apt knows PACKAGES."""
    machine = lab.machine()
    repository.unsigned(machine.path("/repository"), PACKAGES)
    machine.run("rm -rf /etc/apt/sources.list.d/* /var/lib/apt/lists/*_*")
    machine.path("/etc/apt/sources.list").write_text("deb [trusted=yes] file:/repository ./\n")
    yield machine
    machine.destroy()


@pytest.mark.parametrize("name", ["libodd0", "libodd-any", "libodd0=2.0"])
def test_a_package_that_another_one_provides_is_there(shop: Machine, name: str) -> None:
    said = made(shop, Image(apt=name))
    assert "@done apt\n" in said, said
    assert "libodd0t64 (2.0)" in said
    assert "@skip apt\n" in made(shop, Image(apt=name))
    shop.run("dpkg -r libodd0t64")
    assert "@done apt\n" in made(shop, Image(apt=name))


@pytest.mark.slow
def test_the_version_that_is_asked_for_is_installed_whichever_was_there(shop: Machine) -> None:
    for version in ("2.0", "1.0", "2.0"):
        said = made(shop, Image(apt=f"tool={version}"))
        assert "@done apt\n" in said, said
        assert shop.run("dpkg-query -W -f '${Version}' tool").stdout == version


def test_a_machine_that_lost_its_power_while_apt_ran_is_made_ready_by_the_next_start(shop: Machine) -> None:
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(made, shop, Image(apt="slow"))
        eventually(shop.path("/begun").exists, 60, "the configuration of the package")
        shop.kill()
        assert "@ready" not in running.result()
    shop.boot()
    shop.wait_for_ssh()
    shop.path("/quick").touch()
    said = made(shop, Image(apt=["slow", "tool"]))
    assert "@done apt\n" in said, said
    assert shop.run("dpkg --audit").stdout == ""


@pytest.mark.slow
def test_packages_that_are_provided_do_on_ones_own_machine(shop: Machine) -> None:
    made(shop, Image(apt="libodd0"))
    said = made(shop, Image(apt=["libodd-any", "libodd0"]), SKYPOOL_CHANGES="no")
    assert "@done apt\n" in said, said
    said = made(shop, Image(apt=["libodd-any", "tool"]), SKYPOOL_CHANGES="no")
    assert "@fail apt 1 apt-get install libodd-any tool\n" in said, said
