"""What trains on several ranks: each parameter, its optimizer, what reduces its gradient, and what is not alike."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ignite_engine.checkpointing.digests import digests, hashes, tensor_sha256
from ignite_engine.errors import shortened
from ignite_engine.held import UNORDERED, held
from ignite_engine.ranks import agreement, mesh
from ignite_engine.ranks.ddp_buffers import data_parallel, shared_buffers
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


_Key = tuple[str, str, str]
"""What it is, ``""`` for a parameter; the registered part, or the attribute of the update; the name in it."""


class _Seen(NamedTuple):
    """What one rank has under a key."""

    hashes: Any
    is_saved: bool
    """One rank's is saved for all."""
    trained: bool = False
    reduced_by: str | None = None
    forgotten_by_ddp: bool = False
    is_copy: bool = False
    """Of a buffer that DDP shares."""


class TrainedApart:
    """Notices what all ranks should have alike and have not, as a rule because each rank trains it by itself.

    Known to be reduced are DTensors whose mesh has all data-parallel ranks, what DDP or another wrapper with
    ``no_sync`` holds, everything with ``rank_invariant``, and a parameter with a gradient hook, which may reduce it.
    Anything else that an Update trains is named at the start. Whether the ranks agree is seen within the run, whose
    iterations 1, 2, 4, 8, ... and last one are followed by a comparison: of all parameters, of the saved buffers
    that DDP does not share, and of extra states. An update function or a step of the user's own may reduce gradients
    itself, and is judged by these comparisons alone: they include its optimizers' states and its loss scaler, as a step
    may leave weights alone (a rate of 0, an overflow), and iterations before the first that changes anything are not
    counted. An optimizer that is not torch's, or has a hook before its step, may reduce them, too.

    Args:
        objects: those of the registry, by name.
        shared: the names of those of which one rank's state is saved for all. The others may differ.
        update: what the run calls in each iteration.
    """

    def __init__(self, objects: Mapping[str, Any], shared: Collection[str], update: Any) -> None:
        self._objects, self._shared = objects, shared
        self._custom_update = None if _is_the_engines(update) else update
        self._told: set[str] = set()
        self._begun = 0
        self._uncounted_left = _UNCOUNTED
        self._before: list[str] = []
        """By rank a digest of what a custom update trains, before the first iteration that changes it."""
        self._first: dict[_Key, Any] = {}
        """What was there first in this run, to tell what is trained without an optimizer."""
        self._found: dict[_Key, tuple[_Seen, tuple[int, ...]]] = {}
        """What was seen to differ, on all ranks the same: as one of them has it, and which of them have it."""
        self.compares = False
        """The ranks are compared within the run."""

    def watch(self, engine: Engine, *, boundary: Any) -> None:
        """A run has its position: compare within it what all ranks should have alike.

        Args:
            boundary: the event of step boundaries, whose last one is that of the run.
        """
        self._begun, self._before, self._first = engine.state.iteration, [], {}
        self._uncounted_left = _UNCOUNTED
        if mesh.data_size() == 1 or "rank_invariant" in self._objects:
            return
        if self._custom_update is not None:
            self._seen()  # what is there before the first iteration
        if self.compares:
            return
        self.compares = True
        engine.add_event_handler(Events.ITERATION_COMPLETED(event_filter=self.is_compared), self._compare)
        engine.add_event_handler(boundary, self._compare_at_end)

    def is_compared(self, engine: Engine, iteration: int) -> bool:
        """Whether that is done at an iteration."""
        done = iteration - self._begun
        return done & (done - 1) == 0

    def check(self, *, refuse: bool = True) -> None:
        """Warn once of parameters that are not alike.

        Raises:
            ValueError: a parameter inside of DDP needs a gradient now and did not when DDP was made; not with
                ``refuse=False``, at the end of a run.
        """
        forgotten = [row.name for row in self._unreduced() if row.forgotten_by_ddp]
        found = [key[2] for key, (seen, _) in self._found.items() if seen.forgotten_by_ddp]
        forgotten = list(dict.fromkeys([*forgotten, *found]))
        if forgotten and refuse:
            raise ValueError(
                f"DistributedDataParallel was made while {shortened(forgotten)} needed no gradient, so it does not "
                "reduce it, and each rank would train its own: wrap the model while everything that is ever trained "
                "needs a gradient, with find_unused_parameters=True, and freeze after that; or wrap it again."
            )
        reasons = list(self._reasons())
        new = {name for reason in reasons for name in reason.names} - self._told
        if agreement.rank() == 0 and new:
            for reason in reasons:
                logger.warning("%s: %s.", reason.text, reason.remedy)
        self._told |= new

    def reasons(self) -> list[str]:
        """Why a resumed run would have other bits: rank 0's weights are saved for all."""
        others = {
            f"{what} {name}".strip() for what, part, name in self._found if what and ("", part, name) not in self._found
        }
        found = [reason.text if reason.of_some_ranks else f"{reason.text}{_SAVED}" for reason in self._reasons()]
        return found + ([f"each rank has its own {shortened(sorted(others))}{_SAVED}"] if others else [])

    def _unreduced(self) -> list[Trained]:
        """What an Update trains without anything that reduces it."""
        if self._custom_update is not None or mesh.data_size() == 1:
            return []
        optimizers = {name: obj.optimizer for name, obj in self._objects.items() if isinstance(obj, OptimizerState)}
        judged = {name for name, optimizer in optimizers.items() if not _may_reduce(optimizer)}
        rows = [row for row in trained_parameters(self._objects) if not row.reduced_by and row.optimizer in optimizers]
        return [row for row in rows if row.forgotten_by_ddp or row.optimizer in judged]

    def _reasons(self) -> Iterator[_Reason]:
        """Of parameters: why a resumed run would have other bits."""
        unreduced = [row.name for row in self._unreduced()]
        bypassed, of_some, different = dict[str, list[str]](), dict[tuple[int, ...], list[str]](), list[str]()
        for (what, _, name), (seen, ranks) in self._found.items():
            if what or name in unreduced:
                continue
            if len(ranks) < agreement.world_size():
                of_some.setdefault(ranks, []).append(name)
            elif not seen.trained:
                different.append(name)
            else:
                (unreduced if seen.reduced_by is None else bypassed.setdefault(seen.reduced_by, [])).append(name)
        if unreduced:
            text = (
                f"each rank trains {shortened(unreduced)} by itself ({len(unreduced)} of the parameters), as nothing "
                "reduces it"
            )
            of_the_loss = all(name.startswith("parameters/") for name in unreduced)
            yield _Reason(unreduced, text, _OF_THE_LOSS if of_the_loss else _UNWRAPPED)
        for holder, names in bypassed.items():
            text = f"the ranks have trained {shortened(names)} apart, though {holder} is to reduce it"
            yield _Reason(names, text, _BYPASSED)
        if different:
            yield _Reason(different, f"the ranks have different values of {shortened(different)}", _BUILT_OTHERWISE)
        for ranks, names in of_some.items():
            which = f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))} alone"
            text = f"{which} {'have' if len(ranks) > 1 else 'has'} {shortened(names)}"
            yield _Reason(names, text, _OF_SOME, of_some_ranks=True)

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
        mine = self._seen()
        trained = {key: seen for key, seen in mine.items() if seen.trained}
        digests_of_all = agreement.gather_objects((_digest(mine), _digest(trained)))
        if len({digest for digest, _ in digests_of_all}) > 1:
            self._note(agreement.gather_objects(mine))
        now = [digest for _, digest in digests_of_all]
        if self._custom_update is not None and self._uncounted_left and any(now):
            if now == self._before:
                self._begun, self._uncounted_left = engine.state.iteration, self._uncounted_left - 1
            elif self._before:
                self._uncounted_left = 0
            self._before = now

    def _note(self, everyone: list[dict[_Key, _Seen]]) -> None:
        for key in dict.fromkeys(key for mine in everyone for key in mine):
            ranks = tuple(rank for rank, mine in enumerate(everyone) if key in mine)
            seen = [everyone[rank][key] for rank in ranks]
            before = [self._found[key][0]] if key in self._found else []
            trained = any(one.trained for one in [*before, *seen])
            differ = len(ranks) < len(everyone) or len({one.hashes for one in seen}) > 1
            if differ and (trained or seen[0].is_saved) and not all(one.is_copy for one in seen):
                self._found[key] = seen[0]._replace(trained=trained), ranks

    def _seen(self) -> dict[_Key, _Seen]:
        """What this rank has of what all ranks should have alike; what is sharded is not compared."""
        used, custom = self._used(), self._custom_update is not None
        rows = {key: row for key, row in _parameters(used).items() if not self._may_differ(key[1])}
        tensors = {key: [row.parameter] for key, row in rows.items()}
        if custom:
            states = {(_STATE, *key[1:]): self._state_of(row, used) for key, row in rows.items()}
            tensors |= {key: state for key, state in states.items() if state}
        saved = {name: obj for name, obj in used.items() if name in self._shared}
        buffers, shared = _buffers(saved, used)
        tensors |= {key: [buffer] for key, buffer in buffers.items()}
        compared = [tensor for group in tensors.values() for tensor in group]
        hashed = _hashed([*compared, *(shared if buffers else [])])
        numbers, copied = iter(hashed), {*hashed[len(compared) :]}
        found = {key: _Seen(state, is_saved=True) for key, state in _extra_states(saved).items()}
        for key, group in tensors.items():
            own, row = tuple(next(numbers) for _ in group), rows.get(key)
            seen = _Seen(own, key[1] in self._shared)
            if row is not None:
                trained = bool(row.optimizer) or self._first.setdefault(key, own) != own
                seen = seen._replace(trained=trained, reduced_by=row.reduced_by, forgotten_by_ddp=row.forgotten_by_ddp)
            found[key] = seen._replace(
                trained=seen.trained or key[0] == _STATE, is_copy=key in buffers and own[0] in copied
            )
        scalers = {
            name: obj for name, obj in used.items() if isinstance(obj, GradScaler) and not self._may_differ(name)
        }
        for name, scaler in scalers.items() if custom else ():
            found[_SCALER, name, ""] = _Seen(repr(digests(scaler.state_dict())), name in self._shared, trained=True)
        return _in_one_order(found)

    def _used(self) -> dict[str, Any]:
        """What is registered, and what a custom update holds beside it."""
        used = dict(self._objects)
        owners = {} if self._custom_update is None else {"": self._custom_update}
        known = {id(obj) for obj in used.values()}
        for name, value in held(owners, (nn.Module, Optimizer, GradScaler)):
            if id(value) not in known:
                name = name.removeprefix(".")
                used[name if name not in used else f"{name} of the update"] = value
        return used

    def _may_differ(self, name: str) -> bool:
        """Whether this is a part of which each rank saves its own."""
        return name in self._objects and name not in self._shared

    def _state_of(self, row: Trained, objects: Mapping[str, Any]) -> list[Tensor]:
        """What its optimizer holds of it."""
        if (holder := objects.get(row.optimizer)) is None or self._may_differ(row.optimizer):
            return []
        optimizer: Optimizer = holder.optimizer if isinstance(holder, OptimizerState) else holder
        state: Mapping[str, Any] = optimizer.state.get(row.parameter, {})
        # numbers may be of this rank alone, such as the loss that LBFGS keeps
        return [value for value in state.values() if isinstance(value, Tensor) and _is_comparable(value)]


