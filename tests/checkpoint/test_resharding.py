"""A run that is sharded one way is resumed in any other, on any number of ranks."""

import re
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ignite_engine import Task
from ignite_engine.cli import main
from ignite_engine.errors import CheckpointError
from ignite_engine.runs.load_model import load_model
from tests.checkpoint.made_states import CheckpointStore, file_of
from tests.kit.faults import DAMAGES, can_mount, mount_small_file_system
from tests.kit.processes import ranks, start_ranks
from tests.kit.refusals import refuses
from tests.kit.sharded import digest, gathered, in_layout, net, train, trainer_in, whole_digests
from tests.kit.tiny import Numbers, mse

NIGHTLY = pytest.mark.nightly
# ranks, layout, and what else is special
SAVED = {
    "fsdp": (2, "fsdp", {}),
    "background": (2, "fsdp", {"background": True}),
    "sgd": (2, "fsdp", {"optimizer": "sgd"}),
    "adagrad": (2, "fsdp", {"optimizer": "adagrad"}),
    "ddp": (2, "ddp", {}),
    "plain": (1, "plain", {}),
    "hsdp": (4, "hsdp", {}),
    "tp": (2, "tp", {}),
    "tp+fsdp": (4, "tp+fsdp", {}),
}
OTHER = [
    ("fsdp", 1, "fsdp"),
    ("fsdp", 1, "plain"),
    ("fsdp", 2, "ddp"),
    ("fsdp", 3, "fsdp"),
    ("fsdp", 4, "fsdp"),
    ("sgd", 3, "fsdp"),
    ("adagrad", 1, "plain"),
    ("ddp", 2, "fsdp"),
    ("ddp", 4, "hsdp"),
    ("plain", 2, "fsdp"),
    ("plain", 2, "tp"),
    ("hsdp", 2, "fsdp"),
    ("tp", 1, "plain"),
    ("tp+fsdp", 3, "fsdp"),
    ("tp+fsdp", 2, "tp"),
    ("tp+fsdp", 1, "plain"),
]
QUICK = {"fsdp", "plain", "tp"}


def tiered(cases):
    """Those on one or two ranks alone are for every day."""
    quick = [name in QUICK and count <= 2 for name, count, *_ in cases]
    ids = [" ".join(map(str, case)) for case in cases]
    return [
        pytest.param(*case, marks=[] if is_quick else NIGHTLY, id=name)
        for case, is_quick, name in zip(cases, quick, ids, strict=True)
    ]


def uninterrupted(rank, folder, layout, options):
    trainer, _, data = trainer_in(layout, folder, config={}, **options)
    return train(trainer, data)


def copied(source, folder, iteration=2):
    """The checkpoint of an iteration alone, in another folder."""
    shutil.copytree(source / f"iteration_{iteration:08d}", folder / f"iteration_{iteration:08d}")
    return folder


def resumed(rank, folder, layout, options):
    """From the checkpoint of iteration 2, in the middle of an epoch."""
    trainer, checkpoint, data = trainer_in(layout, folder, **options)
    assert checkpoint.resume() == folder / "iteration_00000002"
    return train(trainer, data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to, by its name: its folder, and what each of its ranks found."""
    folder, found = tmp_path_factory.mktemp("runs"), {}

    def run(name):
        if name not in found:
            count, layout, options = SAVED[name]
            found[name] = ranks(count, uninterrupted, folder / name, layout, options)
        return folder / name, found[name]

    return run


@pytest.mark.parametrize(("name", "count", "layout"), tiered([(name, *SAVED[name][:2]) for name in SAVED]))
def test_on_the_same_ranks_and_layout_it_ends_with_the_same_bits(whole, tmp_path, name, count, layout):
    folder, expected = whole(name)
    for before, again in zip(
        expected, ranks(count, resumed, copied(folder, tmp_path), layout, SAVED[name][2]), strict=True
    ):
        assert again["losses"] == {iteration: before["losses"][iteration] for iteration in range(3, 9)}
        assert again["state"] == before["state"] and len(before["state"]) > 20
        assert again["report"] == before["report"] == []


@pytest.mark.parametrize(("name", "count", "layout"), tiered(OTHER))
def test_on_other_ranks_or_another_layout_it_has_the_same_losses(whole, tmp_path, name, count, layout):
    folder, (before, *_) = whole(name)
    for again in ranks(count, resumed, copied(folder, tmp_path), layout, SAVED[name][2]):
        assert list(again["losses"]) == list(range(3, 9))
        assert again["losses"] == pytest.approx({at: before["losses"][at] for at in again["losses"]}, abs=1e-6)
        assert set(again["state"]) == set(before["state"])
        reason = again["report"][0]
        assert reason.startswith("resumed from iteration_00000002, not bit for bit (")
        assert ("ranks: " in reason) == (count != SAVED[name][0])
        assert ("sharding: " in reason) == (name not in ("ddp", "plain") or layout not in ("ddp", "plain"))


PIECES = {"plain": 0, "fsdp": 2, "tp": 2, "hsdp": 2, "tp+fsdp": 4}


@pytest.mark.parametrize(("name", "count"), tiered(list(PIECES.items())))
def test_each_piece_is_written_once(whole, name, count):
    """Of replicas (HSDP), and of what tensor parallel ranks do not split, one rank's."""
    checkpoint = whole(name)[0] / "iteration_00000002"
    with_pieces = [file for file in checkpoint.glob("rank_*") if any("pieces" in key for key in load_file(file))]
    assert sorted(file.stem for file in with_pieces) == [f"rank_{rank}" for rank in range(count)]


def of_part(part, answer):
    """The digests of a part's tensors by name."""
    prefix = {"model": "model.", "ema": "ema.weights."}[part]
    found = answer["state"].items()
    return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}


