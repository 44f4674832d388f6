"""The command ``checkpoints``: list, verify, diff, export and prune what is on disk; pull from mirrors and push."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ignite_engine.checkpoint.comparison import compare
from ignite_engine.checkpoint.export import Format, weights_of, write_weights
from ignite_engine.checkpoint.layout import named_iteration, scan
from ignite_engine.checkpoint.lock import in_use
from ignite_engine.checkpoint.manifest import MANIFEST_NAME, Manifest
from ignite_engine.checkpoint.retention import CheckpointInfo, Retention, of_one_run, ranked
from ignite_engine.checkpoint.sources import Source, find_directory, find_source, followed, read_named, read_source
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.cli.parsing import Parser, Table
from ignite_engine.errors import CheckpointError, shortened
from ignite_engine.runs.run_directory import config_differences
from ignite_engine.text import in_columns

_NOT_RESULTS = ("lr", "memory", "throughput", "time")
_WHERE = "a run's folder, or one of checkpoints"
_ONE = f"a checkpoint, {_WHERE} (its last valid one), or RUN/best"


ACTIONS: Table = {
    "list": ("ignite_engine.cli.checkpoints:list_all", "one line per checkpoint"),
    "verify": (
        "ignite_engine.cli.checkpoints:verify",
        "read every byte; code 1 if anything is damaged, with the file's name",
    ),
    "pull": ("ignite_engine.ext.mirror.commands:pull", "fetch a checkpoint of a mirror into a folder"),
    "push": ("ignite_engine.ext.mirror.commands:push", "upload a checkpoint to a mirror"),
    "diff": (
        "ignite_engine.cli.checkpoints:diff",
        "what differs between two checkpoints; code 1 if anything does",
    ),
    "export": ("ignite_engine.cli.checkpoints:export", "write only the weights, for other programs"),
    "prune": (
        "ignite_engine.cli.checkpoints:prune",
        "delete all but the newest ones and the best by the run's metric",
    ),
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
    action.add_argument(
        "--format", choices=["safetensors", "state_dict"], help="default: by the file's ending; else state_dict"
    )
    action.add_argument(
        "--weights",
        metavar="raw|ema",
        help="the trained weights, or their average (the part's name); default: of RUN/best those that were evaluated",
    )
    action.set_defaults(work=_export)


def prune(action: Parser) -> None:
    action.add_argument("where", type=Path, metavar="RUN_OR_DIR", help=_WHERE)
    action.add_argument("--keep-last", type=int, default=1, metavar="N", help="newest ones; default: 1")
    action.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    action.set_defaults(work=_prune)


def _list(options: argparse.Namespace) -> int:
    readable, unreadable = scan(find_directory(options.where))
    rule = followed(readable)
    best = ranked(of_one_run(readable), *rule)[:1] if rule else []
    heads = ("checkpoint", "epoch", "metrics", "size", "labels", "state")
    rows = []
    for checkpoint in readable:
        names = [f"best ({', '.join(rule)})"] if rule and checkpoint in best else []
        rows.append(_row(checkpoint, [*names, "last"] if checkpoint is readable[-1] else names))
    print(*in_columns([heads, *rows]), sep="\n")
    for path, reason in unreadable:
        print(f"{path.name}  cannot be read: {reason}")
    return 0


def _row(checkpoint: CheckpointInfo, names: list[str]) -> tuple[str, ...]:
    manifest = checkpoint.manifest
    results = [
        f"{key} {value:.5g}" for key, value in manifest.metrics.items() if key.partition("/")[0] not in _NOT_RESULTS
    ]
    state = names if manifest.healthy else [*names, "weights not finite"]
    state = [*state, "exact" if manifest.exact else f"not exact: {shortened(manifest.reproducibility, 1)}"]
    labels = ", ".join(manifest.labels)
    return checkpoint.path.name, str(manifest.epoch), shortened(results), _size(manifest), labels, "; ".join(state)


def _verify(options: argparse.Namespace) -> int:
    where: Path = options.where
    if (where / MANIFEST_NAME).exists() or named_iteration(where) is not None:
        problems_by_path = {where: CheckpointStore(where.parent).verify(where)}
    else:
        directory = find_directory(where)
        readable, unreadable = scan(directory)
        problems_by_path = {path: [reason] for path, reason in unreadable}
        store = CheckpointStore(directory)
        for checkpoint in readable:
            with in_use(checkpoint.path) as is_there:
                if is_there:  # its run has not pruned it meanwhile
                    problems_by_path[checkpoint.path] = store.verify(checkpoint.path)
    for path, problems in sorted(problems_by_path.items()):
        print(f"{path.name}  {'damaged: ' + '; '.join(problems) if problems else 'valid'}")
    return int(any(problems_by_path.values()))


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


def _prune(options: argparse.Namespace) -> int:
    store = CheckpointStore(find_directory(options.where))
    before = store.checkpoints()
    rule: Any = followed(before) or (None, "min")
    try:
        retention = Retention(options.keep_last, best=rule[0], mode=rule[1])
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    gone = [checkpoint.path for checkpoint in store.to_delete(retention)] if options.dry_run else store.prune(retention)
    for path in gone:
        print(f"{path.name}  {'would be deleted' if options.dry_run else 'deleted'}")
    print(f"{len(before) - len(gone)} of {len(before)} {'would stay' if options.dry_run else 'stay'}")
    return 0


def _size(manifest: Manifest) -> str:
    kib = sum(file.bytes for file in manifest.files.values()) / 2**10
    return f"{kib:.1f} KiB" if kib < 1000 else f"{kib / 2**10:,.1f} MiB"
