"""One update: what N micro-batches make together, and what happens where nothing may be stepped."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_engine import Trainer, TrainingEvents, Update
from ignite_engine.handlers import LRSchedule
from ignite_engine.schedules import warmup_constant, warmup_linear
from tests import sparse_and_dense
from tests.kit.refusals import refusals
from tests.kit.resume import Program, assert_resumes
from tests.kit.tiny import Numbers, linear, mse, one, trainer_of, weights
from tests.sparse_and_dense import Net, Sized, batches, by_hand, optimizers_of, samples

SCALER = {"init_scale": 256.0, "growth_interval": 3}
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def batches_of(data, sizes):
    ends = list(itertools.accumulate(sizes))
    return [(data.inputs[e - size : e], data.targets[e - size : e]) for e, size in zip(ends, sizes, strict=True)]


def options_of(precision):
    return {"precision": precision, **({"grad_scaler": SCALER} if precision == "fp16" else {})}


def trainer_of_net(model=None, steps=None, **options):
    model = model or Net()
    return Trainer(Update(model, optimizers_of(model), sparse_and_dense.loss_fn, **options), steps)


# -- the loop written by hand -----------------------------------------------------------------------------------------


class Islands(nn.Module):
    """Layers in the precision of autocast around one that the model keeps in fp32, as a router or a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.island, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        hidden = self.first(inputs).tanh()
        with torch.autocast("cpu", enabled=False):
            hidden = self.island(hidden.float()).tanh()
        return self.last(hidden) * self.scale


def momentum(model):
    return {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}


def decayed(model):
    """In an order of groups that is not the model's."""
    biases = [each for each in model.parameters() if each.dim() == 1]
    others = [each for each in model.parameters() if each.dim() > 1]
    groups = [{"params": others}, {"params": biases, "weight_decay": 0.0}]
    return {"optimizer": torch.optim.AdamW(groups, lr=0.01)}


ISLANDS = batches_of(Numbers(28, 8), [4] * 7)
TRAINED = {
    "momentum": (Islands, momentum, mse, ISLANDS),
    "two groups": (Islands, decayed, mse, ISLANDS),
    "sparse and dense": (Net, optimizers_of, sparse_and_dense.loss_fn, batches(7, 2)),
}


@pytest.mark.row("B6")
@pytest.mark.parametrize("steps", [None, 1, 3])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", TRAINED)
def test_weights_have_the_bits_of_the_loop_written_by_hand(name, precision, steps):
    """Also with a listener of each event; the last of three groups is a short one."""
    make, optimizers, loss_of, data = TRAINED[name]
    groups = [data[at : at + (steps or 1)] for at in range(0, 7, steps or 1)]
    for options, listened in (({}, False), ({"log_grad_norm": True}, True), ({"clip_norm": 0.05}, False)):
        model, written, norms, contexts = make(), make(), [], []
        trainer = Trainer(Update(model, optimizers(model), loss_of, **options_of(precision), **options), steps)
        for event in TrainingEvents if listened else ():
            trainer.add_event_handler(event, lambda: contexts.append(torch.is_autocast_enabled("cpu")))  # noqa: B023
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED,
            lambda engine: norms.append(engine.state.output.get("grad_norm")),  # noqa: B023
        )
        trainer.run(data, max_epochs=2)
        expected = by_hand(
            written,
            groups,
            clip_norm=options.get("clip_norm"),
            scaler=torch.amp.GradScaler("cpu", **SCALER) if precision == "fp16" else None,
            dtype=DTYPES[precision],
            passes=2,
            optimizers=optimizers(written),
            loss_of=loss_of,
        )
        assert torch.equal(one(model), one(written)) and not torch.equal(one(model), one(make())), options
        assert not any(contexts) and listened == bool(contexts)
        if options:
            assert torch.equal(torch.stack(norms), torch.stack(expected)), options


def clear_and_add(optimizer, parameter):
    kept = [*optimizer.param_groups[0]["params"], parameter]
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": kept})


