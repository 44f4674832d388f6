"""Ranks save and load one checkpoint together: all succeed, or all raise the same error; one that is killed ends it."""

import contextlib
import errno
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoint.made_states import (
    CheckpointStore,
    LoadSource,
    attached,
    file_of,
    forge,
    iterations,
    left_over,
    local_parts,
    manifest_of,
    newest,
    shared_parts,
)
from tests.kit import saved
from tests.kit.faults import FileOperations, kill_this_process
from tests.kit.processes import ranks, start_ranks
from tests.kit.tiny import linear, numbers_loader, one, trainer_of, weights


def outcome(work):
    """What a call gives, or its error as type and text."""
    try:
        return work()
    except BaseException as error:
        return type(error).__name__, str(error)


def save(store, iteration, rank, **options):
    # rank 1's shared parts must not matter: they differ
    shared = shared_parts(iteration + rank)
    return store.save(shared, local_parts(iteration, rank), iteration=iteration, epoch=1, **options).name


def good_save(rank, folder):
    told = {"reproducibility": ["both", f"rank {rank}"], "metrics": {"loss": float(rank)}}
    return save(CheckpointStore(folder), 100, rank, **told)


@pytest.mark.row("D4")
def test_each_rank_gets_its_own_part_and_rank_0s_shared_parts(tmp_path):
    assert ranks(2, good_save, tmp_path) == ["iteration_00000100"] * 2
    path = tmp_path / "iteration_00000100"
    for rank in range(2):
        loaded = CheckpointStore(tmp_path).load(path, rank)
        assert torch.equal(loaded.local["rng"]["torch"], local_parts(100, rank)["rng"]["torch"])
        assert torch.equal(loaded.shared["model"]["weight"], shared_parts(100)["model"]["weight"])
    manifest = manifest_of(path)
    expected = {"reproducibility": ["both", "rank 0", "rank 1"], "metrics": {"loss": 0.0}, "world_size": 2}
    assert (expected | {"healthy": True}).items() <= manifest.items() and len(manifest["files"]) == 3
    ranks(2, unhealthy_save, tmp_path)
    assert manifest_of(tmp_path / "iteration_00000200")["healthy"] is False and newest(tmp_path) == 200


def unhealthy_save(rank, folder):
    """Rank 1's weights are broken; a group of its own."""
    return save(CheckpointStore(folder, dist.new_group(backend="gloo")), 200, rank, healthy=rank == 0)


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "I/O error")
# the rank on which it happens, where, and what
FAULTS = {
    "full on rank 1": (1, ("write", "/rank_1."), NO_SPACE),
    "full on rank 0": (0, ("write", "/shared."), NO_SPACE),
    "fsync fails on rank 1": (1, ("fsync", "/rank_1."), BROKEN),
    "mkdir fails on rank 0": (0, ("mkdir", ""), BROKEN),
    "rename fails on rank 0": (0, ("rename", "iteration_"), BROKEN),
    "interrupt on rank 1": (1, ("open", "/rank_1."), KeyboardInterrupt("now")),
}


def failing_save(rank, folder, on, at, error):
    """What comes out here, how often it failed here, and what is left."""

    def fail():
        raise error

    store = CheckpointStore(folder)
    save(store, 100, rank)
    with FileOperations(folder, at=at if rank == on else None, action=fail) as operations:
        found = outcome(lambda: save(store, 200, rank))
    dist.barrier()
    left = iterations(folder), left_over(folder)
    dist.barrier()
    return found, operations.acted, left, outcome(lambda: save(store, 300, rank))


