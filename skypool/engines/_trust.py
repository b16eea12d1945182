"""Refuses pools whose machines an engine must not run on."""

from __future__ import annotations

import ipaddress

import skypool as sky


def refuse_strangers(pool: sky.ComputePool, engine: str) -> None:
    """Raise a UsageError if results of the pool's nodes (machines) may be plain data only.

    Args:
        pool: the pool.
        engine: the name of the engine, for the message.
    """
    if pool.trust == "data":
        raise sky.UsageError(
            f'{engine} cannot run on pool {pool.name!r}: results of its machines are plain data only (trust="data"), '
            f"and {engine}'s results may be any objects; use pool.map with functions that return plain data, or pass "
            'trust="full" to ComputePool if you trust the owners of these machines'
        )


def refuse_public_address(pool: sky.ComputePool, node: int, address: str, engine: str) -> None:
    """Raise a UsageError if the ports that an engine opens at an address of a node are open to the internet.

    Args:
        pool: the pool.
        node: the number of the node.
        address: the address at which other nodes reach the node. "" stands for an unknown address, and is accepted.
        engine: the name of the engine, for the message.
    """
    try:
        is_public = ipaddress.ip_address(address).is_global
    except ValueError:
        return  # a name, or no address
    if is_public:
        raise sky.UsageError(
            f"{engine} cannot run on pool {pool.name!r}: the other nodes reach node {node} at {address}, a public "
            f"address, so the ports of {engine} would be open to others; pass private_network=True to "
            "ComputePool, or use hosts that share a network of their own"
        )
