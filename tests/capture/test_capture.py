"""A captured update computes what the plain one computes up to rounding, and its runs resume bit for bit."""

from __future__ import annotations

import logging
import shutil
import signal
from collections import UserDict
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, TrainingEvents, Update, loader, seed_everything
from ignite_engine.capture import NotCaptured, capture, compiling, keep_compiled_code_in, trial
from ignite_engine.errors import NotExact, StateMismatch
from ignite_engine.handlers import Checkpoint, LRSchedule, warmup_cosine
from tests.builders import linear

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, which torch.compile calls")

EPOCH = 6  # iterations; the last has a smaller batch


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    inputs, targets = batch
    predictions = model(inputs)
    return nn.functional.mse_loss(predictions, targets), {"error": (predictions - targets).abs().mean().detach()}


def data() -> Any:
    inputs = torch.randn(44, 8, generator=torch.Generator().manual_seed(0))
    return loader(TensorDataset(inputs, inputs[:, :1].sin()), batch_size=8, shuffle=True, seed=0)


def trainer_of(
    mode: bool | str,
    *,
    optimizer: Any = torch.optim.AdamW,
    dropout: float = 0.0,
    steps: int | None = None,
    **options: Any,
) -> Trainer:
    seed_everything(0)
    model = nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)
    )
    options = {"clip_norm": 0.5, **options}
    built = optimizer(model.parameters(), lr=1e-2)
    trainer = Trainer(Update(model, built, loss_fn, capture=mode, **options), accumulation_steps=steps)
    LRSchedule(warmup_cosine(built, warmup=4, total=40)).attach(trainer)
    return trainer


def outputs_of(trainer: Trainer, epochs: int = 2) -> list[dict[str, float]]:
    outputs: list[dict[str, float]] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: outputs.append({name: float(value) for name, value in trainer.state.output.items()}),
    )
    trainer.run(data(), max_epochs=epochs)
    return outputs


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    model, optimizer = trainer.update.model, trainer.update.optimizers["optimizer"]  # type: ignore[attr-defined]
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {
            f"{name}/{key}": value.clone()
            for key, value in optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }
    return found


def momentum(parameters: Any, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.01)


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({}, 12),
        ({"steps": 3, "optimizer": momentum, "clip_norm": None, "log_grad_norm": True}, 4),
        ({"optimizer": torch.optim.RMSprop, "non_finite": "skip"}, 12),
    ],
    ids=["adamw", "sgd, accumulated", "a step that is not captured"],
)
@pytest.mark.slow  # compiles
def test_its_losses_and_weights_are_those_of_the_plain_update(options: dict[str, Any], updates: int) -> None:
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


@pytest.mark.slow  # compiles
def test_resumed_at_a_short_batch_it_ends_with_the_bits_of_the_whole_run(tmp_path: Path) -> None:
    """With dropout, which draws from torch's generator, and a schedule, of which no LR is compiled."""
    whole = trainer_of(True, dropout=0.1)
    whole.run(data(), max_epochs=2)
    graphs = len(whole.update._capture._step._graphs)  # type: ignore[attr-defined]

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
    assert graphs == 1


@pytest.mark.slow  # compiles
def test_events_of_micro_batches_come_and_see_the_gradients_so_far() -> None:
    trainer, seen = trainer_of(True, steps=2), []
    for event in (
        TrainingEvents.FORWARD_STARTED,
        TrainingEvents.FORWARD_COMPLETED,
        TrainingEvents.BACKWARD_COMPLETED,
        TrainingEvents.OPTIMIZER_STEP_STARTED,
    ):
        trainer.add_event_handler(event, lambda _, name=event.name: seen.append(name))
    norms: list[float] = []
    weight = trainer.update.model[0].weight  # type: ignore[attr-defined]
    trainer.add_event_handler(TrainingEvents.BACKWARD_COMPLETED, lambda: norms.append(float(weight.grad.norm())))
    trainer.run(data(), max_iters=1)

    micro_batch = ["FORWARD_STARTED", "FORWARD_COMPLETED", "BACKWARD_COMPLETED"]
    assert seen == [*micro_batch, *micro_batch, "OPTIMIZER_STEP_STARTED"]
    assert len(norms) == 2 and norms[0] != norms[1]


def reads_a_value(model: nn.Module, batch: Any) -> Tensor:
    loss = loss_fn(model, batch)[0]
    return loss if loss.item() > -1.0 else -loss


