"""Generators that a model or a loss function holds are resumed as torch's own are, or named where they cannot be."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ignite.engine import Events
from ignite.metrics import MeanSquaredError
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Subset, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from ignite_engine import Trainer, Update, Updates, create_evaluator, loader
from ignite_engine.errors import NotExact, StateMismatch
from ignite_engine.handlers import Checkpoint, Evaluation
from ignite_engine.ranks import agreement
from ignite_engine.states import generators
from tests.builders import Numbers, linear, mse, one

KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "torch": (lambda: torch.Generator().manual_seed(5), lambda each: torch.rand((), generator=each).item()),
    "numpy": (lambda: np.random.default_rng(5), lambda each: float(each.standard_normal())),
    "numpy, philox": (lambda: np.random.Generator(np.random.Philox(5)), lambda each: float(each.random())),
    "numpy, old": (lambda: np.random.RandomState(5), lambda each: float(each.standard_normal())),
    "python": (lambda: random.Random(5), lambda each: each.gauss(0.0, 1.0)),
    "python, a subclass": (lambda: Congruential(5), lambda each: each.random()),
}


class Congruential(random.Random):
    """Has a state of its own."""

    def seed(self, seed: Any = None, version: int = 2) -> None:
        self.place = seed

    def random(self) -> float:
        self.place = (self.place * 1103515245 + 12345) % 2**31
        return self.place / 2**31  # type: ignore[no-any-return]

    def getstate(self) -> tuple[Any, ...]:
        return "congruential", self.place

    def setstate(self, state: tuple[Any, ...]) -> None:
        _, self.place = state


class Noise(nn.Module):
    """Adds a number from its own generator."""

    def __init__(self, kind: str, *, inside: Callable[[Any], Any] = lambda generator: generator) -> None:
        super().__init__()
        make, self.draw = KINDS[kind]
        self.source = inside(make())

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 0.1 * self.draw(getattr(self.source, "generator", self.source))


class NoisyLoss:
    """A loss function that is an object."""

    def __init__(self, kind: str) -> None:
        make, self.draw = KINDS[kind]
        self.generator = make()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return mse(model, batch) * (1.0 + 0.1 * self.draw(self.generator))

    def method(self, model: nn.Module, batch: Any) -> Tensor:
        return self(model, batch)


class NoisyModule(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.noise = Noise(kind)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return self.noise(mse(model, batch))  # type: ignore[no-any-return]


def closure(kind: str) -> Any:
    make, draw = KINDS[kind]
    generator = make()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return mse(model, batch) * (1.0 + 0.1 * draw(generator))

    return loss_fn


def default(kind: str) -> Any:
    make, draw = KINDS[kind]

    def loss_fn(model: nn.Module, batch: Any, generator: Any = make()) -> Tensor:  # noqa: B008  # made once
        return mse(model, batch) * (1.0 + 0.1 * draw(generator))

    return loss_fn


def bound(kind: str) -> Any:
    make, draw = KINDS[kind]

    def loss_fn(generator: Any, model: nn.Module, batch: Any) -> Tensor:
        return mse(model, batch) * (1.0 + 0.1 * draw(generator))

    return partial(loss_fn, make())


class Deep(NamedTuple):
    """Holds a generator where only its elements lead to it."""

    generator: Any


def of_a_wrapped_function(kind: str) -> Any:
    """A loss function that draws in a comprehension of what a decorator wraps."""
    function = closure(kind)

    @wraps(function)
    def loss_fn(*arguments: Any) -> Tensor:
        return torch.stack([function(*arguments) for _ in range(2)]).mean()

    return loss_fn


def made(folder: Path, model: nn.Module, loss_fn: Any = mse, **options: Any) -> tuple[Trainer, Checkpoint]:
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn))
    checkpoint = Checkpoint(folder, **options)
    checkpoint.attach(trainer)
    return trainer, checkpoint


def weights_after(folder: Path, make: Callable[[], tuple[nn.Module, Any]], stops: tuple[int, ...]) -> Tensor:
    for stop in (*stops, 99):
        model, loss_fn = make()
        trainer, checkpoint = made(folder, model, loss_fn, strict=True)
        checkpoint.resume()
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda: trainer.request_stop("test"))  # noqa: B023  # called in this turn
        trainer.run(loader(Numbers(8), 2), max_epochs=2)
        assert trainer.reproducibility() == []
    return one(model).clone()


HOLDERS: dict[str, Callable[[str], tuple[nn.Module, Any]]] = {
    "model": lambda kind: (nn.Sequential(linear(), Noise(kind)), mse),
    "loss object": lambda kind: (linear(), NoisyLoss(kind)),
    "method": lambda kind: (linear(), NoisyLoss(kind).method),
    "loss module": lambda kind: (linear(), NoisyModule(kind)),
    "method of a module": lambda kind: (linear(), NoisyModule(kind).forward),
    "closure": lambda kind: (linear(), closure(kind)),
    "default": lambda kind: (linear(), default(kind)),
    "partial": lambda kind: (linear(), bound(kind)),
    "list": lambda kind: (nn.Sequential(linear(), Noise(kind, inside=Deep)), mse),
    "what a function calls": lambda kind: (linear(), of_a_wrapped_function(kind)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_stopped_run_ends_with_the_bits_of_the_whole_one(tmp_path: Path, holder: str, kind: str) -> None:
    def make() -> tuple[nn.Module, Any]:
        return HOLDERS[holder](kind)

    whole = weights_after(tmp_path / "whole", make, ())
    assert torch.equal(whole, weights_after(tmp_path / "stopped", make, (3, 6)))


class NoisyUpdate(Update):
    """Adds noise to the gradients, from a generator of its own."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        make, self.draw = KINDS[kind]
        self.source = make()

    def accumulate(self, *arguments: Any) -> dict[str, Tensor]:
        output = super().accumulate(*arguments)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.1 * self.draw(self.source)
        return output


