"""The judge of ``fit``: drawn arguments, called once or several times, train as a loop written by hand.

The loop gets the batches that ``fit`` has trained on, in their order, and uses nothing of the engine but the formulas
of named schedules. Compared are, bit for bit, all weights and buffers; the number of updates; to rounding each mean in
``metrics.jsonl``, and the metrics of each evaluation. The batches themselves must be each sample once an epoch, in the
order of the data where it has one, and of the whole run also where it was stopped. What is random in the model cannot
be drawn by hand: a run with dropout is compared with the same run, made by one call.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Events
from torch import Tensor, nn

from ignite_engine import fit
from tests.search import fit_cases as cases
from tests.search.common import PASSED, Failure, Result, case_seeds
from tests.search.fit_cases import FEATURES, REFUSED, LossFn, Net, Plan, draw
from tests.search.update_search import quiet

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
}
OTHER_RATE = 0.3
"""What a resume multiplies the base rate by."""
LOGGING = dict.fromkeys(("clearml", "progress", "report", "console", "memory", "throughput"), False)


class Difference(Exception):
    """What differs, in one line."""


@dataclass
class Trained:
    """What the calls of a case left.

    Attributes:
        batches: trained on, one after another.
        rates: by which the base rate is multiplied from an update on.
        folder: of the run.
        stops: the updates at whose end a call was stopped.
        ends: those with which a call has completed the run, evaluated by then.
    """

    folder: Path
    batches: list[Any] = field(default_factory=list)
    rates: dict[int, float] = field(default_factory=dict)
    stops: list[int] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)
    run: Any = None

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.run.trainer.update.model.state_dict().items()}

    def lines(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


def run(seed: int, count: int | None, minutes: float | None) -> Result:
    """Judge the cases ``seed``, ``seed + 1``, ...; each failure is printed as it is found."""
    result, started = Result("fit", seed, FEATURES), time.monotonic()
    with quiet():
        for number in case_seeds(seed, count, minutes):
            plan = draw(number)
            reason, happened = judge(plan)
            if reason is not None:
                result.failures.append(Failure("fit", number, reason))
                print(result.failures[-1], flush=True)
                continue
            result.outcomes[PASSED] += 1
            drawn = {f"{name}: {plan[name]}" for name in cases.CHOICES}
            result.exercised.update(drawn | {f"happened: {what}" for what in happened})
    result.seconds = time.monotonic() - started
    return result


def show(number: int) -> str:
    """The case of a number, a line for each field."""
    return "\n".join(f"{name}: {value}" for name, value in draw(number).items())


def judge(plan: Plan) -> tuple[str | None, set[str]]:
    """What differs first, or None; and what happened."""
    happened: set[str] = set()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        try:
            trained = by_fit(plan, Path(folder) / "case", happened)
            check_batches(plan, trained, happened)
            if plan["model"] == "dropout":
                whole = by_fit(plan | {"calls": "one"}, Path(folder) / "whole", set())
                same_weights(whole.weights, trained.weights)
                same_lines(whole.lines(), without_shorter_runs(trained, whole))
            else:
                by_hand(plan, trained, happened)
        except Difference as difference:
            return str(difference), happened
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", happened
    return None, happened


# -- the calls of fit -------------------------------------------------------------------------------------------------


def updates_of(plan: Plan) -> tuple[int, int, int]:
    """Micro-batches of an epoch, updates of an epoch, and updates of the whole run."""
    full, rest = divmod(plan["samples"], plan["batch size"])
    batches = full + (rest > 0 and plan["data"] != "DataLoader drop_last")
    per_epoch = -(-batches // steps_of(plan))
    return batches, per_epoch, plan["iterations"] if plan["length"] == "max_iters" else plan["epochs"] * per_epoch


def steps_of(plan: Plan) -> int:
    return 1 if plan["accumulation"] == "None" else int(plan["accumulation"])


def by_fit(plan: Plan, folder: Path, happened: set[str]) -> Trained:
    trained = Trained(folder)
    _, per_epoch, total = updates_of(plan)
    calls, stop = plan["calls"], max(1, min(int(total * plan["first share"]), total - 1))
    if calls == "longer":
        shorter = {"epochs": max(1, plan["epochs"] - 1), "iterations": max(1, plan["iterations"] - 3)}
        call(plan | shorter, trained)
    elif calls in ("stopped", "stopped twice", "stopped, other rate", "stopped, same model", "refused between"):
        stops = [stop, min(stop + 2, total - 1)] if calls == "stopped twice" else [stop]
        for at in sorted(set(stops)):
            call(plan, trained, stop_at=at)
            if at % per_epoch:
                happened.add("stopped within an epoch")
    if calls == "refused between":
        refuse(plan, trained)
    more: dict[str, Any] = {}
    if calls == "stopped, other rate":
        trained.rates[stop] = OTHER_RATE
        more["resume"] = {"lr": OTHER_RATE * plan["lr"]}
    model = trained.run.trainer.update.model if calls == "stopped, same model" else None
    call(plan, trained, model, **more)
    if calls == "again":
        before, count = trained.weights, len(trained.batches)
        call(plan, trained)
        if len(trained.batches) != count:
            raise Difference("the second call of a finished run trained on")
        same_weights(before, trained.weights)
    return trained


def call(plan: Plan, trained: Trained, model: Net | None = None, *, stop_at: int | None = None, **more: Any) -> None:
    """One call of ``fit``, as a program makes it that is started again."""
    torch.manual_seed(plan["number"] % 2**31)  # a loader with a state draws its order from there, when it is made
    model, loss_fn = model or cases.net_of(plan), LossFn(plan)
    handlers = cases.handlers_of(plan)
    if stop_at is not None:
        handlers.append((lambda trainer: trainer.request_stop("the judge"), Events.ITERATION_COMPLETED(once=stop_at)))
    trained.run = fit(model, loss_fn, **arguments_of(plan, model), directory=trained.folder, handlers=handlers, **more)
    trained.batches += loss_fn.trained_on
    status = trained.run.summary["status"]
    if status != ("completed" if stop_at is None else "interrupted"):
        raise Difference(f"the status is {status}, {trained.run.summary['reason']}")
    if stop_at is None:
        trained.ends.add(trained.run.summary["iteration"])
    else:
        trained.stops.append(trained.run.summary["iteration"])
        if trained.stops[-1] != stop_at:
            raise Difference(f"stopped at update {trained.stops[-1]}, asked for at {stop_at}")


def arguments_of(plan: Plan, model: Net) -> dict[str, Any]:
    train_set, of_data = cases.data_of(plan)
    sets = cases.val_sets(plan)
    intervals = {"iterations": 1, "every 3": 3, "epochs": {"epochs": 1}}
    found: dict[str, Any] = {
        "train_set": train_set,
        "val_set": None if not sets else sets if len(sets) > 1 else sets["val"],
        plan["length"]: plan["epochs" if plan["length"] == "max_epochs" else "iterations"],
        "precision": plan["precision"],
        "logging": LOGGING | {"every": intervals[plan["log"]]},
        "checkpoint": {"every": intervals[plan["save"]], "background": plan["background"] == "yes"},
        **of_data,
        **cases.optimizer_arguments(plan, model),
        **cases.schedule_arguments(plan),
        **cases.metric_arguments(plan),
    }
    if plan["accumulation"] != "None":
        found["accumulation_steps"] = int(plan["accumulation"])
    if plan["clip"] != "no":
        found["clip_norm"] = float(plan["clip"])
    if plan["weights"] == "samples":
        found["weight_fn"] = cases.weight_of
    return found


def refuse(plan: Plan, trained: Trained) -> None:
    """A call with a wrong argument raises and changes nothing, neither in the folder nor in what comes next."""
    model, loss_fn = cases.net_of(plan), LossFn(plan)
    before = {
        path: path.read_bytes() for path in trained.folder.rglob("*") if path.is_file() and ".log" not in path.name
    }
    wrong = arguments_of(plan, model) | REFUSED[plan["refused"]]
    try:
        fit(model, loss_fn, **wrong, directory=trained.folder)
    except (ValueError, TypeError):
        pass
    else:
        raise Difference(f"fit() took {REFUSED[plan['refused']]}")
    after = {path: path.read_bytes() for path in before if path.exists()}
    if changed := [path.name for path in before if before[path] != after.get(path)]:
        raise Difference(f"a call that was refused for {REFUSED[plan['refused']]} changed {changed}")
    if loss_fn.trained_on:
        raise Difference("a call that was refused has trained")


# -- what is compared -------------------------------------------------------------------------------------------------


def check_batches(plan: Plan, trained: Trained, happened: set[str]) -> None:
    """The batches are those of the data: of each epoch every sample once, in the order of the data if it has one."""
    batches, per_epoch, total = updates_of(plan)
    epochs, rest = divmod(total, per_epoch)
    count = epochs * batches + min(rest * steps_of(plan), batches)
    ids = [(64 * cases.pair_of(batch)[0][:, 0]).round().int().tolist() for batch in trained.batches]
    if len(ids) != count:
        raise Difference(f"trained on {len(ids)} micro-batches, expected {count}")
    orders = []
    for start in range(0, count, batches):
        epoch = ids[start : start + batches]
        if any(len(batch) != plan["batch size"] for batch in epoch[: batches - 1]):
            raise Difference(f"epoch {start // batches + 1} has batches of {[len(batch) for batch in epoch]} samples")
        order = list(itertools.chain(*epoch))
        if len(set(order)) != len(order):
            raise Difference(f"epoch {start // batches + 1} has a sample twice: {order}")
        whole = len(epoch) == batches
        if whole and plan["data"] != "DataLoader drop_last" and sorted(order) != list(range(plan["samples"])):
            raise Difference(f"epoch {start // batches + 1} lacks samples: {sorted(order)}")
        if whole and len(epoch[-1]) < plan["batch size"]:
            happened.add("short last batch")
        expected = list(range(plan["samples"]))[:: -1 if plan["data"] == "sampler" else 1]
        if plan["data"] in cases.IN_ORDER and order != expected[: len(order)]:
            raise Difference(f"epoch {start // batches + 1} is in another order than its data: {order}")
        orders.append(order)
    drawn = plan["data"] not in cases.IN_ORDER and len(orders) > 1 and len(orders[1]) > 5
    if drawn and orders[0][: len(orders[1])] == orders[1]:
        raise Difference("two epochs have the same order")


def same_weights(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        if not torch.equal(value.nan_to_num(nan=123.0), found[name].nan_to_num(nan=123.0)):
            raise Difference(f"{name} differs by up to {(value - found[name]).abs().max().item():.3g}")


def without_shorter_runs(trained: Trained, whole: Trained) -> list[dict[str, Any]]:
    """The lines without what was evaluated at the end of a shorter run."""
    by_iteration = {line["iteration"]: line for line in whole.lines()}
    lines = []
    for line in trained.lines():
        expected = by_iteration.get(line["iteration"], {})
        if line["iteration"] in trained.ends:
            line = {name: value for name, value in line.items() if name in expected}
        lines += [line] if line else []
    return lines


def same_lines(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    for one, other in itertools.zip_longest(expected, found):
        if one != other:
            raise Difference(f"metrics.jsonl: expected {one}, found {other}")


# -- the loop by hand -------------------------------------------------------------------------------------------------


def by_hand(plan: Plan, trained: Trained, happened: set[str]) -> None:
    """Train on the same batches and compare.

    Raises:
        Difference: in weights, counts, or what was logged.
    """
    model, loss_fn = cases.net_of(plan), LossFn(plan | {"model": plan["model"]})
    optimizers = cases.optimizers_by_hand(plan, model)
    schedulers = [cases.scheduler_of(plan, optimizer) for optimizer in optimizers.values()]
    per_step = plan["schedule"] in ("OneCycleLR", "LambdaLR per step")
    bases = {name: [group["lr"] for group in optimizer.param_groups] for name, optimizer in optimizers.items()}
    batches, per_epoch, total = updates_of(plan)
    scaler = torch.amp.GradScaler("cpu", enabled=plan["precision"] == "fp16")  # type: ignore[attr-defined]
    values: list[dict[str, float]] = []
    measured: dict[int, dict[str, float]] = {}
    steps, factor, left = 0, 1.0, iter(trained.batches)
    for update in range(1, total + 1):
        factor = trained.rates.get(update - 1, factor)
        in_epoch = (update - 1) % per_epoch
        size = min(steps_of(plan), batches - in_epoch * steps_of(plan))
        if plan["schedule"] in cases.OF_THE_RUN or trained.rates:
            for name, optimizer in optimizers.items():
                for group, base in zip(optimizer.param_groups, bases[name], strict=True):
                    group["lr"] = factor * base * ratio(plan["schedule"], steps, total)
        stepped = one_update(
            plan, model, loss_fn, optimizers, list(itertools.islice(left, size)), scaler, values, happened
        )
        steps += stepped
        if size < steps_of(plan):
            happened.add("short group")
        if plan["handlers"] == "changes weights":
            cases.shrink(model)
        ends = in_epoch + 1 == per_epoch
        for scheduler in schedulers:
            if scheduler is not None and (stepped if per_step else ends):
                scheduler.step()
        if (ends or update in trained.ends) and plan["val"] != "none":
            measured[update] = evaluated(plan, model, loss_fn)
    same_weights(model.state_dict(), trained.weights)
    summary = trained.run.summary
    epochs = -(-total // per_epoch)
    counted = {"iteration": total, "epoch": epochs, "optimizer_steps": steps, "skipped_steps": total - steps}
    for name, count in counted.items():
        if summary[name] != count:
            raise Difference(f"summary.json: {name} is {summary[name]}, expected {count}")
    check_log(plan, trained.lines(), values, measured, per_epoch)


def ratio(schedule: str, step: int, total: int) -> float:
    """Of the base rate, for the update after ``step`` others: a warm-up of two, and the shape over the rest."""
    if schedule not in SHAPES:
        return 1.0
    if step < 2:
        return (step + 1) / 2
    return SHAPES[schedule]((step - 2) / max(total - 2, 1))


def one_update(
    plan: Plan,
    model: Net,
    loss_fn: LossFn,
    optimizers: dict[str, Any],
    group: list[Any],
    scaler: Any,
    values: list[dict[str, float]],
    happened: set[str],
) -> bool:
    """Forward, backward, clip and step as in torch's examples; whether the weights changed."""
    weights = [cases.weight_of(batch) if plan["weights"] == "samples" else 1 for batch in group]
    dtype, parameters = DTYPES[plan["precision"]], cases.trained_parameters(model)
    model.train()
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    means: dict[str, float] = {}
    for batch, weight in zip(group, weights, strict=True):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            result = loss_fn(model, batch)
        loss, named = result if isinstance(result, tuple) else (result, {})
        if isinstance(loss, dict):
            named = {f"loss/{name}": value for name, value in loss.items()}
            loss = sum(loss.values())
        share = weight / sum(weights)
        scaler.scale(loss / len(group) if plan["weights"] == "none" else loss * share).backward()
        for name, value in {"loss": loss, **named}.items():
            means[name] = means.get(name, 0.0) + value.item() * share
    finite = True
    if scaler.is_enabled():
        for optimizer in optimizers.values():
            scaler.unscale_(optimizer)
        finite = all(bool(parameter.grad.isfinite().all()) for parameter in parameters if parameter.grad is not None)
    if plan["clip"] != "no":
        norm = nn.utils.clip_grad_norm_(parameters, float(plan["clip"]))
        if norm > float(plan["clip"]):
            happened.add("clipped")
    if finite:
        for optimizer in optimizers.values():
            optimizer.step()
    else:
        happened.add("overflow")
    scaler.update()
    values.append(means)
    return finite


