"""What torch.save, safetensors and DCP can hold, and whether code in a file runs when it is loaded.

    python -m benchmarks.checkpoint_format

What they cost is measured by ``benchmarks.save_and_load``.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

State = dict[str, Any]


# -- the formats: each writes into an empty folder, and returns what it wrote --------------------


def write_torch(folder: Path, state: State) -> None:
    with open(folder / "state.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def read_torch(folder: Path, state: State) -> State:
    return torch.load(folder / "state.pt", map_location="cpu", weights_only=True)  # type: ignore[no-any-return]


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


FORMATS: dict[str, tuple[Callable[[Path, State], None], Callable[[Path, State], State]]] = {
    "torch.save": (write_torch, read_torch),
    "safetensors": (write_safetensors, read_safetensors),
    "DCP": (write_dcp, read_dcp),
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
    for name in FORMATS:
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


def main() -> int:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        table = holds(Path(folder))
    print(f"{'':<30}" + "".join(f"{name:>14}" for name in table))
    for kind in next(iter(table.values())):
        print(f"{kind:<30}" + "".join(f"{each[kind]:>14}" for each in table.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
