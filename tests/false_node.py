"""A node that speaks the protocol by hand, so that a test decides what it sends."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import skypool as sky
from skypool.wire.frames import WIRE_VERSION

NODE = """\
    #!{python}
    import json, os, pickle, struct, sys, time
    os.dup2(3, 1)
    def take(n):
        d = b""
        while len(d) < n: d += os.read(0, n - len(d)) or sys.exit()
        return d
    def write(data):
        while data: data = data[os.write(1, data):]
    def frame(kind, header, body=b"", head=None):
        head = head or json.dumps(header).encode()
        return struct.pack("!2sBBIQ", b"sk", {version}, kind, len(head), len(body)) + head + body
    def raw(kind, head):
        write(frame(kind, None, b"", head))
    def hear(*kinds):
        "The header of the next frame of one of these kinds."
        while True:
            _, _, kind, head, body = struct.unpack("!2sBBIQ", take(16))
            header = json.loads(take(head)); take(body)
            if kind in kinds: return header
    def call():
        "The id of the next call."
        header = hear(6, 23)
        return header["id"] if "id" in header else header["ids"][0]
    def outcome(id, value=1, **fields):
        body = pickle.dumps(value)
        write(frame(7, {{"id": id, "ok": True, "seconds": 0.1, "lens": [len(body)], **fields}}, body))
    def wait():
        while os.read(0, 65536): pass
    if len(sys.argv) > 3:  # a connection of a forward
        while True: write(b"x" * 65536)
    marker = {marker!r}
    again = os.path.exists(marker)
    open(marker, "w").close()
    length = take(8)
    config = take(int(length))
    p = json.loads(config)
    if p["config"]["node"] in {honest}:  # a usual node in its place
        import select, subprocess
        real = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=-1, bufsize=0, pass_fds=[3])
        data = length + config
        while data:
            real.stdin.write(data)
            select.select([0], [], [])  # it does not block, as the real node has made it so
            data = os.read(0, 65536)
        real.stdin.close()
        sys.exit(real.wait())
    greeting = json.dumps({{"python": list(sys.version_info[:3]), "have": True, "gone": False}})
    welcome = {{"slots": 1, "cpu_slots": 0, "devices": 0, "cpu_calls": []}}
    welcome |= {{"calls": [], "names": {{}}, "streams": [], "functions": [], "objects": []}}
    welcome["health"] = {{"devices": [], "driver": "", "disk_free": 1 << 40, "time": time.time()}}
    {before}
    write(greeting.encode() + b"\\nready\\n")
    hear(1)
    write(frame(2, {{}}, json.dumps(welcome).encode()))
    {after}
"""


def false_node(folder: Path, after: str, before: str = "pass", honest: Sequence[int] = ()) -> sky.Local:
    """A provider whose nodes do what some code says.

    Args:
        folder: the folder in which the node is written.
        after: what the node does after it was let in.
        before: what it changes of `greeting` and `welcome` before.
        honest: the numbers of the nodes that are real ones.
    """
    text = textwrap.dedent(NODE)
    indented = {"before": before, "after": textwrap.dedent(after).strip()}
    script = folder / "python"
    known = {"python": sys.executable, "version": WIRE_VERSION, "marker": str(folder / "was-here")}
    script.write_text(text.format(**known, honest=tuple(honest), **indented))
    script.chmod(0o755)
    return sky.Local(python=str(script))
