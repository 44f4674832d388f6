"""Several sources: the last that has a name wins, and some may be missing."""

import json

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, Update
from ignite_engine.checkpointing import CheckpointError, CheckpointStore, LoadSource
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import EMA, Checkpoint
from tests.kit.tiny import mse, numbers_loader

PARTS = ("backbone", "middle", "head")


class Net(nn.Module):
    def __init__(self, seed, names=PARTS):
        super().__init__()
        torch.manual_seed(seed)
        self.names = names
        for name, features in zip(names, (3, 4, 4)):
            self.add_module(name, nn.Linear(features, 1 if name == names[-1] else 4))

    def forward(self, inputs):
        for name in self.names[:-1]:
            inputs = torch.tanh(getattr(self, name)(inputs))
        found = getattr(self, self.names[-1])(inputs)
        return found


def run_of(directory, model, *, adagrad=False, ema=False):
    kind = torch.optim.Adagrad if adagrad else torch.optim.AdamW
    trainer = Trainer(Update(model, kind(model.parameters(), lr=0.1), mse))
    if ema:
        EMA(0.5).attach(trainer)
    checkpoint = Checkpoint(directory, keep_last=9)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=4))
    return trainer, checkpoint


def path_of(source):
    found = source.find()
    assert found is not None
    return found.path


def state_of(trainer, part="model"):
    return trainer.registry.objects[part].state_dict()


def trained(directory, seed, **options):
    trainer, _ = run_of(directory, Net(seed), **options)
    trainer.run(numbers_loader(16), max_iters=8)
    return trainer


def test_the_last_source_that_has_a_name_wins(tmp_path):
    first, second = trained(tmp_path / "a", 1), trained(tmp_path / "b", 2)
    trainer, checkpoint = run_of(tmp_path / "run", Net(3))
    built = state_of(trainer)["middle.bias"].clone()
    report = checkpoint.load(
        [
            LoadSource(tmp_path / "a", ignore=["model:middle.bias"]),
            LoadSource(tmp_path / "b", ["model:head.*", "model:middle.*"], ignore=["model:middle.*"]),
        ]
    )
    now, a, b = state_of(trainer), state_of(first), state_of(second)

    for name, value in now.items():
        expected = built if name == "middle.bias" else (b if name.startswith("head") else a)[name]
        assert torch.equal(value, expected), name
    newest = "; ".join(str(tmp_path / name / "iteration_00000008") for name in "ab")
    assert report.complete and str(report) == (
        f"From {newest} 5 loaded: model:backbone.weight, model:backbone.bias, model:middle.weight and 2 more"
    )
    trainer.run(numbers_loader(16), max_iters=1)
    assert checkpoint.store.checkpoints()[-1].manifest.parent == newest


def test_the_order_is_what_decides(tmp_path):
    first, second = trained(tmp_path / "a", 1), trained(tmp_path / "b", 2)
    for order, winner in (("ab", second), ("ba", first)):
        trainer, checkpoint = run_of(tmp_path / f"run_{order}", Net(3))
        checkpoint.load([LoadSource(tmp_path / name) for name in order])
        assert all(torch.equal(value, state_of(winner)[name]) for name, value in state_of(trainer).items())


@pytest.mark.row("D11")
def test_what_a_strict_source_lacks_another_may_bring(tmp_path):
    """A file with the head alone, another with the rest: each is strict, and together they are complete."""
    whole = Net(1).state_dict()
    torch.save({name: value for name, value in whole.items() if name.startswith("head")}, tmp_path / "head.pt")
    torch.save({name: value for name, value in whole.items() if not name.startswith("head")}, tmp_path / "rest.pt")
    trainer, checkpoint = run_of(tmp_path / "run", Net(3))
    head, rest = LoadSource(tmp_path / "head.pt"), LoadSource(tmp_path / "rest.pt")
    with pytest.raises(StateMismatch, match=r"head.pt and this run differ \(4 missing: model:backbone.weight, "):
        checkpoint.load([head])
    assert checkpoint.load([head, rest]).complete
    assert all(torch.equal(value, whole[name]) for name, value in state_of(trainer).items())


