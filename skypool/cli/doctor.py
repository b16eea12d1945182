"""`skypool doctor`: checks this machine, and the providers that are set up on it. Nothing is rented."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from skypool.cli import output
from skypool.drivers import registry
from skypool.drivers.contract import Checks, Driver, Policed
from skypool.errors import LedgerError, UsageError
from skypool.model import Finding
from skypool.rental.ledger import Ledger

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Providers = Annotated[
    list[str] | None, typer.Option("--provider", "-p", help="Check only this provider (repeatable). Default: all.")
]


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool doctor` to the program."""
    app.command("doctor")(doctor)


def doctor(
    provider: Providers = None,
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME", help="Print the minimal permissions for this provider.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check this machine, and the credentials, permissions and quotas at the providers.

    The exit status is 1 if this machine lacks something, or if a provider named with --provider does not work.
    """
    if policy:
        _print_policy(policy)
        return
    drivers, left_out = registry.ready(provider or ())
    for name in provider or ():
        if isinstance(e := left_out.get(name), UsageError) and name not in registry.providers():
            raise e
    told: dict[str, list[Finding]] = {"this machine": list(_here())}
    with ThreadPoolExecutor() as threads:
        told |= zip([each.name for each in drivers], threads.map(_at, drivers), strict=True)
    told |= {name: [Finding(_NOT_SET_UP, name not in (provider or ()), _said(e))] for name, e in left_out.items()}
    bad = [name for name, findings in told.items() if not all(each.good for each in findings)]
    if as_json:
        output.data({name: [_data(each) for each in findings] for name, findings in told.items()})
    else:
        _show(told)
    if any(name == "this machine" or name in (provider or ()) for name in bad):
        raise typer.Exit(1)


_NOT_SET_UP = "not set up"


def _print_policy(name: str) -> None:
    driver = registry.driver(name)
    if not isinstance(driver, Policed):
        raise UsageError(
            f"cannot print a policy for provider {name!r}: its driver does not list the permissions it needs; "
            "look for them in the driver's documentation"
        )
    sys.stdout.write(driver.policy().rstrip("\n") + "\n")


def _show(told: dict[str, list[Finding]]) -> None:
    for name, findings in told.items():
        output.say(name)
        alike: dict[str, list[str]] = {}
        for each in findings:
            if not each.good and each.advice in alike:
                alike[each.advice].append(each.what)
                continue
            if not each.good and each.advice:
                alike[each.advice] = []
            verdict = "BAD" if not each.good else "–" if each.what == _NOT_SET_UP else "ok"
            output.say(f"  {verdict:<4} {each.what}: {each.text}")
            if each.advice:
                output.say(f"       what to do: {each.advice}")
        for others in filter(None, alike.values()):
            output.say(f"  BAD  {len(others)} more with the same solution: {'; '.join(others)}")


def _data(finding: Finding) -> dict[str, object]:
    return {"what": finding.what, "good": finding.good, "text": finding.text, "advice": finding.advice}


# --- this machine --------------------------------------------------------------------------------------------


def _here() -> Iterable[Finding]:
    version = "{}.{}.{}".format(*sys.version_info)
    yield Finding("Python", True, f"{version}; nodes get {'{}.{}'.format(*sys.version_info)}")
    yield Finding("skypool", True, f"{metadata.version('skypool')} in {Path(__file__).parent.parent}")
    for program in ("ssh", "ssh-keygen"):
        yield _program(program)
    yield _ledger()
    yield _clock()


def _program(name: str) -> Finding:
    path = shutil.which(name)
    if path is None:
        return Finding(name, False, "not found", "install openssh-client")
    if name != "ssh":
        return Finding(name, True, path)
    said = subprocess.run([path, "-V"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return Finding(name, said.returncode == 0, f"{path}, {(said.stderr or said.stdout).strip()}")


def _ledger() -> Finding:
    ledger = Ledger.here(output.warn)
    try:
        ledger.check()
    except LedgerError as e:
        return Finding("ledger", False, str(e))
    return Finding("ledger", True, f"{ledger.file} can be written")


def _clock() -> Finding:
    """Check the wall clock of this machine, and return the result.

    The clock is wrong if it is more than a second behind a time that was recorded earlier. Such times are those in the
    ledger (the file that records pools), and the modification time of skypool's own code. A ledger that cannot be read
    is ignored here.
    """
    now, last = time.time(), Path(__file__).stat().st_mtime
    with contextlib.suppress(LedgerError):  # _ledger() reports it
        last = max([last, *(each.beat for each in Ledger.here(output.warn).pools())])
    text = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if now < last - 1:
        before = datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return Finding(
            "clock",
            False,
            f"{text} is before {before}, a time seen earlier",
            "set this computer's clock: the end of a lease is computed with it",
        )
    return Finding("clock", True, text)


# --- a provider ----------------------------------------------------------------------------------------------


def _at(driver: Driver) -> list[Finding]:
    try:
        if isinstance(driver, Checks):
            return list(driver.check())
        there = driver.instances()
    except Exception as e:  # noqa: BLE001 - any error is a finding to show
        return [Finding("answer", False, _said(e))]
    noun = "machine" if len(there) == 1 else "machines"
    return [Finding("answer", True, f"{len(there)} {noun} of your pools")]


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
