"""What a precision's name means, and one verdict of the loss scaler over several optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ignite_engine.step.precision import LossScaler, autocast, check_precision, loss_scaler


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_precision_is_the_dtype_of_matrix_products(name: str, dtype: torch.dtype) -> None:
    with autocast(name, "cpu"):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype


def test_unknown_precisions_and_options_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="precision must be one of fp32, bf16, fp16, got 'half'"):
        check_precision("half")
    with pytest.raises(ValueError, match="have no effect with precision 'fp32'"):
        loss_scaler("fp32", "cpu", {"init_scale": 2.0})
    assert loss_scaler("bf16", "cpu", None) is None and loss_scaler("fp32", "cpu", {}) is None


def optimizer(gradient: float | None, scale: float = 1.0) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = None if gradient is None else torch.full((2,), gradient * scale)
    return torch.optim.SGD([parameter], lr=1.0)


def scaler(**options: float) -> LossScaler:
    made = LossScaler("cpu", init_scale=8.0, growth_interval=1, **options)  # type: ignore[arg-type]
    made.scale(torch.ones(()))  # torch makes its tensors here
    return made


def gradient(of: torch.optim.Optimizer) -> list[float]:
    return of.param_groups[0]["params"][0].grad.tolist()  # type: ignore[no-any-return]


def test_finite_gradients_are_unscaled_and_the_scale_grows() -> None:
    made, optimizers = scaler(), [optimizer(3.0, 8.0), optimizer(5.0, 8.0), optimizer(None)]

    assert made.unscale_all(optimizers)
    assert [gradient(each) for each in optimizers[:2]] == [[3.0, 3.0], [5.0, 5.0]]
    assert optimizers[0].param_groups[0]["params"][0].tolist() == [1.0, 1.0]  # no optimizer was stepped
    made.adjust()
    assert made.get_scale() == 16.0


@pytest.mark.parametrize("place", [0, 1])
def test_an_overflow_anywhere_is_one_for_all_and_the_scale_falls(place: int) -> None:
    made, optimizers = scaler(), [optimizer(3.0), optimizer(5.0)]
    optimizers[place] = optimizer(float("inf"))

    assert not made.unscale_all(optimizers)
    made.adjust()
    assert made.get_scale() == 4.0
    assert made.unscale_all([optimizer(3.0)])  # the next update begins with none


def test_without_a_gradient_nothing_is_judged() -> None:
    made = scaler()

    assert made.unscale_all([optimizer(None)])
    made.adjust()
    assert made.get_scale() == 8.0


def test_a_parameter_of_two_optimizers_is_unscaled_once() -> None:
    made, first = scaler(), optimizer(3.0, 8.0)
    second = torch.optim.SGD(first.param_groups[0]["params"], lr=1.0)

    assert made.unscale_all([first, second]) and gradient(first) == [3.0, 3.0]


def test_a_scaler_that_is_switched_off_lets_everything_step() -> None:
    made = loss_scaler("fp16", "cpu", {"enabled": False})

    assert made is not None and made.unscale_all([optimizer(float("inf"))])
    made.adjust()
