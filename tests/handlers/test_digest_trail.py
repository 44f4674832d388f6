"""The trail of digests: one bit shows, no line comes twice, and the run does not notice it."""

import json
import math

import pytest
import torch
from ignite.engine import Events

from ignite_engine.handlers import Checkpoint, DigestTrail
from ignite_engine.handlers.digest_trail import digests_of
from tests.kit.tiny import linear, numbers_loader, one, trainer_of


def lines_of(folder):
    return [json.loads(line) for line in (folder / "trail.jsonl").read_text().splitlines()]


def with_trail(folder, every=2):
    trainer, checkpoint = trainer_of(linear(dropout=True)), Checkpoint(folder / "checkpoints", keep_last=9)
    DigestTrail(folder, every=every).attach(trainer)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=3))
    return trainer, checkpoint


def test_one_bit_of_any_tensor_changes_its_digest_and_no_other():
    trainer = trainer_of()
    before = digests_of(trainer)
    assert before is not None and list(before["weights"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for name, parameter in trainer.update.model.named_parameters():
        kept = parameter.data.clone()
        parameter.data.view(-1)[-1] = torch.nextafter(parameter.data.view(-1)[-1], torch.tensor(math.inf))
        after = digests_of(trainer)
        parameter.data.copy_(kept)
        assert after is not None and after["all"] != before["all"]
        assert [key for key, digest in after["weights"].items() if digest != before["weights"][key]] == [name]
    assert digests_of(trainer) == before


def test_a_line_has_the_weights_of_the_step_boundary(tmp_path):
    trainer, _ = with_trail(tmp_path)
    seen = {}
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: seen.update({trainer.state.iteration: digests_of(trainer)})
    )
    trainer.run(numbers_loader(), max_epochs=2)
    lines = lines_of(tmp_path)
    assert [line["iteration"] for line in lines] == [2, 4, 6, 8, 10, 12]
    assert all({"iteration": line["iteration"], **(seen[line["iteration"]] or {})} == line for line in lines)


def test_a_resumed_run_writes_no_line_twice_and_the_lines_of_the_whole_one(tmp_path):
    whole, _ = with_trail(tmp_path / "whole")
    whole.run(numbers_loader(shuffle=True), max_epochs=3)
    killed, _ = with_trail(tmp_path / "run")
    killed.add_event_handler(Events.ITERATION_COMPLETED(once=11), killed.terminate)  # two lines after its checkpoint
    killed.run(numbers_loader(shuffle=True), max_epochs=3)
    for checkpoint in sorted((tmp_path / "run" / "checkpoints").iterdir())[2:]:
        checkpoint.rename(tmp_path / checkpoint.name)
    resumed, saves = with_trail(tmp_path / "run")
    assert saves.resume() is not None and resumed.state.iteration == 6
    resumed.run(numbers_loader(shuffle=True), max_epochs=3)
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "whole") and len(lines_of(tmp_path / "run")) == 9


def test_the_run_has_the_bits_and_checkpoints_of_one_without_it(tmp_path):
    trainer, _ = with_trail(tmp_path, every=1)
    trainer.run(numbers_loader(), max_epochs=2)
    without = trainer_of(linear(dropout=True))
    without.run(numbers_loader(), max_epochs=2)
    names = set(trainer.registry.objects) - {"checkpoint"}
    assert torch.equal(*(one(t.update.model) for t in (trainer, without)))
    assert names == set(without.registry.objects)


@pytest.mark.parametrize("every", [0, -1, 2.5])
def test_interval_that_is_none_is_refused(every, tmp_path):
    with pytest.raises(ValueError, match="every must be a whole number of updates of at least 1"):
        DigestTrail(tmp_path, every=every)