class NoisySGD(torch.optim.SGD):
    """Adds noise to the rate, from a generator of its own."""

    def __init__(self, kind: str, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        make, self.draw = KINDS[kind]
        self.source = make()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's returns the loss
        self.param_groups[0]["lr"] = 0.1 + 0.01 * self.draw(self.source)
        super().step(closure)


def noisy_weight(kind: str) -> Any:
    make, draw = KINDS[kind]
    generator = make()
    return lambda batch: 1.0 + abs(draw(generator))


UPDATES: dict[str, Callable[[nn.Module, str], Update]] = {
    "update": lambda model, kind: NoisyUpdate(kind, model, torch.optim.SGD(model.parameters(), lr=0.1), mse),
    "optimizer": lambda model, kind: Update(model, NoisySGD(kind, model.parameters()), mse),
    "weight_fn": lambda model, kind: Update(
        model, torch.optim.SGD(model.parameters(), lr=0.1), mse, weight_fn=noisy_weight(kind)
    ),
}


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("holder", UPDATES)
def test_those_of_the_update_its_optimizer_and_its_weights_are_resumed(tmp_path: Path, holder: str, kind: str) -> None:
    def weights(folder: Path, stops: tuple[int, ...]) -> Tensor:
        for stop in (*stops, 99):
            model = linear()
            trainer = Trainer(UPDATES[holder](model, kind), accumulation_steps=2)
            checkpoint = Checkpoint(folder, strict=True)
            checkpoint.attach(trainer)
            checkpoint.resume()
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda: trainer.request_stop("test"))  # noqa: B023  # called in this turn
            trainer.run(loader(Numbers(8), 1), max_epochs=2)
            assert trainer.reproducibility() == []
        return one(model).clone()

    whole = weights(tmp_path / "whole", ())
    assert torch.equal(whole, weights(tmp_path / "stopped", (3, 6)))
    assert not torch.equal(whole, weights_after(tmp_path / "plain", lambda: (linear(), mse), ()))


def test_an_evaluation_draws_nothing_from_them(tmp_path: Path) -> None:
    """It may be done again after a stop."""

    def trained(*, evaluates: bool) -> Tensor:
        model = nn.Sequential(linear(), Noise("torch"))
        trainer, _ = made(tmp_path / str(evaluates), model)
        if evaluates:
            evaluator = create_evaluator(
                model, lambda model, batch: (model(batch[0]), batch[1]), {"mse": MeanSquaredError()}
            )
            Evaluation(evaluator, loader(Numbers(8), 2)).attach(trainer, Events.ITERATION_COMPLETED(every=2))
        trainer.run(loader(Numbers(8), 2), max_epochs=2)
        return one(model).clone()

    assert torch.equal(trained(evaluates=True), trained(evaluates=False))


