"""Tables saved by the rows that changed: what is on disk, what comes back, when a new base is written."""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ignite_engine.checkpointing import CheckpointError, CheckpointStore, Retention, changed_rows
from ignite_engine.checkpointing.contents import Extracted
from ignite_engine.checkpointing.filesystem import FileRecord
from ignite_engine.checkpointing.nested import replaced
from ignite_engine.checkpointing.part_file import read_parts, write_parts
from ignite_engine.checkpointing.plain_data import tensors_of
from ignite_engine.checkpointing.shards import Shards
from tests.checkpointing.file_faults import FileOperations
from tests.checkpointing.tables import ROWS, Saving, holds, loaded, parts, same
from tests.checkpointing.test_manifest import forge

TABLE = ("model", ("table.weight",))


def rows_in(checkpoint: Path, name: str = "tables_0.pt") -> dict[Any, tuple[Any, Tensor]]:
    """What a file of rows holds, by part and path."""
    files = CheckpointStore(checkpoint.parent).load(checkpoint).manifest.files
    contents = read_parts(checkpoint / name, files[name])
    return {(part, path): piece for part, pieces in contents.items() for path, piece in pieces.items()}


# -- what is on disk and what comes back ------------------------------------------------------------------------------


@pytest.mark.parametrize("writers", [1, 3])
def test_each_of_a_chain_comes_back_as_it_was_saved(tmp_path: Path, writers: int) -> None:
    saving = Saving(tmp_path)
    paths = {iteration: saving.save(iteration, writers=writers) for iteration in (3, 4, 5, 6)}
    assert saving.needs() == {3: [], 4: [3], 5: [3, 4], 6: [3, 4, 5]}
    for iteration, path in paths.items():
        assert holds(path, iteration) and saving.store.verify(path) == []
        assert same(CheckpointStore(tmp_path).load(path, mmap=True).shared, parts(iteration))


def test_only_the_rows_that_changed_are_written(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    base, path = saving.save(3), saving.save(4)
    written = rows_in(path)
    numbers, rows = written[TABLE]
    assert numbers.tolist() == list(range(4, ROWS, 40))
    assert torch.equal(rows, parts(4)["model"]["table.weight"][4::40])
    assert set(written) == set(rows_in(base)) == {
        TABLE,
        ("optimizer", ("state", "table.weight", "sum")),
        ("ema", ("weights", "table.weight")),
    }  # fmt: skip
    places = {numbers.data_ptr() for numbers, _ in written.values()}
    assert len(places) == 1  # the same rows of all three are numbered once


def test_a_base_is_in_several_files_where_several_writers_are_asked_for(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    base = CheckpointStore(tmp_path).load(saving.save(3, writers=4)).manifest
    path = saving.save(4)
    assert [name for name in base.files if name != "shared.pt"] == [f"tables_{number}.pt" for number in range(4)]
    assert list(CheckpointStore(tmp_path).load(path).manifest.files) == ["tables_0.pt", "shared.pt"] and holds(path, 4)


def test_where_no_row_changed_nothing_is_written(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.save(3)
    path = saving.save(4, parts(3))
    assert [each.name for each in sorted(path.iterdir())] == ["manifest.json", "shared.pt"]
    assert holds(path, 3) and holds(saving.save(5), 5) and saving.needs()[5] == [3]


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64,
          torch.float8_e4m3fn, torch.uint8)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(97,), (97, 3), (97, 2, 4), (97, 0)], ids=str)
def test_tables_of_any_type_and_shape(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    saving = Saving(tmp_path)
    table = torch.zeros(shape, dtype=dtype)
    saving.save(1, {"model": {"table.weight": table}})
    if table.numel():
        table.view(torch.uint8).reshape(97, -1)[11] = 1
    path = saving.save(2, {"model": {"table.weight": table.clone()}})
    assert same(loaded(path), {"model": {"table.weight": table}})
    if table.numel():
        assert rows_in(path)[TABLE][0].tolist() == [11]


def test_a_pattern_may_name_a_part(tmp_path: Path) -> None:
    saving = Saving(tmp_path, "model:table.*", "optimizer:table.*")
    saving.save(3)
    path = saving.save(4)
    assert {part for part, _ in rows_in(path)} == {"model", "optimizer"} and holds(path, 4)


def test_every_bit_counts(tmp_path: Path) -> None:
    """0.0 and -0.0, and NaNs of other bits, are other rows; a NaN that stays is none."""
    saving, table = Saving(tmp_path), torch.zeros(60, 3)
    words = table.view(torch.int32)
    words[5, 1] = 0x7FC00000
    words[7, 1] = 0x7FC00000
    saving.save(1, {"model": {"table.weight": table}})
    words[5, 1] = 0x7FC00001
    table[9, 2] = -0.0
    path = saving.save(2, {"model": {"table.weight": table}})
    assert rows_in(path)[TABLE][0].tolist() == [5, 9]
    assert same(loaded(path)["model"]["table.weight"], table)


def test_rows_of_more_than_one_chunk_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_rows, "_SPAN_BYTES", 17 * 20)
    monkeypatch.setattr(changed_rows, "_CHUNK_BYTES", 7 * 20)
    saving = Saving(tmp_path)
    saving.save(3)
    path = saving.save(4)
    assert rows_in(path)[TABLE][0].tolist() == list(range(4, ROWS, 40)) and holds(path, 4)


