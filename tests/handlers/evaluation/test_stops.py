"""An evaluation that was stopped is made first by the run that resumes, to the bits of a whole one."""

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import EpochMetric, Loss
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ignite_engine import TrainingEvents, create_evaluator, loader
from ignite_engine.handlers import Checkpoint, Evaluation
from tests.kit import saved
from tests.kit.resume import leaves, same_bits, saved_in
from tests.kit.tiny import Numbers, linear, numbers_loader, trainer_of, weights

EACH = Events.ITERATION_COMPLETED


class Stream(IterableDataset):
    """Without a length and without a state."""

    def __iter__(self):
        return (Numbers(20)[index] for index in range(20))


class Drawn:
    """Ten batches in an order that is drawn in each pass."""

    def __iter__(self):
        numbers = Numbers(20)
        for places in torch.randperm(20).split(2):
            yield numbers.inputs[places], numbers.targets[places]


class Run:
    """One process's part of a run of 12 updates that evaluates 10 batches at its event, with random predictions."""

    def __init__(self, folder, event=None, *, data=None, background=False, metrics=None, best="val/loss", **options):
        self.trainer = trainer = trainer_of(linear(dropout=True))
        self.numbers, self.stop_at = Numbers(20), None
        # the iteration of each batch that was evaluated; the metrics of each evaluation
        self.batches, self.measured = [], []

        def predict(model, batch):
            self.batches.append(trainer.state.iteration)
            if len(self.batches) == self.stop_at:
                trainer.request_stop("enough")
            return model(batch[0]) * torch.rand(1), batch[1]

        spread = EpochMetric(lambda predictions, targets: (predictions.std() + targets.std()).item())
        metrics = metrics or {"loss": Loss(nn.functional.mse_loss), "spread": spread}
        self.evaluator = create_evaluator(trainer.update.model, predict, metrics)
        data = loader(self.numbers, 2) if data is None else data()
        Evaluation(self.evaluator, data, **options).attach(trainer, event or EACH(every=6))
        for name in (TrainingEvents.EVALUATION_STARTED, TrainingEvents.EVALUATION_COMPLETED):
            trainer.add_event_handler(name, lambda: torch.rand(1))  # as who samples from the model there
        trainer.add_event_handler(
            TrainingEvents.EVALUATION_COMPLETED, lambda: self.measured.append(dict(trainer.state.metrics))
        )
        self.folder, self.checkpoint = folder, Checkpoint(folder, background=background, best=best)
        self.checkpoint.attach(trainer, EACH(every=100))

    def train(self, stop_at=None):
        """To the end, or until so many batches were evaluated; from the newest checkpoint if there is one."""
        self.stop_at = stop_at
        fresh = self.checkpoint.resume() is None
        torch.manual_seed(5 if fresh else 99)  # what a resumed run draws it has from its checkpoint
        self.trainer.run(numbers_loader(12, shuffle=True), max_epochs=2)
        assert self.trainer.state.status == ("completed" if stop_at is None else "interrupted")
        return self


STREAM = {"resumes": True, "data": lambda: DataLoader(Stream(), 2), "limit": 9}
CASES = {
    "at the start": {"event": Events.STARTED},
    "at the start of an epoch": {"event": Events.EPOCH_STARTED(once=2), "best": None},
    "beside a save": {"event": EACH(every=3), "background": True},
    "at the end, without a length": {"event": Events.COMPLETED, "data": lambda: DataLoader(Stream(), 2)},
    "goes on in a drawn order": {"resumes": True, "data": Drawn},
    "goes on in a stream": STREAM,
}
LAST = ("beside a save", "at the end, without a length", "goes on in a stream")
"""Of these it is the last one every day, of the others the first."""


@pytest.mark.row("C4", "C5")
@pytest.mark.parametrize(
    ("case", "last"),
    [
        pytest.param(case, last, marks=[] if last == (case in LAST) else pytest.mark.nightly)
        for case in CASES
        for last in (False, True)
    ],
)
def test_a_stopped_evaluation_is_made_by_the_resumed_run_to_the_same_bits(case, last, tmp_path):
    """Though that is stopped within it, too: nothing is trained between the evaluation and the end of the run."""
    options = CASES[case]
    whole = Run(tmp_path / "whole", **options).train()
    assert whole.batches and whole.measured
    at, each = whole.batches[-1 if last else 0], options.get("limit", 10)
    done = len(whole.batches) - each if last else 0
    for before, stop_at in ((done, done + 2), (0, 3)):
        cut = Run(tmp_path / "cut", **options).train(stop_at)
        assert cut.batches == whole.batches[:before] + [at] * (stop_at - before)
        assert cut.trainer.state.iteration == saved.iterations(tmp_path / "cut")[-1] == at
        assert len(cut.measured) == before // each
    resumed = Run(tmp_path / "cut", **options).train()

    first = whole.batches.index(at)
    # of an evaluation that goes on from the first stop: the second one is at the same iteration, and saves nothing
    assert resumed.batches == whole.batches[first + 2 * ("resumes" in options) :]
    assert repr(resumed.measured) == repr(whole.measured[first // each :])
    assert resumed.trainer.state.evaluations == whole.trainer.state.evaluations
    assert torch.equal(weights(resumed.trainer), weights(whole.trainer))
    expected, found = (dict(leaves(saved_in(each.folder))) for each in (whole, resumed))
    assert expected.keys() == found.keys()
    assert not [key for key, value in expected.items() if not same_bits(value, found[key])]


@pytest.mark.parametrize(("at", "rest"), [(1, [2, 4, 6, 8, 10]), (8, [10])])
def test_batches_that_were_evaluated_are_not_loaded_again(at, rest, tmp_path):
    Run(tmp_path, resumes=True).train(stop_at=at)
    resumed, counted = Run(tmp_path, resumes=True), []
    resumed.evaluator.add_event_handler(EACH(every=2), lambda: counted.append(resumed.evaluator.state.iteration))
    resumed.train()
    assert resumed.numbers.loaded == [*range(2 * at, 20), *range(20)]
    assert counted == [*rest, 2, 4, 6, 8, 10], "handlers of the evaluator count on"


@pytest.mark.parametrize("change", [{"limit": 9}, {"metrics": {"loss": Loss(nn.functional.mse_loss)}}])
def test_another_evaluation_starts_at_its_first_batch(change, tmp_path):
    Run(tmp_path, resumes=True).train(stop_at=8)
    resumed = Run(tmp_path, resumes=True, **change).train()
    assert resumed.batches == [6] * change.get("limit", 10) + [12] * change.get("limit", 10)


def test_a_stream_without_a_state_is_replayed_and_that_is_said(tmp_path, caplog):
    Run(tmp_path, **STREAM).train(stop_at=7)
    assert Run(tmp_path, **STREAM).train().batches == [6] * 2 + [12] * 9
    assert "7 batches" in caplog.text and "skipped" in caplog.text
