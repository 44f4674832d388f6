"""A captured update computes what the plain one computes up to rounding, and its runs resume bit for bit."""

import shutil

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, TrainingEvents, Update, loader, seed_everything
from ignite_engine.errors import NotExact, StateMismatch
from ignite_engine.handlers import Checkpoint, LRSchedule, warmup_cosine
from tests.kit.processes import ranks
from tests.kit.refusals import refusals, refuses
from tests.kit.tiny import linear

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, which torch.compile calls")

EPOCH = 6  # iterations; the last has a smaller batch


def loss_fn(model, batch):
    inputs, targets = batch
    predictions = model(inputs)
    return nn.functional.mse_loss(predictions, targets), {"error": (predictions - targets).abs().mean().detach()}


def data():
    inputs = torch.randn(44, 8, generator=torch.Generator().manual_seed(0))
    return loader(TensorDataset(inputs, inputs[:, :1].sin()), batch_size=8, shuffle=True, seed=0)


def trainer_of(
    mode,
    *,
    optimizer=torch.optim.AdamW,
    dropout=0.0,
    steps=None,
    **options,
):
    seed_everything(0)
    model = nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)
    )
    options = {"clip_norm": 0.5, **options}
    built = optimizer(model.parameters(), lr=1e-2)
    trainer = Trainer(
        Update(model, built, loss_fn, accumulate="capture" if mode else None, **options), accumulation_steps=steps
    )
    LRSchedule(warmup_cosine(built, warmup=4, total=40)).attach(trainer)
    return trainer


def outputs_of(trainer, epochs=2):
    outputs = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: outputs.append({name: float(value) for name, value in trainer.state.output.items()}),
    )
    trainer.run(data(), max_epochs=epochs)
    return outputs


def state_of(trainer):
    model, optimizer = trainer.update.model, trainer.update.optimizers["optimizer"]
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {
            f"{name}/{key}": value.clone()
            for key, value in optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }
    return found


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.01)


@pytest.mark.row("N3")
@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({}, 12),
        ({"steps": 3, "optimizer": momentum, "clip_norm": None, "log_grad_norm": True}, 4),
    ],
    ids=["adamw", "sgd, accumulated"],
)
@pytest.mark.nightly  # compiles
def test_its_losses_and_weights_are_those_of_the_plain_update(options, updates):
    plain, captured = trainer_of(False, **options), trainer_of(True, **options)

    expected, found = outputs_of(plain), outputs_of(captured)

    assert len(expected) == len(found) == updates
    assert [set(output) for output in found] == [set(output) for output in expected]
    for name in expected[0]:
        values = [torch.tensor([output[name] for output in outputs]) for outputs in (found, expected)]
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)
    for name, value in state_of(plain).items():
        torch.testing.assert_close(state_of(captured)[name], value, rtol=1e-4, atol=1e-5)
    assert captured.state.optimizer_steps == updates
    assert not torch.equal(state_of(plain)["0.weight"], state_of(trainer_of(False))["0.weight"])


@pytest.mark.row("N3")
@pytest.mark.nightly  # compiles
def test_resumed_at_a_short_batch_it_ends_with_the_bits_of_the_whole_run(tmp_path):
    """With dropout, which draws from torch's generator, and a schedule, of which no LR is compiled."""
    whole = trainer_of(True, dropout=0.1)
    whole.run(data(), max_epochs=2)

    stopped = trainer_of(True, dropout=0.1)
    Checkpoint(tmp_path, strict=True).attach(stopped)
    stopped.add_event_handler(Events.ITERATION_COMPLETED(once=EPOCH - 1), lambda: stopped.request_stop("a test"))
    stopped.run(data(), max_epochs=2)
    torch.compiler.reset()  # a process of its own compiles first for the short batch
    resumed, checkpoint = trainer_of(True, dropout=0.1), Checkpoint(tmp_path)
    checkpoint.attach(resumed)
    checkpoint.resume()
    resumed.run(data(), max_epochs=2)

    expected, found = state_of(whole), state_of(resumed)
    assert stopped.state.iteration == EPOCH - 1 and resumed.state.iteration == 2 * EPOCH
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.nightly  # compiles
def test_events_of_micro_batches_come_and_see_the_gradients_so_far():
    trainer, seen = trainer_of(True, steps=2), []
    for event in (
        TrainingEvents.FORWARD_STARTED,
        TrainingEvents.FORWARD_COMPLETED,
        TrainingEvents.BACKWARD_COMPLETED,
        TrainingEvents.OPTIMIZER_STEP_STARTED,
    ):
        trainer.add_event_handler(event, lambda _, name=event.name: seen.append(name))
    norms = []
    weight = trainer.update.model[0].weight
    trainer.add_event_handler(TrainingEvents.BACKWARD_COMPLETED, lambda: norms.append(float(weight.grad.norm())))
    trainer.run(data(), max_iters=1)

    micro_batch = ["FORWARD_STARTED", "FORWARD_COMPLETED", "BACKWARD_COMPLETED"]
    assert seen == [*micro_batch, *micro_batch, "OPTIMIZER_STEP_STARTED"]
    assert len(norms) == 2 and norms[0] != norms[1]


