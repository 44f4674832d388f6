"""One update: what N micro-batches make together, and what happens where nothing may be stepped."""

import math
import re
from contextlib import nullcontext
from typing import cast

import pytest
import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn

from ignite_engine import Trainer, TrainingEvents, Update
from tests.kit.resume import EVERYWHERE, Program, assert_resumes
from tests.kit.tiny import Numbers, linear, mse, one, trainer_of, weights


def batches_of(data, sizes):
    pieces, start = [], 0
    for size in sizes:
        pieces.append((data.inputs[start : start + size], data.targets[start : start + size]))
        start += size
    return pieces


def trained(sizes, steps, **options):
    trainer = trainer_of(linear(dtype=torch.float64), steps, **options)
    state = trainer.run(batches_of(Numbers(64, dtype=torch.float64), sizes), max_epochs=1)
    return weights(trainer), state


@pytest.mark.row("B1")
def test_four_micro_batches_of_8_equal_one_batch_of_32():
    small, state = trained([8] * 8, 4, clip_norm=0.5)
    big, reference = trained([32] * 2, None, clip_norm=0.5)

    torch.testing.assert_close(small, big, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(state.output["loss"], reference.output["loss"], rtol=1e-13, atol=0)
    torch.testing.assert_close(state.output["grad_norm"], reference.output["grad_norm"], rtol=1e-12, atol=0)
    assert (state.iteration, state.optimizer_steps, state.micro_batches) == (2, 2, 8)
    assert not torch.equal(big, one(linear(dtype=torch.float64)))


def test_ragged_micro_batches_weigh_what_weight_fn_says():
    def samples(batch):
        return len(batch[0])

    ragged, state = trained([1, 7, 16, 8], 4, weight_fn=samples)
    unweighted, _ = trained([1, 7, 16, 8], 4)
    big, reference = trained([32], None)

    torch.testing.assert_close(ragged, big, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(state.output["loss"], reference.output["loss"], rtol=1e-13, atol=0)
    assert (unweighted - big).abs().max() > 1e-4


@pytest.mark.row("B12")
def test_short_last_group_is_divided_by_its_own_size():
    # 6 micro-batches by 4: the last group of the epoch holds 2
    grouped, state = trained([8] * 6, 4)
    big, _ = trained([32, 16], None)

    torch.testing.assert_close(grouped, big, rtol=1e-13, atol=1e-14)
    assert state.iteration == 2


def test_extra_outputs_are_averaged_as_the_loss():
    def loss_fn(model, batch):
        loss = mse(model, batch)
        return loss, {"samples": torch.tensor(float(len(batch[0]))), "twice": 2 * loss.detach()}

    model = linear()
    update = Update(
        model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, weight_fn=lambda b: len(b[0]), log_grad_norm=True
    )
    state = Trainer(update, accumulation_steps=2).run(batches_of(Numbers(8), [2, 6]))

    assert state.output["samples"].item() == 2 * 0.25 + 6 * 0.75
    torch.testing.assert_close(state.output["twice"], 2 * state.output["loss"])
    assert set(state.output) == {"loss", "grad_norm", "samples", "twice"}
    assert not any(value.requires_grad for value in state.output.values())


@pytest.mark.parametrize(
    "second", [None, {}, {"other": torch.ones(())}, {"one": torch.ones(()), "other": torch.ones(())}]
)
def test_extra_outputs_of_some_micro_batches_only_are_refused(second):
    named = [{"one": torch.ones(())}, second]

    def loss_fn(model, batch):
        extra = named.pop(0)
        return mse(model, batch) if extra is None else (mse(model, batch), extra)

    model = linear()
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn), accumulation_steps=2)
    with pytest.raises(ValueError, match="loss_fn must return the same names for each micro-batch of a group, got"):
        trainer.run(batches_of(Numbers(8), [2, 6]))


