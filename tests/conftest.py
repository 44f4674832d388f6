"""For every test: one thread per process, tests of a device skipped where there is none, none that takes long."""

import gc
import importlib
import os
import random
import signal
from pathlib import Path

# Before anything imports torch, and inherited by the processes that tests start: ranks share few cores, and a sum over
# another number of threads has other bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# nohup has SIGHUP ignored, and the runs that tests start would inherit that; a handler's children have the default
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

from tests.device import fake  # imports no torch

NO_DEVICE = "needs a CUDA device, this machine has none: `make device` runs it on a fake one"
KIND = os.environ.get("TEST_DEVICE")  # a fake device, of a kind that tests/device/fake.py names
if KIND:  # before torch is imported
    try:
        fake.load(KIND)
    except fake.Unavailable as error:
        NO_DEVICE = str(error)
    else:  # and in the processes that tests start
        startup = str(Path(__file__).parent / "device" / "startup")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (startup, os.environ.get("PYTHONPATH"))))

import numpy as np  # noqa: E402  # after a fake device, as torch
import pytest  # noqa: E402
import torch  # noqa: E402

from tests.kit import processes  # noqa: E402
from tests.kit.clock import clock  # noqa: E402, F401


def _forked():
    """A process that a test forks has none of this one's threads."""
    # were it to collect a process group that an earlier test has left in a cycle, the group's destructor would wait for
    # them, or crash
    gc.freeze()
    # makes torch's pool of threads anew while no other thread asks for it: two at once may get none
    torch.set_num_threads(torch.get_num_threads())


os.register_at_fork(after_in_child=_forked)

BUDGET_S = 2.0
"""What a test may take that is not nightly, where the machine has a core for it."""


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails, but one of another kind of device")


ROWS = Path(__file__).parent  # rows.txt, and one of each folder that may be deleted with its tests


def pytest_configure(config):
    config.addinivalue_line("markers", "row(*ids): proves these rows of the feature table, which rows.txt lists")
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        processes.serve()  # all processes that test share its fork server
    if hasattr(config, "workerinput"):  # else the first test would take the seconds of these imports
        for name in processes.PRELOADED:
            importlib.import_module(name)


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their markers
def pytest_collection_modifyitems(config, items):
    rows = {line.split()[0] for path in ROWS.rglob("rows.txt") for line in path.read_text().splitlines()}
    proved = {row for item in items for mark in item.iter_markers("row") for row in mark.args}
    if unknown := proved - rows:
        raise pytest.UsageError(f"no row of rows.txt: {', '.join(sorted(unknown))}")
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and (unproved := rows - proved):
        raise pytest.UsageError(f"no test proves the rows {', '.join(sorted(unproved))}: mark one with its row")
    there = {"cuda": torch.cuda.is_available(), "accelerator": torch.accelerator.is_available()}
    for item in items:
        if any(item.get_closest_marker(name) and not is_there for name, is_there in there.items()):
            item.add_marker(pytest.mark.skip(reason=NO_DEVICE))


@pytest.fixture(autouse=True)
def streams_wait_for_each_other():
    """A fake device knows when an operation uses memory that another stream has not done with."""
    yield
    if KIND and torch.accelerator.is_available():
        fake.set_options(no_waits=0)
        assert fake.counts().get("races", 0) == 0, "a stream did not wait for another one"


@pytest.fixture(autouse=True)
def signals_as_before():
    """A stopped run leaves signals ignored, and the processes that later tests start would inherit that."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_half_of_a_pair():
    """A normal number that an earlier test has left in a generator of the host makes loaders read a batch again."""
    if random.getstate()[2] is not None or np.random.get_state(legacy=False)["has_gauss"]:
        random.seed(0)
        np.random.seed(0)


@pytest.fixture(autouse=True)
def threads_as_before():
    """A run sets how many threads compute; with more than one a process that a later test forks waits for ever."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--no-skips"):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if KIND or not reason.startswith(fake.ONLY):
            report.outcome, report.longrepr = "failed", f"skipped: {reason}"
    # more processes than cores take turns, those that a test starts too: so much longer may it take
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    allowed_s = 3 * BUDGET_S * max(1.0, max(workers, os.getloadavg()[0]) / (os.cpu_count() or 1))
    is_judged = workers and call.when == "call" and report.passed and not is_long(item)
    if is_judged and call.duration > allowed_s:
        report.outcome = "failed"
        report.longrepr = f"took {call.duration:.1f} s, more than {allowed_s:.1f}: make it quicker, or mark it nightly"
    return report


def is_long(item):
    return any(
        item.get_closest_marker(name) for name in ("nightly", "cuda", "accelerator", "slow", "long", "packaging")
    )
