"""Models and optimizers are saved by name, whatever wraps them, and with what is trained outside of the model."""

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, Update, load_weights, loader
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import Checkpoint
from tests.kit import saved
from tests.kit.refusals import refusals
from tests.kit.resume import leaves, same_bits
from tests.kit.tiny import Numbers, linear, mse, one, trainer_of


def attached(trainer, folder, **options):
    checkpoint = Checkpoint(folder, **options)
    checkpoint.attach(trainer)
    return checkpoint


def run(trainer, iterations):
    trainer.run(loader(Numbers(24), 2), max_iters=iterations)


def numbered(parameters):
    return {parameter: number for number, parameter in enumerate(parameters)}


def assert_goes_on(folder, start, stop=3, last=6, strict=True, **options):
    """A run that ends after an iteration, and another one that goes on, end as the whole one.

    Args:
        start: makes a trainer, and gives it with all parameters and the optimizer.

    Returns:
        What ``start`` gave for the whole run.
    """
    made = {}
    for name, ends in (("whole", (last,)), ("cut", (stop, last))):
        for end in ends:
            made[name] = trainer, _, _ = start()
            attached(trainer, folder / name, strict=strict, **options).resume()
            run(trainer, end)
            assert trainer.state.iteration == end
    (_, whole, first), (_, parameters, second) = made["whole"], made["cut"]
    assert all(torch.equal(*pair) for pair in zip(whole, parameters, strict=True))
    assert [each.requires_grad for each in whole] == [each.requires_grad for each in parameters]
    states = [
        dict(leaves({names.get(key, key): value for key, value in each.state.items()}))
        for each, names in ((first, numbered(whole)), (second, numbered(parameters)))
    ]
    assert states[0].keys() == states[1].keys()
    assert all(same_bits(value, states[1][path]) for path, value in states[0].items())
    assert [len(group["params"]) for group in first.param_groups] == [
        len(group["params"]) for group in second.param_groups
    ]
    return made["whole"]


# -- optimizers of all kinds -------------------------------------------------------------------------------------------


class Around:
    """Steps with another optimizer, to whose state and groups alone it leads, as timm's Lookahead does."""

    def __init__(self, base):
        self.base, self.state = base, {}
        self.zero_grad, self.state_dict, self.load_state_dict = base.zero_grad, base.state_dict, base.load_state_dict

    def step(self):
        self.base.step()

    @property
    def param_groups(self):
        return self.base.param_groups

    @property
    def defaults(self):
        return self.base.defaults


class WithKeys(torch.optim.NAdam):
    """Keeps state under keys that are no parameters: a count, and an average of the size of all steps."""

    def step(self, closure=None):
        state = self.state
        sizes = torch.stack([each.grad.norm() for group in self.param_groups for each in group["params"]])
        known = state.get("sizes", {"mean": torch.zeros_like(sizes), "counts": [0]})
        state["sizes"] = {"mean": 0.5 * (known["mean"] + sizes), "counts": [known["counts"][0] + 1]}
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + float(state["sizes"]["mean"].sum()) + state["sizes"]["counts"][0])
        return super().step(closure)


