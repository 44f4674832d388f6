"""What Throughput writes of FLOPs: those of the arithmetic by hand, over the time of the iterations."""

import logging
import sys

import pytest
import torch
from ignite.engine import Events
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode

from benchmarks.gpt import GPT, Shape, flops_per_token
from ignite_engine import Trainer, Update, Updates
from ignite_engine.engine.bus import handlers_of
from ignite_engine.events import TrainingEvents
from ignite_engine.handlers import Throughput
from ignite_engine.handlers.throughput import _obstacle
from ignite_engine.ranks.mesh import use_mesh
from tests.kit.tiny import linear, mse, on_two_ranks, weights


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Other tests of this process may have."""
    if (module := sys.modules.get("torch._dynamo.utils")) is not None:
        module.counters.clear()


SHAPE = Shape(2, 4, 128, 64, 512)
LINEAR_FLOPS = 2 * (2 * 3 * 4 + 3 * 4 * 1)  # of a sample in builders.linear(): its inputs need no gradient


@pytest.fixture(autouse=True)
def _no_counter_is_left():
    yield
    assert _get_current_dispatch_mode() is None


def gpt_trainer():
    torch.manual_seed(0)
    model = GPT(SHAPE, dropout=0.1)

    def loss_fn(model, batch):
        loss = model(batch[:, :-1], batch[:, 1:])
        return loss

    return Trainer(Update(model, torch.optim.AdamW(model.parameters()), loss_fn, precision="bf16"), 2)


def count_tokens(batch):
    return batch[:, 1:].numel()


def gpt_batches():
    generator = torch.Generator().manual_seed(1)
    sizes = (2, 2, 1, 2, 2)  # the counted iteration has other micro-batches than the others
    return [torch.randint(SHAPE.vocabulary, (size, SHAPE.context + 1), generator=generator) for size in sizes]


@pytest.mark.slow
def test_mfu_of_the_gpt_is_that_by_hand_and_no_bit_of_the_run_is_another():
    bare = gpt_trainer()
    bare.run(gpt_batches(), max_epochs=2)
    trainer = gpt_trainer()
    Throughput(count_tokens, flops=True, peak_flops=1e12).attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run(gpt_batches(), max_epochs=2)

    metrics = trainer.state.metrics
    by_hand = metrics["throughput/tokens_per_s"] * flops_per_token(SHAPE)  # the counter leaves out attention on a CPU
    assert 0.7 * by_hand < 1e12 * metrics["throughput/tflops_per_s"] < 1.02 * by_hand
    assert metrics["throughput/mfu"] == pytest.approx(metrics["throughput/tflops_per_s"])
    assert torch.equal(weights(trainer), weights(bare))


def numbers(count):
    return [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(count)]


def test_only_one_iteration_is_counted_and_then_nothing_listens(caplog):
    model = linear()
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse))
    Throughput(flops=True).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    with caplog.at_level(logging.INFO, "ignite_engine.handlers.throughput"):
        trainer.run(numbers(6))
    metrics = trainer.state.metrics
    rate = metrics["throughput/samples_per_s"] * LINEAR_FLOPS / 1e12
    assert metrics["throughput/tflops_per_s"] == pytest.approx(rate, rel=1e-9)
    assert "throughput/mfu" not in metrics
    (line,) = [each.getMessage() for each in caplog.records if "GFLOP" in each.getMessage()]
    assert line.endswith("GFLOP for a sample.")
    bare = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse))
    Throughput().attach(bare, Events.ITERATION_COMPLETED(every=2))
    for event in (Events.ITERATION_STARTED, TrainingEvents.OPTIMIZER_STEP_STARTED, TrainingEvents.BACKWARD_COMPLETED):
        assert len(handlers_of(trainer, event)) == len(handlers_of(bare, event))


@pytest.mark.slow
def test_ones_own_function_gives_the_flops_where_they_cannot_be_counted(caplog):
    def trained(**options):
        model = linear()
        trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.compile(mse)))
        Throughput(**options, peak_flops=1e9).attach(trainer, Events.EPOCH_COMPLETED)
        trainer.run(numbers(3))
        return trainer.state.metrics

    assert not {"throughput/tflops_per_s", "throughput/mfu"} & set(trained(flops=True))
    assert "FLOPs are not counted: torch.compile is in use" in caplog.text
    metrics = trained(flops=lambda batch: 7.0 * len(batch[0]))
    assert metrics["throughput/mfu"] == pytest.approx(7 * metrics["throughput/samples_per_s"] / 1e9)


def test_an_update_of_ones_own_and_several_in_turn_are_counted():
    def rate_of(update):
        trainer = Trainer(update)
        Throughput(flops=True).attach(trainer, Events.EPOCH_COMPLETED)
        trainer.run(numbers(3))
        metrics = trainer.state.metrics
        return 1e12 * metrics["throughput/tflops_per_s"] / metrics["throughput/samples_per_s"]

    model = linear()

    def by_hand(engine, batch):
        mse(model, batch).backward()

    both = Updates({name: Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse) for name in ("one", "other")})
    assert rate_of(by_hand) == pytest.approx(LINEAR_FLOPS)
    assert rate_of(both) == pytest.approx(2 * LINEAR_FLOPS)


def test_iterations_that_are_skipped_are_not_the_counted_one():
    model = linear()
    trainer = Trainer(
        Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, weight_fn=lambda batch: float(len(batch[0])))
    )
    Throughput(flops=True).attach(trainer, Events.EPOCH_COMPLETED)
    empty = (torch.ones(0, 3), torch.ones(0, 1))
    trainer.run([*numbers(1), empty, *numbers(2)])
    metrics = trainer.state.metrics
    assert 1e12 * metrics["throughput/tflops_per_s"] == pytest.approx(
        LINEAR_FLOPS * metrics["throughput/samples_per_s"]
    )


def test_a_run_that_is_paused_or_fails_in_the_counted_iteration_counts_in_a_later_one():
    fails = [True]

    def loss_fn(model, batch):
        if trainer.state.iteration == 3 and fails.pop(0):
            raise ZeroDivisionError
        return mse(model, batch)

    model = linear()
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn))
    Throughput(flops=True).attach(trainer, Events.EPOCH_COMPLETED)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), trainer.interrupt)
    trainer.run(numbers(6))
    assert (trainer.state.iteration, _get_current_dispatch_mode()) == (2, None)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers(6))
    assert _get_current_dispatch_mode() is None
    fails.append(False)
    for _ in range(2):  # it is paused again
        trainer.run(numbers(6))
    metrics = trainer.state.metrics
    assert 1e12 * metrics["throughput/tflops_per_s"] == pytest.approx(
        LINEAR_FLOPS * metrics["throughput/samples_per_s"]
    )


def test_a_run_within_a_run_counts_for_itself():
    def made():
        model = linear()
        trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse))
        Throughput(flops=True).attach(trainer, Events.EPOCH_COMPLETED)
        return trainer

    outer, inner = made(), made()
    outer.add_event_handler(Events.ITERATION_COMPLETED, lambda: inner.run(numbers(3), max_epochs=inner.state.epoch + 1))
    outer.run(numbers(4))
    for trainer in (outer, inner):
        metrics = trainer.state.metrics
        assert 1e12 * metrics["throughput/tflops_per_s"] == pytest.approx(
            LINEAR_FLOPS * metrics["throughput/samples_per_s"]
        )


@pytest.mark.parametrize("peak", [0, -1.0, "989e12", True])
def test_a_peak_that_is_none_is_refused(peak):
    with pytest.raises(ValueError, match="peak_flops must be the FLOP/s of one device, above 0"):
        Throughput(peak_flops=peak)


def _cases(rank):
    found = {}
    for name in ("ddp", "fsdp"):
        values = []
        for flops in (False, True):
            inner = linear()
            model = DistributedDataParallel(inner) if name == "ddp" else fully_shard(inner)
            trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse), 2)
            Throughput(flops=flops, peak_flops=1e9).attach(trainer, Events.EPOCH_COMPLETED)
            torch.manual_seed(rank)
            trainer.run([(torch.randn(4 + rank, 3), torch.randn(4 + rank, 1)) for _ in range(8)])
            whole = [getattr(each, "full_tensor", lambda each=each: each)().detach() for each in model.parameters()]
            values.append((dict(trainer.state.metrics), [each.tolist() for each in whole]))
        metrics = values[1][0]
        found[f"{name} bits"] = values[0][1] == values[1][1]
        found[name] = [
            1e12 * metrics["throughput/tflops_per_s"] / metrics["throughput/samples_per_s"],
            1e9 * metrics["throughput/mfu"] / metrics["throughput/samples_per_s"],
        ]
    use_mesh(init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor")))
    found["sharing"] = str(_obstacle())
    use_mesh(None)
    return found


@pytest.mark.distributed
def test_on_two_ranks_flops_are_summed_and_the_peak_is_that_of_both(tmp_path):
    found = on_two_ranks(_cases, tmp_path / "store")
    assert all("ranks share a model" in why for why in found["sharing"])
    assert found["ddp bits"] == found["fsdp bits"] == [True, True]
    for name in ("ddp", "fsdp"):
        for rank in range(2):
            assert found[name][rank] == pytest.approx([LINEAR_FLOPS, LINEAR_FLOPS / 2]), name
