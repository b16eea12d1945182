"""A program that finds and ends the machines of a pool, as a new client does after a crash of the first client.

Run it in a new process, as `python -m skypool.testing.find_and_end`, with a pickled tuple (driver, name of the pool) on
stdin. It prints the sorted ids of the machines that it found in one line, separated by spaces.
"""

from __future__ import annotations

import pickle
import sys

from skypool.drivers.contract import Driver


def main() -> None:
    """Find the machines of the pool that stdin names, end them, and print their ids. Errors are raised."""
    driver: Driver
    pool: str
    driver, pool = pickle.load(sys.stdin.buffer)
    found = driver.instances(pool=pool)
    driver.terminate(found)
    print(*sorted(each.id for each in found))


if __name__ == "__main__":
    main()
