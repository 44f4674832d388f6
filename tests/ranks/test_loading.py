"""Weights that are loaded while two gloo ranks train: rank 0 chooses, both load the same, whole or sharded."""

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import create_evaluator, load_weights, loader, seed_everything
from ignite_engine.checkpoint.sources import LoadSource
from ignite_engine.handlers import Checkpoint, Evaluation
from ignite_engine.handlers.model_bank import ModelBank
from tests.kit.processes import ranks
from tests.kit.sharded import gathered, in_layout, net, trainer_in
from tests.kit.tiny import Numbers, linear, numbers_loader, one, trainer_of

# ------------------------------------------------------------------------------------------------------------- a bank


def publish(folder, iteration, value, hidden=4):
    """Another run has saved weights that are all ``value``."""
    model = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Dropout(0.5), nn.Linear(hidden, 1))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    trainer = trainer_of(model, lr=0.0)
    Checkpoint(folder).attach(trainer, Events.COMPLETED)
    trainer.run(numbers_loader(), max_iters=iteration)


def train(rank, source, stock, folder, stop_at=None, comes=None):
    """A run whose bank looks every three iterations; at each of ``comes`` rank 0 puts one of ``stock`` there.

    Returns:
        By iteration what was loaded; the weights at the end; the lines of what was refused; the report.
    """
    seed_everything(3)
    loads, refused, handler = {}, [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: refused.append(record.getMessage())
    handler.addFilter(lambda record: "is refused" in record.getMessage())
    logging.getLogger("ignite_engine").addHandler(handler)
    trainer = trainer_of(DistributedDataParallel(linear(dropout=True)), lr=0.01)
    checkpoint = Checkpoint(folder, keep_last=99)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=100))
    bank = ModelBank([LoadSource(source, parts=["model:3.*"], required=False, dynamic=True)])
    bank.attach(trainer, Events.ITERATION_COMPLETED(every=3))
    if checkpoint.resume() is None:
        bank.load()

    @trainer.on(Events.ITERATION_STARTED)
    def act():
        if rank == 0 and (name := (comes or {}).get(trainer.state.iteration)):
            Path(source).mkdir(exist_ok=True)
            shutil.copytree(stock / name / name, Path(source) / "copy")
            (Path(source) / "copy").rename(Path(source) / name)
        if loaded := {each["at_iteration"]: Path(each["path"]).name for each in bank.loaded.values()}:
            loads.update(loaded)

    @trainer.on(Events.ITERATION_COMPLETED)
    def stop():
        if trainer.state.iteration == stop_at:
            trainer.request_stop("here")

    trainer.run(numbers_loader(24), max_iters=15)
    logging.getLogger("ignite_engine").removeHandler(handler)
    return loads, one(trainer.update.model), refused, trainer.reproducibility()


@pytest.fixture
def stock(tmp_path):
    for iteration, *model in ((5, 0.3, 7), (10, 0.5), (20, 0.7), (30, 0.75)):
        publish(tmp_path / "stock" / f"iteration_{iteration:08}", iteration, *model)
    torn = tmp_path / "stock" / "iteration_00000020" / "iteration_00000020" / "shared.safetensors"
    torn.write_bytes(torn.read_bytes()[:100])
    return tmp_path / "stock"


def test_both_ranks_load_newer_weights_alike_refuse_unfit_ones_and_resume_to_the_same_bits(stock, tmp_path):
    comes = {1: "iteration_00000005", 4: "iteration_00000010", 7: "iteration_00000020", 10: "iteration_00000030"}
    folder = tmp_path / "run"

    def work(rank):
        parts = (tmp_path / "other source", stock, tmp_path / "parts")
        whole = train(rank, tmp_path / "source", stock, folder, None, comes)
        return whole, train(rank, *parts, 8, comes), train(rank, *parts, None, comes)

    found = ranks(2, work)
    for whole, stopped, resumed in found:
        assert stopped[0] == {6: "iteration_00000010"}
        assert whole[0] == resumed[0] == {6: "iteration_00000010", 12: "iteration_00000030"}
        assert torch.equal(whole[1], resumed[1]) and torch.equal(whole[1], found[0][0][1])
    (_, _, refused, report), (_, _, none, _) = (whole for whole, *_ in found)
    assert none == [] and any("outside of the run" in each for each in report)
    for line, words in zip(
        refused, ("iteration_00000005 3.weight", "iteration_00000020 shared.safetensors"), strict=True
    ):
        assert all(word in line for word in words.split()), line
    assert sorted(each.name for each in folder.glob("iteration_*")) == [f"iteration_{each:08}" for each in (6, 12, 15)]


