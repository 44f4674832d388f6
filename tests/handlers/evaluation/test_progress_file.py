"""An interrupted evaluation continues where it was, to the bits of a whole one; or starts over and logs why."""

from __future__ import annotations

import io
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average, EpochMetric, Loss, Metric
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from ignite_engine import Trainer, TrainingEvents, create_evaluator, loader
from ignite_engine.handlers import Checkpoint, Evaluation, StopFile, WallClockLimit
from ignite_engine.handlers.evaluation import progress_file
from ignite_engine.ranks import agreement
from tests.builders import Numbers, numbers_loader, trainer_of

FILE = "val.progress"


class Killed(BaseException):
    """Stands for a kill: nothing is tidied up after it."""


def spread(predictions: Tensor, targets: Tensor) -> float:
    return (predictions.std() + targets.std()).item()


def metrics() -> dict[str, Metric]:
    return {
        "loss": Loss(nn.functional.mse_loss),
        "spread": EpochMetric(spread),
        "drawn": Average(output_transform=lambda output: output[0].mean()),
    }


class Run:
    """A run of 12 updates that evaluates after update 6 and update 12, in 10 batches each, with random predictions."""

    def __init__(self, folder: Path, *, every: int = 3, data: Any = None, **options: Any) -> None:
        self.trainer, self.folder = trainer_of(), folder
        self.model: nn.Module = self.trainer.update.model  # type: ignore[attr-defined]  # an Update
        self.numbers = Numbers(20)
        self.batches: list[int] = []
        """The iteration of each batch that was evaluated."""
        self.seen: Callable[[int], None] = lambda count: None
        """Called with the number of batches evaluated so far, before each."""

        def predict(model: nn.Module, batch: Any) -> Any:
            self.seen(len(self.batches))
            self.batches.append(self.trainer.state.iteration)
            return model(batch[0]) * torch.rand(1), batch[1]

        self.evaluator = create_evaluator(self.model, predict, options.pop("metrics", None) or metrics())
        data = loader(self.numbers, 2) if data is None else data
        self.evaluation = Evaluation(
            self.evaluator, data, **{"progress": folder / "progress", "progress_every": every, **options}
        )
        self.evaluation.attach(self.trainer, Events.ITERATION_COMPLETED(every=6))
        self.measured: list[dict[str, Any]] = []
        self.trainer.add_event_handler(
            TrainingEvents.EVALUATION_COMPLETED, lambda: self.measured.append(dict(self.trainer.state.metrics))
        )
        self.checkpoint = Checkpoint(folder / "checkpoints")
        self.checkpoint.attach(self.trainer, Events.ITERATION_COMPLETED(every=4))

    def train(self) -> list[dict[str, Any]]:
        """To the end, from the newest checkpoint if there is one; the metrics of each evaluation."""
        # what a resumed run draws it has from its checkpoint
        torch.manual_seed(5 if self.checkpoint.resume() is None else 99)
        self.trainer.run(numbers_loader(12, shuffle=True), max_epochs=2)
        return self.measured

    def cut_off(self, at: int, how: str = "kill") -> None:
        """Kill or stop it in the evaluation, when ``at`` batches of it were evaluated."""

        def cut(count: int) -> None:
            if count == at and how == "kill":
                raise Killed
            if count == at - 1 and how == "stop":
                self.trainer.request_stop("enough")

        self.seen = cut
        if how == "kill":
            with pytest.raises(Killed):
                self.train()
        else:
            self.train()
            assert self.trainer.state.status == "interrupted"
        assert len(self.batches) == at and not self.measured

    @property
    def file(self) -> Path:
        return self.folder / "progress" / FILE


@pytest.fixture
def whole(tmp_path: Path) -> list[dict[str, Any]]:
    run = Run(tmp_path / "whole")
    found = run.train()
    assert run.batches == [6] * 10 + [12] * 10 and len(found) == 2
    return found


