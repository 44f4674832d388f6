"""What handlers refuse: in one line, which names what was given and the remedy."""

import torch
from ignite.engine import Events
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from ignite_engine import Trainer, create_evaluator
from ignite_engine import handlers as ours
from ignite_engine.handlers.meters import Meter
from ignite_engine.handlers.model_bank import ModelBank
from ignite_engine.schedules import constant, warmup_cosine, warmup_linear, warmup_polynomial, warmup_wsd
from tests.kit.refusals import refusals
from tests.kit.tiny import numbers_loader, trainer_of


def sgd(count=1):
    layers = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(count)]
    return SGD(layers, lr=0.5)


def without_a_model():
    return Trainer(lambda engine, batch: 0.0)


def written(name, value):
    """A run in which a handler writes this metric."""

    def run(folder):
        trainer = without_a_model()
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update({name: value}))
        ours.MetricLogger(folder, console=False).attach(trainer)
        return trainer.run(range(3))

    return run


def two_loggers(folder):
    trainer = without_a_model()
    ours.MetricLogger(folder / "second", console=False, name="third").attach(trainer)
    ours.MetricLogger(folder, console=False).attach(trainer)
    ours.MetricLogger(f"{folder}/.", console=False, name="second").attach(trainer)


def two_schedules():
    trainer = trainer_of()
    for _ in range(2):
        ours.LRSchedule(constant(trainer.update.optimizers["optimizer"])).attach(trainer)


def two_averages():
    trainer = trainer_of()
    ours.EMA(0.9).attach(trainer)
    ours.EMA(0.5, name="fast").attach(trainer)
    evaluator = create_evaluator(trainer.update.model, lambda model, batch: None)
    ours.Evaluation(evaluator, numbers_loader(2)).attach(trainer)
    trainer.run(numbers_loader(), max_epochs=1)


def plateau(**options):
    return ours.LRSchedule(ReduceLROnPlateau(sgd()), **options)


def loaded(schedule, groups=1):
    """The state of a constant schedule of one group."""
    state = ours.LRSchedule(constant(sgd())).state_dict()
    return lambda: ours.LRSchedule(schedule(sgd(groups))).load_state_dict(state)


def cosine(given):
    return lambda: warmup_cosine(sgd(), **given)


WARMUPS = {
    "negative": ({"warmup": -1}, "warmup at least 0"),
    "above the total": ({"warmup": 9, "total": 8}, "warmup total=8"),
    "fraction above 1": ({"warmup": 1.5}, "warmup fraction 1.5"),
    "of another type": ({"warmup": "2"}, "warmup '2'"),
    "total of 0": ({"total": 0}, "total at least 1"),
    "ratio above 1": ({"total": 8, "min_ratio": 1.5}, "min_ratio 1.5"),
}
test_refusals = refusals(
    [
        *((f"schedule, {name}", cosine(given), ValueError, words) for name, (given, words) in WARMUPS.items()),
        ("power", lambda: warmup_polynomial(sgd(), power=0.0), ValueError, "power positive"),
        ("decay shape", lambda: warmup_wsd(sgd(), decay_shape="x"), ValueError, "decay_shape linear cosine"),
        ("decay to 0", lambda: warmup_wsd(sgd(), decay_shape="exponential"), ValueError, "min_ratio above 0"),
        ("decay of none", lambda: warmup_wsd(sgd(), decay=0, total=9), ValueError, "decay at least 1"),
        ("too long", lambda: warmup_wsd(sgd(), 5, decay=5, total=9), ValueError, "warmup decay total=9"),
        ("length unknown", lambda: warmup_linear(sgd()).lrs_at(0), ValueError, "attach total"),
        ("metric for none", lambda: ours.LRSchedule(constant(sgd()), metric="a"), ValueError, "metric='a' takes none"),
        ("plateau of none", lambda: plateau(), ValueError, "metric='val/loss'"),
        (
            "plateau at an event",
            lambda: plateau(metric="a").attach(trainer_of(), Events.EPOCH_COMPLETED),
            ValueError,
            "without an event",
        ),
        ("no scheduler", lambda: ours.LRSchedule(3), TypeError, "scheduler int warmup_cosine"),
        (
            "another optimizer",
            lambda: ours.LRSchedule(constant(sgd())).attach(trainer_of()),
            ValueError,
            "lr_schedule optimizer Update",
        ),
        ("two schedules", two_schedules, ValueError, "lr_schedule taken"),
        ("state of other groups", loaded(constant, groups=3), ValueError, "1 3 groups"),
        ("state of another kind", loaded(lambda o: CosineAnnealingLR(o, 9)), ValueError, "kind ignore"),
        ("EMA, decay of 1", lambda: ours.EMA(1.0), ValueError, "decay 1.0 0.999"),
        ("EMA, negative decay", lambda: ours.EMA(-0.1), ValueError, "decay -0.1"),
        ("EMA, one name", lambda: ours.EMA(0.9, evaluate="val"), ValueError, "evaluate ('val',)"),
        ("two averages of one evaluation", two_averages, ValueError, "evaluate="),
        ("EMA without a model", lambda: ours.EMA().attach(without_a_model()), TypeError, "Update model"),
        ("no mode", lambda: ours.EarlyStopping("val/kappa", patience=1), ValueError, "val/kappa smaller larger mode="),
        ("no mode of the best", lambda: ours.Checkpoint("x", best="val/kappa"), ValueError, "val/kappa mode="),
        ("patience of 0", lambda: ours.EarlyStopping("a", patience=0), ValueError, "patience at least 1"),
        ("unknown mode", lambda: ours.EarlyStopping("a", patience=1, mode="low"), ValueError, "mode 'low'"),
        ("negative delta", lambda: ours.EarlyStopping("a", patience=1, min_delta=-1), ValueError, "min_delta -1"),
        ("unknown meter", lambda: Meter("median"), ValueError, "'median' 'mean'"),
        ("two logs of a folder", two_loggers, ValueError, "MetricLogger another directory"),
        ("trail, every 0", lambda: ours.DigestTrail(".", every=0), ValueError, "every least 1"),
        ("trail, every 2.5", lambda: ours.DigestTrail(".", every=2.5), ValueError, "every least 1"),
        ("metric, an object", written("mine", object()), ValueError, "'mine' number"),
        ("metric, too large", written("big", 10**400), ValueError, "'big' float"),
        ("metric, epoch", written("epoch", 7.0), ValueError, "'epoch' column"),
        ("metric, iteration", written("iteration", 7.0), ValueError, "'iteration' column"),
        ("no source", lambda: ModelBank([]), ValueError, "source"),
    ]
)
