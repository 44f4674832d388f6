"""64 bits of a tensor see one bit, two exchanged elements and their places."""

import pytest
import torch

from ignite_engine.checkpoint.digests import hashed, hashes


def flip_one_bit(tensor, place):
    with torch.no_grad():
        tensor.view(-1).view(torch.uint8)[place] ^= 1


@pytest.mark.row("I5")
@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(9000),
        torch.randn(40_003, dtype=torch.float64),
        torch.randn(1001).to(torch.bfloat16),
        torch.tensor(2.0),
        torch.arange(7, dtype=torch.uint8),
        torch.randn(9, dtype=torch.complex64),
        torch.randn(8, dtype=torch.complex64).conj(),
        torch.tensor([True, False, True]),
        torch.randn(50)[1:10],  # not where a word begins
        torch.randn(6, 8).t(),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_hash_sees_one_bit_and_is_of_the_values(tensor):
    before = hashed(tensor)
    same = tensor.resolve_conj().contiguous().clone()
    assert torch.equal(hashed(same), before) and before.dtype is torch.int64
    places = same.numel() * same.element_size()
    for place in {0, places // 2, places - 1} if tensor.dtype is not torch.bool else {}:
        flip_one_bit(torch.view_as_real(same) if same.is_complex() else same, place)
        assert not torch.equal(hashed(same), before), place
        flip_one_bit(torch.view_as_real(same) if same.is_complex() else same, place)
    assert torch.equal(hashed(same), before)


@pytest.mark.row("I5")
@pytest.mark.parametrize("count", [3, 100, 8192, 40_000])
def test_hash_sees_two_exchanged_elements(count):
    values = torch.randn(count)
    values[0], values[-1] = 1.0, -1.0  # they differ in one bit
    before = hashed(values)
    for one, other in {(0, 1), (0, count - 1), (count // 2, count - 1)}:
        swapped = values.clone()
        swapped[one], swapped[other] = values[other], values[one]
        assert not torch.equal(hashed(swapped), before), (one, other)


def test_hash_sees_the_place_in_a_row_and_of_a_row():
    seen = set()
    for place in (0, 1, 2, 251, 252, 502, 12_288):  # words of eight bytes, 251 to a row
        words = torch.zeros(16_384, dtype=torch.int64)
        words[place] = 1
        seen.add(int(hashed(words)))
    assert len(seen) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [40, 2000, 200_000])
def test_hash_sees_signs_that_are_the_highest_bits_of_words(count, dtype):
    values = torch.randn(count, dtype=dtype)
    before = hashed(values)
    assert not torch.equal(hashed(-values), before)
    values[1], values[7] = 2.0, -2.0
    before = hashed(values)
    values[1], values[7] = -2.0, 2.0
    assert not torch.equal(hashed(values), before)


def test_hash_of_a_tensor_does_not_depend_on_those_beside_it():
    tensors = [torch.randn(10_000), torch.zeros(0), torch.randn(5), torch.tensor([True])]
    assert torch.equal(hashes(tensors), torch.stack([hashed(tensor) for tensor in tensors]))
    assert len(set(hashes(tensors).tolist())) == 4 and hashes([]).tolist() == []
