"""The short examples show what they say they show."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples import custom_event, custom_handler, fine_tune, minimal, own_update, resume, several_processes, two_losses
from ignite_engine import Update
from ignite_engine.checkpointing import CheckpointStore
from tests.builders import on_two_ranks, weights

ROOT = Path(__file__).resolve().parents[2]


def logged(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def saved(directory: Path) -> list[int]:
    return [each.iteration for each in CheckpointStore(directory / "checkpoints").checkpoints()]


def test_minimal_learns_and_started_again_continues(tmp_path: Path) -> None:
    whole = minimal.main(str(tmp_path / "whole"), epochs=3)
    minimal.main(str(tmp_path / "cut"), epochs=2)
    resumed = minimal.main(str(tmp_path / "cut"), epochs=3)

    assert resumed.state.start.value == "resumed" and torch.equal(weights(resumed), weights(whole))
    rows = logged(tmp_path / "whole")
    assert rows == logged(tmp_path / "cut") and rows[-1]["loss"] < 0.5 * rows[0]["loss"]


def test_custom_handler_finds_the_spoiled_batches_and_is_resumed(tmp_path: Path) -> None:
    def jumps(directory: Path) -> list[float]:
        return [row["loss_jumps"] for row in logged(directory)]

    custom_handler.main(str(tmp_path / "whole"))
    custom_handler.main(str(tmp_path / "cut"), batches=60)
    custom_handler.main(str(tmp_path / "cut"))

    assert jumps(tmp_path / "whole") == [0, 1, 2, 3, 3] == jumps(tmp_path / "cut")


def test_custom_event_saves_at_every_second_halving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    custom_event.main(str(tmp_path / "whole"), epochs=9)
    printed = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in printed.splitlines() if "halved" in line]
    assert len(losses) >= 4 and all(later <= earlier / 2 for earlier, later in itertools.pairwise(losses))
    epochs = [int(line.split()[1].strip(":")) for line in printed.splitlines() if "halved" in line]
    assert saved(tmp_path / "whole") == sorted({8 * epoch for epoch in epochs[1::2]} | {8 * 9})

    custom_event.main(str(tmp_path / "cut"), epochs=epochs[2])  # an odd number of times
    custom_event.main(str(tmp_path / "cut"), epochs=9)
    assert set(saved(tmp_path / "whole")) <= set(saved(tmp_path / "cut"))


def test_own_update_is_that_of_the_optimizer_at_radius_0_and_is_resumed(tmp_path: Path) -> None:
    whole = own_update.main(str(tmp_path / "whole"), epochs=3)
    own_update.main(str(tmp_path / "cut"), epochs=2)
    resumed = own_update.main(str(tmp_path / "cut"), epochs=3)
    assert torch.equal(weights(resumed), weights(whole))
    assert all(row["loss/nearby"] > row["loss"] for row in logged(tmp_path / "whole"))


def test_own_update_at_radius_0_is_an_ordinary_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_0 = own_update.main(str(tmp_path / "at_0"), epochs=1, rho=0.0)
    at_some = own_update.main(str(tmp_path / "at_some"), epochs=1)

    def ordinary(model: nn.Module, optimizer: torch.optim.Optimizer, rho: float) -> Update:
        return Update(model, optimizer, own_update.loss_fn)

    monkeypatch.setattr(own_update, "SharpnessAwareUpdate", ordinary)
    plain = own_update.main(str(tmp_path / "plain"), epochs=1)

    assert torch.equal(weights(at_0), weights(plain)) and not torch.equal(weights(at_some), weights(plain))


def test_two_losses_are_summed_and_each_falls(tmp_path: Path) -> None:
    two_losses.main(str(tmp_path))
    rows = logged(tmp_path)

    assert all(row["loss"] == pytest.approx(row["loss/class"] + row["loss/restored"], rel=1e-5) for row in rows)
    assert all(rows[-1][key] < 0.5 * rows[0][key] for key in ("loss/class", "loss/restored"))
    assert rows[-1]["accuracy"] > 0.9


def test_resumed_run_has_the_bits_of_the_whole_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume.main(str(tmp_path))
    lines = capsys.readouterr().out.splitlines()

    whole, stopped, resumed = (line.rpartition(" ")[2] for line in lines[:3])
    assert lines[1].startswith("stopped, fresh: interrupted at 13,") and lines[2].startswith("stopped, resumed:")
    assert whole == resumed != stopped and lines[3] == "the same bits"
    assert logged(tmp_path / "whole") == logged(tmp_path / "stopped")


def test_fine_tuned_network_keeps_the_body_and_beats_one_from_scratch(tmp_path: Path) -> None:
    accuracies = fine_tune.main(str(tmp_path))

    assert accuracies["tuned"] > accuracies["from scratch"] + 0.1 and accuracies["tuned"] > 0.85


def test_two_ranks_make_the_updates_of_one_process(tmp_path: Path) -> None:
    alone = several_processes.train(0, str(tmp_path / "one"))

    def on_a_rank(rank: int) -> dict[str, Any]:
        trainer = several_processes.train(rank, str(tmp_path / "two"))
        return {"iteration": trainer.state.iteration, "weights": weights(trainer).tolist()}

    found = on_two_ranks(on_a_rank, tmp_path / "meeting_point")

    assert found["iteration"] == [alone.state.iteration] * 2 == [64, 64]
    assert found["weights"][0] == found["weights"][1]
    torch.testing.assert_close(torch.tensor(found["weights"][0]), weights(alone), rtol=1e-4, atol=1e-5)


def test_the_table_has_every_example() -> None:
    text = (ROOT / "docs" / "examples.md").read_text()
    missing = [path.name for path in (ROOT / "examples").glob("[!_]*.*") if f"(../examples/{path.name})" not in text]
    assert not missing
