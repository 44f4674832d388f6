"""What lies in a folder of checkpoints."""

import json

from ignite_engine.checkpoint.sources import read_source


def iterations(folder):
    """Of its committed checkpoints, in order."""
    return sorted(int(path.name.removeprefix("iteration_")) for path in folder.glob("iteration_*"))


def checkpoint(folder, iteration=None):
    """The path of one; None: of the newest."""
    return folder / f"iteration_{iterations(folder)[-1] if iteration is None else iteration:08d}"


def manifest(folder, iteration=None):
    """What the checkpoint says of itself."""
    return json.loads((checkpoint(folder, iteration) / "manifest.json").read_text())


def parts(folder, iteration=None):
    """All that the checkpoint holds, by part; every file is verified."""
    return read_source(checkpoint(folder, iteration)).parts


def damage(folder, iteration=None):
    """Cut off the last byte of its weights."""
    path = checkpoint(folder, iteration) / "shared.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
