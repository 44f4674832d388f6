"""What a loss function may return, the error where it returns something else, and what is reported of a group."""

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_engine import Trainer, Update
from tests.kit.refusals import refusals
from tests.kit.tiny import Numbers, linear, mse, one


def trained(loss_fn, steps=2, **options):
    model, data = linear(), Numbers(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(data.inputs[start : start + 2], data.targets[start : start + 2]) for start in range(0, 8, 2)]
    state = Trainer(Update(model, optimizer, loss_fn, **options), steps).run(batches)
    return one(model), state.output


def test_a_loss_that_is_a_parameter_itself_moves_it_by_the_same_each_time():
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    Trainer(Update(model, optimizer, lambda model, batch: model.weight), 2).run([torch.ones(1)] * 8, max_epochs=1)
    assert model.weight.item() == pytest.approx(before - 4 * 0.25)


def summed(model, batch):
    return mse(model, batch) + 0.1 * next(model.parameters()).square().sum()


FORMS = {
    "one element": (lambda model, batch: summed(model, batch).reshape(1), []),
    "one element of two dimensions": (lambda model, batch: summed(model, batch).reshape(1, 1), []),
    "with others": (lambda m, b: (summed(m, b), {"count": (b[1] > -9).sum()}), ["count"]),
}


@pytest.mark.row("A8")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_loss_trains_alike(form, steps, precision):
    loss_fn, names = FORMS[form]
    weights, output = trained(loss_fn, steps, precision=precision)
    expected, whole = trained(summed, steps, precision=precision)

    assert torch.equal(weights, expected) and torch.equal(output["loss"], whole["loss"])
    assert list(output) == ["loss", *names]
    assert not any(value.requires_grad or value.dim() for value in output.values())
    assert float(output.get("count", 2)) == 2.0  # a count is averaged too


@pytest.mark.parametrize("steps", [None, 2])
def test_reported_views_do_not_keep_the_whole_tensor(steps):
    def loss_fn(model, batch):
        large = torch.zeros(1000) + mse(model, batch)
        return large[0], {"first": large.detach()[1], "last": large[-1:]}

    output = trained(loss_fn, steps)[1]

    assert {name: value.untyped_storage().nbytes() for name, value in output.items()} == dict.fromkeys(output, 4)
    assert torch.equal(output["first"], output["loss"]) and output["last"].shape == ()


