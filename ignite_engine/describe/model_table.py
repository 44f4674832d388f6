"""The parts of a model in a few lines: their kind, parameters, how many of them are trained, dtype and size."""

from __future__ import annotations

from collections.abc import Iterable, Set

from torch import Tensor, nn

from ignite_engine.states.model_and_optimizer import clean_name, unwrap
from ignite_engine.text import in_columns, in_units

ROWS = 12
_HEAD = ("", "", "parameters", "trained", "dtype", "size")


def model_table(model: nn.Module, optimized: Iterable[Tensor]) -> list[str]:
    """One line for each of the model's outermost parts that has parameters, and one for the whole.

    Trained are those of ``optimized``, the optimizers' parameters, that require a gradient. A parameter that several
    parts share counts in the first. Of a sharded model the numbers are those of all shards.
    """
    model = unwrap(model)
    seen: set[nn.Parameter] = set()
    trained = {parameter for parameter in optimized if parameter.requires_grad}
    rows: list[tuple[str, ...]] = []
    for name, part in _children(model):
        own = [parameter for parameter in part.parameters() if parameter not in seen]
        if own:
            rows.append((clean_name(name), type(part).__name__, *_numbers(own, trained)))
            seen.update(own)
    if len(rows) > ROWS:
        rows = [*rows[: ROWS - 1], (f"and {len(rows) - ROWS + 1} more", *[""] * (len(_HEAD) - 1))]
    rest = [parameter for parameter in model.parameters() if parameter not in seen]
    if rest:
        rows.append(("of its own", "", *_numbers(rest, trained)))
    whole = ("", type(model).__name__, *_numbers(model.parameters(), trained))
    return in_columns([_HEAD, *rows, whole] if len(rows) > 1 else [_HEAD, whole])


def _children(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """The children; of a model that only wraps one, that one's."""
    prefix, part = "", model
    while len(children := [*part.named_children()]) == 1 and not [*part.parameters(recurse=False)]:
        name, only = children[0]
        if not [*only.children()]:
            break
        prefix, part = f"{prefix}{name}.", only
    return [(f"{prefix}{name}", child) for name, child in children]


def _numbers(parameters: Iterable[nn.Parameter], trained: Set[Tensor]) -> tuple[str, ...]:
    held = list(parameters)
    of_trained = sum(parameter.numel() for parameter in held if parameter in trained)
    kinds = dict.fromkeys(str(parameter.dtype).removeprefix("torch.") for parameter in held)
    size = sum(parameter.numel() * parameter.element_size() for parameter in held)
    return f"{sum(parameter.numel() for parameter in held):,}", f"{of_trained:,}", ", ".join(kinds), in_units(size)
