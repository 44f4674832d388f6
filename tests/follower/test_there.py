"""A follower on another machine: it reaches the mirror alone, and so does what it measures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ignite.engine import Events

from ignite_engine import Trainer, follow
from ignite_engine.checkpointing import CheckpointError, CheckpointInfo, CheckpointStore, Retention, read_manifest
from ignite_engine.checkpointing.manifest import MANIFEST_NAME
from ignite_engine.checkpointing.retention import ranked
from ignite_engine.cli import main
from ignite_engine.followed_log import FollowedLog, identity_of
from ignite_engine.follower import life, there
from ignite_engine.handlers import Checkpoint
from ignite_engine.mirror import followed
from ignite_engine.mirror.followed import FOLLOWER, MEASURED, RUN, RunNotes, measured_lines, read_note, write_note
from ignite_engine.mirror.remote import Remote
from ignite_engine.mirror.upload import Contents
from ignite_engine.run_directory import RunDirectory, RunDirectoryInUse
from tests.builders import numbers_loader
from tests.checkpointing.states import save
from tests.faults.processes import lines, start, summary, wait_until, write_config
from tests.follower import test_follow, test_follower
from tests.mirror.servers import Proxy


def train(folder: Path, mirror: str) -> dict[int, float]:
    """A run of 6 iterations that saves each second one here and there; its own values by iteration."""
    trainer, its_own = test_follower.build(), dict[int, float]()
    Checkpoint(folder / "checkpoints", keep_last=9, mirror=mirror).attach(trainer, Events.ITERATION_COMPLETED(every=2))

    @trainer.on(Events.ITERATION_COMPLETED(every=2))
    def note() -> None:
        its_own[trainer.state.iteration] = trainer.state.metrics["val/loss"]

    @trainer.on(Events.ITERATION_STARTED)
    def wait() -> None:
        """Until each is uploaded: a slow machine would leave one out."""
        deadline = time.monotonic() + 20
        while not all((Path(mirror) / info.path.name / MANIFEST_NAME).exists() for info in test_follower.infos(folder)):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    trainer.run(numbers_loader(), max_epochs=1)
    for info in test_follower.infos(folder):  # as if the run had not evaluated
        for place in (info.path, Path(mirror) / info.path.name):
            without(place)
    return its_own


def without(checkpoint: Path) -> None:
    """Take its metrics out of a manifest."""
    (checkpoint / MANIFEST_NAME).write_bytes(replace(read_manifest(checkpoint), metrics={}).to_json())


def followed_from(
    folder: Path, mirror: str, during: Callable[[Mapping[str, Any]], None] | None = None, **options: Any
) -> dict[str, float]:
    """What a follower in another folder announces, in its order."""
    found: dict[str, float] = {}

    def build() -> Trainer:
        trainer = test_follower.build()
        Checkpoint(folder / "checkpoints", mirror=mirror).attach(trainer)
        return trainer

    def announce(values: Mapping[str, Any]) -> None:
        found[values["checkpoint"]] = values["val/loss"]
        if during is not None:
            during(values)

    assert follow(folder, build, announce=announce, **{"wait_s": 1, **options}) == len(found)
    return found


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (there, followed):
        monkeypatch.setattr(module, "BEAT_S", 0.2)
    monkeypatch.setattr(there.There, "look_every_s", 0.1)


def test_the_values_of_the_run_are_measured_and_brought_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror, elsewhere = str(tmp_path / "mirror"), tmp_path / "elsewhere"
    its_own = train(tmp_path / "here", mirror)
    assert read_note(Remote(mirror), RUN)["status"] == "completed"

    values = followed_from(elsewhere, mirror)
    expected = {f"{mirror}/iteration_{iteration:08d}": its_own[iteration] for iteration in (6, 4, 2)}
    assert values == expected and list(values) == list(expected), "the newest first"
    there = CheckpointStore(mirror).checkpoints()
    assert {info.iteration: info.manifest.metrics["val/loss"] for info in there} == its_own
    assert sorted(path.name for path in (tmp_path / "mirror" / "follow").iterdir()) == ["metrics.jsonl", "run.json"]
    assert [path.name for path in (elsewhere / "follow" / "checkpoints").iterdir()] == ["iteration_00000002"]
    shutil.rmtree(elsewhere)
    assert followed_from(tmp_path / "third", mirror) == {}, "nothing is measured twice, from no machine"

    assert main(["checkpoints", "pull", mirror, str(tmp_path / "here")]) == 0
    assert "follow/metrics.jsonl  values of 3 checkpoints, measured beside the run" in capsys.readouterr().out
    infos = test_follower.infos(tmp_path / "here")
    assert {info.iteration: info.manifest.metrics["val/loss"] for info in infos} == its_own
    logged = {row["iteration"]: row["val/loss"] for row in RunDirectory(tmp_path / "here").logged()}
    assert logged == its_own


def test_what_is_evaluated_elsewhere_is_kept_in_both_places_while_its_follower_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, remote = CheckpointStore(tmp_path / "here" / "checkpoints"), Remote(str(tmp_path / "mirror"))
    for iteration in (1, 2, 3):
        path = save(store, iteration, run_id="a")
        shutil.copytree(path, tmp_path / "mirror" / path.name)
    contents, notes = Contents(remote, Retention(keep_last=1)), RunNotes(remote, store.directory)
    note = {"who": "process 1", "where": "elsewhere", "holds": ["iteration_00000001", "../x", 3], "count": 1}
    write_note(remote, FOLLOWER, note)

    notes.look()
    assert contents.prune("iteration_00000003", notes) == ["iteration_00000002"]
    assert [path.name for path in store.apply(Retention(keep_last=1))] == ["iteration_00000002"]
    monkeypatch.setattr(followed, "_ALIVE_S", 0.3)
    time.sleep(0.2)
    write_note(remote, FOLLOWER, note | {"count": 2})
    notes.look()
    time.sleep(0.2)
    notes.look()
    assert contents.prune("iteration_00000003", notes) == []
    time.sleep(0.2)
    notes.look()  # it was killed
    assert contents.prune("iteration_00000003", notes) == ["iteration_00000001"]
    assert [path.name for path in store.apply(Retention(keep_last=1))] == ["iteration_00000001"]


def test_a_checkpoint_that_is_gone_is_not_held_however_often_it_is_asked_for(tmp_path: Path) -> None:
    remote = Remote(str(tmp_path / "mirror"))
    saved = [
        CheckpointInfo(path, read_manifest(path))
        for path in (save(CheckpointStore(tmp_path / "mirror"), iteration, run_id="a") for iteration in (1, 2))
    ]
    place = there.There(remote, RunDirectory(tmp_path / "elsewhere"), wait_s=1)
    shutil.rmtree(saved[0].path)

    assert [place.hold(checkpoint) for checkpoint in (*saved, *saved)] == [False, True, False, True]
    place.let_go(saved[1])
    assert place.hold(saved[1])
    assert (read_note(remote, FOLLOWER) or {})["holds"] == ["iteration_00000002"]


@pytest.mark.parametrize("value", [0.5, 2.0])
def test_the_best_is_kept_in_the_mirror_whether_its_value_comes_before_or_after_the_next_save(
    tmp_path: Path, value: float
) -> None:
    store, remote = CheckpointStore(tmp_path / "here" / "checkpoints"), Remote(str(tmp_path / "mirror"))
    log, kept = FollowedLog(tmp_path / "log.jsonl"), Retention(keep_last=1, best="val/loss")
    saved = [save(store, iteration, run_id="a") for iteration in (1, 2)]
    for path in saved:
        shutil.copytree(path, tmp_path / "mirror" / path.name)
    contents, notes = Contents(remote, kept), RunNotes(remote, store.directory)
    first, second = test_follower.infos(tmp_path / "here")

    def measure(info: CheckpointInfo, loss: float) -> list[str]:
        log.add(info, {"val/loss": loss})
        remote.write(MEASURED, log.text())
        write_note(remote, FOLLOWER, {"holds": ["iteration_00000001"] if info == second else [], "count": loss})
        notes.look()
        contents.add_measured(notes.lines)
        return contents.prune("iteration_00000002", notes)

    assert measure(second, 1.0) == [], "the first is evaluated"
    assert measure(first, value) == ([] if value < 1 else ["iteration_00000001"])
    best = ranked(remote.checkpoints()[0], "val/loss", "min")[0]
    assert best.manifest.metrics["val/loss"] == min(value, 1.0)
    here = store.best("val/loss", "min")
    assert here is not None and here.path.name == best.path.name


class Mirrored:
    """A run with checkpoints 1 and 2, of which retention keeps the last and the best, and a follower elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.remote = Remote(str(folder / "mirror"))
        self.store = CheckpointStore(folder / "here" / "checkpoints")
        for iteration in (1, 2):
            path = save(self.store, iteration, run_id="a")
            shutil.copytree(path, folder / "mirror" / path.name)
        self.first, self.second = self.store.checkpoints()
        self.retention = Retention(keep_last=1, best="val/loss")
        self.contents, self.notes = Contents(self.remote, self.retention), RunNotes(self.remote, self.store.directory)
        self.notes.status = "running"
        self.follower = there.There(self.remote, RunDirectory(folder / "elsewhere"), wait_s=1)
        self.log = FollowedLog(self.follower.run.followed)

    def look(self) -> None:
        """The run looks for values and adds them to the mirror."""
        self.notes.look()
        self.contents.add_measured(self.notes.lines)

    def prune(self) -> list[str]:
        """The run deletes in both places what is not kept; returns what it has deleted in its folder."""
        self.contents.prune("iteration_00000002", self.notes)
        return [path.name for path in self.store.apply(self.retention)]

    def measure(self, value: float) -> None:
        """The follower has evaluated the first one."""
        self.log.add(self.first, {"val/loss": value})

    def bring_and_let_go(self, value: float) -> None:
        """The follower has evaluated the first one, and says so."""
        self.measure(value)
        self.follower.measured(self.first, {})
        self.follower.let_go(self.first)
        self.follower._sign()

    def best(self) -> list[float]:
        """The value of the first one, in the mirror and in the folder."""
        places = self.remote.checkpoints()[0], self.store.checkpoints()
        return [info.manifest.metrics["val/loss"] for place in places for info in place if info.iteration == 1]


