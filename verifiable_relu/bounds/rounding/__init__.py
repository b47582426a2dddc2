"""What rounding may change in bounds, and how far bounds are moved outward for it: the only place that adds an epsilon.

Verdicts are about real arithmetic on the stored weights; bounds are computed in floating point. Each function bounds
the rounding error of one named step of bound propagation. The bounds of errors are larger than needed by small constant
factors, so that they cover the rounding of their own few operations, too.

    model       the standard model of floating point, from which every error is derived
    coverage    where torch computes as that model says
    rows        steps of rows of coefficients on their way back through a network
    intervals   steps of boxes on their way forward
"""

from verifiable_relu.bounds.rounding.coverage import covers, float32_is_plain, keeps_activations
from verifiable_relu.bounds.rounding.intervals import (
    ball,
    band_outward,
    interval_activation,
    interval_affine,
    interval_products,
    interval_rows,
    interval_single,
    interval_sum,
    lines_outward,
    reach_single,
    share_single,
    widen,
)
from verifiable_relu.bounds.rounding.model import gamma, unit_roundoff, weight_share
from verifiable_relu.bounds.rounding.rows import (
    accumulate,
    backward_activation,
    backward_affine,
    backward_single,
    bilinear,
    concretise,
    lost,
    outward,
    point,
    radius,
    summed_single,
    total,
    value,
    weighed_single,
)

__all__ = [
    "accumulate",
    "backward_activation",
    "backward_affine",
    "backward_single",
    "ball",
    "band_outward",
    "bilinear",
    "concretise",
    "covers",
    "float32_is_plain",
    "gamma",
    "interval_activation",
    "interval_affine",
    "interval_products",
    "interval_rows",
    "interval_single",
    "interval_sum",
    "keeps_activations",
    "lines_outward",
    "lost",
    "outward",
    "point",
    "radius",
    "reach_single",
    "share_single",
    "summed_single",
    "total",
    "unit_roundoff",
    "value",
    "weighed_single",
    "weight_share",
    "widen",
]
