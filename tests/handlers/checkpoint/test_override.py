"""A setting of an optimizer that a resume changes: under every schedule, once, and said."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from ignite.handlers.param_scheduler import (
    ConcatScheduler,
    CosineAnnealingScheduler,
    LinearCyclicalScheduler,
    ParamGroupScheduler,
    PiecewiseLinear,
    create_lr_scheduler_with_warmup,
)
from ignite.handlers.param_scheduler import LRScheduler as IgniteTorchScheduler
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from ignite_engine import Trainer, TrainingEvents, Update, Updates, loader, schedules
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import Checkpoint, LRSchedule
from ignite_engine.runs.components import SCHEDULES
from tests.builders import Numbers, linear, mse

OLD, NEW, END = 0.1, 0.025, 12
Make = Callable[[Any], Any]


class Run:
    """12 updates of an optimizer with two groups and momentum; saves where it stops."""

    def __init__(
        self,
        folder: Path,
        make: Make | None = None,
        override: Mapping[str, Any] | None = None,
        *,
        lr: float = OLD,
        event: Any = None,
        late: bool = False,
    ) -> None:
        model = linear()
        first, *others = model.parameters()
        self.optimizer = SGD(
            [{"params": [first], "name": "first"}, {"params": others}], lr=lr, momentum=0.9, weight_decay=0.01
        )
        self.trainer = Trainer(Update(model, self.optimizer, mse))
        self.scheduler = None if make is None or late else make(self.optimizer)
        self.checkpoint = Checkpoint(folder, keep_last=100, override=override)
        self.checkpoint.attach(self.trainer, Events.COMPLETED)
        if self.scheduler is not None:
            self._schedule(event)
        self.path = self.checkpoint.resume()
        if late and make is not None:
            self.scheduler = make(self.optimizer)
            self._schedule(event)
        self.used: dict[int, list[float]] = {}
        self.moments: dict[int, bool] = {}
        self.trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, self._note)

    def _schedule(self, event: Any) -> None:
        is_plateau = isinstance(self.scheduler, torch_schedulers.ReduceLROnPlateau)
        schedule = LRSchedule(self.scheduler, metric="value" if is_plateau else None)
        if is_plateau:  # never better: lowered at every other one

            def measure(trainer: Trainer) -> None:
                trainer.state.metrics["value"] = float(trainer.state.iteration)

            self.trainer.add_event_handler(Events.ITERATION_COMPLETED, measure)
        schedule.attach(self.trainer, *(() if event is None else (event,)))

    def _note(self, trainer: Trainer) -> None:
        self.used[trainer.state.iteration] = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.moments[trainer.state.iteration] = bool(self.optimizer.state)

    def train(self, updates: int = END) -> dict[int, list[float]]:
        """So many updates of the run, of 12 at most; the LRs of each, of both groups."""
        event = Events.ITERATION_COMPLETED(once=self.trainer.state.iteration + updates)
        self.trainer.add_event_handler(event, lambda trainer: trainer.request_stop("test"))
        self.trainer.run(loader(Numbers(8), 2), max_epochs=3)
        return self.used


def lr_of(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def warmed_up(optimizer: Optimizer) -> Any:
    warmup = torch_schedulers.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = torch_schedulers.CosineAnnealingLR(optimizer, 9, eta_min=0.001)
    return torch_schedulers.SequentialLR(optimizer, [warmup, cosine], [3])


def chained(optimizer: Optimizer) -> Any:
    parts = [torch_schedulers.ConstantLR(optimizer, 0.5, 4), torch_schedulers.ExponentialLR(optimizer, 0.9)]
    return torch_schedulers.ChainedScheduler(parts, optimizer)


def both_groups(optimizer: Optimizer) -> Any:
    lr = lr_of(optimizer)
    return ParamGroupScheduler(
        [
            LinearCyclicalScheduler(optimizer, "lr", lr, lr / 10, 12, param_group_index=0),
            CosineAnnealingScheduler(optimizer, "lr", lr, lr / 5, 12, param_group_index=1),
        ]
    )


def after_warmup(optimizer: Optimizer) -> Any:
    cosine = torch_schedulers.CosineAnnealingLR(optimizer, 9, eta_min=0.0)
    lr = lr_of(optimizer)
    return create_lr_scheduler_with_warmup(cosine, warmup_start_value=lr / 10, warmup_end_value=lr, warmup_duration=3)


OURS: dict[str, Make] = {
    "constant()": schedules.constant,
    **{name: lambda o, make=make: make(o, 2) for name, make in SCHEDULES.items()},
    "linear over the run, floor": lambda o: schedules.warmup_linear(o, 0.25, min_ratio=0.1),
    "cosine of a length": lambda o: schedules.warmup_cosine(o, 2, total=12),
}
TORCH: dict[str, Make] = {
    "ChainedScheduler": chained,
    "ConstantLR": lambda o: torch_schedulers.ConstantLR(o, 0.5, 7),
    "CosineAnnealingLR": lambda o: torch_schedulers.CosineAnnealingLR(o, 12, eta_min=0.001),
    "CosineAnnealingWarmRestarts": lambda o: torch_schedulers.CosineAnnealingWarmRestarts(o, 5, eta_min=0.001),
    "CyclicLR": lambda o: torch_schedulers.CyclicLR(o, lr_of(o) / 5, lr_of(o), 3, cycle_momentum=False),
    "ExponentialLR": lambda o: torch_schedulers.ExponentialLR(o, 0.8),
    "LambdaLR": lambda o: torch_schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LinearLR": lambda o: torch_schedulers.LinearLR(o, 1.0, 0.1, 10),
    "MultiStepLR": lambda o: torch_schedulers.MultiStepLR(o, [3, 9], 0.1),
    "MultiplicativeLR": lambda o: torch_schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "OneCycleLR": lambda o: torch_schedulers.OneCycleLR(o, lr_of(o), total_steps=13),
    "PolynomialLR": lambda o: torch_schedulers.PolynomialLR(o, 13, 2.0),
    "SequentialLR": warmed_up,
    "StepLR": lambda o: torch_schedulers.StepLR(o, 2, 0.5),
}
IGNITE: dict[str, Make] = {
    "linear cycles": lambda o: LinearCyclicalScheduler(o, "lr", lr_of(o), lr_of(o) / 10, 8),
    "cosine": lambda o: CosineAnnealingScheduler(o, "lr", lr_of(o), lr_of(o) / 10, 12),
    "piecewise": lambda o: PiecewiseLinear(o, "lr", [(0, lr_of(o) / 10), (3, lr_of(o)), (11, lr_of(o) / 5)]),
    "concatenated": lambda o: ConcatScheduler(
        [
            LinearCyclicalScheduler(o, "lr", lr_of(o) / 10, lr_of(o), 8),
            CosineAnnealingScheduler(o, "lr", lr_of(o), lr_of(o) / 5, 20),
        ],
        [4],
    ),
    "of groups": both_groups,
    "torch's in Ignite's": lambda o: IgniteTorchScheduler(torch_schedulers.StepLR(o, 2, 0.5)),
    "warmed up": after_warmup,
}
EVERY: dict[str, Make] = {
    **{f"ours: {name}": make for name, make in OURS.items() if name != "plateau"},
    **{f"torch: {name}": make for name, make in TORCH.items()},
    **{f"ignite: {name}": make for name, make in IGNITE.items()},
}


def as_from(start: Mapping[int, Sequence[float]], first: int) -> dict[int, Any]:
    """Of the LRs of a whole run those from an iteration on."""
    return {number: pytest.approx(list(lrs), rel=1e-6) for number, lrs in start.items() if number >= first}


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 7])
@pytest.mark.parametrize("name", EVERY)
def test_from_there_on_the_rates_are_those_of_a_run_begun_with_the_new_base(
    tmp_path: Path, name: str, stop: int
) -> None:
    """Also where the same command is started again, and without the override after that."""
    make = EVERY[name]
    begun_with_it = Run(tmp_path / "whole", make, lr=NEW).train()
    Run(tmp_path / "run", make).train(stop)
    override = {"optimizer.lr": NEW}
    changed = Run(tmp_path / "run", make, override)
    assert changed.train(2) == as_from({k: v for k, v in begun_with_it.items() if k <= stop + 2}, stop + 1)
    assert changed.moments[stop + 1], "the moments were dropped"
    again = Run(tmp_path / "run", make, override)
    assert again.train(1) == as_from({k: v for k, v in begun_with_it.items() if k <= stop + 3}, stop + 3)
    assert Run(tmp_path / "run", make).train() == as_from(begun_with_it, stop + 4)


@pytest.mark.parametrize("name", ["ours: cosine", "torch: StepLR", "torch: SequentialLR", "ignite: cosine"])
@pytest.mark.parametrize("stop", [3, 4, 6])
def test_a_schedule_per_epoch_is_rebased_too(tmp_path: Path, name: str, stop: int) -> None:
    make: Make = EVERY[name] if name != "ours: cosine" else lambda o: schedules.warmup_cosine(o, 1)
    begun_with_it = Run(tmp_path / "whole", make, lr=NEW, event=Events.EPOCH_COMPLETED).train()
    Run(tmp_path / "run", make, event=Events.EPOCH_COMPLETED).train(stop)
    changed = Run(tmp_path / "run", make, {"optimizer.lr": NEW}, event=Events.EPOCH_COMPLETED)
    assert changed.train() == as_from(begun_with_it, stop + 1)


@pytest.mark.parametrize("name", ["ours: cosine", "torch: StepLR", "torch: CosineAnnealingLR", "ignite: cosine"])
def test_a_schedule_that_is_attached_after_the_resume_is_rebased_too(tmp_path: Path, name: str) -> None:
    begun_with_it = Run(tmp_path / "whole", EVERY[name], lr=NEW).train()
    Run(tmp_path / "run", EVERY[name]).train(5)
    changed = Run(tmp_path / "run", EVERY[name], {"optimizer.lr": NEW}, late=True)
    assert changed.train() == as_from(begun_with_it, 6)


def test_killed_and_started_again_it_ends_with_the_bits_of_a_run_that_was_not(tmp_path: Path) -> None:
    """As where a supervisor starts the command again: what was applied once is not applied to what came of it."""
    for name, stops in (("whole", []), ("killed", [2, 3])):
        Run(tmp_path / name, plateau).train(5)
        for stop in stops:
            Run(tmp_path / name, plateau, {"optimizer.lr": NEW}).train(stop)
    whole = Run(tmp_path / "whole", plateau, {"optimizer.lr": NEW})
    killed = Run(tmp_path / "killed", plateau, {"optimizer.lr": NEW})

    lrs = whole.train()
    assert lrs[6] == [NEW, NEW] and lrs[12][0] < NEW / 8, "the plateau did not lower it"
    assert killed.train() == {number: lrs[number] for number in (11, 12)}
    assert [p.tolist() for p in whole.optimizer.param_groups[1]["params"]] == [
        p.tolist() for p in killed.optimizer.param_groups[1]["params"]
    ]


def plateau(optimizer: Optimizer) -> Any:
    return torch_schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def test_a_handler_that_sets_the_rate_is_not_undone_by_a_second_start(tmp_path: Path) -> None:
    """Without a schedule the LR itself is replaced, once."""

    def train(end: int, override: Mapping[str, Any] | None = None) -> dict[int, list[float]]:
        run = Run(tmp_path, override=override)

        def halve(trainer: Trainer) -> None:
            for group in run.optimizer.param_groups:
                group["lr"] *= 0.5

        run.trainer.add_event_handler(Events.ITERATION_COMPLETED, halve)
        return run.train(end)

    train(2)
    for _ in range(3):
        lrs = train(1, {"optimizer.lr": 1.0})
    assert lrs == {5: [0.25, 0.25]}
    assert train(1, {"optimizer.lr": 2.0}) == {6: [2.0, 2.0]}, "another value is another change"
    assert train(1) == {7: [1.0, 1.0]}
    assert train(1, {"optimizer.lr": 2.0}) == {8: [2.0, 2.0]}, "it was not given in between"


def test_each_option_of_each_group_by_name_or_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run(tmp_path).train(3)
    caplog.clear()
    values = {"optimizer.first.lr": 0.5, "optimizer.weight_decay": 0.0, "optimizer.1.momentum": 0.5}
    run = Run(tmp_path, override=values)
    options = [[group[name] for name in ("lr", "weight_decay", "momentum")] for group in run.optimizer.param_groups]
    assert options == [[0.5, 0.0, 0.9], [0.1, 0.0, 0.5]]
    run.train(1)
    (line,) = [message for message in caplog.messages if message.startswith("Changed")]
    assert line == (
        "Changed from iteration 4 on: optimizer.first.lr 0.1 -> 0.5, optimizer.weight_decay 0.01 -> 0.0, "
        "optimizer.1.momentum 0.9 -> 0.5."
    )
    groups = Run(tmp_path).optimizer.param_groups
    assert [[group[name] for name in ("lr", "weight_decay", "momentum")] for group in groups] == options


def test_one_line_says_the_value_of_the_checkpoint_and_the_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From what the optimizer had, whatever the program builds now; nothing where it is in force already."""
    Run(tmp_path, OURS["linear"]).train(7)
    caplog.clear()
    Run(tmp_path, OURS["linear"], {"optimizer.lr": NEW}, lr=7.0).train(1)
    lines = [message for message in caplog.messages if "lr" in message and "Resumed" not in message]
    assert lines == [
        "Changed from iteration 8 on: optimizer.lr 0.1 -> 0.025 (the schedule's base; of the next update 0.05 -> "
        "0.0125)."
    ]
    caplog.clear()
    Run(tmp_path, OURS["linear"], {"optimizer.lr": NEW}, lr=7.0)
    assert not [message for message in caplog.messages if "lr" in message]
    Run(tmp_path, OURS["linear"], lr=7.0)
    (line,) = [message for message in caplog.messages if "lr" in message]
    assert "lr 0.025 to 7.0" in line and "no effect" in line
    assert "Checkpoint(..., override={'optimizer.lr': 7.0})" in line and "checkpoint.override" in line
    caplog.clear()
    Run(tmp_path, OURS["linear"], lr=NEW)
    assert not [message for message in caplog.messages if "lr" in message]


