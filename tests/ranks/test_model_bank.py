"""A bank on two gloo ranks: rank 0 chooses, both load the same at the same boundary, and resume to the same bits."""

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine.checkpointing import CheckpointStore, LoadSource
from ignite_engine.checkpointing.load_sources import Found
from ignite_engine.handlers import ModelBank
from ignite_engine.ranks import agreement
from ignite_engine.states import loading
from tests.handlers.test_model_bank import HEAD, at_iteration, loads_of, publish, run_of
from tests.kit.sharded import net, trainer_in, whole_digests
from tests.kit.tiny import linear, numbers_loader, on_two_ranks, weights

pytestmark = [pytest.mark.distributed, pytest.mark.faults]


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.refused = []

    def emit(self, record):
        if "is refused" in record.getMessage():
            self.refused.append(record.getMessage().split(": ", 1)[1])


def trained(folder, source, rank, *, ddp=True, stop_at=None, torn=False):
    """What comes is there once: at iteration 4, and where ``torn`` what is damaged at 7 and another at 10."""
    lines = Lines()
    logging.getLogger("ignite_engine").addHandler(lines)
    model = linear(dropout=True)
    wrapped = nn.parallel.DistributedDataParallel(model) if ddp else model
    sources = [LoadSource(source, **HEAD, required=False, dynamic=True)]
    trainer, bank, checkpoint = run_of(folder, sources, model=wrapped)
    if checkpoint.resume() is None:
        bank.load()
    missing = agreement.on_rank_0(lambda: not Path(source).exists())

    def tear():
        path = publish(Path(source), 40, 0.7) / "shared.pt"  # a collective
        if rank == 0:
            path.write_bytes(path.read_bytes()[:100])

    if missing:
        at_iteration(trainer, 4, lambda: publish(Path(source), 30, 0.5))
    if missing and torn:
        at_iteration(trainer, 7, tear)
        at_iteration(trainer, 10, lambda: publish(Path(source), 50, 0.75))
    if stop_at is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), lambda: trainer.request_stop("here"))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), trainer.vote_at_next_boundary)
    loads = loads_of(trainer, bank)
    trainer.run(numbers_loader(24), max_iters=15)
    logging.getLogger("ignite_engine").removeHandler(lines)
    return [str(loads), weights(trainer).tolist(), lines.refused, trainer.reproducibility()]


def cases(folder, rank):
    answers = {}
    for ddp in (False, True):
        answers[f"torn, ddp {ddp}"] = trained(folder / f"a{ddp}", folder / f"source_a{ddp}", rank, ddp=ddp, torn=True)
    answers["whole"] = trained(folder / "b", folder / "source_b", rank)
    trained(folder / "c", folder / "source_c", rank, stop_at=8)
    answers["resumed"] = trained(folder / "c", folder / "source_c", rank)
    for layout in ("ddp", "fsdp"):
        answers[layout] = sharded(folder / layout, layout)
    # a path that leads somewhere else on rank 1, as a mount that it lacks would
    own = folder / f"view_{rank}"
    own.mkdir()
    os.chdir(own)
    answers["rank 1 cannot read"] = trained(folder / "d", "source_d", rank)
    return answers


def sharded(folder, layout):
    """A bank in a layout; its source is trained on in FSDP2. What is equal to the source's before iteration 5."""
    other, _, data = trainer_in("fsdp", folder / "teacher")
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    trainer, _, own_data = trainer_in(layout, folder / "student", model=model)
    wanted = LoadSource(folder / "teacher", ["model:0.*", "optimizer:0.*"], required=False, dynamic=True)
    bank = ModelBank([wanted], reset_optimizers=True)
    bank.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    at_iteration(trainer, 3, lambda: other.run(data, max_epochs=1))
    found = []

    @trainer.on(Events.ITERATION_STARTED(once=5))
    def compare():
        its, now = whole_digests(other), whole_digests(trainer)
        found.extend(sorted(name for name in now if not name.startswith("ema") and now[name] == its[name]))

    trainer.run(own_data, max_epochs=2)
    # the source prunes what was found before it is loaded
    before, path = whole_digests(trainer), folder / "teacher" / "iteration_00000004"
    read = loading.read_found(trainer.registry, Found.of(path))
    agreement.wait_for_all()
    agreement.on_rank_0(lambda: shutil.rmtree(path))
    pruned = loading.load_again(trainer.registry, wanted, read)
    unchanged = layout == "ddp" or (isinstance(pruned, str) and before == whole_digests(trainer))
    return found, bank.loaded[0]["at_iteration"], unchanged, before


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("banks")
    return folder, on_two_ranks(lambda rank: cases(folder, rank), folder / "store")


def loaded(*newer):
    """What ``loads_of`` sees where these iterations of the source are loaded at those of the run."""
    return str([(1, {}), *((at + 1, {0: (f"iteration_000000{iteration}", at)}) for iteration, at in newer)])


@pytest.mark.slow
@pytest.mark.parametrize("ddp", [False, True])
def test_both_ranks_load_a_newer_one_at_the_same_boundary_and_refuse_a_torn_one(two_ranks, ddp):
    first, second = two_ranks[1][f"torn, ddp {ddp}"]
    assert first[0] == second[0] == loaded((30, 6), (50, 12))
    if ddp:
        assert first[1] == second[1]
    source = two_ranks[0] / f"source_a{ddp}" / "iteration_00000040"
    assert len(first[2]) == 1 and first[2][0].startswith(f"{source}: shared.pt has 100 bytes") and second[2] == []
    assert any("when that comes is outside of the run" in each for each in first[3])


def test_a_stopped_run_is_resumed_to_the_same_bits(two_ranks):
    answers = two_ranks[1]
    for whole, resumed in zip(answers["whole"], answers["resumed"], strict=True):
        assert whole[0] == loaded((30, 6)) and resumed[0] == loaded((30, 6)).replace("(1, {}), (7", "(9")
        assert whole[1] == resumed[1]


def test_what_one_rank_cannot_read_is_loaded_on_none(two_ranks):
    first, second = two_ranks[1]["rank 1 cannot read"]
    assert first[0] == second[0] == loaded() and first[1] == second[1]
    assert len(first[2]) == 1 and "source_d/iteration_00000030 has no manifest.json" in first[2][0]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_sharded_weights_and_moments_are_loaded_again(two_ranks, layout):
    first, second = two_ranks[1][layout]
    names = [f"optimizer.state.0.{each}.{key}" for each in ("bias", "weight") for key in ("exp_avg", "exp_avg_sq")]
    loaded = {"model.0.weight", "model.0.bias", *names}
    assert first == second and loaded <= set(first[0]) and first[1] == 4 and first[2]
    assert not any(name in first[0] for name in ("model.2.weight", "optimizer.state.2.weight.exp_avg"))


def test_a_newer_one_is_saved_at_its_boundary(two_ranks):
    saved = CheckpointStore(two_ranks[0] / "aTrue").checkpoints()
    assert [each.iteration for each in saved] == [6, 12, 15]