def test_updates_in_turn_save_theirs(tmp_path: Path) -> None:
    model = nn.Sequential(linear(), Noise("torch"))
    turns = {name: Update(model, torch.optim.SGD(model.parameters(), lr=0.1), NoisyLoss("torch")) for name in "ab"}
    trainer = Trainer(Updates(turns))
    Checkpoint(tmp_path).attach(trainer)
    assert trainer.reproducibility() == []
    assert [name for name in trainer.registry.objects if "generators" in name] == ["generators/a", "generators/b"]


def test_one_generator_that_several_hold_is_saved_once(tmp_path: Path) -> None:
    first, second = Noise("torch"), Noise("torch")
    second.source = first.source
    trainer, _ = made(tmp_path, nn.Sequential(linear(), first, second))
    assert list(trainer.registry.objects["generators"].state_dict()) == ["model.1.source"]


def test_one_that_gets_a_shorter_name_later_is_saved_under_the_first(tmp_path: Path) -> None:
    class Caching:
        def __init__(self) -> None:
            self.inner = {"deep": {"noise": torch.Generator()}}
            self.cache: Any = None

        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            self.cache = self.inner["deep"]["noise"]
            return mse(model, batch) * (1.0 + 0.1 * torch.rand((), generator=self.cache))

    whole = weights_after(tmp_path / "whole", lambda: (linear(), Caching()), ())
    assert torch.equal(whole, weights_after(tmp_path / "stopped", lambda: (linear(), Caching()), (3, 6)))


def test_one_that_takes_the_place_of_another_is_saved(tmp_path: Path) -> None:
    model = nn.Sequential(linear(), Noise("torch"))
    trainer, _ = made(tmp_path, model)
    model[1].source = torch.Generator().manual_seed(9)
    saved = trainer.registry.objects["generators"].state_dict()
    assert torch.equal(saved["model.1.source"], model[1].source.get_state()) and trainer.reproducibility() == []


def test_the_words_of_one_of_python_are_saved_as_a_tensor(tmp_path: Path) -> None:
    """As numbers, 999 of them were 3.8 MB that are pickled one by one."""
    trainer, _ = made(tmp_path, nn.Sequential(linear(), Noise("python")))
    _, words, _ = trainer.registry.objects["generators"].state_dict()["model.1.source"]
    assert words.dtype == torch.uint8 and words.numel() == 4 * 625


def test_without_any_nothing_is_saved(tmp_path: Path) -> None:
    trainer, _ = made(tmp_path, linear())
    assert "generators" not in trainer.registry.objects


class Holder:
    def __init__(self, generator: Any) -> None:
        self.generator = generator


class SavedHolder(Holder):
    def state_dict(self) -> Any:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Any) -> None:
        self.generator.set_state(state["generator"])


def test_one_in_a_set_is_named_as_a_set_has_no_order(tmp_path: Path) -> None:
    trainer, _ = made(tmp_path, nn.Sequential(linear(), Noise("torch", inside=lambda generator: {generator})))
    (reason,) = trainer.reproducibility()
    assert reason == "a generator in model.1.source is not saved, as a set has no order: hold it in a list"


class NoisyNumbers(Numbers):
    def __init__(self, size: int, generator: Any) -> None:
        super().__init__(size)
        self.source = generator


class SavedNumbers(NoisyNumbers):
    def state_dict(self) -> Any:
        return {"generator": self.source.get_state()}

    def load_state_dict(self, state: Any) -> None:
        self.source.set_state(state["generator"])


class NoisyCollate:
    def __init__(self, generator: Any) -> None:
        self.source = generator

    def __call__(self, samples: Any) -> Any:
        return default_collate(samples)


def collate_of(generator: Any) -> Any:
    def collate(samples: Any) -> Any:
        source = generator
        assert source is not None
        return default_collate(samples)

    return collate


