"""`run` and `Run`: run a program or a call on machines that are rented for it, from Python."""

from __future__ import annotations

import codecs
import contextlib
import os
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, Unpack, cast, overload

from skypool import events, tracebacks
from skypool.buckets.bucket import Bucket
from skypool.calls.call import Call, ComputeFunction, Group, packed
from skypool.calls.options import MOST_PROCS
from skypool.checks import Duration, number, seconds, switch, texts, whole
from skypool.compute_pool.compute_pool import ComputePool
from skypool.drivers.contract import Driver
from skypool.errors import (
    BudgetExceeded,
    CallTimeout,
    CommandFailed,
    LifetimeExceeded,
    PickleError,
    RemoteError,
    SkypoolError,
    SpoolFull,
    TransferError,
    UntrustedResult,
    UsageError,
    WorkerDied,
    nearest,
)
from skypool.head.states import Outcome
from skypool.logs.masking import Masker
from skypool.offers.need import NodeTerms
from skypool.offers.ranking import Plan
from skypool.offers.sort_keys import OrderBy
from skypool.rental.budget import Budget, ceiling
from skypool.rental.records import RunEnd
from skypool.runs import detached_run, end_hook, packed_call
from skypool.runs.detached_run import DetachedRun
from skypool.runs.output_spool import OutputSpool
from skypool.runs.program_run import exit_status
from skypool.runs.target import Target
from skypool.runs.teller import Teller
from skypool.runs.whole_run import FAILED, Asked, WholeRun, cost, planned, stranger_in, unlimited
from skypool.text import change_texts, plain, printable
from skypool_images import Image

if TYPE_CHECKING:
    from skypool.offers.need import AcceleratorAsked

T = TypeVar("T")
_KEPT = 1_000_000
"""The most characters of a run's output that are kept."""
_TAIL = 20
"""The lines of a program's output that its error shows."""
_NOTE = 3
"""What a piece of a spool is besides stdout (1) and stderr (2)."""
_OF_CALLS = (
    CallTimeout, CommandFailed, PickleError, RemoteError, SpoolFull, TransferError, UntrustedResult, WorkerDied,
)  # fmt: skip
"""The errors of skypool that say how a call itself has failed. Others are about machines, limits and mistakes."""
_HINTS = {
    "gpu": "accelerator='H100:8'", "gpus": "accelerator='H100:8'", "spot": "market='spot'",
    "secret": "secrets=['NAME']", "with": "packages=['NAME']", "max_price": "max_usd_per_hour=4",
    "local": "provider='local'", "dry_run": "skypool.plan(…), which rents nothing",
}  # fmt: skip
"""What to write in place of arguments that one may expect."""
_PAUSE = 0.05
"""Seconds until a stream that takes nothing now is tried again."""


@dataclass(frozen=True, eq=False)
class Run(Generic[T]):
    """A run that has ended, as `skypool.run` returns it.

    Attributes:
        name: the name of its pool, by which `skypool cost` lists it.
        returncode: the exit status of the program: 128 + n if signal n ended it, and 125 if what it saved could not be
            fetched. For a call, 0, or 1 if it raised.
        output: what it printed to stdout and stderr, in the order in which it came: the last million characters.
        usd: what it has cost, in US dollars; None if the ledger could not be read.
    """

    name: str
    returncode: int
    output: str = field(repr=False)
    usd: float | None
    _value: T | None = field(default=None, repr=False)
    _error: Exception | None = field(default=None, repr=False)

    @property
    def state(self) -> Literal["succeeded", "failed"]:
        """Return "succeeded" if `returncode` is 0, and "failed" otherwise."""
        return "failed" if self.returncode else "succeeded"

    @staticmethod
    def get(name: str) -> DetachedRun[Any]:
        """Return the newest run of this name that belongs to its machine, or did so, whichever process has started it.

        Raises:
            UsageError: there is none.
            LedgerError: the ledger cannot be read.
        """
        return detached_run.get(name)

    def wait(self) -> int:
        """Return `returncode` at once, because the run has ended."""
        return self.returncode

    def result(self) -> T:
        """Return the value of the call; None for a program. Raises what the call has raised."""
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


