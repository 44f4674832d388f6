"""Tables saved by the rows that changed while a run trains: the same bits, far fewer bytes, whatever kills it."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

from ignite_engine import Trainer, Update, loader
from ignite_engine.checkpointing import CheckpointError, CheckpointStore, LoadPlan, StateMismatch, changed_rows
from ignite_engine.checkpointing.comparison import compare
from ignite_engine.handlers import EMA, Checkpoint
from tests.builders import on_two_ranks, one
from tests.checkpointing.file_faults import FileOperations, in_child, kill_this_process

ROWS = 3000


class Clicks(nn.Module):
    """A sparse table and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, 4, sparse=True, mode="sum")
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.table(ids))
        return found


def clicks() -> Dataset[Any]:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randint(0, ROWS, (64, 5), generator=generator))


def run_of(directory: Path, every: int = 1, **options: Any) -> tuple[Trainer, Checkpoint]:
    torch.manual_seed(7)
    model = Clicks()
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizers = {
        "sparse": torch.optim.SparseAdam(model.table.parameters(), lr=0.1),
        "dense": torch.optim.AdamW(model.head.parameters(), lr=0.1),
    }
    trainer = Trainer(Update(wrapped, optimizers, lambda model, batch: model(batch[0]).square().mean()))
    checkpoint = Checkpoint(directory, **{"delta_rows": ["table.*"], "keep_last": 1, **options})
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=every))
    return trainer, checkpoint


def train(directory: Path, max_iters: int = 8, **options: Any) -> tuple[Tensor, Checkpoint]:
    """The weights that a run ends with; one that has a checkpoint is resumed."""
    trainer, checkpoint = run_of(directory, **options)
    checkpoint.resume()
    trainer.run(loader(clicks(), batch_size=4, shuffle=True, seed=1), max_iters=max_iters)
    return one(trainer.update.model).clone(), checkpoint  # type: ignore[attr-defined]  # an Update


def needs(store: CheckpointStore) -> dict[int, list[int]]:
    return {each.iteration: [int(name[10:]) for name in each.manifest.needed] for each in store.checkpoints()}


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_each_checkpoint_is_that_of_a_run_that_saves_in_full(tmp_path: Path, background: bool) -> None:
    _, by_rows = train(tmp_path / "rows", keep_last=9, background=background)
    _, in_full = train(tmp_path / "full", keep_last=9, delta_rows=())
    assert needs(by_rows.store)[8] == [1, 2, 3, 4, 5, 6, 7]
    for each, other in zip(by_rows.store.checkpoints(), in_full.store.checkpoints(), strict=True):
        assert each.manifest.exact and each.manifest.healthy
        ours, theirs = by_rows.store.load(each.path), in_full.store.load(other.path)
        parts = ({**loaded.shared, **loaded.local} for loaded in (ours, theirs))
        assert all(part.same for part in compare(*parts))
    base, *others = (each.manifest.files["tables_0.pt"].bytes for each in by_rows.store.checkpoints())
    assert max(others) < base / 10


@pytest.mark.parametrize("background", [False, True])
def test_resumed_it_ends_with_the_same_bits(tmp_path: Path, background: bool) -> None:
    whole, _ = train(tmp_path / "whole", delta_rows=())
    train(tmp_path / "stopped", 5, background=background)
    ended, checkpoint = train(tmp_path / "stopped", background=background)
    assert torch.equal(ended, whole)
    assert needs(checkpoint.store) == {6: [], 7: [6], 8: [6, 7]}


# with at most three in a chain: bases at 1 and 4, rows at 2, 3, 5 and 6
KILLS = [
    ("write", ".tmp-iteration_00000003/tables_0.pt"),
    ("fsync", ".tmp-iteration_00000003/manifest.json"),
    ("rename", "-> iteration_00000003"),
    ("write", ".tmp-iteration_00000004/tables_0.pt"),
    ("rename", "-> iteration_00000004"),
    ("rename", "iteration_00000002 -> .trash-iteration_00000002"),
    ("unlink", ".trash-iteration_00000001/tables_0.pt"),
]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("background", [False, True], ids=["loop", "background"])
@pytest.mark.parametrize("at", KILLS, ids=" ".join)
def test_killed_in_a_save_of_rows_or_of_a_new_base_it_ends_with_the_same_bits(
    tmp_path: Path, at: tuple[str, str], background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_rows, "LONGEST", 3)

    def killed() -> None:
        with FileOperations(tmp_path / "killed", at=at, action=kill_this_process):
            train(tmp_path / "killed", background=background)

    torch.set_num_threads(1)  # a forked process has no other threads of torch
    assert in_child(killed)[0] == -signal.SIGKILL
    left = needs(CheckpointStore(tmp_path / "killed"))
    newest = list(left)[-1]
    assert newest in (2, 3, 4) and left[newest] == {2: [1], 3: [1, 2], 4: []}[newest]
    ended, checkpoint = train(tmp_path / "killed")
    assert torch.equal(ended, train(tmp_path / "whole", delta_rows=())[0])
    assert all(checkpoint.store.verify(each.path) == [] for each in checkpoint.store.checkpoints())


