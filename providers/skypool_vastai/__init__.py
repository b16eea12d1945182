"""Driver for Vast.ai: containers on machines of strangers, on demand and for bids, billed by the second.

API: https://docs.vast.ai/api-reference (read 2026-11-21). Credentials: VastAI(api_key=...), $VAST_API_KEY, or the file
that `vastai set api-key` wrote. A stopped instance is still billed for its disk: only its destruction ends the cost.
Each instance gets a key of its own from Vast.ai, with which it can request its own destruction.

Words of this package:

- instance: a container on a machine. Its label is a text in which skypool stores the pool, the node number and more.
- bid: the price that a user offers for a spot machine, for each hour and without the disk.
- proxy: Vast.ai's ssh server, by which an instance without a port of its own is reached.
- lease: the time for which an instance lives on without hearing from its client.
- guard: the process in an instance that destroys it at the end of the lease.
- need, offer, order: the requirements of a node, a machine for rent with its price, and the request to rent a machine
  for a node (`skypool.model`). A node is a rented machine of a pool.
- market: "on-demand" or "spot".
- settings: the arguments of `VastAI`.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, ClassVar

from skypool import errors, tracebacks
from skypool.drivers import blocklist, preflight, retry, settings, ssh_machine, tags
from skypool.drivers.contract import Abilities, undo
from skypool.drivers.regional import each_done
from skypool.errors import NoAnswer, OfferGone, ProviderError, UsageError
from skypool.model import Access, Bill, Finding, Instance, Market, Need, Offer, Order
from skypool_vastai import _api, _catalog, _instances, _requests

_LAG = 6.0
"""Seconds for which a new instance is looked for in lists if the reply to its create request was lost."""

_YOUNG = 60.0
"""Age in seconds up to which Vast.ai's list of instances may lack an instance."""

_SHARED = 3.0
"""Maximum age in seconds of a list of instances that is used to look up an address."""

_MAPPING = 60.0
"""Seconds that an instance may take, after it runs, until a port of its machine is mapped to its SSH server."""

_KEYING = 420.0
"""Seconds for which an SSH server that Vast.ai starts may show another host key than the pool's."""

_WAYS = ("any", "direct", "proxy")
"""Values of the setting `ssh`."""

_SETTINGS = {"ssh": ("any|direct|proxy", "'any', 'direct' or 'proxy'", False)}
"""A dict from setting to (regular expression of its values, examples for messages, True if a list is allowed)."""

_IMAGE = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
"""Default Docker image: Python of the client's version."""

_NO_ASK = 1
"""The id of an offer that does not exist: ids are counted up, and were over 10,000,000 in 2026."""

_NO_BID = 0.0001
"""A bid in USD per hour that Vast.ai does not accept. The lowest one that it accepts is 0.001."""

_NAMES_ASK = rf"no_such_ask|\bid {_NO_ASK}\b"
"""Regular expression of refusals that name a machine that does not exist."""

_IMPOSSIBLE: tuple[tuple[str, Market, dict[str, object], tuple[type[ProviderError], ...], str], ...] = (
    ("a machine that does not exist", "on-demand", {"ask": _NO_ASK}, (OfferGone,), _NAMES_ASK),
    ("a bid for a machine that does not exist", "spot", {"ask": _NO_ASK}, (OfferGone,), _NAMES_ASK),
    ("a bid below the lowest one", "spot", {"price": _NO_BID}, (errors.CapacityError, ProviderError), r"\bbid|price"),
)
"""Requests that Vast.ai must refuse.

Each has a text that says what is impossible, the market, the values that replace those in an offer's `detail`, the
classes of the expected error, and a regular expression that must match in the error's text.
"""

_CUT = (
    f"Vast.ai's search returns the {_requests.MOST_OFFERS} cheapest machines only; dearer ones in the regions "
    "or with the vCPUs and memory that you ask for may be missing: name an accelerator to search for fewer"
)
"""The warning for a search that has more results than Vast.ai returns."""

