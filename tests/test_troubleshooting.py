"""docs/troubleshooting.md: every failure that it shows is made to happen here, and says what stands there.

    SKYPOOL_WRITE_DOCS=1 .venv/bin/pytest tests/test_troubleshooting.py

writes the page anew.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skypool as sky
from skypool import events
from tests.caches import with_zip
from tests.conftest import eventually
from tests.lab.machines import Lab, Machine

PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"
OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"
OTHER = "3.12" if sys.version_info[:2] != (3, 12) else "3.13"
INTRODUCTION = """# Troubleshooting

What to do when a machine does not get ready. Find the message below; `…` stands for what differs between machines.

A failed step shows the command, the last 30 lines that it printed, and what to do where that is known. The
exception's `step`, `command`, `status`, `tail` and `advice` have the same for programs. Nothing is left running, and no
call was sent. A pool of several machines goes on to the next one, and ends when two fail in the same words.

What providers refuse has pages of its own: [AWS](aws-errors.md), [Google Cloud](gcp-errors.md),
[RunPod](runpod-errors.md), [Vast.ai](vastai-errors.md), [Verda](verda-errors.md). What each error of skypool means, and
what to do, is in [the reference](reference/errors.md).

Every message here was really raised: `tests/test_troubleshooting.py` makes each of these failures happen and compares.
"""


@dataclass(frozen=True)
class Case:
    """A failure.

    Attributes:
        title: its heading, below `section`; code: what the user wrote. An image alone is that of a pool.
        cause: a sentence, where the message leaves something open.
        machine: which of the lab's machines is the "gpu1" of the code, "" for none.
        before: what was done to it; during: what is done to it while it is made ready; after: undoes it.
        told: whether the page has what the pool told of further attempts.
        within: the seconds in which it has to be told; far more than it takes where nothing waits.
    """

    section: str
    title: str
    code: str
    cause: str = ""
    machine: str = ""
    before: Callable[[Site, Machine], object] | None = None
    during: Callable[[Site, Machine], object] | None = None
    after: Callable[[Site, Machine], object] | None = None
    told: bool = False
    within: float = 120

    @property
    def shown(self) -> str:
        """The code as on the page."""
        if "pool =" in self.code:
            return f"{self.code}\npool.start()"
        provider = 'sky.SSH(["gpu1"]), ' if self.machine else ""
        return f"image = {self.code}\npool = sky.ComputePool({provider}image=image)\npool.start()"


def busy(site: Site, machine: Machine) -> None:
    """Another pool on it."""
    site.other = sky.ComputePool(site.provider(machine), name="training", console="off").start()


def without_network(site: Site, machine: Machine) -> None:
    """No way to any registry; and pauses take a tenth of their time."""
    machine.path("/etc/pip.conf").write_text("[global]\nindex-url = https://127.0.0.1:9/simple\n")
    machine.run("rm -rf /etc/apt/sources.list.d/* /var/lib/apt/lists/*_* /etc/apt/apt.conf.d/*proxy*; apt-get clean")
    machine.path("/etc/apt/sources.list").write_text("deb [trusted=yes] http://127.0.0.1:9/debian bookworm main\n")
    machine.path("/etc/apt/apt.conf.d/patience").write_text('Acquire::Retries::Delay "false";\n')
    program(machine, "sleep", 'exec /bin/sleep "$(awk "BEGIN{print $1/10}")"')
    program(machine, "uv", 'UV_HTTP_RETRIES=0 exec /usr/local/lib/uv "$@"')


def bare(machine: Machine) -> None:
    """No Python, no uv, no proxy and no package server of its own."""
    machine.run("rm -f /usr/local/bin/uv /etc/pip.conf /etc/xdg/pip/pip.conf /etc/apt/apt.conf.d/*proxy*")
    machine.run("rm -f /usr/bin/python3* /usr/local/bin/python3*; umount /root/.pyenv || true")


def nameless(site: Site, machine: Machine) -> None:
    """Nor a name server that answers, though there is a way out."""
    bare(machine)
    machine.path("/etc/resolv.conf").write_text("nameserver 127.0.0.1\n")
    machine.run(f"ip route replace default via {machine.lab.gateway}")


def isolated(site: Site, machine: Machine) -> None:
    """Nor a way out, but to who logs in."""
    bare(machine)
    machine.run('ip route del default || test -z "$(ip route show default)"')


def program(machine: Machine, name: str, script: str) -> None:
    file = machine.path(f"/usr/local/bin/{name}")
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def off(site: Site, machine: Machine) -> None:
    if machine.is_running:
        machine.kill()


def full(leave: int) -> Callable[[Site, Machine], object]:
    return lambda site, machine: machine.fill_disk(leave=leave)


def roomy(site: Site, machine: Machine) -> None:
    machine.free_disk()


def slow_make(site: Site, machine: Machine) -> None:
    if not machine.is_running:
        machine.boot()
        machine.wait_for_ssh()
    program(machine, "make", "exec sleep 100")


PATHS = "Local paths go from the image's `folder`, the current one unless it says otherwise."
GPU1 = 'sky.SSH(["gpu1"])'
CASES = [
    Case("Packages", "A package that does not exist", 'sky.Image(pip=["numpi-nope"])'),
    Case("Packages", "A version that does not exist", 'sky.Image(pip=["six==99.1"])'),
    Case("Packages", "Requirements that contradict each other", 'sky.Image(pip=["six==1.16.0", "six>=1.17"])'),
    Case(
        "Packages",
        "The package registry cannot be reached",
        'sky.Image(pip=["six"])',
        "A failure of the network is tried again three times, which the pool's events tell.",
        machine="offline",
        before=without_network,
        told=True,
    ),
    Case(
        "Packages",
        "No Python, and no way to the network",
        "sky.Image()",
        "This is known within seconds: a machine without a route is not asked again.",
        machine="isolated",
        before=isolated,
        within=20,
    ),
    Case(
        "Packages",
        "No Python, and no name server",
        "sky.Image()",
        machine="isolated",
        before=nameless,
        within=30,
    ),
    Case(
        "Packages",
        "A Debian package that does not exist",
        'sky.Image(apt=["skypool-nope"])',
        machine="shared",
    ),
    Case(
        "Packages",
        "The Debian mirror cannot be reached",
        'sky.Image(apt=["jq"])',
        machine="offline",
        before=without_network,
        told=True,
    ),
    Case(
        "Packages",
        "Debian packages on your own machine",
        'sky.Image(apt=["skypool-nope"])',
        "`Local` changes nothing outside of its own folder.",
    ),
    Case(
        "Packages",
        "No root and no sudo",
        'sky.Image(apt=["jq"])',
        machine="plain",
    ),
    Case("Your own part", "A command fails", 'sky.Image(run=["echo compiling; echo oh no >&2; exit 7"])'),
    Case("Your own part", "A file that is not there", 'sky.Image(files={"data.csv": "data/train.csv"})', PATHS),
    Case("Your own part", "A requirements file that is not there", 'sky.Image(requirements="requirements.txt")', PATHS),
    Case("Your own part", "A secret that is not set", 'sky.Image(secrets=["HF_TOKEN"])'),
    Case("Your own part", "A Python that does not exist", 'sky.Image(python="3.99")'),
    Case("Your own part", "Another Python than the client's", 'sky.Image(python="3.10")'),
    Case(
        "Your own part",
        "A node with another Python",
        f'pool = sky.ComputePool(sky.Local(python="python{OTHER}"))',
    ),
    Case(
        "The machine",
        "Its disk is full",
        'sky.Image(pip=["numpy"])',
        machine="small",
        before=full(8 << 20),
        after=roomy,
    ),
    Case(
        "The machine",
        "It has too little disk left to work",
        f"pool = sky.ComputePool({GPU1})",
        machine="small",
        before=full(600 << 20),
        after=roomy,
    ),
    Case(
        "The machine",
        "An accelerator that is not there",
        'pool = sky.ComputePool(sky.SSH([sky.Host("gpu1", accelerator="H100")]), accelerator="H100")',
        machine="shared",
    ),
    Case(
        "The machine",
        "It goes away while it is made ready",
        'sky.Image(run=["make all"])',
        machine="doomed",
        before=slow_make,
        during=off,
        cause="The pool takes another machine in its place; here there was none.",
    ),
    Case("Reaching it", "Nobody answers", f"pool = sky.ComputePool({GPU1})", machine="doomed", before=off),
    Case("Reaching it", "A name that nobody knows", 'pool = sky.ComputePool(sky.SSH(["gpu9.example.invalid"]))'),
    Case(
        "Reaching it",
        "Another host key",
        f'host = sky.Host("gpu1", host_key="{OTHER_KEY}")\npool = sky.ComputePool(sky.SSH([host]))',
        machine="shared",
    ),
    Case(
        "Reaching it",
        "The login is refused",
        'pool = sky.ComputePool(sky.SSH(["gpu1"], user="plain"))',
        machine="shared",
    ),
    Case(
        "Reaching it",
        "It serves another pool",
        f"pool = sky.ComputePool({GPU1})",
        machine="shared",
        before=busy,
        after=lambda site, machine: site.other.stop(),
    ),
]


class Site:
    """The machines, and what one user has: a key, an ssh configuration, an empty folder."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.folder, self.key = folder, folder / "id"
        self.other: sky.ComputePool = sky.ComputePool(console="off")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key], check=True)
        names = sorted({case.machine for case in CASES} - {""})
        with ThreadPoolExecutor() as boot:
            self.machines = dict(zip(names, boot.map(partial(self._boot, lab), names), strict=True))
        uv = self.uv()
        for name, place in (("offline", "lib"), ("small", "bin")):
            shutil.copy2(uv, self.machines[name].path(f"/usr/local/{place}/uv"))
        self.python()

    def _boot(self, lab: Lab, name: str) -> Machine:
        return lab.machine(keys=[Path(f"{self.key}.pub").read_text()], user="plain" if name == "plain" else "root")

    def python(self) -> None:
        """The other version of Python, as pythonX.Y on PATH, if this host has it."""
        (self.folder / "bin").mkdir()
        for each in [
            Path(f"/usr/bin/python{OTHER}"),
            *Path.home().glob(f".pyenv/versions/{OTHER}.*/bin/python{OTHER}"),
        ]:
            if each.exists():
                (self.folder / f"bin/python{OTHER}").symlink_to(each)
                return

    def uv(self) -> Path:
        """A uv of this host, which all that installs packages takes."""
        found = shutil.which("uv") or self.folder / "uv/bin/uv"
        if Path(found).exists():
            return Path(found)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(self.folder / "uv"), "uv"]
        subprocess.run(pip, check=True)
        return self.folder / "uv/bin/uv"

    def provider(self, machine: Machine) -> sky.SSH:
        """For another user of the machine."""
        host = sky.Host(machine.address, host_key=machine.host_key)
        return sky.SSH([host], user="root", identity=str(self.key))

    def ssh(self, case: Case) -> Callable[..., sky.SSH]:
        """`sky.SSH` of a user whose configuration calls the machine gpu1."""
        lines = ["Host *", f"  UserKnownHostsFile {self.folder}/known", f"  IdentityFile {self.key}"]
        if case.machine:
            machine = self.machines[case.machine]
            user = "plain" if case.machine == "plain" else "root"
            (self.folder / "known").write_text(f"{machine.address} {machine.host_key}\n")
            lines = ["Host gpu1", f"  HostName {machine.address}", f"  User {user}", *lines]
        (self.folder / "config").write_text("\n".join([*lines, "  IdentitiesOnly yes", ""]))
        return partial(sky.SSH, config=str(self.folder / "config"))

    def happened(self, case: Case) -> Happened:
        """Let it happen."""
        machine = self.machines.get(case.machine)
        names = {"Image": sky.Image, "Host": sky.Host, "Local": sky.Local, "SSH": self.ssh(case)}
        names["ComputePool"] = partial(sky.ComputePool, console="off")
        known: dict[str, Any] = {"sky": SimpleNamespace(**names)}
        told: list[events.Event] = []
        if case.before and machine:
            case.before(self, machine)
        try:
            made, _, _ = case.shown.rpartition("\n")
            exec(made, known)
            known["pool"].events.listen(told.append)
            with self._struck(case, machine, told):
                known["pool"].start()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
            return Happened(error, told)
        finally:
            if case.after and machine:
                case.after(self, machine)
        raise AssertionError(f"{case.title}: nothing failed")

    @contextlib.contextmanager
    def _struck(self, case: Case, machine: Machine | None, told: list[events.Event]) -> Iterator[None]:
        """While the machine is made ready, something happens to it."""
        if case.during is None or machine is None:
            yield
            return
        with ThreadPoolExecutor(1) as other:
            striking = other.submit(self._strike, case.during, machine, told)
            yield
            striking.result()

    def _strike(self, during: Callable[[Site, Machine], object], machine: Machine, told: list[events.Event]) -> None:
        eventually(lambda: "run-1" in [e.step for e in told if isinstance(e, events.BootstrapStep)], 30, "the command")
        eventually(lambda: machine.run("pgrep -f /local/bin/make", check=False).stdout, 30, "the command")
        during(self, machine)