def fine_tuned(rank, source, folder, layout):
    """Begins with the average of another run."""
    trainer, checkpoint, _ = trainer_in(layout, folder)
    report = checkpoint.load(source, weights="ema")
    return {"state": whole_digests(trainer), "complete": report.complete}


@pytest.mark.parametrize("layout", ["tp", "fsdp"])
def test_a_run_begins_with_the_average_of_a_sharded_one(whole, tmp_path, layout):
    folder, (before, _) = whole("fsdp")
    for answer in ranks(2, fine_tuned, folder / "iteration_00000008", tmp_path, layout):
        assert answer["complete"] and of_part("model", answer) == of_part("ema", before)


@pytest.mark.parametrize("name", ["fsdp", pytest.param("tp+fsdp", marks=NIGHTLY)])
def test_who_only_looks_sees_whole_tensors(whole, tmp_path, name, capsys):
    """The command line, ``load_model`` and the store."""
    folder, (before, *_) = whole(name)
    last = folder / "iteration_00000008"
    for action in ("verify", "list"):
        assert main(["checkpoints", action, str(folder)]) == 0
    for weights, part in (("raw", "model"), ("ema", "ema")):
        for file in (tmp_path / "weights.safetensors", tmp_path / "weights.pt"):
            assert main(["checkpoints", "export", str(last), "-o", str(file), "--weights", weights]) == 0
            read = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
            assert {key: digest(value) for key, value in read.items()} == of_part(part, before)
    loaded = CheckpointStore(folder).load(last).shared["model"]
    assert {key: digest(value) for key, value in loaded.items()} == of_part("model", before)
    model = load_model(folder, task=lambda options: Task(net(), mse, Numbers(4)))
    assert {key: digest(value) for key, value in model.state_dict().items()} == of_part("model", before)

    assert main(["checkpoints", "diff", str(last), str(last)]) == 0
    capsys.readouterr()
    assert main(["checkpoints", "diff", str(last), str(folder / "iteration_00000006")]) == 1
    assert re.search(r"model +0 equal; 8 differ", capsys.readouterr().out)


class Kept:
    """An object of a user's own, not the same on all ranks, that holds a sharded tensor and a plain one."""

    def __init__(self, layout):
        self.weight = next(in_layout(layout)[0].parameters()).detach().clone()
        self.own = torch.full((3,), float(dist.get_rank()))

    def state_dict(self):
        return {"weight": self.weight, "own": self.own}

    def load_state_dict(self, state):
        self.weight.copy_(state["weight"])
        self.own = state["own"]


def with_an_object(rank, folder, layout, resume):
    """It is saved without the first layer, which stays as it was built, and with the object."""
    model = net()
    with torch.no_grad():
        model[0].bias.fill_(1.0 + resume)
    trainer, checkpoint, data = trainer_in(layout, folder, model=model, exclude=["model:0.*"])
    trainer.register("kept", kept := Kept(layout))
    kept.weight.mul_(0 if resume else 2)
    if resume:
        checkpoint.resume()
    else:
        trainer.run(data, max_iters=2)
    bias = gathered(model[0].bias.detach())
    return {"kept": gathered(kept.weight).tolist(), "own": kept.own.tolist(), "left out": bias.tolist()}


