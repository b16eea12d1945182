"""`skypool offers`: list what providers sell. `skypool plan`: show what a pool would rent. Neither rents anything."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from skypool.cli import output
from skypool.drivers import registry
from skypool.errors import NoOffers, UsageError
from skypool.model import Offer, PriceSource
from skypool.offers.plan import plan
from skypool.offers.ranking import Plan
from skypool.offers.sort_keys import ORDERS

Accelerators = Annotated[
    list[str] | None,
    typer.Argument(help="One or more, any of which will do: H100:8 A100-80GB:8. Default: any or none."),
]
Providers = Annotated[
    list[str] | None, typer.Option("--provider", "-p", help="Ask only this provider (repeatable). Default: all.")
]
Regions = Annotated[
    list[str] | None, typer.Option("--region", help="Only this region (repeatable). 'eu-*': all that begin with eu-.")
]
Market = Annotated[str | None, typer.Option(help="on-demand, spot, spot-if-available, or cheapest (of both).")]
Spot = Annotated[bool, typer.Option("--spot", help="The same as --market spot.")]
MaxPrice = Annotated[float | None, typer.Option("--max-price", help="Maximum USD per hour of one node or TPU slice.")]
Vcpus = Annotated[float | None, typer.Option(help="Minimum vCPUs of a node.")]
Memory = Annotated[str | None, typer.Option(help="Minimum main memory of a node: 64 (GiB), 64GiB, 64GB.")]
Disk = Annotated[str | None, typer.Option(help="Minimum disk of a node: 200 (GiB), 200GiB, 1TB.")]
Arch = Annotated[str | None, typer.Option(help="Processor: x86_64 or arm64.")]
OrderBy = Annotated[str, typer.Option("--order-by", help=f"Order of the offers: {', '.join(ORDERS)}.")]
Refresh = Annotated[bool, typer.Option("--refresh", help="Ask the providers even if cached offers are still valid.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands `skypool offers` and `skypool plan` to the program."""
    app.command("offers")(offers)
    app.command("plan")(plan_)


def offers(
    accelerators: Accelerators = None,
    provider: Providers = None,
    region: Regions = None,
    market: Market = None,
    spot: Spot = False,
    max_price: MaxPrice = None,
    vcpus: Vcpus = None,
    memory: Memory = None,
    disk: Disk = None,
    arch: Arch = None,
    order_by: OrderBy = "cheapest",
    limit: Annotated[int, typer.Option(min=0, help="Number of offers to show; 0 shows all.")] = 50,
    refresh: Refresh = False,
    as_json: output.AsJson = False,
) -> None:
    """List the machines that providers offer now, in the order that --order-by names.

    Without --market, both on-demand and spot offers are listed.
    """
    node = _node(market or "cheapest", spot, market, region, max_price, vcpus, memory, disk, arch)
    made, left_out = _planned(provider, accelerators, order_by=order_by, refresh=refresh, **node)
    if as_json:
        output.data(_data(made, left_out))
        return
    shown = made.offers[:limit] if limit else made.offers
    output.table(_HEADINGS, [_row(each) for each in shown], numbers=_HEADINGS[5:9])
    if len(shown) < len(made.offers):
        output.say(f"and {len(made.offers) - len(shown):,} more offers; --limit 0 shows all")
    _tell(made, left_out)


def plan_(
    accelerators: Accelerators = None,
    provider: Providers = None,
    nodes: Annotated[str, typer.Option(help="Number of nodes (or TPU slices), or a range: 4, 2-8.")] = "1",
    region: Regions = None,
    market: Market = None,
    spot: Spot = False,
    max_price: MaxPrice = None,
    vcpus: Vcpus = None,
    memory: Memory = None,
    disk: Disk = None,
    arch: Arch = None,
    order_by: OrderBy = "cheapest",
    refresh: Refresh = False,
    as_json: output.AsJson = False,
) -> None:
    """Show which machines a pool would rent, at which price, and why the other offers are rejected."""
    node = _node(market or "on-demand", spot, market, region, max_price, vcpus, memory, disk, arch)
    made, left_out = _planned(provider, accelerators, nodes=_nodes(nodes), order_by=order_by, refresh=refresh, **node)
    if as_json:
        output.data(_data(made, left_out))
        return
    output.say(made.explain())
    for name, error in left_out.items():
        output.say(f"!  {name}: {error}")


