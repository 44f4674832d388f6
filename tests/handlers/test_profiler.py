"""Windows of a profile: which iterations they hold, how they end, and that training does not notice."""

import gzip
import json

import pytest
import torch
from ignite.engine import Events

from ignite_engine import create_evaluator, loader
from ignite_engine.handlers import Checkpoint, Evaluation
from ignite_engine.handlers.profiler import Profiler
from tests.kit.processes import ranks
from tests.kit.refusals import refusals
from tests.kit.tiny import Numbers, linear, numbers_loader, trainer_of, weights

EACH = Events.ITERATION_COMPLETED


@pytest.fixture(autouse=True)
def no_profiler_is_left():
    """The next one records."""
    yield
    with torch.profiler.profile() as profile:
        torch.ones(1).add(1)
    assert profile.key_averages()


def windows(directory):
    """The iterations of each window, which has its two files."""
    found = sorted(path.name for path in (directory / "profiles").glob("*"))
    names = [name.removesuffix(".txt") for name in found if name.endswith(".txt")]
    assert found == sorted(f"{name}{ending}" for name in names for ending in (".json.gz", ".txt"))
    return sorted(tuple(map(int, name.split("iterations_")[1].split("_to_"))) for name in names)


def steps_in(directory, first):
    """How many iterations a trace holds."""
    (path,) = (directory / "profiles").glob(f"*_iterations_{first}_to_*.json.gz")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return len({each["name"] for each in events if each.get("name", "").startswith("ProfilerStep#")})


@pytest.mark.row("F8")
def test_windows_hold_the_iterations_of_the_schedule_and_training_does_not_notice(tmp_path):
    bare = trainer_of(linear(dropout=True))
    torch.manual_seed(1)
    bare.run(numbers_loader(24, shuffle=True), max_epochs=2)
    trainer = trainer_of(linear(dropout=True))
    # over an epoch's end, with an evaluation and a save in the background in the window
    Profiler(tmp_path, wait=7, warmup=2, active=4, repeat=1).attach(trainer)
    Profiler(tmp_path, wait=14, warmup=1, active=2, repeat=2, record_shapes=True).attach(trainer)
    Evaluation(create_evaluator(trainer.update.model, lambda model, batch: model(batch[0])), numbers_loader(4)).attach(
        trainer, EACH(every=3)
    )
    Checkpoint(tmp_path / "checkpoints", background=True).attach(trainer, EACH(every=4))
    torch.manual_seed(1)
    trainer.run(numbers_loader(24, shuffle=True), max_epochs=2)

    assert windows(tmp_path) == [(10, 13), (16, 17)]
    assert [steps_in(tmp_path, first) for first in (10, 16)] == [4, 2]
    assert torch.equal(weights(trainer), weights(bare))


def test_there_are_as_many_windows_as_were_asked_for_whose_operators_are_logged(tmp_path, caplog):
    """Of 24 iterations windows of 1 + 1 + 2 are asked for twice; there is time for six. Then nothing listens."""
    caplog.set_level("INFO")
    trainer = trainer_of()
    Profiler(tmp_path, wait=1, warmup=1, active=2, repeat=2).attach(trainer)
    assert "Profiler" in trainer.describe()
    trainer.run(numbers_loader(24), max_epochs=2)
    trainer.run(numbers_loader(24), max_epochs=3)
    assert windows(tmp_path) == [(3, 4), (7, 8)] and "Profiler" not in trainer.describe()
    for text in (tmp_path / "profiles").glob("*.txt"):
        table = text.read_text().rstrip()
        assert "aten::addmm" in table and table in caplog.text


def force(trainer):
    raise KeyboardInterrupt


ENDS = {
    "the end": (10, None, None, [(4, 5)]),
    "a stop": (40, EACH(once=5), lambda trainer: trainer.request_stop("test"), [(4, 5)]),
    "an exception": (40, Events.ITERATION_STARTED(once=6), lambda trainer: 1 / 0, [(4, 5)]),
    "force": (40, EACH(once=5), force, []),
    "in the warm-up": (6, None, None, []),
}


@pytest.mark.row("F8")
@pytest.mark.parametrize("how", ENDS)
def test_a_window_in_which_the_run_ends_holds_what_was_recorded(how, tmp_path):
    count, event, act, expected = ENDS[how]
    trainer = trainer_of()
    Profiler(tmp_path, wait=2, warmup=1, active=100).attach(trainer)
    if act is not None:
        trainer.add_event_handler(event, act)
    try:
        trainer.run(numbers_loader(count))
    except (ZeroDivisionError, KeyboardInterrupt):
        assert trainer.state.status != "completed"
    assert windows(tmp_path) == expected


def test_a_paused_run_ends_its_window_and_the_next_one_ends_as_well(tmp_path):
    trainer = trainer_of()
    Profiler(tmp_path, wait=1, warmup=1, active=9, repeat=2).attach(trainer)
    trainer.add_event_handler(EACH(once=4), trainer.interrupt)
    trainer.run(numbers_loader(20))
    assert trainer.state.iteration == 4 and windows(tmp_path) == [(3, 4)]
    trainer.run(numbers_loader(20))
    assert windows(tmp_path) == [(3, 4), (7, 10)]


def test_beside_another_profiler_of_the_process_a_window_waits(tmp_path):
    inner, outer = trainer_of(), trainer_of()
    Profiler(tmp_path / "outer", wait=0, warmup=1, active=2).attach(outer)
    Profiler(tmp_path / "inner", wait=0, warmup=0, active=2).attach(inner)
    outer.add_event_handler(
        Events.ITERATION_STARTED, lambda: inner.run(numbers_loader(4), max_epochs=inner.state.epoch + 1)
    )
    outer.run(numbers_loader(10))
    assert windows(tmp_path / "outer") == [(2, 3)] and windows(tmp_path / "inner") == [(7, 8)]


def wrong(name, value):
    words = f"{name} numbers of ranks" if name == "ranks" else f"{name} whole number at least"
    return f"{name} {value!r}", lambda: Profiler("run", **{name: value}), ValueError, words


WRONG = [("active", 0), ("wait", -1), ("warmup", 0.5), ("ranks", ()), ("ranks", ("0",))]
test_refusals = refusals([wrong(*each) for each in WRONG])


def profiled(rank, folder):
    trainer = trainer_of()
    Profiler(folder, wait=1, warmup=1, active=2, ranks=(1,)).attach(trainer)
    return trainer.run(loader(Numbers(16), 2)).iteration


def test_only_the_ranks_that_were_chosen_are_profiled(tmp_path, caplog):
    assert ranks(2, profiled, tmp_path) == [4, 4]
    assert windows(tmp_path) == [(3, 4)] and list((tmp_path / "profiles").glob("rank_1_*.txt"))
    assert profiled(0, tmp_path / "alone") == 8 and windows(tmp_path / "alone") == []
    assert "profiles nothing" in caplog.text