def test_what_a_killed_follower_has_held_stays_until_the_next_one_has_brought_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Mirrored(tmp_path)
    write_note(run.remote, FOLLOWER, {"where": "x", "holds": ["iteration_00000001"], "count": 1})
    run.look()
    run.measure(0.5)  # and is killed before the mirror has it

    def write_and_prune(*arguments: Any) -> None:
        write_note(*arguments)
        run.look()
        run.prune()

    monkeypatch.setattr(there, "write_note", write_and_prune)
    run.follower._take_over()
    assert run.best() == [0.5, 0.5]


def test_what_is_let_go_stays_until_its_values_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Mirrored(tmp_path)
    assert run.follower.hold(run.first)
    run.look()
    run.bring_and_let_go(0.5)

    def read_and_prune(remote: Remote) -> Any:
        assert run.store.apply(run.retention) == []
        return measured_lines(remote)

    monkeypatch.setattr(followed, "measured_lines", read_and_prune)
    run.look()
    assert run.prune() == [] and run.best() == [0.5, 0.5]


def test_a_checkpoint_that_is_being_deleted_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, held = Mirrored(tmp_path), []
    delete = run.remote.delete

    def hold_and_delete(name: str) -> None:
        held.append(run.follower.hold(run.first))
        delete(name)

    monkeypatch.setattr(run.remote, "delete", hold_and_delete)
    run.look()
    run.prune()
    assert held == [False] and [info.iteration for info in run.follower.saved()] == [2]


