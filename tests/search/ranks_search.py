"""The judge of resume on 2 to 4 gloo ranks: stopped on any of them, a run under DDP ends with the whole one's bits.

The programs are those of the judge of resume, of the kinds that DDP can train. All runs of a case are made by the same
ranks, one after another: whole; stopped; and resumed by new objects under other random numbers, in some cases from the
checkpoint before the last, as after a kill.
"""

import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.ranks import agreement
from ignite_engine.states.rank_digests import RankDigests
from tests.ranks.forkserver import PRELOADED
from tests.search import resume_program, resume_search
from tests.search.common import PASSED, REFUSED, Failure, Result, case_seeds
from tests.search.resume_data import CLASSES
from tests.search.resume_plan import CHOICES, LISTS, described, draw, settled
from tests.search.resume_program import Program
from tests.search.resume_search import ANNOUNCED, ANNOUNCED_EQUAL, FAILED, NO_FUNCTION, NOT_STOPPED, TERMINATED

STUCK_S = 60.0
DDP = {
    "default": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
    "find_unused_parameters": {"find_unused_parameters": True},
    "own buffers": {"broadcast_buffers": False},
}
SILENCE = "nothing is said of what trains apart"
WRAPPING = ("all", "nothing", "a part", "bypassed")
"""What DDP holds of what is trained; what it does not, or does not see, each rank trains by itself, and says so."""
"""How a run is refused in which a parameter is unfrozen that DDP does not reduce."""
# what leaves out a part of the model on one rank, or changes each rank's copy in a way of its own, DDP does not train
NOT_UNDER_DDP = {
    "layers": ("layer drop by Python", "noise by NumPy"),
    "handlers": (
        "random numbers",
        "gradient noise",
        "unfreezing by group",
        "callable with a state",
        "terminate_epoch",
    ),
    "ignite": ("LambdaStateScheduler", "EarlyStopping"),
}
UPDATES = ("Update", "own function", "own function, trained apart")
"""What the Trainer calls; the last reduces nothing, which is to be said."""
SHARDED = ("loader in order", "loader shuffled", "DataLoader in order", "DataLoader shuffled", "__getitems__")
FEATURES = tuple(
    f"{name}: {value}"
    for name, values in {"ranks": "234", "ddp": DDP, "update": UPDATES, "wrapping": WRAPPING}.items()
    for value in values
) + tuple(
    f"{name}: {value}"
    for name, values in {**CHOICES, **LISTS}.items()
    for value in values
    if name not in ("workers", "on_exception", "exclude")
    and value not in NOT_UNDER_DDP.get(name, ())
    and (name != "data" or value in SHARDED)
)


def plan_of(seed):
    """The case of a number."""
    plan, draws = draw(seed), random.Random(seed + 1)
    for name in ("workers", "on_exception", "exclude"):
        plan[name] = CHOICES[name][0]
    # most cases have nothing that ranks train apart, of which nothing but a word can be judged
    if draws.random() < 0.8:
        plan["outside"] = "none"
    plan["wrapping"] = "all" if draws.random() < 0.85 else draws.choice(WRAPPING[1:])
    if draws.random() < 0.5:
        plan["handlers"] = [each for each in plan["handlers"] if each != "unfreezing by flag"]
    for name, left_out in NOT_UNDER_DDP.items():
        plan[name] = [each for each in plan[name] if each not in left_out]
    if plan["data"] not in SHARDED:
        plan["data"] = draws.choice(SHARDED)
    plan["ranks"], plan["ddp"] = draws.choice("23344"), draws.choice([*DDP, "default"])
    plan["update"] = UPDATES[max(0, draws.randrange(6) - 3)]
    numbers, world = plan["numbers"], int(plan["ranks"])
    numbers["samples"] = draws.randint(3 * world, 10 * world)
    if any(each in ("batchnorm", "frozen") for each in plan["layers"]) and plan["drop_last"] == "no":
        numbers["samples"] = world * numbers["batch size"] * draws.randint(2, 4)  # a batch of one has no statistics
    plan["stop rank"], plan["rewinds"] = draws.randrange(world), draws.random() < 0.5
    stop = plan["stops"][0]
    stop["how"] = draws.choice(("request_stop", "SIGTERM"))
    stop["event"] = stop["event"] or "ITERATION_COMPLETED"
    return settled(plan)


class OwnFunction:
    """A user's own update, of which the engine knows nothing."""

    def __init__(self, update):
        self.update = update
        self.model, self.optimizers, self.scaler = update.model, update.optimizers, update.scaler
        self.weight_fn = update.weight_fn

    def __call__(self, engine, batch):
        return self.update(engine, batch)


class Partly(nn.Module):
    """A model of which a part is in DDP."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.bias = inner, nn.Parameter(torch.zeros(CLASSES))

    @property
    def module(self):
        return self.inner.module

    def forward(self, inputs, words):
        logits = self.inner(inputs, words) + self.bias
        return logits


class Bypassed(nn.Module):
    """A model in DDP whose forward calls the module inside, so that nothing is reduced."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    @property
    def module(self):
        return self.inner.module

    def forward(self, inputs, words):
        return self.module(inputs, words)


