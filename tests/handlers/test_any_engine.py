"""Handlers attached to engines of Ignite's own, and of a subclass that somebody else has written."""

import os
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import ProgressBar
from ignite.handlers.param_scheduler import LRScheduler
from ignite.metrics import MeanSquaredError
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from ignite_engine import Interrupted, create_evaluator, loader
from ignite_engine.checkpoint.sources import find_source, read_source
from ignite_engine.handlers import (
    EMA,
    Checkpoint,
    DigestTrail,
    EarlyStopping,
    Evaluation,
    GracefulStop,
    LRSchedule,
    MemoryLogger,
    MetricLogger,
    Progress,
    StepTimes,
    Throughput,
    WallClockLimit,
    warmup_cosine,
)
from ignite_engine.handlers.limits import StopFile
from tests.kit.processes import ranks
from tests.kit.refusals import refusals
from tests.kit.tiny import one

FIXED = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(46, 6, generator=FIXED), torch.randn(46, 1, generator=FIXED))
DATA_8 = loader(TensorDataset(*DATA[:8]), batch_size=4)


class Workflow(Engine):
    """As MONAI's: it holds what it trains, and its ``run`` takes no data."""

    def __init__(self, network, optimizer, data, epochs):
        super().__init__(self.iteration)
        self.network, self.optimizer, self.data, self.epochs = network, optimizer, data, epochs

    def iteration(self, engine, batch):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.network(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run(self):
        return super().run(self.data, max_epochs=self.epochs)


LOADERS = {
    "loader()": lambda: loader(DATA, batch_size=4, shuffle=True, seed=0),
    "DataLoader": lambda: DataLoader(DATA, 4, shuffle=True),
    "weighted": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0, 3.0] * 23, 20)),
    "workers": lambda: DataLoader(DATA, 4, shuffle=True, num_workers=1),
}


class Setup:
    """A model, its optimizer, and an engine that trains it."""

    def __init__(self, kind="supervised", data="loader()", accumulation_steps=1):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.data, trained = LOADERS[data](), self.model
        if dist.is_initialized():
            trained = DistributedDataParallel(self.model)
        if kind == "a subclass":
            self.engine = Workflow(trained, self.optimizer, self.data, 3)
            self.run = self.engine.run
        else:
            self.engine = create_supervised_trainer(
                trained, self.optimizer, nn.functional.mse_loss, gradient_accumulation_steps=accumulation_steps
            )
            self.run = lambda: self.engine.run(self.data, max_epochs=3)

    def checkpoint(self, folder, event=Events.EPOCH_COMPLETED):
        checkpoint = Checkpoint(folder, to_save={"model": self.model, "optimizer": self.optimizer})
        checkpoint.attach(self.engine, event)
        return checkpoint


def evaluation(setup):
    measured = {"mse": MeanSquaredError()}
    return Evaluation(create_evaluator(setup.model, lambda model, batch: (model(batch[0]), batch[1]), measured), DATA_8)


HANDLERS = {
    "LRSchedule": lambda setup, folder: LRSchedule(warmup_cosine(setup.optimizer, warmup=0, total=10**9)),
    "EMA": lambda setup, folder: EMA(0.9),
    "MemoryLogger": lambda setup, folder: MemoryLogger(),
    "MetricLogger": lambda setup, folder: MetricLogger(folder, console=False),
    "Progress": lambda setup, folder: Progress(),
    "Evaluation": lambda setup, folder: evaluation(setup),
    "EarlyStopping": lambda setup, folder: EarlyStopping("loss", mode="min", patience=100),
    "GracefulStop": lambda setup, folder: GracefulStop(),
    "WallClockLimit": lambda setup, folder: WallClockLimit(hours=1),
    "StopFile": lambda setup, folder: StopFile(folder / "stop"),
    "Throughput": lambda setup, folder: Throughput(),
    "StepTimes": lambda setup, folder: StepTimes(),
    "DigestTrail": lambda setup, folder: DigestTrail(folder, every=5),
    "Checkpoint": lambda setup, folder: Checkpoint(folder / "checkpoints"),
}


