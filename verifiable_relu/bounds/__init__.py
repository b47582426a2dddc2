"""Interval and linear bound propagation over a network, with rounding accounted for.

Each part knows those before it alone:

    types, tuning           what is passed around, and every threshold
    envelope, activations   the image and the lines of each activation
    operators               products with the weights of affine maps
    rounding                the error of every step
    interval, rules         boxes of nodes from boxes of their inputs
    zonotope                bounds of all nodes by one forward pass, for boxes of few inputs
    forward                 bounds of all nodes, and the points about which rows are propagated
    float32, slack          which coefficients are in float32, and what rounding adds to rows
    lines, shifted          the lines of a relaxation's activations, and these about the points
    window, rows            coefficients in windows of images, and chunks of rows
    last_convolution, windowed, restrict
                            faster steps back, each of which can be left out
    backward                the walk
    chunks, work, relaxation
                            what bounds are asked of
    splits, tighten         CROWN
    adam, alpha             α-CROWN
    change                  how far outputs move when ReLU is substituted
"""

from verifiable_relu.bounds.activations import unstable
from verifiable_relu.bounds.alpha import (
    Ascent,
    ascend,
    neurons,
)
from verifiable_relu.bounds.change import substitution_change
from verifiable_relu.bounds.interval import input_box, interval_bounds
from verifiable_relu.bounds.relaxation import Relaxation
from verifiable_relu.bounds.tighten import crown_relaxation, preactivation_bounds
from verifiable_relu.bounds.tuning import MEMORY, PLAIN, TUNING, Tuning
from verifiable_relu.bounds.types import Bounds, Lines

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
