"""A Ray cluster on a pool, and a function that uses it. Needs nothing here: the node installs Ray; costs nothing."""

import skypool as sky


def mean_of_squares(parts: int, size: int) -> float:
    import ray

    ray.init(log_to_driver=False)  # finds the cluster

    def total(start: int) -> int:
        return sum(x * x for x in range(start, start + size))

    task = ray.remote(total)
    totals: list[int] = ray.get([task.remote(part * size) for part in range(parts)])
    return sum(totals) / (parts * size)


if __name__ == "__main__":
    image = sky.Image(pip=["ray[default]==2.60.0"])
    with sky.ComputePool(image=image, slots=1) as pool:  # one node on this machine; with sky.AWS(), a rented one
        with sky.ray.cluster(pool) as r:
            print(f"mean of the squares: {r.run(mean_of_squares, 10, 100_000):.1f}")
