"""A program that runs on a fake machine and waits until the cloud announces that it takes the machine back.

The announcement is a file with the time at which that happens. `machine.watch` returns the text of this file with a
call of `wait` behind it.
"""

import time


def wait(file: str) -> None:
    """Wait until a file exists, print its text on stdout, and return. There is no limit on the time to wait.

    Args:
        file: the path of the file. It is looked for every 0.05 seconds.
    """
    while True:
        try:
            with open(file) as said:
                print(said.read(), flush=True)
            return
        except FileNotFoundError:
            time.sleep(0.05)
