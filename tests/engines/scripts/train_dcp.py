"""Train a small network, with checkpoints of torch.distributed.checkpoint. Goes on from the last one in `out`."""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
parser.add_argument("--pause", type=float, default=0.0, help="seconds for each step")
asked = parser.parse_args()

print("begins", flush=True)
torch.manual_seed(0)
rows = torch.randn(512, 64)
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)


def state() -> dict[str, Any]:
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optim": optim}


def loss() -> Any:
    return (net(rows) - rows.sum(1, keepdim=True)).square().mean()


def whole() -> list[int]:
    """Return the steps of the checkpoints that are whole."""
    return sorted(int(each.parent.name.removeprefix("step-")) for each in Path("out").glob("step-*/.metadata"))


first = max(whole(), default=0)
if first:
    found = state()
    dcp.load(found, checkpoint_id=f"out/step-{first}")
    set_state_dict(net, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
saving: Any = None
for step in range(first + 1, asked.steps + 1):
    optimizer.zero_grad()
    now = loss()
    now.backward()
    optimizer.step()
    print(f"step {step} loss {now.item():.9f}", flush=True)
    time.sleep(asked.pause)
    if step % asked.every == 0:
        if saving is not None:
            saving.result()
        if step % (2 * asked.every):
            dcp.save(state(), checkpoint_id=f"out/step-{step}")
        else:
            saving = dcp.async_save(state(), checkpoint_id=f"out/step-{step}")
        for old in whole()[:-2]:
            shutil.rmtree(f"out/step-{old}")
if saving is not None:
    saving.result()
print(f"final {loss().item():.9f}", flush=True)
