"""The handlers of a trainer by what they do, recognized by their attributes: this room imports no handler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ignite.engine import Engine
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ignite_engine.checkpointing import CheckpointStore, SaveOptions
from ignite_engine.engine.bus import Filtered, events_with_handlers, handlers_of, name_of
from ignite_engine.schedules import Schedule


@dataclass(frozen=True)
class Attached:
    """One entry of the bus.

    Attributes:
        event: without its filter.
        handler: as in the list of handlers, so perhaps behind a filter.
        owner: the object whose method the handler is; else the handler itself.
    """

    event: Any
    handler: Callable[..., Any]
    owner: Any

    @property
    def acts(self) -> bool:
        """Whether the object is attached for this handler, which is not its bookkeeping."""
        return not name_of(self.handler).rpartition(".")[2].startswith("_")

    @property
    def name(self) -> str:
        """What a person calls it, such as ``Evaluation val``."""
        label = set_of(self.owner)
        return f"{name_of(self.handler)} {label}" if label else name_of(self.handler)


def attached_to(engine: Engine) -> list[Attached]:
    """The whole bus, event by event, in the order in which handlers run."""
    return [
        Attached(event, handler, _owner(handler))
        for event in events_with_handlers(engine)
        for handler, _, _ in handlers_of(engine, event)
    ]


def owners(entries: Iterable[Attached]) -> Iterator[Any]:
    """Each object once."""
    yield from {id(entry.owner): entry.owner for entry in entries}.values()


def set_of(owner: Any) -> str | None:
    """The name of the set that an evaluation evaluates; None: the object is not an evaluation."""
    label = getattr(owner, "label", None)
    return label if isinstance(label, str) and isinstance(getattr(owner, "evaluator", None), Engine) else None


def options_of(owner: Any) -> tuple[SaveOptions, CheckpointStore] | None:
    """The options and the store of a handler that saves checkpoints."""
    options, store = getattr(owner, "options", None), getattr(owner, "store", None)
    return (options, store) if isinstance(options, SaveOptions) and isinstance(store, CheckpointStore) else None


def scheduler_of(owner: Any) -> Schedule | LRScheduler | ReduceLROnPlateau | None:
    """The schedule that a handler steps."""
    scheduler = getattr(owner, "scheduler", None)
    return scheduler if isinstance(scheduler, Schedule | LRScheduler | ReduceLROnPlateau) else None


def followed_by(owner: Any) -> tuple[str, str] | None:
    """The key of the metric that a handler follows, and the setting that names it."""
    key, setting = getattr(owner, "key", None), getattr(owner, "setting", None)
    return (key, setting) if isinstance(key, str) and isinstance(setting, str) else None


def _owner(handler: Callable[..., Any]) -> Any:
    if type(handler) is Filtered:
        handler = handler.handler
    owner = getattr(handler, "__self__", handler)
    return handler if isinstance(owner, type) or owner is None else owner
