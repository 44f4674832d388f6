"""States of models and optimizers: by name, whatever wraps them, and with what is trained outside of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn

from ignite_engine import Trainer, Update, loader
from ignite_engine.checkpointing.nested import walk
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import Checkpoint
from ignite_engine.states.model_and_optimizer import ModelState, OptimizerState, ParametersState, unwrap
from tests.kit.tiny import Numbers, linear, mse, numbers_loader, one, trainer_of


class Wrapper(nn.Module):
    """Looks like DDP."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def no_sync(self): ...


def test_names_do_not_depend_on_the_wrapping():
    model = linear()
    compiled = torch.compile(model)
    names = list(model.state_dict())

    for wrapped in (Wrapper(model), compiled, Wrapper(compiled), torch.compile(Wrapper(model))):
        assert unwrap(wrapped) is model
        assert list(ModelState(wrapped).state_dict()) == names
    other = linear()
    with torch.no_grad():
        next(other.parameters()).zero_()
    ModelState(Wrapper(other)).load_state_dict(ModelState(model).state_dict())
    assert torch.equal(next(other.parameters()), next(model.parameters()))


def test_another_model_is_refused_in_one_line():
    saved, other = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1))

    with pytest.raises(StateMismatch) as caught:
        ModelState(other).load_state_dict(ModelState(saved).state_dict())
    assert str(caught.value) == (
        "The model is not the saved one (1.weight is (1, 3), saved without it; 1.bias is (1,), saved without it; "
        "0.bias is missing, saved (3,)): build it as it was saved, or start a run in a new folder."
    )


def test_name_of_a_users_own_module_is_kept():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert list(ModelState(Net()).state_dict()) == ["module.weight", "module.bias"]


def adam(model, *names):
    """One group for each of ``names``: the parameters whose names contain it."""
    groups = [{"params": [p for n, p in model.named_parameters() if name in n]} for name in names]
    return torch.optim.AdamW(groups, lr=0.1)


def stepped(model, optimizer):
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(index + 1))
    optimizer.step()
    return OptimizerState(optimizer, model)


def test_optimizer_state_is_keyed_by_parameter_names():
    model = linear()
    state = stepped(model, adam(model, "0.", "2.")).state_dict()

    assert [group["params"] for group in state["param_groups"]] == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    assert set(state["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_optimizer_state_finds_its_parameters_in_another_order():
    model, other = linear(), linear()
    state = stepped(model, adam(model, "")).state_dict()
    backwards = torch.optim.AdamW(list(other.parameters())[::-1], lr=0.5)
    OptimizerState(backwards, other).load_state_dict(state)

    for name, parameter in other.named_parameters():
        assert torch.equal(backwards.state[parameter]["exp_avg"], state["state"][name]["exp_avg"]), name
    assert backwards.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("groups", [("2.", "0."), ("",), ("0.",), ("weight", "bias")])
def test_other_parameter_groups_are_refused(groups):
    model, other = linear(), linear()
    state = stepped(model, adam(model, "0.", "2.")).state_dict()

    with pytest.raises(ValueError, match="parameter groups are not the 2 saved ones") as caught:
        OptimizerState(adam(other, *groups), other).load_state_dict(state)
    assert all(part in str(caught.value) for part in ("resume(ignore=['optimizer'])", "checkpoint.ignore in a config"))


def test_optimizer_of_another_kind_is_refused():
    model = linear()
    saved = OptimizerState(torch.optim.AdamW(model.parameters()), model).state_dict()
    with pytest.raises(StateMismatch, match="The optimizer is SGD and the saved one was AdamW: build"):
        OptimizerState(torch.optim.SGD(model.parameters(), 0.1), model).load_state_dict(saved)
    scheduled = torch.optim.AdamW(model.parameters(), foreach=True)
    torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.5)  # adds initial_lr
    OptimizerState(scheduled, model).load_state_dict(saved)


def test_sparse_adam_round_trip():
    def make():
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


def test_fresh_optimizer_gets_no_state_by_being_saved():
    trainer = trainer_of()

    assert trainer.registry.capture()[0]["optimizer"]["state"] == {}
    trainer.run(numbers_loader(4))
    assert len(trainer.registry.capture()[0]["optimizer"]["state"]) == 4


@pytest.mark.parametrize(
    ("kind", "other"),
    [("AdamW", "Adam"), ("Adam", "AdamW"), ("Adam", "Adamax"), ("Adamax", "Adam"), ("NAdam", "RAdam")],
)
def test_optimizer_of_a_like_kind_is_refused(kind, other):
    model = linear()
    saved = OptimizerState(getattr(torch.optim, kind)(model.parameters()), model).state_dict()

    with pytest.raises(StateMismatch, match=f"The optimizer is {other} and the saved one was {kind}: build that one"):
        OptimizerState(getattr(torch.optim, other)(model.parameters()), model).load_state_dict(saved)


def test_errors_name_the_part_of_one_of_several_optimizers():
    def parts(kind):
        model = Parts()
        both = {"body": kind(model.body.parameters()), "head": torch.optim.SGD(model.head.parameters())}
        return {name: obj for name, obj, _ in Update(model, both, mse).stateful()}

    saved = parts(torch.optim.AdamW)["optimizer/body"].state_dict()
    with pytest.raises(StateMismatch, match=r"leave it out with resume\(ignore=\['optimizer/body'\]\)"):
        parts(torch.optim.Adam)["optimizer/body"].load_state_dict(saved)


class _Plain(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})


