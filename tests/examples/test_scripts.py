"""The short examples show what they say they show."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import custom_handler, gan, kept_engine, own_update, ranks, resume
from ignite_engine import load_weights
from tests.kit import processes
from tests.kit.fitting import log
from tests.kit.tiny import weights

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("example", "length", "cut", "whole"),
    [(custom_handler, "batches", 60, 100), (gan, "iterations", 30, 110), (own_update, "epochs", 2, 3)],
    ids=["custom_handler", "gan", "own_update"],
)
def test_a_script_started_again_continues(example, length, cut, whole, tmp_path):
    alone = example.main(str(tmp_path / "whole"), **{length: whole})
    example.main(str(tmp_path / "cut"), **{length: cut})
    resumed = example.main(str(tmp_path / "cut"), **{length: whole})
    assert torch.equal(weights(resumed), weights(alone))
    assert log(tmp_path / "whole") == [line for line in log(tmp_path / "cut") if line["iteration"] != cut or cut == 60]


def test_the_handler_finds_the_spoiled_batches(tmp_path):
    custom_handler.main(str(tmp_path))
    assert [line["loss_jumps"] for line in log(tmp_path)] == [0, 1, 2, 3, 3]


def test_the_own_update_takes_the_weights_nearby(tmp_path):
    at_0 = own_update.main(str(tmp_path / "at_0"), epochs=1, rho=0.0)
    at_some = own_update.main(str(tmp_path / "at_some"), epochs=1)
    assert not torch.equal(weights(at_0), weights(at_some))
    assert all(row["loss/nearby"] > row["loss"] for row in log(tmp_path / "at_some"))
    assert all(row["loss/nearby"] == row["loss"] for row in log(tmp_path / "at_0"))


def test_a_resumed_run_has_the_bits_of_the_whole_one(tmp_path, capsys):
    resume.main(str(tmp_path))
    assert "321 weights, of which 0 differ" in capsys.readouterr().out
    assert log(tmp_path / "whole") == log(tmp_path / "stopped")


def continues(main, folder, capsys):
    main(str(folder / "whole"), epochs=3)
    main(str(folder / "cut"), epochs=2)
    main(str(folder / "cut"), epochs=3)
    whole, cut, resumed = [line for line in capsys.readouterr().out.splitlines() if "weights" in line]
    return whole == resumed != cut


def test_an_engine_of_ignites_is_kept_and_continues(tmp_path, capsys):
    assert continues(kept_engine.main, tmp_path, capsys)


@pytest.mark.nightly  # with a package that is not among those for development
def test_a_trainer_of_monai_is_kept_and_continues(tmp_path, capsys):
    pytest.importorskip("monai")
    from examples import monai_trainer

    assert continues(monai_trainer.main, tmp_path, capsys)


def test_without_monai_its_example_says_so_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "monai.engines", None)
    monkeypatch.delitem(sys.modules, "examples.monai_trainer", raising=False)
    with pytest.raises(SystemExit, match="pip install monai"):
        importlib.import_module("examples.monai_trainer")


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.nightly)])
def test_ranks_train_as_one_process_and_continue(kind, tmp_path):
    alone = ranks.train(0, "ddp", str(tmp_path / "alone"))

    def on_a_rank(rank):
        trainers = [ranks.train(rank, kind, str(tmp_path / "several")) for _ in range(2)]
        held = sum(
            getattr(each, "to_local", lambda each=each: each)().numel()
            for each in trainers[0].update.model.parameters()
        )
        return [trainer.state.start.value for trainer in trainers], held

    (starts, first), (_, second) = processes.ranks(2, on_a_rank)
    model = ranks.network()
    load_weights(model, tmp_path / "several")
    total = sum(parameter.numel() for parameter in model.parameters())
    assert starts == ["fresh", "resumed"] and first + second == (total if kind == "fsdp" else 2 * total)
    found = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(found, weights(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")])
def test_ranks_are_started_by_the_script_and_by_torchrun(launcher, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *launcher, str(ROOT / "examples" / "ranks.py"), "ddp", str(tmp_path)]
    subprocess.run(command, env=environment, timeout=180, check=True)
    assert len(log(tmp_path)) == 4


def test_the_page_of_examples_has_each_of_them():
    text = (ROOT / "docs" / "examples.md").read_text()
    assert not [path.name for path in (ROOT / "examples").glob("[!_]*.*") if f"(../examples/{path.name})" not in text]
