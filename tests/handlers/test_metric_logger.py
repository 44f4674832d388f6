"""Interval means are exact, cost nothing between log points, and reach every sink once."""

import io
import json
import logging
import math
import pickle
from collections import Counter
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import Tensor

from ignite_engine import Trainer, TrainingEvents, Update, Updates, loader
from ignite_engine.checkpointing.nested import walk
from ignite_engine.handlers import Checkpoint, LRSchedule, Meter, MetricLogger, warmup_linear
from ignite_engine.handlers.meters import CHUNK
from tests.kit.tiny import Numbers, linear, mse, numbers_loader, on_two_ranks, resume_and_run, trainer_of
from tests.ranks.forkserver import on_ranks

READS = ("item", "tolist", "__float__", "__bool__", "__int__", "__index__", "numpy", "cpu", "__array__")


@contextmanager
def reads_counted():
    """Counts every way in which a tensor's value reaches Python."""
    counts = Counter()
    before = {name: getattr(Tensor, name) for name in READS}

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
    """A trainer whose update returns ``values``, one an iteration."""

    def update(engine, batch):
        return values[batch]

    return Trainer(update)


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.row("F3")
def test_mean_of_each_interval_is_exact(tmp_path):
    values = [{"loss": torch.tensor(2.0**-index), "grad_norm": torch.tensor(float(index))} for index in range(8)]
    trainer = counting(values)
    MetricLogger(tmp_path, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    trainer.run(range(8))

    expected = [
        (3, (1 + 0.5 + 0.25) / 3, 1.0),
        (6, (0.125 + 0.0625 + 0.03125) / 3, 4.0),
        (8, (2.0**-6 + 2.0**-7) / 2, 6.5),  # a run's last interval may be shorter
    ]
    assert [(line["iteration"], line["loss"], line["grad_norm"]) for line in lines(tmp_path)] == expected
    assert [list(line)[:2] for line in lines(tmp_path)] == [["iteration", "epoch"]] * 3


def test_mean_is_taken_in_double_precision():
    trainer = counting([torch.tensor(16777216.0), torch.tensor(1.0), torch.tensor(1.0)])
    MetricLogger(console=False).attach(trainer, Events.EPOCH_COMPLETED)

    assert trainer.run(range(3)).metrics["loss"] == 16777218 / 3


@pytest.mark.row("F3")
def test_nothing_is_read_between_log_points(tmp_path):
    def reads(precision, log):
        trainer = trainer_of(linear(), 2, log_grad_norm=True, precision=precision)  # clipping reads a norm on the CPU
        if log:
            optimizer = trainer.update.optimizers["optimizer"]
            LRSchedule(warmup_linear(optimizer, warmup=2, total=100)).attach(trainer)
            MetricLogger(tmp_path, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=4))
        by_iteration = []
        with reads_counted() as counts:
            trainer.add_event_handler(
                TrainingEvents.RESUME_POINT, lambda: (by_iteration.append(counts.total()), counts.clear())
            )
            trainer.run(numbers_loader(48, 2))
        return by_iteration[1:]  # the first counts what happened before it too

    for precision in ("fp32", "bf16"):
        bare, logged = reads(precision, log=False), reads(precision, log=True)
        # clipping reads the norm on the CPU, where it costs nothing; nothing else reads
        assert set(bare) <= {0, 1} and len(bare) == 11
        # loss and grad_norm, once each, at 4, 8 and 12
        assert [ours - theirs for ours, theirs in zip(logged, bare, strict=True)] == [0, 0, 2] + [0, 0, 0, 2] * 2


def test_values_written_by_others_are_written_once(tmp_path):
    trainer = counting([1.0, 2.0, 3.0, 4.0])

    @trainer.on(Events.ITERATION_COMPLETED(once=2))
    def produce():
        trainer.state.metrics["val/loss"] = 0.25

    MetricLogger(tmp_path, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=4))
    trainer.run(range(4))

    assert lines(tmp_path) == [
        {"iteration": 2, "epoch": 1, "val/loss": 0.25},
        {"iteration": 4, "epoch": 1, "loss": 2.5},
    ]


