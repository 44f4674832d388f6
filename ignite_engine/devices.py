"""The engine's interface to devices of any kind; no other module names a kind.

Through ``torch.accelerator``, which is of the one kind that this process has, and the module that torch has for it.
Where a kind lacks something, such as a second stream or float64, the plain way is taken: copies are waited for, sums
are in float32.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

_NOT_SUPPORTED = (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError)
"""What torch raises for something that a kind of device has not."""


def current() -> torch.device:
    """The accelerator that is current in this process, with its number; the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def in_use() -> torch.device:
    """As :func:`current`; the CPU, too, where this process has done nothing on the accelerator."""
    return torch.device("cpu") if _used() is None else current()


def look_without_using() -> None:
    """From here on asking whether there is an accelerator leaves it usable in processes that are forked from this one.

    CUDA's own answer starts its driver here, for good; NVML's does not.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def is_accelerator(kind: str) -> bool:
    """Whether it is the kind of this process's accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == kind


def for_models() -> torch.device:
    """Where this process places a model that is on the CPU: as :func:`current`, if its process group reduces there."""
    device = current()
    if device.type == "cpu" or not dist.is_initialized() or dist.get_world_size() == 1:
        return device
    backend = dist.get_backend()
    if backend_reduces_on(backend, device.type):
        return device
    _say_once(f"Models stay on the CPU: the backend {backend} does not reduce tensors on {device.type}.")
    return torch.device("cpu")


def set_current(local_rank: int, backend: str) -> None:
    """Make the device of this number the current one of this process; nothing where there is no accelerator.

    Ranks of gloo may share the only device.

    Raises:
        ValueError: there are fewer devices.
    """
    if not torch.accelerator.is_available():
        return
    count = torch.accelerator.device_count()
    if local_rank < count:
        torch.accelerator.set_device_index(local_rank)
    elif count > 1 or (backend != "gloo" and backend_reduces_on(backend, current().type)):
        raise ValueError(
            f"local rank {local_rank} has no device: this machine has {count}, and each rank takes one; start at most "
            f"{count} ranks on it."
        )


def names() -> list[str]:
    """Of all accelerators, such as ``NVIDIA H100 80GB HBM3``; the kind, where torch knows no names of it."""
    if not torch.accelerator.is_available():
        return []
    kind = current().type
    name_of = getattr(torch.get_device_module(kind), "get_device_name", lambda number: kind)
    return [str(name_of(number)) for number in range(torch.accelerator.device_count())]


def runtime() -> str | None:
    """What torch was built for, beside the CPU."""
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else None


# -- process groups -----------------------------------------------------------------------------------------------


def default_backend() -> str:
    """Of the backends that Ignite can use, the one that is made for the accelerator; else ``gloo``."""
    made_for_it = dist.Backend.default_device_backend_map.get(current().type, "gloo")
    return made_for_it if made_for_it in ("nccl", "mpi") and dist.is_backend_available(made_for_it) else "gloo"


def backend_reduces_on(backend: str, kind: str) -> bool:
    """Whether tensors on this kind of device can be reduced by it; ``cpu:gloo,cuda:nccl`` names several backends."""
    names = (part.rpartition(":")[2] for part in backend.split(","))
    return any(kind in dist.Backend.backend_capability.get(name, ()) for name in names)


def kinds_of_groups() -> list[torch.device]:
    """The kinds of devices for which a process group may have a backend."""
    accelerator = torch.accelerator.current_accelerator()
    return [torch.device("cpu"), *([] if accelerator is None else [accelerator])]


# -- random numbers -----------------------------------------------------------------------------------------------


