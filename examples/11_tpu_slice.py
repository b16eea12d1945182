"""Multiply matrices on a TPU slice of four hosts, with JAX. Needs a Google Cloud project; costs about 19 USD an hour.

Google asked 1.20 USD/h for each of its 16 chips on 2024-12-23. `skypool plan v5e-16 --provider gcp` says today's price.
Read docs/tpu.md first: a slice ends by itself only with a service account. It may wait in Google's queue, at no cost.
"""

import sys

import skypool as sky


@sky.compute
def multiply(size: int) -> tuple[int, int, float]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    if sky.instance_info().nodes > 1:
        jax.distributed.initialize()  # the hosts of a slice know each other
    by_rows = NamedSharding(Mesh(jax.devices(), ("rows",)), PartitionSpec("rows"))
    ones = jax.jit(lambda: jnp.ones((size, size)), out_shardings=by_rows)()  # each chip has some of the rows
    total = jax.jit(lambda matrix: (matrix @ matrix).sum())(ones)
    return jax.local_device_count(), jax.device_count(), float(total)


if __name__ == "__main__":
    image = sky.Image(pip=["jax"])
    with sky.ComputePool(sys.argv[1:] or "gcp", accelerator="v5e-16", image=image, max_lifetime="1h") as pool:
        for host, (own, chips, total) in enumerate(multiply(1024) @ pool):
            print(f"host {host}: {own} of {chips} chips, sum {total:,.0f} of {1024**3:,}")
