"""``checkpoints list | verify | diff | export | prune``: what they print, what they leave, and their codes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from ignite_engine import Trainer, Update
from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.cli import main
from ignite_engine.handlers import EMA, Checkpoint
from tests.faults.commands import Command
from tests.kit.tiny import linear, mse, numbers_loader, one

ROOT = Path(__file__).resolve().parents[2]


def trained(folder, iterations=12, lr=0.1, model=None, **options):
    """A run with a checkpoint every 4 updates, whose ``val/loss`` gets worse."""
    model = linear() if model is None else model
    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters(), lr=lr), mse))
    EMA(0.5).attach(trainer)

    def score():
        trainer.state.metrics["val/loss"] = trainer.state.iteration / 8
        trainer.state.metrics["memory/mib"] = 1.0

    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=4), score)
    config = {"optimizer": {"lr": lr}, "run": {"seed": 0}}
    checkpoint = Checkpoint(folder / "checkpoints", keep_last=9, config=config, **options)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=4))
    trainer.run(numbers_loader(16), max_iters=iterations)
    return trainer


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained(tmp_path / "run")
    return tmp_path / "run"


Say = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def say(capsys):
    """The command's code and its lines; an error's line is the last."""

    def run_command(*words):
        capsys.readouterr()
        try:
            code = main(["checkpoints", *map(str, words)])
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return code, (captured.out + captured.err).splitlines()

    return run_command


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def names(run):
    return [each.path.name for each in CheckpointStore(run / "checkpoints").checkpoints()]


@pytest.mark.row("D18")
def test_list_has_a_line_for_each(run, say):
    store = CheckpointStore(run / "checkpoints")
    store.annotate(store.checkpoints()[0].path, labels=["first", "kept"])
    (store.directory / "iteration_00000012" / "manifest.json").write_text("{")
    code, lines = say("list", run)

    assert code == 0 and len(lines) == 4
    assert lines[0].split() == ["checkpoint", "epoch", "metrics", "size", "labels", "state"]
    assert re.fullmatch(r"iteration_00000004  1 +val/loss 0\.5  \d+\.\d KiB  first, kept  exact", lines[1])
    assert re.fullmatch(r"iteration_00000008  1 +val/loss 1 +\d+\.\d KiB +last; exact", lines[2])
    assert lines[3].startswith("iteration_00000012  cannot be read: ") and "is not JSON" in lines[3]


def test_best_and_last_by_name(tmp_path, say):
    """Of a run whose loss gets worse the first checkpoint is the best, of which the average was evaluated."""
    run = tmp_path / "run"
    trained(run, best="val/loss")
    store = CheckpointStore(run / "checkpoints")
    lines = say("list", run)[1]
    assert lines[1].split("  ")[-1] == "best (val/loss, min); exact" and lines[3].split("  ")[-1] == "last; exact"
    assert say("diff", run / "best", store.checkpoints()[0].path)[0] == 0 and say("diff", run / "best", run)[0] == 1
    code, lines = say("export", run / "best", "-o", tmp_path / "best.pt")
    assert code == 0 and lines[0].endswith(f"raw weights of {store.checkpoints()[0].path}")

    flip(store.checkpoints()[0].path / "shared.pt")
    code, lines = say("export", tmp_path / "none" / "best", "-o", tmp_path / "x.pt")
    assert code == 2 and "does not exist; expected a run's folder" in lines[-1]
    trained(tmp_path / "other")
    code, lines = say("export", tmp_path / "other" / "best", "-o", tmp_path / "x.pt")
    assert code == 2 and len(lines) == 1 and "no metric was followed, so none is the best; train with" in lines[0]


def test_list_tells_what_is_unhealthy_or_not_exact(tmp_path, say):
    store = CheckpointStore(tmp_path)
    store.save({}, {}, iteration=1, epoch=0, healthy=False, reproducibility=["one reason", "another"])

    assert say("list", tmp_path)[1][1].endswith("last; weights not finite; not exact: one reason and 1 more")


@pytest.mark.row("D18")
def test_verify_names_the_damaged_file_and_ends_with_1(run, say):
    expected = [f"{name}  valid" for name in ("iteration_00000004", "iteration_00000008", "iteration_00000012")]
    assert say("verify", run) == (0, expected)
    flip(run / "checkpoints" / "iteration_00000008" / "rank_0.pt")
    code, lines = say("verify", run / "checkpoints")

    assert code == 1 and lines[::2] == expected[::2]
    assert re.fullmatch(r"iteration_00000008  damaged: rank_0\.pt has changed: BLAKE3 .*", lines[1])
    assert say("verify", run / "checkpoints" / "iteration_00000004") == (0, expected[:1])
    (run / "checkpoints" / "iteration_00000004" / "manifest.json").unlink()
    code, lines = say("verify", run / "checkpoints" / "iteration_00000004")
    assert code == 1 and "has no manifest.json" in lines[0]


def test_diff_of_the_same_is_0(run, tmp_path, say):
    trained(tmp_path / "again")
    first, second = run / "checkpoints" / "iteration_00000008", tmp_path / "again/checkpoints/iteration_00000008"
    code, lines = say("diff", first, second)

    assert code == 0 and lines[-1] == "They are the same."
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:-1]}
    assert rows["model"] == ["4", "equal"] and rows["ema"] == ["5", "equal"]
    assert {"data", "rng", "trainer", "optimizer", "checkpoint"} < set(rows)


def test_diff_tells_values_shapes_names_and_config(run, tmp_path, say):
    other = nn.Sequential(linear()[0], nn.Tanh(), nn.Linear(4, 1, bias=False), nn.Identity(), nn.Linear(1, 1))
    trained(tmp_path / "other", lr=0.2, model=other, iterations=4)
    first = CheckpointStore(run / "checkpoints").load(run / "checkpoints" / "iteration_00000004").shared["model"]
    second = CheckpointStore(tmp_path).load(tmp_path / "other/checkpoints/iteration_00000004").shared["model"]
    worst = max((first[name] - second[name]).abs().max().item() for name in ("0.weight", "0.bias", "2.weight"))
    code, lines = say("diff", run / "checkpoints" / "iteration_00000004", tmp_path / "other")
    text = dict(line.split(None, 1) for line in lines[2:-1])

    assert code == 1 and lines[-1] == "They differ."
    assert f" by {worst:.3g}, also" in text["model"] and "0 equal; 3 differ: " in text["model"]
    assert text["model"].endswith("1 only in the first: 2.bias; 2 only in the second: 4.weight, 4.bias")
    assert (
        re.fullmatch(r"\d+ equal; 1 differ: output.loss by .*", text["trainer"])
        and "  config: optimizer.lr: 0.1 -> 0.2" in lines
    )
    assert (
        lines[0].startswith(f"first  {run}/checkpoints/iteration_00000004 (iteration 4, epoch 1, ")
        and "KiB" in lines[0]
    )
    _, lines = say("diff", run, run / "checkpoints" / "iteration_00000004")
    assert next(line for line in lines if "trainer" in line).endswith(
        "iteration 12 -> 4, micro_batches 12 -> 4, optimizer_steps 12 -> 4 and 2 more"
    )


def test_diff_tells_another_shape_or_type(tmp_path, say):
    values = [torch.zeros(2, 3), torch.tensor([0.0, torch.nan]), torch.tensor([torch.inf, 1.0]), torch.tensor([0.0])]
    others = [torch.zeros(3), torch.tensor([0.0, torch.nan]).double(), torch.tensor([torch.inf, 4.0]), -values[3]]
    for name, tensors in (("a", values), ("b", others)):
        parts = {"model": {str(index): tensor for index, tensor in enumerate(tensors)}}
        CheckpointStore(tmp_path / name).save(parts, {}, iteration=1, epoch=0)
    _, lines = say("diff", tmp_path / "a", tmp_path / "b")

    # -0.0 has other bits than 0.0; the infinity at the same place does not count
    assert lines[2] == (
        "  model  0 equal; 2 differ: 2 by 3, also 3; "
        "2 changed: 0 float32[2, 3] -> float32[3], 1 float32[2] -> float64[2]"
    )


def test_export_and_load_again_gives_the_same_bits(tmp_path, say):
    trainer = trained(tmp_path / "run")
    model = trainer.update.model.state_dict()
    average = trainer.registry.objects["ema"].state_dict()["weights"]
    newest = tmp_path / "run" / "checkpoints" / "iteration_00000012"
    for kind, ending, read in (("state_dict", "pt", torch.load), ("safetensors", "safetensors", load_file)):
        for weights, expected in (("raw", model), ("ema", average)):
            file = tmp_path / f"{weights}.{ending}"
            code, lines = say("export", tmp_path / "run", "-o", file, "--weights", weights)
            assert code == 0 and lines == [f"{file}: 4 names, 21 numbers, {kind}, {weights} weights of {newest}"]
            loaded = read(file)
            assert loaded.keys() == expected.keys() and all(
                torch.equal(loaded[name], expected[name]) for name in loaded
            )
            # and back into a run
            again = linear()
            nn.init.zeros_(again[0].weight)
            other = Trainer(Update(again, torch.optim.SGD(again.parameters()), mse))
            checkpoint = Checkpoint(tmp_path / "other")
            checkpoint.attach(other)
            checkpoint.load(file)
            assert torch.equal(one(again), torch.cat([each.reshape(-1) for each in expected.values()]))
    assert not any(each.name.startswith(".") for each in tmp_path.iterdir())
    with safe_open(tmp_path / "ema.safetensors", "pt") as opened:
        assert opened.metadata()["weights"] == "ema" and opened.metadata()["format"] == "pt"
    assert say("export", tmp_path / "raw.pt", "-o", tmp_path / "again.safetensors", "--format", "state_dict")[0] == 0
    with open(tmp_path / "again.safetensors", "rb") as opened:  # by its name torch would take it for what it is not
        assert torch.load(opened, weights_only=True).keys() == model.keys()


class Tied(nn.Module):
    """One parameter under two names, and a view."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())


