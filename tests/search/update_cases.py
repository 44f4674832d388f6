"""Cases of the update judge: a model, its optimizers, batches and what happens during the run, drawn from a number."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ignite_engine import TrainingEvents
from tests.search.common import device_kind

CHOICES = {
    "trunk": ("linear", "embedding", "sparse embedding", "max_norm", "conv", "tied", "checkpointed"),
    "middle": (
        *("plain", "fp32 island", "bf16 layer", "fp64 layer", "dropout", "batch norm", "writes to a weight"),
        *("spectral norm", "weight norm", "used now and then", "empty parameter"),
    ),
    "dtype": ("fp32", "bf16", "fp64"),
    "frozen": ("nothing", "trunk", "head bias"),
    "outside": ("nothing", "temperature", "module with a weight"),
    "optimizer": ("SGD", "momentum", "Adam", "AdamW", "Adagrad", "RMSprop"),
    "implementation": ("default", "foreach", "fused", "for-loop"),
    "grouping": ("one group", "two groups", "two optimizers", "two kinds", "a shared parameter"),
    "precision": ("fp32", "bf16", "fp16"),
    "scale": (2.0**10, 2.0**16, 1000.0, 2.0**120),
    "steps": (None, 1, 2, 3, 4),
    "clip": (None, 1e-2, 1.0, 1e4),
    "log_grad_norm": (False, True),
    "weights": ("none", "samples", "tensors", "some zero", "a group of zeros"),
    "loss": ("mean", "shape (1,)", "half", "fp64"),
    "extras": ("none", "scalar", "view", "count"),
    "change": ("nothing", "add group", "append", "clear and add", "replace", "freeze", "unfreeze", "options"),
    "attached": ("nothing", "LR scheduler", "step hook", "gradient hook"),
    "engine": ("Trainer", "Ignite's Engine"),
}
LISTENERS = (
    TrainingEvents.BACKWARD_COMPLETED,
    TrainingEvents.OPTIMIZER_STEP_STARTED,
    TrainingEvents.OPTIMIZER_STEP_COMPLETED,
    TrainingEvents.OPTIMIZER_STEP_SKIPPED,
)
HABITS = {
    "nothing": lambda model: None,
    "reads gradients": lambda model: [None if p.grad is None else p.grad.sum() for p in model.parameters()],
    "computes under autocast": lambda model: _own_forward(model),
    "halves gradients": lambda model: [p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None],
    "writes to weights": lambda model: [p.data.mul_(0.99) for p in model.parameters()],
}
WRITING = ("halves gradients", "writes to weights")
"""Habits that the loop written by hand has too; the others must change no bit."""
HAPPENED = ("short group", "clipped", "overflow", "group without weight", "changed")
FEATURES = (
    *(f"{name}: {value}" for name, values in CHOICES.items() for value in values),
    *(f"listener: {event.name}" for event in LISTENERS),
    *(f"habit: {name}" for name in HABITS),
    *(f"happened: {name}" for name in HAPPENED),
)
FUSED = ("SGD", "momentum", "Adam", "AdamW", "Adagrad")


@dataclass(frozen=True)
class Case:
    """One program; every field is drawn from ``number``, or made plain by hand."""

    number: int
    trunk: str
    middle: str
    dtype: str
    frozen: str
    outside: str
    optimizer: str
    implementation: str
    grouping: str
    precision: str
    scale: float
    steps: int | None
    clip: float | None
    log_grad_norm: bool
    weights: str
    loss: str
    extras: str
    change: str
    attached: str
    engine: str
    sizes: tuple[int, ...]
    epochs: int
    change_at: int
    listeners: tuple[str, ...]
    habit: str

    def features(self):
        drawn = {f"{name}: {value}" for name, value in asdict(self).items() if name in CHOICES}
        drawn |= {f"listener: {name}" for name in self.listeners}
        return drawn | ({f"habit: {self.habit}"} if self.listeners else set())


def draw(number):
    """The case of a number; each dimension is plain in a third of the cases, so that failures are simple."""
    random_ = random.Random(f"update {number}")
    drawn = {
        name: values[0] if random_.random() < 1 / 3 else random_.choice(values) for name, values in CHOICES.items()
    }
    if drawn["implementation"] == "fused" and drawn["optimizer"] not in FUSED:
        drawn["implementation"] = "foreach"
    if drawn["trunk"] == "sparse embedding" and drawn["grouping"] != "two kinds":
        drawn["grouping"] = "two optimizers"  # torch's sparse and dense optimizers take no parameter of the other kind
    if drawn["precision"] != "fp32":
        drawn["dtype"] = "fp32"
        if drawn["grouping"] == "a shared parameter" and drawn["precision"] == "fp16":
            drawn["grouping"] = "two optimizers"  # torch's scaler unscales it twice
    if drawn["trunk"] == "sparse embedding" and drawn["change"] in ("append", "clear and add", "replace"):
        drawn["change"] = "add group"
    half = drawn["dtype"] == "bf16" or drawn["middle"] == "bf16 layer"
    if half and (drawn["implementation"], drawn["optimizer"]) == ("fused", "momentum"):
        # torch 2.13 reads momentum there that was never written: other bits each time
        drawn["implementation"] = "foreach"
    count = random_.randint(3, 9)
    listened = [event.name for event in LISTENERS if random_.random() < 0.25]
    return Case(
        number,
        **drawn,
        sizes=tuple(random_.randint(2, 5) for _ in range(count)),
        epochs=random_.choice((1, 1, 2)),
        change_at=random_.randint(1, 3),
        listeners=tuple(listened),
        habit=random_.choice(tuple(HABITS)),
    )


class Trunk(nn.Module):
    """From inputs to a row of 8 numbers for each sample."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        if kind == "conv":
            self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
            self.norm, self.last = nn.BatchNorm2d(4), nn.Linear(4, 8)
        elif kind in ("embedding", "sparse embedding", "max_norm"):
            sparse, max_norm = kind == "sparse embedding", 0.5 if kind == "max_norm" else None
            self.embedding = nn.Embedding(12, 8, sparse=sparse, max_norm=max_norm)
        else:
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
            if kind == "tied":
                self.third = nn.Linear(8, 8)
                self.third.weight = self.second.weight

    def forward(self, batch):
        if self.kind == "conv":
            images = batch["images"].to(memory_format=torch.channels_last)
            return self.last(self.norm(self.conv(images)).relu().mean((2, 3)))
        if hasattr(self, "embedding"):
            return self.embedding(batch["tokens"]).mean(1)
        if self.kind == "checkpointed":
            checkpoint = torch.utils.checkpoint.checkpoint
            return checkpoint(self._two_layers, batch["rows"], use_reentrant=False)
        hidden = self._two_layers(batch["rows"])
        return self.third(hidden.tanh()) if self.kind == "tied" else hidden

    def _two_layers(self, rows):
        return self.second(self.first(rows).tanh())


