"""A run that is sharded one way is resumed in any other, on any number of ranks."""

import json
import os
import re
import shutil
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Partial

from ignite_engine import Task, load_model
from ignite_engine.checkpointing import CheckpointError, CheckpointStore
from ignite_engine.checkpointing.digests import tensor_sha256
from ignite_engine.checkpointing.filesystem import hash_file
from ignite_engine.cli import main
from ignite_engine.run_directory import weights_sha256
from ignite_engine.states.model_and_optimizer import unwrap
from tests.checkpointing.states import forge as rewrite_manifest
from tests.kit.sharded import gathered, in_layout, net, run_phases, train, trainer_in, whole_digests
from tests.kit.tiny import Numbers, mse

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

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
SAME = list(SAVED)
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


def uninterrupted(folder, layout, options):
    trainer, _, data = trainer_in(layout, folder, config={}, **options)
    return train(trainer, data)


def resumed(source, folder, layout, options):
    """From the checkpoint of iteration 2, in the middle of an epoch."""
    if dist.get_rank() == 0:
        shutil.copytree(source / "iteration_00000002", folder / "iteration_00000002")
    dist.barrier()
    trainer, checkpoint, data = trainer_in(layout, folder, **options)
    assert checkpoint.resume() == folder / "iteration_00000002"
    return train(trainer, data)


def fine_tuned(source, folder, layout):
    """Begins with the average of another run."""
    trainer, checkpoint, _ = trainer_in(layout, folder)
    table = checkpoint.load(source, weights="ema")
    return {"state": whole_digests(trainer), "complete": table.complete}


def unreadable_on_rank_1(source, folder):
    """The disk of one rank fails when it reads the pieces."""
    if dist.get_rank() == 0:
        shutil.copytree(source / "iteration_00000002", folder / "iteration_00000002")
    dist.barrier()
    _, checkpoint, _ = trainer_in("plain", folder)
    if dist.get_rank() == 1:
        verify = checkpoint.store._verification.problem
        checkpoint.store._verification.problem = lambda path, record: (
            "the disk is away" if path.name == "shards_1.pt" else verify(path, record)
        )
    try:
        checkpoint.resume()
    except CheckpointError as error:
        return str(error)
    return "resumed"


def refused_at_the_start(folder):
    """An object holds a sum that is not made yet; and what ends a run says so before anything is trained."""
    trainer, _, data = trainer_in("fsdp", folder)
    kept = Kept("fsdp")
    kept.weight = DTensor.from_local(torch.ones(2), kept.weight.device_mesh, [Partial()])
    trainer.register("kept", kept)
    try:
        trainer.run(data, max_iters=2)
    except CheckpointError as error:
        return [str(error), trainer.state.iteration]
    return "trained"


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


def with_an_object(folder, layout, resume):
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
    bias = gathered(unwrap(trainer.update.model)[0].bias.detach())
    return {"kept": gathered(kept.weight).tolist(), "own": kept.own.tolist(), "left out": bias.tolist()}


