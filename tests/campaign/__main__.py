"""``python -m tests.campaign``: run what has not passed at this commit, then write the page of results."""

from __future__ import annotations

import argparse
import json
import queue
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.campaign import (
    damage,
    disks,
    failures,
    instants,
    invariant,
    long_tests,
    nodes,
    operations,
    rank_instants,
    ranks,
    restarts,
)
from tests.campaign.cases import Case, campaign_matrix
from tests.campaign.report import commit, write_report
from tests.campaign.resuming import MODULES, Difference, Matrix
from tests.campaign.runs import Bench, Item
from tests.faults.fork_server import ROOT, ForkServer

SECTIONS = (
    "restarts",
    "damage",
    "disks",
    "two ranks",
    "rank instants",
    "failures",
    "rank-invariant",
    "two nodes",
    "operations",
    "changed rows",
    "instants",
    "matrix",
    "long tests",
)


def main() -> int:
    """Run it; the exit code is 1 if a case fails or has no result."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time, default 2")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this section; may be repeated")
    parser.add_argument(
        "--case",
        action="append",
        metavar="TEXT",
        help="only cases with this text in 'SECTION: KEY', even if they passed; may be repeated; writes no page",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="move the files of each failed case to FOLDER")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "campaign.jsonl", help="results so far")
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "campaign.md", help="page to write")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so do the runs
    with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as folder:
        campaign = Campaign(Path(folder), options.results, plan(Path(folder)), keep=options.keep)
        code = campaign.run(options.jobs, sections=options.section or SECTIONS, cases=options.case)
    if options.case is None:
        planned = Counter(item.section for item in campaign.items)
        write_report(options.report, campaign.of_this_commit(), planned, campaign.failed_before())
    return code


def plan(folder: Path) -> list[Item]:
    """The cases of all sections; some are found by an uninterrupted run in ``folder``."""
    with ForkServer(MODULES) as one, ForkServer(MODULES) as other:
        bench = Bench(folder / "planning", (one, other), {})
        return [item for section in SECTIONS for item in _items_of(section, bench)]


class Campaign:
    """Cases and their results; those that passed at this commit are not run again.

    Args:
        folder: for the runs.
        results: one JSON object per case that was run, appended to.
        items: all cases.
        keep: where the files of failed cases are moved to; None: they are deleted.
        modules: imported by the fork servers.
    """

    def __init__(
        self,
        folder: Path,
        results: Path,
        items: Sequence[Item],
        *,
        keep: Path | None = None,
        modules: Sequence[str] = MODULES,
    ) -> None:
        self.folder, self.results, self.items, self.keep, self.modules = folder, results, items, keep, modules
        self.commit = commit()
        self._lock = threading.Lock()

    def of_this_commit(self) -> list[dict[str, Any]]:
        """The newest result of each case."""
        return list({(row["section"], row["key"]): row for row in self._rows()}.values())

    def failed_before(self) -> list[dict[str, Any]]:
        """Failures of cases that have passed since, at this commit."""
        passed = {(row["section"], row["key"]) for row in self.of_this_commit() if row["passed"]}
        return [row for row in self._rows() if not row["passed"] and (row["section"], row["key"]) in passed]

    def _rows(self) -> list[dict[str, Any]]:
        planned, rows = {(item.section, item.key) for item in self.items}, []
        for line in self.results.read_text().splitlines() if self.results.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:  # the campaign itself was killed
                continue
            if row["commit"] == self.commit and (row["section"], row["key"]) in planned:
                rows.append(row)
        return rows

    def run(self, jobs: int, *, sections: Iterable[str] = SECTIONS, cases: Sequence[str] | None = None) -> int:
        """Run what is left, ``jobs`` cases at a time.

        Args:
            cases: texts; only cases with one of them in ``section: key`` are run, also those that passed.

        Returns:
            0 if each chosen case has passed at this commit, else 1.
        """
        chosen = [item for item in self.items if item.section in set(sections) and _is_named(item, cases)]
        passed = {(row["section"], row["key"]) for row in self.of_this_commit() if row["passed"]}
        left: queue.SimpleQueue[Item] = queue.SimpleQueue()
        for item in chosen:
            if cases is not None or (item.section, item.key) not in passed:
                left.put(item)
        print(f"commit {self.commit}: {len(chosen)} cases, {left.qsize()} to run", flush=True)
        self.results.parent.mkdir(parents=True, exist_ok=True)
        self._run = set[tuple[str, str]]() if cases is not None else passed
        workers = [threading.Thread(target=self._work, args=(number, left), daemon=True) for number in range(jobs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            while worker.is_alive():  # with a timeout, so that Ctrl-C takes effect
                worker.join(1.0)
        return self._judge(chosen)

    def _judge(self, chosen: Sequence[Item]) -> int:
        """Print how many of the chosen cases passed, failed and were not run; the exit code."""
        keys = {(item.section, item.key) for item in chosen}
        rows = {(row["section"], row["key"]): row for row in self.of_this_commit()}
        failed = [key for key in keys & rows.keys() if not rows[key]["passed"]]
        missing = sorted(keys - self._run)
        print(f"{len(chosen)} cases, {len(failed)} failed, {len(missing)} without a result; {self.results}")
        for section, key in missing[:10]:
            print(f"no result: {section}: {key}")
        if not chosen:
            print("No case was chosen: see --section and --case.")
        return 1 if failed or missing or not chosen else 0

    def _work(self, number: int, left: queue.SimpleQueue[Item]) -> None:
        with ForkServer(self.modules) as one, ForkServer(self.modules) as other:
            bench = Bench(self.folder / f"job_{number}", (one, other), {})
            while True:
                try:
                    item = left.get_nowait()
                except queue.Empty:
                    return
                self._note(item, bench, left.qsize())

    def _note(self, item: Item, bench: Bench, left: int) -> None:
        """Run one case and append its result."""
        shutil.rmtree(bench.folder, ignore_errors=True)
        bench.folder.mkdir(parents=True)
        started, facts, said = time.monotonic(), None, None
        try:
            facts = item.run(bench)
        except Exception as error:  # a mistake in a case is a failed case, and the worker has others to run
            said = f"{type(error).__name__}: {error}"[:1000]
            if not isinstance(error, Difference | TimeoutError | OSError | AssertionError):
                traceback.print_exc()
        row = {
            "commit": self.commit,
            "section": item.section,
            "key": item.key,
            "passed": said is None,
            "said": said,
            "facts": facts,
            "seconds": round(time.monotonic() - started, 2),
        }
        line = json.dumps(row)
        if said is not None and self.keep is not None:
            self._move_files(item, bench.folder)
        with self._lock:
            with self.results.open("a") as file:
                file.write(line + "\n")
            self._run.add((item.section, item.key))
            print(
                f"{left:5} left  {'ok' if said is None else 'FAILED'}  {item.section}: {item.key}  {said or ''}",
                flush=True,
            )

    def _move_files(self, item: Item, folder: Path) -> None:
        assert self.keep is not None
        target = self.keep / re.sub(r"\W+", "_", f"{item.section} {item.key}")
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder, target)


def _is_named(item: Item, texts: Sequence[str] | None) -> bool:
    return texts is None or any(text in f"{item.section}: {item.key}" for text in texts)


def _items_of(section: str, bench: Bench) -> list[Item]:
    if section == "matrix":
        return [Item("matrix", case.key, partial(_run_case, case)) for case in campaign_matrix()]
    if section == "operations":
        return operations.items(bench)
    if section == "changed rows":
        return operations.items_by_rows(bench)
    modules = {"restarts": restarts, "damage": damage, "disks": disks, "instants": instants}
    modules |= {"two ranks": ranks, "two nodes": nodes, "rank instants": rank_instants, "rank-invariant": invariant}
    modules |= {"failures": failures, "long tests": long_tests}
    items: list[Item] = modules[section].items()
    return items


def _run_case(case: Case, bench: Bench) -> dict[str, Any]:
    matrix: Matrix = bench.kept.setdefault("matrix", Matrix(bench.folder, bench.servers))
    return matrix.run(case)


if __name__ == "__main__":
    sys.exit(main())
