"""An update has the bits of the loop written by hand: scaling, accumulation, clipping, and whatever hooks into them."""

import functools
from math import inf, nan

import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import StepLR
from torch.profiler import ProfilerActivity, profile

from ignite_engine import Trainer, Update, every
from ignite_engine.update.micro_batches import accumulation_steps_for
from tests.kit.refusals import refusals
from tests.kit.tiny import Numbers, linear, mse, one
from tests.property.by_hand import by_engine, by_hand, difference
from tests.property.case import Case

NAMED = [
    {"layers": ("dropout", "batchnorm")},
    {"steps": 3, "clip": 0.5, "weights": "some zero", "layers": ("dropout", "batchnorm"), "sizes": (4,) * 7},
    {"steps": 2, "grad_norm": True, "engine": "Ignite's Engine"},
    {"clip": 1e4, "change": "freeze", "hooked": "LR scheduler"},
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("named", NAMED, ids=str)
def test_weights_and_norms_are_those_of_the_loop(named, precision):
    case = Case(precision=precision, optimizer="SGD momentum", **named)
    hand = by_hand(case)
    assert hand.error is None and len(hand.outputs) > 2 and difference(hand, by_engine(case)) is None


def same(one, other):
    """In dtype and bits; NaN, as where fp16 overflows, is the same as NaN."""
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


# -- clipping, of gradients that the batch gives ----------------------------------------------------------------------


def given(model, gradients):
    """A loss with these gradients."""
    return sum((p * g.to(p.dtype)).sum().double() for p, g in zip(model.parameters(), gradients, strict=True))


def randoms(count=6, parameters=5):
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(7 + index, 3, generator=generator, dtype=torch.float64) for index in range(parameters)]
        for _ in range(count)
    ]


F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SCALES = torch.logspace(-6, 30, 60, dtype=torch.float64)


def next_to(limit, dtype):
    """One number just below the limit, at it, or just above it."""
    eps = torch.finfo(dtype).eps
    return [[torch.tensor([limit * (1 + step * eps / 4)], dtype=torch.float64)] for step in range(-40, 41)]


LIMITS = (1e-3, 1.0, 1e3)
CLIPPED = {
    "fp32": (LIMITS, [F32] * 5, randoms()),
    "bf16": (LIMITS, [BF16] * 5, randoms()),
    "all types": (LIMITS, [F64, BF16, F16, F32, BF16], randoms()),
    "any norm": ((1e-30, 7.7), [F32] * 2, [[g * scale for g in each] for scale in SCALES for each in randoms(1, 2)]),
    "next to the limit": ((1.0,), [F32], next_to(1.0, F32)),
    "next to a limit in bf16": ((0.1954,), [BF16], next_to(0.1954, BF16)),
    "next to a limit in fp16": ((49.0001,), [F16], next_to(49.0001, F16)),
    "not finite": ((1.0,), [F32] * 5, [[g * value for g in each] for each in randoms(2) for value in (nan, inf)]),
}


@pytest.mark.row("B5")
@pytest.mark.parametrize(("name", "max_norm"), [(name, limit) for name, case in CLIPPED.items() for limit in case[0]])
def test_clipped_gradients_and_their_norm_have_the_bits_of_torchs(name, max_norm):
    _, dtypes, batches = CLIPPED[name]
    theirs = nn.ParameterList([torch.zeros(g.shape, dtype=d) for g, d in zip(batches[0], dtypes, strict=True)])
    ours = nn.ParameterList([parameter.detach().clone() for parameter in theirs])
    update = Update(ours, torch.optim.SGD(ours.parameters(), lr=0.0), given, clip_norm=max_norm)
    trainer, compared = Trainer(update), []

    @trainer.on(Events.ITERATION_COMPLETED)
    def compare(trainer):
        theirs.zero_grad()
        given(theirs, trainer.state.batch).backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        pairs = [(trainer.state.output["grad_norm"], expected)]
        pairs += [(p.grad, q.grad) for p, q in zip(ours, theirs, strict=True)]
        compared.append(all(same(*pair) for pair in pairs))

    trainer.run(batches, max_epochs=1)
    assert compared == [True] * len(batches)


def test_a_row_that_is_looked_up_twice_counts_as_one():
    table = nn.Embedding(6, 2, sparse=True)
    update = Update(table, torch.optim.SGD(table.parameters(), 0.1), lambda m, b: (m(b) * 3).sum(), log_grad_norm=True)

    assert Trainer(update).run([torch.tensor([1, 1])]).output["grad_norm"].item() == pytest.approx(72**0.5)


def test_a_model_without_gradients_has_the_norm_zero():
    model = linear()
    update = Update(
        model, torch.optim.SGD(model.parameters(), 0.1), lambda m, b: torch.ones((), requires_grad=True), clip_norm=1.0
    )
    assert Trainer(update).run([0]).output["grad_norm"].item() == 0.0


