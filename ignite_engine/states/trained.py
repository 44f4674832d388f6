"""What trains on several ranks: each parameter, its optimizer, what reduces its gradient, and where it is saved."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ignite_engine.checkpointing.digests import digests, hashes, tensor_sha256
from ignite_engine.errors import shortened
from ignite_engine.held import held
from ignite_engine.ranks import agreement, mesh
from ignite_engine.ranks.ddp_buffers import data_parallel
from ignite_engine.states.model_and_optimizer import (
    ModelState,
    OptimizerState,
    clean_name,
    named_parameters,
    unwrap,
)
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
    models = [obj for obj in objects.values() if isinstance(obj, nn.Module)]
    known = {id(parameter): name for model in models for name, parameter in named_parameters(model)}
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

    Known to be reduced are DTensors whose mesh has all data-parallel ranks, what DDP or another wrapper with
    ``no_sync`` holds, everything with ``rank_invariant``, and a parameter with a gradient hook, which may reduce it.
    Anything else that an Update trains is named at the start. Whether the ranks agree is seen within the run, whose
    iterations 1, 2, 4, 8, ... and last one are followed by a comparison of the weights of all ranks. A custom update
    function may reduce gradients itself, and is judged by these comparisons alone: they include its optimizers' states,
    its loss scaler and buffers, as a step may leave weights alone (a rate of 0, an overflow), and iterations before the
    first that changes anything are not counted.

    Args:
        objects: those of the registry, by name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._told: set[str] = set()
        self._custom_update: Any = None
        self._begun = 0
        self._before: list[Any] = []
        """By rank what a custom update trains, before the first iteration that changes it."""
        self._uncounted_left = _UNCOUNTED
        self._first: dict[str, Any] = {}
        """What was compared first, to tell what is trained without an optimizer."""
        self._apart: set[int] = set()
        """The ids of the parameters that were seen to differ between the ranks."""
        self._differ: set[str] = set()
        """What else was seen to."""
        self.compares = False
        """Parameters are compared within the run."""

    def watch(self, engine: Engine, update: Any, *, boundary: Any) -> None:
        """A run has its position: compare within it what all ranks should have alike.

        Args:
            boundary: the event of step boundaries, whose last one is that of the run.
        """
        self._begun, self._before, self._first = engine.state.iteration, [], {}
        self._uncounted_left = _UNCOUNTED
        if self.compares or mesh.data_size() == 1 or "rank_invariant" in self._objects:
            return
        self.compares = True
        self._custom_update = None if hasattr(update, "stateful") else update
        engine.add_event_handler(Events.ITERATION_COMPLETED(event_filter=self.is_compared), self._compare)
        engine.add_event_handler(boundary, self._compare_at_end)

    def is_compared(self, engine: Engine, iteration: int) -> bool:
        """Whether that is done at an iteration."""
        done = iteration - self._begun
        return done & (done - 1) == 0

    def check(self, *, refuse: bool = True) -> None:
        """Warn once of what trains apart.

        Raises:
            ValueError: a parameter inside of DDP needs a gradient now and did not when DDP was made; not with
                ``refuse=False``, at the end of a run.
        """
        if not (rows := self._rows()):
            return
        forgotten = [row.name for row in rows if row.forgotten_by_ddp]
        if forgotten and refuse:
            raise ValueError(
                f"DistributedDataParallel was made while {shortened(forgotten)} needed no gradient, so it does not "
                "reduce it, and each rank would train its own: wrap the model while everything that is ever trained "
                "needs a gradient, with find_unused_parameters=True, and freeze after that; or wrap it again."
            )
        if agreement.rank() == 0 and not self._told.issuperset(row.name for row in rows):
            for reason, remedy in _reasons(rows):
                logger.warning("%s: %s.", reason, remedy)
        self._told.update(row.name for row in rows)

    def reasons(self) -> list[str]:
        """Why a resumed run would have other bits: rank 0's weights are saved for all."""
        found = [reason for reason, _ in _reasons(self._rows())]
        found += [f"each rank has its own {shortened(sorted(self._differ))}"] if self._differ else []
        return [f"{reason}, and rank 0's are saved" for reason in found]

    # -- comparing ------------------------------------------------------------------------------------------------

    def _compare(self, engine: Engine) -> None:
        self._look(engine)
        self.check()

    def _compare_at_end(self, engine: Engine) -> None:
        if engine.state.boundary.last:  # type: ignore[attr-defined]  # the Trainer's
            self._look(engine)
            self.check(refuse=False)

    _compare_at_end.phase = -1  # type: ignore[attr-defined]  # before a save, whose report has what is found

    def _look(self, engine: Engine) -> None:
        rows, beside = dict(zip(*_numbered(self._compared()), strict=True)), dict[str, str]()
        hashed = hashes([row.parameter.detach() for row in rows.values()]).tolist()
        weights: dict[str, Any] = dict(zip(rows, hashed, strict=True))
        if self._custom_update is not None:
            objects = self._used()
            weights = {key: (weights[key], repr(digests(_state_of(row, objects)))) for key, row in rows.items()}
            beside = {name: tensor_sha256(buffer) for name, buffer in self._buffers()}
            scalers = [obj.state_dict() for obj in objects.values() if isinstance(obj, GradScaler)]
            beside |= {"loss scaler": repr(digests(scalers))} if scalers else {}
        first = self._first = self._first or weights
        trained = [key for key, row in rows.items() if row.optimizer or first.get(key) != weights[key]]
        everyone = agreement.gather_objects({**{key: weights[key] for key in trained}, **beside})
        names = set[str]().union(*everyone)
        found = {name for name in names if len({of_rank.get(name) for of_rank in everyone}) > 1}
        apart = [row for key, row in rows.items() if key in found]
        if "loss scaler" in found:
            apart += [row for row in rows.values() if row.reduced_by is None]
        self._apart |= {id(row.parameter) for row in apart}
        self._differ |= found - rows.keys()
        if self._custom_update is not None and self._uncounted_left and any(everyone):
            if everyone == self._before:
                self._begun, self._uncounted_left = engine.state.iteration, self._uncounted_left - 1
            elif self._before:
                self._uncounted_left = 0
            self._before = everyone

    def _compared(self) -> list[Trained]:
        """What all ranks hold whole and train: by optimizers, and, where an update is a custom one, by itself."""
        used = self._used()
        rows = trained_parameters(used)
        if self._custom_update is not None:
            known, reducers = {id(row.parameter) for row in rows}, _Reducers(used)
            for model in _models_of(used):
                for name, parameter in named_parameters(model):
                    if parameter.requires_grad and id(parameter) not in known:
                        rows.append(reducers.row(name, parameter, ""))
        return [row for row in rows if not hasattr(row.parameter, "device_mesh")]

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint holds of rank 0 alone: buffers of the registered models whose DDP does not share them."""
        for model in _models_of(self._objects):
            if not any(wrapped.broadcast_buffers for wrapped in data_parallel(model)):
                inner = unwrap(model)
                saved = inner.state_dict(keep_vars=True)
                for name, buffer in inner.named_buffers():
                    if name in saved and not hasattr(buffer, "device_mesh"):
                        yield f"buffer {clean_name(name)}", buffer

    def _used(self) -> dict[str, Any]:
        """What is registered, and what a custom update holds beside it."""
        if self._custom_update is None:
            return dict(self._objects)
        found = held({"": self._custom_update}, (nn.Module, Optimizer, GradScaler))
        named = ((name.removeprefix("."), value) for name, value in found)
        return {**self._objects, **{name: value for name, value in named if name not in self._objects}}

    def _rows(self) -> list[Trained]:
        """What trains apart: seen to, or, of an Update, without anything that reduces it."""
        if mesh.data_size() == 1:
            return []
        judged = set[str]()
        if self._custom_update is None:
            judged = {name for name, obj in self._objects.items() if isinstance(obj, OptimizerState)}
        rows = self._compared() if self._custom_update is not None else trained_parameters(self._objects)
        apart = self._apart
        return [row for row in rows if id(row.parameter) in apart or (not row.reduced_by and row.optimizer in judged)]


def _numbered(rows: Iterable[Trained]) -> tuple[list[str], list[Trained]]:
    """Keys of rows, the same on all ranks: parameters of two models may have one name."""
    keys, times = list[str](), Counter[str]()
    for row in (rows := [*rows]):
        times[row.name] += 1
        keys.append(f"{row.name} {times[row.name]}")
    return keys, rows


def _reasons(rows: Iterable[Trained]) -> Iterator[tuple[str, str]]:
    """Why the ranks' weights drift apart, each with what to do about it."""
    unreduced, held = list[str](), dict[str, list[str]]()
    for row in rows:
        (unreduced if row.reduced_by is None else held.setdefault(row.reduced_by, [])).append(row.name)
    if unreduced:
        yield (
            (
                f"each rank trains {shortened(unreduced)} by itself ({len(unreduced)} of the parameters), as nothing "
                "reduces it"
            ),
            _OF_THE_LOSS if all(name.startswith("parameters/") for name in unreduced) else _UNWRAPPED,
        )
    for holder, names in held.items():
        yield f"the ranks have trained {shortened(names)} apart, though {holder} is to reduce it", _BYPASSED


_OF_THE_LOSS = (
    "make parameters of a loss function part of the model before it is wrapped, unless each rank is to have its own"
)
_UNWRAPPED = (
    "wrap the whole model (ignite.distributed.auto_model, DistributedDataParallel or fully_shard), unless each rank is "
    "to train its own"
)
_BYPASSED = (
    "call the wrapped model itself and not the module inside, leave no_sync to the engine, give hooks that average "
    "over all ranks, use no max_norm, and let each rank begin with the same weights"
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
        if by is None and hasattr(parameter, "device_mesh") and mesh.has_all_data(parameter.device_mesh):
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
    if (holder := objects.get(row.optimizer)) is None:
        return {}
    optimizer: Optimizer = holder.optimizer if isinstance(holder, OptimizerState) else holder
    state: Mapping[str, Any] = optimizer.state.get(row.parameter, {})
    # numbers may be of this rank alone, such as the loss that LBFGS keeps
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


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
