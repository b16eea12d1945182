"""The client whose machine must end itself: rents a machine, says that it is ready, and waits to be killed.

`guard.watch_end` runs this module in a process of its own. It sends the driver, and the pool's name and arguments, to
stdin, pickled. If stdin ends, the process that called `watch_end` is gone or has given up. Then this client ends its
pool itself.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading

from skypool.compute_pool.compute_pool import ComputePool
from skypool.drivers.preflight import failure


def main() -> int:
    """Rent the machine, print {"ready": true}, and wait. For an error, print {"text": …, "advice": …} and return 1."""
    driver, pool, options = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        with ComputePool(driver, name=pool, **options):
            _say({"ready": True})
            threading.Event().wait()
    except Exception as e:  # noqa: BLE001 - the process that began this one shows it
        found = failure("", e)
        _say({"text": found.text, "advice": found.advice})
        return 1
    return 0


def _end_with_parent() -> None:
    """Wait until stdin ends, and then end this process as SIGTERM does."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _say(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