@pytest.mark.slow
def test_what_cannot_be_captured_is_one_line_and_auto_trains_the_plain_way(caplog: pytest.LogCaptureFixture) -> None:
    def run(mode: bool | str) -> list[dict[str, float]]:
        trainer = trainer_of(mode)
        trainer.update.loss_fn = reads_a_value  # type: ignore[attr-defined]
        return outputs_of(trainer)

    with pytest.raises(NotCaptured) as refused:
        run(True)
    assert str(refused.value).count("\n") == 0 and "test_capture.py" in str(refused.value)
    assert str(refused.value).startswith("Update(capture=True), but the update cannot be captured: ")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "MEASURED", 2)
        patch.setattr(trial, "WARM_UP", 1)
        assert run("auto") == run(False)
    assert "The update is not captured: " in caplog.text


def test_a_loss_that_cannot_be_called_for_an_example_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def trainer_that_raises_once(mode: bool | str, before: int) -> Trainer:
        calls = iter([False] * before + [True])

        def raises_once(model: nn.Module, batch: Any) -> Tensor:
            if next(calls, False):
                raise LookupError("not yet")
            return loss_fn(model, batch)[0]

        trainer = trainer_of(mode)
        trainer.update.loss_fn = raises_once  # type: ignore[attr-defined]
        return trainer

    with pytest.raises(NotCaptured, match="cannot be captured: LookupError: not yet"):
        outputs_of(trainer_that_raises_once(True, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "MEASURED", 2)
        patch.setattr(trial, "WARM_UP", 1)
        assert len(outputs_of(trainer_that_raises_once("auto", 3))) == 2 * EPOCH
    assert "The update is not captured: LookupError: not yet." in caplog.messages


@pytest.mark.timeout(300, method="thread")  # the other method holds the alarm
def test_compiling_that_takes_too_long_is_broken_off_and_auto_trains_the_plain_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capture, "LONGEST_S", 0.001)  # torch may have the graph in its cache
    monkeypatch.setattr(trial, "MEASURED", 2)
    monkeypatch.setattr(trial, "WARM_UP", 1)
    before = signal.getsignal(signal.SIGALRM)

    found = outputs_of(trainer_of("auto"))

    assert "The update is not captured: compiling takes longer than 0.001 s." in caplog.messages
    assert found == outputs_of(trainer_of(False))
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) and signal.getsignal(signal.SIGALRM) == before
    assert torch.compile(lambda value: value + 1, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("takes", "kept"), [(0.5, True), (0.99, False)])
@pytest.mark.slow  # compiles
def test_auto_keeps_what_is_five_percent_faster(
    takes: float, kept: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock is this test's: a captured iteration takes ``takes`` of a plain one."""
    trainer = trainer_of("auto")
    captured = trainer.update._capture  # type: ignore[attr-defined]
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += takes if captured._trial.is_captured else 1.0
        return now

    monkeypatch.setattr(trial, "MEASURED", 3)
    monkeypatch.setattr(trial, "WARM_UP", 1)
    monkeypatch.setattr(trial.time, "perf_counter", clock)
    caplog.set_level(logging.INFO)
    undecided = trainer.reproducibility()
    trainer.run(data(), max_epochs=3)

    assert (
        captured.decision is kept
        and undecided
        == ["capture measures whether it is faster, and anew if resumed before it knows: True or False is exact"]
        and trainer.reproducibility() == []
    )
    assert f"An iteration takes {takes:.2f} of its time" in caplog.text
    assert captured.state_dict()["decision"] is kept
    assert bool(captured._trained) is kept, "graphs of a way that is not taken hold memory"


@pytest.mark.slow  # compiles
def test_never_more_than_four_graphs_are_compiled_and_the_rest_is_trained_as_it_is() -> None:
    """Five shapes of batches, frozen parameters and another setting of the optimizer; one graph is the step's."""

    def run(mode: bool) -> tuple[list[dict[str, float]], Trainer]:
        trainer, outputs = trainer_of(mode), list[dict[str, float]]()
        model, (optimizer,) = trainer.update.model, trainer.update.optimizers.values()  # type: ignore[attr-defined]
        inputs = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
        batches = [(inputs[:size], inputs[:size, :1].sin()) for size in (4, 6, 8, 10, 12) * 3]
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), lambda: model[4].bias.requires_grad_(False))
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED(once=11), lambda: optimizer.param_groups[0].update(weight_decay=0.2)
        )
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: outputs.append({k: float(v) for k, v in trainer.state.output.items()})
        )
        trainer.run(batches, max_epochs=1)
        return outputs, trainer

    compilations = list[str]()
    callback = callback_handler.register_start_callback(lambda arguments: compilations.append(arguments.compile_id))
    try:
        found, trainer = run(True)
    finally:
        callback_handler.remove_start_callback(callback)

    names = trainer.update._capture.state_dict()["graphs"]  # type: ignore[attr-defined]
    assert len(compilations) == len(names) == 4
    assert [name.startswith("step ") for name in names] == [False, False, True, False]
    for output, expected in zip(found, run(False)[0], strict=True):
        assert output == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_run_that_was_captured_is_not_resumed_without_a_word(tmp_path: Path) -> None:
    saved = trainer_of("auto")
    Checkpoint(tmp_path).attach(saved)
    saved.run(data(), max_epochs=1)

    trainer, checkpoint = trainer_of(False), Checkpoint(tmp_path)
    checkpoint.attach(trainer)
    checkpoint.resume()
    with pytest.raises(StateMismatch, match="capture"):
        trainer.run(data(), max_epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_a_run_that_was_not_captured_is_not_resumed_captured_without_a_word(tmp_path: Path, strict: bool) -> None:
    saved = trainer_of(False)
    Checkpoint(tmp_path).attach(saved)
    saved.run(data(), max_epochs=1)

    trainer, checkpoint = trainer_of(True), Checkpoint(tmp_path, strict=strict)
    checkpoint.attach(trainer)
    checkpoint.resume()
    assert any("was saved without capture" in reason for reason in trainer.reproducibility())
    with pytest.raises(NotExact, match="was saved without capture") if strict else nullcontext():
        trainer.run(data(), max_epochs=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": torch.no_grad}, "precision is a function"),
        ({"rank_invariant": True}, "rank_invariant is on"),
        ({"loss_parallel": True}, "loss_parallel is on"),
    ],
)
def test_what_is_known_to_be_impossible_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    model = linear()
    update = partial(Update, model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, **options)

    with pytest.raises(NotCaptured, match=message):
        update(capture=True)
    captured = update(capture="auto")._capture
    assert captured is not None and captured.decision is False


