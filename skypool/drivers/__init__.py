"""Public tools for authors of drivers: the contract of a driver, and helpers that several drivers share.

A driver is the class that talks to one cloud provider. It is found by name through an entry point in the group
`skypool.providers`. The names in `__all__` are stable (docs/stability.md). Each is imported when it is first used.

- `contract`: the protocols `Driver`, `Renews`, `Tidies`, …, and `Abilities`.
- `bucket_identity`: an identity of machines that reaches a bucket, which `skypool setup` makes.
- `registry`: finds drivers by name.
- `settings`: checks the settings of a driver.
- `preflight`: the checks that `skypool doctor` shows.
- `retry`: sends requests in parallel, and repeats failed requests.
- `refusals`: translates error codes of a provider to errors of skypool.
- `pages`: reads lists of providers to their end.
- `rest`: HTTP client for clouds without an SDK.
- `sdk`: imports SDKs (the Python packages of providers).
- `recording`: records requests and replies without secrets.
- `request_hooks`: the places where requests leave this process, such as `Rest`. A recording sees requests there.
- `regional`: base class for clouds with regions.
- `tags`: writes owner, pool and expiry time into the tags of machines, and reads them.
- `userdata`: boot scripts, with the guard.
- `ssh_machine`: access to rented machines by SSH, termination that waits, and spot notices.
- `transports`: access to machines by other commands than SSH.
- `blocklist`: machines that failed in the last day.

Words of this package:

- need, offer, order: the requirements of a pool's machines, what a provider sells for a price, and a request to rent
  machines on an offer (`skypool.model`). A launch is the rental of an order's machines.
- node number: the number of a machine in its pool, from 0. An order has one for each of its machines.
- token: the text that names an order. A repeated launch with the same token rents no further machines.
- session: one run of a pool.
- instance: a rented machine as its provider reports it (`skypool.model.Instance`).
- leftover: another resource of a pool at a provider, such as a disk or a key pair (`skypool.model.Leftover`).
- slice: several machines (hosts) that are rented and end together.
- lease: the seconds that a machine lives on without hearing from its client.
- guard: a process on the machine that ends it when its lease is over.
- spot notice: a provider's announcement that it will take a spot machine back.
- finding: the result of one check (`skypool.model.Finding`).
- ledger: skypool's local database of rented machines.
- expiry time: the time until which a resource is needed, as one of its tags says.
- refusal: an answer with which a provider says that it does not do what a request asks.
- placeholder: the text that replaces a private value in a recording, such as "user-1".
- In arguments, `said` are the tags of a machine or another resource, as a dict from name to value.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skypool.drivers import (
        blocklist,
        pages,
        preflight,
        recording,
        retry,
        settings,
        ssh_machine,
        tags,
        transports,
        userdata,
    )
    from skypool.drivers.contract import (
        Abilities,
        Admits,
        Answers,
        Bills,
        Checks,
        Driver,
        Learns,
        Policed,
        Proves,
        Renews,
        Tidies,
        lacks,
        undo,
    )
    from skypool.drivers.refusals import Refusals
    from skypool.drivers.regional import Regional, chosen, each_done, everywhere
    from skypool.drivers.rest import OAuth, Rest
    from skypool.drivers.sdk import imported
    from skypool.wire.keys import Keys
    from skypool.wire.transport import Transport

_MODULES = (
    "blocklist",
    "pages",
    "preflight",
    "recording",
    "retry",
    "settings",
    "ssh_machine",
    "tags",
    "transports",
    "userdata",
)
_HOME = {
    "Abilities": "skypool.drivers.contract",
    "Admits": "skypool.drivers.contract",
    "Answers": "skypool.drivers.contract",
    "Bills": "skypool.drivers.contract",
    "Checks": "skypool.drivers.contract",
    "Driver": "skypool.drivers.contract",
    "Keys": "skypool.wire.keys",
    "Learns": "skypool.drivers.contract",
    "OAuth": "skypool.drivers.rest",
    "Policed": "skypool.drivers.contract",
    "Proves": "skypool.drivers.contract",
    "Refusals": "skypool.drivers.refusals",
    "Regional": "skypool.drivers.regional",
    "Renews": "skypool.drivers.contract",
    "Rest": "skypool.drivers.rest",
    "Tidies": "skypool.drivers.contract",
    "Transport": "skypool.wire.transport",
    "chosen": "skypool.drivers.regional",
    "each_done": "skypool.drivers.regional",
    "everywhere": "skypool.drivers.regional",
    "imported": "skypool.drivers.sdk",
    "lacks": "skypool.drivers.contract",
    "undo": "skypool.drivers.contract",
}

__all__ = [
    "Abilities",
    "Admits",
    "Answers",
    "Bills",
    "Checks",
    "Driver",
    "Keys",
    "Learns",
    "OAuth",
    "Policed",
    "Proves",
    "Refusals",
    "Regional",
    "Renews",
    "Rest",
    "Tidies",
    "Transport",
    "blocklist",
    "chosen",
    "each_done",
    "everywhere",
    "imported",
    "lacks",
    "pages",
    "preflight",
    "recording",
    "retry",
    "settings",
    "ssh_machine",
    "tags",
    "transports",
    "undo",
    "userdata",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
