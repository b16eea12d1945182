"""Verda (formerly DataCrunch): virtual machines with GPUs in Finland and Iceland, on demand and spot.

API: https://api.verda.com/v1/docs (read 2026-11-21). Credentials: $VERDA_CLIENT_ID and $VERDA_CLIENT_SECRET.
A machine that is switched off is still billed, and no key of the account is put on a machine. So a machine cannot end
its own cost: only its client or `skypool gc` can. A machine's disk is kept unless the deletion names it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, ClassVar, Literal

from skypool.drivers import preflight, retry, settings, ssh_machine, tags, userdata
from skypool.drivers.contract import Abilities, undo
from skypool.drivers.regional import Regional, chosen, each_done
from skypool.drivers.rest import Rest
from skypool.errors import NoAnswer, ProviderError, RateLimitError, UsageError
from skypool.model import Access, Finding, Instance, Leftover, Market, Need, Offer, Order
from skypool_verda import _api, _catalog, _requests
from skypool_verda._api import REFUSALS, Label, quietly

_HERE = "Verda"
"""Name of the only region, as `Regional` sees Verda."""

_LOCATIONS = ("FIN-01", "FIN-02", "FIN-03", "ICE-01")
"""Locations known when this was written, to suggest the right spelling of a wrong one."""

_SETTINGS = {
    "location": (r"[A-Z]{3}-\d\d", "'FIN-01'", True),
    "image": (r"[\w.-]+", "'ubuntu-24.04'", False),
}
"""For each setting that is a word: its pattern, an example, and True if it may be a list."""

_ORDERED = 10.0
"""Seconds until an accepted order has a machine, or turns out to have none."""

_LAG = 6.0
"""Seconds after a create during which lists may lack the machine."""

_ADDRESS = 900.0
"""Maximum seconds to wait for a machine's address. Provisioning takes minutes."""

_TIDYING = 60.0
"""Seconds for which a deletion is repeated if it is refused because of the thing's state."""

_KEYING = 300.0
"""Seconds during which a machine may show another host key, because its startup script has not run yet."""

_UNTILS = (tags.UNTIL, f"{tags.UNTIL}-2")
"""Two tags for the end of a machine's lease. A renewal writes one before it removes the other."""

_STATES: dict[str, Literal["starting", "running"]] = {
    "new": "starting",
    "ordered": "starting",
    "provisioning": "starting",
    "validating": "starting",
    "pending": "starting",
    "unknown": "starting",
    "running": "running",
}
"""Verda's statuses of machines that start or run. A machine with any other status is ending or gone."""

_NEW = frozenset({"new", "ordered"})
"""Statuses of an order that may still fail for lack of a machine."""

_GONE = frozenset({"discontinued", "notfound", "no_capacity", "deleted"})
"""Statuses of a machine that no longer exists and costs nothing."""

_PATHS = {"ssh-key": "/ssh-keys", "script": "/scripts", "volume": "/volumes"}
"""API paths of things other than instances, by kind."""

_BUILT_IN = frozenset({"NVMe_Local_Storage", "NVMe_OS_Cluster"})
"""Types of volumes that are built into an instance's host."""

_KEPT = (
    "volume {name!r} of {size} GB on {instance} was not created by a pool: it is detached and kept, and Verda bills it "
    "until you delete it at https://console.verda.com (volume {id})"
)
"""Warning about an attached volume that no pool created."""

_END = "a machine that is switched off is still billed: after its client was killed, `skypool gc --yes` ends the cost"
"""Text of `check` about the end of machines."""


