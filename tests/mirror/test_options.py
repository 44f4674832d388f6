"""A mirror's settings: what is wrong is one line, and no password is ever repeated."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ignite_engine.config import ConfigError, config_from_dict
from ignite_engine.handlers import Checkpoint
from ignite_engine.mirror import MirrorOptions
from ignite_engine.mirror.options import without_secrets
from tests.builders import trainer_of


@pytest.mark.parametrize(
    "url",
    [
        "s3://the-key:the-secret@bucket/run",
        "ftp://user:the-secret@host/run",
        "https://host/run?X-Amz-Signature=the-secret",
        "simplecache::s3://the-key:the-secret@bucket/run",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match="must hold no credentials") as raised:
        Checkpoint(tmp_path, mirror=url)
    with pytest.raises(ConfigError, match="must hold no credentials") as in_config:
        config_from_dict({"task": "x.py:build", "run": {"max_epochs": 1}, "checkpoint": {"mirror": {"url": url}}})

    for error in (raised, in_config):
        assert "the-secret" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "must be a directory or a URL, got an empty text"),
        ({"keep_last": 2}, "mirror needs a url"),
        ({"url": "x", "keep_lats": 2}, "no setting 'keep_lats'; did you mean 'keep_last'?"),
        ({"url": "x", "keep_last": 0}, "keep_last must be at least 1, got 0"),
        ({"url": "x", "parallel": 1.5}, "parallel must be a whole number, got 1.5"),
        ({"url": "x", "max_mib_per_s": 0}, "max_mib_per_s must be more than 0, got 0"),
        (3, "mirror must be a directory, a URL, or a mapping"),
        ("s3://", "must name a bucket or a folder, got 's3://': give a URL such as s3://bucket/run"),
        ("s3:/bucket/run", "neither a URL nor a path, got 's3:/bucket/run': a URL begins with s3://"),
    ],
)
def test_a_wrong_setting_is_one_line_in_python_and_in_a_config(given: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        MirrorOptions.of(given)
    assert said in str(raised.value)
    with pytest.raises(ConfigError) as in_config:
        config_from_dict({"task": "x.py:build", "run": {"max_epochs": 1}, "checkpoint": {"mirror": given}})
    assert "checkpoint.mirror: " in str(in_config.value) and said in str(in_config.value)


def test_a_protocol_that_nobody_knows_is_one_line_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"s4://bucket/run cannot be used: Protocol not known: s4\."):
        Checkpoint(tmp_path, mirror="s4://bucket/run").attach(trainer_of())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s4://bucket/run", "s4://bucket/run cannot be used: Protocol not known: s4."),
        ("gs://bucket/run", "gs://bucket/run cannot be used: Please install gcsfs to access Google Storage."),
    ],
)
def test_a_package_that_is_missing_is_a_mistake_in_a_config(
    url: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError) as raised:
        config_from_dict({"task": "x.py:build", "run": {"max_epochs": 1}, "checkpoint": {"mirror": url}})
    assert str(raised.value).endswith(f"checkpoint.mirror: {said}")


def test_what_a_store_says_is_told_without_credentials() -> None:
    said = without_secrets("Cannot connect to https://key:secret@host/a?token=secret and s3://bucket/run")

    assert said == "Cannot connect to https://***@host/a*** and s3://bucket/run"
