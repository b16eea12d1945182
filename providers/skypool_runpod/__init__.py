"""Driver for RunPod: rents pods (containers with or without GPUs), on demand and spot, billed by the second.

API: https://docs.runpod.io/api-reference-v2/overview (read 2026-11-23).

- RunPod's API REST v2 is used for everything that it can do. It has no spot pods, no way to ask for a public address in
  the community cloud, and no lower limits of vCPUs and memory. For these the setting `graphql` allows the GraphQL API,
  which RunPod retires in early 2027.
- RunPod's own SDK speaks GraphQL only (runpod 1.12.0, read 2026-11-22), so it is not used. The key is found where the
  SDK finds it.
- Tags are not used, because RunPod attaches them to a pod by a separate request. Each pod's name holds the pool, owner,
  token, node number and expiry time. A new expiry time is written as a new name.
- The lease and the pool's lifetime are enforced by the guard, a process in the pod. The guard ends the pod with the key
  that RunPod gives each pod. Only the GraphQL API takes a time at which RunPod itself ends the pod (`terminateAfter`).

Words of this package:

- secure cloud: RunPod's data centres. Community cloud: machines of strangers. A place is a data centre of the secure
  cloud or a country of the community cloud; "" is any.
- flavor: one of RunPod's series of CPU instances, such as "cpu3c". CPU pod: a pod without GPUs.
- runtime: the software family of an accelerator, such as "cuda", "rocm" or "none".
- record: an object in an answer of RunPod, as parsed JSON.
- market: "on-demand" or "spot".
- need, offer, order: the requirements of a node, a kind of pod with its price, and the request to rent pods for nodes
  of a pool (`skypool.model`). A node is a rented machine of a pool; its node number is its number there.
- token: the text that names an order, by which a repeated order is recognized.
- settings: the arguments of `RunPod`.
- In arguments, `what` says what a request is for, such as "to rent a pod", for error messages.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.resources import files
from typing import ClassVar

from skypool.drivers import preflight, retry, settings, ssh_machine, tags, userdata
from skypool.drivers.contract import Abilities, undo
from skypool.drivers.regional import Regional, chosen, each_done, everywhere
from skypool.errors import CapacityError, NoAnswer, ProviderError, RateLimitError, UsageError
from skypool.model import Access, Bill, Finding, Instance, Leftover, Market, Need, Offer, Order
from skypool_runpod import _api, _catalog, _pods, _requests, _spot_requests
from skypool_runpod._catalog import Size

_SHAPES: Mapping[str, settings.Shape] = {
    "cloud": ("secure|community|any", "'secure', 'community' or 'any'", False),
    "region": ("[A-Z]{2,3}(-[A-Z0-9]+)*", "'CA-MTL-1', or 'CA' in the community cloud", True),
    "image": (r"[A-Za-z0-9][\w.:/@-]*", "'runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404'", False),
    "min_cuda": (r"\d+\.\d+", "'12.8'", False),
    "volume": ("[A-Za-z0-9_-]+", "'agv6w2qcg7'", False),
}
"""A dict from setting to (regular expression of its values, examples for messages, True if a list is allowed)."""

_PULLING = 1200.0
"""Seconds that a pod may need until its image is pulled and its ssh port can be reached from outside."""

_LAG = 6.0
"""Seconds after the creation of a pod during which RunPod's lists may lack the pod."""

_BOOT = 600.0
"""Seconds that are added to the order's lifetime for the boot. After this time, RunPod itself ends a pod.

Only a pod that the GraphQL API creates has such a limit.
"""

_LOOK = 4.0
"""Maximum age in seconds of the list of pods in which `access` looks for an address."""

_RENEWING = 20.0
"""Maximum age in seconds of the list of pods from which `renew` takes the present names of pods."""

_NO_GPU = "NVIDIA NoSuchGPU 0GB"
"""An id that no GPU type has, for requests that RunPod must refuse."""

