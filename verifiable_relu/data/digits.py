"""The reader of scikit-learn's digits: 1,797 images of 8×8 pixels, of which the first 1,347 are for training."""

from __future__ import annotations

from pathlib import Path

from verifiable_relu.data.samples import Samples, Split
from verifiable_relu.errors import missing

TRAINING = 1_347
"""The number of images of the training split, three quarters of all."""

_BRIGHTEST = 16


def read(folder: Path | None, split: Split) -> Samples:
    """The samples of a split, which scikit-learn brings; ``folder`` is not used.

    Raises:
        InputError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise missing("the data set 'digits'", "scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    part = slice(None, TRAINING) if split == "train" else slice(TRAINING, None)
    return Samples(images[part].reshape(-1, 1, 8, 8) / _BRIGHTEST, labels[part])
