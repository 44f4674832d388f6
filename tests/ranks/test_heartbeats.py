"""What rank 0 hears of the others, and whom it says to have failed; the ranks are connections of this process."""

import contextlib
import os
import random
import select
import signal
import socket
import threading
from dataclasses import asdict

import pytest

from ignite_engine.ranks.heartbeats import Failure, Hub, connect


class Ranks:
    """Connections of three ranks to a hub."""

    def __init__(self, timeout_s=60.0):
        self.hub = Hub(3, timeout_s, local=True)
        self.links = [connect(("127.0.0.1", self.hub.port), self.hub.token, rank) for rank in range(3)]
        self.beats = [f"iteration {rank}" for rank in range(3)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for link in self.links:
            link.close()
        self.hub.close()

    def beat(self, *those):
        for rank in those:
            self.links[rank].send(beat=self.beats[rank])

    def failure(self, at=0, *, silent=None, tries=200, clock=None):
        """What the hub tells rank ``at``, while all but ``silent`` repeat their heartbeats; None: nothing."""
        poll = select.poll()
        poll.register(self.links[at].socket, select.POLLIN)
        for _ in range(tries):
            if clock is not None:
                clock.move(0.1)
            with contextlib.suppress(OSError):  # of a connection that a test has closed
                self.beat(*(rank for rank in range(3) if rank != silent))
            for message in self.links[at].receive() if poll.poll(50 if clock is None else 20) else []:
                if "failure" in message:
                    return Failure.of(message["failure"])


@pytest.fixture
def ranks():
    with Ranks() as ranks:
        ranks.beat(0, 1, 2)
        yield ranks


@pytest.mark.row("G5")
@pytest.mark.parametrize(
    ("broke_at", "silent", "expected", "words"),
    [
        ((0,), 1, ((1,), "silent", 1), "rank 1 heartbeat: iteration 1"),  # named much sooner than after the timeout
        ((0, 2), None, ((1,), "stuck", 1), "rank 1 ranks 0, 2 3000ms heartbeat: iteration 1"),
        ((0, 1, 2), None, ((), "stuck", 1), "0: 1: iteration 1; 2: iteration 2"),  # they wait for each other
    ],
)
def test_rank_that_others_waited_for_is_named_with_what_it_did_last(ranks, broke_at, silent, expected, words, clock):
    for rank in broke_at:
        ranks.links[rank].send(lost="Timed out waiting 3000ms")
    failure = ranks.failure(silent=silent, clock=clock)
    assert (failure.ranks, failure.kind, failure.code) == expected
    assert not [word for word in words.split() if word not in failure.line], failure.line


@pytest.mark.row("G5")
def test_silent_rank_is_named_after_the_timeout(clock):
    with Ranks(timeout_s=5.0) as ranks:
        ranks.beat(1)
        assert ranks.failure(silent=1, tries=20, clock=clock) is None
        failure = ranks.failure(silent=1, clock=clock)
        assert (failure.ranks, failure.kind) == ((1,), "silent") and failure.line.endswith("iteration 1")


def test_ranks_that_leave_are_no_failure_and_the_end_of_the_hub_is_told(ranks):
    ranks.links[1].send(left="returned from its function", code=0)
    ranks.links[1].close()
    assert ranks.failure(silent=1, tries=6) is None
    ranks.links[0].send(left="returned from its function", code=0)
    ranks.links[0].finish()
    ranks.hub.close()
    assert {"closed": "returned from its function", "code": 0} in list(ranks.links[2].receive())


def test_forked_worker_does_not_keep_a_connection_open(ranks):
    pid = os.fork()
    if pid == 0:
        threading.Event().wait(20)
        os._exit(0)
    ranks.links[1].close()
    assert ranks.failure(silent=1).ranks == (1,)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


# --------------------------------------------------------------------------------------------------------- strangers


def strange(token):
    """What a stranger sends: crafted to be parsed, to be long, to be almost a greeting; or anything."""
    deep = [b"[" * 100_000 + b"\n", b'{"a":' * 50_000, b"9" * 10_000 + b"\n", b"\n" * 1000, b"GET / HTTP/1.1", b""]
    lines = ["{} 3", "{} -1", "{}", " {} 1", "{} 1\r", "{} 1", '{{"rank": 9, "token": "{}"}}']  # "{} 1" is connected
    greetings = [f"{line.format(token)}\n".encode() for line in lines]
    generator = random.Random(0)
    return [*deep, *greetings, *(generator.randbytes(generator.randrange(200)) for _ in range(50))]


def test_whatever_strangers_send_the_ranks_are_heard(ranks):
    message = b'\n{"failed": {"line": "no", "ranks": [1]}}\n'
    for sent in strange(ranks.hub.token):
        stranger = socket.create_connection(("127.0.0.1", ranks.hub.port), timeout=20)
        with stranger, contextlib.suppress(OSError):
            stranger.sendall(sent + message)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    failure = Failure("rank 2 failed: ValueError", (2,), trace="Traceback", kind="raised")
    ranks.links[2].send(failed=asdict(failure))
    assert [ranks.failure(at) for at in range(3)] == [failure] * 3
