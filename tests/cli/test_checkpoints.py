"""``checkpoints list | verify | diff | export | prune | push | pull``: what they print and leave, and their codes."""

import re
import shutil

import pytest
import torch
from ignite.engine import Events
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from ignite_engine import Trainer, Update, load_weights
from ignite_engine.cli import main
from ignite_engine.handlers import EMA, Checkpoint
from tests.kit.floors import needs, of
from tests.kit.refusals import CommandRefused, command, refusals
from tests.kit.saved import iterations, manifest, parts
from tests.kit.tiny import linear, mse, numbers_loader, one


def trained(folder, last=12, lr=0.1, model=None, **options):
    """A run with a checkpoint every 4 updates, whose ``val/loss`` gets worse."""
    model = linear() if model is None else model
    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters(), lr=lr), mse))
    EMA(0.5).attach(trainer)

    def score():
        trainer.state.metrics["val/loss"] = trainer.state.iteration / 8

    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=4), score)
    config = {"optimizer": {"lr": lr}, "run": {"seed": 0}}
    checkpoint = Checkpoint(folder / "checkpoints", keep_last=9, config=config, **options)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=4))
    trainer.run(numbers_loader(16), max_iters=last)
    return trainer


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained(tmp_path / "run", best="val/loss")
    return tmp_path / "run"


@pytest.fixture
def say(capsys):
    """The command's code and its lines."""

    def run_command(*words):
        capsys.readouterr()
        code = main(["checkpoints", *map(str, words)])
        captured = capsys.readouterr()
        return code, (captured.out + captured.err).splitlines()

    return run_command


def path(run, iteration):
    return run / "checkpoints" / f"iteration_{iteration:08d}"


def flip(run, iteration, name="shared.safetensors"):
    file = path(run, iteration) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.row("D18")
def test_list_has_a_line_for_each(run, say):
    (path(run, 12) / "manifest.json").write_text("{")
    code, lines = say("list", run)
    assert code == 0 and lines[0].split()[0] == "checkpoint" and len(lines) == 4
    assert re.fullmatch(r"iteration_00000004  1 +val/loss 0\.5 .*KiB .*best \(val/loss, min\).*exact", lines[1])
    assert "last" in lines[2] and "cannot be read" in lines[3] and "JSON" in lines[3]


def test_list_tells_what_is_labelled_unhealthy_or_not_exact(tmp_path, say):
    trainer = Trainer(Update(linear(), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), mse))
    checkpoint = Checkpoint(tmp_path, labels=["first"])
    checkpoint.attach(trainer)
    with torch.no_grad():
        trainer.update.model[0].weight.fill_(float("nan"))
    checkpoint.save()
    (line,) = say("list", tmp_path)[1][1:]
    assert "first" in line and "not finite" in line


@pytest.mark.row("D18")
def test_verify_names_the_damaged_file_and_ends_with_1(run, say):
    valid = [f"iteration_{iteration:08d}  valid" for iteration in (4, 8, 12)]
    assert say("verify", run) == (0, valid)
    flip(run, 8, "rank_0.safetensors")
    code, lines = say("verify", run / "checkpoints")
    assert code == 1 and lines[::2] == valid[::2] and "damaged: rank_0.safetensors" in lines[1]
    assert say("verify", path(run, 4)) == (0, valid[:1])
    (path(run, 4) / "manifest.json").unlink()
    code, lines = say("verify", path(run, 4))
    assert code == 1 and "no manifest.json" in lines[0]


def test_diff_tells_values_names_and_config(run, tmp_path, say):
    other = nn.Sequential(linear()[0], nn.Tanh(), nn.Linear(4, 1, bias=False), nn.Identity(), nn.Linear(1, 1))
    trained(tmp_path / "other", last=4, lr=0.2, model=other)
    trained(tmp_path / "again", best="val/loss")
    first, second = parts(run / "checkpoints", 4)["model"], parts(tmp_path / "other" / "checkpoints", 4)["model"]
    worst = max((first[name] - second[name]).abs().max().item() for name in ("0.weight", "0.bias", "2.weight"))

    code, lines = say("diff", path(run, 4), tmp_path / "other")
    (line,) = [line for line in lines if line.split()[0] == "model"]
    assert code == 1 and f" by {worst:.3g}, also" in line
    assert "only in the first: 2.bias" in line and "only in the second: 4.weight, 4.bias" in line
    assert any("optimizer.lr: 0.1 -> 0.2" in line for line in lines) and lines[-1] == "They differ."
    assert say("diff", path(run, 8), path(tmp_path / "again", 8))[0] == 0
    assert say("diff", run / "best", path(run, 4))[0] == 0 and say("diff", run / "best", run)[0] == 1


