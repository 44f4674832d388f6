"""Gradient accumulation: which backward reduces over ranks, and what each micro-batch weighs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from torch import nn

from ignite_engine.errors import shapes_of
from ignite_engine.ranks import agreement, mesh

WeightFn = Callable[[Any], float]


class Group(list[Any]):
    """The micro-batches of one iteration, as the loader gave them."""


def reducing_modules(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of ``model`` that reduce gradients over ranks: DDP, FSDP2, or others with ``no_sync``."""
    # not by hasattr: a compiled module answers for the one inside, which is found below it
    marks = ("set_requires_gradient_sync", "require_backward_grad_sync", "no_sync")
    if any(name in vars(model) or callable(getattr(type(model), name, None)) for name in marks):
        return [model]
    return [found for child in model.children() for found in reducing_modules(child)]


@dataclass(frozen=True)
class GroupWeights:
    """What ``weight_fn`` gave for the micro-batches of one iteration, agreed on before it."""

    batch: Any
    """What they are the weights of: ``state.batch``, as it was fetched."""
    weights: list[float]
    """The weight of each micro-batch of this rank."""
    total: float
    """Over the group and all data-parallel ranks."""

    def scales(self) -> list[float] | None:
        """As :func:`micro_batch_scales`."""
        ranks = mesh.data_size()
        if self.total * ranks == float("inf"):  # the same on all ranks; each scale would be 0
            raise ValueError(
                f"The weights of one update sum up to infinity, got {self.weights} here: return smaller ones."
            )
        return [weight * ranks / self.total for weight in self.weights] if self.total else None


class Share(NamedTuple):
    """What this rank has of an iteration's group, and what the data knows of the whole."""

    micro_batches: Sequence[Any]
    padding: int
    """Micro-batches at the end that repeat one and weigh nothing, as this rank's data ran out before its peers'."""
    total: int
    """Micro-batches with weight over all data-parallel ranks; 0: as many on each."""
    weights: GroupWeights | None
    """What ``weight_fn`` gave, where ranks agreed on it ahead."""


def share_of(engine: Any, batch: Any) -> Share:
    """The group of ``batch``, which is ``state.batch``, whoever assigned it.

    Where the trainer groups, a batch is a sequence of micro-batches; else it is one micro-batch.
    """
    state = engine.state
    groups = getattr(engine, "accumulation_steps", None) or getattr(engine, "global_micro_batches", None)
    grouped = isinstance(batch, Group) or (groups is not None and batch is not None)
    weights = getattr(state, "group_weights", None)
    return Share(
        batch if grouped else (batch,),
        getattr(state, "padding", 0),
        getattr(state, "group_total", 0),
        weights if weights is not None and weights.batch is batch else None,  # else a handler has given another batch
    )


def micro_batches_of(engine: Any, *, repeated: bool = False) -> Sequence[Any]:
    """The micro-batches of ``state.batch``; those that are repeated and weigh nothing only where asked for."""
    share = share_of(engine, engine.state.batch)
    return share.micro_batches if repeated else share.micro_batches[: len(share.micro_batches) - share.padding]


