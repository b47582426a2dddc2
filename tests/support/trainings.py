"""A small data set, and options with which its trainings take a moment."""

from __future__ import annotations

import numpy as np

from verifiable_relu.data import Dataset
from verifiable_relu.train.loop import Callback, TrainingStep
from verifiable_relu.train.options import Options

PER_EPOCH = 4
"""The steps of an epoch."""

BASE = Options("blobs", hidden=(12, 12), epochs=4, batch=50, rate=2e-2, eps=0.02, seed=5)


def blobs(n: int = 200) -> Dataset:
    """Noisy images of three classes around three fixed ones."""
    random = np.random.default_rng(1)
    centres = random.random((3, 1, 4, 4))
    labels = random.integers(0, 3, n)
    images = np.clip(centres[labels] + random.normal(0, 0.15, (n, 1, 4, 4)), 0, 1).astype(np.float32)
    return Dataset("blobs", images, labels, (0.5,), (0.3,), np.ones(n, bool))


def stop_at(last: int) -> Callback:
    """A callback that interrupts a training after the step ``last``."""

    def stop(state: TrainingStep) -> None:
        if state.step == last:
            raise KeyboardInterrupt

    return stop