def test_value_written_at_the_epochs_end_joins_the_line_of_its_iteration(tmp_path):
    trainer = counting([1.0, 2.0])
    MetricLogger(tmp_path, console=False).attach(trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: trainer.state.metrics.__setitem__("a", 5.0))
    trainer.run(range(2))

    assert lines(tmp_path) == [
        {"iteration": 1, "epoch": 1, "loss": 1.0},
        {"iteration": 2, "epoch": 1, "a": 5.0, "loss": 2.0},
    ]


def test_values_appear_where_the_update_does(tmp_path):
    trainer = counting([{"loss": 1.0}, {"loss": 3.0, "aux": 5.0}])
    MetricLogger(tmp_path, console=False).attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run(range(2))

    assert lines(tmp_path) == [{"iteration": 2, "epoch": 1, "aux": 5.0, "loss": 2.0}]


def test_nan_is_logged(tmp_path):
    trainer = counting([torch.tensor(math.nan)])
    MetricLogger(tmp_path, console=False).attach(trainer)
    trainer.run(range(1))

    assert lines(tmp_path) == [{"iteration": 1, "epoch": 1, "loss": "nan"}]


def test_second_run_starts_a_new_interval():
    trainer = counting([1.0, 2.0, 3.0])
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: trainer.terminate(skip_completed=True))
    trainer.run(range(3))
    trainer.state.max_epochs = None

    assert trainer.run(range(3)).metrics["loss"] == 1.5


@pytest.mark.parametrize("stop_at", range(1, 12))
def test_resumed_run_has_the_lines_of_the_whole_one(stop_at, tmp_path):
    def run(directory, die_at=None):
        trainer = trainer_of()
        MetricLogger(directory, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=3))
        resume_and_run(trainer, directory, die_at, save_every=2)

    run(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "cut", die_at=stop_at)
    run(tmp_path / "cut")

    assert [line["iteration"] for line in lines(tmp_path / "whole")] == [3, 6, 9, 12]
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


@pytest.mark.row("F1")
def test_console_prints_a_line_at_each_log_point(capsys):
    trainer = counting([1.0, 2.0, 3.0, 4.0])
    MetricLogger().attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(range(4))

    assert capsys.readouterr().out.splitlines() == [
        "   iter  epoch       loss",
        "      2      1        1.5",
        "      4      1        3.5",
    ]


def test_console_has_the_totals_of_several_updates_in_their_order_from_the_start(tmp_path, capsys):
    """Though the first is not made in the first interval."""
    model = linear()
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]

    def in_parts(model, batch):
        return {"real": mse(model, batch), "fake": mse(model, batch)}

    updates = Updates(
        {"generator": Update(model, optimizers[0], mse), "critic": Update(model, optimizers[1], in_parts)},
        every={"generator": 4},
    )
    trainer = Trainer(updates)
    MetricLogger(tmp_path).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(loader(Numbers(16), 2), max_iters=8)

    heading, *lines = map(str.split, capsys.readouterr().out.splitlines())
    assert heading == ["iter", "epoch", "generator/loss", "critic/loss", "critic/loss/real", "critic/loss/fake"]
    assert [line[0] for line in lines] == ["2", "4", "6", "8"] and lines[0][2] == lines[2][2] == "-" != lines[1][2]


def test_console_prints_the_columns_it_is_given(capsys):
    trainer = counting([{"loss": 1.0, "grad_norm": 2.0}])
    MetricLogger(console=["grad_norm"]).attach(trainer)
    trainer.run(range(1))

    assert capsys.readouterr().out.splitlines() == ["   iter  epoch  grad_norm", "      1      1          2"]


def test_further_sinks_get_what_is_new():
    got = []

    class Sink:
        def write(self, iteration, values):
            got.append((iteration, dict(values)))

    trainer = counting([1.0, 3.0])
    MetricLogger(console=False, sinks=[Sink()]).attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run(range(2))

    assert got == [(2, {"epoch": 1, "loss": 2.0})]


# -- what is kept between log points ----------------------------------------------------------------------------------