class Net(nn.Module):
    """A trunk, a layer in the middle that is out of the ordinary, and a head."""

    def __init__(self, case):
        super().__init__()
        self.trunk, self.middle = Trunk(case.trunk), case.middle
        dtype = {"bf16 layer": torch.bfloat16, "fp64 layer": torch.float64}.get(case.middle, torch.float32)
        self.layer = nn.Linear(8, 8, dtype=dtype)
        self.norm = nn.BatchNorm1d(8) if case.middle == "batch norm" else nn.Identity()
        if case.middle in ("spectral norm", "weight norm"):
            getattr(nn.utils.parametrizations, case.middle.replace(" ", "_"))(self.layer)
        if case.middle == "empty parameter":
            self.layer.empty = nn.Parameter(torch.empty(0))
        self.calls = 0
        self.dropout = nn.Dropout(0.4 if case.middle == "dropout" else 0.0)
        self.spare = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 1)

    def forward(self, batch):
        hidden = self.trunk(batch).tanh()
        if self.middle == "used now and then":
            self.calls += 1
            if self.calls % 3:
                return self.head(hidden * self.spare).squeeze(1)
        if self.middle == "fp32 island":
            with torch.autocast("cpu", enabled=False):
                hidden = self.layer(hidden.to(self.layer.weight.dtype))
        elif self.layer.weight.dtype != self.head.weight.dtype:
            with torch.autocast("cpu", enabled=False):
                hidden = self.layer(hidden.to(self.layer.weight.dtype)).to(self.head.weight.dtype)
        else:
            hidden = self.layer(hidden)
        hidden = self.dropout(self.norm(hidden.to(self.head.weight.dtype)).tanh())
        return self.head(hidden * self.spare).squeeze(1)


