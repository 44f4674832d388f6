"""Runs on several gloo ranks, compared with whole ones, with one process, and with themselves on other ranks.

Judged are: no rank waits for ever; each sample of an epoch is trained on once; a run that is broken off and resumed has
the bits of the whole one on as many ranks; on other ranks each sample still comes once, in as many updates where the
global batch is the same; a rank-invariant run has the bits of one process on any ranks; the weights are those of a loop
by hand over the micro-batches of all ranks, to rounding.
"""

import gc
import math
import shutil
import signal
import tempfile
from pathlib import Path

import torch

from tests.kit.processes import ChildFailed, ranks, start_ranks
from tests.kit.resume import leaves, same_bits, saved_in
from tests.property.case import EACH_ITS_OWN, SHARED
from tests.property.judging import quiet
from tests.property.models import LossFn, Net, optimizers_of, samples_of, weight_fn_of
from tests.property.program import Run, notes_of
from tests.property.resuming import ROOM, _log, difference, lines_of, named, not_once

TOLERANCE = 2e-5
"""Of weights against the loop by hand, which sums in another order."""


def on_ranks(case):
    folder = Path(tempfile.mkdtemp(prefix="ranks_", dir=ROOM))
    try:
        return _judge(case, folder)
    except ChildFailed as failed:
        return f"{str(failed)[-1500:]}", set()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _judge(case, folder):
    killed, elastic = any(stop.how == "SIGKILL" for stop in case.stops), case.ranks_after not in (0, case.ranks)
    happened = {f"ranks: {case.ranks}", *(f"broken off by {stop.how}" for stop in case.stops)}
    if not killed and not elastic:
        answers = ranks(case.ranks, _all_of_it, case, folder)
    else:
        answers = ranks(case.ranks, _whole, case, folder)
    if refused := next((each["refused"] for each in answers if "refused" in each), None):
        wrong = None if all("refused" in each for each in answers) else f"one rank alone refused: {refused}"
        return wrong, {f"refused: {refused}"}
    first, *others = [each["weights"] for each in answers]
    said = any(each["apart"] for each in answers)
    if not said and not all(same_bits(*pair) for other in others for pair in zip(first, other, strict=True)):
        return "the weights differ between ranks", happened
    if wrong := _wrong_whole(case, folder / "whole", answers[0]["reason"]):
        return wrong, happened
    total, reason = answers[0]["total"], answers[0]["reason"]
    at = max(1, math.ceil(case.stops[0].after * total)) if case.stops else total
    if killed:
        if wrong := _kill(case, folder / "case", at):
            return wrong, happened
    elif elastic and case.stops:
        answers = ranks(case.ranks, _broken_off, case, folder, at)
    if elastic:
        again = case.but(ranks=case.ranks_after)
        answers = ranks(case.ranks_after, _resumed, again, folder, *_batch_size_after(case))
        if reason != "max_epochs":  # nothing is promised of where it would end on others
            return None, happened
        return _wrong_on_others(case, folder, answers, total), happened | {"other ranks"}
    if killed:
        answers = ranks(case.ranks, _resumed, case, folder, case.batch_size, True)
    wrong = next((f"rank {rank}: {each['wrong']}" for rank, each in enumerate(answers) if each["wrong"]), None)
    if wrong is not None and any(each["announced"] for each in answers):
        return None, happened | {"announced, other bits"}
    return wrong, happened


# what a rank does


def _whole(rank, case, folder):
    with quiet():
        try:
            run = Run(case, folder / "whole", whole=True, rank=rank)
            run.train()
        except Exception as error:
            if lines_of(folder / "whole", rank):
                raise
            return {"refused": named(error)}
    state = run.trainer.state
    weights = [each.detach() for each in run.model.parameters()]
    announced = _announced(folder / "whole", rank)
    return {"total": state.iteration, "reason": state.reason, "weights": weights, "apart": announced, "wrong": None}


def _broken_off(rank, case, folder, at):
    with quiet():
        run = Run(case, folder / "case", rank=rank)
        try:
            run.train(case.stops[0], at)
        except SystemExit as left:
            assert left.code == 128 + signal.SIGTERM, left.code
        del run
        gc.collect()  # it holds its log, which other processes are to write


def _resumed(rank, case, folder, batch_size, compare=False):
    with quiet():
        whole = Run(case, folder / "again", whole=True, rank=rank) if compare else None
        if compare:
            whole.train()
        run = Run(case, folder / "case", rank=rank, batch_size=batch_size)
        run.train()
        wrong = difference(case, whole, run, rank) if compare else None
        return {
            "iteration": run.trainer.state.iteration,
            "wrong": wrong,
            "announced": _announced(folder / "case", rank),
        }


def _all_of_it(rank, case, folder):
    """Whole, broken off and resumed, by the same ranks."""
    with quiet():
        try:
            whole = Run(case, folder / "whole", whole=True, rank=rank)
            whole.train()
        except Exception as error:
            if lines_of(folder / "whole", rank):
                raise
            return {"refused": named(error)}
        state = whole.trainer.state
        if case.stops:
            _broken_off(rank, case, folder, max(1, math.ceil(case.stops[0].after * state.iteration)))
        run = Run(case, folder / "case", rank=rank)
        run.train()
        torch.distributed.barrier()  # rank 0 has written what all compare
        return {
            "total": state.iteration,
            "reason": state.reason,
            "weights": [each.detach() for each in whole.model.parameters()],
            "apart": _announced(folder / "whole", rank),
            "wrong": difference(case, whole, run, rank),
            "announced": _announced(folder / "case", rank),
        }


