"""RunPod: pods, which are containers, with GPUs or without, on demand and interruptible, billed by the second.

API: https://docs.runpod.io/sdks/graphql/manage-pods, https://graphql-spec.runpod.io (read 2026-11-21).
GraphQL is asked for nearly all: it alone has stock and price by number of GPUs, interruptible pods, `terminateAfter`,
and it lists and ends all that it made. RunPod's own SDK asks it, too, but has neither these pods nor `terminateAfter`,
nor stock (runpod 1.12.0, read 2026-11-22). REST v2, which has none of that, gives pods new names: in the place of tags,
names are what is renewed. `terminateAfter` cannot be put off, so it is the lifetime's alone; the lease is kept by the
guard in the pod, which ends it with the key that RunPod gives each pod for itself.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.resources import files
from typing import Any, ClassVar

from skypool.drivers import preflight, retry, settings, ssh_machine, tags, userdata
from skypool.drivers.contract import Abilities, undo
from skypool.drivers.regional import Regional, chosen, each_done, everywhere
from skypool.errors import NoAnswer, UsageError
from skypool.model import Access, Finding, Instance, Leftover, Need, Offer, Order
from skypool_runpod import _api, _catalog
from skypool_runpod._catalog import FACTS

_PULLING = 1200.0
"""Seconds in which a pod's image is pulled and its port is mapped."""

_LAG = 6.0
"""Seconds in which lists may lack a pod that was made."""

_BOOT = 600.0
"""Seconds that a pod may need to boot: its lifetime is counted from then on."""

_FRESH = 60.0
"""Age in seconds of a name up to which a renewal keeps it."""

_TOLERANCE = 1.01
"""Factor by which a pod may cost more than was offered."""


