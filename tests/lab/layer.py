"""The layer between the base root file system and a machine: our boot programs, and how this host reaches the world.

Name service, certificates, apt sources and pip settings are taken from the host when a lab starts, so that `apt-get
install` and `pip install` in a machine work wherever they work on the host, and no mirror's name is written down here.
"""

from __future__ import annotations

import ast
import functools
import shutil
import subprocess
import sys
from pathlib import Path

INSIDE = Path(__file__).parent / "inside"
BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
POWER = ("shutdown", "poweroff", "halt", "reboot")


def build(layer: Path) -> list[Path]:
    """Fill an empty folder; the host's folders that a machine needs to see besides."""
    place(layer / "usr/local/lib/lab/boot.py", (INSIDE / "boot.py").read_text())
    for name in POWER:
        place(layer / "usr/sbin" / name, (INSIDE / "power").read_text(), 0o755)
    place(layer / "etc/resolv.conf", Path("/etc/resolv.conf").read_text())
    _certificates(layer)
    _apt(layer)
    settings = pip_settings()
    if settings:
        lines = [f"{name} = {value}" for name, value in settings.items()]
        place(layer / "etc/pip.conf", "\n".join(["[global]", *lines, ""]))
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


@functools.cache
def pip_settings() -> dict[str, str]:
    """The host's, from its files and its environment."""
    argv = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    settings: dict[str, str] = {}
    for line in sorted(lines, key=lambda line: line.startswith(":env:")):  # the environment has the last word
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("global", ":env:"):
            settings[key] = " ".join(str(ast.literal_eval(value)).split())
    return settings


def local_folders(settings: dict[str, str]) -> list[Path]:
    """Folders of this host that pip installs from. An index at …/simple may point at what lies beside it."""
    found: list[Path] = []
    for word in " ".join(settings.values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.is_dir():
            found.append(path.parent if path.name == "simple" else path)
    return list(dict.fromkeys(found))
