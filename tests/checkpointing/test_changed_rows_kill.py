"""SIGKILL at every file operation of a chain's saves, of the new base that ends it, and of the prune after that."""

from __future__ import annotations

from pathlib import Path

import pytest

from ignite_engine.checkpointing import CheckpointStore, Retention, changed_rows
from tests.checkpointing.states import left_over
from tests.checkpointing.tables import Saving, holds
from tests.checkpointing.test_kill import kill_everywhere

# slow: test_kill.py has that of other saves
pytestmark = [pytest.mark.faults, pytest.mark.long]


def test_wherever_it_is_killed_the_newest_one_loads_and_saving_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_rows, "LONGEST", 2)
    template, newest_was = tmp_path / "template", [2]
    Saving(template).save(2)

    def work(directory: Path) -> None:
        saving = Saving(directory)
        for iteration in (3, 4, 5):  # a base, the rows that changed, a base, after which both are deleted
            saving.save(iteration)
            saving.store.apply(Retention(keep_last=1))

    def check(directory: Path, number: int, first_rename: int) -> None:
        store = CheckpointStore(directory)
        newest, skipped = store.latest()
        assert newest is not None and skipped == []
        assert holds(newest.path, newest.iteration)
        assert all(store.verify(each.path) == [] and holds(each.path, each.iteration) for each in store.checkpoints())
        newest_was.append(newest.iteration)
        store.sweep()
        assert left_over(directory) == []
        again = Saving(directory)
        again.save(6)
        again.save(7)
        again.store.apply(Retention(keep_last=1))
        assert again.needs() == {6: [], 7: [6]} and holds(directory / "iteration_00000007", 7)

    assert kill_everywhere(template, work, check) > 60
    assert newest_was == sorted(newest_was) and set(newest_was) == {2, 3, 4, 5}
