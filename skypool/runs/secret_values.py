"""Finds the values of secrets by their names: in the environment, in `.env`, and in the logins of tools."""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from skypool.errors import UsageError

_SETTING = re.compile(
    r"""(?mx)^[ \t]*(?:export[ \t]+)?([A-Za-z_][\w.]*)[ \t]*=[ \t]*
    ( "(?:[^"\\]|\\.|\\\n)*" | '(?:[^'\\]|\\.|\\\n)*' | [^\n]*? )
    [ \t]*(?:(?<=\s)\#[^\n]*)?$"""
)
"""A variable and its value in a file such as `.env`. A quoted value may have several lines."""
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_LOGINS = {
    "HF_TOKEN": "; `hf auth login` makes one",
    "HUGGING_FACE_HUB_TOKEN": "; `hf auth login` makes one",
    "WANDB_API_KEY": "; `wandb login` makes one",
}
_SHORTEST = 8
"""The least characters of a variable of a file that is masked: shorter ones are words such as "debug"."""
_HF_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def found(names: Sequence[str], root: Path, option: str) -> dict[str, str]:
    """Return the value of each secret, by its name. The first place that has it counts.

    The places are the environment, the file `.env` in the project's root, and for `HF_TOKEN` and `WANDB_API_KEY` the
    logins that `hf auth login` and `wandb login` have written. `option` is how the user has named them, for messages.

    Raises UsageError for a secret that is in none of them.
    """
    written = in_file(root / ".env")
    values = {}
    for name in names:
        value = os.environ.get(name) or written.get(name) or _login(name)
        if "=" in name:
            raise UsageError(
                f"{option} takes the name of a variable without its value, which a command line would show to "
                "others; set the variable before, and name it"
            )
        if not value:
            login = _LOGINS.get(name, "")
            raise UsageError(
                f"{option.rstrip('=')} {name}: neither the environment nor {root / '.env'} has a value of this "
                f"name{login}"
            )
        values[name] = value
    return values


def in_file(path: Path) -> dict[str, str]:
    """Return the variables that a file such as `.env` sets; {} if there is no such file."""
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return {}
    return {name: _unquoted(value) for name, value in _SETTING.findall(text)}


def _unquoted(value: str) -> str:
    if value[:1] == '"' and value[-1:] == '"' and len(value) > 1:
        return re.sub(r"\\(.)", lambda found: _ESCAPED.get(found[1], found[1]), value[1:-1], flags=re.DOTALL)
    if value[:1] == "'" and value[-1:] == "'" and len(value) > 1:
        return re.sub(r"\\([\\'])", r"\1", value[1:-1])
    return value


def _login(name: str) -> str:
    if name in _HF_TOKENS:
        home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
        try:
            return (home / "token").read_text("utf-8", "replace").strip()
        except OSError:
            return ""
    if name == "WANDB_API_KEY":
        return _netrc("api.wandb.ai")
    return ""


def _netrc(host: str) -> str:
    try:
        login = netrc.netrc(os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return ""
    return (login[2] or "") if login else ""


def masked(values: Mapping[str, str], sent: Iterable[str], root: Path) -> dict[str, str]:
    """Return what is masked in output: these secrets, and the variables of files such as `.env` among those sent."""
    found = dict(values)
    for path in sorted(each for each in sent if ".env" in each.lower()):
        lower = Path(path).name.lower()
        if lower.startswith(".env") or lower.endswith(".env"):
            for name, value in in_file(root / path).items():
                if len(value) < _SHORTEST:
                    continue
                is_other = found.get(name, value) != value  # two files may have a variable of one name
                found[f"{name} of {path}" if is_other else name] = value
    return found
