"""Cases drawn, judged, shrunk, and printed so that they can be pasted."""

import contextlib
import logging
import os
import time
import warnings

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, event, given, settings

MINUTES = float(os.environ.get("TEST_JUDGE_MINUTES", "20"))
"""Of the nightly tests, all together."""
SHRINKING_S = 60.0
"""After so long a failure is printed as simple as it is by then."""


class Wrong(AssertionError):
    """A case broke a promise; with the call that reproduces it."""


class Enough(BaseException):
    """The time is over; hypothesis lets it pass."""


def check(judge, case):
    """Judge one case. ``judge`` returns what is wrong first, or None, and a set of what happened."""
    with quiet():
        reason, happened = judge(case)
    if reason is not None:
        raise Wrong(f"{reason}\n    {judge.__name__}({case!r})")
    return happened


def judged(judge, strategy, *, seed, cases=None, minutes=None, phases=(Phase.generate, Phase.shrink)):
    """Judge so many drawn cases, or for so many minutes; the plainest one is drawn by the first seed alone."""
    known, first_failure, began, plainest = {}, [], time.monotonic(), []

    def due():
        ended = minutes is not None and time.monotonic() - began > 60.0 * minutes
        return ended or (first_failure and time.monotonic() - first_failure[0] > SHRINKING_S)

    @hypothesis.seed(seed)
    @settings(
        max_examples=cases + bool(seed) if cases else 1_000_000,
        deadline=None,
        database=None,
        phases=phases,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def draw(case):
        if not plainest:  # hypothesis begins with it each time
            plainest.append(case)
            if seed:
                return
        if case not in known:
            if due():
                if first_failure:  # what is not known by now counts as right
                    return
                raise Enough
            known[case] = None
            try:
                happened = check(judge, case)
            except Wrong as wrong:
                known[case] = wrong
                first_failure.append(time.monotonic())
            else:
                for each in (*case.features(), *(f"happened: {what}" for what in sorted(happened))):
                    event(each)
        if known[case] is not None:
            raise known[case]

    with contextlib.suppress(Enough):
        draw()


@contextlib.contextmanager
def quiet():
    """One thread, as tensors are tiny; no warnings and no log, as programs that torch refuses are drawn, too."""
    threads, level = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        logging.disable(level)
