"""The whole update of a small model in one graph of ``torch.compile``, as an update function of one's own.

    python examples/captured_update.py [--epochs N] [--directory DIR]

Forward, loss, backward, clipping and the step of AdamW become one call of compiled code, so that little is left of what
a small model's update costs in Python and in torch's dispatch. With ``--directory`` the run is saved there and resumed
from there, bit for bit. torch.compile calls a C++ compiler and takes some seconds for each shape of a batch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.utils import convert_tensor
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.optim import AdamW
from torch.optim.adamw import adamw
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, TrainingEvents, Update, loader, seed_everything
from ignite_engine.handlers import Checkpoint, LRSchedule, MetricLogger, warmup_cosine

COMPILER = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # the one that torch looks for
LossFn = Callable[[nn.Module, Any], Tensor]


class CapturedUpdate:
    """``update(engine, batch)`` for a Trainer without accumulation, on one process, in fp32.

    What is trained stays in ``model`` and ``optimizer``, where the graph writes it in place; dropout draws from torch's
    generator. So the graph has no state, and a checkpoint is that of an ordinary run: each can resume the other's.

    Args:
        model: without buffers that training writes, as BatchNorm's are.
        optimizer: all that is trained of ``model``, in one group; on a GPU ``capturable``. Its LR may change.
        loss_fn: ``loss_fn(model, batch)``, the mean over the batch, which is compiled too: it reads no values.
        clip_norm: largest joint L2 norm of the gradients.

    Raises:
        ValueError: the optimizer has several groups, other parameters than the model, or ``amsgrad``.
    """

    def __init__(self, model: nn.Module, optimizer: AdamW, loss_fn: LossFn, *, clip_norm: float) -> None:
        self.model, self.optimizer = model, optimizer
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        first, *others = optimizer.param_groups
        if others or first["amsgrad"] or {*map(id, first["params"])} != {*map(id, self._parameters.values())}:
            raise ValueError("CapturedUpdate needs AdamW(model.parameters()) without groups and without amsgrad.")
        self.device = first["params"][0].device
        self._lr = torch.zeros((), device=self.device)  # a number would be compiled into the graph
        self.stateful = Update(model, optimizer, loss_fn, clip_norm=clip_norm).stateful
        # A graph for each shape: torch would make the second one for all later shapes, and a run that is resumed at a
        # short batch would use another one than the uninterrupted run.
        self._graph = torch.compile(_graph_of(_Loss(model, loss_fn), clip_norm), fullgraph=True, dynamic=False)

    def __call__(self, engine: Engine, batch: Any) -> dict[str, Tensor]:
        """Do one update with the loader's batch; ``loss`` and ``grad_norm`` before clipping."""
        (group,) = self.optimizer.param_groups
        states = [self._state_of(each) for each in self._parameters.values()]  # a resume has replaced them
        slots = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")]
        settings = {name: group[name] for name in ("betas", "eps", "weight_decay", "maximize")}
        self._lr.fill_(group["lr"])
        batch = convert_tensor(batch, device=self.device, non_blocking=True)
        with torch.no_grad():
            loss, norm = self._graph(self._parameters, *slots, self._lr, settings, batch)
        engine.state.optimizer_steps += 1  # type: ignore[attr-defined]  # a TrainingState
        engine.fire_event(TrainingEvents.OPTIMIZER_STEP_COMPLETED)  # LRSchedule and EMA follow it
        return {"loss": loss, "grad_norm": norm}

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """AdamW's state of the parameter; before its first step made as AdamW makes it."""
        state: dict[str, Tensor] = self.optimizer.state[parameter]
        if not state:
            on_device = self.optimizer.param_groups[0]["capturable"]
            state["step"] = torch.zeros((), device=parameter.device if on_device else "cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state


class _Loss(nn.Module):
    """The loss as a module, whose forward is called with other parameters in the place of the model's."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: Any) -> Tensor:
        return self.loss_fn(self.model, batch)


def _graph_of(loss: _Loss, clip_norm: float) -> Callable[..., tuple[Tensor, Tensor]]:
    def graph(
        parameters: Mapping[str, Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        lr: Tensor,
        settings: Mapping[str, Any],
        batch: Any,
    ) -> tuple[Tensor, Tensor]:
        def loss_of(parameters: Mapping[str, Tensor]) -> Tensor:
            result: Tensor = functional_call(
                loss, {f"model.{name}": each for name, each in parameters.items()}, (batch,)
            )
            return result

        by_name, value = grad_and_value(loss_of)(parameters)
        gradients = list(by_name.values())
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients]))
        factor = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
        adamw(
            list(parameters.values()),
            [each * factor for each in gradients],
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            foreach=False,
            capturable=True,
            amsgrad=False,
            beta1=settings["betas"][0],
            beta2=settings["betas"][1],
            lr=lr,
            weight_decay=settings["weight_decay"],
            eps=settings["eps"],
            maximize=settings["maximize"],
        )
        return value, norm

    return graph


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def build() -> Trainer:
    """A perceptron with dropout, its captured update, and a schedule over the run."""
    seed_everything(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.05), nn.Linear(64, 1))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(CapturedUpdate(model, optimizer, loss_fn, clip_norm=1.0))
    LRSchedule(warmup_cosine(optimizer, warmup=10)).attach(trainer)
    return trainer


def data() -> Any:
    """1,000 samples of a function of 8 numbers, in batches of 64; the last batch of an epoch has 40."""
    inputs = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :1].sin() + inputs[:, 1:2] * inputs[:, 2:3]
    return loader(TensorDataset(inputs, targets), batch_size=64, shuffle=True, seed=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; with a directory, save there and resume from there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--directory", type=Path, help="of the checkpoints")
    options = parser.parse_args(arguments)
    if shutil.which(COMPILER) is None:
        print(
            f"torch.compile needs a C++ compiler, {COMPILER} is not installed: install it or set CXX.", file=sys.stderr
        )
        return 1
    torch.set_num_threads(1)  # kernels this small are slower on several, and far slower on cores that others use
    trainer = build()
    MetricLogger().attach(trainer, Events.EPOCH_COMPLETED(every=10))
    if options.directory is not None:
        checkpoint = Checkpoint(options.directory)
        checkpoint.attach(trainer, Events.EPOCH_COMPLETED(every=10))
        checkpoint.resume()
    trainer.run(data(), max_epochs=options.epochs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
