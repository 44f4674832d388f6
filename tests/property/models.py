"""The models, losses and optimizers of cases. A batch is ``(inputs, words, classes, numbers of the samples)``."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CLASSES, WIDTH = 5, 8


class Conv(nn.Module):
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


class InItsOwnDtype(nn.Module):
    """A layer that computes in its own precision, whatever autocast says."""

    def __init__(self, dtype):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, hidden):
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(self.inner(hidden.to(self.inner.weight.dtype))).float()


class OwnBuffers(nn.Module):
    """Buffers that change in forward, one of them a count."""

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
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.inner.requires_grad_(False)

    def forward(self, hidden):
        return self.norm(torch.tanh(self.inner(hidden)) + hidden)


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

    def __init__(self, draw):
        super().__init__()
        self.draw, self.inner = draw, nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        factor = self.draw() if self.training else 1.0
        return hidden if factor == 0.0 else hidden + torch.tanh(self.inner(hidden)) * factor


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(9)

    def forward(self, hidden):
        return hidden * (1.0 + 0.1 * torch.randn(hidden.shape, generator=self.generator)) if self.training else hidden


class Checkpointed(nn.Module):
    """Computed again in backward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh())

    def forward(self, hidden):
        return checkpoint(self.inner, hidden, use_reentrant=False)


class Writing(nn.Module):
    """A forward that writes to its weight."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        if self.training:
            weight = self.inner.weight.data
            weight.div_(weight.norm().clamp(min=1.0))
        return torch.tanh(self.inner(hidden))


class NowAndThen(nn.Module):
    """A layer that is used in each third forward; how many there were is a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden):
        self.calls += int(self.training)
        return torch.tanh(self.inner(hidden)) if int(self.calls) % 3 == 0 else hidden


class WithEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.empty = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.empty(0))

    def forward(self, hidden):
        return torch.tanh(self.inner(hidden))


