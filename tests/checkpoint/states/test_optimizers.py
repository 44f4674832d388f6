"""Models and optimizers are saved by name, whatever wraps them, and with what is trained outside of the model."""

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average
from torch import nn

from ignite_engine import Trainer, Update, create_evaluator, load_weights, loader
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import Checkpoint, Evaluation, Export
from tests.kit import saved
from tests.kit.refusals import refusals
from tests.kit.resume import Program, assert_resumes, leaves
from tests.kit.tiny import Numbers, linear, mse, one, trainer_of


def attached(trainer, folder, **options):
    checkpoint = Checkpoint(folder, **options)
    checkpoint.attach(trainer)
    return checkpoint


def run(trainer, iterations):
    trainer.run(loader(Numbers(24), 2), max_iters=iterations)


def resumes(build, folder, *parts, **options):
    assert_resumes(Program(build, parts=parts, checkpoint=options), folder, at=(3,), how=("stop",))


# -- optimizers of all kinds -------------------------------------------------------------------------------------------


class Averaging(torch.optim.SGD):
    """Trains at one point and is evaluated at another, as schedule-free optimizers are: ``train()`` and ``eval()``."""

    is_training = False

    def train(self):
        self._go_to(is_training=True)

    def eval(self):
        self._go_to(is_training=False)

    def step(self, closure=None):
        assert self.is_training
        super().step(closure)

    def _go_to(self, *, is_training):
        if is_training != self.is_training:
            self.is_training = is_training
            for parameter in self.param_groups[0]["params"]:
                parameter.data.mul_(2.0 if is_training else 0.5)


def test_best_and_export_have_the_weights_that_the_optimizer_is_evaluated_with(tmp_path):
    def train():
        model = linear()
        optimizer = Averaging(model.parameters(), lr=0.01)
        return model, optimizer, Trainer(Update(model, optimizer, mse))

    model, optimizer, _ = train()
    by_hand = []
    for index, batch in enumerate([*loader(Numbers(12), 2)] * 2, 1):
        optimizer.train()
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        if index % 3 == 0:
            optimizer.eval()
            by_hand.append(one(model))
            optimizer.train()

    model, optimizer, trainer = train()
    evaluated, data = [], loader(Numbers(4), 4)
    evaluator = create_evaluator(model, lambda model, batch: evaluated.append(one(model)) or mse(model, batch))
    Average().attach(evaluator, "loss")
    Evaluation(evaluator, data).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    checkpoint = attached(trainer, tmp_path / "run", best="val/loss", mode="min")
    Export(tmp_path, weights="evaluated").attach(trainer)
    trainer.run(loader(Numbers(12), 2), max_epochs=2)

    assert all(torch.equal(*pair) for pair in zip(evaluated, by_hand, strict=True))
    load_weights(best := linear(), tmp_path / "run", "best")
    load_weights(exported := linear(), tmp_path / "model.safetensors")
    assert torch.equal(one(best), by_hand[checkpoint.best.iteration // 3 - 1])
    assert torch.equal(one(exported), by_hand[-1])


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


class Closed:
    """Has the state of torch's optimizers, and shows no groups; to be registered by its own update."""

    def __init__(self, parameters, lr):
        self.base = torch.optim.AdamW(parameters, lr)
        self.zero_grad, self.step = self.base.zero_grad, self.base.step
        self.state_dict, self.load_state_dict = self.base.state_dict, self.base.load_state_dict


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


class Sharing(torch.optim.Optimizer):
    """Has groups and state in common with the optimizer that it steps with, as apex's LARC does."""

    def __init__(self, inner):
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 0.9
        return self.inner.step()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)


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
    "keys of its own": WithKeys,
    "around keys": lambda parameters, lr: Around(WithKeys(parameters, lr)),
    "in common": lambda parameters, lr: Sharing(torch.optim.SGD(parameters, lr, momentum=0.9)),
    "around another": lambda parameters, lr: Around(torch.optim.SGD(parameters, lr, momentum=0.9)),
    "nested": in_fp32(lambda value: {"sums": ({"inside": value},)}),
    "a tensor": in_fp32(lambda value: value),
    "beside its state": Lookahead,
}
OWN = [torch.optim.AdamW, KINDS["nested"], Lookahead, without_state, Closed]


