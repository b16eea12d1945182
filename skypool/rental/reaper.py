"""Terminates all machines of a pool, and proves that they ended.

What there is, is found by tag and never by the ledger, which is told what has ended. `reaper_process` does this in a
process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skypool import clock
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
from skypool.model import Instance
from skypool.rental.ledger import Ledger
from skypool.rental.records import Record
from skypool.wire.keys import Keys

PATIENCE = 120.0
"""Seconds for which an end is tried again while the user waits."""
SETTLING = 30.0
"""Seconds after an order in which a machine of it may still turn up: lists of a provider may lag behind."""
_HOPELESS = (CredentialsError, AccessError, UsageError)
"""What does not pass by itself."""
Say = Callable[[str], None]


def silently(text: str) -> None:
    """Tells nobody."""


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
    """Terminate everything of a pool, by its tag, and prove it. Then tell the ledger, and forget the pool's keys.

    Blocks, and works in this very thread alone, so that it works while the interpreter ends, too.

    Args:
        session: which pool of that name it is, where the ledger cannot say.
        patience: seconds in which what fails is tried again, with pauses of up to a minute.
        stubborn: try again what does not pass by itself, too: the user may renew credentials.
        say: is told what is done.

    Raises:
        StillRunning: instances may still run; it names those that are known and says why.
        ErrorGroup: every instance has ended, and something else is left.
    """
    errand = _Errand(tuple(drivers), pool, ledger, say)
    again(errand.run, patience, stubborn, say)
    if ledger is not None:
        for each in {record.session for record in errand.records() if record.ended is None} | ({session} - {None}):
            ledger.end(str(each))
    Keys.of(pool).forget()


def again(work: Callable[[], None], patience: float, stubborn: bool, say: Say) -> None:
    """Do it until it is done, while there is hope and patience."""
    from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_exponential

    def tell(state: RetryCallState) -> None:
        if state.outcome is not None:
            say(f"not yet: {state.outcome.exception()}; again in {state.upcoming_sleep:g} s")

    Retrying(
        retry=retry_if_exception(lambda e: isinstance(e, Exception) and (stubborn or may_pass(e))),
        stop=stop_after_delay(patience),
        wait=wait_exponential(multiplier=0.5, max=min(60.0, patience / 8)),
        before_sleep=tell,
        reraise=True,
    )(work)


def may_pass(error: BaseException) -> bool:
    """Whether it may pass by itself."""
    if isinstance(error, ErrorGroup):
        return any(map(may_pass, error.exceptions))
    if isinstance(error, StillRunning) and error.__cause__ is not None:
        return may_pass(error.__cause__)
    return not isinstance(error, _HOPELESS)


@dataclass
class _Errand:
    """Ending all of a pool, attempt after attempt; what was seen running is remembered."""

    drivers: tuple[Driver, ...]
    pool: str
    ledger: Ledger | None
    say: Say
    seen: dict[str, list[str]] = field(default_factory=dict)

    def run(self) -> None:
        """Raises: StillRunning, ErrorGroup: what is not proved, once everything was tried."""
        running: list[tuple[Driver, Exception]] = []
        left: list[Exception] = []
        for driver in self.drivers:
            try:
                self._terminate_at(driver)
            except Exception as e:  # noqa: BLE001 - the other providers' machines are ended all the same
                running.append((driver, e))
                continue
            try:
                self._tidy_at(driver)
            except Exception as e:  # noqa: BLE001 - it is raised below, after the others' turn
                left.append(e)
        self._write_down(running)
        if running:
            raise self._still_running(running) from together("several providers failed", [e for _, e in running])
        if left:
            raise ErrorGroup(f"every machine of pool {self.pool!r} has ended, but something else is left", left)

    def _terminate_at(self, driver: Driver) -> None:
        if instances := _there(driver, self.pool):
            self.say(f"{driver.name}: ends {', '.join(each.id for each in instances)}")
            self.seen.setdefault(driver.name, []).extend(each.id for each in instances)
            self._write_down_found(driver, instances)
            driver.terminate(instances)
            if there := _there(driver, self.pool):
                raise StillRunning(f"still there: {', '.join(each.id for each in there)}", there)
        if late := self._late(driver.name):
            raise StillRunning(f"a machine may still turn up of what was rented just now: {', '.join(late)}")

    def _write_down_found(self, driver: Driver, instances: Sequence[Instance]) -> None:
        """Let the ledger know of machines that came of orders without an answer: they are on the bill, too."""
        waits = {driver.name} if abilities(driver).billed_from == "running" else set[str]()
        for record in self.records():
            if self.ledger is not None and (its := [each for each in instances if record.has(each)]):
                self.ledger.found(record.session, its, waits)

    def _tidy_at(self, driver: Driver) -> None:
        if isinstance(driver, Tidies) and (left := driver.leftovers(pool=self.pool)):
            self.say(f"{driver.name}: removes {', '.join(f'{each.kind} {each.id}' for each in left)}")
            driver.tidy(left)

    def records(self) -> list[Record]:
        """What the ledger knows of pools of this name; nothing where it cannot be read."""
        try:
            return self.ledger.pools(self.pool) if self.ledger is not None else []
        except LedgerError as e:
            self.say(str(e))
            return []

    def _late(self, provider: str) -> list[str]:
        """Orders without an answer, and machines that were never listed: of so late that they may still be."""
        seen = self.seen.get(provider, ())
        new = [each for record in self.records() for each in record.since(clock.now() - SETTLING)]
        return [name for where, name in new if where == provider and name not in seen]

    def _write_down(self, failed: Sequence[tuple[Driver, Exception]]) -> None:
        """Tell the ledger what is proved."""
        if self.ledger is None:
            return
        for name in {each.name for each in self.drivers} - {driver.name for driver, _ in failed}:
            self.ledger.cleared(self.pool, name, self.seen.get(name, ()))
        for driver, error in failed:
            if left := _named(error):
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
            f"pool {self.pool!r}: it is not proved that {names} ended:{why}\n`skypool down {self.pool}` tries again; "
            f"where a machine ends itself, it does so when its lease is over",
            told,
        )

    def _known(self, provider: str) -> list[Instance]:
        """The machines there of which the ledger does not know that they ended."""
        lines = [line for record in self.records() for line in record.running if line.provider == provider]
        return [Instance(provider, line.id, self.pool, line.node) for line in lines]


def _named(error: Exception) -> set[str]:
    """The instances that an error says are still there; empty where it does not know."""
    return {str(getattr(each, "id", "")) for each in error.instances} if isinstance(error, StillRunning) else set()


def _there(driver: Driver, pool: str) -> list[Instance]:
    return [each for each in driver.instances(pool=pool) if each.state != "ended"]