class _Reason(NamedTuple):
    """Why a resumed run would have other bits, and what to do about it."""

    names: list[str]
    """Of parameters."""
    text: str
    remedy: str
    of_some_ranks: bool = False


def is_of(value: Any, package: str) -> bool:
    """Whether the class is a package's own, and no subclass of the user's."""
    return type(value).__module__.partition(".")[0] == package


def _is_the_engines(update: Any) -> bool:
    """Whether its step is that of Update or Updates, in which nothing of the user's own reduces gradients."""
    methods = [getattr(type(update), name, None) for name in ("__call__", "accumulate", "_step")]
    own = [getattr(method, "__module__", "") for method in methods if method is not None]
    if not all(module.startswith("ignite_engine.update.") for module in own):
        return False
    return all(_is_the_engines(part) for part in getattr(update, "updates", {}).values())


def _may_reduce(optimizer: Optimizer) -> bool:
    """Whether its step runs code of others, which may reduce gradients."""
    known = any(is_of(optimizer, package) for package in ("torch", "ignite_engine"))
    return not known or bool(getattr(optimizer, "_optimizer_step_pre_hooks", None))


def _parameters(objects: Mapping[str, Any]) -> dict[_Key, Trained]:
    """Those of all models and optimizers, each once, but for what is sharded or has no values."""
    reducers, rows = _Reducers(objects), {id(row.parameter): row for row in trained_parameters(objects)}
    found: dict[int, tuple[_Key, Trained]] = {}
    for label, model in _models_of(objects):
        for name, parameter in named_parameters(model):
            key = id(parameter)
            if key not in found:
                found[key] = ("", label, name), rows.get(key) or reducers.row(name, parameter, "")
    found = {key: (("", row.optimizer, row.name), row) for key, row in rows.items()} | found
    return {key: row for key, row in found.values() if _is_comparable(row.parameter)}


