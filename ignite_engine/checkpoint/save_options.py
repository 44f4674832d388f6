"""The options of a save: arguments of ``Checkpoint``, and keys of its entry in a config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ignite_engine.checkpoint.manifest import Best, Facts
from ignite_engine.checkpoint.part_names import SaveFilter
from ignite_engine.checkpoint.retention import Retention, mode_of
from ignite_engine.errors import check_type, is_whole


@dataclass(frozen=True, kw_only=True)
class SaveOptions(Retention):
    """What is saved, how, and what is kept.

    Args:
        keep_last: the number of newest checkpoints that are kept, at least 1.
        best: name of a metric, written on every rank; a new best one, by its mean over the ranks, is saved and kept.
            A metric that is never written causes a warning.
        keep_best: the number of best checkpoints that are kept.
        mode: whether a small (``min``) or a large value (``max``) is good; needed if the metric's name does not tell.
        keep_every: a checkpoint whose iteration is a multiple of it is never deleted.
        config: stored in each checkpoint.
        labels: words stored in each checkpoint.
        exclude: what is not saved: parts, such as ``optimizer``, or names inside parts, such as ``model:backbone.*``.
            A resumed run has it as built, so it must not be trained; the reproducibility report names it.
        keep_fn: ``keep_fn(part, name, value)``, called for each name inside a part; False leaves it out, too.
        save_at_end: also save when the run completes, whatever the event; a stop always saves.
        background: copy the state into host memory, and write the copy while training continues.
        writers: the number of threads in which a rank hashes and writes its files, and of files for the parts that
            ranks share (model, optimizer, average).
        on_exception: also save when the update or a handler raises, if the iteration has changed nothing yet; on one
            process only. A resume from there is not bit for bit, so ``strict`` excludes it.
        strict: refuse a run, or a resume, that is not bit for bit.

    Raises:
        TypeError: a value is of another type.
        ValueError: a value is out of range, or two of them exclude each other.
    """

    mode: Literal["min", "max"] = None  # type: ignore[assignment]  # which the name of the metric replaces
    config: Mapping[str, Any] | None = None
    labels: Iterable[str] = ()
    exclude: Iterable[str] = ()
    keep_fn: Callable[[str, str, Any], bool] | None = None
    save_at_end: bool = True
    background: bool = False
    writers: int = 1
    on_exception: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        mode: Any = self.mode
        if mode is None:
            object.__setattr__(self, "mode", mode_of(self.best, None, "best") if isinstance(self.best, str) else "min")
        for name in ("save_at_end", "background", "on_exception", "strict"):
            value = getattr(self, name)
            check_type(name, value, isinstance(value, bool), "True or False")
        check_type("keep_fn", self.keep_fn, self.keep_fn is None or callable(self.keep_fn), "a function or None")
        config = self.config
        check_type("config", config, config is None or isinstance(config, Mapping), "a mapping or None")
        writers = self.writers
        check_type("writers", writers, is_whole(writers), "a whole number")
        if writers < 1:
            raise ValueError(f"writers must be at least 1, got {self.writers}.")
        if self.strict and self.on_exception:
            raise ValueError(
                "strict refuses to resume what on_exception saves, where random numbers are those of the exception: "
                "choose one of them."
            )
        for name in ("labels", "exclude"):
            given: Iterable[str] = getattr(self, name)
            if isinstance(given, str):
                raise ValueError(f"{name} is a list, got {given!r}: write [{given!r}].")
            object.__setattr__(self, name, tuple(given))  # an iterator would be exhausted by the first save
        super().__post_init__()
        _ = self.filter  # check its settings

    @property
    def filter(self) -> SaveFilter:
        """What is left out."""
        return SaveFilter(self.exclude, self.keep_fn)

    @property
    def facts(self) -> Facts:
        """What each checkpoint's manifest says of it."""
        best: Best | None = None if self.best is None else {"metric": self.best, "mode": self.mode}
        return {"config": self.config, "labels": tuple(self.labels), "best": best}
