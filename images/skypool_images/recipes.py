"""Recipes for each runtime: the steps that install driver and SDK and check that the accelerators work.

`recipe` returns the setup steps for a runtime. `packages` returns pip's settings for it. The steps' shell code is in
the folder `scripts`, one file for each step.

Environment variables of the machine can name mirrors of the vendors' package repositories: SKYPOOL_CUDA_APT,
SKYPOOL_NEURON_APT, SKYPOOL_ROCM_APT and SKYPOOL_GAUDI_APT. docs/recipes.md has the source of each fact.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skypool_images.script import Step, shell

RUNTIMES = ("cuda", "rocm", "neuron", "tpu", "hpu", "none")

CUDA_FLOORS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""A dict from major version of CUDA to the oldest Linux driver that runs programs of all releases of this version.

Source of the driver's branch: "Minor Version Compatibility",
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html (read 2026-11-21).
The full number is in the CUDA Toolkit Release Notes, https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/
(not checked there)."""

ROCM = "7.2"
"""Release of ROCm whose tools are installed if the image asks for no other."""

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
"""A dict from version of the Neuron SDK to the beginnings of the versions of four Debian packages.

The packages are, in this order, driver, collectives, runtime and tools. Source: "Release Content" of 2.18.1, 2.25.0,
2.26.1, 2.27.1, 2.28.0, 2.29.0, 2.30.0, 2.31.0, 2.32.0 and 2.33.0,
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/release-notes/releasecontent.html (read 2026-11-21)."""

NEURON_INDEX = "https://pip.repos.neuron.amazonaws.com"

_VERSION = re.compile(r"\d+(\.\d+){0,2}")
_PROFILE = re.compile(r"\d+g\.\d+gb([+-][a-z.]+)*")


@dataclass(frozen=True, slots=True)
class Packages:
    """Settings of pip for a runtime.

    Attributes:
        indexes: URLs of further package indexes beside PyPI.
        links: URLs of pages with wheels, for `--find-links`.
        instead: the name with extras that replaces a package's name: {"jax": "jax[tpu]"}.
    """

    indexes: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict[str, str])


def packages(runtime: str, *, cuda: str | None = None, rocm: str | None = None) -> Packages:
    """Return the settings of pip for a runtime. All fields are empty for "hpu" and "none".

    `cuda` is the version of CUDA, None for 12. `rocm` is the version of ROCm, None for 7.2. ValueError is raised for an
    unknown runtime or an invalid version.
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
    """Return the steps that set up a machine for a runtime, in order; [] for "none". Nothing runs here.

    A version of another runtime is ignored, such as `rocm` for "cuda".

    Args:
        runtime: "cuda", "rocm", "neuron", "tpu", "hpu" or "none".
        cuda: version of the CUDA toolkit to install, such as "12.8", with a driver that supports it. None installs no
            toolkit and accepts any working driver.
        neuron: version of the Neuron SDK, such as "2.29" or "2.29.0". `NEURON` has the known versions. None takes the
            newest packages.
        rocm: version of ROCm to install as a whole, such as "7.2". None installs only the parts that pip's wheels need.
        mig: the MIG partitions of every card, as profiles: ["3g.40gb", "3g.40gb"] or "3g.40gb,3g.40gb". None leaves the
            cards as they are. For "cuda" only.
        count: number of devices that must be present, as the vendor counts them: cards, chips, Neuron devices.
        framework: "torch" or "jax". AWS's Neuron image has a Python environment for each of these frameworks, of which
            the named one is used. For "neuron" only.
        python: minor version of Python that the framework's environment must have, such as "3.11". "" accepts any. For
            "neuron" only.

    Raises:
        ValueError: there is no such runtime, or a version or profile is not valid.
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
        raise ValueError(f"no accelerator runtime is called {runtime!r}; choose from {', '.join(RUNTIMES)}")
    return runtime


def _version(of: str, given: str) -> str:
    if not _VERSION.fullmatch(given):
        raise ValueError(f"{of}={given!r} is not a version; write it like {of}='12.8'")
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
    """Return the oldest NVIDIA Linux driver, such as "525.60.13", for a CUDA version. Versions after 13 count as 13."""
    major = int(cuda.partition(".")[0])
    if major < min(CUDA_FLOORS):
        raise ValueError(
            f"cuda={cuda!r} is too old; the supported major versions are {', '.join(map(str, CUDA_FLOORS))}"
        )
    return CUDA_FLOORS[min(major, max(CUDA_FLOORS))]


def _layout(mig: str | Sequence[str] | None) -> list[str]:
    """Return a list of MIG profiles, or a text with commas, as a sorted list in lower case. Check their form."""
    profiles = mig.split(",") if isinstance(mig, str) else list(mig or ())
    layout = sorted(profile.strip().lower() for profile in profiles)
    for profile in layout:
        if not _PROFILE.fullmatch(profile):
            raise ValueError(f"{profile!r} is not a MIG profile; write it like '1g.10gb'")
    return layout


def _neuron_packages(neuron: str | None) -> list[str]:
    names = [f"aws-neuronx-{part}" for part in _NEURON_ORDER]
    if neuron is None:
        return names
    sdk = ".".join(_version("neuron", neuron).split(".")[:2])
    if sdk not in NEURON:
        raise ValueError(f"skypool does not know the packages of Neuron SDK {neuron}; choose from {', '.join(NEURON)}")
    return [f"{name}={start}" for name, start in zip(names, NEURON[sdk], strict=True)]


def _amdgpu(rocm: str) -> str:
    """Return the release of the amdgpu driver for a ROCm release: "30.10.2" for "7.0.2", "latest" after 7.2."""
    major, _, rest = rocm.partition(".")
    minor, _, patch = rest.partition(".")
    if int(major) < 7:
        return rocm  # the driver has ROCm's number
    if int(major) > 7 or int(minor or 0) > 2:
        return "latest"
    # ROCm 7.0 goes with driver 30.10, 7.1 with 30.20 and 7.2 with 30.30
    return f"30.{int(minor or 0) + 1}0" + (f".{patch}" if patch and patch != "0" else "")


def _step(name: str, settings: Mapping[str, object], *more: str, limit: int, retries: int = 3) -> Step:
    """Return a step made from `scripts/NAME.sh`: its shell function NAME does the work, and NAME_check verifies it."""
    values = "\n".join(f"{key}={shlex.quote(str(value))}" for key, value in settings.items())
    body = "\n".join([values, shell("machine"), *(shell(each) for each in (name, *more))])
    return Step(name, f"{body}\n{name}\n", f"{body}\n{name}_check\n", limit=limit, retries=retries)
