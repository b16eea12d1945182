"""Terminates all machines of a pool, and proves that they have ended.

The machines are found by their tags, and never from the ledger. The ends of machines are recorded in the ledger.
`reaper_process` runs this module in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from skypool import clock
from skypool.drivers import retry
from skypool.drivers.contract import Driver, Tidies, abilities
from skypool.errors import (
    AccessError,
    CredentialsError,
    ErrorGroup,
    LedgerError,
    StillRunning,
    UsageError,
    together,
)
from skypool.head.steps import seen_ended
from skypool.model import Instance
from skypool.rental.ledger import Ledger
from skypool.rental.records import Record
from skypool.wire.keys import Keys

PATIENCE = 120.0
"""Seconds for which a termination is tried again while the user waits."""
SETTLING = 30.0
"""Seconds after an order for which its machines may still be missing from the provider's lists."""
_HOPELESS = (CredentialsError, AccessError, UsageError)
"""Errors that do not pass by themselves, so that another attempt is useless."""
Say = Callable[[str], None]
"""A function that shows one line of progress."""


def silently(text: str) -> None:
    """Ignore a line of progress. This is the default of arguments called `say`."""


def terminate_all(
    drivers: Sequence[Driver],
    pool: str,
    ledger: Ledger | None = None,
    session: str | None = None,
    *,
    patience: float = PATIENCE,
    stubborn: bool = False,
    say: Say = silently,
) -> None:
    """Terminate everything that a pool has at these providers, and prove that it has ended.

    Machines are found by their tags. If the pool has no machines, that is not an error. At the end, all runs of the
    pool are closed in the ledger, and the pool's ssh keys are deleted. The function blocks. All providers are asked at
    the same time. But while the interpreter exits, they are asked one after the other, as no thread can be started.

    Args:
        ledger: records what has ended; None for no record.
        session: id of this run of the pool; None if unknown. This run is closed even if the ledger cannot be read.
        patience: seconds for which a failed attempt is repeated, with pauses of up to a minute. Default 120.
        stubborn: if True, try again even after errors that do not pass by themselves, such as wrong credentials.
        say: called with each line of progress.

    Raises:
        StillRunning: instances may still run. The error names the known instances, and says why.
        ErrorGroup: every instance has ended, but other resources of the pool are left.
    """
    errand = _Errand(tuple(drivers), pool, ledger, say)
    again(errand.run, patience, stubborn, say)
    if ledger is not None:
        records = errand.records()
        for record in records:
            if record.run is not None and not record.running:
                ledger.mark(record.session, partial(seen_ended, stored=None))
        for each in {record.session for record in records if record.ended is None} | ({session} - {None}):
            ledger.end(str(each))
    Keys.of(pool).forget()


def again(work: Callable[[], None], patience: float, stubborn: bool, say: Say) -> None:
    """Call `work` until it succeeds. Raise its last error if the time is over, or if the error cannot pass by itself.

    The pauses between two calls double from half a second up to an eighth of the time limit, but at most a minute.

    Args:
        patience: time limit in seconds. An attempt that has begun is not cut short.
        stubborn: if True, another attempt follows every error; if False, only an error for which `may_pass` is True.
        say: called with a line about each error before the next attempt.
    """
    from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_exponential

    def tell(state: RetryCallState) -> None:
        if state.outcome is not None:
            say(f"not yet: {state.outcome.exception()}; next attempt in {state.upcoming_sleep:g} s")

    Retrying(
        retry=retry_if_exception(lambda e: isinstance(e, Exception) and (stubborn or may_pass(e))),
        stop=stop_after_delay(patience),
        wait=wait_exponential(multiplier=0.5, max=min(60.0, patience / 8)),
        before_sleep=tell,
        reraise=True,
    )(work)


def may_pass(error: BaseException) -> bool:
    """Return True if an error may pass by itself, so that another attempt is useful.

    Errors of credentials, permissions and usage do not pass by themselves; all others may. For an error group, it is
    enough that one of its errors may pass. For a StillRunning error that has a cause, the cause decides.
    """
    if isinstance(error, ErrorGroup):
        return any(map(may_pass, error.exceptions))
    if isinstance(error, StillRunning) and error.__cause__ is not None:
        return may_pass(error.__cause__)
    return not isinstance(error, _HOPELESS)


