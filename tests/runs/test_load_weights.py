"""Weights of a run into a model of the user's own, and into a program that does not have this library."""

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, load_weights
from ignite_engine.checkpointing import CheckpointError
from ignite_engine.cli import main
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import EMA, Checkpoint
from tests.kit.tiny import linear, numbers_loader, one, trainer_of, weights


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of which iteration 4 is the best, and the weights of each iteration."""
    folder, seen = tmp_path_factory.mktemp("run"), dict[int, torch.Tensor]()
    trainer = trainer_of()
    EMA(0.5).attach(trainer)

    @trainer.on(Events.ITERATION_COMPLETED)
    def score():
        seen[trainer.state.iteration] = weights(trainer)
        trainer.state.metrics["score"] = -abs(trainer.state.iteration - 4)

    checkpoint = Checkpoint(folder / "checkpoints", best="score", mode="max", keep_last=1)
    checkpoint.attach(trainer, Events.COMPLETED)
    trainer.run(numbers_loader(), max_iters=6)
    return folder, seen


def test_by_name_into_any_model(run):
    folder, seen = run
    for arguments, iteration in (((folder,), 6), ((folder, "last"), 6), ((folder, "best"), 4), ((folder / "best",), 4)):
        model = linear().eval()
        assert load_weights(model, *arguments).name == f"iteration_{iteration:08d}"
        assert torch.equal(one(model), seen[iteration]) and not model.training
    averaged = linear()
    load_weights(averaged, folder, "best", ema=True)
    assert not torch.equal(one(averaged), seen[4])
    load_weights(averaged, folder, "best", metric="score", mode="min")
    assert torch.equal(one(averaged), seen[6])


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))])
def test_wrapping_makes_no_difference(run, wrap, tmp_path):
    """Neither that of the model, nor that of a model whose state_dict was saved elsewhere."""
    model = linear()
    load_weights(wrap(model), run[0], "best")
    assert torch.equal(one(model), run[1][4])
    torch.save(wrap(model).state_dict(), tmp_path / "weights.pt")
    for other in (linear(), wrap(linear())):
        with torch.no_grad():
            next(other.parameters()).zero_()
        load_weights(other, tmp_path / "weights.pt")
        assert torch.equal(one(other), run[1][4])


def test_what_does_not_fit_is_one_sentence(run, tmp_path):
    folder, seen = run
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Linear(2, 1))
    with pytest.raises(StateMismatch) as caught:
        load_weights(model, folder, "best")
    assert str(caught.value) == (
        f"The model is not that of {folder}/checkpoints/iteration_00000004 (2 missing: 3.weight, 3.bias; 2 "
        "unexpected: 2.weight (saved (1, 4), here (2, 4)), 2.bias (saved (1,), here (2,))): build it as it was saved, "
        "or use strict=False to leave these as they are."
    )
    assert not torch.equal(model[0].weight, seen[4][:12].view(4, 3))  # nothing was loaded
    load_weights(model, folder, "best", strict=False)
    assert torch.equal(model[0].weight, seen[4][:12].view(4, 3))
    with pytest.raises(StateMismatch, match=r"2 missing: .*4 unexpected: "):
        load_weights(nn.Linear(3, 4), folder, strict=False)  # no name fits
    with pytest.raises(TypeError, match="model"):
        load_weights(folder, model)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_weights(model, tmp_path / "nowhere")


def test_a_model_of_another_name(tmp_path):
    """As an update function of one's own registers it; of several one is named."""
    first, second = linear(), nn.Linear(2, 1)
    trainer = Trainer(lambda engine, batch: 0.0)
    trainer.register("net", first, shared=True)
    checkpoint = Checkpoint(tmp_path / "one", best="score")
    checkpoint.attach(trainer)
    trainer.state.metrics["score"] = 1.0
    checkpoint.save()
    model = linear()
    with torch.no_grad():
        model[0].weight.zero_()
    load_weights(model, tmp_path / "one")
    assert torch.equal(one(model), one(first))
    assert main(["checkpoints", "export", str(tmp_path / "one"), "-o", str(tmp_path / "one.pt")]) == 0

    trainer.register("head", second, shared=True)
    checkpoint.save()
    head = nn.Linear(2, 1)
    load_weights(head, tmp_path / "one", part="head")
    assert torch.equal(one(head), one(second))
    with pytest.raises(
        CheckpointError, match=r"iteration_00000000 holds no model; its models: net, head: give part=\."
    ):
        load_weights(head, tmp_path / "one")