def _used() -> tuple[str, Any] | None:
    """The accelerator's kind and module, if this process has used it; asked for each batch, so it asks no driver."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    is_initialized = getattr(module, "is_initialized", module.is_available)
    # a process that was forked by one that uses the device cannot use it
    in_bad_fork = getattr(module, "_is_in_bad_fork", bool)()
    return (accelerator.type, module) if is_initialized() and not in_bad_fork else None


def generator_states() -> dict[str, list[Tensor]]:
    """By the accelerator's kind the state of each device's generator; empty where this process has not used it."""
    used = _used()
    if used is None:
        return {}
    kind, module = used
    return {kind: [module.get_rng_state(*number) for number in _numbers(module)]}


def set_generator_states(states: dict[str, Any]) -> None:
    """Set what :func:`generator_states` gave; other keys, and devices that are not there, are passed over."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type in states:
        module = torch.get_device_module(accelerator)
        for number, state in zip(_numbers(module), states[accelerator.type]):
            module.set_rng_state(state, *number)


def _numbers(module: Any) -> list[tuple[int, ...]]:
    """Of each device, as functions of its kind's module take it: of kinds with only one device some take none."""
    count = module.device_count()
    return [()] if count == 1 else [(number,) for number in range(count)]


def seed_generators(seed: int) -> None:
    """Seed all devices' generators, if this process has used one."""
    used = _used()
    if used is not None:
        getattr(used[1], "manual_seed_all", used[1].manual_seed)(seed)


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the generator of one accelerator."""
    with torch.accelerator.device_index(device.index):  # another one may be current
        torch.get_device_module(device).manual_seed(seed)


# -- what a kind has ----------------------------------------------------------------------------------------------


@cache
def has_side_streams(kind: str) -> bool:
    """Whether copies from pinned memory can run beside computing; else, said in one line, they are to be waited for."""
    if not is_accelerator(kind):
        return False
    try:
        stream = torch.Stream(kind)
        torch.empty(1, device=kind).record_stream(stream)
        if stream != torch.accelerator.current_stream(kind) and torch.empty(1, pin_memory=True).is_pinned():
            return True
    except _NOT_SUPPORTED:
        pass
    logger.info("%s has no streams for copies beside computing.", kind)
    return False


@cache
def widest_float(device: torch.device) -> torch.dtype:
    """The floating-point type of the device with the most digits: float64, or float32 where there is none."""
    try:
        return torch.empty(0, dtype=torch.float64, device=device).dtype
    except _NOT_SUPPORTED:
        return torch.float32


# -- streams and types ----------------------------------------------------------------------------------------------


def pins_memory() -> bool:
    """Whether batches are to be in pinned memory, from which they are copied beside computing."""
    return has_side_streams(for_models().type)


def current_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def autocast(kind: str, dtype: torch.dtype) -> torch.autocast | None:
    """None, said in one line of the log: forward passes there are in the weights' own type."""
    if torch.amp.is_autocast_available(kind):
        return torch.autocast(kind, dtype=dtype)
    _say_once(f"{kind} has no autocast: the precision {dtype} has no effect, products are in the type of the weights.")
    return None


def set_up_torch(matmul_precision: str, threads: int | None, deterministic: bool) -> None:
    """Set what is of the whole process; ``highest`` products and convolutions of float32 do without TF32."""
    torch.set_float32_matmul_precision(matmul_precision)
    torch.backends.cudnn.allow_tf32 = matmul_precision != "highest"
    if threads is not None:
        torch.set_num_threads(threads)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS for determinism
        torch.use_deterministic_algorithms(True)


@contextmanager
def torch_kept() -> Iterator[None]:
    """Restore what :func:`set_up_torch` has set after the body."""
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        stack.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        yield


def sums_may_change(kind: str) -> bool:
    """Whether kernels of this kind of device may add in another order each time."""
    return is_accelerator(kind) and not torch.are_deterministic_algorithms_enabled()


# -- memory -------------------------------------------------------------------------------------------------------


def take_memory_statistics(device: torch.device) -> dict[str, int]:
    """As ``torch.accelerator.memory_stats``; the peaks begin anew."""
    statistics = dict(torch.accelerator.memory_stats(device))
    torch.accelerator.reset_peak_memory_stats(device)
    return statistics


def wait_for_device() -> None:
    """Wait until all work on the current device is done, so that it can be timed."""
    if _used() is not None:
        torch.accelerator.synchronize()


@cache
def _say_once(line: str) -> None:
    logger.warning("%s", line)
