"""Values that are not finite: the first is reported, and by policy the step is skipped or the run ends."""

import math

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer, Update, loader
from ignite_engine.errors import NotFinite
from ignite_engine.handlers import EMA, Checkpoint, LRSchedule, MetricLogger
from ignite_engine.schedules import warmup_linear
from tests.kit.tiny import Numbers, linear, mse, one

BAD = 9
"""The first sample of iteration 3 on one rank with batches of 2 in groups of 2 (samples 8 to 11)."""
INFINITE_GRADIENTS, NO_GRADIENTS = 1e3, -1e3


class Planted(Numbers):
    """Samples of which some are NaN, or have another value that plants something in the loss."""

    def __init__(self, count=24, bad=(BAD,), value=math.nan):
        super().__init__(count)
        for index in bad:
            self.inputs[index] = value


class Diverging(torch.autograd.Function):
    """The identity, whose gradient is not finite: the loss is."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


def planted_loss(model, batch):
    """NaN inputs as they are; inputs of 1e3 give a finite loss with infinite gradients, of -1e3 a NaN without any."""
    inputs, targets = batch
    if (inputs == INFINITE_GRADIENTS).any():
        return Diverging.apply(mse(model, (inputs / 1e3, targets)))
    if (inputs == NO_GRADIENTS).any():
        return mse(model, (inputs / 1e3, targets)) * 0.0 + torch.full((), math.nan)
    return mse(model, batch)


def trainer_with(policy, model=None, **options):
    model = linear() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    trainer = Trainer(Update(model, optimizer, planted_loss, non_finite=policy, **options), 2)
    LRSchedule(warmup_linear(optimizer, warmup=2, total=20)).attach(trainer)
    return trainer


def journal(trainer):
    """What was left out, by iteration, as it is saved."""
    (policy,) = (each for name, each, _ in trainer.update.stateful() if name == "non_finite")
    return {entry["iteration"]: entry for entry in policy.state_dict()["journal"]}


@pytest.fixture
def said(caplog):
    return lambda: [each.getMessage() for each in caplog.records if "iteration" in each.getMessage()]


def by_hand(data, model, without, epochs=1):
    """Groups of two batches of two, and no step in the iterations ``without``."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule, iteration, steps = warmup_linear(optimizer, warmup=2, total=20), 0, 0
    for _ in range(epochs):
        for start in range(0, len(data), 4):
            iteration += 1
            optimizer.zero_grad()
            for first in (start, start + 2):
                batch = data.inputs[first : first + 2], data.targets[first : first + 2]
                (planted_loss(model, batch) * 0.5).backward()
            if iteration in without:
                continue
            optimizer.param_groups[0]["lr"] = schedule.lrs_at(steps)[0]
            optimizer.step()
            steps += 1
    return one(model)


# -- without a policy -------------------------------------------------------------------------------------------------


@pytest.mark.row("G4")
@pytest.mark.parametrize("logger", [True, False])
@pytest.mark.parametrize(
    "value",
    [math.nan, INFINITE_GRADIENTS, NO_GRADIENTS],
)
def test_the_first_is_one_line(value, logger, said):
    trainer = trainer_with(None)
    if logger:
        MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=4))
    trainer.run(loader(Planted(value=value), 2))

    assert trainer.state.status == "completed"
    if not logger:
        assert [line.startswith("The weights are not finite") for line in said()] == [True] * (value != NO_GRADIENTS)
        return
    (first, *end) = said()
    assert first.startswith("The loss up to iteration 4 ") and len(end) == int(value != NO_GRADIENTS)
    assert trainer.state.not_finite_at == 4


@pytest.mark.row("G4")
def test_gradients_of_the_last_update_are_noticed_too(said):
    trainer_with(None).run(loader(Planted(12, value=INFINITE_GRADIENTS), 2))
    (line,) = said()
    assert "weights are not finite" in line and "iteration 3" in line