class RankProgram(Program):
    """A case's program on one rank."""

    def end(self):
        found = super().end()
        # rank 0's buffers are saved, and given to the others before the next forward
        return found if agreement.rank() == 0 else {k: v for k, v in found.items() if not k.startswith("model.")}

    def wrapped(self, model):
        wrapping = self.plan.get("wrapping", "all")
        if wrapping == "nothing" or self.plan["update"] == "own function, trained apart":
            return model
        ddp = DistributedDataParallel(model, **DDP[self.plan["ddp"]])
        if wrapping in ("all", "bypassed"):
            return ddp if wrapping == "all" else Bypassed(ddp)
        partly = Partly(ddp)
        made = next(iter(self.made.values())) if isinstance(self.made, dict) else self.made
        made.add_param_group({"params": [partly.bias]})
        return partly

    def called(self, update):
        return update if self.plan["update"] == "Update" else OwnFunction(update)

    def _attach(self):
        update = self.trainer.update
        if isinstance(update, OwnFunction):
            for name, obj, shared in update.update.stateful():
                self.trainer.register(name, obj, shared=shared)
        super()._attach()
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED | Events.COMPLETED, self._note_apart)

    def _note_apart(self, trainer):
        """It is known from the first update on."""
        for reason in trainer.reproducibility():
            if "each rank" in reason or "the ranks have" in reason:
                self.journal.note(f"announced {reason}")

    def _stop_if_due(self, trainer, stop):
        if self.plan.get("votes at once") and trainer.state.iteration == stop["at"]:
            trainer.vote_at_next_boundary()  # a run that is over within 0.25 s is at its end by the next vote
        if agreement.rank() == self.plan["stop rank"]:
            super()._stop_if_due(trainer, stop)


def run(seed, cases, minutes):
    """Judge the cases ``seed``, ``seed + 1``, ..., one at a time; each failure is printed as it is found."""
    count = cases if cases is not None else round(120 * (minutes or 0))
    return judged({number: plan_of(number) for number in case_seeds(seed, count, None)}, minutes)


def judged(plans, minutes=None):
    """Judge the plans, by their numbers; for so many minutes at most, the same for each number of ranks."""
    result, started = Result("ranks", min(plans), FEATURES), time.monotonic()
    for index, world in enumerate((2, 3, 4)):
        left = [(number, plan) for number, plan in plans.items() if plan["ranks"] == str(world)]
        now = time.monotonic()
        until = None if minutes is None else now + (started + 60.0 * minutes - now) / (3 - index)
        while left and (until is None or time.monotonic() < until):
            del left[: _on_ranks(world, left, until, result)]
    result.seconds = time.monotonic() - started
    return result