def trained_with(names, folder, kind="supervised"):
    """The weights after a run with these handlers, and its metrics."""
    setup, seen = Setup(kind), []
    engine = setup.engine
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=5), lambda: seen.append(engine.state.iteration))
    for name in names:
        HANDLERS[name](setup, folder).attach(setup.engine)
    setup.run()
    assert seen == [*range(5, engine.state.iteration + 1, 5)] and len(seen) >= 3
    return one(setup.model), dict(setup.engine.state.metrics)


@pytest.mark.parametrize("kind", ["supervised", "a subclass"])
@pytest.mark.parametrize("names", [[name] for name in HANDLERS] + [[*HANDLERS]], ids=lambda names: "+".join(names)[:20])
def test_each_handler_serves_an_engine_and_changes_no_bit(names, kind, tmp_path):
    expected = trained_with([], tmp_path, kind)[0]
    weights, metrics = trained_with(names, tmp_path, kind)
    assert torch.equal(weights, expected)
    assert "MetricLogger" not in names or metrics["loss"] > 0
    assert "Checkpoint" not in names or len([*tmp_path.glob("checkpoints/iteration_*")]) == 2


def on_a_rank(rank, names, folder):
    torch.manual_seed(rank)
    return [trained_with(each, folder / str(number))[0] for number, each in enumerate(([], names))]


def test_all_of_them_serve_an_engine_on_two_ranks(tmp_path):
    (expected, weights), (_, of_peer) = ranks(2, on_a_rank, [*HANDLERS], tmp_path)
    assert torch.equal(weights, expected) and torch.equal(weights, of_peer)


def ask_for_a_stop(trainer):
    trainer.request_stop("test")


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.nightly)], ids=["each fifth one", "each"])
@pytest.mark.parametrize(
    ("kind", "data", "accumulation_steps"),
    [("supervised", data, 1) for data in LOADERS] + [("supervised", "loader()", 3), ("a subclass", "DataLoader", 1)],
)
def test_an_engine_that_is_stopped_after_any_iteration_is_resumed_to_the_same_bits(
    kind, data, accumulation_steps, step, tmp_path
):
    def begun():
        setup = Setup(kind, data, accumulation_steps)
        torch.manual_seed(5)
        return setup

    whole = begun()
    whole.run()
    for stop_at in range(1, whole.engine.state.iteration, step if data != "workers" else 2 * step):
        folder, stopped = tmp_path / str(stop_at), begun()
        stopped.checkpoint(folder, Events.COMPLETED)
        stopped.engine.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), ask_for_a_stop)
        stopped.run()
        assert stopped.engine.state.iteration == -(-stop_at // accumulation_steps) * accumulation_steps
        resumed = begun()
        torch.manual_seed(99)
        assert resumed.checkpoint(folder).resume() is not None
        resumed.run()
        assert torch.equal(one(resumed.model), one(whole.model)), stop_at


@pytest.mark.parametrize(
    "event", [Events.ITERATION_COMPLETED, Events.ITERATION_COMPLETED(every=2)], ids=["each", "2nd"]
)
def test_what_ignite_has_attached_before_is_saved_and_resumed(event, tmp_path):
    def begun(name):
        setup = Setup()
        scheduler = LRScheduler(torch.optim.lr_scheduler.StepLR(setup.optimizer, 4, gamma=0.5))
        setup.engine.add_event_handler(event, scheduler)
        torch.manual_seed(5)
        return setup, setup.checkpoint(tmp_path / name, Events.COMPLETED)

    whole, _ = begun("whole")
    whole.run()
    stopped, _ = begun("stopped")
    stopped.engine.add_event_handler(Events.ITERATION_COMPLETED(once=7), ask_for_a_stop)
    stopped.run()
    resumed, checkpoint = begun("stopped")
    assert checkpoint.resume() is not None
    resumed.run()
    assert torch.equal(one(resumed.model), one(whole.model))


def stopped_by_a_signal(rank, folder):
    setup = Setup()
    GracefulStop().attach(setup.engine)
    setup.checkpoint(folder)
    if rank == 1:
        setup.engine.add_event_handler(Events.ITERATION_COMPLETED(once=7), lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted) as ended:
        setup.run()
    return setup.engine.state.iteration, setup.engine.state.saved_iteration, ended.value.code


def test_a_signal_to_one_rank_ends_all_after_the_same_iteration_saved(tmp_path):
    first, second = ranks(2, stopped_by_a_signal, tmp_path)
    assert first == second and first[0] == first[1] in (7, 8) and first[2] == 143


def test_what_was_attached_before_stays_in_its_order_and_a_gan_has_one_step_an_iteration(tmp_path):
    nets = {"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}
    optimizers = {f"{name}/optimizer": torch.optim.SGD(net.parameters(), 0.1) for name, net in nets.items()}

    def play(engine, batch):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        nets["critic"](nets["generator"](batch)).sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()

    engine, seen = Engine(play), []
    ProgressBar().attach(engine)
    engine.state.own = "kept"
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append("before"))
    Checkpoint(tmp_path, to_save={**nets, **optimizers}).attach(engine)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append("after"))
    engine.run([torch.ones(1, 2)] * 3, max_epochs=1)
    assert seen == ["before", "after"] and engine.state.optimizer_steps == 3 and engine.state.own == "kept"
    assert {*read_source(find_source(tmp_path)).parts} >= {*nets, *optimizers}


