"""The vendors' package repositories, in small: real .debs with the real names, signed, and served over HTTP.

What a package installs are stubs of the vendor's tools: they print what tests/samples has recorded, obey as many of
their arguments as the recipes use, and take the state of the machine from /var/lib/stub (see `stubs`). Whoever wants
to know what a recipe did there reads that folder.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).parent.parent / "samples"
STUBS = Path(__file__).parent / "stubs"
KERNEL = os.uname().release
NEURON_KEY = "GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB"
MOST = 2
"""Devices that the stub tools can show at most."""


@dataclass(frozen=True)
class Package:
    """One .deb. `files` maps places to text; `modules` are kernel modules it brings, with their version."""

    name: str
    version: str = "1.0"
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    modules: Mapping[str, str] = field(default_factory=dict[str, str])
    fields: str = ""
    """Further lines of its paragraph."""
    configure: str = ""
    """Shell that configures it, once it is unpacked."""


def build(folder: Path, keys: Path) -> None:
    """Every repository, below `folder`, signed with new keys, which are made in the folder `keys`."""
    distribution, vendor = _key(keys, "Distribution"), _key(keys, "Vendor")
    (folder / "distribution.asc").write_text(_public(keys, distribution))
    _archive(folder / "debian", "bookworm", {"main": _headers(), "non-free": _debian_driver()}, keys, distribution)
    _archive(folder / "ubuntu", "noble", {"main": [*_headers(), *_ubuntu_drivers()]}, keys, distribution)
    _archive(folder / "signed-ubuntu", "noble", {"main": [*_ubuntu_drivers(), _signed_modules()]}, keys, distribution)
    _archive(folder / "neuron", "bookworm", {"main": _neuron()}, keys, vendor)
    _put(folder / "neuron" / NEURON_KEY, _public(keys, vendor))
    _archive(folder / "rocm/rocm/apt/7.2", "jammy", {"main": _rocm()}, keys, vendor)
    _archive(folder / "rocm/amdgpu/30.30/ubuntu", "jammy", {"main": [_amdgpu()]}, keys, vendor)
    _archive(folder / "rocm/graphics/7.2/ubuntu", "jammy", {"main": []}, keys, vendor)
    _put(folder / "rocm/rocm/rocm.gpg.key", _public(keys, vendor))
    _archive(folder / "gaudi/debian", "bookworm", {"main": _gaudi()}, keys, vendor)
    _put(folder / "gaudi/api/gpg/key/public", _public(keys, vendor))
    for system in ("debian12", "ubuntu2404"):
        _flat(folder / f"cuda/{system}/x86_64", [*_cuda(), _keyring(system, keys, vendor)], keys, vendor)
    stranger = _key(keys, "Stranger")
    _archive(folder / "forged", "bookworm", {"main": _neuron()}, keys, stranger)
    _put(folder / "forged" / NEURON_KEY, _public(keys, vendor))


# --- what is in them -----------------------------------------------------------------------------------------


def _headers() -> list[Package]:
    return [Package(f"linux-headers-{KERNEL}")]


def nvidia_tool(version: str) -> dict[str, str]:
    """nvidia-smi and the version of its library."""
    listing = (SAMPLES / "nvidia-smi-L-h100.txt").read_text()
    return {"/usr/bin/nvidia-smi": _stub("nvidia-smi"), "/usr/lib/stub/nvidia-L": listing,
            "/usr/lib/stub/nvidia-library": f"{version}\n"}  # fmt: skip


NVIDIA_MODULES = ("nvidia", "nvidia-uvm")


def _nvidia_modules(version: str) -> dict[str, str]:
    return dict.fromkeys(NVIDIA_MODULES, version)


def _ubuntu_drivers() -> list[Package]:
    """Branches as Ubuntu has them; 590 has no proprietary modules any more, and 610 is only talked of."""
    made = []
    for version in ("535.247.01", "570.172.08", "580.95.05", "590.48.01"):
        branch = version.partition(".")[0]
        made.append(Package(f"nvidia-utils-{branch}-server", version, nvidia_tool(version), fields=_only_one("utils")))
        for suffix in ("", "-open") if branch != "590" else ("-open",):
            modules = _nvidia_modules(version)
            name = f"nvidia-headless-{branch}-server{suffix}"
            made.append(Package(name, version, modules=modules, fields=_only_one("kernel")))
            made.append(Package(f"nvidia-headless-no-dkms-{branch}-server{suffix}", version))
    return [*made, Package("nvidia-driver-assistant", fields="Recommends: nvidia-headless-610-server-open\n")]


def _only_one(what: str) -> str:
    """As in Ubuntu, one branch replaces another."""
    return "".join(f"{word}: stub-nvidia-{what}\n" for word in ("Provides", "Conflicts", "Replaces"))


def _signed_modules() -> Package:
    return Package(f"linux-modules-nvidia-590-server-open-{KERNEL}", modules=_nvidia_modules("590.48.01"))


def _debian_driver() -> list[Package]:
    version = "535.247.01-1~deb12u1"
    return [
        Package("nvidia-driver", version, modules=_nvidia_modules("535.247.01")),
        Package("nvidia-smi", version, nvidia_tool("535.247.01")),
    ]


def _cuda() -> list[Package]:
    version = "580.95.05"
    nvcc = {"/usr/local/cuda-12.8/bin/nvcc": _stub("nvcc")}
    driver = nvidia_tool(version)
    return [
        Package("nvidia-open", version + "-1", driver, _nvidia_modules(version)),
        Package("cuda-drivers-580", version + "-1", driver, _nvidia_modules(version)),
        Package("cuda-toolkit-12-8", "12.8.1-1", nvcc),
        Package("cuda-toolkit-12-8", "12.8.0-1", nvcc),
    ]


def _keyring(system: str, keys: Path, key: str) -> Package:
    """The list in NVIDIA's own package names NVIDIA's server, whatever mirror it was fetched from."""
    ring = "/usr/share/keyrings/cuda-archive-keyring.asc"
    source = f"https://developer.download.nvidia.com/compute/cuda/repos/{system}/x86_64/ /"
    listed = {f"/etc/apt/sources.list.d/cuda-{system}-x86_64.list": f"deb [signed-by={ring}] {source}\n"}
    return Package("cuda-keyring", "1.1-1", {ring: _public(keys, key), **listed})


def neuron_tool() -> dict[str, str]:
    """neuron-ls, with what the sample shows for each number of devices."""
    one = json.loads((SAMPLES / "neuron-ls-trn2.json").read_text())[0]
    return {"/opt/aws/neuron/bin/neuron-ls": _stub("neuron-ls")} | {
        f"/usr/lib/stub/neuron-{n}": json.dumps([{**one, "neuron_device": i} for i in range(n)], indent=4) + "\n"
        for n in range(1, MOST + 1)
    }


def _neuron() -> list[Package]:
    """The packages of SDK 2.29 and 2.33, with the suffix that AWS's versions have."""
    made = []
    for dkms, runtime, tools in (("2.27.4.0", "2.31.24.0", "2.29.18.0"), ("2.31.7.0", "2.35.30.0", "2.33.38.0")):
        collectives = {"2.35.30.0": "2.35.43.0"}.get(runtime, runtime)
        made += [
            Package("aws-neuronx-dkms", dkms, modules={"neuron": dkms}),
            Package("aws-neuronx-collectives", f"{collectives}-1a31ba186"),
            Package("aws-neuronx-runtime-lib", f"{runtime}-3a5e34a8f"),
            Package("aws-neuronx-tools", tools, neuron_tool()),
        ]
    return made


