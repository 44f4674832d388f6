"""What is loaded from another checkpoint is what was asked for, it is told, and what does not fit is refused."""

import re
from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from safetensors.torch import save_file
from torch import Tensor, nn

from ignite_engine import Trainer, Update
from ignite_engine.checkpointing import CheckpointError
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import EMA, Checkpoint, LRSchedule, warmup_cosine
from tests.kit.tiny import mse, numbers_loader, one


class Net(nn.Module):
    """A backbone under a name of one's choice, and a head of one's size."""

    def __init__(self, backbone="backbone", outputs=1, seed=7):
        super().__init__()
        torch.manual_seed(seed)
        self.add_module(backbone, nn.Linear(3, 4))
        self.head = nn.Linear(4, outputs)
        self._backbone = backbone

    def forward(self, inputs):
        found = self.head(torch.tanh(getattr(self, self._backbone)(inputs)))
        return found


def run_of(directory, model, *, lr=0.1, decay=0.0, ema=False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
    trainer = Trainer(Update(model, optimizer, mse))
    LRSchedule(warmup_cosine(optimizer, 2, total=50)).attach(trainer)
    if ema:
        EMA(0.5).attach(trainer)
    checkpoint = Checkpoint(directory, keep_last=9)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=4))
    return trainer, checkpoint


def model_of(trainer):
    model = trainer.update.model
    return model


def parts_of(trainer, part):
    return trainer.registry.objects[part].state_dict()


@pytest.fixture
def saved(tmp_path):
    """A run of 8 updates with an average, and its folder of checkpoints."""
    trainer, _ = run_of(tmp_path / "first", Net(), ema=True)
    trainer.run(numbers_loader(16), max_iters=8)
    return trainer, tmp_path / "first"


@pytest.mark.row("D10")
def test_fine_tuning_takes_the_model_alone(saved, tmp_path):
    before, source = saved
    trainer, checkpoint = run_of(tmp_path / "second", Net(seed=1))
    untouched = {name: parts_of(trainer, name) for name in ("trainer", "lr_schedule")}
    generator = torch.get_rng_state()
    table = checkpoint.load(source)

    assert torch.equal(one(model_of(trainer)), one(model_of(before)))
    assert {name: parts_of(trainer, name) for name in untouched} == untouched
    assert parts_of(trainer, "optimizer")["state"] == {} and torch.equal(torch.get_rng_state(), generator)
    assert table.complete and table.names("model") == set(model_of(trainer).state_dict())
    assert str(table).startswith(f"From {source / 'iteration_00000008'} 4 loaded: model:backbone.weight, ")
    trainer.run(numbers_loader(16), max_iters=4)
    (info,) = checkpoint.store.checkpoints()
    assert info.iteration == 4 and info.manifest.parent == str(source / "iteration_00000008")


@pytest.mark.row("D10")
def test_warm_start_takes_the_moments_and_not_the_options(saved, tmp_path):
    before, source = saved
    trainer, checkpoint = run_of(tmp_path / "second", Net(seed=1), lr=0.01, decay=0.5)
    table = checkpoint.load(source, parts=["model", "optimizer"])
    state, old = parts_of(trainer, "optimizer"), parts_of(before, "optimizer")

    assert {name: entry["step"].item() for name, entry in state["state"].items()} == dict.fromkeys(old["state"], 8.0)
    assert all(torch.equal(state["state"][name]["exp_avg"], old["state"][name]["exp_avg"]) for name in old["state"])
    assert len(table.names("optimizer")) == 4 and trainer.state.iteration == 0
    assert [group["weight_decay"] for group in (*state["param_groups"], *old["param_groups"])] == [0.5, 0.0]
    trainer.run(numbers_loader(16), max_iters=2)
    # half way up this run's own warm-up; the other run's rate was past its peak of 0.1
    assert trainer.update.optimizers["optimizer"].param_groups[0]["lr"] == pytest.approx(0.01)
    assert trainer.state.iteration == 2
    assert parts_of(trainer, "optimizer")["state"]["head.bias"]["step"].item() == 10


def test_resume_plan_goes_on_bit_for_bit(saved, tmp_path):
    whole, _ = run_of(tmp_path / "whole", Net(), ema=True)
    whole.run(numbers_loader(16), max_iters=14)
    trainer, checkpoint = run_of(tmp_path / "second", Net(seed=1), ema=True)
    table = checkpoint.load(saved[1], parts=["*"])
    assert table.complete and {"trainer", "data", "rng", "lr_schedule"} <= set(table.loaded)
    trainer.run(numbers_loader(16), max_iters=14)

    assert trainer.state.iteration == 14 and torch.equal(one(model_of(trainer)), one(model_of(whole)))
    assert [each.iteration for each in checkpoint.store.checkpoints()] == [12, 14]


