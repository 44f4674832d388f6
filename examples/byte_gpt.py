"""A small GPT over the bytes of Python's standard library, compared with n-gram models of the same bytes.

The task of ``configs/byte_gpt.yaml``. One thing differs from a textbook GPT: in addition to each byte the model sees
the last 2, 3, ... bytes as hashed n-grams with their own embedding tables. A table costs one look-up and saves a small
model on a CPU the training time that attention would need to learn about adjacent bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ignite.distributed as idist
import torch
from byte_corpus import (
    ORDERS,
    Corpus,
    NgramModels,
    Windows,
    open_bytes,
    open_corpus,
    predicted_positions,
    training_windows,
    validation_windows,
)
from ignite.engine import Events
from ignite.metrics import Loss
from torch import Tensor, nn
from torch.nn import functional

from ignite_engine import Task, Trainer, TrainingEvents

VOCABULARY = 256
# Adam changes each weight by about the learning rate, whatever its gradient. Rarely used rows need larger steps than
# matrices tolerate: so the tables hold small values that are scaled where they are used.
EMBEDDING_SCALE = 8.0
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # Fibonacci hashing (Knuth, TAOCP 3, section 6.4), as a signed 64-bit number


@dataclass(frozen=True)
class Options:
    """The config's ``task_options``."""

    context: int = 256  # bytes in a window
    width: int = 128  # of the residual stream
    layers: int = 3
    heads: int = 4
    dropout: float = 0.05  # probability, on the embeddings and on what each block adds
    ngram_orders: Sequence[int] = (2, 3, 4, 5, 6)  # bytes in an n-gram, 2 to 7
    ngram_slots: int = 2**14  # rows of each table, a power of two
    ngram_width: int = 64  # of each embedding, single bytes included
    validation_windows: int = 1024  # at most; each of ``context`` bytes
    cache_dir: str | None = None  # of the corpus; None: $XDG_CACHE_HOME/ignite_engine or ~/.cache/ignite_engine

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got {self.width} and {self.heads}.")
        if any(not 2 <= order <= 7 for order in self.ngram_orders):
            raise ValueError(
                f"ngram_orders must be from 2 to 7, which a 64-bit number can hold, got {self.ngram_orders}."
            )
        if self.ngram_slots < 2 or self.ngram_slots & (self.ngram_slots - 1):
            raise ValueError(f"ngram_slots must be a power of two, got {self.ngram_slots}.")


