"""The live page: for whoever has its token and nobody else, redrawn as lines arrive; a run takes its requests."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.cli import main
from ignite_engine.report import NotARun, live
from ignite_engine.report.live import LivePage, LiveServer
from ignite_engine.run_directory import lines_of
from tests.report.test_pages import ROWS, SUMMARY, Page, run_directory

ROOT = Path(__file__).resolve().parents[2]
RUNNING = {**SUMMARY, "status": "running", "reason": None}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_directory(tmp_path / "run", ROWS, {"run": {"name": "mine"}}, RUNNING)


@contextmanager
def served(run: Path) -> Iterator[LiveServer]:
    with LiveServer(LivePage(run)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def answer(
    server: LiveServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    return response.status, response.read(), response.headers


def data(server: LiveServer, since: int = 0) -> dict[str, Any]:
    status, content, _ = answer(server, f"/{server.token}/data?since={since}")
    assert status == 200
    values: dict[str, Any] = json.loads(content)
    return values


def test_page_and_its_data_are_those_of_the_run(run: Path, tmp_path: Path) -> None:
    with served(run) as server:
        status, content, headers = answer(server, f"/{server.token}/")
        (tmp_path / "page.html").write_bytes(content)
        page = Page(tmp_path / "page.html")
        assert (
            status == 200
            and page.words["title"] == ["mine"]
            and page.words["button"][:3] == ["Evaluate", "Save", "Stop"]
        )
        assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
        assert server.token not in page.text and re.findall(r"https?://", page.text) == []
        assert "default-src 'none'" in page.text and "connect-src 'self'" in page.text

        found = data(server)
    assert [chart["title"] for chart in found["charts"]][:2] == ["Loss", "accuracy"]
    assert found["charts"][0]["lines"][1]["points"] == [[2, 2.5], [4, 1.25], [6, 0.83333]]
    assert "It is still running" in found["parts"]["head"] and found["may_ask"] and found["requests"] == []


def test_new_lines_are_in_the_next_answer_and_nothing_else(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_READING_SHARE", 1e9)
    with served(run) as server:
        first = data(server)
        assert data(server, first["version"]) == {"version": first["version"], "requests": []}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"iteration": 7, "loss": 0.125}) + "\n")
        second = data(server, first["version"])
        assert second["version"] > first["version"] and second["charts"][0]["lines"][0]["points"][-1] == [7, 0.125]
        assert "users" not in second["parts"] and "Loss, last" in second["parts"]["head"]
        assert data(server)["parts"]["users"] == first["parts"]["users"]  # of a page that was just opened

        (run / "summary.json").write_text(json.dumps(SUMMARY))
        assert not data(server, second["version"])["may_ask"]


def test_the_folder_is_read_a_tenth_of_the_time_at_most(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, reads, read_run = [100.0], list[float](), live.read_run
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])

    def slowly(directory: Any) -> Any:
        now[0] += 2.0
        reads.append(now[0])
        return read_run(directory)

    page = LivePage(run)
    monkeypatch.setattr(live, "read_run", slowly)
    for _ in range(100):
        with (run / "metrics.jsonl").open("a") as file:
            file.write("{}\n")
        page.data(0)
        now[0] += 1.0
    assert reads == [102.0, 122.0, 142.0, 162.0, 182.0, 202.0]


def test_without_the_token_there_is_nothing(run: Path) -> None:
    (run / "secret.txt").write_text("of the run")
    with served(run) as server:
        token, port = server.token, server.server_port
        paths = ["/", "/data", "/stop", f"/{token}", f"/{token[:-1]}/", f"/{token}x/data", "//data", f"/x/{token}/data"]
        paths += [
            f"/{token}/secret.txt",
            f"/{token}/../secret.txt",
            f"/{token}/%2e%2e/secret.txt",
            f"/{token}//etc/passwd",
        ]
        paths += [f"/{token}/stop", "/" + "a" * 2000 + "/"]
        refused = [answer(server, path) for path in paths]
        refused += [
            answer(server, path, "POST") for path in [*paths[:3], f"/{token}/", f"/{token}/data", f"/{token}/x"]
        ]
        refused += [answer(server, f"/{token}/", method) for method in ("HEAD", "PUT", "DELETE", "OPTIONS", "NONSENSE")]
        for host in ("evil.example", f"evil.example:{port}", "", "127.0.0.1.evil.example:80", "localhost"):
            refused += [
                answer(server, f"/{token}/data", Host=host),
                answer(server, f"/{token}/stop", "POST", Host=host),
            ]
        refused.append(answer(server, f"/{token}/stop", "POST", Origin="http://evil.example"))
        refused.append(answer(server, f"/{token}/stop", "POST", Origin="null"))

        assert [(status, content) for status, content, _ in refused] == [(403, b"")] * len(refused)
        assert {tuple(headers.keys()) for _, _, headers in refused} == {("Content-Length",)}
        assert not list(run.glob("*.request"))
        # a tunnel has another port
        assert answer(server, f"/{token}/data", Host="localhost:9")[0] == 200
        assert answer(server, f"/{token}/data", Host=f"127.0.0.1:{port}", Origin=f"http://127.0.0.1:{port}")[0] == 200


@pytest.mark.parametrize(
    "sent", [b"GET /\xff\xfe/ HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n", b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_what_is_no_request_gets_nothing(run: Path, sent: bytes) -> None:
    with served(run) as server, socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        connection.sendall(sent)
        connection.settimeout(30)
        received = b"".join(iter(lambda: connection.recv(4096), b""))
    assert received in (b"", b"HTTP/1.0 403 Forbidden\r\nContent-Length: 0\r\n\r\n")


def test_token_is_new_each_time_long_and_compared_in_constant_time(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[tuple[bytes, bytes]]()
    real = live.hmac.compare_digest
    monkeypatch.setattr(live.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    with served(run) as server, served(run) as other:
        assert server.token != other.token and len(server.token) >= 43
        answer(server, "/wrong/")
        assert compared == [(b"wrong", server.token.encode())]


def test_it_listens_on_loopback_alone(run: Path) -> None:
    with served(run) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"


def test_silent_connection_does_not_keep_others_waiting(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live._Handler, "timeout", 0.2)
    with served(run) as server, socket.create_connection(("127.0.0.1", server.server_port)) as silent:
        assert data(server)["version"] == 1
        silent.settimeout(10)
        assert silent.recv(1) == b""  # closed


def test_buttons_write_request_files_into_the_folder_alone(run: Path, tmp_path: Path) -> None:
    with served(run) as server:
        for name in ("stop", "save", "evaluate"):
            assert answer(server, f"/{server.token}/{name}", "POST")[:2] == (204, b"")
        assert data(server)["requests"] == ["stop", "save", "evaluate"]
        assert sorted(path.name for path in run.glob("*.request")) == [
            "evaluate.request",
            "save.request",
            "stop.request",
        ]

        target = tmp_path / "elsewhere"
        (run / "stop.request").unlink()
        (run / "stop.request").symlink_to(target)
        status, said, _ = answer(server, f"/{server.token}/stop", "POST")
        assert status == 409 and said.startswith(b"stop.request could not be written: ") and not target.exists()


def test_folder_that_is_moved_aside_is_told_and_found_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "_READING_SHARE", 1e9)
    with served(run) as server:
        version = data(server)["version"]
        run.rename(tmp_path / "aside")
        status, said, _ = answer(server, f"/{server.token}/data")
        assert status == 410 and b"is not a directory" in said
        (tmp_path / "aside").rename(run)
        assert data(server)["version"] == version
    assert capfd.readouterr().err == ""


def test_port_in_use_and_options_without_effect_are_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(*options: str) -> str:
        assert main(["report", *options]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        return lines[0]

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = f"error: --port: got {port}, which cannot be listened on (Address already in use): give another one"
        assert error_of(str(run), "--serve", "--port", port).startswith(said)
    assert "--output: got 'x.html', which has no effect with --serve" in error_of(str(run), "--serve", "-o", "x.html")
    assert "--port: got 5, which has no effect without --serve" in error_of(str(run), "--port", "5")
    assert "--port: got 99999, expected a number from 0 to 65535" in error_of(str(run), "--serve", "--port", "99999")
    assert "nowhere is not a directory" in error_of("nowhere", "--serve")
    with pytest.raises(NotARun):
        LivePage(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_command_serves_until_a_signal(run: Path, number: int, code: int) -> None:
    process = started("report", str(run), "--serve", stdout=subprocess.PIPE)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/[\w-]{43}/)", address)
    assert found is not None, address
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
    connection.request("GET", found[2])
    assert connection.getresponse().status == 200
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (code, "")


# -- with a run -------------------------------------------------------------------------------------------------------

TASK = """
import time
import torch
from ignite_engine import Task

