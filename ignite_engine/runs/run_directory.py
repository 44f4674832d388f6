"""A run's folder: resolved config, environment, summary, and one log file per rank."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import logging
import logging.handlers
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from ignite_engine.checkpoint.digests import tensor_bytes
from ignite_engine.checkpoint.environment import environment_values
from ignite_engine.checkpoint.filesystem import replace_file
from ignite_engine.checkpoint.lock import LOCK_NAME, DirectoryInUse, held
from ignite_engine.checkpoint.states.model_and_optimizer import clean_name, unwrap
from ignite_engine.text import METRICS, STARTS, flat, from_json, json_values, lines_of, read_object

logger = logging.getLogger(__name__)

# of libyaml, ten times as fast, where PyYAML was built with it
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_SHOWN_FROM_S = 5.0
"""A start-up that was shorter is in the log file alone."""
FOLLOWED_CHECKPOINT = "checkpoint"
"""In a line of a follower's log: which checkpoint was evaluated."""


def read_yaml(text: str) -> Any:
    """What a stored config holds.

    Raises:
        yaml.YAMLError: it is none.
    """
    return yaml.load(text, Loader=_LOADER)


class RunDirectoryInUse(RuntimeError):
    """Another process trains in the folder; one line, with the remedy."""


class RunDirectory:
    """Names and writes the files of a run's folder; each is replaced atomically.

    Every rank may make one; only rank 0 calls the ``write_`` methods.
    """

    def __init__(self, path: str | Path) -> None:
        self.given = Path(path)
        """As messages show it."""
        self.path = self.given.absolute()  # the run may change its working directory
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / METRICS
        self.summary = self.path / "summary.json"
        self.checkpoints = self.path / "checkpoints"
        self.starts = self.path / STARTS
        self.followed = self.path / "follow" / METRICS
        self.logs = self.path / "logs"

    def move_aside(self) -> Path | None:
        """Rename the folder of a run to the first free of ``<name>.1``, ``<name>.2`` and so on; None: it holds no run.

        Raises:
            RunDirectoryInUse: another process trains in it.
        """
        files = (self.config, self.metrics, self.summary, self.checkpoints)
        if not any(path.exists() for path in files):
            return None
        with self.held():
            numbers = itertools.count(1)
            aside = next(path for number in numbers if not os.path.lexists(path := Path(f"{self.given}.{number}")))
            os.rename(self.path, aside)
            (aside / LOCK_NAME).unlink(missing_ok=True)
        return aside

    @contextmanager
    def held(self) -> Iterator[None]:
        """Create the folder and keep other processes from training in it.

        Raises:
            RunDirectoryInUse: another process holds it.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(held(self.path))
            except DirectoryInUse as holder:
                raise RunDirectoryInUse(
                    f"{self.given} is in use by {holder}; wait until it has ended, or give another directory (config: "
                    "run.directory)."
                ) from None
            yield

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Store the resolved config."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.config, yaml.dump(dict(values), Dumper=_DUMPER, sort_keys=False, allow_unicode=True))

    def differences(self, values: Mapping[str, Any]) -> list[str]:
        """``key: before -> now`` for each key that differs from the stored config; empty if there is none."""
        if not self.config.exists():
            return []
        return config_differences(read_yaml(self.config.read_text(encoding="utf-8")), values)

    def write_environment(self, world_size: int, code: Mapping[str, Any]) -> None:
        """Store versions, machine, devices and command line, and the commit of the user's code."""
        values = {**environment_values(world_size), "packages": installed_packages(), **code}
        write_whole(self.environment, json.dumps(values, indent=1) + "\n")

    def read_history(self) -> list[dict[str, Any]]:
        """The lines of ``starts.jsonl`` since the run was last started afresh; one that cannot be read is left out."""
        history: list[dict[str, Any]] = []
        for line in lines_of(self.starts):
            if "what" in line:
                history = [line] if line["what"] == "started" else [*history, line]
        return history

    def logged(self) -> list[dict[str, Any]]:
        """The lines of the log, joined with what a follower has measured beside the run at the same iterations.

        Numbers that are not finite are numbers again.
        """
        rows: dict[int, dict[str, Any]] = {}
        for line in itertools.chain(lines_of(self.followed), lines_of(self.metrics)):
            values = {name: from_json(value) for name, value in line.items() if name != FOLLOWED_CHECKPOINT}
            rows.setdefault(line["iteration"], {}).update(values)
        return [rows[iteration] for iteration in sorted(rows)]

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Store how the run ended; numbers as in the other files, see :func:`ignite_engine.text.json_number`."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.summary, json.dumps(json_values(values), indent=1) + "\n")

    def note_failure(self, reason: str, rank: int, *, killed: bool) -> None:
        """All processes of the run have ended: write why, unless one of them has written it.

        Args:
            rank: the one that failed first.
            killed: by a signal, which ``reason`` names; its peers know only its last heartbeat.
        """
        summary = self.read_summary()
        written, status = str(summary.get("reason")), summary.get("status")
        if killed and "no sign of life" in written:
            reason += "".join(written.partition(" Last heartbeat")[1:])
        elif status == "failed" and (f"rank {rank}" in written.lower() or summary["world_size"] == 1):
            return
        if status in ("running", "failed"):
            self.write_summary({**summary, "status": "failed", "reason": reason})

    def read_summary(self) -> dict[str, Any]:
        """The summary stored last; empty if there is none, or it cannot be read."""
        return read_object(self.summary)

    @contextmanager
    def logging_to(self, rank: int, *, console: bool = True) -> Iterator[None]:
        """Write what is logged within it to ``logs/rank_N.log``, and on rank 0 the bare messages also to stderr.

        The folder is created with the first line, so that a run that never started leaves nothing behind.
        """
        root, level = logging.getLogger(), logging.getLogger().level
        file = _LogFile(self.logs / f"rank_{rank}.log", encoding="utf-8", delay=True)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers: list[logging.Handler] = [file]
        if rank == 0 and console:
            stderr = logging.StreamHandler(sys.stderr)
            stderr.setFormatter(logging.Formatter("%(message)s"))
            stderr.addFilter(_for_the_console)
            handlers.append(stderr)
        root.setLevel(min(level or logging.INFO, logging.INFO))
        for handler in handlers:
            handler.setLevel(logging.INFO)
            root.addHandler(handler)
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            root.setLevel(level)
            for handler in handlers:
                root.removeHandler(handler)
                handler.close()


