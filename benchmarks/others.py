"""What other trainers do when a run is killed, stopped by a signal, or trained on another number of ranks.

    python -m benchmarks.others [--contenders NAME,...] [--json PATH]

One small program (dropout, shuffled data, AdamW, a checkpoint each 7 steps), written for each trainer as its own
documentation writes it, with the settings it has for exact resumes; it is also what costs a step are compared in.
Each question is asked of processes of their own:

- ``kill``: SIGKILL in the middle of the second epoch, then the same command: has it the weights of the whole run?
- ``workers``: the same with two workers and random augmentation.
- ``term``: SIGTERM to one of two ranks: where does each rank stop, with what exit code, and is that step saved?
- ``ranks``: the same batches on one rank and on two: the same weights?
- ``cost``: CPU time of a step beside the plain loop's: over batches in memory, or, for those that need one,
  over a DataLoader of them, in both.

``pip install 'ignite-engine[bench]'`` installs the others. It takes about ten minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

STEPS_PER_EPOCH, EPOCHS, SAVE_EVERY, STRIKE_AT = 20, 3, 7, 33
QUESTIONS = ("kill", "workers", "term", "ranks", "cost")
TIMEOUT_S = 90.0  # of ranks that hang


class Samples(Dataset[Any]):
    """Which of the first three numbers is the largest; with noise drawn from torch's generator if ``augmented``."""

    def __init__(self, count: int, augmented: bool) -> None:
        self.inputs = torch.randn(count, 16, generator=torch.Generator().manual_seed(0))
        self.targets, self.augmented = self.inputs[:, :3].argmax(dim=1), augmented

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(16) if self.augmented else 0.0
        return self.inputs[index] + noise, self.targets[index]


class Batches(Samples):
    """Read a batch at a time, so that a step is not that of reading tiny samples."""

    def __getitems__(self, indices: list[int] | slice) -> tuple[Tensor, Tensor]:
        return self.inputs[indices], self.targets[indices]


def as_it_is(batch: Any) -> Any:
    return batch


@dataclass
class Work:
    """What a contender trains, and where; it calls ``stepped()`` after each optimizer step."""

    folder: Path
    question: str
    rank: int = int(os.environ.get("RANK", 0))
    ranks: int = int(os.environ.get("WORLD_SIZE", 1))

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.cost = self.question == "cost"
        self.epochs = 1 if self.cost else EPOCHS
        self.batch_size = 8 // self.ranks
        steps = 1500 if self.cost else STEPS_PER_EPOCH
        self.samples: Any = (Batches if self.cost else Samples)(8 * steps, self.question == "workers")
        self.collate_fn = as_it_is if self.cost else None
        self.workers = 2 if self.question == "workers" else 0
        dropout = 0.0 if self.question == "ranks" else 0.1
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.iteration, self.began = 0, 0.0
        self.saves = self.question in ("kill", "workers", "term")
        self.strikes = "STRIKE" in os.environ

    def loader(self, kind: Any = DataLoader) -> Any:
        if self.cost and kind is not DataLoader:
            return [self.samples.__getitems__(slice(start, start + 8)) for start in range(0, len(self.samples), 8)]
        return kind(
            self.samples, batch_size=self.batch_size, shuffle=True, num_workers=self.workers, collate_fn=self.collate_fn
        )

    def stepped(self, iteration: int) -> None:
        self.iteration = iteration
        if self.cost and iteration in (500, 1500):
            self.began = time.process_time() - self.began
        if self.strikes and iteration == STRIKE_AT and self.rank == self.ranks - 1:
            os.kill(os.getpid(), signal.SIGTERM if self.question == "term" else signal.SIGKILL)
        if self.strikes and iteration >= STRIKE_AT:
            time.sleep(0.3)  # some wait for seconds before they act on a signal

    def report(self) -> None:
        weights = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12]
        found = {"weights": digest, "iteration": self.iteration, "us": self.began * 1e6 / 1000}
        (self.folder / f"report_{self.rank}.json").write_text(json.dumps(found))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def plain(work: Work, kind: Any = None) -> None:
    for batch in work.loader(kind):
        loss_of(work.model, batch).backward()
        work.optimizer.step()
        work.optimizer.zero_grad()
        work.stepped(work.iteration + 1)


def plain_dataloader(work: Work) -> None:
    plain(work, DataLoader)


