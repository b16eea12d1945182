"""What each failure looks like, and that the pool goes on after all of them. Needs nothing, costs nothing."""

import os
import threading
import time

import skypool as sky

lock = threading.Lock()
failures = {
    "raise": lambda: os.environ["no such key"],
    "exit": lambda: os._exit(3),
    "crash": lambda: os.kill(os.getpid(), 11),
    "hang": lambda: time.sleep(3600),
    "return a file": lambda: {"log": open(os.devnull)},
    "capture a lock": lambda: lock.locked(),
    "do nothing wrong": lambda: "fine",
}

if __name__ == "__main__":
    with sky.ComputePool(slots=1) as pool:
        for name, function in failures.items():
            try:
                print(name, "->", sky.compute(timeout=0.5)(function)() >> pool)
            except (KeyError, sky.SkypoolError) as error:
                print(name, "->", type(error).__name__, str(error).splitlines()[0])
    try:
        sky.ComputePool(accelerator="H1OO")
    except sky.UnknownAccelerator as error:
        print(f"mistype -> {error}")
