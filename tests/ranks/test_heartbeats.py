"""What rank 0 hears of the others, and whom it says to have failed; the ranks are connections of this process."""

import contextlib
import os
import random
import re
import signal
import socket
import struct
import time
from dataclasses import asdict
from multiprocessing.connection import wait

import pytest

from ignite_engine.ranks import heartbeats
from ignite_engine.ranks.heartbeats import Failure, Hub, Link, connect


class Ranks:
    """Connections of three ranks to a hub."""

    def __init__(self, timeout_s=60.0):
        self.beats = {}
        self.hub = Hub(3, timeout_s, local=True)
        self.links = [connect(("127.0.0.1", self.hub.port), self.hub.token, rank) for rank in range(3)]

    def beat(self, rank, text="iteration 3"):
        self.beats[rank] = text
        self.links[rank].send(beat=self.beats[rank])

    def failure(self, at=0, *, silent=None):
        """What the hub tells rank ``at``, while all but ``silent`` repeat their heartbeats."""

        def beat():
            for rank, link in enumerate(self.links):
                if rank != silent:
                    link.send(beat=self.beats.get(rank, "none"))

        for message in heard(self.links[at], 20.0, beat):
            if "failure" in message:
                return Failure.of(message["failure"])
        raise AssertionError("no failure was announced")

    def close(self):
        for link in self.links:
            link.close()
        self.hub.close()


def heard(link, timeout_s, meanwhile=lambda: None):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        meanwhile()
        if wait([link.socket], 0.2):
            yield from link.receive()


@pytest.fixture
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.mark.row("G6")
def test_error_of_a_rank_reaches_all(ranks):
    failure = Failure("rank 1 failed: ValueError", (1,), run=1, trace="Traceback", kind="raised")
    ranks.links[1].send(failed=asdict(failure))
    assert [ranks.failure(at) for at in range(3)] == [failure] * 3

    ranks.links[2].send(failed=asdict(Failure("rank 2 failed as well", (2,), run=1, kind="raised")))
    assert not [message for message in heard(ranks.links[0], 0.5) if "failure" in message]


def test_error_of_an_earlier_run_is_not_that_of_a_later_one(ranks):
    for run in (1, 2):
        failure = Failure(f"rank 1 failed in run {run}", (1,), run=run, kind="raised")
        ranks.links[1].send(run=run)
        ranks.links[1].send(failed=asdict(failure))
        assert ranks.failure() == failure


def test_rank_whose_process_ends_is_named_at_once(ranks):
    ranks.beat(1, "iteration 7")
    ranks.links[1].close()

    failure = ranks.failure()
    assert (failure.ranks, failure.kind) == ((1,), "ended")
    assert failure.line.startswith("rank 1 exited without reporting") and failure.line.endswith("iteration 7")


@pytest.mark.row("G5")
def test_silent_rank_is_named_after_the_timeout():
    ranks = Ranks(timeout_s=1.0)
    ranks.beat(1, "iteration 7")

    failure = ranks.failure(silent=1)
    assert (failure.ranks, failure.kind) == ((1,), "silent")
    assert failure.line.endswith("Last heartbeat: iteration 7")
    ranks.close()


def test_hub_speaks_at_each_beat_and_less_often_to_many_ranks(monkeypatch):
    monkeypatch.setattr(heartbeats, "BEAT_S", 0.2)
    spoken = []
    for world_size in (1, 400):
        hub = Hub(world_size, 60.0, local=True)
        link = connect(("127.0.0.1", hub.port), hub.token, 0)
        spoken.append(sum("hub" in message for message in heard(link, 1.0)))
        link.close()
        hub.close()
    assert 1 <= spoken[0] <= 7 and spoken[1] <= 2  # every 0.2 s, and every 0.8 s


def test_silent_rank_is_named_sooner_where_a_collective_broke(ranks):
    ranks.links[0].send(lost="Timed out waiting 3000ms")

    failure = ranks.failure(silent=1)
    assert (failure.ranks, failure.kind) == ((1,), "silent")


def test_rank_for_which_the_others_timed_out_is_the_one_that_hangs(ranks):
    ranks.beat(1, "iteration 7")
    for rank in (0, 2):
        ranks.links[rank].send(lost="Timed out waiting 3000ms")

    failure = ranks.failure()
    assert (failure.ranks, failure.kind) == ((1,), "stuck")
    assert "while ranks 0, 2 waited (Timed out waiting 3000ms)" in failure.line
    assert failure.line.endswith("Last heartbeat: iteration 7")


def test_of_several_ranks_that_hang_the_time_is_said_in_which_none_did_anything_new(ranks):
    for rank, seconds in ((1, 9_000.0), (2, 500.0)):
        ranks.hub._ranks[rank].still_s = seconds
    ranks.links[0].send(lost="Timed out waiting 3000ms")

    failure = ranks.failure()
    assert (failure.ranks, failure.kind) == ((1, 2), "stuck")
    said = re.search(r"did the same thing for (\S+) s", failure.line)
    assert said is not None and 500 <= float(said[1]) < 9_000


def test_ranks_that_wait_for_each_other_are_all_named(ranks):
    for rank in range(3):
        ranks.beat(rank, f"iteration {rank}")
        ranks.links[rank].send(lost="Timed out waiting 3000ms")

    failure = ranks.failure()
    assert failure.ranks == () and failure.line.startswith("the ranks waited for each other")
    assert "rank 1: iteration 1; rank 2: iteration 2" in failure.line


