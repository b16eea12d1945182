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
from typing import ClassVar

from skypool.drivers import preflight, retry, settings, ssh_machine, tags, userdata
from skypool.drivers.contract import Abilities, undo
from skypool.drivers.regional import Regional, chosen, each_done, everywhere
from skypool.errors import NoAnswer, UsageError
from skypool.model import Access, Finding, Instance, Leftover, Need, Offer, Order
from skypool_runpod import _api, _catalog
from skypool_runpod._catalog import FACTS

_PULLING, _LAG, _BOOT, _FRESH = 1200.0, 6.0, 600.0, 60.0  # seconds: images come; lists lag; pods boot; names hold


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
        """So many GPUs as are asked for, in each cloud; without an accelerator CPU instances, on demand."""
        api, places = self._api(), self._places(need)
        given, kind = {"gpus": _catalog.kinds(need)}, "gpu"
        if not (sizes := _catalog.gpus(need)):
            places = [at for at in places if at[0] == "secure" and "on-demand" in need.markets]
            sizes, given, kind = [*_catalog.cpus(need, api.ask("Flavors")["cpuFlavors"] if places else ())], {}, "cpu"
        question, shape = FACTS["stock"][kind]

        def sold(asked: _catalog.Terms) -> Iterable[Offer]:
            told = api.ask(question, this=settings.filled(shape, asked), **given)["sold"]
            return _catalog.offers(need, asked, told or ())

        sizes = [size | {"cuda": self._image(need, size["runtime"])[1]} for size in sizes]
        return everywhere(sold, [_catalog.where(*at) | size for at in places for size in sizes])

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Pods that are there with this token, and those that are missing, in turn; what is there twice is ended.

        RunPod takes no token. A create that is not answered is looked for by its name for a while, as lists may lag;
        then it is `NoAnswer`, and whoever asks again comes by here first.
        """
        found = [each for each in self.instances(pool=order.pool) if each.token == order.token]
        there = {each.rank: each for each in found}
        missing = [rank for rank in order.ranks if rank not in there]
        outcomes = retry.in_turn(partial(self._made, offer, order), missing)
        there |= {each.rank: each for each in outcomes if isinstance(each, Instance)}
        if lost := [each for each in outcomes if isinstance(each, NoAnswer)]:
            raise lost[0]
        keep = [there[rank] for n, rank in enumerate(order.ranks) if {*order.ranks[: n + 1]} <= there.keys()]
        undo(self.terminate, order, [each for each in (*found, *there.values()) if each not in keep])
        if not keep:
            raise next(each for each in outcomes if isinstance(each, Exception))
        return [replace(each, offer=offer) for each in keep]

    def access(self, instance: Instance) -> Access:
        """ssh to its mapped port, never by RunPod's proxy, once its image is there. Raises if it has ended."""

        def look() -> tuple[str, int]:
            record = self._api().ask("Pod", id=instance.id)["pod"] or {"name": "", "desiredStatus": "gone"}
            if (status := record["desiredStatus"]) not in FACTS["states"]:
                raise _api.REFUSALS.error(f"ssh to {instance.id}", status, f"the pod is {status}")
            for each in _catalog.pods([record], None, "*"):
                if each.detail["ssh"]:
                    return each.detail["ssh"][0], each.detail["ssh"][1]
            raise _api.REFUSALS.error(f"ssh to {instance.id}", "pending", "its port 22 is not mapped")

        host, port = retry.patiently(look, _PULLING, "pending")
        return ssh_machine.access(instance, host, user="root", port=port)

    def renew(self, pool: str, until: datetime) -> None:
        """Give its pods new names, unless they got theirs within the last minute."""
        fresh = until - timedelta(seconds=_FRESH)
        stale = [i for i in self.instances(pool=pool) if i.until is None or not fresh < i.until <= until]
        names = {each.id: _catalog.name(pool, each.token, each.rank, until) for each in stale}
        each_done(lambda id: self._api().rename(id, names[id]), names, "not all names could be renewed")

    def check(self) -> Iterable[Finding]:
        """Whether the key is known, and what it may spend."""
        return preflight.findings({"ssh on this machine": preflight.openssh, "account": self._account})

    def _account(self) -> str:
        me = self._api().ask("Account")["myself"]
        if me["clientBalance"] <= 0:
            raise _api.REFUSALS.error("to rent", "402", f"the balance of {me['id']} is {me['clientBalance']:.2f} USD")
        most = "no limit" if me["spendLimit"] is None else f"at most {me['spendLimit']:g}"
        spends = f"it spends {me['currentSpendPerHr'] or 0:.2f} USD an hour, of {most}"
        return f"{me['id']} has {me['clientBalance']:.2f} USD left; {spends}"

    def _image(self, need: Need, runtime: str) -> tuple[str, str | None]:
        """What a container is made of, and the CUDA that it needs."""
        usual, cuda = FACTS["images"].get(runtime, FACTS["images"]["none"])
        own = need.bases.get(self.name) or self.image
        return own or usual.format(python="{}.{}".format(*sys.version_info)), self.min_cuda or (None if own else cuda)

    def _places(self, need: Need) -> list[tuple[str, str]]:
        """Anywhere in each cloud, unless some places are asked for."""
        clouds = FACTS["clouds"][self.cloud]
        if not (self.volume or self.region or need.regions):
            return [(cloud, "") for cloud in clouds]
        there = self._api().ask("Places")
        centers = {each["id"] for each in there["dataCenters"] if each["listed"]}
        if self.volume:
            volumes = {each["id"]: each["dataCenterId"] for each in there["myself"]["networkVolumes"] or ()}
            if self.volume not in volumes:
                raise UsageError(f"there is no network volume {self.volume!r}; yours: {', '.join(volumes) or 'none'}")
            centers = {volumes[self.volume]}
        known = {"secure": centers, "community": there["countryCodes"]}
        named = chosen({each for cloud in clouds for each in known[cloud]}, self.region or (), need.regions)
        return [(cloud, each) for cloud in clouds for each in named if each in known[cloud]]

    def _made(self, offer: Offer, order: Order, rank: int) -> Instance:
        """One pod; one that costs more than was offered is ended again."""
        image, cuda = self._image(order.need, offer.accelerator.runtime if offer.accelerator else "none")
        end = f"url={shlex.quote(_api.base())}/graphql\n{(files('skypool_runpod') / 'end.sh').read_text('utf-8')}"
        lasts = None if order.lifetime is None else timedelta(seconds=order.lifetime + _BOOT)
        told = {
            **_catalog.where(offer.zone, offer.region), **next(iter(_catalog.gpus(order.need)), {}), **offer.detail,
            "name": _catalog.name(order.pool, order.token, rank, order.until), "image": image, "cuda": cuda,
            "start": shlex.join(["sh", "-c", userdata.UNPACK]),
            "script": userdata.packed(userdata.start_script(order, end=end)),
            "last": tags.stamp(datetime.now(UTC) + lasts) if lasts else None,
            "bid": offer.detail["price"] if offer.market == "spot" else None,
            "volume": self.volume, "mount": "/workspace" if self.volume else None,
        }  # fmt: skip
        shape = FACTS["pod"] | FACTS["cpu pod" if told["instance"] else "gpu pod"]
        create = "Cpu" if told["instance"] else "Spot" if told["bid"] else "OnDemand"
        what, lost = f"to rent {offer.instance_type}", _api.REFUSALS.error("to tell of a new pod", "502", "silence")
        order.asking(rank)
        try:
            record = self._api().once(create, what, input=settings.filled(shape, told))["pod"]
        except NoAnswer as e:
            lost, record = e, None

        def look() -> Instance:
            found = self.instances(pool=order.pool) if record is None else _catalog.pods([record], order.pool, "*")
            for each in found:
                if (each.token, each.rank) == (order.token, rank):
                    return each
            raise lost

        made = replace(retry.patiently(look, _LAG), offer=offer)
        order.made(made)
        if (usd := made.detail["price"]) > offer.usd_per_hour * 1.01:
            undo(self.terminate, order, [made])
            raise _api.REFUSALS.error(what, "price", f"it costs {usd} USD/h, and {offer.usd_per_hour:.4f} was offered")
        return made

    def _api(self) -> _api.Api:
        return _api.api(_api.key(self.api_key), _api.base())

    def _regions(self) -> Sequence[str]:
        return ("RunPod",)

    def _found(self, region: str, pool: str | None) -> list[Instance]:
        return _catalog.pods(self._api().ask("Pods")["myself"]["pods"] or (), pool, tags.owners(pool))

    def _left(self, region: str, pool: str | None) -> Sequence[Leftover]:
        return ()  # pods are all there is

    def _end(self, region: str, instances: Mapping[str, Instance]) -> dict[str, str]:
        """Why not, of those that have not. One that RunPod does not know has, unless it is listed all the same."""
        outcomes = retry.at_once(lambda id: self._api().ask("End", f"to end {id}", id=id), instances)
        both = zip(instances, outcomes, strict=True)
        failed = {id: e for id, e in both if isinstance(e, Exception) and "not found" not in str(e).lower()}
        if len(failed) == len(instances):
            raise next(iter(failed.values()))
        pods = self._api().ask("Pods")["myself"]["pods"] or ()
        there = {each["id"] for each in pods if each["desiredStatus"] != "TERMINATED"}
        return {id: str(failed.get(id, "")) for id in instances if id in failed or id in there}
