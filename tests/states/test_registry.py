"""What a checkpoint holds, under which name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, Update
from ignite_engine.errors import NotExact, StateMismatch
from ignite_engine.handlers import Checkpoint
from ignite_engine.states.model_and_optimizer import ModelState, OptimizerState, unwrap
from ignite_engine.states.registry import Registry
from ignite_engine.states.resume_state import ResumeState
from tests.builders import linear, mse, numbers_loader, trainer_of


class Kept:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]

    def __call__(self) -> None: ...


def test_trainer_registers_its_parts_by_stable_names() -> None:
    trainer = trainer_of(precision="fp16")
    shared, local = trainer.registry.capture()

    assert set(shared) == {"model", "optimizer", "scaler"}
    assert set(local) == {"trainer", "data", "rng"}


def test_several_optimizers_are_named_by_the_mapping() -> None:
    model = linear()
    optimizers = {
        "first": torch.optim.SGD([next(model.parameters())]),
        "rest": torch.optim.SGD(list(model.parameters())[1:]),
    }
    trainer = Trainer(Update(model, optimizers, mse))
    shared, _ = trainer.registry.capture()

    assert set(shared) == {"model", "optimizer/first", "optimizer/rest"}


def test_shared_objects_are_kept_apart_from_a_ranks_own() -> None:
    registry = Registry(ResumeState())
    registry.register("own", Kept(1))
    registry.register("same", Kept(2), shared=True)

    assert registry.capture() == ({"same": {"value": 2}}, {"own": {"value": 1}})


def test_a_name_is_given_once() -> None:
    registry, kept = Registry(ResumeState()), Kept()
    registry.register("name", kept)
    registry.register("name", kept)

    with pytest.raises(ValueError, match="'name' is taken by a Kept: give this one its own name"):
        registry.register("name", Kept())
    with pytest.raises(TypeError, match="needs an object with state_dict and load_state_dict, got int"):
        registry.register("number", 3)


def test_attached_objects_with_a_state_register_by_themselves() -> None:
    trainer, first, second = trainer_of(), Kept(5), Kept(6)
    trainer.add_event_handler(Events.COMPLETED, first)
    trainer.add_event_handler(Events.STARTED, first)
    (label,) = set(trainer.registry.objects) - set(trainer_of().registry.objects)
    trainer.add_event_handler(Events.COMPLETED, second)

    assert label == "tests/Kept" and trainer.registry.objects[label] is first
    # a second one without a name has no stable place
    assert trainer.reproducibility() == [f"{label} is attached but not saved"]


def test_named_objects_register_under_their_name() -> None:
    trainer, kept, other = trainer_of(), Kept(), Kept()
    kept.name = other.name = "mine"  # type: ignore[attr-defined]
    trainer.add_event_handler(Events.COMPLETED, kept)

    assert trainer.registry.objects["mine"] is kept
    with pytest.raises(ValueError, match="'mine' is taken"):
        trainer.add_event_handler(Events.COMPLETED, other)


# -- models and optimizers --------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """Looks like DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def no_sync(self) -> Any: ...


def test_names_do_not_depend_on_the_wrapping() -> None:
    model = linear()
    compiled = torch.compile(model)
    names = list(model.state_dict())

    for wrapped in (Wrapper(model), compiled, Wrapper(compiled), torch.compile(Wrapper(model))):  # type: ignore
        assert unwrap(wrapped) is model  # type: ignore[arg-type]
        assert list(ModelState(wrapped).state_dict()) == names  # type: ignore[arg-type]
    other = linear()
    with torch.no_grad():
        next(other.parameters()).zero_()
    ModelState(Wrapper(other)).load_state_dict(ModelState(model).state_dict())
    assert torch.equal(next(other.parameters()), next(model.parameters()))


def test_another_model_is_refused_in_one_line() -> None:
    saved, other = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1))

    with pytest.raises(StateMismatch) as caught:
        ModelState(other).load_state_dict(ModelState(saved).state_dict())
    assert str(caught.value) == (
        "The model is not the saved one (1.weight is (1, 3), saved without it; 1.bias is (1,), saved without it; "
        "0.bias is missing, saved (3,)): build it as it was saved, or start a run in a new folder."
    )


def test_name_of_a_users_own_module_is_kept() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert list(ModelState(Net()).state_dict()) == ["module.weight", "module.bias"]


