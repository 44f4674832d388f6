"""A run that was killed goes on from the copy of its state in memory, to the bits of one that was not."""

import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from blake3 import blake3
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.checkpointing import SaveOptions
from ignite_engine.config.load import config_from_dict
from ignite_engine.errors import CheckpointError
from ignite_engine.ext.recovery import slots
from ignite_engine.ext.recovery.copies import MemoryCopies
from ignite_engine.ext.recovery.packing import Packed
from ignite_engine.ext.replay import replay
from ignite_engine.handlers import Checkpoint, MetricLogger
from ignite_engine.handlers.checkpoint.saver import Saver
from ignite_engine.handlers.sinks import LogFile
from ignite_engine.ranks import agreement
from ignite_engine.runs.recipe import build_run
from tests.ext.replay.runs import settings
from tests.kit.faults import (
    FileOperations,
    in_child,
    kill_this_process,
    mount_small_file_system,
    start_child,
    wait_for,
)
from tests.kit.tiny import linear, numbers_loader, trainer_of, weights

EPOCHS, ITERATIONS = 2, 24
KILLED = -signal.SIGKILL
Prepare = Callable[[Trainer, Checkpoint], object]


@pytest.fixture(autouse=True)
def shared_memory(tmp_path, monkeypatch):
    """Each test has its own; forked processes inherit it."""
    root = tmp_path / "shm"
    root.mkdir()
    monkeypatch.setattr(slots, "ROOT", root)
    yield root


