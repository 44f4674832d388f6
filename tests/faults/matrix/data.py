"""Samples with random augmentation from every generator. Light: loader workers import only this module."""

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

WORDS = 20


class Samples(Dataset[Any]):
    """``((words, features), class)``, a function of the index, except for the augmentation.

    Args:
        augmentation: ``drawn`` from the global generators of Python, NumPy and torch, as most augmentation does;
            ``own`` from a generator of the sample; or None.
    """

    def __init__(self, count, augmentation):
        generator = torch.Generator().manual_seed(count)
        self.words = torch.randint(0, WORDS, (count, 5), generator=generator)
        self.features = torch.randn(count, 8, generator=generator)
        self.classes = torch.randint(0, 3, (count,), generator=generator)
        self.augmentation = augmentation

    def __len__(self):
        return len(self.classes)

    def __getitem__(self, index):
        words, features = self.words[index].clone(), self.features[index]
        if self.augmentation == "drawn":
            words[random.randrange(5)] = 0
            features = features * float(np.random.rand() < 0.9) + 0.1 * torch.randn(8)
        elif self.augmentation == "own":
            features = features + 0.1 * torch.randn(8, generator=torch.Generator().manual_seed(index))
        return (words, features), self.classes[index]
