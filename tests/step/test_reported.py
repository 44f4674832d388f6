"""What an update reports is a dict; only the mean of a group's losses waits until somebody reads it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ignite_engine import Trainer, Update
from ignite_engine.handlers import Checkpoint, MetricLogger
from ignite_engine.step.losses import weighted
from ignite_engine.step.reported import GroupMean, Reported, unread
from tests.builders import linear

LOSSES = [torch.tensor(value) for value in (0.1, 0.7, 0.3)]
SCALES = [1 / 3] * 3


def made() -> Reported:
    output = Reported(loss=GroupMean(LOSSES, SCALES))
    output["norm"] = torch.tensor(2.0)
    return output


@pytest.mark.parametrize(
    "read",
    [
        lambda output: output["loss"],
        lambda output: output.get("loss"),
        lambda output: dict(output)["loss"],
        lambda output: {**output}["loss"],
        lambda output: dict(output.items())["loss"],
        lambda output: next(iter(output.values())),
        lambda output: output.copy()["loss"],
        lambda output: output.pop("loss"),
        lambda output: output.setdefault("loss", None),
        lambda output: (output | {"more": 1})["loss"],
        lambda output: ({"more": 1} | output)["loss"],
        lambda output: copy.deepcopy(output)["loss"],
        lambda output: copy.copy(output)["loss"],
        lambda output: pickle.loads(pickle.dumps(output))["loss"],
        lambda output: [output.popitem(), output.popitem()][1][1],
        lambda output: _merged(output)["loss"],
        lambda output: {name: output[name] for name in output}["loss"],
    ],
)
def test_whoever_reads_it_has_the_tensor(read: Callable[[Reported], Any]) -> None:
    value = read(made())
    assert isinstance(value, Tensor) and torch.equal(value, weighted(LOSSES, SCALES))


def _merged(output: Reported) -> dict[str, Any]:
    merged = {"loss": None}
    merged |= output
    merged.update(output)
    return merged


def test_it_is_a_dict_otherwise() -> None:
    output = made()
    assert isinstance(output, dict) and list(output) == ["loss", "norm"] and len(output) == 2 and "loss" in output
    assert type(unread(output, "loss")) is GroupMean, "none of this has read it"
    assert output.get("other", 3) == 3 and "GroupMean" not in repr(output)
    with pytest.raises(KeyError, match="other"):
        output["other"]
    output["loss"] = torch.tensor(5.0)
    assert output["loss"] == 5.0 and output == {"loss": torch.tensor(5.0), "norm": torch.tensor(2.0)}
    del output["loss"]
    assert list(output) == ["norm"]


def test_a_file_holds_tensors_and_plain_data() -> None:
    buffer = io.BytesIO()
    torch.save({"output": made()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["output"]

    assert isinstance(loaded, dict) and not isinstance(loaded, Reported)
    assert torch.equal(loaded["loss"], weighted(LOSSES, SCALES))


class Counted(TorchDispatchMode):
    """How often a mean was computed under it."""

    means = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.means += func is torch.ops.aten.mean.default and args[0].numel() == 4
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("logged", [False, True])
def test_mean_of_a_group_is_computed_where_it_is_read(logged: bool) -> None:
    model = linear()
    batches = [(torch.randn(2, 3), None) for _ in range(40)]
    trainer = Trainer(
        Update(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch[0]).square().sum()),
        accumulation_steps=4,
    )
    if logged:
        MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=5))
    with Counted() as mode:
        seen = []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(mode.means))
        trainer.run(batches, max_epochs=1)

    assert seen[:4] == [0] * 4
    assert (seen[5:9] == [5] * 4) is logged and (seen[-1] == 0) is not logged


def test_handlers_read_a_plain_dict_and_it_can_be_saved(tmp_path: Path) -> None:
    class Last:
        output: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"output": self.output}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.output = state["output"]

    def run(last: Last) -> Any:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        update = Update(model, optimizer, lambda model, batch: model(batch[0]).square().mean())
        trainer = Trainer(update, accumulation_steps=2)
        trainer.register("last", last)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: setattr(last, "output", trainer.state.output))
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run([(torch.ones(2, 3) * number, None) for number in range(4)], max_epochs=1)
        return trainer.state.output

    first, resumed = Last(), Last()
    output = run(first)
    assert type(output) is dict and output is first.output
    run(resumed)
    assert torch.equal(resumed.output["loss"], output["loss"])


def test_what_is_unequal_is_so_before_it_is_read() -> None:
    expected = {"loss": weighted(LOSSES, SCALES), "norm": torch.tensor(2.0)}
    assert (made() != expected) is False and made() != {}


def test_a_mean_that_is_read_in_inference_mode_is_a_tensor_like_others() -> None:
    output = made()
    with torch.inference_mode():
        assert not output["loss"].is_inference()
    output["loss"].add_(1)