def train(
    directory,
    prepare=lambda trainer, checkpoint: None,
    *,
    memory=1,
    save_every=8,
    seed=0,
    resume=True,
    model=None,
    **options,
):
    """A run to its end from wherever it was; what it says is what the process answers."""
    trainer, said = trainer_of(linear(dropout=True) if model is None else model), Said()
    torch.manual_seed(seed + dist_rank())
    logger = logging.getLogger("ignite_engine")
    level = logger.level
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    MetricLogger(directory, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    checkpoint = Checkpoint(directory / "checkpoints", memory=memory, **options)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=save_every))
    prepare(trainer, checkpoint)
    try:
        if resume:
            checkpoint.resume()
        resumed_at = trainer.state.iteration
        trainer.run(numbers_loader(2 * ITERATIONS // EPOCHS, 2, shuffle=True), max_epochs=EPOCHS)
    finally:
        logger.removeHandler(said)
        logger.setLevel(level)
    log = (directory / "metrics.jsonl").read_text() if dist_rank() == 0 else ""
    return {
        "weights": weights(trainer).tolist(),
        "log": log,
        "resumed_at": resumed_at,
        "checkpoints": trainer.state.checkpoints,
        "run_id": checkpoint.store.checkpoints()[-1].manifest.run_id,
        "said": said.lines,
        "warned": said.warnings,
    }


class Said(logging.Handler):
    """Collects what is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []
        self.warnings = []

    def emit(self, record):
        self.lines.append(record.getMessage())
        if record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage())


def dist_rank():
    return dist.get_rank() if dist.is_initialized() else 0


def killed_at(iteration, event=Events.ITERATION_COMPLETED):
    return lambda trainer, checkpoint: trainer.add_event_handler(event(once=iteration), kill_this_process)


def ends(result):
    return result["weights"], result["log"], result["checkpoints"]


@pytest.fixture(scope="module", autouse=True)
def undisturbed(tmp_path_factory):
    """In this process, so that the forked ones have imported what it needs."""
    return train(tmp_path_factory.mktemp("undisturbed"), memory=None)


def said_in(result, words):
    return any(words in line for line in result["said"])


# -- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.row("K1", "K3")
def test_killed_again_and_again_one_iteration_is_lost_each_time_and_no_bit(tmp_path, shared_memory, undisturbed):
    lost = []
    for at in (2, 3, 7, 8, 12, 13, 24):
        assert in_child(lambda at=at: train(tmp_path, killed_at(at)))[0] == KILLED
        lost.append(at)
    code, result = in_child(lambda: train(tmp_path))

    assert code == 0
    assert ends(result) == ends(undisturbed)
    assert result["resumed_at"] == 23
    assert said_in(result, "Resumed from memory at iteration 23 (disk has 16)")
    assert list(shared_memory.iterdir()) == []
    assert not (tmp_path / "checkpoints" / slots.MEMORY_TOKEN).exists()


@pytest.mark.row("K1", "K3")
@pytest.mark.parametrize("at", [7, 8, 9, 11, 12, 13])
def test_killed_at_any_boundary_the_copy_before_it_is_resumed(at, tmp_path, undisturbed):
    """Before the save and the copy of that boundary; 12 is an epoch's last iteration, which has two boundaries."""
    assert in_child(lambda: train(tmp_path, killed_at(at)))[0] == KILLED
    _, result = in_child(lambda: train(tmp_path))

    assert result["resumed_at"] == at - 1
    assert ends(result) == ends(undisturbed)


def kills_at_write(number):
    """In the middle of a copy: half of the content is written."""

    def prepare(trainer, checkpoint):
        whole, calls = Packed.write, [0]

        def write(self, room):
            calls[0] += 1
            whole(self, room)
            if calls[0] == number:
                room[self.bytes // 2 :] = bytes(len(room) - self.bytes // 2)
                kill_this_process()

        Packed.write = write

    return prepare


@pytest.mark.parametrize("number", [1, 2, 9])
def test_killed_within_a_copy_the_other_slot_is_valid(number, tmp_path, shared_memory, undisturbed):
    assert in_child(lambda: train(tmp_path, kills_at_write(number)))[0] == KILLED
    assert [slots.Slot(path).header is None for path in slot_files(shared_memory)].count(True) == 1
    _, result = in_child(lambda: train(tmp_path))

    assert result["resumed_at"] == number - 1
    assert ends(result) == ends(undisturbed)


@pytest.mark.parametrize("operation", ["mkdir", "fsync", "rename", "unlink"])
@pytest.mark.parametrize("background", [False, True])
def test_killed_within_a_save_the_copy_is_resumed(operation, background, tmp_path, undisturbed):
    path = {"mkdir": "iteration_00000016", "fsync": "manifest.json", "unlink": "shared.pt"}
    name = path.get(operation, "iteration_00000016 -> .tmp-iteration_00000016")

    def work():
        checkpoints = tmp_path / "checkpoints"
        names = {"rename": "iteration_00000016"}
        at = (operation, names.get(operation, name))

        class FromTheSecondSave(FileOperations):
            def _is_meant(self, number):
                operation, path = self.seen[number]
                return self.acted == 0 and operation == at[0] and at[1] in path and self.seen_saves() > 1

            def seen_saves(self):
                return len({path for operation, path in self.seen if operation == "mkdir" and "iteration" in path})

        with FromTheSecondSave(checkpoints, at=at, action=kill_this_process):
            train(tmp_path, background=background, keep_last=1)

    code, _ = in_child(work)
    assert code == KILLED
    _, result = in_child(lambda: train(tmp_path, keep_last=1))

    assert result["resumed_at"] >= 15
    assert ends(result) == ends(undisturbed)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iteration_00000024"]


def test_killed_before_its_first_copy_a_resumed_run_still_has_the_one_that_it_came_from(tmp_path, undisturbed):
    assert in_child(lambda: train(tmp_path, killed_at(6)))[0] == KILLED
    for event in (Events.STARTED, Events.ITERATION_STARTED):
        died = in_child(lambda event=event: train(tmp_path, killed_at(6 if event.name[0] == "I" else 1, event)))
        assert died[0] == KILLED, event
    _, result = in_child(lambda: train(tmp_path))

    assert result["resumed_at"] == 5
    assert ends(result) == ends(undisturbed)


def test_other_iterations_are_copied_where_it_is_asked(tmp_path, undisturbed):
    assert in_child(lambda: train(tmp_path, killed_at(7), memory=4))[0] == KILLED
    _, result = in_child(lambda: train(tmp_path, memory=4))

    assert result["resumed_at"] == 4
    assert ends(result) == ends(undisturbed)


def test_auto_says_once_how_often_it_copies(tmp_path, undisturbed):
    _, result = in_child(lambda: train(tmp_path, memory="auto"))

    lines = [line for line in result["said"] if line.startswith("The state is copied into memory every")]
    assert len(lines) == 1
    assert ends(result) == ends(undisturbed)


def copies_of(directory, **options):
    return MemoryCopies(Saver(directory, SaveOptions(**options)), lambda trainer: None)


def test_auto_takes_as_few_iterations_as_keep_the_share(tmp_path):
    copies = copies_of(tmp_path, memory="auto")
    copies._costs, copies._steps = [0.010, 0.003, 0.003], [0.1, 0.1, 0.1]

    copies._agree()

    assert copies._every == 3


def test_auto_goes_by_the_slowest_copy_and_the_shortest_iteration_of_all_ranks(tmp_path, monkeypatch):
    copies = copies_of(tmp_path, memory="auto")
    copies._costs, copies._steps = [0.003], [0.2]
    monkeypatch.setattr(agreement, "gather_floats", lambda mine: [mine, [0.010, 0.1]])

    copies._agree()

    assert copies._every == 10


def test_times_are_kept_only_until_it_is_known_how_often_to_copy(tmp_path):
    """A run of many iterations would fill the memory with them."""
    places = []

    def prepare(trainer, checkpoint):
        places.extend(checkpoint.places)

    train(tmp_path / "one", prepare)
    train(tmp_path / "auto", prepare, memory="auto")

    assert [len(copies._costs) <= 4 and len(copies._steps) <= 4 for copies in places] == [True, True]


# -- what is not used ------------------------------------------------------------------------------------------------


def killed_then(tmp_path, between, **options):
    assert in_child(lambda: train(tmp_path, killed_at(13)))[0] == KILLED
    between()
    code, result = in_child(lambda: train(tmp_path, **options))
    assert code == 0
    return result


def slot_files(root):
    return sorted(root.glob("ignite-engine-*/rank_*"))


def damage(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_a_damaged_slot_is_named_and_the_older_one_is_taken(tmp_path, shared_memory, undisturbed):
    result = killed_then(tmp_path, lambda: damage(slot_files(shared_memory)[0], 9000))  # the newest: 12 is even

    assert result["resumed_at"] == 11
    assert said_in(result, "The state in memory is not used: ")
    assert ends(result) == ends(undisturbed)


@pytest.mark.parametrize("offset", [30, 9000])
def test_with_both_slots_damaged_the_disk_is_taken(offset, tmp_path, shared_memory, undisturbed):
    result = killed_then(tmp_path, lambda: [damage(path, offset) for path in slot_files(shared_memory)])

    assert result["resumed_at"] == 8
    assert said_in(result, "torn or damaged")
    assert ends(result) == ends(undisturbed)
    assert list(shared_memory.iterdir()) == []


def test_copies_of_another_version_of_the_engine_are_not_used(tmp_path, shared_memory, undisturbed):
    def write_as_another_version():
        for path in slot_files(shared_memory):
            with path.open("r+b") as file:
                line = file.read(4096).rstrip(b"\0").rpartition(b"\n")[0]
                values = json.loads(line.removeprefix(slots._MAGIC))
                line = slots._MAGIC + json.dumps({**values, "new": 1}).encode() + b"\n"
                file.seek(0)
                file.write(line + blake3(line).hexdigest().encode())

    result = killed_then(tmp_path, write_as_another_version)

    assert result["resumed_at"] == 8
    assert said_in(result, "torn or damaged")
    assert ends(result) == ends(undisturbed)


def test_a_copy_of_other_settings_is_not_used(tmp_path, undisturbed):
    assert in_child(lambda: train(tmp_path, killed_at(13), config={"lr": 0.1}))[0] == KILLED
    _, result = in_child(lambda: train(tmp_path, config={"lr": 0.2}))

    assert result["resumed_at"] == 8
    assert said_in(result, "The state in memory is not used: it is of other settings.")
    assert ends(result) == ends(undisturbed)


def test_a_moved_folder_finds_its_copies(tmp_path, shared_memory, undisturbed):
    old, new = tmp_path / "old", tmp_path / "new"
    assert in_child(lambda: train(old, killed_at(13)))[0] == KILLED
    old.rename(new)
    _, result = in_child(lambda: train(new))

    assert result["resumed_at"] == 12
    assert ends(result) == ends(undisturbed)
    assert list(shared_memory.iterdir()) == []


def test_a_copied_folder_does_not_take_the_copies_of_the_original(tmp_path, shared_memory, undisturbed):
    """Nor does it disturb them while the original runs."""
    old, new = tmp_path / "old", tmp_path / "new"
    assert in_child(lambda: train(old, killed_at(13)))[0] == KILLED
    shutil.copytree(old, new)
    held = slots.Folder.open(next(shared_memory.iterdir()).name, create=False)
    assert held is not None
    _, result = in_child(lambda: train(new))
    held.close()
    _, original = in_child(lambda: train(old))

    assert (result["resumed_at"], original["resumed_at"]) == (8, 12)
    assert ends(result) == ends(original) == ends(undisturbed)
    assert list(shared_memory.iterdir()) == []


def test_a_deleted_folder_forgets(tmp_path, shared_memory):
    result = killed_then(tmp_path, lambda: shutil.rmtree(tmp_path / "checkpoints"))

    assert result["resumed_at"] == 0
    assert list(shared_memory.iterdir()) == []


def test_without_the_checkpoint_that_it_knew_a_copy_is_not_used(tmp_path):
    """Who deletes the newest checkpoints wants to go back."""
    assert in_child(lambda: train(tmp_path, killed_at(21), keep_last=2))[0] == KILLED
    shutil.rmtree(tmp_path / "checkpoints" / "iteration_00000016")
    _, result = in_child(lambda: train(tmp_path))

    assert result["resumed_at"] == 8
    assert said_in(result, "The state in memory is not used: the newest checkpoint that it knew is gone.")


def test_a_copy_that_was_older_than_a_checkpoint_is_gone_with_the_start_that_saw_it(tmp_path):
    assert in_child(lambda: train(tmp_path, killed_at(10), memory=7))[0] == KILLED
    assert in_child(lambda: train(tmp_path, killed_at(1, Events.STARTED), memory=7))[0] == KILLED
    shutil.rmtree(tmp_path / "checkpoints" / "iteration_00000008")
    _, result = in_child(lambda: train(tmp_path, memory=7))

    assert result["resumed_at"] == 0


def test_a_start_without_memory_makes_the_copies_stale(tmp_path, undisturbed):
    assert in_child(lambda: train(tmp_path, killed_at(13)))[0] == KILLED
    assert in_child(lambda: train(tmp_path, killed_at(10), memory=None))[0] == KILLED
    _, result = in_child(lambda: train(tmp_path))

    assert result["resumed_at"] == 8
    assert ends(result) == ends(undisturbed)


def test_a_fresh_start_forgets_what_an_earlier_run_has_copied(tmp_path):
    assert in_child(lambda: train(tmp_path, killed_at(5), seed=1))[0] == KILLED
    assert in_child(lambda: train(tmp_path, killed_at(1), resume=False))[0] == KILLED
    _, result = in_child(lambda: train(tmp_path))

    assert result["resumed_at"] == 0


def test_must_be_new_refuses_a_folder_with_a_copy(tmp_path):
    assert in_child(lambda: train(tmp_path, killed_at(5)))[0] == KILLED

    with pytest.raises(CheckpointError, match="must_be_new"):
        train(tmp_path, must_be_new=True)


# -- what is left, and where there is no room --------------------------------------------------------------------------


def test_nothing_is_left_by_a_run_that_fails_or_stops(tmp_path, shared_memory):
    def fails(trainer, checkpoint):
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda: 1 / 0)

    def stops(trainer, checkpoint):
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=10), lambda: trainer.request_stop("enough"))

    with pytest.raises(ZeroDivisionError):
        train(tmp_path, fails)
    assert list(shared_memory.iterdir()) == []
    train(tmp_path, stops)
    assert list(shared_memory.iterdir()) == []
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_a_run_whose_folder_in_memory_a_peer_has_removed_ends_as_ever(tmp_path, shared_memory, undisturbed):
    def prepare(trainer, checkpoint):
        trainer.add_event_handler(Events.COMPLETED, lambda: shutil.rmtree(next(shared_memory.iterdir())))

    assert ends(train(tmp_path, prepare)) == ends(undisturbed)
    assert list(shared_memory.iterdir()) == []


def test_the_next_start_clears_what_nobody_can_go_on_from_and_nothing_else(tmp_path, shared_memory):
    dead, alive = tmp_path / "dead", tmp_path / "alive"
    assert in_child(lambda: train(dead, killed_at(3)))[0] == KILLED
    shutil.rmtree(dead)
    other = [shared_memory / "ignite-engine-mine", shared_memory / ("ignite-engine-" + 16 * "a" + "-1-2.old")]
    for path in other:
        path.mkdir()
    link = shared_memory / ("ignite-engine-" + 16 * "b" + "-1-2")
    link.symlink_to(other[0])
    (other[0] / "rank_0.0").touch()
    ready = tmp_path / "ready"

    def waits(trainer, checkpoint):
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: (ready.touch(), time.sleep(60)))

    living = start_child(lambda: train(alive, waits))
    while not ready.exists():
        time.sleep(0.01)
    assert in_child(lambda: train(tmp_path / "new"))[0] == 0

    left = {path.name for path in shared_memory.iterdir()} - {path.name for path in (*other, link)}
    os.kill(living[0], signal.SIGKILL)
    wait_for(living)
    assert len(left) == 1  # of the run that lives
    assert (other[0] / "rank_0.0").exists() and other[1].exists() and link.is_symlink()
    assert in_child(lambda: train(alive))[1]["resumed_at"] == 3


