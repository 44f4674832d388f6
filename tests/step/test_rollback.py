"""Back to the last healthy checkpoint, without the iteration whose loss or gradients were not finite."""

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from ignite_engine import Start, Trainer, TrainingEvents, Update, Windows, loader
from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.errors import NotFinite
from ignite_engine.handlers import EMA, Checkpoint, GracefulStop, LRSchedule, MetricLogger, warmup_linear
from tests.kit.tiny import Numbers, linear, mse, one
from tests.ranks.forkserver import on_ranks


class Spoiled(Numbers):
    """``bad`` samples are NaN; 6 iterations of 2 batches of 2 in an epoch, without shuffling 8 to 11 are the third."""

    def __init__(self, bad=(9,), count=24):
        super().__init__(count)
        self.inputs[list(bad)] = math.nan


def trainer_of(folder, model=None, *, every=2, policy="rollback", **options):
    model = linear(dropout=True) if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    trainer = Trainer(Update(model, optimizer, mse, non_finite=policy, **options), 2)
    LRSchedule(warmup_linear(optimizer, warmup=2, total=20)).attach(trainer)
    EMA(0.5).attach(trainer)
    MetricLogger(folder, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=1))
    checkpoint = Checkpoint(folder / "checkpoints", keep_last=20)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=every))
    checkpoint.resume()
    return trainer, checkpoint


def weights(trainer):
    ema = trainer.registry.objects["ema"].state_dict()["weights"]
    return torch.cat([one(trainer.update.model), *(each.reshape(-1) for each in ema.values())]).clone()


def journal(trainer):
    return trainer.update.non_finite.journal


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without(iteration, folder, **options):
    """The end of a run that skips the groups of an iteration in each epoch, without a forward."""
    trainer, _ = trainer_of(folder, policy="skip", **options)
    for each in (iteration, iteration + 6):
        journal(trainer)[each] = {"iteration": each}
    trainer.starts_fresh = lambda name: False
    trainer.run(loader(Numbers(24), 2), max_epochs=2)
    assert trainer.state.optimizer_steps == 10
    return weights(trainer)


def test_the_rest_is_trained_as_if_the_iteration_had_never_been_there(tmp_path, caplog):
    trainer, checkpoint = trainer_of(tmp_path / "run")
    starts, trained = list[Start](), list[int]()
    trainer.add_event_handler(Events.STARTED, lambda: starts.append(trainer.state.start))
    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED, lambda: trained.append(trainer.state.iteration))
    handled = []
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: handled.append(error))
    state = trainer.run(loader(Spoiled(), 2), max_epochs=2)

    assert torch.equal(weights(trainer), without(3, tmp_path / "other"))
    assert (state.status, state.iteration, state.optimizer_steps, state.skipped_steps) == ("completed", 12, 10, 2)
    assert starts == [Start.FRESH, Start.RESUMED, Start.RESUMED] and handled == []
    assert trained == [1, 2, 4, 5, 6, 7, 8, 10, 11, 12]
    logged = [(row["iteration"], row["loss"]) for row in rows(tmp_path / "run") if "loss" in row]
    assert [iteration for iteration, _ in logged] == trained and all(math.isfinite(loss) for _, loss in logged)
    assert [line for line in caplog.messages if "goes back" in line] == [
        f"The loss of iteration {at} is nan: the run goes back to a checkpoint without it ({count} of at most 10)."
        for count, at in ((1, 3), (2, 9))
    ]
    assert {at: entry["samples"] for at, entry in journal(trainer).items()} == {
        3: [[8, 9, 10, 11]],
        9: [[8, 9, 10, 11]],
    }
    assert math.isnan(journal(trainer)[3]["loss"][0])
    newest = checkpoint.store.checkpoints()[-1]
    assert newest.manifest.healthy and newest.iteration == 12


def test_what_a_resume_has_left_out_is_left_out_of_the_checkpoint_that_it_goes_back_to(tmp_path):
    """And taken from those that were saved since."""
    before, _ = trainer_of(tmp_path)
    before.run(loader(Spoiled(()), 2), max_iters=2)

    model = linear(dropout=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    trainer = Trainer(Update(model, optimizer, mse, non_finite="rollback"), 2)
    schedule = warmup_linear(optimizer, warmup=2, total=20)
    LRSchedule(schedule).attach(trainer)
    checkpoint = Checkpoint(tmp_path / "checkpoints", keep_last=20)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    steps = []
    trainer.add_event_handler(Events.STARTED, lambda: steps.append(schedule.steps))
    checkpoint.resume(ignore=["ema", "lr_schedule", "metric_logger", "metric_logger/jsonl"])
    state = trainer.run(loader(Spoiled(), 2), max_epochs=2)

    assert (state.status, state.iteration, state.optimizer_steps) == ("completed", 12, 10)
    assert steps == [0, 0, 5] and schedule.steps == 8  # the third start is that from iteration 8


def test_what_was_trained_since_the_checkpoint_is_trained_again(tmp_path):
    trainer, _ = trainer_of(tmp_path)
    begun = []
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: begun.append(trainer.state.iteration))
    state = trainer.run(loader(Spoiled((13, 20)), 2))  # in iterations 4 and 6

    assert begun == [1, 2, 3, 4, 3, 4, 5, 6, 5, 6]
    assert (state.optimizer_steps, list(journal(trainer))) == (4, [4, 6])


