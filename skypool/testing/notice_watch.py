"""A program that waits on a fake machine for its spot notice: a file with the time at which the cloud takes it back.

`machine.watch` sends this text with a call of `wait` behind it.
"""

import time


def wait(file: str) -> None:
    """Wait until there is such a file, and print what it says."""
    while True:
        try:
            with open(file) as said:
                print(said.read(), flush=True)
            return
        except FileNotFoundError:
            time.sleep(0.05)
