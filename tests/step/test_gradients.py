"""Norm and clipping have the bits of torch's, and take the sparse and the sharded gradients that torch refuses."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ignite_engine.step.gradients import clip_gradients, gradient_norm

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.float16)


def parameters(dtypes, scale=1.0, seed=0):
    generator, made = torch.Generator().manual_seed(seed), []
    for index, dtype in enumerate(dtypes):
        parameter = nn.Parameter(torch.zeros(7 + index, 3, dtype=dtype))
        parameter.grad = (torch.randn(7 + index, 3, generator=generator) * scale).to(dtype)
        made.append(parameter)
    return made


@pytest.mark.row("B5")
@pytest.mark.parametrize(
    "dtypes",
    [[torch.float32] * 5, [torch.bfloat16] * 3, DTYPES[:2], DTYPES[:3], DTYPES[::-1], [*DTYPES, *DTYPES]],
    ids=lambda dtypes: "-".join(str(each)[6:] for each in dtypes),
)
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("seed", range(4))
def test_norm_and_clipping_have_the_bits_of_torchs(dtypes, max_norm, seed):
    ours, theirs = parameters(dtypes, seed=seed), parameters(dtypes, seed=seed)
    assert torch.equal(
        gradient_norm([p.grad for p in ours if p.grad is not None]),
        torch.nn.utils.get_total_norm([p.grad for p in theirs if p.grad is not None]),
    )
    norm, expected = clip_gradients(ours, max_norm), nn.utils.clip_grad_norm_(theirs, max_norm)

    assert norm.dtype == expected.dtype and torch.equal(norm, expected)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize(
    ("dtype", "max_norm"), [(torch.float32, 49000.00002), (torch.bfloat16, 0.19540000), (torch.float16, 49.0001)]
)
def test_a_limit_between_two_numbers_of_the_type_has_the_bits_of_torchs(dtype, max_norm):
    def one(share):
        parameter = nn.Parameter(torch.zeros(1, dtype=dtype))
        parameter.grad = torch.tensor([max_norm * share]).to(dtype)
        return parameter

    eps = torch.finfo(dtype).eps
    for step in range(-40, 41):
        mine, other = one(1 + step * eps / 4), one(1 + step * eps / 4)
        clip_gradients([mine], max_norm)
        nn.utils.clip_grad_norm_([other], max_norm)
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_gradients_with_a_graph_are_clipped_without_it(max_norm, is_leaf):
    ours, theirs = parameters([torch.float32] * 2), parameters([torch.float32] * 2)
    for parameter in (*ours, *theirs):
        assert parameter.grad is not None
        parameter.grad.requires_grad_()
        if not is_leaf:
            parameter.grad = parameter.grad * 1.5  # as of backward(create_graph=True)
    norm, expected = clip_gradients(ours, max_norm), nn.utils.clip_grad_norm_(theirs, max_norm)

    assert not norm.requires_grad and torch.equal(norm, expected)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("ulps", [-2, -1, 0, 1, 2])
def test_a_norm_next_to_the_limit_has_the_bits_of_torchs(ulps):
    ours, theirs = parameters([torch.float32] * 3), parameters([torch.float32] * 3)
    limit = gradient_norm([p.grad for p in ours if p.grad is not None])
    for _ in range(abs(ulps)):
        limit = torch.nextafter(limit, torch.tensor(float("inf") * ulps))
    clip_gradients(ours, limit.item())
    nn.utils.clip_grad_norm_(theirs, limit.item())

    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.grad, other.grad)


class Operations(TorchDispatchMode):
    """The operations of torch under it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_plain_gradients_are_multiplied_only_where_they_are_clipped(max_norm):
    made = parameters([torch.float32] * 4)
    with Operations() as operations:
        clip_gradients(made, max_norm)

    factor = ["aten.add", "aten.reciprocal", "aten.mul", "aten.clamp_", "aten._foreach_mul_"]
    norm = ["aten._foreach_norm", "aten.stack", "aten.linalg_vector_norm", "aten._local_scalar_dense"]
    assert operations.names == [*norm, *(factor if max_norm < 1 else [])]


