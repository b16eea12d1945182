"""Load every checkpoint of a trainer in the folder `out` of each folder that is named, and print its step.

python load_checkpoints.py hf FOLDER FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any


def hf(out: Path) -> list[int]:
    import torch
    from safetensors.torch import load_file

    found = []
    for each in sorted(out.glob("checkpoint-*")):
        load_file(each / "model.safetensors")
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.load(each / name, weights_only=False)
        found.append(int(json.loads((each / "trainer_state.json").read_text())["global_step"]))
    return found


def lightning(out: Path) -> list[int]:
    import torch

    return [int(torch.load(each, weights_only=False)["global_step"]) for each in sorted(out.glob("*.ckpt"))]


def dcp(out: Path) -> list[int]:
    import tempfile

    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    found = []
    for each in sorted(out.glob("step-*")):
        with tempfile.TemporaryDirectory() as folder:
            dcp_to_torch_save(each, f"{folder}/all")
            steps: Any = torch.load(f"{folder}/all", weights_only=False)["optim"]["state"]["0.weight"]["step"]
        found.append(int(steps))
    return found


def orbax(out: Path) -> list[int]:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(out.absolute()) as manager:
        for step in manager.all_steps():
            manager.restore(step, args=ocp.args.StandardRestore())
        return [*manager.all_steps()]


for each in sys.argv[2:]:
    place = Path(each, "out")
    print(sorted({*globals()[sys.argv[1]](place)}) if place.exists() else [], flush=True)
