"""DDP, FSDP2, HSDP, tensor parallel and both train to the weights of one process, with few collectives."""

from dataclasses import replace
from functools import partial
from typing import Any

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from ignite_engine import Trainer, Update, loader
from ignite_engine.ranks import data_size, use_mesh
from ignite_engine.step.gradients import clip_gradients, gradient_norm
from ignite_engine.step.precision import LossScaler
from tests.kit.collectives import Collectives
from tests.ranks.forkserver import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

GLOBAL_BATCH, SAMPLES, CLASSES = 8, 21, 12


class Tokens(Dataset[Any]):
    """Five tokens each, of which 1 to 5 have a class to predict."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, 5, 6, generator=generator)
        self.classes = torch.randint(0, CLASSES, (count, 5), generator=generator)
        lengths = torch.randint(1, 6, (count, 1), generator=generator)
        self.classes[torch.arange(5) >= lengths] = -100

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.classes[index]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, inputs):
        return inputs + self.down(torch.tanh(self.up(self.norm(inputs))))


class Net(nn.Module):
    def __init__(self, classes=CLASSES):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.blocks, self.head = nn.Linear(6, 8), nn.ModuleList([Block(), Block()]), nn.Linear(8, classes)

    def forward(self, inputs):
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def loss_fn(model, batch):
    inputs, classes = batch
    loss = cross_entropy(model(inputs).flatten(0, 1), classes.flatten(), ignore_index=-100)
    return loss, {"twice": 2 * loss.detach()}


def count_tokens(batch):
    return int((batch[1] != -100).sum())


def sharded(model, mesh, policy=MixedPrecisionPolicy()):  # noqa: B008
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32))


def tensor_parallel(model, mesh, *, classes=False):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if classes:
        plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh, {"head": plan})
    return model


def arranged(*shape, names):
    return use_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names))


def ddp(model):
    arranged(4, names=("data",))
    return DistributedDataParallel(model)


def fsdp(model, *policy):
    return sharded(model, arranged(4, names=("data",)), *policy)


def fsdp_in_half(model):
    return fsdp(model, MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))


def fsdp_inside(model):
    """The root is plain: its blocks are FSDP2's, the rest is left to DDP."""
    mesh = arranged(4, names=("data",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    model.embed, model.head = DistributedDataParallel(model.embed), DistributedDataParallel(model.head)
    return model


def hsdp(model):
    return sharded(model, arranged(2, 2, names=("replicate", "shard")))


def tp(model, *, classes=False):
    return tensor_parallel(model, arranged(1, 4, names=("data", "tensor"))["tensor"], classes=classes)


def tp_and_fsdp(model, *, classes=False):
    mesh = arranged(2, 2, names=("dp_shard", "tp"))
    return sharded(tensor_parallel(model, mesh["tp"], classes=classes), mesh["dp_shard"])


def train(wrap, accumulation_steps=2, **options):
    """Two epochs of 21 samples: 3 micro-batches of 8 over all data ranks, so groups of 2 and of 1."""
    model = wrap(Net())
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=0.01))
    update = Update(model, optimizer, loss_fn, weight_fn=count_tokens, **{"clip_norm": 1.0} | options)
    trainer, outputs, counts, counting = Trainer(update, accumulation_steps), [], [], list[Collectives]()

    def note():
        outputs.append({name: value.clone() for name, value in trainer.state.output.items()})
        counting.pop().__exit__(None, None, None)

    def count():
        counting.append(collectives := Collectives())
        counts.append(collectives.counts)
        collectives.__enter__()

    trainer.add_event_handler(Events.ITERATION_STARTED, count)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, note)
    trainer.run(loader(Tokens(SAMPLES), GLOBAL_BATCH // data_size(), shuffle=True, seed=1), max_epochs=2)
    return {"weights": whole(model), "outputs": outputs, "counts": [dict(each) for each in counts]}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole(model):
    return torch.cat([full(each).detach().reshape(-1) for each in model.parameters()])


# -- on four ranks ----------------------------------------------------------------------------------------------------


def static(model):
    arranged(4, names=("data",))
    return DistributedDataParallel(model, static_graph=True)


def by_ignite(model):
    """With options of DDP."""
    arranged(4, names=("data",))
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "broadcast_buffers": False}
    wrapped = idist.auto_model(model, sync_bn=True, bucket_cap_mb=1, **options)
    return wrapped


TRAINED = {
    "ddp": (ddp, {}),
    "fsdp": (fsdp, {}),
    "fsdp inside": (fsdp_inside, {}),
    "hsdp": (hsdp, {}),
    "tp": (tp, {}),
    "tp and fsdp": (tp_and_fsdp, {}),
    "tp, loss_parallel": (partial(tp, classes=True), {"loss_parallel": True}),
    "tp and fsdp, loss_parallel": (partial(tp_and_fsdp, classes=True), {"loss_parallel": True}),
    "auto_model": (by_ignite, {}),
    "ddp, reduced each": (static, {"reduce_each_micro_batch": True}),
    "fsdp, reduced each": (fsdp, {"reduce_each_micro_batch": True}),
}
IN_PRECISION = {
    "ddp bf16": (ddp, {"precision": "bf16"}),
    "ddp fp16": (ddp, {"precision": "fp16"}),
    "fsdp bf16": (fsdp, {"precision": "bf16"}),
    "fsdp fp16": (fsdp, {"precision": "fp16"}),
    "fsdp policy": (fsdp_in_half, {}),
    "tp fp16": (tp, {"precision": "fp16"}),
    "tp and fsdp fp16": (tp_and_fsdp, {"precision": "fp16"}),
}


def clipped(mesh):
    """Gradients that are whole, and sharded in all ways over the mesh and a part of it; one has a row per rank only."""
    torch.manual_seed(5)
    placements = [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()], [Replicate(), Replicate()]]
    wholes = [nn.Parameter(torch.zeros(2 + index, 4)) for index in range(6)]
    mine = [nn.Parameter(torch.zeros(2, 4))]
    for parameter in wholes:
        parameter.grad = torch.randn_like(parameter)
    mine[0].grad = wholes[0].grad.clone()
    for index, parameter in enumerate(wholes[1:]):
        layout, over = (placements[index], mesh) if index < 4 else ([Shard(0)], mesh["tensor"])
        mine.append(nn.Parameter(distribute_tensor(parameter.detach(), over, layout)))
        mine[-1].grad = distribute_tensor(parameter.grad.clone(), over, layout)
    part = DTensor.from_local(torch.full((3, 4), 0.1 * (1 + dist.get_rank())), mesh, [Partial(), Partial()])
    wholes.append(nn.Parameter(torch.zeros(3, 4)))
    mine.append(nn.Parameter(distribute_tensor(torch.zeros(3, 4), mesh, [Replicate(), Replicate()])))
    wholes[-1].grad, mine[-1].grad = torch.ones(3, 4), part
    expected = nn.utils.get_total_norm([each.grad for each in wholes if each.grad is not None])
    with Collectives() as of_sharded:
        gradient_norm([each.grad for each in mine[:-1]])
    norm = clip_gradients(mine, 1.0)
    return {
        "norm": (norm, expected),
        "gradients": [(full(a.grad), b.grad / expected) for a, b in zip(mine, wholes, strict=True)],
        "collectives": dict(of_sharded.counts),
    }


