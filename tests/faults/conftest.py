"""What an uninterrupted run of the small task ends with, for all that compare theirs with it."""

import pytest

from tests.faults.processes import evaluated, lines, summary, train, write_config


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """Digest of the weights, lines of the log, and the number of batches that were evaluated."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(write_config(folder, task_options={"count_batches": True}))
    assert summary(folder)["status"] == "completed"
    digest = summary(folder)["weights_sha256"]
    return {"digest": digest, "lines": lines(folder), "evaluated": evaluated(folder)}
