"""MONAI's SupervisedTrainer: stopped by Ctrl-C or killed, the same command continues it with the same bits.

    pip install monai
    python examples/monai_trainer.py [runs/monai_trainer]

The task is made up: find the bright squares in noise. Augmentation draws random numbers, which a resume continues, too.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from ignite.engine import Events
from torch.utils.data import Dataset

from ignite_engine import loader
from ignite_engine.handlers import Checkpoint, GracefulStop, MetricLogger

try:
    from monai.engines import SupervisedTrainer
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet
    from monai.transforms import Compose, RandFlipd, RandGaussianNoised
except ModuleNotFoundError as error:
    sys.exit(f"This example needs MONAI, and {error.name} is not installed: pip install monai")


class Squares(Dataset[dict[str, torch.Tensor]]):
    """Images ``(1, 32, 32)`` with a bright square each, and its mask."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.augment = Compose([RandFlipd(["image", "label"], prob=0.5), RandGaussianNoised("image", prob=0.5)])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        draws = torch.Generator().manual_seed(index)
        label = torch.zeros(1, 32, 32)
        row, column = torch.randint(24, (2,), generator=draws).tolist()
        label[:, row : row + 8, column : column + 8] = 1
        return self.augment({"image": label + torch.randn(1, 32, 32, generator=draws), "label": label})


def main(directory: str = "runs/monai_trainer", *, epochs: int = 5) -> None:
    """Train, or resume."""
    torch.manual_seed(0)
    model = UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 16, 32), strides=(2, 2))
    trainer = SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=epochs,
        train_data_loader=loader(Squares(256), batch_size=16, shuffle=True, seed=0),
        network=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        loss_function=DiceLoss(sigmoid=True),
    )
    MetricLogger(directory).attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint = Checkpoint(f"{directory}/checkpoints")  # it finds what the trainer holds
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    GracefulStop().attach(trainer)
    checkpoint.resume()
    trainer.run()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print(f"{trainer.state.iteration} iterations, weights {hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
