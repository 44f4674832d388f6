"""Sections: strict types, and errors that name the key."""

import pytest
import torch
from pydantic import ValidationError

from ignite_engine.config.sections import OptimizerSection, RunSection, ScheduleSection, optimizer_types


def test_sections_do_not_change_and_compare_by_value():
    one, other = RunSection(max_epochs=1), RunSection(max_epochs=1)

    assert one == other
    with pytest.raises(ValidationError, match="frozen"):
        one.seed = 2


def test_every_optimizer_without_a_closure_can_be_named():
    assert {"adamw", "sgd", "sparseadam"} <= set(optimizer_types()) and "lbfgs" not in optimizer_types()
    section = OptimizerSection.model_validate({"name": "ADAMW", "lr": "1e-2", "betas": [0.5, 0.6], "fused": True})

    assert section.type is torch.optim.AdamW
    assert section.options == {"lr": 0.01, "betas": (0.5, 0.6), "fused": True}


def test_rate_alone_makes_no_optimizer_but_one_that_may_not_be_taken_does(
    monkeypatch,
):
    with pytest.raises(ValidationError, match="SparseAdam says: Invalid learning rate"):
        OptimizerSection.model_validate({"name": "SparseAdam", "lr": 0})
    made = list[object]()
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", lambda *_, **__: made.append(1))
    for options, count in (({}, 0), ({"lr": 0.5}, 0), ({"eps": 1e-6}, 1)):
        OptimizerSection.model_validate(options)

        assert len(made) == count


def test_run_has_a_length_in_epochs_or_iterations_or_both():
    with pytest.raises(ValidationError, match="expected one of max_iterations and max_epochs, or both, got neither"):
        RunSection.model_validate({})
    both = RunSection.model_validate({"max_epochs": 1, "max_iterations": 2})

    assert (both.max_epochs, both.max_iterations) == (1, 2)


@pytest.mark.parametrize("warmup", [-1, 1.5, True, "some"])
def test_warmup_is_steps_or_a_fraction(warmup):
    assert ScheduleSection.model_validate({"warmup": 0.5}).warmup == 0.5
    with pytest.raises(ValidationError, match="got "):
        ScheduleSection.model_validate({"warmup": warmup})
