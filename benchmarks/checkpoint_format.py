"""What ~50M parameters with AdamW state cost to write and to load in three formats, and what else each can hold.

    python -m benchmarks.checkpoint_format [--rounds N] [--width 2048] [--threads 1] [--directory DIR] [--json PATH]

In each round every format is written, fsynced, and loaded into allocated tensors, in random order. See
``benchmarks/README.md`` for how to read it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks.overhead import machine
from benchmarks.ratios import ratio_of_medians
from ignite_engine.checkpointing import CheckpointStore

State = dict[str, Any]
BASELINE = "torch.save"
_HEADS = {"write": "write_s", "load": "load_s", "write CPU": "write_cpu_s", "load CPU": "load_cpu_s"}


# -- the formats: each writes into an empty folder, and returns what it wrote --------------------


def write_torch(folder: Path, state: State) -> None:
    with open(folder / "state.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def read_torch(folder: Path, state: State) -> State:
    return torch.load(folder / "state.pt", map_location="cpu", weights_only=True)  # type: ignore[no-any-return]


def read_torch_mapped(folder: Path, state: State) -> State:
    """Without a copy of the file in memory, and without its checksums."""
    return torch.load(folder / "state.pt", map_location="cpu", weights_only=True, mmap=True)  # type: ignore[no-any-return]


def write_safetensors(folder: Path, state: State) -> None:
    """Tensors by their paths; everything else as JSON in the header, which has nothing but strings."""
    tensors: dict[str, Tensor] = {}
    rest = _without_tensors(state, "", tensors)
    save_file(tensors, folder / "state.safetensors", metadata={"rest": json.dumps(rest)})
    _synchronise(folder)


def read_safetensors(folder: Path, state: State) -> State:
    tensors = load_file(folder / "state.safetensors")
    with safe_open(folder / "state.safetensors", "pt") as opened:
        found: State = _with_tensors(json.loads(opened.metadata()["rest"]), tensors)
    return found


def write_dcp(folder: Path, state: State) -> None:
    with warnings.catch_warnings(action="ignore"):  # that torch.distributed is not initialized, as intended
        dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)  # type: ignore[attr-defined]  # torch hides it
    _synchronise(folder / "dcp")


def read_dcp(folder: Path, state: State) -> State:
    """Loads in place, into the tensors of ``state``."""
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)  # type: ignore[attr-defined]  # torch hides it
    return state


def write_ours(folder: Path, state: State) -> None:
    CheckpointStore(folder).save(state, {}, iteration=1, epoch=1)


def read_ours(folder: Path, state: State) -> State:
    store = CheckpointStore(folder)
    return store.load(store.checkpoints()[0].path).shared


FORMATS: dict[str, tuple[Callable[[Path, State], None], Callable[[Path, State], State]]] = {
    "torch.save": (write_torch, read_torch),
    "safetensors": (write_safetensors, read_safetensors),
    "DCP": (write_dcp, read_dcp),
    "torch.save, read by mmap": (write_torch, read_torch_mapped),
    "ours (torch.save, hashed, committed)": (write_ours, read_ours),
}


def _synchronise(folder: Path) -> None:
    for path in [*(each for each in folder.rglob("*") if each.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": {str(key): _without_tensors(each, f"{path}/{key}", tensors) for key, each in value.items()}}
    if isinstance(value, list | tuple):
        return {"list": [_without_tensors(each, f"{path}/{index}", tensors) for index, each in enumerate(value)]}
    return {"value": value}


def _with_tensors(rest: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    ((kind, content),) = rest.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _with_tensors(each, tensors) for key, each in content.items()}
    return [_with_tensors(each, tensors) for each in content] if kind == "list" else content


# -- time and size ----------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """Seconds per round, wall-clock and CPU time (without the disk and other processes), and bytes on disk."""

    write_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    write_cpu_s: list[float] = field(default_factory=list)
    load_cpu_s: list[float] = field(default_factory=list)
    bytes: int = 0


def training_state(width: int) -> State:
    """A model of 12 layers and the state of an AdamW after one step; width 2048: 50M parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


def measure(rounds: int, width: int, directory: Path) -> dict[str, Measured]:
    """Time every format; the first round is not counted.

    Raises:
        RuntimeError: a format did not restore what it was given.
    """
    state, ready = training_state(width), training_state(width)
    found = {name: Measured() for name in FORMATS}
    order = random.Random(0)
    for number in range(rounds + 1):
        for name in order.sample(list(FORMATS), len(FORMATS)):
            write, read = FORMATS[name]
            folder = directory / "format"
            folder.mkdir()
            for tensor in _tensors(ready):
                tensor.zero_()
            times = [(time.perf_counter(), time.process_time())]
            write(folder, state)
            times.append((time.perf_counter(), time.process_time()))
            _copy(read(folder, ready), ready)
            times.append((time.perf_counter(), time.process_time()))
            if number:
                (began, began_cpu), (written, written_cpu), (ended, ended_cpu) = times
                each = found[name]
                each.write_s.append(written - began)
                each.load_s.append(ended - written)
                each.write_cpu_s.append(written_cpu - began_cpu)
                each.load_cpu_s.append(ended_cpu - written_cpu)
            found[name].bytes = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
            pairs = zip(_tensors(state), _tensors(ready), strict=True)
            if not all(torch.equal(one, other) for one, other in pairs):
                raise RuntimeError(f"{name} did not restore what it was given.")
            shutil.rmtree(folder)
    return found


