"""A mistake in a call is one sentence that names it, where it is given and not where it is used."""

import torch

from ignite_engine import Trainer, Update, create_evaluator, seed_everything
from ignite_engine.handlers import EMA, Checkpoint, Evaluation, MetricLogger
from tests.kit.refusals import refusals
from tests.kit.tiny import linear, mse

MODEL = linear()
OPTIMIZER = torch.optim.SGD(MODEL.parameters())
EVALUATOR = create_evaluator(MODEL, lambda model, batch: batch)


def update(model=MODEL, optimizer=OPTIMIZER, loss_fn=mse, **options):
    return lambda: Update(model, optimizer, loss_fn, **options)


def attached(handler):
    """To an object that is no engine."""
    return lambda: handler.attach(MODEL)


WRONG_TYPES = [
    (attached(Checkpoint("unused")), "attached Ignite Engine Sequential"),
    (attached(MetricLogger()), "attached Ignite Engine Sequential"),
    (attached(EMA()), "attached Ignite Engine Sequential"),
    (attached(Evaluation(EVALUATOR, [])), "attached Ignite Engine Sequential"),
    (update(model=mse), "model module function"),
    (update(optimizer=None), "optimizer mapping None"),
    (update(optimizer=[OPTIMIZER]), "optimizer mapping list"),
    (update(optimizer=torch.optim.SGD), "optimizer class SGD"),
    (update(optimizer={"one": None}), "optimizer['one'] None"),
    (update(optimizer={1: OPTIMIZER}), "optimizer's name word 1"),
    (update(loss_fn=None), "loss_fn loss_fn(model, batch) None"),
    (update(weight_fn=3), "weight_fn function of a batch 3"),
    (update(clip_norm="1"), "clip_norm number '1'"),
    (lambda: Trainer(MODEL), "update Update(model, optimizer, loss_fn) Sequential"),
    (lambda: create_evaluator(None, mse), "model module None"),
    (lambda: create_evaluator(MODEL, None), "predict function None"),
    (lambda: create_evaluator(MODEL, mse, [1]), "metrics mapping list"),
    (lambda: create_evaluator(MODEL, mse, {"one": 1}), "metrics['one'] metric 1"),
    (lambda: Evaluation(MODEL, [1]), "evaluator create_evaluator Sequential"),
    (lambda: Evaluation(EVALUATOR, None), "data loader None"),
    (lambda: Checkpoint(None), "directory path None"),
    (lambda: Checkpoint(""), "directory path ''"),
    (lambda: Checkpoint("x", keep_last=1.5), "keep_last whole number 1.5"),
    (lambda: Checkpoint("x", keep_best="1"), "keep_best whole number '1'"),
    (lambda: Checkpoint("x", keep_every="5"), "keep_every whole number '5'"),
    (lambda: Checkpoint("x", best=True), "best metric True"),
    (lambda: Checkpoint("x", config="abc"), "config mapping 'abc'"),
    (lambda: Checkpoint("x", keep_fn=3), "keep_fn function 3"),
    (lambda: Checkpoint("x", background="no"), "background True or False 'no'"),
    (lambda: Checkpoint("x", strict="no"), "strict True or False 'no'"),
    (lambda: seed_everything(0.5), "seed whole number 0.5"),
]


def resumed_without(word, folder):
    """A word would be taken letter by letter."""
    checkpoint = Checkpoint(folder)
    checkpoint.attach(Trainer(Update(MODEL, OPTIMIZER, mse)))
    checkpoint.resume(word)


test_refusals = refusals(
    [(f"{number}: {words}", call, TypeError, words) for number, (call, words) in enumerate(WRONG_TYPES)]
    + [
        ("groups as a text", lambda: Trainer(len, accumulation_steps="4"), ValueError, "accumulation_steps '4'"),
        ("groups as a truth", lambda: Trainer(len, accumulation_steps=True), ValueError, "accumulation_steps True"),
        ("no clipping", update(clip_norm=0), ValueError, "clip_norm positive None 0"),
        ("no optimizer", update(optimizer={}), ValueError, "at least one optimizer"),
        ("no scaler", update(precision="bf16", grad_scaler={"init_scale": 2.0}), ValueError, "no effect bf16"),
        ("precision", update(precision="half"), ValueError, "precision fp32 bf16 fp16 'half'"),
        ("of a evaluator", lambda: create_evaluator(MODEL, mse, precision="half"), ValueError, "precision fp32 'half'"),
        ("seed", lambda: seed_everything(-1), ValueError, "seed at least 0 -1"),
        ("a word", lambda tmp_path: resumed_without("ema", tmp_path), ValueError, "ignore list ['ema']"),
    ]
)
