"""A case of the property judges: what is trained, what breaks in, on how many ranks. All of it is plain data.

The first value of each dimension is the plainest; the repr of a case names the others only, and can be pasted.
"""

from dataclasses import dataclass, fields, replace

LAYERS = (
    *("dropout", "batchnorm", "own buffers", "linear", "conv channels_last", "transposed weight", "fp32 island"),
    *("frozen", "bf16 weights", "fp64 weights", "spectral_norm", "weight_norm", "extra_state", "layer drop by Python"),
    *("noise by NumPy", "generator of its own", "checkpointed", "writes to a weight", "used now and then"),
    *("empty parameter",),
)
OPTIMIZERS = (
    *("SGD", "SGD momentum", "SGD nesterov", "SGD fused", "Adam foreach", "AdamW for-loop", "AdamW foreach"),
    *("AdamW fused", "AdamW amsgrad", "AdamW tensor lr", "Adagrad", "Adagrad fused", "RMSprop", "RAdam", "NAdam"),
    *("Adamax", "Adadelta", "ASGD", "Rprop", "own"),
)
STEP = {
    "layers": LAYERS,
    "embedding": ("none", "plain", "sparse", "tied", "max_norm"),
    "outside": ("none", "temperature", "head", "head with an optimizer"),
    "optimizer": OPTIMIZERS,
    "grouping": ("one group", "two groups", "two optimizers"),
    "precision": ("fp32", "bf16", "fp16"),
    "steps": (None, 1, 2, 3),
    "clip": (None, 0.01, 1.0, 1e4),
    "weights": ("none", "samples", "tensors", "some zero"),
    "reports": ("nothing", "a number", "a parameter", "a buffer"),
    "non_finite": (None, "skip"),
    "seed": (0, 1, 2, 3, 4),
}
UPDATE = STEP | {
    "scale": (2.0**10, 2.0**16, 1000.0, 2.0**120),
    "grad_norm": (False, True),
    "loss": ("mean", "shape (1,)", "half", "fp64"),
    "grouping": ("one group", "two groups", "two optimizers", "a shared parameter"),
    "weights": ("none", "samples", "tensors", "some zero", "a group of zeros"),
    "change": ("nothing", "add group", "append", "clear and add", "replace", "freeze", "unfreeze", "options"),
    "change_at": (1, 2, 3),
    "hooked": ("nothing", "LR scheduler", "step hook", "gradient hook"),
    "engine": ("Trainer", "Ignite's Engine"),
    "habit": ("reads gradients", "computes under autocast", "halves gradients", "writes to weights"),
    "epochs": (2, 1),
}
LISTENERS = ("BACKWARD_COMPLETED", "OPTIMIZER_STEP_STARTED", "OPTIMIZER_STEP_COMPLETED", "OPTIMIZER_STEP_SKIPPED")
WRITING = ("halves gradients", "writes to weights")
"""Habits of a listener that the loop written by hand has too; the others must change no bit."""

