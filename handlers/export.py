"""The weights out of a run while it trains, for programs that serve or test them."""

from __future__ import annotations

import inspect
import logging
import os
import re
import secrets
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from ignite.engine import Events
from torch import Tensor

from ignite_engine import Trainer, TrainingEvents, rng
from ignite_engine.checkpointing import filesystem
from ignite_engine.checkpointing.export import write_weights
from ignite_engine.checkpointing.shards import is_sharded
from ignite_engine.checkpointing.weights_source import safetensors_torch
from ignite_engine.errors import check_type, did_you_mean, is_whole, one_line, shortened
from ignite_engine.ranks import agreement
from ignite_engine.states.model_and_optimizer import ModelState, reshard
from ignite_engine.states.registry import Registry

logger = logging.getLogger(__name__)

FORMATS = ("safetensors", "pt")


class Export:
    """Write the model's weights at an event; ``<name>.safetensors`` always names the newest file.

    Each is a file of its own, ``<name>-00000500.safetensors`` at iteration 500, or a folder that a function has
    written. It is complete and durable before the stable name, a symbolic link, is put on it in one step: whoever opens
    that name gets the old weights or the new ones, and keeps what it has open. A reader that opens several files, or
    one twice, resolves the link first (``Path.resolve``).

    Args:
        directory: of the files, made if it is missing.
        format: ``safetensors``; ``pt``, a state_dict of ``torch.save``; or a function ``write(folder)``, such as
            ``model.save_pretrained``, which is called with an empty folder. If it has an argument ``state_dict`` it is
            given the weights under that name. It is called on rank 0 alone.
        weights: ``raw``, or the name of an average, such as ``ema``.
        keep: how many are kept, the newest ones; a reader that has looked up the name, but not opened it yet, needs 2.
        name: of the files.
        part: the name under which the model is registered; None: ``model``, or the only one.

    Sharded weights are gathered, one tensor at a time; rank 0 writes. What cannot be written, as on a full disk, is one
    warning, and training continues. No bit of the run changes.

    Raises:
        TypeError, ValueError: a setting is of another type or out of its range; or (at STARTED, on all ranks) there is
            no such model or average, the format cannot hold its weights, or the stable name is taken.
        CheckpointError: safetensors is not installed.
    """

    replayed = False

    def __init__(
        self,
        directory: str | Path,
        *,
        format: Literal["safetensors", "pt"] | Callable[..., Any] = "safetensors",
        weights: str = "raw",
        keep: int = 2,
        name: str = "model",
        part: str | None = None,
    ) -> None:
        check_type("directory", directory, bool(directory) and isinstance(directory, str | PathLike), "a path")
        if not callable(format) and format not in FORMATS:
            raise ValueError(f"format must be 'safetensors', 'pt' or a function that writes a folder, got {format!r}.")
        check_type("weights", weights, isinstance(weights, str), "'raw' or the name of an average")
        check_type("keep", keep, is_whole(keep), "a whole number")
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}: the newest is always kept.")
        is_name = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) is not None
        check_type("name", name, is_name, "a file's name without its ending")
        check_type("part", part, part is None or isinstance(part, str), "the name of a registered model or None")
        if format == "safetensors":
            safetensors_torch()
        self.directory, self.format, self.weights, self.keep = Path(directory).absolute(), format, weights, keep
        self.name, self.part = name, part
        suffix = "" if callable(format) else f".{format}"
        self.link = self.directory / f"{name}{suffix}"
        """The newest export, once there is one."""
        self._suffix = suffix
        self._exported = re.compile(rf"{re.escape(name)}-\d{{8,}}(\.\d+)?{re.escape(suffix)}")
        self._left_over = re.compile(rf"\.{re.escape(name)}(-\d{{8,}}(\.\d+)?)?{re.escape(suffix)}\.tmp-[0-9a-f]{{8}}")
        self._takes_state = callable(format) and "state_dict" in inspect.signature(format).parameters
        self._has_failed = False
        """The last export did, and that was said."""

    def attach(self, trainer: Trainer, event: Any = TrainingEvents.CHECKPOINT_SAVED) -> None:
        """Export at ``event``, by default whenever a checkpoint was saved; the weights are those of that moment."""
        check_type("what Export is attached to", trainer, isinstance(trainer, Trainer), "a Trainer")
        if not trainer.has_event_handler(self._start, Events.STARTED):
            trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Export now; a collective where the weights are sharded."""
        model = self._model(trainer.registry)
        if callable(self.format) and not self._takes_state and model.swapped_out:
            raise ValueError(
                "Export's function writes the model, which holds an average now, not its trained weights: give it an "
                "argument state_dict, or attach it to an event outside of the evaluation."
            )
        reshard(model.model)
        state: dict[str, Any] = model.state_dict()
        if self.weights != "raw":
            state |= trainer.registry.objects[self.weights].state_dict()["weights"]
        gathered = {}
        for name, value in state.items():
            whole = value.full_tensor() if is_sharded(value) else value
            if agreement.rank() == 0:
                gathered[name] = whole.detach() if isinstance(whole, Tensor) else whole
        if agreement.rank() == 0:
            with rng.isolated():
                self._write(gathered, trainer.state.iteration)

    def _write(self, state: dict[str, Any], iteration: int) -> None:
        try:
            filesystem.ensure_directory(self.directory)
            path = self._free_path(iteration)
            self._write_folder(path, state) if callable(self.format) else self._write_file(path, state, iteration)
            self._put_link_on(path)
            self._prune(path)
            self._has_failed = False
        except Exception as error:  # of the disk, or of the user's function: training must not end by it
            if not self._has_failed:
                logger.warning(
                    "The weights of iteration %d were not exported to %s: %s. Training continues, and the next export "
                    "is tried.",
                    *(iteration, self.directory, one_line(error).rstrip(".")),
                )
            self._has_failed = True

    def _write_file(self, path: Path, state: dict[str, Any], iteration: int) -> None:
        on_host = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
        kind: Literal["safetensors", "state_dict"] = "safetensors" if self.format == "safetensors" else "state_dict"
        write_weights(path, on_host, kind, about={"iteration": str(iteration), "weights": self.weights})

    def _write_folder(self, path: Path, state: dict[str, Any]) -> None:
        assert callable(self.format)
        temporary = _temporary(path)
        filesystem.make_directory(temporary)
        try:
            self.format(temporary, **({"state_dict": state} if self._takes_state else {}))
            _synchronise_tree(temporary)
            filesystem.rename(temporary, path)
        except BaseException:
            filesystem.remove_tree(temporary)
            raise
        filesystem.synchronise_directory(self.directory)

    def _put_link_on(self, path: Path) -> None:
        temporary = _temporary(self.link)
        os.symlink(path.name, temporary)
        os.rename(temporary, self.link)
        filesystem.synchronise_directory(self.directory)

    def _free_path(self, iteration: int) -> Path:
        """A file replaces one of the same iteration; a folder, which cannot do so at once, gets a name of its own."""
        stem, revision = f"{self.name}-{iteration:08d}", 0
        path = self.directory / f"{stem}{self._suffix}"
        while callable(self.format) and os.path.lexists(path):
            revision += 1
            path = path.with_name(f"{stem}.{revision}")
        return path

    def _prune(self, newest: Path) -> None:
        older = [
            path
            for path in self.directory.iterdir()
            if self._exported.fullmatch(path.name) and path.name != newest.name
        ]
        older.sort(key=lambda path: (path.lstat().st_mtime_ns, path.name))
        for path in older[: max(0, len(older) - self.keep + 1)]:
            temporary = _temporary(path)
            os.rename(path, temporary)  # a folder is never there in part
            _remove(temporary)

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
        foreign = [name for name, value in state.items() if not isinstance(value, Tensor)]
        if foreign and self.format == "safetensors":
            raise ValueError(
                f"safetensors holds tensors only, and {shortened(foreign)} is none: use Export(format='pt')."
            )
        sharded = any(map(is_sharded, state.values()))
        if callable(self.format) and not self._takes_state and (sharded or self.weights != "raw"):
            what = "a sharded model" if sharded else f"the average {self.weights!r}"
            raise ValueError(
                f"Export's function has no argument state_dict, so it cannot write {what}: give it one, or use the "
                "format 'safetensors' or 'pt'."
            )
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
                    _remove(path)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        filesystem.remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def _synchronise_tree(folder: Path) -> None:
    """Make a folder durable with all that is in it."""
    for path in folder.iterdir():
        if path.is_dir():
            _synchronise_tree(path)
        elif path.is_file():
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    filesystem.synchronise_directory(folder)