def test_of_two_runs_that_were_killed_together_both_go_on_whichever_is_started_first(
    tmp_path, shared_memory, undisturbed
):
    for name, at in (("one", 5), ("two", 13)):
        assert in_child(lambda name=name, at=at: train(tmp_path / name, killed_at(at)))[0] == KILLED
    results = [in_child(lambda name=name: train(tmp_path / name))[1] for name in ("two", "one")]

    assert [result["resumed_at"] for result in results] == [12, 4]
    assert [ends(result) for result in results] == 2 * [ends(undisturbed)]
    assert list(shared_memory.iterdir()) == []


@pytest.mark.parametrize("why", ["a day ago", "started without memory", "its folder is elsewhere"])
def test_copies_of_a_run_that_was_given_up_are_cleared(why, tmp_path, shared_memory):
    assert in_child(lambda: train(tmp_path / "dead", killed_at(13)))[0] == KILLED
    assert slots.clear() == []
    if why == "a day ago":
        for path in slot_files(shared_memory):
            os.utime(path, (0, time.time() - 86400))
    elif why == "started without memory":
        assert in_child(lambda: train(tmp_path / "dead", killed_at(10), memory=None))[0] == KILLED
    else:
        (tmp_path / "dead").rename(tmp_path / "moved")

    assert len(slots.clear()) == 1
    assert list(shared_memory.iterdir()) == []