def _announced(folder, rank):
    return (notes_of(folder) / f"announced_{rank}.txt").exists()


def _kill(case, folder, at):
    """One rank is killed there, and the others with it, as a cluster does."""

    def until_killed(rank):
        with quiet():
            Run(case, folder, rank=rank).train(case.stops[0], at)

    world = start_ranks(case.ranks, until_killed)
    world[case.stops[0].rank].poll(30)
    for each in world:
        each.signal(signal.SIGKILL)
    codes = [each.poll(30) for each in world]
    struck = (notes_of(folder) / f"stopped_{case.stops[0].rank}.txt").exists()
    return None if not struck or codes[case.stops[0].rank] == -signal.SIGKILL else f"killed it ended with {codes}"


def _batch_size_after(case):
    """The same global batch where that can be; a rank-invariant run keeps the size of its micro-batches."""
    total = case.ranks * case.batch_size
    keeps = case.rank_invariant or case.global_micro_batches or total % case.ranks_after
    return (case.batch_size if keeps else total // case.ranks_after,)


# what is judged of it


def _wrong_whole(case, folder, reason):
    if case.data in SHARED or case.data.startswith("windows"):
        if wrong := not_once(case, [folder], reason, case.ranks):
            return wrong
    elif case.batches and reason == "max_epochs" and not case.drop_last:
        counts = [each * case.batch_size - (case.batch_size > 1 and each > 0) for each in case.batches[: case.ranks]]
        every = [1000 * rank + at for rank, count in enumerate(counts) for at in range(count)]
        if wrong := not_once(case, [folder], reason, case.ranks, every):
            return wrong
    return _far_from_one_process(case, folder) if case.one_process else None


def _far_from_one_process(case, folder):
    """A loop written by hand over the micro-batches of all ranks."""
    torch.manual_seed(case.seed)
    model, loss_fn, weight_fn = Net(case), LossFn(case), weight_fn_of(case) or (lambda batch: 1.0)
    optimizers = optimizers_of(case, model, loss_fn)
    of_ranks = [
        [eval(ids) for _, ids, _ in (line.split("\t") for line in lines_of(folder, rank)) if ids]
        for rank in range(case.ranks)
    ]
    for groups in zip(*of_ranks, strict=True):
        group = [_batch(case, ids) for own in groups for ids in own]
        weights = [float(weight_fn(batch)) for batch in group]
        if not sum(weights):
            continue
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        for batch, weight in zip(group, weights, strict=True):
            if weight:
                result = loss_fn(model, batch)
                loss = result[0] if isinstance(result, tuple) else result
                (loss * (weight / sum(weights))).backward()
        if case.clip is not None:
            trained = [each for one in optimizers.values() for group in one.param_groups for each in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, case.clip)
        for optimizer in optimizers.values():
            optimizer.step()
    saved = saved_in(folder / "checkpoints")["model"]
    for name, value in model.named_parameters():
        distance = float((value.detach() - saved[name]).abs().max())
        if not distance <= TOLERANCE * max(1.0, float(value.detach().abs().max())):
            return f"{name} is {distance:.1e} from that of one process"
    return None


def _batch(case, ids):
    first = 1000 * (ids[0] // 1000) if case.data in EACH_ITS_OWN else 0
    if case.data.startswith("windows"):
        count = sum(case.windows)
    elif case.data in EACH_ITS_OWN and case.batches:
        count = case.batches[first // 1000] * case.batch_size - (case.batch_size > 1)
    else:
        count = case.samples
    columns = samples_of(count, first)
    return [column[torch.tensor(ids) - first] for column in columns]


def _wrong_on_others(case, folder, answers, total):
    """What is wrong with a run that went on with another number of ranks."""
    most = max(case.ranks, case.ranks_after)
    wrong = not_once(case, [folder / "case"], "max_epochs", most)
    if wrong is not None and not any(stop.how == "SIGKILL" for stop in case.stops):  # it repeats what was not saved
        return f"on other ranks {wrong}"
    same_batch = case.ranks * case.batch_size == case.ranks_after * _batch_size_after(case)[0]
    same_batch = same_batch and case.data != "windows"  # which are opened with the same on any number of ranks
    iteration = answers[0]["iteration"]
    if (same_batch or case.global_micro_batches) and iteration != total:
        return f"on other ranks it made {iteration} updates, not {total}"
    if not case.rank_invariant:
        return None
    if (one := _log(folder / "whole")) != (other := _log(folder / "case")):
        return f"on other ranks the log is {other}, not {one}"
    one, other = (dict(leaves(saved_in(folder / name / "checkpoints"))) for name in ("whole", "case"))
    parts = ("model", "optimizer", "ema", "optimizers")
    differ = [path for path in one if path[0] in parts and not same_bits(one[path], other.get(path))]
    return f"on other ranks there differ {differ[:3]}" if differ else None
