"""Driver for containers of Docker or Podman.

The containers run on this machine, or on the machine that the program `docker` or `podman` is configured to use. The
containers cost nothing. A container ends itself when its agent has ended, when no client connected for 15 minutes, and
at the pool's deadline. The agent is the process that runs calls.

Words of this package:

- node: a machine of a pool; here, a container. Its node number is its number in the pool.
- offer, order: what this driver can start, and the request to start containers of an offer (`skypool.model`).
- container program: `docker` or `podman`. In arguments, `program` has the words that start it, such as ("podman",
  "--remote").
- settings: the arguments of `Container`.
"""

from __future__ import annotations

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
from typing import Any, ClassVar, Literal

from skypool import devices
from skypool.accelerators import Accelerator
from skypool.devices import Device
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
from skypool.processes import host_name, user_name
from skypool.wire.transport import Exec

_PROGRAMS = (("docker",), ("podman",))
"""Container programs to look for if the settings name none. The first one that works is used."""
_HOME = "/tmp/skypool"
"""skypool's folder in a container. It is below /tmp, because every user may write there."""
_PATIENCE = 30.0
"""Maximum seconds for a run of the container program, unless the run starts a container."""
_PULL = 1800.0
"""Maximum seconds for the download of an image."""
_START = 120.0
"""Maximum seconds for the start of a container whose image is there. After that, ProviderError is raised."""
_IMAGE_MISSING = re.compile(r"no such image|image not known|unable to find image", re.IGNORECASE)
"""Matches what the container program prints for an image that must be downloaded first."""
_starting = threading.Lock()
"""Held while a container is started, so that two containers do not get the same GPU."""
_SIZE = re.compile(r"\d+(\.\d+)?[bkmgBKMG]?")
_WORD = re.compile(r"[^\s-]\S*")
"""Matches a text without blanks that does not begin with "-", so that the container program takes it for no option."""