class WeightedLoss(nn.Module):
    """The loss of a case; with a weight of its own where the case says so."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.temperature = nn.Parameter(torch.ones(1)) if case.outside != "nothing" else None

    def forward(self, model, batch):
        case, output = self.case, model(batch)
        error = output - batch["targets"].to(output.dtype if case.loss == "half" else model.head.weight.dtype)
        each = error.pow(2) if self.temperature is None else error.pow(2) * self.temperature
        if case.loss == "half":
            each = each.to(output.dtype)
        loss = (each.double() if case.loss == "fp64" else each).mean()
        if case.middle == "writes to a weight":
            weight = model.head.weight.data
            weight.div_(weight.norm().clamp(min=1.0))
        if case.loss == "shape (1,)":
            loss = loss.reshape(1)
        if case.extras == "none":
            return loss
        named = {"scalar": loss.detach() * 2, "view": each.detach()[0], "count": (each > 0.5).sum()}
        return loss, {"extra": named[case.extras]}


@dataclass
class Built:
    """What both loops train, each its own."""

    model: Net
    loss_fn: Any
    optimizers: dict[str, torch.optim.Optimizer]
    epochs: list[list[dict[str, Tensor]]]
    weight_fn: Callable[[dict[str, Tensor]], float] | None
    scheduler: Any = None

    def parameters(self):
        """Of the optimizers, each once, in their order."""
        groups = [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        return list({id(each): each for group in groups for each in group["params"]}.values())

    def parameters_of_the_norm(self):
        """As a loop sums them up by ``clip_grad_norm_(model.parameters())``, where all of them are the model's."""
        held, of_model = {id(each) for each in self.parameters()}, list(self.model.parameters())
        in_order = [each for each in of_model if id(each) in held]
        return in_order if len(in_order) == len(held) else self.parameters()


def build(case):
    """The same in every call."""
    torch.manual_seed(case.number % 2**31)
    model, loss_module = Net(case), WeightedLoss(case)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[case.dtype]
    if case.dtype != "fp32":
        model.to(dtype)
    model.to(device_kind()), loss_module.to(device_kind())
    outside = [] if loss_module.temperature is None else [loss_module.temperature]
    loss_fn = loss_module
    if case.outside == "temperature":  # a plain function, of which nothing is known
        loss_fn = lambda model, batch: loss_module(model, batch)  # noqa: E731
    if case.frozen == "trunk" and case.trunk != "sparse embedding":
        model.trunk.requires_grad_(False)
    elif case.frozen == "head bias":
        model.head.bias.requires_grad_(False)
    # the spare one is not trained from the start: changes of groups bring it in
    body = [each for each in (*model.trunk.parameters(), *model.layer.parameters(), *model.norm.parameters())]
    head = [*model.head.parameters(), *outside]
    optimizers = _optimizers(case, body, head)
    generator = torch.Generator().manual_seed(case.number % 2**31 + 1)
    epochs = [[_batch(size, generator, dtype) for size in case.sizes] for _ in range(case.epochs)]
    built = Built(model, loss_fn, optimizers, epochs, _weight_fn(case, epochs))
    _attach(case, built)
    return built