def test_group_without_weight_is_skipped(caplog):
    trainer = trainer_of(linear(), 2, weight_fn=lambda batch: float(batch[0].sum() > 1e6))
    before, skipped = weights(trainer), []
    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_SKIPPED, lambda: skipped.append(trainer.state.iteration))
    state = trainer.run(batches_of(Numbers(16), [4] * 4))

    assert torch.equal(weights(trainer), before)
    assert (state.iteration, state.optimizer_steps, state.skipped_steps, skipped) == (2, 0, 2, [1, 2])
    assert caplog.messages == [
        "The run made no optimizer step, all 2 were skipped: return weights above 0 from weight_fn, or look for losses "
        "and gradients that are not finite."
    ]


def test_run_with_a_step_says_nothing_of_skipped_ones(caplog):
    weights = [0.0, 1.0]
    trainer = trainer_of(linear(), None, weight_fn=lambda batch: weights.pop(0))
    trainer.run(batches_of(Numbers(8), [4, 4]), max_epochs=1)

    assert (trainer.state.optimizer_steps, trainer.state.skipped_steps) == (1, 1) and not caplog.messages


def test_micro_batch_without_weight_cannot_spoil_its_group():
    """The mean over no token at all is 0 / 0, which times a weight of zero is still NaN."""

    def loss_fn(model, batch):
        losses = (model(torch.ones(len(batch), 3, dtype=torch.float64)).squeeze(1) - batch).pow(2)
        counts = (batch != -1).to(losses.dtype)
        return (losses * counts).sum() / counts.sum()

    def run(batches):
        model = linear(dtype=torch.float64)
        update = Update(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, weight_fn=lambda batch: (batch != -1).sum()
        )
        state = Trainer(update, accumulation_steps=2).run(batches)
        return one(model).clone(), state.output["loss"]

    tokens, masked = torch.tensor([0, 1, -1, 1]), torch.tensor([-1, -1])
    with_masked, loss = run([tokens, masked])
    alone, loss_alone = run([tokens])

    assert torch.equal(with_masked, alone) and torch.equal(loss, loss_alone)
    assert torch.isfinite(alone).all()


