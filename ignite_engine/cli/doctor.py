"""``doctor``: what a run here would use, and why; to be pasted into an issue."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ignite_engine import devices
from ignite_engine.cli.parsing import Parser
from ignite_engine.text import in_columns

_PACKAGES = ("pytorch-ignite", "numpy", "blake3", "clearml")
_OPTIONAL = ("tensorboard", "wandb", "mlflow", "safetensors", "torchdata", "transformers")


def doctor(command: Parser) -> None:
    """Print the report."""
    command.set_defaults(work=lambda options: print("\n".join(report())))


def report() -> list[str]:
    """Its lines: a name and what holds for it."""
    return in_columns([*_versions(), *_machine(), *_devices(), *_ranks()])


def _versions() -> Iterator[tuple[str, str]]:
    yield "ignite-engine", importlib.metadata.version("ignite-engine")
    yield "Python", sys.version.split()[0]
    yield "torch", f"{torch.__version__}, built for {devices.runtime() or 'the CPU'}"
    for name in _PACKAGES:
        yield name, _version_of(name) or "missing"
    installed = [f"{name} {version}" for name in _OPTIONAL if (version := _version_of(name))]
    yield "optional packages", ", ".join(installed) or "none"


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine() -> Iterator[tuple[str, str]]:
    yield "system", platform.platform()
    yield "cores", f"{os.cpu_count()}, of which torch uses {torch.get_num_threads()}"
    yield "vector instructions", torch.backends.cpu.get_cpu_capability()


def _devices() -> Iterator[tuple[str, str]]:
    names, device = devices.names(), devices.current()
    yield "accelerators", ", ".join(f"{number}: {name}" for number, name in enumerate(names)) or "none"
    if not names:
        yield "models go to", f"the CPU, as torch {torch.__version__} finds no accelerator"
        yield "precision", "fp32; bf16 by update.precision"
        return
    yield "models go to", f"{device}, the current one; one that is on a device stays there"
    kind = device.type
    beside = devices.pins_memory()
    yield "batches", "pinned, copied beside computing" if beside else f"each copy is waited for: {kind} has one stream"
    wide = devices.widest_float(device)
    yield "sums", f"{str(wide).removeprefix('torch.')}{'' if wide is torch.float64 else f': {kind} has no float64'}"
    cast = torch.amp.is_autocast_available(kind)
    yield "precision", "fp32; bf16 and fp16 by update.precision" if cast else f"fp32: {kind} has no autocast"


def _ranks() -> Iterator[tuple[str, str]]:
    yield (
        "backends of torch",
        ", ".join(name for name in ("gloo", "nccl", "mpi", "xccl") if dist.is_backend_available(name)),
    )
    backend, device = devices.default_backend(), devices.current()
    reduces = devices.backend_reduces_on(backend, device.type)
    where = device.type if reduces else f"the CPU: it does not reduce on {device.type}"
    yield "several ranks", f"{backend}, with models on {where}"
