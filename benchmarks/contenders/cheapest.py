"""A hand-written loop optimized for overhead, bit for bit the same computation; nothing is done twice."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.contenders.schedule import lr_factor
from benchmarks.workload import ACCUMULATION, CLIP_NORM, LEARNING_RATE, LOG_EVERY, Workload


def bare(work: Workload) -> None:
    model, optimizer = work.model, work.optimizer
    model.train()
    parameters = list(model.parameters())
    step = optimizer.step
    one = torch.ones(())
    for _ in range(work.epochs):
        for inputs, targets in work.batches:
            loss = cross_entropy(model(inputs), targets)
            loss.backward(one)
            step()
            for parameter in parameters:
                parameter.grad = None


def full(work: Workload, *, shared_casts: bool = True) -> None:
    """``shared_casts=False``: an autocast context for each micro-batch, as the plain loop and ours have."""
    model, optimizer = work.model, work.optimizer
    model.train()
    parameters = list(model.parameters())
    groups = optimizer.param_groups
    share = torch.tensor(1 / ACCUMULATION)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    of_group: Any = autocast if shared_casts else nullcontext()
    of_micro_batch: Any = nullcontext() if shared_casts else autocast
    losses: list[torch.Tensor] = []
    updates = 0
    lr = LEARNING_RATE * lr_factor(0)
    for group in groups:
        group["lr"] = lr
    for _ in range(work.epochs):
        stream = iter(work.batches)
        # the same iterator four times: zip yields groups
        for micro_batches in zip(*[stream] * ACCUMULATION, strict=True):
            with of_group:  # one context: each weight is cast once per step
                for inputs, targets in micro_batches:
                    with of_micro_batch:
                        loss = cross_entropy(model(inputs), targets)
                    loss.backward(share)
                    losses.append(loss.detach())
            clip(parameters)
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None
            updates += 1
            lr = LEARNING_RATE * lr_factor(updates)
            for group in groups:
                group["lr"] = lr
            if len(losses) == LOG_EVERY:
                work.log.append(torch.stack(losses).mean().item())
                losses.clear()


def clip(parameters: list[torch.nn.Parameter]) -> None:
    """``clip_grad_norm_`` without the multiplication where the factor is one."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    # the margin leaves the close cases to the clamp, as in torch; NaN propagates, as in torch
    if not norm.item() + 1e-5 <= CLIP_NORM:
        torch._foreach_mul_(gradients, torch.clamp(CLIP_NORM / (norm + 1e-6), max=1.0))
