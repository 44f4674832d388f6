"""A run that is broken off anywhere and started again ends with the bits of the whole one, unless it has said no."""

import pytest

from tests.property.case import Case, Stop
from tests.property.judging import MINUTES, check, judged
from tests.property.resuming import resume
from tests.property.strategies import resumes

PINNED = [
    # modes that a handler has set at EPOCH_STARTED, in a run that goes on in its process
    Case(layers=("frozen",), handlers=("frozen part in eval mode",), stops=(Stop("same process", after=0.8),)),
    # a pass that is open and not begun, as the one before was ended before its time
    Case(
        data="weighted sampler",
        samples=26,
        batch_size=2,
        epochs=3,
        evaluation="epochs",
        handlers=("terminate_epoch",),
        stops=(Stop(how="stop in an evaluation", event="ITERATION_COMPLETED", after=0.15, rank=0),),
    ),
]


@pytest.mark.parametrize("case", PINNED, ids=repr)
def test_pinned_run_resumes_to_the_bit(case):
    check(resume, case)


@pytest.mark.parametrize(
    "planted",
    [
        {"handlers": ("unsaved counter",)},
        {"handlers": ("unsaved generator",)},
        {"layers": ("unsaved attribute",)},
        {"layers": ("unsaved buffer",)},
    ],
    ids=str,
)
def test_state_that_matters_and_is_not_saved_is_found_or_announced(planted):
    reason, happened = resume(Case(**planted, stops=(Stop(),)))
    assert reason is not None or "announced, other bits" in happened


@pytest.mark.parametrize("seed", range(12))
def test_run_resumes_to_the_bit(seed):
    """Without workers, for which torch waits up to 5 s at the end of a process."""
    judged(resume, resumes.map(lambda case: case.but(workers="0")), seed=seed, cases=3)


@pytest.mark.nightly
@pytest.mark.timeout(60 * MINUTES + 600)
def test_any_run_resumes_to_the_bit(random_seed):
    judged(resume, resumes, seed=random_seed, minutes=0.4 * MINUTES)
