"""DDP as a run meets it: the order in which gradients are summed, and buffers that each rank has for itself."""

import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, Update, create_evaluator, loader
from ignite_engine.handlers import Checkpoint, Evaluation
from tests.kit.processes import ranks
from tests.kit.saved import parts
from tests.kit.tiers import tiered
from tests.kit.tiny import Numbers, mse, one

# ---------------------------------------------------------------------------------------------------------- gradients


def layers():
    torch.manual_seed(4)
    return [nn.Linear(3, 50), nn.Tanh(), nn.BatchNorm1d(50), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)]


def whole_model():
    return DistributedDataParallel(nn.Sequential(*layers()))


def two_models():
    both = layers()
    return nn.Sequential(*(DistributedDataParallel(nn.Sequential(*each)) for each in (both[:3], both[3:])))


def with_update(model, optimizer):
    return Trainer(Update(model, optimizer, mse))


def with_own_update(model, optimizer):
    def update(engine, batch):
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Trainer(update)
    trainer.register("model", model, shared=True)
    trainer.register("optimizer", optimizer, shared=True)
    return trainer


def part_of_a_run(folder, make_model, make_trainer, *, stop):
    model = make_model()
    trainer = make_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    @trainer.on(Events.ITERATION_COMPLETED(once=3))
    def stop_here():
        if stop:
            trainer.request_stop("test")

    checkpoint = Checkpoint(folder)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=100))
    checkpoint.resume()
    trainer.run(loader(Numbers(42), 2), max_epochs=1)
    return one(model), trainer.reproducibility()


CASES = {
    "by default": (whole_model, with_update),
    "two models": (two_models, with_update),
    "own update": (whole_model, with_own_update),
}


@pytest.mark.parametrize("case", tiered(CASES, "own update"))
def test_gradients_are_summed_in_one_order_from_the_first_step_of_a_resumed_run_on(case, tmp_path):
    """Three ranks: the sum of two is the same in any order."""
    make_model, make_trainer = CASES[case]

    def work(rank):
        runs = (("whole", False), ("parts", True), ("parts", False))
        return [part_of_a_run(tmp_path / name, make_model, make_trainer, stop=stop) for name, stop in runs]

    for (whole, report), (stopped, _), (resumed, _) in ranks(3, work):
        assert torch.equal(whole, resumed) and not torch.equal(whole, stopped) and report == []


def power_sgd(model):
    model.register_comm_hook(PowerSGDState(None), powerSGD_hook)


def reports(rank):
    """What is said to be inexact, by the kind of DDP."""
    said = []
    hook = lambda model: model.register_comm_hook(None, allreduce_hook)  # noqa: E731
    for prepare, options in ((power_sgd, {}), (hook, {}), (bool, {"static_graph": True})):
        model = DistributedDataParallel(nn.Sequential(*layers()), **options)
        prepare(model)
        said.append(with_update(model, torch.optim.SGD(model.parameters(), lr=0.1)).reproducibility())
    return said


def test_static_graph_and_the_state_of_a_communication_hook_are_said_to_be_inexact():
    for (of_a_state,), without_state, (static,) in ranks(3, reports):
        assert "PowerSGDState" in of_a_state and "not saved" in of_a_state and "static_graph" in static
        assert without_state == []


# ------------------------------------------------------------------------------------------------------------ buffers


def with_batch_norm(rank, folder, evaluates, **options):
    """Statistics as they are evaluated, or just there, after iteration 2, those that are saved, and the report."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    wrapped = DistributedDataParallel(model, **options)
    trainer = Trainer(Update(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), mse), 2)
    seen = []

    def predict(bare, batch):
        seen.append(bare[1].running_mean.clone())
        return bare(batch[0]), batch[1]

    at = Events.ITERATION_COMPLETED(once=2)
    if evaluates:
        Evaluation(create_evaluator(wrapped, predict), loader(Numbers(4), 4)).attach(trainer, at)
    else:
        trainer.add_event_handler(at, lambda: seen.append(model[1].running_mean.clone()))
    Checkpoint(folder, keep_last=9).attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(loader(Numbers(24), 2, shuffle=True), max_epochs=2)
    return seen[0], parts(folder, 2)["model"]["1.running_mean"], one(model), trainer.reproducibility()


def test_each_rank_evaluates_the_statistics_that_are_saved(tmp_path):
    def work(rank):
        runs = {"evaluated": (True, {}), "not": (False, {}), "own": (True, {"broadcast_buffers": False})}
        return [with_batch_norm(rank, tmp_path / name, evaluates, **each) for name, (evaluates, each) in runs.items()]

    first, second = ranks(2, work)
    (seen, saved, weights, report), (unseen, _, weights_without, _), (own, _, _, inexact) = first
    assert torch.equal(seen, second[0][0]) and torch.equal(seen, saved) and report == []
    # they did differ: nothing was shared where nothing was evaluated, or where DDP is set not to
    assert not torch.equal(unseen, second[1][0]) and not torch.equal(own, second[2][0])
    assert torch.equal(weights, weights_without), "the training does not notice"
    assert len(inexact) == 1 and "1.running_mean" in inexact[0]
