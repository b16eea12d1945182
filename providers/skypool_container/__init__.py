"""Container: containers on this machine, or wherever the docker or podman program takes us; they cost nothing.

A container ends itself: when its agent has ended, when nobody came for 15 minutes, and at the pool's deadline.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import ClassVar, Literal

from skypool import devices
from skypool.accelerators import Accelerator
from skypool.drivers import settings
from skypool.drivers.contract import Abilities
from skypool.errors import (
    AccessError,
    CapacityError,
    LaunchError,
    ProviderError,
    SkypoolError,
    StillRunning,
    UsageError,
)
from skypool.model import Access, Instance, Need, Offer, Order
from skypool.processes import host_name
from skypool.wire.transport import Exec

_PROGRAMS = (("docker",), ("podman",))
_HOME = "/tmp/skypool"
_PATIENCE = 30.0
_PULL = 1800.0
_starting = threading.Lock()
_SIZE = re.compile(r"\d+(\.\d+)?[bkmgBKMG]?")


@settings.settings_named
@dataclass(frozen=True)
class Container:
    """Run in containers, by the docker or podman program.

    Args:
        image: what they are made from; None is this client's python:X.Y-slim. An Image's base= comes first.
        runtime: the program, or its words, such as ["podman", "--remote"]; None takes docker, or else podman.
        gpus: how many a container gets for itself, "all" for all of them shared by all, or None.
        cpus: how many a container may use; memory, shm: such as "4g": of it all, and of /dev/shm.
        volumes: folders of this machine and where they are there: {"/data": "/data"}, or "/data:ro" for reading only.
        network, user: as the program takes them; None leaves them to it and to the image.
        options: more words for `run`.

    Raises:
        UsageError: a value that cannot mean anything.
    """

    image: str | None = None
    runtime: str | Sequence[str] | None = None
    gpus: int | str | None = None
    cpus: float | None = None
    memory: str | None = None
    shm: str | None = None
    volumes: Mapping[str, str] = field(default_factory=dict)
    network: str | None = None
    user: str | None = None
    options: Sequence[str] = ()
    name: ClassVar[str] = "container"
    abilities: ClassVar[Abilities] = Abilities(private_network=True)

    def __post_init__(self) -> None:
        settings.plain(self, cpus=float)
        if isinstance(self.options, str):
            raise UsageError(f"options is a list of words: options={shlex.split(self.options)!r}")
        runtime = [self.runtime or "docker"] if isinstance(self.runtime, (str, type(None))) else self.runtime
        for name, words, like in (("options", self.options, "--ipc=host"), ("runtime", runtime, "podman")):
            if not isinstance(words, (list, tuple)) or not all(isinstance(each, str) and each for each in words):
                raise UsageError(f"{name} is a list of words, such as [{like!r}], not {words!r}")
        if not isinstance(self.volumes, Mapping):
            raise UsageError(f"volumes maps folders here to those there, such as {{'/a': '/a'}}, not {self.volumes!r}")
        if self.gpus is not None and self.gpus != "all" and (type(self.gpus) is not int or self.gpus < 1):
            raise UsageError(f"gpus is 'all', a number from 1, or None, not {self.gpus!r}")
        if self.cpus is not None and not self.cpus > 0:
            raise UsageError(f"cpus is a number above 0, not {self.cpus!r}")
        for name in ("memory", "shm"):
            size = getattr(self, name)
            if size is not None and not (isinstance(size, str) and _SIZE.fullmatch(size)):
                raise UsageError(f"{name} is a size such as '4g' or '512m', not {size!r}")
        for here, there in self.volumes.items():
            if not isinstance(there, str) or not there.startswith("/"):
                raise UsageError(f"volumes[{here!r}] is a path in the container, which begins with '/', not {there!r}")
        for name in ("image", "network", "user"):
            word = getattr(self, name)
            if word is not None and (not isinstance(word, str) or not re.fullmatch(r"[^\s-]\S*", word)):
                raise UsageError(f"{name} is a word, not {word!r}")

    # --- the verbs -------------------------------------------------------------------------------------------

    def offers(self, need: Need) -> Iterable[Offer]:
        """Containers here, for nothing; with this machine's accelerators if they are to have any.

        Raises:
            AccessError, ProviderError: no container program answers; what to do about it.
        """
        program = self._program()
        base = Offer(provider=self.name, instance_type=self._image(need), region="", detail={"program": program})
        have = [self._share(each) for each in devices.accelerators()] if self.gpus is not None else []
        return [replace(base, accelerator=each) for each in have] or [base]

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Start a container for each node; one that this order has started before is taken as it is.

        Raises:
            AccessError, LaunchError: what the program said, and what to do about it.
        """
        program = offer.detail["program"]
        found = self._found(program, f"skypool.token={order.token}")
        there = {each.rank: replace(each, offer=offer) for each in found}
        try:
            for rank in order.ranks:
                if rank not in there:
                    with _starting:  # who has which GPU is seen when its container runs
                        there[rank] = self._start(program, offer, order, rank)
        except SkypoolError:
            self.terminate(list(there.values()))  # all or none
            raise
        return [there[rank] for rank in order.ranks]

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Every container of this user's pools, by its labels."""
        label = f"skypool.owner={getpass.getuser()}" if pool is None else f"skypool.pool={pool}"
        return self._found(self._program(), label)

    def access(self, instance: Instance) -> Access:
        """`exec` in the container."""
        folder = f"{_HOME}/pools/{instance.pool}.{instance.rank}"
        return Access(
            transport=Exec(instance.detail["program"], instance.id, self.user or ""),
            python=None,
            folder=folder,
            spool=folder,
            cwd=f"{_HOME}/work",
            home=_HOME,
            booting=10,
        )

    def terminate(self, instances: Sequence[Instance]) -> None:
        """Remove these containers, and see them gone.

        Raises:
            StillRunning: some are still there.
        """
        until, left = time.monotonic() + _PATIENCE, list(instances)
        while left:
            program = left[0].detail["program"]
            try:
                said = _run([*program, "rm", "-f", *[each.id for each in left]], _PATIENCE).stderr.strip()
                there = _run([*program, "ps", "-aq", "--no-trunc"], _PATIENCE)
                if there.returncode != 0:
                    raise _trouble(program, there.stderr)
            except SkypoolError as e:
                raise StillRunning(f"it is not proved that {_names(left)} have ended: {e}", left) from e
            left = [each for each in left if each.id in there.stdout.split()]
            if left and time.monotonic() > until:
                raise StillRunning(f"{_names(left)} are still there: {said}", left)

    # --- the program -----------------------------------------------------------------------------------------

    def _program(self) -> tuple[str, ...]:
        """The words of a container program that answers."""
        asked = (self.runtime,) if isinstance(self.runtime, str) else tuple(self.runtime or ())
        errors: list[SkypoolError] = []
        for program in (asked,) if asked else _PROGRAMS:
            try:
                done = _run([*program, "ps", "-q"], _PATIENCE)
            except (ProviderError, UsageError) as e:
                errors.append(e)
                continue
            if done.returncode == 0:
                return program
            errors.insert(0, _trouble(program, done.stderr))  # it is there: that says more than one that is not
        raise errors[0]

    def _image(self, need: Need) -> str:
        minor = "{}.{}".format(*sys.version_info)
        return need.bases.get(self.name) or self.image or f"python:{minor}-slim"

    def _share(self, has: Accelerator) -> Accelerator:
        """What one container gets of this machine's accelerators."""
        return replace(has, count=min(self.gpus, has.count)) if isinstance(self.gpus, int) else has

    def _start(self, program: tuple[str, ...], offer: Offer, order: Order, rank: int) -> Instance:
        folder = f"{_HOME}/pools/{order.pool}.{rank}"
        deadline = int(time.time() + order.lifetime) if order.lifetime else 0
        gpus = self._gpus(program, offer.accelerator)
        labels = {
            "skypool.pool": order.pool,
            "skypool.rank": str(rank),
            "skypool.token": order.token,
            "skypool.owner": getpass.getuser(),
            "skypool.client": host_name(),
            "skypool.gpus": " ".join(gpus),
        }
        image = self._image(order.need)
        argv = [*program, "run", "--detach", "--rm", "--name", f"skypool-{order.token}-{rank}"]
        argv += [f"--label={name}={value}" for name, value in labels.items()]
        argv += [*self._limits(program, gpus), *self.options, "--entrypoint", "sh", image, "-c"]
        sleeper = (files("skypool_container") / "sleep.sh").read_text("utf-8")
        argv += [sleeper, "skypool", _HOME, folder, str(deadline)]
        done = _run(argv, _PULL)
        if done.returncode != 0:
            raise _trouble(program, done.stderr, image)
        id_ = done.stdout.split()[-1]
        return Instance(self.name, id_, order.pool, rank, offer=offer, detail={"program": program}, token=order.token)

    def _limits(self, program: tuple[str, ...], gpus: Sequence[str]) -> Iterable[str]:
        for option, value in (
            ("cpus", self.cpus),
            ("memory", self.memory),
            ("shm-size", self.shm),
            ("network", self.network),
            ("user", self.user),
        ):
            if value is not None:
                yield f"--{option}={value}"
        for here, there in self.volumes.items():
            # made absolute, for a bare name is a volume of Docker's own: empty, and kept for ever
            folder = os.path.abspath(os.path.expanduser(here))
            yield f"--volume={folder}:{there}"
        if "podman" in program[0]:
            yield from (f"--device=nvidia.com/gpu={each}" for each in gpus)
        elif gpus:
            yield "--gpus=all" if "all" in gpus else f'--gpus="device={",".join(gpus)}"'  # with these quotes: it is CSV

    def _gpus(self, program: tuple[str, ...], asked: Accelerator | None) -> list[str]:
        """Those of this machine that one more container gets."""
        if not isinstance(self.gpus, int):
            return [self.gpus] if self.gpus else []
        used = {gpu for each in self._found(program, "skypool.gpus") for gpu in each.detail["gpus"]}
        fit = [each for each in devices.detect() if each.kind == "cuda" and (asked is None or each.accelerator)]
        fit = [each for each in fit if asked is None or asked.could_be(each.accelerator or asked)]
        free = [each.pin for each in fit if each.pin not in used]
        if len(free) < self.gpus:
            raise CapacityError(
                f"a container is to have {self.gpus} GPUs, and of this machine's {len(fit)} {len(free)} are free",
                provider=self.name,
            )
        return free[: self.gpus]

    def _found(self, program: tuple[str, ...], label: str) -> list[Instance]:
        listed = _run([*program, "ps", "-aq", "--no-trunc", "--filter", f"label={label}"], _PATIENCE)
        if listed.returncode != 0:
            raise _trouble(program, listed.stderr)
        ids = listed.stdout.split()
        told = _run([*program, "inspect", "--type=container", *ids], _PATIENCE).stdout if ids else "[]"
        found = []
        for each in json.loads(told or "[]"):  # one that has just gone is not among them
            labels: dict[str, str] = each["Config"]["Labels"]
            state: Literal["running", "ending"] = "running" if each["State"]["Running"] else "ending"
            pool, rank = labels["skypool.pool"], int(labels["skypool.rank"])
            detail = {"program": program, "gpus": labels.get("skypool.gpus", "").split()}
            token = labels.get("skypool.token", "")
            found.append(Instance(self.name, each["Id"], pool, rank, state, detail=detail, token=token))
        return found


