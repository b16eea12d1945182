"""Sends what the runner of a run on this machine has measured and noted of it, for reports elsewhere.

A node runs this text as a program, as `files.transfer.node_program` says. It reads the file that
`samples.session_file` describes, and sends each row as a line of JSON: the name of the table, and the row by the names
of its columns. The lines are compressed together. The last one is `null`, also if there is no such file.
"""

import json
import os
import sqlite3
import zlib

from skypool.runs.follow_end import send

_TABLES = "fact", "event", "call", "work", "sample"
_WAIT = 20.0
"""Seconds to wait while the runner writes to the file."""
_PIECE = 1 << 18


def main(run: str, session: str) -> None:
    """Send all rows of the file of a session, which is in the folder `run`."""
    file = os.path.join(run, "state", "skypool", "samples", f"{session}.sqlite3")
    packer = zlib.compressobj(1)
    waiting = b""
    if os.path.exists(file):
        book = sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=_WAIT)
        book.execute("begin")  # one state of all tables
        there = {name for (name,) in book.execute("select name from sqlite_master where type = 'table'")}
        for table in _TABLES:
            if table not in there:
                continue
            rows = book.execute(f"select * from {table}")
            columns = [each[0] for each in rows.description]
            for row in rows:
                said = json.dumps([table, dict(zip(columns, row, strict=True))])
                waiting += packer.compress(said.encode() + b"\n")
                if len(waiting) > _PIECE:
                    send(waiting)
                    waiting = b""
    send(waiting + packer.compress(b"null\n") + packer.flush())