def replace(optimizer, parameter):
    optimizer.param_groups[0]["params"][-1] = parameter


@pytest.mark.parametrize("change", [lambda o, p: o.param_groups[0]["params"].append(p), clear_and_add, replace])
def test_parameters_that_change_during_a_run_are_cleared_and_clipped(change):
    """The new one has gathered gradients from before it was added."""
    models, optimizers = [Islands(), Islands()], []
    for model in models:
        first = [each for each in model.parameters() if each is not model.scale]
        optimizers.append(torch.optim.SGD(first, lr=0.1))
    trainer = Trainer(Update(models[0], optimizers[0], mse, clip_norm=0.05))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: change(optimizers[0], models[0].scale))
    trainer.run(ISLANDS)
    for data, after in ((ISLANDS[:2], change), (ISLANDS[2:], lambda *_: None)):
        named = {"optimizer": optimizers[1]}
        by_hand(models[1], [[each] for each in data], clip_norm=0.05, optimizers=named, loss_of=mse)
        after(optimizers[1], models[1].scale)

    assert torch.equal(*map(one, models)) and models[0].scale.item() != 1.0


def test_update_works_in_a_plain_ignite_engine():
    model, reference, data = linear(), trainer_of(linear()), batches_of(Numbers(16), [4] * 4)
    state = Engine(Update(model, momentum(model), mse)).run(data, max_epochs=2)
    reference.run(data, max_epochs=2)

    assert torch.equal(one(model), weights(reference)) and state.optimizer_steps == 8


# -- groups and weights -----------------------------------------------------------------------------------------------


def len_of(batch):
    return len(batch[0])


@pytest.mark.row("B1", "B12")
@pytest.mark.parametrize(
    ("sizes", "weight_fn", "whole"),
    [
        ([8] * 8, None, [32, 32]),
        ([8] * 6, None, [32, 16]),  # the short last group has a divisor of its own
        ([1, 7, 16, 8], len_of, [32]),
    ],
)
def test_micro_batches_of_a_group_equal_one_batch(sizes, weight_fn, whole):
    def train(kind, sizes, steps, **options):
        if kind == "dense":
            trainer = trainer_of(linear(dtype=torch.float64), steps, clip_norm=0.5, **options)
            data = batches_of(Numbers(64, dtype=torch.float64), sizes)
        else:
            trainer = trainer_of_net(Net(torch.float64), steps, clip_norm=0.05, **options)
            data = list(zip(*(part[: sum(sizes)].split(sizes) for part in samples(64, torch.float64)), strict=True))
        return weights(trainer), trainer.run(data), weights(trainer)

    for kind in ("dense", "sparse and dense"):
        _, state, small = train(kind, sizes, 4, weight_fn=weight_fn)
        before, reference, big = train(kind, whole, None)
        torch.testing.assert_close(small, big, rtol=1e-11, atol=1e-13)
        for name in ("loss", "grad_norm"):
            torch.testing.assert_close(state.output[name], reference.output[name], rtol=1e-11, atol=0)
        assert (state.iteration, state.optimizer_steps, state.micro_batches) == (len(whole), len(whole), len(sizes))
        assert not torch.equal(before, big)
        if weight_fn is not None:
            assert (train(kind, sizes, 4)[2] - big).abs().max() > 1e-4


def test_named_outputs_are_averaged_as_the_loss():
    def loss_fn(model, batch):
        loss = mse(model, batch)
        return loss, {"samples": torch.tensor(float(len(batch[0]))), "twice": 2 * loss.detach()}

    model = linear()
    update = Update(model, momentum(model), loss_fn, weight_fn=len_of, log_grad_norm=True)
    state = Trainer(update, accumulation_steps=2).run(batches_of(Numbers(8), [2, 6]))

    assert state.output["samples"].item() == 2 * 0.25 + 6 * 0.75
    torch.testing.assert_close(state.output["twice"], 2 * state.output["loss"])
    assert set(state.output) == {"loss", "grad_norm", "samples", "twice"}
    assert not any(value.requires_grad for value in state.output.values())


