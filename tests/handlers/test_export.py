"""Weights are written beside training: whole, the newest under one name, and no bit of the run changes."""

import json
import resource
import signal

import pytest
import torch
from ignite.engine import Events
from safetensors import safe_open
from safetensors.torch import load, load_file
from torch import nn

from ignite_engine import TrainingEvents, create_evaluator
from ignite_engine.handlers import EMA, Checkpoint, Evaluation, Export
from tests.kit.processes import ranks, start, wait_until
from tests.kit.refusals import refusals
from tests.kit.sharded import gathered, trainer_in
from tests.kit.tiny import linear, numbers_loader, trainer_of, weights

EACH = Events.ITERATION_COMPLETED


def model_of(trainer):
    return trainer.update.model


def kept_of(trainer):
    """The model's state after each iteration, filled by the run."""
    kept = {}

    def keep(engine):
        kept[engine.state.iteration] = {name: value.clone() for name, value in model_of(engine).state_dict().items()}

    trainer.add_event_handler(EACH, keep)
    return kept


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.row("M3")
def test_the_file_has_the_weights_of_the_newest_checkpoint(tmp_path):
    trainer = trainer_of()
    kept, seen = kept_of(trainer), []
    Checkpoint(tmp_path / "checkpoints").attach(trainer, EACH(every=2))
    export = Export(tmp_path / "out")
    export.attach(trainer)

    def look(engine):
        with safe_open(export.path, "pt") as file:
            assert {"format": "pt", "weights": "raw"}.items() <= file.metadata().items()
            seen.append(int(file.metadata()["iteration"]))
        assert same(load_file(export.path), kept[engine.state.iteration])

    trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, look)
    trainer.run(numbers_loader(), max_epochs=1)
    assert seen == [2, 4, 6] and names(tmp_path / "out") == ["model.safetensors"]


def test_the_trained_weights_and_the_average_and_no_bit_of_the_run_changes(tmp_path):
    """Also within an evaluation of the average."""
    plain, exporting = (trainer_of(linear(dropout=True)) for _ in range(2))
    average = EMA(0.5)
    average.attach(exporting)
    kept = kept_of(exporting)
    for name in ("raw", "ema"):
        Export(tmp_path, weights=name, name=f"net.{name}").attach(exporting, EACH)
    evaluator = create_evaluator(model_of(exporting), lambda model, batch: model(batch[0]), {})
    Evaluation(evaluator, numbers_loader()).attach(exporting, EACH(once=6))
    Export(tmp_path / "within").attach(exporting, TrainingEvents.EVALUATION_COMPLETED)
    for trainer in (plain, exporting):
        torch.manual_seed(5)
        trainer.run(numbers_loader(), max_epochs=1)
    assert torch.equal(weights(plain), weights(exporting))
    assert names(tmp_path) == ["net.ema.safetensors", "net.raw.safetensors", "within"]
    raw, averaged = (load_file(tmp_path / f"net.{name}.safetensors") for name in ("raw", "ema"))
    assert same(raw, kept[6]) and same(averaged, average.state_dict()["weights"]) and not same(averaged, raw)
    assert same(load_file(tmp_path / "within" / "model.safetensors"), kept[6])


@pytest.mark.row("M3")
def test_a_reader_never_meets_half_of_one_and_keeps_what_it_has_open(tmp_path):
    """Each export holds the number of its iteration, and nothing else."""

    def train():
        trainer = trainer_of(nn.Linear(1000, 250, bias=False))
        parameter = next(model_of(trainer).parameters())
        trainer.add_event_handler(EACH, lambda engine: parameter.data.fill_(engine.state.iteration))
        Export(tmp_path).attach(trainer, EACH)
        trainer.run([(torch.zeros(1, 1000), torch.zeros(1, 250))], max_epochs=100_000)

    link, seen, process = tmp_path / "model.safetensors", set(), start(train)

    def is_another():
        data = link.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        expected, values = int(header["__metadata__"]["iteration"]), load(data)["weight"]
        assert torch.equal(values, torch.full((250, 1000), float(expected)))
        seen.add(expected)
        return len(seen) == 5

    try:
        wait_until(link.exists, process)
        with open(link, "rb") as held:
            before = held.read()
            wait_until(is_another, process)
            held.seek(0)
            assert held.read() == before
    finally:
        process.signal(signal.SIGKILL)


def exported(folder):
    """The iteration in the file."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return int(file.metadata()["iteration"])


def test_a_full_disk_is_one_warning_and_later_exports_are_written(tmp_path, caplog):
    before, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = trainer_of(nn.Linear(300, 100))
    Export(tmp_path).attach(trainer, EACH)
    written = []
    trainer.add_event_handler(EACH, lambda: written.append(exported(tmp_path)))
    for iteration, most in ((2, 50_000), (5, limits[0])):  # the write fails meanwhile, as on a full disk
        trainer.add_event_handler(
            Events.ITERATION_STARTED(once=iteration),
            lambda *, most=most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1])),
        )
    try:
        trainer.run([(torch.ones(1, 300), torch.ones(1, 100))], max_epochs=6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    (line,) = [line for line in caplog.messages if "not exported" in line]
    assert trainer.state.iteration == 6 and "iteration 2" in line and "File too large" in line
    assert written == [1, 1, 1, 1, 5, 6] and names(tmp_path) == ["model.safetensors"]


def exports(folder, **options):
    trainer = trainer_of()
    Export(folder, **options).attach(trainer, EACH)
    trainer.run(numbers_loader())


test_refusals = refusals(
    [
        ("no such average", lambda tmp_path: exports(tmp_path, weights="ema"), ValueError, "weights='ema' 'raw' EMA"),
        ("no such model", lambda tmp_path: exports(tmp_path, part="net"), ValueError, "part='net' model"),
        ("a path", lambda tmp_path: exports(tmp_path, name="a/b"), TypeError, "name without 'a/b'"),
    ]
)


def sharded(rank, folder):
    trainer, _, data = trainer_in("fsdp", folder / "checkpoints")
    Export(folder / "out").attach(trainer, EACH(once=3))
    Export(folder / "ema", weights="ema").attach(trainer, EACH(once=3))
    trainer.run(data, max_iters=3)
    average = trainer.registry.objects["ema"].state_dict()["weights"]
    states = model_of(trainer).state_dict(), average
    return [{name: gathered(value).tolist() for name, value in state.items()} for state in states]


def test_sharded_weights_are_gathered(tmp_path):
    for answers in ranks(2, sharded, tmp_path):
        for folder, expected in zip(("out", "ema"), answers, strict=True):
            written = load_file(tmp_path / folder / "model.safetensors")
            assert {name: value.tolist() for name, value in written.items()} == expected