@pytest.mark.nightly  # compiles
def test_frozen_parameters_another_setting_and_another_shape_are_graphs_of_their_own():
    """The same losses as the plain way's, each thing compiled once."""

    def run(mode):
        trainer = trainer_of(mode)
        model, (optimizer,) = trainer.update.model, trainer.update.optimizers.values()
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: model[4].bias.requires_grad_(False))
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED(once=3), lambda: optimizer.param_groups[0].update(weight_decay=0.2)
        )
        return outputs_of(trainer)

    compilations = list[str]()
    callback = callback_handler.register_start_callback(lambda arguments: compilations.append(arguments.compile_id))
    try:
        found = run(True)
    finally:
        callback_handler.remove_start_callback(callback)

    # gradients: all trained, frozen, frozen and the short batch; the step: frozen, the other setting
    assert len(compilations) in (5, 6)
    for output, expected in zip(found, run(False), strict=True):
        assert output == pytest.approx(expected, rel=1e-3, abs=1e-5)


def update(model=None, **options):
    model = linear() if model is None else model
    return Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, accumulate="capture", **options)


def with_a_hook(parameters, lr):
    optimizer = torch.optim.AdamW(parameters, lr)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


test_refusals = refusals(
    [
        ("a recipe", lambda: update(precision=torch.no_grad), ValueError, "precision is a function"),
        ("loss parallel", lambda: update(loss_parallel=True), ValueError, "loss_parallel is on"),
        ("a policy", lambda: update(non_finite="skip"), ValueError, "non_finite skipped"),
        ("an optimizer", lambda: trainer_of(True, optimizer=torch.optim.RMSprop), ValueError, "RMSprop AdamW"),
        ("hooks", lambda: trainer_of(True, optimizer=with_a_hook), ValueError, "step of AdamW has hooks"),
    ]
)


def in_ddp(rank):
    refuses(lambda: update(DistributedDataParallel(linear())), ValueError, "DistributedDataParallel one process")


def test_a_model_in_ddp_is_refused():
    ranks(2, in_ddp)


@pytest.mark.nightly  # compiles
def test_a_run_that_was_captured_is_not_resumed_without_a_word(tmp_path):
    saved = trainer_of(True)
    Checkpoint(tmp_path).attach(saved)
    saved.run(data(), max_epochs=1)

    trainer, checkpoint = trainer_of(False), Checkpoint(tmp_path)
    checkpoint.attach(trainer)
    checkpoint.resume()
    with pytest.raises(StateMismatch, match="capture"):
        trainer.run(data(), max_epochs=2)


@pytest.mark.nightly
def test_another_compiler_is_in_the_report(caplog):
    trainer = trainer_of(True)
    (captured,) = (each for name, each, _ in trainer.update.stateful() if name == "capture")
    captured.load_state_dict(captured.state_dict())
    assert trainer.reproducibility() == []

    captured.load_state_dict({"compiler": "cc, INVALID"})

    assert any("cc, INVALID" in reason for reason in trainer.reproducibility())
    assert "other bits" in caplog.text


def test_a_run_that_was_not_captured_is_not_resumed_captured_without_a_word(tmp_path):
    saved = trainer_of(False)
    Checkpoint(tmp_path).attach(saved)
    saved.run(data(), max_epochs=1)

    trainer, checkpoint = trainer_of(True), Checkpoint(tmp_path, strict=True)
    checkpoint.attach(trainer)
    checkpoint.resume()
    assert any("without capture" in reason for reason in trainer.reproducibility())
    with pytest.raises(NotExact, match="without capture"):
        trainer.run(data(), max_epochs=2)


