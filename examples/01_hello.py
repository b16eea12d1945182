"""The smallest pool: this machine. Needs nothing and costs nothing."""

from __future__ import annotations

import os

import skypool as sky


@sky.compute
def hello(name: str) -> str:
    print(f"working in process {os.getpid()}")
    return f"hello {name}, from node {sky.instance_info().node}"


if __name__ == "__main__":
    with sky.ComputePool(nodes=2, slots=1) as pool:
        print(hello("world") >> pool)  # one node
        print(hello("everyone") @ pool)  # every node
        print((hello("you") & hello("me")) >> pool)  # both at once
