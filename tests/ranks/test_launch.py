"""Ranks that are launched here, by torchrun or by SLURM: where they meet, their exit codes, and what is left."""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch.multiprocessing.spawn import ProcessExitedException
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Parallel
from ignite_engine.errors import LaunchError
from ignite_engine.handlers import Checkpoint, GracefulStop
from ignite_engine.ranks import signals
from tests.kit import runs
from tests.kit.fitting import fitted
from tests.kit.processes import child, start, wait_until
from tests.kit.refusals import refusals
from tests.kit.tiny import linear, trainer_of

WAITS_S = 60.0
"""For how long something waits that is to be ended much sooner."""


def parallel(function, *arguments, **options):
    """``Parallel`` in this process, with two ranks that are forked."""
    options = {"backend": "gloo", "nproc_per_node": 2, "start_method": "fork", **options}
    with Parallel(**options) as ranks:
        ranks.run(function, *arguments)


def store_at(port=0):
    """A store as torchrun's agent has one, there as long as it is referred to."""
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


@pytest.fixture
def agent():
    return store_at()


def torchrun_rank(rank, port, work, world=2, **environment):
    """Call ``work()`` in a process as torchrun starts it."""
    names = {"RUN_ID": "none", "USE_AGENT_STORE": True, "RESTART_COUNT": 0}
    ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    values = {**{f"TORCHELASTIC_{name}": value for name, value in names.items()}, "MASTER_ADDR": "127.0.0.1", **ours}
    os.environ.update({name: str(value) for name, value in {**values, **environment}.items()})
    return work()


def under_torchrun(port, work, **environment):
    """Both ranks, started."""
    return [start(lambda rank=rank: torchrun_rank(rank, port, work, **environment)) for rank in range(2)]


def joined(function, *arguments, timeout=20):
    with Parallel(backend="gloo", timeout=timeout) as ranks:
        ranks.run(function, *arguments)


# ----------------------------------------------------------------------------------------------------- where they meet


def meet(local_rank, folder):
    """Say who is there; in a process of its own, such as the workers of a loader, which a daemon may not have."""
    everyone = idist.all_gather(torch.tensor([dist.get_rank()])).tolist()
    path, text = folder / f"rank_{local_rank}", f"{dist.get_rank()} of {everyone}\n"
    process = multiprocessing.get_context("fork").Process(target=append, args=(path, text))
    process.start()
    process.join()


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def in_slurm_job(rank, job, folder):
    """As ``srun`` starts it; without ``scontrol`` Ignite expands the list of nodes itself."""
    names = {"JOB_ID": job, "NTASKS": 2, "JOB_NODELIST": "localhost", "JOB_NUM_NODES": 1}
    own = {"STEP_ID": 0, "PROCID": rank, "LOCALID": rank}
    os.environ.update({f"SLURM_{name}": str(value) for name, value in {**names, **own}.items()})
    joined(meet, folder)


@pytest.mark.row("I1")
@pytest.mark.parametrize("how", ["port", "slurm", "torchrun"])
def test_ranks_meet(how, agent, tmp_path):
    times = 1
    if how == "port":
        child(lambda: parallel(meet, tmp_path))
    elif how == "slurm":
        job = 10_000 + runs.free_port() % 10_000  # which gives the port
        for rank in [start(in_slurm_job, rank, job, tmp_path) for rank in range(2)]:
            rank.answer()
    else:
        times = 3  # keys of the first block would lead them to connections that are closed
        for rank in under_torchrun(agent.port, lambda: [joined(meet, tmp_path) for _ in range(times)]):
            rank.answer()
    for rank in range(2):
        assert (tmp_path / f"rank_{rank}").read_text() == f"{rank} of [0, 1]\n" * times


@pytest.mark.parametrize("task", [{}, {"PROCID": 0, "LOCALID": 0}], ids=["shell of salloc", "script of sbatch"])
def test_process_that_srun_has_not_started_is_alone_in_its_allocation(task, tmp_path):
    def work():
        names = {"JOB_ID": 17, "NTASKS": 4, "JOB_NODELIST": "localhost", "JOB_NUM_NODES": 1, **task}
        os.environ.update({f"SLURM_{name}": str(value) for name, value in names.items()})
        joined(meet, tmp_path)
        return fitted(tmp_path / "run", max_epochs=1).summary["iteration"]

    assert child(work) == 6
    assert (tmp_path / "rank_0").read_text() == "0 of [0]\n"


@pytest.mark.parametrize("timeout", [77, timedelta(seconds=77)])
def test_timeout_is_that_of_the_group_which_ends_with_the_block(timeout):
    def work():
        with contextlib.suppress(ZeroDivisionError), Parallel(backend="gloo", timeout=timeout):
            options = dist.group.WORLD._get_backend(torch.device("cpu")).options
            raise ZeroDivisionError
        return options._timeout, dist.is_initialized()

    assert child(work) == (timedelta(seconds=77), False)


def error_of(work):
    try:
        work()
    except Exception as error:
        return error


def refused(work):
    """``work`` is called in a process of its own; its error is raised here."""

    def call():
        if (error := child(error_of, work)) is not None:
            raise error

    return call