def test_nothing_is_said_to_be_changed_where_nothing_is_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended = Run(tmp_path)
    ended.trainer.run(loader(Numbers(8), 2), max_iters=2)
    again = Run(tmp_path, override={"optimizer.lr": NEW})
    again.trainer.run(loader(Numbers(8), 2), max_iters=2)
    assert "Changed from" not in caplog.text
    longer = Run(tmp_path, override={"optimizer.lr": NEW})
    longer.trainer.run(loader(Numbers(8), 2), max_iters=3)
    assert "Changed from iteration 3 on: optimizer.lr" in caplog.text and longer.used == {3: [NEW, NEW]}


def test_a_fresh_run_is_not_changed_nor_when_the_same_command_resumes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a kill would change the bits of the run."""
    override = {"optimizer.lr": NEW}
    assert Run(tmp_path, override=override).train(2)[1] == [OLD, OLD]
    assert "override has no effect on a run that starts fresh, nor where the same command resumes it" in caplog.text
    assert Run(tmp_path, override=override).train(1) == {3: [OLD, OLD]}
    assert Run(tmp_path).train(1) == {4: [OLD, OLD]}
    assert Run(tmp_path, override=override).train(1) == {5: [NEW, NEW]}


@pytest.mark.parametrize("before", [0, 2])
def test_a_group_that_the_run_adds_keeps_its_rate_where_the_same_command_resumes_it(
    tmp_path: Path, before: int
) -> None:
    def train(updates: int, override: Mapping[str, Any] | None, *, unfreezes: bool = False) -> list[float]:
        model = linear()
        first, *others = model.parameters()
        optimizer = SGD([first], lr=OLD)
        trainer = Trainer(Update(model, optimizer, mse))
        checkpoint = Checkpoint(tmp_path, override=override)
        checkpoint.attach(trainer)
        checkpoint.resume()

        def add(trainer: Trainer) -> None:
            optimizer.add_param_group({"params": others, "lr": 0.5})

        if unfreezes:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=trainer.state.iteration + 1), add)
        trainer.run(loader(Numbers(8), 2), max_iters=trainer.state.iteration + updates)
        return [group["lr"] for group in optimizer.param_groups]

    if before:
        train(before, None)
    override = {"optimizer.lr": NEW}
    assert train(2, override, unfreezes=True) == [NEW if before else OLD, 0.5]
    assert train(1, override) == [NEW if before else OLD, 0.5]
    assert train(1, {"optimizer.1.lr": NEW}) == [NEW if before else OLD, NEW]


def test_what_another_run_was_given_does_not_count_in_one_that_begins_with_all_of_it(tmp_path: Path) -> None:
    def train() -> dict[int, list[float]]:
        run = Run(tmp_path / "run", override={"optimizer.lr": NEW})
        if run.path is None:
            run.checkpoint.load(tmp_path / "other", parts=["*"])
        return run.train(1)

    Run(tmp_path / "other").train(2)
    Run(tmp_path / "other", override={"optimizer.lr": 1.0}).train(1)
    assert [train(), train()] == [{4: [1.0, 1.0]}, {5: [1.0, 1.0]}]


def test_a_number_of_numpy_is_saved_as_one_of_python(tmp_path: Path) -> None:
    Run(tmp_path).train(2)
    Run(tmp_path, override={"optimizer.lr": np.float64(NEW)}).train(1)
    assert Run(tmp_path).train(1) == {4: [NEW, NEW]}


@pytest.mark.parametrize("late", [False, True])
def test_a_schedule_of_another_option_changes_no_rate(tmp_path: Path, late: bool) -> None:
    """Nor one that is attached after the resume. The schedule of the rate has a floor."""

    def train(name: str, updates: int, override: Mapping[str, Any] | None = None, lr: float = OLD) -> dict[int, Any]:
        model = linear()
        optimizer = SGD(model.parameters(), lr=lr, momentum=0.9)
        trainer = Trainer(Update(model, optimizer, mse))
        LRSchedule(TORCH["CosineAnnealingLR"](optimizer)).attach(trainer)
        of_momentum = LRSchedule(PiecewiseLinear(optimizer, "momentum", [(0, 0.5), (END, 0.9)]), name="momentum")
        checkpoint = Checkpoint(tmp_path / name, override=override)
        checkpoint.attach(trainer)
        if not late:
            of_momentum.attach(trainer)
        checkpoint.resume()
        if late:
            of_momentum.attach(trainer)
        used: dict[int, Any] = {}

        def note(trainer: Trainer) -> None:
            used[trainer.state.iteration] = [optimizer.param_groups[0]["lr"]]

        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, note)
        trainer.run(loader(Numbers(8), 2), max_iters=trainer.state.iteration + updates)
        return used

    begun_with_it = train("whole", END, lr=NEW)
    train("run", 5)
    assert train("run", END - 5, {"optimizer.lr": NEW}) == as_from(begun_with_it, 6)


def test_several_optimizers_by_name(tmp_path: Path) -> None:
    def made(override: Mapping[str, Any] | None = None, *, in_turn: bool = False) -> list[float]:
        parts = [linear(), linear()]
        optimizers = {name: SGD(part.parameters(), lr=OLD) for name, part in zip(("dense", "other"), parts)}
        model = torch.nn.ModuleList(parts)

        def loss_fn(model: Any, batch: Any) -> Any:
            return sum(mse(part, batch) for part in model)

        if in_turn:
            turns = {name: Update(model, optimizer, loss_fn) for name, optimizer in optimizers.items()}
            update: Any = Updates(turns)
        else:
            update = Update(model, optimizers, loss_fn)
        trainer = Trainer(update)
        for name, optimizer in optimizers.items():
            LRSchedule(schedules.warmup_cosine(optimizer, total=100), name=f"lr_schedule/{name}").attach(trainer)
        checkpoint = Checkpoint(tmp_path / str(in_turn), override=override)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(loader(Numbers(8), 2), max_iters=trainer.state.iteration + 2)
        bases: list[float] = [group["lr"] for optimizer in optimizers.values() for group in optimizer.param_groups]
        return bases

    for in_turn in (False, True):
        before = made(in_turn=in_turn)
        after = made({"optimizers.other.lr": NEW}, in_turn=in_turn)
        assert before[0] == before[1] > 0.09 and after[0] > 0.09 and 0.02 < after[1] < NEW


WRONG: list[tuple[Any, str]] = [
    ({"optimizer.lrr": 1.0}, "override 'optimizer.lrr': the optimizer has no option 'lrr'; did you mean 'lr'?"),
    ({"optimzer.lr": 1.0}, "override 'optimzer.lr': expected the optimizer's name and an option, such as optimizer.lr"),
    ({"optimizer.head.lr": 1.0}, "override 'optimizer.head.lr': the optimizer has no group 'head'; known: first, 1."),
    ({"optimizer.lr": -1.0}, "override 'optimizer.lr': SGD says: Invalid learning rate: -1.0."),
    ({"optimizer.lr": "fast"}, "override 'optimizer.lr': got 'fast' in the place of 0.1, expected a number."),
    ({"optimizer.lr": [1.0, 2.0]}, "override 'optimizer.lr': got [1.0, 2.0] in the place of 0.1, expected a number."),
    ({"optimizer.foreach": True}, "override 'optimizer.foreach': got True in the place of None, which stays as it is."),
]


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize(("override", "message"), WRONG)
def test_what_cannot_be_changed_is_one_line(tmp_path: Path, override: Any, message: str, resumes: bool) -> None:
    """Also where there is nothing to resume yet."""
    if resumes:
        Run(tmp_path).train(2)
    with pytest.raises(StateMismatch, match=re.escape(message)):
        Run(tmp_path, override=override)


def test_a_schedule_that_begins_again_is_given_its_rate_by_the_program(tmp_path: Path) -> None:
    Run(tmp_path, OURS["linear"]).train(2)
    run = Run(tmp_path / "other", OURS["linear"], {"optimizer.lr": NEW})
    run.checkpoint._saver.store = Checkpoint(tmp_path).store
    with pytest.raises(StateMismatch, match=r"'optimizer.lr': lr_schedule is not resumed, so it begins with what the"):
        run.checkpoint.resume(ignore=["schedule"])


def test_an_optimizer_that_begins_again_is_changed_again(tmp_path: Path) -> None:
    Run(tmp_path).train(2)
    Run(tmp_path, override={"optimizer.lr": NEW}).train(1)
    run = Run(tmp_path / "other", override={"optimizer.lr": NEW})
    run.checkpoint._saver.store = Checkpoint(tmp_path).store
    run.checkpoint.resume(ignore=["optimizer"])
    assert run.train(1) == {4: [NEW, NEW]}


def test_groups_that_one_schedule_sets_are_changed_together(tmp_path: Path) -> None:
    Run(tmp_path, IGNITE["cosine"]).train(2)
    with pytest.raises(StateMismatch, match=r"'optimizer.first.lr': CosineAnnealingScheduler sets all groups to one"):
        Run(tmp_path, IGNITE["cosine"], {"optimizer.first.lr": NEW})


def test_groups_that_differ_are_named_one_by_one(tmp_path: Path) -> None:
    Run(tmp_path, override={"optimizer.lr": NEW})
    run = Run(tmp_path)
    run.optimizer.param_groups[1]["weight_decay"] = 0.0
    run.train(2)
    with pytest.raises(StateMismatch, match=r"its groups have 0.01 \(first\) and 0.0 \(1\): name each"):
        Run(tmp_path, override={"optimizer.weight_decay": 0.5})
    changed = Run(tmp_path, override={"optimizer.first.weight_decay": 0.5})
    assert [group["weight_decay"] for group in changed.optimizer.param_groups] == [0.5, 0.0]


class Alone:
    """A schedule of the user's own, without anything that is known of it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.3 / (1 + self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class WithBases(Alone):
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]

    def step(self) -> None:
        self.steps += 1
        for base, group in zip(self.base_lrs, self.optimizer.param_groups):
            group["lr"] = base / (1 + self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.base_lrs = state["steps"], list(state["base_lrs"])


def test_a_schedule_of_the_users_own_needs_base_lrs(tmp_path: Path) -> None:
    begun_with_it = Run(tmp_path / "whole", WithBases, lr=NEW).train()
    Run(tmp_path / "run", WithBases).train(5)
    assert Run(tmp_path / "run", WithBases, {"optimizer.lr": NEW}).train() == as_from(begun_with_it, 6)
    Run(tmp_path / "alone", Alone).train(5)
    with pytest.raises(StateMismatch, match=r"'optimizer.lr': Alone sets it, and has no base_lrs"):
        Run(tmp_path / "alone", Alone, {"optimizer.lr": NEW})


def test_what_a_schedule_cycles_is_not_replaced(tmp_path: Path) -> None:
    Run(tmp_path, TORCH["OneCycleLR"]).train(5)
    with pytest.raises(StateMismatch, match=r"'optimizer.momentum': OneCycleLR sets it"):
        Run(tmp_path, TORCH["OneCycleLR"], {"optimizer.momentum": 0.5})


def test_options_that_need_a_state_that_was_not_saved_are_refused(tmp_path: Path) -> None:
    def made(override: Mapping[str, Any] | None = None, **options: Any) -> Trainer:
        model = linear()
        trainer = Trainer(Update(model, torch.optim.RMSprop(model.parameters(), **options), mse))
        checkpoint = Checkpoint(tmp_path, override=override)
        checkpoint.attach(trainer)
        checkpoint.resume()
        return trainer

    made().run(loader(Numbers(8), 2), max_iters=2)
    with pytest.raises(StateMismatch, match=r"'optimizer.centered': RMSprop cannot go on with it: .*grad_avg"):
        made({"optimizer.centered": True})
    trainer = made({"optimizer.alpha": 0.5, "optimizer.lr": 0.5})
    trainer.run(loader(Numbers(8), 2), max_iters=4)
    assert trainer.update.optimizers["optimizer"].param_groups[0]["alpha"] == 0.5  # type: ignore[attr-defined]


def test_a_tensor_rate_is_changed_in_place(tmp_path: Path) -> None:
    def made(override: Mapping[str, Any] | None = None) -> Any:
        model = linear()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(OLD), betas=(0.9, 0.99))
        trainer = Trainer(Update(model, optimizer, mse))
        LRSchedule(torch_schedulers.ExponentialLR(optimizer, 0.5)).attach(trainer)
        checkpoint = Checkpoint(tmp_path, override=override)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(loader(Numbers(8), 2), max_iters=trainer.state.iteration + 2)
        return optimizer.param_groups[0]

    made()
    group = made({"optimizer.lr": NEW, "optimizer.betas": [0.8, 0.9]})
    assert isinstance(group["lr"], torch.Tensor) and group["betas"] == (0.8, 0.9)
    assert group["lr"].item() == pytest.approx(NEW * 0.5**4)


