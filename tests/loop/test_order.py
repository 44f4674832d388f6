"""The order of all events at every boundary: one golden table."""

import pytest
from ignite.engine import Events
from ignite.metrics import Average
from torch import nn

import ignite_engine
from ignite_engine import Trainer, TrainingEvents, create_evaluator
from ignite_engine.events import Phase
from ignite_engine.handlers import Checkpoint, Evaluation
from tests.kit.floors import has, of
from tests.kit.tiny import Passes, numbers_loader, trainer_of

SHORT = {
    "fetch": "GET_BATCH_STARTED GET_BATCH_COMPLETED",
    "fetch-of-next-pass": "GET_BATCH_STARTED DATALOADER_STOP_ITERATION GET_BATCH_COMPLETED",
    "micro-batch": "FORWARD_STARTED FORWARD_COMPLETED BACKWARD_COMPLETED",
    "step": "OPTIMIZER_STEP_STARTED OPTIMIZER_STEP_COMPLETED",
    "update": "ITERATION_STARTED micro-batch step ITERATION_COMPLETED",
    "evaluation": "EVALUATION_STARTED EVALUATION_COMPLETED",
}
"""What always comes together; anything else between shows in full."""


def record(trainer):
    """Gets each event as it is fired, before its other handlers; a line ends with a step boundary or a pause."""
    lines = [""]

    def handler_of(name):
        def note(*_, **__):
            lines[-1] = f"{lines[-1]} {name}".strip()
            for short, long in SHORT.items():
                lines[-1] = lines[-1].replace(long, short)
            if name in ("RESUME_POINT", "INTERRUPT"):
                lines[-1] = f"{trainer.state.epoch}.{trainer.state.iteration} {lines[-1]}"
                lines.append("")

        note.phase = Phase.FIRST
        return note

    for event in (*Events, *TrainingEvents):
        if event is not Events.EXCEPTION_RAISED:
            trainer.add_event_handler(event, handler_of(event.name))
    return lines


def on(event, call):
    return lambda trainer, folder: trainer.add_event_handler(event, lambda: call(trainer))


def value(trainer):
    trainer.state.metrics["x"] = 1.0


def evaluated(trainer, folder):
    evaluator = create_evaluator(nn.Identity(), lambda _, batch: 1.0, {"x": Average()})
    Evaluation(evaluator, [1]).attach(trainer, Events.ITERATION_COMPLETED(once=1) | Events.EPOCH_COMPLETED)
    Checkpoint(folder).attach(trainer, Events.EPOCH_COMPLETED)


def swallowed(trainer, folder):
    trainer.add_event_handler(Events.ITERATION_STARTED(once=1), lambda: 1 / 0)
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)


def cut_by_a_value(trainer, folder):
    trainer.add_event_handler(FIRST, lambda: value(trainer))
    trainer.add_event_handler(TrainingEvents.METRICS_READY, lambda: trainer.terminate_epoch())


def stop(trainer):
    trainer.request_stop("enough")


FIRST, SECOND = Events.ITERATION_COMPLETED(once=1), Events.ITERATION_COMPLETED(once=2)
TWO_PASSES = {"max_epochs": 2}


def batches(count=2):
    return numbers_loader(2 * count, 2)


def windows(count=None, **options):
    return ignite_engine.Windows([1, 2], lambda name: batches(count or name), **options)


CASES = {
    "two epochs": (None, {}, batches, TWO_PASSES),
    "groups": (None, {"accumulation_steps": 2}, lambda: batches(3), {}),
    "skipped": (None, {"weight_fn": lambda batch: 0}, batches, {}),
    "evaluated and saved": (evaluated, {}, batches, {}),
    "values of an epoch": (on(Events.EPOCH_COMPLETED, value), {}, batches, TWO_PASSES),
    "values at the start": (on(Events.STARTED, value), {}, batches, {}),
    "values at the end": (on(Events.COMPLETED, value), {}, batches, {}),
    "without a length": (None, {}, lambda: Passes(2, 1), TWO_PASSES),
    "epochs beyond a pass": (None, {}, batches, {"epoch_length": 3}),
    "stop": (on(FIRST, stop), {}, batches, TWO_PASSES),
    "stop within a group": (
        on(TrainingEvents.BACKWARD_COMPLETED(once=1), stop),
        {"accumulation_steps": 2},
        lambda: batches(3),
        {},
    ),
    "terminate before an iteration": (on(Events.ITERATION_STARTED(once=2), Trainer.terminate), {}, batches, {}),
    "terminate at the start": (on(Events.STARTED, Trainer.terminate), {}, batches, {}),
    "cut": (on(FIRST, Trainer.terminate_epoch), {}, batches, TWO_PASSES),
    "cut by a value": (cut_by_a_value, {}, batches, TWO_PASSES),
    "swallowed error": (swallowed, {}, batches, TWO_PASSES),
    **of(
        "windows",
        {
            "windows": (None, {}, windows, {}),
            "windows in two epochs": (None, {}, lambda: windows(1, per_epoch=1), TWO_PASSES),
        },
    ),
}


