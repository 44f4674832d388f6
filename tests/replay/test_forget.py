"""A run without some samples, as if it had never seen them: the bits of one that excludes them from its start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ignite_engine import rng
from ignite_engine.cli import main
from ignite_engine.config import ConfigError
from ignite_engine.config.load import config_from_dict
from ignite_engine.errors import ReplayError
from ignite_engine.replay.forget import forget, plan_to_forget
from ignite_engine.runs import recipe
from ignite_engine.runs.exclusion import Kept, digest_of, read_indices
from ignite_engine.runs.recipe import build_run
from tests.replay import fit_runs
from tests.replay.forgetting import VARIANTS, drawn_sets, forget_sets, logged, settings, train, weights_of


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_forgotten_samples_leave_the_bits_of_a_run_without_them(number: int, tmp_path: Path) -> None:
    sets = drawn_sets(2 * len(VARIANTS), seed=1)[number :: len(VARIANTS)]

    plans = forget_sets(tmp_path, VARIANTS[number], sets, ranks=1)

    assert any(plan.first_use is not None for plan in plans)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("number", [0, 4])
def test_forgotten_on_two_ranks(number: int, tmp_path: Path) -> None:
    plans = forget_sets(tmp_path, VARIANTS[number], [drawn_sets(3, seed=2)[2]], ranks=2)

    assert plans[0].ranks == 2


def batches_of(tmp_path: Path, excluded: list[int], **sections: Any) -> list[Any]:
    """What an epoch of updates was made of."""
    exclude = tmp_path / "list.txt"
    exclude.write_text("".join(f"{index}\n" for index in excluded))
    few = {
        "run": {"directory": str(tmp_path / "run"), "max_iterations": 3},
        "data": {"batch_size": 4, "shuffle": False},
    }
    few["data"]["exclude"] = str(exclude)
    few["update"] = {"accumulation_steps": 2}
    with rng.isolated():
        run = build_run(config_from_dict(settings(tmp_path / "run", few | sections)))
        seen: list[Any] = []
        original = run.trainer.update.accumulate  # type: ignore[attr-defined]

        def noted(engine: Any, micro_batches: Any, scales: list[float]) -> Any:
            seen.append(([len(kept.batch[1]) for kept in micro_batches], scales))
            return original(engine, micro_batches, scales)

        run.trainer.update.accumulate = noted  # type: ignore[attr-defined]
        run.train()
    return seen


def test_batches_become_smaller_and_weigh_what_they_hold(tmp_path: Path) -> None:
    # without shuffling, an iteration is 8 samples in a row
    seen = batches_of(tmp_path, [1, 8, 9, 10, 11])

    assert seen[0] == ([3, 4], [0.75 / 1.75, 1 / 1.75])
    assert seen[1] == ([4], [1.0])  # the first micro-batch of it has none left
    assert seen[2] == ([4, 4], [0.5, 0.5])


def test_iteration_without_a_sample_is_a_skipped_step(tmp_path: Path) -> None:
    seen = batches_of(tmp_path, [*range(8, 16)])

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(seen) == 2 and (summary["iteration"], summary["skipped_steps"]) == (3, 1)


def test_excluded_samples_are_not_read_and_evaluations_see_all(tmp_path: Path) -> None:
    exclude = tmp_path / "list.txt"
    exclude.write_text("0\n3  # broken\n\n17\n")
    values = settings(tmp_path / "run", {"run": {"directory": str(tmp_path / "run"), "max_iterations": 45}}, exclude)
    values["data"]["batch_size"] = 3
    with rng.isolated():
        run = build_run(config_from_dict(values))
        data = run.loader.dataset.dataset.dataset  # type: ignore[attr-defined]
        run.train()

    assert {*range(240)} - {*data.read} == {0, 3, 17}
    assert isinstance(run.trainer.state.batch[0], Kept)
    assert run.metrics["val/loss"] > 0


def test_own_weights_are_those_of_what_is_left(tmp_path: Path) -> None:
    sections = {"task_options": {"samples": 240, "layer_norm": True, "weights": "all"}}

    seen = batches_of(tmp_path, [1], **sections)

    # a batch of 0 to 3 weighs 1 and 1 for each of 1, 2 and 3
    assert seen[0] == ([3, 4], [3 / 7, 4 / 7]) and seen[1] == ([4, 4], [0.5, 0.5])


@pytest.mark.slow
def test_what_it_costs_is_said_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, samples, new = tmp_path / "old", tmp_path / "list.txt", tmp_path / "new"
    plain = {"data": {"shuffle": False, "batch_size": 3}}
    with rng.isolated():
        train(settings(old, plain))
        train(settings(tmp_path / "whole", plain, samples_of(samples, [100])))
    # 6 samples in an iteration: 100 is in the 17th

    with rng.isolated():
        code = main(["forget", str(old), "--samples", str(samples), "--directory", str(new)])

    assert code == 0
    said = capsys.readouterr().out
    assert "Sample 100 is the first to be used, in iteration 17 (epoch 1). From iteration_00000015 on 45 of 60" in said
    assert weights_of(new) == weights_of(tmp_path / "whole") != weights_of(old)
    assert json.loads((new / "summary.json").read_text())["resumed_from"] == "iteration_00000015"
    assert logged(new, 0) == logged(tmp_path / "whole", 0)  # with the lines before, which are the old run's
    record = json.loads((new / "forgotten.json").read_text())
    assert record["sha256"] == digest_of([100]) and record["config"]["data"]["exclude"] is None
    assert record["first_use"] == {"iteration": 17, "epoch": 1, "sample": 100}
    assert read_indices(new / "excluded.txt", 240) == {100}

    again = tmp_path / "more.txt"
    samples_of(again, [200])
    plan = plan_to_forget(new, again, tmp_path / "newer")
    assert plan.excluded == {100, 200} and plan.first_use is not None and plan.first_use.iteration == 34


def samples_of(path: Path, indices: list[int]) -> Path:
    path.write_text("".join(f"{index}\n" for index in indices))
    return path


def test_samples_that_were_never_used_are_nothing_to_forget(tmp_path: Path) -> None:
    with rng.isolated():
        train(
            settings(
                tmp_path / "old",
                {"data": {"shuffle": False, "batch_size": 3}, "run": {"max_iterations": 4}} | run_in(tmp_path),
            )
        )

    plan = plan_to_forget(tmp_path / "old", samples_of(tmp_path / "list.txt", [200]), tmp_path / "new")

    assert plan.first_use is None and "has used none of the samples in 4 iterations" in str(plan)
    assert not (tmp_path / "new").exists()


def run_in(tmp_path: Path) -> dict[str, Any]:
    return {"run": {"directory": str(tmp_path / "old"), "max_iterations": 4, "seed": 2, "name": "run"}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3\nfour\n", "line 2 is 'four', expected an index from 0 to 239"),
        ("240\n", "line 1 is '240', expected an index from 0 to 239"),
        ("-1\n", "line 1 is '-1', expected"),
        ("# none\n", "it names none of the 240 samples"),
        ("\n".join(map(str, range(240))), "it names all of the 240 samples"),
    ],
)
def test_list_that_is_wrong_is_one_line(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(text)

    with pytest.raises(ConfigError, match=re.escape(expected)) as refusal:
        build_run(config_from_dict(settings(tmp_path / "run", {}, tmp_path / "list.txt")))

    assert "data.exclude" in str(refusal.value) and "\n" not in str(refusal.value)


def test_data_without_indices_is_refused(tmp_path: Path) -> None:
    samples_of(tmp_path / "list.txt", [1])
    (tmp_path / "loader_task.py").write_text(
        "import torch\nfrom ignite_engine import Task\n\ndef build(options):\n    model = torch.nn.Linear(2, 1)\n"
        "    data = torch.utils.data.DataLoader(torch.zeros(8, 2))\n"
        "    return Task(model, lambda model, batch: model(batch).mean(), data)\n"
    )
    values = settings(tmp_path / "run", {}, tmp_path / "list.txt") | {
        "task": f"{tmp_path}/loader_task.py:build",
        "task_options": {},
    }

    with pytest.raises(ConfigError, match="the train_set is a DataLoader, whose samples have no indices"):
        build_run(config_from_dict(values))


def test_samples_of_a_run_of_fit_are_forgotten_by_its_function(tmp_path: Path) -> None:
    samples = samples_of(tmp_path / "list.txt", [5, 70])
    with rng.isolated():
        whole = fit_runs.excluding_some(tmp_path / "whole", samples)
        fit_runs.of_columns(tmp_path / "old")
        with pytest.raises(ReplayError, match=r"was made by fit\(\): give the function that calls it"):
            forget(tmp_path / "old", samples, tmp_path / "new")

        forget(tmp_path / "old", samples, tmp_path / "new", fit_runs.of_columns)

    assert weights_of(tmp_path / "new") == whole.summary["weights_sha256"] != weights_of(tmp_path / "old")


def test_run_that_cannot_be_forgotten_from_is_refused(tmp_path: Path) -> None:
    samples = samples_of(tmp_path / "list.txt", [1])
    with pytest.raises(ReplayError, match="does not exist: expected the folder of a run"):
        plan_to_forget(tmp_path / "nothing", samples, tmp_path / "new")
    with rng.isolated():
        train(settings(tmp_path / "old", run_in(tmp_path)))
    with pytest.raises(ReplayError, match=r"list\.txt is not a folder: give another --directory"):
        plan_to_forget(tmp_path / "old", samples, samples)
    with pytest.raises(ReplayError, match="is in the folder of the run"):
        plan_to_forget(tmp_path / "old", samples, tmp_path / "old" / "new")
    with pytest.raises(ReplayError, match="holds a run: give another --directory"):
        plan_to_forget(tmp_path / "old", samples, tmp_path / "old")
    with pytest.raises(ReplayError, match="was trained on 1 ranks, got 2"):
        plan_to_forget(tmp_path / "old", samples, tmp_path / "new", ranks=2)
    longer = run_in(tmp_path)
    longer["run"]["max_iterations"] = 8
    with rng.isolated():
        train(settings(tmp_path / "old", longer | {"update": {"clip_norm": 0.5}}))
    with pytest.raises(ReplayError, match=r"has changed its settings \(update\) after iteration 0"):
        plan_to_forget(tmp_path / "old", samples, tmp_path / "new")


def test_list_that_was_edited_since_is_refused_by_resumes_and_forgetting(tmp_path: Path) -> None:
    samples = samples_of(tmp_path / "list.txt", [3, 7])
    values = settings(tmp_path / "old", run_in(tmp_path), samples)
    with rng.isolated():
        train(values)
        whole = weights_of(tmp_path / "old")
    assert json.loads((tmp_path / "old" / "exclusion.json").read_text()) == {"samples": 2, "sha256": digest_of([3, 7])}

    for edited in ("3\n8\n", None):
        samples.write_text(edited or "3\n7\n")
        values["data"]["exclude"] = edited and str(samples)
        with rng.isolated(), pytest.raises(ConfigError, match="leaves out other samples") as refusal:
            train(values)
        assert "data.exclude: got" in str(refusal.value) and "\n" not in str(refusal.value)
        assert weights_of(tmp_path / "old") == whole
    samples.write_text("3\n8\n")
    with pytest.raises(ReplayError, match=r"names other samples than .* has left out"):
        plan_to_forget(tmp_path / "old", samples_of(tmp_path / "more.txt", [1]), tmp_path / "new")
    samples.write_text("# in another order\n7\n3\n")
    values["data"]["exclude"] = str(samples)
    values["run"]["max_iterations"] = 6
    with rng.isolated():
        train(values)
    assert json.loads((tmp_path / "old" / "summary.json").read_text())["iteration"] == 6
    values["run"]["restart"] = True
    samples.write_text("3\n8\n")
    with rng.isolated():
        config = config_from_dict(values)
        with recipe.logged(config):
            recipe.build_run(config).train()
    assert json.loads((tmp_path / "old" / "exclusion.json").read_text())["sha256"] == digest_of([3, 8])


def test_forgotten_run_whose_list_was_edited_is_not_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["ignite-engine"])
    with rng.isolated():
        train(settings(tmp_path / "old", {"data": {"shuffle": False, "batch_size": 3}, **run_in(tmp_path)}))
        forget(tmp_path / "old", samples_of(tmp_path / "list.txt", [20]), tmp_path / "new")
        (tmp_path / "new" / "excluded.txt").write_text("20\n21\n")

        assert main(["train", str(tmp_path / "new" / "config.yaml"), "run.max_iterations=8"]) == 2

    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "data.exclude: got" in line and "with 2 samples" in line


def test_exclusion_changes_nothing_before_the_first_use(tmp_path: Path) -> None:
    samples = samples_of(tmp_path / "list.txt", [239])
    plain = {"data": {"shuffle": False, "batch_size": 3}, **run_in(tmp_path)}
    with rng.isolated():
        train(settings(tmp_path / "old", plain))
        train(
            settings(tmp_path / "new", plain | {"run": {**plain["run"], "directory": str(tmp_path / "new")}}, samples)
        )

    assert json.loads((tmp_path / "new" / "summary.json").read_text())["iteration"] == 4
    assert weights_of(tmp_path / "new") == weights_of(tmp_path / "old")


def test_share_of_a_batch_is_its_weight_and_a_part_of_one_weighs_its_samples() -> None:
    from ignite_engine.runs.exclusion import _WeighKept

    weigh = _WeighKept(None)
    assert weigh(Kept(torch.zeros(3, 2), 0.75)) == 0.75 and weigh(torch.zeros(2, 2)) == 2.0
    assert _WeighKept(lambda batch: 5)(Kept(torch.zeros(1), 0.0)) == 0.0
