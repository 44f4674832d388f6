"""The models and optimizers of drawn cases."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.search.common import device_kind
from tests.search.resume_data import CLASSES

WIDTH = 8


class Conv(nn.Module):
    """A convolution whose weight lies in memory channels last."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, hidden):
        return torch.tanh(self.conv(hidden.reshape(-1, 2, 2, 2))).reshape(-1, WIDTH)


class Transposed(nn.Module):
    """A weight that is a transposed view of its memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).mul(0.3).t())

    def forward(self, hidden):
        return torch.tanh(hidden @ self.weight)


class Island(nn.Module):
    """A part that stays in fp32 whatever the precision."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(self.inner(hidden.float()))


class OwnBuffers(nn.Module):
    """Buffers that change in forward, one of them a count."""

    mean: Tensor
    count: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden):
        if self.training:
            self.count += 1
            self.mean.lerp_(hidden.detach().float().mean(0), 0.1)
        return hidden - self.mean + 0.001 * self.count


class Frozen(nn.Module):
    """A part that is not trained, with statistics that move all the same."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)

    def forward(self, hidden):
        return torch.tanh(self.inner(hidden)) + hidden


class Bf16(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, hidden):
        return torch.tanh(self.inner(hidden.bfloat16())).float()


class ExtraState(nn.Module):
    """A number beside the buffers, saved as torch lets a module save it."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, hidden):
        self.calls += int(self.training)
        return hidden * (1.0 + 0.01 * (self.calls % 5))


class Drawing(nn.Module):
    """Randomness in forward from a generator that is not torch's."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        if not self.training:
            return hidden + self.inner(hidden)
        if self.kind == "layer drop by Python":
            return hidden if random.random() < 0.5 else hidden + torch.tanh(self.inner(hidden))
        return hidden + self.inner(hidden) * float(np.random.standard_normal())


class OwnGenerator(nn.Module):
    """Randomness in forward from a generator of its own, which is an attribute."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(9)

    def forward(self, hidden):
        if not self.training:
            return hidden
        return hidden * (1.0 + 0.1 * torch.randn(hidden.shape, generator=self.generator).to(hidden.device))


class Unsaved(nn.Module):
    """Planted faults: state that matters and is in no checkpoint."""

    kept: Tensor

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, 0
        self.register_buffer("kept", torch.zeros(()), persistent=False)

    def forward(self, hidden):
        if self.training:
            self.calls, self.kept = self.calls + 1, self.kept + 1
        return hidden * (1.0 + 0.01 * (self.calls if self.kind == "attribute" else self.kept))


LAYERS = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "conv channels_last": Conv,
    "transposed weight": Transposed,
    "batchnorm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "fp32 island": Island,
    "own buffers": OwnBuffers,
    "frozen": lambda: nn.Sequential(Frozen(), nn.BatchNorm1d(WIDTH)),
    "bf16 weights": Bf16,
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "extra_state": ExtraState,
    "layer drop by Python": lambda: Drawing("layer drop by Python"),
    "noise by NumPy": lambda: Drawing("noise by NumPy"),
    "generator of its own": OwnGenerator,
}


class Net(nn.Module):
    seen: Tensor

    def __init__(self, plan):
        super().__init__()
        kind = plan["embedding"]
        self.stem = nn.Linear(6, WIDTH)
        self.words = None
        if kind != "none":
            norm = 0.5 if kind == "max_norm" else None
            self.words = nn.Embedding(CLASSES, WIDTH, sparse=kind == "sparse", max_norm=norm)
        self.layers = nn.ModuleDict()
        for index, name in enumerate(plan["layers"]):
            self.layers[f"{index}_{name.split()[0]}"] = LAYERS[name]()
        planted = plan.get("planted", "")
        self.unsaved = Unsaved(planted.partition(" ")[2]) if planted.startswith("module") else nn.Identity()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.gain = nn.Parameter(torch.ones(()))
        self.reports_a_buffer = plan["extras"] == "a buffer"
        if self.reports_a_buffer:
            self.register_buffer("seen", torch.zeros(()))
        if kind == "tied":
            assert self.words is not None
            self.head.weight = self.words.weight

    @property
    def frozen(self):
        return next((layer for name, layer in self.layers.items() if name.endswith("frozen")), None)

    def forward(self, inputs, words):
        hidden = torch.tanh(self.stem(inputs))
        if self.words is not None:
            hidden = hidden + self.words(words).mean(1)
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.training and self.reports_a_buffer:
            with torch.no_grad():
                self.seen.lerp_(inputs.mean(), 0.1)
        logits = self.head(self.unsaved(hidden)) * self.gain
        return logits


