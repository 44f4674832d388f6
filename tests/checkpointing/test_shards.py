"""Which box of a tensor a rank holds, in every layout and size; what cannot be saved is refused."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ignite_engine.checkpointing import CheckpointError, CheckpointStore
from ignite_engine.checkpointing.plain_data import TensorLeaf
from ignite_engine.checkpointing.shards import (
    Piece,
    Region,
    Sharded,
    join,
    local_piece,
    region_of,
    split,
    whole,
)
from tests.kit.sharded import run_phases

MESHES = {"2 x 2": (2, 2), "1 x 2 x 2": (1, 2, 2), "2 x 1 x 2": (2, 1, 2), "4 x 1": (4, 1), "1 x 4": (1, 4)}
SIZES = (1, 2, 3, 5, 6, 7, 9)


def two_layers(size):
    torch.manual_seed(size)
    return nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))


def sharded_in(shape, size):
    """The parameters of a model before and after tensor parallelism and FSDP2, or HSDP, over a mesh."""
    names = ("replicate", "shard", "tensor")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = two_layers(size)
    truth = {name: value.detach().clone() for name, value in model.named_parameters()}
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh[names[:-1]] if len(names) > 2 else mesh["shard"])
    return truth, dict(model.named_parameters())


def regions():
    """Whether what this rank holds is what its region says."""
    wrong = []
    for title, shape in MESHES.items():
        for size in SIZES:
            truth, sharded = sharded_in(shape, size)
            for name, value in sharded.items():
                region = region_of(value)
                assert region is not None
                held = local_piece(value)
                if held.numel() != math.prod(region.shape):
                    wrong.append(f"{title}: {name} of {size} has another size")
                elif held.numel() and not torch.equal(truth[name][region.slices], held):
                    wrong.append(f"{title}: {name} of {size} is elsewhere")
    return wrong


def refused():
    """What cannot be saved: sums that are not made yet, and a tensor that rank 0 has no part of."""
    mesh = init_device_mesh("cpu", (4,))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    unlike = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=torch.Size((16,)), stride=(1,))
    answers = []
    for value in (partial, unlike):
        try:
            split([TensorLeaf("model", ("0.weight",), value)])
        except CheckpointError as error:
            answers.append(str(error))
    return answers


def incomplete(folder):
    """A rank leaves a tensor out that the others hold pieces of."""
    mesh = init_device_mesh("cpu", (4,))
    value = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    state = {"a": value, "b": DTensor.from_local(torch.ones(2), mesh, [Replicate()])}
    if mesh.get_rank() == 2:
        del state["a"]
    try:
        CheckpointStore(folder / "incomplete").save({"model": state}, {}, iteration=1, epoch=1)
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    phases = {"regions": regions, "refused": refused, "incomplete": lambda: incomplete(folder)}
    return run_phases(folder, {name: (4, work) for name, work in phases.items()})


@pytest.mark.distributed
def test_the_region_is_where_the_values_are_in_the_whole(four_ranks):
    """Also of sizes that do not divide: pieces of other sizes, and ranks without any."""
    assert four_ranks["regions"] == [[], [], [], []]


@pytest.mark.distributed
def test_what_cannot_be_saved_is_refused_with_its_name(four_ranks):
    for answers in four_ranks["refused"]:
        assert "model cannot be saved: 0.weight is sharded, and its placements (Partial(sum),) are not" in answers[0]
        assert "0.weight is sharded, and this rank holds (3,) of it where its placements (Shard(dim=0),)" in answers[1]


@pytest.mark.distributed
def test_a_tensor_that_the_ranks_do_not_hold_together_is_not_saved(four_ranks):
    for answer in four_ranks["incomplete"]:
        assert "was not saved" in answer and "the ranks do not hold the whole of model together" in answer


def joined(*regions):
    """A tensor of 4 x 3 whose pieces hold the numbers of these boxes."""
    numbers = torch.arange(12.0).reshape(4, 3)
    pieces = [Piece(region, numbers[region.slices].clone(), lambda: None) for region in regions]
    found = join({"model": [torch.empty(4, 3, device="meta")]}, lambda part, path: pieces)["model"][0]
    assert isinstance(found, Sharded)
    return found


def test_pieces_of_any_grid_make_up_the_whole():
    rows, columns = ((0, 1), (1, 3)), ((0, 2), (2, 1))
    found = joined(*(Region((r, c), (height, width)) for c, width in columns for r, height in rows))
    assert found.shape == (4, 3) and found.is_meta
    assert torch.equal(whole(found), torch.arange(12.0).reshape(4, 3))


@pytest.mark.parametrize(
    ("regions", "problem"),
    [
        ([((0, 0), (3, 3))], "its 1 pieces hold 9 of 12 numbers"),
        ([], "its 0 pieces hold 0 of 12 numbers"),
        ([((0, 0), (4, 3)), ((0, 0), (1, 3))], "its 2 pieces overlap"),
        ([((0, 0), (2, 3)), ((0, 0), (2, 3))], "its 2 pieces overlap"),
        ([((0, 0), (3, 3)), ((2, 0), (1, 3))], "its 2 pieces overlap"),
        ([((0, 0), (2, 3)), ((3, 0), (2, 3))], "its 2 pieces overlap"),
    ],
)
def test_pieces_that_are_missing_or_overlap_are_refused(regions, problem):
    numbers = torch.zeros(8, 3)
    pieces = [Piece(Region(*each), numbers[Region(*each).slices], lambda: None) for each in regions]
    with pytest.raises(ValueError, match=f"model 0 is not whole: {problem}"):
        join({"model": [torch.empty(4, 3, device="meta")]}, lambda part, path: pieces)


def test_values_that_were_not_read_are_never_taken_for_numbers():
    found = joined(Region((0, 0), (4, 3)))
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        torch.zeros(4, 3).copy_(found)


def test_a_file_is_verified_before_its_values_are_read_and_no_other_is():
    verified = []
    numbers = torch.arange(6.0).reshape(3, 2)
    regions = [Region((row, 0), (1, 2)) for row in range(3)]
    pieces = [
        Piece(each, numbers[each.slices], lambda row=row: verified.append(row)) for row, each in enumerate(regions)
    ]
    found = join({"model": [torch.empty(3, 2, device="meta")]}, lambda part, path: pieces)["model"][0]
    from ignite_engine.checkpointing.shards import _read

    assert torch.equal(_read(found, Region((1, 0), (2, 2))), numbers[1:]) and verified == [1, 2]
