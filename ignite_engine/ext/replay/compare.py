"""The first difference of two runs that should be equal: in their files, and then in what is trained again of both."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ignite_engine.checkpointing import CheckpointInfo, CheckpointStore
from ignite_engine.checkpointing.digests import digests
from ignite_engine.errors import CheckpointError, ReplayError
from ignite_engine.ext.replay.logged import Lines, is_measured
from ignite_engine.ext.replay.moment import Moment, bring_to
from ignite_engine.ext.replay.rebuild import Build, config_at, environment_of, iterations_of
from ignite_engine.ext.replay.steps import FirstPiece, Steps, first_piece
from ignite_engine.ranks import agreement
from ignite_engine.run_directory import RunDirectory, config_differences

_NOT_COMPARED = ("run.directory", "run.name", "logging.", "checkpoint.keep_")
"""Beginnings of settings that decide nothing of what is trained."""
_ENVIRONMENT = (
    "torch",
    "python",
    "processor",
    "cpu_capability",
    "threads",
    "devices",
    "world_size",
    "commit",
    "packages",
)


@dataclass(frozen=True)
class Sign:
    """The first difference that the files of two runs show; what differs came at or before its iteration."""

    iteration: int
    where: str
    what: str
    first: Any
    second: Any

    def __str__(self) -> str:
        return f"{self.where} at iteration {self.iteration}: {self.what} ({self.first} and {self.second})"


@dataclass
class RunComparison:
    """What two runs differ in.

    Attributes:
        settings: of their configs, and then of their environments, a line each.
        compared: how many log lines, lines of the trail and checkpoints are equal.
        common: iterations that both have.
        sign: the first difference in their files; None: they are equal.
        began_at: the iteration from which both were replayed.
        piece: what differed first when they were replayed; None: nothing did, or nothing was replayed.
        notes: of the replays.
    """

    settings: list[str]
    compared: dict[str, int]
    common: int
    sign: Sign | None = None
    began_at: int | None = None
    piece: FirstPiece | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Nothing that was trained or logged differs."""
        return self.sign is None

    def lines(self) -> list[str]:
        """For people."""
        equal = ", ".join(f"{count} {name}" for name, count in self.compared.items())
        lines = [*self.settings, f"Equal: {equal}, of {self.common} iterations that both have."]
        if self.sign is None:
            return [*lines, "Nothing that was logged or saved differs."]
        lines.append(f"First sign: {self.sign}.")
        if self.began_at is not None:
            lines.append(f"Both were replayed from iteration {self.began_at} to {self.sign.iteration}.")
        lines += self.notes
        return [*lines, f"First difference: {self.piece}."] if self.piece is not None else lines


def compare_runs(
    first: str | Path, second: str | Path, first_build: Build | None = None, second_build: Build | None = None
) -> RunComparison:
    """Find the first difference of two runs that should be equal; nothing in their folders is written. A collective.

    Log lines, trails and checkpoints are compared first. Where one differs both runs are replayed from the newest
    checkpoint before it that is equal in both, or from their starts, and each iteration is compared: its samples, the
    bytes of its batch, random generators, weights before the step, loss, gradients, rates, states of optimizers.

    Args:
        first_build, second_build: as of :func:`~ignite_engine.ext.replay.replay`; None: the second is the first.

    Raises:
        ReplayError: one line; a folder holds no run, or cannot be replayed.
    """
    folders = Path(first), Path(second)
    builds = first_build, second_build or first_build
    result, checkpoints = agreement.on_rank_0(lambda: _files(*folders))
    if result.sign is None:
        return result
    result.began_at = max((iteration for iteration in checkpoints if iteration < result.sign.iteration), default=0)
    steps, moments = [], []
    for folder, build in zip(folders, builds, strict=True):
        made, moment = _replayed(folder, build, result.began_at, result.sign.iteration)
        steps.append(made.pieces)
        moments.append(moment)
    pieces = agreement.gather_objects(first_piece(steps[0], steps[1], agreement.rank()))
    found = [piece for piece in pieces if piece is not None]
    result.piece = min(found, key=lambda piece: (piece.iteration, piece.rank), default=None)
    for folder, moment in zip(folders, moments, strict=True):
        if moment.difference is not None:
            result.notes.append(f"{folder} is not what its config makes: {moment.difference}")
    if result.piece is None and not result.notes:
        result.notes.append(
            "Replayed they are equal, so their configs, code and data do not make what differs in their files."
        )
    return result


def _replayed(folder: Path, build: Build | None, began_at: int, until: int) -> tuple[Steps, Moment]:
    steps = Steps()
    with bring_to(folder, build, at=until, before=began_at + 1, attach=[steps.attach]) as moment:
        return steps, moment