@pytest.mark.parametrize("given", [[0.0, 0.0], [0.0, 1.0]])
def test_group_without_weight_is_skipped_and_a_run_of_such_alone_says_so(given, caplog):
    left = list(given)
    trainer = trainer_of(linear(), None, weight_fn=lambda batch: left.pop(0))
    before, skipped = weights(trainer), []
    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_SKIPPED, lambda: skipped.append(trainer.state.iteration))
    state = trainer.run(batches_of(Numbers(8), [4, 4]))

    count = given.count(0.0)
    assert (state.iteration, state.optimizer_steps, state.skipped_steps) == (2, 2 - count, count)
    assert skipped == [1, 2][:count] and torch.equal(weights(trainer), before) is (count == 2)
    assert ["no optimizer step" in line for line in caplog.messages] == [True] * (count == 2)


class SeemsWrapped(nn.Linear):
    """Its peers wait for its gradients."""

    def no_sync(self):
        return nullcontext()


@pytest.mark.parametrize("kind", [nn.Linear, SeemsWrapped])
@pytest.mark.parametrize("masked", [(False, True), (True, False)])
def test_micro_batch_without_weight_cannot_spoil_its_group(masked, kind):
    """cross_entropy of ignored targets alone is NaN, which times a weight of zero is still NaN."""

    def loss_fn(model, batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss, {"twice": 2 * loss.detach()}

    def run(*ignored):
        torch.manual_seed(1)
        model = kind(3, 4)
        update = Update(model, momentum(model), loss_fn, weight_fn=lambda batch: int((batch[1] != -100).sum()))
        data = [(torch.ones(2, 3), torch.tensor([-100, -100] if each else [0, 1])) for each in ignored]
        return one(model), Trainer(update, accumulation_steps=2).run(data).output

    (found, output), (alone, expected) = run(*masked), run(False)
    assert torch.equal(found, alone) and torch.isfinite(found).all()
    assert output["loss"].item() == pytest.approx(expected["loss"].item())
    assert output["twice"].item() == 2 * output["loss"].item()


# -- several optimizers -----------------------------------------------------------------------------------------------


@pytest.mark.row("A7")
def test_all_optimizers_step_and_none_within_a_group():
    trainer, seen = trainer_of_net(steps=5), []
    optimizers = trainer.update.optimizers

    def look():
        states = copy.deepcopy([each.state for each in optimizers.values()])
        seen.append((trainer.state.micro_batches, weights(trainer), states))

    trainer.add_event_handler(TrainingEvents.BACKWARD_COMPLETED, look)
    trainer.run(batches(10, 2))

    assert [count for count, _, _ in seen] == list(range(1, 11))
    for group in (seen[:5], seen[5:]):
        assert all(torch.equal(each, group[0][1]) for _, each, _ in group)
    assert not any(state for _, _, states in seen[:5] for state in states) and all(seen[5][2])
    assert not torch.equal(seen[0][1], seen[5][1]) and not torch.equal(seen[5][1], weights(trainer))


def test_optimizer_of_parameters_outside_of_the_model_trains_them():
    model, outside = linear(), nn.Parameter(torch.ones(1))
    optimizers = {**momentum(model), "outside": torch.optim.SGD([outside], lr=0.1)}
    update = Update(model, optimizers, lambda model, batch: mse(model, batch) * outside)
    Trainer(update).run(batches_of(Numbers(8), [4, 4]))

    assert outside.item() != 1.0


def test_iteration_that_touches_no_row_leaves_the_table_alone():
    """An EmbeddingBag over empty bags has a gradient without entries."""
    words, ids, targets = samples(4)
    for precision in ("fp32", "fp16"):
        trainer, before = trainer_of_net(clip_norm=0.01, **options_of(precision)), Net()
        state = trainer.run([(words, ids[:, :0], targets)])
        model = trainer.update.model
        assert torch.equal(model.bags.weight, before.bags.weight)
        assert not torch.equal(model.words.weight, before.words.weight)
        assert not torch.equal(model.head.weight, before.head.weight)
        assert torch.isfinite(state.output["grad_norm"]) and state.optimizer_steps == 1


# -- scaler -----------------------------------------------------------------------------------------------------------


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)


