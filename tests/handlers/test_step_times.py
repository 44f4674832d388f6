"""The parts of a step are where they were planted, and nobody waits for a device to know them."""

import time
from collections import defaultdict

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, devices, loader
from ignite_engine.engine.bus import handlers_of
from ignite_engine.ext.windows import Windows
from ignite_engine.handlers import Checkpoint, Evaluation, MetricLogger, StepTimes, Throughput
from ignite_engine.handlers.step_times import DeviceClock
from tests.kit.tiny import Numbers, linear, mse, numbers_loader, trainer_of
from tests.ranks.forkserver import on_ranks

PLANTED_S = 0.004


class Slept:
    """Sleeps for a part, and knows for how long it really did."""

    def __init__(self):
        self.seconds = defaultdict(float)

    def __call__(self, part):
        started = time.perf_counter()
        time.sleep(PLANTED_S)
        self.seconds[part] += time.perf_counter() - started


class SlowData:
    def __init__(self, slept):
        self.slept = slept

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.slept("data_wait")
        return torch.ones(3), torch.ones(1)


class SlowState:
    def __init__(self, slept):
        self.slept = slept

    def state_dict(self):
        if self.slept.seconds["forward"]:  # not where it is checked at the start
            self.slept("checkpoint")
        return {}

    def load_state_dict(self, state): ...