GOLDEN = {
    "two epochs": """
        1.1 STARTED EPOCH_STARTED fetch update RESUME_POINT
        1.2 fetch update EPOCH_COMPLETED RESUME_POINT
        2.3 EPOCH_STARTED fetch-of-next-pass update RESUME_POINT
        2.4 fetch update EPOCH_COMPLETED RESUME_POINT
        COMPLETED
    """,
    "groups": """
        1.1 STARTED EPOCH_STARTED fetch ITERATION_STARTED micro-batch micro-batch step ITERATION_COMPLETED RESUME_POINT
        1.2 fetch update EPOCH_COMPLETED RESUME_POINT
        COMPLETED
    """,
    "skipped": """
        1.1 STARTED EPOCH_STARTED fetch ITERATION_STARTED OPTIMIZER_STEP_SKIPPED ITERATION_COMPLETED RESUME_POINT
        1.2 fetch ITERATION_STARTED OPTIMIZER_STEP_SKIPPED ITERATION_COMPLETED EPOCH_COMPLETED RESUME_POINT
        COMPLETED
    """,
    "evaluated and saved": """
        1.1 STARTED EPOCH_STARTED fetch update evaluation METRICS_READY RESUME_POINT
        1.2 fetch update EPOCH_COMPLETED evaluation METRICS_READY RESUME_POINT
        CHECKPOINT_SAVED COMPLETED
    """,
    "values of an epoch": """
        1.1 STARTED EPOCH_STARTED fetch update RESUME_POINT
        1.2 fetch update EPOCH_COMPLETED METRICS_READY RESUME_POINT
        2.3 EPOCH_STARTED fetch-of-next-pass update RESUME_POINT
        2.4 fetch update EPOCH_COMPLETED METRICS_READY RESUME_POINT
        COMPLETED
    """,
    "values at the start": """
        0.0 STARTED METRICS_READY RESUME_POINT
        1.1 EPOCH_STARTED fetch update RESUME_POINT
        1.2 fetch update EPOCH_COMPLETED RESUME_POINT
        COMPLETED
    """,
    "values at the end": """
        1.1 STARTED EPOCH_STARTED fetch update RESUME_POINT
        1.2 fetch update EPOCH_COMPLETED RESUME_POINT
        COMPLETED METRICS_READY
    """,
    "without a length": """
        1.1 STARTED EPOCH_STARTED fetch ITERATION_STARTED ITERATION_COMPLETED RESUME_POINT
        1.2 fetch ITERATION_STARTED ITERATION_COMPLETED RESUME_POINT
        1.2 GET_BATCH_STARTED DATALOADER_STOP_ITERATION EPOCH_COMPLETED RESUME_POINT
        2.3 EPOCH_STARTED fetch ITERATION_STARTED ITERATION_COMPLETED RESUME_POINT
        2.3 GET_BATCH_STARTED DATALOADER_STOP_ITERATION EPOCH_COMPLETED RESUME_POINT
        COMPLETED
    """,
    "epochs beyond a pass": """
        1.1 STARTED EPOCH_STARTED fetch update RESUME_POINT
        1.2 fetch update RESUME_POINT
        1.3 fetch-of-next-pass update EPOCH_COMPLETED RESUME_POINT
        COMPLETED
    """,
    "stop": """
        1.1 STARTED EPOCH_STARTED fetch update RESUME_POINT
        TERMINATE COMPLETED
    """,
    "stop within a group": """
        1.1 STARTED EPOCH_STARTED fetch ITERATION_STARTED micro-batch micro-batch step ITERATION_COMPLETED RESUME_POINT
        TERMINATE COMPLETED
    """,
    "terminate before an iteration": """
        1.1 STARTED EPOCH_STARTED fetch update RESUME_POINT
        fetch ITERATION_STARTED TERMINATE COMPLETED
    """,
    "terminate at the start": """
        0.0 STARTED RESUME_POINT
        TERMINATE COMPLETED
    """,
    "cut": """
        1.1 STARTED EPOCH_STARTED fetch update TERMINATE_SINGLE_EPOCH EPOCH_COMPLETED RESUME_POINT
        2.2 EPOCH_STARTED fetch update RESUME_POINT
        2.3 fetch update EPOCH_COMPLETED RESUME_POINT
        COMPLETED
    """,
    "cut by a value": """
        1.1 STARTED EPOCH_STARTED fetch update METRICS_READY TERMINATE_SINGLE_EPOCH EPOCH_COMPLETED RESUME_POINT
        2.2 EPOCH_STARTED fetch update RESUME_POINT
        2.3 fetch update EPOCH_COMPLETED RESUME_POINT
        COMPLETED
    """,
    "swallowed error": """
        1.1 STARTED EPOCH_STARTED fetch ITERATION_STARTED EPOCH_COMPLETED RESUME_POINT
        2.2 EPOCH_STARTED fetch update RESUME_POINT
        2.3 fetch-of-next-pass update EPOCH_COMPLETED RESUME_POINT
        COMPLETED
    """,
    "windows": """
        1.1 STARTED EPOCH_STARTED fetch WINDOW_STARTED update RESUME_POINT
        1.1 GET_BATCH_STARTED WINDOW_COMPLETED RESUME_POINT
        1.2 GET_BATCH_COMPLETED WINDOW_STARTED update RESUME_POINT
        1.3 fetch update RESUME_POINT
        1.3 GET_BATCH_STARTED WINDOW_COMPLETED RESUME_POINT
        1.3 DATALOADER_STOP_ITERATION EPOCH_COMPLETED RESUME_POINT
        COMPLETED
    """,
    "windows in two epochs": """
        1.1 STARTED EPOCH_STARTED fetch WINDOW_STARTED update RESUME_POINT
        1.1 GET_BATCH_STARTED WINDOW_COMPLETED RESUME_POINT
        1.1 DATALOADER_STOP_ITERATION EPOCH_COMPLETED RESUME_POINT
        2.2 EPOCH_STARTED fetch WINDOW_STARTED update RESUME_POINT
        2.2 GET_BATCH_STARTED WINDOW_COMPLETED RESUME_POINT
        2.2 DATALOADER_STOP_ITERATION EPOCH_COMPLETED RESUME_POINT
        COMPLETED
    """,
}
AFTER = {
    1: """
        1.2 STARTED fetch update EPOCH_COMPLETED RESUME_POINT
        2.3 CHECKPOINT_SAVED EPOCH_STARTED fetch-of-next-pass update RESUME_POINT
        2.4 fetch update EPOCH_COMPLETED RESUME_POINT
        CHECKPOINT_SAVED COMPLETED
    """,
    2: """
        2.3 STARTED EPOCH_STARTED fetch-of-next-pass update RESUME_POINT
        2.4 fetch update EPOCH_COMPLETED RESUME_POINT
        CHECKPOINT_SAVED COMPLETED
    """,
    4: "STARTED COMPLETED",
}
"""By the iteration after which the first run of two epochs of two iterations ended."""


