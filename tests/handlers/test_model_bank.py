"""A bank of sources: a newer one is loaded at the next boundary, a broken one is refused, a resume loads none twice."""

import contextlib
import logging
import shutil
from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average

from ignite_engine import Trainer, Update, create_evaluator
from ignite_engine.checkpoint.sources import LoadSource
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.errors import NotExact
from ignite_engine.handlers import Checkpoint, Evaluation
from ignite_engine.handlers.model_bank import ModelBank
from tests.kit import saved
from tests.kit.refusals import refuses
from tests.kit.tiny import linear, mse, numbers_loader, one, weights

HEAD = {"parts": ["model:3.*"]}
NAMES = ["0.weight", "0.bias", "3.weight", "3.bias"]
EVERY_3, EACH = Events.ITERATION_COMPLETED(every=3), Events.ITERATION_COMPLETED
SHAPES = {name: value.shape for name, value in linear(dropout=True).state_dict().items()}


def state_of(value):
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


def publish(folder, iteration, value, **facts):
    """Another run saves weights that are all ``value``."""
    store = CheckpointStore(folder)
    return store.save({"model": state_of(value)}, {}, iteration=iteration, epoch=1, kinds={"model": "model"}, **facts)


def run_of(folder, sources, event=EVERY_3, **options):
    model = linear(dropout=True)
    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters(), lr=0.01), mse))
    checkpoint, bank = Checkpoint(folder, keep_last=99), ModelBank(sources, **options)
    checkpoint.attach(trainer)
    bank.attach(trainer, event)
    return trainer, bank, checkpoint


def begun(folder, sources, event=EACH, **options):
    """Resumed where the folder has a checkpoint, else begun with the sources; and its loads."""
    trainer, bank, checkpoint = run_of(folder, sources, event, **options)
    if checkpoint.resume() is None:
        bank.load()
    return trainer, loads_of(trainer, bank)


def at_iteration(trainer, iteration, work):
    trainer.add_event_handler(Events.ITERATION_STARTED(once=iteration), lambda: work())


def loads_of(trainer, bank):
    """Gets what the bank has loaded, at each iteration where that is something else."""
    seen = []

    def record():
        now = {at: (Path(each["path"]).name, each["at_iteration"]) for at, each in bank.loaded.items()}
        if not seen or seen[-1][1] != now:
            seen.append((trainer.state.iteration, now))

    trainer.add_event_handler(Events.ITERATION_STARTED, record)
    return seen


def iterations_of(loads):
    return [iteration for iteration, _ in loads]


def files_in(folder):
    return {str(each): (each.lstat().st_ino, each.lstat().st_mtime_ns) for each in (folder, *folder.rglob("*"))}


# -- what is loaded, and when ------------------------------------------------------------------------------------------


def test_a_newer_one_is_loaded_at_the_next_boundary_and_nothing_is_written_there(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    source, began, before = tmp_path / "source", {}, []
    publish(source, 10, 0.25)
    trainer, loads = begun(tmp_path / "run", [LoadSource(source, dynamic=True)], EVERY_3)
    assert (weights(trainer) == 0.25).all()
    at_iteration(trainer, 4, lambda: publish(source, 20, 0.5))
    at_iteration(trainer, 5, lambda: before.append(files_in(source)))
    trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda: began.update({trainer.state.iteration: weights(trainer)})
    )
    trainer.run(numbers_loader(), max_iters=12)

    assert [iteration for iteration, each in began.items() if (each == 0.5).all()] == [7]
    assert loads == [(1, {0: ("iteration_00000010", 0)}), (7, {0: ("iteration_00000020", 6)})]
    assert before == [files_in(source)] and saved.iterations(tmp_path / "run") == [6, 12]
    parts = saved.parts(tmp_path / "run", 6)
    assert (parts["model"]["0.weight"] == 0.5).all() and parts["model_bank"]["loaded"]["0"]["iteration"] == 20
    assert caplog.text.count("loaded again: ") == 1 and "4 loaded: model:0.weight" in caplog.text


@pytest.mark.parametrize("kind", ["link", "checkpoint"])
def test_what_is_given_by_its_own_path_is_loaded_again_when_it_was_replaced(tmp_path, kind):
    path = tmp_path / ("current" if kind == "checkpoint" else "weights.pt")

    def replace(iteration, value):
        if kind == "checkpoint":
            new = publish(tmp_path / "store", iteration, value)
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(new, path)
            return
        target = tmp_path / f"weights_{iteration}.pt"
        torch.save(state_of(value), target)
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    replace(2, 0.25)
    trainer, loads = begun(tmp_path / "run", [LoadSource(path, dynamic=True)])
    at_iteration(trainer, 3, lambda: replace(1, 0.5))  # an older one, too: it is what was asked for
    at_iteration(trainer, 5, lambda: path.unlink() if kind == "link" else None)
    trainer.run(numbers_loader(), max_iters=7)
    replace(1, 0.5)
    trainer, again = begun(tmp_path / "run", [LoadSource(path, dynamic=True)])
    trainer.run(numbers_loader(), max_iters=10)

    assert iterations_of(loads) == [1, 4]
    assert len(again) == (1 if kind == "link" else 2)  # of a file what is in it counts, not when it was written


