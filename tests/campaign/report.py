"""The table of a campaign, from its results."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.campaign.cases import HOW, WHERE, WORKERS
from tests.faults.fork_server import ROOT

Result = Mapping[str, Any]
WHAT = {
    "matrix": "stopped anywhere, in every training setup: weights, optimizers, rates, averages, RNG state and every "
    "line of the log are compared bit for bit",
    "instants": "SIGKILL at a random instant of a run; half save in the background, a quarter are killed twice",
    "operations": "SIGKILL at each file operation of a training process's saves and prunes",
    "changed rows": "likewise, where a table is saved by the rows that changed: in saves of rows and of bases, and "
    "where a chain is pruned",
    "restarts": "stopped five times with `keep_last=1`: one checkpoint is kept, and the result is the same",
    "damage": "the newest checkpoint is damaged, of another version or holds code: skipped, logged, nothing executed",
    "disks": "the disk is full or read-only, for a while or to the end: one log line each, earlier checkpoints remain",
    "failures": "one of three gloo ranks fails in some way, or the link between two nodes is down: it is named",
    "two ranks": "two gloo ranks: all or one of them killed, or stopped by a signal",
    "rank instants": "SIGINT, SIGTERM or SIGKILL at a random instant to one of 2 or 3 ranks, all, or the launcher; "
    "half under torchrun: no process is left, the code is right, resumed to the same bits",
    "rank-invariant": "on 1 to 4 ranks, killed and restarted on other numbers of them: the bits of one process",
    "two nodes": "two network namespaces with two ranks each under torchrun: a node or a rank killed, or stopped by a "
    "signal; the bits of four ranks on one node",
    "long tests": "files of tests that are too long to run at each change: compilers, measurements, many processes",
}


def commit(root: Path = ROOT) -> str:
    """The current commit, and a digest of what the code has beyond it: results of other changes do not count."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(
            ["git", "--no-optional-locks", *arguments], cwd=root, capture_output=True, check=True
        ).stdout

    folders = [name for name in ("ignite_engine", "handlers", "tests") if (root / name).exists()]
    changes = hashlib.sha256(git("diff", "--binary", "HEAD", "--", *folders))
    added = git("ls-files", "-z", "--others", "--exclude-standard", "--", *folders).decode().split("\0")[:-1]
    for name in sorted(added):
        changes.update(name.encode() + b"\0" + (root / name).read_bytes())
    changed = changes.digest() != hashlib.sha256().digest()
    return git("rev-parse", "--short=12", "HEAD").decode().strip() + (f"+{changes.hexdigest()[:8]}" if changed else "")


def write_report(
    path: Path, results: Sequence[Result], planned: Mapping[str, int], failed_before: Sequence[Result] = ()
) -> None:
    """Write the page: what was run at this commit, and how it ended.

    Args:
        results: of one commit, the newest of each item.
        planned: items by section.
        failed_before: failures of items that have passed since.
    """
    sections = Counter(each["section"] for each in results)
    passed = Counter(each["section"] for each in results if each["passed"])
    rows = [
        f"| {section} | {WHAT[section]} | {planned[section]} | {sections[section]} | {passed[section]} |"
        for section in planned
    ]
    failures = [each for each in results if not each["passed"]]
    seconds = sum(each["seconds"] for each in results)
    lines = [
        "# The campaign",
        "",
        "Every case is a run in its own process that is killed or stopped, and resumed by another process. It passes",
        "if it was really stopped there and ends as the uninterrupted run does. `make campaign` runs what has not",
        "passed at the current commit and writes this page; [checkpoints](checkpoints.md) says what is promised.",
        "",
        f"- {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, commit {results[0]['commit'] if results else commit()}",
        f"- {os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, "
        f"torch {torch.__version__}; {seconds / 60:.0f} minutes of cases, several at a time",
        "",
        "| section | what happens | cases | run | passed |",
        "|---|---|---|---|---|",
        *rows,
        f"| all | | {sum(planned.values())} | {len(results)} | {sum(passed.values())} |",
        "",
        *_matrix_tables(results),
        *_instants(results),
        *_rank_instants(results),
        *_failures(results),
        "## What is left out",
        "",
        "The matrix is not the full product of its dimensions. Where and how are combined in full with precision,",
        "optimizers, weight average, background saves and a short last group, for one kind of data; and with start",
        "methods, loaders and groups (spawn and forkserver only with the short last group), for one kind of training.",
        "The rest is covered pairwise: each value occurs with each value of every other dimension. Random augmentation",
        "in the workers of a StatefulDataLoader is left out: it does not save their RNG state, as the reproducibility",
        "report says.",
        "",
    ]
    for title, failed in (("What failed", failures), ("What failed, and passed when it was run again", failed_before)):
        if failed:
            said = (f"- `{each['section']}: {each['key']}`: {each['said']}" for each in failed)
            lines += [f"## {title}", "", *said, ""]
    path.write_text("\n".join(lines))


def _matrix_tables(results: Sequence[Result]) -> list[str]:
    """Passed of run, by where and how, and by start method."""
    cells: Counter[tuple[str, str]] = Counter()
    passed: Counter[tuple[str, str]] = Counter()
    for each in results:
        if each["section"] == "matrix":
            where, how, workers, *_ = each["key"].split()
            for cell in ((where, how), (where, workers)):
                cells[cell] += 1
                passed[cell] += each["passed"]
    lines = [
        "## The matrix, passed of run",
        "",
        f"| stopped | {' | '.join([*HOW, *(f'workers {each}' for each in WORKERS)])} |",
    ]
    lines.append("|---" * (1 + len(HOW) + len(WORKERS)) + "|")
    for where in WHERE:
        row = [f"{passed[where, column]} of {cells[where, column]}" for column in (*HOW, *WORKERS)]
        lines.append(f"| {where} | {' | '.join(row)} |")
    return [
        *lines,
        "",
        "`stop` is Ctrl-C; `kill` is SIGKILL right after a save; `rewind` is SIGKILL within an update.",
        "",
    ]


def _rank_instants(results: Sequence[Result]) -> list[str]:
    phases = Counter(each["facts"]["in"] for each in results if each["section"] == "rank instants" and each["passed"])
    counts = ", ".join(f"{count} in {phase}" for phase, count in phases.most_common())
    return [f"Signals to runs of several ranks, by what the signalled rank, or the first, did: {counts}.", ""]


def _failures(results: Sequence[Result]) -> list[str]:
    """What a user sees, and when."""
    facts = [(each["key"], each["facts"]) for each in results if each["section"] == "failures" and each["passed"]]
    return [
        "| what fails | all ended after | `reason` in `summary.json` |",
        "|---|---|---|",
        *(f"| {key} | {each['seconds']} s | `{each['line']}` |" for key, each in facts),
        "",
    ]


def _instants(results: Sequence[Result]) -> list[str]:
    kills = [
        kill for each in results if each["section"] == "instants" and each["passed"] for kill in each["facts"]["killed"]
    ]
    saving = sum(any(".tmp" in name for name in kill["unfinished"]) for kill in kills)
    pruning = sum(any(".trash" in name for name in kill["unfinished"]) for kill in kills)
    none = sum(kill["newest"] is None for kill in kills)
    return [
        f"Of {len(kills)} random kills {none} came before the first checkpoint, {saving} left an unfinished save and "
        f"{pruning} an unfinished prune.",
        "",
    ]