def adam(model: nn.Module, *names: str) -> torch.optim.Optimizer:
    """One group for each of ``names``: the parameters whose names contain it."""
    groups = [{"params": [p for n, p in model.named_parameters() if name in n]} for name in names]
    return torch.optim.AdamW(groups, lr=0.1)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(index + 1))
    optimizer.step()
    return OptimizerState(optimizer, model)


def test_optimizer_state_is_keyed_by_parameter_names() -> None:
    model = linear()
    state = stepped(model, adam(model, "0.", "2.")).state_dict()

    assert [group["params"] for group in state["param_groups"]] == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    assert set(state["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_optimizer_state_finds_its_parameters_in_another_order() -> None:
    model, other = linear(), linear()
    state = stepped(model, adam(model, "")).state_dict()
    backwards = torch.optim.AdamW(list(other.parameters())[::-1], lr=0.5)
    OptimizerState(backwards, other).load_state_dict(state)

    for name, parameter in other.named_parameters():
        assert torch.equal(backwards.state[parameter]["exp_avg"], state["state"][name]["exp_avg"]), name
    assert backwards.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("groups", [("2.", "0."), ("",), ("0.",), ("weight", "bias")])
def test_other_parameter_groups_are_refused(groups: tuple[str, ...]) -> None:
    model, other = linear(), linear()
    state = stepped(model, adam(model, "0.", "2.")).state_dict()

    with pytest.raises(ValueError, match="parameter groups are not the 2 saved ones") as caught:
        OptimizerState(adam(other, *groups), other).load_state_dict(state)
    assert "resume(ignore=['optimizer']), or checkpoint.ignore in a config." in str(caught.value)


def test_optimizer_of_another_kind_is_refused() -> None:
    model = linear()
    saved = OptimizerState(torch.optim.AdamW(model.parameters()), model).state_dict()
    with pytest.raises(StateMismatch, match=r"The optimizer is a SGD and .* \(with amsgrad, .* now with dampening, "):
        OptimizerState(torch.optim.SGD(model.parameters(), 0.1), model).load_state_dict(saved)
    scheduled = torch.optim.AdamW(model.parameters(), foreach=True)
    torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.5)  # adds initial_lr
    OptimizerState(scheduled, model).load_state_dict(saved)


def test_sparse_adam_round_trip() -> None:
    def make() -> tuple[nn.Module, OptimizerState]:
        torch.manual_seed(0)
        model = nn.Embedding(5, 2, sparse=True)
        return model, OptimizerState(torch.optim.SparseAdam(list(model.parameters())), model)

    model, state = make()
    model(torch.tensor([1, 1, 3])).sum().backward()
    state.optimizer.step()
    other, loaded = make()
    loaded.load_state_dict(state.state_dict())

    exp_avg = loaded.optimizer.state[other.weight]["exp_avg"]
    assert torch.equal(exp_avg, state.optimizer.state[model.weight]["exp_avg"])
    assert exp_avg[1].abs().sum() > 0


def test_fresh_optimizer_gets_no_state_by_being_saved() -> None:
    trainer = trainer_of()

    assert trainer.registry.capture()[0]["optimizer"]["state"] == {}
    trainer.run(numbers_loader(4))
    assert len(trainer.registry.capture()[0]["optimizer"]["state"]) == 4


def test_checkpoint_without_any_parameters_is_said_to_be_inexact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A GAN's own update function, say: its checkpoint would hold counters alone."""
    model, kept = linear(), Kept(1)
    trainer = Trainer(lambda engine, batch: 1.0)
    trainer.register("kept", kept)
    Checkpoint(tmp_path / "any").attach(trainer)
    reason = "no parameters are saved, as no model is registered (trainer.register(name, model) saves one)"

    assert trainer.reproducibility() == [reason] and reason in trainer.describe()
    trainer.run([1, 2])
    assert f"may have other bits: {reason}" in caplog.text
    strict = Trainer(lambda engine, batch: 1.0)
    Checkpoint(tmp_path / "strict", strict=True).attach(strict)
    with pytest.raises(NotExact, match="no parameters are saved"):
        strict.run([1, 2])
    trainer.register("generator", model)
    assert reason not in trainer.reproducibility()


def test_tensors_of_an_object_of_its_own_kind_count_as_parameters(tmp_path: Path) -> None:
    trainer = Trainer(lambda engine, batch: 1.0)
    Checkpoint(tmp_path).attach(trainer)
    trainer.register("both", Kept([torch.zeros(3)]))  # type: ignore[arg-type]  # any state will do

    assert trainer.reproducibility() == []
