"""Random trials of time travel: moments of long runs, planted differences, forged folders."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ignite_engine import Phase, Trainer, TrainingEvents, rng
from ignite_engine.checkpointing.digests import digests
from ignite_engine.config.load import config_from_dict
from ignite_engine.handlers.sinks import SinkState
from ignite_engine.replay import audit, bring_to, compare_runs
from ignite_engine.replay.logged import Kept, LoggedMetrics, NewestLine
from ignite_engine.replay.segments import segments_of
from ignite_engine.runs.recipe import build_run
from tests.builders import on_two_ranks
from tests.replay.forgeries import edit_log, edit_weight, train_with_another_sample
from tests.replay.plants import PLANTS, plant
from tests.replay.runs import settings, trained


@dataclass(frozen=True)
class Trial:
    """One trial; ``problem`` is None if it was right, ``replayed`` counts iterations beside the one asked for."""

    kind: str
    problem: str | None
    replayed: int = 0


class Record:
    """Digests of all that is registered at some step boundaries."""

    phase = Phase.LAST

    def __init__(self, iterations: list[int]) -> None:
        self.wanted, self.states = set(iterations), dict[int, Any]()

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(TrainingEvents.RESUME_POINT, self)

    def __call__(self, trainer: Trainer) -> None:
        if trainer.state.iteration in self.wanted:
            self.states.setdefault(trainer.state.iteration, _state_of(trainer))


def _state_of(trainer: Trainer) -> dict[str, Mapping[str, str]]:
    logs = (SinkState, Kept, LoggedMetrics, NewestLine)
    parts = {name: obj for name, obj in trainer.registry.objects.items() if not isinstance(obj, logs)}
    return {name: digests(obj.state_dict()) for name, obj in parts.items()} | {"rng": digests(rng.capture())}


def _moments(folder: Path, draw: random.Random, trials: int, *, length: int, every: int, workers: int) -> list[Trial]:
    """Of one run; on several ranks a collective."""
    wanted = sorted(draw.sample(range(1, length + 1), min(trials, length)))
    sections: dict[str, Any] = {
        "run": {"seed": 3, "threads": 1},
        "data": {"batch_size": 4, "num_workers": workers, "persistent_workers": workers > 0},
        "evaluation": {"every": {"iterations": max(2, every // 2)}},
        "checkpoint": {"every": {"iterations": every}, "keep_last": 10**6},
        "logging": {"every": 10, "trail": 25, "console": False, "clearml": False, "report": False, "progress": False},
    }
    run, record = build_run(config_from_dict(settings(folder, length, sections))), Record(wanted)
    record.attach(run.trainer)
    run.train()
    kind = f"an iteration of a run of {length:,}, saved every {every}"
    found = []
    for iteration in wanted:
        again = Record([iteration])
        with bring_to(folder, at=iteration, attach=[again.attach]) as moment:
            pass
        state, expected = again.states.get(iteration), record.states[iteration]
        different = [name for name in expected if state is None or state.get(name) != expected[name]]
        problem = f"iteration {iteration}: {different}" if different else None
        found.append(Trial(kind, problem or (moment.difference and str(moment.difference)), moment.replayed - 1))
    return found


def moments(folder: Path, draw: random.Random, trials: int) -> Iterator[Trial]:
    """Random iterations of one long run, with two workers."""
    yield from _moments(folder / "run", draw, trials, length=100 * trials, every=max(50, trials), workers=2)


def ranks(folder: Path, draw: random.Random, trials: int) -> Iterator[Trial]:
    """The same on two ranks, a fifth as many."""
    count, seed = max(2, trials // 5), draw.random()

    def cases(rank: int) -> dict[str, Any]:
        torch.set_num_threads(1)
        found = _moments(folder / "run", random.Random(seed), count, length=50 * count, every=50, workers=0)
        return {str(number): [trial.kind, trial.problem, trial.replayed] for number, trial in enumerate(found)}

    for rows in on_two_ranks(cases, folder / "meeting").values():
        problems = [problem for _, problem, _ in rows if problem is not None]
        yield Trial(f"{rows[0][0]}, two ranks", problems[0] if problems else None, rows[0][2])


def differences(folder: Path, draw: random.Random, trials: int) -> Iterator[Trial]:
    """As many of each kind of planted difference, and a fifth as many pairs of equal runs."""
    for number in range(trials):
        what, here = PLANTS[number % len(PLANTS)], folder / str(number)
        planted = plant(what, here, seed=draw.randrange(10**6), iterations=draw.randint(20, 50))
        found = compare_runs(here / "run", here / "other")
        piece = found.piece
        right = piece is not None and piece.iteration == planted.iteration
        right = right and piece is not None and any(name in piece.what for name in planted.names)
        said = f"planted at {planted.iteration} {planted.names}, found {piece}; {found.sign}; {found.notes}"
        yield Trial(what, None if right else said)
        shutil.rmtree(here)
    for number in range(max(1, trials // 5)):
        here, seed = folder / f"equal {number}", draw.randrange(10**6)
        sections = {"run": {"seed": seed}, "logging": {"every": 5, "trail": 4, "console": False, "clearml": False}}
        length, stop = draw.randint(20, 40), draw.randint(2, 19)
        trained(here / "run", length, **sections)
        trained(here / "other", length, stop_at=stop, **sections)
        trained(here / "other", length, **sections)
        found = compare_runs(here / "run", here / "other")
        yield Trial("none: equal runs, one of them stopped and resumed", None if found.equal else str(found.lines()))
        shutil.rmtree(here)


def forgeries(folder: Path, draw: random.Random, trials: int) -> Iterator[Trial]:
    """Forged runs by kind, each audited in full; and a fifth as many honest ones."""
    kinds: list[Callable[..., None]] = [edit_weight, edit_log, train_with_another_sample]
    for number in range(trials + max(1, trials // 5)):
        here = folder / str(number)
        sections = {
            "run": {"seed": draw.randrange(10**6)},
            "logging": {"every": 4, "console": False, "clearml": False, "report": False, "progress": False},
        }
        trained(here, draw.randint(15, 35), **sections)
        segment = draw.choice(segments_of(here))
        if number >= trials:
            result = audit(here, segments=10)
            yield Trial("none: honest runs", None if not result.found else str(result.found))
        else:
            forge = kinds[number % len(kinds)]
            forge(here, segment, seed=draw.randrange(10**6))
            result = audit(here, segments=10)
            hit = any(found.last == segment.last for found in result.found)
            kind = forge.__name__.replace("_", " ")
            yield Trial(kind, None if hit else f"{segment} of seed {sections['run']} passed: {result.lines()}")
        shutil.rmtree(here)


SECTIONS = {"moments": moments, "ranks": ranks, "differences": differences, "forgeries": forgeries}