# of these kinds of data no resumed run is announced to be other than the whole one
EXACT_DATA = (
    *("loader", "loader shuffled", "DataLoader", "DataLoader shuffled", "DataLoader own generator", "__getitems__"),
    *("iterable with a state", "iterable with a state, its own iterator", "StatefulDataLoader"),
    *("StatefulDataLoader shuffled", "StatefulDataLoader own generator", "windows", "windows, files", "windows, own"),
)
OTHER_DATA = (
    *("list of batches", "DataLoader list of indices", "DataLoader, its own iterator", "batch_sampler"),
    *("batch_sampler with set_epoch", "weighted sampler", "sampler with set_epoch", "sampler with a state"),
    *("unknown length", "unknown length, drawn", "unknown length, varying", "endless", "IterableDataset"),
    *("IterableDataset in StatefulDataLoader", "windows without a state", "windows, an iterator"),
)
HANDLERS = (
    *("weights by .data", "weights by NumPy", "weights by no_grad", "weights at ITERATION_STARTED", "buffers"),
    *("callable with a state", "registered object", "object registered at STARTED", "random numbers"),
    *("gradient noise", "unfreezing by flag", "unfreezing by group", "terminate_epoch", "request_save"),
    *("torch scheduler by epoch", "AveragedModel", "optimizer's settings", "frozen part in eval mode"),
    *("another batch", "a batch of random numbers", "ModelBank"),
)
IGNITE = (
    *("RunningAverage", "Average", "Accuracy", "TerminateOnNan", "EMAHandler", "PiecewiseLinear"),
    *("create_lr_scheduler_with_warmup", "ExpStateScheduler"),
)
RESUME = STEP | {
    "non_finite": (None, "skip", "rollback"),
    "data": (*EXACT_DATA, *OTHER_DATA),
    "workers": ("0", "2", "2 persistent"),
    "augmentation": ("none", "torch", "numpy", "python", "collate"),
    "drop_last": (False, True),
    "length": ("max_epochs", "max_iters", "epoch_length"),
    "schedule": (
        *("none", "warmup_cosine", "warmup_linear", "warmup_wsd", "warmup_inverse_sqrt", "warmup_polynomial"),
        *("constant", "StepLR", "OneCycleLR", "CosineAnnealingWarmRestarts", "LinearLR", "SequentialLR", "LambdaLR"),
        *("CyclicLR", "ReduceLROnPlateau", "Ignite PiecewiseLinear", "Ignite LinearCyclicalScheduler"),
        *("Ignite LRScheduler",),
    ),
    "ema": ("no", "yes", "without warmup"),
    "evaluation": ("none", "epochs", "iterations", "STARTED and epochs", "COMPLETED", "windows", "resumes"),
    "evaluated": ("own", "training", "plain DataLoader", "list"),
    "early_stopping": (False, True),
    "log": ("iterations", "no", "every 3", "epochs"),
    "saves": ("iterations", "epochs", "at the end alone", "two handlers", "windows"),
    "whole_saves": (False, True),
    "every": (1, 2, 3, 4),
    "keep_last": (2, 1, 3),
    "best": ("no", "min", "max"),
    "background": (False, True),
    "memory": (None, 1, 2),
    "exclude": (False, True),
    "on_exception": (False, True),
    "wrong_calls": (False, True),
    "damage": (False, True),
    "samples": (12, 10, 13, 17, 22, 26),
    "batch_size": (3, 2, 4, 5),
    "epochs": (2, 3),
}
HOW = (
    *("stop", "same process", "exception", "limit", "SIGKILL", "SIGTERM", "SIGINT", "file operation", "instant"),
    *("stop in an evaluation",),
)
EVENTS = (
    *("ITERATION_COMPLETED", "ITERATION_STARTED", "OPTIMIZER_STEP_COMPLETED", "EPOCH_STARTED", "EPOCH_COMPLETED"),
    *("RESUME_POINT", "CHECKPOINT_SAVED", "EVALUATION_STARTED", "GET_BATCH_STARTED", "BACKWARD_COMPLETED"),
    *("WINDOW_STARTED", "WINDOW_COMPLETED", "a sample is read"),
)
# what leaves a part of the model out on one rank, or changes each rank's copy in a way of its own, DDP does not train
NOT_UNDER_DDP = (
    *("layer drop by Python", "noise by NumPy", "used now and then", "random numbers", "gradient noise"),
    *("unfreezing by group", "callable with a state", "terminate_epoch", "ModelBank", "writes to a weight"),
    *("empty parameter", "generator of its own"),
)
# each rank has its own of the latter kinds
SHARED = ("loader", "loader shuffled", "DataLoader", "DataLoader shuffled", "__getitems__")
EACH_ITS_OWN = ("list of batches", "unknown length, drawn", "iterable with a state", "StatefulDataLoader")
DDP = ("default", "bucket views", "small buckets", "find_unused_parameters", "own buffers")


@dataclass(frozen=True)
class Stop:
    """How a run is broken off, at which event, and after which share of the whole run."""

    how: str = "stop"
    event: str = "ITERATION_COMPLETED"
    after: float = 0.5
    rank: int = 0


