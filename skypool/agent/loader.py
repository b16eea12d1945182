"""The program with which each connection to a node begins. It unpacks skypool on the node and connects to the agent.

The client sends this text (`LOADER` in `skypool.shipping.package_zip`), so its length is limited. It imports only the
standard library. Any Python 3 must be able to run it and report a wrong version.
"""

import gc
import json
import os
import sys

gc.disable()  # until the node runs: a collection finds nothing while modules are imported

ALIVE = b"@alive!\n"
"""What a client sends regularly during a setup. Some may be unread when this program starts."""
GONE = 3
"""Exit status: the agent has ended, and no new one may be started."""
OTHER_PYTHON = 4
"""Exit status: this Python's minor version is not the client's."""


def take(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            sys.exit(1)  # the client is gone, or knows better why it has closed the connection
        data += part
    return data


def save(archive: str, size: int) -> None:
    """Read `size` bytes from stdin, and save them as the file `archive`, which appears only when it is complete."""
    part = f"{archive}.{os.getpid()}"
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(take(size))
    os.rename(part, archive)


def is_private(about: os.stat_result) -> bool:
    """Return True if only this user can change a folder or file, so that code in it may be run."""
    return about.st_uid == os.geteuid() and not about.st_mode & 0o022


def enter(folder: str) -> None:
    """Make this folder the current one. If another user can change it, end the program with a message instead."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if not is_private(os.fstat(fd)):
        sys.exit(f"skypool does not use the folder {folder}: other users of this machine can change it; remove it")
    os.fchdir(fd)
    os.close(fd)


def main() -> None:
    head = take(8)
    while head == ALIVE:
        head = take(8)
    prelude = json.loads(take(int(head)).decode())
    config = prelude["config"]
    for name in ("folder", "spool", "cwd"):
        config[name] = os.path.expanduser(config[name])
        if prelude["start"]:
            mask = os.umask(0o077)  # also for the folders above, which another node may just have removed
            os.makedirs(config[name], 0o700, exist_ok=True)
            os.umask(mask)
    archive = os.path.join(config["folder"], f"skypool-{prelude['hash']}.zip")
    python = list(sys.version_info[:3])
    have = os.path.isdir(config["folder"])
    if have:
        enter(config["folder"])
        have = os.path.lexists(archive) and is_private(os.lstat(archive))
    gone = not have and not prelude["start"]
    found = os.listdir(".") if gone and os.path.isdir(config["folder"]) else []
    other = any(each.startswith("skypool-") and each.endswith(".zip") for each in found)
    os.write(1, (json.dumps({"python": python, "have": have, "gone": gone, "other": other}) + "\n").encode())
    if gone:
        sys.exit(GONE)
    if python[:2] != prelude["python"]:
        sys.exit(OTHER_PYTHON)
    if not have:
        save(archive, prelude["size"])
    sys.path[:] = [archive, *(path for path in sys.path if path)]
    from skypool.agent.holder import connect

    connect(config, prelude["start"])


if __name__ == "__main__":
    main()