def gradient_sync(model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """A context for one micro-batch's forward AND backward: ranks reduce gradients only in the ``last`` of a group.

    For DDP (which decides in forward) and FSDP2, also inside of ``model``; any other model gets a null context. Leaving
    the context restores the setting, on an error too.
    """
    return nullcontext() if last else without_sync(reducing_modules(model))


@contextmanager
def without_sync(modules: Sequence[Any]) -> Iterator[None]:
    """A context for forward and backward in which :func:`reducing_modules` reduce nothing."""
    with ExitStack() as stack:
        for module in modules:
            if hasattr(module, "set_requires_gradient_sync"):  # FSDP2's; it reaches all modules below
                stack.callback(module.set_requires_gradient_sync, True)
                module.set_requires_gradient_sync(False)
            else:
                stack.enter_context(module.no_sync())
        yield


def check_accumulates(model: nn.Module) -> None:
    """Refuse a model that cannot accumulate.

    Raises:
        ValueError: DDP with ``static_graph=True``, which fails an internal assert of torch under ``no_sync``.
    """
    if getattr(model, "static_graph", False):
        raise ValueError(
            "DistributedDataParallel(static_graph=True) cannot accumulate gradients: use static_graph=False, "
            "or do not accumulate."
        )


def check_steps(count: Any, name: str = "accumulation_steps") -> None:
    """Refuse anything but a positive number of micro-batches.

    Raises:
        ValueError: it is not a whole number of at least 1.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}.")


def share(micro_batches: int, rank: int, ranks: int) -> tuple[int, int]:
    """The micro-batches ``first`` to ``end - 1`` of each iteration's ``micro_batches`` that one of the ranks computes.

    Raises:
        ValueError: a rank would have none.
    """
    if micro_batches < ranks:
        raise ValueError(
            f"global_micro_batches must be at least the number of ranks, got {micro_batches} on {ranks} ranks: "
            "use fewer ranks, or more and smaller micro-batches."
        )
    return round(micro_batches * rank / ranks), round(micro_batches * (rank + 1) / ranks)


def micro_batch_scales(
    micro_batches: Sequence[Any], *, padding: int = 0, group_total: int = 0, weight_fn: WeightFn | None = None
) -> list[float] | None:
    """The factor of each micro-batch's mean loss so that, summed and averaged over ranks, the weighted mean results.

    Args:
        micro_batches: of this rank, as the loader gave them (``weight_fn`` sees them on the host).
        padding: how many at the end repeat an earlier one and weigh nothing.
        group_total: micro-batches with weight over all data-parallel ranks, where known; 0: as many on each as here.
        weight_fn: the weight of one micro-batch, e.g. its number of tokens; with it this is a collective.

    Returns:
        ``w_i * data_size / W``, W the weight over the group and all data-parallel ranks; None where W is zero.

    Raises:
        ValueError: a weight is negative or not finite, or their sum is not.
    """
    count, ranks = len(micro_batches), mesh.data_size()
    if weight_fn is None:
        scale = ranks / (group_total or (count - padding) * ranks or 1)
        return [scale] * (count - padding) + [0.0] * padding
    weights = [check_weight(weight_fn(batch)) for batch in micro_batches[: count - padding]] + [0.0] * padding
    total = sum(row[0] for row in mesh.by_data_rank(agreement.gather_floats([sum(weights)])))
    return GroupWeights(micro_batches, weights, total).scales()


def first_dimension(batch: Any) -> int | None:
    """Size of dimension 0 of the first tensor or array in ``batch``, or None.

    A batch may nest mappings, lists, tuples and data classes.
    """
    children: Iterable[Any] = ()
    if type(batch) in (tuple, list):  # the commonest first: it is asked in each iteration
        children = batch
    elif (shape := getattr(batch, "shape", None)) is not None:
        return int(shape[0]) if len(shape) else None
    elif isinstance(batch, Mapping):
        children = batch.values()
    elif isinstance(batch, list | tuple):
        children = batch
    elif is_dataclass(batch):
        children = (getattr(batch, field.name, None) for field in fields(batch))
    for child in children:
        size = first_dimension(child)
        if size is not None:
            return size
    return None


def check_weight(given: Any) -> float:
    """A micro-batch's weight as a float.

    Raises:
        ValueError: it is no number, negative or not finite.
    """
    try:
        weight = float(given)
    except OverflowError:
        weight = float("inf")
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"weight_fn must return a finite number of at least 0, got {shapes_of(given)}.") from None
    if not 0.0 <= weight < float("inf"):
        raise ValueError(f"weight_fn must return a finite number of at least 0, got {weight}.")
    return weight


def accumulation_steps_for(global_batch: int, local_batch: int, world_size: int = 1) -> int:
    """Micro-batches per update so that ``local_batch * world_size * steps == global_batch`` samples.

    Raises:
        ValueError: it does not divide, or a number is below 1.
    """
    if min(global_batch, local_batch, world_size) < 1:
        raise ValueError(
            f"batch sizes and world_size must be at least 1, got {global_batch}, {local_batch}, {world_size}."
        )
    steps, rest = divmod(global_batch, local_batch * world_size)
    if rest or not steps:
        raise ValueError(
            f"global_batch {global_batch} must be a multiple of local_batch x world_size = {local_batch * world_size}: "
            f"take {max(1, steps) * local_batch * world_size} or change local_batch."
        )
    return steps