def test_an_object_of_a_users_own_may_hold_sharded_tensors(tmp_path):
    weight = (2 * next(net().parameters())).tolist()
    saved = ranks(2, with_an_object, tmp_path, "fsdp", False)
    assert [each["kept"] for each in saved] == [weight] * 2
    again = ranks(3, with_an_object, tmp_path, "fsdp", True) + ranks(1, with_an_object, tmp_path, "plain", True)
    assert [each["kept"] for each in again] == [weight] * 4
    assert [each["own"][0] for each in again] == [0, 1, 0, 0]  # the third rank did not exist: it has rank 0's
    assert all(each["left out"] == [2.0] * 6 for each in again)


def refused(rank, folder):
    """What is not whole in any sense: sums that are not made yet, pieces that are missing or of another size."""
    mesh = init_device_mesh("cpu", (2,))
    tensors = {
        "a sum": DTensor.from_local(torch.ones(3), mesh, [Partial()]),
        "another size": DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=torch.Size((16,)), stride=(1,)),
        "left out": DTensor.from_local(torch.ones(2), mesh, [Shard(0)]),
    }
    found = {}
    for name, tensor in tensors.items():
        state = {"a": tensor, "b": DTensor.from_local(torch.ones(2), mesh, [Replicate()])}
        if name == "left out" and rank == 1:
            del state["a"]
        try:
            found[name] = CheckpointStore(folder).save({"model": state}, {}, iteration=1, epoch=1)
        except CheckpointError as error:
            found[name] = str(error)
    trainer, _, data = trainer_in("fsdp", folder / "run")
    kept = Kept("fsdp")
    kept.weight = tensors["a sum"]
    trainer.register("kept", kept)
    try:
        trainer.run(data, max_iters=2)
    except CheckpointError as error:
        found["at the start"] = str(error)
    return found, trainer.state.iteration


def test_what_cannot_be_saved_is_refused_with_its_name_before_it_is_trained(tmp_path):
    words = {
        "a sum": "model a sharded Partial",
        "another size": "a sharded Shard(dim=0)",
        "left out": "not saved whole model",
        "at the start": "kept weight sharded Partial",
    }
    for found, iteration in ranks(2, refused, tmp_path):
        assert iteration == 0 and found.keys() == words.keys()
        assert all(word in found[name] for name in words for word in words[name].split()), found


# ------------------------------------------------------------------------------------------------------------ damages


def of_a_file(damage):
    return lambda checkpoint: DAMAGES[damage](file_of(checkpoint, "rank_1"))


def of_another(checkpoint):
    """From another iteration."""
    other = checkpoint.with_name("iteration_00000002")
    shutil.copy(file_of(other, "rank_1"), file_of(checkpoint, "rank_1"))


CASES = {
    **{damage: (of_a_file(damage), "rank_1") for damage in DAMAGES},
    "of another iteration": (of_another, "rank_1"),
}


@pytest.mark.parametrize(("damage", "words"), CASES.values(), ids=list(CASES))
def test_damaged_pieces_are_found_and_the_checkpoint_before_is_taken(whole, tmp_path, damage, words):
    folder, _ = whole("fsdp")
    for iteration in (2, 4):
        copied(folder, tmp_path / "run", iteration)
    path = tmp_path / "run" / "iteration_00000004"
    damage(path)
    found, skipped = CheckpointStore(tmp_path / "run").latest()
    assert found.iteration == 2 and [each for each, _ in skipped] == [path]
    assert all(word in skipped[0][1] for word in words.split()), skipped
    refuses(lambda: CheckpointStore(tmp_path / "run").load(path), CheckpointError, words)


def resumed_blind(rank, folder):
    """The disk of rank 1 has nothing in the place of the checkpoint."""
    _, checkpoint, _ = trainer_in("plain", folder)
    if rank == 1:
        mount_small_file_system(folder / "iteration_00000002", 64)
    try:
        return str(checkpoint.resume())
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("resume", [resumed_blind] if can_mount() else [])
def test_what_one_rank_cannot_read_is_the_same_error_on_all(whole, tmp_path, resume):
    folder = copied(whole("fsdp")[0], tmp_path)
    first, second = [each.answer() for each in start_ranks(2, resume, folder)]
    assert first == second and "iteration_00000002" in first and first != str(folder / "iteration_00000002")
