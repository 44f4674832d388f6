"""States of models and optimizers under names that do not depend on wrapping or order."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ignite_engine.checkpoint.nested import rebuilt
from ignite_engine.errors import StateMismatch, leave_out
from ignite_engine.ranks import mesh

logger = logging.getLogger(__name__)


def clean_name(name: str) -> str:
    """A parameter's name without the prefix of torch.compile; DDP's prefix is removed by :func:`unwrap`."""
    return name.replace("_orig_mod.", "")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own model inside DDP, DataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and (hasattr(model, "no_sync") or isinstance(model, nn.DataParallel)):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def reshard(model: nn.Module) -> None:
    """Make FSDP2 restore its sharded parameters: after a forward without a backward they are whole copies."""
    for module in sharded_modules(model):
        module.reshard()


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules of ``model`` that FSDP2 shards."""
    return [module for module in model.modules() if mesh.is_sharded(module)]


def named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the unwrapped model by their names in a checkpoint; sharded ones under FSDP2."""
    model = unwrap(model)
    reshard(model)
    for name, parameter in model.named_parameters():
        yield clean_name(name), parameter


class ModelState:
    """A model's state under names that do not depend on its wrapping."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.swapped_out: Mapping[str, Tensor] = {}
        """The model's own values by name, while an evaluation runs with other values in their place."""

    def state_dict(self) -> dict[str, Any]:
        state = {clean_name(name): value for name, value in unwrap(self.model).state_dict().items()}
        return {name: self.swapped_out.get(name, value) for name, value in state.items()}

    def untaken(self) -> list[str]:
        """Names in ``state_dict()`` that no module loads again, such as the scales of 4-bit weights."""
        model = unwrap(self.model)
        modules = dict(model.named_modules())
        own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        further = model.state_dict().keys() - {name for name, _ in own}

        def is_taken(name: str) -> bool:
            words = name.split(".")
            owners = [module for at in range(len(words)) if (module := modules.get(".".join(words[:at]))) is not None]
            return any(
                type(owner)._load_from_state_dict is not nn.Module._load_from_state_dict
                or owner._load_state_dict_pre_hooks
                for owner in owners
            )

        return [clean_name(name) for name in further if not name.endswith("_extra_state") and not is_taken(name)]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load by name.

        Raises:
            StateMismatch: names or shapes differ from those saved.
        """
        model, untaken = unwrap(self.model), self.untaken()  # no checkpoint holds those
        own = {clean_name(name): name for name in model.state_dict()}
        try:
            model.load_state_dict({own.get(name, name): state[name] for name in state if name not in untaken})
        except RuntimeError as error:  # torch's message has a line for each parameter
            differences = _shape_differences(self.state_dict(), state)
            if not differences:
                raise
            raise StateMismatch(
                f"The model is not the saved one ({_some(differences)}): build it as it was saved, or "
                "start a run in a new folder."
            ) from error


def with_modes(optimizers: Iterable[Any]) -> list[Any]:
    """The optimizers that have ``train()`` and ``eval()``, such as Schedule-Free's."""
    return [each for each in optimizers if hasattr(each, "train") and hasattr(each, "eval")]


class EvaluatedWeights:
    """The weights for evaluation of an optimizer with ``train()`` and ``eval()``; saved as an average.

    They are computed from the trained weights, so nothing is loaded.

    Attributes:
        optimizers: those with both methods.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Any]) -> None:
        self.model = model
        self.optimizers = with_modes(optimizers)

    def state_dict(self) -> dict[str, Any]:
        trained = [(parameter, parameter.detach().clone()) for _, parameter in named_parameters(self.model)]
        with self.in_place(), torch.no_grad():
            named = unwrap(self.model).named_parameters(remove_duplicate=False)
            weights = {clean_name(name): parameter.detach().clone() for name, parameter in named}
        with torch.no_grad():  # train() restores them only up to rounding
            for parameter, value in trained:
                parameter.copy_(value)
        return {"updates": 0, "weights": weights}

    def load_state_dict(self, state: Any) -> None: ...

    def is_evaluated(self, name: str) -> bool:
        return True

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the model has these weights."""
        for optimizer in self.optimizers:
            optimizer.eval()
        try:
            yield
        finally:
            for optimizer in self.optimizers:
                optimizer.train()


def weights_of(objects: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Tensor]:
    """The parameters and saved buffers of the registered models, by name in a checkpoint.

    Args:
        objects, kinds: of the registry. With several models, each name begins with that of the part.
    """
    models = [name for name in objects if kinds.get(name) == "model"]
    return {
        name if len(models) == 1 else f"{model}.{name}": value.detach()
        for model in models
        for name, value in objects[model].state_dict().items()
        if isinstance(value, Tensor)
    }


