"""The command `skypool run`: rent machines, run a program there with its project, and end them."""

from __future__ import annotations

import json
import secrets
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from skypool import events
from skypool.cli import output
from skypool.compute_pool.compute_pool import ComputePool
from skypool.console.event_text import span
from skypool.errors import SkypoolError, UsageError
from skypool.files.project import Survey, surveyed
from skypool.model import Offer
from skypool.offers.plan import plan
from skypool.runs.run import ProgramRun
from skypool.runs.target import Target
from skypool_images import Image

_FAILED = 125
"""The exit status if the program was not started."""
_MOST_BYTES = 10**9
_MOST_FILES = 10_000


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool run` to the program."""
    app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(run)


def run(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET [ARGS]...", help="A script (train.py), -m MODULE, or a command with its arguments."
        ),
    ],
    accelerator: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu", "--accelerator", "-a", help="Accelerators of each node: H100:8 (repeatable: any of these)."
        ),
    ] = None,
    provider: Annotated[
        list[str] | None,
        typer.Option("--provider", "-p", help="Rent from this provider (repeatable). Default: this machine."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    procs: Annotated[
        int | None, typer.Option(min=1, help="Processes on each node. Default: one, with all devices of the node.")
    ] = None,
    region: Annotated[list[str] | None, typer.Option("--region", help="Only this region (repeatable).")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Rent spot machines.")] = False,
    packages: Annotated[
        list[str] | None, typer.Option("--with", help="A package besides those of the project (repeatable).")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", help="A variable for the program: NAME=VALUE (repeatable).")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", help="A path of the project that is sent in any case (repeatable).")
    ] = None,
    save: Annotated[
        str, typer.Option("--save", help="A folder that the program writes: it is fetched to the same name here.")
    ] = "",
    name: Annotated[str | None, typer.Option("--name", help="Name of the pool. Default: from the program's.")] = None,
    budget: Annotated[float | None, typer.Option("--budget", help="The most USD that this may cost.")] = None,
    max_price: Annotated[float | None, typer.Option("--max-price", help="The most USD per hour of one node.")] = None,
    max_lifetime: Annotated[
        str | None, typer.Option("--max-lifetime", help="The time after which everything ends: 4h, 30m.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent and rented, and end.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Rent without a limit and send a large project unasked.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Rent machines, run a program there with its project, show what it prints, and end the machines.

    The project is the folder above with a pyproject.toml, uv.lock, requirements.txt or .git. Its files are sent, except
    secrets, caches and what git ignores. Options of skypool come before TARGET, and those of the program after it.

    The exit status is that of the program, 128 + n if signal n ended it, and 125 if it was not started.
    """
    tell = _Json() if as_json else _Lines()
    try:
        target = Target.of(words)
        survey = surveyed(target.project, include or ())
        tell.project(target, survey)
        _check_size(survey, yes)
        node: dict[str, Any] = {"market": "spot" if spot else "on-demand"}
        node |= {"max_usd_per_hour": max_price} if max_price is not None else {}
        node |= {"region": region} if region else {}
        asked: dict[str, Any] = {
            "provider": provider or "local",
            "accelerator": accelerator or None,
            "nodes": nodes,
            **node,
        }
        image = Image(pip=packages or ()) if packages and not target.project.source else Image()
        best = plan(**asked, image=image).offers[0]
        tell.rents(best, nodes, budget, max_lifetime)
        _check_limit(best, nodes, budget, max_lifetime, yes or dry_run)
        if dry_run:
            return
        pool = ComputePool(
            **asked,
            image=image,
            slots=1,
            name=name or f"{_plain(target.name)}-{secrets.token_hex(3)}",
            budget=budget,
            max_lifetime=max_lifetime,
            console="off",
        )
    except SkypoolError as e:
        output.complain(str(e))
        raise typer.Exit(_FAILED) from e
    status = _FAILED
    pool.events.listen(tell.hear)
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, _raise)
    began = time.monotonic()
    try:
        with pool:
            booted = time.monotonic()
            made = ProgramRun(pool, target, tell.wrote, packages or (), _variables(env or ()), include or (), procs)
            made.send()
            programs, _ = made.prepare()
            tell.starts(booted - began, time.monotonic() - booted, pool.receipt.usd)
            with _Saving(made, save, tell):
                status = made.run(programs)
    except SkypoolError as e:
        output.complain(str(e))
    except KeyboardInterrupt:
        status = 130
    except _Signalled as e:
        status = 128 + e.number
    tell.ends(status, pool.receipt.usd, time.monotonic() - began)
    raise typer.Exit(status)


class _Signalled(BaseException):
    """Raised in the main thread by SIGTERM, and by SIGHUP as of a closed terminal: the run ends, with its machines."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _raise(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise _Signalled(number)


class _Saving:
    """Fetches the folder that a program writes each minute, and at the end. A context manager."""

    def __init__(self, run: ProgramRun, save: str, tell: _Lines) -> None:
        self._run, self._save, self._tell = run, save, tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="skypool-save", daemon=True)

    def __enter__(self) -> None:
        if self._save:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        if not self._save:
            return
        self._over.set()
        self._thread.join()
        self._tell.saved(self._save, self._run.fetch(self._save, Path(self._save)))

    def _work(self) -> None:
        while not self._over.wait(60.0):
            try:
                self._run.fetch(self._save, Path(self._save))
            except SkypoolError as e:
                self._tell.note(f"{self._save} cannot be fetched now: {e}")


class _Lines:
    """Tells a person what happens: on stderr, as stdout is the program's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def project(self, target: Target, survey: Survey) -> None:
        about = ", ".join(
            filter(None, [target.project.source, target.project.python and f"Python {target.project.python}"])
        )
        left = ", ".join(sorted(survey.unsent)[:8]) + (", …" if len(survey.unsent) > 8 else "")
        unsent = f"; not sent: {left}" if left else ""
        self.note(f"project  {survey.files:,} files, {decimal(survey.bytes)}{', ' + about if about else ''}{unsent}")

    def rents(self, best: Offer, nodes: int, budget: float | None, lifetime: str | None) -> None:
        limits = [f"at most {budget:g} USD" if budget is not None else "", f"ends after {lifetime}" if lifetime else ""]
        limit = "; ".join(filter(None, limits)) or ("no limit" if best.usd_per_hour else "free")
        machine = " ".join(filter(None, [best.provider, best.instance_type, best.zone or best.region]))
        self.note(
            f"rents    {f'{nodes} × ' if nodes > 1 else ''}{machine}, {best.usd_per_hour * nodes:g} USD/h; {limit}"
        )

    def starts(self, boot: float, environment: float, usd: float) -> None:
        self.note(f"start    boot {span(boot)}, environment {span(environment)}: {usd:.2f} USD before your first line")

    def wrote(self, rank: int, stream: int, data: bytes) -> None:
        """Show output of the program, as it is."""
        with self._lock:
            out = sys.stdout if stream == 1 else sys.stderr
            out.buffer.write(data)
            out.buffer.flush()

    def saved(self, folder: str, files: int) -> None:
        self.note(f"saved    {files} files to {folder}")

    def ends(self, status: int, usd: float, seconds: float) -> None:
        self.note(f"end      status {status} after {span(seconds)}, {usd:.2f} USD")

    def hear(self, event: events.Event) -> None:
        if isinstance(event, events.Notice):
            self.note(event.text)

    def note(self, text: str) -> None:
        with self._lock:
            output.note(text)


class _Json(_Lines):
    """Tells a program what happens: one JSON object a line, on stdout."""

    def _tell(self, event: str, **fields: object) -> None:
        with self._lock:
            sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
            sys.stdout.flush()

    def project(self, target: Target, survey: Survey) -> None:
        project = target.project
        self._tell(
            "project", root=str(project.root), source=project.source, python=project.python, files=survey.files,
            bytes=survey.bytes, not_sent=dict(survey.unsent), words=target.words, folder=target.folder,
        )  # fmt: skip

    def rents(self, best: Offer, nodes: int, budget: float | None, lifetime: str | None) -> None:
        self._tell(
            "plan", provider=best.provider, type=best.instance_type, region=best.region, zone=best.zone, nodes=nodes,
            usd_per_hour=best.usd_per_hour * nodes, budget=budget, max_lifetime=lifetime,
        )  # fmt: skip

    def starts(self, boot: float, environment: float, usd: float) -> None:
        self._tell("start", boot_seconds=round(boot, 3), environment_seconds=round(environment, 3), usd=usd)

    def wrote(self, rank: int, stream: int, data: bytes) -> None:
        name = "stdout" if stream == 1 else "stderr"
        self._tell("output", rank=rank, stream=name, text=data.decode("utf-8", "backslashreplace"))

    def saved(self, folder: str, files: int) -> None:
        self._tell("saved", folder=folder, files=files)

    def ends(self, status: int, usd: float, seconds: float) -> None:
        self._tell("end", status=status, usd=usd, seconds=round(seconds, 3))

    def note(self, text: str) -> None:
        self._tell("note", text=text)


def _check_size(survey: Survey, yes: bool) -> None:
    """Ask whether a large project is to be sent. Raises UsageError without a terminal."""
    if yes or (survey.bytes <= _MOST_BYTES and survey.files <= _MOST_FILES):
        return
    largest = ", ".join(f"{each or '.'} ({decimal(size)})" for each, size in survey.largest)
    text = f"the project has {survey.files:,} files, {decimal(survey.bytes)}; the largest folders: {largest}"
    if not sys.stdin.isatty():
        raise UsageError(f"{text}; leave out what is not needed in .skypoolignore, or pass --yes")
    output.note(text)
    if not typer.confirm("Send all of it?"):
        raise typer.Exit(_FAILED)


def _check_limit(best: Offer, nodes: int, budget: float | None, lifetime: str | None, yes: bool) -> None:
    """Ask whether to rent without a limit. Raises UsageError without a terminal."""
    if yes or not best.usd_per_hour or budget is not None or lifetime is not None:
        return
    price = f"{best.usd_per_hour * nodes:g} USD an hour"
    if not sys.stdin.isatty():
        raise UsageError(f"this costs {price} until the program ends; set a limit, as by --budget {10 * nodes}")
    if not typer.confirm(f"Rent for {price} until the program ends?"):
        raise typer.Exit(_FAILED)


def _variables(said: Sequence[str]) -> Mapping[str, str]:
    found = {}
    for each in said:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise UsageError(f"--env takes NAME=VALUE, not {each!r}")
        found[name] = value
    return found


def _plain(name: str) -> str:
    return "".join(each if each.isalnum() and each.isascii() else "-" for each in name.lower())[:24].strip("-") or "run"
