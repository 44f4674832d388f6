"""A bank of sources: a newer one is loaded at the next boundary, a broken one is refused, a resume loads none twice."""

import contextlib
import copy
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average

from ignite_engine import Trainer, TrainingEvents, Update, Windows, create_evaluator
from ignite_engine.checkpointing import CheckpointError, CheckpointStore, LoadSource
from ignite_engine.checkpointing.load_sources import Found
from ignite_engine.errors import NotExact
from ignite_engine.handlers import Checkpoint, Evaluation, ModelBank
from ignite_engine.states import loading
from tests.kit.tiny import linear, mse, numbers_loader, one, weights

HEAD = {"parts": ["model:3.*"]}
NAMES = ["0.weight", "0.bias", "3.weight", "3.bias"]
EVERY_3 = Events.ITERATION_COMPLETED(every=3)


SHAPES = {name: value.shape for name, value in linear(dropout=True).state_dict().items()}


def state_of(value):
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


def publish(folder, iteration, value, **facts):
    """Another run saves weights that are all ``value``."""
    store = CheckpointStore(folder)
    return store.save({"model": state_of(value)}, {}, iteration=iteration, epoch=1, kinds={"model": "model"}, **facts)


def run_of(
    folder,
    sources,
    event=EVERY_3,
    *,
    save_every=100,
    optimizer=torch.optim.AdamW,
    model=None,
    **options,
):
    model = linear(dropout=True) if model is None else model
    trainer = Trainer(Update(model, optimizer(model.parameters(), lr=0.01), mse))
    checkpoint, bank = Checkpoint(folder, keep_last=99), ModelBank(sources, **options)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=save_every))
    bank.attach(trainer, event)
    return trainer, bank, checkpoint


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


def run_with_a_late_source(folder, event, *, comes_at, save_every):
    """A run, resumed where it has a checkpoint, whose bank has nothing to load before an iteration; and its loads."""
    source = folder.with_name(f"{folder.name}_source")
    sources = [LoadSource(source, **HEAD, required=False, dynamic=True)]
    trainer, bank, checkpoint = run_of(folder, sources, event, save_every=save_every)
    if checkpoint.resume() is None:
        bank.load()
    if not source.exists():
        at_iteration(trainer, comes_at, lambda: publish(source, 30, 0.5))
    return trainer, checkpoint, loads_of(trainer, bank)


def files_in(folder):
    return {str(each): (each.lstat().st_ino, each.lstat().st_mtime_ns) for each in (folder, *folder.rglob("*"))}


def test_a_newer_one_is_loaded_at_the_next_boundary_and_nothing_is_written_there(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    source = tmp_path / "source"
    publish(source, 10, 0.25)
    trainer, bank, checkpoint = run_of(tmp_path / "run", [LoadSource(source, dynamic=True)])
    assert checkpoint.resume() is None
    bank.load()
    assert (weights(trainer) == 0.25).all()
    at_iteration(trainer, 4, lambda: publish(source, 20, 0.5))
    began = {}
    trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda: began.update({trainer.state.iteration: weights(trainer)})
    )
    loads = loads_of(trainer, bank)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=5), lambda: setattr(trainer, "before", files_in(source)))
    trainer.run(numbers_loader(), max_iters=12)

    assert [bool((began[each] == 0.5).all()) for each in range(1, 13)] == [each == 7 for each in range(1, 13)]
    assert loads == [(1, {0: ("iteration_00000010", 0)}), (7, {0: ("iteration_00000020", 6)})]
    assert files_in(source) == trainer.before
    assert [each.iteration for each in checkpoint.store.checkpoints()] == [6, 12]
    saved = checkpoint.store.load(tmp_path / "run" / "iteration_00000006")
    assert (saved.shared["model"]["0.weight"] == 0.5).all()
    assert saved.shared["model_bank"]["loaded"]["0"]["iteration"] == 20
    assert caplog.text.count("loaded again: ") == 1
    assert f"Iteration 6: loaded again: From {source / 'iteration_00000020'} 4 loaded: model:0.weight" in caplog.text


