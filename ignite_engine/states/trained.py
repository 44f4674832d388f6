"""What trains on several ranks: each parameter, its optimizer, what reduces its gradient, and where it is saved."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ignite_engine.checkpointing.digests import digests, tensor_sha256
from ignite_engine.errors import shortened
from ignite_engine.ranks import agreement, mesh
from ignite_engine.ranks.ddp_buffers import data_parallel
from ignite_engine.rng import attributes_of
from ignite_engine.states.model_and_optimizer import ModelState, OptimizerState, clean_name, unwrap
from ignite_engine.step.micro_batches import reducing_modules

logger = logging.getLogger(__name__)

_UNCOUNTED = 64
"""So many iterations may change nothing (skipped steps, accumulation) until only every 2nd, 4th, ... is compared."""


class Trained(NamedTuple):
    """One parameter that an optimizer holds and that requires a gradient."""

    name: str
    """In its model, or ``parameters/...`` outside of one."""
    parameter: Tensor
    optimizer: str
    """The name under which its optimizer is registered."""
    reduced_by: str | None
    """What makes its gradient the same on all ranks; None: nothing that is known."""
    forgotten_by_ddp: bool
    """It is inside of a DDP that was made while it needed no gradient."""


def trained_parameters(objects: Mapping[str, Any]) -> list[Trained]:
    """All that the registered optimizers train, each parameter once.

    Args:
        objects: those of the registry, by name.
    """
    reducers = _Reducers(objects)
    models = [unwrap(obj) for obj in objects.values() if isinstance(obj, nn.Module)]
    known = {id(parameter): clean_name(name) for model in models for name, parameter in model.named_parameters()}
    rows: dict[int, Trained] = {}
    for label, obj in objects.items():
        if isinstance(obj, OptimizerState):
            names, parameters = obj.names(), _parameters_of(obj.optimizer)
        elif isinstance(obj, Optimizer):
            parameters = _parameters_of(obj)
            names = [known.get(id(parameter), f"{label}.{index}") for index, parameter in enumerate(parameters)]
        else:
            continue
        for name, parameter in zip(names, parameters, strict=True):
            if parameter.requires_grad and id(parameter) not in rows:
                rows[id(parameter)] = reducers.row(name, parameter, label)
    return list(rows.values())


class TrainedApart:
    """Notices parameters that each rank trains by itself, so that the ranks' weights drift apart.

    Known to be reduced are DTensors, what DDP or another wrapper with ``no_sync`` holds, everything with
    ``rank_invariant``, and a parameter with a gradient hook, which may reduce it. An update function of the user's own
    may reduce gradients itself: what it trains is compared between the ranks, with the optimizers' state of it and the
    loss scaler, as a step may leave weights alone (a rate of 0, an overflow), after iterations 1, 2, 4, 8, ... of the
    process, not counted those before the first that changes anything.

    Args:
        objects: those of the registry, by name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._told: set[str] = set()
        self._update: Any = None
        self._begun = 0
        self._weights: list[dict[str, str]] = []
        self._uncounted_left = _UNCOUNTED
        self._differ: set[str] = set()

    def watch(self, engine: Engine, update: Any) -> None:
        """A run starts: compare within it what ``update`` trains, if it is a function of the user's own."""
        self._begun = engine.state.iteration
        if self._update is None and agreement.world_size() > 1 and not hasattr(update, "stateful"):
            self._update = update
            engine.add_event_handler(Events.ITERATION_COMPLETED(event_filter=self.is_compared), self._compare)

    @property
    def compares(self) -> bool:
        """Whether parameters are compared within the run."""
        return self._update is not None

    def is_compared(self, engine: Engine, iteration: int) -> bool:
        """Whether that is done at an iteration."""
        done = iteration - self._begun
        return done & (done - 1) == 0

    def _compare(self, engine: Engine) -> None:
        objects = self._used()
        mine = {row.name: repr(digests([row.parameter, _state_of(row, objects)])) for row in self._unjudged()}
        scalers = repr(digests([obj.state_dict() for obj in objects.values() if isinstance(obj, GradScaler)]))
        buffers = {name: tensor_sha256(buffer) for name, buffer in self._buffers()}
        rows = agreement.gather_objects((mine, scalers, buffers))
        if len({scalers for _, scalers, _ in rows}) > 1:
            self._differ |= mine.keys()
        compared = [weights | buffers for weights, _, buffers in rows]
        self._differ |= {name for name in mine | buffers if len({row.get(name) for row in compared}) > 1}
        self._count(engine.state.iteration, [weights for weights, _, _ in rows])
        self.check()

    def _count(self, iteration: int, weights: list[dict[str, str]]) -> None:
        """Before the first change each iteration is compared."""
        if self._uncounted_left:
            if weights == self._weights and any(weights):
                self._begun, self._uncounted_left = iteration, self._uncounted_left - 1
            elif self._weights:
                self._uncounted_left = 0
            self._weights = weights

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of registered models without DDP: a checkpoint holds those of rank 0 alone."""
        if mesh.data_size() == 1:
            return
        for model in _models_of(self._objects):
            if not data_parallel(model):
                saved = model.state_dict(keep_vars=True)
                for name, buffer in model.named_buffers():
                    if name in saved and not hasattr(buffer, "device_mesh"):
                        yield f"buffer {name}", buffer

    def _unjudged(self) -> list[Trained]:
        """What an update function of the user's own trains, and nothing that is known reduces."""
        return [row for row in trained_parameters(self._used()) if row.reduced_by is None]

    def _used(self) -> dict[str, Any]:
        """What is registered, and what an update function of the user's own holds beside it."""
        held = {name: value for name, value in attributes_of(self._update) if name not in self._objects}
        kinds = nn.Module | Optimizer | GradScaler
        return {**self._objects, **{name: value for name, value in held.items() if isinstance(value, kinds)}}

    def check(self) -> None:
        """Warn once of what trains apart.

        Raises:
            ValueError: a parameter inside of DDP needs a gradient now and did not when DDP was made.
        """
        if not (rows := self._rows()):
            return
        if forgotten := [row.name for row in rows if row.forgotten_by_ddp]:
            raise ValueError(
                f"DistributedDataParallel was made while {shortened(forgotten)} needed no gradient, so it does not "
                "reduce it, and each rank would train its own: wrap the model while everything that is ever trained "
                "needs a gradient, with find_unused_parameters=True, and freeze after that; or wrap it again."
            )
        names = [row.name for row in rows]
        if not self._told.issuperset(names) and agreement.rank() == 0:
            logger.warning("%s: %s.", _reason(names), self._remedy(names))
        self._told.update(names)

    def reasons(self) -> list[str]:
        """Why a resumed run would have other bits: rank 0's weights are saved for all."""
        names = [row.name for row in self._rows()]
        buffers = sorted(name for name in self._differ if name.startswith("buffer "))
        found = [_reason(names)] if names else []
        found += [f"each rank has its own {shortened(buffers)}"] if buffers else []
        return [f"{reason}, and rank 0's are saved" for reason in found]

    def _rows(self) -> list[Trained]:
        if agreement.world_size() == 1 or mesh.data_size() == 1:
            return []
        if self._update is not None:
            return [row for row in self._unjudged() if row.name in self._differ]
        judged = {name for name, obj in self._objects.items() if isinstance(obj, OptimizerState)}
        return [row for row in trained_parameters(self._objects) if row.reduced_by is None and row.optimizer in judged]

    def _remedy(self, names: Iterable[str]) -> str:
        if all(name.startswith("parameters/") for name in names):
            return (
                "make parameters of a loss function part of the model before it is wrapped, unless each rank is to "
                "have its own"
            )
        return (
            "wrap the whole model (ignite.distributed.auto_model, DistributedDataParallel or fully_shard), unless "
            "each rank is to train its own"
        )