@dataclass(frozen=True, repr=False)
class Case:
    layers: tuple = ()
    embedding: str = "none"
    outside: str = "none"
    optimizer: str = "SGD"
    grouping: str = "one group"
    precision: str = "fp32"
    scale: float = 2.0**10
    steps: int | None = None
    clip: float | None = None
    grad_norm: bool = False
    weights: str = "none"
    loss: str = "mean"
    reports: str = "nothing"
    non_finite: str | None = None
    seed: int = 0
    # what only an update meets
    change: str = "nothing"
    change_at: int = 1
    hooked: str = "nothing"
    engine: str = "Trainer"
    listeners: tuple = ()
    habit: str = "reads gradients"
    sizes: tuple = (3, 3, 3, 3)
    # a run
    data: str = "loader"
    workers: str = "0"
    augmentation: str = "none"
    drop_last: bool = False
    samples: int = 12
    batch_size: int = 3
    epochs: int = 2
    length: str = "max_epochs"
    windows: tuple = (4, 5, 3)
    per_epoch: int | None = None
    max_updates: int | None = None
    schedule: str = "none"
    ema: str = "no"
    evaluation: str = "none"
    evaluated: str = "own"
    early_stopping: bool = False
    log: str = "iterations"
    handlers: tuple = ()
    ignite: tuple = ()
    saves: str = "iterations"
    whole_saves: bool = False
    every: int = 1
    keep_last: int = 2
    best: str = "no"
    background: bool = False
    memory: int | None = None
    exclude: bool = False
    on_exception: bool = False
    wrong_calls: bool = False
    # what breaks in
    stops: tuple = ()
    damage: bool = False
    # ranks
    ranks: int = 1
    ranks_after: int = 0
    rank_invariant: bool = False
    global_micro_batches: int | None = None
    ddp: str = "default"
    batches: tuple = ()
    one_process: bool = False

    def __repr__(self):
        drawn = (
            (each.name, getattr(self, each.name)) for each in fields(self) if each.default != getattr(self, each.name)
        )
        return f"Case({', '.join(f'{name}={value!r}' for name, value in drawn)})"

    def but(self, **changes):
        return replace(self, **changes)

    def without(self, name, *left_out):
        return replace(self, **{name: tuple(each for each in getattr(self, name) if each not in left_out)})

    def features(self):
        """What is not plain, one text for each, to be counted."""
        for each in fields(self):
            value = getattr(self, each.name)
            if (
                each.name not in ("seed", "samples", "sizes", "windows", "batches", "change_at")
                and value != each.default
            ):
                for one in value if isinstance(value, tuple) else (value,):
                    name = f"{one.how} at {one.event}" if isinstance(one, Stop) else one
                    yield f"{each.name}: {name}"


def settled_step(case):
    """With what torch refuses, or computes otherwise each time, replaced by what it can do."""
    half = "bf16 weights" in case.layers
    if case.optimizer == "SGD fused" and (half or {"layer drop by Python", "used now and then"} & set(case.layers)):
        case = case.but(optimizer="SGD momentum")  # it reads momentum that was never written: other bits each time
    if case.embedding == "sparse" and case.optimizer not in ("SGD", "Adagrad") and case.grouping == "one group":
        case = case.but(grouping="two optimizers")
    if case.optimizer.endswith("fused") and "fp64 weights" in case.layers and half:
        case = case.without("layers", "bf16 weights")
    if case.precision == "fp16" and case.grouping == "a shared parameter":
        case = case.but(grouping="two optimizers")  # torch's scaler unscales it twice
    if case.precision == "fp16" or case.weights != "none":
        case = case.but(non_finite=None)
    if case.non_finite:  # what a forward changes beside buffers is the program's own
        case = case.without("layers", "extra_state", "writes to a weight", "used now and then")
        case = case.but(embedding="none" if case.embedding == "max_norm" else case.embedding)
    return case


def settled_update(case):
    case = settled_step(case)
    if case.embedding == "sparse" and case.change in ("append", "clear and add", "replace"):
        case = case.but(change="add group")
    if case.embedding == "tied" and case.change == "replace":
        case = case.but(change="options")
    if case.optimizer == "SGD fused":
        case = case.but(
            change="nothing" if case.change in ("add group", "append", "clear and add", "unfreeze") else case.change
        )
    if case.grouping == "a shared parameter" and case.embedding == "sparse":
        case = case.but(grouping="two optimizers")
    return case


