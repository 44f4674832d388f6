"""The average has exact values, replaces the weights in the named evaluations only, and restores them."""

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator
from ignite_engine.events import Phase
from ignite_engine.handlers import EMA, Checkpoint, Evaluation, LRSchedule
from ignite_engine.schedules import constant
from ignite_engine.update import BaseUpdate
from tests.kit import saved
from tests.kit.processes import ranks
from tests.kit.tiny import linear, mse, numbers_loader, one, trainer_of, weights


def evaluation_of(trainer, seen, name="val", act=lambda: None):
    """An evaluation of one batch that notes the weights it runs with, and may do something in its middle."""

    def look(model, batch):
        seen.append(one(model).clone())
        act()

    return Evaluation(create_evaluator(trainer.update.model, look), numbers_loader(2), name=name)


def vector(tensors):
    return torch.cat([value.reshape(-1) for value in tensors.values()])


def average_of(ema):
    return vector(ema.state_dict()["weights"])


def noted(trainer, event=TrainingEvents.OPTIMIZER_STEP_COMPLETED):
    """Gets the weights after each step."""
    live = []
    trainer.add_event_handler(event, lambda: live.append(weights(trainer)))
    return live


def batch_of(number, dtype=torch.float32):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, generator=generator).to(dtype), torch.randn(4, 1, generator=generator).to(dtype)


# --- its values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [False, True])
def test_average_is_the_recursion_over_the_weights_of_each_step_that_was_not_skipped(warmup):
    heavy = iter([1, 1, 0, 0, *[1] * 8])
    trainer = trainer_of(linear(dtype=torch.float64), 2, weight_fn=lambda batch: next(heavy))
    ema, expected = EMA(0.3, warmup=warmup), weights(trainer)
    ema.attach(trainer)
    history = noted(trainer)
    state = trainer.run([batch_of(number, torch.float64) for number in range(12)], max_epochs=1)
    for count, current in enumerate(history):
        decay = min(0.3, (1 + count) / (10 + count)) if warmup else 0.3
        expected = decay * expected + (1 - decay) * current

    assert (ema.updates, state.skipped_steps) == (5, 1) and not torch.equal(history[-1], history[0])
    torch.testing.assert_close(average_of(ema), expected, rtol=1e-14, atol=1e-15)


class Mixed(nn.Module):
    """Parameters of four types and a tied one; an integer that is not averaged."""

    def __init__(self):
        super().__init__()
        for name, kind in (("bf16", torch.bfloat16), ("fp32", None), ("fp64", torch.float64), ("c64", torch.complex64)):
            setattr(self, name, nn.Parameter(torch.ones(3, dtype=kind)))
        self.tied = self.fp32
        self.count = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)

    def forward(self, inputs):
        return (inputs * (self.bf16.float() + self.fp32 + self.fp64.float() + self.c64.abs())).sum()


def test_several_types_are_averaged_each_with_enough_digits_and_tied_weights_once():
    model, seen = Mixed(), []
    optimizer = torch.optim.SGD([model.bf16, model.fp32, model.fp64, model.c64], lr=1.0)
    trainer, ema = Trainer(Update(model, optimizer, lambda model, batch: model(batch))), EMA(0.999, warmup=False)
    ema.attach(trainer)
    evaluator = create_evaluator(model, lambda model, batch: seen.append(model.tied.tolist()))
    Evaluation(evaluator, [0]).attach(trainer)
    trainer.run([torch.ones(3)], max_epochs=1)
    averages = ema.state_dict()["weights"]

    assert list(averages) == ["bf16", "fp32", "fp64", "c64", "tied"]
    assert averages["bf16"].dtype == torch.float32 and averages["fp64"].dtype == torch.float64
    # from 1 a step of -1 to 0, of which the average takes a thousandth: in bf16 it would still be 1
    for name in ("bf16", "fp32", "fp64", "c64"):
        assert averages[name].real.tolist() == pytest.approx([0.999] * 3, rel=1e-6), name
    assert averages["tied"] is averages["fp32"] and seen == [averages["tied"].tolist()]
    assert model.tied is model.fp32 and model.fp32.tolist() == [0.0] * 3
    model.load_state_dict({**model.state_dict(), **averages})  # as its documentation says
    assert model.tied.tolist() == seen[0]


