"""Windows: which are trained on, when an epoch and a run end, and that a resumed run goes on in the same one."""

import json
import logging
import math
import os
import threading
import time
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average

from ignite_engine import Trainer, TrainingEvents, Windows, create_evaluator, loader
from ignite_engine.ext.windows import Files
from ignite_engine.handlers import Checkpoint, Evaluation, MetricLogger, WallClockLimit
from ignite_engine.handlers.limits import StopFile
from tests.kit.refusals import refusals
from tests.kit.resume import assert_resumes, program
from tests.kit.tiny import Numbers, events_of, linear, mse, trainer_of, weights

WINDOW_EVENTS = (
    Events.EPOCH_STARTED,
    TrainingEvents.WINDOW_STARTED,
    Events.ITERATION_COMPLETED,
    TrainingEvents.WINDOW_COMPLETED,
    Events.DATALOADER_STOP_ITERATION,
    Events.EPOCH_COMPLETED,
)


def open_numbers(count):
    """A window of so many samples, in batches of 2."""
    return loader(Numbers(int(count)), 2, shuffle=True, seed=1)


def open_file(path):
    return open_numbers(path.read_text())


class Counting:
    """A stream of a user's own: windows of 1, 2, 3, ... samples, up to ``last``."""

    def __init__(self, last):
        self.last, self.taken = last, 0

    def next_window(self):
        if self.taken == self.last:
            raise StopIteration
        self.taken += 1
        return self.taken

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def write_windows(folder, *counts, first=0):
    folder.mkdir(exist_ok=True)
    for index, count in enumerate(counts, first):
        (folder / "new").write_text(str(count))
        os.replace(folder / "new", folder / f"hour_{index:03d}.txt")
    return folder


def trained(trainer):
    """Filled with the window of each iteration, and its number."""
    seen = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: seen.append((trainer.state.windows, trainer.state.window))
    )
    return seen


def test_each_window_is_begun_and_completed_and_an_empty_one_is_skipped():
    trainer = trainer_of(accumulation_steps=2)
    told, seen = events_of(trainer, WINDOW_EVENTS), trained(trainer)
    state = trainer.run(Windows([5, 0, 3], open_numbers), max_epochs=2)

    an_epoch = [
        "EPOCH_STARTED",
        *("WINDOW_STARTED", "ITERATION_COMPLETED", "ITERATION_COMPLETED", "WINDOW_COMPLETED"),  # 3 batches, in twos
        *("WINDOW_STARTED", "ITERATION_COMPLETED", "WINDOW_COMPLETED"),
        *("DATALOADER_STOP_ITERATION", "EPOCH_COMPLETED"),
    ]
    assert [name for name, _, _ in told] == an_epoch * 2
    assert seen == [(1, 5), (1, 5), (2, 3), (3, 5), (3, 5), (4, 3)]
    assert (state.iteration, state.windows, state.window, state.reason) == (6, 4, None, "max_epochs")


def test_filters_count_windows():
    trainer, at = trainer_of(), list[int]()
    trainer.add_event_handler(
        TrainingEvents.WINDOW_COMPLETED(every=2), lambda trainer: at.append(trainer.state.iteration)
    )
    trainer.run(Windows([2, 4, 2, 2, 6], open_numbers))
    assert at == [3, 5]


@pytest.mark.row("H1")
@pytest.mark.parametrize(
    ("options", "run", "iterations", "epochs", "windows", "reason"),
    [
        ({"per_epoch": 2}, {"max_epochs": 3}, 9, 3, 5, "max_epochs"),  # the second epoch ends with the list
        ({"per_epoch": 1}, {"max_iters": 3}, 3, 2, 2, "max_iters"),
        ({}, {"max_iters": 7}, 7, 2, 4, "max_iters"),
        ({"per_epoch": 3}, {"max_epochs": 3}, 15, 3, 9, "max_epochs"),  # each ends with the list
        ({"per_epoch": 1}, {"max_epochs": 5}, 9, 5, 5, "max_epochs"),
        ({"per_epoch": 4}, {"max_epochs": 3}, 15, 3, 9, "max_epochs"),  # an empty one at the end is no end of the run
    ],
)
def test_limits_of_epochs_windows_and_iterations_mean_what_they_say(options, run, iterations, epochs, windows, reason):
    trainer = trainer_of(accumulation_steps=2)
    state = trainer.run(Windows([5, 0, 7, 3], open_numbers, **options), **run)
    assert (state.iteration, state.epoch, state.windows, state.reason) == (iterations, epochs, windows, reason)