def test_a_group_that_is_added_after_a_load_has_the_options_of_one_that_is_added_without():
    """torch gives an optimizer another default when it loads a state."""
    model, other = linear(), linear()
    whole, resumed = (_Plain([next(each.parameters())], lr=0.1) for each in (model, other))
    OptimizerState(resumed, other).load_state_dict(OptimizerState(whole, model).state_dict())
    for optimizer, each in ((whole, model), (resumed, other)):
        optimizer.add_param_group({"params": [*each.parameters()][1:]})
    assert [{*group} for group in resumed.param_groups] == [{*group} for group in whole.param_groups]
    assert resumed.defaults == whole.defaults


def test_rate_of_a_scheduler_is_not_an_option_that_was_changed(caplog):
    model = linear()
    torch.optim.lr_scheduler.LinearLR(first := torch.optim.SGD(model.parameters(), lr=0.1), start_factor=0.5)
    torch.optim.lr_scheduler.LinearLR(second := torch.optim.SGD(model.parameters(), lr=0.1), start_factor=0.25)
    OptimizerState(second, model).load_state_dict(OptimizerState(first, model).state_dict())
    assert not caplog.records


# -- groups that change during a run ----------------------------------------------------------------------------------


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, inputs):
        return self.head(self.body(inputs).tanh())


def freeze(model):
    model.body.requires_grad_(False)
    return torch.optim.AdamW(model.head.parameters(), lr=0.1)


def add_group(model, optimizer):
    model.body.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 0.01})


def append(model, optimizer):
    model.body.requires_grad_(True)
    optimizer.param_groups[0]["params"].extend(model.body.parameters())


def clear_and_add(model, optimizer):
    model.body.requires_grad_(True)
    model.head.bias.requires_grad_(False)
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": [model.body.weight, model.head.bias], "weight_decay": 0.5})


def freeze_in_place(model):
    model.body.requires_grad_(False)
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def unfreeze_in_place(model, optimizer):
    model.body.requires_grad_(True)
    model.head.bias.requires_grad_(False)


def name(model):
    return torch.optim.AdamW(model.body.named_parameters(), lr=0.1)


def add_named_group(model, optimizer):
    optimizer.add_param_group({"params": [*model.head.named_parameters()], "lr": 0.01})


CHANGES = [
    (freeze, add_group),
    (freeze, append),
    (freeze, clear_and_add),
    (freeze_in_place, unfreeze_in_place),
    (name, add_named_group),
]