def like_torchs(mesh):
    """The norm here and there, of DTensors of one mesh, and the gradients after both."""
    made = [[], []]
    for each in made:
        torch.manual_seed(6)
        for _ in range(5):
            each.append(nn.Parameter(distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)])))
            each[-1].grad = distribute_tensor(torch.randn(7, 3), mesh, [Shard(0)])
    ours, theirs = clip_gradients(made[0], 0.5), nn.utils.clip_grad_norm_(made[1], 0.5)
    pairs = [(full(a.grad), full(b.grad)) for a, b in zip(*made, strict=True)]
    return ours, full(theirs), pairs


def overflow_on_one_rank(mesh):
    """The verdicts of the scaler where rank 3's shard alone is infinite, and in the next update, where none is."""
    verdicts, scaler = [], LossScaler("cpu", init_scale=2.0)
    for value in (float("inf"), 1.0):
        plain, parameter = (
            nn.Parameter(torch.zeros(2)),
            nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)])),
        )
        plain.grad = torch.ones(2)
        gradient = torch.tensor([value if dist.get_rank() == 3 else 1.0])
        parameter.grad = DTensor.from_local(gradient, mesh, [Shard(0)])
        scaler.scale(torch.ones(()))
        verdicts.append(scaler.unscale_all([torch.optim.SGD([plain, parameter], lr=1.0)]))
        scaler.adjust()
    return verdicts