@pytest.mark.row("D4")
@pytest.mark.parametrize(("on", "at", "error"), FAULTS.values(), ids=list(FAULTS))
def test_a_fault_on_one_rank_is_the_same_error_on_both_and_leaves_nothing(tmp_path, on, at, error):
    answers = ranks(2, failing_save, tmp_path, on, at, error)
    (first, *_), (second, *_) = answers
    assert [acted for _, acted, *_ in answers] == [int(rank == on) for rank in range(2)]
    if isinstance(error, KeyboardInterrupt):  # it stays one where it was, and the peer does not wait for ever
        assert second == ("KeyboardInterrupt", "now") and first[0] == "CheckpointError" and "rank 1" in first[1]
    else:
        assert first == second
        kind, message = first
        assert kind == "CheckpointError" and f"rank {on}: {error.strerror}" in message and "\n" not in message
    assert [(left, after) for *_, left, after in answers] == [(([100], []), "iteration_00000300")] * 2


def disagreements(rank, folder):
    store = CheckpointStore(folder)
    found = [
        outcome(lambda: store.save({}, {"own": Path("x") if rank else 1}, iteration=200, epoch=1)),
        outcome(lambda: save(store, 200 + rank, rank)),
        outcome(lambda: store.add_metrics(folder / "iteration_00000999", {"a": 1})),
    ]
    save(store, 400, rank)
    found.append(outcome(lambda: store.add_metrics(folder / "iteration_00000400", {"a": 1}).metrics["a"]))
    if rank == 0:
        (folder / ".trash-iteration_00000001-00000000").mkdir()
    dist.barrier()
    return [*found, [each.name for each in store.sweep()]]


def test_what_the_ranks_disagree_about_is_refused_on_both_and_the_rest_done_on_both(tmp_path):
    first, second = ranks(2, disagreements, tmp_path)
    assert (
        first[1][0] == second[1][0] == "CheckpointError" and "[200, 201]" in second[1][1]
    )  # each of its own iteration
    assert [*first[:1], *first[2:]] == [*second[:1], *second[2:]]
    not_plain, differ, not_there, metric, swept = first
    assert "rank 1: own is a" in not_plain[1] and "[200, 201]" in differ[1]
    assert not_there[0] == "CheckpointError" and "iteration_00000999" in not_there[1]
    assert (metric, swept) == (1.0, [".trash-iteration_00000001-00000000"])


# -- sharded: a rank is killed -----------------------------------------------------------------------------------------


def sharded_save(store, iteration, rank):
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.full((5, 3), float(iteration)), mesh, [Shard(0)])
    return store.save({"model": {"weight": weight}}, {"rng": {"own": rank}}, iteration=iteration, epoch=1)


def killed_save(rank, folder, victim, at):
    store = CheckpointStore(folder)
    sharded_save(store, 100, rank)
    dist.barrier()
    kills = FileOperations(folder, at=at, action=kill_this_process) if rank == victim else contextlib.nullcontext()
    with kills:
        return outcome(lambda: str(sharded_save(store, 200, rank)))


POINTS = [
    (0, ("write", "/rank_0.")),
    (1, ("open", "/rank_1.")),
    (1, ("fsync", "/rank_1.")),
    (0, ("fsync", "/manifest.json")),
    (0, ("rename", "iteration_00000200")),
]