def _files(first: Path, second: Path) -> tuple[RunComparison, list[int]]:
    """What their files say, and the iterations at which checkpoints of both are equal."""
    one, other = RunDirectory(first), RunDirectory(second)
    for folder in (first, second):
        if not folder.is_dir():
            raise ReplayError(f"{folder} does not exist: expected the folder of a run.")
    common = min(iterations_of(first), iterations_of(second))
    if not common:
        raise ReplayError(f"{first} and {second} have no iteration that both have.")
    signs: list[Sign] = []
    compared: dict[str, int] = {}
    for name, where, path, path_of_other in (
        ("log lines", "the log", one.metrics, other.metrics),
        ("lines of the trail", "the trail", first / "trail.jsonl", second / "trail.jsonl"),
    ):
        sign, compared[name] = _lines(where, Lines(path), Lines(path_of_other), common)
        signs += [sign] if sign is not None else []
    equal, sign = _checkpoints(one.checkpoints, other.checkpoints)
    compared["checkpoints"] = len(equal)
    signs += [sign] if sign is not None else []
    result = RunComparison(_setting_differences(first, second, common), compared, common)
    result.sign = min(signs, key=lambda sign: sign.iteration, default=None)
    return result, equal


def _setting_differences(first: Path, second: Path, common: int) -> list[str]:
    configs = [config_at(folder, common) for folder in (first, second)]
    changes = [f"config: {line}" for line in config_differences(*configs) if not line.startswith(_NOT_COMPARED)]
    environments = [
        {key: value for key, value in environment_of(folder).items() if key in _ENVIRONMENT}
        for folder in (first, second)
    ]
    return [*changes, *(f"environment: {line}" for line in config_differences(*environments))]


def _lines(where: str, first: Lines, second: Lines, common: int) -> tuple[Sign | None, int]:
    """The first line that differs, and how many before it do not."""
    equal = 0
    if not first.by_iteration or not second.by_iteration:
        return None, 0
    last = min(common, first.last, second.last)
    begin = 0 if where == "the log" else max(min(first.by_iteration), min(second.by_iteration))
    both = {number for number in first.by_iteration.keys() | second.by_iteration.keys() if begin <= number <= last}
    if where == "the trail":  # which may be written at another interval
        both &= first.by_iteration.keys() & second.by_iteration.keys()
        both = {number for number in both if _hash_of(first, number) == _hash_of(second, number)}
    for number in sorted(both):
        values = [lines.by_iteration.get(number, (0, None))[1] for lines in (first, second)]
        if values[0] is None or values[1] is None:
            missing = ["a line" if line else "none" for line in values]
            return Sign(number, where, "whether there is one", *missing), equal
        one, other = _flat(values[0]), _flat(values[1])
        for name in {**one, **other}:
            if not is_measured(name) and one.get(name) != other.get(name):
                return Sign(number, where, name, one.get(name, "nothing"), other.get(name, "nothing")), equal
        equal += 1
    return None, equal


def _hash_of(lines: Lines, number: int) -> Any:
    """The function of the digests of a line of a trail."""
    return lines.by_iteration[number][1].get("hash")


def _flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """Digests of the weights before that of all, so that a name is found."""
    return {**line.get("weights", {}), **{name: value for name, value in line.items() if name != "weights"}}


def _checkpoints(first: Path, second: Path) -> tuple[list[int], Sign | None]:
    """The iterations of those that are equal before the first that is not, and that."""
    found = [{info.iteration: info for info in CheckpointStore(folder).checkpoints()} for folder in (first, second)]
    equal: list[int] = []
    for number in sorted(found[0].keys() & found[1].keys()):
        with suppress(CheckpointError):  # one that is damaged is not compared
            one, other = (_pieces(checkpoints[number]) for checkpoints in found)
            name = next((name for name in {**one, **other} if one.get(name) != other.get(name)), None)
            if name is not None:
                values = (_digest(pieces.get(name, "nothing")) for pieces in (one, other))
                return equal, Sign(number, "the checkpoint", name, *values)
            equal.append(number)
    return equal, None


def _pieces(checkpoint: CheckpointInfo) -> dict[str, str]:
    """Digests of what decides the rest of a run; not of what logs, nor how often it was saved."""
    store, kinds = CheckpointStore(checkpoint.path.parent), checkpoint.manifest.kinds
    loaded = store.load(checkpoint.path)
    parts = {**loaded.shared, **loaded.local}
    # the weights first
    names = sorted((name for name in parts if kinds.get(name) != "other"), key=lambda name: kinds.get(name) != "model")
    pieces = {f"{part} {name}".rstrip(): text for part in names for name, text in digests(parts[part]).items()}
    pieces.pop("trainer checkpoints", None)
    return pieces


def _digest(text: str) -> str:
    return text.removeprefix("sha256:")[:12] if text.startswith("sha256:") else text
