"""Cases of the fit judge: what a program gives to ``fit``, drawn from a number."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, Loss, MeanSquaredError, Metric, Precision
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ignite_engine import Phase, loader
from tests.search.resume_data import RewoundLoader

Plan = dict[str, Any]
CLASSES, WIDTH = 3, 5
# one value of each; the first is the plainest
CHOICES: dict[str, tuple[str, ...]] = {
    "data": (
        *("tensors", "arrays", "TensorDataset", "list of samples", "map-style", "__getitems__", "Subset", "dicts"),
        *("sampler", "loader", "DataLoader in order", "DataLoader shuffled", "DataLoader drop_last"),
        *("DataLoader, its own iterator", "IterableDataset", "StatefulDataLoader"),
    ),
    "val": ("one", "none", "two"),
    "metrics": ("loss", "accuracy", "mse", "Loss", "one number and a vector"),
    "model": ("linear", "deep", "batch norm", "dropout", "frozen part", "tied"),
    "extras": ("none", "named losses", "scalar", "a parameter", "a buffer"),
    "weights": ("none", "samples"),
    "optimizer": ("default", "name", "options", "instance", "function", "two"),
    "schedule": (
        *("default", "none", "cosine", "linear", "StepLR", "CosineAnnealingLR", "OneCycleLR", "LambdaLR per step"),
    ),
    "precision": ("fp32", "bf16", "fp16"),
    "accumulation": ("None", "1", "2", "3"),
    "clip": ("no", "0.1", "10"),
    "length": ("max_epochs", "max_iters"),
    "log": ("iterations", "every 3", "epochs"),
    "save": ("epochs", "iterations", "every 3"),
    "background": ("no", "yes"),
    "handlers": ("none", "function and event", "object", "changes weights"),
    "calls": (
        *("one", "again", "longer", "stopped", "stopped twice", "stopped, other rate", "refused between"),
        "stopped, same model",
    ),
}
HAPPENED = ("short group", "clipped", "overflow", "stopped within an epoch", "short last batch")
FEATURES = (
    *(f"{name}: {value}" for name, values in CHOICES.items() for value in values),
    *(f"happened: {name}" for name in HAPPENED),
)
STREAMS = ("IterableDataset",)
OF_THE_RUN = ("cosine", "linear")
"""Schedules whose length is that of the run."""
REFUSED: tuple[dict[str, Any], ...] = (
    {"lr": -1.0},
    {"optimizer": "AdmaW"},
    {"schedule": "cosin"},
    {"precision": "fp12"},
    {"metrics": Accuracy()},
    {"max_epochs": 0},
    {"batch_sise": 4},
    {"best": "val/los", "mode": "min", "metrics": None},
    {"resume": {"lr": "fast"}},
)
"""Arguments that are refused."""


def draw(number: int) -> Plan:
    """The case of a number; each dimension is plain in half of the cases or a fifth, so that failures are simple."""
    draws = random.Random(f"fit {number}")
    plainness = draws.choice((0.2, 0.5))
    plan: Plan = {"number": number}
    for name, values in CHOICES.items():
        plan[name] = values[0] if draws.random() < plainness else draws.choice(values)
    plan["data"], plan["calls"] = draws.choice(CHOICES["data"]), draws.choice(CHOICES["calls"])
    batch_size = draws.randint(2, 6)
    plan |= {
        "batch size": batch_size,
        "samples": draws.choice([count for count in range(9, 32) if count % batch_size != 1]),  # BatchNorm
        "epochs": draws.randint(2, 4),
        "iterations": draws.randint(4, 16),
        "first share": draws.uniform(0.2, 0.8),
        "refused": draws.randrange(len(REFUSED)),
        "lr": draws.choice((0.01, 0.05)),
    }
    return settled(plan)


def settled(plan: Plan) -> Plan:
    """The plan with values that cannot go together replaced by those that can."""
    if plan["val"] == "none":
        plan["metrics"] = "loss"
    if plan["data"] == "DataLoader drop_last" and plan["samples"] < plan["batch size"]:
        plan["samples"] = plan["batch size"]
    if plan["calls"] == "longer" and plan["schedule"] in (*OF_THE_RUN, "OneCycleLR"):
        plan["schedule"] = "StepLR"
    if plan["calls"] == "stopped, other rate" and plan["model"] == "dropout":
        plan["calls"] = "stopped"  # no single call does the same
    if plan["calls"] == "stopped, other rate":
        plan["optimizer"] = plan["optimizer"] if plan["optimizer"] in ("default", "name", "options") else "name"
        plan["schedule"] = plan["schedule"] if plan["schedule"] in ("default", "cosine", "linear") else "default"
    if plan["data"] in STREAMS and plan["length"] == "max_epochs" and plan["schedule"] in OF_THE_RUN:
        plan["schedule"] = "default"  # its length is not known
    if plan["optimizer"] == "two" and plan["schedule"] == "OneCycleLR":
        plan["schedule"] = "StepLR"
    return plan


# -- data -------------------------------------------------------------------------------------------------------------


class Samples(Dataset[Any]):
    """Inputs whose first number says which sample it is, and classes."""

    def __init__(self, count: int, *, as_dicts: bool = False) -> None:
        generator = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, WIDTH, generator=generator)
        self.inputs[:, 0] = torch.arange(count) / 64
        self.targets = torch.randint(CLASSES, (count,), generator=generator)
        self.as_dicts = as_dicts

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        pair = self.inputs[index], self.targets[index]
        return dict(zip(("inputs", "targets"), pair, strict=True)) if self.as_dicts else pair


class BatchedSamples(Samples):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))


def data_of(plan: Plan) -> tuple[Any, dict[str, Any]]:
    """The training set, and the arguments that go with it."""
    kind, size = plan["data"], plan["batch size"]
    samples = (BatchedSamples if kind == "__getitems__" else Samples)(plan["samples"], as_dicts=kind == "dicts")
    arguments: dict[str, Any] = {"batch_size": size}
    match kind:
        case "tensors":
            return (samples.inputs, samples.targets), arguments
        case "arrays":
            return (samples.inputs.numpy(), samples.targets.numpy()), arguments
        case "TensorDataset":
            return TensorDataset(samples.inputs, samples.targets), arguments
        case "list of samples":
            return [samples[index] for index in range(len(samples))], arguments
        case "Subset":
            return Subset(Samples(plan["samples"] + 4), range(plan["samples"])), arguments
        case "sampler":
            return samples, arguments | {"sampler": list(range(len(samples)))[::-1]}
        case "loader":
            return loader(samples, size, shuffle=True, seed=7), {}
        case "DataLoader in order" | "DataLoader shuffled" | "DataLoader drop_last":
            options = {"shuffle": kind != "DataLoader in order", "drop_last": kind == "DataLoader drop_last"}
            return DataLoader(samples, size, **options), {}
        case "DataLoader, its own iterator":
            return RewoundLoader(samples, size), {}
        case "IterableDataset":
            return Stream(samples), arguments
        case "StatefulDataLoader":
            from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

            return StatefulDataLoader(samples, size, shuffle=True), {}
    return samples, arguments


IN_ORDER = ("sampler", "DataLoader in order", "DataLoader, its own iterator", "IterableDataset")


def val_sets(plan: Plan) -> dict[str, Samples]:
    names = {"none": (), "one": ("val",), "two": ("near", "far")}[plan["val"]]
    return {name: Samples(7 + 4 * place, as_dicts=plan["data"] == "dicts") for place, name in enumerate(names)}


def pair_of(batch: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = (batch["inputs"], batch["targets"]) if isinstance(batch, dict) else batch
    return inputs, targets


def batches_of(samples: Samples, size: int) -> list[Any]:
    """In order, as an evaluation reads them."""
    return list(DataLoader(samples, size))


# -- what is trained --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    mean: Tensor

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        kind = self.kind = plan["model"]
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batch norm" else nn.Identity()
        self.dropout = nn.Dropout(0.4 if kind == "dropout" else 0.0)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(()))
        if kind == "frozen part":
            self.second.requires_grad_(False)
        if kind == "tied":
            self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs)).tanh()
        if self.kind != "linear":
            hidden = self.dropout(self.second(hidden).tanh())
        else:
            hidden = hidden + 0.0 * self.second(hidden).sum()  # every parameter has a gradient
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(inputs.mean(), 0.1)
        logits: Tensor = self.head(hidden) * self.scale
        return logits


def net_of(plan: Plan) -> Net:
    """The same in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan["number"] % 2**31)
        return Net(plan)