def bytes_kept(logger):
    """Of the storages that the interval so far keeps alive, as a checkpoint would hold them."""
    return sum(value.untyped_storage().nbytes() for value in kept(logger) if isinstance(value, Tensor))


def kept(logger):
    """The values of the interval so far that are not added up yet."""
    return [value for _, row in logger._rows for value in row.values()]


def test_update_may_return_views_and_whole_predictions_and_a_scalar_of_each_is_kept():
    def update(engine, batch):
        logits = torch.full((100, 10), float(batch))
        return {"loss": logits[0, 0], "predictions": logits, "word": "good", "none": None}

    trainer, logger = Trainer(update), MetricLogger(console=False)
    logger.attach(trainer, Events.EPOCH_COMPLETED)
    sizes = list[int]()
    trainer.add_event_handler(TrainingEvents.RESUME_POINT, lambda: sizes.append(bytes_kept(logger)))
    state = trainer.run(range(4))

    assert sizes[:3] == [4, 8, 12] and state.metrics["loss"] == 1.5
    assert "predictions" not in state.metrics


def test_update_may_return_a_loss_with_its_graph_which_is_not_kept():
    weight = torch.ones(1, requires_grad=True)
    trainer, logger = Trainer(lambda engine, batch: (weight * batch).sum()), MetricLogger(console=False)
    logger.attach(trainer, Events.EPOCH_COMPLETED)
    graphs = list[Any]()
    trainer.add_event_handler(
        TrainingEvents.RESUME_POINT,
        lambda: graphs.extend(value.grad_fn for value in kept(logger)),
    )

    assert trainer.run(range(4)).metrics["loss"] == 1.5
    assert len(graphs) == 6 and set(graphs) == {None}


def test_output_without_a_scalar_is_not_kept():
    trainer, logger = Trainer(lambda engine, batch: (torch.ones(3), torch.ones(3))), MetricLogger(console=False)
    logger.attach(trainer, Events.EPOCH_COMPLETED)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: means.append(logger.state_dict()["rows"]))
    means = list[Any]()

    assert trainer.run(range(4)).metrics == {} and means == [[]]


def test_long_interval_takes_no_more_memory_and_no_larger_checkpoint_than_a_short_one():
    logger, sizes = MetricLogger(console=False), list[tuple[int, int]]()
    trainer = Trainer(lambda engine, batch: {"loss": torch.tensor(float(batch)), "grad_norm": torch.tensor(1.0)})
    trainer.state.meters["most"] = Meter("max", of="loss")
    logger.attach(trainer, Events.EPOCH_COMPLETED)
    trainer.add_event_handler(
        TrainingEvents.RESUME_POINT(every=100),
        lambda: sizes.append((len(kept(logger)), len(pickle.dumps(logger.state_dict())))),
    )
    state = trainer.run(range(5000))

    assert max(count for count, _ in sizes) < 2 * CHUNK
    assert max(size for _, size in sizes[1:]) < 1.5 * max(size for _, size in sizes[:5])
    assert (state.metrics["loss"], state.metrics["most"]) == (4999 / 2, 4999.0)


def test_a_mean_has_the_same_bits_wherever_the_interval_was_saved_and_loaded():
    values = (torch.randn(400, generator=torch.Generator().manual_seed(0)) * 1e3).tolist()

    def mean_of(cut):
        states = []
        for part in filter(None, (range(cut or 0), range(cut or 0, 400))):
            logger = MetricLogger(console=False)
            trainer = Trainer(lambda engine, batch: {"loss": torch.tensor(values[batch]), "grad_norm": 1.0})
            trainer.state.meters["sum"] = Meter("sum", of="loss")
            logger.attach(trainer, Events.EPOCH_COMPLETED)
            if part.start:
                trainer.add_event_handler(Events.STARTED, lambda: logger.load_state_dict(states[-1]))  # noqa: B023
            trainer.add_event_handler(
                Events.ITERATION_COMPLETED(once=len(part)),
                lambda: states.append(torch.load(_saved(logger.state_dict()), weights_only=True)),  # noqa: B023
            )
            trainer.run(part)
        return dict(trainer.state.metrics)

    whole = mean_of(None)
    assert whole["loss"] == pytest.approx(sum(values) / 400)
    for cut in (1, 63, 64, 65, 200, 399):
        assert mean_of(cut) == whole


