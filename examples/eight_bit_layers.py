"""Where FP8 plugs in: replace the layers before the model is given to ``Update``, and train it in bf16.

    python examples/eight_bit_layers.py [runs/eight_bit_layers]

``convert`` below stands for the function of a library, as ``torchao.float8.convert_to_float8_training(model)`` on a GPU
that computes in FP8. It rounds to FP8 what goes into each product, and computes the product in bf16: the numbers of FP8
on any device, without its speed. A library with a context for the forward pass has it in ``precision``
(docs/python_api.md).
"""

from __future__ import annotations

import sys
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, Update, loader, seed_everything
from ignite_engine.handlers import Checkpoint, MetricLogger

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2  # Micikevicius et al. 2022, arXiv 2209.05433, section 3


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """To the numbers that ``dtype`` has, with one scale for the tensor."""
    scale = torch.finfo(dtype).max / values.detach().abs().amax().clamp(min=1e-12).float()
    return ((values.float() * scale).to(dtype).float() / scale).to(values.dtype)


class Rounded(torch.autograd.Function):
    """The identity, whose output and whose gradient are rounded, each or not."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, forward: bool, backward: bool) -> Tensor:
        ctx.backward_is_rounded = backward
        return rounded(values, FORWARD) if forward else values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return rounded(gradient, BACKWARD) if ctx.backward_is_rounded else gradient, None, None


class EightBitLinear(nn.Linear):
    """Both factors of its products have eight bits, forward and backward; the weights that are trained stay in fp32."""

    def forward(self, inputs: Tensor) -> Tensor:
        factors = (Rounded.apply(each, True, False) for each in (inputs, self.weight))  # type: ignore[no-untyped-call]
        result: Tensor = Rounded.apply(nn.functional.linear(*factors), False, True)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias


def convert(model: nn.Module) -> nn.Module:
    """Make the linear layers in ``model`` eight-bit ones, in place: all but the last, which is better left alone."""
    *layers, _ = [each for each in model.modules() if isinstance(each, nn.Linear)]
    for layer in layers:
        layer.__class__ = EightBitLinear  # its parameters and their names stay, and with them the checkpoints
    return model


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).float(), targets)


def main(directory: str = "runs/eight_bit_layers", *, epochs: int = 5, eight_bit: bool = True) -> Trainer:
    """Train, or resume."""
    seed_everything(0)
    inputs = torch.randn(512, 8)
    samples = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))
    model = (convert(model) if eight_bit else model).to(idist.device())
    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters(), lr=5e-3), loss_fn, precision="bf16"))
    MetricLogger(directory).attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint = Checkpoint(f"{directory}/checkpoints", strict=True)
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint.resume()
    trainer.run(loader(samples, batch_size=32, shuffle=True), max_epochs=epochs)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
