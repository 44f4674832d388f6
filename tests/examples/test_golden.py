"""The shipped configs train to the losses of ``golden.json``: a change of the bits is a decision."""

import pytest

from tests.examples.golden import CONFIGS, ITERATIONS, OPTIONS, environment, losses, recorded


def test_every_config_has_its_losses():
    names = {path.stem for path in CONFIGS.glob("*.yaml")}

    assert names == set(OPTIONS), "add the config to OPTIONS in tests/examples/golden.py, and run that module"
    assert names == set(recorded())


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_config_trains_to_its_golden_losses(name, tmp_path):
    kept = recorded()[name]
    if environment() not in kept:
        pytest.skip(f"no golden losses for {environment()}")
    expected, found = kept[environment()], losses(name, tmp_path / "run")

    assert len(found["losses"]) == ITERATIONS
    pairs = enumerate(zip(expected["losses"], found["losses"], strict=True), start=1)
    first = next((place for place, (old, new) in pairs if old != new), None)
    assert first is None and found == expected, (
        f"the bits have changed, those of the losses from iteration {first} on. If the change is meant, run python -m "
        "tests.examples.golden, and add a line to CHANGELOG.md: what changed the bits, and what that means for a resume"
    )