@pytest.mark.parametrize("max_norm", [1e-30, 1e-3, 0.3, 1.0, 7.7])
def test_clipped_gradients_have_the_bits_of_torchs_at_any_norm(max_norm):
    generator = torch.Generator().manual_seed(0)
    for scale in 10 ** torch.empty(200).uniform_(-6, 30, generator=generator):
        ours, theirs = parameters([torch.float32] * 2), parameters([torch.float32] * 2)
        for parameter in (*ours, *theirs):
            parameter.grad = parameter.grad * scale
        clip_gradients(ours, max_norm)
        nn.utils.clip_grad_norm_(theirs, max_norm)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.grad, other.grad)


def test_what_is_below_the_limit_is_not_written_to():
    made = parameters([torch.float32] * 2, scale=1e-3)
    versions = [parameter.grad._version for parameter in made if parameter.grad is not None]
    clip_gradients(made, 1.0)

    assert versions == [parameter.grad._version for parameter in made if parameter.grad is not None]


def test_gradients_that_are_not_finite_are_as_torchs():
    for value in (float("nan"), float("inf")):
        ours, theirs = parameters([torch.float32] * 2), parameters([torch.float32] * 2)
        for each in (ours, theirs):
            each[0].grad[0, 0] = value
        clip_gradients(ours, 1.0)
        nn.utils.clip_grad_norm_(theirs, 1.0)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0, equal_nan=True)


def sparse(rows, dtype=torch.float32):
    embedding = nn.Embedding(6, 2, sparse=True, dtype=dtype)
    (embedding(torch.tensor(rows)) * 3).sum().backward()
    return embedding.weight


def test_a_row_that_is_looked_up_twice_counts_as_one():
    assert gradient_norm([sparse([1, 1]).grad]).item() == pytest.approx((2 * 6.0**2) ** 0.5)


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_sparse_gradients_are_clipped_with_the_dense_ones(max_norm):
    embedding, dense = sparse([4, 4, 1]), parameters([torch.float32])[0]
    whole = nn.Parameter(torch.zeros(6, 2))
    whole.grad = embedding.grad.to_dense()
    beside = copy.deepcopy(dense)
    beside.grad = dense.grad.clone()
    norm, expected = clip_gradients([embedding, dense], max_norm), nn.utils.clip_grad_norm_([whole, beside], max_norm)

    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    assert embedding.grad is not None and embedding.grad.is_sparse
    torch.testing.assert_close(embedding.grad.to_dense(), whole.grad, rtol=1e-6, atol=0)
    torch.testing.assert_close(dense.grad, beside.grad, rtol=1e-6, atol=0)


def test_without_gradients_the_norm_is_zero():
    assert gradient_norm([]).item() == clip_gradients([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0


def test_limit_must_be_positive():
    with pytest.raises(ValueError, match="max_norm must be positive, got -1"):
        clip_gradients([], -1)


@pytest.mark.parametrize("is_split", [True, False])
def test_norm_of_sharded_gradients_is_that_of_the_whole_ones(tmp_path, is_split):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = [Shard(0) if is_split else Replicate()]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = parameters([torch.float32] * 3)
        sharded = []
        for each in whole[:2]:
            parameter = nn.Parameter(distribute_tensor(each.detach(), mesh, placements))
            parameter.grad = distribute_tensor(each.grad.clone(), mesh, placements)
            sharded.append(parameter)
        sharded.append(copy.deepcopy(whole[2]))
        sharded[2].grad = whole[2].grad.clone()
        norm, expected = clip_gradients(sharded, 0.5), nn.utils.clip_grad_norm_(whole, 0.5)

        assert type(norm) is Tensor
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        for mine, other in zip(sharded, whole, strict=True):
            full = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
            torch.testing.assert_close(full, other.grad, rtol=1e-6, atol=1e-8)
    finally:
        dist.destroy_process_group()


def test_norm_is_not_read_from_a_device():
    """Reading a tensor of the ``meta`` device is an error."""
    parameter = nn.Parameter(torch.ones(3, device="meta"))
    parameter.grad = torch.ones(3, device="meta")

    assert clip_gradients([parameter], 1.0).device.type == "meta"