class Tempered(nn.Module):
    """CLIP's logit scale, and a buffer of one element that each forward writes to."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch):
        self.seen += 1
        return self.logit_scale * batch.mean()


REPORTED = {
    "parameter": lambda model: model.logit_scale,
    "detached parameter": lambda model: model.logit_scale.detach(),
    "view of a parameter": lambda model: model.logit_scale.view(1),
    "buffer": lambda model: model.seen,
    "view of a buffer": lambda model: model.seen[0],
    "alias in numpy": lambda model: torch.from_numpy(model.seen.numpy()),
}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", REPORTED)
def test_a_reported_value_keeps_its_number_when_the_model_changes(name, steps):
    model, outputs, at_once = Tempered(), [], []

    def loss_fn(model, batch):
        loss, value = model(batch), REPORTED[name](model)
        at_once.append(value.item())
        return loss, {"value": value}

    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.5), loss_fn), steps)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: outputs.append(trainer.state.output["value"]))
    trainer.run([torch.ones(2)] * 6, max_epochs=1)

    groups = [at_once[start : start + steps] for start in range(0, 6, steps)]
    assert [output.item() for output in outputs] == [sum(group) / len(group) for group in groups]
    assert len({output.item() for output in outputs}) == len(outputs)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_errors_of_the_users_own_stay_as_they_are():
    def failing(model, batch):
        raise KeyError("mine")

    def failing_in_backward(model, batch):
        loss = mse(model, batch)
        loss.register_hook(failing)  # one argument is missing
        return loss

    with pytest.raises(KeyError, match="mine"):
        trained(failing)
    with pytest.raises(TypeError, match="argument"):
        trained(failing_in_backward)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_error_of_the_model_is_noted_with_the_shapes_of_its_batch(precision):
    model = linear()
    update = Update(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b["x"].T).mean(), precision=precision
    )
    batch = {"x": torch.ones(5, 3), "y": [torch.ones(5, dtype=torch.int64), "a text"]}
    with pytest.raises(RuntimeError, match="shapes") as raised:
        Trainer(update).run([batch], max_epochs=1)
    (note,) = [note for note in raised.value.__notes__ if "batch" in note]
    assert "'x': Tensor [5, 3] float32" in note and "[Tensor [5] int64, str]" in note


class Full:
    """A loss function that runs out of memory in its third call; ``late``: in backward."""

    def __init__(self, late):
        self.late, self.calls = late, 0

    def __call__(self, model, batch):
        loss, self.calls = mse(model, batch), self.calls + 1
        if self.calls == 3:
            if not self.late:
                self.fail()
            loss.register_hook(self.fail)
        return loss

    def fail(self, *_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has more to say.")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("kind", "steps", "iteration"), [(Engine, [], 3), (Trainer, [], 3), (Trainer, [2], 2)])
def test_a_micro_batch_that_does_not_fit_into_memory_is_named_with_its_shapes(kind, steps, iteration, late):
    model, data = linear(), Numbers(20)
    batches = [(data.inputs[start:end], data.targets[start:end]) for start, end in ((0, 2), (2, 4), (4, 11), (11, 12))]
    engine = kind(Update(model, torch.optim.SGD(model.parameters(), lr=0.05), Full(late)), *steps)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        engine.run(batches, max_epochs=1)
    message = str(raised.value)
    assert "\n" not in message and "more to say" not in message
    for words in ("rank 0", f"iteration {iteration}", "Tensor [7, 3] float32", "accumulation_steps", "allocate 2 GiB"):
        assert words in message


def returning(result):
    """A run whose loss function returns ``result(loss)``."""
    return lambda: trained(lambda model, batch: result(mse(model, batch)))


def alternating(*results):
    """Its results in turn."""
    left = list(results)
    return lambda: trained(lambda model, batch: left.pop(0)(mse(model, batch)))


test_refusals = refusals(
    [
        ("number", returning(lambda loss: 0.5), ValueError, "float tensor of one element item()"),
        ("item", returning(lambda loss: loss.item()), ValueError, "float without item()"),
        ("nothing", returning(lambda loss: None), ValueError, "NoneType tensor"),
        ("a text", returning(lambda loss: "word"), ValueError, "str tensor"),
        ("several elements", returning(lambda loss: loss.repeat(3)), ValueError, "[3] one element mean"),
        ("no gradient", returning(lambda loss: loss.detach()), ValueError, "requires_grad detach()"),
        ("triple", returning(lambda loss: (loss, {}, {})), ValueError, "{} (loss, {name:"),
        ("pair of losses", returning(lambda loss: (loss, loss)), ValueError, "Tensor [] name reported"),
        ("a number beside it", returning(lambda loss: (loss, {"a": 1})), ValueError, "'a': int torch.tensor"),
        ("a vector beside it", returning(lambda loss: (loss, {"a": torch.ones(2)})), ValueError, "'a': Tensor [2]"),
        ("losses by name", returning(lambda loss: {"a": loss, "b": loss}), ValueError, "'a': Tensor [] Add"),
        ("a name of ours", returning(lambda loss: (loss, {"grad_norm": loss})), ValueError, "'grad_norm' choose"),
        ("other names", alternating(lambda x: (x, {"a": x}), lambda x: (x, {"b": x})), ValueError, "names 'a' 'b'"),
        ("no names", alternating(lambda x: (x, {"a": x}), lambda x: x), ValueError, "same names for 2"),
    ]
)  # fmt: skip
