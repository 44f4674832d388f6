"""Losses and gradients that are not finite: the first is reported, and by policy all ranks skip or stop."""

import logging
import math
from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, Update, loader
from ignite_engine.errors import NotFinite
from ignite_engine.handlers import EMA, Checkpoint, LRSchedule, MetricLogger, warmup_linear
from tests.kit.tiny import Numbers, linear, mse, one
from tests.ranks.forkserver import on_ranks

BAD = 9
"""The first sample of iteration 3 on one rank with batches of 2 in groups of 2 (samples 8 to 11)."""


class Planted(Numbers):
    """Samples of which some are NaN, or have another target that plants something in the loss."""

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
    kind = inputs.detach().flatten()
    if (kind == 1e3).any():
        return Diverging.apply(mse(model, (inputs / 1e3, targets)))
    if (kind == -1e3).any():
        return mse(model, (inputs / 1e3, targets)) * 0.0 + torch.full((), math.nan)
    return mse(model, batch)


def trainer_with(policy, model=None, **options):
    model = linear() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    trainer = Trainer(Update(model, optimizer, planted_loss, non_finite=policy, **options), 2)
    LRSchedule(warmup_linear(optimizer, warmup=2, total=20)).attach(trainer)
    return trainer


@pytest.fixture
def said(caplog):
    return lambda: [each.getMessage() for each in caplog.records if "iteration" in each.getMessage()]


# -- without a policy -------------------------------------------------------------------------------------------------


@pytest.mark.row("G4")
@pytest.mark.parametrize("logger", [True, False])
@pytest.mark.parametrize(
    ("value", "line"),
    [
        (math.nan, "The loss of iteration 3 "),
        (1e3, "The loss of iteration 4 "),  # what the gradients of 3 have left
        (-1e3, "The loss of iteration 3 "),
    ],
)
def test_first_is_always_one_line(value, line, logger, said):
    trainer = trainer_with(None)
    if logger:
        MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=4))
    trainer.run(loader(Planted(value=value), 2))

    assert trainer.state.status == "completed" and trainer.state.not_finite_at == int(line[-2])
    (first, *end) = said()
    assert first.startswith(line) and len(end) == int(logger and value != -1e3), said()


@pytest.mark.row("G4")
def test_gradients_of_the_last_update_are_noticed_too(said):
    trainer_with(None).run(loader(Planted(12, value=1e3), 2))
    assert said() == [
        "The weights are not finite at the end of the run, iteration 3, though every loss was: the gradients of the "
        "last update were not, or the step was too large."
    ]


def test_gradient_norm_that_is_logged_names_its_own_iteration(said):
    trainer = trainer_with(None, clip_norm=1.0)
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=6))
    trainer.run(loader(Planted(value=1e3), 2))
    assert said()[0].startswith("The gradient norm of iteration 3 is nan, the first that is not finite; the run")


def test_healthy_run_says_nothing(said):
    trainer_with(None).run(loader(Numbers(24), 2), max_epochs=2)
    assert said() == []


# -- skip -------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e3, -1e3])
def test_skip_is_the_loop_that_leaves_the_step_out(value, said):
    data, trainer = Planted(value=value), trainer_with("skip")
    ema = EMA(0.5)
    ema.attach(trainer)
    logger = MetricLogger(console=False)
    logger.attach(trainer, Events.ITERATION_COMPLETED(every=3))
    means = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=3), lambda: means.append(trainer.state.metrics["loss"]))
    trainer.run(loader(data, 2), max_epochs=2)
    state = trainer.state

    assert torch.equal(one(trainer.update.model), by_hand(data, linear(), (3, 9), 2))
    assert (state.iteration, state.optimizer_steps, state.skipped_steps, ema.updates) == (12, 10, 2, 10)
    assert len(means) == 4 and all(map(math.isfinite, means))
    what = "gradient norm" if value == 1e3 else "loss"
    assert [line[: len(f"The {what} of iteration 3")] for line in said()] == [
        f"The {what} of iteration 3",
        f"The {what} of iteration 9",
    ]
    assert said()[1].endswith(": its step is skipped (2 of at most 10).")
    journal = trainer.update.non_finite.state_dict()["journal"]
    assert [(entry["iteration"], entry["epoch"], entry["samples"]) for entry in journal] == [
        (3, 1, [[8, 9, 10, 11]]),
        (9, 2, [[8, 9, 10, 11]]),
    ]
    norms = [norm for entry in journal for norm in entry["grad_norm"]]
    assert list(map(math.isfinite, norms)) == [value == -1e3] * 2, "of a NaN alone gradients are finite"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_policy_changes_no_bit_of_a_finite_run(precision):
    ends = []
    for policy in (None, "skip"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
        torch.manual_seed(3)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        trainer = trainer_with(policy, model, precision=precision)
        trainer.run(loader(Numbers(24), 2), max_epochs=2)
        ends.append((one(model).clone(), trainer.state.optimizer_steps))
    assert torch.equal(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1] > 6


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_overflow_of_the_scaler_is_not_of_the_policy(clip_norm, said):
    options = {"precision": "fp16", "grad_scaler": {"init_scale": 2.0**8, "growth_interval": 100}}
    options["clip_norm"] = clip_norm
    trainer = trainer_with("skip", max_skips=1, **options)
    trainer.run(loader(Planted(value=1e3), 2))
    scaler = trainer.update.scaler
    assert (trainer.state.skipped_steps, scaler.get_scale(), said()) == (1, 2.0**7, [])

    trainer = trainer_with("skip", max_skips=1, **options)
    trainer.run(loader(Planted(value=math.nan), 2))
    scaler = trainer.update.scaler
    assert (trainer.state.skipped_steps, scaler.get_scale(), len(said())) == (1, 2.0**8, 1)


def test_batch_statistics_of_a_skipped_step_are_undone():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    seen = []
    trainer = trainer_with("skip", model)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(model[1].running_mean.clone()))
    trainer.run(loader(Planted(), 2))

    assert torch.equal(seen[1], seen[2]) and not torch.equal(seen[2], seen[3]) and seen[5].isfinite().all()