def test_values_of_an_interval_are_few_tensors_in_a_checkpoint():
    """Each would be a record of its own, and a copy from the device."""
    logger, states = MetricLogger(console=False), list[Any]()

    def update(engine, batch):
        extra = {"accuracy": torch.tensor(batch)} if engine.state.iteration > 25 else {"word": "good", "count": 2}
        return {"loss": torch.tensor(float(batch)), **extra}

    trainer = Trainer(update)
    trainer.state.meters["most"] = Meter("max", of="loss")
    logger.attach(trainer, Events.EPOCH_COMPLETED)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=50), lambda: states.append(logger.state_dict()))
    trainer.run(range(50))
    tensors = [value for _, value in walk(states[0]) if isinstance(value, Tensor)]
    assert len(tensors) == 4 and max(value.numel() for value in tensors) == 50  # two of the loss, and the meter's

    again = MetricLogger(console=False)
    again.load_state_dict(states[0])
    assert [row[1]["loss"].item() for row in again._rows] == [*range(50)] and len(again._rows[0][1]) == 2
    assert again._rows[40] == (41, {"loss": torch.tensor(40.0), "accuracy": torch.tensor(40)})


def _saved(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


# -- values that are not finite ---------------------------------------------------------------------------------------


def nonfinite_lines(caplog):
    return [record.getMessage() for record in caplog.records if "finite" in record.getMessage()]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_first_loss_that_is_not_finite_is_one_line_with_its_iteration(bad, caplog):
    values = [1.0, 1.0, 1.0, 1.0, bad, 1.0, 1.0, bad, 1.0, 1.0]
    trainer, at = counting([torch.tensor(value) for value in values]), list[tuple[int, int]]()
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    trainer.add_event_handler(
        TrainingEvents.RESUME_POINT, lambda: at.append((trainer.state.iteration, len(nonfinite_lines(caplog))))
    )
    trainer.run(range(10))

    assert (dict(at)[5], dict(at)[6]) == (0, 1), "read at a log point, not before"
    assert nonfinite_lines(caplog) == [
        f"The loss of iteration 5 is {bad}, the first that is not finite; the run continues. "
        "Check the data of that iteration, the learning rate and the precision."
    ]


def test_run_that_ends_with_a_loss_that_is_not_finite_says_so(caplog):
    trainer = counting([1.0, math.nan, math.nan, math.nan])
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(range(4))

    assert nonfinite_lines(caplog)[1:] == [
        "The run has ended with a loss of nan, which was first not finite at iteration 2."
    ]


def test_resumed_run_does_not_repeat_the_line_and_ends_with_its_own(tmp_path, caplog):
    for end in (4, 8):
        trainer = counting([1.0, math.nan, 1.0, 1.0, 1.0, 1.0, math.nan, 1.0])
        MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(range(8), max_iters=end)

    assert nonfinite_lines(caplog) == [
        "The loss of iteration 2 is nan, the first that is not finite; the run continues. "
        "Check the data of that iteration, the learning rate and the precision.",
        "The run has ended with a loss of nan, which was first not finite at iteration 2.",
    ]


def test_other_names_may_be_infinite_without_a_line(caplog):
    """The gradient norm is, wherever fp16 overflows and the step is skipped."""
    trainer = counting([{"loss": 1.0, "grad_norm": math.inf}] * 4)
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(range(4))

    assert nonfinite_lines(caplog) == []


def _one_of_two_ranks(rank, folder):
    logging.basicConfig(filename=f"{folder}/{rank}.txt", format="%(message)s", force=True)
    trainer = counting([1.0, 1.0, math.nan if rank == 1 else 1.0, 1.0])
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(range(4), max_epochs=1)


@pytest.mark.distributed
def test_on_two_ranks_rank_0_says_it_of_any_rank(tmp_path):
    on_ranks(2, _one_of_two_ranks, tmp_path)
    said = [(tmp_path / f"{rank}.txt").read_text().splitlines() for rank in (0, 1)]

    assert said == [
        [
            "The loss of iteration 3 is nan on rank 1, the first that is not finite; the run continues. "
            "Check the data of that iteration, the learning rate and the precision.",
            "The run has ended with a loss of nan, which was first not finite at iteration 3.",
        ],
        [],
    ]


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


@pytest.mark.parametrize("number", [torch.tensor(1.5), torch.tensor([1.5]), np.float32(1.5), np.array(1.5), 1.5])
def test_what_is_one_number_is_a_float_to_whoever_reads_it(number, tmp_path):
    trainer = counting([0.0])
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update(mine=number))
    MetricLogger(tmp_path, console=False).attach(trainer)
    trainer.run(range(1))

    assert lines(tmp_path)[0]["mine"] == 1.5
    assert type(trainer.state.metrics["mine"]) is float


