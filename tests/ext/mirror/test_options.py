"""Where a mirror is: what is wrong is one line, and no password is ever repeated."""

import pytest

from ignite_engine.config import ConfigError, config_from_dict
from ignite_engine.ext.mirror.remote import without_secrets
from ignite_engine.handlers import Checkpoint
from tests.kit.tiny import trainer_of


def in_a_config(mirror):
    with pytest.raises(ConfigError) as raised:
        config_from_dict({"task": "x.py:build", "run": {"max_epochs": 1}, "checkpoint": {"mirror": mirror}})
    return str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://the-key:the-secret@bucket/run",
        "ftp://user:the-secret@host/run",
        "https://host/run?X-Amz-Signature=the-secret",
        "simplecache::s3://the-key:the-secret@bucket/run",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(tmp_path, url):
    with pytest.raises(ValueError, match="must hold no credentials") as raised:
        Checkpoint(tmp_path, mirror=url)

    for error in (str(raised.value), in_a_config(url)):
        assert "must hold no credentials" in error and "the-secret" not in error and "\n" not in error


def test_another_type_is_refused(tmp_path):
    with pytest.raises(TypeError, match="mirror must be a directory or a URL, got 3"):
        Checkpoint(tmp_path, mirror=3)
    assert "checkpoint.mirror" in in_a_config({"url": "x"})


def test_a_mirror_in_the_folder_itself_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is in the folder of the checkpoints itself"):
        Checkpoint(tmp_path / "run", mirror=str(tmp_path / "run" / "mirror")).attach(trainer_of())


def test_what_a_store_says_is_told_without_credentials():
    said = without_secrets("Cannot connect to https://key:secret@host/a?token=secret and s3://bucket/run")

    assert said == "Cannot connect to https://***@host/a*** and s3://bucket/run"
