"""Two ranks save one checkpoint: both succeed, or both raise the same error."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ignite_engine.checkpointing import CheckpointError, CheckpointStore
from tests.checkpointing.states import left_over, local_parts, shared_parts
from tests.kit.faults import FileOperations
from tests.kit.tiny import on_two_ranks

Answers = dict[str, list[Any]]


def attempt(work):
    """What a call gives, or its error as type and text."""
    try:
        return work()
    except BaseException as error:
        return [type(error).__name__, str(error)]


def save(store, iteration, rank, **options):
    # rank 1's shared parts must not matter: they differ
    shared = shared_parts(iteration + rank)
    path = store.save(shared, local_parts(iteration, rank), iteration=iteration, epoch=1, **options)
    return path.name


def failing(store, rank, on, at, error):
    """Save while one rank fails at a file operation: what came out of it here, and how often it failed here."""

    def fail():
        raise error

    with FileOperations(store.directory, at=at if rank == on else None, action=fail) as operations:
        outcome = attempt(lambda: save(store, 200, rank))
    return [outcome, operations.acted]


def cases(directory, rank):
    answers = {}
    store = CheckpointStore(directory)
    answers["happy"] = attempt(
        lambda: save(store, 100, rank, reproducibility=["both", f"rank {rank}"], metrics={"loss": float(rank)})
    )
    loaded = store.load(directory / "iteration_00000100", rank)
    answers["own part"] = torch.equal(loaded.local["rng"]["torch"], local_parts(100, rank)["rng"]["torch"])
    answers["shared part"] = torch.equal(loaded.shared["model"]["weight"], shared_parts(100)["model"]["weight"])
    full = OSError(errno.ENOSPC, "No space left on device")
    broken = OSError(errno.EIO, "I/O error")
    answers["full on rank 1"] = failing(store, rank, 1, ("write", "/rank_1.pt"), full)
    answers["full on rank 0"] = failing(store, rank, 0, ("write", "/shared.pt"), full)
    answers["fsync fails on rank 1"] = failing(store, rank, 1, ("fsync", "/rank_1.pt"), broken)
    answers["mkdir fails on rank 0"] = failing(store, rank, 0, ("mkdir", ""), broken)
    answers["rename fails on rank 0"] = failing(store, rank, 0, ("rename", "> iteration_00000200"), broken)
    answers["interrupt on rank 1"] = failing(store, rank, 1, ("open", "/rank_1.pt"), KeyboardInterrupt("now"))
    answers["not plain data on rank 1"] = attempt(
        lambda: store.save({}, {"own": Path("x") if rank else 1}, iteration=200, epoch=1)
    )
    answers["different iterations"] = attempt(lambda: save(store, 200 + rank, rank))
    answers["after the failures"] = [sorted(each.name for each in directory.iterdir()), left_over(directory)]
    dist.barrier()
    answers["next save"] = attempt(lambda: save(store, 300, rank, healthy=rank == 0))
    answers["manifests"] = [
        [each.manifest.reproducibility, each.manifest.metrics, each.manifest.healthy] for each in store.checkpoints()
    ]
    dist.barrier()
    answers["next healthy save"] = attempt(lambda: save(store, 400, rank))
    answers["annotated"] = attempt(lambda: store.annotate(directory / "iteration_00000400", labels=["a"]).labels)
    answers["not annotated"] = attempt(lambda: store.annotate(directory / "iteration_00000999", labels=["a"]))
    (directory / ".trash-iteration_00000001-00000000").mkdir(exist_ok=True)
    dist.barrier()
    answers["swept"] = attempt(lambda: [each.name for each in store.sweep()])
    answers["with a group"] = attempt(
        lambda: save(CheckpointStore(directory, dist.new_group(backend="gloo")), 500, rank)
    )
    return answers


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")
    meeting_point = tmp_path_factory.mktemp("meeting") / "file"

    return directory, on_two_ranks(lambda rank: cases(directory, rank), meeting_point)


pytestmark = [pytest.mark.distributed, pytest.mark.faults]


@pytest.mark.row("D4")
def test_each_rank_gets_its_own_part_and_rank_0s_shared_parts(two_ranks):
    _, answers = two_ranks
    assert answers["happy"] == ["iteration_00000100"] * 2
    assert answers["own part"] == answers["shared part"] == [True, True]


@pytest.mark.row("D4")
@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("full on rank 1", "rank 1: No space left on device ("),
        ("full on rank 0", "rank 0: No space left on device ("),
        ("fsync fails on rank 1", "rank 1: I/O error ("),
        ("mkdir fails on rank 0", "rank 0: I/O error"),
        ("rename fails on rank 0", "rank 0: I/O error"),
    ],
)
def test_a_fault_on_one_rank_is_the_same_error_on_both(two_ranks, case, cause):
    _, answers = two_ranks
    (first, first_faults), (second, second_faults) = answers[case]
    assert [first_faults, second_faults] == ([1, 0] if "rank 0" in case else [0, 1])  # it happened, and where it should
    assert first == second
    kind, message = first
    assert kind == "CheckpointError" and cause in message and "\n" not in message


def test_an_interrupt_on_one_rank_stays_one_and_the_peer_does_not_hang(two_ranks):
    _, answers = two_ranks
    (first, _), (second, faults) = answers["interrupt on rank 1"]
    assert faults == 1 and second == ["KeyboardInterrupt", "now"]
    assert first[0] == "CheckpointError" and "rank 1: KeyboardInterrupt: now" in first[1]


def test_what_the_ranks_disagree_about_is_refused_on_both(two_ranks):
    _, answers = two_ranks
    first, second = answers["not plain data on rank 1"]
    assert first == second and "rank 1: own is a pathlib.PosixPath" in first[1]
    first, second = answers["different iterations"]
    assert first[0] == second[0] == "CheckpointError"
    assert "the ranks are at different iterations: [200, 201]" in first[1] and "[200, 201]" in second[1]


def test_failed_saves_leave_nothing_and_the_next_one_works(two_ranks):
    _, answers = two_ranks
    assert answers["after the failures"][0] == [["iteration_00000100"], []]
    assert answers["next save"] == ["iteration_00000300"] * 2
    assert answers["next healthy save"] == ["iteration_00000400"] * 2


def test_annotating_and_sweeping_give_the_same_on_both(two_ranks):
    directory, answers = two_ranks
    assert answers["annotated"] == [["a"], ["a"]]
    assert answers["not annotated"][0] == answers["not annotated"][1]
    assert "has no manifest.json" in answers["not annotated"][0][1]
    assert answers["swept"] == [[".trash-iteration_00000001-00000000"]] * 2
    assert answers["with a group"] == ["iteration_00000500"] * 2
    newest = {"iteration_00000400", "iteration_00000500"}
    assert newest < {each.name for each in directory.iterdir()}


def test_the_manifest_joins_what_the_ranks_say(two_ranks):
    directory, answers = two_ranks
    for manifests in answers["manifests"]:
        assert manifests == [[["both", "rank 0", "rank 1"], {"loss": 0.0}, True], [[], {}, False]]
    store = CheckpointStore(directory)
    manifest = store.checkpoints()[-1].manifest
    assert manifest.world_size == 2 and set(manifest.files) == {"shared.pt", "rank_0.pt", "rank_1.pt"}
    assert store.verify(directory / "iteration_00000500") == []
    with pytest.raises(CheckpointError, match=r"rank_1\.pt cannot be read: No such file"):
        (directory / "iteration_00000500" / "rank_1.pt").unlink()
        store.load(directory / "iteration_00000500", rank=1)


def test_one_rank_of_any_backend_needs_no_group(tmp_path, monkeypatch):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
        assert save(CheckpointStore(tmp_path / "checkpoints"), 1, 0) == "iteration_00000001"
    finally:
        dist.destroy_process_group()