def planted(slept, folder):
    """Sleeps in each part of each iteration, of 6 micro-batches of 2 samples in 3 iterations an epoch."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, batch):
        slept("forward")
        return mse(model, batch)

    def predict(model, batch):
        slept("evaluation")
        return model(batch[0])

    next(model.parameters()).register_hook(lambda gradient: slept("backward"))
    optimizer.register_step_pre_hook(lambda *_: slept("optimizer"))
    trainer = Trainer(Update(model, optimizer, loss_fn), accumulation_steps=2)
    trainer.register("slow", SlowState(slept))
    evaluator = create_evaluator(model, predict)
    Evaluation(evaluator, loader(Numbers(4), batch_size=2)).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    Checkpoint(folder / "checkpoints").attach(trainer, Events.ITERATION_COMPLETED(every=2))
    MetricLogger(console=False, sinks=[SlowSink(slept)]).attach(trainer)
    for event in (Events.STARTED, Events.EPOCH_STARTED):
        trainer.add_event_handler(event, lambda: slept("startup") if not slept.seconds["forward"] else None)
    for event in (
        *(Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED),
        *(TrainingEvents.BACKWARD_COMPLETED, TrainingEvents.OPTIMIZER_STEP_STARTED, Events.EPOCH_COMPLETED),
        *(TrainingEvents.OPTIMIZER_STEP_COMPLETED, TrainingEvents.RESUME_POINT(event_filter=nothing_is_saved)),
    ):
        trainer.add_event_handler(event, lambda: slept("handlers"))
    return trainer


def nothing_is_saved(engine, count):
    return bool(engine.state.iteration % 2) and not engine.state.last


class SlowSink:
    name = "slow_sink"

    def __init__(self, slept):
        self.slept = slept

    def write(self, iteration, values):
        self.slept("logging")


@pytest.mark.slow
def test_each_part_has_what_was_planted_in_it(tmp_path):
    slept, began = Slept(), time.perf_counter()
    trainer = planted(slept, tmp_path)
    times = StepTimes()
    times.attach(trainer, Events.ITERATION_COMPLETED(every=3))
    # attached last, and yet around all of the others
    trainer.run(loader(SlowData(slept), batch_size=2), max_epochs=4)

    spent = times._clock.seconds
    of_step = {part: slept.seconds[part] for part in ("data_wait", "forward", "backward", "optimizer")}
    between = sum(slept.seconds[part] for part in ("evaluation", "checkpoint", "logging"))
    assert {part: spent[part] >= seconds for part, seconds in of_step.items()} == dict.fromkeys(of_step, True)
    assert spent["other"] >= between > 0
    assert began + sum(spent.values()) <= time.perf_counter() and times._clock.steps == trainer.state.iteration == 24


@pytest.mark.slow
def test_values_are_written_at_the_event_and_sum_to_the_time_of_an_iteration(tmp_path):
    slept = Slept()
    trainer = planted(slept, tmp_path)
    times = StepTimes()
    times.attach(trainer, Events.ITERATION_COMPLETED(every=6))
    sums, at = dict[str, float](), list[int]()

    def add():
        found = {name: value for name, value in trainer.state.metrics.fresh.items() if name.startswith("time/")}
        if found:
            at.append(trainer.state.iteration)
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + 6 * value

    trainer.add_event_handler(TrainingEvents.METRICS_READY, add)
    trainer.run(loader(SlowData(slept), batch_size=2), max_epochs=4)

    assert at == [6, 12, 18, 24]
    spent, parts = times._clock.seconds, ("data_wait", "forward", "backward", "optimizer")
    assert set(sums) == {f"time/{part}_ms" for part in (*parts, "step", "other")}
    for part in parts:  # steps; what lies between them may come after the last log point
        assert sums[f"time/{part}_ms"] == pytest.approx(1e3 * spent[part])
    assert sums["time/step_ms"] == pytest.approx(1e3 * sum(spent[part] for part in (*parts, "update")))


def test_own_update_is_known_as_a_whole():
    def update(engine, batch):
        time.sleep(PLANTED_S)
        return {"loss": 1.0}

    trainer, times = Trainer(update), StepTimes()
    times.attach(trainer, Events.ITERATION_COMPLETED(every=5))
    trainer.run([torch.ones(1)] * 10, max_epochs=1)

    assert times._clock.seconds["update"] >= 10 * PLANTED_S and times._clock.seconds["forward"] == 0
    assert trainer.state.metrics["time/step_ms"] >= 1e3 * PLANTED_S
    assert "time/forward_ms" not in trainer.state.metrics


def test_data_of_unknown_length_is_waited_for_to_its_end():
    slept = Slept()

    class Stream:
        def __iter__(self):
            for _ in range(3):
                slept("data_wait")
                yield torch.ones(2, 3), torch.ones(2, 1)
            slept("data_wait")  # it knows only then that it was the last one

    trainer, times = trainer_of(), StepTimes()
    times.attach(trainer)
    trainer.run(Stream(), max_epochs=3)
    assert times._clock.seconds["data_wait"] >= slept.seconds["data_wait"] >= 12 * PLANTED_S


def test_it_changes_no_bit_and_keeps_nothing_in_checkpoints():
    plain, timed = trainer_of(), trainer_of()
    StepTimes().attach(timed, Events.ITERATION_COMPLETED(every=2))
    for trainer in (plain, timed):
        trainer.run(numbers_loader(24, 2), max_epochs=2)

    for own, other in zip(plain.update.model.parameters(), timed.update.model.parameters(), strict=True):
        assert torch.equal(own, other)
    assert set(plain.registry.objects) == set(timed.registry.objects)


def test_events_of_the_forward_cost_nothing_where_nobody_listens():
    trainer = trainer_of()
    fired = []
    trainer.fire_event = lambda event: fired.append(event)
    trainer.run(numbers_loader(8, 2))
    assert fired == [] and not handlers_of(trainer, TrainingEvents.FORWARD_STARTED)


def test_second_run_and_two_trainers_keep_their_own_time():
    one, two = trainer_of(), trainer_of()
    times = [StepTimes(), StepTimes()]
    for trainer, each in zip((one, two), times, strict=True):
        each.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    one.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: two.run(numbers_loader(8, 2)))
    one.run(numbers_loader(8, 2))
    assert [each._clock.steps for each in times] == [4, 4]

    one.run(numbers_loader(8, 2), max_epochs=3)
    assert times[0]._clock.steps == 8


def test_wait_for_a_window_is_data_wait():
    slept = Slept()

    def stream():
        for number in range(3):
            slept("data_wait")
            yield number

    trainer = trainer_of()
    times = StepTimes()
    times.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(Windows(stream(), lambda _: loader(Numbers(4), batch_size=2)), max_epochs=1)

    assert trainer.state.windows_completed == 3
    assert times._clock.seconds["data_wait"] >= slept.seconds["data_wait"] >= 3 * PLANTED_S


# -- several ranks, and a device that nobody waits for ---------------------------------------------------------------


def _one_of_two_ranks(rank, folder):
    trainer, times = Trainer(lambda engine, batch: time.sleep(0.01 + 0.02 * rank)), StepTimes()
    times.attach(trainer, Events.ITERATION_COMPLETED(every=4))
    trainer.run([torch.ones(1)] * 4, max_epochs=1)
    torch.save(dict(trainer.state.metrics), f"{folder}/{rank}.pt")


@pytest.mark.distributed
def test_times_are_means_over_the_ranks(tmp_path):
    on_ranks(2, _one_of_two_ranks, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first == second and 20 <= first["time/step_ms"] < 100


META = torch.device("meta")


@pytest.fixture(autouse=True)
def stream_of_each_device(monkeypatch):
    monkeypatch.setattr(devices, "current_stream", lambda device: f"stream of {device}")


class Device:
    """A stream that executes what was recorded when it is told to, each event at its own time."""

    def __init__(self):
        self.recorded = []
        self.done, self.made = 0, 0

    def execute(self, *milliseconds):
        for each in milliseconds:
            before = self.recorded[self.done - 1].at if self.done else 0.0
            self.recorded[self.done].at = before + each
            self.recorded[self.done].completed = True
            self.done += 1

    def make_event(self):
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.at, self.completed = device, 0.0, False

    def record(self, stream=None):
        self.stream = stream
        self.completed = False
        self.device.recorded.append(self)

    def query(self):
        return self.completed

    def elapsed_time(self, end):
        assert self.completed and end.completed
        return end.at - self.at


def step(clock):
    for part in ("data_wait", "forward", "backward", "optimizer"):
        clock.mark(part)
    clock.mark("update", ends_step=True)


@pytest.mark.row("F5")
def test_device_is_read_when_it_is_done_and_never_waited_for():
    device = Device()
    clock = DeviceClock(META, device.make_event)
    step(clock)
    clock.read()
    assert clock.steps == 0 and not any(clock.seconds.values())

    device.execute(0, 1, 2)  # all but backward and what follows
    clock.read()
    assert (clock.seconds["data_wait"], clock.seconds["forward"]) == pytest.approx((1e-3, 2e-3))
    assert clock.seconds["backward"] == 0 and clock.steps == 0

    device.execute(3, 4, 5)
    clock.read()
    assert clock.seconds["optimizer"] == pytest.approx(4e-3) and clock.steps == 1


def test_events_are_used_again_and_their_number_is_bounded():
    device = Device()
    clock = DeviceClock(META, device.make_event)
    device.execute(0)
    for _ in range(1000):
        step(clock)
        device.execute(*[1.0] * (len(device.recorded) - device.done))

    clock.read()
    assert clock.steps == 1000 and device.made < 1100
    assert sum(clock.seconds.values()) == pytest.approx(1000 * 5e-3)


def test_events_are_recorded_on_the_stream_of_the_models_device():
    """Else the times of a model on the second device are those of the first one's idle stream."""
    device = Device()
    step(DeviceClock(torch.device("cuda:1"), device.make_event))

    assert {event.stream for event in device.recorded} == {"stream of cuda:1"}


def test_late_events_write_nothing_until_they_have_completed(monkeypatch):
    """And no time of the host's stands for them: one series has one meaning."""
    device = Device()
    monkeypatch.setattr(devices, "has_timing_events", lambda kind: True)
    monkeypatch.setattr(devices, "timing_event", lambda kind: device.make_event())
    trainer, seen = trainer_of(), list[dict[str, float]]()
    StepTimes().attach(trainer, Events.ITERATION_COMPLETED(every=2))
    Throughput().attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.add_event_handler(TrainingEvents.METRICS_READY, lambda: seen.append(dict(trainer.state.metrics.fresh)))
    trainer.add_event_handler(
        Events.ITERATION_STARTED(once=4), lambda: device.execute(*[5.0] * (len(device.recorded) - device.done))
    )
    trainer.run(numbers_loader(8, 2))

    assert list(seen[0]) == ["throughput/samples_per_s"]
    assert seen[1]["time/step_ms"] > 5 and seen[1]["time/forward_ms"] == pytest.approx(5.0)
