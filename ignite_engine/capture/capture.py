"""Whether an update is captured: when it is tried, what it must agree with, and what it must gain."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from statistics import median
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.optim import Optimizer

from ignite_engine.capture import step as steps
from ignite_engine.capture.gradients import GradientGraphs, Signature, signature_of
from ignite_engine.capture.step import StepGraph
from ignite_engine.errors import one_line
from ignite_engine.events import TrainingEvents
from ignite_engine.step.accumulate import Accumulate, ForwardBackward
from ignite_engine.step.accumulate.forward_backward import listeners_of, means
from ignite_engine.step.device import to_device
from ignite_engine.step.gradients import clip_gradients, gradient_norm
from ignite_engine.step.losses import scalar
from ignite_engine.step.optimizer_step import step
from ignite_engine.step.precision import DTYPES, LossScaler, Precision
from ignite_engine.step.without_trace import without_trace

logger = logging.getLogger(__name__)

CAPTURE_MODES = (False, True, "auto")
_MEASURED = 50
_WARM_UP = 10
_MUST_GAIN = 0.95
"""Largest median of a captured iteration, in those of the plain way, with which ``auto`` keeps the capture."""
_TOLERANCE = {None: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest relative difference of the loss and of each gradient's norm, by the type of autocast."""


class NotCaptured(ValueError):
    """``Update(capture=True)`` and an update that cannot be captured; one line."""


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
        precision: Precision,
        clip_norm: float | None,
        log_grad_norm: bool,
        scaler: LossScaler | None,
        eager_step: bool,
        refusal: str | None,
    ) -> None:
        self._plain, self._forward_backward, self._optimizers = plain, forward_backward, optimizers
        self._required, self._device, self._precision = required, device, precision
        self._clip_norm, self._log_grad_norm, self._eager_step = clip_norm, log_grad_norm, eager_step
        self._scaler = scaler
        self._factors: dict[float, Tensor] = {}
        self._graphs: GradientGraphs | None = None
        self._parameters: list[nn.Parameter] = []
        self._trainable: list[bool] = []
        self._looked_up = False
        self._step: StepGraph | None = None
        self._group_is_captured = False
        self._signatures: list[str] = []
        self._admitted: set[Signature] = set()
        self._trial = _Trial()
        self.decision: bool | None = True if required else None
        """Captured for good, or not; None: not decided."""
        if callable(precision):
            refusal = refusal or "precision is a function"
        if refusal is not None:
            self._refuse(refusal)

    # -- state, see Update.stateful

    @property
    def outside_of_run(self) -> str | None:
        """Why a resumed run may have other bits, for the reproducibility report; None: it has the same."""
        if self.decision is None:
            return "measures whether it is faster, and a resumed run measures again: capture=True or False is exact"
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"decision": self.decision, "signatures": list(self._signatures), "torch": str(torch.__version__)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved, now = state["torch"], str(torch.__version__)
        if state["decision"] and saved != now:
            logger.warning("The run was captured by torch %s and goes on with %s: other bits may follow.", saved, now)
        if self._required and not state["decision"]:
            logger.warning("The run was not captured when it was saved, and is now: it goes on with other bits.")
        if not self._required:
            self.decision = state["decision"]
        self._signatures = list(state["signatures"])

    def run_starts(self) -> None:
        """A run starts: what is trained is looked up again."""
        self._looked_up = False
        self._trial = _Trial()

    # -- the strategy

    def __call__(self, engine: Engine, micro_batches: Sequence[Any], scales: list[float]) -> dict[str, Tensor]:
        self._group_is_captured = False
        if self.decision is None:
            self._decide(engine)
        if not self._wants_capture():
            return self._plain(engine, micro_batches, scales)
        if not all(scales):
            return self._plain(engine, micro_batches, scales)
        state: Any = engine.state
        on_host = self._device.type == "cpu"
        batches = list(micro_batches if on_host else to_device(micro_batches, self._device, state.iteration))
        if not self._fits() and not self._begin(batches[0]):
            return self._plain(engine, micro_batches, scales)
        assert self._graphs is not None
        training = self._forward_backward.model.training
        signatures = [signature_of(batch, training) for batch in batches]
        if not all(map(self._admits, signatures)):
            return self._plain(engine, micro_batches, scales)
        done = state.micro_batches
        try:
            output = self._captured(engine, batches, scales, signatures)
        except FailOnRecompileLimitHit as error:
            if state.micro_batches > done:
                raise
            self._refuse(f"it changes from one iteration to another ({_cause(error)})")
            return self._plain(engine, micro_batches, scales)
        self._group_is_captured = True
        return output

    @property
    def clip_and_step(self) -> Callable[[], Tensor | None] | None:
        """What clips, steps and returns the norm or None, in the place of the plain way; None: that is used."""
        if not self._group_is_captured or self._eager_step or not steps.has_states(self._optimizers.values()):
            return None
        return self._clip_and_step

    def _clip_and_step(self) -> Tensor | None:
        if self._step is None:
            self._step = StepGraph(self._clip_norm, self._log_grad_norm)
        done, norm = self._step(self._optimizers)
        if done:
            return norm
        assert self._graphs is not None
        if self._clip_norm is not None:
            norm = clip_gradients(self._graphs.parameters, self._clip_norm)
        elif self._log_grad_norm:
            norm = gradient_norm(
                [parameter.grad for parameter in self._graphs.parameters if parameter.grad is not None]
            )
        for optimizer in self._optimizers.values():
            step(optimizer)
        return norm

    def _captured(
        self, engine: Engine, batches: Sequence[Any], scales: list[float], signatures: Sequence[Signature]
    ) -> dict[str, Tensor]:
        assert self._graphs is not None
        state: Any = engine.state
        graphs, losses, extras = self._graphs, list[Tensor](), list[Mapping[str, Tensor]]()
        forward_starts, forward_completes, backward_completes = listeners_of(engine)
        for batch, scale, signature in zip(batches, scales, signatures, strict=True):
            if forward_starts:
                engine.fire_event(TrainingEvents.FORWARD_STARTED)
            if forward_completes:  # where one graph has both, the time of both is backward's
                engine.fire_event(TrainingEvents.FORWARD_COMPLETED)
            gradients, loss, extra = graphs(batch, self._factor(scale), signature)
            if not losses:
                for parameter, gradient in zip(graphs.parameters, gradients, strict=True):
                    parameter.grad = gradient
            else:
                for parameter, gradient in zip(graphs.parameters, gradients, strict=True):
                    assert parameter.grad is not None
                    parameter.grad.add_(gradient)
            losses.append(loss)
            if extra:
                extras.append({name: scalar(value) for name, value in extra.items()})
            state.micro_batches += 1
            if backward_completes:
                engine.fire_event(TrainingEvents.BACKWARD_COMPLETED)
        return means(losses, extras, scales)

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

    def _wants_capture(self) -> bool:
        return self.decision is True or (self.decision is None and self._trial.is_captured)

    def _admits(self, signature: Signature) -> bool:
        """Whether a batch like this has a graph, or may have one: few shapes are worth a compilation."""
        if signature in self._admitted:
            return True
        name = str(signature)
        if name in self._signatures:
            self._admitted.add(signature)
            return True
        if len(self._signatures) >= steps.MAX_GRAPHS:
            return False
        self._signatures.append(name)
        self._admitted.add(signature)
        if len(self._signatures) == steps.MAX_GRAPHS:
            logger.info("%d shapes of batches are captured; others are trained on as they are.", steps.MAX_GRAPHS)
        return True

    def _fits(self) -> bool:
        """Whether the graphs are those of what is trained now, which a handler may freeze or replace."""
        if self._graphs is None or [parameter.requires_grad for parameter in self._parameters] != self._trainable:
            return False
        if not self._looked_up:
            parameters = list(self._forward_backward.model.parameters())
            self._looked_up = len(parameters) == len(self._parameters) and all(map(is_, parameters, self._parameters))
        return self._looked_up and self._graphs.loss_fn is self._forward_backward.loss_fn

    def _begin(self, batch: Any) -> bool:
        """Capture the first micro-batch of a process, and compare it with the plain way on the same weights."""
        model, dtype = self._forward_backward.model, DTYPES[str(self._precision)]
        if (why := self._why_not(model)) is not None:
            self._refuse(why)
            return False
        graphs = GradientGraphs(model, self._forward_backward.loss_fn, self._device, dtype)
        scale = torch.ones((), device=self._device)
        expected_loss, expected, draws = graphs.probe(batch, scale)
        began = time.perf_counter()
        logger.info("The update is being compiled, which takes from seconds to minutes.")
        try:
            with without_trace(model):
                for _ in range(2):  # what changes from call to call would be compiled again in each
                    gradients, loss, _ = graphs(batch, scale, signature_of(batch, model.training))
        except Exception as error:  # the plain way has just worked: it is torch.compile's
            self._refuse(_cause(error))
            return False
        if not draws:
            tolerance = _TOLERANCE[dtype]
            pairs = zip([expected_loss, *expected], [loss, *gradients], strict=True)
            if not all(_agree(one, other, tolerance) for one, other in pairs):
                self._refuse(f"the loss or a gradient differs by more than {tolerance:g} from the plain way's")
                return False
        logger.info("The update is captured, compiled in %.1f s.", time.perf_counter() - began)
        self._graphs, self._looked_up = graphs, True
        self._parameters = list(model.parameters())
        self._trainable = [parameter.requires_grad for parameter in self._parameters]
        return True

    def _why_not(self, model: nn.Module) -> str | None:
        held = {id(parameter) for parameter in model.parameters()}
        trained = [
            parameter
            for optimizer in self._optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        if any(id(parameter) not in held for parameter in trained):
            return "an optimizer trains parameters that are not the model's"
        if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in trained):
            return "a parameter has hooks of its gradient"
        if (why := steps.why_not(self._optimizers.values())) is not None and not self._eager_step:
            logger.info("The optimizers' step is not captured: %s.", why)
            self._eager_step = True
        return None

    def _refuse(self, why: str) -> None:
        """Go on the plain way for good.

        Raises:
            NotCaptured: capture is required.
        """
        if self._required:
            raise NotCaptured(
                f"Update(capture=True), but the update cannot be captured: {why.rstrip('.')}. Give capture='auto' to "
                "train such an update the plain way, or capture=False."
            )
        logger.warning("The update is not captured: %s.", why.rstrip("."))
        self.decision = False

    def _decide(self, engine: Engine) -> None:
        """``auto``: measure plain iterations, then captured ones, then keep the faster way."""
        trial = self._trial
        trial.count()
        if trial.ratio is None:
            return
        self.decision = trial.ratio <= _MUST_GAIN
        logger.warning(
            "An iteration takes %.2f of its time when the update is captured: %s.",
            *(trial.ratio, "it stays captured" if self.decision else "it is not captured"),
        )