def test_a_checkpoint_that_is_held_since_the_last_look_is_not_deleted(tmp_path: Path) -> None:
    run = Mirrored(tmp_path)
    run.look()
    assert run.follower.hold(run.first)
    assert run.contents.prune("iteration_00000002", run.notes) == []
    run.look()
    assert [info.iteration for info in run.follower.saved()] == [1, 2] and run.follower.hold(run.first)


def test_a_checkpoint_that_was_found_to_be_the_best_since_the_last_look_is_not_deleted(tmp_path: Path) -> None:
    run = Mirrored(tmp_path)
    run.look()
    assert run.follower.hold(run.first)
    run.bring_and_let_go(0.5)
    assert run.prune() == [] and run.best() == [0.5, 0.5]


def test_a_checkpoint_is_held_until_a_mirror_that_failed_has_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, failures = Mirrored(tmp_path), [OSError("no route"), OSError("no route")]
    assert run.follower.hold(run.first)
    write = run.remote.write

    def fail(name: str, text: bytes) -> None:
        if name == MEASURED and failures:
            raise failures.pop()
        write(name, text)

    monkeypatch.setattr(run.remote, "write", fail)
    run.measure(0.5)
    run.follower.measured(run.first, {})
    assert not failures and [line["val/loss"] for line in measured_lines(run.remote)] == [0.5]