@settings.settings_named
@dataclass(frozen=True)
class RunPod(Regional):
    """Rent from RunPod.

    Args:
        cloud: "secure", RunPod's data centres; "community", machines of strangers, whose answers are trusted as data
            only; "any".
        region: data centres such as "CA-MTL-1", in the community cloud countries such as "CA"; None is any.
        image: of the containers, with sh, base64, gzip, and curl or python3; None is one for the accelerator. An
            Image's base= comes first.
        min_cuda: what the driver of a pod's host must do, such as "12.8"; None is what the usual image needs.
        volume: id of a network volume, seen at /workspace: pods are in its data centre then.
        api_key: None is $RUNPOD_API_KEY, or the one in ~/.runpod/config.toml.
    """

    cloud: str = "secure"
    region: str | Sequence[str] | None = None
    image: str | None = None
    min_cuda: str | None = None
    volume: str | None = None
    api_key: str | None = field(default=None, repr=False)
    name: ClassVar[str] = "runpod"
    abilities: ClassVar[Abilities] = Abilities(ends_itself=True, spot=True)

    def __post_init__(self) -> None:
        settings.settle(self, FACTS["settings"], {"cloud": FACTS["clouds"]})
        if self.volume and self.cloud != "secure":
            raise UsageError("network volumes are in RunPod's own data centres alone: cloud='secure'")

    def offers(self, need: Need) -> Iterable[Offer]:
        """Return so many GPUs as are asked for, in each cloud; without an accelerator CPU instances, on demand."""
        api = self._api()
        places = self._places(need)
        sizes = _catalog.gpus(need)
        if sizes:
            question, shape = FACTS["stock"]["gpu"]
            given = {"gpus": _catalog.kinds(need)}
        else:
            question, shape = FACTS["stock"]["cpu"]
            given = {}
            places = [(cloud, place) for cloud, place in places if cloud == "secure" and "on-demand" in need.markets]
            flavors = api.ask("Flavors")["cpuFlavors"] if places else ()
            sizes = list(_catalog.cpus(need, flavors))

        def sold(asked: _catalog.Terms) -> Iterable[Offer]:
            told = api.ask(question, this=settings.filled(shape, asked), **given)["sold"]
            return _catalog.offers(need, asked, told or ())

        for size in sizes:
            _, size["cuda"] = self._image(need, size["runtime"])
        return everywhere(sold, [_catalog.where(cloud, place) | size for cloud, place in places for size in sizes])

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Find the pods that are there with this token, and make those that are missing, one after the other.

        RunPod takes no token. After a create that is not answered, the pod is looked for by its name for a while, as
        lists may lag. If it is not found, that is `NoAnswer`, and the same order that comes again looks first. A pod
        that is there twice is ended.
        """
        found: list[Instance] = []
        there: dict[int, Instance] = {}
        for pod in self.instances(pool=order.pool):
            if pod.token == order.token:
                found.append(pod)
                there[pod.node] = pod
        missing = [node for node in order.nodes if node not in there]
        outcomes = retry.in_turn(partial(self._made, offer, order), missing)
        for outcome in outcomes:
            if isinstance(outcome, Instance):
                there[outcome.node] = outcome
            elif isinstance(outcome, NoAnswer):
                raise outcome
        keep: list[Instance] = []
        for node in order.nodes:  # pods after a gap are of no use
            if node not in there:
                break
            keep.append(there[node])
        surplus = [each for each in (*found, *there.values()) if each not in keep]
        undo(self.terminate, order, surplus)
        if not keep:
            raise next(each for each in outcomes if isinstance(each, Exception))
        return [replace(each, offer=offer) for each in keep]

    def access(self, instance: Instance) -> Access:
        """Return access by ssh to the pod's mapped port, never by RunPod's proxy, once its image is there.

        Raises:
            ProviderError: the pod has ended, or its port was not mapped in time.
        """

        def look() -> tuple[str, int]:
            record = self._api().ask("Pod", id=instance.id)["pod"] or {"name": "", "desiredStatus": "gone"}
            status = record["desiredStatus"]
            if status not in FACTS["states"]:
                raise _api.REFUSALS.error(f"ssh to {instance.id}", status, f"the pod is {status}")
            for each in _catalog.pods([record], None, "*"):
                if each.detail["ssh"]:
                    host, port = each.detail["ssh"]
                    return host, port
            raise _api.REFUSALS.error(f"ssh to {instance.id}", "pending", "its port 22 is not mapped")

        host, port = retry.patiently(look, _PULLING, "pending")
        return ssh_machine.access(instance, host, user="root", port=port)

    def renew(self, pool: str, until: datetime) -> None:
        """Give the pool's pods new names, unless they got theirs within the last minute."""
        fresh = until - timedelta(seconds=_FRESH)
        names: dict[str, str] = {}
        for pod in self.instances(pool=pool):
            if pod.until is None or not fresh < pod.until <= until:
                names[pod.id] = _catalog.name(pool, pod.token, pod.node, until)

        def rename(id: str) -> None:
            self._api().rename(id, names[id])

        each_done(rename, names, "not all names could be renewed")

    def check(self) -> Iterable[Finding]:
        """Check that the key is known, and say what it may spend."""
        return preflight.findings({"ssh on this machine": preflight.openssh, "account": self._account})

    def _account(self) -> str:
        """Return what the account has left and what it spends.

        Raises:
            FundsError: it has nothing left.
        """
        me = self._api().ask("Account")["myself"]
        name = me["id"]
        balance = me["clientBalance"]
        if balance <= 0:
            raise _api.REFUSALS.error("to rent", "402", f"the balance of {name} is {balance:.2f} USD")
        most = "no limit" if me["spendLimit"] is None else f"at most {me['spendLimit']:g}"
        spends = me["currentSpendPerHr"] or 0
        return f"{name} has {balance:.2f} USD left; it spends {spends:.2f} USD an hour, of {most}"

    def _image(self, need: Need, runtime: str) -> tuple[str, str | None]:
        """Return the image of a container, and the CUDA that it needs of the host's driver."""
        own = need.bases.get(self.name) or self.image
        if own:
            return own, self.min_cuda
        image, cuda = FACTS["images"].get(runtime, FACTS["images"]["none"])
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return image.format(python=python), self.min_cuda or cuda

    def _places(self, need: Need) -> list[tuple[str, str]]:
        """Return each cloud with each place to ask for. Without places asked for, the place is "" for any."""
        clouds = FACTS["clouds"][self.cloud]
        if not (self.volume or self.region or need.regions):
            return [(cloud, "") for cloud in clouds]
        there = self._api().ask("Places")
        centers = {each["id"] for each in there["dataCenters"] if each["listed"]}
        if self.volume:
            volumes = {each["id"]: each["dataCenterId"] for each in there["myself"]["networkVolumes"] or ()}
            if self.volume not in volumes:
                yours = ", ".join(volumes) or "none"
                raise UsageError(f"there is no network volume {self.volume!r}; yours: {yours}")
            centers = {volumes[self.volume]}
        known = {"secure": centers, "community": there["countryCodes"]}
        everywhere_known: set[str] = set()
        for cloud in clouds:
            everywhere_known.update(known[cloud])
        named = chosen(everywhere_known, self.region or (), need.regions)
        return [(cloud, each) for cloud in clouds for each in named if each in known[cloud]]

    def _made(self, offer: Offer, order: Order, node: int) -> Instance:
        """Make one pod. A pod that costs more than was offered is ended again.

        Raises:
            NoAnswer: the reply was lost, and the pod was not found.
        """
        request = self._request(offer, order, node)
        if offer.detail["instance"]:
            create = "Cpu"
        elif offer.market == "spot":
            create = "Spot"
        else:
            create = "OnDemand"
        what = f"to rent {offer.instance_type}"
        lost = _api.REFUSALS.error("to tell of a new pod", "502", "silence")
        order.asking(node)
        try:
            record = self._api().once(create, what, input=request)["pod"]
        except NoAnswer as e:
            lost = e
            record = None

        def look() -> Instance:
            found = self.instances(pool=order.pool) if record is None else _catalog.pods([record], order.pool, "*")
            for each in found:
                if each.token == order.token and each.node == node:
                    return each
            raise lost

        made = replace(retry.patiently(look, _LAG), offer=offer)
        order.made(made)
        usd = made.detail["price"]
        if usd > offer.usd_per_hour * _TOLERANCE:
            undo(self.terminate, order, [made])
            raise _api.REFUSALS.error(what, "price", f"it costs {usd} USD/h, and {offer.usd_per_hour:.4f} was offered")
        return made

    def _request(self, offer: Offer, order: Order, node: int) -> Any:
        """Return the input of the GraphQL mutation that makes a pod."""
        image, cuda = self._image(order.need, offer.accelerator.runtime if offer.accelerator else "none")
        end = f"url={shlex.quote(_api.base())}/graphql\n{(files('skypool_runpod') / 'end.sh').read_text('utf-8')}"
        last = None
        if order.lifetime is not None:
            last = datetime.now(UTC) + timedelta(seconds=order.lifetime + _BOOT)
        told = {
            **_catalog.where(offer.zone, offer.region),
            **next(iter(_catalog.gpus(order.need)), {}),
            **offer.detail,
            "name": _catalog.name(order.pool, order.token, node, order.until),
            "image": image,
            "cuda": cuda,
            "start": shlex.join(["sh", "-c", userdata.UNPACK]),
            "script": userdata.packed(userdata.start_script(order, end=end)),
            "last": tags.stamp(last) or None,
            "bid": offer.detail["price"] if offer.market == "spot" else None,
            "volume": self.volume,
            "mount": "/workspace" if self.volume else None,
        }
        shape = FACTS["pod"] | FACTS["cpu pod" if told["instance"] else "gpu pod"]
        return settings.filled(shape, told)

    def _api(self) -> _api.Api:
        return _api.api(_api.key(self.api_key), _api.base())

    def _regions(self) -> Sequence[str]:
        return ("RunPod",)

    def _found(self, region: str, pool: str | None) -> list[Instance]:
        return _catalog.pods(self._api().ask("Pods")["myself"]["pods"] or (), pool, tags.owners(pool))

    def _left(self, region: str, pool: str | None) -> Sequence[Leftover]:
        return ()  # pods are all there is

    def _terminate(self, region: str, instances: Mapping[str, Instance]) -> dict[str, str]:
        """End pods, and return those that have not ended, each with the reason.

        A pod that RunPod does not know has ended, unless it is listed all the same.
        """
        outcomes = retry.at_once(lambda id: self._api().ask("End", f"to end {id}", id=id), instances)
        failed: dict[str, Exception] = {}
        for id, outcome in zip(instances, outcomes, strict=True):
            if isinstance(outcome, Exception) and "not found" not in str(outcome).lower():
                failed[id] = outcome
        if len(failed) == len(instances):
            raise next(iter(failed.values()))
        pods = self._api().ask("Pods")["myself"]["pods"] or ()
        there = {each["id"] for each in pods if each["desiredStatus"] != "TERMINATED"}
        return {id: str(failed.get(id, "")) for id in instances if id in failed or id in there}
