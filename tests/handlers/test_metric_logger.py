"""Interval means are exact, cost nothing between log points, and reach every sink once."""

import json
import logging.handlers
import math
import pickle
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import Tensor

from ignite_engine import Trainer, TrainingEvents, Update, loader
from ignite_engine.handlers import EMA, Checkpoint, LRSchedule, MetricLogger
from ignite_engine.handlers.meters import Meter
from ignite_engine.schedules import warmup_linear
from tests.kit.floors import needs
from tests.kit.processes import ranks
from tests.kit.resume import leaves
from tests.kit.tiny import Numbers, linear, mse, numbers_loader, trainer_of

READS = ("item", "tolist", "__float__", "__bool__", "__int__", "__index__", "numpy", "cpu", "__array__")
EVERY_2 = Events.ITERATION_COMPLETED(every=2)


@contextmanager
def reads_counted():
    """Counts every way in which a tensor's value reaches Python."""
    counts, before = Counter(), {name: getattr(Tensor, name) for name in READS}

    def counted(name):
        def read(self, *args, **kwargs):
            counts[name] += 1
            return before[name](self, *args, **kwargs)

        return read

    try:
        for name in READS:
            setattr(Tensor, name, counted(name))
        yield counts
    finally:
        for name, function in before.items():
            setattr(Tensor, name, function)


def counting(values):
    """A trainer whose update returns ``values``, one an iteration, for data of ``range``."""
    return Trainer(lambda engine, batch: values[batch])


def writing(trainer, event, **values):
    trainer.add_event_handler(event, lambda: trainer.state.metrics.update(values))


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def logged(values, folder, event=Events.ITERATION_COMPLETED, attach=lambda trainer: None):
    """The lines of a run whose update returns these values."""
    trainer = counting(values)
    attach(trainer)
    MetricLogger(folder, console=False).attach(trainer, event)
    trainer.run(range(len(values)))
    return lines(folder)


# -- the lines of a log ------------------------------------------------------------------------------------------------


@pytest.mark.row("F3")
def test_mean_of_each_interval_is_exact(tmp_path):
    values = [{"loss": torch.tensor(2.0**-index), "grad_norm": torch.tensor(float(index))} for index in range(8)]
    found = logged(values, tmp_path, Events.ITERATION_COMPLETED(every=3))

    assert found == [
        {"iteration": 3, "epoch": 1, "grad_norm": 1.0, "loss": (1 + 0.5 + 0.25) / 3},
        {"iteration": 6, "epoch": 1, "grad_norm": 4.0, "loss": (0.125 + 0.0625 + 0.03125) / 3},
        {"iteration": 8, "epoch": 1, "grad_norm": 6.5, "loss": (2.0**-6 + 2.0**-7) / 2},  # the last may be shorter
    ]
    assert [list(line)[:2] for line in found] == [["iteration", "epoch"]] * 3


EACH, EPOCH = Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED
LINES = {
    "in double precision": ([16777216.0, 1.0, 1.0], EPOCH, None, [(3, {"loss": 16777218 / 3})]),
    "written by others once": (
        [1.0, 2.0, 3.0, 4.0],
        EPOCH,
        Events.ITERATION_COMPLETED(once=2),
        [(2, {"mine": 5.0}), (4, {"loss": 2.5})],
    ),
    "joined at the epoch's end": (
        [1.0, 2.0],
        EACH,
        EPOCH,
        [(1, {"loss": 1.0}), (2, {"loss": 2.0, "mine": 5.0})],
    ),
    "where the update has them": ([1.0, {"loss": 3.0, "aux": 5.0}], EPOCH, None, [(2, {"aux": 5.0, "loss": 2.0})]),
    "not finite": ([math.nan, math.inf], EACH, None, [(1, {"loss": "nan"}), (2, {"loss": "inf"})]),
}


@pytest.mark.parametrize(("values", "event", "other", "expected"), LINES.values(), ids=LINES)
def test_lines_of_a_log(values, event, other, expected, tmp_path):
    values = [torch.tensor(value) if isinstance(value, float) else value for value in values]
    found = logged(values, tmp_path, event, lambda trainer: other and writing(trainer, other, mine=5.0))

    assert found == [{"iteration": iteration, "epoch": 1, **line} for iteration, line in expected]