@overload
def run(
    target: Call[T],
    provider: Driver | str | Sequence[Driver | str] | None = None,
    *,
    accelerator: AcceleratorAsked = None,
    image: Image | None = None,
    nodes: int = 1,
    order_by: OrderBy = "cheapest",
    budget: float | Budget | None = None,
    max_lifetime: Duration | None = None,
    save: Mapping[str, str | Bucket] | None = None,
    data: Mapping[str, str | Bucket] | None = None,
    complete: Sequence[str] | None = None,
    name: str | None = None,
    detach: Literal[False] = False,
    on_end: str | None = None,
    check: bool = False,
    **terms: Unpack[NodeTerms],
) -> Run[T]: ...
@overload
def run(
    target: Call[T],
    provider: Driver | str | Sequence[Driver | str] | None = None,
    *,
    accelerator: AcceleratorAsked = None,
    image: Image | None = None,
    order_by: OrderBy = "cheapest",
    save: Mapping[str, str | Bucket] | None = None,
    data: Mapping[str, str | Bucket] | None = None,
    complete: Sequence[str] | None = None,
    budget: float | Budget | None = None,
    max_lifetime: Duration | None = None,
    name: str | None = None,
    detach: Literal[True],
    keep: Duration | None = None,
    lossy: bool = False,
    on_end: str | None = None,
    **terms: Unpack[NodeTerms],
) -> DetachedRun[T]: ...
@overload
def run(
    target: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    provider: Driver | str | Sequence[Driver | str] | None = None,
    *,
    accelerator: AcceleratorAsked = None,
    nodes: int = 1,
    procs: int | None = None,
    node: int | None = None,
    order_by: OrderBy = "cheapest",
    packages: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] | None = None,
    include: Sequence[str | os.PathLike[str]] | None = None,
    save: str | os.PathLike[str] | Mapping[str, str | Bucket] | None = None,
    data: Mapping[str, str | Bucket] | None = None,
    complete: Sequence[str] | None = None,
    on_notice: Literal["TERM", "USR1", "none"] | None = None,
    budget: float | Budget | None = None,
    max_lifetime: Duration | None = None,
    name: str | None = None,
    linger: Duration | None = None,
    new: bool = False,
    detach: Literal[False] = False,
    on_end: str | None = None,
    check: bool = False,
    yes: bool = False,
    **terms: Unpack[NodeTerms],
) -> Run[None]: ...
@overload
def run(
    target: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    provider: Driver | str | Sequence[Driver | str] | None = None,
    *,
    accelerator: AcceleratorAsked = None,
    procs: int | None = None,
    order_by: OrderBy = "cheapest",
    packages: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] | None = None,
    include: Sequence[str | os.PathLike[str]] | None = None,
    save: str | os.PathLike[str] | Mapping[str, str | Bucket] | None = None,
    data: Mapping[str, str | Bucket] | None = None,
    complete: Sequence[str] | None = None,
    on_notice: Literal["TERM", "USR1", "none"] | None = None,
    budget: float | Budget | None = None,
    max_lifetime: Duration | None = None,
    name: str | None = None,
    detach: Literal[True],
    keep: Duration | None = None,
    lossy: bool = False,
    on_end: str | None = None,
    yes: bool = False,
    **terms: Unpack[NodeTerms],
) -> DetachedRun[None]: ...
def run(
    target: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Call[Any],
    provider: Driver | str | Sequence[Driver | str] | None = None,
    *,
    accelerator: AcceleratorAsked = None,
    image: Image | None = None,
    nodes: int = 1,
    procs: int | None = None,
    node: int | None = None,
    order_by: OrderBy = "cheapest",
    packages: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] | None = None,
    include: Sequence[str | os.PathLike[str]] | None = None,
    save: str | os.PathLike[str] | Mapping[str, str | Bucket] | None = None,
    data: Mapping[str, str | Bucket] | None = None,
    complete: Sequence[str] | None = None,
    on_notice: Literal["TERM", "USR1", "none"] | None = None,
    budget: float | Budget | None = None,
    max_lifetime: Duration | None = None,
    name: str | None = None,
    linger: Duration | None = None,
    new: bool = False,
    detach: bool = False,
    keep: Duration | None = None,
    lossy: bool = False,
    on_end: str | None = None,
    check: bool = False,
    yes: bool = False,
    **terms: Unpack[NodeTerms],
) -> Run[Any] | DetachedRun[Any]:
    """Rent machines, run a program or a call there, show what it prints, and end the machines.

        run = skypool.run("train.py", "aws", accelerator="H100:8", budget=120, save="out", check=True)
        run = skypool.run(["torchrun", "train.py", "--epochs", "3"], nodes=2)
        value = skypool.run(train(10), "aws", accelerator="H100:8", budget=120).result()
        run = skypool.run("train.py", "aws", budget=120, save={"out": "s3://models/runs/x"}, detach=True)

    For a program, this does what the command `skypool run` does; docs/run.md says what is sent, and how it ends.

    Args:
        target: a script, such as "train.py"; a list of words as on a command line, such as ["-m", "package.train"]; or
            a call of a `@compute` function. A call runs on one node, or as its options say.
        provider, accelerator, nodes, order_by, max_lifetime, name, terms: the same arguments as those of `ComputePool`.
        image: the image of the nodes on which a call runs. A program has the environment of its project. The values of
            the image's secrets are masked in `Run.output` only.
        procs: the number of processes of the program on each node. Default None: one, with all devices of the node.
        node: the only node that runs the program, counted from 0. Default None: all.
        packages: packages besides those of the project. Default None: none.
        env: variables for the program. Default None: none.
        secrets: the names of variables whose values are taken from the environment, from `.env`, or from the logins of
            `hf` and `wandb`, and shown nowhere. Default None: none.
        include: files and folders of the project that are sent in any case. Default None: none.
        save: folders that are kept in buckets, such as {"out": "s3://models/runs/x"}: see docs/save.md. Or one folder
            that the program writes: it is kept in the bucket for all runs, if there is one, and otherwise fetched to
            the same name here. Default None: none.
        data: folders that are filled from buckets before the program or call starts, such as
            {"/data": "s3://models/shards"}: see docs/data.md. Default None: none.
        complete: what is written last into a checkpoint, as of `ComputePool`. Default None: what the usual libraries
            write last.
        on_notice: the signal for the program when its machine is taken back soon: "TERM", "USR1" or "none". It is sent
            only if the program catches it. Default None: SIGTERM, after which status 0 counts as an interruption, too.
        budget: the US dollars that the run may cost, or a `Budget`, whose `warn` counts for calls only. Machines that
            cost money need this, `max_lifetime`, or the environment variable `SKYPOOL_MAX_USD`.
        linger: how long the machines stay after the run. The next run of the project with `linger` and the same needs
            uses them, within the limits of the first. Default None: they end with the run.
        new: True to rent machines though an earlier run has left some. Default False.
        detach: True to return a `DetachedRun` as soon as the program or call belongs to its machine, which then needs
            nobody and ends itself: see docs/close-the-lid.md. Needs a limit, and one node. `DetachedRun.result` returns
            the value of the call later. Default False: return at the end.
        keep: with `detach`, how long the machine stays after the run, with what that has written. Needed if the
            machine costs money and `save` names no bucket. Default None: it ends with the program.
        lossy: with `detach`, True to take a spot machine though `save` names no bucket: if it is taken back, all that
            the run has written is lost. Default False.
        on_end: the https address of a webhook, such as one of Slack or Discord, to which is posted how the run has
            ended; or the name of a variable that has it. It is shown nowhere: docs/run.md. Default None: nothing is
            posted.
        check: True to raise an error if the program or the call has failed. Default False.
        yes: True to send a project of more than 1 GB or 10,000 files. Default False.

    Raises:
        UsageError: an argument is not valid, or the run would not do what is expected.
        CommandFailed: the program could not be started; with `check`, also if its exit status is not 0.
        TransferError: with `check`: what the program saved could not be fetched.
        BudgetExceeded, LifetimeExceeded: the run was ended because its limit was reached.
        SkypoolError: nothing was rented, machines were lost, or their end is not proved. What a call itself raises is
            returned in the `Run`. If machines had been rented, the error has the `Run` as its attribute `run`.
    """
    if isinstance(target, Call):
        target.sent = True  # if it is refused, the error says that it does not run
    for each in terms:
        if each not in NodeTerms.__annotations__:
            _refuse_name(each)
    whole("nodes", nodes, "the number of nodes", least=1)
    if budget is not None and not isinstance(budget, Budget):
        number("budget", budget, "the US dollars that the run may cost", above=0)
        budget = Budget(budget)
    lifetime = None if max_lifetime is None else seconds("max_lifetime", max_lifetime)
    rent: dict[str, Any] = {
        "provider": "local" if provider is None else provider,
        "accelerator": accelerator,
        "order_by": order_by,
        **terms,
    }
    if isinstance(target, Call):
        if (keep is not None or lossy) and not detach:
            named = "lossy=" if keep is None else "keep="
            raise UsageError(f"{named} is for runs that belong to their machine; add detach=True, or leave it out")
        given: dict[str, object] = {
            "procs": procs, "node": node, "packages": packages, "env": env, "secrets": secrets, "include": include,
            "save": None if isinstance(save, Mapping) else save, "yes": yes or None, "linger": linger,
            "new": new or None, "on_notice": on_notice,
        }  # fmt: skip
        for option, value in given.items():
            if value is not None:
                raise UsageError(
                    f"{option}= is for programs; for a call, use its own options, image=, or a ComputePool"
                )
        saves = {
            "save": save if isinstance(save, Mapping) else None,
            "data": data,
            "complete": texts("complete", complete),
        }
        if switch("detach", detach):
            if check:
                raise _no_check()
            asked = Asked(
                rent=rent,
                nodes=nodes,
                buckets={} if save is None else cast(Any, save),
                data={} if data is None else data,
                complete=texts("complete", complete),
                name=name,
                budget=None if budget is None else budget.max_usd,
                max_lifetime=lifetime,
                best_effort=budget is not None and budget.best_effort,
                detach=True,
                keep=None if keep is None else seconds("keep", keep),
                image=Image() if image is None else image,
                is_call=True,
                retries=target.options.retries,
                lossy=switch("lossy", lossy),
                on_end=_address(on_end),
            )
            packed_call.check(target)
            with packed_call.as_target(target) as made:
                return cast("DetachedRun[Any]", _run_program(made, asked, check=False))
        return _run_call(
            target, {**rent, "image": image}, nodes, budget, lifetime, name, check, saves, _address(on_end)
        )
    if image is not None:
        raise UsageError("image= is for calls; a program has the environment of its project, and packages= adds to it")
    if procs is not None:
        whole("procs", procs, "the number of processes on each node", least=1)
        if procs > MOST_PROCS:
            raise UsageError(f"procs must be at most {MOST_PROCS}, not {procs}")
    if node is not None:
        whole("node", node, "the number of a node", least=0)
    if detach and check:
        raise _no_check()
    asked = Asked(
        rent=rent,
        nodes=nodes,
        procs=procs,
        packages=texts("packages", packages),
        env=_variables(env),
        secrets=texts("secrets", secrets),
        include=texts("include", include),
        save=_folders(save),
        buckets=save if isinstance(save, Mapping) else {},
        data={} if data is None else data,
        complete=texts("complete", complete),
        name=name,
        budget=None if budget is None else budget.max_usd,
        max_lifetime=lifetime,
        yes=yes,
        linger=None if linger is None else seconds("linger", linger),
        new=new,
        node=node,
        best_effort=budget is not None and budget.best_effort,
        on_notice=on_notice or "",
        detach=switch("detach", detach),
        keep=None if keep is None else seconds("keep", keep),
        lossy=switch("lossy", lossy),
        on_end=on_end or "",
    )
    return _run_program(Target.of(_words(target)), asked, check)


