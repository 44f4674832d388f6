"""The first piece of state that differs is named."""

import random
import time
from dataclasses import replace

import torch
from ignite.engine import Events
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, Update, loader
from ignite_engine.ext.replay.verify_compare import compare
from ignite_engine.ext.replay.verify_recorder import StateRecorder, read_records
from ignite_engine.handlers import Checkpoint
from tests.ext.replay.objects import Saved
from tests.kit.tiny import Numbers, linear, mse, trainer_of


def three_runs(folder, build, *, resume=True, **options):
    """Reference, killed at 8 and resumed at 6; as far as one process can: the kill is an exception."""
    records = {}
    for phase in ("reference", "killed", "resumed"):
        torch.manual_seed(5 if phase != "resumed" else 99)
        trainer = build()
        checkpoint = Checkpoint(folder / ("reference_run" if phase == "reference" else "run"))
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=3))
        StateRecorder(folder / phase, until=12).attach(trainer)
        if phase == "killed":
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=8), fail)
        if phase == "resumed" and resume:
            checkpoint.resume(**options)
        try:
            trainer.run(data(), max_epochs=3)
        except KeyError:
            assert phase == "killed"
        records[phase] = read_records(folder / phase)
    return compare(*records.values())


def data():
    whole = Numbers(14)
    return loader(TensorDataset(whole.inputs, whole.targets), 2, shuffle=True)


def fail():
    raise KeyError("killed")


def dropout():
    return trainer_of(linear(dropout=True), 2)


def test_equal_runs_are_exact_and_counted(tmp_path):
    found = three_runs(tmp_path, dropout)
    assert found.exact and found.differences == () and found.notes == []
    assert found.line.startswith("Resume is exact: killed at iteration 8, resumed from 6, ")
    assert "over iterations 6 to 12 are equal" in found.line
    count = int(found.line.split(", ")[2].split()[0])
    assert count > 7 * 12  # at least weights, momenta, counters and generators, at each of 7 step boundaries


def test_generators_that_are_not_restored_are_named(tmp_path):
    found = three_runs(tmp_path, dropout, ignore=["rng"])
    assert not found.exact
    assert found.line.startswith("Resume is NOT exact: at iteration 7 0.weight of model differs first. ")
    assert {each.component for each in found.differences} >= {"model", "optimizer", "rng", "output"}
    assert {each.piece for each in found.differences if each.component == "rng"} == {"torch"}


def test_optimizer_that_is_not_loaded_is_named_at_the_resume_itself(tmp_path):
    found = three_runs(tmp_path, dropout, ignore=["optimizer"])
    assert "at iteration 6 state.0.weight.momentum_buffer of optimizer differs first" in found.line
    assert found.differences[0].found == "missing" and found.differences[0].expected.startswith("sha256:")


class Clock(Saved):
    name = "clock"

    def state_dict(self):
        return {"now": time.perf_counter()}

    def load_state_dict(self, state): ...


def test_clocks_are_left_out_and_said_to_be(tmp_path):
    def build():
        trainer = dropout()
        trainer.register("clock", Clock())
        return trainer

    found = three_runs(tmp_path, build)
    assert found.exact
    assert found.notes == ["not compared, as it differs between two runs from the same start: clock now"]


def test_run_that_is_not_a_function_of_its_seed_is_detected(tmp_path):
    def build():
        random.seed()
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Trainer(Update(model, optimizer, lambda model, batch: mse(model, batch) * random.random()))

    found = three_runs(tmp_path, build)
    assert not found.exact and found.line.startswith(
        "The run is not deterministic: two runs from the same start differ"
    )
    assert "at iteration 1, first in 0.weight of model, before anything was killed" in found.line


def test_run_that_started_over_or_ended_early_is_not_equal(tmp_path):
    (tmp_path / "over").mkdir()
    assert three_runs(tmp_path / "over", dropout, resume=False).line.startswith("Nothing was resumed")
    records = [read_records(tmp_path / "over" / phase) for phase in ("reference", "killed")]
    as_if_resumed = [replace(each, resumed=each.iteration == 6) for each in records[0][5:]]
    assert compare(*records, as_if_resumed).exact
    early = compare(*records, as_if_resumed[:-2])
    assert not early.exact and early.line == "The resumed run ended at iteration 10, the uninterrupted one at 12."
    other = compare(*records, [*as_if_resumed, replace(as_if_resumed[-1], iteration=13)])
    assert not other.exact and other.line == "The resumed run reached iteration 13, epoch 3, the other did not."


def test_line_that_a_kill_cut_short_is_left_out(tmp_path):
    three_runs(tmp_path, dropout)
    whole = read_records(tmp_path / "killed")
    text = (tmp_path / "killed").read_text()
    (tmp_path / "killed").write_text(text[:-100])
    assert read_records(tmp_path / "killed") == whole[:-1] and whole[-1].iteration == 7
