"""Draws docs/assets/*.svg from runs made for them: ``python docs/tools/pictures.py [NAME ...]``.

About 3 minutes for all of them on 2 cores; run it from the repository's root, with the extra ``dev``. What is drawn in
``INK`` is light where the reader's browser is dark.
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
INK, LIGHT_INK, PALE, FIRE = "#546e7a", "#b0bec5", "#90a4ae", "#e64a19"
STYLE = f"<style>:root {{--ink: {INK}}} @media (prefers-color-scheme: dark) {{:root {{--ink: {LIGHT_INK}}}}}</style>"
COLORS = ["#1e88e5", "#00897b", "#ab47bc", "#ef6c00", "#e53935", "#7cb342"]

plt.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "the same names in each file",
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "font.size": 9,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
        "legend.frameon": False,
    }
)


def main(names: list[str]) -> None:
    for name in names or list(PICTURES):
        with tempfile.TemporaryDirectory() as folder:
            figure = PICTURES[name](Path(folder))
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
        before, tag, rest = drawn.getvalue().partition("<defs>")
        path = ROOT / "docs" / "assets" / f"{name}.svg"
        path.write_text(before + STYLE + tag + rest.replace(INK, "var(--ink)"))
        print(path.relative_to(ROOT))


# -- a run killed five times ------------------------------------------------------------------------------------------

EPOCHS, KILLS = 12, (31, 97, 166, 238, 331)  # iterations; the digits have 34 in an epoch


def resume(folder: Path) -> Any:
    """Digits, once in one process, and once killed by SIGKILL five times."""
    whole, killed = folder / "whole", folder / "killed"
    train(whole).wait()
    lives = []
    for target in KILLS:
        process = train(killed)
        while not (lines := log(killed)) or lines[-1]["iteration"] < target:
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        lives.append(log(killed))
    train(killed).wait()
    lives.append(log(killed))
    starts = [json.loads(line) for line in (killed / "starts.jsonl").read_text().splitlines()]
    first = [line["iteration"] for line in starts if "config" in line]
    assert len(first) == len(lives), starts

    uninterrupted, final = losses(log(whole)), losses(lives[-1])
    assert uninterrupted == final, "the losses differ"
    hashes = [json.loads((run / "summary.json").read_text())["weights_sha256"] for run in (whole, killed)]
    assert hashes[0] == hashes[1], "the weights differ"

    figure, (curve, strip) = plt.subplots(
        2, 1, figsize=(7.6, 4.6), sharex=True, gridspec_kw={"height_ratios": [3, 1.25], "hspace": 0.12}
    )
    curve.plot(*zip(*uninterrupted), color=PALE, linewidth=7, solid_capstyle="round", label="uninterrupted")
    for life, (lines, start) in enumerate(zip(lives, first)):
        part = [(iteration, loss) for iteration, loss in losses(lines) if iteration > start]
        curve.plot(*zip(*part), color=COLORS[life], linewidth=1.3)
        last = lines[-1]["iteration"]
        strip.barh(-life, last - start, left=start, color=COLORS[life], height=0.7)
        if life < len(KILLS):
            curve.axvline(last, color=INK, linewidth=0.7, linestyle=":")
            strip.plot(last, -life, marker="x", color=INK, markersize=6, markeredgewidth=1.6)
    curve.plot([], [], color=INK, linewidth=1.3, label="killed five times: each process in a color of its own")
    curve.set_yscale("log")
    curve.set_ylabel("loss")
    curve.legend(loc="upper right")
    curve.set_title(f"{len(final)} logged losses, 0 differ; SHA-256 of the weights, both: {hashes[0][:12]}...")
    strip.set_yticks(range(0, -len(lives), -1), [f"process {life + 1}" for life in range(len(lives))], fontsize=7.5)
    strip.set_xlabel("iteration   (x: kill -9; what overlaps was trained twice)")
    return figure


def train(folder: Path) -> subprocess.Popen[bytes]:
    settings = [
        f"run.directory={folder}",
        f"run.max_epochs={EPOCHS}",
        "run.threads=1",
        "handlers.MetricLogger={every: 2, console: false}",
    ]
    settings += ["handlers.Checkpoint.every=20", "handlers.ClearML=null"]
    command = [sys.executable, "-m", "ignite_engine", "train", "configs/digits.yaml", *settings]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log, less one that is being written."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(lines: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(line["iteration"], line["loss"]) for line in lines if "loss" in line]


# -- the same bits on any number of ranks -----------------------------------------------------------------------------

INVARIANT = """
import sys
import torch
import ignite.distributed as idist
from ignite.engine import Events
from ignite_engine import Parallel, Trainer, Update, loader

