"""What training on a GPU costs, and whether it is exact there: one command, under 8 minutes on one H100 or H200.

    python -m benchmarks.gpu [--sections overhead,gpt] [--rounds N] [--json PATH] [--cpu]

Each section is a process of its own; one that fails is in the table, and the exit code is 1. ``--cpu``, which is meant
where there is no CUDA device, runs all of it in a reduced form in under a minute: a check of the program and no
measurement. See ``benchmarks/README.md`` for the sections.

It needs no network and no installation of this package: run it in the repository's root. What the machine's Python
lacks of ``install_requires`` and of pytest can be brought as wheels in a folder ``wheels``:

    python -m pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=site python -m benchmarks.gpu --json gpu.json
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.contenders import CONTENDERS
from benchmarks.gpt import GPT, Shape, flops_per_token, parameters_of
from benchmarks.machine import machine
from benchmarks.ratios import ratio_of_medians
from benchmarks.workload import CLIP_NORM, LOG_EVERY, Workload, build, weights_digest
from ignite_engine import Trainer, Update, loader
from ignite_engine.handlers import Checkpoint, LRSchedule, MetricLogger, warmup_cosine

ROOT = Path(__file__).resolve().parents[1]
WARMUP_ROUNDS = 2
ACCUMULATION = 8
H100_FLOPS = 989.5e12  # dense bf16 of an H100 or H200 SXM, by its data sheet
SECTION_LIMIT_S = 150
STEADY = 10  # iterations in which waits are counted


@dataclass(frozen=True)
class Size:
    """How much is done: on a GPU, or on a CPU to see that it runs."""

    rounds: int = 15
    shape: Shape = field(default_factory=Shape)
    micro_batch: int = 8  # windows of a context
    updates: int = 2  # of the GPT in a round
    perceptron_batches: int = 10 * LOG_EVERY  # in a round
    copied: tuple[int, int] = (4096, 4096)  # a batch of the copy section: 64 MiB
    saves: int = 4
    save_every: int = 12  # iterations, in which a save in the background ends


REDUCED = Size(2, Shape(2, 2, 32, 32, 256), 2, 1, LOG_EVERY, (64, 64), 2, 4)
Row = dict[str, Any]
"""``what`` and ``value`` in words, ``ok`` where it can be right or wrong, and figures."""


class Here:
    """The device, and the amount of work."""

    def __init__(self, cpu: bool, rounds: int | None) -> None:
        self.size = REDUCED if cpu else Size()
        self.rounds = rounds or self.size.rounds
        self.device = torch.device("cpu" if cpu else "cuda")

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, contenders: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
        """Seconds of each round; contenders take turns in an order drawn for each round, after two uncounted ones."""
        times: dict[str, list[float]] = {name: [] for name in contenders}
        order = random.Random(0)
        for _ in range(WARMUP_ROUNDS + self.rounds):
            for name in order.sample(list(contenders), len(contenders)):
                gc.collect()
                self.wait()
                since = time.perf_counter()
                contenders[name]()
                self.wait()
                times[name].append(time.perf_counter() - since)
        return {name: each[WARMUP_ROUNDS:] for name, each in times.items()}

    def peak_mib(self, work: Callable[[], None]) -> float | None:
        """Largest memory that tensors take in ``work``; None on a CPU."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() / 2**20 if self.device.type == "cuda" else None


def compared(times: dict[str, list[float]], baseline: str, unit: str, per_round: float) -> list[Row]:
    """A row for each contender: the median of ``1 / per_round`` of a round, and its ratio to the baseline."""
    rows = []
    for name, seconds in times.items():
        ratio, each = ratio_of_medians(seconds, times[baseline]), median(seconds) / per_round
        rows.append({"what": name, "value": f"{1e6 * each:,.1f} us {unit}, {ratio} of {baseline}", "seconds": seconds})
    return rows


# -- overhead ---------------------------------------------------------------------------------------------------------


