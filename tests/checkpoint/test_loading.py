"""What is loaded from other checkpoints is what was asked for, it is told, and what does not fit is refused."""

import functools
from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
import torch
from ignite.engine import Events
from safetensors.torch import save_file
from torch import nn

from ignite_engine import Trainer, Update
from ignite_engine.errors import CheckpointError, StateMismatch
from ignite_engine.handlers import EMA, Checkpoint, LRSchedule, warmup_cosine
from tests.checkpoint.made_states import LoadSource, attached, manifest_of
from tests.kit import saved
from tests.kit.faults import changed
from tests.kit.refusals import refusals, refuses
from tests.kit.tiny import linear, mse, numbers_loader, one


class Net(nn.Module):
    """Three layers, under names of one's choice, and as many outputs."""

    def __init__(self, seed, names=("backbone", "middle", "head"), outputs=1):
        super().__init__()
        torch.manual_seed(seed)
        self.names = names
        for name, sizes in zip(names, ((3, 4), (4, 4), (4, outputs)), strict=True):
            self.add_module(name, nn.Linear(*sizes))

    def forward(self, inputs):
        for name in self.names[:-1]:
            inputs = torch.tanh(getattr(self, name)(inputs))
        found = getattr(self, self.names[-1])(inputs)
        return found


def run_of(folder, model, *, ema=True, kind=torch.optim.AdamW, **options):
    """A run with a schedule and an average, and all of its parts."""
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options})
    trainer = Trainer(Update(model, optimizer, mse))
    LRSchedule(warmup_cosine(optimizer, 2, total=50)).attach(trainer)
    average = EMA(0.5)
    if ema:
        average.attach(trainer)
    checkpoint = Checkpoint(folder, keep_last=9)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=4))
    return SimpleNamespace(
        trainer=trainer, checkpoint=checkpoint, model=model, optimizer=optimizer, ema=average if ema else None
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of eight iterations, ``a`` and ``b``: their folders."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate("ab", start=1):
        run_of(folder / name, Net(seed)).trainer.run(numbers_loader(16), max_iters=8)
    return folder


def values(parts, key="exp_avg"):
    """The tensors of a checkpoint's model, moments and average, by part and name."""
    found = {f"model:{name}": value for name, value in parts["model"].items()}
    found |= {f"optimizer:{name}": state[key] for name, state in parts["optimizer"]["state"].items()}
    return found | {f"ema:{name}": value for name, value in parts.get("ema", {"weights": {}})["weights"].items()}


def now(run, key="exp_avg"):
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    state = {names[parameter]: state for parameter, state in run.optimizer.state.items() if key in state}
    parts = {"model": run.model.state_dict(), "optimizer": {"state": state}}
    return values(parts | ({"ema": run.ema.state_dict()} if run.ema else {}), key)


def matching(names, patterns):
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def renamed(mapping):
    return lambda name: functools.reduce(lambda found, pair: found.replace(*pair), mapping.items(), name)


THREE = ["model", "optimizer", "ema"]
ENCODER = ("encoder", "middle", "head")
# options of a load, the model that is loaded into, and the names that have the saved values afterwards
LOADS = {
    "fine-tuning": ({}, {}, ["model:*"]),
    "a warm start": ({"parts": ["model", "optimizer"]}, {}, ["model:*", "optimizer:*"]),
    "a category": ({"parts": ["model", "opt*"]}, {}, ["model:*", "optimizer:*"]),
    "some names": ({"parts": ["model:backbone.*"]}, {}, ["model:backbone.*"]),
    "some are ignored": ({"parts": THREE, "ignore": ["*:head.*"]}, {}, ["*:backbone.*", "*:middle.*"]),
    "another head": ({"parts": THREE, "ignore": ["*:head.*"]}, {"outputs": 2}, ["*:backbone.*", "*:middle.*"]),
    "renamed by prefix": ({"parts": THREE, "rename": {"backbone.": "encoder."}}, {"names": ENCODER}, ["*"]),
    "renamed by a function": (
        {"parts": THREE, "rename": lambda name: name.replace("backbone", "encoder")},
        {"names": ENCODER},
        ["*"],
    ),
    "not strict": ({"parts": THREE, "strict": False}, {"outputs": 2}, ["*:backbone.*", "*:middle.*"]),
    "other names": ({"strict": False}, {"names": ENCODER}, ["model:middle.*", "model:head.*"]),
}


@pytest.mark.row("D10")
@pytest.mark.parametrize(("options", "built", "expected"), LOADS.values(), ids=list(LOADS))
def test_what_was_asked_for_is_loaded_and_nothing_else(runs, tmp_path, options, built, expected):
    run = run_of(tmp_path / "run", Net(3, **built))
    before, generator = {name: value.clone() for name, value in now(run).items()}, torch.get_rng_state()
    report = run.checkpoint.load(runs / "a", **options)

    old = values(saved.parts(runs / "a"))
    if "names" in built and "rename" in options:
        old = {name.replace("backbone", "encoder"): value for name, value in old.items()}
    found = now(run)
    expected = matching(old, expected)
    assert {name for name in found if name in old and torch.equal(found[name], old[name])} == expected
    # a new average begins with what was loaded into the model
    others = {name for name in found if name not in expected and not name.startswith("ema:")}
    assert all(torch.equal(found[name], before[name]) for name in others if name in before)
    assert not [name for name in others if name.startswith("optimizer:")]
    assert {name for name in report.loaded if ":" in name} == expected
    assert report.complete == bool(options.get("strict", True))
    assert (run.trainer.state.iteration, run.trainer.state.epoch) == (0, 0)
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_run_that_was_begun_from_another_says_so_and_has_its_own_counters_and_rates(runs, tmp_path):
    run = run_of(tmp_path / "run", Net(3), lr=0.01, weight_decay=0.5)
    run.checkpoint.load(runs / "a", parts=["model", "optimizer"])
    run.trainer.run(numbers_loader(16), max_iters=2)
    # at its own peak; the other run's rate was past its own of 0.1
    (group,) = run.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (pytest.approx(0.01), 0.5)
    assert {state["step"].item() for state in run.optimizer.state.values()} == {10.0}
    assert manifest_of(saved.checkpoint(tmp_path / "run"))["parent"] == str(runs / "a" / "iteration_00000008")
    assert saved.iterations(tmp_path / "run") == [2]


def test_all_parts_go_on_bit_for_bit(runs, tmp_path):
    whole = run_of(tmp_path / "whole", Net(1))
    whole.trainer.run(numbers_loader(16), max_iters=14)
    run = run_of(tmp_path / "run", Net(3))
    assert run.checkpoint.load(runs / "a", parts=["*"]).complete
    run.trainer.run(numbers_loader(16), max_iters=14)
    assert torch.equal(one(run.model), one(whole.model)) and saved.iterations(tmp_path / "run") == [12, 14]


def test_an_average_is_loaded_as_the_model(runs, tmp_path):
    run = run_of(tmp_path / "run", Net(3))
    run.checkpoint.load(runs / "a", weights="ema")
    average = saved.parts(runs / "a")["ema"]["weights"]
    assert all(torch.equal(value, average[name]) for name, value in run.model.state_dict().items())


@pytest.mark.parametrize("parts", [["model"], ["model", "counters", "data"]], ids=["at 0", "later"])
def test_a_new_average_begins_with_the_loaded_weights(runs, tmp_path, parts):
    run, averages = run_of(tmp_path / "run", Net(3)), []
    run.checkpoint.load(runs / "a", parts=parts, ignore=["*:head.bias"])
    loaded = one(run.model).clone()
    run.trainer.add_event_handler(
        Events.ITERATION_STARTED,
        lambda: averages.append(torch.cat([each.reshape(-1) for each in run.ema.state_dict()["weights"].values()])),
    )
    run.trainer.run(numbers_loader(16), max_iters=9)
    assert torch.equal(averages[0], loaded)


def test_a_handler_that_comes_later_gets_its_part(runs, tmp_path):
    run = run_of(tmp_path / "run", Net(3), ema=False)
    run.checkpoint.load(runs / "a", parts=["model", "ema"])
    ema = EMA(0.5)
    ema.attach(run.trainer)
    assert ema.updates == 8
    other = run_of(tmp_path / "other", Net(3), ema=False)
    other.checkpoint.load(runs / "a", parts=["model", "ema"])
    refuses(lambda: other.trainer.run(numbers_loader(16), max_iters=1), StateMismatch, "'ema' nothing registered")


@pytest.mark.parametrize("kind", [torch.save, save_file], ids=["weights.pt", "weights.safetensors"])
def test_weights_come_from_files_as_well(tmp_path, kind):
    kind(Net(1).state_dict(), tmp_path / "weights.safetensors" if kind is save_file else tmp_path / "weights.pt")
    run = run_of(tmp_path / "run", Net(3))
    report = run.checkpoint.load(next(tmp_path.glob("weights.*")))
    assert torch.equal(one(run.model), one(Net(1))) and len(report.loaded) == 6


def test_of_a_folder_the_newest_valid_one_is_taken(tmp_path):
    run_of(tmp_path / "a", Net(1)).trainer.run(numbers_loader(16), max_iters=8)
    largest = max(saved.checkpoint(tmp_path / "a").iterdir(), key=lambda file: file.stat().st_size)
    changed(largest)
    run = run_of(tmp_path / "run", Net(3))
    assert run.checkpoint.load(tmp_path / "a").source.endswith("iteration_00000004")
    refuses(lambda: run.checkpoint.load(tmp_path / "a" / "iteration_00000008"), CheckpointError, largest.name)


class Holder:
    """A part of a user's own."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_what_a_part_is_goes_before_its_looks(tmp_path):
    """A meter whose state looks like an average is none, and a model may have any name."""
    meter = {"updates": 3, "weights": {"0.weight": torch.ones(4, 3)}}
    for folder in ("first", "second"):
        trainer = Trainer(lambda engine, batch: 1.0)
        trainer.register("generator", linear(), shared=True, kind="model")
        trainer.register("meter", Holder(meter), shared=True, kind="metric")
        _, checkpoint = attached(tmp_path / folder, trainer=trainer)
        if folder == "first":
            trainer.run([1, 2], max_epochs=1)
    assert {"generator": "model", "meter": "metric"}.items() <= manifest_of(saved.checkpoint(tmp_path / "first"))[
        "kinds"
    ].items()
    report = checkpoint.load(tmp_path / "first", parts=["generator:0.*"])
    assert report.loaded == ["generator:0.weight", "generator:0.bias"]
    refuses(lambda: checkpoint.load(tmp_path / "first", parts=["*"], weights="meter"), ValueError, "no average")
    refuses(lambda: checkpoint.load(tmp_path / "first", parts=["meter:0.*"]), ValueError, "meter no names")


# -- what does not fit ------------------------------------------------------------------------------------------------


class Unlike(nn.Module):
    """As ``Net``, with a head of another size, without the backbone's bias and with a layer more."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head, self.more = nn.Linear(3, 4, bias=False), nn.Linear(4, 2), nn.Linear(1, 1)


def test_a_strict_load_that_does_not_fit_is_one_line_and_changes_nothing(runs, tmp_path):
    run = run_of(tmp_path / "run", Unlike())
    built = one(run.model).clone()
    words = "4 missing: model:more.weight 10 unexpected: strict=False"
    refuses(lambda: run.checkpoint.load(runs / "a", parts=["model", "optimizer"]), StateMismatch, words)
    assert torch.equal(one(run.model), built) and not run.optimizer.state


def test_a_load_that_is_not_strict_loads_the_rest_and_tells(runs, tmp_path, caplog):
    run = run_of(tmp_path / "run", Unlike())
    built = run.model.head.weight.clone()
    report = run.checkpoint.load(runs / "a", parts=["*"], strict=False, ignore=["counters", "data"])
    old = values(saved.parts(runs / "a"))
    assert torch.equal(run.model.backbone.weight, old["model:backbone.weight"])
    assert torch.equal(run.model.head.weight, built) and len(run.optimizer.state) == 1
    assert not report.complete and report.missing[:2] == ["model:more.weight", "model:more.bias"]
    assert "model:middle.weight" in report.unexpected
    assert [record.levelname for record in caplog.records if " loaded: " in record.message] == ["WARNING"]


def test_a_part_that_the_checkpoint_lacks_is_missing(tmp_path):
    run_of(tmp_path / "first", Net(1), ema=False).trainer.run(numbers_loader(16), max_iters=4)
    run = run_of(tmp_path / "run", Net(3))
    refuses(lambda: run.checkpoint.load(tmp_path / "first", parts=["*"]), StateMismatch, "1 missing: ema")
    assert run.checkpoint.load(tmp_path / "first", parts=["*"], strict=False).missing == ["ema"]
    assert run.trainer.state.iteration == 4


def loading(**options):
    """A load with these options from a run of two iterations."""

    def call(folder):
        run_of(folder / "a", Net(1)).trainer.run(numbers_loader(16), max_iters=2)
        run_of(folder / "run", Net(3)).checkpoint.load(folder / "a", **options)

    return call


def source(**options):
    return lambda: LoadSource(**{"path": "a", **options})


def several(sources, **options):
    return lambda folder: run_of(folder, Net(3)).checkpoint.load(sources, **options)


test_refusals = refusals(
    [
        ("no such part", loading(parts=["modle"]), ValueError, "parts 'modle' did you mean 'model'"),
        ("no such name", loading(parts=["model:backbon.*"]), ValueError, "'model:backbon.*' did you mean"),
        ("ignored name", loading(ignore=["model:tail.*"]), ValueError, "ignore 'model:tail.*' known backbone.weight"),
        ("no names inside", loading(ignore=["trainer:x"]), ValueError, "'trainer:x' no names inside"),
        ("ignored part", loading(ignore=["emma"]), ValueError, "'emma' did you mean 'ema'"),
        ("one of two names", loading(rename={"backbone": "x", "middle": "x"}), ValueError, "rename 'x.weight' both"),
        ("no such average", loading(weights="average"), ValueError, "weights='average' raw ema"),
        ("no option", loading(strickt=True), TypeError, "strickt"),
        ("path", source(path=""), (TypeError, ValueError), "path"),
        ("a text for a list", source(parts="model"), ValueError, "parts list ['model']"),
        ("data without counters", source(parts=["model", "data"]), ValueError, "'data' 'counters'"),
        ("no part", source(ignore=[":head"]), ValueError, "ignore ':head'"),
        ("no name", source(parts=["model:"]), ValueError, "parts 'model:'"),
        ("a number for a pattern", source(parts=[3]), ValueError, "parts 3"),
        ("rename", source(rename=7), (TypeError, ValueError), "rename function mapping 7"),
        ("required", source(required=1), (TypeError, ValueError), "required True False 1"),
        ("no sources", several([]), ValueError, "list LoadSource"),
        ("paths in a list", several(["a"]), ValueError, "list LoadSource"),
        ("options beside a list", several([LoadSource("a")], strict=False), ValueError, "list LoadSource"),
        ("not attached", lambda path: Checkpoint(path).load(path), RuntimeError, "attach"),
        ("not there", several("nowhere"), CheckpointError, "nowhere does not exist expected"),
    ]
)


# -- several sources --------------------------------------------------------------------------------------------------


def of(name, *parts, **options):
    return lambda folder: LoadSource(folder / name, *([list(parts)] if parts else []), **options)


FROM_A, FROM_B, BUILT = "a", "b", "built"
# the sources in their order, and where the names of the model come from then
SOURCES = {
    "the last wins": ([of("a"), of("b")], {"*": FROM_B}),
    "the order decides": ([of("b"), of("a")], {"*": FROM_A}),
    "the last that has it": (
        [
            of("a", ignore=["model:middle.bias"]),
            of("b", "model:head.*", "model:middle.*", ignore=["model:middle.*"]),
        ],
        {"head.*": FROM_B, "middle.bias": BUILT, "*": FROM_A},
    ),
    "each is strict, together they are complete": ([of("head.pt"), of("rest.pt")], {"head.*": FROM_A, "*": FROM_B}),
    "some are not there": (
        [of("a"), *(of(name, required=False) for name in ("nowhere", "empty", "iteration_00000001", "x.pt"))],
        {"*": FROM_A},
    ),
    "renamed one by one": (
        [
            of("old.pt", rename={"stem.": "backbone.", "out.": "head."}, strict=False),
            of("prefixed.pt", rename=lambda name: name.removeprefix("net."), ignore=["model:head.*"]),
        ],
        {"head.*": FROM_A, "*": FROM_B},
    ),
    "a name that becomes none": (
        [of("prefixed.pt", rename=lambda name: None if "middle" in name else name[4:], strict=False)],
        {"middle.*": BUILT, "*": FROM_B},
    ),
    "loose": ([of("a"), of("wide.pt", strict=False)], {"head.bias": FROM_A, "*": FROM_B}),
}


@pytest.fixture(scope="module")
def files(runs):
    """Beside the runs files of their weights."""
    a, b = (saved.parts(runs / name)["model"] for name in "ab")
    head = {name: value for name, value in a.items() if name.startswith("head")}
    (runs / "empty").mkdir()
    for name, state in {
        "head.pt": head,
        "rest.pt": {name: value for name, value in b.items() if name not in head},
        "old.pt": {renamed({"backbone": "stem", "head": "out", "middle": "blocks"})(name): a[name] for name in a},
        "prefixed.pt": {f"net.{name}": value for name, value in b.items()},
        "wide.pt": {**b, "head.bias": torch.ones(2)},
        "more.pt": {**a, "tail.weight": torch.ones(2)},
    }.items():
        torch.save(state, runs / name)
    return runs


@pytest.mark.row("D11")
@pytest.mark.parametrize(("sources", "origins"), SOURCES.values(), ids=list(SOURCES))
def test_each_name_comes_from_the_last_source_that_has_it(files, tmp_path, sources, origins):
    run = run_of(tmp_path, Net(3), ema=False)
    states = {"a": saved.parts(files / "a")["model"], "b": saved.parts(files / "b")["model"]}
    states["built"] = {name: value.clone() for name, value in run.model.state_dict().items()}
    report = run.checkpoint.load([each(files) for each in sources])
    for name, value in run.model.state_dict().items():
        origin = next(origin for pattern, origin in origins.items() if fnmatchcase(name, pattern))
        assert torch.equal(value, states[origin][name]), name
    assert report.source.count("not there") == sum(not each(files).required for each in sources)
    run.trainer.run(numbers_loader(16), max_iters=1)
    assert manifest_of(saved.checkpoint(tmp_path))["parent"] == report.source


def test_of_several_one_that_does_not_fit_is_named_and_nothing_is_loaded(files, tmp_path):
    run = run_of(tmp_path, Net(3), ema=False)
    built, right = one(run.model).clone(), LoadSource(files / "a")
    for name, words in (
        ("head.pt", "head.pt 4 missing model:backbone.weight"),
        ("more.pt", "more.pt 1 unexpected model:tail.weight"),
        ("wide.pt", "wide.pt model:head.bias saved (2,) here (1,)"),
    ):
        sources = [LoadSource(files / name)] if name == "head.pt" else [right, LoadSource(files / name), right]
        refuses(functools.partial(run.checkpoint.load, sources), StateMismatch, words)
    (files / "torn.pt").write_bytes(b"torn")  # it is there
    torn = LoadSource(files / "torn.pt", required=False)
    refuses(lambda: run.checkpoint.load([right, torn]), CheckpointError, "torn.pt")
    for name in ("nowhere", "empty", "x.pt"):
        required = [right, LoadSource(files / name)]
        refuses(functools.partial(run.checkpoint.load, required), CheckpointError, f"{name} expected")
    assert torch.equal(one(run.model), built)


@pytest.mark.parametrize(("kind", "key"), [(torch.optim.AdamW, "exp_avg_sq"), (torch.optim.Adagrad, "sum")])
def test_moments_come_with_their_tensors(tmp_path, kind, key):
    """Those of one source stay where the next has none; Adagrad makes its own as soon as it is made."""
    for seed, name in enumerate("ab", start=1):
        run_of(tmp_path / name, Net(seed), kind=kind).trainer.run(numbers_loader(16), max_iters=8)
    run = run_of(tmp_path / "run", Net(3), kind=kind)
    run.checkpoint.load(
        [
            LoadSource(tmp_path / "a", parts=["model", "optimizer"], ignore=["*:head.*"]),
            LoadSource(tmp_path / "b", ["model:backbone.*", "optimizer:backbone.*"]),
        ]
    )
    a, b = (values(saved.parts(tmp_path / name), key) for name in "ab")
    found = now(run, key)
    assert torch.equal(found["optimizer:backbone.weight"], b["optimizer:backbone.weight"])
    assert torch.equal(found["optimizer:middle.weight"], a["optimizer:middle.weight"])
    assert ("optimizer:head.weight" in found) == (kind is torch.optim.Adagrad)
    run.trainer.run(numbers_loader(16), max_iters=2)
    assert run.optimizer.state[run.model.middle.bias]["step"].item() == 10