def test_the_value_of_a_follower_that_was_killed_before_its_next_note_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Mirrored(tmp_path)
    assert run.follower.hold(run.first)
    run.look()
    run.measure(0.5)
    run.follower.measured(run.first, {})
    monkeypatch.setattr(followed, "_ALIVE_S", 0.2)
    time.sleep(0.3)
    run.look()
    assert run.prune() == [] and run.best() == [0.5, 0.5]


@pytest.mark.parametrize("between", ["looks", "runs"])
def test_the_value_of_a_follower_that_has_come_and_gone_is_taken(tmp_path: Path, between: str) -> None:
    run = Mirrored(tmp_path)
    run.look()
    if between == "runs":
        run.notes.status = "completed"
        run.look()
    run.follower.begin(run.log)
    assert run.follower.hold(run.first)
    run.measure(0.5)
    run.follower.measured(run.first, {})
    run.follower.let_go(run.first)
    run.follower.release()
    if between == "runs":
        run.notes.status = "running"
        run.look()
    assert run.prune() == [] and run.best() == [0.5, 0.5]


def test_a_follower_that_is_stopped_before_the_mirror_has_its_value_leaves_it_there(tmp_path: Path) -> None:
    run = Mirrored(tmp_path)
    run.follower.begin(run.log)
    assert run.follower.hold(run.first)
    run.look()
    run.measure(0.5)
    run.follower.release()
    run.look()
    assert run.prune() == [] and run.best() == [0.5, 0.5]


def test_a_checkpoint_is_not_held_by_a_note_that_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Mirrored(tmp_path)
    run.look()
    with monkeypatch.context() as patch:
        patch.setattr(there, "write_note", lambda *_: (_ for _ in ()).throw(OSError("no route")))
        with pytest.raises(OSError, match="no route"):
            run.follower.hold(run.first)
    assert run.follower.hold(run.first) and read_note(run.remote, FOLLOWER)["holds"] == ["iteration_00000001"]


