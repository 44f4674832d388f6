"""Tables of what is refused: each in one line, which names what was given and the remedy; no prose is compared."""

import contextlib
import inspect
import io

import pytest

from ignite_engine import cli


class CommandRefused(Exception):
    """A command ended with code 2 and this on its standard error."""


def refusals(cases):
    """A test of every case ``(id, call, error, words)``: ``test_refusals = refusals([...])``.

    Args:
        cases: ``call()``, or ``call(tmp_path)``, must raise ``error`` with a message of one line, which has each of the
            ``words`` (a string of two to four, in either case of letters).
    """

    @pytest.mark.parametrize(("call", "error", "words"), [pytest.param(*case[1:], id=case[0]) for case in cases])
    def test_refusals(call, error, words, tmp_path):
        refuses(call, error, words, *([tmp_path] if inspect.signature(call).parameters else []))

    return test_refusals


def refuses(call, error, words, *arguments):
    """``call(*arguments)`` raises ``error`` in one line with these words; the error."""
    with pytest.raises(error) as caught:
        call(*arguments)
    message = str(caught.value)
    missing = [word for word in words.split() if word.lower() not in message.lower()]
    assert not missing, f"{message!r} does not have {missing}"
    assert len(message.strip().splitlines()) == 1 and "Traceback" not in message, message
    return caught.value


def command(*words):
    """The command line in this process: what it prints; CommandRefused with its standard error, but for
    warnings, where its code is 2."""
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
    if code == 2:
        lines = [line for line in errors.getvalue().splitlines() if not line.startswith("warning:")]
        raise CommandRefused("\n".join(lines))
    assert code == 0, f"code {code}: {errors.getvalue()}"
    return printed.getvalue()
