"""Interval and linear bound propagation over a network, with rounding accounted for."""

from verifiable_relu.bounds.activations import unstable
from verifiable_relu.bounds.change import substitution_change
from verifiable_relu.bounds.crown import (
    Ascent,
    ascend,
    crown_relaxation,
    neurons,
    preactivation_bounds,
)
from verifiable_relu.bounds.forward import input_box, interval_bounds
from verifiable_relu.bounds.relaxation import Relaxation
from verifiable_relu.bounds.tuning import MEMORY, PLAIN, TUNING, Bounds, Lines, Tuning

__all__ = [
    "MEMORY",
    "PLAIN",
    "TUNING",
    "Ascent",
    "Bounds",
    "Lines",
    "Relaxation",
    "Tuning",
    "ascend",
    "crown_relaxation",
    "input_box",
    "interval_bounds",
    "neurons",
    "preactivation_bounds",
    "substitution_change",
    "unstable",
]