def test_only_what_the_dynamic_source_brings_changes(tmp_path):
    """The bank: a dynamic source for the first layer, a static one for the head."""
    publish(tmp_path / "a", 1, 0.25)
    publish(tmp_path / "b", 1, -1.0)
    sources = [LoadSource(tmp_path / "a", parts=["model:0.*"], dynamic=True), LoadSource(tmp_path / "b", **HEAD)]

    def state_at_4(folder, *, stop):
        trainer, bank, checkpoint = run_of(tmp_path / folder, sources, save_every=1)
        if checkpoint.resume() is None:
            bank.load()
            at_iteration(trainer, 3, lambda: publish(tmp_path / "a", 2, 0.5))
        found = {}

        def keep():
            found.update({n: v.clone() for n, v in trainer.update.model.state_dict().items()})

        at_iteration(trainer, 4, keep)
        if stop:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.request_stop("test"))
        trainer.run(numbers_loader(), max_iters=4)
        return found

    whole = state_at_4("whole", stop=False)
    shutil.rmtree(tmp_path / "a" / "iteration_00000002")
    assert state_at_4("stopped", stop=True) == {}
    publish(tmp_path / "a", 2, 0.5)
    shutil.rmtree(tmp_path / "b")  # it was loaded at the start
    resumed = state_at_4("stopped", stop=False)
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
        assert bool((value == 0.5).all()) == name.startswith("0."), name


@pytest.mark.parametrize("how", ["killed in the next iteration", "stopped later", "killed at the boundary's save"])
def test_a_resumed_run_loads_nothing_twice_and_ends_with_the_same_bits(tmp_path, how):
    def run(folder, interrupt):
        trainer, _, loads = run_with_a_late_source(tmp_path / folder, EVERY_3, comes_at=5, save_every=4)
        if interrupt and how == "stopped later":
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=10), lambda: trainer.request_stop("test"))
            trainer.run(numbers_loader(), max_iters=20)
        elif interrupt:
            event = Events.ITERATION_STARTED(once=7)
            if how == "killed at the boundary's save":
                event = TrainingEvents.CHECKPOINT_SAVED(once=2)
            trainer.add_event_handler(event, _fail)
            with pytest.raises(KeyError):
                trainer.run(numbers_loader(), max_iters=20)
        else:
            trainer.run(numbers_loader(), max_iters=20)
        return weights(trainer), loads

    whole, loads = run("whole", False)
    assert loads == [(1, {}), (7, {0: ("iteration_00000030", 6)})]
    run("run", True)
    resumed, loads = run("run", False)
    assert [each for _, each in loads] == [{0: ("iteration_00000030", 6)}] and loads[0][0] > 6
    assert torch.equal(resumed, whole)


def _fail():
    raise KeyError("killed")


def test_a_torn_one_is_refused_and_named_and_the_next_valid_one_is_taken(tmp_path, caplog):
    source = tmp_path / "source"
    publish(source, 1, 0.25)
    trainer, bank, _ = run_of(tmp_path / "run", [LoadSource(source, dynamic=True)], Events.ITERATION_COMPLETED)
    bank.load()

    def tear():
        path = publish(source, 2, 0.5) / "shared.pt"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        publish(source, 3, 0.6, healthy=False)

    at_iteration(trainer, 2, tear)
    loads = loads_of(trainer, bank)
    at_iteration(trainer, 6, lambda: publish(source, 5, 0.75))
    trainer.run(numbers_loader(), max_iters=9)

    assert loads == [(1, {0: ("iteration_00000001", 0)}), (7, {0: ("iteration_00000005", 6)})]
    lines = [each.getMessage() for each in caplog.records if "is refused" in each.message]
    assert len(lines) == 2 and all("training goes on with what it has: " in each for each in lines)
    for text in ("iteration_00000002: shared.pt has changed", "iteration_00000003: its weights are not finite"):
        assert sum(text in each for each in lines) == 1, lines