@pytest.mark.row("D4")
@pytest.mark.parametrize(("victim", "at"), POINTS)
def test_a_rank_that_is_killed_in_a_save_leaves_the_newest_whole_one(tmp_path, victim, at):
    world = start_ranks(2, killed_save, tmp_path / "run", victim, at)
    assert world[victim].wait() == -signal.SIGKILL
    assert world[1 - victim].answer()[0] != "saved"
    store = CheckpointStore(tmp_path / "run")
    found, skipped = store.latest()
    assert found.iteration == 100 and skipped == []
    assert torch.equal(store.load(found.path).shared["model"]["weight"], torch.full((5, 3), 100.0))
    store.sweep()
    assert left_over(tmp_path / "run") == []


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of one process: ``own`` of four iterations, ``source`` of seven; ``empty`` is one that is to begin."""
    folder = tmp_path_factory.mktemp("runs")
    for name, last in (("own", 4), ("source", 7)):
        attached(folder / name, trainer=trainer_of())[0].run(numbers_loader(), max_iters=last)
    return folder


def start_of(rank, own, source):
    """How a run begins where each rank sees folders of its own, and with which weights."""
    model = linear()
    nn.init.zeros_(model[0].weight)
    trainer, checkpoint = attached(own[rank], model)
    resumed = checkpoint.resume()
    if resumed is not None:
        return "restart", resumed.name, trainer.state.iteration, weights(trainer)
    report = checkpoint.load(source[rank])
    return "fine-tune", Path(report.source).name, trainer.state.iteration, weights(trainer)


@pytest.mark.row("D9")
@pytest.mark.parametrize(
    ("own", "source", "begins"),
    [
        (("own", "empty"), ("source", "source"), ("restart", "iteration_00000004", 4)),
        (("empty", "own"), ("source", "own"), ("fine-tune", "iteration_00000007", 0)),
    ],
)
def test_rank_0_decides_whether_a_run_restarts_or_begins_with_another_ones_weights(folder, own, source, begins):
    """What a rank sees on a file system that lags must not count."""
    first, second = ranks(2, start_of, [folder / name for name in own], [folder / name for name in source])
    assert first[:3] == second[:3] == begins and torch.equal(first[3], second[3])
    path = folder / ("own" if begins[0] == "restart" else "source")
    assert torch.equal(first[3], torch.cat([each.reshape(-1) for each in saved.parts(path)["model"].values()]))


def several_from(rank, folder):
    """Rank 1 sees an optional source that rank 0 does not, and one of another run in the place of rank 0's."""
    trainer, checkpoint = attached(folder / "empty", nn.parallel.DistributedDataParallel(linear()))
    checkpoint.load(
        [
            LoadSource(folder / ("own" if rank == 0 else "source")),
            LoadSource(folder / ("nowhere" if rank == 0 else "own"), required=False),
            LoadSource(folder / "source", parts=["model:2.*"]),
        ]
    )
    return weights(trainer)


def test_rank_0_chooses_each_of_several_sources(folder):
    found = ranks(2, several_from, folder)
    own, source = (saved.parts(folder / name)["model"] for name in ("own", "source"))
    expected = [(source if name.startswith("2.") else own)[name].reshape(-1) for name in own]
    assert all(torch.equal(each, torch.cat(expected)) for each in found)


def refused_load(rank, folder, case):
    features = 5 if case == "another model" and rank == 1 else 3
    model = linear(features=features)
    before = one(model).clone()
    _, checkpoint = attached(folder / "empty", model)
    path = folder / ("nowhere" if case == "no source" and rank == 0 else "source")
    return outcome(lambda: checkpoint.load(path)), torch.equal(one(model), before)


@pytest.mark.parametrize(
    ("case", "words"),
    [("another model", "StateMismatch 0.weight (4, 3) (4, 5)"), ("no source", "NothingThere nowhere")],
)
def test_an_error_of_one_rank_is_raised_on_both_and_nothing_is_loaded(folder, case, words):
    (first, unchanged), (second, too) = ranks(2, refused_load, folder, case)
    assert first == second and unchanged and too
    assert all(word in " ".join(first) for word in words.split())


def resumed_where_a_file_is_gone(rank, folder):
    trainer, checkpoint = attached(folder)
    return outcome(checkpoint.resume), trainer.state.iteration


def test_a_run_that_one_rank_cannot_resume_is_resumed_on_none(tmp_path):
    """The state of rank 1 is not in its file: rank 0, which chooses, has what it needs."""
    attached(tmp_path)[0].run(numbers_loader(), max_iters=2)
    path = tmp_path / "iteration_00000002"
    files = manifest_of(path)["files"]
    forge(
        path,
        files={**files, "rank_1.safetensors": {"bytes": 3, "hash": next(iter(files.values()))["hash"]}},
        world_size=2,
    )
    assert file_of(path, "rank_0").exists()
    first, second = ranks(2, resumed_where_a_file_is_gone, tmp_path)
    assert first == second and first[0][0] == "CheckpointError" and first[1] == 0
