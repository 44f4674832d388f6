"""What ranks draw that did not exist when a checkpoint was saved."""

import pytest
import torch
from ignite.engine import Events

from ignite_engine import loader
from ignite_engine.handlers import Checkpoint
from tests.kit.tiny import Numbers, linear, trainer_of
from tests.ranks.forkserver import on_ranks

pytestmark = pytest.mark.distributed


def _made(folder):
    trainer, checkpoint = trainer_of(linear()), Checkpoint(folder)
    checkpoint.attach(trainer)
    return trainer, checkpoint


def _drawn_in_an_iteration(folder):
    trainer, checkpoint = _made(folder)
    checkpoint.resume()
    drawn = []
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: drawn.append(torch.rand(4)))
    trainer.run(loader(Numbers(24), 2), max_epochs=2, epoch_length=1)
    return drawn[0]


def _resume(rank, folder, saved):
    torch.save(_drawn_in_an_iteration(f"{saved}/of_ranks"), f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_a_rank_that_did_not_exist_draws_other_numbers_than_rank_0(tmp_path):
    for name in ("alone", "of_ranks"):
        torch.manual_seed(0)
        _made(f"{tmp_path}/{name}")[0].run(loader(Numbers(24), 2), max_epochs=1, epoch_length=1)
    on_ranks(3, _resume, tmp_path, str(tmp_path))
    first, *others = (torch.load(tmp_path / f"{rank}.pt").tolist() for rank in range(3))

    assert first == _drawn_in_an_iteration(f"{tmp_path}/alone").tolist()
    assert first not in others and others[0] != others[1]