def test_a_copy_that_is_not_complete_yet_is_taken_when_it_is(tmp_path):
    """As a tool that copies file by file leaves it for a while."""
    source = tmp_path / "source"
    publish(source, 1, 0.25)
    path = publish(tmp_path / "elsewhere", 2, 0.5)
    trainer, bank, _ = run_of(tmp_path / "run", [LoadSource(source, dynamic=True)], Events.ITERATION_COMPLETED)
    bank.load()

    def copy_manifest():
        (source / path.name).mkdir()
        shutil.copy(path / "manifest.json", source / path.name)

    at_iteration(trainer, 2, copy_manifest)
    at_iteration(trainer, 4, lambda: shutil.copy(path / "shared.pt", source / path.name))
    loads = loads_of(trainer, bank)
    trainer.run(numbers_loader(), max_iters=6)
    assert [each for each, _ in loads] == [1, 5]


@pytest.mark.parametrize("kind", ["file", "link", "checkpoint"])
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
        if kind == "link":
            path.unlink(missing_ok=True)
            path.symlink_to(target)
        else:
            os.replace(target, path)

    replace(2, 0.25)
    trainer, bank, checkpoint = run_of(tmp_path / "run", [LoadSource(path, dynamic=True)], Events.ITERATION_COMPLETED)
    bank.load()
    at_iteration(trainer, 3, lambda: replace(1, 0.5))  # an older one, too: it is what was asked for
    at_iteration(trainer, 5, lambda: path.unlink() if kind == "file" else None)
    loads = loads_of(trainer, bank)
    trainer.run(numbers_loader(), max_iters=7)
    assert [each for each, _ in loads] == [1, 4]

    replace(1, 0.5)
    trainer, bank, checkpoint = run_of(tmp_path / "run", [LoadSource(path, dynamic=True)], Events.ITERATION_COMPLETED)
    checkpoint.resume()
    loads = loads_of(trainer, bank)
    trainer.run(numbers_loader(), max_iters=10)
    assert len(loads) == 1  # what is in it counts, not when it was written


def test_the_best_one_is_loaded_when_there_is_a_better_one(tmp_path):
    source = tmp_path / "source"
    publish(source, 1, 0.1, metrics={"loss": 1.0})
    sources = [LoadSource(source, which="best", metric="loss", mode="min", dynamic=True)]
    trainer, bank, _ = run_of(tmp_path / "run", sources, Events.ITERATION_COMPLETED)
    bank.load()
    at_iteration(trainer, 2, lambda: publish(source, 2, 0.2, metrics={"loss": 2.0}))
    at_iteration(trainer, 4, lambda: publish(source, 3, 0.3, metrics={"loss": 0.5}))
    at_iteration(trainer, 6, lambda: shutil.rmtree(source / "iteration_00000003"))  # the one before is no better
    at_iteration(
        trainer, 8, lambda: CheckpointStore(source).annotate(source / "iteration_00000002", metrics={"loss": 0})
    )
    loads = loads_of(trainer, bank)
    trainer.run(numbers_loader(), max_iters=10)
    assert [(each, names[0][0]) for each, names in loads] == [
        (1, "iteration_00000001"),
        (5, "iteration_00000003"),
        (9, "iteration_00000002"),
    ]


@pytest.mark.parametrize("which", ["last", "best"])
def test_a_newer_one_with_the_same_bytes_is_loaded_as_the_run_has_trained_its_copy(tmp_path, which):
    source = tmp_path / "source"
    publish(source, 1, 0.25, metrics={"loss": 2.0})
    best = {"which": "best", "metric": "loss", "mode": "min"} if which == "best" else {}
    sources = [LoadSource(source, dynamic=True, **best)]
    trainer, bank, checkpoint = run_of(tmp_path / "run", sources, Events.ITERATION_COMPLETED)
    bank.load()
    at_iteration(trainer, 3, lambda: publish(source, 2, 0.25, metrics={"loss": 1.0}))
    loads, began = loads_of(trainer, bank), dict[int, torch.Tensor]()
    trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda: began.update({trainer.state.iteration: weights(trainer)})
    )
    trainer.run(numbers_loader(), max_iters=6)
    assert [(each, names[0][0]) for each, names in loads] == [(1, "iteration_00000001"), (4, "iteration_00000002")]
    assert not (began[3] == 0.25).all() and (began[4] == 0.25).all()

    trainer, bank, checkpoint = run_of(tmp_path / "run", sources, Events.ITERATION_COMPLETED)
    checkpoint.resume()
    loads = loads_of(trainer, bank)
    trainer.run(numbers_loader(), max_iters=9)
    assert len(loads) == 1


