"""An optimizer with a closure in an update of one's own: the bits of the loop written by hand, and exact resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from examples import lbfgs
from examples.lbfgs import ClosureUpdate
from ignite_engine import Trainer, fit
from tests.builders import Numbers, linear, mse, one, weights
from tests.examples.test_by_feature import logged


def test_weights_have_the_bits_of_the_loop_written_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lbfgs, "loss_fn", mse)
    data, by_hand, model = Numbers(16), linear(), linear()
    batch = (data.inputs, data.targets)
    optimizer = torch.optim.LBFGS(by_hand.parameters(), lr=0.1, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = mse(by_hand, batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        return loss

    for _ in range(3):
        optimizer.step(closure)
    update = ClosureUpdate(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4))
    state = Trainer(update).run([batch], max_epochs=3)

    assert torch.equal(one(model), one(by_hand)) and not torch.equal(one(model), one(linear()))
    assert state.optimizer_steps == 3 and state.output["evaluations"] == 4


def test_stopped_and_resumed_run_of_the_example_has_the_bits_of_the_whole_one(tmp_path: Path) -> None:
    whole = lbfgs.main(str(tmp_path / "whole"), steps=8)
    lbfgs.main(str(tmp_path / "cut"), steps=5)
    resumed = lbfgs.main(str(tmp_path / "cut"), steps=8)

    assert resumed.state.start.value == "resumed" and torch.equal(weights(resumed), weights(whole))
    rows = logged(tmp_path / "whole")
    assert rows == logged(tmp_path / "cut")
    assert rows[-1]["loss"] < 0.2 * rows[0]["loss"] and all(row["evaluations"] > 1 for row in rows)


def test_example_is_what_a_refusal_of_lbfgs_names(tmp_path: Path) -> None:

    model = nn.Linear(4, 1)
    for optimizer in ("LBFGS", {"name": "LBFGS"}, lambda model: torch.optim.LBFGS(model.parameters())):
        with pytest.raises(
            ValueError, match=r"LBFGS.* closure.*: give Trainer an update .* examples/lbfgs\.py"
        ) as refusal:
            fit(model, mse, Numbers(8), directory=tmp_path / "run", max_epochs=1, optimizer=optimizer)
        assert "\n" not in str(refusal.value)
    assert Path(lbfgs.__file__).name == "lbfgs.py"
