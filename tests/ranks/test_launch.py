"""Ranks that are launched here: where they meet, exit codes, signals, and what is left when one is killed."""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from ignite import distributed as idist
from torch.multiprocessing.spawn import ProcessExitedException

from ignite_engine import Parallel
from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.errors import LaunchError
from ignite_engine.ranks import agreement, joining, launch, rank_process, signals
from tests.faults import processes
from tests.faults.commands import program
from tests.faults.processes import free_port, group_is_gone, start, write_config
from tests.kit.faults import start_child, wait_for
from tests.ranks.forkserver import PRELOADED

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, time
from pathlib import Path
from ignite_engine import Parallel

def main(rank, folder):
    (Path(folder) / f"building_{rank}").touch()
    time.sleep(60)

if __name__ == "__main__":
    with Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(main, sys.argv[1])
"""


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def forked(monkeypatch):
    """The ranks of this process need not import torch again."""
    monkeypatch.setattr(launch, "_start_method", lambda: "fork")


def wait_until(condition, process):
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "to_group", "importing"),
    [
        # slow: each starts ranks anew
        pytest.param(signal.SIGINT, True, False, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, False, False, marks=pytest.mark.long),
        (signal.SIGTERM, False, False),
        (signal.SIGINT, True, True),
        pytest.param(signal.SIGTERM, True, True, marks=pytest.mark.long),
    ],
)
def test_signal_before_ranks_train_is_their_exit_code(tmp_path, number, to_group, importing):
    process = program(tmp_path, SCRIPT, str(tmp_path), spawns=importing)

    def importing_now():
        return sum("spawn_main" in " ".join(each.cmdline()) for each in psutil.Process(process.pid).children()) == 2

    def building_now():
        return len(list(tmp_path.glob("building_*"))) == 2

    wait_until(importing_now if importing else building_now, process)
    (os.killpg if to_group else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert group_is_gone(process.pid)
    assert not importing or not list(tmp_path.glob("building_*")), "the signal came too late"


@pytest.mark.row("I1")
@pytest.mark.distributed
@pytest.mark.usefixtures("forked")
def test_ranks_may_meet_in_a_file(tmp_path):
    with Parallel(backend="gloo", nproc_per_node=2, init_method=f"file://{tmp_path}/store") as parallel:
        parallel.run(write_rank, tmp_path)

    assert sorted(each.read_text() for each in tmp_path.glob("rank_*")) == ["0 of 2", "1 of 2"]


def write_rank(local_rank, folder):
    (folder / f"rank_{local_rank}").write_text(f"{agreement.rank()} of {agreement.world_size()}")


@pytest.mark.distributed
@pytest.mark.usefixtures("forked")
def test_ranks_may_start_processes_of_their_own(tmp_path):
    """Such as the workers of a loader, which the standard library refuses to daemons."""
    with Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(have_it_written, tmp_path)

    assert sorted(each.name for each in tmp_path.glob("of_*")) == ["of_0", "of_1"]


def have_it_written(local_rank, folder):
    process = multiprocessing.get_context("fork").Process(target=(folder / f"of_{local_rank}").touch)
    process.start()
    process.join()


def test_groups_end_with_the_block_in_a_process_that_a_launcher_started(monkeypatch):
    groups = {}
    monkeypatch.setattr(agreement, "_groups", groups)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ZeroDivisionError), Parallel(backend="gloo"):
        agreement.cpu_group()
        assert len(groups) == 1 and dist.is_initialized()
        raise ZeroDivisionError
    assert groups == {} and not dist.is_initialized()


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("timeout", [77, timedelta(seconds=77)])
def test_one_timeout_is_that_of_every_group(timeout):
    with Parallel(backend="gloo", timeout=timeout):
        assert agreement.timeout() == timedelta(seconds=77)
        options = agreement.cpu_group()._get_backend(torch.device("cpu")).options
        assert options._timeout == timedelta(seconds=77)


def test_port_in_use_is_one_line():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with (
            pytest.raises(LaunchError, match=rf"cannot meet at 127.0.0.1, port {port}: the port is in use; end what"),
            Parallel(backend="gloo", nproc_per_node=2, master_addr="127.0.0.1", master_port=port) as parallel,
        ):
            parallel.run(write_rank, Path())


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_rank_whose_torchrun_was_killed_before_it_began_is_one_line(monkeypatch):
    """It would wait for minutes in torch's rendezvous."""
    port = str(free_port())
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**torchrun, "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=rf"^The ranks cannot meet at 127\.0\.0\.1, port {port}: torchrun, which"):
        Parallel(backend="gloo").__enter__()


