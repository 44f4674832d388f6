"""What each iteration is made of, as digests in a file, in the order in which one thing causes the next."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ignite.engine import Events
from torch import Tensor

from ignite_engine import rng
from ignite_engine.checkpoint.digests import digests
from ignite_engine.checkpoint.states.model_and_optimizer import OptimizerState, weights_of
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.ranks import agreement
from ignite_engine.trainer import Trainer

STEPS = "steps_{}.jsonl"
_KNOWN_OTHERWISE = ("counters", "data", "rng", "model", "optimizer", "log")


class Steps:
    """Writes a line for each iteration into ``steps_RANK.jsonl``.

    It has the samples, the bytes of the batch, random generators, weights before the step, gradients, rates, outputs,
    states of optimizers, weights after the step, and whatever else is saved. Attach it last.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / STEPS.format(agreement.rank())
        self._line: dict[str, Any] = {}

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(Events.ITERATION_STARTED, self._before)
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, self._gradients)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._after)
        trainer.add_event_handler(TrainingEvents.RESUME_POINT, self._write)

    def _before(self, trainer: Trainer) -> None:
        batch = trainer.state.batch
        samples = trainer.progress.samples_of_group()
        self._line = {"iteration": trainer.state.iteration, "the samples of the batch": samples}
        self._note("the bytes of the batch, {}", list(batch) if isinstance(batch, list) else batch)
        self._note("the random generator {}", rng.capture())
        # not buffers, of which DDP gives rank 0's to all when it computes
        self._note("{} before the step", self._parameters(trainer))

    def _gradients(self, trainer: Trainer) -> None:
        named = self._parameters(trainer).items()
        self._note("the gradient of {}", {name: value.grad for name, value in named if value.grad is not None})
        self._note("the rate {}", rates_of(trainer))

    def _after(self, trainer: Trainer) -> None:
        self._note("the output {}", scalars_of(trainer.state.output))
        self._note_parts(trainer, lambda kind: kind == "optimizer")

    def _write(self, trainer: Trainer) -> None:
        if self._line.get("iteration") != trainer.state.iteration:  # where a run begins, or at its last boundary again
            return
        self._note("{} after the step", weights_of(trainer.registry.objects, trainer.registry.kinds))
        self._note_parts(trainer, lambda kind: kind not in _KNOWN_OTHERWISE)
        with self.path.open("a") as file:
            file.write(json.dumps(self._line) + "\n")
        self._line = {}

    def _parameters(self, trainer: Trainer) -> dict[str, Tensor]:
        optimizers = [obj for obj in trainer.registry.objects.values() if isinstance(obj, OptimizerState)]
        return {name: parameter for optimizer in optimizers for name, parameter in optimizer.parameters().items()}

    def _note_parts(self, trainer: Trainer, wanted: Any) -> None:
        for part, obj in trainer.registry.objects.items():
            if wanted(trainer.registry.kinds[part]):
                self._note(state_name(part), obj.state_dict())

    def _note(self, what: str, state: Any) -> None:
        self._line |= {what.format(name).rstrip(", "): text for name, text in digests(state).items()}

    _before.phase = _gradients.phase = _after.phase = _write.phase = Phase.LAST  # type: ignore[attr-defined]


def state_name(part: str) -> str:
    """What a piece of a part of a checkpoint is called, with the place of its name in braces."""
    return f"the state of {part}, {{}}"


def scalars_of(output: Any) -> dict[str, Any]:
    """The outputs of an update by name; tensors of one number as that number."""
    named = output if isinstance(output, Mapping) else {"loss": output}
    return {
        name: value.tolist() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in named.items()
    }


def rates_of(trainer: Trainer) -> dict[str, list[float]]:
    """The learning rates of each optimizer's groups, now."""
    return {
        "lr" if name == "optimizer" else f"lr/{name}": [float(group["lr"]) for group in optimizer.param_groups]
        for name, optimizer in trainer.update.optimizers.items()
    }
