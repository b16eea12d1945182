"""Refuses pools on which an engine must not run: with machines of strangers, or with ports open to the internet."""

from __future__ import annotations

import ipaddress

import skypool as sky


def refuse_strangers(pool: sky.ComputePool, engine: str) -> None:
    """Raise a UsageError if the pool's `trust` is "data", because its machines may belong to strangers."""
    if pool.trust == "data":
        raise sky.UsageError(
            f'{engine} cannot run on pool {pool.name!r}: results of its machines are plain data only (trust="data"), '
            f"and {engine}'s results may be any objects; use pool.map with functions that return plain data, or pass "
            'trust="full" to ComputePool if you trust the owners of these machines'
        )


def refuse_public_address(pool: sky.ComputePool, node: int, address: str, engine: str) -> None:
    """Raise a UsageError if a node's address is public, so that an engine's ports there would be open to the internet.

    `address` is the one at which other nodes reach the node. "" stands for an unknown address, and is accepted.
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
