"""Random number generators of the user's own: in models, in what an update uses, in data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ignite_engine import rng
from ignite_engine.errors import StateMismatch
from ignite_engine.held import UNORDERED, held, parts_of
from ignite_engine.ranks import agreement
from ignite_engine.rng import GENERATORS, is_generator
from ignite_engine.states.model_and_optimizer import ModelState, unwrap

_WORDS = len(random.Random(0).getstate()[1])


class OwnGenerators:
    """The states of the generators that a model and other objects hold, by their names.

    Args:
        owners: the models, functions and objects, by the first part of the name.
    """

    def __init__(self, owners: Callable[[], Mapping[str, Any]]) -> None:
        self._owners = owners
        self._begun: dict[str, Any] | None = None
        self.changed: list[str] = []
        """What the loaded state and the objects here do not share, as reasons."""

    def begin(self) -> bool:
        """From here on those are saved that are there now, by name. Whether there are any."""
        self._begun = None
        self._begun = self.held()
        return bool(self._begun)

    def held(self) -> dict[str, Any]:
        """Each generator by name; one that several objects hold has the first, and keeps it."""
        found = {name: generator for name, generator in generators_of(self._owners()).items() if UNORDERED not in name}
        if self._begun is None:
            return found
        there = {id(generator) for generator in found.values()}
        kept = {name: generator for name, generator in self._begun.items() if id(generator) in there}
        # another one has taken the place of one that is gone
        return {name: kept.get(name, found.get(name)) for name in self._begun if name in kept or name in found}

    def state_dict(self) -> dict[str, Any]:
        return {name: _state_of(generator) for name, generator in self.held().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load those that are there by name.

        Raises:
            StateMismatch: one is of another kind than it was.
        """
        here = self.held()
        for name in here.keys() & state.keys():
            try:
                _restore(here[name], state[name])
            except (TypeError, ValueError, KeyError, RuntimeError, AttributeError) as error:
                kind = type(here[name]).__name__
                raise StateMismatch(f"{name} is a {kind} now, and its state was saved of another kind.") from error
        anew = [
            f"the generator {name} begins anew, as none of its name was saved" for name in here if name not in state
        ]
        self.changed = anew + lost(name for name in state if name not in here)

    @contextmanager
    def undrawn(self) -> Iterator[None]:
        """Restore them after the body, which may draw from them."""
        before = [(generator, _state_of(generator)) for generator in self.held().values()]
        try:
            yield
        finally:
            for generator, state in before:
                _restore(generator, state)


def lost(names: Iterable[str]) -> list[str]:
    """One reason for each generator that was saved and is not here."""
    return [f"the state of the generator {name} has none here to go to" for name in names]


def are_states(part: str, state: Any) -> bool:
    """Whether this part of a checkpoint is of :class:`OwnGenerators`."""
    owners = ("model", "loss_fn", "weight_fn", "optimizer", "update")
    is_named = part.partition("/")[0] == "generators" and isinstance(state, Mapping)
    return is_named and all(isinstance(name, str) and name.startswith(owners) for name in state)


def generators_of(owners: Mapping[str, Any]) -> dict[str, Any]:
    """The generators that these hold, by name, and the models as they are without what wraps them."""
    plain = {name: unwrap(owner) if isinstance(owner, nn.Module) else owner for name, owner in owners.items()}
    return {name: value for name, value in held(plain, GENERATORS) if is_generator(value)}


def owners_in(update: Any) -> dict[str, Any]:
    """What an update uses and may hold a generator, by the first part of its name; the update comes last."""
    optimizers = getattr(update, "optimizers", None)
    by_name = optimizers if isinstance(optimizers, Mapping) else {}
    named = [(name, optimizer) for name, optimizer in by_name.items() if not is_of(optimizer, "torch")]
    # ranks weigh a batch before it is trained on: at a step boundary the generator is ahead
    weighs_ahead = agreement.world_size() > 1
    return {
        "loss_fn": getattr(update, "loss_fn", None),
        **({} if weighs_ahead else {"weight_fn": getattr(update, "weight_fn", None)}),
        **{name if name == "optimizer" else f"optimizer/{name}": optimizer for name, optimizer in named},
        **({} if is_of(update, "ignite_engine") else {"update": update}),
    }


