"""Two networks with an optimizer each, trained in turn: a GAN that draws points on a ring of eight Gaussians.

    python examples/gan.py [runs/gan]

A checkpoint holds both and the average: a run that was stopped anywhere ends with the same weights.
"""

from __future__ import annotations

import math
import sys

import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.functional import softplus

from ignite_engine import Trainer, Update, Updates, loader, seed_everything
from ignite_engine.handlers import EMA, Checkpoint, GracefulStop, MetricLogger

NOISE = 8  # inputs of the generator


class GAN(nn.Module):
    """Both networks: what is trained, saved and averaged as one."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.generator, self.discriminator = network(NOISE, width, 2), network(2, width, 1)

    def sample(self, count: int) -> Tensor:
        points: Tensor = self.generator(torch.randn(count, NOISE))
        return points


def network(inputs: int, width: int, outputs: int) -> nn.Sequential:
    hidden = [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def discriminator_loss(gan: GAN, points: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Goodfellow et al. 2014, arXiv 1406.2661, equation 1, of logits."""
    made = gan.sample(len(points)).detach()
    real, generated = softplus(-gan.discriminator(points)).mean(), softplus(gan.discriminator(made)).mean()
    return real + generated, {"real": real.detach(), "generated": generated.detach()}


def generator_loss(gan: GAN, points: Tensor) -> Tensor:
    """The same paper's section 3: the generator maximizes log D(G(z))."""
    return softplus(-gan.discriminator(gan.sample(len(points)))).mean()


def ring(count: int) -> Tensor:
    """Points around eight centers on the unit circle, shape ``(count, 2)``."""
    angles = torch.randint(8, (count,)) * (math.pi / 4)
    return torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(count, 2)


def main(directory: str = "runs/gan", *, iterations: int = 1000) -> Trainer:
    """Train, or resume; the discriminator steps in each iteration, the generator in every second."""
    seed_everything(0)
    points, gan = ring(4096), GAN()
    of_discriminator = torch.optim.Adam(gan.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_generator = torch.optim.Adam(gan.generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    critic = Update(gan, of_discriminator, discriminator_loss)
    artist = Update(gan, of_generator, generator_loss, clip_norm=10.0)
    updates = Updates({"discriminator": critic, "generator": artist}, every={"generator": 2})
    trainer = Trainer(updates)
    EMA(0.99).attach(trainer, updates.stepped("generator"))
    MetricLogger(directory).attach(trainer, Events.ITERATION_COMPLETED(every=100))
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=500))
    GracefulStop().attach(trainer)
    checkpoint.resume()
    trainer.run(loader(points, 128, shuffle=True), max_iters=iterations)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
