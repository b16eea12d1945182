"""`Saving`: has nodes save folders to buckets, bring them back and fetch data before anything runs there."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import product

from skypool import events
from skypool.buckets import temporary, unfinished
from skypool.buckets.bucket import with_values
from skypool.data import left_uploads
from skypool.data.data_asked import PUBLIC, DataFolder, check_offers
from skypool.data.save_asked import SaveFolder, refused_to_stranger
from skypool.drivers.bucket_identity import Identifies
from skypool.drivers.contract import Driver
from skypool.errors import ConnectionLost, SkypoolError, TransferError, UsageError
from skypool.files import transfer
from skypool.link.link import Link
from skypool.offers.ranking import Plan
from skypool.pool.connections import Connections
from skypool.pool.life import Life
from skypool.pool.renewals import Renewals
from skypool.pool.trust_levels import TrustLevels
from skypool.rental.pool_terms import Terms
from skypool.shipping import wheels
from skypool.wire import error_text
from skypool.wire.frames import Kind, frame
from skypool.wire.save_orders import DRAIN, FolderState, Order

_PARTS = "~/.cache/skypool/parts"
"""The folder of nodes with what the mover needs."""
_AGAIN = 2.0
"""Seconds after which an order is sent again that the node has not confirmed."""
_TO_RESTORE = 60.0
"""Seconds in which nothing but failures come from a bucket, after which a folder is not brought back or filled."""
_FAILURES = 10
"""How often files may break off with no whole one in between."""
_SHIPPINGS = 5
"""How often the libraries of the mover are sent, until all are there."""
_MOST_FOLDERS = 64
"""The most folders of one node."""
_TELL_TROUBLE_EVERY = 1.0
"""The least seconds between two events about trouble."""
_TELL_EVERY = 10.0
"""The least seconds between two events that only say how much was saved."""
_SHARE = 0.2
"""The largest share of a budget or lifetime for what is left at the end."""
_LOST = 15.0
"""Seconds in which a machine whose agent is gone saves its last files, if all was saved when it last told."""
_TO_REMOVE = 5.0
"""Seconds for which the end of machines waits for the removal of unfinished uploads."""
_TO_END = 5.0
"""Seconds in which machines are ended, before a limit of budget or lifetime."""
_LATE = 10.0
"""Seconds that a node has beyond the time in which it must have saved what is left."""


class Saving:
    """The folders that the nodes of one pool save. Any thread may call the methods.

    Args:
        patience: seconds without progress after which the transfer of the mover's libraries has failed.
        run: returns the id of this run of the pool.
    """

    def __init__(
        self,
        life: Life,
        connections: Connections,
        trust_levels: TrustLevels,
        patience: float,
        run: Callable[[], str],
    ) -> None:
        self._life, self._connections, self._trust_levels = life, connections, trust_levels
        self._patience, self._run = patience, run
        self._renewals = Renewals(life, connections, self.states, self._send_to)
        self._session = secrets.token_hex(4)
        self._states: dict[tuple[int, str], FolderState] = {}
        self._ordered: dict[tuple[int, str], Order] = {}
        self._told: dict[tuple[int, str], tuple[float, FolderState]] = {}  # when, and what
        self._places: dict[int, int] = {}
        self._lost: dict[tuple[int, str], float] = {}
        self._is_given_up = False
        self._began = datetime.now(UTC) - left_uploads.CLOCKS
        self._news = threading.Condition()

    def states(self) -> dict[tuple[int, str], FolderState]:
        """Return the state of each folder, by the number of the node and the name of the folder."""
        with self._news:
            return dict(self._states)

    def heard(self, node: int, folders: Sequence[FolderState]) -> None:
        """Take what a node tells of its folders, if it fits the order. No stranger saves any."""
        for each in folders:
            key = (node, each.id)
            with self._news:
                order = self._ordered.get(key)
                if order is None and not each.is_data and self._may_adopt(node):  # nobody needs to end data
                    order = Order(
                        each.id, "", each.url, node=each.place, nodes=each.nodes, drain=each.drain, serial=each.serial
                    )  # fmt: skip
                    self._ordered[key] = order
                    self._places[node] = each.place
                    if each.credentials:
                        self._life.notice(
                            f"the temporary credentials of {each.url} are not renewed by this process; end the pool "
                            "before they expire, or its machines save nothing more"
                        )
                if order is None or order.serial != each.serial or order.is_data != each.is_data:
                    continue
                self._states[key] = each
                self._news.notify_all()
            self._tell(key, order, each)

    def _may_adopt(self, node: int) -> bool:
        """Return True if a former owner of the pool may have ordered what a node tells of."""
        count = sum(other == node for other, _ in self._ordered)
        return count < _MOST_FOLDERS and not self._trust_levels.is_stranger(node)

    def _tell(self, key: tuple[int, str], order: Order, now: FolderState) -> None:
        """Emit an event if there is news."""
        at, before = self._told.get(key, (-math.inf, None))
        since = time.monotonic() - at
        is_news = before is None or before.serial != now.serial or before.phase != now.phase
        is_news |= before is not None and bool(now.trouble) and not before.trouble  # which is told at once
        if before is not None and not is_news:
            every = _TELL_TROUBLE_EVERY if before.trouble != now.trouble else _TELL_EVERY
            if since < every or _counted(before) == _counted(now):
                return
        self._told[key] = time.monotonic(), now
        if order.is_data:
            self._tell_data(key[0], order, now)
            return
        self._life.emit(
            events.FolderSaved(
                pool=self._life.pool, node=key[0], folder=now.id, url=order.url, place=order.node, phase=now.phase,
                whole=now.whole, files=now.files, bytes=now.bytes, unsaved=now.unsaved,
                unsaved_bytes=now.unsaved_bytes, oldest=now.oldest, rate=now.rate, trouble=now.trouble, names=now.names,
                refused=now.refused, kept=now.kept, restored=now.restored, restored_bytes=now.restored_bytes,
                not_restored=now.not_restored, aside=now.aside, moved=now.moved, unfinished=now.unfinished,
            )
        )  # fmt: skip

    def _tell_data(self, node: int, order: Order, now: FolderState) -> None:
        self._life.emit(
            events.DataFetched(
                pool=self._life.pool, node=node, folder=now.id, url=order.url, phase=now.phase, files=now.restored,
                bytes=now.restored_bytes, wanted=now.wanted, wanted_bytes=now.wanted_bytes, checked=now.checked,
                trouble=now.trouble, aside=now.aside,
            )
        )  # fmt: skip

    def begin(
        self,
        node: int,
        folders: Mapping[str, SaveFolder],
        number: int | None = None,
        count: int = 1,
        patterns: Sequence[str] = (),
        drain: float = DRAIN,
    ) -> None:
        """Have a node bring folders back, and save them from then on. Return when they are back.

        Args:
            folders: what is saved, by the path of the folder on the node.
            number: the number of the node among the `count` nodes that save the same folders to the same places.
                Default None: its own number, or that of a node that has ended.
            patterns: what is written last into a checkpoint, as `wholeness.checkpoints` takes it.
            drain: the most seconds for what is left at the end.

        Raises:
            UsageError: the node is a stranger's, the library that saves is not installed here, or temporary credentials
            cannot be made.
            SkypoolError: a folder could not be brought back.
            ConnectionLost: the node is lost.
        """
        if self._trust_levels.is_stranger(node):
            first = next(iter(folders.values()))
            raise UsageError(refused_to_stranger(f"node {node}", first.bucket))
        try:
            left_uploads.note(self._run(), [each.bucket for each in folders.values()])
        except OSError as e:
            self._life.notice(f"`skypool gc` will not know where this pool saves: {e}")
        parts = self._ship(node)
        number = self._take_place(node, count) if number is None else number
        joins = count > 1 and self._share(node, count, {each.bucket.url for each in folders.values()})
        orders = []
        for path, each in folders.items():
            values, credentials = _newest(each)
            made = Order(
                each.path, path, each.bucket.url, each.bucket.endpoint, each.bucket.region, values, each.bucket.login,
                credentials, number, count, tuple(patterns), drain, _journal_of(path, each), parts,
                secrets.token_hex(4), self._session, joins=joins,
            )  # fmt: skip
            orders.append(made)
            if each.issuer is not None:
                self._renewals.add(node, made, each.issuer)
        self._await_back(node, orders)

    def fill(self, node: int, folders: Mapping[str, DataFolder]) -> None:
        """Have a node fill folders with data. Return when all of it is there.

        Args:
            folders: what is fetched, by the path of the folder on the node.

        Raises:
            UsageError: the node cannot have it, is a stranger's and would get keys, or the library that fetches is not
                installed here.
            SkypoolError: it could not be fetched.
            ConnectionLost: the node is lost.
        """
        keyed = next((each for each in folders.values() if each.is_secret), None)
        if keyed is not None and self._trust_levels.is_stranger(node):
            raise UsageError(refused_to_stranger(f"node {node}", keyed.bucket, PUBLIC))
        parts = self._ship(node)
        orders = []
        for path, each in folders.items():
            values, credentials = _newest(each)
            made = Order(
                each.path, path, each.bucket.url, each.bucket.endpoint, each.bucket.region, values, each.login,
                credentials, drain=0.0, parts=parts, serial=secrets.token_hex(4), session=self._session, is_data=True,
            )  # fmt: skip
            orders.append(made)
            if each.issuer is not None:
                self._renewals.add(node, made, each.issuer)
        self._await_back(node, orders)

    def _take_place(self, node: int, count: int) -> int:
        """Return the number of a node among those that save: its own, or that of a node that has ended.

        A replacement may be there before the node that leaves has ended. Then wait for that: two nodes that save as one
        would replace each other's files.
        """
        is_told = False
        while True:
            with self._news:
                taken = {place for other, place in self._places.items() if other in self._connections.links}
                free = [node] if node < count and node not in taken else [*({*range(count)} - taken)]
                if free:
                    found = self._places[node] = min(free)
                    return found
            self._link(node)
            if not is_told:
                is_told = True
                self._life.notice(f"node {node} waits until a node has ended that saves to the same place")
            with self._news:
                self._news.wait(_AGAIN / 4)

    def _share(self, node: int, count: int, urls: Collection[str]) -> bool:
        """Have a node that saves alone give its files owners, before another one saves to the same places.

        Return True if there was such a node.
        """
        told = -math.inf
        began = time.monotonic()
        while True:
            with self._news:
                ours = [key for key, order in self._ordered.items() if order.nodes == 1 and order.url in urls]
                alone = [(key, self._states[key]) for key in ours if key[0] != node and key in self._states]
            alone = [(key, state) for key, state in alone if state.phase != "ended"]
            waiting = [key for key, state in alone if state.nodes == 1 and not self._is_lost(key[0])]
            if not waiting:
                return bool(alone)
            self._link(node)
            if time.monotonic() - began >= _TO_RESTORE:
                other, folder = waiting[0]
                raise SkypoolError(
                    f"node {node} cannot save to the place of {folder}: node {other}, which was alone there, has not "
                    f"confirmed within {_TO_RESTORE:g} s that it shares it: {self.states()[other, folder].trouble}"
                )
            if time.monotonic() - told >= _AGAIN:
                told = time.monotonic()
                for other, id_ in waiting:
                    self._send_to(other, {"do": "share", "id": id_, "nodes": count})
            with self._news:
                self._news.wait(_AGAIN / 4)

    def _ship(self, node: int) -> str:
        """Send the node what its mover needs. Return the folder there.

        Other pools of the machine may send the same at the same time. Files that were not written then are there.
        """
        from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

        welcome = self._connections.welcomes[node]
        local = wheels.folder_of(welcome.health.machine)
        end = transfer.end_of(node, *self._connections.ways[node])
        there = f"{_PARTS}/{local.name}"
        again = Retrying(
            retry=retry_if_exception_type(TransferError),
            stop=stop_after_attempt(_SHIPPINGS),
            wait=wait_fixed(_AGAIN / 2),
            reraise=True,
        )
        again(transfer.push, [end], str(local), there, patience=self._patience)
        return there

    def _await_back(self, node: int, orders: Sequence[Order]) -> None:
        """Send orders until they are confirmed, and wait until the folders are back."""
        with self._news:
            for each in orders:
                self._ordered[node, each.id] = each
                self._states.pop((node, each.id), None)
        told = -math.inf
        arrivals = {each.id: _Arrivals() for each in orders}
        waiting = {each.id: each for each in orders}
        while waiting:
            link = self._link(node)
            states = self.states()
            for id_, order in [*waiting.items()]:
                state = states.get((node, id_))
                if state is None:
                    continue
                if state.is_back:
                    del waiting[id_]
                    if state.phase == "ended" and order.is_data:
                        why = state.trouble or "it was ended"
                        raise UsageError(f"{id_} cannot be filled from {order.url} on node {node}: {why}")
                    if state.phase == "ended":
                        raise SkypoolError(f"{id_} cannot be saved on node {node}: {state.trouble or 'it was ended'}")
                    continue
                if trouble := arrivals[id_].trouble(state):
                    what = "filled" if order.is_data else "brought back"
                    raise SkypoolError(f"{id_} could not be {what} from {order.url} on node {node}: {trouble}")
            if time.monotonic() - told >= _AGAIN:
                told = time.monotonic()
                for id_, order in waiting.items():
                    if (node, id_) not in states:
                        _send(link, order.to_json())
            if waiting:
                with self._news:
                    self._news.wait(_AGAIN / 4)

    def _send_to(self, node: int, order: Mapping[str, object]) -> None:
        """Send an order to a node, if it can be reached."""
        if (link := self._connections.links.get(node)) is not None:
            _send(link, order)

    def _link(self, node: int) -> Link:
        link = self._connections.links.get(node)
        if link is None or self._life.is_ending:
            raise ConnectionLost(f"node {node} was lost before its folders were brought back", node)
        return link

    def end(
        self,
        nodes: Sequence[int],
        seconds: float | None = None,
        *,
        calm: bool = False,
        stops: bool = False,
        fits: bool = False,
    ) -> None:
        """Have nodes save what is left, and wait for it: at most so long as the orders say.

        A node that cannot be reached is not waited for. What was not saved is in the events.

        Args:
            seconds: the seconds after which a limit is reached. The machines can be ended before. None for no limit.
            calm: True if what writes the files has ended by itself.
            stops: True to stop calls first, so that nothing more is written.
            fits: True if no call runs, and nodes live for so many seconds in any case. They need not end earlier then.
        """
        began = time.monotonic()
        if seconds is not None:
            seconds = max(0.0, seconds - _TO_END)
        with self._news:
            wanted = {key: self._ordered[key] for key in self._open_of(nodes)}
        if not wanted:
            return
        told = dict.fromkeys(wanted, -math.inf)
        while wanted and not self._is_given_up:
            now, states = time.monotonic(), self.states()
            for key, order in [*wanted.items()]:
                most = order.drain if seconds is None else min(seconds, order.drain)
                # an end that a limit sets is never too late
                latest = began + most + _LATE if seconds is None else began + min(most + _LATE, seconds)
                state, link = states.get(key), self._connections.links.get(key[0])
                if link is None or self._is_lost(key[0]):
                    latest = min(latest, self._lost_until(key, state))
                elif now - told[key] >= _AGAIN:
                    told[key] = now
                    left = max(0.0, began + most - now)
                    how = {"calm": calm, "stops": stops, "fits": fits}
                    _send(link, {"do": "end", "id": key[1], "seconds": left, **how})
                if now >= latest or state is None or state.phase == "ended":
                    del wanted[key]
                    self._tell_lost(key, state)
            if wanted:
                with self._news:
                    self._news.wait(_AGAIN / 8)
        for key in wanted:
            self._tell_lost(key, self.states().get(key))
        self._remove_unfinished()

    def note(self, node: int, name: str, text: str, seconds: float, file: str = "") -> bool:
        """Have a node keep a text in the bucket of each folder that it saves or has saved.

        `file` is the path of a file on the node that is kept in place of the text; "" for none.
        Return True if the text is in all of them, within so many seconds. Does not raise.
        """
        until, told = time.monotonic() + seconds, -math.inf
        while True:
            states = self.states()
            with self._news:
                saved = {key: each for key, each in self._ordered.items() if key[0] == node and not each.is_data}
            left = [each for key, each in saved.items() if key not in states or name not in states[key].noted]
            now = time.monotonic()
            if not left or now >= until:
                return not left
            if now - told >= _AGAIN:
                told = now
                for each in left:
                    self._send_to(node, each.note(name, text, file))
            with self._news:
                self._news.wait(_AGAIN / 8)

    def _tell_lost(self, key: tuple[int, str], state: FolderState | None) -> None:
        """Tell what is perhaps saved nowhere of a folder that has not told of its end."""
        if state is None or state.phase == "ended":
            return
        if not state.unsaved:
            self._life.notice(
                f"node {key[0]} has not told that all of {key[1]} is saved; files of its last seconds are perhaps "
                "saved nowhere"
            )
        else:
            named = ", ".join(state.names)
            self._life.notice(
                f"{state.unsaved} files of {key[1]} on node {key[0]}, {state.unsaved_bytes:,} bytes, are perhaps saved "
                f"nowhere: {named}"
            )

    def has(self, nodes: Sequence[int]) -> bool:
        """Return True if one of these nodes saves a folder."""
        with self._news:
            return bool(self._open_of(nodes))

    def give_up(self) -> None:
        """Wait no more for what is left."""
        with self._news:
            self._is_given_up = True
            self._news.notify_all()

    def _open_of(self, nodes: Sequence[int]) -> list[tuple[int, str]]:
        return [key for key, state in self._states.items() if key[0] in nodes and state.is_open]

    def _lost_until(self, key: tuple[int, str], state: FolderState | None) -> float:
        """Return until when a node may save that is lost: perhaps its agent is gone, but not its machine."""
        if key not in self._lost:
            left = 0.0
            if state is not None:  # what it has written since it told of its files is not known
                left = state.seconds_needed if state.unsaved else min(_LOST, state.drain)
            self._lost[key] = time.monotonic() + left
        return self._lost[key]

    def _remove_unfinished(self) -> None:
        """Remove what movers that were killed have left of uploads, if no mover works any more. It costs money."""
        with self._news:
            saved = {key: each for key, each in self._ordered.items() if not each.is_data}
            left = {key[0] for key in saved if (state := self._states.get(key)) is None or state.phase != "ended"}
            if any(not self._is_lost(node) for node in left):
                return
            stored = [each for each in saved.values() if not each.url.startswith("file:")]
            known = [each for each in stored if each.values or each.login != "keys"]
            places = {
                (each.url, each.endpoint, each.region, each.values if each.login == "keys" else ()) for each in known
            }
        began = self._began

        def remove() -> None:
            # a mover of a lost node may go on, and what another process has ordered is not known
            is_clean = not left and len(known) == len(stored)
            for url, endpoint, region, values in places:
                bucket, variables = with_values(url, endpoint, region, values)
                try:  # the login of this computer, where a machine has none that may list them
                    unfinished.remove_all(bucket, variables, since=began)
                except Exception as e:  # noqa: BLE001 - boto3 raises many kinds; a rule of the bucket may remove them
                    is_denied = unfinished.is_denied(e)  # then it is told now, and `skypool gc` does not ask again
                    is_clean = is_clean and is_denied
                    advice = unfinished.others(bucket) if is_denied else "`skypool gc --yes` does"
                    self._life.notice(f"unfinished uploads to {url} cannot be removed: {error_text.told(e)}; {advice}")
            if is_clean:
                with suppress(OSError):  # then `skypool gc` asks for nothing
                    left_uploads.forget(self._run())

        removing = threading.Thread(target=remove, name="skypool unfinished", daemon=True)
        removing.start()
        removing.join(_TO_REMOVE)

    @property
    def reserve(self) -> float:
        """The seconds that nodes need to save what is left, before budget or lifetime end them."""
        with self._news:
            needed = max(
                (each.seconds_needed for (node, _), each in self._states.items() if not self._is_lost(node)),
                default=0.0,
            )
        return needed + _TO_END if needed else 0.0

    def _is_lost(self, node: int) -> bool:
        """Return True if nothing more is heard of a node. If its mover lives, it sends again what is removed."""
        known = self._life.state.nodes.get(node)
        return node not in self._connections.links or known is None or isinstance(known.error, ConnectionLost)


class _Arrivals:
    """Judges whether a folder will ever be filled or brought back by a node."""

    def __init__(self) -> None:
        self._came = self._files = self._failures = 0
        self._at = time.monotonic()
        self._trouble = ""

    def trouble(self, state: FolderState) -> str:
        """Take the state of the folder. Return why it is given up; "" if it is not."""
        came = state.received + state.restored_bytes
        if came < self._came:  # a file did not come to its end, and begins again
            self._failures += 1
        if came > self._came:
            self._at, self._trouble = time.monotonic(), ""
        if state.restored > self._files:
            self._failures = 0
        self._came, self._files = came, state.restored
        self._trouble = state.trouble or self._trouble
        if self._failures >= _FAILURES:
            return self._trouble or "files break off again and again"
        is_late = time.monotonic() - self._at >= _TO_RESTORE
        return self._trouble if is_late else ""


def check_plan(terms: Terms, plan: Plan, drivers: Sequence[Driver], data: Sequence[DataFolder] = ()) -> None:
    """Raise UsageError if folders cannot be saved on what would be rented, or cannot have data.

    Machines of strangers are refused, and those without the identity that a bucket needs. So are keys that expire
    before the pool must end, and disks that are too small. The time for what is left at the end must be at most a fifth
    of what budget or lifetime allow.

    Args:
        data: the folders of data, as `examined` has found them.
    """
    check_offers(data, plan.offers, terms.need.disk_gib, lambda each: (terms.trust or each.trust) != "full")
    if terms.save or data:
        usd = None if terms.budget is None else terms.budget.max_usd
        check_expiry([*terms.save, *data], longest(plan, terms.minimum, terms.lifetime, usd))
    rented = {each.provider for each in plan.offers if each.usd_per_hour}
    check_identity(data, rented, drivers)
    if not terms.save:
        return
    for each in plan.offers:
        if (terms.trust or each.trust) != "full":
            raise UsageError(refused_to_stranger(f"{each.provider} {each.instance_type}", terms.save[0].bucket))
    check_identity(terms.save, rented, drivers)
    limits = [] if terms.lifetime is None else [terms.lifetime]
    price = max(each.usd_per_hour for each in plan.offers) * terms.maximum
    if terms.budget is not None and price:
        limits.append(terms.budget.max_usd / price * 3600)
    least = min(limits, default=math.inf)
    if terms.drain > _SHARE * least:
        raise UsageError(
            f"drain={terms.drain:g} s, the time for what is not saved at the end, is over a fifth of the {least:.0f} s "
            "that the budget or the lifetime allow; make drain= shorter, or raise the limit"
        )


def longest(plan: Plan, nodes: int, lifetime: float | None, usd: float | None) -> float:
    """Return for how many seconds at most so many nodes of a plan may run, by a lifetime and by a budget in USD."""
    least = min(each.usd_per_hour for each in plan.offers) * nodes
    by_budget = usd / least * 3600 if usd is not None and least else math.inf
    return min(by_budget, math.inf if lifetime is None else lifetime)


def check_expiry(
    folders: Sequence[SaveFolder | DataFolder], seconds: float, option: Callable[..., str] = temporary.argument
) -> None:
    """Raise UsageError if keys of a folder expire in less than so many seconds, in which nodes may need them.

    `option` returns an option as the user writes it.
    """
    for each in folders:
        if each.expires is None:
            continue
        left = (each.expires - datetime.now(UTC)).total_seconds()
        if left < seconds:
            runs = f"{seconds / 3600:.1f} hours" if seconds < math.inf else "for any time"
            ways = temporary.remedies(each.bucket, option)
            if isinstance(each, DataFolder):
                ways = f"log in again, or name keys that do not expire as {option('keys')}"
            raise UsageError(
                f"the session token of {each.bucket} expires in {max(0.0, left) / 3600:.1f} hours, and the machines "
                f"may run {runs}: shorten {option('max_lifetime')}, {ways}"
            )


def check_identity(
    folders: Sequence[SaveFolder | DataFolder],
    providers: Collection[str],
    drivers: Sequence[Driver],
    option: Callable[..., str] = temporary.argument,
) -> None:
    """Raise UsageError if machines of one of these providers have no identity, and a bucket needs one.

    What machines of the user's own have is not known here. `option` returns an option as the user writes it.
    """
    needing = {each.bucket.scheme: each.bucket for each in folders if each.bucket.identity}
    for needed, driver in product(needing.values(), drivers):
        if driver.name not in providers:
            continue
        what = f"{needed} is reached by an identity of the machine, and"
        if not (isinstance(driver, Identifies) and driver.gives_identity):
            role = "" if needed.scheme == "gs" else f" or {option('role')}"
            raise UsageError(
                f"{what} {driver.name} is asked for machines without one; name it in the driver's settings, or log in "
                f"with {option('keys')}{role} instead"
            )
        if driver.bucket_scheme != needed.scheme:
            raise UsageError(
                f"{what} those of {driver.name} reach {driver.bucket_scheme}:// alone; leave {option('identity')} out, "
                f"or log in with {option('keys')}"
            )


def check_lease(
    folders: Sequence[SaveFolder],
    lease: float,
    way: str = "make lease= shorter, or ",
    option: Callable[..., str] = temporary.argument,
) -> None:
    """Raise UsageError if credentials that a client renews may expire before a node without a client ends.

    Args:
        way: how to make the lease shorter, as the beginning of the advice; "" if the user cannot.
        option: returns an option as the user writes it.
    """
    for each in folders:
        if each.issuer is not None and lease > each.issuer.shortest:
            given = f"lease={lease:g} s" if way else f"the lease of machines, {lease:g} s,"
            raise UsageError(
                f"{given} is longer than the {each.issuer.shortest:.0f} s for which temporary credentials of "
                f"{each.bucket} may last when this process is gone, so that machines could not save their last files; "
                f"{way}{temporary.remedies(each.bucket, option)}"
            )


def check_unrenewed(
    folders: Sequence[SaveFolder], seconds: float, way: str, option: Callable[..., str] = temporary.argument
) -> None:
    """Raise UsageError if what nodes log in with may expire within so many seconds, in which nobody renews it.

    Args:
        way: the option by which the client leaves, as the user writes it.
        option: returns an option as the user writes it.
    """
    for each in folders:
        if each.issuer is not None and each.issuer.shortest < seconds:
            what = f"the temporary credentials of {each.bucket}, which may last {each.issuer.shortest / 3600:.1f} hours"
        elif each.bucket.has_token and each.expires is None:
            what = f"the token among the keys of {each.bucket}, and nothing says when it expires"
        else:
            continue
        raise UsageError(
            f"with {way}, nobody renews {what}: name keys that do not expire as {option('keys')}, give the machines an "
            f"identity and pass {option('identity')} (`skypool setup` makes one), shorten {option('max_lifetime')}, or "
            f"leave {way} out"
        )


def _newest(folder: SaveFolder | DataFolder) -> tuple[tuple[str, ...], int]:
    """Return the values of a login, and their number. Raises UsageError if temporary ones cannot be made."""
    if folder.issuer is None:
        return folder.values, 0
    newest = folder.issuer.current()
    return newest.values, newest.number


def _counted(state: FolderState) -> tuple[object, ...]:
    """Return what is news of a folder that is in the same phase."""
    come = (state.restored, state.restored_bytes) if state.phase == "fetching" else ()
    return (state.files, state.trouble, *come)


def _send(link: Link, order: Mapping[str, object]) -> None:
    link.send(frame(Kind.SAVE, {}, [json.dumps(order).encode()]))


def _journal_of(path: str, folder: SaveFolder) -> str:
    """Return a name for the file in which a node notes what was saved of a folder to a place."""
    return hashlib.sha256(repr((path, folder.bucket.url, folder.bucket.endpoint)).encode()).hexdigest()[:16]