def _on_ranks(world, plans, until, result):
    """Judge cases on ``world`` ranks until one is stuck or ends them; how many were judged."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        ranks = [
            context.Process(target=_rank, args=(rank, world, plans, until, folder), daemon=True)
            for rank in range(world)
        ]
        os.environ["OMP_NUM_THREADS"] = "1"
        for each in ranks:
            each.start()
        path, done, heard = Path(folder) / "verdicts.jsonl", 0, time.monotonic()
        try:
            while True:
                alive = [each.is_alive() for each in ranks]
                lines = path.read_text().splitlines() if path.exists() else []
                for line in lines[done:]:
                    _count(result, *plans[done], json.loads(line))
                    done, heard = done + 1, time.monotonic()
                if not any(alive) and all(each.exitcode == 0 for each in ranks):
                    return len(plans)
                if (not all(alive) and any(each.exitcode for each in ranks)) or time.monotonic() - heard > STUCK_S:
                    reasons = [error.read_text() for error in sorted(Path(folder).glob("*/*/error.txt"))]
                    what = "; ".join(reasons) or f"stuck for {STUCK_S:.0f} s"
                    _count(result, *plans[done], {"outcome": FAILED, "reason": what})
                    return done + 1
                time.sleep(0.1)
        finally:
            for each in ranks:
                each.kill()
                each.join()


def _count(result, number, plan, verdict):
    if verdict["outcome"] == FAILED:
        result.failures.append(Failure("ranks", number, f"{plan['ranks']} ranks, {verdict['reason']}"))
        print(result.failures[-1], flush=True)
        return
    result.outcomes[verdict["outcome"]] += 1
    if verdict["reason"]:
        result.reasons[f"{verdict['outcome']}: {verdict['reason']}"] += 1
    drawn = {f"{name}: {plan[name]}" for name in ("ranks", "ddp", "update", "wrapping", *CHOICES)}
    drawn |= {f"{name}: {value}" for name in LISTS for value in plan[name]}
    result.exercised.update(drawn & set(FEATURES))


def _rank(rank, world, plans, until, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for number, plan in plans:
        if agreement.broadcast_int(int(until is not None and time.monotonic() > until)):
            break
        with silenced() if plan.get("planted") == SILENCE else contextlib.nullcontext():
            verdict = _judge(plan, Path(folder) / str(number))
        if rank == 0:
            shutil.rmtree(Path(folder) / str(number))
            with (Path(folder) / "verdicts.jsonl").open("a") as file:
                file.write(json.dumps(verdict) + "\n")
    agreement.forget_groups()
    dist.destroy_process_group()


@contextlib.contextmanager
def silenced():
    """A planted mistake: nobody looks for what each rank trains by itself."""
    with patch.object(RankDigests, "_compare", lambda self, engine: None):
        yield


def show(seed):
    """A case in words."""
    plan = plan_of(seed)
    rewinds = "from the checkpoint before the last, " if plan["rewinds"] else ""
    ranks = f"{plan['ranks']} ranks, ddp={plan['ddp']}, update={plan['update']}, wrapped={plan['wrapping']}"
    return f"{ranks}, stop on rank {plan['stop rank']}, {rewinds}{described(plan)}"


def _judge(plan, folder):
    """What came of a case, on rank 0; a collective."""
    whole, case = folder / "whole", folder / "case"
    codes = _all(plan, whole, "whole", None)
    if any(codes):
        refused = codes[0] == 3 and len(set(codes)) == 1
        return {"outcome": REFUSED if refused else FAILED, "reason": _errors(whole)}
    total = max(
        (int(key.split()[1]) for key in resume_search._lines(whole / "rank_0") if key.startswith("iteration")),
        default=0,
    )
    stop = {**plan["stops"][0], "at": max(1, 1 + int(plan["stops"][0]["after"] * (total - 1)))}
    if any(_all(plan, case, "stopped", stop)):
        return {"outcome": FAILED, "reason": _errors(case)}
    stopped = agreement.broadcast_int(int(not resume_search._ended(case / "rank_0", "stopped")))
    agreement.on_rank_0(lambda: _rewind(case) if plan["rewinds"] and stopped else None)
    failed = any(_all(plan, case, "resumed", None))
    terminated = agreement.broadcast_int(int(_was_terminated(plan, whole, case, total)))
    if failed:
        return {"outcome": TERMINATED if terminated else FAILED, "reason": "" if terminated else _errors(case)}
    own = _difference(whole, case)
    differences = [each for each in agreement.gather_objects(own) if each is not None]
    announced = agreement.on_rank_0(lambda: resume_search._notes(case / "rank_0", "stopped", "announced "))
    if not differences:
        return {"outcome": ANNOUNCED_EQUAL if announced else PASSED if stopped else NOT_STOPPED, "reason": ""}
    if terminated:
        return {"outcome": TERMINATED, "reason": ""}
    if announced:
        return {"outcome": ANNOUNCED, "reason": ""}
    again = folder / "again"
    _all(plan, again, "whole", None)
    unsure = any(agreement.gather_objects(_difference(whole, again, role="whole")))
    unsure = unsure or resume_search.differs_from_itself(plan)
    return {"outcome": NO_FUNCTION if unsure else FAILED, "reason": differences[0]}


def _was_terminated(plan, whole, case, total):
    """Whether the case was resumed after a ``terminate()`` that ended the whole run.

    Ranks learn of it some iterations after TerminateOnNan has called it, at the first value that is not finite.
    """
    if "TerminateOnNan" in plan["ignite"]:
        lines = [line for path in whole.glob("rank_*/lines.txt") for line in path.read_text().splitlines()]
        called = [int(line.split()[1]) for line in lines if re.search(r"^iteration .* -?(nan|inf) ", line)]
        total = min([*called, total])
    return resume_search._resumed_after_terminate(whole / "rank_0", case / "rank_0", total)


def _all(plan, folder, role, stop):
    """Run the program on all ranks; each one's code."""
    rank = agreement.rank()
    own = folder / f"rank_{rank}"
    own.mkdir(parents=True, exist_ok=True)
    agreement.wait_for_all()
    return agreement.gather_objects(resume_program.run(plan, str(folder), role, stop, RankProgram, own))


def _difference(whole, case, role="resumed"):
    own = f"rank_{agreement.rank()}"
    expected = resume_search._lines(whole / own)
    found = resume_search._difference(whole / own, case / own, expected, role=role)
    if found is None and agreement.rank() == 0 and role == "resumed":
        logs = [resume_search._log(folder) for folder in (whole, case)]
        pairs = zip([*logs[0], "nothing"], [*logs[1], "nothing"], strict=False)
        found = next((f"metrics.jsonl: expected {one}, found {other}" for one, other in pairs if one != other), None)
    return found if found is None else f"{own}: {found}"


def _errors(folder):
    found = agreement.gather_objects(resume_search._error(folder / f"rank_{agreement.rank()}"))
    return "; ".join(dict.fromkeys(each for each in found if each))


def _rewind(folder):
    for directory in folder.glob("checkpoints*"):
        known = CheckpointStore(directory).checkpoints()
        if len(known) > 1:
            shutil.rmtree(known[-1].path)
