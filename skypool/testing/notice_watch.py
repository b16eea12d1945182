"""A program that runs on a fake machine and waits until the cloud announces that it takes the machine back.

The announcement is a file with the time at which the machine is taken back. `machine.watch` returns this module's
source text, followed by a call of `wait`.
"""

import time


def wait(file: str) -> None:
    """Wait without limit until a file exists, and print its text on stdout. Looks for it every 0.05 seconds."""
    while True:
        try:
            with open(file) as said:
                print(said.read(), flush=True)
            return
        except FileNotFoundError:
            time.sleep(0.05)