def test_one_that_does_not_fit_is_refused_once_and_changes_nothing(tmp_path, caplog, monkeypatch):
    source = tmp_path / "source"
    publish(source, 1, 0.25)
    trainer, bank, checkpoint = run_of(tmp_path / "run", [LoadSource(source, dynamic=True)], Events.ITERATION_COMPLETED)
    bank.load()
    wide = {name: torch.ones(9) for name in NAMES}
    at_iteration(trainer, 2, lambda: CheckpointStore(source).save({"model": wide}, {}, iteration=2, epoch=1))
    at_iteration(trainer, 4, lambda: publish(source, 3, 0.5))
    loads, read, reads = loads_of(trainer, bank), loading.read_found, list[str]()

    def noted(registry, found):
        reads.append(found.path.name[-1])
        return read(registry, found)

    monkeypatch.setattr(loading, "read_found", noted)
    trainer.run(numbers_loader(), max_iters=6)
    assert [each for each, _ in loads] == [1, 5] and reads == ["2", "3"]
    assert [each.iteration for each in checkpoint.store.checkpoints()] == [4, 6]
    assert caplog.text.count("iteration_00000002 and this run differ (4 unexpected: model:") == 1


def test_a_strict_source_may_lack_what_another_has_brought(tmp_path):
    """A file with the head alone, again and again; after a resume too."""
    publish(tmp_path / "base", 1, 0.25)
    head = tmp_path / "head.pt"

    def write(value):
        torch.save({name: each for name, each in state_of(value).items() if name.startswith("3")}, head)

    write(0.5)
    for end, value in ((3, 0.6), (6, 0.7)):
        sources = [LoadSource(tmp_path / "base"), LoadSource(head, dynamic=True)]
        trainer, bank, checkpoint = run_of(tmp_path / "run", sources, Events.ITERATION_COMPLETED)
        if checkpoint.resume() is None:
            bank.load()
        at_iteration(trainer, end - 1, lambda: write(value))  # noqa: B023  # in this turn
        seen = []
        layer = trainer.update.model[3]
        at_iteration(trainer, end, lambda: seen.append(bool((one(layer) == value).all())))  # noqa: B023
        trainer.run(numbers_loader(), max_iters=end)
        assert seen == [True]


def test_a_source_that_is_replaced_while_it_is_read_is_refused(tmp_path):
    torch.save(state_of(0.1), tmp_path / "weights.pt")
    for path in (tmp_path / "weights.pt", publish(tmp_path / "a", 1, 0.1)):
        found = Found.of(path)
        assert set(found.read(0).parts["model"]) == set(NAMES)
        if path.is_dir():
            shutil.rmtree(path)
            publish(tmp_path / "a", 1, 0.2)
        else:
            torch.save(state_of(0.2), path)
        with pytest.raises(CheckpointError, match="was replaced while it was read"):
            found.read(0)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam])
@pytest.mark.parametrize("reset", [False, True])
def test_optimizers_keep_what_they_know_of_a_tensor_unless_it_is_to_be_reset(tmp_path, kind, reset):
    source = tmp_path / "source"
    sources = [LoadSource(source, **HEAD, required=False, dynamic=True)]
    trainer, bank, _ = run_of(tmp_path / "run", sources, reset_optimizers=reset, optimizer=kind)
    bank.load()
    at_iteration(trainer, 2, lambda: publish(source, 1, 0.5))
    steps = []
    optimizer = trainer.registry.objects["optimizer"]
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=4),
        lambda: steps.append({name: float(each["step"]) for name, each in optimizer.state_dict()["state"].items()}),
    )
    trainer.run(numbers_loader(), max_iters=4)
    new = 1.0 if reset else 4.0
    assert steps == [dict(zip(NAMES, [4.0, 4.0, new, new]))]


