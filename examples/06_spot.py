"""Train on machines that may be taken back, and lose no step. Needs nothing, costs nothing: here nobody takes any."""

import time

import skypool as sky

STEPS = 300


@sky.compute
def train(weight: float, step: int) -> tuple[float, int]:
    while step < STEPS and sky.interruption() is None:  # None until the provider says when the machine goes
        weight -= 0.05 * 2 * (weight - 3.0)
        step += 1
        time.sleep(0.005)
    return weight, step  # all steps, or those done until the notice


if __name__ == "__main__":
    weight, step = 0.0, 0
    with sky.ComputePool(market="spot-if-available") as pool:
        while step < STEPS:
            weight, step = train(weight, step) >> pool  # after a notice: on the node that takes the place
            print(f"{step} steps, weight {weight:.3f}")
