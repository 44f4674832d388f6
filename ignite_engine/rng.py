"""Capture, restore and isolate every global random number generator of this process."""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_map

from ignite_engine import devices
from ignite_engine.errors import StateMismatch, check_type, is_whole

T = TypeVar("T")
GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
"""The kinds that a program can make for itself."""
_MASK = (1 << 64) - 1


def is_generator(value: Any) -> bool:
    """Whether it is a generator with a state of its own: not the global ones, which are saved as such."""
    if not issubclass(type(value), GENERATORS) or isinstance(value, random.SystemRandom):
        return False
    return not any(value is known for known in (torch.default_generator, np.random.mtrand._rand, random._inst))


def capture() -> dict[str, Any]:
    """State of the generators of Python, NumPy, torch and every accelerator in use.

    Returns:
        Plain numbers and tensors, loadable with ``weights_only=True``. Reads the generators of accelerators only if
        this process has used one; on CUDA that copy is 16 bytes a device.
    """
    ((version, internal, gauss), numpy), cpu, of_devices = snapshot()
    python = version, torch.from_numpy(np.array(internal, dtype=np.int64)), gauss
    return {"python": python, "numpy": tree_map(_plain, numpy), "torch": cpu, **of_devices}


def snapshot() -> tuple[Any, ...]:
    """As :func:`capture`, faster and in a form that cannot be saved."""
    place = _place()
    if place is None or place != _known[0]:
        _note((random.getstate(), np.random.get_state(legacy=False)), place)
    return _known[1], torch.get_rng_state(), devices.generator_states()


def restore_snapshot(generators: tuple[Any, ...]) -> None:
    """Restore what :func:`snapshot` returned."""
    host, cpu, of_devices = generators
    place = _place()
    if place is None or place != _known[0] or host is not _known[1]:  # they have moved, or it cannot be seen
        random.setstate(host[0])
        np.random.set_state(host[1])
        _note(host, _place())
    torch.set_rng_state(cpu)
    if of_devices:
        devices.set_generator_states(of_devices)


def restore(state: dict[str, Any]) -> None:
    """Restore what :func:`capture` returned. Devices that no longer exist are ignored.

    Raises:
        StateMismatch: NumPy's global generator is of another kind.
    """
    before, now = state["numpy"]["bit_generator"], type(_bit_generator()).__name__
    if before != now:
        raise StateMismatch(
            f"The checkpoint has the state of NumPy's {before}, and this process uses {now}: call "
            f"np.random.set_bit_generator(np.random.{before}()) before the run."
        )
    version, internal, gauss = state["python"]
    host = (version, tuple(internal.tolist()), gauss), tree_map(_of_numpy, state["numpy"])
    restore_snapshot((host, state["torch"], state))


@contextmanager
def isolated() -> Iterator[None]:
    """Restore the generators after the body, which may draw from them."""
    outside = snapshot()
    try:
        yield
    finally:
        restore_snapshot(outside)


def host_is_at(generators: tuple[Any, ...]) -> bool:
    """Whether the generators of Python and NumPy are known to be where they were at this :func:`snapshot`.

    Where it is false of one that was just made, nothing can be known.
    """
    place = _place()
    return place is not None and place == _known[0] and generators[0] is _known[1]


# behind NumPy's global functions: MT19937, unless the user has set another one (NumPy 1.24 brought both functions)
_bit_generator: Any = getattr(np.random, "get_bit_generator", lambda: np.random.mtrand._rand._bit_generator)


