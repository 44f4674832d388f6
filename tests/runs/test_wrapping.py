"""What the ``distributed`` section makes of a task's model, on one process and on four ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Task, seed_everything
from ignite_engine.config import ConfigError, ConfigWarning, config_from_dict
from ignite_engine.ranks import agreement, data_rank
from ignite_engine.runs import recipe
from ignite_engine.runs.wrapping import _renewed, declare_mesh, wrap
from tests.kit.tiny import Numbers, linear, mse
from tests.ranks.forkserver import on_ranks
from tests.ranks.test_wrapping import SAMPLES, Net, Tokens, count_tokens, loss_fn, whole

QUIET = dict.fromkeys(("clearml", "progress", "report", "console", "memory", "throughput"), False)


def config(distributed=None, **sections):
    return config_from_dict(
        {"task": "unused.py:build", "run": {"max_epochs": 2}, "distributed": distributed or {}, **sections}
    )


def test_rank_invariant_run_is_not_sharded(monkeypatch):
    monkeypatch.setattr(agreement, "world_size", lambda: 2)
    update = {"global_micro_batches": 2, "rank_invariant": True}

    with pytest.raises(ConfigError, match=r"update.rank_invariant: got true with fsdp"):
        declare_mesh(config({"strategy": "fsdp"}, update=update))


def test_rank_invariant_model_is_not_wrapped_and_refused_by_the_name_of_the_setting(
    monkeypatch,
):
    monkeypatch.setattr(agreement, "world_size", lambda: 2)
    settings = config(update={"global_micro_batches": 2, "rank_invariant": True})
    model = linear()

    assert wrap(settings, Task(model, mse, Numbers(4)), None).model is model
    with pytest.raises(ConfigError, match=r"update.rank_invariant: .*0 is a BatchNorm1d that trains"):
        wrap(settings, Task(nn.Sequential(nn.BatchNorm1d(3), linear()), mse, Numbers(4)), None)


def test_sync_bn_is_refused_where_torch_lacks_it(monkeypatch):
    monkeypatch.setattr(agreement, "world_size", lambda: 2)

    with pytest.raises(ConfigError, match=r"distributed.sync_bn: got true on cpu; torch has it on accelerators only"):
        wrap(config({"sync_bn": True}), Task(linear(), mse, Numbers(4)), None)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"static_grap": True},
            r"\.static_grap: got true, but DistributedDataParallel has no .*did you mean 'static_graph'",
        ),
        ({"static_graph": 1}, r"\.static_graph: got 1, expected true or false\."),
        ({"broadcast_buffers": "no"}, r"\.broadcast_buffers: got 'no', expected true or false\."),
        ({"bucket_cap_mb": 0}, r"\.bucket_cap_mb: got 0, expected a number more than 0\."),
        ({"process_group": "a"}, r"\.process_group: got 'a', but DistributedDataParallel has no option"),
        (True, r": got true, expected a mapping\."),
    ],
)
def test_ddp_options_are_those_of_torch(options, line):
    with pytest.raises(ConfigError, match=rf"distributed\.ddp_options{line}"):
        config({"ddp_options": options})


@pytest.mark.parametrize(
    ("distributed", "key"),
    [
        ({"strategy": "fsdp", "ddp_options": {"static_graph": True}}, "ddp_options"),
        ({"strategy": "fsdp", "shard_ranks": 2}, "shard_ranks"),
        ({"param_dtype": "bf16"}, "param_dtype"),
        ({"loss_parallel": True}, "loss_parallel"),
    ],
)
def test_setting_of_another_strategy_has_no_effect(distributed, key):
    with pytest.warns(ConfigWarning, match=rf"distributed.{key} has no effect without "):
        config(distributed)


# -- on four ranks ----------------------------------------------------------------------------------------------------


def split(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def task_of(model=None):
    model = model or Net()
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    data = Tokens(SAMPLES)
    return Task(
        model,
        loss_fn,
        data,
        weight_fn=count_tokens,
        parameter_groups=groups,
        val_sets={"val": Tokens(9)},
        parallelize=split,
    )


def train(folder, batch_size, distributed, task=None):
    settings = config_from_dict(
        {
            "task": "unused.py:build",
            "run": {"max_epochs": 2, "directory": folder},
            "data": {"batch_size": batch_size},
            "optimizer": {"lr": 0.01},
            "update": {"clip_norm": 1.0, "accumulation_steps": 2},
            "logging": QUIET,
            "distributed": distributed,
            "ema": {"decay": 0.5},
        }
    )
    seed_everything(0)
    if task is None:
        task = task_of()
        with torch.no_grad():
            for parameter in task.model.parameters():
                parameter += agreement.rank()  # rank 0's are taken
    run = recipe.build_run(settings, task)
    model = run.trainer.update.model
    drawn = torch.rand(1).item()
    summary = run.train()
    inner = getattr(model, "module", model)
    local = inner.blocks[0].up.weight
    return {
        "weights": whole(model),
        "kind": type(model).__name__,
        "local": tuple((local.to_local() if hasattr(local, "to_local") else local).shape),
        "digest": summary["weights_sha256"],
        "loss": summary["metrics"]["val/loss"],
        "data rank": data_rank(),
        "drawn": drawn,
    }


CASES = {
    "ddp": (
        2,
        {"ddp_options": {"bucket_cap_mb": 1.0, "find_unused_parameters": True, "broadcast_buffers": False}},
    ),
    "fsdp": (2, {"strategy": "fsdp"}),
    "hsdp": (2, {"strategy": "hsdp", "shard_ranks": 2}),
    "tp": (8, {"tensor_parallel": 4}),
    "tp and fsdp": (4, {"strategy": "fsdp", "tensor_parallel": 2}),
}


def one_of_four_ranks(rank, folder):
    results = {name: train(f"{folder}/{name}", size, distributed) for name, (size, distributed) in CASES.items()}
    own = DistributedDataParallel(Net())
    results["wrapped by the task"] = train(f"{folder}/own", 2, {"ddp_options": {"static_graph": True}}, task_of(own))
    with pytest.raises(ConfigError) as error:
        wrap(plain := config({"tensor_parallel": 4}), Task(Net(), loss_fn, Tokens(4)), declare_mesh(plain))
    results["no plan"] = str(error.value)
    torch.save(results, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(str(tmp_path_factory.mktemp("alone")), 8, {})


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(4, one_of_four_ranks, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(4)]


EXPECTED = {  # the class, the shape of this rank's part of a weight of 16 x 8, and the data rank of each rank
    "ddp": ("DistributedDataParallel", (16, 8), [0, 1, 2, 3]),
    "fsdp": ("FSDPNet", (4, 8), [0, 1, 2, 3]),
    "hsdp": ("FSDPNet", (8, 8), [0, 1, 2, 3]),
    "tp": ("Net", (4, 8), [0, 0, 0, 0]),
    "tp and fsdp": ("FSDPNet", (4, 8), [0, 0, 1, 1]),
    "wrapped by the task": ("DistributedDataParallel", (16, 8), [0, 1, 2, 3]),
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", EXPECTED)
def test_run_of_any_strategy_ends_with_the_weights_of_one_process(ranks, alone, case):
    """With parameter groups, weights that differ at first, and 9 samples of validation: 2 batches or 1 on a rank."""
    kind, shape, places = EXPECTED[case]
    for each, place in zip(ranks, places, strict=True):
        found = each[case]
        assert (found["kind"], found["local"], found["data rank"]) == (kind, shape, place)
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=0, atol=2e-7)
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert found["digest"] == ranks[0][case]["digest"]


@pytest.mark.row("I3")
@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_that_share_data_draw_the_same_random_numbers(ranks):
    for case, (_, _, places) in EXPECTED.items():
        drawn = [each[case]["drawn"] for each in ranks]
        assert len(set(drawn)) == len(set(places))
        assert all(drawn[rank] == drawn[places.index(place)] for rank, place in enumerate(places))


def test_parameters_that_were_replaced_are_so_in_the_groups_of_each_optimizer():
    before, after = nn.Linear(2, 1), nn.Linear(2, 1)
    names = {id(parameter): name for name, parameter in before.named_parameters()}
    groups = {"one": [before.weight], "two": [{"params": before.bias, "lr": 0.5}]}
    renewed = _renewed(groups, names, after)

    assert renewed["one"][0] is after.weight
    assert renewed["two"][0]["params"][0] is after.bias and renewed["two"][0]["lr"] == 0.5
