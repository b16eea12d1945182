"""The command `skypool ps`: running machines and their cost.

It reads the ledger on this machine, and asks the owners of pools that run here. For runs that belong to their machine,
it asks the provider where that is, and the machine how the run stands. It asks no other provider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import typer

from skypool import clock
from skypool.cli import output
from skypool.cli.run_end import end_data
from skypool.errors import SkypoolError
from skypool.observers import client
from skypool.rental.gc import GRACE
from skypool.rental.ledger import Ledger
from skypool.rental.receipt import Line, amount
from skypool.rental.records import Record
from skypool.rental.run_state import RunState, state_of
from skypool.runs.asking import ask_machines
from skypool.runs.ends_here import note_ends


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool ps` to the program."""
    app.command("ps")(ps)


def ps(as_json: output.AsJson = False) -> None:
    """List running pools, and pools that may have left machines behind: nodes, age, cost so far, budget.

    Runs that belong to their machine are listed with their state, the latest end and the most they may cost. Each
    machine is asked, for 8 s at most. Runs that have ended stay in the list for a day.

    The nodes of pools that run on this computer are listed with their state, hardware and calls.
    """
    ledger = Ledger.here(output.warn)
    note_ends(ledger)
    unheard = ask_machines(ledger, ledger.open_pools())
    now, known = clock.now(), ledger.pools()
    there = [each for each in known if _is_fresh(each, now) or (each.state(now) != "ended" and not is_over(each, now))]
    seen = _seen([each for each in there if each.state(now) in ("live", "ending")])
    if as_json:
        output.data([{**_pool_data(each, now, unheard), **_seen_data(seen.get(each.session))} for each in there])
    elif there:
        runs = [(each, state) for each in there if (state := state_of(each, now)) is not None]
        pools = [each for each in there if each.run is None]
        if pools:
            output.table(_POOL, [_pool_row(each, now) for each in pools], numbers=_POOL[3:9])
        if pools and runs:
            output.say("")
        if runs:
            output.table(_RUN, [_run_row(each, state, now) for each, state in runs], numbers=_RUN[2:6])
        rows = [_node_row(each.pool, node) for each in there for node in _nodes(seen.get(each.session))]
        if rows:
            output.say("")
            output.table(_NODE, rows, numbers=_NODE[6:8])
        for each, state in runs:
            output.say(f"{each.pool}: {state.word} since {_minute(state.since)}: {state.why}")
            if each.session in unheard:
                output.say(f"{each.pool}: {unheard[each.session]}")
        for each in there:
            for problem in explanations(each, now):
                output.say(f"{each.pool}: {problem}")
            if isinstance(silent := seen.get(each.session), client.NoOwner) and silent.exists:
                output.say(f"{each.pool}: {silent}")
    else:
        output.say("no pool of this computer is running; `skypool gc` asks the providers for machines of other pools")


def _is_fresh(record: Record, now: float) -> bool:
    """Return True if a pool's run was handed over to its machine, and goes on or has ended less than a day ago."""
    return record.run is not None and now - (record.ended or min(now, record.run.latest)) < _A_DAY


def is_over(record: Record, now: float) -> bool:
    """Return True if a pool costs nothing, its client has left it, and its lease ended more than a minute before `now`.

    The nodes of such a pool have ended themselves. A pool is not over while a provider has not answered a request to
    rent machines for it. `now` is in seconds since 1970.
    """
    is_free = not record.intents and not any(each.usd_per_hour for each in record.lines)
    return is_free and record.state(now) == "left" and now > record.lasts + GRACE


_A_DAY = 86400.0
_ASKING = 2.0
"""Seconds in which the owner of a pool must answer."""
_Seen = dict[str, Any] | SkypoolError
"""The answer of a pool's owner, or the error if it did not answer."""


def _seen(records: Sequence[Record]) -> dict[str, _Seen]:
    """Ask the owners of these pools for the pools' state, all at the same time. Return their answers by session."""

    def ask(record: Record) -> _Seen:
        try:
            said = client.info(record.pool, _ASKING)
        except SkypoolError as e:
            return e
        if said.get("session") != record.session:
            return client.NoOwner(f"another run of pool {record.pool!r} answered")
        return said

    if not records:
        return {}
    with ThreadPoolExecutor(min(16, len(records))) as threads:
        return dict(zip([each.session for each in records], threads.map(ask, records), strict=True))


def _seen_data(seen: _Seen | None) -> dict[str, object]:
    """Return two fields for `skypool ps --json`: "answers" (True if the pool's owner has answered) and "nodes"."""
    return {"answers": isinstance(seen, dict), "nodes": list(_nodes(seen))}


def _nodes(seen: _Seen | None) -> Sequence[Mapping[str, Any]]:
    """Return the nodes that have not ended, as the owner described them; () if the owner did not answer."""
    if not isinstance(seen, dict):
        return ()
    return [each for each in seen["nodes"] if each["state"] != "ended"]


def _node_row(pool: str, node: Mapping[str, Any]) -> list[str]:
    machine = " ".join(each for each in (node["type"], node["place"]) if each)
    running = ", ".join(dict.fromkeys(node["running"]))
    figures = [str(node["calls"]), str(node["waiting"])]
    return [pool, str(node["node"]), node["state"], machine, node["hardware"], node["address"], *figures, running]


_NODE = ["pool", "node", "state", "machine", "hardware", "address", "running", "waiting", "functions"]
_POOL = ["pool", "state", "client", "nodes", "age", "USD/h", "USD", "idle USD", "of budget", "providers"]


