import pytest

from tests.ext.recovery.runs import forget


@pytest.fixture(autouse=True)
def _nothing_stays_in_memory(tmp_path):
    yield
    forget(tmp_path)
