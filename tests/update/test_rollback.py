"""Back to the last healthy checkpoint, without the iteration whose loss or gradients were not finite."""

import json
import math
import os
import signal

import pytest
import torch
from ignite.engine import Events
from torch.utils.data import Subset

from ignite_engine import Trainer, TrainingEvents, Update, loader, seed_everything
from ignite_engine.errors import NotFinite
from ignite_engine.handlers import EMA, Checkpoint, GracefulStop, LRSchedule, MetricLogger
from ignite_engine.schedules import warmup_linear
from ignite_engine.state import Start
from tests.kit.refusals import refusals
from tests.kit.tiny import Numbers, linear, mse, one
from tests.update.test_non_finite import journal

GROUPS = {group: range(4 * group - 4, 4 * group) for group in range(1, 7)}
"""The samples of each iteration of an epoch, two batches of two."""


class Spoiled(Numbers):
    """``bad`` samples are NaN; 6 iterations of 2 batches of 2 in an epoch, 8 to 11 are the third."""

    def __init__(self, bad=(9,), count=24):
        super().__init__(count)
        self.inputs[list(bad)] = math.nan


def trainer_of(folder, *, every=2, policy="rollback", model=None, **options):
    """A run of a model with dropout, its schedule, average and log, which goes on where the folder has it."""
    seed_everything(7)
    model = linear(dropout=True) if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    trainer = Trainer(Update(model, optimizer, mse, non_finite=policy, **options), 2)
    LRSchedule(warmup_linear(optimizer, warmup=2, total=20)).attach(trainer)
    ema = EMA(0.5)
    ema.attach(trainer)
    MetricLogger(folder, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=1))
    checkpoint = Checkpoint(folder / "checkpoints", keep_last=20)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=every))
    checkpoint.resume()
    trainer.ema, trainer.checkpoint = ema, checkpoint
    return trainer


def weights(trainer):
    """And their average."""
    average = trainer.ema.state_dict()["weights"]
    return torch.cat([one(trainer.update.model), *(each.reshape(-1) for each in average.values())]).clone()


def without(group, folder, **options):
    """The end of a run whose data lack the samples of a group."""
    rest = [index for index in range(24) if index not in GROUPS[group]]
    trainer = trainer_of(folder, policy=None, **options)
    trainer.run(loader(Subset(Numbers(24), rest), 2), max_epochs=2)
    assert trainer.state.optimizer_steps == 10
    return weights(trainer)


def noted(trainer, event, what=lambda state: state.iteration):
    seen = []
    trainer.add_event_handler(event, lambda: seen.append(what(trainer.state)))
    return seen


def test_the_rest_is_trained_as_if_the_iteration_had_never_been_there(tmp_path, caplog):
    trainer = trainer_of(tmp_path / "run")
    starts = noted(trainer, Events.STARTED, lambda state: state.start)
    trained = noted(trainer, TrainingEvents.OPTIMIZER_STEP_COMPLETED)
    handled = []
    trainer.add_event_handler(Events.EXCEPTION_RAISED, handled.append)
    state = trainer.run(loader(Spoiled(), 2), max_epochs=2)

    assert torch.equal(weights(trainer), without(3, tmp_path / "other"))
    assert (state.status, state.iteration, state.optimizer_steps, state.skipped_steps) == ("completed", 12, 10, 2)
    assert starts == [Start.FRESH, Start.RESUMED, Start.RESUMED] and handled == []
    assert trained == [1, 2, 4, 5, 6, 7, 8, 10, 11, 12]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [(row["iteration"], row["loss"]) for row in rows if "loss" in row]
    assert [iteration for iteration, _ in logged] == trained and all(math.isfinite(loss) for _, loss in logged)
    lines = [line for line in caplog.messages if "goes back" in line]
    for line, at, count in zip(lines, (3, 9), (1, 2), strict=True):
        assert line.startswith(f"The loss of iteration {at} is nan") and f"({count} of at most 10)" in line
    found = journal(trainer)
    assert {at: entry["samples"] for at, entry in found.items()} == {3: [[8, 9, 10, 11]], 9: [[8, 9, 10, 11]]}
    newest = trainer.checkpoint.store.checkpoints()[-1]
    assert math.isnan(found[3]["loss"][0]) and newest.manifest.healthy and newest.iteration == 12


