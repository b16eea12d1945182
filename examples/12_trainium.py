"""Train on one Trainium chip with PyTorch/XLA. Needs an account at AWS; costs about 1.40 USD an hour.

AWS asked 1.34 USD/h for a trn1.2xlarge on 2026-03-02. `skypool plan Trainium1 --provider aws` says today's price.
The first step compiles the model, which may take minutes.
"""

import sys

import skypool as sky


@sky.compute
def train(steps: int) -> tuple[str, float]:
    import torch
    import torch_xla.core.xla_model as xm

    device = xm.xla_device()
    model = torch.nn.Linear(64, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        rows = torch.randn(1024, 64).to(device)
        loss = (model(rows).squeeze(1) - rows.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        xm.mark_step()  # run the operations recorded so far
    return str(device), float(loss)


if __name__ == "__main__":
    image = sky.Image(pip=["torch-neuronx", "neuronx-cc"])
    with sky.ComputePool(sys.argv[1:] or "aws", accelerator="Trainium1", image=image, max_lifetime="1h") as pool:
        device, loss = train(100) >> pool
    print(f"loss {loss:.4f} on {device}\n{pool.receipt}")
