"""Train with checkpoints that are whole or not there, and go on from the last. Needs torch here; costs nothing.

The machine is a process of this computer, and its bucket a folder. For a rented one, name an s3:// place: docs/save.md.
"""

import os
import tempfile

import skypool as sky


@sky.compute(retries=5)
def train(steps: int) -> tuple[int, float]:
    import torch

    rows = torch.randn(512, 64)
    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    store, first, loss = sky.Checkpoints("ckpt", keep=2), 0, 0.0
    if last := store.latest():  # as after a lost machine
        first, state = last.step, torch.load(last.path / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(first + 1, steps + 1):
        optimizer.zero_grad()
        error = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        error.backward()
        optimizer.step()
        loss = error.item()
        if step % 50 == 0:
            with store.save(step) as folder:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")
    return first, loss


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    with sky.ComputePool(save={"ckpt": f"file://{os.getcwd()}/bucket"}) as pool:
        for steps in (100, 200):  # the second call goes on from what the first has saved
            print("from step {}: loss {:.3f}".format(*(train(steps) >> pool)))