class Odd(nn.Module):
    """Parameters whose gradient is the loss's own, one for both and for all elements of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.one, self.other = nn.Linear(8, 1), nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.several = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs)
        return output


def with_terms(model: Any, batch: Any) -> Tensor:
    return loss_fn(model, batch)[0] + model.one + model.other + model.several.sum()


class Centered(nn.Module):
    """A loss with a mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1))

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        output = model(batch[0])
        loss = nn.functional.mse_loss(output - self.center, batch[1])
        with torch.no_grad():
            self.center.mul_(0.5).add_(output.mean(0), alpha=0.5)  # type: ignore[operator]
        return loss


class Reassigned(nn.Module):
    """Puts another tensor in the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 1), nn.Dropout(0.1)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
        output: Tensor = self.layer(self.dropout(inputs - self.mean))
        return output


def writes_to_the_batch(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    batch[0].mul_(0.5)
    return loss_fn(model, batch)[0]


def trainer_with(mode: bool | str, kind: Any, loss: Any, *, steps: int | None = None, **options: Any) -> Trainer:
    """Of a model of its own, by RMSprop, whose step is not captured."""
    seed_everything(0)
    model = kind()
    update = Update(model, torch.optim.RMSprop(model.parameters(), lr=1e-2), loss, capture=mode, **options)
    return Trainer(update, accumulation_steps=steps)


def assert_trains_alike(plain: Trainer, captured: Trainer) -> None:
    expected, found = outputs_of(plain), outputs_of(captured)
    torch.testing.assert_close(
        *([torch.tensor(list(output.values())) for output in outputs] for outputs in (found, expected)),
        rtol=1e-4,
        atol=1e-5,
    )
    for name, value in state_of(plain).items():
        torch.testing.assert_close(state_of(captured)[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"steps": 3}, {"clip_norm": 0.1}], ids=["accumulated", "clipped"])
@pytest.mark.slow  # compiles
def test_gradients_of_which_one_is_another_in_memory_are_written_to_one_by_one(options: dict[str, Any]) -> None:
    assert_trains_alike(trainer_with(False, Odd, with_terms, **options), trainer_with(True, Odd, with_terms, **options))


@pytest.mark.slow  # compiles
def test_to_compile_leaves_no_trace_in_the_batch() -> None:
    def trainer(mode: bool) -> Trainer:
        return trainer_with(mode, linear_of_8, writes_to_the_batch)

    assert_trains_alike(trainer(False), trainer(True))


def linear_of_8() -> nn.Module:
    return nn.Linear(8, 1)


@pytest.mark.slow  # compiles
def test_to_compile_leaves_no_trace_in_buffers_of_the_loss(tmp_path: Path) -> None:
    """Also in a resumed run, whose buffers are no zeros any more, and which compiles anew."""

    def trainer() -> tuple[Trainer, Centered]:
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


@pytest.mark.slow  # compiles
def test_a_model_that_replaces_its_buffers_is_refused() -> None:
    with pytest.raises(NotCaptured, match="or a buffer differs"):
        outputs_of(trainer_with(True, Reassigned, lambda model, batch: loss_fn(model, batch)[0]))


def other_loss_where_compiled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss_fn(model, batch)[0] + 0.01 * torch.compiler.is_compiling()


@pytest.mark.slow  # compiles
def test_a_loss_that_is_another_one_when_compiled_is_refused() -> None:
    with pytest.raises(NotCaptured, match="the loss, a gradient or a buffer differs"):
        outputs_of(trainer_with(True, linear_of_8, other_loss_where_compiled))


class Keeping(nn.Linear):
    """Keeps a value of its last forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        output = super().forward(inputs)
        self.last = output.detach().mean()
        return output