NOISY_DATA: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "dataset": (lambda generator: loader(NoisyNumbers(8, generator), 2), "the dataset (source)"),
    "an object of the dataset": (
        lambda generator: loader(NoisyNumbers(8, Holder(generator)), 2),
        "the dataset (source.generator)",
    ),
    "a part of it": (lambda generator: loader(Subset(NoisyNumbers(8, generator), range(8)), 2), "the dataset (source)"),
    "collate object": (
        lambda generator: loader(Numbers(8), 2, collate_fn=NoisyCollate(generator)),
        "the collate function (source)",
    ),
    "collate closure": (
        lambda generator: loader(Numbers(8), 2, collate_fn=collate_of(generator)),
        "the collate function (generator)",
    ),
    "loader with a state": (
        lambda generator: StatefulDataLoader(NoisyNumbers(8, generator), batch_size=2),
        "the dataset (source)",
    ),
    "order": (lambda generator: loader(Numbers(8), 2, shuffle=True), None),
    "own order": (
        lambda generator: loader(Numbers(8), 2, sampler=RandomSampler(range(8), generator=torch.Generator())),
        None,
    ),
    "order of a loader with a state": (
        lambda generator: StatefulDataLoader(Numbers(8), batch_size=2, shuffle=True, generator=torch.Generator()),
        None,
    ),
}


@pytest.mark.parametrize("where", NOISY_DATA)
def test_one_of_the_data_is_named_and_refused_by_strict(tmp_path: Path, where: str) -> None:
    make, said = NOISY_DATA[where]
    trainer, _ = made(tmp_path / "run", linear())
    trainer.run(make(np.random.default_rng(0)), max_epochs=1)
    assert trainer.reproducibility() == (
        []
        if said is None
        else [f"a generator in {said} is not saved: draw from the global ones of torch, NumPy or Python"]
    )
    if said is not None:
        trainer, checkpoint = made(tmp_path / "strict", linear(), strict=True)
        checkpoint.resume()
        with pytest.raises(NotExact, match=r"a generator in the .* is not saved"):
            trainer.run(make(np.random.default_rng(0)), max_epochs=1)


def test_one_of_the_data_that_is_registered_is_not_named(tmp_path: Path) -> None:
    dataset = SavedNumbers(8, torch.Generator())
    trainer, _ = made(tmp_path, linear())
    trainer.register("dataset", dataset)
    trainer.run(loader(dataset, 2), max_epochs=1)
    assert trainer.reproducibility() == []


def test_one_of_the_data_that_a_registered_object_saves_is_not_named(tmp_path: Path) -> None:
    generator = torch.Generator()
    trainer, _ = made(tmp_path, linear())
    trainer.register("noise", SavedHolder(generator))
    trainer.run(loader(NoisyNumbers(8, generator), 2), max_epochs=1)
    assert trainer.reproducibility() == []


class NoisyMetric(MeanSquaredError):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.source = generator


def predict_of(generator: Any) -> Any:
    return lambda model, batch: (model(batch[0]) + 0.0 * generator.random(), batch[1])


def plain_predict(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]), batch[1]


NOISY_EVALUATIONS: dict[str, tuple[Callable[[Any], tuple[Any, Any, Any]], str | None]] = {
    "data": (
        lambda each: (loader(NoisyNumbers(8, each), 2), plain_predict, MeanSquaredError()),
        "data of evaluation val (dataset.source)",
    ),
    "plain data": (
        lambda each: (DataLoader(NoisyNumbers(8, each), 2), plain_predict, MeanSquaredError()),
        "data of evaluation val (source)",
    ),
    "data in workers": (
        lambda each: (DataLoader(NoisyNumbers(8, each), 2, num_workers=1), plain_predict, MeanSquaredError()),
        None,
    ),
    "collate": (
        lambda each: (DataLoader(Numbers(8), 2, collate_fn=NoisyCollate(each)), plain_predict, MeanSquaredError()),
        "collate function of evaluation val (source)",
    ),
    "function": (
        lambda each: (lambda: loader(NoisyNumbers(8, each), 2), plain_predict, MeanSquaredError()),
        "data of evaluation val (each)",
    ),
    "predict": (
        lambda each: (loader(Numbers(8), 2), predict_of(each), MeanSquaredError()),
        "predict function of evaluation val (generator)",
    ),
    "metric": (
        lambda each: (loader(Numbers(8), 2), plain_predict, NoisyMetric(each)),
        "metric mse of evaluation val (source)",
    ),
    "order": (
        lambda each: (
            DataLoader(Numbers(8), 2, shuffle=True, generator=torch.Generator()),
            plain_predict,
            MeanSquaredError(),
        ),
        None,
    ),
}