def test_a_roll_back_to_before_the_change_makes_it_again(tmp_path: Path) -> None:
    """The checkpoint that is gone back to has the old rate."""
    Run(tmp_path, OURS["linear"]).train(5)
    begun_with_it = Run(tmp_path / "whole", OURS["linear"], lr=NEW).train()
    changed = Run(tmp_path, OURS["linear"], {"optimizer.lr": NEW})
    assert changed.checkpoint._load_healthy() is not None
    assert changed.train() == as_from(begun_with_it, 6)


def test_a_raw_scheduler_of_an_update_function_is_rebased(tmp_path: Path) -> None:
    """Registered by the user, as torch's schedulers are."""

    def made(override: Mapping[str, Any] | None = None, lr: float = OLD) -> list[float]:
        model = linear()
        optimizer = SGD(model.parameters(), lr=lr)
        scheduler = torch_schedulers.StepLR(optimizer, 1, 0.5)

        def update(engine: Any, batch: Any) -> float:
            optimizer.zero_grad()
            mse(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            return 0.0

        trainer = Trainer(update)
        for name, obj in (("schedule", scheduler), ("model", model), ("sgd", optimizer)):
            trainer.register(name, obj, shared=True)
        checkpoint = Checkpoint(tmp_path, override=override)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(loader(Numbers(8), 2), max_iters=trainer.state.iteration + 2)
        return [optimizer.param_groups[0]["lr"], *scheduler.base_lrs, *scheduler.get_last_lr()]

    made()
    assert made({"sgd.lr": NEW}) == pytest.approx([NEW * 0.5**4, NEW, NEW * 0.5**4])