FINE, HUGE = torch.ones(1, 2), torch.full((1, 2), 3e4)


def fp16_trainer(**options):
    model = TwoParts()
    optimizers = {
        "left": torch.optim.SGD(model.left.parameters(), lr=0.1),
        "right": torch.optim.AdamW(model.right.parameters(), lr=0.1),
    }

    def loss_fn(model, batch):
        return (model.left(batch[0]).float() + model.right(batch[1]).float()).mean()

    return Trainer(Update(model, optimizers, loss_fn, precision="fp16", **options))


@pytest.mark.row("A7", "B7")
def test_overflow_in_one_optimizer_stops_all_of_them():
    trainer, seen, fired = fp16_trainer(grad_scaler={"init_scale": 256.0, "growth_interval": 2}), [], []
    optimizers = trainer.update.optimizers
    LRSchedule(warmup_linear(optimizers["left"], warmup=10, total=100)).attach(trainer)

    def look(engine):
        rate = optimizers["left"].param_groups[0]["lr"]
        seen.append((weights(engine), rate, engine.update.scaler.get_scale()))

    trainer.add_event_handler(Events.STARTED | Events.ITERATION_COMPLETED, look)
    for event in (TrainingEvents.OPTIMIZER_STEP_COMPLETED, TrainingEvents.OPTIMIZER_STEP_SKIPPED):
        trainer.add_event_handler(event, lambda *, name=event.name: fired.append(name))
    # the input of the right part times the scale is beyond fp16, the left one's gradient is fine
    state = trainer.run([(FINE, FINE), (FINE, HUGE), (FINE, FINE)])

    (start, lr_0, _), (first, lr_1, scale_1), (second, lr_2, scale_2), (third, lr_3, scale_3) = seen
    assert fired == ["OPTIMIZER_STEP_COMPLETED", "OPTIMIZER_STEP_SKIPPED", "OPTIMIZER_STEP_COMPLETED"]
    assert not torch.equal(start, first) and torch.equal(first, second) and not torch.equal(second, third)
    assert lr_0 < lr_1 == lr_2 < lr_3
    assert (scale_1, scale_2, scale_3) == (256.0, 128.0, 128.0)
    assert (state.iteration, state.optimizer_steps, state.skipped_steps) == (3, 2, 1)
    assert optimizers["right"].state_dict()["state"][0]["step"] == 2


@pytest.mark.parametrize("part", ["a table", "the dense layer"])
def test_overflow_of_either_kind_of_gradient_stops_all_optimizers(part):
    model = Net()
    with torch.no_grad():  # backward of a table is scaled by the head's weights, and that of the head by the rows
        (model.head.weight if part == "a table" else model.words.weight).fill_(60.0)
    trainer = trainer_of_net(model, 2, precision="fp16", grad_scaler={"init_scale": 2.0**126})
    before, update = weights(trainer), trainer.update
    state = trainer.run(batches(2, 2))

    assert torch.equal(weights(trainer), before) and not any(each.state for each in update.optimizers.values())
    assert (state.skipped_steps, state.optimizer_steps, update.scaler.get_scale()) == (1, 0, 2.0**125)


@pytest.mark.row("B6")
def test_scaler_takes_all_its_options_and_the_norm_is_of_unscaled_gradients():
    options = {"init_scale": 64.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 1}
    trainer = fp16_trainer(grad_scaler=options, clip_norm=1e3)
    state = trainer.run([(FINE, FINE)] * 2)

    assert trainer.update.scaler.get_scale() == 64.0 * 3 * 3
    assert state.output["grad_norm"].item() == pytest.approx(6**0.5, rel=1e-3)
    assert trainer.run([(FINE, HUGE)] * 3, max_epochs=1).skipped_steps and trainer.update.scaler.get_scale() < 576.0


