"""Ranks vote when it is their turn, and at once where all of them say so."""

import pickle
from typing import Any

import pytest
from ignite.engine import Events

from ignite_engine import create_evaluator
from ignite_engine.errors import PeerFailed
from ignite_engine.handlers import Evaluation
from ignite_engine.ranks import agreement
from tests.kit.tiny import numbers_loader, trainer_of
from tests.ranks.forkserver import on_ranks


@pytest.fixture
def two_ranks(monkeypatch):
    """The other rank asks for bit 2 in each vote and votes as often; gets this rank's bits of each vote."""
    votes = list[int]()

    def gather(values):
        votes.append(int(values[0]))
        return [list(values), [2.0, values[1]]]

    monkeypatch.setattr(agreement, "world_size", lambda: 2)
    monkeypatch.setattr(agreement, "gather_floats", gather)
    return votes


def test_between_votes_nothing_is_exchanged_and_a_requested_one_is_at_once(two_ranks):
    vote = agreement.Vote()
    vote.restart(0)
    assert [vote.poll(iteration, 1) for iteration in range(1, 6)] == [3, 0, 0, 0, 0]
    assert two_ranks == [1]
    vote.vote_now()
    assert [vote.poll(iteration, 4) for iteration in range(6, 9)] == [6, 0, 0]
    assert two_ranks == [1, 4]


def test_broken_off_evaluation_has_the_ranks_agree_at_the_next_boundary():
    """Else they might train past it, to the turn of their vote."""
    trainer, votes_requested = trainer_of(), list[int]()

    def vote_now():
        votes_requested.append(trainer.state.iteration)

    trainer.requests._vote.vote_now = vote_now

    def predict(model, batch):
        trainer.request_stop("enough")

    evaluator = create_evaluator(trainer.update.model, predict)
    Evaluation(evaluator, [0, 0]).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    trainer.run(numbers_loader(12), max_epochs=1)
    assert votes_requested == [3]


@pytest.mark.parametrize("run", [agreement.agreed, agreement.together])
def test_error_of_one_rank_is_raised_on_all(monkeypatch, run):
    outcomes = list[Any]()

    def gather(value):
        outcomes.append(value)
        return [value, (None, ValueError("of rank 1"))]

    monkeypatch.setattr(agreement, "gather_objects", gather)
    with pytest.raises(ValueError, match="of rank 1"):
        run(lambda: 3)
    with pytest.raises(ZeroDivisionError):  # its own goes before a peer's, and the peer is not left waiting
        run(lambda: 1 // 0)
    assert len(outcomes) == 2


def test_each_rank_keeps_its_result_and_that_of_rank_0_is_for_all(monkeypatch):
    unpicklable = lambda: None  # noqa: E731
    monkeypatch.setattr(
        agreement, "gather_objects", lambda mine: [("of rank 0", None), pickle.loads(pickle.dumps(mine))]
    )
    monkeypatch.setattr(agreement, "rank", lambda: 1)

    assert agreement.together(lambda: unpicklable) is unpicklable
    assert agreement.on_rank_0(lambda: "of rank 1") == "of rank 0"


class Picky(Exception):
    """Pickle takes it, and cannot make it again."""

    def __init__(self, host, port):
        super().__init__(f"no answer from {host}:{port}")


def what_pickle_cannot_carry(rank, folder):
    def fail():
        if rank == 1:
            raise Picky("store", 80)

    with pytest.raises(Picky if rank == 1 else PeerFailed, match="no answer from store:80"):
        agreement.agreed(fail)
    with pytest.raises(Exception, match=r"Can't (pickle|get) local object"):
        agreement.on_rank_0(lambda: lambda: None)
    assert agreement.gather_objects(rank) == [0, 1]


@pytest.mark.distributed
def test_what_pickle_cannot_carry_ends_all_ranks_with_its_text(tmp_path):
    on_ranks(2, what_pickle_cannot_carry, tmp_path)


def gather_of_all_sizes(rank, folder):
    for own in (0, 100, 4000, 4096 - 8, 5000, 100_000):
        mine = (rank, "x" * (own if rank else 10), {"nan": float("nan")})
        everyone = agreement.gather_objects(mine)
        assert [(each[0], len(each[1])) for each in everyone] == [(0, 10), (1, own)], (rank, own, everyone)


@pytest.mark.distributed
def test_objects_of_any_size_come_from_every_rank(tmp_path):
    on_ranks(2, gather_of_all_sizes, tmp_path)