def _buffers(objects: Mapping[str, Any], used: Mapping[str, Any]) -> tuple[dict[_Key, Tensor], list[Tensor]]:
    """The saved buffers of the models in ``objects`` that no DDP in ``used`` shares, and those that one does."""
    wrapped = [ddp for _, model in _models_of(used) for ddp in data_parallel(model)]
    shared = {id(buffer): buffer for ddp in wrapped for buffer in shared_buffers(ddp)}
    found: dict[int, tuple[_Key, Tensor]] = {}
    for label, model in _models_of(objects):
        for path, module in unwrap(model).named_modules():
            unsaved = getattr(module, "_non_persistent_buffers_set", ())  # a state_dict may be the user's own
            for name, buffer in module.named_buffers(path, recurse=False):
                if name.rpartition(".")[2] not in unsaved and id(buffer) not in shared and _is_comparable(buffer):
                    found.setdefault(id(buffer), (("buffer", label, clean_name(name)), buffer))
    return dict(found.values()), [buffer for buffer in shared.values() if _is_comparable(buffer)]


def _extra_states(objects: Mapping[str, Any]) -> dict[_Key, str]:
    """What the models' modules save beside their tensors."""
    found: dict[int, tuple[_Key, str]] = {}
    for label, model in _models_of(objects):
        for path, module in unwrap(model).named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state and id(module) not in found:
                state = repr(digests(module.get_extra_state()))
                found[id(module)] = ("extra state", label, clean_name(path)), state
    return dict(found.values())