def test_rank_invariant_steps_are_skipped_too(said):
    ends = []
    for data in (Planted(), Planted(bad=())):
        model = linear(dropout=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        update = Update(model, optimizer, planted_loss, non_finite="skip", rank_invariant=True)
        trainer = Trainer(update, global_micro_batches=2)
        if len(said()):
            assert update.non_finite is not None
            update.non_finite.journal[3] = {"iteration": 3}  # left out without a forward
            trainer.starts_fresh = lambda name: False
        trainer.run(loader(data, 2))
        ends.append(one(model))
    assert torch.equal(*ends) and len(said()) == 1


def test_too_many_end_the_run_and_the_count_is_resumed(tmp_path):
    def attempt(max_epochs):
        trainer = trainer_with("skip", max_skips=2)
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(loader(Planted(), 2), max_epochs=max_epochs)
        return trainer

    assert attempt(2).state.skipped_steps == 2
    with pytest.raises(
        NotFinite,
        match=r"The loss of iteration 15 is nan, and 2 iterations were left out already \(max_skips=2\): the run ends "
        r"before the weights change\. Check the data",
    ):
        attempt(3)


def test_a_fresh_run_in_the_same_process_begins_its_own_journal(said):
    trainer = trainer_with("skip", max_skips=1)
    for count in (1, 2):
        state = trainer.run(loader(Planted(), 2))
        assert (state.skipped_steps, len(said())) == (1, count)


@pytest.mark.parametrize("logger", [True, False])
def test_a_fresh_run_in_the_same_process_reports_its_own_first(logger):
    trainer = trainer_with(None)
    if logger:
        MetricLogger(console=False).attach(trainer)
    for data, at in ((Planted(), 3), (Numbers(24), None)):
        trainer.update.model.load_state_dict(linear().state_dict())
        trainer.update.optimizers["optimizer"].state.clear()
        assert trainer.run(loader(data, 2)).not_finite_at == at


# -- stop -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, 1e3, -1e3])
def test_stop_ends_the_run_before_the_weights_change(value, tmp_path):
    data, trainer = Planted(value=value), trainer_with("stop")
    checkpoint = Checkpoint(tmp_path, on_exception=True)
    checkpoint.attach(trainer)
    with pytest.raises(NotFinite, match=r"of iteration 3 is .*: the run ends before the weights change"):
        trainer.run(loader(data, 2))

    assert trainer.state.status == "failed" and str(trainer.state.reason).startswith("NotFinite: The ")
    before = Numbers(8)
    before.inputs, before.targets = data.inputs[:8], data.targets[:8]
    assert torch.equal(one(trainer.update.model), by_hand(before, linear(), ()))
    (saved,) = checkpoint.store.checkpoints()
    assert saved.iteration == 2 and saved.manifest.healthy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"non_finite": "ignore"}, "non_finite must be one of skip, stop, rollback, or None, got 'ignore'"),
        ({"non_finite": "skip", "max_skips": 0}, "max_skips must be a whole number of at least 1, got 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, message):
    model = linear()
    with pytest.raises(ValueError, match=message):
        Update(model, torch.optim.SGD(model.parameters()), mse, **options)


# -- two ranks --------------------------------------------------------------------------------------------------------


def lines_of(rank, folder):
    path = Path(folder, f"{rank}.txt")
    logging.basicConfig(filename=path, format="%(message)s", force=True, level=logging.WARNING)
    return lambda: [line for line in path.read_text().splitlines() if "iteration" in line]


def _cases(rank):
    """Batches of 2 on two ranks, groups of 2: iteration 3 has samples 16 to 23, the odd ones are rank 1's."""
    for value, what in ((math.nan, "loss"), (1e3, "gradients"), (-1e3, "loss alone")):
        for policy in (None, "skip", "stop"):
            model = linear()
            wrapped = DistributedDataParallel(model)
            trainer = trainer_with(policy, wrapped)
            try:
                trainer.run(loader(Planted(48, (19,), value), 2))
            except NotFinite as error:
                yield f"{what} {policy}", (trainer.state.iteration, str(error), one(model))
                continue
            yield f"{what} {policy}", (trainer.state.optimizer_steps, one(model))


def _one_of_two_ranks(rank, folder):
    said = lines_of(rank, folder)
    found, before = {}, 0
    for name, outcome in _cases(rank):
        lines = said()
        found[name], before = (*outcome, lines[before:]), len(lines)
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_two_ranks_act_alike(tmp_path):
    on_ranks(2, _one_of_two_ranks, tmp_path)
    rows = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    data = Planted(48, ())
    of_ranks = torch.arange(48).view(-1, 2, 2, 2).transpose(-1, -2).reshape(-1)  # batches by rank, then by order
    data.inputs, data.targets = data.inputs[of_ranks], data.targets[of_ranks]

    def without(iteration, samples=48):
        model = linear()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        schedule, steps = warmup_linear(optimizer, warmup=2, total=20), 0
        for start in range(0, samples, 8):
            if start // 8 + 1 != iteration:
                optimizer.zero_grad()
                mse(model, (data.inputs[start : start + 8], data.targets[start : start + 8])).backward()
                optimizer.param_groups[0]["lr"] = schedule.lrs_at(steps)[0]
                optimizer.step()
                steps += 1
        return one(model)

    for what in ("loss", "gradients", "loss alone"):
        for policy in ("None", "skip", "stop"):
            assert torch.equal(
                rows[0][f"{what} {policy}"][-2].nan_to_num(), rows[1][f"{what} {policy}"][-2].nan_to_num()
            )
            assert rows[1][f"{what} {policy}"][-1] == [], "said by rank 0 alone"
        steps, weights, lines = rows[0][f"{what} skip"]
        torch.testing.assert_close(weights, without(3), rtol=1e-5, atol=1e-6)
        name = "gradient norm" if what == "gradients" else "loss"
        where = ", its loss is finite" if what == "gradients" else " on rank 1"
        assert steps == 5 and len(lines) == 1
        assert lines[0].startswith(f"The {name} of iteration 3 is ") and f"{where}: its step is skipped" in lines[0]
        iteration, error, weights, _ = rows[0][f"{what} stop"]
        assert iteration == 3 and error == rows[1][f"{what} stop"][1] and where in error
        torch.testing.assert_close(weights, without(3, 16), rtol=1e-5, atol=1e-6)
    assert rows[0]["loss None"][-1][0].startswith("The loss of iteration 3 was the first that is not finite on rank 1.")
    assert rows[0]["loss None"][1].isnan().all()
    assert "iteration 4 was the first that is not finite on every rank" in rows[0]["gradients None"][-1][0]


def _rank_invariant_journal(rank, folder):
    model = linear()
    update = Update(
        model, torch.optim.SGD(model.parameters(), 0.01), planted_loss, non_finite="skip", rank_invariant=True
    )
    logging.basicConfig(filename=Path(folder, f"{rank}.txt"), format="%(message)s", force=True)
    Trainer(update, global_micro_batches=3).run(loader(Planted(23, (7, 22)), 2), max_epochs=1)
    assert update.non_finite is not None
    torch.save(update.non_finite.journal, Path(folder, f"{rank}.pt"))


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_rank_invariant_journal_has_the_samples_and_the_loss_of_each_rank(tmp_path):
    on_ranks(2, _rank_invariant_journal, tmp_path)
    journal = torch.load(tmp_path / "0.pt")
    assert journal.keys() == {2, 4}
    samples, losses = (list(zip(*(entry[key] for entry in journal.values()))) for key in ("samples", "loss"))
    assert samples == [([6, 7, 8, 9], [18, 19, 20, 21]), ([10, 11], [22])], "the last batch is a short one"
    assert [[math.isnan(loss) for loss in of_rank] for of_rank in losses] == [[True, False], [False, True]]
    assert "The loss of iteration 2 is nan on rank 0: " in (tmp_path / "0.txt").read_text()