def in_fp32(around):
    """Keeps one sum of gradients for each parameter in fp32, in whatever ``around`` puts it."""

    class InFp32(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                known = [value for _, value in leaves(self.state[parameter])]
                total = parameter.grad.float() + (known[0] / 3 if known else 0)
                self.state[parameter] = around(total)
                parameter.data -= 0.1 * total.to(parameter.dtype)

    return InFp32


class Lookahead(torch.optim.SGD):
    """Saves what it keeps in attributes, under names of its own."""

    def __init__(self, params, lr, *, with_state=True):
        super().__init__(params, lr=lr, momentum=0.9)
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


def without_state(parameters, lr):
    return Lookahead(parameters, lr, with_state=False)


KINDS = {
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,  # its mu_product is fp32 beside bf16 weights; torch's own loading casts it
    "ASGD": torch.optim.ASGD,
    "keys of its own": WithKeys,
    "around keys": lambda parameters, lr: Around(WithKeys(parameters, lr)),
    "around another": lambda parameters, lr: Around(torch.optim.SGD(parameters, lr, momentum=0.9)),
    "a mapping": in_fp32(lambda value: {"sum": value}),
    "a list": in_fp32(lambda value: {"sums": [value]}),
    "nested": in_fp32(lambda value: {"sums": ({"inside": value},)}),
    "a tensor": in_fp32(lambda value: value),
    "beside its state": Lookahead,
}
OWN = ["AdamW", "NAdam", "nested", "beside its state"]


def training(kind, dtype, own):
    model = linear(dtype=dtype)
    optimizer = kind([*model.parameters()], lr=0.1)

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
    return trainer, [*model.parameters()], getattr(optimizer, "base", optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "own"), [*((name, False) for name in KINDS), *((name, True) for name in OWN), (without_state, True)]
)
def test_state_of_any_form_is_resumed_in_its_own_type(tmp_path, name, own, dtype):
    kind = name if callable(name) else KINDS[name]
    assert_goes_on(tmp_path, lambda: training(kind, dtype, own))


# -- groups that change during a run -----------------------------------------------------------------------------------


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


def named(model):
    return torch.optim.AdamW(model.body.named_parameters(), lr=0.1)


def add_named_group(model, optimizer):
    optimizer.add_param_group({"params": [*model.head.named_parameters()], "lr": 0.01})


CHANGES = [
    (freeze, add_group),
    (freeze, append),
    (freeze, clear_and_add),
    (freeze_in_place, unfreeze_in_place),
    (named, add_named_group),
]


@pytest.mark.parametrize(("build", "change"), CHANGES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("changed_at", [2, 3])
def test_a_run_that_changed_its_groups_is_resumed_by_the_same_program(build, change, changed_at, tmp_path):
    def start():
        model = Parts()
        optimizer = build(model)
        trainer = Trainer(Update(model, optimizer, mse, clip_norm=0.1), 2)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=changed_at), lambda: change(model, optimizer))
        return trainer, [*model.parameters()], optimizer

    _, (body, *_), _ = assert_goes_on(tmp_path, start)
    assert not torch.equal(body, Parts().body.weight)


def test_a_group_that_the_program_adds_before_the_resume_is_taken_as_it_is(tmp_path):
    def start():
        model = Parts()
        optimizer = freeze(model)
        add_group(model, optimizer)
        return Trainer(Update(model, optimizer, mse)), [*model.parameters()], optimizer

    _, _, optimizer = assert_goes_on(tmp_path, start)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]


# -- what is trained outside of the model ------------------------------------------------------------------------------


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


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("make", [module_loss, method_of_a_module, closure])
def test_parameters_that_the_model_does_not_hold_are_saved_and_resumed(make, background, tmp_path):
    def start():
        model = linear()
        loss_fn, held, _ = make(model)
        optimizer = torch.optim.AdamW([{"params": list(model.parameters())}, {"params": held}], lr=0.1)
        return Trainer(Update(model, optimizer, loss_fn)), [*model.parameters(), *held], optimizer

    _, parameters, _ = assert_goes_on(tmp_path, start, background=background)
    names = make(linear())[2]
    parts = saved.parts(tmp_path / "whole")
    assert sorted(parts["parameters"]) == sorted(names)
    assert parts["optimizer"]["param_groups"][1]["params"] == [f"parameters/{names[0]}"]
    assert not torch.equal(parameters[-1], torch.ones_like(parameters[-1]))


