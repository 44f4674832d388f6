"""Kills of processes that upload or fetch, at random instants; what is in both places afterwards is never torn.

``python -m tests.ext.mirror.kills 50`` is the long form.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from ignite_engine.checkpointing import CheckpointStore, Retention
from ignite_engine.ext.mirror.fetch import bring
from ignite_engine.ext.mirror.remote import Remote, Torn
from ignite_engine.ext.mirror.upload import Uploader
from tests.checkpointing.states import holds, save
from tests.ext.mirror.servers import CREDENTIALS, make_bucket, s3_server

SIZE = 12_000
"""Rows of 100 floats."""


def child(work, kill_after_s):
    """Do ``work`` in a forked process, which is killed so many seconds later; its exit code, None if it was killed."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + kill_after_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def seconds_of(work):
    """What ``work`` takes if it is not killed: on a busy machine so long that kills within a second prove nothing."""
    began = time.monotonic()
    assert child(work, 120) == 0
    return time.monotonic() - began


def uploading(url, directory):
    uploader = Uploader(Remote(url), directory, Retention(keep_last=2))
    for checkpoint in CheckpointStore(directory).checkpoints():
        uploader.offer(checkpoint.path)
        while uploader.missing:
            time.sleep(0.001)
    uploader.end()
    uploader.wait(30)


def check_there(url):
    """Each checkpoint of a mirror has the bits that were saved."""
    for attempt in range(3):
        try:
            problems = problems_there(Remote(url))
            break
        except OSError:  # moto answers 500 where a request of the killed process still changes what is read
            if attempt == 2:
                raise
            time.sleep(0.5)
    assert problems == []


def problems_there(remote):
    found = []
    for checkpoint in remote.checkpoints()[0]:
        for file, record in checkpoint.manifest.files.items():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    remote.get(f"{checkpoint.path.name}/{file}", Path(folder) / file, record)
                except Torn as problem:
                    found.append(str(problem))
    return found


def kill_uploads(port, folder, times, seed=0):
    """Kill an upload again and again; each time the mirror holds whole checkpoints alone. How many were killed."""
    draw = random.Random(seed)
    url = f"s3://uploads-{seed}-{os.getpid()}/run"
    make_bucket(port, url.removeprefix("s3://").partition("/")[0])
    directory, killed = folder / "uploads", 0

    def save_two(turn):
        for iteration in (100 * turn + 100, 100 * turn + 150):
            save(CheckpointStore(directory), iteration, size=SIZE, run_id="the run")

    save_two(0)
    longest = seconds_of(lambda: uploading(url, directory))
    for turn in range(1, times + 1):
        save_two(turn)
        began = time.monotonic()
        code = child(lambda: uploading(url, directory), draw.uniform(0.2 * longest, longest))
        assert code in (0, None), f"upload {turn} ended with {code}"
        longest = time.monotonic() - began if code == 0 else longest
        killed += code is None
        code = child(lambda: check_there(url), 120)
        assert code == 0, f"the look after kill {turn} ended with {code}"
        CheckpointStore(directory).prune(Retention(keep_last=2))
    return killed


def kill_fetches(port, folder, times, seed=0):
    """Kill a fetch again and again; the folder never holds a torn checkpoint, and the next fetch goes on."""
    draw = random.Random(seed)
    url = f"s3://fetches-{seed}-{os.getpid()}/run"
    make_bucket(port, url.removeprefix("s3://").partition("/")[0])
    save(CheckpointStore(folder / "source"), 100, size=SIZE, run_id="the run")
    assert child(lambda: uploading(url, folder / "source"), 60) == 0
    directory, killed = folder / "fetches", 0
    longest = seconds_of(lambda: bring(Remote(url), directory, Retention()))
    shutil.rmtree(directory)
    for turn in range(times):
        began = time.monotonic()
        code = child(lambda: bring(Remote(url), directory, Retention()), draw.uniform(0.2 * longest, longest))
        assert code in (0, None), f"fetch {turn} ended with {code}"
        longest = time.monotonic() - began if code == 0 else longest
        killed += code is None
        newest, skipped = CheckpointStore(directory).latest()
        assert skipped == [], f"kill {turn} of a fetch"
        assert newest is None or holds(CheckpointStore(directory), newest.path, 100, SIZE)
        if newest is not None or draw.random() < 0.3:
            shutil.rmtree(directory, ignore_errors=True)
    assert child(lambda: bring(Remote(url), directory, Retention()), 60) == 0
    newest = CheckpointStore(directory).latest().checkpoint
    assert newest is not None and holds(CheckpointStore(directory), newest.path, 100, SIZE)
    return killed


def main(times):
    with s3_server() as port, tempfile.TemporaryDirectory() as folder:
        os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
        for name, kill in (("uploads", kill_uploads), ("fetches", kill_fetches)):
            print(f"{name}: {kill(port, Path(folder), times)} of {times} killed, nothing torn", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
