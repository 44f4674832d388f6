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
    """The last iteration of each window, which has its two files."""
    found = sorted(path.name for path in (directory / "profiles").glob("*"))
    names = [name.removesuffix(".txt") for name in found if name.endswith(".txt")]
    assert found == sorted(f"{name}{ending}" for name in names for ending in (".json.gz", ".txt"))
    return sorted(int(name.split("to_iteration_")[1]) for name in names)


def steps_in(directory, last):
    """How many iterations a trace holds."""
    (path,) = (directory / "profiles").glob(f"*_to_iteration_{last}.json.gz")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return len({each["name"] for each in events if each.get("name", "").startswith("ProfilerStep#")})


@pytest.mark.row("F8")
def test_windows_hold_the_iterations_of_the_schedule(tmp_path, caplog):
    caplog.set_level("INFO")
    trainer = trainer_of(linear(dropout=True))
    # over an epoch's end, with an evaluation and a save in the background in the window
    Profiler(tmp_path, wait=7, warmup=2, active=4, repeat=2, record_shapes=True).attach(trainer)
    Evaluation(create_evaluator(trainer.update.model, lambda model, batch: model(batch[0])), numbers_loader(4)).attach(
        trainer, EACH(every=3)
    )
    Checkpoint(tmp_path / "checkpoints", background=True).attach(trainer, EACH(every=4))
    torch.manual_seed(1)
    trainer.run(numbers_loader(24, shuffle=True), max_epochs=3)

    assert windows(tmp_path) == [13, 26]
    assert [steps_in(tmp_path, last) for last in (13, 26)] == [4, 4]
    for text in (tmp_path / "profiles").glob("*.txt"):
        table = text.read_text().rstrip()
        assert "aten::addmm" in table and table in caplog.text


def test_training_has_the_same_bits(tmp_path):
    trained = []
    for profiles in (False, True):
        trainer = trainer_of(linear(dropout=True))
        if profiles:
            Profiler(tmp_path, wait=1, warmup=1, active=2).attach(trainer)
        torch.manual_seed(1)
        trainer.run(numbers_loader(24, shuffle=True), max_epochs=1)
        trained.append(weights(trainer))
    assert windows(tmp_path) == [4] and torch.equal(*trained)


ENDS = {
    "the end": (10, None, None, [5]),
    "a stop": (40, EACH(once=5), lambda trainer: trainer.request_stop("test"), [5]),
    "an exception": (40, Events.ITERATION_STARTED(once=6), lambda trainer: 1 / 0, [5]),
    "in the warm-up": (4, None, None, []),
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
    except ZeroDivisionError:
        assert trainer.state.status != "completed"
    assert windows(tmp_path) == expected


def wrong(name, value):
    return f"{name} {value!r}", lambda: Profiler("run", **{name: value}), ValueError, f"{name} at least {name}={value}"


test_refusals = refusals([wrong("active", 0), wrong("wait", -1)])


def profiled(rank, folder):
    trainer = trainer_of()
    Profiler(folder, wait=1, warmup=1, active=2, ranks=(1,)).attach(trainer)
    return trainer.run(loader(Numbers(16), 2)).iteration


def test_only_the_ranks_that_were_chosen_are_profiled(tmp_path):
    assert ranks(2, profiled, tmp_path) == [4, 4]
    assert windows(tmp_path) == [4] and list((tmp_path / "profiles").glob("rank_1_*.txt"))
