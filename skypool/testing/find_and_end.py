"""Program that finds and ends the machines of a pool in a process of its own, as after a crash of the client.

The driver and the name of the pool come as a pickle on stdin; the ids of what was found are printed.
"""

from __future__ import annotations

import pickle
import sys

from skypool.drivers.contract import Driver


def main() -> None:
    driver: Driver
    pool: str
    driver, pool = pickle.load(sys.stdin.buffer)
    found = driver.instances(pool=pool)
    driver.terminate(found)
    print(*sorted(each.id for each in found))


if __name__ == "__main__":
    main()