# --- evaluations ------------------------------------------------------------------------------------------------------


def test_named_evaluations_use_the_average_until_their_end_and_others_the_weights():
    trainer, named, at_its_end, other, averages = trainer_of(), [], [], [], []
    ema = EMA(0.9, evaluate=("val",))
    ema.attach(trainer)
    live = noted(trainer)
    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED, lambda: averages.append(average_of(ema).clone()))

    def at_end():
        if trainer.state.evaluating.name == "val":
            at_its_end.append(weights(trainer))

    evaluation_of(trainer, named, "val").attach(trainer, Events.ITERATION_COMPLETED)
    evaluation_of(trainer, other, "other").attach(trainer, Events.ITERATION_COMPLETED)
    trainer.add_event_handler(TrainingEvents.EVALUATION_COMPLETED, at_end)
    trainer.run(numbers_loader(), max_epochs=1)

    assert len(named) == 6 and not any(map(torch.equal, averages, live))
    assert all(map(torch.equal, named, averages)) and all(map(torch.equal, at_its_end, averages))
    assert all(map(torch.equal, other, live)) and trainer.state.evaluating is None


def test_an_average_that_begins_late_is_evaluated_from_then_on_and_begins_with_the_weights_of_then():
    trainer, evaluated = trainer_of(), []
    ema = EMA(0.9, warmup=False)
    ema.attach(trainer, TrainingEvents.OPTIMIZER_STEP_COMPLETED(after=2))
    live = noted(trainer)
    evaluation_of(trainer, evaluated).attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(numbers_loader(), max_iters=4)

    assert all(map(torch.equal, evaluated[:3], live[:3]))
    assert torch.allclose(evaluated[3], 0.9 * live[2] + 0.1 * live[3])


@pytest.mark.parametrize("is_first", [True, False])
def test_an_average_of_epochs_is_evaluated_with_its_epoch_whatever_was_attached_first(is_first):
    trainer, evaluated, averages, ema = trainer_of(), [], [], EMA(0.9)
    evaluation = evaluation_of(trainer, evaluated)
    for handler in (ema, evaluation) if is_first else (evaluation, ema):
        handler.attach(trainer, Events.EPOCH_COMPLETED)
    trainer.add_event_handler(TrainingEvents.RESUME_POINT, lambda: averages.append(average_of(ema).clone()))
    trainer.run(numbers_loader(), max_epochs=3)
    assert len(evaluated) == 3 and all(map(torch.equal, evaluated, averages[5::6]))


def test_buffers_are_the_models_own():
    model, means = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), []
    trainer, ema = trainer_of(model), EMA(0.9)
    ema.attach(trainer)
    evaluator = create_evaluator(model, lambda model, batch: means.append(model[1].running_mean.clone()))
    Evaluation(evaluator, numbers_loader(2)).attach(trainer)
    trainer.run(numbers_loader(), max_epochs=1)

    assert torch.equal(means[0], model[1].running_mean) and means[0].abs().sum() > 0
    assert not [name for name in ema.state_dict()["weights"] if "running" in name]


