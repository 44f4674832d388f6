"""An evaluation leaves no trace but its numbers; of whose data, and when."""

import multiprocessing

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average, Loss
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from ignite_engine import Trainer, TrainingEvents, create_evaluator, loader
from ignite_engine.handlers import Evaluation
from tests.kit.processes import child
from tests.kit.refusals import refusals
from tests.kit.tiny import Numbers, Passes, linear, numbers_loader, trainer_of, weights

EACH = Events.ITERATION_COMPLETED


def predict(model, batch):
    return model(batch[0]), batch[1]


def evaluator_of(trainer, function=predict, **options):
    return create_evaluator(trainer.update.model, function, {"loss": Loss(nn.functional.mse_loss)}, **options)


def averaging():
    """The mean of the batches."""
    return create_evaluator(nn.Linear(1, 1), lambda model, batch: batch, {"mean": Average()})


def numbers(count):
    return [torch.tensor([float(index)]) for index in range(count)]


class Seen(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def test_metrics_are_those_of_the_whole_set():
    trainer, data = trainer_of(), Numbers(7)
    Evaluation(evaluator_of(trainer), numbers_loader(7, 2)).attach(trainer)
    state = trainer.run(numbers_loader())
    with torch.no_grad():
        expected = nn.functional.mse_loss(trainer.update.model(data.inputs), data.targets)

    assert state.metrics["val/loss"] == pytest.approx(expected.item(), rel=1e-6) and state.evaluations == 1


class Observer(nn.Module):
    """Writes its buffers in eval mode too, as those of quantization do; what it has seen changes the loss."""

    def __init__(self):
        super().__init__()
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("resized", torch.zeros(0))

    def forward(self, values):
        self.written.add_(values.detach().sum())
        self.replaced = self.replaced + self.written
        self.resized.resize_(len(values)).fill_(self.replaced)
        return values + self.resized[0].tanh()


@pytest.mark.row("A3")
@pytest.mark.parametrize("observed", [False, True])
def test_training_does_not_notice_an_evaluation(observed):
    def run(evaluate):
        model = linear(dropout=True)
        trainer, tracked = trainer_of(nn.Sequential(Observer(), *model) if observed else model), []

        def draw(model, batch):
            torch.rand(3)
            outputs, targets = predict(model, batch)
            tracked.append(outputs.requires_grad)
            return outputs, targets

        if evaluate:
            evaluation = Evaluation(evaluator_of(trainer, draw), numbers_loader(5))
            evaluation.attach(trainer, Events.STARTED | EACH(every=2))
        torch.manual_seed(8)
        state = trainer.run(numbers_loader(shuffle=True), max_epochs=2)
        assert state.evaluations == (7 if evaluate else 0) and not any(tracked)
        return weights(trainer)

    assert torch.equal(run(True), run(False))


@pytest.mark.row("A3")
def test_modes_come_back_module_by_module():
    trainer, modes = trainer_of(linear(dropout=True)), []
    model = trainer.update.model

    def look(model, batch):
        modes.append([module.training for module in model.modules()])
        return predict(model, batch)

    trainer.add_event_handler(Events.ITERATION_STARTED(once=1), lambda: model[1].eval())
    Evaluation(evaluator_of(trainer, look), numbers_loader(4)).attach(trainer, EACH(once=2))
    trainer.run(numbers_loader())

    assert modes == [[False] * 5] * 2
    assert [module.training for module in model.modules()] == [True, True, False, True, True]


@pytest.mark.row("C3", "C6")
def test_predictions_reach_handlers_in_a_precision_of_their_own():
    trainer, got = trainer_of(), []
    evaluator = evaluator_of(trainer, precision="bf16")
    evaluator.add_event_handler(EACH, lambda: got.append(evaluator.state.output))
    Evaluation(evaluator, numbers_loader(4)).attach(trainer)
    trainer.run(numbers_loader(4))

    assert [(each.shape, each.dtype, target.shape) for each, target in got] == [((2, 1), torch.bfloat16, (2, 1))] * 2


def test_an_evaluator_works_again_after_an_error():
    trainer, failing = trainer_of(), [True]

    def fail_once(model, batch):
        if failing.pop() if failing else False:
            raise OSError("gone")
        return predict(model, batch)

    Evaluation(evaluator_of(trainer, fail_once), numbers_loader(4)).attach(trainer)
    with pytest.raises(OSError, match="gone") as caught:
        trainer.run(numbers_loader(4))
    notes = "\n".join(caught.value.__notes__)
    assert "The batch: [Tensor [" in notes and "handler Evaluation on EPOCH_COMPLETED" in notes
    assert trainer.update.model.training
    state = trainer.run(numbers_loader(4))
    assert state.evaluations == 1 and state.metrics["val/loss"] > 0


@pytest.mark.parametrize(
    ("attach", "runs", "evaluations"),
    [
        # an iteration is evaluated once: at 3, and at 6
        (
            lambda trainer, each: each.attach(trainer, EACH(every=3) | Events.EPOCH_COMPLETED | Events.COMPLETED),
            [1],
            [2],
        ),
        (lambda trainer, each: each.attach(trainer), [1, 1], [1, 1]),  # a second run evaluates again
        (lambda trainer, each: each.attach(trainer, Events.STARTED), [1, 2], [1, 1]),  # but not one that continues
    ],
)
def test_it_is_evaluated_once_at_each_event(attach, runs, evaluations):
    trainer = trainer_of()
    attach(trainer, Evaluation(evaluator_of(trainer), numbers_loader(4)))
    assert [trainer.run(numbers_loader(), max_epochs=epochs).evaluations for epochs in runs] == evaluations


@pytest.mark.row("C1")
def test_several_sets_have_each_their_own_interval():
    trainer, order = trainer_of(), []
    for name, event in (("val", Events.EPOCH_COMPLETED), ("test", EACH(every=4))):
        evaluator = evaluator_of(trainer)
        evaluator.add_event_handler(
            Events.COMPLETED, lambda *, name=name: order.append((name, trainer.state.iteration))
        )
        Evaluation(evaluator, numbers_loader(4), name=name).attach(trainer, event)
    state = trainer.run(numbers_loader(), max_epochs=2)

    assert order == [("test", 4), ("val", 6), ("test", 8), ("test", 12), ("val", 12)]
    assert {"val/loss", "test/loss"} <= set(state.metrics) and state.evaluations == 5


def two_of_a_name():
    trainer = trainer_of()
    for _ in range(2):
        Evaluation(evaluator_of(trainer), numbers_loader(4)).attach(trainer)


def without_a_batch():
    trainer = trainer_of()
    Evaluation(evaluator_of(trainer), DataLoader(Subset(Numbers(4), []), batch_size=2)).attach(trainer)
    try:
        trainer.run(numbers_loader())
    finally:
        assert trainer.state.iteration == 0


def of_a_function(**options):
    Evaluation(averaging(), lambda: numbers(2), **options)


test_refusals = refusals(
    [
        ("no batch", without_a_batch, ValueError, "'val' needs a batch got 0"),
        ("limit", lambda: Evaluation(averaging(), numbers(4), limit=0), ValueError, "limit at least 1 got 0"),
        ("two of a name", two_of_a_name, ValueError, "evaluation/val"),
        ("goes on in other data", lambda: of_a_function(resumes=True), ValueError, "resumes one loader"),
        ("no engine", lambda: Evaluation(len, numbers(4)), TypeError, "evaluator create_evaluator()"),
    ]
)


@pytest.mark.row("C1")
@pytest.mark.parametrize(
    ("counts", "limit", "seen"), [((3, 9, 4), None, [3, 9, 4]), ((3, 9, 4), 4, [3, 4, 4]), (10, 3, [3, 3, 3])]
)
def test_each_evaluation_takes_the_first_batches_of_a_pass_of_any_length(counts, limit, seen):
    trainer, evaluator, found, means = trainer_of(), averaging(), [], []
    data = numbers(counts) if isinstance(counts, int) else Passes(*counts)
    Evaluation(evaluator, data, limit=limit).attach(trainer)

    @trainer.on(TrainingEvents.EVALUATION_COMPLETED)
    def note():
        found.append(evaluator.state.iteration)
        means.append(trainer.state.metrics["val/mean"] % 100)

    trainer.run(numbers_loader(4), max_epochs=3)
    assert found == seen and means == [(count - 1) / 2 for count in seen]


def evaluated_in_its_pass(**options):
    data, trained, evaluated = loader(Seen(), batch_size=4, **options), [], []
    trainer = Trainer(lambda engine, batch: trained.extend(batch.flatten().tolist()))
    note = create_evaluator(nn.Linear(1, 1), lambda model, batch: evaluated.extend(batch.flatten().tolist()))
    Evaluation(note, data).attach(trainer, EACH(every=2))
    trainer.run(data, max_epochs=2)
    return trained, evaluated


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_the_training_loader_can_be_evaluated_in_the_middle_of_its_pass(options):
    """Workers that persist have one iterator: a second pass would end that of the training."""
    # in a process of its own, as the garbage collector waits for such workers
    trained, evaluated = child(lambda: evaluated_in_its_pass(**options))
    assert trained == [*range(24)] * 2 and evaluated == [*range(24)] * 6


@pytest.mark.parametrize("kind", [loader, StatefulDataLoader])
def test_no_worker_of_an_evaluation_is_left(kind):
    """Torchdata's were ended by the garbage collector, which waited 5 s for each."""
    trainer, alive = trainer_of(), []
    data = kind(Numbers(6), 2, num_workers=2)
    Evaluation(create_evaluator(trainer.update.model, lambda model, batch: None), data).attach(trainer)
    before = len(multiprocessing.active_children())
    trainer.add_event_handler(
        TrainingEvents.EVALUATION_COMPLETED, lambda: alive.append(len(multiprocessing.active_children()))
    )
    trainer.run(numbers_loader(4), max_epochs=2)
    assert alive == [before] * 2