def _no_check() -> UsageError:
    return UsageError("with detach=True, nobody knows yet how the program ends; leave check= out, and see `wait`")


def _refuse_name(name: str) -> NoReturn:
    known = [*NodeTerms.__annotations__, *cast(Any, run).__kwdefaults__, "target", "provider"]
    close = [_HINTS[name]] if name in _HINTS else nearest(name, known)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise TypeError(f"run() got an unexpected keyword argument {name!r}{hint}")


def _words(target: object) -> list[str]:
    """Return the words of a command line. Raises UsageError if `target` names no program."""
    if isinstance(target, ComputeFunction):
        raise UsageError(f"{target.name} is a function, not a call; write run({target.name}(…))")
    if isinstance(target, str) and not os.path.exists(os.path.expanduser(target)):
        words = _split(target)
        if len(words) > 1:
            raise UsageError(f"{target!r} is no script; pass the words of a command line as a list: {words!r}")
    if isinstance(target, Group):
        raise UsageError("run takes one call; a ComputePool runs several at once")
    is_list = isinstance(target, Sequence) and not isinstance(target, (str, bytes))
    found: list[object] = [*cast(Sequence[object], target)] if is_list else [target]
    words = [os.fspath(each) for each in found if isinstance(each, (str, os.PathLike))]
    if len(words) < len(found):
        raise UsageError(
            f"the target must be a script, a list of words, or a call of a @compute function, not {target!r:.200}"
        )
    if words and words[0].startswith("-") and words[0] != "-m":
        raise UsageError(f"the first word of the target is a program or -m, not {words[0]!r}")
    return words


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quote is not closed
        return line.split()