@pytest.mark.parametrize("rename", [{"backbone.": "encoder."}, lambda name: name.replace("backbone", "encoder")])
def test_names_are_renamed_in_model_and_optimizer(saved, tmp_path, rename):
    before, source = saved
    trainer, checkpoint = run_of(tmp_path / "second", Net("encoder", seed=1), ema=True)
    table = checkpoint.load(source, parts=["model", "optimizer", "ema"], rename=rename)

    assert table.complete and torch.equal(one(model_of(trainer)), one(model_of(before)))
    old, new = parts_of(before, "optimizer")["state"], parts_of(trainer, "optimizer")["state"]
    assert torch.equal(new["encoder.weight"]["exp_avg_sq"], old["backbone.weight"]["exp_avg_sq"])
    old, new = parts_of(before, "ema")["weights"], parts_of(trainer, "ema")["weights"]
    assert torch.equal(new["encoder.bias"], old["backbone.bias"])


def test_what_is_ignored_stays_as_built(saved, tmp_path):
    """A new head of another size: its weights, its moments and its average begin anew."""
    before, source = saved
    trainer, checkpoint = run_of(tmp_path / "second", Net(outputs=2, seed=1), ema=True)
    head = model_of(trainer).get_submodule("head")
    built = one(head).clone()
    table = checkpoint.load(source, parts=["model", "optimizer", "ema"], ignore=["*:head.*"])

    assert torch.equal(one(head), built)
    assert torch.equal(
        one(model_of(trainer).get_submodule("backbone")), one(model_of(before).get_submodule("backbone"))
    )
    assert set(parts_of(trainer, "optimizer")["state"]) == {"backbone.weight", "backbone.bias"}
    average = parts_of(trainer, "ema")
    assert torch.equal(average["weights"]["backbone.bias"], parts_of(before, "ema")["weights"]["backbone.bias"])
    assert torch.equal(average["weights"]["head.bias"], model_of(trainer).state_dict()["head.bias"])
    assert table.names("model") == {"backbone.weight", "backbone.bias"} and table.complete


def test_only_what_is_included_of_a_part_is_loaded(saved, tmp_path):
    before, source = saved
    trainer, checkpoint = run_of(tmp_path / "second", Net(seed=1))
    built = model_of(trainer).state_dict()["head.weight"].clone()
    table = checkpoint.load(source, parts=["model:backbone.*"])

    assert table.loaded == ["model:backbone.weight", "model:backbone.bias"] and table.complete
    now, old = model_of(trainer).state_dict(), model_of(before).state_dict()
    assert torch.equal(now["backbone.weight"], old["backbone.weight"]) and torch.equal(now["head.weight"], built)


def test_an_average_is_loaded_as_the_model(saved, tmp_path):
    before, source = saved
    trainer, checkpoint = run_of(tmp_path / "second", Net(seed=1))
    checkpoint.load(source, weights="ema")
    average = parts_of(before, "ema")["weights"]

    assert all(torch.equal(value, average[name]) for name, value in model_of(trainer).state_dict().items())
    assert not torch.equal(average["head.weight"], model_of(before).state_dict()["head.weight"])


PARTS = [["model"], ["model", "counters", "data"]]  # that does not start at iteration 0


@pytest.mark.parametrize("parts", PARTS, ids=["fine-tune", "counters"])
def test_a_new_average_begins_with_the_loaded_weights(saved, tmp_path, parts):
    trainer, checkpoint = run_of(tmp_path / "second", Net(seed=1), ema=True)
    checkpoint.load(saved[1], parts=parts, ignore=["*:head.bias"])
    loaded, averages = one(model_of(trainer)).clone(), list[Tensor]()
    trainer.add_event_handler(
        Events.ITERATION_STARTED,
        lambda: averages.append(torch.cat([each.reshape(-1) for each in parts_of(trainer, "ema")["weights"].values()])),
    )
    trainer.run(numbers_loader(16), max_iters=9)

    assert torch.equal(averages[0], loaded)


def test_handlers_that_come_later_get_their_part(saved, tmp_path):
    _, source = saved
    trainer, checkpoint = run_of(tmp_path / "second", Net(seed=1))
    checkpoint.load(source, parts=["model", "ema"])
    ema = EMA(0.5)
    ema.attach(trainer)

    assert ema.updates == 8
    other, checkpoint = run_of(tmp_path / "third", Net(seed=1))
    checkpoint.load(source, parts=["model", "ema"])
    with pytest.raises(StateMismatch, match=r"holds \['ema'\], for which nothing is registered"):
        other.run(numbers_loader(16), max_iters=1)


# -- what does not fit ------------------------------------------------------------------------------------------------


