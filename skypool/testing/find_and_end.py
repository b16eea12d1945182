"""A program that finds and ends the machines of a pool. It runs in a new process, as after a crash of the client.

It reads the driver and the name of the pool as a pickle from stdin, and prints the ids of the machines that it found.
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