def rocm_tools() -> dict[str, str]:
    told = json.loads((SAMPLES / "amd-smi-static-mi300x.json").read_text())["gpu_data"][0]
    old = json.loads((SAMPLES / "rocm-smi-mi210.json").read_text().partition("\n")[2])
    files = {"/opt/rocm/bin/amd-smi": _stub("amd-smi"), "/opt/rocm/bin/rocm-smi": _stub("rocm-smi")}
    for n in range(1, MOST + 1):
        files[f"/usr/lib/stub/amd-{n}"] = json.dumps({"gpu_data": [{**told, "gpu": i} for i in range(n)]}) + "\n"
        files[f"/usr/lib/stub/rocm-{n}"] = json.dumps({f"card{i}": old[f"card{i}"] for i in range(n)}) + "\n"
    return files


def _rocm() -> list[Package]:
    files = rocm_tools()
    old = {place: text for place, text in files.items() if "rocm-" in place}
    return [
        Package("rocminfo"),
        Package("rocm-smi-lib", files=old),
        Package("amd-smi-lib", files={place: text for place, text in files.items() if place not in old}),
        Package("rocm", "7.2.0.70200-43~22.04", {"/opt/rocm/bin/hipcc": "#!/bin/sh\n"}),
    ]


def _amdgpu() -> Package:
    return Package("amdgpu-dkms", "1:6.16.13.30300000-1", modules={"amdgpu": "6.16.13"})


def gaudi_tool() -> dict[str, str]:
    rows = (SAMPLES / "hl-smi-gaudi3.csv").read_text().splitlines()
    return {"/usr/bin/hl-smi": _stub("hl-smi")} | {
        f"/usr/lib/stub/gaudi-{n}": "".join(", ".join(row.split(", ")[:2]) + "\n" for row in rows[:n])
        for n in range(1, MOST + 1)
    }


def _gaudi() -> list[Package]:
    version = "1.23.0-695"
    plain = ("firmware", "thunk", "rdma-core", "graph")
    return [
        *(Package(f"habanalabs-{part}", version) for part in plain),
        Package("habanalabs-dkms", version, modules={"habanalabs": version}),
        Package("habanalabs-firmware-tools", version, gaudi_tool()),
    ]


def _stub(name: str) -> str:
    return (STUBS / name).read_text()


# --- making and signing them ---------------------------------------------------------------------------------


