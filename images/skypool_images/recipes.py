"""What a machine needs before an accelerator of a family can be used: driver, SDK, and the check that proves it.

`recipe` gives the steps for one family (a runtime); the shell they run is in `scripts`, one file for each. What they
take from a vendor's repository they take from a mirror if the machine's environment names one: SKYPOOL_CUDA_APT,
SKYPOOL_NEURON_APT, SKYPOOL_ROCM_APT, SKYPOOL_GAUDI_APT. docs/recipes.md says where each fact comes from.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skypool_images.steps import Step, shell

RUNTIMES = ("cuda", "rocm", "neuron", "tpu", "hpu", "none")

CUDA_FLOORS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The oldest Linux driver that runs programs of any CUDA of a major version. Its branch: "Minor Version Compatibility",
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html (read 2026-11-21); the rest of the
number: CUDA Toolkit Release Notes, https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/ (not read there by us)."""

ROCM = "7.2"
"""The release whose tools are installed where no other is asked for."""

_NEURON_ORDER = ("dkms", "collectives", "runtime-lib", "tools")
NEURON = {
    "2.18": ("2.16.7.", "2.20.22.", "2.20.22.", "2.17.1."),
    "2.25": ("2.23.9.", "2.27.34.", "2.27.23.", "2.25.145."),
    "2.26": ("2.24.7.", "2.28.27.", "2.28.23.", "2.26.14."),
    "2.27": ("2.25.4.", "2.29.41.", "2.29.40.", "2.27.33."),
    "2.28": ("2.26.5.", "2.30.59.", "2.30.51.", "2.28.23."),
    "2.29": ("2.27.4.", "2.31.24.", "2.31.24.", "2.29.18."),
    "2.30": ("2.28.0.", "2.32.28.", "2.32.31.", "2.30.10."),
    "2.31": ("2.29.0.", "2.33.10.", "2.33.10.", "2.31.13."),
    "2.32": ("2.30.2.", "2.34.10.", "2.34.10.", "2.32.28."),
    "2.33": ("2.31.7.", "2.35.43.", "2.35.30.", "2.33.38."),
}
"""How the versions of the driver, collectives, runtime and tools of a Neuron SDK begin. None follows the SDK's own
number: "Release Content" of 2.18.1, 2.25.0, 2.26.1, 2.27.1, 2.28.0, 2.29.0, 2.30.0, 2.31.0, 2.32.0 and 2.33.0,
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/release-notes/releasecontent.html (read 2026-11-21)."""

NEURON_INDEX = "https://pip.repos.neuron.amazonaws.com"

_VERSION = re.compile(r"\d+(\.\d+){0,2}")
_PROFILE = re.compile(r"\d+g\.\d+gb([+-][a-z.]+)*")


@dataclass(frozen=True, slots=True)
class Packages:
    """What pip has to know on a machine of a runtime; nothing here is installed unasked.

    Attributes:
        indexes: to look in beside PyPI.
        links: pages with wheels, for `--find-links`.
        instead: what to install for a package that was asked for by its bare name: {"jax": "jax[tpu]"}.
    """

    indexes: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict[str, str])


def packages(runtime: str, *, cuda: str | None = None, rocm: str | None = None) -> Packages:
    """What belongs to pip rather than to the machine.

    Raises:
        ValueError: no such runtime, or a version that is none.
    """
    match _known(runtime):
        case "cuda":
            major = 12 if cuda is None else int(_version("cuda", cuda).partition(".")[0])
            return Packages(instead={"jax": f"jax[cuda{major}]"})
        case "rocm":
            release = ".".join(_version("rocm", rocm or ROCM).split(".")[:2])
            return Packages(indexes=(f"https://download.pytorch.org/whl/rocm{release}",))
        case "neuron":
            return Packages(indexes=(NEURON_INDEX,))
        case "tpu":
            links = ("https://storage.googleapis.com/jax-releases/libtpu_releases.html",)
            return Packages(links=links, instead={"jax": "jax[tpu]", "torch-xla": "torch-xla[tpu]"})
    return Packages()


