"""Interval and linear bound propagation over a network, with rounding accounted for."""

from verifiable_relu.bounds.interval import input_box, interval_bounds
from verifiable_relu.bounds.linear import linear_lower_bounds, preactivation_bounds, unstable
from verifiable_relu.bounds.types import Bounds, Lines

__all__ = [
    "Bounds",
    "Lines",
    "input_box",
    "interval_bounds",
    "linear_lower_bounds",
    "preactivation_bounds",
    "unstable",
]