def _folders(save: object) -> list[str]:
    if save is None or isinstance(save, Mapping):
        return []
    if not isinstance(save, (str, os.PathLike)) or not isinstance(folder := os.fspath(save), str):
        raise UsageError(f"save must be the path of a folder, or a dict from paths to places, not {save!r:.200}")
    return [folder] if folder else []


def _variables(env: Mapping[str, str] | None) -> dict[str, str]:
    if env is not None and not isinstance(env, Mapping):
        raise UsageError(f"env must be a dict from the name of a variable to its value, not {type(env).__name__}")
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"the value of {name!r:.200} in env must be a string, not {type(value).__name__}")
        if not name or "=" in name or "\0" in name + value:
            raise UsageError(f"env has {name!r:.200}, which cannot be a variable")
    return dict(env or {})


# --- programs ----------------------------------------------------------------------------------------------------


def _run_program(target: Target, asked: Asked, check: bool) -> Run[None] | DetachedRun[Any]:
    tell = _Printer()
    what = shlex.join(target.words)
    made: WholeRun | None = None
    status = FAILED

    def done() -> Run[None]:
        name, usd = (made.name, made.spent) if made is not None else ("", 0.0)
        return Run(name, status, tell.kept, usd)

    try:
        made = WholeRun(target, asked, tell)
        made.check()
        what = tell.masked(what)
        status = made.run()
    except BaseException as e:
        error = e
        if made is not None and made.returncode is not None:  # the program had ended before
            status = exit_status(made.returncode)
            status = status or (FAILED if made.unsaved else 0)
        elif isinstance(e, (KeyboardInterrupt, SystemExit)):
            status = (e.code if isinstance(e, SystemExit) and isinstance(e.code, int) else 0) or 130
        elif isinstance(e, CancelledError) and made is not None and made.limit:
            limited = LifetimeExceeded if made.limit == "lifetime" else BudgetExceeded
            error = limited(f"{what} was interrupted, as the {made.limit} of {made.name} is over")
        tell.mask_error(error)
        if made is not None and made.has_rented:
            tell.ends(status, made.spent, made.seconds, made.returncode, made.limit)
            made.post_end(e, tell.masked)
        with _keeping(done):
            tell.close()
        if made is not None and made.has_rented:
            vars(error)["run"] = done()
        if error is e:
            raise
        raise error from None
    if made.is_detached:
        tell.close()
        return detached_run.get(made.name)
    tell.ends(status, made.spent, made.seconds, made.returncode, made.limit)
    made.post_end(None, tell.masked)
    with _keeping(done):
        tell.close()
    ended = done()
    if check and status:
        failed: SkypoolError
        if made.returncode:
            failed = CommandFailed(what, made.returncode, "\n".join(ended.output.splitlines()[-_TAIL:]))
            if made.unsaved:
                failed.add_note(f"what it saved was not fetched: {made.unsaved}")
        else:
            failed = TransferError(f"what {what} saved was not fetched: {made.unsaved}")
        vars(failed)["run"] = ended
        tell.mask_error(failed)
        raise failed
    return ended