def test_one_number_is_a_float_and_several_are_lists_to_whoever_reads_them():
    ones = [torch.tensor(1.5), torch.tensor([1.5]), np.float32(1.5), np.array(1.5), 1.5]
    given = {**{str(place): one for place, one in enumerate(ones)}, "a": torch.tensor([1.0, 2.0]), "b": np.ones((2, 1))}
    trainer, seen = counting([0.0]), {}
    writing(trainer, Events.ITERATION_COMPLETED, **given)
    MetricLogger(console=False).attach(trainer)
    trainer.add_event_handler(TrainingEvents.METRICS_READY, lambda: seen.update(trainer.state.metrics))
    trainer.run(range(1))

    assert (seen["a"], seen["b"]) == ([1.0, 2.0], [[1.0], [1.0]])
    assert [(seen[str(place)], type(seen[str(place)])) for place in range(5)] == [(1.5, float)] * 5


def test_a_value_that_is_a_parameter_or_a_buffer_is_logged_as_it_was(tmp_path):
    """CLIP's usual line is ``{"logit_scale": model.logit_scale.detach()}``: it shares the parameter's memory."""
    scale, buffer = torch.nn.Parameter(torch.tensor(0.0)), torch.zeros(1)

    def update(engine, batch):
        with torch.no_grad():
            scale.add_(1.0)
            buffer.add_(2.0)
        return {"loss": torch.tensor(0.0), "scale": scale.detach(), "parameter": scale, "buffer": buffer.view(())}

    MetricLogger(tmp_path, console=False).attach(trainer := Trainer(update), Events.ITERATION_COMPLETED(every=4))
    trainer.run(range(4))

    (line,) = lines(tmp_path)
    assert (line["scale"], line["parameter"], line["buffer"]) == (2.5, 2.5, 5.0)


@pytest.mark.parametrize(
    "broken_after", [*(pytest.param(each, marks=pytest.mark.nightly) for each in (1, 5)), 3, 6, 11]
)
def test_resumed_run_has_the_lines_of_the_whole_one(broken_after, tmp_path):
    def run(folder, at=99):
        trainer = trainer_of()
        MetricLogger(folder, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=3))
        checkpoint = Checkpoint(folder / "checkpoints")
        checkpoint.attach(trainer, EVERY_2)
        trainer.add_event_handler(TrainingEvents.RESUME_POINT(once=at), lambda: 1 / 0)
        checkpoint.resume()
        trainer.run(numbers_loader(12, 2, shuffle=True), max_epochs=2)

    run(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "cut", broken_after)
    run(tmp_path / "cut")

    assert [line["iteration"] for line in lines(tmp_path / "whole")] == [3, 6, 9, 12]
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


# -- what is kept, and read, between log points ------------------------------------------------------------------------


@pytest.mark.row("F3")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_is_read_between_log_points(precision):
    def reads(log):
        trainer = trainer_of(linear(), 2, log_grad_norm=True, precision=precision)  # clipping reads a norm on the CPU
        if log:
            schedule = warmup_linear(trainer.update.optimizers["optimizer"], warmup=2, total=100)
            LRSchedule(schedule).attach(trainer)
            EMA(0.9).attach(trainer)
            MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=4))
        by_iteration = []
        with reads_counted() as counts:
            trainer.add_event_handler(
                TrainingEvents.RESUME_POINT, lambda: (by_iteration.append(counts.total()), counts.clear())
            )
            trainer.run(numbers_loader(48, 2))
        return by_iteration[1:]  # the first counts what happened before it too

    bare, with_log = reads(False), reads(True)
    assert set(bare) <= {0, 1} and len(bare) == 11
    # loss and grad_norm, once each, at 4, 8 and 12
    assert [ours - theirs for ours, theirs in zip(with_log, bare, strict=True)] == [0, 0, 2] + [0, 0, 0, 2] * 2


WEIGHT = torch.ones(1, requires_grad=True)


def with_predictions(engine, batch):
    logits = torch.full((100, 10), float(batch))
    return {"loss": logits[0, 0], "predictions": logits, "word": "good", "none": None}


@pytest.mark.parametrize(
    ("update", "sizes"),
    [
        (with_predictions, [4, 8, 12]),
        (lambda engine, batch: (WEIGHT * batch).sum(), [4, 8, 12]),  # with its graph
        (lambda engine, batch: (torch.ones(3), torch.ones(3)), [0, 0, 0]),
    ],
)
def test_of_an_output_the_scalars_alone_are_kept(update, sizes):
    trainer, handler, found = Trainer(update), MetricLogger(console=False), []
    handler.attach(trainer, Events.EPOCH_COMPLETED)

    def measure():
        tensors = [value for _, value in leaves(handler.state_dict()) if isinstance(value, Tensor)]
        assert not any(value.requires_grad for value in tensors)
        found.append(sum(value.untyped_storage().nbytes() for value in tensors))

    trainer.add_event_handler(TrainingEvents.RESUME_POINT, measure)
    metrics = trainer.run(range(4)).metrics

    assert found[:3] == sizes and metrics == ({"loss": 1.5} if sizes[0] else {})


