"""Admission by count and eviction by age: which ids have a row, and what becomes of the rows."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, TrainingEvents, Update, Windows
from ignite_engine.handlers import Checkpoint, IdAdmission
from ignite_engine.ranks import agreement
from ignite_engine.sparse import IdRows, RowwiseAdagrad, hash_ids
from tests.builders import on_two_ranks

ROWS, SHARED = 9, 2
WINDOWS = [  # batches of ids
    [[10, 10, 20], [10, 30]],
    [[20, 20, 40], [10, 50]],
    [[20, 50, 60], [20]],
    [[60, 60], [50, 20]],
    [[10, 60]],
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.rows = IdRows(ROWS, SHARED)
        self.table = nn.Embedding(ROWS, 2, sparse=True)
        self.head = nn.Linear(2, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.table(self.rows(ids)))
        return found


def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
    return (model(ids) - 1).square().mean()


def made(table: str = "SparseAdam", **options: Any) -> tuple[Trainer, Net, IdAdmission]:
    model = Net()
    kinds: dict[str, Any] = {
        "SparseAdam": lambda each: torch.optim.SparseAdam(each, lr=0.1),
        "RowwiseAdagrad": lambda each: RowwiseAdagrad(each, lr=0.1, initial_accumulator=0.25),
        "momentum": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
    }
    wrapped = DistributedDataParallel(model) if torch.distributed.is_initialized() else model
    optimizers = {
        "table": kinds[table](list(model.table.parameters())),
        "head": torch.optim.AdamW(model.head.parameters()),
    }
    trainer = Trainer(Update(wrapped, optimizers, loss_fn))
    ids = IdAdmission(model.rows, [model.table.weight], lambda batch: batch, **{"after": 3, "keep": 2, **options})
    ids.attach(trainer)
    return trainer, model, ids


def windows_of(batches: list[Any]) -> Windows:
    return Windows(range(len(batches)), lambda window: [torch.tensor(each) for each in batches[window]])


def owned_after_each(trainer: Trainer, rows: IdRows) -> list[dict[int, int]]:
    seen: list[dict[int, int]] = []
    trainer.add_event_handler(
        TrainingEvents.WINDOW_COMPLETED,
        lambda: seen.append(dict(zip(rows.ids.tolist(), rows.own_rows.tolist(), strict=True))),
    )
    return seen


def test_ids_are_admitted_by_count_and_evicted_by_age() -> None:
    trainer, model, _ = made()
    owned = owned_after_each(trainer, model.rows)
    written: list[Any] = []
    trainer.add_event_handler(TrainingEvents.METRICS_READY, lambda: written.append(dict(trainer.state.metrics.fresh)))
    trainer.run(windows_of(WINDOWS))

    assert owned == [
        {10: 2},  # three times; 20 and 30 once each
        {10: 2, 20: 3},  # 20 for the third time
        {10: 2, 20: 3},  # 50 twice by now, 60 once; 30 is forgotten
        {20: 3, 50: 2, 60: 4},  # 10 was not seen in the third window and in this one; its row is given out at once
        {20: 3, 50: 2, 60: 4},  # 10 begins at one again
    ]
    numbers = [[each[f"ids/{key}"] for key in ("own_rows", "admitted", "evicted")] for each in written]
    assert numbers == [[1, 1, 0], [2, 1, 0], [2, 0, 0], [3, 2, 1], [3, 0, 0]]


def test_age_of_an_admitted_id_is_counted_from_the_window_in_which_it_was_seen_last() -> None:
    """Ids that wait for a free row are admitted when there is one, with the age that they have by then."""
    first = [[each] * 3 for each in range(10, 10 + ROWS - SHARED)]  # each of the rows is taken at once
    batches = [first, [[5] * 3, [10, 11, 12]], [[10, 11]], [[10]], [[10]]]
    trainer, model, _ = made(keep=3)
    owned = owned_after_each(trainer, model.rows)
    trainer.run(windows_of(batches))

    ids = [set(each) for each in owned]
    taken = set(range(10, 10 + ROWS - SHARED))
    assert ids[:3] == [taken] * 3 and 5 not in ids[2]  # no row is free
    assert ids[3] == {5, 10, 11, 12}  # 13 to 16 were seen in the first of four windows only; 5 in the second
    assert ids[4] == {10, 11}  # 5 was last seen three windows ago: admitting it did not make it younger


def test_an_id_shares_a_row_until_it_is_admitted() -> None:
    trainer, model, _ = made()
    before = model.table.weight.detach().clone()
    changed: list[list[int]] = []

    def look() -> None:
        nonlocal before
        now = model.table.weight.detach().clone()
        changed.append((now != before).any(1).nonzero().squeeze(1).tolist())
        before = now

    trainer.add_event_handler(Events.ITERATION_COMPLETED, look)
    trainer.run(windows_of([[[10]], [[10, 10]], [[10]]]))

    assert changed == [hash_ids(torch.tensor([10]), SHARED).tolist()] * 2 + [[2]]


@pytest.mark.parametrize("table", ["SparseAdam", "RowwiseAdagrad", "momentum"])
def test_row_that_is_taken_back_is_as_new(table: str) -> None:
    trainer, model, _ = made(table, after=1, keep=1, init=lambda rows: rows.fill_(7.0))
    optimizer = trainer.update.optimizers["table"]  # type: ignore[attr-defined]  # an Update
    trainer.run(windows_of([[[10, 20]], [[10, 20]], [[10]]]))
    state = {key: value for key, value in optimizer.state[model.table.weight].items() if isinstance(value, Tensor)}

    assert model.rows.ids.tolist() == [10] and model.table.weight[3].tolist() == [7.0, 7.0]
    for value in state.values():
        value = value.to_dense()
        initial = 0.25 if table == "RowwiseAdagrad" else 0.0
        assert (value[3] == initial).all() and (value[2] != initial).all()
    assert state


def test_new_weights_are_those_of_an_embedding_and_leave_random_numbers_alone() -> None:
    drawn = []
    for keep in (1, None):
        trainer, model, _ = made(after=1, keep=keep)
        torch.manual_seed(0)
        before = model.table.weight[3].tolist()
        trainer.run(windows_of([[[10, 20]], [[10]]]))
        drawn.append(torch.rand(1).item())
        assert (model.table.weight[3].tolist() == before) is False or keep is None
    assert drawn[0] == drawn[1]


def test_where_rows_run_out_those_seen_most_are_admitted_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    trainer, model, _ = made(after=1, keep=None)
    crowd = [1, 2, 3, 4, 5, 6, 7, 8, 9] + [7, 8, 9]
    trainer.run(windows_of([[crowd], [crowd]]))

    assert model.rows.ids.tolist() == [1, 2, 3, 4, 7, 8, 9]
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(lines) == 1 and "ids: 9 ids have been seen 1 times, and 7 of 9 rows are free" in lines[0]


def test_weights_loaded_without_the_counts_begin_with_fresh_ages() -> None:
    trainer, model, _ = made(keep=2)
    model.rows.assign(torch.tensor([10]), torch.tensor([4]))
    owned = owned_after_each(trainer, model.rows)
    trainer.run(windows_of([[[1]], [[1]], [[2]]]))

    assert [10 in each for each in owned] == [True, True, False]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"after": 0}, "after and keep must be at least 1"),
        ({"keep": 0}, "after and keep must be at least 1"),
        ({"tables": [torch.zeros(4, 2)]}, "tables must be whole and have the 9 rows of IdRows, got a table of 4"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], line: str) -> None:
    tables = options.pop("tables", [])
    with pytest.raises(ValueError, match=line):
        IdAdmission(IdRows(ROWS, SHARED), tables, lambda batch: batch, **options)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"after": 1.5}, r"^after must be a whole number of sightings, got 1\.5\."),
        ({"keep": "2"}, r"^keep must be a whole number of windows or None, got '2'\."),
        ({"tables": torch.zeros(ROWS, 2)}, r"^tables must be a list of parameters, such as .* got a Tensor\."),
        ({"tables": [nn.Embedding(ROWS, 2)]}, r"^tables must be a list of parameters, such as .* got a list\."),
    ],
)
def test_arguments_of_other_types_are_one_line(options: dict[str, Any], line: str) -> None:
    with pytest.raises(TypeError, match=line):
        IdAdmission(IdRows(ROWS, SHARED), **{"tables": [], "ids_of": len, **options})


@pytest.mark.parametrize("what", ["rows", "tables"])
def test_what_is_not_the_models_is_refused(what: str) -> None:
    """It would not be saved with the model, or not be trained."""
    trainer, model, _ = made()
    other = Net()
    rows, table = (other.rows, model.table) if what == "rows" else (model.rows, other.table)
    IdAdmission(rows, [table.weight], lambda batch: batch, name="other").attach(trainer)
    line = {"rows": "the IdRows is not a part of the model", "tables": r"tables\[0\] is not a parameter of the model"}
    with pytest.raises(ValueError, match=f"^other: {line[what]}"):
        trainer.run(windows_of([[[1]]]))


def test_what_ids_of_returns_is_checked() -> None:
    trainer, model, _ = made()
    IdAdmission(model.rows, [], lambda batch: batch.tolist(), name="list").attach(trainer)
    with pytest.raises(TypeError, match=r"^what ids_of returns must be a tensor of ids, got a list\."):
        trainer.run(windows_of([[[1]]]))


def state_of(trainer: Trainer, model: Net, ids: IdAdmission) -> Any:
    """All of it as plain values, which compare bit for bit."""
    optimizers = trainer.update.optimizers  # type: ignore[attr-defined]  # an Update
    return [
        {name: value.tolist() for name, value in model.state_dict().items()},
        {name: value.tolist() if isinstance(value, Tensor) else value for name, value in ids.state_dict().items()},
        [
            value.tolist()
            for value in optimizers["table"].state[model.table.weight].values()
            if isinstance(value, Tensor)
        ],
    ]


def run(folder: Path, batches: list[Any], iterations: int | None = None) -> Any:
    trainer, model, ids = made(after=2, keep=1)
    torch.manual_seed(agreement.rank())  # as a run's ranks have random numbers of their own
    checkpoint = Checkpoint(folder)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED)
    checkpoint.resume()
    if iterations is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=iterations), trainer.terminate)
    trainer.run(windows_of(batches))
    return state_of(trainer, model, ids)


@pytest.mark.parametrize("iterations", [1, 2, 5, 7])
def test_resumed_run_has_the_same_rows(tmp_path: Path, iterations: int) -> None:
    """Within a window, at its last iteration, and between two."""
    whole = run(tmp_path / "whole", WINDOWS)
    run(tmp_path / "parts", WINDOWS, iterations)

    assert run(tmp_path / "parts", WINDOWS) == whole


def share(rank: int) -> list[Any]:
    """Of each window the batches of one of two ranks, as often as the other has some."""
    return [batches[rank::2] for batches in WINDOWS]


def on_a_rank(rank: int, folder: Path) -> dict[str, Any]:
    whole = run(folder / "whole", share(rank))
    for iterations in (3, 4):
        run(folder / f"parts_{iterations}", share(rank), iterations)
    return {"whole": whole, "parts": [run(folder / f"parts_{iterations}", share(rank)) for iterations in (3, 4)]}


@pytest.mark.slow
def test_ranks_agree_on_the_rows_of_what_all_have_seen(tmp_path: Path) -> None:
    """The second rank has no batch in the last window: what it repeats there is not seen by it."""
    answers = on_two_ranks(lambda rank: on_a_rank(rank, tmp_path), tmp_path / "meet")
    alone = run(tmp_path / "alone", WINDOWS)

    for rank in range(2):
        assert answers["whole"][rank] == answers["whole"][0]
        assert answers["parts"][rank] == [answers["whole"][0]] * 2
    of_ranks = copy.deepcopy(answers["whole"][0])
    assert of_ranks[0]["rows._extra_state"] == alone[0]["rows._extra_state"]
    assert of_ranks[1] == alone[1]
