"""An ordered list of sources that a run starts from; the dynamic ones are loaded again while it trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine import Trainer
from ignite_engine.checkpoint.load import LoadReport
from ignite_engine.checkpoint.sources import Found, LoadSource, Source, SourceWatch, load_sources
from ignite_engine.checkpoint.states import loading
from ignite_engine.checkpoint.states.model_and_optimizer import OptimizerState
from ignite_engine.checkpoint.states.registry import Registry
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.errors import CheckpointError, one_line
from ignite_engine.events import Phase
from ignite_engine.ranks import agreement
from ignite_engine.state import Start

logger = logging.getLogger(__name__)


class ModelBank:
    """Start from several checkpoints; at the event, load those again that are dynamic and have a newer state.

    Args:
        sources: if several contain a name, the last one wins. Those that are ``dynamic`` are loaded again, with all
            their ``parts``, whatever a later source has brought at the start.
        reset_optimizers: optimizers forget the state of tensors that are loaded again; otherwise they keep it. A source
            with the optimizer among its ``parts`` brings it in either case.
        name: of the handler's own state in a checkpoint: what was loaded, and at which iteration.

    The event is one between two steps. A newer state is loaded at it, on all ranks, before an evaluation of the same
    event; the step boundary that follows is always saved. A source that is damaged, does not fit or has non-finite
    weights is named in one warning, and training goes on with what it has. A newer state comes from outside of the
    run: ``trainer.reproducibility()`` names it.

    Raises:
        ValueError: there is no source.
    """

    phase = Phase.PREPARE

    def __init__(
        self, sources: Sequence[LoadSource], *, reset_optimizers: bool = False, name: str = "model_bank"
    ) -> None:
        self.sources = load_sources(sources, {})
        self.reset_optimizers, self.name = reset_optimizers, name
        self.loaded: dict[int, dict[str, Any]] = {}
        """Of each source that was loaded, by its place: what, and at which iteration of this run."""
        self._watches = {at: SourceWatch(source) for at, source in enumerate(self.sources) if source.dynamic}
        self._trainer: Trainer | None = None

    def attach(self, engine: Engine, event: Any = Events.EPOCH_COMPLETED) -> None:
        """Look for newer sources at ``event``, such as ``Events.ITERATION_COMPLETED(every=100)``; once per bank."""
        trainer = Trainer.of(engine)
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

    def load(self) -> LoadReport:
        """Start with what the sources have, where ``checkpoint.resume()`` found nothing; a collective.

        Returns:
            What was loaded, missing and unexpected; it is logged, too.

        Raises:
            CheckpointError, StateMismatch, ValueError: as ``Checkpoint.load``; nothing was loaded.
            RuntimeError: it is not attached to a trainer yet.
        """
        if self._trainer is None:
            raise RuntimeError("ModelBank.load() needs a trainer: call attach(trainer, event) before.")
        report, by_source = loading.begin_from(self._trainer.registry, self.sources)
        self.loaded = {}
        for at, found in enumerate(by_source):
            if found is not None:
                self._note(at, found)
        return report

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

    def state_dict(self) -> dict[str, Any]:
        return {
            "loaded": {str(at): dict(entry) for at, entry in self.loaded.items()},
            "sources": [str(source.path) for source in self.sources],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what was loaded; of a source that is new at its place in the list, nothing was."""
        before, now = dict(enumerate(state["sources"])), [str(source.path) for source in self.sources]
        same = [at for at, path in enumerate(now) if before.get(at) == path and str(at) in state["loaded"]]
        self.loaded = {at: dict(state["loaded"][str(at)]) for at in same}

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
        report = loading.load_again(
            trainer.registry,
            self.sources[at],
            read,
            alone=len(self.sources) == 1,
            reset_optimizers=self.reset_optimizers,
        )
        if isinstance(report, str):
            self._refuse(at, found, report)
            return False
        self._note(at, found)
        if agreement.rank() == 0:
            logger.info("Iteration %d: loaded again: %s.", trainer.state.iteration, report)
        return True

    def _refuse(self, at: int, found: Found, reason: str) -> None:
        if agreement.rank() == 0:
            self._watches[at].refuse(found, reason)

    def _note(self, at: int, found: Found) -> None:
        assert self._trainer is not None
        self.loaded[at] = {**asdict(found), "path": str(found.path), "at_iteration": self._trainer.state.iteration}

    def _found(self, at: int) -> Found | None:
        if at not in self.loaded:
            return None
        loaded = self.loaded[at]
        return Found(Path(loaded["path"]), loaded["identity"], loaded["iteration"])


def _read(registry: Registry, found: Found) -> Source | str:
    """What was found, or why it cannot be read, which may be so on one rank only."""
    try:
        return loading.read_found(registry, found)
    except (CheckpointError, OSError) as error:
        return one_line(error)