@contextlib.contextmanager
def _keeping(done: Callable[[], Run[Any]]) -> Iterator[None]:
    """Attach the run to what interrupts this block, such as Ctrl-C."""
    try:
        yield
    except BaseException as e:
        vars(e)["run"] = done()
        raise


# --- calls -------------------------------------------------------------------------------------------------------


def _run_call(
    call: Call[T],
    rent: Mapping[str, Any],
    nodes: int,
    budget: Budget | None,
    lifetime: float | None,
    name: str | None,
    check: bool,
    saves: Mapping[str, Any],
    on_end: str,
) -> Run[T]:
    if call.function.is_generator:
        raise UsageError(
            f"{call.function.name} is a generator function, whose items come while its machines run; use a ComputePool"
        )
    feeds = packed(call).feeds  # what cannot be sent is told before anything is rented
    found = planned({**rent, "nodes": nodes}, _option)
    _check_nodes(call, found, nodes, has_feeds=bool(feeds))
    has_limit = not (budget is None and lifetime is None and ceiling() is None)
    if not has_limit and (text := unlimited(found, _option)):
        raise UsageError(text)
    pool = ComputePool(**rent, **saves, nodes=nodes, name=name, budget=budget, max_lifetime=lifetime)
    output = _CallOutput()
    pool.events.listen(output.hear)
    value: T | None = None
    error: Exception | None = None

    def done(status: int) -> Run[T]:
        return Run(pool.name, status, output.finish(), cost(pool), value, error)

    status, began = FAILED, time.monotonic()
    try:
        with pool:
            output.mask(pool._sender.working().facts.secrets)
            try:
                value = pool.run(call)
                status = 0
            except Exception as e:  # of any kind, as the user's function has raised it
                if not _is_of_call(e):
                    raise
                error, status = e, 1
    except BaseException as e:
        vars(e)["run"] = ended = done(status)
        _post_call(on_end, ended, e, time.monotonic() - began, output.masked)
        raise
    ended = done(status)
    _post_call(on_end, ended, error, time.monotonic() - began, output.masked)
    if check and error is not None:
        vars(error)["run"] = ended
        raise error
    return ended


