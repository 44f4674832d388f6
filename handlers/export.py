"""Exports the weights of a run during training, for programs that serve or test them."""

from __future__ import annotations

import logging
import os
import re
import secrets
from os import PathLike
from pathlib import Path
from typing import Any

from ignite.engine import Engine, Events
from torch import Tensor

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.checkpoint import filesystem
from ignite_engine.checkpoint.export import write_weights
from ignite_engine.checkpoint.shards import is_sharded
from ignite_engine.checkpoint.states.model_and_optimizer import ModelState, reshard
from ignite_engine.checkpoint.states.registry import Registry
from ignite_engine.errors import check_type, did_you_mean, is_whole, one_line, shortened
from ignite_engine.ranks import agreement

logger = logging.getLogger(__name__)


class Export:
    """Write the model's weights at an event; ``<name>.safetensors`` always names the newest file.

    Each is a file of its own, ``<name>-00000500.safetensors`` at iteration 500. It is complete and durable before the
    stable name, a symbolic link, is put on it in one step: whoever opens that name gets the old weights or the new
    ones, and keeps what it has open.

    Args:
        directory: of the files, made if it is missing.
        weights: ``raw``, or the name of an average, such as ``ema``.
        keep: how many are kept, the newest ones; a reader that has looked up the name, but not opened it yet, needs 2.
        name: of the files.
        part: the name under which the model is registered; None: ``model``, or the only one.

    Sharded weights are gathered, one tensor at a time; rank 0 writes. What cannot be written, as on a full disk, is one
    warning, and training continues. No bit of the run changes.

    Raises:
        TypeError, ValueError: a setting is of another type or out of its range; or (at STARTED, on all ranks) there is
            no such model or average, its weights are not all tensors, or the stable name is taken.
        CheckpointError: safetensors is not installed.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        weights: str = "raw",
        keep: int = 2,
        name: str = "model",
        part: str | None = None,
    ) -> None:
        check_type("directory", directory, bool(directory) and isinstance(directory, str | PathLike), "a path")
        check_type("weights", weights, isinstance(weights, str), "'raw' or the name of an average")
        check_type("keep", keep, is_whole(keep), "a whole number")
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}: the newest is always kept.")
        is_name = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) is not None
        check_type("name", name, is_name, "a file's name without its ending")
        check_type("part", part, part is None or isinstance(part, str), "the name of a registered model or None")
        self.directory, self.weights, self.keep = Path(directory).absolute(), weights, keep
        self.name, self.part = name, part
        self.link = self.directory / f"{name}.safetensors"
        """The newest export, once there is one."""
        self._exported = re.compile(rf"{re.escape(name)}-\d{{8,}}\.safetensors")
        self._left_over = re.compile(rf"\.{re.escape(name)}(-\d{{8,}})?\.safetensors\.tmp-[0-9a-f]{{8}}")
        self._has_failed = False
        """The last export did, and that was said."""

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
            filesystem.ensure_directory(self.directory)
            path = self.directory / f"{self.name}-{iteration:08d}.safetensors"
            write_weights(path, state, "safetensors", about={"iteration": str(iteration), "weights": self.weights})
            temporary = self.link.with_name(f".{self.link.name}.tmp-{secrets.token_hex(4)}")
            os.symlink(path.name, temporary)
            os.rename(temporary, self.link)
            filesystem.synchronise_directory(self.directory)
            self._prune(path)
            self._has_failed = False
        except Exception as error:  # of the disk: training must not end by it
            if not self._has_failed:
                logger.warning(
                    "The weights of iteration %d were not exported to %s: %s. Training continues, and the next export "
                    "is tried.",
                    *(iteration, self.directory, one_line(error).rstrip(".")),
                )
            self._has_failed = True

    def _prune(self, newest: Path) -> None:
        older = [
            path
            for path in self.directory.iterdir()
            if self._exported.fullmatch(path.name) and path.name != newest.name
        ]
        older.sort(key=lambda path: (path.lstat().st_mtime_ns, path.name))
        for path in older[: max(0, len(older) - self.keep + 1)]:
            path.unlink(missing_ok=True)

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
        agreement.on_rank_0(self._tidy_up)
        self._has_failed = False

    def _tidy_up(self) -> None:
        """Refuse a stable name that is somebody else's, and remove what a killed run has left."""
        if os.path.lexists(self.link) and not self.link.is_symlink():
            raise ValueError(
                f"{self.link} is there and is not the link of an export: give Export another name or directory."
            )
        if self.directory.is_dir():
            for path in self.directory.iterdir():
                if self._left_over.fullmatch(path.name):
                    path.unlink(missing_ok=True)