def test_names_that_do_not_fit_are_an_error_of_their_source_and_nothing_is_loaded(tmp_path):
    torch.save(Net(1).state_dict() | {"tail.weight": torch.ones(2)}, tmp_path / "more.pt")
    torch.save(Net(2).state_dict() | {"head.bias": torch.ones(2)}, tmp_path / "wide.pt")
    torch.save(Net(3).state_dict(), tmp_path / "right.pt")
    right = LoadSource(tmp_path / "right.pt")
    trainer, checkpoint = run_of(tmp_path / "run", Net(4))
    built = {name: value.clone() for name, value in state_of(trainer).items()}
    with pytest.raises(StateMismatch, match=r"more.pt and this run differ \(1 unexpected: model:tail.weight\)"):
        checkpoint.load([right, LoadSource(tmp_path / "more.pt"), right])
    with pytest.raises(StateMismatch, match=r"wide.pt and this run differ \(1 unexpected: model:head.bias "):
        checkpoint.load([LoadSource(tmp_path / "wide.pt"), right])
    assert all(torch.equal(value, built[name]) for name, value in state_of(trainer).items())

    loose = [LoadSource(tmp_path / name, strict=False) for name in ("more.pt", "wide.pt")]
    report = checkpoint.load([right, *loose])
    now, more, wide = state_of(trainer), Net(1).state_dict(), Net(2).state_dict()
    assert torch.equal(now["head.bias"], more["head.bias"]) and torch.equal(now["head.weight"], wide["head.weight"])
    assert report.unexpected == ["model:tail.weight", "model:head.bias (saved (2,), here (1,))"]


@pytest.mark.parametrize("adagrad", [False, True])
def test_moments_come_with_their_tensors(tmp_path, adagrad):
    """Those of one source stay where the next has none; Adagrad makes its own as soon as it is made."""
    first, second = trained(tmp_path / "a", 1, adagrad=adagrad), trained(tmp_path / "b", 2, adagrad=adagrad)
    trainer, checkpoint = run_of(tmp_path / "run", Net(3), adagrad=adagrad)
    parts = ["model:backbone.*", "optimizer:backbone.*"]
    checkpoint.load(
        [
            LoadSource(tmp_path / "a", parts=["model", "optimizer"], ignore=["*:head.*"]),
            LoadSource(tmp_path / "b", parts),
        ]
    )
    key = "sum" if adagrad else "exp_avg_sq"
    now, a, b = (state_of(each, "optimizer")["state"] for each in (trainer, first, second))
    assert torch.equal(now["backbone.weight"][key], b["backbone.weight"][key])
    assert torch.equal(now["middle.weight"][key], a["middle.weight"][key])
    assert ("head.weight" in now) == adagrad
    trainer.run(numbers_loader(16), max_iters=2)
    assert state_of(trainer, "optimizer")["state"]["middle.bias"]["step"].item() == 10


def test_names_are_renamed_source_by_source(tmp_path):
    torch.save(Net(1, ("stem", "blocks", "out")).state_dict(), tmp_path / "old.pt")
    torch.save({f"net.{name}": value for name, value in Net(2).state_dict().items()}, tmp_path / "average.pt")
    trainer, checkpoint = run_of(tmp_path / "run", Net(3))

    def without_middle(name):
        return None if "middle" in name else name.removeprefix("net.")

    report = checkpoint.load(
        [
            LoadSource(tmp_path / "old.pt", rename={"stem.": "backbone.", "out.": "head."}, strict=False),
            LoadSource(tmp_path / "average.pt", rename=without_middle, ignore=["model:middle.*"]),
        ]
    )
    now, expected = state_of(trainer), Net(2).state_dict()
    assert all(torch.equal(now[name], expected[name]) for name in expected if not name.startswith("middle"))
    assert report.missing == ["model:middle.weight", "model:middle.bias"]
    assert report.unexpected == ["model:blocks.weight", "model:blocks.bias"]