def test_window_has_no_more_updates_than_its_limit_and_its_end_is_as_ever():
    trainer = trainer_of(accumulation_steps=2)
    told, seen = events_of(trainer, WINDOW_EVENTS), trained(trainer)
    trainer.run(Windows([5, 12, 3], open_numbers, max_updates=2))

    assert seen == [(1, 5), (1, 5), (2, 12), (2, 12), (3, 3)]
    assert [name for name, _, _ in told].count("WINDOW_COMPLETED") == 3 and told[-1][0] == "EPOCH_COMPLETED"


@pytest.mark.parametrize("kind", ["list", "array", "files", "own", "generator", "iterable"])
@pytest.mark.parametrize("first", [2, 3])
def test_another_run_of_the_trainer_goes_on_where_the_one_before_was(tmp_path, kind, first):
    """In the middle of a window and at its end; a generator, too, cannot go back."""
    streams = {
        "list": [1, 2, 3, 4],
        "array": torch.arange(1, 5).numpy(),
        "files": Files(write_windows(tmp_path, 1, 2, 3, 4), "hour_*"),
        "own": Counting(4),
        "generator": iter([1, 2, 3, 4]),
        "iterable": {1: "a", 2: "b", 3: "c", 4: "d"},
    }
    trainer, seen = trainer_of(), list[Any]()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(trainer.state.windows))
    windows = Windows(streams[kind], lambda name: [Numbers(1)[:1]] * int(name.read_text() if kind == "files" else name))
    for end in (first, 6, 8):
        trainer.run(windows, max_iters=end)
    assert seen == [1, 2, 2, 3, 3, 3, 4, 4]


@pytest.mark.parametrize("kind", ["list", "files", "own"])
def test_a_second_run_begins_at_the_first_window_and_two_sources_share_nothing(tmp_path, kind):
    stream = {"list": [2, 4], "files": Files(write_windows(tmp_path, 2, 4), "hour_*"), "own": Counting(2)}[kind]
    windows = Windows(stream, open_file if kind == "files" else open_numbers)
    for _ in range(2):
        trainer = trainer_of()
        seen = trained(trainer)
        for _ in range(2):
            trainer.run(windows, max_epochs=1)
        assert len(seen) == 2 * (2 if kind == "own" else 3) and {number for number, _ in seen} == {1, 2}


@pytest.mark.row("H1")
@pytest.mark.parametrize("kind", ["list", "files", "own"])
@pytest.mark.parametrize("how", ["stop", "kill", "same process"])
def test_resumed_run_goes_on_in_the_same_window_to_the_same_bits(kind, how, tmp_path):
    files = write_windows(tmp_path / "hours", 5, 0, 7, 3)
    make = {
        "list": lambda: Windows([5, 0, 7, 3], open_numbers, per_epoch=2),
        "files": lambda: Windows(Files(files, "hour_*.txt"), open_file),
        "own": lambda: Windows(Counting(5), open_numbers),
    }
    limits = {"max_epochs": 1 if kind == "own" else 2}
    assert_resumes(program(data=make[kind], limits=limits, accumulation_steps=2), tmp_path / "runs", (1, 4), (how,))


def test_windows_that_come_later_are_waited_for(tmp_path):
    folder = tmp_path / "hours"
    trainer = trainer_of()
    seen = trained(trainer)

    def write():
        for index, count in enumerate((2, 0, 4)):
            time.sleep(0.02)
            write_windows(folder, count, first=index)
        (folder / "done").touch()

    writer = threading.Thread(target=write)
    writer.start()
    windows = Windows(Files(folder, "hour_*", end="done"), open_file, wait_s=math.inf, poll_s=0.01)
    state = trainer.run(windows, max_epochs=3)
    writer.join()
    assert [window.name for _, window in seen] == ["hour_000.txt", "hour_002.txt", "hour_002.txt"]
    assert (state.reason, state.epoch, state.status) == ("end of data", 1, "completed")
    assert trainer.progress.epochs_completed == 1, "an epoch without a window is none"


@pytest.mark.parametrize("per_epoch", [None, 1])
def test_run_at_the_end_of_its_data_writes_the_same_lines_again(tmp_path, per_epoch):
    data, folder = write_windows(tmp_path / "hours", 2, 3), tmp_path / "run"
    (data / "done").touch()
    logs = []
    for _ in range(2):
        trainer = trainer_of()
        every = Events.ITERATION_COMPLETED(every=2)
        MetricLogger(folder, console=False).attach(trainer, every)
        predict_mean = {"mean": Average(output_transform=lambda output: output.mean())}
        evaluator = create_evaluator(trainer.update.model, lambda model, batch: model(batch[0]), predict_mean)
        Evaluation(evaluator, open_numbers(2)).attach(trainer, Events.EPOCH_COMPLETED | Events.COMPLETED)
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer)
        checkpoint.resume()
        windows = Windows(Files(data, "hour_*", end="done"), open_file, per_epoch=per_epoch)
        state = trainer.run(windows, max_epochs=9)
        assert (state.reason, state.epoch) == ("end of data", trainer.progress.epochs_completed)
        logs.append((folder / "metrics.jsonl").read_text())
    assert logs[0] == logs[1]