@torch.no_grad()
def evaluated(plan: Plan, model: Net, loss_fn: LossFn) -> dict[str, float]:
    """The metrics of each set, by the names that they have in the log."""
    found: dict[str, float] = {}
    model.eval()
    dtype = DTYPES[plan["precision"]]
    for name, samples in cases.val_sets(plan).items():
        outputs, losses = [], []
        for batch in cases.batches_of(samples, plan["batch size"]):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                if plan["metrics"] == "loss":
                    losses.append((total_loss(loss_fn(model, batch)), own_weight(plan, batch)))
                else:
                    predict = cases.predict_mse if plan["metrics"] == "mse" else cases.predict_classes
                    outputs.append(predict(model, batch))
        if losses:
            measured = {"loss": sum(loss * weight for loss, weight in losses) / sum(weight for _, weight in losses)}
        else:
            measured = cases.measured_by_hand(plan, outputs)
        found |= {f"{name}/{metric}": value for metric, value in measured.items()}
    return found


def total_loss(result: Any) -> float:
    result = result[0] if isinstance(result, tuple) else result
    return float(sum(result.values()) if isinstance(result, dict) else result)


def own_weight(plan: Plan, batch: Any) -> int:
    return cases.weight_of(batch) if plan["weights"] == "samples" else len(cases.pair_of(batch)[1])


