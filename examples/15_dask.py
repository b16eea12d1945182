"""A Dask cluster on a pool that gets a second node. Needs "skypool[dask]" and "dask[array]"; costs nothing."""

import dask.array
from distributed import Client

import skypool as sky

if __name__ == "__main__":
    with sky.ComputePool(slots=1) as pool:  # one node on this machine; with sky.AWS(), a rented one
        with sky.dask.cluster(pool) as cluster, Client(cluster) as client:
            cluster.scale(2)
            client.wait_for_workers(2)
            x = dask.array.arange(1_000_000, chunks=100_000)
            print(f"mean of the squares: {(x.astype(float) ** 2).mean().compute():.1f}")
            print(f"nodes: {list(pool.nodes.values())}")