def test_a_copy_is_as_old_as_its_last_iteration(tmp_path, shared_memory):
    def prepare(trainer, checkpoint):
        def age():
            for path in slot_files(shared_memory):
                os.utime(path, (0, 0))

        trainer.add_event_handler(Events.ITERATION_STARTED(once=12), age)

    assert in_child(lambda: train(tmp_path, lambda *parts: (prepare(*parts), killed_at(13)(*parts))))[0] == KILLED
    assert slots.clear() == []


def test_a_folder_of_another_user_is_neither_used_nor_cleared(tmp_path, shared_memory, monkeypatch):
    assert in_child(lambda: train(tmp_path, killed_at(13)))[0] == KILLED
    before = slot_files(shared_memory)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    _, result = in_child(lambda: train(tmp_path))

    assert result["resumed_at"] == 8
    assert said_in(result, "No copies of the state in memory")
    assert slot_files(shared_memory) == before != []


def test_only_the_user_may_read_a_copy(tmp_path, shared_memory):
    assert in_child(lambda: train(tmp_path, killed_at(3)))[0] == KILLED

    (folder,) = shared_memory.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in slot_files(shared_memory)] == [0o600, 0o600]


@pytest.mark.parametrize("size_kib", [16, 40, 64])
def test_a_full_shared_memory_is_one_warning_and_training_goes_on(size_kib, tmp_path, shared_memory, undisturbed):
    def work():
        mount_small_file_system(shared_memory, size_kib)
        return train(tmp_path) | {"left": os.listdir(shared_memory)}

    code, result = in_child(work)
    if code == 1 and os.geteuid() != 0:
        pytest.skip("needs the right to mount")

    warnings = [line for line in result["said"] if "in memory" in line]
    assert len(warnings) == (size_kib < 64)
    assert all("No space left on device" in line for line in warnings)
    assert ends(result) == ends(undisturbed)
    assert result["left"] == []


