"""Folders of runs that are not what they say."""

import json
import math
import random
import shutil
from dataclasses import replace

import torch
import yaml
from ignite.engine import Events

from ignite_engine.checkpointing import CheckpointStore, read_manifest
from ignite_engine.checkpointing.manifest import MANIFEST_NAME
from ignite_engine.checkpointing.part_file import write_parts
from ignite_engine.config.load import config_from_dict
from ignite_engine.ext.replay import bring_to
from ignite_engine.runs.recipe import build_run


def edit_weight(folder, segment, *, seed):
    """One unit in the last place of one weight, and hashes that are right."""
    draw = random.Random(seed)
    path = folder / "checkpoints" / segment.checkpoint.name
    parts = CheckpointStore(path.parent).load(path).shared
    weights = [value for value in parts["model"].values() if value.is_floating_point()]
    weight = draw.choice(weights).view(-1)
    at = draw.randrange(len(weight))
    weight[at] = torch.nextafter(weight[at], torch.tensor(math.inf))
    (path / "shared.pt").unlink()
    record, manifest = write_parts(path / "shared.pt", parts), read_manifest(path)
    forged = replace(manifest, files={**manifest.files, "shared.pt": record})
    (path / MANIFEST_NAME).write_bytes(forged.to_json())


def edit_log(folder, segment, *, seed):
    """One logged value is another number."""
    draw, path = random.Random(seed), folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    of_segment = [line for line in lines if segment.first < line["iteration"] <= segment.last]
    line = draw.choice(of_segment)
    name = draw.choice(sorted({"loss", "lr", "grad_norm", "val/accuracy"} & set(line)))
    line[name] = math.nextafter(line[name], math.inf)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def train_with_another_sample(folder, segment, *, seed):
    """One sample was another one; what follows was trained from there, and the record is that of the honest run."""
    draw = random.Random(seed)
    record = {path: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.suffix != ".jsonl"}
    record[folder / "history.jsonl"] = (folder / "history.jsonl").read_bytes()
    iteration = draw.randint(segment.first + 1, segment.last)
    with bring_to(folder, at=iteration) as moment:
        samples = moment.iterations[iteration].samples or []
    sample = draw.choice([index for batch in samples for index in batch])
    for checkpoint in (folder / "checkpoints").glob("iteration_*"):
        if int(checkpoint.name.removeprefix("iteration_")) > segment.first:
            shutil.rmtree(checkpoint)
    values = yaml.safe_load((folder / "config.yaml").read_text())
    values["run"]["directory"] = str(folder)
    forged = values | {"task_options": {"plant": {"what": "sample", "sample": sample}}}
    run = build_run(config_from_dict(forged))
    stop = run.trainer.request_stop
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=segment.last), lambda: stop("forged so far"))
    run.train()
    if run.trainer.state.status == "interrupted":
        build_run(config_from_dict(values)).train()
    for path, content in record.items():
        path.write_bytes(content)