@pytest.mark.parametrize(("how", "at", "goes_on_at"), [("kill", 8, 6), ("kill", 3, 3), ("stop", 8, 8), ("stop", 1, 1)])
def test_interrupted_evaluation_continues_to_the_same_bits(
    how: str, at: int, goes_on_at: int, tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    cut = Run(tmp_path)
    cut.cut_off(at, how)
    assert cut.file.exists() is (at > 0)

    resumed = Run(tmp_path)
    assert resumed.train() == whole
    assert resumed.trainer.state.evaluations == 2
    assert resumed.batches == [6] * (10 - goes_on_at) + [12] * 10
    assert resumed.numbers.loaded == [*range(2 * goes_on_at, 20), *range(20)], "what is skipped was loaded"


class Drawn:
    """Ten batches in an order that is drawn in each pass."""

    def __iter__(self) -> Iterator[Any]:
        numbers = Numbers(20)
        for places in torch.randperm(20).split(2):
            yield numbers.inputs[places], numbers.targets[places]


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_order_that_is_drawn_goes_on_as_it_was_begun(how: str, tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", data=Drawn()).train()
    Run(tmp_path, data=Drawn()).cut_off(8, how)
    assert Run(tmp_path, data=Drawn()).train() == whole


def test_it_may_be_interrupted_again_and_again(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    for at, kept in ((4, 3), (4, 6), (2, 6)):
        run = Run(tmp_path)
        run.cut_off(at)
        content = run.file.read_bytes().partition(b"\n")[2]
        assert torch.load(io.BytesIO(content), weights_only=True)["batches"] == kept
        run.file.with_name(f".{FILE}.tmp").write_bytes(b"a kill in the middle of a write leaves this")
    last = Run(tmp_path)
    assert last.train() == whole
    assert last.batches == [6] * 4 + [12] * 10


def test_file_is_deleted_when_the_evaluation_is_complete(tmp_path: Path) -> None:
    run, there = Run(tmp_path), list[bool]()
    run.seen = lambda count: there.append(run.file.exists())
    run.train()

    assert there == ([False] * 3 + [True] * 7) * 2 and not list(run.file.parent.iterdir())


def test_evaluation_shorter_than_the_interval_writes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, every=10)
    run.train()

    assert not run.file.parent.exists()


def test_handlers_of_the_evaluator_count_on(tmp_path: Path) -> None:
    Run(tmp_path).cut_off(8)
    resumed, counted = Run(tmp_path), list[int]()
    resumed.evaluator.add_event_handler(
        Events.ITERATION_COMPLETED(every=2), lambda: counted.append(resumed.evaluator.state.iteration)
    )
    resumed.train()

    assert counted == [8, 10, 2, 4, 6, 8, 10]


class Stream(IterableDataset[Any]):
    """Without a length and without a state; remembers what it gave."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        numbers = Numbers(20)
        for index in range(20):
            self.given.append(index)
            yield numbers[index]


def test_stream_without_a_state_is_replayed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(folder: Path) -> Run:
        return Run(folder, data=DataLoader(Stream(), batch_size=2), limit=9)

    expected = run(tmp_path / "whole").train()
    run(tmp_path).cut_off(7)
    resumed = run(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert resumed.train() == expected
    assert resumed.batches == [6] * 3 + [12] * 9
    assert "the 6 batches that were consumed are loaded again and skipped" in caplog.text


# -- what is not taken up ---------------------------------------------------------------------------------------------


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def with_code(path: Path) -> None:
    import hashlib
    import pickle

    content = pickle.dumps(Run, protocol=2)
    path.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (damaged, "is not used, the evaluation starts over: its content has changed."),
        (with_code, "nothing in it was executed."),
        (lambda path: path.write_bytes(b""), "is not used, the evaluation starts over: its content has changed."),
        (lambda path: path.unlink() or path.mkdir(), "is not used, the evaluation starts over: Is a directory"),
    ],
    ids=["flipped bit", "code", "empty", "directory"],
)
def test_damaged_file_is_logged_and_not_used(
    harm: Callable[[Path], Any],
    said: str,
    tmp_path: Path,
    whole: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cut = Run(tmp_path)
    cut.cut_off(8)
    harm(cut.file)
    resumed = Run(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert resumed.train() == whole
    assert resumed.batches == [6] * 10 + [12] * 10
    assert said in caplog.text


def reweighted(run: Run) -> None:
    @run.trainer.on(Events.ITERATION_STARTED(once=6))
    def change() -> None:
        with torch.no_grad():
            next(run.model.parameters()).add_(1e-7)


def relimited(run: Run) -> None:
    run.evaluation.limit = 9


def other_metrics(run: Run) -> None:
    Average(output_transform=lambda output: output[0].mean()).attach(run.evaluator, "more")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (reweighted, "is of other weights and not used."),
        (relimited, "is of another evaluation (limit None, not 9) and not used."),
        (other_metrics, "has the metrics ['drawn', 'loss', 'spread'], the evaluator has ['drawn', 'loss', 'more', 's"),
        (lambda run: setattr(run.evaluation, "data", loader(run.numbers, 4)), "made with batch_size 2"),
        (lambda run: setattr(run.evaluation, "data", loader(Numbers(18), 2)), "made with samples 20"),
    ],
    ids=["weights", "limit", "metrics", "batch size", "data"],
)
def test_another_evaluation_starts_at_its_first_batch(
    change: Callable[[Run], Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its metrics are those of a run that never saw the file."""
    Run(tmp_path).cut_off(8)
    expected, resumed = Run(tmp_path / "whole"), Run(tmp_path)
    for run in (expected, resumed):
        change(run)
    with caplog.at_level(logging.INFO):
        assert resumed.train() == expected.train()
    assert resumed.batches == expected.batches and said in caplog.text


class Refusing:
    """``agreement``, with a peer whose data are others; only at the first time."""

    def __init__(self) -> None:
        self.asked = 0

    def agreed(self, work: Callable[[], Any]) -> list[Any]:
        self.asked += 1
        if self.asked == 1:
            work()
            raise ValueError("The peer has other data.")
        return agreement.agreed(work)

    def __getattr__(self, name: str) -> Any:
        return getattr(agreement, name)


def test_no_rank_continues_if_another_cannot(
    tmp_path: Path, whole: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Run(tmp_path).cut_off(8)
    resumed = Run(tmp_path)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(progress_file, "agreement", Refusing())
        assert resumed.train() == whole
    assert resumed.batches == [6] * 10 + [12] * 10 and "The peer has other data." in caplog.text


def test_progress_of_an_earlier_iteration_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cut = Run(tmp_path)
    cut.cut_off(8)
    resumed = Run(tmp_path)
    kept = cut.file.read_bytes()
    resumed.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=11), lambda: cut.file.write_bytes(kept))
    with caplog.at_level(logging.INFO):
        resumed.train()
    assert resumed.batches[-10:] == [12] * 10
    assert "is of another evaluation (iteration 6, not 12) and not used." in caplog.text


def test_metric_that_cannot_be_saved_is_a_warning_when_attached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Window(Metric):
        def reset(self) -> None:
            self.last = deque[int](maxlen=3)

        def update(self, output: Any) -> None:
            self.last.append(1)

        def compute(self) -> float:
            return float(len(self.last))

    with caplog.at_level(logging.WARNING):
        run = Run(tmp_path, metrics={"window": Window()})
        assert [record.getMessage() for record in caplog.records] == [
            "The evaluation of val always starts at its first batch: its metric 'window' cannot be saved: Window keeps "
            "a collections.deque in last, which is not plain data."
        ]
        assert run.train() == [{"val/window": 3.0}] * 2
    assert len([record for record in caplog.records if "window" in record.getMessage()]) == 1
    assert not run.file.exists() and len(run.batches) == 20


def test_file_that_cannot_be_written_costs_no_training(
    tmp_path: Path, whole: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "progress").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert Run(tmp_path).train() == whole
    assert "The progress of the evaluation of val is not saved: Not a directory" in caplog.text


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="progress_every must be at least 1 batch, got 0"):
        Evaluation(create_evaluator(nn.Linear(1, 1), lambda model, batch: batch), [], progress="x", progress_every=0)