def test_what_another_follower_has_measured_stays_though_the_mirror_was_gone_at_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Mirrored(tmp_path)
    run.measure(0.5)
    run.follower._write_log()
    second = there.There(run.remote, RunDirectory(tmp_path / "third"), wait_s=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(run.remote, "checkpoints", lambda: (_ for _ in ()).throw(OSError("no route")))
        second.begin(FollowedLog(second.run.followed))
    second.end()
    second.release()
    assert [line["val/loss"] for line in measured_lines(run.remote)] == [0.5]


@pytest.mark.parametrize("where", ["run", "follower"])
def test_a_value_that_one_log_has_stays_though_a_clock_was_behind(tmp_path: Path, where: str) -> None:
    run = Mirrored(tmp_path)
    for info, hour in ((run.first, 13), (run.second, 12)):  # the run went on on another machine
        text = replace(info.manifest, created_at=f"2026-01-01T{hour}:00:00+00:00").to_json()
        for place in (info.path, tmp_path / "mirror" / info.path.name):
            (place / MANIFEST_NAME).write_bytes(text)
    first, second = run.store.checkpoints()
    log = run.log if where == "follower" else FollowedLog.beside(run.store.directory)
    log.add(first, {"val/loss": 1.0})
    run.remote.write(MEASURED, log.text())
    log.add(second, {"val/loss": 2.0}, [first, second])  # and its follower was killed

    if where == "follower":
        run.follower._write_log()
    else:
        assert followed.take(measured_lines(run.remote), run.store.directory) == 0
    assert [line["val/loss"] for line in log.lines()] == [1.0, 2.0]


def test_values_of_iterations_that_the_run_has_left_are_not_counted_as_new(tmp_path: Path) -> None:
    store, others = CheckpointStore(tmp_path / "run" / "checkpoints"), FollowedLog(tmp_path / "others.jsonl")
    log = FollowedLog.beside(store.directory)
    for iteration in (1, 4, 6):
        save(store, iteration, run_id="a")
    first, *left = store.checkpoints()
    log.add(first, {"val/loss": 1.0})
    for info in left:
        log.add(info, {"val/loss": 2.0})
    others.add(first, {"val/loss": 1.0})
    time.sleep(0.01)
    save(store, 3, run_id="a")  # the run was resumed from the first one
    others.add(store.checkpoints()[-1], {"val/loss": 3.0})

    assert followed.take(others.lines(), store.directory) == 1
    assert [line["iteration"] for line in log.lines()] == [1, 3]


def test_what_a_run_that_was_killed_was_about_to_delete_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Mirrored(tmp_path)
    run.notes.leave(["iteration_00000001"])
    assert [info.iteration for info in run.follower.saved()] == [2]
    monkeypatch.setattr(followed, "_ALIVE_S", 0.1)
    time.sleep(0.2)
    assert [info.iteration for info in run.follower.saved()] == [1, 2]


def test_a_deletion_outside_of_a_run_does_not_say_that_one_trains(tmp_path: Path) -> None:
    run = Mirrored(tmp_path)
    run.notes.status = "completed"
    run.look()
    run.notes.status = None
    run.prune()
    assert read_note(run.remote, RUN)["status"] == "completed"


def test_values_that_cannot_be_written_here_keep_their_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Mirrored(tmp_path)
    assert run.follower.hold(run.first)
    run.look()
    run.bring_and_let_go(0.5)
    with monkeypatch.context() as patch:
        patch.setattr(
            CheckpointStore, "add_metrics", lambda *_: (_ for _ in ()).throw(CheckpointError("No space left on device"))
        )
        run.look()
        assert run.store.apply(run.retention) == [] and "could not be written here: No space left" in caplog.text
    run.look()
    assert run.prune() == [] and run.best() == [0.5, 0.5]


def test_a_checkpoint_that_cannot_be_fetched_is_left_out_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = str(tmp_path / "mirror")
    its_own, get = train(tmp_path / "here", mirror), Remote.get

    def fail(self: Remote, name: str, *arguments: Any) -> None:
        if name.startswith("iteration_00000004"):
            raise PermissionError("access denied")
        get(self, name, *arguments)

    monkeypatch.setattr(Remote, "get", fail)
    assert [*followed_from(tmp_path / "elsewhere", mirror).values()] == [its_own[6], its_own[2]]
    assert "iteration_00000004 is not evaluated: it was not fetched in 10 tries: " in caplog.text


@pytest.mark.parametrize("after", range(6))
def test_a_mirror_that_does_not_answer_for_a_moment_costs_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    mirror = str(tmp_path / "mirror")
    its_own, calls = train(tmp_path / "here", mirror), 0
    checkpoints = Remote.checkpoints

    def fail_twice(self: Remote) -> Any:
        nonlocal calls
        calls += 1
        if after < calls <= after + 2:
            raise OSError("no route")
        return checkpoints(self)

    monkeypatch.setattr(Remote, "checkpoints", fail_twice)
    assert [*followed_from(tmp_path / "elsewhere", mirror).values()] == [its_own[iteration] for iteration in (6, 4, 2)]
    there = CheckpointStore(mirror).checkpoints()
    assert {info.iteration: info.manifest.metrics["val/loss"] for info in there} == its_own


def test_time_in_which_a_follower_evaluates_is_no_silence_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, failures, names = str(tmp_path / "mirror"), list[OSError](), Remote.names
    its_own = train(tmp_path / "here", mirror)
    write_note(Remote(mirror), RUN, {"status": "running", "count": 1})

    def fail(self: Remote) -> list[str]:
        if failures:
            raise failures.pop()
        return names(self)

    def evaluate_for_long(values: Mapping[str, Any]) -> None:
        if values["iteration"] == 6:
            time.sleep(1.2)  # longer than the follower waits
            failures.extend([OSError("no route"), OSError("no route")])  # of the two looks after it

    monkeypatch.setattr(Remote, "names", fail)
    values = followed_from(tmp_path / "elsewhere", mirror, during=evaluate_for_long)
    assert not failures and [*values.values()] == [its_own[iteration] for iteration in (6, 4, 2)]


def test_a_run_that_has_failed_and_is_started_again_is_followed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, looks, read = str(tmp_path / "mirror"), list[int](), followed.read_note
    its_own = train(tmp_path / "here", mirror)
    shutil.move(tmp_path / "mirror" / "iteration_00000006", tmp_path / "later")

    def start_again(remote: Remote, name: str) -> Any:
        if name == RUN and (measured := len(measured_lines(remote))):
            looks.append(measured)
            if looks.count(2) == 6:  # nothing is left to do, and the run is still said to have failed
                shutil.move(tmp_path / "later", tmp_path / "mirror" / "iteration_00000006")
                write_note(remote, RUN, {"status": "completed", "count": 2})
        return read(remote, name)

    write_note(Remote(mirror), RUN, {"status": "failed", "count": 1})
    monkeypatch.setattr(there, "read_note", start_again)
    values = followed_from(tmp_path / "elsewhere", mirror, wait_s=20)
    assert [*values.values()] == [its_own[iteration] for iteration in (4, 2, 6)]


def test_a_run_that_has_failed_and_stays_so_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(life, "AGAIN_WITHIN_S", 0.2)
    mirror = str(tmp_path / "mirror")
    train(tmp_path / "here", mirror)
    write_note(Remote(mirror), RUN, {"status": "failed", "count": 1})
    with caplog.at_level("INFO"):
        assert len(followed_from(tmp_path / "elsewhere", mirror)) == 3
    assert f"The run in {mirror} has ended; 3 of its checkpoints were evaluated." in caplog.text


def test_a_run_in_a_folder_that_has_failed_has_ended_when_it_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    run.summary.write_text('{"status": "failed"}')
    of_run = life.LifeHere(run, wait_s=300)
    assert not of_run.has_ended() and not of_run.is_silent()
    monkeypatch.setattr(life, "AGAIN_WITHIN_S", 0.0)
    assert of_run.has_ended() and not of_run.is_silent()


def test_a_follower_that_waits_for_its_run_outlasts_a_mirror_that_fails_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remote, run = Remote(str(tmp_path / "mirror")), RunDirectory(tmp_path / "elsewhere")
    failures = [OSError(5, "Input/output error"), OSError(5, "Input/output error")]

    def fail_twice(*_: Any) -> list[str]:
        if failures:
            raise failures.pop()
        return ["iteration_00000001"]

    monkeypatch.setattr(Remote, "names", fail_twice)
    assert there.begins_there(run, remote, 20) and not failures
    said = f"{remote.url} cannot be read: Input/output error; it is asked again."
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [said]


@pytest.mark.parametrize("answers_again", [False, True])
def test_a_mirror_that_fails_until_the_end_of_the_wait_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers_again: bool
) -> None:
    remote, run, asked = Remote(str(tmp_path / "mirror")), RunDirectory(tmp_path / "elsewhere"), list[float]()

    def fail(*_: Any) -> list[str]:
        asked.append(time.monotonic())
        if answers_again and len(asked) > 1:
            return []
        raise PermissionError(f"denied {len(asked)}\nfor ever")

    monkeypatch.setattr(Remote, "names", fail)
    if answers_again:
        assert not there.begins_there(run, remote, 1)
        return
    with pytest.raises(CheckpointError, match=r"mirror cannot be read: PermissionError: denied (\d+).*\.$") as raised:
        there.begins_there(run, remote, 1)
    assert f"denied {len(asked)}" in str(raised.value) and "\n" not in str(raised.value)
    assert len(asked) > 1 and asked[-1] - asked[0] >= 0.9