def test_torchrun_that_answers_a_moment_later_is_waited_for(monkeypatch):
    with socket.socket() as agent:
        agent.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(agent.getsockname()[1]))
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: agent.listen())
        monkeypatch.setattr(joining, "time", clock)
        joining._check_agent_lives()


def test_unknown_option_is_named():
    with pytest.raises(TypeError, match="Parallel got nproc_per_nodes; its other options are daemon,"):
        Parallel(backend="gloo", nproc_per_nodes=2)


@pytest.mark.usefixtures("alone")
def test_local_rank_is_that_of_torchrun_also_within_a_slurm_job(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3", "SLURM_JOB_ID": "17", "SLURM_LOCALID": "0"}
    for name, value in {**torchrun, **ranks}.items():
        monkeypatch.setenv(name, value)
    with Parallel(backend="gloo") as parallel:
        parallel.run(lambda local_rank: None)
        assert idist.get_local_rank() == 3
    assert os.environ["SLURM_JOB_ID"] == "17"


@pytest.mark.usefixtures("alone")
def test_ranks_of_torchrun_start_no_others(monkeypatch, caplog):
    """A script that names a number would start as many for each of them: several runs in one folder."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "1"}
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**torchrun, **ranks, "MASTER_PORT": str(store.port)}.items():
        monkeypatch.setenv(name, value)
    ran = []
    with Parallel(backend="gloo", nproc_per_node=2, nnodes=1) as parallel:
        parallel.run(lambda local_rank: ran.append(os.getpid()))

    assert ran == [os.getpid()]
    assert "nproc_per_node=2 has no effect: torchrun has started 1 on this machine." in caplog.text


@pytest.mark.distributed
def test_ranks_of_torchrun_meet_again_in_a_second_block():
    """Keys of the first would lead them to connections that are closed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def one(rank):
        torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        os.environ.update({**torchrun, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"})
        seen = []
        for _ in range(3):
            with Parallel(backend="gloo", timeout=20) as parallel:
                parallel.run(lambda local_rank: seen.extend(agreement.gather_objects(local_rank)))
        return seen

    children = [start_child(lambda rank=rank: one(rank)) for rank in range(2)]
    assert [wait_for(child, timeout_s=100) for child in children] == [(0, [0, 1] * 3)] * 2


@pytest.mark.usefixtures("alone")
def test_block_within_a_process_group_is_one_line():
    with (
        Parallel(backend="gloo"),
        pytest.raises(LaunchError, match=r"^This process has a process group already, of another Parallel or of its"),
        Parallel(backend="gloo"),
    ):
        pass


@pytest.mark.distributed
def test_ranks_of_a_slurm_job_meet(tmp_path, monkeypatch):
    """As ``srun`` starts them; without ``scontrol`` Ignite expands the list of nodes itself."""
    job = 10_000 + free_port() % 10_000
    slurm = {
        "SLURM_JOB_ID": str(job),
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
    }
    ranks = []
    for rank in range(2):
        for name, value in {**slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}.items():
            monkeypatch.setenv(name, value)
        ranks.append(program(tmp_path, SLURM_SCRIPT, str(tmp_path)))
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert sorted(each.read_text() for each in tmp_path.glob("rank_*")) == ["0 of 2", "1 of 2"]


SLURM_SCRIPT = """
import sys
from pathlib import Path
from ignite_engine import Parallel
from tests.ranks.test_launch import write_rank

with Parallel(backend="gloo") as parallel:
    parallel.run(write_rank, Path(sys.argv[1]))
"""


def ends(local_rank, how):
    warnings.warn("a warning", stacklevel=1)
    logging.getLogger("anyone").warning("a logged warning")
    if how == "sys.exit(3)" and local_rank == 1:
        sys.exit(3)
    if how == "SIGKILL":
        if local_rank == 1:
            os.kill(os.getppid(), signal.SIGUSR1)  # the parent looks, while this rank still runs
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # it does not notice: the parent ends it


ENDS = """
from ignite_engine import Parallel
from tests.ranks.test_launch import ends

with Parallel(backend="gloo", nproc_per_node=2) as parallel:
    parallel.run(ends, "sys.exit(3)")
"""


@pytest.mark.distributed
def test_exit_code_of_one_rank_is_the_parents_and_warnings_are_said_once(tmp_path):
    process = program(tmp_path, ENDS)
    _, errors = process.communicate()

    assert process.returncode == 3, errors
    assert errors.count("UserWarning: a warning") == errors.count("a logged warning\n") == 1


def unwatched(local_rank, func, heartbeat_timeout_s, *args):
    func(local_rank, *args)


@pytest.mark.distributed
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("when", ["while the parent waits", "just after the parent looked"])
def test_killed_rank_is_named_and_its_peers_are_ended(monkeypatch, when):
    look = rank_process.Rank.look

    def look_slowly(rank):
        look(rank)
        if rank.number == 1:
            rank.process.join()

    monkeypatch.setattr(launch, "watched", unwatched)
    monkeypatch.setattr(launch, "_PEERS_OF_A_FAILURE_MAY_END_S", 0.5)
    if when == "just after the parent looked":
        monkeypatch.setattr(rank_process.Rank, "look", look_slowly)
    began = time.monotonic()
    with (
        pytest.raises(ProcessExitedException, match=r"^Rank 1 \(process \d+\) was killed by SIGKILL\.$") as error,
        Parallel(backend="gloo", nproc_per_node=2) as parallel,
    ):
        parallel.run(ends, "SIGKILL")
    assert error.value.exit_code == -signal.SIGKILL and error.value.error_index == 1
    assert time.monotonic() - began < 55


class SecondComesLate:
    """Of two ranks that unpickle it, the second waits, before it connects."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return come, (self.folder,)


def come(folder):
    try:
        (folder / "first").touch(exist_ok=False)
    except FileExistsError:
        (folder / "late").write_text(f"{os.getpid()}\n")
        time.sleep(60)
    return SecondComesLate(folder)


def waits_for_its_peer(local_rank, late=None):
    if local_rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
    dist.new_group([0, 1], timeout=timedelta(seconds=60))  # a failing test ends, too


@pytest.mark.distributed
@pytest.mark.parametrize("peer", ["connects", "makes a group"])
def test_peer_that_waits_for_a_rank_which_a_signal_ended_is_ended(tmp_path, monkeypatch, peer):
    """Its wait is in torch's own code, where no handler of Python runs and no error comes before the timeout."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    monkeypatch.setattr(launch, "_start_method", lambda: "forkserver")  # which unpickles, as a spawned one
    monkeypatch.setattr(launch, "watched", unwatched)
    monkeypatch.setattr(launch, "_PEERS_OF_A_FAILURE_MAY_END_S", 0.5)
    # SIGTERM is enough while it connects; there, SIGKILL would come too late for this test
    monkeypatch.setattr(launch, "_TERMINATED_RANKS_MAY_END_S", 0.5 if peer == "makes a group" else 60.0)

    def end_the_late_one():
        while not (tmp_path / "late").exists() or not (tmp_path / "late").read_text().endswith("\n"):
            time.sleep(0.05)
        time.sleep(1.0)  # the other one connects
        os.kill(int((tmp_path / "late").read_text()), signal.SIGINT)

    began = time.monotonic()
    arguments = ()
    if peer == "connects":
        threading.Thread(target=end_the_late_one, daemon=True).start()
        arguments = (SecondComesLate(tmp_path),)
    with pytest.raises(SystemExit) as end, Parallel(backend="gloo", nproc_per_node=2, timeout=60.0) as parallel:
        parallel.run(waits_for_its_peer, *arguments)
    assert end.value.code == 130, "not that of the peer, which gets SIGTERM"
    assert time.monotonic() - began < 50


class KillsTheLauncher:
    """Unpickled by a rank after its imports, before its first line."""

    def __reduce__(self):
        return kill, (os.getpid(),)


def kill(launcher):
    with contextlib.suppress(ProcessLookupError):  # the other rank has killed it
        os.kill(launcher, signal.SIGKILL)
    while os.getppid() == launcher:
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.faults
def test_ranks_whose_launcher_was_killed_before_their_first_line_end(tmp_path):
    script = SCRIPT.replace("parallel.run(main, sys.argv[1])", "parallel.run(main, KillsTheLauncher())")
    script = f"from tests.ranks.test_launch import KillsTheLauncher\n{script}"
    process = program(tmp_path, script, str(tmp_path), spawns=True)
    process.communicate(60)

    assert process.returncode == -signal.SIGKILL
    assert group_is_gone(process.pid, timeout_s=45.0), "ranks wait for a store that is gone"


@pytest.mark.distributed
def test_rank_that_is_not_started_by_its_parent_any_more_ends():
    """As one whose launcher was killed before its first line: by then another process is its parent."""
    context = multiprocessing.get_context("fork")
    received, report = context.Pipe(duplex=False)
    place = rank_process.Place({}, os.getppid())
    arguments = (place, (None, None, None), report, wait_to_be_ended, (), {})
    process = context.Process(target=rank_process.rank_main, args=arguments)
    process.start()
    report.close()
    assert received.recv().code == 143
    process.join()


def test_an_orphan_that_was_about_to_wait_when_its_signal_came_is_woken(monkeypatch):
    """Python calls a handler before a wait or when it is interrupted: a signal in between would be seen 30 s later."""
    sent, ended = list[int](), list[int]()
    monkeypatch.setattr(signals, "_orphaned", threading.Lock())
    monkeypatch.setattr(signals, "_ORPHANS_MAY_SAVE_S", 0)
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: sent.append(number))
    monkeypatch.setattr(os, "_exit", ended.append)
    before = signal.signal(signals._WAKE, signals._ignore)
    try:
        signals.end_orphan(1)
    finally:
        signal.signal(signals._WAKE, before)
    assert sent == [signal.SIGTERM, *[signals._WAKE] * 3] and ended == [143]


def wait_to_be_ended(local_rank):
    time.sleep(30)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.faults
@pytest.mark.parametrize(
    "how",
    [
        "late copy",
        "second signal",
        # slow: each starts ranks anew
        pytest.param("killed parent", marks=pytest.mark.long),
        pytest.param("killed rank", marks=pytest.mark.long),
    ],
)
def test_parent_and_its_ranks_while_they_train(tmp_path, how):
    """A forwarded signal that comes late is no second one; without their parent ranks save and end."""
    slow = {"late copy": 0.6, "second signal": 6.0}.get(how, 0.1)  # for each of four micro-batches
    config = write_config(
        tmp_path, task_options={"slow_step_s": slow, "count_reductions": True}, checkpoint={"every": 2}
    )
    spawned = {"function": "ignite_engine.cli:main"} if how == "killed parent" else {}
    process = start(config, "--nproc-per-node", "2", "--backend", "gloo", **spawned)
    processes.wait_until(lambda: (tmp_path / "stepping").exists() and rank_pids(tmp_path), process)
    parent = process.pid
    code = {"killed parent": -signal.SIGKILL, "killed rank": 1}.get(how, 130)
    if how == "late copy":
        os.kill(parent, signal.SIGSTOP)
        os.killpg(parent, signal.SIGINT)
        time.sleep(0.8)
        os.kill(parent, signal.SIGCONT)
    elif how == "second signal":
        os.killpg(parent, signal.SIGINT)
        time.sleep(1.5)
        os.killpg(parent, signal.SIGINT)
    elif how == "killed parent":
        os.kill(parent, signal.SIGKILL)
    else:
        os.kill(rank_pids(tmp_path)[1], signal.SIGKILL)
    assert process.wait(timeout=60) == code, (tmp_path / "output.txt").read_text()
    assert group_is_gone(parent, timeout_s=30.0)
    ended = processes.summary(tmp_path)
    newest = CheckpointStore(tmp_path / "run" / "checkpoints").latest().checkpoint
    if how in ("late copy", "killed parent"):
        assert (ended["status"], ended["reason"]) == ("interrupted", "SIGINT" if how == "late copy" else "SIGTERM")
        assert newest is not None and newest.iteration == ended["iteration"] < 24
    elif how == "second signal":
        assert ended["status"] in ("interrupted", "running") and newest is None
    else:
        assert ended["status"] == "failed" and "rank 1" in ended["reason"].lower() and "SIGKILL" in ended["reason"]
        assert (tmp_path / "output.txt").read_text().count("was killed by SIGKILL") == 1


def rank_pids(folder):
    found = {int(path.stem.split("_")[1]): int(path.read_text() or 0) for path in folder.glob("pid_*")}
    return found if len(found) == 2 and all(found.values()) else {}


SPAWNED = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist, torch.multiprocessing as mp
from ignite.engine import Events
from ignite_engine import Trainer, Update
from ignite_engine.handlers import Checkpoint, GracefulStop

def main(rank, folder):
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).mean())
    trainer = Trainer(update)
    Checkpoint(f"{folder}/checkpoints").attach(trainer)
    GracefulStop().attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: time.sleep(0.05))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: Path(folder, f"trains_{rank}").touch())
    trainer.run([torch.ones(2, 1)] * 10_000)

