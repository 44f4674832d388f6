"""What the sections of a config make of a task: optimizers, wrapping, ranks."""

import json

import pytest
import torch
import yaml

from tests.kit import runs
from tests.kit.fitting import QUIET
from tests.kit.floors import of
from tests.kit.processes import ranks
from tests.kit.refusals import CommandRefused, command, refusals
from tests.kit.tiers import tiered

TASK = """
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset
from ignite_engine import Task

generator = torch.Generator().manual_seed(1)
DATA = torch.randn(57, 8, generator=generator)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).tanh())


def split(model, mesh):
    for block in model[:2]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def build(options):
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 1))
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if options.get("by_name"):
        groups = {"matrices": decayed, "rest": [{"params": others, "lr": 0.25}]}
    if options.get("norm"):
        model.insert(0, nn.BatchNorm1d(8))
    return Task(
        model,
        lambda model, batch: model(batch[0]).square().mean(),
        TensorDataset(DATA[:48]),
        val_sets={"val": TensorDataset(DATA[48:])},
        parameter_groups=groups,
        parallelize=split if options.get("parallel", True) else None,
    )
"""


def config(folder, **sections):
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(TASK)
    base = {
        "task": f"{folder / 'task.py'}:build",
        "task_options": {},
        "run": {"max_epochs": 2, "seed": 0},
        "data": {"batch_size": 8},
        "optimizer": {"lr": 0.01},
        "update": {"clip_norm": 1.0, "accumulation_steps": 2},
        "handlers": QUIET,
    }
    return runs.write_config(folder, base=base, **sections)


def trained_on_ranks(folder, count, **sections):
    """The summary of a run of so many ranks, each of which calls the command."""
    path = str(config(folder, **sections))
    ranks(count, lambda rank: command("train", path) and None)
    return runs.summary(folder)


