"""Accumulation with the same bits on any number of ranks; ``docs/distributed.md`` explains it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Engine
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import rng
from ignite_engine.devices import widest_float
from ignite_engine.ext.rank_invariant.invariant_sum import InvariantSum, Spare, exchanged_on
from ignite_engine.ext.rank_invariant.rank_local import check_model
from ignite_engine.ranks import agreement
from ignite_engine.update.accumulation import Accumulation, Listeners
from ignite_engine.update.losses import names_of
from ignite_engine.update.micro_batches import Group, check_weight, scales_of, share

_BETWEEN_UPDATES = -1
"""In the place of a micro-batch: the random numbers that handlers and evaluations draw."""


class RankInvariant(Accumulation):
    """Random numbers that belong to the micro-batch, and sums in the order of one tree over all of them.

    Its state is the seed of the model's random numbers. A micro-batch that weighs nothing is left out.
    """

    rank_invariant = True
    _seed: int | None = None

    def trained(self, model: nn.Module) -> nn.Module:
        """Of DDP the module inside: it reduces nothing."""
        inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        return inner

    def stateful(self) -> list[tuple[str, Any, bool]]:
        return [("rank_invariant", self, True)]

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seed = state["seed"]

    def check(self) -> None:
        check_model(self.update.model, self.update.parameters.all(), self.update.loss_fn)

    def run_started(self) -> None:
        """Refuse what cannot keep the promise, then give every rank rank 0's weights; a collective."""
        self.check()
        model, parameters = self.update.model, self.update.parameters.all()
        if self._seed is None:
            self._seed = agreement.broadcast_object(torch.initial_seed() & (2**63 - 1))
        self._names: list[str] | None = None
        self._spare = Spare(list)
        saved = model.state_dict()
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
        if agreement.world_size() > 1:
            agreement.cpu_group("gradients")  # made here: in an update a rank may have nothing to send at first
            tensors = (*model.parameters(), *model.buffers(), *parameters)
            for tensor in {id(tensor): tensor.detach() for tensor in tensors}.values():
                values = tensor.to(exchanged_on(tensor.device)).contiguous()
                dist.broadcast(values, src=0)
                if values is not tensor:
                    tensor.copy_(values)
        self._seed_generators(0, _BETWEEN_UPDATES)

    def scales(self, engine: Any, group: Group) -> list[float] | None:
        """The factor of each micro-batch so that the sum over all ranks is the weighted mean; may be a collective."""
        ranks, total = agreement.world_size(), group.total or len(group)
        ends = [share(engine.global_micro_batches, rank, ranks) for rank in range(ranks)]
        self._leaves = [range(min(first, total), min(end, total)) for first, end in ends]
        self._iteration = engine.state.iteration
        assert len(self._leaves[agreement.rank()]) == len(group)
        weight_fn = self.update.weight_fn
        if weight_fn is None:
            return [1.0 / total] * len(group)
        weights = [check_weight(weight_fn(batch)) for batch in group]
        rows = agreement.gather_floats(weights + [0.0] * (max(map(len, self._leaves)) - len(weights)))
        # exactly rounded: it has the same bits in any order
        return scales_of(weights, math.fsum(weight for row in rows for weight in row))

    def __call__(self, engine: Engine, micro_batches: Sequence[Any], scales: Sequence[float]) -> dict[str, Tensor]:
        self._parameters = [parameter for parameter in self.update.parameters.all() if parameter.requires_grad]
        self._sum, self._done = InvariantSum(self._leaves, 1 + len(self._parameters), self._spare), 0
        self._weighing = list(compress(self._leaves[agreement.rank()], scales))
        self._versions = [buffer._version for buffer in self._buffers.values()]
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._take, at))
            for at, parameter in enumerate(self._parameters, 1)
        ]
        try:
            return super().__call__(engine, [*compress(micro_batches, scales)], [*filter(None, scales)])
        finally:
            for hook in hooks:
                hook.remove()

    def forward_backward(
        self, engine: Engine, batch: Any, scale: float, extras: list[Mapping[str, Tensor]], listeners: Listeners
    ) -> Tensor:
        leaf = self._weighing[self._done]
        self._seed_generators(self._iteration, leaf)
        loss = super().forward_backward(engine, batch, scale, extras, listeners)
        self._done += 1
        reported = [loss, *(extras[-1][name] for name in names_of(extras, self._done))]
        wide = widest_float(self.update.device)
        self._sum.add(0, leaf, torch.stack([value.to(wide) for value in reported]) * scale)
        return loss

    def _take(self, at: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            raise ValueError("rank_invariant cannot sum sparse gradients: use sparse=False in the embeddings.")
        self._sum.add(at, self._weighing[self._done], gradient)

    def output(
        self, losses: list[Tensor], extras: list[Mapping[str, Tensor]], scales: Sequence[float]
    ) -> dict[str, Tensor]:
        """Give the parameters the sum of all gradients; a collective.

        Returns:
            The weighted mean over all micro-batches of each value, the same on every rank, in the widest type.

        Raises:
            ValueError: the names of the values differ, or the forward has changed a buffer.
        """
        self._check_buffers()
        if not losses and self.update.scaler is not None:  # it makes its scale in its first use, that of its peers
            self.update.scaler.scale(torch.zeros((), device=self.update.device))
        names = self._agreed_names(["loss", *names_of(extras, len(losses))] if losses else None)
        row = torch.empty(len(names), dtype=widest_float(self.update.device), device=self.update.device)
        values, *gradients = self._sum.total([row, *self._parameters])
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._seed_generators(self._iteration, _BETWEEN_UPDATES)
        assert values is not None
        return dict(zip(names, values.unbind(), strict=True))

    def _seed_generators(self, iteration: int, micro_batch: int) -> None:
        assert self._seed is not None
        rng.seed_device(rng.mix(self._seed, iteration, micro_batch), self.update.device)

    def _check_buffers(self) -> None:
        changed = [
            name
            for (name, buffer), version in zip(self._buffers.items(), self._versions, strict=True)
            if buffer._version != version
        ]
        if self._names is None:  # the first update of the run: another tensor in its place is found once
            now = dict(self.update.model.named_buffers())
            changed += [name for name, buffer in self._buffers.items() if now.get(name) is not buffer]
        if changed:
            raise ValueError(
                f"rank_invariant needs buffers that the forward does not change, but it changed {changed[0]!r}: each "
                "rank's would be another. Compute it from parameters, or register it with persistent=False if it is "
                "only a cache."
            )

    def _agreed_names(self, own: list[str] | None) -> list[str]:
        """What is reported on every rank; in the first update of a run a collective."""
        if self._names is None:  # later differences concern this rank's loss function alone
            all_names = [names for names in agreement.gather_objects(own) if names is not None]
            if any(names != all_names[0] for names in all_names):
                raise ValueError(f"loss_fn must return the same names on every rank, got {all_names} by rank.")
            self._names = all_names[0]
        elif own is not None and own != self._names:
            raise ValueError(f"loss_fn must return the same names in each update, got {own} after {self._names}.")
        return self._names