def test_after_a_save_that_failed_the_next_one_is_whole(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    with FileOperations(tmp_path / "run", at=("write", ".tmp-iteration_00000003/tables_0.pt"), action=full) as disk:
        ended, checkpoint = train(tmp_path / "run", keep_last=9, background=True)
    assert disk.acted == 1
    assert needs(checkpoint.store) == {1: [], 2: [1], 4: [], 5: [4], 6: [4, 5], 7: [4, 5, 6], 8: [4, 5, 6, 7]}
    assert torch.equal(ended, train(tmp_path / "whole", delta_rows=())[0])


def test_weights_that_are_not_finite_are_found_in_rows_that_did_not_change(tmp_path: Path) -> None:
    trainer, checkpoint = run_of(tmp_path, keep_last=9)

    @trainer.on(Events.ITERATION_COMPLETED(once=2))
    def break_a_row() -> None:
        with torch.no_grad():
            trainer.update.model.table.weight[-1] = torch.nan  # type: ignore[attr-defined]  # an Update

    data = TensorDataset(torch.randint(0, ROWS - 1, (64, 5), generator=torch.Generator().manual_seed(3)))
    trainer.run(loader(data, batch_size=4, shuffle=True, seed=1), max_iters=4)
    assert [each.manifest.healthy for each in checkpoint.store.checkpoints()] == [True, False, False, False]


def test_averages_and_other_runs_weights_are_read_as_ever(tmp_path: Path) -> None:
    trainer, checkpoint = run_of(tmp_path / "first")
    EMA(0.5).attach(trainer)
    trainer.run(loader(clicks(), batch_size=4, shuffle=True, seed=1), max_iters=3)
    average = trainer.registry.objects["ema"].state_dict()["weights"]
    manifest = checkpoint.store.checkpoints()[-1].manifest
    assert manifest.parts["tables_0.pt"] == ["model", "optimizer/sparse", "ema"] and manifest.needs

    second, checkpoint = run_of(tmp_path / "second")
    checkpoint.load(tmp_path / "first", LoadPlan.fine_tune(weights="ema"))
    found = second.update.model.state_dict()  # type: ignore[attr-defined]  # an Update
    assert all(torch.equal(found[name], average[name]) for name in average)


@pytest.mark.parametrize(
    ("patterns", "line"),
    [(["tabel.*"], r"delta_rows: '\*:tabel.\*' matches no name in this run; known: table.weight")],
)
def test_a_pattern_that_matches_no_table_is_refused_at_the_start(
    tmp_path: Path, patterns: list[str], line: str
) -> None:
    with pytest.raises(StateMismatch, match=line):
        train(tmp_path, delta_rows=patterns)


def test_tied_tables_are_saved_whole_which_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(7)
    model = Clicks()
    model.tied = model.table.weight  # type: ignore[assignment]  # a second name
    trainer = Trainer(
        Update(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch[0]).mean())
    )
    checkpoint = Checkpoint(tmp_path, delta_rows=["table.*"])
    checkpoint.attach(trainer)
    trainer.run(loader(clicks(), batch_size=4), max_iters=2)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("delta_rows: model table.weight are saved whole each time")
    assert list(checkpoint.store.checkpoints()[-1].manifest.files) == ["shared.pt", "rank_0.pt"]


def test_a_base_that_is_missing_is_named_where_a_run_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 3)
    (tmp_path / "iteration_00000001" / "tables_0.pt").unlink()
    _, checkpoint = run_of(tmp_path)
    with pytest.raises(CheckpointError, match="iteration_00000003 is damaged: it needs iteration_00000001, of which"):
        checkpoint.load(tmp_path / "iteration_00000003", LoadPlan.fine_tune())
    with pytest.raises(CheckpointError, match=r"None of the 3 checkpoints .* it needs iteration_00000001"):
        checkpoint.resume()
    skipped = [record.getMessage() for record in caplog.records if " is skipped: " in record.getMessage()]
    assert len(skipped) == 3 and "it needs iteration_00000001, of which tables_0.pt is missing" in skipped[0]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_save_and_resume_by_rows(tmp_path: Path) -> None:
    def cases(rank: int) -> dict[str, Any]:
        torch.set_num_threads(1)
        answers: dict[str, Any] = {}
        for background in (False, True):
            folder = tmp_path / str(background)
            whole, _ = train(folder / "whole", background=background)
            train(folder / "stopped", 5, background=background)
            ended, checkpoint = train(folder / "stopped", background=background)
            answers[f"{background}"] = [torch.equal(ended, whole), list(needs(checkpoint.store).values())]
        return answers

    answers = on_two_ranks(cases, tmp_path / "meeting")
    assert answers == {name: [[True, [[], [6], [6, 7]]]] * 2 for name in ("False", "True")}