def loss_fn(model, batch):
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)

def train(local_rank, folder, ranks):
    torch.set_num_threads(1)
    for invariant in (True, False):
        torch.manual_seed(0)
        inputs = torch.randn(1536, 16)
        data = torch.utils.data.TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
        layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        model = layers if invariant else idist.auto_model(layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        accumulate = "rank_invariant" if invariant else None
        trainer = Trainer(Update(model, optimizer, loss_fn, accumulate=accumulate), global_micro_batches=12)
        weights = []
        keep = lambda: weights.append(torch.cat([each.detach().flatten().clone() for each in model.parameters()]))
        trainer.add_event_handler(Events.ITERATION_COMPLETED, keep)
        trainer.run(loader(data, batch_size=4, shuffle=True, seed=0), max_epochs=5)
        if idist.get_rank() == 0:
            torch.save(torch.stack(weights), f"{folder}/{ranks}_{invariant}.pt")

if __name__ == "__main__":
    folder, ranks = sys.argv[1], int(sys.argv[2])
    with Parallel(backend="gloo", nproc_per_node=ranks) as parallel:
        parallel.run(train, folder, ranks)
"""


def ranks(folder: Path) -> Any:
    """One training on 1, 2, 3 and 4 ranks: how far the weights are from those of one rank, after each update."""
    import torch

    script = folder / "script.py"
    script.write_text(INVARIANT)
    for number in (1, 2, 3, 4):
        subprocess.run([sys.executable, script, folder, str(number)], cwd=ROOT, check=True, capture_output=True)

    figure, axis = plt.subplots(figsize=(7.6, 3.0))
    for invariant in (False, True):
        alone = torch.load(folder / f"1_{invariant}.pt", weights_only=True)
        for number in (2, 3, 4):
            weights = torch.load(folder / f"{number}_{invariant}.pt", weights_only=True)
            distance = (weights - alone).abs().amax(dim=1)
            if invariant:
                assert distance.max() == 0, number
            style = {"linewidth": 4, "color": FIRE} if invariant else {"linewidth": 1.2, "color": COLORS[number - 2]}
            axis.plot(range(1, len(distance) + 1), distance, label=None if invariant else f"{number} ranks", **style)
    axis.set_yscale("symlog", linthresh=1e-9, linscale=0.6)
    axis.set_yticks([0, 1e-8, 1e-6, 1e-4], ["0", "$10^{-8}$", "$10^{-6}$", "$10^{-4}$"])
    axis.set_ylim(-3e-10, None)
    axis.set_xlabel("update")
    axis.set_ylabel("largest difference of\na weight to one rank's")
    axis.annotate("DDP: the order of its sums depends on the ranks", (60, 1.2e-5), color=INK)
    axis.annotate("rank_invariant: 0 on 2, 3 and 4 ranks", (60, 1.2e-10), color=INK, va="bottom")
    axis.legend(loc="lower right", bbox_to_anchor=(1, 0.2))
    return figure


PICTURES: dict[str, Callable[[Path], Any]] = {
    "resume": resume,
    "ranks": ranks,
}

if __name__ == "__main__":
    main(sys.argv[1:])
