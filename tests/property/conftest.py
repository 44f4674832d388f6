import time

import pytest


@pytest.fixture
def random_seed():
    """Another one each time; ``-s`` shows it."""
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    return seed
