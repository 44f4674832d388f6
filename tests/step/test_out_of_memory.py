"""A micro-batch that does not fit into memory ends the run with its rank, its iteration and its shapes."""

import pytest
import torch
from ignite.engine import Engine
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, Update, loader
from tests.kit.tiny import Numbers, linear, mse
from tests.ranks.forkserver import on_ranks

FULL = "CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has more to say."


class Full:
    """A loss function that runs out of memory in its third call; ``late``: in backward."""

    def __init__(self, *, late=False):
        self.late, self.calls = late, 0

    def __call__(self, model, batch):
        loss = mse(model, batch)
        self.calls += 1
        if self.calls == 3:
            if not self.late:
                raise torch.OutOfMemoryError(FULL)
            loss.register_hook(self._fail)
        return loss

    def _fail(self, gradient):
        raise torch.OutOfMemoryError(FULL)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [Trainer, Engine])
def test_the_error_names_rank_iteration_and_shapes(kind, late):
    model = linear()
    engine = kind(Update(model, torch.optim.SGD(model.parameters(), lr=0.05), Full(late=late)))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        engine.run(loader(Numbers(16), 4), max_epochs=1)
    assert str(raised.value) == (
        "Out of memory on rank 0 in iteration 3 with a micro-batch [Tensor [4, 3] float32, Tensor [4, 1] float32]: use "
        "a smaller batch_size with more accumulation_steps. OutOfMemoryError: CUDA out of memory. Tried to allocate 2 "
        "GiB."
    )


def test_of_a_group_it_is_the_micro_batch_that_did_not_fit():
    model, data = linear(), Numbers(20)
    batches = [(data.inputs[start:end], data.targets[start:end]) for start, end in ((0, 2), (2, 4), (4, 11), (11, 12))]
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.05), Full()), 2)
    with pytest.raises(torch.OutOfMemoryError, match=r"in iteration 2 with a micro-batch \(Tensor \[7, 3\]"):
        trainer.run(batches)


def _one_of_two_ranks(rank, folder):
    model = DistributedDataParallel(linear())
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.05), Full()))
    error = ""
    try:
        trainer.run(loader(Numbers(16), 2))
    except torch.OutOfMemoryError as raised:
        error = str(raised)
    torch.save(error, f"{folder}/{rank}.pt")


@pytest.mark.distributed
def test_on_two_ranks_it_names_the_rank(tmp_path):
    on_ranks(2, _one_of_two_ranks, tmp_path)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt").startswith(f"Out of memory on rank {rank} in iteration 3 with a mic")
