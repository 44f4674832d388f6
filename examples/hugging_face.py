"""A model of Hugging Face transformers: its own loss, batches that are dicts, and back to a folder of theirs.

    python examples/hugging_face.py [runs/hugging_face]          needs transformers

The model is a tiny GPT-2 that is made from its config, so nothing is downloaded. It learns to count.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from ignite_engine import Trainer, Update, loader, seed_everything
from ignite_engine.handlers import Checkpoint, GracefulStop, LRSchedule, MetricLogger, warmup_cosine

Batch = dict[str, Tensor]


def loss_fn(model: Any, batch: Batch) -> Tensor:
    """The mean over the tokens, which the model computes itself where it is given ``labels``."""
    loss: Tensor = model(**batch).loss
    return loss


def count_tokens(batch: Batch) -> int:
    return int(batch["attention_mask"].sum())


def samples(count: int = 512, length: int = 12) -> list[Batch]:
    """Numbers that count up from a random one, modulo 32; transformers shifts the labels by itself."""
    starts = torch.randint(32, (count, 1), generator=torch.Generator().manual_seed(0))
    numbers = (starts + torch.arange(length)) % 32
    return [{"input_ids": each, "labels": each, "attention_mask": torch.ones_like(each)} for each in numbers]


def main(directory: str = "runs/hugging_face", *, epochs: int = 5) -> Any:
    """Train, or resume; then save as transformers does."""
    seed_everything(0)
    config = GPT2Config(vocab_size=32, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).to(idist.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # every micro-batch weighs what it has of tokens, so the mean is exact over accumulation and ranks
    update = Update(
        model, optimizer, loss_fn, clip_norm=1.0, weight_fn=lambda batch: int(batch["attention_mask"].sum())
    )
    trainer = Trainer(update, accumulation_steps=2)
    LRSchedule(warmup_cosine(optimizer, warmup=0.1)).attach(trainer)
    MetricLogger(directory).attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    GracefulStop().attach(trainer)
    checkpoint.resume()
    trainer.run(loader(samples(), batch_size=16, shuffle=True), max_epochs=epochs)

    folder = Path(directory) / "model"
    model.save_pretrained(folder)
    again = GPT2LMHeadModel.from_pretrained(folder, local_files_only=True)
    counted = again.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
    print(f"5, 6, 7 goes on: {counted[0, 3:].tolist()}")
    return again


if __name__ == "__main__":
    main(*sys.argv[1:])