def _plain(value: Any) -> Any:
    """A value of NumPy's state, of which arrays, all of unsigned words, become tensors with the bits of these."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.view(f"i{value.itemsize}"))
    return value.item() if isinstance(value, np.generic) else value


def _of_numpy(value: Any) -> Any:
    """What :func:`_plain` was made of."""
    return value.numpy().view(f"u{value.element_size()}") if isinstance(value, torch.Tensor) else value


# To read both states takes 40 us, to look where the generators are 1: each number drawn moves them, but for the second
# half of a pair of normal numbers, which is kept elsewhere.
_known: tuple[bytes | None, Any] = (None, None)
"""Where both were when their states were read or set last, and these states; None: the place does not tell."""


def _note(host: tuple[Any, Any], place: bytes | None) -> None:
    """At this place the generators of Python and NumPy are in these states."""
    global _known  # of this process, as the generators are
    has_half = host[0][2] is not None or host[1]["has_gauss"]
    _known = (None if has_half else place, host)


def _place() -> bytes | None:
    """Where the generators of Python and NumPy are; None: it cannot be seen."""
    numpy = _of_numpys(_bit_generator())
    return None if _of_python is None or numpy is None else bytes(_of_python.raw + numpy.raw)


_WINDOW = 36
"""Bytes of the position and eight words beside it."""


def _window(address: int, expected: bytes, start: int) -> Any:
    """On the bytes at an address; None where they are others than expected."""
    if (ctypes.c_char * len(expected)).from_address(address).raw != expected:
        return None
    return (ctypes.c_char * _WINDOW).from_address(address + start)


def _window_on_pythons() -> Any:
    """``int position; uint32 key[624]`` behind the head of the object, where the interpreter is CPython."""
    if sys.implementation.name != "cpython":
        return None
    *key, position = random.getstate()[1]
    expected = np.array([position, *key], dtype=np.uint32).tobytes()
    return _window(id(random._inst) + object.__basicsize__, expected, 0)


@lru_cache(maxsize=1)
def _of_numpys(generator: Any) -> Any:
    """``uint32 key[624]; int position`` at the address that NumPy publishes; None of other kinds of generators."""
    if type(generator) is not np.random.MT19937:
        return None
    state = generator.state["state"]
    expected = state["key"].astype(np.uint32).tobytes() + np.int32(state["pos"]).tobytes()
    return _window(generator.ctypes.state_address, expected, len(expected) - _WINDOW)


_of_python = _window_on_pythons()


def derived(state: dict[str, Any], *keys: int) -> dict[str, Any]:
    """Another state, a function of ``state``, which :func:`capture` returned, and ``keys``."""
    seed = mix(int.from_bytes(hashlib.sha256(state["torch"].numpy().tobytes()).digest()[:8], "little"), *keys)
    with isolated():
        seed_host(seed)
        devices.seed_generators(seed >> 1)
        return capture()


@lru_cache
def mix(*numbers: int) -> int:
    """A 64-bit seed from several integers: equal inputs give equal seeds on every machine.

    Source: the SplitMix64 finaliser, Steele, Lea and Flood 2014.
    """
    value = 0
    for number in numbers:
        value = mix_next(value, number)
    return value


def mix_next(value: int, number: int) -> int:
    """``mix(*numbers, number)`` where ``value`` is ``mix(*numbers)``."""
    value = (value + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mix_each(value: int, numbers: Sequence[int]) -> list[int]:
    """:func:`mix_next` of each number; of many in 0.1 µs each."""
    mixed = np.array(numbers, dtype=np.int64).view(np.uint64)
    mixed += (value + 0x9E3779B97F4A7C15) & _MASK
    mixed ^= mixed >> 30
    mixed *= 0xBF58476D1CE4E5B9
    mixed ^= mixed >> 27
    mixed *= 0x94D049BB133111EB
    mixed ^= mixed >> 31
    seeds: list[int] = mixed.tolist()
    return seeds


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and all its devices, as a run of a config does with ``run.seed``.

    A run seeds with ``seed`` before it makes the model, the same on every rank, and with ``seed + data_rank()`` after.

    Raises:
        TypeError: not a whole number.
        ValueError: it is below 0.
    """
    check_type("seed", seed, is_whole(seed), "a whole number")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}.")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_device(seed: int, device: torch.device) -> None:
    """Call :func:`seed_host`, and seed the generator of ``device``."""
    seed_host(seed)
    if device.type != "cpu":
        devices.seed_generator(device, seed)


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator of one of the kinds in :data:`GENERATORS` with a 64-bit number."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    else:
        bits = getattr(generator, "bit_generator", generator)
        bits.state = type(bits)(seed).state


def seed_host(seed: int) -> None:
    """Seed Python, NumPy and torch's CPU generator with one 64-bit number; no device is touched."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # torch.manual_seed also visits every accelerator: 188 µs against 3 µs
    torch.default_generator.manual_seed(seed)
