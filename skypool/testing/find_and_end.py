"""A program that finds and ends the machines of a pool, in a new process, as after a crash of the client.

It reads a pickle from stdin: the tuple (driver, name of the pool). It prints the sorted ids of the machines that it
found in one line, separated by spaces.
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
