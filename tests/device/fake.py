"""Loads the fake device of ``fake_device.cpp``, built on demand with the machine's compiler; see :func:`load`."""

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).with_name("fake_device.cpp")
KINDS = ("cuda", "fake")
COUNTS = (
    *("item", "to_host", "to_host_later", "to_device", "to_device_later"),
    *("wait_stream", "wait_event", "wait_device", "kernels", "races"),
)
ONLY = "of the fake device"
"""How the reason begins for which a test is skipped on a real device."""
VARIABLE = "TEST_DEVICE"
"""Names the kind for a session of tests, and for the processes that they start."""


class Unavailable(Exception):
    """There can be no fake device here; the message says why."""


def load(kind):
    """Give this process an accelerator of two devices.

    Args:
        kind: ``cuda``: torch's own name, so that code for CUDA runs; before torch is imported. ``fake``: torch's name
            for the devices of others.

    Raises:
        Unavailable: no compiler, a torch with CUDA, or one whose headers are missing.
    """
    folder = Path(str(importlib.util.find_spec("torch").origin)).parent
    if kind == "cuda" and "torch" in sys.modules:
        raise Unavailable("torch was imported before, and looks for CUDA once")
    version = (folder / "version.py").read_text()
    if not re.search(r"^cuda.*= None$", version, re.MULTILINE):
        raise Unavailable("this torch is built for a real device, the fake one needs the CPU's build")
    library = built(kind, folder, version)
    if kind == "cuda":
        for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so", "libtorch.so"):
            ctypes.CDLL(str(folder / "lib" / name), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    import torch

    if kind == "cuda":
        module = torch.cuda
    else:
        torch.utils.rename_privateuse1_backend("fake")
        torch.ops.load_library(str(library))
        module = ModuleType("torch.fake")
    for name, function in _module(torch, type_of="cuda" if kind == "cuda" else "fake").items():
        setattr(module, name, function)
        if kind == "cuda" and name in vars(torch.cuda.memory):  # whose functions call each other
            setattr(torch.cuda.memory, name, function)
    if kind == "cuda":  # which this build of torch cannot clone: those of deep copies
        torch.UntypedStorage.clone = _cloned
    if kind != "cuda":
        torch._register_device_module("fake", module)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        _register_autocast(torch)


def _cloned(storage):
    import torch

    return torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage().copy_(storage)


def built(kind, torch, version):
    """The library, from the cache or made anew (10 s)."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "c++", "g++", "clang++"))), None)
    if compiler is None:
        raise Unavailable("no C++ compiler on this machine")
    options = ["-DFAKE_CUDA"] if kind == "cuda" else []
    digest = hashlib.sha256(repr((SOURCE.read_text(), options, version, compiler)).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ignite_engine_tests"
    library = cache / f"fake_device_{digest}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        part = Path(folder) / library.name
        command = [compiler, "-std=c++20", "-O0", "-w", "-fPIC", "-shared", *options, f"-I{torch / 'include'}"]
        command += ["-o", str(part), str(SOURCE), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"the fake device cannot be compiled: {done.stderr.strip().splitlines()[-1]}")
        part.replace(library)  # another process may be doing the same
    return library


def counts():
    """What was done since the last call, without zeros: host waits, copies, kernels, races."""
    import torch

    return {name: count for name, count in zip(COUNTS, torch.ops.fake_device.counts().tolist(), strict=True) if count}


def set_options(**options):
    """``no_waits``: the host may not wait for the device."""
    import torch

    for name, value in options.items():
        torch.ops.fake_device.option(name, value)


def _module(torch, *, type_of):
    """The functions of ``torch.cuda``, or of ``torch.fake``."""
    ops, accelerator, count = torch.ops.fake_device, torch.accelerator, 2

    def index(device=None):
        if isinstance(device, int):
            return device
        given = None if device is None else torch.device(device).index
        return accelerator.current_device_index() if given is None else given

    class OnStream:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            if self.stream is not None:
                self.before = accelerator.current_stream(self.stream.device), accelerator.current_device_index()
                accelerator.set_stream(self.stream)

        def __exit__(self, *error):
            if self.stream is not None:
                accelerator.set_stream(self.before[0])
                accelerator.set_device_index(self.before[1])

    class OnDevice(accelerator.device_index):
        def __init__(self, device):
            super().__init__(index(device))

    def set_states(states):
        for device, state in enumerate(states):
            ops.set_rng_state(state, device)

    def seed_all(seed):
        for device in range(count):
            ops.seed(seed & (2**63 - 1), device)

    return {
        "is_available": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: count,
        "manual_seed": lambda seed: ops.seed(seed & (2**63 - 1), index()),
        "manual_seed_all": seed_all,
        "get_rng_state": lambda device=None: ops.rng_state(index(device)),
        "set_rng_state": lambda state, device=None: ops.set_rng_state(state, index(device)),
        "synchronize": lambda device=None: accelerator.synchronize(index(device)),
        "empty_cache": accelerator.empty_cache,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "current_device": accelerator.current_device_index,
        "set_device": lambda device: accelerator.set_device_index(index(device)),
        "device": OnDevice,
        "Stream": lambda device=None, priority=0: torch.Stream(torch.device(type_of, index(device))),
        "Event": lambda enable_timing=False, **options: torch.Event(type_of, enable_timing=enable_timing),
        "stream": OnStream,
        "current_stream": lambda device=None: accelerator.current_stream(torch.device(type_of, index(device))),
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *given, **options: True,
        "get_rng_state_all": lambda: [ops.rng_state(device) for device in range(count)],
        "set_rng_state_all": set_states,
        "get_device_name": lambda device=None: f"Fake device {index(device)}",
        "get_device_capability": lambda device=None: (9, 0),
        **{
            name: lambda device=None, name=name: getattr(accelerator, name)(index(device))
            for name in (
                *("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved"),
                "reset_peak_memory_stats",
            )
        },
    }


def _register_autocast(torch):
    """Of CUDA torch has the casts; of the devices of others each brings its own."""
    key = "AutocastPrivateUse1"
    everything, aten = torch.library.Library("_", "IMPL", key), torch.library.Library("aten", "IMPL", key)
    _libraries.extend((everything, aten))  # they unregister when they are freed
    everything.fallback(torch.library.fallthrough_kernel, key)

    def casting(operator, dtype):
        def cast(value):
            floats = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
            return value.to(dtype()) if floats else value

        def call(*arguments, **options):
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
                return operator(*map(cast, arguments), **{name: cast(value) for name, value in options.items()})

        return call

    for name in ("mm", "addmm", "bmm", "linear", "conv2d", "scaled_dot_product_attention"):
        operator = getattr(torch.ops.aten, name).default
        aten.impl(name, casting(operator, lambda: torch.get_autocast_dtype("fake")), key)
    for name in ("layer_norm", "nll_loss", "cross_entropy_loss", "mse_loss"):
        aten.impl(name, casting(getattr(torch.ops.aten, name).default, lambda: torch.float32), key)


_libraries = []
