"""``strict``: what could not be resumed bit for bit is refused before the first update, and said to be."""

import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.utils.data import DataLoader

import ignite_engine
from ignite_engine.errors import NotExact
from ignite_engine.handlers import Checkpoint
from ignite_engine.runs.config import ConfigError
from tests.kit import saved
from tests.kit.fitting import fitted
from tests.kit.floors import needs
from tests.kit.processes import ranks
from tests.kit.refusals import refusals, refuses
from tests.kit.tiny import Numbers, linear, numbers_loader, trainer_of, weights


class Workers(list):
    """As a loader with a state and workers."""

    num_workers = 2

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


class Nameless:
    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...

    def __call__(self): ...


def listed():
    return DataLoader(Numbers(6), batch_sampler=[[0, 1], [2, 3], [4, 5]])


def two_of_a_kind(trainer):
    for _ in range(2):
        trainer.add_event_handler(Events.ITERATION_COMPLETED, Nameless())


LISTED = "DataLoader with list keeps no state"
CASES = {
    "custom sampler": (listed, {}, None, LISTED),
    "randomness in workers": (lambda: Workers([Numbers(4)[0]]), {}, None, "of its 2 workers neither random numbers"),
    "unsaved handler": (numbers_loader, {}, two_of_a_kind, "Nameless is attached but not saved"),
    "part left out": (numbers_loader, {"exclude": ["optimizer"]}, None, "optimizer is not saved"),
    "names left out": (numbers_loader, {"exclude": ["model:0.*"]}, None, "without 2 names (0.weight, 0.bias)"),
}


@pytest.mark.row("D19")
@pytest.mark.parametrize("case", CASES)
def test_what_is_not_exact_is_refused_before_the_first_update(case, tmp_path):
    data, options, attach, reason = CASES[case]

    def build(strict):
        trainer = trainer_of(linear())
        Checkpoint(tmp_path / str(strict), strict=strict, **options).attach(trainer)
        if attach is not None:
            attach(trainer)
        return trainer

    trainer = build(strict=True)
    refuses(lambda: trainer.run(data(), max_epochs=1), NotExact, f"strict {reason}")
    assert trainer.state.iteration == 0 and not (tmp_path / "True").exists()

    allowed = build(strict=False)
    allowed.run(data(), max_epochs=1)
    assert allowed.state.iteration > 0
    assert any(reason in each for each in saved.manifest(tmp_path / "False")["reproducibility"])