@pytest.mark.slow
@pytest.mark.parametrize(("build", "change"), CHANGES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("changed_at", [2, 3])
def test_a_run_that_changed_its_groups_is_resumed_by_the_same_program(build, change, changed_at, tmp_path):
    def start(folder):
        model = Parts()
        optimizer = build(model)
        trainer = Trainer(Update(model, optimizer, mse, clip_norm=0.1), 2)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=changed_at), lambda: change(model, optimizer))
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=3))
        return model, trainer, checkpoint

    whole, trainer, _ = start(tmp_path / "whole")
    trainer.run(loader(Numbers(24), 2), max_iters=6)
    _, first, _ = start(tmp_path / "cut")
    first.run(loader(Numbers(24), 2), max_iters=3)
    resumed, second, checkpoint = start(tmp_path / "cut")
    assert checkpoint.resume() is not None
    second.run(loader(Numbers(24), 2), max_iters=6)

    assert torch.equal(one(resumed), one(whole)) and not torch.equal(whole.body.weight, Parts().body.weight)
    assert [each.requires_grad for each in resumed.parameters()] == [each.requires_grad for each in whole.parameters()]


def test_moments_of_a_parameter_that_left_its_group_are_there_when_it_comes_back():
    def made():
        model = Parts()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, OptimizerState(optimizer, model)

    def leave(model, optimizer):
        optimizer.param_groups[0]["params"] = list(model.body.parameters())

    def come_back(model, optimizer):
        optimizer.param_groups[0]["params"].extend(model.head.parameters())
        mse(model, (torch.ones(2, 3), torch.ones(2, 1))).backward()
        optimizer.step()

    model, optimizer, state = made()
    stepped(model, optimizer)
    leave(model, optimizer)
    saved = copy.deepcopy(state.state_dict())  # torch's loading shares tensors
    other, loaded, again = made()
    ModelState(other).load_state_dict(ModelState(model).state_dict())
    again.load_state_dict(saved)
    assert len(loaded.param_groups[0]["params"]) == 2 and len(optimizer.state) == 4
    model.zero_grad()
    come_back(model, optimizer)
    come_back(other, loaded)

    assert torch.equal(one(other), one(model))


def test_groups_built_in_another_way_are_refused_though_all_names_are_known():
    model = Parts()
    optimizer = freeze(model)
    state = OptimizerState(optimizer, model)
    add_group(model, optimizer)
    other = torch.optim.AdamW(model.body.parameters())

    with pytest.raises(StateMismatch, match="1 parameter groups are not the 2 saved ones"):
        OptimizerState(other, model).load_state_dict(state.state_dict())


def test_a_group_that_the_program_adds_before_the_resume_is_taken_as_it_is():
    model, other = Parts(), Parts()
    optimizer = freeze(model)
    state = OptimizerState(optimizer, model)
    add_group(model, optimizer)
    loaded = freeze(other)
    add_group(other, loaded)
    OptimizerState(loaded, other).load_state_dict(state.state_dict())

    assert [group["lr"] for group in loaded.param_groups] == [0.1, 0.01]


# -- what is trained outside of the model -----------------------------------------------------------------------------