@pytest.mark.parametrize("where", NOISY_EVALUATIONS)
def test_one_of_an_evaluation_is_named(tmp_path: Path, where: str) -> None:
    """What it measures may end the run."""
    make, said = NOISY_EVALUATIONS[where]
    data, predict, metric = make(np.random.default_rng(0))
    trainer, _ = made(tmp_path, nn.Sequential(linear(), Noise("torch")))
    Evaluation(create_evaluator(trainer.update.model, predict, {"mse": metric}), data).attach(trainer)  # type: ignore[attr-defined]  # an Update
    assert trainer.reproducibility() == (
        []
        if said is None
        else [f"a generator in the {said} is not saved: draw from the global ones of torch, NumPy or Python"]
    )


def test_one_that_a_loader_with_a_state_saves_is_not_named_where_its_data_draws_from_it(tmp_path: Path) -> None:
    generator = torch.Generator()
    trainer, _ = made(tmp_path, linear())
    data = StatefulDataLoader(NoisyNumbers(8, generator), batch_size=2, shuffle=True, generator=generator)
    trainer.run(data, max_epochs=1)
    assert trainer.reproducibility() == []


def test_one_that_an_update_function_of_ones_own_draws_from_is_named(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    trainer = Trainer(lambda engine, batch: float(generator.random()))
    trainer.register("net", linear(), shared=True)
    Checkpoint(tmp_path).attach(trainer)
    (reason,) = trainer.reproducibility()
    assert reason.startswith("the generator update.generator is not saved")


def test_one_of_weights_that_ranks_compute_ahead_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = UPDATES["weight_fn"](linear(), "torch")
    monkeypatch.setattr(agreement, "world_size", lambda: 2)
    trainer = Trainer(update)
    Checkpoint(tmp_path).attach(trainer)
    reason = "the generator weight_fn.generator is not saved: make the weight a function of the batch alone"
    assert reason in trainer.reproducibility()


def test_one_that_comes_after_the_trainer_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(linear(), nn.Identity())
    trainer, _ = made(tmp_path, model)
    assert trainer.reproducibility() == []
    model[1].source = torch.Generator()
    (reason,) = trainer.reproducibility()
    assert reason.startswith("the generator model.1.source is not saved, as it was made after the Trainer")


class Lazy:
    """Makes its generator in the first update."""

    @cached_property
    def noise(self) -> torch.Generator:
        return torch.Generator()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return mse(model, batch) * (1.0 + 0.1 * torch.rand((), generator=self.noise))


@pytest.mark.parametrize("background", [False, True])
def test_one_that_is_made_within_the_run_is_named_once_and_at_the_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    reason = "the generator loss_fn.noise is not saved, as it was made after the Trainer"
    made(tmp_path, linear(), Lazy(), background=background)[0].run(loader(Numbers(8), 2), max_epochs=3)
    (told,) = [line for line in caplog.messages if reason in line]
    assert told.startswith("A run resumed from these checkpoints may have other bits: ")

    caplog.clear()
    trainer, checkpoint = made(tmp_path, linear(), Lazy())
    checkpoint.resume()
    trainer.run(loader(Numbers(8), 2), max_epochs=5)
    told, again = [line for line in caplog.messages if reason in line]
    assert told.startswith("iteration_00000012 may go on with other bits: ")
    assert again.startswith(f"A run resumed from these checkpoints may have other bits: {reason}")
    assert trainer.reproducibility()[0].startswith(f"resumed from iteration_00000012, which is not exact ({reason}")


def test_one_that_is_made_within_the_run_ends_a_strict_one_at_the_first_save(tmp_path: Path) -> None:
    for stop in (3, 99):  # a stop saves, too
        trainer, checkpoint = made(tmp_path / str(stop), linear(), Lazy(), strict=True)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda: trainer.request_stop("test"))  # noqa: B023  # called in this turn
        with pytest.raises(NotExact, match=r"^This run cannot be resumed .* loss_fn\.noise is not saved"):
            trainer.run(loader(Numbers(8), 2), max_epochs=3)
        assert [saved.iteration for saved in checkpoint.store.checkpoints()] == [min(stop, 4)]


