"""A run that was killed goes on from the copy of its state in memory, to the bits of one that was not."""

import os
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from ignite.engine import Events

from ignite_engine.handlers import Checkpoint
from tests.ext.recovery.deaths import SHARED_MEMORY, Death, copies_of, slots_of
from tests.ext.recovery.runs import (
    KILLED,
    WORLDS,
    alone,
    ends,
    forget,
    once,
    said,
    starts,
    supervised,
    train,
    whole,
)
from tests.kit.clock import still_clock
from tests.kit.faults import can_mount, kill_this_process, mount_small_file_system
from tests.kit.processes import child, ended, start, start_ranks, wait_until
from tests.kit.tiers import tiered
from tests.kit.tiny import linear, trainer_of, weights


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a run without copies ends with on each rank, by layout."""
    found = {}

    def of(layout="plain"):
        if layout not in found:
            folder = tmp_path_factory.mktemp("whole") / layout
            run = [alone(folder)] if layout == "plain" else whole(folder, layout, memory=None)
            found[layout] = run
        return found[layout]

    return of


ANYWHERE = (
    Death(3, "OPTIMIZER_STEP_STARTED"),
    Death(8),  # at a save
    Death(10, "RESUME_POINT"),  # after the copy
    Death(12, "EPOCH_COMPLETED"),  # between the two boundaries of an epoch's end
    Death(24),
)


@pytest.mark.row("K1", "K3")
@pytest.mark.parametrize(
    ("layout", "memory", "deaths", "begun"),
    [
        ("plain", 1, ANYWHERE, [0, 2, 7, 10, 11, 23]),
        ("plain", 4, [Death(7), Death(12), Death(16), Death(22)], [0, 4, 8, 12, 20]),
        pytest.param("ddp", 1, [Death(3), Death(7, rank=1)], [0, 2, 6], marks=pytest.mark.nightly),
        pytest.param("fsdp", 1, [Death(6, rank=1)], [0, 5], marks=pytest.mark.nightly),
        ("fsdp", "auto", [Death(5, rank=1)], [0, 4]),  # the first ones, by which it measures
    ],
    ids=lambda value: str(value) if isinstance(value, str | int) else "",
)
def test_killed_again_and_again_one_iteration_is_lost_each_time_and_no_bit(
    layout, memory, deaths, begun, tmp_path, undisturbed
):
    folder = tmp_path / "run"
    supervised(folder, deaths, layout, memory=memory)

    assert all((folder / death.marker).exists() for death in deaths)
    assert [starts(folder, rank) for rank in range(WORLDS[layout])] == [begun] * WORLDS[layout]
    assert ends(folder, layout) == undisturbed(layout)
    from_disk = sum(at in (0, 8, 16) for at in begun)
    assert said(folder).count("Resumed from memory") >= len(begun) - from_disk
    assert copies_of(tmp_path) == [] and not (folder / "checkpoints" / ".memory").exists()


def test_killed_while_a_copy_is_written_the_one_before_it_is_resumed(tmp_path):
    folder, reached = tmp_path / "run", []

    def prepare(trainer, checkpoint):
        values = torch.zeros(3_000_000)  # a copy takes milliseconds
        load = lambda state: values.copy_(state["values"])  # noqa: E731
        trainer.register("ballast", SimpleNamespace(state_dict=lambda: {"values": values}, load_state_dict=load))
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: values.fill_(trainer.state.iteration))

        @trainer.on(Events.STARTED)
        def is_whole():
            assert (values == trainer.state.iteration).all(), "a torn copy"

    def work():
        train(0, folder, prepare=prepare, save_every=100)

    def newest():
        return int((folder / "at_0").read_text())

    def first_bytes():
        return [path.open("rb").read(64) for path in sorted(slots_of(tmp_path))]

    for _ in range(3):
        begun = starts(folder)[-1] if reached else 0
        process = start(work)
        wait_until(lambda begun=begun: len(slots_of(tmp_path)) == 2 and newest() > begun + 2, process)
        before = first_bytes()
        while first_bytes() == before:
            assert process.poll() is None
        process.signal(signal.SIGKILL)
        assert process.wait() == KILLED
        reached.append(newest())
    child(work)

    lost = [at - begun for at, begun in zip(reached, starts(folder)[1:], strict=True)]
    assert set(lost) <= {0, 1} and 1 in lost


def test_killed_before_its_first_copy_a_resumed_run_still_has_the_one_that_it_came_from(tmp_path, undisturbed):
    for death in (Death(6), Death(5, "STARTED"), Death(6, "ITERATION_STARTED")):
        assert once(tmp_path / "run", [death]) == [KILLED]
    assert alone(tmp_path / "run") == undisturbed()[0]
    assert starts(tmp_path / "run") == [0, 5, 5, 5]


# ----------------------------------------------------------------------------------------------------- what is not used


def damage(path, offset=9000):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def delete(folder, name):
    shutil.rmtree(folder / "checkpoints" / name)


def start_without_memory(folder):
    assert once(folder, [Death(11, "ITERATION_STARTED")], memory=None, save_every=5) == [KILLED]


BETWEEN = {
    "nothing": (lambda folder: None, 12, "from memory"),
    "the newest slot is damaged": (lambda folder: damage(slots_of(folder)[-1]), 11, "torn or damaged"),
    "both are damaged": (lambda folder: [damage(path) for path in slots_of(folder)], 10, "torn or damaged"),
    "both headers are damaged": (lambda folder: [damage(path, 30) for path in slots_of(folder)], 10, "torn or damaged"),
    "the newest checkpoint is deleted": (lambda folder: delete(folder, "iteration_00000010"), 5, "is gone"),
    "all checkpoints are deleted": (lambda folder: delete(folder, ""), 0, ""),
    "it was started without memory": (start_without_memory, 10, ""),
}


@pytest.mark.parametrize(
    "what",
    tiered(BETWEEN, "the newest slot is damaged", "both are damaged", "the newest checkpoint is deleted", "nothing"),
)
def test_of_a_copy_and_the_disk_the_newest_that_is_whole_is_resumed(what, tmp_path, undisturbed):
    act, begun, words = BETWEEN[what]
    folder = tmp_path / "run"
    assert once(folder, [Death(13)], save_every=5) == [KILLED]
    act(folder)
    end = alone(folder, save_every=5)

    assert starts(folder)[-1] == begun
    assert words in said(folder)
    assert end["weights"] == undisturbed()[0]["weights"]
    assert copies_of(tmp_path) == []


def test_a_copy_of_other_settings_or_another_user_is_not_used(tmp_path):
    folder = tmp_path / "run"
    assert once(folder, [Death(13)], config={"lr": 0.1}) == [KILLED]

    def as_another_user():
        os.geteuid = lambda: 12345
        train(0, folder, [Death(14)], config={"lr": 0.1})

    assert ended(as_another_user)[0] == KILLED
    assert len(slots_of(tmp_path)) == 2
    alone(folder, config={"lr": 0.2})
    assert starts(folder) == [0, 8, 8] and "other settings" in said(folder)


def test_a_moved_folder_finds_its_copies_and_a_copied_one_does_not_take_them(tmp_path, undisturbed):
    old, moved, copied = (tmp_path / name for name in ("old", "moved", "copied"))
    assert once(old, [Death(13)]) == [KILLED]
    shutil.copytree(old, copied)
    results = [alone(copied)]
    old.rename(moved)
    results.append(alone(moved))

    assert (starts(copied)[-1], starts(moved)[-1]) == (8, 12)
    assert results == 2 * undisturbed()
    assert copies_of(tmp_path) == []


def test_a_fresh_start_forgets_what_an_earlier_run_has_copied(tmp_path):
    folder = tmp_path / "run"
    assert once(folder, [Death(5)], seed=1) == [KILLED]
    assert once(folder, [Death(1)], resume=False) == [KILLED]
    alone(folder)
    assert starts(folder) == [0, 0, 0]


# ----------------------------------------------------------------------------- what is left, and where there is no room


def test_nothing_is_left_by_a_run_that_fails_or_stops_or_whose_copies_are_gone(tmp_path):
    def of(name, act):
        def prepare(trainer, checkpoint):
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), act, trainer)

        return ended(lambda: train(0, tmp_path / name, prepare=prepare))[0]

    assert of("fails", lambda trainer: 1 / 0) == 1
    assert of("stops", lambda trainer: trainer.request_stop("enough")) == 0
    assert of("loses them", lambda trainer: forget(tmp_path)) == 0
    assert copies_of(tmp_path) == [] and list(tmp_path.rglob(".memory")) == []


def test_a_start_clears_what_nobody_can_go_on_from_and_nothing_else(tmp_path):
    """Of runs that are gone, were given up, moved, or aged; not of one that lives, was killed, or is not ours."""
    for name in ("deleted", "aged", "moved", "killed"):
        assert once(tmp_path / name, [Death(3)]) == [KILLED]
    living = start(train, 0, tmp_path / "living", [Death(3, how="SIGSTOP")])
    wait_until(lambda: list((tmp_path / "living").glob("died*")), living)
    for path in slots_of(tmp_path / "aged"):
        os.utime(path, (0, time.time() - 86400))
    shutil.rmtree(tmp_path / "deleted")
    (tmp_path / "moved").rename(tmp_path / "elsewhere")
    foreign = [SHARED_MEMORY / f"ignite-engine-{name}" for name in ("mine", "a" * 16 + "-1-2.old")]
    for path in foreign:
        path.mkdir(exist_ok=True)
    try:
        alone(tmp_path / "new")
        assert all(path.exists() for path in foreign)
    finally:
        for path in foreign:
            path.rmdir()

    kept = sorted(str((path / "directory").readlink()) for path in copies_of(tmp_path))
    assert kept == [str(tmp_path / name / "checkpoints") for name in ("killed", "living")]
    living.signal(signal.SIGKILL)
    assert living.wait() == KILLED
    for name in ("killed", "living"):
        alone(tmp_path / name)
        assert starts(tmp_path / name)[-1] == 2


def test_only_the_user_may_read_a_copy_which_is_as_old_as_its_last_iteration(tmp_path):
    def age(trainer, checkpoint):
        make_old = lambda: [os.utime(path, (0, 0)) for path in slots_of(tmp_path)]  # noqa: E731
        trainer.add_event_handler(Events.ITERATION_STARTED(once=3), make_old)

    assert ended(lambda: train(0, tmp_path / "run", [Death(4)], prepare=age))[0] == KILLED
    (folder,) = copies_of(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in slots_of(tmp_path)] == [0o600, 0o600]
    assert time.time() - slots_of(tmp_path)[-1].stat().st_mtime < 3600


@pytest.mark.skipif(not can_mount(), reason="a file system cannot be mounted here")
@pytest.mark.parametrize("size_kib", [pytest.param(16, marks=pytest.mark.nightly), 40, 64])
def test_a_full_shared_memory_is_one_warning_and_training_goes_on(size_kib, tmp_path, undisturbed):
    def work():
        mount_small_file_system(SHARED_MEMORY, size_kib)
        return train(0, tmp_path / "run"), os.listdir(SHARED_MEMORY)

    end, left = child(work)
    assert end == undisturbed()[0] and left == []
    assert said(tmp_path / "run").count("No space left on device") == (size_kib < 64)


# ------------------------------------------------------------------------------------- beside other parts of the engine


def test_where_a_state_cannot_be_had_training_goes_on_without_copies(tmp_path, undisturbed):
    def prepare(trainer, checkpoint):
        state = lambda: {"one": 1 // (trainer.state.iteration != 5)}  # noqa: E731
        trainer.register("fails", SimpleNamespace(state_dict=state, load_state_dict=print))

    assert alone(tmp_path / "run", prepare=prepare) == undisturbed()[0]
    assert said(tmp_path / "run").count("ZeroDivisionError") == 1


def test_auto_goes_by_the_slowest_copy_and_the_shortest_iteration_and_says_so_once(tmp_path):
    """A copy of 10 ms may be made after 10 iterations of 100 ms: 1 % of the time."""

    def one_rank(rank):
        with still_clock() as clock:

            def state():
                clock.move(0.010 if rank else 0.003)
                return {}

            def prepare(trainer, checkpoint):
                trainer.register("slow", SimpleNamespace(state_dict=state, load_state_dict=print))
                trainer.add_event_handler(Events.ITERATION_STARTED, lambda: clock.move(0.1 if rank else 0.2))

            train(rank, tmp_path / "run", prepare=prepare, memory="auto", layout="ddp")

    assert [each.wait() for each in start_ranks(2, one_rank)] == [0, 0]
    assert said(tmp_path / "run").count("The state is copied into memory every 10 iterations") == 1


def test_what_was_copied_before_a_roll_back_is_not_resumed(tmp_path):
    def work(folder, dies):
        trainer = trainer_of(linear(dropout=True), non_finite="rollback")
        torch.manual_seed(1)
        checkpoint = Checkpoint(folder, memory=1)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=3))
        generator = torch.Generator().manual_seed(2)
        data = [(torch.randn(2, 3, generator=generator), torch.ones(2, 1)) for _ in range(9)]
        data[5] = (torch.full((2, 3), torch.nan), data[5][1])
        checkpoint.resume()
        begun, reached = trainer.state.iteration, [0]

        def die_when_it_went_back():
            if dies and trainer.state.iteration < reached[0]:
                kill_this_process()
            reached[0] = trainer.state.iteration

        trainer.add_event_handler(Events.ITERATION_STARTED, die_when_it_went_back)
        trainer.run(data, max_epochs=1)
        return begun, weights(trainer).tolist()

    _, expected = child(work, tmp_path / "undisturbed", False)
    assert ended(work, tmp_path / "run", True)[0] == KILLED
    begun, found = child(work, tmp_path / "run", False)
    assert begun == 3 and found == expected