if __name__ == "__main__":
    mp.start_processes(main, (sys.argv[1],), 2, start_method=sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.faults
@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_ranks_of_another_launcher_whose_parent_is_killed_save_and_end(tmp_path, start_method):
    process = program(tmp_path, SPAWNED, str(tmp_path), start_method)
    wait_until(lambda: all((tmp_path / f"trains_{rank}").exists() for rank in range(2)), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()

    assert group_is_gone(process.pid, timeout_s=20.0), "they train on"
    assert CheckpointStore(tmp_path / "checkpoints").latest().checkpoint is not None
    assert "is gone: the rank stops, as on SIGTERM" in process.errors.read_text()


RESTARTED = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from ignite_engine import Parallel

def main(local_rank, folder):
    dist.all_reduce(torch.ones(1))
    failed = Path(folder) / "failed"
    if dist.get_rank() == 1 and not failed.exists():
        failed.touch()
        os._exit(3)
    everyone = torch.ones(1)
    dist.all_reduce(everyone)
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (Path(folder) / f"met_{dist.get_rank()}").write_text(f"{everyone.item():g} {count}")

if __name__ == "__main__":
    with Parallel(backend="gloo", timeout=60) as parallel:
        parallel.run(main, sys.argv[1])
"""


STOPPED = """
import os, sys
from pathlib import Path
from ignite_engine import Parallel

def main(local_rank, folder):
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (Path(folder) / f"trains_{local_rank}_{attempt}").touch()
    sys.exit(CODES[local_rank])

if __name__ == "__main__":
    with Parallel(backend="gloo", timeout=60) as parallel:
        parallel.run(main, sys.argv[1])
"""


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.faults
@pytest.mark.parametrize(
    ("codes", "attempts"),
    [
        ((143, 143), {"0"}),
        ((2, 2), {"0"}),
        ((143, 1), {"0", "1"}),  # a rank failed, and torchrun stopped its peer
    ],
)
def test_ranks_that_were_stopped_end_at_once_when_torchrun_starts_them_again(tmp_path, codes, attempts):
    (tmp_path / "script.py").write_text(STOPPED.replace("CODES", repr(codes)))
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 --monitor-interval 0.1"
    command = [sys.executable, *torchrun.split(), str(tmp_path / "script.py"), str(tmp_path)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180, check=False)

    assert ended.returncode == 1, "torchrun's own"
    assert {path.name.rpartition("_")[2] for path in tmp_path.glob("trains_*")} == attempts, ended.stderr
    assert ended.stderr.count("torchrun has started the ranks again") == (attempts == {"0"})


@pytest.mark.distributed
@pytest.mark.faults
@pytest.mark.long
def test_ranks_of_two_agents_meet_again_after_a_restart(tmp_path):
    """A c10d rendezvous: only the agent of the rank that failed counts a restart."""
    (tmp_path / "script.py").write_text(RESTARTED)
    rendezvous = f"--rdzv-backend c10d --rdzv-id two --rdzv-endpoint 127.0.0.1:{free_port()} --local-addr 127.0.0.1"
    agent = (
        f"-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --max-restarts 1 --monitor-interval 0.1 {rendezvous}"
    )
    command = [sys.executable, *agent.split(), str(tmp_path / "script.py"), str(tmp_path)]
    outputs = [(tmp_path / f"agent_{number}.txt").open("w+") for number in range(2)]
    agents = [subprocess.Popen(command, env=environment(), stdout=file, stderr=file) for file in outputs]
    codes = [process.wait(timeout=120) for process in agents]

    assert (tmp_path / "failed").exists()
    assert codes == [0, 0], [Path(file.name).read_text() for file in outputs]
    met = sorted((tmp_path / f"met_{rank}").read_text() for rank in range(2))
    assert met in (
        ["2 0", "2 1"],
        ["2 1", "2 1"],
    )  # the latter where the other rank has failed, too, before it was told


def test_rank_does_not_meet_those_of_an_attempt_that_is_over():
    store = dist.HashStore()
    store.set("question_1", "of a dead rank")
    store.set("answer_of a dead rank", "an attempt that is over")
    found = {}

    def meet(rank):
        found[rank] = joining.part_of_this_attempt(store, rank, 3)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)  # rank 0 first: it finds the old question
    for thread in threads:
        thread.join(20)

    found[0].set("here", "yes")
    assert found[1].get("here") == found[2].get("here") == b"yes"


def test_ranks_that_do_not_come_are_named():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(LaunchError, match=r"of 3 ranks these did not come within 0.1 s: 1, 2"):
        joining.part_of_this_attempt(store, 0, 3)


@pytest.mark.distributed
@pytest.mark.faults
@pytest.mark.long
def test_torchrun_restarts_a_killed_rank_and_the_bits_are_the_same(tmp_path):
    digests = []
    options = {"slow_step_s": 0.2, "count_reductions": True}  # a run of 19 s, until there is a file "fast"
    for how in ("whole", "killed"):
        config = write_config(tmp_path / how, task_options=options, checkpoint={"every": 2})
        if how == "whole":
            (tmp_path / how / "fast").touch()
            process = start(config, "--nproc-per-node", "2", "--backend", "gloo")
        else:
            torchrun = ["--nproc-per-node=2", "--max-restarts=1", f"--master-port={free_port()}", "-m", "ignite_engine"]
            command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "train", str(config)]
            with (tmp_path / how / "output.txt").open("w") as output:
                process = subprocess.Popen([*command, "--backend", "gloo"], env=environment(), cwd=ROOT, stderr=output)
            processes.wait_until(lambda: len(processes.lines(tmp_path / "killed")) >= 3, process)
            os.kill(rank_pids(tmp_path / how)[1], signal.SIGKILL)
            (tmp_path / how / "fast").touch()
        assert process.wait(timeout=120) == 0, (tmp_path / how / "output.txt").read_text()
        digests.append(processes.summary(tmp_path / how)["weights_sha256"])
    assert processes.summary(tmp_path / "killed")["resumed_from"] is not None
    assert digests[0] == digests[1]


def leave_a_process(rank, folder):
    """As a loader worker whose dataset never returns outlives its rank."""
    if (pid := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    (folder / f"left_by_{rank}").write_text(str(pid))


def returns(rank):
    """Does nothing else."""


def pipes_and_processes():
    """What this process holds of those; threads that other tests have left may hold sockets."""
    links = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            links.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return {link for link in links if " pipe:" in link or "pidfd" in link}


@pytest.mark.usefixtures("forked")
def test_a_process_that_outlives_its_rank_is_not_waited_for(tmp_path):
    with Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(returns)  # what a process opens once stays open
    before, began = pipes_and_processes(), time.monotonic()
    with Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(leave_a_process, tmp_path)
    left = [int(path.read_text()) for path in tmp_path.iterdir()]
    try:
        assert len(left) == 2 and time.monotonic() - began < 55
        assert pipes_and_processes() == before
    finally:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