def test_what_changed_after_a_save_began_is_not_in_it(tmp_path: Path) -> None:
    """The rows are copies: a background save writes them while training goes on."""
    saving = Saving(tmp_path)
    for iteration in (3, 4):
        state = parts(iteration)
        kinds = {"optimizer": "optimizer"}
        placeholders, tables = saving.changed.take(state, tensors_of(state), kinds, iteration=iteration)
        shared = replaced(state, placeholders)
        state["model"]["table.weight"].fill_(9.0)
        held = [rows.clone() for pieces in tables.rows.values() for _, rows in pieces.values()]
        assert not any((rows == 9.0).all() for rows in held)
        path = saving.store.save(shared, {}, iteration=iteration, epoch=1, extracted=Extracted(Shards(), tables))
        saving.changed.committed(path)
        assert holds(path, iteration)


def test_what_shares_its_memory_or_is_not_contiguous_stays_whole(tmp_path: Path) -> None:
    saving, table = Saving(tmp_path, "*"), torch.arange(600.0).reshape(200, 3)
    turned = torch.arange(600.0).reshape(3, 200).t()
    state = {"model": {"table.weight": table, "tied.weight": table, "turned": turned, "bias": torch.zeros(200)}}
    assert saving.changed.stay_whole(state, tensors_of(state), {}) == [
        "model table.weight",
        "model tied.weight",
        "model turned",
    ]
    saving.save(1, state)
    path = saving.save(2, state)
    found = loaded(path)["model"]
    assert found["table.weight"].data_ptr() == found["tied.weight"].data_ptr()
    assert found["turned"].stride() == turned.stride() and same(found, state["model"])


# -- when a new base is written ---------------------------------------------------------------------------------------


def test_a_process_begins_with_a_base(tmp_path: Path) -> None:
    Saving(tmp_path).save(3)
    saving = Saving(tmp_path)
    saving.save(4)
    saving.save(5)
    assert saving.needs() == {3: [], 4: [], 5: [4]}


def full_disk() -> None:
    raise OSError(28, "No space left on device")


