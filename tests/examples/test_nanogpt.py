"""The setting of nanoGPT has the losses of a loop that is written by hand as nanoGPT's is."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ignite_engine.cli import main
from ignite_engine.config import load_config
from ignite_engine.task import build_task, find_task

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "nanogpt_cpu.yaml"
build = find_task("nanogpt.py:build", ROOT / "examples")
nanogpt = sys.modules[build.__module__]
STEPS = 20


def losses_of_the_loop(text, *, clip, warmup_iters, lr_decay_iters):
    """The losses of the first updates, in the way of nanoGPT's train.py on a CPU."""
    vocabulary = sorted(set(text))
    data = torch.tensor([vocabulary.index(each) for each in text])[: int(0.9 * len(text))]
    draws = torch.Generator().manual_seed(1337)
    torch.manual_seed(1337)
    model = nanogpt.GPT(nanogpt.Options(), len(vocabulary))
    groups = [
        {"params": [each for each in model.parameters() if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in model.parameters() if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    losses = []
    for update in range(STEPS):
        if update < warmup_iters:
            lr = 1e-3 * (update + 1) / (warmup_iters + 1)
        elif update > lr_decay_iters:
            lr = 1e-4
        else:
            progress = (update - warmup_iters) / (lr_decay_iters - warmup_iters)
            lr = 1e-4 + 0.5 * (1.0 + math.cos(math.pi * progress)) * (1e-3 - 1e-4)
        for group in optimizer.param_groups:
            group["lr"] = lr
        places = torch.randint(len(data) - 64, (12,), generator=draws)
        inputs = torch.stack([data[place : place + 64] for place in places])
        targets = torch.stack([data[place + 1 : place + 65] for place in places])
        logits = model(inputs)
        loss = functional.cross_entropy(logits.view(-1, len(vocabulary)), targets.view(-1))
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("clip", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_losses_are_those_of_the_loop(clip, tmp_path):
    """Bit for bit, through warm-up, cosine and the rate at the end, also where the norm is over two groups."""
    text = tmp_path / "input.txt"
    text.write_text((ROOT / "README.md").read_text())
    overrides = {
        "task_options.text": str(text),
        "task_options.windows": 12 * STEPS,
        "task_options.eval_windows": 12,
        "task_options.warmup_iters": 6,
        "task_options.lr_decay_iters": 16,
        "run.directory": str(tmp_path / "run"),
        "run.max_iterations": STEPS,
        "update.clip_norm": 1.0 if clip else "null",
        "evaluation.every": 7,  # changes nothing
        "logging.every": 1,
    }
    assert main(["train", str(CONFIG), *(f"{key}={value}" for key, value in overrides.items())]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]

    expected = losses_of_the_loop(text.read_text(), clip=clip, warmup_iters=6, lr_decay_iters=16)
    assert losses == expected
    assert len(set(losses)) == STEPS and losses[-1] < losses[0]
    assert [line["iteration"] for line in lines if "val/loss" in line] == [0, 7, 14, 20]


@pytest.mark.slow
def test_setting_is_that_of_nanogpt():
    config = load_config(CONFIG)
    task = build_task(build, config.task_options)

    in_blocks = sum(each.numel() for each in task.model.blocks.parameters())
    assert in_blocks == 4 * (12 * 128 * 128 + 2 * 128)
    assert nanogpt.Options(**config.task_options) == nanogpt.Options()
    assert len(task.train_set) == 2000 * 12 == config.run.max_iterations * config.data.batch_size
    assert len(nanogpt.read_text(None)) == nanogpt.CHARACTERS