# -- what hooks into backward and step --------------------------------------------------------------------------------


def stepped(optimizer=torch.optim.AdamW, loss=mse, before=lambda model, optimizer: None, steps=2):
    """The weights after two iterations; ``before`` is called between them."""
    model, data = linear(), Numbers(4)
    built = optimizer(model.parameters(), lr=0.1)
    trainer = Trainer(Update(model, built, loss))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: before(model, built))
    trainer.run([(data.inputs, data.targets)] * steps, max_epochs=1)
    return one(model)


HOOKS = {
    "before a step": lambda model, optimizer, call: optimizer.register_step_pre_hook(call),
    "after a step": lambda model, optimizer, call: optimizer.register_step_post_hook(call),
    "before all steps": lambda model, optimizer, call: torch_optimizer.register_optimizer_step_pre_hook(call),
    "after all steps": lambda model, optimizer, call: torch_optimizer.register_optimizer_step_post_hook(call),
    "gradient": lambda model, optimizer, call: next(model.parameters()).register_post_accumulate_grad_hook(call),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_come_within_a_run_are_called_once_for_each_step_that_follows(name):
    calls, handles = [], []
    try:
        found = stepped(
            before=lambda model, optimizer: handles.append(HOOKS[name](model, optimizer, lambda *_: calls.append(1)))
        )
    finally:
        handles[0].remove()
    assert calls == [1] and torch.equal(found, stepped())


def test_a_schedule_of_torch_sees_the_step(recwarn):
    schedules = []
    stepped(before=lambda model, optimizer: schedules.append(StepLR(optimizer, 1)))
    schedules[0].step()  # torch warns where it has seen no step
    assert not recwarn.list


def test_a_step_of_a_users_own_is_called_also_a_decorated_one():
    calls = []

    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            calls.append("own")
            return super().step(closure)

    class Decorated(torch.optim.AdamW):
        @functools.wraps(torch.optim.AdamW.step)  # copies torch's marks too
        def step(self, closure=None):
            calls.append("decorated")

    assert torch.equal(stepped(Own), stepped())
    stepped(Decorated)
    assert calls == ["own"] * 2 + ["decorated"] * 2


def test_a_profiler_sees_the_step():
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        stepped()
    assert any("Optimizer.step#AdamW" in event.key for event in traced.key_averages())


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.row("B9")
@pytest.mark.parametrize(("arguments", "steps"), [((64, 8, 2), 4), ((8, 8), 1), ((96, 4, 3), 8)])
def test_steps_make_up_the_global_batch(arguments, steps):
    assert accumulation_steps_for(*arguments) == steps


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_batch_that_a_handler_assigns_is_counted_by_what_the_trainer_groups(kind, steps):
    """Mixup and cropping assign a plain list of micro-batches; without grouping a list is one batch."""
    model, seen = linear(), []
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse), steps)

    def augment():
        trainer.state.batch = kind(trainer.state.batch)

    trainer.add_event_handler(Events.GET_BATCH_COMPLETED, augment)
    trainer.add_event_handler(every(samples=8), lambda: seen.append(trainer.state.samples))
    data = Numbers(16)
    state = trainer.run([(data.inputs[at : at + 4], data.targets[at : at + 4]) for at in range(0, 16, 4)])

    assert seen == [8, 16] and state.samples == 16


def update(loss=mse, **options):
    model = linear()
    return Update(model, torch.optim.SGD(model.parameters(), 0.1), loss, **options)


def weighing(weight):
    data = Numbers(4)
    Trainer(update(weight_fn=lambda batch: weight), 2).run([(data.inputs, data.targets)] * 2)


test_refusals = refusals(
    [
        ("global batch does not divide", lambda: accumulation_steps_for(60, 8, 2), ValueError, "multiple 16 48"),
        ("global batch is too small", lambda: accumulation_steps_for(8, 16), ValueError, "16 local_batch"),
        ("global batch of none", lambda: accumulation_steps_for(0, 8), ValueError, "at least 1 got 0"),
        ("clip_norm", lambda: update(clip_norm=-1), ValueError, "clip_norm positive -1"),
        ("max_skips", lambda: update(non_finite="skip", max_skips=0), ValueError, "max_skips at least 1 got 0"),
        ("non_finite", lambda: update(non_finite="ignore"), ValueError, "skip stop rollback 'ignore'"),
        ("precision", lambda: update(precision="half"), ValueError, "fp32 bf16 fp16 'half'"),
        ("options without effect", lambda: update(grad_scaler={"init_scale": 2.0}), ValueError, "no effect 'fp32'"),
        ("a weight below zero", lambda: weighing(-1.0), ValueError, "weight_fn at least 0 -1.0"),
        ("a closure", lambda: Update(linear(), torch.optim.LBFGS(linear().parameters()), mse), ValueError, "closure"),
    ]
)
