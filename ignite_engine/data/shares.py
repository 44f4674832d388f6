"""One global order of micro-batches, of which each rank computes a share of every iteration."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from ignite_engine.data.loader import resumable
from ignite_engine.data.read_errors import ReadErrors
from ignite_engine.data.readers import Indexed
from ignite_engine.data.sampler import Dealing
from ignite_engine.data.source import DataSource, Waiting
from ignite_engine.ranks import agreement, mesh
from ignite_engine.step.micro_batches import Group, WeightFn, share


def source_of(
    data: Any,
    accumulation_steps: int | None,
    global_micro_batches: int | None,
    *,
    may_be_empty: bool = False,
    weigh: WeightFn | None = None,
    waiting: Waiting | None = None,
    read_errors: ReadErrors | None = None,
) -> DataSource:
    """The source over a user's data.

    Args:
        global_micro_batches: of an iteration, over all ranks; then ``accumulation_steps`` is None.
        may_be_empty: of a :class:`DealtSource`.
        weigh, waiting, read_errors: of a :class:`DataSource`.

    Raises:
        ValueError: there are fewer micro-batches than ranks, data of the ranks' own cannot be dealt out, or ranks that
            share their data might read something else.
    """
    if read_errors is not None and mesh.data_size() < agreement.world_size():
        raise ValueError(
            f"max_read_errors={read_errors.limit} could leave a batch out on one rank of a tensor-parallel group and "
            "not on another one: use max_read_errors=0 with tensor parallelism."
        )
    data = resumable(data, any_sampler=mesh.data_size() > 1)  # one of torch's would be drawn alike on each rank
    if global_micro_batches is None or (isinstance(data, tuple) and not data):  # an empty window
        return DataSource(data, accumulation_steps, weigh=weigh, waiting=waiting, read_errors=read_errors)
    share(global_micro_batches, mesh.data_rank(), mesh.data_size())
    source = DataSource(data, global_micro_batches, waiting=waiting)
    if isinstance(source.reader, Indexed):
        return DealtSource(data, global_micro_batches, waiting=waiting, may_be_empty=may_be_empty)
    if mesh.data_size() > 1:
        raise ValueError(
            f"global_micro_batches deals one order of samples out to the ranks, which needs loader() or a plain "
            f"DataLoader, got a {type(data).__name__} on {mesh.data_size()} ranks: use one of them, or "
            "accumulation_steps."
        )
    return source


class DealtSource(DataSource):
    """An iteration is the next ``micro_batches`` batches of the global order; this rank yields its share of them.

    ``place.batch`` counts micro-batches over all ranks. The place that is saved is the number of samples of the
    global order that were consumed, so it means the same on any number of ranks.

    Args:
        data: made by ``loader()``.
        may_be_empty: yield an empty group where the tail of a pass has nothing for this rank. Otherwise it is a batch
            that weighs nothing: a wrapped model's peers wait for one.
    """

    reader: Indexed

    def __init__(self, data: Any, micro_batches: int, *, waiting: Waiting | None, may_be_empty: bool) -> None:
        super().__init__(data, micro_batches, waiting=waiting)
        self._may_be_empty = may_be_empty
        self._first, self._end = share(micro_batches, mesh.data_rank(), mesh.data_size())
        self.reader.dealing = Dealing(data.batch_size, micro_batches, self._first, self._end)

    def agree_lengths(self) -> None:
        """Read the length of the pass that starts. A collective.

        Raises:
            ValueError: it has no batch, or not as many, in another order or of other data on some rank.
        """
        super().agree_lengths()
        if self._exchanges or (not self.batches and not self.place.skipped):
            lengths = agreement.gather_objects(self.reader.measure(self.place))
            raise ValueError(
                "global_micro_batches needs the same data on every rank, with at least one batch, got "
                f"{', '.join(map(str, lengths))} batches by rank."
            )

    def own_batches(self, batches: int) -> int:
        return len(range(self._first, min(self._end, batches)))

    def _next(self, batches: Iterator[Any]) -> Group | None:
        assert self.batches is not None
        size = min(self.steps, self.batches - self.place.batch)
        if size <= 0:
            next(batches, None)  # the loader ends its workers when it is exhausted
            return None
        group = Group(self._read(islice(batches, self.own_batches(size))))
        if not group and not self._may_be_empty:
            group.append(self._first_batch())
            group.padding = 1
        group.total = group.places = size
        return group

    def _first_batch(self) -> Any:
        """A batch that weighs nothing, in a resumed run the same: the first samples of the pass."""
        first = self.reader.sampler.first(self.data.batch_size)
        return self.data.dataset.__getitems__([(self.place.pass_number, index) for index in first])