@dataclass(frozen=True)
class Happened:
    """What was raised, and what was told before."""

    error: Exception
    told: list[events.Event] = field(repr=False)

    @property
    def retries(self) -> list[str]:
        """What was told of further attempts on the first node."""
        steps = [e for e in self.told if isinstance(e, events.BootstrapStep) and e.state == "retried"]
        return [f"{each.step}: {each.detail}" for each in steps if each.node == 0]


HERE = "{}.{}".format(*sys.version_info)
VARIES = [
    (r"\n {9,}(?=\S)", " "),
    (r"\n    cause: (Failed to extract|I/O operation).*", ""),
    (r"cause: failed to write to file .*: No space", "cause: failed to write to file …: No space"),
    (r"retries in [\d.]+s", "retries in … s"),
    (r"Connection (to \S+ )?(closed|reset) by .*", "Connection to … closed by remote host."),
    (r"runs Python (\d\.\d+)\.\d+", r"runs Python \1.…"),
    (r"(Python|python)" + re.escape(OTHER), r"\1…"),
    (r"\r", ""),  # of ssh
    (r"\bnode \d+\b", "node 0"),
    (r"^  (Get|Hit|Ign|Err):\d+ .*\n|^  (Fetched|WARNING: Location) .*\n|^  Using Python .* environment at: .*\n", ""),
    (r"^  (Resolved|Prepared|Installed|Downloading) .*\n", ""),
    (r"\S*/uv pip", "uv pip"),
    (r"\S*/envs/[0-9a-f]{12}", "…/envs/…"),
    (r"/\S*/skypool/ssh/", "…/"),
    (r"SHA256:[\w+/]+", "SHA256:…"),
    (r"\b10\.\d+\.\d+\.\d+\b", "…"),
    (r"(numpy[=-]*)\d[\w.]*\d", r"\1…"),
    (r"((Python|python|of) ?)" + re.escape(HERE) + r"(\.\d+)?", r"\g<1>3.11"),
    (r"\b\w+@[\w.-]+(?=\s*$)", "you@…"),
    (r"(?m)[ \t]+$", ""),
]