def training(kind, dtype, own):
    model = linear(dtype=dtype)
    optimizer = kind([*model.parameters()], lr=0.1)

    def loss_fn(model, batch):
        return mse(model, [each.to(dtype) for each in batch])

    def update(engine, batch):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Trainer(update if own else Update(model, optimizer, loss_fn))
    if own:
        trainer.register("model", model, shared=True)
        trainer.register("optimizer", optimizer, shared=True)
    return trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "own"),
    [*((kind, False) for kind in KINDS.values()), *((kind, True) for kind in OWN)],
    ids=[*KINDS, *(f"own update {number}" for number in range(len(OWN)))],
)
def test_state_of_any_form_is_resumed_in_its_own_type(kind, own, dtype, tmp_path):
    resumes(lambda: training(kind, dtype, own), tmp_path, "model", "optimizer", strict=True)


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


def clear_and_add(model, optimizer):
    model.body.requires_grad_(True)
    model.head.bias.requires_grad_(False)
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": [model.body.weight, model.head.bias], "weight_decay": 0.5})


def named(model):
    return torch.optim.AdamW(model.body.named_parameters(), lr=0.1)


def add_named_group(model, optimizer):
    optimizer.add_param_group({"params": [*model.head.named_parameters()], "lr": 0.01})


CHANGES = [
    (freeze, clear_and_add),
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
        return trainer

    resumes(start, tmp_path, "model", "optimizer", strict=True)
    assert not torch.equal(saved.parts(tmp_path / "whole")["model"]["body.weight"], Parts().body.weight)


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


def closure(model):
    temperature = nn.Parameter(torch.ones(1))
    return lambda model, batch: mse(model, batch) * temperature, [temperature], ["optimizer.1.0"]


@pytest.mark.parametrize("make", [module_loss, closure])
def test_parameters_that_the_model_does_not_hold_are_saved_and_resumed(make, tmp_path):
    def start():
        model = linear()
        loss_fn, held, _ = make(model)
        optimizer = torch.optim.AdamW([{"params": list(model.parameters())}, {"params": held}], lr=0.1)
        return Trainer(Update(model, optimizer, loss_fn))

    resumes(start, tmp_path, "parameters", strict=True, background=True)
    names = make(linear())[2]
    parts = saved.parts(tmp_path / "whole")
    assert sorted(parts["parameters"]) == sorted(names)
    assert parts["optimizer"]["param_groups"][1]["params"] == [f"parameters/{names[0]}"]
    assert not torch.equal(parts["parameters"][names[0]], torch.ones_like(parts["parameters"][names[0]]))


def test_parameters_that_come_from_outside_during_the_run_are_reported():
    trainer = trainer_of()
    assert trainer.reproducibility() == []
    trainer.update.optimizers["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    (reason,) = trainer.reproducibility()
    assert "optimizer" in reason and "without saving their values" in reason


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        torch.compile,
        pytest.param(lambda each: nn.DataParallel(torch.compile(each)), marks=pytest.mark.nightly),
    ],
    ids=["DataParallel", "compile", "both"],
)
def test_names_do_not_depend_on_the_wrapping(wrap, tmp_path):
    model = linear()
    trainer = Trainer(Update(nn.DataParallel(model), torch.optim.AdamW(model.parameters(), lr=0.1), mse))
    attached(trainer, tmp_path)
    run(trainer, 2)
    parts = saved.parts(tmp_path)
    names = [name for name, _ in model.named_parameters()]
    assert list(parts["model"]) == list(parts["optimizer"]["state"]) == names
    assert parts["optimizer"]["param_groups"][0]["params"] == names
    other = linear()
    load_weights(wrap(other), tmp_path)
    assert torch.equal(one(other), one(model))


def test_the_state_of_an_optimizer_finds_its_parameters_in_another_order(tmp_path):
    whole = training(torch.optim.AdamW, torch.float32, False)
    before = whole.update.optimizers["optimizer"]
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


def smaller():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 1), nn.Linear(1, 1))


LIKE = [("AdamW", "Adam"), ("Adam", "Adamax")]
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
            "a state_dict without state",
            other(lambda: training(without_state, torch.float32, False), linear),
            StateMismatch,
            "Lookahead no 'state' trainer.register",
        ),
    ]
)
