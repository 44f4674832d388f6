"""Loads registered objects from checkpoints: a run's own, to resume it, or other sources, to begin from them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_engine import rng
from ignite_engine.checkpoint.environment import environment_values, inexact_reasons
from ignite_engine.checkpoint.load import LoadReport, joined, prepare
from ignite_engine.checkpoint.part_names import filled
from ignite_engine.checkpoint.retention import CheckpointInfo
from ignite_engine.checkpoint.shards import (
    Sharded,
    fitted,
    fitted_tensor,
    has_sharded,
    is_sharded,
    layout_of,
    replicated,
)
from ignite_engine.checkpoint.sources import Found, LoadSource, Source
from ignite_engine.checkpoint.states.model_and_optimizer import ModelState, OptimizerState, reshard, unwrap
from ignite_engine.checkpoint.states.registry import Adapt, Registry, Stateful
from ignite_engine.checkpoint.states.tiers import Fetched, Folder, Tier, newest
from ignite_engine.checkpoint.store import CheckpointStore, Loaded
from ignite_engine.errors import CheckpointError, require_exact, shortened
from ignite_engine.ranks import agreement

if TYPE_CHECKING:
    from ignite_engine.checkpoint.states.registry import Registry


def layout_of_models(objects: Iterable[Any]) -> list[str]:
    """How the models among the registered objects are sharded, as text; empty if they are not."""
    registered = [obj.model if isinstance(obj, ModelState) else obj for obj in objects]
    models = [unwrap(model) for model in registered if isinstance(model, nn.Module)]
    for model in models:
        reshard(model)
    return list(layout_of(parameter for model in models for parameter in model.parameters()))


def fitted_state(obj: Any, state: Any, *, shared: bool) -> Any:
    """A copy of a saved state, sharded as the object is; only this rank's pieces are read.

    Args:
        obj: the object that will load the state.
        state: a saved state, with whole tensors or ``Sharded`` ones.
        shared: whether the object's state is the same on all ranks.

    Raises:
        CheckpointError: a file with a needed piece is damaged.
    """
    parameters = _parameters_by_key(obj, state)
    if parameters is None:
        return fitted(state, obj.state_dict() if shared or has_sharded(state) else None)
    others = {name: value for name, value in state.items() if name != "state"}
    laid_out = {key: _laid_out(values, parameters.get(key)) for key, values in state["state"].items()}
    return {**fitted(others, None), "state": laid_out}


def _parameters_by_key(obj: Any, state: Any) -> Mapping[Any, Tensor] | None:
    """An optimizer's parameters by their keys in a saved state; None if it is not an optimizer in torch's form."""
    if isinstance(obj, OptimizerState):
        return obj.parameters()
    if not isinstance(obj, Optimizer) or not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        return None
    saved = [key for group in state["param_groups"] for key in group["params"]]
    own = [parameter for group in obj.param_groups for parameter in group["params"]]
    return dict(zip(saved, own, strict=False))  # the optimizer itself refuses a different number


def _laid_out(values: Any, parameter: Tensor | None) -> Any:
    """A copy of a parameter's optimizer state, sharded as the parameter is; step counts stay whole, as in torch."""
    if parameter is None:
        return fitted(values, None)
    fit = {name: fitted_tensor(value, None if name == "step" else parameter) for name, value in values.items()}
    for name, value in values.items():  # state whose shape is not the parameter's
        if isinstance(value, Sharded) and is_sharded(parameter) and not is_sharded(fit[name]):
            fit[name] = replicated(fit[name], parameter)
    return fit


logger = logging.getLogger(__name__)

_RESUMED = "resumed from "
_SHARDING = "sharding"