def changed_while_written(folder):
    """A handler changes sharded states of the optimizer in place while they are written in the background."""
    trainer, checkpoint, data = trainer_in("fsdp", folder, background=True)
    snapshot = checkpoint._saver._snapshot
    wait = snapshot.wait

    def wait_longer():
        time.sleep(0.2)
        wait()

    snapshot.wait = wait_longer
    optimizer = trainer.registry.objects["optimizer"].optimizer

    def change():
        torch._foreach_mul_([values["exp_avg"] for values in optimizer.state.values()], 2.0)

    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), change)
    trainer.run(data, max_iters=4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    phases = {
        name: (ranks, partial(uninterrupted, folder / name, layout, options))
        for name, (ranks, layout, options) in SAVED.items()
    }
    for name, ranks, layout in [*((name, *SAVED[name][:2]) for name in SAVED), *OTHER]:
        key = f"{name} -> {layout} {ranks}"
        phases[key] = (ranks, partial(resumed, folder / name, folder / key, layout, SAVED[name][2]))
    fsdp = folder / "fsdp" / "iteration_00000008"
    phases["fine-tuned tp"] = (2, partial(fine_tuned, fsdp, folder / "fine-tuned tp", "tp"))
    phases["fine-tuned fsdp"] = (3, partial(fine_tuned, fsdp, folder / "fine-tuned fsdp", "fsdp"))
    phases["unreadable"] = (2, partial(unreadable_on_rank_1, folder / "fsdp", folder / "unreadable"))
    phases["object saved"] = (2, partial(with_an_object, folder / "object", "fsdp", False))
    phases["object resumed"] = (3, partial(with_an_object, folder / "object", "fsdp", True))
    phases["object resumed plain"] = (1, partial(with_an_object, folder / "object", "plain", True))
    phases["refused"] = (2, partial(refused_at_the_start, folder / "refused"))
    phases["changed"] = (2, partial(changed_while_written, folder / "changed"))
    return folder, run_phases(folder, phases)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_on_the_same_ranks_and_layout_it_ends_with_the_same_bits(runs, name):
    _, answers = runs
    ranks, layout, _ = SAVED[name]
    for whole, again in zip(answers[name], answers[f"{name} -> {layout} {ranks}"], strict=True):
        assert list(again["losses"]) == [str(each) for each in range(3, 9)]
        assert again["losses"] == {iteration: whole["losses"][iteration] for iteration in again["losses"]}
        assert again["state"] == whole["state"] and len(whole["state"]) > 20
        assert again["weights_sha256"] == whole["weights_sha256"]
        assert again["report"] == whole["report"] == []


@pytest.mark.parametrize(("name", "ranks", "layout"), OTHER)
def test_on_other_ranks_or_another_layout_it_has_the_same_losses(runs, name, ranks, layout):
    _, answers = runs
    whole = answers[name][0]
    for again in answers[f"{name} -> {layout} {ranks}"]:
        assert list(again["losses"]) == [str(each) for each in range(3, 9)]
        assert again["losses"] == pytest.approx(
            {iteration: whole["losses"][iteration] for iteration in again["losses"]}, abs=1e-6
        )
        assert set(again["state"]) == set(whole["state"])
        assert whole["report"] == []
        reason = again["report"][0]
        assert reason.startswith("resumed from iteration_00000002 otherwise than saved (")
        assert ("ranks: " in reason) == (ranks != SAVED[name][0])
        assert ("sharding: " in reason) == (name not in ("ddp", "plain") or layout not in ("ddp", "plain"))


def test_each_piece_is_written_once(runs):
    """Of replicas (HSDP), and of what tensor parallel ranks do not split, one rank's."""
    folder, _ = runs
    written = {}
    for name in ("plain", "fsdp", "hsdp", "tp", "tp+fsdp"):
        content = json.loads((folder / name / "iteration_00000002" / "manifest.json").read_text())
        written[name] = sorted(each for each in content["files"] if each.startswith("shards"))
    assert written == {
        "plain": [],
        "fsdp": ["shards_0.pt", "shards_1.pt"],
        "hsdp": ["shards_0.pt", "shards_1.pt"],
        "tp": ["shards_0.pt", "shards_1.pt"],
        "tp+fsdp": [f"shards_{rank}.pt" for rank in range(4)],
    }


def of_part(part, answer):
    """The digests of a part's tensors by name."""
    prefix = {"model": "model.", "ema": "ema.weights."}[part]
    found = answer["state"].items()
    return {name.removeprefix(prefix): digest for name, digest in found if name.startswith(prefix)}


@pytest.mark.parametrize("layout", ["tp", "fsdp"])
def test_a_run_begins_with_the_average_of_a_sharded_one(runs, layout):
    _, answers = runs
    for answer in answers[f"fine-tuned {layout}"]:
        assert answer["complete"] and of_part("model", answer) == of_part("ema", answers["fsdp"][0])


@pytest.mark.parametrize("name", ["fsdp", "tp+fsdp"])
def test_the_command_line_reads_sharded_checkpoints(runs, tmp_path, name, capsys):
    folder, answers = runs
    last = folder / name / "iteration_00000008"
    assert main(["checkpoints", "verify", str(folder / name)]) == 0
    assert main(["checkpoints", "list", str(folder / name)]) == 0
    for weights, part in (("raw", "model"), ("ema", "ema")):
        for file in (tmp_path / "weights.safetensors", tmp_path / "weights.pt"):
            assert main(["checkpoints", "export", str(last), "-o", str(file), "--weights", weights]) == 0
            read = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
            assert {name: tensor_sha256(value) for name, value in read.items()} == of_part(part, answers[name][0])
    _, layout, _ = SAVED[name]
    same = folder / f"{name} -> {layout} {SAVED[name][0]}" / "iteration_00000008"
    assert main(["checkpoints", "diff", str(last), str(same)]) == 0
    capsys.readouterr()
    assert main(["checkpoints", "diff", str(last), str(folder / f"{name} -> plain 1" / "iteration_00000008")]) == 1
    table = capsys.readouterr().out
    assert re.search(r"model +0 equal; 8 differ: \S+ by \d\.?\d*e-0[78]", table), table


def test_a_model_is_rebuilt_from_a_sharded_checkpoint(runs):
    folder, answers = runs
    for name in ("fsdp", "hsdp", "tp+fsdp"):
        model = load_model(folder / name, task=lambda options: Task(net(), mse, Numbers(4)))
        assert weights_sha256(model) == answers[name][0]["weights_sha256"]


def test_a_tensor_is_whole_for_who_only_looks(runs):
    folder, answers = runs
    path = folder / "fsdp" / "iteration_00000008"
    loaded = CheckpointStore(folder / "fsdp").load(path)
    weights = {name: tensor_sha256(value) for name, value in loaded.shared["model"].items()}
    assert weights == of_part("model", answers["fsdp"][0])


def test_an_object_of_a_users_own_may_hold_sharded_tensors(runs):
    _, answers = runs
    weight = (2 * next(net().parameters())).tolist()
    assert [each["kept"] for each in answers["object saved"]] == [weight] * 2
    resumed = answers["object resumed"] + answers["object resumed plain"]
    assert [each["kept"] for each in resumed] == [weight] * 4
    assert [each["own"][0] for each in resumed] == [0, 1, 0, 0]  # the third rank did not exist: it has rank 0's
    assert all(each["left out"] == [2.0] * 6 for each in resumed)


def test_what_cannot_be_saved_is_refused_before_it_is_trained(runs):
    _, answers = runs
    for error, iteration in answers["refused"]:
        assert error.startswith("kept cannot be saved: weight is sharded, and its placements (Partial(sum),)")
        assert iteration == 0


def test_what_changes_a_sharded_state_in_the_background_changes_no_checkpoint(
    runs,
):
    folder, _ = runs
    states = [
        CheckpointStore(folder / name).load(folder / name / f"iteration_{iteration:08d}").shared["optimizer"]["state"]
        for name, iteration in (("changed", 2), ("fsdp", 2), ("changed", 4), ("fsdp", 4))
    ]
    digests = [tensor_sha256(state["0.weight"]["exp_avg"]) for state in states]
    assert digests[0] == digests[1] and digests[2] != digests[3]


def test_a_piece_that_one_rank_cannot_read_is_the_same_error_on_all(
    runs,
):
    folder, answers = runs
    expected = f"{folder / 'unreadable' / 'iteration_00000002'} is damaged: the disk is away."
    assert answers["unreadable"] == [expected] * 2


def remove(checkpoint):
    (checkpoint / "shards_1.pt").unlink()
    return "shards_1.pt is missing"


def truncate(checkpoint):
    file = checkpoint / "shards_1.pt"
    os.truncate(file, file.stat().st_size // 2)
    return "shards_1.pt has .* bytes, the manifest says"


def flip_a_byte(checkpoint):
    data = bytearray((checkpoint / "shards_0.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (checkpoint / "shards_0.pt").write_bytes(data)
    return "shards_0.pt has changed: BLAKE3"


def of_another(checkpoint):
    shutil.copy(checkpoint.with_name("iteration_00000002") / "shards_0.pt", checkpoint / "shards_0.pt")
    return "shards_0.pt has (changed: BLAKE3|.* bytes)"


def of_another_rank(checkpoint):
    shutil.copy(checkpoint / "shards_1.pt", checkpoint / "shards_0.pt")
    return "shards_0.pt has (changed: BLAKE3|.* bytes)"


def link(checkpoint):
    file = checkpoint / "shards_1.pt"
    file.rename(checkpoint / "elsewhere.pt")
    file.symlink_to(checkpoint / "elsewhere.pt")
    return "shards_1.pt is missing"


def forget(checkpoint):
    """As if a rank had not taken part, with a manifest that is right in itself."""
    files = json.loads((checkpoint / "manifest.json").read_bytes())["files"]
    (checkpoint / "shards_1.pt").unlink()
    rewrite_manifest(checkpoint, files={name: record for name, record in files.items() if name != "shards_1.pt"})
    return "model 0.weight is not whole: its 1 pieces hold 9 of 18 numbers"


def replace_both(checkpoint):
    """Twice the same rank's pieces, with a manifest that is right in itself."""
    shutil.copy(checkpoint / "shards_0.pt", checkpoint / "shards_1.pt")
    files = json.loads((checkpoint / "manifest.json").read_bytes())["files"]
    rewrite_manifest(checkpoint, files={**files, "shards_1.pt": files["shards_0.pt"]})
    return "model 0.weight is not whole: its 2 pieces overlap"


def not_pieces(checkpoint):
    """A file of another program, with a manifest that is right in itself."""
    torch.save({"model": {"0.weight": torch.zeros(6, 3)}}, checkpoint / "shards_1.pt")
    files = json.loads((checkpoint / "manifest.json").read_bytes())["files"]
    with open(checkpoint / "shards_1.pt", "rb", buffering=0) as file:
        rewrite_manifest(checkpoint, files={**files, "shards_1.pt": vars(hash_file(file))})
    return "shards_1.pt does not hold pieces of tensors"


DAMAGES = [remove, truncate, flip_a_byte, of_another, of_another_rank, link, forget, replace_both, not_pieces]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_pieces_are_found_and_the_checkpoint_before_is_taken(runs, tmp_path, damage):
    folder, _ = runs
    for name in ("iteration_00000002", "iteration_00000004"):
        shutil.copytree(folder / "fsdp" / name, tmp_path / name)
    reason = damage(tmp_path / "iteration_00000004")
    store = CheckpointStore(tmp_path)
    newest, skipped = store.latest()
    assert newest is not None and newest.iteration == 2
    ((path, found),) = skipped
    assert path.name == "iteration_00000004" and re.search(reason, found), found
    with pytest.raises(CheckpointError, match=reason) as raised:
        CheckpointStore(tmp_path).load(path)
    assert "\n" not in str(raised.value)
