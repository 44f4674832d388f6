"""An S3 server of this machine, and a proxy before it that is slow, broken or cut short."""

import contextlib
import socket
import subprocess
import sys
import threading
import time

from s3fs import S3FileSystem

from tests.kit.runs import free_port

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "the-key-id",
    "AWS_SECRET_ACCESS_KEY": "the-secret-key",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    # as little patience as a test has
    "AWS_MAX_ATTEMPTS": "1",
}


@contextlib.contextmanager
def s3_server(port=None):
    """moto's server in a process of its own; yields its port."""
    port = free_port() if port is None else port
    code = "import sys; from moto.server import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    with socket.create_connection(("127.0.0.1", port), 1):
                        break
                except OSError:
                    assert time.monotonic() < deadline and process.poll() is None
                    time.sleep(0.05)
            yield port
        finally:
            process.kill()


def make_bucket(port, name):
    """On the server itself, whatever lies before it."""
    store = S3FileSystem(
        key=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        secret=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=f"http://127.0.0.1:{port}",
        skip_instance_cache=True,
    )
    store.mkdir(name)


class Proxy:
    """Forwards connections to a server, in the way that :attr:`mode` says.

    Modes: ``open``; ``error``: each request is answered by 500; ``cut``: an answer ends after :attr:`cut_bytes`, as
    does what is sent, and the connection with it.
    """

    def __init__(self, to_port):
        self._to_port = to_port
        self.mode = "open"
        self.bytes_per_s = None
        self.cut_bytes = 2000
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._server.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with client, contextlib.suppress(OSError):
            if self.mode == "error":
                client.recv(1 << 16)
                client.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            with socket.create_connection(("127.0.0.1", self._to_port)) as server:
                sending = threading.Thread(target=self._pump, args=(client, server), daemon=True)
                sending.start()
                self._pump(server, client)

    def _pump(self, source, target):
        moved = 0
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 12 if self.bytes_per_s else 1 << 16):
                if self.mode == "cut":
                    piece = piece[: max(0, self.cut_bytes - moved)]
                if self.mode == "error":
                    break
                moved += len(piece)
                target.sendall(piece)
                if self.mode == "cut" and moved >= self.cut_bytes:
                    break
                if self.bytes_per_s:
                    time.sleep(len(piece) / self.bytes_per_s)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