def resume(
    registry: Registry,
    store: CheckpointStore,
    others: Iterable[Tier] = (),
    *,
    ignore: Iterable[str] = (),
    ignored_up_to: int | None = None,
    strict: bool = False,
    healthy_only: bool = False,
) -> Fetched | None:
    """Load the newest valid checkpoint of a run's folder and its other tiers, the same on all ranks; a collective.

    Args:
        ignore: names of parts that are left out.
        ignored_up_to: leave them out only for checkpoints up to this sequence number; None: for all.
        healthy_only: skip checkpoints with non-finite weights.
        strict: refuse a checkpoint that cannot be resumed bit for bit.

    Returns:
        The checkpoint; None: there is none.

    Raises:
        CheckpointError: there are checkpoints, and none is valid.
        CheckpointError, NotExact, StateMismatch, ValueError: one line.
    """
    rank, world_size = agreement.rank(), agreement.world_size()
    sharding = layout_of_models(registry.objects.values())
    found = newest(Folder(store, keep=not sharding), others, healthy_only=healthy_only)
    if found is None:
        return None
    path = found.info.path
    options = {"mmap": bool(sharding), "whole": False}  # only this rank's pieces are read

    def load() -> Loaded:
        loaded = found.load(rank, **options)
        if loaded.local:
            return loaded
        # a rank that did not exist when it was saved takes rank 0's parts, with random numbers of its own
        first = dict(found.load(0, **options, shared=False).local)
        if "rng" in first and not _is_rank_invariant(registry, loaded):
            first["rng"] = rng.derived(first["rng"], rank)
        return replace(loaded, local=first)

    loaded = agreement.together(load)
    manifest, any_ranks = loaded.manifest, _is_rank_invariant(registry, loaded)
    now = environment_values(world_size) | {_SHARDING: sharding}
    reasons = inexact_reasons(manifest.environment, now, any_ranks=any_ranks)
    if not any_ranks:
        reasons += _changed_ranks(manifest.world_size, world_size)
    if strict:
        require_exact(path.name, [*manifest.reproducibility, *reasons])
    registry.resumed_otherwise = [reason for reason in manifest.reproducibility if reason.startswith(_RESUMED)]
    reasons += [reason for reason in manifest.reproducibility if not reason.startswith(_RESUMED)]
    if reasons:
        registry.resumed_otherwise.append(f"{_RESUMED}{path.name}, not bit for bit ({'; '.join(reasons)})")
        if rank == 0:
            logger.warning("%s may not resume bit for bit: %s.", path.name, "; ".join(reasons))
    if ignored_up_to is not None and manifest.sequence > ignored_up_to:
        ignore = ()
    adapt = _adapter(registry, manifest.left_out, bool(sharding or manifest.environment.get(_SHARDING)))
    # reads pieces, which may fail on one rank only
    agreement.agreed(lambda: _load_all(registry, loaded, ignore, adapt))
    held = {*loaded.shared, *loaded.local}
    if begun := [name for name in registry.of_update if name not in held]:
        registry.resumed_otherwise.append(f"{_RESUMED}{path.name}, which was saved without {', '.join(begun)}")
    return replace(found, info=CheckpointInfo(path, manifest))


def _load_all(registry: Registry, loaded: Loaded, ignore: Iterable[str], adapt: Adapt) -> None:
    manifest, source = loaded.manifest, str(loaded.path)
    states = {**loaded.shared, **loaded.local}
    taken = registry.load(states, source=source, ignore=ignore, kinds=manifest.kinds, adapt=adapt)
    for part, names in manifest.left_out.items():
        if part in taken:
            what = f"{part} ({len(names)}: {shortened(names)})"
            logger.warning("%s was saved without some of %s: they stay as they are.", source, what)


def load_evaluated(registry: Registry, loaded: Loaded) -> None:
    """Load what an evaluation needs: the model, and the averages that replace its weights.

    Names that were left out of the checkpoint stay as they are.
    """
    for name, part in registry.objects.items():
        if name == "model" or getattr(part, "serves_evaluation", False):
            if name in loaded.shared:
                names = loaded.manifest.left_out.get(name, ())
                state = loaded.shared[name]
                load_state(part, filled(state, part.state_dict(), names) if names else state)
            else:
                logger.warning("%s holds no %s: the model's own weights are evaluated.", loaded.path, name)


def load_state(obj: Stateful, state: Any) -> None:
    """Load a saved state into an object whose state is the same on all ranks."""
    own = obj.state_dict()
    obj.load_state_dict(fitted_state(obj, state, shared=True) if has_sharded((own, state)) else state)