def _address(on_end: str | None) -> str:
    """Return the address to which the end of a call is posted; "" for none. Raises UsageError if it is not valid."""
    return end_hook.named(on_end or "", Path.cwd(), "on_end=")


def _post_call(
    url: str, run: Run[Any], error: BaseException | None, seconds: float, mask: Callable[[str], str]
) -> None:
    """Post how a call has ended, if its user wants that. Warns if that fails. A signal gives it up."""
    if not url:
        return
    why = "" if error is None else mask(str(error) or type(error).__name__)
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        end = RunEnd(Outcome.CANCELLED, attempts=1)
    elif isinstance(error, (BudgetExceeded, LifetimeExceeded)):
        end = RunEnd(Outcome.CANCELLED, limit="budget" if isinstance(error, BudgetExceeded) else "lifetime")
    elif run.returncode == FAILED:
        end = RunEnd(Outcome.FAILED, why=why)
    else:
        end = RunEnd(Outcome.ENDED, run.returncode, 1, why=why)
    if failed := end_hook.post(url, end_hook.Posted(run.name, end, run.usd, seconds)):
        tracebacks.warn(f"the end of run {run.name} was not posted: {failed}")


def _is_of_call(error: BaseException) -> bool:
    """Return True if an error says how a call itself has failed, and not what is wrong with its machines."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_of_call, error.exceptions))
    return not isinstance(error, SkypoolError) or isinstance(error, _OF_CALLS)


def _check_nodes(call: Call[Any], found: Plan, nodes: int, has_feeds: bool) -> None:
    """Raise UsageError if a call would not use all nodes that are rented for it, or cannot run on them."""
    options, name = call.options, call.function.name
    there = nodes * (found.best.hosts if found.best is not None else 1)
    one_of = f"{there} nodes would be rented, and {name} would run on"
    match options.node:
        case None | int() if there > 1:
            raise UsageError(f'{one_of} one of them; leave nodes= out, or run it with the option node="all"')
        case tuple() as named if max(named) >= there:
            raise UsageError(f"{name} asks for node {max(named)}, and {there} node{'s' * (there > 1)} would be rented")
        case tuple() as named if len(named) < there:
            raise UsageError(f'{one_of} {len(named)} of them; run it with the option node="all", or rent fewer')
        case int() as number if number >= there:
            raise UsageError(f"{name} asks for node {number}, and 1 node would be rented")
        case _:
            pass
    if options.procs is None:
        return
    if has_feeds:
        raise UsageError(f"{name} runs in several processes (procs=), which cannot share an iterator; pass a list")
    if options.min_nodes is not None and options.min_nodes > there:
        raise UsageError(f"{name} needs {options.min_nodes} nodes (min_nodes=), and {there} would be rented")
    if (stranger := stranger_in(found)) is not None:
        raise UsageError(
            f"{stranger.provider} {stranger.instance_type} is a machine of a stranger, which cannot take part in procs="
        )


def _option(name: str, value: object = None) -> str:
    return f"{name}={'' if value is None else repr([value] if name == 'include' else value)}"


class _Kept:
    """The last million characters of an output."""

    def __init__(self) -> None:
        self._parts: deque[str] = deque()
        self._size = 0
        self._lock = threading.Lock()

    @property
    def text(self) -> str:
        with self._lock:
            return "".join(self._parts)[-_KEPT:]

    def add(self, text: str) -> None:
        with self._lock:
            self._parts.append(text)
            self._size += len(text)
            while self._size - len(self._parts[0]) > _KEPT:
                self._size -= len(self._parts.popleft())


class _CallOutput:
    """Keeps what a call prints on a pool, with marks in place of the image's secrets."""

    def __init__(self) -> None:
        self._kept = _Kept()
        self.mask({})

    def mask(self, secrets: Mapping[str, str]) -> None:
        self._masker = Masker(secrets)

    def masked(self, text: str) -> str:
        return self._masker.mask(text)

    def hear(self, event: events.Event) -> None:
        if isinstance(event, events.Output):
            self._kept.add(self._masker.feed((event.node, event.call, event.rank, event.stream), event.text))

    def finish(self) -> str:
        for source in self._masker.held():
            self._kept.add(self._masker.finish(source))
        return self._kept.text


