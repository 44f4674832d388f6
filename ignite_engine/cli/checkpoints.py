"""The command ``checkpoints``: list, verify, diff, export and prune what is on disk; pull from mirrors and push."""

from __future__ import annotations

import argparse
from collections.abc import Callable
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
from ignite_engine.cli import mirrors
from ignite_engine.errors import CheckpointError, shortened
from ignite_engine.runs.run_directory import config_differences
from ignite_engine.text import in_columns

_NOT_RESULTS = ("lr", "memory", "throughput", "time")
_WHERE = "a run's folder, or one of checkpoints"
_ONE = f"a checkpoint, {_WHERE} (its last valid one), or RUN/best"


def add_parser(subparsers: Any) -> None:
    """Add the command and its actions."""
    text = "list, verify, compare, export and prune checkpoints; fetch them from a mirror, and upload them"
    command = subparsers.add_parser("checkpoints", help=text, description=text, allow_abbrev=False)
    command.set_defaults(overrides=[], traceback=False)
    actions = command.add_subparsers(dest="action", required=True, metavar="action", parser_class=type(command))

    def action(name: str, text: str) -> Any:
        return actions.add_parser(name, help=text, description=text, allow_abbrev=False)

    listing = action("list", "one line per checkpoint")
    listing.add_argument("where", type=Path, metavar="RUN_OR_DIR", help=_WHERE)
    verify = action("verify", "read every byte; code 1 if anything is damaged, with the file's name")
    verify.add_argument("where", type=Path, metavar="RUN_OR_DIR", help=f"{_WHERE}, or one checkpoint")
    mirrors.add_actions(action)
    diff = action("diff", "what differs between two checkpoints; code 1 if anything does")
    for name in ("first", "second"):
        diff.add_argument(name, type=Path, metavar=name.upper(), help=_ONE)
    export = action("export", "write only the weights, for other programs")
    export.add_argument("where", type=Path, metavar="PATH", help=_ONE)
    export.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="replaced if it is there")
    export.add_argument(
        "--format", choices=["safetensors", "state_dict"], help="default: by the file's ending; else state_dict"
    )
    export.add_argument(
        "--weights",
        metavar="raw|ema",
        help="the trained weights, or their average (the part's name); default: of RUN/best those that were evaluated",
    )
    prune = action("prune", "delete all but the newest ones and the best by the run's metric")
    prune.add_argument("where", type=Path, metavar="RUN_OR_DIR", help=_WHERE)
    prune.add_argument("--keep-last", type=int, default=1, metavar="N", help="newest ones; default: 1")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")


def checkpoints(options: argparse.Namespace) -> int:
    """Do one action; returns the exit code."""
    try:
        return _ACTIONS[options.action](options)
    except OSError as error:
        raise CheckpointError(f"{error.filename or options.action}: {error.strerror or error}.") from error


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
    parts = compare(first.parts, second.parts)
    for line in in_columns(("", comparison.part, str(comparison)) for comparison in parts):
        print(line)
    configs = [source.manifest.config or {} if source.manifest else {} for source in (first, second)]
    changes = config_differences(*configs)
    for line in changes:
        print(f"  config: {line}")
    same = all(comparison.same for comparison in parts) and not changes
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


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "verify": _verify,
    "diff": _diff,
    "export": _export,
    "prune": _prune,
    "pull": mirrors.pull,
    "push": mirrors.push,
}
COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {"checkpoints": checkpoints}