class ArcLike(nn.Module):
    """A loss with a weight, a buffer that it counts in, and the model inside (whose own are not saved twice)."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, model, batch):
        self.calls += 1
        return nn.functional.mse_loss(model(batch[0] * self.weight), batch[1] * self.calls.sqrt())


def module_loss(model):
    loss_fn = ArcLike(model)
    return loss_fn, [loss_fn.weight], ["loss_fn.weight", "loss_fn.calls"]


def method_of_a_module(model):
    loss_fn = ArcLike(model)
    return loss_fn.forward, [loss_fn.weight], ["loss_fn.weight", "loss_fn.calls"]


def closure(model):
    temperature = nn.Parameter(torch.ones(1))
    return lambda model, batch: mse(model, batch) * temperature, [temperature], ["optimizer.1.0"]


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("make", [module_loss, method_of_a_module, closure])
def test_parameters_that_the_model_does_not_hold_are_saved_and_resumed(make, background, tmp_path):
    def start(folder):
        model = linear()
        loss_fn, held, names = make(model)
        optimizer = torch.optim.AdamW([{"params": list(model.parameters())}, {"params": held}], lr=0.1)
        trainer = Trainer(Update(model, optimizer, loss_fn))
        checkpoint = Checkpoint(folder, background=background)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
        return model, held, names, trainer, checkpoint

    whole, expected, names, trainer, _ = start(tmp_path / "whole")
    trainer.run(numbers_loader(), max_iters=6)
    assert sorted(trainer.registry.capture()[0]["parameters"]) == sorted(names)
    assert trainer.registry.capture()[0]["optimizer"]["param_groups"][1]["params"] == [f"parameters/{names[0]}"]
    *_, first, _ = start(tmp_path / "cut")
    first.run(numbers_loader(), max_iters=4)
    resumed, held, _, second, checkpoint = start(tmp_path / "cut")
    assert checkpoint.resume() is not None
    second.run(numbers_loader(), max_iters=6)

    assert torch.equal(one(resumed), one(whole)) and torch.equal(held[0], expected[0])
    assert not torch.equal(expected[0], torch.ones_like(expected[0]))


def test_parameters_that_come_from_outside_during_the_run_are_reported():
    trainer = trainer_of()
    assert trainer.reproducibility() == []
    update = trainer.update
    update.optimizers["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    assert trainer.reproducibility() == [
        "optimizer trains parameters/optimizer.1.0, not the model's, without saving their values"
    ]


def test_without_such_parameters_there_is_no_part_of_theirs():
    assert "parameters" not in trainer_of().registry.objects
    model = linear()
    criterion = nn.MSELoss()
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters()), lambda model, batch: criterion(*batch)))
    assert "parameters" not in trainer.registry.objects


def test_names_outside_of_the_model_stay_while_groups_change():
    model, (first, second, third) = linear(), [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = torch.optim.SGD([*model.parameters(), first, second], lr=0.1)
    state = ParametersState(model, {"optimizer": optimizer})
    assert list(state.tensors()) == ["optimizer.0.4", "optimizer.0.5"]
    optimizer.param_groups[0]["params"][4:] = [second, third, first]

    names = {id(parameter): name for name, parameter in state.tensors().items()}
    assert (names[id(first)], names[id(second)]) == ("optimizer.0.4", "optimizer.0.5")
    assert names[id(third)] == "optimizer.0.5+"
    del optimizer.param_groups[0]["params"][4]
    assert set(state.tensors()) == {"optimizer.0.4", "optimizer.0.5+"}


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_optimizer_state_keeps_its_type_where_the_parameters_have_another(kind):
    """``mu_product`` and ``eta`` are fp32 beside bf16 weights; torch's own loading casts them."""

    def stepped(steps, start=None):
        model = linear(dtype=torch.bfloat16) if start is None else start[0]
        optimizer = kind(model.parameters(), lr=0.1) if start is None else start[1]
        for step in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.01 * (step + 1))
            optimizer.step()
        return model, optimizer

    model, optimizer = stepped(5)
    saved = copy.deepcopy(OptimizerState(optimizer, model).state_dict())
    other = copy.deepcopy(model)
    loaded = kind(other.parameters(), lr=0.1)
    OptimizerState(loaded, other).load_state_dict(saved)
    types = [[value.dtype for value in each.state.values()] for each in (_Flat(optimizer), _Flat(loaded))]

    assert types[0] == types[1] and torch.float32 in types[0]
    assert torch.equal(one(stepped(3, (other, loaded))[0]), one(stepped(3, (model, optimizer))[0]))


