"""A run on a device: the CPU's bits, no wait of the host, saved and resumed exactly, whichever the device is."""

import copy
import json
import os
import signal
from functools import partial

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator
from ignite_engine.handlers import Checkpoint, Evaluation, MemoryLogger, MetricLogger, StepTimes
from ignite_engine.handlers.profiler import Profiler
from tests.device import fake
from tests.device.training import DEVICE, SECOND, Split, bits, data, net, run_saved, same, trainer_of
from tests.kit.processes import child, ended
from tests.kit.resume import leaves, same_bits
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
    iterations = 130  # values are added up before they are logged
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


class Moves:
    """A batch that moves itself."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        return Moves(self.tensor.to(device))


KINDS = {
    "pinned": lambda tensor: {"a": tensor.pin_memory()},
    "moves itself": lambda tensor: {"a": Moves(tensor.pin_memory())},
    "on the device already": lambda tensor: {"a": tensor.to(DEVICE)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", [DEVICE, SECOND], ids=["first", "second"])
def test_batches_are_whole_though_they_are_copied_while_the_one_before_is_computed(device, kind):
    model, seen = torch.nn.Linear(3, 1).to(device), []

    def loss_fn(model, batch):
        inputs = batch["a"].tensor if kind == "moves itself" else batch["a"]
        seen.append(inputs * 2)
        return model(inputs).mean()

    group = [KINDS[kind](torch.full((4, 3), float(number))) for number in range(9)]
    if is_fake:
        fake.counts()
    trainer_of(model, steps=3, loss_fn=loss_fn).run(group, max_epochs=1)
    assert not is_fake or kind != "pinned" or fake.counts()["to_device_later"] == 9
    for number, tensor in enumerate(seen):
        assert tensor.device == next(model.parameters()).device and tensor.cpu().eq(2.0 * number).all()


@pytest.mark.parametrize("where", ["first", "second", "split"])
def test_background_saves_hold_the_state_of_their_iteration(where, tmp_path):
    first, second = {"first": (DEVICE, DEVICE), "second": (SECOND, SECOND), "split": (DEVICE, SECOND)}[where]

    def saved(background):
        torch.manual_seed(3)
        folder = tmp_path / str(background)
        store = run_saved(Split(first, second), folder, 8, background=background).store
        parts = {info.iteration: store.load(info.path).shared for info in store.checkpoints()}
        return {at: {name: part[name] for name in ("model", "optimizer")} for at, part in parts.items()}

    beside, waited = saved(True), saved(False)
    assert sorted(waited) == list(range(1, 9))
    assert_same(beside, waited)


def assert_same(one, other):
    found, expected = dict(leaves(one)), dict(leaves(other))
    assert found.keys() == expected.keys() and all(same_bits(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("device", [DEVICE, SECOND], ids=["first", "second"])
def test_resumed_at_every_iteration_with_dropout_to_the_same_bits(device, tmp_path):
    def run(folder, until, seed=1):
        model = net(device, dropout=0.5)
        torch.manual_seed(seed)
        run_saved(model, tmp_path / folder, until)
        return bits(model), torch.rand(3, device=device).cpu()

    whole, drawn = run("whole", 7)
    for stop in range(1, 7):
        run(str(stop), stop)
        found, then = run(str(stop), 7, seed=stop + 1)  # another process draws other numbers
        assert same(found, whole) and torch.equal(then, drawn), stop


def test_process_killed_with_dropout_on_the_device_resumes_to_the_bits_of_the_whole_run(tmp_path):
    def run(folder, kill_at=None):
        torch.manual_seed(3 if folder == "whole" or kill_at else 8)
        model = net(DEVICE, dropout=0.3)
        assert next(model.parameters()).device.type == DEVICE.type != "cpu"
        trainer = trainer_of(model)
        evaluator = create_evaluator(model, lambda model, batch: model(batch[0]).mean(), {})
        Evaluation(evaluator, data()).attach(trainer, Events.ITERATION_COMPLETED(every=3))
        checkpoint = Checkpoint(tmp_path / folder, background=True)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
        checkpoint.resume()

        @trainer.on(TrainingEvents.BACKWARD_COMPLETED)
        def die():
            if trainer.state.iteration == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.run(data(), max_iters=12)
        return [tensor.tolist() for tensor in bits(model)], torch.rand(3, device=DEVICE).tolist()

    whole = child(run, "whole")
    assert ended(run, "cut", 7)[0] == -signal.SIGKILL
    saved = [int(path.name[-2:]) for path in (tmp_path / "cut").glob("iteration_*")]
    assert saved and max(saved) < 7
    assert child(run, "cut") == whole


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
    assert all(trainer.state.metrics[f"time/{part}_ms"] > 0 for part in ("forward", "backward", "optimizer"))


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


def test_rank_invariant_runs_are_those_of_the_cpu():
    found = []
    for device in (DEVICE, CPU):
        model = net(device)
        update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, accumulate="rank_invariant")
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
