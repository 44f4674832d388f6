"""What a filter leaves out is not on disk, stands in the report, and stays as it was built when the rest is loaded."""

import logging

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, Update
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import EMA, Checkpoint
from tests.kit.tiny import mse, numbers_loader, one


class Frozen(nn.Module):
    """A backbone that is not trained, and a head that is."""

    def __init__(self, seed=7):
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Linear(3, 200).requires_grad_(False)
        self.head = nn.Linear(200, 1)

    def forward(self, inputs):
        found = self.head(torch.tanh(self.backbone(inputs)))
        return found


BACKBONE = ["backbone.weight", "backbone.bias"]


def run_of(directory, seed=7, **options):
    model = Frozen(seed)
    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters(), lr=0.01), mse))
    EMA(0.5).attach(trainer)
    checkpoint = Checkpoint(directory, keep_last=9, **options)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=4))
    return trainer, checkpoint, model


def frozen(part, name, value):
    return part not in ("model", "ema") or not name.startswith("backbone.")


FILTERS = [
    {"exclude": ["model:backbone.*", "ema:backbone.*"]},
    {"keep_fn": frozen},
    {"exclude": ["*:backbone.*"], "background": True},
]


@pytest.mark.row("D5")
@pytest.mark.parametrize("options", FILTERS, ids=["pattern", "function", "background"])
def test_what_is_left_out_is_not_on_disk_and_is_reported(tmp_path, options):
    trainer, checkpoint, _ = run_of(tmp_path / "filtered", **options)
    told = trainer.reproducibility()
    trainer.run(numbers_loader(16), max_iters=8)
    for each in checkpoint.store.checkpoints():
        loaded = checkpoint.store.load(each.path)
        assert list(loaded.shared["model"]) == list(loaded.shared["ema"]["weights"]) == ["head.weight", "head.bias"]
        assert each.manifest.left_out["model"] == each.manifest.left_out["ema"] == BACKBONE
        assert each.manifest.reproducibility == told and not each.manifest.exact
        assert each.manifest.reproducibility[0] == "model is saved without 2 names (backbone.weight, backbone.bias)"
    whole, full, _ = run_of(tmp_path / "whole")
    whole.run(numbers_loader(16), max_iters=8)
    sizes = [
        sum(file.bytes for file in store.checkpoints()[-1].manifest.files.values())
        for store in (checkpoint.store, full.store)
    ]
    assert sizes[0] < sizes[1] - 6000  # two times 800 numbers of 4 bytes


@pytest.mark.row("D5")
@pytest.mark.parametrize("options", FILTERS, ids=["pattern", "function", "background"])
def test_resumed_with_the_same_backbone_it_ends_with_the_same_bits(tmp_path, options, caplog):
    whole, _, model = run_of(tmp_path / "whole")
    whole.run(numbers_loader(16), max_iters=12)
    trainer, _, _ = run_of(tmp_path / "filtered", **options)
    trainer.run(numbers_loader(16), max_iters=6)
    resumed, checkpoint, again = run_of(tmp_path / "filtered", **options)
    with torch.no_grad():
        again.head.weight.zero_()  # comes from the checkpoint
    assert checkpoint.resume() is not None
    resumed.run(numbers_loader(16), max_iters=12)

    assert torch.equal(one(again), one(model))
    average, expected = (each.registry.objects["ema"].state_dict() for each in (resumed, whole))
    assert all(torch.equal(average["weights"][name], expected["weights"][name]) for name in expected["weights"])
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(
        "saved without some of model (2: backbone.weight, backbone.bias): they stay as they are" in w for w in warnings
    )


def test_what_was_not_saved_is_missing(tmp_path):
    first, _, _ = run_of(tmp_path / "first", exclude=["*:backbone.*", "optimizer"])
    first.run(numbers_loader(16), max_iters=4)
    _, checkpoint, model = run_of(tmp_path / "second", seed=1)
    built = one(model.backbone).clone()
    with pytest.raises(StateMismatch, match=r"5 missing: model:backbone\.weight"):
        checkpoint.load(tmp_path / "first", parts=["*"])
    report = checkpoint.load(tmp_path / "first", parts=["*"], strict=False)

    assert set(report.missing) == {f"{p}:backbone.{n}" for p in ("model", "ema") for n in ("weight", "bias")} | {
        "optimizer"
    }
    assert torch.equal(one(model.backbone), built)


def test_a_model_of_which_nothing_is_saved_stays_as_built(tmp_path):
    first, _, _ = run_of(tmp_path / "first", exclude=["model:*", "ema"])
    first.run(numbers_loader(16), max_iters=4)
    assert CheckpointStore(tmp_path / "first").checkpoints()[0].manifest.left_out["ema"] == []
    for load in (Checkpoint.resume, lambda checkpoint: checkpoint.load(tmp_path / "first", parts=["*"], strict=False)):
        trainer, checkpoint, model = run_of(tmp_path / "first", seed=1)
        built = one(model).clone()
        load(checkpoint)
        assert torch.equal(one(model), built) and trainer.state.iteration == 4


def test_an_average_of_which_nothing_is_saved_begins_with_the_weights(tmp_path):
    first, _, model = run_of(tmp_path, exclude=["ema:*"])
    first.run(numbers_loader(16), max_iters=4)
    trainer, checkpoint, _ = run_of(tmp_path, seed=1)
    checkpoint.resume()
    average = trainer.registry.objects["ema"].state_dict()

    assert average["updates"] == 4
    assert all(torch.equal(average["weights"][name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("pattern", "line"),
    [("model:backbon.*", "matches no name in this run; did you mean 'backbone.bias'"), ("modle", "is not a part of")],
)
def test_a_pattern_that_leaves_nothing_out_is_refused_at_the_start(tmp_path, pattern, line):
    trainer, _, _ = run_of(tmp_path, exclude=[pattern])
    with pytest.raises(ValueError, match=line):
        trainer.run(numbers_loader(16), max_iters=4)
    assert trainer.state.iteration == 0


def test_of_two_checkpoint_handlers_each_reports_its_own(tmp_path):
    trainer, light, _ = run_of(tmp_path / "light", exclude=["optimizer"])
    whole = Checkpoint(tmp_path / "whole", name="whole")
    whole.attach(trainer)
    trainer.run(numbers_loader(16), max_iters=4)

    assert trainer.reproducibility() == ["optimizer is not saved"] and "optimizer is not saved" in trainer.describe()
    assert light.store.checkpoints()[-1].manifest.reproducibility == ["optimizer is not saved"]
    assert whole.store.checkpoints()[-1].manifest.exact
