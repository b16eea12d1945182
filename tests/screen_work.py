"""A program with two pools of the fake cloud, which tests of screens look at. Its nodes read the NVML of `tests/nvml`.

    python -m tests.screen_work FOLDER

`prepare` puts into the folder what the program needs. The program writes "ready" there when there is something to see,
and ends when the file "end" is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import skypool as sky
from skypool.model import Instance
from skypool.testing import Stock
from tests.nvml import FakeNvml, build
from tests.nvml.cloud import CloudWithCards

STOCK = (Stock("p5.48xlarge", 23.92, "H100:8"), Stock("p5.4xlarge", 2.99, "H100"))
CARDS = {"train-0": 8, "train-1": 8, "embed-0": 1}
"""The number of cards of each node."""


class CloudWithThem(CloudWithCards):
    """A cloud whose machines have the cards that `prepare` has put beside it, and not the devices that it tells."""

    def env(self, instance: Instance) -> tuple[str, ...]:
        script = self.beside / f"{instance.pool}-{instance.node}" / "script"
        return ("-u", "SKYPOOL_DEVICES", f"LD_LIBRARY_PATH={self.beside}", f"NVML_SCRIPT={script}")


def prepare(folder: Path) -> None:
    """Build the NVML, and say what each card of each node measures. Those of "train-0" work, the others are idle."""
    build(folder)
    for node, count in CARDS.items():
        (folder / node).mkdir()
        cards = FakeNvml(folder, folder / node)
        cards.say(0, count=count)
        for card in range(count) if node == "train-0" else ():
            load = {"busy": 38 + 8 * card, "memory": 62_000 + 2_000 * card, "milliwatts": 410_000 + 30_000 * card}
            cards.say(card, **load)


@sky.compute
def train(end: str) -> None:
    cards = Path(os.environ["NVML_SCRIPT"])
    part = cards.with_suffix(".part")
    use = "".join(f"{card} pid {os.getpid()}\n{card} pid_memory 61440\n" for card in range(CARDS["train-0"]))
    part.write_text(cards.read_text() + use)
    part.replace(cards)
    print("config: batch 512, learning rate 3e-4, warmup 2000 steps, precision bf16, checkpoint runs/2026-11-25-a")
    for step in range(1, 4):
        print(f"step {400 * step} loss {2.9 - 0.2 * step:.2f}", flush=True)
    while not Path(end).exists():
        time.sleep(0.1)


@sky.compute
def embed(text: int) -> int:
    return text


def main(folder: Path) -> None:
    """Run the pools until they are told to end."""
    end = folder / "end"
    with (
        CloudWithThem(folder / "cloud", STOCK) as cloud,
        sky.ComputePool(cloud, accelerator="H100:8", nodes=2, name="train", budget=500) as pool,
        sky.ComputePool(cloud, accelerator="H100", name="embed") as other,
    ):
        working = train(str(end)).with_options(node=0) > pool
        assert list(other.map(embed, range(40))) == list(range(40))
        (folder / "ready").touch()
        working.result()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