def overhead(here: Here) -> list[Row]:
    """The tiny perceptron of benchmarks.overhead, whose time is that of the loop and of starting kernels."""
    bare = CONTENDERS["bare"]
    names = ["plain", "ignite", "supervised", "ours", "ours+10"]
    train = {name: bare[name] for name in names}
    if importlib.util.find_spec("accelerate") is not None:
        train["accelerate"] = _accelerate
    works = {name: _on_device(build(here.size.perceptron_batches, 1), here.device) for name in train}
    times = here.timed({name: lambda name=name: train[name](works[name]) for name in train})  # type: ignore[misc]
    rows = compared(times, "plain", "a step", here.size.perceptron_batches)
    digests = {weights_digest(work.model.cpu()) for work in works.values()}
    return [*rows, {"what": "all have the same weights", "value": str(len(digests) == 1), "ok": len(digests) == 1}]


def _on_device(work: Workload, device: torch.device) -> Workload:
    work.model.to(device)
    batches = {id(batch): (batch[0].to(device), batch[1].to(device)) for batch in work.batches.batches}
    work.batches.batches = [batches[id(batch)] for batch in work.batches.batches]
    return work


def _accelerate(work: Workload) -> None:
    accelerator = importlib.import_module("accelerate").Accelerator(
        cpu=next(work.model.parameters()).device.type == "cpu"
    )
    model, optimizer = accelerator.prepare(work.model, work.optimizer)
    model.train()
    for inputs, targets in work.batches:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()


# -- a GPT ------------------------------------------------------------------------------------------------------------

Batch = tuple[Tensor, Tensor]


def gpt_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of the tokens."""
    loss: Tensor = model(*batch)
    return loss


def gpt_parts(here: Here, dropout: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model at each call, and AdamW."""
    torch.manual_seed(0)
    model = GPT(here.size.shape, dropout).to(here.device)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def gpt_batches(here: Here, count: int) -> list[Batch]:
    """``count`` micro-batches of random tokens on the host, pinned for a GPU."""
    size, generator = here.size, torch.Generator().manual_seed(1)
    tokens = [
        torch.randint(size.shape.vocabulary, (size.micro_batch, size.shape.context + 1), generator=generator)
        for _ in range(count)
    ]
    pairs = [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]
    return [(a.pin_memory(), b.pin_memory()) for a, b in pairs] if here.device.type == "cuda" else pairs


def plain_loop(here: Here, batches: Sequence[Any], loss_fn: Any, model: nn.Module, optimizer: Any) -> None:
    """The usual loop in bf16 with accumulation and clipping."""
    model.train()
    for index, batch in enumerate(batches):
        batch = tuple(each.to(here.device, non_blocking=True) for each in batch)
        with torch.autocast(here.device.type, dtype=torch.bfloat16):
            loss = loss_fn(model, batch)
        (loss / ACCUMULATION).backward()
        if (index + 1) % ACCUMULATION == 0:
            clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()


def trainer_of(
    model: nn.Module, optimizer: Any, loss_fn: Any, precision: str = "bf16", accumulation: int = ACCUMULATION
) -> Trainer:
    """Ours of the same work."""
    return Trainer(Update(model, optimizer, loss_fn, precision=precision, clip_norm=CLIP_NORM), accumulation)


def one_more_epoch(trainer: Trainer, batches: Any) -> None:
    """Continue for one pass."""
    trainer.run(batches, max_epochs=trainer.state.epoch + 1)


def gpt(here: Here) -> list[Row]:
    """124M parameters, bf16, accumulation 8: tokens/s, MFU, peak memory."""
    rows = _speed_of_gpt(here)
    batches = gpt_batches(here, ACCUMULATION * here.size.updates)
    alone: dict[str, Callable[[], None]] = {
        "plain": lambda: plain_loop(here, batches, gpt_loss, *gpt_parts(here)),
        "ours": lambda: one_more_epoch(trainer_of(*gpt_parts(here), gpt_loss), batches),
    }
    for name, work in alone.items():
        peak = here.peak_mib(work)
        rows.append({"what": f"peak memory, {name}", "value": "-" if peak is None else f"{peak:,.0f} MiB", "mib": peak})
    return rows


