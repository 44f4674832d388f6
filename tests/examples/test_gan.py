"""The example of a GAN learns its ring, and a stopped run ends as one that was not."""

import json

import pytest
import torch
from ignite.engine import Events

from examples import gan
from ignite_engine.checkpointing import CheckpointStore
from tests.kit.tiny import one


def last_weights(directory):
    found = CheckpointStore(directory / "checkpoints").latest().checkpoint
    assert found is not None
    model = gan.GAN()
    model.load_state_dict(CheckpointStore(directory / "checkpoints").load(found.path, rank=0).shared["model"])
    return one(model)


@pytest.mark.slow
def test_stopped_run_ends_with_the_bits_of_the_whole_one_and_the_generator_learns(tmp_path, monkeypatch):
    gan.main(str(tmp_path / "whole"), 300)
    make = gan.make_trainer

    def stopping(model):
        trainer = make(model)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=151), lambda trainer: trainer.request_stop("asked"))
        return trainer

    monkeypatch.setattr(gan, "make_trainer", stopping)
    gan.main(str(tmp_path / "stopped"), 300)
    gan.main(str(tmp_path / "stopped"), 300)

    assert torch.equal(last_weights(tmp_path / "whole"), last_weights(tmp_path / "stopped"))
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "stopped")]
    assert lines[0] == lines[1]
    values = [json.loads(line) for line in lines[0]]
    assert values[-1]["discriminator/loss"] < values[0]["discriminator/loss"] < 1.4