@pytest.mark.row("B6")
@pytest.mark.parametrize("kind", ["overflow", "sparse and dense"])
def test_scaler_is_in_the_checkpoint(kind, tmp_path):
    def build():
        trainer = fp16_trainer(grad_scaler=SCALER) if kind == "overflow" else trainer_of_net(**options_of("fp16"))
        for name, optimizer in trainer.update.optimizers.items():
            LRSchedule(warmup_constant(optimizer, 3), name=name).attach(trainer)
        return trainer

    data = [(FINE, FINE), (FINE, HUGE), (FINE, FINE), (FINE, FINE)] if kind == "overflow" else batches(4, 2)
    assert_resumes(Program(build, lambda: Sized(data)), tmp_path, at=(1, 2, 3), how=["stop", "same process"])


# -- events, and what is refused --------------------------------------------------------------------------------------


def test_events_of_one_update_come_in_order():
    trainer, fired = trainer_of(linear(), 2, clip_norm=1e-6), []

    def norm():
        return sum(float(p.grad.norm() ** 2) for p in trainer.update.model.parameters()) ** 0.5

    for event in (TrainingEvents.BACKWARD_COMPLETED, TrainingEvents.OPTIMIZER_STEP_COMPLETED):
        trainer.add_event_handler(event, lambda *, name=event.name: fired.append(name))
    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, lambda: fired.append(norm() > 1e-3))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: fired.append(norm() < 2e-6))
    trainer.run(batches_of(Numbers(8), [4, 4]))

    # STARTED sees the gradients unclipped, the end of the iteration sees them clipped
    assert fired == ["BACKWARD_COMPLETED", "BACKWARD_COMPLETED", True, "OPTIMIZER_STEP_COMPLETED", True]


def test_one_of_several_optimizers_may_be_meant_to_begin_later(caplog):
    model, idle = linear(), torch.optim.SGD(linear().parameters(), lr=0.1)
    Trainer(Update(model, {**momentum(model), "idle": idle}, mse)).run(batches_of(Numbers(8), [4, 4]))
    (line,) = caplog.messages
    assert line.startswith("idle (SGD)")


def test_optimizer_that_steps_within_the_backward_may_leave_no_gradient(caplog):
    model = linear()
    before = one(model).clone()

    def step_and_drop(parameter):
        parameter.data -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_and_drop)
    Trainer(Update(model, momentum(model), mse)).run(batches_of(Numbers(8), [4, 4]))

    assert not torch.equal(one(model), before) and not caplog.messages


def weighing(weight):
    return lambda: trainer_of(linear(), 2, weight_fn=lambda batch: weight).run(batches_of(Numbers(4), [2, 2]))


def naming(*second):
    """What each of two micro-batches reports beside its loss."""

    def call():
        reported = [({"one": torch.ones(())},), second]
        model = linear()
        update = Update(model, momentum(model), lambda model, batch: (mse(model, batch), *reported.pop(0)))
        Trainer(update, accumulation_steps=2).run(batches_of(Numbers(8), [2, 6]))

    return call


def of_another_model():
    update = Update(linear(), torch.optim.SGD(linear().parameters(), lr=0.1), mse)
    Trainer(update).run(batches_of(Numbers(8), [4, 4]))


WEIGHTS = [(-1.0, "-1.0"), (float("nan"), "nan"), (float("inf"), "inf")]
ONE = torch.ones(())
test_refusals = refusals(
    [(f"weight {shown}", weighing(weight), ValueError, f"weight_fn at least 0 {shown}") for weight, shown in WEIGHTS]
    + [
        (f"reported {number}", naming(second), ValueError, "loss_fn same names each micro-batch")
        for number, second in enumerate([{}, {"other": ONE}, {"one": ONE, "other": ONE}])
    ]
    + [("optimizer of another model", of_another_model, ValueError, "optimizer (SGD) no parameter gradient")]
)
