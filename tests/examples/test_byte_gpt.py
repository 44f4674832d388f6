"""The byte GPT task: corpus, baselines, model and report, on a library of a few small files."""

import hashlib
import importlib
import json
import math
import pickle
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from ignite_engine import create_evaluator, loader
from ignite_engine.config import load_config
from ignite_engine.runs.recipe import build_run
from ignite_engine.task import build_task, find_task

ROOT = Path(__file__).resolve().parents[2]
build = find_task("byte_gpt.py:build", ROOT / "examples")
byte_gpt = sys.modules[build.__module__]
byte_corpus = importlib.import_module("byte_corpus")  # find_task put its folder on the path

TINY = {"context": 16, "width": 16, "layers": 2, "heads": 2, "ngram_slots": 64, "ngram_width": 8}


@pytest.fixture
def library(tmp_path):
    folder = tmp_path / "lib"
    for number in range(40):
        path = folder / ("package" if number % 2 else "") / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"# {number}\n".encode() + b"def f(x):\n    return x + 1\n" * (number % 5 + 1))
    for outside in ("site-packages/a.py", "package/dist-packages/b.py", "data.txt"):
        (folder / outside).parent.mkdir(parents=True, exist_ok=True)
        (folder / outside).write_text("third party")
    return folder


@pytest.fixture
def task(library, tmp_path, monkeypatch):
    monkeypatch.setattr(byte_corpus.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    torch.manual_seed(0)
    return build_task(build, {**TINY, "validation_windows": 6, "cache_dir": str(tmp_path / "cache")})


def test_a_file_is_held_out_by_the_digest_of_its_relative_path():
    names = [f"package/module_{number}.py" for number in range(300)]
    held_out = [name for name in names if int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10 == 0]
    assert held_out
    assert [name for name in names if byte_corpus.is_for_validation(name)] == held_out


def test_the_splits_are_the_files_in_sorted_order_without_third_parties(library, tmp_path):
    corpus = byte_corpus.open_corpus(tmp_path / "cache", library)
    expected = {False: b"", True: b""}
    names = sorted(path.relative_to(library).as_posix() for path in library.rglob("module_*.py"))
    for name in names:
        expected[int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10 == 0] += (library / name).read_bytes()
    assert (corpus.train.read_bytes(), corpus.val.read_bytes()) == (expected[False], expected[True])
    assert isinstance(byte_corpus.open_bytes(corpus.train), np.memmap)


def test_the_cache_is_used_and_keyed_by_names_and_sizes(library, tmp_path):
    corpus = byte_corpus.open_corpus(tmp_path / "cache", library)
    before = corpus.train.stat()
    assert byte_corpus.open_corpus(tmp_path / "cache", library) == corpus
    assert corpus.train.stat().st_mtime_ns == before.st_mtime_ns
    with (library / "module_0.py").open("ab") as file:
        file.write(b"#")
    assert byte_corpus.open_corpus(tmp_path / "cache", library).train != corpus.train


def test_the_default_cache_is_under_xdg_cache_home(library, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert byte_corpus.open_corpus(None, library).val.parent == tmp_path / "xdg" / "ignite_engine"


def test_a_library_without_source_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no source"):
        byte_corpus.open_corpus(tmp_path / "cache", tmp_path / "empty")


def test_a_failed_write_leaves_neither_the_file_nor_a_part_of_it(tmp_path):
    def half(file):
        file.write(b"half")
        file.flush()
        assert len(list(tmp_path.iterdir())) == 1  # the fault happens while part of it is on disk
        assert not (tmp_path / "split.bin").exists()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        byte_corpus.write_atomically(tmp_path / "split.bin", half)
    assert not list(tmp_path.iterdir())


def test_writers_that_race_each_leave_a_whole_file(tmp_path):
    both_are_writing = threading.Barrier(2)

    def write(file):
        file.write(b"a" * 1000)
        both_are_writing.wait(timeout=10)
        file.write(b"b" * 1000)

    writers = [
        threading.Thread(target=byte_corpus.write_atomically, args=(tmp_path / "split.bin", write)) for _ in "12"
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["split.bin"]
    assert (tmp_path / "split.bin").read_bytes() == b"a" * 1000 + b"b" * 1000


def brute_force_bits(train, text, positions, order):
    pairs = Counter((train[at - order : at], train[at]) for at in range(order, len(train)))
    contexts = Counter(train[at - order : at] for at in range(order, len(train)))
    bits = 0.0
    for at in positions:
        context = text[at - order : at]
        bits -= math.log2((pairs[context, text[at]] + 0.1) / (contexts[context] + 25.6))
    return bits / len(positions)


def test_the_baselines_are_those_of_a_brute_force_count():
    train, text = b"abracadabra, abracadabra! \xff\x00" * 3, b"a cadabra\x00\xffbra"
    models = byte_corpus.NgramModels.counted(np.frombuffer(train, np.uint8))
    positions = list(range(2, len(text)))
    measured = models.bits_per_byte(np.frombuffer(text, np.uint8), np.array(positions))
    assert measured == pytest.approx([brute_force_bits(train, text, positions, order) for order in (0, 1, 2)])


def test_the_baselines_are_measured_on_the_bytes_that_are_evaluated(task):
    report = task.handlers[0]
    text = report.corpus.val.read_bytes()
    asked = [target for _, targets in task.val_sets["val"] for target in targets.tolist()]
    positions = byte_corpus.predicted_positions(report.windows).tolist()
    assert [text[at] for at in positions] == asked
    assert len(set(positions)) == len(positions)  # no byte counts twice
    train = report.corpus.train.read_bytes()
    assert report.evaluated == pytest.approx([brute_force_bits(train, text, positions, order) for order in (0, 1, 2)])


def test_the_counts_are_cached(task):
    report = task.handlers[0]
    evaluated = report.evaluated
    assert report.corpus.counts.exists()
    report.corpus.train.unlink()  # only the counts can be read
    again = byte_gpt.BaselineReport(report.corpus, report.windows)
    assert again.evaluated == evaluated


def test_training_windows_move_by_the_samples_own_generator(task):
    corpus, context = task.handlers[0].corpus, TINY["context"]
    text = corpus.train.read_bytes()
    batches = [
        next(iter(loader(task.train_set, batch_size=8, shuffle=True, seed=seed, num_workers=workers)))
        for seed, workers in ((1, 0), (1, 2), (2, 0))
    ]
    assert torch.equal(batches[0][0], batches[1][0])
    assert not torch.equal(batches[0][0], batches[2][0])
    for inputs, targets in zip(*batches[0], strict=True):
        assert torch.equal(inputs[1:], targets[:-1])
        assert bytes([*inputs.tolist(), targets[-1].item()]) in text
    last = len(task.train_set) - 1
    assert (last + 2) * context <= len(text)  # however the last window is shifted, it is inside


def test_windows_are_pickled_without_their_bytes(task):
    before = task.train_set[3]
    assert len(pickle.dumps(task.train_set)) < 2000 + 8 * len(task.train_set)
    assert before[0].shape == pickle.loads(pickle.dumps(task.train_set))[3][0].shape


def test_a_split_too_short_for_the_windows_is_refused(tmp_path):
    (tmp_path / "split.bin").write_bytes(b"x" * 20)
    with pytest.raises(ValueError, match="expected at least two windows"):
        byte_corpus.training_windows(tmp_path / "split.bin", 16)
    with pytest.raises(ValueError, match="at least one validation window"):
        byte_corpus.validation_windows(tmp_path / "split.bin", 19, 1)


def test_the_model_looks_back_only(task):
    model = task.model.eval()
    torch.nn.init.normal_(model.head.weight)
    for block in model.blocks:
        torch.nn.init.normal_(block.attention_out.weight)
        torch.nn.init.normal_(block.mlp_out.weight)
    inputs = torch.randint(256, (1, 16))
    changed = inputs.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    difference = (model(inputs) - model(changed)).abs().sum(dim=-1)[0]
    assert (difference[:9] == 0).all()
    assert (difference[9:] > 0).all()


def test_an_ngram_ends_at_its_byte():
    embedding = byte_gpt.NgramEmbedding(byte_gpt.Options(**{**TINY, "ngram_orders": (2, 3), "ngram_slots": 2**16}))
    slots = embedding._slots(torch.tensor([[1, 2, 3, 9, 2, 3]]), 2)[0]
    assert slots[2] == slots[5]  # 2, 3 both times
    assert slots[1] != slots[4]  # 1, 2 and 9, 2
    assert slots.min() >= 0 and slots.max() < 2**16


def test_the_first_loss_is_that_of_a_uniform_guess(task):
    inputs = torch.randint(256, (2, 16))
    assert byte_gpt.loss_fn(task.model, (inputs, inputs)).item() == pytest.approx(math.log(256))


def test_matrices_alone_decay_and_each_parameter_is_in_one_group(task):
    assert task.parameter_groups is not None
    decay, no_decay = task.parameter_groups
    assert (decay["name"], no_decay["name"]) == ("decay", "no_decay")
    assert "weight_decay" not in decay and no_decay["weight_decay"] == 0.0
    assert all(each.dim() >= 2 for each in decay["params"]) and all(each.dim() < 2 for each in no_decay["params"])
    grouped = [id(each) for group in task.parameter_groups for each in group["params"]]
    assert sorted(grouped) == sorted(id(each) for each in task.model.parameters())


def test_metrics_weigh_by_bytes(task):
    torch.nn.init.normal_(task.model.head.weight)
    assert task.predict is not None
    data = task.val_sets["val"]
    evaluator = create_evaluator(task.model.eval(), task.predict, task.metrics)
    metrics = evaluator.run(loader(data, batch_size=4)).metrics  # 6 windows: batches of 4 and 2
    inputs, targets = next(iter(loader(data, batch_size=6)))
    with torch.no_grad():
        expected = functional.cross_entropy(task.model(inputs).flatten(0, 1), targets.flatten()).item()
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["bits_per_byte"] == pytest.approx(expected / math.log(2), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"width": 10, "heads": 4}, "multiple of heads"),
        ({"ngram_orders": [1]}, "from 2 to 7"),
        ({"ngram_slots": 100}, "power of two"),
        ({"widht": 10}, "widht"),
    ],
)
def test_options_that_cannot_be_are_refused(options, complaint):
    with pytest.raises((ValueError, TypeError), match=complaint):
        build(options)