def begin_from(registry: Registry, sources: Sequence[LoadSource]) -> tuple[LoadReport, list[Found | None]]:
    """Load from sources that are not this run's checkpoints; a collective.

    Args:
        sources: rank 0 chooses which checkpoint of each is loaded on all ranks. If several contain a name, the last
            one wins.

    Returns:
        A report, and what each source meant; None for a source that is not required and does not exist.

    Raises:
        CheckpointError, StateMismatch, ValueError: one line, on all ranks the same; nothing was loaded.
    """
    chosen = agreement.on_rank_0(lambda: [source.find() for source in sources])

    def prepared() -> tuple[dict[str, Any], LoadReport]:
        states: dict[str, Any] = {}
        reports = []
        for source, found in zip(sources, chosen, strict=True):
            if found is None:
                reports.append((source, LoadReport(f"{source.path} (not required, not there)")))
                continue
            read = read_found(registry, found)
            brought, report = prepare(source, read, registry.objects, before=states, kinds=registry.kinds)
            states |= brought
            reports.append((source, report))
        return states, joined(reports)

    states, report = agreement.together(prepared)
    agreement.agreed(lambda: registry.take(states, report.source, _adapter_of(registry, states)))
    logger.log(logging.INFO if report.complete else logging.WARNING, "%s.", report)
    return report, chosen


def read_found(registry: Registry, found: Found) -> Source:
    """Read what this rank needs of a checkpoint; sharded tensors without their values."""
    return found.read(agreement.rank(), mmap=bool(layout_of_models(registry.objects.values())))


def load_again(
    registry: Registry, source: LoadSource, read: Source, *, alone: bool = True, reset_optimizers: bool = False
) -> LoadReport | str:
    """Load from a source at a step boundary within a run; a collective.

    Args:
        read: the content of the source, the same on all ranks.
        alone: False: a strict source may lack names, which another source has brought.
        reset_optimizers: optimizers forget the state of parameters that are loaded, unless it is loaded, too.

    Returns:
        A report; or the reason why nothing was loaded, the same on all ranks.
    """

    def prepared() -> tuple[dict[str, Any], LoadReport] | str:
        try:
            states, report = prepare(source, read, registry.objects, kinds=registry.kinds)
            joined([(source, report if alone else replace(report, missing=[]))])
            # reads pieces of sharded tensors before anything is changed
            adapt = _adapter_of(registry, states)
            return {name: adapt(name, states[name]) for name in states if name in registry.objects}, report
        except (CheckpointError, ValueError) as error:
            return str(error)

    outcome = agreement.together(prepared)
    refusals = agreement.gather_objects(outcome if isinstance(outcome, str) else None)
    if reason := next(filter(None, refusals), None):
        return reason
    assert not isinstance(outcome, str)
    states, report = outcome
    agreement.agreed(lambda: _replace(registry, states, report, reset_optimizers))
    return report


def _replace(registry: Registry, states: Mapping[str, Any], report: LoadReport, reset_optimizers: bool) -> None:
    for name, state in states.items():
        registry.load_into(name, state)
    for name, obj in registry.objects.items():
        if reset_optimizers and isinstance(obj, OptimizerState):
            obj.reset(report.names("model") - report.names(name))
        if callable(tell := getattr(obj, "weights_replaced", None)):
            tell()


def _adapter_of(registry: Registry, states: Mapping[str, Any]) -> Adapt:
    return _adapter(registry, {}, bool(layout_of_models(registry.objects.values())) or has_sharded(states))


def _adapter(registry: Registry, left_out: Mapping[str, Sequence[str]], sharded: bool) -> Adapt:
    """A function that completes a saved state by what was left out, and shards it as its object is.

    Args:
        left_out: by part, the names that were left out of the checkpoint; they stay as they are.
        sharded: whether a saved state, or a registered model, is sharded.
    """
    known = set(registry.objects)

    def adapted(part: str, state: Any) -> Any:
        obj = registry.objects[part]
        if names := left_out.get(part):
            state = filled(state, obj.state_dict(), names)
        if sharded or (part not in known and layout_of_models(registry.objects.values())):
            state = fitted_state(obj, state, shared=part in registry.shared)
        return state

    return adapted


def _is_rank_invariant(registry: Registry, loaded: Loaded) -> bool:
    """Whether the run, including its random numbers, is the same on any number of ranks."""
    return "rank_invariant" in registry.objects and "rank_invariant" in loaded.shared


def _changed_ranks(before: int, now: int) -> list[str]:
    """What happens to the states of each rank when the number of ranks changes, as reasons for the report."""
    if before == now:
        return []
    which = ", ".join(map(str, range(min(before, now), max(before, now))))
    if before > now:
        return [f"what ranks {which} kept of their own, such as random numbers, is dropped"]
    return [f"ranks {which} have random numbers drawn from the checkpoint's and their rank, and rank 0's other states"]
