"""``python -m tests.campaign``: run what has not passed at this commit, then write the page of results."""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from tests.campaign import (
    damage,
    disks,
    failures,
    instants,
    invariant,
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
)


def main() -> int:
    """Run it; the exit code is 1 if a case fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time, default 2")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this section; may be repeated")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "campaign.jsonl", help="results so far")
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "campaign.md", help="page to write")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so do the runs
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as folder:
        campaign = Campaign(Path(folder), options.results, options.section or SECTIONS)
        campaign.run(options.jobs)
    write_report(options.report, campaign.of_this_commit(), Counter(item.section for item in campaign.items))
    failed = [each for each in campaign.of_this_commit() if not each["passed"]]
    print(f"{len(campaign.of_this_commit())} cases, {len(failed)} failed; {options.report}")
    return 1 if failed else 0


class Campaign:
    """All items; those that passed at this commit are not run again.

    Args:
        folder: for the runs.
        results: one JSON object per item that was run, appended to.
        sections: those to run.
    """

    def __init__(self, folder: Path, results: Path, sections: Any) -> None:
        self.folder, self.results, self.sections = folder, results, sections
        self.commit = commit()
        self.items: list[Item] = []
        self._lock = threading.Lock()

    def of_this_commit(self) -> list[dict[str, Any]]:
        """The newest result of each item."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for line in self.results.read_text().splitlines() if self.results.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:  # the campaign itself was killed
                continue
            if row["commit"] == self.commit:
                found[row["section"], row["key"]] = row
        return list(found.values())

    def run(self, jobs: int) -> None:
        """Run what is left, ``jobs`` items at a time."""
        with ForkServer(MODULES) as one, ForkServer(MODULES) as other:
            bench = Bench(self.folder / "planning", (one, other), {})
            self.items = [item for section in SECTIONS for item in _items_of(section, bench)]
        done = {(row["section"], row["key"]) for row in self.of_this_commit() if row["passed"]}
        left: queue.SimpleQueue[Item] = queue.SimpleQueue()
        for item in self.items:
            if item.section in self.sections and (item.section, item.key) not in done:
                left.put(item)
        print(f"commit {self.commit}: {len(self.items)} cases, {left.qsize()} to run", flush=True)
        workers = [threading.Thread(target=self._work, args=(number, left), daemon=True) for number in range(jobs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            while worker.is_alive():  # with a timeout, so that Ctrl-C takes effect
                worker.join(1.0)

    def _work(self, number: int, left: queue.SimpleQueue[Item]) -> None:
        with ForkServer(MODULES) as one, ForkServer(MODULES) as other:
            bench = Bench(self.folder / f"job_{number}", (one, other), {})
            while True:
                try:
                    item = left.get_nowait()
                except queue.Empty:
                    return
                self._note(item, bench, left.qsize())

    def _note(self, item: Item, bench: Bench, left: int) -> None:
        """Run one item and append its result."""
        shutil.rmtree(bench.folder, ignore_errors=True)
        bench.folder.mkdir(parents=True)
        started, facts, said = time.monotonic(), None, None
        try:
            facts = item.run(bench)
        except (Difference, TimeoutError, OSError, AssertionError) as error:
            said = f"{type(error).__name__}: {error}"[:1000]
        row = {
            "commit": self.commit,
            "section": item.section,
            "key": item.key,
            "passed": said is None,
            "said": said,
            "facts": facts,
            "seconds": round(time.monotonic() - started, 2),
        }
        with self._lock:
            with self.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{left:5} left  {'ok' if said is None else 'FAILED'}  {item.section}: {item.key}  {said or ''}",
                flush=True,
            )


def _items_of(section: str, bench: Bench) -> list[Item]:
    if section == "matrix":
        return [Item("matrix", case.key, partial(_run_case, case)) for case in campaign_matrix()]
    if section == "operations":
        return operations.items(bench)
    if section == "changed rows":
        return operations.items_by_rows(bench)
    modules = {"restarts": restarts, "damage": damage, "disks": disks, "instants": instants}
    modules |= {"two ranks": ranks, "two nodes": nodes, "rank instants": rank_instants, "rank-invariant": invariant}
    modules["failures"] = failures
    items: list[Item] = modules[section].items()
    return items


def _run_case(case: Case, bench: Bench) -> dict[str, Any]:
    matrix: Matrix = bench.kept.setdefault("matrix", Matrix(bench.folder, bench.servers))
    return matrix.run(case)


if __name__ == "__main__":
    sys.exit(main())