@pytest.mark.slow
def test_the_config_runs_and_reports_against_the_baselines(task, tmp_path, capsys):
    overrides = ["run.max_iterations=3", "data.batch_size=2", "evaluation.every=2", "checkpoint.every=3"]
    config = load_config(ROOT / "configs" / "byte_gpt.yaml", [*overrides, f"run.directory={tmp_path / 'run'}"])
    build_run(config, task).train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "val/bits_per_byte" in line]
    assert [line["iteration"] for line in evaluated] == [2, 3]
    for order, bits in enumerate(task.handlers[0].evaluated):
        assert [line[f"baseline/order_{order}_bits_per_byte"] for line in evaluated] == [bits, bits]
    printed = capsys.readouterr().out
    assert f"{evaluated[-1]['val/bits_per_byte']:.3f}" in printed.split("byte GPT")[1].splitlines()[0]
    assert "the order-1 model" in printed and "the order-2 model" in printed


def test_a_run_that_did_not_complete_prints_no_table(task, capsys):
    class Run:
        class state:
            status = "interrupted"
            metrics = {"val/bits_per_byte": 2.0}  # used as a state

    task.handlers[0].print_table(Run)
    assert not capsys.readouterr().out
    Run.state.status = "completed"
    task.handlers[0].print_table(Run)
    assert "byte GPT" in capsys.readouterr().out
