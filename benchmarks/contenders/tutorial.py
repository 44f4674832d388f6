"""The usual loop of the tutorials, with a scheduler of torch, and a read of each loss."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.contenders.schedule import lr_factor
from benchmarks.workload import ACCUMULATION, CLIP_NORM, LOG_EVERY, Workload


def bare(work: Workload) -> None:
    model, optimizer = work.model, work.optimizer
    model.train()
    for _ in range(work.epochs):
        for inputs, targets in work.batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()


def full(work: Workload) -> None:
    model, optimizer = work.model, work.optimizer
    scheduler = LambdaLR(optimizer, lr_factor)
    model.train()
    micro_batches = 0
    running_loss = 0.0
    for _ in range(work.epochs):
        for inputs, targets in work.batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(model(inputs), targets)
            (loss / ACCUMULATION).backward()
            running_loss += loss.item()
            micro_batches += 1
            if micro_batches % ACCUMULATION == 0:
                clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if micro_batches % LOG_EVERY == 0:
                work.log.append(running_loss / LOG_EVERY)
                running_loss = 0.0