@pytest.mark.parametrize("killed_at", [5, 6, 9])
def test_killed_after_it_and_resumed_the_same_is_left_out(killed_at, tmp_path):
    class Killed(Exception): ...

    def kill():
        raise Killed

    data = Spoiled((21,))
    trainer, _ = trainer_of(tmp_path / "run", every=4)
    back = Events.ITERATION_COMPLETED(event_filter=lambda _, count: count == killed_at and bool(journal(trainer)))
    trainer.add_event_handler(back, kill)
    with pytest.raises(Killed):
        trainer.run(loader(data, 2), max_epochs=2)
    trainer, _ = trainer_of(tmp_path / "run", every=4)
    before = dict(journal(trainer))
    state = trainer.run(loader(data, 2), max_epochs=2)

    assert bool(before) == (killed_at > 5), "saved at the first boundary after the checkpoint of iteration 4"
    assert torch.equal(weights(trainer), without(6, tmp_path / "other", every=4))
    assert list(journal(trainer)) == [6, 12] and state.skipped_steps == 2


@pytest.mark.parametrize("again", [False, True])
def test_unhealthy_checkpoints_are_passed_over_and_the_budget_ends_it(again, tmp_path):
    """The weights are broken in iteration 4, whose checkpoint is not healthy; ``again`` each time that it comes."""
    trainer, checkpoint = trainer_of(tmp_path, every=1, max_skips=3)
    broken = []

    @trainer.on(Events.ITERATION_COMPLETED(once=4))
    def break_weights():
        if again or not broken:
            broken.append(4)
            with torch.no_grad():
                next(iter(trainer.update.model.parameters())).fill_(math.inf)

    if not again:
        state = trainer.run(loader(Numbers(48), 2))
        assert (state.status, state.iteration, list(journal(trainer))) == ("completed", 12, [5])
        assert one(trainer.update.model).isfinite().all()
        return
    with pytest.raises(NotFinite, match=r"^The loss of iteration 8 is nan, and 3 iterations were left out already"):
        trainer.run(loader(Numbers(48), 2))
    assert list(journal(trainer)) == [5, 6, 7] and trainer.state.status == "failed"
    assert checkpoint.store.latest(healthy_only=True).checkpoint.iteration == 3


def test_a_run_that_is_ended_right_after_it_has_a_last_step_boundary(tmp_path):
    trainer, _ = trainer_of(tmp_path)
    boundaries = []
    trainer.add_event_handler(TrainingEvents.RESUME_POINT, lambda: boundaries.append(trainer.state.iteration))
    trainer.add_event_handler(
        Events.STARTED, lambda: trainer.terminate() if trainer.state.start is Start.RESUMED else None
    )
    trainer.run(loader(Spoiled(), 2))
    assert boundaries == [1, 2, 2]


def test_without_a_checkpoint_it_is_refused(tmp_path):
    model = linear()
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, non_finite="rollback")
    with pytest.raises(ValueError, match="needs checkpoints to go back to: attach a Checkpoint before run"):
        Trainer(update).run(loader(Numbers(8), 2))

    trainer, _ = trainer_of(tmp_path, every=10)
    with pytest.raises(
        NotFinite, match="The loss of iteration 3 is nan, and there is no healthy checkpoint to go back"
    ):
        trainer.run(loader(Spoiled(), 2))
    assert trainer.state.status == "failed"
    assert torch.equal(one(trainer.update.model), one(trainer.update.model).nan_to_num())


class OneWay:
    """Windows of a stream that cannot go back."""

    def __init__(self):
        self.left = 3

    def next_window(self):
        self.left -= 1
        return self.left

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        if self.left < 3:
            raise OSError("gone")


def test_a_run_whose_data_cannot_go_back_has_failed(tmp_path):
    trainer, _ = trainer_of(tmp_path)
    with pytest.raises(OSError, match="gone"):
        trainer.run(Windows(OneWay(), lambda name: loader(Spoiled(), 2)), max_epochs=1)
    assert (trainer.state.status, trainer.state.reason) == ("failed", "OSError: gone")