@pytest.mark.nightly  # with a package that is not among those for development
@pytest.mark.parametrize("data", ["loader()", "DataLoader"])
def test_a_trainer_of_monai_is_resumed_to_the_same_bits(data, tmp_path):
    engines = pytest.importorskip("monai.engines")
    batches = {
        "loader()": partial(loader, batch_size=4, shuffle=True, seed=0),
        "DataLoader": partial(DataLoader, batch_size=4, shuffle=True),
    }[data]

    def begun():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        samples = [{"image": inputs, "label": targets} for inputs, targets in DATA]
        trainer = engines.SupervisedTrainer(
            device=torch.device("cpu"),
            max_epochs=2,
            train_data_loader=batches(samples),
            network=model,
            optimizer=torch.optim.AdamW(model.parameters(), 1e-2),
            loss_function=nn.MSELoss(),
        )
        torch.manual_seed(5)
        return trainer

    def listened_to(folder):
        trainer = begun()
        for handler in (EMA(0.9), MetricLogger(console=False), GracefulStop(), MemoryLogger(), Progress()):
            handler.attach(trainer)
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer)
        checkpoint.resume()
        return trainer

    whole = begun()
    whole.run()
    for stop_at in range(1, whole.state.iteration, 3):
        stopped = listened_to(tmp_path / str(stop_at))
        stopped.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), ask_for_a_stop)
        stopped.run()
        torch.manual_seed(99)
        resumed = listened_to(tmp_path / str(stop_at))
        resumed.run()
        assert stopped.state.iteration == stop_at and resumed.state.metrics["loss"] > 0
        assert torch.equal(one(resumed.network), one(whole.network)), stop_at


def within_a_run():
    setup = Setup()
    setup.engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: EMA(0.9).attach(setup.engine))
    setup.run()


test_refusals = refusals(
    [
        ("no engine", lambda: EMA(0.9).attach(nn.Linear(1, 1)), TypeError, "Ignite Engine Linear"),
        ("no model", lambda: EMA(0.9).attach(Engine(lambda engine, batch: None)), TypeError, "EMA model to_save"),
        ("nothing", lambda folder: Checkpoint(folder).attach(Engine(lambda e, b: None)), ValueError, "to_save model"),
        ("a list", lambda folder: Checkpoint(folder, to_save=[nn.Linear(1, 1)]), TypeError, "to_save by name"),
        ("within a run", within_a_run, RuntimeError, "before run()"),
    ]
)
