"""A file and overrides become values, each with the place it came from."""

from ignite_engine.config.yaml_file import display, read_config_source


def test_each_value_has_the_place_that_set_it(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("run:\n  seed: 1\n  name: x\ndata: {}\n")
    source = read_config_source(path, ["run.seed=2", "data.batch_size=4"])

    assert source.values == {"run": {"seed": 2, "name": "x"}, "data": {"batch_size": 4}}
    assert [source.place(key) for key in ("run.seed", "data.batch_size")] == ["command line"] * 2
    assert [source.place(key) for key in ("run.name", "run.missing")] == [f"{path}:3", f"{path}:1"]
    assert source.place("optimizer.lr") == str(path)


def test_value_in_a_message_is_at_most_80_characters():
    values = [display(each) for each in (None, True, "x", {}, {"a": 1}, 1.5, ["y" * 100])]

    assert values[:-1] == ["nothing", "true", "'x'", "an empty mapping", "the mapping {'a': 1}", "1.5"]
    assert len(values[-1]) == 80 and values[-1].endswith("...")