def test_wait_ends_with_its_time(tmp_path):
    began = time.monotonic()
    windows = Windows(Files(write_windows(tmp_path, 2), "hour_*"), open_file, wait_s=0.1, poll_s=0.01)
    state = trainer_of().run(windows, max_epochs=1)
    assert state.windows == 1 and time.monotonic() - began >= 0.1


@pytest.mark.parametrize("how", ["time limit", "stop file"])
def test_wait_ends_with_a_limit(tmp_path, how):
    trainer, folder = trainer_of(), write_windows(tmp_path / "hours", 2)
    if how == "time limit":
        WallClockLimit(seconds=0.4, margin_s=0.0).attach(trainer)
    else:
        StopFile(tmp_path / "stop").attach(trainer)
        trainer.add_event_handler(TrainingEvents.WINDOW_COMPLETED, lambda: (tmp_path / "stop").touch())
    state = trainer.run(Windows(Files(folder, "hour_*"), open_file, wait_s=60, poll_s=0.05))
    assert state.status == "interrupted" and str(state.reason).startswith(how) and state.iteration == 1


def test_file_that_comes_too_late_is_left_out_and_named(tmp_path, caplog):
    write_windows(tmp_path, 2, 2, first=5)
    trainer = trainer_of()
    seen = trained(trainer)
    trainer.add_event_handler(
        TrainingEvents.WINDOW_COMPLETED(once=1), lambda: (tmp_path / "hour_001.txt").write_text("2")
    )
    with caplog.at_level(logging.WARNING):
        trainer.run(Windows(Files(tmp_path, "hour_*"), open_file))
    assert len(seen) == 2
    assert [line for line in caplog.messages if "left out" in line] == [
        "hour_001.txt came after hour_005.txt was taken, so it is left out: name files in the order in which they come."
    ]


def test_a_folder_that_is_gone_is_no_end_of_the_stream(tmp_path):
    folder = write_windows(tmp_path / "hours", 2)
    trainer = trainer_of()
    trainer.add_event_handler(TrainingEvents.WINDOW_COMPLETED, lambda: folder.rename(tmp_path / "away"))
    with pytest.raises(FileNotFoundError, match="hours"):
        trainer.run(Windows(Files(folder, "hour_*"), open_file))


def test_each_window_is_evaluated_before_it_is_trained_on_in_eval_mode(tmp_path):
    model = linear(dropout=True)
    trainer = trainer_of(model)
    windows = Windows([4, 6], open_numbers)
    found = []

    def predict(model, batch):
        assert not model.training
        found.append((trainer.state.window, trainer.state.iteration))
        return mse(model, batch)

    Evaluation(create_evaluator(model, predict, {"loss": Average()}), windows.again, name="next").attach(
        trainer, TrainingEvents.WINDOW_STARTED
    )
    before = weights(trainer_of(linear(dropout=True)))
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(before, model.parameters())
    state = trainer.run(windows)
    assert found == [(4, 0)] * 2 + [(6, 2)] * 3
    assert state.evaluations == 2 and math.isfinite(state.metrics["next/loss"])


@pytest.mark.parametrize("stop_at", [None, 2])
def test_what_is_measured_before_a_window_is_in_the_line_of_its_first_iteration(tmp_path, stop_at):
    """With the number of the window; stopped in that evaluation, too."""
    for stop in [stop_at, None] if stop_at else [None]:
        trainer, windows = trainer_of(), Windows([4, 6, 2], open_numbers)
        evaluator = create_evaluator(torch.nn.Identity(), lambda model, batch: batch[0].mean(), {"mean": Average()})
        Evaluation(evaluator, windows.again, name="next").attach(trainer, TrainingEvents.WINDOW_STARTED)
        Evaluation(evaluator, open_numbers(2), name="val").attach(trainer, TrainingEvents.WINDOW_COMPLETED)
        MetricLogger(tmp_path, console=False).attach(trainer)
        checkpoint = Checkpoint(tmp_path / "checkpoints")
        checkpoint.attach(trainer)
        checkpoint.resume()
        if stop is not None:
            trainer.add_event_handler(
                TrainingEvents.EVALUATION_STARTED(event_filter=lambda _, count: trainer.state.windows == stop),  # noqa: B023
                lambda: trainer.request_stop("here"),  # noqa: B023
            )
        trainer.run(windows)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {line["iteration"]: line["next/window"] for line in lines if "next/mean" in line} == {1: 1, 3: 2, 6: 3}
    assert [line["iteration"] for line in lines if "val/mean" in line] == [2, 5, 6]
    assert not any("val/window" in line for line in lines)


