"""``train``, ``evaluate`` and ``describe``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from ignite_engine.cli.launch import on_ranks_of_config
from ignite_engine.cli.parsing import Parser, takes_backend, takes_config, takes_ranks, whole_number
from ignite_engine.errors import by_name
from ignite_engine.ranks import agreement
from ignite_engine.runs import recipe
from ignite_engine.runs.config import Config, ConfigError, load_config
from ignite_engine.text import json_values

FOLLOWERS = {"--follow": "ignite_engine.ext.follow.follow:follow"}
"""What evaluates a run beside its training, by the option that asks for it."""


def train(command: Parser) -> None:
    """Run to the end, resuming if there is something to resume."""
    takes_config(command)
    takes_ranks(command)
    takes_backend(command)
    text = "start the ranks again when one was killed or hangs, at most N times in an hour; default: never"
    command.add_argument("--restarts", type=whole_number, metavar="N", help=text)
    command.set_defaults(work=partial(on_ranks_of_config, work=_train, note_failure=recipe.note_failure))


def evaluate(command: Parser) -> None:
    """Print the metrics of a checkpoint as one line of JSON; of a run that is followed a line for each checkpoint."""
    takes_config(command)
    takes_ranks(command)
    takes_backend(command)
    which = command.add_mutually_exclusive_group()
    text = "a checkpoint, RUN/best or RUN/last, or which of this run; default: the best, or else the last"
    which.add_argument("--checkpoint", metavar="PATH|best|last", help=text)
    which.add_argument("--follow", action="store_true", help="each new one, beside the training, to its end")
    command.add_argument("--all", action="store_true", help="with --follow: the oldest first, and none is left out")
    text = "with --follow: for a run that has not begun, or was killed; default: 300"
    command.add_argument("--wait", type=float, metavar="SECONDS", help=text)
    command.set_defaults(work=_evaluate)


def describe(command: Parser) -> None:
    """Print the schedule, the learning rates and the bus."""
    takes_config(command)
    command.set_defaults(work=_describe)


def _train(config: Config, options: argparse.Namespace) -> None:
    with recipe.logged(config):
        recipe.build_run(config).train()


def _evaluate(options: argparse.Namespace) -> int:
    if not options.follow and (options.all or options.wait is not None):
        raise ConfigError(f"--{'all' if options.all else 'wait'}: it belongs to --follow, which is not given.")
    work = _evaluate_one
    if options.follow:
        try:
            work = partial(_follow, by_name("evaluate", "--follow", FOLLOWERS))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return on_ranks_of_config(options, work)


def _describe(options: argparse.Namespace) -> None:
    print(recipe.build_run(load_config(options.config, options.overrides)).describe())


def _evaluate_one(config: Config, options: argparse.Namespace) -> None:
    result = recipe.build_run(config).evaluate(options.checkpoint)
    if agreement.rank() == 0:
        print(json.dumps(json_values(result)))


def _follow(follow: Any, config: Config, options: argparse.Namespace) -> None:
    run = recipe.build_run(config)
    run.load_excluded()
    wait = {} if options.wait is None else {"wait_s": options.wait}

    def announce(values: Mapping[str, Any]) -> None:
        print(json.dumps(json_values(values)), flush=True)

    follow(config.directory, lambda: run.trainer, announce=announce, every_checkpoint=options.all, **wait)
