"""The table of a model's parts at the start of a run."""

import logging

import torch
from torch import nn

from ignite_engine.describe.model_table import ROWS, model_table
from tests.kit.fitting import QUIET, fitted


def cells(lines):
    return [line.split() for line in lines]


def test_parts_have_their_parameters_once_and_the_whole_has_all():
    body = nn.Linear(4, 8).requires_grad_(False)
    model = nn.ModuleDict({"body": body, "act": nn.ReLU(), "again": body, "head": nn.Linear(8, 3, dtype=torch.float64)})

    assert cells(model_table(model, model.parameters())) == [
        ["parameters", "trained", "dtype", "size"],
        ["body", "Linear", "40", "0", "float32", "160", "bytes"],
        ["head", "Linear", "27", "27", "float64", "216", "bytes"],
        ["ModuleDict", "67", "27", "float32,", "float64", "376", "bytes"],
    ]


def test_only_what_an_optimizer_holds_is_trained():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    rows = cells(model_table(model, model[0].parameters()))
    assert [row[-4] for row in rows[1:]] == ["40", "0", "40"]


def test_wrapper_of_one_module_shows_what_is_in_it_and_a_leaf_itself():
    wrapped = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))
    assert [row[0] for row in cells(model_table(wrapped, wrapped.parameters()))[1:]] == ["0.0", "0.1", "Sequential"]
    assert cells(model_table(nn.Linear(4, 8), []))[1][0] == "Linear"
    assert len(model_table(nn.Sequential(*[nn.Linear(2, 2) for _ in range(40)]), [])) == ROWS + 2


def test_parameters_of_the_model_itself_are_a_row():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model.scale = nn.Parameter(torch.ones(5))
    assert ["of", "its", "own", "5", "5", "float32", "20", "bytes"] in cells(model_table(model, model.parameters()))


def test_fresh_run_begins_with_it(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    logging_on = {"logging": {**QUIET["logging"], "console": True, "every": 4}}
    fitted(tmp_path, **logging_on)
    assert [line for line in caplog.messages if line.split()[:3] == ["0", "Linear", "40"]]
    caplog.clear()
    fitted(tmp_path, max_epochs=4, **logging_on)
    assert not any("Linear" in line for line in caplog.messages)


def test_console_has_one_heading_where_evaluations_come_before_the_first_log_point(tmp_path, capsys):
    logging_on = {"logging": {**QUIET["logging"], "console": True, "throughput": True, "every": 9}}
    fitted(tmp_path, **logging_on)
    heading, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heading == ["iter", "epoch", "loss", "val/loss", "lr", "samples/s"]
    assert [row[0] for row in rows] == ["6", "9", "12", "18"] and rows[0][2] == rows[0][-1] == "-" != rows[1][-1]
