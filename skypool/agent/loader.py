"""The program that each connection to a node starts with: it brings skypool there, and becomes the agent's holder.

The client sends this text itself (`LOADER` in `skypool.shipping.bundle`). Until the archive is on the node there is
only the standard library. Any Python 3 must be able to run this text, so that one of another version says which it is.
"""

import json
import os
import sys

ALIVE = b"@alive!\n"
"""What a client says while a machine is made ready. Some of it may be left in the stream."""
GONE = 3
"""Exit status: there is no agent any more, and none is to be started."""
OTHER_PYTHON = 4
"""Exit status: this is another minor version of Python than the client's."""


def take(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            sys.exit("the client went away during the handshake")
        data += part
    return data


def save(archive: str, size: int) -> None:
    """Write the archive that comes next; other connections see it whole or not at all."""
    part = f"{archive}.{os.getpid()}"
    with open(part, "wb") as file:
        file.write(take(size))
    os.rename(part, archive)


def main() -> None:
    head = take(8)
    while head == ALIVE:
        head = take(8)
    prelude = json.loads(take(int(head)).decode())
    config = prelude["config"]
    for name in ("folder", "spool", "cwd"):
        config[name] = os.path.expanduser(config[name])
        if prelude["start"]:
            os.makedirs(config[name], 0o700, exist_ok=True)
    archive = os.path.join(config["folder"], f"skypool-{prelude['hash']}.zip")
    python = list(sys.version_info[:3])
    have = os.path.exists(archive)
    gone = not have and not prelude["start"]
    os.write(1, (json.dumps({"python": python, "have": have, "gone": gone}) + "\n").encode())
    if gone:
        sys.exit(GONE)
    if python[:2] != prelude["python"]:
        sys.exit(OTHER_PYTHON)
    if not have:
        save(archive, prelude["size"])
    sys.path[:] = [archive, *(path for path in sys.path if path)]
    from skypool.agent.start import connect

    connect(config, prelude["start"])


if __name__ == "__main__":
    main()
