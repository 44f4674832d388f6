"""Windows of a profile: which iterations they hold, how they end, and that training does not notice."""

import gzip
import json
import logging
import os
import signal

import pytest
import torch
from ignite.engine import Events

from ignite_engine import create_evaluator, loader
from ignite_engine.engine.bus import handlers_of
from ignite_engine.errors import Interrupted
from ignite_engine.handlers import Checkpoint, Evaluation, GracefulStop, Profiler
from tests.kit.faults import start_child, wait_for
from tests.kit.tiny import Numbers, linear, numbers_loader, on_two_ranks, trainer_of, weights


@pytest.fixture(autouse=True)
def _no_profiler_is_left():
    yield
    assert Profiler._at_work is None and not torch.autograd._profiler_enabled()


def files(directory):
    return sorted(path.name for path in (directory / "profiles").glob("*"))


def steps_in(path):
    """Iterations that a trace holds."""
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
        trainer, Events.ITERATION_COMPLETED(every=3)
    )
    Checkpoint(tmp_path / "checkpoints", background=True).attach(trainer, Events.ITERATION_COMPLETED(every=4))
    torch.manual_seed(1)
    trainer.run(numbers_loader(24, shuffle=True), max_epochs=2)

    names = ["rank_0_iterations_10_to_13", "rank_0_iterations_16_to_17"]
    assert files(tmp_path) == sorted(f"{name}{ending}" for name in names for ending in (".json.gz", ".txt"))
    assert [steps_in(tmp_path / "profiles" / f"{name}.json.gz") for name in names] == [4, 2]
    assert torch.equal(weights(trainer), weights(bare))


def test_one_run_has_as_many_windows_as_were_asked_for(tmp_path):
    """Of 24 iterations windows of 1 + 1 + 2 are asked for twice; there is time for six."""
    trainer = trainer_of()
    Profiler(tmp_path, wait=1, warmup=1, active=2, repeat=2).attach(trainer)
    trainer.run(numbers_loader(24), max_epochs=2)

    names = ["rank_0_iterations_3_to_4", "rank_0_iterations_7_to_8"]
    assert files(tmp_path) == sorted(f"{name}{ending}" for name in names for ending in (".json.gz", ".txt"))


def test_operators_are_logged(tmp_path, caplog):
    trainer = trainer_of()
    Profiler(tmp_path, wait=0, warmup=0, active=1).attach(trainer)
    with caplog.at_level(logging.INFO, "ignite_engine.handlers.profiler"):
        trainer.run(numbers_loader(4))
    (text,) = (tmp_path / "profiles").glob("*.txt")
    table = text.read_text().rstrip()
    assert table.splitlines()[0].split() == ["operator", "calls", "own", "ms,", "host", "share"]
    assert "aten::addmm" in table and table in caplog.text


def test_when_all_windows_are_over_nothing_listens(tmp_path):
    trainer = trainer_of()
    Profiler(tmp_path, wait=0, warmup=1, active=1).attach(trainer)
    trainer.run(numbers_loader(12))
    assert not handlers_of(trainer, Events.ITERATION_COMPLETED)
    trainer.run(numbers_loader(12), max_epochs=2)
    assert len(files(tmp_path)) == 2


@pytest.mark.row("F8")
@pytest.mark.parametrize("how", ["the end", "a stop", "an exception", "terminate"])
def test_a_window_in_which_the_run_ends_holds_what_was_recorded(how, tmp_path):
    trainer = trainer_of()
    Profiler(tmp_path, wait=2, warmup=1, active=100).attach(trainer)
    fifth = Events.ITERATION_STARTED(once=6) if how == "an exception" else Events.ITERATION_COMPLETED(once=5)
    act = {
        "the end": lambda: None,
        "a stop": lambda: trainer.request_stop("test"),
        "an exception": lambda: 1 / 0,
        "terminate": trainer.terminate,
    }
    trainer.add_event_handler(fifth, act[how])
    count = 10 if how == "the end" else 40
    if how == "an exception":
        with pytest.raises(ZeroDivisionError):
            trainer.run(numbers_loader(count))
    else:
        trainer.run(numbers_loader(count))
    assert files(tmp_path) == ["rank_0_iterations_4_to_5.json.gz", "rank_0_iterations_4_to_5.txt"]


def test_a_paused_run_ends_its_window_and_the_next_one_ends_as_well(tmp_path):
    trainer = trainer_of()
    Profiler(tmp_path, wait=1, warmup=1, active=9, repeat=2).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), trainer.interrupt)
    trainer.run(numbers_loader(20))
    assert trainer.state.iteration == 4 and not torch.autograd._profiler_enabled()
    trainer.run(numbers_loader(20))
    assert trainer.state.iteration == 10
    assert [name for name in files(tmp_path) if name.endswith("txt")] == [
        "rank_0_iterations_3_to_4.txt",
        "rank_0_iterations_7_to_10.txt",
    ]


