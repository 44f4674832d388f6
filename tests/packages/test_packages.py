"""Runs with what people use beside torch: trained, stopped or killed, resumed to the same bits, the best loaded."""

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, Average
from torch import nn

from ignite_engine import Trainer, Update, create_evaluator, fit, load_weights, loader
from ignite_engine.handlers import Evaluation
from tests.kit import saved
from tests.kit.processes import ranks
from tests.kit.resume import Program, assert_resumes
from tests.packages.cases import CASES, VECTORS, layers, made, sum_loss

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def compiler_as_before():
    yield
    torch.compiler.set_stance("default")


def evaluator_of(model, loss):
    evaluator = create_evaluator(model, loss)
    Average().attach(evaluator, "loss")
    return evaluator


def program(case):
    def build():
        model, optimizer = made(case)
        if idist.get_world_size() > 1:
            model = nn.parallel.DistributedDataParallel(model, init_sync=False)  # it cannot send each type of weights
        trainer = Trainer(Update(model, optimizer, case.loss))
        Evaluation(evaluator_of(model, case.loss), [*case.data()]).attach(trainer)
        return trainer

    options = {"best": "val/loss", "strict": case.reason is None, **case.options}
    return Program(build, case.data, checkpoint=options)


@pytest.mark.parametrize("name", CASES)
def test_it_resumes_to_the_same_bits_and_its_best_is_what_was_measured(name, tmp_path):
    case = CASES[name]()
    assert_resumes(program(case), tmp_path, at=(4, 6, 8), how=("stop", "kill"), compare=case.compare)

    manifests = [saved.manifest(tmp_path / "whole", at) for at in saved.iterations(tmp_path / "whole")]
    best = min(manifest["metrics"]["val/loss"] for manifest in manifests)
    (reasons,) = {tuple(manifest["reproducibility"]) for manifest in manifests}
    assert (reasons == ()) if case.reason is None else (case.reason in reasons[0])
    model, _ = made(case)
    load_weights(model, tmp_path / "whole", "best", strict=not case.options)
    assert evaluator_of(model.eval(), case.loss).run([*case.data()]).metrics["loss"] == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_resume_to_the_same_bits(name, tmp_path):
    def train(rank):
        assert_resumes(program(CASES[name]()), tmp_path, at=(2,), how=("stop",))

    if not CASES[name]().shared:
        pytest.skip("its data is not shared out by the engine")
    ranks(2, train)


@pytest.mark.parametrize("name", [name for name in CASES if "weights" in name or "adapter" in name])
def test_a_run_of_fit_averages_and_digests_its_weights(name, tmp_path):
    case = CASES[name]()
    model, optimizer = made(case)
    settings = {"Checkpoint": case.options, "DigestTrail": {"every": 3}, "EMA": {"decay": 0.9}}
    run = fit(model, case.loss, case.data(), directory=tmp_path, max_epochs=1, optimizer=optimizer, handlers=settings)
    assert run.summary["weights_sha256"] and len((tmp_path / "trail.jsonl").read_text().splitlines()) == 2


def test_metrics_of_torchmetrics_are_those_of_ignite():
    torchmetrics = pytest.importorskip("torchmetrics")

    def evaluate(rank=0):
        torch.manual_seed(7)
        model, trained = nn.Linear(64, 3), layers()
        evaluator = create_evaluator(model, lambda model, batch: (model(batch), batch.argmax(1) % 3))
        Accuracy().attach(evaluator, "ignite")
        accuracy = torchmetrics.Accuracy("multiclass", num_classes=3, average="micro")
        evaluator.add_event_handler(Events.EPOCH_STARTED, accuracy.reset)
        evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: accuracy.update(*evaluator.state.output))
        evaluator.add_event_handler(
            Events.COMPLETED, lambda: evaluator.state.metrics.update(theirs=accuracy.compute().item())
        )
        trainer = Trainer(Update(trained, torch.optim.SGD(trained.parameters(), lr=0.1), sum_loss))
        Evaluation(evaluator, loader(VECTORS[:21], 4)).attach(trainer, Events.STARTED)
        metrics = trainer.run(loader(VECTORS, 4), max_iters=1).metrics
        return metrics["val/ignite"], metrics["val/theirs"]

    for ours, theirs in (evaluate(), *ranks(2, evaluate)):
        assert ours == pytest.approx(theirs, abs=1e-7)


def test_optuna_prunes_on_all_ranks_at_the_same_iteration():
    optuna = pytest.importorskip("optuna")

    def search(rank):
        ended = []

        def objective(trial):
            """One rank has the study and decides; the others hear of it."""
            chosen = [trial and trial.suggest_categorical("lr", [1e-3, 1e3])]
            torch.distributed.broadcast_object_list(chosen)
            torch.manual_seed(7)
            model = nn.parallel.DistributedDataParallel(layers())
            trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=chosen[0]), sum_loss))
            Evaluation(evaluator_of(model, sum_loss), loader(VECTORS, 4)).attach(trainer)

            @trainer.on(Events.EPOCH_COMPLETED)
            def report():
                is_bad = [False]
                if trial:
                    trial.report(trainer.state.metrics["val/loss"], trainer.state.epoch)
                    is_bad[0] = trial.should_prune()
                torch.distributed.broadcast_object_list(is_bad)
                if is_bad[0]:
                    trainer.finish("pruned")

            state = trainer.run(loader(VECTORS, 4), max_epochs=3)
            ended.append((chosen[0], state.iteration, state.reason))
            if trial and state.reason == "pruned":
                raise optuna.TrialPruned
            return state.metrics["val/loss"]

        if rank:
            for _ in range(2):
                objective(None)
            return ended
        sampler = optuna.samplers.GridSampler({"lr": [1e-3, 1e3]}, seed=1)
        study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.ThresholdPruner(upper=1e6))
        study.optimize(objective, n_trials=2)
        assert sorted(trial.state.name for trial in study.trials) == ["COMPLETE", "PRUNED"]
        return ended

    first, second = ranks(2, search)
    assert sorted(first) == sorted(second) == [(1e-3, 9, "max_epochs"), (1e3, 3, "pruned")]
