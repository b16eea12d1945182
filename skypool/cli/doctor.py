"""`skypool doctor`: checks this machine, and the providers that are set up on it. Nothing is rented."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Annotated

import typer

from skypool.buckets.bucket import Bucket
from skypool.buckets.bucket_check import check_as_machine
from skypool.cli import output
from skypool.drivers import registry
from skypool.drivers.contract import Policed
from skypool.errors import UsageError
from skypool.model import Finding
from skypool.proof import free_checks

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
    bucket: Annotated[
        str | None,
        typer.Option(
            "--bucket",
            metavar="URL",
            help="Check only this bucket: s3://NAME/PREFIX, gs://NAME/PREFIX or file:///FOLDER.",
        ),
    ] = None,
    endpoint: Annotated[
        str,
        typer.Option("--endpoint", metavar="URL", help="The server of the bucket, if it is another."),
    ] = "",
    region: Annotated[
        str,
        typer.Option("--region", help="The region of the bucket. Default: it is looked up."),
    ] = "",
    keys: Annotated[
        str,
        typer.Option(
            "--keys",
            metavar="ID,SECRET",
            help="Names of variables: of the access key, of its secret, and of a session token if there is one.",
        ),
    ] = "",
    role: Annotated[
        str,
        typer.Option("--role", metavar="ARN", help="Check the bucket with temporary credentials by this role."),
    ] = "",
    as_json: output.AsJson = False,
) -> None:
    """Check this machine, and the credentials, permissions and quotas at the providers; or a bucket.

    The exit status is 1 if this machine lacks something, or if what is named does not work.
    """
    if policy:
        _print_policy(policy)
        return
    if bucket is not None:
        if provider:
            raise UsageError("--bucket checks a bucket alone; leave --provider out")
        _check_bucket(Bucket(bucket, endpoint, region, keys.split(",") if keys else (), role), as_json)
        return
    if endpoint or region or keys or role:
        raise UsageError("--endpoint, --region, --keys and --role are about a bucket; name it with --bucket URL")
    drivers, left_out = registry.ready(provider or ())
    for name in provider or ():
        if isinstance(e := left_out.get(name), UsageError) and name not in registry.providers():
            raise e
    told = {"this machine": list(free_checks.of_this_computer(output.warn))}
    with ThreadPoolExecutor() as threads:
        readings = threads.map(free_checks.read, drivers)
        told |= {each.name: list(reading.findings) for each, reading in zip(drivers, readings, strict=True)}
    told |= {name: [Finding(_NOT_SET_UP, name not in (provider or ()), _said(e))] for name, e in left_out.items()}
    bad = [name for name, several in told.items() if not all(each.good for each in several)]
    if as_json:
        output.data({name: [_data(each) for each in several] for name, several in told.items()})
    else:
        _show(told)
    if any(name == "this machine" or name in (provider or ()) for name in bad):
        raise typer.Exit(1)


_NOT_SET_UP = "not set up"


def _check_bucket(bucket: Bucket, as_json: bool) -> None:
    found: list[Finding] = []
    for each in check_as_machine(bucket):
        if not as_json:
            if not found:
                output.say(str(bucket))
            _show_finding(each)
        found.append(each)
    if as_json:
        output.data({str(bucket): [_data(each) for each in found]})
    if not all(each.good for each in found):
        raise typer.Exit(1)


def _print_policy(name: str) -> None:
    driver = registry.driver(name)
    if not isinstance(driver, Policed):
        raise UsageError(
            f"cannot print a policy for provider {name!r}: its driver does not list the permissions it needs; "
            "look for them in the driver's documentation"
        )
    sys.stdout.write(driver.policy().rstrip("\n") + "\n")


def _show(told: dict[str, list[Finding]]) -> None:
    for name, several in told.items():
        output.say(name)
        for each in several:
            _show_finding(each)


def _show_finding(each: Finding) -> None:
    verdict = "BAD" if not each.good else "–" if each.open or each.what == _NOT_SET_UP else "ok"
    output.say(f"  {verdict:<4} {each.what}: {each.text}")
    if each.advice:
        output.say(f"       what to do: {each.advice}")


def _data(finding: Finding) -> dict[str, object]:
    return asdict(finding)


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
