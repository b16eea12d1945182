"""Train a small language model with Hugging Face's Trainer. Goes on from the last checkpoint in `out`."""

import argparse
import os
import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
parser.add_argument("--pause", type=float, default=0.0, help="seconds for each step")
asked = parser.parse_args()


class Shown(TrainerCallback):
    """Prints each step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']:.9f}", flush=True)
            time.sleep(asked.pause)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        print(f"saved {state.global_step}", flush=True)


torch.manual_seed(0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (512, 16))]
os.makedirs("out", exist_ok=True)
trainer = Trainer(
    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0)),
    TrainingArguments(
        "out", max_steps=asked.steps, save_steps=asked.every, save_total_limit=2, logging_steps=1, report_to="none",
        disable_tqdm=True, per_device_train_batch_size=8, learning_rate=1e-3, seed=1, use_cpu=True,
    ),
    train_dataset=rows,
    callbacks=[Shown()],
)  # fmt: skip
print("begins", flush=True)
trainer.train(resume_from_checkpoint=get_last_checkpoint("out") is not None)
print(f"final {trainer.evaluate(rows[:64])['eval_loss']:.9f}", flush=True)