def test_several_numbers_are_a_list_in_the_log(tmp_path):
    trainer = counting([0.0])
    several = {"a": torch.tensor([1.0, math.nan]), "b": np.ones((2, 1))}
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update(several))
    MetricLogger(tmp_path, console=False).attach(trainer)
    trainer.run(range(1))

    assert [lines(tmp_path)[0][name] for name in several] == [[1.0, "nan"], [[1.0], [1.0]]]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("mine", object(), r"state.metrics\['mine'\] is a object, expected a number"),
        ("epoch", 7.0, "A metric is called 'epoch', which is a column of the log: give it another name"),
        ("iteration", 7.0, "A metric is called 'iteration', which is a column of the log"),
    ],
)
def test_a_metric_that_cannot_be_logged_ends_the_run_at_its_first_log_point(name, value, said, tmp_path):
    trainer = counting([0.0] * 3)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update({name: value}))
    MetricLogger(tmp_path, console=False).attach(trainer)
    with pytest.raises(ValueError, match=said):
        trainer.run(range(3))

    assert trainer.state.iteration == 1


def test_a_value_of_the_update_called_epoch_is_refused(tmp_path):
    trainer = counting([{"loss": 0.0, "epoch": 3.0}])
    MetricLogger(tmp_path, console=False).attach(trainer)
    with pytest.raises(ValueError, match="A metric is called 'epoch'"):
        trainer.run(range(1))


def test_two_loggers_of_one_folder_are_refused(tmp_path):
    trainer = counting([0.0])
    MetricLogger(tmp_path, console=False).attach(trainer)
    with pytest.raises(ValueError, match=r"MetricLogger 'metric_logger' writes to .* already: give"):
        MetricLogger(f"{tmp_path}/.", console=False, name="second").attach(trainer)
    MetricLogger(tmp_path / "second", console=False, name="third").attach(trainer)


@pytest.mark.parametrize("logs", [True, False])
def test_loss_that_is_not_finite_names_no_rank_where_each_has_that_of_all(tmp_path, logs):
    data = Numbers(8)
    data.targets[5] = math.nan

    def made(*, rank_invariant, global_micro_batches):
        model = linear()
        update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, rank_invariant=rank_invariant)
        return Trainer(update, global_micro_batches=global_micro_batches)

    def cases(rank):
        lines = dict[str, Any]()
        for invariant in (True, False):
            said = []
            handler = logging.Handler()
            handler.emit = lambda record, said=said: said.append(record.getMessage())
            logging.getLogger("ignite_engine").addHandler(handler)
            trainer = made(rank_invariant=invariant, global_micro_batches=4 if invariant else None)
            if logs:
                MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=1))
            trainer.run(loader(data, 2), max_epochs=1)
            logging.getLogger("ignite_engine").removeHandler(handler)
            lines[f"{invariant}"] = [line for line in said if "the first that is not finite" in line]
        return lines

    lines = on_two_ranks(cases, tmp_path / "meet")
    ((line,), _), ((named,), _) = lines["True"], lines["False"]
    assert "rank" not in line and "on rank" in named
