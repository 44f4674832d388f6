"""With FSDP2 a handler may call the model at any event: no weight changes by it, and none is read that was freed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ignite.engine import Events

from ignite_engine import TrainingEvents
from tests.sharded import look_at, run_phases, train, trainer_in

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_a_forward_of_a_handler_changes_nothing(tmp_path: Path) -> None:
    def trained(event: Any = None, **saves: Any) -> Any:
        folder = tmp_path / f"{event} {saves}"
        trainer, checkpoint, data = trainer_in("fsdp", folder)
        if saves:
            checkpoint.attach(trainer, Events.ITERATION_COMPLETED(**saves))
        if event is not None:
            trainer.add_event_handler(event, look_at, trainer.update.model)  # type: ignore[attr-defined]
        return train(trainer, data)["state"]

    def work() -> Any:
        plain = trained()
        looked = {
            f"{event} {saves}": trained(event, **saves)
            for event in (TrainingEvents.OPTIMIZER_STEP_STARTED, TrainingEvents.OPTIMIZER_STEP_COMPLETED)
            for saves in ({}, {"every": 1})
        }
        return {name: state == plain for name, state in looked.items()}

    for answers in run_phases(tmp_path, {"fsdp": (2, work)})["fsdp"]:
        assert all(answers.values()), answers