def _speed_of_gpt(here: Here) -> list[Row]:
    shape, batches = here.size.shape, gpt_batches(here, ACCUMULATION * here.size.updates)
    plain, ours = gpt_parts(here), gpt_parts(here)
    trainer = trainer_of(*ours, gpt_loss)
    tokens = here.size.micro_batch * shape.context * len(batches)
    times = here.timed(
        {
            "plain": lambda: plain_loop(here, batches, gpt_loss, *plain),
            "ours": lambda: one_more_epoch(trainer, batches),
        }
    )
    rows = compared(times, "plain", "a token", tokens)
    peak = H100_FLOPS if here.device.type == "cuda" else None
    for row in rows:
        rate = tokens / median(row["seconds"])
        mfu = None if peak is None else rate * flops_per_token(shape) / peak
        row |= {"tokens_per_s": rate, "mfu": mfu}
        row["value"] += f", {rate:,.0f} tokens/s, MFU {'-' if mfu is None else f'{mfu:.3f}'}"
    apart = max((a - b).abs().max().item() for a, b in zip(plain[0].parameters(), ours[0].parameters(), strict=True))
    rows.append({"what": "parameters", "value": f"{parameters_of(shape) / 1e6:.1f}M"})
    rows.append({"what": "largest difference of a weight from plain", "value": f"{apart:.1e}"})
    return rows


# -- copies, saves, host reads ----------------------------------------------------------------------------------------


def copies(here: Here) -> list[Row]:
    """Large batches: copied one ahead from pinned memory, from pageable memory, and in the plain loop's own stream."""
    samples, width = here.size.copied
    on_host = [(torch.randn(samples, width),) for _ in range(2 * ACCUMULATION)]
    pinned = [(each.pin_memory(),) for (each,) in on_host] if here.device.type == "cuda" else on_host
    there = [(each.to(here.device),) for (each,) in on_host[:2]] * ACCUMULATION

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())))
        model.to(here.device)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss_fn(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        output: Tensor = model(batch[0])
        return output.square().mean()

    def ours(batches: Any, accumulation: int = ACCUMULATION) -> Callable[[], None]:
        trainer = trainer_of(*parts(), loss_fn, accumulation=accumulation)
        return lambda: one_more_epoch(trainer, batches)

    def trained(batches: Any) -> str:
        model, optimizer = parts()
        one_more_epoch(trainer_of(model, optimizer, loss_fn), batches)
        return weights_digest(model.cpu())

    plain = parts()
    times = here.timed(
        {
            "nothing to copy": ours(there),
            "ours, pinned, one ahead": ours(pinned),
            "ours, pageable": ours(on_host),
            "plain loop, pinned": lambda: plain_loop(here, pinned, loss_fn, *plain),
        }
    )
    rows = compared(times, "nothing to copy", "a micro-batch", len(on_host))
    # a micro-batch in each update: it is copied while the device computes the update before, which the host has queued
    times = here.timed({"nothing to copy, one each": ours(there, 1), "ours, pinned, one each": ours(pinned, 1)})
    rows += compared(times, "nothing to copy, one each", "a micro-batch", len(on_host))
    digests = {trained(on_host), trained(pinned), trained([(each.to(here.device),) for (each,) in on_host])}
    return [*rows, {"what": "copies are whole", "value": str(len(digests) == 1), "ok": len(digests) == 1}]


def stall(here: Here) -> list[Row]:
    """What a save of the GPT with AdamW's state costs the loop: the time of its iterations beyond that without one."""
    every = here.size.save_every
    quiet = median(_iterations(here, None))
    state = 3 * 4 * parameters_of(here.size.shape) / 2**20
    rows: list[Row] = [
        {"what": "state of a save", "value": f"{state:,.0f} MiB"},
        {"what": "an iteration without a save", "value": f"{1e3 * quiet:.1f} ms", "seconds": quiet},
    ]
    for background in (True, False):
        took = _iterations(here, background)
        spans = [took[index : index + every] for index in range(0, len(took), every)]
        first = 1e3 * median(span[0] - quiet for span in spans)
        whole = 1e3 * median(sum(span) - quiet * every for span in spans)
        value = f"{first:.1f} ms more in a save's iteration, {whole:.1f} ms in it and the {every - 1} after it"
        rows.append({"what": "in the background" if background else "waited for", "value": value, "spans_s": spans})
    return rows


def _iterations(here: Here, background: bool | None) -> list[float]:
    """Seconds of iterations, whole spans of ``save_every`` that begin with a save; None: without saves."""
    every, batches, marks = here.size.save_every, gpt_batches(here, ACCUMULATION), list[float]()
    trainer = trainer_of(*gpt_parts(here), gpt_loss)

    def mark() -> None:
        here.wait()
        marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        if background is not None:
            checkpoint = Checkpoint(folder, keep_last=1, background=background, save_at_end=False)
            checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=every))
        # an iteration is from the end of the one before, so that the save at the boundary between them is in it
        trainer.add_event_handler(Events.ITERATION_COMPLETED, mark)
        trainer.run(batches, max_iters=every * (here.size.saves + 1), epoch_length=every)
        assert trainer.state.checkpoints in (0, here.size.saves, here.size.saves + 1)
    return [after - before for before, after in itertools.pairwise(marks)][every - 1 :]


