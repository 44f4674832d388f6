"""An ordered list of sources that a run starts from; the dynamic ones are loaded again while it trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ignite.engine import Events

from ignite_engine import Phase, Trainer
from ignite_engine.checkpointing import CheckpointError, CheckpointStore, LoadSource, LoadTable, Source
from ignite_engine.checkpointing.load.sources import Found, SourceWatch, load_sources
from ignite_engine.errors import one_line
from ignite_engine.ranks import agreement
from ignite_engine.state import Start
from ignite_engine.states import loading
from ignite_engine.states.model_and_optimizer import OptimizerState
from ignite_engine.states.registry import Registry

logger = logging.getLogger(__name__)


class ModelBank:
    """Start from several checkpoints; look at each event whether a dynamic one has a newer state, and load that.

    Args:
        sources: the last that has a name brings it. Those that are ``dynamic`` are loaded again.
        reset_optimizers: optimizers forget the state of tensors that are loaded again; otherwise they keep it. Where a
            plan has the optimizer, it is loaded with its tensors in either case.
        name: of the handler's own state in a checkpoint: what was loaded, and at which iteration.

    The event is one between two steps. A newer state is loaded at it, on all ranks, before an evaluation of the same
    event; the step boundary that follows is always saved. A source that is damaged, does not fit or has non-finite
    weights is named in one warning, and training goes on with what it has. When a newer one comes is outside of the
    run: ``trainer.reproducibility()`` says so.

    Raises:
        ValueError: there is no source.
    """

    phase = Phase.PREPARE
    replayed = True

    def __init__(
        self, sources: Sequence[LoadSource], *, reset_optimizers: bool = False, name: str = "model_bank"
    ) -> None:
        self.sources = load_sources(sources, None, dynamic=True)
        self.reset_optimizers, self.name = reset_optimizers, name
        self.loaded: dict[int, dict[str, Any]] = {}
        """Of each source that was loaded, by its place: what, and at which iteration of this run."""
        self._watches = {at: SourceWatch(source) for at, source in enumerate(self.sources) if source.dynamic}
        self._origins: dict[str, dict[str, int]] = {}
        self._trainer: Trainer | None = None

    def attach(self, trainer: Trainer, event: Any = Events.EPOCH_COMPLETED) -> None:
        """Look for newer sources at ``event``, such as ``Events.ITERATION_COMPLETED(every=100)``; once per bank."""
        self._trainer = trainer
        trainer.register(self.name, self, shared=True)
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(event, self)

    @property
    def outside_of_run(self) -> str | None:
        """For the reproducibility report; None: there is no dynamic source."""
        paths = ", ".join(str(self.sources[at].path) for at in self._watches)
        return (
            f"loads {paths} again when there is a newer state, and when that comes is outside of the run"
            if paths
            else None
        )

    def load(self) -> LoadTable:
        """Start with what the sources have, where ``checkpoint.resume()`` found nothing; a collective.

        Returns:
            What was loaded, from which source, and what was missing; it is logged, too.

        Raises:
            CheckpointError, StateMismatch, ValueError: as ``Checkpoint.load``; nothing was loaded.
            RuntimeError: it is not attached to a trainer yet.
        """
        if self._trainer is None:
            raise RuntimeError("ModelBank.load() needs a trainer: call attach(trainer, event) before.")
        table, by_source = loading.begin_from(self._trainer.registry, self.sources)
        self.loaded, self._origins = {}, {}
        for at, found in enumerate(by_source):
            if found is not None:
                self._note(at, found)
        for row in table.rows:
            self._origins[row.part] = {name: row.origin(name) for name in row.brought}
        return table

    def __call__(self, trainer: Trainer) -> None:
        """Look for newer sources and load them; a collective."""
        newer = agreement.on_rank_0(self._look) if self._watches else []
        loaded = False
        for at, found in newer:
            read = agreement.together(lambda: _read(trainer.registry, found))  # noqa: B023  # called at once
            if reason := next(filter(None, agreement.gather_objects(read if isinstance(read, str) else None)), None):
                self._refuse(at, found, reason)
            elif not isinstance(read, str):
                loaded |= self._load_again(trainer, at, found, read)
        if loaded:  # a run that is killed from there on does not look for them again
            trainer.request_save()
            trainer.vote_at_next_boundary()

    def state_dict(self) -> dict[str, Any]:
        several = self._watches and len(self.sources) > 1
        return {
            "loaded": {str(at): dict(entry) for at, entry in self.loaded.items()},
            "sources": [str(source.path) for source in self.sources],
            "origins": {part: dict(names) for part, names in self._origins.items()} if several else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what was loaded; sources that were added or moved since are taken as they are now."""
        place = _places_by_path(state["sources"], [str(source.path) for source in self.sources])
        self.loaded = {place[int(at)]: dict(entry) for at, entry in state["loaded"].items() if int(at) in place}
        self._origins = {
            part: {name: place[at] for name, at in names.items() if at in place}
            for part, names in state["origins"].items()
        }

    def _start(self, trainer: Trainer) -> None:
        objects = trainer.registry.objects.values()
        own = {
            store.directory.resolve()
            for obj in objects
            if isinstance(store := getattr(obj, "store", None), CheckpointStore)
        }
        for path in (Path(self.sources[at].path).resolve() for at in self._watches):
            if own & {path, path / "checkpoints"}:
                raise ValueError(f"{path} is where this run saves: a dynamic source is of another run.")
        if self.reset_optimizers and not any(isinstance(obj, OptimizerState) for obj in objects):
            logger.warning("reset_optimizers has no effect: the update is no Update, so its optimizers are not known.")
        if trainer.state.start is Start.FRESH and not self.loaded and len(self._watches) < len(self.sources):
            logger.warning("The sources of %s that are not dynamic have no effect without its load().", self.name)

    def _look(self) -> list[tuple[int, Found]]:
        newer = ((at, watch.newer(self._found(at))) for at, watch in self._watches.items())
        return [(at, found) for at, found in newer if found is not None]

    def _load_again(self, trainer: Trainer, at: int, found: Found, read: Source) -> bool:
        held: dict[str, set[str] | None] = {self.name: None}
        elsewhere: dict[str, set[str]] = {}
        for part, names in self._origins.items():
            later = {name for name, origin in names.items() if origin > at}
            held[part] = None if "" in later else later
            if others := {name for name, origin in names.items() if origin != at}:
                elsewhere[part] = others
        table = loading.load_again(
            trainer.registry, self.sources[at].plan, read, held, elsewhere, reset_optimizers=self.reset_optimizers
        )
        if isinstance(table, str):
            self._watches[at].unfit(found)
            self._refuse(at, found, table)
            return False
        self._note(at, found)
        for row in table.rows:
            self._origins.setdefault(row.part, {}).update(dict.fromkeys(row.brought, at))
        if agreement.rank() == 0:
            what = "; ".join(f"{row.part} {row}" for row in table.rows if row.brought)
            what = what or "nothing, as later sources have all of it"
            logger.info("Iteration %d: loaded again from %s: %s.", trainer.state.iteration, found.path, what)
        return True

    def _refuse(self, at: int, found: Found, reason: str) -> None:
        if agreement.rank() == 0:
            self._watches[at].refuse(found.path, reason)

    def _note(self, at: int, found: Found) -> None:
        assert self._trainer is not None
        self.loaded[at] = {**asdict(found), "path": str(found.path), "at_iteration": self._trainer.state.iteration}

    def _found(self, at: int) -> Found | None:
        if at not in self.loaded:
            return None
        values = {name: value for name, value in self.loaded[at].items() if name != "at_iteration"}
        return Found(**{**values, "path": Path(values["path"])})


def _read(registry: Registry, found: Found) -> Source | str:
    """What was found, or why it cannot be read, which may be so on one rank only."""
    try:
        return loading.read(registry, found)
    except (CheckpointError, OSError) as error:
        return one_line(error)


def _places_by_path(before: Sequence[str], now: Sequence[str]) -> dict[int, int]:
    """Where each source of a list is in another one; of several with one path in their order."""
    places: dict[int, int] = {}
    for at, path in enumerate(before):
        free = [index for index, other in enumerate(now) if other == path and index not in places.values()]
        if free:
            places[at] = free[0]
    return places
