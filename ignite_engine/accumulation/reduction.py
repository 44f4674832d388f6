"""Reduction of gradients over ranks, deferred until it is due: DDP and FSDP2 inside a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ignite_engine.step.micro_batches import check_accumulates, reducing_modules

_SPARSE = 1 << 32  # counts ranks with a sparse gradient above those with a dense one


class Reduction:
    """The modules of ``model`` that reduce gradients, DDP and FSDP2; without them every call is local."""

    def __init__(self, model: nn.Module) -> None:
        self._ddp: list[Any] = []
        self._fsdp: list[Any] = []
        self._unknown: list[nn.Module] = []
        self._fsdp_reduces: bool | None = None
        for module in reducing_modules(model):
            if hasattr(module, "set_requires_gradient_sync"):
                self._fsdp.append(module)  # it reaches all below
            elif "require_backward_grad_sync" in vars(module):
                self._ddp.append(module)
            else:
                self._unknown.append(module)

    def __bool__(self) -> bool:
        return bool(self._ddp or self._fsdp)

    def check_accumulates(self) -> None:
        """Refuse what cannot defer its reduction.

        Raises:
            ValueError: DDP with ``static_graph=True``, or a module that defers inside a context only (FSDP1).
        """
        for ddp in self._ddp:
            check_accumulates(ddp)
        for module in self._unknown:
            raise ValueError(
                f"{type(module).__name__} cannot defer its reduction between calls: use "
                "DistributedDataParallel or FSDP2 (fully_shard), or gradient_sync(model, last=...) around each "
                "forward and backward."
            )

    def set_sync(self, reduces: bool) -> None:
        """Set whether the next forward and its backward reduce; holds until it is set again."""
        for ddp in self._ddp:
            ddp.require_backward_grad_sync = reduces  # as its no_sync() does; read in forward
        if self._fsdp_reduces is not reduces:  # this walks over all modules
            for module in self._fsdp:
                module.set_requires_gradient_sync(reduces)
            self._fsdp_reduces = reduces

    def is_done(self) -> bool:
        """Whether DDP reduced in the last backward; if so, those before the next :meth:`set_sync` do not."""
        reducing = [ddp for ddp in self._ddp if ddp.require_backward_grad_sync]
        if not reducing or not all(_is_finished(ddp) for ddp in reducing):
            return False
        for ddp in reducing:
            ddp.require_backward_grad_sync = False
        return True

    def backward_again(self, loss: Tensor, parameters: Sequence[Tensor], retain_graph: bool | None) -> None:
        """Add the gradients of one more loss, as means over ranks, to those that DDP has reduced. A collective.

        DDP reduces once per forward: a second backward through it stays local, silently.
        """
        reduced = [_own_parameters(ddp) for ddp in self._ddp]
        everything = _unique([*(p for parameters_of_ddp in reduced for p in parameters_of_ddp), *parameters])
        found = torch.autograd.grad(loss, everything, retain_graph=retain_graph, allow_unused=True)
        # autograd may return one tensor for two parameters
        fresh: dict[int, Tensor | None] = {
            id(p): None if g is None else g.clone() for p, g in zip(everything, found, strict=True)
        }
        for ddp, own in zip(self._ddp, reduced, strict=True):
            sums, ranks = _sum_over_ranks(ddp, own, [fresh[id(p)] for p in own], 1)
            fresh |= {id(p): None if g is None else g.mul_(1.0 / ranks) for p, g in zip(own, sums, strict=True)}
        for parameter in everything:
            gradient = fresh[id(parameter)]
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def finish_group(self, parameters: Sequence[Tensor], micro_batches: int, accumulation_steps: int) -> bool:
        """Turn the gradients of an incomplete group into the mean over all its micro-batches. A collective.

        Args:
            parameters: whose gradients hold the sum over this rank's micro-batches, each divided by
                ``accumulation_steps``, not reduced.
            micro_batches: of this rank. Under DDP ranks may differ, and each of their micro-batches weighs the same.

        Returns:
            False if no rank has any; then nothing has changed.
        """
        done: set[int] = set()
        sums: list[tuple[Tensor, Tensor | None, int]] = []
        known, any_rank = {id(p) for p in parameters}, micro_batches > 0
        for ddp in self._ddp:
            own = [p for p in _own_parameters(ddp) if id(p) in known]
            # without a micro-batch here, .grad is that of the last update
            gradients = [p.grad if micro_batches else None for p in own]
            summed, total = _sum_over_ranks(ddp, own, gradients, micro_batches)
            sums += [(p, g, total) for p, g in zip(own, summed, strict=True)]
            done |= {id(p) for p in own}
            any_rank |= total > 0
        if not any_rank:
            return False
        if self._fsdp:
            self.reduce_fsdp()
        for parameter, gradient, count in sums:
            parameter.grad = None if gradient is None else gradient.mul_(accumulation_steps / count)
        for parameter in parameters:
            if id(parameter) not in done and parameter.grad is not None:
                parameter.grad = parameter.grad.mul_(accumulation_steps / micro_batches) if micro_batches else None
        return True

    def reduce_fsdp(self) -> None:
        """Reduce what FSDP2 has kept of earlier backwards, which is not in ``.grad``. A collective."""
        for module in self._fsdp:
            module.set_requires_gradient_sync(True)
            # torch calls this at the end of each backward; no public function reduces without one
            state = getattr(module, "_get_fsdp_state", lambda: None)()
            reduce = getattr(state, "_root_post_backward_final_callback", None)
            if reduce is None:
                raise RuntimeError(_unknown_torch("FSDP2", "_root_post_backward_final_callback"))
            reduce()
        self._fsdp_reduces = True


def _is_finished(ddp: Any) -> bool:
    """Whether no reduction waits for a parameter that a further loss may reach."""
    check = getattr(ddp.reducer, "_check_reducer_finalized", None)
    if check is None:
        raise RuntimeError(_unknown_torch("DDP", "_check_reducer_finalized"))
    try:
        check()
    except RuntimeError:
        return False
    return True


def _unknown_torch(wrapper: str, name: str) -> str:
    return (
        f"torch {torch.__version__} has no {name}, by which GradientAccumulationOptimizer defers {wrapper}'s "
        "reduction: use gradient_sync(model, last=...) around each forward and backward, or torch 2.11 to 2.13."
    )


def _own_parameters(ddp: Any) -> list[Tensor]:
    """The parameters that DDP reduces."""
    ignored = ddp.parameters_to_ignore
    return [p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]


def _sum_over_ranks(
    ddp: Any, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], count: int
) -> tuple[list[Tensor | None], int]:
    """The sum of each gradient and of ``count`` over the ranks of ``ddp``; in place where a gradient is dense.

    A parameter without a gradient on any rank stays without; where the counts sum up to zero nothing is reduced.
    """
    group = ddp.process_group
    kinds = [0 if g is None else _SPARSE if g.is_sparse else 1 for g in gradients]
    known = torch.tensor([count, *kinds], dtype=torch.int64, device=parameters[0].device if parameters else None)
    dist.all_reduce(known, group=group)
    total, *present = known.tolist()
    if not total:
        return list(gradients), 0
    sums: list[Tensor | None] = []
    pending: list[tuple[Any, Tensor, Tensor]] = []
    for parameter, gradient, ranks in zip(parameters, gradients, present, strict=True):
        if ranks and gradient is None:
            gradient = _empty_like(parameter) if ranks >= _SPARSE else torch.zeros_like(parameter)
        if gradient is not None and parameter.numel():
            sent = gradient.coalesce() if gradient.is_sparse else gradient.detach().contiguous()
            gradient = sent if gradient.is_sparse else gradient
            pending.append((dist.all_reduce(sent, group=group, async_op=True), sent, gradient))
        sums.append(gradient)
    for work, sent, gradient in pending:
        work.wait()
        if sent is not gradient and sent.data_ptr() != gradient.data_ptr():
            gradient.copy_(sent)
    return sums, total


def _empty_like(parameter: Tensor) -> Tensor:
    """A sparse gradient without rows, as an embedding makes them."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False).coalesce()


def _unique(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in {id(tensor): tensor for tensor in tensors}.values() if tensor.requires_grad]