@pytest.mark.parametrize("logger", [True, False])
def test_each_run_of_a_process_reports_its_own_first_and_a_healthy_one_nothing(logger, said):
    trainer = trainer_with(None)
    if logger:
        MetricLogger(console=False).attach(trainer)
    for data, at in ((Planted(), 3), (Numbers(24), None)):
        count = len(said())
        trainer.update.model.load_state_dict(linear().state_dict())
        trainer.update.optimizers["optimizer"].state.clear()
        assert trainer.run(loader(data, 2)).not_finite_at == (at if logger else None)
        assert (len(said()) > count) == (at is not None)


# -- skip -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"clip_norm": 100.0}, {"log_grad_norm": True}], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, INFINITE_GRADIENTS, NO_GRADIENTS])
def test_skip_is_the_loop_that_leaves_the_step_out(value, options, said):
    data, trainer, ema, means = Planted(value=value), trainer_with("skip", **options), EMA(0.5), []
    ema.attach(trainer)
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=3), lambda: means.append(trainer.state.metrics["loss"]))
    state = trainer.run(loader(data, 2), max_epochs=2)

    assert torch.equal(one(trainer.update.model), by_hand(data, linear(), (3, 9), 2))
    assert (state.iteration, state.optimizer_steps, state.skipped_steps, ema.updates) == (12, 10, 2, 10)
    assert len(means) == 4 and all(map(math.isfinite, means))
    what = "gradient norm" if value == INFINITE_GRADIENTS else "loss"
    assert all(
        line.startswith(f"The {what} of iteration {at} ") for line, at in zip(said(), (3, 9), strict=True)
    )  # fmt: skip
    assert "skipped (2 of at most 10)" in said()[1]
    found = {at: (entry["epoch"], entry["samples"]) for at, entry in journal(trainer).items()}
    assert found == {3: (1, [[8, 9, 10, 11]]), 9: (2, [[8, 9, 10, 11]])}
    norms = [norm for entry in journal(trainer).values() for norm in entry["grad_norm"]]
    assert list(map(math.isfinite, norms)) == [value == NO_GRADIENTS] * 2


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize(("value", "scale", "lines"), [(INFINITE_GRADIENTS, 2.0**7, 0), (math.nan, 2.0**8, 1)])
def test_overflow_of_the_scaler_is_not_of_the_policy(value, scale, lines, clip_norm, said):
    options = {"grad_scaler": {"init_scale": 2.0**8, "growth_interval": 100}, "clip_norm": clip_norm, "max_skips": 1}
    trainer = trainer_with("skip", precision="fp16", **options)
    trainer.run(loader(Planted(value=value), 2))
    assert (trainer.state.skipped_steps, trainer.update.scaler.get_scale(), len(said())) == (1, scale, lines)


def test_too_many_end_the_run_and_the_count_is_resumed(tmp_path):
    def attempt(max_epochs):
        trainer = trainer_with("skip", max_skips=2)
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(loader(Planted(), 2), max_epochs=max_epochs)
        return trainer

    assert attempt(2).state.skipped_steps == 2
    with pytest.raises(NotFinite, match=r"iteration 15 is nan.*max_skips=2"):
        attempt(3)


def test_a_fresh_run_in_the_same_process_begins_its_own_journal(said):
    trainer = trainer_with("skip", max_skips=1)
    for count in (1, 2):
        state = trainer.run(loader(Planted(), 2))
        assert (state.skipped_steps, len(said())) == (1, count)


# -- stop -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, INFINITE_GRADIENTS, NO_GRADIENTS])
def test_stop_ends_the_run_before_the_weights_change(value, tmp_path):
    data, trainer = Planted(value=value), trainer_with("stop")
    checkpoint = Checkpoint(tmp_path, on_exception=True)
    checkpoint.attach(trainer)
    with pytest.raises(NotFinite, match="iteration 3"):
        trainer.run(loader(data, 2))

    assert trainer.state.status == "failed" and str(trainer.state.reason).startswith("NotFinite: The ")
    before = Numbers(8)
    before.inputs, before.targets = data.inputs[:8], data.targets[:8]
    assert torch.equal(one(trainer.update.model), by_hand(before, linear(), ()))
    (saved,) = checkpoint.store.checkpoints()
    assert saved.iteration == 2 and saved.manifest.healthy
