"""A run with a mirror, in this process."""

import json
from pathlib import Path

from ignite.engine import Events

from ignite_engine.handlers import Checkpoint
from tests.kit.refusals import command
from tests.kit.tiny import numbers_loader, trainer_of


def train(
    folder, mirror, iterations=4, *, attach=lambda trainer: None, resume=True, lr=0.1, non_finite=None, **options
):
    """It saves each second iteration: the trainer, and the name of the checkpoint that it was resumed from."""
    trainer = trainer_of(lr=lr, **({"non_finite": non_finite} if non_finite else {}))
    checkpoint = Checkpoint(folder, mirror=mirror, **options)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    found = checkpoint.resume() if resume else None
    attach(trainer)
    trainer.run(numbers_loader(), max_iters=iterations)
    return trainer, found and found.name


def there(mirror):
    """The iterations of a directory's checkpoints, of which each is whole."""
    found = sorted(path.parent for path in Path(mirror).glob("iteration_*/manifest.json"))
    for path in found:
        command("checkpoints", "verify", path)
    return [json.loads((path / "manifest.json").read_text())["iteration"] for path in found]
