"""Which ids have a row of their own: admitted after some sightings, evicted when they are not seen any more."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_engine import Phase, Trainer, TrainingEvents, rng
from ignite_engine.errors import check_type, is_whole
from ignite_engine.ranks import agreement, mesh
from ignite_engine.sparse.ids import IdRows, whole_ids
from ignite_engine.step.micro_batches import micro_batches_of

logger = logging.getLogger(__name__)


class IdAdmission:
    """Give an id a row of its own after some sightings, and take it back when the id has not been seen for a while.

    It acts at the end of a window, on the sightings of all ranks, which are exchanged once; the rows are the same on
    every rank. First the rows of ids that were not seen are taken back: their weights are initialized again and the
    optimizers' state of them is as at the beginning. Then those with most sightings are admitted, as far as rows go.

    Args:
        rows: the model's map of ids to rows.
        tables: the parameters that have these rows, such as ``[model.users.weight]``.
        ids_of: the ids of a micro-batch as the loader gave it, whole numbers of any shape; an id that is in it twice
            is seen twice.
        after: sightings, over all windows, with which an id gets a row.
        keep: windows without a sighting after which its row is taken back, and the sightings of an id without one are
            forgotten; None: never.
        init: fills new rows of a table in place, shape ``(count, ...)``; the default is that of ``nn.Embedding``.
        name: of its state in checkpoints, and of what it writes into ``state.metrics``: ``<name>/own_rows``,
            ``<name>/admitted`` and ``<name>/evicted``.

    Raises:
        TypeError: a count is not a whole number, or ``tables`` are not tensors.
        ValueError: a count is below 1, or a table has other rows, or is sharded; (at STARTED) ``rows`` or a table is
            not the model's.
    """

    phase = Phase.PREPARE
    replayed = True

    def __init__(
        self,
        rows: IdRows,
        tables: Sequence[Tensor],
        ids_of: Callable[[Any], Tensor],
        *,
        after: int = 1,
        keep: int | None = None,
        init: Callable[[Tensor], Any] = nn.init.normal_,
        name: str = "ids",
    ) -> None:
        check_type("after", after, is_whole(after), "a whole number of sightings")
        check_type("keep", keep, keep is None or is_whole(keep), "a whole number of windows or None")
        given: Any = tables
        are_tables = not isinstance(given, Tensor) and all(isinstance(table, Tensor) for table in given)
        check_type("tables", given, are_tables, "a list of parameters, such as [model.users.weight]")
        check_type("ids_of", ids_of, callable(ids_of), "a function of a micro-batch")
        if after < 1 or (keep is not None and keep < 1):
            raise ValueError(f"after and keep must be at least 1 (keep may be None), got {after} and {keep}.")
        for table in tables:
            if len(table) != rows.rows or hasattr(table, "device_mesh"):
                kind = "a sharded table" if hasattr(table, "device_mesh") else f"a table of {len(table)}"
                raise ValueError(f"tables must be whole and have the {rows.rows} rows of IdRows, got {kind}.")
        self.rows, self.tables, self.ids_of = rows, list(tables), ids_of
        self.after, self.keep, self.init, self.name = after, keep, init, name
        self.windows = 0
        """How many have ended."""
        self._seen_at = torch.empty(0, dtype=torch.int64)  # of ``rows.ids``
        self._waiting = torch.empty((3, 0), dtype=torch.int64)  # ids in ascending order, sightings, window of the last
        self._sightings = Sightings()
        self._has_warned = False

    def attach(self, trainer: Trainer, event: Any = TrainingEvents.WINDOW_COMPLETED) -> None:
        """Count the ids of each iteration; admit and evict at ``event``."""
        trainer.register(self.name, self, shared=True)
        trainer.register(f"{self.name}/sightings", self._sightings)
        trainer.add_event_handler(Events.STARTED, self._check)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._count)
        trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """End a window; a collective."""
        self.windows += 1
        ids, counts = _summed(mesh.by_data_rank(agreement.gather_objects(self._sightings.take())))
        ids, counts = self._note_those_with_a_row(ids, counts)
        freed = self._evict()
        self._waiting = _joined(self._waiting, torch.stack([ids, counts, torch.full_like(ids, self.windows)]))
        self._waiting = self._waiting[:, self._is_recent(self._waiting[2])]
        admitted = self._admit()
        self._renew(freed, getattr(trainer.update, "optimizers", {}).values())
        now = {"own_rows": len(self.rows.ids), "admitted": admitted, "evicted": len(freed)}
        for key, value in now.items():
            trainer.state.metrics[f"{self.name}/{key}"] = float(value)

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self.windows, "seen_at": self._seen_at, "waiting": self._waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.windows, self._seen_at, self._waiting = int(state["windows"]), state["seen_at"], state["waiting"]

    def _check(self, trainer: Trainer) -> None:
        """What is not the model's would be neither trained nor saved with it."""
        model = getattr(trainer.update, "model", None)
        if not isinstance(model, nn.Module):
            return
        parts: list[Any] = [*model.modules(), *model.parameters()]
        if not any(part is self.rows for part in parts):
            raise ValueError(f"{self.name}: the IdRows is not a part of the model: make it an attribute of a module.")
        for at, table in enumerate(self.tables):
            if not any(part is table for part in parts):
                raise ValueError(f"{self.name}: tables[{at}] is not a parameter of the model: give its own.")

    def _count(self, trainer: Trainer) -> None:
        for batch in micro_batches_of(trainer):
            ids = self.ids_of(batch)
            check_type("what ids_of returns", ids, isinstance(ids, Tensor), "a tensor of ids")
            self._sightings.add(ids)

    def _note_those_with_a_row(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Returns those that have none."""
        if len(self._seen_at) != len(self.rows.ids):  # a model whose weights were loaded without this state
            self._seen_at = torch.full((len(self.rows.ids),), self.windows)
        place, has_own = (tensor.cpu() for tensor in self.rows.find(ids.to(self.rows.ids.device)))
        self._seen_at[place[has_own]] = self.windows
        return ids[~has_own], counts[~has_own]

    def _evict(self) -> Tensor:
        """Returns the rows that were taken back."""
        stays, rows = self._is_recent(self._seen_at), self.rows.own_rows.cpu()
        self.rows.assign(self.rows.ids.cpu()[stays], rows[stays])
        self._seen_at = self._seen_at[stays]
        return rows[~stays]

    def _admit(self) -> int:
        """Returns how many ids were given a row."""
        waiting, free = self._waiting, self.rows.free_rows().cpu()
        due = (waiting[1] >= self.after).nonzero().squeeze(1)
        if len(due) > len(free) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: %d ids have been seen %d times, and %d of %d rows are free: the others share rows until some are; "
                "give IdRows more rows, or admit and keep fewer ids.",
                *(self.name, len(due), self.after, len(free), self.rows.rows),
            )
        due = due[waiting[1, due].argsort(descending=True, stable=True)][: len(free)].sort().values
        ids, order = torch.cat([self.rows.ids.cpu(), waiting[0, due]]).sort()
        self.rows.assign(ids, torch.cat([self.rows.own_rows.cpu(), free[: len(due)]])[order])
        self._seen_at = torch.cat([self._seen_at, waiting[2, due]])[order]
        still = torch.ones(waiting.shape[1], dtype=torch.bool)
        still[due] = False
        self._waiting = waiting[:, still]
        return len(due)

    def _is_recent(self, seen_at: Tensor) -> Tensor:
        return seen_at > self.windows - (self.windows + 1 if self.keep is None else self.keep)

    @torch.no_grad()
    def _renew(self, rows: Tensor, optimizers: Iterable[Optimizer]) -> None:
        """Make weights anew, the same on every rank, and the optimizers' state of them as at the beginning."""
        if not len(rows):
            return
        with rng.isolated():
            rng.seed_host(rng.mix(zlib.crc32(self.name.encode()), self.windows))
            for table in self.tables:
                fresh = torch.empty(len(rows), *table.shape[1:], dtype=table.dtype)
                self.init(fresh)
                table[rows.to(table.device)] = fresh.to(table.device)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for table in group["params"]:
                    if any(table is known for known in self.tables):
                        _reset_rows(optimizer.state.get(table, {}), len(table), rows.to(table.device), group)


class Sightings:
    """How often this rank has seen each id in the window so far."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._new: list[Tensor] = []
        self._count = 0

    def add(self, ids: Tensor) -> None:
        """See these ids, whole numbers of any shape; an id may be among them several times."""
        self._new.append(whole_ids(ids.detach()).reshape(-1).cpu())
        self._count += ids.numel()
        if self._count > _COUNT_AT:
            self._sum()

    def take(self) -> tuple[Tensor, Tensor]:
        """Ids in ascending order and how often each was seen; afterwards none has been."""
        self._sum()
        parts, self._parts = self._parts, []
        return parts[0]

    def state_dict(self) -> dict[str, Any]:
        self._sum()
        return {"rank": agreement.rank(), "ids": self._parts[0][0], "counts": self._parts[0][1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue; a rank that did not exist gets another's, which are not its own."""
        self._new, self._count = [], 0
        self._parts = [(state["ids"], state["counts"])] if state["rank"] == agreement.rank() else []

    def _sum(self) -> None:
        new = torch.cat(self._new) if self._new else _NONE
        self._parts = [_summed([*self._parts, (new, torch.ones_like(new))])]
        self._new, self._count = [], 0


def _summed(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Each id once, in ascending order, and the sum of its counts."""
    ids, place = torch.cat([ids for ids, _ in parts]).unique(return_inverse=True)
    return ids, torch.zeros_like(ids).index_add_(0, place, torch.cat([counts for _, counts in parts]))


def _joined(waiting: Tensor, seen: Tensor) -> Tensor:
    """Columns of id, sightings and last window: each id once, in ascending order."""
    both = torch.cat([waiting, seen], dim=1)
    ids, place = both[0].unique(return_inverse=True)
    counts = torch.zeros_like(ids).index_add_(0, place, both[1])
    return torch.stack([ids, counts, torch.zeros_like(ids).scatter_reduce_(0, place, both[2], "amax")])


def _reset_rows(state: dict[str, Any], count: int, rows: Tensor, group: dict[str, Any]) -> None:
    """Set what an optimizer keeps of some of a table's ``count`` rows to what it begins with."""
    accumulator = group.get("initial_accumulator", group.get("initial_accumulator_value", 0.0))
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (count,):
            continue
        # another tensor: a checkpoint in the background may still be copying this one
        if value.is_sparse:  # momentum of sparse gradients
            stays = ~torch.isin((value := value.coalesce()).indices()[0], rows)
            state[key] = torch.sparse_coo_tensor(
                value.indices()[:, stays], value.values()[stays], value.shape, check_invariants=False
            )
        else:
            state[key] = value.index_fill(0, rows, accumulator if key == "sum" else 0.0)


_NONE = torch.empty(0, dtype=torch.int64)
_COUNT_AT = 1 << 20
"""Sightings that are kept one by one before they are counted."""
