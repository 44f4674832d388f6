"""A run on a device: the CPU's bits, no wait of the host, saved and resumed exactly, whichever the device is."""

import copy
import json
from functools import partial

import pytest
import torch
from ignite.engine import Events
from torch import Tensor

from ignite_engine import Trainer, Update, create_evaluator, rng
from ignite_engine.checkpointing import CheckpointStore, Snapshot
from ignite_engine.handlers import Checkpoint, Evaluation, MemoryLogger, MetricLogger, Profiler, StepTimes
from ignite_engine.handlers.meters import CHUNK, Meter
from ignite_engine.step.device import to_device
from tests.device import fake
from tests.device.training import DEVICE, SECOND, Split, bits, data, net, run_saved, same, trainer_of
from tests.kit.tiny import mse

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),  # the fake device's mse_loss
]
CPU = torch.device("cpu")
is_fake = hasattr(torch.ops.fake_device, "counts")


def forbid_waits(forbidden):
    """Of the host for the device."""
    if is_fake:
        fake.set_options(no_waits=int(forbidden))
    elif DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error" if forbidden else "default")
    else:
        pytest.skip(f"{fake.ONLY} and of CUDA: they say who waits")


@pytest.mark.row("N1")
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"log_grad_norm": True}], ids=str)
def test_weights_are_those_of_the_cpu(options):
    found = []
    for device in (DEVICE, CPU, SECOND):
        model = net(device)
        trainer_of(model, **options).run(data(pinned=device is not CPU), max_epochs=2)
        found.append(bits(model))
    assert same(found[0], found[2])
    assert same(found[0], found[1]) or not is_fake, "the fake device computes with the CPU's kernels"


@pytest.mark.row("N1")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"log_grad_norm": True}], ids=str)
def test_host_waits_for_nothing_between_log_points(precision, options):
    trainer = trainer_of(net(DEVICE, dropout=0.1), precision=precision, **options)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: forbid_waits(True))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=9), lambda: forbid_waits(False))
    reached = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=5), lambda: reached.append(trainer.state.iteration))
    trainer.run(data(), max_epochs=2)
    assert reached == [5, 10]


def test_host_waits_for_nothing_where_a_long_interval_is_added_up(tmp_path):
    iterations = 2 * CHUNK + 2  # values are added up twice before they are logged
    trainer = trainer_of(net(DEVICE), steps=None, log_grad_norm=True)
    MetricLogger(tmp_path, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=iterations))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: forbid_waits(True))
    trainer.add_event_handler(Events.ITERATION_STARTED(once=iterations), lambda: forbid_waits(False))
    trainer.run(data(), max_iters=iterations)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_read_in_the_update_would_be_seen():
    def reads(model, batch):
        loss = mse(model, batch)
        loss.item()
        return loss

    trainer = trainer_of(net(DEVICE), loss_fn=reads)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: forbid_waits(True))
    with pytest.raises(RuntimeError, match=r"the host waits|synchronizing CUDA operation"):
        trainer.run(data(), max_epochs=1)
    forbid_waits(False)


def test_batches_are_copied_while_the_one_before_is_computed():
    batches = [(torch.full((4, 3), float(number)), torch.zeros(4, 1)) for number in range(6)]
    pinned = [tuple(tensor.pin_memory() for tensor in batch) for batch in batches]
    if is_fake:
        fake.counts()
    found = []
    for moved in to_device(pinned, SECOND):
        found.append(moved[0] * 2)
        del moved  # its memory is free for the next copy
    later = fake.counts().get("to_device_later", 0) if is_fake else 12
    assert later == 12
    for number, tensor in enumerate(found):
        assert tensor.device == SECOND and tensor.cpu().eq(2.0 * number).all()


