"""The names of SSH keys, scripts and volumes at Verda, which cannot have tags, written and read.

A name holds the pool, a token, the end of the lease, and the owner.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from skypool.drivers import tags

_LABEL = re.compile(r"skypool_([a-z0-9-]+)_([a-z0-9-]+)_(\d{4}-\d\d-\d\dT\d{6}Z|)_([A-Za-z0-9@._-]+)")
"""Matches the name of a resource that a pool created. Its groups are pool, token, end of the lease, and owner.

The end of the lease has no colons, or is "".
"""


@dataclass(frozen=True, slots=True)
class Label:
    """The values in the name of a volume, an SSH key or a script at Verda. `str(label)` is the name.

    Attributes:
        pool: name of the pool.
        token: token of the order. An SSH key, which all orders of a pool share, has the beginning of the tokens that
            these orders have in common.
        until: end of the lease, or None if there is none.
        owner: user who created the resource, as user@host.
    """

    pool: str
    token: str
    until: datetime | None
    owner: str

    def __str__(self) -> str:
        until = tags.stamp(self.until).replace(":", "")
        return f"skypool_{self.pool}_{self.token}_{until}_{self.owner}"


def label(name: str, pool: str | None) -> Label | None:
    """Return the values in the name of a resource, or None if no pool of this user has written the name.

    Args:
        name: name of the resource at Verda.
        pool: name of a pool that was started from this computer; a resource of another pool gives None. If `pool` is
            None, all pools of this user are accepted.
    """
    found = _LABEL.fullmatch(name)
    if found is None:
        return None
    named, token, until, owner = found.groups()
    if not tags.ours({tags.POOL: named, tags.OWNER: owner}, pool):
        return None
    with_colons = re.sub(r"(..)(..Z)$", r":\1:\2", until)
    return Label(named, token, tags.when(with_colons), owner)
