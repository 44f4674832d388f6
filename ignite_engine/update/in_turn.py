"""Several updates of one model in one iteration, as for a GAN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ignite.engine import Engine
from torch import Tensor
from torch.optim import Optimizer

from ignite_engine.checkpoint.states.model_and_optimizer import OptimizerState
from ignite_engine.errors import did_you_mean, is_whole
from ignite_engine.events import TrainingEvents
from ignite_engine.update.base import BaseUpdate
from ignite_engine.update.one import Update


class Updates(BaseUpdate):
    """The process function of a :class:`~ignite_engine.Trainer` whose iteration is several updates of one model.

    Each has its own loss, optimizer, precision and clipping, and is made of the same group of micro-batches, in the
    order of the mapping. A GAN is a module with both networks in it::

        Updates({
            "discriminator": Update(gan, discriminator_optimizer, discriminator_loss),
            "generator": Update(gan, generator_optimizer, generator_loss),
        }, every={"generator": 5})

    Args:
        updates: by name; all of the same model. An optimizer of one leaves the parameters of the others alone, whatever
            gradients they get; its own are cleared before its update.
        every: iterations from one update of that name to the next; 1 where it is not given. With 5 it is made in
            iterations 5, 10, ...: its peers are made five times for each of it.

    ``state.output`` holds what each reports, under ``<name>/``: ``generator/loss``. The events of the optimizer step
    fire for each update, and ``optimizer_steps`` counts them all; :meth:`stepped` is the event of one. An
    :class:`~ignite_engine.handlers.LRSchedule` steps with its own optimizer. A checkpoint holds the model once and, of
    each update, the optimizer (``optimizer/generator``) and whatever else it saves.

    Raises:
        ValueError: they have not one model, share an optimizer, have different weights, or use ``non_finite`` or
            ``rank_invariant``; an ``every`` is below 1 or of no update.
    """

    def __init__(self, updates: Mapping[str, Update], *, every: Mapping[str, int] | None = None) -> None:
        if not updates:
            raise ValueError("updates must hold at least one Update, got an empty mapping.")
        self.updates = dict(updates)
        self.every = dict.fromkeys(updates, 1)
        for name, number in (every or {}).items():
            if name not in updates:
                raise ValueError(f"every has {name!r}, which is not an update{did_you_mean(name, updates)}")
            if not is_whole(number) or number < 1:
                raise ValueError(f"every[{name!r}] must be a number of iterations of at least 1, got {number!r}.")
            self.every[name] = number
        self.turn: str | None = None
        """The update that is being made; None between them."""
        first = next(iter(self.updates.values()))
        self.model, self.weight_fn, self.device = first.model, first.weight_fn, first.device
        self.scaler = next((update.scaler for update in self.updates.values() if update.scaler is not None), None)
        self.optimizers: dict[str, Optimizer] = {}
        for name, update in self.updates.items():
            self._check(name, update)
            for label, optimizer in update.optimizers.items():
                if any(optimizer is other for other in self.optimizers.values()):
                    raise ValueError(f"updates[{name!r}] has an optimizer of another one: give each its own.")
                self.optimizers[name if label == "optimizer" else f"{label}/{name}"] = optimizer

    def _check(self, name: str, update: Update) -> None:
        if update.model is not self.model:
            raise ValueError(
                f"updates[{name!r}] has a model of its own: put the networks into one module, as its attributes, and "
                "give it to each Update."
            )
        if update.weight_fn is not self.weight_fn:
            raise ValueError(f"updates[{name!r}] has another weight_fn than the first: a micro-batch has one weight.")
        if update.non_finite is not None or update.rank_invariant:
            setting = "rank_invariant" if update.rank_invariant else "non_finite"
            raise ValueError(f"updates[{name!r}] uses {setting}, which is for a single Update: leave it out.")

    def __call__(self, engine: Engine, batch: Any) -> dict[str, Tensor]:
        """Make the updates that are due in this iteration."""
        output: dict[str, Tensor] = {}
        iteration = engine.state.iteration
        try:
            for name, update in self.updates.items():
                if iteration % self.every[name] == 0:
                    self.turn = name
                    output.update({f"{name}/{key}": value for key, value in update(engine, batch).items()})
        finally:
            self.turn = None
        return output

    def stepped(self, which: str | Optimizer) -> Any:
        """The event that an update's optimizers have stepped.

        Args:
            which: the update's name, or an optimizer of it.

        Raises:
            ValueError: there is none.
        """
        for name, update in self.updates.items():
            if which == name or any(which is optimizer for optimizer in update.optimizers.values()):
                return TrainingEvents.OPTIMIZER_STEP_COMPLETED(event_filter=lambda *_, own=name: self.turn == own)
        raise ValueError(
            f"got {which!r}, expected an update's name or its optimizer; known: {', '.join(self.updates)}."
        )

    @property
    def stepping(self) -> bool:  # type: ignore[override]  # read only
        """An optimizer's step has begun and not all have ended."""
        return any(update.stepping for update in self.updates.values())

    def stateful(self) -> Iterator[tuple[str, Any, bool]]:
        """The objects to save: name, object with a state, and whether every rank has the same."""
        for turn, update in self.updates.items():
            for name, obj, shared in update.stateful():
                if name != "model":
                    name = f"{name}/{turn}"
                elif update is not next(iter(self.updates.values())):
                    continue
                if isinstance(obj, OptimizerState):
                    obj.part = name
                yield name, obj, shared

    def run_started(self) -> None:
        for update in self.updates.values():
            update.run_started()

    def run_ended(self, engine: Engine) -> None:
        """A run has ended without an error; warns if the numbers of one went wrong. A collective."""
        for update in self.updates.values():
            update.run_ended(engine)
