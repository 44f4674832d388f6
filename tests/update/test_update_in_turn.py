"""Several updates in one iteration: the bits of the loop written by hand, and nothing missing from a checkpoint."""

import re

import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

from examples.gan import GAN, discriminator_loss, generator_loss, ring
from ignite_engine import Trainer, TrainingEvents, Update, Updates, loader, seed_everything
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import EMA, Checkpoint, LRSchedule, MetricLogger
from ignite_engine.schedules import warmup_linear
from tests.kit.processes import ranks
from tests.kit.refusals import refuses
from tests.kit.resume import Program, assert_resumes
from tests.kit.tiny import one

DATA = ring(40)
LOSSES = {"discriminator": discriminator_loss, "generator": generator_loss}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def networks():
    seed_everything(5)
    return GAN(width=8)


def optimizers(gan):
    return {name: torch.optim.Adam(getattr(gan, name).parameters(), lr=1e-2) for name in ("discriminator", "generator")}


def updates_of(gan, every=1, **options):
    own = optimizers(gan)
    made = {name: Update(gan, own[name], LOSSES[name], **options) for name in own}
    return Updates(made, every={"generator": every})


def by_hand(every, steps, precision, iterations):
    """The loop that everybody writes, with a scaler for each optimizer."""
    gan = networks()
    own = optimizers(gan)
    scalers = {name: torch.amp.GradScaler("cpu", enabled=precision == "fp16") for name in own}
    losses = {
        "discriminator": lambda gan, points: discriminator_loss(gan, points)[0],
        "generator": generator_loss,
    }
    batches = list(DATA.split(4))
    seed_everything(1)
    for iteration in range(1, iterations + 1):
        start = (iteration - 1) * steps % len(batches)
        group = batches[start : start + steps]
        for name, optimizer in own.items():
            if name == "generator" and iteration % every:
                continue
            optimizer.zero_grad()
            for points in group:
                with torch.autocast("cpu", dtype=DTYPES.get(precision, torch.bfloat16), enabled=precision in DTYPES):
                    loss = losses[name](gan, points)
                scalers[name].scale(loss * (1 / len(group))).backward()
            scalers[name].unscale_(optimizer)
            nn.utils.clip_grad_norm_(getattr(gan, name).parameters(), 0.5)
            scalers[name].step(optimizer)
            scalers[name].update()
    return one(gan)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("every", "steps"), [(1, 1), (1, 2), (3, 1), (2, 5)])
def test_weights_have_the_bits_of_the_loop_written_by_hand(every, steps, precision):
    gan = networks()
    updates = updates_of(gan, every, precision=precision, clip_norm=0.5)
    seed_everything(1)
    Trainer(updates, steps).run(list(DATA.split(4)), max_iters=6)

    assert torch.equal(one(gan), by_hand(every, steps, precision, 6))


@pytest.mark.parametrize("turn", ["discriminator", "generator"])
def test_optimizer_of_another_kind_is_left_out_by_its_own_name(tmp_path, turn):
    def run(kind, ignore=()):
        gan = networks()
        own = optimizers(gan)
        own[turn] = kind(getattr(gan, turn).parameters(), lr=1e-2)
        trainer = Trainer(Updates({name: Update(gan, own[name], LOSSES[name]) for name in own}))
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer, Events.COMPLETED)
        checkpoint.resume(ignore=ignore)
        trainer.run(loader(DATA, 5), max_iters=2 + bool(ignore))
        return trainer

    run(torch.optim.Adam)
    error = refuses(lambda: run(torch.optim.RMSprop), StateMismatch, f"optimizer/{turn}")
    (named,) = set(re.findall(r"optimizer/\w+", str(error)))
    assert run(torch.optim.RMSprop, [named]).state.iteration == 3


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "fp16"])
def test_resumed_run_ends_with_every_state_of_the_whole_one(tmp_path, precision):
    def build():
        gan = networks()
        seed_everything(1)
        updates = updates_of(gan, every=2, precision=precision)
        trainer = Trainer(updates, 2)
        for name, optimizer in updates.optimizers.items():
            LRSchedule(warmup_linear(optimizer, total=8), name=f"lr_schedule/{name}").attach(trainer)
        EMA(0.99).attach(trainer, updates.stepped("generator"))
        trainer.add_event_handler(
            TrainingEvents.RESUME_POINT, lambda: trainer.state.output.update(loss=torch.zeros(()))
        )
        return trainer

    made = Program(build, lambda: loader(DATA, 5, shuffle=True), {"max_iters": 7})
    assert_resumes(made, tmp_path, at=(1, 2, 4, 5), how=["stop"])
    trainer = build()
    assert trainer.reproducibility() == []
    saved = trainer.describe()
    scalers = ["scaler/discriminator", "scaler/generator"] if precision == "fp16" else []
    for name in ("optimizer/discriminator", "optimizer/generator", "ema", "lr_schedule/generator", *scalers):
        assert name in saved, name


