"""A loss or gradient that is not finite: where it was first, and what all ranks do about it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ignite_engine.errors import NotFinite, RollBack
from ignite_engine.ranks import agreement
from ignite_engine.update.micro_batches import check_steps

logger = logging.getLogger(__name__)

ACTIONS = ("skip", "stop", "rollback")
_CHUNK = 32
_NEVER = 2**62


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
        """What was left out, by iteration: ``epoch``, ``loss`` and ``grad_norm`` by rank, ``samples`` by rank."""
        self._kept: list[tuple[Tensor, Tensor]] = []

    def begin_anew(self) -> None:
        """A run starts over: nothing was left out."""
        self.journal.clear()

    def leaves_out(self, iteration: int) -> bool:
        """Whether the step of this iteration was left out, or is to be."""
        return iteration in self.journal

    def keep(self, buffers: Iterable[Tensor]) -> None:
        """Copy what a forward changes beside gradients, such as BatchNorm's statistics."""
        self._kept = [(buffer, buffer.clone()) for buffer in buffers]

    def takes(self, engine: Any, loss: Tensor, norm: Tensor | None, own_loss: Callable[[Tensor], Tensor]) -> bool:
        """Whether loss and gradient norm are finite on all ranks: one value read, one element reduced; a collective.

        If not, the iteration is written down, and undone is what its forward has changed.

        Args:
            loss: each rank's own; the norm of reduced gradients is the same everywhere.
            own_loss: this rank's part of ``loss``.

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
        rows = agreement.gather_objects((own_loss(loss).item(), None if norm is None else norm.item(), samples))
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


class FirstNonFinite:
    """The first iteration of a run whose loss is not finite; nothing is read from the device before it is asked."""

    def __init__(self) -> None:
        self._losses: dict[int, Tensor] = {}
        self._first: Tensor | None = None

    def add(self, iteration: int, loss: Tensor) -> None:
        self._losses[iteration] = loss
        if len(self._losses) >= _CHUNK:
            self._fold()

    def warn(self, parameters: Iterable[Tensor], iteration: int, *, rank_invariant: bool = False) -> int | None:
        """At the end of a run of which nobody has read the losses: one line if it went wrong; a collective.

        Args:
            iteration: the run's last.
            rank_invariant: each rank has the loss of all micro-batches, so none is named.

        Returns:
            The iteration that the line names; None: all is finite.
        """
        self._fold()
        own = _NEVER if self._first is None else int(self._first.item())
        local = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in parameters]
        healthy = all(bool(values.detach().isfinite().all()) for values in local)
        rows = agreement.gather_objects((own, healthy))
        first = min(found for found, _ in rows)
        broken = [rank for rank, (_, healthy) in enumerate(rows) if not healthy]
        if first == _NEVER and not broken:
            return None
        if first == _NEVER:
            line = (
                f"The weights are not finite at the end of the run, iteration {iteration}{agreement.on_ranks(broken)}, "
                "though every loss was: the gradients of the last update were not, or the step was too large."
            )
        else:
            ranks = [rank for rank, (found, _) in enumerate(rows) if found == first]
            where = "" if rank_invariant else agreement.on_ranks(ranks)
            line = f"The loss of iteration {first} was the first that is not finite{where}. {ADVICE}"
        if agreement.rank() == 0:
            logger.warning("%s", line)
        return min(first, iteration)

    def _fold(self) -> None:
        """Take the first bad one of the losses so far, on their device."""
        if not self._losses:
            return
        finite = torch.stack([*self._losses.values()]).isfinite()
        iterations = torch.tensor([*self._losses]).to(finite.device, non_blocking=True)
        first = torch.where(finite, _NEVER, iterations).min()
        self._first = first if self._first is None else torch.minimum(self._first, first)
        self._losses = {}


ADVICE = "Check the data of that iteration, the learning rate and the precision."


def _described(iteration: int, losses: Sequence[float], norms: Sequence[float | None]) -> str:
    """The beginning of a sentence about an iteration: what is not finite in it, and on which ranks."""
    bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    values = [losses[rank] for rank in bad] or [norm for norm in norms if norm is not None and not math.isfinite(norm)]
    shown = ", ".join(dict.fromkeys(map(str, values)))
    if bad:
        return f"The loss of iteration {iteration} is {shown}{agreement.on_ranks(bad)}"
    return f"The gradient norm of iteration {iteration} is {shown}, its loss is finite"
