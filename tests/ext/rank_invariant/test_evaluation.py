"""Evaluations of a rank-invariant run on one process."""

import ignite.metrics as ignite_metrics
import pytest
import torch
from ignite.metrics import Loss

from ignite_engine import Trainer, Update, create_evaluator, loader
from ignite_engine.handlers import Evaluation
from tests.kit.tiny import linear, mse

GENERATOR = torch.Generator().manual_seed(0)
SAMPLES = [(torch.rand(3, generator=GENERATOR), torch.randint(3, (), generator=GENERATOR)) for _ in range(23)]
SUMMED = (
    *(
        "Accuracy",
        "Average",
        "ConfusionMatrix",
        "CosineSimilarity",
        "Entropy",
        "GeometricAverage",
        "KLDivergence",
        "Loss",
    ),
    *("MeanAbsoluteError", "MeanPairwiseDistance", "MeanSquaredError", "Precision", "PSNR", "Recall"),
    "TopKCategoricalAccuracy",
)
SAME_SHAPE = {
    "CosineSimilarity",
    "KLDivergence",
    "MeanAbsoluteError",
    "MeanPairwiseDistance",
    "MeanSquaredError",
    "PSNR",
}
ALONE = {"Average", "GeometricAverage"}


def made(name):
    """The metric over rows of three numbers and their class, given what it wants to compare."""
    options = {
        "ConfusionMatrix": {"num_classes": 3},
        "Loss": {"loss_fn": torch.nn.functional.cross_entropy},
        "PSNR": {"data_range": 1.0},
        "TopKCategoricalAccuracy": {"k": 2},
    }.get(name, {})
    if name in SAME_SHAPE:
        options["output_transform"] = lambda output: (output[0].double(), output[0].double().flip(1))
    elif name in ALONE:
        options["output_transform"] = lambda output: output[0]
    return getattr(ignite_metrics, name)(**options)


def evaluated(metrics, *, invariant, limit=None):
    model = linear()
    update = Update(
        model, torch.optim.SGD(model.parameters(), lr=0.1), mse, accumulate="rank_invariant" if invariant else None
    )
    trainer = Trainer(update, global_micro_batches=2)
    evaluator = create_evaluator(model, lambda model, batch: batch, metrics)
    Evaluation(evaluator, loader(SAMPLES, 4), limit=limit)(trainer)
    return dict(evaluator.state.metrics)


@pytest.mark.row("D17")
@pytest.mark.parametrize("kind", SUMMED)
@pytest.mark.parametrize("limit", [None, 3])
def test_each_metric_is_what_ignite_computes(kind, limit):
    expected = evaluated({"metric": made(kind)}, invariant=False, limit=limit)["metric"]
    found = evaluated({"metric": made(kind)}, invariant=True, limit=limit)["metric"]

    torch.testing.assert_close(
        torch.as_tensor(found).double(), torch.as_tensor(expected).double(), rtol=0, atol=3e-7
    )  # Entropy's in fp32


def test_metric_that_is_used_twice_is_summed_once():
    def metrics():
        loss = Loss(torch.nn.functional.cross_entropy)
        return {"loss": loss, "perplexity": ignite_metrics.MetricsLambda(torch.tensor, loss).exp()}

    expected, found = (evaluated(metrics(), invariant=each) for each in (False, True))
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-12)
    assert float(found["perplexity"]) == pytest.approx(float(expected["perplexity"]), abs=1e-6)
