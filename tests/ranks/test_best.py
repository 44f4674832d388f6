"""The best weights on two gloo ranks: agreed on, whole in DDP and FSDP2, saved in the background or not."""

import pytest
import torch
from ignite.engine import Events

from ignite_engine import create_evaluator, load_weights, loader
from ignite_engine.checkpointing import CheckpointError
from ignite_engine.handlers import Checkpoint, Evaluation
from ignite_engine.run_directory import weights_sha256
from tests.kit.sharded import in_layout, net, trainer_in
from tests.kit.tiny import Numbers, on_two_ranks

pytestmark = pytest.mark.distributed


def restored(folder, layout, background):
    """A run whose metric says that iteration 3 is the best, which each rank sees otherwise."""
    trainer, _, data = trainer_in(layout, folder / "other", optimizer="sgd")
    model = trainer.update.model
    seen = []
    evaluator = create_evaluator(model, lambda model, batch: seen.append(float(model(batch[0]).sum())), {})
    Evaluation(evaluator, loader(Numbers(8), 4)).attach(trainer, Events.ITERATION_COMPLETED(once=3))
    checkpoint = Checkpoint(
        folder / "run", name="other", best="val/score", mode="max", keep_last=1, background=background
    )
    checkpoint.attach(trainer, Events.COMPLETED)

    @trainer.on(Events.ITERATION_COMPLETED)
    def score():
        trainer.state.metrics["val/score"] = -abs(trainer.state.iteration - 3) + 0.0

    trainer.run(data, max_iters=6)
    best = checkpoint.restore_best()
    model.eval()
    outputs = [float(model(batch[0]).sum()) for batch in loader(Numbers(8), 4)]
    digest = weights_sha256(model)
    fresh, _ = in_layout(layout)
    load_weights(fresh, folder / "run", "best")
    plain = net()
    load_weights(plain, folder / "run" / "best")
    same = weights_sha256(fresh) == weights_sha256(plain) == digest
    return best.iteration, best.path.name, same, digest, outputs == seen


def refused(folder):
    """There is none."""
    trainer, _, _ = trainer_in("ddp", folder / "other")
    checkpoint = Checkpoint(folder / "none", name="other", best="val/score")
    checkpoint.attach(trainer)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore_best()
    return str(caught.value)


def cases(folder):
    torch.set_num_threads(1)
    answers = {
        f"{layout} {background}": restored(folder / f"{layout}{background}", layout, background)
        for layout in ("ddp", "fsdp")
        for background in (False, True)
    }
    return answers | {"refused": refused(folder)}


@pytest.mark.slow
def test_two_ranks_restore_the_weights_that_were_evaluated(tmp_path):
    answers = on_two_ranks(lambda rank: cases(tmp_path), tmp_path / "store")
    first, second = answers.pop("refused")
    assert first == second and "holds no valid checkpoint of this run with val/score" in first
    for name, (first, second) in answers.items():
        assert first[:4] == second[:4], name
        assert first[:3] == [3, "iteration_00000003", True] and first[4] and second[4], (name, first, second)
