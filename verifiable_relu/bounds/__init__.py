"""Interval and linear bound propagation over a network, with rounding accounted for."""

from verifiable_relu.bounds.activations import unstable
from verifiable_relu.bounds.alpha import Ascent, alpha_lower_bounds, alpha_preactivation_bounds, ascend, neurons
from verifiable_relu.bounds.change import substitution_change
from verifiable_relu.bounds.interval import input_box, interval_bounds
from verifiable_relu.bounds.linear import Relaxation, linear_lower_bounds, preactivation_bounds, relaxed
from verifiable_relu.bounds.types import Bounds, Lines

__all__ = [
    "Ascent",
    "Bounds",
    "Lines",
    "Relaxation",
    "alpha_lower_bounds",
    "alpha_preactivation_bounds",
    "ascend",
    "input_box",
    "interval_bounds",
    "linear_lower_bounds",
    "neurons",
    "preactivation_bounds",
    "relaxed",
    "substitution_change",
    "unstable",
]
