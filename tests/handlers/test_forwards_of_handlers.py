"""With FSDP2 a handler may call the model at any event: no weight changes by it, and none is read that was freed."""

import pytest
from ignite.engine import Events

from ignite_engine import TrainingEvents
from tests.kit.sharded import look_at, run_phases, train, trainer_in

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_a_forward_of_a_handler_changes_nothing(tmp_path):
    def trained(event=None, **saves):
        folder = tmp_path / f"{event} {saves}"
        trainer, checkpoint, data = trainer_in("fsdp", folder)
        if saves:
            checkpoint.attach(trainer, Events.ITERATION_COMPLETED(**saves))
        if event is not None:
            trainer.add_event_handler(event, look_at, trainer.update.model)
        return train(trainer, data)["state"]

    def work():
        plain = trained()
        looked = {
            f"{event} {saves}": trained(event, **saves)
            for event in (TrainingEvents.OPTIMIZER_STEP_STARTED, TrainingEvents.OPTIMIZER_STEP_COMPLETED)
            for saves in ({}, {"every": 1})
        }
        return {name: state == plain for name, state in looked.items()}

    for answers in run_phases(tmp_path, {"fsdp": (2, work)})["fsdp"]:
        assert all(answers.values()), answers