class LossFn:
    """The loss of a case; notes the batches that it is trained on.

    Args:
        plan: of the case.
    """

    def __init__(self, plan: Plan) -> None:
        self.extras, self.trained_on = plan["extras"], []  # type: ignore[var-annotated]

    def __call__(self, model: Any, batch: Any) -> Any:
        if model.training:
            self.trained_on.append(batch)
        inputs, targets = pair_of(batch)
        logits = model(inputs).float()
        loss = nn.functional.cross_entropy(logits, targets)
        match self.extras:
            case "named losses":
                return {"cross_entropy": loss, "size": 0.01 * logits.pow(2).mean()}
            case "scalar":
                return loss, {"confidence": logits.detach().softmax(-1).amax(-1).mean()}
            case "a parameter":
                return loss, {"scale": model.scale.detach()}
            case "a buffer":
                return loss, {"mean": model.mean}
        return loss


def weight_of(batch: Any) -> int:
    return len(pair_of(batch)[1]) + 1


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizers_by_hand(plan: Plan, model: Net) -> dict[str, Optimizer]:
    """Those that the arguments of :func:`optimizer_arguments` mean."""
    parameters, lr = trained_parameters(model), plan["lr"]
    match plan["optimizer"]:
        case "default":
            return {"optimizer": AdamW(parameters, lr=lr)}
        case "name":
            return {"optimizer": Adam(parameters, lr=lr)}
        case "options":
            return {"optimizer": SGD(parameters, lr=lr, momentum=0.9, nesterov=True)}
        case "instance" | "function":
            return {"optimizer": _two_groups(model, lr)}
    return _two_optimizers(model, lr)


