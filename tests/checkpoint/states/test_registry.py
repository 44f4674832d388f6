"""What a checkpoint holds, under which name."""

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer
from ignite_engine.errors import NotExact
from ignite_engine.handlers import Checkpoint
from tests.kit import saved
from tests.kit.refusals import refusals
from tests.kit.tiny import linear, numbers_loader, trainer_of


class Kept:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]

    def __call__(self): ...


@pytest.mark.row("D8")
def test_parts_have_stable_names_and_those_of_a_rank_are_kept_apart(tmp_path):
    trainer = trainer_of(precision="fp16")
    trainer.register("own", Kept(1))
    trainer.register("same", kept := Kept(2), shared=True)
    trainer.register("same", kept, shared=True)  # a name is given once
    Checkpoint(tmp_path).attach(trainer)
    trainer.run(numbers_loader(), max_iters=1)
    files = {name.partition(".")[0]: set(parts) for name, parts in saved.manifest(tmp_path)["parts"].items()}
    assert files == {
        "shared": {"model", "optimizer", "scaler", "same"},
        "rank_0": {"trainer", "data", "rng", "own", "checkpoint"},
    }
    parts = saved.parts(tmp_path)
    assert (parts["own"], parts["same"]) == ({"value": 1}, {"value": 2})


def registering(name, value):
    def call():
        trainer = trainer_of()
        trainer.register("name", Kept())
        trainer.register(name, value)

    return call


def attach_as_mine(trainer):
    kept = Kept()
    kept.name = "mine"
    trainer.add_event_handler(Events.COMPLETED, kept)
    return kept


test_refusals = refusals(
    [
        ("a name that is taken", registering("name", Kept()), ValueError, "'name' taken Kept own name"),
        (
            "attached twice",
            lambda: [attach_as_mine(trainer) for trainer in [trainer_of()] * 2],
            ValueError,
            "'mine' taken",
        ),
        ("no state", registering("number", 3), TypeError, "state_dict load_state_dict int"),
    ]
)


@pytest.mark.row("D8")
def test_attached_objects_with_a_state_register_by_themselves():
    trainer, first, second = trainer_of(), Kept(5), Kept(6)
    trainer.add_event_handler(Events.COMPLETED, first)
    trainer.add_event_handler(Events.STARTED, first)
    (label,) = set(trainer.registry.objects) - set(trainer_of().registry.objects)
    trainer.add_event_handler(Events.COMPLETED, second)

    assert label == "tests/Kept" and trainer.registry.objects[label] is first
    # a second one without a name has no stable place
    assert trainer.reproducibility() == [f"{label} is attached but not saved"]
    named = attach_as_mine(trainer)
    assert trainer.registry.objects["mine"] is named


def test_checkpoint_without_any_parameters_is_said_to_be_inexact(tmp_path, caplog):
    """A GAN's own update function, say: its checkpoint would hold counters alone."""
    trainer = Trainer(lambda engine, batch: 1.0)
    trainer.register("kept", Kept(1))
    Checkpoint(tmp_path / "any").attach(trainer)
    reason = "no parameters are saved, as no model is registered (trainer.register(name, model) saves one)"

    assert trainer.reproducibility() == [reason] and reason in trainer.describe()
    trainer.run([1, 2])
    assert f"may not be bit-exact: {reason}" in caplog.text
    strict = Trainer(lambda engine, batch: 1.0)
    Checkpoint(tmp_path / "strict", strict=True).attach(strict)
    with pytest.raises(NotExact, match="no parameters are saved"):
        strict.run([1, 2])
    trainer.register("own", Kept([torch.zeros(3)]))
    assert trainer.reproducibility() == []


def test_optimizer_of_ones_own_update_that_nobody_registered_is_said_to_be_missing(tmp_path):
    model = linear()
    adam, scaler = torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cpu")

    def step(engine, batch):
        scaler.step(adam)
        return 1.0

    class Own:
        def step(self, engine, batch):
            return 1.0

    own = Own()
    own.first = adam
    for update, names in ((step, ["adam", "scaler"]), (own.step, ["first"])):
        trainer = Trainer(update)
        Checkpoint(tmp_path).attach(trainer)
        trainer.register("model", model)
        missing = [reason.partition(" ")[0] for reason in trainer.reproducibility()]
        assert sorted(missing) == names
        trainer.register("optimizer", adam, shared=True)
        trainer.register("scaler", scaler, shared=True)
        assert trainer.reproducibility() == []