WAITED = "called a synchronizing CUDA operation"
"""What torch warns of at each wait; the first time it also warns that it may miss some."""


class Waits:
    """Counts how often host waits for device in the context, by torch's own warnings; on a CPU the values it reads."""

    def __init__(self, here: Here) -> None:
        self.on_gpu, self.count = here.device.type == "cuda", 0
        self._stack, self._caught = ExitStack(), list[Any]()
        self._reads = _Reads()  # type: ignore[no-untyped-call]  # torch's constructor

    def __enter__(self) -> Waits:
        if self.on_gpu:
            caught = self._stack.enter_context(warnings.catch_warnings(record=True))
            assert caught is not None  # empty so far
            self._caught = caught
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            self._stack.callback(torch.cuda.set_sync_debug_mode, "default")
        else:
            self._stack.enter_context(self._reads)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self.count = sum(WAITED in str(each.message) for each in self._caught) + self._reads.count


class _Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def syncs(here: Here) -> list[Row]:
    """Waits for the device in steady iterations, with clipping, a schedule and a logger between its log points."""
    with Waits(here) as known:
        torch.ones((), device=here.device).item()
    rows: list[Row] = [{"what": "one read of a value, which must count", "value": str(known.count)}]
    rows[0]["ok"] = known.count == 1
    for precision, allowed in (("fp32", 0), ("bf16", 0), ("fp16", STEADY)):  # a loss scaler reads one value a step
        model, optimizer = gpt_parts(here)
        trainer, waits = trainer_of(model, optimizer, gpt_loss, precision), Waits(here)
        LRSchedule(warmup_cosine(optimizer, warmup=2, total=100)).attach(trainer)
        MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=1000))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), waits.__enter__)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3 + STEADY), waits.__exit__)
        trainer.run(gpt_batches(here, ACCUMULATION), max_iters=4 + STEADY, epoch_length=4 + STEADY)
        rows.append({"what": f"{precision}: in {STEADY} iterations", "value": str(waits.count)})
        # on a CPU AdamW reads a step counter of each parameter, and clipping the norm
        own = 0 if waits.on_gpu else STEADY * (len(optimizer.state) + 1)
        rows[-1]["ok"] = waits.count <= allowed + own
    return rows


