"""The page of a run while it trains: served on loopback to whoever has its token, redrawn as lines arrive.

The server reads the run's folder and writes request files into it, nothing else; the run itself needs no port and does
not know of it. It answers three addresses below ``/TOKEN/``: the page, ``data``, and POST to ``stop``, ``save`` or
``evaluate``. To all else the answer is 403 and nothing: another user of this machine can connect, too.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import sys
import threading
import time
import urllib.parse
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ignite_engine.errors import Interrupted, one_line
from ignite_engine.report.pages import live_page, live_parts
from ignite_engine.report.records import read_run
from ignite_engine.run_directory import RunDirectory

HOST = "127.0.0.1"
REQUESTS = ("stop", "save", "evaluate")
_NAMES = (HOST, "localhost")
_IDLE_S = 10.0
"""After which a connection that says nothing is closed."""
_READING_SHARE = 0.1
"""Of the time that the folder may be read, so that a page of a long run leaves the processor to the run."""


class PortInUse(OSError):
    """Another program listens on the port; one line with the remedy."""


class LivePage:
    """What the server answers about one run.

    Args:
        defaults: of the config; settings that equal theirs are folded.

    Raises:
        NotARun: the directory does not hold a run.
    """

    def __init__(self, directory: str | Path, defaults: Mapping[str, Any] | None = None) -> None:
        self.run, self._defaults = RunDirectory(directory), defaults or {}
        self.name = read_run(directory).name
        self._lock = threading.Lock()
        self._version, self._next_reading = 0, 0.0
        self._seen: tuple[object, ...] = ()
        self._parts: dict[str, str] = {}
        self._changed_at: dict[str, int] = {}
        self._data: dict[str, Any] = {}

    def page(self) -> str:
        """The page without the run's values, which its script fetches."""
        return live_page(self.name)

    def data(self, since: int) -> dict[str, Any]:
        """What has changed after version ``since``: HTML by the name of its place, the charts, and the requests."""
        with self._lock:
            self._read_if_changed()
            asked = [name for name in REQUESTS if self._request(name).exists()]
            if since == self._version:
                return {"version": self._version, "requests": asked}
            parts = {name: html for name, html in self._parts.items() if self._changed_at[name] > since}
            return {"version": self._version, "requests": asked, "parts": parts, **self._data}

    def ask(self, name: str) -> None:
        """Make a request file, which the run takes within about a second."""
        # a link of this name is not followed out of the folder, nor a pipe's reader waited for
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self._request(name), flags, 0o666)
        os.utime(descriptor)
        os.close(descriptor)

    def _request(self, name: str) -> Path:
        return self.run.path / f"{name}.request"

    def _read_if_changed(self) -> None:
        began = time.monotonic()
        seen = self._stamps()
        if seen == self._seen or began < self._next_reading:
            return
        record = read_run(self.run.path)
        parts, self._data = live_parts(record, self._defaults)
        self._version, self._seen = self._version + 1, seen
        for name, html in parts.items():
            if self._parts.get(name) != html:
                self._parts[name], self._changed_at[name] = html, self._version
        took = time.monotonic() - began
        self._next_reading = began + took / _READING_SHARE

    def _stamps(self) -> tuple[object, ...]:
        """Size and time of what the page is made of."""
        run = self.run
        logs = (run.metrics, run.followed, run.history, run.goodput)
        files = (*logs, run.summary, run.config, run.code, run.path / "notes.md")
        return tuple(map(_stamp, (*files, run.logs / "rank_0.log", run.path / "media" / "index.jsonl")))


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


class LiveServer(ThreadingHTTPServer):
    """Listens on loopback, and answers whoever has the token.

    Args:
        port: 0: one that is free.

    Raises:
        PortInUse: another program listens on it.
    """

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = 0) -> None:
        self.page, self.token = page, secrets.token_urlsafe(32)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise PortInUse(
                f"--port: got {port}, which cannot be listened on ({error.strerror}): give another one, or leave it "
                "out for one that is free."
            ) from None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # a browser may close its connection
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = _IDLE_S

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        name = self._name(path)
        if name == "":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page.page().encode())
        elif name == "data":
            since = dict(urllib.parse.parse_qsl(query)).get("since", "")
            try:
                values = self.server.page.data(int(since) if since.isdecimal() and len(since) < 16 else 0)
            except OSError as error:  # the folder was moved or deleted, or its file system is away
                self._answer(HTTPStatus.GONE, "text/plain; charset=utf-8", one_line(error).encode())
            else:
                self._answer(HTTPStatus.OK, "application/json", json.dumps(values).encode())
        else:
            self._refuse()

    def do_POST(self) -> None:
        name = self._name(self.path)
        if name not in REQUESTS:
            self._refuse()
            return
        try:
            self.server.page.ask(name)
        except OSError as error:
            said = f"{name}.request could not be written: {error.strerror}."
            self._answer(HTTPStatus.CONFLICT, "text/plain; charset=utf-8", said.encode())
        else:
            self._answer(HTTPStatus.NO_CONTENT, "text/plain; charset=utf-8", b"")

    def _name(self, path: str) -> str | None:
        """What comes after the token; None: the token is wrong, or the request is another site's."""
        first, token, *rest = path.split("/") if path.count("/") == 2 else ("", "", "")
        is_known = hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        host = self.headers.get("Host", "")
        # a name of another site that leads to this machine is not ours
        is_ours = host.rpartition(":")[0] in _NAMES and self.headers.get("Origin") in (None, f"http://{host}")
        return rest[0] if is_known and is_ours and first == "" else None

    def _refuse(self) -> None:
        self._answer(HTTPStatus.FORBIDDEN, None, b"")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """To what is no request of ours: the same nothing."""
        self.close_connection = True
        self._refuse()

    def _answer(self, status: HTTPStatus, kind: str | None, content: bytes) -> None:
        self.send_response_only(status)
        if kind is not None:
            for header, value in (
                ("Content-Type", kind),
                ("Cache-Control", "no-store"),
                ("Referrer-Policy", "no-referrer"),  # the address holds the token
                ("X-Content-Type-Options", "nosniff"),
                ("Cross-Origin-Resource-Policy", "same-origin"),
                ("Content-Security-Policy", "frame-ancestors 'none'"),
            ):
                self.send_header(header, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line would hold the token."""


def serve(directory: str | Path, port: int = 0, defaults: Mapping[str, Any] | None = None) -> None:
    """Serve the live page of a run until Ctrl-C; its address, which only this terminal has, is printed first.

    Raises:
        NotARun: the directory does not hold a run.
        PortInUse: another program listens on the port.
        Interrupted: another signal than Ctrl-C.
    """
    with LiveServer(LivePage(directory, defaults), port) as server:
        print(f"{server.address}\nCtrl-C ends the page; the run goes on.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
        except Interrupted as stop:
            if stop.code != 130:
                raise
