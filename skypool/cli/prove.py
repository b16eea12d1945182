"""`skypool prove`: a guided proof that skypool works on the user's own account, in three levels."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from skypool.buckets.bucket import Bucket
from skypool.checks import number, one_of, seconds
from skypool.cli import output
from skypool.drivers import registry
from skypool.drivers.contract import Driver, ends_itself
from skypool.errors import UsageError
from skypool.proof import recording
from skypool.proof.proof import Proof
from skypool.proof.renting import WORDS, Wish
from skypool.proof.report import LEVELS, Level, Report, Step, from_json
from skypool.proof.selection import Selection

_COSTS: dict[Level, str] = {
    "read": "level read: asks {0} for credentials, permissions, quotas, images and prices. It costs nothing.",
    "write": "level write: sends {0} creates that it must refuse. It costs nothing.",
    "cents": "level cents: rents machines at {0}, one after the other, and ends them:",
}
"""What each level does and costs. It is printed before the level starts."""
_SIGNS = {"good": "ok", "bad": "BAD", "open": "–"}


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool prove` to the program."""
    app.command("prove")(prove)


def prove(
    provider: Annotated[str, typer.Argument(help="Name of the provider.")],
    level: Annotated[str, typer.Option(help="read, write or cents. A level includes those before it.")] = "read",
    max_usd: Annotated[float, typer.Option(help="Maximum USD of all machines of level cents together.")] = 1.0,
    accelerator: Annotated[
        str | None, typer.Option(help="Accelerator of the machines. Default: the cheapest machine of all.")
    ] = None,
    region: Annotated[
        list[str] | None, typer.Option(help="Only this region (repeatable). 'eu-*': all that begin with eu-.")
    ] = None,
    lease: Annotated[
        str, typer.Option(help="Time after which the machine whose client is killed must end itself.")
    ] = "2m",
    bucket: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Check this bucket, too, from level write on: list, write, read and delete."),
    ] = None,
    bucket_endpoint: Annotated[str, typer.Option(metavar="URL", help="The server of the bucket.")] = "",
    bucket_region: Annotated[str, typer.Option(help="The region of the bucket. Default: it is looked up.")] = "",
    bucket_keys: Annotated[
        str, typer.Option(metavar="ID,SECRET", help="Names of the variables with the keys of the bucket.")
    ] = "",
    bucket_role: Annotated[
        str, typer.Option(metavar="ARN", help="Check the bucket with temporary credentials by this role.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Rent the machines without asking.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.md", help="Write the report here, and as JSON beside it. Level cents always writes one."
        ),
    ] = None,
    bill: Annotated[
        Path | None,
        typer.Option(metavar="REPORT.json", help="Compare the bill of an earlier report, and do nothing else."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Record all requests and replies in this folder, without secrets."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Prove that skypool works with your account: by reading, by creates that must be refused, and for a few cents.

    Each level prints what it does and costs before it starts. The exit status is 0 if all is good.
    """
    asked = one_of("level", level, LEVELS)
    number("max_usd", max_usd, "what all machines may cost", above=0)
    if bill is not None:
        without: dict[str, object] = {
            "--bucket": bucket,
            "--bucket-endpoint": bucket_endpoint,
            "--bucket-region": bucket_region,
        }
        without |= {"--bucket-keys": bucket_keys, "--bucket-role": bucket_role, "--report": report, "--record": record}
        if unused := [name for name, value in without.items() if value]:
            raise UsageError(f"--bill only compares the bill of an earlier report, so leave out {', '.join(unused)}")
    place = _bucket(bucket, bucket_endpoint, bucket_region, bucket_keys, bucket_role)
    if place is not None and asked == "read":
        raise UsageError("--bucket writes an object, which level read does not: pass --level write, too")
    driver = registry.driver(provider)
    if bill is not None:
        _compare(Proof(driver, "cents", max_usd, tell=_tell(as_json)), bill, as_json)
        return
    proof = Proof(
        driver,
        asked,
        max_usd,
        Wish(accelerator, tuple(region or ()), console="off" if as_json else "plain"),
        place,
        seconds("lease", lease),
        tell=_tell(as_json),
        warn=output.warn,
    )
    file = report or (
        Path(f"skypool-prove-{provider}-{datetime.now(UTC):%Y%m%d-%H%M%S}.md") if asked == "cents" else None
    )
    if file is not None:
        proof.keep = lambda made: _write(made, file)
    say = _silent if as_json else output.say
    about = {"provider": provider, "level": level, "settings": _settings(driver)}
    with contextlib.nullcontext() if record is None else recording.to(record, about=about):
        if _levels(proof, yes, say):
            proof.end()
    if record is not None:
        say(f"recording: {record}")
    if as_json:
        output.data(proof.redacted.to_json())
    if file is not None:
        say(f"report: {file} and {file.with_suffix('.json')}")
    bad = sum(each.result == "bad" for each in proof.report.steps)
    say("all is good" if proof.report.good else f"not all is good: {bad} {'step' if bad == 1 else 'steps'} failed")
    if not proof.report.good:
        raise typer.Exit(1)


def _bucket(url: str | None, endpoint: str, region: str, keys: str, role: str) -> Bucket | None:
    """Return the bucket to check; None for none."""
    if url is not None:
        return Bucket(url, endpoint, region, keys.split(",") if keys else (), role)
    if endpoint or region or keys or role:
        raise UsageError("--bucket-endpoint and the like are about a bucket; name it with --bucket URL")
    return None


def _settings(driver: Driver) -> dict[str, object]:
    """Return the settings of a driver, without those that are secret."""
    if not dataclasses.is_dataclass(driver):
        return {}
    return {each.name: getattr(driver, each.name) for each in dataclasses.fields(driver) if each.repr and each.init}


def _levels(proof: Proof, yes: bool, say: Callable[[str], None]) -> bool:
    """Perform the levels asked for. Return False if the credentials are not accepted, or nothing can be rented."""
    for level in LEVELS[: LEVELS.index(proof.level) + 1]:
        say(_COSTS[level].format(proof.driver.name))
        if level == "read" and not proof.read():
            return False
        if level == "write":
            if proof.bucket is not None:
                say(f"             writes an object of 32 bytes to {proof.bucket}, and removes it.")
            proof.write()
        if level == "cents":
            selection = proof.select()
            if selection is None:
                return False
            for line in _plan(proof, selection):
                say(line)
            _confirm(yes)
            proof.rent(selection)
    return True


def _plan(proof: Proof, selection: Selection) -> list[str]:
    lines = []
    for number_, each in enumerate(selection.stages, 1):
        offer = each.offer
        place = f" in {offer.zone or offer.region}" if offer.zone or offer.region else ""
        lines.append(
            f"  {number_}. {WORDS[each.name]}: {offer.instance_type}{place}, {offer.market}, "
            f"{offer.usd_per_hour:.4f} USD/h"
        )
    lines += [f"  left out: {each}" for each in selection.left_out]
    minutes = f"{proof.wish.lifetime / 60:g} minutes"
    if ends_itself(proof.driver, selection.stages[0].offer):
        most = f"at most {selection.most_usd:.2f} USD: each machine ends itself after {minutes}"
    else:
        most = (
            f"{selection.most_usd:.2f} USD if each takes {minutes}; machines of {proof.driver.name} cannot end their "
            "own cost: if this computer fails, `skypool gc --yes` ends them"
        )
    return [*lines, f"  It costs about {selection.usual_usd:.4f} USD, and {most}."]


def _confirm(yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("stdin is not a terminal, so nobody can agree to the costs: pass --yes to rent the machines")
    if not typer.confirm("Rent these machines?"):
        raise typer.Exit(1)


def _compare(proof: Proof, file: Path, as_json: bool) -> None:
    """Compare the bill for an earlier report's machines with their receipts, and add the result to the report file."""
    try:
        earlier = from_json(file.read_text("utf-8"))
    except OSError as e:
        raise UsageError(f"the report {file} cannot be read: {e.strerror}; pass the .json file of a report") from e
    if earlier.provider != proof.driver.name:
        raise UsageError(f"the report {file} is of {earlier.provider}, not of {proof.driver.name}; name that provider")
    if not earlier.machines:
        raise UsageError(f"the report {file} has no machines, so there is no bill to compare; use one of level cents")
    kept = tuple(each for each in earlier.steps if each.level != "bill")
    proof.report = dataclasses.replace(earlier, steps=kept)
    proof.bill()
    _write(proof.redacted, file.with_suffix(".md"))
    if as_json:
        output.data(proof.redacted.to_json())
    if proof.report.steps[-1].result != "good":
        raise typer.Exit(1)


def _tell(as_json: bool) -> Callable[[Step], None]:
    """Return a function that prints a step, and what to do after a failure. With --json, it prints nothing."""

    def tell(step: Step) -> None:
        output.say(f"  {_SIGNS[step.result]:<4} {step.what}: {step.text}")
        if step.advice:
            output.say(f"       what to do: {step.advice}")

    return (lambda step: None) if as_json else tell


def _silent(text: str) -> None:
    """Print nothing: with --json, stdout has only the report."""


def _write(report: Report, file: Path) -> None:
    """Write a report as Markdown to `file`, and as JSON beside it. Each file is replaced as a whole."""
    for path, text in (
        (file, report.to_markdown()),
        (file.with_suffix(".json"), json.dumps(report.to_json(), indent=2) + "\n"),
    ):
        try:
            new = path.with_name(f".{path.name}.{os.getpid()}")
            new.write_text(text, "utf-8", "backslashreplace")
            new.replace(path)
        except OSError as e:
            raise UsageError(f"the report {path} cannot be written: {e.strerror}; name another file by --report") from e
