"""Fresh, restart or fine-tune: rank 0 decides, and an error of one rank is the same error on both."""

import pytest
from torch import nn

from ignite_engine.checkpointing import CheckpointError, LoadSource
from ignite_engine.handlers import Checkpoint
from tests.kit.tiny import linear, numbers_loader, on_two_ranks, one, trainer_of, weights

pytestmark = [pytest.mark.distributed, pytest.mark.faults]


def attached(directory, model=None):
    trainer, checkpoint = trainer_of(model), Checkpoint(directory)
    checkpoint.attach(trainer)
    return trainer, checkpoint


def start_of(directory, source):
    """How a run begins here, and with which weights."""
    model = linear()
    nn.init.zeros_(model[0].weight)
    trainer, checkpoint = attached(directory, model)
    resumed = checkpoint.resume()
    if resumed is not None:
        return ["restart", str(resumed), trainer.state.iteration, weights(trainer).sum().item()]
    table = checkpoint.load(source)
    return ["fine-tune", table.source, trainer.state.iteration, weights(trainer).sum().item()]


def several_from(folder, rank):
    """Rank 1 sees an optional source that rank 0 does not, and one of another run in the place of rank 0's."""
    trainer, checkpoint = attached(folder / "empty", nn.parallel.DistributedDataParallel(linear()))
    sources = [
        LoadSource(folder / ("own" if rank == 0 else "source")),
        LoadSource(folder / ("nowhere" if rank == 0 else "own"), required=False),
        LoadSource(folder / "source", parts=["model:2.*"]),
    ]
    table = checkpoint.load(sources)
    saved = [
        checkpoint.store.load(folder / name).shared["model"]
        for name in ("own/iteration_00000004", "source/iteration_00000007")
    ]
    state = trainer.registry.objects["model"].state_dict()
    right = all(bool((value == saved[name.startswith("2.")][name]).all()) for name, value in state.items())
    return [sorted(table.loaded), right, weights(trainer).sum().item()]


def error_of(work):
    try:
        work()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["no error", ""]


def cases(folder, rank):
    own, empty, source = folder / "own", folder / "empty", folder / "source"
    answers = {}
    # what a rank sees on a file system that lags must not count
    answers["rank 1 sees nothing"] = start_of(own if rank == 0 else empty, source)
    answers["rank 0 sees nothing"] = start_of(empty if rank == 0 else own, source if rank == 0 else own)
    answers["several"] = several_from(folder, rank)
    other = linear(features=3 if rank == 0 else 5)
    before = one(other).clone()
    _, checkpoint = attached(empty, other)
    answers["another model on rank 1"] = error_of(lambda: checkpoint.load(source))
    answers["nothing was loaded"] = bool((one(other) == before).all())
    _, checkpoint = attached(empty)
    nowhere = folder / "nowhere"
    answers["rank 0 has no source"] = error_of(lambda: checkpoint.load(nowhere if rank == 0 else source))
    _, checkpoint = attached(own)
    if rank == 1:
        checkpoint.store.load = _unreadable
    answers["rank 1 cannot read"] = error_of(checkpoint.resume)
    _, checkpoint = attached(own)
    if rank == 0:
        checkpoint.store.latest = _unreadable
    answers["rank 0 cannot look"] = error_of(checkpoint.resume)
    return answers


def _unreadable(*_, **__):
    raise CheckpointError("the disk is away")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, iterations in (("own", 4), ("source", 7)):
        trainer, _ = attached(folder / name)
        trainer.run(numbers_loader(), max_iters=iterations)

    return folder, on_two_ranks(lambda rank: cases(folder, rank), folder / "store")


@pytest.mark.row("D9")
def test_rank_0_decides_whether_a_run_restarts_or_begins_with_another_ones_weights(
    two_ranks,
):
    folder, answers = two_ranks
    first, second = answers["rank 1 sees nothing"]
    assert first == second
    assert first[:3] == ["restart", str(folder / "own" / "iteration_00000004"), 4]
    first, second = answers["rank 0 sees nothing"]
    assert first == second
    assert first[:3] == ["fine-tune", str(folder / "source" / "iteration_00000007"), 0]


def test_rank_0_chooses_each_of_several_sources(two_ranks):
    first, second = two_ranks[1]["several"]
    assert first == second and first[1]
    assert first[0] == ["model:0.bias", "model:0.weight", "model:2.bias", "model:2.weight"]


def test_an_error_of_one_rank_is_raised_on_both_and_nothing_is_loaded(
    two_ranks,
):
    _, answers = two_ranks
    first, second = answers["another model on rank 1"]
    assert first == second
    assert first[0] == "StateMismatch" and "0.weight (saved (4, 3), here (4, 5))" in first[1]
    assert answers["nothing was loaded"] == [True, True]
    first, second = answers["rank 0 has no source"]
    assert first == second and first[0] == "CheckpointError" and "nowhere does not exist" in first[1]


@pytest.mark.parametrize("case", ["rank 1 cannot read", "rank 0 cannot look"])
def test_a_run_that_one_rank_cannot_resume_is_resumed_on_none(two_ranks, case):
    _, answers = two_ranks
    assert answers[case] == [["CheckpointError", "the disk is away"]] * 2
