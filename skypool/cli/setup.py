"""`skypool setup`: makes an identity of machines that reaches one prefix of a bucket, and nothing else."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from skypool.buckets.bucket import Bucket
from skypool.cli import output
from skypool.drivers import registry
from skypool.drivers.bucket_identity import Identifies
from skypool.errors import UsageError


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool setup` to the program."""
    app.command("setup")(setup)


def setup(
    provider: Annotated[str, typer.Argument(help="Name of the provider.")],
    bucket: Annotated[
        str,
        typer.Option(
            "--bucket", metavar="URL", help="The bucket and the prefix: s3://NAME/PREFIX or gs://NAME/PREFIX."
        ),
    ],
    region: Annotated[str, typer.Option("--region", help="The region of the bucket. Default: it is looked up.")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Make it without asking.")] = False,
) -> None:
    """Make an identity with which machines save to one prefix of a bucket, without keys that could be stolen.

    What would be made is printed first. To make it twice changes nothing.
    """
    place = Bucket(bucket, region=region)
    if place.scheme == "file":
        raise UsageError(f"an identity is for a bucket in a store, and {bucket} is a folder; it needs none")
    if region and place.scheme != "s3":
        raise UsageError(f"--region is for buckets with s3://, and this one is {bucket}; leave it out")
    if not place.prefix:
        raise UsageError(f"an identity is for a prefix, and {bucket} has none; write the bucket and a prefix")
    driver = registry.driver(provider)
    if not isinstance(driver, Identifies):
        raise UsageError(f"machines of {provider} get no identity from skypool; name keys that reach {bucket} alone")
    if driver.bucket_scheme != place.scheme:
        raise UsageError(
            f"an identity of {provider} reaches {driver.bucket_scheme}:// alone, and this bucket is {bucket}; name the "
            "provider of its cloud, or use no identity: your login makes temporary credentials"
        )
    identity = driver.bucket_identity(place)
    output.say(identity.plan)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("stdin is not a terminal, and nothing was made: pass --yes to make this")
        if not typer.confirm("Make this?"):
            raise typer.Exit(1)
    identity.make()
    output.say(f"made.\n{identity.use}\nto remove it:\n{identity.removal}")
