"""The command ``checkpoints``: list, verify, diff, export and prune what is on disk; pull from mirrors and push."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ignite_engine.checkpoint.comparison import compare
from ignite_engine.checkpoint.export import Format, weights_of, write_weights
from ignite_engine.checkpoint.layout import scan
from ignite_engine.checkpoint.lock import in_use
from ignite_engine.checkpoint.manifest import Manifest
from ignite_engine.checkpoint.retention import Retention, of_one_run, ranked
from ignite_engine.checkpoint.sources import (
    Source,
    find_directory,
    find_source,
    followed,
    is_single,
    read_named,
    read_source,
)
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.checkpoint.verification import problems_of
from ignite_engine.cli.parsing import Parser, Table, whole_number
from ignite_engine.errors import shortened
from ignite_engine.runs.run_directory import config_differences
from ignite_engine.text import in_columns, in_units

_NOT_RESULTS = ("lr", "memory", "throughput", "time")
_WHERE = "a run's folder, or one of checkpoints"
_ONE = f"a checkpoint, {_WHERE} (its last valid one), or RUN/best"


ACTIONS: Table = {
    "list": ("ignite_engine.cli.checkpoints:list_all", "one line per checkpoint"),
    "verify": ("ignite_engine.cli.checkpoints:verify", "read every byte; code 1 if a file is damaged, with its name"),
    "pull": ("ignite_engine.ext.mirror.commands:pull", "fetch a checkpoint of a mirror into a folder"),
    "push": ("ignite_engine.ext.mirror.commands:push", "upload a checkpoint to a mirror"),
    "diff": ("ignite_engine.cli.checkpoints:diff", "what differs between two checkpoints; code 1 if anything does"),
    "export": ("ignite_engine.cli.checkpoints:export", "write only the weights, for other programs"),
    "prune": ("ignite_engine.cli.checkpoints:prune", "delete all but the newest and the best by the run's metric"),
}


def checkpoints(command: Parser) -> None:
    """The actions."""
    command.add_commands(ACTIONS, "action")


def list_all(action: Parser) -> None:
    action.add_argument("where", type=Path, metavar="RUN_OR_DIR", help=_WHERE)
    action.set_defaults(work=_list)


def verify(action: Parser) -> None:
    action.add_argument("where", type=Path, metavar="RUN_OR_DIR", help=f"{_WHERE}, or one checkpoint")
    action.set_defaults(work=_verify)


def diff(action: Parser) -> None:
    for name in ("first", "second"):
        action.add_argument(name, type=Path, metavar=name.upper(), help=_ONE)
    action.set_defaults(work=_diff)


def export(action: Parser) -> None:
    action.add_argument("where", type=Path, metavar="PATH", help=_ONE)
    action.add_argument("--output", "-o", type=Path, required=True, metavar="FILE", help="replaced if it is there")
    formats = ["safetensors", "state_dict"]
    action.add_argument("--format", choices=formats, help="default: by the file's ending; else state_dict")
    text = "the trained weights, or their average (the part's name); default: of RUN/best those that were evaluated"
    action.add_argument("--weights", metavar="raw|ema", help=text)
    action.set_defaults(work=_export)


def prune(action: Parser) -> None:
    action.add_argument("where", type=Path, metavar="RUN_OR_DIR", help=_WHERE)
    action.add_argument("--keep-last", type=whole_number, default=1, metavar="N", help="newest ones; default: 1")
    action.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    action.set_defaults(work=_prune)


def _list(options: argparse.Namespace) -> None:
    readable, unreadable = scan(find_directory(options.where))
    rule = followed(readable)
    best = ranked(of_one_run(readable), *rule)[:1] if rule else []
    rows = [("checkpoint", "epoch", "metrics", "size", "labels", "state")]
    for checkpoint in readable:
        manifest = checkpoint.manifest
        metrics = {key: value for key, value in manifest.metrics.items() if key.split("/")[0] not in _NOT_RESULTS}
        results = [f"{key} {value:.5g}" for key, value in metrics.items()]
        state = [f"best ({', '.join(rule or ())})"] if checkpoint in best else []
        state += ["last"] if checkpoint is readable[-1] else []
        state += [] if manifest.healthy else ["weights not finite"]
        state += ["exact" if manifest.exact else f"not exact: {shortened(manifest.reproducibility, 1)}"]
        name, labels = checkpoint.path.name, ", ".join(manifest.labels)
        rows.append((name, str(manifest.epoch), shortened(results), _size(manifest), labels, "; ".join(state)))
    print(*in_columns(rows), sep="\n")
    for path, reason in unreadable:
        print(f"{path.name}  cannot be read: {reason}")


def _verify(options: argparse.Namespace) -> int:
    where: Path = options.where
    found: dict[Path, list[str]] = {}
    if is_single(where):
        found[where] = problems_of(where)
    else:
        readable, unreadable = scan(find_directory(where))
        found |= {path: [reason] for path, reason in unreadable}
        for checkpoint in readable:
            with in_use(checkpoint.path) as is_there:
                if is_there:  # its run has not pruned it meanwhile
                    found[checkpoint.path] = problems_of(checkpoint.path)
    for path, problems in sorted(found.items()):
        print(f"{path.name}  {'damaged: ' + '; '.join(problems) if problems else 'valid'}")
    return int(any(found.values()))


def _diff(options: argparse.Namespace) -> int:
    first, second = (read_source(find_source(path), mmap=True, whole=False) for path in (options.first, options.second))
    print(_title("first ", first), _title("second", second), sep="\n")
    parts = {
        part: compare(first.parts.get(part), second.parts.get(part)) for part in sorted({*first.parts, *second.parts})
    }
    for line in in_columns(("", part, what) for part, (_, what) in parts.items()):
        print(line)
    configs = [source.manifest.config or {} if source.manifest else {} for source in (first, second)]
    changes = config_differences(*configs)
    for line in changes:
        print(f"  config: {line}")
    same = all(is_same for is_same, _ in parts.values()) and not changes
    print("They are the same." if same else "They differ.")
    return int(not same)


def _title(which: str, source: Source) -> str:
    manifest = source.manifest
    about = f" (iteration {manifest.iteration}, epoch {manifest.epoch}, {_size(manifest)})" if manifest else ""
    return f"{which} {source.path}{about}"


def _export(options: argparse.Namespace) -> int:
    output: Path = options.output
    kind: Format = options.format or ("safetensors" if output.suffix == ".safetensors" else "state_dict")

    def write(source: Source, chosen: str) -> tuple[Source, str, dict[str, Any]]:
        weights = weights_of(source, chosen)
        write_weights(output, weights, kind, about={"source": str(source.path), "weights": chosen})
        return source, chosen, weights

    source, chosen, weights = read_named(options.where, weights=options.weights, use=write)
    count = sum(value.numel() for value in weights.values() if hasattr(value, "numel"))
    print(f"{output}: {len(weights)} names, {count:,} numbers, {kind}, {chosen} weights of {source.path}")
    if names := source.left_out.get("model"):
        print(f"It lacks {len(names)} names that {source.path.name} was saved without: {shortened(names)}")
    return 0


def _prune(options: argparse.Namespace) -> None:
    store = CheckpointStore(find_directory(options.where))
    before = store.checkpoints()
    rule: Any = followed(before) or (None, "min")
    retention = Retention(options.keep_last, best=rule[0], mode=rule[1])
    gone = [checkpoint.path for checkpoint in store.to_delete(retention)] if options.dry_run else store.prune(retention)
    deleted, stay = ("would be deleted", "would stay") if options.dry_run else ("deleted", "stay")
    for path in gone:
        print(f"{path.name}  {deleted}")
    print(f"{len(before) - len(gone)} of {len(before)} {stay}")


def _size(manifest: Manifest) -> str:
    return in_units(sum(file.bytes for file in manifest.files.values()))
