"""What a drawn case is made of: every dimension with its values, and how a case is drawn from a number."""

import random
from typing import Any

Plan = dict[str, Any]

# one value of each; the first is the plainest, to which `simplified` goes back
CHOICES = {
    "embedding": ("none", "plain", "max_norm", "sparse", "tied"),
    "outside": ("none", "temperature", "head", "head with an optimizer"),
    "optimizer": (
        "SGD",
        "SGD momentum",
        "SGD nesterov",
        "SGD fused",
        "Adam foreach",
        "AdamW for-loop",
        "AdamW foreach",
        "AdamW fused",
        "AdamW amsgrad",
        "AdamW tensor lr",
        "Adagrad",
        "Adagrad fused",
        "RMSprop",
        "RAdam",
        "NAdam",
        "Adamax",
        "Adadelta",
        "ASGD",
        "Rprop",
        "own",
    ),
    "grouping": ("one group", "two groups", "two optimizers"),
    "precision": ("fp32", "bf16", "fp16"),
    "accumulation": ("None", "1", "2", "3"),
    "clip": ("no", "yes"),
    "weight_fn": ("no", "yes"),
    "extras": ("no", "yes", "a parameter", "a buffer"),
    "data": (
        "loader in order",
        "loader shuffled",
        "DataLoader in order",
        "DataLoader shuffled",
        "DataLoader own generator",
        "DataLoader list of indices",
        "DataLoader, its own iterator",
        "batch_sampler",
        "batch_sampler with set_epoch",
        "weighted sampler",
        "sampler with set_epoch",
        "sampler with a state",
        "list of batches",
        "unknown length",
        "unknown length, drawn",
        "unknown length, varying",
        "iterable with a state",
        "iterable with a state, its own iterator",
        "endless",
        "__getitems__",
        "StatefulDataLoader in order",
        "StatefulDataLoader shuffled",
        "StatefulDataLoader own generator",
        "IterableDataset",
        "IterableDataset in StatefulDataLoader",
        "windows",
        "windows without a state",
    ),
    "workers": ("0", "2", "2 persistent"),
    "augmentation": ("none", "torch", "numpy", "python", "collate"),
    "drop_last": ("no", "yes"),
    "length": ("max_epochs", "max_iters", "epoch_length"),
    "schedule": (
        "none",
        "warmup_cosine",
        "warmup_linear",
        "warmup_wsd",
        "warmup_inverse_sqrt",
        "warmup_polynomial",
        "constant",
        "StepLR",
        "OneCycleLR",
        "CosineAnnealingWarmRestarts",
        "LinearLR",
        "SequentialLR",
        "LambdaLR",
        "CyclicLR",
        "ReduceLROnPlateau",
        "Ignite PiecewiseLinear",
        "Ignite LinearCyclicalScheduler",
        "Ignite LRScheduler",
    ),
    "ema": ("no", "yes", "without warmup"),
    "evaluation": ("none", "epochs", "iterations", "STARTED and epochs", "COMPLETED", "iterations and epochs"),
    "vector metric": ("no", "yes"),
    "evaluation data": ("own", "training", "plain DataLoader", "list"),
    "early stopping": ("no", "yes"),
    "log": ("no", "iterations", "every 3", "epochs"),
    "saves": ("iterations", "epochs", "at the end alone", "two handlers"),
    "keep_last": ("2", "1", "3"),
    "best": ("no", "min", "max"),
    "background": ("no", "yes"),
    "exclude": ("nothing", "frozen part"),
    "on_exception": ("no", "yes"),
    "resumed process": ("other random numbers", "same random numbers"),
    "calls": ("good ones", "refused ones before"),
    "damage": ("none", "newest checkpoint"),
}
# any number of each
LISTS = {
    "layers": (
        "linear",
        "conv channels_last",
        "transposed weight",
        "batchnorm",
        "dropout",
        "fp32 island",
        "own buffers",
        "frozen",
        "bf16 weights",
        "spectral_norm",
        "weight_norm",
        "extra_state",
        "layer drop by Python",
        "noise by NumPy",
        "generator of its own",
    ),
    "handlers": (
        "weights by .data",
        "weights by NumPy",
        "weights by no_grad",
        "weights at ITERATION_STARTED",
        "buffers",
        "callable with a state",
        "registered object",
        "object registered at STARTED",
        "random numbers",
        "gradient noise",
        "unfreezing by flag",
        "unfreezing by group",
        "terminate_epoch",
        "request_save",
        "torch scheduler by epoch",
        "AveragedModel",
        "optimizer's settings",
        "frozen part in eval mode",
        "another batch",
        "a batch of random numbers",
    ),
    "ignite": (
        "RunningAverage",
        "Average",
        "Accuracy",
        "TerminateOnNan",
        "EMAHandler",
        "PiecewiseLinear",
        "create_lr_scheduler_with_warmup",
        "ExpStateScheduler",
        "LambdaStateScheduler",
        "EarlyStopping",
    ),
}
# of these kinds of data no resumed run is announced to be other than the whole one
EXACT_DATA = (
    "loader in order",
    "loader shuffled",
    "DataLoader in order",
    "DataLoader shuffled",
    "DataLoader own generator",
    "__getitems__",
    "iterable with a state",
    "iterable with a state, its own iterator",
    "StatefulDataLoader in order",
    "StatefulDataLoader shuffled",
    "windows",
)
# how often these keep their plainest value, whatever the case
KEPT = {"optimizer": 0.1, "background": 0.5, "workers": 0.8, "exclude": 0.92, "on_exception": 0.8}
RARE = ("LambdaStateScheduler", "unfreezing by group")
HOW = ("request_stop", "exception", "SIGKILL", "SIGKILL at an instant", "SIGTERM")
EVENTS = (
    "ITERATION_STARTED",
    "OPTIMIZER_STEP_COMPLETED",
    "ITERATION_COMPLETED",
    "EPOCH_STARTED",
    "EPOCH_COMPLETED",
    "RESUME_POINT",
    "CHECKPOINT_SAVED",
    "EVALUATION_STARTED",
    "GET_BATCH_STARTED",
)
SAMPLE = "a sample is read"
HAPPENED = (
    "stopped twice",
    "began again without a checkpoint",
    "resumed within an epoch",
    "resumed at an epoch's end",
    "resumed at the end",
    "short last group",
    "overflow",
    "early stop",
    "saved in the background",
    "LR lowered by the plateau",
    "parameters unfrozen",
    "evaluated",
)