@settings.settings_named
@dataclass(frozen=True)
class Container:
    """A driver that runs each node in a container, started with the program `docker` or `podman`.

    The containers cost nothing.

    Args:
        image: image of the containers. None takes python:X.Y-slim, where X.Y is the version of the client's Python. The
            base= of an Image takes precedence.
        runtime: the container program, or a list of its words, such as ["podman", "--remote"]. None takes docker, or
            podman if docker does not work.
        gpus: number of GPUs that each container has for itself. "all" gives every container all GPUs. None gives the
            containers no GPUs.
        cpus: number of CPUs that a container may use. None sets no limit.
        memory: maximum memory of a container, such as "4g". None sets no limit.
        shm: size of /dev/shm (shared memory), such as "4g". None leaves the container program's default.
        volumes: a dict from folder of this machine to path in the container: {"/data": "/data"}. The path "/data:ro"
            makes the folder read-only in the container.
        network: value of the container program's option --network. None leaves out this option.
        user: value of the container program's option --user. None leaves the image's user.
        options: list of further options for the container program's command `run`.

    Raises:
        UsageError: a value is not valid, or a setting has an unknown name.
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
    abilities: ClassVar[Abilities] = Abilities(
        private_network=True,
        network_advice=(
            "Give the containers a network in which they reach each other, as by Container(network=…), and look for "
            "rules of this machine's firewall between containers"
        ),
    )

    def __post_init__(self) -> None:
        settings.plain(self, cpus=float)
        self._check_words()
        self._check_sizes()
        self._check_volumes()

    def _check_words(self) -> None:
        if isinstance(self.options, str):
            raise UsageError(
                f"options must be a list of words, not one text; write options={shlex.split(self.options)!r}"
            )
        if not _are_words(self.options):
            raise UsageError(f"options must be a list of words such as ['--ipc=host'], not {self.options!r}")
        runtime = [self.runtime or "docker"] if isinstance(self.runtime, (str, type(None))) else self.runtime
        if not _are_words(runtime):
            raise UsageError(
                f"runtime must be a program such as 'podman' or a list of words such as ['podman', "
                f"'--remote'], not {runtime!r}"
            )
        for name in ("image", "network", "user"):
            word = getattr(self, name)
            if word is not None and (not isinstance(word, str) or not _WORD.fullmatch(word)):
                raise UsageError(f"{name} must be a word without spaces that does not begin with '-', not {word!r}")

    def _check_sizes(self) -> None:
        if self.gpus is not None and self.gpus != "all" and (type(self.gpus) is not int or self.gpus < 1):
            raise UsageError(f"gpus must be 'all', a number of at least 1, or None, not {self.gpus!r}")
        if self.cpus is not None and not self.cpus > 0:
            raise UsageError(f"cpus must be a number above 0, not {self.cpus!r}")
        for name in ("memory", "shm"):
            size = getattr(self, name)
            if size is not None and not (isinstance(size, str) and _SIZE.fullmatch(size)):
                raise UsageError(f"{name} must be a size such as '4g' or '512m', not {size!r}")

    def _check_volumes(self) -> None:
        if not isinstance(self.volumes, Mapping):
            raise UsageError(
                f"volumes must map folders of this machine to paths in the container, such as {{'/a': '/a'}}, "
                f"not {self.volumes!r}"
            )
        for here, there in self.volumes.items():
            if not isinstance(there, str) or not there.startswith("/"):
                raise UsageError(
                    f"volumes[{here!r}] must be an absolute path in the container such as '/data', not {there!r}"
                )

    # --- the contract of a driver ----------------------------------------------------------------------------

    def offers(self, need: Need) -> Iterable[Offer]:
        """Return offers of containers at the price 0.

        Without the setting `gpus`, there is one offer without accelerators. With `gpus`, there is one offer for each
        kind of accelerator of this machine, or one without accelerators if this machine has none. GPUs that are in use
        count, too. The container program is run once, to test whether it works.

        Args:
            need: the requirements of each node, of which only the base image is used.

        Raises:
            AccessError: the user may not use the container program's socket.
            ProviderError: the container program does not answer within 30 s, or reports an error. The message has
                advice.
            UsageError: no container program is installed, or Docker's daemon does not run here.
        """
        program = self._program()
        offer = Offer(
            provider=self.name,
            instance_type=self._image(need),
            region="",
            detail={"program": program},
        )
        if self.gpus is None:
            return [offer]
        has = [self._share(each) for each in devices.accelerators()]
        return [replace(offer, accelerator=each) for each in has] or [offer]

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Start one container for each node number of the order, and return them in the order of the node numbers.

        A container that the same order has started before is reused. Blocks until all containers run, at most half an
        hour for each whose image must be downloaded. If a container cannot be started, all containers of the order
        are removed.

        Raises:
            AccessError: the image cannot be pulled without a login.
            CapacityError: too few GPUs of this machine are free, or the disk is full.
            LaunchError: the container cannot be started. The message has the program's output and advice.
            ProviderError: the container program did not answer in time.
            StillRunning: a container that had to be removed again may still run.
        """
        program = offer.detail["program"]
        found = self._found(program, f"skypool.token={order.token}")
        there = {each.node: replace(each, offer=offer) for each in found}
        try:
            for node in order.nodes:
                if node not in there:
                    with _starting:  # a GPU counts as used only while its container runs
                        there[node] = self._start(program, offer, order, node)
        except SkypoolError:
            self.terminate(list(there.values()))  # launch all nodes or none
            raise
        return [there[node] for node in order.nodes]

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Return the containers of this user's pools, found by their labels. The list is empty if there are none.

        A container that is not running has the state "ending".

        Args:
            pool: the name of a pool, for the containers of this pool only. None means all pools. Containers of other
                users are never returned.

        Raises:
            ProviderError: the container program did not answer, or reported an error.
            AccessError: the user may not use the container program's socket.
            UsageError: no container program is installed, or Docker's daemon does not run here.
        """
        of_pool = [] if pool is None else [f"skypool.pool={pool}"]
        return self._found(self._program(), f"skypool.owner={user_name()}", *of_pool)

    def access(self, instance: Instance) -> Access:
        """Return how to run commands in a container: with the container program's command `exec`. Runs nothing.

        The paths in the result are paths in the container, below /tmp/skypool.
        """
        folder = f"{_HOME}/pools/{instance.pool}.{instance.node}"
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
        """Remove these containers by force, and wait until they are gone.

        Does not raise for containers that do not exist.

        Raises:
            StillRunning: some containers still exist after 30 s, or the container program fails. The error carries
                these containers.
        """
        until = time.monotonic() + _PATIENCE
        left = list(instances)
        while left:
            program = left[0].detail["program"]
            try:
                ids = [each.id for each in left]
                said = _run([*program, "rm", "-f", *ids], _PATIENCE).stderr.strip()
                there = self._ids(program)
            except SkypoolError as e:
                raise StillRunning(
                    f"{_names(left)} may still run, because `{shlex.join(program)} rm -f` did not confirm "
                    f"their end: {e}. Try again, or remove the containers by hand",
                    left,
                ) from e
            left = [each for each in left if each.id in there]
            if left and time.monotonic() > until:
                raise StillRunning(
                    f"{_names(left)} still exist {_PATIENCE:g} s after `{shlex.join(program)} rm -f`, which printed "
                    f"{said!r}; remove the containers by hand",
                    left,
                )

    # --- the program -----------------------------------------------------------------------------------------

    def _program(self) -> tuple[str, ...]:
        """Return the words of the setting `runtime`, or of the first of docker and podman that works in a test run."""
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
            errors.insert(0, _trouble(program, done.stderr))  # tell of an installed program first
        raise errors[0]

    def _image(self, need: Need) -> str:
        minor = "{}.{}".format(*sys.version_info)
        return need.bases.get(self.name) or self.image or f"python:{minor}-slim"

    def _share(self, has: Accelerator) -> Accelerator:
        """Return the accelerators that one container gets: `has`, with the setting `gpus` as the largest count."""
        if not isinstance(self.gpus, int):
            return has
        return replace(has, count=min(self.gpus, has.count))

    def _start(self, program: tuple[str, ...], offer: Offer, order: Order, node: int) -> Instance:
        """Start the container of one node, and wait until it runs. A missing image is downloaded first."""
        folder = f"{_HOME}/pools/{order.pool}.{node}"
        deadline = int(time.time() + order.lifetime) if order.lifetime else 0
        gpus = self._gpus(program, offer.accelerator)
        labels = {
            "skypool.pool": order.pool,
            "skypool.rank": str(node),
            "skypool.token": order.token,
            "skypool.owner": user_name(),
            "skypool.client": host_name(),
            "skypool.gpus": " ".join(gpus),
        }
        image = self._image(order.need)
        argv = [*program, "run", "--detach", "--rm", "--pull=never", "--name", f"skypool-{order.token}-{node}"]
        argv += [f"--label={name}={value}" for name, value in labels.items()]
        argv += [*self._limits(program, gpus), *self.options, "--entrypoint", "sh", image, "-c"]
        sleeper = (files("skypool_container") / "sleep.sh").read_text("utf-8")
        argv += [sleeper, "skypool", _HOME, folder, str(deadline)]
        patience = _PULL if any(each.startswith("--pull") for each in self.options) else _START
        done = _run(argv, patience)
        if done.returncode != 0 and _IMAGE_MISSING.search(done.stderr):
            pulled = _run([*program, "pull", "--quiet", image], _PULL)
            if pulled.returncode != 0:
                raise _trouble(program, pulled.stderr, image)
            done = _run(argv, patience)
        if done.returncode != 0:
            raise _trouble(program, done.stderr, image)
        return Instance(
            provider=self.name,
            id=done.stdout.split()[-1],
            pool=order.pool,
            node=node,
            offer=offer,
            detail={"program": program},
            token=order.token,
        )

    def _limits(self, program: tuple[str, ...], gpus: Sequence[str]) -> Iterable[str]:
        """Yield the container program's options for the settings and the GPUs. `gpus` has ids, ["all"], or nothing."""
        options = {
            "cpus": self.cpus,
            "memory": self.memory,
            "shm-size": self.shm,
            "network": self.network,
            "user": self.user,
        }
        for option, value in options.items():
            if value is not None:
                yield f"--{option}={value}"
        for here, there in self.volumes.items():
            # absolute, because Docker takes a name without slashes as a new empty volume, and never removes the volume
            folder = os.path.abspath(os.path.expanduser(here))
            yield f"--volume={folder}:{there}"
        if "podman" in program[0]:
            for each in gpus:
                yield f"--device=nvidia.com/gpu={each}"
        elif "all" in gpus:
            yield "--gpus=all"
        elif gpus:
            yield f'--gpus="device={",".join(gpus)}"'  # CSV, so it needs the quotes

    def _gpus(self, program: tuple[str, ...], asked: Accelerator | None) -> list[str]:
        """Return ids of free NVIDIA GPUs for one container. With the setting "all", return ["all"]; with None, []."""
        if not isinstance(self.gpus, int):
            return [self.gpus] if self.gpus else []
        used: set[str] = set()
        for container in self._found(program, "skypool.gpus"):
            used.update(container.detail["gpus"])
        fit = [each for each in devices.detect() if each.kind == "cuda" and _fits(each, asked)]
        free = [each.pin for each in fit if each.pin not in used]
        if len(free) < self.gpus:
            raise CapacityError(
                f"a container needs {self.gpus} GPUs, but only {len(free)} of this machine's {len(fit)} GPUs "
                "are free; set a smaller gpus=, or wait until other containers end",
                provider=self.name,
            )
        return free[: self.gpus]

    def _found(self, program: tuple[str, ...], *labels: str) -> list[Instance]:
        """Return the containers that have all of these labels ("NAME" or "NAME=VALUE")."""
        ids = self._ids(program, *(word for label in labels for word in ("--filter", f"label={label}")))
        if not ids:
            return []
        told = _run([*program, "inspect", "--type=container", *ids], _PATIENCE).stdout
        records = json.loads(told or "[]")  # the records lack a container that has just ended
        return [self._instance(program, each) for each in records]

    def _ids(self, program: tuple[str, ...], *filters: str) -> list[str]:
        """Return the ids of the containers, running or not, that `ps` lists with these options, such as filters."""
        listed = _run([*program, "ps", "-aq", "--no-trunc", *filters], _PATIENCE)
        if listed.returncode != 0:
            raise _trouble(program, listed.stderr)
        return listed.stdout.split()

    def _instance(self, program: tuple[str, ...], record: Mapping[str, Any]) -> Instance:
        """Convert the record of a container, as the program's `inspect` prints it, to an `Instance`."""
        labels: dict[str, str] = record["Config"]["Labels"]
        state: Literal["running", "ending"] = "running" if record["State"]["Running"] else "ending"
        return Instance(
            provider=self.name,
            id=record["Id"],
            pool=labels["skypool.pool"],
            node=int(labels["skypool.rank"]),
            state=state,
            detail={"program": program, "gpus": labels.get("skypool.gpus", "").split()},
            token=labels.get("skypool.token", ""),
        )


