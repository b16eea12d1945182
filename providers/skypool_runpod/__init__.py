"""Driver for RunPod: rents pods (containers with or without GPUs), on demand and spot, billed by the second.

API: https://docs.runpod.io/sdks/graphql/manage-pods, https://graphql-spec.runpod.io (read 2026-11-21).

- RunPod's GraphQL API is used for nearly everything. Only this API has stock and prices by number of GPUs,
  interruptible pods, and `terminateAfter` (the time at which RunPod ends a pod). RunPod's own SDK has none of
  the three (runpod 1.12.0, read 2026-11-22).
- RunPod's API REST v2 is used only to rename pods. Pods have no tags, so their names hold the pool, owner, token, node
  number and end of the lease. A lease is renewed by writing a new name.
- `terminateAfter` cannot be postponed, so it is used only for the pool's lifetime. The lease is enforced by the guard,
  a process in the pod. The guard ends the pod with the key that RunPod gives each pod.
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
"""Seconds that a pod may need until its image is pulled and its ssh port can be reached from outside."""

_LAG = 6.0
"""Seconds after the creation of a pod during which RunPod's lists may lack the pod."""

_BOOT = 600.0
"""Seconds that a pod may need to boot. RunPod ends the pod after the pool's lifetime and this time."""

_FRESH = 60.0
"""A pod is not renamed if the lease in its name ends less than this many seconds before the new end."""

_TOLERANCE = 1.01
"""Largest allowed ratio of a pod's price to the offered price. A more expensive pod is ended."""


