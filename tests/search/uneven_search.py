"""The judge of ``uneven``: a random run on 2 to 4 gloo ranks, compared with one process, and with itself when resumed.

Judged are: no rank waits for ever; each sample of an epoch is trained on once, on any kind of data; the weights are
those of one process that sees the micro-batches of all ranks, to 1e-6; a run that is stopped and resumed ends with the
same bits on as many ranks, and has seen each sample once on others, in as many updates where the global batch is the
same.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import queue
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import Tensor, nn

from ignite_engine import Trainer, Update
from ignite_engine.data.lookahead import LookAhead
from ignite_engine.handlers import Checkpoint
from ignite_engine.ranks import agreement
from tests.ranks.forkserver import PRELOADED
from tests.search.common import PASSED, Failure, Result, case_seeds
from tests.search.uneven_cases import FEATURES, SHARED, Case, data_of, draw

_LIMIT_S = 60.0
"""After which a rank that gives no answer waits for ever."""


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    ids, inputs = batch
    return (model(inputs).squeeze(1) - ids.remainder(5) / 5).square().mean()


def weight_of(batch: Any) -> float:
    return float(len(batch[0]) + int(batch[0][0]) % 3)


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(5)
    inner: list[nn.Module] = [nn.LayerNorm(8), nn.Tanh()]
    if case.model != "linear":
        # its statistics are of two values for each sample: one sample is enough
        inner = [nn.Unflatten(1, (4, 2)), nn.BatchNorm1d(4), nn.Flatten(), nn.Tanh(), nn.Dropout(0.3)]
    return nn.Sequential(nn.Linear(3, 8), *inner, nn.Linear(8, 1))


def train(case: Case, rank: int, ranks: int, folder: str, batch_size: int, stop_at: int | None) -> dict[str, Any]:
    """What one rank has seen: for each update its epoch, and for each of its micro-batches the samples."""
    model = model_of(case)
    wrapped: nn.Module = model
    if ranks > 1:
        # else DDP arranges its buckets anew after its first step, and the sums of three ranks and more are rounded anew
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=ranks > 2)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    update = Update(wrapped, optimizer, loss_fn, weight_fn=weight_of if case.weighted else None)
    torch.manual_seed(100 + rank)
    trainer, seen = Trainer(update, case.accumulation), list[Any]()
    checkpoint = Checkpoint(f"{folder}/checkpoints")
    checkpoint.attach(trainer)
    checkpoint.resume()

    @trainer.on(Events.ITERATION_COMPLETED)
    def note() -> None:
        state = trainer.state
        group = state.batch if case.accumulation is not None else [state.batch]
        real = group[: len(group) - state.padding]
        seen.append((state.iteration, state.epoch, [(ids.tolist(), inputs) for ids, inputs in real]))
        if state.iteration == stop_at:
            trainer.request_stop("here")
            trainer.vote_at_next_boundary()

    state = trainer.run(data_of(case, rank, batch_size), max_epochs=case.epochs)
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    return {
        "seen": seen,
        "tensors": tensors,
        "status": state.status,
        "iteration": state.iteration,
        "rng": torch.get_rng_state(),
        "report": trainer.reproducibility(),
    }


def _work(place: int, tasks: Any, results: Any) -> None:
    """One process of the pool: takes part in each case that has a rank for it."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    while (task := tasks.get()) is not None:
        plant, case, ranks, folder, name, batch_size, stop_at = task
        taken_back = PLANTS[plant]() if plant else None
        try:
            if ranks > 1:
                store = f"file://{folder}_{name}"
                limit = timedelta(seconds=_LIMIT_S / 2)
                dist.init_process_group("gloo", init_method=store, rank=place, world_size=ranks, timeout=limit)
            outcome: Any = train(case, place, ranks, folder, batch_size, stop_at)
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        finally:
            if taken_back is not None:
                taken_back()
            agreement.forget_groups()
            if dist.is_initialized():
                dist.destroy_process_group()
        results.put((place, outcome))


def _each_for_itself() -> Callable[[], None]:
    """A defect: a rank takes it that its peers have as many batches."""

    def alone(self: LookAhead) -> Any:
        group = agreed(self)
        self.total = (len(group) - self.padding) * agreement.world_size()
        return group

    agreed, LookAhead._agreed = LookAhead._agreed, alone  # type: ignore[method-assign]
    return lambda: setattr(LookAhead, "_agreed", agreed)


