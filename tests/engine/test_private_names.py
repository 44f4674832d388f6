"""Ignite's private names that we use: few, and each fails here by name when Ignite changes it."""

import ast
import re
from pathlib import Path

from ignite.engine import Engine, Events, State
from ignite.handlers import param_scheduler
from ignite.metrics import Metric
from torch import nn

from ignite_engine.handlers.evaluation.invariant import SUMMED

ROOT = Path(__file__).resolve().parents[2]
_SCHEDULERS = param_scheduler.__name__
USED = {
    "_dataloader_iter",
    "_event_handlers",
    "_fire_event",
    "_handler_wrapper",
    "_internal_run_generator",
    "_state_dict_all_req_keys",
}


def nothing(engine, batch): ...


def private_names():
    """Of Ignite's engine, state, events, schedulers and metrics."""
    schedulers = [each for each in vars(param_scheduler).values() if getattr(each, "__module__", "") == _SCHEDULERS]
    holders = [Engine(nothing), State(), Events, Metric, *schedulers]
    names = {name for each in holders for name in dir(each) if name.startswith("_") and not name.startswith("__")}
    return names - set(dir(object()))


def names_in(path):
    """Attributes that a file reads from an object, and methods that it defines."""
    tree = ast.parse(path.read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    overridden = own & {"_handler_wrapper", "_fire_event", "_internal_run", "_setup_engine", "_is_done"}
    return (read - own) | overridden


def test_few_private_names_of_ignite_are_used():
    files = [*(ROOT / "ignite_engine").rglob("*.py"), *(ROOT / "handlers").rglob("*.py")]
    private = private_names()
    any_of_them = re.compile(rf"\b({'|'.join(private)})\b")
    used = {name for path in files if any_of_them.search(path.read_text()) for name in names_in(path)} & private

    assert used == USED, (
        f"new: {sorted(used - USED)}, no longer used: {sorted(USED - used)}. Use public names of Ignite; "
        "where there is none, add the name to USED, with a test here that fails when Ignite changes it. Remove from "
        "USED what is no longer used"
    )
    assert len(used) <= 10, "at most ten: do without another one first"


def test_each_summed_metric_lists_its_sums():
    """``_state_dict_all_req_keys``: what a rank-invariant evaluation adds up over batches."""
    for each in SUMMED:
        needed = {"num_classes": 3} if each.__name__ == "ConfusionMatrix" else {}
        needed |= {"loss_fn": nn.functional.mse_loss} if each.__name__ == "Loss" else {}
        needed |= {"data_range": 1.0} if each.__name__ == "PSNR" else {}
        metric = each(**needed)
        metric.reset()
        assert metric._state_dict_all_req_keys, each
        assert all(hasattr(metric, name) for name in metric._state_dict_all_req_keys), each
