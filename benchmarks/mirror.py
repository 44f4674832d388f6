"""What a mirror costs training: the time of an iteration while checkpoints are uploaded beside it.

    python -m benchmarks.mirror [--rounds N] [--iterations N] [--mib N] [--stores a,b] [--json PATH]

By turns a run saves each 50 iterations without a mirror and with one: a directory, an S3 server of this machine, and
that server behind a line of 10 KB/s, answering 500, stopped, and cutting its answers short. Training has the first
core, the uploads and the server have the second. Checkpoints follow each other so fast that the time which one costs is
seen; from it follows what an iteration takes with one a minute. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.beside import EVERY, in_child, measured, pin
from benchmarks.goals import Goal, print_goals
from benchmarks.machine import installed, machine
from benchmarks.ratios import Ratio, ratio_of_medians
from benchmarks.turns import take_turns

GOAL = 1.01
MINUTE_S = 60.0
WITHOUT, DIRECTORY = "without", "directory"
SERVERS = ("S3", "10 KB/s", "500", "stopped", "truncating")


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[dict[str, int]]:
    """The port of an S3 server by what lies before it, in processes on the second core."""
    from tests.ext.mirror.servers import Proxy, make_bucket, s3_server
    from tests.kit.runs import free_port

    def serve() -> None:
        pin(os.getpid(), 1)
        with s3_server() as port:
            make_bucket(port, "bucket")
            made = {name: Proxy(port) for name in SERVERS}
            made["10 KB/s"].bytes_per_s = 10_000
            made["500"].mode, made["truncating"].mode = "error", "cut"
            ports = {name: proxy.port for name, proxy in made.items()} | {"stopped": free_port()}
            (folder / "ports.tmp").write_text(json.dumps(ports))
            (folder / "ports.tmp").rename(folder / "ports")
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            while True:
                time.sleep(1)

    process = in_child(serve)
    try:
        while not (folder / "ports").exists():
            if os.waitpid(process, os.WNOHANG)[0]:
                raise RuntimeError("The S3 server did not start.")
            time.sleep(0.05)
        yield json.loads((folder / "ports").read_text())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
            os.waitpid(process, 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure by turns, print, and write the report."""
    known = [DIRECTORY, *(SERVERS if installed("s3fs") and installed("moto") else ())]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mirror")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--mib", type=float, default=16.0, help="size of a checkpoint")
    parser.add_argument("--stores", type=lambda text: text.split(","), default=known, help=f"of {','.join(known)}")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if unknown := set(options.stores) - set(known):
        parser.error(f"--stores must be of {','.join(known)}, got {','.join(sorted(unknown))}.")
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        by_network = set(options.stores) & set(SERVERS)
        ports = stack.enter_context(servers(Path(scratch))) if by_network else {}

        def run(store: str) -> dict[str, float]:
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                mirror = None if store == WITHOUT else f"{folder}/mirror"
                if store in ports:
                    from tests.ext.mirror.servers import CREDENTIALS

                    os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL=f"http://127.0.0.1:{ports[store]}")
                    mirror = f"s3://bucket/{Path(folder).name}"
                return measured(Path(folder) / "run", options.iterations, options.mib, mirror=mirror)

        found = {store: list[dict[str, float]]() for store in (WITHOUT, *options.stores)}

        def turn(store: str) -> float:
            found[store].append(run(store))
            return found[store][-1]["mean"]

        take_turns({store: (lambda store=store: turn(store)) for store in found}, options.rounds, warmup=1)  # type: ignore[misc]  # binds it
    times = {store: {kind: [run[kind] for run in runs[1:]] for kind in runs[0]} for store, runs in found.items()}
    goals, between_s = list[Goal](), EVERY * median(times[WITHOUT]["mean"])
    for store, values in times.items():
        print(f"{store:12} {1e3 * median(values['mean']):.3f} ms an iteration")
    print(f"a checkpoint of {options.mib:g} MiB every {1e3 * between_s:.0f} ms")
    ratios = {store: ratio_of_medians(times[store]["mean"], times[WITHOUT]["mean"]) for store in options.stores}
    for store, ratio in ratios.items():
        scale = between_s / MINUTE_S
        rarer = Ratio(*(1 + (value - 1) * scale for value in (ratio.value, ratio.low, ratio.high)))
        goals.append(Goal.of(f"iteration with a mirror ({store}) / without, a checkpoint a minute", rarer, GOAL))
    for store, ratio in ratios.items():
        lost_ms = Ratio(*(1e3 * (value - 1) * between_s for value in (ratio.value, ratio.low, ratio.high)))
        goals.append(Goal.of(f"ms of training that a checkpoint costs ({store})", lost_ms, None))
    print_goals(goals)
    if options.json:
        report = {"machine": machine(), "options": {**vars(options), "json": None}, "times": times}
        options.json.write_text(json.dumps(report | {"goals": [asdict(goal) for goal in goals]}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
