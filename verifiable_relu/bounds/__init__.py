"""Interval and linear bound propagation over a network, with rounding accounted for.

Each part knows those before it alone:

    tuning        what is passed around, every threshold, and how many rows go together
    activations   the image and the lines of each activation
    sums, operators
                  products with the weights of affine maps
    rounding      the error of every step
    kinds         interval arithmetic of each kind of node
    forward       bounds of all nodes, and the points about which rows are propagated
    zonotope      bounds of all nodes by one forward pass, for boxes of few inputs
    slack         what rounding adds to rows, and the lines of a relaxation's activations
    windowed      faster steps back, each of which can be left out
    relaxation    the walk back, and what bounds are asked of
    crown         CROWN and α-CROWN
    change        how far outputs move when ReLU is substituted
"""

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