def test_where_a_state_cannot_be_had_training_goes_on(tmp_path, undisturbed):
    class Fails:
        def __init__(self, trainer):
            self.state = trainer.state

        def state_dict(self):
            if self.state.iteration == 5:
                raise RuntimeError("not now")
            return {"number": 1}

        def load_state_dict(self, state):
            pass

    _, result = in_child(lambda: train(tmp_path, lambda trainer, _: trainer.register("fails", Fails(trainer))))

    (warning,) = (line for line in result["warned"] if "in memory" in line)
    assert warning == "No copies of the state in memory, as RuntimeError: not now: checkpoints are on disk alone."
    assert ends(result) == ends(undisturbed)


def test_off_it_imports_nothing_and_subscribes_to_nothing(tmp_path):
    def work():
        for name in [name for name in sys.modules if name.startswith("ignite_engine.ext.recovery")]:
            del sys.modules[name]
        trainer = trainer_of()
        Checkpoint(tmp_path).attach(trainer)
        assert trainer.listeners(TrainingEvents.RESUME_POINT) == 1
        return [name for name in sys.modules if name.startswith("ignite_engine.ext.recovery")]

    assert in_child(work) == (0, [])


# -- beside other parts of the engine --------------------------------------------------------------------------------


def test_what_was_copied_before_a_roll_back_is_not_resumed(tmp_path):
    def work(directory):
        trainer = trainer_of(linear(dropout=True), non_finite="rollback")
        torch.manual_seed(1)
        checkpoint = Checkpoint(directory, memory=1)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=3))
        generator = torch.Generator().manual_seed(2)
        data = [(torch.randn(2, 3, generator=generator), torch.ones(2, 1)) for _ in range(9)]
        data[5] = (torch.full((2, 3), torch.nan), data[5][1])
        checkpoint.resume()
        resumed_at = trainer.state.iteration
        trainer.run(data, max_epochs=1)
        return [resumed_at, weights(trainer).tolist(), len(trainer.update.non_finite.journal)]

    undisturbed = work(tmp_path / "undisturbed")
    assert in_child(started_twice(lambda: work(tmp_path / "killed")))[0] == KILLED
    _, result = in_child(lambda: work(tmp_path / "killed"))

    assert result[0] == 3
    assert result[1:] == undisturbed[1:]


