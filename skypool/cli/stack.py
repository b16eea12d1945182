"""`skypool stack`: print what the processes of a running pool are doing, as stacks of Python calls."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Annotated, Any

import typer

from skypool.cli import output
from skypool.cli.observe import Name, explained
from skypool.errors import SkypoolError
from skypool.observers import client

_PATIENCE = 60.0
"""Seconds in which a node must answer."""
_NATIVE = 300.0
"""Seconds in which a node must answer if py-spy may have to be installed there first."""
_AT_ONCE = 16
"""Nodes that are asked at the same time."""


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool stack` to the program."""
    app.command("stack")(stack)


def stack(
    pool: Name,
    node: Annotated[int | None, typer.Option("--node", "-n", min=0, help="Only this node.")] = None,
    native: Annotated[
        bool, typer.Option("--native", help="Also show frames of native code, such as NCCL, by py-spy.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each process.")] = False,
) -> None:
    """Print what the calls, gangs and services of a running pool are doing now, the innermost call first."""
    try:
        nodes = [each["node"] for each in client.info(pool)["nodes"] if each["state"] == "ready"]
    except client.NoOwner as e:
        raise explained(pool, e) from e
    if node is not None:
        nodes = [node]

    def ask(number: int) -> list[dict[str, Any]] | SkypoolError:
        try:
            return _asked(pool, number, native)
        except SkypoolError as e:
            return e

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        answers = list(threads.map(ask, nodes))
    failed = [each for each in answers if isinstance(each, SkypoolError)]
    for number, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, SkypoolError):
            output.complain(str(answer))
            continue
        for told in answer:
            if as_json:
                sys.stdout.write(json.dumps({"node": number, **told}) + "\n")
            else:
                sys.stdout.write("".join(f"{line}\n" for line in _lines(number, told)))
    if failed and len(failed) == len(nodes):
        raise failed[0]


def _asked(pool: str, node: int, native: bool) -> list[dict[str, Any]]:
    """Return what the processes of a node do, as its program `skypool.agent.stacks` says.

    Raises:
        SkypoolError: the pool does not have the node, or the node does not answer.
    """
    where = (files("skypool.cli") / "where_calls_run.sh").read_text("utf-8")
    program = (files("skypool") / "agent" / "stacks.py").read_bytes()
    kind = "native" if native else "python"
    script = f'{where}exec "$python" - "$keeper" "$folder" {kind}'
    argv = client.command(pool, node, script)
    patience = _NATIVE if native else _PATIENCE
    try:
        done = subprocess.run(argv, input=program, capture_output=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired as e:
        raise SkypoolError(
            f"node {node} of pool {pool!r} did not say within {patience:g} s what it does: see `skypool ps`"
        ) from e
    try:
        found = json.loads(done.stdout)
    except ValueError as e:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise SkypoolError(f"node {node} of pool {pool!r} cannot be asked what it does: {said[0]}") from e
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _lines(node: int, told: dict[str, Any]) -> list[str]:
    """Return the lines about a process."""
    name = str(told.get("name", "")).removeprefix("skypool-").replace("rank-", "rank ")
    is_own = str(told.get("name", "")).startswith("skypool-")
    what = name if is_own else str(told.get("command") or name)[:120]
    state = told.get("state", "")
    lines = [f"node {node}, {what}, process {told.get('pid')}" + ("" if state == "running" else f": {state}")]
    for number, frames in enumerate(told.get("stacks", ())):
        if number:
            lines.append("  in another thread:")
        lines += [f"  {frame}" for frame in frames]
    if told.get("native"):
        lines += ["  with native code, as py-spy says:", *(f"  {each}" for each in str(told["native"]).splitlines())]
    if told.get("problem"):
        lines.append(f"  {told['problem']}")
    return lines