def build(options):
    data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(32, 2) / 64)

    def loss(model, batch):
        time.sleep(0.02)
        return (model(batch[0]) - 1).square().mean()

    return Task(model=torch.nn.Linear(2, 1), loss_fn=loss, train_set=data, val_sets={"val": data})
"""
CONFIG = """
task: my_task.py:build
run: {directory: run, max_iterations: 100000, threads: 1}
data: {batch_size: 4}
evaluation: {every: 90000}
checkpoint: {every: 90000}
logging: {every: 5, clearml: false}
"""


def started(*words: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ignite_engine", *words]
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, **options)


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    until = time.monotonic() + 120
    while not (found := condition()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_a_run_that_trains_does_what_its_page_asks(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "config.yaml").write_text(CONFIG)
    several = ["--nproc-per-node", "2", "--backend", "gloo"] if ranks == 2 else []
    process = started("train", "config.yaml", *several, cwd=tmp_path)
    run = tmp_path / "run"
    try:
        wait_until(lambda: len(list(lines_of(run / "metrics.jsonl"))) >= 2, process)
        with served(run) as server:
            before = wait_until(lambda: (found := data(server))["may_ask"] and found, process)

            def ask(name: str) -> None:
                assert answer(server, f"/{server.token}/{name}", "POST")[0] == 204
                wait_until(lambda: data(server)["requests"] == [], process)

            ask("evaluate")
            wait_until(lambda: any("val/loss" in row for row in lines_of(run / "metrics.jsonl")), process)
            ask("save")
            wait_until(lambda: CheckpointStore(run / "checkpoints").checkpoints(), process)
            later = wait_until(lambda: (found := data(server))["version"] > before["version"] and found, process)
            assert later["charts"][0]["lines"][0]["points"][-1][0] > before["charts"][0]["lines"][0]["points"][-1][0]
            assert answer(server, f"/{server.token}/stop", "POST")[0] == 204
            assert process.wait(timeout=120) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("interrupted", "request file run/stop.request")
    checkpoints = CheckpointStore(run / "checkpoints").checkpoints()
    assert summary["world_size"] == ranks and checkpoints[-1].iteration == summary["iteration"]
    assert not list(run.glob("*.request"))
