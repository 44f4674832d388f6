"""The GPU benchmark's reduced form runs in full on a CPU and finds nothing wrong; its arithmetic is right."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpt import GPT, Shape, flops_per_token, parameters_of
from tests.faults.fork_server import shared


@pytest.mark.long  # trains in eight sections
def test_reduced_form_runs_every_section_and_finds_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forked(command: list[str], **options: Any) -> Any:
        module, arguments = command[2], command[3:]
        code = shared([module]).call(f"{module}:main", arguments, output=tmp_path / "output.txt")
        return subprocess.CompletedProcess(command, code, stderr=(tmp_path / "output.txt").read_bytes())

    in_a_process = gpu._in_a_process

    def in_a_forked_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            patch.setattr(gpu.subprocess, "run", forked)
            return in_a_process(name, options)

    monkeypatch.setattr(gpu, "_in_a_process", in_a_forked_process)
    path = tmp_path / "report.json"
    code = gpu.main(["--cpu", "--json", str(path)])
    report = json.loads(path.read_text())
    rows = {name: {row["what"]: row for row in each["rows"]} for name, each in report["sections"].items()}

    wrong = [row for each in rows.values() for row in each.values() if not row.get("ok", True)]
    assert code == 0 and wrong == []
    assert list(rows) == list(gpu.SECTIONS) and report["reduced"]
    assert {"cpu", "torch", "commit", "device"} <= report["machine"].keys() and report["command"].endswith(str(path))
    assert len(rows["gpt"]["ours"]["seconds"]) == len(rows["overhead"]["ours+10"]["seconds"]) == gpu.REDUCED.rounds
    assert rows["gpt"]["ours"]["tokens_per_s"] > 0
    assert [len(each) for each in rows["stall"]["in the background"]["spans_s"]] == [gpu.REDUCED.save_every] * 2
    assert sum("accumulation" in what for what in rows["resume"]) == 12
    assert " skipped, " in next(iter(rows["tests"].values()))["value"] or torch.cuda.is_available()


@pytest.mark.slow
def test_section_that_fails_is_in_the_table_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def failing(name: str, options: argparse.Namespace) -> dict[str, object]:
        ran.append(name)
        return section(name if name == "gpt" else "no such section", options)

    def section(name: str, options: argparse.Namespace) -> dict[str, object]:
        return {"seconds": 0.0, "rows": []} if name == "gpt" else in_a_process(name, options)

    in_a_process = gpu._in_a_process
    monkeypatch.setattr(gpu, "_in_a_process", failing)

    assert gpu.main(["--cpu", "--sections", "fp16,gpt"]) == 1
    out = capsys.readouterr().out
    assert ran == ["fp16", "gpt"] and "FAILED" in out and "got no such section" in out and "WRONG" in out


def test_a_run_that_resumes_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    here = gpu.Here(cpu=True, rounds=None)
    assert gpu._resumes(here, "fp32", 1, background=False)
    seeds = itertools.count()
    monkeypatch.setattr("ignite_engine.rng.restore", lambda *_, **__: torch.manual_seed(next(seeds)))

    assert not gpu._resumes(here, "fp32", 1, background=False)


def test_reads_within_a_context_are_counted() -> None:
    with gpu.Waits(gpu.Here(cpu=True, rounds=None)) as waits:
        torch.ones(3).sum().item()
        float(torch.ones(()))
    torch.ones(()).item()

    assert waits.count == 2


def test_parameters_and_flops_by_hand() -> None:
    shape = Shape(layers=2, heads=2, width=8, context=4, vocabulary=32)
    block = 12 * 8 * 8 + 2 * 8  # four products of 3, 1, 4 and 4 squares of the width, and two norms
    assert parameters_of(shape) == sum(each.numel() for each in GPT(shape).parameters()) == 36 * 8 + 2 * block + 8
    assert flops_per_token(shape) == 6 * (32 * 8 + 2 * block + 8) + 12 * 2 * 4 * 8
    assert round(parameters_of(Shape()) / 1e6) == 124


def test_an_untrained_gpt_guesses_and_sees_no_future() -> None:
    shape = Shape(layers=2, heads=2, width=8, context=4, vocabulary=32)
    torch.manual_seed(0)
    model, tokens = GPT(shape), torch.randint(32, (2, 5))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(torch.tensor(32.0).log().item(), abs=0.1)
    positions = model.tokens(tokens[:, :4]) + model.positions.weight
    changed = positions.clone()
    changed[:, 3] += 1
    with torch.no_grad():
        assert torch.equal(model.blocks[0](positions)[:, :3], model.blocks[0](changed)[:, :3])


def test_waits_that_torch_warns_of_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    here = gpu.Here(cpu=True, rounds=None)
    here.device = torch.device("cuda")
    with gpu.Waits(here) as waits:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("Synchronization debug mode does not yet detect all synchronizing operations", stacklevel=1)

    assert waits.count == 3
