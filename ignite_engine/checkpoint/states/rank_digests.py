"""Compares digests of weights and optimizer states over the ranks, which should all be equal."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ignite_engine.checkpoint.digests import hashes
from ignite_engine.checkpoint.states.model_and_optimizer import ModelState, OptimizerState, ParametersState
from ignite_engine.ranks import agreement, mesh
from ignite_engine.ranks.ddp import data_parallel, shared_buffers

logger = logging.getLogger(__name__)


class RankDigests:
    """Compares what rank 0 saves for all ranks, after iterations 1, 2, 4, 8, ... of a run and after the last one.

    It compares 64-bit hashes of the parameters and buffers of shared objects, and of the tensors in their optimizers'
    states; not DTensors, nor buffers that DDP broadcasts. A parameter that nothing reduces differs after the first
    step, or in the optimizer's state only, if the rate is still 0.

    Args:
        objects: the registered objects by name.
        shared: the names of objects whose state rank 0 saves for all ranks.
    """

    def __init__(self, objects: Mapping[str, Any], shared: Collection[str]) -> None:
        self._objects, self._shared = objects, shared
        self._begun = 0
        self._watches = False
        self._first: str | None = None

    def watch(self, engine: Engine, *, boundary: Any) -> None:
        """Compare during the run that starts now.

        Args:
            boundary: the event of step boundaries; the last one compares, too.
        """
        self._begun, self._first = engine.state.iteration, None
        if not self._watches and mesh.data_size() > 1:
            self._watches = True
            engine.add_event_handler(Events.ITERATION_COMPLETED(event_filter=self._is_compared), self._compare)
            engine.add_event_handler(boundary, self._compare_at_end)

    def reasons(self) -> list[str]:
        """Reasons why a resumed run would have other bits."""
        return [] if self._first is None else [f"the ranks have different values of {self._first}: rank 0's are saved"]

    def _is_compared(self, engine: Engine, iteration: int) -> bool:
        done = iteration - self._begun
        return done & (done - 1) == 0

    def _compare_at_end(self, engine: Engine) -> None:
        if engine.state.last:  # type: ignore[attr-defined]  # the Trainer's
            self._compare(engine)

    _compare_at_end.phase = -1  # type: ignore[attr-defined]  # before the save, which reports the result

    def _compare(self, engine: Engine) -> None:
        if self._first is not None or not (found := different_names(self.tensors() | self._moments())):
            return
        self._first = found[0]
        if agreement.rank() == 0:
            logger.warning(
                "After iteration %d the ranks have different values of %s (%d tensors differ), and rank 0's are saved: "
                "wrap the whole model (ignite.distributed.auto_model) with a loss function that has parameters in it, "
                "build it on all ranks from the same seed, and reduce what your own update trains; or "
                "trainer.register() with shared=False what each rank is to have of its own.",
                *(engine.state.iteration, self._first, len(found)),
            )

    def tensors(self) -> dict[str, Tensor]:
        """The weights that are compared, by part and name."""
        found: dict[str, Tensor] = {}
        for label in (label for label in self._objects if label in self._shared):
            obj = self._objects[label]
            model = obj.model if isinstance(obj, ModelState) else obj
            if isinstance(model, nn.Module) or isinstance(obj, ParametersState):
                broadcast = {_id_of(buffer) for ddp in data_parallel(model) for buffer in shared_buffers(ddp)}
                found |= {
                    f"{label}.{name}": value
                    for name, value in obj.state_dict().items()
                    if isinstance(value, Tensor) and _id_of(value) not in broadcast
                }
        return found

    def _moments(self) -> dict[str, Tensor]:
        """The tensors in the optimizers' states, not the numbers, which may differ, as the loss that LBFGS keeps."""
        found: dict[str, Tensor] = {}
        for label in (label for label in self._objects if label in self._shared):
            obj = self._objects[label]
            optimizer = obj.optimizer if isinstance(obj, OptimizerState) else obj
            if isinstance(optimizer, Optimizer):
                held = (parameter for group in optimizer.param_groups for parameter in group["params"])
                named = obj.parameters() if isinstance(obj, OptimizerState) else dict(enumerate(held))
                for name, parameter in named.items():
                    state = optimizer.state.get(parameter)
                    if isinstance(state, Mapping):  # wrapped optimizers may hold anything
                        found |= {f"{label}.{name}.{k}": value for k, value in state.items() if torch.is_tensor(value)}
        return found


def _id_of(tensor: Tensor) -> int:
    """An identity shared by a tensor and its detached copies."""
    return 0 if hasattr(tensor, "to_local") or tensor.is_meta else tensor.data_ptr()


def different_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors whose bits differ between ranks, in order; a collective.

    Sharded tensors, and subclasses with a storage of their own, are not compared.
    """
    compared = {name: value.detach() for name, value in tensors.items() if _is_comparable(value)}
    mine = dict(zip(compared, hashes(list(compared.values())).tolist(), strict=True))
    digest = hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()
    if len(set(agreement.gather_objects(digest))) == 1:
        return []
    everyone = agreement.gather_objects(mine)
    names = dict.fromkeys(name for row in everyone for name in row)
    return [name for name in names if len({row.get(name) for row in everyone}) > 1]


def _is_comparable(tensor: Tensor) -> bool:
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.layout == torch.strided
    return plain and not (is_lazy(tensor) or tensor.is_meta or tensor.is_quantized)
