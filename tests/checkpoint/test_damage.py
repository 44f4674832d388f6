"""Damaged, forged and hostile checkpoints: the one before is taken, the reason is said, nothing in them is executed."""

import hashlib
import io
import os
import pickle
import shutil

import pytest
import torch

from ignite_engine import load_weights
from ignite_engine.cli import main
from ignite_engine.errors import CheckpointError
from tests.checkpoint.made_states import (
    CheckpointStore,
    Retention,
    attached,
    file_of,
    forge,
    holds,
    iterations,
    manifest_of,
    newest,
    record_of,
    run_to,
    save,
)
from tests.kit.faults import DAMAGES, environment
from tests.kit.refusals import refuses
from tests.kit.tiny import linear
from tests.kit.tiny import weights as weights_of

OUTSIDE = ("../iteration_00000001/x", "/etc/passwd", "..", "", "a/b", "shared.safetensors\n", "a\\b", ".hidden")
RECORD = {"bytes": 3, "hash": "blake3:" + "0" * 64}


def of_a_file(name, damage):
    def damaged(checkpoint):
        file = checkpoint / name if name == "manifest.json" else file_of(checkpoint, name)
        DAMAGES[damage](file)
        return file.name

    return damaged


def edited(checkpoint):
    text = (checkpoint / "manifest.json").read_text()
    assert '"epoch": 1' in text
    (checkpoint / "manifest.json").write_text(text.replace('"epoch": 1', '"epoch": 2'))


def without_a_file_of_it(checkpoint):
    files = manifest_of(checkpoint)["files"]
    forge(checkpoint, files={name: record for name, record in files.items() if name.startswith("rank")})


def with_a_file(name):
    return lambda checkpoint: forge(checkpoint, files={**manifest_of(checkpoint)["files"], name: RECORD})


def with_the_hash(algorithm):
    def rehash(checkpoint):
        """As another release could have written it."""
        files = manifest_of(checkpoint)["files"]
        digests = {name: hashlib.new(algorithm, (checkpoint / name).read_bytes()).hexdigest() for name in files}
        forge(
            checkpoint,
            files={name: {**record, "hash": f"{algorithm}:{digests[name]}"} for name, record in files.items()},
        )

    return rehash