class LossFn:
    """A loss that may have weights of its own."""

    def __init__(self, plan):
        self.extras = plan["extras"]
        self.temperature = (
            nn.Parameter(torch.ones((), device=device_kind())) if plan["outside"] == "temperature" else None
        )
        self.head = nn.Linear(CLASSES, CLASSES).to(device_kind()) if plan["outside"].startswith("head") else None

    def parameters(self):
        head = list(self.head.parameters()) if self.head is not None else []
        return head + ([self.temperature] if self.temperature is not None else [])

    def __call__(self, model, batch):
        inputs, words, targets = batch
        logits = model(inputs, words)
        if self.head is not None:
            logits = logits + self.head(logits)
        if self.temperature is not None:
            logits = logits * self.temperature
        loss = nn.functional.cross_entropy(logits.float(), targets)
        if self.extras == "no":
            return loss
        own = getattr(model, "module", model)  # without DDP
        reported = {
            "yes": lambda: logits.detach().float().softmax(-1).amax(-1).mean(),
            "a parameter": lambda: own.gain.detach(),  # its memory: other numbers after the step
            "a buffer": lambda: own.seen,
        }
        return loss, {"reported": reported[self.extras]()}


class SignMomentum(Optimizer):
    """A user's own optimizer, whose state is a tensor and a number."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"], state["steps"] = torch.zeros_like(parameter), 0
                state["steps"] += 1
                state["momentum"].lerp_(parameter.grad, 0.2)
                parameter.sub_(state["momentum"].sign(), alpha=group["lr"] / state["steps"] ** 0.5)


def optimizers_of(plan, model, loss_fn):
    """One optimizer, or several by name, over all that is trained."""
    sparse = [model.words.weight] if model.words is not None and plan["embedding"] == "sparse" else []
    outside = loss_fn.parameters()
    trained = [each for each in model.parameters() if each.requires_grad and not any(each is one for one in sparse)]
    if "unfreezing by flag" in plan["handlers"] and model.frozen is not None:
        trained += [each for each in model.frozen.parameters() if not any(each is one for one in trained)]
    found = {}
    if sparse and plan["optimizer"] not in ("SGD", "Adagrad"):
        found["sparse"] = torch.optim.SparseAdam(sparse, lr=plan["numbers"]["lr"])
    else:
        trained = [*sparse, *trained]
    if outside and plan["outside"] == "head with an optimizer":
        found["outside"] = torch.optim.SGD(outside, lr=0.02, momentum=0.5)
    else:
        trained += outside
    if plan["grouping"] == "two optimizers" and len(trained) > 2:
        found["stem"] = torch.optim.AdamW(trained[-2:], lr=0.01)
        trained = trained[:-2]
    groups = trained
    if plan["grouping"] == "two groups":
        groups = [{"params": trained[:1], "lr": 0.005}, {"params": trained[1:]}]
    main = optimizer_of(plan["optimizer"], groups, plan["numbers"]["lr"])
    return {"main": main, **found} if found else main


def optimizer_of(kind, params, lr):
    optim = torch.optim
    made = {
        "SGD": lambda: optim.SGD(params, lr=lr),
        "SGD momentum": lambda: optim.SGD(params, lr=lr, momentum=0.9),
        "SGD nesterov": lambda: optim.SGD(params, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.01),
        "SGD fused": lambda: optim.SGD(params, lr=lr, momentum=0.9, fused=True),
        "Adam foreach": lambda: optim.Adam(params, lr=lr, foreach=True),
        "AdamW for-loop": lambda: optim.AdamW(params, lr=lr, foreach=False),
        "AdamW foreach": lambda: optim.AdamW(params, lr=lr, foreach=True),
        "AdamW fused": lambda: optim.AdamW(params, lr=lr, fused=True),
        "AdamW amsgrad": lambda: optim.AdamW(params, lr=lr, amsgrad=True),
        "AdamW tensor lr": lambda: optim.AdamW(params, lr=torch.tensor(lr)),
        "Adagrad": lambda: optim.Adagrad(params, lr=lr),
        "Adagrad fused": lambda: optim.Adagrad(params, lr=lr, fused=True),
        "RMSprop": lambda: optim.RMSprop(params, lr=lr, momentum=0.5, centered=True),
        "RAdam": lambda: optim.RAdam(params, lr=lr),
        "NAdam": lambda: optim.NAdam(params, lr=lr),
        "Adamax": lambda: optim.Adamax(params, lr=lr),
        "Adadelta": lambda: optim.Adadelta(params, lr=1.0),
        "ASGD": lambda: optim.ASGD(params, lr=lr, t0=5),
        "Rprop": lambda: optim.Rprop(params, lr=lr),
        "own": lambda: SignMomentum(params, lr),
    }
    optimizer = made[kind]()
    return optimizer
