"""Which handlers act again in a replay, and that those of the engine leave no file."""

import ast
import importlib
import inspect

import pytest
from ignite.engine import Events

from ignite_engine import handlers
from ignite_engine.ext.replay import bring_to
from tests.ext.replay.test_replay import content, own_script
from tests.kit.tiny import linear, numbers_loader, trainer_of
from tests.test_architecture import HANDLER_FILES, module_name

HANDLERS = [
    f"{module_name(path)}:{node.name}"
    for path in HANDLER_FILES
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef)
    and any(isinstance(method, ast.FunctionDef) and method.name == "attach" for method in node.body)
]


@pytest.mark.parametrize("name", HANDLERS)
def test_each_handler_says_whether_it_acts_again(name):
    module, _, kind = name.partition(":")
    said = inspect.getattr_static(getattr(importlib.import_module(module), kind), "replayed", None)
    assert isinstance(said, bool), f"{kind}: say replayed = False if it writes, measures time or watches, else True"


class Counter:
    def __init__(self, *, replayed=None):
        self.calls = 0
        if replayed is not None:
            self.replayed = replayed

    def __call__(self, trainer):
        self.calls += 1


def test_handlers_of_the_users_own_act_again_unless_they_say_no(tmp_path):
    counted, left_out = Counter(), Counter(replayed=False)

    def build(directory):
        trainer, arguments = own_script(directory)
        for handler in (counted, left_out):
            trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), handler)
        return trainer, arguments

    trainer, arguments = build(tmp_path / "run")
    trainer.run(**arguments)
    assert counted.calls == left_out.calls == 10
    with bring_to(tmp_path / "run", build, at=10):
        pass
    assert (counted.calls, left_out.calls) == (13, 10)  # from iteration 5 on


def test_no_handler_of_the_engine_writes_a_file(tmp_path):
    def build(directory):
        trainer, few = trainer_of(linear(dropout=True)), Events.ITERATION_COMPLETED(every=4)
        sinks = [handlers.TensorBoardSink(directory)]
        handlers.MetricLogger(directory, sinks=sinks).attach(trainer, few)
        handlers.Export(directory / "exports").attach(trainer, few)
        handlers.Profiler(directory, wait=0, warmup=1, active=2).attach(trainer)
        handlers.StepTimes().attach(trainer, few)
        handlers.MemoryLogger().attach(trainer, few)
        handlers.Throughput().attach(trainer, few)
        handlers.Progress().attach(trainer)
        handlers.SaveEvery(minutes=5).attach(trainer)
        handlers.WallClockLimit(hours=1).attach(trainer)
        handlers.StopFile(directory / "stop").attach(trainer)
        handlers.DigestTrail(directory, every=3).attach(trainer)
        handlers.Checkpoint(directory / "checkpoints").attach(trainer)
        return trainer, {"data": numbers_loader(shuffle=True), "max_epochs": 3}

    trainer, arguments = build(tmp_path)
    trainer.run(**arguments)
    before = content(tmp_path)
    names = {name.partition("/")[0] for name in before}
    assert {"exports", "tensorboard", "trail.jsonl", "history.jsonl"} <= names, names
    with bring_to(tmp_path, build, at=18, before=1) as moment:
        assert moment.difference is None and moment.replayed == 18
    assert content(tmp_path) == before