_RUN = ["run", "state", "age", "USD/h", "USD", "at most USD", "ends by", "providers"]


def _run_row(record: Record, state: RunState, now: float) -> list[str]:
    assert record.run is not None
    receipt = record.receipt(now)
    age = str(timedelta(seconds=round((record.ended or now) - record.started)))
    costs = [f"{receipt.usd_per_hour:.4f}", f"{receipt.usd:.4f}", f"{_worst(record):.4f}"]
    ends = _minute(record.run.latest) if record.running else ""
    return [record.pool, state.word, age, *costs, ends, " ".join(_providers(record))]


def _worst(record: Record) -> float:
    """Return the most that a run may cost in all, in USD: what it has cost, if its machine has ended."""
    assert record.run is not None
    return record.run.worst_usd if record.running else sum(each.usd for each in record.lines)


def _minute(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _pool_row(record: Record, now: float) -> list[str]:
    receipt = record.receipt(now)
    budget = "" if record.budget is None else f"{receipt.usd / record.budget.max_usd:.0%} of {record.budget.max_usd:g}"
    age = str(timedelta(seconds=round(now - record.started)))
    costs = [f"{receipt.usd_per_hour:.4f}", f"{receipt.usd:.4f}", amount(receipt.idle_usd)]
    figures = [str(len(record.running)), age, *costs, budget]
    client = f"{record.client.pid} on {record.client.host}"
    return [record.pool, record.state(now), client, *figures, " ".join(_providers(record))]


def explanations(record: Record, now: float) -> list[str]:
    """Return a line for each problem of a pool; [] if it has none. `now` is in seconds since 1970.

    A problem is a client that is gone, an end that is not confirmed, a request to rent machines that a provider has not
    answered, or an error that ended the pool.
    """
    said: list[str] = []
    if record.state(now) == "left" and record.run is None:
        ways = f"`skypool down {record.pool}` ends them and checks that"
        if record.ended is not None:
            said.append(f"the pool has ended, but perhaps not all of its machines; {ways}")
        elif record.is_staying and now < record.lasts:
            until = datetime.fromtimestamp(record.lasts, UTC).strftime("%H:%M UTC")
            said.append(
                f"its run or `with` block has ended, and its machines stay until {until} (linger). Until then, "
                f"ComputePool.attach({record.pool!r}), or the next such `skypool run --linger`, uses them; {ways}"
            )
        elif now < record.lasts:
            until = datetime.fromtimestamp(record.lasts, UTC).strftime("%H:%M UTC")
            said.append(
                f"the process that ran this pool is gone; the pool's lease runs until {until}. Until then, "
                f"ComputePool.attach({record.pool!r}) takes the machines over; {ways}"
            )
        else:
            said.append(
                f"the process that ran this pool is gone and the pool's lease is over, but machines may be left; {ways}"
            )
    said += [
        f"order {intent.token} at {intent.provider} got no answer; its machine may be running, and is ended with the "
        "pool"
        for intent in record.intents
    ]
    return [*said, record.error] if record.error else said


def _providers(record: Record) -> list[str]:
    return sorted({*(each.provider for each in record.lines), *(note["provider"] for note in record.notes)})


def _pool_data(record: Record, now: float, unheard: Mapping[str, str]) -> dict[str, object]:
    receipt = record.receipt(now)
    return {
        "pool": record.pool,
        "session": record.session,
        "state": record.state(now),
        "client": {"host": record.client.host, "pid": record.client.pid},
        "started": output.utc(record.started),
        "lease_until": output.utc(record.lasts),
        "age": round(now - record.started, 3),
        "usd_per_hour": receipt.usd_per_hour,
        "usd": receipt.usd,
        "idle_usd": receipt.idle_usd,
        "budget": record.budget and {"max_usd": record.budget.max_usd, "warn": record.budget.warn},
        "providers": _providers(record),
        "instances": [_instance_data(each) for each in record.running],
        "orders_without_answer": [
            {"token": each.token, "provider": each.provider, "type": each.type, "at": output.utc(each.at)}
            for each in record.intents
        ],
        "error": record.error,
        **_run_data(record, now, unheard.get(record.session, "")),
    }


def _run_data(record: Record, now: float, unheard: str) -> dict[str, object]:
    """Return the field "run" for a pool whose run was handed over to its machine; {} for others."""
    run, state = record.run, state_of(record, now)
    if run is None or state is None:
        return {}
    return {
        "run": {
            "name": run.claim.run,
            "generation": run.claim.generation,
            "state": state.word,
            "since": output.utc(state.since),
            "why": state.why,
            "seen": None if run.seen is None else output.utc(run.seen),
            "unheard": unheard,
            "unsaved": "" if run.end is None else run.end.unsaved,
            **end_data(run.end),
            "ends": output.utc(run.ends),
            "ends_by": output.utc(run.latest),
            "usd": record.receipt(now).usd,
            "worst_usd": _worst(record),
            "estimated": is_estimated(record),
        }
    }


def is_estimated(record: Record) -> bool:
    """Return True if a pool's run was handed over to its machine, whose end is not proved, so its cost may be less."""
    return record.run is not None and bool(record.running)


def _instance_data(line: Line) -> dict[str, object]:
    return {
        "provider": line.provider,
        "id": line.id,
        "node": line.node,
        "type": line.type,
        "place": line.place,
        "market": line.market,
        "launched": output.utc(line.launched),
        "usd_per_hour": line.usd_per_hour,
        "usd": line.usd,
        "idle_usd": line.idle_usd,
    }