def _run(argv: Sequence[str], patience: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=patience)
    except FileNotFoundError as e:
        raise UsageError(f"there is no {argv[0]} program here: install Docker or podman") from e
    except subprocess.TimeoutExpired as e:
        raise ProviderError(f"{shlex.join(argv[:2])} did not answer within {patience:g} s", provider="container") from e


def _names(instances: Sequence[Instance]) -> str:
    return f"containers {', '.join(each.id[:12] for each in instances)}"


_SAID: tuple[tuple[str, type[SkypoolError], str], ...] = (
    (r"permission denied.*(socket|sock)", AccessError,
     "you may not use its socket: `sudo usermod -aG docker $USER` and log in again, or use podman"),
    (r"Cannot connect to the Docker daemon|Is the docker daemon running|unable to connect to Podman", ProviderError,
     "it is not running: `sudo systemctl start docker`, or set DOCKER_HOST"),
    (r"denied|unauthorized|authentication required|no basic auth", AccessError,
     "that image is not there, or needs `{program} login` first"),
    (r"manifest unknown|No such image|manifest for .* not found|short-name|name unknown|invalid reference", LaunchError,
     "there is no such image: check its name and tag"),
    (r"could not select device driver|nvidia.com/gpu|nvidia-container", LaunchError,
     "its GPUs need the NVIDIA Container Toolkit on this machine"),
    (r"no space left", CapacityError, "its disk is full: `{program} system prune`"),
    (r"dial tcp|no such host|timeout|TLS handshake|connection refused|request canceled|pinging container registry",
     LaunchError, "its registry cannot be reached from here: `{program} pull` the image by hand, or check the proxy"),
    (r"executable file not found", LaunchError, "the image has no shell: take one that has sh"),
)  # fmt: skip


def _trouble(program: tuple[str, ...], said: str, image: str = "") -> SkypoolError:
    """What the program said, as an error that says what to do."""
    words = said.strip()
    kind, advice = next(
        ((kind, advice) for pattern, kind, advice in _SAID if re.search(pattern, words, re.IGNORECASE | re.DOTALL)),
        (LaunchError if image else ProviderError, ""),
    )
    what = f"no container of {image} can be started" if image else f"{program[0]} does not answer"
    message = ": ".join(each for each in (what, advice.format(program=program[0]), words[-1500:]) if each)
    return kind(message, provider="container", text=words) if issubclass(kind, ProviderError) else kind(message)
