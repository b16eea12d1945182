"""The command `skypool run`: rent machines, run a program there with its project, and end them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand

from skypool.calls.options import MOST_PROCS
from skypool.checks import seconds
from skypool.cli.run_messages import Json, Lines
from skypool.drivers import registry
from skypool.drivers.contract import Driver
from skypool.errors import SkypoolError, UsageError
from skypool.runs.save_places import Place, named
from skypool.runs.target import Target
from skypool.runs.whole_run import FAILED, Asked, WholeRun
from skypool.wire.error_text import notes_of

_WRONG = cast("tuple[type[Exception], ...]", typer.BadParameter.__bases__)
"""The error of wrong options: click's UsageError. typer may have a click of its own."""
_OWN = frozenset({
    "--gpu", "--accelerator", "--provider", "--local", "--region", "--spot", "--with", "--secret", "--include",
    "--save", "--data", "--disk", "--on-notice", "--budget", "--best-effort", "--max-price", "--max-lifetime",
    "--linger", "--dry-run", "--detach", "--attached", "--keep", "--lossy", "--on-end",
})  # fmt: skip
"""Options of skypool that few programs have."""


class _Command(TyperCommand):
    """The command, which tells of wrong options as of all else that it refuses."""

    def make_context(self, info_name: str | None, args: list[str], *given: Any, **more: Any) -> Any:
        words = [*args]
        try:
            return super().make_context(info_name, args, *given, **more)
        except _WRONG as e:
            wrong: Any = e
            tell = Json() if "--json" in words else Lines()
            tell.error(f"{wrong.format_message().rstrip('.')}; `skypool run --help` lists the options")
            tell.close()
            raise typer.Exit(FAILED) from None


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool run` to the program."""
    settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    app.command("run", cls=_Command, context_settings=settings)(run)


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
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Run on this machine of yours, reached by ssh: gpu1, user@gpu2:2222 (repeatable)."),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Run on this machine, in a copy of the project.")] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    procs: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_PROCS, help="Processes on each node. Default: one, with all its devices."),
    ] = None,
    node: Annotated[
        int | None, typer.Option("--node", min=0, help="Run on this node only. Default: on all nodes.")
    ] = None,
    region: Annotated[list[str] | None, typer.Option("--region", help="Only this region (repeatable).")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Rent spot machines.")] = False,
    packages: Annotated[
        list[str] | None, typer.Option("--with", help="A package besides those of the project (repeatable).")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", help="A variable for the program: NAME=VALUE (repeatable).")
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            "--secret",
            help="The name of a variable whose value is taken from the environment, .env, or the login of hf or wandb, "
            "and is shown nowhere (repeatable).",
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", help="Send this file or folder of the project, too (repeatable)."),
    ] = None,
    save: Annotated[
        list[str] | None,
        typer.Option(
            "--save",
            metavar="FOLDER[=URL]",
            help="A folder that the program writes: it is kept in a bucket, as in out=s3://models/run (repeatable), or "
            "fetched to the same name here.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="PATH=URL",
            help="A folder that is filled from a bucket before the program starts, as in /data=s3://models/shards "
            "(repeatable).",
        ),
    ] = None,
    endpoint: Annotated[
        str, typer.Option("--bucket-endpoint", help="The server of the buckets, if it is not Amazon's.")
    ] = "",
    keys: Annotated[
        str, typer.Option("--bucket-keys", metavar="ID,SECRET", help="The variables with the keys of the buckets.")
    ] = "",
    bucket_region: Annotated[str, typer.Option("--bucket-region", help="The region of the buckets.")] = "",
    role: Annotated[
        str,
        typer.Option("--bucket-role", metavar="ARN", help="The role by which machines get credentials to save."),
    ] = "",
    identity: Annotated[
        bool, typer.Option("--bucket-identity", help="The machines have an identity that reaches the buckets to save.")
    ] = False,
    complete: Annotated[
        list[str] | None,
        typer.Option("--complete", help="What is written last into a checkpoint: 'step-*/done' (repeatable)."),
    ] = None,
    on_notice: Annotated[
        str,
        typer.Option(
            "--on-notice",
            help="The signal for the program when its machine is taken back soon: TERM, USR1 or none. Default: TERM if "
            "the program catches it.",
        ),
    ] = "",
    name: Annotated[str | None, typer.Option("--name", help="Name of the pool. Default: from the program's.")] = None,
    budget: Annotated[float | None, typer.Option("--budget", help="The most USD that this may cost.")] = None,
    best_effort: Annotated[
        bool,
        typer.Option("--best-effort", help="With --budget: also machines that run on if this process is killed."),
    ] = False,
    max_price: Annotated[float | None, typer.Option("--max-price", help="The most USD per hour of one node.")] = None,
    disk: Annotated[str | None, typer.Option("--disk", help="The least size of the disk of each node: 200GB.")] = None,
    max_lifetime: Annotated[
        str | None, typer.Option("--max-lifetime", help="The time after which everything ends: 4h, 30m.")
    ] = None,
    linger: Annotated[
        str | None,
        typer.Option(
            "--linger", help="How long the machines stay after the run, for the next one of the project: 30m."
        ),
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Rent machines though an earlier run has left some.")] = False,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", help="Return as soon as the run belongs to its machine: needs a budget or a lifetime."
        ),
    ] = False,
    attached: Annotated[
        bool,
        typer.Option(
            "--attached", help="End the run with this terminal, also if it has a limit and could go on without it."
        ),
    ] = False,
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep", help="How long the machine of a run that belongs to it stays after the run, with its output: 1h."
        ),
    ] = None,
    lossy: Annotated[
        bool,
        typer.Option("--lossy", help="With --detach --spot: the run may be lost, as nothing of it is in a bucket."),
    ] = False,
    on_end: Annotated[
        str,
        typer.Option(
            metavar="URL|NAME",
            help="Post how the run has ended to this webhook of Slack, Discord or yours. It is a secret: better name a "
            "variable that has it.",
        ),
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent and rented, and end.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Send a large project unasked.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Rent machines, run a program there with its project, show what it prints, and end the machines.

    The project is the folder above with a pyproject.toml, a .git or the like. Its files are sent, except secrets,
    caches and what git ignores. Options of skypool come before TARGET, and those of the program after it.

    The exit status is that of the program, 128 + n if signal n ended it, and 125 if skypool has failed.
    """
    tell = Json() if as_json else Lines()
    status, is_signalled = FAILED, False
    error: BaseException | None = None
    whole: WholeRun | None = None
    try:
        if attached and detach:
            raise UsageError("--attached and --detach exclude each other; leave one out")
        target = Target.of(words)
        place = Place(endpoint, bucket_region, tuple(filter(None, keys.split(","))), role, identity)
        folders, buckets = named(save or (), place)
        to_read = place._replace(role="", identity=False)  # which are for saving alone
        bare, sources = named(data or (), to_read, "--data")
        if bare:
            raise UsageError(f"--data takes a folder and its place, such as /data=s3://NAME/PREFIX, not {bare[0]!r}")
        rent: dict[str, Any] = {
            "provider": _provider(provider or (), host or (), local),
            "accelerator": accelerator or None,
            "market": "spot" if spot else "on-demand",
        }
        rent |= {"max_usd_per_hour": max_price} if max_price is not None else {}
        rent |= {"region": region} if region else {}
        rent |= {"disk": disk} if disk is not None else {}
        asked = Asked(
            rent, nodes, procs, packages or (), _variables(env or ()), secret or (), include or (),
            folders, name, budget, _duration("--max-lifetime", max_lifetime), yes,
            _duration("--linger", linger), new, node, best_effort, buckets, complete or (), place,
            sources, on_notice, detach, _duration("--keep", keep), on_end=on_end,
            watch=None if detach else not attached, lossy=lossy,
        )  # fmt: skip
        whole = WholeRun(target, asked, tell)
        _tell_options(words, tell)
        whole.check(dry_run)
        if not dry_run:
            status = whole.run()
        elif sys.stdin.isatty() or not whole.would_ask:
            status = 0
    except (SkypoolError, OSError) as e:
        status, error = FAILED, e
        tell.error("\n".join([str(e), *notes_of(e)]))
    except CancelledError:  # before its machines end as planned
        status = FAILED
    except KeyboardInterrupt as e:
        status, is_signalled, error = 130, not tell.has_signalled, e
    except SystemExit as e:  # SIGTERM or SIGHUP
        error = e
        status, is_signalled = e.code if isinstance(e.code, int) else FAILED, not tell.has_signalled
    finally:
        if whole is not None and whole.has_rented and not whole.goes_on:
            unread = tell.failure is not None and not is_signalled
            tell.ends(1 if unread else status, whole.spent, whole.seconds, whole.returncode, whole.limit)
            whole.post_end(error, tell.masked)
        try:
            tell.close()
        except KeyboardInterrupt:  # Ctrl-C in a pager reaches this process, too; a second one counts
            tell.close()
    if is_signalled and detach and whole is not None and whole.is_detached:
        status = 0  # the signal came too late to cancel the run
    if tell.failure is not None and not is_signalled:  # a closed terminal sends a signal, and shows nothing any more
        raise tell.failure
    raise typer.Exit(status)


def _provider(names: Sequence[str], hosts: Sequence[str], local: bool) -> Driver | Sequence[str] | str:
    """Return the `provider` argument of the pool."""
    given = {"--provider": bool(names) and (not hosts or [*names] != ["ssh"]), "--host": bool(hosts), "--local": local}
    several = [option for option, is_given in given.items() if is_given]
    if len(several) > 1:
        raise UsageError(f"{' and '.join(several)} exclude each other; leave one out")
    if hosts:
        return registry.driver("ssh", hosts=hosts)
    if "ssh" in names:
        raise UsageError(
            "--provider ssh does not say which machines; name them with --host, such as --host gpu1 --host user@gpu2:22"
        )
    return names or "local"


def _duration(option: str, said: str | None) -> float | None:
    if said is None:
        return None
    return float(said) if said.isdigit() and int(said) else seconds(option, said)


def _tell_options(words: Sequence[str], tell: Lines) -> None:
    """Tell of options behind the target that skypool has, too: they go to the program."""
    own = [each for each in words[1:] if each.partition("=")[0] in _OWN]
    if own:
        tell.note(f"{' '.join(own)} after {words[0]}: goes to the program; options of skypool come before it")


def _variables(said: Sequence[str]) -> Mapping[str, str]:
    found = {}
    for each in said:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise UsageError(f"--env takes NAME=VALUE, not {each!r}")
        found[name] = value
    return found
