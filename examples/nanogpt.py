"""nanoGPT's smallest setting, characters on a CPU: the task of ``configs/nanogpt_cpu.yaml``.

    python -m ignite_engine train configs/nanogpt_cpu.yaml task_options.text=input.txt

Model, data, optimizer and learning rate are those of https://github.com/karpathy/nanoGPT with its options for a CPU.
The losses are those of its loop: bit for bit without clipping, and with it up to the rounding of the norm. Its text is
tiny Shakespeare; without a file it is as much of the source of Python's standard library.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from byte_corpus import source_files
from ignite.metrics import Loss
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from ignite_engine import Task

CHARACTERS = 1_115_394  # of tiny Shakespeare


@dataclass(frozen=True)
class Options:
    """The config's ``task_options``."""

    text: str | None = None  # a file; None: the source of Python's standard library
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 64  # characters in a window
    dropout: float = 0.0
    windows: int = 24_000  # drawn for training: iterations x batch size
    eval_windows: int = 240  # drawn for the evaluation: eval_iters x batch size
    seed: int = 1337  # of the windows
    warmup_iters: int = 100
    lr_decay_iters: int = 2000
    min_lr: float = 1e-4


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a norm and added to the stream."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width = options.n_embd
        self.heads, self.dropout = options.n_head, options.dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.c_attn, self.attn_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.drop = nn.Dropout(options.dropout)

    def forward(self, stream: Tensor) -> Tensor:
        batch, time, width = stream.shape
        parts = self.c_attn(self.ln_1(stream)).split(width, dim=2)
        query, key, value = (each.view(batch, time, self.heads, -1).transpose(1, 2) for each in parts)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        stream = stream + self.drop(self.attn_proj(attended.transpose(1, 2).reshape(batch, time, width)))
        result: Tensor = stream + self.drop(self.mlp_proj(functional.gelu(self.c_fc(self.ln_2(stream)))))
        return result


class GPT(nn.Module):
    """Characters ``(batch, time)`` to logits ``(batch, time, vocabulary)``; the head shares the embedding's weights."""

    def __init__(self, options: Options, vocabulary: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, options.n_embd), nn.Embedding(options.block_size, options.n_embd)
        self.drop = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.n_layer))
        self.ln_f = nn.LayerNorm(options.n_embd, bias=False)
        self.lm_head = nn.Linear(options.n_embd, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = 0.02 / math.sqrt(2 * options.n_layer) if name.endswith("proj.weight") else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, characters: Tensor) -> Tensor:
        stream = self.drop(self.wte(characters) + self.wpe.weight[: characters.shape[1]])
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.lm_head(self.ln_f(stream))
        return logits


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows at places drawn with replacement: inputs and the same shifted by one, each ``(block_size,)``."""

    def __init__(self, text: Tensor, block_size: int, count: int, seed: int) -> None:
        self.text, self.block_size = text, block_size
        self.starts = torch.randint(len(text) - block_size, (count,), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[self.starts[index] : self.starts[index] + self.block_size + 1]
        return window[:-1], window[1:]


class CosineWithWarmup(LRScheduler):
    """nanoGPT's rates: update n of the warm-up, from 1, has n / (warmup_iters + 1) of the peak."""

    def __init__(self, optimizer: Optimizer, options: Options) -> None:
        self.options = options
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        given, update = self.options, self.last_epoch
        if update < given.warmup_iters:
            return [base * (update + 1) / (given.warmup_iters + 1) for base in self.base_lrs]
        done = min(1.0, (update - given.warmup_iters) / (given.lr_decay_iters - given.warmup_iters))
        factor = 0.5 * (1.0 + math.cos(math.pi * done))
        return [given.min_lr + factor * (base - given.min_lr) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "options"}


def predict(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and targets, one row per character."""
    inputs, targets = batch
    return model(inputs).flatten(0, 1), targets.flatten()


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy in nats per character."""
    return functional.cross_entropy(*predict(model, batch))


def read_text(path: str | None) -> str:
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    text = ""
    for file in source_files(Path(sysconfig.get_paths()["stdlib"])).values():
        text += file.read_bytes().decode("ascii", errors="ignore")
        if len(text) >= CHARACTERS:
            break
    return text[:CHARACTERS]


def build(options: Mapping[str, Any]) -> Task:
    """The task; ``options`` are the fields of :class:`Options`."""
    chosen = Options(**options)
    text = read_text(chosen.text)
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    characters = torch.tensor([numbers[each] for each in text])
    train, val = characters[: int(0.9 * len(text))], characters[int(0.9 * len(text)) :]
    model = GPT(chosen, len(numbers))
    parameters = list(model.parameters())
    return Task(
        model=model,
        loss_fn=loss_fn,
        train_set=Windows(train, chosen.block_size, chosen.windows, chosen.seed),
        val_sets={"val": Windows(val, chosen.block_size, chosen.eval_windows, chosen.seed + 1)},
        predict=predict,
        metrics={"loss": Loss(functional.cross_entropy)},
        parameter_groups=[
            {"name": "decay", "params": [each for each in parameters if each.dim() >= 2]},
            {"name": "no_decay", "params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
        ],
        tokens_fn=lambda batch: batch[1].numel(),
        schedule=lambda optimizer: CosineWithWarmup(optimizer, chosen),
    )