def recipe(
    runtime: str,
    *,
    cuda: str | None = None,
    neuron: str | None = None,
    rocm: str | None = None,
    mig: str | Sequence[str] | None = None,
    count: int = 1,
    framework: str = "torch",
    python: str = "",
) -> list[Step]:
    """The steps that make a machine ready for a runtime. Versions for other runtimes than this one mean nothing.

    Args:
        runtime: one of `RUNTIMES`.
        cuda: "12.8" also installs that toolkit, and sees to a driver that runs it; None takes any driver that works.
        neuron: an SDK of `NEURON`, "2.29" or "2.29.0"; None takes the newest.
        rocm: "7.2" also installs the whole of that ROCm; None only what makes the cards usable by pip's wheels.
        mig: profiles of every card, ["3g.40gb", "3g.40gb"] or "3g.40gb,3g.40gb"; None leaves the cards as they are.
        count: devices there must be, as the vendor counts them: cards, chips, Neuron devices.
        framework: "torch" or "jax"; which environment of a Neuron image is taken.
        python: the minor version that such an environment must have, such as "3.11"; "" takes any.

    Raises:
        ValueError: no such runtime, or a version or profile that is none.
    """
    settings: dict[str, object] = {"COUNT": count}
    match _known(runtime):
        case "cuda":
            return _cuda(cuda, mig, count)
        case "neuron":
            pins = _neuron_packages(neuron)
            settings |= {"PACKAGES": " ".join(pins), "FRAMEWORK": framework, "MINOR": python, "INDEX": NEURON_INDEX}
            return [_step("neuron", settings, limit=900)]
        case "rocm":
            release = _version("rocm", rocm or ROCM)
            settings |= {"RELEASE": release, "DRIVER": _amdgpu(release), "WHOLE": "yes" if rocm else "no"}
            return [_step("rocm", settings, limit=3600 if rocm else 1800)]
        case "hpu":
            return [_step("gaudi", settings, limit=900)]
        case "tpu":
            return [_step("tpu", settings, limit=60)]
    return []


def _known(runtime: str) -> str:
    if runtime not in RUNTIMES:
        raise ValueError(f"no runtime is called {runtime!r}; there are {', '.join(RUNTIMES)}")
    return runtime


def _version(of: str, given: str) -> str:
    if not _VERSION.fullmatch(given):
        raise ValueError(f"{of}={given!r} is no version; it is written like {of}='12.8'")
    return given


def _cuda(cuda: str | None, mig: str | Sequence[str] | None, count: int) -> list[Step]:
    floor = "" if cuda is None else _floor(_version("cuda", cuda))
    settings: dict[str, object] = {"COUNT": count, "FLOOR": floor}
    steps = [_step("nvidia", settings, "cuda", limit=1800)]
    if cuda is not None:
        major, _, minor = cuda.partition(".")
        minor, _, patch = minor.partition(".")
        package = "-".join(["cuda-toolkit", major, *([minor] if minor else [])]) + (f"={cuda}-1" if patch else "")
        place = "/usr/local/cuda-" + ".".join([major, *([minor] if minor else [])])
        steps.append(_step("cuda", {"TOOLKIT": package, "PLACE": place}, limit=3600))
    if layout := _layout(mig):
        steps.append(_step("mig", {"LAYOUT": " ".join(layout)}, limit=300, retries=0))
    return steps


def _floor(cuda: str) -> str:
    """A major version newer than those on record needs at least what the newest of them does."""
    major = int(cuda.partition(".")[0])
    if major < min(CUDA_FLOORS):
        raise ValueError(f"cuda={cuda!r} is too old; there is {', '.join(map(str, CUDA_FLOORS))}")
    return CUDA_FLOORS[min(major, max(CUDA_FLOORS))]


def _layout(mig: str | Sequence[str] | None) -> list[str]:
    """Sorted as `sort` does it in the C locale, for it is compared with what the machine says."""
    profiles = mig.split(",") if isinstance(mig, str) else list(mig or ())
    layout = sorted(profile.strip().lower() for profile in profiles)
    for profile in layout:
        if not _PROFILE.fullmatch(profile):
            raise ValueError(f"{profile!r} is no MIG profile; it is written like '1g.10gb'")
    return layout


def _neuron_packages(neuron: str | None) -> list[str]:
    names = [f"aws-neuronx-{part}" for part in _NEURON_ORDER]
    if neuron is None:
        return names
    sdk = ".".join(_version("neuron", neuron).split(".")[:2])
    if sdk not in NEURON:
        raise ValueError(f"the packages of Neuron {neuron} are not on record; those of {', '.join(NEURON)} are")
    return [f"{name}={start}" for name, start in zip(names, NEURON[sdk], strict=True)]


def _amdgpu(rocm: str) -> str:
    """The driver's release beside a ROCm's: the same number until 6.4; 30.10 beside 7.0, and so on.

    Pairs seen in public install scripts: 7.0.2 and 30.10.2, 7.1 and 30.20, 7.2 and 30.30, 7.2.3 and 30.30.3.
    """
    major, _, rest = rocm.partition(".")
    minor, _, patch = rest.partition(".")
    if int(major) < 7:
        return rocm
    if int(major) > 7 or int(minor or 0) > 2:
        return "latest"
    return f"30.{int(minor or 0) + 1}0" + (f".{patch}" if patch and patch != "0" else "")


def _step(name: str, settings: Mapping[str, object], *more: str, limit: int, retries: int = 3) -> Step:
    """A step out of `scripts/NAME.sh`: its function NAME does the work, and NAME_check proves it."""
    values = "\n".join(f"{key}={shlex.quote(str(value))}" for key, value in settings.items())
    body = "\n".join([values, shell("machine"), *(shell(each) for each in (name, *more))])
    return Step(name, f"{body}\n{name}\n", f"{body}\n{name}_check\n", limit=limit, retries=retries)
