"""The parts of a step are where they were planted, sum to the wall time, and name the slowest rank."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, loader
from ignite_engine.data import Windows
from ignite_engine.engine.bus import handlers_of
from ignite_engine.handlers import Checkpoint, Evaluation, MetricLogger, StepTimes
from ignite_engine.handlers.step_times.clocks import BETWEEN, STEP
from tests.builders import Numbers, linear, mse, numbers_loader, trainer_of
from tests.ranks.forkserver import on_ranks

PLANTED_S = 0.004
HANDLER = sys.modules[StepTimes.__module__]


class Slept:
    """Sleeps for a part, and knows for how long it really did."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def __call__(self, part: str) -> None:
        started = time.perf_counter()
        time.sleep(PLANTED_S)
        self.seconds[part] += time.perf_counter() - started


class SlowData:
    def __init__(self, slept: Slept) -> None:
        self.slept = slept

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.slept("data_wait")
        return torch.ones(3), torch.ones(1)


class SlowState:
    def __init__(self, slept: Slept) -> None:
        self.slept = slept

    def state_dict(self) -> dict[str, Any]:
        if self.slept.seconds["forward"]:  # not where it is checked at the start
            self.slept("checkpoint")
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def planted(slept: Slept, folder: Path) -> Trainer:
    """Sleeps in each part of each iteration, of 6 micro-batches of 2 samples in 3 iterations an epoch."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        slept("forward")
        return mse(model, batch)

    def predict(model: nn.Module, batch: Any) -> Any:
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


def nothing_is_saved(engine: Engine, count: int) -> bool:
    return bool(engine.state.iteration % 2) and not engine.state.last


class SlowSink:
    name = "slow_sink"

    def __init__(self, slept: Slept) -> None:
        self.slept = slept

    def write(self, iteration: int, values: Any) -> None:
        self.slept("logging")


@pytest.mark.slow
def test_each_part_has_what_was_planted_in_it_and_all_together_are_the_wall_time(tmp_path: Path) -> None:
    slept, began = Slept(), time.perf_counter()
    trainer = planted(slept, tmp_path)
    times = StepTimes(since=began)
    times.attach(trainer, Events.ITERATION_COMPLETED(every=3))
    # attached last, and yet around all of the others
    trainer.run(loader(SlowData(slept), batch_size=2), max_epochs=4)
    wall = time.perf_counter() - began

    spent = times._clock.seconds
    assert sum(spent.values()) == pytest.approx(wall, rel=0.02)
    assert {part: spent[part] >= seconds for part, seconds in slept.seconds.items()} == dict.fromkeys(
        slept.seconds, True
    )
    assert len(slept.seconds) == 9
    assert spent["update"] == spent["reduction"] == 0
    assert times._clock.steps == trainer.state.iteration == 24


@pytest.mark.slow
def test_values_are_written_at_the_event_and_sum_to_the_time_of_an_iteration(tmp_path: Path) -> None:
    slept = Slept()
    trainer = planted(slept, tmp_path)
    times = StepTimes()
    times.attach(trainer, Events.ITERATION_COMPLETED(every=6))
    sums, at, startup = dict[str, float](), list[int](), list[float | None]()

    def add() -> None:
        found = {name: value for name, value in trainer.state.metrics.fresh.items() if name.startswith("time/")}
        if found:
            at.append(trainer.state.iteration)
            startup.append(found.pop("time/startup_s", None))
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + 6 * value

    trainer.add_event_handler(TrainingEvents.METRICS_READY, add)
    trainer.run(loader(SlowData(slept), batch_size=2), max_epochs=4)

    assert at == [6, 12, 18, 24]
    assert startup == [times._clock.seconds["startup"], None, None, None] and startup[0]
    written = times._written
    parts = ("data_wait", "copy", "forward", "backward", "optimizer")
    assert {name for name in sums if "step" not in name} == {
        f"time/{part}_ms" for part in (*parts, "evaluation", "checkpoint", "logging", "handlers")
    }
    for part in parts:  # steps; what lies between them may come after the last log point
        assert sums[f"time/{part}_ms"] == pytest.approx(1e3 * written[part])
    assert sums["time/step_ms"] == pytest.approx(1e3 * sum(written[part] for part in parts))
    metrics = trainer.state.metrics
    assert metrics["time/step_p50_ms"] <= metrics["time/step_p99_ms"]
    assert "time/slowest_rank" not in metrics and "time/reduction_ms" not in metrics


def test_own_update_is_one_part_and_nothing_is_left_over() -> None:
    def update(engine: Engine, batch: Any) -> dict[str, float]:
        time.sleep(PLANTED_S)
        return {"loss": 1.0}

    trainer = Trainer(update)
    began = time.perf_counter()
    times = StepTimes(since=began)
    times.attach(trainer, Events.ITERATION_COMPLETED(every=5))
    trainer.run([torch.ones(1)] * 10, max_epochs=1)

    assert times._clock.seconds["update"] >= 10 * PLANTED_S
    assert times._clock.seconds["forward"] == times._clock.seconds["copy"] == 0
    assert sum(times._clock.seconds.values()) == pytest.approx(time.perf_counter() - began, abs=0.01)
    assert trainer.state.metrics["time/step_ms"] >= 1e3 * PLANTED_S


def test_compiling_is_start_up_and_no_part_of_a_step(tmp_path: Path) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        time.sleep(0.3)
        return graph

    compiled, before = torch.compile(lambda value: value + 1, backend=backend), [*callback_handler.start_callbacks]
    trainer, times = Trainer(lambda engine, batch: compiled(torch.ones(2))), StepTimes(tmp_path)
    times.attach(trainer, Events.ITERATION_COMPLETED(every=4))
    trainer.run([0] * 4, max_epochs=1)

    assert times.ledger is not None and times.ledger.seconds["startup"] > 0.3 > 0.2 > times.ledger.seconds["productive"]
    assert trainer.state.metrics["time/startup_s"] > 0.3 and trainer.state.metrics["time/step_ms"] < 50
    assert callback_handler.start_callbacks == before


def test_data_of_unknown_length_is_waited_for_to_its_end() -> None:
    slept = Slept()

    class Stream:
        def __iter__(self) -> Any:
            for _ in range(3):
                slept("data_wait")
                yield torch.ones(2, 3), torch.ones(2, 1)
            slept("data_wait")  # it knows only then that it was the last one

    trainer, times = trainer_of(), StepTimes()
    times.attach(trainer)
    trainer.run(Stream(), max_epochs=3)
    assert times._clock.seconds["data_wait"] >= slept.seconds["data_wait"] >= 12 * PLANTED_S


def test_it_changes_no_bit_and_keeps_nothing_in_checkpoints() -> None:
    plain, timed = trainer_of(), trainer_of()
    StepTimes().attach(timed, Events.ITERATION_COMPLETED(every=2))
    for trainer in (plain, timed):
        trainer.run(numbers_loader(24, 2), max_epochs=2)

    for own, other in zip(plain.update.model.parameters(), timed.update.model.parameters(), strict=True):  # type: ignore[attr-defined]
        assert torch.equal(own, other)
    assert set(plain.registry.objects) == set(timed.registry.objects)


def test_events_of_the_forward_cost_nothing_where_nobody_listens() -> None:
    trainer = trainer_of()
    fired = []
    trainer.fire_event = lambda event: fired.append(event)  # type: ignore[method-assign]
    trainer.run(numbers_loader(8, 2))
    assert fired == [] and not handlers_of(trainer, TrainingEvents.FORWARD_STARTED)


def test_second_run_and_two_trainers_keep_their_own_time() -> None:
    one, two = trainer_of(), trainer_of()
    times = [StepTimes(), StepTimes()]
    for trainer, each in zip((one, two), times, strict=True):
        each.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    one.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: two.run(numbers_loader(8, 2)))
    one.run(numbers_loader(8, 2))
    assert [each._clock.steps for each in times] == [4, 4]

    one.run(numbers_loader(8, 2), max_epochs=3)
    assert times[0]._clock.steps == 8


def ledger_of(times: StepTimes) -> dict[str, float]:
    assert times.ledger is not None
    return dict(times.ledger.seconds)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in (folder / "goodput.jsonl").read_text().splitlines()]


def test_run_that_goes_back_to_a_checkpoint_has_wasted_what_follows_it(tmp_path: Path) -> None:
    data = Numbers(48)
    data.inputs[2 * 9] = float("nan")  # in iteration 10
    trainer = trainer_of(non_finite="rollback")
    Checkpoint(tmp_path / "checkpoints").attach(trainer, Events.ITERATION_COMPLETED(every=4))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: time.sleep(PLANTED_S))
    times = StepTimes(tmp_path)
    times.attach(trainer)
    trainer.run(loader(data, batch_size=2), max_epochs=1)

    lines = lines_of(tmp_path)
    assert list({each["began"]: each["first"] for each in lines}.values()) == [0, 8]
    assert max(each["iteration"] for each in lines if each["first"] == 0) == 9
    assert lines[-1]["status"] == "completed" and lines[-1]["iteration"] == 24
    assert times.ledger is not None and times.ledger.starts == 2
    assert ledger_of(times)["wasted"] >= PLANTED_S  # iteration 9, before the one that was not finite


def test_pause_is_no_end_and_a_later_run_counts_no_time_between(tmp_path: Path) -> None:
    trainer = trainer_of()
    times = StepTimes(tmp_path)
    times.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), trainer.interrupt)
    trainer.run(numbers_loader(12, 2), max_epochs=1)
    assert lines_of(tmp_path)[-1]["status"] == "running"
    trainer.run()
    assert [(each["status"], each["iteration"]) for each in lines_of(tmp_path)] == [("completed", 6)]

    time.sleep(0.2)
    trainer.run(numbers_loader(12, 2), max_epochs=2)
    assert times.ledger is not None and times.ledger.starts == 2
    found = ledger_of(times)
    assert found["downtime"] == found["wasted"] == 0 and found["restart"] < 0.2


def test_error_ends_the_ledger_and_the_next_run_begins_another(tmp_path: Path) -> None:
    def fail(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("no")

    model = linear()
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), fail))
    times = StepTimes(tmp_path)
    times.attach(trainer)
    with pytest.raises(RuntimeError, match="no"):
        trainer.run(numbers_loader(12, 2))
    assert lines_of(tmp_path)[-1]["status"] == "failed" and times.verdict is None

    trainer.update.loss_fn = mse  # type: ignore[attr-defined]
    trainer.run(numbers_loader(12, 2))
    assert times.ledger is not None and times.ledger.starts == 1


def test_wait_for_a_window_is_data_wait(tmp_path: Path) -> None:
    slept = Slept()

    def stream() -> Any:
        for number in range(3):
            slept("data_wait")
            yield number

    trainer = trainer_of()
    times = StepTimes()
    times.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.add_event_handler(TrainingEvents.WINDOW_COMPLETED, lambda: slept("handlers"))
    trainer.run(Windows(stream(), lambda _: loader(Numbers(4), batch_size=2)), max_epochs=1)

    spent = times._clock.seconds
    assert trainer.state.windows_completed == 3
    assert spent["data_wait"] >= slept.seconds["data_wait"] >= 3 * PLANTED_S
    assert spent["handlers"] >= slept.seconds["handlers"]
    assert not handlers_of(trainer, TrainingEvents.RESUME_POINT)  # nothing stays behind


def test_folder_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    trainer = trainer_of()
    times = StepTimes(tmp_path / "file" / "run")
    times.attach(trainer)
    trainer.run(numbers_loader(12, 2))
    assert trainer.state.status == "completed" and times.ledger is None
    assert caplog.text.count("cannot be written") == 1


def test_copy_of_a_background_save_is_saving(tmp_path: Path) -> None:
    slept = Slept()
    trainer = trainer_of()
    Checkpoint(tmp_path, background=True).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    times = StepTimes()
    times.attach(trainer)

    def as_if_it_took_long() -> None:
        if len(slept.seconds) == 0:
            slept("checkpoint")

    def join_late() -> None:
        trainer.add_event_handler(
            TrainingEvents.OPTIMIZER_STEP_STARTED(once=trainer.state.iteration + 1), as_if_it_took_long
        )

    trainer.add_event_handler(TrainingEvents.RESUME_POINT(once=3), join_late)
    trainer.run(numbers_loader(24, 2), max_epochs=1)
    assert times._clock.seconds["checkpoint"] >= slept.seconds["checkpoint"] > 0
    assert times._figures(trainer).background, "the verdict is told"


def test_other_work_in_the_background_is_no_save_there(tmp_path: Path) -> None:
    trainer, times = trainer_of(), StepTimes()
    Checkpoint(tmp_path).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    times.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: trainer.report_background_done())
    trainer.run(numbers_loader(24, 2), max_epochs=1)
    assert not times._figures(trainer).background, "the verdict advises it"


def test_two_ranks_name_the_slower_one_and_split_off_the_reduction(tmp_path: Path) -> None:
    on_ranks(2, _rank, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))

    assert first["metrics"]["time/slowest_rank"] == second["metrics"]["time/slowest_rank"] == 1.0
    assert first["metrics"]["time/slowest_rank_ms"] >= 20.0
    assert first["metrics"]["time/slowest_rank_ms"] == second["metrics"]["time/slowest_rank_ms"]
    # the other one waits for it within the reduction
    assert first["seconds"]["reduction"] > second["seconds"]["reduction"]
    assert first["seconds"]["reduction"] >= 0.7 * second["seconds"]["forward"]
    assert "rank 1" in first["verdict"] and "the forward" in first["verdict"]
    assert second["verdict"] is None  # rank 0 says it
    # one collective at each of 4 log points and at the end, none between
    assert first["gathers"] == second["gathers"] == 5
    assert first["hooks"] == second["hooks"] == 0


def _rank(rank: int, folder: str) -> None:
    import torch.distributed as dist

    from ignite_engine.ranks import agreement
    from ignite_engine.report.goodput import verdict as verdicts  # the function; its module is of the same name

    sys.modules[verdicts.__module__].SHORTEST_S = 0.1  # type: ignore[attr-defined]
    sys.modules[StepTimes.__module__]._scheduled_s = lambda: (0.0, 0.0)  # type: ignore[attr-defined]  # other tests keep the cores busy
    gather, gathers = agreement.gather_floats, list[int]()

    def counted(values: Any) -> Any:
        gathers.append(len(values))
        return gather(values)

    agreement.gather_floats = counted
    model = DistributedDataParallel(linear())

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.02 * rank)
        return mse(model, batch)

    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn))
    times = StepTimes()
    times.attach(trainer, Events.ITERATION_COMPLETED(every=10))
    trainer.run(numbers_loader(320, 4), max_epochs=1)
    first = next(model.parameters())
    found = {
        "metrics": dict(trainer.state.metrics),
        "seconds": times._clock.seconds,
        "verdict": None if times.verdict is None else str(times.verdict),
        "gathers": gathers.count(4 + len(STEP) + len(BETWEEN)),
        "hooks": len(first._post_accumulate_grad_hooks or ()),  # type: ignore[attr-defined]
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()


def test_a_rank_whose_data_come_late_is_named_though_the_others_wait_in_the_forward(tmp_path: Path) -> None:
    """There DDP sends the statistics of BatchNorm."""
    on_ranks(2, _rank_whose_data_come_late, tmp_path)
    said = (tmp_path / "verdict").read_text()
    assert said.startswith("The run was limited by rank 1: ") and "of that in waiting for data" in said


def _rank_whose_data_come_late(rank: int, folder: str) -> None:
    from ignite_engine.report.goodput import verdict as verdicts

    sys.modules[verdicts.__module__].SHORTEST_S = 0.1  # type: ignore[attr-defined]
    sys.modules[StepTimes.__module__]._scheduled_s = lambda: (0.0, 0.0)  # type: ignore[attr-defined]

    class Late(Numbers):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.02 * rank)
            return super().__getitem__(index)

    model = DistributedDataParallel(nn.Sequential(linear(), nn.BatchNorm1d(1)))
    trainer, times = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse)), StepTimes()
    times.attach(trainer, Events.ITERATION_COMPLETED(every=10))
    trainer.run(loader(Late(128), batch_size=2), max_epochs=1)
    if rank == 0:
        Path(folder, "verdict").write_text(str(times.verdict))


def test_anomaly_detection_is_seen() -> None:
    trainer, times = trainer_of(linear()), StepTimes()
    times.attach(trainer)
    with torch.autograd.set_detect_anomaly(True):
        trainer.run(numbers_loader(24, 2), max_epochs=1)
        assert times._figures(trainer).detects_anomalies
    assert not times._figures(trainer).detects_anomalies


@pytest.mark.parametrize("workers", [0, 1])
def test_data_in_memory_is_told_apart_in_a_loader_of_the_engine(workers: int) -> None:
    tensors = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))

    def in_memory(batches: Any) -> bool:
        trainer, times = trainer_of(linear()), StepTimes()
        times.attach(trainer)
        trainer.run(batches, max_epochs=1)
        return times._figures(trainer).in_memory

    def own_collate(samples: list[Any]) -> Any:  # what takes long may be this
        return default_collate(samples)

    assert in_memory(loader(tensors, batch_size=4, num_workers=workers))
    assert in_memory(loader(Subset(tensors, range(8)), batch_size=4, num_workers=workers))
    assert in_memory(DataLoader(tensors, batch_size=4, num_workers=workers))
    assert not in_memory(loader(tensors, batch_size=4, num_workers=workers, collate_fn=own_collate))
    assert not in_memory(DataLoader(tensors, batch_size=4, num_workers=workers, collate_fn=own_collate))
    assert not in_memory(loader(Numbers(8), batch_size=4, num_workers=workers))


@pytest.mark.parametrize("is_told", [True, False])
def test_the_thread_ran_or_had_no_core_for_what_the_kernel_says_without_compilations(
    is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduled = [10.0, 20.0]  # what the thread had before the run

    def pass_time(ran_s: float, crowded_s: float) -> None:
        scheduled[0] += ran_s
        scheduled[1] += crowded_s

    def backend(graph: Any, inputs: Any) -> Any:
        pass_time(100.0, 50.0)
        return graph

    def update(engine: Engine, batch: Any) -> Tensor:
        pass_time(2.0, 1.0)
        return compiled(torch.ones(2))

    compiled = torch.compile(lambda value: value + 1, backend=backend)
    monkeypatch.setattr(HANDLER, "_scheduled_s", lambda: tuple(scheduled) if is_told else (0.0, 0.0))
    trainer, times = Trainer(update), StepTimes()
    times.attach(trainer)
    trainer.run([0] * 4, max_epochs=1)

    assert scheduled == [118.0, 74.0]
    figures = times._figures(trainer)
    assert (figures.busy_s, figures.crowded_s) == ((12.0, 4.0) if is_told else (math.inf, 0.0))


def test_beginnings_of_passes_but_the_first_are_timed_to_their_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Batches:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Any:
            now[0] += 5.0
            for _ in range(3):
                now[0] += 1.0
                yield torch.ones(2, 3), torch.ones(2, 1)

    monkeypatch.setattr(HANDLER, "perf_counter", lambda: now[0])
    trainer, times = trainer_of(), StepTimes()
    times.attach(trainer)
    trainer.run(Batches(), max_epochs=3)
    assert now == [24.0] and times._figures(trainer).opening_s == 12.0


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_that_are_kept_are_told_apart(persistent: bool) -> None:
    trainer, times = trainer_of(), StepTimes()
    times.attach(trainer)
    batches = loader(Numbers(4), batch_size=2, num_workers=1, persistent_workers=persistent)
    trainer.run(batches, max_epochs=1)
    figures = times._figures(trainer)
    assert (figures.workers, figures.persistent) == (1, persistent)
