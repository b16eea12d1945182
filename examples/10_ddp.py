"""Train on several nodes, with several processes on each. Needs torch installed here; costs nothing.

The nodes are processes of this computer. This program uses CPUs only. For GPUs on rented machines, start from
docs/guides/many-nodes.md. It prints "4 processes", and their mean loss.
"""

import skypool as sky


@sky.compute(procs=2)
def train(steps: int) -> float:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    rows = torch.randn(4096, 64)[rank::world]
    model = DistributedDataParallel(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        loss.backward()  # averages the gradients of all processes
        optimizer.step()
    return float(loss)


if __name__ == "__main__":
    with sky.ComputePool(nodes=2) as pool:
        losses = train(50) @ pool
    print(f"{len(losses)} processes, mean loss {sum(losses) / len(losses):.5f}")
