"""Exchanges small messages between all ranks over plain sockets, without a thread.

A collective of gloo hands its work to threads, which costs a step of 3 ms on busy cores another 1 ms; a row over these
sockets costs 0.1 ms where it is waited for (``python -m benchmarks.agreement``).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_TOKEN, _RANK = 16, 8
"""The sizes of the token and the rank that open a connection, in bytes."""
_HELLO_S = 10.0


def listening() -> socket.socket:
    """A server socket on a free port of this machine."""
    both = socket.has_dualstack_ipv6()
    return socket.create_server(("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)


class Exchange:
    """A star of connections with rank 0 in its middle; made on all ranks together.

    Args:
        store: where the ranks find each other, of this exchange alone.
        timeout_s: how long a rank waits for another one.

    Raises:
        DistNetworkError: rank 0 cannot be reached; later, a rank is gone or does not answer.
    """

    def __init__(self, rank: int, ranks: int, store: Any, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._peers: dict[int, _Peer] = {}
        """By rank: on rank 0 all other ranks, on the others rank 0."""
        with listening() as server:
            # MASTER_ADDR is how the others have found rank 0, but may be left over where a file brought them together
            hosts = [*filter(None, [os.environ.get("MASTER_ADDR")]), socket.gethostname()]
            token = secrets.token_bytes(_TOKEN)
            if rank:
                self._connect(*pickle.loads(store.get("meeting")))
                return
            store.set("meeting", pickle.dumps((hosts, server.getsockname()[1], token)))
            server.settimeout(timeout_s)
            while len(self._peers) < ranks - 1:
                self._accept(server, token)

    def _connect(self, hosts: Sequence[str], port: int, token: bytes) -> None:
        local = ["127.0.0.1"] if socket.gethostname() == hosts[-1] else []
        for host in (*local, *hosts):
            with contextlib.suppress(OSError):
                peer = _Peer(socket.create_connection((host, port), self._timeout_s))
                peer.connection.sendall(token + self._rank.to_bytes(_RANK))
                if peer.file.read(_TOKEN) == token:  # else the port belongs to another program
                    self._peers[0] = peer
                    return
        raise dist.DistNetworkError(
            f"Rank {self._rank} cannot reach rank 0 at {' or '.join(hosts)}, port {port}: set MASTER_ADDR to an "
            "address of its host, and let the ranks connect to each other."
        )

    def _accept(self, server: socket.socket, token: bytes) -> None:
        peer = _Peer(server.accept()[0])
        with contextlib.suppress(OSError):  # a connection from outside of this run
            peer.connection.settimeout(_HELLO_S)
            if peer.file.read(_TOKEN) == token:
                rank = int.from_bytes(peer.file.read(_RANK))
                peer.connection.sendall(token)
                peer.connection.settimeout(self._timeout_s)
                self._peers[rank] = peer

    def __call__(self, own: bytes) -> list[bytes]:
        """Send a message to all ranks; returns those of all ranks, by rank. A collective."""
        if self._rank:
            self._send(0, own)
            rows: list[bytes] = self._take(0)
            return rows
        rows = [own, *(self._take(rank) for rank in sorted(self._peers))]
        for rank in self._peers:
            self._send(rank, rows)
        return rows

    def close(self) -> None:
        """Another thread that waits here, and the other ranks, find their connections closed."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, rank: int, content: object) -> None:
        try:
            self._peers[rank].connection.sendall(pickle.dumps(content))
        except OSError as error:
            raise dist.DistNetworkError(f"Rank {rank} does not listen any more: {error}") from error

    def _take(self, rank: int) -> Any:
        try:
            return pickle.load(self._peers[rank].file)
        except TimeoutError as error:
            raise dist.DistNetworkError(f"Rank {rank} has not answered for {self._timeout_s:g} s") from error
        except (OSError, EOFError, pickle.UnpicklingError) as error:  # of a half of what it said
            raise dist.DistNetworkError(f"Connection closed by rank {rank}: {error}") from error


class _Peer:
    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.file = connection, connection.makefile("rb")
