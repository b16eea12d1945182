"""Hosts as the user describes them, and requests that are sent to a host by ssh.

- `Host`, `host`, `inventory`: the description of a host, from an object, a text, or a TOML file.
- `ask`: runs one of the shell functions in host.sh on a host, and returns the output.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from skypool import accelerators
from skypool.accelerators import Accelerator
from skypool.devices import elsewhere
from skypool.drivers import settings
from skypool.errors import ConnectionLost, HostKeyMismatch, LoginRefused, UsageError, nearest
from skypool.safety import private
from skypool.shipping import package_zip
from skypool.text import plain
from skypool.wire.transport import SSH, Errand, Trouble, missing_key

_WRITTEN = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<v6>[0-9a-fA-F:.%\w]+)\]|(?P<name>[^@:\s]+))(?::(?P<port>\d+))?")
_NAME = re.compile(r"[^\s@/-][^\s@/]*")
_WORD = re.compile(r"[^\n-][^\n]*")
"""Matches a valid argument for `ssh`: a single line that does not begin with "-"."""
_KEY = re.compile(r"[a-z][\w@.-]+ [A-Za-z0-9+/]+=*")

_SSH_FAILED = 255
"""The exit status of `ssh` if `ssh` itself failed, and not the remote command."""
_BEGUN = "@begun"
"""The first line that skypool's script prints on a host. Lines before it come from start files of the host's shell."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine of the user's own, with what is needed to log in there by ssh.

    If user, port, identity or jump is None, the setting of the same name of the `SSH` driver is used. If that is None,
    too, the user's ssh configuration decides.

    Args:
        name: an address, a host name, or a Host of the ssh configuration.
        user: the login name.
        port: the port of the SSH server.
        identity: the file of a private key.
        jump: the host to connect through, as for `ssh -J`.
        accelerator: the host's accelerator, such as "H100:8". None asks the host when a pool needs accelerators.
        host_key: the host's public key, "ssh-ed25519 AAAA…". No other key is trusted then. None trusts the known key,
            or the first one seen.

    Raises:
        UsageError: a value is not valid, or the accelerator is unknown.
    """

    name: str
    user: str | None = None
    port: int | None = None
    identity: str | None = None
    jump: str | None = None
    accelerator: str | Accelerator | None = None
    host_key: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UsageError(f"a host's name must be an address or a Host of your ssh configuration, not {self.name!r}")
        settings.plain(self, identity=Path, host_key=str)
        if self.port is not None and not _is_port(self.port):
            raise UsageError(f"port must be a number from 1 to 65535, not {self.port!r}")
        for word in ("user", "identity", "jump"):
            value = getattr(self, word)
            if value is not None and not _is_word(value):
                raise UsageError(f"{word} must be a text of one line that does not begin with '-', not {value!r}")
        if self.accelerator is not None:
            object.__setattr__(self, "accelerator", accelerators.parse(self.accelerator))
        if self.host_key is not None and not _KEY.match(self.host_key):
            raise UsageError(
                f"host_key must be like 'ssh-ed25519 AAAA…' (see /etc/ssh/ssh_host_*.pub on the host), not "
                f"{self.host_key!r}"
            )

    @property
    def label(self) -> str:
        """The host's name in messages, in the form "user@name:port". An IPv6 address is in brackets.

        User and port are left out if they were not given for this host.
        """
        label = f"[{self.name}]" if ":" in self.name else self.name
        if self.user:
            label = f"{self.user}@{label}"
        if self.port:
            label = f"{label}:{self.port}"
        return label

    @property
    def has(self) -> Accelerator | None:
        """The host's accelerator, or None if the user has not given one. The host is not asked."""
        return self.accelerator if isinstance(self.accelerator, Accelerator) else None


def _is_port(value: object) -> bool:
    return type(value) is int and 0 < value < 65536


def _is_word(value: object) -> bool:
    return isinstance(value, str) and _WORD.fullmatch(value) is not None


def host(given: object) -> Host:
    """Return the host that an entry of the setting `hosts` describes.

    Args:
        given: a `Host`, which is returned as it is, or a text such as "user@name:port" or "[IPv6 address]:port".

    Raises:
        UsageError: `given` is neither a `Host` nor such a text, or a part of the text is not valid.
    """
    if isinstance(given, Host):
        return given
    written = _WRITTEN.fullmatch(given) if isinstance(given, str) else None
    if written is None:
        raise UsageError(f"a host must be 'name', 'user@name:port', or a Host(…), not {given!r}")
    return Host(
        name=written["v6"] or written["name"],
        user=written["user"],
        port=int(written["port"]) if written["port"] else None,
    )


