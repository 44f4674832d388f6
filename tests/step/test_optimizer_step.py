"""The step without torch's wrapper: nobody who asked for the wrapper may miss it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import StepLR
from torch.profiler import ProfilerActivity, profile

from ignite_engine.step.optimizer_step import step


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return torch.optim.AdamW([parameter], lr=0.1)


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each call of torch's wrapper."""
    calls: list[str] = []
    enter = torch.autograd.profiler.record_function.__enter__

    def counting(self: Any) -> Any:
        calls.append(self.name)
        return enter(self)

    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", counting)
    return calls


def weights(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    weight: torch.Tensor = optimizer.param_groups[0]["params"][0]
    return weight


def test_the_wrapper_is_left_out_and_the_weights_are_the_same(
    optimizer: torch.optim.Optimizer, wrapped: list[str]
) -> None:
    step(optimizer)
    assert wrapped == []
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    torch.optim.AdamW([other], lr=0.1).step()
    assert len(wrapped) == 1
    assert torch.equal(weights(optimizer), other)


def test_hooks_that_come_later_are_called(optimizer: torch.optim.Optimizer) -> None:
    step(optimizer)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    step(optimizer)
    assert calls == ["before", "after"]


@pytest.mark.parametrize(
    "register", [torch_optimizer.register_optimizer_step_pre_hook, torch_optimizer.register_optimizer_step_post_hook]
)
def test_hooks_of_all_optimizers_are_called(optimizer: torch.optim.Optimizer, register: Callable[..., Any]) -> None:
    calls: list[str] = []
    handle = register(lambda *_: calls.append("hook"))
    try:
        step(optimizer)
    finally:
        handle.remove()
    step(optimizer)
    assert calls == ["hook"]


def test_profiler_sees_the_step(optimizer: torch.optim.Optimizer) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        step(optimizer)
    assert any("Optimizer.step#AdamW" in event.key for event in traced.key_averages())


def test_torch_schedulers_see_the_step(optimizer: torch.optim.Optimizer, recwarn: pytest.WarningsRecorder) -> None:
    scheduler = StepLR(optimizer, 1)
    step(optimizer)
    scheduler.step()
    assert not recwarn.list


def test_step_of_a_users_own_is_called(optimizer: torch.optim.Optimizer) -> None:
    calls: list[str] = []

    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            calls.append("own")
            return super().step(closure)

    own = Own([weights(optimizer)], lr=0.1)
    step(own)
    assert calls == ["own"]


def test_decorated_step_of_a_users_own_is_called(optimizer: torch.optim.Optimizer) -> None:
    calls: list[str] = []

    class Own(torch.optim.AdamW):
        @functools.wraps(torch.optim.AdamW.step)  # copies torch's marks too
        def step(self, closure: Any = None) -> Any:
            calls.append("own")

    step(Own([weights(optimizer)], lr=0.1))
    assert calls == ["own"]