_NO_PLACE = "XX-NONE-1"
"""An id that no data centre has, for requests that RunPod must refuse."""

_NAMES_GPU = "NoSuchGPU|gpu[ ._]?(type|id)"
_NAMES_PLACE = rf"{_NO_PLACE}|data ?cent(er|re)"
"""Regular expressions: `_NAMES_GPU` for texts that name an unknown GPU type, `_NAMES_PLACE` for a data centre."""

_VAGUE = ("create-400", "SUPPLY_CONSTRAINT", "200")
"""Codes of refusals that may mean an unknown GPU type or data centre, or no stock.

RunPod does not document its answers to such requests. "create-400" stands for the HTTP status 400, which means either a
broken rule or no stock. "200" is the HTTP status of an error of the GraphQL API without a code.
"""

_TOLERANCE = 1.01
"""Largest allowed ratio of a pod's price to the offered price. A more expensive pod is ended."""


@settings.settings_named
@dataclass(frozen=True)
class RunPod(Regional):
    """A driver that rents pods from RunPod. Its methods block.

    Args:
        cloud: "secure" for RunPod's data centres, "community" for machines of strangers, or "any". All but "secure"
            need `graphql=True`. Results from community machines are only accepted if they can be rebuilt without
            running code.
        region: a data centre such as "CA-MTL-1", or several; in the community cloud, a country such as "CA". None means
            any.
        image: image of the containers. It needs sh, base64, gzip, and curl or python3. It also needs sshd, or apt-get,
            apk or dnf to install sshd. None takes an image that fits the accelerator. The base= of an Image takes
            precedence.
        min_cuda: lowest CUDA version that the driver of the pod's machine must support, such as "12.8". None takes the
            version that RunPod's own image needs, and any version for other images.
        volume: id of a network volume to mount at /workspace. Pods are then in the volume's data centre. None mounts no
            volume.
        api_key: API key. None takes $RUNPOD_API_KEY, or the key in ~/.runpod/config.toml.
        graphql: True also uses RunPod's GraphQL API, which RunPod retires in early 2027. It is needed for spot pods,
            for the community cloud, and for pods with GPUs if a minimum of vCPUs or memory is asked for. By default
            False: skypool's own requests use the API REST v2 only.

    Raises:
        UsageError: a setting is invalid or unknown. Or another cloud than "secure" is given with `volume`, or without
            `graphql`.
    """

    cloud: str = "secure"
    region: str | Sequence[str] | None = None
    image: str | None = None
    min_cuda: str | None = None
    volume: str | None = None
    api_key: str | None = field(default=None, repr=False)
    graphql: bool = False
    name: ClassVar[str] = "runpod"
    abilities: ClassVar[Abilities] = Abilities(ends_itself=True, spot=True)

    def __post_init__(self) -> None:
        settings.settle(self, _SHAPES, {"cloud": _catalog.CLOUDS})
        settings.plain(self, graphql=bool)
        if not self.graphql:
            object.__setattr__(self, "abilities", replace(RunPod.abilities, spot=False))
        if self.cloud != "secure" and not self.graphql:
            raise UsageError(
                f"cloud={self.cloud!r} needs graphql=True, because RunPod's API REST v2 cannot ask for a public "
                "address, and machines of the community cloud without one cannot be reached"
            )
        if self.volume and self.cloud != "secure":
            raise UsageError(
                f"volume={self.volume!r} needs cloud='secure', because only RunPod's own data centres have "
                "network volumes"
            )

    def offers(self, need: Need) -> Iterable[Offer]:
        """Return offers of pods with the needed GPUs, in each allowed cloud and place.

        If the need has no GPUs, the offers are of CPU pods, which exist only in the secure cloud and on demand. Types
        that are out of stock are among the offers, marked as not available. Spot pods are among the offers only with
        the setting `graphql`. The list is empty if nothing fits.

        Args:
            need: the requirements of each node.

        Raises:
            UsageError: a place in the settings does not exist in the allowed clouds, or is not the data centre of the
                network volume. Or the account does not have the volume, or the need requires the setting `graphql`.
            CredentialsError: there is no API key, or RunPod refuses it.
            ProviderError: RunPod refused a request, or did not answer. It is an ErrorGroup if several requests failed
                for different reasons. But if the API key may use only one of RunPod's APIs, the other API's offers are
                left out without an error.
        """
        sizes = _catalog.gpu_sizes(need)
        if sizes:
            self._check_gpus(need)
        places = self._places(need)
        asks: list[Callable[[], Iterable[Offer]]] = []
        if not sizes:
            if places["secure"] and "on-demand" in need.markets:
                asks = self._cpu_questions(need, places["secure"])
            return everywhere(lambda ask: ask(), asks)
        for size in sizes:
            graphql_markets: Sequence[Market] = [
                each for each in need.markets if each == "spot" or need.vcpus or need.memory_gib
            ]
            if places["secure"] and set(need.markets) - set(graphql_markets):
                asks.append(partial(self._gpu_offers, need, size, places["secure"]))
            if not self.graphql:
                continue
            for cloud, markets in (("secure", graphql_markets), ("community", need.markets)):
                if markets:
                    asks += [partial(self._stock, need, size, cloud, each, markets) for each in places[cloud]]
        return everywhere(lambda ask: ask(), asks)

    def _check_gpus(self, need: Need) -> None:
        """Raise UsageError if the needed pods with GPUs can be found only with the setting `graphql`, and it is off."""
        if self.graphql:
            return
        because = "which works until RunPod retires its GraphQL API in early 2027"
        if need.vcpus or need.memory_gib:
            raise UsageError(
                "RunPod's API REST v2 cannot choose pods with GPUs by vCPUs or memory; leave vcpus= and memory= out, "
                f"or use RunPod(graphql=True), {because}"
            )
        if "on-demand" not in need.markets:
            raise UsageError(
                f"RunPod's API REST v2 has no spot pods; use market='on-demand', or RunPod(graphql=True), {because}"
            )

    def _gpu_offers(self, need: Need, size: Size, places: Sequence[str]) -> Iterable[Offer]:
        """Return the on-demand offers of GPU pods of one size in these data centres ("" for any). Sends a request."""
        _, cuda = self._image(need, size.runtime)
        return _catalog.gpu_offers(need, size, places, self._api().gpus(size.count, cuda))

    def _cpu_questions(self, need: Need, places: Sequence[str]) -> list[Callable[[], Iterable[Offer]]]:
        """Return a function for each flavor that has a sufficient size. It requests the flavor's stock and offers."""
        api = self._api()

        def sold(size: Size) -> Iterable[Offer]:
            return _catalog.cpu_offers(need, size, places, api.cpus(size.vcpus))

        return [partial(sold, size) for size in _catalog.cpu_sizes(need, api.cpus())]

    def _stock(self, need: Need, size: Size, cloud: str, place: str, markets: Sequence[Market]) -> Iterable[Offer]:
        """Return the offers of pods with GPUs of one size in one place, on these markets, from the GraphQL API."""
        _, cuda = self._image(need, size.runtime)
        ids = _catalog.known_ids(need)
        told = self._api().graphql(
            _spot_requests.STOCK,
            "to list GPU types",
            this=_spot_requests.lowest_price(size, cloud, place, cuda),
            gpus=None if ids is None else {"ids": ids},
        )
        return _catalog.graphql_offers(need, size, cloud, place, markets, told["sold"] or ())

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Create the missing pods of an order, one after the other, and return the pods of its nodes, in order.

        Pods that an earlier launch of the same order created are reused. Those that differ from the offer in price or
        data centre are ended instead, and created anew. If RunPod refuses a pod, no further pod is created, and only
        the pods of the nodes before that one are returned. Pods of the order that are not returned are ended.

        RunPod cannot recognize a repeated request. If a request to create a pod gets no answer, the pod is therefore
        looked for by name for about 6 s.

        Args:
            offer: the kind of pod, its place and market, as `offers` returned them.
            order: the node numbers, the pool, and the token by which a repeated order is recognized.

        Raises:
            NoAnswer: the reply was lost and the pod was not found. Repeat the same order, which searches first.
            RateLimitError: RunPod receives too many requests. Repeat the same order, which searches first.
            ProviderError: there is no pod for the first node, because RunPod refused it, or because it was ended again.
                That happens if its price is more than 1 % above the offer's, or if its data centre is not the offer's.
            StillRunning: pods that had to be ended again may still run.
        """
        found: list[Instance] = []
        there: dict[int, Instance] = {}
        for pod in self.instances(pool=order.pool):
            if pod.token == order.token and self._differs(pod, offer):
                undo(self.terminate, order, [pod])  # its node is tried again
            elif pod.token == order.token:
                found.append(pod)
                there[pod.node] = pod
        missing = [node for node in order.nodes if node not in there]
        outcomes = retry.in_turn(partial(self._made, offer, order), missing)
        for outcome in outcomes:
            if isinstance(outcome, Instance):
                there[outcome.node] = outcome
            elif isinstance(outcome, (NoAnswer, RateLimitError)):
                raise outcome  # the pool repeats the order, which then finds the pods that were created
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
            CapacityError: the pod does not exist, has ended, was stopped or outbid, or failed.
            ProviderError: the port was not mapped within 20 minutes (code "pending"), or RunPod refused.
            UsageError: an SSH key must be created, but ssh-keygen is not installed on this computer.
        """

        def look() -> tuple[str, int]:
            api = self._api()
            listed = (each for each in api.pods(age=_LOOK) if each["id"] == instance.id)  # one list for all nodes
            record = next(listed, None) or api.pod(instance.id) or {"name": "", "status": "gone"}
            status = record["status"]
            if status not in _pods.STATES:
                raise _api.REFUSALS.error(f"ssh to {instance.id}", status, f"the pod is {status}")
            for each in _pods.pods([record], None, "*"):
                if each.detail["ssh"]:
                    host, port = each.detail["ssh"]
                    return host, port
            raise _api.REFUSALS.error(
                f"ssh to {instance.id}", "pending", "port 22 of the pod is not mapped to a public port"
            )

        host, port = retry.patiently(look, _PULLING, "pending")
        return ssh_machine.access(instance, host, user="root", port=port)

    def renew(self, pool: str, until: datetime) -> None:
        """Write a new expiry time into the names of the pool's pods.

        RunPod allows about 60 requests a minute, so of several pods not every one is renamed. A pod keeps its name if
        the expiry time in it lies in the second half of the time from now to `until`.

        Args:
            pool: name of the pool.
            until: the new expiry time.

        Raises:
            ProviderError: the pods could not be listed, or one pod could not be renamed.
            ErrorGroup: several pods could not be renamed, for different reasons.
        """
        now = datetime.now(UTC)
        fresh = now + (until - now) / 2
        names: dict[str, str] = {}
        pods = self._found("", pool, _RENEWING)
        for pod in pods:
            if len(pods) == 1 or pod.until is None or not fresh < pod.until <= until:
                names[pod.id] = _pods.name(pool, pod.token, pod.node, until)

        def rename(id: str) -> None:
            self._api().rename(id, names[id])

        each_done(rename, names, f"the new expiry time is not in the names of all pods of pool {pool!r}")

    def check(self) -> Iterable[Finding]:
        """Yield findings about the account, and about what RunPod sells. Only reads.

        The findings are about ssh, the API key, the clock, the settings `region` and `volume`, and GPUs. The finding
        for the account shows what the pods cost now. With the setting `graphql`, it also shows the balance. A failed
        check is a finding, too, and does not raise. If RunPod refuses the key, only ssh and the account are checked.

        RunPod does not report if a key may write: `prove_creates` tests that. Only a real pod shows if an image exists.
        """
        return preflight.findings(
            {preflight.SSH: preflight.openssh, "account": self._account},
            {
                "clock": lambda: preflight.clock(self._api().date()),
                "places": self._settled_places,
                "GPUs": self._gpus,
            },
        )

    def prove_creates(self) -> Iterable[Finding]:
        """Send requests for pods that RunPod must refuse, and yield a finding for each. Does not raise.

        Each request is that of a pool with one field changed: to a GPU type or a data centre that does not exist. With
        the setting `graphql`, a request for an unknown GPU type is also sent to the GraphQL API. A pod that RunPod
        creates anyway is deleted.
        """
        try:
            offer = next(_catalog.any_offer(self._api().gpus(1, None)), None)
        except Exception as e:  # noqa: BLE001 - any error is a finding to show
            yield preflight.failure("GPU types", e)
            return
        if offer is None or offer.accelerator is None:
            yield Finding("GPU types", True, "no pod was asked for, because no GPU type is sold in the secure cloud")
            return
        gpu = {**offer.detail, "gpu": _NO_GPU}
        impossible = [
            ("an unknown GPU type", replace(offer, detail=gpu), _NAMES_GPU),
            ("an unknown data centre", replace(offer, region=_NO_PLACE), _NAMES_PLACE),
        ]
        if self.graphql:
            by_graphql = replace(offer, detail={**gpu, "graphql": True})
            impossible.append(("an unknown GPU type, by GraphQL,", by_graphql, _NAMES_GPU))
        for what, each, names in impossible:
            order = preflight.impossible_order(Need(accelerators=(offer.accelerator,)))
            create = partial(self._made, each, order, order.nodes[0])
            kinds = (CapacityError, ProviderError)
            yield preflight.refusal(what, create, kinds, self.terminate, names=names, vague=_VAGUE)

    def billed(self, instances: Sequence[str], since: datetime, until: datetime) -> Bill:
        """Return the sum of what RunPod bills for pods, from its records of each hour.

        https://docs.runpod.io/api-reference-v2/billing/get-pod-billing-history (read 2026-11-24). The page does not
        say how soon RunPod writes a record. If a pod has no record yet, the sum is None.

        Args:
            instances: ids of the pods.
            since: a time before the first pod was created.
            until: a time after the last pod had ended. Not used: a pod that has ended has no later records.

        Raises:
            ProviderError: RunPod refused a request, or did not answer.
        """
        api = self._api()
        sums = {id: api.billed(id, since) for id in instances}
        if missing := [id for id, usd in sums.items() if usd is None]:
            return Bill(
                None,
                f"RunPod has no record of the costs of {', '.join(missing)} yet; look at "
                "https://console.runpod.io/user/billing in an hour",
            )
        usd = sum(each for each in sums.values() if each is not None)
        return Bill(usd, "RunPod's records of each hour, for GPUs, CPUs and disks")

    def _settled_places(self) -> str:
        """Return the places that the settings allow, as text. Raise UsageError if a place does not exist."""
        places = self._places(Need())
        return ", ".join(place or f"any in the {cloud} cloud" for cloud, several in places.items() for place in several)

    def _gpus(self) -> Finding:
        """Return a finding, without a title, that says how many of RunPod's GPU types skypool knows."""
        ids = [each["id"] for each in self._api().gpus(1, None) if each["secure"] or each["community"]]
        unknown = _catalog.unknown(ids)
        return preflight.hardware(len(ids) - len(unknown), unknown)

    def _account(self) -> str:
        """Return a line of text about the account: the cost of its pods, or with `graphql` its balance and spending."""
        if not self.graphql:
            pods = self._api().pods()
            usd = sum(each["cost"] for each in pods)
            return (
                f"RunPod accepts the key; the pods of the account ({len(pods)}) cost {usd:.2f} USD per hour "
                "(the balance is not checked: https://console.runpod.io/user/billing shows it)"
            )
        me = self._api().graphql(_spot_requests.ACCOUNT, "to describe the account")["myself"]
        name = me["id"]
        balance = me["clientBalance"]
        if balance <= 0:
            raise _api.REFUSALS.error("to rent", "402", f"the balance of account {name} is {balance:.2f} USD")
        most = "no limit" if me["spendLimit"] is None else f"limit: {me['spendLimit']:g} USD per hour"
        spends = me["currentSpendPerHr"] or 0
        return f"account {name} has {balance:.2f} USD left and spends {spends:.2f} USD per hour ({most})"

    def _image(self, need: Need, runtime: str) -> tuple[str, str | None]:
        """Return (image of the container, CUDA version that the driver must support). The version is None for any."""
        own = need.bases.get(self.name) or self.image
        if own:
            return own, self.min_cuda if runtime == "cuda" else None
        image, cuda = _catalog.IMAGES.get(runtime, _catalog.IMAGES["none"])
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return image.format(python=python), cuda and (self.min_cuda or cuda)

    def _places(self, need: Need) -> dict[str, list[str]]:
        """Return a dict from cloud to its allowed places. [""] means any place; [] means that no place is allowed."""
        clouds = _catalog.CLOUDS[self.cloud]
        found: dict[str, list[str]] = {"secure": [], "community": []}
        if not (self.volume or self.region or need.regions):
            return found | {cloud: [""] for cloud in clouds}
        api = self._api()
        known: dict[str, Sequence[str]] = {}
        if self.volume:
            volumes = api.volumes()
            if self.volume not in volumes:
                advice = f"pass one of its volumes as volume=: {', '.join(volumes)}" if volumes else "leave volume= out"
                raise UsageError(f"your RunPod account has no network volume {self.volume!r}; {advice}")
            known["secure"] = [volumes[self.volume]]
        elif "secure" in clouds:
            known["secure"] = api.data_centers()
        if "community" in clouds:
            known["community"] = api.graphql(_spot_requests.COUNTRIES, "to list countries")["countryCodes"]
        named = chosen({place for places in known.values() for place in places}, self.region or (), need.regions)
        return found | {cloud: [each for each in named if each in places] for cloud, places in known.items()}

    def _made(self, offer: Offer, order: Order, node: int) -> Instance:
        """Create one pod, and return it. If it differs from the offer, end it again, and raise CapacityError."""
        what = f"to rent {offer.instance_type}"
        create = self._creation(offer, order, node, what)
        order.asking(node)
        try:
            record = create()
        except NoAnswer as e:
            lost = e  # the name `e` ends with this block

            def look() -> Instance:
                for each in self.instances(pool=order.pool):
                    if each.token == order.token and each.node == node:
                        return each
                raise lost

            made = retry.patiently(look, _LAG)
        else:
            made = self._new(record, order, node, what)
        made = replace(made, offer=offer)
        order.made(made)
        if differs := self._differs(made, offer):
            undo(self.terminate, order, [made])
            raise CapacityError(
                f"the pod {made.id} at RunPod ({offer.instance_type}) {differs}, so it was ended again; try another "
                "offer",
                provider=self.name,
                code="differs",
                text=differs,
            )
        return made

    def _new(self, record: _api.Record, order: Order, node: int, what: str) -> Instance:
        """Return the instance of a new pod. If it did not get the requested name, end it, and raise ProviderError."""
        for each in _pods.pods([record], order.pool, "*"):
            if each.token == order.token and each.node == node:
                return each
        # skypool would not find a pod with another name again
        said = {tags.POOL: order.pool, tags.TOKEN: order.token, tags.NODES: str(node)}
        odd = tags.instance(self.name, record["id"], said, 0, "starting", {}, region="RunPod")
        undo(self.terminate, order, [odd])
        raise _api.REFUSALS.error(what, "name", f"RunPod named the new pod {odd.id} {record['name']!r}")

    def _differs(self, pod: Instance, offer: Offer) -> str:
        """Return how a pod's price or data centre differs from its offer, as text for an error; "" if it does not."""
        usd, place = pod.detail["price"], pod.detail["place"]
        if usd > offer.usd_per_hour * _TOLERANCE:  # 0 for a pod that does not run
            return f"costs {usd:.4f} USD per hour, but {offer.usd_per_hour:.4f} was offered"
        if offer.zone == "secure" and offer.region and place and place != offer.region:
            return f"is in {place}, but {offer.region} was asked for"
        return ""

    def _creation(self, offer: Offer, order: Order, node: int, what: str) -> Callable[[], _api.Record]:
        """Return a function that creates the pod of a node by either API. It returns a record as of the REST v2."""
        image, cuda = self._image(order.need, offer.accelerator.runtime if offer.accelerator else "none")
        end = f"url={shlex.quote(_api.base())}\n{(files('skypool_runpod') / 'end.sh').read_text('utf-8')}"
        start = _requests.Start(
            name=_pods.name(order.pool, order.token, node, order.until),
            image=image,
            script=userdata.packed(userdata.start_script(order, end=end)),
        )
        api = self._api()
        if not offer.detail["graphql"]:
            return partial(api.create, _requests.pod(offer, start, cuda=cuda, volume=self.volume), start, what)
        last = None
        if order.lifetime is not None:
            last = datetime.now(UTC) + timedelta(seconds=order.lifetime + _BOOT)
        size = next(iter(_catalog.gpu_sizes(order.need)))
        asked = _spot_requests.deploy(offer, size, start, cuda=cuda, volume=self.volume, last=last)
        mutation = _spot_requests.BID if offer.market == "spot" else _spot_requests.RENT

        def create() -> _api.Record:
            pod = api.graphql_once(mutation, what, input=asked)["pod"]
            if pod is None:
                raise _api.REFUSALS.error(what, "502", "the answer has no pod")
            api.created(pod["id"])
            return _spot_requests.record(pod)

        return create

    def _api(self) -> _api.Api:
        return _api.api(_api.key(self.api_key), _api.base())

    def _regions(self) -> Sequence[str]:
        return ("RunPod",)

    def _found(self, region: str, pool: str | None, age: float = 0.0) -> list[Instance]:
        return _pods.pods(self._api().pods(age), pool, tags.owners(pool))

    def _left(self, region: str, pool: str | None) -> Sequence[Leftover]:
        return ()  # RunPod creates nothing but pods

    def _terminate(self, region: str, instances: Mapping[str, Instance]) -> dict[str, str]:
        """Ask RunPod to end pods, without waiting. Return a dict from each pod still there to the reason, or ""."""
        api = self._api()
        outcomes = retry.at_once(api.delete, instances)
        left: dict[str, str] = {}
        errors: list[Exception] = []
        for id, outcome in zip(instances, outcomes, strict=True):
            if isinstance(outcome, Exception):
                left[id] = str(outcome)
                errors.append(outcome)
            elif not outcome and api.age(id) < _LAG:
                left[id] = "RunPod does not know the new pod yet"
        if len(errors) == len(instances):
            raise errors[0]
        listed = api.pods()
        there = {each["id"] for each in listed if each["status"] != "TERMINATED"}
        if listed.pages > 1:  # the list may have changed while its pages were read
            unlisted = [id for id in instances if id not in left and id not in there]
            there.update(id for id in unlisted if (api.pod(id) or {"status": "TERMINATED"})["status"] != "TERMINATED")
        return {id: left.get(id, "") for id in instances if id in left or id in there}
