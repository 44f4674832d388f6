"""What fails on one rank is named on all of them, in every log and in the summary; real processes."""

import logging
import os
import resource
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer
from ignite_engine.handlers import Checkpoint
from tests.kit import runs
from tests.kit.processes import ranks, start_ranks
from tests.kit.tiers import tiered
from tests.kit.tiny import linear, numbers_loader, trainer_of

TASK = f"{Path(__file__).with_name('failing.py')}:build"


def run_that_fails(folder, world, *, timeout=None, heartbeat_timeout=20.0, **options):
    """The exit code of a run, and what it said."""
    sections = {"run": {"max_epochs": 1}, "update": {"accumulation_steps": None}, "MetricLogger": {"every": 1}}
    watched = {"distributed": {"heartbeat_timeout": heartbeat_timeout, "timeout": timeout}}
    base = {**runs.CONFIG, "task": TASK, "task_options": options}
    process = runs.train(
        runs.write_config(folder, base=base, **sections, **watched), "--nproc-per-node", world, "--backend", "gloo"
    )
    code = process.wait()
    assert runs.group_is_gone(process), "a rank is left"
    return code, process.said()


def log_of(folder, rank):
    return (folder / "run" / "logs" / f"rank_{rank}.log").read_text()


WAITS = {"stop": {"heartbeat_timeout": 3.0}, "hang": {"timeout": 5.0}}
"""Short only where it is waited for: a machine that is busy may keep a rank from its heartbeat."""
AT = "at iteration epoch 1, after"
SHAPES = "float32 [4, 4] [4, 1]"
CASES = {  # how it fails, which rank, words of what is said of it, and the exit code
    "an exception": ("raise", 1, f"rank 1 failed {AT} ValueError: a sample is broken {SHAPES}", 1),
    "an exception on rank 0": ("raise", 0, f"rank 0 failed {AT} ValueError: a sample is broken {SHAPES}", 1),
    "a handler": ("handler", 1, "rank 1 failed iteration 5, KeyError: Broken on ITERATION_COMPLETED", 1),
    "a sample that cannot be read": ("read", 1, f"rank 1 failed {AT} a sample is damaged Unreadable[", 1),
    "an exit": ("exit", 1, f"rank 1 SystemExit(3) {AT} waited", 3),
    "an exit of rank 0": ("exit", 0, f"rank 0 SystemExit(3) {AT}", 3),
    "a kill": ("kill", 1, "Rank 1 SIGKILL. Last heartbeat: iteration", 1),
    "a kill of rank 0": ("kill", 0, "Rank 0 SIGKILL. Last heartbeat: iteration", 1),
    "a stopped process": ("stop", 1, "rank 1 no sign of life Last heartbeat: iteration", 1),
    "a stopped rank 0": ("stop", 0, "rank 0 no sign of life Last heartbeat: iteration", 1),
    "a hang": ("hang", 1, "rank 1 did not come while ranks waited iteration", 1),
}


@pytest.mark.row("G6")
@pytest.mark.parametrize("case", tiered(CASES, "an exception", "an exit of rank 0", "a kill"))
def test_every_rank_and_the_summary_name_what_failed_on_one(case, tmp_path):
    how, failing, words, expected = CASES[case]
    code, said = run_that_fails(tmp_path, 3, how=how, rank=failing, **WAITS.get(how, {}))

    assert code == expected, said
    ended = runs.summary(tmp_path)
    reason = ended["reason"]
    assert ended["status"] == "failed" and not [word for word in words.split() if word not in reason], reason
    if how != "read":  # ahead of the iterations
        assert ended["iteration"] in (4, 5, 6) and ended["metrics"]["loss"] > 0
    # of a process that was killed its parent alone knows how
    line = f"rank {failing} gave no sign of life" if how == "kill" else reason
    if failing == 0:  # whose store is gone: each gives the last heartbeat that it has read
        line = line.partition(" Last heartbeat")[0]
    for rank in {0, 1, 2} - {failing}:
        log = log_of(tmp_path, rank)
        assert any(" ERROR " in each and line in each for each in log.splitlines()), (rank, log)
        assert how != "stop" or "most recent call first" in log, "no stack of those that run"
    assert how != "hang" or "failing.py" in log_of(tmp_path, failing), "no stack of the rank that hangs"
    assert reason.partition(". Last")[0] in said or "a sample is" in said


