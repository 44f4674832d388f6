"""Memory for sums of gradients: laid out as autograd lays out gradients, and used again."""

import pytest
import torch
from torch import nn

from ignite_engine.ext.rank_invariant.gradient_buffers import GradientBuffers

PARAMETERS = {
    "scalar": torch.tensor(2.0),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "channels last": torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "with a gap": torch.ones(4, 6)[:, :3],
    "with a dimension of one": torch.ones(4, 1, 3),
    "bf16": torch.ones(5, dtype=torch.bfloat16),
    "empty": torch.ones(0, 3),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_views_have_the_strides_of_gradients(name):
    """A norm over other strides could have other bits."""
    others = [torch.ones(7), torch.ones(3)]
    parameter = PARAMETERS[name].detach().requires_grad_()
    (parameter * 3.0).sum().backward()
    gradient = parameter.grad
    assert gradient is not None

    view = GradientBuffers([others[0], parameter, others[1]], ranks=3).take().views[1]

    assert (view.shape, view.dtype) == (gradient.shape, gradient.dtype)
    if gradient.numel() > 1 and name != "with a dimension of one":  # whose stride is of no consequence
        assert view.stride() == gradient.stride()
    assert torch.equal(view.copy_(gradient), gradient)


def test_views_do_not_overlap_and_chunks_are_equal():
    parameters = [nn.Parameter(torch.ones(size)) for size in (1, 17, 3, 40)] + [torch.ones(3, dtype=torch.bfloat16)]
    buffers = GradientBuffers(parameters, ranks=3)
    taken = buffers.take()
    for number, view in enumerate(taken.views):
        view.fill_(number + 1)

    assert [view.unique().tolist() for view in taken.views] == [[1.0], [2.0], [3.0], [4.0], [5.0]]
    assert [len(flat) for flat in taken.flats] == [3 * bucket.chunk for bucket in buffers.buckets]
    assert [bucket.dtype for bucket in buffers.buckets] == [torch.float32, torch.bfloat16]


def test_large_parameters_are_in_buckets_of_their_own():
    parameters = [torch.ones(2**21 + 1), torch.ones(5), torch.ones(2**20), torch.ones(2**20)]

    assert [bucket.places for bucket in GradientBuffers(parameters, 2).buckets] == [[0], [1, 2], [3]]


def test_memory_is_used_again_and_what_is_absent_adds_nothing():
    parameters = [torch.ones(3), torch.ones(2)]
    buffers = GradientBuffers(parameters, ranks=1)
    first, second = buffers.take(), buffers.take()
    first.views[0].fill_(7.0)
    first.present[0] = 1
    first.fill_absent()
    assert first.views[0].tolist() == [7.0] * 3
    _is_negative_zero(first.views[1])

    buffers.reset()
    taken = [buffers.take(), buffers.take()]
    assert {id(each) for each in taken} == {id(first), id(second)} and not any(any(each.present) for each in taken)
    taken[0].fill_absent()
    _is_negative_zero(taken[0].flats[0])


def _is_negative_zero(values):
    assert values.tolist() == [0.0] * len(values) and values.signbit().all()
