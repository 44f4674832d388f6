"""Saved beside the training: the same bytes as if training had waited, whatever happens meanwhile."""

import re
import shutil
import threading
import time
from collections import defaultdict

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn

from ignite_engine import Trainer, TrainingEvents, Update
from ignite_engine.checkpointing import CheckpointError, CheckpointStore, Snapshot
from ignite_engine.handlers import Checkpoint, GracefulStop
from tests.kit.tiny import numbers_loader, trainer_of, weights

EVERY = Events.ITERATION_COMPLETED(every=1)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def loss_fn(model, batch):
    loss = model(batch[0][:, :1]).pow(2).mean()
    return loss


def training(directory, *, iterations, background, **options):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trainer = Trainer(Update(model, optimizer, loss_fn))
    checkpoint = Checkpoint(directory, keep_last=100, background=background, **options)
    checkpoint.attach(trainer, EVERY)
    torch.manual_seed(1)
    checkpoint.resume()
    trainer.run(numbers_loader(), max_iters=iterations)
    return trainer, checkpoint


def contents(directory):
    store = CheckpointStore(directory)
    loaded = {each.iteration: store.load(each.path) for each in store.checkpoints()}
    return {iteration: (each.shared, each.local) for iteration, each in loaded.items()}


def assert_same(one, other, path=""):
    assert type(one) is type(other), path
    if isinstance(one, Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{path}/{index}")
    else:
        assert one == other or one != one, path


@pytest.fixture
def slow_write(monkeypatch):
    wait = Snapshot.wait

    def slowly(self):
        time.sleep(0.02)
        wait(self)

    monkeypatch.setattr(Snapshot, "wait", slowly)


@pytest.mark.row("D16")
@pytest.mark.usefixtures("slow_write")
def test_every_checkpoint_is_that_of_a_run_that_waited(tmp_path):
    training(tmp_path / "waited", iterations=8, background=False)
    training(tmp_path / "beside", iterations=8, background=True)

    waited, beside = contents(tmp_path / "waited"), contents(tmp_path / "beside")
    assert list(beside) == list(waited) == list(range(1, 9))
    assert_same(beside, waited)


def test_resumed_run_ends_with_the_same_bits(tmp_path):
    whole, _ = training(tmp_path / "whole", iterations=9, background=True)
    training(tmp_path / "parts", iterations=4, background=True)
    resumed, _ = training(tmp_path / "parts", iterations=9, background=True)

    assert_same(resumed.update.model.state_dict(), whole.update.model.state_dict())
    assert resumed.state.checkpoints == whole.state.checkpoints == 9


def test_training_goes_on_while_it_is_written(tmp_path, monkeypatch):
    go_on = threading.Event()
    save = CheckpointStore.save

    def held(self, *args, **options):
        if options["iteration"] == 2:
            assert go_on.wait(30)
        return save(self, *args, **options)

    monkeypatch.setattr(CheckpointStore, "save", held)
    trainer, saved = trainer_of(), list[tuple[int, int | None]]()
    Checkpoint(tmp_path, background=True).attach(trainer, Events.ITERATION_COMPLETED(once=2))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), go_on.set)
    trainer.add_event_handler(
        TrainingEvents.CHECKPOINT_SAVED, lambda: saved.append((trainer.state.iteration, trainer.state.saved_iteration))
    )
    trainer.run(numbers_loader(), max_iters=60)

    assert [iteration for _, iteration in saved] == [2, 60]
    assert saved[0][0] >= 5 and trainer.state.save_seconds > 0


def test_a_save_is_announced_at_the_first_step_boundary_after_it(tmp_path, monkeypatch):
    trainer, written, announced = trainer_of(), threading.Event(), dict[int | None, int]()
    report = trainer.report_background_done

    def told():
        report()
        written.set()

    monkeypatch.setattr(trainer, "report_background_done", told)
    Checkpoint(tmp_path, background=True).attach(trainer, Events.ITERATION_COMPLETED(once=2))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda: written.wait(30))
    trainer.add_event_handler(
        TrainingEvents.CHECKPOINT_SAVED,
        lambda: announced.__setitem__(trainer.state.saved_iteration, trainer.state.iteration),
    )
    trainer.run(numbers_loader(), max_iters=9)

    assert announced.keys() == {2, 9} and 3 <= announced[2] <= 5


