"""The first losses of the shipped configs, bit for bit: ``python -m tests.examples.golden`` writes ``golden.json``.

The bits are those of one thread, one torch and one family of processors, so the file names them. Written anew, it
keeps the losses of other environments only if those of this one are as they were.
"""

import json
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

from tests.kit import runs

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
GOLDEN = Path(__file__).with_name("golden.json")
ITERATIONS = 50
OPTIONS = {
    "byte_gpt": (),
    "click_stream": ("run.max_epochs=null",),
    "digits": ("run.max_epochs=null",),
}
OFF = ("Progress", "MemoryLogger", "Throughput", "StepTimes", "ClearML", "Report")
QUIET = [f"handlers.{label}=null" for label in OFF]


def environment():
    """What the bits of a run depend on beside the code; the corpora are the source of Python's standard library."""
    fields = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    processor = f"{fields.get('vendor_id', platform.machine())} family {fields.get('cpu family', 'unknown')}"
    instructions = torch.backends.cpu.get_cpu_capability()
    python = f"Python {platform.python_version()}, NumPy {version('numpy')}"
    return f"torch {torch.__version__}, {python}, {processor} with {instructions}"


def losses(name, folder):
    """Train a config for some iterations: its losses, and the digest of its weights at the end."""
    command = ["train", str(CONFIGS / f"{name}.yaml")]
    command += [
        f"run.directory={folder}",
        f"run.max_iterations={ITERATIONS}",
        "run.threads=1",
        "handlers.MetricLogger={every: 1, console: false}",
    ]
    training = runs.command(ROOT, *command, *QUIET, *OPTIONS[name])
    if training.wait(300) != 0:
        raise RuntimeError(f"{name} ended with code {training.returncode}: {training.said()[-2000:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights = json.loads((folder / "summary.json").read_text())["weights_sha256"]
    return {"weights_sha256": weights, "losses": [row["loss"] for row in rows if "loss" in row]}


def recorded():
    """What is kept of each config, by environment."""
    return dict(json.loads(GOLDEN.read_text()))


def main():
    kept, key = recorded(), environment()
    for name in OPTIONS:
        with tempfile.TemporaryDirectory() as folder:
            now = losses(name, Path(folder) / "run")
        before = kept.get(name, {})
        print(f"{name}: {'as before' if before.get(key) == now else 'written'}, for {key}")
        kept[name] = {**(before if before.get(key, now) == now else {}), key: now}
    GOLDEN.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