def test_the_cause_in_torch_is_named_where_a_graph_cannot_be_compiled() -> None:
    with pytest.raises(NotCaptured, match=r"cannot be captured: NotImplementedError: .*TensorWrapper"):
        outputs_of(trainer_with(True, partial(Keeping, 8, 1), lambda model, batch: loss_fn(model, batch)[0]))


def test_a_batch_in_an_object_that_torch_does_not_look_into_is_refused() -> None:
    """Each would be another kind of batch, with a graph of its own."""
    trainer = trainer_with(True, linear_of_8, lambda model, batch: loss_fn(model, (batch["x"], batch["y"]))[0])
    batch = UserDict(x=torch.ones(4, 8), y=torch.ones(4, 1))

    with pytest.raises(NotCaptured, match="a batch has a UserDict, in which torch finds no tensors"):
        trainer.run([batch, batch], max_epochs=1)


@pytest.mark.slow  # compiles
def test_hooks_that_come_and_go_within_a_run_count() -> None:
    def run(mode: bool) -> list[dict[str, float]]:
        trainer = trainer_with(mode, linear_of_8, loss_fn)
        model, handles = trainer.update.model, []  # type: ignore[attr-defined]
        halve = partial(model.register_forward_hook, lambda module, inputs, output: output * 0.5)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: handles.append(halve()))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: handles.pop().remove())
        return outputs_of(trainer, epochs=1)

    for output, expected in zip(run(True), run(False), strict=True):
        assert output == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.slow  # compiles
def test_a_hook_of_a_gradient_that_comes_within_a_run_is_refused() -> None:
    trainer = trainer_with(True, linear_of_8, loss_fn)
    weight = trainer.update.model.weight  # type: ignore[attr-defined]
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: weight.register_hook(lambda value: value))

    with pytest.raises(NotCaptured, match="a parameter has hooks of its gradient"):
        outputs_of(trainer)


@pytest.mark.slow  # compiles
def test_graphs_of_two_losses_of_one_name_are_in_the_report() -> None:
    """A resumed run would have the graph of whichever comes first in it."""
    trainer = trainer_with(True, linear_of_8, partial(mse, factor=1.0))

    def replace() -> None:
        trainer.update.loss_fn = partial(mse, factor=0.5)  # type: ignore[attr-defined]

    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), replace)
    outputs_of(trainer, epochs=1)

    assert any("two things that go by one name (partial)" in reason for reason in trainer.reproducibility())


def mse(model: nn.Module, batch: Any, factor: float) -> Tensor:
    return loss_fn(model, batch)[0] * factor


def test_what_is_refused_stays_so_whatever_the_checkpoint_has(caplog: pytest.LogCaptureFixture) -> None:
    model = linear()
    update = Update(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, capture="auto", precision=torch.no_grad
    )
    captured = update._capture
    assert captured is not None

    captured.load_state_dict({**captured.state_dict(), "decision": True})

    assert captured.decision is False and captured.outside_of_run is not None
    assert "was there when the run was saved, which goes on the plain way" in caplog.text


def test_another_value_of_capture_is_refused() -> None:
    model = linear()
    with pytest.raises(ValueError, match="capture must be True, False or 'auto', got 'on'"):
        Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, capture="on")


def test_compiled_code_is_kept_in_the_runs_folder_unless_the_user_has_named_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is put back after the test
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    cache_dir()  # as the first optimizer does: torch sets the variable to its default
    keep_compiled_code_in(tmp_path / "graphs")
    assert cache_dir() == str(tmp_path / "graphs")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "of the user"))
    keep_compiled_code_in(tmp_path / "graphs")
    assert cache_dir() == str(tmp_path / "of the user")


def test_the_compiler_is_asked_for_its_version_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def command_of_the_compiler() -> str:
        asked.append("version")
        return "g++"

    compiling.compiler.cache_clear()
    monkeypatch.setattr(compiling, "get_cpp_compiler", command_of_the_compiler)
    assert compiling.compiler() == compiling.compiler() is not None
    assert asked == ["version"]
