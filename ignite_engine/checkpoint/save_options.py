"""The options of a save, in one place: ``Checkpoint`` takes them, a config has them, the store gets its part."""

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
        keep_last: newest ones kept, at least 1.
        best: name of a metric, written on every rank; a new best one, by its mean over the ranks, is saved and kept.
            A metric that is never written causes a warning.
        keep_best: how many of the best are kept.
        mode: whether a small (``min``) or a large value (``max``) is good; by default as the metric's name
            says; it is needed where that does not tell.
        keep_every: those whose iteration is a multiple of it are never deleted.
        config: stored in each checkpoint.
        labels: words that each checkpoint is labelled with.
        exclude: what is not saved: parts, such as ``optimizer``, or names inside parts, such as ``model:backbone.*``.
            A resumed run has it as it was built, so it must not be trained; the reproducibility report names it.
        keep_fn: ``keep_fn(part, name, value)``, called for each name inside a part; False leaves it out, too.
        save_at_end: save where the run completes, too, whatever the event; a stop always saves.
        background: write a copy while training continues, which waits for the copy. It is held in host memory.
        writers: threads in which a rank hashes and writes its files; the parts that the ranks share (model,
            optimizer, average) are spread over so many files.
        on_exception: save also when the update or a handler raises, if nothing of the iteration was applied yet; on
            one process only. A resume from there is not bit for bit, so ``strict`` excludes it.
        strict: refuse to start, or to resume, what cannot be resumed bit for bit.

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
            object.__setattr__(self, name, tuple(given))  # an iterator would be used up by the first save
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
