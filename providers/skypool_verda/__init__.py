"""Driver for Verda (formerly DataCrunch): virtual machines with GPUs in Finland and Iceland, on demand and spot.

API: https://api.verda.com/v1/docs (read 2026-11-21). Credentials: $VERDA_CLIENT_ID and $VERDA_CLIENT_SECRET.

A machine that is switched off is still billed, and skypool puts no key of the account on a machine. So a machine cannot
end its own cost: only the client or `skypool gc` can. The deletion of a machine keeps its disk, unless the request
names the disk.

A machine's tags hold facts such as the pool and the node number. SSH keys, scripts and volumes cannot have tags, so
their names hold these facts.

Words of this package:

- instance, machine: a virtual machine at Verda. Its record is Verda's description of it, as parsed JSON.
- volume: a disk at Verda.
- location: a place of Verda's data centres, such as "FIN-01".
- market: "on-demand" or "spot".
- lease: the time for which a machine is needed. A renewal of the lease writes a later end into the machine's tags.
- need, offer, order: the requirements of a node, a machine type with its price, and the request to rent machines for
  nodes of a pool (`skypool.model`). A node is a rented machine of a pool; its node number is its number there.
- token: the text that names an order, by which a repeated order is recognized.
- settings: the arguments of `Verda`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Literal

from skypool import tracebacks
from skypool.drivers import preflight, retry, settings, ssh_machine, tags, userdata
from skypool.drivers.contract import Abilities, undo
from skypool.drivers.regional import Regional, chosen, each_done
from skypool.drivers.rest import Params, Rest
from skypool.errors import CapacityError, NoAnswer, ProviderError, RateLimitError, UsageError
from skypool.model import Access, Bill, Finding, Instance, Leftover, Market, Need, Offer, Order
from skypool_verda import _api, _catalog, _requests
from skypool_verda._api import REFUSALS, quietly
from skypool_verda._names import Label, label

_HERE = "Verda"
"""The only region of this driver. Verda's locations, such as "FIN-01", do not count as regions here."""

_LOCATIONS = ("FIN-01", "FIN-02", "FIN-03", "ICE-01")
"""Locations known when this was written. Error messages suggest the most similar one for a misspelt location."""

_SETTINGS = {
    "location": (r"[A-Z]{3}-\d\d", "'FIN-01'", True),
    "image": (r"[\w.-]+", "'ubuntu-24.04'", False),
}
"""A dict from setting to (regular expression of its values, example for messages, True if a list is allowed)."""

_ORDERED = 10.0
"""Seconds within which Verda finds a machine for an accepted order, or reports that it has none."""

_LAG = 6.0
"""Seconds after the creation of a machine during which Verda's lists may lack the machine."""

_ADDRESS = 900.0
"""Maximum seconds to wait for a machine's public address. Setting up a machine takes minutes."""

_TIDYING = 60.0
"""Seconds for which a deletion is repeated if Verda refuses it because of the present state of the resource."""

_KEYING = 300.0
"""Seconds during which a new machine may show another host key, because its startup script has not run yet."""

_UNTILS = (tags.UNTIL, f"{tags.UNTIL}-2")
"""Keys of two tags for the end of a machine's lease. A renewal writes one tag before it removes the other."""

_STATES: dict[str, Literal["starting", "running"]] = {
    "new": "starting",
    "ordered": "starting",
    "provisioning": "starting",
    "validating": "starting",
    "pending": "starting",
    "unknown": "starting",
    "running": "running",
}
"""A dict from Verda's status to the state of a machine that starts or runs.

Machines with another status are ending or have ended.
"""

_NEW = frozenset({"new", "ordered"})
"""Statuses of a new machine for which Verda may still report that it has none."""

_GONE = frozenset({"discontinued", "notfound", "no_capacity", "deleted"})
"""Statuses of a machine that no longer exists and costs nothing."""

_PATHS = {"ssh-key": "/ssh-keys", "script": "/scripts", "volume": "/volumes"}
"""A dict from kind of resource to API path, for resources other than instances."""

_BUILT_IN = frozenset({"NVMe_Local_Storage", "NVMe_OS_Cluster"})
"""Types of volumes that are built into the computer on which an instance runs."""

_KEPT = (
    "volume {name!r} of {size} GB on {instance} was not created by a pool: it is detached and kept, and Verda bills it "
    "until you delete it at https://console.verda.com (volume {id})"
)
"""The warning, at the end of a machine, about an attached volume that no pool created and that is kept."""