def test_moments_come_with_the_weights_where_the_plan_has_the_optimizer(tmp_path):
    teacher, _, _ = run_of(tmp_path / "teacher", [LoadSource(tmp_path / "none", required=False)])
    parts = ["model", "optimizer"]
    sources = [LoadSource(tmp_path / "teacher", parts, required=False, dynamic=True)]
    trainer, bank, _ = run_of(tmp_path / "run", sources, reset_optimizers=True)
    trainer.update.optimizers["optimizer"].param_groups[0]["lr"] = 0.02
    bank.load()
    at_iteration(trainer, 2, lambda: teacher.run(numbers_loader(), max_iters=7))
    loaded = []
    at_iteration(
        trainer,
        4,
        lambda: loaded.append((weights(trainer), copy.deepcopy(trainer.registry.objects["optimizer"].state_dict()))),
    )
    trainer.run(numbers_loader(), max_iters=5)
    assert torch.equal(loaded[0][0], weights(teacher)) and trainer.state.iteration == 5
    assert {float(each["step"]) for each in loaded[0][1]["state"].values()} == {7.0}
    assert loaded[0][1]["param_groups"][0]["lr"] == 0.02


def test_after_a_window_it_is_loaded_and_saved_at_the_boundary_between_windows(tmp_path):
    """That iteration has a boundary already, at which it was saved without what is loaded now."""

    def run(folder, stop):
        event = TrainingEvents.WINDOW_COMPLETED(every=2)
        trainer, checkpoint, loads = run_with_a_late_source(tmp_path / folder, event, comes_at=2, save_every=1)
        if stop:
            trainer.add_event_handler(Events.ITERATION_STARTED(once=8), _fail)
        windows = Windows(range(4), lambda name: numbers_loader(6 + name))
        with contextlib.suppress(KeyError):
            trainer.run(windows, max_epochs=1)
        if stop:
            newest = checkpoint.store.checkpoints()[-1]
            assert newest.iteration == 7
            assert checkpoint.store.load(newest.path).shared["model_bank"]["loaded"]["0"]["at_iteration"] == 7
        return weights(trainer), loads

    whole, loads = run("whole", False)
    assert loads == [(1, {}), (8, {0: ("iteration_00000030", 7)})]
    run("run", True)
    resumed, loads = run("run", False)
    assert torch.equal(resumed, whole) and loads == [(8, {0: ("iteration_00000030", 7)})]


@pytest.mark.parametrize(
    ("event", "loaded_at"),
    [(Events.EPOCH_COMPLETED, 6), (Events.EPOCH_COMPLETED(every=2), 12), (Events.ITERATION_COMPLETED(every=5), 5)],
)
def test_the_event_says_when(tmp_path, event, loaded_at):
    sources = [LoadSource(tmp_path / "source", required=False, dynamic=True)]
    trainer, bank, _ = run_of(tmp_path / "run", sources, event)
    bank.load()
    at_iteration(trainer, 2, lambda: publish(tmp_path / "source", 1, 0.5))
    loads = loads_of(trainer, bank)
    trainer.run(numbers_loader(), max_iters=14)
    assert [each for each, _ in loads] == [1, loaded_at + 1]


@pytest.mark.parametrize(
    ("evaluated", "event", "values"),
    [
        (Events.EPOCH_COMPLETED, Events.EPOCH_COMPLETED, [0.5]),  # of what is saved
        (Events.ITERATION_COMPLETED(once=6), Events.EPOCH_COMPLETED, []),  # of what was there before
        (TrainingEvents.WINDOW_COMPLETED, TrainingEvents.WINDOW_COMPLETED, [0.5]),
        (Events.ITERATION_COMPLETED(once=6), TrainingEvents.WINDOW_COMPLETED, []),
    ],
)
def test_a_checkpoint_has_no_metric_of_other_weights(tmp_path, evaluated, event, values):
    sources = [LoadSource(tmp_path / "source", required=False, dynamic=True)]
    trainer, bank, _ = run_of(tmp_path / "run", sources, event)
    bank.load()
    checkpoint = Checkpoint(tmp_path / "best", name="best", best="val/weight", mode="max", keep_last=9)
    checkpoint.attach(trainer, event)
    predict = lambda model, batch: model[0].bias[0]  # noqa: E731
    evaluator = create_evaluator(trainer.update.model, predict, {"weight": Average()})
    Evaluation(evaluator, numbers_loader(2)).attach(trainer, evaluated)
    at_iteration(trainer, 2, lambda: publish(tmp_path / "source", 1, 0.5))
    windowed = event is TrainingEvents.WINDOW_COMPLETED
    trainer.run(Windows([0], lambda _: numbers_loader()) if windowed else numbers_loader(), max_epochs=1)

    saved = checkpoint.store.checkpoints()[-1].manifest
    assert saved.iteration == 6 and [value for key, value in saved.metrics.items() if key == "val/weight"] == values


