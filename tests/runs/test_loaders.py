"""How many updates a run makes, and what its loaders give."""

import pytest
import torch

from ignite_engine import Task
from ignite_engine.config import ConfigError, config_from_dict
from ignite_engine.ranks import agreement
from ignite_engine.runs import loaders
from tests.kit.tiny import Numbers, linear, mse


def config(**sections):
    return config_from_dict({"task": "unused.py:build", "run": {"max_epochs": 3}, **sections})


@pytest.mark.parametrize(
    ("samples", "sections", "ranks", "updates"),
    [
        (10, {"data": {"batch_size": 4}}, 1, 3 * 3),
        (10, {"data": {"batch_size": 4, "drop_last": True}}, 1, 3 * 2),
        (10, {"data": {"batch_size": 2}, "update": {"accumulation_steps": 2}}, 1, 3 * 3),
        (10, {"data": {"batch_size": 2}}, 4, 3 * 2),  # the longest rank has 3 samples
        (10, {"run": {"max_iterations": 7}}, 1, 7),
        (10, {"data": {"batch_size": 2}, "update": {"global_micro_batches": 4}}, 4, 3 * 2),
        (10, {"data": {"batch_size": 2}, "update": {"global_micro_batches": 4}}, 1, 3 * 2),
    ],
)
def test_updates_of_the_run_are_those_of_the_longest_rank(monkeypatch, samples, sections, ranks, updates):
    monkeypatch.setattr(agreement, "world_size", lambda: ranks)

    assert loaders.total_updates(config(**sections), samples) == updates


def test_epoch_without_an_update_is_refused():
    with pytest.raises(ConfigError, match=r"data.batch_size: got 16, but a rank has 10 samples; drop_last leaves none"):
        loaders.total_updates(config(data={"batch_size": 16, "drop_last": True}), 10)


def test_more_ranks_than_micro_batches_are_refused(monkeypatch):
    monkeypatch.setattr(agreement, "world_size", lambda: 3)

    with pytest.raises(ConfigError, match=r"update.global_micro_batches: got 2 on 3 ranks, expected at least one for"):
        loaders.total_updates(config(update={"global_micro_batches": 2}), 10)


def test_only_training_shuffles_and_drops_the_last_batch():
    settings = config(data={"batch_size": 4, "eval_batch_size": 3, "drop_last": True})
    task = Task(linear(), mse, Numbers(10))
    train = loaders.data_loader(settings, task, task.train_set, training=True)
    evaluate = loaders.data_loader(settings, task, task.train_set, training=False)

    assert [len(inputs) for inputs, _ in train] == [4, 4]
    assert [len(inputs) for inputs, _ in evaluate] == [3, 3, 3, 1]
    whole = torch.cat([inputs for inputs, _ in evaluate])
    assert torch.equal(whole, Numbers(10).inputs)
    assert not torch.equal(torch.cat([inputs for inputs, _ in train]), whole[:8])