def test_diff_tells_another_shape_or_type_and_the_sign_of_zero(tmp_path, say):
    values = [torch.zeros(2, 3), torch.tensor([0.0, torch.nan]), torch.tensor([torch.inf, 1.0]), torch.tensor([0.0])]
    others = [torch.zeros(3), torch.tensor([0.0, torch.nan]).double(), torch.tensor([torch.inf, 4.0]), -values[3]]
    for name, tensors in (("a", values), ("b", others)):
        trainer = Trainer(lambda engine, batch: 0.0)
        model = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])
        trainer.register("model", model, shared=True)
        checkpoint = Checkpoint(tmp_path / name)
        checkpoint.attach(trainer)
        checkpoint.save()
    (line,) = [line for line in say("diff", tmp_path / "a", tmp_path / "b")[1] if line.split()[0] == "model"]
    assert "2 differ: 2 by 3, also 3" in line and "float32[2, 3] -> float32[3]" in line and "float64[2]" in line


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize("weights", ["raw", "ema"])
def test_what_is_exported_is_loaded_again_with_the_same_bits(weights, ending, run, tmp_path, say):
    expected = parts(run / "checkpoints")["model"] if weights == "raw" else parts(run / "checkpoints")["ema"]["weights"]
    file = tmp_path / f"{weights}.{ending}"
    code, (line,) = say("export", run, "-o", file, "--weights", weights)
    assert code == 0 and str(file) in line and f"{weights} weights" in line
    loaded = load_file(file) if ending == "safetensors" else torch.load(file, weights_only=True)
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in loaded)
    model = linear()
    nn.init.zeros_(model[0].weight)
    load_weights(model, file)
    assert torch.equal(one(model), torch.cat([each.reshape(-1) for each in expected.values()]))
    assert not any(each.name.startswith(".") for each in tmp_path.iterdir())


def test_an_exported_file_says_what_it_is_and_what_it_lacks(tmp_path, say):
    trained(tmp_path / "run", exclude=["model:0.*"])
    file = tmp_path / "weights.safetensors"
    lines = say("export", tmp_path / "run", "-o", file, "--weights", "raw")[1]
    assert "lacks 2 names" in lines[1] and "0.weight, 0.bias" in lines[1]
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["weights"] == "raw" and opened.metadata()["format"] == "pt"


