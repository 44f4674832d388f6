"""An update of one's own through ``Update.accumulate``: the bits of the loop written by hand, and exact resume."""

import pytest
import torch
from torch import nn

from ignite_engine import Trainer, Update, loader
from tests.kit.floors import needs
from tests.kit.refusals import refuses
from tests.kit.resume import Program, assert_resumes
from tests.kit.tiny import Numbers, linear, mse, one

EPOCHS, BATCH, STEPS = 3, 4, 2
RHO = 0.05


def climb(parameters):
    """Go where the loss is highest near the weights; what brings them back."""
    held = [parameter.detach().clone() for parameter in parameters]
    norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(parameter.grad * (RHO / (norm + 1e-12)))
    return lambda: [parameter.data.copy_(value) for parameter, value in zip(parameters, held, strict=True)]


class SharpnessAwareUpdate(Update):
    """Two passes over the group: the gradient is taken where the loss is highest near the weights."""

    def accumulate(self, engine, micro_batches, scales):
        output = super().accumulate(engine, micro_batches, scales)
        go_back = climb(list(self.model.parameters()))
        nearby = super().accumulate(engine, micro_batches, scales)
        go_back()
        return output | {"loss/nearby": nearby["loss"]}


def by_hand(model, batches, *, precision, clip_norm):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def gradients(group):
        optimizer.zero_grad()
        for batch in group:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                loss = mse(model, batch)
            (loss / len(group)).backward()

    for start in [*range(0, len(batches), STEPS)] * EPOCHS:
        group = batches[start : start + STEPS]
        gradients(group)
        go_back = climb(list(model.parameters()))
        gradients(group)
        go_back()
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return one(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_have_the_bits_of_the_loop_written_by_hand(precision):
    data = Numbers(20)
    batches = [(data.inputs[at : at + BATCH], data.targets[at : at + BATCH]) for at in range(0, 20, BATCH)]
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    update = SharpnessAwareUpdate(model, optimizer, mse, precision=precision, clip_norm=0.5)
    state = Trainer(update, STEPS).run(batches, max_epochs=EPOCHS)

    assert torch.equal(one(model), by_hand(linear(), batches, precision=precision, clip_norm=0.5))
    assert state.output["loss/nearby"] > state.output["loss"] and state.optimizer_steps == 3 * EPOCHS


@needs("rank_invariant")
def test_two_passes_are_the_same_with_rank_invariant_sums():
    ends = []
    for options in ({"accumulate": "rank_invariant"}, {}):
        model = linear(dtype=torch.float64)
        update = SharpnessAwareUpdate(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, **options)
        trainer = Trainer(update, **({"global_micro_batches": 2} if options else {"accumulation_steps": 2}))
        trainer.run(loader(Numbers(16, dtype=torch.float64), 4), max_epochs=2)
        ends.append(one(model))

    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-14)
    assert not torch.equal(ends[0], one(linear(dtype=torch.float64)))


class NoisyUpdate(Update):
    """Noise on the gradients (Neelakantan et al. 2015, arXiv 1511.06807)."""

    def accumulate(self, engine, micro_batches, scales):
        output = super().accumulate(engine, micro_batches, scales)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad += 0.01 * torch.randn_like(parameter.grad)
        return output


def test_gradient_noise_is_resumed_exactly(tmp_path):
    losses = []
    for kind in (Update, NoisyUpdate):

        def build(kind=kind):
            torch.manual_seed(3)
            model = linear(dropout=True)
            return Trainer(kind(model, torch.optim.SGD(model.parameters(), lr=0.1), mse), accumulation_steps=2)

        made = Program(build, lambda: loader(Numbers(24), 4, shuffle=True, seed=1), {"max_epochs": 2})
        assert_resumes(made, tmp_path / kind.__name__, at=(2, 4), how=["stop"])
        losses.append(build().run(made.data(), max_epochs=2).output["loss"].item())
    assert losses[0] != losses[1]


def test_what_accumulate_returns_has_a_loss():
    class Silent(Update):
        def accumulate(self, engine, micro_batches, scales):
            super().accumulate(engine, micro_batches, scales)
            return {}

    model, data = linear(), Numbers(4)
    update = Silent(model, torch.optim.SGD(model.parameters(), lr=0.1), mse)
    refuses(lambda: Trainer(update).run([(data.inputs, data.targets)]), ValueError, "accumulate() dict 'loss' {}")
