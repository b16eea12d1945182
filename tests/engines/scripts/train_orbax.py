"""Train a small network with JAX, and checkpoints of orbax. Goes on from the last one in `out`, if there is one."""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
parser.add_argument("--pause", type=float, default=0.0, help="seconds for each step")
asked = parser.parse_args()

print("begins", flush=True)
rows = jax.random.normal(jax.random.key(0), (512, 64))
weights = jax.random.normal(jax.random.key(1), (64, 256)) / 8, jax.random.normal(jax.random.key(2), (256,)) / 16


def loss(weights: Any) -> Any:
    inner, outer = weights
    return jnp.square(jnp.tanh(rows @ inner) @ outer - rows.sum(1)).mean()


@jax.jit
def trained(state: Any) -> Any:
    value, slopes = jax.value_and_grad(loss)(state["weights"])
    momentum = jax.tree.map(lambda old, slope: 0.9 * old + slope, state["momentum"], slopes)
    weights = jax.tree.map(lambda old, move: old - 1e-3 * move, state["weights"], momentum)
    return {"weights": weights, "momentum": momentum}, value


state = {"weights": weights, "momentum": jax.tree.map(jnp.zeros_like, weights)}
options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=asked.every)
with ocp.CheckpointManager(Path("out").absolute(), options=options) as manager:
    first = manager.latest_step() or 0
    if first:
        state = manager.restore(first, args=ocp.args.StandardRestore(state))
    for step in range(first + 1, asked.steps + 1):
        state, now = trained(state)
        print(f"step {step} loss {now:.9f}", flush=True)
        time.sleep(asked.pause)
        manager.save(step, args=ocp.args.StandardSave(state))  # each step in `every`
    manager.wait_until_finished()
print(f"final {loss(state['weights']):.9f}", flush=True)