def change(case, built):
    """What a handler, or the loop, does after update ``change_at``."""
    optimizer, model = list(built.optimizers.values())[-1], built.model
    if case.change == "add group":
        optimizer.add_param_group({"params": [model.spare], "lr": 0.03})
    elif case.change == "append":
        optimizer.param_groups[-1]["params"].append(model.spare)
    elif case.change == "clear and add":
        kept = [each for group in optimizer.param_groups for each in group["params"]]
        optimizer.param_groups.clear()
        optimizer.add_param_group({"params": [*kept[::-1], model.spare]})
    elif case.change == "replace":
        old = model.head.weight
        model.head.weight = nn.Parameter(old.detach() * 0.5)
        for group in optimizer.param_groups:
            group["params"][:] = [model.head.weight if each is old else each for each in group["params"]]
    elif case.change == "freeze":
        model.layer.requires_grad_(False)
    elif case.change == "unfreeze":
        model.requires_grad_(True)
    elif case.change == "options":
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


def _optimizers(case, body, head):
    def made(kind, parameters):
        flags = {
            "default": {},
            "foreach": {"foreach": True},
            "fused": {"fused": True},
            "for-loop": {"foreach": False},
        }[case.implementation if kind in FUSED or case.implementation != "fused" else "default"]
        options = {"SGD": {"lr": 0.05}, "momentum": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}}
        name = "SGD" if kind == "momentum" else kind
        optimizer = getattr(torch.optim, name)(parameters, **options.get(kind, {"lr": 0.02}), **flags)
        return optimizer

    if case.grouping == "one group":
        return {"optimizer": made(case.optimizer, [*body, *head])}
    if case.grouping == "two groups":
        return {"optimizer": made(case.optimizer, [{"params": body, "lr": 0.01}, {"params": head}])}
    second = "SGD" if case.grouping == "two kinds" and case.optimizer != "SGD" else "AdamW"
    if case.grouping == "a shared parameter":
        return {"body": made(case.optimizer, [*body, head[0]]), "head": made(case.optimizer, head)}
    if case.trunk != "sparse embedding":
        return {"body": made(case.optimizer, body), "head": made(second, head)}
    sparse = body[:1]
    dense = [*body[1:], *head]
    return {"sparse": torch.optim.SparseAdam(sparse, lr=0.05), "dense": made(case.optimizer, dense)}


def _batch(size, generator, dtype):
    return {
        "rows": torch.randn(size, 6, generator=generator).to(dtype),
        "images": torch.randn(size, 2, 4, 4, generator=generator).to(dtype),
        "tokens": torch.randint(0, 12, (size, 3), generator=generator),
        "targets": torch.randn(size, generator=generator) * 2,
    }


def _weight_fn(case, epochs):
    if case.weights == "none":
        return None
    generator = random.Random(case.number)
    zero = set()
    for batches in epochs:
        if case.weights == "some zero":
            zero |= {id(batch) for batch in batches if generator.random() < 0.4}
        elif case.weights == "a group of zeros":
            zero |= {id(batch) for batch in batches[: case.steps or 1]}
    if case.weights == "tensors":
        return lambda batch: batch["targets"].abs().sum()
    return lambda batch: 0 if id(batch) in zero else len(batch["targets"])


def _attach(case, built):
    optimizer = next(iter(built.optimizers.values()))
    if case.attached == "LR scheduler":
        built.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    elif case.attached == "step hook":
        optimizer.register_step_pre_hook(
            lambda optimizer, *_: [g.update(lr=g["lr"] * 0.95) for g in optimizer.param_groups] and None
        )
    elif case.attached == "gradient hook":
        built.model.head.weight.register_hook(lambda gradient: gradient * 2)


def _own_forward(model):
    with torch.no_grad(), torch.autocast(device_kind(), dtype=torch.bfloat16):
        return model.head(torch.ones(1, 8, dtype=model.head.weight.dtype, device=device_kind()))
