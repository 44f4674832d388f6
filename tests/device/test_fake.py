"""The fake device finds each of these mistakes each time; a real one does wrong by them now and then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.device import fake

pytestmark = pytest.mark.accelerator
DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
PLAIN = torch.Stream(DEVICE) == torch.accelerator.current_stream(DEVICE) if DEVICE.type != "cpu" else True


@pytest.fixture(autouse=True)
def only_the_fake_one() -> None:
    if not hasattr(torch.ops.fake_device, "counts"):
        pytest.skip("of the fake device")
    fake.counts()


@contextmanager
def race() -> Iterator[None]:
    """The body makes a race; on a device with one stream there can be none."""
    if PLAIN:
        yield
        return
    with pytest.raises(RuntimeError, match="race: stream"):
        yield
    assert fake.counts()["races"] == 1


def current() -> Any:
    return torch.accelerator.current_stream(DEVICE)


def test_a_stream_that_does_not_wait_for_a_copy_is_a_race() -> None:
    side, source = torch.Stream(DEVICE), torch.ones(3).pin_memory()
    with side:
        copied = source.to(DEVICE, non_blocking=True)
    with race():
        copied.add(1)
    current().wait_stream(side)
    assert copied.add(1).tolist() == [2.0, 2.0, 2.0]


def test_a_copy_that_does_not_wait_for_what_it_reads_is_a_race() -> None:
    side, buffer = torch.Stream(DEVICE), torch.empty(3, pin_memory=True)
    made = torch.ones(3, device=DEVICE) + 1
    with race(), side:
        buffer.copy_(made, non_blocking=True)
    side.wait_stream(current())
    with side:
        buffer.copy_(made, non_blocking=True)
    with race():
        made.add_(1)
    current().wait_event(side.record_event())
    made.add_(1)


def test_memory_that_another_stream_uses_is_not_to_be_given_out_again() -> None:
    side = torch.Stream(DEVICE)

    def freed(recorded: bool) -> None:
        with side:
            tensor = torch.ones(3, device=DEVICE)
        current().wait_stream(side)
        tensor.add(1)  # on the current stream, while the next one is made
        if recorded:
            tensor.record_stream(current())
        del tensor
        with side:
            torch.ones(3, device=DEVICE)

    freed(recorded=True)
    with race():
        freed(recorded=False)


def test_the_host_waits_for_what_is_copied_to_it() -> None:
    buffer = torch.zeros(3, pin_memory=True)
    buffer.copy_(torch.ones(3, device=DEVICE), non_blocking=True)
    event = current().record_event()
    assert buffer.isnan().all()
    event.synchronize()
    assert buffer.tolist() == [1.0, 1.0, 1.0]


def test_a_buffer_that_is_changed_too_early_changes_the_copy() -> None:
    buffer = torch.ones(3).pin_memory()
    copied = buffer.to(DEVICE, non_blocking=True)
    buffer.zero_()
    assert copied.tolist() == [0.0, 0.0, 0.0]


def test_a_copy_to_pageable_memory_is_waited_for_except_on_apples() -> None:
    buffer = torch.zeros(3)
    buffer.copy_(torch.ones(3, device=DEVICE), non_blocking=True)
    assert bool(buffer.isnan().all()) is PLAIN


def test_waits_of_the_host_are_counted_and_can_be_forbidden() -> None:
    tensor = torch.ones(3, device=DEVICE)
    fake.counts()
    tensor.sum().item()
    tensor.cpu()
    torch.accelerator.synchronize()
    found = fake.counts()
    assert (found["item"], found["to_host"], found["wait_device"]) == (1, 1, 1)
    fake.set_options(no_waits=1)
    for wait in (lambda: tensor.sum().item(), tensor.cpu, lambda: bool(tensor.any()), torch.accelerator.synchronize):
        with pytest.raises(RuntimeError, match="the host waits"):
            wait()
    tensor.add(1)
    if not PLAIN:  # there each copy is waited for
        with pytest.raises(RuntimeError, match="the host waits"):
            torch.ones(3).to(DEVICE)
    torch.ones(3).to(DEVICE, non_blocking=True)


def test_the_limit_of_its_memory_raises_torchs_error() -> None:
    fake.set_options(limit=torch.accelerator.memory_allocated() + 2048)
    kept = torch.ones(256, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(512, device=DEVICE)
    del kept
    torch.ones(512, device=DEVICE)


def test_its_generators_are_its_own() -> None:
    torch.manual_seed(1)
    host = torch.get_rng_state()
    drawn = torch.rand(3, device=DEVICE)
    assert torch.equal(torch.get_rng_state(), host)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3, device=DEVICE), drawn)
    assert not torch.equal(torch.rand(3, device=DEVICE), drawn)


def test_it_computes_what_the_cpu_does() -> None:
    """But for what torch composes of other operators on such a device (layer norm), or refuses there (convolutions)."""

    def trained(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 8), nn.GELU(), nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # the default is of the device
        inputs, targets = torch.tensor([0, 3, 3, 8], device=device), torch.tensor([0, 1, 1, 0], device=device)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    pairs = zip(trained(DEVICE), trained(torch.device("cpu")), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