def _deterministic(wanted: bool) -> None:
    """As ``run.deterministic``, in a process of its own; of torch's attention kernels one has no such form."""
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cuda.enable_mem_efficient_sdp(not wanted)


# -- exactness --------------------------------------------------------------------------------------------------------


def fp16(here: Here) -> list[Row]:
    """The path with a loss scaler, against torch's GradScaler in a plain loop, with scales that overflow at first."""
    options: dict[str, Any] = {"init_scale": 2.0**40, "backoff_factor": 2.0**-4}
    _deterministic(True)
    batches = gpt_batches(here, 12)
    model, optimizer = gpt_parts(here)
    scaler = torch.amp.GradScaler(here.device.type, **options)
    model.train()
    skipped = 0
    for batch in batches:
        inputs, targets = (each.to(here.device) for each in batch)
        with torch.autocast(here.device.type, dtype=torch.float16):
            loss = model(inputs, targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), CLIP_NORM)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
    other, optimizer = gpt_parts(here)
    update = Update(other, optimizer, gpt_loss, precision="fp16", clip_norm=CLIP_NORM, grad_scaler=options)
    state = Trainer(update).run(batches, max_epochs=1)
    same = weights_digest(model.cpu()) == weights_digest(other.cpu())
    return [
        {"what": "skipped steps, plain and ours", "value": f"{skipped} and {state.skipped_steps}",
         "ok": skipped == state.skipped_steps > 0},
        {"what": "same weights as the plain loop", "value": str(same), "ok": same},
    ]  # fmt: skip


def resume(here: Here) -> list[Row]:
    """Runs stopped in the middle and resumed, compared with whole ones bit for bit, with ``run.deterministic``."""
    small = Here(cpu=True, rounds=None)
    small.device = here.device
    _deterministic(True)
    rows = []
    settings = itertools.product(("fp32", "bf16", "fp16"), (1, 3), (False, True))
    for precision, accumulation, background in settings:
        same = _resumes(small, precision, accumulation, background)
        what = f"{precision}, accumulation {accumulation}, {'in the background' if background else 'waited for'}"
        rows.append({"what": what, "value": "the same bits" if same else "OTHER BITS", "ok": same})
    batches = gpt_batches(here, ACCUMULATION)
    trainers = {name: trainer_of(*gpt_parts(here), gpt_loss) for name in ("not deterministic", "deterministic")}

    def turn(name: str) -> None:
        _deterministic(name == "deterministic")
        one_more_epoch(trainers[name], batches)

    times = here.timed({name: lambda name=name: turn(name) for name in trainers})  # type: ignore[misc]
    return rows + compared(times, "not deterministic", "an update of the GPT", 1)


def _resumes(here: Here, precision: str, accumulation: int, background: bool) -> bool:
    """Whether a run that is stopped at iteration 5 of 12 and resumed ends with the bits of the whole one."""
    samples = [tuple(each.squeeze(0) for each in pair) for pair in _windows(here, 36)]

    def trainer() -> Trainer:
        model, optimizer = gpt_parts(here, dropout=0.1)
        made = trainer_of(model, optimizer, gpt_loss, precision, accumulation)
        LRSchedule(warmup_cosine(optimizer, warmup=2, total=12)).attach(made)
        return made

    def run(made: Trainer) -> None:
        made.run(loader(samples, batch_size=2, shuffle=True), max_iters=12)

    def bits(made: Trainer) -> list[Tensor]:
        update: Any = made.update
        moments = [value for state in update.optimizers["optimizer"].state.values() for value in state.values()]
        return [*update.model.parameters(), *moments]

    whole = trainer()
    run(whole)
    with tempfile.TemporaryDirectory() as folder:
        stopped = trainer()
        Checkpoint(folder, background=background).attach(stopped, Events.ITERATION_COMPLETED(every=2))
        stopped.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda: stopped.request_stop("the benchmark"))
        run(stopped)
        assert stopped.state.iteration == 5
        resumed, checkpoint = trainer(), Checkpoint(folder, background=background)
        checkpoint.attach(resumed, Events.ITERATION_COMPLETED(every=2))
        checkpoint.resume()
        run(resumed)
    return all(torch.equal(one, other) for one, other in zip(bits(whole), bits(resumed), strict=True))