def test_tied_weights_are_exported_under_each_name(tmp_path, say):
    state = Tied().state_dict()
    CheckpointStore(tmp_path / "run").save({"model": state}, {}, iteration=1, epoch=0)
    for file in (tmp_path / "tied.safetensors", tmp_path / "tied.pt"):
        assert say("export", tmp_path / "run", "-o", file)[0] == 0
        loaded = load_file(file) if file.suffix == ".safetensors" else torch.load(file)
        assert all(torch.equal(loaded[name], value) for name, value in state.items()) and len(loaded) == 3


def test_export_says_what_the_checkpoint_was_saved_without(tmp_path, say):
    trained(tmp_path / "run", exclude=["model:0.*"])
    _, lines = say("export", tmp_path / "run", "-o", tmp_path / "weights.pt")

    assert lines[1] == "It lacks 2 names that iteration_00000012 was saved without: 0.weight, 0.bias"


def test_prune_keeps_the_newest_and_the_best(tmp_path, say):
    run = tmp_path / "run"
    trained(run, best="val/loss")
    everything = names(run)
    code, lines = say("prune", run, "--dry-run")
    assert code == 0 and lines == ["iteration_00000008  would be deleted", "2 of 3 would stay"]
    assert names(run) == everything
    assert say("prune", run, "--keep-last", "2")[1] == ["3 of 3 stay"]
    assert say("prune", run)[1] == ["iteration_00000008  deleted", "2 of 3 stay"]
    assert names(run) == ["iteration_00000004", "iteration_00000012"]