def is_of(value: Any, package: str) -> bool:
    """Whether the class is a package's own, and no subclass of the user's."""
    return type(value).__module__.partition(".")[0] == package


def unsaved_generators(objects: Mapping[str, Any], update: Any, saved: set[int]) -> Iterator[str]:
    """One reason for each generator of the models and of what ``update`` uses that no checkpoint holds.

    Args:
        objects: those of the registry, by name.
        saved: of :func:`saved_generators`.
    """
    for part in _own_generators(objects):
        yield from part.changed
    models = {name: obj.model if isinstance(obj, ModelState) else obj for name, obj in objects.items()}
    owners = {name: model for name, model in models.items() if isinstance(model, nn.Module)}
    used = {"weight_fn": getattr(update, "weight_fn", None), **owners_in(update)}
    for name, generator in generators_of({**owners, **used}).items():
        if id(generator) in saved:
            continue
        if name.startswith("weight_fn."):
            yield f"the generator {name} is not saved: make the weight a function of the batch alone"
        elif UNORDERED in name:
            yield f"a generator in {name.split(UNORDERED)[0]} is not saved, as a set has no order: hold it in a list"
        else:
            yield (
                f"the generator {name} is not saved, as it was made after the Trainer, or the model is not an Update's "
                "(trainer.register() saves an object that has it)"
            )


def unsaved_of_data(objects: Mapping[str, Any], makers: Mapping[str, Any], saved: set[int]) -> Iterator[str]:
    """One reason for each of ``makers``, what makes samples and batches, with a generator that no checkpoint holds.

    Args:
        objects: those of the registry, by name, of which the data may be one; none where workers draw from copies.
        saved: of :func:`saved_generators`; empty likewise.
    """
    for label, maker in makers.items():
        if any(getattr(maker, "__self__", maker) is obj for obj in objects.values()):
            continue
        found = generators_of({"": maker}).items()
        if (first := next((name for name, generator in found if id(generator) not in saved), None)) is not None:
            yield (
                f"a generator in the {label} ({first.removeprefix('.')}) is not saved: draw from the global ones of "
                "torch, NumPy or Python"
            )


@contextmanager
def undrawn(objects: Mapping[str, Any]) -> Iterator[None]:
    """Restore the generators of a registry after the body, which may draw from them."""
    with ExitStack() as stack:
        for part in _own_generators(objects):
            stack.enter_context(part.undrawn())
        yield


def saved_generators(objects: Mapping[str, Any]) -> set[int]:
    """The ids of the generators that the parts of an update and other objects of a registry, but for models, hold."""
    of_update = (generator for part in _own_generators(objects) for generator in part.held().values())
    of_user = (obj for obj in objects.values() if not isinstance(obj, nn.Module))
    directly = (part for obj in of_user for _, part in parts_of("", obj) if is_generator(part))
    return {id(generator) for generator in (*of_update, *directly)}


def _own_generators(objects: Mapping[str, Any]) -> list[OwnGenerators]:
    return [obj for obj in objects.values() if isinstance(obj, OwnGenerators)]


def _state_of(generator: Any) -> Any:
    """Plain values and tensors, loadable with ``weights_only=True``."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator | np.random.BitGenerator):
        return rng.plain_state(_bits_of(generator).state)
    if isinstance(generator, np.random.RandomState):
        return rng.plain_state(generator.get_state(legacy=False))
    state = generator.getstate()
    if not _is_of_python(state):
        return state  # of a subclass
    version, words, gauss = state
    return version, torch.from_numpy(np.array(words, dtype=np.uint32).view(np.uint8)), gauss


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator | np.random.BitGenerator):
        _bits_of(generator).state = rng.numpy_state(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(rng.numpy_state(state))
    elif _is_of_python(generator.getstate()):
        version, words, gauss = state
        generator.setstate((version, tuple(words.numpy().view(np.uint32).tolist()), gauss))
    else:
        generator.setstate(state)


def _is_of_python(state: Any) -> bool:
    """Whether a ``random.Random`` has the state that Python gives it: a version, many words, half of a pair."""
    return isinstance(state, tuple) and len(state) == 3 and isinstance(state[1], tuple) and len(state[1]) == _WORDS


def _bits_of(generator: Any) -> Any:
    return getattr(generator, "bit_generator", generator)
