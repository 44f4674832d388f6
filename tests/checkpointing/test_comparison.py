"""What differs between two checkpoints."""

import math

import torch

from ignite_engine.checkpointing.comparison import compare
from ignite_engine.checkpointing.digests import digests, tensor_bytes


def test_each_part_is_compared_leaf_by_leaf():
    data = {"batch": 3, "order": [1, 2]}
    first = {"model": {"a": torch.zeros(2), "b": torch.ones(1), "gone": 1}, "data": data}
    second = {"model": {"a": torch.tensor([0.0, 0.5]), "b": torch.ones(1), "new": 1}, "data": data | {"batch": 4}}
    of_data, model = compare(first, second)
    assert (model.part, model.equal, model.values) == ("model", 1, {"a": 0.5})
    assert (model.only_first, model.only_second) == (["gone"], ["new"])
    assert (of_data.equal, of_data.kinds) == (1, {"batch": "3 -> 4"}) and not of_data.same
    assert str(model) == "1 equal; 1 differ: a by 0.5; 1 only in the first: gone; 1 only in the second: new"
    assert all(part.same for part in compare(first, first))


def test_bits_are_compared_and_not_values():
    (part,) = compare({"x": torch.tensor([0.0, math.nan])}, {"x": torch.tensor([-0.0, math.nan])})
    assert part.values == {"": 0.0}
    (part,) = compare({"x": torch.tensor([math.nan])}, {"x": torch.tensor([math.nan])})
    assert part.same


def test_digests_depend_on_bytes_shape_and_type_but_not_on_strides():
    whole = torch.randn(3, 4)
    assert digests({"a": [whole, 1], "b": (1, 2), "c": {2, 1}}) == digests(
        {"a": [whole.t().contiguous().t(), 1], "b": [1, 2], "c": {1, 2}}
    )
    assert list(digests({"a": [whole, 1], "b": (1, 2)})) == ["a.0", "a.1", "b"]
    assert digests(whole) != digests(whole.reshape(4, 3)) and digests(whole) != digests(whole.double())
    assert torch.equal(tensor_bytes(whole.t()), tensor_bytes(whole.t().contiguous()))
