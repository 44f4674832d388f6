"""Every piece of state has a digest; the first that differs is named, and so is what nobody saved."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, Update, loader
from ignite_engine.checkpointing.digests import digests, tensor_sha256
from ignite_engine.handlers import Checkpoint
from ignite_engine.verify.compare import Comparison, compare, table
from ignite_engine.verify.recorder import Record, StateRecorder, read_records
from ignite_engine.verify.unsaved_state import unsaved_state
from tests.builders import Numbers, linear, mse, numbers_loader, trainer_of

# -- digests ----------------------------------------------------------------------------------------------------------


def test_each_leaf_has_its_digest_and_scalars_are_shown() -> None:
    pieces = digests({"a": torch.ones(2), "b": [1, 2.5], "c": [{"d": None}, (torch.zeros(1), "x")], 3: True})
    assert list(pieces) == ["a", "b", "c.0.d", "c.1.0", "c.1.1", "3"]
    assert (pieces["b"], pieces["c.0.d"], pieces["c.1.1"], pieces["3"]) == ("[1, 2.5]", "None", "'x'", "True")
    assert pieces["a"].startswith("sha256:") and len(pieces["a"]) == 7 + 64
    assert digests(0.1)[""] == "0.1" and digests("y" * 100)[""].startswith("sha256:")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.tensor(1.0), torch.tensor(1.0 + 2**-23)),
        (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),
        (torch.tensor([1j]), torch.tensor([-1j])),
        (np.zeros(2), np.ones(2)),
    ],
)
def test_one_bit_is_another_digest(one: Any, other: Any) -> None:
    assert tensor_sha256(one) != tensor_sha256(other)


def test_layout_in_memory_does_not_count() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    assert tensor_sha256(whole.T) == tensor_sha256(whole.T.contiguous())
    assert tensor_sha256(torch.tensor([1 + 1j]).conj()) == tensor_sha256(torch.tensor([1 - 1j]))
    twice = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,), check_invariants=True)
    assert tensor_sha256(twice) == tensor_sha256(twice.coalesce())


# -- what is not saved ------------------------------------------------------------------------------------------------


class NoisyLoss:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return mse(model, batch) * torch.rand(1, generator=self.generator).item()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.seen += 1
        return self.inner(x)


class Counting:
    """A handler with a state of its own and no state_dict."""

    def __init__(self) -> None:
        self.random = random.Random(3)
        self.table = {"numpy": np.random.default_rng(4), "many": list(range(5000))}

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self)

    def __call__(self) -> None:
        self.random.random()
        self.table["numpy"].random()  # type: ignore[union-attr]  # a Generator


def test_what_the_users_code_changes_and_nobody_saves_is_found() -> None:
    model = Noisy()
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), NoisyLoss()))
    Counting().attach(trainer)
    trainer.register("saved", saved := Saved())
    trainer.add_event_handler(Events.ITERATION_COMPLETED, saved.count)
    before = digests(unsaved_state(trainer))
    trainer.run(numbers_loader(), max_iters=3)
    after = digests(unsaved_state(trainer))

    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        "loss_fn.generator",
        "model.calls",
        "model.seen",
        "Counting.random",
        "Counting.table.numpy",
    }
    assert "Numbers.inputs" in after and not any("many" in name for name in after)


class Saved:
    name = "saved"

    def __init__(self) -> None:
        self.number = 0

    def count(self) -> None:
        self.number += 1

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


# -- three runs -------------------------------------------------------------------------------------------------------


def three_runs(folder: Path, build: Callable[[], Trainer], *, resume: bool = True, **options: Any) -> Comparison:
    """Reference, killed at 8 and resumed at 6; as far as one process can: the kill is an exception."""
    records: dict[str, list[Record]] = {}
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


def data() -> Any:
    whole = Numbers(14)
    return loader(TensorDataset(whole.inputs, whole.targets), 2, shuffle=True)


def fail() -> None:
    raise KeyError("killed")


def dropout() -> Trainer:
    return trainer_of(linear(dropout=True), 2)


def test_equal_runs_are_exact_and_counted(tmp_path: Path) -> None:
    found = three_runs(tmp_path, dropout)
    assert found.exact and found.differences == () and found.notes == []
    assert found.line.startswith("Resume is exact: killed at iteration 8, resumed from 6, ")
    assert "over iterations 6 to 12 are equal" in found.line
    count = int(found.line.split(", ")[2].split()[0])
    assert count > 7 * 12  # at least weights, momenta, counters and generators, at each of 7 edges


def test_generators_that_are_not_restored_are_named(tmp_path: Path) -> None:
    found = three_runs(tmp_path, dropout, ignore=["rng"])
    assert not found.exact
    assert found.line == "Resume is NOT exact: at iteration 7 0.weight of model differs first."
    assert {each.component for each in found.differences} >= {"model", "optimizer", "rng", "output"}
    assert {each.piece for each in found.differences if each.component == "rng"} == {"torch"}


def test_optimizer_that_is_not_loaded_is_named_at_the_resume_itself(tmp_path: Path) -> None:
    found = three_runs(tmp_path, dropout, ignore=["optimizer"])
    assert "at iteration 6 state.0.weight.momentum_buffer of optimizer differs first" in found.line
    assert found.differences[0].found == "missing" and found.differences[0].expected.startswith("sha256:")


def test_cause_that_is_not_saved_is_named_first(tmp_path: Path) -> None:
    def build() -> Trainer:
        model = linear()
        return Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), NoisyLoss()))

    found = three_runs(tmp_path, build)
    assert not found.exact and "at iteration 7 0.weight of model differs first" in found.line
    assert "Not saved, and different: loss_fn.generator; trainer.register(name, object)" in found.line
    assert (found.differences[0].component, found.differences[0].iteration) == ("not saved", 6)
    lines = table(found.differences, rows=2)
    assert lines[0].split() == ["iteration", "component", "piece", "uninterrupted", "resumed"]
    assert lines[1].startswith("6          not saved  loss_fn.generator") and lines[-1].endswith("more")


def test_what_differs_without_consequence_is_only_noted(tmp_path: Path) -> None:
    def build() -> Trainer:
        trainer = dropout()
        Counting().attach(trainer)
        return trainer

    found = three_runs(tmp_path, build)
    assert found.exact and len(found.notes) == 1
    assert found.notes[0].startswith("differs, is not saved, and changed nothing so far: Counting.random, ")


class Clock(Saved):
    name = "clock"

    def state_dict(self) -> dict[str, Any]:
        return {"now": time.perf_counter()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_clocks_are_left_out_and_said_to_be(tmp_path: Path) -> None:
    def build() -> Trainer:
        trainer = dropout()
        trainer.register("clock", Clock())
        return trainer

    found = three_runs(tmp_path, build)
    assert found.exact
    assert found.notes == ["not compared, as it differs between two runs from the same start: clock now"]


def test_run_that_is_no_function_of_its_seed_is_told_apart(tmp_path: Path) -> None:
    def build() -> Trainer:
        random.seed()
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Trainer(Update(model, optimizer, lambda model, batch: mse(model, batch) * random.random()))

    found = three_runs(tmp_path, build)
    assert not found.exact and found.line.startswith(
        "The run is not deterministic: two runs from the same start differ"
    )
    assert "at iteration 1, first in 0.weight of model, before anything was killed" in found.line


def test_run_that_began_anew_or_ended_early_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "anew").mkdir()
    assert three_runs(tmp_path / "anew", dropout, resume=False).line.startswith("Nothing was resumed")
    records = [read_records(tmp_path / "anew" / phase) for phase in ("reference", "killed")]
    as_if_resumed = [replace(each, resumed=each.iteration == 6) for each in records[0][5:]]
    assert compare(*records, as_if_resumed).exact
    early = compare(*records, as_if_resumed[:-2])
    assert not early.exact and early.line == "The resumed run ended at iteration 10, the uninterrupted one at 12."
    other = compare(*records, [*as_if_resumed, replace(as_if_resumed[-1], iteration=13)])
    assert not other.exact and other.line == "The resumed run reached iteration 13, epoch 3, the other did not."


def test_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    three_runs(tmp_path, dropout)
    whole = read_records(tmp_path / "killed")
    text = (tmp_path / "killed").read_text()
    (tmp_path / "killed").write_text(text[:-100])
    assert read_records(tmp_path / "killed") == whole[:-1] and whole[-1].iteration == 7
