"""A run that is resumed on another number of ranks sees each sample of the epoch once, and learns the same."""

import pytest
import torch
from ignite.engine import Events
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, Update, loader
from ignite_engine.handlers import Checkpoint
from tests.kit.processes import ranks
from tests.kit.tiny import Numbers, linear, mse, one

SAMPLES, GLOBAL_BATCH, PER_EPOCH = 37, 12, 4
DEALT = (None, 6)
BOTH_EPOCHS = [(epoch, sample) for epoch in (1, 2) for sample in range(SAMPLES)]


class Indexed(Numbers):
    def __getitem__(self, index):
        return index, *super().__getitem__(index)


def part_of_a_run(rank, folder, size, stop_at=None, steps=None, dealt=None, wrap=lambda model: model):
    """A process that resumes where it can: the samples it trained on, what its model drew, and where it ended."""
    torch.manual_seed(0)  # as a script that seeds all ranks alike
    model = linear()
    seen, drawn = [], []

    def loss_fn(model, batch):
        drawn.append(float(torch.rand(())))
        return mse(model, batch[1:])

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    update = Update(wrap(model), optimizer, loss_fn, weight_fn=lambda batch: len(batch[0]))
    trainer = Trainer(update, steps, global_micro_batches=dealt)
    checkpoint = Checkpoint(folder)
    checkpoint.attach(trainer)
    checkpoint.resume()

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        group = trainer.state.batch if steps or dealt else [trainer.state.batch]
        for batch in group[: len(group) - trainer.state.group.padding]:
            seen.extend((trainer.state.epoch, int(index)) for index in batch[0])
        if trainer.state.iteration == stop_at:
            trainer.request_stop("here")

    state = trainer.run(loader(Indexed(SAMPLES), size, shuffle=True), max_epochs=2)
    end = (state.status, state.iteration)
    return {"seen": seen, "drawn": drawn, "end": end, "weights": one(model), "report": trainer.reproducibility()}


def run_on(world, folder, size, *options):
    if world == 1:
        return [part_of_a_run(0, folder, size, *options)]
    options = (*options, None, None, None)[:3]
    return ranks(world, part_of_a_run, folder, size, *options, DistributedDataParallel)


@pytest.mark.row("D17")
@pytest.mark.parametrize(
    ("plan", "learns_the_same"),
    [
        # ranks, samples in a batch, iteration to stop at, micro-batches, those of all; 12 samples in each update
        ([(1, 12, 2), (3, 4)], True),
        pytest.param([(2, 6, 3), (4, 3)], True, marks=pytest.mark.nightly),  # before the last sample
        ([(3, 4, PER_EPOCH), (2, 6)], True),  # at the end of the epoch
        pytest.param([(4, 3, 2), (1, 12)], True, marks=pytest.mark.nightly),
        ([(3, 4, 1), (2, 6, 2), (1, 12)], True),  # twice in one epoch
        ([(2, 2, 2, 2), (1, 2, None, 4)], False),  # in other groups
        # 19 micro-batches of 2, of which 6 are dealt for each update
        ([(2, 2, 1, *DEALT), (1, 2, 3, *DEALT), (2, 2, None, *DEALT)], True),
        pytest.param(
            [(2, 2, 1, *DEALT), (4, 2, 2, *DEALT), (1, 2, 3, *DEALT), (3, 2, 6, *DEALT), (2, 2, None, *DEALT)],
            True,
            marks=pytest.mark.nightly,
        ),
    ],
    ids=[
        "1 to 3",
        "2 to 4",
        "3 to 2",
        "4 to 1",
        "3 to 2 to 1",
        "2 to 1 in other groups",
        "dealt",
        "dealt again and again",
    ],
)
def test_each_sample_of_the_epoch_is_seen_once(plan, learns_the_same, tmp_path):
    seen = []
    for world, size, *rest in plan:
        found = run_on(world, tmp_path / "run", size, *rest)
        seen += [each for report in found for each in report["seen"]]
        stop_at = rest[0] if rest else None
        status = "interrupted" if stop_at else "completed"
        assert {each["end"][0] for each in found} == {status}
        assert stop_at is None or {each["end"][1] for each in found} == {stop_at}

    assert sorted(seen) == BOTH_EPOCHS
    if learns_the_same:
        (alone,) = run_on(1, tmp_path / "whole", GLOBAL_BATCH)
        for each in found:
            assert each["end"] == alone["end"] == ("completed", 2 * PER_EPOCH)
            torch.testing.assert_close(each["weights"], alone["weights"], rtol=0, atol=1e-6)


def test_new_ranks_draw_numbers_of_their_own_and_the_run_says_so(tmp_path):
    first = run_on(1, tmp_path, 12, 2)
    rest = run_on(3, tmp_path, 4)

    for each in rest:
        report = "; ".join(each["report"])
        for words in (f"24 of {SAMPLES} samples", "4 in a batch where it was 12", "ranks 1, 2 have random numbers"):
            assert words in report
    drawn = [tuple(each["drawn"]) for each in rest]
    assert len(set(drawn)) == 3 and not set(first[0]["drawn"]) & {number for each in drawn for number in each}