def _for_the_console(record: logging.LogRecord) -> bool:
    """Not Ignite's announcements (Engine run starting ...), nor tracebacks, which Python prints itself."""
    announcement = record.levelno <= logging.INFO and record.name.startswith("ignite.")
    return not announcement and getattr(record, "console", True)


class _LogFile(logging.handlers.WatchedFileHandler):
    """A log file in a folder that is made with its first line, and again where the folder was moved aside."""

    def _open(self) -> Any:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


class PhaseTimes:
    """Seconds of each phase of the start-up, in order."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def log(self) -> None:
        """One line: the sum of all phases, and those that can be noticed; in the log alone where nobody has waited."""
        took_s = sum(self.seconds.values())
        phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items() if seconds >= 0.05)
        extra = {"console": took_s >= _SHOWN_FROM_S}
        logger.info("Start-up took %.1f s%s.", took_s, f": {phases}" if phases else "", extra=extra)


@cache
def installed_packages() -> dict[str, str]:
    """Versions by name; a rank that is forked has them from its parent."""
    packages = {package.name: package.version for package in importlib.metadata.distributions()}
    return dict(sorted(packages.items(), key=lambda item: item[0].lower()))


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a kill at any moment, finds the old or the new one."""
    replace_file(path, lambda file: file.write(text.encode()))


def config_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``optimizer.lr: 0.001 -> 0.002`` for each dotted key whose value differs, or that only one side has."""
    old, new = flat(before), flat(now)
    return [
        f"{key}: {old.get(key, 'not set')} -> {new.get(key, 'not set')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, _NOT_SET) != new.get(key, _NOT_SET)
    ]


_NOT_SET = object()


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over name and bytes of each parameter and saved buffer, by sorted name, the same however it is wrapped.

    A collective where parameters are sharded (DTensor).
    """
    state = {clean_name(name): value for name, value in unwrap(model).state_dict().items()}
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        if not isinstance(value, torch.Tensor):  # extra state
            continue
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(name.encode() + b"\0")
        digest.update(tensor_bytes(whole).numpy().data)
    return digest.hexdigest()