# Its function cannot be saved: such a run is refused at its start, and proves nothing about resume.
REFUSED_ALWAYS = ("ignite: LambdaStateScheduler",)
FEATURES = (
    *(f"{name}: {value}" for name, values in {**CHOICES, **LISTS}.items() for value in values),
    *(f"stop: {how}" for how in HOW),
    *(f"stop at: {event}" for event in (*EVENTS, SAMPLE)),
    *(f"happened: {what}" for what in HAPPENED),
)
FEATURES = tuple(each for each in FEATURES if each not in REFUSED_ALWAYS)


def draw(seed):
    """The case of a number: plain data, a function of the number alone."""
    draws = random.Random(seed)
    plainness = draws.choice((0.2, 0.5, 0.8))  # how often a dimension keeps its plainest value
    plan = {"seed": seed % 2**31}
    for name, values in CHOICES.items():
        keep = KEPT.get(name, plainness)
        plan[name] = values[0] if draws.random() < keep else draws.choice(values[1:])
    plan["data"] = draws.choice(EXACT_DATA if draws.random() < 0.7 else CHOICES["data"])
    for name, values in LISTS.items():
        drawn = draws.sample(values, draws.choice((0, 1, 1, 2, 3) if plainness > 0.3 else (1, 2, 3, 4)))
        plan[name] = [value for value in drawn if value not in RARE or draws.random() < 0.25]
    batch_size = draws.randint(2, 5)
    plan["numbers"] = {
        "batch size": batch_size,
        "samples": draws.choice([n for n in range(10, 31) if n % batch_size != 1]),
        "epochs": draws.randint(2, 4),
        "epoch_length": draws.randint(2, 9),
        "max_iters": draws.randint(4, 16),
        "save every": draws.randint(1, 5),
        "evaluate every": draws.randint(1, 5),
        "act every": draws.randint(1, 4),
        "lr": draws.choice((0.01, 0.03)),
        "patience": draws.randint(1, 3),
    }
    plan["stops"] = [_stop(draws) for _ in range(draws.choice((1, 1, 2)))]
    for stop in plan["stops"]:
        if stop["how"] in ("SIGTERM", "SIGKILL") and draws.random() < 0.3:
            stop["event"] = SAMPLE
    return settled(plan)


