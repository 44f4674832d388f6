"""DDP, FSDP2, HSDP, tensor parallel and both train to the weights of one process, with few collectives."""

from functools import cache, partial

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from ignite_engine import Trainer, Update, loader
from ignite_engine.ranks import data_size, use_mesh
from tests.kit.collectives import Collectives
from tests.kit.processes import ranks
from tests.kit.sharded import gathered
from tests.kit.tiers import tiered

GLOBAL_BATCH, SAMPLES, CLASSES = 8, 21, 12


class Tokens(Dataset):
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


def sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


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


def fsdp(model):
    return sharded(model, arranged(4, names=("data",)))


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
    trainer, outputs, counts, counting = Trainer(update, accumulation_steps), [], [], []

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


def whole(model):
    return torch.cat([gathered(each).detach().reshape(-1) for each in model.parameters()])


# ------------------------------------------------------------------------------------------------------ on four ranks


def static(model):
    arranged(4, names=("data",))
    return DistributedDataParallel(model, static_graph=True)


def by_ignite(model):
    """With options of DDP."""
    arranged(4, names=("data",))
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "broadcast_buffers": False}
    return idist.auto_model(model, sync_bn=True, bucket_cap_mb=1, **options)


# Collectives of an update of two micro-batches, and of one: all_reduce, reduce_scatter, all_gather. Weights are
# exchanged beside the step before. DDP has one bucket; where gradients are sharded, one all_reduce clips. FSDP2 gathers
# three modules in forward and two of them again in backward. Tensor parallel reduces the output of two blocks and the
# gradient of their input, a cross-entropy of sharded logits three values and its input's gradient.
TRAINED = {
    "ddp": (ddp, {}, (1, 0, 0), (1, 0, 0)),
    "fsdp": (fsdp, {}, (1, 3, 10), (1, 3, 5)),
    "fsdp inside": (fsdp_inside, {}, (3, 2, 4), (3, 2, 2)),
    "hsdp": (hsdp, {}, (4, 3, 10), (4, 3, 5)),
    "tp": (tp, {}, (9, 0, 0), (5, 0, 0)),
    "tp and fsdp": (tp_and_fsdp, {}, (10, 3, 10), (6, 3, 5)),
    "tp, loss_parallel": (partial(tp, classes=True), {"loss_parallel": True}, (17, 0, 0), (9, 0, 0)),
    "both, loss_parallel": (partial(tp_and_fsdp, classes=True), {"loss_parallel": True}, (18, 3, 10), (10, 3, 5)),
    "auto_model": (by_ignite, {}, None, None),
    "ddp, reduced each": (static, {"reduce_each_micro_batch": True}, (2, 0, 0), (1, 0, 0)),
    "fsdp, reduced each": (fsdp, {"reduce_each_micro_batch": True}, (1, 6, 10), (1, 3, 5)),
    # near only: autocast rounds a product of four ranks at other places than that of one
    "ddp fp16": (ddp, {"precision": "fp16"}, (1, 0, 0), (1, 0, 0)),
    "fsdp fp16": (fsdp, {"precision": "fp16"}, (2, 3, 10), (2, 3, 5)),
    "tp and fsdp fp16": (tp_and_fsdp, {"precision": "fp16"}, None, None),
}
QUICK = ("ddp", "fsdp", "hsdp", "tp, loss_parallel", "auto_model", "ddp, reduced each", "fsdp, reduced each")


@cache
def alone():
    return train(lambda model: model)


def assert_outputs_are_near(found, *names, rtol):
    """What the ranks report for each update, averaged over them, as a logger does."""
    for name in names:
        values = [torch.stack([output[name] for output in each["outputs"]]) for each in found]
        expected = torch.stack([output[name] for output in alone()["outputs"]])
        torch.testing.assert_close(torch.stack(values).mean(0), expected, rtol=rtol, atol=0)


def assert_collectives(found, *expected):
    """Of the last updates: in the first ones DDP still exchanges its buckets."""
    kinds = ("all_reduce", "reduce_scatter", "all_gather")
    for each in found if expected[0] else ():
        for count, of_update in zip(each["counts"][-2:], expected, strict=True):
            assert tuple(count.get(kind, 0) for kind in kinds) == of_update and count.keys() <= {*kinds}


@pytest.mark.row("B2", "B3", "B5")
@pytest.mark.parametrize("case", tiered(TRAINED, *QUICK))
def test_any_wrapping_trains_to_the_weights_of_one_process_and_reduces_once_per_update(case):
    wrap, options, of_two, of_one = TRAINED[case]
    found = ranks(4, lambda rank: train(wrap, **options))
    assert_collectives(found, of_two, of_one)
    if "fp16" in case:
        assert all(torch.equal(each["weights"], found[0]["weights"]) for each in found)
        assert_outputs_are_near(found, "loss", rtol=0.01)
        return
    for each in found:  # an ulp of a weight above 1 is 1.2e-7
        torch.testing.assert_close(each["weights"], alone()["weights"], rtol=0, atol=2e-7)
    assert_outputs_are_near(found, "loss", "grad_norm", "twice", rtol=3e-7)


def overflow(rank):
    """Gradients of which one row, on the last rank, is infinite once they are scaled; the next ones are not."""
    model = fully_shard(nn.Linear(1, 4, bias=False), mesh=arranged(4, names=("shard",)))
    rows = [torch.tensor([[1.0, 1.0, 1.0, last]]) for last in (1e36, 1.0)]
    loss_of = lambda model, rows: (model(torch.ones(1, 1)).float() * rows).sum()  # noqa: E731
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=1.0), loss_of, precision="fp16"))
    before, seen = whole(model), []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        seen.append((trainer.state.optimizer_steps, (before - whole(model)).round().int().tolist()))

    trainer.run(rows, max_epochs=1)
    return seen


def test_overflow_in_one_shard_skips_the_step_on_all_ranks():
    assert ranks(4, overflow) == [[(0, [0] * 4), (1, [1] * 4)]] * 4


def raised(work):
    try:
        work()
    except (ValueError, RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def broken_off(wrap):
    """What a run raises whose loss fails in its second micro-batch, what the next run raises, whether it reduces."""
    model, calls = wrap(Net()), []

    def failing(model, batch):
        calls.append(1)
        if len(calls) == 2:
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


@pytest.mark.row("B3")
def test_error_within_a_group_restores_the_reduction():
    for of_ddp, of_fsdp in ranks(4, lambda rank: (broken_off(ddp), broken_off(fsdp))):
        assert of_ddp == ("KeyError: 'second micro-batch'", "nothing", True)
        assert of_fsdp[0] == of_ddp[0] and of_fsdp[1].startswith("RuntimeError: An update of this FSDP2 model raised")