def test_what_one_rank_cannot_read_is_loaded_on_none(stock, tmp_path):
    """A path that leads somewhere else on rank 1, as a mount that it lacks would."""

    def work(rank):
        (tmp_path / f"view_{rank}").mkdir()
        os.chdir(tmp_path / f"view_{rank}")
        return train(rank, "source", stock, tmp_path / "run", None, {4: "iteration_00000010"})

    first, second = ranks(2, work)
    assert first[0] == second[0] == {} and torch.equal(first[1], second[1])
    assert len(first[2]) == 1 and "iteration_00000010" in first[2][0] and second[2] == []


def head_and_moments(trainer):
    """Of the first layer, and of the last one."""
    update, found = trainer.update, []
    (optimizer,) = update.optimizers.values()
    model = getattr(update.model, "module", update.model)
    for layer in (model[0], model[4]):
        moments = [optimizer.state[each]["exp_avg"] for each in layer.parameters()]
        found.append(torch.cat([gathered(each).detach().reshape(-1) for each in (*layer.parameters(), *moments)]))
    return found


@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.nightly), "fsdp"])
def test_sharded_weights_and_moments_are_loaded_again(layout, tmp_path):
    def work(rank):
        teacher, _, data = trainer_in("fsdp", tmp_path / "teacher")
        other = net()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.5)
        student, _, own_data = trainer_in(layout, tmp_path / "student", model=other)
        wanted = LoadSource(tmp_path / "teacher", ["model:0.*", "optimizer:0.*"], required=False, dynamic=True)
        bank, found = ModelBank([wanted], reset_optimizers=True), []
        bank.attach(student, Events.ITERATION_COMPLETED(every=2))
        student.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: teacher.run(data, max_epochs=1))

        @student.on(Events.ITERATION_STARTED(once=5))
        def compare():
            pairs = zip(head_and_moments(teacher), head_and_moments(student), strict=True)
            found.extend(torch.equal(*pair) for pair in pairs)

        student.run(own_data, max_epochs=2)
        return found, bank.loaded[0]["at_iteration"]

    assert ranks(2, work) == [([True, False], 4)] * 2


# ------------------------------------------------------------------------------------------------------- the best one


@pytest.mark.parametrize(("layout", "background"), [("ddp", True), ("fsdp", False)])
def test_two_ranks_restore_the_best_weights_which_were_evaluated(layout, background, tmp_path):
    """The metric says that iteration 3 is the best, which each rank sees otherwise."""

    def work(rank):
        trainer, _, data = trainer_in(layout, tmp_path / "other", optimizer="sgd")
        model, seen = trainer.update.model, []
        evaluator = create_evaluator(model, lambda model, batch: seen.append(float(model(batch[0]).sum())), {})
        Evaluation(evaluator, loader(Numbers(8), 4)).attach(trainer, Events.ITERATION_COMPLETED(once=3))
        options = {"best": "val/score", "mode": "max", "keep_last": 1, "background": background}
        checkpoint = Checkpoint(tmp_path / "run", name="other", **options)
        checkpoint.attach(trainer, Events.COMPLETED)

        @trainer.on(Events.ITERATION_COMPLETED)
        def score():
            trainer.state.metrics["val/score"] = -abs(trainer.state.iteration - 3) + 0.0

        trainer.run(data, max_iters=6)
        best = checkpoint.restore_best()
        model.eval()
        outputs = [float(model(batch[0]).sum()) for batch in loader(Numbers(8), 4)]
        fresh, _ = in_layout(layout)
        load_weights(fresh, tmp_path / "run", "best")
        plain = net()
        load_weights(plain, tmp_path / "run" / "best")
        models = [
            torch.cat([gathered(each).detach().reshape(-1) for each in one.parameters()])
            for one in (model, fresh, plain)
        ]
        return best.iteration, best.path.name, outputs == seen, models

    for iteration, name, as_seen, (model, fresh, plain) in ranks(2, work):
        assert (iteration, name, as_seen) == (3, "iteration_00000003", True)
        assert torch.equal(model, plain) and torch.equal(fresh, plain)