def settled_resume(case):
    """With what cannot go together, or is documented not to, replaced."""
    case = settled_step(case)
    windows = case.data.startswith("windows")
    follows = case.early_stopping or case.best != "no" or case.schedule == "ReduceLROnPlateau"
    if follows and case.evaluation in ("none", "COMPLETED", "windows"):
        case = case.but(evaluation="epochs")
    if not windows:
        case = case.but(
            evaluation="epochs" if case.evaluation == "windows" else case.evaluation,
            saves="iterations" if case.saves == "windows" else case.saves,
            windows=Case.windows,
            per_epoch=None,
            max_updates=None,
        )
    else:
        case = case.but(length="max_epochs" if case.length == "epoch_length" else case.length, drop_last=False)
        case = case.but(evaluated="own" if case.evaluated == "training" else case.evaluated)
    if case.data == "windows, an iterator" or case.data == "windows, own":
        case = case.but(epochs=1)
    wanted = {"unfreezing by flag", "unfreezing by group", "frozen part in eval mode"} & set(case.handlers)
    if (wanted or case.exclude) and "frozen" not in case.layers:
        case = case.but(layers=(*case.layers, "frozen"))
    if case.exclude:  # what is left out of a checkpoint must not change
        case = case.without("handlers", *wanted, "ModelBank")
    if "unfreezing by group" in case.handlers:
        case = case.without("handlers", "unfreezing by flag")
        if not case.schedule.startswith(("none", "warmup", "constant")):
            case = case.but(schedule="none")  # torch's and Ignite's own refuse another group
    if case.optimizer == "SGD fused":  # torch's own fails where a parameter's first gradient comes later
        case = case.without("handlers", "unfreezing by flag", "unfreezing by group")
    if case.embedding == "sparse":
        case = case.without("handlers", "gradient noise", "optimizer's settings")
    if "buffers" in case.handlers and "own buffers" not in case.layers:
        case = case.but(layers=(*case.layers, "own buffers"))
    if case.schedule != "none":  # one alone may set the LR
        case = case.without("ignite", "PiecewiseLinear", "create_lr_scheduler_with_warmup")
        case = case.without("handlers", "torch scheduler by epoch")
    if {"PiecewiseLinear", "create_lr_scheduler_with_warmup"} <= set(case.ignite):
        case = case.without("ignite", "PiecewiseLinear")
    if case.ignite and set(case.ignite) & {"PiecewiseLinear", "create_lr_scheduler_with_warmup"}:
        case = case.without("handlers", "torch scheduler by epoch")
    if case.data == "endless" and case.length == "max_epochs":
        case = case.but(length="epoch_length")
    if case.data.startswith(("list", "unknown", "endless", "iterable with", "windows without")):
        case = case.but(workers="0")
    if case.data.endswith(("with a state", "its own iterator")) and case.evaluated == "training":
        case = case.but(evaluated="own")  # it has one position for whoever iterates over it
    if case.embedding == "max_norm" and case.evaluation in ("iterations", "windows", "resumes"):
        # a documented limit: an average made after an evaluation that rescales rows
        case = case.without("ignite", "EMAHandler").without("handlers", "AveragedModel")
    if case.non_finite == "rollback":
        case = case.but(saves="iterations", every=1, whole_saves=True, background=False, damage=False, exclude=False)
        case = case.but(data=case.data if case.data in EXACT_DATA else "loader shuffled", keep_last=3)
        case = case.without("handlers", "registered object", "request_save", "terminate_epoch", "ModelBank")
    if case.non_finite:  # Ignite's refuses NaN
        case = case.without("ignite", "Accuracy")
    if case.memory and (case.exclude or case.damage):
        case = case.but(memory=None)
    if any(stop.how == "stop in an evaluation" for stop in case.stops) and case.evaluation == "none":
        case = case.but(evaluation="epochs")
    if any(stop.how == "limit" for stop in case.stops) and case.evaluation == "COMPLETED":
        case = case.but(evaluation="epochs")
    if "batchnorm" in case.layers or "frozen" in case.layers:  # which refuse a batch of one
        case = _without_batches_of_one(case)
    if case.on_exception and case.ranks > 1:
        case = case.but(on_exception=False)
    return case


