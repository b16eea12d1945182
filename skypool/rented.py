"""What machines that were rented have in common: ssh with the pool's keys, and a guard of their own."""

from __future__ import annotations

from skypool import hostkeys, transport, userdata
from skypool.keys import Keys
from skypool.model import Access, Instance


def access(
    instance: Instance,
    address: str,
    *,
    user: str,
    port: int = 22,
    booting: float = 420.0,
    settling: float = 120.0,
    watch: str = "",
) -> Access:
    """ssh with the pool's own key to a machine that was told the host key of its token at its boot, and no other one.

    Args:
        user, port: where it lets the pool in.
        booting, settling, watch: as `Access` has them.
    """
    keys, folder = Keys.of(instance.pool), f"~/.skypool/pools/{instance.pool}.{instance.rank}"
    ssh = transport.SSH(address, user=user, port=port, identity=keys.identity)
    _, key = keys.host(instance.token)
    return Access(
        transport=hostkeys.declared(ssh, f"{instance.provider}-{instance.id}", key),
        python=None,
        folder=folder,
        spool=folder,
        cwd="~/.skypool/work",
        booting=booting,
        settling=settling,
        guard=userdata.GUARD,
        watch=watch,
    )
