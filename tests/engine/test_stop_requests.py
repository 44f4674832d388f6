"""Requests on one process; on several ranks ``tests/ranks/test_agreement.py``."""

from __future__ import annotations

from ignite_engine.engine.stop_requests import BACKGROUND_DONE, SAVE, STOP, StopRequests


def test_requests_are_agreed_once() -> None:
    requests = StopRequests()
    requests.request_save()
    requests.report_background_done()

    assert requests.pending
    assert requests.agree(1, now=False) == SAVE | BACKGROUND_DONE
    assert not requests.pending and requests.agree(2, now=False) == 0


def test_a_stop_stays_requested_and_keeps_its_first_reason() -> None:
    requests = StopRequests()
    requests.request_stop("SIGINT", 2)
    requests.request_stop("SIGTERM", 15)

    assert requests.agree(1, now=False) == STOP and requests.stop == ("SIGINT", 2)
    requests.reset()
    assert requests.stop is None and requests.agree(2, now=False) == 0


def test_what_could_not_be_done_is_requested_again() -> None:
    requests = StopRequests()
    requests.request_again(SAVE)

    assert requests.pending
    assert requests.agree(1, now=False) == SAVE
