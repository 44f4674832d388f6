"""One resolver: a path, ``best`` or ``last``, wherever a checkpoint is named."""

import math

import pytest
import torch
from torch import nn

from ignite_engine import load_weights
from ignite_engine.cli import main
from ignite_engine.errors import CheckpointError
from tests.checkpoint.made_states import CheckpointStore, LoadSource, Retention, file_of, iterations, save, shared_parts
from tests.kit.faults import FileOperations, full_disk
from tests.kit.refusals import command, refusals

LOSS = {"metric": "val/loss", "mode": "min"}


class Small(nn.Module):
    """What is saved here."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(300, 100)), nn.Parameter(torch.zeros(3))


@pytest.fixture
def run(tmp_path):
    """Of three checkpoints the second is the best by the loss, the third by the accuracy."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for iteration, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
        save(store, iteration, metrics={"val/loss": loss, "accuracy": loss}, best=LOSS, run_id="a")
    return tmp_path / "run"


def loaded(*arguments, **options):
    """The iteration whose weights are loaded, which must be those of the path that is told."""
    model = Small()
    path = load_weights(model, *arguments, **options)
    iteration = int(path.name.removeprefix("iteration_"))
    assert torch.equal(model.weight, shared_parts(iteration)["model"]["weight"])
    return iteration


NAMES = [
    ("", "last", 3),
    ("", "best", 2),
    ("last", "last", 3),
    ("best", "last", 2),
    ("best", "best", 2),
    ("iteration_00000001", "last", 1),
]


@pytest.mark.parametrize(("name", "which", "iteration"), NAMES)
def test_best_and_last_by_name_and_by_argument(run, name, which, iteration):
    folders = [run / "checkpoints"] if name.startswith("iteration") else [run, run / "checkpoints"]
    for folder in folders:
        assert loaded(folder / name, which) == iteration
    if which == "last":
        assert LoadSource(folder / name).find().path.name == f"iteration_0000000{iteration}"


def test_of_damaged_ones_the_next_is_meant(run):
    for iteration, best, last in ((2, 1, 3), (3, 1, 1)):
        file_of(run / "checkpoints" / f"iteration_0000000{iteration}", "shared").write_bytes(b"damaged")
        assert (loaded(run / "best"), loaded(run)) == (best, last)


def test_what_is_there_under_that_name_is_meant(run, tmp_path):
    """A run may be called best."""
    (tmp_path / "run").rename(tmp_path / "best")
    assert loaded(tmp_path / "best") == 3 and loaded(tmp_path / "best" / "best") == 2


def test_another_run_in_the_same_folder_has_its_own_best(run):
    """A fresh start deletes what an earlier run has left: its best one is no better than those of this run."""
    store = CheckpointStore(run / "checkpoints")
    for iteration, loss in ((4, 0.6), (5, 0.7), (6, 0.8)):
        save(store, iteration, metrics={"val/loss": loss}, best=LOSS, run_id="b")
    assert loaded(run / "best") == 4
    store.prune(Retention(keep_last=1, best="val/loss"))
    assert iterations(run / "checkpoints") == [4, 6]


@pytest.mark.parametrize(
    ("name", "options", "weights"),
    [
        ("best", {}, "ema"),
        ("", {"which": "best"}, "ema"),
        ("", {}, "raw"),
        ("last", {}, "raw"),
        ("best", {"ema": False}, "raw"),
        ("", {"ema": True}, "ema"),
    ],
)
def test_of_the_best_the_weights_that_were_evaluated(tmp_path, name, options, weights):
    model = {"weight": torch.ones(300, 100), "bias": torch.ones(3)}
    average = {"updates": 1, "weights": {key: value + 4 for key, value in model.items()}}
    facts = {"metrics": {"val/loss": 0.5, "train/loss": 1.0}, "best": LOSS, "evaluated_with": {"val": "ema"}}
    CheckpointStore(tmp_path).save({"model": model, "ema": average}, {}, iteration=1, epoch=1, **facts)
    small = Small()
    load_weights(small, tmp_path / name, **options)
    assert small.bias.tolist() == [5.0 if weights == "ema" else 1.0] * 3


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_an_export_that_cannot_be_written_leaves_the_file_before(run, ending, tmp_path, capsys):
    file = tmp_path / f"weights.{ending}"
    file.write_bytes(b"before")
    with FileOperations(tmp_path, at=("write", ""), action=full_disk) as seen:
        assert main(["checkpoints", "export", str(run), "-o", str(file)]) != 0
    assert seen.acted == 1 and file.read_bytes() == b"before" and "No space left" in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", file.name]
    command("checkpoints", "export", run, "-o", file)
    model = Small()
    load_weights(model, file)
    assert torch.equal(model.weight, shared_parts(3)["model"]["weight"])


def test_bits_are_compared_and_not_values(tmp_path, capsys):
    store = CheckpointStore(tmp_path)
    states = {1: (0.0, math.nan), 2: (-0.0, math.nan), 3: (0.0, math.nan)}
    paths = [
        store.save({"model": {"a": torch.tensor(state), "b": 1}}, {}, iteration=iteration, epoch=1)
        for iteration, state in states.items()
    ]
    assert main(["checkpoints", "diff", str(paths[0]), str(paths[1])]) == 1
    assert "model" in capsys.readouterr().out
    assert main(["checkpoints", "diff", str(paths[0]), str(paths[2])]) == 0


def empty(folder, **facts):
    save(CheckpointStore(folder), 1, **facts)
    return folder


test_refusals = refusals(
    [
        ("nothing", lambda path: loaded(path / "no"), CheckpointError, "no does not exist"),
        ("no rule", lambda path: loaded(empty(path) / "best"), CheckpointError, "no metric followed best"),
        ("no value", lambda path: loaded(empty(path, best=LOSS) / "best"), CheckpointError, "no valid val/loss"),
        ("no average", lambda path: loaded(empty(path), ema="swa"), (CheckpointError, ValueError), "'swa' no average"),
    ]
)