def test_rank_that_left_is_named_by_those_that_wait_for_it(ranks):
    ranks.links[1].send(left="called sys.exit(3)", code=3)
    ranks.links[1].close()
    ranks.links[2].send(lost="Connection closed by peer")

    failure = ranks.failure()
    assert (failure.ranks, failure.code) == ((1,), 3)
    assert failure.line == "rank 1 called sys.exit(3), while rank 2 waited for it"


def test_ranks_that_leave_are_no_failure(ranks):
    for rank in (1, 2):
        ranks.links[rank].send(left="returned from its function", code=0)
        ranks.links[rank].close()

    assert not [message for message in heard(ranks.links[0], 1.0) if "failure" in message]


def test_end_of_the_hub_is_told(ranks):
    ranks.links[0].send(left="returned from its function", code=0)
    ranks.links[0].finish()
    ranks.hub.close()

    assert {"closed": "returned from its function", "code": 0} in list(ranks.links[2].receive())


@pytest.mark.row("G5")
def test_connection_that_is_reset_is_an_end():
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = Link(socket.create_connection(server.getsockname(), timeout=20))
        other, _ = server.accept()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as of a machine that is gone
    other.close()

    with pytest.raises(EOFError):
        link.receive()
    link.close()


@pytest.mark.slow
def test_time_in_which_rank_0_is_stopped_itself_does_not_count():
    """As by Ctrl-Z: all ranks are stopped for longer than the timeout, and continue."""
    told, result = os.pipe()
    pid = os.fork()
    if pid == 0:
        ranks = Ranks(timeout_s=1.5)
        os.write(result, b"r")
        until = time.monotonic() + 2.5
        failures = 0
        while time.monotonic() < until:
            for rank in range(3):
                ranks.beat(rank)
            failures += sum("failure" in message for message in heard(ranks.links[0], 0.2))
        os.write(result, b"%d" % failures)
        os._exit(0)
    assert os.read(told, 1) == b"r"
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(pid, signal.SIGCONT)
    assert os.read(told, 10) == b"0"
    os.waitpid(pid, 0)


@pytest.mark.parametrize("sent", [b"guessed 1", b"[1]", b"GET / HTTP/1.1", b'{"rank": 9}'])
def test_stranger_is_not_heard(ranks, sent):
    with socket.create_connection(("127.0.0.1", ranks.hub.port)) as stranger:
        stranger.sendall(sent + b'\n{"failed": {"line": "no", "ranks": [1]}}\n')
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""

    failure = Failure("rank 2 failed", (2,), kind="raised")
    ranks.links[2].send(failed=asdict(failure))
    assert ranks.failure() == failure


def strange_bytes(number, token, generator):
    """What a stranger sends: crafted to be parsed, to be long, to be almost a greeting; or anything."""
    crafted = [
        b"[" * 100_000 + b"\n",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\n" * 1000,
        b"9" * 10_000 + b"\n",
        b'{"rank": 9, "token": "' + token.encode() + b'"}\n',
        f"{token} 3\n".encode(),
        f"{token} -1\n".encode(),
        f"{token}\n".encode(),
        f"{token[:-1]} 1\n".encode(),
        f" {token} 1\n".encode(),
        f"{token} 1\r\n".encode(),
        f"{token} 1\n".encode(),  # of a rank that is connected
        "\ud800".encode("utf-16", "surrogatepass"),
        b"",
    ]
    return crafted[number] if number < len(crafted) else generator.randbytes(generator.randrange(200))


@pytest.mark.slow
def test_whatever_strangers_send_the_ranks_are_heard(ranks):
    generator = random.Random(0)
    for number in range(10_000):
        sent = strange_bytes(number, ranks.hub.token, generator)
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", ranks.hub.port), timeout=20) as stranger,
        ):
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            stranger.recv(1)  # until it is refused

    failure = Failure("rank 2 failed", (2,), kind="raised")
    ranks.links[2].send(failed=asdict(failure))
    assert ranks.failure() == failure


@pytest.mark.parametrize(
    "sent",
    [
        b"[" * 100_000,
        b"[1]",
        b'"beat"',
        b"\xff\xfe",
        b'{"beat": 3}',
        b'{"left": "no code"}',
        b'{"failed": 1}',
        b'{"failed": {"rank": 1}}',
        b'{"run": "x"}',
    ],
)
def test_rank_that_sends_what_is_no_message_does_not_end_the_hub(ranks, sent):
    failure = Failure("rank 0 failed", (0,), kind="raised")
    ranks.links[0].send(failed=asdict(failure))
    assert ranks.failure() == failure
    ranks.links[1].socket.sendall(sent + b"\n")
    later = Failure("rank 2 failed", (2,), run=1, kind="raised")
    ranks.links[2].send(failed=asdict(later))

    assert ranks.failure(silent=1) == later


def test_stranger_that_says_nothing_is_not_waited_for(ranks, monkeypatch):
    monkeypatch.setattr(heartbeats, "_GREETING_S", 0.1)
    with socket.create_connection(("127.0.0.1", ranks.hub.port), timeout=20) as stranger:
        stranger.sendall(b"half a gree")
        assert stranger.recv(100) == b""


def test_forked_worker_does_not_keep_a_connection_open(ranks):
    pid = os.fork()
    if pid == 0:
        time.sleep(20)
        os._exit(0)
    ranks.links[1].close()

    assert ranks.failure().ranks == (1,)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
