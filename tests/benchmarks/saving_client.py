"""A client whose pool saves a folder: it prints the most memory in MiB that it had.

python -m tests.benchmarks.saving_client ENDPOINT FILES SIZE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import skypool as sky
from tests.lab.kernel import most_memory
from tests.lab.stores import secret_of


@sky.compute
def write(files: int, size: int) -> None:
    """Write so many files of so many bytes."""
    for number in range(files):
        file = Path("out", f"{number % 100}", f"{number}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(size))


def main(endpoint: str, files: str, size: str) -> None:
    """Have a node of this machine write and save the files."""
    os.environ |= {"SAVE_ID": "owner", "SAVE_SECRET": secret_of("owner")}
    bucket = sky.Bucket("s3://models/runs/client", endpoint, keys=("SAVE_ID", "SAVE_SECRET"))
    with sky.ComputePool(slots=1, save={"out": bucket}, drain=600, console="off") as pool:
        write(int(files), int(size)) >> pool
    print(most_memory("self"))


if __name__ == "__main__":
    main(*sys.argv[1:])
