"""One global order of micro-batches, of which each rank computes a share of every iteration."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from ignite_engine.data.agreed import AgreedSource, check_orders_agree, order_key
from ignite_engine.data.loader import resumable
from ignite_engine.data.place import Held
from ignite_engine.data.read_errors import ReadErrors
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
        may_be_empty: of a :class:`SharedSource`.
        weigh, waiting, read_errors: of an :class:`AgreedSource`.

    Raises:
        ValueError: there are fewer micro-batches than ranks, data of the ranks' own cannot be dealt out, or ranks that
            share their data might read something else.
    """
    if read_errors is not None and mesh.data_size() < agreement.world_size():
        raise ValueError(
            f"max_read_errors={read_errors.limit} could leave a batch out on one rank of a tensor-parallel group and "
            "not on another one: use max_read_errors=0 with tensor parallelism."
        )
    data = resumable(data)
    if global_micro_batches is None or (isinstance(data, tuple) and not data):  # an empty window
        if agreement.world_size() == 1:
            return DataSource(data, accumulation_steps, waiting=waiting, read_errors=read_errors)
        return AgreedSource(data, accumulation_steps, weigh=weigh, waiting=waiting, read_errors=read_errors)
    share(global_micro_batches, mesh.data_rank(), mesh.data_size())
    waiting = waiting if agreement.world_size() == 1 else None  # ranks could not agree on a stop in it
    source = DataSource(data, global_micro_batches, waiting=waiting)
    if source.sampler is not None:
        return SharedSource(data, global_micro_batches, waiting=waiting, may_be_empty=may_be_empty)
    if mesh.data_size() > 1:
        raise ValueError(
            f"global_micro_batches deals one order of samples out to the ranks, which needs loader() or a plain "
            f"DataLoader, got a {type(data).__name__} on {mesh.data_size()} ranks: use one of them, or "
            "accumulation_steps."
        )
    return source


class SharedSource(DataSource):
    """An iteration is the next ``micro_batches`` batches of the global order; this rank yields its share of them.

    ``place.batch`` counts micro-batches over all ranks. The place that is saved is the number of samples of the
    global order that were consumed, so it means the same on any number of ranks.

    Args:
        data: made by ``loader()``.
        may_be_empty: yield an empty group where the tail of a pass has nothing for this rank. Otherwise it is a batch
            that weighs nothing: a wrapped model's peers wait for one.

    Raises:
        ValueError: there are fewer micro-batches than ranks.
    """

    def __init__(self, data: Any, micro_batches: int, *, waiting: Waiting | None, may_be_empty: bool) -> None:
        super().__init__(data, micro_batches, waiting=waiting)
        assert self.sampler is not None
        self._may_be_empty = may_be_empty
        self._first, self._end = share(micro_batches, mesh.data_rank(), mesh.data_size())
        self._dealing = Dealing(data.batch_size, micro_batches, self._first, self._end)

    def agree_lengths(self) -> None:
        """Read the length of the pass that starts. A collective.

        Raises:
            ValueError: it has no batch, or not as many, in another order or of other data on some rank.
        """
        self._read_length()
        rows = agreement.gather_floats([float(self.batches or 0), *order_key(self)])
        check_orders_agree([row[1:] for row in rows])
        lengths = [int(row[0]) for row in rows]
        if len(set(lengths)) > 1 or (lengths[0] < 1 and not self.place.skipped):
            raise ValueError(
                "global_micro_batches needs the same data on every rank, with at least one batch, got "
                f"{', '.join(map(str, lengths))} batches by rank."
            )

    def _read_length(self) -> None:
        assert self.sampler is not None
        sampler, size = self.sampler, self._dealing.batch_size
        sampler.length, sampler.skipped, sampler.dealing = (
            sampler.data_length(self.place.pass_number),
            self.place.skipped,
            self._dealing,
        )
        left = max(0, sampler.length - sampler.skipped)
        self.batches = left // size if self.data.drop_last else -(-left // size)

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

    def _open(self) -> Iterator[Any]:
        assert self.sampler is not None
        place, self.place = self.place, self.place._replace(held=Held())
        self.sampler.pass_number, self.sampler.start = place.pass_number, place.batch * self._dealing.batch_size
        return self._begin()

    def _first_batch(self) -> Any:
        """A batch that weighs nothing, in a resumed run the same: the first samples of the pass."""
        assert self.sampler is not None
        first = self.sampler.first(self._dealing.batch_size)
        return self.data.dataset.__getitems__([(self.place.pass_number, index) for index in first])

    def close(self) -> None:
        super().close()
        assert self.sampler is not None
        self.sampler.dealing = None

    def state_dict(self) -> dict[str, Any]:
        """The position as samples of the global order that were consumed."""
        return self._in_samples(super().state_dict(), ranks=1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, perhaps one that was counted in batches of each rank.

        Raises:
            StateMismatch: the dataset, its order or the batch size is another one.
        """
        in_samples = self._in_samples(state, ranks=state.get("ranks", 1))
        super().load_state_dict(in_samples | {"ranks": mesh.data_size()})  # what it counts is the same on any number
        self._read_length()

    def _in_samples(self, state: dict[str, Any], ranks: int) -> dict[str, Any]:
        if not state["batch"] or "seed" not in state:
            return state
        consumed = state.get("skipped", 0) + state["batch"] * state["batch_size"] * ranks
        return state | {"batch": 0, "skipped": min(consumed, state["samples"])}