def block_within_a_block():
    with Parallel(backend="gloo"):
        joined(print)


def rank_without_its_peer():
    store = store_at()
    torchrun_rank(0, store.port, lambda: joined(print, timeout=1), world=3)


test_refusals = refusals(
    [
        ("block within a block", refused(block_within_a_block), LaunchError, "default process group twice"),
        ("ranks do not come", refused(rank_without_its_peer), LaunchError, "cannot meet timeout logs"),
        ("backend", lambda: Parallel(backend="glo"), ValueError, "backend gloo 'glo'"),
        ("no ranks", lambda: Parallel(backend="gloo", nproc_per_node=0), ValueError, "nproc_per_node at least 1 0"),
    ]
)


def test_rank_of_torchrun_starts_no_others_and_has_its_local_rank_within_a_slurm_job(agent):
    """A script that names a number would start as many for each of them: several runs in one folder."""

    def work():
        ran, lines, pid = [], [], os.getpid()
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("ignite_engine").addHandler(handler)
        with Parallel(backend="gloo", nproc_per_node=2) as ranks:
            ranks.run(lambda local_rank: ran.append((local_rank, idist.get_local_rank(), os.getpid() == pid)))
        return ran, lines, os.environ["SLURM_JOB_ID"]

    within = {"LOCAL_RANK": 3, "SLURM_JOB_ID": 17, "SLURM_LOCALID": 0}
    port = agent.port
    ran, lines, job = child(lambda: torchrun_rank(0, port, work, world=1, **within))
    assert ran == [(3, 3, True)] and job == "17"
    assert len(lines) == 1 and "nproc_per_node=2 has no effect" in lines[0]


# ------------------------------------------------------------------------------------------------------- exit codes


def train(local_rank, folder, ending):
    """Until it is told to end; then it leaves its iteration."""
    rank = dist.get_rank()
    trainer = trainer_of(DistributedDataParallel(linear()))
    Checkpoint(folder / "checkpoints").attach(trainer)
    GracefulStop().attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: threading.Event().wait(0.005))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: note_that_it_trains(folder, rank))
    if ending == "hangs":
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: threading.Event().wait(WAITS_S))
    if ending == "raises" and rank == 1:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda: {}["no such key"])
    batch = (torch.ones(2, 3), torch.ones(2, 1))
    try:
        trainer.run([batch] * 10_000, max_iters=6 if ending == "completes" else None)
    finally:
        (folder / f"ended_{rank}").write_text(f"{trainer.state.iteration} {trainer.state.status}")


def note_that_it_trains(folder, rank):
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    (folder / f"trains_{rank}").touch()


def pids_of_ranks(folder):
    return [int((folder / f"pid_{rank}").read_text()) for rank in range(2)]


def both_train(folder, process):
    wait_until(lambda: all((folder / f"trains_{rank}").exists() for rank in range(2)), process)


def ends(folder):
    (first, second) = (tuple((folder / f"ended_{rank}").read_text().split()) for rank in range(2))
    assert first == second
    return int(first[0]), first[1]


ENDINGS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 143, "completes": 0, "raises": 1}


@pytest.mark.parametrize(
    ("launcher", "ending"),
    [
        pytest.param(launcher, ending, marks=[] if launcher in launchers else pytest.mark.nightly)
        for ending, launchers in {
            "SIGINT": ("torchrun",),
            "SIGTERM": ("Parallel", "Parallel, which forwards"),
            "SIGHUP": ("Parallel",),
            "completes": ("Parallel", "torchrun"),
            "raises": ("Parallel", "torchrun"),
        }.items()
        for launcher in ("Parallel", "Parallel, which forwards", "torchrun")
    ],
)
def test_exit_code_says_how_a_run_ended(launcher, ending, agent, tmp_path):
    """Signals go to all processes, or to the parent alone."""
    if launcher == "torchrun":
        processes = under_torchrun(agent.port, lambda: joined(train, tmp_path, ending))
    else:
        processes = [start(lambda: parallel(train, tmp_path, ending))]
    if ending.startswith("SIG"):
        both_train(tmp_path, processes[0])
        ranks = pids_of_ranks(tmp_path) if launcher == "Parallel" else []
        for pid in [*ranks, *(process.pid for process in processes)]:
            os.kill(pid, getattr(signal, ending))
    assert [process.wait() for process in processes] == [ENDINGS[ending]] * len(processes), processes[0].said()
    if ending == "raises":
        assert any("no such key" in process.said() for process in processes)
        return
    iteration, status = ends(tmp_path)
    assert status == ("completed" if ending == "completes" else "interrupted")
    assert [path.name for path in (tmp_path / "checkpoints").glob("iteration_*")] == [f"iteration_{iteration:08}"]
    assert all("Traceback" not in process.said() for process in processes)
    assert runs.group_is_gone(processes[0])


def sockets():
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket")
    return count


def does_nothing(local_rank):
    """Join and leave."""