def test_error_while_one_rank_builds_is_named_once(tmp_path):
    code, said = run_that_fails(tmp_path, 2, how="build")
    assert code == 2 and said.count("no model here") == 1


class TooLong(Exception):
    """With notes that no line should have, and one that it should."""

    def __init__(self):
        super().__init__("x" * 2**21)
        self.__notes__ = ["y" * 2**21, "two\nlines", "short."]


class Picky(Exception):
    """Pickle takes it, and cannot make it again."""

    def __init__(self, host, port):
        super().__init__(f"no answer from {host}:{port}")


def raises(error):
    if dist.get_rank() == 1:
        raise error


class Unsaved:
    """A state that rank 1 cannot give."""

    def __init__(self, error):
        self.error = error

    def state_dict(self):
        raises(self.error)
        return {}

    def load_state_dict(self, state):
        """There is none."""


def stream(error):
    """Without a length; rank 1 cannot read its third batch."""
    for index in range(6):
        if index == 2:
            raises(error)
        yield index


def error_of(rank, case, folder):
    where, error, *_ = ERRORS[case]
    trainer, data = Trainer(lambda engine, batch: raises(error) if where == "update" else None), [0] * 20
    if where == "state":
        trainer, data = trainer_of(DistributedDataParallel(linear())), numbers_loader()
        trainer.register("unsaved", Unsaved(error))
        Checkpoint(folder).attach(trainer)
    try:
        trainer.run(stream(error) if where == "data" else data, max_epochs=1)
    except Exception as error:
        return type(error).__name__, str(error), trainer.state.status


ERRORS = {  # where it is raised, what a peer raises, and words of that
    "update, endless": ("update", TooLong(), "PeerFailed", "rank 1 TooLong: xxx (short)"),
    "data": ("data", OSError(5, "the disk is gone"), "PeerFailed", "rank 1 disk is gone"),
    "state, long": ("state", OSError("x" * 10_000), "OSError", "x" * 10_000),  # more than is exchanged at once
    "state, that pickle cannot carry": ("state", Picky("store", 80), "PeerFailed", "no answer from store:80"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_of_one_rank_is_raised_on_both_with_its_text(case, tmp_path):
    _, error, kind, words = ERRORS[case]
    peer, own = (each.answer() for each in start_ranks(2, error_of, case, tmp_path))
    assert (peer[0], peer[2]) == (kind, "failed") and own == (type(error).__name__, str(error), "failed")
    text = peer[1].replace("Rank", "rank")
    assert not [word for word in words.split() if word not in text] and "two" not in text and len(text) < 11_000


def test_ranks_of_which_one_has_caught_its_own_error_go_on_together():
    def work(rank):
        try:
            Trainer(lambda engine, batch: raises(ValueError("once"))).run([0] * 20)
        except Exception as error:
            caught = type(error).__name__
        if rank == 1:  # its peers are told all the same, and wait for it in the next run
            threading.Event().wait(2.0)
        return caught, Trainer(lambda engine, batch: None).run([0] * 20).status

    assert [each.answer() for each in start_ranks(2, work)] == [
        ("PeerFailed", "completed"),
        ("ValueError", "completed"),
    ]


def test_a_rank_with_more_descriptors_than_select_takes_is_watched():
    def work(rank):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]  # as of tensors that loader workers have sent
        said, handler = [], logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("ignite_engine").addHandler(handler)
        state = Trainer(lambda engine, batch: None).run([0] * 20)
        for descriptor in held:
            os.close(descriptor)
        return said, state.status

    assert ranks(2, work) == [([], "completed")] * 2
