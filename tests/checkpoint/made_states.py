"""Small states and small runs to save, each a function of the iteration so that a test can tell one from another."""

import hashlib
import json

import torch
from blake3 import blake3
from ignite.engine import Events

from ignite_engine.checkpoint.retention import Retention  # noqa: F401
from ignite_engine.checkpoint.sources import LoadSource  # noqa: F401

# the room's names for all tests of this folder; besides them they know the handler, the files and the command line
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.handlers import Checkpoint
from tests.kit.tiny import numbers_loader, trainer_of, weights


def shared_parts(iteration, size=300):
    generator = torch.Generator().manual_seed(iteration)
    return {
        "model": {"weight": torch.randn(size, 100, generator=generator), "bias": torch.randn(3, generator=generator)},
        "counters": {"iteration": iteration},
    }


def local_parts(iteration, rank=0):
    return {"rng": {"torch": torch.full((8,), 1000 * rank + iteration, dtype=torch.int64)}}


def save(store, iteration, *, size=300, **options):
    return store.save(shared_parts(iteration, size), local_parts(iteration), iteration=iteration, epoch=1, **options)


def holds(store, path, iteration, size=300):
    """Whether a checkpoint loads with exactly the bits that were saved at that iteration."""
    loaded = store.load(path)
    shared = shared_parts(iteration, size)
    return (
        loaded.manifest.iteration == loaded.shared["counters"]["iteration"] == iteration
        and all(torch.equal(loaded.shared["model"][name], shared["model"][name]) for name in shared["model"])
        and torch.equal(loaded.local["rng"]["torch"], local_parts(iteration)["rng"]["torch"])
    )


def left_over(directory):
    """Names in a store's directory that are no committed checkpoint."""
    return sorted(each.name for each in directory.iterdir() if not each.name.startswith("iteration_"))


def iterations(directory):
    """Of the checkpoints in a directory, by their names."""
    return sorted(int(each.name[10:].split(".")[0]) for each in directory.glob("iteration_*"))


def newest(directory):
    """The iteration of the newest valid checkpoint, for a store that knows nothing."""
    found = CheckpointStore(directory).latest().checkpoint
    return None if found is None else found.iteration


def manifest_of(checkpoint):
    return json.loads((checkpoint / "manifest.json").read_text())


def file_of(checkpoint, name):
    """The one file of this name and any ending."""
    (found,) = checkpoint.glob(f"{name}.*")
    return found


def attached(folder, model=None, *, every=2, trainer=None, **options):
    """A trainer that saves into ``folder``, and its Checkpoint."""
    trainer = trainer_of(model) if trainer is None else trainer
    checkpoint = Checkpoint(folder, **options)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=every))
    return trainer, checkpoint


def run_to(folder, iteration, **options):
    """Resume where there is something, train up to ``iteration``; where it resumed, and the weights at the end."""
    trainer, checkpoint = attached(folder, **options)
    checkpoint.resume()
    resumed = trainer.state.iteration
    trainer.run(numbers_loader(shuffle=True), max_iters=iteration)
    return resumed, weights(trainer)


def record_of(file):
    """What a manifest says of a file."""
    return {"bytes": file.stat().st_size, "hash": f"blake3:{blake3(file.read_bytes()).hexdigest()}"}


def forge(checkpoint, drop="", **changes):
    """Change a manifest as somebody does who knows how its checksum is made."""
    content = {**manifest_of(checkpoint), **changes}
    content = {name: value for name, value in content.items() if name not in (drop, "checksum")}
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps({**content, "checksum": checksum}))
