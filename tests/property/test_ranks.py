"""On several ranks: each sample once, the weights of one process, and a resume to the bit, or on other ranks."""

import pytest

from tests.kit.floors import of
from tests.property.case import Case, Stop
from tests.property.judging import MINUTES, check, judged
from tests.property.ranked import on_ranks
from tests.property.strategies import ranked

PINNED = [
    Case(ranks=2, steps=2, one_process=True, weights="samples", samples=17, stops=(Stop("SIGTERM", rank=1),)),
    Case(ranks=3, steps=3, one_process=True, data="list of batches", batches=(0, 2, 4, 0), stops=(Stop(),)),
    *of(
        "rank_invariant",
        [
            Case(
                ranks=3,
                ranks_after=2,
                rank_invariant=True,
                global_micro_batches=4,
                layers=("dropout",),
                stops=(Stop(),),
            )
        ],
    ),
    Case(ranks=2, ranks_after=4, samples=24, batch_size=4, data="loader shuffled", stops=(Stop(),)),
]


@pytest.mark.parametrize("case", PINNED, ids=repr)
def test_pinned_case_of_several_ranks(case):
    check(on_ranks, case)


def test_state_that_matters_and_is_not_saved_is_found_on_ranks():
    reason, _ = on_ranks(Case(ranks=2, handlers=("unsaved counter",), stops=(Stop(),)))
    assert reason is not None


def test_weights_that_each_rank_trains_by_itself_are_found():
    reason, _ = on_ranks(Case(ranks=2, one_process=True, ddp="none"))
    assert reason is not None


@pytest.mark.parametrize("seed", range(16))
def test_ranks_train_as_one_process_and_resume(seed):
    judged(on_ranks, ranked, seed=seed, cases=1)


@pytest.mark.nightly
@pytest.mark.timeout(60 * MINUTES + 600)
def test_any_ranks_train_as_one_process_and_resume(random_seed):
    judged(on_ranks, ranked, seed=random_seed, minutes=0.3 * MINUTES)