def test_an_end_by_force_writes_nothing(tmp_path):
    trainer = trainer_of()
    Profiler(tmp_path, wait=0, warmup=0, active=9).attach(trainer)

    def force():
        raise KeyboardInterrupt

    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), force)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(numbers_loader(20))
    assert files(tmp_path) == []


def test_a_signal_in_a_window_saves_and_writes_what_was_recorded(tmp_path):
    def train():
        trainer = trainer_of()
        Profiler(tmp_path, wait=2, warmup=1, active=50).attach(trainer)
        Checkpoint(tmp_path / "checkpoints").attach(trainer)
        GracefulStop().attach(trainer)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Interrupted):
            trainer.run(numbers_loader(60))
        return [each.name for each in (tmp_path / "checkpoints").glob("iteration_*")]

    assert wait_for(start_child(train)) == (0, ["iteration_00000006"])
    assert files(tmp_path) == ["rank_0_iterations_4_to_6.json.gz", "rank_0_iterations_4_to_6.txt"]


def test_a_rollback_ends_the_window_and_training_goes_on(tmp_path):
    trainer = trainer_of(non_finite="rollback")
    data = [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(8)]
    data[4] = (torch.full((2, 3), torch.nan), data[4][1])
    Checkpoint(tmp_path / "checkpoints").attach(trainer, Events.ITERATION_COMPLETED)
    Profiler(tmp_path, wait=1, warmup=1, active=9).attach(trainer)
    trainer.run(data)
    assert trainer.state.iteration == 8
    assert files(tmp_path)[1] == "rank_0_iterations_3_to_4.txt"


def test_a_window_that_has_only_warmed_up_writes_nothing(tmp_path):
    trainer = trainer_of()
    Profiler(tmp_path, wait=1, warmup=5, active=1).attach(trainer)
    trainer.run(numbers_loader(8))
    assert files(tmp_path) == []


def test_a_resumed_run_counts_its_own_iterations(tmp_path):
    def train(until):
        trainer = trainer_of()
        checkpoint = Checkpoint(tmp_path / "checkpoints")
        checkpoint.attach(trainer)
        Profiler(tmp_path, wait=3, warmup=1, active=1).attach(trainer)
        checkpoint.resume()
        trainer.run(numbers_loader(40), max_iters=until)
        return weights(trainer)

    train(6)
    resumed = train(12)
    assert [name for name in files(tmp_path) if name.endswith(".txt")] == [
        "rank_0_iterations_11_to_11.txt",
        "rank_0_iterations_5_to_5.txt",
    ]
    whole = trainer_of()
    whole.run(numbers_loader(40), max_iters=12)
    assert torch.equal(resumed, weights(whole))


def test_of_two_trainers_in_a_process_and_beside_another_profiler_a_window_waits(tmp_path):
    inner, outer = trainer_of(), trainer_of()
    Profiler(tmp_path / "outer", wait=0, warmup=1, active=2).attach(outer)
    Profiler(tmp_path / "inner", wait=0, warmup=0, active=2).attach(inner)
    outer.add_event_handler(
        Events.ITERATION_STARTED, lambda: inner.run(numbers_loader(4), max_epochs=inner.state.epoch + 1)
    )
    outer.run(numbers_loader(10))
    assert files(tmp_path / "outer")[0] == "rank_0_iterations_2_to_3.json.gz"
    assert files(tmp_path / "inner")[0] == "rank_0_iterations_7_to_8.json.gz"

    beside = trainer_of()
    Profiler(tmp_path / "beside", wait=0, warmup=0, active=1).attach(beside)
    with torch.autograd.profiler.profile() as users:
        beside.run(numbers_loader(4))
    assert files(tmp_path / "beside") == [] and len(users.function_events or [])


def test_numbers_out_of_range_are_refused(tmp_path, caplog):
    for options in ({"active": 0}, {"wait": -1}, {"warmup": 0.5}, {"repeat": 0}):
        with pytest.raises(ValueError, match="must be a whole number of at least"):
            Profiler(tmp_path, **options)
    for ranks in ((), (-1,), ("0",)):
        with pytest.raises(ValueError, match="ranks must be numbers of ranks"):
            Profiler(tmp_path, ranks=ranks)
    Profiler(tmp_path, ranks=(3,)).attach(trainer_of())
    assert "profiles nothing: this run has 1 ranks" in caplog.text


def _cases(rank, directory):
    trainer = trainer_of()
    Profiler(directory, wait=1, warmup=1, active=2, ranks=(1,)).attach(trainer)
    trainer.run(loader(Numbers(16), 2))
    return {"iteration": trainer.state.iteration}


@pytest.mark.distributed
def test_only_the_ranks_that_were_chosen_are_profiled(tmp_path):
    assert on_two_ranks(lambda rank: _cases(rank, tmp_path), tmp_path / "store")["iteration"] == [4, 4]
    assert files(tmp_path) == ["rank_1_iterations_3_to_4.json.gz", "rank_1_iterations_3_to_4.txt"]
