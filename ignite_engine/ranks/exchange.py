"""What each rank says to all others, over plain sockets: no thread wakes up for it.

A collective of gloo hands its work to threads, which costs a step of 3 ms on busy cores another 1 ms; a row over these
sockets costs 0.1 ms where it is waited for (``python -m benchmarks.agreement``).
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence

import torch.distributed as dist

_Meeting = tuple[list[str], int, bytes]
"""Hosts of rank 0, its port, and what tells the ranks of this run from others."""
_HELLO_S = 10.0
_SIZE, _HELLO = struct.Struct("!Q"), struct.Struct("!16sQ")


class Exchange:
    """A star of connections with rank 0 in its middle; made on all ranks together.

    Args:
        broadcast: gives every rank what rank 0 gives it.
        timeout_s: how long a rank waits for another one.

    Raises:
        DistNetworkError: rank 0 cannot be reached; later, a rank is gone or does not answer.
    """

    def __init__(self, rank: int, ranks: int, broadcast: Callable[[_Meeting], _Meeting], timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._peers: dict[int, socket.socket] = {}
        """By rank: all others on rank 0, rank 0 on the others."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        with socket.create_server(("", 0), family=family, backlog=ranks, dualstack_ipv6=both) as server:
            # MASTER_ADDR is how the others have found rank 0, but may be left over where a file brought them together
            hosts = [*filter(None, [os.environ.get("MASTER_ADDR")]), socket.gethostname()]
            hosts, port, token = broadcast((hosts, server.getsockname()[1], secrets.token_bytes(16)))
            if rank:
                self._connect(hosts, port, token)
                return
            server.settimeout(timeout_s)
            while len(self._peers) < ranks - 1:
                self._accept(server, token)

    def _connect(self, hosts: Sequence[str], port: int, token: bytes) -> None:
        local = ["127.0.0.1"] if socket.gethostname() == hosts[-1] else []
        for host in (*local, *hosts):
            try:
                connection = socket.create_connection((host, port), self._timeout_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(_HELLO.pack(token, self._rank))
                if _receive(connection, len(token)) != token:  # somebody else's port
                    continue
            except OSError:
                continue
            self._peers[0] = connection
            return
        raise dist.DistNetworkError(
            f"Rank {self._rank} cannot reach rank 0 at {' or '.join(hosts)}, port {port}: set MASTER_ADDR to an "
            "address of its host, and let the ranks connect to each other."
        )

    def _accept(self, server: socket.socket, token: bytes) -> None:
        connection, _ = server.accept()
        try:
            connection.settimeout(_HELLO_S)
            found, rank = _HELLO.unpack(_receive(connection, _HELLO.size))
            if found == token:
                connection.sendall(token)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(self._timeout_s)
                self._peers[rank] = connection
        except OSError:  # of somebody who is not of this run
            connection.close()

    def __call__(self, own: bytes) -> list[bytes]:
        """What every rank says, by rank; all call it, in the same order."""
        if self._rank:
            self._send(0, own)
            return _unpack(self._take(0))
        rows = [own, *(self._take(rank) for rank in sorted(self._peers))]
        for rank in self._peers:
            self._send(rank, _pack(rows))
        return rows

    def _send(self, rank: int, content: bytes) -> None:
        try:
            self._peers[rank].sendall(_SIZE.pack(len(content)) + content)
        except OSError as error:
            raise dist.DistNetworkError(f"Rank {rank} does not listen any more: {error}") from error

    def _take(self, rank: int) -> bytes:
        try:
            (size,) = _SIZE.unpack(_receive(self._peers[rank], _SIZE.size))
            return _receive(self._peers[rank], size)
        except TimeoutError as error:
            raise dist.DistNetworkError(f"Rank {rank} has not answered for {self._timeout_s:g} s") from error
        except OSError as error:
            raise dist.DistNetworkError(f"Connection closed by rank {rank}: {error}") from error


def _receive(connection: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    rest = memoryview(content)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise ConnectionResetError("it is gone")
        rest = rest[count:]
    return bytes(content)


def _pack(rows: Sequence[bytes]) -> bytes:
    return b"".join((_SIZE.pack(len(rows)), *(_SIZE.pack(len(row)) for row in rows), *rows))


def _unpack(content: bytes) -> list[bytes]:
    (count,) = _SIZE.unpack_from(content)
    sizes = struct.unpack_from(f"!{count}Q", content, _SIZE.size)
    rows, begin = [], _SIZE.size * (count + 1)
    for size in sizes:
        rows.append(content[begin : begin + size])
        begin += size
    return rows
