"""The average has exact values, replaces the weights in the named evaluations only, and restores them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ignite_engine import Phase, Trainer, TrainingEvents, Update, create_evaluator
from ignite_engine.handlers import EMA, Checkpoint, Evaluation
from tests.kit.tiny import linear, mse, numbers_loader, one, trainer_of, weights
from tests.ranks.forkserver import on_ranks


def bare(trainer):
    model = trainer.update.model
    return model


def evaluation_of(trainer, seen, name="val", act=None):
    """An evaluation of one batch that notes the weights it runs with, and may do something in its middle."""

    def look(model, batch):
        seen.append(one(model).clone())
        if act is not None:
            act()

    return Evaluation(create_evaluator(bare(trainer), look), numbers_loader(2), name=name)


def average_of(ema):
    return torch.cat([value.reshape(-1) for value in ema.state_dict()["weights"].values()])


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# --- its values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [False, True])
def test_average_is_the_recursion_over_the_weights_of_each_update(warmup):
    trainer = trainer_of(linear(dtype=torch.float64))
    ema = EMA(0.3, warmup=warmup)
    ema.attach(trainer)
    history = [weights(trainer)]
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: history.append(weights(trainer)))
    trainer.run([batch_of(torch.float64, number) for number in range(6)], max_epochs=1)
    expected = history[0]
    for count, current in enumerate(history[1:]):
        decay = min(0.3, (1 + count) / (10 + count)) if warmup else 0.3
        expected = decay * expected + (1 - decay) * current

    assert ema.updates == 6 and not torch.equal(history[-1], history[0])
    torch.testing.assert_close(average_of(ema), expected, rtol=1e-14, atol=1e-15)


def batch_of(dtype, number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, generator=generator).to(dtype), torch.randn(4, 1, generator=generator).to(dtype)


def test_average_waits_for_skipped_steps_and_is_updated_once_per_step():
    heavy = iter([1, 1, 0, 0, 1, 1])
    trainer = trainer_of(accumulation_steps=2, weight_fn=lambda batch: next(heavy))
    ema, averages = EMA(0.5), list[Tensor]()
    ema.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: averages.append(average_of(ema).clone()))
    state = trainer.run(numbers_loader(), max_epochs=1)

    assert (state.optimizer_steps, state.skipped_steps, ema.updates) == (2, 1, 2)
    assert torch.equal(averages[0], averages[1]) and not torch.equal(averages[1], averages[2])


class Mixed(nn.Module):
    """Parameters of four types and a tied one; an integer that is not averaged."""

    def __init__(self):
        super().__init__()
        self.bf16 = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.fp32 = nn.Parameter(torch.ones(3))
        self.fp64 = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.c64 = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.tied = self.fp32
        self.count = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)

    def forward(self, inputs):
        total = self.bf16.float() + self.fp32 + self.fp64.float() + self.c64.abs()
        return (inputs * total).sum()


def test_several_types_are_averaged_each_with_enough_digits():
    model = Mixed()
    parameters = [model.bf16, model.fp32, model.fp64, model.c64]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    trainer = Trainer(Update(model, optimizer, lambda model, batch: model(batch)))
    ema = EMA(0.999, warmup=False, evaluate=())
    ema.attach(trainer)
    trainer.run([torch.ones(3)], max_epochs=1)
    saved = ema.state_dict()["weights"]

    assert list(saved) == ["bf16", "fp32", "fp64", "c64", "tied"]
    assert saved["bf16"].dtype == torch.float32 and saved["fp64"].dtype == torch.float64
    # from 1 a step of -1 to 0, of which the average takes a thousandth: in bf16 it would still be 1
    for name in ("bf16", "fp32", "fp64", "c64"):
        assert saved[name].real.tolist() == pytest.approx([0.999] * 3, rel=1e-6), name


def test_tied_weights_have_one_average_under_both_names():
    model = Mixed()
    trainer = Trainer(
        Update(model, torch.optim.SGD([model.fp32], lr=1.0), lambda model, batch: (model.fp32 * batch).sum())
    )
    ema, seen = EMA(0.5, warmup=False), list[Tensor]()
    ema.attach(trainer)
    evaluation_of(trainer, seen).attach(trainer)
    trainer.run([torch.ones(3)], max_epochs=1)
    saved = ema.state_dict()["weights"]

    assert saved["tied"] is saved["fp32"] and saved["fp32"].tolist() == [0.5] * 3
    assert model.tied is model.fp32 and model.fp32.tolist() == [0.0] * 3
    assert seen[0].tolist().count(0.5) == 3  # evaluated once, though it has two names
    fresh = Mixed()
    fresh.load_state_dict({**trainer.registry.objects["model"].state_dict(), **through_a_file(saved)})
    assert fresh.tied.tolist() == [0.5] * 3


def test_nothing_is_read_from_the_device():
    class Reads(TorchDispatchMode):
        names: Sequence[str] = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names = [*self.names, str(func)]
            return func(*args, **(kwargs or {}))

    trainer = trainer_of()
    ema = EMA(0.9)
    ema.attach(trainer)
    trainer.run(numbers_loader(), max_epochs=1)
    with Reads() as reads:
        ema(trainer)

    assert reads.names == ["aten._foreach_lerp_.Scalar"]


# --- evaluations ------------------------------------------------------------------------------------------------------


def test_named_evaluations_use_the_average_and_the_others_the_weights():
    trainer, named, other = trainer_of(), list[Tensor](), list[Tensor]()
    ema = EMA(0.9, evaluate=("val",))
    ema.attach(trainer)
    live = []
    averages = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: live.append(weights(trainer)))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: averages.append(average_of(ema).clone()))
    evaluation_of(trainer, named, "val").attach(trainer, Events.ITERATION_COMPLETED)
    evaluation_of(trainer, other, "other").attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(numbers_loader(), max_epochs=1)

    assert len(named) == 6 and not any(torch.equal(*pair) for pair in zip(averages, live, strict=True))
    assert all(torch.equal(*pair) for pair in zip(named, averages, strict=True))
    assert all(torch.equal(*pair) for pair in zip(other, live, strict=True))


def test_average_is_in_place_until_the_handlers_of_the_evaluation_have_run():
    trainer, seen = trainer_of(), list[Tensor]()
    ema = EMA(0.9)
    evaluation_of(trainer, []).attach(trainer)
    ema.attach(trainer)
    trainer.add_event_handler(TrainingEvents.EVALUATION_COMPLETED, lambda: seen.append(weights(trainer)))
    trainer.run(numbers_loader(), max_epochs=1)

    assert torch.equal(seen[0], average_of(ema)) and not torch.equal(seen[0], weights(trainer))
    assert trainer.state.evaluating is None


def test_training_does_not_notice_it():
    def train(ema):
        trainer = trainer_of(linear(dropout=True))
        if ema is not None:
            ema.attach(trainer)
        evaluation_of(trainer, []).attach(trainer, Events.ITERATION_COMPLETED(every=2))
        torch.manual_seed(8)
        trainer.run(numbers_loader(shuffle=True), max_epochs=2)
        return weights(trainer)

    assert torch.equal(train(EMA(0.9)), train(None))


def test_buffers_are_the_models_own():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    trainer, means = trainer_of(model), list[Tensor]()
    ema = EMA(0.9)
    ema.attach(trainer)
    evaluator = create_evaluator(model, lambda model, batch: means.append(model[1].running_mean.clone()))
    Evaluation(evaluator, numbers_loader(2)).attach(trainer)
    trainer.run(numbers_loader(), max_epochs=1)

    assert torch.equal(means[0], model[1].running_mean) and means[0].abs().sum() > 0
    assert not [name for name in ema.state_dict()["weights"] if "running" in name]


def interrupt():
    raise KeyboardInterrupt


def fail():
    raise RuntimeError("lost")


@pytest.mark.parametrize(("act", "error"), [(fail, RuntimeError), (interrupt, KeyboardInterrupt)])
@pytest.mark.parametrize("where", ["the evaluation", "a handler of its start", "a handler of its end"])
def test_weights_are_put_back_on_any_error(act, error, where):
    trainer, seen, before = trainer_of(), list[Tensor](), list[Tensor]()
    EMA(0.9).attach(trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: before.append(weights(trainer)))
    in_evaluation = act if where == "the evaluation" else None
    evaluation_of(trainer, seen, act=in_evaluation).attach(trainer)
    if where == "a handler of its start":
        trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, lambda: seen.append(weights(trainer)))
        trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, act)
    if where == "a handler of its end":
        trainer.add_event_handler(TrainingEvents.EVALUATION_COMPLETED, act)
    # the handler that notes them runs after the evaluation's phase, and so never where that raises
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), lambda: before.append(weights(trainer)))
    with pytest.raises(error):
        trainer.run(numbers_loader(), max_epochs=1)

    assert len(before) == 1 and not torch.equal(seen[0], before[0])  # the fault happened while it stood there
    assert torch.equal(weights(trainer), before[0])
    assert trainer.state.evaluating is None


def test_evaluation_interrupted_by_a_stop_saves_the_weights(tmp_path):
    trainer, seen = trainer_of(), list[Tensor]()
    EMA(0.9).attach(trainer)

    def stop():
        trainer.request_stop("enough")

    def look(model, batch):
        seen.append(one(model).clone())
        stop()

    evaluator = create_evaluator(bare(trainer), look)
    Evaluation(evaluator, numbers_loader(12)).attach(trainer, Events.ITERATION_COMPLETED(once=3))
    live = []
    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED, lambda: live.append(weights(trainer)))
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(trainer)
    trainer.run(numbers_loader(), max_epochs=2)
    saved = checkpoint.store.load(checkpoint.store.checkpoints()[-1].path, 0).shared

    assert (trainer.state.status, trainer.state.iteration, len(seen)) == ("interrupted", 3, 1)
    assert not torch.equal(seen[0], live[-1])
    assert torch.equal(torch.cat([value.reshape(-1) for value in saved["model"].values()]), live[-1])
    assert torch.equal(torch.cat([value.reshape(-1) for value in saved["ema"]["weights"].values()]), seen[0])


def test_what_is_saved_in_the_middle_of_an_evaluation_is_the_weights():
    trainer, captured = trainer_of(), list[Any]()
    ema = EMA(0.9)
    ema.attach(trainer)
    evaluation_of(trainer, [], act=lambda: captured.append(through_a_file(trainer.registry.capture()[0]))).attach(
        trainer
    )
    trainer.run(numbers_loader(), max_epochs=1)
    saved = captured[0]

    assert torch.equal(torch.cat([value.reshape(-1) for value in saved["model"].values()]), weights(trainer))
    assert torch.equal(torch.cat([value.reshape(-1) for value in saved["ema"]["weights"].values()]), average_of(ema))
    assert not torch.equal(average_of(ema), weights(trainer))
    assert torch.equal(
        one(bare(trainer)), torch.cat([v.reshape(-1) for v in trainer.registry.capture()[0]["model"].values()])
    )


class Unsized:
    """Three batches without a length: the last iteration has its own step boundary before its epoch is evaluated."""

    def __iter__(self):
        return iter([batch_of(torch.float32, number) for number in range(3)])


def test_save_in_the_background_is_of_the_weights_where_the_average_comes_before_the_next_step(tmp_path):
    trainer, live = trainer_of(), list[Tensor]()
    EMA(0.9).attach(trainer)
    evaluation_of(trainer, []).attach(trainer)
    checkpoint = Checkpoint(tmp_path, background=True, keep_last=9)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED)

    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED, lambda: live.append(weights(trainer)))
    failed = []
    trainer.add_event_handler(TrainingEvents.CHECKPOINT_FAILED, lambda: failed.append(checkpoint.error))
    trainer.run(Unsized(), max_epochs=2)
    saved = {each.iteration: checkpoint.store.load(each.path, 0).shared for each in checkpoint.store.checkpoints()}

    assert failed == [] and sorted(saved) == [1, 2, 3, 4, 5, 6]
    for iteration, parts in saved.items():
        assert torch.equal(torch.cat([value.reshape(-1) for value in parts["model"].values()]), live[iteration - 1])


def test_two_averages_in_one_evaluation_are_refused():
    trainer = trainer_of()
    EMA(0.9).attach(trainer)
    EMA(0.5, name="fast").attach(trainer)
    evaluation_of(trainer, []).attach(trainer)
    live = []
    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED, lambda: live.append(weights(trainer)))
    with pytest.raises(
        ValueError, match=r"would replace the weights in the evaluation 'val': give each EMA its own evaluations"
    ):
        trainer.run(numbers_loader(), max_epochs=1)

    assert torch.equal(weights(trainer), live[-1])


def test_two_averages_have_each_its_own_evaluation():
    trainer, slow, fast = trainer_of(), list[Tensor](), list[Tensor]()
    emas = EMA(0.9, warmup=False, evaluate=("slow",)), EMA(0.5, warmup=False, evaluate=("fast",), name="fast")
    for ema in emas:
        ema.attach(trainer)
    evaluation_of(trainer, slow, "slow").attach(trainer)
    evaluation_of(trainer, fast, "fast").attach(trainer)
    trainer.run(numbers_loader(), max_epochs=1)

    assert torch.equal(slow[0], average_of(emas[0])) and torch.equal(fast[0], average_of(emas[1]))
    assert not torch.equal(slow[0], fast[0])


# --- resume -----------------------------------------------------------------------------------------------------------


def run_with(folder, stop_at=None):
    trainer, seen = trainer_of(linear(dropout=True)), list[Tensor]()
    ema = EMA(0.99)
    ema.attach(trainer)
    evaluation_of(trainer, seen).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    if stop_at is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), lambda: trainer.request_stop("enough"))
    torch.manual_seed(3)
    if folder is not None:
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer)
        checkpoint.resume()
    trainer.run(numbers_loader(shuffle=True), max_epochs=3)
    return trainer, ema, seen


@pytest.mark.parametrize("cut", [1, 6, 9])
def test_resumed_average_continues_bit_for_bit(tmp_path, cut):
    whole, expected, seen = run_with(None)
    _, _, before = run_with(tmp_path, stop_at=cut)
    resumed, ema, after = run_with(tmp_path)

    assert torch.equal(average_of(ema), average_of(expected)) and ema.updates == expected.updates == 18
    assert torch.equal(weights(resumed), weights(whole))
    assert all(torch.equal(*pair) for pair in zip([*before, *after], seen, strict=True))


def test_checkpoint_without_an_average_starts_one_at_the_loaded_weights(tmp_path):
    first = trainer_of()
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(first)
    first.run(numbers_loader(), max_epochs=1)
    trainer = trainer_of()
    ema, at_start = EMA(0.9), list[Tensor]()
    ema.attach(trainer)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(trainer)
    checkpoint.resume()
    trainer.add_event_handler(Events.STARTED, lambda: at_start.append(average_of(ema).clone()))
    trainer.run(numbers_loader(), max_epochs=2)

    assert torch.equal(at_start[0], weights(first)) and ema.updates == 6


def test_second_run_in_one_process_starts_at_the_current_weights():
    trainer, seen = trainer_of(), list[Tensor]()
    evaluation_of(trainer, seen).attach(trainer, Events.STARTED)  # attached before the average
    ema = EMA(0.9)
    ema.attach(trainer)
    trainer.run(numbers_loader(), max_epochs=1)
    between = weights(trainer)
    trainer.run(numbers_loader(), max_epochs=1)

    assert torch.equal(seen[1], between) and ema.updates == 6


# --- settings and wrappings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: EMA(1.0), "decay must be at least 0 and below 1, got 1.0;"),
        (lambda: EMA(-0.1), "decay must be at least 0"),
        (lambda: EMA(0.9, evaluate="val"), r"evaluate must be a collection of names, got 'val'; write \('val',\)\."),
    ],
)
def test_settings_out_of_range_are_refused(make, line):
    with pytest.raises(ValueError, match=f"^{line}"):
        make()


def test_update_without_a_model_is_refused():
    with pytest.raises(TypeError, match="EMA needs to know the model: make the Trainer from an Update"):
        EMA().attach(Trainer(lambda engine, batch: None))


def test_users_own_update_with_a_model_is_averaged_and_put_back():
    class Own:
        def __init__(self):
            self.model = linear()

        def __call__(self, trainer, batch):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(1.0)
            trainer.fire_event(TrainingEvents.OPTIMIZER_STEP_COMPLETED)

    trainer, seen = Trainer(Own()), list[Tensor]()
    ema = EMA(0.5, warmup=False)
    ema.attach(trainer)
    evaluation_of(trainer, seen).attach(trainer)
    begun = weights(trainer)
    trainer.run([0, 1], max_epochs=1)

    torch.testing.assert_close(seen[0], begun + 1.25)
    torch.testing.assert_close(weights(trainer), begun + 2.0)


@pytest.mark.slow
def test_names_do_not_depend_on_the_wrapping_and_a_compiled_model_trains_the_same():
    def train(model):
        trainer = trainer_of(model)
        ema = EMA(0.9)
        ema.attach(trainer)
        evaluation_of(trainer, []).attach(trainer)
        trainer.run(numbers_loader(), max_epochs=1)
        return ema

    plain, compiled = train(linear()), train(torch.compile(linear(), backend="eager"))

    assert list(plain.state_dict()["weights"]) == list(linear().state_dict())
    assert list(compiled.state_dict()["weights"]) == list(linear().state_dict())
    assert torch.equal(average_of(plain), average_of(compiled))


def _train_wrapped(wrap):
    """Averages and weights as one process sees them, whole, and what each evaluation computed."""
    model = wrap(linear())
    outputs = []

    def predict(model, batch):
        outputs.append(model(torch.ones(1, 3)).item())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(Update(model, optimizer, mse))

    @torch.no_grad()
    def before_training():
        model(torch.ones(1, 3))  # after which FSDP2 has whole parameters

    before_training.phase = Phase.PREPARE
    trainer.add_event_handler(Events.STARTED, before_training)
    ema = EMA(0.9)
    ema.attach(trainer)
    Evaluation(create_evaluator(model, predict), [0]).attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run([batch_of(torch.float32, number) for number in range(4)], max_epochs=1)
    averages = list(ema.state_dict()["weights"].values())
    return {
        "outputs": outputs,
        "averages": [whole(value) for value in averages],
        "weights": [whole(value) for value in model.parameters()],
        "names": list(ema.state_dict()["weights"]),
    }


def whole(value):
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().clone()


def _wrappings():
    from torch.distributed.fsdp import fully_shard

    yield "ddp", nn.parallel.DistributedDataParallel
    yield "compiled ddp", lambda model: nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))

    def sharded(model):
        fully_shard(model[2])
        return fully_shard(model)

    yield "fsdp2", sharded


def _one_of_two_ranks(rank, folder):
    results = {name: _train_wrapped(wrap) for name, wrap in _wrappings()}
    torch.save(results, f"{folder}/{rank}.pt")


@pytest.mark.slow
@pytest.mark.distributed
def test_wrapped_models_have_the_average_of_the_plain_one_on_two_ranks(tmp_path):
    expected = _train_wrapped(lambda model: model)
    on_ranks(2, _one_of_two_ranks, tmp_path)
    for rank in range(2):
        results = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert set(results) == {"ddp", "compiled ddp", "fsdp2"}
        for name, found in results.items():
            assert found["names"] == expected["names"], name
            # both ranks have the same batches: their mean is the plain gradient, to rounding
            for key in ("outputs", "averages", "weights"):
                for mine, plain in zip(found[key], expected[key], strict=True):
                    torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