def test_prune_never_deletes_the_last_valid_one(run, say):
    for name in ("iteration_00000008", "iteration_00000012"):
        flip(run / "checkpoints" / name / "shared.pt")
    _, lines = say("prune", run, "--keep-last", "1", "--dry-run")
    assert lines[-1] != "1 of 3 would stay" and "iteration_00000004  would be deleted" not in lines
    say("prune", run, "--keep-last", "1")

    newest = CheckpointStore(run / "checkpoints").latest().checkpoint
    assert newest is not None and newest.iteration == 4


WRONG = [
    (["list", "nowhere"], "nowhere does not exist; expected a run's folder or a folder of checkpoints"),
    (["list", "empty"], "empty holds no checkpoint"),
    (["verify", "empty"], "empty holds no checkpoint"),
    (["diff", "run", "nowhere"], "nowhere does not exist"),
    (["export", "run"], "the following arguments are required: -o/--output"),
    (["export", "run", "-o", "no/such/file.pt"], "no/such/file.pt cannot be written: No such file or directory"),
    (["export", "run", "-o", "empty"], "empty cannot be written: Is a directory"),
    (["export", "run", "-o", "x.pt", "--weights", "emma"], "holds no average 'emma'; expected raw or ema"),
    (["export", "empty", "-o", "x.pt"], "empty holds no checkpoint"),
    (["export", "run", "-o", "x.pt", "--format", "onnx"], "invalid choice: 'onnx'"),
    (["prune", "run", "--keep-last", "0"], "keep_last must be at least 1, got 0"),
    (["prune", "run", "--keep-lst", "1"], "got '--keep-lst', which checkpoints prune does not take"),
    (["list", "run", "more"], "got 'more', which checkpoints list does not take"),
    (["lst", "run"], "invalid choice: 'lst'"),
    ([], "the following arguments are required: action"),
]


def test_as_a_program(run):
    flip(run / "checkpoints" / "iteration_00000012" / "shared.pt")
    command = Command(Path.cwd(), "checkpoints", "verify", "run")
    output, _ = command.communicate()
    assert command.returncode == 1 and output.splitlines()[2].startswith("iteration_00000012  damaged: shared.pt")
    command = Command(Path.cwd(), "checkpoints", "list", "nowhere")
    _, errors = command.communicate()
    assert command.returncode == 2 and errors.startswith("error: nowhere does not exist")


def test_a_run_keeps_its_mode_in_the_manifest(tmp_path):
    trained(tmp_path, best="val/loss", mode="max")
    assert {str(each.manifest.best) for each in CheckpointStore(tmp_path / "checkpoints").checkpoints()} == {
        "{'metric': 'val/loss', 'mode': 'max'}"
    }


def test_a_symbolic_link_among_checkpoints_is_named_and_left(run, say, tmp_path):
    other = tmp_path / "other"
    trained(other)
    link = run / "checkpoints" / "iteration_00000099"
    link.symlink_to(other / "checkpoints" / "iteration_00000012")
    code, lines = say("verify", run)
    assert code == 1 and lines[-1].startswith("iteration_00000099  damaged: it is a symbolic link")
    assert say("list", run)[1][-1].startswith("iteration_00000099  cannot be read: it is a symbolic link")
    assert say("prune", run, "--keep-last", "1")[1][-1] == "1 of 3 stay"
    assert link.is_symlink() and len(names(other)) == 3
