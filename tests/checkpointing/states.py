"""Small states to save, each a function of the iteration so that a test can tell one from another."""

import torch


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