def test_parameters_that_come_from_outside_during_the_run_are_reported(tmp_path):
    trainer = trainer_of()
    assert trainer.reproducibility() == []
    trainer.update.optimizers["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    (reason,) = trainer.reproducibility()
    assert "optimizer" in reason and "without saving their values" in reason
    attached(without := trainer_of(), tmp_path)
    run(without, 1)
    assert "parameters" not in saved.parts(tmp_path)


# -- names -------------------------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """Looks like DDP."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, inputs):
        return self.module(inputs)

    def no_sync(self): ...


def test_names_do_not_depend_on_the_wrapping(tmp_path):
    model = linear()
    trainer = Trainer(Update(Wrapper(model), torch.optim.AdamW(model.parameters(), lr=0.1), mse))
    attached(trainer, tmp_path)
    run(trainer, 2)
    parts = saved.parts(tmp_path)
    names = [name for name, _ in model.named_parameters()]
    assert list(parts["model"]) == list(parts["optimizer"]["state"]) == names
    assert parts["optimizer"]["param_groups"][0]["params"] == names
    for wrap in (Wrapper, torch.compile, lambda each: Wrapper(torch.compile(each))):
        other = linear()
        load_weights(wrap(other), tmp_path)
        assert torch.equal(one(other), one(model))


def test_the_state_of_an_optimizer_finds_its_parameters_in_another_order(tmp_path):
    whole, _, before = training(torch.optim.AdamW, torch.float32, False)
    attached(whole, tmp_path)
    run(whole, 2)
    model = linear()
    backwards = torch.optim.AdamW([*model.parameters()][::-1], lr=0.5)
    attached(Trainer(Update(model, backwards, mse)), tmp_path).resume()
    found = [backwards.state[parameter]["exp_avg"] for parameter in model.parameters()]
    assert all(torch.equal(*pair) for pair in zip(found, (each["exp_avg"] for each in before.state.values())))
    assert len(found) == 4 and backwards.param_groups[0]["lr"] == 0.1


def adam(*groups, kind=torch.optim.AdamW, model=linear, **options):
    """A trainer with a group for each of these words: the parameters whose names have it."""

    def make():
        built = model()
        parts = [{"params": [each for name, each in built.named_parameters() if word in name]} for word in groups]
        return Trainer(Update(built, kind(parts or built.parameters(), lr=0.1, **options), mse))

    return make


def other(saved_by, resumed_by):
    """A resume of what another program has saved."""

    def call(folder):
        trainer = saved_by()
        attached(trainer, folder)
        run(trainer, 2)
        attached(resumed_by(), folder).resume()

    return call


def two_optimizers(kind):
    def make():
        model = Parts()
        both = {"body": kind(model.body.parameters()), "head": torch.optim.SGD(model.head.parameters())}
        return Trainer(Update(model, both, mse))

    return make


def smaller():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 1), nn.Linear(1, 1))


LIKE = [("AdamW", "Adam"), ("Adam", "AdamW"), ("Adam", "Adamax"), ("NAdam", "RAdam"), ("AdamW", "SGD")]
test_refusals = refusals(
    [
        (
            "another model",
            other(adam(), adam(model=smaller)),
            StateMismatch,
            "3.weight (1, 1) saved without it 0.bias missing saved (4,) new folder",
        ),
        *(
            (
                f"groups {groups}",
                other(adam("0.", "2."), adam(*groups)),
                StateMismatch,
                "parameter groups 2 saved resume(ignore=['optimizer'])",
            )
            for groups in (("2.", "0."), ("",), ("weight", "bias"))
        ),
        *(
            (
                f"{first} as {second}",
                other(adam(kind=getattr(torch.optim, first)), adam(kind=getattr(torch.optim, second))),
                StateMismatch,
                f"optimizer is {second} saved one was {first}",
            )
            for first, second in LIKE
        ),
        (
            "one of several",
            other(two_optimizers(torch.optim.AdamW), two_optimizers(torch.optim.Adam)),
            StateMismatch,
            "resume(ignore=['optimizer/body'])",
        ),
        (
            "a state_dict without state",
            other(lambda: training(without_state, torch.float32, False)[0], linear),
            StateMismatch,
            "Lookahead no 'state' trainer.register",
        ),
    ]
)