def raised(work):
    try:
        work()
    except (ValueError, RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def too_few_classes():
    """6 classes on 4 ranks; and whether torch's loss_parallel is off again."""

    def six(model, batch):
        return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten() % 6)

    model = tensor_parallel(Net(6), arranged(4, names=("tensor",)), classes=True)
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), six, loss_parallel=True)
    line = raised(lambda: Trainer(update).run([Tokens(2)[:]]))
    sharded_logits = distribute_tensor(torch.randn(2, 8), init_device_mesh("cpu", (4,)), [Shard(1)])
    return line, raised(lambda: cross_entropy(sharded_logits, torch.tensor([1, 2]))) != "nothing"


def broken_off(wrap):
    """What a run raises whose loss fails in its second micro-batch, what the next run raises, whether it reduces."""
    model, calls = wrap(Net()), [0]

    def failing(model, batch):
        calls[0] += 1
        if calls[0] == 2:
            raise KeyError("second micro-batch")
        return loss_fn(model, batch)

    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), failing)
    trainer, data = Trainer(update, 2), [Tokens(2)[:], Tokens(3)[:]]
    first, second = raised(lambda: trainer.run(data)), raised(lambda: trainer.run(data))
    if second != "nothing":
        return first, second, True
    with Collectives() as collectives:
        loss_fn(model, data[0])[0].backward()
    return first, second, "all_reduce" in collectives.counts


def one_of_four_ranks(rank, folder):
    results = {name: train(wrap, **options) for name, (wrap, options) in TRAINED.items()}
    results |= {name: train(wrap, **options) for name, (wrap, options) in IN_PRECISION.items()}
    square, line = arranged(2, 2, names=("data", "tensor")), arranged(4, names=("shard",))
    results["clipped"], results["like torch's"] = clipped(square), like_torchs(line)
    results["overflow"] = overflow_on_one_rank(line)
    results["too few classes"] = too_few_classes()
    results["broken off"] = {"ddp": broken_off(ddp), "fsdp": broken_off(fsdp)}
    torch.save(results, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrapping")
    on_ranks(4, one_of_four_ranks, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(4)]


@pytest.fixture(scope="module")
def alone():
    return train(lambda model: model)


def of_group(ranks, case, name):
    """What the ranks report for each update, averaged over them, as a logger does."""
    values = [torch.stack([output[name] for output in each[case]["outputs"]]) for each in ranks]
    return torch.stack(values).mean(0)


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINED)
def test_any_wrapping_trains_to_the_weights_of_one_process(ranks, alone, case):
    for each in ranks:
        torch.testing.assert_close(
            each[case]["weights"], alone["weights"], rtol=0, atol=2e-7
        )  # an ulp of a weight above 1 is 1.2e-7
    for name in ("loss", "grad_norm", "twice"):
        expected = torch.stack([output[name] for output in alone["outputs"]])
        assert type(expected) is Tensor
        torch.testing.assert_close(of_group(ranks, case, name), expected, rtol=3e-7, atol=0)


def test_data_parallel_trains_and_is_saved_by_the_names_of_the_plain_model(alone):
    """What auto_model makes of a model on one process with several GPUs; without a GPU it calls the module inside."""
    model = nn.DataParallel(Net())
    update = Update(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_fn, weight_fn=count_tokens, clip_norm=1.0
    )
    Trainer(update, 2).run(loader(Tokens(SAMPLES), GLOBAL_BATCH, shuffle=True, seed=1), max_epochs=2)

    assert torch.equal(whole(model), alone["weights"])
    assert {name: state for name, state, _ in update.stateful()}[
        "model"
    ].state_dict().keys() == Net().state_dict().keys()