class Tied(nn.Module):
    """One parameter under two names, and a view."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_tied_weights_are_tied_in_an_export(ending, tmp_path, say):
    """In safetensors as by its own ``save_model``, which stores them once."""
    model = Tied()
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse))
    checkpoint = Checkpoint(tmp_path / "run")
    checkpoint.attach(trainer)
    checkpoint.save()
    file = tmp_path / f"tied.{ending}"
    assert say("export", tmp_path / "run", "-o", file)[0] == 0
    found = Tied()
    if ending == "safetensors":
        assert len(load_file(file)) == 2 and load_model(found, file) == (set(), [])
        load_weights(ours := Tied(), file)
        assert torch.equal(ours.second.weight, model.second.weight)
    else:
        found.load_state_dict(torch.load(file))
    assert all(torch.equal(found.state_dict()[name], value) for name, value in model.state_dict().items())


def test_prune_keeps_the_newest_and_the_best(run, say):
    code, lines = say("prune", run, "--dry-run")
    assert code == 0 and lines == ["iteration_00000008  would be deleted", "2 of 3 would stay"]
    assert say("prune", run, "--keep-last", "2")[1] == ["3 of 3 stay"]
    assert iterations(run / "checkpoints") == [4, 8, 12]
    assert say("prune", run)[1] == ["iteration_00000008  deleted", "2 of 3 stay"]
    assert iterations(run / "checkpoints") == [4, 12]


def test_prune_never_deletes_the_last_valid_one(tmp_path, say):
    run = tmp_path / "run"
    trained(run)
    flip(run, 8)
    flip(run, 12)
    say("prune", run, "--keep-last", "1")
    assert say("verify", path(run, 4))[0] == 0


def test_a_symbolic_link_among_checkpoints_is_named_and_left(run, say, tmp_path):
    trained(tmp_path / "other")
    link = path(run, 99)
    link.symlink_to(path(tmp_path / "other", 12))
    code, lines = say("verify", run)
    assert code == 1 and "symbolic link" in lines[-1] and "symbolic link" in say("list", run)[1][-1]
    say("prune", run, "--keep-last", "1")
    assert link.is_symlink() and iterations(tmp_path / "other" / "checkpoints") == [4, 8, 12]


@needs("mirror")
def test_what_is_pushed_is_pulled(run, tmp_path, say):
    url, here = f"memory://{tmp_path.name}/mirror", tmp_path / "here"
    assert say("push", run, url)[0] == 0 and say("push", path(run, 4), url)[0] == 0
    assert say("pull", url, here)[0] == 0
    assert parts(here, 12).keys() == parts(run / "checkpoints", 12).keys()
    assert say("pull", f"{url}/iteration_00000004", here)[0] == 0 and iterations(here) == [4, 12]
    code, (line,) = say("pull", url, here)
    assert code == 0 and f"is in {here}" in line
    shutil.rmtree(path(run, 12))
    assert say("pull", url, run)[0] == 0 and iterations(run / "checkpoints") == [4, 8, 12]


def damaged(change):
    def call(folder):
        trained(folder / "run")
        mirror = folder / "mirror"
        command("checkpoints", "push", folder / "run", f"file://{mirror}")
        change(folder)

    return call


def pull_what_is_half_there(folder):
    (folder / "mirror" / "iteration_00000012" / "rank_0.safetensors").write_bytes(b"half")
    command("checkpoints", "pull", f"file://{folder / 'mirror'}", folder / "here")


def push_what_has_changed(folder):
    flip(folder / "run", 8)
    command("checkpoints", "push", path(folder / "run", 8), f"file://{folder / 'mirror'}")


def of_a_run(*words):
    def call(folder):
        trained(folder / "run")
        (folder / "empty").mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            command("checkpoints", *words)

    return call


CALLS = [
    ("nothing there", of_a_run("list", "nowhere"), "nowhere does not exist"),
    ("list empty", of_a_run("list", "empty"), "empty holds no checkpoint"),
    ("verify empty", of_a_run("verify", "empty"), "empty holds no checkpoint"),
    ("diff with nothing", of_a_run("diff", "run", "nowhere"), "nowhere does not exist"),
    ("no output", of_a_run("export", "run"), "required --output"),
    ("no folder", of_a_run("export", "run", "-o", "no/such/file.pt"), "no/such/file.pt cannot be written"),
    ("a folder", of_a_run("export", "run", "-o", "empty"), "empty cannot be written directory"),
    ("average", of_a_run("export", "run", "-o", "x.pt", "--weights", "emma"), "'emma' raw ema"),
    ("no best", of_a_run("export", "run/best", "-o", "x.pt"), "no metric best"),
    ("format", of_a_run("export", "run", "-o", "x.pt", "--format", "onnx"), "'onnx'"),
    ("keep none", of_a_run("prune", "run", "--keep-last", "0"), "--keep-last at least 1 '0'"),
    ("option", of_a_run("prune", "run", "--keep-lst", "1"), "'--keep-lst' prune"),
    ("two folders", of_a_run("list", "run", "more"), "'more' list"),
    ("action", of_a_run("lst", "run"), "'lst'"),
    ("no action", of_a_run(), "list --help"),
    *of(
        "mirror",
        [
            ("half a file", damaged(pull_what_is_half_there), "rank_0.safetensors 4 bytes"),
            ("damaged", damaged(push_what_has_changed), "shared.safetensors"),
        ],
    ),
]
test_refusals = refusals([(name, call, CommandRefused, words) for name, call, words in CALLS])


def test_a_run_keeps_its_mode_in_the_manifest(tmp_path):
    trained(tmp_path, best="val/loss", mode="max")
    assert manifest(tmp_path / "checkpoints")["best"] == {"metric": "val/loss", "mode": "max"}
