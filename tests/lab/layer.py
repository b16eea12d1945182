"""The layer between the base root file system and a machine: our boot programs, and how this host reaches the world.

Name service, certificates, apt sources and pip settings are taken from the host when a lab starts, so that `apt-get
install` and `pip install` in a machine work wherever they work on the host, and no mirror's name is written down here.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

INSIDE = Path(__file__).parent / "inside"
BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
POWER = ("shutdown", "poweroff", "halt", "reboot")
_NAMES_A_FILE = re.compile(r"\s*(?:-c|--constraint|-r|--requirement)[ =]\s*(\S+)")
"""A line of a constraints or requirements file that names another one."""


def build(layer: Path) -> list[Path]:
    """Fill an empty folder; the host's folders that a machine needs to see besides."""
    place(layer / "usr/local/lib/lab/boot.py", (INSIDE / "boot.py").read_text())
    for name in POWER:
        place(layer / "usr/sbin" / name, (INSIDE / "power").read_text(), 0o755)
    place(layer / "etc/resolv.conf", Path("/etc/resolv.conf").read_text())
    _certificates(layer)
    _apt(layer)
    settings = pip_settings()
    for section, values in settings.items():
        lines = [f"{name} = {value}" for name, value in values.items()]
        with (layer / "etc/pip.conf").open("a") as file:
            file.write("\n".join([f"[{section}]", *lines, ""]))
    for path in _pip_files(settings):
        if not (layer / path.relative_to("/")).exists():
            place(layer / path.relative_to("/"), path.read_text())
    shown = local_folders(settings)
    for folder in shown:
        (layer / folder.relative_to("/")).mkdir(parents=True, exist_ok=True)
    return shown


def place(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file, its folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _certificates(layer: Path) -> None:
    """Whom the host trusts, for programs that read the bundle and for those that ask OpenSSL."""
    place(layer / BUNDLE.relative_to("/"), BUNDLE.read_text())
    (layer / "usr/lib/ssl").mkdir(parents=True)
    (layer / "usr/lib/ssl/cert.pem").symlink_to(BUNDLE)
    place(layer / "etc/environment", f"SSL_CERT_FILE={BUNDLE}\n")


def _apt(layer: Path) -> None:
    sources = [path for path in Path("/etc/apt/sources.list.d").glob("*") if path.suffix in (".list", ".sources")]
    for path in [Path("/etc/apt/sources.list"), *sources]:
        place(layer / path.relative_to("/"), path.read_text() if path.exists() else "")
    for folder in ("/etc/apt/keyrings", "/etc/apt/trusted.gpg.d", "/usr/share/keyrings", "/etc/apt/auth.conf.d"):
        if Path(folder).is_dir():
            shutil.copytree(folder, layer / folder[1:], dirs_exist_ok=True)
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
    wanted = ("Acquire::http", "Acquire::Check-", "Acquire::Retries", "Acquire::ForceIPv")
    kept = [line for line in dump.splitlines() if line.startswith(wanted)]
    place(layer / "etc/apt/apt.conf.d/90host", "".join(f"{line}\n" for line in kept))


def pip_settings() -> dict[str, dict[str, str]]:
    """Return the host's settings of pip by section, from its files and its environment."""
    argv = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    settings: dict[str, dict[str, str]] = {}
    for line in sorted(lines, key=lambda line: line.startswith(":env:")):  # the environment has the last word
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        section = "global" if section == ":env:" else section
        settings.setdefault(section, {})[key] = " ".join(str(ast.literal_eval(value)).split())
    return settings


def _paths(settings: dict[str, dict[str, str]]) -> list[Path]:
    """The absolute paths that settings of pip name."""
    words = [word for values in settings.values() for value in values.values() for word in value.split()]
    return [path for word in words if (path := Path(word.removeprefix("file://"))).is_absolute()]


def _pip_files(settings: dict[str, dict[str, str]]) -> list[Path]:
    """Files that pip reads because settings name them, such as constraints, and the files that these name in turn."""
    found: list[Path] = []
    to_read = [path for path in _paths(settings) if path.is_file()]
    while to_read:
        path = to_read.pop()
        if path in found:
            continue
        found.append(path)
        for line in path.read_text().splitlines():
            if named := _NAMES_A_FILE.match(line):
                to_read.append(path.parent / named[1])
    return found


def local_folders(settings: dict[str, dict[str, str]]) -> list[Path]:
    """Folders of this host that pip installs from. An index at …/simple may point at what lies beside it."""
    folders = [path for path in _paths(settings) if path.is_dir()]
    return list(dict.fromkeys(path.parent if path.name == "simple" else path for path in folders))
