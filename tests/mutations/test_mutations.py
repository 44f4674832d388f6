"""What is drawn is a change of the code; a changed tree is that of the tests that run in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations.__main__ import ROOMS, chosen, named_tests, nearest
from tests.mutations.draw import drawn, mutations_of
from tests.mutations.equivalent import EQUIVALENT
from tests.mutations.tree import ROOT, Tree

SOURCE = '''"""A module."""

LIMIT = 3


def first(values: list[int], ä: int = 1) -> int | None:
    """Text."""
    if not values or len(values) > 2:
        logger.info("nothing")
        return None
    found = max(values, ä) - 1 if values[0] < 0 else swap(values, ä)
    values.append(found)
    return found
'''


def test_every_place_of_a_function_is_changed_and_nothing_that_only_says_something() -> None:
    changed = [(mutation.kind, mutation.before, mutation.text) for mutation in mutations_of("module.py", SOURCE)]

    assert sorted(changed) == sorted(
        [
            ("constant", "1", "2"),
            ("and, or", "not values or len(values) > 2", "(not values and len(values) > 2)"),
            ("not", "not values", "(values)"),
            ("comparison", "len(values) > 2", "(len(values) >= 2)"),
            ("constant", "2", "3"),
            (
                "branches",
                "max(values, ä) - 1 if values[0] < 0 else swap(values, ä)",
                "(swap(values, ä) if values[0] < 0 else max(values, ä) - 1)",
            ),
            ("operator", "max(values, ä) - 1", "(max(values, ä) + 1)"),
            ("function", "max", "min"),
            ("arguments", "max(values, ä)", "(max(ä, values))"),
            ("constant", "1", "2"),
            ("comparison", "values[0] < 0", "(values[0] <= 0)"),
            ("constant", "0", "1"),
            ("constant", "0", "1"),
            ("arguments", "swap(values, ä)", "(swap(ä, values))"),
            ("deleted", "values.append(found)", "pass"),
        ]
    )
    for mutation in mutations_of("module.py", SOURCE):
        assert ast.dump(ast.parse(mutation.applied(SOURCE))) != ast.dump(ast.parse(SOURCE)), mutation


def test_drawn_mutations_are_a_function_of_their_seed() -> None:
    paths = [ROOT / "ignite_engine" / "step" / "losses.py", ROOT / "ignite_engine" / "step" / "tree_sum.py"]
    found = [[str(mutation) for mutation in drawn(paths, ROOT, seed)] for seed in ("1", "1", "2")]

    assert found[0] == found[1] != found[2]
    assert sorted(found[0]) == sorted(found[2])


@pytest.mark.slow
def test_each_room_has_its_share_and_tests_that_are_there() -> None:
    named, rooms = named_tests(), [room for room, _ in chosen(1, 30)]

    assert {room: rooms.count(room) for room in ROOMS} == dict.fromkeys(ROOMS, 2)
    for room, mutation in chosen(1, 30):
        assert mutation.key not in EQUIVALENT
        turns = nearest(mutation.path, ROOMS[room][1], named)
        assert turns and all((ROOT / test.partition("::")[0]).is_file() for turn in turns for test in turn), room


def test_tests_of_the_module_come_first_and_those_that_start_processes_last() -> None:
    named = [
        "tests/ranks/test_two_ranks.py::test_one_reduction_per_step",
        "tests/ranks/test_heartbeats.py::test_hub_that_hears_nothing",
        "tests/data/test_windows.py::test_other",
        "tests/step/test_flops.py::test_counted",
    ]

    assert nearest("ignite_engine/ranks/heartbeats.py", ("tests/ranks", "tests/step"), named) == [
        [named[1]],
        [named[3]],
        [named[0]],
    ]


@pytest.mark.long
def test_a_changed_file_is_that_of_the_tests_and_comes_back(tmp_path: Path) -> None:
    tree, path = Tree(tmp_path / "tree"), "ignite_engine/step/tree_sum.py"
    source, test = (ROOT / path).read_text(encoding="utf-8"), tree.folder / "tests" / "test_probe.py"
    test.write_text(
        "from ignite_engine.step import tree_sum\n\n\ndef test_probe():\n"
        f"    assert tree_sum.__file__.startswith({str(tree.folder)!r})\n    assert not hasattr(tree_sum, 'PROBE')\n"
    )

    assert tree.test(["tests/test_probe.py"], timeout_s=120).how == "passed"
    with tree.changed(path, source + "\nPROBE = 1\n"):
        failed = tree.test(["tests/test_probe.py"], timeout_s=120)
    with tree.changed(path, source + "\nimport time\n\ntime.sleep(60)\n"):
        hung = tree.test(["tests/test_probe.py"], timeout_s=1)

    assert (failed.caught_by, failed.how) == ("tests/test_probe.py::test_probe", "failed")
    assert (hung.caught_by, hung.how) == (None, "out of time")
    assert (tree.folder / path).read_text(encoding="utf-8") == source