def ours(work: Work) -> None:
    import ignite.distributed as idist
    from ignite.engine import Events

    from ignite_engine import Trainer, Update, loader
    from ignite_engine.handlers import Checkpoint, GracefulStop

    invariant = work.question == "ranks"
    if work.ranks > 1:
        idist.initialize("gloo")
    model = work.model if invariant else idist.auto_model(work.model)
    update = Update(model, work.optimizer, loss_of, accumulate="rank_invariant" if invariant else None)
    trainer = Trainer(update, global_micro_batches=2) if invariant else Trainer(update)
    batch_size = 4 if invariant else work.batch_size

    def ours_of(samples: Any, **options: Any) -> Any:
        return loader(samples, seed=0, **{**options, "batch_size": batch_size})

    if work.saves:
        checkpoint = Checkpoint(work.folder / "checkpoints")
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=SAVE_EVERY))
        GracefulStop().attach(trainer)
        checkpoint.resume()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: work.stepped(trainer.state.iteration))
    trainer.run(work.loader(ours_of), max_epochs=work.epochs)


def ignite(work: Work) -> None:
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_trainer
    from ignite.handlers import Checkpoint, DiskSaver

    if work.ranks > 1:
        idist.initialize("gloo")
    model = idist.auto_model(work.model)
    exact = not work.cost  # its setting for the same order of the data after a resume
    trainer = create_supervised_trainer(model, work.optimizer, nn.functional.cross_entropy, deterministic=exact)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: work.stepped(trainer.state.iteration))
    if work.saves:
        state = {"trainer": trainer, "model": model, "optimizer": work.optimizer}
        saver = DiskSaver(str(work.folder / "checkpoints"), require_empty=False)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=SAVE_EVERY), Checkpoint(state, saver, n_saved=2))
        saved = sorted((work.folder / "checkpoints").glob("*.pt"), key=lambda path: int(path.stem.split("_")[-1]))
        if saved:
            Checkpoint.load_objects(state, torch.load(saved[-1], weights_only=False))
    data = (
        idist.auto_dataloader(work.samples, batch_size=8, shuffle=True, num_workers=work.workers, pin_memory=False)
        if work.ranks > 1
        else work.loader(None if work.cost else DataLoader)
    )
    trainer.run(data, max_epochs=work.epochs)


def lightning(work: Work) -> None:
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> Any:
            return work.optimizer

    class Steps(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            work.stepped(trainer.global_step)

    lightning.seed_everything(0, workers=True, verbose=False)
    folder = work.folder / "checkpoints"
    saves = [
        ModelCheckpoint(dirpath=folder, every_n_train_steps=SAVE_EVERY, save_last=True, save_top_k=1),
        OnExceptionCheckpoint(folder),
    ]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=work.ranks, strategy="ddp" if work.ranks > 1 else "auto", max_epochs=work.epochs,
        callbacks=[*(saves if work.saves else []), Steps()], logger=False, enable_checkpointing=work.saves,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=work.folder,
    )  # fmt: skip
    data = work.loader(DataLoader if work.cost else StatefulDataLoader)
    trainer.fit(Module(), data, ckpt_path="last" if folder.exists() else None)


def accelerate(work: Work) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(0)
    config = DataLoaderConfiguration(use_seedable_sampler=not work.cost)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model, optimizer, data = accelerator.prepare(work.model, work.optimizer, work.loader())
    folder, done = work.folder / "checkpoints", 0
    saved = sorted(folder.glob("step_*"), key=lambda path: int(path.name[5:]))
    if saved:
        accelerator.load_state(str(saved[-1]))
        done = int(saved[-1].name[5:])
    for epoch in range(done // len(data), work.epochs):
        data.set_epoch(epoch)
        skip = done - epoch * len(data)
        for batch in accelerator.skip_first_batches(data, skip) if skip > 0 else data:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if work.saves and done % SAVE_EVERY == 0:
                accelerator.save_state(str(folder / f"step_{done}"))
            work.stepped(done)


def huggingface(work: Work) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.model, (inputs, labels))}

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            work.stepped(state.global_step)

    def collated(samples: Any) -> dict[str, Tensor]:
        inputs, labels = samples if work.cost else default_collate(samples)
        return {"inputs": inputs, "labels": labels}

    folder = str(work.folder / "checkpoints")
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=work.batch_size, num_train_epochs=work.epochs,
        dataloader_num_workers=work.workers, save_strategy="steps" if work.saves else "no", save_steps=SAVE_EVERY,
        save_total_limit=2, logging_strategy="no", report_to=[], disable_tqdm=True, max_grad_norm=0.0, seed=0,
        lr_scheduler_type="constant", remove_unused_columns=False, enable_jit_checkpoint=work.question == "term",
    )  # fmt: skip
    optimizers = (work.optimizer, None)
    trainer = Trainer(Model(), arguments, collated, work.samples, optimizers=optimizers, callbacks=[Steps()])
    last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    trainer.train(resume_from_checkpoint=last)