@settings.settings_named
@dataclass(frozen=True)
class RunPod(Regional):
    """A driver that rents pods (containers) from RunPod. Its methods block.

    Args:
        cloud: "secure" for RunPod's data centres, "community" for machines of strangers, or "any". Results from
            community machines are only accepted if they can be rebuilt without running code.
        region: a data centre such as "CA-MTL-1", or several; in the community cloud, a country such as "CA". None
            means any.
        image: image of the containers, with sh, base64, gzip, and curl or python3. None takes an image that fits the
            accelerator. The base= of an Image takes precedence.
        min_cuda: lowest CUDA version that the driver of the pod's machine must support, such as "12.8". None takes the
            version that RunPod's own image needs, and any version for other images.
        volume: id of a network volume to mount at /workspace. Pods are then in the volume's data centre. None mounts no
            volume.
        api_key: API key. None takes $RUNPOD_API_KEY, or the key in ~/.runpod/config.toml.

    Raises:
        UsageError: a setting is invalid or unknown, or `volume` is given with another cloud than "secure".
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
            raise UsageError(
                f"volume={self.volume!r} needs cloud='secure', because only RunPod's own data centres have "
                "network volumes"
            )

    def offers(self, need: Need) -> Iterable[Offer]:
        """Return offers of pods with the needed numbers of GPUs, in each allowed cloud and place.

        If the need has no GPUs, return offers of pods with CPUs only, which exist only in the secure cloud and on
        demand. Types that are out of stock are among the offers, marked as not available. The list is empty if nothing
        fits.

        Args:
            need: the requirements of each node.

        Raises:
            UsageError: a place in the settings does not exist, or the account does not have the network volume.
            CredentialsError: there is no API key, or RunPod refuses it.
            ProviderError: RunPod refused or did not answer. ErrorGroup if several requests failed.
        """
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
        """Create the missing pods of an order, one after the other, and return the pods of its nodes, in order.

        Pods that an earlier launch of the same order created are reused. If RunPod refuses a pod, no further pod is
        created, and only the pods of the nodes before it are returned. Other pods of the order are ended.

        RunPod cannot recognize a repeated request. If a request to create a pod gets no answer, the pod is therefore
        looked for by name for about 6 s.

        Args:
            offer: the kind of pod, its place and market, as `offers` returned them.
            order: the node numbers, the pool, and the token by which a repeated order is recognized.

        Raises:
            NoAnswer: the reply was lost and the pod was not found. Repeat the same order, which searches first.
            ProviderError: RunPod refused the first pod, or the pod's price is more than 1 % above the offered price.
            StillRunning: pods that had to be ended again may still run.
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
        for node in order.nodes:  # the pods returned must be those of the first nodes
            if node not in there:
                break
            keep.append(there[node])
        surplus = [each for each in (*found, *there.values()) if each not in keep]
        undo(self.terminate, order, surplus)
        if not keep:
            raise next(each for each in outcomes if isinstance(each, Exception))
        return [replace(each, offer=offer) for each in keep]

    def access(self, instance: Instance) -> Access:
        """Return how to reach a pod by ssh, at the public address to which its port 22 is mapped.

        RunPod's proxy is never used. Waits up to 20 minutes until the pod's image is pulled and the port is mapped.

        Raises:
            ProviderError: the pod has ended, or the port was not mapped within 20 minutes (code "pending").
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
            raise _api.REFUSALS.error(
                f"ssh to {instance.id}", "pending", "port 22 of the pod is not mapped to a public port"
            )

        host, port = retry.patiently(look, _PULLING, "pending")
        return ssh_machine.access(instance, host, user="root", port=port)

    def renew(self, pool: str, until: datetime) -> None:
        """Write the new end of the lease into the names of the pool's pods.

        A pod keeps its name if the end in the name is less than a minute before `until`. A pod whose end is later than
        `until` is renamed, too.

        Args:
            pool: name of the pool.
            until: the new end of the lease.

        Raises:
            ProviderError: one pod could not be renamed. If several could not, an ErrorGroup is raised.
        """
        fresh = until - timedelta(seconds=_FRESH)
        names: dict[str, str] = {}
        for pod in self.instances(pool=pool):
            if pod.until is None or not fresh < pod.until <= until:
                names[pod.id] = _catalog.name(pool, pod.token, pod.node, until)

        def rename(id: str) -> None:
            self._api().rename(id, names[id])

        each_done(rename, names, "not all names could be renewed")

    def check(self) -> Iterable[Finding]:
        """Yield two findings (results of checks): one for the ssh program, and one for the account.

        The finding for the account shows the balance and the spending. The checks run when the first finding is read.
        A failed check gives a finding, too, and does not raise.
        """
        return preflight.findings({"ssh on this machine": preflight.openssh, "account": self._account})

    def _account(self) -> str:
        """Return one line of text with the account's id, balance (USD), spending and spending limit (USD per hour).

        Raises:
            FundsError: the balance is zero or negative.
            CredentialsError: there is no API key, or RunPod refuses it.
        """
        me = self._api().ask("Account")["myself"]
        name = me["id"]
        balance = me["clientBalance"]
        if balance <= 0:
            raise _api.REFUSALS.error("to rent", "402", f"the balance of account {name} is {balance:.2f} USD")
        most = "no limit" if me["spendLimit"] is None else f"limit {me['spendLimit']:g}"
        spends = me["currentSpendPerHr"] or 0
        return f"account {name} has {balance:.2f} USD left and spends {spends:.2f} USD an hour ({most})"

    def _image(self, need: Need, runtime: str) -> tuple[str, str | None]:
        """Return the image of a container, and the CUDA version that its machine's driver must support (None for any).

        The image is the base image of the need, else the setting `image`, else RunPod's own image for the software
        family. The CUDA version is the setting `min_cuda`. Without this setting, the version is the one that
        RunPod's own image needs, and None for other images.

        Args:
            need: the requirements, with the base image.
            runtime: the software family of the accelerator, such as "cuda", "rocm" or "none".
        """
        own = need.bases.get(self.name) or self.image
        if own:
            return own, self.min_cuda
        image, cuda = FACTS["images"].get(runtime, FACTS["images"]["none"])
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return image.format(python=python), self.min_cuda or cuda

    def _places(self, need: Need) -> list[tuple[str, str]]:
        """Return pairs of a cloud ("secure" or "community") and a place in this cloud: a data centre or a country.

        If neither the settings nor the need name a place, the place is "" (any), and no request is sent. With a network
        volume, the place is the volume's data centre. The list may be empty.

        Raises:
            UsageError: the account does not have the network volume, or the settings name a place that does not exist.
        """
        clouds = FACTS["clouds"][self.cloud]
        if not (self.volume or self.region or need.regions):
            return [(cloud, "") for cloud in clouds]
        there = self._api().ask("Places")
        centers = {each["id"] for each in there["dataCenters"] if each["listed"]}
        if self.volume:
            volumes = {each["id"]: each["dataCenterId"] for each in there["myself"]["networkVolumes"] or ()}
            if self.volume not in volumes:
                yours = ", ".join(volumes) or "none"
                raise UsageError(
                    f"your RunPod account has no network volume {self.volume!r}; the ids of its network "
                    f"volumes: {yours}. Pass one of them as volume="
                )
            centers = {volumes[self.volume]}
        known = {"secure": centers, "community": there["countryCodes"]}
        everywhere_known: set[str] = set()
        for cloud in clouds:
            everywhere_known.update(known[cloud])
        named = chosen(everywhere_known, self.region or (), need.regions)
        return [(cloud, each) for cloud in clouds for each in named if each in known[cloud]]

    def _made(self, offer: Offer, order: Order, node: int) -> Instance:
        """Create one pod, and return it. A pod that costs more than 1 % above the offer is ended again.

        If the reply is lost, the pod is looked for in the list of pods for about 6 s.

        Raises:
            NoAnswer: the reply was lost, and the pod was not found.
            ProviderError: RunPod refused.
            CapacityError: the pod costs more than 1 % above the offer.
            StillRunning: a pod that is too expensive could not be ended.
        """
        request = self._request(offer, order, node)
        if offer.detail["instance"]:
            create = "Cpu"
        elif offer.market == "spot":
            create = "Spot"
        else:
            create = "OnDemand"
        what = f"to rent {offer.instance_type}"
        lost = _api.REFUSALS.error("to list a new pod", "502", "no answer")
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
            raise _api.REFUSALS.error(
                what, "price", f"the pod costs {usd} USD/h, and {offer.usd_per_hour:.4f} was offered"
            )
        return made

    def _request(self, offer: Offer, order: Order, node: int) -> Any:
        """Return the input of the GraphQL mutation that creates one pod. Sends no request.

        The input contains the boot script. If the order has a lifetime, the input also has the time at which RunPod
        ends the pod.
        """
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
        return ()  # RunPod creates nothing but pods

    def _terminate(self, region: str, instances: Mapping[str, Instance]) -> dict[str, str]:
        """Ask RunPod to end pods, without waiting, and return those that have not ended.

        A pod that RunPod does not know has ended, unless RunPod's list still contains the pod.

        Args:
            region: not used, because RunPod has one list for all places.
            instances: a dict from id to pod.

        Returns:
            a dict from the id of each pod that has not ended to the reason, or to "" without a reason.

        Raises:
            ProviderError: all requests to end a pod failed, or the list of pods could not be read.
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