_UNUSABLE = ("broken", "offline", "pending", "unmapped")
"""Codes of errors that are the machine's fault. The file errors.csv of this package explains the codes."""


@settings.settings_named
@dataclass(frozen=True)
class VastAI:
    """A driver that rents machines from Vast.ai. Creating the object sends no request.

    Args:
        api_key: key from https://cloud.vast.ai/manage-keys/. None takes $VAST_API_KEY, or the key that `vastai set
            api-key` wrote.
        min_reliability: minimum reliability of a machine, from 0 to 1, as Vast.ai computes it.
        verified: True rents only machines that Vast.ai has tested.
        bid: factor of at least 1: the bid for a spot machine is the current minimum bid times this factor.
        image: Docker image. It needs sh, base64, gzip, and either an SSH server or one of apt, apk and dnf. None takes
            the official image of the client's Python version. The base= of an Image takes precedence.
        disk_gb: disk size of a machine in GB if the pool asks for none; at least 1.
        download_gb, upload_gb: GB that each machine is assumed to receive and to send: its image, packages and data.
            Most hosts charge for traffic, so these decide the estimated cost of a machine's start.
        ssh: "any" connects to a machine's own port, or through Vast.ai's proxy if the machine has no port. "direct"
            leaves out machines without a port. "proxy" always connects through the proxy. The machine's host key is
            checked in each case.

    Raises:
        UsageError: a value is not valid.
    """

    api_key: str | None = field(default=None, repr=False)
    min_reliability: float = 0.98
    verified: bool = True
    bid: float = 1.1
    image: str | None = None
    disk_gb: int = 32
    ssh: str = "any"
    download_gb: float = 10.0
    upload_gb: float = 1.0
    name: ClassVar[str] = "vastai"
    abilities: ClassVar[Abilities] = Abilities(ends_itself=True, spot=True)
    offers_keep: ClassVar[float] = 60.0
    ending: ClassVar[float] = 20.0
    loading: ClassVar[float] = 900.0

    def __post_init__(self) -> None:
        settings.plain(self, api_key=str, min_reliability=float, bid=float, disk_gb=float, image=str, verified=bool)
        settings.plain(self, download_gb=float, upload_gb=float)
        for name, gb in (("download_gb", self.download_gb), ("upload_gb", self.upload_gb)):
            if not 0 <= gb < math.inf:
                raise UsageError(f"{name} must be at least 0, such as 10, not {gb!r}: it is GB of traffic of a machine")
        if not 0 <= self.min_reliability <= 1:
            raise UsageError(f"min_reliability must be from 0 to 1, such as 0.98, not {self.min_reliability!r}")
        if not self.bid >= 1:
            raise UsageError(f"bid must be at least 1, not {self.bid!r}: it is multiplied by the lowest possible bid")
        if not self.disk_gb >= 1:
            raise UsageError(f"disk_gb must be at least 1, not {self.disk_gb!r}")
        settings.settle(self, _SETTINGS, {"ssh": _WAYS})

    def offers(self, need: Need) -> Iterable[Offer]:
        """Yield an offer for each machine that could serve as a node.

        Machines that failed for this user in the last day are left out. So are machines with a GPU driver that is too
        old, or without a price. One search is sent for each market that the need accepts. If Vast.ai has none of the
        accelerators, no search is sent and nothing is yielded.

        A search returns the 512 cheapest machines, wherever they are. A RuntimeWarning is issued if there may be more
        machines, and the need has requirements, such as a region, that a search does not take.

        Args:
            need: the requirements of a node.

        Raises:
            CredentialsError: there is no API key.
            ProviderError: a search was refused or got no answer.
        """
        failed = blocklist.known(self.name)
        disk_gb = need.disk_gb or self.disk_gb
        for market in need.markets:
            asked = _requests.search(
                need,
                market,
                disk_gb=disk_gb,
                min_reliability=self.min_reliability,
                verified=self.verified,
                direct=self.ssh == "direct",
            )
            if asked is None:
                continue
            reply = self._account.ask("POST", "/api/v0/bundles/", what="a search", json=asked)
            if len(reply["offers"]) >= _requests.MOST_OFFERS and (need.regions or need.vcpus or need.memory_gib):
                tracebacks.warn(_CUT)
            for record in reply["offers"]:
                if record["machine_id"] in failed:
                    continue
                offer = _catalog.offer(record, market, disk_gb, self.bid, self.ssh, (self.download_gb, self.upload_gb))
                if offer is not None:
                    yield offer

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Rent the machine of an offer, for the first node of the order. An offer is a single machine.

        Does not wait until the machine runs. If the same order has created instances before, these are found by their
        labels and returned, and nothing is rented. Instances of the order that are ending do not count: their
        destruction is requested again.

        Returns:
            a list of the one new instance, or of the instances found.

        Raises:
            OfferGone: another customer took the machine, or the machine failed in the last day.
            ProviderError: Vast.ai refused, or gave no answer.
            StillRunning: Vast.ai refused, and an instance that it had created could not be destroyed.
        """
        instances = self._ordered(order) or [self._create(offer, order)]
        return [replace(each, offer=offer) for each in instances]

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Return the existing instances of this user's pools, also those that are ending.

        The instances are found by the labels that pools write. The list is empty if there are none.

        Args:
            pool: the name of a pool, for only the instances of this pool that were rented from this computer. None
                means all pools, from any computer.

        Raises:
            ProviderError: the list was refused, or there was no answer.
        """
        return list(_instances.ours(self._account.instances(), pool))

    def access(self, instance: Instance) -> Access:
        """Return how to reach an instance by ssh: at the machine's own port, or through Vast.ai's proxy.

        Waits up to `loading` (900) seconds until the image is pulled, and then up to a minute until the port is mapped.

        Raises:
            ProviderError: the instance has ended or failed, so that it gets no address, or it has got none in time.
        """
        mapped = partial(retry.patiently, partial(self._address, instance), _MAPPING, "unmapped")
        host, port = retry.patiently(mapped, self.loading, "pending")
        keying = _KEYING if instance.detail["proxied"] else 0.0
        return ssh_machine.access(instance, host, user="root", port=port, keying=keying)

    def terminate(self, instances: Sequence[Instance]) -> None:
        """Destroy these instances, all in parallel, and wait up to `ending` (20) seconds until they are gone.

        Does not raise for an instance that no longer exists. Does nothing for an empty list.

        Raises:
            StillRunning: some instances may still exist. The error names these instances and the reasons.
        """
        young = {each.id for each in instances if _is_young(each)}
        there = partial(self._ids, [each.id for each in instances])
        ssh_machine.terminate_and_wait(instances, self._account.terminate, there, self.ending, young)

    def renew(self, pool: str, until: datetime) -> None:
        """Write the new end of the lease into the label of each instance of a pool, all in parallel.

        Only instances that were rented from this computer are changed.

        Args:
            pool: name of the pool.
            until: the new end of the lease.

        Raises:
            ProviderError: one label could not be written. If several could not, an ErrorGroup is raised. All other
                labels have been written.
        """

        def write(instance: Instance) -> None:
            before, _, _ = instance.detail["label"].rpartition("=")
            self._account.relabel(instance.id, f"{before}={tags.stamp(until)}")

        each_done(write, self.instances(pool=pool), "not all labels could be renewed")

    def rejected(self, instance: Instance, why: Exception) -> None:
        """Exclude a machine from further offers for a day if an error was the machine's fault. Otherwise do nothing.

        Examples of such faults are that the machine never answered, or that its SSH server, container, GPUs or driver
        do not work. The exclusion is for all processes of this user. The instance is not ended.

        Args:
            instance: an instance on the machine.
            why: the error with which the instance failed.
        """
        if _is_its_own_fault(instance, why):
            blocklist.note(self.name, instance.detail["machine"], str(why))

    def check(self) -> Iterable[Finding]:
        """Yield findings about the account, and about what Vast.ai sells. Only reads.

        The findings are about ssh, the API key, the credit, the clock, GPUs, and the excluded machines. This takes one
        of the searches that Vast.ai allows in a day. A failed check is a finding, too, and does not raise. If Vast.ai
        refuses the key, only the checks of ssh, the API key and the credit are made.
        """
        return preflight.findings(
            {preflight.SSH: preflight.openssh, "credentials and credit": self._who},
            {
                "clock": lambda: preflight.clock(self._account.date()),
                "GPUs": self._gpus,
                "machines left out": self._left_out,
            },
        )

    def prove_creates(self) -> Iterable[Finding]:
        """Try to rent what Vast.ai must refuse, and yield a finding for each attempt. Does not raise.

        Each request is that of a pool with one field changed. Two name a machine that does not exist, and one has a bid
        below the lowest one that Vast.ai accepts. An instance that Vast.ai creates anyway is destroyed.
        """
        for what, market, changes, kinds, names in _IMPOSSIBLE:
            order = preflight.impossible_order(Need(market=market))
            try:
                offer = next(iter(self.offers(order.need)), None)
            except Exception as e:  # noqa: BLE001 - any error is a finding to show
                yield preflight.failure("a search for machines", e)
                return
            if offer is None:
                yield Finding(f"{what} is refused", True, "not tried, because no machine is for rent")
                continue
            impossible = replace(offer, detail={**offer.detail, **changes})
            create = partial(self._create, impossible, order)
            yield preflight.refusal(what, create, kinds, self.terminate, names=names)

    def billed(self, instances: Sequence[str], since: datetime, until: datetime) -> Bill:
        """Return the sum of what Vast.ai charges for instances: GPU, disk and traffic.

        https://docs.vast.ai/api-reference/billing/show-charges (read 2026-11-24). Vast.ai rounds the charges of each
        instance to 0.001 USD. The page does not say how soon Vast.ai shows charges. If the charges of an instance are
        missing, the sum is None.

        Args:
            instances: ids of the instances.
            since: a time before the first instance was rented.
            until: a time after the last instance had ended.

        Raises:
            ProviderError: Vast.ai refused the request, or did not answer.
        """
        charges = self._account.charges(since, until)
        missing = [id for id in instances if id not in charges]
        if missing:
            return Bill(
                None,
                f"Vast.ai does not show charges of {', '.join(missing)} yet; look at "
                "https://cloud.vast.ai/billing/ in an hour",
            )
        usd = sum(charges[id] for id in instances)
        return Bill(usd, "Vast.ai's charges for GPU, disk and traffic, rounded to 0.001 USD for each instance")

    # --- helpers ---------------------------------------------------------------------------------------------

    @property
    def _account(self) -> _api.Account:
        return _api.account(self.api_key)

    def _who(self) -> str:
        """Return the name of the account and its credit in US dollars as text. Raises FundsError without credit."""
        user: dict[str, Any] = self._account.ask("GET", "/api/v0/users/current/", what="to show the account")
        name = user.get("username") or user.get("id")
        credit = float(user.get("credit") or 0)
        text = f"{name}, with ${credit:.2f} of credit"
        if credit > 0:
            return text
        raise self._account.error("to rent anything", "402", text)

    def _gpus(self) -> Finding:
        """Return a finding, without a title, that says how many GPU types for rent now skypool knows."""
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for each in self.offers(Need()):
            name, _, count = each.instance_type.rpartition("x")
            if count != "0":
                names[each.accelerator is not None].add(name)
        return preflight.hardware(len(names[True]), names[False])

    def _left_out(self) -> str:
        """Return the machines that failed in the last day, with the reasons, as text; "none" if there are none."""
        return ", ".join(f"{id}: {why}" for id, why in blocklist.known(self.name).items()) or "none"

    def _ids(self, ids: Sequence[str]) -> set[str]:
        """Return the ids of all instances of the account. Check `ids` one by one if the list had several pages."""
        account = self._account
        listed = account.instances()
        there = {str(each["id"]) for each in listed}
        # the list may have changed between its pages: ask for each of `ids` that it lacks
        if listed.pages > 1:
            there.update(each for each in ids if each not in there and account.exists(each))
        return there

    def _ordered(self, order: Order) -> list[Instance]:
        """Return the instances that an order has created. Those that are ending are left out, and destroyed again."""
        kept = []
        for each in self.instances(pool=order.pool):
            if each.token != order.token or each.node not in order.nodes:
                continue
            if each.state == "ending":
                self._account.terminate(each.id)
            else:
                kept.append(each)
        return kept

    def _create(self, offer: Offer, order: Order) -> Instance:
        """Rent the machine of an offer, and return the new instance. After a lost reply, look for it for up to 6 s."""
        account = self._account
        machine = offer.detail["machine"]
        what = f"to rent {offer.instance_type} in {offer.region} ({offer.zone})"
        if why := blocklist.known(self.name).get(machine):
            raise account.error(what, "failed_lately", why)
        image = order.need.bases.get(self.name) or self.image or _IMAGE
        asked = _requests.create(offer, order, image=image, base=account.base)
        refused: ProviderError | None = None
        order.asking(order.nodes[0])
        try:
            reply = account.once("PUT", f"/api/v0/asks/{offer.detail['ask']}/", what=what, json=asked)
            if not reply.get("new_contract"):
                raise account.error(what, *_api.said(502, reply))
            ids = [reply["new_contract"]]
        except (NoAnswer, OfferGone) as e:
            return retry.patiently(partial(self._made, order, e), _LAG)
        except ProviderError as e:
            refused = e
            # instances that exist although Vast.ai refused; they are destroyed below
            ids = re.findall(r"\(new_contract (\d+)\)", e.text)
        records = [
            {
                "id": id,
                "machine_id": machine,
                "label": asked["label"],
                "image_runtype": asked["runtype"],
                "start_date": time.time(),
                "geolocation": offer.region,
            }
            for id in ids
        ]
        instances = list(_instances.ours(records, order.pool))
        order.made(*(replace(each, offer=offer) for each in instances))
        if refused is not None:
            undo(self.terminate, order, instances)
            raise refused
        return instances[0]

    def _made(self, order: Order, error: ProviderError) -> Instance:
        """Return the instance that an order created although its request raised `error`. If there is none, raise it."""
        if found := self._ordered(order):
            return found[0]
        raise error

    def _address(self, instance: Instance) -> tuple[str, int]:
        """Return (host, port) of an SSH server. A ProviderError with code "pending" or "unmapped" means: not yet."""
        records = self._account.instances(_SHARED)
        record = next((each for each in records if str(each["id"]) == instance.id), None)
        if record:
            address = _instances.address(record, instance.detail["proxied"])
            if address:
                return address
        what = f"to keep instance {instance.id}"
        if record is None and not _is_young(instance):
            raise _api.REFUSALS.error(what, "gone", "there is no such instance")
        raise _api.REFUSALS.error(what, *_instances.trouble(record or {}))


def _is_young(instance: Instance) -> bool:
    """Return True if an instance is less than a minute old, so that the list of instances may lack it."""
    return time.time() - (instance.created_at or 0.0) < _YOUNG


def _is_its_own_fault(instance: Instance, why: Exception) -> bool:
    """Return True if the error `why` of an instance is its machine's fault. The end of a spot machine is no fault."""
    if getattr(why, "step", "") in ("health", "nvidia"):
        return True
    if isinstance(why, errors.CapacityError):
        return why.code in _UNUSABLE
    if isinstance(why, errors.HostKeyMismatch):
        return bool(instance.detail["proxied"])  # otherwise another machine on the way has answered
    return isinstance(why, errors.ConnectionLost) and not isinstance(why, errors.NodeInterrupted)