@pytest.mark.row("D11")
def test_an_optional_source_may_be_missing_and_a_required_one_is_one_line(tmp_path):
    first = trained(tmp_path / "a", 1)
    (tmp_path / "empty").mkdir()
    trainer, checkpoint = run_of(tmp_path / "run", Net(3))
    optional = [
        LoadSource(tmp_path / name, required=False) for name in ("nowhere", "empty", "iteration_00000001", "x.pt")
    ]
    table = checkpoint.load([LoadSource(tmp_path / "a"), *optional])

    assert all(torch.equal(value, state_of(first)[name]) for name, value in state_of(trainer).items())
    assert table.complete and table.source.count("(not required, not there)") == 4
    for each in optional:
        with pytest.raises(CheckpointError, match=r"(does not exist|holds no checkpoint); expected") as caught:
            checkpoint.load([LoadSource(tmp_path / "a"), LoadSource(each.path)])
        assert "\n" not in str(caught.value)
    (tmp_path / "x.pt").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"x\.pt is"):  # it is there
        checkpoint.load(optional)


def test_of_a_folder_the_best_is_the_best_valid_one(tmp_path, caplog):
    trained(tmp_path / "a", 1)
    store = CheckpointStore(tmp_path / "a")
    source = LoadSource(tmp_path / "a", which="best", metric="val/loss", mode="min")
    with pytest.raises(CheckpointError, match="holds no valid checkpoint with val/loss"):
        source.find()
    assert LoadSource(tmp_path / "a", which="best", metric="val/loss", mode="min", required=False).find() is None
    for iteration, loss in ((4, 0.5), (8, 0.7)):
        store.annotate(tmp_path / "a" / f"iteration_0000000{iteration}", metrics={"val/loss": loss, "accuracy": loss})
    with pytest.raises(CheckpointError, match="no metric was followed, so none is the best; train with Checkpoint"):
        LoadSource(tmp_path / "a", which="best").find()
    assert path_of(source) == tmp_path / "a" / "iteration_00000004"
    manifest = tmp_path / "a" / "iteration_00000008" / "manifest.json"
    assert json.loads(manifest.read_text())["best"] is None
    assert path_of(LoadSource(tmp_path / "a", which="best", metric="accuracy", mode="max")) == manifest.parent
    (tmp_path / "a" / "iteration_00000004" / "shared.pt").write_bytes(b"torn")
    assert path_of(source) == manifest.parent
    assert "iteration_00000004 is skipped: shared.pt has 4 bytes" in caplog.text


def test_the_best_is_by_what_the_run_kept_its_best(tmp_path):
    trainer, checkpoint = run_of(tmp_path / "x", Net(1))
    checkpoint = Checkpoint(tmp_path / "a", name="best", best="score", mode="max", keep_last=9)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED)

    @trainer.on(Events.ITERATION_COMPLETED)
    def score():
        trainer.state.metrics["score"] = {3: 2.0}.get(trainer.state.iteration, 1.0)

    trainer.run(numbers_loader(16), max_iters=5)
    assert path_of(LoadSource(tmp_path / "a", which="best")) == tmp_path / "a" / "iteration_00000003"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"which": "lats"}, "which must be 'best' or 'last', got 'lats'"),
        ({"metric": "loss"}, "metric and mode say together"),
        ({"metric": "loss", "mode": "min"}, "metric and mode say together"),
        ({"which": "best", "mode": "less"}, "mode must be 'min', 'max' or None, got 'less'"),
        ({"path": ""}, "path must be a path, got ''"),
        ({"parts": "model"}, r"parts is a list of patterns, got 'model': write \['model'\]"),
        ({"parts": ["model", "data"]}, "parts has 'data' without 'counters'"),
        ({"ignore": [":head"]}, "ignore has the pattern ':head'"),
        ({"parts": ["model:"]}, "parts has the pattern 'model:'"),
        ({"rename": 7}, "rename must be a function or a mapping of prefixes, got 7"),
        ({"required": 1}, "required must be True or False, got 1"),
    ],
)
def test_a_source_that_means_nothing_is_refused(given, line):
    with pytest.raises((TypeError, ValueError), match=f"^{line}"):
        LoadSource(**{"path": "a", **given})


def test_a_list_is_of_sources_and_a_path_has_options(tmp_path):
    _, checkpoint = run_of(tmp_path / "run", Net(3))
    for wrong, options in (([], {}), (["a"], {}), ([LoadSource("a")], {"strict": False})):
        with pytest.raises(ValueError, match="Give a path and its options, or a list of LoadSource"):
            checkpoint.load(wrong, **options)