def _in_one_order(found: Mapping[_Key, _Seen]) -> dict[_Key, _Seen]:
    """What sets hold, which each rank has in an order of its own, in the order of what it is and of its values."""
    ordered = {key: seen for key, seen in found.items() if UNORDERED not in key[1]}
    in_sets = [(key, seen) for key, seen in found.items() if UNORDERED in key[1]]
    in_sets.sort(key=lambda item: (not item[1].trained, item[1].reduced_by or "", str(item[1].hashes)))
    for (what, part, name), seen in in_sets:
        part, name = part.replace("'", ""), name.replace("'", "")  # which tell equal names apart
        while (what, part, name) in ordered:
            part += "'"
        ordered[what, part, name] = seen
    return ordered


def _is_comparable(tensor: Tensor) -> bool:
    """Whether its values are here and plain: not sharded, of a lazy module, or of a kind with its own storage."""
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return plain and not (is_lazy(tensor) or tensor.is_meta or tensor.is_quantized)


def _hashed(tensors: Sequence[Tensor]) -> list[int | str]:
    strided = iter(hashes([tensor for tensor in tensors if tensor.layout == torch.strided]).tolist())
    return [next(strided) if tensor.layout == torch.strided else tensor_sha256(tensor) for tensor in tensors]


def _digest(seen: Mapping[_Key, _Seen]) -> str:
    return hashlib.sha256(repr(sorted(seen.items())).encode()).hexdigest() if seen else ""


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
_BUILT_OTHERWISE = (
    "build it on all ranks from the same seed or file, or inside of DistributedDataParallel, which gives all ranks "
    "rank 0's"
)
_OF_SOME = "let every rank have it, or train it outside of the update"
_SAVED = ", and rank 0's are saved"
_STATE, _SCALER = "optimizer state of", "loss scaler"