def test_the_best_one_is_loaded_when_it_is_another_one(tmp_path):
    source, by_loss = tmp_path / "source", {"metric": "loss", "mode": "min"}
    publish(source, 1, 0.1, metrics={"loss": 1.0}, best=by_loss)
    best = LoadSource(source / "best", dynamic=True)
    trainer, loads = begun(tmp_path / "run", [best])
    at_iteration(trainer, 2, lambda: publish(source, 2, 0.2, metrics={"loss": 2.0}, best=by_loss))
    at_iteration(trainer, 4, lambda: publish(source, 3, 0.3, metrics={"loss": 0.5}, best=by_loss))
    at_iteration(trainer, 6, lambda: CheckpointStore(source).add_metrics(source / "iteration_00000002", {"loss": 0}))
    trainer.run(numbers_loader(), max_iters=8)

    assert [(each, names[0][0][-1]) for each, names in loads] == [(1, "1"), (5, "3"), (7, "2")]


def test_a_newer_one_with_the_same_bytes_is_loaded_as_the_run_has_trained_its_copy(tmp_path):
    source, began = tmp_path / "source", {}
    publish(source, 1, 0.25)
    sources = [LoadSource(source, dynamic=True)]
    trainer, loads = begun(tmp_path / "run", sources)
    at_iteration(trainer, 3, lambda: publish(source, 2, 0.25))
    trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda: began.update({trainer.state.iteration: weights(trainer)})
    )
    trainer.run(numbers_loader(), max_iters=6)
    trainer, again = begun(tmp_path / "run", sources)
    trainer.run(numbers_loader(), max_iters=9)

    assert iterations_of(loads) == [1, 4] and len(again) == 1
    assert not (began[3] == 0.25).all() and (began[4] == 0.25).all()


def test_a_strict_source_may_lack_what_another_has_brought(tmp_path):
    """A file with the head alone, again and again; after a resume too."""
    publish(tmp_path / "base", 1, 0.25)
    head = tmp_path / "head.pt"

    def write(value):
        torch.save({name: each for name, each in state_of(value).items() if name.startswith("3")}, head)

    write(0.5)
    for end, value in ((3, 0.6), (6, 0.7)):
        sources = [LoadSource(tmp_path / "base"), LoadSource(head, dynamic=True)]
        trainer, _ = begun(tmp_path / "run", sources)
        layer, seen = trainer.update.model[3], []
        at_iteration(trainer, end - 1, lambda: write(value))  # noqa: B023  # in this turn
        at_iteration(trainer, end, lambda: seen.append(bool((one(layer) == value).all())))  # noqa: B023
        trainer.run(numbers_loader(), max_iters=end)
        assert seen == [True]


@pytest.mark.parametrize(
    ("evaluated", "values"),
    [(Events.EPOCH_COMPLETED, [0.5]), (Events.ITERATION_COMPLETED(once=6), [])],  # of what is saved, or was before
)
def test_a_checkpoint_has_no_metric_of_other_weights(tmp_path, evaluated, values):
    event = Events.EPOCH_COMPLETED
    trainer, _ = begun(tmp_path / "run", [LoadSource(tmp_path / "source", required=False, dynamic=True)], event)
    Checkpoint(tmp_path / "best", name="best", best="val/weight", mode="max", keep_last=9).attach(trainer, event)
    predict = lambda model, batch: model[0].bias[0]  # noqa: E731
    evaluator = create_evaluator(trainer.update.model, predict, {"weight": Average()})
    Evaluation(evaluator, numbers_loader(2)).attach(trainer, evaluated)
    at_iteration(trainer, 2, lambda: publish(tmp_path / "source", 1, 0.5))
    trainer.run(numbers_loader(), max_epochs=1)

    metrics = saved.manifest(tmp_path / "best", 6)["metrics"]
    assert [value for key, value in metrics.items() if key == "val/weight"] == values


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_is_not_sound_is_refused_and_named_and_the_next_valid_one_is_taken(tmp_path, caplog):
    source = tmp_path / "source"
    publish(source, 1, 0.25)
    trainer, loads = begun(tmp_path / "run", [LoadSource(source, dynamic=True)])

    def tear():
        publish(source, 2, 0.5)
        saved.damage(source, 2)

    def other():
        CheckpointStore(source).save({"model": {name: torch.ones(9) for name in NAMES}}, {}, iteration=4, epoch=1)

    at_iteration(trainer, 2, tear)
    at_iteration(trainer, 3, lambda: publish(source, 3, 0.6, healthy=False))
    at_iteration(trainer, 4, other)
    at_iteration(trainer, 6, lambda: publish(source, 5, 0.75))
    trainer.run(numbers_loader(), max_iters=9)

    assert loads == [(1, {0: ("iteration_00000001", 0)}), (7, {0: ("iteration_00000005", 6)})]
    text = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    for words in (
        "iteration_00000002: shared.safetensors",
        "iteration_00000003: its weights are not finite",
        "4 unexpected",
    ):
        assert sum(words in line for line in text) == 1, (words, text)


