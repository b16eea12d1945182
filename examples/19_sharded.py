"""Train in 2 x 2 processes, each with a part of the model and of its checkpoints. Needs torch here; costs nothing."""

import tempfile

import skypool as sky
from skypool.testing import FakeCloud


@sky.compute(procs=2, retries=5)
def train(steps: int) -> int:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (4,))
    model = fully_shard(torch.nn.Linear(64, 8), mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    store, first = sky.Checkpoints("ckpt", keep=2), 0
    if last := store.latest():  # the same one for all processes
        first, (weights, moments) = last.step, get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=last.path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    for step in range(first + 1, steps + 1):
        rows = torch.randn(256, 64)
        optimizer.zero_grad()
        (model(rows) - rows[:, :8]).square().mean().backward()
        optimizer.step()
        if step % 10 == 0:
            weights, moments = get_state_dict(model, optimizer)
            with store.save(step, wait=step == steps) as folder:
                dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    return first


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as top, FakeCloud(f"{top}/cloud") as cloud:
        with sky.ComputePool(cloud, nodes=2, save={"ckpt": f"file://{top}/bucket"}) as pool:  # or s3://…
            print(f"began at {train(20) @ pool}, and then at {train(40) @ pool}")
