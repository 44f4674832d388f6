"""An argument of another type is one sentence that names it, where it is given and not where it is used."""

import pytest
import torch

from ignite_engine import Trainer, Update, create_evaluator, loader
from ignite_engine.handlers import EMA, Checkpoint, EarlyStopping, Evaluation, MetricLogger
from tests.kit.tiny import linear, mse

MODEL = linear()
OPTIMIZER = torch.optim.SGD(MODEL.parameters())
EVALUATOR = create_evaluator(MODEL, lambda model, batch: batch)

LINES = [
    (
        lambda value: Checkpoint("unused").attach(value),
        EVALUATOR,
        "what Checkpoint is attached to must be a Trainer, got",
    ),
    (
        lambda value: MetricLogger().attach(value),
        MODEL,
        "what MetricLogger is attached to must be a Trainer, got",
    ),
    (
        lambda value: EarlyStopping("loss", patience=1).attach(value),
        EVALUATOR,
        "what EarlyStopping is attached to must be a Trainer",
    ),
    (lambda value: EMA().attach(value), EVALUATOR, "what EMA is attached to must be a Trainer, got a _Evaluator."),
    (lambda value: Evaluation(EVALUATOR, []).attach(value), EVALUATOR, "what Evaluation is attached to must be a Tra"),
    (lambda value: Update(value, OPTIMIZER, mse), mse, "model must be a module, got a function."),
    (lambda value: Update(MODEL, value, mse), None, "optimizer must be an optimizer, or a mapping of names"),
    (lambda value: Update(MODEL, value, mse), [OPTIMIZER], "optimizer must be an optimizer, .* got a list."),
    (lambda value: Update(MODEL, value, mse), torch.optim.SGD, "optimizer must be an optimizer, .* got the class SGD."),
    (lambda value: Update(MODEL, {"one": value}, mse), None, r"optimizer\['one'\] must be an optimizer"),
    (lambda value: Update(MODEL, {value: OPTIMIZER}, mse), 1, "an optimizer's name must be a word, got 1."),
    (
        lambda value: Update(MODEL, OPTIMIZER, value),
        None,
        r"loss_fn must be a function loss_fn\(model, batch\), got None.",
    ),
    (
        lambda value: Update(MODEL, OPTIMIZER, mse, weight_fn=value),
        3,
        "weight_fn must be a function of a batch, or None",
    ),
    (lambda value: Update(MODEL, OPTIMIZER, mse, clip_norm=value), "1", "clip_norm must be a number or None, got '1'."),
    (
        lambda value: Update(MODEL, OPTIMIZER, mse, precision="fp16", grad_scaler=value),
        True,
        "grad_scaler must be a mapping of GradScaler's arguments or None, got True.",
    ),
    (Trainer, MODEL, r"update must be Update\(model, optimizer, loss_fn\) or a function, got a Sequential."),
    (lambda value: Trainer(len, accumulation_steps=value), "4", "accumulation_steps must be .* got '4'."),
    (lambda value: Trainer(len, accumulation_steps=value), True, "accumulation_steps must be .* got True."),
    (lambda value: loader([1], batch_size=value), "2", "batch_size must be a whole number of samples, got '2'."),
    (lambda value: loader([1], seed=value), None, "seed must be a whole number, got None."),
    (lambda value: create_evaluator(value, mse), None, "model must be a module, got None."),
    (lambda value: create_evaluator(MODEL, value), None, "predict must be a function predict"),
    (lambda value: create_evaluator(MODEL, mse, value), [1], "metrics must be a mapping of names to metrics, or None"),
    (
        lambda value: create_evaluator(MODEL, mse, {"one": value}),
        1,
        r"metrics\['one'\] must be a metric .*, got 1.",
    ),
    (lambda value: Evaluation(value, [1]), MODEL, "evaluator must be an engine, as create_evaluator"),
    (
        lambda value: Evaluation(EVALUATOR, value),
        None,
        "data must be a loader or .*, got None.",
    ),
    (lambda value: Evaluation(EVALUATOR, [1], name=value), 3, "name must be a word, got 3."),
    (lambda value: Evaluation(EVALUATOR, [1], limit=value), 1.5, "limit must be a whole number of batches or None"),
    (Checkpoint, None, "directory must be a path, got None."),
    (Checkpoint, "", "directory must be a path, got ''."),
    (lambda value: Checkpoint("x", keep_last=value), 1.5, "keep_last must be a whole number, got 1.5."),
    (lambda value: Checkpoint("x", keep_best=value), "1", "keep_best must be a whole number, got '1'."),
    (lambda value: Checkpoint("x", keep_every=value), "5", "keep_every must be a whole number of iterations or None"),
    (lambda value: Checkpoint("x", best=value), True, "best must be the name of a metric or None, got True."),
    (lambda value: Checkpoint("x", config=value), "abc", "config must be a mapping or None, got 'abc'."),
    (lambda value: Checkpoint("x", keep_fn=value), 3, "keep_fn must be a function or None, got 3."),
    (lambda value: Checkpoint("x", background=value), "no", "background must be True or False, got 'no'."),
    (lambda value: Checkpoint("x", strict=value), "no", "strict must be True or False, got 'no'."),
    (lambda value: EarlyStopping(value, patience=2), 3, "key must be the name of a metric, got 3."),
    (lambda value: EarlyStopping("loss", patience=value), 1.5, "patience must be a whole number of values, got 1.5."),
    (lambda value: EarlyStopping("loss", patience=2, min_delta=value), "a", "min_delta must be a number, got 'a'."),
    (EMA, "0.9", "decay must be a number, got '0.9'."),
]


def test_parts_to_leave_out_are_a_list(tmp_path):
    """A word would be taken letter by letter."""
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(Trainer(Update(MODEL, OPTIMIZER, mse)))
    with pytest.raises(ValueError, match=r"^ignore is a list, got 'ema': write \['ema'\]."):
        checkpoint.resume("ema")