# -- evaluations that the resumed run has to repeat -------------------------------------------------------------------


def evaluated(trainer: Trainer, event: Any, seen: Callable[[], None]) -> list[Any]:
    """Attach an evaluation with random predictions; gets ``(iteration, value)`` of each."""
    found = list[Any]()

    def predict(model: nn.Module, batch: Any) -> Any:
        seen()
        return torch.rand(1)

    evaluator = create_evaluator(trainer.update.model, predict, {"drawn": Average()})  # type: ignore[attr-defined]
    Evaluation(evaluator, [0] * 5).attach(trainer, event)
    trainer.add_event_handler(
        TrainingEvents.EVALUATION_COMPLETED,
        lambda: found.append((trainer.state.iteration, trainer.state.metrics["val/drawn"])),
    )
    return found


@pytest.mark.parametrize("event", [Events.STARTED, Events.ITERATION_COMPLETED(every=3), Events.EPOCH_COMPLETED])
def test_evaluation_stopped_twice_is_run_by_the_resumed_run_at_its_iteration(event: Any, tmp_path: Path) -> None:
    """Without progress: from its first batch, at its iteration, from the random numbers that it would have had."""

    def run(folder: Path, stop_at: int | None) -> tuple[Trainer, list[Any]]:
        trainer, count = trainer_of(), [0]

        def seen() -> None:
            count[0] += 1
            if count[0] == stop_at:
                trainer.request_stop("enough")

        found = evaluated(trainer, event, seen)
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=100))
        torch.manual_seed(5 if checkpoint.resume() is None else 99)
        trainer.run(numbers_loader(12), max_epochs=2)
        return trainer, found

    _, whole = run(tmp_path / "whole", None)
    first, nothing = run(tmp_path / "cut", 2)
    stopped_at = first.state.iteration
    second, nothing_more = run(tmp_path / "cut", 3)
    assert (first.state.status, second.state.status) == ("interrupted", "interrupted")
    assert second.state.iteration == stopped_at == whole[0][0], "it trained past the evaluation"
    _, found = run(tmp_path / "cut", None)
    assert nothing == nothing_more == [] and found == whole


