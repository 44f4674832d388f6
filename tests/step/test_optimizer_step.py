"""The step without torch's wrapper: whoever asked for the wrapper gets it, and torch's private names may go."""

import functools

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import StepLR
from torch.profiler import ProfilerActivity, profile

from ignite_engine import Update
from ignite_engine.step import optimizer_step
from ignite_engine.step.optimizer_step import needs_closure, step
from tests.faults.fork_server import ForkServer


@pytest.fixture
def optimizer():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return torch.optim.AdamW([parameter], lr=0.1)


@pytest.fixture
def wrapped(monkeypatch):
    """Each call of torch's wrapper."""
    calls = []
    enter = torch.autograd.profiler.record_function.__enter__

    def counting(self):
        calls.append(self.name)
        return enter(self)

    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", counting)
    return calls


def weights(optimizer):
    weight = optimizer.param_groups[0]["params"][0]
    return weight


def test_the_wrapper_is_left_out_and_the_weights_are_the_same(optimizer, wrapped):
    step(optimizer)
    assert wrapped == []
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    torch.optim.AdamW([other], lr=0.1).step()
    assert len(wrapped) == 1
    assert torch.equal(weights(optimizer), other)


def test_hooks_that_come_later_are_called(optimizer):
    step(optimizer)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    step(optimizer)
    assert calls == ["before", "after"]


@pytest.mark.parametrize(
    "register", [torch_optimizer.register_optimizer_step_pre_hook, torch_optimizer.register_optimizer_step_post_hook]
)
def test_hooks_of_all_optimizers_are_called(optimizer, register):
    calls = []
    handle = register(lambda *_: calls.append("hook"))
    try:
        step(optimizer)
    finally:
        handle.remove()
    step(optimizer)
    assert calls == ["hook"]


def test_profiler_sees_the_step(optimizer):
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        step(optimizer)
    assert any("Optimizer.step#AdamW" in event.key for event in traced.key_averages())


def test_torch_schedulers_see_the_step(optimizer, recwarn):
    scheduler = StepLR(optimizer, 1)
    step(optimizer)
    scheduler.step()
    assert not recwarn.list


def test_step_of_a_users_own_is_called(optimizer):
    calls = []

    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            calls.append("own")
            return super().step(closure)

    own = Own([weights(optimizer)], lr=0.1)
    step(own)
    assert calls == ["own"]


def test_decorated_step_of_a_users_own_is_called(optimizer):
    calls = []

    class Own(torch.optim.AdamW):
        @functools.wraps(torch.optim.AdamW.step)  # copies torch's marks too
        def step(self, closure=None):
            calls.append("own")

    step(Own([weights(optimizer)], lr=0.1))
    assert calls == ["own"]


# Each removes a private name as a torch without it would: torch's own use of it goes on under another name.
REMOVALS = {
    "profile_hook_step": "O.renamed = staticmethod(O.profile_hook_step); O._patch_step_function = patch; "
    "del O.profile_hook_step",
    "_is_profiler_enabled": "del torch.autograd.profiler._is_profiler_enabled",
    "hooks": "hide(O, '_optimizer_step_pre_hooks'); hide(O, '_optimizer_step_post_hooks')",
    "hooks of all optimizers": "sys.modules['torch.optim.optimizer'] = without(M, '_global_optimizer_p')",
    "nothing": "",
}
PROGRAM = """
import sys, types, torch
M, O = sys.modules['torch.optim.optimizer'], torch.optim.Optimizer

def without(module, start):
    return types.SimpleNamespace(**{key: value for key, value in vars(module).items() if not key.startswith(start)})

def patch(self):
    self._zero_grad_profile_name = ""
    if not hasattr(type(self).step, "hooked"):
        type(self).step = self.renamed(type(self).step)
        type(self).step.hooked = True

def hide(optimizer_class, name):
    class Hiding:  # an instance that has it no more; torch's own wrapper reads it through the class
        def __get__(self, instance, owner):
            if instance is None or "ignite_engine" in sys._getframe(1).f_code.co_filename:
                raise AttributeError(name)
            return instance.__dict__[name]
        def __set__(self, instance, value):
            instance.__dict__[name] = value
    setattr(optimizer_class, name, Hiding())

%s
wrapped = []
enter = torch.autograd.profiler.record_function.__enter__
torch.autograd.profiler.record_function.__enter__ = lambda self: (wrapped.append(self.name), enter(self))[1]
from ignite_engine import Trainer, Update
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
before = model.weight.detach().clone()
Trainer(Update(model, optimizer, lambda model, batch: model(batch).mean())).run([torch.ones(1, 2)] * 2)
assert optimizer.state[model.weight]["step"] == 2 and not torch.equal(before, model.weight)
print(len(wrapped))
"""


@pytest.fixture(scope="module")
def without_the_engine():
    with ForkServer(["torch", "ignite.handlers"]) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("name", REMOVALS)
def test_without_a_private_name_of_torch_the_engine_imports_and_trains(name, without_the_engine, tmp_path):
    said = {"output": tmp_path / "output.txt", "errors": tmp_path / "errors.txt"}
    code = without_the_engine.start("builtins:exec", PROGRAM % REMOVALS[name], {}, **said).wait()

    assert code == 0, said["errors"].read_text()
    # by torch's own wrapper, two steps of it, but where nothing is missing
    assert int(said["output"].read_text()) == (0 if name == "nothing" else 2)


def test_private_names_are_where_this_torch_has_them(optimizer):
    assert optimizer_step._WRAPPER is type(optimizer).step.__code__
    assert torch.autograd.profiler._is_profiler_enabled is False
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert torch_optimizer._global_optimizer_pre_hooks == torch_optimizer._global_optimizer_post_hooks == {}


def test_lbfgs_alone_of_torchs_optimizers_needs_a_closure():
    parameters = [nn.Parameter(torch.ones(2, 2))]
    needing = [
        name
        for name in torch.optim.__all__
        if isinstance(kind := getattr(torch.optim, name), type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
        and needs_closure(kind(parameters))
    ]

    assert needing == ["LBFGS"]


def test_patched_steps_need_no_closure(optimizer):
    StepLR(optimizer, 1)

    assert not needs_closure(optimizer)
    with pytest.raises(ValueError, match="LBFGS needs a closure that computes the loss again, which Update does not"):
        Update(nn.Linear(1, 1), torch.optim.LBFGS([weights(optimizer)]), lambda model, batch: model(batch).sum())