# what happens to the newest checkpoint, and words of the reason
CASES = {
    **{
        f"{name} {damage}": (of_a_file(name, damage), "")
        for name in ("shared", "rank_0", "manifest.json")
        for damage in DAMAGES
    },
    "manifest edited": (edited, "does not match its checksum"),
    "manifest is a list": (lambda path: (path / "manifest.json").write_text("[]"), "list object"),
    "manifest is very deep": (lambda path: (path / "manifest.json").write_text("[" * 100_000), "not JSON"),
    "newer format": (lambda path: forge(path, format_version=99), "format version 99"),
    "older format": (lambda path: forge(path, format_version=0), "format version 0"),
    "without a field": (lambda path: forge(path, drop="world_size"), "damaged world_size"),
    "a list for a number": (lambda path: forge(path, iteration=[1]), "damaged iteration"),
    "a text for a list": (lambda path: forge(path, labels="mine"), "damaged labels"),
    "a negative count": (lambda path: forge(path, world_size=-1), "world_size 0"),
    "metrics that are no numbers": (lambda path: forge(path, metrics={"loss": [1]}), "damaged"),
    "best without a mode": (lambda path: forge(path, best={"metric": "loss"}), "best mode"),
    "a part over two lines": (lambda path: forge(path, kinds={"a\nb": "model"}), "damaged kinds"),
    "an unknown hash": (with_the_hash("md5"), "damaged hash"),
    **{f"the file {name!r}": (with_a_file(name), "damaged files") for name in OUTSIDE},
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The checkpoints of a run after its first and its second iteration, and the weights then."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    return folder, [run_to(folder, iteration, every=1, keep_last=9)[1] for iteration in (1, 2)]


@pytest.mark.parametrize(("damage", "words"), CASES.values(), ids=list(CASES))
def test_damaged_newest_falls_back_to_the_one_before_and_says_why(two, tmp_path, damage, words, caplog, capsys):
    folder, weights = tmp_path / "run", two[1]
    shutil.copytree(two[0], folder)
    path, knows_it = folder / "iteration_00000002", CheckpointStore(folder)
    assert knows_it.latest().checkpoint.path == path
    file = damage(path)
    words = f"{file} {words}" if isinstance(file, str) else words

    trainer, checkpoint = attached(folder)
    assert checkpoint.resume() == folder / "iteration_00000001" and torch.equal(weights_of(trainer), weights[0])
    (line,) = [record.getMessage() for record in caplog.records if " skipped" in record.getMessage()]
    assert str(path) in line and all(word in line for word in words.split()) and "\n" not in line, line
    refuses(lambda: CheckpointStore(folder).load(path), CheckpointError, f"{path} {words}")
    refuses(lambda: load_weights(linear(), path), CheckpointError, words)
    assert knows_it.latest().checkpoint.iteration == 1
    assert main(["checkpoints", "verify", str(folder)]) == 1 and "damaged" in capsys.readouterr().out
    # the last valid one stays, and what is damaged is left to whoever wants to look at it
    assert CheckpointStore(folder).prune(Retention(keep_last=1)) == [] and newest(folder) == 1
    assert iterations(folder) == [1, 2]


@pytest.mark.parametrize("damage", ["truncated", "missing", "one bit changed"])
def test_of_several_damaged_ones_none_counts_among_those_that_are_kept(tmp_path, damage):
    for iteration in (100, 200, 300):
        save(CheckpointStore(tmp_path), iteration)
    DAMAGES[damage](file_of(tmp_path / "iteration_00000300", "shared"))
    CheckpointStore(tmp_path).prune(Retention(keep_last=1))
    assert newest(tmp_path) == 200
    save(CheckpointStore(tmp_path), 400)
    CheckpointStore(tmp_path).prune(Retention(keep_last=1))
    assert newest(tmp_path) == 400


def test_what_cannot_be_read_keeps_its_place_in_the_order_of_saves(tmp_path):
    store = CheckpointStore(tmp_path)
    paths = [save(store, iteration) for iteration in (1, 2)]
    whole = (paths[1] / "manifest.json").read_bytes()
    (paths[1] / "manifest.json").write_bytes(b"")
    paths.append(save(store, 3))
    (paths[1] / "manifest.json").write_bytes(whole)
    assert [manifest_of(path)["sequence"] for path in paths] == [1, 2, 3]


def test_what_a_later_release_adds_within_a_format_is_ignored(tmp_path):
    path = save(CheckpointStore(tmp_path), 1)
    forge(path, of_a_later_release=1)
    assert newest(tmp_path) == 1 and holds(CheckpointStore(tmp_path), path, 1)


def test_what_a_manifest_names_is_no_path_that_is_touched(tmp_path):
    (tmp_path / "precious").mkdir()
    store = CheckpointStore(tmp_path / "run")
    path = store.save({"../precious": {"x": 1}}, {}, iteration=1, epoch=1)
    assert store.load(path).shared == {"../precious": {"x": 1}}
    forge(path, parent="../precious", labels=["../precious"], sequence=10**30)
    save(store, 2)
    store.prune(Retention(keep_last=1))
    assert sorted(os.listdir(tmp_path)) == ["precious", "run"] and iterations(tmp_path / "run") == [2]


class Hostile:
    """Unpickling it makes a directory."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


def zip_with_code(file, proof):
    torch.save({"model": {"weight": torch.ones(2)}, "payload": Hostile(proof)}, file)
    return lambda: torch.load(io.BytesIO(file.read_bytes()), weights_only=False)


def plain_pickle_with_code(file, proof):
    file.write_bytes(pickle.dumps({"model": Hostile(proof)}))
    return lambda: pickle.loads(file.read_bytes())


@pytest.mark.parametrize("plant", [zip_with_code, plain_pickle_with_code])
@pytest.mark.parametrize("careless", ["0", "1"])
def test_pickle_with_code_is_refused_in_one_line_and_does_not_run(tmp_path, plant, careless):
    for iteration in (100, 200):
        path = save(CheckpointStore(tmp_path / "run"), iteration)
    file, proof = file_of(path, "shared"), tmp_path / "the code ran"
    read_carelessly = plant(file, proof)
    forge(path, files={**manifest_of(path)["files"], file.name: record_of(file)})  # the attacker knows how to hash
    alone = shutil.copy(file, tmp_path / "weights.pt")

    with environment(TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=careless):
        for read in (lambda: CheckpointStore(tmp_path / "run").load(path), lambda: load_weights(linear(), path)):
            refuses(read, CheckpointError, f"{file} nothing in it was executed")
        refuses(lambda: load_weights(linear(), alone), CheckpointError, "weights.pt nothing in it was executed")
        assert len(CheckpointStore(tmp_path / "run").verify(path)) == 1 and newest(tmp_path / "run") == 100
    assert not proof.exists()
    read_carelessly()
    assert proof.is_dir(), "the bait is real"
