"""Exports the weights of a run during training, for programs that serve or test them."""

from __future__ import annotations

import logging
import re
from os import PathLike
from pathlib import Path
from typing import Any

from ignite.engine import Engine, Events
from torch import Tensor

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.checkpoint.export import write_weights
from ignite_engine.checkpoint.filesystem import ensure_directory
from ignite_engine.checkpoint.layout import sweep
from ignite_engine.checkpoint.shards import is_sharded
from ignite_engine.checkpoint.states.model_and_optimizer import ModelState, reshard
from ignite_engine.checkpoint.states.registry import Registry
from ignite_engine.errors import check_type, did_you_mean, one_line, shortened
from ignite_engine.ranks import agreement

logger = logging.getLogger(__name__)


class Export:
    """Write the model's weights into ``<name>.safetensors`` at an event.

    The file is replaced atomically: whoever opens it gets the old weights or the new ones, and keeps what it has open.

    Args:
        directory: of the file, made if it is missing.
        weights: ``raw``, or the name of an average, such as ``ema``.
        name: of the file, without its ending.
        part: the name under which the model is registered; None: ``model``, or the only one.

    Sharded weights are gathered, one tensor at a time; rank 0 writes. If a file cannot be written, as on a full disk, a
    warning says so once, and training continues. No bit of the run changes.

    Raises:
        TypeError, ValueError: a setting is of another type or out of its range; or (at STARTED, on all ranks) there is
            no such model or average, or its weights are not all tensors.
    """

    def __init__(
        self, directory: str | Path, *, weights: str = "raw", name: str = "model", part: str | None = None
    ) -> None:
        check_type("directory", directory, bool(directory) and isinstance(directory, str | PathLike), "a path")
        check_type("weights", weights, isinstance(weights, str), "'raw' or the name of an average")
        is_name = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) is not None
        check_type("name", name, is_name, "a file's name without its ending")
        check_type("part", part, part is None or isinstance(part, str), "the name of a registered model or None")
        self.path = Path(directory).absolute() / f"{name}.safetensors"
        """The file with the newest weights, once there is one."""
        self.weights, self.part = weights, part
        self._has_failed = False
        """Whether the last export failed, which was said."""

    def attach(self, engine: Engine, event: Any = TrainingEvents.CHECKPOINT_SAVED) -> None:
        """Export at ``event``, by default whenever a checkpoint was saved; the weights are those of that moment."""
        trainer = Trainer.of(engine)
        if not trainer.has_event_handler(self._start, Events.STARTED):
            trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Export now; a collective where the weights are sharded."""
        model = self._model(trainer.registry)
        reshard(model.model)
        state: dict[str, Any] = model.state_dict()
        if self.weights != "raw":
            state |= trainer.registry.objects[self.weights].state_dict()["weights"]
        gathered: dict[str, Any] = {}
        for name, value in state.items():
            whole = value.full_tensor().cpu() if is_sharded(value) else value
            if agreement.rank() == 0:
                gathered[name] = whole.detach()
        if agreement.rank() == 0:
            self._write(gathered, trainer.state.iteration)

    def _write(self, state: dict[str, Any], iteration: int) -> None:
        try:
            ensure_directory(self.path.parent)
            about = {"iteration": str(iteration), "weights": self.weights}
            write_weights(self.path, state, "safetensors", about=about)
            self._has_failed = False
        except Exception as error:  # an error of the disk must not end the training
            if not self._has_failed:
                logger.warning(
                    "The weights of iteration %d were not exported to %s: %s. Training continues, and the next export "
                    "is tried.",
                    *(iteration, self.path, one_line(error).rstrip(".")),
                )
            self._has_failed = True

    def _model(self, registry: Registry) -> ModelState:
        models = [name for name, kind in registry.kinds.items() if kind == "model"]
        part = models[0] if self.part is None and len(models) == 1 else self.part or "model"
        if part not in models:
            near = did_you_mean(part, models)
            raise ValueError(f"Export(part={self.part!r}) found no model {part!r} among what is registered{near}")
        model: Any = registry.objects[part]
        return model if isinstance(model, ModelState) else ModelState(model)

    def _start(self, trainer: Trainer) -> None:
        registry = trainer.registry
        state = self._model(registry).state_dict()
        averages = [name for name, kind in registry.kinds.items() if kind == "average"]
        if self.weights not in ("raw", *averages):
            known = f"'raw', {', '.join(map(repr, averages))}" if averages else "'raw', as no EMA is attached"
            raise ValueError(f"Export(weights={self.weights!r}) is no average of this run; expected {known}.")
        if foreign := [name for name, value in state.items() if not isinstance(value, Tensor)]:
            raise ValueError(f"safetensors holds tensors only, and {shortened(foreign)} is none.")
        agreement.on_rank_0(lambda: sweep(self.path.parent))  # the temporary file of a killed run
        self._has_failed = False
