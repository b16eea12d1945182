"""A program that runs on a fake machine and waits until the cloud announces that it takes the machine back.

The announcement is a file that contains the time at which the machine is taken back. `machine.watch` returns this
module's source text, followed by a call of `wait`.
"""

import time


def wait(file: str) -> None:
    """Wait until a file exists, print its text on stdout, and return. There is no limit on the time to wait.

    Args:
        file: the path of the file. This function looks for the file every 0.05 seconds.
    """
    while True:
        try:
            with open(file) as said:
                print(said.read(), flush=True)
            return
        except FileNotFoundError:
            time.sleep(0.05)