class _Trial:
    """The durations of iterations, first of plain ones and then of captured ones."""

    def __init__(self) -> None:
        self._durations: tuple[list[float], list[float]] = [], []
        self._phase = 0
        self._seen = 0
        self._last: float | None = None

    @property
    def is_captured(self) -> bool:
        return self._phase == 1

    @property
    def ratio(self) -> float | None:
        """Of the medians, captured to plain; None: not known yet."""
        plain, captured = self._durations
        return None if len(captured) < _MEASURED else median(captured) / median(plain)

    def count(self) -> None:
        """An iteration begins."""
        now = time.perf_counter()
        if self._last is not None:
            self._seen += 1
            if self._seen > _WARM_UP:
                self._durations[self._phase].append(now - self._last)
        self._last = now
        if self._phase == 0 and len(self._durations[0]) >= _MEASURED:
            self._phase, self._seen = 1, 0


def _agree(one: Tensor, other: Tensor, tolerance: float) -> bool:
    one, other = one.float(), other.float()
    return bool((one - other).norm() <= tolerance * one.norm() + 1e-6)


def _cause(error: Exception) -> str:
    """In a line, with the line of the user's code that torch names."""
    text = one_line(error)
    lines = str(error).splitlines()
    if "from user code:" in str(error):
        places = [line.strip() for line in lines if line.lstrip().startswith('File "')]
        if places:
            text = f"{text.rstrip('.')} ({places[-1]})"
    return text
