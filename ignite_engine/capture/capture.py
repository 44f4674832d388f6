"""Whether an update is captured: when it is tried, what it must agree with, and what it must gain."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ignite_engine.capture import over_ranks
from ignite_engine.capture import step as steps
from ignite_engine.capture.compiling import LONGEST_S, Compilations, NotCompiled, cause_of, compiler
from ignite_engine.capture.gradients import GradientGraph, Signature, signature_of, unknown_part
from ignite_engine.capture.step import StepGraph
from ignite_engine.capture.trial import MUST_GAIN, Trial
from ignite_engine.events import TrainingEvents
from ignite_engine.ranks import agreement
from ignite_engine.step.accumulate import Accumulate, ForwardBackward
from ignite_engine.step.accumulate.forward_backward import listeners_of, means
from ignite_engine.step.device import to_device
from ignite_engine.step.gradients import clip_gradients, gradient_norm
from ignite_engine.step.losses import LossFn, scalar
from ignite_engine.step.optimizer_step import step
from ignite_engine.step.parameters import Parameters
from ignite_engine.step.precision import DTYPES, LossScaler, Precision

logger = logging.getLogger(__name__)

CAPTURE_MODES = (False, True, "auto")
_TOLERANCE = {None: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""Largest relative difference, by the type of autocast: see ``GradientGraph.agrees``. Ten of the type's roundings: of
gradients in fp16 four were seen, and a run that is resumed is judged again, on other weights."""


class NotCaptured(ValueError):
    """``Update(capture=True)`` and an update that cannot be captured; one line."""


@dataclass
class _Trained:
    """What the graphs of gradients were made for."""

    model: nn.Module
    loss_fn: LossFn
    parameters: list[nn.Parameter]
    buffers: list[Tensor]
    trainable: list[bool]
    hooks: list[Any]
    """The hooks of the modules."""
    optimized: list[Tensor]
    """The parameters that the optimizers hold."""
    graphs: dict[Signature, GradientGraph] = field(default_factory=dict)

    def is_now(self, other: _Trained) -> bool:
        """Whether graphs made for the other are right for this."""
        return (
            self.model is other.model
            and self.loss_fn is other.loss_fn
            and self.trainable == other.trainable
            and _same(self.parameters, other.parameters)
            and _same(self.buffers, other.buffers)
            and _same(self.hooks, other.hooks)
        )

    @property
    def name(self) -> str:
        """The same in a resumed run."""
        function = getattr(self.loss_fn, "__qualname__", type(self.loss_fn).__name__)
        return function if all(self.trainable) else f"{function}, frozen {zlib.crc32(bytes(self.trainable)):08x}"