def started_twice(work):
    """``work``, killed where a run starts the second time."""

    def killed():
        whole, calls = MemoryCopies.begin, [0]

        def begin(self, *arguments):
            calls[0] += 1
            whole(self, *arguments)
            if calls[0] == 2:
                kill_this_process()

        MemoryCopies.begin = begin
        return work()

    return killed


def test_of_a_best_one_that_was_being_written_the_next_better_than_on_disk_is_saved(tmp_path):
    scores = {4: 1.0, 8: 0.5, 12: 0.7, 16: 0.9, 20: 0.8, 24: 0.9}

    def measures(trainer, checkpoint):
        def write():
            trainer.state.metrics["score"] = scores[trainer.state.iteration]

        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=4), write)

    options = {"best": "score", "mode": "min", "background": True, "save_every": 100}

    def killed_later():
        time.sleep(0.5)
        kill_this_process()

    def work():
        with FileOperations(tmp_path / "checkpoints", at=("mkdir", "iteration_00000008"), action=killed_later):
            train(tmp_path, lambda *parts: (measures(*parts), slow(*parts)), **options)

    def slow(trainer, checkpoint):
        trainer.add_event_handler(Events.ITERATION_STARTED, lambda: time.sleep(0.3 * (trainer.state.iteration > 9)))

    assert in_child(work)[0] == KILLED
    _, result = in_child(lambda: train(tmp_path, measures, **options))

    assert result["resumed_at"] >= 8
    kept = {path.name for path in (tmp_path / "checkpoints").glob("iteration_*")}
    assert "iteration_00000012" in kept


def test_a_replay_leaves_the_copies_of_a_run_alone(tmp_path, shared_memory):
    directory = tmp_path / "run"
    values = settings(directory, 20, {"checkpoint": {"every": {"iterations": 5}, "memory": 1}})

    def train_config(die_at):
        run = build_run(config_from_dict(values))
        if die_at is not None:
            run.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=die_at), kill_this_process)
        return str(run.train()["resumed_from"])

    assert in_child(lambda: train_config(13))[0] == KILLED
    before = {path: path.read_bytes() for path in slot_files(shared_memory)}
    with replay(directory, at=7) as trainer:
        trainer.run(max_iters=9)

    assert {path: path.read_bytes() for path in slot_files(shared_memory)} == before != {}
    assert in_child(lambda: train_config(None)) == (0, slots.MEMORY_TOKEN)


def test_a_run_that_is_moved_with_its_config_finds_its_copies(tmp_path):
    def settings_of(directory, seed):
        config = {"run": {"directory": directory, "seed": seed}}
        return copies_of(tmp_path, memory=1, config=config)._memory._settings

    assert settings_of("a", 1) == settings_of("b", 1) != settings_of("a", 2)


def test_files_of_sinks_are_flushed_to_disk_for_a_checkpoint_and_not_for_a_copy(tmp_path, monkeypatch):
    flushed = []

    def prepare(trainer, checkpoint):
        monkeypatch.setattr(LogFile, "sync", lambda self: flushed.append(trainer.state.iteration))

    train(tmp_path, prepare)

    assert sorted(set(flushed)) == [8, 16, 24]