def test_after_a_save_that_failed_comes_a_base(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.save(3)
    with (
        FileOperations(tmp_path, at=("write", "tables_0.pt"), action=full_disk),
        pytest.raises(CheckpointError, match="No space left"),
    ):
        saving.save(4)
    assert holds(saving.save(5), 5) and saving.needs() == {3: [], 5: []}


def test_a_table_that_grew_or_appeared_comes_with_a_base(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    without = {**parts(3), "optimizer": {"state": {}, "param_groups": [{"params": ["table.weight"]}]}}
    saving.save(2, without)
    saving.save(3)
    saving.save(4)
    path = saving.save(5, parts(5, ROWS + 1))
    assert saving.needs() == {2: [], 3: [], 4: [3], 5: []} and same(loaded(path), parts(5, ROWS + 1))


def test_a_chain_of_which_a_file_is_gone_is_not_continued(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.save(3)
    shutil.rmtree(saving.save(4))
    assert holds(saving.save(5), 5) and saving.needs() == {3: [], 5: []}


@pytest.mark.slow
def test_a_chain_becomes_as_large_as_its_base(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    for iteration in range(1, 40):
        saving.save(iteration, parts(iteration, 4000))
    needs = saving.needs()
    bases = [iteration for iteration in needs if not needs[iteration]]
    assert len(bases) > 1 and bases[1] > 4
    sizes = [saving.store.load(tmp_path / f"iteration_{each:08d}").manifest.files for each in range(1, bases[1])]
    base, *others = (files["tables_0.pt"].bytes for files in sizes)
    assert base - others[0] < sum(others) < base + 4000  # the frame of a file is not counted
    for each in saving.store.checkpoints():
        assert same(loaded(each.path), parts(each.iteration, 4000))


def test_a_chain_has_a_greatest_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_rows, "LONGEST", 3)
    saving = Saving(tmp_path)
    for iteration in range(1, 6):
        saving.save(iteration)
    assert saving.needs() == {1: [], 2: [1], 3: [1, 2], 4: [], 5: [4]}


def test_the_same_iteration_again_is_a_base(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    for iteration in (3, 4, 4):
        path = saving.save(iteration)
    assert saving.needs() == {3: [], 4: []} and holds(path, 4)
    assert holds(saving.save(5), 5) and saving.needs()[5] == [4]


def test_a_run_that_went_back_does_not_take_away_what_others_need(tmp_path: Path) -> None:
    """Iteration 4 is saved again, and 5 needs the first one of it."""
    first = Saving(tmp_path)
    for iteration in (3, 4, 5):
        first.save(iteration)
    again = Saving(tmp_path)
    path = again.save(4, parts(6))
    assert path.name == "iteration_00000004.1" and same(loaded(path), parts(6))
    assert holds(tmp_path / "iteration_00000005", 5) and again.store.verify(tmp_path / "iteration_00000005") == []
    path = again.save(5)
    assert path.name == "iteration_00000005" and holds(path, 5)
    assert again.store.latest().checkpoint.path == path  # type: ignore[union-attr]  # there is one
    again.store.apply(Retention(keep_last=1))
    assert {each.name for each in tmp_path.iterdir()} == {"iteration_00000004.1", "iteration_00000005"}
    assert holds(path, 5)


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_what_a_kept_one_needs_is_not_deleted(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    for iteration in (3, 4, 5):
        saving.save(iteration)
        assert saving.store.apply(Retention(keep_last=1)) == []
    fresh = Saving(tmp_path)
    fresh.save(6)
    gone = fresh.store.apply(Retention(keep_last=1))
    assert [each.name for each in gone] == [f"iteration_0000000{each}" for each in (3, 4, 5)]
    assert fresh.needs() == {6: []}


def test_the_best_and_pinned_ones_keep_what_they_need(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    for iteration, loss in ((3, 3.0), (4, 1.0), (5, 2.0), (6, 2.5)):
        saving.save(iteration, metrics={"loss": loss})
    fresh = Saving(tmp_path)
    fresh.save(7, metrics={"loss": 4.0})
    fresh.store.apply(Retention(keep_last=1, best="loss"))
    assert fresh.needs() == {3: [], 4: [3], 7: []}
    fresh.store.annotate(tmp_path / "iteration_00000003", pinned=True, labels=["base"])  # changes no file of rows
    fresh.save(8)
    assert fresh.store.apply(Retention(keep_last=1)) == [tmp_path / "iteration_00000004"]
    assert fresh.needs() == {3: [], 7: [], 8: [7]}


def test_the_last_healthy_one_keeps_what_it_needs(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.save(3)
    saving.save(4)
    fresh = Saving(tmp_path)
    for iteration in (5, 6, 7):
        fresh.save(iteration, healthy=False)
    fresh.store.apply(Retention(keep_last=1))
    assert fresh.needs() == {3: [], 4: [3], 5: [], 6: [5], 7: [5, 6]}


def test_none_goes_before_one_that_needs_it(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    for iteration in (3, 4, 5):
        saving.save(iteration)
    fresh = Saving(tmp_path)
    fresh.save(6)
    with FileOperations(tmp_path) as seen:
        fresh.store.apply(Retention(keep_last=1))
    renamed = [path.split(" ->")[0] for operation, path in seen.seen if operation == "rename"]
    assert renamed == [f"iteration_0000000{each}" for each in (5, 4, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_saved_pruned_and_started_again_all_that_is_there_is_whole(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_rows, "LONGEST", 3)
    draw, saving, state, iteration = random.Random(seed), Saving(tmp_path), parts(1), 1
    saved: dict[int, Any] = {}
    for _ in range(25):
        action = draw.choice(["save", "save", "save", "prune", "start again", "pin"])
        if action == "save":
            iteration = max(1, iteration + draw.choice([1, 1, 1, 0, -1]))
            rows = torch.tensor(draw.sample(range(ROWS), draw.randint(0, 150)), dtype=torch.int64)
            state["model"]["table.weight"][rows] += 1
            saving.save(iteration, state, writers=draw.choice([1, 3]), healthy=draw.random() < 0.8)
            saved[saving.store.checkpoints()[-1].manifest.sequence] = copy.deepcopy(state)
        elif action == "prune":
            saving.store.apply(Retention(keep_last=draw.randint(1, 3), keep_every=draw.choice([None, 3])))
        elif action == "start again":
            saving = Saving(tmp_path)
        elif there := saving.store.checkpoints():
            saving.store.annotate(draw.choice(there).path, pinned=draw.random() < 0.5)
        for each in saving.store.checkpoints():
            assert saving.store.verify(each.path) == []
            assert same(loaded(each.path), saved[each.manifest.sequence])


# -- what is damaged --------------------------------------------------------------------------------------------------


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [torn, flipped, Path.unlink], ids=["torn", "flipped", "missing"])
def test_damaged_rows_are_named_and_the_checkpoint_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    saving = Saving(tmp_path)
    for iteration in (3, 4, 5, 6):
        saving.save(iteration)
    damage(tmp_path / "iteration_00000005" / "tables_0.pt")
    newest, skipped = CheckpointStore(tmp_path).latest()
    assert newest is not None and newest.iteration == 4 and holds(newest.path, 4)
    assert [(path.name, reason.split(" tables_0.pt ")[0]) for path, reason in skipped] == [
        ("iteration_00000006", "it needs iteration_00000005, of which"),
        ("iteration_00000005", skipped[1][1].split(" tables_0.pt ")[0]),
    ]
    assert skipped[1][1].startswith("tables_0.pt ")
    with pytest.raises(CheckpointError, match="iteration_00000006 is damaged: it needs iteration_00000005, of which"):
        CheckpointStore(tmp_path).load(tmp_path / "iteration_00000006")


def test_without_its_base_a_chain_is_refused_and_the_checkpoint_before_is_taken(tmp_path: Path) -> None:
    Saving(tmp_path).save(2)
    saving = Saving(tmp_path)
    for iteration in (3, 4, 5):
        saving.save(iteration)
    shutil.rmtree(tmp_path / "iteration_00000003")
    store = CheckpointStore(tmp_path)
    newest, skipped = store.latest()
    assert newest is not None and newest.iteration == 2
    reason = "it needs iteration_00000003, of which tables_0.pt is missing"
    assert [reason for _, reason in skipped] == [reason, reason]
    assert store.apply(Retention(keep_last=1)) == []  # what is damaged is not counted, and not deleted
    assert {each.iteration for each in store.checkpoints()} == {2, 4, 5}


@pytest.mark.parametrize("broken", [3, 4])
def test_a_chain_that_was_changed_on_disk_is_ended_by_a_new_base(
    tmp_path: Path, broken: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One flipped bit in it makes all that need it invalid; those after the next save do not."""
    saving = Saving(tmp_path)
    for iteration in (3, 4, 5):
        saving.save(iteration)
    file = tmp_path / f"iteration_{broken:08}" / "tables_0.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    before = CheckpointStore(tmp_path).latest().checkpoint
    assert (None if before is None else before.iteration) == (None if broken == 3 else 3)
    caplog.clear()
    path = saving.save(6)
    (line,) = caplog.messages[-1:]
    assert line.startswith(f"The next checkpoint has all rows, as iteration_{broken:08} is not what was saved: ")
    assert saving.needs()[6] == [] and holds(path, 6)
    newest = CheckpointStore(tmp_path).latest().checkpoint
    assert newest is not None and newest.iteration == 6
    assert saving.save(7) and saving.needs()[7] == [6]


def test_a_chain_whose_times_alone_changed_goes_on(tmp_path: Path) -> None:
    """Its files are read again once; no file that stays as it is is read."""
    saving = Saving(tmp_path)
    saving.save(3)
    os.utime(tmp_path / "iteration_00000003" / "tables_0.pt")
    saving.save(4)
    assert saving.needs()[4] == [3]
    with FileOperations(tmp_path) as operations:
        saving.save(5)
    assert saving.needs()[5] == [3, 4] and not [
        each for each in operations.seen if each[0] == "open" and "tables_0" in each[1] and "00000003" in each[1]
    ]


def test_one_without_its_base_does_not_count_among_the_last_that_are_kept(tmp_path: Path) -> None:
    for iteration in (1, 2):
        Saving(tmp_path).save(iteration)
    saving = Saving(tmp_path)
    for iteration in (3, 4, 5):
        saving.save(iteration)
    shutil.rmtree(tmp_path / "iteration_00000003")
    assert CheckpointStore(tmp_path).apply(Retention(keep_last=2)) == []


def test_another_base_of_the_same_name_is_refused(tmp_path: Path) -> None:
    saving = Saving(tmp_path / "own")
    saving.save(3)
    path = saving.save(4)
    other = Saving(tmp_path / "other").save(3, parts(9))
    shutil.rmtree(tmp_path / "own" / "iteration_00000003")
    shutil.copytree(other, tmp_path / "own" / "iteration_00000003")
    (problem,) = CheckpointStore(tmp_path / "own").verify(path)
    assert problem.startswith("it needs iteration_00000003, of which tables_0.pt has changed: BLAKE3 ")


def test_a_base_that_is_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    saving = Saving(tmp_path / "own")
    base, path = saving.save(3), saving.save(4)
    base.rename(tmp_path / "elsewhere")
    base.symlink_to(tmp_path / "elsewhere")
    assert CheckpointStore(tmp_path / "own").verify(path) == [
        "it needs iteration_00000003, of which it is a symbolic link"
    ]


ELSEWHERE = ["../x/tables_0.pt", "/tables_0.pt", "iteration_00000003/shared.pt", "tables_0.pt",
             "iteration_00000003/../x/tables_0.pt", "iteration_00000003\n/tables_0.pt"]  # fmt: skip


def test_a_checkpoint_may_be_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path)
    saving.save(3)
    monkeypatch.chdir(saving.save(4))
    for here in (Path(), Path("../iteration_00000004"), Path("../iteration_00000003/../iteration_00000004")):
        assert CheckpointStore(here.parent).verify(here) == [] and holds(here, 4)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_needs_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    saving = Saving(tmp_path)
    saving.save(3)
    path = saving.save(4)
    forge(path, lambda content: content.__setitem__("needs", {name: {"bytes": 1, "hash": ""}}))
    (problem,) = saving.store.verify(path)
    assert "is not a file of a checkpoint beside it" in problem and "\n" not in problem


def rewrite(checkpoint: Path, change: Callable[[Any, Tensor], Any]) -> None:
    """Change the rows of the model's table, with the right hash in the manifest."""
    path = checkpoint / "tables_0.pt"
    found: dict[str, dict[Any, Any]] = {}
    for (part, place), piece in rows_in(checkpoint).items():
        found.setdefault(part, {})[place] = change(*piece) if (part, place) == TABLE else piece
    path.unlink()
    record: FileRecord = write_parts(path, found)
    forge(checkpoint, lambda content: content["files"].__setitem__(path.name, vars(record)))


FORGED: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda numbers, rows: (numbers + ROWS, rows), f"model table.weight has changed rows beyond its {ROWS}"),
    (lambda numbers, rows: (numbers - ROWS, rows), "has changed rows beyond"),
    (lambda numbers, rows: (numbers[:-1].clone(), rows), "has rows without a number for each"),
    (lambda numbers, rows: (numbers.flip(0), rows), "has changed rows out of their order"),
    (lambda numbers, rows: (numbers[:1].expand(len(numbers)).clone(), rows), "has changed rows out of their order"),
    (lambda numbers, rows: (numbers.double(), rows), "has rows without a number for each"),
    (lambda numbers, rows: (numbers, rows.double()), "has rows of another type or shape"),
    (lambda numbers, rows: (numbers, rows[:, 1:].clone()), "has rows of another type or shape"),
    (lambda numbers, rows: (0, rows), "has other rows than its own"),
    (lambda numbers, rows: (None, rows), "does not hold rows of tensors"),
    (lambda numbers, rows: (numbers.tolist(), rows), "does not hold rows of tensors"),
    (lambda numbers, rows: rows, "does not hold rows of tensors"),
]


@pytest.mark.parametrize(("change", "line"), FORGED, ids=range(len(FORGED)))
def test_forged_rows_are_refused(tmp_path: Path, change: Callable[[Any, Tensor], Any], line: str) -> None:
    saving = Saving(tmp_path)
    saving.save(3)
    path = saving.save(4)
    rewrite(path, change)
    (problem,) = CheckpointStore(tmp_path).verify(path)
    assert line in problem
    with pytest.raises(CheckpointError, match=line):
        CheckpointStore(tmp_path).load(path)
    assert CheckpointStore(tmp_path).latest().checkpoint.iteration == 3  # type: ignore[union-attr]  # there is one
