"""On several ranks: each sample once, the weights of one process, and a resume to the bit, or on other ranks."""

import pytest

from tests.property.case import Case, Stop
from tests.property.judging import MINUTES, check, judged
from tests.property.ranked import on_ranks
from tests.property.strategies import ranked

PINNED = [Case(ranks=2)]


@pytest.mark.parametrize("case", PINNED, ids=repr)
def test_pinned_case_of_several_ranks(case):
    check(on_ranks, case)


def test_state_that_matters_and_is_not_saved_is_found_on_ranks():
    reason, _ = on_ranks(Case(ranks=2, handlers=("unsaved counter",), stops=(Stop(),)))
    assert reason is not None


def test_weights_that_each_rank_trains_by_itself_are_found():
    reason, _ = on_ranks(Case(ranks=2, one_process=True, ddp="none"))
    assert reason is not None


@pytest.mark.parametrize("seed", range(28))
def test_ranks_train_as_one_process_and_resume(seed):
    judged(on_ranks, ranked, seed=seed, cases=1)


@pytest.mark.nightly
def test_any_ranks_train_as_one_process_and_resume(random_seed):
    judged(on_ranks, ranked, seed=random_seed, minutes=0.3 * MINUTES)
