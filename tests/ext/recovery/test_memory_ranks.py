"""Copies in memory of several ranks: on as many, on others, in another layout, and where some are missing."""

import os

import pytest

from tests.ext.recovery.deaths import Death, copies_of, slots_of
from tests.ext.recovery.runs import KILLED, ends, once, said, starts, train, whole
from tests.kit.processes import start_ranks


@pytest.mark.row("K4")
@pytest.mark.parametrize(
    ("before", "now", "worlds"),
    [
        ("ddp", "ddp", (2, 1)),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("ddp", "ddp", (1, 2)), ("fsdp", "plain", (2, 1)), ("ddp", "fsdp", (2, 2)))
        ),
    ],
    ids=["fewer ranks", "more ranks", "sharded, then not", "not sharded, then so"],
)
def test_on_other_ranks_or_in_another_layout_it_goes_on_as_from_disk(before, now, worlds, tmp_path):
    """One copy is resumed from memory, one checkpoint of the same iteration from disk."""
    found = {}
    for place, memory in (("memory", 1), ("disk", None)):
        options = {"memory": memory, "save_every": 4, "samples": 48}
        codes = once(tmp_path / place, [Death(5, rank=rank) for rank in range(worlds[0])], before, worlds[0], **options)
        assert codes == [KILLED] * worlds[0]
        found[place] = whole(tmp_path / place, now, worlds[1], **options)
        assert starts(tmp_path / place) == [0, 4]
    words = said(tmp_path / "memory")
    assert "Resumed from memory" in words and "may not resume bit for bit" in words
    assert [each["weights"] for each in found["memory"]] == [each["weights"] for each in found["disk"]]
    assert copies_of(tmp_path) == []


def tear(path):
    with path.open("r+b") as file:
        file.seek(4096 + 64)
        file.write(b"torn")


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("what", ["torn", "missing"])
def test_what_one_rank_lacks_no_rank_takes(layout, what, tmp_path):
    folder = tmp_path / "run"
    assert set(once(folder, [Death(6), Death(6, rank=1)], layout, save_every=3)) == {KILLED}
    if what == "torn":
        tear(slots_of(folder, 1)[-1])
    else:
        for path in slots_of(folder, 1):
            path.unlink()
    whole(folder, layout, save_every=3)

    assert [starts(folder, rank)[-1] for rank in range(2)] == [4 if what == "torn" else 3] * 2


def test_killed_where_no_peer_learns_of_it_one_iteration_is_lost_and_no_bit(tmp_path):
    """These ranks are not watched; that of a failed collective keeps its copies."""
    expected = whole(tmp_path / "whole", "ddp", memory=None)
    assert once(tmp_path / "run", [Death(7, rank=1)], "ddp") == [1, KILLED]
    assert whole(tmp_path / "run", "ddp") == expected == ends(tmp_path / "run", "ddp")
    assert starts(tmp_path / "run") == [0, 6]


def test_slots_of_ranks_that_are_no_more_go_with_the_second_copy(tmp_path):
    """Until then a start on all ranks finds theirs."""
    folder, four = tmp_path / "run", ["rank_0.0", "rank_0.1", "rank_1.0", "rank_1.1"]
    once(folder, [Death(5), Death(5, rank=1)], "ddp")
    for death, names in ((Death(5, "ITERATION_STARTED"), four), (Death(6), four), (Death(8), four[:2])):
        assert once(folder, [death], "ddp", world=1, samples=48) == [KILLED]
        assert sorted(path.name for path in slots_of(folder)) == names
    assert starts(folder) == [0, 4, 4, 5]


def test_where_one_rank_has_no_room_no_rank_copies(tmp_path):
    def one_rank(rank):
        if rank == 1:

            def full(descriptor, offset, size):
                raise OSError(28, "No space left on device")

            os.posix_fallocate = full
        return train(rank, tmp_path / "run", layout="ddp")

    assert [each.wait() for each in start_ranks(2, one_rank)] == [0, 0]
    assert "No space left" in said(tmp_path / "run") and copies_of(tmp_path) == []