def _are_words(value: object) -> bool:
    """Return True if the value is a list or tuple that contains nothing but strings, and no empty string."""
    return isinstance(value, (list, tuple)) and all(isinstance(each, str) and each for each in value)


def _fits(device: Device, asked: Accelerator | None) -> bool:
    """Return True if a device may be of the kind of accelerator `asked`. None accepts any device."""
    if asked is None:
        return True
    return device.accelerator is not None and asked.could_be(device.accelerator)


def _run(argv: Sequence[str], patience: float) -> subprocess.CompletedProcess[str]:
    """Run the container program for at most `patience` seconds. Return its output and exit status, even if not 0."""
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=patience)
    except FileNotFoundError as e:
        raise UsageError(
            f"the program {argv[0]} is not installed here: install Docker or podman, or set runtime="
        ) from e
    except subprocess.TimeoutExpired as e:
        raise ProviderError(
            f"`{shlex.join(argv[:2])}` did not end within {patience:g} s; check that the service of {argv[0]} "
            "runs, and try again",
            provider="container",
        ) from e


def _names(instances: Sequence[Instance]) -> str:
    return f"containers {', '.join(each.id[:12] for each in instances)}"


_NO_DAEMON = "the daemon is not running: `sudo systemctl start docker`, or set DOCKER_HOST to the address of another"
_SAID: tuple[tuple[str, type[SkypoolError], str], ...] = (
    (r"permission denied.*(socket|sock)", AccessError,
     "you may not use the daemon's socket: run `sudo usermod -aG docker $USER` and log in again, or use podman"),
    (r"Cannot connect to the Docker daemon at unix:", UsageError, _NO_DAEMON),  # so that `gc` skips Docker
    (r"Cannot connect to the Docker daemon|Is the docker daemon running|unable to connect to Podman", ProviderError,
     _NO_DAEMON),
    (r"denied|unauthorized|authentication required|no basic auth", AccessError,
     "either the image does not exist, or its registry needs `{program} login` first"),
    (r"manifest unknown|No such image|manifest for .* not found|short-name|name unknown|invalid reference", LaunchError,
     "there is no such image: check the image's name and tag"),
    (r"could not select device driver|nvidia.com/gpu|nvidia-container", LaunchError,
     "containers with GPUs need the NVIDIA Container Toolkit: install it on this machine"),
    (r"no space left", CapacityError, "the disk is full: free space with `{program} system prune`"),
    (r"dial tcp|no such host|timeout|TLS handshake|connection refused|request canceled|pinging container registry",
     LaunchError, "the image's registry cannot be reached from here: try `{program} pull` by hand, or check the proxy"),
    (r"executable file not found", LaunchError, "the image has no shell: choose an image that has the program sh"),
)  # fmt: skip


def _trouble(program: tuple[str, ...], said: str, image: str = "") -> SkypoolError:
    """Return the error for what the container program printed. `image` is the image to start; "" if none was."""
    words = said.strip()
    kind, advice = next(
        ((kind, advice) for pattern, kind, advice in _SAID if re.search(pattern, words, re.IGNORECASE | re.DOTALL)),
        (LaunchError if image else ProviderError, ""),
    )
    what = f"no container of {image} can be started" if image else f"{program[0]} does not answer"
    printed = f"{program[0]} printed: {words[-1500:]}" if words else ""
    reason = f"{what}: {advice.format(program=program[0])}" if advice else what
    message = ". ".join(each for each in (reason, printed) if each)
    return kind(message, provider="container", text=words) if issubclass(kind, ProviderError) else kind(message)