def test_training_loader_is_evaluated_whole_in_a_resumed_epoch(tmp_path: Path) -> None:
    """The loader is in the middle of its pass, for the training only."""

    def run(folder: Path, updates: int) -> list[Any]:
        trainer, data = trainer_of(), numbers_loader(12, shuffle=True)
        model = trainer.update.model  # type: ignore[attr-defined]  # an Update
        evaluator = create_evaluator(model, lambda model, batch: batch[0], {"mean": Average()})
        Evaluation(evaluator, data).attach(trainer, Events.ITERATION_COMPLETED(every=5))
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=4))
        checkpoint.resume()
        counted, ran, places = list[Any](), evaluator.state, list[int]()
        for event in (TrainingEvents.EVALUATION_STARTED, TrainingEvents.EVALUATION_COMPLETED):
            trainer.add_event_handler(event, lambda: places.append(data.sampler.start))
        trainer.add_event_handler(
            TrainingEvents.EVALUATION_COMPLETED, lambda: counted.append((ran.iteration, ran.metrics["mean"]))
        )
        trainer.run(data, max_iters=updates)
        assert len(set(places)) < 2, "the loader did not get its place back"
        return counted

    whole = run(tmp_path / "whole", 6)
    assert run(tmp_path / "cut", 4) == []
    resumed = run(tmp_path / "cut", 6)
    assert [count for count, _ in whole] == [count for count, _ in resumed] == [6]
    assert torch.equal(whole[0][1], resumed[0][1])


def test_old_stop_file_does_not_stop_an_evaluation_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    trainer = trainer_of()
    evaluated(trainer, Events.STARTED, lambda: None)
    StopFile(tmp_path / "stop").attach(trainer)

    assert trainer.run(numbers_loader(12), max_epochs=1).status == "completed"


def test_limit_stops_before_training_in_an_evaluation_at_the_start() -> None:
    trainer = trainer_of()
    evaluated(trainer, Events.STARTED, lambda: time.sleep(0.02))
    WallClockLimit(seconds=0.05, margin_s=0).attach(trainer)
    state = trainer.run(numbers_loader(12), max_epochs=2)

    assert (state.status, state.iteration, state.evaluations) == ("interrupted", 0, 0)


def test_stop_file_stops_before_training_in_an_evaluation_at_the_start(tmp_path: Path) -> None:
    trainer = trainer_of()
    evaluated(trainer, Events.STARTED, lambda: (tmp_path / "stop").touch())
    StopFile(tmp_path / "stop").attach(trainer)
    state = trainer.run(numbers_loader(12), max_epochs=2)

    assert (state.status, state.iteration, state.evaluations) == ("interrupted", 0, 0)
