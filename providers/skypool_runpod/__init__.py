"""RunPod: pods, which are containers, with GPUs or without, on demand and interruptible, billed by the second.

API: https://docs.runpod.io/sdks/graphql/manage-pods, https://graphql-spec.runpod.io (read 2026-11-21).

GraphQL is asked for nearly all: it alone has stock and price by number of GPUs, interruptible pods and `terminateAfter`,
and what it made it lists and ends, whatever its kind. REST v2, which has none of these, gives pods new names: names are
in the place of tags, so that is how they are renewed. REST v1 is gone. `terminateAfter` cannot be put off, so it ends
the lifetime alone; the lease is the guard's, in the pod, with the key that RunPod gives each pod for itself.
"""

from __future__ import annotations

import base64
import gzip
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.resources import files
from typing import Any, ClassVar

from skypool import asking, rented, tags, userdata
from skypool.driver import Abilities
from skypool.errors import CapacityError, NoAnswer, ProviderError, UsageError
from skypool.model import Access, Finding, Instance, Need, Offer, Order
from skypool.regional import Regional, chosen
from skypool_runpod import _api, _catalog
from skypool_runpod._catalog import FACTS, Place

_PULLING = 1200.0  # seconds in which an image is fetched
_TURNS_UP = 6.0  # seconds in which lists have a pod whose create was not answered
_BOOT = 600.0  # seconds more than the lifetime, which begins when the container runs
_FRESH = 60.0  # seconds for which a name need not be written anew
_START = 's=$(echo "$SKYPOOL_START" | base64 -d | gzip -d); unset SKYPOOL_START; eval "$s"'


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
    abilities: ClassVar[Abilities] = Abilities(ends_itself=True, private_network=False, spot=True)

    def __post_init__(self) -> None:
        asking.settle(self, FACTS["settings"], {"cloud": FACTS["clouds"]})
        if self.volume and self.cloud != "secure":
            raise UsageError("network volumes are in RunPod's own data centres alone: cloud='secure'")

    def offers(self, need: Need) -> Iterable[Offer]:
        """So many GPUs as are asked for, in each cloud; without an accelerator CPU instances, on demand."""
        places, ask = self._places(need), self._api().ask
        if counts := sorted({each.count for each in _catalog.wanted(need)}):
            cuda = self._image(need, "cuda")[1]
            asked = [{**_catalog.terms(need, at, cuda), "at": at, "count": n} for at in places for n in counts]
            text, given = _catalog.question("gpu", asked)
            told = ask(text, "to tell its stock", gpus=_catalog.gpu_types(need), **given)
            return [
                o for a, n in zip(asked, given, strict=True) for o in _catalog.gpus(need, a["at"], a["count"], told[n])
            ]
        places = [at for at in places if at[0] == "secure" and need.market != "spot"]
        sizes = _catalog.sizes(need, ask("Flavors")["cpuFlavors"]) if places else {}
        asked = [{**_catalog.terms(need, at, None), "at": at, "instance": id} for at in places for id in sizes]
        text, given = _catalog.question("cpu", asked)
        told = ask(text, "to tell its stock", **given) if given else {}
        both = [(each["at"], each["instance"], told[name]) for each, name in zip(asked, given, strict=True)]
        return [offer for at, id, flavors in both for offer in _catalog.cpus(need, at, id, sizes[id], flavors)]

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Pods that are there with this token, and those that are missing, all at once; what is there twice is ended.

        RunPod takes no token. A create that is not answered is looked for by its name for a while, as lists may lag;
        then it is `NoAnswer`, and whoever asks again comes by here first.
        """
        found = [each for each in self._found("", order.pool) if each.token == order.token]
        there = {each.rank: each for each in found}
        missing = [rank for rank in order.ranks if rank not in there]
        outcomes = asking.at_once(partial(self._made, offer, order), missing)
        there |= {each.rank: each for each in outcomes if isinstance(each, Instance)}
        failed = sorted((e for e in outcomes if isinstance(e, Exception)), key=lambda e: not isinstance(e, NoAnswer))
        if failed and isinstance(failed[0], NoAnswer):
            raise failed[0]
        keep = [there[rank] for n, rank in enumerate(order.ranks) if {*order.ranks[: n + 1]} <= there.keys()]
        keep = [] if failed and order.need.private_network else keep
        self.terminate([each for each in (*found, *there.values()) if each not in keep])
        if not keep:
            raise failed[0]
        return [replace(each, offer=offer) for each in keep]

    def access(self, instance: Instance) -> Access:
        """ssh to its mapped port, never by RunPod's proxy, once its image is there. Raises if it has ended."""

        def look() -> tuple[str, int]:
            record = self._api().ask("Pod", id=instance.id)["pod"]
            found, _ = (record and _catalog.pod(record)) or (None, "")
            if found is None or found.state == "ending":
                code = record["desiredStatus"] if record else "gone"
                raise ProviderError(f"{instance.id} has ended: RunPod has it as {code}", provider="runpod", code=code)
            if found.detail["ssh"] is None:
                raise ProviderError(f"{instance.id} has no public port 22 yet", provider="runpod", code="pending")
            host, port = found.detail["ssh"]
            return host, port

        host, port = asking.patiently(look, _PULLING, "pending")
        return rented.access(instance, host, user="root", port=port)

    def renew(self, pool: str, until: datetime) -> None:
        """Give its pods new names, unless they got theirs within the last minute."""
        pods = [each for each in self._found("", pool) if not _is_fresh(each.until, until)]
        names = {each.id: _catalog.name(pool, each.token, each.rank, until) for each in pods}
        failed = [e for e in asking.at_once(lambda id: self._api().rename(id, names[id]), names) if e is not None]
        if failed:
            raise failed[0]

    def check(self) -> Iterable[Finding]:
        """Whether the key is known, and what it may spend."""
        return asking.findings({"ssh on this machine": asking.openssh, "account": self._account})

    def _account(self) -> str:
        me = self._api().ask("Account")["myself"]
        if me["clientBalance"] <= 0:
            raise _api.REFUSALS.error("to rent", "402", f"the balance of {me['id']} is {me['clientBalance']:.2f} USD")
        spends = f"it spends {me['currentSpendPerHr'] or 0:.2f} of at most {me['spendLimit']:g} USD an hour"
        return f"{me['id']} has {me['clientBalance']:.2f} USD left; {spends}"

    # --- creating --------------------------------------------------------------------------------------------

    def _image(self, need: Need, runtime: str) -> tuple[str, str | None]:
        """What a container is made of, and the CUDA that it needs."""
        (usual, cuda), own = _catalog.image(runtime), need.bases.get(self.name) or self.image
        return own or usual, self.min_cuda or (None if own else cuda)

    def _places(self, need: Need) -> list[Place]:
        """Anywhere in each cloud, unless some places are asked for."""
        clouds, ask = FACTS["clouds"][self.cloud], self._api().ask
        if self.volume:
            volumes = {each["id"]: each["dataCenterId"] for each in ask("Volumes")["myself"]["networkVolumes"] or ()}
            if self.volume not in volumes:
                known = ", ".join(volumes) or "none"
                raise UsageError(f"the account has no network volume {self.volume!r}; it has {known}")
            known = {"secure": [volumes[self.volume]]}
        elif self.region or need.regions:
            told = ask("Places")
            centers = [each["id"] for each in told["dataCenters"] if each["listed"]]
            known = {"secure": centers, "community": told["countryCodes"]}
        else:
            return [(cloud, "") for cloud in clouds]
        named = chosen({each for cloud in clouds for each in known[cloud]}, self.region or (), need.regions)
        return [(cloud, each) for cloud in clouds for each in named if each in known[cloud]]

    def _made(self, offer: Offer, order: Order, rank: int) -> Instance:
        """One pod; one that costs more than was offered is ended again."""
        image, cuda = self._image(order.need, offer.accelerator.runtime if offer.accelerator else "none")
        end = f"url={shlex.quote(_api.base())}/graphql\n{(files('skypool_runpod') / 'end.sh').read_text()}"
        script = gzip.compress(userdata.start_script(order, end=end).encode(), mtime=0)
        lasts = None if order.lifetime is None else timedelta(seconds=order.lifetime + _BOOT)
        told = _catalog.terms(order.need, (offer.zone, offer.region), cuda) | dict(offer.detail) | {
            "name": _catalog.name(order.pool, order.token, rank, order.until), "image": image,
            "start": shlex.join(["sh", "-c", _START]), "script": base64.b64encode(script).decode(),
            "last": tags.stamp(datetime.now(UTC) + lasts) if lasts else None,
            "volume": self.volume, "mount": "/workspace" if self.volume else None,
            "bid": offer.detail["price"] if offer.market == "spot" else None,
        }  # fmt: skip
        gpu = (
            {"public": True, "kept": 0}
            if told["gpu"]
            else {"public": None, "kept": None, "vcpus": None, "memory": None}
        )
        create = "Cpu" if told["instance"] else "Spot" if told["bid"] else "OnDemand"
        try:
            record = self._api().once(create, offer.instance_type, input=asking.filled(FACTS["pod"], told | gpu))["pod"]
            made, _ = _catalog.pod(record) or (None, "")
        except NoAnswer as e:
            made = self._turned_up(order, rank, e)
        if made is None:
            raise NoAnswer(f"RunPod named a new pod {record['name']!r}", provider="runpod")
        if (usd := made.detail["price"]) > offer.usd_per_hour * 1.01:
            self.terminate([made])
            text = f"it costs {usd} USD/h now, and {offer.usd_per_hour:.4f} was offered"
            raise CapacityError(
                f"RunPod has no {offer.instance_type} at that price: {text}", provider="runpod", text=text
            )
        return made

    def _turned_up(self, order: Order, rank: int, error: NoAnswer) -> Instance:
        """The pod of a create that was not answered. Raises the error if it does not turn up."""

        def look() -> Instance:
            for each in self._pods(self._api().once, order.pool):
                if (each.token, each.rank) == (order.token, rank):
                    return each
            raise ProviderError("", code="absent")

        try:
            return asking.patiently(look, _TURNS_UP, "absent")
        except ProviderError:
            raise error from None

    # --- all of RunPod as one region -------------------------------------------------------------------------

    def _api(self) -> _api.Api:
        return _api.api(_api.key(self.api_key), _api.base())

    def _pods(self, ask: Callable[[str], Any], pool: str | None) -> list[Instance]:
        return _catalog.mine(ask("Pods")["myself"]["pods"] or (), pool)

    def _regions(self) -> Sequence[str]:
        return ("",)

    def _found(self, region: str, pool: str | None) -> list[Instance]:
        return self._pods(self._api().ask, pool)

    def _left(self, region: str, pool: str | None) -> Iterator[Any]:
        """Pods are all there is."""
        return iter(())

    def _end(self, region: str, instances: Mapping[str, Instance]) -> list[str]:
        """One that RunPod does not know has ended, unless it is listed all the same."""
        outcomes = asking.at_once(lambda id: self._api().ask("End", f"to end {id}", id=id), instances)
        failed = [e for e in outcomes if isinstance(e, ProviderError) and not re.search("pod not found", e.text, re.I)]
        if len(failed) == len(instances):
            raise failed[0]
        there = {each["id"] for each in self._api().ask("Pods")["myself"]["pods"] or () if _catalog.pod(each)}
        return [id for id in instances if id in there]


def _is_fresh(said: datetime | None, until: datetime) -> bool:
    return said is not None and 0 <= (until - said).total_seconds() < _FRESH