def inventory(file: str) -> Iterator[Host]:
    """Yield the hosts that a TOML file describes: one for each `[[host]]` table, in order.

    The table `[defaults]` has values for fields that a `[[host]]` table lacks. The file is read when the first host is
    taken. A file without a `[[host]]` table yields nothing.

    Args:
        file: the path of the file, which may begin with "~".

    Raises:
        UsageError: the file cannot be read, is not TOML, has an unknown or invalid field, or lacks the name of a host.
    """
    try:
        read = tomllib.loads(Path(file).expanduser().read_text())
    except (OSError, ValueError) as e:
        what = "path in inventory=" if isinstance(e, OSError) else "TOML of this file"
        raise UsageError(f"the inventory file {file} cannot be read: {e}; correct the {what}") from e
    _known(file, read, ("host", "defaults"))
    defaults = read.get("defaults", {})
    words = [each.name for each in fields(Host)]
    _known(f"[defaults] in {file}", defaults, words[1:-1])
    for entry in read.get("host", []):
        _known(f"[[host]] in {file}", entry, words)
        if "name" not in entry:
            raise UsageError(f"a [[host]] in {file} has no name: {entry}; add a line such as name = 'gpu1'")
        yield Host(**{**defaults, **entry})


def _known(where: str, table: Mapping[str, Any], words: Sequence[str]) -> None:
    """Raise UsageError if a table of the inventory has a field without a known name, and suggest a similar one."""
    for word in table:
        if word in words:
            continue
        close = nearest(word, words, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"{where}: there is no field {word!r}{hint} (the fields are {', '.join(words)})")


@cache
def _script() -> str:
    """Return the source of the shell functions that `ask` can run on a host: those of host.sh, and `devices`."""
    questions = (files("skypool_ssh") / "host.sh").read_text("utf-8")
    return f"{private.CLOSED}\n{questions}\ndevices() {{\n{elsewhere.question()}\n}}"


def ask(ssh: SSH, label: str, words: Sequence[str]) -> Callable[[float], list[str]]:
    """Start a shell function on a host by ssh, and return a Python function that waits for the answer.

    Args:
        ssh: how to run commands on the host.
        label: the host's name in messages.
        words: the name of the shell function (one of host.sh, or `devices`), and its arguments.

    Returns:
        a function `answer(until)`, to be called once. It blocks, and returns the lines that the shell function printed.
            At the time `until`, as `time.monotonic()` counts, the ssh process is killed. If there is no answer, the
            function raises ConnectionLost, HostKeyMismatch or LoginRefused.
    """
    text = f"{_script()}\necho {_BEGUN}\n{shlex.join(words)}\n"
    asked = Errand(ssh.argv(package_zip.STAGE), package_zip.staged(text))
    return partial(_answer, asked, ssh, label)


class Dropped(ConnectionLost):
    """The error for an ssh connection that the server closed because too many connections came at once.

    Another try may succeed.
    """


def _answer(asked: Errand, ssh: SSH, label: str, until: float) -> list[str]:
    """Wait until the time `until` (`time.monotonic()`) for what `ask` started, and return the lines of the answer."""
    try:
        status, out, said = asked.result(until)
    except TimeoutError as e:
        raise ConnectionLost(
            f"host {label} did not answer in time; check that the host is switched on and `ssh {ssh.host}` reaches it"
        ) from e
    lines = [plain(each) for each in out.splitlines()]
    if _BEGUN in lines and status == 0:
        return lines[lines.index(_BEGUN) + 1 :]
    if _BEGUN not in lines and 0 <= status < _SSH_FAILED:
        printed = "\n".join([*lines, said]).strip()
        also = f" and said {printed[:500]!r}" if printed else ""
        raise ConnectionLost(
            f"{label} accepts the login, but runs no commands: the shell there ended with status {status}{also}. "
            f"If a start file of the shell ends it, take `exit` or `exec` out of ~/.bashrc or ~/.profile there. "
            f"If the account has no shell (nologin, false), run `chsh -s /bin/sh` there, or log in with another user="
        )
    target = label
    who = f" as {ssh.user}" if ssh.user else ""
    if "exchange_identification" in said:  # the connection got only as far as the jump host
        target = f"the jump host on the way to {label} (log in to a new jump host by hand once)"
        who = ""
    match ssh.trouble(said):
        case Trouble.HOST_KEY:
            raise HostKeyMismatch(
                f"{target} has another host key than the known one, so nothing was sent there. If the host's key was "
                f"changed on purpose, remove the old key with `ssh-keygen -R` or correct host_key=. "
                f"ssh printed:\n{said}"
            )
        case Trouble.LOGIN:
            raise LoginRefused(
                f"{target} refused the login{who}: {missing_key(ssh)}check user= and identity=, and try "
                f"`ssh {ssh.host}` by hand. ssh printed:\n{said}"
            )
        case _:
            said = said or f"ssh ended with status {status}"
            kind = Dropped if ssh.dropped(said) else ConnectionLost
            raise kind(f"{label} cannot be used: {said} (check that the host is on and `ssh {ssh.host}` reaches it)")
