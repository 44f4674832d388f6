"""Large tensors in files of their own, by rows: what goes there, how it is shared out, what comes back."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ignite_engine.checkpointing import CheckpointError, CheckpointStore, part_file
from ignite_engine.checkpointing.contents import Extracted
from ignite_engine.checkpointing.digests import tensor_sha256
from ignite_engine.checkpointing.nested import replaced
from ignite_engine.checkpointing.part_file import read_parts, write_parts
from ignite_engine.checkpointing.plain_data import tensors_of
from ignite_engine.checkpointing.rows import ROWS_FILE, shared_out, take_out
from ignite_engine.checkpointing.threads import in_threads
from tests.checkpointing.file_faults import FileOperations
from tests.checkpointing.test_manifest import forge

ROWS = 1 << 15


def large(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    words = torch.randint(
        0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return (words % 2 if dtype == torch.bool else words).view(dtype).reshape(shape)


def parts(seed: int = 1) -> dict[str, Any]:
    """Tables of many types, beside what is small or is not a table of its own."""
    tied = large(seed, ROWS, 9)
    tables = {
        str(dtype): large(seed, ROWS, 1 + 40 // dtype.itemsize, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
    }
    return {
        "model": {**tables, "column": large(seed, 1 << 19), "bias": large(seed, 3), "empty": torch.empty(0, 5)},
        "others": {
            "tied": [tied, tied],
            "view": large(seed, ROWS, 20)[10:],
            "turned": large(seed, 20, ROWS).t(),
            "trained": large(seed, ROWS, 9).requires_grad_(),
            "cube": large(seed, 70, 70, 70),
        },
    }


def save(directory: Path, writers: int, saved: dict[str, Any], iteration: int = 1) -> Path:
    return CheckpointStore(directory).save(
        saved, {}, iteration=iteration, epoch=1, extracted=Extracted(writers=writers)
    )


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return (
        (first.stride(), first.requires_grad) == (second.stride(), second.requires_grad)
        and tensor_sha256(first) == tensor_sha256(second)
    )  # fmt: skip


@pytest.mark.parametrize("writers", [2, 3])
def test_what_several_writers_wrote_comes_back_as_it_was(tmp_path: Path, writers: int) -> None:
    path = save(tmp_path, writers, parts())
    store = CheckpointStore(tmp_path)
    files = store.checkpoints()[0].manifest.files
    own = [name for name in files if ROWS_FILE.fullmatch(name)]

    assert len(own) == writers and store.verify(path) == []
    sizes = [files[name].bytes for name in own]
    assert max(sizes) < 1.02 * min(sizes)
    for mmap in (False, True):
        loaded = store.load(path, mmap=mmap).shared
        assert same(loaded, parts())
    first, second = loaded["others"]["tied"]
    assert first.data_ptr() == second.data_ptr()


def test_only_what_is_large_and_nothing_but_its_rows_is_taken_out() -> None:
    saved = parts()
    placeholders, rows = take_out(tensors_of(saved))
    without = replaced(saved, placeholders)
    assert {path[0] for path in rows["model"]} == set(saved["model"]) - {"bias", "empty"}
    assert set(rows["others"]) == {("cube",)}
    assert without["model"]["column"].is_meta and without["others"]["tied"][0] is saved["others"]["tied"][0]


def test_shares_are_cut_without_a_copy() -> None:
    table = large(1, ROWS, 16)
    shares = shared_out({"model": {("table",): (0, table)}}, 4)
    pieces = [share["model"]["table",] for share in shares]
    assert [first for first, _ in pieces] == [0, ROWS // 4, ROWS // 2, 3 * ROWS // 4]
    assert [rows.data_ptr() for _, rows in pieces] == [table[first].data_ptr() for first, _ in pieces]
    assert [rows.untyped_storage().nbytes() for _, rows in pieces] == [table.nbytes // 4] * 4


def test_there_are_no_more_shares_than_rows() -> None:
    shares = shared_out({"model": {("a",): (0, torch.ones(1, 8)), ("b",): (0, torch.ones(2, 8))}}, 7)
    assert [list(share["model"]) for share in shares] == [[("a",)], [("b",)], [("b",)]]


def test_a_state_is_in_one_file_unless_it_is_asked_otherwise(tmp_path: Path) -> None:
    def files(writers: int | None, iteration: int) -> list[str]:
        path = CheckpointStore(tmp_path).save(
            parts(), {}, iteration=iteration, epoch=1, extracted=Extracted(writers=writers)
        )
        assert same(CheckpointStore(tmp_path).load(path).shared, parts())
        return sorted(each.name for each in path.iterdir())

    assert files(None, 1) == files(1, 2) == ["manifest.json", "shared.pt"]
    assert files(2, 3) == ["manifest.json", "rows_0.pt", "rows_1.pt", "shared.pt"]
    small = save(tmp_path, 4, {"model": {"bias": torch.ones(3)}}, iteration=4)
    assert [each.name for each in sorted(small.iterdir())] == ["manifest.json", "shared.pt"]


def test_writers_write_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits until all three have begun: one after the other, they would wait for ever."""
    all_begun = threading.Barrier(3, timeout=30)

    def waiting(path: Path, contents: Any, *tensors: Any) -> Any:
        if ROWS_FILE.fullmatch(path.name):
            all_begun.wait()
        return write_parts(path, contents, *tensors)

    monkeypatch.setattr("ignite_engine.checkpointing.commit.write_parts", waiting)
    path = save(tmp_path, 3, parts())
    assert same(CheckpointStore(tmp_path).load(path).shared, parts())


