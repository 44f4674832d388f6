"""Random number generators of the user's own: in models, in what an update uses, in data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from ignite_engine import rng
from ignite_engine.ranks import agreement
from ignite_engine.rng import GENERATORS, MOST_ELEMENTS, attributes_of
from ignite_engine.states.model_and_optimizer import ModelState, unwrap

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))


class OwnGenerators:
    """The states of the generators among the attributes of a model's modules and of other objects, by their names.

    Args:
        owners: the models, functions and objects, by the first part of the name.
    """

    def __init__(self, owners: Callable[[], Mapping[str, Any]]) -> None:
        self._owners = owners

    def held(self) -> dict[str, Any]:
        """Each generator by name; one that several objects hold has the first."""
        found: dict[int, tuple[str, Any]] = {}
        for label, owner in self._owners().items():
            for name, value in _attributes(label, owner):
                if _is_generator(value):
                    found.setdefault(id(value), (name, value))
        return dict(found.values())

    def state_dict(self) -> dict[str, Any]:
        return {name: _state_of(generator) for name, generator in self.held().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load those that are there by name."""
        for name, generator in self.held().items():
            if name in state:
                _restore(generator, state[name])

    @contextmanager
    def undrawn(self) -> Iterator[None]:
        """Restore them after the body, which may draw from them."""
        state = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(state)


def owners_in(update: Any) -> dict[str, Any]:
    """What an update uses and may hold a generator, by the first part of its name; the update comes last."""
    optimizers = getattr(update, "optimizers", None)
    held = optimizers if isinstance(optimizers, Mapping) else {}
    named = [(name, optimizer) for name, optimizer in held.items() if not _is_of(optimizer, "torch")]
    # ranks weigh a batch before it is trained on: at a step boundary the generator is ahead
    weighs_ahead = agreement.world_size() > 1
    return {
        "loss_fn": getattr(update, "loss_fn", None),
        **({} if weighs_ahead else {"weight_fn": getattr(update, "weight_fn", None)}),
        **{name if name == "optimizer" else f"optimizer/{name}": optimizer for name, optimizer in named},
        **({} if _is_of(update, "ignite_engine") else {"update": update}),
    }


def _is_of(value: Any, package: str) -> bool:
    """Whether the class is a package's own, which has no generator; a subclass of the user's may have one."""
    return type(value).__module__.partition(".")[0] == package


def unsaved_generators(objects: Mapping[str, Any], update: Any) -> Iterator[str]:
    """One reason for each generator of the models and of what ``update`` uses that no checkpoint holds.

    Args:
        objects: those of the registry, by name.
    """
    saved = _saved(objects)
    models = {name: obj.model if isinstance(obj, ModelState) else obj for name, obj in objects.items()}
    owners = {name: model for name, model in models.items() if isinstance(model, nn.Module)}
    registered = [*objects.values()]
    for label, owner in {**owners, "weight_fn": getattr(update, "weight_fn", None), **owners_in(update)}.items():
        for name, value in _attributes(label, owner):
            if _is_generator(value):
                if id(value) not in saved and id(value) not in _of_registered(objects):
                    saved.add(id(value))  # is named once
                    if label == "weight_fn":
                        yield f"the generator {name} is not saved: make the weight a function of the batch alone"
                        continue
                    yield (
                        f"the generator {name} is not saved, as it was made after the Trainer, or the model is not an "
                        "Update's (trainer.register() saves an object that has it)"
                    )
                continue
            inside = [element for element in _inside(value) if _is_generator(element)]
            if not inside or any(value is obj for obj in registered):
                continue
            if not saved.union(_of_registered(objects)).issuperset(map(id, inside)):
                yield f"a generator in {name} is not saved: make it an attribute of its own"


def unsaved_of_data(objects: Mapping[str, Any], makers: Mapping[str, Any]) -> Iterator[str]:
    """One reason for each of ``makers``, what makes samples and batches, with a generator that no checkpoint holds."""
    for label, maker in makers.items():
        maker = getattr(maker, "__self__", maker)  # of a method
        if str(getattr(maker, "__module__", "")).startswith("torch.") or any(maker is obj for obj in objects.values()):
            continue
        for name, value in _attributes("", maker):
            found = [part for part in (value, *_inside(value)) if _is_generator(part)]
            if found and not (_saved(objects) | _of_registered(objects)).issuperset(map(id, found)):
                yield (
                    f"a generator in the {label} ({name[1:]}) is not saved: draw from the global ones of torch, NumPy "
                    "or Python"
                )
                break


@contextmanager
def undrawn(objects: Mapping[str, Any]) -> Iterator[None]:
    """Restore the generators of a registry after the body, which may draw from them."""
    with ExitStack() as stack:
        for part in _own_generators(objects):
            stack.enter_context(part.undrawn())
        yield


def _saved(objects: Mapping[str, Any]) -> set[int]:
    """The ids of the generators that the parts of an update hold."""
    return {id(generator) for part in _own_generators(objects) for generator in part.held().values()}


def _of_registered(objects: Mapping[str, Any]) -> set[int]:
    """The ids of the generators that other objects of a registry hold; a model's state has none."""
    of_user = (obj for obj in objects.values() if not isinstance(obj, nn.Module))
    return {id(part) for obj in of_user for part in _inside(obj) if _is_generator(part)}


def _own_generators(objects: Mapping[str, Any]) -> list[OwnGenerators]:
    return [obj for obj in objects.values() if isinstance(obj, OwnGenerators)]


def _attributes(label: str, owner: Any) -> Iterator[tuple[str, Any]]:
    owner = getattr(owner, "__self__", owner)  # of a method
    if isinstance(owner, nn.Module):
        for place, module in unwrap(owner).named_modules():
            name = f"{label}.{place}" if place else label
            for key, value in vars(module).items():
                if key not in _OF_EVERY_MODULE and type(value) not in _PLAIN:
                    yield f"{name}.{key}", value
        return
    for key, value in attributes_of(owner):
        if isinstance(value, nn.Module):
            yield from _attributes(f"{label}.{key}", value)
        else:
            yield f"{label}.{key}", value


def _inside(value: Any) -> Iterator[Any]:
    """What a container or an object of the user's own holds directly, the first elements of a long one."""
    if type(value) in (dict, list, tuple, set):  # others may read a file for each element
        yield from islice(value.values() if type(value) is dict else value, MOST_ELEMENTS)
    elif type(value).__module__.split(".")[0] not in ("torch", "numpy", "builtins") and hasattr(value, "__dict__"):
        yield from islice(vars(value).values(), MOST_ELEMENTS)


def _is_generator(value: Any) -> bool:
    """Whether it is a generator with a state of its own: not the global ones, which are saved as such."""
    if not isinstance(value, GENERATORS) or isinstance(value, random.SystemRandom):
        return False
    return not any(value is known for known in (torch.default_generator, np.random.mtrand._rand, random._inst))


def _state_of(generator: Any) -> Any:
    """Plain values and tensors, loadable with ``weights_only=True``."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return rng.plain_state(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return rng.plain_state(generator.get_state(legacy=False))
    return generator.getstate()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = rng.numpy_state(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(rng.numpy_state(state))
    else:
        version, internal, gauss = state
        generator.setstate((version, tuple(internal), gauss))
