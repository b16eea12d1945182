"""Keep a Trainer of Hugging Face in a bucket, unchanged. Needs transformers, and a bucket; costs about 1 USD an hour.

    skypool run --gpu A10G --provider aws --budget 5 --with transformers --with accelerate \
        --save out=s3://NAME/runs/trainer --bucket-keys ID,SECRET examples/17_trainer.py

Whatever ends it: the same line again goes on from the last checkpoint (docs/save.md). `python examples/17_trainer.py`
trains on this computer, which costs nothing. It goes on, too, as `out` stays.
"""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

torch.manual_seed(0)
Path("out").mkdir(exist_ok=True)
rows = [{"input_ids": row, "labels": row} for row in torch.arange(50).repeat(40).split(20)]  # put your own texts here
trainer = Trainer(
    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=20, n_embd=64, n_layer=2, n_head=2, bos_token_id=0)),
    TrainingArguments("out", num_train_epochs=8, save_steps=20, save_total_limit=2, report_to="none"),
    train_dataset=rows,
)
last = get_last_checkpoint("out")
print(f"goes on from {last}" if last else "begins")
trainer.train(resume_from_checkpoint=last)
print(f"loss {trainer.evaluate(rows)['eval_loss']:.4f} after {trainer.state.global_step} steps")
