"""Windows on several ranks: shared ones dealt out, or each rank's own, of other lengths and with empty ones."""

import contextlib
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Engine, Events
from ignite.metrics import Average
from torch.utils.data import DataLoader

from ignite_engine import Trainer, TrainingEvents, Update, Windows, create_evaluator, loader
from ignite_engine.ext.windows import Files
from ignite_engine.handlers import Checkpoint, Evaluation
from tests.ext.windows.test_windows import open_file, write_windows
from tests.kit.processes import ranks
from tests.kit.tiny import Numbers, linear, mse, one


def of_all(value):
    """This value of each rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


OWN = {0: [[0, 1, 2, 3, 4], [], [5]], 1: [[10, 11, 12], [13, 14], []]}
"""Windows of each rank, batches of one sample; a third rank would have none."""


OPEN = {
    "batches": lambda samples: [torch.tensor(each) for each in samples],
    "loader": lambda samples: loader(samples) if samples else None,
    "plain": lambda samples: DataLoader(samples) if samples else None,
}


def trains(rank, kind, options=None):
    """Which samples a rank with windows of its own trains on, in which window, and the events."""
    seen = []
    told = []

    def update(engine, batch):
        real = batch[: len(batch) - engine.state.group.padding]
        seen.extend((engine.state.windows, int(each)) for each in real)

    trainer = Trainer(update, accumulation_steps=2)
    for event in (TrainingEvents.WINDOW_STARTED, TrainingEvents.WINDOW_COMPLETED, Events.EPOCH_COMPLETED):
        trainer.add_event_handler(event, lambda _, event=event: told.append(event.name))
    windows = Windows(OWN.get(rank, []), OPEN[kind], shared=False, **(options or {}))
    state = trainer.run(windows, max_epochs=2)
    return {"seen": seen, "told": told, "iteration": state.iteration, "windows": state.windows}


def shared(rank, folder, stop_at=None, invariant=False):
    """Windows of a directory, dealt out to the ranks; the weights, and which rows were seen."""
    rows = []
    model = linear()

    def loss_fn(model, batch):
        rows.extend(batch[0][:, 0].tolist())
        return mse(model, batch)

    update = Update(
        model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, accumulate="rank_invariant" if invariant else None
    )
    ordinary = Trainer(lambda engine, batch: None if engine.state.group.padding else loss_fn(model, batch))
    trainer = Trainer(update, global_micro_batches=4) if invariant else ordinary
    checkpoint = Checkpoint(f"{folder}/run_{invariant}")
    checkpoint.attach(trainer)
    checkpoint.resume()
    if stop_at is not None:

        @trainer.on(Events.ITERATION_COMPLETED(once=stop_at))
        def stop():
            trainer.request_stop("here")

    state = trainer.run(Windows(Files(f"{folder}/hours", "hour_*"), open_file), max_epochs=1)
    return {"rows": rows, "weights": one(model).clone(), "windows": state.windows, "status": state.status}


def stopped_while_it_waits(rank, folder):
    trainer, began = Trainer(lambda engine, batch: None), time.monotonic()
    if rank == 1:
        trainer.add_event_handler(TrainingEvents.WINDOW_COMPLETED, lambda: trainer.request_stop("here"))
    files = Files(f"{folder}/hours", "hour_000*")
    state = trainer.run(Windows(files, open_file, wait_s=60, poll_s=0.05))
    return state.status, time.monotonic() - began < 20


def evaluated_and_killed(rank, folder):
    """Own windows, each evaluated before it is trained on, of which rank 1 has none in the end; killed there."""
    found = {"evaluated": []}

    def run(kill_at):
        trainer = Trainer(lambda engine, batch: None)
        windows = Windows([[1, 2], [3, 4, 5, 6]][: 2 - rank], loader,
                          shared=False)  # fmt: skip
        evaluator = Engine(lambda engine, batch: float(batch))
        Average().attach(evaluator, "mean")
        Evaluation(evaluator, windows.again, name="next").attach(trainer, TrainingEvents.WINDOW_STARTED)
        trainer.add_event_handler(
            TrainingEvents.EVALUATION_COMPLETED, lambda: found["evaluated"].append(trainer.state.metrics["next/mean"])
        )
        checkpoint = Checkpoint(f"{folder}/killed", save_at_end=False)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
        checkpoint.resume()
        trainer.add_event_handler(Events.ITERATION_STARTED(once=kill_at), lambda: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            trainer.run(windows)
        found["ended"] = trainer.state.reason, trainer.state.iteration, trainer.state.windows

    run(kill_at=5)
    run(kill_at=99)
    return found


def refused(rank):
    """What a rank says whose Windows have another length of epochs than its peer's."""
    with pytest.raises(ValueError, match="per_epoch") as raised:
        Trainer(lambda engine, batch: None).run(Windows([1, 2], lambda _: [torch.ones(1)], per_epoch=1 + rank))
    with pytest.raises(ValueError, match="global_micro_batches"):
        Trainer(lambda engine, batch: None, global_micro_batches=2).run(Windows([[1, 2]], loader, shared=False))
    return str(raised.value)


@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize("count", [2, 3])
def test_each_rank_trains_on_each_of_its_own_samples_once_in_windows_that_end_together(count, kind):
    for rank, own in enumerate(ranks(count, trains, kind)):
        once = [(window, sample) for window, samples in enumerate(OWN.get(rank, []), 1) for sample in samples]
        assert own["seen"] == once + [(window + 3, sample) for window, sample in once], rank
        assert own["told"] == (["WINDOW_STARTED", "WINDOW_COMPLETED"] * 3 + ["EPOCH_COMPLETED"]) * 2
        assert (own["iteration"], own["windows"]) == (2 * (3 + 1 + 1), 6)


