"""A run resumed on three ranks: DDP sums gradients in the order of the uninterrupted run, from the first step on."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, Update, loader
from ignite_engine.handlers import Checkpoint
from ignite_engine.ranks import ddp_buckets
from tests.kit.tiny import Numbers, mse, one
from tests.ranks.forkserver import on_ranks

pytestmark = pytest.mark.distributed

CASES = {
    "by default": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.001},
    "unused parameters": {"find_unused_parameters": True},
    "own update": {},
    "two models": {},
    "static graph": {"static_graph": True},
    "not settled": {},
}


def _trainer(case):
    torch.manual_seed(4)
    layers = [nn.Linear(3, 50), nn.Tanh(), nn.BatchNorm1d(50), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)]
    model = nn.Sequential(*layers)
    if case == "two models":
        model = nn.Sequential(*(DistributedDataParallel(nn.Sequential(*each)) for each in (layers[:3], layers[3:])))
    wrapped = model if case == "two models" else DistributedDataParallel(model, **CASES[case])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if case != "own update":
        return Trainer(Update(wrapped, optimizer, mse))

    def update(engine, batch):
        optimizer.zero_grad()
        loss = mse(wrapped, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Trainer(update)
    trainer.register("model", wrapped, shared=True)
    trainer.register("optimizer", optimizer, shared=True)
    return trainer


def _weights(case, folder, *, stop):
    trainer = _trainer(case)
    if stop:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: trainer.request_stop("test"))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), trainer.vote_at_next_boundary)
    checkpoint = Checkpoint(folder)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=100))
    checkpoint.resume()
    trainer.run(loader(Numbers(42), 2), max_epochs=1)
    model = trainer.registry.objects["model"]
    return one(getattr(model, "model", model)), trainer.reproducibility()


def _one_of_three_ranks(rank, name):
    folder = Path(name)
    found = {}
    for case in CASES:
        if case == "not settled":
            ddp_buckets._settled.add = lambda wrapped: None
            ddp_buckets._keeps_its_buckets = lambda wrapped: True
        whole, report = _weights(case, folder / case / "whole", stop=False)
        _weights(case, folder / case / "resumed", stop=True)
        resumed, _ = _weights(case, folder / case / "resumed", stop=False)
        found[case] = (torch.equal(whole, resumed), report)
    if rank == 0:
        torch.save(found, folder / "found")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("buckets")
    on_ranks(3, _one_of_three_ranks, folder)
    result = torch.load(folder / "found")
    return result


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("static graph", "not settled")])
def test_resumed_on_three_ranks_to_the_same_bits(found, case):
    same, report = found[case]
    assert same and report == []


def test_static_graph_is_said_to_be_inexact(found):
    _, report = found["static graph"]
    assert len(report) == 1 and "static_graph" in report[0]


def test_bits_differ_where_ddp_settles_them_later(found):
    assert not found["not settled"][0]


def test_sparse_and_complex_parameters_have_a_part_of_their_layout():
    embedding, spectrum = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(2, dtype=torch.complex64))
    parameters = [embedding.weight, spectrum, nn.Parameter(torch.ones(()))]
    ddp_buckets._Zeros(embedding, parameters)().backward()
    assert embedding.weight.grad is not None and embedding.weight.grad.is_sparse
    assert spectrum.grad is not None and not spectrum.grad.any()


class _Kept:
    """Saves the state of a hook."""

    def __init__(self, hook):
        self.hook = hook

    def state_dict(self):
        return {"hook": self.hook.__getstate__()}

    def load_state_dict(self, state):
        self.hook.__setstate__(state["hook"])


def _with_hooks(rank, folder):
    def reasons(hook, state, kept=None):
        model = DistributedDataParallel(nn.Linear(3, 1))
        model.register_comm_hook(state, hook)
        trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse))
        if kept is not None:
            trainer.register("kept", kept)
        return trainer.reproducibility()

    reason = "the state of DistributedDataParallel's communication hook (PowerSGDState) is not saved"
    power = PowerSGDState(None)
    assert reasons(powerSGD_hook, power) == [reason]
    assert reasons(powerSGD_hook, power, _Kept(power)) == []
    assert reasons(allreduce_hook, None) == reasons(allreduce_hook, dist.group.WORLD) == []


def test_the_state_of_a_communication_hook_is_said_to_be_unsaved(tmp_path):
    on_ranks(2, _with_hooks, tmp_path)


def test_ddp_has_the_device_of_its_module_where_ranks_share_one(tmp_path):
    """DDP's own attributes, as Ignite's auto_model sets them on the second rank of one device; no CPU has devices."""
    parameters = [SimpleNamespace(device=torch.device("cuda", 0))]
    wrapped = SimpleNamespace(
        module=SimpleNamespace(parameters=lambda: iter(parameters)), device_ids=[1], output_device=1
    )
    ddp_buckets._take_device_of_module(wrapped)
    assert (wrapped.device_ids, wrapped.output_device) == ([0], 0)

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        made = vars(DistributedDataParallel(nn.Linear(1, 1)))
    finally:
        dist.destroy_process_group()
    assert {"device_ids", "output_device"} <= made.keys()
