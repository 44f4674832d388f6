"""A GPT as in GPT-2 for the GPU benchmark, and the arithmetic of its training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention


@dataclass(frozen=True)
class Shape:
    """124M parameters by default: GPT-2's smallest, its vocabulary rounded up to a multiple of 128."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    vocabulary: int = 50304


class GPT(nn.Module):
    """Tokens and the next ones, ``(batch, time)`` each, to their mean loss: pre-norm, tied embeddings, no biases."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        for each in self.parameters():
            if each.dim() == 2:
                nn.init.normal_(each, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        stream = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        logits = nn.functional.linear(self.norm(stream), self.tokens.weight)
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """Causal attention and an MLP of four times the width."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.dropout = shape.heads, nn.Dropout(dropout)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        batch, time, width = stream.shape
        qkv = self.qkv(self.attention_norm(stream)).view(batch, time, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        stream = stream + self.dropout(self.attention_out(attended.reshape(batch, time, width)))
        result: Tensor = stream + self.dropout(self.mlp_out(gelu(self.mlp_in(self.mlp_norm(stream)))))
        return result


def parameters_of(shape: Shape) -> int:
    """Trainable parameters, the tied embedding once."""
    with torch.device("meta"):
        return sum(each.numel() for each in GPT(shape).parameters())


def flops_per_token(shape: Shape) -> int:
    """Forward and backward of one token: 6 for each parameter in a matrix product, and attention, 12 L T W.

    The positions are only added. Attention counts the full square, as is usual, though the causal kernel skips half.
    Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    in_products = parameters_of(shape) - shape.context * shape.width
    return 6 * in_products + 12 * shape.layers * shape.context * shape.width