def test_the_report_says_that_it_is_outside_of_the_run(tmp_path):
    publish(tmp_path / "source", 1, 0.5)
    for dynamic in (False, True):
        trainer, bank, _ = run_of(tmp_path / f"run_{dynamic}", [LoadSource(tmp_path / "source", dynamic=dynamic)])
        bank.load()
        expected = f"model_bank loads {tmp_path / 'source'} again when there is a newer state, and when that comes is "
        assert [each.startswith(expected) for each in trainer.reproducibility()] == [True] * dynamic
        Checkpoint(tmp_path / f"strict_{dynamic}", name="strict", strict=True).attach(trainer)
        if dynamic:
            with pytest.raises(NotExact, match="outside of the run"):
                trainer.run(numbers_loader(), max_iters=1)
        else:
            trainer.run(numbers_loader(), max_iters=1)


def test_what_makes_no_sense_is_refused(tmp_path, caplog):
    dynamic = LoadSource(tmp_path / "run", required=False, dynamic=True)
    trainer, _, checkpoint = run_of(tmp_path / "run", [dynamic])
    with pytest.raises(ValueError, match="is where this run saves: a dynamic source is of another run"):
        trainer.run(numbers_loader(), max_iters=1)
    with pytest.raises(ValueError, match="is dynamic: give the list to a ModelBank"):
        checkpoint.load([dynamic])
    with pytest.raises(ValueError, match=r"its parts are model, optimizer or averages, got \['\*'\]"):
        LoadSource("a", ["*"], dynamic=True)
    with pytest.raises(ValueError, match=r"got \['model', 'counters'\]"):
        LoadSource("a", parts=["model", "counters"], dynamic=True)
    with pytest.raises(RuntimeError, match="needs a trainer"):
        ModelBank([dynamic]).load()
    trainer, _, _ = run_of(tmp_path / "other", [LoadSource("a")])
    trainer.run(numbers_loader(), max_iters=1)
    assert "The sources of model_bank that are not dynamic have no effect without its load()." in caplog.text


def test_an_update_of_ones_own_is_loaded_again_too(tmp_path, caplog):
    model = linear(dropout=True)
    trainer = Trainer(lambda engine, batch: None)
    trainer.register("model", model, shared=True)
    bank = ModelBank([LoadSource(tmp_path / "a", required=False, dynamic=True)], reset_optimizers=True)
    bank.attach(trainer, Events.ITERATION_COMPLETED)
    at_iteration(trainer, 2, lambda: publish(tmp_path / "a", 1, 0.5))
    trainer.run(numbers_loader(), max_iters=3)
    assert (one(model) == 0.5).all() and "reset_optimizers has no effect" in caplog.text


def test_a_resumed_bank_may_have_another_list(tmp_path):
    """What was loaded belongs to a path at its place."""
    for name in "ab":
        publish(tmp_path / name, 1, 0.5)
    a, b = (LoadSource(tmp_path / name, **HEAD, dynamic=True) for name in "ab")
    trainer, bank, checkpoint = run_of(tmp_path / "run", [a, b])
    bank.load()
    trainer.run(numbers_loader(), max_iters=1)
    trainer, bank, checkpoint = run_of(tmp_path / "run", [a, LoadSource(tmp_path / "c", required=False)])
    checkpoint.resume()
    assert {at: Path(each["path"]).parent.name for at, each in bank.loaded.items()} == {0: "a"}


def test_one_without_dynamic_sources_reads_nothing_while_training(tmp_path, monkeypatch):
    publish(tmp_path / "a", 1, 0.5)
    trainer, bank, _ = run_of(tmp_path / "run", [LoadSource(tmp_path / "a")], Events.ITERATION_COMPLETED)
    bank.load()
    shutil.rmtree(tmp_path / "a")
    trainer.run(numbers_loader(), max_iters=3)
    assert one(trainer.update.model).isfinite().all() and trainer.state.iteration == 3