def test_next_save_waits(tmp_path, monkeypatch):
    save = CheckpointStore.save

    def slowly(self, *args, **options):
        time.sleep(0.2)
        return save(self, *args, **options)

    monkeypatch.setattr(CheckpointStore, "save", slowly)
    trainer, _ = training(tmp_path, iterations=4, background=True)

    assert list(contents(tmp_path)) == [1, 2, 3, 4] and trainer.state.checkpoints == 4


def test_error_comes_over_the_bus_and_training_goes_on(tmp_path, monkeypatch):
    save = CheckpointStore.save

    def full(self, *args, **options):
        if options["iteration"] == 2:
            raise CheckpointError("No space left on device.")
        return save(self, *args, **options)

    monkeypatch.setattr(CheckpointStore, "save", full)
    trainer, failed = trainer_of(), list[str]()
    checkpoint = Checkpoint(tmp_path, background=True)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(once=2))
    trainer.add_event_handler(TrainingEvents.CHECKPOINT_FAILED, lambda: failed.append(str(checkpoint.error)))
    trainer.run(numbers_loader(), max_iters=6)

    assert failed == ["No space left on device."]
    assert trainer.state.checkpoints == 1 and list(contents(tmp_path)) == [6]


def halve_in_place(parameter):
    with torch.no_grad():
        parameter.mul_(0.5)


def halve_the_data(parameter):
    parameter.data.mul_(0.5)


def halve_with_numpy(parameter):
    parameter.detach().numpy()[...] *= 0.5


@pytest.mark.row("D16")
@pytest.mark.parametrize("halve", [halve_in_place, halve_the_data, halve_with_numpy])
@pytest.mark.usefixtures("slow_write")
def test_weights_may_change_before_the_next_step(tmp_path, halve):
    """Each checkpoint has the weights of its step boundary, whoever changes them afterwards, and none fails."""
    trainer, failed, expected = trainer_of(), list[int](), dict[int, Tensor]()
    Checkpoint(tmp_path, keep_last=9, background=True).attach(trainer, EVERY)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: expected.__setitem__(trainer.state.iteration, weights(trainer))
    )

    @trainer.on(Events.ITERATION_STARTED)
    def halve_all():
        for parameter in trainer.update.model.parameters():
            halve(parameter)

    trainer.add_event_handler(TrainingEvents.CHECKPOINT_FAILED, lambda: failed.append(trainer.state.iteration))
    trainer.run(numbers_loader(), max_iters=6)

    assert failed == []
    saved = {
        number: torch.cat([value.flatten() for value in shared["model"].values()])
        for number, (shared, _) in contents(tmp_path).items()
    }
    assert_same(saved, expected)


@pytest.mark.usefixtures("slow_write")
def test_momentum_of_sparse_gradients_is_saved_and_resumed(tmp_path):
    """The momentum is a sparse tensor, which has no memory of its own to compare."""

    def run(folder, iterations):
        torch.manual_seed(1)
        model = nn.Embedding(6, 3, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = Trainer(Update(model, optimizer, lambda model, batch: model(batch).square().mean()))
        checkpoint = Checkpoint(folder, background=True)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED)
        checkpoint.resume()
        trainer.run([torch.tensor([index, index + 1]) for index in range(5)], max_iters=iterations)
        return trainer, checkpoint

    whole, checkpoint = run(tmp_path / "whole", 5)
    assert whole.state.checkpoints == 5 and checkpoint.error is None
    run(tmp_path / "parts", 3)
    resumed, _ = run(tmp_path / "parts", 5)
    assert torch.equal(weights(resumed), weights(whole))


def test_embedding_that_renormalises_its_weights_in_forward_is_saved(tmp_path):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(4, 3, max_norm=0.5)

        def forward(self, inputs):
            return self.embedding(inputs.long().abs()[:, 0] % 4).sum(1, keepdim=True)

    failed = []
    model = Words()
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.5), loss_fn))
    Checkpoint(tmp_path, keep_last=9, background=True).attach(trainer, EVERY)
    trainer.add_event_handler(TrainingEvents.CHECKPOINT_FAILED, lambda: failed.append(trainer.state.iteration))
    trainer.run(numbers_loader(), max_iters=5)

    assert failed == [] and list(contents(tmp_path)) == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("slow_write")
def test_optimizer_state_changed_outside_of_its_step_is_saved_as_it_was_at_the_boundary(tmp_path):
    trainer, expected = trainer_of(), dict[int, Tensor]()
    Checkpoint(tmp_path, keep_last=9, background=True).attach(trainer, EVERY)
    state = trainer.update.optimizers["optimizer"].state

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        expected[trainer.state.iteration] = torch.cat([each["momentum_buffer"].flatten() for each in state.values()])

    @trainer.on(Events.ITERATION_STARTED)
    def damp():
        for values in state.values():
            values["momentum_buffer"].mul_(0.5)

    trainer.run(numbers_loader(), max_iters=6)
    saved = {
        number: torch.cat([each["momentum_buffer"].flatten() for each in shared["optimizer"]["state"].values()])
        for number, (shared, _) in contents(tmp_path).items()
    }
    assert_same(saved, expected)


