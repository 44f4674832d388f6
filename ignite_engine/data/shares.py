"""One global order of micro-batches, of which each rank computes a share of every iteration.

An iteration is the next ``global_micro_batches`` batches of it. ``place.batch`` counts micro-batches over all ranks.
The place that is saved is the number of samples that were consumed, so it means the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ignite_engine.data.readers import Indexed, Replayed
from ignite_engine.data.sampler import Dealing
from ignite_engine.ranks import agreement, mesh
from ignite_engine.update.micro_batches import Group, share

if TYPE_CHECKING:
    from ignite_engine.data.source import DataSource


def deal(reader: Replayed, micro_batches: int) -> Dealing | None:
    """Let ``reader`` read this rank's share.

    Raises:
        ValueError: there are fewer micro-batches than ranks, or data of the ranks' own cannot be dealt out.
    """
    first, end = share(micro_batches, mesh.data_rank(), mesh.data_size())
    if isinstance(reader, Indexed):
        reader.dealing = Dealing(reader.data.batch_size, micro_batches, first, end)
        return reader.dealing
    if mesh.data_size() > 1 and reader.data != ():  # which is an empty window
        raise ValueError(
            f"global_micro_batches deals one order of samples out to the ranks, which needs loader() or a plain "
            f"DataLoader, got a {type(reader.data).__name__} on {mesh.data_size()} ranks: use one of them, or "
            "accumulation_steps."
        )
    return None


def refuse(source: DataSource) -> None:
    """A collective.

    Raises:
        ValueError: always; the data has no batch, or not as many, in another order or of other data on some rank.
    """
    lengths = agreement.gather_objects(source.reader.measure(source.place))
    raise ValueError(
        "global_micro_batches needs the same data on every rank, with at least one batch, got "
        f"{', '.join(map(str, lengths))} batches by rank."
    )


def group(source: DataSource, dealing: Dealing, batches: Iterator[Any]) -> Group | None:
    """This rank's share of the next iteration; None at the end of the pass."""
    assert source.batches is not None and source.sampler is not None
    size = min(dealing.cycle, source.batches - source.place.batch)
    if size <= 0:
        next(batches, None)  # the loader ends its workers when it is exhausted
        return None
    group = Group(source.read(batches, dealing.own(size)))
    if not group and not source.may_be_empty:
        # in a resumed run the same: the first samples of the pass
        first = source.sampler.first(dealing.batch_size)
        group.append(source.data.dataset.__getitems__([(source.place.pass_number, index) for index in first]))
        group.padding = 1
    group.total = group.places = size
    return group