def test_long_interval_takes_no_more_memory_and_no_larger_checkpoint_than_a_short_one():
    handler, sizes, kept = MetricLogger(console=False), [], []
    trainer = Trainer(lambda engine, batch: {"loss": torch.tensor(float(batch)), "grad_norm": torch.tensor(1.0)})
    trainer.state.meters["most"] = Meter("max", of="loss")
    handler.attach(trainer, Events.EPOCH_COMPLETED)

    def measure():
        state = handler.state_dict()
        sizes.append(len(pickle.dumps(state)))
        kept.append([value.numel() for _, value in leaves(state) if isinstance(value, Tensor)])

    trainer.add_event_handler(TrainingEvents.RESUME_POINT(every=50), measure)
    metrics = trainer.run(range(2000)).metrics

    assert max(map(sum, kept)) < 400 and max(map(len, kept)) < 10  # each is a record of its own in a file
    assert max(sizes[2:]) < 1.5 * max(sizes[:8])
    assert (metrics["loss"], metrics["most"]) == (1999 / 2, 1999.0)


def test_second_run_starts_a_new_interval():
    trainer, given = counting([1.0, 2.0, 3.0]), Meter("sum")
    trainer.state.meters["given"] = given
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: given.update(1.0))
    MetricLogger(console=False).attach(trainer, EVERY_2)
    broken = trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(range(3))
    broken.remove()
    seen = []
    trainer.add_event_handler(TrainingEvents.METRICS_READY, lambda: seen.append(dict(trainer.state.metrics.fresh)))
    trainer.run(range(3))

    assert seen == [{"loss": 1.5, "given": 2.0}, {"loss": 3.0, "given": 1.0}]


# -- values that are not finite ---------------------------------------------------------------------------------------


def of_nonfinite(caplog):
    return [record.getMessage() for record in caplog.records if "finite" in record.getMessage()]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_first_loss_that_is_not_finite_is_one_line_at_the_log_point_after_it(bad, caplog):
    losses, at = [1.0, 1.0, 1.0, 1.0, bad, 1.0, 1.0, bad, 1.0, 1.0], {}
    # a norm may be infinite: it is, wherever fp16 overflows and the step is skipped
    trainer = counting([{"loss": loss, "grad_norm": math.inf} for loss in losses])
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    trainer.add_event_handler(
        TrainingEvents.RESUME_POINT, lambda: at.update({trainer.state.iteration: len(of_nonfinite(caplog))})
    )
    trainer.run(range(10))

    (line,) = of_nonfinite(caplog)
    assert (at[5], at[6]) == (0, 1) and f"up to iteration 6 is {bad}" in line and "rank" not in line


def test_resumed_run_does_not_repeat_the_line_and_ends_with_its_own(tmp_path, caplog):
    for end in (4, 8):
        trainer = counting([1.0, math.nan, 1.0, 1.0, 1.0, 1.0, math.nan, 1.0])
        MetricLogger(console=False).attach(trainer, EVERY_2)
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(range(8), max_iters=end)

    first, last = of_nonfinite(caplog)
    assert "iteration 2 is nan" in first and "ended" in last and "iteration 2" in last


@needs("rank_invariant")
def test_rank_0_says_it_of_any_rank_and_names_none_where_each_has_the_loss_of_all():
    def work(rank):
        data, answers = Numbers(8), []
        data.targets[5] = math.nan
        for invariant in (False, True):
            said, model = logging.handlers.BufferingHandler(99), linear()
            logging.getLogger("ignite_engine").addHandler(said)
            update = Update(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                mse,
                accumulate="rank_invariant" if invariant else None,
            )
            trainer = Trainer(update, global_micro_batches=4 if invariant else None)
            MetricLogger(console=False).attach(trainer)
            trainer.run(loader(data, 2), max_epochs=1)
            lines = [record.getMessage() for record in said.buffer]
            answers.append([line for line in lines if "the first that" in line])
        return answers

    ((named,), (line,)), others = ranks(2, work)
    assert "on rank" in named and "rank" not in line and others == [[], []]