class Unlike(nn.Module):
    """As ``Net``, with a head of another size, without the backbone's bias and with a layer more."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head, self.more = nn.Linear(3, 4, bias=False), nn.Linear(4, 2), nn.Linear(1, 1)


def test_a_strict_plan_that_does_not_fit_is_one_line_and_changes_nothing(saved, tmp_path):
    trainer, checkpoint = run_of(tmp_path / "second", Unlike())
    built = one(model_of(trainer)).clone()
    with pytest.raises(StateMismatch) as caught:
        checkpoint.load(saved[1], parts=["model", "optimizer"])

    line = str(caught.value)
    assert "4 missing: model:more.weight, model:more.bias, optimizer:more.weight and 1 more; 6 unexpected: " in line
    assert "model:head.weight (saved (1, 4), here (2, 4))" in line
    assert "strict=False" in line and "\n" not in line
    assert torch.equal(one(model_of(trainer)), built) and parts_of(trainer, "optimizer")["state"] == {}


def test_a_plan_that_is_not_strict_loads_the_rest_and_tells(saved, tmp_path, caplog):
    before, source = saved
    trainer, checkpoint = run_of(tmp_path / "second", Unlike())
    built = model_of(trainer).state_dict()["head.weight"].clone()
    table = checkpoint.load(source, parts=["*"], strict=False, ignore=["counters", "data"])
    now, old = model_of(trainer).state_dict(), model_of(before).state_dict()

    assert torch.equal(now["backbone.weight"], old["backbone.weight"]) and torch.equal(now["head.weight"], built)
    assert set(parts_of(trainer, "optimizer")["state"]) == {"backbone.weight"}
    assert not table.complete and table.missing[:2] == ["model:more.weight", "model:more.bias"]
    assert [record.levelname for record in caplog.records if " loaded: " in record.message] == ["WARNING"]


def test_a_part_that_the_checkpoint_lacks_is_missing(tmp_path):
    first, _ = run_of(tmp_path / "first", Net())
    first.run(numbers_loader(16), max_iters=4)
    trainer, checkpoint = run_of(tmp_path / "second", Net(seed=1), ema=True)
    with pytest.raises(StateMismatch, match=r"and this run differ \(1 missing: ema\)"):
        checkpoint.load(tmp_path / "first", parts=["*"])
    table = checkpoint.load(tmp_path / "first", parts=["*"], strict=False)

    assert table.missing == ["ema"] and trainer.state.iteration == 4


WRONG = [
    ({"parts": ["modle"]}, r"parts: 'modle' is not a part of .*iteration_00000008; did you mean 'model'\?"),
    (
        {"parts": ["model:backbon.*"]},
        r"parts: 'model:backbon.\*' matches no name in .*; did you mean 'backbone.bias'",
    ),
    ({"ignore": ["model:tail.*"]}, r"ignore: 'model:tail.\*' matches no name in .*; known: backbone.weight, "),
    ({"ignore": ["trainer:x"]}, "ignore: 'trainer:x' matches no name in .*, which has no names inside."),
    ({"ignore": ["emma"]}, r"ignore: 'emma' is not a part of .*; did you mean 'ema'\?"),
    (
        {"rename": {"backbone": "x", "head": "x"}},
        "rename makes 'x.weight' of both 'backbone.weight' and 'head.weight' ",
    ),
    ({"weights": "average"}, r"weights='average', but .* holds no average of that name; expected raw or ema"),
]


# -- where it comes from ----------------------------------------------------------------------------------------------


def test_weights_come_from_files_as_well(saved, tmp_path):
    before, _ = saved
    state = model_of(before).state_dict()
    torch.save(state, tmp_path / "weights.pt")
    save_file(dict(state), tmp_path / "weights.safetensors")
    for name in ("weights.pt", "weights.safetensors"):
        trainer, checkpoint = run_of(tmp_path / name.replace(".", "_"), Net(seed=1))
        table = checkpoint.load(tmp_path / name)
        assert torch.equal(one(model_of(trainer)), one(model_of(before))) and len(table.loaded) == 4


class Runs:
    """Would run when it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


def test_of_a_folder_the_newest_valid_one_is_taken(saved, tmp_path):
    _, source = saved
    newest = source / "iteration_00000008"
    content = bytearray((newest / "shared.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "shared.pt").write_bytes(content)
    _, checkpoint = run_of(tmp_path / "second", Net(seed=1))

    assert checkpoint.load(source).source.endswith("iteration_00000004")
    with pytest.raises(CheckpointError, match=re.escape("iteration_00000008 is damaged: shared.pt has changed")):
        checkpoint.load(newest)


def test_loading_needs_a_trainer(tmp_path):
    with pytest.raises(RuntimeError, match="call attach"):
        Checkpoint(tmp_path).load(tmp_path)