class _Printer(Teller):
    """Prints what happens to `sys.stderr`, and what the program prints to `sys.stdout` and `sys.stderr`. Keeps that.

    Threads print, so that a slow reader delays neither the program nor the end of its machines. If `sys.stdout` cannot
    be written any more, that is told once, and the run goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept = _Kept()
        self._decoders: dict[Hashable, codecs.IncrementalDecoder] = {}
        self._failed: set[int] = set()
        self._out = OutputSpool(self._show, lambda _: None)
        self._err = self._out if _is_one_place() else OutputSpool(self._show, lambda _: None)

    @property
    def kept(self) -> str:
        """The end of the output so far."""
        return self._kept.text

    def option(self, name: str, value: object = None) -> str:
        return f"{name}=True" if name in ("yes", "identity", "detach", "lossy") else _option(name, value)

    def ask(self, question: str) -> bool | None:
        return None

    @contextlib.contextmanager
    def watching(self, pool: ComputePool) -> Iterator[Callable[[], None]]:
        def on_end() -> None:
            for spool in (self._out, self._err):
                spool.hurry()

        yield on_end

    def mask_error(self, error: BaseException) -> None:
        """Put marks in place of secrets in the texts of an error and of what has caused it."""
        change_texts(error, self.masked)

    def note(self, text: str) -> None:
        self._err.put(0, _NOTE, (plain(self.masked(text)) + "\n").encode("utf-8", "surrogateescape"), always=True)

    def error(self, text: str) -> None:
        self.note(f"error: {text}")

    def output(self, rank: int, stream: int, data: bytes) -> None:
        self._take(rank, stream, data)

    def close(self) -> None:
        """Wait until all is printed."""
        self.end_output()
        for rank, stream in cast("list[tuple[int, int]]", [*self._decoders]):
            self._take(rank, stream, b"", is_end=True)
        if self._err is not self._out:
            self._out.drain()
        if failure := self._out.failure or self._err.failure:
            self.error(f"some output is not shown: {failure}")
        lost = self._out.lost + (0 if self._err is self._out else self._err.lost)
        if lost:
            why = self._out.why_lost or self._err.why_lost
            self.error(f"{lost:,} bytes of output are not shown, as they could not be kept here: {why}")
        self._err.drain()

    def _take(self, rank: int, stream: int, data: bytes, is_end: bool = False) -> None:
        """Keep a piece of output as text, and have it printed. Each process has a thread that calls this."""
        new = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._decoders.setdefault((rank, stream), new).decode(data, is_end)
        text = printable(text) if self.is_stranger else text
        if text:
            self._kept.add(text)
            (self._out if stream == 1 else self._err).put(rank, stream, text.encode(), wait=True)

    def _show(self, rank: int, kind: int, data: bytes) -> None:
        stream = 1 if kind == 1 else 2
        if stream in self._failed:
            return
        try:
            _print(sys.stdout if stream == 1 else sys.stderr, data.decode("utf-8", "surrogateescape"))
        except Exception as e:  # noqa: BLE001 - it may be closed, or any object of the user's
            self._failed.add(stream)
            if stream == 1:
                self.note(f"sys.stdout cannot be written any more ({type(e).__name__}: {e}); Run.output has the end")


def _is_one_place() -> bool:
    """Return True if `sys.stdout` and `sys.stderr` lead to the same place, so that their order matters."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except Exception:  # noqa: BLE001 - they have no file, are closed, or are objects of the user's
        return sys.stdout is sys.stderr


def _print(stream: Any, text: str) -> None:
    """Write text to a stream, which may be non-blocking, or None as in a program without a terminal."""
    if stream is None:
        return
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        stream.write(text)
        stream.flush()
        return
    with contextlib.suppress(BlockingIOError):  # what was printed before is in its buffer then
        stream.flush()
    try:
        data = text.encode(stream.encoding, stream.errors or "strict")
    except UnicodeEncodeError:  # of a terminal that knows few characters
        data = text.encode(stream.encoding, "backslashreplace")
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[buffer.write(rest) :]
        except BlockingIOError as e:  # the rest was not taken
            rest = rest[e.characters_written :]
            time.sleep(_PAUSE)
    while True:
        try:
            buffer.flush()
        except BlockingIOError:
            time.sleep(_PAUSE)
        else:
            return
