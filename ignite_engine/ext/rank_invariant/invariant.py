"""What makes an update the same bits on any number of ranks; ``docs/rank_invariant.md`` explains it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ignite_engine import rng
from ignite_engine.devices import widest_float
from ignite_engine.ext.rank_invariant.exchange import Exchange, exchanged_on, gradient_group
from ignite_engine.ext.rank_invariant.gradient_buffers import GradientBuffers
from ignite_engine.ext.rank_invariant.gradient_tree import GradientTree
from ignite_engine.ext.rank_invariant.rank_local import check_model
from ignite_engine.ext.rank_invariant.tree_sum import nodes_of
from ignite_engine.ranks import agreement
from ignite_engine.step.losses import names_of
from ignite_engine.step.micro_batches import WeightFn, check_weight, share
from ignite_engine.step.parameters import Parameters

_BETWEEN_UPDATES = -1
"""In the place of a micro-batch: the random numbers that handlers and evaluations draw."""


class RankInvariance:
    """Random numbers and sums of one update after the other.

    In each :meth:`begin`, and for each pass over the group: while :meth:`collecting`, for every micro-batch
    :meth:`before`, forward and backward, :meth:`after`; then :meth:`reduce`. Its state is the seed of the model's
    random numbers.

    Args:
        model: the user's own, not wrapped for data parallelism.
        parameters: those whose gradients are summed, in the same order on every rank.
        device: the model's.
    """

    def __init__(self, model: nn.Module, parameters: Parameters, device: torch.device) -> None:
        self._model, self._all_parameters, self._device = model, parameters, device
        self._seed: int | None = None
        self._gradient_buffers: GradientBuffers | None = None
        self._exchange: Exchange | None = None

    # -- a run ----------------------------------------------------------------------------------------------------

    def start(self, loss_fn: Any) -> None:
        """A run starts: refuse what cannot keep the promise, then give every rank rank 0's weights. A collective.

        Args:
            loss_fn: may draw random numbers, too.

        Raises:
            ValueError: something in the model cannot; the same line on every rank.
        """
        parameters = self._all_parameters.all()
        check_model(self._model, parameters, loss_fn)
        if self._seed is None:
            self._seed = agreement.broadcast_int(torch.initial_seed() & (2**63 - 1))
        self._names: list[str] | None = None
        self._gradient_buffers = self._exchange = None  # another process group perhaps
        saved = self._model.state_dict()
        self._buffers = {name: buffer for name, buffer in self._model.named_buffers() if name in saved}
        if agreement.world_size() > 1:
            tensors = (*self._model.parameters(), *self._model.buffers(), *parameters)
            for tensor in {id(tensor): tensor.detach() for tensor in tensors}.values():
                _take_rank_0s(tensor)
        self._seed_generators(0, _BETWEEN_UPDATES)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seed = state["seed"]

    # -- an update ------------------------------------------------------------------------------------------------

    def begin(
        self, micro_batches: Sequence[Any], *, iteration: int, full: int, total: int, weight_fn: WeightFn | None
    ) -> list[float] | None:
        """The factor of each micro-batch's mean loss so that the sum over all ranks is the weighted mean.

        Args:
            micro_batches: this rank's, on the host.
            full: micro-batches of a full iteration over all ranks.
            total: of this one.
            weight_fn: the weight of one micro-batch; with it this is a collective.

        Returns:
            None where the sum of the weights is zero.

        Raises:
            ValueError: a weight is negative or not finite, or their sum is not.
        """
        self._iteration = iteration
        ranks = agreement.world_size()
        ends = [share(full, rank, ranks) for rank in range(ranks)]
        self._leaves = [range(min(first, total), min(end, total)) for first, end in ends]
        self._own = self._leaves[agreement.rank()]
        assert len(self._own) == len(micro_batches)
        parameters = [parameter for parameter in self._all_parameters.all() if parameter.requires_grad]
        buffers = self._gradient_buffers
        if buffers is None or list(map(id, buffers.parameters)) != list(map(id, parameters)):
            self._gradient_buffers, self._exchange = GradientBuffers(parameters, ranks), None
        self._scales = [1.0 / total] * len(micro_batches)
        if weight_fn is None:
            return self._scales
        weights = [check_weight(weight_fn(batch)) for batch in micro_batches]
        rows = agreement.gather_floats(weights + [0.0] * (max(map(len, self._leaves)) - len(weights)))
        everyones = [weight for row in rows for weight in row]
        if sum(everyones) == math.inf:
            raise ValueError(f"The weights of one update sum up to infinity, got {weights} here: return smaller ones.")
        summed = math.fsum(everyones)  # exactly rounded: it has the same bits in any order
        self._scales = [weight / summed for weight in weights] if summed else []
        return self._scales if summed else None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """For the forwards and backwards of this rank's micro-batches; each time a sum of its own begins."""
        assert self._gradient_buffers is not None
        self._tree = GradientTree(self._gradient_buffers, is_whole=agreement.world_size() == 1)
        self._versions = [buffer._version for buffer in self._buffers.values()]
        with self._tree.collecting():
            yield

    def before(self, index: int) -> None:
        """Before the forward of this rank's micro-batch ``index``, which weighs something."""
        leaf = self._own[index]
        self._seed_generators(self._iteration, leaf)
        sibling_follows = leaf % 2 == 0 and any(self._scales[index + 1 : index + 2])
        self._tree.before(leaf, sibling_follows=sibling_follows, is_last=index + 1 == len(self._own))

    def after(self, index: int) -> None:
        """After the backward of this rank's micro-batch ``index``, or in its place where it weighs nothing.

        Raises:
            ValueError: a gradient is sparse, or came in several parts.
        """
        if self._scales[index]:
            self._tree.after()
        else:
            self._tree.leave_out(self._own[index])

    def reduce(self, losses: Sequence[Tensor], extras: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Give the parameters the sum of all gradients; a collective.

        Args:
            losses: of this rank's micro-batches that weigh something; ``extras`` likewise, or empty.

        Returns:
            The weighted mean over all micro-batches of each value, the same on every rank, in the device's widest type.

        Raises:
            ValueError: the names of the values differ, or the forward has changed a buffer.
        """
        self._check_buffers()
        self._agree_names(losses, extras)
        self._own_products = products = self._products(losses, extras)
        if agreement.world_size() == 1:
            gradients = self._tree.total()
        else:
            gradients, products = self._over_ranks(products)
        for parameter, gradient in zip(self._tree.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._seed_generators(self._iteration, _BETWEEN_UPDATES)
        assert self._names is not None
        return dict(zip(self._names, products.sum(dim=1).unbind(), strict=True))

    def own_loss(self) -> Tensor:
        """The weighted mean over this rank's micro-batches of the last :meth:`reduce`; 0 where none weighs anything."""
        return self._own_products[0].sum() / (sum(self._scales) or 1.0)

    # -- its parts ------------------------------------------------------------------------------------------------

    def _seed_generators(self, iteration: int, micro_batch: int) -> None:
        assert self._seed is not None
        rng.seed_device(rng.mix(self._seed, iteration, micro_batch), self._device)

    def _check_buffers(self) -> None:
        changed = [
            name
            for (name, buffer), version in zip(self._buffers.items(), self._versions, strict=True)
            if buffer._version != version
        ]
        if self._names is None:  # the first update of the run: another tensor in its place is found once
            now = dict(self._model.named_buffers())
            changed += [name for name, buffer in self._buffers.items() if now.get(name) is not buffer]
        if changed:
            raise ValueError(
                f"rank_invariant needs buffers that the forward does not change, but it changed {changed[0]!r}: each "
                "rank's would be another. Compute it from parameters, or register it with persistent=False if it is "
                "only a cache."
            )

    def _agree_names(self, losses: Sequence[Tensor], extras: Sequence[Mapping[str, Tensor]]) -> None:
        own = ["loss", *names_of(extras, len(losses))] if losses else None
        if self._names is None:  # later differences concern this rank's loss function alone
            all_names = [names for names in agreement.gather_objects(own) if names is not None]
            if any(names != all_names[0] for names in all_names):
                raise ValueError(f"loss_fn must return the same names on every rank, got {all_names} by rank.")
            self._names = all_names[0]
        elif own is not None and own != self._names:
            raise ValueError(f"loss_fn must return the same names in each update, got {own} after {self._names}.")

    def _products(self, losses: Sequence[Tensor], extras: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Each value times its micro-batch's scale, of shape (names, this rank's micro-batches)."""
        assert self._names is not None
        wide = widest_float(self._device)
        if not losses:
            return torch.zeros(len(self._names), len(self._own), dtype=wide, device=self._device)
        columns = [losses, *([named[name] for named in extras] for name in self._names[1:])]
        values = torch.stack([torch.stack(list(column)).to(wide) for column in columns])
        weighing = [at for at, scale in enumerate(self._scales) if scale > 0]
        values = values * torch.tensor([self._scales[at] for at in weighing], dtype=wide, device=self._device)
        if len(weighing) == len(self._own):
            return values
        products = values.new_zeros(len(self._names), len(self._own))
        products[:, weighing] = values
        return products

    def _over_ranks(self, products: Tensor) -> tuple[list[Tensor | None], Tensor]:
        assert self._gradient_buffers is not None
        self._exchange = self._exchange or Exchange(self._gradient_buffers)
        ranks, own = agreement.world_size(), self._tree.sums()
        present = torch.zeros(len(self._tree.parameters), dtype=torch.uint8)
        for subtree in own:
            present |= torch.frombuffer(subtree.present, dtype=torch.uint8)
        everyones_present = [torch.empty_like(present) for _ in range(ranks)]
        products = products.to(exchanged_on(self._device))
        padded = products.new_zeros(len(products), max(map(len, self._leaves)))
        padded[:, : products.shape[1]] = products
        everyones_products = [torch.empty_like(padded) for _ in range(ranks)]
        # on the host: whether a parameter has a gradient must not wait for the device
        pending = [
            dist.all_gather(everyones_present, present, group=agreement.cpu_group("gradients"), async_op=True),
            dist.all_gather(everyones_products, padded, group=gradient_group(products.device), async_op=True),
        ]
        summed = self._exchange.sum(own, [nodes_of(leaves.start, leaves.stop) for leaves in self._leaves])
        for work in pending:
            work.wait()
        anywhere = torch.stack(everyones_present).amax(dim=0).tolist()
        gradients = [gradient if has else None for gradient, has in zip(summed, anywhere, strict=True)]
        rows = [row[:, : len(leaves)] for row, leaves in zip(everyones_products, self._leaves, strict=True)]
        return gradients, torch.cat(rows, dim=1).to(self._device)


def _take_rank_0s(tensor: Tensor) -> None:
    values = tensor.to(exchanged_on(tensor.device)).contiguous()
    dist.broadcast(values, src=0)
    if values is not tensor:
        tensor.copy_(values)
