"""FLOPs are those of the arithmetic written down by hand, and counting them changes no bit."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpt import GPT, Shape, flops_per_token
from ignite_engine import Trainer, Update, Updates, loader
from ignite_engine.handlers import Throughput
from ignite_engine.step.flops import FlopCount, _graphs_compiled, obstacle
from tests.builders import Numbers, linear, mse

SHAPE = Shape(2, 4, 128, 64, 512)


def counted(work: Callable[[], Any]) -> FlopCount:
    count = FlopCount()
    count.start()
    work()
    count.stop()
    return count


@pytest.mark.parametrize("bf16", [False, True])
def test_flops_of_the_gpt_are_those_by_hand_and_its_bits_are_the_same(bf16: bool) -> None:
    def step() -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(0)
        model = GPT(SHAPE, dropout=0.1)
        tokens = torch.randint(SHAPE.vocabulary, (2, SHAPE.context + 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        return [each.grad for each in model.parameters()], torch.get_rng_state()  # type: ignore[misc]  # all have one

    gradients, state = step()
    found: list[Any] = []
    count = counted(lambda: found.extend(step()))

    by_hand = 2 * SHAPE.context * flops_per_token(SHAPE)
    assert count.executed - count.recomputed == pytest.approx(by_hand, rel=0.02)
    # one of the seven products of attention is made twice, which is a part of 12 L T W
    assert count.recomputed == 2 * SHAPE.context * 2 * SHAPE.layers * SHAPE.context * SHAPE.width
    assert count.unknown == set()
    assert all(torch.equal(one, other) for one, other in zip(gradients, found[0], strict=True))
    assert torch.equal(state, found[1])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("channels", "groups"), [((8, 12), 1), ((8, 12), 4), ((8, 8), 8), ((8, 16), 8)])
def test_convolution_with_groups_counts_three_times_its_forward(
    transposed: bool, channels: tuple[int, int], groups: int
) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(*channels, kernel_size=3, groups=groups, stride=2)
    images = torch.randn(5, channels[0], 9, 7, requires_grad=True)
    inputs_or_outputs = images if transposed else layer(images)
    forward = 2 * 5 * inputs_or_outputs[0, 0].numel() * (channels[0] // groups) * channels[1] * 3 * 3

    assert counted(lambda: layer(images)).executed == forward
    assert counted(lambda: layer(images).sum().backward()).executed == 3 * forward
    assert counted(lambda: layer(images.detach()).sum().backward()).executed == 2 * forward


def test_products_of_vectors_and_of_sparse_matrices_count() -> None:
    matrix, vector = torch.randn(6, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    table = torch.eye(6, 5).to_sparse()
    dense = torch.randn(5, 3, requires_grad=True)

    assert counted(lambda: matrix @ vector).executed == 2 * 6 * 4
    assert counted(lambda: (matrix @ vector).sum().backward()).executed == 2 * (2 * 6 * 4)  # the other is element-wise
    assert counted(lambda: torch.addmv(torch.ones(6), matrix, vector)).executed == 2 * 6 * 4
    assert counted(lambda: torch.dot(vector, vector)).executed == 2 * 4
    assert counted(lambda: torch.vdot(vector, vector)).executed == 2 * 4
    for product in (torch.sparse.mm, torch.mm):
        assert counted(lambda product=product: product(table, dense)).executed == 2 * 5 * 3
        assert counted(lambda product=product: product(table, dense).sum().backward()).executed == 2 * (2 * 5 * 3)
    assert counted(lambda: torch.mm(table.to_sparse_csr(), dense.detach())).executed == 2 * 5 * 3
    assert counted(lambda: torch.sparse.mm(table, table.t())).unknown == {"aten._sparse_sparse_matmul"}


def test_attention_with_a_mask_counts_as_without() -> None:
    query = torch.randn(2, 4, 16, 8, requires_grad=True)
    mask = torch.ones(16, 16).tril().bool()
    whole = counted(lambda: scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward())
    masked = counted(lambda: scaled_dot_product_attention(query, query, query, attn_mask=mask).sum().backward())
    assert whole.executed - whole.recomputed == masked.executed - masked.recomputed == 12 * 2 * 4 * 16 * 16 * 8


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_activation_checkpointing_computes_again_is_counted_apart(reentrant: bool) -> None:
    layers, inputs = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
    plain = counted(lambda: layers(inputs).sum().backward())
    saved = counted(lambda: checkpoint(layers, inputs, use_reentrant=reentrant).sum().backward())
    assert (plain.executed, plain.recomputed) == (2 * 3 * 4 * 8 * 8 * 2, 0)
    assert saved.executed - saved.recomputed == plain.executed
    assert saved.recomputed > 0


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: Tensor) -> Tensor:
        context.save_for_backward(inputs)
        return inputs @ inputs

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        (inputs,) = context.saved_tensors
        return gradient @ inputs.T + inputs.T @ gradient


def test_functions_of_ones_own_convolutions_and_sparse_tables_are_counted() -> None:
    square = torch.randn(5, 5, requires_grad=True)
    assert counted(lambda: Squared.apply(square).sum().backward()).executed == 3 * 2 * 5**3  # type: ignore[no-untyped-call]
    image = torch.randn(2, 3, 8, 8)
    assert counted(lambda: nn.Conv2d(3, 4, 3)(image).sum().backward()).executed == 2 * 2 * (2 * 4 * 6 * 6 * 3 * 3 * 3)
    table = nn.Embedding(10, 4, sparse=True)
    assert counted(lambda: table(torch.tensor([1, 2])).sum().backward()).executed == 0


@torch.library.custom_op("ignite_engine_tests::product", mutates_args=())
def product(left: Tensor) -> Tensor:
    return left @ left


def test_operators_without_a_formula_are_named() -> None:
    assert counted(lambda: product(torch.ones(2, 2))).unknown == {"ignite_engine_tests.product"}
    assert "aten.mkldnn_rnn_layer" in counted(lambda: nn.LSTM(8, 8)(torch.randn(3, 2, 8))).unknown


def test_a_batch_without_samples_counts_nothing() -> None:
    assert counted(lambda: linear()(torch.ones(0, 3)).sum().backward()).executed == 0


def test_what_is_compiled_or_shared_is_an_obstacle() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert obstacle(Update(model, optimizer, mse)) is None
    before = _graphs_compiled()
    inside = nn.Sequential(torch.compile(linear()))  # type: ignore[arg-type]  # a module in, a module out
    for update in (
        Update(inside, torch.optim.SGD(inside.parameters(), lr=0.1), mse),
        Updates({"only": Update(model, optimizer, torch.compile(mse))}),
        torch.compile(lambda engine, batch: None),
    ):
        assert "torch.compile is in use" in str(obstacle(update))
    in_place = linear()
    in_place.compile()
    assert "torch.compile is in use" in str(obstacle(Update(in_place, optimizer, mse)))
    assert _graphs_compiled() == before  # each was seen before anything was compiled


@pytest.mark.slow
@pytest.mark.parametrize("compiled_before", [True, False])
def test_a_compiled_function_is_an_obstacle_where_it_is_called(
    compiled_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    double = torch.compile(lambda inputs: inputs * 2, backend="eager")
    inner = torch.compile(lambda inputs: inputs * 3, backend="eager")
    inner(torch.ones(2, 4))  # in this process something is compiled, which no run below calls
    if compiled_before:
        double(torch.ones(2, 4))
    for calls, loss_fn in ((False, mse), (True, lambda model, batch: mse(model, (double(batch[0]), batch[1])))):
        model = linear()
        trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn))
        Throughput(flops=True).attach(trainer, Events.COMPLETED)
        caplog.clear()
        trainer.run(loader(Numbers(8), batch_size=2), max_epochs=1)
        assert ("torch.compile is in use" in caplog.text) == calls
        assert ("throughput/tflops_per_s" in trainer.state.metrics) != calls
    torch._dynamo.utils.counters.clear()


def test_the_parts_of_torch_that_the_count_relies_on_are_there() -> None:
    counter = FlopCounterMode(display=False)
    assert isinstance(counter.flop_registry, dict) and counter.mod_tracker.is_bw is False
    assert callable(importlib.import_module("torch._dynamo.eval_frame")._maybe_set_eval_frame)
    for direction in ("", "_backward"):
        name = f"_scaled_dot_product_flash_attention{direction}"
        assert getattr(torch.ops.aten, name) in counter.flop_registry
        assert str(getattr(torch.ops.aten, name)) == f"aten.{name}"


def test_a_run_that_fails_in_the_counted_iteration_leaves_no_counter_behind() -> None:
    def step(engine: Any, batch: Any) -> None:
        if engine.state.iteration == 2:
            raise ZeroDivisionError

    trainer = Trainer(step)
    Throughput(flops=True).attach(trainer)
    with pytest.raises(ZeroDivisionError):
        trainer.run([torch.ones(1)] * 3)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