@pytest.mark.parametrize("case", IN_PRECISION)
def test_lower_precision_stays_near_to_fp32(ranks, alone, case):
    """Near only: autocast rounds a product of four ranks at other places than that of one."""
    expected = torch.stack([output["loss"] for output in alone["outputs"]])
    torch.testing.assert_close(of_group(ranks, case, "loss"), expected, rtol=0.01, atol=0)
    for each in ranks:
        assert torch.equal(each[case]["weights"], ranks[0][case]["weights"])


def table(text):
    """Collectives of an update of two micro-batches and of one, by case."""
    found = {}
    for line in text.strip().splitlines():
        case, *counts = (cell.strip() for cell in line.split("|"))
        kinds = ("all_reduce", "reduce_scatter", "all_gather")
        both = [{kind: int(n) for kind, n in zip(kinds, cell.split(), strict=True) if n != "0"} for cell in counts]
        found[case] = both[0], both[1]
    return found


# Weights are exchanged beside the step before. DDP has one bucket; where gradients are sharded, one all_reduce clips.
# FSDP2 gathers three modules in forward and two of them again in backward. Tensor parallel reduces the output of two
# blocks and the gradient of their input, a cross-entropy of sharded logits three values and its input's gradient.
PER_UPDATE = table("""
    ddp                        | 1 0 0    | 1 0 0
    ddp bf16                   | 1 0 0    | 1 0 0
    ddp fp16                   | 1 0 0    | 1 0 0
    ddp, reduced each          | 2 0 0    | 1 0 0
    fsdp                       | 1 3 10   | 1 3 5
    fsdp bf16                  | 1 3 10   | 1 3 5
    fsdp fp16                  | 2 3 10   | 2 3 5
    fsdp, reduced each         | 1 6 10   | 1 3 5
    fsdp inside                | 3 2 4    | 3 2 2
    hsdp                       | 4 3 10   | 4 3 5
    tp                         | 9 0 0    | 5 0 0
    tp and fsdp                | 10 3 10   | 6 3 5
    tp, loss_parallel          | 17 0 0    | 9 0 0
    tp and fsdp, loss_parallel | 18 3 10   | 10 3 5
""")


@pytest.mark.row("B2", "B3")
@pytest.mark.parametrize("case", PER_UPDATE)
def test_gradients_are_reduced_once_per_update_and_clipping_is_one_collective(ranks, case):
    for each in ranks:
        *_, two_micro_batches, one = each[case]["counts"]  # in the first updates DDP still exchanges its buckets
        assert (two_micro_batches, one) == PER_UPDATE[case]


@pytest.mark.row("B5")
def test_sharded_and_whole_gradients_are_clipped_by_their_joint_norm(ranks):
    for each in ranks:
        norm, expected = each["clipped"]["norm"]
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        for mine, other in each["clipped"]["gradients"]:
            torch.testing.assert_close(mine, other.float(), rtol=1e-5, atol=1e-7)
        assert each["clipped"]["collectives"] == {"all_reduce": 2}  # one of each mesh
        assert torch.equal(norm, ranks[0]["clipped"]["norm"][0])


def test_sharded_gradients_are_clipped_as_by_torch(ranks):
    for each in ranks:
        norm, expected, pairs = each["like torch's"]
        torch.testing.assert_close(norm, expected, rtol=3e-7, atol=0)
        for mine, other in pairs:
            torch.testing.assert_close(mine, other, rtol=3e-7, atol=0)


def test_overflow_in_one_shard_is_known_to_all_ranks(ranks):
    assert [each["overflow"] for each in ranks] == [[False, True]] * 4


@pytest.mark.row("B8")
def test_class_dimension_that_leaves_a_rank_empty_is_one_line_on_every_rank(ranks):
    for each in ranks:
        line, is_off = each["too few classes"]
        assert line.startswith(
            "ValueError: loss_parallel needs a class on every rank, but 6 classes on 4 ranks leave 1"
        )
        assert is_off and "\n" not in line


@pytest.mark.row("B3")
def test_error_within_a_group_restores_the_reduction(ranks):
    for each in ranks:
        assert each["broken off"]["ddp"] == ("KeyError: 'second micro-batch'", "nothing", True)
        first, second, _ = each["broken off"]["fsdp"]
        assert first == "KeyError: 'second micro-batch'"
        assert second.startswith("RuntimeError: An update of this FSDP2 model raised")