class Capture:
    """The gradients of a group, and clip and step, captured; in the place of a strategy of ``Update``.

    Args:
        plain: the strategy that is used where nothing is captured.
        required: ``capture=True``: an update that cannot be captured is an error.

    Raises:
        NotCaptured: it is required, and known to be impossible.
    """

    def __init__(
        self,
        plain: Accumulate,
        forward_backward: ForwardBackward,
        optimizers: Mapping[str, Optimizer],
        *,
        required: bool,
        device: torch.device,
        parameters: Parameters,
        precision: Precision,
        clip_norm: float | None,
        log_grad_norm: bool,
        scaler: LossScaler | None,
        eager_step: bool,
        refusal: str | None,
    ) -> None:
        self._plain, self._forward_backward, self._optimizers = plain, forward_backward, optimizers
        self._required, self._device, self._precision = required, device, precision
        self._parameters = parameters
        self._clip_norm, self._log_grad_norm, self._eager_step = clip_norm, log_grad_norm, eager_step
        self._scaler = scaler
        self._factors: dict[float, Tensor] = {}
        # there is no other way to train by where capture is required, and so nothing to go on with after a time
        self._compilations = Compilations(None if required else LONGEST_S)
        self._trained: list[_Trained] = []
        self._now: _Trained | None = None
        self._looked_up = False
        self._last_hook = 0
        """The id of torch's next hook when the trained parameters were looked up: a hook added later changes it."""
        self._step = StepGraph(clip_norm, log_grad_norm, self._compilations)
        self._group_is_captured = False
        self._averaged: over_ranks.Averaged | None = None
        """Averages the gradients of a model in DDP; ranks decide together, each may give up by itself."""
        self._gave_up = False
        """This rank alone, of a model in DDP."""
        self._trial = Trial()
        self._differs: str | None = None
        self._errors: list[Exception] = []
        """The error that the loss raised when it was called for an example in this group; one at most."""
        self.decision: bool | None = True if required else None
        """Captured for good, or not; None: not decided."""
        if callable(precision):
            refusal = refusal or "precision is a function"
        refusal = refusal or over_ranks.why_not(forward_backward.model)
        self._is_refused = refusal is not None
        if refusal is not None:
            self._refuse(refusal)
        elif isinstance(forward_backward.model, DistributedDataParallel):
            self._averaged = over_ranks.Averaged(forward_backward.model)
            # by a graph on some ranks and without on others, the weights would drift apart
            self._eager_step = True

    # -- state, see Update.stateful

    @property
    def outside_of_run(self) -> str | None:
        """Why a resumed run may have other bits, for the reproducibility report; None: it has the same."""
        if self.decision is None:
            return "measures whether it is faster, and anew if resumed before it knows: True or False is exact"
        return self._differs

    def state_dict(self) -> dict[str, Any]:
        names = list(self._compilations.names)
        return {
            "decision": self.decision,
            "graphs": names,
            "step": not self._eager_step,
            "torch": str(torch.__version__),
            "compiler": compiler() if names else None,
            "gave_up": self._gave_up,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._required and not state["decision"]:
            self._differs = "was not there when the run was saved, which goes on captured"
        elif state["decision"] and self._is_refused:
            self._differs = "was there when the run was saved, which goes on the plain way"
        elif state["decision"] and state["graphs"] and state["compiler"] != compiler():
            self._differs = f"was compiled by {state['compiler']} when the run was saved, and is by {compiler()} now"
        if self._differs is not None:
            logger.warning("The update's capture %s: it goes on with other bits.", self._differs)
        if not self._required and not self._is_refused:
            self.decision, self._gave_up = state["decision"], state["gave_up"]
        self._compilations.names[:] = state["graphs"]
        self._eager_step = self._eager_step or not state["step"]

    @property
    def is_same_on_all_ranks(self) -> bool:
        """Whether its state is: under DDP ranks may have batches of other shapes, and so other graphs."""
        return self._averaged is None

    def run_starts(self) -> None:
        """A run starts: what is trained is looked up again."""
        self._looked_up = False
        self._trial = Trial()

    # -- the strategy

    def __call__(self, engine: Engine, micro_batches: Sequence[Any], scales: list[float]) -> dict[str, Tensor]:
        self._group_is_captured = False
        if self.decision is None:
            self._decide()
        wanted = self.decision or (self.decision is None and self._trial.is_captured)
        if not wanted:
            return self._plain(engine, micro_batches, scales)
        if self._averaged is None:
            return self._group(engine, micro_batches, scales)
        with self._averaged.group():
            return self._group(engine, micro_batches, scales)

    def _group(self, engine: Engine, micro_batches: Sequence[Any], scales: list[float]) -> dict[str, Tensor]:
        if self._gave_up or not all(scales):
            return self._plain(engine, micro_batches, scales)
        if self._device.type == "cpu":
            batches = micro_batches
        else:
            batches = list(to_device(micro_batches, self._device, engine.state.iteration))
        self._errors.clear()
        graphs = self._graphs_of(batches)
        if graphs is None:
            done = self._plain(engine, micro_batches, scales)
            for error in self._errors:  # the plain way has not raised it again
                self._refuse(cause_of(error))
            return done
        self._group_is_captured = True
        state: Any = engine.state
        losses, extras = list[Tensor](), list[Mapping[str, Tensor]]()
        forward_starts, forward_completes, backward_completes = listeners_of(engine)
        for index, (batch, scale, graph) in enumerate(zip(batches, scales, graphs, strict=True)):
            if forward_starts:
                engine.fire_event(TrainingEvents.FORWARD_STARTED)
            if forward_completes:  # where one graph has both, the time of both is backward's
                engine.fire_event(TrainingEvents.FORWARD_COMPLETED)
            factor = self._factor(scale)
            try:
                with torch.no_grad():
                    gradients, loss, extra = graph(batch, factor)
            except FailOnRecompileLimitHit as error:
                self._group_is_captured = False
                self._refuse(f"it changes from one iteration to another ({cause_of(error)})")
                rest = self._plain(engine, micro_batches[index:], scales[index:])
                done = means(losses, extras, scales[:index]) if index else {}
                return {name: value + done[name] if index else value for name, value in rest.items()}
            for parameter, gradient in zip(graph.parameters, gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)
            losses.append(loss)
            if extra:
                extras.append({name: scalar(value) for name, value in extra.items()})
            state.micro_batches += 1
            if backward_completes:
                engine.fire_event(TrainingEvents.BACKWARD_COMPLETED)
        return means(losses, extras, scales)

    @property
    def clip_and_step(self) -> Callable[[], Tensor | None] | None:
        """What clips, steps and returns the norm or None, in the place of the plain way; None: that is used."""
        return self._clip_and_step if self._group_is_captured and not self._eager_step else None

    def _clip_and_step(self) -> Tensor | None:
        try:
            done, norm = self._step(self._optimizers)
            if done:
                return norm
        except (NotCompiled, FailOnRecompileLimitHit) as error:
            logger.warning("The optimizers' step is no longer captured: %s.", cause_of(error).rstrip("."))
            self._eager_step = True
        norm = None
        parameters = self._parameters.in_order_of(self._forward_backward.model)
        if self._clip_norm is not None:
            norm = clip_gradients(parameters, self._clip_norm)
        elif self._log_grad_norm:
            norm = gradient_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        for optimizer in self._optimizers.values():
            step(optimizer)
        return norm

    def _factor(self, scale: float) -> Tensor:
        """What the loss is multiplied by: in fp16 by the loss scale, too."""
        if self._scaler is not None:
            return self._scaler.scale(torch.ones((), device=self._device)) * scale
        factor = self._factors.get(scale)
        if factor is None:
            if len(self._factors) > 64:
                self._factors.clear()
            factor = self._factors[scale] = torch.full((), scale, device=self._device)
        return factor

    # -- what may be captured

    def _graphs_of(self, batches: Sequence[Any]) -> list[GradientGraph] | None:
        """A graph for each micro-batch, compiled where it is the first of its kind; None: the plain way it is."""
        trained = self._now if self._fits() else self._begin()
        if trained is None:
            return None
        training, found = trained.model.training, list[GradientGraph]()
        for batch in batches:
            signature = signature_of(batch, training)
            graph = trained.graphs.get(signature)
            if graph is None:
                graph = self._compile(trained, signature, batch)
                if graph is None:
                    return None
            found.append(graph)
        return found

    def _fits(self) -> bool:
        """Whether what is trained is what it was, of which a handler may freeze, replace or add something."""
        now = self._now
        if now is None or not self._looked_up:
            return False
        if now.loss_fn is not self._forward_backward.loss_fn or now.model is not self._model():
            return False
        if RemovableHandle.next_id != self._last_hook or (now.hooks and not _same(now.hooks, _hooks_of(now.model))):
            return False
        trainable = [parameter.requires_grad for parameter in now.parameters]
        return trainable == now.trainable and _same(now.optimized, self._optimized())

    def _model(self) -> nn.Module:
        """What the graphs are of: not DDP, but what is in it."""
        model = self._forward_backward.model
        return model if self._averaged is None else model.module  # type: ignore[return-value]

    def _optimized(self) -> list[Tensor]:
        groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    def _begin(self) -> _Trained | None:
        """Find the graphs of what is trained from now on; None: it cannot be captured."""
        model, loss_fn = self._model(), self._forward_backward.loss_fn
        parameters, buffers = list(model.parameters()), list(model.buffers())
        trainable = [parameter.requires_grad for parameter in parameters]
        now = _Trained(model, loss_fn, parameters, buffers, trainable, _hooks_of(model), self._optimized())
        if (why := self._why_not(now)) is not None:
            self._refuse(why)
            return None
        known = next((trained for trained in self._trained if trained.is_now(now)), None)
        if known is None:
            known = now
            if any(trained.name == now.name and trained.graphs for trained in self._trained):
                self._differs = f"has graphs of two things that go by one name ({now.name}), of which one may be left"
            self._trained = [*(trained for trained in self._trained if trained.graphs), now]
        known.optimized, self._now, self._looked_up = now.optimized, known, True
        self._last_hook = RemovableHandle.next_id
        return known

    def _compile(self, trained: _Trained, signature: Signature, batch: Any) -> GradientGraph | None:
        """Compile the gradients of a batch like this, and compare them with the plain way's on the same weights."""
        if (kind := unknown_part(batch)) is not None:
            self._refuse(f"a batch has a {kind}, in which torch finds no tensors: a dict, list or named tuple is known")
            return None
        kept = 0 if self._eager_step or self._step.is_named else 1
        if not self._compilations.admits(f"{signature} of {trained.name}", kept=kept):
            return None
        dtype = DTYPES[str(self._precision)]
        try:
            graph = GradientGraph(trained.model, trained.loss_fn, self._device, dtype, batch)
        except Exception as error:  # the plain way raises it again, and says of what micro-batch
            self._errors.append(error)
            return None
        try:
            agrees = self._compilations.compile(lambda: graph.agrees(batch, _TOLERANCE[dtype]))
        except NotCompiled as error:
            self._refuse(str(error))
            return None
        if not agrees:
            self._refuse(
                f"the loss, a gradient or a buffer differs by more than {_TOLERANCE[dtype]:g} from the plain way's"
            )
            return None
        trained.graphs[signature] = graph
        return graph

    def _why_not(self, trained: _Trained) -> str | None:
        held = set(map(id, trained.parameters))
        if any(id(parameter) not in held for parameter in trained.optimized):
            return "an optimizer trains parameters that are not the model's"
        if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in trained.optimized):
            return "a parameter has hooks of its gradient"
        if self._averaged is not None and _own_hooks(self._forward_backward.model):
            return "DDP has hooks of its forward or backward"
        if not self._eager_step and (why := steps.why_not(self._optimizers.values())) is not None:
            logger.info("The optimizers' step is not captured: %s.", why)
            self._eager_step = True
        return None

    def _refuse(self, why: str) -> None:
        """Go on the plain way for good; under DDP on this rank.

        Raises:
            NotCaptured: capture is required.
        """
        if self._required:
            raise NotCaptured(
                f"Update(capture=True), but the update cannot be captured: {why.rstrip('.')}. Give capture='auto' to "
                "train such an update the plain way, or capture=False."
            )
        logger.warning("The update is not captured: %s.", why.rstrip("."))
        if self._averaged is None:
            self._decide_for(False)
        else:
            self._gave_up = True
            self._forget_graphs()

    def _decide(self) -> None:
        """``auto``: measure plain iterations, then captured ones, then keep the faster way."""
        trial = self._trial
        trial.count()
        ratio = trial.ratio
        if ratio is None:
            return
        if self._averaged is not None:  # in the same iteration on every rank
            ratio = max(row[0] for row in agreement.gather_floats([math.inf if self._gave_up else ratio]))
        self._decide_for(ratio <= MUST_GAIN)
        if ratio < math.inf:
            logger.warning(
                "An iteration takes %.2f of its time when the update is captured: %s.",
                *(ratio, "it stays captured" if self.decision else "it is not captured"),
            )

    def _decide_for(self, captured: bool) -> None:
        self.decision = captured
        if not captured:
            self._forget_graphs()

    def _forget_graphs(self) -> None:
        """They hold memory."""
        self._trained, self._now = [], None


def _hooks_of(model: nn.Module) -> list[Any]:
    return [hook for module in model.modules() for hook in _own_hooks(module)]


def _own_hooks(module: nn.Module) -> list[Any]:
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return [hook for hooks in kinds for hook in hooks.values()]


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