def _keeps_what_is_ahead() -> Callable[[], None]:
    """A defect: what was fetched ahead counts as consumed."""
    before = LookAhead.before
    LookAhead.before = property(lambda self: None)  # type: ignore[method-assign, assignment]
    return lambda: setattr(LookAhead, "before", before)


PLANTS = {"each for itself": _each_for_itself, "ahead is consumed": _keeps_what_is_ahead}


class Pool:
    """Four processes that are the ranks of one run after the other.

    ``plant`` names a defect that they have from then on.
    """

    plant: str | None = None

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.results: Any = context.Queue()
        self.tasks: list[Any] = [context.Queue() for _ in range(4)]
        self.processes = [
            context.Process(target=_work, args=(place, self.tasks[place], self.results)) for place in range(4)
        ]
        for process in self.processes:
            process.start()

    def run(self, case: Case, ranks: int, folder: str, name: str, size: int, stop_at: int | None = None) -> list[Any]:
        """What each rank reports: a dict, or the line of its error."""
        for place in range(ranks):
            self.tasks[place].put((self.plant, case, ranks, folder, name, size, stop_at))
        outcomes: list[Any] = ["no answer: it waits for ever"] * ranks
        with contextlib.suppress(queue.Empty):
            for _ in range(ranks):
                place, outcome = self.results.get(timeout=_LIMIT_S)
                outcomes[place] = outcome
        return outcomes

    def close(self) -> None:
        for tasks in self.tasks:
            tasks.put(None)
        for process in self.processes:
            process.join(10)
            process.kill()


@contextlib.contextmanager
def pool() -> Iterator[Pool]:
    made = Pool()
    try:
        yield made
    finally:
        made.close()


def run(seed: int, cases: int | None, minutes: float | None) -> Result:
    """Judge the cases ``seed``, ``seed + 1``, ...; each failure is printed as it is found."""
    result, started = Result("uneven", seed, FEATURES), time.monotonic()
    with pool() as processes:
        for number in case_seeds(seed, cases, minutes):
            reason, happened = judge(draw(number), processes)
            if reason is None:
                result.outcomes[PASSED] += 1
                result.exercised.update(happened)
                continue
            result.failures.append(Failure("uneven", number, reason))
            print(result.failures[-1], flush=True)
            if "waits" in reason:
                break  # its processes are lost
    result.seconds = time.monotonic() - started
    return result


def show(number: int) -> str:
    """The case of a number."""
    return str(draw(number))


def judge(case: Case, processes: Pool) -> tuple[str | None, set[str]]:
    """What is wrong first, and what took part."""
    values = {
        "data": case.data,
        "accumulation": case.accumulation,
        "weighted": case.weighted,
        "shuffle": case.shuffle,
        "epochs": case.epochs,
        "model": case.model,
        "after the stop": case.after,
    }
    happened = {f"{name}: {value}" for name, value in values.items()}
    folder = tempfile.mkdtemp()
    try:
        whole = processes.run(case, case.ranks, f"{folder}/whole", "store_whole", case.batch_size)
        if (wrong := _wrong(case, whole)) is not None:
            return wrong, happened
        happened |= _happened(case, whole)
        stop_at = int(case.stop_at * whole[0]["iteration"])
        if not 1 <= stop_at < whole[0]["iteration"]:
            return None, happened
        happened.add("happened: stopped")
        first = processes.run(case, case.ranks, f"{folder}/parts", "store_1", case.batch_size, stop_at)
        if any(isinstance(each, str) for each in first):
            return f"stopped at {stop_at}: {first}", happened
        stopped = {(each["status"], each["iteration"]) for each in first}
        if stopped != {("interrupted", stop_at)}:
            return f"stopped at {stop_at}: the ranks ended as {stopped}", happened
        if len({bool(each["seen"][-1][2]) for each in first}) > 1:
            happened.add("happened: stopped while a rank was exhausted")
        rest = processes.run(case, case.ranks_after, f"{folder}/parts", "store_2", case.batch_size_after)
        if any(isinstance(each, str) for each in rest):
            return f"resumed from {stop_at}: {rest}", happened
        if case.ranks_after != case.ranks:
            happened.add("happened: elastic")
            return _elastic(case, whole, first, rest), happened
        return _same(case, stop_at, whole, rest), happened
    finally:
        shutil.rmtree(folder)