@pytest.mark.parametrize("where", ["the evaluation", "a handler of its start", "a handler of its end"])
def test_weights_are_put_back_on_any_error(where):
    def interrupt():
        raise KeyboardInterrupt

    trainer, seen = trainer_of(), []
    live = noted(trainer)
    EMA(0.9).attach(trainer)
    evaluation_of(trainer, seen, act=interrupt if where == "the evaluation" else lambda: None).attach(trainer)
    if where == "a handler of its start":
        trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, lambda: seen.append(weights(trainer)))
        trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, interrupt)
    if where == "a handler of its end":
        trainer.add_event_handler(TrainingEvents.EVALUATION_COMPLETED, interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(numbers_loader(), max_epochs=1)

    assert not torch.equal(seen[0], live[-1])  # it happened while the average stood there
    assert torch.equal(weights(trainer), live[-1]) and trainer.state.evaluating is None


def test_evaluation_interrupted_by_a_stop_saves_the_weights(tmp_path):
    trainer, seen = trainer_of(), []
    EMA(0.9).attach(trainer)
    live = noted(trainer)
    evaluation_of(trainer, seen, act=lambda: trainer.request_stop("enough")).attach(
        trainer, Events.ITERATION_COMPLETED(once=3)
    )
    Checkpoint(tmp_path).attach(trainer)
    trainer.run(numbers_loader(), max_epochs=2)
    parts = saved.parts(tmp_path, 3)

    assert trainer.state.status == "interrupted" and not torch.equal(seen[0], live[-1])
    assert torch.equal(vector(parts["model"]), live[-1]) and torch.equal(vector(parts["ema"]["weights"]), seen[0])


# --- starts -----------------------------------------------------------------------------------------------------------


def test_each_run_in_one_process_starts_at_the_current_weights():
    trainer, seen, ema = trainer_of(), [], EMA(0.9)
    evaluation = evaluation_of(trainer, seen)
    evaluation.attach(trainer, Events.STARTED)  # attached before the average
    ema.attach(trainer)
    evaluation(trainer)  # before there is one
    begun = weights(trainer)
    trainer.run(numbers_loader(), max_epochs=1)
    between = weights(trainer)
    trainer.run(numbers_loader(), max_epochs=1)

    assert torch.equal(seen[0], begun) and torch.equal(seen[2], between) and ema.updates == 6


# --- models -----------------------------------------------------------------------------------------------------------


class Own(BaseUpdate):
    """A user's update with a model: each step adds 1."""

    def __init__(self, fires):
        self.model, self.fires = linear(), fires

    def __call__(self, trainer, batch):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1.0)
        if self.fires:
            trainer.fire_event(TrainingEvents.OPTIMIZER_STEP_COMPLETED)


def test_model_of_a_users_own_update_is_averaged_and_put_back():
    trainer, seen = Trainer(Own(fires=True)), []
    begun = weights(trainer)
    EMA(0.5, warmup=False).attach(trainer)
    evaluation_of(trainer, seen).attach(trainer)
    trainer.run([0, 1], max_epochs=1)

    torch.testing.assert_close(seen[0], begun + 1.25)
    torch.testing.assert_close(weights(trainer), begun + 2.0)


@pytest.mark.parametrize("make", [lambda optimizer: EMA(), lambda optimizer: LRSchedule(constant(optimizer))])
def test_what_never_moves_is_a_warning(make):
    trainer = Trainer(update := Own(fires=False))
    make(torch.optim.SGD(update.model.parameters())).attach(trainer)
    with pytest.warns(UserWarning, match="OPTIMIZER_STEP_COMPLETED"):
        trainer.run([0, 1], max_epochs=1)


def sharded(model):
    torch.distributed.fsdp.fully_shard(model[2])
    return torch.distributed.fsdp.fully_shard(model)


WRAPPINGS = {
    "plain": lambda model: model,
    "ddp": nn.parallel.DistributedDataParallel,
    "compiled ddp": lambda model: nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager")),
    "fsdp2": sharded,
}


def trained(wrapping):
    """Names and values of averages and weights as one process sees them, and what each evaluation computed."""
    model, outputs, ema = WRAPPINGS[wrapping](linear()), [], EMA(0.9)
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), mse))

    @torch.no_grad()
    def before_training():
        model(torch.ones(1, 3))  # after which FSDP2 has whole parameters

    before_training.phase = Phase.PREPARE
    trainer.add_event_handler(Events.STARTED, before_training)
    ema.attach(trainer)
    evaluator = create_evaluator(model, lambda model, batch: outputs.append(model(torch.ones(1, 3)).detach()))
    Evaluation(evaluator, [0]).attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run([batch_of(number) for number in range(4)], max_epochs=1)
    averages = ema.state_dict()["weights"]
    values = [*averages.values(), *model.parameters()]
    return list(averages), [whole(value) for value in values] + outputs


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def test_wrapped_models_have_the_average_of_the_plain_one():
    """Both ranks have the same batches: their mean is the plain gradient, to rounding."""
    names, expected = trained("plain")
    assert names == list(linear().state_dict())
    for answers in ranks(2, lambda rank: {wrapping: trained(wrapping) for wrapping in list(WRAPPINGS)[1:]}):
        for wrapping, (found, values) in answers.items():
            assert found == names, wrapping
            torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6, msg=wrapping)