def test_schedules_and_average_move_with_their_own_update():
    gan = networks()
    updates = updates_of(gan, every=2)
    trainer = Trainer(updates)
    own = updates.optimizers
    schedules = {name: warmup_linear(optimizer, total=8) for name, optimizer in own.items()}
    for name, schedule in schedules.items():
        LRSchedule(schedule, name=f"lr_schedule/{name}").attach(trainer)
    ema = EMA(0.9)
    ema.attach(trainer, updates.stepped("generator"))
    seen = []
    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED, lambda trainer: seen.append(updates.turn))
    trainer.run(list(DATA.split(8)), max_iters=5)

    assert seen == [*["discriminator", "discriminator", "generator"] * 2, "discriminator"]
    assert {name: schedule.steps for name, schedule in schedules.items()} == {"discriminator": 5, "generator": 2}
    assert ema.updates == 2 and trainer.state.optimizer_steps == 7 and updates.turn is None


def test_each_reports_under_its_name_and_the_means_are_of_what_was_made():
    rows, trainer = [], Trainer(updates_of(networks(), every=2))
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda trainer: rows.append(set(trainer.state.output)))
    trainer.run(list(DATA.split(8)), max_iters=4)

    of_discriminator = {"discriminator/loss", "discriminator/real", "discriminator/generated"}
    assert rows == [of_discriminator, of_discriminator | {"generator/loss"}] * 2
    assert set(trainer.state.metrics) == of_discriminator | {"generator/loss"}


class Quiet(nn.Module):
    """Both networks in DDP; generated points are functions of the real ones, so that ranks change nothing."""

    def __init__(self, wrap):
        super().__init__()
        gan = networks()
        self.generator = nn.Linear(2, 2)
        self.discriminator = gan.discriminator
        if wrap:
            self.generator = DistributedDataParallel(self.generator)
            self.discriminator = DistributedDataParallel(self.discriminator)


def quiet_discriminator_loss(gan, points):
    with torch.no_grad():
        generated = gan.generator(points)
    return softplus(-gan.discriminator(points)).mean() + softplus(gan.discriminator(generated)).mean()


def quiet_generator_loss(gan, points):
    return softplus(-gan.discriminator(gan.generator(points))).mean()


def quiet_run(wrap, batch_size, folder=None, stop=None):
    seed_everything(3)
    points = ring(40)
    gan = Quiet(wrap)
    losses = {"discriminator": quiet_discriminator_loss, "generator": quiet_generator_loss}
    made = {
        name: Update(gan, torch.optim.SGD(getattr(gan, name).parameters(), lr=0.1), losses[name]) for name in losses
    }
    trainer = Trainer(Updates(made, every={"generator": 2}), 2)
    if folder is not None:
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer, Events.COMPLETED)
        checkpoint.resume()
    if stop is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda trainer: trainer.request_stop("asked"))
    trainer.run(loader(points, batch_size, shuffle=True), max_iters=9)
    return one(gan)


def quiet_runs(rank, folder):
    whole = quiet_run(True, 4)
    quiet_run(True, 4, folder, stop=3)
    return whole.tolist(), quiet_run(True, 4, folder).tolist()


def test_two_ranks_train_as_one_process_and_resume_exactly(tmp_path):
    first, second = ranks(2, quiet_runs, tmp_path / "checkpoints")

    assert first[0] == first[1] == second[0] == second[1]
    assert first[0] == pytest.approx(quiet_run(False, 8).tolist(), abs=1e-6)
