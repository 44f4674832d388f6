"""What was verified is remembered until it changes."""

from __future__ import annotations

import os
from pathlib import Path

from ignite_engine.checkpointing import CheckpointStore, read_manifest
from ignite_engine.checkpointing.verification import Verification
from tests.checkpointing.states import save


def test_a_file_is_sound_once_it_was_read_and_until_it_changes(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 100)
    manifest, check = read_manifest(path), Verification()
    file, record = path / "shared.pt", manifest.files["shared.pt"]
    assert not check.is_sound(file, record) and check.looks_sound(path, manifest)
    assert check.is_valid(path, manifest) and check.is_sound(file, record)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    assert not check.is_sound(file, record) and check.known_problem(file, record) is None
    assert check.looks_sound(path, manifest) and not check.is_valid(path, manifest)
    assert "shared.pt has changed" in (check.known_problem(file, record) or "")
    assert not check.looks_sound(path, manifest) and len(check.problems(path)) == 1


def test_a_file_that_is_missing_or_of_another_size_does_not_look_sound(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 100)
    manifest, check = read_manifest(path), Verification()
    with (path / "rank_0.pt").open("ab") as file:
        file.write(b"x")
    assert not check.looks_sound(path, manifest)
    (path / "rank_0.pt").unlink()
    assert not check.looks_sound(path, manifest) and check.problems(path) == ["rank_0.pt is missing"]


def test_what_was_written_is_known_without_being_read(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 100)
    manifest, check = read_manifest(path), Verification()
    check.remember_written(path, manifest)
    assert all(check.is_sound(path / name, record) for name, record in manifest.files.items())
    check.forget(path)
    assert not any(check.is_sound(path / name, record) for name, record in manifest.files.items())