def _copy(source: State, target: State) -> None:
    if source is not target:
        for one, other in zip(_tensors(source), _tensors(target), strict=True):
            other.copy_(one)


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for child in children for tensor in _tensors(child)]


# -- what each can hold -----------------------------------------------------------------------------------------------


class Runs:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _samples() -> dict[str, Any]:
    shared = torch.arange(4.0)
    return {
        "bf16, fp8, complex": [
            torch.ones(3, dtype=each) for each in (torch.bfloat16, torch.float8_e4m3fn, torch.cfloat)
        ],
        "None, bool, int, float, text": [None, True, 2**70, 0.1, "é"],
        "tuple": (1, (2, 3)),
        "bytes": b"\x00\xff",
        "number as key": {0: 1, "a": 2},
        "NaN": [float("nan")],
        "torch.Size, torch.dtype": [torch.Size([2]), torch.bfloat16],
        "tensor twice, one memory": {"a": shared, "b": shared},
        "sparse tensor": torch.eye(3).to_sparse(),
    }


def holds(directory: Path) -> dict[str, dict[str, str]]:
    """For each format and kind of data: ``restored``, ``changed`` or ``refused``; and whether code in a file runs."""
    table: dict[str, dict[str, str]] = {}
    logging.disable()  # DCP logs a traceback for each refusal
    for name in list(FORMATS)[:3]:
        write, read = FORMATS[name]
        table[name] = {}
        for kind, value in _samples().items():
            folder = Path(tempfile.mkdtemp(dir=directory))
            try:
                with warnings.catch_warnings(action="ignore"):
                    write(folder, {"value": value})
                    back = read(folder, {"value": _blank(value, {})})["value"]
            except (Exception, CheckpointException):  # DCP's is a BaseException
                table[name][kind] = "refused"
            else:
                table[name][kind] = "restored" if _same(value, back) else "changed"
        table[name]["code in a file"] = "runs" if _code_runs(name, directory) else "does not run"
    logging.disable(logging.NOTSET)
    return table


def _blank(value: Any, seen: dict[int, Tensor]) -> Any:
    """The same structure with other values, for a format that loads in place; a tensor that occurs twice stays one."""
    if isinstance(value, Tensor):
        return seen.setdefault(id(value), torch.zeros_like(value))
    if isinstance(value, dict):
        return {key: _blank(each, seen) for key, each in value.items()}
    return type(value)(_blank(each, seen) for each in value) if type(value) in (list, tuple) else "?"


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = one.dtype == other.dtype and one.layout == other.layout and one.shape == other.shape
        return alike and torch.equal(one.to_dense().to(torch.cfloat), other.to_dense().to(torch.cfloat))
    if isinstance(one, dict):
        if set(one) == {"a", "b"} and one["a"] is one["b"]:
            return bool(other["a"].data_ptr() == other["b"].data_ptr()) and _same(one["a"], other["a"])
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other or (one != one and other != other))


def _code_runs(name: str, directory: Path) -> bool:
    folder, marker = Path(tempfile.mkdtemp(dir=directory)), directory / f"ran-{name}"
    state = {"value": torch.zeros(2)}
    FORMATS[name][0](folder, state)
    torch.save({"value": Runs(marker)}, folder / "state.pt")
    if name == "DCP":
        (folder / "dcp" / ".metadata").write_bytes(pickle.dumps(Runs(marker)))
    elif name == "safetensors":
        (folder / "state.safetensors").write_bytes(pickle.dumps(Runs(marker)))
    try:
        with warnings.catch_warnings(action="ignore"):
            FORMATS[name][1](folder, state)
    except (Exception, CheckpointException):
        return marker.exists()
    return marker.exists()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print both tables, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint_format", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=2048, help="of 12 linear layers; 2048: 50M parameters")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="to write in; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        found = measure(options.rounds, options.width, Path(folder))
        table = holds(Path(folder))
    print(f"{machine()}\n{options.rounds} rounds\n")
    print(f"{'':<38}{'MiB':>8}" + "".join(f"{head + ' s':>13}{'to torch.save [95 %]':>23}" for head in _HEADS))
    for name, each in found.items():
        line = f"{name:<38}{each.bytes / 2**20:>8.1f}"
        for key in _HEADS.values():
            values = getattr(each, key)
            line += f"{median(values):>13.2f}{ratio_of_medians(values, getattr(found[BASELINE], key))!s:>23}"
        print(line)
    print(f"\n{'':<30}" + "".join(f"{name:>14}" for name in table))
    for kind in table[BASELINE]:
        print(f"{kind:<30}" + "".join(f"{table[name][kind]:>14}" for name in table))
    if options.json is not None:
        times = {name: asdict(each) for name, each in found.items()}
        options.json.write_text(json.dumps({"machine": machine(), "formats": times, "holds": table}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