@dataclass
class _Errand:
    """The termination of one pool at all of its providers. `seen` has the ids of the instances found, by provider."""

    drivers: tuple[Driver, ...]
    pool: str
    ledger: Ledger | None
    say: Say
    seen: dict[str, list[str]] = field(default_factory=dict)

    def run(self) -> None:
        """Make one attempt at every provider to end all machines of the pool, and record what has ended.

        All providers are asked at the same time. If one fails, the others are still tried. Raises StillRunning if
        instances may still run, and ErrorGroup if only other resources are left.
        """
        running: list[tuple[Driver, Exception]] = []
        left: list[Exception] = []

        def end(driver: Driver) -> None:
            try:
                self._terminate_at(driver)
            except Exception as e:  # noqa: BLE001 - the other providers' machines are ended all the same
                running.append((driver, e))
                return
            try:
                self._tidy_at(driver)
            except Exception as e:  # noqa: BLE001 - it is raised below, after the other providers were tried
                left.append(e)

        retry.at_once(end, self.drivers)
        running.sort(key=lambda each: self.drivers.index(each[0]))
        self._write_down(running)
        if running:
            raise self._still_running(running) from together("several providers failed", [e for _, e in running])
        if left:
            raise ErrorGroup(
                f"every machine of pool {self.pool!r} has ended, but other resources of the pool are left; run "
                f"`skypool down {self.pool}` to remove them",
                left,
            )

    def _terminate_at(self, driver: Driver) -> None:
        if instances := _there(driver, self.pool):
            self.say(f"{driver.name}: ends {', '.join(each.id for each in instances)}")
            self.seen.setdefault(driver.name, []).extend(each.id for each in instances)
            self._write_down_found(driver, instances)
            driver.terminate(instances)
            if there := _there(driver, self.pool):
                raise StillRunning(
                    f"these machines of {driver.name} still exist after they were told to end: "
                    f"{', '.join(each.id for each in there)}; run `skypool down {self.pool}` to try again",
                    there,
                )
        if late := self._late(driver.name):
            raise StillRunning(
                f"machines may still appear, because {driver.name} can list them late: {', '.join(late)} (machines or "
                f"orders without an answer); run `skypool down {self.pool}` again in a minute"
            )

    def _write_down_found(self, driver: Driver, instances: Sequence[Instance]) -> None:
        """Record these instances in the ledger, which may lack them, so that the pool's cost includes them."""
        waits = {driver.name} if abilities(driver).billed_from == "running" else set[str]()
        for record in self.records():
            if self.ledger is not None and (its := [each for each in instances if record.has(each)]):
                self.ledger.found(record.session, its, waits)

    def _tidy_at(self, driver: Driver) -> None:
        if isinstance(driver, Tidies) and (left := driver.leftovers(pool=self.pool)):
            self.say(f"{driver.name}: removes {', '.join(f'{each.kind} {each.id}' for each in left)}")
            driver.tidy(left)

    def records(self) -> list[Record]:
        """Return the ledger's records of pools of this name; [] without a ledger, or if it cannot be read."""
        try:
            return self.ledger.pools(self.pool) if self.ledger is not None else []
        except LedgerError as e:
            self.say(str(e))
            return []

    def _late(self, provider: str) -> list[str]:
        """Return the order tokens and instance ids of the last 30 s that the provider has not listed, and may later.

        A machine that a run was given to was there, so it has ended.
        """
        seen = self.seen.get(provider, ())
        records = [each for each in self.records() if each.run is None or not each.run.is_given]
        new = [each for record in records for each in record.since(clock.now() - SETTLING)]
        return [name for where, name in new if where == provider and name not in seen]

    def _write_down(self, failed: Sequence[tuple[Driver, Exception]]) -> None:
        """Record what has ended: at a provider with an error, all instances but those that it names; elsewhere, all."""
        if self.ledger is None:
            return
        for name in {each.name for each in self.drivers} - {driver.name for driver, _ in failed}:
            self.ledger.cleared(self.pool, name, self.seen.get(name, ()))
        for driver, error in failed:
            if left := _named(error):  # otherwise any machine of this provider may still run
                gone = [each for each in self.seen.get(driver.name, ()) if each not in left]
                for record in self.records():
                    self.ledger.ended(record.session, driver.name, *gone)

    def _still_running(self, failed: Sequence[tuple[Driver, Exception]]) -> StillRunning:
        told: list[object] = []
        for driver, error in failed:
            told += error.instances if isinstance(error, StillRunning) and error.instances else self._known(driver.name)
        names = ", ".join(str(getattr(each, "id", each)) for each in told) or "every machine"
        why = "".join(f"\n  {driver.name}: {str(e) or type(e).__name__}" for driver, e in failed)
        return StillRunning(
            f"pool {self.pool!r}: it is not confirmed that {names} ended:{why}\n`skypool down {self.pool}` tries "
            f"again; machines that can end themselves do so when their lease is over",
            told,
        )

    def _known(self, provider: str) -> list[Instance]:
        """Return the pool's machines at a provider whose end is not recorded in the ledger."""
        lines = [line for record in self.records() for line in record.running if line.provider == provider]
        return [Instance(provider, line.id, self.pool, line.node) for line in lines]


def _named(error: Exception) -> set[str]:
    """Return the ids of the instances that an error says are still there; empty if it names none."""
    return {str(getattr(each, "id", "")) for each in error.instances} if isinstance(error, StillRunning) else set()


def _there(driver: Driver, pool: str) -> list[Instance]:
    return [each for each in driver.instances(pool=pool) if each.state != "ended"]