class Unsaved(nn.Module):
    """A planted mistake: what it has counted matters, and is in no checkpoint."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, hidden):
        self.calls += int(self.training)
        return hidden * (1.0 + 0.01 * self.calls)


class UnsavedBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(()), persistent=False)

    def forward(self, hidden):
        if self.training:
            self.kept = self.kept + 1
        return hidden * (1.0 + 0.01 * self.kept)


MAKE = {
    "unsaved attribute": Unsaved,
    "unsaved buffer": UnsavedBuffer,
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "conv channels_last": Conv,
    "transposed weight": Transposed,
    "batchnorm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "fp32 island": lambda: InItsOwnDtype(torch.float32),
    "bf16 weights": lambda: InItsOwnDtype(torch.bfloat16),
    "fp64 weights": lambda: InItsOwnDtype(torch.float64),
    "own buffers": OwnBuffers,
    "frozen": Frozen,
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "extra_state": ExtraState,
    "layer drop by Python": lambda: Drawing(lambda: float(random.random() < 0.5)),
    "noise by NumPy": lambda: Drawing(lambda: float(np.random.standard_normal())),
    "generator of its own": OwnGenerator,
    "checkpointed": Checkpointed,
    "writes to a weight": Writing,
    "used now and then": NowAndThen,
    "empty parameter": WithEmpty,
}


class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        kind = case.embedding
        self.stem = nn.Linear(6, WIDTH)
        self.words = None
        if kind != "none":
            self.words = nn.Embedding(
                CLASSES, WIDTH, sparse=kind == "sparse", max_norm=0.5 if kind == "max_norm" else None
            )
        self.layers = nn.ModuleDict({f"{at}_{name.split()[0]}": MAKE[name]() for at, name in enumerate(case.layers)})
        self.head = nn.Linear(WIDTH, CLASSES)
        self.gain = nn.Parameter(torch.ones(()))
        self.spare = nn.Parameter(torch.ones(WIDTH))  # changes of groups bring it into the optimizer
        self.register_buffer("seen", torch.zeros(()))
        self.writes_seen = case.reports == "a buffer"
        if kind == "tied":
            self.head.weight = self.words.weight

    def layer(self, kind):
        return next((layer for name, layer in self.layers.items() if name.endswith(f"_{kind}")), None)

    def forward(self, inputs, words):
        hidden = torch.tanh(self.stem(inputs))
        if self.words is not None:
            hidden = hidden + self.words(words).mean(1)
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.training and self.writes_seen:
            with torch.no_grad():
                self.seen.lerp_(inputs.mean(), 0.1)
        return self.head((hidden * self.spare).to(self.head.weight.dtype)) * self.gain


class LossFn:
    """A loss that may have weights of its own, of which an engine knows nothing."""

    def __init__(self, case):
        self.case = case
        self.temperature = nn.Parameter(torch.ones(())) if case.outside == "temperature" else None
        self.head = nn.Linear(CLASSES, CLASSES) if case.outside.startswith("head") else None

    def parameters(self):
        head = list(self.head.parameters()) if self.head is not None else []
        return head + ([self.temperature] if self.temperature is not None else [])

    def __call__(self, model, batch):
        inputs, words, classes, _ = batch
        logits = model(inputs, words)
        if self.head is not None:
            logits = logits + self.head(logits)
        if self.temperature is not None:
            logits = logits * self.temperature
        if self.case.loss == "half":
            loss = (logits - nn.functional.one_hot(classes, CLASSES).to(logits.dtype)).pow(2).mean()
        else:
            loss = nn.functional.cross_entropy(logits.double() if self.case.loss == "fp64" else logits.float(), classes)
        loss = loss.reshape(1) if self.case.loss == "shape (1,)" else loss
        own = getattr(model, "module", model)  # without DDP
        reported = {
            "a number": lambda: logits.detach().float().softmax(-1).amax(-1).mean(),
            "a parameter": lambda: own.gain.detach(),  # its memory: other numbers after the step
            "a buffer": lambda: own.seen,
        }
        return (loss, {"reported": reported[self.case.reports]()}) if self.case.reports in reported else loss


def weight_fn_of(case):
    return {
        "none": None,
        "samples": lambda batch: len(batch[2]),
        "tensors": lambda batch: batch[2].sum() + 1.0,
        "some zero": lambda batch: 0 if int(batch[3][0]) % 3 == 1 else len(batch[2]),
        "a group of zeros": lambda batch: 0 if int(batch[3][0]) < 6 else len(batch[2]),
    }[case.weights]


class SignMomentum(torch.optim.Optimizer):
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
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                state["momentum"].lerp_(gradient, 0.2)
                parameter.sub_(state["momentum"].sign(), alpha=group["lr"] / state["steps"] ** 0.5)


def optimizer_of(kind, params, lr):
    optim = torch.optim
    return {
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
    }[kind]()


def optimizers_of(case, model, loss_fn, lr=0.02):
    """By name, over all that is trained."""
    sparse = [model.words.weight] if case.embedding == "sparse" else []
    held, outside = {id(each) for each in (*sparse, model.spare)}, loss_fn.parameters()
    late = model.layer("frozen").inner.parameters() if "unfreezing by flag" in case.handlers else ()
    trained = [each for each in model.parameters() if each.requires_grad and id(each) not in held]
    trained = [*trained, *late]
    found, head = {}, []
    if sparse and case.optimizer not in ("SGD", "Adagrad"):
        found["sparse"] = torch.optim.SparseAdam(sparse, lr=lr)
    else:
        trained = [*sparse, *trained]
    if outside and case.outside == "head with an optimizer":
        found["outside"] = torch.optim.SGD(outside, lr=0.02, momentum=0.5)
    else:
        trained += outside
    if case.grouping in ("two optimizers", "a shared parameter"):
        head = trained[-2:]
        trained = trained[:-2] if case.grouping == "two optimizers" else trained
    groups = (
        [{"params": trained[:1], "lr": lr / 2}, {"params": trained[1:]}] if case.grouping == "two groups" else trained
    )
    made = {"main": optimizer_of(case.optimizer, groups, lr), **found}
    return {**made, "head": torch.optim.AdamW(head, lr=0.01)} if head else made


def samples_of(count, first=0):
    """``count`` samples that are functions of their number."""
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 6, generator=generator)
    words = torch.randint(CLASSES, (count, 3), generator=generator)
    return inputs, words, torch.randint(CLASSES, (count,), generator=generator), torch.arange(count) + first