def full_disk() -> None:
    raise OSError(28, "No space left on device")


def test_a_file_of_rows_that_cannot_be_written_fails_the_save(tmp_path: Path) -> None:
    save(tmp_path, 2, parts())
    with (
        FileOperations(tmp_path, at=("write", "rows_1.pt"), action=full_disk) as disk,
        pytest.raises(CheckpointError, match=r"No space left on device \(.*/rows_1.pt, .*earlier checkpoints are"),
    ):
        save(tmp_path, 2, parts(2), iteration=2)
    assert disk.acted == 1 and [each.name for each in tmp_path.iterdir()] == ["iteration_00000001"]


def test_when_one_has_failed_all_have_ended() -> None:
    ended = []
    all_begun = threading.Barrier(4, timeout=30)

    def work(number: int) -> None:
        all_begun.wait()
        if number == 0:
            raise OSError(28, "full")
        time.sleep(0.01)
        ended.append(number)

    with pytest.raises(OSError, match="full"):
        in_threads(work, range(4), 4)
    assert sorted(ended) == [1, 2, 3]


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = [(torn, "rows_1.pt has .* bytes"), (flipped, "rows_1.pt has changed"), (Path.unlink, "rows_1.pt is missing")]


@pytest.mark.parametrize(("damage", "line"), DAMAGE, ids=["torn", "flipped", "missing"])
def test_a_damaged_file_of_rows_is_named_and_the_checkpoint_before_is_taken(
    tmp_path: Path, damage: Any, line: str
) -> None:
    first, second = save(tmp_path, 2, parts()), save(tmp_path, 2, parts(2), iteration=2)
    damage(second / "rows_1.pt")
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=f"iteration_00000002 is damaged: {line}"):
        store.load(second)
    newest, ((path, _),) = store.latest()
    assert newest is not None and newest.path == first and path == second
    assert same(store.load(first).shared, parts())


def rewrite(checkpoint: Path, change: Any) -> None:
    """Change what is in ``rows_0.pt``, with the right hash in the manifest."""
    manifest = CheckpointStore(checkpoint.parent).checkpoints()[0].manifest
    path = checkpoint / "rows_0.pt"
    contents = read_parts(path, manifest.files[path.name])
    path.unlink()
    record = write_parts(path, change(contents))
    forge(checkpoint, lambda content: content["files"].__setitem__(path.name, vars(record)))


def each(change: Callable[[int, Tensor], Any]) -> Callable[[Any], Any]:
    return lambda rows: {"model": {path: change(first, values) for path, (first, values) in rows["model"].items()}}


FORGED: list[tuple[Callable[[Any], Any], str]] = [
    (each(lambda first, values: (1, values)), "from row 0 on"),
    (each(lambda first, values: (0, values[:-1].clone())), f"from row {ROWS // 2 - 1} on"),
    (each(lambda first, values: (0, values.double())), "has rows of another type or shape than torch.float32"),
    (each(lambda first, values: values), "does not hold rows"),
    (each(lambda first, values: ("0", values)), "does not hold rows"),
    (lambda rows: {"other": rows["model"]}, "from row 0 on"),
    (lambda rows: {"model": 7}, "does not hold rows of tensors"),
]


@pytest.mark.parametrize(("change", "line"), FORGED)
def test_rows_that_do_not_make_up_a_tensor_are_refused(tmp_path: Path, change: Any, line: str) -> None:
    path = save(tmp_path, 1 + 1, {"model": {"table": large(1, ROWS, 16)}})
    rewrite(path, change)
    store = CheckpointStore(tmp_path)
    (problem,) = store.verify(path)
    assert store.latest().checkpoint is None
    with pytest.raises(CheckpointError, match=line):
        store.load(path)
    assert "is damaged" in problem


def test_part_files_are_what_torch_reads_safely(tmp_path: Path) -> None:
    path = save(tmp_path, 2, parts())
    assert part_file.plain_data_problem(path / "rows_0.pt") is None


@pytest.mark.parametrize("fault", ["shorter", "disk"])
def test_a_file_that_fails_while_it_is_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Neither is seen when the files are verified; a mapping would end the process by SIGBUS."""
    path = save(tmp_path, 2, parts())
    preadv = os.preadv

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        if "rows_" not in os.readlink(f"/proc/self/fd/{descriptor}"):
            return preadv(descriptor, buffers, offset)
        if fault == "disk":
            raise OSError(errno.EIO, "Input/output error")
        os.truncate(path / "rows_1.pt", 0)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    reason = "It has become shorter while it was read" if fault == "shorter" else "Input/output error"
    with pytest.raises(CheckpointError, match=rf"^.*_00000001 cannot be read: {reason} \(.*/rows_\d.pt\)\.$"):
        CheckpointStore(tmp_path).load(path)
