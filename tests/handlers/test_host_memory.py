"""Limits of control groups of both versions, from folders as the kernel lays them out."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from ignite_engine.handlers.host_memory import MIB, Limits, memory_groups, peak_mib, rss_mib

GIB = 1024


def version_2(folder: Path, *, limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\nfile 2\ninactive_file {cached}\nactive_file 7\n")


def version_1(folder: Path, *, limit: int, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"cache 1\ninactive_file 3\ntotal_inactive_file {cached}\n")


def of_process(tmp_path: Path, text: str) -> Path:
    (tmp_path / "cgroup").write_text(text)
    return tmp_path / "cgroup"


def test_version_2_takes_the_tightest_of_a_group_and_those_above_it(tmp_path: Path) -> None:
    root = tmp_path / "sys"
    version_2(root / "pod", limit=str(8 * MIB), used=6 * MIB, cached=1 * MIB)
    version_2(root / "pod" / "container", limit="max", used=5 * MIB)
    version_2(root / "pod" / "container" / "rank", limit=str(100 * MIB), used=4 * MIB)
    groups = memory_groups(of_process(tmp_path, "0::/pod/container/rank\n"), root)
    assert groups == [root / "pod" / "container" / "rank", root / "pod"]  # the others have no limit
    limit = Limits(groups).tightest()
    assert (limit.limit_mib, limit.headroom_mib) == (8, 3)  # pages of files that are not in use can be taken
    assert limit.of == f"the control group {root / 'pod'}"


def test_version_1_has_a_folder_for_memory(tmp_path: Path) -> None:
    root = tmp_path / "sys"
    version_1(root / "memory", limit=9223372036854771712, used=50 * MIB)  # unlimited
    version_1(root / "memory" / "job", limit=16 * MIB, used=15 * MIB, cached=2 * MIB)
    lines = "5:devices:/\n4:cpu,memory:/job\n0::/elsewhere\n"
    groups = memory_groups(of_process(tmp_path, lines), root)
    assert groups == [root / "memory" / "job"]
    assert (Limits(groups).tightest().limit_mib, Limits(groups).tightest().headroom_mib) == (16, 3)


def test_within_a_container_its_own_group_is_the_top(tmp_path: Path) -> None:
    root = tmp_path / "sys"
    version_2(root, limit=str(4 * MIB), used=5 * MIB)
    groups = memory_groups(of_process(tmp_path, "0::/kubepods/not-mounted-here\n"), root)
    assert groups == [root]
    assert Limits(groups).tightest().headroom_mib == 0  # more than the limit for a moment


@pytest.mark.parametrize("text", [None, "", "no colons\n", "1:name=systemd:/user.slice\n", "0::/../../etc\n"])
def test_without_groups_the_machine_is_the_limit(text: str | None, tmp_path: Path) -> None:
    process = tmp_path / "missing" if text is None else of_process(tmp_path, text)
    limit = Limits(memory_groups(process, tmp_path / "sys")).tightest()
    assert limit.of == "this machine"
    assert limit.limit_mib == psutil.virtual_memory().total / MIB
    assert 0 < limit.headroom_mib < limit.limit_mib


@pytest.mark.parametrize("broken", ["memory.max", "memory.current", "memory.stat"])
def test_a_group_that_cannot_be_read_is_none(broken: str, tmp_path: Path) -> None:
    version_2(tmp_path / "group", limit=str(4 * MIB), used=3 * MIB)
    (tmp_path / "group" / broken).write_text("not a number")
    assert Limits([tmp_path / "group", tmp_path / "gone"]).tightest().of == "this machine"


def test_this_process_is_measured_wherever_it_runs() -> None:
    assert 0 < rss_mib() <= peak_mib() + 1
    assert Limits(memory_groups()).tightest().headroom_mib > 0
