"""`WholeRun`: a run of a program, from the checks before anything is rented to the end of its machines."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from skypool import clock, events
from skypool.buckets.bucket import Bucket
from skypool.checks import gibibytes
from skypool.compute_pool.compute_pool import ComputePool
from skypool.console.event_text import span
from skypool.data.data_asked import check_offers, data_asked, examined, far_apart
from skypool.data.local_files import is_inside, nested
from skypool.data.save_asked import SaveFolder, checked, refused_to_stranger, save_asked
from skypool.drivers import Driver
from skypool.errors import BudgetExceeded, ConnectionLost, LedgerError, NoOffers, SkypoolError, UsageError
from skypool.files.project import Project, Survey, surveyed
from skypool.head import messages
from skypool.head.states import Claim, Outcome, Said
from skypool.link.spares import Spares
from skypool.model import Offer
from skypool.offers.need import drivers_asked
from skypool.offers.plan import plan
from skypool.offers.ranking import Plan
from skypool.pool import interpreter_exit
from skypool.pool.saving import check_expiry, check_identity, check_lease, check_unrenewed, longest
from skypool.pool.states import Phase
from skypool.rental.budget import HEADROOM, START, Budget, ceiling, start_words, usd_to_start
from skypool.rental.ledger import Ledger
from skypool.rental.machine_ends import ends_itself
from skypool.rental.pool_terms import pool_name
from skypool.rental.receipt import Receipt
from skypool.rental.records import Record, RunEnd, newest
from skypool.rental.run_account import COSTS_ON, ENDING, PRICE_RISES, RunAccount
from skypool.runs import end_hook, lingering, node_program, secret_values
from skypool.runs.handing_over import HandingOver
from skypool.runs.needs import Needs, check_size
from skypool.runs.own_thread import in_thread
from skypool.runs.owned_machine import OwnedMachine
from skypool.runs.program_run import ProgramRun, await_end, exit_status
from skypool.runs.save_places import Place, common
from skypool.runs.saver import Saver
from skypool.runs.target import Target
from skypool.runs.teller import Teller
from skypool.runs.watched_run import ViewEnds, WatchedRun, again
from skypool.wire.save_orders import DRAIN
from skypool_images import Image
from skypool_images.requirements import admits

_MOST_MINOR = 30
"""The versions 3.0 to 3.29 of Python are those that a project may require."""
_SOON = 0.03
"""Seconds in which the look at most projects is over: those with up to a thousand files."""
_FRESH = 3.0
"""Seconds for which it holds what was found in the project. After them, it is looked at again."""
_LEASE = 600.0
"""Seconds after which machines end that do not hear of this process."""
_TO_STOP = 25.0
"""Seconds in which a program is stopped before its folders are saved for the last time, and its end is stored after."""
_TO_RENEW = 10.0
"""Seconds in which a machine has the newest temporary credentials that this process has made."""
_LONGEST = 30 * 86400.0
"""The most seconds of a run that belongs to its machine, if neither budget nor lifetime ends it before."""
_STAY = 600.0
"""Seconds that a machine stays after its run if nobody watches its end, and what it has left is nowhere else."""
_TO_FETCH = 25.0
"""The most seconds before the written end in which the folder of such a run is fetched."""
_SPARES = 2
"""One connection to each machine sends the project, another one reads the output of the program."""
FAILED = 125
"""The exit status if skypool has failed: the program was not started, was lost, or its folder was not fetched."""


@dataclass(frozen=True)
class Asked:
    """The options of a run, as its user gave them.

    Attributes:
        rent: the arguments of `ComputePool` that say what is rented, such as `provider` and `accelerator`.
        nodes: the number of nodes.
        procs: the number of processes on each node; None for one, with all its devices.
        packages: packages besides those of the project.
        env: variables of the program's environment.
        secrets: the names of variables whose values are found here and shown nowhere.
        include: paths of the project that are sent in any case. They begin in the current folder.
        save: folders that the program writes, below the current one: they are kept in the bucket for all runs. Without
            one, the only such folder is fetched.
        buckets: the places of folders that are kept in other buckets, by their paths below the current folder.
        place: how the bucket for all runs is reached.
        data: the places of folders that are filled from buckets, by their paths. Relative ones begin in the current
            folder.
        on_notice: the signal for the program when its machine ends soon: "TERM", "USR1", "none", or "" for the default.
        detach: True to hand the run over to its machine, and return as soon as it belongs to that.
        watch: True to hand the run over to its machine if that can be done, and show it until it is over. False not to
            do so, though its user could have it. None for a user who is not in a terminal.
        keep: if the run belongs to its machine, the seconds that this stays after it, with what it has left there. If
            the run is watched, None stands for ten minutes if nobody watches its end, where that is needed.
        on_end: the address to which the end of the run is posted, or the name of a variable that has it; "" for none.
        lossy: True if a run on a spot machine that nobody watches may be lost, as nothing of it is in a bucket.
        complete: what is written last into a checkpoint, as `ComputePool` takes it.
        name: the name of the pool; None for one from the program's name.
        budget: the most USD that the run may cost.
        max_lifetime: the seconds after which everything ends.
        yes: True to send a large project unasked.
        linger: the seconds for which the machines stay after the run; None if they end with it.
        new: True to rent machines though an earlier run has left some.
        node: the number of the only node that runs the program; None for all.
        image: the image of the machines on which a call runs; None for a program, which has that of its project.
        is_call: True if the target is a call, as `packed_call.as_target` makes it.
        retries: how often the program is started again on its own machine after it was lost.
        best_effort: True if the budget may hold only while this process runs: on machines that cannot end themselves.
    """

    rent: Mapping[str, Any]
    nodes: int = 1
    procs: int | None = None
    packages: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    secrets: Sequence[str] = ()
    include: Sequence[str] = ()
    save: Sequence[str] = ()
    name: str | None = None
    budget: float | None = None
    max_lifetime: float | None = None
    yes: bool = False
    linger: float | None = None
    new: bool = False
    node: int | None = None
    best_effort: bool = False
    buckets: Mapping[str, str | Bucket] = field(default_factory=dict[str, "str | Bucket"])
    complete: Sequence[str] = ()
    place: Place = field(default_factory=Place)
    data: Mapping[str, str | Bucket] = field(default_factory=dict[str, "str | Bucket"])
    on_notice: str = ""
    detach: bool = False
    keep: float | None = None
    image: Image | None = None
    is_call: bool = False
    retries: int = 0
    on_end: str = field(default="", repr=False)
    watch: bool | None = None
    lossy: bool = False

    @property
    def is_gang(self) -> bool:
        """True if the program runs in several processes."""
        return self.procs is not None or (self.nodes > 1 and self.node is None)


@dataclass(frozen=True, slots=True)
class _Account:
    """The account of a run that is handed over, the word of its heir, and the seconds that its end needs."""

    account: RunAccount
    heir: str = field(repr=False)
    keep: float


class WholeRun:
    """A run of a program. Call `check`, and then `run`.

    Attributes:
        name: the name of its pool; "" before `run`.
        would_ask: True if a dry run has found a question, for which the run needs a terminal.
        seconds: how long its machines have been asked for and rented, so far.
        returncode: the exit status of the program, or the negative number of the signal that ended it; None before it.
        unsaved: why what the program saved could not be fetched; "" if it was.
        limit: what ended the program as planned: "budget" or "lifetime"; "" if nothing has.
        is_detached: True if the run was handed over to its machine.
        session: the session of its pool in the ledger; "" before that.
        goes_on: True if this process has left the run, or its machine, alone.
    """

    def __init__(self, target: Target, asked: Asked, tell: Teller) -> None:
        self._target, self._asked, self._tell = target, asked, tell
        self._include = [_below_root(target, each) for each in asked.include]
        if asked.best_effort and asked.budget is None:
            raise UsageError(f"{tell.option('best_effort')} is about a budget; add {tell.option('budget', 20)}")
        if asked.budget is not None and not asked.budget > 0:
            raise UsageError(f"{tell.option('budget')} must be above 0 USD, not {asked.budget:g}")
        if asked.linger is not None and asked.name is not None:
            name = tell.option("name")
            raise UsageError(f"{tell.option('linger')} finds machines by names of its own; leave {name} out")
        if asked.on_notice not in node_program.NOTICES:
            raise UsageError(f"{tell.option('on_notice')} takes TERM, USR1 or none, not {asked.on_notice!r}")
        if asked.new and asked.linger is None:
            stay = tell.option("linger", "30m")
            raise UsageError(f"{tell.option('new')} is for runs whose machines stay; add {stay}")
        if asked.lossy and not asked.detach:
            lossy, detach = tell.option("lossy"), tell.option("detach")
            raise UsageError(f"{lossy} is for runs that nobody watches; add {detach}, or leave it out")
        if asked.detach:
            self._check_detach()
        elif asked.keep is not None and asked.watch is None:
            keep, detach = tell.option("keep", "1h"), tell.option("detach")
            raise UsageError(f"{keep} is for runs that belong to their machine; add {detach}, or leave it out")
        self._secrets = secret_values.found(asked.secrets, target.project.root, tell.option("secrets"))
        self._on_end = self._hook(asked.on_end)
        self._masked = self._hidden  # in what is told, and in what the program prints
        tell.hide(self._masked)
        self._rent: dict[str, Any] = {}
        word = [] if asked.linger is None else [self._mark]
        self._name = pool_name(asked.name or "-".join([_plain(target.name), *word, secrets.token_hex(3)]))
        self._save, self._buckets = self._places()
        self._data = data_asked(asked.data, self._buckets, name=tell.option("data"))
        self._check_data_paths()
        self._saved_to = Path(self._save).absolute()  # the program that calls this may change its folder
        self.would_ask = False
        self.returncode: int | None = None
        self.unsaved = ""
        self.limit = ""
        self.is_detached = False
        self.session = ""
        self._is_handed = False  # to its machine, or may be
        self.goes_on = False
        self._is_own = asked.detach  # the run belongs to its machine
        self._watched: WatchedRun | None = None
        self._stay = 0.0  # seconds that the machine stays after the run, which belongs to it
        self._receipt: Receipt | None = None
        self._pool: ComputePool | None = None
        self._former: Record | None = None  # whose machines are used
        self._looking: Future[Survey] | None = None  # a look at the project, with what is sent to these machines
        self._is_checked = False  # what it has found
        self._spares: Spares | None = None  # connections to these machines
        self._spent_before = 0.0  # by earlier runs on its machines, in USD
        self._is_ready = False  # its pool
        self._has_lost = False  # a machine of the earlier run
        self._began = time.monotonic()
        self._over: float | None = None  # when the pool has ended

    def _hook(self, said: str) -> str:
        """Return the address to which the end is posted; "" for none. Raises UsageError if it is not valid."""
        return end_hook.named(said, self._target.project.root, self._tell.option("on_end"))

    @property
    def _hidden(self) -> dict[str, str]:
        """The values that are shown nowhere, by their names."""
        return {**self._secrets, **({"on_end": self._on_end} if self._on_end else {})}

    def _check_detach(self) -> None:
        """Raise UsageError if the run cannot be handed over to its machine."""
        asked, option = self._asked, self._tell.option
        detach = option("detach")
        if asked.budget is None and asked.max_lifetime is None:
            raise UsageError(
                f"{detach} leaves the run alone with its machine, so say when that ends in any case: add "
                f"{option('budget', 20)} or {option('max_lifetime', '4h')}"
            )
        if asked.nodes > 1:
            raise UsageError(f"{detach} takes a run on one node, not {option('nodes', asked.nodes)}; leave one out")
        if asked.linger is not None:
            raise UsageError(f"{detach} and {option('linger', '30m')} exclude each other; leave one out")
        if asked.best_effort:
            raise UsageError(
                f"{detach} needs machines that end themselves, and {option('best_effort')} takes others, too; leave "
                "one out"
            )
        if asked.keep is not None and asked.max_lifetime is not None and asked.keep >= asked.max_lifetime:
            raise UsageError(
                f"{option('keep')} is a part of {option('max_lifetime')}, and leaves nothing of it to the program; "
                f"shorten {option('keep')}, or allow more time"
            )
        check_size(self._target.words, asked.env)

    def _why_attached(self, found: Plan, most: float | None) -> str:
        """Return why a run ends with this process; "" if it can belong to the machines that may be rented."""
        asked, option = self._asked, self._tell.option
        costly = [each for each in found.offers if each.usd_per_hour]
        drivers = drivers_asked(asked.rent["provider"])
        endless = [each for each in costly if not ends_itself(drivers, each)]
        price = most is not None or bool(asked.rent.get("max_usd_per_hour"))
        reasons = {
            "it has no limit": asked.budget is None and asked.max_lifetime is None,
            f"{option('attached')} says so": not asked.watch,
            "it has several nodes": asked.nodes > 1 or any(each.hosts > 1 for each in found.offers),
            f"its machines stay for the next run ({option('linger')})": asked.linger is not None,
            f"{option('best_effort')} takes machines that do not end themselves": asked.best_effort,
            "its machine is a stranger's": any(each.trust != "full" for each in found.offers),
            "its machine cannot end its own cost": bool(endless)
            and (most is None or len(endless) == len(found.offers)),
            "nothing limits the price of its spot machine": not price and any(e.market == "spot" for e in costly),
            "its lifetime is too short to save its folders after it": self._is_too_short(),
        }
        return next((why for why, is_so in reasons.items() if is_so), "") or self._why_unfit(found, most)

    def _why_unfit(self, found: Plan, most: float | None) -> str:
        """Return why a run is too large to be handed over, or has logins that nobody renews then; "" for neither."""
        seconds = longest(found, found.nodes[0], self._asked.max_lifetime, most)
        try:
            check_size(self._target.words, self._asked.env)
        except UsageError:
            return "its command line and variables are too large to be handed over"
        try:
            check_unrenewed(self._buckets, min(seconds, _LONGEST), "", self._tell.option)
        except UsageError:
            return "nobody else renews what its machine logs in with"
        return ""

    def _is_too_short(self) -> bool:
        lifetime = self._asked.max_lifetime
        return bool(self._buckets) and lifetime is not None and lifetime <= DRAIN + _TO_STOP

    def _check_machine(self, found: Plan) -> None:
        """Raise UsageError if a run cannot be handed over to the machines that may be rented."""
        detach = self._tell.option("detach")
        for each in found.offers:
            what = f"{each.provider} {each.instance_type}"
            if each.hosts > 1:
                raise UsageError(f"{what} has {each.hosts} hosts, and {detach} takes a run on one node; leave it out")
            if each.trust != "full":
                raise UsageError(f"{what} is a machine of a stranger, to whom no run is given; leave {detach} out")
            if each.market == "spot" and not self._buckets and not self._asked.lossy:
                raise UsageError(
                    f"{what} is a spot machine, and all that the run has written is lost when it is taken back: have "
                    f"what it saves kept in a bucket, as by {self._tell.option('save', 'out=s3://models/x')}, or add "
                    f"{self._tell.option('lossy')} if it may be lost"
                )
            if each.usd_per_hour and self._asked.keep is None and not self._buckets:
                raise UsageError(
                    f"how the run ends, what it prints and what it saves are on its machine alone, and lost with it: "
                    f"say how long {what} stays after the run, and costs {each.usd_per_hour:g} USD an hour, as by "
                    f"{self._tell.option('keep', '1h')}, or have what it saves kept in a bucket, as by "
                    f"{self._tell.option('save', 'out=s3://models/x')}"
                )

    def _check_cost(self, found: Plan, most: float | None) -> None:
        """Raise UsageError if a machine may cost more than `most`, the budget, or go on costing when nobody watches."""
        option = self._tell.option
        detach, price = option("detach"), self._asked.rent.get("max_usd_per_hour")
        drivers = drivers_asked(self._asked.rent["provider"])
        costly = [each for each in found.offers if each.usd_per_hour]
        endless = [each for each in costly if not ends_itself(drivers, each)]
        if endless and (most is None or len(endless) == len(found.offers)):  # with a budget, others are rented
            what = f"{endless[0].provider} {endless[0].instance_type}"
            raise UsageError(
                f"{what} {COSTS_ON}, and with {detach} nobody watches it; choose another {option('provider')}, or "
                f"leave {detach} out"
            )
        spot = next((each for each in costly if each.market == "spot"), None)
        if spot is not None and most is None and not price:
            highest = math.ceil(100 * HEADROOM * spot.usd_per_hour) / 100
            raise UsageError(
                f"{PRICE_RISES}: say what {spot.provider} {spot.instance_type} may cost at most, as by "
                f"{option('budget', 20)}, or {option('max_usd_per_hour', highest)} for an hour"
            )

    def _places(self) -> tuple[str, list[SaveFolder]]:
        """Return the folder that is fetched, "" for none, and the folders that are kept in buckets."""
        asked, tell = self._asked, self._tell
        folders = [_save_folder(each, tell) for each in asked.save]
        places = {_save_folder(path, tell): place for path, place in asked.buckets.items()}
        bucket = common(self._target.project.root, asked.place) if folders else None
        if bucket is not None:
            places |= {each: replace(bucket, url=f"{bucket.url.rstrip('/')}/{self._name}/{each}") for each in folders}
            folders = []
        if len(folders) > 1:
            raise UsageError(
                f"{tell.option('save')} names {len(folders)} folders without a bucket: {', '.join(folders)}; name one "
                "folder that has them all"
            )
        return "".join(folders), save_asked(places, name=tell.option("save"))

    def _check_data_paths(self) -> None:
        """Raise UsageError if a folder of data and the one that is fetched are inside each other."""
        for each in self._data:
            if self._save and nested(each.path, self._save):
                raise UsageError(
                    f"{self._tell.option('data')}: {each.path} and {self._save}, which is fetched, are inside each "
                    "other; data is only read, so use another folder"
                )

    @property
    def name(self) -> str:
        return "" if self._pool is None else self._pool.name

    @property
    def has_rented(self) -> bool:
        """True if `run` has begun to rent machines."""
        return self._pool is not None

    @property
    def seconds(self) -> float:
        return (self._over or time.monotonic()) - self._began

    @property
    def spent(self) -> float | None:
        """The cost of the run so far, in USD; None if the ledger cannot be read."""
        if self._receipt is not None:
            return self._receipt.usd
        if self._pool is None:
            return 0.0
        usd = cost(self._pool)
        return None if usd is None else usd - self._spent_before

    # --- before anything is rented ---------------------------------------------------------------------------

    def check(self, dry_run: bool = False) -> None:
        """Tell what would be sent and rented, and ask the user where that is needed. With `dry_run`, tell it instead.

        Raises:
            UsageError: the run would not do what the user expects, or the user has said no.
            NoOffers, BudgetExceeded: there is nothing to rent, or not for this budget.
        """
        target, asked, tell = self._target, self._asked, self._tell
        _ = target.project.versions  # a mistake there is told before anything is rented
        _check_python(target.project)
        self._buckets = checked(self._buckets, tell.note)
        check_lease(self._buckets, _LEASE, "", tell.option)
        self._data = examined(self._data)
        target.project.check_paths()
        self._rent = {
            **asked.rent,
            "nodes": asked.nodes,
            "image": Image(secrets=self._secrets) if asked.image is None else asked.image,
        }
        if asked.linger is not None and not asked.new:
            self._former = lingering.left(self._mark, asked.nodes, tell.option, tell.note)
        if self._former is not None:
            self._check_former(self._former, dry_run)
            return
        too_large = self._check_project(surveyed(target.project, self._include), dry_run)
        if asked.linger is None and asked.name is None:
            self._tell_of_others()
        found = planned(self._rent, tell.option)
        self._check_node(found)
        most = min((each for each in (asked.budget, ceiling()) if each is not None), default=None)
        attached = ""
        if asked.detach:
            self._check_cost(found, most)
            self._check_machine(found)
        elif asked.watch is not None:
            attached = self._why_attached(found, most)
            self._is_own = not attached
            if attached and asked.keep is not None:
                raise UsageError(
                    f"{tell.option('keep')} is for runs that belong to their machine, and this one ends with this "
                    f"terminal, as {attached}; leave {tell.option('keep')} out"
                )
        self._check_start(found, most)
        self._check_logins(found, longest(found, found.nodes[0], asked.max_lifetime, most))
        lifetime, spot_price = asked.max_lifetime, None
        if self._is_own and lifetime is not None:
            lifetime, spot_price = lifetime + ENDING, asked.rent.get("max_usd_per_hour")
        is_usual = not any(each.usd_per_hour for each in found.offers) and asked.budget is None and lifetime is None
        tell.rents(found, most, lifetime, self._name, spot_price, "" if is_usual else attached)
        is_budget = most is not None and any(each.usd_per_hour for each in found.offers)
        tell.saves(self._buckets, "the budget" if is_budget else "the lifetime" if asked.max_lifetime else "")
        tell.data(self._data)
        self._check_data(found)
        self._check_strangers(found)
        no_limit = unlimited(found, tell.option) if most is None and asked.max_lifetime is None else ""
        if dry_run:
            for text in filter(None, ["" if asked.yes else too_large, no_limit]):
                self._would_ask(text)
        elif no_limit:
            self._confirm(no_limit, "Rent without one?", "nothing was rented")

    def _check_project(self, survey: Survey, dry_run: bool) -> str:
        """Tell what is sent. Return why that needs a yes; "" if it does not. Raises UsageError if it cannot be sent."""
        target, tell = self._target, self._tell
        self._masked = secret_values.masked(self._hidden, survey.paths, target.project.root)
        tell.hide(self._masked)
        tell.project(target, survey)
        self._check_script(survey)
        self._check_data_is_not_sent(survey)
        self._tell_of_what_is_replaced(survey)
        too_large = self._too_large(survey)
        if too_large and not (dry_run or self._asked.yes):
            self._confirm(too_large, "Send all of it?", "nothing was sent")
        return too_large

    @property
    def _mark(self) -> str:
        """A word in the names of pools whose machines this run may use."""
        asked = self._asked
        return lingering.mark(self._target, asked.rent, asked.nodes, sorted(asked.secrets))

    def _tell_of_others(self) -> None:
        """Tell of machines that stay, cost money and could be used by this run."""
        other = lingering.staying(self._mark, self._asked.nodes)
        if other is not None and other.usd_per_hour:
            stays, usual = span(other.lasts - clock.now()), self._tell.option("linger", "30m")
            self._tell.note(
                f"pool {other.pool} of an earlier run stays for {stays} at {other.usd_per_hour:.4g} USD/h; "
                f"with {usual} this run would use it, and rent nothing"
            )

    def _check_former(self, former: Record, dry_run: bool) -> None:
        """Check the limits of a pool that stays, and the project. Ask the user if the pool has no limit.

        If the project is large and the user is not to be asked, `run` takes the pool over while it is looked at.
        """
        asked, tell = self._asked, self._tell
        lingering.check_limits(former, asked.budget, asked.max_lifetime, tell.option)
        is_endless = bool(former.usd_per_hour) and lingering.seconds_left(former) == math.inf
        self._looking = in_thread(partial(surveyed, self._target.project, self._include), "skypool-look")
        if asked.yes and not (is_endless or dry_run) and not wait([self._looking], _SOON).done:
            return
        too_large = self._check_looked(former, dry_run)
        text = endless(former.usd_per_hour, tell.option) if is_endless else ""
        if dry_run:
            for each in filter(None, ["" if asked.yes else too_large, text]):
                self._would_ask(each)
        elif text:
            self._confirm(text, "Use them without one?", "nothing was run")

    def _check_looked(self, former: Record, dry_run: bool = False) -> str:
        """Check what was found in the project as `_check_project` does, and tell that this pool is used."""
        assert self._looking is not None
        await_end(self._looking)
        too_large = self._check_project(self._looking.result(), dry_run)
        seconds = lingering.seconds_left(former)
        self._tell.uses(former.pool, None if seconds == math.inf else seconds, former.usd_per_hour)
        self._tell.saves(self._buckets, "" if seconds == math.inf else "its time")
        self._tell.data(self._data)
        self._is_checked = True
        return too_large

    def _would_ask(self, text: str) -> None:
        self.would_ask = True
        self._tell.note(f"without a terminal, this is refused: {text}")

    def _confirm(self, text: str, question: str, otherwise: str) -> None:
        answer = self._tell.ask(f"{text}. {question}")
        if not answer:
            raise UsageError(text if answer is None else otherwise)

    def _check_script(self, survey: Survey) -> None:
        """Raise UsageError if the script is not among the files that are sent."""
        script = self._target.script
        if script and script not in survey.paths:
            why = _why_unsent(survey, script) or "it is a cache"
            here = os.path.relpath(script, self._target.folder)
            raise UsageError(
                f"{script} is not sent, because {why}; rename it, or pass {self._tell.option('include', here)}"
            )

    def _check_data_is_not_sent(self, survey: Survey) -> None:
        """Raise UsageError if files of the project are in a folder of data."""
        for each in self._data:
            if each.path.startswith(("/", "~")):
                continue
            below = _below_root(self._target, each.path)
            sent = next((path for path in survey.paths if is_inside(path, below)), None)
            if sent is not None:
                raise UsageError(
                    f"{sent} of the project is in {each.path}, which {self._tell.option('data')} fills; name it in "
                    ".skypoolignore, or use another folder"
                )

    def _tell_of_what_is_replaced(self, survey: Survey) -> None:
        """Tell if the folder that is fetched is here and is not sent: a program that goes on from it would not."""
        try:
            if not self._save or not any(self._saved_to.iterdir()):
                return
        except OSError:  # it is not there, or may not be read
            return
        saved = _below_root(self._target, self._save)
        why = _why_unsent(survey, saved)
        way = f"; {self._tell.option('include', self._save)} sends it"
        if saved.startswith("../"):
            why, way = "it is not in the project", ""
        if why:
            self._tell.note(
                f"{self._save} is not sent, because {why}: the program does not see these files, and its own replace "
                f"those of the same name here{way}"
            )

    def _too_large(self, survey: Survey) -> str:
        """Return why a project is not sent unasked; "" if it is."""
        if not survey.excess:
            return ""
        return f"{survey.excess}; leave out what is not needed in .skypoolignore, or pass {self._tell.option('yes')}"

    def _check_start(self, found: Plan, most: float | None) -> None:
        """Raise BudgetExceeded if the budget does not pay for a start, or for a shorter lifetime."""
        if most is None:
            return
        best, nodes = found.best, found.nodes[0]
        assert best is not None
        start, lifetime = [best] * nodes, self._asked.max_lifetime
        cost = usd_to_start(start, lifetime)
        if cost <= most:
            return
        if most == self._asked.budget:
            limit = f"the budget is {most:g} USD; pass {self._tell.option('budget', math.ceil(100 * cost) / 100)}"
        else:
            limit = f"SKYPOOL_MAX_USD allows {most:g} USD; raise it"
        minutes = math.floor(60 * (most - nodes * best.start_usd) / (nodes * best.usd_per_hour))
        if 60 * minutes > best.least_billed:
            limit += f", or {self._tell.option('max_lifetime', f'{minutes}m')}"
        raise BudgetExceeded(f"the first {start_words(start, lifetime)} cost {cost:.2f} USD, and {limit}")

    def _check_logins(self, found: Plan, seconds: float) -> None:
        """Raise UsageError if machines, which run for so many seconds at most, cannot log in to a bucket so long."""
        option = self._tell.option
        rented = {each.provider for each in found.offers if each.usd_per_hour}
        check_identity([*self._buckets, *self._data], rented, drivers_asked(self._asked.rent["provider"]), option)
        check_expiry(self._buckets, seconds, option)
        check_expiry(self._data, min(seconds, START), option)  # it is fetched once
        if self._asked.detach:
            self._check_time()
            check_unrenewed(self._buckets, min(seconds, _LONGEST), option("detach"), option)

    def _check_time(self) -> None:
        """Raise UsageError if a run that belongs to its machine may have no time but to save its folders."""
        detach = self._tell.option("detach")
        if self._is_too_short():
            folder, longer = self._buckets[0].path, self._tell.option("max_lifetime")
            raise UsageError(
                f"with {detach}, the last {DRAIN + _TO_STOP:g} s of the lifetime may be needed to save {folder}, so "
                f"that the program has no time; pass a longer {longer}"
            )

    def _check_node(self, found: Plan) -> None:
        """Raise UsageError if no machine that may be rented has the number of the node that is asked for."""
        node, nodes = self._asked.node, self._asked.nodes
        if node is not None and node >= nodes * max(each.hosts for each in found.offers):
            asked = self._tell.option("nodes", nodes)
            raise UsageError(f"there is no node {node} with {asked}; nodes are counted from 0")

    def _check_data(self, found: Plan) -> None:
        """Check that machines have room for data and may have its keys, and tell what may cost traffic."""
        disk = gibibytes("disk", self._asked.rent.get("disk"))
        check_offers(self._data, found.offers, disk, lambda each: each.trust != "full", self._tell.option)
        for text in far_apart(self._data, found.offers):
            self._tell.note(text)

    def _check_strangers(self, found: Plan) -> None:
        """Raise UsageError if machines of strangers would have keys of buckets, or run several processes."""
        stranger = stranger_in(found)
        if self._buckets and stranger is not None:
            raise UsageError(
                refused_to_stranger(f"{stranger.provider} {stranger.instance_type}", self._buckets[0].bucket)
            )
        if self._asked.is_gang and stranger is not None:
            nodes, procs, provider = map(self._tell.option, ("nodes", "procs", "provider"))
            raise UsageError(
                f"{stranger.provider} {stranger.instance_type} is a machine of a stranger, which cannot take part in "
                f"{nodes} or {procs}; choose another {provider}, or one process"
            )

    # --- with machines ---------------------------------------------------------------------------------------

    def run(self) -> int:
        """Rent machines, run the program there, fetch what it saves, and end the machines. Return its exit status.

        The status is 128 + n if signal n ended the program, and 125 if its folder could not be fetched.

        Raises:
            UsageError: the project cannot be sent as it is, which is found here if it is large.
            SkypoolError: the program was not started, or was lost.
            CancelledError: the program was interrupted, as its machines end as planned.
        """
        asked, tell, name = self._asked, self._tell, self._name
        budget = None if asked.budget is None else Budget(asked.budget, best_effort=asked.best_effort)
        terms: dict[str, Any] = {**self._rent, "budget": budget, "max_lifetime": asked.max_lifetime, "lease": _LEASE}
        former = self._former
        if former is not None:  # it has its limits
            name, terms = former.pool, {"image": self._rent["image"], "provider": self._drivers_of(former)}
        self._pool = pool = ComputePool(**terms, slots=1, name=name, linger=asked.linger, console="off")
        pool._console = "silent"  # nothing but `tell` writes
        pool._terms = replace(pool._terms, lends=False)  # what stays here must not go by another way
        if former is not None:
            self._spares = Spares(_SPARES)
            pool._terms = replace(pool._terms, attach=True, replaces=False, spares=self._spares)
        pool.events.listen(self._hear)
        unlisten = pool.events.listen(tell.hear)
        self._began = time.monotonic()
        try:
            return self._run_and_watch(pool, unlisten)
        except SkypoolError as e:
            if former is not None and not self._is_ready:
                e.add_note(
                    f"pool {name} of an earlier run may still cost money; `skypool down {name}` ends it, and "
                    f"{tell.option('new')} rents other machines"
                )
            raise
        finally:
            tell.stage("")
            if self._spares is not None:
                self._spares.close()
            if asked.linger is not None:
                self._tell_stay(name)

    def _run_and_watch(self, pool: ComputePool, unlisten: Callable[[], None]) -> int:
        status, is_cancelled = FAILED, False
        try:
            status = self._run_on(pool, unlisten)
        except KeyboardInterrupt:
            if self._watched is None:  # else the run belongs to its machine already
                raise
            is_cancelled = True
        except SystemExit:
            if self._watched is not None:
                self._tell.note(again(self.name, self._stay))
            raise
        return status if self._watched is None else self._watch(self._watched, is_cancelled)

    def _watch(self, watched: WatchedRun, is_cancelled: bool) -> int:
        """Show the run, which belongs to its machine, until it is over, and end that. Return its exit status."""
        tell = self._tell
        interpreter_exit.exit_on_signals()
        self._over, tell.log = None, watched.keep
        try:
            status = watched.run(is_cancelled)
        except ViewEnds:
            return FAILED  # the reason is told by who cannot be written to
        except (SystemExit, SkypoolError):
            if watched.receipt is None and watched.end is None:
                tell.note(again(self.name, self._stay))
            elif watched.receipt is None:
                tell.note(f"`skypool down {self.name}` ends what is left of the run, and proves that it has ended")
            raise
        finally:
            self._over, self._receipt, self.unsaved = time.monotonic(), watched.receipt, watched.unsaved
            self.goes_on = watched.receipt is None
            end = watched.end
            if end is not None and end.outcome is Outcome.ENDED:
                self.returncode = end.returncode
            self.limit = "" if end is None else end.limit
        return status or (FAILED if self.unsaved else 0)

    def _run_on(self, pool: ComputePool, unlisten: Callable[[], None]) -> int:
        """Start the pool, run the program there, and leave it. `unlisten` ends that its events are told."""
        target, asked, tell, former = self._target, self._asked, self._tell, self._former
        with tell.watching(pool) as on_end, pool, contextlib.ExitStack() as at_end:
            self._is_ready, ready = True, time.monotonic()
            if asked.linger is not None:
                at_end.callback(unlisten)  # that machines stay is told in another way
            if former is not None:
                self._spent_before = sum(line.usd for line in former.lines)

            def on_program_end() -> None:
                on_end()
                if made.is_interrupted:
                    tell.note(
                        "interrupted: the program has 5 s to end; another signal gives up its last output and files"
                    )

            env = asked.env if former is None else {**self._secrets, **asked.env}  # the machines have former values
            made = ProgramRun(
                pool, target, asked.nodes, tell.wrote, tell.error, on_program_end, asked.packages, env,
                self._include, asked.procs, self._save, self._buckets, asked.complete, tell.note, asked.node,
                self._data, asked.on_notice,
            )  # fmt: skip
            tell.is_stranger = made.is_stranger
            entries = None
            if former is not None:
                if not self._is_checked:
                    self._check_looked(former)
                self._check_taken(pool, made.is_stranger)
                assert self._looking is not None
                found = self._looking.result()
                entries = found.entries if time.monotonic() < found.at + _FRESH else None
            seconds = ready - self._began
            ready = time.monotonic()
            with made:
                tell.log = made.log
                if made.is_gang:
                    tell.source = "rank" if asked.procs else "node"
                tell.stage("the project's files, which are sent")
                made.send(entries)
                if self._spares is not None:
                    self._spares.close()
                tell.stage("the environment, which is made")
                programs = made.prepare()
                if self._data:
                    tell.stage("data, which the nodes fetch")
                    made.fill()
                tell.stage("")
                tell.starts(pool.name, seconds, time.monotonic() - ready, self.spent)
                if self._is_own and (account := self._account(pool, made)) is not None:
                    return self._hand_over(made, programs, account, unlisten)
                saver = Saver(made, self._save, self._saved_to, tell)
                pool.events.listen(saver.hear)
                try:
                    with saver:
                        status = made.run(programs)
                finally:
                    self.returncode, self.limit, self.unsaved = made.returncode, made.limit, saver.failure
                    self._save_rest(made)
            if asked.linger is None:
                pool.stop()  # rather than to wait for a node that has not answered
        return status or (FAILED if self.unsaved else 0)

    def _account(self, pool: ComputePool, made: ProgramRun) -> _Account | None:
        """Return the account with which the run is handed over. None if a run that would be watched ends with us."""
        supply = pool._sender.working().supply
        assert supply is not None  # it has rented the machine
        known, self.session = supply.rental.ledger, supply.rental.session
        claim = Claim(pool.name) if known is None else Claim(pool.name, known.next_generation(pool.name))
        self._tell.stage("orders without an answer, of which machines may still come")
        supply.end_lost()
        heir, seconds = secrets.token_urlsafe(32), min(made.seconds_left(), _LONGEST)
        try:
            digest, key = messages.heir_digest(heir), messages.seal_key(heir)
            account = RunAccount(supply, claim, seconds, digest, key)
            keep = self._asked.keep or 0.0
            if account.left <= keep:
                raise UsageError(
                    f"the run is not handed over, as its {account.limit} ends the machine in {span(account.left)}, and "
                    f"{self._tell.option('keep')} ({span(keep)}) leaves nothing of that to the program; shorten it, or "
                    "allow more"
                )
        except (BudgetExceeded, UsageError) as e:
            if self._asked.detach or self._asked.keep is not None:
                raise
            self._tell.note(f"the run ends with this terminal: {e}")
            return None
        finally:
            self._tell.stage("")
        is_free = not account.worst_usd
        if self._asked.detach or self._asked.keep is not None or is_free or self._buckets:
            self._stay = keep
        else:
            self._stay, keep = _STAY, min(_TO_FETCH, account.left / 4) if self._save else 0.0
        return _Account(account, heir, keep)

    def _hand_over(
        self, made: ProgramRun, programs: Mapping[int, str], given: _Account, unlisten: Callable[[], None]
    ) -> int:
        """Hand the run over to its machine, and return 0. `unlisten` ends that events of the pool are told.

        Raises SkypoolError if the run was not started, or if that is not known.
        """
        pool, tell, account = made.pool, self._tell, given.account
        call = replace(made.call(programs), secrets=self._masked, is_call=self._asked.is_call)
        [(copy, _)] = call.places.values()
        saved = os.path.normpath(os.path.join(copy, call.folder, self._save)) if self._save else ""
        until = time.monotonic() + _TO_RENEW
        while made.logins_last() < account.left:
            if time.monotonic() > until:
                raise SkypoolError(
                    f"the run was not started, as nobody would renew the temporary credentials of its machine, which "
                    f"end in {span(made.logins_last())}, before its end in {span(account.left)}"
                )
            time.sleep(_TO_RENEW / 50)
        folders = [each.path for each in self._buckets]
        retries = self._asked.retries
        needs = Needs.of(account.claim, pool._handed_over(), call, retries, saved, folders, self._on_end)
        needs.packed()  # a mistake there is told while the machine has no other owner
        left, facts = made.left_behind(), pool._sender.working().facts
        tell.stage("the machine, which takes the run over")
        owned = OwnedMachine(pool, needs, account, given.keep, self._stay)
        self._is_handed = True
        handing = HandingOver(account.claim, account.left, given.heir, owned)
        owned.follow(handing.hear)
        said = handing.run()
        tell.stage("")
        unlisten()  # that the machine is left is told in another way
        if said is Said.NOT_STARTED:
            self._is_handed = False
            raise SkypoolError(f"the run was not started: {handing.why or 'it was cancelled'}")
        self.is_detached = said is Said.DETACHED
        self.goes_on = self.is_detached
        if self.is_detached and not self._asked.detach:
            known = Ledger.here()
            record = known.record(self.session)
            assert record is not None
            self._watched = WatchedRun(
                record, known, tell, facts, made.printed, left, self._save, self._saved_to, self._stay
            )
        leaving = in_thread(owned.give_up, "skypool-leave")
        if self._watched is None:
            with contextlib.suppress(KeyboardInterrupt, SystemExit):  # a signal comes too late to cancel the run
                await_end(leaving)
        else:
            await_end(leaving)
        leaving.result()
        if self._watched is not None:
            tell.watches(pool.name, account.left, account.worst_usd, self._stay)
            return 0
        if said is Said.DETACHED:
            is_kept = self._asked.keep is not None or not account.worst_usd
            tell.detached(pool.name, account.left, account.worst_usd, needs.folder, is_kept)
            return 0
        if said is Said.INTERRUPTED:
            raise SkypoolError(
                f"run {pool.name} has ended as soon as its machine had it, as skypool's processes there have ended; "
                f"what is left is in {needs.folder} there, and `skypool down {pool.name}` ends the machine"
            )
        raise SkypoolError(
            f"it is not known whether run {pool.name} belongs to its machine: {handing.why}; the machine ends in "
            f"{span(account.left)} at the latest. `skypool ps` asks the machine again, and shows its answer as soon as "
            f"it can be reached; `skypool down {pool.name}` ends it"
        )

    def _save_rest(self, made: ProgramRun) -> None:
        """Have the last files saved to buckets, and tell what was saved."""
        if self._buckets:
            self._tell.stage("the last files, which are saved")
        states = made.save_rest()
        self._tell.stage("")
        for each in states:
            if each.whole:
                self._tell.saved_to(each)
                continue
            if not each.unsaved:  # of a node that was lost, or of a checkpoint that was perhaps not written to its end
                continue
            why = each.trouble or "there was no time for it"
            lost = f"{each.unsaved} file{'s' * (each.unsaved != 1)} of {each.id} ({', '.join(each.names)})"
            self.unsaved = "; ".join(filter(None, [self.unsaved, f"{lost}: {why}"]))
            self._tell.error(f"saved nowhere: {lost}: {why}")

    def post_end(self, error: BaseException | None, mask: Callable[[str], str] = str) -> None:
        """Post how the run has ended, if its user wants that, and tell if that fails. Its own machine does it itself.

        A signal gives it up. Call this when the machines have ended.

        Args:
            error: what has ended the run; None if its program has ended, or was never started.
            mask: returns a text without secrets.
        """
        if not self._on_end or not self.has_rented or self._is_handed:
            return
        end = replace(self._end(error), unsaved=mask(self.unsaved))
        posted = end_hook.Posted(self.name, replace(end, why=mask(end.why)), self.spent, self.seconds)
        done = in_thread(partial(end_hook.post, self._on_end, posted), "skypool-post-end")
        try:
            await_end(done)
            why = done.result()
        except (KeyboardInterrupt, SystemExit):
            why = "a signal came"
        if why:
            self._tell.error(f"the end of the run was not posted: {why}")
        else:
            self._tell.note(f"posted   the end of the run to {end_hook.host_of(self._on_end)}")

    def _end(self, error: BaseException | None) -> RunEnd:
        status = None if self.returncode is None else exit_status(self.returncode)
        if status is not None and not self.limit:
            return RunEnd(Outcome.ENDED, status, 1)
        if self.limit or isinstance(error, (KeyboardInterrupt, SystemExit)):
            return RunEnd(Outcome.CANCELLED, status, 1, limit=self.limit)
        return RunEnd(Outcome.FAILED, why="" if error is None else str(error) or type(error).__name__)

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.PoolPhase) and event.phase == Phase.ENDED.value:
            self._over = time.monotonic()

    def _drivers_of(self, former: Record) -> list[Driver]:
        """Return the drivers of a pool that stays, with the credentials that this run has given."""
        asked = self._asked.rent["provider"]
        drivers = asked if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
        given: dict[str, Driver] = {each.name: each for each in drivers if not isinstance(each, str)}
        return [given.get(each.name, each) for each in Ledger.here().drivers_of(former.pool)]

    def _check_taken(self, pool: ComputePool, is_stranger: bool) -> None:
        """Raise SkypoolError if the machines of an earlier run are not those that this run needs."""
        state, nodes = pool._sender.working().life.state, self._asked.nodes
        ways = f"`skypool down {pool.name}` ends what is left of it, and {self._tell.option('new')} rents others"
        self._has_lost = len(state.nodes) < nodes * state.hosts
        if self._has_lost:
            raise ConnectionLost(f"pool {pool.name} has lost a machine since the run before; {ways}")
        if self._asked.is_gang and is_stranger:
            raise UsageError(f"the machines of pool {pool.name} are strangers', which run one process only; {ways}")

    def _tell_stay(self, name: str) -> None:
        try:
            found = newest(Ledger.here().pools(name))
        except LedgerError:  # which the pool has told
            return
        if found is None or not found.is_staying:
            return
        seconds = found.lasts - clock.now()
        if not self._has_lost and lingering.is_complete(found, self._asked.nodes):
            self._tell.stays(name, seconds, found.usd_per_hour)
        else:
            self._tell.note(
                f"pool {name} has lost a machine: no run uses the others, which stay for {span(seconds)}; "
                f"`skypool down {name}` ends them"
            )


def cost(pool: ComputePool) -> float | None:
    """Return the cost of a pool so far, in USD; None if the ledger cannot be read, which the pool has told."""
    try:
        return pool.receipt.usd
    except SkypoolError:
        return None


def planned(rent: Mapping[str, Any], option: Callable[..., str]) -> Plan:
    """Return the plan for these arguments of `plan`. `option` returns an option as the user writes it.

    Raises NoOffers, with a note that says where to rent if only this machine was asked.
    """
    try:
        return plan(**rent)
    except NoOffers as e:
        if rent["provider"] == "local":
            fake = option("provider", "fake")
            e.add_note(f"say where to rent with {option('provider')}; `{fake}` rehearses it without an account")
        raise


def stranger_in(found: Plan) -> Offer | None:
    """Return an offer of a stranger's machine, who could read what processes exchange; None if there is none."""
    return next((offer for offer in found.offers if offer.trust != "full"), None)


