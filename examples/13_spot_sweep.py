"""Sweep learning rates on spot GPUs of three clouds. Needs accounts there, or at those named; costs a few USD an hour.

`skypool plan L4 A10G RTX_4090 --spot --nodes 4` says what they ask today. No node costs more than 1 USD/h.
A trial whose machine is taken back runs again on another machine.
"""

import random
import sys

import skypool as sky


@sky.compute
def trial(rate: float) -> tuple[float, float]:
    numbers = random.Random(0)  # put your training here; 07_fine_tune.py uses the GPU
    weight = 0.0
    for _ in range(1000):
        x = numbers.gauss(0, 1)
        weight -= rate * 2 * (weight * x - 3 * x) * x
    return abs(weight - 3), rate


if __name__ == "__main__":
    clouds = sys.argv[1:] or ["aws", "gcp", "vastai"]
    rates = [0.3 / 2**n for n in range(12)]
    with sky.ComputePool(
        clouds,
        accelerator=["L4", "A10G", "RTX_4090"],
        market="spot",
        nodes=(1, 4),
        max_usd_per_hour=1,
        max_lifetime="1h",
    ) as pool:
        trials = sky.gather(*map(trial, rates), stream=True, ordered=False) >> pool
        for error, rate in trials:
            print(f"rate {rate:.5f}: off by {error:.2e}")
    print(pool.receipt)
