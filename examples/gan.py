"""A small GAN: points on a ring of eight Gaussians. ``python examples/gan.py [runs/gan]``; the same command resumes.

Two networks, two optimizers, two steps of the discriminator for each of the generator, and an average of the weights. A
checkpoint holds all of it, so that a run that was stopped anywhere ends with the same weights.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.functional import softplus

from ignite_engine import Trainer, Update, Updates, loader, seed_everything
from ignite_engine.handlers import EMA, Checkpoint, GracefulStop, LRSchedule, MetricLogger
from ignite_engine.schedules import warmup_constant

NOISE = 8  # inputs of the generator


class GAN(nn.Module):
    """Both networks: what is trained, saved and averaged as one."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.generator = network(NOISE, width, 2)
        self.discriminator = network(2, width, 1)

    def sample(self, count: int) -> Tensor:
        """Points, shape ``(count, 2)``."""
        points: Tensor = self.generator(torch.randn(count, NOISE))
        return points


def network(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


def discriminator_loss(gan: GAN, points: Tensor) -> dict[str, Tensor]:
    """Goodfellow et al. 2014, arXiv 1406.2661, equation 1, of logits."""
    with torch.no_grad():
        generated = gan.sample(len(points))
    return {
        "real": softplus(-gan.discriminator(points)).mean(),
        "generated": softplus(gan.discriminator(generated)).mean(),
    }


def generator_loss(gan: GAN, points: Tensor) -> Tensor:
    """The same paper's section 3: the generator maximizes log D(G(z))."""
    return softplus(-gan.discriminator(gan.sample(len(points)))).mean()


def ring(count: int) -> Tensor:
    """Points around eight centers on the unit circle, shape ``(count, 2)``."""
    angles = torch.randint(8, (count,)) * (math.pi / 4)
    return torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(count, 2)


def make_trainer(gan: GAN, *, accumulation_steps: int | None = None, precision: str = "fp32") -> Trainer:
    """With schedules and average; the discriminator steps in each iteration, the generator in every second."""
    of_discriminator = torch.optim.Adam(gan.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_generator = torch.optim.Adam(gan.generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    updates = Updates(
        {
            "discriminator": Update(gan, of_discriminator, discriminator_loss, precision=precision),
            "generator": Update(gan, of_generator, generator_loss, precision=precision, clip_norm=10.0),
        },
        every={"generator": 2},
    )
    trainer = Trainer(updates, accumulation_steps)
    LRSchedule(warmup_constant(of_discriminator, 20), name="lr_schedule/discriminator").attach(trainer)
    LRSchedule(warmup_constant(of_generator, 10), name="lr_schedule/generator").attach(trainer)
    EMA(0.99).attach(trainer, updates.stepped("generator"))
    return trainer


def main(directory: str = "runs/gan", iterations: int = 1000) -> None:
    """Train, or resume what was stopped."""
    seed_everything(0)
    points = ring(4096)
    trainer = make_trainer(GAN())
    MetricLogger(directory).attach(trainer, Events.ITERATION_COMPLETED(every=100))
    checkpoint = Checkpoint(Path(directory) / "checkpoints")
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=500))
    GracefulStop().attach(trainer)
    checkpoint.resume()
    trainer.run(loader(points, 128, shuffle=True), max_iters=iterations)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/gan")