class _Reducers:
    """What reduces which parameter."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._everything = "rank_invariant" if "rank_invariant" in objects else None
        self._reducer_of: dict[int, str] = {}
        self._forgotten: set[int] = set()
        for model in _models_of(objects):
            for module in reducing_modules(model):
                self._add(module)

    def _add(self, module: nn.Module) -> None:
        held = {id(parameter): name for name, parameter in module.named_parameters()}
        if isinstance(module, DistributedDataParallel):
            ignored = {f"module.{name}" for name in module.parameters_to_ignore}
            reduced = _reduced_by_ddp(module)
            self._forgotten |= {key for key, name in held.items() if key not in reduced and name not in ignored}
            held = {key: held[key] for key in held if key in reduced}
        elif hasattr(module, "set_requires_gradient_sync"):
            return  # FSDP2: what it shards is a DTensor, what it ignores is each rank's own
        self._reducer_of |= dict.fromkeys(held, type(module).__name__)

    def row(self, name: str, parameter: Any, optimizer: str) -> Trained:
        key = id(parameter)
        by = self._everything or self._reducer_of.get(key)
        if by is None and hasattr(parameter, "device_mesh"):
            by = "DTensor"
        if by is None and (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)):
            by = "a gradient hook"
        return Trained(name, parameter, optimizer, by, by is None and key in self._forgotten)


def _models_of(objects: Mapping[str, Any]) -> list[nn.Module]:
    """Each model of the registered objects once, loss functions that are modules among them."""
    found: dict[int, nn.Module] = {}
    for obj in objects.values():
        loss_module = getattr(getattr(obj, "outside", None), "loss_module", None)
        model = getattr(obj, "model", None) if isinstance(obj, ModelState | OptimizerState) else None
        found |= {id(module): module for module in (obj, model, loss_module) if isinstance(module, nn.Module)}
    return list(found.values())


def _state_of(row: Trained, objects: Mapping[str, Any]) -> dict[str, Any]:
    """What its optimizer holds of it."""
    holder = objects[row.optimizer]
    optimizer: Optimizer = holder.optimizer if isinstance(holder, OptimizerState) else holder
    state: dict[str, Any] = optimizer.state.get(row.parameter, {})
    return state


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_reduced: WeakKeyDictionary[DistributedDataParallel, set[int]] = WeakKeyDictionary()


def _reduced_by_ddp(wrapped: DistributedDataParallel) -> set[int]:
    """The ids of parameters that needed a gradient when the DDP was made; only its buckets know them."""
    if wrapped not in _reduced:
        try:
            buckets = wrapped.reducer._get_zeros_like_grad_buckets()
        except RuntimeError:  # one with sparse gradients has no zeros; but it says how many it reduces
            held = list(wrapped.parameters())
            trained = [parameter for parameter in held if parameter.requires_grad]
            count = wrapped._get_ddp_logging_data()["num_parameter_tensors"]
            _reduced[wrapped] = {id(parameter) for parameter in (trained if len(trained) == count else held)}
        else:
            _reduced[wrapped] = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    return _reduced[wrapped]


def _reason(names: list[str]) -> str:
    return f"each rank trains {shortened(names)} by itself ({len(names)} of the parameters), as nothing reduces it"