def unlimited(found: Plan, option: Callable[..., str]) -> str:
    """Return what a run without a limit costs, and how to limit it; "" if it is free.

    `option` returns an option as the user writes it, as `Teller.option` does.
    """
    if not any(offer.usd_per_hour for offer in found.offers):
        return ""
    least, most = (pick(each.usd_per_hour for each in found.offers) * found.nodes[0] for pick in (min, max))
    price = option("max_usd_per_hour")
    others = f" (up to {most:g} if that is out of stock, which {price} limits)" if most > least else ""
    return endless(least, option, others)


def endless(usd_per_hour: float, option: Callable[..., str], others: str = "") -> str:
    """Return what machines cost that nothing limits, and how to limit it. `others` is what else they may cost."""
    return (
        f"this costs {usd_per_hour:g} USD an hour{others} until the program ends; set a limit, as by "
        f"{option('budget', max(1, math.ceil(10 * usd_per_hour)))}"
    )


def _check_python(project: Project) -> None:
    """Raise UsageError if no version of Python fits the project."""
    if not any(admits(project.python, f"3.{minor}") for minor in range(_MOST_MINOR)):
        raise UsageError(
            f"no version of Python fits {project.python!r}, which the project in {project.root} requires; correct "
            "requires-python, or write another version into .python-version"
        )


def _save_folder(said: str, tell: Teller) -> str:
    """Return the folder that is fetched. Raises UsageError if it is not below the current one."""
    folder = os.path.normpath(said) if said else ""
    if folder == "." or os.path.isabs(folder) or folder.split(os.sep)[0] in ("..", "~"):
        raise UsageError(
            f"{tell.option('save')} takes a folder below the current one, such as {tell.option('save', 'out')}, "
            f"not {said!r}"
        )
    return folder


def _below_root(target: Target, path: str) -> str:
    """Return a path as it is below the project's root. Raises UsageError if it is empty."""
    if not path:
        raise UsageError("a path that is included is empty; correct what is included")
    return os.path.relpath(os.path.abspath(os.path.expanduser(path)), target.project.root)


def _why_unsent(survey: Survey, path: str) -> str:
    """Return why a path, or a folder that it is in, is not sent; "" if nothing is told of them."""
    parts = path.split("/")
    above = ("/".join(parts[: n + 1]) for n in range(len(parts)))
    return next((survey.unsent[each] for each in above if each in survey.unsent), "")


def _plain(name: str) -> str:
    return "".join(each if each.isalnum() and each.isascii() else "-" for each in name.lower())[:24].strip("-") or "run"