FUSED = [
    ("SGD", {"momentum": 0.9}),
    ("AdamW", {"weight_decay": 0.1}),
    ("Adagrad", {}),
]


class Strided(nn.Module):
    """A weight that is transposed in memory, and one in channels_last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.weight = nn.Parameter(torch.randn(33, 7).t())

    def forward(self, inputs):
        image = inputs.new_ones(1, 3, 3, 3) * inputs.mean()
        return inputs[:, :1] * self.weight.square().mean() + self.convolution(image).sum()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), FUSED, ids=[name for name, _ in FUSED])
@pytest.mark.parametrize("background", [False, True])
def test_weights_of_any_memory_layout_resume_with_a_fused_optimizer(tmp_path, name, options, background):
    def run(folder, iterations):
        model = Strided()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, fused=True, **options)
        trainer = Trainer(Update(model, optimizer, loss_fn))
        checkpoint = Checkpoint(tmp_path / folder, background=background)
        checkpoint.attach(trainer, EVERY)
        if checkpoint.resume() is not None:
            own = [value for values in optimizer.state.values() for value in values.values() if value.dim() > 1]
            assert [value.stride() for value in own] == strides
        trainer.run(numbers_loader(), max_iters=iterations)
        strides[:] = [v.stride() for values in optimizer.state.values() for v in values.values() if v.dim() > 1]
        return model

    strides = []
    whole = run("whole", 9)
    run("parts", 4)
    shutil.rmtree(tmp_path / "parts" / "iteration_00000004")  # saved while training waited, as the last one always is
    assert_same(run("parts", 9).state_dict(), whole.state_dict())


@pytest.mark.usefixtures("slow_write")
def test_parameter_that_the_forward_pass_changes_is_saved_as_it_was_at_the_edge(tmp_path):
    """It is not trained, so it does not rest until the next step."""

    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(1, 1)
            self.passes = nn.Parameter(torch.zeros(()), requires_grad=False)

        def forward(self, inputs):
            self.passes.add_(1)
            return super().forward(inputs)

    model, failed = Counting(), list[int]()
    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters()), loss_fn))
    Checkpoint(tmp_path, keep_last=9, background=True).attach(trainer, EVERY)
    trainer.add_event_handler(TrainingEvents.CHECKPOINT_FAILED, lambda: failed.append(trainer.state.iteration))
    trainer.run(numbers_loader(), max_iters=5)

    saved = {iteration: shared["model"]["passes"].item() for iteration, (shared, _) in contents(tmp_path).items()}
    assert (saved, failed) == ({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}, [])


@pytest.mark.usefixtures("slow_write")
def test_an_update_of_ones_own_waits_for_the_copy(tmp_path):
    model = nn.Linear(1, 1)

    def update(engine, batch):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(engine.state.iteration)
        return 0.0

    trainer = Trainer(update)
    trainer.register("model", model, shared=True)
    Checkpoint(tmp_path, keep_last=9, background=True).attach(trainer, EVERY)
    trainer.run(numbers_loader(), max_iters=5)

    saved = {iteration: shared["model"]["bias"].item() for iteration, (shared, _) in contents(tmp_path).items()}
    assert saved == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}


def test_an_exception_leaves_what_was_being_written_whole(tmp_path):
    trainer = trainer_of()
    Checkpoint(tmp_path, background=True).attach(trainer, Events.ITERATION_COMPLETED(once=3))
    trainer.add_event_handler(Events.ITERATION_STARTED(once=4), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(), max_iters=6)

    assert list(contents(tmp_path)) == [3]
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


@pytest.mark.row("D2")
def test_exception_saves_what_was_done_before_it(tmp_path):
    whole = trainer_of()
    whole.run(numbers_loader(), max_iters=6)

    def failing(model, batch):
        if trainer.state.iteration == 4 and not mended:
            raise RuntimeError("broken sample")
        loss = trainer_of_loss(model, batch)
        return loss

    mended = []
    for _ in range(2):
        trainer = trainer_of()
        trainer_of_loss, trainer.update.loss_fn = trainer.update.loss_fn, failing
        checkpoint = Checkpoint(tmp_path, on_exception=True)
        checkpoint.attach(trainer)
        checkpoint.resume()
        if mended:
            trainer.run(numbers_loader(), max_iters=6)
        else:
            with pytest.raises(RuntimeError, match="broken sample"):
                trainer.run(numbers_loader(), max_iters=6)
            (found,) = CheckpointStore(tmp_path).checkpoints()
            assert found.iteration == 3 and any("exception" in reason for reason in found.manifest.reproducibility)
            mended.append(True)

    assert torch.equal(weights(trainer), weights(whole))


def test_exception_between_two_optimizers_saves_nothing(tmp_path):
    trainer = trainer_of()
    optimizer = trainer.update.optimizers["optimizer"]
    optimizer.register_step_post_hook(lambda *_: 1 / 0 if trainer.state.iteration == 3 else None)
    Checkpoint(tmp_path, on_exception=True).attach(trainer)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(), max_iters=6)

    assert list(contents(tmp_path)) == []


def test_stop_waits_for_both_saves(tmp_path):
    trainer = trainer_of()
    Checkpoint(tmp_path, background=True).attach(trainer, Events.ITERATION_COMPLETED(once=3))
    GracefulStop(exit=False).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: trainer.request_stop("enough"))
    trainer.run(numbers_loader(), max_iters=60)

    assert list(contents(tmp_path)) == [3, 4] and trainer.state.status == "interrupted"


def cyclic():
    state = {}
    state["again"] = [state]
    return state


def deep():
    state = 0
    for _ in range(10_000):
        state = [state]
    return state


UNSAVABLE = {
    "foreign": (lambda: {"points": defaultdict(list)}, r"foreign\['points'\] is a collections.defaultdict"),
    "numpy": (lambda: {"best": np.float64(1.0)}, r"foreign\['best'\] is a numpy.float64"),
    "meta": (lambda: {"x": torch.empty(2, device="meta")}, r"foreign\['x'\] is a tensor on the meta device"),
    "cyclic": (cyclic, "part 'foreign' cannot be saved: .* contains itself"),
    "deep": (deep, "part 'foreign' cannot be saved: .* nested more than 100 deep"),
    "its own error": (lambda: 1 // 0, "ZeroDivisionError"),
}


class Foreign:
    """Has a state that no checkpoint can hold from an iteration on."""

    def __init__(self, trainer, since, state):
        self.trainer, self.since, self.state = trainer, since, state

    def state_dict(self):
        return self.state() if self.trainer.state.iteration >= self.since else {}

    def load_state_dict(self, state): ...


@pytest.mark.parametrize("case", UNSAVABLE)
@pytest.mark.parametrize("background", [False, True])
def test_state_that_no_checkpoint_can_hold_does_not_stop_training(tmp_path, background, case):
    state, line = UNSAVABLE[case]
    trainer, failed = trainer_of(), list[str]()
    trainer.register("foreign", Foreign(trainer, 2, state))
    checkpoint = Checkpoint(tmp_path, background=background)
    checkpoint.attach(trainer, EVERY)
    trainer.add_event_handler(TrainingEvents.CHECKPOINT_FAILED, lambda: failed.append(str(checkpoint.error)))
    with pytest.raises(CheckpointError, match=line) as error:
        trainer.run(numbers_loader(8), max_epochs=1)

    assert "\n" not in str(error.value)
    assert trainer.state.iteration == 4 and len(failed) == 3 and list(contents(tmp_path)) == [1]


@pytest.mark.parametrize("case", UNSAVABLE)
def test_state_that_no_checkpoint_can_hold_is_refused_before_training(tmp_path, case):
    state, line = UNSAVABLE[case]
    trainer = trainer_of()
    trainer.register("foreign", Foreign(trainer, 0, state))
    Checkpoint(tmp_path).attach(trainer, EVERY)
    with pytest.raises(ZeroDivisionError if case == "its own error" else CheckpointError) as error:
        trainer.run(numbers_loader(8), max_epochs=1)
    assert re.search(line, f"{type(error.value).__name__}: {error.value}") and trainer.state.iteration == 0


def test_what_is_excluded_may_be_anything(tmp_path):
    trainer = trainer_of()
    trainer.register("foreign", Foreign(trainer, 0, lambda: {"points": defaultdict(list)}))
    Checkpoint(tmp_path, exclude=["foreign"]).attach(trainer, EVERY)
    trainer.run(numbers_loader(8), max_epochs=1)
    assert list(contents(tmp_path)) == [3, 4]