def _happened(case: Case, whole: list[Any]) -> set[str]:
    counts = [sum(len(batches) for _, _, batches in each["seen"]) for each in whole]
    found = set()
    if len(set(counts)) > 1:
        found.add("happened: uneven")
    if 0 in counts:
        found.add("happened: a rank without a batch")
    return found


def samples_of(reports: list[Any]) -> Counter[tuple[int, int]]:
    """How often each sample was seen in each epoch."""
    return Counter(
        (epoch, index) for each in reports for _, epoch, batches in each["seen"] for ids, _ in batches for index in ids
    )


def expected(case: Case) -> Counter[tuple[int, int]]:
    """Each sample once in each epoch."""
    if case.data in SHARED:
        ids = list(range(case.samples))
    else:
        ids = []
        for rank, batches in enumerate(case.batches):
            count = batches * case.batch_size
            if case.data != "own state" and case.batch_size > 1:
                count -= 1
            ids += range(1000 * rank, 1000 * rank + count)
    return Counter((epoch, index) for epoch in range(1, case.epochs + 1) for index in ids)


def _wrong(case: Case, whole: list[Any]) -> str | None:
    """What is wrong with the uninterrupted run."""
    if any(isinstance(each, str) for each in whole):
        return f"the whole run: {whole}"
    if (seen := samples_of(whole)) != expected(case):
        return f"lost {sorted(expected(case) - seen)}, too often {sorted(seen - expected(case))}"
    parameters = dict(model_of(case).named_parameters())
    for each in whole[1:]:
        for name, value in whole[0]["tensors"].items():
            if name in parameters and not torch.equal(value, each["tensors"][name]):
                return f"{name} differs between ranks"
    return _far_from_one_process(case, whole) if case.model == "linear" else None


def _far_from_one_process(case: Case, whole: list[Any]) -> str | None:
    """A loop written by hand over the micro-batches of all ranks."""
    model = model_of(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(whole[0]["iteration"]):
        group = [(torch.tensor(ids), inputs) for each in whole for ids, inputs in each["seen"][step][2]]
        weights = [weight_of(batch) if case.weighted else 1.0 for batch in group]
        optimizer.zero_grad()
        for batch, weight in zip(group, weights, strict=True):
            (loss_fn(model, batch) * (weight / sum(weights))).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        distance = float((value - whole[0]["tensors"][name]).abs().max())
        if distance > 1e-6:
            return f"{name} is {distance:.1e} from that of one process"
    return None


def _same(case: Case, stop_at: int, whole: list[Any], rest: list[Any]) -> str | None:
    """What differs between the end of the whole run and of the resumed one."""
    if any("asks workers again" in reason for each in rest for reason in each["report"]):
        return None  # announced: samples may come twice
    parameters = dict(model_of(case).named_parameters())
    for rank, (one, other) in enumerate(zip(whole, rest, strict=True)):
        seen = [(epoch, [ids for ids, _ in batches]) for _, epoch, batches in one["seen"][stop_at:]]
        again = [(epoch, [ids for ids, _ in batches]) for _, epoch, batches in other["seen"]]
        if seen != again:
            return f"resumed from {stop_at}, rank {rank} saw {again}, not {seen}"
        for name, value in one["tensors"].items():
            # DDP lets each forward begin with the buffers of rank 0
            if (rank == 0 or name in parameters) and not torch.equal(value, other["tensors"][name]):
                return f"resumed from {stop_at}, {name} of rank {rank} differs"
        if not torch.equal(one["rng"], other["rng"]):
            return f"resumed from {stop_at}, the random numbers of rank {rank} differ"
    return None


def _elastic(case: Case, whole: list[Any], first: list[Any], rest: list[Any]) -> str | None:
    """What is wrong with a run that was resumed on another number of ranks."""
    seen = samples_of(first + rest)
    if seen != expected(case):
        return f"on other ranks: lost {sorted(expected(case) - seen)}, too often {sorted(seen - expected(case))}"
    same_global_batch = case.ranks * case.batch_size == case.ranks_after * case.batch_size_after
    if same_global_batch and rest[0]["iteration"] != whole[0]["iteration"]:
        return f"on other ranks: {rest[0]['iteration']} updates, not {whole[0]['iteration']}"
    return None
