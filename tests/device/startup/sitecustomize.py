"""In each process that a test on a fake device starts: Python imports this first of all."""

import importlib.util
import os
from pathlib import Path

if os.environ.get("TEST_DEVICE"):
    specification = importlib.util.spec_from_file_location("tests.device.fake", Path(__file__).parents[1] / "fake.py")
    fake = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(fake)
    fake.load(os.environ["TEST_DEVICE"])
