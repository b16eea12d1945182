"""Verda (DataCrunch before): virtual machines with GPUs in Finland and Iceland, on demand and spot.

API: https://api.verda.com/v1/docs (read 2026-11-21). Credentials: $VERDA_CLIENT_ID and $VERDA_CLIENT_SECRET.
A machine that is switched off is billed on, and no key of the account is put on one: only its client, or `skypool gc`,
ends its cost. Its disk outlives it unless that is named when it is deleted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, ClassVar

from skypool.drivers import preflight, retry, settings, ssh_machine, tags, userdata
from skypool.drivers.contract import Abilities, undo
from skypool.drivers.regional import Regional, chosen, each_done
from skypool.drivers.rest import Rest
from skypool.errors import NoAnswer, ProviderError, RateLimitError, UsageError
from skypool.model import Access, Finding, Instance, Leftover, Market, Need, Offer, Order
from skypool_verda import _api, _catalog
from skypool_verda._api import REFUSALS, Label, quietly

_FACTS = _catalog.FACTS
_HERE = "Verda"  # which is asked as one region
_ORDERED, _LAG = 10.0, 6.0  # seconds in which an order finds its machine, or has none; in which lists may lack one
_ADDRESS, _TIDYING, _KEYING = 900.0, 60.0, 300.0  # seconds for which it is asked; until the script has run
_UNTILS = (tags.UNTIL, f"{tags.UNTIL}-2")


@settings.settings_named
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
    abilities: ClassVar[Abilities] = Abilities(ends_itself=False, spot=True)
    ending: ClassVar[float] = 180.0  # as it refuses to delete what it provisions

    def __post_init__(self) -> None:
        settings.settle(self, _FACTS["settings"], {"location": _FACTS["locations"]})

    def offers(self, need: Need) -> Iterable[Offer]:
        """Each type in each location that has it now, or once where none has."""
        here, base = self._locations(need.regions), need.bases.get(self.name) or self.image or ""
        stock: _catalog.Stock = {market: self._stock(market, here) for market in need.markets}
        disks = {each["type"]: float(each["price"]["price_per_month_per_gb"]) for each in self._ask("/volume-types")}
        for record in self._ask("/instance-types", params={"currency": "usd"}):
            yield from _catalog.offers(record, stock, need, disks["NVMe"], base)

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """One create for each, in order; no token makes it idempotent, and so what is there already is not made, and
        what is there twice is ended. Verda may accept an order and then have no machine for it: where that is known
        soon, nothing was rented.
        """
        found = [each for each in self.instances(pool=order.pool) if each.token == order.token]
        made = {each.rank: each for each in found}
        error: ProviderError | None = None
        try:
            told = self._told(offer, order)
            for rank in order.ranks:
                made[rank] = made.get(rank) or self._made(order, rank, told)
                order.made(replace(made[rank], offer=offer))
        except (NoAnswer, RateLimitError):
            raise  # the same order comes again, and finds what there is
        except ProviderError as e:
            error = e
        refused = self._refused(made)
        first = next((n for n, rank in enumerate(order.ranks) if rank not in made or rank in refused), order.count)
        kept = [made[rank] for rank in order.ranks[:first]]
        undo(self.terminate, order, [i for i in {i.id: i for i in (*found, *made.values())}.values() if i not in kept])
        if not first:
            self.tidy([each for each in self.leftovers(pool=order.pool) if each.detail["token"] == order.token])
            raise refused.get(order.ranks[0]) or error or NoAnswer("what Verda made is gone", provider=self.name)
        return [replace(each, offer=offer) for each in kept]

    def access(self, instance: Instance) -> Access:
        """ssh to its public address. Raises why it does not get one, if it does not."""
        return ssh_machine.access(instance, self._address(instance), user="root", keying=_KEYING)

    def renew(self, pool: str, until: datetime) -> None:
        """Of its machines; what has no tags lasts as long as they do."""
        each_done(partial(self._renew, until), self.instances(pool=pool), "not all tags could be renewed")

    def check(self) -> Iterable[Finding]:
        """What it needs, and what no machine there can do."""
        questions: dict[str, Callable[[], object]] = {
            "ssh on this machine": preflight.openssh,
            "credentials and funds": self._funds,
            "locations": lambda: ", ".join(self._locations()),
            "clock": lambda: preflight.clock(str(self._api.reply("GET", "/locations")[1]["Date"])),
            "the end of its machines": lambda: _FACTS["end"],
        }
        return preflight.findings(questions)

    @property
    def _api(self) -> Rest:
        return _api.account(self.client_id, self.client_secret)

    def _ask(self, path: str, **given: Any) -> Any:
        return self._api.ask("GET", path, **given)

    def _drop(self, path: str, **given: Any) -> None:
        """Asked again while it is refused for its state. Quiet for what is gone."""
        quietly(lambda: retry.patiently(lambda: self._api.ask("DELETE", path, **given), _TIDYING, "forbidden_action"))

    def _regions(self) -> Sequence[str]:
        return [_HERE]

    def _locations(self, patterns: Sequence[str] = ()) -> list[str]:
        return chosen([each["code"] for each in self._ask("/locations")], self.location or (), patterns)

    def _stock(self, market: Market, places: Sequence[str]) -> dict[str, list[str]]:
        got = self._ask("/instance-availability", params={"is_spot": str(market == "spot").lower()})
        return {each["location_code"]: each["availabilities"] for each in got if each["location_code"] in places}

    def _funds(self) -> str:
        left = self._ask("/balance")
        text = f"{float(left['amount']):.2f} {left['currency']} left"
        if float(left["amount"]) > 0:
            return text
        raise REFUSALS.error("to rent anything", "insufficient_funds", text)

    # --- making ----------------------------------------------------------------------------------------------

    def _told(self, offer: Offer, order: Order) -> dict[str, Any]:
        """What all machines of an order are told; the key of its session and its script are made."""
        if not offer.detail["image"]:
            raise UsageError(f"Verda has no Ubuntu for {offer.instance_type}: say what it is to start from, image=")
        spot = offer.market == "spot"
        name = Label(order.pool, order.token, order.until, tags.owner())
        return {
            "instance_type": offer.instance_type,
            "image": offer.detail["image"],
            "location_code": offer.region,
            "description": f"of skypool's pool {order.pool}",
            "is_spot": spot,
            "contract": "SPOT" if spot else "PAY_AS_YOU_GO",
            "pricing": "FIXED_PRICE",
            "ssh_key_ids": [self._thing("ssh-key", name._replace(token=tags.session(order)), key=order.keys.public)],
            "startup_script_id": self._thing("script", name, script=userdata.boot_script(order)),
            "os_volume": {"name": str(name), "size": offer.detail["gb"], **(_FACTS["spot disk"] if spot else {})},
        }

    def _thing(self, kind: str, name: Label, **told: str) -> str:
        """The id of a key or a script, made where it is not there."""
        for each in self._ask(_FACTS["things"][kind]):
            if (found := _api.label(each["name"], name.pool)) and found.token == name.token:
                return str(each["id"])
        return _api.made(self._api, _FACTS["things"][kind], f"a {kind}", {**told, "name": str(name)})

    def _made(self, order: Order, rank: int, told: Mapping[str, Any]) -> Instance:
        """A machine. One whose reply was lost is looked for, as long as a list may not have it yet; else NoAnswer."""
        said = {key: text[: _api.LONGEST] for key, text in tags.tags(replace(order, ranks=(rank,))).items()}
        more = {"hostname": f"{order.pool}-{rank}", "tags": tags.pairs(said, "key", "value")}
        try:
            what = f"{told['instance_type']} in {told['location_code']}"
            order.asking(rank)
            id_ = _api.made(self._api, "/instances", what, {**told, **more})
        except NoAnswer:
            it = order.token, rank
            found = retry.soon(lambda: [i for i in self.instances(pool=order.pool) if (i.token, i.rank) == it], _LAG)
            if not found:
                raise
            return found[0]
        return tags.instance(self.name, id_, said, 0, "starting", {"region": _HERE, "tags": said})

    def _refused(self, made: Mapping[int, Instance]) -> dict[int, ProviderError]:
        """For which no machine was found after all, as far as that is known soon."""
        said: dict[int, str] = {}

        def look() -> bool:
            known = {each["id"]: each["status"] for each in self._ask("/instances")} if made else {}
            said.update({rank: known.get(each.id, "new") for rank, each in made.items()})
            return {*_FACTS["new"]}.isdisjoint(said.values())

        retry.soon(look, _ORDERED)
        gone = [(rank, code, f"its status is {code}") for rank, code in said.items() if code in _FACTS["gone"]]
        return {rank: REFUSALS.error(f"to keep {made[rank].id}", code, text) for rank, code, text in gone}

    def _found(self, region: str, pool: str | None) -> Iterator[Instance]:
        """One that is switched off is billed, and is to end."""
        for record in self._ask("/instances"):
            said = tags.read(record.get("tags") or (), "key", "value")
            if tags.ours(said, pool, _api.LONGEST) and record["status"] not in _FACTS["gone"]:
                state: Any = _FACTS["states"].get(record["status"], "ending")
                both = {**said, tags.UNTIL: max(said.get(key, "") for key in _UNTILS)}
                yield tags.instance(self.name, record["id"], both, 0, state, {"region": _HERE, "tags": said})

    def _address(self, instance: Instance) -> str:
        """Which it has when it is provisioned, in minutes."""

        def look() -> str:
            record = self._ask(f"/instances/{instance.id}", what=f"to tell of {instance.id}")
            if (status := record["status"]) not in _FACTS["states"]:
                raise REFUSALS.error(f"to keep {instance.id}", status, f"its status is {status}")
            if not record["ip"]:
                raise REFUSALS.error(f"to keep {instance.id}", "pending", "it has no public address yet")
            return str(record["ip"])

        return retry.patiently(look, _ADDRESS, "pending")

    def _end(self, region: str, instances: Iterable[str]) -> list[str]:
        """Asked by id, as a list may lack the newest; again where it is refused, as while it is provisioned."""
        records = {id_: quietly(partial(self._ask, f"/instances/{id_}")) for id_ in instances}
        left = {id_: each for id_, each in records.items() if each and each["status"] not in _FACTS["gone"]}
        for id_, record in left.items():
            if record["status"] != "deleting":
                quietly(partial(self._delete, id_, record))
        return [*left]

    def _delete(self, id_: str, record: Mapping[str, Any]) -> None:
        """With its disk, for good; with one built in, by way of the trash. What somebody attached is told of."""
        disks, others = {record.get("os_volume_id")} - {None}, {*(record.get("volume_ids") or ())}
        more = [each for each in (self._ask("/volumes") if others - disks else ()) if each["id"] in others - disks]
        disks |= {each["id"] for each in more if _api.label(each["name"], None)}
        built_in = {each["id"] for each in more if each["type"] in _FACTS["built in"]} - disks
        told: dict[str, Any] = {"id": [id_], "action": "delete", "volume_ids": [*disks, *built_in] or None}
        told |= {"delete_permanently": bool(disks) and not built_in}
        for each in self._api.ask("PUT", "/instances", what=f"to end {id_}", json=told) or ():
            if each.get("error"):
                code = "not_found" if each.get("statusCode") == 404 else "forbidden_action"
                raise REFUSALS.error(f"to end {id_}", code, str(each["error"]))
        for each in more:
            if each["id"] not in disks | built_in:
                warnings.warn(_FACTS["kept"].format(**each, instance=id_), RuntimeWarning, stacklevel=2)

    def _renew(self, until: datetime, instance: Instance) -> None:
        """Under the other of two keys, and only then the old one goes: one always says until when."""
        at, said = f"/instances/{instance.id}/tags", instance.detail["tags"]
        *older, old = sorted((key for key in _UNTILS if key in said), key=lambda key: str(said[key])) or [""]
        for key in older:
            self._drop(f"{at}/{key}")
        new = {"key": next(key for key in _UNTILS if key != old), "value": tags.stamp(until)}
        quietly(partial(self._api.ask, "POST", at, json=new))
        if old:
            self._drop(f"{at}/{old}")

    def _left(self, region: str, pool: str | None) -> Iterator[Leftover]:
        """Keys, scripts, and volumes without a machine, in the trash, too: as long as the machines of their pool."""
        living = [each["id"] for each in self._ask("/instances") if each["status"] not in _FACTS["gone"]]
        until = {each.pool: each.until for each in self.instances(pool=pool)}
        lists = [*_FACTS["things"].items(), ("volume", "/volumes/trash")]
        for kind, each in ((kind, each) for kind, path in lists for each in self._ask(path)):
            if (name := _api.label(each["name"], pool)) and each.get("instance_id") not in living:
                last = max(filter(None, (name.until, until.get(name.pool))), default=None)
                yield Leftover(self.name, kind, each["id"], name.pool, _HERE, last, {"token": name.token})

    def _remove(self, leftover: Leftover) -> None:
        told = {"json": {"is_permanent": True}} if leftover.kind == "volume" else {}
        self._drop(f"{_FACTS['things'][leftover.kind]}/{leftover.id}", **told)