def _node(
    market: str,
    spot: bool,
    said: str | None,
    region: list[str] | None,
    max_price: float | None,
    vcpus: float | None,
    memory: str | None,
    disk: str | None,
    arch: str | None,
) -> dict[str, Any]:
    """Return the options of a command as arguments of `skypool.plan`, which checks them. `said` is that of --market."""
    if spot and said not in (None, "spot"):
        raise UsageError(f"--spot and --market {said} contradict each other; give only one of them")
    return {
        "market": "spot" if spot else market,
        "max_usd_per_hour": max_price,
        "region": region or None,
        "vcpus": vcpus,
        "memory": memory,
        "disk": disk,
        "arch": arch,
    }


def _nodes(text: str) -> int | tuple[int, int]:
    fewest, dash, most = text.partition("-")
    try:
        return (int(fewest), int(most)) if dash else int(fewest)
    except ValueError:
        raise UsageError(f"--nodes must be a number such as 4, or a range such as 2-8, not {text!r}") from None


def _planned(
    names: list[str] | None, accelerators: list[str] | None, **terms: Any
) -> tuple[Plan, dict[str, Exception]]:
    """Return a plan, and by name why a provider was not asked. Ask the providers `names`; without, all set-up ones."""
    drivers, left_out = registry.ready() if not names else ([registry.driver(name) for name in names], {})
    if not drivers:
        why = "; ".join(f"{name}: {error}" for name, error in left_out.items())
        raise UsageError(
            f"no provider is set up on this computer: {why or 'none is installed'}; `skypool doctor` checks "
            "each provider"
        )
    try:
        return plan(drivers, accelerator=accelerators or None, **terms), left_out
    except NoOffers as e:
        lines = [f"!  {name}: {error}" for name, error in left_out.items()]
        raise NoOffers("\n".join([str(e), *lines]), e.plan) from e


def _tell(made: Plan, left_out: dict[str, Exception]) -> None:
    for name, error in {**left_out, **made.failures}.items():
        output.say(f"not asked: {name}: {str(error) or type(error).__name__}")
    for note in made.notes:
        output.say(f"note: {note}")


_HEADINGS = (
    "provider", "instance type", "region", "market", "accelerator", "vCPUs", "GiB", "disk GiB", "USD/h", "in stock",
    "price as of",
)  # fmt: skip
_STOCK: dict[bool | None, Literal["yes", "no", ""]] = {True: "yes", False: "no", None: ""}


def _row(offer: Offer) -> list[str]:
    return [
        offer.provider,
        offer.instance_type,
        " ".join(filter(None, (offer.region, offer.zone))),
        offer.market,
        str(offer.accelerator or "") + (f" ({offer.hosts} hosts)" if offer.hosts > 1 else ""),
        *("" if each is None else f"{each:g}" for each in (offer.vcpus, offer.memory_gib, offer.disk_gib)),
        f"{offer.usd_per_hour:.4f}",
        _STOCK[offer.available],
        offer.price_source.day,
    ]


def _data(made: Plan, left_out: dict[str, Exception]) -> dict[str, object]:
    return {
        "nodes": list(made.nodes),
        "usd_per_hour": made.usd_per_hour,
        "offers": [
            {
                "provider": each.provider,
                "instance_type": each.instance_type,
                "region": each.region,
                "zone": each.zone,
                "market": each.market,
                "usd_per_hour": each.usd_per_hour,
                "price_source": _source(each.price_source),
                "on_demand_usd_per_hour": each.on_demand_usd_per_hour,
                "start_usd": each.start_usd,
                "start_note": each.start_note,
                "accelerator": None if each.accelerator is None else str(each.accelerator),
                "vcpus": each.vcpus,
                "memory_gib": each.memory_gib,
                "disk_gib": each.disk_gib,
                "arch": each.arch,
                "hosts": each.hosts,
                "available": each.available,
            }
            for each in made.offers
        ],
        "rejected": len(made.considered) - len(made.offers),
        "failures": {name: str(error) or type(error).__name__ for name, error in {**left_out, **made.failures}.items()},
        "notes": list(made.notes),
    }


def _source(source: PriceSource) -> dict[str, str | None]:
    day = None if source.as_of is None else source.as_of.isoformat()
    return {"kind": source.kind, "as_of": day, "origin": source.origin}
