"""``doctor``: what a run here would use, and why; to be pasted into an issue."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import torch
import torch.distributed as dist

from ignite_engine import devices
from ignite_engine.cli.parsing import Parser
from ignite_engine.text import in_columns

_OPTIONAL = ("tensorboard", "wandb", "mlflow", "safetensors", "torchdata", "transformers")


def doctor(command: Parser) -> None:
    """Print the report."""
    command.set_defaults(work=lambda options: print("\n".join(report())))


def report() -> list[str]:
    """Its lines: a name and what holds for it."""
    return in_columns([*_versions(), *_devices(), *_ranks()])


def _versions() -> Iterator[tuple[str, str]]:
    yield "Python", sys.version.split()[0]
    yield "torch", f"{torch.__version__}, built for {devices.runtime() or 'the CPU'}"
    for name in ("ignite-engine", "pytorch-ignite", "numpy", "blake3", "clearml"):
        yield name, importlib.metadata.version(name)
    found = [f"{name} {importlib.metadata.version(name)}" for name in _OPTIONAL if find_spec(name)]
    yield "optional packages", ", ".join(found) or "none"
    yield "system", platform.platform()
    yield "cores", f"{os.cpu_count()}, of which torch uses {torch.get_num_threads()}"


def _devices() -> Iterator[tuple[str, str]]:
    names, device = devices.names(), devices.current()
    yield "accelerators", ", ".join(f"{number}: {name}" for number, name in enumerate(names)) or "none"
    yield "models go to", f"{device}; one that is on a device stays there"
    if names:
        beside = "pinned, copied beside computing"
        yield "batches", beside if devices.pins_memory() else f"each copy is waited for: {device.type} has one stream"
        yield "sums", str(devices.widest_float(device)).removeprefix("torch.")
    cast = torch.amp.is_autocast_available(device.type)
    yield "precision", "fp32; bf16 and fp16 by update.precision" if cast else f"fp32: {device.type} has no autocast"


def _ranks() -> Iterator[tuple[str, str]]:
    yield (
        "backends of torch",
        ", ".join(name for name in ("gloo", "nccl", "mpi", "xccl") if dist.is_backend_available(name)),
    )
    backend, device = devices.default_backend(), devices.current()
    reduces = devices.backend_reduces_on(backend, device.type)
    where = device.type if reduces else f"the CPU: it does not reduce on {device.type}"
    yield "several ranks", f"{backend}, with models on {where}"