def test_windows_of_a_limited_length_end_together():
    for rank, own in enumerate(ranks(2, trains, "loader", {"max_updates": 1})):
        first = [sample for samples in OWN[rank] for sample in samples[:2]]
        assert [sample for _, sample in own["seen"]] == first * 2
        assert (own["iteration"], own["windows"]) == (6, 6)


def test_a_stop_is_heard_while_all_wait_for_a_window(tmp_path):
    write_windows(tmp_path / "hours", 5)
    assert ranks(2, stopped_while_it_waits, tmp_path) == [("interrupted", True)] * 2


def test_a_rank_without_a_window_evaluates_and_resumes_with_its_peers(tmp_path):
    expected = {"evaluated": [1.5, 4.5], "ended": ("max_epochs", 6, 2)}
    assert ranks(2, evaluated_and_killed, tmp_path) == [expected] * 2


def test_settings_of_windows_that_differ_are_refused_on_both():
    for said in ranks(2, refused):
        assert all(words in said for words in ("per_epoch", "1 on rank 0", "2 on rank 1"))


@pytest.mark.parametrize("invariant", [False, True])
def test_shared_windows_are_dealt_out_and_resumed_on_another_number_of_ranks(invariant, tmp_path):
    """Stopped on two ranks within the second window, resumed on three; rank-invariant ones have the bits of one."""
    counts = (5, 9, 4)
    write_windows(tmp_path / "hours", 5, 9, 0, 4)
    stopped, resumed = ranks(2, shared, tmp_path, 3, invariant), ranks(3, shared, tmp_path, None, invariant)
    rows = [row for report in stopped + resumed for row in report["rows"]]
    assert sorted(rows) == sorted(row for count in counts for row in Numbers(count).inputs[:, 0].tolist())
    assert {report["status"] for report in stopped} == {"interrupted"}
    assert {(report["status"], report["windows"]) for report in resumed} == {("completed", 3)}
    if invariant:
        (tmp_path / "alone").mkdir()
        (tmp_path / "hours").rename(tmp_path / "alone" / "hours")
        (whole,) = ranks(1, shared, tmp_path / "alone", None, True)
        assert all(torch.equal(report["weights"], whole["weights"]) for report in resumed)


def resumed_over_another_window(rank, folder):
    def run(own):
        trainer = Trainer(lambda engine, batch: None)
        checkpoint = Checkpoint(f"{folder}/other", save_at_end=False)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
        checkpoint.resume()
        trainer.add_event_handler(Events.ITERATION_STARTED(once=4), lambda: 1 / 0)
        trainer.run(Windows(own, lambda name: [torch.ones(1)] * 5, shared=False))

    with pytest.raises(ZeroDivisionError):
        run(["a", "b"])
    # of the rank whose window is there, the error is that of its peer
    with pytest.raises(Exception, match="The checkpoint was made in the window a, now the next one is c"):
        run(["c", "b"] if rank == 1 else ["a", "b"])


def test_another_window_on_one_rank_is_refused_on_both(tmp_path):
    ranks(2, resumed_over_another_window, tmp_path)


def opened_on_one_rank(rank, folder):
    def samples_of(shared, own, open_one):
        seen = list[int]()
        trainer = Trainer(lambda engine, batch: seen.extend([] if engine.state.group.padding else batch.tolist()))
        trainer.run(Windows(own, open_one, shared=shared), max_epochs=1)
        return seen, trainer

    def shuffled(samples):
        generator = torch.Generator().manual_seed(rank)
        return DataLoader(samples, shuffle=True, generator=generator) if samples else None

    own, _ = samples_of(False, OWN[rank], shuffled)
    assert sorted(own) == sorted(sample for window in OWN[rank] for sample in window)
    dealt, _ = samples_of(True, [list(range(9)), list(range(9, 12))], shuffled)
    assert sorted(sample for share in of_all(dealt) for sample in share) == list(range(12))

    def torn(samples):
        if rank == 1:
            raise OSError(5, "the disk is gone")
        return shuffled(samples)

    with pytest.raises(OSError, match="the disk is gone") as raised:
        samples_of(True, [[1, 2, 3]], torn)
    assert ("Raised on rank 1." in raised.value.__notes__) == (rank == 0)
    assert of_all(rank) == [0, 1]


def test_what_one_rank_alone_opens_or_cannot_open_is_agreed_on(tmp_path):
    ranks(2, opened_on_one_rank, tmp_path)


def evaluates_a_window_before_it_is_trained_on(rank, folder):
    def run(name, stops):
        torch.manual_seed(rank)
        seen = []

        def open_window(window):
            generator = torch.Generator().manual_seed(10 * window + rank)
            data = torch.arange(8.0)[:, None]
            return DataLoader(data, batch_size=1, shuffle=True, generator=generator)

        def predict(model, batch):
            if trainer.state.windows == 2:
                seen.append(batch.item())
                if stops:
                    trainer.request_stop("test")
            return batch.mean()

        trainer, windows = Trainer(lambda engine, batch: None), Windows([1, 2], open_window)
        evaluation = Evaluation(create_evaluator(linear(), predict, {"mean": Average()}), windows.again)
        evaluation.attach(trainer, TrainingEvents.WINDOW_STARTED)
        checkpoint = Checkpoint(Path(folder) / name)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(windows, max_epochs=1)
        return seen

    whole = run("whole", False)
    run("cut", True)
    assert run("cut", False) == whole and len(whole) == 4
    assert sorted(each for rank_seen in of_all(whole) for each in rank_seen) == list(range(8))


def test_stopped_evaluation_of_a_window_is_repeated_in_its_order(tmp_path):
    ranks(2, evaluates_a_window_before_it_is_trained_on, tmp_path)