def _archive(root: Path, suite: str, parts: Mapping[str, Sequence[Package]], keys: Path, key: str) -> None:
    """A repository with a pool and `dists`, as Debian's."""
    indexes = {}
    for part, made in parts.items():
        stanzas = [_deb(each, root, f"pool/{part}") for each in made]
        indexes[f"{part}/binary-amd64/Packages"] = "".join(stanzas)
    _release(root / "dists" / suite, suite, list(parts), indexes, keys, key)


def _flat(root: Path, made: Sequence[Package], keys: Path, key: str) -> None:
    """A repository whose packages lie beside their index, as NVIDIA's."""
    _release(root, "", [], {"Packages": "".join(_deb(each, root, ".") for each in made)}, keys, key)


def unsigned(root: Path, made: Sequence[Package]) -> None:
    """A flat repository for `deb [trusted=yes] file:…`."""
    _put(root / "Packages", "".join(_deb(each, root, ".") for each in made))


def _release(root: Path, suite: str, parts: Sequence[str], indexes: Mapping[str, str], keys: Path, key: str) -> None:
    sums = []
    for place, text in indexes.items():
        for name, data in ((place, text.encode()), (place + ".gz", gzip.compress(text.encode(), mtime=0))):
            _put(root / name, data)
            sums.append(f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}")
    lines = ["Origin: Debian", "Architectures: amd64", "Date: Sat, 21 Nov 2026 00:00:00 UTC"]
    if suite:
        lines += [f"Suite: {suite}", f"Codename: {suite}", f"Components: {' '.join(parts)}"]
    _put(root / "Release", "\n".join([*lines, "SHA256:", *sums]) + "\n")
    _gpg(keys, "--local-user", key, "--clearsign", "--output", str(root / "InRelease"), str(root / "Release"))


def _deb(package: Package, root: Path, pool: str) -> str:
    """Builds it, and gives its paragraph of the index."""
    name = f"{package.name}_{package.version.partition(':')[2] or package.version}_all.deb"
    tree = root / "build" / name
    files = dict(package.files) | {f"/usr/lib/stub/modules/{m}": v + "\n" for m, v in package.modules.items()}
    for place, text in files.items():
        _put(tree / place[1:], text).chmod(0o755 if "/bin/" in place else 0o644)
    control = f"Package: {package.name}\nVersion: {package.version}\nArchitecture: all\nMaintainer: The lab <lab@lab>\n"
    control += package.fields
    control += f"Description: a stub of {package.name}\n"
    _put(tree / "DEBIAN/control", control)
    conffiles = "".join(f"{place}\n" for place in files if place.startswith("/etc/"))
    if conffiles:
        _put(tree / "DEBIAN/conffiles", conffiles)
    if package.configure:
        _put(tree / "DEBIAN/postinst", f"#!/bin/sh\n{package.configure}\n").chmod(0o755)
    deb = root / pool / name
    deb.parent.mkdir(parents=True, exist_ok=True)
    build = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(deb)]
    subprocess.run(build, check=True, capture_output=True)
    data = deb.read_bytes()
    return f"{control}Filename: {pool}/{name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n\n"


def _put(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def _key(keys: Path, name: str) -> str:
    """A key to throw away; the address that names it."""
    keys.mkdir(mode=0o700, exist_ok=True)
    address = f"{name.lower()}@lab"
    _gpg(keys, "--passphrase", "", "--quick-generate-key", f"{name} <{address}>", "ed25519", "sign", "never")
    return address


def _public(keys: Path, key: str) -> str:
    return _gpg(keys, "--armor", "--export", key)


def _gpg(keys: Path, *arguments: str) -> str:
    command = [
        "gpg",
        "--homedir",
        str(keys),
        "--batch",
        "--quiet",
        "--no-autostart" if "--export" in arguments else "--yes",
    ]
    return subprocess.run([*command, *arguments], check=True, capture_output=True, text=True).stdout


# --- serving them --------------------------------------------------------------------------------------------


@dataclass
class Server:
    """Where the repositories are, and what was asked of them."""

    url: str
    keyring: str = ""
    asked: list[str] = field(default_factory=list[str])


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, *given: Any, asked: list[str], **named: Any) -> None:
        self.asked = asked
        super().__init__(*given, **named)

    def log_message(self, format: str, *args: object) -> None:
        self.asked.append(self.path)


@contextmanager
def serve(folder: Path, address: str) -> Iterator[Server]:
    """The repositories at a free port of `address`, until the end of the block."""
    server = Server("")
    handler = partial(_Handler, directory=str(folder), asked=server.asked)
    with ThreadingHTTPServer((address, 0), handler) as http:
        server.url = f"http://{address}:{http.server_address[1]}"
        keys = Path(tempfile.mkdtemp(prefix="keys-"))  # the paths of the sockets of gpg-agent must be short
        try:
            build(folder, keys)
        finally:
            subprocess.run(["gpgconf", "--homedir", str(keys), "--kill", "all"], check=False)
            shutil.rmtree(keys)
        server.keyring = (folder / "distribution.asc").read_text()
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