class Moves:
    """A batch that moves itself."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device, *, non_blocking):
        return Moves(self.tensor.to(device, non_blocking=non_blocking))


def test_what_moves_itself_has_its_memory_until_it_is_computed_with():
    tensors = [torch.full((4, 3), float(number)) for number in range(6)]
    found = []
    for moved in to_device([Moves(tensor.pin_memory()) for tensor in tensors], SECOND):
        found.append(moved.tensor * 2)
        del moved  # its memory is free for the next copy
    for number, tensor in enumerate(found):
        assert tensor.device == SECOND and tensor.cpu().eq(2.0 * number).all()


def test_what_is_on_the_device_already_is_taken_as_it_is():
    made = [torch.ones(3, device=DEVICE) * number for number in range(4)]
    moved = [tensor + 1 for tensor in to_device(made, DEVICE)]
    assert [tensor.tolist() for tensor in moved] == [[number + 1.0] * 3 for number in range(4)]


@pytest.mark.parametrize("where", ["first", "second", "split"])
def test_background_saves_hold_the_state_of_their_iteration(where, tmp_path):
    def saved(background):
        torch.manual_seed(3)
        first, second = (
            (DEVICE, SECOND) if where == "split" else (SECOND, SECOND) if where == "second" else (DEVICE,) * 2
        )
        folder = tmp_path / str(background)
        run_saved(Split(first, second), folder, 8, background=background)
        store = CheckpointStore(folder)
        return {info.iteration: store.load(info.path).shared for info in store.checkpoints()}

    beside, waited = saved(True), saved(False)
    assert sorted(beside) == sorted(waited) == list(range(1, 9))
    for iteration in waited:
        assert_same(beside[iteration]["model"], waited[iteration]["model"])
        assert_same(beside[iteration]["optimizer"], waited[iteration]["optimizer"])


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


@pytest.mark.parametrize("device", [DEVICE, SECOND], ids=["first", "second"])
def test_resumed_at_every_iteration_with_dropout_to_the_same_bits(device, tmp_path):
    whole = run_saved(net(device, dropout=0.5), tmp_path / "whole", 7)
    for stop in range(1, 7):
        run_saved(net(device, dropout=0.5), tmp_path / str(stop), stop)
        torch.manual_seed(stop)  # another process draws other numbers
        assert same(run_saved(net(device, dropout=0.5), tmp_path / str(stop), 7), whole), stop


def test_what_an_evaluation_draws_on_the_device_changes_nothing():
    def trained(every):
        model = net(DEVICE, dropout=0.5)
        trainer = trainer_of(model)

        def predict(model, batch):
            torch.rand(5, device=DEVICE)
            return model(batch[0]), batch[1]

        Evaluation(create_evaluator(model, predict, {}), data(), name="val").attach(
            trainer, Events.ITERATION_COMPLETED(every=every)
        )
        trainer.run(data(), max_iters=6)
        return bits(model)

    assert same(trained(2), trained(100))


def test_generators_of_all_devices_are_captured_restored_isolated_and_derived():
    def drawn():
        return [torch.rand(3, device=device).cpu() for device in {DEVICE, SECOND}]

    torch.manual_seed(1)
    state = rng.capture()
    first = drawn()
    rng.restore(state)
    with rng.isolated():
        drawn()
    assert same(drawn(), first)

    rng.restore(rng.derived(state, 7))
    other = drawn()
    rng.restore(rng.derived(state, 7))
    assert same(drawn(), other) and not same(other, first)
    rng.seed_device(5, DEVICE)
    one = torch.rand(3, device=DEVICE)
    rng.seed_device(5, DEVICE)
    assert torch.equal(torch.rand(3, device=DEVICE), one)


def test_fp16_skips_what_overflows_and_reads_one_value_a_step():
    def loss_fn(model, batch):
        return mse(model, batch) * (1e30 if scale.pop(0) else 1.0)

    scale = [False, False, True, False, False, False]
    trainer = trainer_of(net(DEVICE), steps=None, loss_fn=loss_fn, precision="fp16", grad_scaler={"init_scale": 1024.0})
    waits = []
    if is_fake:
        trainer.add_event_handler(Events.ITERATION_STARTED, lambda: fake.counts() and None)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: waits.append(fake.counts().get("item", 0)))
    state = trainer.run(data(), max_iters=6)
    assert (state.optimizer_steps, state.skipped_steps) == (5, 1)
    assert all(count <= 2 for count in waits), waits


def test_times_are_the_devices_own_and_read_without_waiting():
    trainer = trainer_of(net(SECOND))
    times = StepTimes()
    times.attach(trainer, Events.ITERATION_COMPLETED(every=4))
    if is_fake:
        fake.counts()
    trainer.run(data(), max_epochs=2)
    waits = fake.counts() if is_fake else {}
    assert not {"wait_event", "wait_stream", "wait_device"} & waits.keys()
    clock = times._clock
    assert clock.steps == 8 and clock._before.device == SECOND  # read at the 4th and the 8th
    assert {"forward", "backward", "optimizer"} <= {part for part, seconds in clock.seconds.items() if seconds > 0}


def test_memory_is_the_devices():
    trainer = trainer_of(net(DEVICE))
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED(every=2))
    state = trainer.run(data(), max_epochs=1)
    assert all(state.metrics[f"memory/{name}_mib"] > 0 for name in ("allocated", "reserved", "peak"))


def test_profile_is_written(tmp_path):
    trainer = trainer_of(net(DEVICE))
    Profiler(tmp_path, wait=1, warmup=1, active=1).attach(trainer)
    trainer.run(data(), max_epochs=1)
    assert len(list((tmp_path / "profiles").glob("*.json.gz"))) == 1


def test_logged_losses_are_those_of_the_cpu(tmp_path):
    def logged(device):
        trainer, folder = trainer_of(net(device)), tmp_path / device.type
        MetricLogger(folder).attach(trainer, Events.ITERATION_COMPLETED(every=2))
        trainer.run(data(), max_epochs=1)
        return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]

    assert logged(DEVICE) == pytest.approx(logged(CPU), rel=0 if is_fake else 1e-6)


def test_snapshots_in_turn_each_hold_their_own_bytes():
    """Its pinned buffers are used again: for the next one only when the one before has been read."""
    snapshot, weight = Snapshot(), torch.zeros(1000, device=SECOND)
    for number in range(3):
        copied = snapshot.take({"weight": weight, "other": weight + number})
        weight.add_(1)
        snapshot.wait()
        assert copied["weight"].eq(number).all() and copied["other"].eq(2.0 * number).all()


def test_rank_invariant_runs_are_those_of_the_cpu():
    found = []
    for device in (DEVICE, CPU):
        model = net(device)
        update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, rank_invariant=True)
        Trainer(update, global_micro_batches=4).run(data(pinned=False), max_epochs=1)
        found.append(bits(model))
    assert same(*found) or not is_fake


def test_state_of_a_checkpoint_of_another_device_is_loaded(tmp_path):
    run_saved(net(DEVICE), tmp_path, 4)
    resumed = copy.deepcopy(net(CPU))
    trainer = trainer_of(resumed)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(trainer)
    checkpoint.resume()
    trainer.run(data(pinned=False), max_iters=6)
    assert trainer.state.iteration == 6 and next(resumed.parameters()).device == CPU


def test_generator_that_is_seeded_is_that_of_the_device_given():
    drawn = []
    for _ in range(2):
        rng.seed_device(5, SECOND)
        drawn.append(torch.rand(3, device=SECOND).cpu())
    assert torch.equal(*drawn)


def _note(found, logger):
    found.append(logger.state_dict())


def test_log_that_goes_on_is_saved_as_that_of_the_whole_run(tmp_path):
    """What a checkpoint had of the interval is on the CPU, and the rest on the device."""

    def saved(*stops):
        found = []
        for stop in stops:
            trainer, logger = trainer_of(net(DEVICE)), MetricLogger(console=False)
            logger.attach(trainer, Events.ITERATION_COMPLETED(every=100))
            checkpoint = Checkpoint(tmp_path / str(len(stops)))
            checkpoint.attach(trainer)
            checkpoint.resume()
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), partial(_note, found, logger))
            trainer.run(data(), max_iters=stop)
        return found

    assert_same(saved(2, 6), saved(6))


def test_meter_that_goes_on_reads_nothing_from_the_device():
    before, since = Meter("sum"), Meter("sum")
    for number in range(3):
        before.update(torch.tensor(float(number), device=DEVICE))
        since.update(torch.tensor(float(number), device=DEVICE))
    state = before.state_dict()
    since.continue_from(state | {"values": state["values"].cpu()})
    if is_fake:
        fake.counts()
    since._fold()
    assert since._running._total is not None and since._running._total.device.type == DEVICE.type
    assert not is_fake or not {"item", "to_host"} & fake.counts().keys()
    assert since.reduced() == (6.0, 6.0)


def test_kernels_whose_sums_may_change_are_in_the_report():
    trainer = trainer_of(net(DEVICE))
    (reason,) = trainer.reproducibility()
    assert reason.startswith(f"kernels of {DEVICE.type} may add in an order that changes")
    torch.use_deterministic_algorithms(True)
    try:
        assert trainer.reproducibility() == []
    finally:
        torch.use_deterministic_algorithms(False)
    assert trainer_of(net(CPU)).reproducibility() == []