def test_no_rank_connects_while_others_are_forked():
    """The store's thread in the parent may hold a lock of the C library meanwhile."""

    def fork_slowly():
        open_at_forks = []
        os.register_at_fork(before=lambda: open_at_forks.append(sockets()), after_in_parent=lambda: time.sleep(0.1))
        with Parallel("gloo", nproc_per_node=3, start_method="fork") as ranks:
            ranks.run(does_nothing)
        return open_at_forks

    assert len(set(child(fork_slowly)[-3:])) == 1


def test_second_signal_forces_the_end(tmp_path):
    process = start(lambda: parallel(train, tmp_path, "hangs"))
    both_train(tmp_path, process)
    began = time.monotonic()
    process.signal(signal.SIGINT)
    wait_until(lambda: time.monotonic() - began > 1.2 * signals.FORCE_AFTER_S, process)  # before that they are one
    process.signal(signal.SIGINT)
    assert process.wait() == 130 and time.monotonic() - began < WAITS_S / 2, process.said()
    assert not [*tmp_path.glob("checkpoints/iteration_*")] and runs.group_is_gone(process)


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_ctrl_z_stops_the_ranks_until_their_parent_goes_on(tmp_path):
    process = start(lambda: parallel(train, tmp_path, "by a signal"))
    both_train(tmp_path, process)
    pids = [process.pid, *pids_of_ranks(tmp_path)]
    process.signal(signal.SIGTSTP)
    wait_until(lambda: [state_of(pid) for pid in pids] == ["T"] * 3, process)
    process.signal(signal.SIGCONT)
    wait_until(lambda: "T" not in [state_of(pid) for pid in pids], process)
    process.signal(signal.SIGINT)
    assert process.wait() == 130 and ends(tmp_path)[1] == "interrupted"


def test_ranks_whose_parent_is_killed_save_and_end(tmp_path):
    process = start(lambda: parallel(train, tmp_path, "by a signal"))
    both_train(tmp_path, process)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert runs.group_is_gone(process, timeout_s=20.0), "they train on"
    iteration, status = ends(tmp_path)
    assert status == "interrupted" and (tmp_path / "checkpoints" / f"iteration_{iteration:08}").exists()


def build_slowly(local_rank, folder):
    note_that_it_trains(folder, local_rank)
    threading.Event().wait(WAITS_S)


@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        (signal.SIGINT, True),
        (signal.SIGTERM, False),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((signal.SIGINT, False), (signal.SIGTERM, True))),
    ],
)
def test_signal_before_ranks_train_is_their_exit_code(number, to_all, tmp_path):
    process = start(lambda: parallel(build_slowly, tmp_path))
    both_train(tmp_path, process)
    for pid in [*(pids_of_ranks(tmp_path) if to_all else []), process.pid]:
        os.kill(pid, number)
    assert process.wait() == 128 + number and "Traceback" not in process.said()
    assert runs.group_is_gone(process)


def ends_otherwise(local_rank):
    warnings.warn("a warning", stacklevel=1)
    logging.getLogger("anyone").warning("a logged warning")
    if local_rank == 1:
        sys.exit(3)


def test_code_of_one_rank_is_the_parents_and_warnings_are_said_once():
    process = start(lambda: parallel(ends_otherwise))
    assert process.wait() == 3
    assert process.said().count("UserWarning: a warning") == process.said().count("a logged warning\n") == 1


def is_killed(local_rank):
    if local_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_killed_rank_is_named_and_its_peers_are_ended():
    def work():
        with pytest.raises(ProcessExitedException) as caught:
            parallel(is_killed)
        return str(caught.value), caught.value.exit_code, caught.value.error_index

    text, *rest = child(work)
    assert rest == [-signal.SIGKILL, 1] and "Rank 1" in text and "SIGKILL" in text and "\n" not in text


def leave_a_process(rank, folder):
    """As a loader worker whose dataset never returns outlives its rank."""
    if os.fork() == 0:
        os.setsid()
        (folder / f"left_by_{rank}").write_text(str(os.getpid()))
        threading.Event().wait(WAITS_S)
        os._exit(0)


def test_a_process_that_outlives_its_rank_is_not_waited_for(tmp_path):
    child(lambda: parallel(leave_a_process, tmp_path), timeout_s=WAITS_S - 5.0)
    for pid in wait_until(lambda: [*filter(None, (path.read_text() for path in tmp_path.iterdir()))]):
        os.kill(int(pid), signal.SIGKILL)


# -------------------------------------------------------------------------------------------------------- restarts


def test_ranks_do_not_meet_those_of_an_attempt_that_is_over(agent, tmp_path):
    """In which rank 1 was killed while it asked for the others, which had not come."""
    port, keys = agent.port, agent.num_keys()

    def started(rank, attempt):
        environment = {"TORCHELASTIC_RESTART_COUNT": attempt}
        return start(lambda: torchrun_rank(rank, port, lambda: joined(meet, tmp_path), **environment))

    first = started(1, 0)
    wait_until(lambda: agent.num_keys() > keys, first)
    first.signal(signal.SIGKILL)
    first.wait()
    late, early = started(0, 1), started(1, 1)
    assert early.wait() == late.wait() == 0, early.said() + late.said()
    assert (tmp_path / "rank_0").read_text() == "0 of [0, 1]\n"