BASELINES = {"plain": plain, "plain_dataloader": plain_dataloader}
CONTENDERS: dict[str, Callable[[Work], None]] = {
    "ours": ours,
    "ignite": ignite,
    "lightning": lightning,
    "accelerate": accelerate,
    "huggingface": huggingface,
}
NEED_DATALOADER = ("lightning", "accelerate", "huggingface")  # a list is several loaders to Lightning


# -- asking ---------------------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """How the ranks of a start ended: exit codes (None: killed by us, as it hung), and what each reported."""

    codes: list[int | None]
    reports: list[dict[str, Any]]
    text: str


def start(name: str, question: str, folder: Path, *, ranks: int = 1, strike: bool = False) -> Ended:
    """One start of a contender's program, as a command that is given again and again."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(ranks):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        if ranks > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
            environment |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment |= {"TORCHELASTIC_RUN_ID": "one", "ACCELERATE_USE_CPU": "true"}
        environment |= {"STRIKE": "yes"} if strike else {}
        command = [sys.executable, "-m", "benchmarks.others", "--start", name, question, str(folder)]
        output = (folder / f"output_{rank}.txt").open("w")
        processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    until, codes = time.monotonic() + TIMEOUT_S, list[int | None]()
    for process in processes:
        try:
            codes.append(process.wait(max(1.0, until - time.monotonic()) if ranks > 1 else None))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            codes.append(None)
    paths = [folder / f"report_{rank}.json" for rank in range(ranks)]
    reports = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    text = "\n".join((folder / f"output_{rank}.txt").read_text()[-1500:] for rank in range(ranks))
    return Ended(codes, reports, text)


def ask(name: str, question: str, folder: Path) -> Any:
    """The answer of a contender to a question."""
    if question == "ranks":
        one, two = start(name, question, folder / "1"), start(name, question, folder / "2", ranks=2)
        return "the same bits" if one.reports[0]["weights"] == two.reports[0]["weights"] else "other bits"
    ranks = 2 if question == "term" else 1
    struck = start(name, question, folder / "struck", ranks=ranks, strike=True)
    if question == "term":
        found = [report.get("iteration") for report in struck.reports]
        saved = sorted(path.name for path in (folder / "struck" / "checkpoints").glob("*"))
        return {"codes": struck.codes, "stopped at": found, "saved": saved}
    assert struck.codes == [-signal.SIGKILL], struck.text
    whole, again = start(name, question, folder / "whole"), start(name, question, folder / "struck")
    if again.codes != [0]:
        return f"failed: {again.text[-300:]}"
    return "the same bits" if whole.reports == again.reports else "other bits"


def costs(names: list[str], folder: Path, rounds: int = 5) -> dict[str, float]:
    """Medians over the rounds, in which the contenders take turns, of the CPU time of a step to the baseline's."""
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        us = {name: start(name, "cost", folder / f"{name}_{number}").reports[0]["us"] for name in (*BASELINES, *names)}
        for name in names:
            ratios[name].append(us[name] / us["plain_dataloader" if name in NEED_DATALOADER else "plain"])
        print("round", number, {name: round(found[-1], 2) for name, found in ratios.items()}, flush=True)
    return {name: statistics.median(found) for name, found in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--questions", default=",".join(QUESTIONS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--start", nargs=3, metavar=("NAME", "QUESTION", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start:
        name, question, folder = given.start
        work = Work(Path(folder), question)
        try:
            {**BASELINES, **CONTENDERS}[name](work)
        finally:  # also where a signal ended it
            work.report()
        return
    names, questions = given.contenders.split(","), given.questions.split(",")
    answers: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name in names:
        for question in questions:
            with tempfile.TemporaryDirectory() as folder:
                if question != "cost":
                    answers[name][question] = ask(name, question, Path(folder))
                    print(f"{name:<12} {question:<8} {answers[name][question]}", flush=True)
    if "cost" in questions:
        with tempfile.TemporaryDirectory() as folder:
            for name, ratio in costs(names, Path(folder)).items():
                answers[name]["cost"] = ratio
                print(f"{name:<12} cost     {ratio:.2f}")
    if given.json:
        given.json.write_text(json.dumps({"commit": commit(), "answers": answers}, indent=1))


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
