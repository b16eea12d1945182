"""A generator that is stopped at any moment ends: no lock of the worker stays taken."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, random, signal, sys, threading, time
from skypool.agent.shield import Cancelled, Shield
from skypool.agent.streams import Sender

class Channel:
    def send(self, *frame): pass
    def receive(self, wanted): raise AssertionError("the window is large")
    def drain(self): pass

def numbers():
    number = 0
    while True:
        yield number
        number += 1

def watch():
    while True:
        time.sleep(1)
        if time.monotonic() - began > 20:
            os.write(2, b"it hangs")
            os._exit(1)

random.seed(1)
shield = Shield()
armed = False

def stop(number, frame):
    global armed
    if armed:
        armed = False
        shield.stop()

signal.signal(signal.SIGALRM, stop)
sys.setswitchinterval(1e-5)
began = time.monotonic()
threading.Thread(target=watch, daemon=True).start()
for turn in range(400):
    sender = Sender(Channel(), 1, "numbers", 1 << 40, shield)
    began = time.monotonic()
    armed = True
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.003))
        sender.send_all(numbers())
    except Cancelled:
        pass
print("all ended")
"""


def test_a_generator_that_is_stopped_at_any_moment_ends() -> None:
    """Without the shield, one of the first ten hangs."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "all ended\n", "")
