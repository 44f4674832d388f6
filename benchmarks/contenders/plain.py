"""The plain loop, the baseline: as it is written by hand, with a mean of the losses for each line of the log."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from benchmarks.contenders.schedule import lr_factor
from benchmarks.workload import ACCUMULATION, CLIP_NORM, LEARNING_RATE, LOG_EVERY, Workload


def bare(work: Workload) -> None:
    model, optimizer = work.model.train(), work.optimizer
    for _ in range(work.epochs):
        for inputs, targets in work.batches:
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


def full(work: Workload) -> None:
    model, optimizer = work.model.train(), work.optimizer
    losses: list[torch.Tensor] = []
    updates = 0
    for _ in range(work.epochs):
        stream = iter(work.batches)
        # the same iterator four times: zip yields groups
        for micro_batches in zip(*[stream] * ACCUMULATION, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * lr_factor(updates)
            for inputs, targets in micro_batches:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = cross_entropy(model(inputs), targets)
                losses.append(loss.detach())
                (loss / ACCUMULATION).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            if len(losses) == LOG_EVERY:
                work.log.append(torch.stack(losses).mean().item())
                losses.clear()