class Odd(nn.Module):
    """Parameters whose gradient is the loss's own, one for both and for all elements of a third."""

    def __init__(self):
        super().__init__()
        self.layer, self.one, self.other = nn.Linear(8, 1), nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.several = nn.Parameter(torch.zeros(3))

    def forward(self, inputs):
        output = self.layer(inputs)
        return output


def with_terms(model, batch):
    return loss_fn(model, batch)[0] + model.one + model.other + model.several.sum()


class Centered(nn.Module):
    """A loss with a mean of what it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1))

    def forward(self, model, batch):
        output = model(batch[0])
        loss = nn.functional.mse_loss(output - self.center, batch[1])
        with torch.no_grad():
            self.center.mul_(0.5).add_(output.mean(0), alpha=0.5)
        return loss


class Reassigned(nn.Module):
    """Puts another tensor in the place of a buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 1), nn.Dropout(0.1)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs):
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
        output = self.layer(self.dropout(inputs - self.mean))
        return output


def writes_to_the_batch(model, batch):
    batch[0].mul_(0.5)
    return loss_fn(model, batch)[0]


def trainer_with(mode, kind, loss, *, steps=None, **options):
    """Of a model of its own."""
    seed_everything(0)
    model = kind()
    update = Update(
        model, momentum(model.parameters(), lr=1e-2), loss, accumulate="capture" if mode else None, **options
    )
    return Trainer(update, accumulation_steps=steps)


def assert_trains_alike(plain, captured):
    expected, found = outputs_of(plain), outputs_of(captured)
    torch.testing.assert_close(
        *([torch.tensor(list(output.values())) for output in outputs] for outputs in (found, expected)),
        rtol=1e-4,
        atol=1e-5,
    )
    for name, value in state_of(plain).items():
        torch.testing.assert_close(state_of(captured)[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"steps": 3}, {"clip_norm": 0.1}], ids=["accumulated", "clipped"])
@pytest.mark.nightly  # compiles
def test_gradients_of_which_one_is_another_in_memory_are_written_to_one_by_one(options):
    assert_trains_alike(trainer_with(False, Odd, with_terms, **options), trainer_with(True, Odd, with_terms, **options))


@pytest.mark.nightly  # compiles
def test_to_compile_leaves_no_trace_in_the_batch():
    def trainer(mode):
        return trainer_with(mode, linear_of_8, writes_to_the_batch)

    assert_trains_alike(trainer(False), trainer(True))


def linear_of_8():
    return nn.Linear(8, 1)


@pytest.mark.nightly  # compiles
def test_to_compile_leaves_no_trace_in_buffers_of_the_loss(tmp_path):
    """Also in a resumed run, whose buffers are no zeros any more, and which compiles anew."""

    def trainer():
        loss = Centered()
        return trainer_with(True, linear_of_8, loss), loss

    (whole, center), (stopped, _), (resumed, resumed_center) = trainer(), trainer(), trainer()
    whole.run(data(), max_epochs=1)
    Checkpoint(tmp_path).attach(stopped)
    stopped.run(data(), max_iters=3)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(resumed)
    checkpoint.resume()
    resumed.run(data(), max_epochs=1)

    assert float(center.center) != 0.0 and torch.equal(center.center, resumed_center.center)
    assert torch.equal(state_of(whole)["weight"], state_of(resumed)["weight"])


def hooked(hook):
    """A hook that comes within a run."""

    def check():
        trainer = trainer_with(True, linear_of_8, loss_fn)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: hook(trainer.update.model))
        outputs_of(trainer)

    return check


def with_kind(kind, loss):
    return lambda: outputs_of(trainer_with(True, kind, loss))


test_refusals_of_what_is_seen_when_it_compiles = pytest.mark.nightly(
    refusals(
        [
            ("buffers", with_kind(Reassigned, lambda m, b: loss_fn(m, b)[0]), ValueError, "mean another tensor"),
            ("a module's hook", hooked(lambda m: m.register_forward_hook(lambda *_: None)), ValueError, "module hooks"),
            (
                "a gradient's",
                hooked(lambda m: m.weight.register_hook(lambda g: g)),
                ValueError,
                "hooks of its gradient",
            ),
        ]
    )
)