def _windows(here: Here, count: int) -> list[Batch]:
    return [pair for batch in gpt_batches(here, count) for pair in [(batch[0][:1], batch[1][:1])]]


def tests(here: Here) -> list[Row]:
    """Every test that needs a CUDA device."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.cuda" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECTION_LIMIT_S)
    lines = done.stdout.strip().splitlines() or [done.stderr[-300:]]
    passed = done.returncode == 0 and (
        here.device.type == "cpu" or ("passed" in lines[-1] and "skipped" not in lines[-1])
    )
    return [{"what": f"pytest -m cuda, {len(files)} files", "value": lines[-1].strip("= "), "ok": passed}]


SECTIONS: dict[str, Callable[[Here], list[Row]]] = {
    "overhead": overhead,
    "gpt": gpt,
    "copies": copies,
    "stall": stall,
    "syncs": syncs,
    "fp16": fp16,
    "resume": resume,
    "tests": tests,
}


# -- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, print the table, write the JSON; 1 if a section failed or found something wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {','.join(SECTIONS)}")
    parser.add_argument(
        "--rounds", type=int, help=f"of what is timed (default {Size.rounds}; {REDUCED.rounds} on a CPU)"
    )
    parser.add_argument("--cpu", action="store_true", help="the reduced form, which is meant without a CUDA device")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # a section's own process writes its rows there
    options = parser.parse_args(arguments)
    names = options.sections.split(",")
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"--sections must be of {', '.join(SECTIONS)}, got {', '.join(sorted(unknown))}.")
    options.cpu = options.cpu or not torch.cuda.is_available()
    if options.into is not None:
        (name,) = names
        options.into.write_text(json.dumps(SECTIONS[name](Here(options.cpu, options.rounds))))
        return 0
    report: dict[str, Any] = {
        "machine": machine() | _device(options.cpu),
        "command": " ".join(["python -m benchmarks.gpu", *(sys.argv[1:] if arguments is None else arguments)]),
        "reduced": options.cpu,
        "sections": {},
    }
    print(report["machine"], "REDUCED, NO MEASUREMENT" if options.cpu else "", sep="\n", flush=True)
    for name in names:
        section = report["sections"][name] = _in_a_process(name, options)
        print(f"\n{name}, {section['seconds']:.0f} s: {(SECTIONS[name].__doc__ or '').strip()}")
        for row in section["rows"]:
            print(f"  {row['what']:<44}{row['value']}{'' if row.get('ok', True) else '   WRONG'}", flush=True)
        if options.json is not None:  # after each: what is measured is kept whatever follows
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row.get("ok", True) for each in report["sections"].values() for row in each["rows"]) else 1


def _in_a_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    since = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--sections", name, "--into", str(into)]
        command += ["--cpu"] * options.cpu + ([f"--rounds={options.rounds}"] if options.rounds else [])
        environment = os.environ | ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if name in ("fp16", "resume") else {})
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=SECTION_LIMIT_S,
            )
            error = done.stderr.decode()[-2000:]
        except subprocess.TimeoutExpired:
            error = f"not done within {SECTION_LIMIT_S} s"
        rows = json.loads(into.read_text()) if into.exists() else [{"what": "FAILED", "value": error, "ok": False}]
    return {"seconds": time.perf_counter() - since, "rows": rows}


def _device(cpu: bool) -> dict[str, str]:
    if cpu:
        return {"device": "cpu"}
    free = torch.cuda.get_device_properties(0).total_memory / 2**30
    return {"device": f"{torch.cuda.get_device_name()} ({free:.0f} GiB)", "cuda": str(torch.version.cuda)}


if __name__ == "__main__":
    sys.exit(main())