def test_what_was_trained_since_the_checkpoint_is_trained_again(tmp_path):
    trainer = trainer_of(tmp_path)
    begun = noted(trainer, Events.ITERATION_STARTED)
    state = trainer.run(loader(Spoiled((13, 20)), 2))  # in iterations 4 and 6

    assert begun == [1, 2, 3, 4, 3, 4, 5, 6, 5, 6]
    assert (state.optimizer_steps, list(journal(trainer))) == (4, [4, 6])


@pytest.mark.parametrize("killed_at", [5, 6, 9])
def test_killed_after_it_and_resumed_the_same_is_left_out(killed_at, tmp_path):
    data = Spoiled((21,))
    trainer = trainer_of(tmp_path / "run", every=4)
    back = Events.ITERATION_COMPLETED(event_filter=lambda _, count: count == killed_at and bool(journal(trainer)))
    trainer.add_event_handler(back, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(loader(data, 2), max_epochs=2)
    trainer = trainer_of(tmp_path / "run", every=4)
    before = journal(trainer)
    state = trainer.run(loader(data, 2), max_epochs=2)

    assert bool(before) == (killed_at > 5), "saved at the first boundary after the checkpoint of iteration 4"
    assert torch.equal(weights(trainer), without(6, tmp_path / "other", every=4))
    assert list(journal(trainer)) == [6, 12] and state.skipped_steps == 2


@pytest.mark.parametrize("again", [False, True])
def test_unhealthy_checkpoints_are_passed_over_and_the_budget_ends_it(again, tmp_path):
    """The weights are broken in iteration 4, whose checkpoint is not healthy; ``again`` each time that it comes."""
    trainer = trainer_of(tmp_path, every=1, max_skips=3)
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
    with pytest.raises(NotFinite, match=r"iteration 8 is nan.*max_skips=3"):
        trainer.run(loader(Numbers(48), 2))
    assert list(journal(trainer)) == [5, 6, 7] and trainer.state.status == "failed"
    assert [found for found in trainer.checkpoint.store.checkpoints() if found.manifest.healthy][-1].iteration == 3


# -- beside other things that end or interrupt a run ------------------------------------------------------------------


def test_a_stop_that_was_requested_meanwhile_still_stops(tmp_path):
    trainer, sent = trainer_of(tmp_path), []
    GracefulStop(exit=False).attach(trainer)

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def terminate():
        if not sent:  # the iteration starts twice
            sent.append(3)
            os.kill(os.getpid(), signal.SIGTERM)

    state = trainer.run(loader(Spoiled(), 2), max_epochs=2)

    assert (state.status, state.reason, state.iteration) == ("interrupted", "SIGTERM", 2)
    assert trainer.checkpoint.store.checkpoints()[-1].iteration == 2 and list(journal(trainer)) == [3]
    resumed = trainer_of(tmp_path)
    resumed.run(loader(Spoiled(), 2), max_epochs=2)
    assert list(journal(resumed)) == [3, 9]


def without_checkpoints():
    model = linear()
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, non_finite="rollback")
    Trainer(update).run(loader(Numbers(8), 2))


def before_the_first(folder):
    trainer = trainer_of(folder, every=10)
    try:
        trainer.run(loader(Spoiled(), 2))
    finally:
        assert trainer.state.status == "failed" and one(trainer.update.model).isfinite().all()


test_refusals = refusals(
    [
        ("no checkpoints", without_checkpoints, ValueError, "attach Checkpoint run()"),
        ("none is saved yet", before_the_first, NotFinite, "iteration 3 no healthy checkpoint"),
    ]
)
