"""The captured update computes what Update computes, and its runs resume bit for bit."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor

from ignite_engine import Trainer, Update, loader
from ignite_engine.handlers import Checkpoint
from ignite_engine.task import find_task
from tests.builders import Numbers, linear, mse, one
from tests.faults.commands import Command

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "captured_update.py"
captured: ModuleType = sys.modules[find_task("captured_update.py:build", ROOT / "examples").__module__]

needs_compiler = pytest.mark.skipif(
    shutil.which(captured.COMPILER) is None, reason="needs a C++ compiler, which torch.compile calls"
)
SHORT = 16  # an epoch's last iteration, which has a smaller batch
CLIP_NORM = 1.5


@pytest.fixture(autouse=True)
def graphs_of_this_test() -> Iterator[None]:
    """torch keeps at most eight graphs of one function in a process."""
    yield
    torch.compiler.reset()


def trained(trainer: Trainer) -> dict[str, Tensor]:
    """Weights and AdamW's state, by name."""
    update: Any = trainer.update
    found = {name: value.detach().clone() for name, value in update.model.named_parameters()}
    for name, parameter in update.model.named_parameters():
        found |= {f"{name}/{key}": value.clone() for key, value in update.optimizer.state[parameter].items()}
    return found


@needs_compiler
@pytest.mark.slow  # compiles two graphs
def test_resumed_at_a_short_batch_it_ends_with_the_bits_of_the_whole_run(tmp_path: Path) -> None:
    """With dropout and a schedule over the run."""
    whole = captured.build()
    whole.run(captured.data(), max_epochs=2)

    stopped = captured.build()
    Checkpoint(tmp_path, strict=True).attach(stopped)
    stopped.add_event_handler(Events.ITERATION_COMPLETED(once=SHORT - 1), lambda: stopped.request_stop("a test"))
    stopped.run(captured.data(), max_epochs=2)
    assert stopped.state.iteration == stopped.state.optimizer_steps == SHORT - 1
    torch.compiler.reset()  # a process of its own compiles first for the short batch
    resumed, checkpoint = captured.build(), Checkpoint(tmp_path)
    checkpoint.attach(resumed)
    checkpoint.resume()
    resumed.run(captured.data(), max_epochs=2)

    expected, found = trained(whole), trained(resumed)
    assert resumed.state.optimizer_steps == 2 * SHORT
    assert len(expected) == 4 * 4 and expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@needs_compiler
def test_it_computes_what_update_computes_and_resumes_its_checkpoint(tmp_path: Path) -> None:
    def run(update: type, folder: Path | None, iterations: int) -> tuple[Trainer, list[list[float]]]:
        model = linear()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
        trainer, outputs = Trainer(update(model, optimizer, mse, clip_norm=CLIP_NORM)), []
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: outputs.append([float(each) for each in trainer.state.output.values()])
        )
        if folder is not None:
            checkpoint = Checkpoint(folder)
            checkpoint.attach(trainer)
            checkpoint.resume()
        trainer.run(loader(Numbers(24), batch_size=4), max_iters=iterations)
        return trainer, outputs

    plain, expected = run(Update, None, 40)
    graph, outputs = run(captured.CapturedUpdate, None, 40)
    run(Update, tmp_path, 20)
    resumed, rest = run(captured.CapturedUpdate, tmp_path, 40)

    assert {norm > CLIP_NORM for _, norm in expected} == {True, False}  # some were clipped
    for each, losses in ((graph, outputs), (resumed, rest)):
        torch.testing.assert_close(one(each.update.model), one(plain.update.model), rtol=0, atol=1e-6)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[-len(losses) :]), rtol=1e-5, atol=1e-6)
    assert len(rest) == 20 and not torch.equal(one(graph.update.model), one(linear()))


def test_an_optimizer_of_several_groups_is_refused() -> None:
    model = linear()
    groups = [{"params": [parameter]} for parameter in model.parameters()]

    with pytest.raises(ValueError, match="without groups"):
        captured.CapturedUpdate(model, torch.optim.AdamW(groups), mse, clip_norm=1.0)


def test_without_a_compiler_it_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    example = Command(tmp_path, str(SCRIPT), function="script")
    _, errors = example.communicate()

    assert example.returncode == 1
    assert errors == "torch.compile needs a C++ compiler, no-such-compiler is not installed: install it or set CXX.\n"