def rows(text):
    return [line.strip() for line in text.strip().splitlines()]


def run(name, folder):
    prepare, options, data, limits = CASES[name]
    trainer = Trainer(lambda *_: 1.0) if name == "without a length" else trainer_of(**options)
    if prepare is not None:
        prepare(trainer, folder)
    lines = record(trainer)
    trainer.run(data(), **limits)
    return [line for line in lines if line]


@pytest.mark.row("A4", "A5")
@pytest.mark.parametrize("name", CASES)
def test_order_of_events(name, tmp_path):
    assert run(name, tmp_path) == rows(GOLDEN[name])


def test_every_case_has_its_order():
    of_windows = {name for name in GOLDEN if name.startswith("windows")}
    assert GOLDEN.keys() == CASES.keys() | (set() if has("windows") else of_windows)


def goes_on(folder, stop_at, how):
    """The events of the second of two runs."""
    trainer = trainer_of()
    Checkpoint(folder).attach(trainer)
    if stop_at < 4:
        event = Events.ITERATION_COMPLETED(once=stop_at)
        trainer.add_event_handler(event, trainer.interrupt if how == "paused" else lambda: stop(trainer))
    trainer.run(batches(), max_epochs=2)
    if how == "resumed":
        trainer, checkpoint = trainer_of(), Checkpoint(folder)
        checkpoint.attach(trainer)
        checkpoint.resume()
    lines = record(trainer)
    trainer.run(batches(), max_epochs=2)
    return [line for line in lines if line]


@pytest.mark.parametrize("how", ["resumed", "continued", "paused"])
@pytest.mark.parametrize("stop_at", AFTER)
def test_order_of_events_of_a_run_that_goes_on(stop_at, how, tmp_path):
    """No EPOCH_STARTED for an epoch that has begun; a finished run only completes."""
    if stop_at < 4 or how == "resumed":
        assert goes_on(tmp_path, stop_at, how) == rows(AFTER[stop_at])