class _Reducers:
    """What reduces which parameter."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._everything = "rank_invariant" if "rank_invariant" in objects else None
        self._reducer_of: dict[int, str] = {}
        self._forgotten: set[int] = set()
        for _, model in _models_of(objects):
            for module in reducing_modules(model):
                self._add(module)

    def _add(self, module: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        if isinstance(module, DistributedDataParallel):
            ignored = {f"module.{name}" for name in module.parameters_to_ignore}
            reduced = _reduced_by_ddp(module)
            self._forgotten |= {key for key, name in names.items() if key not in reduced and name not in ignored}
            names = {key: names[key] for key in names if key in reduced}
        elif mesh.is_sharded(module):
            return  # what it shards is a DTensor, what it ignores is each rank's own
        self._reducer_of |= dict.fromkeys(names, type(module).__name__)

    def row(self, name: str, parameter: Any, optimizer: str) -> Trained:
        key = id(parameter)
        by = self._everything or self._reducer_of.get(key)
        if by is None and hasattr(parameter, "device_mesh") and mesh.has_all_data(parameter.device_mesh):
            by = "DTensor"
        if by is None and (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)):
            by = "a gradient hook"
        return Trained(name, parameter, optimizer, by, by is None and key in self._forgotten)


def _models_of(objects: Mapping[str, Any]) -> list[tuple[str, nn.Module]]:
    """Each model of the registered objects once, loss functions that are modules among them."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for label, obj in objects.items():
        loss_module = getattr(getattr(obj, "outside", None), "loss_module", None)
        model = getattr(obj, "model", None) if isinstance(obj, ModelState | OptimizerState) else None
        for module in (obj, model, loss_module):
            if isinstance(module, nn.Module):
                found.setdefault(id(module), (label, module))
    return list(found.values())


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_reduced: WeakKeyDictionary[DistributedDataParallel, set[int]] = WeakKeyDictionary()


def _reduced_by_ddp(wrapped: DistributedDataParallel) -> set[int]:
    """The ids of parameters that needed a gradient when the DDP was made; only its buckets know them."""
    if wrapped not in _reduced:
        try:
            buckets = wrapped.reducer._get_zeros_like_grad_buckets()
        except RuntimeError:  # one with sparse gradients has no zeros; but it says how many it reduces
            parameters = list(wrapped.parameters())
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            count = wrapped._get_ddp_logging_data()["num_parameter_tensors"]
            _reduced[wrapped] = {id(parameter) for parameter in (trained if len(trained) == count else parameters)}
        else:
            _reduced[wrapped] = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    return _reduced[wrapped]