@settings.settings_named
@dataclass(frozen=True)
class Verda(Regional):
    """Provider that rents from Verda.

    Args:
        location: a location such as "FIN-01", or several. None is all.
        image: image of the machines, such as "ubuntu-22.04-cuda-12.4-docker". None chooses one that fits the machine.
            An Image's base= takes precedence.
        client_id: the account's client id. None is $VERDA_CLIENT_ID.
        client_secret: the account's client secret. None is $VERDA_CLIENT_SECRET.
    """

    location: str | Sequence[str] | None = None
    image: str | None = None
    client_id: str | None = field(default=None, repr=False)
    client_secret: str | None = field(default=None, repr=False)
    name: ClassVar[str] = "verda"
    abilities: ClassVar[Abilities] = Abilities(ends_itself=False, spot=True)
    ending: ClassVar[float] = 180.0  # Verda refuses to delete a machine while it is provisioned

    def __post_init__(self) -> None:
        settings.settle(self, _SETTINGS, {"location": _LOCATIONS})

    def offers(self, need: Need) -> Iterable[Offer]:
        """Yield an offer for each type and each location that has it in stock.

        A type that is out of stock has one offer without a location, which is marked as not available.
        """
        locations = self._locations(need.regions)
        base_image = need.bases.get(self.name) or self.image or ""
        stock: _catalog.Stock = {market: self._stock(market, locations) for market in need.markets}
        usd_per_gb_month = {
            each["type"]: float(each["price"]["price_per_month_per_gb"]) for each in self._ask("/volume-types")
        }
        for record in self._ask("/instance-types", params={"currency": "usd"}):
            yield from _catalog.offers(record, stock, need, usd_per_gb_month["NVMe"], base_image)

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Return one machine for each node, in order.

        Verda has no token for idempotent creates. So existing machines of this order are reused, and a machine that
        exists twice is ended. Verda may accept an order and then have no machine for it. If that is known soon, the
        order counts as refused.

        Raises:
            NoAnswer: the reply was lost and no machine was found. Repeat the same order, which searches first.
            ProviderError: Verda refused to create the first machine.
        """
        found = [each for each in self.instances(pool=order.pool) if each.token == order.token]
        made = {each.node: each for each in found}
        error: ProviderError | None = None
        try:
            common = self._deploy_request(offer, order)
            for node in order.nodes:
                made[node] = made.get(node) or self._made(order, node, common)
                order.made(replace(made[node], offer=offer))
        except (NoAnswer, RateLimitError):
            raise  # the same order is repeated, and finds the existing machines
        except ProviderError as e:
            error = e
        refused = self._refused(made)
        kept: list[Instance] = []
        for node in order.nodes:  # machines after a missing one cannot be used
            if node not in made or node in refused:
                break
            kept.append(made[node])
        everything = {each.id: each for each in (*found, *made.values())}
        undo(self.terminate, order, [each for each in everything.values() if each not in kept])
        if not kept:
            self.tidy([each for each in self.leftovers(pool=order.pool) if each.detail["token"] == order.token])
            raise (
                refused.get(order.nodes[0])
                or error
                or NoAnswer("Verda accepted the order, but its machine is not listed", provider=self.name)
            )
        return [replace(each, offer=offer) for each in kept]

    def access(self, instance: Instance) -> Access:
        """Return access by ssh to the machine's public address. Waits until the machine has one.

        Raises:
            ProviderError: the machine gets no address, or has ended.
        """
        return ssh_machine.access(instance, self._address(instance), user="root", keying=_KEYING)

    def renew(self, pool: str, until: datetime) -> None:
        """Write the new end of the lease into the tags of the pool's machines.

        Things without tags are kept as long as the machines of their pool.
        """
        each_done(partial(self._renew, until), self.instances(pool=pool), "not all tags could be renewed")

    def check(self) -> Iterable[Finding]:
        """Check ssh, credentials, funds, locations and the clock. Also report how machines end."""
        questions: dict[str, Callable[[], object]] = {
            "ssh on this machine": preflight.openssh,
            "credentials and funds": self._funds,
            "locations": lambda: ", ".join(self._locations()),
            "clock": lambda: preflight.clock(self._date()),
            "the end of its machines": lambda: _END,
        }
        return preflight.findings(questions)

    @property
    def _api(self) -> Rest:
        return _api.account(self.client_id, self.client_secret)

    def _ask(self, path: str, **given: Any) -> Any:
        return self._api.ask("GET", path, **given)

    def _drop(self, path: str, **given: Any) -> None:
        """Delete something, and repeat this while its state forbids it.

        Does not raise for a thing that no longer exists.
        """
        delete = partial(self._api.ask, "DELETE", path, **given)
        quietly(lambda: retry.patiently(delete, _TIDYING, "forbidden_action"))

    def _regions(self) -> Sequence[str]:
        return [_HERE]

    def _locations(self, patterns: Sequence[str] = ()) -> list[str]:
        """Return the codes of the locations that the settings select and that match a pattern."""
        return chosen([each["code"] for each in self._ask("/locations")], self.location or (), patterns)

    def _stock(self, market: Market, locations: Sequence[str]) -> dict[str, list[str]]:
        """Return the names of the instance types in stock, by location."""
        spot = "true" if market == "spot" else "false"
        got = self._ask("/instance-availability", params={"is_spot": spot})
        return {each["location_code"]: each["availabilities"] for each in got if each["location_code"] in locations}

    def _funds(self) -> str:
        """Return the account's balance as text.

        Raises:
            FundsError: the balance is zero or negative.
        """
        balance = self._ask("/balance")
        amount = float(balance["amount"])
        text = f"{amount:.2f} {balance['currency']} left"
        if amount > 0:
            return text
        raise REFUSALS.error("to rent anything", "insufficient_funds", text)

    def _date(self) -> str:
        """Return the header Date of an answer."""
        _, headers = self._api.reply("GET", "/locations")
        return str(headers["Date"])

    # --- create ----------------------------------------------------------------------------------------------

    def _deploy_request(self, offer: Offer, order: Order) -> _requests.Deploy:
        """Return the part of a request that all instances of an order share.

        Create the key and the script that they need.

        Raises:
            UsageError: no known image fits the instance type.
        """
        if not offer.detail["image"]:
            raise UsageError(f"Verda has no Ubuntu image for {offer.instance_type}: choose one with Verda(image=…)")
        name = Label(order.pool, order.token, order.until, tags.owner())
        of_session = replace(name, token=tags.session(order))
        return _requests.deploy(
            offer,
            order,
            name=str(name),
            ssh_key_id=self._thing("ssh-key", of_session, key=order.keys.public),
            script_id=self._thing("script", name, script=userdata.boot_script(order)),
        )

    def _thing(self, kind: str, name: Label, **told: str) -> str:
        """Return the id of a key or a script, and create it if it does not exist."""
        for each in self._ask(_PATHS[kind]):
            found = _api.label(each["name"], name.pool)
            if found and found.token == name.token:
                return str(each["id"])
        return _api.made(self._api, _PATHS[kind], f"a {kind}", {**told, "name": str(name)})

    def _made(self, order: Order, node: int, common: _requests.Deploy) -> Instance:
        """Create the machine of one node. If the reply is lost, search for the machine while lists may lack it.

        Raises:
            NoAnswer: the reply was lost, and no machine was found.
        """
        said = {key: text[: _api.LONGEST] for key, text in tags.tags(replace(order, nodes=(node,))).items()}
        request = _requests.deploy_node(common, hostname=f"{order.pool}-{node}", said=said)

        def look() -> Instance | None:
            there = self.instances(pool=order.pool)
            return next((each for each in there if (each.token, each.node) == (order.token, node)), None)

        try:
            order.asking(node)
            what = f"{request['instance_type']} in {request['location_code']}"
            id_ = _api.made(self._api, "/instances", what, request)
        except NoAnswer:
            found = retry.soon(look, _LAG)
            if found is None:
                raise
            return found
        return tags.instance(self.name, id_, said, 0, "starting", {"tags": said}, region=_HERE)

    def _refused(self, made: Mapping[int, Instance]) -> dict[int, ProviderError]:
        """Return an error for each node for which Verda has no machine after all.

        It waits at most ten seconds to find out.
        """
        statuses: dict[int, str] = {}

        def look() -> bool:
            known = {each["id"]: each["status"] for each in self._ask("/instances")} if made else {}
            for node, instance in made.items():
                statuses[node] = known.get(instance.id, "new")
            return _NEW.isdisjoint(statuses.values())

        retry.soon(look, _ORDERED)
        return {node: _unfit(made[node], status) for node, status in statuses.items() if status in _GONE}

    # --- find and end ----------------------------------------------------------------------------------------

    def _found(self, region: str, pool: str | None) -> Iterator[Instance]:
        """Yield the machines of a pool, or of all pools for None.

        A machine that is switched off is billed, so its state is "ending".
        """
        for record in self._ask("/instances"):
            said = tags.read(record.get("tags") or (), "key", "value")
            if not tags.ours(said, pool, _api.LONGEST) or record["status"] in _GONE:
                continue
            state: Literal["starting", "running", "ending"] = _STATES.get(record["status"], "ending")
            latest = {**said, tags.UNTIL: max(said.get(key, "") for key in _UNTILS)}
            yield tags.instance(self.name, record["id"], latest, 0, state, {"tags": said}, region=_HERE)

    def _address(self, instance: Instance) -> str:
        """Return a machine's public address. It gets one some minutes after its create.

        Raises:
            ProviderError: the machine has ended, or has no address after 15 minutes.
        """

        def look() -> str:
            record = self._ask(f"/instances/{instance.id}", what=f"to show {instance.id}")
            if record["status"] not in _STATES:
                raise _unfit(instance, record["status"])
            if not record["ip"]:
                raise REFUSALS.error(f"to keep {instance.id}", "pending", "it has no public address yet")
            return str(record["ip"])

        return retry.patiently(look, _ADDRESS, "pending")

    def _terminate(self, region: str, instances: Iterable[str]) -> list[str]:
        """Ask Verda to end machines, and return the ids of those that have not ended yet.

        Machines are looked up by id, because a list may lack the newest. A refused end, as while a machine is
        provisioned, is repeated by the next call.
        """
        left = {}
        for id_ in instances:
            record = quietly(partial(self._ask, f"/instances/{id_}"))
            if record and record["status"] not in _GONE:
                left[id_] = record
        for id_, record in left.items():
            if record["status"] != "deleting":
                quietly(partial(self._terminate_one, id_, record))
        return list(left)

    def _terminate_one(self, id_: str, record: Mapping[str, Any]) -> None:
        """Delete a machine with its disk. Volumes that no pool created are kept, with a warning."""
        boot_disk = {record["os_volume_id"]} if record.get("os_volume_id") else set()
        attached = set(record.get("volume_ids") or ()) - boot_disk
        volumes = [each for each in self._ask("/volumes") if each["id"] in attached] if attached else []
        disks = boot_disk | {each["id"] for each in volumes if _api.label(each["name"], None)}
        built_in = {each["id"] for each in volumes if each["type"] in _BUILT_IN} - disks
        request = _requests.delete(id_, disks=disks, built_in=built_in)
        outcomes = self._api.ask("PUT", "/instances", what=f"to end {id_}", json=request)
        for outcome in outcomes or ():
            if outcome.get("error"):
                code = "not_found" if outcome.get("statusCode") == 404 else "forbidden_action"
                raise REFUSALS.error(f"to end {id_}", code, str(outcome["error"]))
        for volume in volumes:
            if volume["id"] not in disks | built_in:
                warnings.warn(_KEPT.format(**volume, instance=id_), RuntimeWarning, stacklevel=2)

    def _renew(self, until: datetime, instance: Instance) -> None:
        """Write one of the two tags, and only then remove the other, so that one of them always exists."""
        path = f"/instances/{instance.id}/tags"
        said = instance.detail["tags"]
        there = sorted((key for key in _UNTILS if key in said), key=lambda key: str(said[key]))
        latest = there.pop() if there else ""
        for older in there:
            self._drop(f"{path}/{older}")
        free = next(key for key in _UNTILS if key != latest)
        request = {"key": free, "value": tags.stamp(until)}
        quietly(partial(self._api.ask, "POST", path, json=request))
        if latest:
            self._drop(f"{path}/{latest}")

    def _left(self, region: str, pool: str | None) -> Iterator[Leftover]:
        """Yield the keys, the scripts, and the volumes without a machine, including volumes in the trash.

        They are needed as long as the machines of their pool.
        """
        living = {each["id"] for each in self._ask("/instances") if each["status"] not in _GONE}
        until = {each.pool: each.until for each in self.instances(pool=pool)}
        for kind, path in (*_PATHS.items(), ("volume", "/volumes/trash")):
            for each in self._ask(path):
                name = _api.label(each["name"], pool)
                if name is None or each.get("instance_id") in living:
                    continue
                times = [time for time in (name.until, until.get(name.pool)) if time]
                last = max(times, default=None)
                yield Leftover(self.name, kind, each["id"], name.pool, _HERE, last, {"token": name.token})

    def _remove(self, leftover: Leftover) -> None:
        path = f"{_PATHS[leftover.kind]}/{leftover.id}"
        if leftover.kind == "volume":
            self._drop(path, json={"is_permanent": True})
        else:
            self._drop(path)


def _unfit(instance: Instance, status: str) -> ProviderError:
    """Return the error about a machine whose status makes it unusable."""
    return REFUSALS.error(f"to keep {instance.id}", status, f"its status is {status}")
