"""The micro-batches of an iteration: their weights, and which backward reduces gradients over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from ignite_engine.errors import is_whole, shapes_of

WeightFn = Callable[[Any], float]


class Group(list[Any]):
    """The micro-batches of one iteration on this rank, as the loader gave them, with what is known of all ranks'."""

    padding = 0
    """How many at the end repeat one and weigh nothing, because this rank's data ran out before its peers'."""
    total = 0
    """Micro-batches with weight over all data-parallel ranks; 0: as many on each as here."""
    weights: list[float] | None = None
    """What ``weight_fn`` gave for each, where the ranks have agreed on it before."""
    total_weight = 0.0
    """The sum of the weights over all data-parallel ranks, where there are any."""
    places = 0
    """By how many batches it moves the position in the data, unreadable ones included."""
    unread = 0
    """Batches that could not be read, over all ranks."""
    begins: Any = None
    """The event that it brings: it is the first one of a window, say."""

    @property
    def real(self) -> list[Any]:
        """The micro-batches that are not repetitions."""
        return self[: len(self) - self.padding]


def scales_of(weights: Sequence[float], total: float, ranks: int = 1) -> list[float] | None:
    """The factor of each micro-batch's mean loss: summed, and averaged over ``ranks``, they give the weighted mean.

    Returns:
        ``w_i * ranks / total``, ``total`` being the weight over all ranks; None where it is zero.
    """
    return [weight * ranks / total for weight in weights] if total else None


def group_of(engine: Any, batch: Any) -> Group:
    """The group of ``batch``, which is ``state.batch``, whoever assigned it.

    Where the trainer groups, a batch is a sequence of micro-batches; else it is one micro-batch.
    """
    if isinstance(batch, Group):
        return batch
    known: Group | None = getattr(engine.state, "group", None)  # an engine of Ignite's own has none
    if known is None:
        return Group([batch])
    is_grouped = engine.accumulation_steps is not None or engine.global_micro_batches is not None
    if not is_grouped and known[0] is batch:
        return known
    given = Group(batch if is_grouped else [batch])  # a handler's, which may weigh something else
    given.padding, given.total = known.padding, known.total
    return given


def reducing_modules(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of ``model`` that reduce gradients over ranks: DDP, FSDP2, or others with ``no_sync``."""
    # not by hasattr: a compiled module answers for the one inside, which is found below it
    marks = ("set_requires_gradient_sync", "require_backward_grad_sync", "no_sync")
    if any(name in vars(model) or callable(getattr(type(model), name, None)) for name in marks):
        return [model]
    return [found for child in model.children() for found in reducing_modules(child)]


def gradient_sync(model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """A context for one micro-batch's forward AND backward: ranks reduce gradients only in the ``last`` of a group.

    For DDP (which decides in forward) and FSDP2, also inside of ``model``; any other model gets a null context. Leaving
    the context restores the setting, on an error too.
    """
    return without_sync(() if last else reducing_modules(model))


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
    if not is_whole(count) or count < 1:
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


def first_dimension(batch: Any) -> int | None:
    """Size of dimension 0 of the first tensor or array in ``batch``, or None.

    A batch may nest mappings, lists, tuples and data classes.
    """
    if (shape := getattr(batch, "shape", None)) is not None:
        return int(shape[0]) if len(shape) else None
    children: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        children = batch.values()
    elif isinstance(batch, list | tuple):
        children = batch
    elif is_dataclass(batch):
        children = (getattr(batch, field.name, None) for field in fields(batch))
    sizes = (first_dimension(child) for child in children)
    return next((size for size in sizes if size is not None), None)


def check_weight(given: Any) -> float:
    """A micro-batch's weight as a float.

    Raises:
        ValueError: it is negative or not finite.
    """
    weight = float(given)
    if not 0.0 <= weight < float("inf"):
        raise ValueError(f"weight_fn must return a finite number of at least 0, got {weight} from {shapes_of(given)}.")
    return weight


def accumulation_steps_for(global_batch: int, local_batch: int, world_size: int = 1) -> int:
    """Micro-batches per update so that ``local_batch * world_size * steps == global_batch`` samples.

    Raises:
        ValueError: it does not divide, or a number is below 1.
    """
    for name, count in (("global_batch", global_batch), ("local_batch", local_batch), ("world_size", world_size)):
        check_steps(count, name)
    together = local_batch * world_size
    steps, rest = divmod(global_batch, together)
    if rest or not steps:
        raise ValueError(
            f"global_batch {global_batch} must be a multiple of local_batch x world_size = {together}: "
            f"take {max(1, steps) * together} or change local_batch."
        )
    return steps