def _shape_differences(here: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Descriptions of the names and shapes in which two states of a model differ."""
    shapes = [{name: tuple(getattr(value, "shape", ())) for name, value in state.items()} for state in (here, saved)]
    return [
        f"{name} is {shapes[0].get(name, 'missing')}, saved {shapes[1].get(name, 'without it')}"
        for name in {**shapes[0], **shapes[1]}
        if shapes[0].get(name) != shapes[1].get(name)
    ]


class ParametersState:
    """Parameters outside of the model that its optimizers train.

    Parameters and buffers of the loss function, if that is a module or its method, are named ``loss_fn.<name>``; other
    parameters by their place, ``<optimizer>.<group>.<index>``.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Optimizer], loss_fn: Any = None) -> None:
        self.model, self.optimizers = model, optimizers
        self.is_saved = True
        """False if there were none when the parts of a checkpoint were registered."""
        owner = loss_fn if isinstance(loss_fn, nn.Module) else getattr(loss_fn, "__self__", None)
        self.loss_module = owner if isinstance(owner, nn.Module) and owner is not model else None

    def tensors(self) -> dict[str, Tensor]:
        """The current parameters and buffers by name."""
        model = unwrap(self.model)
        inside = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        found: dict[str, Tensor] = {}
        if self.loss_module is not None:
            saved = unwrap(self.loss_module).state_dict(keep_vars=True)
            found = {f"loss_fn.{clean_name(name)}": value for name, value in saved.items() if id(value) not in inside}
        known = inside | {id(value) for value in found.values()}
        for label, optimizer in self.optimizers.items():
            for group, options in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(options["params"]):
                    if id(parameter) not in known:
                        found[f"{label}.{group}.{index}"] = parameter
                        known.add(id(parameter))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {name: value.detach() for name, value in self.tensors().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load by name, in place.

        Raises:
            StateMismatch: names or shapes differ from those saved.
        """
        own = self.tensors()
        if differences := _shape_differences(own, state):
            raise StateMismatch(
                f"What is trained outside of the model is not what was saved ({_some(differences)}): build the loss "
                f"function and the optimizers as they were, or leave it out with {leave_out('parameters')}."
            )
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(state[name])


class OptimizerState:
    """An optimizer's state keyed by parameter names instead of positions.

    ``built`` describes the optimizer before the run: its class, groups and frozen parameters. The same program resumes
    a run that has changed them (unfreezing): saved groups and frozen parameters are restored. ``other`` has the state
    under keys that are not parameters, ``beside`` the entries of ``state_dict`` beside state and groups, if any.

    Args:
        outside: names the parameters outside of the model.
        part: its name in a checkpoint, for errors.
    """

    def __init__(
        self, optimizer: Optimizer, model: nn.Module, outside: ParametersState | None = None, part: str = "optimizer"
    ) -> None:
        self.optimizer, self.model, self.outside, self.part = optimizer, model, outside, part
        parameters = self.parameters()
        self._kind = type(optimizer).__name__
        self._built_groups, self._built_frozen = self._groups(self.names(parameters)), _frozen(parameters)
        self._made_with_state = bool(optimizer.state)  # Adagrad has state before the first step

    def state_dict(self) -> dict[str, Any]:
        """The state by name.

        Raises:
            StateMismatch: the optimizer's ``state_dict`` has no state or no groups.
        """
        own, parameters = self.optimizer.state, self.parameters()
        names = self.names(parameters)
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        # torch cannot save the state of a parameter that left the groups, but uses it if the parameter returns
        left = {
            parameter: own.pop(parameter)
            for parameter in list(own)
            if isinstance(parameter, Tensor) and id(parameter) not in held
        }
        try:
            state = self.optimizer.state_dict()
        finally:
            own.update(left)
        if missing := [key for key in _STATE_KEYS if key not in state]:
            raise StateMismatch(
                f"The state_dict of {self._kind} has no {missing[0]!r}, by which Update saves an optimizer; it has "
                f"{', '.join(map(str, state))}: add it there, or give Trainer an update function of your own and "
                "register the optimizer with trainer.register(name, optimizer)."
            )
        known = {id(parameter): name for name, parameter in parameters.items()}
        groups = [group | {"params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
        other = {key: value for key, value in state["state"].items() if not isinstance(key, int)}
        beside = {key: value for key, value in state.items() if key not in _STATE_KEYS}
        return {
            "state": {names[key]: value for key, value in state["state"].items() if key not in other}
            | {known[id(parameter)]: value for parameter, value in left.items() if id(parameter) in known},
            "param_groups": groups,
            "frozen": _frozen(parameters),
            "built": {"kind": self._kind, "groups": self._built_groups, "frozen": self._built_frozen},
            **({"other": other} if other else {}),
            **({"beside": beside} if beside else {}),
        }

    def unsaved(self) -> list[str]:
        """Names of trained parameters that no part saves: added during the run, from outside of the model."""
        held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        is_saved = self.outside is not None and self.outside.is_saved
        if is_saved or {*map(id, held)} <= {*map(id, self._own_model().parameters())}:
            return []
        return [name for name in self.names() if name.startswith(("unnamed.", "parameters/"))]

    def reset(self, names: Collection[str]) -> None:
        """Forget the state of these parameters; the next step starts it anew."""
        kind, parameters = type(self.optimizer), self.parameters()
        known = inspect.signature(kind).parameters
        options = {name: value for name, value in self.optimizer.defaults.items() if name in known}
        for parameter in (parameters[name] for name in names if name in parameters):
            if self.optimizer.state.pop(parameter, None) is not None and self._made_with_state:
                self.optimizer.state[parameter] = kind([parameter], **options).state[parameter]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load by name. The saved options apply; a warning names those with which the optimizer was built differently.

        Raises:
            StateMismatch: the groups differ from those saved, or the optimizer is of another kind.
        """
        built, parameters = state["built"], self.parameters()
        if built["kind"] != self._kind:
            raise StateMismatch(
                f"The optimizer is {self._kind} and the saved one was {built['kind']}: build that one, or leave it out "
                f"with {leave_out(self.part)}."
            )
        saved = [group["params"] for group in state["param_groups"]]
        same_program = _names_of(built["groups"]) == _names_of(self._built_groups)
        names = self.names(parameters)
        if [set(group) for group in saved] != [set(group) for group in self._by_group(names)]:
            if not same_program or not all(name in parameters for group in saved for name in group):
                self._refuse_groups(saved, self._by_group(names))
            self._regroup([{name: parameters[name] for name in group} for group in saved])
            names = self.names(parameters)
        if same_program:
            for name in set(parameters) & (set(state["frozen"]) ^ set(built["frozen"])):
                parameters[name].requires_grad_(name not in state["frozen"])
            self._warn_of_options(built["groups"])
            self._built_groups = built["groups"]  # these are now in force
        index_of = {name: index for index, name in enumerate(names)}
        groups = [
            {**group, "params": [index_of[name] for name in own]}
            for group, own in zip(state["param_groups"], self._by_group(names), strict=True)
        ]
        numbered = {index_of[name]: values for name, values in state["state"].items() if name in index_of}
        held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        other, beside = (_copied_to(state.get(key, {}), held[0].device) if held else {} for key in ("other", "beside"))
        defaults = dict(self.optimizer.defaults)
        loaded = {**beside, "state": {**numbered, **other}, "param_groups": groups}
        _load(self.optimizer, loaded)
        self.optimizer.defaults.clear()
        self.optimizer.defaults.update(defaults)  # torch adds an entry, which groups added later would inherit
        restore_types(self.optimizer, loaded)
        for name, values in state["state"].items():
            if name not in index_of and name in parameters:
                self.optimizer.state[parameters[name]] = _copied_to(values, parameters[name].device)

    def parameters(self) -> dict[str, Tensor]:
        """All parameters that the optimizer may hold, by their names in the state."""
        named = self._own_model().named_parameters()
        found: dict[str, Tensor] = {clean_name(name): parameter for name, parameter in named}
        if self.outside is not None:  # names inside a module contain no slash
            found |= {f"parameters/{name}": value for name, value in self.outside.tensors().items()}
        return found

    def names(self, parameters: Mapping[str, Tensor] | None = None) -> list[str]:
        """Parameter names in the order in which the optimizer numbers them.

        Args:
            parameters: the result of :meth:`parameters`, if it was just computed.
        """
        parameters = self.parameters() if parameters is None else parameters
        known = {id(parameter): name for name, parameter in parameters.items()}
        held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [known.get(id(parameter), f"unnamed.{index}") for index, parameter in enumerate(held)]

    def _own_model(self) -> nn.Module:
        model = unwrap(self.model)
        reshard(model)
        return model

    def _by_group(self, names: Iterable[str]) -> list[list[str]]:
        """Split names in the optimizer's order by parameter group."""
        names = iter(names)
        return [[next(names) for _ in group["params"]] for group in self.optimizer.param_groups]

    def _groups(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """The parameter names and the plain options of each group."""
        groups = []
        for group, held in zip(self.optimizer.param_groups, self._by_group(names), strict=True):
            # a torch scheduler changes the rate when it is made
            options = {**group, "lr": group.get("initial_lr", group.get("lr"))}
            plain = {name: options[name] for name in self.optimizer.defaults if _is_literal(options.get(name, group))}
            groups.append(plain | {"params": held})
        return groups

    def _regroup(self, groups: list[dict[str, Tensor]]) -> None:
        own = self.optimizer.param_groups
        named = "param_names" in own[0]  # then torch requires names for all parameters; loading replaces them
        del own[len(groups) :]
        for group, parameters in zip(own, groups, strict=False):
            group["params"][:] = parameters.values()
        for parameters in groups[len(own) :]:
            self.optimizer.add_param_group({"params": [*(parameters.items() if named else parameters.values())]})

    def _refuse_groups(self, saved: list[list[str]], here: list[list[str]]) -> None:
        different = sorted(set().union(*saved) ^ set().union(*here))[:5]
        raise StateMismatch(
            f"The optimizer's {len(here)} parameter groups are not the {len(saved)} saved ones "
            f"(in one only: {different or 'none, they are grouped otherwise'}): build the same groups, "
            f"or leave the optimizer out with {leave_out(self.part)}."
        )

    def _warn_of_options(self, built: list[dict[str, Any]]) -> None:
        said = [
            f"{name} {then[name]} to {now[name]}" + (f" in group {index}" if len(built) > 1 else "")
            for index, (then, now) in enumerate(zip(built, self._built_groups, strict=True))
            for name in then
            if name != "params" and name in now and then[name] != now[name]
        ]
        if said:
            logger.warning(
                "The optimizer was changed (%s): no effect on a resumed run, which restores the saved options; "
                "resume(lr=...), or handlers.Checkpoint.resume.lr in a config, changes the rate.",
                ", ".join(said),
            )


_STATE_KEYS = ("state", "param_groups")
"""The keys in the ``state_dict`` of every torch optimizer."""


def _load(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state; lists and dicts that a wrapper shares with the optimizer inside are still shared afterwards."""
    holders = {
        name: [each for each in (optimizer, *vars(optimizer).values()) if getattr(each, name, None) is value]
        for name, value in (("param_groups", optimizer.param_groups), ("state", optimizer.state))
    }
    before = {name: getattr(optimizer, name) for name in holders}
    optimizer.load_state_dict(dict(state))
    for name, having in holders.items():
        new = next((now for each in having if (now := getattr(each, name)) is not before[name]), before[name])
        for each in having:
            if getattr(each, name) is not new:
                setattr(each, name, new)


def restore_types(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Restore the saved types of an optimizer's tensors, which torch casts to the types of the parameters."""
    _typed(optimizer.state_dict(), state)  # also in the state of a wrapped optimizer
    own, saved = optimizer.state, state.get("state", {})
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(held):  # a parameter's state need not be a mapping
        if parameter in own and index in saved:
            own[parameter] = _typed(own[parameter], saved[index])


def _typed(loaded: Any, saved: Any) -> Any:
    """The loaded value with tensors of the saved types; changed in place where possible."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if isinstance(loaded, MutableMapping) and isinstance(saved, Mapping):
        loaded.update({key: _typed(value, saved[key]) for key, value in loaded.items() if key in saved})
    elif type(loaded) in (list, tuple) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
        values = map(_typed, loaded, saved)
        if isinstance(loaded, tuple):
            return tuple(values)
        loaded[:] = values
    return loaded


def _names_of(groups: Iterable[Mapping[str, Any]]) -> list[set[str]]:
    return [set(group["params"]) for group in groups]


def _copied_to(values: Any, device: torch.device) -> Any:
    """A copy of a state on a device; step counts stay where they are, as in torch."""
    return rebuilt(
        values,
        lambda value: value.to(device if value.dim() else value.device, copy=True) if torch.is_tensor(value) else value,
    )


def _frozen(parameters: Mapping[str, Tensor]) -> list[str]:
    return [name for name, parameter in parameters.items() if not parameter.requires_grad]


def _is_literal(value: Any) -> bool:
    return all(isinstance(leaf, bool | int | float | str | None) for leaf in tree_leaves(value))


def _some(differences: list[str]) -> str:
    more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
    return "; ".join(differences[:3]) + more
