"""Watches a machine whose client was killed: it must end by itself once its lease is over."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import IO, cast

from skypool.compute_pool.compute_pool import PoolOptions
from skypool.drivers.contract import Driver
from skypool.drivers.preflight import failure
from skypool.errors import ErrorGroup, ProviderError
from skypool.model import Finding, Instance, Offer
from skypool.proof.comparison import SEND
from skypool.proof.renting import WORDS, machines_of, proved
from skypool.proof.report import RentedMachine, Step
from skypool.rental.ledger import Ledger
from skypool.rental.reaper import terminate_all
from skypool.rental.reaper_process import terminate_in_background
from skypool.rental.records import newest

_PAUSE = 2.0
"""Seconds between two looks at the provider's list of machines."""
_SEEN = 60.0
"""Seconds for which a new machine may be missing from the provider's list."""
_TITLE = WORDS["guard"]


def watch_end(
    driver: Driver,
    pool: str,
    offers: Sequence[Offer],
    options: PoolOptions,
    *,
    lease: float,
    margin: float,
    tell: Callable[[Step], None],
) -> tuple[RentedMachine, ...]:
    """Let a process rent a machine, kill the process, and watch the provider's list until the machine has ended.

    Afterwards, this function ends whatever is left of the pool, and returns the machines of its receipt. If this
    function is interrupted, the process ends its machine itself.

    Args:
        pool: the name of the pool that the process makes.
        offers: the offers of the plan, to compare prices with.
        options: further arguments of the pool.
        lease: seconds that the machine may live on without its client.
        margin: seconds after the lease until the provider's list must show the end.
        tell: called with each step when it has ended.
    """

    def done(finding: Finding, since: float) -> None:
        tell(Step.of("cents", finding, time.monotonic() - since))

    ledger = Ledger.here()
    began = time.monotonic()
    try:
        with _client(driver, pool, {**options, "lease": lease}) as client:
            reached = _reached(client, driver, pool)
            if reached.good:
                client.kill()
        done(reached, began)
        if reached.good:
            began = time.monotonic()
            done(_watched(driver, pool, ledger, lease, margin), began)
    finally:
        began = time.monotonic()
        ended = _swept(driver, pool, ledger)
    record = newest(ledger.pools(pool))
    machines = () if record is None else machines_of(record.receipt(record.ended or time.time()), offers)
    tell(replace(Step.of("cents", ended, time.monotonic() - began), usd=sum(each.usd for each in machines)))
    return machines


@contextlib.contextmanager
def _client(driver: Driver, pool: str, options: PoolOptions) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process that rents the machine. After the block, close its stdin, and wait until it has ended."""
    import cloudpickle  # it can also send drivers that the user's own script defines

    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "skypool.proof.killed_client"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        task = cast(IO[bytes], process.stdin)
        with contextlib.suppress(BrokenPipeError):  # a process that has ended says nothing, which `_reached` tells
            task.write(cloudpickle.dumps((driver, pool, options)))
            task.flush()
        yield process
    finally:
        with contextlib.suppress(BrokenPipeError):  # as above
            cast(IO[bytes], process.stdin).close()
        cast(IO[bytes], process.stdout).close()
        process.wait()


def _reached(client: subprocess.Popen[bytes], driver: Driver, pool: str) -> Finding:
    """Wait until the client is ready and the provider lists its machine. Return a finding about that."""
    what = f"{_TITLE}: reached"
    lines = cast(IO[bytes], client.stdout)
    line = next((each for each in lines if each.startswith(b"{")), b"")  # a `sitecustomize` may print as well
    if not line:
        return Finding(what, False, f"its client ended with status {client.wait()}", SEND)
    told = json.loads(line)
    if "ready" not in told:
        return Finding(what, False, told["text"], told["advice"] or SEND)
    until = time.monotonic() + _SEEN
    while not (there := _listed(driver, pool)):  # its absence is to mean its end
        if time.monotonic() > until:
            return Finding(what, False, f"{driver.name} does not list the machine, which runs", SEND)
        time.sleep(_PAUSE)
    return Finding(what, True, f"{', '.join(each.id for each in there)}: its client is killed now")


def _watched(driver: Driver, pool: str, ledger: Ledger, lease: float, margin: float) -> Finding:
    """Read the provider's list until the machine has ended, and record the end. Return a finding about it."""
    what = f"{_TITLE}: its own end"
    began = time.monotonic()
    trouble = ""
    while (waited := time.monotonic() - began) < lease + margin:
        try:
            left = _listed(driver, pool)
            if not left:
                if record := newest(ledger.pools(pool)):
                    ledger.ended(record.session, driver.name, *(each.id for each in record.running))
                return Finding(what, True, f"it ended {waited:.0f} s after its client, with a lease of {lease:g} s")
            # good, too: at some providers, a machine that is "ending" costs only its disk
            if all(each.state == "ending" for each in left) and waited > lease + margin / 2:
                text = f"it switched itself off after its client, with a lease of {lease:g} s"
                return Finding(what, True, f"{text}; {driver.name} still lists it, and skypool ends it now")
            trouble = ""
        except (ProviderError, ErrorGroup) as e:
            trouble = f"; the provider's last answer: {e}"
        time.sleep(min(_PAUSE, lease / 4))
    return Finding(
        what,
        False,
        f"it lived on {waited:.0f} s after its client, with a lease of {lease:g} s; skypool ends it{trouble}",
        f"do not rely on the lease at this provider; {SEND}",
    )


def _listed(driver: Driver, pool: str) -> list[Instance]:
    return [each for each in driver.instances(pool=pool) if each.state != "ended"]


def _swept(driver: Driver, pool: str, ledger: Ledger) -> Finding:
    """End what is left of the pool, such as keys, and check that. If interrupted, leave it to a background process."""
    what = f"{_TITLE}: nothing left"
    try:
        ledger.ending(pool)
        terminate_all([driver], pool, ledger)
        return proved(driver, pool, what)
    except Exception as e:  # noqa: BLE001 - any error is a finding to show
        return failure(what, e, f"run `skypool down {pool}`")
    except BaseException:  # Ctrl-C, or SIGTERM
        record = newest(ledger.pools(pool))
        terminate_in_background([driver], pool, "" if record is None else record.session)
        raise
