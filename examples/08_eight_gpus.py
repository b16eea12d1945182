"""Train on eight GPUs with one call. Needs an account at AWS, or at those named; costs about 55 USD an hour.

AWS asked 55.06 USD/h on 2026-03-02. `skypool plan H100:8` says what each provider asks today.
"""

import sys

import skypool as sky


def train_copy(rank: int, world: int) -> None:
    import torch

    device, backend = (f"cuda:{rank}", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    torch.distributed.init_process_group(backend, "tcp://127.0.0.1:29500", rank=rank, world_size=world)
    torch.manual_seed(rank)  # each process makes rows of its own
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        rows = torch.randn(4096, 64, device=device)
        loss = (model(rows).squeeze(1) - rows.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # averages the gradients of all processes
        optimizer.step()
    print(f"process {rank} of {world} on {device}: loss {loss.item():.4f}")
    torch.distributed.destroy_process_group()


@sky.compute
def train() -> None:
    import torch.multiprocessing as processes

    world = len(sky.instance_info().accelerators)  # the call has all devices of its node
    processes.spawn(train_copy, (world,), nprocs=world)


if __name__ == "__main__":
    image = sky.Image(pip=["torch", "numpy"])
    with sky.ComputePool(sys.argv[1:] or "aws", accelerator="H100:8", image=image, max_lifetime="1h") as pool:
        train() >> pool
