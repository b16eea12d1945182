"""`reach`: returns how the machine of a run that belongs to it is reached: by its provider, or as this computer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from skypool import clock
from skypool.drivers import registry
from skypool.drivers.contract import Driver, abilities
from skypool.errors import SkypoolError
from skypool.head import messages, rows
from skypool.model import Access, Instance
from skypool.rental import gc
from skypool.rental.reaper import SETTLING
from skypool.rental.records import Record
from skypool.safety import user_folders
from skypool.wire.transport import Subprocess


class NotListed(SkypoolError):
    """The error for a machine that its provider does not list any more.

    Attributes:
        is_gone: True if the provider was asked just now, and lists all machines of its user, so that this has ended.
    """

    def __init__(self, why: str, is_gone: bool = False) -> None:
        super().__init__(why)
        self.is_gone = is_gone


def access_of(record: Record, found: Sequence[gc.Found] | None = None) -> Access:
    """Return how the machine of a run is reached. A machine of the user's own may be there also without a node.

    Args:
        found: what the providers of the run have just listed; None to ask them.

    Raises:
        NotListed: its provider does not list it any more.
        Exception: whatever its driver raises if the provider cannot be asked.
    """
    if not record.lines:
        raise NotListed("no machine was rented for it")
    line = (record.running or record.lines)[0]
    drivers = [registry.made(note) for note in record.notes if note["provider"] == line.provider]
    there: list[tuple[Driver, Instance]]
    if found is None:
        there = [(driver, each) for driver in drivers for each in driver.instances(pool=record.pool)]
    else:
        there = [(each.driver, each.thing) for each in found if isinstance(each.thing, Instance)]
    for driver, instance in there:
        if record.has(instance) and instance.state != "ended":
            return driver.access(instance)
    why = f"{line.provider} does not list it any more"
    if record.running:
        why += ", and `skypool gc` records its end"
    is_complete = found is None and bool(drivers) and all(abilities(each).lists_all for each in drivers)
    is_gone = is_complete and not record.since(clock.now() - SETTLING)
    if line.usd_per_hour > 0 or not drivers:
        raise NotListed(why, is_gone)
    try:
        return drivers[0].access(Instance(line.provider, line.id, record.pool, line.node))
    except SkypoolError as e:  # such as a host that the driver does not know any more
        raise NotListed(why) from e
    except Exception as e:  # whatever a driver raises for a machine that is not there
        raise NotListed(why, is_gone) from e


def reach(record: Record) -> Access:
    """Return how the machine of a run is reached, also this computer if its node has ended. Raises as `access_of`."""
    try:
        return access_of(record)
    except Exception:
        if _is_here(record):
            return Access(Subprocess(), python=sys.executable, folder="", spool="")
        raise


def _is_here(record: Record) -> bool:
    """Return True if this computer has the row of the run, and so all that the run has left."""
    if record.run is None:
        return False
    claim, heir = record.run.claim, record.run.heir
    try:
        row = rows.read(messages.folder_of(str(user_folders.state()), claim))
    except (OSError, SkypoolError):
        return False
    return row is not None and (row.claim, row.heir) == (claim, heir)
