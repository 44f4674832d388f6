"""Twenty models with and without ``Update(capture=...)``, against the plain loop. See ``benchmarks/README.md``.

python -m benchmarks.captured_models [--rounds N] [--updates N] [--models NAME,NAME] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding_bag, mse_loss, softplus
from torch.nn.utils import clip_grad_norm_

from benchmarks.goals import Goal
from benchmarks.machine import machine
from benchmarks.ratios import ratio_of_medians
from ignite_engine import Trainer, Update, Updates
from ignite_engine.capture import NotCaptured
from ignite_engine.capture.trial import MEASURED, WARM_UP

LossFn = Callable[[nn.Module, Any], Tensor]
Built = tuple[nn.Module, Callable[[], Any], LossFn | dict[str, LossFn]]
"""A model, what draws a batch, and the loss, or one for each of several parts of the model in turn."""
ROOT = Path(__file__).resolve().parents[1]
TRIAL = 2 * (WARM_UP + MEASURED) + 2
"""More iterations than the trial of ``auto`` takes."""


class Embedded(nn.Module):
    """Ids, a body, and logits over the ids."""

    def __init__(self, body: nn.Module, width: int, ids: int = 128) -> None:
        super().__init__()
        self.ids, self.body, self.head = nn.Embedding(ids, width), body, nn.Linear(width, ids)

    def forward(self, ids: Tensor) -> Tensor:
        inner = self.body(self.ids(ids))
        logits: Tensor = self.head(inner[0] if isinstance(inner, tuple) else inner)
        return logits


class Bags(nn.Module):
    """A mean over embeddings, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(1000, 32) * 0.1), mlp(32, 64, 10, layers=2)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(embedding_bag(ids, self.weight))
        return logits


class Scatter(nn.Module):
    """Messages along the edges of a graph, summed at their ends, twice."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(width, width) for _ in range(2)), nn.Linear(width, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            messages = layer(nodes)[edges[0]]
            nodes = nodes + torch.zeros_like(nodes).index_add(0, edges[1], messages).relu()
        logits: Tensor = self.head(nodes)
        return logits


class VAE(nn.Module):
    """An encoder, a sample of the code, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 64, 16, layers=2), mlp(8, 64, 64, layers=2)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(inputs).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