class NgramEmbedding(nn.Module):
    """Bytes ``(batch, time)`` to ``(batch, time, features)``: embeddings of the byte and the n-grams ending there."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.orders = list(options.ngram_orders)
        self.bits = options.ngram_slots.bit_length() - 1
        # separate tables, none larger than a few MB: for larger gradients the allocator returns fresh pages each time
        rows = [VOCABULARY, *(options.ngram_slots for _ in self.orders)]
        tables = [nn.Embedding(count, options.ngram_width) for count in rows]
        for table in tables:
            nn.init.normal_(table.weight, std=0.05 if table is tables[0] else 0.01)  # an unseen n-gram adds little
        self.tables = nn.ModuleList(tables)
        self.features = options.ngram_width * len(rows)

    def forward(self, inputs: Tensor) -> Tensor:
        indices = [inputs, *(self._slots(inputs, order) for order in self.orders)]
        rows = [table(index) for table, index in zip(self.tables, indices, strict=True)]
        return torch.cat(rows, dim=-1) * EMBEDDING_SCALE

    def _slots(self, inputs: Tensor, order: int) -> Tensor:
        padded = functional.pad(inputs, (order - 1, 0))  # zeros precede the window
        key = torch.zeros_like(inputs)
        for offset in range(order):
            key = key * VOCABULARY + padded[:, offset : offset + inputs.shape[1]]
        slots: Tensor = ((key * _MULTIPLIER) >> (64 - self.bits)) & (2**self.bits - 1)
        return slots


class Block(nn.Module):
    """Causal self-attention and a squared-ReLU MLP, each with a pre-norm and a residual connection."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width = options.width
        self.heads = options.heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(options.dropout)
        for layer in (self.qkv, self.mlp_in):
            nn.init.normal_(layer.weight, std=0.7 * width**-0.5)
        for layer in (self.attention_out, self.mlp_out):
            nn.init.zeros_(layer.weight)  # an untrained block adds nothing

    def forward(self, stream: Tensor, mask: Tensor) -> Tensor:
        stream = stream + self.dropout(self.attention_out(self._attend(self.attention_norm(stream), mask)))
        hidden = functional.relu(self.mlp_in(self.mlp_norm(stream)))
        result: Tensor = stream + self.dropout(self.mlp_out(hidden * hidden))
        return result

    def _attend(self, inputs: Tensor, mask: Tensor) -> Tensor:
        batch, time, width = inputs.shape
        query, key, value = self.qkv(inputs).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        # written out: on CPU the backward of scaled_dot_product_attention takes three times as long in bf16
        scores = (query * (width // self.heads) ** -0.5) @ key.transpose(-1, -2) + mask.to(query.dtype)
        attended: Tensor = scores.softmax(dim=-1) @ value
        return attended.transpose(1, 2).reshape(batch, time, width)


class ByteGPT(nn.Module):
    """Bytes ``(batch, time)``, int64, to fp32 logits of the next, ``(batch, time, 256)``; time up to ``context``."""

    mask: Tensor

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embedding = NgramEmbedding(options)
        self.embedding_dropout = nn.Dropout(options.dropout)
        self.mix = nn.Linear(self.embedding.features, options.width, bias=False)
        self.positions = nn.Embedding(options.context, options.width)
        self.embedding_norm = nn.LayerNorm(options.width, bias=False)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width, bias=False)
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)
        nn.init.normal_(self.mix.weight, std=options.ngram_width**-0.5)
        nn.init.normal_(self.positions.weight, std=0.02)
        nn.init.zeros_(self.head.weight)  # the first loss is that of a uniform guess, ln 256
        future = torch.full((options.context, options.context), -math.inf).triu(1)
        self.register_buffer("mask", future, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        time = inputs.shape[1]
        stream = self.mix(self.embedding_dropout(self.embedding(inputs)))
        # the stream is in autocast's precision; the norm makes it start at unit scale, whatever the tables' scale
        stream = self.embedding_norm(stream + self.positions.weight[:time].to(stream.dtype)).to(stream.dtype)
        for block in self.blocks:
            stream = block(stream, self.mask[:time, :time])
        logits: Tensor = self.head(self.norm(stream))
        return logits.float()


def weight_decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices with the optimizer's weight decay, vectors (scales of the norms) without."""
    parameters = list(model.parameters())
    return [
        {"name": "decay", "params": [each for each in parameters if each.dim() >= 2]},
        {"name": "no_decay", "params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]


class BaselineReport:
    """Compares the model with n-gram models on the bytes that are evaluated.

    Each evaluation also writes ``baseline/order_0_bits_per_byte`` and so on; a completed run prints a table on rank 0.
    The n-gram models are built at the first evaluation: a few seconds, less from the cache.
    """

    metric = "val/bits_per_byte"

    def __init__(self, corpus: Corpus, windows: Windows) -> None:
        self.corpus, self.windows = corpus, windows

    def attach(self, trainer: Trainer, event: Any = TrainingEvents.EVALUATION_COMPLETED) -> None:
        """Write the values at ``event``, and print the table at the end."""
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(Events.COMPLETED, self.print_table)

    def __call__(self, trainer: Trainer) -> None:
        """Write the baselines into ``state.metrics``."""
        for order, bits in zip(ORDERS, self.evaluated, strict=True):
            trainer.state.metrics[f"baseline/order_{order}_bits_per_byte"] = bits

    def print_table(self, trainer: Trainer) -> None:
        """Print the comparison if the run completed and was evaluated."""
        state = trainer.state
        if state.status == "completed" and self.metric in state.metrics and idist.get_rank() == 0:
            print(self.table(state.metrics[self.metric]), flush=True)

    def table(self, bits: float) -> str:
        """Bits per byte of the model and of the baselines, on the evaluated bytes and on the whole split."""
        count = len(self.windows) * self.windows.context
        lines = [f"{'bits per byte':<16}{f'{count:,} bytes':>18}{'whole split':>14}"]
        for order, evaluated, whole in zip(ORDERS, self.evaluated, self.whole_split, strict=True):
            lines.append(f"{f'order-{order} model':<16}{evaluated:>18.3f}{whole:>14.3f}")
        lines.append(f"{'byte GPT':<16}{bits:>18.3f}{'':>14}")
        for order in ORDERS[1:]:
            gap = self.evaluated[order] - bits
            lines.append(f"{abs(gap):.3f} bits per byte {'below' if gap > 0 else 'above'} the order-{order} model")
        return "\n".join(lines)

    @cached_property
    def evaluated(self) -> list[float]:
        """Bits per byte of each order on the bytes that the validation windows predict."""
        return self._models.bits_per_byte(open_bytes(self.corpus.val), predicted_positions(self.windows))

    @cached_property
    def whole_split(self) -> list[float]:
        """Bits per byte of each order on the validation split, except its first two bytes."""
        text = open_bytes(self.corpus.val)
        return self._models.bits_per_byte(text, torch.arange(max(ORDERS), len(text)).numpy())

    @cached_property
    def _models(self) -> NgramModels:
        return NgramModels.of(self.corpus)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy in nats per byte."""
    return functional.cross_entropy(*predict(model, batch))


def predict(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits ``(bytes, 256)`` and targets ``(bytes,)``: one row per byte, so that metrics are means over bytes."""
    inputs, targets = batch
    return model(inputs).flatten(0, 1), targets.flatten()


def build(options: Mapping[str, Any]) -> Task:
    """The task; ``options`` are the fields of :class:`Options`.

    Raises:
        TypeError: an unknown option.
        ValueError: an option with an invalid value.
    """
    chosen = Options(**options)
    corpus = open_corpus(chosen.cache_dir)
    validation = validation_windows(corpus.val, chosen.context, chosen.validation_windows)
    model = ByteGPT(chosen)
    loss = Loss(functional.cross_entropy)
    return Task(
        model=model,
        loss_fn=loss_fn,
        train_set=training_windows(corpus.train, chosen.context),
        val_sets={"val": validation},
        predict=predict,
        metrics={"loss": loss, "bits_per_byte": loss / math.log(2)},
        parameter_groups=weight_decay_groups(model),
        tokens_fn=lambda batch: batch[1].numel(),
        handlers=[BaselineReport(corpus, validation)],
    )
