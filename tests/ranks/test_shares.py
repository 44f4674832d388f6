"""With ``global_micro_batches`` an iteration is the same work on any number of ranks."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler

from ignite_engine import Trainer, Update, loader
from tests.faults.fork_server import shared
from tests.kit.tiny import Numbers, linear, mse
from tests.ranks.forkserver import on_ranks
from tests.ranks.shares_runs import MODULES

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def server():
    return shared(MODULES)


def run_on(server, folder, ranks, function, *arguments):
    folder.mkdir(parents=True)
    output = folder / "output.txt"
    code = server.call("tests.ranks.shares_runs:start", str(folder), ranks, function, *arguments, output=output)
    assert code == 0, output.read_text()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def by_iteration(results):
    """Epoch, iteration and micro-batches of all ranks, in the order of ranks."""
    joined = []
    for same in zip(*(each["seen"] for each in results), strict=True):
        assert len({each[:2] for each in same}) == 1
        joined.append((*same[0][:2], [micro_batch for each in same for micro_batch in each[2]]))
    return joined


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "drop_last", "workers"), [(29, False, 0), (29, True, 2), (24, False, 0)])
def test_an_iteration_is_the_same_micro_batches_on_any_number_of_ranks(server, tmp_path, samples, drop_last, workers):
    found = {
        ranks: by_iteration(run_on(server, tmp_path / f"{ranks}/run", ranks, "see", samples, None, drop_last, workers))
        for ranks in (1, 2, 3, 4)
    }

    assert found[2] == found[3] == found[4] == found[1]
    micro_batches = [len(each) for *_, group in found[1] for each in group]
    batches = samples // 2 if drop_last else -(-samples // 2)
    assert len(micro_batches) == 2 * batches and sum(micro_batches) == 2 * (samples - (samples % 2) * drop_last)
    assert len(found[1]) == 2 * -(-batches // 5)
    assert found[1][0][2] != found[1][len(found[1]) // 2][2], "each epoch has its own order"


@pytest.mark.slow
def test_run_continues_on_another_number_of_ranks_with_the_next_micro_batch(server, tmp_path):
    whole = by_iteration(run_on(server, tmp_path / "whole/run", 1, "see", 29, None, False, 0))
    seen = []
    for number, (ranks, stop_at) in enumerate(((2, 1), (4, 2), (1, 3), (3, 5), (2, None))):
        results = run_on(server, tmp_path / f"parts/{number}", ranks, "see", 29, stop_at, False, 0)
        seen += by_iteration(results)
        assert not any(each["lines"] for each in results), "the position means the same on any number of ranks"

    assert seen == whole


@pytest.mark.slow
def test_ordinary_update_learns_the_same_on_uneven_shares_and_a_short_tail(server, tmp_path):
    """23 samples in batches of 2 make 12 micro-batches; 5 on 2 to 4 ranks are uneven, and 2 are left at the end."""
    found = {ranks: run_on(server, tmp_path / f"{ranks}", ranks, "learn") for ranks in (1, 2, 3, 4)}
    (expected,) = found[1]

    for ranks in (2, 3, 4):
        for result in found[ranks]:
            torch.testing.assert_close(result["model"], expected["model"], rtol=0, atol=1e-12)
            torch.testing.assert_close(result["losses"], expected["losses"], rtol=0, atol=1e-12)


def _trains_on_some(rank, folder):
    class Damaged(Numbers):
        def __getitem__(self, index):
            if index < 8:
                raise OSError(f"sample {index} is damaged")
            return super().__getitem__(index)

    model = DistributedDataParallel(linear())
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse)
    data = loader(Damaged(40), batch_size=4, sampler=SubsetRandomSampler(range(8, 28)))
    state = Trainer(update, global_micro_batches=4).run(data, max_epochs=1)  # five micro-batches: a rank has no fifth
    assert state.iteration == 2

    few = loader(Numbers(3), batch_size=4, sampler=WeightedRandomSampler([1.0] * 3, 20))
    assert Trainer(update, global_micro_batches=4).run(few, max_epochs=1).iteration == 2


def test_a_rank_without_a_micro_batch_reads_what_the_sampler_draws(tmp_path):
    on_ranks(2, _trains_on_some, tmp_path)