STRATEGIES = {
    "ddp": (2, {"ddp_options": {"bucket_cap_mb": 1.0, "find_unused_parameters": True, "broadcast_buffers": False}}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "hsdp": (2, {"strategy": "hsdp", "shard_ranks": 2}),
    "tp": (8, {"tensor_parallel": 4}),
    "tp and fsdp": (4, {"strategy": "fsdp", "tensor_parallel": 2}),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    runs.trained(config(folder))
    return runs.summary(folder), newest(folder)


def newest(folder):
    """The weights of a run's last checkpoint, whole."""
    target = folder / "weights.safetensors"
    command("checkpoints", "export", folder / "run", "-o", target)
    from safetensors.torch import load_file

    return load_file(target)


@pytest.mark.row("I3")
@pytest.mark.parametrize("name", tiered(STRATEGIES, "fsdp"))
def test_a_run_of_any_strategy_ends_with_the_weights_of_one_process(name, alone, tmp_path):
    """With parameter groups, and 9 samples of validation: 2 batches or 1 on a rank."""
    size, distributed = STRATEGIES[name]
    summary = trained_on_ranks(tmp_path, 4, data={"batch_size": size}, distributed=distributed)
    assert summary["world_size"] == 4
    for key, expected in alone[1].items():
        torch.testing.assert_close(newest(tmp_path)[key], expected, rtol=0, atol=2e-6)
    assert summary["metrics"]["val/loss"] == pytest.approx(alone[0]["metrics"]["val/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("data", "update", "count", "updates"),
    [
        ({"batch_size": 10}, {}, 1, 3),
        ({"batch_size": 10, "drop_last": True}, {}, 1, 2),
        ({"batch_size": 10}, {}, 2, 2),  # the longest rank has 24 samples
        ({"batch_size": 10}, {"accumulation_steps": None, "global_micro_batches": 3}, 2, 2),
        ({"batch_size": 10}, {"accumulation_steps": None, "global_micro_batches": 3}, 1, 2),
    ],
)
def test_updates_of_a_run_are_those_of_the_longest_rank(data, update, count, updates, tmp_path):
    sections = {"data": data, "update": update, "run": {"max_epochs": 1}}
    assert trained_on_ranks(tmp_path, count, **sections)["iteration"] == updates


def test_each_named_optimizer_has_the_tasks_parameters_of_its_name(tmp_path):
    warmup = {"name": "constant", "warmup": 4}
    by_name = {"matrices": {"name": "SGD", "lr": 0.0}, "rest": {"name": "AdamW", "lr": 0.5, "schedule": warmup}}
    path = config(tmp_path, task_options={"by_name": True}, optimizers=by_name, MetricLogger={"every": 1})
    values = yaml.safe_load(path.read_text())
    del values["optimizer"]
    path.write_text(yaml.safe_dump(values))
    command("train", path)
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["lr/rest"] for line in log[:3]] == pytest.approx([0.0625, 0.125, 0.1875])
    assert log[-1]["loss"] != log[0]["loss"] and {line["lr/matrices"] for line in log} == {0.0}


def test_another_config_on_one_rank_is_refused_on_all(tmp_path):
    path = str(config(tmp_path))

    def start(rank):
        try:
            command("train", path, f"optimizer.lr=0.{rank + 1}")
        except CommandRefused as refused:
            return str(refused)

    texts = ranks(2, start)
    assert None not in texts and "optimizer.lr: 0.1 -> 0.2" in "".join(texts)
    assert not (tmp_path / "run").exists()


def train(*overrides, **sections):
    return lambda folder: command("train", config(folder, **sections), *overrides)


def on_two(**sections):
    """On two ranks, each of which is refused."""

    def refused(folder):
        path = str(config(folder, **sections))

        def start(rank):
            try:
                command("train", path)
            except CommandRefused as error:
                return str(error)

        for text in ranks(2, start):
            assert text is not None
        raise CommandRefused(text)

    return refused


DDP, OPTIMIZERS = "distributed.ddp_options", {"a": {"lr": 0.1}, "rest": {"lr": 0.1}}
INVARIANT = {"global_micro_batches": 2, "accumulation_steps": None, "accumulate": "rank_invariant"}
TOO_FEW = {**INVARIANT, "global_micro_batches": 1}
NO_PLAN, FSDP = {"distributed": {"tensor_parallel": 2}}, {"distributed": {"strategy": "fsdp"}}
CALLS = [
    ("ddp option", train(f"{DDP}.static_grap=true"), "static_grap did you mean 'static_graph'"),
    ("ddp flag", train(f"{DDP}.static_graph=1"), "static_graph got 1 true or false"),
    ("ddp number", train(f"{DDP}.bucket_cap_mb=0"), "bucket_cap_mb got 0"),
    ("ddp group", train(f"{DDP}.process_group=a"), "process_group"),
    ("ddp mapping", train(f"{DDP}=true"), "ddp_options got true mapping"),
    ("no plan", on_two(task_options={"parallel": False}, **NO_PLAN), "parallelize"),
    *of(
        "rank_invariant",
        [
            ("sharded invariant", on_two(update=INVARIANT, **FSDP), "rank_invariant fsdp"),
            ("invariant norm", on_two(update=INVARIANT, task_options={"norm": True}), "rank_invariant BatchNorm1d"),
            ("too few", on_two(update=TOO_FEW), "global_micro_batches 1 2 ranks"),
        ],
    ),
    ("groups by name", train(task_options={"by_name": True}), "parameter_groups matrices"),
    ("names", train(task_options={"by_name": True}, optimizers=OPTIMIZERS), "optimizers matrices"),
    ("no mapping", train(optimizers=OPTIMIZERS), "optimizers mapping"),
    ("drop_last", train("data.drop_last=true", "data.batch_size=99"), "batch_size 99 drop_last"),
]
test_refusals = refusals([(name, call, CommandRefused, words) for name, call, words in CALLS])
