"""A loss or gradient that is not finite, and what all ranks do about it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ignite_engine.errors import NotFinite, RollBack
from ignite_engine.ranks import agreement
from ignite_engine.update.micro_batches import check_steps

logger = logging.getLogger(__name__)

ACTIONS = ("skip", "stop", "rollback")


class NonFinitePolicy:
    """What is done with an iteration whose loss or gradients are not finite; all ranks decide the same.

    Args:
        action: ``skip`` leaves its step out, ``stop`` ends the run before it, ``rollback`` goes back to the last
            healthy checkpoint and leaves the iteration out when it comes again.
        max_skips: iterations that may be left out in a run, by ``skip`` or ``rollback``; one more ends it.

    Raises:
        ValueError: ``action`` is none of these, or ``max_skips`` is below 1.
    """

    def __init__(self, action: str, max_skips: int) -> None:
        if action not in ACTIONS:
            raise ValueError(f"non_finite must be one of {', '.join(ACTIONS)}, or None, got {action!r}.")
        check_steps(max_skips, "max_skips")
        self.action, self.max_skips = action, max_skips
        self.journal: dict[int, dict[str, Any]] = {}
        """What is left out, by iteration: ``epoch``, ``loss`` and ``grad_norm`` by rank, ``samples`` by rank."""
        self._kept: list[tuple[Tensor, Tensor]] = []

    def begin_anew(self) -> None:
        """A run starts over: nothing was left out."""
        self.journal.clear()

    def keep(self, buffers: Iterable[Tensor]) -> None:
        """Copy what a forward changes beside gradients, such as BatchNorm's statistics."""
        self._kept = [(buffer, buffer.clone()) for buffer in buffers]

    def takes(self, engine: Any, loss: Tensor, norm: Tensor | None) -> bool:
        """Whether loss and gradient norm are finite on all ranks: one value read, one element reduced; a collective.

        If not, the iteration is written down, and undone is what its forward has changed.

        Args:
            loss: each rank's own; the norm of reduced gradients is the same everywhere.

        Raises:
            NotFinite: the run ends here, by the policy or because too much was left out; the same on all ranks.
            RollBack: the run goes back.
        """
        verdict = (loss * 0.0).float()
        if norm is not None:
            verdict = verdict + (norm * 0.0).to(verdict)
        if agreement.world_size() > 1:
            dist.all_reduce(verdict)
        if math.isfinite(verdict.item()):
            return True
        with torch.no_grad():
            for buffer, copy in self._kept:
                buffer.copy_(copy)
        state = engine.state
        # what comes from a user's own engine may lack a position
        samples = getattr(getattr(engine, "progress", None), "samples_of_group", lambda: None)()
        rows = agreement.gather_objects((loss.item(), None if norm is None else norm.item(), samples))
        losses, norms, of_ranks = (list(column) for column in zip(*rows, strict=True))
        what = _described(state.iteration, losses, norms)
        is_spent = len(self.journal) >= self.max_skips
        if self.action == "stop" or is_spent:
            spent = f", and max_skips={self.max_skips} iterations were left out already" if is_spent else ""
            raise NotFinite(f"{what}{spent}: the run ends before the weights change. {ADVICE}")
        entry = {"iteration": state.iteration, "epoch": state.epoch, "loss": losses, "grad_norm": norms}
        self.journal[state.iteration] = entry | {"samples": of_ranks}
        if agreement.rank() == 0:
            done = "its step is skipped" if self.action == "skip" else "the run goes back to a checkpoint without it"
            logger.warning("%s: %s (%d of at most %d).", what, done, len(self.journal), self.max_skips)
        if self.action == "rollback":
            raise RollBack(what)
        return False

    def state_dict(self) -> dict[str, Any]:
        """The journal, in the order in which it was written."""
        return {"journal": list(self.journal.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.journal = {entry["iteration"]: entry for entry in state["journal"]}


def warn_of_weights(parameters: Iterable[Tensor], iteration: int) -> None:
    """At the end of a run in which nobody has read the losses: one line if it went wrong; a collective."""
    local = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in parameters]
    healthy = agreement.gather_objects(all(bool(values.detach().isfinite().all()) for values in local))
    if not all(healthy) and agreement.rank() == 0:
        where = agreement.on_ranks([rank for rank, is_healthy in enumerate(healthy) if not is_healthy])
        logger.warning(
            "The weights are not finite at the end of the run, iteration %d%s. A MetricLogger names the iteration "
            "whose loss was the first.",
            *(iteration, where),
        )


ADVICE = "Check the data of that iteration, the learning rate and the precision."


def _described(iteration: int, losses: Sequence[float], norms: Sequence[float | None]) -> str:
    """The beginning of a sentence about an iteration: what is not finite in it, and on which ranks."""
    bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    values = [losses[rank] for rank in bad] or [norm for norm in norms if norm is not None and not math.isfinite(norm)]
    shown = ", ".join(dict.fromkeys(map(str, values)))
    if bad:
        return f"The loss of iteration {iteration} is {shown}{agreement.on_ranks(bad)}"
    return f"The gradient norm of iteration {iteration} is {shown}, its loss is finite"
