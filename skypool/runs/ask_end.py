"""Asks the runner of a run on this machine for observers elsewhere, and sends what it answers.

A node runs this text as a program, as `files.transfer.node_program` says. The runner serves the requests that
`observers.protocol` lists on a socket in the folder of the run. Each answer is a line of JSON.
"""

import json
import os
import select
import socket
import time

from skypool.runs.follow_end import send

_TO_ANSWER = 20.0
"""Seconds in which the runner must answer."""
_READ = 1 << 16


def main(run: str, pool: str, request: str, every: str) -> None:
    """Send a request to the runner, and its answer to the client.

    Args:
        run: the folder of the run.
        pool: the name of the pool.
        request: the line to send, without its newline.
        every: the seconds between two requests, which go on until the client goes; "" for one request.
    """
    client = select.poll()
    client.register(1, 0)  # errors alone: the other end is closed
    while True:
        send(_answer(run, pool, request))
        if not every:
            return
        if client.poll(1000.0 * float(every)):
            return


def _answer(run: str, pool: str, request: str) -> bytes:
    """Return the runner's answer, or a line that says why there is none."""
    path = os.path.join(run, "state", "skypool", "observers", pool)
    until = time.monotonic() + _TO_ANSWER
    try:
        with socket.socket(socket.AF_UNIX) as runner:
            runner.settimeout(_TO_ANSWER)
            # the path may be too long for a socket: a short one leads to its folder
            folder = os.open(os.path.dirname(os.path.realpath(path)), os.O_PATH | os.O_DIRECTORY)
            try:
                runner.connect(f"/proc/self/fd/{folder}/{os.path.basename(os.path.realpath(path))}")
            finally:
                os.close(folder)
            runner.sendall(request.encode() + b"\n")
            answer = b""
            while not answer.endswith(b"\n"):
                runner.settimeout(max(0.01, until - time.monotonic()))
                part = runner.recv(_READ)
                if not part:
                    raise EOFError("it closed the connection")
                answer += part
            return answer
    except (OSError, EOFError) as e:
        said = {"ok": False, "kind": "NoRunner", "error": f"the runner of the run there does not answer: {e}"}
        if os.path.exists(os.path.join(run, "status.json")):
            said = {"ok": False, "kind": "IsOver", "error": "it is over"}
        return json.dumps(said).encode() + b"\n"
