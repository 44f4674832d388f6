"""The options of a save, from a config or keyword arguments to the manifest."""

from dataclasses import fields

import pytest

from ignite_engine.checkpointing import SaveOptions
from ignite_engine.checkpointing.save_options import SaveKeywords
from ignite_engine.config.sections import CheckpointSection
from ignite_engine.handlers import Checkpoint


def test_the_keyword_arguments_are_the_fields():
    assert set(SaveKeywords.__annotations__) == {each.name for each in fields(SaveOptions)}


def test_a_config_has_each_of_them_but_what_only_code_can_give():
    missing = {each.name for each in fields(SaveOptions)} - set(CheckpointSection.model_fields)
    assert missing == {"config", "keep_fn"}
    section = CheckpointSection()
    for each in fields(SaveOptions):
        if each.name not in missing:
            assert getattr(section, each.name) in (getattr(SaveOptions(), each.name), None)


def test_labels_and_config_are_facts_of_the_manifest():
    options = SaveOptions(labels=(each for each in ("a", "b")), config={"seed": 3})
    assert options.facts == options.facts == {"labels": ("a", "b"), "config": {"seed": 3}, "best": None}
    assert SaveOptions(best="f1", mode="max").facts["best"] == {"metric": "f1", "mode": "max"}


def test_the_name_of_the_metric_says_what_is_better_where_no_mode_is_given():
    names = {"val/accuracy": "max", "val/loss": "min", "score": "min", None: "min"}
    assert {name: SaveOptions(best=name).mode for name in names} == names
    assert SaveOptions(best="val/accuracy", mode="min").mode == "min"
    assert all(CheckpointSection(best=name).mode == mode for name, mode in names.items())


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"keep_last": 0}, "keep_last must be at least 1, got 0"),
        ({"mode": "least"}, "mode must be 'min' or 'max', got 'least'"),
        ({"labels": "mine"}, r"labels is a list, got 'mine': write \['mine'\]"),
        ({"exclude": "optimizer"}, r"exclude is a list, got 'optimizer'"),
        ({"writers": 0}, "writers must be at least 1, got 0"),
        ({"exclude": ["model:"]}, "exclude has the pattern 'model:'"),
        ({"strict": True, "on_exception": True}, "choose one of them"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_options_and_handler(tmp_path, settings, line):
    with pytest.raises(ValueError, match=line):
        SaveOptions(**settings)
    with pytest.raises(ValueError, match=line):
        Checkpoint(tmp_path, **settings)


def test_an_option_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(TypeError, match="keep_lats"):
        Checkpoint(tmp_path, keep_lats=3)
