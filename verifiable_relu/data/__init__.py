"""Real data sets in their official formats, as arrays in [0, 1]."""

from verifiable_relu.data.dataset import Dataset, load

__all__ = ["Dataset", "load"]
