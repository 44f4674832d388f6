"""An evaluation has no side effect on the model, its modes or its data, and its engine runs again after an error."""

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.metrics import Accuracy, Loss, Metric, RunningAverage
from ignite.metrics.metric import BatchFiltered, BatchWise
from torch import nn
from torch.nn.functional import cross_entropy

from ignite_engine import create_evaluator
from tests.kit.tiny import linear


def pairs(batches=4):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(8, 3, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(batches)
    ]


def of_all_kinds():
    accuracy = Accuracy()
    return {
        "accuracy": accuracy,
        "error": 1 - accuracy,
        "loss": Loss(cross_entropy),
        "first": Accuracy(output_transform=lambda output: (output[0][:2], output[1][:2])),
        "named": Accuracy(output_transform=lambda output: {"y_pred": output[0], "y": output[1]}),
        "listed": Accuracy(output_transform=lambda output: (list(output[0].unbind()), list(output[1].unbind()))),
        "running": RunningAverage(output_transform=lambda output: output[0].mean().item()),
    }


@pytest.mark.parametrize("only", [("accuracy", "loss"), ("accuracy", "error", "first", "named", "listed"), None])
def test_metrics_have_the_bits_that_they_have_in_an_engine_of_ignites(only):
    found = []
    for make in (
        lambda: Engine(lambda engine, batch: batch),
        lambda: create_evaluator(linear(), lambda _, batch: batch),
    ):
        engine = make()
        for name, metric in of_all_kinds().items():
            if only is None or name in only:
                metric.attach(engine, name)
        found.append(engine.run(pairs()).metrics)

    assert found[0] == found[1] and len(found[0]) >= 2


def test_metrics_of_batches_and_handlers_between_metrics_keep_their_order():
    evaluator = create_evaluator(linear(), lambda _, batch: batch, {"accuracy": Accuracy()})
    of_batch, every_second, order = Accuracy(), Accuracy(), []
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: order.append(torch.is_grad_enabled()))
    of_batch.attach(evaluator, "of_batch", usage=BatchWise())
    every_second.attach(evaluator, "every_second", usage=BatchFiltered(every=2))
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: order.append(evaluator.state.metrics["of_batch"]))
    data = pairs()
    metrics = evaluator.run(data).metrics

    right = [(scores.argmax(1) == y).float().mean().item() for scores, y in data]
    assert order[::2] == [True] * 4 and order[1::2] == pytest.approx(right)
    assert metrics["every_second"] == pytest.approx((right[1] + right[3]) / 2)


class Sums(Metric):
    required_output_keys = ("first", "second")

    def reset(self):
        self.seen = []

    def update(self, output):
        self.seen.append(output)

    def compute(self):
        return repr(self.seen)


TRANSFORMS = {
    "tuple": lambda pair: pair,
    "mapping": lambda pair: {"first": pair[0], "second": pair[1]},
    "lists": lambda pair: ([*pair[0]], [*pair[1]]),
    "tensor": lambda pair: pair[0],
    "number": lambda pair: pair[0].sum().item(),
    "nothing": lambda pair: (),
}


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_an_output_transform_is_called_once_a_batch(kind):
    """It may count, draw or take from an iterator; Ignite calls it once."""

    def outcome(engine):
        numbers = iter(range(1, 100))
        metric = Sums(output_transform=lambda pair: TRANSFORMS[kind]((pair[0] * next(numbers), pair[1])))
        metric.attach(engine, "sums")
        try:
            return engine.run(pairs()).metrics["sums"], next(numbers)
        except IndexError as error:
            return str(error), next(numbers)

    assert outcome(create_evaluator(nn.Identity(), lambda model, batch: batch)) == outcome(
        Engine(lambda _, batch: batch)
    )


def test_an_error_of_a_metric_names_it():
    evaluator = create_evaluator(linear(), lambda _, batch: (batch[0], batch[1][:, None, None]), {"a": Accuracy()})
    with pytest.raises(ValueError) as raised:
        evaluator.run(pairs())

    assert raised.value.__notes__ == ["Raised by handler Accuracy.iteration_completed on ITERATION_COMPLETED."]


def test_predictions_are_made_without_gradients_in_the_precision_asked_for():
    seen = []
    evaluator = create_evaluator(linear(), lambda model, batch: seen.append(model(batch[0])), precision="bf16")
    evaluator.run([(torch.ones(2, 3),)])

    assert not seen[0].requires_grad and seen[0].dtype == torch.bfloat16


def test_a_model_that_has_moved_is_evaluated_where_it_is():
    model, seen = linear(), []
    evaluator = create_evaluator(model, lambda _, batch: seen.append(batch[0].device.type))
    evaluator.run(pairs(1))
    model.to("meta")
    evaluator.run(pairs(1))
    evaluator.step(evaluator, pairs(1)[0])

    assert seen == ["cpu", "meta", "meta"]


def test_ddp_is_evaluated_by_the_module_inside():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def no_sync(self): ...

    model, seen = linear(), []
    create_evaluator(Wrapper(model), lambda model, batch: seen.append(model)).run([1])

    assert seen[0] is model


def test_an_engine_runs_again_after_an_error():
    def predict(model, batch):
        if batch == 2:
            raise OSError("no data")
        return batch

    evaluator = create_evaluator(linear(), predict)
    with pytest.raises(OSError):
        evaluator.run([1, 2])

    assert evaluator.run([1, 3]).output == 3  # Ignite's returns None, without running