def check_log(
    plan: Plan,
    lines: list[dict[str, Any]],
    values: list[dict[str, float]],
    measured: dict[int, dict[str, float]],
    per_epoch: int,
) -> None:
    """Each interval's means, and the metrics of each evaluation, are in the log, once."""
    every = {"iterations": 1, "every 3": 3, "epochs": per_epoch}[plan["log"]]
    points = [*range(every, len(values) + 1, every)]
    points += [len(values)] if not points or points[-1] != len(values) else []
    expected: dict[int, dict[str, float]] = {}
    for first, last in zip([0, *points], points):
        interval = values[first:last]
        expected[last] = {name: sum(row[name] for row in interval) / len(interval) for name in interval[0]}
    for iteration, found in measured.items():
        expected[iteration] = expected.get(iteration, {}) | found
    by_iteration = {line["iteration"]: line for line in lines}
    if len(by_iteration) != len(lines) or sorted(by_iteration) != [line["iteration"] for line in lines]:
        raise Difference(f"metrics.jsonl has iterations {[line['iteration'] for line in lines]}")
    tolerance = 1e-4 if plan["precision"] == "fp32" else 3e-2
    for iteration, row in sorted(expected.items()):
        line = by_iteration.get(iteration)
        if line is None:
            raise Difference(f"metrics.jsonl has no line of iteration {iteration}, but of {sorted(by_iteration)}")
        if line["epoch"] != -(-iteration // per_epoch):
            raise Difference(f"metrics.jsonl: iteration {iteration} is of epoch {line['epoch']}")
        for name, value in row.items():
            if not math.isclose(float(line.get(name, math.nan)), value, rel_tol=tolerance, abs_tol=tolerance):
                raise Difference(
                    f"metrics.jsonl: {name} of iteration {iteration} is {line.get(name)}, expected {value}"
                )
    if more := sorted(by_iteration.keys() - expected.keys()):
        raise Difference(f"metrics.jsonl has lines of iterations {more}")