@pytest.mark.parametrize("masked", [(False, True), (True, False)])
def test_loss_of_a_micro_batch_without_weight_is_not_in_the_mean_where_peers_wait_for_its_gradients(masked):
    """cross_entropy of ignored targets alone is NaN, and its gradients are zeros."""

    class Wrapped(nn.Linear):
        def no_sync(self):
            return nullcontext()

    def loss_fn(model, batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss, {"twice": 2 * loss.detach()}

    def batch(ignored):
        return torch.ones(2, 3), torch.tensor([-100, -100] if ignored else [0, 1])

    model = Wrapped(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = Update(model, optimizer, loss_fn, weight_fn=lambda batch: int((batch[1] != -100).sum()))
    alone = loss_fn(model, batch(False))[0].item()
    output = Trainer(update, accumulation_steps=2).run([batch(each) for each in masked]).output

    assert torch.isfinite(one(model)).all()
    assert output["loss"].item() == pytest.approx(alone)
    assert output["twice"].item() == 2 * output["loss"].item()


@pytest.mark.parametrize(
    ("weight", "shown"),
    [(-1.0, "-1.0"), (float("nan"), "nan"), (float("inf"), "inf"), (None, "NoneType"), (10**400, "inf")]
    + [(torch.ones(3), "Tensor [3] float32")],
)
def test_weight_that_is_no_number_or_out_of_range_is_refused(weight, shown):
    trainer = trainer_of(linear(), 2, weight_fn=lambda batch: weight)

    with pytest.raises(
        ValueError, match=rf"weight_fn must return a finite number of at least 0, got {re.escape(shown)}"
    ):
        trainer.run(batches_of(Numbers(4), [2, 2]))


# -- several optimizers -----------------------------------------------------------------------------------------------


class Bag(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(10, 4, sparse=sparse, dtype=torch.float64)
        self.head = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).mean(1))


def bag_loss(model, tokens):
    return 50 * model(tokens).pow(2).mean()


# index 4 is twice in a sample and again in the other micro-batch
TOKENS = [torch.tensor([[4, 4, 1], [2, 4, 3]]), torch.tensor([[4, 5, 5], [1, 1, 1]])]


def test_sparse_and_dense_gradients_are_clipped_by_their_joint_norm():
    model, dense = Bag(sparse=True), Bag(sparse=False)
    update = Update(
        model,
        {
            "sparse": torch.optim.SparseAdam(list(model.embedding.parameters()), lr=0.01),
            "dense": torch.optim.AdamW(model.head.parameters(), lr=0.01),
        },
        bag_loss,
        clip_norm=0.1,
    )
    trainer = Trainer(update, accumulation_steps=2)
    state = trainer.run(TOKENS)
    (sum(bag_loss(dense, tokens) for tokens in TOKENS) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.1)

    assert norm > 1.0
    torch.testing.assert_close(state.output["grad_norm"], norm, rtol=1e-12, atol=0)
    gradient = model.embedding.weight.grad
    assert gradient is not None and gradient.is_sparse
    torch.testing.assert_close(gradient.to_dense(), dense.embedding.weight.grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(model.head.weight.grad, dense.head.weight.grad, rtol=1e-12, atol=1e-15)


def test_norm_is_reported_without_clipping_too():
    model, dense = Bag(sparse=True), Bag(sparse=False)
    optimizers = {
        "sparse": torch.optim.SparseAdam(list(model.embedding.parameters())),
        "dense": torch.optim.AdamW(model.head.parameters()),
    }
    state = Trainer(Update(model, optimizers, bag_loss, log_grad_norm=True)).run(TOKENS[:1])
    bag_loss(dense, TOKENS[0]).backward()

    norm = torch.nn.utils.get_total_norm([p.grad for p in dense.parameters() if p.grad is not None])
    torch.testing.assert_close(state.output["grad_norm"], norm, rtol=1e-12, atol=0)


@pytest.mark.row("B1")
def test_micro_batches_equal_one_batch_with_a_sparse_and_a_dense_optimizer():
    def run(batches, steps):
        model = Bag(sparse=True)
        optimizers = {
            "sparse": torch.optim.SparseAdam(list(model.embedding.parameters()), lr=0.01),
            "dense": torch.optim.AdamW(model.head.parameters(), lr=0.01),
        }
        update = Update(model, optimizers, bag_loss, clip_norm=0.5, weight_fn=len)
        return model, Trainer(update, steps).run(batches, max_epochs=3)

    rows = torch.cat(TOKENS)
    small, state = run([rows[:1], rows[1:]], 2)
    big, reference = run([rows], None)

    for one_of, other in zip(small.parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(one_of, other, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(state.output["grad_norm"], reference.output["grad_norm"], rtol=1e-11, atol=0)
    assert state.optimizer_steps == 3 and not torch.equal(big.embedding.weight, Bag(sparse=True).embedding.weight)


@pytest.mark.row("A7")
def test_all_optimizers_step():
    model, before = Bag(sparse=True), Bag(sparse=True)
    optimizers = {
        "sparse": torch.optim.SparseAdam(list(model.embedding.parameters()), lr=0.01),
        "dense": torch.optim.AdamW(model.head.parameters(), lr=0.01),
    }
    Trainer(Update(model, optimizers, bag_loss)).run(TOKENS)

    changed = (model.embedding.weight != before.embedding.weight).any(1)
    assert changed.tolist() == [index in (1, 2, 3, 4, 5) for index in range(10)]
    assert not torch.equal(model.head.weight, before.head.weight)


# -- precision --------------------------------------------------------------------------------------------------------


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)


def two_part_loss(model, batch):
    left, right = batch
    return (model.left(left).float() + model.right(right).float()).mean()


def fp16_trainer(**options):
    model = TwoParts()
    optimizers = {
        "left": torch.optim.SGD(model.left.parameters(), lr=0.1),
        "right": torch.optim.AdamW(model.right.parameters(), lr=0.1),
    }
    return Trainer(Update(model, optimizers, two_part_loss, precision="fp16", **options)), optimizers


@pytest.mark.row("A7", "B7")
def test_overflow_in_one_optimizer_stops_all_of_them():
    from ignite_engine.handlers import LRSchedule, warmup_linear

    trainer, optimizers = fp16_trainer(grad_scaler={"init_scale": 256.0, "growth_interval": 2})
    LRSchedule(warmup_linear(optimizers["left"], warmup=10, total=100)).attach(trainer)
    fine, huge = torch.ones(1, 2), torch.full((1, 2), 3e4)
    seen = []

    def look(engine):
        scaler = engine.update.scaler
        seen.append((weights(engine), optimizers["left"].param_groups[0]["lr"], scaler.get_scale()))

    trainer.add_event_handler(Events.STARTED | Events.ITERATION_COMPLETED, look)
    fired = []
    for event in (TrainingEvents.OPTIMIZER_STEP_COMPLETED, TrainingEvents.OPTIMIZER_STEP_SKIPPED):
        trainer.add_event_handler(event, lambda *, name=event.name: fired.append(name))
    # the input of the right part times the scale is beyond fp16, the left one's gradient is fine
    state = trainer.run([(fine, fine), (fine, huge), (fine, fine)])

    (start, lr_0, _), (first, lr_1, scale_1), (second, lr_2, scale_2), (third, lr_3, scale_3) = seen
    assert fired == ["OPTIMIZER_STEP_COMPLETED", "OPTIMIZER_STEP_SKIPPED", "OPTIMIZER_STEP_COMPLETED"]
    assert not torch.equal(start, first) and torch.equal(first, second) and not torch.equal(second, third)
    assert lr_0 < lr_1 == lr_2 < lr_3
    assert (scale_1, scale_2, scale_3) == (256.0, 128.0, 128.0)
    assert (state.iteration, state.optimizer_steps, state.skipped_steps) == (3, 2, 1)
    assert optimizers["right"].state_dict()["state"][0]["step"] == 2


@pytest.mark.row("B6")
def test_scaler_takes_all_its_options():
    options = {"init_scale": 64.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 1}
    trainer, _ = fp16_trainer(grad_scaler=options)
    fine = torch.ones(1, 2)
    trainer.run([(fine, fine)] * 2)
    assert trainer.update.scaler.get_scale() == 64.0 * 3 * 3


@pytest.mark.row("B6")
def test_scaler_is_in_the_checkpoint(tmp_path):
    fine, huge = torch.ones(1, 2), torch.full((1, 2), 3e4)

    def build():
        return fp16_trainer(grad_scaler={"init_scale": 256.0, "growth_interval": 2})[0]

    made = Program(build, lambda: [(fine, fine), (fine, huge), (fine, fine), (fine, fine)])
    assert_resumes(made, tmp_path, at=EVERYWHERE, how=["stop", "same process"])


def test_clipping_sees_unscaled_gradients():
    trainer, _ = fp16_trainer(grad_scaler={"init_scale": 1024.0}, clip_norm=1e3)
    state = trainer.run([(torch.ones(1, 2), torch.ones(1, 2))])

    assert state.output["grad_norm"].item() == pytest.approx(6**0.5, rel=1e-3)


# -- the loop written by hand is the judge ----------------------------------------------------------------------------


class Islands(nn.Module):
    """Layers in the precision of autocast around one that the model keeps in fp32, as a router or a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.island, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, inputs):
        hidden = self.first(inputs).tanh()
        with torch.autocast("cpu", enabled=False):
            hidden = self.island(hidden.float()).tanh()
        return self.last(hidden)


def by_hand(model, optimizer, loss_fn, groups, precision="fp32"):
    """Autocast around each forward, backward outside of it, one step for each group."""
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    for group in groups:
        optimizer.zero_grad()
        for batch in group:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = loss_fn(model, batch)
            scaler.scale(loss / len(group)).backward()
        scaler.step(optimizer)
        scaler.update()


def grouped(batches, steps):
    return [batches[index : index + (steps or 1)] for index in range(0, len(batches), steps or 1)]


@pytest.mark.row("B6")
@pytest.mark.parametrize(
    "listened", [None, *(event for event in TrainingEvents if "STEP" in event.name or "B" in event.name)]
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("steps", [None, 1, 2, 4])
def test_layers_kept_in_fp32_get_the_bits_of_the_loop_written_by_hand(steps, precision, listened):
    batches, models = batches_of(Numbers(30, 8), [4] * 7), [Islands(), Islands()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    trainer = Trainer(Update(models[0], optimizers[0], mse, precision=precision), steps)
    if listened is not None:
        trainer.add_event_handler(listened, lambda: None)
    trainer.run(batches)
    by_hand(models[1], optimizers[1], mse, grouped(batches, steps), precision)

    assert torch.equal(one(models[0]), one(models[1]))
    assert not torch.equal(one(models[0]), one(Islands()))


@pytest.mark.parametrize("through_data", [True, False])
def test_weight_that_loss_fn_writes_to_is_seen_by_the_next_micro_batch(through_data):
    def loss_fn(model, batch):
        loss = mse(model, batch)
        weight = next(model.parameters())
        if through_data:
            weight.data.mul_(0.5)
        else:
            with torch.no_grad():
                weight.copy_(weight * 0.5)
        return loss

    batches, models = batches_of(Numbers(16), [4] * 4), [linear(), linear()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    Trainer(Update(models[0], optimizers[0], loss_fn, precision="bf16"), 2).run(batches)
    by_hand(models[1], optimizers[1], loss_fn, grouped(batches, 2), "bf16")

    assert torch.equal(one(models[0]), one(models[1]))


def test_no_autocast_context_is_open_in_a_handler():
    trainer = trainer_of(linear(), 4, precision="bf16")
    inside = []
    trainer.add_event_handler(
        TrainingEvents.BACKWARD_COMPLETED, lambda: inside.append(torch.is_autocast_enabled("cpu"))
    )
    trainer.run(batches_of(Numbers(32), [4] * 8))

    assert inside == [False] * 8


def append(optimizer, parameter):
    optimizer.param_groups[0]["params"].append(parameter)


@pytest.mark.parametrize("log_only", [False, True])
def test_norm_is_summed_in_the_order_of_the_model_whatever_the_groups(log_only):
    def made():
        torch.manual_seed(5)
        model = nn.Sequential(*(nn.Linear(31, 31) for _ in range(12)))
        decayed = [each for each in model.parameters() if each.dim() > 1]
        others = [each for each in model.parameters() if each.dim() == 1]
        return model, torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.01)

    def loss_fn(model, batch):
        return model(batch).square().mean()

    model, optimizer = made()
    data, norms = list(torch.randn(8, 4, 31).unbind()), list[Tensor]()
    options = {"log_grad_norm": True} if log_only else {"clip_norm": 1e-3}
    trainer = Trainer(Update(model, optimizer, loss_fn, **options))
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda trainer: norms.append(trainer.state.output["grad_norm"].clone())
    )
    trainer.run(data, max_epochs=1)
    other, optimizer = made()
    expected = list[Tensor]()
    for batch in data:
        optimizer.zero_grad()
        loss_fn(other, batch).backward()
        expected.append(nn.utils.clip_grad_norm_(other.parameters(), math.inf if log_only else 1e-3))
        optimizer.step()

    assert torch.equal(torch.stack(norms), torch.stack(expected)) and torch.equal(one(model), one(other))


def clear_and_add(optimizer, parameter):
    kept = [*optimizer.param_groups[0]["params"], parameter]
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": kept})


def replace(optimizer, parameter):
    optimizer.param_groups[0]["params"][-1] = parameter


@pytest.mark.parametrize("change", [append, clear_and_add, replace])
def test_parameters_that_change_during_a_run_are_cleared_and_clipped(change):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()
            self.scale = nn.Parameter(torch.ones(1))
            self.grown = nn.Parameter(torch.ones(1))

        def forward(self, inputs):
            return self.layer(inputs) * self.scale * self.grown

    def made():
        model = Growing()
        first = [*model.layer.parameters(), model.scale]
        return model, torch.optim.SGD(first, lr=0.1)

    batches = batches_of(Numbers(48), [4] * 12)
    model, optimizer = made()
    trainer = Trainer(Update(model, optimizer, mse, clip_norm=0.05), 2)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: change(optimizer, model.grown))
    trainer.run(batches)
    other, optimizer = made()
    for index, group in enumerate(grouped(batches, 2)):
        if index == 2:
            change(optimizer, other.grown)
        parameters = [parameter for each in optimizer.param_groups for parameter in each["params"]]
        for parameter in parameters:
            parameter.grad = None  # else the first one has gathered gradients from before it was added
        for batch in group:
            (mse(other, batch) / 2).backward()
        in_order = [parameter for parameter in other.parameters() if any(parameter is held for held in parameters)]
        torch.nn.utils.clip_grad_norm_(in_order, 0.05)
        optimizer.step()

    assert torch.equal(one(model), one(other)) and model.grown.item() != 1.0


# -- shape of the whole -----------------------------------------------------------------------------------------------


def test_events_of_one_update_come_in_order():
    trainer = trainer_of(linear(), 2, clip_norm=1e-6)
    fired = []

    def norm():
        return sum(float(p.grad.norm() ** 2) for p in trainer.update.model.parameters()) ** 0.5

    for event in (TrainingEvents.BACKWARD_COMPLETED, TrainingEvents.OPTIMIZER_STEP_COMPLETED):
        trainer.add_event_handler(event, lambda *, name=event.name: fired.append(name))
    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, lambda: fired.append(norm() > 1e-3))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: fired.append(norm() < 2e-6))
    trainer.run(batches_of(Numbers(8), [4, 4]))

    # STARTED sees the gradients unclipped, the end of the iteration sees them clipped
    assert fired == ["BACKWARD_COMPLETED", "BACKWARD_COMPLETED", True, "OPTIMIZER_STEP_COMPLETED", True]


def test_update_works_in_a_plain_ignite_engine():
    model, reference = linear(), trainer_of(linear())
    engine = Engine(Update(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), mse))
    data = batches_of(Numbers(16), [4] * 4)
    state = engine.run(data, max_epochs=2)
    reference.run(data, max_epochs=2)

    assert torch.equal(one(model), weights(reference))
    assert state.optimizer_steps == 8


def test_optimizer_of_another_model_is_refused_at_the_first_step(caplog):
    model, other = linear(), linear()
    idle = torch.optim.SGD(other.parameters(), lr=0.1)
    data = batches_of(Numbers(8), [4, 4])
    expected = r"holds no parameter of the model, and none of its own got a gradient in the first step: make it from"

    with pytest.raises(ValueError, match=rf"^optimizer \(SGD\) {expected}"):
        Trainer(Update(model, idle, mse)).run(data)
    # one of several may be meant to begin later
    Trainer(Update(model, {"model": torch.optim.SGD(model.parameters(), lr=0.1), "idle": idle}, mse)).run(data)
    assert [record.getMessage()[:38] for record in caplog.records] == ["idle (SGD) holds no parameter of the m"]


def test_optimizer_that_steps_within_the_backward_may_leave_no_gradient(caplog):
    model = linear()
    before, optimizer = one(model).clone(), torch.optim.SGD(model.parameters(), lr=0.1)

    def step_and_drop(parameter):
        parameter.data -= 0.1 * cast("Tensor", parameter.grad)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_and_drop)
    Trainer(Update(model, optimizer, mse)).run(batches_of(Numbers(8), [4, 4]))

    assert not torch.equal(one(model), before) and "reached none" not in caplog.text


def test_optimizer_of_parameters_outside_of_the_model_trains_them():
    model, outside = linear(), nn.Parameter(torch.ones(1))
    optimizers = {
        "model": torch.optim.SGD(model.parameters(), lr=0.1),
        "outside": torch.optim.SGD([outside], lr=0.1),
    }
    Trainer(Update(model, optimizers, lambda model, batch: mse(model, batch) * outside)).run(
        batches_of(Numbers(8), [4, 4])
    )

    assert outside.item() != 1.0