def optimizer_arguments(plan: Plan, model: Net) -> dict[str, Any]:
    lr = plan["lr"]
    match plan["optimizer"]:
        case "default":
            return {"lr": lr}
        case "name":
            return {"lr": lr, "optimizer": "Adam"}
        case "options":
            return {"optimizer": {"name": "sgd", "lr": lr, "momentum": 0.9, "nesterov": True}}
        case "instance":
            return {"optimizer": _two_groups(model, lr)}
        case "function":
            return {"optimizer": lambda given: _two_groups(given, lr)}
    return {"optimizer": lambda given: _two_optimizers(given, lr)}


def _two_groups(model: Any, lr: float) -> Optimizer:
    first, *rest = trained_parameters(model)
    return Adam([{"params": [first], "lr": lr / 4}, {"params": rest}], lr=lr)


def _two_optimizers(model: Any, lr: float) -> dict[str, Optimizer]:
    first, *rest = trained_parameters(model)
    return {"first": SGD([first], lr=lr), "rest": Adam(rest, lr=lr)}


def scheduler_of(plan: Plan, optimizer: Optimizer) -> Any:
    """A scheduler of torch, where the case has one."""
    match plan["schedule"]:
        case "StepLR":
            return StepLR(optimizer, 1, 0.5)
        case "CosineAnnealingLR":
            return CosineAnnealingLR(optimizer, T_max=4)
        case "OneCycleLR":
            return OneCycleLR(optimizer, 0.1, total_steps=200, cycle_momentum=False)
        case "LambdaLR per step":
            return LambdaLR(optimizer, lambda step: 0.9**step)
    return None


def schedule_arguments(plan: Plan) -> dict[str, Any]:
    kind = plan["schedule"]
    if kind in ("default", "none"):
        return {} if kind == "default" else {"schedule": "none"}
    if kind in OF_THE_RUN:
        return {"schedule": {"name": kind, "warmup": 2}}
    arguments: dict[str, Any] = {"schedule": lambda optimizer: scheduler_of(plan, optimizer)}
    return arguments | ({"schedule_per": "step"} if kind == "LambdaLR per step" else {})


# -- metrics and handlers ---------------------------------------------------------------------------------------------


def metric_arguments(plan: Plan) -> dict[str, Any]:
    """New ones in each call."""
    made: dict[str, dict[str, Metric]] = {
        "loss": {},
        "accuracy": {"accuracy": Accuracy()},
        "mse": {"mse": MeanSquaredError()},
        "Loss": {"nll": Loss(nn.functional.cross_entropy)},
        "one number and a vector": {"accuracy": Accuracy(), "precision": Precision()},
    }
    if plan["metrics"] == "loss":
        return {}
    predict = predict_mse if plan["metrics"] == "mse" else predict_classes
    own = plan["metrics"] == "mse" or plan["data"] == "dicts"
    return {"metrics": made[plan["metrics"]]} | ({"predict": predict} if own else {})


def predict_classes(model: Any, batch: Any) -> Any:
    inputs, targets = pair_of(batch)
    return model(inputs), targets


def predict_mse(model: Any, batch: Any) -> Any:
    inputs, _ = pair_of(batch)
    return model(inputs)[:, 0].float(), inputs[:, 1]


def measured_by_hand(plan: Plan, outputs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """What the metrics of the case are, from all predictions and targets."""
    predicted, targets = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    match plan["metrics"]:
        case "accuracy" | "one number and a vector":
            return {"accuracy": (predicted.argmax(1) == targets).double().mean().item()}
        case "mse":
            return {"mse": (predicted.double() - targets.double()).pow(2).mean().item()}
    return {"nll": nn.functional.cross_entropy(predicted.double(), targets).item()}


@torch.no_grad()
def shrink(model: Any) -> None:
    model.head.weight.mul_(0.99)


class Shrinks:
    """Changes weights before what is evaluated at the same event."""

    phase = Phase.PREPARE

    def __call__(self, trainer: Any) -> None:
        shrink(trainer.update.model)


class Counts:
    """A user's handler that only counts."""

    def __init__(self) -> None:
        self.count = 0

    def attach(self, trainer: Any) -> None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self)

    def __call__(self, trainer: Any) -> None:
        self.count += 1


def handlers_of(plan: Plan) -> list[Any]:
    match plan["handlers"]:
        case "function and event":
            # after a stop at the end of data without a length there is no output
            return [(lambda trainer: (trainer.state.output or {}).get("loss"), Events.EPOCH_COMPLETED)]
        case "object":
            return [Counts()]
        case "changes weights":
            return [(Shrinks(), Events.ITERATION_COMPLETED)]
    return []
