"""Interface from Python: questions about models, about two models at once, and certified radii."""

from verifiable_relu.api.changing import Change, verify_change
from verifiable_relu.api.verifying import (
    Around,
    Radii,
    Results,
    certified_radius,
    verify,
    verify_properties,
    verify_radii,
)

__all__ = [
    "Around",
    "Change",
    "Radii",
    "Results",
    "certified_radius",
    "verify",
    "verify_change",
    "verify_properties",
    "verify_radii",
]