class Unreadable(Numbers):
    """All samples of a window of 6 are."""

    def __getitem__(self, index):
        if len(self) == 6:
            raise OSError("torn")
        return super().__getitem__(index)


def test_windows_of_which_nothing_can_be_read_count_for_the_limit_of_read_errors():
    windows = Windows([2, 6, 4, 6], lambda count: loader(Unreadable(count), 2))
    for limit in (6, 5):
        trainer = Trainer(lambda engine, batch: None, max_read_errors=limit)
        if limit == 6:
            state = trainer.run(windows)
            assert (state.read_errors, state.windows, state.iteration) == (6, 2, 3)
        else:
            with pytest.raises(OSError, match="torn"):
                trainer.run(windows)


def run(stream, open_window=open_numbers, **limits):
    return lambda: trainer_of().run(Windows(stream, open_window), **limits)


def of(stream=(1,), **options):
    return lambda: Windows(list(stream) if isinstance(stream, tuple) else stream, open_numbers, **options)


test_refusals = refusals(
    [
        ("windows of windows", of(Windows([1], open_numbers)), TypeError, "stream sequence Files"),
        ("a text", of("hours"), TypeError, "stream Files 'hours'"),
        ("a pattern", lambda path: Files(path, 3), TypeError, "pattern names 3"),
        ("no window", run([2, None]), ValueError, "Window 1 None leave out"),
        ("no data", run([2], lambda name: "hour"), TypeError, "iterable batches 'hour'"),
        ("two lengths", run([2], epoch_length=5), ValueError, "per_epoch length epoch_len"),
        ("no updates", of(max_updates=0), ValueError, "max_updates at least 1, got 0"),
        ("none is open", lambda: of()().again(), RuntimeError, "No window open"),
        ("iterated", lambda: iter(of()()), TypeError, "Trainer.run() windows.again"),
    ]
)


def test_error_of_opening_a_window_names_it():
    with pytest.raises(KeyError) as raised:
        run(["hour_3"], {}.__getitem__)()
    assert "hour_3" in raised.value.__notes__[0]


def test_a_resume_over_other_data_stays_in_the_report_when_its_window_has_ended(tmp_path):
    def run(value, stop_at):
        trainer, checkpoint = Trainer(lambda engine, batch: None), Checkpoint(tmp_path)
        trainer.register("model", linear())
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), lambda: trainer.request_stop("here"))
        trainer.run(Windows([1, 2, 3], lambda _: loader(torch.full((3,), value))), max_epochs=1)
        return trainer

    assert run(0.0, stop_at=1).reproducibility() == []
    resumed = run(1.0, stop_at=7)
    assert resumed.state.windows == 3
    told = "The data is not that of the checkpoint: the run continues at its place in other data"
    assert resumed.reproducibility() == [told]


@pytest.mark.parametrize("how", ["repaired", "removed"])
def test_a_torn_window_may_be_repaired_or_removed_before_the_resume(tmp_path, how):
    """Nothing of it was trained on."""

    def run(folder, *counts):
        files = write_windows(tmp_path / f"{folder}_hours", *counts)
        if "" not in counts and (files / "hour_002.txt").exists() and how == "removed":
            (files / "hour_001.txt").unlink(missing_ok=True)
        trainer = trainer_of()
        checkpoint = Checkpoint(tmp_path / folder, on_exception=True)
        checkpoint.attach(trainer, Events.COMPLETED)
        checkpoint.resume()
        trainer.run(Windows(Files(files, "hour_*"), open_file), max_epochs=1)
        return weights(trainer)

    with pytest.raises(ValueError, match="invalid literal"):
        run("torn", 5, "", 7)
    assert torch.equal(run("torn", 5, 3, 7), run("whole", 5, 3, 7))


RESUMED = {
    "gone": ([5, 7], [7], "was made in the window 5, now the next one is 7"),
    "other data": ([5, 7], None, "was made with Windows as data"),
    "windows for a loader": (None, [5, 7], "was made with a loader as data"),
}
"""What the first run has had and the second has: windows, or a loader."""


@pytest.mark.parametrize("change", RESUMED)
def test_resume_where_the_window_is_another_is_one_line(tmp_path, change):
    first, second, words = RESUMED[change]

    def run(windows):
        trainer, checkpoint = trainer_of(), Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: trainer.request_stop("here"))
        trainer.run(Windows(windows, open_numbers) if windows else open_numbers(8))

    run(first)
    with pytest.raises(ValueError) as raised:
        run(second)
    assert words in str(raised.value) and "\n" not in str(raised.value)
