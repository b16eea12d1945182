"""Train a small network with Lightning. Goes on from the last checkpoint in `out`, if there is one."""

import argparse
import time
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
parser.add_argument("--pause", type=float, default=0.0, help="seconds for each step")
asked = parser.parse_args()


class Net(lightning.LightningModule):
    """A network of two layers that learns to add."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))

    def training_step(self, batch: Any) -> Any:
        (rows,) = batch
        return (self.layers(rows) - rows.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Shown(Callback):
    """Prints each step."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(f"step {trainer.global_step} loss {outputs['loss'].item():.9f}", flush=True)
        time.sleep(asked.pause)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        print(f"saves {trainer.global_step}", flush=True)


lightning.seed_everything(0, verbose=False)
rows = torch.randn(32 * asked.every, 64)  # an epoch ends with a checkpoint
trainer = lightning.Trainer(
    max_steps=asked.steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[ModelCheckpoint("out", save_last=True, every_n_train_steps=asked.every), Shown()],
)  # fmt: skip
print("begins", flush=True)
net = Net()
trainer.fit(net, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=32), ckpt_path="last")
with torch.no_grad():
    print(f"final {net.training_step((rows,)).item():.9f}", flush=True)