def test_a_second_follower_is_refused_and_one_that_was_killed_is_succeeded(tmp_path: Path) -> None:
    mirror = str(tmp_path / "mirror")
    its_own, remote, over = train(tmp_path / "here", mirror), Remote(mirror), threading.Event()

    def beat() -> None:
        count = 0
        while not over.wait(0.05):
            write_note(
                remote, FOLLOWER, {"who": "process 7 on m", "where": "m:/x", "holds": [], "count": (count := count + 1)}
            )

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        while not read_note(remote, FOLLOWER):
            time.sleep(0.01)
        with pytest.raises(RunDirectoryInUse, match="mirror is followed by process 7 on m: one is enough"):
            followed_from(tmp_path / "elsewhere", mirror)
    finally:
        over.set()
        thread.join()
    assert len(followed_from(tmp_path / "elsewhere", mirror)) == len(its_own)


def test_a_follower_that_evaluates_for_long_is_known_to_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(there, "BEAT_S", 0.5)
    remote = Remote(str(tmp_path / "mirror"))
    first, second = (there.There(remote, RunDirectory(tmp_path / name), wait_s=1) for name in ("first", "second"))
    first.begin(FollowedLog(first.run.followed))
    try:
        with pytest.raises(RunDirectoryInUse, match="mirror is followed by process"):
            second.begin(FollowedLog(second.run.followed))
    finally:
        for follower in (first, second):
            follower.release()


