"""Names inside parts, by what the parts are."""

import pytest
import torch

from ignite_engine.checkpointing import CheckpointStore, LoadSource, read_source
from ignite_engine.checkpointing.export import weights_of
from ignite_engine.checkpointing.load import prepare
from ignite_engine.checkpointing.part_names import named, renamed
from ignite_engine.handlers import EMA, Checkpoint, LRSchedule, warmup_cosine
from tests.kit.tiny import numbers_loader, trainer_of

WEIGHTS = {"a": torch.ones(2), "b": torch.zeros(1)}
OPTIMIZER = {"state": {"a": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["a", "b"]}]}
AVERAGE = {"updates": 3, "weights": {"a": torch.full((2,), 5.0)}}


@pytest.mark.parametrize(
    ("state", "kind", "names"),
    [
        (WEIGHTS, "model", ["a", "b"]),
        (OPTIMIZER, "optimizer", ["a", "b"]),
        (AVERAGE, "average", ["a"]),
        (AVERAGE, None, ["a"]),
        (AVERAGE, "metric", None),
        (AVERAGE, "other", None),
        (OPTIMIZER, "other", None),
        (OPTIMIZER, "schedule", None),
        ({"last_epoch": 3}, "schedule", None),
        (7, None, None),
    ],
)
def test_names_are_found_by_the_kind_of_a_part(state, kind, names):
    found = named(state, kind)
    assert (None if found is None else list(found)) == names


def test_renamed_everywhere_in_a_state():
    found = renamed(OPTIMIZER, {"a": "x", "b": "y"}.get, "optimizer")
    assert found == {"state": {"x": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["x", "y"]}]}
    assert list(renamed(AVERAGE, {"a": "x"}.get, "average")["weights"]) == ["x"]


def test_a_name_that_becomes_none_is_left_out():
    found = renamed(OPTIMIZER, {"b": "y"}.get, "optimizer")
    assert found == {"state": {}, "param_groups": [{"lr": 0.1, "params": ["y"]}]}


def test_two_names_must_not_become_one():
    with pytest.raises(ValueError, match="rename makes 'x' of both 'a' and 'b'"):
        renamed(WEIGHTS, lambda name: "x", "model")


class Holder:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state


def test_what_a_part_is_is_kept_in_the_manifest_and_goes_before_its_looks(tmp_path):
    """A meter whose state looks like an average is none, and a generator under a name of its own is a model."""
    shared = {"generator": WEIGHTS, "meter": AVERAGE, "lr": {"scheduler": 1, "lrs": [1]}}
    kinds = {"generator": "model", "meter": "metric", "lr": "data"}
    path = CheckpointStore(tmp_path).save(shared, {}, iteration=1, epoch=1, kinds=kinds)
    source = read_source(path)
    assert source.kinds == kinds
    assert weights_of(source).keys() == WEIGHTS.keys()
    here = {name: Holder(state) for name, state in shared.items()}
    _, report = prepare(LoadSource(path), source, here)
    assert report.loaded == ["generator:a", "generator:b"] and report.complete
    with pytest.raises(ValueError, match="no average of that name"):
        prepare(LoadSource(path, weights="meter"), source, here)


def test_a_run_says_what_each_of_its_parts_is(tmp_path):
    trainer = trainer_of()
    LRSchedule(warmup_cosine(trainer.update.optimizers["optimizer"], warmup=1, total=4)).attach(trainer)
    EMA(0.9).attach(trainer)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(trainer)
    trainer.run(numbers_loader(), max_iters=2)
    assert checkpoint.store.checkpoints()[-1].manifest.kinds == {
        "trainer": "counters",
        "data": "data",
        "rng": "rng",
        "model": "model",
        "optimizer": "optimizer",
        "lr_schedule": "schedule",
        "ema": "average",
        "checkpoint": "other",
    }