def _stop(draws):
    how = draws.choice(HOW)
    events = EVENTS if how != "exception" else ("ITERATION_STARTED", "ITERATION_COMPLETED", "EPOCH_COMPLETED")
    event = draws.choice(events) if how != "SIGKILL at an instant" else ""
    return {"how": how, "event": event, "after": round(draws.random(), 3)}


def settled(plan):
    """The plan with values that cannot go together replaced by those that can."""
    if plan["optimizer"].endswith("fused") and plan["embedding"] == "sparse":
        plan["grouping"] = "two optimizers"
    follows = plan["early stopping"] == "yes" or plan["best"] != "no" or plan["schedule"] == "ReduceLROnPlateau"
    if follows and plan["evaluation"] in ("none", "COMPLETED"):
        plan["evaluation"] = "epochs"
    if "EarlyStopping" in plan["ignite"] and plan["evaluation"] == "none":
        plan["evaluation"] = "epochs"
    needs_frozen = {"unfreezing by flag", "unfreezing by group", "frozen part in eval mode"} & set(plan["handlers"])
    if (needs_frozen or plan["exclude"] == "frozen part") and "frozen" not in plan["layers"]:
        plan["layers"] = [*plan["layers"], "frozen"]
    if "unfreezing by group" in plan["handlers"] and not plan["schedule"].startswith(("none", "warmup", "constant")):
        plan["schedule"] = "none"  # torch's and Ignite's own schedules refuse another group
    if plan["exclude"] == "frozen part":  # what is left out of a checkpoint must not change
        plan["handlers"] = [each for each in plan["handlers"] if each not in needs_frozen]
    if plan["optimizer"] == "SGD fused":  # torch's own fails where a parameter's first gradient comes later
        plan["handlers"] = [each for each in plan["handlers"] if not each.startswith("unfreezing")]
        plan["layers"] = [each for each in plan["layers"] if each != "layer drop by Python"]
    if {"unfreezing by flag", "unfreezing by group"} <= set(plan["handlers"]):
        plan["handlers"] = [each for each in plan["handlers"] if each != "unfreezing by flag"]
    if "buffers" in plan["handlers"] and "own buffers" not in plan["layers"]:
        plan["layers"] = [*plan["layers"], "own buffers"]
    if plan["schedule"] != "none":  # one alone may set the LR
        plan["ignite"] = [e for e in plan["ignite"] if e not in ("PiecewiseLinear", "create_lr_scheduler_with_warmup")]
        plan["handlers"] = [each for each in plan["handlers"] if each != "torch scheduler by epoch"]
    if plan["data"] == "endless" and plan["length"] == "max_epochs":
        plan["length"] = "epoch_length"
    if plan["data"].startswith("windows"):  # which set the length of an epoch; some would have no batch
        plan["length"] = "max_epochs" if plan["length"] == "epoch_length" else plan["length"]
        plan["drop_last"] = "no"
        plan["evaluation data"] = "own" if plan["evaluation data"] == "training" else plan["evaluation data"]
    if plan["data"].startswith(("list", "unknown", "endless", "iterable with", "windows without")):
        plan["workers"] = "0"
    if plan["data"].endswith(("with a state", "its own iterator")) and plan["evaluation data"] == "training":
        plan["evaluation data"] = "own"  # it has one position for whoever iterates over it
    if plan["data"].startswith("IterableDataset") and plan["workers"] != "0":
        plan["drop_last"] = "yes"  # a worker's last batch may be of one sample, which BatchNorm refuses
    if plan["embedding"] == "max_norm" and plan["evaluation"].startswith("iterations"):
        # a documented limit: an average made after an evaluation that rescales rows
        plan["ignite"] = [each for each in plan["ignite"] if each != "EMAHandler"]
        plan["handlers"] = [each for each in plan["handlers"] if each != "AveragedModel"]
    return plan


def features_of(plan):
    """What was drawn, as features."""
    single = [f"{name}: {plan[name]}" for name in CHOICES]
    return single + [f"{name}: {value}" for name in LISTS for value in plan[name]]


def described(plan):
    """The plan without what is plainest."""
    parts = [f"{name}={plan[name]}" for name, values in CHOICES.items() if plan[name] != values[0]]
    parts += [f"{name}={plan[name]}" for name in LISTS if plan[name]]
    stops = [f"{each['how']} {each['event']} {each['after']}".replace("  ", " ") for each in plan["stops"]]
    return "; ".join([*parts, f"stops={stops}", f"numbers={plan['numbers']}"])
