"""Rank-invariant runs on 1 to 4 ranks, killed and restarted on other numbers of ranks: the bits of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.campaign.resuming import Difference
from tests.campaign.runs import Bench, Item, tail
from tests.ranks.invariant_runs import KILLED, START, Case, arguments, end_of, matrix

PLANS = ((2,), (3,), (4,), (1, 2), (2, 3), (3, 4), (4, 1), (2, 4, 1, 3))
"""Numbers of ranks, one after the other."""


def items() -> list[Item]:
    cases = list(matrix())
    runs = [
        Item(
            "rank-invariant", f"{_name(case)}, {' then '.join(map(str, plan))} ranks", partial(_run, case, plan, number)
        )
        for number, case in enumerate(cases)
        for plan in PLANS
    ]
    return [*runs, Item("rank-invariant", "the usual reduction has other bits", _control)]


def _name(case: Case) -> str:
    weights = "by tokens" if case.tokens else "equal"
    workers = f", {case.workers} workers" if case.workers else ""
    return f"{case.precision}, weights {weights}, clip {case.clip_norm}, {case.micro_batches} micro-batches{workers}"


def _run(case: Case, plan: tuple[int, ...], number: int, bench: Bench) -> dict[str, Any]:
    expected = _whole(bench, case)
    folder = bench.folder / "run"
    kills = [2 + (number + part) % 3 + 2 * part for part in range(len(plan) - 1)]  # within epochs and at their ends
    for ranks, kill_at in zip(plan, [*kills, None], strict=True):
        _train(bench, folder, ranks, case, kill_at)
    found = end_of(folder)
    compared = ("model", "optimizer", "lines") + (() if kills else ("gradients",))
    if other := [name for name in compared if found[name] != expected[name]]:
        raise Difference(f"not as on one process: {', '.join(other)}")
    return {"killed_at": kills}


def _whole(bench: Bench, case: Case) -> dict[str, Any]:
    key = f"rank-invariant {case}"
    if key not in bench.kept:
        folder = bench.folder / "whole"
        _train(bench, folder, 1, case, None)
        bench.kept[key] = end_of(folder)
    found: dict[str, Any] = bench.kept[key]
    return found


def _train(bench: Bench, folder: Path, ranks: int, case: Case, kill_at: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    given = arguments(folder, ranks, case, kill_at)
    code = bench.servers[ranks % 2].call(START, *given, output=folder / "output.txt")
    if code != (0 if kill_at is None else KILLED):
        raise Difference(f"ended with code {code} on {ranks} ranks: {tail(folder)}")


def _control(bench: Bench) -> dict[str, Any]:
    usual = replace(next(matrix()), invariant=False)
    ends = []
    for ranks in (1, 2):
        _train(bench, bench.folder / f"{ranks}", ranks, usual, None)
        ends.append(end_of(bench.folder / f"{ranks}"))
    if ends[0]["model"] == ends[1]["model"]:
        raise Difference("the usual reduction has the same bits: the comparisons prove nothing")
    return {}
