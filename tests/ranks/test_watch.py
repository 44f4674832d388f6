"""What fails on one rank is named on all of them, in every log and in the summary; real processes."""

import logging
import os
import resource
from pathlib import Path

import pytest

from ignite_engine import Trainer
from tests.kit import runs
from tests.kit.processes import ranks, start_ranks

TASK = f"{Path(__file__).with_name('failing.py')}:build"


def run_that_fails(folder, world, *, timeout=None, heartbeat_timeout=20.0, **options):
    """The exit code of a run, and what it said."""
    sections = {"run": {"max_epochs": 1}, "update": {"accumulation_steps": None}, "logging": {"every": 1}}
    watched = {"distributed": {"heartbeat_timeout": heartbeat_timeout, "timeout": timeout}}
    base = {**runs.CONFIG, "task": TASK, "task_options": options}
    process = runs.train(
        runs.write_config(folder, base=base, **sections, **watched), "--nproc-per-node", world, "--backend", "gloo"
    )
    code = process.wait()
    assert runs.group_is_gone(process.pid), "a rank is left"
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
    "an exit": ("exit", 1, f"rank 1 sys.exit(3) {AT} waited for it", 3),
    "an exit of rank 0": ("exit", 0, f"rank 0 sys.exit(3) {AT}", 3),
    "a kill": ("kill", 1, "Rank 1 SIGKILL. Last heartbeat: iteration", 1),
    "a kill of rank 0": ("kill", 0, "Rank 0 SIGKILL. Last heartbeat: iteration", 1),
    "a stopped process": ("stop", 1, "rank 1 no sign of life Last heartbeat: iteration", 1),
    "a stopped rank 0": ("stop", 0, "rank 0 no sign of life Last heartbeat: iteration", 1),
    "a hang": ("hang", 1, "rank 1 did not come while ranks waited iteration", 1),
}


@pytest.mark.row("G6")
@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[pytest.mark.nightly] * (CASES[each][0] in WAITS)) for each in CASES]
)
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
    line = f"rank {failing} exited without reporting" if how == "kill" else reason
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


def test_an_error_of_any_length_is_named_in_a_line_that_can_be_sent():
    def work(rank):
        def update(engine, batch):
            if rank == 1:
                raise TooLong

        try:
            Trainer(update).run([0] * 20)
        except Exception as error:
            return type(error).__name__, str(error)

    (kind, line), (own, _) = (each.answer() for each in start_ranks(2, work))
    assert (kind, own) == ("PeerFailed", "TooLong")
    assert "TooLong: xxx" in line and "(short)" in line and "two" not in line and len(line) < 5000


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
