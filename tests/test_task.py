"""A task is found by file or module, executed once, and its errors are one line with the user's own line."""

import sys

import pytest
from ignite.metrics import Average

from ignite_engine.task import Task, TaskError, build_task, find_task
from tests.kit.tiny import Numbers, linear, mse

TASK = """
import neighbour
LOADED = []
LOADED.append(1)


def build(options):
    return neighbour.task(options["width"])


def fails(options):
    return options["gone"]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "neighbour.py").write_text("def task(width):\n    return width\n")
    (tmp_path / "configs" / "deep").mkdir(parents=True)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_file_is_found_above_the_config_and_imports_its_neighbours(folder):
    build = find_task("my_task.py:build", folder / "configs" / "deep")

    assert build({"width": 3}) == 3
    assert find_task(f"{folder / 'my_task.py'}:build") is build  # not executed again


def test_module_is_found_by_name(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)

    assert find_task("my_task:build").__name__ == "build"


def test_error_of_a_task_names_its_own_line_and_is_the_cause(folder):
    with pytest.raises(TaskError, match=r"fails\(\) raised KeyError: 'gone' \(at .*my_task.py:12\)") as caught:
        build_task(find_task("my_task.py:fails", folder), {})

    assert isinstance(caught.value.__cause__, KeyError)


def test_only_a_whole_task_is_taken():
    task = Task(linear(), mse, Numbers(4))

    assert build_task(lambda options: task, {}) is task
    with pytest.raises(TaskError, match=r"returned int, expected an ignite_engine\.Task\."):
        build_task(lambda options: 3, {})
    with pytest.raises(TaskError, match=r"gave metrics \(accuracy\) but no predict"):
        build_task(lambda options: Task(linear(), mse, Numbers(4), metrics={"accuracy": Average()}), {})