def test_a_stop_that_was_requested_meanwhile_still_stops(tmp_path):
    trainer, checkpoint = trainer_of(tmp_path)
    GracefulStop(exit=False).attach(trainer)
    sent = []

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def terminate():
        if not sent:  # the iteration starts twice
            sent.append(3)
            os.kill(os.getpid(), 15)

    state = trainer.run(loader(Spoiled(), 2), max_epochs=2)

    assert (state.status, state.reason, state.iteration) == ("interrupted", "SIGTERM", 3)
    assert checkpoint.store.checkpoints()[-1].iteration == 3 and list(journal(trainer)) == [3]


def test_a_save_in_the_background_is_finished_first(tmp_path, monkeypatch):
    def slowly(*args, **options):
        time.sleep(0.2)
        return save(*args, **options)

    save = CheckpointStore.save
    monkeypatch.setattr(CheckpointStore, "save", slowly)
    model = linear()
    trainer = Trainer(Update(model, torch.optim.Adam(model.parameters(), lr=0.05), mse, non_finite="rollback"), 2)
    checkpoint = Checkpoint(tmp_path, background=True, on_exception=True, keep_last=20)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    begun = []
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: begun.append(trainer.state.iteration))
    trainer.run(loader(Spoiled(), 2, num_workers=1))

    assert begun == [1, 2, 3, 3, 4, 5, 6] and trainer.state.skipped_steps == 1
    assert [each.iteration for each in checkpoint.store.checkpoints()] == [2, 3, 4, 6]


@pytest.mark.parametrize("epoch_length", [None, 4])
def test_run_that_was_paused_goes_back_too(epoch_length, tmp_path):
    trainer, _ = trainer_of(tmp_path)
    begun = []
    trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda: begun.append((trainer.state.epoch, trainer.state.iteration))
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: trainer.interrupt())
    trainer.run(loader(Spoiled(), 2), max_epochs=2, epoch_length=epoch_length)
    state = trainer.run()

    assert state.status == "completed" and list(journal(trainer)) == [3, 9][: 1 + (epoch_length is None)]
    epochs = [epoch for epoch, iteration in begun if iteration > 3]
    assert epochs == ([1] * 3 + [2] * 7 if epoch_length is None else [1] + [2] * 4)


class Stream(IterableDataset[Any]):
    """This rank's share of ``data``, of a length that nobody knows."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[index] for index in range(dist.get_rank(), len(self.data), 2))


def _runs(rank, folder, kind):
    """A run that goes back in the iterations 3 and 9, and one that never had them."""
    for data, policy in ((Spoiled((19,), 48), "rollback"), (Numbers(48), "skip")):
        model = linear(dropout=True)
        torch.manual_seed(rank)
        wrapped = fully_shard(model) if kind == "sharded" else DistributedDataParallel(model)
        options = {"weight_fn": lambda batch: len(batch[0])} if kind == "stream" else {}
        trainer, _ = trainer_of(folder / kind / policy, wrapped, policy=policy, **options)
        if policy == "skip":
            journal(trainer).update({each: {"iteration": each} for each in (3, 9)})
            trainer.starts_fresh = lambda name: False
        seen = []
        trainer.add_event_handler(
            Events.ITERATION_STARTED, lambda trainer, seen: seen.append(trainer.state.iteration), seen
        )
        trainer.run(DataLoader(Stream(data), 2) if kind == "stream" else loader(data, 2), max_epochs=2)
        ends = [getattr(each, "full_tensor", lambda each=each: each)().detach() for each in wrapped.parameters()]
        left_out = {at: entry.get("samples") for at, entry in journal(trainer).items()}
        yield torch.cat([each.reshape(-1) for each in ends]), seen, left_out


def _one_of_two_ranks(rank, folder):
    logging.basicConfig(filename=f"{folder}/{rank}.txt", format="%(message)s", force=True, level=logging.WARNING)
    found = {kind: list(_runs(rank, Path(folder), kind)) for kind in ("ddp", "stream", "sharded")}
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_go_back_together(tmp_path):
    on_ranks(2, _one_of_two_ranks, tmp_path)
    outcomes = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for found in outcomes:
        for kind, ((end, seen, left_out), (whole, *_)) in found.items():
            assert torch.equal(end, whole) and torch.equal(end, outcomes[0][kind][0][0]) and end.isfinite().all(), kind
            assert seen == [1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 9, 10, 11, 12]
            samples = [None, None] if kind == "stream" else [[16, 18, 20, 22], [17, 19, 21, 23]]
            assert left_out == {3: samples, 9: samples}
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert said[0].count("nan on rank 1: the run goes back") == 6 and "goes back" not in said[1]