def normal(text: str) -> str:
    """Without what differs from run to run and from place to place."""
    for pattern, instead in VARIES:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text


def entry(case: Case, happened: Happened) -> str:
    parts = [f"### {case.title}", f"```python\n{case.shown}\n```"]
    if case.told:
        parts += ["The pool's events tell of further attempts:", "```\n" + "\n".join(happened.retries) + "\n```"]
    parts += [f"```\n{type(happened.error).__name__}: {normal(str(happened.error)).strip()}\n```"]
    return "\n\n".join([*parts, *([case.cause] if case.cause else [])])


@pytest.fixture(scope="module")
def site(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("user")
    site = Site(lab, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("XDG_CACHE_HOME", str(with_zip(folder / "cache")))
        patch.setenv("PATH", f"{folder}/bin:{site.uv().parent}:{os.environ['PATH']}")
        patch.delenv("HF_TOKEN", raising=False)
        yield site
    for machine in site.machines.values():
        machine.destroy()


@pytest.fixture(scope="module")
def page() -> Iterator[dict[str, str]]:
    """The entries of the page; those that a test puts there are written, if that was asked for."""
    text = PAGE.read_text() if PAGE.exists() else ""
    found = {
        each.partition("\n")[0]: f"### {each}".strip()
        for each in re.split(r"(?m)^### |^## .*\n", text)[1:]
        if each.strip()
    }
    yield found
    if os.environ.get("SKYPOOL_WRITE_DOCS") == "1":
        PAGE.write_text(written(found))


def written(entries: dict[str, str]) -> str:
    parts = [INTRODUCTION.strip()]
    for section, cases in groupby(CASES, lambda case: case.section):
        parts += [f"## {section}", *(entries[case.title] for case in cases if case.title in entries)]
    return "\n\n".join(parts) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_failure_says_what_the_page_says(case: Case, site: Site, page: dict[str, str]) -> None:
    if f"python{OTHER}" in case.code and not (site.folder / f"bin/python{OTHER}").exists():
        pytest.skip(f"there is no Python {OTHER} here")
    began = time.monotonic()
    made = entry(case, site.happened(case))
    assert time.monotonic() - began < case.within
    if os.environ.get("SKYPOOL_WRITE_DOCS") == "1":
        page[case.title] = made
    assert page.get(case.title) == made, "write it anew: see the top of this file"


def test_the_page_has_these_failures_and_nothing_else(page: dict[str, str]) -> None:
    if os.environ.get("SKYPOOL_WRITE_DOCS") == "1":
        pytest.skip("it is being written")
    assert [title for title in page if title not in {case.title for case in CASES}] == []
    assert PAGE.read_text() == written(page)