class Keeps(nn.Module):
    """Its forward changes what the state_dict has not, but what stays, is a cache, or is of a graph."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layers, self.cache, self.loss = kind, linear(), None, None
        self.calls, self.mean = 0, None if kind == "mean" else torch.zeros(())
        self.register_buffer("hidden", torch.zeros(()), persistent=kind == "saved")

    def forward(self, values):
        if self.cache is None:
            self.cache = torch.ones(())
        if self.kind == "calls":
            self.calls += 1
        if self.kind == "mean":
            self.mean = values.detach().mean() + (0 if self.mean is None else self.mean)
        if self.kind in ("hidden", "saved"):
            self.hidden.add_(1)
        self.loss = self.layers(values).mean()
        return self.layers(values) + self.hidden


class Writes(Keeps):
    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, calls):
        self.calls = calls


@pytest.mark.row("D19")
@pytest.mark.parametrize("kind", ["calls", "mean", "hidden", "saved", "nothing", "written"])
def test_what_a_model_keeps_beside_its_state_is_named(kind, tmp_path, caplog):
    def run(strict):
        model = Writes("calls") if kind == "written" else Keeps(kind)
        trainer = trainer_of(nn.Sequential(model))
        Checkpoint(tmp_path / str(strict), strict=strict).attach(trainer, Events.ITERATION_COMPLETED(every=3))
        trainer.run(numbers_loader(), max_epochs=1)

    run(strict=False)
    if kind in ("calls", "mean", "hidden"):
        assert sum(f"the model keeps 0.{kind} beside its state_dict" in each for each in caplog.messages) == 1
        refuses(lambda: run(strict=True), NotExact, f"strict 0.{kind}")
    else:
        run(strict=True)


@needs("windows")
def test_windows_without_a_state_are_known_at_the_first_save(tmp_path):
    """Before a window is open nobody knows what its data is."""

    def run(strict):
        trainer = trainer_of(linear())
        Checkpoint(tmp_path / str(strict), strict=strict).attach(trainer)
        trainer.run(ignite_engine.Windows([1, 2, 3], lambda name: listed()), max_epochs=1)
        return trainer

    refuses(lambda: run(strict=True), NotExact, LISTED)
    trainer = run(strict=False)
    for reasons in (trainer.reproducibility(), saved.manifest(tmp_path / "False")["reproducibility"]):
        assert any(LISTED in each for each in reasons)


def resumed(folder, epochs=1, **options):
    """A trainer that goes on from what the folder has, to the end of the epoch; without epochs it does not run."""
    steps = options.pop("accumulation_steps", None)
    trainer, checkpoint = trainer_of(linear(dropout=True), steps), Checkpoint(folder, **options)
    checkpoint.attach(trainer)
    before = weights(trainer)
    try:
        checkpoint.resume()
    except NotExact:
        assert torch.equal(weights(trainer), before), "it was loaded"
        raise
    if epochs:
        trainer.run(numbers_loader(), max_epochs=epochs)
    return trainer


@pytest.mark.row("D19")
def test_exact_run_is_let_go(tmp_path):
    assert resumed(tmp_path, strict=True).state.status == "completed"
    assert resumed(tmp_path, epochs=2, strict=True).state.iteration == 12


def says_not_exact(tmp_path):
    resumed(tmp_path, exclude=["optimizer"])
    resumed(tmp_path, strict=True)


def from_two_ranks(tmp_path):
    ranks(2, lambda rank: resumed(tmp_path).state.iteration)
    assert resumed(tmp_path, epochs=0).state.iteration == 3
    resumed(tmp_path, strict=True)


def another_accumulation(tmp_path):
    trainer = trainer_of(linear(dropout=True), 2)
    Checkpoint(tmp_path).attach(trainer)
    trainer.run(numbers_loader(), max_iters=1)
    assert "accumulation_steps=3" in resumed(tmp_path, accumulation_steps=3).reproducibility()[0]
    trainer.run(numbers_loader(), max_iters=2)
    resumed(tmp_path, accumulation_steps=3, strict=True)


def of_a_config(tmp_path):
    fitted(tmp_path, Checkpoint={"strict": True, "on_exception": True})


def both(tmp_path):
    Checkpoint(tmp_path, strict=True, on_exception=True)


test_refusals = refusals(
    [
        ("the checkpoint says so", says_not_exact, NotExact, "iteration_00000006 optimizer not saved"),
        ("number of ranks", from_two_ranks, NotExact, "ranks: 2 saved 1 now"),
        ("accumulation", another_accumulation, NotExact, "accumulation_steps=2 accumulation_steps=3"),
        ("saves it would not resume", both, ValueError, "strict on_exception"),
        ("the same of a config", of_a_config, ConfigError, "handlers.Checkpoint on_exception strict"),
    ]
)


def test_another_environment_is_refused_where_it_is_strict_and_else_stays_in_the_report(tmp_path, monkeypatch, caplog):
    """Also of a run that is resumed a second time, as it was then: its bits are not those of an uninterrupted one."""
    resumed(tmp_path)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 3)
    told = f"threads: {threads} when it was saved, {threads + 3} now"
    refuses(lambda: resumed(tmp_path, strict=True), NotExact, f"iteration_00000006 {told}")
    for epochs in (2, 3):
        trainer = resumed(tmp_path, epochs)
        for reasons in (trainer.reproducibility(), saved.manifest(tmp_path)["reproducibility"]):
            assert len(reasons) == 1 and "iteration_00000006" in reasons[0] and told in reasons[0]
    assert sum(told in each for each in caplog.messages) == 1
