"""A Trainer as a whole: every step boundary of a run can be resumed, with all that is drawn."""

import gc
import random
import weakref

import numpy as np
import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents, seed_everything
from ignite_engine.handlers import MetricLogger
from tests.kit.resume import EVERYWHERE, PLACES, assert_resumes, program
from tests.kit.seen import Seen
from tests.kit.tiny import events_of, numbers_loader, trainer_of, weights


@pytest.mark.row("D13")
@pytest.mark.parametrize("how", ["stop", "raise", "kill", "same process"])
def test_every_edge_of_a_run_resumes_bit_for_bit(how, tmp_path):
    """Groups of three of seven batches, of which the last one of an epoch is short."""
    made = program(
        [Seen], data=lambda: numbers_loader(14, 2, shuffle=True), accumulation_steps=3, limits={"max_epochs": 3}
    )
    assert_resumes(made, tmp_path, at=EVERYWHERE if how == "stop" else PLACES, how=[how])


@pytest.mark.row("D15")
@pytest.mark.parametrize("kind", ["MT19937", pytest.param("PCG64", marks=pytest.mark.nightly)])
def test_resumed_run_draws_on_from_every_generator_of_the_host(kind, tmp_path):
    def drawn(trainer):
        return [random.random(), random.gauss(0, 1), np.random.random(), np.random.randn(), torch.rand(()).item()]

    np.random.set_bit_generator(getattr(np.random, kind)(1))
    try:
        assert_resumes(program([lambda: Seen(drawn)]), tmp_path, at=EVERYWHERE, how=["stop"])
    finally:
        np.random.set_bit_generator(np.random.MT19937(0))


def test_seed_everything_seeds_every_generator_of_the_host():
    drawn = []
    for seed in (3, 3, 4, (1 << 63) + 3):
        seed_everything(seed)
        drawn.append([random.random(), random.gauss(0, 1), float(np.random.randn()), torch.randn(()).item()])

    assert drawn[0] == drawn[1] != drawn[3] and not set(drawn[0]) & set(drawn[2])


def test_stop_within_a_group_ends_at_a_clean_boundary():
    trainer, whole = trainer_of(accumulation_steps=2), trainer_of(accumulation_steps=2)
    seen = events_of(trainer, (*Events, TrainingEvents.RESUME_POINT))
    trainer.add_event_handler(TrainingEvents.BACKWARD_COMPLETED(once=5), lambda: trainer.request_stop("disk"))
    state = trainer.run(numbers_loader(), max_epochs=3)

    # the fifth micro-batch is in the third update, the last of the epoch
    assert (state.status, state.reason, state.iteration) == ("interrupted", "disk", 3)
    names = ["ITERATION_COMPLETED", "EPOCH_COMPLETED", "RESUME_POINT", "TERMINATE", "COMPLETED"]
    assert [name for name, *_ in seen[-5:]] == names
    state = trainer.run(numbers_loader(), max_epochs=3)
    whole.run(numbers_loader(), max_epochs=3)
    assert (state.status, state.iteration) == ("completed", 9) and torch.equal(weights(trainer), weights(whole))


def test_submodule_in_eval_mode_stays_in_it():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model[1].eval()
    trainer_of(model).run(numbers_loader(), max_iters=2)

    assert [each.training for each in model] == [True, False, True] and not model[1].running_mean.any()


def test_one_iteration_trains_once_in_train_mode():
    trainer = trainer_of()
    before = weights(trainer)
    trainer.update.model.eval()
    state = trainer.run(numbers_loader(), max_iters=1)

    assert (state.iteration, state.optimizer_steps) == (1, 1) and trainer.update.model.training
    assert not torch.equal(before, weights(trainer))


def test_a_dropped_trainer_frees_its_model_at_once():
    trainer = trainer_of()
    model = weakref.ref(trainer.update.model)
    trainer.run(numbers_loader(), max_iters=2)
    gc.disable()
    try:
        del trainer
        assert model() is None
    finally:
        gc.enable()


@pytest.mark.row("A8")
@pytest.mark.parametrize("result", [0.5, torch.tensor(0.5), {"loss": 0.5, "accuracy": 1.0}], ids=["a", "b", "c"])
def test_users_own_update_may_return_a_number_a_tensor_or_a_mapping(result):
    batches = []

    def update(engine, batch):
        batches.append(batch)
        return result

    trainer = Trainer(update, accumulation_steps=2)
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    state = trainer.run([1, 2, 3, 4])

    assert batches == [[1, 2], [3, 4]] and state.output is result
    assert state.metrics["loss"] == 0.5 and ("accuracy" in state.metrics) == isinstance(result, dict)