def test_one_in_a_registered_object_is_saved_there(tmp_path: Path) -> None:
    layer = Noise("torch", inside=SavedHolder)
    trainer, _ = made(tmp_path, nn.Sequential(linear(), layer))
    trainer.register("noise", layer.source)
    assert trainer.reproducibility() == []


def test_a_model_of_an_own_update_function_is_asked_too(tmp_path: Path) -> None:
    model = nn.Sequential(linear(), Noise("torch"))
    trainer = Trainer(lambda engine, batch: 0.0)
    trainer.register("net", model, shared=True)
    Checkpoint(tmp_path).attach(trainer)
    (reason,) = trainer.reproducibility()
    assert reason.startswith("the generator net.1.source is not saved")


def test_rank_invariant_refuses_one_of_the_loss_function() -> None:
    for holder in ("loss object", "method", "loss module", "closure"):
        model, loss_fn = HOLDERS[holder]("torch")
        update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, rank_invariant=True)
        with pytest.raises(
            ValueError, match=r"the loss function has a generator of its own .*, which goes on with each"
        ):
            Trainer(update, global_micro_batches=2).run(loader(Numbers(8), 2), max_iters=1)


def test_generators_of_other_names_than_saved_are_named(tmp_path: Path) -> None:
    class Two(nn.Identity):
        def __init__(self, *names: str) -> None:
            super().__init__()
            for name in names:
                setattr(self, name, torch.Generator())

    made(tmp_path, nn.Sequential(linear(), Two("a", "b")))[0].run(loader(Numbers(8), 2), max_epochs=1)
    trainer, checkpoint = made(tmp_path, nn.Sequential(linear(), Two("b", "c")))
    checkpoint.resume()

    assert trainer.reproducibility() == [
        "the generator model.1.c begins anew, as none of its name was saved",
        "the state of the generator model.1.a has none here to go to",
    ]


def test_the_last_one_that_is_gone_is_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path, nn.Sequential(linear(), Noise("torch")))[0].run(loader(Numbers(8), 2), max_epochs=1)
    trainer, checkpoint = made(tmp_path, nn.Sequential(linear()))
    checkpoint.resume()
    trainer.run(loader(Numbers(8), 2), max_epochs=2)
    reason = "the state of the generator model.1.source has none here to go to"
    assert trainer.reproducibility() == [reason] and sum(reason in line for line in caplog.messages) == 1


def test_one_that_comes_after_the_trainer_beside_another_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(linear(), Noise("torch"))
    trainer, _ = made(tmp_path, model)
    model[1].later = torch.Generator()
    (reason,) = trainer.reproducibility()
    assert reason.startswith("the generator model.1.later is not saved, as it was made after the Trainer")


def test_one_of_another_kind_than_saved_is_refused_by_its_name(tmp_path: Path) -> None:
    made(tmp_path, nn.Sequential(linear(), Noise("torch")))[0].run(loader(Numbers(8), 2), max_epochs=1)
    _, checkpoint = made(tmp_path, nn.Sequential(linear(), Noise("numpy")))
    with pytest.raises(StateMismatch, match=r"model\.1\.source is a Generator now, and .* of another kind"):
        checkpoint.resume()


@pytest.mark.parametrize("holder", ["a model", "a registered object"])
def test_one_of_the_data_that_is_saved_is_drawn_from_in_workers_all_the_same(tmp_path: Path, holder: str) -> None:
    model, dataset = nn.Sequential(linear(), Noise("torch")), SavedNumbers(8, torch.Generator())
    if holder == "a model":
        dataset.source = model[1].source
    trainer, _ = made(tmp_path, model)
    if holder == "a registered object":
        trainer.register("dataset", dataset)
    trainer.run(loader(dataset, 2, num_workers=1), max_epochs=1)
    (reason,) = trainer.reproducibility()
    assert reason.startswith("a generator in the dataset (source) is not saved")


def test_global_ones_that_data_holds_are_saved_as_such() -> None:
    data = NoisyNumbers(4, [random.SystemRandom(), np.random.mtrand._rand, random._inst, torch.default_generator])
    assert [*generators.unsaved_of_data({}, {"dataset": data}, set())] == []
