"""Verda (DataCrunch before): virtual machines with GPUs in Finland and Iceland, on demand and spot.

API: https://api.verda.com/v1/docs (read 2026-11-21). Credentials: $VERDA_CLIENT_ID and $VERDA_CLIENT_SECRET.
A machine that is switched off is billed on, and no key of the account is put on one: only its client, or `skypool gc`,
ends its cost. Its disk outlives it unless it is named when it is deleted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, ClassVar, Literal

from skypool import asking, rented, tags, userdata
from skypool.driver import Abilities
from skypool.errors import NoAnswer, ProviderError, RateLimitError, UsageError
from skypool.keys import Keys
from skypool.model import Access, Finding, Instance, Leftover, Market, Need, Offer, Order
from skypool.regional import Regional, chosen
from skypool_verda import _api, _catalog
from skypool_verda._api import REFUSALS, Label, insist

_HERE = "Verda"  # it is asked as one region
_ORDERED, _LAG = 10.0, 6.0  # seconds in which a machine is found for an order, and in which a new one may be unseen
_ADDRESS, _TIDYING = 900.0, 60.0  # seconds for which it is asked
_NEW = ("new", "ordered")
_STATES = {**dict.fromkeys((*_NEW, "provisioning", "validating", "pending"), "starting"), "running": "running"}
_GONE = ("discontinued", "notfound", "no_capacity", "deleted")
_THINGS = {"ssh-key": "/ssh-keys", "script": "/scripts", "volume": "/volumes"}
_AGAIN = f"{tags.UNTIL}-2"


@dataclass(frozen=True)
class Verda(Regional):
    """Rent from Verda.

    Args:
        location: such as "FIN-01", or several; None is every one.
        image: what machines start from, such as "ubuntu-22.04-cuda-12.4-docker"; None is one that fits the machine.
            An Image's base= comes first.
        client_id, client_secret: of the account; None takes $VERDA_CLIENT_ID and $VERDA_CLIENT_SECRET.
    """

    location: str | Sequence[str] | None = None
    image: str | None = None
    client_id: str | None = field(default=None, repr=False)
    client_secret: str | None = field(default=None, repr=False)
    name: ClassVar[str] = "verda"
    abilities: ClassVar[Abilities] = Abilities(ends_itself=False, private_network=False, spot=True)
    ending: ClassVar[float] = 180.0  # it refuses to delete what it provisions

    def __post_init__(self) -> None:
        shapes = {"location": (r"[A-Z]{3}-\d\d", "'FIN-01'", True), "image": (r"[\w.-]+", "'ubuntu-24.04'", False)}
        asking.settle(self, shapes, {"location": ("FIN-01", "FIN-02", "FIN-03", "ICE-01")})

    def offers(self, need: Need) -> Iterable[Offer]:
        """Each type in each location that has it now, and once where none has."""
        if need.private_network:
            raise UsageError("machines at Verda do not reach each other: leave it out, or private_network=True")
        base = need.bases.get(self.name) or self.image or ""
        codes = [each["code"] for each in self._ask("/locations")]
        here = chosen(codes, self.location or (), need.regions)
        markets: list[Market] = [m for m in ("on-demand", "spot") if need.market not in {"on-demand", "spot"} - {m}]
        stock = {market: self._stock(market, here) for market in markets}
        disks = {each["type"]: float(each["price"]["price_per_month_per_gb"]) for each in self._ask("/volume-types")}
        for record in self._ask("/instance-types", params={"currency": "usd"}):
            yield from _catalog.offers(record, stock, need, disks[_catalog.DISK], base)

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """One create for each, in order of rank, as no token makes it idempotent: what is there already is not made."""
        made = {each.rank: each for each in self.instances(pool=order.pool) if each.token == order.token}
        error: ProviderError | None = None
        try:
            told = self._told(offer, order) if len(made) < order.count else {}
            for rank in (rank for rank in order.ranks if rank not in made):
                made[rank] = self._made(offer, order, rank, told)
        except (NoAnswer, RateLimitError):
            raise  # the same order comes again, and finds what there is
        except ProviderError as e:
            error = e
        refused = self._refused([made[rank] for rank in order.ranks if rank in made])
        kept = []
        for rank in order.ranks:
            if rank not in made or rank in refused:
                break
            kept.append(replace(made[rank], offer=offer))
        if len(kept) < len(made):
            self.terminate([each for each in made.values() if each.id not in {one.id for one in kept}])
        if kept:
            return kept
        self.tidy([each for each in self.leftovers(pool=order.pool) if each.detail["token"] == order.token])
        raise refused.get(order.ranks[0]) or error or NoAnswer("Verda has none of what it made", provider=self.name)

    def access(self, instance: Instance) -> Access:
        """ssh to its public address. Raises why Verda has none for it, if it is not to have one."""
        return rented.access(instance, self._address(instance), user="root", keying=300.0)

    def renew(self, pool: str, until: datetime) -> None:
        """Under another key each time, so that a tag always says until when. What has no tags lasts as long."""
        for instance in self.instances(pool=pool):
            said = sorted((text, key) for key, text in instance.detail["tags"].items() if key in (tags.UNTIL, _AGAIN))
            at = f"/instances/{instance.id}/tags"
            for _, key in said[:-1]:
                self._drop(f"{at}/{key}")
            free = _AGAIN if said and said[-1][1] == tags.UNTIL else tags.UNTIL
            insist(5.0, partial(self._api.ask, "POST", at, json={"key": free, "value": tags.stamp(until)}))
            if said:
                self._drop(f"{at}/{said[-1][1]}")

    def check(self) -> Iterable[Finding]:
        """What it needs, and what no machine there can do."""
        questions = {
            "ssh on this machine": asking.openssh,
            "credentials": lambda: (self._ask("/balance"), "they are good")[1],
            "funds": self._funds,
            "clock": lambda: asking.clock(self._api.date()),
            "locations": lambda: ", ".join(
                chosen([e["code"] for e in self._ask("/locations")], self.location or (), ())
            ),
            "the end of machines": lambda: (
                "one that is switched off is billed on: where a client was killed, run "
                "`skypool gc --yes` once its lease is over (on this machine or another, by cron say)"
            ),
        }
        return asking.findings(questions)

    # --- asking ----------------------------------------------------------------------------------------------

    @property
    def _api(self) -> _api.Api:
        return _api.account(self.client_id, self.client_secret)

    def _ask(self, path: str, **given: Any) -> Any:
        return self._api.ask("GET", path, **given)

    def _drop(self, path: str, **given: Any) -> None:
        insist(_TIDYING, partial(self._api.ask, "DELETE", path, **given))

    def _regions(self) -> Sequence[str]:
        return [_HERE]

    def _stock(self, market: Market, places: Sequence[str]) -> dict[str, list[str]]:
        got = self._ask("/instance-availability", params={"is_spot": "true" if market == "spot" else "false"})
        return {each["location_code"]: each["availabilities"] for each in got if each["location_code"] in places}

    def _funds(self) -> str:
        left = self._ask("/balance")
        if float(left["amount"]) <= 0:
            raise REFUSALS.error("to rent anything", "insufficient_funds", f"{left['amount']} {left['currency']} left")
        return f"{float(left['amount']):.2f} {left['currency']} left"

    # --- making ----------------------------------------------------------------------------------------------

    def _told(self, offer: Offer, order: Order) -> dict[str, Any]:
        """What all machines of an order are told; the key of its session and its script are made."""
        if not offer.detail["image"]:
            raise UsageError(f"Verda has no Ubuntu for {offer.instance_type}: say what it is to start from, image=")
        order = replace(order, keys=order.keys or Keys.of(order.pool))
        assert order.keys is not None
        key = Label(order.pool, tags.session(order), order.until, tags.owner())
        name = key._replace(token=order.token)
        return {
            "instance_type": offer.instance_type,
            "image": offer.detail["image"],
            "location_code": offer.region,
            "is_spot": offer.market == "spot",
            "contract": "SPOT" if offer.market == "spot" else "PAY_AS_YOU_GO",
            "pricing": "FIXED_PRICE",
            "ssh_key_ids": [self._thing("ssh-key", key, key=order.keys.public)],
            "startup_script_id": self._thing("script", name, script=userdata.boot_script(order)),
            "os_volume": {"name": str(name), "size": offer.detail["gb"], "on_spot_discontinue": "delete_permanently"},
        }

    def _thing(self, kind: str, name: Label, **told: str) -> str:
        """The id of a key or a script; it is made where it is not there."""
        for each in self._ask(_THINGS[kind]):
            found = _api.label(each["name"], name.pool)
            if found is not None and found.token == name.token:
                return str(each["id"])
        return self._api.made(_THINGS[kind], f"a {kind}", name=str(name), **told)

    def _made(self, offer: Offer, order: Order, rank: int, told: Mapping[str, Any]) -> Instance:
        """A machine. One whose reply was lost is looked for, as long as it may take until it is seen.

        Raises:
            NoAnswer: there may be one, and it was not seen. Any other: there is none.
        """
        said = {key: text[:127] for key, text in tags.tags(replace(order, ranks=(rank,))).items()}
        hostname = f"{order.pool}-{rank}"
        about = f"{offer.instance_type} in {offer.region}"
        try:
            id_ = self._api.made(
                "/instances",
                about,
                **told,
                hostname=hostname,
                description=f"node {rank} of skypool's pool {order.pool}",
                tags=tags.pairs(said, "key", "value"),
            )
        except NoAnswer as lost:
            found = self._seen(order, rank)
            if found is None:
                raise
            return found
        return tags.instance(self.name, id_, said, 0, "starting", {"region": _HERE, "status": _NEW[0], "tags": said})

    def _seen(self, order: Order, rank: int) -> Instance | None:
        def look() -> Instance:
            for each in self.instances(pool=order.pool):
                if (each.token, each.rank) == (order.token, rank):
                    return each
            raise ProviderError("it is not seen", provider=self.name, code="unseen")

        try:
            return asking.patiently(look, _LAG, "unseen")
        except ProviderError:
            return None

    def _refused(self, made: Sequence[Instance]) -> dict[int, ProviderError]:
        """For which of them no machine was found after all, as far as that is known soon; by rank."""
        from tenacity import Retrying, retry_if_result, stop_after_delay, wait_exponential

        def look() -> dict[int, str]:
            known = {each["id"]: each["status"] for each in self._ask("/instances")} if made else {}
            return {each.rank: known.get(each.id, _NEW[0]) for each in made}

        stop, wait = stop_after_delay(_ORDERED), wait_exponential(0.1, max=2)
        again = retry_if_result(lambda said: not {*_NEW}.isdisjoint(said.values()))
        said = Retrying(retry=again, stop=stop, wait=wait, retry_error_callback=lambda state: state.outcome.result())(
            look
        )
        return {each.rank: self._why(each, said[each.rank]) for each in made if said[each.rank] in _GONE}

    def _why(self, instance: Instance, status: str) -> ProviderError:
        return REFUSALS.error(f"to keep {instance.id}", status, f"its status is {status}")

    # --- what is there ---------------------------------------------------------------------------------------

    def _found(self, region: str, pool: str | None) -> Iterator[Instance]:
        """One that is switched off is billed, and ends."""
        for record in self._ask("/instances"):
            said = tags.read(record.get("tags") or (), "key", "value")
            if _api.ours(said, pool) and record["status"] not in _GONE:
                state: Any = _STATES.get(record["status"], "ending")
                untils = sorted(said[key] for key in (tags.UNTIL, _AGAIN) if key in said)
                detail = {"region": _HERE, "status": record["status"], "tags": said}
                yield tags.instance(
                    self.name, record["id"], {**said, tags.UNTIL: (untils or [""])[-1]}, 0, state, detail
                )

    def _record(self, id_: str) -> Mapping[str, Any] | None:
        """None where it is gone."""
        try:
            record: Mapping[str, Any] = self._ask(f"/instances/{id_}")
        except ProviderError as e:
            if e.code != "not_found":
                raise
            return None
        return None if record["status"] in _GONE else record

    def _address(self, instance: Instance) -> str:
        """Which it has when it is provisioned, in minutes."""

        def look() -> str:
            record = self._ask(f"/instances/{instance.id}", what=f"{instance.id}, which was rented")
            if record["status"] not in _STATES:
                raise self._why(instance, record["status"])
            if record["ip"]:
                return str(record["ip"])
            raise ProviderError(f"{instance.id} has no public address yet", provider=self.name, code="pending")

        return asking.patiently(look, _ADDRESS, "pending")

    def _end(self, region: str, instances: Mapping[str, Instance]) -> list[str]:
        """Its own disk goes for good. What somebody else attached to it is detached, and is theirs."""
        left = self._living(instances)
        for id_, record in left.items():
            disks = [record["os_volume_id"]] if record.get("os_volume_id") else None
            told = {"id": [id_], "action": "delete", "volume_ids": disks, "delete_permanently": bool(disks)}
            if record["status"] != "deleting":
                try:
                    self._outcome(self._api.ask("PUT", "/instances", what=f"to end {id_}", json=told))
                except ProviderError as e:
                    if e.code != "not_found" and "can't discontinue" not in e.text.lower():
                        raise  # else it is looked at again, and asked again
        return [*left]

    def _living(self, instances: Iterable[str]) -> dict[str, Mapping[str, Any]]:
        """A list may not have the newest ones yet: what it lacks is asked for by its id."""
        known = {each["id"]: each for each in self._ask("/instances")}
        found = {id_: known[id_] if id_ in known else self._record(id_) for id_ in instances}
        return {id_: each for id_, each in found.items() if each is not None and each["status"] not in _GONE}

    def _outcome(self, got: Any) -> None:
        """Raises what an answer of several outcomes says went wrong."""
        for each in got if isinstance(got, list) else ():
            if each.get("error"):
                code: Literal["not_found", "forbidden_action"] = (
                    "not_found" if each.get("statusCode") == 404 else "forbidden_action"
                )
                raise REFUSALS.error(f"to end {each.get('instanceId')}", code, str(each["error"]))

    # --- what else is there ----------------------------------------------------------------------------------

    def _left(self, region: str, pool: str | None) -> Iterator[Leftover]:
        """Keys, scripts, and volumes that no machine has. They last as long as the machines of their pool."""
        lists = {kind: self._ask(path) for kind, path in _THINGS.items()}
        lists["volume"] = [each for each in [*lists["volume"], *self._ask("/volumes/trash")] if not each["instance_id"]]
        found = [(kind, each, _api.label(each["name"], pool)) for kind, some in lists.items() for each in some]
        there = self.instances(pool=pool) if any(name for *_, name in found) else []
        for kind, each, name in found:
            if name is not None:
                mine = [
                    one.until
                    for one in there
                    if one.pool == name.pool and name.owner == one.detail["tags"].get(tags.OWNER)
                ]
                until = max(filter(None, [name.until, *mine]), default=None)
                yield Leftover(self.name, kind, each["id"], name.pool, _HERE, until, {"token": name.token})

    def _remove(self, leftover: Leftover) -> None:
        given = {"json": {"is_permanent": True}} if leftover.kind == "volume" else {}
        self._drop(f"{_THINGS[leftover.kind]}/{leftover.id}", **given)
