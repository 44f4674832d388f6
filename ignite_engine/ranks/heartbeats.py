"""The connections of all ranks to rank 0, over which each says that it lives, and hears which rank has failed.

A connection begins with a line ``TOKEN RANK``, which is compared, not parsed: without it nothing else is read, and the
hub goes on whatever anybody sends. Messages are JSON objects, one a line, so nothing of them is executed. A rank sends
``beat`` (what it does), ``run`` (a run begins), ``failed`` (it raises), ``lost`` (a collective of it broke) and
``left`` (its function has ended). The hub sends ``hub`` (it lives, and what rank 0 does), ``failure`` and ``left``, and
at its end ``closed``: how rank 0 has left, and its code.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Message = Mapping[str, Any]

BEAT_S = 0.5
SILENT_S = 2.0
"""A rank of which nothing is heard for so long, while a collective of its peers has broken, is gone."""
_SEND_TIMEOUT_S = 5.0
_CLOSE_S = 1.0
_LIMIT = 2**20
_GREETING_LIMIT = 64
_GREETING_S = 5.0
_STRANGERS = 64

ENDED = "exited without reporting: it was killed, ran out of memory, or crashed in native code"
SILENT = "gave no sign of life for {:.1f} s: it is stopped, or its machine or the link to it is down"

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for connection in list(_sockets):
        connection.close()


# a loader worker outlives its rank for some seconds: the peers would not see the connection end
os.register_at_fork(after_in_child=_close_in_child)


@dataclass(frozen=True)
class Failure:
    """Why all ranks end.

    Attributes:
        line: one line, the same on every rank; it names the ranks that failed, and how.
        ranks: those that failed; empty where none can be named.
        run: the number of the run in which a rank raised; the next one forgets it.
        trace: the traceback of what was raised.
        code: the exit code of ranks that are ended for it.
        kind: ``raised``: the rank may still leave by itself; ``ended``: it has; ``silent``: nothing is heard of it, its
            process is stopped, if it lives; ``stuck``: it lives, and its peers wait for it.
    """

    line: str
    ranks: tuple[int, ...] = ()
    run: int = 0
    trace: str = ""
    code: int = 1
    kind: Literal["raised", "ended", "silent", "stuck"] = "ended"

    @property
    def raised(self) -> bool:
        return self.kind == "raised"

    @classmethod
    def of(cls, values: Message) -> Failure:
        return cls(**{**values, "ranks": tuple(values["ranks"])})


class Link:
    """One end of a connection; any thread may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _sockets.add(connection)
        self.socket = connection
        self._lock = threading.Lock()
        self._unread = b""

    def send(self, **message: Any) -> None:
        """Without effect where the other end is gone, which :meth:`receive` says."""
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message]:
        """The messages that have arrived; waits for more bytes.

        Raises:
            EOFError: the other end is gone, or has sent what is no message.
        """
        *lines, self._unread = (self._unread + self._received(65536)).split(b"\n")
        if len(self._unread) > _LIMIT:
            raise EOFError
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise EOFError from error
        if not all(isinstance(message, dict) for message in messages):
            raise EOFError
        return messages

    def receive_greeting(self) -> bytes | None:
        """The first line, without its end; None while it is not complete.

        Raises:
            EOFError: the other end is gone, or the line is longer than a greeting.
        """
        line, end, rest = (self._unread + self._received(_GREETING_LIMIT)).partition(b"\n")
        if len(line) > _GREETING_LIMIT:
            raise EOFError
        self._unread = rest if end else line
        return line if end else None

    def _received(self, size: int) -> bytes:
        """Up to ``size`` bytes; none where none came in time."""
        try:
            data = self.socket.recv(size)
        except TimeoutError:
            return b""
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return data

    def greet(self, token: str, rank: int) -> None:
        """Send the first line, and wait for the answer.

        Raises:
            OSError: there is none.
        """
        self.socket.sendall(_greeting(token, rank))
        answer, _, self._unread = self.socket.recv(65536).partition(b"\n")
        if not answer:
            raise ConnectionError("the connection was not accepted")

    def finish(self) -> None:
        """Nothing more is sent; what the other end still sends can be received."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.socket.close()


def _greeting(token: str, rank: int) -> bytes:
    return f"{token} {rank}\n".encode()


def connect(address: tuple[str, int], token: str, rank: int) -> Link:
    """Raises:
    OSError: the hub cannot be reached.
    """
    link = Link(socket.create_connection(address, timeout=_SEND_TIMEOUT_S))
    link.greet(token, rank)
    return link


@dataclass
class _Rank:
    """What the hub knows of a rank.

    Attributes:
        beat: its last heartbeat.
        quiet_s: since anything was heard of it.
        still_s: since its heartbeat has changed.
        lost: with what a collective of it broke.
        left: how its function has ended.
        code: the exit code that goes with it.
    """

    beat: str = "none"
    quiet_s: float = 0.0
    still_s: float = 0.0
    lost: str | None = None
    left: str | None = None
    code: int = 1
    link: Link | None = None


class Hub:
    """Rank 0's server: it hears all ranks, judges who has failed, and tells everyone. A thread of its own.

    Args:
        world_size: ranks that will connect, rank 0 among them.
        timeout_s: a rank of which nothing is heard for so long has failed.
        local: only this machine may connect.
    """

    def __init__(self, world_size: int, timeout_s: float, *, local: bool) -> None:
        self.timeout_s = timeout_s
        self.token = secrets.token_hex(16)
        self._server = socket.create_server(("127.0.0.1" if local else "", 0), backlog=world_size + _STRANGERS)
        _sockets.add(self._server)
        self.port = int(self._server.getsockname()[1])
        self._ranks = {rank: _Rank() for rank in range(world_size)}
        self._greetings = {_greeting(self.token, rank).rstrip(): rank for rank in range(world_size)}
        self._strangers: dict[Link, float] = {}
        self._beat_s = BEAT_S * max(1.0, world_size / 100)
        self._failure: Failure | None = None
        self._lost_s = 0.0
        self._closes = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="heartbeats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell all ranks that nobody watches them any more; rank 0's own link has been finished."""
        self._closes.set()
        self._thread.join(2 * _CLOSE_S)

    # -- connections ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        before, since_tick, closing_s, told = time.monotonic(), 0.0, 0.0, False
        while closing_s < _CLOSE_S:
            for key, _ in self._selector.select(self._beat_s):
                if key.data is None:
                    self._accept()
                else:
                    self._read(*key.data)
            now = time.monotonic()
            for stranger in [link for link, since in self._strangers.items() if now - since > _GREETING_S]:
                self._drop(stranger)
            # while this process itself was stopped, by Ctrl-Z say, nobody was silent
            elapsed, before = min(now - before, self._beat_s), now
            since_tick += elapsed
            if self._closes.is_set():
                if not told and self._ranks[0].left is not None:  # else that has been sent, and comes
                    self._tell(closed=self._ranks[0].left, code=self._ranks[0].code)
                    told = True
                closing_s += max(elapsed, 1e-9)
                if not any(rank.link for rank in self._ranks.values()):
                    break
                continue
            self._judge(elapsed)
            if since_tick >= self._beat_s:
                since_tick = 0.0
                self._tell(hub=self._ranks[0].beat)
        self._selector.close()
        self._server.close()
        for rank in self._ranks.values():
            if rank.link is not None:
                rank.link.close()
        for stranger in self._strangers:
            stranger.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            link = Link(self._server.accept()[0])
            self._selector.register(link.socket, selectors.EVENT_READ, (link, None))
            self._strangers[link] = time.monotonic()

    def _read(self, link: Link, rank: int | None) -> None:
        try:
            if rank is None:
                self._introduce(link)
            else:
                for message in link.receive():
                    self._hear(rank, message)
        except Exception:  # whatever one connection brings, the others are served
            self._drop(link)
            if rank is not None:
                self._ended(rank)

    def _introduce(self, link: Link) -> None:
        """Take a connection as that of the rank that it greets for.

        Raises:
            EOFError: it is a stranger's, or one of a rank that is connected.
        """
        greeting = link.receive_greeting()
        if greeting is None:
            return
        rank = next((rank for own, rank in self._greetings.items() if hmac.compare_digest(own, greeting)), None)
        if rank is None or self._ranks[rank].link is not None:
            raise EOFError
        del self._strangers[link]
        self._ranks[rank].link = link
        self._selector.modify(link.socket, selectors.EVENT_READ, (link, rank))
        link.send()
        if self._failure is not None:
            link.send(failure=asdict(self._failure))

    def _drop(self, link: Link) -> None:
        self._strangers.pop(link, None)
        self._selector.unregister(link.socket)
        link.close()

    def _tell(self, **message: Any) -> None:
        for rank in self._ranks.values():
            if rank.link is not None:
                rank.link.send(**message)

    # -- judging --------------------------------------------------------------------------------------------------

    def _hear(self, rank: int, message: Message) -> None:
        peer = self._ranks[rank]
        peer.quiet_s = 0.0
        if "beat" in message and message["beat"] != peer.beat:
            peer.beat, peer.still_s = str(message["beat"]), 0.0
            if rank == 0:  # which may be killed, and this hub with it
                self._tell(hub=peer.beat)
        elif "failed" in message:
            failure = Failure.of(message["failed"])
            if self._failure is None or failure.run > self._failure.run:
                self._announce(failure)
        elif "lost" in message:
            peer.lost = message["lost"]
        elif "left" in message:
            peer.left, peer.code = message["left"], message["code"]
            self._tell(left=rank)
        elif "run" in message:
            before = self._failure
            self._failure = None if before and before.raised and message["run"] > before.run else before

    def _ended(self, rank: int) -> None:
        """The connection of a rank has ended, and so has its process, or nearly."""
        peer = self._ranks[rank]
        peer.link = None
        if peer.left is None:
            peer.left = "ended"
            self._tell(left=rank)
            if self._failure is None and not self._closes.is_set():
                self._announce(Failure(f"rank {rank} {ENDED}. {self._heartbeats([rank])}", (rank,)))

    def _announce(self, failure: Failure) -> None:
        self._failure, self._lost_s = failure, 0.0
        for rank in self._ranks.values():
            rank.lost = None
        self._tell(failure=asdict(failure))

    def _judge(self, elapsed: float) -> None:
        for peer in self._ranks.values():
            peer.quiet_s += elapsed
            peer.still_s += elapsed
        if self._failure is not None:
            return
        broken = [rank for rank, peer in self._ranks.items() if peer.lost is not None]
        self._lost_s = self._lost_s + elapsed if broken else 0.0
        limit = min(SILENT_S, self.timeout_s) if broken else self.timeout_s
        silent = [rank for rank, peer in self._ranks.items() if peer.left is None and peer.quiet_s >= limit]
        if silent:
            seconds = max(self._ranks[rank].quiet_s for rank in silent)
            self._announce(
                Failure(
                    f"{_named(silent)} {SILENT.format(seconds)}. {self._heartbeats(silent)}",
                    tuple(silent),
                    kind="silent",
                )
            )
        elif (
            gone := [rank for rank, peer in self._ranks.items() if peer.left is not None]
        ) and self._lost_s >= self._beat_s:
            self._announce(self._left(gone, broken))
        elif self._lost_s >= SILENT_S + self._beat_s:
            hangs = any("timed out" in str(self._ranks[rank].lost).lower() for rank in broken)
            self._announce(self._hang(broken) if hangs else self._broken(broken))

    def _hang(self, broken: list[int]) -> Failure:
        """All live, but a collective timed out."""
        hung = [rank for rank, peer in self._ranks.items() if rank not in broken and peer.left is None]
        if hung:
            seconds = min(self._ranks[rank].still_s for rank in hung)
            return Failure(
                f"{_named(hung)} did not come while {_named(broken)} waited ({self._ranks[broken[0]].lost}), and did "
                f"the same thing for {seconds:.1f} s. {self._heartbeats(hung)}",
                tuple(hung),
                kind="stuck",
            )
        return Failure(
            f"the ranks waited for each other ({self._ranks[broken[0]].lost}). {self._heartbeats(list(self._ranks))}",
            kind="stuck",
        )

    def _broken(self, broken: list[int]) -> Failure:
        """All live, but a connection between two of them has ended."""
        return Failure(
            f"{_named(broken)} lost a connection to a rank that still answers rank 0 "
            f"({self._ranks[broken[0]].lost}). {self._heartbeats(broken)}",
            kind="stuck",
        )

    def _left(self, gone: list[int], broken: list[int]) -> Failure:
        how = "; ".join(f"rank {rank} {self._ranks[rank].left}" for rank in gone)
        code = max(self._ranks[rank].code for rank in gone)
        return Failure(f"{how}, while {_named(broken)} waited for it", tuple(gone), code=code or 1)

    def _heartbeats(self, ranks: list[int]) -> str:
        if len(ranks) == 1:
            return f"Last heartbeat: {self._ranks[ranks[0]].beat}"
        return "Last heartbeats: " + "; ".join(f"rank {rank}: {self._ranks[rank].beat}" for rank in ranks)


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