_SETTLED = timedelta(minutes=10)
"""Time from the end of a machine until the balance shows all of its cost. Verda charges for ten minutes in advance."""

_IMPOSSIBLE: tuple[tuple[str, _requests.Changes, tuple[type[ProviderError], ...], str], ...] = (
    (
        "an unknown instance type",
        {"instance_type": "1NOSUCHGPU.1V"},
        (ProviderError, CapacityError),
        "NOSUCHGPU|instance[ _]type",
    ),
    (
        "an unknown image",
        {"image": "ubuntu-00.00-no-such-image"},
        (CapacityError, ProviderError),
        "no-such-image|operating system|image",
    ),
    ("an unknown location", {"location_code": "XXX-99"}, (ProviderError, CapacityError), "XXX-99|location"),
)
"""Requests that Verda must refuse.

Each has a text that says what is impossible, the field of the request that is changed, the classes of the expected
error, and a regular expression that must match in the error's text. Verda's words for an unknown image are known from
reports of users. Those for an unknown type or location are not.
"""

_END = "a machine that is switched off is still billed: after its client was killed, `skypool gc --yes` ends the cost"
"""The text of the finding in `Verda.check` that says what ends the cost of a machine."""


@settings.settings_named
@dataclass(frozen=True)
class Verda(Regional):
    """A driver that rents virtual machines from Verda. Its methods block.

    Args:
        location: a location such as "FIN-01", or several. None means all locations.
        image: image of the machines, such as "ubuntu-22.04-cuda-12.4-docker". None chooses an image that fits the
            machine type. The base= of an Image takes precedence.
        client_id: the account's client id. None takes $VERDA_CLIENT_ID.
        client_secret: the account's client secret. None takes $VERDA_CLIENT_SECRET.

    Raises:
        UsageError: a setting is invalid or unknown.
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
        """Yield an offer for each machine type and market, in each location that has the type in stock.

        All types are offered, suitable or not. For a market on which a type is out of stock, there is one offer without
        a location, which is marked as not available. The requests are sent when the first offer is taken.

        Args:
            need: the requirements, of which the markets, regions, disk size and base image are used.

        Raises:
            ProviderError: Verda refused or did not answer, or lists prices in another currency than USD.
            UsageError: the account may not use a location of the settings.
        """
        locations = self._locations(need.regions)
        base_image = need.bases.get(self.name) or self.image or ""
        stock: _catalog.Stock = {market: self._stock(market, locations) for market in need.markets}
        usd_per_gb_month = {
            each["type"]: float(each["price"]["price_per_month_per_gb"]) for each in self._list("/volume-types")
        }
        for record in self._list("/instance-types", params={"currency": "usd"}):
            yield from _catalog.offers(record, stock, need, usd_per_gb_month["NVMe"], base_image)

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Create the missing machines of an order, one after the other, and return one for each node, in order.

        Machines that an earlier launch of the same order created are reused. If Verda refuses a machine, no further
        machine is created, and only the machines of the earlier nodes are returned. Verda may also accept a request
        although no machine is free. This counts as a refusal if Verda reports it within 10 s. Machines that are not
        returned are ended.

        Args:
            offer: the machine type, location and market, as `offers` returned them.
            order: the node numbers, the pool, and the token by which a repeated order is recognized.

        Raises:
            NoAnswer: the reply was lost and no machine was found. Repeat the same order, which searches first.
            RateLimitError: too many requests. Machines may exist: repeat the same order.
            ProviderError: no machine was rented, because Verda refused the first one.
            UsageError: Verda has no Ubuntu image for the machine type, and the settings name no image.
            StillRunning: machines that had to be ended again may still run.
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
        for node in order.nodes:  # the machines returned must be those of the first nodes
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
                or NoAnswer(
                    "Verda accepted the order, but does not list a machine for it; start the pool again, "
                    "and check with `skypool gc` that no machine is left",
                    provider=self.name,
                )
            )
        return [replace(each, offer=offer) for each in kept]

    def access(self, instance: Instance) -> Access:
        """Return how to reach a machine by ssh at its public address, as root. Waits up to 15 minutes for the address.

        Raises:
            ProviderError: the machine got no address within 15 minutes, or has ended.
        """
        return ssh_machine.access(instance, self._address(instance), user="root", keying=_KEYING)

    def renew(self, pool: str, until: datetime) -> None:
        """Write the new end of the lease into the tags of the pool's machines.

        SSH keys, scripts and volumes have no tags, and are not changed. They count as needed for as long as the
        machines of their pool.

        Args:
            pool: name of the pool.
            until: the new end of the lease.

        Raises:
            ProviderError: the tag of one machine could not be written.
            ErrorGroup: the tags of several machines could not be written.
        """
        each_done(partial(self._renew, until), self.instances(pool=pool), "not all tags could be renewed")

    def check(self) -> Iterable[Finding]:
        """Yield findings about the account, and about what Verda sells. Only reads.

        The findings are about ssh, credentials, funds, locations, the clock, images and GPUs. The last one says that
        machines cannot end themselves. The checks run when the first finding is taken. A failed check is a finding,
        too, and does not raise. If Verda refuses the credentials, only ssh, credentials and funds are
        checked.
        """
        return preflight.findings(
            {preflight.SSH: preflight.openssh, "credentials and funds": self._funds},
            {
                "locations": lambda: ", ".join(self._locations()),
                "clock": lambda: preflight.clock(self._date()),
                "images": self._images,
                "GPUs": self._gpus,
                "the end of its machines": lambda: _END,
            },
        )

    def prove_creates(self) -> Iterable[Finding]:
        """Order machines that Verda must refuse, and yield a finding for each. Does not raise.

        Each request is that of a pool with one field changed: to a type, an image or a location that does not exist.
        The requests need an SSH key and a script in the account. Both are made for this, and removed afterwards.
        """
        order = preflight.impossible_order(Need(market="cheapest"))
        try:
            offer = next(each for each in self.offers(order.need) if each.detail["image"])
            real = self._deploy_request(offer, order)
        except Exception as e:  # noqa: BLE001 - any error is a finding to show
            yield preflight.failure("requests for machines", e)
        else:
            for what, changes, kinds, names in _IMPOSSIBLE:
                request = _requests.changed(real, changes)
                create = partial(self._made, order, order.nodes[0], request)
                yield preflight.refusal(what, create, kinds, self.terminate, names=names)
        try:
            self.tidy(self.leftovers(pool=order.pool))
        except Exception as e:  # noqa: BLE001 - any error is a finding to show
            yield preflight.failure("removal of the SSH key and the script", e, "run `skypool gc --yes`")

    def billed(self, instances: Sequence[str], since: datetime, until: datetime) -> Bill:
        """Return where to look for what machines have cost: Verda's API has only the balance of the account.

        Neither of Verda's SDKs has a request for costs: https://github.com/verda-cloud/sdk-python,
        https://github.com/verda-cloud/verdacloud-sdk-go (read 2026-11-24).

        Args:
            instances: ids of the machines. Not used.
            since: a time before the first machine was rented. Not used.
            until: a time after the last machine had ended. The result says to look ten minutes later, because Verda
                charges with this delay.

        Raises:
            ProviderError: Verda refused the request for the balance, or did not answer.
        """
        balance = self._ask("/balance")
        settled = (until + _SETTLED).astimezone(UTC)
        return Bill(
            None,
            f"Verda's API tells the balance only, which is {balance['amount']:.2f} {balance['currency']} now; from "
            f"{settled:%H:%M} UTC on, compare the receipt with https://console.verda.com/billing",
        )

    @property
    def _api(self) -> Rest:
        return _api.account(self.client_id, self.client_secret)

    def _ask(self, path: str, **given: Any) -> Any:
        return self._api.ask("GET", path, **given)

    def _list(self, path: str, params: Params | None = None) -> list[Any]:
        """Return a list from Verda's API, which has no pages. Raise ProviderError if the list may be incomplete."""
        return self._api.ask_all(path, params=params)

    def _drop(self, path: str, **given: Any) -> None:
        """Delete a resource, if it exists. Repeat for a minute while Verda refuses because of the resource's state."""
        delete = partial(self._api.ask, "DELETE", path, **given)
        quietly(lambda: retry.patiently(delete, _TIDYING, "forbidden_action"))

    def _regions(self) -> Sequence[str]:
        return [_HERE]

    def _locations(self, patterns: Sequence[str] = ()) -> list[str]:
        """Return the allowed locations that match a pattern such as "FIN-*" in any case; without patterns, all."""
        return chosen([each["code"] for each in self._list("/locations")], self.location or (), patterns)

    def _stock(self, market: Market, locations: Sequence[str]) -> dict[str, list[str]]:
        """Return a dict from location, of those given, to the instance types that are in stock there on a market."""
        spot = "true" if market == "spot" else "false"
        got = self._list("/instance-availability", params={"is_spot": spot})
        return {each["location_code"]: each["availabilities"] for each in got if each["location_code"] in locations}

    def _funds(self) -> str:
        """Return the account's balance as text, such as "12.50 usd left". Raises FundsError if it is not positive."""
        balance = self._ask("/balance")
        amount = float(balance["amount"])
        text = f"{amount:.2f} {balance['currency']} left"
        if amount > 0:
            return text
        raise REFUSALS.error("to rent anything", "insufficient_funds", text)

    def _images(self) -> str:
        """Return the images that machines with accelerators start from, as text. Raise UsageError if one is missing."""
        there = {str(each["image_type"]) for each in self._list("/images")}
        if self.image is not None and self.image not in there:
            raise UsageError(f"Verda has no image {self.image!r}; choose one of {', '.join(sorted(there))}")
        chosen_for: dict[str, list[str]] = {}
        for record in self._list("/instance-types", params={"currency": "usd"}):
            has = _catalog.accelerator(record)
            if has is not None:
                name = self.image or _catalog.image(record.get("supported_os") or (), has)
                chosen_for.setdefault(name if name in there else "", []).append(record["instance_type"])
        if lacking := chosen_for.pop("", None):
            raise UsageError(
                f"Verda has no Ubuntu image for {', '.join(lacking)}; name another image with Verda(image=…) for these"
            )
        return ", ".join(f"{name} ({len(types)} types)" for name, types in chosen_for.items())

    def _gpus(self) -> Finding:
        """Return a finding, without a title, that says how many of Verda's GPUs skypool knows."""
        records = self._list("/instance-types", params={"currency": "usd"})
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for each in records:
            if each["gpu"]["number_of_gpus"]:
                names[_catalog.accelerator(each) is not None].add(str(each["gpu"]["description"]).partition("x ")[2])
        return preflight.hardware(len(names[True]), names[False])

    def _date(self) -> str:
        """Send a request to Verda, and return the header "Date" of the answer."""
        _, headers = self._api.reply("GET", "/locations")
        return str(headers["Date"])

    # --- create ----------------------------------------------------------------------------------------------

    def _deploy_request(self, offer: Offer, order: Order) -> _requests.Deploy:
        """Return the fields that the create requests of an order share. Create the SSH key and script if missing."""
        if not offer.detail["image"]:
            raise UsageError(
                f"Verda has no Ubuntu image for {offer.instance_type}: name another image with Verda(image=…)"
            )
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
        """Return the id of the "ssh-key" or "script" that `name` stands for. Create it from `told` if it is missing."""
        for each in self._list(_PATHS[kind]):
            found = label(each["name"], name.pool)
            if found and found.token == name.token:
                return str(each["id"])
        return _api.made(self._api, _PATHS[kind], f"a {kind}", {**told, "name": str(name)})

    def _made(self, order: Order, node: int, common: _requests.Deploy) -> Instance:
        """Create the machine of one node by one request. If the reply is lost, look for the machine for up to 6 s."""
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
            # the reply was lost, and lists may not have the newest machines yet
            found = retry.soon(look, _LAG)
            if found is None:
                raise
            return found
        return tags.instance(self.name, id_, said, 0, "starting", {"tags": said}, region=_HERE)

    def _refused(self, made: Mapping[int, Instance]) -> dict[int, ProviderError]:
        """Wait up to 10 s until Verda has found or refused each machine. Return a dict from refused node to error."""
        statuses: dict[int, str] = {}

        def look() -> bool:
            known = {each["id"]: each["status"] for each in self._list("/instances")} if made else {}
            for node, instance in made.items():
                statuses[node] = known.get(instance.id, "new")  # not listed: not decided yet
            return _NEW.isdisjoint(statuses.values())

        retry.soon(look, _ORDERED)
        return {node: _unfit(made[node], status) for node, status in statuses.items() if status in _GONE}

    # --- find and end ----------------------------------------------------------------------------------------

    def _found(self, region: str, pool: str | None) -> Iterator[Instance]:
        """Yield the machines of a pool, or of all pools of this user. One that neither starts nor runs is "ending"."""
        for record in self._list("/instances"):
            said = tags.read(record.get("tags") or (), "key", "value")
            if not tags.ours(said, pool, _api.LONGEST) or record["status"] in _GONE:
                continue
            state: Literal["starting", "running", "ending"] = _STATES.get(record["status"], "ending")
            latest = {**said, tags.UNTIL: max(said.get(key, "") for key in _UNTILS)}
            yield tags.instance(self.name, record["id"], latest, 0, state, {"tags": said}, region=_HERE)

    def _address(self, instance: Instance) -> str:
        """Return a machine's public address. Raise ProviderError if it gets none within 15 minutes."""

        def look() -> str:
            record = self._ask(f"/instances/{instance.id}", what=f"to show {instance.id}")
            if record["status"] not in _STATES:
                raise _unfit(instance, record["status"])
            if not record["ip"]:
                raise REFUSALS.error(
                    f"to keep machine {instance.id}", "pending", "the machine has no public address yet"
                )
            return str(record["ip"])

        return retry.patiently(look, _ADDRESS, "pending")

    def _terminate(self, region: str, instances: Iterable[str]) -> list[str]:
        """Ask Verda to end machines, without waiting, and return the ids of those that have not ended yet."""
        left = {}
        for id_ in instances:
            # by id, because a list may lack the newest machines
            record = quietly(partial(self._ask, f"/instances/{id_}"))
            if record and record["status"] not in _GONE:
                left[id_] = record
        for id_, record in left.items():
            if record["status"] != "deleting":
                # Verda refuses while a machine is being set up: the next call asks again
                quietly(partial(self._terminate_one, id_, record))
        return list(left)

    def _terminate_one(self, id_: str, record: Mapping[str, Any]) -> None:
        """Ask Verda to delete a machine, its boot disk and its volumes of pools. Warn of volumes that are kept."""
        boot_disk = {record["os_volume_id"]} if record.get("os_volume_id") else set()
        attached = set(record.get("volume_ids") or ()) - boot_disk
        volumes = [each for each in self._list("/volumes") if each["id"] in attached] if attached else []
        disks = boot_disk | {each["id"] for each in volumes if label(each["name"], None)}
        built_in = {each["id"] for each in volumes if each["type"] in _BUILT_IN} - disks
        request = _requests.delete(id_, disks=disks, built_in=built_in)
        outcomes = self._api.ask("PUT", "/instances", what=f"to end {id_}", json=request)
        for outcome in outcomes or ():
            if outcome.get("error"):
                code = "not_found" if outcome.get("statusCode") == 404 else "forbidden_action"
                raise REFUSALS.error(f"to end {id_}", code, str(outcome["error"]))
        for volume in volumes:
            if volume["id"] not in disks | built_in:
                tracebacks.warn(_KEPT.format(**volume, instance=id_))

    def _renew(self, until: datetime, instance: Instance) -> None:
        """Write the end of the lease into the unused one of two tags, then remove the other. One always exists."""
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
        """Yield the SSH keys, scripts and volumes of one pool, or of all. Volumes of existing machines are left out."""
        living = {each["id"] for each in self._list("/instances") if each["status"] not in _GONE}
        until = {each.pool: each.until for each in self.instances(pool=pool)}
        for kind, path in (*_PATHS.items(), ("volume", "/volumes/trash")):
            for each in self._list(path):
                name = label(each["name"], pool)
                if name is None or each.get("instance_id") in living:
                    continue
                times = [time for time in (name.until, until.get(name.pool)) if time]
                last = max(times, default=None)  # a pool's lease may have been renewed
                yield Leftover(self.name, kind, each["id"], name.pool, _HERE, last, {"token": name.token})

    def _remove(self, leftover: Leftover) -> None:
        path = f"{_PATHS[leftover.kind]}/{leftover.id}"
        if leftover.kind == "volume":
            self._drop(path, json={"is_permanent": True})
        else:
            self._drop(path)


def _unfit(instance: Instance, status: str) -> ProviderError:
    """Return the error for a machine that cannot be used because of its status, which decides the error's class."""
    return REFUSALS.error(f"to keep machine {instance.id}", status, f"the machine's status is {status}")
