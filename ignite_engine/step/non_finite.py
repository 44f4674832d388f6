"""A loss or gradient that is not finite: where it was first, and what all ranks do about it."""

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

logger = logging.getLogger(__name__)

ACTIONS = ("skip", "stop", "rollback")
_CHUNK = 32


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
        if isinstance(max_skips, bool) or not isinstance(max_skips, int) or max_skips < 1:
            raise ValueError(f"max_skips must be a whole number of at least 1, got {max_skips!r}.")
        self.action, self.max_skips = action, max_skips
        self.journal: dict[int, dict[str, Any]] = {}
        """What was left out, by iteration: ``epoch``, ``loss`` and ``grad_norm`` by rank, ``samples`` by rank."""
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []

    def begin_anew(self) -> None:
        """A run starts over: nothing was left out."""
        self.journal.clear()

    def leaves_out(self, iteration: int) -> bool:
        """Whether the step of this iteration was left out, or is to be."""
        return iteration in self.journal

    def keep(self, buffers: Iterable[Tensor]) -> None:
        """Copy what a forward changes beside gradients, such as BatchNorm's statistics."""
        self._buffers = list(buffers)
        self._copies = [buffer.clone() for buffer in self._buffers]

    @staticmethod
    def is_finite(loss: Tensor, norm: Tensor | None) -> bool:
        """Whether loss and gradient norm are finite on all ranks: one value read, one element reduced.

        The norm of reduced gradients is the same everywhere, the loss is each rank's own.
        """
        verdict = (loss * 0.0).float()
        if norm is not None:
            verdict = verdict + (norm * 0.0).to(verdict)
        if agreement.world_size() > 1:
            dist.all_reduce(verdict)
        return math.isfinite(verdict.item())

    def act(self, engine: Any, loss: Tensor, norm: Tensor | None) -> None:
        """Write the iteration down and undo what its forward has changed; a collective.

        Raises:
            NotFinite: the run ends here, by the policy or because too much was left out; the same on all ranks.
            RollBack: the run goes back.
        """
        for buffer, copy in zip(self._buffers, self._copies, strict=True):
            with torch.no_grad():
                buffer.copy_(copy)
        state = engine.state
        # what comes from a user's own engine may lack a position
        samples = getattr(getattr(engine, "progress", None), "samples_of_group", lambda: None)()
        rows = agreement.gather_objects((loss.item(), None if norm is None else norm.item(), samples))
        losses, norms, of_ranks = (list(column) for column in zip(*rows, strict=True))
        entry = {"iteration": state.iteration, "epoch": state.epoch, "loss": losses, "grad_norm": norms}
        what = described(state.iteration, losses, norms)
        if self.action == "stop":
            raise NotFinite(f"{what}: the run ends before the weights change. {ADVICE}")
        if len(self.journal) >= self.max_skips:
            raise NotFinite(
                f"{what}, and {self.max_skips} iterations were left out already (max_skips={self.max_skips}): the run "
                f"ends before the weights change. {ADVICE}"
            )
        self.journal[state.iteration] = entry | {"samples": of_ranks}
        if agreement.rank() == 0:
            done = "its step is skipped" if self.action == "skip" else "the run goes back to a checkpoint without it"
            logger.warning("%s: %s (%d of at most %d).", what, done, len(self.journal), self.max_skips)
        if self.action == "rollback":
            raise RollBack(what)

    def state_dict(self) -> dict[str, Any]:
        """The journal, in the order in which it was written."""
        return {"journal": list(self.journal.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.journal = {entry["iteration"]: entry for entry in state["journal"]}


class FirstNonFinite:
    """The first iteration of a run whose loss is not finite; nothing is read from the device before it is asked."""

    def __init__(self) -> None:
        self._start = 0
        self._losses: list[Tensor] = []
        self._first: Tensor | None = None

    def add(self, iteration: int, loss: Tensor) -> None:
        if len(self._losses) >= _CHUNK or iteration != self._start + len(self._losses):
            self._fold()
            self._start = iteration
        self._losses.append(loss)

    def read(self) -> int | None:
        """The iteration of the first non-finite loss; None: all losses so far are finite."""
        self._fold()
        first = -1 if self._first is None else int(self._first.item())
        return None if first < 0 else first

    def clear(self) -> None:
        self._losses, self._first = [], None

    def _fold(self) -> None:
        """Take the first bad one of the losses so far, on their device."""
        if not self._losses:
            return
        losses, self._losses = torch.stack(self._losses), []
        if not losses.is_cpu or not math.isfinite(losses.sum().item()):  # on the CPU the sum is read at no cost
            bad = ~losses.isfinite()
            first = torch.where(bad.any(), bad.int().argmax() + self._start, -1)
            self._first = first if self._first is None else torch.where(self._first < 0, first, self._first)


ADVICE = "Check the data of that iteration, the learning rate and the precision."


def described(iteration: int, losses: Sequence[float], norms: Sequence[float | None]) -> str:
    """The beginning of a sentence about an iteration: what is not finite in it, and on which ranks."""
    bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        values = ", ".join(dict.fromkeys(f"{losses[rank]}" for rank in bad))
        return f"The loss of iteration {iteration} is {values}{agreement.on_ranks(bad)}"
    values = ", ".join(dict.fromkeys(f"{norm}" for norm in norms if norm is not None and not math.isfinite(norm)))
    return f"The gradient norm of iteration {iteration} is {values}, its loss is finite"


def warn_of_first(
    losses: FirstNonFinite, parameters: Iterable[Tensor], iteration: int, *, rank_invariant: bool = False
) -> int | None:
    """At the end of a run of which nobody has read the losses: one line if it went wrong; a collective.

    Args:
        iteration: the run's last.
        rank_invariant: each rank has the loss of all micro-batches, so none is named.

    Returns:
        The iteration that the line names; None: all is finite.
    """
    local = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in parameters]
    healthy = all(bool(values.detach().isfinite().all()) for values in local)
    rows = agreement.gather_objects((losses.read(), healthy))
    first = min((first for first, _ in rows if first is not None), default=None)
    broken = [rank for rank, (_, healthy) in enumerate(rows) if not healthy]
    if agreement.rank() == 0 and first is not None:
        ranks = [] if rank_invariant else [rank for rank, (found, _) in enumerate(rows) if found == first]
        where = agreement.on_ranks(ranks) if ranks else ""
        logger.warning("The loss of iteration %d was the first that is not finite%s. %s", first, where, ADVICE)
    elif agreement.rank() == 0 and broken:
        logger.warning(
            "The weights are not finite at the end of the run, iteration %d%s, though every loss was: the gradients of "
            "the last update were not, or the step was too large.",
            *(iteration, agreement.on_ranks(broken)),
        )
    return first if first is not None or not broken else iteration