def _without_norms(case):
    """Ranks may have a batch of one, which they refuse."""
    case = case.without("handlers", "unfreezing by flag", "unfreezing by group", "frozen part in eval mode")
    return case.but(exclude=False).without("layers", "batchnorm", "frozen")


def _without_batches_of_one(case):
    if case.data.startswith("IterableDataset") and case.workers != "0":
        case = case.but(drop_last=True)
    if case.data.startswith("windows"):
        size = case.batch_size
        case = case.but(windows=tuple(count + (count % size == 1 or count == 1) for count in case.windows))
    left = case.samples % case.batch_size
    if left == 1:
        case = case.but(samples=case.samples + 1 if case.batch_size > 2 else case.samples - 1)
    return case


def settled_ranks(case):
    """A case of several ranks, of what DDP trains, or of a rank-invariant update."""
    case = (
        case.without("layers", *NOT_UNDER_DDP).without("handlers", *NOT_UNDER_DDP).without("ignite", "TerminateOnNan")
    )
    if case.non_finite == "rollback":
        case = case.but(non_finite="skip")
    stops = tuple(replace(each, rank=each.rank % case.ranks) for each in case.stops)
    case = case.but(stops=stops, workers="0", exclude=False, on_exception=False, outside="none", memory=None)
    case = case.but(evaluated="own" if case.evaluated == "training" else case.evaluated)
    if case.rank_invariant:
        case = case.without("layers", "batchnorm", "own buffers", "frozen", "extra_state", "spectral_norm")
        case = case.but(
            embedding="none" if case.embedding in ("sparse", "max_norm") else case.embedding,
            reports="nothing" if case.reports == "a buffer" else case.reports,
            data=case.data if case.data in SHARED else "loader shuffled",
            steps=None,
            global_micro_batches=max(4, case.global_micro_batches or 4),
            evaluated="own",
            non_finite=None,
            handlers=(),
            ignite=(),
        )
    elif case.global_micro_batches:
        case = _without_norms(case.but(steps=None, global_micro_batches=max(4, case.global_micro_batches)))
        case = case.without("layers", "extra_state")  # it counts forwards, of which ranks may have other numbers
    if case.global_micro_batches:  # each rank needs a batch
        case = case.but(samples=max(case.samples, case.ranks * case.batch_size))
    if case.ranks_after not in (0, case.ranks):
        case = _without_norms(case.but(drop_last=False))
    if case.data in EACH_ITS_OWN:
        case = _without_norms(case.but(global_micro_batches=None, ranks_after=0))
        if not any(case.batches):
            case = case.but(batches=(*case.batches[:-1], 2))
    elif case.data not in (*SHARED, "windows"):
        case = case.but(data="loader shuffled")
    if case.one_process:  # what a loop by hand over the batches of all ranks does, too
        case = case.but(
            layers=tuple(each for each in case.layers if each in ("linear", "conv channels_last", "transposed weight")),
            optimizer=case.optimizer if case.optimizer in ("SGD", "SGD nesterov") else "SGD momentum",
            embedding="none" if case.embedding in ("max_norm", "sparse") else case.embedding,
            clip=case.clip and 1.0,
            **{name: getattr(Case, name) for name in ("precision", "augmentation", "schedule", "handlers", "ignite")},
            **{name: getattr(Case, name) for name in ("non_finite", "grouping")},
            data="list of batches" if case.data == "unknown length, drawn" else case.data,
        )
    case = settled_resume(case)
    if "batchnorm" in case.layers or "frozen" in case.layers:  # after the handlers that need them have added them
        whole = case.ranks * case.batch_size
        windows = tuple(count and whole * (1 + count % 2) for count in case.windows)
        case = case.but(samples=whole * (2 + case.samples % 2), windows=windows)
    return case
