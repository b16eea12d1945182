"""Train in four processes on two spot machines of a fake cloud, with checkpoints in a bucket, and three interruptions.

    python gang_checkpoints.py FOLDER ENDPOINT [ID SECRET]

A rank is killed, then a machine, and then the cloud takes a machine back after a notice. Prints one JSON object: the
losses with interruptions and without, and where each attempt has begun.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import skypool as sky
from skypool.testing import FakeCloud, Stock

STEPS = 24
EVERY = 3
OPTIONS = {"slots": 1, "console": "off", "nodes": 2, "market": "spot", "liveness": 8}


@sky.compute(procs=2, retries=9, timeout=150, output="silent")
def train(folder: str, log: str, pause: float) -> float:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    rows = torch.randn(1024, 64)[rank::world]
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    store = sky.Checkpoints(folder, keep=2)
    options = StateDictOptions(cpu_offload=True)

    def state() -> dict:
        model, optim = get_state_dict(net, optimizer, options=options)
        return {"model": model, "optim": optim}

    def parts() -> dict:
        """Return what this rank has of the model."""
        return {name: each.to_local().contiguous() for name, each in net.state_dict().items()}

    last = store.latest()
    if last is not None:
        found = state()
        dcp.load(found, checkpoint_id=last.path)
        set_state_dict(net, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
        for name, each in load_file(last.path / f"part-{rank}.safetensors").items():
            assert torch.equal(each, parts()[name]), f"{name} of rank {rank} is not as it was saved"
        own = torch.load(last.path / "own.pt")
        assert own["step"] == last.step
        torch.set_rng_state(own["random"])
    with open(f"{log}-{rank}", "a", buffering=1) as said:
        print(json.dumps({"pid": os.getpid(), "first": last.step if last else 0}), file=said)
        loss = torch.zeros(())
        for step in range(last.step + 1 if last else 1, STEPS + 1):
            optimizer.zero_grad()
            noise = 0.1 * torch.randn(len(rows), 64)
            loss = (net(rows + noise) - rows.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            time.sleep(pause)
            if step % EVERY == 0:
                with store.save(step, wait=step == STEPS) as new:
                    dcp.save(state(), checkpoint_id=new)
                    save_file(parts(), new / f"part-{rank}.safetensors")
                    torch.save({"step": step, "random": torch.get_rng_state()}, new / "own.pt")
            print(json.dumps({"step": step, "safe": store.safe()}), file=said)
    dist.all_reduce(loss)
    dist.barrier()
    dist.destroy_process_group()
    return float(loss) / world


def notes(log: str) -> list[dict]:
    """Return what rank 0 has noted so far."""
    try:
        lines = Path(f"{log}-0").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(each) for each in lines]


def interrupt(cloud: FakeCloud, log: str, problems: list) -> None:
    """Have the three interruptions, each when its attempt has saved a checkpoint."""
    control = cloud.control
    kinds = [
        lambda: os.kill(next(each["pid"] for each in notes(log)[::-1] if "pid" in each), signal.SIGKILL),
        lambda: control.kill(cloud.instances()[-1]),
        lambda: control.interrupt(cloud.instances()[0], 2),
    ]
    until = time.monotonic() + 150
    for number, kind in enumerate(kinds, 1):
        while True:
            found = notes(log)
            begun = [at for at, each in enumerate(found) if "pid" in each]
            newest = found[begun[-1]]["first"] if begun else 0
            if len(begun) >= number and any((each.get("safe") or 0) > newest for each in found[begun[-1] :]):
                break
            if time.monotonic() > until:
                problems.append(f"interruption {number} could not come: {found[-9:]}")
                return
            time.sleep(0.05)
        kind()


def main(folder: str, endpoint: str) -> None:
    bucket = sky.Bucket("s3://models/runs/gang", endpoint, keys=("SAVE_ID", "SAVE_SECRET"))
    losses, problems = [], []
    for name in ("alone", "cut"):
        save = {"ckpt": bucket} if name == "cut" else None
        with FakeCloud(f"{folder}/{name}", [Stock(market="spot")]) as cloud:
            with sky.ComputePool(cloud, save=save, **OPTIONS) as pool:
                log = f"{folder}/log-{name}"
                thread = threading.Thread(target=interrupt, args=(cloud, log, problems))
                if save:
                    thread.start()
                everywhere = train.with_options(node="all")
                losses.append(everywhere("ckpt", log, 0.5 if save else 0) @ pool)
                if save:
                    thread.join()
    firsts = [each["first"] for each in notes(f"{folder}/log-cut") if "pid" in each]
    print(json.dumps({"alone": losses[0], "cut": losses[1], "firsts": firsts, "problems": problems}))


if __name__ == "__main__":
    main(*sys.argv[1:])
