"""What the folder of a run has beside its log: digests of the weights, its starts and stops."""

import json
import math

import pytest
import torch
from ignite.engine import Events

from ignite_engine import TrainingEvents
from ignite_engine.handlers import Checkpoint, DigestTrail, MetricLogger
from tests.kit.processes import ranks
from tests.kit.sharded import look_at, train, trainer_in
from tests.kit.tiny import linear, numbers_loader, trainer_of


def lines(folder, name="trail"):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def run(folder, every=2, change=None, **save):
    """Three epochs of 6 batches, from where the folder has them."""
    trainer, checkpoint = trainer_of(linear(dropout=True)), Checkpoint(folder / "checkpoints", **save)
    DigestTrail(folder, every=every).attach(trainer)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=3))
    if change is not None:
        change(trainer)
    checkpoint.resume()
    trainer.run(numbers_loader(shuffle=True), max_epochs=3)
    return trainer


def test_one_bit_of_any_tensor_changes_its_digest_and_no_other(tmp_path):
    """Of a learning rate of 0: after each iteration one bit of one tensor."""
    trainer = trainer_of(lr=0.0)
    named = dict(trainer.update.model.named_parameters())
    DigestTrail(tmp_path, every=1).attach(trainer)

    @trainer.on(TrainingEvents.OPTIMIZER_STEP_COMPLETED)
    def change_a_bit():
        if trainer.state.iteration > 2:
            last = list(named.values())[trainer.state.iteration - 3].data.view(-1)
            last[-1] = torch.nextafter(last[-1], torch.tensor(math.inf))

    trainer.run(numbers_loader(), max_epochs=1)
    found = lines(tmp_path)

    assert found[0]["all"] == found[1]["all"] and len({line["all"] for line in found[1:]}) == 5
    for before, after, name in zip(found[1:], found[2:], named, strict=False):
        assert list(before["weights"]) == list(named)
        assert [key for key in named if before["weights"][key] != after["weights"][key]] == [name]


def test_a_resumed_run_writes_no_line_twice_and_the_lines_of_the_whole_one(tmp_path):
    def end(trainer):
        trainer.add_event_handler(TrainingEvents.RESUME_POINT(once=11), lambda: 1 / 0)  # a line after its checkpoint

    run(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "cut", change=end)
    run(tmp_path / "cut")

    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert [line["iteration"] for line in lines(tmp_path / "whole")] == [*range(2, 19, 2)]


# -- starts and stops --------------------------------------------------------------------------------------------------


def begin(folder, stop_at=None, fail_at=None):
    trainer = trainer_of()
    MetricLogger(folder, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    checkpoint = Checkpoint(folder / "checkpoints")
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    checkpoint.resume()

    @trainer.on(Events.ITERATION_COMPLETED)
    def end():
        if trainer.state.iteration == stop_at:
            trainer.request_stop("enough")
        if trainer.state.iteration == fail_at:
            raise ZeroDivisionError("no")

    trainer.run(numbers_loader(), max_epochs=2)


def test_each_start_and_how_it_ended_is_kept(tmp_path):
    begin(tmp_path, stop_at=5)
    with pytest.raises(ZeroDivisionError):
        begin(tmp_path, fail_at=9)
    begin(tmp_path)

    assert [(line["what"], line["iteration"]) for line in lines(tmp_path, "starts")] == [
        ("started", 0),
        ("interrupted", 5),
        ("resumed", 5),
        ("failed", 9),
        ("resumed", 8),
        ("completed", 12),
    ]


def test_history_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "starts.jsonl").mkdir()
    begin(tmp_path)

    assert lines(tmp_path, "metrics")[-1]["iteration"] == 12


# -- a handler that looks at the model ---------------------------------------------------------------------------------


@pytest.mark.nightly
def test_with_fsdp2_a_forward_of_a_handler_changes_nothing(tmp_path):
    """At any event: no weight changes by it, and none is read that was freed."""

    def trained(event=None):
        trainer, checkpoint, data = trainer_in("fsdp", tmp_path / str(event))
        if event is not None:
            checkpoint.attach(trainer, Events.ITERATION_COMPLETED)
            trainer.add_event_handler(event, look_at, trainer.update.model)
        return train(trainer, data)["state"]

    def work(rank):
        events = (TrainingEvents.OPTIMIZER_STEP_STARTED, TrainingEvents.OPTIMIZER_STEP_COMPLETED)
        return [trained(event) == trained() for event in events]

    assert ranks(2, work) == [[True] * 2] * 2