class _Around:
    """Steps with another optimizer, to whose state and groups alone it leads, as timm's Lookahead does."""

    def __init__(self, base):
        self.base, self.state = base, dict[Any, Any]()
        self.zero_grad, self.state_dict, self.load_state_dict = base.zero_grad, base.state_dict, base.load_state_dict

    def step(self):
        self.base.step()

    @property
    def param_groups(self):
        return self.base.param_groups

    @property
    def defaults(self):
        return self.base.defaults


class _WithKeys(torch.optim.NAdam):
    """Keeps state under keys that are no parameters: a count, and an average of the size of all steps."""

    def step(self, closure=None):
        state = self.state
        sizes = torch.stack([each.grad.norm() for group in self.param_groups for each in group["params"]])
        known = state.get("sizes", {"mean": torch.zeros_like(sizes), "counts": [0]})
        state["sizes"] = {"mean": 0.5 * (known["mean"] + sizes), "counts": [known["counts"][0] + 1]}
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + float(state["sizes"]["mean"].sum()) + state["sizes"]["counts"][0])
        return super().step(closure)


@pytest.mark.parametrize(
    "kind",
    [
        _WithKeys,
        lambda held: _Around(_WithKeys(held)),
        lambda held: _Around(torch.optim.SGD(held, lr=0.1, momentum=0.9)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_inside_of_an_optimizer_or_under_keys_of_its_own_is_resumed(kind, dtype, tmp_path):
    def trained(folder, iterations):
        model = linear(dtype=dtype)
        optimizer = kind([*model.parameters()])
        trainer = Trainer(Update(model, optimizer, lambda model, batch: mse(model, [each.to(dtype) for each in batch])))
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(loader(Numbers(16), 2), max_iters=iterations)
        held = getattr(optimizer, "base", optimizer)
        return one(model), sorted(f"{value.dtype}" for value in _Flat(held).state.values())

    whole = trained(tmp_path / "whole", 6)
    trained(tmp_path / "cut", 3)
    resumed = trained(tmp_path / "cut", 6)

    assert torch.equal(resumed[0], whole[0]) and resumed[1] == whole[1]


class _InFp32(torch.optim.SGD):
    """Keeps one sum of gradients for each parameter in fp32, in whatever ``around`` puts it."""

    around: Callable[[Tensor], Any]

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            known = walk(self.state[parameter])
            total = parameter.grad.float() + (known[0][1] / 3 if known else 0)
            self.state[parameter] = type(self).around(total)
            parameter.data -= 0.1 * total.to(parameter.dtype)


def _in_fp32(around):
    return type("_InFp32", (_InFp32,), {"around": staticmethod(around)})


def _trained(folder, iterations, make, dtype, own):
    """An optimizer and its model after a run that goes on where one in the folder has ended."""
    model = linear(dtype=dtype)
    optimizer = make(model.parameters())

    def loss_fn(model, batch):
        return mse(model, [each.to(dtype) for each in batch])

    def update(engine, batch):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()

    trainer = Trainer(update if own else Update(model, optimizer, loss_fn))
    if own:
        trainer.register("model", model, shared=True)
        trainer.register("optimizer", optimizer, shared=True)
    checkpoint = Checkpoint(folder, strict=True)
    checkpoint.attach(trainer)
    checkpoint.resume()
    trainer.run(loader(Numbers(16), 2), max_iters=iterations)
    return optimizer, one(model)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.NAdam,
        torch.optim.ASGD,
        _in_fp32(lambda value: {"sum": value}),
        _in_fp32(lambda value: {"sums": [value]}),
        _in_fp32(lambda value: {"sums": ({"inside": value},)}),
        _in_fp32(lambda value: value),
    ],
)
def test_state_of_any_form_is_resumed_in_its_own_type(kind, own, tmp_path):
    def make(parameters):
        return kind(parameters, lr=0.1)

    whole, weights = _trained(tmp_path / "whole", 7, make, torch.bfloat16, own)
    _trained(tmp_path / "cut", 3, make, torch.bfloat16, own)
    resumed, weights_again = _trained(tmp_path / "cut", 7, make, torch.bfloat16, own)
    states = [walk([*optimizer.state.values()]) for optimizer in (whole, resumed)]

    assert torch.equal(weights_again, weights) and len(states[0]) == len(states[1]) > 0
    for (path, value), (again, loaded) in zip(*states, strict=True):
        assert path == again and value.dtype == loaded.dtype and torch.equal(value, loaded), path


class _Lookahead(torch.optim.SGD):
    """Saves what it keeps in attributes, under names of its own."""

    def __init__(self, params, *, with_state):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.with_state, self.steps = with_state, 0
        self.slow = {}

    def step(self, closure=None):
        super().step()
        self.steps += 1
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            slow = self.slow.setdefault(index, parameter.detach().clone())
            slow += (parameter.detach() - slow) / (1 + self.steps)
            parameter.data.copy_(slow)

    def state_dict(self):
        state = super().state_dict()
        own = {"steps": self.steps, "slow": {"by_index": self.slow}}
        return own | (state if self.with_state else {"fast": state["state"], "param_groups": state["param_groups"]})

    def load_state_dict(self, state_dict):
        fast = state_dict["state" if self.with_state else "fast"]
        super().load_state_dict({"state": fast, "param_groups": state_dict["param_groups"]})
        self.steps, self.slow = state_dict["steps"], state_dict["slow"]["by_index"]


@pytest.mark.parametrize(("own", "with_state"), [(False, True), (True, True), (True, False)])
def test_what_an_optimizer_saves_beside_its_state_is_resumed(own, with_state, tmp_path):
    def make(parameters):
        return _Lookahead(parameters, with_state=with_state)

    whole, weights = _trained(tmp_path / "whole", 7, make, torch.float32, own)
    _trained(tmp_path / "cut", 3, make, torch.float32, own)
    resumed, weights_again = _trained(tmp_path / "cut", 7, make, torch.float32, own)

    assert torch.equal(weights_again, weights) and resumed.steps == whole.steps == 7


def test_an_optimizer_whose_state_dict_has_no_state_is_refused_before_it_is_trained(tmp_path):
    made = []

    def make(parameters):
        made.append(_Lookahead(parameters, with_state=False))
        return made[0]

    with pytest.raises(StateMismatch) as caught:
        _trained(tmp_path, 1, make, torch.float32, own=False)
    assert str(caught.value) == (
        "The state_dict of _Lookahead has no 'state', by which Update saves an optimizer; it has steps, slow, fast, "
        "param_groups: add it there, or give Trainer an update function of your own and register the optimizer with "
        "trainer.register(name, optimizer)."
    )
    assert made[0].steps == 0


class _Flat:
    """The tensors of an optimizer's state in order."""

    def __init__(self, optimizer):
        values = (value for each in optimizer.state.values() for value in each.values())
        self.state = {index: value for index, value in enumerate(values) if isinstance(value, Tensor)}


class MakesItsStateAtOnce(torch.optim.SGD):
    """As optimizers do that expect it in their step."""

    def __init__(self, params, lr=0.1, start=0.0):
        super().__init__(params, lr=lr)
        self.defaults["start"] = start
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.full_like(parameter, start)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, MakesItsStateAtOnce])
def test_what_an_optimizer_knows_of_a_parameter_begins_anew(kind):
    model = linear()
    optimizer = kind(model.parameters(), **({"start": 0.5} if kind is MakesItsStateAtOnce else {}))
    state = OptimizerState(optimizer, model)
    model(torch.ones(1, 3)).backward()
    optimizer.step()
    for each in optimizer.state.values():
        for value in each.values():
            value.add_(1)
    state.reset({"0.weight", "not.a.parameter"})
    after = state.state_dict()["state"]
    if kind is torch.optim.Adam:
        assert set(after) == {"0.bias", "2.weight", "2.bias"}
    else:
        assert (after["0.weight"]["sum"] == (0.5 if kind is MakesItsStateAtOnce else 0.0)).all()
        assert (after["0.bias"]["sum"] >= 1).all()
    optimizer.step()