def test_a_copy_that_is_not_complete_yet_is_taken_when_it_is(tmp_path):
    """As a tool that copies file by file leaves it for a while."""
    source = tmp_path / "source"
    publish(source, 1, 0.25)
    path = publish(tmp_path / "elsewhere", 2, 0.5)
    trainer, loads = begun(tmp_path / "run", [LoadSource(source, dynamic=True)])

    def copy_manifest():
        (source / path.name).mkdir()
        shutil.copy(path / "manifest.json", source / path.name)

    at_iteration(trainer, 2, copy_manifest)
    at_iteration(trainer, 4, lambda: shutil.copy(path / "shared.safetensors", source / path.name))
    trainer.run(numbers_loader(), max_iters=6)

    assert iterations_of(loads) == [1, 5]


def test_the_report_says_that_it_is_outside_of_the_run(tmp_path):
    publish(tmp_path / "source", 1, 0.5)
    for dynamic in (False, True):
        sources = [LoadSource(tmp_path / "source", dynamic=dynamic)]
        trainer, _ = begun(tmp_path / f"run_{dynamic}", sources)
        assert [str(tmp_path / "source") in each for each in trainer.reproducibility()] == [True] * dynamic
        Checkpoint(tmp_path / f"strict_{dynamic}", name="strict", strict=True).attach(trainer)
        with pytest.raises(NotExact) if dynamic else contextlib.nullcontext():
            trainer.run(numbers_loader(), max_iters=1)


def test_what_makes_no_sense_is_refused(tmp_path, caplog):
    dynamic = LoadSource(tmp_path / "run", required=False, dynamic=True)
    trainer, _, checkpoint = run_of(tmp_path / "run", [dynamic])
    with pytest.raises(ValueError, match="where this run saves"):  # with the handler that says so in a second line
        trainer.run(numbers_loader(), max_iters=1)
    refuses(lambda: checkpoint.load([dynamic]), ValueError, "dynamic ModelBank")
    refuses(lambda: LoadSource("a", ["*"], dynamic=True), ValueError, "model, optimizer '*'")
    refuses(lambda: LoadSource("a", ["model", "counters"], dynamic=True), ValueError, "model, optimizer 'counters'")
    refuses(ModelBank([dynamic]).load, RuntimeError, "trainer attach(")
    trainer, _, _ = run_of(tmp_path / "other", [LoadSource("a")])
    trainer.run(numbers_loader(), max_iters=1)
    assert "no effect without its load()" in caplog.text


# -- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True])
def test_optimizers_keep_what_they_know_of_a_tensor_unless_it_is_to_be_reset(tmp_path, reset):
    sources = [LoadSource(tmp_path / "source", **HEAD, required=False, dynamic=True)]
    trainer, _ = begun(tmp_path / "run", sources, EVERY_3, reset_optimizers=reset)
    at_iteration(trainer, 2, lambda: publish(tmp_path / "source", 1, 0.5))
    trainer.run(numbers_loader(), max_iters=4)
    state, new = saved.parts(tmp_path / "run", 4)["optimizer"]["state"], 1.0 if reset else 4.0

    assert {name: float(each["step"]) for name, each in state.items()} == dict(zip(NAMES, [4.0, 4.0, new, new]))


def test_moments_come_with_the_weights_where_the_plan_has_the_optimizer(tmp_path):
    teacher, _ = begun(tmp_path / "teacher", [LoadSource(tmp_path / "none", required=False)])
    sources = [LoadSource(tmp_path / "teacher", ["model", "optimizer"], required=False, dynamic=True)]
    trainer, _ = begun(tmp_path / "run", sources, EVERY_3, reset_optimizers=True)
    trainer.update.optimizers["optimizer"].param_groups[0]["lr"] = 0.02
    at_iteration(trainer, 2, lambda: teacher.run(numbers_loader(), max_iters=7))
    trainer.run(numbers_loader(), max_iters=5)
    parts = saved.parts(tmp_path / "run", 3)

    assert all(map(torch.equal, parts["model"].values(), teacher.update.model.state_dict().values()))
    assert {float(each["step"]) for each in parts["optimizer"]["state"].values()} == {7.0}
    assert parts["optimizer"]["param_groups"][0]["lr"] == 0.02


def test_a_resumed_bank_may_have_another_list(tmp_path):
    """What was loaded belongs to a path at its place."""
    for name in "ab":
        publish(tmp_path / name, 1, 0.5)
    a, b = (LoadSource(tmp_path / name, **HEAD, dynamic=True) for name in "ab")
    trainer, _ = begun(tmp_path / "run", [a, b], EVERY_3)
    trainer.run(numbers_loader(), max_iters=1)
    _, bank, checkpoint = run_of(tmp_path / "run", [a, LoadSource(tmp_path / "c", required=False)])
    checkpoint.resume()

    assert {at: Path(each["path"]).parent.name for at, each in bank.loaded.items()} == {0: "a"}
