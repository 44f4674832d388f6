"""SIGKILL at random instants of an upload and of a fetch, on an S3 server: nothing torn is ever seen."""

import pytest

from tests.ext.mirror.kills import kill_fetches, kill_uploads

pytestmark = [pytest.mark.faults, pytest.mark.long]


def test_killed_at_random_instants_of_an_upload_the_mirror_holds_whole_checkpoints_alone(tmp_path, s3_port, proxy):
    assert kill_uploads(s3_port, tmp_path, times=6) > 0


def test_killed_at_random_instants_of_a_fetch_the_folder_holds_whole_checkpoints_alone(tmp_path, s3_port, proxy):
    assert kill_fetches(s3_port, tmp_path, times=6) > 0