def test_values_of_another_run_and_damaged_files_are_left_out(tmp_path: Path) -> None:
    store, remote = CheckpointStore(tmp_path / "here" / "checkpoints"), Remote(str(tmp_path / "mirror"))
    info = CheckpointInfo(path := save(store, 1, run_id="a"), store.checkpoints()[0].manifest)
    other = {**identity_of(info), "run_id": "b"}
    rows = [{"iteration": 1, "epoch": 1, "val/loss": 3.0, "checkpoint": other}]
    rows += [{"iteration": 1, "epoch": 1, "val/loss": [1], "checkpoint": identity_of(info)}]
    remote.write(MEASURED, b"[1]\n{" + "".join(json.dumps(row) + "\n" for row in rows).encode())
    for note in (b"[]", b"\xff{", b'{"holds": {"a": 1}, "count": 1}', b"[" * 100_000):
        remote.write(FOLLOWER, note)
        notes = RunNotes(remote, store.directory)
        notes.look()
        assert notes.held == []
    assert CheckpointStore(path.parent).checkpoints()[0].manifest.metrics == {}
    assert FollowedLog.beside(store.directory).lines() == []


@pytest.mark.long
@pytest.mark.faults
def test_of_a_run_on_another_machine_the_best_is_known_though_its_follower_is_killed(
    tmp_path: Path, s3: str, proxy: Proxy
) -> None:
    settings = {"checkpoint": {"mirror": s3}}
    here = write_config(tmp_path / "here", task_options={"slow_step_s": 0.25}, run={"max_epochs": 12}, **settings)
    elsewhere = write_config(tmp_path / "elsewhere", run={"max_epochs": 12}, **settings)
    by_loss = [*test_follow.BY_LOSS[:2], "checkpoint.keep_last=2", "checkpoint.every=2", *test_follow.NOT_BY_ITSELF]
    run = start(here, *by_loss)
    beside = test_follow.follower(elsewhere, *by_loss)
    measured = FollowedLog(RunDirectory(elsewhere.parent / "run").followed)
    wait_until(lambda: measured.lines(), beside)
    os.kill(beside.pid, signal.SIGKILL)
    beside.wait()
    known = len(measured.lines())
    beside = test_follow.follower(elsewhere, *by_loss, output="second.txt")
    wait_until(lambda: len(measured.lines()) > known, beside)
    its_log = FollowedLog(RunDirectory(here.parent / "run").followed)
    wait_until(lambda: its_log.lines(), run)
    (here.parent / "fast").touch()
    assert run.wait() == 0, (here.parent / "output.txt").read_text()
    assert beside.wait() == 0, (elsewhere.parent / "second.txt").read_text()

    values = {line["iteration"]: line["val/accuracy"] for line in measured.lines()}
    assert max(values) == summary(here.parent)["iteration"]
    there = Remote(s3).checkpoints()[0]
    assert max(values.values()) == ranked(there, "val/accuracy", "max")[0].manifest.metrics["val/accuracy"]
    assert not (elsewhere.parent / "run" / "checkpoints").exists() and lines(elsewhere.parent) == []


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.distributed
def test_two_ranks_follow_two_ranks_on_another_machine(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint": {"mirror": str(tmp_path / "mirror"), "every": 4, "keep_last": 9}}
    settings |= {"run": {"max_epochs": 2}, "evaluation": {"every": 2}}
    here, elsewhere = (write_config(tmp_path / name, **settings) for name in ("here", "elsewhere"))
    run = start(here, "--nproc-per-node", "2")
    beside = test_follow.follower(elsewhere, "--nproc-per-node", "2", "--all")
    assert run.wait() == 0, (here.parent / "output.txt").read_text()
    assert beside.wait() == 0, (elsewhere.parent / "follower.txt").read_text()

    its_own, values = test_follow.its_own(here.parent), test_follow.followed(elsewhere.parent)
    assert values and all(its_own[iteration] == row for iteration, row in values.items() if iteration in its_own)
    assert max(values) == summary(here.parent)["iteration"] and its_own.keys() & values.keys()
    assert test_follow.printed(elsewhere.parent) == list(values)
