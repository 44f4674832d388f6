"""A small GPT over the bytes of Python's standard library: the task of ``configs/byte_gpt.yaml``.

    make train

It is measured in bits per byte, beside a trigram model, which counts what byte follows which two. A run that completes
prints both, and what the model writes.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Events
from ignite.metrics import Loss
from torch import Tensor, nn
from torch.nn import functional

from ignite_engine import Task, Trainer, TrainingEvents

BYTES = 256
PROMPT = b'def read(self, size=-1):\n    """'


@dataclass(frozen=True)
class Options:
    """The config's ``task_options``."""

    context: int = 64  # bytes that the model sees
    width: int = 128  # features of a byte
    layers: int = 2
    heads: int = 4  # must divide the width


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        batch, time, width = inputs.shape
        qkv = self.qkv(self.attention_norm(inputs)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = inputs + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        output: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return output


class GPT(nn.Module):
    """Bytes ``(batch, time)`` to logits of the next one, ``(batch, time, 256)``; time up to ``context``."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, options.width)
        self.positions = nn.Embedding(options.context, options.width)
        self.blocks = nn.Sequential(*(Block(options.width, options.heads) for _ in range(options.layers)))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, BYTES, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        stream = self.bytes(inputs.long()) + self.positions.weight[: inputs.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(stream)))
        return logits

    @torch.no_grad()
    def continued(self, prompt: bytes, length: int) -> str:
        """The prompt and ``length`` bytes after it, each drawn from the model's probabilities at temperature 0.8."""
        context, device = self.positions.num_embeddings, self.head.weight.device
        text, draws = torch.tensor(list(prompt), device=device), torch.Generator(device).manual_seed(0)
        for _ in range(length):
            probabilities = (self(text[None, -context:])[0, -1] / 0.8).softmax(dim=0)
            text = torch.cat([text, torch.multinomial(probabilities, 1, generator=draws)])
        return bytes(text.tolist()).decode("utf-8", errors="replace")


def read_library(*, held_out: bool) -> Tensor:
    """The bytes of the standard library's top-level modules, uint8; every 40th file is held out for validation."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = enumerate(sorted(library.glob("*.py")))
    texts = [file.read_bytes() for number, file in files if (number % 40 == 0) == held_out]
    if not texts:
        raise FileNotFoundError(f"{library} has no *.py files: expected the source of Python's standard library.")
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)


def trigram_bits(train: Tensor, val: Tensor) -> float:
    """Bits per byte of ``val`` under p(c | ab) = (count of abc + 0.1) / (count of ab + 25.6), counted in ``train``."""

    def trigrams(text: Tensor) -> Tensor:
        return text[:-2].long() * BYTES**2 + text[1:-1].long() * BYTES + text[2:].long()

    counts = torch.bincount(trigrams(train), minlength=BYTES**3).float()
    found = trigrams(val)
    probabilities = (counts[found] + 0.1) / (counts.view(-1, BYTES).sum(1)[found // BYTES] + 0.1 * BYTES)
    return -probabilities.log2().mean().item()


def predict(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``(bytes, 256)`` and targets ``(bytes,)`` of windows ``(batch, context + 1)``."""
    return model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten().long()


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy in nats per byte."""
    return functional.cross_entropy(*predict(model, batch))


def build(options: Mapping[str, Any]) -> Task:
    """The task; ``options`` are the fields of :class:`Options`."""
    chosen = Options(**options)
    model = GPT(chosen)
    train, val = read_library(held_out=False), read_library(held_out=True)
    baseline = trigram_bits(train, val)

    def compare(trainer: Trainer) -> None:
        trainer.state.metrics["val/trigram_bits_per_byte"] = baseline

    def show(trainer: Trainer) -> None:
        bits = trainer.state.metrics.get("val/bits_per_byte")
        if trainer.state.status == "completed" and bits is not None and idist.get_rank() == 0:
            print(model.continued(PROMPT, 300))
            print(f"{bits:.3f} bits per byte, the trigram model {baseline:.3f}", flush=True)

    loss = Loss(functional.cross_entropy)
    return Task(
        model=model,
        loss_fn=loss_fn,
        train_set=train.unfold(0, chosen.context + 1, chosen.context),  # adjacent windows
        val_sets={"val": val.unfold(0, chosen.context + 1, chosen.context)},
        predict=predict,
        metrics={"loss": loss, "bits_per_byte": loss / math.log(2)},
        tokens_fn=lambda batch: batch[:, 1:].numel(),
        handlers=[(compare, TrainingEvents.EVALUATION_COMPLETED), (show, Events.COMPLETED)],
    )
