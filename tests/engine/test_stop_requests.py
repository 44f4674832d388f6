"""Requests, and where they are agreed on; the vote itself on several ranks ``tests/ranks/test_agreement.py``."""

import pytest
from ignite.engine import Events
from torch.distributed.device_mesh import init_device_mesh

from ignite_engine import Trainer
from ignite_engine.engine.stop_requests import BACKGROUND_DONE, SAVE, STOP, StopRequests
from ignite_engine.ranks.mesh import use_mesh
from tests.kit.tiny import on_two_ranks


def test_requests_are_agreed_once():
    requests = StopRequests()
    requests.request_save()
    requests.report_background_done()

    assert requests.pending
    assert requests.agree(1, now=False) == SAVE | BACKGROUND_DONE
    assert not requests.pending and requests.agree(2, now=False) == 0


def test_a_stop_stays_requested_and_keeps_its_first_reason():
    requests = StopRequests()
    requests.request_stop("SIGINT", 2)
    requests.request_stop("SIGTERM", 15)

    assert requests.agree(1, now=False) == STOP and requests.stop == ("SIGINT", 2)
    requests.reset()
    assert requests.stop is None and requests.agree(2, now=False) == 0


def test_what_could_not_be_done_is_requested_again():
    requests = StopRequests()
    requests.request_again(SAVE)

    assert requests.pending
    assert requests.agree(1, now=False) == SAVE


def stopped_by_rank_1(rank):
    """Ranks that share their data, where no handler of its own has a boundary at each iteration."""
    use_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))
    trainer = Trainer(lambda engine, batch: None)
    third = Events.ITERATION_COMPLETED(once=3)
    if rank == 1:
        trainer.add_event_handler(third, lambda: trainer.request_stop("here"))
    trainer.add_event_handler(third, trainer.vote_at_next_boundary)
    state = trainer.run([0] * 8)
    return {"end": [state.iteration, state.status, state.reason]}


@pytest.mark.distributed
def test_stop_that_one_rank_asks_for_ends_both_at_its_iteration(tmp_path):
    ends = on_two_ranks(stopped_by_rank_1, tmp_path / "meeting")["end"]
    assert ends == [[3, "interrupted", "here"]] * 2