class LoRA(nn.Module):
    """A frozen layer and what is added to it."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(layer.in_features, rank) * 0.01)
        self.up = nn.Parameter(torch.zeros(rank, layer.out_features))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs) + inputs @ self.down @ self.up
        return out


def mlp(inputs: int, width: int, outputs: int, *, layers: int, between: type[nn.Module] = nn.GELU) -> nn.Sequential:
    """So many linear layers."""
    sizes = [inputs, *[width] * (layers - 1), outputs]
    parts: list[nn.Module] = []
    for before, after in pairwise(sizes):
        parts += [nn.Linear(before, after), between()]
    return nn.Sequential(*parts[:-1])


def classify(model: nn.Module, batch: Any) -> Tensor:
    *inputs, targets = batch
    return cross_entropy(model(*inputs).flatten(0, -2), targets.flatten())


def images(model: nn.Module) -> Built:
    return model, lambda: (torch.randn(16, 3, 16, 16), torch.randint(10, (16,))), classify


def vectors(model: nn.Module, size: int = 64, batch: int = 32) -> Built:
    return model, lambda: (torch.randn(batch, size), torch.randint(10, (batch,))), classify


def tokens(model: nn.Module, length: int = 32, batch: int = 8, ids: int = 128) -> Built:
    return model, lambda: tuple(torch.randint(ids, (2, batch, length)).unbind()), classify


def gpt(width: int, layers: int, length: int) -> Built:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return tokens(Embedded(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), width), length)


def convolutions(*widths: int, norm: bool = False) -> nn.Sequential:
    parts: list[nn.Module] = []
    for before, after in zip((3, *widths), widths, strict=False):
        parts += [
            nn.Conv2d(before, after, 3, stride=2, padding=1),
            *([nn.BatchNorm2d(after)] if norm else []),
            nn.ReLU(),
        ]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def hugging_face(name: str) -> Built:
    import transformers

    options = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(intermediate_size=128, **options)
    kind = "ForCausalLM" if name == "Llama" else "ForMaskedLM"
    model = getattr(transformers, f"{name}{kind}")(config)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        value: Tensor = model(input_ids=ids, labels=ids).loss
        return value

    return model, lambda: torch.randint(128, (8, 32)), loss


def vae() -> Built:
    def loss(model: nn.Module, inputs: Tensor) -> Tensor:
        found, mean, log_variance = model(inputs)
        total: Tensor = mse_loss(found, inputs) + 0.01 * (mean.square() + log_variance.exp() - log_variance).mean()
        return total

    return VAE(), lambda: torch.randn(32, 64), loss


class GAN(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(8, 64, 64, layers=2), mlp(64, 64, 1, layers=3)


def gan() -> Built:
    def discriminator(model: Any, batch: Any) -> Tensor:
        real, noise = batch
        found: Tensor = model.discriminator(model.generator(noise).detach())
        return softplus(-model.discriminator(real)).mean() + softplus(found).mean()

    def generator(model: Any, batch: Any) -> Tensor:
        return softplus(-model.discriminator(model.generator(batch[1]))).mean()

    losses: dict[str, LossFn] = {"discriminator": discriminator, "generator": generator}
    return GAN(), lambda: (torch.randn(32, 64), torch.randn(32, 8)), losses


def scatter() -> Built:
    return Scatter(), lambda: (torch.randn(64, 32), torch.randint(64, (2, 256)), torch.randint(4, (64,))), classify


def reads_a_value() -> Built:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = classify(model, batch)
        return value if value.item() < 1e6 else value.sqrt()

    return mlp(64, 64, 10, layers=3), vectors(nn.Identity())[1], loss


MODELS: dict[str, Callable[[], Built]] = {
    "MLP, 3 layers of 128": lambda: vectors(mlp(64, 128, 10, layers=3)),
    "MLP, 12 layers of 64": lambda: vectors(mlp(64, 64, 10, layers=12)),
    "MLP, 4 layers of 1024": lambda: vectors(mlp(64, 1024, 10, layers=4), batch=128),
    "MLP with BatchNorm": lambda: vectors(
        nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), mlp(128, 128, 10, layers=2))
    ),
    "MLP with dropout": lambda: vectors(
        nn.Sequential(mlp(64, 128, 128, layers=2), nn.Dropout(0.1), nn.Linear(128, 10))
    ),
    "convolutions, 8 to 32": lambda: images(convolutions(8, 16, 32)),
    "convolutions, BatchNorm": lambda: images(convolutions(16, 32, 64, norm=True)),
    "GPT, width 32": lambda: gpt(32, 2, 32),
    "GPT, width 64": lambda: gpt(64, 4, 64),
    "GPT, width 128": lambda: gpt(128, 4, 128),
    "LSTM": lambda: tokens(Embedded(nn.LSTM(32, 32, batch_first=True), 32), length=16),
    "graph with scatter": scatter,
    "embedding bag": lambda: (Bags(), lambda: (torch.randint(1000, (32, 8)), torch.randint(10, (32,))), classify),
    "Hugging Face Llama": lambda: hugging_face("Llama"),
    "Hugging Face BERT": lambda: hugging_face("Bert"),
    "VAE": vae,
    "GAN, two updates": gan,
    "LoRA": lambda: vectors(nn.Sequential(LoRA(nn.Linear(64, 256)), nn.GELU(), LoRA(nn.Linear(256, 10)))),
    "attention": lambda: tokens(
        Embedded(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 32), length=16
    ),
    "a loss that reads a value": reads_a_value,
}


class Way:
    """A model that one way trains, a round of updates at a time."""

    def __init__(self, name: str, batches: list[Any], capture: bool | str | None) -> None:
        torch.manual_seed(0)
        self.model, _, self.loss = MODELS[name]()
        losses = self.loss if isinstance(self.loss, dict) else {"": self.loss}
        self.parts = [
            (loss, [each for each in self.model.get_submodule(part).parameters() if each.requires_grad])
            for part, loss in losses.items()
        ]
        self.optimizers = [torch.optim.AdamW(trained, lr=1e-4) for _, trained in self.parts]
        self.batches, self.trainer, self.updates = batches, None, list[Update]()
        if capture is not None:
            for (loss, _), optimizer in zip(self.parts, self.optimizers, strict=True):
                self.updates.append(Update(self.model, optimizer, loss, clip_norm=1.0, capture=capture))
            several = len(self.updates) > 1
            self.trainer = Trainer(
                Updates(dict(zip(losses, self.updates, strict=True))) if several else self.updates[0]
            )

    @property
    def decisions(self) -> list[bool | None]:
        """Of each update: whether it is captured, None if it is not decided."""
        return [None if update._capture is None else update._capture.decision for update in self.updates]

    def decide(self) -> None:
        """Train until ``auto`` has decided, which takes one run of more than its trial."""
        assert self.trainer is not None
        self.trainer.run(self.batches, max_epochs=TRIAL // len(self.batches) + 1)
        assert None not in self.decisions

    def round(self) -> float:
        """Seconds of an iteration."""
        since = time.perf_counter()
        if self.trainer is not None:
            self.trainer.run(self.batches, max_epochs=self.trainer.state.epoch + 1)
        else:
            for batch in self.batches:
                for (loss, trained), optimizer in zip(self.parts, self.optimizers, strict=True):
                    optimizer.zero_grad()
                    loss(self.model, batch).backward()
                    clip_grad_norm_(trained, 1.0)
                    optimizer.step()
        return (time.perf_counter() - since) / len(self.batches)


def measured(name: str, rounds: int, updates: int) -> dict[str, Any]:
    """One model: milliseconds of an update by way and round, seconds of compiling, and what was not captured."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    draw = MODELS[name]()[1]
    batches = [draw() for _ in range(updates)]
    ways = {
        "plain": Way(name, batches, None),
        "Update": Way(name, batches, False),
        "auto": Way(name, batches, "auto"),
    }
    captured, problem, compiled_s = Way(name, batches, True), None, 0.0
    try:
        compiled_s = captured.round() * updates
        ways["captured"] = captured
    except NotCaptured as error:
        problem = re.sub(r'File "[^"]*/', 'File "', str(error))  # the page names no folders of this machine
    ways["auto"].decide()
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, contender in list(ways.items())[:: 1 if number % 2 else -1]:
            times[way].append(1e3 * contender.round())
    decision = all(ways["auto"].decisions)
    return {
        "ms": {way: each[1:] for way, each in times.items()},
        "compile_s": compiled_s,
        "kept": decision,
        "problem": problem,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each model in a process of its own, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.captured_models", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=100, help="of a round")
    parser.add_argument("--models", help="; of their names, all by default")
    parser.add_argument("--first", type=int, help="so many of the models alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measured(options.one, options.rounds, options.updates)))
        return 0
    print(f"{machine()}\n{options.rounds} rounds of {options.updates} updates, wall time, one thread")
    print(f"{'':<28}{'plain ms':>9}  {'Update':<22}{'captured':<22}{'auto':<22}{'compile s':>9}  pays off after")
    rows, goals = {}, []
    for name in options.models.split(";") if options.models else list(MODELS)[: options.first]:
        command = [sys.executable, "-m", "benchmarks.captured_models", "--one", name]
        command += ["--rounds", str(options.rounds), "--updates", str(options.updates)]
        with tempfile.TemporaryDirectory() as cache:  # what is compiled is compiled here
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return 1
        found = json.loads(done.stdout.splitlines()[-1])
        ratios = {way: ratio_of_medians(times, found["ms"]["plain"]) for way, times in found["ms"].items()}
        saved = median(found["ms"]["plain"]) - median(found["ms"].get("captured", found["ms"]["plain"]))
        pays = f"{1e3 * found['compile_s'] / saved:,.0f} updates" if saved > 0 else found["problem"] or "never"
        print(
            f"{name:<28}{median(found['ms']['plain']):9.3f}  {ratios['Update']!s:<22}"
            f"{ratios.get('captured', '-')!s:<22}{ratios['auto']!s:<22}{found['compile_s']:9.1f}  {pays}",
            flush=True,
        )
        rows[name] = {**found, "ratios": {way: asdict(ratio) for way, ratio in ratios.items()}}
        goals.append(Goal.of(f"{name}: auto / plain", ratios["auto"], 1.02))
    if options.json is not None:
        report = {"machine": machine(), "models": rows, "goals": [asdict(each) for each in goals]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
